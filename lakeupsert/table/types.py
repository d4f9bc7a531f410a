"""Column types by the names that people write: Spark SQL's and Arrow's."""

import re
from typing import Any

import pyarrow as pa

from lakeupsert.errors import ConfigurationError

_NAMES = {
    "string": pa.string(),
    "text": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"(?:decimal|decimal128|numeric)\((\d+),(\d+)\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,tz=([^\]]+))?\]")


def named_type(text: str, where: str) -> Any:
    """``pyarrow.DataType`` of a name such as ``bigint``, ``int64``, ``decimal(12,2)`` or ``timestamp_ntz``.

    Raises ConfigurationError naming ``where`` it stands.
    """
    name = text.replace(" ", "")
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], tz=match[2])
    name = name.lower()
    if name in _NAMES:
        return _NAMES[name]
    try:
        if match := _DECIMAL.fullmatch(name):
            return pa.decimal128(int(match[1]), int(match[2]))
        return pa.type_for_alias(name)
    except ValueError as e:
        raise ConfigurationError(
            "unknown-type",
            f"{where}: {text!r} is not a type.",
            next=f"use one of {', '.join(_NAMES)}, decimal(p,s), or Arrow's names such as int64 or timestamp[us, tz=UTC]",
        ) from e
