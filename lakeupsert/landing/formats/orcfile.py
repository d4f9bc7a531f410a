"""Landing files of ORC: types from the footer, rows by stripe, which is in memory as a whole."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import orc

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    LandingInput,
    Opened,
    UnreadableFileError,
    absent,
    among,
    check_names,
)
from lakeupsert.rows.convert import decoded
from lakeupsert.table.types import normal


def schema_of(source: Any, file: LandingInput) -> Any:
    """The columns under the types that we keep them in (``pyarrow.Schema``)."""
    return pa.schema([(f.name, normal(f.type)) for f in _open(source, file).schema])


def open_blocks(
    source: Any, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    opened = _open(source, file)
    return Opened(absent(required, opened.schema.names), _blocks(opened, file, only))


def _open(source: Any, file: LandingInput) -> Any:
    with _failures(file):
        opened = orc.ORCFile(source)
        schema = opened.schema
    check_names(file.path, schema.names)
    if "struct<>" in str(schema):
        raise UnreadableFileError(file.path, "It has a struct without any field, which Parquet can't hold.")
    return opened


def _blocks(opened: Any, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    place = 0
    wanted = None if only is None else among(opened.schema.names, only)
    for number in range(opened.nstripes):
        with _failures(file):
            stripe = opened.read_stripe(number, columns=wanted)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES * stripe.num_rows / max(stripe.nbytes, 1))))
        for begin in range(0, stripe.num_rows, rows):
            part = stripe.slice(begin, rows)
            columns = dict(zip(part.schema.names, map(decoded, part.columns), strict=True))
            yield ArrowBlock(columns, np.arange(place, place + part.num_rows))
            place += part.num_rows


@contextmanager
def _failures(file: LandingInput) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise  # the disk or the network, not the file
        raise UnreadableFileError(file.path, f"Not readable as ORC ({file.size} bytes): {e}"[:500]) from e
