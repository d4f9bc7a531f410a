"""`[delete] not_null`: a record is a delete if a column has a value, as Singer and Airbyte write it."""

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.config import load
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init.propose import propose

GONE = "_sdc_deleted_at"
AT = datetime(2024, 1, 3, tzinfo=UTC)
Rows = list[dict[str, Any]]
FIRST: Rows = [{"id": i, "day": "2024-01-01", "version": 1, "note": f"n{i}", GONE: None} for i in (1, 2, 3)]
SECOND: Rows = [
    {"id": 2, "day": "2024-01-01", "version": 2, "note": None, GONE: AT.isoformat()},
    {"id": 3, "day": "2024-01-01", "version": 2, "note": "new", GONE: None},
]


def configure(root: Path, delete: str = f'not_null = "{GONE}"', more: str = "") -> Path:
    (root / "landing").mkdir(exist_ok=True)
    (root / "lakeupsert.toml").write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
        f'order_by = ["version"]\n{more}[tables.t.schema]\nid = "bigint"\nday = "date"\n[tables.t.delete]\n{delete}\n'
    )
    return root / "lakeupsert.toml"


def csv(rows: Rows) -> str:
    lines = [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
    return "\n".join([",".join(rows[0]), *lines]) + "\n"


def land(path: Path, rows: Rows) -> None:
    """The rows in the format of the file's ending; in typed formats the column has the type of a moment."""
    typed = pa.table(
        {
            "id": [row["id"] for row in rows],
            "day": [date.fromisoformat(row["day"]) for row in rows],
            "version": [row["version"] for row in rows],
            "note": pa.array([row["note"] for row in rows], pa.string()),
            GONE: pa.array([AT if row[GONE] else None for row in rows], pa.timestamp("us", "UTC")),
        }
    )
    if path.suffix == ".csv":
        path.write_text(csv(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(typed, path)
    elif path.suffix == ".orc":
        pa.orc.write_table(typed, path)
    else:
        names = {"id": "long", "day": "string", "version": "long", "note": ["null", "string"], GONE: ["null", "string"]}
        schema = {"type": "record", "name": "r", "fields": [{"name": n, "type": t} for n, t in names.items()]}
        with path.open("wb") as out:
            fastavro.writer(out, fastavro.parse_schema(schema), rows)


def stored(table: Table) -> dict[int, str | None]:
    checked = table.reconcile(deep=True)
    assert not checked.unbalanced
    return {row["id"]: row["note"] for row in table.to_arrow().read_all().to_pylist()}


@pytest.mark.few(2)
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "orc", "avro"])
@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_row_with_a_value_is_a_delete_in_every_format_and_mode(
    tmp_path: Path, ending: str, mode: str, keep: bool
) -> None:
    path = configure(tmp_path, f'not_null = "{GONE}"\nkeep = {str(keep).lower()}', f'mode = "{mode}"\n')
    land(tmp_path / f"landing/1.{ending}", FIRST)
    table = Table.open(path)
    table.run()
    land(tmp_path / f"landing/2.{ending}", SECOND)
    table.run()
    assert stored(table) == {1: "n1", 3: "new"}
    assert (GONE in table.to_arrow().read_all().schema.names) is keep or ending in ("parquet", "orc")


@pytest.mark.spark
def test_the_host_and_engine_spark_agree(tmp_path: Path) -> None:
    path = configure(tmp_path)
    land(tmp_path / "landing/1.parquet", FIRST)
    land(tmp_path / "landing/2.jsonl", SECOND)
    table = Table.open(path)
    table.run(host="spark", engine="spark")
    assert stored(table) == {1: "n1", 3: "new"}


def test_a_column_that_no_file_has_is_a_warning_and_its_name_may_differ_in_case(tmp_path: Path) -> None:
    path = configure(tmp_path)
    table = Table.open(path)
    without = [{name: v for name, v in row.items() if name != GONE} for row in FIRST]
    (tmp_path / "landing/1.csv").write_text(csv(without))
    assert any(GONE in warning for warning in table.run().append.warnings)
    (tmp_path / "landing/2.csv").write_text(csv(SECOND).replace(GONE, GONE.upper()))
    assert not any(GONE in warning for warning in table.run().append.warnings)
    assert stored(table) == {1: "n1", 3: "new"}


def test_a_nested_value_and_an_empty_text_of_json_are_values(tmp_path: Path) -> None:
    table = Table.open(configure(tmp_path))
    rows = [{**FIRST[0], GONE: {"at": 1}}, {**FIRST[1], GONE: ""}, FIRST[2]]
    land(tmp_path / "landing/1.jsonl", rows)
    table.run()
    assert stored(table) == {3: "n3"}


def test_deletes_by_the_key_wait_and_are_replayed_as_deletes(tmp_path: Path) -> None:
    more = 'key_scope = "table"\nunknown_deletes = "quarantine"\nquarantine_limit = "100%"\n'
    table = Table.open(configure(tmp_path, more=more))
    (tmp_path / "landing/1.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [FIRST[0], {"id": 2, "version": 2, GONE: AT.isoformat()}])
    )
    table.run()
    land(tmp_path / "landing/2.jsonl", FIRST[1:2])
    table.run()
    assert sorted(stored(table)) == [1, 2]
    table.append(replay_quarantine=True)
    table.run()
    assert sorted(stored(table)) == [1]


@pytest.mark.parametrize("other", ['column = "op"', 'values = ["D"]', 'upserts = ["U"]', 'file_prefix = "del"'])
def test_it_stands_in_place_of_the_other_settings(tmp_path: Path, other: str) -> None:
    path = configure(tmp_path, f'not_null = "{GONE}"\n{other}')
    with pytest.raises(ConfigurationError, match="not_null"):
        load(str(path))


def test_another_column_is_another_table(tmp_path: Path) -> None:
    land(tmp_path / "1.csv", FIRST)
    path = configure(tmp_path)
    (tmp_path / "1.csv").rename(tmp_path / "landing/1.csv")
    Table.open(path).run()
    configure(tmp_path, 'not_null = "other"')
    with pytest.raises(ConfigurationError) as e:
        Table.open(path).run()
    assert e.value.code == "another-table"


@pytest.mark.parametrize("name", [GONE, "_ab_cdc_deleted_at"])
def test_init_proposes_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "landing").mkdir()
    rows = [{name if n == GONE else n: v for n, v in row.items()} for row in FIRST]
    land_as = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "landing/1.jsonl").write_text(land_as)
    assert propose(str(tmp_path / "landing")).settings["delete"].value == {"not_null": name}
