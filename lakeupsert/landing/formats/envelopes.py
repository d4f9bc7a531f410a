"""Change events as rows: what a tool wraps around each row is flattened into columns, by the names that the tool has for them.

`debezium` gives what Debezium's ExtractNewRecordState gives with `add.fields`; `dms` takes the JSON messages of AWS DMS.
"""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


class NoEnvelopeError(Exception):
    """The message is none of this kind, or one that no row can be made of; says why."""


def debezium(message: Any) -> Row | None:
    """The row after the change, of a delete the one before it; None where the message holds none by design.

    Those are tombstones (the delete itself came before) and what an application logged (op m).
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
        raise NoEnvelopeError("A truncate of the source table, which no row can say: nothing was deleted.")
    row = before if op == "d" or after is None else after
    if row is not None and type(row) is not dict:
        raise NoEnvelopeError(f"The row in a change event of Debezium is no object but {type(row).__name__}.")
    source = message.get("source")
    return (row or {}) | {
        "__op": op,
        "__ts_ms": message.get("ts_ms"),
        **{f"__source_{name}": value for name, value in _simple(source)},
    }


def dms(message: Any) -> Row | None:
    """`data`, and `metadata` under names that begin with two underscores; None of control records (a table was created)."""
    metadata = message.get("metadata") if type(message) is dict else None
    if type(metadata) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: it has no `metadata`.")
    if metadata.get("record-type") == "control":
        return None
    data = message.get("data")
    if type(data) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: its `data` is no object.")
    return data | {f"__{name.replace('-', '_')}": value for name, value in _simple(metadata)}


def _simple(fields: Any) -> Sequence[tuple[str, Any]]:
    return [(n, v) for n, v in fields.items() if type(v) not in (dict, list)] if type(fields) is dict else []


Unwrap = Callable[[Any], Row | None]
UNWRAP: dict[str, Unwrap] = {"debezium": debezium, "dms": dms}
