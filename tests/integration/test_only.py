"""`[read] only`: of several tables in one folder, the rows of this one. Others are skipped and counted."""

import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.config import load
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.operations.init.propose import propose

OTHER = "row of another table"
Rows = list[dict[str, Any]]
ROWS: Rows = [
    {"id": 1, "day": "2024-01-01", "at": 1, "amount": "10", "kind": "orders"},
    {"id": 1, "day": "2024-01-01", "at": 9, "amount": "Ann", "kind": "customers"},
    {"id": 2, "day": "2024-01-01", "at": 1, "amount": "20", "kind": "orders"},
    {"id": 3, "day": "none", "at": 1, "amount": "", "kind": "customers"},
]


def configure(root: Path, only: str, more: str = "", read: str = "") -> Table:
    (root / "landing").mkdir(exist_ok=True)
    (root / "lakeupsert.toml").write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
        f'order_by = ["at"]\n{more}[tables.t.read]\nonly = {only}\n{read}'
    )
    return Table.open(root / "lakeupsert.toml")


def land(path: Path, rows: Rows) -> None:
    names = list(rows[0])
    if path.suffix == ".csv":
        path.write_text("\n".join(",".join(map(str, line)) for line in [names, *(r.values() for r in rows)]) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".orc":
        pa.orc.write_table(pa.Table.from_pylist(rows), path)
    else:
        types = {str: "string", int: "long"}
        fields = [{"name": name, "type": types[type(rows[0][name])]} for name in names]
        with path.open("wb") as out:
            fastavro.writer(out, fastavro.parse_schema({"type": "record", "name": "r", "fields": fields}), rows)


def stored(table: Table) -> dict[str, str]:
    assert not table.reconcile(deep=True).unbalanced
    return {str(row["id"]): str(row["amount"]) for row in table.to_arrow().read_all().to_pylist()}


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "orc", "avro"])
def test_rows_of_other_tables_are_skipped_and_counted_in_every_format(tmp_path: Path, ending: str) -> None:
    table = configure(tmp_path, '{ Kind = "orders" }')
    land(tmp_path / f"landing/1.{ending}", ROWS)
    entry = table.run().append.entry
    assert (entry.skipped, entry.rows_read, entry.quarantined) == ({OTHER: 2}, 2, {})
    assert stored(table) == {"1": "10", "2": "20"}
    assert table.status().skipped == {OTHER: 2}
    if ending in ("csv", "jsonl"):  # a type comes from the table's own rows
        amount = table.to_arrow().read_all().schema.field("amount").type
        assert amount == (pa.int64() if ending == "csv" else pa.string())


@pytest.mark.spark
def test_the_host_spark_agrees(tmp_path: Path) -> None:
    table = configure(tmp_path, '{ kind = "orders" }')
    land(tmp_path / "landing/1.jsonl", ROWS)
    assert table.run(host="spark", engine="spark").append.entry.skipped == {OTHER: 2}
    assert stored(table) == {"1": "10", "2": "20"}


@pytest.mark.parametrize(
    ("only", "value"),
    [
        ("{ kind = 2 }", 2),
        ("{ kind = true }", True),
        ('{ kind = ["7", "2.50"] }', 2.5),
        ('{ kind = "a", at = 1 }', "a"),
    ],
)
def test_a_value_is_compared_as_text_and_several_columns_all_count(tmp_path: Path, only: str, value: Any) -> None:
    table = configure(tmp_path, only)
    rows = [{**ROWS[0], "kind": value}, {**ROWS[1], "kind": value if only.endswith("1 }") else "x"}]
    text = "".join(json.dumps(row).replace("2.5", "2.50") + "\n" for row in rows)
    (tmp_path / "landing/1.jsonl").write_text(text)
    assert table.run().append.entry.skipped == {OTHER: 1}
    assert stored(table) == {"1": "10"}


def test_columns_of_other_tables_are_not_this_tables(tmp_path: Path) -> None:
    table = configure(tmp_path, '{ source = "orders" }', read='aliases = { kind = "source" }\n')
    land(tmp_path / "landing/1.jsonl", [ROWS[0], {**ROWS[1], "city": "Rome"}])
    table.run()
    assert {*table.to_arrow().read_all().schema.names} == {"id", "day", "at", "amount", "source"}
    land(tmp_path / "landing/2.jsonl", [{**ROWS[1], "street": 1}])  # no row of the table
    entry = table.run().append.entry
    assert (entry.skipped, entry.rows_read) == ({OTHER: 1}, 0)
    assert stored(table) == {"1": "10"}


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "avro"])
def test_a_column_that_no_file_has_is_an_error(tmp_path: Path, ending: str) -> None:
    table = configure(tmp_path, '{ knid = "orders" }')
    land(tmp_path / f"landing/1.{ending}", ROWS)
    with pytest.raises((RefusedError, ConfigurationError), match="knid"):
        table.run()


def test_a_row_that_does_not_say_its_table_goes_to_quarantine(tmp_path: Path) -> None:
    table = configure(tmp_path, '{ kind = "orders" }', 'quarantine_limit = "100%"\n')
    land(tmp_path / "landing/1.jsonl", [ROWS[0], ROWS[1], {**ROWS[2], "kind": None}, {"id": 4}])
    entry = table.run().append.entry
    assert (entry.skipped, entry.quarantined, entry.rows_read) == ({OTHER: 1}, {"malformed": 2}, 3)
    assert stored(table) == {"1": "10"}


def test_a_value_that_no_row_has_is_a_warning(tmp_path: Path) -> None:
    table = configure(tmp_path, '{ kind = "orders" }')
    land(tmp_path / "landing/1.jsonl", ROWS)
    table.run()
    land(tmp_path / "landing/2.jsonl", [ROWS[1]])
    assert any("only" in warning for warning in table.run().append.warnings)


def test_a_truncate_of_another_table_refuses_nothing(tmp_path: Path) -> None:
    read = 'envelope = "debezium"\n'
    table = configure(tmp_path, '{ __source_table = "orders" }', read=read)
    events = [
        {"op": "c", "before": None, "after": ROWS[0], "source": {"table": "orders"}, "ts_ms": 1},
        {"op": "c", "before": None, "after": ROWS[1], "source": {"table": "customers"}, "ts_ms": 1},
        {"op": "t", "source": {"table": "customers"}, "ts_ms": 2},
        {"ts_ms": 3},
    ]
    (tmp_path / "landing/1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert table.run().append.entry.skipped == {"heartbeat": 1, OTHER: 2}
    assert stored(table) == {"1": "10"}
    events[2]["source"]["table"] = "orders"
    (tmp_path / "landing/2.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(RefusedError) as e:
        table.run()
    assert e.value.code == "truncated-source"


@pytest.mark.parametrize(
    "only", ['{ "" = "a" }', "{ kind = [] }", '{ kind = "" }', '{ kind = "a", Kind = "b" }', '"a"']
)
def test_settings_that_say_nothing_are_refused(tmp_path: Path, only: str) -> None:
    with pytest.raises(ConfigurationError, match="only"):
        load(str(configure(tmp_path, only)))


def test_init_finds_several_tables(tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    tables = ["orders", "customers", "orders"]
    events = [
        {"op": "c", "before": None, "after": r, "source": {"table": t}} for r, t in zip(ROWS, tables, strict=False)
    ]
    (tmp_path / "landing/1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = propose(str(tmp_path / "landing"))
    assert found.read["only"].value == {"__source_table": "orders"}
    assert found.rows == 2
    assert any("customers" in warning for warning in found.warnings)
