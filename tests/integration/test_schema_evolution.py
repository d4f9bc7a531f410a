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
from lakeupsert.landing.formats import blocks
from lakeupsert.table.types import type_name
from tests.harness.proof import assert_proved
from tests.harness.spark import collect

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
            assert_proved(self.table)
            before = self.table.to_arrow().read_all()
            self.table.reprocess(source=source, host="local")
            assert self.table.to_arrow().read_all().equals(before)


# ---------------------------------------------------------------- names in another case


@pytest.mark.few(2)
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
    assert "differ only by case" in pq.read_table(file)["reason"][0].as_py()


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


@pytest.mark.parametrize(
    ("stored", "given", "told"),
    [
        (pa.int64(), "string", True),
        (pa.float64(), "decimal(9,2)", True),
        (pa.int64(), "int", False),
        (pa.int32(), "bigint", False),
        (pa.large_string(), "string", False),
        (pa.timestamp("us", "Europe/Berlin"), "timestamp", False),
    ],
)
def test_type_that_a_column_does_not_grow_to_is_told(stored: Any, given: str, told: bool, tmp_path: Path) -> None:
    """Of a key, whose type is the stored one, it is refused."""
    lake = Lake(tmp_path)
    days = {"day": ["2020-01-01"], "version": [1], "v": pa.array([None], stored)}
    lake.land("1.parquet", pa.table({"id": pa.array(["a"], pa.large_string()), **days}))
    lake.config.write_text(lake.config.read_text() + f'[tables.t.schema]\nid = "string"\nv = "{given}"\n')
    lake.table = Table.open(lake.config)
    (tmp_path / "landing" / "2.csv").write_text("id,day,version,v\nb,2020-01-01,1,some\n")
    result = lake.table.append(host="local")
    assert result is not None
    assert [f"'v' stays {type_name(stored)}:" in warning for warning in result.warnings] == [True] * told
    if told:
        assert result.entry.quarantined == {"bad_type": 1}


def test_replay_tells_types_that_a_column_does_not_grow_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\nn = "tinyint"\nv = "bigint"\n')
    lake.land("1.csv", "id,day,version,n,v\na,2020-01-01,1,1,1\nb,2020-01-01,1,1000,1\nc,2020-01-01,1,1,some\n")
    lake.config.write_text(lake.config.read_text().replace("tinyint", "int").replace('v = "bigint"', 'v = "string"'))
    lake.table = Table.open(lake.config)
    result = lake.table.append(replay_quarantine=True)
    assert result is not None
    assert (result.entry.rows_appended, result.entry.quarantined) == (1, {"bad_type": 1})
    assert ["'v' stays bigint" in warning for warning in result.warnings] == [True]
    assert lake.table.append(replay_quarantine=True) is None
    assert "'v' stays bigint" in caplog.text


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


# ---------------------------------------------------------------- what is within columns

POINT = pa.struct([("x", pa.int32()), ("tag", pa.string())])
WIDER = pa.struct([("x", pa.int64()), ("tag", pa.string()), ("y", pa.float64())])


def nested(version: int, point: Any, value: Any, **more: Any) -> Any:
    """A table of one row `b`: the value in a struct column, and within a list, a map and another struct."""
    outer = pa.struct([("point", point)])
    columns = {
        "id": pa.array(["b"]),
        "day": pa.array(["2020-01-02"]),
        "version": pa.array([version]),
        "s": pa.array([value], point),
        "l": pa.array([[value, None]], pa.list_(point)),
        "m": pa.array([[("k", value)]], pa.map_(pa.string(), point)),
        "o": pa.array([{"point": value}], outer),
    }
    return pa.table({**columns, **more})


def everywhere(value: Any) -> dict[str, Any]:
    return {"s": value, "l": [value, None], "m": [("k", value)], "o": {"point": value}}


