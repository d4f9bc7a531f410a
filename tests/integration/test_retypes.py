"""A column gets another type by command: what readers and steps make of old files, what does not convert, races and crashes."""

import json
import logging
import threading
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.read import arrow as reading
from lakeupsert.report.nights import observe
from lakeupsert.rows import datafiles, filewriter
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, delta_rows, row
from tests.harness.proof import assert_proved
from tests.harness.spark import collect

SCHEMA = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "op": "string"}
VALUES = ["10", "9", "-1", "1e2", " 8", "0x1F", None, "abc"]
"""As text, the least is ' 8' and the greatest 'abc'; of those that are numbers '-1' and '9'."""
NUMBERS = [10.0, 9.0, -1.0, 100.0, None, None, None, None]


def line(key: str, day: int, ts: int, op: str | None = None, **columns: Any) -> dict[str, Any]:
    """A row with these payload columns."""
    return {**{name: value for name, value in row(key, day, ts, op=op).items() if name != "v"}, **columns}


def begun(root: Path, values: list[Any] = VALUES, type_: str = "string", **settings: Any) -> Lake:
    """A published night with keys a, b, c, … of one day, whose column `v` has these values. No setting gives its type."""
    lake = Lake(root, schema={**SCHEMA, "v": type_}, **settings)
    lake.land("1.jsonl", [line(chr(97 + i), 0, 1, v=value) for i, value in enumerate(values)])
    lake.run()
    lake.mend(lambda row: True, schema=SCHEMA)
    return lake


@pytest.fixture
def lake(folder: Path) -> Lake:
    return begun(folder / "lake")


def retype(lake: Lake, type_: str, column: str = "v", *, unfit: bool = True) -> Any:
    done = lake.table.retype_column(column, type_, quarantine_unfit=unfit)
    lake.table.publish()
    return done


def shown(lake: Lake, column: str = "v", **options: Any) -> list[Any]:
    """Of each row the key and a column."""
    found = lake.table.to_arrow(**options).read_all().select(["k", column]).to_pylist()
    return [tuple(r.values()) for r in found]


def values(lake: Lake, **options: Any) -> list[Any]:
    return [value for _, value in shown(lake, **options)]


def quarantined(lake: Lake, reason: Any = "retyped") -> list[tuple[str, Any]]:
    rows = lake.table.quarantine(reason).read_all().to_pylist()
    return sorted((kept["k"], kept["v"]) for kept in (json.loads(r["raw"]) for r in rows))


def prove(lake: Lake) -> None:
    """The sums hold, DuckDB finds the same in what landed, and so does who writes it anew."""
    before = lake.table.to_arrow().read_all()
    for source in ("stored", "landing"):
        assert_proved(lake.table)
        assert not lake.table.reprocess(source=source, host="local").left
        assert lake.table.to_arrow().read_all().equals(before)


def run(lake: Lake, *arguments: str, **settings: Any) -> Any:
    return CliRunner().invoke(main, [*arguments, "--config", str(lake.configure(**settings))])


# ---------------------------------------------------------------- what readers see


