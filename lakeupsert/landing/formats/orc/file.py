"""Landing files of ORC: types from the footer, rows by stripe; one stripe at a time is in memory."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import orc

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Columns,
    Contents,
    LandingInput,
    UnreadableFileError,
    find_missing,
    select_names,
    unreadable_if_damaged,
)
from lakeupsert.landing.formats.limits import check_columns, check_rows, check_unpacked
from lakeupsert.landing.formats.orc.footer import OrcFooter, read_footer
from lakeupsert.landing.formats.orc.zones import corrections
from lakeupsert.rows.calendar import change_of, dates
from lakeupsert.rows.convert import Converted, convert
from lakeupsert.rows.leaves import Change, decode, map_leaves
from lakeupsert.table.types import is_number, normalize

_DAMAGED = (ValueError, IndexError, EOFError, OverflowError)
_SPARK_TYPE = b"spark.sql.catalyst.type"
_CLOCK = pa.timestamp("us")
"""What Spark's timestamp_ntz is: ORC files have it as bigint, with the name of the type as an attribute of the column."""


@dataclass(frozen=True)
class _File:
    stripes: orc.ORCFile
    footer: OrcFooter

    def column(self, stripe: int, name: str, values: pa.Array) -> pa.Array:
        """A column of a stripe, as its writer meant it."""
        zone = self.footer.zones[stripe]
        clocks = corrections(zone, by_java=self.footer.by_java) if zone else None
        changes = _changes(self.stripes.schema.field(name), dates if self.footer.old_calendar else None, clocks)
        return map_leaves(decode(values), iter(changes)) if any(changes) else decode(values)


@dataclass(frozen=True)
class OrcBlock(ArrowBlock):
    """A block of an ORC file, also of rows of one that went to quarantine."""

    def convert(self, name: str, type_: pa.DataType) -> Converted:
        column = self.columns.get(name)
        changes = [] if column is None else list(_numbers(column.type, type_))
        return convert(map_leaves(column, iter(changes)), type_) if any(changes) else super().convert(name, type_)


def _numbers(have: pa.DataType, want: pa.DataType) -> Iterator[Change | None]:
    """What to do to each innermost value: a table from before `_CLOCK` was known has numbers, and keeps their microseconds."""
    t = pa.types
    if not t.is_nested(have):
        yield (lambda array: array.view(pa.int64())) if have.equals(_CLOCK) and is_number(want) else None
        return
    for i in range(have.num_fields):
        at = want.get_field_index(have.field(i).name) if t.is_struct(have) and t.is_struct(want) else i
        alike = t.is_nested(want) and t.is_struct(have) == t.is_struct(want) and 0 <= at < want.num_fields
        yield from _numbers(have.field(i).type, want.field(at).type if alike else pa.null())


def _changes(field: pa.Field, days: Change | None = None, clocks: Change | None = None) -> list[Change | None]:
    """What to do to each innermost value of a column."""
    if pa.types.is_nested(field.type):
        children = [field.type.field(i) for i in range(field.type.num_fields)]
        return [change for child in children for change in _changes(child, days, clocks)]
    if (field.metadata or {}).get(_SPARK_TYPE) == b"timestamp_ntz":
        return [lambda array: array.view(_CLOCK)]
    return [change_of(field.type, days, None, clocks)]


def schema_of(source: pa.NativeFile, file: LandingInput, *_: object) -> Columns:
    """The columns in the types that a table stores them in."""
    fields = _open(source, file).stripes.schema
    types = [(f.name, map_leaves(pa.nulls(0, normalize(f.type)), iter(_changes(f))).type) for f in fields]
    return Columns(pa.schema(types))


def open_blocks(
    source: pa.NativeFile, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None
) -> Contents:
    opened = _open(source, file)
    return Contents(find_missing(required, opened.stripes.schema.names), _blocks(opened, file, only))


def _open(source: pa.NativeFile, file: LandingInput) -> _File:
    with unreadable_if_damaged(file, "ORC", *_DAMAGED):
        stripes = orc.ORCFile(source)
        schema = stripes.schema
        footer = read_footer(source)
    check_columns(file.path, schema)
    check_rows(file, stripes.nrows)
    check_unpacked(file, footer.text_bytes)
    if "struct<>" in str(schema):
        raise UnreadableFileError(file.path, "It has a struct without fields, which Parquet can't store.")
    return _File(stripes, footer)


def _blocks(opened: _File, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    place = 0
    wanted = None if only is None else select_names(opened.stripes.schema.names, only)
    for number in range(opened.stripes.nstripes):
        with unreadable_if_damaged(file, "ORC"):
            stripe = opened.stripes.read_stripe(number, columns=wanted)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES * stripe.num_rows / max(stripe.nbytes, 1))))
        for begin in range(0, stripe.num_rows, rows):
            part = stripe.slice(begin, rows)
            with unreadable_if_damaged(file, "ORC"):
                columns = {n: opened.column(number, n, c) for n, c in zip(part.schema.names, part.columns, strict=True)}
            yield OrcBlock(columns, np.arange(place, place + part.num_rows))
            place += part.num_rows
