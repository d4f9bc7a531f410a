"""A leader's store keeps small files in memory."""

import pickle
import re
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from lakeupsert.storage import LocalStore, NotFoundError, keeping
from lakeupsert.storage.keeping import KeepingStore
from lakeupsert.testing.contracts import ObjectStoreContract

NAMES = re.compile(r"file \d+")


class TestKeepingStore(ObjectStoreContract):
    def new_store(self, tmp_path: Path) -> KeepingStore:
        return KeepingStore(LocalStore(tmp_path), NAMES)


def write(store: KeepingStore, name: str, data: bytes) -> None:
    with store.write(name) as sink:
        sink.write(data)


def test_what_was_written_or_opened_is_not_read_again(tmp_path: Path) -> None:
    below = LocalStore(tmp_path)
    store = KeepingStore(below, NAMES)
    write(store, "file 1", b"0123456789")
    other = pickle.loads(pickle.dumps(store))
    assert other.open("file 1").read() == other.open("file 1").read() == b"0123456789"
    assert other.requests.as_dict()["get"] == 1
    assert store.open("file 1").read() == b"0123456789"
    assert isinstance(store.open("file 1"), pa.NativeFile)
    assert below.requests.as_dict()["get"] == 0
    write(store, "changes", b"1")
    assert store.get("changes") == store.open("changes").read() == b"1"
    assert below.requests.as_dict()["get"] == 2
    store.forget()
    assert store.open("file 1").read() == b"0123456789"
    assert below.requests.as_dict()["get"] == 3


def test_large_files_and_those_of_long_ago_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALL_BYTES", 10)
    monkeypatch.setattr(keeping, "KEPT_BYTES", 20)
    store = KeepingStore(LocalStore(tmp_path), NAMES)
    write(store, "file 0", b"x" * 11)
    for number in range(1, 4):
        write(store, f"file {number}", b"x" * 10)
        assert store.open("file 1").read() == b"x" * 10, "used last"
    before = store.requests.as_dict()["get"]
    for number in (0, 1, 3, 2):
        assert set(store.open(f"file {number}").read()) == set(b"x")
    assert store.requests.as_dict()["get"] - before == 2, "file 0 and file 2"


def test_a_write_that_fails_keeps_nothing(tmp_path: Path) -> None:
    store = KeepingStore(LocalStore(tmp_path), NAMES)
    with suppress(ValueError), store.write("file 1") as sink:
        sink.write(b"x")
        raise ValueError
    with pytest.raises(NotFoundError):
        store.get("file 1")
