"""Messages as rows: the row inside the message, and the message's own fields as more columns, under the tool's names for them.

`debezium` returns what Debezium's ExtractNewRecordState returns with `add.fields`, and the event's position in the log. The
others read JSON: `dms` messages of AWS DMS, `Wal2json` those of a plugin of PostgreSQL, `singer` and `airbyte` those of taps
and sources. Another envelope is a function, and an entry of `_UNWRAP` and of `misnamed._WRAPPED`.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from lakeupsert.config import EnvelopeName, Reading
from lakeupsert.landing.formats.positions import LOG_POSITION, commit_position, log_position

Row = dict[str, object]
Skipped = str
"""The kind of a message that holds no row and changes none, for example ``heartbeat``."""
NOTHING: Skipped = ""
"""A place that no row has."""

TABLE_NAMES = ("__source_table", "__table_name", "__table", "__stream")
"""The columns with the name of a row's table."""


class NoEnvelopeError(Exception):
    """The message is not of this kind, or does not hold a row; says why.

    ``part``: the part of the message that it is about, if the message has others.
    """

    part: object = None


CONTROL_RECORD = "control record"
"""The kind of messages of AWS DMS that have no row."""
NEW_TABLE = 0
"""The version that a control record of AWS DMS begins if it drops or truncates the source table. Rows have none, so that it is no
lower than theirs in a first batch, which often begins with such a record, and in every later one it is."""


class TruncateError(NoEnvelopeError):
    """The message empties its source table, which no row can express.

    ``event``: the event's own fields, as a row has them. ``version``: only rows of lower versions of a stream go.
    """

    def __init__(self, message: str, event: Row, version: int | None = None) -> None:
        super().__init__(message)
        self.event = event
        self.version = version


Found = Row | Skipped | NoEnvelopeError
"""A row of a message, the kind of one without a row, or why a part of a message has none."""


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
    own: Row = {f"__{name.replace('-', '_')}": value for name, value in _scalars(metadata)}
    if metadata.get("record-type") == "control":
        operation = str(metadata.get("operation")).lower()
        if operation.removesuffix("-table") in ("drop", "truncate"):
            why = f"The control record {operation} of AWS DMS says that all earlier rows of the table are gone."
            raise TruncateError(why, own, NEW_TABLE)
        return CONTROL_RECORD
    data = message.get("data")
    if type(data) is not dict:
        raise NoEnvelopeError("Not a message of AWS DMS: its `data` is not an object.")
    return data | own


class Wal2json:
    """Messages of wal2json, of versions 1 (a transaction) and 2 (a change), in the order in which they were written.

    ``__action`` is I, U or D in both. An update of a row's identity, which is its key, or with REPLICA IDENTITY FULL the whole
    row, is a delete of the old one and then the new one.
    """

    def __init__(self, *, positions: bool) -> None:
        self._positions = positions
        self._commit: object = None
        self._rows = 0

    def __call__(self, message: object) -> Sequence[Found]:
        if type(message) is not dict or not ("action" in message or type(message.get("change")) is list):
            raise NoEnvelopeError("Not a message of wal2json: it has no `action`, and no list `change`.")
        if "action" in message:
            return self._version_2(message)
        self._begin(message)
        found: list[Found] = []
        for change in message["change"]:
            try:
                rows = self._rows_of_version_1(message, change)
            except NoEnvelopeError as e:  # the other changes of the transaction count
                e.part = change
                rows = [e]
            found += [*rows, NOTHING][:2]  # so only the two rows of one change follow each other at once
        return found or ["transaction marker"]

    def _begin(self, message: Row) -> None:
        self._commit, self._rows = message.get("nextlsn"), 0

    def _version_2(self, message: Row) -> Sequence[Found]:
        action = message["action"]
        if action in ("B", "C"):
            self._begin(message if action == "B" else {})
            return ["transaction marker"]
        new, old = (_by_name(message.get(part)) for part in ("columns", "identity"))
        return self._rows_of(str(action), message, new, old)

    def _rows_of_version_1(self, message: Row, change: object) -> Sequence[Found]:
        if type(change) is not dict:
            raise NoEnvelopeError("A change of wal2json is not an object.")
        old = change.get("oldkeys")
        new = _paired(change.get("columnnames"), change.get("columnvalues"))
        before = _paired(old.get("keynames"), old.get("keyvalues")) if type(old) is dict else {}
        action = {"insert": "I", "update": "U", "delete": "D", "truncate": "T", "message": "M"}.get(
            str(change.get("kind")), ""
        )
        return self._rows_of(action, {**message, **change}, new, before)

    def _rows_of(self, action: str, message: Row, new: Row, old: Row) -> Sequence[Found]:
        own = {f"__{name}": value for name, value in _scalars(message) if name not in ("kind", "action")}
        if action == "M":
            return ["message"]
        if action == "T":
            raise TruncateError(
                f"Table {message.get('schema')}.{message.get('table')} was truncated at the source.", own
            )
        if action not in ("I", "U", "D") or not (old if action == "D" else new):
            raise NoEnvelopeError(f"Not a change of wal2json: {action or 'no action'}, and no row.")
        if action == "D":
            return [self._placed({**old, "__action": "D", **own})]
        row = self._placed
        is_moved = any(name in new and new[name] != value for name, value in old.items())
        before = [row({**old, "__action": "D", **own})] if is_moved else []
        return [*before, row({**old, **new, "__action": action, **own})]

    def _placed(self, row: Row) -> Row:
        if self._positions and (position := commit_position(self._commit, self._rows)) is not None:
            row[LOG_POSITION] = position
        self._rows += 1
        return row


