"""Columns without a value have no type yet: the table gets them with their first value (ADR 0049)."""

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from tests.harness.proof import assert_proved

KEYED = {"id": "a", "day": "2020-01-01", "version": 1}
FORMATS = ("csv", "jsonl", "parquet", "avro")


def in_format(kind: str, rows: list[dict[str, Any]]) -> bytes:
    """A file of these rows, which have the same names; columns of null have the null type where there is one."""
    if kind == "csv":
        text = [["" if v is None else str(v) for v in row.values()] for row in rows]
        return "".join(",".join(fields) + "\n" for fields in (list(rows[0]), *text)).encode()
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    out = io.BytesIO()
    if kind == "avro":
        types = {str: "string", int: "long", float: "double", type(None): "null"}
        fields = [{"name": name, "type": types[type(value)]} for name, value in rows[0].items()]
        fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


class Lake:
    def __init__(self, root: Path, more: str = "", **settings: Any) -> None:
        self.root = root
        (root / "landing").mkdir(parents=True)
        given = {"key": ["id"], "partition_by": ["day"], "order_by": ["version"], **settings}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
        self.config = root / "lakeupsert.toml"
        self.config.write_text('[tables.t]\nlanding = "landing"\nprocessed = "processed"\n' + "".join(lines) + more)

    def night(self, name: str, content: bytes | str, host: Any = "local") -> list[str]:
        """The warnings of a run that takes one more file."""
        data = content.encode() if isinstance(content, str) else content
        (self.root / "landing" / name).write_bytes(data)
        done = Table.open(self.config).run(host=host, workers=1)
        assert done.append is not None
        return list(done.append.warnings)

    def types(self) -> dict[str, str]:
        return {field.name: str(field.type) for field in Table.open(self.config).to_arrow().schema}

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = Table.open(self.config).to_arrow().read_all().to_pylist()
        return sorted(found, key=lambda row: str(row["id"]))

    def prove(self) -> None:
        table = Table.open(self.config)
        assert_proved(table)
        before = table.to_arrow().read_all()
        assert not table.reprocess(source="landing", host="local").left
        assert table.to_arrow().read_all().equals(before)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_column_gets_its_type_with_its_first_value(tmp_path: Path, kind: str) -> None:
    """Whatever the file, whether the column is there from the first batch on, and in both of the nights before its value."""
    lake = Lake(tmp_path)
    for night, name in enumerate(("a", "b"), 1):
        row = {**KEYED, "id": name, "discount": None, **({"late": None} if night == 2 else {})}
        told = lake.night(f"{night}.{kind}", in_format(kind, [row]))
        assert [w for w in told if "'discount'" in w], "each night says so"
        assert set(lake.types()) == {"id", "day", "version"}
    lake.night(f"3.{kind}", in_format(kind, [{**KEYED, "id": "c", "discount": 2.5, "late": 7}]))
    assert {name: lake.types()[name] for name in ("discount", "late")} == {"discount": "double", "late": "int64"}
    assert [(r["discount"], r["late"]) for r in lake.rows()] == [(None, None), (None, None), (2.5, 7)]
    assert not [
        w for w in lake.night(f"4.{kind}", in_format(kind, [{**KEYED, "discount": None, "late": None}])) if "late" in w
    ]
    lake.prove()


def test_batch_with_several_types_is_inferred_as_a_first_one_is(tmp_path: Path) -> None:
    for name, values, type_ in (("int", [1, 2], "int64"), ("mixed", [1, 2.5], "double"), ("text", [1, "x"], "string")):
        lake = Lake(tmp_path / name)
        lake.night("1.csv", in_format("csv", [{**KEYED, "v": None}]))
        lake.night("2.csv", in_format("csv", [{**KEYED, "id": f"k{i}", "v": v} for i, v in enumerate(values)]))
        assert lake.types()["v"] == type_


