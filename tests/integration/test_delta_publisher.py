"""`publishers = ["delta"]`: what is in the log, and what stops the publisher.

That a reader sees what ours see, whatever fails: `tests/contract/test_publishers.py`.
"""

import json
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.publishers import delta
from lakeupsert.storage import LocalStore
from tests.harness.lake import Lake, delta_rows, row


def nights(root: Path, count: int = 3, **settings: Any) -> Lake:
    """Three partitions; every night updates a third of the keys."""
    lake = Lake(root, **{"publishers": ("delta",), "strategy": "delta", **settings})
    for number in range(count):
        land(lake, number)
    return lake


def land(lake: Lake, number: int) -> None:
    rows = [row(f"k{i:03}", day, number, number) for day in range(3) for i in range(0, 90, 3 if number else 1)]
    lake.land(f"{number}.jsonl", rows)
    lake.run()


def log_of(lake: Lake) -> dict[str, bytes]:
    folder = lake.root / "processed"
    paths = [*(folder / "_delta_log").iterdir(), *(folder / "dv").iterdir()] if (folder / "dv").is_dir() else []
    return {path.name: path.read_bytes() for path in paths}


def commit(lake: Lake, version: int) -> list[dict[str, Any]]:
    path = lake.root / "processed" / "_delta_log" / f"{version:020}.json"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each third version."""
    monkeypatch.setattr(delta, "CHECKPOINT_EVERY", 3)


def standing(lake: Lake) -> tuple[int | None, int]:
    found = lake.table.status().publishers["delta"]
    return found.snapshot, found.behind


@pytest.mark.parametrize(
    ("strategy", "features", "moved"),
    [
        ("rewrite", {"timestampNtz"}, []),  # it leaves nothing to compact
        ("delta", {"timestampNtz", "deletionVectors"}, [2]),
    ],
)
def test_readers_need_only_what_is_there_and_a_compaction_changes_no_row(
    tmp_path: Path, strategy: str, features: set[str], moved: list[int]
) -> None:
    lake = nights(tmp_path / "lake", 2, strategy=strategy)
    lake.table.compact(full=True)
    versions = [commit(lake, number) for number in range(len(lake.table.snapshots()))]
    assert {
        f for actions in versions for a in actions for f in a.get("protocol", {}).get("readerFeatures", [])
    } == features
    added = [[a["add"] for a in actions if "add" in a] for actions in versions]
    assert [n for n, adds in enumerate(added) if not all(add["dataChange"] for add in adds)] == moved


def test_values_of_every_type(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "k": pa.array([1, 2, 3], pa.int64()),
            "part": ["a b", "x=y", "%41 ü"],
            "ts": pa.array([datetime(2020, 1, 1)] * 3, pa.timestamp("us", "UTC")),
            "naive": pa.array(
                [datetime(1, 1, 1), None, datetime(9999, 12, 31, 23, 59, 59, 999999)], pa.timestamp("us")
            ),
            "amount": pa.array([Decimal("1.20"), None, Decimal("-99999999.99")], pa.decimal128(10, 2)),
            "ratio": pa.array([float("nan"), None, -0.5]),
            "day": pa.array([date(2020, 1, 1), None, date(1999, 12, 31)]),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "nested": pa.array([{"x": 1, "y": None}, None, {"x": None, "y": [1, 2]}]),
            "blob": pa.array([b"\x00\xff", b"", None]),
            "flag": pa.array([True, None, False]),
        }
    )
    (tmp_path / "landing").mkdir()
    pq.write_table(rows, tmp_path / "landing" / "0.parquet")
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("k",),
        partition_by=("part",),
        order_by=("ts",),
        publishers=("delta",),
    )
    table = Table("t", settings)
    assert table.run(host="local").publish.publishers["delta"].behind == 0
    engine = QueryBuilder().register("t", DeltaTable(str(tmp_path / "processed")))
    found = pa.table(engine.execute("SELECT * FROM t ORDER BY k").read_all())
    ours = table.to_arrow().read_all().sort_by("k")
    assert list(map(repr, found.to_pylist())) == list(map(repr, ours.select(found.column_names).to_pylist()))


@pytest.mark.parametrize(
    "statement",
    [
        lambda t: write_deltalake(
            t, pa.table({"k": ["x"], "l": pa.array([1], pa.int32())}), mode="append", schema_mode="merge"
        ),
        lambda t: t.delete("k = 'k001'"),
        lambda t: t.update({"v": "0"}),
        lambda t: t.vacuum(0, dry_run=False, enforce_retention_duration=False),
        lambda t: t.optimize.compact(),
        lambda t: t.restore(0),
        lambda t: t.alter.set_table_properties({"delta.appendOnly": "true"}),
    ],
    ids=["append", "delete", "update", "vacuum", "optimize", "restore", "properties"],
)
def test_no_other_program_writes(tmp_path: Path, statement: Callable[[DeltaTable], object]) -> None:
    lake = nights(tmp_path / "lake", 3, strategy="rewrite")  # which leaves superseded files
    before = log_of(lake)
    files = lake.stored_files()
    with pytest.raises(Exception, match=r"(?i)unsupported.*lakeupsert"):
        statement(DeltaTable(lake.settings.processed))
    assert log_of(lake) == before
    assert lake.stored_files() == files


@pytest.mark.usefixtures("frequent_checkpoints")
def test_two_publishers_write_the_same_bytes(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 5)
    twin = lake.copy(tmp_path / "twin")
    first = log_of(lake)
    twin.table.publish(to="delta", reset=True)  # one version, the newest
    assert delta_rows(twin.settings.processed) == delta_rows(lake.settings.processed)
    third = lake.copy(tmp_path / "third")
    for version in range(2, 5):  # behind by the last ones, with a checkpoint among them
        for path in (third.root / "processed" / "_delta_log").glob(f"{version:020}.*"):
            path.unlink()
    third.reopen()
    third.table.publish(to="delta")
    assert {**log_of(third), "_last_checkpoint": b""} == {**first, "_last_checkpoint": b""}


def test_log_that_begins_anew_has_all_vectors(tmp_path: Path) -> None:
    """The last night brought one partition, so its objects lack the vectors of the others."""
    lake = nights(tmp_path / "lake", 3)
    lake.land("one.jsonl", [row(f"k{i:03}", 0, 9, i) for i in range(1, 90, 3)])
    lake.run()
    lake.table.publish(to="delta", reset=True)
    lake.check()


def test_publishers_with_other_settings_go_on_from_one_log(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    lake.mend(lambda row: False, delta_vectors="inline")
    # As many rows of each partition, but other ones.
    lake.land("2.jsonl", [row(f"k{i:03}", day, 2, 2) for day in range(3) for i in range(1 + day, 90, 9)])
    lake.run()
    places = {
        a["add"]["deletionVector"]["storageType"] for a in commit(lake, 2) if "deletionVector" in a.get("add", {})
    }
    lake.mend(lambda row: False, delta_vectors="file")
    land(lake, 3)
    lake.check()
    assert places == {"i"}


@pytest.mark.long
@pytest.mark.usefixtures("frequent_checkpoints")
def test_publisher_that_may_not_delete_leaves_the_hint_to_vacuum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on AWS may create objects only."""

    def refuse(store: LocalStore, names: object) -> None:
        raise ConfigurationError("not-permitted", "no right to delete", next="ask for it")

    def named() -> int:
        found: int = json.loads((lake.root / "processed" / "_delta_log" / "_last_checkpoint").read_text())["version"]
        return found

    lake = nights(tmp_path / "lake", 1, publishers=())
    lake.mend(lambda row: False, publishers=("delta",))
    with monkeypatch.context() as limited:
        limited.setattr(LocalStore, "delete", refuse)
        for number in range(1, 8):
            land(lake, number)
    assert standing(lake) == (7, 0)
    assert named() == 1, "where the log began"
    lake.check()
    lake.table.vacuum(dry=False)
    assert named() == 6
    lake.check()


