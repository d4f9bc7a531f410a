"""Files in a pack are read by themselves, verified row group by row group, and the pack is a Parquet file of all of them."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows import packs
from lakeupsert.rows.datafiles import read_file, read_together
from lakeupsert.rows.filewriter import Footer, PackWriter
from lakeupsert.rows.vectors import mark_deleted
from lakeupsert.storage import LocalStore
from lakeupsert.table.manifest import WHOLE, DataFile, Part
from tests.harness.specs import create

SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string())])
SPEC = create(SCHEMA, key=["key"], partition_by=[], order_by=["key"])
SIZES = (3, 1, 700, 0, 5)


def rows(first: int, count: int) -> pa.Table:
    return pa.table([range(first, first + count), [f"text {i}" for i in range(first, first + count)]], SCHEMA)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def files(store: LocalStore) -> list[DataFile]:
    """Four files of one piece, and one of four pieces, the third of them without rows."""
    footer = Footer("t", "appended", "1", 0)
    with PackWriter(store, "p.pack", SCHEMA, footer, SPEC) as pack:
        whole = [pack.write_file([rows(100 * n, size)], WHOLE) for n, size in enumerate(SIZES) if size]
        return [*whole, pack.write_file([rows(1000, 2), rows(1002, 9), rows(0, 0), rows(1011, 1)], Part(1, 1))]


def test_a_small_pack_is_read_by_one_request(store: LocalStore, files: list[DataFile]) -> None:
    found = [read_file(store, file, SCHEMA) for file in files]
    assert found == [*(rows(100 * n, size) for n, size in enumerate(SIZES) if size), rows(1000, 12)]
    assert store.requests.as_dict()["get"] == 1
    assert [file.row for file in files] == [0, 3, 4, 704, 709]


def test_files_of_a_pack_are_read_together_without_their_superseded_rows(
    store: LocalStore, files: list[DataFile]
) -> None:
    some = [files[4], files[0], files[2]]
    dead = [np.array(places) for places in ([0, 11], [], [0, 5, 699])]
    some = mark_deleted(store, some, dead, lambda: "vectors.roaring")
    found, numbers = read_together(store, some, SCHEMA, SPEC)
    assert found == pa.concat_tables([read_file(store, file, SCHEMA) for file in some])
    assert numbers.tolist() == [0] * 10 + [1] * 3 + [2] * 697


class Asked(LocalStore):
    """Notes the parts of objects that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.parts: list[tuple[int, int]] = []

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        if part is not None:
            self.parts.append(part)
        return super().get(name, part)


@pytest.fixture
def large(tmp_path: Path) -> tuple[Asked, list[DataFile], list[pa.Table]]:
    """A pack of 64 files, which has over 512 KiB."""
    store = Asked(tmp_path)
    texts = [random.Random(i).randbytes(5000).hex() for i in range(640)]
    tables = [pa.table([range(n, n + 10), texts[n : n + 10]], SCHEMA) for n in range(0, 640, 10)]
    with PackWriter(store, "p.pack", SCHEMA, Footer("t", "appended", "1", 0), SPEC) as pack:
        return store, [pack.write_file([table], WHOLE) for table in tables], tables


