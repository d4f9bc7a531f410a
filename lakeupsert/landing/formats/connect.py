"""Kafka Connect's types, as the `schema` part of a message names them: 19724 with `io.debezium.time.Date` is 2024-01-02.

A column of another type than that of its values keeps what the message has: a whole number stays one, and text stays text.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import cache, lru_cache, partial
from typing import Any

import msgspec
import pyarrow as pa

from lakeupsert.landing.formats.inference import convert_text
from lakeupsert.landing.formats.nested import nulls
from lakeupsert.landing.formats.unavailable import is_unavailable
from lakeupsert.rows.convert import Converted, convert
from lakeupsert.table.types import decimal_type, is_number, is_text

Schema = Mapping[str, Any]  # decoded JSON of any kind
Values = Sequence[Any]
"""Decoded JSON values of any kind, or null."""
_QUARANTINED = "lakeupsert.Row"
"""The name of the schema that a row has in quarantine, where it has left its envelope."""
_EXACT = Context(prec=10_000)
_VARIABLE = pa.decimal128(38, 18)
"""Of numbers that have each a scale of their own, or more digits than any type; Spark's type for such."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """How a message writes the values of a type that JSON lacks.

    Attributes:
        type: the type of a new column.
        fits: whether a column of a type takes the values, instead of what the message has.
        decode: converts to such a type, like `rows.convert.convert`.
    """

    type: pa.DataType
    fits: Callable[[pa.DataType], bool]
    decode: Callable[[Values, pa.DataType], Converted]


class Encoded:
    """One value as the message has it, and its encoding."""

    __slots__ = ("encoding", "value")

    def __init__(self, encoding: Encoding, value: object) -> None:
        self.encoding = encoding
        self.value = value


@dataclass(frozen=True)
class Meaning:
    """What the values of a column are. ``wrap`` puts `Encoded` around the parts of a value that need it; None if no part does."""

    type: pa.DataType
    wrap: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class RowSchema:
    """What the columns of a row are.

    Attributes:
        fields: the schemas of the columns that need them in quarantine.
    """

    meanings: Mapping[str, Meaning] = field(default_factory=dict)
    fields: Sequence[Schema] = ()

    def wraps(self, name: str) -> bool:
        return (meaning := self.meanings.get(name)) is not None and meaning.wrap is not None

    def wrap(self, name: str, value: object) -> object:
        meaning = self.meanings.get(name)
        return value if value is None or meaning is None or meaning.wrap is None else meaning.wrap(value)

    def kept(self, row: object) -> object:
        """The row as quarantine keeps it, so that `row_of` and `schema_of` know it again."""
        if not self.fields:
            return row
        return {"payload": row, "schema": {"name": _QUARANTINED, "type": "struct", "fields": self.fields}}


NO_SCHEMA = RowSchema()


def schema_of(message: object) -> RowSchema:
    """The columns of the row in a message, by the names that `envelopes.debezium` gives them."""
    if type(message) is not dict or message.keys() != {"schema", "payload"} or not message["schema"]:
        return NO_SCHEMA
    return _row_schema(msgspec.json.encode(message["schema"], enc_hook=str))


def row_of(message: object) -> Any:
    """The row that was kept in quarantine with its schema; any other object itself, and None if it is none."""
    if type(message) is not dict:
        return None
    schema = message["schema"] if message.keys() == {"schema", "payload"} else None
    return message["payload"] if type(schema) is dict and schema.get("name") == _QUARANTINED else message


@lru_cache(maxsize=64)
def _row_schema(encoded: bytes) -> RowSchema:
    """All messages of a topic have the same schema until the table changes."""
    schema = msgspec.json.decode(encoded)  # noqa: TID251 - of no class
    meanings, kept = {}, []
    for one in _columns(schema):
        if meaning := _meaning(one):
            meanings[one["field"]] = meaning
            kept += [one] if meaning.wrap else []
    return RowSchema(meanings, kept)


def _columns(schema: object) -> list[Schema]:
    fields = {one["field"]: one for one in _fields(schema)}
    if type(schema) is dict and schema.get("name") == _QUARANTINED:
        return [*fields.values()]
    own = [{**fields[name], "field": f"__{name}"} for name in ("op", "ts_ms") if name in fields]
    source = [{**one, "field": f"__source_{one['field']}"} for one in _fields(fields.get("source"))]
    return [*_fields(fields.get("after") or fields.get("before")), *own, *source]


def _fields(schema: object) -> list[Schema]:
    found = schema.get("fields") if type(schema) is dict else None
    return [one for one in found if type(one) is dict and type(one.get("field")) is str] if type(found) is list else []


def _meaning(schema: object) -> Meaning | None:
    """None if the schema is not one of Kafka Connect, or its values need none."""
    if type(schema) is not dict:
        return None
    kind, name, parameters = str(schema.get("type")), str(schema.get("name")), schema.get("parameters")
    encoding = _ENCODINGS.get((kind, name), _BYTES if kind == "bytes" else None)
    if (kind, name) == ("bytes", "org.apache.kafka.connect.data.Decimal"):
        given = parameters if type(parameters) is dict else {}
        encoding = _decimal(str(given.get("scale")), str(given.get("connect.decimal.precision", 38)))
    if encoding is None:
        return Meaning(_PLAIN[kind]) if kind in _PLAIN else _nested(schema)
    return Meaning(encoding.type, partial(Encoded, encoding))


def _part(schema: object) -> Meaning | None:
    """Of a value within a list or an object. Bytes stay base64 there, which `reconcile --deep` can compare."""
    part = _meaning(schema)
    return Meaning(pa.string()) if part is not None and pa.types.is_binary(part.type) else part


def _nested(schema: Schema) -> Meaning | None:
    kind = schema.get("type")
    if kind == "struct":
        fields = {one["field"]: _part(one) for one in _fields(schema)}
        known = {name: one for name, one in fields.items() if one}
        if not fields or len(known) < len(fields):
            return None
        return _of_parts(pa.struct([(name, one.type) for name, one in known.items()]), known)
    item = _part(schema.get("items" if kind == "array" else "values"))
    if item is None or kind not in ("array", "map"):
        return None
    if kind == "array":
        return Meaning(pa.list_(item.type), item.wrap and partial(_list, item.wrap))
    keys = schema.get("keys")
    if type(keys) is not dict or keys.get("type") != "string":
        return None  # a list of pairs
    return Meaning(pa.map_(pa.string(), item.type), item.wrap and partial(_object, lambda _: item.wrap))


def _of_parts(type_: pa.DataType, parts: Mapping[str, Meaning]) -> Meaning:
    wraps = {name: one.wrap for name, one in parts.items() if one.wrap}
    return Meaning(type_, partial(_object, wraps.get) if wraps else None)


def _list(wrap: Callable[[Any], object], value: object) -> object:
    if type(value) is not list or is_unavailable(value):
        return value
    return [None if one is None else wrap(one) for one in value]


def _object(wrap_of: Callable[[str], Callable[[Any], object] | None], value: object) -> object:
    if type(value) is not dict or is_unavailable(value):
        return value
    return {name: one if one is None or (wrap := wrap_of(name)) is None else wrap(one) for name, one in value.items()}


# -- encodings


def _is_moment(type_: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_date(type_) or t.is_time(type_) or t.is_timestamp(type_))


def _and_lost(values: Values, read: Values, converted: Converted) -> Converted:
    """``converted``, in which values that were not ``read`` do not fit either."""
    array, unfit = converted
    return array, unfit | (nulls(read) & ~nulls(values))


def _moments(type_: pa.DataType, factor: int = 1) -> Encoding:
    """Numbers of days, or of a unit that ``factor`` makes the type's own."""
    largest = (2**31 if type_.bit_width == 32 else 2**63) - 1

    def decode(values: Values, target: pa.DataType) -> Converted:
        numbers = [v * factor if type(v) is int and abs(v * factor) <= largest else None for v in values]
        return _and_lost(values, numbers, convert(pa.array(numbers, f"int{type_.bit_width}").view(type_), target))

    return Encoding(type_, _is_moment, decode)


