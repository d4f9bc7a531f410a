"""What is fuzzed: readers of bytes that others write. Each takes any bytes, and may only raise the errors of its contract.

Parquet, ORC and Arrow are not here: pyarrow may end the process, so `append` reads them in another one (ADR 0069).
"""

import gzip
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from tempfile import mkdtemp
from typing import Any

import fastavro
import msgspec
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.config.load import parse
from lakeupsert.decoding import UNREADABLE
from lakeupsert.errors import DamagedTableError, LakeupsertError
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.files import survey
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.operations.statement.assignments import Assignments
from lakeupsert.queue import Message
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.checksums import BLOCKS, GROUPS, read_tail
from lakeupsert.sources.messages import key_of, line_of, tombstone_line
from lakeupsert.storage import LocalStore
from lakeupsert.table import metadata
from lakeupsert.table.layout import TableObjects, folder_name, partition_texts
from tests.harness.specs import LANDED as SCHEMA
from tests.harness.specs import create

SPEC = create(SCHEMA, key=["id"], order_by=["at"], partition_by=["day"])
ROW = {"id": 1, "day": "2026-01-02", "at": "2026-01-02T03:04:05Z", "amount": "8.70", "note": 'n "x", é'}
CSV = b'id,day,at,amount,note\n1,2026-01-02,2026-01-02T03:04:05Z,8.70,"n ""x"", \xc3\xa9"\n2,2026-01-03,,,\n'
LINES = "\n".join(json.dumps({**ROW, "id": n}) for n in range(3)).encode()
SCRATCH = LocalStore(mkdtemp(prefix="lakeupsert-fuzz-"))


