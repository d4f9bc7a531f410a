"""Change events as rows: the row inside the event, and the event's own fields as more columns, under the tool's names for them.

`debezium` returns what Debezium's ExtractNewRecordState returns with `add.fields`, and the event's position in the log; `dms`
reads the JSON messages of AWS DMS.
"""

from collections.abc import Callable, Sequence

from lakeupsert.landing.formats.positions import LOG_POSITION, log_position

Row = dict[str, object]


class NoEnvelopeError(Exception):
    """The message is not of this kind, or does not hold a row; says why."""


def debezium(message: object) -> Row | None:
    """The row after the change, or before it for a delete. None for a message without a row.

    These are tombstones (the delete itself came before) and messages that an application logged (op m).
    """
    if type(message) is dict and message.keys() == {"schema", "payload"}:
        message = message["payload"]
    if message is None:
        return None
    if type(message) is not dict or "op" not in message:
        raise NoEnvelopeError("Not a change event of Debezium: it has no `op`.")
    op, after, before = message["op"], message.get("after"), message.get("before")
    if op == "m":
        return None
    if op == "t":
        raise NoEnvelopeError("A truncate of the source table is not supported: nothing was deleted.")
    row = before if op == "d" or after is None else after
    if row is not None and type(row) is not dict:
        raise NoEnvelopeError(f"The row in a change event of Debezium is {type(row).__name__}, not an object.")
    source = message.get("source")
    return (row or {}) | {
        "__op": op,
        "__ts_ms": message.get("ts_ms"),
        **{f"__source_{name}": value for name, value in _scalars(source)},
        **({} if (position := log_position(source)) is None else {LOG_POSITION: position}),
    }


def dms(message: object) -> Row | None:
    """`data`, and `metadata` under names that begin with two underscores. None for control records (a table was created)."""
    if type(message) is not dict or type(metadata := message.get("metadata")) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: it has no `metadata`.")
    if metadata.get("record-type") == "control":
        return None
    data = message.get("data")
    if type(data) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: its `data` is not an object.")
    return data | {f"__{name.replace('-', '_')}": value for name, value in _scalars(metadata)}


def _scalars(fields: object) -> Sequence[tuple[str, object]]:
    return [(n, v) for n, v in fields.items() if type(v) not in (dict, list)] if type(fields) is dict else []


Unwrap = Callable[[object], Row | None]
UNWRAP: dict[str, Unwrap] = {"debezium": debezium, "dms": dms}
