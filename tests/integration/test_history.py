"""Tables that keep a history: random nights through every step, what readers of it see, what is refused."""

import itertools
import json
import random
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.merge.state import state_at
from lakeupsert.pipeline.merge.steps import step_of
from lakeupsert.pipeline.merge.units import UnitResults
from lakeupsert.pipeline.opened import OpenTable
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row
from tests.harness.rounds import TIMES
from tests.harness.spark import collect

SETTINGS = """key = ["id"]
partition_by = ["day"]
order_by = ["version"]
history = true
[tables.t.delete]
column = "op"
values = ["D"]
"""
Record = dict[str, Any]


def opened(root: Path, settings: str = SETTINGS, processed: str = "processed") -> Table:
    file = root / f"{processed}.toml"
    file.write_text(f'[tables.t]\nlanding = "landing"\nprocessed = "{processed}"\n{settings}')
    return Table.open(file)


def land(root: Path, name: str, records: list[Record]) -> None:
    (root / "landing").mkdir(exist_ok=True)
    lines = (json.dumps({"day": "2020-01-01", **record}) + "\n" for record in records)
    (root / "landing" / name).write_text("".join(lines))


def nights(rng: random.Random, count: int) -> list[list[Record]]:
    """No two records of a key have one version; many come late, some twice."""
    versions = {key: rng.sample(range(1000), 60) for key in range(8)}
    came: list[Record] = []
    found = []
    for _ in range(count):
        night = []
        for _ in range(rng.randint(1, 12)):
            key = rng.randrange(8)
            op = "D" if rng.random() < 0.25 else None
            night.append({"id": str(key), "day": f"2020-01-0{1 + key % 2}", "version": versions[key].pop(), "op": op})
            night[-1]["v"] = rng.randrange(100)
        came += night
        found.append(night + rng.choices(came, k=2))
    return found


def expected(records: list[Record]) -> list[tuple[Any, ...]]:
    """Every version: id, v, from, until."""
    of_key: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in records:
        of_key[record["id"]][record["version"]] = record
    found = []
    for key, versions in of_key.items():
        ends = [*sorted(versions), None]
        for begin, end in itertools.pairwise(ends):
            if not versions[begin]["op"]:
                found.append((key, versions[begin]["v"], begin, end))
    return sorted(found, key=str)


def seen(table: Table, **options: Any) -> list[tuple[Any, ...]]:
    rows = table.to_arrow(history=True, **options).read_all().to_pylist()
    assert all(row["valid_from"] == row["version"] for row in rows)
    return sorted(((row["id"], row["v"], row["valid_from"], row["valid_to"]) for row in rows), key=str)


