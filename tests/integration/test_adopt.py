"""A folder that others wrote becomes a table: nothing is rewritten, nothing is lost, the next night is exact."""

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.engine.spark_versions import frame_of
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.rows import statistics
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row

ROWS_A_DAY = 40
COLUMNS = "order_id, store, amount, note, record_timestamp"

Writer = Callable[[Path, pa.Table, Any], None]


def by_spark(folder: Path, lake: pa.Table, spark: Any) -> None:
    """With Spark's defaults: INT96 timestamps, and two files in some folders."""
    rows = frame_of(spark, lake)
    rows = rows.withColumn("record_timestamp", rows.record_timestamp.cast("timestamp"))
    rows.repartition(2).write.partitionBy("day").parquet(str(folder))


def by_pandas(folder: Path, lake: pa.Table, spark: Any) -> None:
    lake.to_pandas().to_parquet(folder, partition_cols=["day"])


def by_duckdb(folder: Path, lake: pa.Table, spark: Any) -> None:
    with duckdb.connect() as db:
        db.register("lake", lake)
        db.execute(f"COPY lake TO '{folder}' (FORMAT parquet, PARTITION_BY (day))")


def _lake(days: int) -> pa.Table:
    """Every key once a day, but on each seventh day five keys twice: the copy is newer, or as old."""
    with duckdb.connect() as db:
        return db.sql(f"""
            WITH lines AS (SELECT range AS n, DATE '2019-01-01' + CAST(range // {ROWS_A_DAY} AS INT) AS d
                           FROM range({days * ROWS_A_DAY})),
            twice AS (SELECT n, d, 0 AS copy FROM lines UNION ALL
                      SELECT n, d, 1 FROM lines
                      WHERE n % {ROWS_A_DAY} < 5 AND (n // {ROWS_A_DAY}) % 7 = 0)
            SELECT 'o' || n AS order_id, CAST(n % 9 AS INT) AS store, CAST(n * 1.25 + copy AS DOUBLE) AS amount,
                   CASE WHEN n % 3 = 0 THEN NULL ELSE 'n' || n END AS note,
                   TIMESTAMP '2019-01-01' + to_seconds(n + CASE WHEN n % 2 = 0 THEN copy * 60 ELSE 0 END) AS record_timestamp,
                   CAST(d AS VARCHAR) AS day
            FROM twice ORDER BY day, n, copy""").to_arrow_table()


@pytest.mark.parametrize(
    ("write", "engine", "days"),
    [
        pytest.param(by_spark, "arrow", 30, marks=pytest.mark.long),
        pytest.param(by_pandas, "spark", 30, marks=pytest.mark.long),
        pytest.param(by_duckdb, "arrow", 120, marks=pytest.mark.long),
    ],
)
def test_a_night_over_an_adopted_folder(tmp_path: Path, spark: Any, write: Writer, engine: Any, days: int) -> None:
    lake = _lake(days)
    write(tmp_path / "lake", lake, spark)
    before = _contents(tmp_path / "lake")
    adopted_files = [str(tmp_path / "lake" / name) for name in before]
    table = _table(tmp_path)

    adopted = table.adopt()

    assert table.requests["put"] == 0
    assert (
        table.requests["get"] <= len(before) + 2 * days + 10
    )  # a footer each; each manifest, to see that it stands, and to publish it
    assert (adopted.partitions, adopted.rows, adopted.snapshot) == (days, lake.num_rows, 0)
    assert _contents(tmp_path / "lake") == before
    assert _rows(table) == _wanted(adopted_files, settled=set())

    _land(tmp_path, lake)
    table.run(host="local", engine=engine)

    touched = {str(day) for day in pq.read_table(tmp_path / "landing").column("day").unique().to_pylist()}
    assert _rows(table) == _wanted(adopted_files, settled=touched, night=tmp_path / "landing")
    assert {name: data for name, data in _contents(tmp_path / "lake").items() if name in before} == before
    counters = [m.buckets[0].counters for m in map(_manifest(table), touched)]
    assert sum(c.superseded for c in counters) > len(touched)
    duckdb_rows = duckdb.sql(
        f"SELECT count(*) FROM read_parquet({[f.path for f in table.files()]}, union_by_name = true)"
    ).fetchall()
    assert duckdb_rows == [(len(_rows(table)),)]
    assert table.to_spark(spark).count() == len(_rows(table))


