"""Data files of which a bit is another: readers get an error that names the file, or the rows that were written."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows import checksums
from lakeupsert.rows.datafiles import open_object, read_file
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.storage import LocalStore
from lakeupsert.table.manifest import DataFile

NAME = "base.parquet"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some hundred kilobytes are read in parts."""
    monkeypatch.setattr(checksums, "WHOLE_BYTES", 64 << 10)


@cache
def rows_of(count: int) -> pa.Table:
    """Columns of each way in which Parquet writes values: plain, by dictionary, with nulls, nested."""
    return pa.table(
        {
            "key": [f"{n * 7919:09d}" for n in range(count)],
            "repeats": [("a", "b", None)[n % 3] for n in range(count)],
            "number": pa.array([n if n % 5 else None for n in range(count)], pa.int64()),
            "parts": [[n, n + 1] if n % 2 else [] for n in range(count)],
        }
    )


def written(folder: Path, rows: pa.Table) -> tuple[LocalStore, DataFile]:
    store = LocalStore(folder)
    with DataFileWriter(store, lambda: NAME, rows.schema, Footer("t", "base", "1", 0), ("key",)) as out:
        out.write(rows)
    [file] = out.files
    return store, file


def flips(data: bytes, bits: Iterator[int]) -> Iterator[bytes]:
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def outcomes(folder: Path, store: LocalStore, file: DataFile, rows: pa.Table, bits: Iterator[int]) -> dict[str, int]:
    """How many of the damaged files were refused, and how many read as they were written; any other ends the test."""
    found = {"refused": 0, "equal": 0}
    path = folder / NAME
    for damaged in flips(path.read_bytes(), bits):
        path.write_bytes(damaged)
        try:
            seen = read_file(store, file, rows.schema)
        except DamagedTableError as e:
            assert (e.code, NAME in e.message) == ("damaged-data-file", True)
            found["refused"] += 1
        else:
            assert seen.equals(rows)
            found["equal"] += 1
    return found


@pytest.mark.long
def test_every_bit_of_a_small_file(folder: Path) -> None:
    """Also those of page headers, of the footer and of the checksums: none of them is read as something else."""
    rows = rows_of(200)
    store, file = written(folder, rows)
    every = range((folder / NAME).stat().st_size * 8)
    found = outcomes(folder, store, file, rows, iter(every))
    assert found["equal"] == len(NAME) * 8  # under another name the checksums are another file's
    assert sum(found.values()) == len(every)


@pytest.mark.usefixtures("parts")
def test_bits_of_a_file_that_is_read_in_parts(folder: Path) -> None:
    """Of a file above WHOLE_BYTES only what a reader needs is compared; what it gets is right."""
    rows = rows_of(20_000)
    store, file = written(folder, rows)
    size = (folder / NAME).stat().st_size
    assert size > 2 * checksums.WHOLE_BYTES
    bits = random.Random(1).sample(range(size * 8), 15)
    found = outcomes(folder, store, file, rows, iter(bits))
    assert found["refused"] > 10
    with open_object(store, NAME) as source:
        whole = ds.ParquetFileFormat().make_fragment(source)
        assert whole.to_table(columns=["number"]).equals(rows.select(["number"]))


@pytest.mark.usefixtures("parts")
def test_what_is_not_read_is_not_compared(folder: Path) -> None:
    """Who needs one column is not kept from it by a bit of another, and reads its bytes alone."""
    rows = rows_of(20_000)
    store, file = written(folder, rows)
    column = pq.ParquetFile(folder / NAME).metadata.row_group(0).column(0)
    data = bytearray((folder / NAME).read_bytes())
    data[(column.data_page_offset or 0) + column.total_compressed_size // 2] ^= 1
    (folder / NAME).write_bytes(data)
    last = pa.schema([rows.schema.field("parts")])
    assert read_file(store, file, last).equals(rows.select(["parts"]))
    with pytest.raises(DamagedTableError):
        read_file(store, file, pa.schema([rows.schema.field("key")]))


@pytest.mark.parametrize("count", [600, 200_000])
def test_pages_have_checksums_for_other_readers(folder: Path, count: int) -> None:
    """A reader that knows Parquet alone finds a wrong bit within a page."""
    written(folder, rows_of(count))
    column = pq.ParquetFile(folder / NAME).metadata.row_group(0).column(0)
    data = bytearray((folder / NAME).read_bytes())
    data[(column.data_page_offset or 0) + column.total_compressed_size - 1] ^= 1
    (folder / NAME).write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(folder / NAME, page_checksum_verification=True).read()


def test_files_without_checksums_are_read(folder: Path) -> None:
    """Adopted ones."""
    rows = rows_of(1000)
    pq.write_table(rows, folder / NAME)
    file = DataFile(name=NAME, rows=rows.num_rows, bytes=(folder / NAME).stat().st_size)
    assert read_file(LocalStore(folder), file, rows.schema).equals(rows)


def test_the_keys_of_the_footer_in_another_file_mean_nothing(folder: Path) -> None:
    """pyarrow takes them along, when somebody reads a file of ours and writes what he read."""
    rows = rows_of(1000)
    written(folder, rows)
    pq.write_table(pq.ParquetFile(folder / NAME).read().slice(500), folder / "copy.parquet")
    copy = DataFile(name="copy.parquet", rows=500, bytes=(folder / "copy.parquet").stat().st_size)
    assert checksums.OWN.encode() in (folder / "copy.parquet").read_bytes()
    assert read_file(LocalStore(folder), copy, rows.schema).equals(rows.slice(500))


@pytest.mark.parametrize("left", [0, 3, 11, 200, -9, -1])
def test_a_file_that_is_cut_off(folder: Path, left: int) -> None:
    rows = rows_of(1000)
    store, file = written(folder, rows)
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:left])
    with pytest.raises(DamagedTableError) as refused:
        read_file(store, file, rows.schema)
    assert refused.value.code == "damaged-data-file"
