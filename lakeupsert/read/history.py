"""The history of a table that keeps one: every version of a row, and from which until which value of the order it held.

A version holds from its own value of the first ordering column until that of the next version or delete of its key; the row
that lives holds without an end. Files of the history have superseded rows and the deletes that superseded some, in the order of
their merges and without these ends: a record that comes late would change that of another one. So they are found here, by what
is in those files and what lives (ADR 0023).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import batches, reader_schema, scans
from lakeupsert.read.view import View
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import aligned, read_file
from lakeupsert.rows.rank import latest, rows_up_to, sorted_by, versions
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.spec import BATCH, DELETE_FLAG, TableSpec

FROM, UNTIL = "valid_from", "valid_to"
LIVES = (1 << 63) - 1
"""In `BATCH` of rows that live: between equal values of the order they are the version."""
_LIVES = "_lakeupsert_lives"


def history_schema(spec: TableSpec) -> Any:
    """``pyarrow.Schema`` of the history's readers. Raises ConfigurationError where the table keeps none."""
    if not spec.history:
        raise ConfigurationError(
            "no-history",
            "The table keeps no history: what a newer record superseded is gone with the next vacuum.",
            next="set `history = true` for a new table, and take its landing files there",
        )
    schema = reader_schema(spec)
    for name in (FROM, UNTIL):
        if spec.called(name) in schema.names:
            raise ConfigurationError(
                "column-exists",
                f"The table has a column {spec.called(name)!r} of its own, and a history has one of that name.",
                next=f"rename it: `lakeupsert schema rename {spec.called(name)} NAME`",
            )
        schema = schema.append(pa.field(name, schema.field(spec.order_by[0]).type))
    return schema


def of_keys(spec: TableSpec) -> set[str]:
    """Columns that all versions of a key share: only what a filter says of these may be asked before its versions are found."""
    return {*spec.key, *spec.partition_by}


def history_to_arrow(view: View, where: str | None = None, partition: str | None = None) -> Any:
    """``pyarrow.RecordBatchReader`` of all versions: columns of the spec, `FROM` and `UNTIL`; by partition and key, newest first.

    ``where`` may name these, too. Memory: the superseded versions of a partition, or of its keys that the filter is about, and
    a row group and a few batches of each file of it. With ``partition``, that one's versions alone. Raises as `to_arrow` does.
    """
    schema = history_schema(view.spec)
    condition = all_of(parse_where(where, schema, ArrowTerms()))
    partitions = list(view.partitions(where, schema)) if partition is None else [partition]

    def read() -> Iterator[Any]:
        for name in partitions:
            for rows in _versions(view, where, schema, name):
                yield from (rows if condition is None else rows.filter(condition)).to_batches()

    return pa.RecordBatchReader.from_batches(schema, read())


def _versions(view: View, where: str | None, schema: Any, partition: str) -> Iterator[Any]:
    spec = view.spec
    scan = scans(spec, where, schema, of_keys(spec))
    past = _past(view, partition, scan(len(spec.renames)))
    for batch in batches(view, view.files(only=partition), scan):
        if batch.num_rows:
            met = rows_up_to(past, spec.stored_key, [batch[name][-1] for name in spec.stored_key])
            alive = pa.Table.from_batches([batch]).append_column(DELETE_FLAG, pa.repeat(False, batch.num_rows))
            alive = alive.append_column(BATCH, pa.repeat(LIVES, batch.num_rows))
            yield _with_ends(pa.concat_tables([alive, past.slice(0, met)]), spec, schema)
            past = past.slice(met)
    if past.num_rows:
        yield _with_ends(past, spec, schema)


def _past(view: View, partition: str, scan: Any) -> Any:
    """The partition's history files, their rows in key order."""
    spec = view.spec
    schema = pa.schema([*reader_schema(spec), (DELETE_FLAG, pa.bool_()), (BATCH, pa.int64())])
    tables = [schema.empty_table()]
    for file in view.history(partition):
        rows = read_file(view.objects.store, file.file, spec.history_schema, spec)
        for name, value in partition_scalars(spec, partition).items():
            rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        rows = aligned(rows, schema)
        for condition in (scan.pushed, scan.rest):
            rows = rows if condition is None else rows.filter(condition)
        tables.append(rows)
    rows = pa.concat_tables(tables)
    return rows.take(sorted_by(rows, spec.stored_key))


def _with_ends(rows: Any, spec: TableSpec, schema: Any) -> Any:
    rows = rows.append_column(_LIVES, pc.equal(rows[BATCH], LIVES))
    order, wins = latest(rows, spec, (BATCH, DELETE_FLAG), first=(_LIVES,))
    newest = true(wins)
    is_version = versions(rows, spec, order, newest) & ~true(rows[DELETE_FLAG].take(order))
    rows = rows.take(order)
    begins = rows[spec.order_by[0]]
    # What a full extract has lives, also below a delete that the table has forgotten.
    endless = newest | true(rows[_LIVES])
    before = pa.array(np.maximum(np.arange(rows.num_rows) - 1, 0), mask=endless)
    found = rows.append_column(FROM, begins).append_column(UNTIL, begins.take(before))
    return found.select(schema.names).cast(schema).filter(pa.array(is_version))