def _table(root: Path, **settings: Any) -> Table:
    usual = {"key": ("order_id",), "partition_by": ("day",), "delete": DeleteSettings(column="op", values=("D",))}
    (root / "landing").mkdir(exist_ok=True)
    zones = {"landing": str(root / "landing"), "processed": str(root / "lake")}
    return Table("sales", TableSettings(**{**zones, **usual, **settings}))


def _land(root: Path, lake: pa.Table) -> None:
    """Updates, late and equal records, deletes and new keys over every tenth day."""
    with duckdb.connect() as db:
        db.register("lake", lake)
        db.execute(f"""
            COPY (SELECT CASE WHEN store = 8 THEN order_id || 'x' ELSE order_id END AS order_id, store, amount - 0.5 AS amount,
                         'again' AS note, record_timestamp + to_seconds(CAST(store - 2 AS INT)) AS record_timestamp,
                         CAST(day AS DATE) AS day, CASE WHEN store = 5 THEN 'D' END AS op
                  FROM lake WHERE dayofyear(CAST(day AS DATE)) % 10 = 1)
            TO '{root / "landing" / "night.parquet"}'""")


def _wanted(adopted: list[str], settled: set[str], night: Path | None = None) -> list[tuple[Any, ...]]:
    """By DuckDB: what was adopted, and of the settled days the newest row of each key, the later one where equal."""
    with duckdb.connect() as db:
        db.execute(f"""
            CREATE TABLE came AS SELECT {COLUMNS}, CAST(day AS VARCHAR) AS day, CAST(NULL AS VARCHAR) AS op, 0 AS batch,
                                        row_number() OVER (ORDER BY filename, file_row_number) AS place
            FROM read_parquet({adopted}, hive_partitioning = true, filename = true, file_row_number = true)""")
        if night is not None:
            db.execute(
                f"""INSERT INTO came SELECT {COLUMNS}, CAST(day AS VARCHAR), op, 1, row_number() OVER ()
                    FROM read_parquet('{night}/*.parquet', file_row_number = true) ORDER BY file_row_number"""
            )
        days = ", ".join(f"'{day}'" for day in settled) or "''"
        return db.execute(
            f"""WITH ranked AS (SELECT *, row_number() OVER (PARTITION BY day, order_id
                                ORDER BY record_timestamp DESC, batch DESC, place DESC) AS nth FROM came)
                SELECT {COLUMNS}, day FROM ranked
                WHERE (day NOT IN ({days}) OR nth = 1) AND op IS DISTINCT FROM 'D' ORDER BY ALL"""
        ).fetchall()


def _rows(table: Table) -> list[tuple[Any, ...]]:
    with duckdb.connect() as db:
        db.register("reader", table.to_arrow().read_all())
        return db.execute(f"SELECT {COLUMNS}, CAST(day AS VARCHAR) FROM reader ORDER BY ALL").fetchall()


def _manifest(table: Table) -> Callable[[str], Any]:
    def head(day: str) -> Any:
        link = table.objects.partition(f"day={day}").head()
        assert link is not None
        return link.body

    return head


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


