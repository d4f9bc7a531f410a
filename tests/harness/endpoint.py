"""Servers of `lakeupsert serve`, each a process, and what they landed."""

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import lakeupsert
from lakeupsert.endpoint.batches import FOLDER
from lakeupsert.errors import TryAgainError
from lakeupsert.storage import open_store
from tests.harness.processes import wait_until

CONFIG = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
order_by = ["ts"]
"""
PATH = "/tables/sales/batches/"


class Server:
    """A server process and one connection a request."""

    def __init__(self, folder: Path, *options: str, token: str | None = None, limits: str = "") -> None:
        self.folder, self.token = folder, token
        env = {**os.environ, **({"LAKEUPSERT_TOKEN": token} if token else {})}
        command = [
            sys.executable,
            "-c",
            f"from lakeupsert import retries; {limits}\nfrom lakeupsert.cli import main; main()",
        ]
        self.process = subprocess.Popen(
            [*command, "serve", "--port", "0", *options],
            cwd=folder,
            env=env,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        found = re.search(r"at http://127.0.0.1:(\d+)", said)
        assert found, said + self.process.stderr.read()
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/tables/sales"

    def post(
        self, batch_id: str, body: object, type_: str = "text/csv", **headers: str
    ) -> tuple[int, dict[str, Any], Message]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Content-Type": type_, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if self.token and "Authorization" not in given:
            given["Authorization"] = f"Bearer {self.token}"
        connection.request("POST", PATH + batch_id, body, given)  # type: ignore[arg-type]
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content, answer.headers

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def served(folder: Path, *options: str, **more: str) -> Iterator[Server]:
    server = Server(folder, *options, **more)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def landed(folder: Path) -> list[str]:
    landing = open_store(lakeupsert.Table.open(folder / "lakeupsert.toml").settings.landing)
    return sorted(found.name.removeprefix(f"{FOLDER}/") for found in landing.list(f"{FOLDER}/"))


def merged(folder: Path) -> Any:
    table = lakeupsert.Table.open(folder / "lakeupsert.toml")
    table.run(host="local", workers=1)
    return table.to_arrow().read_all().sort_by("id").to_pylist()


def kill_server(folder: Path, cases: int, seed: int) -> None:
    """Clients repeat batches while the server is killed again and again: what was acknowledged is merged, and counts once."""
    chance, port_file = random.Random(seed), folder / "port"
    done = threading.Event()
    lock, acknowledged = threading.Lock(), set()

    def start() -> Server:
        server = Server(folder)
        port_file.with_suffix(".new").write_text(server.url)
        port_file.with_suffix(".new").rename(port_file)
        return server

    def send(client: int) -> None:
        number = 0
        while not done.is_set():
            name = f"{client}-{number}"
            rows = [{"id": name, "day": f"2020-01-0{1 + number % 3}", "ts": number, "v": client}]
            while True:
                try:
                    lakeupsert.Client(port_file.read_text()).send(rows, name)
                    break
                except TryAgainError:
                    if done.is_set():
                        return
            with lock:
                acknowledged.add(name)
            number += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lakeupsert.endpoint.client.PAUSE_SECONDS", 0.01)
        server = start()
        threads = [threading.Thread(target=send, args=(client,)) for client in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(cases):
            before = len(acknowledged)
            wait_until(lambda: len(acknowledged) > before, "the next answer", 0.005)  # noqa: B023  called in this turn only
            time.sleep(chance.uniform(0, 0.2))
            server.end(signal.SIGKILL)
            server = start()
        done.set()
        for thread in threads:
            thread.join()
        assert server.end() == 0
    found = [row["id"] for row in merged(folder)]
    assert len(found) == len(set(found))
    assert acknowledged <= set(found)
    assert len(acknowledged) >= cases
    assert [name.removesuffix(".parquet") for name in landed(folder)] == sorted(found)
