"""`to_duckdb`, `to_polars` and `to_pandas` show what `to_arrow` shows, whether they scan the files by themselves or not."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.read import native, polars

LOGGER = "lakeupsert.read.native"
PARTS = ["a b", "x=y", "ü", "%41", "'q'", "[y]*", "2026-01-01"]
SCHEMA = pa.schema(
    {
        "k": pa.int64(),
        "part": pa.string(),
        "small": pa.int8(),
        "count": pa.uint32(),
        "flag": pa.bool_(),
        "amount": pa.decimal128(38, 10),
        "ratio": pa.float64(),
        "short": pa.float32(),
        "at": pa.timestamp("us"),
        "seen": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        'na"me': pa.string(),
        "raw": pa.binary(),
        "tags": pa.list_(pa.string()),
        "spots": pa.list_(pa.struct({"x": pa.int32(), "names": pa.list_(pa.string())})),
        "ts": pa.int64(),
    }
)


def rows(keys: range, ts: int, **changed: pa.Array) -> pa.Table:
    def row(k: int) -> dict[str, object]:
        if k % 7 == 4:
            return {"k": k, "part": PARTS[k % len(PARTS)], "ts": ts}
        moment = datetime(1582 + k * 10, 1, 2, 3, 4, 5, 678_901)
        return {
            "k": k,
            "part": PARTS[k % len(PARTS)],
            "small": -k,
            "count": 2**32 - 1 - k,
            "flag": k % 2 == 0,
            "amount": Decimal(k).scaleb(-10) - 10**20,
            "ratio": (float("nan"), float("inf"), -0.0)[k % 3],
            "short": (1e-45, -1.5, float("nan"))[k % 3],
            "at": moment,
            "seen": moment.replace(tzinfo=UTC),
            "day": date(1 + k, 12, 31),
            'na"me': ("", "é\x00", "'quoted'\n")[k % 3],
            "raw": bytes([0, 255, k]),
            "tags": ([], ["a", None], None)[k % 3],
            "spots": ([{"x": k, "names": None}, None], [], None)[k % 3],
            "ts": ts,
        }

    table = pa.Table.from_pylist([row(k) for k in keys], SCHEMA)
    for name, values in changed.items():
        kept = table.drop_columns(name) if name in table.column_names else table
        table = kept.append_column(name, values)
    return table


class Lake:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.landing = folder / "landing"
        self.landing.mkdir(parents=True)
        zones = {"landing": str(self.landing), "processed": str(folder / "processed")}
        given = {"key": ("k",), "partition_by": ("part",), "order_by": ("ts",), "strategy": "rewrite"}
        self.table = Table("t", TableSettings(**{**zones, **given, **settings}))
        self.nights = 0

    def run(self, *nights: pa.Table) -> Table:
        for night in nights:
            self.nights += 1
            pq.write_table(night, self.landing / f"{self.nights}.parquet")
            self.table.run(host="local")
        return self.table


FIRST, SECOND = rows(range(24), 1), rows(range(2, 28, 3), 2)


def clean(folder: Path) -> Table:
    return Lake(folder).run(FIRST, SECOND)


def empty(folder: Path) -> Table:
    lake = Lake(folder, delete=DeleteSettings(column="op", values=("D",)))
    return lake.run(rows(range(3), 1, op=pa.array(["D"] * 3)))


def added(folder: Path) -> Table:
    return Lake(folder).run(FIRST, rows(range(2, 28, 8), 2, more=pa.array([date(2020, 1, 1)] * 4)))


def renamed(folder: Path) -> Table:
    lake = Lake(folder)
    lake.run(FIRST)
    lake.table.rename_column("small", "tiny")
    lake.table.drop_column("day")
    again = rows(range(2, 28, 8), 2).rename_columns({"small": "tiny"}).drop_columns("day")
    return lake.run(again.append_column("day", pa.array(["a", "b", None, "d"])))  # another column under an old name


def vectors(folder: Path) -> Table:
    table = Lake(folder, strategy="delta").run(FIRST, rows(range(0, 24, 9), 2), rows(range(9, 27, 6), 3))
    assert 1 < sum(bool(file.superseded) for file in table.files()) < len(table.files())
    return table


def renamed_vectors(folder: Path) -> Table:
    lake = Lake(folder, strategy="delta")
    lake.run(FIRST)
    lake.table.rename_column("small", "tiny")
    lake.run(rows(range(0, 24, 3), 2).rename_columns({"small": "tiny"}))
    lake.table.rename_column("count", "small")
    return lake.run(rows(range(0, 24, 9), 3).rename_columns({"small": "tiny", "count": "small"}))


def dates(folder: Path) -> Table:
    table = pa.table({"k": range(4), "part": [date(1, 1, 1), *[date(2020, 1, 1)] * 3], "b": [i == 0 for i in range(4)]})
    table = table.append_column("n", pa.array([-(2**31), -1, 0, 7], pa.int32()))
    return Lake(folder, partition_by=("part", "b", "n")).run(table.append_column("ts", pa.array([1] * 4)))


NATIVE: list[Callable[[Path], Table]] = [clean, added, renamed, vectors, renamed_vectors, dates]


def place_of_duckdb(folder: Path) -> Table:
    return Lake(folder, strategy="delta").run(
        *(night.append_column("FILE_row_number", night["ts"]) for night in (FIRST, rows(range(0, 24, 9), 2)))
    )


def widened(folder: Path) -> Table:
    return Lake(folder).run(FIRST, rows(range(2, 28, 8), 2, small=pa.array([1 << 40] * 4)))


def new_field(folder: Path) -> Table:
    kind = pa.list_(pa.struct({"x": pa.int32(), "names": pa.list_(pa.string()), "y": pa.int32()}))
    return Lake(folder).run(FIRST, rows(range(2, 28, 8), 2, spots=pa.array([[{"x": 1, "y": 2}]] * 4, kind)))


def odd_types(folder: Path) -> Table:
    durations = pa.array([5] * 24, pa.duration("us"))
    return Lake(folder).run(
        FIRST.append_column("took", durations).append_column("e", pa.array([1] * 24, pa.timestamp("ms")))
    )


def pattern(folder: Path) -> Table:
    return Lake(folder / "x=1[a]*").run(FIRST)


def null_text(folder: Path) -> Table:
    return Lake(folder).run(rows(range(4), 1, part=pa.array(["null", "NULL", "a", "a"])))


def escaped_name(folder: Path) -> Table:
    night = FIRST.append_column("store: it's", pa.array(["a", "b"] * 12))
    return Lake(folder, partition_by=("part", "store: it's")).run(night)


def adopted(folder: Path) -> Table:
    lake = Lake(folder)
    (folder / "processed/part=a").mkdir(parents=True)
    pq.write_table(
        FIRST.drop_columns("part").append_column("part", pa.array(["a"] * 24)), folder / "processed/part=a/f.parquet"
    )
    lake.table.adopt()
    return lake.table


ARROW: list[Callable[[Path], Table]] = [
    place_of_duckdb,
    empty,
    widened,
    new_field,
    odd_types,
    pattern,
    null_text,
    escaped_name,
    adopted,
]


def values(relation: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    return relation.to_arrow_table().to_pylist()


def same(found: Any, expected: Any) -> bool:
    """Whatever NaN is, and in any order of rows."""
    return sorted(map(repr, found)) == sorted(map(repr, expected))


@pytest.mark.few(2)
@pytest.mark.parametrize("made", NATIVE + ARROW)
def test_duckdb(made: Callable[[Path], Table], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = made(tmp_path)
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    held = table.to_arrow().read_all()
    expected = connection.from_arrow(held)
    with caplog.at_level(logging.INFO, LOGGER):
        found = table.to_duckdb(connection)
    assert ("scans" in caplog.text) == (made in NATIVE), caplog.text
    assert (found.columns, found.types) == (expected.columns, expected.types)
    for _ in range(2):
        assert same(values(found), values(expected))
    filtered = [relation.filter("k > 5").select("part", "k") for relation in (found, expected)]
    assert same(*map(values, filtered))
    assert found.count("*").fetchall() == expected.count("*").fetchall() == found.count("*").fetchall()


@pytest.mark.few(2)
@pytest.mark.parametrize("made", NATIVE + ARROW)
def test_polars(made: Callable[[Path], Table], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = made(tmp_path)
    expected = pl.DataFrame(table.to_arrow().read_all())
    with caplog.at_level(logging.INFO, LOGGER):
        found = table.to_polars()
    assert ("scans" in caplog.text) == (made in NATIVE), caplog.text
    assert found.collect_schema() == expected.schema
    assert found.collect().schema == expected.schema
    assert same(found.collect().rows(), expected.rows())
    one = expected["part"].max() or ""
    for filtered in (pl.col("k") > 5, pl.col("part") == one, pl.col("ts").is_null()):
        assert same(
            found.filter(filtered).select("k", "part").collect().rows(),
            expected.filter(filtered).select("k", "part").rows(),
        )
    assert found.select(pl.len()).collect().item() == expected.height
    assert found.head(3).collect().height == min(3, expected.height)


@pytest.mark.few(2)
@pytest.mark.parametrize("made", NATIVE + ARROW)
def test_pandas(made: Callable[[Path], Table], tmp_path: Path) -> None:
    table = made(tmp_path)
    arrow = table.to_arrow().read_all()
    assert table.to_pandas().equals(arrow.to_pandas())
    assert table.to_pandas(["ts"]).equals(arrow.select(["ts"]).to_pandas()), "in the order of a key that is not shown"
    chosen = table.to_pandas(columns=["ts", "part"], where="k > 5")
    assert chosen.equals(table.to_arrow(where="k > 5").read_all().select(["ts", "part"]).to_pandas())
    with pytest.raises(ConfigurationError) as refused:
        table.to_pandas(columns=["nope"])
    assert refused.value.code == "unknown-column"


def test_filters_and_columns_reach_the_scan(tmp_path: Path) -> None:
    table = added(tmp_path)
    plan = table.to_duckdb(duckdb.connect()).filter("part = 'ü' AND k > 5").select("k").explain()
    assert f"Scanning Files: 1/{len(table.files())}" in plan
    assert "amount" not in plan
    plan = table.to_polars().filter((pl.col("part") == "ü") & (pl.col("k") > 5)).select("k").explain()
    assert "Parquet SCAN" in plan
    assert "SELECTION" in plan
    assert "FILTER" not in plan


def test_arrow_reads_only_the_columns_that_polars_needs(tmp_path: Path) -> None:
    table = pattern(tmp_path)
    frame = table.to_polars().filter(pl.col("part") == "ü").select("ts")
    assert "PYTHON SCAN" in frame.explain()
    assert frame.collect().columns == ["ts"]


MANY = {1: range(260), 2: range(0, 260, 2)}


def test_many_files_with_superseded_rows(tmp_path: Path) -> None:
    """More than an index of 8 bits tells apart."""
    nights = [pa.table({"k": ks, "part": [k // 2 for k in ks], "ts": [ts] * len(ks)}) for ts, ks in MANY.items()]
    table = Lake(tmp_path, strategy="delta").run(*nights)
    assert sum(bool(file.superseded) for file in table.files()) == 130
    expected = table.to_arrow().read_all().to_pylist()
    assert same(values(table.to_duckdb(duckdb.connect())), expected)
    assert same(table.to_polars().collect().to_dicts(), expected)


def test_too_many_superseded_rows_are_left_to_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = vectors(tmp_path)
    superseded = sum(file.superseded for file in table.files())
    for most, scan in ((superseded, "Parquet SCAN"), (superseded - 1, "PYTHON SCAN")):
        monkeypatch.setattr(native, "MOST_SUPERSEDED", most)
        assert scan in table.to_polars().explain()


def test_polars_scans_no_more_rows_at_once_than_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = vectors(tmp_path)
    expected = pl.DataFrame(table.to_arrow().read_all())
    monkeypatch.setattr(polars, "MOST_ROWS", 6)
    frame = table.to_polars()
    assert frame.explain().count("Parquet SCAN") > 1
    assert same(frame.collect().rows(), expected.rows())


def test_older_snapshot(tmp_path: Path) -> None:
    table = clean(tmp_path)
    old = table.to_arrow(0).read_all()
    assert table.to_duckdb(duckdb.connect(), 0).count("*").fetchall() == [(old.num_rows,)]
    assert table.to_polars(0).collect().height == len(table.to_pandas(snapshot=0)) == old.num_rows


def test_latest_has_what_is_not_merged_yet(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.run(FIRST)
    pq.write_table(rows(range(24, 30), 2), lake.landing / "more.parquet")
    lake.table.append(host="local")
    assert lake.table.to_duckdb(duckdb.connect(), "latest").count("*").fetchall() == [(30,)]
    assert lake.table.to_polars("latest").collect().height == len(lake.table.to_pandas(snapshot="latest")) == 30
    assert len(lake.table.to_pandas()) == 24


@pytest.mark.parametrize("package", ["duckdb", "polars", "pandas"])
def test_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = clean(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises((ConfigurationError, ValueError)) as refused:
        getattr(table, f"to_{package}")()
    assert isinstance(refused.value, ConfigurationError)
    assert refused.value.code == "extra-missing"


@pytest.mark.parametrize("kind", [pa.decimal256(60, 2), pa.list_(pa.decimal256(60, 2))], ids=str)
def test_column_of_a_type_that_duckdb_lacks_is_named(kind: pa.DataType, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    table = lake.run(rows(range(3), 1, wide=pa.array([None] * 3, kind)))
    for read in (
        lambda: table.to_duckdb(duckdb.connect()),
        lambda: table.to_duckdb(duckdb.connect(), where="k > 1"),
        lambda: table.to_duckdb(duckdb.connect(), columns=["wide"]),
        lambda: table.query("SELECT k FROM t"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            read()
        assert refused.value.code == "unfit-for-duckdb"
        assert "'wide'" in refused.value.message
    assert len(table.to_duckdb(duckdb.connect(), columns=["k", "part"]).fetchall()) == 3
