"""A power cut may undo whatever is not synced. So all that a manifest names must be synced before the manifest appears."""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.errors import TryAgainError
from tests.harness.lake import Lake, row

PARTITIONS = 6


class Disk:
    """Knows which names of files a power cut would leave: the file was synced, then linked, then its folder was synced.

    Attributes:
        commits: each manifest, and the objects that it names and that a power cut would have taken when it appeared.
        broken: the name of a folder that can't be synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.synced: set[int] = set()
        self.durable: dict[str, bool] = {}
        self.commits: dict[str, set[str]] = {}
        self.broken = ""
        self._fsync, self._link = os.fsync, os.link
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "link", self.link)

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.name == self.broken:
            raise OSError(errno.EIO, "Input/output error")
        if threading.current_thread().name.startswith("write"):
            time.sleep(0.02)  # nobody may rely on a disk that is faster than the rest
        linked = [name for name in list(self.durable) if Path(name).parent == path]
        self._fsync(descriptor)
        self.synced.add(os.fstat(descriptor).st_ino)
        self.durable.update(dict.fromkeys(linked, True))

    def link(self, file: str, name: str) -> None:
        assert Path(file).stat().st_ino in self.synced, f"{name} gets its name before its bytes are synced"
        if "/_lakeupsert/partitions/" in name:
            named = {str(self.root / found) for found in _names(json.loads(Path(file).read_bytes())["body"])}
            assert named
            self.commits[name] = {found for found in named if not self.durable.get(found, False)}
        self.durable[name] = False
        self._link(file, name)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("name"):
            yield value["name"]
        for part in value.values():
            yield from _names(part)
    elif isinstance(value, list):
        for part in value:
            yield from _names(part)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, tmp_path / "lake/processed")


def _land(lake: Lake, night: int) -> None:
    keys = range(200 if night == 0 else 20)
    lake.land(f"{night}.jsonl", [row(f"k{n}", day, night + 1, n) for n in keys for day in range(PARTITIONS)])


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_power_cut_after_a_commit_takes_nothing_that_it_names(tmp_path: Path, disk: Disk, strategy: str) -> None:
    lake = Lake(tmp_path / "lake", strategy=strategy)
    for night in range(2):
        _land(lake, night)
        lake.run()
    assert len(disk.commits) == 2 * PARTITIONS
    assert not any(disk.commits.values()), disk.commits
    assert all(durable for name, durable in disk.durable.items() if "/_lakeupsert/partitions/" in name)
    lake.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_file_that_can_not_be_synced_stops_its_partition_and_no_other(
    tmp_path: Path, disk: Disk, strategy: str
) -> None:
    lake = Lake(tmp_path / "lake", strategy=strategy)
    _land(lake, 0)
    lake.run()
    _land(lake, 1)
    disk.broken, before = "d=2020-01-03", set(disk.commits)
    with pytest.raises(TryAgainError, match="2020-01-03"):
        lake.run()
    new = disk.commits.keys() - before
    assert len(new) == PARTITIONS - 1
    assert not any(disk.broken in name for name in new)
    assert not any(disk.commits.values()), disk.commits
    disk.broken = ""
    lake.finish_and_check()
