"""Events as Debezium 3.6 and 3.5 write them: values that it did not get, truncates, deletes that invent values, its own types."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings
from lakeupsert.errors import RefusedError
from lakeupsert.table.manifest import Changes
from tests.harness.proof import assert_proved

Record = Mapping[str, Any]
PLACEHOLDER = "__debezium_unavailable_value"
NUMBERS = [*PLACEHOLDER.encode()]


class Feed:
    """A table `t` of one partition, fed with a file a night."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root, self.nights = root, 0
        (root / "landing").mkdir(parents=True)
        given = {
            "key": ("id",),
            "partition_by": (),
            "order_by": ("__source_lsn",),
            "schema": {"id": "bigint"},
            "read": ReadSettings(envelope="debezium"),
            "delete": DeleteSettings(column="__op", values=("d",)),
            "quarantine_limit": 99,
            **settings,
        }
        self.table = Table(
            "t", TableSettings(landing=str(root / "landing"), processed=str(root / "processed"), **given)
        )

    def land(self, content: bytes, kind: str = "jsonl") -> None:
        self.nights += 1
        (self.root / "landing" / f"{self.nights:02d}.{kind}").write_bytes(content)

    def night(self, content: bytes, kind: str = "jsonl") -> Any:
        self.land(content, kind)
        return self.table.run(host="local")

    def rows(self, *names: str) -> list[dict[str, Any]]:
        rows = self.table.to_arrow(columns=names or None).read_all().to_pylist()
        return sorted(rows, key=lambda row: str(row["id"]))

    def refused(self) -> dict[str, int]:
        ledger = self.table.objects.ledger
        return dict(ledger.head().body.quarantined)

    def reconcile(self) -> None:
        assert_proved(self.table)


def event(op: str, lsn: int, after: Record | None = None, before: Record | None = None, **source: Any) -> Record:
    return {"before": before, "after": after, "source": {"lsn": lsn, **source}, "op": op, "ts_ms": lsn}


def jsonl(events: Sequence[object]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in events).encode()


# -- values that Debezium did not get

UUID = "b68a35a7-17ad-35b3-af2a-ae46edb4545a"
IN_JSON = base64.b64encode(PLACEHOLDER.encode()).decode()
FORMS: dict[str, tuple[Any, Any]] = {
    "t": ("x", PLACEHOLDER),
    "bytes_base64": ("eA==", IN_JSON),
    "bytes_hex": ("78", PLACEHOLDER.encode().hex()),
    "texts": (["x", "y"], [PLACEHOLDER]),
    "bytes_list": (["eA=="], [IN_JSON]),
    "ints": ([1, 2, 3], NUMBERS),
    "uuids": (["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], [UUID]),
    "hstore": ('{"a":"1"}', json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":"))),
    "map": ({"a": "1"}, {PLACEHOLDER: PLACEHOLDER}),
}
"""By column: a value as JSON, and the value that stands for it after an update that did not change it."""
TYPED: dict[str, tuple[pa.DataType, Any, Any]] = {
    "t": (pa.string(), "x", PLACEHOLDER),
    "bytes": (pa.binary(), b"x", PLACEHOLDER.encode()),
    "texts": (pa.list_(pa.string()), ["x"], [PLACEHOLDER]),
    "bytes_list": (pa.list_(pa.binary()), [b"x"], [PLACEHOLDER.encode()]),
    **{
        f"list_{type_}".replace("[", "_").replace("]", ""): (pa.list_(type_), [1, 2], NUMBERS)
        for type_ in (pa.int32(), pa.int64(), pa.float64(), pa.date32())
    },
    "large": (pa.large_list(pa.int64()), [1], NUMBERS),
    "uuids": (pa.list_(pa.string()), ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], [UUID]),
    "hstore": (pa.string(), '{"a":"1"}', FORMS["hstore"][1]),
    "map": (pa.map_(pa.string(), pa.string()), [("a", "1")], [(PLACEHOLDER, PLACEHOLDER)]),
}
IN_JSON_LINES = {**{name: new for name, (_, _, new) in TYPED.items()},
    "bytes": IN_JSON, "bytes_list": [IN_JSON], "map": {PLACEHOLDER: PLACEHOLDER}
}  # fmt: skip
SCHEMAS = {"text": dict.fromkeys(FORMS, "string"), "inferred": {}}


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("types", SCHEMAS)
def test_value_that_debezium_did_not_get_is_known_in_json(tmp_path: Path, mode: str, types: str) -> None:
    feed = Feed(tmp_path, mode=mode, schema={"id": "bigint", **SCHEMAS[types]})
    old = {name: value for name, (value, _) in FORMS.items()}
    feed.night(jsonl([event("r", 1, {"id": id_, "v": 1, **old}) for id_ in range(len(FORMS) + 1)]))
    before = feed.rows(*("id", *FORMS))
    updates = [event("u", 2, {"id": id_, "v": 2, **old, name: FORMS[name][1]}) for id_, name in enumerate(FORMS)]
    feed.night(
        jsonl([*updates, event("u", 2, {"id": len(FORMS), "v": 2, **{n: new for n, (_, new) in FORMS.items()}})])
    )
    assert feed.refused() == ({"bad_type": len(FORMS) + 1} if mode == "rows" else {})
    assert feed.rows(*("id", *FORMS)) == before
    assert {row["v"] for row in feed.rows()} == {1 if mode == "rows" else 2}
    feed.reconcile()


