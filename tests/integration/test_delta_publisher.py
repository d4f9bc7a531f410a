"""`publishers = ["delta"]`: what delta-rs reads of every version is what our readers read of the snapshot of that number."""

import contextlib
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
from deltalake.exceptions import TableNotFoundError

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.publishers import delta
from lakeupsert.storage import LocalStore
from lakeupsert.testing.faults import Fault
from lakeupsert.testing.lake import Lake, delta_rows, row
from lakeupsert.testing.publishers import publish_in_threads


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


def standing(lake: Lake) -> tuple[int | None, int]:
    found = lake.table.status().publishers["delta"]
    return found.snapshot, found.behind


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_every_version_is_its_snapshot(tmp_path: Path, strategy: Any) -> None:
    lake = nights(tmp_path / "lake", 4, strategy=strategy)
    lake.table.compact(full=True)
    lake.table.restore("1", dry=False)
    land(lake, 4)
    lake.check()
    versions = [commit(lake, number) for number in range(len(lake.table.snapshots()))]
    features = {f for actions in versions for a in actions for f in a.get("protocol", {}).get("readerFeatures", [])}
    only_moved = [
        n for n, actions in enumerate(versions) if any(not a["add"]["dataChange"] for a in actions if "add" in a)
    ]
    assert (features, only_moved) == {
        "rewrite": ({"timestampNtz"}, []),  # it leaves nothing to compact
        "delta": ({"timestampNtz", "deletionVectors"}, [4]),
    }[strategy]


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
    "type_", [pa.uint32(), pa.timestamp("ns"), pa.float16(), pa.time64("us"), pa.list_(pa.uint8())], ids=str
)
def test_type_that_delta_lacks_is_named_and_the_night_goes_on(tmp_path: Path, type_: pa.DataType) -> None:
    (tmp_path / "landing").mkdir()
    rows = pa.table({"k": [1], "d": [date(2020, 1, 1)], "ts": [1], "odd": pa.array([None], type_)})
    pq.write_table(rows, tmp_path / "landing" / "0.parquet")
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
        publishers=("delta",),
    )
    table = Table("t", settings)
    published = table.run(host="local").publish
    assert published.rows == 1
    problem = published.publishers["delta"].problem
    assert problem is not None
    assert problem.code == "unfit-for-delta"
    assert "'odd'" in problem.message
    with pytest.raises(ConfigurationError, match="'odd'"):
        table.publish(to="delta")
    assert not (tmp_path / "processed" / "_delta_log").exists()


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


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("begins", [False, True], ids=["goes on", "begins"])
def test_fault_at_every_call_of_a_publish_is_healed_by_the_next(tmp_path: Path, fault: Fault, begins: bool) -> None:
    lake = nights(tmp_path / "lake", 1, publishers=() if begins else ("delta",))
    lake.mend(lambda row: False, publishers=("delta",))
    before = lake.rows()
    lake.land("1.jsonl", [row(f"k{i:03}", day, 9, 9) for day in range(3) for i in range(0, 90, 2)])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")

    def check(struck: Lake) -> None:
        with contextlib.suppress(TableNotFoundError):
            assert delta_rows(struck.settings.processed) in (before, struck.rows())
        struck.table.publish(to="delta")
        assert standing(struck) == (1, 0)
        struck.check()

    assert lake.strike_every_call(fault, lambda lake: lake.table.publish(), check) > 10


def test_two_publishers_write_the_same_bytes(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 12)
    twin = lake.copy(tmp_path / "twin")
    first = log_of(lake)
    twin.table.publish(to="delta", reset=True)  # one version, the newest
    assert delta_rows(twin.settings.processed) == delta_rows(lake.settings.processed)
    third = lake.copy(tmp_path / "third")
    for version in range(9, 12):  # behind by the last ones, with a checkpoint among them
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
    land(lake, 2)
    places = {
        a["add"]["deletionVector"]["storageType"] for a in commit(lake, 2) if "deletionVector" in a.get("add", {})
    }
    lake.mend(lambda row: False, delta_vectors="file")
    land(lake, 3)
    lake.check()
    assert places <= {"i"}


