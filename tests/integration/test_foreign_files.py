"""What leads out of a landing folder is named and not read."""

import os
from pathlib import Path

import pytest

from lakeupsert import RefusedError, Table
from lakeupsert.config import TableSettings
from lakeupsert.endpoint.batches import Batches
from lakeupsert.errors import ConfigurationError
from lakeupsert.sources.files import SourceFiles
from lakeupsert.storage.base import ForeignObjectError
from lakeupsert.storage.landing_folder import LandingFolder


@pytest.fixture
def table(tmp_path: Path) -> Table:
    landing, outside = tmp_path / "landing", tmp_path / "outside"
    for folder in (landing / "sub", outside):
        folder.mkdir(parents=True)
    for place in (landing / "a.csv", outside / "secret.csv", landing / "sub" / "b.csv"):
        place.write_text(f"id\n{place.stem}\n")
    settings = TableSettings(
        key=("id",), partition_by=(), order_by=("id",), landing=str(landing), processed=f"{tmp_path}/processed"
    )
    return Table("t", settings)


def ids(table: Table) -> list[str]:
    return sorted(map(str, table.to_arrow(columns=["id"]).read_all()["id"].to_pylist()))


def test_each_run_names_them_and_reads_none(table: Table, tmp_path: Path) -> None:
    landing, outside = tmp_path / "landing", tmp_path / "outside"
    (landing / "again").symlink_to(landing / "sub")  # no file has two names
    (landing / "file.csv").symlink_to(outside / "secret.csv")
    (landing / "folder").symlink_to(outside)
    (landing / "gone.csv").symlink_to(outside / "nothing.csv")
    (landing / "above").symlink_to(tmp_path)
    os.mkfifo(landing / "pipe.csv")
    for night in "cd":
        (landing / f"{night}.csv").write_text(f"id\n{night}\n")
        result = table.run(host="local").append
        assert result is not None
        [warning] = [text for text in result.warnings if "out of it" in text]
        assert warning.startswith("the landing zone has 5 links")
        assert "above, file.csv, folder and 2 more" in warning
    assert ids(table) == ["a", "b", "c", "d"]
    assert table.quarantine().read_all().num_rows == 0
    assert [text for text in table.status().warnings if "5 links" in text]
    (landing / "e.csv").write_text("id\ne\n")
    with pytest.raises(RefusedError, match="5 links"):  # keys that only these have would be deleted
        table.run(host="local", full="table")
    assert ids(table) == ["a", "b", "c", "d"]


def test_a_folder_that_becomes_a_link_after_it_was_listed(table: Table, tmp_path: Path) -> None:
    store = LandingFolder(tmp_path / "landing")
    (tmp_path / "landing/sub").rename(tmp_path / "landing/old")
    (tmp_path / "outside/b.csv").write_text("id\nsecret\n")
    (tmp_path / "landing/sub").symlink_to(tmp_path / "outside")
    for read in (store.get, store.open):
        with pytest.raises(ForeignObjectError):
            read("sub/b.csv")


def test_who_would_write_through_a_link_does_not_start(table: Table, tmp_path: Path) -> None:
    for name in ("endpoint", "source"):
        (tmp_path / "landing" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigurationError) as e:
        Batches(table._table)
    assert e.value.code == "landing-folder-linked"
    with pytest.raises(ConfigurationError) as e:
        SourceFiles(table._table, "source", ".jsonl.gz")
    assert e.value.code == "landing-folder-linked"
