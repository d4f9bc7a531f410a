"""Change events as rows: the row inside the event, and the event's own fields as more columns, under the tool's names for them.

`debezium` returns what Debezium's ExtractNewRecordState returns with `add.fields`, and the event's position in the log; `dms`
reads the JSON messages of AWS DMS.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal

from lakeupsert.config import Reading
from lakeupsert.landing.formats.positions import LOG_POSITION, log_position

Row = dict[str, object]
Skipped = Literal["control record", "heartbeat", "message", "schema change", "tombstone", "transaction marker"]
"""The kind of a message that holds no row and changes none."""


TABLE_NAMES = ("__source_table", "__table_name")
"""The columns with the name of a row's table."""


class NoEnvelopeError(Exception):
    """The message is not of this kind, or does not hold a row; says why."""


class TruncateError(NoEnvelopeError):
    """The message empties its source table, which no row can express.

    ``event``: the event's own fields, as a row has them.
    """

    def __init__(self, message: str, event: Row) -> None:
        super().__init__(message)
        self.event = event


def debezium(message: object, *, positions: bool = False) -> Row | Skipped:
    """The row after the change, or before it for a delete; for a message without a row, its kind.

    ``positions``: with the column `LOG_POSITION`, if the event has what it is made of.

    Raises NoEnvelopeError, and for a truncate TruncateError.
    """
    if type(message) is dict and message.keys() == {"schema", "payload"}:
        message = message["payload"]
    if message is None:
        return "tombstone"  # the delete itself came before
    if type(message) is not dict:
        raise NoEnvelopeError("Not a change event of Debezium: it is not an object.")
    if "op" not in message:
        return _kind_without_op(message)
    op, after, before = message["op"], message.get("after"), message.get("before")
    if op == "m" and "after" not in message:
        return "message"  # an application logged it
    source = message.get("source")
    if op == "t":
        names = [str(source[name]) for name in ("schema", "table") if source.get(name)] if type(source) is dict else []
        why = f"Table {'.'.join(names) or '(not named)'} was truncated at the source (op t)."
        raise TruncateError(why, {f"__source_{name}": value for name, value in _scalars(source)})
    row = before if op == "d" or after is None else after
    if row is not None and type(row) is not dict:
        raise NoEnvelopeError(f"The row in a change event of Debezium is {type(row).__name__}, not an object.")
    position = log_position(source) if positions else None
    return (row or {}) | {
        "__op": op,
        "__ts_ms": message.get("ts_ms"),
        **{f"__source_{name}": value for name, value in _scalars(source)},
        **({} if position is None else {LOG_POSITION: position}),
    }


def _kind_without_op(message: Row) -> Skipped:
    kind = _kind_of(message.keys())
    if kind is None or (kind == "transaction marker" and message["status"] not in ("BEGIN", "END")):
        raise NoEnvelopeError("Not a change event of Debezium: it has no `op`.")
    return kind


def _kind_of(fields: Collection[str]) -> Skipped | None:
    """The kind of a message without `op`. A row that was flattened may have some of these fields, but never these only."""
    names = {*fields} - {"ts_us", "ts_ns"}
    if names == {"ts_ms"}:
        return "heartbeat"
    if {"status", "id", "event_count"} <= names <= {"status", "id", "event_count", "data_collections", "ts_ms"}:
        return "transaction marker"
    of_schema = {"source", "position", "ts_ms", "databaseName", "schemaName", "ddl", "tableChanges"}
    return "schema change" if "source" in names <= of_schema and names & {"ddl", "tableChanges"} else None


def has_no_row(fields: Collection[str]) -> bool:
    """Whether messages of Debezium with these fields never have a row."""
    return _kind_of(fields) is not None or ({"op", "message"} <= {*fields} and "after" not in fields)


def dms(message: object) -> Row | Skipped:
    """`data`, and `metadata` under names that begin with two underscores. Control records say, for example, that a table was
    created."""
    if type(message) is not dict or type(metadata := message.get("metadata")) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: it has no `metadata`.")
    if metadata.get("record-type") == "control":
        return "control record"
    data = message.get("data")
    if type(data) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: its `data` is not an object.")
    return data | {f"__{name.replace('-', '_')}": value for name, value in _scalars(metadata)}


def _scalars(fields: object) -> Sequence[tuple[str, object]]:
    return [(n, v) for n, v in fields.items() if type(v) not in (dict, list)] if type(fields) is dict else []


Unwrap = Callable[[object], Row | Skipped]


def unwrap_of(reading: Reading) -> Unwrap | None:
    """The function that takes rows out of the envelope of `reading`; None if they are in none."""
    if reading.envelope == "debezium":
        return partial(debezium, positions=reading.positions)
    return dms if reading.envelope else None
