"""Tables with `versions`: which batch each row came with, and when that was received, whatever happened to its file since."""

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.engine.resolve import Versions
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline import strategy
from tests.harness.lake import Lake, made_once, row
from tests.harness.rounds import TIMES
from tests.harness.spark import collect

BATCH, RECEIVED_AT = "_lakeupsert_batch", "_lakeupsert_received_at"
CASES = pytest.mark.parametrize(
    ("chosen", "engine"),
    [
        ("rewrite", "arrow"),
        ("delta", "arrow"),
        ("delta", "spark"),
        pytest.param("rewrite", "spark", marks=pytest.mark.long),
    ],
)
BIGINT = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint", "op": "string"}
Record = dict[str, Any]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small partitions get deltas, and three of them are folded."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    monkeypatch.setattr(strategy, "TOGETHER", 3)


def records(rng: random.Random) -> list[Any]:
    """Few keys and orders, so that many are late, equal to a stored one, or deletes."""

    def one() -> Any:
        op = rng.choice([None, None, None, None, "D"])
        return row(rng.choice("abcdefghijkl"), rng.randrange(2), rng.randrange(6), rng.randrange(99), op=op)

    return [one() for _ in range(rng.randint(5, 9))]


@pytest.mark.long
@CASES
@pytest.mark.parametrize("key_scope", ["partition", pytest.param("table", marks=pytest.mark.long)])
def test_rows_have_the_batches_of_their_records_after_every_step(
    key_scope: str, chosen: str, engine: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The model computes them from what arrived, batch by batch. `reconcile --deep` does so in SQL."""
    if engine == "spark":
        request.getfixturevalue("spark")
    rng = random.Random(f"{key_scope} {chosen}")
    small = {**BIGINT, "v": "int"}
    lake = Lake(tmp_path, versions=True, key_scope=key_scope, strategy=chosen, schema=small, keep_snapshots=99)
    lake.lay("old.parquet", [row(key, ord(key) % 2, 1, 0) for key in "abcdefghijklmn"])
    lake.table.adopt()
    lake.check()

    def night(again: bool = False) -> None:
        lake.table.append(host="local", again=again)
        lake.table.dedupe(engine=engine)
        lake.table.publish()
        lake.check()

    def land(number: int, refused: Any = ()) -> None:
        lake.land(f"{number}.jsonl", records(rng), refused)

    for number in range(4):
        land(number, [row("r", 0, 3, 1 << 40)] if number == 2 else ())
        night()
    deep = lake.table.reconcile(deep=True)
    assert not deep.unbalanced
    assert not deep.gone
    lake.mend(lambda refused: True, schema=BIGINT)
    lake.table.append(replay_quarantine=True)
    night()
    snapshot = lake.table.snapshots()[2].number
    lake.table.restore(snapshot, dry=False)
    night()
    land(5)
    night()
    night(again=True)
    lake.change("halve", {"v": "v + 1"}, "k = 'a'", lambda r: {**r, "v": r["v"] + 1} if r["k"] == "a" else None)
    lake.change("drop", None, "k = 'b'", lambda r: {**r, "op": "D"} if r["k"] == "b" else None)
    lake.check()
    land(6)
    land(7)
    lake.table.append(host="local")
    view = lake.view("latest")
    assert lake.table.to_arrow("latest", versions=True).read_all().to_pylist() == lake.expected_in(view)
    night()
    before = lake.table.to_arrow(versions=True).read_all()
    assert len(before[BATCH].unique()) > 3, "the generator makes rows of too few batches"
    lake.table.compact(full=True)
    for source in ("stored", "landing") if key_scope == "partition" else ("stored",):
        lake.table.reprocess(source=source, host="local", engine=engine)
        assert lake.table.to_arrow(versions=True).read_all() == before
    lake.table.vacuum(dry=False)
    lake.finish_and_check()


def test_deep_reconcile_finds_a_row_with_another_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path, versions=True)
    lake.land("1.jsonl", [row("a", 0, 1), row("a", 1, 1)])
    lake.run()
    assert not lake.table.reconcile(deep=True).unbalanced
    monkeypatch.setattr(Versions, "_numbered", lambda self, rows: rows)
    lake.land("2.jsonl", [row("b", 1, 1)])
    lake.run()
    assert [one.partition for one in lake.table.reconcile(deep=True).unbalanced] == ["d=2020-01-02"]


# ---------------------------------------------------------------- tables of other rules


def opened(root: Path, settings: str, more: str = "") -> Table:
    file = root / "lakeupsert.toml"
    first = 'landing = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\norder_by = ["version"]'
    file.write_text(f"[tables.t]\n{first}\nkeep_snapshots = 99\n{settings}\n{more}")
    return Table.open(file)


def land(root: Path, number: int, rows: list[Record]) -> None:
    (root / "landing").mkdir(exist_ok=True)
    lines = (json.dumps({"day": "2020-01-01", **one}) + "\n" for one in rows)
    (root / "landing" / f"{number}.jsonl").write_text("".join(lines))


def stamps(table: Table) -> dict[int, datetime]:
    """When each batch was received."""
    ledger = table.objects.ledger
    head = ledger.head()
    assert head is not None
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return {n.number: epoch + timedelta(microseconds=n.body.received_at) for n in ledger.between(-1, head.number)}


def found(table: Table, *columns: str, **options: Any) -> list[tuple[Any, ...]]:
    """The rows' values of these columns, and their batches; each was received when the ledger says."""
    rows = table.to_arrow(versions=True, **options).read_all().to_pylist()
    received = stamps(table)
    assert all(one[RECEIVED_AT] == received[one[BATCH]] for one in rows)
    return sorted((*(one[name] for name in columns), one[BATCH]) for one in rows)


@CASES
def test_combined_row_has_the_batch_of_its_record_of_greatest_rank(
    chosen: str, engine: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    table = opened(tmp_path, f'versions = true\nmode = "columns"\nstrategy = "{chosen}"')
    rng, greatest, values = random.Random(chosen), {}, {}
    for number in range(1, 7 * TIMES):
        rows: list[Record] = []
        for place in range(6):
            one = {"id": rng.choice("abcd"), "version": rng.randrange(9), rng.choice("xy"): number * 10 + place}
            rows.append(one)
            rank = (one["version"], number, place)
            greatest[one["id"]] = max(greatest.get(one["id"], rank), rank)
            for name in {*one} & {"x", "y"}:
                cell = values.setdefault((one["id"], name), (rank, one[name]))
                values[one["id"], name] = max(cell, (rank, one[name]))
        land(tmp_path, number, rows)
        table.run(host="local", engine=engine)
        wanted = [
            (key, *(values.get((key, name), (None, None))[1] for name in "xy"), batch)
            for key, (_, batch, _) in sorted(greatest.items())
        ]
        seen = table.to_arrow(versions=True).read_all().to_pylist()
        assert [(one["id"], one.get("x"), one.get("y"), one[BATCH]) for one in seen] == wanted
    assert len({batch for *_, batch in wanted}) > 1
    table.compact(full=True)
    assert table.to_arrow(versions=True).read_all().to_pylist() == seen
    assert not table.reconcile(deep=True).unbalanced


@CASES
def test_full_extract_brings_the_rows_that_it_holds(
    chosen: str, engine: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A row that it repeats came with it; one that is newer than it did not."""
    if engine == "spark":
        request.getfixturevalue("spark")
    table = opened(tmp_path, f'versions = true\nstrategy = "{chosen}"')
    land(tmp_path, 1, [{"id": key, "version": 1} for key in "abc"])
    table.run(host="local", engine=engine)
    land(tmp_path, 2, [{"id": "b", "version": 9}])
    table.run(host="local", engine=engine)
    land(tmp_path, 3, [{"id": "a", "version": 1}, {"id": "b", "version": 2}, {"id": "d", "version": 2}])
    table.run(host="local", engine=engine, full="table")
    wanted = [("a", 1, 3), ("b", 9, 2), ("d", 2, 3)]
    assert found(table, "id", "version") == wanted
    table.reprocess(source="landing", host="local", engine=engine)
    assert found(table, "id", "version") == wanted
    assert not table.reconcile(deep=True).unbalanced


@CASES
@pytest.mark.long
def test_every_version_of_the_history_has_its_batch(
    chosen: str, engine: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also those that lay in base files for some batches before they were superseded."""
    spark = request.getfixturevalue("spark") if engine == "spark" else None
    delete = '[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]'
    table = opened(tmp_path, f'versions = true\nhistory = true\nstrategy = "{chosen}"', delete)
    rng = random.Random(chosen)
    came: list[tuple[Record, int]] = []

    def night(number: int, *, restored_to: int | None = None) -> None:
        rows = [
            {
                "id": rng.choice("abc"),
                "version": rng.randrange(40),
                "op": rng.choice([None, None, None, "D"]),
                "v": place,
            }
            for place in range(5)
        ]
        land(tmp_path, number, rows)
        batch = table.run(host="local", engine=engine).publish.batch
        came.extend((one, batch) for one in rows)
        last = {(one["id"], one["version"]): (one, at) for one, at in came}
        wanted = sorted((key, n, one["v"], at) for (key, n), (one, at) in last.items() if one["op"] is None)
        assert found(table, "id", "version", "v", history=True) == wanted
        alive = {key: max(n for k, n in last if k == key) for key, _ in last}
        kept = sorted((key, n, last[key, n][1]) for key, n in alive.items() if last[key, n][0]["op"] is None)
        assert found(table, "id", "version") == kept

    for number in range(6):
        night(number)
    table.restore(table.snapshots()[2].number, dry=False)
    table.run(host="local")
    came[:] = came[: 5 * 4]
    night(6)
    table.compact(full=True)
    night(7)
    assert BATCH not in table.to_arrow(history=True).schema.names
    if spark is not None:
        columns = ["id", "version", "v", "valid_to", BATCH, RECEIVED_AT]
        ours = table.to_arrow(history=True, versions=True, columns=columns).read_all()
        theirs = collect(table.to_spark(spark, history=True, versions=True, columns=columns)).cast(ours.schema)
        order = [(name, "ascending") for name in columns]
        assert theirs.sort_by(order) == ours.sort_by(order)


def test_history_without_versions_has_no_batches_to_show(tmp_path: Path) -> None:
    """Its files name the batch of a stored row only roughly."""
    table = opened(tmp_path, "history = true")
    land(tmp_path, 1, [{"id": "a", "version": 1}])
    table.run(host="local")
    with pytest.raises(ConfigurationError) as refused:
        table.to_arrow(history=True, versions=True)
    assert refused.value.code == "no-versions"


# ---------------------------------------------------------------- readers


@made_once
def lake(folder: Path) -> Lake:
    """Batches 0 (adopted) to 3; of one partition the adopted file is still as it was."""
    lake = Lake(folder, versions=True, strategy="delta")
    lake.lay("old.parquet", [row(f"k{i}", i % 4, 0, i) for i in range(12)])
    lake.table.adopt()
    for number in (1, 2, 3):
        lake.land(f"{number}.jsonl", [row(f"k{i}", i % 3, number, 100 * number + i) for i in (0, number, 3 * number)])
        lake.run()
    return lake


FILTERS = (
    None,
    "_lakeupsert_batch = 0",
    "_lakeupsert_batch > 1 and v > 201",
    "d = '2020-01-01' and _lakeupsert_batch <> 3",
    "_lakeupsert_received_at > '2020-01-01' and k like 'k1%'",
    "_lakeupsert_batch = 2 or v = 7",
    "_lakeupsert_received_at < '2020-01-01'",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", FILTERS)
@pytest.mark.parametrize("snapshot", ["published", "latest"])
def test_readers_see_the_same_batches(lake: Lake, where: str | None, snapshot: str) -> None:
    if snapshot == "latest":
        lake.land("4.jsonl", [row("k1", 1, 4, 7)])
        lake.table.append(host="local")
    expected = [one for one in lake.expected_in(lake.view(snapshot)) if matches(one, where)]
    table = lake.table
    ours = table.to_arrow(snapshot, where, versions=True).read_all()
    assert ours.to_pylist() == expected
    schema = ours.schema
    readers: dict[str, Callable[[], pa.Table]] = {
        "pandas": lambda: pa.Table.from_pandas(table.to_pandas(None, snapshot, where, versions=True), schema),
        "polars": lambda: table.to_polars(snapshot, where=where, versions=True).collect().to_arrow().cast(schema),
        "duckdb": lambda: table.to_duckdb(None, snapshot, where=where, versions=True).to_arrow_table().cast(schema),
    }
    for name, read in readers.items():
        assert in_order(read()) == in_order(ours), name
    chosen = ["v", BATCH]
    rows = table.to_arrow(snapshot, where, columns=chosen, versions=True).read_all()
    assert rows.to_pylist() == [{name: one[name] for name in chosen} for one in expected]


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in ("d", "k", "l")])


def matches(one: Record, where: str | None) -> bool:
    """The filters above, in Python."""
    old = datetime(2020, 1, 1, tzinfo=UTC)
    tests: dict[str | None, bool] = {
        FILTERS[0]: True,
        FILTERS[1]: one[BATCH] == 0,
        FILTERS[2]: one[BATCH] > 1 and one["v"] > 201,
        FILTERS[3]: one["d"].day == 1 and one[BATCH] != 3,
        FILTERS[4]: one[RECEIVED_AT] > old and one["k"].startswith("k1"),
        FILTERS[5]: one[BATCH] == 2 or one["v"] == 7,
        FILTERS[6]: one[RECEIVED_AT] < old,
    }
    return tests[where]


def test_spark_sees_the_same_batches(lake: Lake, spark: Any) -> None:
    for where in FILTERS:
        ours = lake.table.to_arrow(where=where, versions=True).read_all()
        theirs = collect(lake.table.to_spark(spark, where=where, versions=True)).cast(ours.schema)
        assert in_order(theirs) == in_order(ours), where
    frame = lake.table.to_spark(spark, columns=[BATCH, "k"], versions=True)
    assert frame.columns == [BATCH, "k"]
    assert BATCH not in lake.table.to_spark(spark).columns


def test_filter_on_the_batch_opens_only_files_that_may_have_it(lake: Lake) -> None:
    """Nothing is known of an adopted file."""
    opened = [file.path for file in lake.view("published").files(f"{BATCH} >= 3")]
    adopted, ours = ([path for path in opened if path.endswith("old.parquet") == is_old] for is_old in (True, False))
    assert len(adopted) == 1
    assert [pq.ParquetFile(path).read([BATCH])[BATCH].unique().to_pylist() for path in ours] == [[3]]
    assert len(list(lake.view("published").files())) > 4


def test_rows_without_a_snapshot_are_none(tmp_path: Path) -> None:
    lake = Lake(tmp_path, versions=True)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.table.append(host="local")
    assert lake.table.to_arrow(versions=True).read_all().num_rows == 0
    assert found(lake.table, "k", snapshot="latest") == [("a", 1)]


def test_batches_are_exported(lake: Lake, tmp_path: Path) -> None:
    config = ["--config", str(lake.configure())]
    out = tmp_path / "out.csv"
    done = CliRunner().invoke(main, ["export", "--versions", "--where", f"{BATCH} > 0", "--output", str(out), *config])
    assert done.exit_code == 0, done.output
    header, *lines = out.read_text().splitlines()
    assert header.split(",")[-2:] == [f'"{BATCH}"', f'"{RECEIVED_AT}"']
    assert len(lines) == sum(one[BATCH] > 0 for one in lake.expected_in(lake.view("published")))
    done = CliRunner().invoke(main, ["export", "--versions", "--output", f"{tmp_path}/out/", *config])
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "out").rglob("*.parquet"))
    batches = [number for file in files for number in pq.ParquetFile(file).read([BATCH])[BATCH].to_pylist()]
    assert batches == [one[BATCH] for one in lake.expected_in(lake.view("published"))]