@pytest.mark.parametrize(("ahead", "requests"), [(packs.AHEAD_BYTES, 7), (300_000, 15), (0, 64)])
def test_who_reads_on_gets_twice_as_much_by_each_request(
    large: tuple[Asked, list[DataFile], list[pa.Table]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
    requests: int,
) -> None:
    monkeypatch.setattr(packs, "AHEAD_BYTES", ahead)
    store, files, tables = large
    assert [read_file(store, file, SCHEMA) for file in files] == tables
    assert len(store.parts) == requests
    assert [sum(part) for part in store.parts[:-1]] == [at for at, _ in store.parts[1:]], "each byte once"
    assert max(size for _, size in store.parts) <= max(ahead, 4 + max(file.bytes for file in files))
    assert store.requests.as_dict()["get"] == 1 + requests, "the footer once"


def test_of_equal_parts_at_most_half_was_not_asked_for(
    large: tuple[Asked, list[DataFile], list[pa.Table]],
) -> None:
    store, files, _ = large
    for number in range(8):
        read_file(store, files[number], SCHEMA)
    assert sum(size for _, size in store.parts) <= 2 * sum(file.bytes for file in files[:8])
    store.parts.clear()
    for file in files[30::7]:
        read_file(store, file, SCHEMA)
    assert sum(size for _, size in store.parts) == sum(file.bytes for file in files[30::7]), "nobody reads on"


@pytest.mark.parametrize(("kept", "again"), [(1, 1), (2, 0)])
def test_bytes_ahead_are_kept_of_few_packs(
    kept: int,
    again: int,
    large: tuple[Asked, list[DataFile], list[pa.Table]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packs, "AHEAD_PACKS", kept)
    store, files, tables = large
    with PackWriter(store, "other.pack", SCHEMA, Footer("t", "appended", "1", 0), SPEC) as pack:
        other = pack.write_file([rows(0, 1)], WHOLE)
    for number in range(8):
        read_file(store, files[number], SCHEMA)
    read_file(store, other, SCHEMA)
    store.parts.clear()
    assert read_file(store, files[7], SCHEMA) == tables[7]
    assert len(store.parts) == again
    assert store.requests.as_dict()["get"] == 2 + 4 + again, "each footer once"


def test_a_piece_is_read_alone(store: LocalStore, files: list[DataFile]) -> None:
    pieces = [read_file(store, files[-1].within(Part(4 + n, 3)), SCHEMA) for n in (0, 1, 3)]
    assert pieces == [rows(1000, 2), rows(1002, 9), rows(1011, 1)]
    assert files[-1].within(Part(6, 3)).rows == 0
    assert read_file(store, files[-1].within(Part(3, 2)), SCHEMA) == rows(1011, 1)


def test_other_programs_read_the_whole_pack(store: LocalStore, files: list[DataFile], tmp_path: Path) -> None:
    assert pq.read_table(tmp_path / "p.pack")["key"].to_pylist() == [
        key for file in files for key in read_file(store, file, SCHEMA)["key"].to_pylist()
    ]


@pytest.mark.parametrize("number", range(5))
def test_damage_is_that_of_one_file(number: int, files: list[DataFile], tmp_path: Path) -> None:
    """Every byte of its row groups, and the first bytes of the pack with those of the first file."""
    healthy = (tmp_path / "p.pack").read_bytes()
    sizes = [4 + files[0].bytes, *(file.bytes for file in files[1:])]
    begin = sum(sizes[:number])
    for at in {*range(begin, begin + sizes[number], 97), begin, begin + sizes[number] - 1}:
        (tmp_path / "p.pack").write_bytes(healthy[:at] + bytes([healthy[at] ^ 1]) + healthy[at + 1 :])
        for other, file in enumerate(files):
            if other == number:
                with pytest.raises(DamagedTableError):
                    read_file(LocalStore(tmp_path), file, SCHEMA)
            else:
                read_file(LocalStore(tmp_path), file, SCHEMA)


def test_damage_to_the_footer_is_that_of_all(files: list[DataFile], tmp_path: Path) -> None:
    healthy = (tmp_path / "p.pack").read_bytes()
    end = 4 + sum(file.bytes for file in files)
    for at in range(end, len(healthy), 13):
        (tmp_path / "p.pack").write_bytes(healthy[:at] + bytes([healthy[at] ^ 1]) + healthy[at + 1 :])
        with pytest.raises(DamagedTableError):
            read_file(LocalStore(tmp_path), files[0], SCHEMA)


@pytest.mark.parametrize("left", [0, 3, 40, -1, -9])
def test_a_cut_pack_is_damaged(left: int, files: list[DataFile], tmp_path: Path) -> None:
    healthy = (tmp_path / "p.pack").read_bytes()
    (tmp_path / "p.pack").write_bytes(healthy[:left])
    with pytest.raises(DamagedTableError):
        read_file(LocalStore(tmp_path), files[0], SCHEMA)


def test_threads_share_the_footers(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(packs, "KEPT_BYTES", 60_000)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    files = []
    for number in range(8):
        with PackWriter(store, f"{number}.pack", SCHEMA, Footer("t", "appended", "1", 0), SPEC) as pack:
            files.append(pack.write_file([rows(number, 2)], WHOLE))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda number: packs.open_pack(store, files[number % 8].name).rows.tolist(), range(500))
        assert list(found) == [[0, 2]] * 500
    kept = packs._packs[store]
    assert kept.memory == sum(one.memory for one in kept.values())


def test_parsed_footers_count_as_memory(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "KEPT_BYTES", 60_000)
    for number in range(8):
        with PackWriter(store, f"{number}.pack", SCHEMA, Footer("t", "appended", "1", 0), SPEC) as pack:
            pack.write_file([rows(number, 2)], WHOLE)
        packs.open_pack(store, f"{number}.pack")
    kept = packs._packs[store].values()
    assert sum(12 * one.metadata.serialized_size for one in kept) <= 60_000
    assert len(kept) > 1


def test_the_footer_has_bounds_of_keys_only(store: LocalStore) -> None:
    with PackWriter(store, "p.pack", SCHEMA, Footer("t", "appended", "1", 0), SPEC) as pack:
        for number in range(20):
            pack.write_file([pa.table([[number], ["long " * 600]], SCHEMA)], WHOLE)
    found = packs.open_pack(store, "p.pack")
    assert b"long " not in bytes(found.tail.data[found.tail.end :])
    key, text = (found.metadata.row_group(7).column(number).statistics for number in range(2))
    assert (key.min, key.max, text) == (7, 7, None)