@pytest.mark.parametrize("engine", ["arrow", pytest.param("spark", marks=pytest.mark.spark)])
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_old_and_new_files_are_read_alike(
    strategy: str, engine: Any, folder: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = begun(folder, strategy=strategy)
    before = lake.table.columns()
    retype(lake, "double")
    assert values(lake) == NUMBERS
    [(old, new)] = [(o, n) for o, n in zip(before, lake.table.columns(), strict=True) if o != n]
    assert (new.name, new.type, old.id < new.id) == ("v", "double", True)
    lake.land("2.jsonl", [line("b", 0, 2, v=0.5), line("z", 0, 1, v="2.5"), line("y", 1, 1, v=8)])
    lake.run(engine=engine)
    now = [("a", 10.0), ("b", 0.5), *zip("cdefgh", NUMBERS[2:], strict=True), ("z", 2.5), ("y", 8.0)]
    assert shown(lake) == now
    lake.table.compact(full=True)
    assert shown(lake) == now
    assert values(lake, snapshot=0) == VALUES, "a snapshot has the columns of its time"
    prove(lake)


@pytest.mark.parametrize("small", [True, False])
def test_filters_apply_to_converted_values(small: bool, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of text, in manifests and in files, say nothing of numbers. Each row has a row group of its own."""
    lake.mend(lambda row: True, strategy="delta")
    monkeypatch.setattr(filewriter, "ROW_GROUP_ROWS", 1)
    monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(reading, "SMALL_BYTES", (1 << 20) if small else 0)
    lake.table.reprocess(host="local")
    retype(lake, "double")
    lake.land("2.jsonl", [line("b", 0, 2, v=50), line("z", 0, 1, v=7)])
    lake.run()
    assert len({f.file.renames for f in lake.table.view().files()}) == 2
    for where, keys in {
        "v > 9.5": "abd",
        "v >= 100": "d",
        "v < 0": "c",
        "v = 10": "a",
        "v <> 10": "bcdz",
        "v IN (7, 100)": "dz",
        "v BETWEEN 6 AND 11": "az",
        "v IS NULL": "efgh",
        "v IS NOT NULL AND v < 8": "cz",
    }.items():
        assert "".join(k for k, _ in shown(lake, where=where)) == keys, where
    with pytest.raises(ConfigurationError):
        shown(lake, where="v LIKE '1%'")
    assert lake.table.to_arrow(where="v > 9.5", columns=["k"]).read_all()["k"].to_pylist() == ["a", "b", "d"]


def test_bounds_of_dates_say_nothing_of_times(folder: Path) -> None:
    """Both are integers in a manifest: days, and microseconds."""
    lake = begun(folder, ["2020-01-31", "2020-02-01"], "date")
    retype(lake, "timestamp_ntz")
    assert [k for k, _ in shown(lake, where="v >= '2020-02-01'")] == ["b"]
    assert [k for k, _ in shown(lake, where="v > '1970-01-02' AND v < '2020-02-01'")] == ["a"]


def test_every_reader_sees_the_same(lake: Lake, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    retype(lake, "double")
    lake.land("2.jsonl", [line("b", 0, 2, v=0.5)])
    lake.table.append(host="local")
    wanted = NUMBERS

    def check() -> None:
        assert lake.table.to_duckdb().order("k").project("v").fetchall() == [(v,) for v in wanted]
        assert lake.table.to_polars().sort("k").filter(pl.col("v") > 9.5).collect()["v"].to_list() == [
            v for v in wanted if v is not None and v > 9.5
        ]
        assert [None if v != v else v for v in lake.table.to_pandas()["v"].to_list()] == wanted
        assert lake.table.head(3)["v"].to_pylist() == wanted[:3]
        lake.table.export(folder / "out.parquet", overwrite=True)
        assert pq.read_table(folder / "out.parquet")["v"].to_pylist() == wanted
        found = run(lake, "query", "SELECT sum(v) AS s FROM t", "--json")
        assert json.loads(found.stdout)["result"]["rows"] == [{"s": sum(v for v in wanted if v is not None)}]

    with caplog.at_level(logging.INFO, "lakeupsert.read.native"):
        check()
        assert "before a column was retyped" in caplog.text
        assert values(lake, snapshot="latest") == [10.0, 0.5, *NUMBERS[2:]]
        lake.run()
        wanted = [10.0, 0.5, *NUMBERS[2:]]
        lake.table.compact(full=True)
        caplog.clear()
        check()
        assert "scans 1 files by itself" in caplog.text


def test_spark_waits_for_a_compaction(lake: Lake, spark: Any) -> None:
    retype(lake, "decimal(12,2)")
    with pytest.raises(ConfigurationError) as e:
        lake.table.to_spark(spark)
    assert (e.value.code, "compact --full" in (e.value.next or "")) == ("unconverted-files", True)
    listed = run(lake, "files")
    assert "1 of 1 files were written before a retype of v" in listed.stderr
    assert run(lake, "compact", "--full").exit_code == 0
    found = [r["v"] for r in as_dicts(collect(lake.table.to_spark(spark)))]
    assert found == [Decimal("10.00"), Decimal("9.00"), Decimal("-1.00"), Decimal("100.00"), None, None, None, None]
    assert run(lake, "files").stderr == ""


def as_dicts(table: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = sorted(table.to_pylist(), key=lambda r: r["k"])
    return rows


def test_diff_explain_and_latest_follow_a_retype(lake: Lake) -> None:
    retype(lake, "double")
    found = lake.table.diff(0, "published")
    assert (found.updated, found.not_compared) == (0, ()), "values are compared as they are now"
    lake.land("2.jsonl", [line("a", 0, 2, v=11), line("b", 0, 2, v=9)])
    lake.run()
    assert lake.table.diff(0, "published").updated == 2, "b has another order"
    [one] = lake.table.explain({"k": "a", "l": 0}).partitions
    assert one.shown is not None
    assert (one.shown["v"], {v.outcome for v in one.versions}) == (11.0, {"shown", "superseded"})
    [one] = lake.table.explain({"k": "d", "l": 0}).partitions
    assert one.shown is not None
    assert (one.shown["v"], {v.source for v in one.versions if v.outcome == "shown"}) == (100.0, {"appended", "base"})
    assert "v became double, 3 rows quarantined" in [night.note for night in observe(lake.opened, 10, 0).nights]


CASES = {
    "text to int": ("string", ["7", "-3", "1.0", "99999999999", "٣"], "int", [7, -3, None, None, None]),
    "text to date": ("string", ["2020-01-31", "2020-02-30", "31.01.2020"], "date", [date(2020, 1, 31), None, None]),
    "text to decimal": (
        "string",
        ["1.50", "1.505", "1e3"],
        "decimal(9,2)",
        [Decimal("1.50"), None, Decimal("1000.00")],
    ),
    "text to timestamp": (
        "string",
        ["2020-01-31T01:02:03+01:00", "2020-01-31", "noon"],
        "timestamp_ntz",
        [datetime(2020, 1, 31, 0, 2, 3), datetime(2020, 1, 31), None],
    ),
    "text to boolean": ("string", ["true", "FALSE", "1"], "boolean", [True, False, None]),
    "int to text": ("bigint", [7, -3, 2**53 + 1], "string", ["7", "-3", "9007199254740993"]),
    "double to int": ("double", [7.0, 7.5, 1e30], "bigint", [7, None, None]),
    "decimal to double": ("decimal(9,2)", ["8.70", "0.10"], "double", [8.7, 0.1]),
    "wide to narrow": ("bigint", [127, 128, -129], "tinyint", [127, None, None]),
    "timestamp to date": ("timestamp_ntz", ["2020-01-31", "2020-01-31T00:00:01"], "date", [date(2020, 1, 31), None]),
    "int to date": ("int", [7], "date", [None]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_values_convert_exactly_or_not_at_all(case: str, folder: Path) -> None:
    was, given, now, wanted = CASES[case]
    lake = begun(folder, given, was)
    found = lake.table.retype_column("v", now, dry=True).conversion
    assert found is not None
    assert (found.converted, found.unfit) == (len(given) - wanted.count(None), wanted.count(None))
    assert retype(lake, now).quarantined == wanted.count(None)
    assert values(lake) == wanted
    prove(lake)  # rewrites
    assert values(lake) == wanted


@pytest.mark.parametrize("rewritten", [True, False])
def test_values_take_every_step_of_several_retypes(rewritten: bool, folder: Path) -> None:
    """So they do not depend on when a merge rewrote their file."""

    def step(type_: str) -> None:
        retype(lake, type_)
        if rewritten:
            lake.table.compact(full=True)

    lake = begun(folder, ["007", "1.5", "x", None])
    step("int")
    lake.table.rename_column("v", "w")
    lake.table.retype_column("w", "string")
    lake.table.rename_column("w", "v")
    step("decimal(9,2)")
    assert values(lake) == [Decimal("7.00"), None, None, None]
    assert quarantined(lake) == [("b", "1.5"), ("c", "x")]
    prove(lake)


@pytest.mark.long
@pytest.mark.parametrize("rewritten", [True, False])
def test_narrow_values_grow_before_they_convert_and_later_ones_after(rewritten: bool, folder: Path) -> None:
    lake = begun(folder, [0.1], "float")

    def grow(name: str, type_: pa.DataType, value: Any) -> None:
        types = {"k": pa.string(), "l": pa.int32(), "d": pa.date32(), "ts": pa.timestamp("us"), "v": type_}
        new = {**line("z", 0, 1), "ts": datetime(2020, 1, 1), "v": value}
        pq.write_table(
            pa.Table.from_pylist([{n: new[n] for n in types}], pa.schema(types)), lake.root / "landing" / name
        )
        if rewritten:
            lake.run()
            lake.table.reprocess(host="local")
        else:
            lake.table.append(host="local")

    grow("2.parquet", pa.float64(), 2.5)
    retype(lake, "string")
    lake.run()
    assert values(lake) == ["0.10000000149011612", "2.5"], "the text of the double that the float became"
    retype(lake, "float")
    grow("3.parquet", pa.float64(), 0.3)
    lake.run()
    assert values(lake) == [pytest.approx(0.1), 0.3]
    assert values(lake)[0] == 0.10000000149011612, "a float that grew, and not the text as a double"


# ---------------------------------------------------------------- what does not convert


def test_dry_run_lists_what_does_not_convert_and_changes_nothing(lake: Lake) -> None:
    lake.land("2.jsonl", [line("p", 1, 1, v="abc"), line("q", 1, 1, v="def"), line("r", 1, 1, "D", v="gone")])
    lake.table.append(host="local")
    shown_text = run(lake, "schema", "retype", "v", "double")
    assert shown_text.exit_code == 0
    for text in ('"abc"', '" 8"', '"0x1F"', "d=2020-01-01, k=h l=0", "nothing was changed"):
        assert text in shown_text.stdout
    assert "gone" not in shown_text.stdout, "a delete brings no value"
    found = json.loads(run(lake, "schema", "retype", "v", "double", "--json").stdout)["result"]
    assert (found["converted"], found["unfit"], found["unfit_not_listed"], found["entry"]) == (4, 5, 0, None)
    counts = {one["value"]: one["rows"] for one in found["unfit_values"]}
    assert counts == {" 8": 1, "0x1F": 1, "abc": 2, "def": 1}
    refused = run(lake, "schema", "retype", "v", "double", "--yes", "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"], error["data_changed"]) == (1, "unfit-values", False)
    assert "--quarantine-unfit" in error["next"]
    assert [n for n, e in lake.entries() if e.kind == "schema"] == []
    assert values(lake) == VALUES


def test_rows_with_unfit_values_are_kept_in_quarantine(lake: Lake) -> None:
    lake.land("2.jsonl", [line("a", 0, 2, v="late"), line("q", 1, 1, v="def")])
    lake.table.append(host="local")
    done = run(lake, "schema", "retype", "v", "double", "--yes", "--quarantine-unfit", "--json")
    result = json.loads(done.stdout)
    assert (done.exit_code, result["result"]["quarantined"], len(result["warnings"])) == (0, 5, 2)
    assert quarantined(lake) == [("a", "late"), ("e", " 8"), ("f", "0x1F"), ("h", "abc"), ("q", "def")]
    assert lake.table.status().quarantined == 5
    lake.run()
    assert shown(lake) == [("a", None), *zip("bcdefgh", NUMBERS[1:], strict=True), ("q", None)]
    assert lake.table.append(host="local", replay_quarantine=True) is None, "these rows may have changed since"
    listed = run(lake, "quarantine", "--reason", "retyped", "--json")
    assert json.loads(listed.stdout)["result"]["reasons"] == {"retyped": 5}
    lake.table.vacuum(dry=False)
    assert len(quarantined(lake)) == 5
    prove(lake)
    retype(lake, "string")
    assert lake.table.append(host="local", replay_quarantine=True) is None, "nor if they would convert"


def test_nothing_that_fits_is_quarantined(folder: Path) -> None:
    lake = begun(folder, ["1", "2.5", None])
    done = run(lake, "schema", "retype", "v", "double", "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)["warnings"]) == (0, [])
    assert values(lake) == [1.0, 2.5, None]
    assert quarantined(lake) == []


def test_many_different_unfit_values_are_counted_and_some_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.pipeline.retypes.MOST_VALUES", 2)
    lake = begun(folder, ["x", "y", "z", "z", "x"])
    found = json.loads(run(lake, "schema", "retype", "v", "int", "--json").stdout)["result"]
    assert [(one["value"], one["rows"]) for one in found["unfit_values"]] == [("x", 2), ("y", 1)]
    assert (found["unfit"], found["unfit_not_listed"]) == (5, 2)


# ---------------------------------------------------------------- beside other steps


def test_later_rows_land_in_the_new_type(folder: Path) -> None:
    lake = begun(folder, ["1", "2"], quarantine_limit=100)
    lake.land("2.jsonl", [line("c", 0, 1, v="3")])
    lake.table.append(host="local")
    retype(lake, "int")
    types = {"k": pa.string(), "l": pa.int32(), "d": pa.date32(), "ts": pa.timestamp("us"), "v": pa.string()}
    new = [
        {**line("d", 0, 1), "ts": datetime(2020, 1, 1), "v": "4"},
        {**line("e", 0, 1), "ts": datetime(2020, 1, 1), "v": "x"},
    ]
    rows = pa.Table.from_pylist([{n: r[n] for n in types} for r in new], pa.schema(types))
    pq.write_table(rows, lake.root / "landing" / "3.parquet")
    lake.run()
    assert values(lake) == [1, 2, 3, 4]
    assert quarantined(lake, "bad_type") == [("e", "x")]
    prove(lake)
    retype(lake, "string")
    assert lake.table.append(host="local", replay_quarantine=True) is not None, "text takes it now"
    lake.run()
    assert values(lake) == ["1", "2", "3", "4", "x"]
    assert not lake.table.reprocess(source="landing", host="local").left
    assert values(lake) == ["1", "2", "3", "4", "x"]


@pytest.mark.long
def test_restore_across_a_retype_converts_what_comes_back(lake: Lake) -> None:
    lake.land("2.jsonl", [line(chr(97 + i), 0, 2, v="1") for i in range(8)])
    lake.run()
    assert retype(lake, "double", unfit=False).quarantined == 0
    assert values(lake) == [1.0] * 8
    assert lake.table.restore(0).unfit == 3
    assert json.loads(run(lake, "restore", "0", "--json").stdout)["result"]["unfit"] == 3
    assert quarantined(lake) == []
    assert lake.table.restore(0, dry=False).unfit == 3
    lake.run()
    assert values(lake) == NUMBERS
    assert quarantined(lake) == [("e", " 8"), ("f", "0x1F"), ("h", "abc")], "nothing is lost"
    prove(lake)
    assert lake.table.restore(2, dry=False).unfit == 0
    lake.run()
    assert values(lake) == [1.0] * 8
    assert values(lake, snapshot=0) == VALUES
    prove(lake)


def test_withdrawn_files_are_loaded_again_in_the_new_type(folder: Path) -> None:
    lake = begun(folder, ["1", "2"])
    lake.land("2.jsonl", [line("a", 0, 2, v="3")])
    lake.run()
    retype(lake, "int")
    lake.table.restore(0, dry=False)
    lake.run()
    assert values(lake) == [1, 2]
    assert lake.table.append(host="local", again=True) is not None
    lake.run()
    assert values(lake) == [3, 2]
    prove(lake)


@pytest.mark.few(1)
@pytest.mark.parametrize("partition_by", [("d",), ()])
def test_statements_compute_with_converted_values(partition_by: tuple[str, ...], folder: Path) -> None:
    """Also before the retype is published, and in a table of one partition."""
    lake = begun(folder, ["10", "9", "x", None], strategy="delta", partition_by=partition_by)
    lake.table.retype_column("v", "double", quarantine_unfit=True)
    lake.table.update({"v": "v + 1"}, where="k = 'a'", dry=False)
    lake.table.update({"v": "coalesce(v, 0) + 1"}, where="v > 9.5 OR v IS NULL", dry=False)
    assert values(lake) == [12.0, 9.0, 1.0, 1.0]
    assert quarantined(lake) == [("c", "x")]
    prove(lake)
    retype(lake, "string")
    assert values(lake) == ["12", "9", "1", "1"]
    prove(lake)


@pytest.mark.parametrize("rewritten", [True, False])
def test_versions_in_a_history_are_converted(rewritten: bool, folder: Path) -> None:
    lake = begun(folder, ["1", "x", "3"], history=True)
    lake.land("2.jsonl", [line("a", 0, 2, v="9"), line("b", 0, 2, v="2"), line("c", 0, 2, "D")])
    lake.run()
    assert retype(lake, "int").quarantined == 1
    assert quarantined(lake) == [("b", "x")], "which readers of the history see"
    lake.land("3.jsonl", [line("a", 0, 3, v=10)])
    lake.run()
    if rewritten:
        lake.table.reprocess(host="local")
    found = lake.table.to_arrow(history=True).read_all().to_pylist()
    assert [(r["k"], r["ts"].second, r["v"]) for r in found] == [
        ("a", 3, 10),
        ("a", 2, 9),
        ("a", 1, 1),
        ("b", 2, 2),
        ("b", 1, None),
        ("c", 1, 3),
    ]
    assert len(lake.table.to_arrow(history=True, where="v < 3").read_all()) == 2
    assert values(lake) == [10, 2]
    prove(lake)


def test_adopted_files_are_converted(folder: Path) -> None:
    lake = Lake(folder, schema=SCHEMA, delete=None)
    types = {"k": pa.string(), "l": pa.int32(), "ts": pa.timestamp("us"), "v": pa.dictionary(pa.int32(), pa.string())}
    new = [{**line(k, 0, 1), "ts": datetime(2020, 1, 1), "v": v} for k, v in (("a", "1"), ("b", "x"), ("c", None))]
    target = folder / "processed" / "d=2020-01-01" / "x.parquet"
    target.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{n: r[n] for n in types} for r in new], pa.schema(types)), target)
    lake.table.adopt()
    retype(lake, "int")
    assert values(lake) == [1, None, None]
    assert values(lake, where="v = 1") == [1]
    assert quarantined(lake) == [("b", "x")]
    lake.land("2.jsonl", [{n: v for n, v in line("c", 0, 2, v=3).items() if n != "op"}])
    lake.run()
    assert values(lake) == [1, None, 3]
    prove(lake)


def test_retyped_column_may_be_renamed_dropped_and_come_again(lake: Lake) -> None:
    retype(lake, "double")
    lake.table.rename_column("v", "w")
    lake.table.publish()
    assert values(lake, column="w") == NUMBERS
    lake.land("2.jsonl", [line("a", 0, 2, v="new", w=3)])
    lake.run()
    assert shown(lake, "v")[:2] == [("a", "new"), ("b", None)]
    assert shown(lake, "w")[:2] == [("a", 3.0), ("b", 9.0)]
    lake.table.drop_column("w")
    lake.table.publish()
    retype(lake, "binary")
    assert shown(lake, "v")[:2] == [("a", b"new"), ("b", None)]
    prove(lake)


# ---------------------------------------------------------------- races and crashes


@pytest.mark.long
def test_batch_between_the_look_and_the_entry_is_looked_at(folder: Path) -> None:
    """A batch with an unfit value lands before each call of a retype, as another process lands it."""
    lake = begun(folder / "lake", ["1", "2"])
    lake.land("2.jsonl", [line("c", 0, 1, v="x"), line("d", 1, 1, v="4")])
    counted = lake.copy(lake.root.with_name(clock.new_id()))
    counted.points.arm(-1, Fault.BEFORE)
    counted.table.retype_column("v", "int")
    came = set()
    for number, call in enumerate(counted.points.seen):
        struck = lake.copy(lake.root.with_name(clock.new_id()))
        struck.points.amid(number, partial(append, struck))
        try:
            try:
                struck.table.retype_column("v", "int")
            except RefusedError as e:
                assert e.code == "unfit-values"
                came.add("refused")
                continue
            struck.points.disarm()
            struck.reopen()
            struck.run()
            kinds = [e.kind for _, e in struck.entries()]
            behind = kinds.index("schema") < [bool(e.files) for _, e in struck.entries()].index(True, 2)
            came.add("behind" if behind else "before")
            kept = quarantined(struck, "bad_type" if behind else "retyped")
            assert kept == [("c", "x")]
            assert values(struck) == ([1, 2, 4] if behind else [1, 2, None, 4])
            assert not struck.table.reconcile().unbalanced
        except BaseException as e:
            e.add_note(f"amid call {number} ({call})")
            raise
    assert came == {"refused", "before", "behind"}


def test_batch_that_was_read_before_and_commits_first_is_looked_at(folder: Path) -> None:
    lake = begun(folder, ["1", "2"])
    lake.land("2.jsonl", [line("c", 0, 1, v="x"), line("d", 1, 1, v="4")])
    other, at_commit, goes_on = Lake(folder, schema=SCHEMA), threading.Event(), threading.Event()

    def wait() -> None:
        at_commit.set()
        assert goes_on.wait(60)

    other.points.amid(0, wait, "create _lakeupsert/ledger")
    thread = threading.Thread(target=lambda: other.table.append(host="local"))
    thread.start()
    assert at_commit.wait(60)

    def commit() -> None:
        goes_on.set()
        thread.join()

    lake.points.amid(0, commit, "create _lakeupsert/ledger")
    done = lake.table.retype_column("v", "int")
    lake.points.disarm()
    assert [e.kind for _, e in lake.entries()] == ["create", "batch", "batch", "schema"]
    assert (done.conversion.unfit, done.quarantined) == (0, 1)
    assert quarantined(lake) == [("c", "x")]
    lake.run()
    assert values(lake) == [1, 2, None, 4]
    prove(lake)


def append(lake: Lake) -> None:
    assert Table("t", lake.settings).append(host="local") is not None


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("again", [True, False])
def test_retype_that_is_cut_off_is_finished_by_who_comes_next(again: bool, fault: Fault, folder: Path) -> None:
    """By the same command, or by a batch: before its own entry it writes the one that names the quarantine."""
    lake = begun(folder / "lake", ["1", "x"])
    came = set()

    def check(struck: Lake) -> None:
        if again:
            retype(struck, "int")
        struck.land("2.jsonl", [line("c", 0, 1, v="3")])
        struck.run()
        found = values(struck)
        came.add(found[0])
        assert found in ([1, None, 3], ["1", "x", "3"])
        assert quarantined(struck) == ([("b", "x")] if found[0] == 1 else [])
        assert not struck.table.reconcile().unbalanced

    calls = lake.strike_every_call(fault, lambda s: retype(s, "int"), check)
    assert calls > 10
    assert came == ({1} if again else {1, "1"})


def test_retypes_race(folder: Path) -> None:
    lake = begun(folder / "lake", ["1", "2"])

    def to(type_: str, table: Table) -> None:
        try:
            table.retype_column("v", type_)
        except LakeupsertError as e:
            assert e.code == "grows-by-itself"  # the other was first

    counted = lake.copy(lake.root.with_name(clock.new_id()))
    counted.points.arm(-1, Fault.BEFORE)
    to("int", counted.table)
    for number, call in enumerate(counted.points.seen):
        struck = lake.copy(lake.root.with_name(clock.new_id()))
        struck.points.amid(number, partial(to, "bigint", Table("t", struck.settings)))
        to("int", struck.table)
        struck.points.disarm()
        struck.reopen()
        struck.run()
        assert values(struck) == [1, 2], call
        assert not struck.table.reconcile().unbalanced


# ---------------------------------------------------------------- what is refused


@pytest.mark.few(4)
@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("column", "type_", "code"),
    [
        ("k", "binary", "column-in-use"),
        ("d", "string", "column-in-use"),
        ("ts", "date", "column-in-use"),
        ("op", "int", "column-in-use"),
        ("w", "int", "unknown-column"),
        ("v", "string", "same-type"),
        ("V", "string", "same-type"),
        ("v", "large_string", "grows-by-itself"),
        ("v", "nothing", "unknown-type"),
        ("v", "null", "unfit-type"),
        ("tags", "string", "unfit-type"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(
    column: str, type_: str, code: str, dry: bool, lake: Lake
) -> None:
    lake.land("2.jsonl", [line("z", 0, 1, v="1", tags=[1, 2])])
    lake.run()
    before = lake.table.columns()
    with pytest.raises(ConfigurationError) as e:
        lake.table.retype_column(column, type_, dry=dry)
    assert e.value.code == code
    assert lake.table.columns() == before
    assert not [n for n, entry in lake.entries() if entry.kind == "schema"]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"ties": "content"}, "content-decides"),
        ({"mode": "columns"}, "retype-not-supported"),
    ],
)
def test_tables_that_keep_or_compare_other_values_refuse(settings: dict[str, Any], code: str, folder: Path) -> None:
    lake = begun(folder, **settings)
    with pytest.raises(ConfigurationError) as e:
        lake.table.retype_column("v", "int", dry=True)
    assert e.value.code == code


def test_other_type_in_the_configuration_is_refused(folder: Path) -> None:
    lake = begun(folder, ["1"])
    lake.mend(lambda row: True, schema={**SCHEMA, "V": "string"})
    with pytest.raises(ConfigurationError) as e:
        lake.table.retype_column("v", "int")
    assert e.value.code == "other-type-declared"
    assert '`v = "int"`' in (e.value.next or "")
    lake.mend(lambda row: True, schema={**SCHEMA, "v": "int"})
    retype(lake, "int")
    lake.land("2.jsonl", [line("b", 0, 1, v=2)])
    done = lake.table.run(host="local")
    assert done.append is not None
    assert not [warning for warning in done.append.warnings if "'v'" in warning]
    assert values(lake) == [1, 2]


def test_engines_that_go_by_name_never_find_another_type_under_a_name(folder: Path) -> None:
    """With such a publisher the new field has a name of its own in files, from the first one that is written."""
    lake = begun(folder, ["1", "2"], publishers=("delta",))
    retype(lake, "int")
    assert lake.table.status().publishers["delta"].behind == 1
    assert values(lake) == [1, 2]
    lake.land("2.jsonl", [line("c", 1, 1, v=3)])
    lake.run()
    types: dict[str, set[str]] = {}
    for file in lake.table.view().files():
        for field in pq.read_schema(file.path):
            types.setdefault(field.name, set()).add(str(field.type))
    assert all(len(found) == 1 for found in types.values()), types
    assert values(lake) == [1, 2, 3]
    lake.table.compact(full=True)
    assert lake.table.status().publishers["delta"].behind == 0
    assert values(lake) == [1, 2, 3]
    prove(lake)


def test_publisher_that_comes_after_a_retype_waits_for_a_compaction(folder: Path) -> None:
    """Old and new files have one name for it."""
    lake = begun(folder, ["1", "2"])
    retype(lake, "int")
    lake.mend(lambda row: True, publishers=("delta",))
    found = lake.table.publish().publishers["delta"]
    assert found.problem is not None
    assert (found.problem.code, found.snapshot) == ("unfit-for-delta", None)
    lake.table.compact(full=True)
    assert lake.table.status().publishers["delta"].behind == 0
    assert [r["v"] for r in delta_rows(lake.settings.processed)] == [1, 2]