def avro_of(columns: Mapping[str, pa.DataType], rows: Sequence[Record], *, enveloped: bool, op: str = "u") -> bytes:
    kinds: dict[pa.DataType, Any] = {
        pa.int32(): "int", pa.int64(): "long", pa.float64(): "double", pa.string(): "string", pa.binary(): "bytes",
        pa.date32(): {"type": "int", "logicalType": "date"},
    }  # fmt: skip

    def avro_type(type_: pa.DataType) -> Any:
        if pa.types.is_map(type_):
            return {"type": "map", "values": ["null", avro_type(type_.item_type)]}
        return kinds.get(type_) or {"type": "array", "items": ["null", avro_type(type_.value_type)]}

    fields = [{"name": name, "type": ["null", avro_type(type_)]} for name, type_ in columns.items()]
    row = {"type": "record", "name": "Row", "fields": fields}
    source = {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": "long"}]}
    envelope = [
        ("before", ["null", row]),
        ("after", ["null", "Row"]),
        ("source", source),
        ("op", "string"),
        ("ts_ms", "long"),
    ]
    outer = {
        "type": "record",
        "name": "Envelope",
        "fields": [{"name": name, "type": type_} for name, type_ in envelope],
    }
    maps = [name for name, type_ in columns.items() if pa.types.is_map(type_)]
    rows = [{**r, **{name: dict(r[name]) for name in maps}} for r in rows]
    out = io.BytesIO()
    records = [event(op, r["__source_lsn"], r) for r in rows] if enveloped else rows
    fastavro.writer(out, fastavro.parse_schema(outer if enveloped else row), records)
    return out.getvalue()


def parquet_of(columns: Mapping[str, pa.DataType], rows: Sequence[Record]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], pa.schema([*columns.items()])), out)
    return out.getvalue()


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["events", "avro", "parquet"])
def test_value_that_debezium_did_not_get_is_known_in_every_type(tmp_path: Path, mode: str, kind: str) -> None:
    """Avro in Debezium's envelope, and Avro and Parquet that a connector unwrapped."""
    skipped = {"large", *({name for name in TYPED if "date" in name} if kind == "events" else ())}
    forms = {name: one for name, one in TYPED.items() if name not in (skipped if kind != "parquet" else ())}
    columns = {"id": pa.int64(), "__source_lsn": pa.int64(), "v": pa.int32(), **{n: one[0] for n, one in forms.items()}}

    def write(rows: Sequence[Record]) -> bytes:
        return parquet_of(columns, rows) if kind == "parquet" else avro_of(columns, rows, enveloped=kind == "events")

    read = ReadSettings(envelope="debezium") if kind == "events" else ReadSettings()
    feed = Feed(tmp_path, mode=mode, read=read, delete=None, schema={})
    ending = "parquet" if kind == "parquet" else "avro"
    old = {name: value for name, (_, value, _) in forms.items()}
    ids = range(len(forms))
    feed.night(write([{"id": id_, "__source_lsn": 1, "v": 1, **old} for id_ in ids]), ending)
    before = feed.rows("id", *forms)
    new = [{"id": i, "__source_lsn": 2, "v": 2, **old, name: forms[name][2]} for i, name in enumerate(forms)]
    feed.night(write(new), ending)
    if kind == "parquet":
        lines = [{"id": i, "__source_lsn": 3, "v": 2, name: IN_JSON_LINES[name]} for i, name in enumerate(forms)]
        assert feed.refused() == ({"bad_type": len(forms)} if mode == "rows" else {})
        feed.night(jsonl(lines))
    assert feed.refused() == ({"bad_type": len(forms)} if mode == "rows" else {})
    assert feed.rows("id", *forms) == before
    assert {row["v"] for row in feed.rows()} == {1 if mode == "rows" else 2}
    feed.reconcile()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["jsonl", "avro", "flattened"])