@pytest.mark.core
@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_old_structs_have_the_fields_that_came_since(strategy: str, engine: str, tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path, strategy=strategy)
    old = {"x": 1, "tag": "old"}
    before = nested(1, POINT, old).set_column(0, "id", pa.array(["a"]))
    lake.land("1.parquet", pa.concat_tables([before, nested(1, POINT, old)]))
    ids = nested_ids(lake)
    lake.land("2.parquet", nested(2, WIDER, {"x": 2**40, "tag": "new", "y": 0.5}), engine=engine)
    assert {name: nested_ids(lake)[name] for name in ids} == ids, "a field keeps its id"
    assert lake.table.view().spec.schema.field("s").type.equals(WIDER), "what comes stands behind what is there"
    assert len(set(nested_ids(lake).values())) == len(nested_ids(lake)) == len(ids) + 4

    grown, new = everywhere({**old, "y": None}), everywhere({"x": 2**40, "tag": "new", "y": 0.5})
    columns = ("s", "l", "m", "o")
    assert lake.rows("id", *columns) == [("a", *grown.values()), ("b", *new.values())]
    assert lake.rows("id", "s", snapshot=0)[0] == ("a", old), "an old snapshot has the fields of its time"
    # A file that has fewer fields, in another order, and narrower ones.
    reordered = pa.struct([("y", pa.float32()), ("x", pa.int8())])
    entry = lake.land("3.parquet", nested(3, reordered, {"y": 1.5, "x": 3}), engine=engine)
    assert not entry.quarantined
    new = everywhere({"x": 3, "tag": None, "y": 1.5})
    assert lake.rows("id", *columns) == [("a", *grown.values()), ("b", *new.values())]
    frame = collect(lake.table.to_spark(spark).orderBy("id"))
    assert frame.select(columns).to_pylist() == lake.table.to_arrow().read_all().select(columns).to_pylist()
    assert lake.table.to_arrow("latest").read_all().equals(lake.table.to_arrow().read_all())
    lake.prove()


def nested_ids(lake: Lake) -> dict[str, int]:
    """The id of each field within the columns, by its path."""
    found: dict[str, int] = {}

    def within(path: str, type_: Any) -> None:
        fields = [type_.key_field, type_.item_field] if pa.types.is_map(type_) else []
        fields = fields or [type_.field(i) for i in range(type_.num_fields if pa.types.is_nested(type_) else 0)]
        for field in fields:
            found[f"{path}.{field.name}"] = int(field.metadata[b"PARQUET:field_id"])
            within(f"{path}.{field.name}", field.type)

    for column in lake.table.view().spec.schema:
        within(column.name, column.type)
    return found


@pytest.mark.parametrize("kind", ["avro", "orc"])
def test_structs_of_other_typed_formats_grow_too(kind: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.parquet", nested(1, POINT, {"x": 1, "tag": "old"}).select(["id", "day", "version", "s"]))
    out: Any = io.BytesIO()
    if kind == "orc":
        orc.write_table(nested(2, WIDER, {"x": 2, "tag": "new", "y": 0.5}).select(["id", "day", "version", "s"]), out)
    else:
        point = [{"name": n, "type": t} for n, t in (("x", "long"), ("tag", "string"), ("y", "double"))]
        types = {
            "id": "string",
            "day": "string",
            "version": "long",
            "s": {"type": "record", "name": "s", "fields": point},
        }
        fields = [{"name": name, "type": type_} for name, type_ in types.items()]
        row = {"id": "b", "day": "2020-01-02", "version": 2, "s": {"x": 2, "tag": "new", "y": 0.5}}
        fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, [row])
    assert not lake.land(f"2.{kind}", out.getvalue()).quarantined
    assert lake.rows("s") == [{"x": 2, "tag": "new", "y": 0.5}]
    lake.prove()


def line(version: int, key: str = "b", **columns: Any) -> str:
    return json.dumps({"id": key, "day": "2020-01-02", "version": version, **columns}) + "\n"