def test_table_without_versions_refuses_to_show_them(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    table = lake.table
    readers: list[Callable[[], object]] = [
        lambda: table.to_arrow(versions=True),
        lambda: table.to_arrow("latest", versions=True),
        lambda: table.to_pandas(versions=True),
        lambda: table.to_polars(versions=True),
        lambda: table.to_duckdb(versions=True),
        lambda: table.export(tmp_path / "out.csv", versions=True),
    ]
    for read in readers:
        with pytest.raises(ConfigurationError) as refused:
            read()
        assert refused.value.code == "no-versions"
        assert "versions = true" in refused.value.next
    with pytest.raises(ConfigurationError, match=BATCH) as refused:
        table.to_arrow(where=f"{BATCH} = 1")
    for file in (tmp_path / "processed").rglob("*.parquet"):
        assert pq.read_schema(file).names == ["k", "l", "ts", "v"]


def test_reader_without_versions_hears_how_to_get_them(lake: Lake) -> None:
    """Not only that there is no such column."""
    table = lake.table
    readers: list[Callable[[], object]] = [
        lambda: table.to_arrow(where=f"{BATCH.upper()} > 1"),
        lambda: table.head(columns=["k", RECEIVED_AT]),
        lambda: table.delete(where=f"{BATCH} = 3"),
    ]
    for read in readers:
        with pytest.raises(ConfigurationError, match="versions=True"):
            read()
    with pytest.raises(ConfigurationError) as refused:
        table.to_arrow(columns=[BATCH.upper()], versions=True)
    assert "versions=True" not in refused.value.message


def test_setting_is_fixed_when_the_table_is_created(lake: Lake) -> None:
    lake.mend(lambda refused: False, versions=False)
    lake.land("4.jsonl", [row("a", 0, 9)])
    with pytest.raises(ConfigurationError, match="versions") as refused:
        lake.table.append(host="local")
    assert refused.value.code == "another-table"
    specs = lake.table.objects.specs.head()
    assert specs is not None
    assert specs.body.versions


def test_readers_of_publishers_see_the_columns_of_the_table_alone(tmp_path: Path) -> None:
    from tests.harness.lake import iceberg_settings, iceberg_table

    lake = Lake(
        tmp_path, versions=True, strategy="delta", publishers=("delta", "iceberg"), iceberg=iceberg_settings(tmp_path)
    )
    for number in range(3):
        lake.land(f"{number}.jsonl", [row(f"k{i}", 0, number, number) for i in range(number, 9)])
        lake.run()
    lake.check()  # compares their rows with ours
    log = "".join(path.read_text() for path in (tmp_path / "processed/_delta_log").glob("*.json"))
    assert "_lakeupsert_batch" not in log
    assert lake.settings.iceberg is not None
    shown = iceberg_table(lake.settings.iceberg)
    assert shown is not None
    assert shown.schema().column_names == ["k", "l", "d", "ts", "v"]
