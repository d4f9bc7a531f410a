"""Landing files of a source that are gone before a batch took them: `status`, `doctor` and `ingest` say so."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.api import Table
from lakeupsert.config import DatabaseSource, SourceSettings
from lakeupsert.operations.ingest import IngestOptions, ingest
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.discover import AppendOptions, list_landing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.removed_files import MOST_LOOKS
from lakeupsert.pipeline.stop import Stop
from lakeupsert.sources.follow import CaptureOptions, follow
from lakeupsert.storage import ObjectInfo
from tests.harness.lake import Lake
from tests.integration.test_source_files import Source

SOURCES: Mapping[str, SourceSettings] = {
    "n": DatabaseSource(from_="postgresql://me@localhost/s", table="t", tables=("a.b",))
}


def said(lake: Lake) -> list[str]:
    with Table.of(OpenTable("t", lake.settings, sources=SOURCES)) as table:
        return [text for text in table.status().warnings if "left the landing zone" in text]


def landed(lake: Lake, times: int) -> list[Path]:
    source = Source(lake)
    source.begin()
    source.step(times)
    return sorted((lake.root / "landing/n").glob("*"))


def test_files_that_a_batch_took_may_go_and_others_may_not(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    landed(lake, 3)
    assert said(lake) == []
    lake.table.run(host="local", workers=1)
    for path in (lake.root / "landing/n").glob("*"):
        path.unlink()
    assert said(lake) == []
    later = landed(lake, 3)
    later[1].unlink()
    [warning] = said(lake)
    assert warning.startswith("1 landing file of source 'n'")
    assert "n/000000000005" in warning
    lake.table.run(host="local", workers=1)
    assert len(said(lake)) == 1  # the rows are still missing


def test_the_newest_file_may_still_be_on_its_way(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    landed(lake, 2)[1].unlink()
    assert said(lake) == []
    landed(lake, 1)  # an empty file takes its place
    assert said(lake) == []


def test_only_the_first_of_many_are_looked_for(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for path in landed(lake, MOST_LOOKS + 5):
        path.unlink()
    [warning] = said(lake)
    assert warning.startswith(f"at least {MOST_LOOKS} landing files")


def test_capture_says_so(tmp_path: Path) -> None:
    """Whenever a process begins to read the source."""
    lake = Lake(tmp_path)
    landed(lake, 3)[0].unlink()
    stop, warnings = Stop(), list[str]()
    follow("n", Source(lake), stop.set, CaptureOptions(stop=stop, warn=warnings.append))
    [warning] = warnings
    assert "000000000001" in warning
    assert "Begin again" in warning


def test_doctor_and_ingest_say_so(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    landed(lake, 3)[0].unlink()
    warnings: list[str] = []
    table = Table.of(OpenTable("t", lake.settings, sources=SOURCES))
    table.ingest(seconds=0.1, max_seconds=1.0, warn=warnings.append)
    assert [one for one in warnings if "000000000001" in one]
    problems = [one for one in table.doctor() if (one.check, one.level) == ("sources", "problem")]
    assert len(problems) == 1
    assert "Begin again" in str(problems[0].next)
    table.close()


def test_a_reader_without_the_landing_zone_is_not_disturbed(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    landed(lake, 3)
    (lake.root / "landing").rename(lake.root / "elsewhere")
    (lake.root / "landing").write_text("no folder")
    assert all("no folder" not in text for text in said(lake))


def test_files_that_were_taken_are_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source writes so many that each batch would soon take longer than the time between two."""
    lake = Lake(tmp_path)
    files = landed(lake, 5)
    files[2].rename(tmp_path / "late")  # a listing may show the next one and not yet this one
    (files[0].parent / "000000000009.folder").mkdir()
    (files[0].parent / "000000000009.folder/x.jsonl").write_text("")
    opened = OpenTable("t", lake.settings, sources=SOURCES)
    landing, shown = opened.resources.landing, list[str]()
    every = type(landing).list

    def spy(*args: Any, **given: Any) -> Iterator[ObjectInfo]:
        found = [*every(landing, *args, **given)]
        shown.extend(one.name.partition(".")[0].removeprefix("n/").lstrip("0") for one in found)
        return iter(found)

    def batch() -> set[str]:
        """The files that a batch of `ingest` lists to take what is new."""
        head = opened.history.newest_entry()
        known = opened.history.taken(head.number) if head else opened.history.known_taken
        shown.clear()
        with monkeypatch.context() as patch:
            patch.setattr(landing, "list", spy)
            listed = [*list_landing(opened, taken=known)]
            new = {one.name: one for one in listed if not known.has(one)}
            append(opened, AppendOptions(host="local", only=new, listed=listed))
        return {*shown} - {"9"}

    def rows() -> int:
        head = opened.history.newest_entry()
        return sum(file.rows for entry in opened.history.headers(head.number) for file in entry.files) if head else 0

    assert (batch(), rows()) == ({"1", "2", "4", "5"}, 4)
    assert (batch(), rows()) == ({"4", "5"}, 4)
    (tmp_path / "late").rename(files[2])
    assert (batch(), rows()) == ({"3", "4", "5"}, 5)
    assert (batch(), rows()) == (set(), 5)
    files[1].write_bytes(files[0].read_bytes())  # somebody has mended it
    ingest(opened, IngestOptions(seconds=0, max_seconds=1.0))
    assert rows() == 6
    files[1].write_bytes(files[2].read_bytes())
    ingest(opened, IngestOptions(seconds=0, max_seconds=1.0))
    assert rows() == 7