def test_fields_of_objects_wait_and_empty_lists_are_kept(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    told = lake.night(
        "1.jsonl", in_format("jsonl", [{**KEYED, "who": {"name": "x", "age": None}, "tags": [], "o": {"p": None}}])
    )
    assert [w for w in told if "'who.age'" in w]
    assert [w for w in told if "'tags[]'" in w and "text" in w], "items that nobody has seen are told to be text"
    assert [w for w in told if "'o.p'" in w and "text" in w]
    assert lake.rows()[0]["tags"] == []
    assert lake.rows()[0]["o"] == {"p": None}
    assert "age" not in lake.types()["who"]
    lake.night("2.jsonl", in_format("jsonl", [{**KEYED, "id": "b", "who": {"name": "y", "age": None}}]))
    lake.night("3.jsonl", in_format("jsonl", [{**KEYED, "id": "c", "who": {"name": "z", "age": 9}}]))
    assert lake.types()["who"] == "struct<name: string, age: int64>"
    assert [row["who"]["age"] for row in lake.rows()] == [None, None, 9]


def test_fields_of_null_in_parquet_wait(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for night, age in ((1, None), (2, None), (3, 9)):
        lake.night(
            f"{night}.parquet", in_format("parquet", [{**KEYED, "id": f"k{night}", "who": {"name": "x", "age": age}}])
        )
    assert [row["who"] for row in lake.rows()] == [{"name": "x", "age": age} for age in (None, None, 9)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("column", ["version", "day"])
def test_table_whose_order_or_partition_is_open_takes_nothing(tmp_path: Path, kind: str, column: str) -> None:
    lake = Lake(tmp_path, quarantine_limit=100)
    with pytest.raises(ConfigurationError) as raised:
        lake.night(f"1.{kind}", in_format(kind, [{**KEYED, column: None}]))
    assert raised.value.code == "open-column"
    assert column in raised.value.message
    rows = [{**KEYED, "version": 9}, {**KEYED, "version": 10, "id": "a"}]
    lake.night(f"2.{kind}", in_format(kind, rows))
    assert [row["version"] for row in lake.rows()] == [10]


@pytest.mark.parametrize(
    ("name", "content"), [("1.csv", "id,day,version,price\n"), ("1.csv", ""), ("1.jsonl", ""), ("1.json", "[]")]
)
def test_first_file_without_a_row_waits(tmp_path: Path, name: str, content: str) -> None:
    lake = Lake(tmp_path)
    (tmp_path / "landing" / name).write_text(content)
    answer = CliRunner().invoke(main, ["run", "--config", str(lake.config)])
    assert answer.exit_code == 0, answer.output
    assert "'t' is not created yet" in answer.output
    lake.night("2.csv", "id,day,version,price\na,2020-01-01,9,1.5\na,2020-01-01,10,2.5\n")
    assert [(row["version"], row["price"]) for row in lake.rows()] == [(10, 2.5)]
    lake.prove()


def test_header_opens_a_table_if_types_are_given(tmp_path: Path) -> None:
    given = Lake(tmp_path / "given", more='[tables.t.schema]\nversion = "bigint"\nday = "date"\n')
    given.night("1.csv", "id,day,version,price\n")
    given.night("2.csv", "id,day,version,price\na,2020-01-01,9,1.5\na,2020-01-01,10,2.5\n")
    assert [(row["version"], row["price"]) for row in given.rows()] == [(10, 2.5)]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("is_first", [True, False])
def test_refused_row_decides_no_type(tmp_path: Path, kind: str, *, is_first: bool) -> None:
    """Neither with the only value of a column, nor with one that would make others text; in a first batch and a later one."""
    lake = Lake(tmp_path, quarantine_limit=100)
    if not is_first:
        lake.night(f"0.{kind}", in_format(kind, [{**KEYED, "id": "z"}]))
    good, refused = {**KEYED, "only": None, "size": 3}, {**KEYED, "day": None, "only": "7", "size": "large"}
    told = lake.night(f"1.{kind}", in_format(kind, [good, refused]))
    assert [w for w in told if "'only'" in w]
    assert lake.types() == {"id": "string", "day": "date32[day]", "version": "int64", "size": "int64"}
    lake.night(f"2.{kind}", in_format(kind, [{**KEYED, "id": "b", "only": "ab", "size": 4}]))
    assert lake.types()["only"] == "string"
    assert [(row["only"], row["size"]) for row in lake.rows()][:2] == [(None, 3), ("ab", 4)]
    lake.prove()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("column", "good", "refused", "type_", "settings"),
    [
        ("at", "2020-01-01", "soon", "date32[day]", {"partition_by": ["date(at) as on"]}),
        ("at", "2020-01-01 10:00:00", "soon", "timestamp[us]", {"partition_by": ["year(at)"]}),
        ("part", 1, 1.5, "int64", {"partition_by": ["part"]}),
        ("tags", "x", [1], "string", {"ties": "content"}),
    ],
)
def test_refused_row_gives_no_column_a_type_that_settings_refuse(
    tmp_path: Path, kind: str, column: str, good: Any, refused: Any, type_: str, settings: Any
) -> None:
    """The first batch was refused (`unfit-type`), and still is if accepted rows show that type."""
    if kind == "csv" and column == "tags":
        return  # has no lists
    lake = Lake(tmp_path / "one", quarantine_limit=100, **settings)
    rows = [{**KEYED, column: good}, {**KEYED, "id": None, column: refused}]
    lake.night(f"1.{kind}", in_format(kind, rows))
    assert lake.types()[column] == type_
    assert len(lake.rows()) == 1
    lake.prove()
    none = Lake(tmp_path / "none", quarantine_limit=100, **settings)
    with pytest.raises(ConfigurationError) as raised:
        none.night(f"1.{kind}", in_format(kind, [{**KEYED, "id": f"k{i}", column: refused} for i in range(2)]))
    assert raised.value.code == "unfit-type"
    assert not list((tmp_path / "none" / "processed").rglob("*.parquet")), "nothing is left of the attempt"


def test_order_is_open_if_only_a_refused_row_has_one(tmp_path: Path) -> None:
    lake = Lake(tmp_path, quarantine_limit=100)
    with pytest.raises(ConfigurationError) as raised:
        lake.night("1.csv", in_format("csv", [{**KEYED, "version": None}, {**KEYED, "day": None}]))
    assert raised.value.code == "open-column"


def test_declared_type_is_there_from_the_beginning(tmp_path: Path) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\ndiscount = "decimal(9,2)"\n')
    assert not [w for w in lake.night("1.csv", in_format("csv", [{**KEYED, "discount": None}])) if "discount" in w]
    assert lake.types()["discount"] == "decimal128(9, 2)"


def test_null_of_mode_columns_is_a_value_and_needs_a_column(tmp_path: Path) -> None:
    """A record that brings null is newer than the late one, whose value must not come back."""
    for nulls, expected in (("overwrite", None), ("keep", "7")):
        lake = Lake(tmp_path / nulls, mode="columns", nulls=nulls)
        told = lake.night("1.jsonl", in_format("jsonl", [{**KEYED, "version": 5, "x": None}]))
        assert [w for w in told if "'x'" in w]
        lake.night("2.jsonl", in_format("jsonl", [{**KEYED, "version": 3, "x": 7}]))
        assert str(lake.rows()[0]["x"] or "") == (expected or "")
        assert lake.types()["x"] == ("string" if nulls == "overwrite" else "int64")


def test_new_column_without_an_old_one_is_told(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.night("1.csv", in_format("csv", [{**KEYED, "price": 1.5}]))
    told = lake.night("2.csv", in_format("csv", [{**KEYED, "unit_price": 1.5}]))
    assert [w for w in told if "'unit_price'" in w and "'price'" in w and "aliases" in w and "[tables.t.read]" in w]
    assert not [
        w
        for w in lake.night("3.csv", in_format("csv", [{**KEYED, "price": 1, "unit_price": 1, "z": 1}]))
        if "aliases" in w
    ]


def test_replay_of_a_row_with_an_open_column_adds_none(tmp_path: Path) -> None:
    lake = Lake(tmp_path, quarantine_limit=100, more='[tables.t.schema]\nday = "date"\n')
    lake.night("1.csv", "id,day,version,size\na,2020-01-01,1,\nb,02/01/2020,1,\n")
    with lake.config.open("a") as config:
        config.write('[tables.t.read]\ndates = { day = ["%d/%m/%Y", "%Y-%m-%d"] }\n')
    answer = CliRunner().invoke(main, ["append", "--replay-quarantine", "--config", str(lake.config), "--json"])
    assert answer.exit_code == 0, answer.output
    lake.night("2.csv", "id,day,version,size\nc,2020-01-01,1,9\n")
    assert [(row["id"], row["size"]) for row in lake.rows()] == [("a", None), ("b", None), ("c", 9)]


@pytest.mark.long
def test_open_columns_on_spark(spark: Any, tmp_path: Path) -> None:
    lake = Lake(tmp_path, quarantine_limit=100)
    for night, size in ((1, None), (2, None), (3, 9)):
        rows = [{**KEYED, "id": f"k{night}", "size": size}, {**KEYED, "day": None, "size": "refused"}]
        told = lake.night(f"{night}.jsonl", in_format("jsonl", rows), host="spark")
        assert len([w for w in told if "'size'" in w]) == (size is None)
    assert [row["size"] for row in lake.rows()] == [None, None, 9]