@pytest.mark.few(1)
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_history_is_that_of_all_records_after_every_step(
    seed: int, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEUPSERT__TABLES__T__STRATEGY", chosen)
    monkeypatch.setattr(strategy, "TOGETHER", 3)
    rng = random.Random(seed)
    table = opened(tmp_path, SETTINGS.replace("history = true", 'history = true\nbucket = "2KB"'))
    came: list[list[Record]] = []
    for number, night in enumerate(nights(rng, 8)):
        came.append(night)
        land(tmp_path, f"{number}.jsonl", night)
        wanted = expected([record for of_night in came for record in of_night])
        table.append(host="local")
        assert seen(table, snapshot="latest") == wanted
        table.run(host="local")
        assert seen(table) == wanted
        if number == 4:
            table.compact(full=True)
            assert seen(table) == wanted
        if number == 6:
            table.restore(4, dry=False)
            table.run(host="local")
            came = came[:5]
            assert seen(table) == expected([record for of_night in came for record in of_night])
    lived = [row for row in seen(table) if row[3] is None]
    alive = table.to_arrow().read_all().to_pylist()
    assert sorted((row["id"], row["v"]) for row in alive) == [row[:2] for row in lived]
    assert not table.reconcile(deep=True).unbalanced
    before = seen(table)
    table.reprocess(source="landing", host="local")
    assert seen(table) == before
    table.vacuum(dry=False)
    table.vacuum(dry=False)
    assert seen(table) == before


@pytest.mark.long
def test_history_files_are_folded(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number in range(40):
        land(
            tmp_path,
            f"{number}.jsonl",
            [{"id": f"{key}", "version": number, "op": None, "v": number} for key in range(50)],
        )
        table.run(host="local")
    files = list(table.view().history("day=2020-01-01"))
    assert len(files) < 20, [file.rows for file in files]
    assert sum(file.rows for file in files) == 39 * 50
    assert len(seen(table)) == 40 * 50


@pytest.mark.long
def test_fold_and_split_leave_each_row_there_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(16):
        records = [
            {"id": f"{key}", "version": number, "op": None, "note": rng.randbytes(20).hex()} for key in range(600)
        ]
        land(tmp_path, f"{number}.jsonl", records)
        bucket = "256MiB" if number < 4 else "8KB"
        opened(tmp_path, SETTINGS.replace("history", f'bucket = "{bucket}"\nhistory')).run(host="local")
    table = opened(tmp_path)
    files = list(table.view().history("day=2020-01-01"))
    buckets = len({(file.file.bucket, file.file.bits) for file in files})
    assert 2 < buckets < 9
    assert len(files) < 8 * buckets, "they are not folded"
    assert sum(file.rows for file in files) == 15 * 600
    table.compact(full=True)
    assert table.to_arrow(history=True).read_all().num_rows == 16 * 600


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_any_call_of_a_night_leaves_the_history_whole(tmp_path: Path, fault: Fault) -> None:
    lake = Lake(tmp_path / "lake", history=True, strategy="delta")
    for number in range(2):
        lake.land(f"{number}.jsonl", [row("a", 0, 10 * number), row("b", 1, 10 * number)])
        lake.run()
    lake.land("2.jsonl", [row("a", 0, 5, 7), row("a", 0, 20, op="D"), row("b", 1, 30), row("c", 1, 1)])

    def check(struck: Lake) -> None:
        struck.finish_and_check()
        found = struck.table.to_arrow(history=True).read_all().to_pylist()
        seconds = [
            (r["k"], *(t and (t - datetime(2020, 1, 1)).seconds for t in (r["valid_from"], r["valid_to"])))
            for r in found
        ]
        a, b, c = (
            [("a", 10, 20), ("a", 5, 10), ("a", 0, 5)],
            [("b", 30, None), ("b", 10, 30), ("b", 0, 10)],
            [("c", 1, None)],
        )
        assert seconds == [*a, *b, *c]

    assert lake.strike_every_call(fault, lambda struck: struck.run(), check) > 10


def test_vacuum_leaves_what_the_history_needs(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS.replace("history", 'superseded_retention = "0s"\nkeep_snapshots = 1\nhistory'))
    for number in range(10):
        land(tmp_path, f"{number}.jsonl", [{"id": "a", "version": number, "op": None, "v": number}])
        table.run(host="local")  # and vacuums
        assert len(seen(table)) == number + 1
    there = list((tmp_path / "processed").rglob("*.history"))
    assert len(there) == len(list(table.view().history("day=2020-01-01"))) < 10


def test_worker_that_comes_second_with_a_unit_deletes_nothing_of_the_history(tmp_path: Path) -> None:
    table = opened(tmp_path)
    land(tmp_path, "1.jsonl", [{"id": "a", "version": 1, "op": None}])
    table.run(host="local")
    for number in (2, 3):
        land(tmp_path, f"{number}.jsonl", [{"id": "a", "version": number, "op": None}])
        table.append(host="local")
        steps = OpenTable(table.name, table.settings)
        head = steps.history.objects.partition("day=2020-01-01").head()
        assert head is not None
        state = state_at(steps.history, "day=2020-01-01", head, head.body.merged, head.body.merged + 1)
        step = step_of(steps.history, steps.settings, state)
        first, second = (
            ArrowEngine().merge(steps.resources.store, step.spec, step.spec_version, step.tasks)[0] for _ in range(2)
        )
        units = UnitResults(steps.resources, steps.history, step)
        units.put(0, first)
        units.put(0, second)
        assert all(steps.resources.store.head(name) for name in first.objects)
        assert not any(steps.resources.store.head(file.name) for file in second.history if file not in first.history)
        table.run(host="local")
    assert [row["valid_to"] for row in table.to_arrow(history=True).read_all().to_pylist()] == [None, 3, 2]


def by_readers(table: Table, spark: Any) -> list[tuple[Any, ...]]:
    """What readers of the history see, whom Spark agrees with."""
    schema = table.to_arrow(history=True).schema
    rows = collect(table.to_spark(spark, history=True)).cast(schema).to_pylist()
    found = sorted(((row["id"], row["v"], row["valid_from"], row["valid_to"]) for row in rows), key=str)
    assert found == seen(table)
    return found


def test_row_that_lives_by_an_extract_is_there_whatever_was_deleted(tmp_path: Path, spark: Any) -> None:
    """Above it, and with its own order, lie deletes that the table has forgotten."""
    table = opened(tmp_path, SETTINGS.replace("history", 'tombstone_retention = "0s"\nties = "content"\nhistory'))
    dead = [{"id": "a", "version": 9, "op": "D", "v": 0}, {"id": "b", "version": 5, "op": "D", "v": 0}]
    for number, came in enumerate((dead, [{"id": "c", "version": 1, "op": None, "v": 0}])):
        land(tmp_path, f"{number}.jsonl", came)
        table.run(host="local")
    rows = [{"id": key, "version": 5, "op": None, "v": 1} for key in "abc"]
    land(tmp_path, "2.jsonl", rows)
    table.run(host="local", full="table")
    alive = [("a", 1, 5, None), ("b", 1, 5, None), ("c", 1, 5, None)]
    assert by_readers(table, spark) == [*alive[:2], ("c", 0, 1, 5), alive[2]]
    assert [row["id"] for row in table.to_arrow().read_all().to_pylist()] == ["a", "b", "c"]


@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.long
def test_history_made_anew_of_landing_with_extracts_is_the_same(tmp_path: Path, engine: Any, request: Any) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    table = opened(tmp_path)
    nights_of: list[tuple[list[tuple[str, int, int, str | None]], bool]] = [
        ([("a", 1, 1, None), ("b", 1, 1, None), ("c", 5, 1, None), ("d", 1, 0, "D"), ("e", 2, 1, None)], False),
        ([("a", 1, 2, None), ("b", 9, 2, None), ("c", 9, 2, None), ("e", 3, 2, None)], False),
        ([("a", 1, 3, None)], False),
        ([("z", 5, 1, None)], True),
        ([("d", 1, 1, None), ("d", 6, 2, None), ("e", 8, 3, None)], False),
        ([("z", 7, 2, None), ("d", 6, 2, None)], True),
    ]
    for number, (records, full) in enumerate(nights_of):
        rows = [{"id": key, "version": version, "v": v, "op": op} for key, version, v, op in records]
        land(tmp_path, f"{number}.jsonl", rows)
        table.run(host="local", engine=engine, full="table" if full else None, may_shrink=True)
    before = seen(table)
    assert before == [
        ("a", 3, 1, 5),
        ("b", 1, 1, 9),
        ("b", 2, 9, None),
        ("c", 1, 5, 9),
        ("c", 2, 9, None),
        ("d", 1, 1, 5),
        ("d", 2, 6, None),
        ("e", 1, 2, 3),
        ("e", 2, 3, 5),
        ("e", 3, 8, None),
        ("z", 1, 5, 7),
        ("z", 2, 7, None),
    ]
    table.reprocess(source="landing", host="local", engine=engine)
    assert seen(table) == before


def test_forgotten_deletes_are_put_there_once(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS.replace("history", 'tombstone_retention = "30d"\nhistory'))
    for number in range(4):
        rows = [{"id": f"{key}", "version": 1, "op": "D", "v": 0} for key in range(100)] if not number else []
        land(tmp_path, f"{number}.jsonl", [*rows, {"id": "x", "version": number, "op": None, "v": number}])
        table.run(host="local")
    table.reprocess(host="local")
    assert sum(file.rows for file in table.view().history("day=2020-01-01")) == 100 + 3


def test_filters_never_move_the_end_of_a_version(tmp_path: Path) -> None:
    table = opened(tmp_path)
    prices = [("a", 1, 10), ("a", 2, 20), ("a", 3, 10), ("b", 1, 10)]
    land(tmp_path, "1.jsonl", [{"id": key, "version": n, "op": None, "v": v} for key, n, v in prices])
    table.run(host="local")
    assert seen(table, where="v = 10") == [("a", 10, 1, 2), ("a", 10, 3, None), ("b", 10, 1, None)]
    assert seen(table, where="valid_from <= 2 and (valid_to > 2 or valid_to is null)") == [
        ("a", 20, 2, 3),
        ("b", 10, 1, None),
    ]
    assert seen(table, where="id = 'a' and day = date '2020-01-01' and v = 20") == [("a", 20, 2, 3)]
    assert seen(table, where="day > '2020-01-01'") == []
    with pytest.raises(ConfigurationError, match="nothing"):
        seen(table, where="nothing = 1")


def test_exported_history_is_plain_parquet(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number in range(3):
        land(tmp_path, f"{number}.jsonl", [{"id": "a", "version": number, "op": None, "v": number}])
        table.run(host="local")
    config = ["--config", str(tmp_path / "processed.toml")]
    done = CliRunner().invoke(main, ["export", "--history", "--output", f"{tmp_path}/out/", *config])
    assert done.exit_code == 0, done.output
    assert "3 rows to" in done.output
    query = f"SELECT v, valid_from, valid_to, CAST(day AS VARCHAR) FROM read_parquet('{tmp_path}/out/*/*.parquet') ORDER BY v"
    day = "2020-01-01"
    assert duckdb.sql(query).fetchall() == [(0, 0, 1, day), (1, 1, 2, day), (2, 2, None, day)]
    lines = tmp_path / "out.jsonl"
    table.export(lines, history=True, where="valid_to = 2")
    assert [json.loads(line)["v"] for line in lines.read_text().splitlines()] == [1]


def test_renamed_columns_are_so_in_the_history_too(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number in range(2):
        land(tmp_path, f"{number}.jsonl", [{"id": "a", "version": number, "op": None, "v": number}])
        table.run(host="local")
    table.rename_column("v", "price")
    land(tmp_path, "2.jsonl", [{"id": "a", "version": 2, "op": None, "price": 2, "v": 7}])
    table.run(host="local")
    rows = table.to_arrow(history=True).read_all().to_pylist()
    assert [(row["price"], row["v"], row["valid_to"]) for row in rows] == [(2, 7, None), (1, None, 2), (0, None, 1)]


def test_history_begins_with_what_was_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "processed" / "day=2020-01-01"
    folder.mkdir(parents=True)
    rows = [{"id": "a", "version": 1, "v": 1}, {"id": "a", "version": 2, "v": 2}, {"id": "b", "version": 1, "v": 3}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "one.parquet")
    table = opened(tmp_path, SETTINGS.partition("[tables")[0])
    table.adopt()
    land(tmp_path, "1.jsonl", [{"id": "b", "version": 2, "v": 4}])
    table.run(host="local")
    assert seen(table) == [("a", 1, 1, 2), ("a", 2, 2, None), ("b", 3, 1, 2), ("b", 4, 2, None)]


@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.long
def test_what_a_full_extract_lacks_ends_at_its_order(tmp_path: Path, engine: Any, request: Any) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    table = opened(tmp_path)
    land(
        tmp_path,
        "1.jsonl",
        [{"id": key, "version": n, "op": None, "v": n} for key, n in (("a", 1), ("a", 2), ("b", 3))],
    )
    table.run(host="local", engine=engine)
    land(tmp_path, "2.jsonl", [{"id": "b", "version": 5, "op": None, "v": 5}])
    table.run(host="local", engine=engine, full="table", may_shrink=True)
    assert seen(table) == [("a", 1, 1, 2), ("a", 2, 2, 5), ("b", 3, 3, 5), ("b", 5, 5, None)]
    land(tmp_path, "3.jsonl", [{"id": "b", "version": 7, "op": None, "v": 7}])
    table.run(host="local", engine=engine, full="table", may_shrink=True)
    land(tmp_path, "4.jsonl", [{"id": "a", "version": 9, "op": None, "v": 9}])
    table.run(host="local", engine=engine)
    wanted = [("a", 1, 1, 2), ("a", 2, 2, 5), ("a", 9, 9, None), ("b", 3, 3, 5), ("b", 5, 5, 7), ("b", 7, 7, None)]
    assert seen(table) == wanted
    table.reprocess(source="landing", host="local", engine=engine)  # both extracts in one merge
    assert seen(table) == wanted


@pytest.mark.long
def test_spark_reads_the_same_history(tmp_path: Path, spark: Any) -> None:
    table = opened(tmp_path)
    for number, night in enumerate(nights(random.Random(1), 5)):
        land(tmp_path, f"{number}.jsonl", night)
        table.run(host="local")
    for where in (None, "id = '3'", "v < 50", "valid_from < 500 and (valid_to >= 500 or valid_to is null)"):
        found = table.to_spark(spark, where=where, history=True)
        expected = table.to_arrow(where=where, history=True).read_all()
        assert found.columns == expected.schema.names
        assert sorted(map(str, collect(found).cast(expected.schema).to_pylist())) == sorted(
            map(str, expected.to_pylist())
        )


def test_table_without_a_history_says_so(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS.replace("history = true\n", ""))
    land(tmp_path, "1.jsonl", [{"id": "a", "version": 1, "op": None}])
    table.run(host="local")
    with pytest.raises(ConfigurationError, match="keeps no history"):
        table.to_arrow(history=True)
    with pytest.raises(ConfigurationError, match="history"):  # it is fixed
        opened(tmp_path).run(host="local")


def test_column_that_a_history_has_itself_is_refused_to_its_readers(tmp_path: Path) -> None:
    table = opened(tmp_path)
    land(tmp_path, "1.jsonl", [{"id": "a", "version": 1, "op": None, "Valid_To": 5}])
    table.run(host="local")
    with pytest.raises(ConfigurationError, match="schema rename Valid_To"):
        table.to_arrow(history=True)
    table.rename_column("Valid_To", "until")
    table.run(host="local")
    assert table.to_arrow(history=True).read_all().to_pylist()[0]["until"] == 5


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ('mode = "columns"', "mode"),
        ('key_scope = "table"', "key_scope"),
        ('order_by = ["version asc"]', "begins with"),
    ],
)
def test_what_a_history_can_not_be_beside_is_refused(tmp_path: Path, setting: str, error: str) -> None:
    name = setting.partition(" ")[0]
    lines = [line for line in SETTINGS.splitlines() if not line.startswith(name)]
    land(tmp_path, "1.jsonl", [{"id": "a", "version": 1, "op": None}])
    with pytest.raises(ConfigurationError, match=error):
        opened(tmp_path, "\n".join([setting, *lines])).run(host="local")
