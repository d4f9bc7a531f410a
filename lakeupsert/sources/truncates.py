"""A truncate becomes deletes: one for each row that came from the table before.

Reads     `latest` of the tables that take the source's landing files
Writes    nothing
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import discover
from lakeupsert.pipeline.merge.latest import latest
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.duckdb import identifier, literal
from lakeupsert.retries import SOURCE_TICK_SECONDS

_PLACE = ("name", "db", "schema", "table")
"""The parts of an event's `source` that say of which table it is. PostgreSQL's has all, MariaDB's no schema."""
_EXACT = Context(prec=100)
_PATIENCE_SECONDS = 20.0
"""How long the engine waits for a batch. It can begin again behind what has landed, which takes some seconds."""
Row = dict[str, Any]  # decoded JSON of any kind


class _Event(NamedTuple):
    schema: Row
    payload: Row

    @classmethod
    def parse(cls, line: bytes) -> "_Event":
        return cls(**msgspec.json.decode(line))  # noqa: TID251 - as Debezium wrote it

    @property
    def place(self) -> dict[str, str]:
        source = self.payload["source"]
        return {name: source[name] for name in _PLACE if source.get(name)}

    def delete(self, schema: Row, row: Row) -> bytes:
        """The delete of a row at the place of this truncate."""
        payload = {**self.payload, "op": "d", "before": row, "after": None}
        return msgspec.json.encode({"schema": schema, "payload": payload})


class Truncates:
    """Finds the rows that a truncate deletes.

    Args:
        source: its name.
        tables: all that take its landing files.
        stop: once set, it waits no longer.
    """

    def __init__(self, source: str, tables: Sequence[OpenTable], stop: Stop) -> None:
        self._source, self._tables, self._stop = source, tables, stop

    def deletes(self, truncate: bytes, waiting: Iterable[bytes]) -> Iterator[bytes]:
        """A line for each stored row of the truncated table, and for each of the ``waiting`` lines, which have not landed.

        It waits until batches have taken all landing files of the source. Raises TryAgainError (``truncate-waits``) if that takes
        long, and ConfigurationError (``truncate-unapplied``) if nobody can say which rows of a table came from the truncated one.
        """
        event = _Event.parse(truncate)
        for table in self._tables:
            yield from self._of_stored_rows(event, table)
        for one in map(_Event.parse, waiting):
            if one.place == event.place and one.payload["op"] != "d":
                yield event.delete(one.schema, one.payload["after"])

    def _of_stored_rows(self, event: _Event, table: OpenTable) -> Iterator[bytes]:
        where = ".".join([*event.place.values()][-2:])  # as `tables` names it
        end = clock.elapsed() + _PATIENCE_SECONDS
        while files := sum(one.path.startswith(f"{self._source}/") for one in discover(table).inputs):
            if clock.elapsed() < end and not self._stop.wait(SOURCE_TICK_SECONDS):
                continue
            raise TryAgainError(
                "truncate-waits",
                f"{where} was truncated. `capture` deletes its rows once table {table.name!r} has all of them: "
                f"{count(files, 'file')} of source {self._source!r} {'waits' if files == 1 else 'wait'} for a batch.",
                next="keep `lakeupsert ingest` running, or run `lakeupsert run`",
            )
        if table.history.head_spec() is None:
            return
        spec = table.history.existing_spec()

        def own_name(name: str) -> str:
            return spec.table_name_of(table.settings.reading.table_name_of(name))

        place = {own_name(f"__source_{name}"): value for name, value in event.place.items()}
        if not place.keys() <= {*spec.schema.names}:
            raise ConfigurationError(
                "truncate-unapplied",
                f"{where} was truncated, and table {table.name!r} does not say which of its rows came from there: it lacks "
                f"{', '.join(sorted(place.keys() - {*spec.schema.names}))}. Nothing from the truncate on has landed.",
                next='begin again with another source, see "Begin again" in docs/CAPTURE.md',
            )
        computed_from = (name for one in spec.partition_from for name in one.sources)
        named = {*spec.key, *spec.all_orders, *spec.partition_by, *computed_from}
        in_file = {own_name(field["field"]): field["field"] for field in _row_fields(event.schema)}
        columns = [name for name in in_file if name in named]
        condition = " AND ".join(f"{identifier(name)} = {literal(value)}" for name, value in place.items())
        for rows in to_arrow(latest(table, condition), condition, columns=columns):
            stated = [_stated(in_file[name], column) for name, column in zip(columns, rows.columns, strict=True)]
            schema = _with_row(event.schema, [field for field, _ in stated])
            for values in zip(*(values for _, values in stated), strict=True):
                yield event.delete(schema, dict(zip(map(in_file.__getitem__, columns), values, strict=True)))


def _row_fields(schema: Row) -> list[Row]:
    return next(one["fields"] for one in schema["fields"] if one["field"] == "after")


def _with_row(schema: Row, fields: Sequence[Row]) -> Row:
    """The schema of an event whose rows have these fields."""
    others = [one for one in schema["fields"] if one["field"] not in ("before", "after")]
    return {**schema, "fields": [*others, {"type": "struct", "optional": True, "fields": fields, "field": "after"}]}


def _stated(name: str, column: pa.Array) -> tuple[Row, list[object]]:
    """A column as Debezium writes it, so that `landing.formats.connect` reads the same values: its field, and its values."""
    t, type_ = pa.types, column.type
    if t.is_decimal(type_):
        given = {"scale": str(type_.scale), "connect.decimal.precision": str(type_.precision)}
        field = _field(name, "bytes", "org.apache.kafka.connect.data.Decimal") | {"parameters": given}
        return field, [None if v is None else _unscaled(v, type_.scale) for v in column.to_pylist()]
    if t.is_binary(type_) or t.is_large_binary(type_):
        return _field(name, "bytes"), [None if v is None else base64.b64encode(v).decode() for v in column.to_pylist()]
    if t.is_timestamp(type_) and type_.tz:
        return _field(name, "string", f"{_TIME}ZonedTimestamp"), pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ").to_pylist()
    for is_one, kind, meaning, as_read in _MOMENTS:
        if is_one(type_):
            return _field(name, kind, f"{_TIME}{meaning}"), column.cast(as_read).cast(kind).to_pylist()
    kind = next((kind for is_one, kind in _PLAIN if is_one(type_)), "string")
    return _field(name, kind), column.to_pylist()


def _field(name: str, kind: str, meaning: str | None = None) -> Row:
    return {"type": kind, "optional": True, "field": name} | ({"name": meaning} if meaning else {})


def _unscaled(value: Decimal, scale: int) -> str:
    number = int(value.scaleb(scale, _EXACT))
    return base64.b64encode(number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)).decode()


_TIME = "io.debezium.time."
_MOMENTS: tuple[tuple[Callable[[pa.DataType], bool], str, str, pa.DataType], ...] = (
    (pa.types.is_date, "int32", "Date", pa.date32()),
    (pa.types.is_time, "int64", "NanoTime", pa.time64("ns")),
    (lambda type_: type_ == pa.timestamp("ns"), "int64", "NanoTimestamp", pa.timestamp("ns")),
    (pa.types.is_timestamp, "int64", "MicroTimestamp", pa.timestamp("us")),
)
_PLAIN = ((pa.types.is_integer, "int64"), (pa.types.is_floating, "double"), (pa.types.is_boolean, "boolean"))
