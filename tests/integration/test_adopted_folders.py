"""Adopted folders keep their names, and a value that lands goes to the folder that it has, however that is written."""

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.layout import parse_partition

TEXTS = [
    "x y",
    "a/b",
    "50%",
    "é",
    "a:b",
    "a=b",
    "A+B",
    "q?",
    "~x",
    "'",
    "a&b",
    "{c}",
    "<d>",
    "|",
    ",",
    "plain",
    "a#b",
    "[e]",
]
DAY, NEXT_DAY = dt.date(2024, 1, 1), dt.date(2024, 1, 2)


def _write(folder: Path, ids: dict[str, str]) -> None:
    """A file with one row, by the folder it is in and the row's key."""
    for name, key in ids.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"id": [key], "version": [1]}), folder / name / "part-0.parquet")


def _table(root: Path, columns: tuple[str, ...] = ("p",), **settings: Any) -> Table:
    (root / "landing").mkdir(exist_ok=True)
    usual: dict[str, Any] = {"key": ("id",), "partition_by": columns, "order_by": ("version",)}
    zones = {"landing": str(root / "landing"), "processed": str(root / "lake")}
    return Table("t", TableSettings(**zones, **usual, **settings))


def _folders(root: Path) -> set[str]:
    return {str(file.parent.relative_to(root / "lake")) for file in (root / "lake").rglob("*.parquet")}


def _rows(table: Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_arrow().read_all().to_pylist())


def by_duckdb(folder: Path, lake: pa.Table) -> None:
    with duckdb.connect() as db:
        db.register("lake", lake)
        db.execute(f"COPY lake TO '{folder}' (FORMAT parquet, PARTITION_BY (p))")


def by_polars(folder: Path, lake: pa.Table) -> None:
    pl.DataFrame(lake).write_parquet(folder, partition_by=["p"])


def by_pandas(folder: Path, lake: pa.Table) -> None:
    lake.to_pandas().to_parquet(folder, partition_cols=["p"])


@pytest.mark.parametrize("host", ["local", pytest.param("spark", marks=pytest.mark.spark)])
@pytest.mark.parametrize("write", [by_duckdb, by_polars, by_pandas])
def test_texts_as_others_escape_them(
    tmp_path: Path, write: Callable[[Path, pa.Table], None], host: Any, request: pytest.FixtureRequest
) -> None:
    spark = request.getfixturevalue("spark") if host == "spark" else None
    rows = [{"id": f"k{n}", "version": 1, "p": text} for n, text in enumerate(TEXTS)]
    write(tmp_path / "lake", pa.Table.from_pylist(rows))
    folders = _folders(tmp_path)
    table = _table(tmp_path)
    table.adopt()
    updates = [{**row, "version": 2} for row in rows] + [{"id": "new", "version": 1, "p": "never seen: %"}]
    (tmp_path / "landing/1.jsonl").write_text("\n".join(map(json.dumps, updates)))
    table.run(host=host)

    assert len(folders) == len(TEXTS)
    assert _folders(tmp_path) == {*folders, "p=never seen%3A %25"}
    assert _rows(table) == sorted((row["id"], row["version"], row["p"]) for row in updates)
    if spark is not None:
        assert sorted(map(tuple, table.to_spark(spark).collect())) == _rows(table)
    assert all(p.balanced for p in table.reconcile(deep=True).proof)
    for folder in folders:
        assert [f.partition for f in table.files(where=None) if f.partition == folder]
    table.compact(full=True)
    table.vacuum(dry=False)
    assert _rows(table) == sorted((row["id"], row["version"], row["p"]) for row in updates)


@pytest.mark.parametrize(
    ("folders", "schema", "landed", "expected"),
    [
        pytest.param(["01", "02", "10"], {}, 1, ("01", 1, "11", 11), id="months"),
        pytest.param(["01", "02", "10"], {}, "01", ("01", 1, "11", 11), id="months as text"),
        pytest.param(["00501", "12345"], {}, 501, ("00501", 501, "00502", 502), id="codes"),
        pytest.param(["1", "02"], {}, 2, ("02", 2, "3", 3), id="mixed"),
        pytest.param(["08", "100"], {}, 8, ("08", 8, "09", 9), id="more digits than zeros"),
        pytest.param(
            ["2024-1-1", "2024-10-02"], {}, "2024-01-01", ("2024-1-1", DAY, "2024-01-02", NEXT_DAY), id="dates"
        ),
        pytest.param(["True"], {}, True, ("True", True, "false", False), id="booleans"),
        pytest.param(["true"], {}, True, ("true", True, "false", False), id="usual booleans"),
        pytest.param(["x%2Fy", "%7e"], {}, "~", ("%7e", "~", "z", "z"), id="lower-case hexadecimal"),
        pytest.param(["50%", "a"], {}, "50%", ("50%", "50%", "z", "z"), id="not escaped"),
        pytest.param(["01", "1"], {"p": "string"}, "01", ("01", "01", "z", "z"), id="as text"),
        pytest.param(["20240101"], {}, 20240101, ("20240101", 20240101, "20240102", 20240102), id="a date as number"),
    ],
)
def test_values_as_people_write_them(
    tmp_path: Path, folders: list[str], schema: dict[str, str], landed: Any, expected: tuple[str, Any, str, Any]
) -> None:
    _write(tmp_path / "lake", {f"p={text}": f"k{text}" for text in folders})
    table = _table(tmp_path, schema=schema, strategy="rewrite", publishers=("delta",))
    table.adopt()
    text, value, new_text, new_value = expected
    key = f"k{text}"
    rows = [{"id": key, "version": 2, "p": landed}, {"id": "new", "version": 1, "p": new_value}]
    (tmp_path / "landing/1.jsonl").write_text("\n".join(json.dumps(row, default=str) for row in rows))
    ran = table.run(host="local")
    assert ran.append is not None
    assert ran.append.entry.rows_quarantined == 0

    assert _folders(tmp_path) - {"_delta_log"} == {*(f"p={text}" for text in folders), f"p={new_text}"}
    found = {(row[0], row[1]): row[2] for row in _rows(table)}
    assert found[key, 2] == value
    assert (key, 1) not in found
    assert found["new", 1] == new_value
    assert all(p.balanced for p in table.reconcile(deep=True).proof)
    query = QueryBuilder().register("t", DeltaTable(str(tmp_path / "lake"))).execute("SELECT id, version, p FROM t")
    shown = {(row["id"], row["version"]): row["p"] for row in pa.table(query.read_all()).to_pylist()}
    assert shown == found


