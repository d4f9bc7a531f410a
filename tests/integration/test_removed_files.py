"""Landing files of a source that are gone before a batch took them: `status`, `doctor` and `ingest` say so."""

from collections.abc import Mapping
from pathlib import Path

from lakeupsert.api import Table
from lakeupsert.config import DatabaseSource, SourceSettings
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.removed_files import MOST_LOOKS
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
