"""`[read]` as a ledger entry stores it, so that its files are read again as they were.

An entry has every field, also if a setting has its default: defaults may change, entries never do. If you add a setting, add a
field here, and say in docs/FORMAT.md how an entry without it is read.
"""

import msgspec

from lakeupsert.config.types import DecimalSeparator, EnvelopeName, Format, Reading
from lakeupsert.decoding import convert


class StoredDialect(msgspec.Struct, frozen=True, kw_only=True):
    """As `config.DialectSettings`."""

    delimiter: str
    decimal_separator: DecimalSeparator


class StoredReading(msgspec.Struct, frozen=True, kw_only=True):
    """As `config.Reading`."""

    format: Format
    delimiter: str
    quote: str | None
    escape: str
    header: bool | None
    columns: tuple[str, ...]
    encoding: str
    null: str | tuple[str, ...] | None
    decimal_separator: DecimalSeparator
    dialects: tuple[StoredDialect, ...]
    dates: dict[str, str | tuple[str, ...]]
    envelope: EnvelopeName | None
    only: dict[str, str | tuple[str, ...]]
    aliases: dict[str, str]
    positions: bool
    types: bool
    folders: tuple[str, ...]

    @classmethod
    def of(cls, reading: Reading) -> "StoredReading":
        values = {name: getattr(reading, name) for name in cls.__struct_fields__}
        dialects = (
            StoredDialect(delimiter=d.delimiter, decimal_separator=d.decimal_separator) for d in reading.dialects
        )
        return cls(**values | {"dialects": tuple(dialects)})

    @property
    def settings(self) -> Reading:
        return convert(msgspec.to_builtins(self), Reading)
