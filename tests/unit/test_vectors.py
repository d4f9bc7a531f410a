"""Deletion vectors: their bytes, few in the manifest and many in an object, and what damage does."""

import json
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lakeupsert.config import TableSettings
from lakeupsert.errors import DamagedTableError
from lakeupsert.publishers import PublishedTable
from lakeupsert.publishers.iceberg_deletes import Puffins
from lakeupsert.rows import vectors
from lakeupsert.rows.vectors import MAGIC, deleted_positions, frame, mark_deleted
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile, DeletionVector, Manifest

GOLDEN = bytes.fromhex(
    "d1d33964"  # 1681511377
    "0100000000000000"  # one bitmap of 32-bit positions,
    "00000000"  # whose positions have these upper bits
    "3a300000" "01000000" "0000" "0500" "10000000"  # no runs, one container: key 0, 6 values, which begin at byte 16
    "0300" "0400" "0700" "0b00" "1200" "1d00"
)  # fmt: skip
"""Positions 3, 4, 7, 11, 18, 29: written by hand from the specifications of Roaring and of Delta's protocol."""
FILE = DataFile(name="d=1/base-0-x.parquet", rows=100_000, bytes=1)


def extended(store: LocalStore, *files: tuple[DataFile, list[int]]) -> list[DataFile]:
    return mark_deleted(store, [f for f, _ in files], [np.array(p) for _, p in files], lambda: "vectors.roaring")


def positions(store: LocalStore, file: DataFile) -> list[int]:
    return list(deleted_positions(store, file))


def test_bytes_are_those_of_the_specification(tmp_path: Path) -> None:
    [file] = extended(LocalStore(tmp_path), (FILE, [29, 3, 4, 7, 11, 18]))
    assert file.deleted == DeletionVector(rows=6, size=len(GOLDEN), inline=GOLDEN)
    assert positions(LocalStore(tmp_path), file) == [3, 4, 7, 11, 18, 29]


@pytest.mark.parametrize("inline", [0, 4096])
def test_vectors_are_extended_and_full_ones_take_their_file_along(
    tmp_path: Path, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "INLINE_BYTES", inline)
    store = LocalStore(tmp_path)
    small = msgspec.structs.replace(FILE, name="d=1/small.parquet", rows=3)
    untouched = msgspec.structs.replace(FILE, name="d=1/untouched.parquet")
    first = extended(store, (FILE, [5, 70_000]), (small, [0]), (untouched, []))
    assert [positions(store, f) for f in first] == [[5, 70_000], [0], []]
    assert [f.live for f in first] == [99_998, 2, 100_000]
    assert first[2] == untouched
    assert {o for f in first for o in f.objects} - {f.name for f in first} == (set() if inline else {"vectors.roaring"})
    other = LocalStore(tmp_path / "other")
    second = mark_deleted(
        store, first, [np.array([5, 70_000, 6]), np.array([0, 1, 2]), np.array([])], lambda: "more.roaring"
    )
    assert [f.name for f in second] == [FILE.name, untouched.name], "nobody lives in the small one"
    assert positions(store, second[0]) == [5, 6, 70_000]
    if not inline:
        with pytest.raises(DamagedTableError, match="reprocess --partition d=1 --source landing"):
            positions(other, second[0])


EQUAL_SIZES = {f"d={n}/base-0-x.parquet": [n, 2 * n + 1] for n in range(9)}
"""Positions of files whose vectors are easily mistaken for each other: each has as many bytes and rows as the next."""


@pytest.fixture(params=[0, 4096])
def marked(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[DataFile]:
    monkeypatch.setattr(vectors, "INLINE_BYTES", request.param)
    files = [(msgspec.structs.replace(FILE, name=name), dead) for name, dead in EQUAL_SIZES.items()]
    return extended(LocalStore(tmp_path), *files)


def test_vectors_of_one_size_are_told_apart(tmp_path: Path, marked: list[DataFile]) -> None:
    assert {f.name: positions(LocalStore(tmp_path), f) for f in marked} == EQUAL_SIZES


def test_vectors_in_an_object_of_iceberg_are_those_of_their_files(tmp_path: Path, marked: list[DataFile]) -> None:
    """Both by the manifest's entry and by the object's footer."""
    store = LocalStore(tmp_path)

    def version(partition: str, number: int) -> Manifest:
        raise AssertionError("no manifest is needed")

    settings = TableSettings(landing="/l", processed="/p", key=("k",), partition_by=("d",))
    table = PublishedTable(settings, TableObjects(store), version, lambda call, items: [call(item) for item in items])
    found = Puffins(table, store.uri, "puffins/").write(marked)
    [name] = {entry.name for entry in found.values()}
    body = store.get(name)
    size = int.from_bytes(body[-12:-8], "little")
    listed = json.loads(body[-12 - size : -12])["blobs"]
    spans = {blob["properties"]["referenced-data-file"]: (blob["offset"], blob["length"]) for blob in listed}
    assert found.keys() == EQUAL_SIZES.keys()
    for file in marked:
        entry = found[file.name]
        assert entry.of == file.name
        assert entry.span == spans[store.uri(file.name)]
        at, length = entry.span
        assert file.deleted is not None
        assert body[at : at + length] == frame(vectors.vector_bytes(store, file, file.deleted))


ANOTHER_ROW = {"inline": GOLDEN[:-2] + b"\x1c\0", "crc": zlib.crc32(GOLDEN)}


@pytest.mark.parametrize(
    "change", [{"inline": b"\0\0\0\0" + GOLDEN[4:]}, {"inline": MAGIC + b"\x01"}, {"rows": 5}, ANOTHER_ROW]
)
def test_vector_that_is_not_what_was_written_is_told(tmp_path: Path, change: dict[str, bytes | int]) -> None:
    vector = DeletionVector(rows=6, size=len(GOLDEN), inline=GOLDEN)
    file = msgspec.structs.replace(FILE, deleted=msgspec.structs.replace(vector, **change))
    with pytest.raises(DamagedTableError) as e:
        positions(LocalStore(tmp_path), file)
    assert e.value.code == "damaged-deletion-vector"