@dataclass(frozen=True)
class Target:
    """``run`` raises if the bytes find a fault. ``seeds``: bytes that it takes."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def _landing(
    path: str, reading: Reading | None = None, pack: Callable[[bytes], bytes] = bytes
) -> Callable[[bytes], None]:
    """A landing file: each of its rows is accepted or refused with a reason, or the file is, and survey and reading agree."""
    own = reading or Reading()

    def run(data: bytes) -> None:
        with SCRATCH.write(path) as sink:
            sink.write(pack(data))
        try:
            _read(path, own)
        finally:
            SCRATCH.delete([path])

    return run


def _read(path: str, reading: Reading) -> None:
    found = SCRATCH.head(path)
    assert found is not None
    file = LandingInput(path, found.size, found.etag, 0)
    surveyed = survey(SCRATCH, file, reading, SPEC.schema, frozenset())
    assert not surveyed.changed
    try:
        for rows in read_rows(SCRATCH, file, reading, RowRules(SPEC, 1_700_000_000_000_000)):
            assert all(rows.quarantined["reason"].to_pylist())
            rows.accepted.validate(full=True)
    except UnreadableFileError as e:
        assert e.reason
    else:
        assert surveyed.unreadable is None, f"the survey can't read what the reader reads: {surveyed.unreadable}"


def _zipped(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", data)
    return packed.getvalue()


def _avro() -> bytes:
    fields = [{"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"]}]
    fields += [{"name": "day", "type": {"type": "int", "logicalType": "date"}}]
    fields += [{"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}}]
    fields += [{"name": "tags", "type": {"type": "array", "items": "string"}}]
    rows = [{"id": 1, "note": None, "day": date(2026, 1, 2), "amount": Decimal("8.70"), "tags": ["a", "b"]}]
    written = io.BytesIO()
    fastavro.writer(written, {"type": "record", "name": "r", "fields": fields}, rows)
    return written.getvalue()


def _where(data: bytes) -> None:
    condition = all_of(parse_where(data.decode(errors="replace"), SCHEMA, ArrowTerms()))
    if condition is not None:
        SCHEMA.empty_table().filter(condition)


def _assignment(data: bytes) -> None:
    Assignments(SCHEMA, {"note": data.decode(errors="replace")})


def _configuration(data: bytes) -> None:
    parse("/lakeupsert.toml", data, {"HOME": "/", "BUCKET": "b"})


def _message(data: bytes) -> None:
    message = Message.decode(data)
    assert Message.decode(message.encode()) == message


def _kafka(data: bytes) -> None:
    head, _, rest = data.partition(b"\0")
    key = key_of(head)
    for line in (line_of(rest, {"__topic": "t", "__timestamp": 5}), tombstone_line(key, ["id"], {"__offset": 1})):
        assert b"\n" not in line
        assert line


def _chain(data: bytes) -> None:
    """A body of metadata behind a right digest, as a program with other rules might write it."""
    objects = TableObjects(SCRATCH)
    kind, _, body = data.partition(b" ")
    chains = {b"spec": objects.specs, b"ledger": objects.ledger, b"snapshot": objects.snapshots}
    chain: Any = chains.get(kind, objects.partition("day=2026-01-02"))
    try:
        msgspec.json.decode(body)
    except UNREADABLE:
        return
    name = chain.name(0)
    envelope = {"format": 2, "kind": chain._kind, "number": 0, "write_id": "w", "parent": None}
    with SCRATCH.write(name) as sink:
        sink.write(metadata.encode({**envelope, "written_at": "2026-01-02T00:00:00+00:00", "body": msgspec.Raw(body)}))
    try:
        chain.get(0)
    finally:
        SCRATCH.delete([name])


def _footer(data: bytes) -> None:
    for key in (BLOCKS, GROUPS):
        with suppress(pa.ArrowInvalid):
            read_tail(pa.BufferReader(data), "x", key)


def _partition(data: bytes) -> None:
    text = data.decode(errors="surrogateescape").encode("utf-8", "replace").decode()
    name = folder_name("day", text)
    if name is not None:
        assert partition_texts(name) == {"day": text}
        assert "/" not in name


def _envelope(name: str) -> Reading:
    return Reading(envelope=name)  # type: ignore[arg-type]  # a name of `Reading.envelope`


_SOURCE = {
    "connector": "postgresql",
    "ts_ms": 1,
    "lsn": 5,
    "sequence": '["1","2"]',
    "schema": "s",
    "table": "t",
    "txId": 3,
}
DEBEZIUM = [
    {"before": None, "after": ROW, "source": _SOURCE, "op": "c", "ts_ms": 1},
    {"before": ROW, "after": None, "source": _SOURCE, "op": "d", "ts_ms": 1},
    {"schema": {"type": "struct", "fields": []}, "payload": {"before": None, "after": ROW, "op": "u"}},
]
CONFIGURATION = b"""
[tables.sales]
landing = "s3://${BUCKET}/landing"
processed = "/lake/sales"
key = ["id"]
partition_by = ["date(at) as day", "bucket(4, id)"]
superseded_retention = "24h"
bucket = "256MiB"
quarantine_limit = "1%"
[tables.sales.delete]
column = "op"
values = ["D"]
[tables.sales.schema]
id = "bigint"
[tables.sales.read]
envelope = "debezium"
dates = { day = "%Y-%m-%d" }
"""
TARGETS = {
    "csv": Target(
        _landing("f.csv"), (CSV, CSV.replace(b",", b";"), CSV.decode().encode("utf-16"), b"\xef\xbb\xbf" + CSV)
    ),
    "jsonl": Target(_landing("f.jsonl"), (LINES, b'{"id": 1, "note": {"a": [1, null, "x"]}}\n[]\n')),
    "json": Target(_landing("f.json"), (b"[" + LINES.replace(b"\n", b",") + b"]", LINES)),
    "avro": Target(_landing("f.avro"), (_avro(),)),
    "gzip": Target(_landing("f.csv.gz"), (gzip.compress(CSV, mtime=0), gzip.compress(CSV, mtime=0) * 2)),
    "zip": Target(_landing("f.csv.zip"), (_zipped(CSV),)),
    "xz": Target(_landing("f.csv.xz"), (lzma.compress(CSV),)),
    "zlib": Target(_landing("f.csv.gz", pack=lambda data: gzip.compress(data, mtime=0)), (CSV, zlib.compress(CSV))),
    "debezium": Target(
        _landing("f.jsonl", _envelope("debezium")), ("\n".join(map(json.dumps, DEBEZIUM)).encode(), b'{"op": "t"}')
    ),
    "dms": Target(
        _landing("f.jsonl", _envelope("dms")), (json.dumps({"data": ROW, "metadata": {"operation": "load"}}).encode(),)
    ),
    "wal2json": Target(
        _landing("f.jsonl", _envelope("wal2json")),
        (
            json.dumps({"action": "I", "columns": [{"name": "id", "type": "bigint", "value": 1}]}).encode(),
            json.dumps(
                {"change": [{"kind": "update", "table": "t", "columnnames": ["id"], "columnvalues": [1]}], "xid": 4}
            ).encode(),
        ),
    ),
    "singer": Target(
        _landing("f.jsonl", _envelope("singer")),
        (json.dumps({"type": "RECORD", "stream": "s", "record": ROW}).encode(),),
    ),
    "airbyte": Target(
        _landing("f.jsonl", _envelope("airbyte")),
        (json.dumps({"type": "RECORD", "record": {"stream": "s", "data": ROW, "emitted_at": 1}}).encode(),),
    ),
    "where": Target(
        _where,
        (b"id = 1 and day >= '2026-01-02'", b"note in ('a', 'b') or not (amount is null)", b"at between '2026' and 5"),
    ),
    "assignment": Target(_assignment, (b"note || 'x'", b"CASE WHEN amount > 1.5 THEN upper(note) ELSE NULL END")),
    "configuration": Target(_configuration, (CONFIGURATION,)),
    "message": Target(_message, (Message("t", "day=2026-01-02", 3, None, None).encode().encode(),)),
    "kafka": Target(_kafka, (b'{"id": 1}\0{"id": 1, "note": "x"}', b"key\0\n\n[1]", b'"k"\0{"a":\n1}')),
    "metadata": Target(
        _chain,
        (
            b"spec " + msgspec.json.encode(SPEC),
            b'manifest {"partition": "day=2026-01-02", "merged": 3, "spec_version": 0, "buckets": []}',
            b'snapshot {"batch": 0, "spec_version": 0, "partitions": {}}',
            b'ledger {"kind": "batch", "batch_id": "b", "received_at": 1, "spec_version": 0}',
        ),
    ),
    "footer": Target(_footer, (b"PAR1" + bytes(40) + (8).to_bytes(4, "little") + b"PAR1",)),
    "partition": Target(_partition, (b"2026-01-02", b"a/b%2F=\xff", "é {x}".encode())),
}
ALLOWED = (LakeupsertError, UnreadableFileError, DamagedTableError)
"""What a target may raise for any bytes."""
