"""Real servers on loopback, each with a folder and a port of its own; they end with the block that began them."""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lakeupsert.testing.processes import wait_until

HOST = "127.0.0.1"


def require(path: Path, how: str) -> Path:
    """The server's program; where it is missing, CI fails and everybody else skips the test, told ``how`` to get it."""
    if not path.exists():
        reason = f"{path.name} is not there: {how}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(command: Sequence[str | Path], port: int, log: Path, env: Mapping[str, str] = {}) -> Iterator[None]:
    """Run a server that listens on ``port``; the block begins when it takes connections."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, f"{command[0]} ended by itself: {log.read_text(errors='replace')[-2000:]}"
            with socket.socket() as probe:
                return probe.connect_ex((HOST, port)) == 0

        wait_until(listens, f"{command[0]} takes connections at port {port}")
        yield
    finally:
        process.terminate()
        process.wait()
