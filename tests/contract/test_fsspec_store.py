"""Stores through fsspec keep the object store's contract: Google Cloud Storage on a server that speaks it, and memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lakeupsert import clock
from lakeupsert.config import TableSettings
from lakeupsert.operations.doctor import CHECKS
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import NotFoundError, ObjectStore, StoreUnavailableError, UnknownOutcomeError, open_store
from lakeupsert.testing.contracts import ObjectStoreContract
from tests.harness.lake import Lake, row
from tests.harness.servers import Server


class Exclusive(MemoryFileSystem):  # type: ignore[misc]
    """Memory that lets one of two win; fsspec's own looks first and writes then."""

    _creating = threading.Lock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **given: Any) -> None:
        with self._creating:
            super().pipe_file(path, value, mode=mode, **given)


@contextmanager
def backend(made: type) -> Iterator[None]:
    fsspec.register_implementation("memory", made, clobber=True)
    try:
        yield
    finally:
        fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


@pytest.fixture
def memory() -> Iterator[None]:
    with backend(Exclusive):
        yield


@pytest.mark.usefixtures("memory")
class TestInMemory(ObjectStoreContract):
    def new_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"memory://{clock.new_id()}/lake")

    def test_race_of_processes_for_a_name_has_one_winner(self, store: ObjectStore) -> None:
        pytest.skip("each process has a memory of its own")


class TestGoogleCloudStorage(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def on_server(self, gcs: Server, new_place: Callable[[Server], str]) -> None:
        self.place = new_place(gcs)

    def new_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"{self.place}/lake")


def test_nights_equal_the_model_on_google_cloud_storage(
    gcs: Server, new_place: Callable[[Server], str], tmp_path: Path
) -> None:
    place = new_place(gcs)
    lake = Lake(tmp_path, landing=f"{place}/landing", processed=f"{place}/lake", queue=str(tmp_path / "queue.sqlite"))
    for night in range(3):
        lake.land(f"{night}.jsonl", [row(k, day, night, night) for day in range(3) for k in "abc"[night:]])
        lake.run()
        lake.check()
    lake.finish_and_check()


# -- what a backend may do


@pytest.fixture
def store() -> ObjectStore:
    return open_store(f"memory://{clock.new_id()}")


def store_check(folder: Path) -> Any:
    settings = TableSettings(
        landing=str(folder),
        processed=f"memory://{clock.new_id()}",
        key=("k",),
        partition_by=("d",),
        queue=str(folder / "q"),
    )
    return next(iter(CHECKS["store"](OpenTable("t", settings))))


def test_doctor_tells_a_backend_that_looks_first_and_writes_then(tmp_path: Path) -> None:
    class Slow(MemoryFileSystem):  # type: ignore[misc]
        together = threading.Barrier(8)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **given: Any) -> None:
            if self.exists(path):
                raise FileExistsError(path)
            self.together.wait()  # until all have looked
            super().pipe_file(path, value, **given)

    with backend(Slow):
        found = store_check(tmp_path)
    assert found.level == "problem"
    assert "8 won; exactly one must win" in found.found
    with backend(Exclusive):
        assert store_check(tmp_path).level == "ok"


def test_create_that_meets_what_it_sent_does_not_say_that_it_lost(store: ObjectStore) -> None:
    """The backend may have sent it twice."""
    store.create("a", b"mine")
    with pytest.raises(UnknownOutcomeError):
        store.create("a", b"mine")
    assert store.create("a", b"other") is False


def test_what_a_backend_raises_is_told(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **asked: Any) -> None:
        raise ConnectionResetError("by peer")

    for name in ("cat_file", "info", "find", "pipe_file", "open", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    for call in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.open("a"),
        lambda: list(store.list("")),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreUnavailableError, match="ConnectionResetError: by peer"):
            call()
    with pytest.raises(StoreUnavailableError), store.write("a") as sink:
        sink.write(b"x")
    with pytest.raises(UnknownOutcomeError):
        store.create("a", b"x")


def test_object_that_is_gone_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        store.open("a")
