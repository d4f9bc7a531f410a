"""Columns that come in another case, that grow inside, and that change their names: what readers see of old and new files."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from lakeupsert import Table
from lakeupsert.engine import blocks

FORMATS = ("csv", "jsonl", "parquet", "avro", "orc")
_AVRO = {str: "string", int: "long", float: "double"}


def in_format(kind: str, rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows of text and numbers."""
    out: Any = io.BytesIO()
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if kind == "avro":
        fields = [{"name": name, "type": _AVRO[type(value)]} for name, value in rows[0].items()]
        fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, rows)
    else:
        table = pa.Table.from_pylist(list(rows))
        (pq if kind == "parquet" else orc).write_table(table, out)
    return bytes(out.getvalue())


class Lake:
    """One table with the key `id`, the partition column `day` and the ordering column `version`."""

    def __init__(self, root: Path, more: str = "", **settings: Any) -> None:
        self.root = root
        (root / "landing").mkdir()
        given = {"key": ["id"], "partition_by": ["day"], "order_by": ["version"], "quarantine_limit": 100, **settings}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
        self.config = root / "lakeupsert.toml"
        self.config.write_text('[tables.t]\nlanding = "landing"\nprocessed = "processed"\n' + "".join(lines) + more)
        self.table = Table.open(self.config)

    def land(self, name: str, content: bytes | str | Any, **run: Any) -> Any:
        """A landing file, and the night that takes it; its ledger entry."""
        path = self.root / "landing" / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        appended = self.table.run(host="local", **run).append
        assert appended is not None
        return appended.entry

    def rows(self, *columns: str, **options: Any) -> list[Any]:
        """Of one column its values, of several tuples."""
        found = self.table.to_arrow(**options).read_all().select(columns).to_pylist()
        return [tuple(row.values()) if len(columns) > 1 else row[columns[0]] for row in found]

    def columns(self, **options: Any) -> list[str]:
        names: list[str] = self.table.to_arrow(**options).schema.names
        return names

    def prove(self) -> None:
        """The sums hold, DuckDB finds the same rows in what landed, and so does who makes them anew of it."""
        for source in ("stored", "landing"):
            checked = self.table.reconcile(deep=True)
            assert not checked.unbalanced
            assert not checked.gone
            before = self.table.to_arrow().read_all()
            self.table.reprocess(source=source, host="local")
            assert self.table.to_arrow().read_all().equals(before)


# ---------------------------------------------------------------- names in another case


@pytest.mark.parametrize("kind", FORMATS)
def test_column_in_another_case_is_the_tables(kind: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.csv", "id,day,version,price,note\na,2020-01-01,1,1.5,old\nb,2020-01-01,1,2.5,old\n")
    landed = in_format(kind, [{"ID": "a", "Day": "2020-01-01", "VERSION": 2, "Price": 3.5}])
    (tmp_path / "landing" / f"2.{kind}").write_bytes(landed)
    assert [p.partition for p in lake.table.plan().partitions] == ["day=2020-01-01"]
    entry = lake.land(f"2.{kind}", landed)
    assert not entry.quarantined
    assert lake.columns() == ["id", "day", "version", "price", "note"]
    assert lake.rows("id", "version", "price", "note") == [("a", 2, 3.5, None), ("b", 1, 2.5, "old")]
    lake.prove()


@pytest.mark.parametrize("kind", FORMATS)
def test_two_columns_of_a_file_that_differ_by_case_set_it_aside_alone(kind: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    good = {"id": "a", "day": "2020-01-01", "version": 1, "price": 1.5}
    (tmp_path / "landing" / f"1.{kind}").write_bytes(in_format(kind, [{**good, "Price": 2.5}]))
    entry = lake.land("2.csv", in_format("csv", [good]))
    assert entry.quarantined == {"unreadable_file": 1}
    assert lake.rows("id", "price") == [("a", 1.5)]
    file = tmp_path / "processed" / entry.quarantine[0].name
    assert "differ by case alone" in pq.read_table(file)["reason"][0].as_py()


def test_lines_of_json_that_differ_by_case_set_their_file_aside_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # a block for each line
    lake = Lake(tmp_path)
    lake.land("1.csv", "id,day,version,price\na,2020-01-01,1,1.5\n")
    line = '{"id": "b", "day": "2020-01-01", "version": 2, "%s": 2.5}\n'
    (tmp_path / "landing" / "2.jsonl").write_text(line % "price" + line % "Price")
    assert lake.land("3.jsonl", line % "PRICE").quarantined == {"unreadable_file": 1}
    assert lake.rows("id", "price") == [("a", 1.5), ("b", 2.5)]


def test_names_of_the_configuration_go_before_those_of_the_first_files(tmp_path: Path) -> None:
    """Also the ordering column: otherwise the table would be stamped, and arrival would decide."""
    lake = Lake(tmp_path)
    (tmp_path / "landing" / "1.csv").write_text("ID,Day,Version,Price\na,2020-01-01,2,2.5\n")
    lake.land("2.csv", "id,DAY,version,price\na,2020-01-01,1,1.5\n")
    assert lake.columns() == ["id", "day", "version", "Price"]
    assert lake.rows("id", "Price") == [("a", 2.5)]
    lake.prove()


def test_operation_in_another_case_deletes_also_when_it_is_replayed(tmp_path: Path) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\nn = "tinyint"\n[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n')
    lake.land("1.csv", "id,day,version,n,op\na,2020-01-01,1,1,I\nb,2020-01-01,1,1,I\n")
    entry = lake.land("2.csv", "id,day,version,N,OP\na,2020-01-01,2,1,D\nb,2020-01-01,2,1000,D\n")
    assert entry.quarantined == {"bad_type": 1}
    assert lake.rows("id") == ["b"]
    lake.prove()
    lake.config.write_text(lake.config.read_text().replace("tinyint", "int"))
    lake.table = Table.open(lake.config)
    lake.table.append(replay_quarantine=True)
    lake.table.run(host="local")
    assert lake.rows("id") == []
