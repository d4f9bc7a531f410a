"""A body that ends the process which reads it is refused, and `serve` answers all others meanwhile."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakeupsert.endpoint import readers
from lakeupsert.endpoint.batches import Batches
from lakeupsert.errors import RefusedError, TryAgainError
from lakeupsert.pipeline import child
from tests.harness import ending_bodies
from tests.harness.endpoint import CONFIG, merged, served
from tests.harness.lake import Lake
from tests.harness.processes import readers_here, wait_until

ROOT = Path(__file__).parents[2]
HEADER = b"id,day,ts,v\n"
ONE = b"k,l,d,ts,v,op\na,1,2020-01-01,2020-01-01 00:00:00,1,%s\n"


def test_a_server_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "lakeupsert.toml").write_text(CONFIG)
    (tmp_path / "landing").mkdir()
    limits = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.harness import ending_bodies as e; e.begin()"
    with served(tmp_path, limits=limits) as server:
        for kind, reason in (("abort", signal.strsignal(signal.SIGABRT)), ("huge", "GB of memory")):
            status, answer, _ = server.post(kind, HEADER + b"ends-%s,2020-01-01,1,1\n" % kind.encode())
            assert (status, answer["error"]["code"]) == (422, "unfit-rows")
            assert str(reason) in answer["error"]["message"]
            assert server.post(f"behind-{kind}", HEADER + b"%s,2020-01-01,1,1\n" % kind.encode())[0] == 201
        assert server.end() == 0
    assert [row["id"] for row in merged(tmp_path)] == ["abort", "huge"]


def test_others_are_taken_while_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.endpoint.check._read", ending_bodies.read)
    monkeypatch.setattr(readers, "READ_BODY_SECONDS", 60)
    batches, done = Batches(Lake(tmp_path).opened), tmp_path / "done"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(batches.receive, "slow", "text/csv", ONE % f"waits-for|{done}|".encode())
        try:
            assert batches.receive("a", "text/csv", ONE % b"") is False
            assert not slow.done()
        finally:
            done.touch()
        assert slow.result() is False


@pytest.mark.few(3)
@pytest.mark.parametrize("ending", [(signal.SIGTERM,), (signal.SIGKILL,), (signal.SIGKILL, signal.SIGKILL)])
def test_readers_that_somebody_else_ends_cost_no_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: tuple[signal.Signals, ...]
) -> None:
    """A service's manager sends SIGTERM to all processes of it, and a system without memory SIGKILL to some."""
    monkeypatch.setattr("lakeupsert.endpoint.check._read", ending_bodies.read)
    batches, done = Batches(Lake(tmp_path).opened), tmp_path / "done"
    assert batches.receive("before", "text/csv", ONE % b"") is False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(batches.receive, "a", "text/csv", ONE % f"waits-for|{done}|".encode())
        for number, kind in enumerate(ending):
            wait_until(lambda many=number: len([*tmp_path.glob("done.*")]) > many, "it is read")  # type: ignore[misc]
            newest = max(tmp_path.glob("done.*"), key=lambda path: path.stat().st_mtime_ns)
            os.kill(int(newest.suffix[1:]), kind)
        done.touch()
        if len(ending) == 1:
            assert answer.result() is False
        else:
            with pytest.raises(TryAgainError) as found:
                answer.result()
            assert found.value.code == "worker-died"
    for number in readers_here():  # that wait
        os.kill(number, signal.SIGKILL)
    wait_until(lambda: not readers_here(), "they have ended")
    assert batches.receive("b", "text/csv", ONE % b"") is False


def test_a_limit_of_the_system_ends_no_reader() -> None:
    """A process may not have a larger one than its parent."""
    code = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (3600, 3600)); from lakeupsert.pipeline.child import Child"
    run = [sys.executable, "-c", f"{code}; print(Child().call(9, len, 'abc'))"]
    assert subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "3\n"


@pytest.mark.long
def test_a_reader_that_somebody_stopped_costs_no_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READERS", readers.Readers())
    monkeypatch.setattr("lakeupsert.endpoint.check.READERS", readers.READERS)
    batches = Batches(Lake(tmp_path).opened)
    before = readers_here()
    assert batches.receive("a", "text/csv", ONE % b"") is False
    [reader] = readers_here() - before
    os.kill(reader, signal.SIGSTOP)
    monkeypatch.setattr(child, "WAITS", 1)
    assert batches.receive("b", "text/csv", (ONE % b"").ljust(1_000_000, b"\n")) is False, "more than a pipe holds"


def test_one_that_is_never_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.endpoint.check._read", ending_bodies.read)
    monkeypatch.setattr(readers, "READ_BODY_SECONDS", 1)
    monkeypatch.setattr(child, "WAITS", 600)
    with pytest.raises(RefusedError, match="It was not read to its end within 1 seconds of processor time") as found:
        Batches(Lake(tmp_path).opened).receive("a", "text/csv", ONE % b"ends-never")
    assert (found.value.code, "Nothing was stored." in found.value.message) == ("unfit-rows", True)
