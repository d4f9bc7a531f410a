"""What an object store must guarantee. A table is safe only on a store that passes `ObjectStoreContract`.

class TestMyStore(ObjectStoreContract):
    def new_store(self, tmp_path):
        return MyStore(...)          # an empty root
"""

import pickle
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.storage import NotFoundError, ObjectStore, open_listed

RACES = 50
OPENED_BYTES = 256 << 10
"""What our stores read when they open an object."""
AWKWARD_NAMES = [
    "plain",
    "a folder/with spaces",
    "d=2020-01-01/x",
    "d=a%2Fb/x",
    "d=100%/x",
    "d=🦆/ü",
    "d=a'b\"c/x",
    "~/x",
    "a+b&c/x",
]


class ObjectStoreContract:
    """Published tests. Subclass it and define `new_store`."""

    def new_store(self, tmp_path: Path) -> ObjectStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return self.new_store(tmp_path)

    # -- create

    def test_created_object_reads_back(self, store: ObjectStore) -> None:
        assert store.create("a/b", b"one") is True
        assert store.get("a/b") == b"one"

    def test_second_create_of_a_name_loses_and_changes_nothing(self, store: ObjectStore) -> None:
        store.create("a/b", b"one")
        assert store.create("a/b", b"two") is False
        assert store.get("a/b") == b"one"

    def test_create_after_delete_wins(self, store: ObjectStore) -> None:
        store.create("a", b"one")
        store.delete(["a"])
        assert store.create("a", b"two") is True

    def test_created_object_may_be_empty(self, store: ObjectStore) -> None:
        assert store.create("empty", b"") is True
        assert store.get("empty") == b""
        assert store.create("empty", b"x") is False

    def test_race_of_threads_for_a_name_has_one_winner(self, store: ObjectStore) -> None:
        gate = threading.Barrier(8)

        def race(number: int) -> list[str]:
            won = []
            for i in range(RACES):
                gate.wait()
                if store.create(f"race/{i}", str(number).encode()):
                    won.append(f"{i}:{number}")
            return won

        with ThreadPoolExecutor(8) as pool:
            wins = [win for won in pool.map(race, range(8)) for win in won]
        assert sorted(wins) == sorted(f"{i}:{store.get(f'race/{i}').decode()}" for i in range(RACES))

    def test_race_of_processes_for_a_name_has_one_winner(self, store: ObjectStore) -> None:
        store.create("first", b"")  # before its first create, a store may race by itself, and the copies need not again
        with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
            wins = Counter(w for won in pool.map(_race, [(store, n) for n in range(4)]) for w in won)
        assert wins == {f"race/{i}:{store.get(f'race/{i}').decode()}": 1 for i in range(RACES)}

    # -- get, head, open

    def test_absent_object_is_not_found(self, store: ObjectStore) -> None:
        with pytest.raises(NotFoundError):
            store.get("absent")
        with pytest.raises(NotFoundError):
            store.get("absent/deeper")
        with pytest.raises(NotFoundError):
            store.open("absent")
        assert store.head("absent") is None

    def test_folder_is_no_object(self, store: ObjectStore) -> None:
        store.create("folder/object", b"x")
        assert store.head("folder") is None
        with pytest.raises(NotFoundError):
            store.get("folder")

    def test_head_tells_the_size_and_an_etag_that_the_listing_tells_too(self, store: ObjectStore) -> None:
        store.create("a/b", b"12345")
        head = store.head("a/b")
        assert head is not None
        assert head.size == 5
        assert head == next(iter(store.list("a/")))

    def test_etag_tells_that_an_object_was_replaced(self, store: ObjectStore) -> None:
        store.create("a", b"one")
        before = store.head("a")
        store.delete(["a"])
        store.create("a", b"two")
        assert store.head("a") != before

    def test_open_reads_ranges(self, store: ObjectStore) -> None:
        store.create("a", bytes(range(100)))
        with store.open("a") as file:
            file.seek(90)
            assert file.read(5) == bytes(range(90, 95))
            assert file.size() == 100

    def test_object_of_any_size_opens_whole(self, store: ObjectStore) -> None:
        """Also one shorter than what a store reads at once, and one just as long."""
        for size in (1, *(OPENED_BYTES + more for more in (-1, 0, 1))):
            name = f"of/{size}"
            with store.write(name) as sink:
                sink.write(data := (b"0123456789" * (size // 10 + 1))[:size])
            (listed,) = store.list(name)
            assert listed.size == size
            with open_listed(store, listed) as file:
                assert file.size() == size
                assert file.read() == data

    def test_open_of_another_size_than_listed_is_no_answer(self, store: ObjectStore) -> None:
        store.create("a", b"12345")
        (listed,) = store.list("a")
        with pytest.raises(NotFoundError):
            open_listed(store, replace(listed, size=4))

    def test_open_of_another_version_finds_nothing(self, store: ObjectStore) -> None:
        store.create("a", b"one")
        listed = next(iter(store.list("")))
        with store.open("a", listed.etag) as file:
            assert file.read() == b"one"
        store.delete(["a"])
        with pytest.raises(NotFoundError):
            store.open("a", listed.etag)
        store.create("a", b"two")
        with pytest.raises(NotFoundError):
            store.open("a", listed.etag)

    def test_empty_object_opens(self, store: ObjectStore) -> None:
        store.create("a", b"")
        with store.open("a") as file:
            assert file.size() == 0
            assert file.read() == b""

    def test_get_of_a_part_is_those_bytes(self, store: ObjectStore) -> None:
        store.create("a", bytes(range(100)))
        assert store.get("a", (90, 5)) == bytes(range(90, 95))
        assert store.get("a", (98, 5)) == bytes(range(98, 100))
        assert store.get("a", (200, 5)) == b""
        with pytest.raises(NotFoundError):
            store.get("absent", (0, 1))

    # -- write

    def test_written_parquet_reads_back(self, store: ObjectStore) -> None:
        table = pa.table({"a": list(range(1000))})
        with store.write("x/data.parquet") as sink:
            pq.write_table(table, sink)
        with store.open("x/data.parquet") as file:
            assert pq.read_table(file).equals(table)

    def test_object_appears_only_when_the_block_ended(self, store: ObjectStore) -> None:
        with store.write("x/data") as sink:
            sink.write(b"half")
            assert store.head("x/data") is None
            assert list(store.list("")) == []
        assert store.get("x/data") == b"half"

    def test_failed_block_leaves_nothing(self, store: ObjectStore) -> None:
        def fail() -> None:
            with store.write("x/data") as sink:
                sink.write(b"half")
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            fail()
        assert store.head("x/data") is None
        assert list(store.list("")) == []

    # -- list, delete

    def test_list_gives_names_in_order_across_folders(self, store: ObjectStore) -> None:
        names = ["b", "a/b", "a", "a.c", "a/a/x", "a0", "ab/c", "é", "z"]
        names.remove("a")  # a file system can't have a folder and an object of the same name
        for name in names:
            store.create(name, b"")
        assert [found.name for found in store.list("")] == sorted(names)

    def test_list_takes_a_prefix_that_need_not_end_a_folder(self, store: ObjectStore) -> None:
        for name in ["v1/a", "v1/b", "v12", "w"]:
            store.create(name, b"")
        assert [found.name for found in store.list("v1")] == ["v1/a", "v1/b", "v12"]
        assert [found.name for found in store.list("v1/")] == ["v1/a", "v1/b"]
        assert [found.name for found in store.list("absent/")] == []

    def test_list_stops_at_its_limit(self, store: ObjectStore) -> None:
        for i in range(5):
            store.create(f"n/{i}", b"")
        assert [found.name for found in store.list("n/", limit=2)] == ["n/0", "n/1"]

    def test_list_leaves_out_objects_of_a_folder_up_to_a_name(self, store: ObjectStore) -> None:
        names = ["a/1", "a/2", "a/2/1", "a/3", "b/1", "z"]
        names.remove("a/2")  # as above
        for name in names:
            store.create(name, b"")
        assert [found.name for found in store.list("", above={"a": "a/1", "b": "b/1"})] == ["a/2/1", "a/3", "z"]
        assert [found.name for found in store.list("a/", above={"a": "a/3"})] == []
        assert [found.name for found in store.list("", above={"a": "a/2"}, limit=2)] == ["a/2/1", "a/3"]
        assert [found.name for found in store.list("", above={"a": "a/3"}, limit=1)] == ["b/1"]

    def test_listing_shows_what_was_just_created_and_deleted(self, store: ObjectStore) -> None:
        store.create("a", b"")
        store.create("b", b"")
        store.delete(["a"])
        assert [found.name for found in store.list("")] == ["b"]

    def test_delete_of_an_absent_name_is_no_error(self, store: ObjectStore) -> None:
        store.create("a", b"")
        store.delete(["absent", "a", "absent/deeper"])
        assert list(store.list("")) == []

    # -- names, processes, requests

    @pytest.mark.parametrize("name", AWKWARD_NAMES)
    def test_awkward_name_means_itself(self, store: ObjectStore, name: str) -> None:
        store.create(name, b"x")
        assert store.get(name) == b"x"
        assert [found.name for found in store.list("")] == [name]

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "a//b", "/a", "a/", "a/./b", "a\0b"])
    def test_name_that_leaves_the_root_is_refused(self, store: ObjectStore, name: str) -> None:
        with pytest.raises(ValueError, match="not an object name"):
            store.create(name, b"x")
        with pytest.raises(ValueError, match="not an object name"):
            store.get(name)

    def test_pickled_store_is_the_same_store(self, store: ObjectStore) -> None:
        store.create("a", b"x")
        other: ObjectStore = pickle.loads(pickle.dumps(store))
        assert other.get("a") == b"x"
        assert other.requests.as_dict()["create"] == 0

    def test_each_call_is_counted_once(self, store: ObjectStore) -> None:
        store.create("first", b"")  # before its first create, a store may check whether creates are safe
        store.delete(["first"])
        before = Counter(store.requests.as_dict())
        store.create("a", b"x")
        store.get("a")
        store.head("a")
        list(store.list(""))
        store.delete(["a"])
        with store.write("b") as sink:
            sink.write(b"x")
        with store.open("b"):
            pass
        counted = Counter(store.requests.as_dict()) - before
        assert counted == {"get": 2, "head": 1, "list": 1, "put": 1, "create": 1, "delete": 1}


def _race(store_and_number: tuple[ObjectStore, int]) -> list[str]:
    store, number = store_and_number
    return [f"race/{i}:{number}" for i in range(RACES) if store.create(f"race/{i}", str(number).encode())]
