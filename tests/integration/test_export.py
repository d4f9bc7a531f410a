"""Exports: one file or a Hive folder, whole or not at all, with what other programs need to read the same rows back."""

import contextlib
import csv
import json
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from lakeupsert import readonly
from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.engine.attempts import attempt
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.read import export as export_module
from lakeupsert.storage import LocalStore
from tests.harness.spark import collect

DAY = date(2020, 1, 1)
SINGLE = ["x.parquet", "x.csv", "x.jsonl"]
OUTPUTS = [*SINGLE, "x/"]


def lake(root: Path, columns: Mapping[str, Any] | None = None, *, keys: int = 6, op: list[str] | None = None) -> Table:
    """Keys 0, 1, … in two partitions, landed in the wrong order, half of them updated in a second night."""
    (root / "landing").mkdir()
    table = Table(
        "t",
        TableSettings(
            landing=str(root / "landing"),
            processed=str(root / "processed"),
            key=("k",),
            partition_by=("d",),
            order_by=("ts",),
            quarantine_limit="0",
            delete=DeleteSettings(column="op", values=("D",)) if op else None,
        ),
    )
    rows = pa.table(
        {
            "v": pa.array([f"v{k}" for k in range(keys)]),
            "d": [DAY + timedelta(days=k % 2) for k in range(keys)],
            "k": pa.array(range(keys), pa.int64()),
            **({"op": op} if op else {}),
            **(columns or {}),
        }
    )
    for night, part in enumerate([rows.slice(0).take(list(range(keys))[::-1]), rows.slice(0, keys // 2)]):
        stamped = part.append_column("ts", pa.array([night] * part.num_rows, pa.int64()))
        pq.write_table(stamped, root / "landing" / f"{night}.parquet")
        table.run(host="local")
    return table


def read(path: Path) -> Any:
    """Rows of an export as tuples of text, by programs that know nothing of us."""
    if path.is_dir():
        files, options = f"{path}/*/*.parquet", "hive_partitioning = true, hive_types = {d: DATE}"
        sql = f"SELECT v, d, k, ts FROM read_parquet(?, {options}) ORDER BY d, k"
        return [tuple(map(str, row)) for row in duckdb.execute(sql, [files]).fetchall()]
    if path.suffix == ".parquet":
        return [tuple(map(str, row.values())) for row in pq.ParquetFile(path).read().to_pylist()]
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [tuple(row) for row in csv.reader(file)][1:]
    return [tuple(map(str, json.loads(line).values())) for line in path.read_text("utf-8").splitlines()]


def expected(*keys: int) -> list[tuple[str, ...]]:
    return [(f"v{k}", str(DAY + timedelta(days=k % 2)), str(k), "1" if k < 3 else "0") for k in keys]


@pytest.mark.parametrize("output", OUTPUTS)
def test_export_has_the_columns_of_the_table_ordered_by_partition_and_key(output: str, tmp_path: Path) -> None:
    table = lake(tmp_path)
    assert table.export(f"{tmp_path}/{output}") == 6
    assert read(tmp_path / output) == expected(0, 2, 4, 1, 3, 5)
    assert table.export(f"{tmp_path}/{output}", where="k > 1 AND d = '2020-01-01'", overwrite=True) == 2
    assert read(tmp_path / output) == expected(2, 4)
    assert table.export(f"{tmp_path}/{output}", snapshot=0, where="k = 0", overwrite=True) == 1
    assert read(tmp_path / output) == [("v0", "2020-01-01", "0", "0")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["landing", "processed", output.rstrip("/")])


@pytest.mark.parametrize("output", OUTPUTS)
def test_deleted_rows_and_the_operation_are_not_in_an_export(output: str, tmp_path: Path) -> None:
    lake(tmp_path, op=["D", "U", "U", "U", "D", "U"]).export(f"{tmp_path}/{output}")
    assert read(tmp_path / output) == expected(2, 1, 3, 5)


def test_single_parquet_file_is_to_arrow_and_few_row_groups(tmp_path: Path) -> None:
    table = lake(tmp_path)
    table.export(tmp_path / "x.parquet")
    with pq.ParquetFile(tmp_path / "x.parquet") as file:
        assert file.read().equals(table.to_arrow().read_all())
        assert file.schema_arrow.names == ["v", "d", "k", "ts"]
        assert file.num_row_groups == 1
        assert not [key for key in file.metadata.metadata if b"lakeupsert" in key]


def test_hive_folder_is_one_that_spark_and_duckdb_read(tmp_path: Path, spark: Any) -> None:
    columns = {
        "price": pa.array([Decimal("1.50")] * 6, pa.decimal128(10, 2)),
        "moment": pa.array([datetime(9999, 12, 31)] * 6, pa.timestamp("us")),
        "z": pa.array([datetime(1, 1, 1, tzinfo=UTC)] * 6, pa.timestamp("us", "UTC")),
        "l": pa.array([[1, None]] * 6, pa.list_(pa.int16())),
    }
    table = lake(tmp_path, columns)
    table.export(f"{tmp_path}/x/")
    part = pq.ParquetFile(tmp_path / "x/d=2020-01-01/part-0.parquet")
    assert "d" not in part.schema_arrow.names
    part.close()
    found = table.to_arrow().read_all()
    # Spark 3.5 asks by default what calendar dates before 1582 are of.
    frame = spark.read.option("datetimeRebaseMode", "CORRECTED").parquet(f"{tmp_path}/x")
    assert dict(frame.dtypes) == dict(table.to_spark(spark).dtypes)
    assert collect(frame.select(*found.schema.names).orderBy("d", "k")).cast(found.schema).equals(found)
    with duckdb.connect() as db:
        names = ", ".join(found.schema.names)
        sql = f"SELECT {names} FROM read_parquet('{tmp_path}/x/*/*.parquet', hive_partitioning = true) ORDER BY d, k"
        db.register("expected", found)
        assert db.sql(sql).to_arrow_table().equals(db.sql(f"SELECT {names} FROM expected").to_arrow_table())


@pytest.mark.parametrize("output", OUTPUTS)
def test_export_without_rows_keeps_the_schema(output: str, tmp_path: Path, spark: Any) -> None:
    table = lake(tmp_path, {"price": pa.array([None] * 6, pa.decimal128(10, 2))})
    schema = table.to_arrow().schema
    assert table.export(f"{tmp_path}/{output}", where="k = -1") == 0
    path = tmp_path / output
    if output == "x.parquet":
        assert pq.read_schema(path) == schema
        assert pq.read_metadata(path).num_rows == 0
    elif output == "x/":
        assert [p.name for p in path.iterdir()] == ["_common_metadata"]
        assert pq.read_schema(path / "_common_metadata") == schema
        frame = spark.read.parquet(str(path))
        assert (dict(frame.dtypes), frame.count()) == (dict(table.to_spark(spark).dtypes), 0)
    else:
        assert path.read_text() == ('"v","d","k","price","ts"\n' if output == "x.csv" else "")


# ---------------------------------------------------------------- whole or not at all


@pytest.mark.parametrize("output", OUTPUTS)
def test_export_replaces_what_is_there_only_when_told_to(output: str, tmp_path: Path) -> None:
    table = lake(tmp_path)
    table.export(f"{tmp_path}/{output}", where="k < 2")
    with pytest.raises(ConfigurationError, match="exists") as refused:
        table.export(f"{tmp_path}/{output}")
    assert refused.value.code == "output-exists"
    assert "--overwrite" in refused.value.next
    assert read(tmp_path / output) == expected(0, 1)
    table.export(f"{tmp_path}/{output}", where="d = '2020-01-02'", overwrite=True)
    assert read(tmp_path / output) == expected(1, 3, 5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("output", OUTPUTS)
def test_export_that_fails_half_way_leaves_what_was_there(output: str, before: bool, tmp_path: Path) -> None:
    table = lake(tmp_path)
    if before:
        table.export(f"{tmp_path}/{output}")
    Path(table.files()[1].path).unlink()
    names = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(DamagedTableError, match="is missing"):
        table.export(f"{tmp_path}/{output}", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == names, "nothing unfinished is left"
    assert (tmp_path / output).exists() is before
    if before:
        assert read(tmp_path / output) == expected(0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize(
    ("output", "there"),
    [
        ("x/", "file"),
        ("x.csv", "folder"),
        ("x/", "folder"),
        ("processed/", "table"),
        ("./", "cwd"),
    ],
)
def test_overwrite_never_deletes_what_is_no_export(
    output: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake(tmp_path)
    monkeypatch.chdir(tmp_path)
    if there == "file":
        Path("x").write_text("mine")
    elif there == "folder":
        Path(output).mkdir()
        Path(output, "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError) as refused:
        table.export(output, overwrite=True)
    assert refused.value.code == ("overlapping-zones" if there == "table" else "output-exists")
    assert "Nothing was written" in refused.value.message
    assert sorted(tmp_path.rglob("*")) == before


def test_overwrite_takes_an_empty_folder_and_follows_a_link(tmp_path: Path) -> None:
    table = lake(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for _ in range(2):
        assert table.export(f"{tmp_path}/link/", overwrite=True) == 6
        assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)
        assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("x", "unknown-format"),
        ("x.txt", "unknown-format"),
        ("x.parquet.gz", "unknown-format"),
        ("no/such/folder/x.csv", "no-folder"),
        ("s3://bucket/x.csv", "no-folder"),
    ],
)
def test_output_that_cannot_be_written_is_refused(
    output: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        table.export(output)
    assert refused.value.code == code
    assert ".parquet, .csv, .jsonl" in refused.value.next or code == "no-folder"


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("arguments", [{"where": "nope = 1"}, {"snapshot": 17}, {"snapshot": "newest"}])
def test_export_of_what_does_not_exist_writes_nothing(output: str, arguments: Any, tmp_path: Path) -> None:
    table = lake(tmp_path)
    with pytest.raises(ConfigurationError):
        table.export(f"{tmp_path}/{output}", **arguments)
    assert not (tmp_path / output).exists()


# ---------------------------------------------------------------- text

# Type, values, the type that DuckDB is told.
TEXT_VALUES: list[tuple[Any, list[Any], str]] = [
    (pa.int8(), [-128, 0, 127], "TINYINT"),
    (pa.uint64(), [0, 2**64 - 1, 1], "UBIGINT"),
    (pa.float32(), [0.1, -0.0, math.inf], "FLOAT"),
    (pa.float64(), [0.1, 5e-324, 1e300], "DOUBLE"),
    (pa.decimal128(38, 10), [Decimal("1E-10"), -Decimal(10) ** 27, Decimal("0.0000000000")], "DECIMAL(38,10)"),
    (pa.decimal128(5, 2), [Decimal("1.00"), Decimal("-999.99"), Decimal("0.00")], "DECIMAL(5,2)"),
    (pa.date32(), [date(1, 1, 1), DAY, date(9999, 12, 31)], "DATE"),
    (pa.timestamp("ms"), [datetime(1, 1, 1), datetime(2020, 1, 1, 1, 1, 1, 1000), datetime(9999, 12, 31)], "TIMESTAMP"),
    (pa.timestamp("us"), [datetime(1, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31)], "TIMESTAMP"),
    (pa.timestamp("us", "UTC"), [datetime(1900, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC), None], "TIMESTAMPTZ"),
    (pa.timestamp("us", "America/New_York"), [datetime(2020, 7, 1, tzinfo=UTC), None, None], "TIMESTAMPTZ"),
    (pa.time64("us"), [time(0), time(23, 59, 59, 999999), None], "TIME"),
    (pa.bool_(), [True, False, None], "BOOLEAN"),
    (pa.string(), ["a", 'a,"b"', "line\nline\r\n"], "VARCHAR"),
    (pa.large_string(), ["ä🦆", "null", "  "], "VARCHAR"),
]  # fmt: skip


@pytest.mark.parametrize("output", ["x.csv", "x.jsonl"])
def test_text_reads_back_as_the_same_values(output: str, tmp_path: Path) -> None:
    columns = {f"c{i}": pa.array([*values, None], type_) for i, (type_, values, _) in enumerate(TEXT_VALUES)}
    table = lake(tmp_path, columns, keys=4)
    table.export(tmp_path / output)
    numbered = {f"c{i}": sql for i, (_, _, sql) in enumerate(TEXT_VALUES)}
    types = ", ".join(
        f"{n}: '{sql}'" for n, sql in {"v": "VARCHAR", "d": "DATE", "k": "BIGINT", **numbered, "ts": "BIGINT"}.items()
    )
    reader = "read_csv(?, header = true" if output == "x.csv" else "read_json(?, format = 'newline_delimited'"
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        db.register("expected", table.to_arrow().read_all())
        db.execute(f"CREATE TABLE back AS FROM {reader}, columns = {{{types}}})", [str(tmp_path / output)])
        for name in numbered:
            back, kept = (
                db.execute(f"SELECT {name}::VARCHAR FROM {t} ORDER BY d, k").fetchall() for t in ("back", "expected")
            )
            assert back == kept, name


def test_csv_tells_null_from_empty_text(tmp_path: Path) -> None:
    lake(tmp_path, {"s": ["", None] * 3}).export(tmp_path / "x.csv")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert [line.split(",")[3] for line in lines[1:]] == ['""', '""', '""', "", "", ""]


def test_jsonl_is_written_in_pieces_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.read.export._JSON_ROWS", 2)
    assert lake(tmp_path).export(tmp_path / "x.jsonl") == 6
    assert read(tmp_path / "x.jsonl") == expected(0, 2, 4, 1, 3, 5)


def test_jsonl_has_every_type_and_is_json(tmp_path: Path) -> None:
    columns = {
        "nan": pa.array([math.nan, math.inf, None, 1.5, -0.0, 0.1], pa.float64()),
        "half": pa.array([1.5] * 6, pa.float16()),
        "bytes": pa.array([b"\xff\x00"] * 6, pa.binary()),
        "big": pa.array([2**64 - 1] * 6, pa.uint64()),
        "dec": pa.array([Decimal("1.50")] * 6, pa.decimal256(60, 2)),
        "ns": pa.array([1] * 6, pa.timestamp("ns", "UTC")),
        "span": pa.array([5] * 6, pa.duration("s")),
        "map": pa.array([[("a", [b"\x00", None]), ("a", None)]] * 6, pa.map_(pa.string(), pa.list_(pa.binary()))),
        "struct": pa.array([{"x": DAY, "y": None}] * 6, pa.struct([("x", pa.date32()), ("y", pa.int8())])),
    }
    lake(tmp_path, columns).export(tmp_path / "x.jsonl")

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    found = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [r["nan"] for r in found] == ["nan", None, -0.0, "inf", 1.5, 0.1]
    assert list(found[0]) == ["v", "d", "k", *columns, "ts"]
    assert {name: found[0][name] for name in list(columns)[1:]} == {
        "half": 1.5,
        "bytes": "/wA=",
        "big": 2**64 - 1,
        "dec": "1.50",
        "ns": "1970-01-01 00:00:00.000000001Z",
        "span": 5,
        "map": [{"key": "a", "value": ["AA==", None]}, {"key": "a", "value": None}],
        "struct": {"x": "2020-01-01", "y": None},
    }


@pytest.mark.parametrize(
    "type_",
    [
        pa.list_(pa.int8()), pa.map_(pa.string(), pa.int8()), pa.struct([("x", pa.int8())]), pa.binary(), pa.binary(2),
        pa.large_binary(),
    ],
    ids=str,
)  # fmt: skip
def test_csv_of_a_type_without_text_names_the_column(type_: Any, tmp_path: Path) -> None:
    table = lake(tmp_path, {"my column": pa.nulls(6, type_), "l": pa.array([[1]] * 6)})
    with pytest.raises(ConfigurationError, match="'my column' is ") as refused:
        table.export(tmp_path / "x.csv")
    assert refused.value.code == "unfit-for-csv"
    assert str(type_) in refused.value.message or pa.types.is_nested(type_)
    assert ".jsonl" in refused.value.next
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    ("type_", "value"),
    [(pa.timestamp("ms"), 2**62), (pa.date32(), 2**30), (pa.time64("us"), 86_400_000_000), (pa.time32("s"), -1)],
    ids=str,
)
def test_csv_of_a_moment_without_text_names_column_value_and_row(type_: Any, value: int, tmp_path: Path) -> None:
    """An adopted file without statistics may have such values."""
    stored = pa.int32() if type_.bit_width == 32 else pa.int64()
    column = pa.array([None, None, value], stored).view(type_)
    rows = pa.table({"k": [1, 2, 3], "far": column}).to_reader(max_chunksize=2)
    with pytest.raises(ConfigurationError, match=f"'far' of row 3 is {value} as") as refused:
        export_module.write_file(rows, str(tmp_path / "x.csv"), overwrite=False)
    assert refused.value.code == "unfit-for-csv"
    assert not (tmp_path / "x.csv").exists()


# ---------------------------------------------------------------- to a store


@pytest.mark.parametrize("host", ["local", "spark"])
def test_folder_in_a_store_is_the_folder_of_this_machine(host: Any, tmp_path: Path, request: Any) -> None:
    if host == "spark":
        request.getfixturevalue("spark")
    table = lake(tmp_path)
    assert table.export(f"{(tmp_path / 'x').as_uri()}/", host=host) == 6
    assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)
    assert table.export(f"{(tmp_path / 'y').as_uri()}/", where="k = 1", host=host) == 1
    assert read(tmp_path / "y") == expected(1)
    assert pq.read_schema(tmp_path / "x" / "_common_metadata").names == ["v", "d", "k", "ts"]
    with pytest.raises(ConfigurationError) as refused:
        table.export(f"{(tmp_path / 'x').as_uri()}/", host=host)
    assert refused.value.code == "output-exists"


@pytest.mark.parametrize("host", ["local", "spark"])
def test_folder_in_a_store_that_fails_half_way_is_gone(host: Any, tmp_path: Path, request: Any) -> None:
    if host == "spark":
        request.getfixturevalue("spark")
    table = lake(tmp_path)
    for damaged in (tmp_path / "processed" / "d=2020-01-02").glob("base-*"):
        damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DamagedTableError):
        table.export(f"{(tmp_path / 'x').as_uri()}/", host=host)
    assert not [path for path in (tmp_path / "x").rglob("*") if path.is_file()]


def test_second_try_of_a_task_that_is_killed_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark's speculation does, or an executor that is taken for lost: a host may do an item twice, one of them in part."""

    class Killed(BaseException):
        pass

    class TwiceHost(LocalHost):
        def map(self, function: Any, items: Any, sizes: Any) -> Any:
            for item in items:
                yield function(item)
                with monkeypatch.context() as killing, contextlib.suppress(Killed):
                    killing.setattr(LocalStore, "write", be_killed)
                    function(item)

    def be_killed(store: LocalStore, name: str) -> None:
        raise Killed

    table = lake(tmp_path)
    monkeypatch.setattr(readonly, "host_by_name", lambda name: TwiceHost())
    assert table.export(f"{(tmp_path / 'x').as_uri()}/", host="spark") == 6
    assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)


def test_next_try_of_a_task_whose_answer_was_lost_counts_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateHost(LocalHost):
        def map(self, function: Any, items: Any, sizes: Any) -> Any:
            for item in items:
                function(item)
                yield function(item)

    table = lake(tmp_path)
    monkeypatch.setattr(readonly, "host_by_name", lambda name: LateHost())
    assert table.export(f"{(tmp_path / 'x').as_uri()}/", host="spark") == 6
    assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)


def test_try_that_loses_the_race_for_its_file_counts_the_rows_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnceHost(LocalHost):
        def map(self, function: Any, items: Any, sizes: Any) -> Any:
            for item in items:
                function(item)
                with monkeypatch.context() as blind:
                    blind.setattr(LocalStore, "head", lambda store, name: None)
                    found = attempt(function, item)
                yield found

    table = lake(tmp_path)
    monkeypatch.setattr(readonly, "host_by_name", lambda name: AtOnceHost())
    assert table.export(f"{(tmp_path / 'x').as_uri()}/", host="spark") == 6
    assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize("writes_first", [True, False])
def test_of_two_exports_to_an_address_one_is_refused(
    writes_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one starts after this one has begun to write, or ends after this one has checked the folder."""
    table, address = lake(tmp_path), f"{(tmp_path / 'x').as_uri()}/"
    refused = []

    def export_other() -> None:
        monkeypatch.undo()
        try:
            assert table.export(address, where="k = 1") == 1
        except ConfigurationError as e:
            refused.append(e.code)

    class MeanwhileHost(LocalHost):
        def map(self, function: Any, items: Any, sizes: Any) -> Any:
            export_other()
            return super().map(function, items, sizes)

    check = export_module._check_address
    if writes_first:
        monkeypatch.setattr(export_module, "LocalHost", MeanwhileHost)
    else:
        monkeypatch.setattr(export_module, "_check_address", lambda *a, **b: (check(*a, **b), export_other()))
    if writes_first:
        assert table.export(address) == 6
        assert refused == ["output-exists"]
        assert read(tmp_path / "x") == expected(0, 2, 4, 1, 3, 5)
    else:
        with pytest.raises(ConfigurationError) as raised:
            table.export(address)
        assert (raised.value.code, refused) == ("output-exists", [])
        assert read(tmp_path / "x") == expected(1)
    assert [path.name for path in (tmp_path / "x").iterdir() if path.is_file()] == ["_common_metadata"]


def test_host_that_is_stopped_keeps_other_exports_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks may write on for seconds, and the next export would take their files for its own."""
    late: list[Any] = []

    class StoppedHost(LocalHost):
        in_process = False

        def map(self, function: Any, items: Any, sizes: Any) -> Any:
            late.append(lambda: function(items[0]))
            raise KeyboardInterrupt

    table, address = lake(tmp_path), f"{(tmp_path / 'x').as_uri()}/"
    monkeypatch.setattr(readonly, "host_by_name", lambda name: StoppedHost())
    with pytest.raises(KeyboardInterrupt):
        table.export(address, snapshot=0, host="spark")
    with pytest.raises(ConfigurationError) as refused:
        table.export(address)
    assert refused.value.code == "output-exists"
    late[0]()
    assert "delete that folder" in refused.value.next


@pytest.mark.parametrize("output", ["landing/x/", "landing/x.parquet", "processed/x/", "processed/_lakeupsert/tmp/x/"])
@pytest.mark.parametrize("as_address", [False, True])
def test_export_into_a_zone_of_the_table_is_refused(output: str, as_address: bool, tmp_path: Path) -> None:
    table = lake(tmp_path)
    (tmp_path / output).parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigurationError) as refused:
        table.export(f"file://{tmp_path}/{output}" if as_address else f"{tmp_path}/{output}")
    assert refused.value.code == "overlapping-zones"
    assert not (tmp_path / output).exists()


def test_folder_of_a_killed_export_is_told_from_a_whole_one(tmp_path: Path) -> None:
    table, address = lake(tmp_path), f"{(tmp_path / 'x').as_uri()}/"
    table.export(address)
    with pytest.raises(ConfigurationError) as whole:
        table.export(address)
    (tmp_path / "x" / "_common_metadata").rename(tmp_path / "x" / "_lakeupsert_export")
    with pytest.raises(ConfigurationError) as killed:
        table.export(address)
    assert whole.value.code == killed.value.code == "output-exists"
    assert "delete that folder" in killed.value.next
    assert "delete that folder" not in whole.value.next


@pytest.mark.parametrize(
    ("output", "arguments", "code"),
    [
        ("x/", {"host": "spark"}, "unfit-for-host"),
        ("file:///X/", {"overwrite": True}, "unfit-for-store"),
        ("file:///X/", {"host": "spark", "snapshot": "latest"}, "unfit-for-host"),
    ],
)
def test_what_a_store_or_executors_can_not_do_is_refused(
    output: str, arguments: Any, code: str, tmp_path: Path
) -> None:
    table = lake(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        table.export(output.replace("/X", str(tmp_path / "x")), **arguments)
    assert refused.value.code == code
    assert not (tmp_path / "x").exists()
