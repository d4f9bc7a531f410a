"""Tables in mode columns: random nights through every step, and what is told about them and refused."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline import strategy

SETTINGS = 'key = ["id"]\npartition_by = ["day"]\norder_by = ["version"]\nmode = "columns"\n'
DELETE = '[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n'
COLUMNS = ("a", "b", "c")


def opened(root: Path, settings: str = SETTINGS + DELETE, processed: str = "processed") -> Table:
    file = root / f"{processed}.toml"
    file.write_text(f'[tables.t]\nlanding = "landing"\nprocessed = "{processed}"\n{settings}')
    (root / "landing").mkdir(exist_ok=True)
    return Table.open(file)


def land(root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    file = root / "landing" / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps({"day": "2020-01-01", **row}) + "\n" for row in rows))


def rows_of(table: Table, snapshot: Any = "published") -> list[dict[str, Any]]:
    rows = table.to_arrow(snapshot).read_all().to_pylist()
    return sorted(({**row, "day": str(row["day"])} for row in rows), key=lambda row: (row["day"], row["id"]))


def expected(records: list[dict[str, Any]], columns: tuple[str, ...] = COLUMNS) -> list[dict[str, Any]]:
    """No two records of a key have one version."""
    rows = []
    for day, id_ in sorted({(r["day"], r["id"]) for r in records}):
        of_key = sorted((r for r in records if (r["day"], r["id"]) == (day, id_)), key=lambda r: r["version"])
        row: dict[str, Any] | None = None
        for record in of_key:
            row = None if record.get("op") == "D" else {**dict.fromkeys(columns), **(row or {}), **record}
        if row is not None:
            rows.append({name: row[name] for name in ("id", "day", "version", *columns)})
    return rows


def nights(rng: random.Random, keys: int, count: int) -> list[list[dict[str, Any]]]:
    versions = {key: rng.sample(range(1000), 40) for key in range(keys)}
    found = []
    for _ in range(count):
        night = []
        for key in rng.sample(range(keys), keys // 3):
            record = {"id": f"k{key:04}", "day": f"2020-01-0{1 + key % 2}", "version": versions[key].pop()}
            if rng.random() < 0.15:
                record["op"] = "D"
            else:
                record |= {name: rng.choice([None, rng.randrange(99)]) for name in COLUMNS if rng.random() < 0.4}
            night.append(record)
        found.append(night)
    return found


@pytest.mark.long
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("chosen", ["delta", *(pytest.param(c, marks=pytest.mark.long) for c in ("rewrite", "auto"))])
def test_nights_in_any_order_through_every_step(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(chosen)
    monkeypatch.setattr(strategy, "TOGETHER", 2)
    settings = f'{SETTINGS}strategy = "{chosen}"\nbucket = "6kB"\n{DELETE}'
    types = "".join(f'{name} = "bigint"\n' for name in COLUMNS)
    table = opened(tmp_path, f"{settings}[tables.t.schema]\n{types}")
    came: list[dict[str, Any]] = []
    for number, night in enumerate(nights(rng, 90, 9)):
        land(tmp_path, f"{number}.jsonl", night)
        came += night
        if number % 3 == 1:
            table.append(host="local")
            assert rows_of(table, "latest") == expected(came)
            continue
        table.run(host="local")
        assert rows_of(table) == expected(came)
        if number == 2:
            before, at = list(came), table.snapshots()[0].number
        if number == 5:
            table.compact()
            table.publish()
            assert rows_of(table) == expected(came)
    checked = table.reconcile(deep=True)
    assert not checked.unbalanced
    assert 2 < len({(f.partition, f.file.bucket, f.file.bits) for f in table.files()}) < 128
    table.restore(at, dry=False)
    table.run(host="local")
    assert rows_of(table) == expected(before)
    table.append(host="local", again=True)
    table.run(host="local")
    assert rows_of(table) == expected(came)
    assert not table.reconcile(deep=True).unbalanced
    table.reprocess(source="landing", host="local")
    assert rows_of(table) == expected(came)


@pytest.mark.parametrize("versions", [False, True])
def test_partitions_that_are_merged_together_keep_their_own_columns(versions: bool, tmp_path: Path) -> None:
    types = "".join(f'{name} = "bigint"\n' for name in COLUMNS)
    more = f'strategy = "delta"\nversions = {str(versions).lower()}\n{DELETE}[tables.t.schema]\n{types}'
    table = opened(tmp_path, SETTINGS + more)
    came: list[dict[str, Any]] = []
    for number, night in enumerate(nights(random.Random(1), 60, 3)):
        land(tmp_path, f"{number}.jsonl", night)
        came += night
        table.append(host="local")
        results = table.dedupe()
        assert [result.strategy for result in results] == 2 * ["delta" if number else "rewrite"]
        table.publish()
        assert rows_of(table) == expected(came)
    assert not table.reconcile(deep=True).unbalanced


def test_adopted_rows_have_the_columns_of_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "processed" / "day=2020-01-01"
    folder.mkdir(parents=True)
    adopted = [{"id": "k1", "version": 5, "a": 1}, {"id": "k2", "version": 5, "a": 2}]
    pq.write_table(pa.Table.from_pylist(adopted), folder / "x.parquet")
    pq.write_table(pa.Table.from_pylist([{"id": "k3", "version": 5, "a": 3, "b": None}]), folder / "y.parquet")
    types = '[tables.t.schema]\nb = "bigint"\n'
    table = opened(tmp_path, SETTINGS + types)
    table.adopt()
    late = [{"id": f"k{n}", "day": "2020-01-01", "version": 4, "b": 7, "a": 9} for n in (1, 2, 3)]
    land(tmp_path, "late.jsonl", late)
    table.run(host="local")
    assert [(row["a"], row["b"], row["version"]) for row in rows_of(table)] == [(1, 7, 5), (2, 7, 5), (3, None, 5)]
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_adopted_nulls_that_are_none(chosen: str, tmp_path: Path) -> None:
    folder = tmp_path / "processed" / "day=2020-01-01"
    folder.mkdir(parents=True)
    types = pa.schema([("id", pa.string()), ("version", pa.int64()), ("a", pa.int64())])
    pq.write_table(pa.Table.from_pylist([{"id": "k", "version": 5, "a": None}], types), folder / "x.parquet")
    table = opened(tmp_path, f'{SETTINGS}nulls = "keep"\nstrategy = "{chosen}"\n')
    table.adopt()
    land(tmp_path, "late.jsonl", [{"id": "k", "version": 4, "a": 9}])
    table.run(host="local")
    assert rows_of(table)[0]["a"] == 9
    assert not table.reconcile(deep=True).unbalanced
    [found] = table.explain({"id": "k"}).partitions
    assert ("in part", ("a",)) in [(v.outcome, v.columns) for v in found.versions]


def test_a_delete_holds_for_columns_that_come_later(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number, record in enumerate(
        [
            {"id": "k", "version": 1, "a": 1},
            {"id": "k", "version": 5, "op": "D"},
            {"id": "k", "version": 7, "a": 7},
            {"id": "k", "version": 4, "new": 4},
            {"id": "k", "version": 6, "newer": 6},
        ]
    ):
        land(tmp_path, f"{number}.jsonl", [record])
        table.run(host="local")
    [row] = rows_of(table)
    assert (row["version"], row["a"], row["new"], row["newer"]) == (7, 7, None, 6)


@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_between_equal_orders_the_later_record_wins_for_good(chosen: str, tmp_path: Path) -> None:
    """Which of a delete and a record of the same order came later is known of stored rows, too."""
    table = opened(tmp_path, f'{SETTINGS}strategy = "{chosen}"\n{DELETE}')
    for number, record in enumerate(
        [
            {"version": 1, "a": 1, "b": 1, "c": 1},
            {"version": 5, "op": "D"},
            {"version": 5, "a": 5},
            {"version": 4, "b": 4},
            {"version": 7, "b": 7},
            {"version": 6, "c": 6},
        ]
    ):
        land(tmp_path, f"{number}.jsonl", [{"id": "k", **record}])
        table.run(host="local")
    [row] = rows_of(table)
    assert (row["version"], row["a"], row["b"], row["c"]) == (7, 5, 7, 6)


@pytest.mark.parametrize("host", ["local", "spark"])
def test_no_version_of_a_key_is_left_out_of_its_batch(host: Any, tmp_path: Path, request: Any) -> None:
    if host == "spark":
        request.getfixturevalue("spark")
    table = opened(tmp_path)
    rng = random.Random(0)
    records = [
        {"id": f"k{key}", "day": "2020-01-01", "version": version, rng.choice(COLUMNS): version}
        for key in range(5)
        for version in rng.sample(range(1000), 50)
    ]
    land(tmp_path, "0.jsonl", records)
    table.run(host=host)
    assert rows_of(table) == expected(records)


def test_rows_out_of_quarantine_bring_what_they_brought(tmp_path: Path) -> None:
    settings = SETTINGS + "quarantine_limit = 1\n"
    table = opened(tmp_path, settings + '[tables.t.schema]\na = "int"\nb = "bigint"\n')
    land(tmp_path, "1.jsonl", [{"id": "k", "version": 1, "a": 1, "b": 1}])
    table.run(host="local")
    land(tmp_path, "2.jsonl", [{"id": "k", "version": 2, "a": 5_000_000_000}])
    table.run(host="local")
    assert rows_of(table)[0]["version"] == 1
    table = opened(tmp_path, settings + '[tables.t.schema]\na = "bigint"\nb = "bigint"\n')
    table.append(host="local", replay_quarantine=True)
    table.run(host="local")
    [row] = rows_of(table)
    assert (row["version"], row["a"], row["b"]) == (2, 5_000_000_000, 1)


def test_parquet_brings_the_columns_of_its_schema(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS)
    whole = {"id": "k", "day": "2020-01-01", "version": 1, "a": 1, "b": {"x": 1}}
    land(tmp_path, "1.parquet", [whole])
    land(tmp_path, "2.parquet", [{"id": "k", "day": "2020-01-01", "version": 3, "b": None}])
    land(tmp_path, "3.parquet", [{"id": "k", "day": "2020-01-01", "version": 2, "a": 2, "b": {"x": 2}}])
    table.run(host="local")
    [row] = rows_of(table)
    assert (row["version"], row["a"], row["b"]) == (3, 2, None)


@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
@pytest.mark.long
def test_spark_reads_the_tables_own_columns(chosen: str, tmp_path: Path, spark: Any) -> None:
    table = opened(tmp_path, f'{SETTINGS}strategy = "{chosen}"\n')
    for number, night in enumerate(nights(random.Random(0), 30, 3)):
        land(
            tmp_path, f"{number}.jsonl", [{name: value for name, value in row.items() if name != "op"} for row in night]
        )
        table.run(host="spark" if number else "local")
    seen = table.to_spark(spark)
    assert seen.columns == table.to_arrow().schema.names
    rows = [{**row.asDict(), "day": str(row["day"])} for row in seen.collect()]
    assert sorted(rows, key=lambda row: (row["day"], row["id"])) == rows_of(table)


def test_explain_leaves_out_what_was_withdrawn(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS + '[tables.t.schema]\nc = "bigint"\n')
    for number, record in enumerate([{"version": 1, "a": 1}, {"version": 2, "a": 2}, {"version": 0, "c": 5}]):
        land(tmp_path, f"{number}.jsonl", [{"id": "k", **record}])
        table.run(host="local")
    table.restore(1, dry=False)
    table.run(host="local")
    [found] = table.explain({"id": "k"}).partitions
    assert found.shown is not None
    assert found.shown["c"] is None
    assert "in part" not in [v.outcome for v in found.versions]


def test_explain_tells_the_orders_of_groups(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS + GROUP)
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1}, {"id": "k", "at": 3, "a": 3}, {"id": "k", "at": 2, "a": 2}])
    table.run(host="local")
    [found] = table.explain({"id": "k"}).partitions
    assert [(v.order, v.outcome) for v in found.versions if v.source == "appended"] == [
        ({"version": 1, "at": None}, "shown"),
        ({"version": None, "at": 2}, "superseded"),
        ({"version": None, "at": 3}, "in part"),
    ]


def test_explain_tells_which_columns_a_record_gave(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for number, record in enumerate([{"version": 1, "a": 1, "b": 1}, {"version": 5, "a": 5}, {"version": 3, "b": 3}]):
        land(tmp_path, f"{number}.jsonl", [{"id": "k", **record}])
        table.run(host="local")
    [found] = table.explain({"id": "k"}).partitions
    told = [(v.batch, v.source, v.outcome, v.columns) for v in found.versions]
    assert told == [
        (2, "appended", "shown", ("version", "a")),
        (2, "base", "shown", None),
        (3, "appended", "in part", ("b",)),
        (1, "appended", "superseded", None),
    ]
    assert found.shown == {"id": "k", "day": "2020-01-01", "version": 5, "a": 5, "b": 3}


GROUP = '[tables.t.groups.g]\norder_by = ["at"]\ncolumns = ["a"]\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SETTINGS + 'ties = "content"\n', "ties is 'content'; .*mode"),
        (SETTINGS + 'tombstone_retention = "1d"\n', "tombstone_retention is '1d'; .*mode"),
        (SETTINGS.replace("columns", "rows") + 'nulls = "keep"\n', "nulls is 'keep'; .*mode"),
        (SETTINGS.replace("columns", "rows") + GROUP, r"groups is \['g'\]; .*mode"),
        (SETTINGS + GROUP + DELETE, r"groups is \['g'\]; .*\[tables\.NAME\.delete\]"),
        (SETTINGS + GROUP.replace("columns", "colums"), "Did you mean 'columns'"),
        (SETTINGS.replace('"columns"', '"column"'), "must be 'rows' or 'columns'"),
    ],
)
def test_settings_that_do_not_go_together(settings: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(tmp_path, settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (GROUP.replace('"a"', '"colour"'), "names the column 'colour', which no readable file has"),
        (GROUP.replace('"at"', '"version"'), "names 'version', which is a key, ordering or partition column"),
        (GROUP.replace('"at"', '"at nulls first"'), "`groups.g.order_by` has 'at nulls first'"),
        (GROUP + GROUP.replace("groups.g", "groups.h"), "names 'at', which is in `groups.g` already"),
        (GROUP.replace('"at"', '"list"'), "can't be in `groups.g.order_by`"),
    ],
)
def test_groups_of_columns_that_are_not_there(group: str, message: str, tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS + group)
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1, "at": 1, "a": 1, "list": [1]}])
    with pytest.raises(ConfigurationError, match=message):
        table.run(host="local")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SETTINGS.replace('"version"', '"version nulls first"'), "`order_by` has 'version nulls first'"),
        (SETTINGS.replace('["day"]', '["date(day) as d"]'), "'d' from 'day'"),
        (SETTINGS.replace('"version"', '"since"'), "`order_by` names the column 'since', which no readable"),
    ],
)
def test_groups_and_what_belongs_to_the_row(settings: str, message: str, tmp_path: Path) -> None:
    """The last one: where the first batch has none of the row's columns, arrival must not become their order."""
    table = opened(tmp_path, settings + GROUP + '[tables.t.schema]\nday = "date"\n')
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1, "at": 1, "a": 1}])
    with pytest.raises(ConfigurationError, match=message):
        table.run(host="local")