def _by_name(columns: object) -> Row:
    """The columns of version 2 as a row."""
    found = columns if type(columns) is list else []
    if not all(type(one) is dict and "name" in one for one in found):
        raise NoEnvelopeError("The columns in a message of wal2json are not a list of objects with names.")
    return {str(one["name"]): one.get("value") for one in found}


def _paired(names: object, values: object) -> Row:
    """The columns of version 1 as a row."""
    if type(names) is not list or type(values) is not list or len(names) != len(values):
        if names is None and values is None:
            return {}
        raise NoEnvelopeError("A change of wal2json does not have a value for each name.")
    return dict(zip(map(str, names), values, strict=True))


def singer(message: object) -> Row | Skipped:
    """`record`, and the message's own fields. SCHEMA and STATE have no row."""
    kind = message.get("type") if type(message) is dict else None
    if type(message) is not dict or type(kind) is not str:
        raise NoEnvelopeError("Not a message of Singer: it has no `type`.")
    own: Row = {f"__{name}": value for name, value in _scalars(message) if name != "type"}
    if kind == "ACTIVATE_VERSION":
        version = message.get("version")
        why = f"Stream {message.get('stream')} begins version {version} (ACTIVATE_VERSION): its rows of earlier ones are gone."
        raise TruncateError(why, own, version if type(version) is int else None)
    if kind in ("SCHEMA", "STATE"):
        return f"{kind.lower()} message"
    row = message.get("record")
    if kind != "RECORD" or type(row) is not dict:
        raise NoEnvelopeError(f"A message {kind} of Singer has no row that can be read here.")
    return row | own


def airbyte(message: object) -> Row | Skipped:
    """`data`, and the record's own fields; or `_airbyte_data` of a destination's raw table, and its other columns."""
    if type(message) is dict and "_airbyte_data" in message:
        data, own = message["_airbyte_data"], dict(_scalars(message))
        own.pop("_airbyte_data", None)
    elif type(message) is dict and type(message.get("type")) is str:
        if message["type"] != "RECORD":
            return f"{message['type'].lower()} message"
        record = message.get("record")
        data = record.get("data") if type(record) is dict else None
        own = {f"__{name}": value for name, value in _scalars(record)}
    else:
        raise NoEnvelopeError("Not a message of Airbyte: it has no `type`, and no `_airbyte_data`.")
    if type(data) is not dict:
        raise NoEnvelopeError("The row in a message of Airbyte is not an object.")
    return data | own


def _scalars(fields: object) -> Sequence[tuple[str, object]]:
    return [(n, v) for n, v in fields.items() if type(v) not in (dict, list)] if type(fields) is dict else []


Unwrap = Callable[[object], Row | Skipped | Sequence[Found]]
"""From a message to its row, kind, or several of both. It takes the messages of one file, one after another."""

_UNWRAP: dict[EnvelopeName, Callable[[Reading], Unwrap]] = {
    "debezium": lambda reading: partial(debezium, positions=reading.positions),
    "dms": lambda reading: dms,
    "wal2json": lambda reading: Wal2json(positions=reading.positions),
    "singer": lambda reading: singer,
    "airbyte": lambda reading: airbyte,
}


RowsOf = Callable[[object], Sequence[Found]]


def unwrap_of(reading: Reading) -> RowsOf | None:
    """The function that takes the rows of a file out of the envelope of `reading`; None if they are in none."""
    if reading.envelope is None:
        return None
    unwrap = _UNWRAP[reading.envelope](reading)

    def rows_of(message: object) -> Sequence[Found]:
        found = unwrap(message)
        return [found] if isinstance(found, dict | str) else found

    return rows_of
