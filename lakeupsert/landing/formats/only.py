"""Rows of other tables, which the setting `only` leaves out: several tables may come in one folder or topic."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats.blocks import Block, FileBlock, MalformedRecord
from lakeupsert.rows.convert import as_mask

OTHER_TABLE = "row of another table"
"""The kind of such rows, and of truncates of other tables, where skipped records are counted."""


B = TypeVar("B", bound=Block)


def own_rows(blocks: Iterator[B], reading: Reading) -> Iterator[B]:
    """The blocks with this table's rows, before `aliases` rename columns. The others count as skipped."""
    return (_own_rows(block, reading) for block in blocks) if reading.only else blocks


def names_in_files(reading: Reading) -> list[str]:
    """What files may call the columns of `only`."""
    wanted = {name.lower() for name in reading.only}
    return [*reading.only, *(alias for alias, column in reading.aliases.items() if column.lower() in wanted)]


def _own_rows(block: B, reading: Reading) -> B:
    count = len(block.places)
    is_other, is_absent = np.zeros(count, bool), np.zeros(count, bool)
    lacking = []
    for column, texts in reading.own_texts.items():
        name = next((name for name in block.names if reading.table_name_of(name).lower() == column), None)
        text, unfit = (pa.nulls(count, pa.string()), is_other) if name is None else block.convert(name, pa.string())
        is_null = as_mask(text.is_null()) & ~unfit
        is_other = is_other | (~as_mask(pc.is_in(text, pa.array(texts, pa.string()))) & ~is_null)
        is_absent |= is_null
        lacking += [column] if is_null.any() else []
    is_absent &= ~is_other
    kept = [one for one in block.malformed if not _is_others(one.truncate, reading)]
    skipped = int(np.count_nonzero(is_other)) + len(block.malformed) - len(kept)
    rows = np.flatnonzero(is_absent).tolist()
    if rows:
        reason = (
            f"It has no value in {' and '.join(map(repr, lacking))}, so it does not say which table it is of (`only`)."
        )
        found = zip(block.places[rows].tolist(), block.raw(rows), block.line_numbers(rows), strict=True)
        kept += [MalformedRecord(place, reason, raw.encode(), line) for place, raw, line in found]
        kept.sort(key=lambda one: one.place)
    counts = Counter(block.skipped) + Counter({OTHER_TABLE: skipped})
    return cast(B, cast(FileBlock, block).choose(~is_other & ~is_absent, kept, counts))


def _is_others(truncate: Mapping[str, object] | None, reading: Reading) -> bool:
    """Whether a truncate, by the columns of its event, is of another table."""
    columns = {reading.table_name_of(name).lower(): value for name, value in (truncate or {}).items()}
    return any(str(columns[name]) not in texts for name, texts in reading.own_texts.items() if name in columns)
