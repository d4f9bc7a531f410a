"""A small file that says that it holds much costs itself only: it is set aside by name, and the others land."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from lakeupsert import Table
from lakeupsert.config import Reading, TableSettings
from lakeupsert.landing.files import survey
from lakeupsert.landing.formats import jsonlines, jsonvalues, limits
from lakeupsert.landing.formats.avrofile import HEADER
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.storage import LocalStore

MANY = 4_000_000
"""Rows of a file of some kilobytes."""
SYNC = b"0123456789abcdef"


def parquet(table: pa.Table) -> bytes:
    pq.write_table(table, out := pa.BufferOutputStream(), compression="zstd")
    return bytes(out.getvalue())


def orc_file(table: pa.Table) -> bytes:
    orc.write_table(table, out := io.BytesIO(), compression="zlib")
    return out.getvalue()


def number(value: int) -> bytes:
    """As Avro stores it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, "long", value)
    return out.getvalue()


def avro(fields: Sequence[tuple[str, Any]], count: int, data: bytes, codec: str = "null") -> bytes:
    """A file with one block."""
    schema = {"type": "record", "name": "r", "fields": [{"name": name, "type": type_} for name, type_ in fields]}
    meta = {"avro.schema": json.dumps(schema).encode(), "avro.codec": codec.encode()}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, HEADER, {"magic": b"Obj\x01", "meta": meta, "sync": SYNC})
    return out.getvalue() + number(count) + number(len(data)) + data + SYNC


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return bytes(out.getvalue())


def equal_rows(rows: int) -> pa.Table:
    return pa.table({"id": pa.array(["x"]).take(pa.array([0] * rows))})


def nested(levels: int) -> pa.Table:
    value: Any = 1
    for _ in range(levels):
        value = {"v": value}
    return pa.table({"id": ["x"], "v": [value]})


def doubled(levels: int) -> Any:
    """A record with two of a record with two of one …"""
    if not levels:
        return "int"
    first = doubled(levels - 1)
    again = first["name"] if isinstance(first, dict) else first
    fields = [{"name": "a", "type": first}, {"name": "b", "type": again}]
    return {"type": "record", "name": f"r{levels}", "fields": fields}


LONG = b"id\n" + b"x" * 1_000_000 + b"\n"
TEXT = [("id", "string")]
FILES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "rows of Parquet": lambda: ("a.parquet", parquet(equal_rows(MANY))),
    "rows of ORC": lambda: ("a.orc", orc_file(equal_rows(MANY))),
    "items of Parquet": lambda: (
        "a.parquet",
        parquet(pa.table({"id": ["x"], "v": pa.array([[0] * MANY], pa.list_(pa.int64()))})),
    ),
    "fields of Avro": lambda: ("a.avro", avro([*TEXT, ("v", doubled(30))], 1, b"")),
    "rows of Avro": lambda: ("a.avro", avro(TEXT, 2 * MANY, zstd(bytes(2 * MANY)), "zstandard")),
    "rows without a byte": lambda: ("a.avro", avro([("id", "null")], MANY, b"")),
    "items without a byte": lambda: (
        "a.avro",
        avro([*TEXT, ("v", {"type": "array", "items": "null"})], 1, number(1) + b"x" + number(MANY) + number(0)),
    ),
    "unpacked Parquet": lambda: ("a.parquet", parquet(pa.table({"id": ["x" * 1_000_000]}))),
    "unpacked ORC": lambda: ("a.orc", orc_file(pa.table({"id": ["x" * 100] * 2_000}))),
    "unpacked text": lambda: ("a.csv.zst", zstd(LONG)),
    "unpacked Avro": lambda: (
        "a.avro",
        avro(TEXT, 1, zstd(number(1_000_000) + b"x" * 1_000_000), "zstandard"),
    ),
    "columns of CSV": lambda: ("a.csv", ",".join(["id", *(f"c{i}" for i in range(10_000))]).encode() + b"\nx\n"),
    "columns of JSON": lambda: ("a.jsonl", json.dumps({"id": "x"} | {f"c{i}": 1 for i in range(10_000)}).encode()),
    "values of JSON": lambda: ("a.jsonl", b'{"id": "x", "v": [%s1]}' % (b'[1], "a,\\",", ' * 10_000)),
    "cells of JSON": lambda: ("a.jsonl", b"\n".join(b'{"id": "%d", "c%d": 1}' % (n, n) for n in range(200))),
    "columns of Parquet": lambda: (
        "a.parquet",
        parquet(pa.table({"id": ["x"]} | {f"c{i}": [1] for i in range(10_000)})),
    ),
    "levels of Parquet": lambda: ("a.parquet", parquet(nested(65))),
    "levels of ORC": lambda: ("a.orc", orc_file(nested(65))),
}


