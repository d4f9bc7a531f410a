"""Landing files of ORC: types from the footer, rows by stripe; one stripe at a time is in memory."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import orc

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Contents,
    LandingInput,
    UnreadableFileError,
    check_names,
    find_missing,
    select_names,
    unreadable_if_damaged,
)
from lakeupsert.landing.formats.orcfooter import OrcFooter, read_footer
from lakeupsert.landing.formats.orczones import corrections
from lakeupsert.rows.calendar import change_of, dates
from lakeupsert.rows.convert import decode
from lakeupsert.rows.leaves import leaf_types, map_leaves
from lakeupsert.table.types import normalize

_DAMAGED = (ValueError, IndexError)


@dataclass(frozen=True)
class _File:
    stripes: orc.ORCFile
    footer: OrcFooter

    def column(self, stripe: int, values: pa.Array) -> pa.Array:
        """A column of a stripe, as its writer meant it."""
        values = decode(values)
        zone = self.footer.zones[stripe]
        clocks = corrections(zone, by_java=self.footer.by_java) if zone else None
        days = dates if self.footer.old_calendar else None
        changes = [change_of(type_, days, None, clocks) for type_ in leaf_types(values.type)]
        return map_leaves(values, iter(changes)) if any(changes) else values


def schema_of(source: pa.NativeFile, file: LandingInput) -> pa.Schema:
    """The columns in the types that a table stores them in."""
    return pa.schema([(f.name, normalize(f.type)) for f in _open(source, file).stripes.schema])


def open_blocks(
    source: pa.NativeFile, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    opened = _open(source, file)
    return Contents(find_missing(required, opened.stripes.schema.names), _blocks(opened, file, only))


def _open(source: pa.NativeFile, file: LandingInput) -> _File:
    with unreadable_if_damaged(file, "ORC", *_DAMAGED):
        stripes = orc.ORCFile(source)
        schema = stripes.schema
        footer = read_footer(source)
    check_names(file.path, schema.names)
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
                columns = {n: opened.column(number, c) for n, c in zip(part.schema.names, part.columns, strict=True)}
            yield ArrowBlock(columns, np.arange(place, place + part.num_rows))
            place += part.num_rows
