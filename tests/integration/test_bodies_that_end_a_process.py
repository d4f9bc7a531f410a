"""A body that ends the process which reads it is refused, and `serve` answers all others meanwhile."""

import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path

import pytest

from lakeupsert.endpoint import readers
from lakeupsert.endpoint.batches import Batches
from lakeupsert.errors import RefusedError
from tests.harness import ending_bodies
from tests.harness.endpoint import CONFIG, merged, served
from tests.harness.lake import Lake

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


def test_a_process_that_was_ended_while_it_waited_costs_no_body(tmp_path: Path) -> None:
    batches = Batches(Lake(tmp_path).opened)
    assert batches.receive("a", "text/csv", ONE % b"") is False
    for process in active_children():
        process.kill()
        process.join()
    assert batches.receive("b", "text/csv", ONE % b"") is False


def test_one_that_is_never_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.endpoint.check._read", ending_bodies.read)
    monkeypatch.setattr(readers, "READ_BODY_SECONDS", 0.1)
    with pytest.raises(RefusedError, match="It was not read to its end within") as found:
        Batches(Lake(tmp_path).opened).receive("a", "text/csv", ONE % b"ends-never")
    assert (found.value.code, "Nothing was stored." in found.value.message) == ("unfit-rows", True)
