"""Landing files of ORC: types from the footer, rows by stripe; one stripe at a time is in memory."""

from collections.abc import Collection, Iterator

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
from lakeupsert.rows.convert import decode
from lakeupsert.table.types import normalize


def schema_of(source: pa.NativeFile, file: LandingInput) -> pa.Schema:
    """The columns in the types that a table stores them in."""
    return pa.schema([(f.name, normalize(f.type)) for f in _open(source, file).schema])


def open_blocks(
    source: pa.NativeFile, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    stripes = _open(source, file)
    return Contents(find_missing(required, stripes.schema.names), _blocks(stripes, file, only))


def _open(source: pa.NativeFile, file: LandingInput) -> orc.ORCFile:
    with unreadable_if_damaged(file, "ORC"):
        stripes = orc.ORCFile(source)
        schema = stripes.schema
    check_names(file.path, schema.names)
    if "struct<>" in str(schema):
        raise UnreadableFileError(file.path, "It has a struct without fields, which Parquet can't store.")
    return stripes


def _blocks(stripes: orc.ORCFile, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    place = 0
    wanted = None if only is None else select_names(stripes.schema.names, only)
    for number in range(stripes.nstripes):
        with unreadable_if_damaged(file, "ORC"):
            stripe = stripes.read_stripe(number, columns=wanted)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES * stripe.num_rows / max(stripe.nbytes, 1))))
        for begin in range(0, stripe.num_rows, rows):
            part = stripe.slice(begin, rows)
            columns = dict(zip(part.schema.names, map(decode, part.columns), strict=True))
            yield ArrowBlock(columns, np.arange(place, place + part.num_rows))
            place += part.num_rows