@pytest.mark.long
def test_compact_settles_what_no_night_touched_and_vacuum_leaves_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then readers that list folders see one row a key."""
    by_duckdb(tmp_path / "lake", _lake(545), None)
    settings = {"keep_snapshots": 1, "superseded_retention": "0s", "delete": None}
    table = _table(tmp_path, **settings)
    table.adopt()
    adopted = [str(tmp_path / "lake" / name) for name in _contents(tmp_path / "lake")]
    every = {Path(name).parent.name.removeprefix("day=") for name in adopted}
    wanted = _wanted(adopted, settled=every)
    table.close()
    monkeypatch.chdir(tmp_path)
    Path("lakeupsert.toml").write_text(
        '[tables.sales]\nlanding = "landing"\nprocessed = "lake"\nkey = ["order_id"]\npartition_by = ["day"]\n'
        'keep_snapshots = 1\nsuperseded_retention = "0s"\n'
    )
    for command in (["compact", "--full", "--workers", "1"], ["vacuum", "--yes"]):
        told = CliRunner().invoke(main, command)
        assert told.exit_code == 0, told.output
    listed = duckdb.sql(
        f"SELECT {COLUMNS}, CAST(day AS VARCHAR) FROM read_parquet('{tmp_path}/lake/*/*.parquet', hive_partitioning = true) "
        "ORDER BY ALL"
    ).fetchall()
    assert listed == wanted
    assert "nothing to do" in CliRunner().invoke(main, ["compact", "--full"]).stdout


# ---------------------------------------------------------------- what can't be adopted, and crashes


def _small(root: Path, rows: Any = None, folder: str = "day=2020-01-01", name: str = "part-0.parquet") -> None:
    rows = rows or {"order_id": ["a", "b"], "record_timestamp": [1, 2]}
    (root / "lake" / folder).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), root / "lake" / folder / name)


def _doubled(folder: Path) -> None:
    for file in folder.glob("*.parquet"):
        file.write_bytes(file.read_bytes() * 2)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda root: _small(root, folder="day=2020-01-01/hour=3"), "not-partitioned"),
        (lambda root: _small(root, folder="day=__HIVE_DEFAULT_PARTITION__"), "not-partitioned"),
        (lambda root: _small(root, folder="."), "not-partitioned"),
        (lambda root: (root / "lake/day=2020-01-01/torn.parquet").write_bytes(b"PAR1"), "unreadable-files"),
        (lambda root: _doubled(root / "lake/day=2020-01-01"), "unreadable-files"),
        (
            lambda root: _small(root, {"order_id": ["a", None], "record_timestamp": [1, 2]}, name="n.parquet"),
            "null-keys",
        ),
        (lambda root: _small(root, {"order_id": [1], "record_timestamp": [1]}, name="t.parquet"), "mixed-types"),
        (lambda root: _small(root, {"order_id": ["c"], "op": ["D"]}, name="op.parquet"), "operations-stored"),
        (lambda root: shutil.rmtree(root / "lake/day=2020-01-01"), "nothing-to-adopt"),
    ],
)
def test_what_cannot_be_adopted_is_refused_before_anything_is_written(
    tmp_path: Path, spoil: Callable[[Path], Any], code: str
) -> None:
    _small(tmp_path)
    spoil(tmp_path)
    with pytest.raises(LakeupsertError) as refused:
        _table(tmp_path).adopt()
    assert refused.value.code == code
    assert refused.value.next
    assert not (tmp_path / "lake" / "_lakeupsert").exists()


@pytest.mark.parametrize("has_statistics", [True, False])
def test_files_with_values_that_readers_can_not_show_are_refused(tmp_path: Path, has_statistics: bool) -> None:
    (tmp_path / "lake/day=2020-01-01").mkdir(parents=True)
    rows = {"order_id": ["a", "b"], "record_timestamp": [1, 2]}
    for days in ([0, 2**31 - 1], [0, None]):
        written = pa.table({**rows, "x": pa.array(days, pa.date32())})
        pq.write_table(written, tmp_path / "lake/day=2020-01-01/part-0.parquet", write_statistics=has_statistics)
        if days[1] is not None:
            with pytest.raises(LakeupsertError, match="'x'") as refused:
                _table(tmp_path).adopt()
            assert refused.value.code == "unreadable-files"
    _table(tmp_path).adopt()


def test_run_does_not_hide_a_folder_that_was_not_adopted(tmp_path: Path) -> None:
    _small(tmp_path)
    _small(tmp_path / "landing", folder=".")
    shutil.move(tmp_path / "landing/lake/part-0.parquet", tmp_path / "landing/part-0.parquet")
    with pytest.raises(ConfigurationError) as refused:
        _table(tmp_path).run(host="local")
    assert refused.value.code == "not-adopted"
    assert "lakeupsert adopt" in refused.value.next


def test_columns_that_some_files_lack_or_have_narrower_are_one_table(tmp_path: Path) -> None:
    _small(tmp_path, {"order_id": ["a"], "n": pa.array([1], pa.int16()), "record_timestamp": [1]})
    _small(
        tmp_path,
        {"order_id": ["b"], "n": pa.array([70000], pa.int32()), "x": [2.5], "record_timestamp": [2]},
        "day=2020-01-02",
    )
    (tmp_path / "lake/_SUCCESS").touch()
    (tmp_path / "lake/README.md").touch()
    table = _table(tmp_path, delete=None)
    assert table.adopt().left == ("README.md", "_SUCCESS")
    rows = table.to_arrow().read_all()
    assert rows.schema.field("n").type == pa.int32()
    assert rows.select(["order_id", "n", "x"]).to_pylist() == [
        {"order_id": "a", "n": 1, "x": None},
        {"order_id": "b", "n": 70000, "x": 2.5},
    ]


def test_files_that_no_row_can_pass_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their columns are in any order, with ids of their own; the partition column in one says something else."""
    monkeypatch.setattr(statistics, "MOST_A_PARTITION", 9)  # three columns of each of three files
    lake = Lake(tmp_path, delete=None, schema={}, key=("k",))

    def lay(name: str, day: int, first: int, **options: Any) -> None:
        count = range(first, first + 3)
        columns = {
            "d": ["elsewhere"] * 3,
            "v": pa.array(count, pa.int32()),
            "x": [0] * 3,
            "ts": pa.array([datetime(2020, 1, n + 1) for n in range(3)], pa.timestamp("us")),
            "k": [f"{name}{n}" for n in count],
        }
        rows = pa.table(columns)
        fields = [field.with_metadata({"PARQUET:field_id": str(9 - n)}) for n, field in enumerate(rows.schema)]
        path = tmp_path / "processed" / f"d=2020-01-0{day}" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows.cast(pa.schema(fields)), path, **options)

    lay("a", 1, 10)
    lay("b", 1, 20, use_deprecated_int96_timestamps=True)
    lay("c", 1, 30, write_statistics=False)
    lay("e", 2, 40)
    lake.table.adopt()
    spec = lake.table.objects.specs.head()
    assert spec is not None
    names = {field.id: field.name for field in spec.body.fields}
    manifests = [lake.opened.history.version(p, 0) for p in ("d=2020-01-01", "d=2020-01-02")]
    files = [file for manifest in manifests for file in manifest.buckets[0].base]
    assert {file.name[-9:]: {names[one.id] for one in file.statistics} for file in files} == {
        "a.parquet": {"k", "ts", "v"},
        "b.parquet": {"k", "v"},
        "c.parquet": set(),
        "e.parquet": {"k", "ts", "v", "x"},
    }
    assert not any(file.statistics for touched in lake.entries()[0][1].touched.values() for file in touched.files)
    opened = {file.name[-9:] for file in lake.table.files(where="v >= 22 AND v < 40 AND k <> 'b22'")}
    assert opened == {"b.parquet", "c.parquet"}
    assert lake.table.to_arrow(where="v >= 22 AND v < 32").read_all()["v"].to_pylist() == [22, 30, 31]
    assert len(list(lake.table.files(where="d = '2020-01-01'"))) == 3