def test_values_of_a_group_without_its_order_go_to_quarantine(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS + GROUP)
    whole = {"id": "k", "version": 1, "b": 1, "at": 1, "a": 1}
    land(tmp_path, "0.jsonl", [whole])
    table.run(host="local")
    land(tmp_path, "1.jsonl", [{**whole, "version": 2, "b": 2}, {"id": "k", "version": 3, "b": 3, "a": 3}])
    assert (appended := table.run(host="local").append) is not None
    assert appended.entry.quarantined == {"order_missing": 1}
    assert [(row["a"], row["b"]) for row in rows_of(table)] == [(1, 2)]


def test_names_of_groups_may_have_spaces(tmp_path: Path) -> None:
    table = opened(
        tmp_path,
        SETTINGS + GROUP.replace('"at"', '"`seen at` desc"') + GROUP.replace(".g]", ".h]").replace('"a"', '"b"'),
    )
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1, "seen at": 1, "a": 1, "at": 1, "b": 1}])
    table.run(host="local")
    assert len(rows_of(table)) == 1


def test_groups_and_adopted_rows(tmp_path: Path) -> None:
    folder = tmp_path / "processed" / "day=2020-01-01"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"id": "k", "version": 5, "at": None, "a": 1}]), folder / "x.parquet")
    with pytest.raises(ConfigurationError, match="`groups`, but adopted rows do not show which"):
        opened(tmp_path, SETTINGS + GROUP).adopt()


def test_a_full_extract_is_refused(tmp_path: Path) -> None:
    table = opened(tmp_path)
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1}])
    with pytest.raises(ConfigurationError) as refused:
        table.append(host="local", full="table")
    assert refused.value.code == "full-extract-of-columns"


def test_the_mode_is_fixed(tmp_path: Path) -> None:
    table = opened(tmp_path)
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1}])
    table.run(host="local")
    for settings in (SETTINGS.replace('mode = "columns"', "") + DELETE, SETTINGS + 'nulls = "keep"\n' + DELETE):
        with pytest.raises(ConfigurationError) as refused:
            opened(tmp_path, settings).run(host="local")
        assert refused.value.code == "another-table"


def test_groups_are_told_apart_by_what_they_say(tmp_path: Path) -> None:
    table = opened(tmp_path, SETTINGS + GROUP)
    land(tmp_path, "0.jsonl", [{"id": "k", "version": 1, "at": 1, "a": 1}])
    table.run(host="local")
    opened(tmp_path, SETTINGS + GROUP).run(host="local")
    with pytest.raises(ConfigurationError, match="groups"):
        opened(tmp_path, SETTINGS + GROUP.replace('"at"', '"at asc"')).run(host="local")
