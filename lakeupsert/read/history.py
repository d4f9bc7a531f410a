"""The history of a table: every version of a row, with the range of order values in which it was valid.

A version is valid from its own value of the first ordering column until that of the next version or delete of its key. The live
row has no end. History files have superseded rows, and the deletes that superseded any, in the order of their merges. They do not
store ends, since a late record would change the end of another version; readers compute the ends from these files and the live
rows (ADR 0023).
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import Scan, add_received_at, batches, choose_columns, reader_schema, scans
from lakeupsert.read.view import View
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import align, read_file
from lakeupsert.rows.rank import count_rows_up_to, mark_versions, sort_by_key, sort_by_rank
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.spec import BATCH, DELETE_FLAG, TableSpec

FROM, UNTIL = "valid_from", "valid_to"
_PAST = (pa.field(DELETE_FLAG, pa.bool_()), pa.field(BATCH, pa.int64()))
"""What history files have beside the table's columns."""
LIVES = "_lakeupsert_lives"
"""Boolean column: the row is live. Of several rows with the same order values, the live one is the version."""


def history_schema(view: View) -> pa.Schema:
    """The schema that readers of the history see. Raises ConfigurationError if the table keeps none."""
    spec = view.spec
    if not spec.history:
        raise ConfigurationError(
            "no-history",
            "The table keeps no history: the next vacuum deletes superseded rows.",
            next="create a new table with `history = true`, and load the landing files into it",
        )
    type_ = reader_schema(view).field(spec.order_by[0]).type
    return with_added(view, [pa.field(name, type_) for name in (FROM, UNTIL)], "the history adds")


def with_added(view: View, added: Iterable[pa.Field], by: str) -> pa.Schema:
    """The schema that readers see, and fields behind it. Raises ConfigurationError if the table has a column of such a name."""
    spec, schema = view.spec, reader_schema(view)
    for field in added:
        if (own := spec.table_name_of(field.name)) in schema.names:
            raise ConfigurationError(
                "column-exists",
                f"The table's column {own!r} has the name of a column that {by}.",
                next=f"rename it: `lakeupsert schema rename {own} NAME`",
            )
        schema = schema.append(field)
    return schema


def shared_columns(spec: TableSpec) -> set[str]:
    """Columns that all versions of a key share. A filter on other columns must not apply before the versions are known."""
    return {*spec.key, *spec.partition_by}


def history_to_arrow(
    view: View, where: str | None = None, partition: str | None = None, columns: Sequence[str] | None = None
) -> pa.RecordBatchReader:
    """Read all versions: the view's columns, `FROM` and `UNTIL`, ordered by partition and key, newest version first.

    ``where`` and ``columns`` may name `FROM` and `UNTIL`; with ``partition``, only that partition is read. Memory: the superseded
    versions of a partition, or of the keys in it that the filter selects, and a row group and a few batches of each of its
    files. Raises as `to_arrow` does.
    """
    schema = history_schema(view)
    shown = choose_columns(schema, columns)
    condition = all_of(parse_where(where, schema, ArrowTerms()))
    partitions = list(view.partitions(where, schema)) if partition is None else [partition]

    def read() -> Iterator[pa.RecordBatch]:
        for name in partitions:
            for rows in _versions(view, where, schema, name):
                yield from (rows if condition is None else rows.filter(condition)).select(shown.names).to_batches()

    return pa.RecordBatchReader.from_batches(shown, read())


def _versions(view: View, where: str | None, schema: pa.Schema, partition: str) -> Iterator[Rows]:
    spec = view.spec
    read = None if view.stamps is None else {*spec.schema.names, BATCH}
    scan = scans(spec, where, schema, shared_columns(spec), read)
    past = _read_past(view, partition, scan(len(spec.renames)))
    for batch in batches(view, view.files(only=partition), scan):
        if batch.num_rows:
            met = count_rows_up_to(past, spec.stored_key, [batch[name][-1] for name in spec.stored_key])
            alive = align(pa.Table.from_batches([batch]), pa.schema([*reader_schema(spec), *_PAST]))
            both = [_mark(alive, lives=True), _mark(past.slice(0, met), lives=False)]
            yield _find_ends(pa.concat_tables(both), view, schema)
            past = past.slice(met)
    if past.num_rows:
        yield _find_ends(_mark(past, lives=False), view, schema)


def _mark(rows: Rows, *, lives: bool) -> Rows:
    return rows.append_column(LIVES, pa.repeat(lives, rows.num_rows))


def _read_past(view: View, partition: str, scan: Scan) -> Rows:
    """The rows of the partition's history files that pass the filter, in key order."""
    spec = view.spec
    schema = pa.schema([*reader_schema(spec), *_PAST])
    tables = [schema.empty_table()]
    for file in view.history(partition):
        rows = read_file(view.objects.store, file.file, spec.history_schema, spec)
        for name, value in partition_scalars(spec, partition).items():
            rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        rows = align(rows, schema)
        for condition in (scan.pushed, scan.rest):
            rows = rows if condition is None else rows.filter(condition)
        tables.append(rows)
    rows = pa.concat_tables(tables)
    return rows.take(sort_by_key(rows, spec.stored_key))


def _find_ends(rows: Rows, view: View, schema: pa.Schema) -> Rows:
    """All rows of some keys to their versions, with `FROM` and `UNTIL`."""
    spec = view.spec
    if view.stamps is not None:
        rows = add_received_at(rows, view.stamps)
    order, wins = sort_by_rank(rows, spec, (BATCH, DELETE_FLAG), first=(LIVES,))
    newest = as_mask(wins)
    is_version = mark_versions(rows, spec, order, newest) & ~as_mask(rows[DELETE_FLAG].take(order))
    rows = rows.take(order)
    begins = rows[spec.order_by[0]]
    # A full extract's row lives, even below a delete that the table has forgotten.
    endless = newest | as_mask(rows[LIVES])
    before = pa.array(np.maximum(np.arange(rows.num_rows) - 1, 0), mask=endless)
    found = rows.append_column(FROM, begins).append_column(UNTIL, begins.take(before))
    return found.select(schema.names).cast(schema).filter(pa.array(is_version))