@pytest.mark.parametrize("engine", ["arrow", pytest.param("spark", marks=pytest.mark.long)])
def test_null_keys_that_no_footer_told_of_stop_the_merge_and_lose_nothing(
    tmp_path: Path, spark: Any, engine: Any
) -> None:
    (tmp_path / "lake/day=2020-01-01").mkdir(parents=True)
    rows = pa.table({"order_id": ["a", None], "record_timestamp": [1, 2]})
    pq.write_table(rows, tmp_path / "lake/day=2020-01-01/part-0.parquet", write_statistics=False)
    table = _table(tmp_path, delete=None)
    table.adopt()
    pq.write_table(
        pa.table({"order_id": ["a"], "record_timestamp": [3], "day": ["2020-01-01"]}), tmp_path / "landing/n.parquet"
    )
    ran = table.run(host="local", engine=engine)
    assert "null" in next(iter(ran.publish.failed.values())) or "no value" in next(iter(ran.publish.failed.values()))
    assert table.to_arrow().read_all().num_rows == 2


def test_a_table_is_not_adopted_twice_and_the_command_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("lakeupsert.toml").write_text(
        '[tables.sales]\nlanding = "landing"\nprocessed = "lake"\nkey = ["order_id"]\npartition_by = ["day"]\n'
    )
    told = CliRunner().invoke(main, ["adopt", "lake"])
    assert (told.exit_code, "1 file, 2 rows" in told.stdout) == (0, True), told.output
    again = CliRunner().invoke(main, ["adopt"])
    assert (again.exit_code, "already" in again.stderr) == (2, True)
    other = CliRunner().invoke(main, ["adopt", "elsewhere"])
    assert (other.exit_code, "lakeupsert init" in other.stderr) == (2, True)


