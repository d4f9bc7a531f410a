"""What Debezium records of a database under 2,000 random transactions gives the rows of the database, by `__log_position`.

Transactions change a key several times, change keys, delete and insert again, roll back a part, wait for another's commit, and
are open while the first snapshot is read. The connector is stopped and killed, and reads incremental and blocking snapshots
meanwhile (`record.py`). Needs `make capture`.
"""

import json
import random
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.append import append

pytestmark = pytest.mark.capture
BUILD = Path(__file__).resolve().parents[2] / "build" / "capture"
NEEDED = {"postgresql": Path("/usr/lib/postgresql/15/bin/postgres"), "mariadb": Path("/usr/sbin/mariadbd")}
BATCHES = 6
NAMES = ("id", "u", "area", "v", "wide", "amount", "day", "at", "small", "yes")
TYPES = ("bigint", "bigint", "string", "string", "string", "string", "bigint", "timestamp", "string", "string")
FAR = -600_000_000
"""Days of infinity, which Debezium sends as another such number in a snapshot and in the stream."""
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module", params=list(NEEDED))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in (NEEDED[request.param], BUILD / "venv", BUILD / "mariadb"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    root = tmp_path_factory.mktemp("capture")
    command = [BUILD / "venv" / "bin" / "python", Path(__file__).with_name("record.py"), request.param, root / "feed"]
    subprocess.run([*map(str, command), "2000", "20261127"], check=True)
    return root / "feed"


def events(recorded: Path, number: int, table: str) -> list[str]:
    lines = (recorded / f"feed-{number}.tsv").read_text().splitlines()
    parts = [line.split("\t", 1) for line in lines]
    if not any(topic.endswith(f".{table}") for topic, _ in parts):
        return []
    others = (".marker", ".signals", ".wide", ".narrow")
    return [value for topic, value in parts if topic.endswith(f".{table}") or not topic.endswith(others)]


def rows_of_database(recorded: Path, number: int, table: str) -> Rows:
    rows = json.loads((recorded / f"rows-{number}.json").read_text())
    return sorted((*row[:7], datetime.fromisoformat(row[7]), row[8], str(row[9]).lower()) for row in rows[table])


class Lake:
    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        (root / "landing").mkdir(parents=True)
        given = {
            "key": ("id",),
            "partition_by": (),
            "order_by": ("__log_position",),
            "schema": dict(zip(NAMES, TYPES, strict=True)),
            "read": ReadSettings(envelope="debezium"),
            "delete": DeleteSettings(column="__op", values=("d",)),
            **settings,
        }
        self.table = Table(
            "t", TableSettings(landing=str(root / "landing"), processed=str(root / "processed"), **given)
        )

    def night(self, lines: list[str], **options: Any) -> Any:
        name = f"{len(list((self.root / 'landing').iterdir())):03}.jsonl"
        (self.root / "landing" / name).write_text("\n".join(lines) + "\n")
        return self.table.run(host="local", **options)

    def nights(self, lines: list[str]) -> list[Any]:
        size = len(lines) // BATCHES + 1
        return [self.night(lines[begin : begin + size]) for begin in range(0, len(lines), size)]

    @property
    def rows(self) -> Rows:
        found = self.table.to_arrow(columns=list(NAMES)).read_all().to_pylist()
        for row in found:
            row["day"] = None if row["day"] is None or row["day"] < FAR else row["day"]
        return sorted(tuple(row[name] for name in NAMES) for row in found)


@pytest.mark.parametrize("arrival", ["as sent", "shuffled"])
def test_table_is_the_database(recorded: Path, arrival: str, tmp_path: Path) -> None:
    lines = events(recorded, 1, "wide")
    if arrival == "shuffled":
        random.Random(1).shuffle(lines)
    plain = Lake(tmp_path / "plain")
    parted = Lake(tmp_path / "parted", partition_by=("area",), key_scope="table")
    for lake in (plain, parted):
        results = lake.nights(lines)
        warnings = [w for r in results for w in r.append.warnings if "snapshot" in w or "order_by" in w]
        assert arrival == "shuffled" or not warnings
        assert lake.rows == rows_of_database(recorded, 1, "wide")


def test_columns_that_were_not_sent_are_kept(recorded: Path, tmp_path: Path) -> None:
    """PostgreSQL's default identity: a delete has the key alone, and an update no wide text that it leaves
    unchanged, which nobody can know under another key."""
    if not (lines := events(recorded, 1, "narrow")):
        pytest.skip("only PostgreSQL")
    lake = Lake(tmp_path, mode="columns")
    lake.nights(lines)
    assert lake.rows == rows_of_database(recorded, 1, "narrow")


def test_order_by_lsn_is_wrong(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was what the documentation said. By time it is luck whether a row of an incremental snapshot beats a later change."""
    if not events(recorded, 1, "narrow"):
        pytest.skip("only PostgreSQL")
    with pytest.raises(RefusedError) as e:
        Lake(tmp_path / "refused", order_by=("__source_lsn",)).night(events(recorded, 1, "wide"))
    assert e.value.code == "misplaced-events"
    monkeypatch.setattr(append, "refuse_misplaced", lambda *given: None)
    for order in (("__source_lsn",), ("__source_ts_us", "__source_lsn")):
        lake = Lake(tmp_path / order[0], order_by=order)
        warnings = [w for result in lake.nights(events(recorded, 1, "wide")) for w in result.append.warnings]
        assert [w for w in warnings if order[0] in w]
        assert len(order) == 2 or lake.rows != rows_of_database(recorded, 1, "wide")


def test_second_connector_is_a_full_extract(recorded: Path, tmp_path: Path) -> None:
    """It lost its offsets, and rows changed and went before it began."""
    lake = Lake(tmp_path / "full", full_extract="replace")
    lake.nights(events(recorded, 1, "wide"))
    lake.night(events(recorded, 2, "wide"), full="table", may_shrink=True)
    assert lake.rows == rows_of_database(recorded, 2, "wide")
    if events(recorded, 1, "narrow"):
        lake = Lake(tmp_path / "not declared")
        lake.nights(events(recorded, 1, "wide"))
        result = lake.night(events(recorded, 2, "wide"))
        assert [w for w in result.append.warnings if "began again" in w]