@pytest.mark.long
@pytest.mark.usefixtures("frequent_checkpoints")
def test_vacuum_deletes_old_versions_and_their_vectors(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 1, superseded_retention="0s", keep_snapshots=1)
    for number in range(1, 8):
        lake.land(
            f"{number}.jsonl", [row(f"k{i:03}", day, number, i) for day in range(3) for i in range(number, 90, 20)]
        )
        lake.run()
    lake.table.compact(full=True)
    before = len(list((lake.root / "processed" / "dv").iterdir()))

    class Later(clock.Source):
        def now(self) -> datetime:
            return super().now() + timedelta(hours=2)

    with clock.use(Later()):  # objects of a version that somebody may write just now are kept for an hour
        lake.table.vacuum(dry=False)
    assert len(list((lake.root / "processed" / "dv").iterdir())) < before
    log = [name for name in log_of(lake) if name[0].isdigit()]
    assert min(int(name[:20]) for name in log) >= 6
    assert delta_rows(lake.settings.processed) == lake.rows()


def test_columns_that_were_renamed_before_hold_the_publisher_until_a_full_compaction(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    before = delta_rows(lake.settings.processed)
    Table("t", msgspec.structs.replace(lake.settings, publishers=())).rename_column("v", "value")
    lake.land("2.jsonl", [{**row("k000", 0, 5), "value": 5}])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    published = lake.table.publish()
    problem = published.publishers["delta"].problem
    assert problem is not None
    assert problem.code == "unfit-for-delta"
    assert "reprocess" in problem.next
    assert delta_rows(lake.settings.processed) == before
    lake.table.reprocess(host="local")
    lake.table.publish()
    assert standing(lake)[1] == 0
    assert delta_rows(lake.settings.processed) == lake.rows()


def test_a_column_keeps_its_name_in_files_and_no_rename_holds_the_publisher(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    plain = DeltaTable(lake.settings.processed).protocol().reader_features or []
    assert "columnMapping" not in plain  # Polars refuses it
    lake.table.rename_column("v", "value")
    lake.land("2.jsonl", [{**row("k000", 0, 5), "value": 5, "v": 7}])
    lake.run()
    assert standing(lake)[1] == 0
    found = delta_rows(lake.settings.processed)
    assert found == lake.rows()
    assert {r["v"] for r in found} == {None, 7}
    written = {name for file in lake.table.view().files() for name in pq.read_schema(file.path).names}
    assert {name for name in written if name.startswith("v")} == {"v", "v_6"}


def test_files_names_the_delta_table_where_a_listing_would_be_wrong(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    answer = CliRunner().invoke(main, ["files", "--json", "--config", str(lake.configure())])
    error = json.loads(answer.output)["error"]
    assert error["code"] == "superseded-rows"
    assert f"{lake.settings.processed} as a Delta table" in error["next"]


def test_every_file_has_statistics_under_its_columns_names(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    lake.table.rename_column("v", "value")
    lake.land("2.jsonl", [{**row("k000", 0, 5), "value": 5, "v": 7}])
    lake.run()
    log = [action["add"] for number in range(3) for action in commit(lake, number) if "add" in action]
    marked = [add for add in log if "deletionVector" in add]
    assert marked
    for add in log:
        stats, file = json.loads(add["stats"]), pq.ParquetFile(Path(lake.settings.processed) / add["path"])
        rows = file.read().drop_columns(["op"] if "op" in file.schema_arrow.names else [])
        assert stats["numRecords"] == rows.num_rows
        assert stats.get("tightBounds", True) == ("deletionVector" not in add)
        assert stats["nullCount"] == {name: rows[name].null_count for name in rows.column_names}
        for name in ("k", "l", "v"):
            values = [value for value in rows[name].to_pylist() if value is not None]
            assert (stats["minValues"][name], stats["maxValues"][name]) == (min(values), max(values))
    assert {name for add in log for name in json.loads(add["stats"])["minValues"]} == {"k", "l", "ts", "v", "v_6"}


@pytest.mark.parametrize("first", ["naive", "utc"])
def test_times_of_another_form_hold_the_publisher_until_a_reset(tmp_path: Path, first: Any) -> None:
    """Readers would take the bounds that older files have for moments of another zone."""
    lake = nights(tmp_path / "lake", 2, delta_timestamps=first)
    settings = msgspec.structs.replace(lake.settings, delta_timestamps={"naive": "utc", "utc": "naive"}[first])
    table = Table("t", settings)
    log = log_of(lake)
    lake.land("2.jsonl", [row("k000", 0, 5)])
    problem = table.run(host="local").publish.publishers["delta"].problem
    assert problem is not None
    assert problem.code == "unfit-for-delta"
    assert "--reset" in problem.next
    assert log_of(lake) == log
    table.publish(to="delta", reset=True)
    assert table.status().publishers["delta"].behind == 0
    (add, *_) = [action["add"] for action in commit(lake, 2) if "add" in action]
    assert json.loads(add["stats"])["minValues"]["ts"].endswith("Z") == (first == "naive")


@pytest.mark.parametrize("reset", [True, False])
def test_snapshot_that_took_the_number_of_a_lost_one(reset: bool, tmp_path: Path) -> None:
    """Its version can't be written again without a reset; the next version shows all that differs."""
    lake = nights(tmp_path / "lake", 3)
    folder = lake.root / "processed" / "_lakeupsert" / "snapshots"
    min(folder.iterdir()).unlink()  # the newest one, which no ledger entry names yet
    lake.reopen()
    lake.land("3.jsonl", [row("k000", 2, 8, 8)])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    found = lake.table.publish()  # with this batch, too
    problem = found.publishers["delta"].problem
    assert found.snapshot == 2
    assert problem is not None
    assert problem.code == "foreign-delta-commit"
    if reset:
        lake.table.publish(to="delta", reset=True)
    lake.land("4.jsonl", [row("k000", 0, 9, 9)])
    lake.run()
    assert standing(lake) == (3, 0)
    assert delta_rows(lake.settings.processed) == lake.rows()
    named = {add["path"] for add in pa.table(DeltaTable(lake.settings.processed).get_add_actions()).to_pylist()}
    assert named == {file.name for file in lake.table.files()}


def test_version_that_was_lost_and_rebuilt_with_equal_figures_is_shown(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2, strategy="rewrite")
    damaged = "d=2020-01-01"
    before = lake.table.snapshots()[0].body.partitions
    lake.rebuild_newest_version(damaged)
    now = lake.table.snapshots()[0].body.partitions
    assert {p for p in now if now[p] != before[p]} == {damaged}
    assert msgspec.structs.replace(now[damaged], write_id=before[damaged].write_id) == before[damaged]
    assert standing(lake)[1] == 0
    named = {add["path"] for add in pa.table(DeltaTable(lake.settings.processed).get_add_actions()).to_pylist()}
    assert named == {file.name for file in lake.table.files()}
    lake.table.publish()
    assert lake.table.snapshots()[0].body.partitions == now
    lake.check()


def test_a_dropped_column_whose_name_comes_back_never_shows_its_old_values(tmp_path: Path) -> None:
    """It was dropped before the publisher was there, and a partition that stays as it is still has its values."""
    lake = nights(tmp_path / "lake", 2, publishers=())
    lake.table.drop_column("v")
    lake.mend(lambda row: False, publishers=("delta",))
    lake.run()
    assert standing(lake)[1] == 0
    before = delta_rows(lake.settings.processed)
    lake.land("2.jsonl", [row("k000", 0, 5)])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    problem = lake.table.publish().publishers["delta"].problem
    assert problem is not None
    assert problem.code == "unfit-for-delta"
    assert delta_rows(lake.settings.processed) == before
    lake.table.reprocess(host="local")
    lake.table.publish()
    assert standing(lake)[1] == 0
    assert delta_rows(lake.settings.processed) == lake.rows()


def test_reset_deletes_nothing_if_the_snapshot_can_not_be_shown(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    before = delta_rows(lake.settings.processed)
    Table("t", msgspec.structs.replace(lake.settings, publishers=())).rename_column("v", "value")
    lake.land("2.jsonl", [{**row("k000", 0, 5), "value": 5}])
    lake.run()
    with pytest.raises(ConfigurationError) as refused:
        lake.table.publish(to="delta", reset=True)
    assert refused.value.code == "unfit-for-delta"
    assert delta_rows(lake.settings.processed) == before


@pytest.mark.usefixtures("frequent_checkpoints")
def test_what_nobody_expects_in_the_log_fails_no_night_and_no_vacuum(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 4)
    [checkpoint] = (lake.root / "processed" / "_delta_log").glob("*.checkpoint.parquet")
    checkpoint.write_bytes(b"PAR1 nothing PAR1")
    land(lake, 4)
    problem = lake.table.publish().publishers["delta"].problem
    assert problem is not None
    assert problem.code in ("publisher-failed", "foreign-delta-commit")
    lake.table.vacuum(dry=False)
    lake.table.publish(to="delta", reset=True)
    assert standing(lake)[1] == 0
    assert delta_rows(lake.settings.processed) == lake.rows()