def test_of_two_adopts_at_once_the_one_that_commits_says_what_is_in_the_table(tmp_path: Path) -> None:
    """The other listed before a file came, wrote its manifests late, and died before the ledger."""
    _small(tmp_path, {"order_id": ["a"], "record_timestamp": [1]}, name="f.parquet")
    _small(tmp_path, {"order_id": ["b"], "record_timestamp": [1]}, name="g.parquet")
    one, other = (Lake(tmp_path, **_settings(tmp_path)) for _ in range(2))
    late = tmp_path / "lake/day=2020-01-01/g.parquet"

    def adopt_without_it() -> None:
        shutil.move(late, tmp_path / "g.parquet")
        other.points.arm(0, Fault.KILL_BEFORE, "create _lakeupsert/ledger")
        with pytest.raises(Killed):
            other.table.adopt()
        shutil.move(tmp_path / "g.parquet", late)

    one.points.amid(0, adopt_without_it, "create _lakeupsert/ledger")
    assert one.table.adopt().rows == 2
    assert [r["order_id"] for r in one.rows()] == ["a", "b"]
    one.table.vacuum(dry=False)
    assert late.exists()


def test_of_two_adopts_at_once_no_one_is_told_to_delete_the_table(tmp_path: Path) -> None:
    """The other does it all between the first one's look and its spec."""
    _small(tmp_path)
    one, other = (Lake(tmp_path, **_settings(tmp_path)) for _ in range(2))
    one.points.amid(0, other.table.adopt, "create _lakeupsert/spec")
    with pytest.raises(ConfigurationError) as refused:
        one.table.adopt()
    assert refused.value.code == "already-a-table"


def test_a_compact_finishes_one_that_died_before_it_published(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("f.parquet", [row("a", 0, 1, 1), row("a", 0, 1, 2)])
    lake.table.adopt()
    lake.points.arm(0, Fault.KILL_BEFORE, "create _lakeupsert/snapshots")
    with pytest.raises(Killed):
        lake.table.compact()
    lake.points.disarm()
    lake.reopen()
    assert [r["v"] for r in lake.rows()] == [1, 2]
    lake.table.compact()
    assert [r["v"] for r in lake.rows()] == [2]
    lake.check()


def _settings(root: Path) -> dict[str, Any]:
    return {
        "processed": str(root / "lake"),
        "key": ("order_id",),
        "partition_by": ("day",),
        "order_by": ("record_timestamp",),
        "schema": {},
        "delete": None,
    }
