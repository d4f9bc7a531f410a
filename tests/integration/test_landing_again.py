"""Landing files whose etag, size, time or place on the disk changes, and those in which nothing but the content does."""

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lakeupsert import Table
from tests.harness.lake import Lake, row


@pytest.fixture
def lake(folder: Path) -> Lake:
    lake = Lake(folder)
    lake.land("a.jsonl", [row("a", 0, 1, 1)])
    (folder / "landing/broken.csv.gz").write_bytes(b"no gzip at all")
    lake.table.run(host="local", workers=1)
    assert batches(lake) == 1
    return lake


def batches(lake: Lake) -> int:
    lake.reopen()
    return sum(entry.kind == "batch" for _, entry in lake.entries())


def run(lake: Lake) -> int:
    lake.reopen()
    lake.table.run(host="local", workers=1)
    return batches(lake)


def test_file_that_is_rewritten_in_place_is_read_whatever_its_time_says(lake: Lake) -> None:
    path = lake.root / "landing/a.jsonl"
    before = path.stat()
    text = path.read_text().replace('"v": 1', '"v": 2').replace('"v":1', '"v":2')
    with path.open("r+") as file:
        file.write(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert run(lake) == 2
    assert [r["v"] for r in lake.rows()] == [2]


def copy(path: Path) -> None:
    """As `cp -a` from a backup."""
    shutil.copy2(path, other := path.with_name("_copy"))
    path.unlink()
    other.rename(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "mode": lambda path: path.chmod(0o600),
    "link": lambda path: os.link(path, path.with_name(f"_{path.name}")),
    "time": lambda path: os.utime(path, (1, 1)),
    "copy": copy,
}


def test_same_content_is_never_taken_twice(lake: Lake) -> None:
    """A file that was read, and one that could not be."""
    for change in CHANGES.values():
        for name in ("a.jsonl", "broken.csv.gz"):
            change(lake.root / "landing" / name)
        assert run(lake) == 1
    # a batch of other files remembers that these were met again, so that they are not read every night
    lake.land("b.jsonl", [row("b", 0, 1)])
    assert run(lake) == 2
    assert {f.path for f in lake.entries()[-1][1].seen} == {"a.jsonl", "broken.csv.gz"}
    copy(lake.root / "landing/broken.csv.gz")
    assert run(lake) == 2
    lake.land("broken.csv.gz", [])
    assert run(lake) == 3, "other content is another file"


def test_markers_of_folders_are_no_landing_files(lake: Lake) -> None:
    for name in ("landing/2024_$folder$", "landing/x/y_$folder$"):
        path = lake.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert run(lake) == 1


@pytest.mark.parametrize("format_", ["auto", "csv"])
def test_zip_of_several_files_is_set_aside_with_the_way_to_read_it(folder: Path, format_: str) -> None:
    lake = Lake(folder, format=format_, landing=str(folder / "landing"))
    header, line = "k,l,d,ts,v,op", "a,0,2020-01-01,2020-01-01T00:00:01,1,U"
    (folder / "landing/a.csv").write_text(f"{header}\n{line}\n")
    with zipfile.ZipFile(folder / "landing/sales.zip", "w") as archive:
        archive.writestr("b.csv", f"{header}\n{line.replace('a', 'b', 1)}\n")
        if format_ == "csv":
            archive.writestr("c.csv", f"{header}\n{line.replace('a', 'c', 1)}\n")
    done = lake.table.run(host="local", workers=1)
    assert done.append is not None
    assert done.append.entry.quarantined == {"unreadable_file": 1}
    assert "zip://::" in done.append.examples["unreadable_file"]
    inside = Lake(folder / "other", format="csv", landing=f"zip://::{folder}/landing/sales.zip")
    table = Table("t", inside.settings)
    table.run(host="local", workers=1)
    assert table.to_arrow().read_all()["k"].to_pylist() == (["b", "c"] if format_ == "csv" else ["b"])