def test_objects_of_json_lines_bring_fields_and_widen_none(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    value = {"x": 1, "tag": "old"}
    lake.land("1.jsonl", line(1, s=value, l=[value]) + line(1, "a", s=value, l=[value]))
    more = {"x": 2, "y": 0.5, "deep": {"z": [1]}}
    entry = lake.land("2.jsonl", line(2, s=more, l=[{}, more]) + line(2, "bad", s={"x": "no number", "new": 1}))
    assert entry.quarantined == {"bad_type": 1}, "text has no types of its own"
    old, new = ({"x": 1, "tag": "old", "y": None, "deep": None}, {**more, "tag": None})
    none = dict.fromkeys(new)
    assert lake.rows("id", "s", "l") == [("a", old, [old]), ("b", new, [none, new])], "a refused row brings no field"
    lake.prove()


def test_maps_of_json_lines_grow_in_their_values_alone(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.parquet", nested(1, POINT, {"x": 1, "tag": "old"}).select(["id", "day", "version", "s", "m"]))
    assert not lake.land("2.jsonl", line(2, m={"another": {"x": 2, "y": 1.5}})).quarantined
    wide = line(3, s={"x": 2**40, "z": 1}) + line(3, m={"k": {"x": 2**40, "z": 1}})
    assert lake.land("3.jsonl", wide).quarantined == {"bad_type": 2}, "text widens no type"
    assert lake.rows("m") == [[("another", {"x": 2, "tag": None, "y": 1.5})]], "no row with z was accepted"
    lake.prove()


def test_value_of_json_that_does_not_fit_is_refused_alone_also_when_it_is_read_again(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", line(1, s={"x": 1}))
    entry = lake.land("2.jsonl", line(2, s={"x": "no number"}) + line(1, "a", s={"x": 2}))
    assert entry.quarantined == {"bad_type": 1}
    lake.prove()


def test_field_without_any_value_is_text(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", line(1, s={"x": 1}))
    lake.land("2.jsonl", line(2, s={"x": 2, "empty": None}))
    lake.land("3.jsonl", line(3, s={"x": 3, "empty": "not any more"}))
    assert lake.rows("s") == [{"x": 3, "empty": "not any more"}]
    lake.prove()


@pytest.mark.parametrize(
    ("type_", "value", "reason"),
    [
        (pa.struct([("x", pa.string())]), {"x": "no number"}, "bad_type"),  # not wider, and does not convert
        (pa.struct([("x", pa.float64())]), {"x": 1.5}, "bad_type"),
        (pa.list_(POINT), [{"x": 1}], "bad_type"),
        (pa.struct([("x", pa.int32()), ("X", pa.int32())]), {"x": 1, "X": 2}, "unreadable_file"),
        (pa.struct([("x", pa.int32()), ("Tag", pa.string())]), {"x": 1, "Tag": "t"}, "unreadable_file"),
    ],
)
def test_struct_that_does_not_fit_is_refused_and_the_rest_goes_on(
    type_: Any, value: Any, reason: str, tmp_path: Path
) -> None:
    lake = Lake(tmp_path)
    old = {"x": 1, "tag": "old"}
    lake.land("1.parquet", nested(1, POINT, old))
    row = nested(2, POINT, old).select(["id", "day", "version"]).append_column("s", pa.array([value], type_))
    (tmp_path / "landing" / "2.parquet").write_bytes(b"")
    pq.write_table(row, tmp_path / "landing" / "2.parquet")
    entry = lake.land("3.parquet", nested(3, POINT, old).set_column(0, "id", pa.array(["c"])))
    assert entry.quarantined == {reason: 1}
    assert lake.rows("id", "s") == [("b", old), ("c", old)]
    assert lake.table.view().spec.schema.field("s").type.equals(POINT)


def test_narrower_and_other_values_within_a_struct_are_those_that_they_are(tmp_path: Path) -> None:
    """Rows that convert are taken, those that do not are refused, one by one."""
    lake = Lake(tmp_path)
    lake.land("1.parquet", nested(1, POINT, {"x": 1, "tag": "old"}))
    big = pa.struct([("x", pa.uint64())])
    rows = [
        ("a", [{"x": 1}, {"x": 2}], 1),
        ("b", [{"x": 2**63}, {"x": 3}], 2),
        ("c", [], 1),
        ("d", None, 1),
        ("e", [None], 1),
    ]
    table = pa.table(
        {
            "id": [key for key, _, _ in rows],
            "day": ["2020-01-02"] * 5,
            "version": [version for _, _, version in rows],
            "l": pa.array([value for _, value, _ in rows], pa.list_(big)),
            "m": pa.array(
                [value and [(str(i), v) for i, v in enumerate(value)] for _, value, _ in rows],
                pa.map_(pa.string(), big),
            ),
        }
    )
    assert lake.land("2.parquet", table).quarantined == {"bad_type": 1}
    one, two = {"x": 1, "tag": None}, {"x": 2, "tag": None}
    found = {key: (in_list, in_map) for key, in_list, in_map in lake.rows("id", "l", "m")}
    assert found["a"] == ([one, two], [("0", one), ("1", two)])
    assert found["c"] == ([], [])
    assert found["d"] == (None, None)
    assert found["e"] == ([None], [("0", None)])
    assert found["b"][0] == [{"x": 1, "tag": "old"}, None]