def test_spark_reads_them(tmp_path: Path, spark: Any) -> None:
    _write(tmp_path / "lake", {"n=01/d=2024-1-1/b=True/t=x%20y": "a", "n=02/d=2024-01-02/b=False/t=%7e": "b"})
    table = _table(tmp_path, ("n", "d", "b", "t"))
    table.adopt()
    landed = {"id": "a", "version": 2, "n": 1, "d": "2024-01-01", "b": True, "t": "x y"}
    (tmp_path / "landing/1.jsonl").write_text(json.dumps(landed))
    table.run(host="spark", engine="spark")
    expected = [("a", 2, 1, DAY, True, "x y"), ("b", 1, 2, NEXT_DAY, False, "~")]
    assert _rows(table) == expected
    assert sorted(map(tuple, table.to_spark(spark).collect())) == expected
    assert table.to_polars().sort("id").collect().rows() == table.to_duckdb().order("id").fetchall() == expected


@pytest.mark.parametrize("given", ["p=01", "p=1", "01", "1"])
def test_a_partition_is_chosen_by_its_folder_or_its_value(tmp_path: Path, given: str) -> None:
    _write(tmp_path / "lake", {"p=01": "a", "p=02": "b"})
    table = _table(tmp_path)
    table.adopt()
    spec = table.objects.specs.head()
    assert spec is not None
    assert parse_partition(spec.body, given) == "p=01"
    assert [row["id"] for row in table.to_arrow(where="p = 1").read_all().to_pylist()] == ["a"]


@pytest.mark.parametrize(
    ("folders", "columns", "schema", "named"),
    [
        (["p=1", "p=01"], ("p",), {}, ("p=1", "p=01")),
        (["p=x y", "p=x%20y"], ("p",), {}, ("p=x y", "p=x%20y")),
        (["y=1/m=01", "y=2/m=1"], ("y", "m"), {}, ("m=1", "m=01")),
        (["p=True", "p=true"], ("p",), {}, ("p=True", "p=true")),
        (["p=20240101"], ("p",), {"p": "date"}, ("p=20240101",)),
        (["p=yes"], ("p",), {"p": "bool"}, ("p=yes",)),
        (["p="], ("p",), {}, ("p=",)),
        (["p=__HIVE_DEFAULT_PARTITION__"], ("p",), {}, ("p=__HIVE_DEFAULT_PARTITION__",)),
        ([f"p={'%C3%A9' * 40}"], ("p",), {}, ("p=%C3",)),
    ],
)
def test_folders_that_are_refused_by_name(
    tmp_path: Path, folders: list[str], columns: tuple[str, ...], schema: dict[str, str], named: tuple[str, ...]
) -> None:
    _write(tmp_path / "lake", {folder: f"k{n}" for n, folder in enumerate(folders)})
    with pytest.raises(ConfigurationError) as refused:
        _table(tmp_path, columns, schema=schema).adopt()
    assert refused.value.code == "not-partitioned"
    assert all(name in refused.value.message.replace("%3D", "=") for name in named)
    helps = folders[0] in ("p=1", "y=1/m=01", "p=True", "p=20240101", "p=yes")
    assert ("the type string" in refused.value.next) == helps
    assert not (tmp_path / "lake/_lakeupsert").exists()


@pytest.mark.parametrize("text", ["1.50", "1e3", "2024-01-01 10%3A30%3A00", "2024/1/1".replace("/", "%2F"), "01x"])
def test_text_that_another_type_may_write_otherwise_is_warned_of(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "lake", {f"p={text}": "a"})
    warnings = _table(tmp_path).adopt().warnings
    assert any(f"p={text}" in warning for warning in warnings) == (text != "01x")
