"""Processes that write the same Delta log at once, and processes that die between a snapshot and its version."""

from pathlib import Path

import pytest

from lakeupsert.testing.lake import Lake
from lakeupsert.testing.processes import Died, LakeProcess, Strike
from lakeupsert.testing.publishers import land, publish_in_processes


def new_lake(root: Path) -> Lake:
    return Lake(root, publishers=("delta",), strategy="delta", keep_snapshots=1000)


def log_of(lake: Lake) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (lake.root / "processed" / "_delta_log").iterdir()}
    return {name: data for name, data in found.items() if name[0].isdigit()}


@pytest.mark.parametrize("rounds", [24, pytest.param(200, marks=pytest.mark.crash)])
def test_two_processes_publish_at_once(folder: Path, rounds: int) -> None:
    """One commit a snapshot, with the bytes that one process alone writes."""
    lake = new_lake(folder / "lake")
    publish_in_processes(lake, "delta", rounds)
    versions = sorted(int(name[:20]) for name in log_of(lake) if name.endswith(".json"))
    assert versions == [link.number for link in reversed(lake.table.snapshots())] == list(range(rounds))

    alone = lake.copy(folder / "alone")
    for path in (alone.root / "processed" / "_delta_log").iterdir():
        if path.name != f"{0:020}.json":
            path.unlink()
    alone.table.publish(to="delta")
    assert log_of(alone) == log_of(lake)
    lake.check()


@pytest.mark.parametrize(
    "strike",
    [
        Strike("create _lakeupsert/snapshots", when="after"),
        Strike("create dv", when="before"),
        Strike("create dv", when="after"),
        Strike("create _delta_log", when="before"),
    ],
    ids=["behind the snapshot", "before the vectors", "behind the vectors", "before the commit"],
)
def test_process_killed_between_snapshot_and_version(folder: Path, strike: Strike) -> None:
    lake = new_lake(folder / "lake")
    for number in range(2):
        land(lake, number)
        lake.run()
    land(lake, 2)
    with LakeProcess(lake) as process, pytest.raises(Died):
        process.do("run", strike=strike)
    lake.reopen()
    standing = lake.table.status().publishers["delta"]
    assert (standing.snapshot, standing.behind) == (1, 1)
    lake.check()
    lake.run()
    standing = lake.table.status().publishers["delta"]
    assert (standing.snapshot, standing.behind) == (2, 0)
    lake.check()
