"""Messages of Kafka as lines of JSON: their bytes as they came, with Kafka's own columns behind them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from lakeupsert.decoding import UNREADABLE, decoder_of

TIMESTAMP = "__kafka_timestamp"
COLUMNS = ("__kafka_topic", "__kafka_partition", "__kafka_offset", TIMESTAMP, "__kafka_key")
"""Columns of a row about its message, each if the configuration of its table names the column."""
TOMBSTONE = "__kafka_tombstone"
"""The column that is true in the row of a tombstone, and that no other row has."""
_WHITE = b" \t\r\n"
_any, _raw = decoder_of(object), decoder_of(msgspec.Raw)


def line_of(value: bytes, more: Mapping[str, object]) -> bytes:
    """The line of a landing file for a message, with ``more`` fields behind its own.

    Only an object without a line end is a line as it is. After another beginning the whole file could be an array, and an empty
    line would be no row at all.
    """
    text = value.strip(_WHITE)
    if text[:1] != b"{":
        return refused_line(value)
    if b"\n" in text:
        try:
            _raw.decode(text)
        except UNREADABLE:
            return refused_line(value)
        text = text.replace(b"\n", b" ")  # no text within JSON has one
    if more and text[-1:] == b"}":
        own = text[:-1].rstrip(_WHITE)
        return own + (b"" if own == b"{" else b",") + _object(more)[1:]
    return text


def refused_line(value: bytes) -> bytes:
    """A text with all bytes of a message; surrogates stand for bytes outside UTF-8. Readers refuse it as a row."""
    return json.dumps(value.decode(errors="surrogateescape")).encode()


def tombstone_line(key: object, columns: Sequence[str], more: Mapping[str, object]) -> bytes:
    """The line that deletes the row of a key, which is an object with the ``columns`` of the table's key, or the only one."""
    if isinstance(key, dict) and key.keys() == {"schema", "payload"}:
        key = key["payload"]
    if not isinstance(key, dict):
        if key is None or len(columns) > 1:
            return refused_line(f"The tombstone of the key {key!r}".encode())
        key = {columns[0]: key}
    return _object({**key, **more, TOMBSTONE: True})


def key_of(data: bytes | None) -> object:
    """A message's key: an object or a text of JSON, else its text."""
    if data is None:
        return None
    with suppress(*UNREADABLE):
        if type(value := _any.decode(data)) in (dict, str):
            return value
    return data.decode(errors="backslashreplace")


def _object(fields: Mapping[str, object]) -> bytes:
    stamp = fields.get(TIMESTAMP)
    with suppress(OverflowError, ValueError):  # a time that no column holds stays a number, which the column refuses
        fields = {**fields, TIMESTAMP: datetime.fromtimestamp(stamp / 1000, UTC)} if isinstance(stamp, int) else fields
    return msgspec.json.encode(fields)