@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_key_change_without_a_long_value_is_told(tmp_path: Path, mode: str, kind: str) -> None:
    """Default replica identity: a delete and a create, which has the placeholder. No stored row has that key."""
    read = ReadSettings() if kind == "flattened" else ReadSettings(envelope="debezium")
    feed = Feed(tmp_path, mode=mode, read=read, schema={"id": "bigint", "t": "string"})
    columns = {"id": pa.int64(), "t": pa.string()}

    def write(op: str, lsn: int, id_: int, t: str) -> bytes:
        row = {"id": id_, "t": t}
        if kind == "flattened":
            return jsonl([{**row, "__op": op, "__source_lsn": lsn}])
        if kind == "avro":
            return avro_of(columns, [{**row, "__source_lsn": lsn}], enveloped=True, op=op)
        return jsonl([event(op, lsn, row)])

    night = feed.night(write("c", 1, 1, "long"), "avro" if kind == "avro" else "jsonl")
    assert night.append.entry.incomplete_creates == 0
    feed.night(write("u", 2, 1, PLACEHOLDER), "avro" if kind == "avro" else "jsonl")
    night = feed.night(write("c", 3, 2, PLACEHOLDER), "avro" if kind == "avro" else "jsonl")
    in_columns = mode == "columns"
    told = [
        any("REPLICA IDENTITY FULL" in one for one in w) for w in (night.append.warnings, feed.table.status().warnings)
    ]
    assert told == [in_columns, in_columns]
    assert night.append.entry.incomplete_creates == in_columns
    assert [(row["id"], row["t"]) for row in feed.rows()] == [(1, "long"), *([(2, None)] if in_columns else [])]
    assert feed.refused() == ({} if in_columns else {"bad_type": 1})
    feed.reconcile()


def test_placeholder_adds_no_field_to_an_objects_type(tmp_path: Path) -> None:
    feed = Feed(tmp_path, mode="columns")
    fields = [{PLACEHOLDER: PLACEHOLDER}, {"a": 1}, {PLACEHOLDER: PLACEHOLDER}]
    feed.night(jsonl([event("u", lsn, {"id": lsn, "m": m}) for lsn, m in enumerate(fields[:2])]))
    feed.night(jsonl([event("u", 3, {"id": 1, "m": fields[2]}), event("u", 3, {"id": 4, "m": {"a": 2, "b": 3}})]))
    assert [row["m"] for row in feed.rows()] == [None, {"a": 1, "b": None}, {"a": 2, "b": 3}]
    feed.reconcile()