@pytest.mark.few(len(FILES))
@pytest.mark.parametrize("case", FILES)
def test_it_is_set_aside(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_OF_A_BYTE", 10)
    monkeypatch.setattr(limits, "_FREE_ROWS", 1 << 17)
    monkeypatch.setattr(limits, "MOST_CELLS", 1 << 15)
    monkeypatch.setattr(limits, "MOST_VALUES", 20_000)
    monkeypatch.setattr(jsonlines, "MOST_VALUES", 20_000)
    monkeypatch.setattr(limits, "_FREE_BYTES", 1 << 16)
    name, data = FILES[case]()
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / "good.csv").write_text("id\ngood\n")
    settings = TableSettings(
        key=("id",), partition_by=(), order_by=("id",), landing=f"{tmp_path}/landing", processed=f"{tmp_path}/processed"
    )
    table = Table("t", settings)
    table.run(host="local")
    (tmp_path / "landing" / name).write_bytes(data)
    (tmp_path / "landing" / "more.csv").write_text("id\nmore\n")
    table.run(host="local")
    assert sorted(table.to_arrow(columns=["id"]).read_all()["id"].to_pylist()) == ["good", "more"]
    [row] = table.quarantine().read_all().to_pylist()
    assert (row["file"].partition(":")[0], row["reason_code"]) == (name, "unreadable_file")
    word = {
        "rows": " rows",
        "items": "rows" if name.endswith("parquet") else "no bytes",
        "fields": "40,000 fields",
        "unpacked": "unpacked",
        "columns": "columns",
        "values": "more than 20,000 values",
        "cells": "more than 32,768 cells",
        "levels": "within",
    }
    assert word[case.partition(" ")[0]] in row["reason"]


def test_parquet_that_names_more_bytes_than_there_are(tmp_path: Path) -> None:
    """The stored bytes of a column, near the end of its footer, are some more."""
    data = bytearray(parquet(pa.table({"id": ["x"]})))
    column = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(0)
    sizes = [b"\x16" + number(size) for size in (column.total_uncompressed_size, column.total_compressed_size)]
    assert data.count(b"".join(sizes)) == 1
    data = data.replace(b"".join(sizes), sizes[0] + b"\x16" + number(4_000))
    length = int.from_bytes(data[-8:-4], "little")
    data[-8:-4] = (length + 1 + len(number(4_000)) - len(sizes[1])).to_bytes(4, "little")
    (tmp_path / "a.parquet").write_bytes(data)
    store = LocalStore(tmp_path)
    [found] = store.list("")
    surveyed = survey(store, LandingInput(found.name, found.size, found.etag, 0), Reading(), None, frozenset())
    assert surveyed.unreadable is not None
    assert "4,000 bytes by the footer" in surveyed.unreadable


def test_at_the_limit_all_is_well() -> None:
    limits.check_columns("a", nested(limits.DEEPEST).schema)
    limits.check_names("a", [str(i) for i in range(limits.MOST_COLUMNS)])


def test_an_object_with_too_many_fields_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonvalues, "MOST_CELLS", 99)
    objects = [{f"f{n}": 1} for n in range(10)]
    assert jsonvalues.infer_values(objects[:9]) == pa.struct([(f"f{n}", pa.int64()) for n in range(9)])
    assert jsonvalues.infer_values(objects) == pa.string()
    assert jsonvalues.with_new_fields(objects, pa.struct([("a", pa.int64())])) == pa.struct([("a", pa.int64())])


def test_commas_in_a_text_are_no_values() -> None:
    limits.check_values("a", "It", b'{"a": "%s", "b": "\\""}' % (b",[" * limits.MOST_VALUES))
