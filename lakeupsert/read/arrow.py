"""Read a view with Arrow. Polars and DuckDB take the reader as it is."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.view import View, ViewFile, partition_expression
from lakeupsert.read.where import ArrowTerms, Expression, all_of, parse_where
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.datafiles import open_object
from lakeupsert.rows.streams import in_key_order
from lakeupsert.rows.vectors import deleted_positions, drop_deleted, keep_only
from lakeupsert.table.layout import DATA, partition_scalars
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import normalize

READAHEAD = 2
"""Batches decoded ahead of the consumer. More hides latency, but takes memory."""


def reader_schema(spec: TableSpec) -> pa.Schema:
    """The schema that readers see: the columns of the spec, without field ids and other metadata of ours."""
    return pa.schema([(field.name, normalize(field.type)) for field in spec.schema])


def to_arrow(
    view: View, where: str | None = None, partition: str | None = None, columns: Sequence[str] | None = None
) -> pa.RecordBatchReader:
    """Read the view's rows: the columns of the spec, ordered by partition and key.

    Files are opened one after the other while the reader is consumed; those of several buckets and deltas of one partition
    are open together. If an old file lacks a column, its values are null; a narrower column is widened. Memory: a row group
    and a few batches of each open file.

    Args:
        partition: read only the rows of this partition.
        columns: of the spec, in this order; default: all. Beside them, only those of key and filter are read.

    Raises:
        ConfigurationError: the filter can't be used, or there is no such column.
        DamagedTableError: while reading, a file is missing or can't be read.
        StoreUnavailableError: while reading, the disk or mount failed.
    """
    schema = reader_schema(view.spec)
    scan = scans(view.spec, where, columns=None if columns is None else (*columns, *view.spec.stored_key))
    scan(len(view.spec.renames))  # refuses the filter now, not when the first file is opened
    rows = batches(view, view.files(where, partition), scan)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
        rows = (batch.select(list(columns)) for batch in rows)
    return pa.RecordBatchReader.from_batches(schema, rows)


def first_rows(rows: pa.RecordBatchReader, count: int) -> Rows:
    """The first rows of a reader, which is closed: the rest is not read."""
    found = [rows.schema.empty_table()]
    with rows:
        while count > 0 and (batch := next(rows, None)) is not None:
            found.append(pa.Table.from_batches([batch.slice(0, count)]))
            count -= found[-1].num_rows
    return pa.concat_tables(found)


@dataclass(frozen=True)
class Scan:
    """How to read the files that were written after the same number of renames. All names are those in the files.

    Attributes:
        pushed, rest: the parts of the filter that statistics may decide and that they may not; None if there is no such part.
        names: the current names of the columns, if they differ.
    """

    schema: pa.Schema
    pushed: Expression | None
    rest: Expression | None
    names: list[str] | None


def scans(
    spec: TableSpec,
    where: str | None,
    filterable: pa.Schema | None = None,
    only: Collection[str] | None = None,
    columns: Collection[str] | None = None,
) -> Callable[[int], Scan]:
    """How to read files, as a function of the number of renames before they were written.

    Args:
        filterable: the columns that the filter may name; default: the table's.
        only: apply only the conditions that name no other columns than these.
        columns: read these and those of the filter; default: all.
    """
    return cache(partial(_scan, spec, where, filterable, only, columns))


def _scan(
    spec: TableSpec,
    where: str | None,
    filterable: pa.Schema | None,
    only: Collection[str] | None,
    columns: Collection[str] | None,
    renames: int,
) -> Scan:
    schema, names = reader_schema(spec), spec.names_in(renames)
    conjuncts = parse_where(where, schema if filterable is None else filterable, ArrowTerms(names))
    if only is not None:
        conjuncts = [c for c in conjuncts if c.columns <= set(only)]
    if columns is not None:
        _refuse_unknown(schema, columns)
        needed = {*columns, *itertools.chain.from_iterable(c.columns for c in conjuncts)}
        schema = pa.schema([field for field in schema if field.name in needed])
    pushed, rest = all_of([c for c in conjuncts if c.prunes]), all_of([c for c in conjuncts if not c.prunes])
    in_file = pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema]) if names else schema
    return Scan(in_file, pushed, rest, schema.names if names else None)


def _refuse_unknown(schema: pa.Schema, columns: Collection[str]) -> None:
    for name in columns:
        if name not in schema.names:
            raise ConfigurationError(
                "unknown-column",
                f"The table has no column {name!r}. It has: {', '.join(schema.names)}. Nothing was read.",
                next="run `lakeupsert schema`, which lists them",
            )


def batches(view: View, files: Iterator[ViewFile], scan: Callable[[int], Scan]) -> Iterator[pa.RecordBatch]:
    """The live rows of these files that pass the filter, ordered by partition and key."""
    for _, of_partition in itertools.groupby(files, lambda file: file.partition):
        # The files of a bucket are in key order, one after the other.
        base: dict[tuple[int, int], list[Iterator[pa.RecordBatch]]] = {}
        deltas: list[Iterator[pa.RecordBatch]] = []
        for file in of_partition:
            rows = _rows(view, file, scan(file.file.renames))
            is_delta = file.name.startswith(f"{DATA}/")
            (deltas if is_delta else base.setdefault((file.file.bucket, file.file.bits), [])).append(rows)
        of_buckets = map(itertools.chain.from_iterable, base.values())
        yield from in_key_order([*of_buckets, *deltas], view.spec.stored_key)


def _rows(view: View, file: ViewFile, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The live rows of one file that pass the filter."""
    store, only = view.objects.store, file.only
    deleted = deleted_positions(store, file.file) if only is None else only
    with open_object(store, file.name, partition=file.partition) as source:
        expression = partition_expression(partition_scalars(view.spec, file.partition))
        whole = ds.ParquetFileFormat().make_fragment(source, partition_expression=expression)
        begins = [0, *itertools.accumulate(group.num_rows for group in whole.row_groups)] if len(deleted) else []
        # By row group: a scanner keeps everything that it has read of a fragment until the fragment ends.
        for group in whole.split_by_row_group(scan.pushed, scan.schema):
            # Deletion vectors apply before the filter, since rows that a scanner has filtered have no position any more.
            in_scan, after = (None, (scan.pushed, scan.rest)) if len(deleted) else (scan.pushed, (scan.rest,))
            at = begins[group.row_groups[0].id] if len(deleted) else 0
            if only is not None and not np.diff(np.searchsorted(only, [at, at + group.row_groups[0].num_rows])):
                continue
            scanner = group.scanner(schema=scan.schema, filter=in_scan, batch_readahead=READAHEAD, use_threads=True)
            for batch in scanner.to_batches():
                rows = drop_deleted(batch, deleted, at) if only is None else keep_only(batch, only, at)
                at += batch.num_rows
                for condition in after:
                    rows = rows if condition is None else rows.filter(condition)
                yield rows.rename_columns(scan.names) if scan.names else rows
