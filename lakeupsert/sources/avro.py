"""Messages of Avro in the wire format of a schema registry (0, the schema's number in four bytes, the value), as container files.

The bytes of a record go into its file as they came. Kafka's own columns are more fields behind those of the schema.
"""

import io
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import fastavro
from isal import isal_zlib

from lakeupsert.errors import TryAgainError
from lakeupsert.landing.formats.avrofile import DAMAGED, HEADER, without
from lakeupsert.retries import SOURCE_ANSWER_SECONDS
from lakeupsert.sources.draft import Draft

HEAD_BYTES = 5
"""Before the value of a message."""
_BLOCK_BYTES = 1 << 20
_RAW = -15  # zlib's number for deflate without a header


@dataclass(frozen=True)
class Schema:
    """A schema of Avro: its ``text`` for a file, and ``parsed`` without logical types, to read a value."""

    text: bytes
    parsed: Any


class Registry:
    """The schemas of a registry, each asked for once."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address, self._headers = address.rstrip("/"), dict(headers)
        self._known: dict[int, Schema | None] = {}

    def read(self, data: bytes) -> tuple[Schema, object] | None:
        """The schema of a message or key, and the value; None if the bytes do not fit a schema that is known."""
        schema = self._schema_of(data)
        value = None if schema is None else _read(schema, data)
        return None if schema is None or value is None else (schema, value)

    def _schema_of(self, data: bytes) -> Schema | None:
        if data[:1] != b"\0" or len(data) < HEAD_BYTES:
            return None
        number = int.from_bytes(data[1:HEAD_BYTES])
        if number not in self._known:
            self._known[number] = self._get(number)
        return self._known[number]

    def _get(self, number: int) -> Schema | None:
        request = Request(f"{self._address}/schemas/ids/{number}", headers=self._headers)
        try:
            with urlopen(request, timeout=SOURCE_ANSWER_SECONDS) as answer:
                found = json.load(answer)
        except (OSError, ValueError) as e:
            if isinstance(e, HTTPError) and e.code == 404:
                return None
            raise TryAgainError(
                "registry-unreachable",
                f"The registry {self._address} did not give schema {number}: {e}.",
                next="start the command again when the registry answers",
            ) from e
        if found.get("schemaType", "AVRO") != "AVRO" or found.get("references"):
            return None
        try:
            text = found["schema"]
            return Schema(text.encode(), fastavro.parse_schema(without(json.loads(text), "default", "logicalType")))
        except DAMAGED:
            return None


def _read(schema: Schema, data: bytes) -> object:
    """The value of a message; None if the bytes behind its number are not exactly one."""
    stream = io.BytesIO(data)
    stream.seek(HEAD_BYTES)
    try:
        value: object = fastavro.schemaless_reader(stream, schema.parsed, None)
    except DAMAGED:
        return None
    return value if stream.tell() == len(data) else None


class AvroDraft(Draft):
    """The next landing file of records of one schema."""

    ending = ".avro"

    def __init__(self, schema: Schema, seconds: float, rows: int, size: int) -> None:
        self.schema = schema
        super().__init__(seconds, rows, size)

    def _begin(self) -> None:
        super()._begin()
        self._sync, self._block, self._records = secrets.token_bytes(16), bytearray(), 0
        meta = {"avro.schema": self.schema.text, "avro.codec": b"deflate"}
        fastavro.schemaless_writer(self._file, HEADER, {"magic": b"Obj\1", "meta": meta, "sync": self._sync})

    def _write(self, record: bytes) -> None:
        self._block += record
        self._records += 1
        if len(self._block) >= _BLOCK_BYTES:
            self._end()

    def _end(self) -> None:
        if self._records:
            data = isal_zlib.compress(bytes(self._block), 1, _RAW)
            fastavro.schemaless_writer(self._file, "long", self._records)
            fastavro.schemaless_writer(self._file, "long", len(data))
            self._file.write(data + self._sync)
            self._block, self._records = bytearray(), 0