def test_values_that_only_look_like_the_placeholder_stay(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    close: list[Record] = [
        {"ints": NUMBERS[:-1], "map": {"a": PLACEHOLDER}, "texts": [PLACEHOLDER, "x"]},
        {"ints": [*NUMBERS, 1], "map": {PLACEHOLDER: "a"}, "texts": [f"{PLACEHOLDER}!"]},
        {"ints": [0, *NUMBERS[1:]], "map": {PLACEHOLDER: PLACEHOLDER, "a": "b"}, "texts": []},
    ]
    feed.night(jsonl([event("u", 1, {"id": id_, **row}) for id_, row in enumerate(close)]))
    assert not feed.refused()
    assert [row["ints"] for row in feed.rows()] == [row["ints"] for row in close]
    assert [row["texts"] for row in feed.rows()] == [row["texts"] for row in close]


# -- messages without a row, and truncates

COLLECTIONS = [{"data_collection": "public.t", "event_count": 1}]
SKIPPED: dict[str, tuple[str, Any]] = {
    "heartbeat": ("heartbeat", {"ts_ms": 1795796048314}),
    "transaction": (
        "transaction marker",
        {"status": "BEGIN", "id": "786:1", "event_count": None, "data_collections": None, "ts_ms": 1},
    ),
    "end": (
        "transaction marker",
        {"status": "END", "id": "786:1", "event_count": 1, "data_collections": COLLECTIONS, "ts_ms": 1},
    ),
    "schema_change": (
        "schema change",
        {"source": {"table": "t"}, "ts_ms": 1, "databaseName": "d", "ddl": "ALTER TABLE t", "tableChanges": []},
    ),
    "message": (
        "message",
        {"op": "m", "ts_ms": 1, "source": {"lsn": 5}, "message": {"prefix": "p", "content": "eA=="}},
    ),
    "tombstone": ("tombstone", None),
}


def skipped_avro(kind: str) -> bytes:
    """A file of this kind as its topic has it."""
    text, optional = "string", ["null", "string"]
    source = {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": ["null", "long"]}]}
    fields: dict[str, dict[str, Any]] = {
        "heartbeat": {"ts_ms": "long"},
        "transaction": {"status": text, "id": text, "event_count": ["null", "long"], "ts_ms": "long"},
        "schema_change": {"source": source, "ts_ms": "long", "databaseName": optional, "ddl": optional},
        "message": {"op": text, "ts_ms": "long", "source": source},
    }
    if kind == "message":
        content = {"type": "record", "name": "Content", "fields": [{"name": "prefix", "type": optional}]}
        fields[kind]["message"] = content
    schema = {"type": "record", "name": "M", "fields": [{"name": n, "type": t} for n, t in fields[kind].items()]}
    out = io.BytesIO()
    value = SKIPPED[kind][1]
    fastavro.writer(
        out, fastavro.parse_schema(schema), [{**value, "source": {"lsn": 5}}, value | {"source": {"lsn": 6}}]
    )
    return out.getvalue()


@pytest.mark.parametrize("wrapped", [False, True])
def test_messages_without_a_row_are_counted_by_kind(tmp_path: Path, wrapped: bool) -> None:
    """Alone they make no table yet; with a row they are counted beside it, and a later batch may have nothing else."""
    feed = Feed(tmp_path)
    messages = [{"schema": {}, "payload": one} if wrapped else one for _, one in SKIPPED.values()]
    assert feed.night(jsonl(messages)).append is None
    night = feed.night(jsonl([event("c", 1, {"id": 1})]))
    expected = {"heartbeat": 1, "message": 1, "schema change": 1, "tombstone": 1, "transaction marker": 2}
    assert night.append.entry.skipped == expected
    assert night.append.entry.rows_read == len(feed.rows()) == 1
    later = feed.night(jsonl(messages)).append.entry
    assert (later.skipped, later.rows_read, later.quarantined) == (expected, 0, {})
    feed.reconcile()


@pytest.mark.parametrize(
    "row",
    [
        {"id": 2, "status": "paid", "__op": "u"},
        {"id": 2, "status": "paid", "event_count": 1},
        {"id": 2, "ddl": "x", "source": "web", "name": "n"},
        {"id": 2, "tableChanges": 1},
    ],
)
def test_row_without_an_envelope_is_not_taken_for_a_message_without_a_row(tmp_path: Path, row: Record) -> None:
    feed = Feed(tmp_path)
    feed.night(jsonl([event("c", 1, {"id": 1})]))
    entry = feed.night(jsonl([event("c", 2, {"id": 3}), row])).append.entry
    assert (entry.skipped, entry.quarantined) == ({}, {"malformed": 1})


def test_messages_without_a_row_are_counted_in_avro(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    kinds = ("heartbeat", "transaction", "schema_change", "message")
    for kind in kinds:
        feed.land(skipped_avro(kind), "avro")
    assert feed.table.append(host="local") is None
    appended = feed.night(avro_of({"id": pa.int64()}, [{"id": 1, "__source_lsn": 1}], enveloped=True), "avro").append
    assert appended.entry.skipped == {SKIPPED[kind][0]: 2 for kind in kinds}
    assert [row["id"] for row in feed.rows()] == [1]


@pytest.mark.parametrize("types", [{}, {"id": "bigint"}])
@pytest.mark.parametrize("others", [[], [None, {"ts_ms": 1}], ["no event"]])
def test_first_batch_without_a_row_but_a_truncate_is_refused(
    tmp_path: Path, types: Mapping[str, str], others: Sequence[object]
) -> None:
    feed = Feed(tmp_path, schema=types)
    with pytest.raises(RefusedError, match=rf"01.jsonl, line {len(others) + 1}") as e:
        feed.night(jsonl([*others, event("t", 1, table="t")]))
    assert e.value.code == "truncated-source"
    assert "lakeupsert delete" not in e.value.next


@pytest.mark.parametrize("kind", ["jsonl", "avro"])
@pytest.mark.parametrize("first", [False, True])
def test_batch_with_a_truncate_is_refused(tmp_path: Path, kind: str, first: bool) -> None:
    feed = Feed(tmp_path)

    def write(ops: Sequence[str]) -> bytes:
        rows = [event(op, n, {"id": n} if op == "c" else None, table="t") for n, op in enumerate(ops)]
        if kind == "jsonl":
            return jsonl(rows)
        text = avro_of({"id": pa.int64()}, [{"id": n, "__source_lsn": n} for n in range(len(ops))], enveloped=True)
        with io.BytesIO(text) as source:
            read = fastavro.reader(source)
            records = [
                {**r, "op": op, **({"after": None} if op == "t" else {})} for r, op in zip(read, ops, strict=True)
            ]
            out = io.BytesIO()
            fastavro.writer(out, read.writer_schema, records)
        return out.getvalue()

    if not first:
        feed.night(write("cc"), kind)
    with pytest.raises(RefusedError, match=r"place 1|line 2") as e:
        feed.night(write("ctct"), kind)
    assert e.value.code == "truncated-source"
    assert "2 truncates" in e.value.message
    assert ("lakeupsert delete" in e.value.next) == (not first)
    if first:
        assert not (tmp_path / "processed/_lakeupsert/ledger").exists()
    else:
        assert [row["id"] for row in feed.rows()] == [0, 1]
        feed.table.delete(where="id is not null", dry=False)
    (feed.root / "landing" / f"{feed.nights:02d}.{kind}").unlink()
    feed.night(jsonl([event("c", 3, {"id": 3})]))
    assert [row["id"] for row in feed.rows()] == [3]


# -- dates as text (time.precision.mode = isostring)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["jsonl", "avro", "csv"])
@pytest.mark.parametrize("declared", [False, True])
def test_dates_and_times_may_end_in_z(tmp_path: Path, kind: str, declared: bool) -> None:
    types = {"day": "date", "t": "time64[us]", "ts": "timestamp"} if declared or kind == "avro" else {}
    feed = Feed(tmp_path, schema={"id": "bigint", **types}, partition_by=("day",), read=ReadSettings(), delete=None)
    row = {
        "id": 1,
        "__source_lsn": 1,
        "day": "2024-01-02Z",
        "t": "23:59:59.999999Z",
        "ts": "2024-01-02T03:04:05.678901Z",
    }
    columns = {name: pa.int64() if isinstance(value, int) else pa.string() for name, value in row.items()}
    written = {
        "jsonl": lambda: jsonl([row]),
        "csv": lambda: f"{','.join(row)}\n{','.join(map(str, row.values()))}\n".encode(),
        "avro": lambda: avro_of(columns, [row], enveloped=False),
    }
    feed.night(written[kind](), kind)
    [found] = feed.rows()
    moment = datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)
    clock = moment.time().replace(23, 59, 59, 999999) if types else row["t"]
    assert (found["day"], found["t"], found["ts"]) == (moment.date(), clock, moment)
    if kind != "avro":
        feed.reconcile()
    feed.night(jsonl([{"id": 1, "__source_lsn": 2, "day": "2024-01-02", "t": None}, {"id": 2, "day": "2024-01-03ZZ"}]))
    assert feed.refused() == {"bad_partition": 1}
    assert [row["t"] for row in feed.rows()] == [None]


def test_the_three_steps_after_a_truncate_give_the_rows_of_the_source(tmp_path: Path) -> None:
    def change(op: str, place: int, after: Record | None) -> Record:
        sequence = json.dumps([str(place), str(place)])
        return event(op, place, after, connector="postgresql", sequence=sequence, snapshot="false")

    feed = Feed(tmp_path, order_by=("__log_position",))
    feed.night(jsonl([change("c", n, {"id": n, "v": n}) for n in (1, 2)]))
    before, after = change("u", 3, {"id": 1, "v": 3}), [change("c", n, {"id": n - 3, "v": n}) for n in (5, 8)]
    with pytest.raises(RefusedError) as e:
        feed.night(jsonl([before, change("t", 4, None), *after]))
    assert 'lakeupsert delete --table t --where "id is not null" --yes' in e.value.next
    (tmp_path / "landing/02.jsonl").write_bytes(jsonl([before]))
    feed.table.run(host="local")
    feed.table.delete(where="id is not null", dry=False)
    feed.night(jsonl(after))
    assert feed.rows("id", "v") == [{"id": 2, "v": 5}, {"id": 5, "v": 8}]


# -- deletes that find no row

ORDERS = {"day": "2024-01-02", "amount": "6.00", "note": "n", "ok": True, "ts": "2024-01-01T10:00:00Z", "opt": None}
INVENTED = {"day": "1970-01-01", "amount": "0.00", "note": "", "ok": False, "ts": "1970-01-01T00:00:00Z", "opt": None}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["text", "typed"])
@pytest.mark.parametrize("key_scope", ["partition", "table"])
def test_delete_with_invented_values_is_told(tmp_path: Path, key_scope: str, kind: str) -> None:
    types = {"day": "date", "amount": "decimal(9,2)", "ts": "timestamp"} if kind == "typed" else {"day": "date"}
    feed = Feed(tmp_path, partition_by=("day",), key_scope=key_scope, schema={"id": "bigint", **types})
    feed.night(jsonl([event("c", 1, {"id": id_, **ORDERS}) for id_ in range(3)]))
    whole = {"id": 2, **INVENTED, "day": ORDERS["day"]}
    deletes = [event("d", 2, None, {"id": 0, **INVENTED}), event("d", 2, None, {"id": 7, **INVENTED})]
    night = feed.night(jsonl([*deletes, event("d", 2, None, whole)]))
    is_partition = key_scope == "partition"
    assert [row["id"] for row in feed.rows()] == ([0, 1] if is_partition else [1])
    assert night.append.entry.hollow_deletes == (2 if is_partition else 0)
    status = feed.table.status()
    for warnings in (night.append.warnings, status.warnings):
        assert any("REPLICA IDENTITY FULL" in one and "2 deletes" in one for one in warnings) == is_partition
    assert status.deletes_without_row == sum(r.changes.deletes_without_row for r in night.dedupe) == 2 * is_partition
    feed.reconcile()


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("engine", ["arrow", pytest.param("spark", marks=pytest.mark.spark)])
@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_delete_that_finds_no_row_is_counted(tmp_path: Path, strategy: str, engine: str, mode: str) -> None:
    feed = Feed(tmp_path, strategy=strategy, engine=engine, mode=mode)
    feed.night(jsonl([event("c", 1, {"id": 1}), event("c", 1, {"id": 2})]))
    feed.night(jsonl([event("d", 2, None, {"id": id_}) for id_ in (1, 8, 9)]))
    [snapshot, _] = feed.table.snapshots()
    assert snapshot.body.changes == Changes(deleted=1, unchanged=2, deletes_without_row=2)
    feed.night(jsonl([event("d", 3, None, {"id": 9})]))  # it finds the delete before it
    assert feed.table.snapshots()[0].body.changes.deletes_without_row == 0
    feed.reconcile()