def _texts(type_: pa.DataType) -> Encoding:
    def decode(values: Values, target: pa.DataType) -> Converted:
        texts = [v if type(v) is str else None for v in values]
        return _and_lost(values, texts, convert_text(pa.array(texts, pa.string()), target))

    return Encoding(type_, _is_moment, decode)


def _decode_bytes(values: Values, target: pa.DataType) -> Converted:
    stored = list(map(_bytes, values))
    return _and_lost(values, stored, convert(pa.array(stored, pa.binary()), target))


def _bytes(value: object) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if type(value) is str else None
    except binascii.Error:
        return None


def _numbers(type_: pa.DataType, digits: Callable[[Any], str | None]) -> Encoding:
    """Decimals; ``digits`` writes one."""

    def decode(values: Values, target: pa.DataType) -> Converted:
        texts = [None if v is None else digits(v) for v in values]
        if not pa.types.is_decimal(target):  # 8.00 is an integer
            texts = [v.rstrip("0").rstrip(".") if v and "." in v else v for v in texts]
        return _and_lost(values, texts, convert(pa.array(texts, pa.string()), target))

    return Encoding(type_, is_number, decode)


def _digits(scale: int, value: object) -> str | None:
    if type(value) is not str:  # `decimal.format=NUMERIC`
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    stored = _bytes(value)
    if not stored:
        return None
    return format(_EXACT.scaleb(Decimal(int.from_bytes(stored, "big", signed=True)), -scale), "f")


