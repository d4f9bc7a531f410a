"""Processes that commit to the same Iceberg table at once, and processes that die between a snapshot and its commit."""

from pathlib import Path

import pytest

from lakeupsert.testing.lake import Lake, iceberg_settings, iceberg_table
from lakeupsert.testing.processes import Died, LakeProcess, Strike
from lakeupsert.testing.publishers import land, publish_in_processes


def new_lake(root: Path) -> Lake:
    settings = {"publishers": ("iceberg",), "iceberg": iceberg_settings(root), "strategy": "delta"}
    return Lake(root, keep_snapshots=1000, **settings)


def standing(lake: Lake) -> tuple[int | None, int]:
    found = lake.table.status().publishers["iceberg"]
    return found.snapshot, found.behind


@pytest.mark.parametrize("rounds", [24, pytest.param(200, marks=pytest.mark.crash)])
def test_two_processes_publish_at_once(folder: Path, rounds: int) -> None:
    """One commit a snapshot, in their order."""
    lake = new_lake(folder / "lake")
    publish_in_processes(lake, "iceberg", rounds)
    assert lake.settings.iceberg is not None
    table = iceberg_table(lake.settings.iceberg)
    assert table is not None
    numbers = [int(s.summary["lakeupsert.snapshot"] or -1) for s in table.metadata.snapshots if s.summary]
    assert numbers == list(range(rounds))
    parents = [s.parent_snapshot_id for s in table.metadata.snapshots]
    assert parents == [None, *(s.snapshot_id for s in table.metadata.snapshots)][:-1]
    lake.check()


@pytest.mark.parametrize(
    "strike",
    [
        Strike("create _lakeupsert/snapshots", when="after"),
        Strike("put _lakeupsert/iceberg/deletes", when="after"),
        Strike("put _lakeupsert/iceberg/metadata/manifest", when="after"),
        Strike("put _lakeupsert/iceberg/metadata/snap", when="after"),
        Strike("put _lakeupsert/iceberg/metadata/00002", when="after"),
    ],
    ids=["snapshot", "deletes", "manifest", "manifest list", "metadata"],
)
def test_process_killed_between_snapshot_and_commit(folder: Path, strike: Strike) -> None:
    """Killed behind what it wrote last."""
    lake = new_lake(folder / "lake")
    for number in range(2):
        land(lake, number)
        lake.run()
    land(lake, 2)
    with LakeProcess(lake) as process, pytest.raises(Died):
        process.do("run", strike=strike)
    lake.reopen()
    assert standing(lake) == (1, 1)
    lake.check()
    lake.run()
    assert standing(lake) == (2, 0)
    lake.check()
