"""Parts of messages: counts, folders, and the command that adds an extra to this installation."""

import shlex
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from lakeupsert import phrases


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ('{"url": "file:///home/me/my%20lake", "dir_info": {"editable": true}}', "/home/me/my lake"),
        ('{"url": "file:///tmp/lakeupsert-1-py3-none-any.whl"}', "/tmp/lakeupsert-1-py3-none-any.whl"),
        ('{"url": "https://example.org/lakeupsert.whl"}', "lakeupsert"),
        (None, "lakeupsert"),
    ],
)
def test_an_extra_comes_from_where_lakeupsert_came_from(
    origin: str | None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: origin))
    assert shlex.split(phrases.install_extra("aws")) == [sys.executable, "-m", "pip", "install", f"{source}[aws]"]


def test_an_extra_of_a_folder_on_the_path_comes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert shlex.split(phrases.install_extra("aws"))[-1] == "lakeupsert[aws]"


def test_one_of_a_kind_has_no_s() -> None:
    counted = [phrases.count(1, "file"), phrases.count(0, "file"), phrases.count(2000, "batch", "es")]
    assert counted == ["1 file", "0 files", "2,000 batches"]


def test_a_file_is_told_from_a_folder_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert phrases.no_folder(file) != phrases.no_folder(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["plain.parquet", "day=2020-01-01/it's a file.json", "ü%41/x", "a:b"])
def test_address_of_a_file_becomes_a_path_that_a_shell_takes(name: str) -> None:
    path = Path("/lake") / name
    shown = phrases.shell_paths(f"Data file {path.as_uri()} is missing, as is s3://lake/x%3D1.")
    assert shlex.split(shown)[2] == str(path)
    assert "file:" not in shown
    assert "s3://lake/x%3D1." in shown
