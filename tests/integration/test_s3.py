"""A table whose zones are on S3: nights, upkeep and commands as on a local disk, on each server."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import TryAgainError
from lakeupsert.storage import open_store
from lakeupsert.testing.faults import Fault, Killed
from lakeupsert.testing.lake import Lake, row
from lakeupsert.testing.proxy import Rule, fault_proxy
from lakeupsert.testing.servers import Server

NewBucket = Callable[[Server], str]
NIGHTS = [
    [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)],
    [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)],
    [row("b", 0, 1, 3), row("e", 0, 1, 3), row("c", 1, 6, 3)],
]


def new_lake(root: Path, bucket: str, **settings: Any) -> Lake:
    zones = {"landing": f"s3://{bucket}/landing", "processed": f"s3a://{bucket}/processed"}
    return Lake(root, **zones, queue=str(root / "queue.sqlite"), **settings)


@pytest.fixture
def lake(s3_server: Server, new_bucket: NewBucket, tmp_path: Path) -> Lake:
    return new_lake(tmp_path, new_bucket(s3_server))


def test_nights_equal_the_model(lake: Lake) -> None:
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows, refused=[{**row("x", 1, 1), "v": "no number"}])
        lake.run()
        lake.check()
    lake.land("last.jsonl", [row("z", 0, 9)])
    lake.table.append(host="local")
    assert "z" in {r["k"] for r in lake.rows("latest")}
    lake.finish_and_check()


def test_night_costs_few_requests(lake: Lake) -> None:
    """Once per step the heads of spec, ledger and snapshot; then per landing file three reads, per partition what its merge
    takes (the batch's pack, its one base file, a put, a create) and what publishing it takes."""
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    lake.land("1.jsonl", NIGHTS[1])
    lake.reopen()
    ground = 4  # gets: the heads of spec and ledger, and the two entries that the ledger has
    assert counted(lake, lambda: lake.table.append(host="local")) == {
        "list": 2 + 1,
        "get": ground + 3,
        "put": 1,
        "create": 1 + 1,  # a new process first sees whether conditions hold
    }
    stored, new = 2, 1
    assert counted(lake, lambda: lake.table.dedupe()) - published(stored + new) == {
        "list": 2 + stored + new,
        "get": 3 + stored * 3 + new,
        "put": stored + new,
        "create": stored + new,
    }


def counted(lake: Lake, step: Callable[[], object]) -> Counter[str]:
    table = lake.table._table

    def now() -> Counter[str]:
        return Counter(table.store.requests.as_dict()) + Counter(table.landing.requests.as_dict())

    before = now()
    step()
    return now() - before


def published(partitions: int) -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("number", range(0))
def test_nothing(number: int) -> None: ...


def test_upkeep_and_proof(lake: Lake) -> None:
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows)
        lake.run()
    assert lake.table.reconcile(deep=True).deep
    lake.table.vacuum(dry=False)
    lake.check()


COMMANDS = [
    "plan",
    "run --host local",
    "status",
    "history",
    "files",
    "doctor",
    "explain k=a l=0",
    "reconcile --deep",
    "reprocess --partition 2020-01-01 --source landing",
    "restore --to 0 --yes",
    "run --host local",
    "vacuum --yes",
    "export --output out.parquet",
]


def test_commands_take_addresses_of_s3(
    s3_server: Server, new_bucket: NewBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = new_bucket(s3_server)
    lake = new_lake(tmp_path, bucket)
    lake.land("0.parquet.jsonl", NIGHTS[0])
    proposed = command("init", f"s3://{bucket}/landing")
    print(proposed)
    Path("lakeupsert.toml").write_text(
        f"""[tables.t]
        landing = "s3://{bucket}/landing"
        processed = "s3a://{bucket}/processed"
        queue = "queue.sqlite"
        key = ["k", "l"]
        partition_by = ["d"]
        order_by = ["ts"]
        delete = {{column = "op", values = ["D"]}}
        """
    )
    for line in COMMANDS:
        print(line, command(*line.split())["result"])
    assert pq.read_table("out.parquet").num_rows == 4


def command(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