def _variable_digits(value: object) -> str | None:
    if type(value) is not dict or type(scale := value.get("scale")) is not int or abs(scale) > 10_000:
        return None
    return _digits(scale, value.get("value"))


@cache
def _decimal(scale: str, precision: str) -> Encoding | None:
    """None if the schema has no scale. PostgreSQL's money has no precision, and its numeric one of up to 1000 digits."""
    if not re.fullmatch(r"-?\d{1,4}/\d{1,4}", f"{scale}/{precision}"):
        return None
    places = int(scale)
    return _numbers(decimal_type(int(precision), places) or _VARIABLE, partial(_digits, places))


_BYTES = Encoding(pa.binary(), lambda type_: not is_text(type_), _decode_bytes)
_PLAIN = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), pa.int64()),
    **dict.fromkeys(("float", "double"), pa.float64()),
    "boolean": pa.bool_(),
    "string": pa.string(),
}
_TIME, _MOMENT, _NANOS = "io.debezium.time.", pa.timestamp("us"), pa.timestamp("ns")
_ENCODINGS: dict[tuple[object, object], Encoding] = {
    **{
        (kind, f"{room}{name}"): encoding
        for room in (_TIME, "org.apache.kafka.connect.data.")
        for kind, name, encoding in (
            ("int32", "Date", _moments(pa.date32())),
            ("int32", "Time", _moments(pa.time64("us"), 1000)),
            ("int64", "Timestamp", _moments(_MOMENT, 1000)),
        )
    },
    ("int64", f"{_TIME}MicroTime"): _moments(pa.time64("us")),
    ("int64", f"{_TIME}NanoTime"): _moments(pa.time64("ns")),
    ("int64", f"{_TIME}MicroTimestamp"): _moments(_MOMENT),
    ("int64", f"{_TIME}NanoTimestamp"): _moments(_NANOS),
    ("string", f"{_TIME}IsoDate"): _texts(pa.date32()),
    ("string", f"{_TIME}IsoTime"): _texts(pa.time64("us")),
    ("string", f"{_TIME}IsoTimestamp"): _texts(_MOMENT),
    ("string", f"{_TIME}ZonedTime"): _texts(pa.time64("us")),
    ("string", f"{_TIME}ZonedTimestamp"): _texts(pa.timestamp("us", "UTC")),
    ("struct", "io.debezium.data.VariableScaleDecimal"): _numbers(_VARIABLE, _variable_digits),
}  # fmt: skip