def test_many_publishers_at_once_make_one_version_a_snapshot(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 0)
    publish_in_threads(lake, "delta", rounds=12)
    assert standing(lake) == (11, 0)
    lake.check()


def test_foreign_commit_stops_the_publisher_until_a_reset(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    foreign = lake.root / "processed" / "_delta_log" / f"{2:020}.json"
    foreign.write_text('{"commitInfo":{"timestamp":1}}\n')
    land(lake, 2)
    assert standing(lake) == (2, 0), "the number is taken, by another program"
    land(lake, 3)
    with pytest.raises(DamagedTableError) as raised:
        lake.table.publish(to="delta")
    assert raised.value.code == "foreign-delta-commit"
    assert foreign.name in raised.value.message
    lake.table.publish(to="delta", reset=True)
    assert standing(lake) == (3, 0)
    lake.check()


def test_doctor_status_and_report_say_how_far_a_publisher_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = nights(tmp_path / "lake", 1)
    levels = [f.level for f in lake.table.doctor() if f.check == "publishers"]
    with monkeypatch.context() as dead:
        dead.setattr(delta.DeltaPublisher, "catch_up", lambda *a: None)
        land(lake, 1)
        land(lake, 2)
    assert standing(lake) == (0, 2)
    levels += [f.level for f in lake.table.doctor() if f.check == "publishers"]
    assert levels == ["ok", "warning"]
    config = str(lake.configure())
    answer = CliRunner().invoke(main, ["status", "--json", "--config", config])
    assert json.loads(answer.output)["result"]["publishers"]["delta"] == {
        "snapshot": 0,
        "behind": 2,
        "warning": None,
        "problem": None,
    }
    assert "publish --to delta" in json.loads(answer.output)["warnings"][0]
    page = tmp_path / "report.html"
    assert CliRunner().invoke(main, ["report", "--config", config, "--output", str(page)]).exit_code == 0
    assert "2 behind" in page.read_text("utf-8")


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
        for number in range(1, 22):
            land(lake, number)
    assert standing(lake) == (21, 0)
    assert named() == 1, "where the log began"
    lake.check()
    lake.table.vacuum(dry=False)
    assert named() == 20
    lake.check()


def test_vacuum_keeps_what_a_publisher_that_is_behind_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = nights(tmp_path / "lake", 2, superseded_retention="0s", keep_snapshots=1)
    expected = delta_rows(lake.settings.processed)
    with monkeypatch.context() as dead:
        dead.setattr(delta.DeltaPublisher, "catch_up", lambda *a: None)
        land(lake, 2)
        lake.table.compact(full=True)
        lake.table.vacuum(dry=False)
        assert standing(lake)[0] == 1 or standing(lake)[0] == 2
        assert delta_rows(lake.settings.processed) == expected
    lake.table.publish(to="delta")
    deleted = lake.table.vacuum(dry=False).garbage
    assert deleted
    assert delta_rows(lake.settings.processed) == lake.rows()


def test_vacuum_deletes_old_versions_and_their_vectors(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 1, superseded_retention="0s", keep_snapshots=1)
    for number in range(1, 25):
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
    assert min(int(name[:20]) for name in log) >= 20
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


def test_what_nobody_expects_in_the_log_fails_no_night_and_no_vacuum(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 11)
    [checkpoint] = (lake.root / "processed" / "_delta_log").glob("*.checkpoint.parquet")
    checkpoint.write_bytes(b"PAR1 nothing PAR1")
    land(lake, 11)
    problem = lake.table.publish().publishers["delta"].problem
    assert problem is not None
    assert problem.code in ("publisher-failed", "foreign-delta-commit")
    lake.table.vacuum(dry=False)
    lake.table.publish(to="delta", reset=True)
    assert standing(lake)[1] == 0
    assert delta_rows(lake.settings.processed) == lake.rows()
