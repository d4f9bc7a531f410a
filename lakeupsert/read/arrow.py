"""Read a view with Arrow. Polars and DuckDB take the reader as it is."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.view import View, ViewFile, partition_expression
from lakeupsert.read.where import ArrowTerms, Expression, all_of, of_versions, parse_where
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.datafiles import ROW_GROUP_BYTES, open_object, stream_file
from lakeupsert.rows.rank import sort_by_key
from lakeupsert.rows.streams import RUN_ROWS, in_key_order
from lakeupsert.rows.vectors import deleted_positions, drop_deleted, keep_only
from lakeupsert.table.layout import DATA, TableObjects, partition_scalars
from lakeupsert.table.spec import BATCH, RECEIVED_AT, TableSpec
from lakeupsert.table.types import normalize

SMALL_BYTES = 1 << 20
"""Compressed bytes of a file up to which it is read in one thread. Larger: columns that could be decoded side by side are not."""
READAHEAD = 2
"""Batches decoded ahead of the consumer. More hides latency, but takes memory."""


Versioned = TypeVar("Versioned", pa.RecordBatch, pa.Table)


def reader_schema(of: TableSpec | View) -> pa.Schema:
    """The schema that readers see: the columns of a spec or view, without field ids and other metadata of ours."""
    return pa.schema([(field.name, normalize(field.type)) for field in of.schema])


def to_arrow(
    view: View, where: str | None = None, partition: str | None = None, columns: Sequence[str] | None = None
) -> pa.RecordBatchReader:
    """Read the view's rows: its columns, ordered by partition and key.

    Files are opened one after the other while the reader is consumed; those of several buckets and deltas of one partition
    are open together. If an old file lacks a column, its values are null; a narrower column is widened. Memory: a row group
    and a few batches of each open file.

    Args:
        partition: read only the rows of this partition.
        columns: of the view, in this order; default: all. Beside them, those of the filter are read, and those of the key if
            files of a partition have to be merged.

    Raises:
        ConfigurationError: the filter can't be used, or there is no such column.
        DamagedTableError: while reading, a file is missing or can't be read.
        StoreUnavailableError: while reading, the disk or mount failed.
    """
    shown = choose_columns(reader_schema(view), columns)
    if view.stamps is not None:
        return _with_versions(view, view.stamps, where, partition, shown)
    scan = scans(view.spec, where, columns=None if columns is None else (*columns, *view.spec.stored_key))
    scan(len(view.spec.renames))  # refuses the filter now, not when the first file is opened
    without_key = None if columns is None else scans(view.spec, where, columns=columns)
    rows = batches(view, view.files(where, partition), scan, without_key)
    if columns is not None:
        rows = (batch.select(shown.names) for batch in rows)
    return pa.RecordBatchReader.from_batches(shown, rows)


def _with_versions(
    view: View, stamps: pa.Array, where: str | None, partition: str | None, shown: pa.Schema
) -> pa.RecordBatchReader:
    """`to_arrow` of a view with versions."""
    spec, schema, of_files = view.spec, reader_schema(view), set(view.spec.schema.names)
    # Files do not have the receipt stamp, and adopted ones no batch, so conditions on these wait until all rows have both.
    later = [c for c in parse_where(where, schema, ArrowTerms()) if not c.columns <= of_files]
    condition, read = all_of(later), {BATCH, *shown.names, *itertools.chain.from_iterable(c.columns for c in later)}
    with_key, without_key = (scans(spec, where, schema, of_files, of) for of in ({*read, *spec.stored_key}, read))

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in batches(view, view.files(where, partition), with_key, without_key):
            whole = add_received_at(batch, stamps)
            yield (whole if condition is None else whole.filter(condition)).select(shown.names)

    return pa.RecordBatchReader.from_batches(shown, rows())


def add_received_at(rows: Versioned, stamps: pa.Array) -> Versioned:
    """``rows``, which have `BATCH`, with `RECEIVED_AT`. A null, of an adopted file, becomes batch 0."""
    numbers = pc.fill_null(rows[BATCH], 0)
    rows = rows.set_column(rows.schema.get_field_index(BATCH), BATCH, numbers)
    return rows.append_column(RECEIVED_AT, pc.take(stamps, numbers))


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
    """How to read the files that were written after the same number of renames. All names are those in the files, or, if
    ``converts``, those of now.

    Attributes:
        stored: the columns of ``schema`` that files have: all but partition columns.
        pushed, rest: the parts of the filter that statistics may decide and that they may not; None if there is no such part.
        names: the current names of the columns, if they differ.
        converts: a column was retyped since. What a file says of its old values says nothing of the new ones, so rows are
            converted first, and then filtered.
    """

    schema: pa.Schema
    stored: pa.Schema
    pushed: Expression | None
    rest: Expression | None
    names: list[str] | None
    converts: bool


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
        columns: read these, which may include `BATCH`, and those of the filter; default: all of the table.
    """

    @cache
    def scan(renames: int) -> Scan:
        schema, converts = reader_schema(spec), bool(spec.conversions(renames))
        names = {} if converts else spec.names_in(renames)
        every = parse_where(where, schema if filterable is None else filterable, ArrowTerms(names))
        conjuncts = [c for c in every if only is None or c.columns <= set(only)]
        if columns is not None:
            needed = {*columns, *itertools.chain.from_iterable(c.columns for c in conjuncts)}
            schema = pa.schema([field for field in (*schema, pa.field(BATCH, pa.int64())) if field.name in needed])
        pushed, rest = all_of([c for c in conjuncts if c.prunes]), all_of([c for c in conjuncts if not c.prunes])
        in_file = pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema])
        stored = pa.schema([field for field in in_file if field.name not in spec.partition_by])
        return Scan(in_file, stored, pushed, rest, schema.names if names else None, converts)

    return scan


def choose_columns(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """The schema of these columns, in their order; None: of all. Raises ConfigurationError if ``schema`` lacks one."""
    if isinstance(columns, str):
        raise ConfigurationError(
            "unknown-column",
            f"columns is the text {columns!r}, and takes a list of names. Nothing was read.",
            next=f"give columns=[{columns!r}]",
        )
    for name in columns or ():
        if name not in schema.names:
            raise ConfigurationError(
                "unknown-column",
                f"The table has no column {name!r}. It has: {', '.join(schema.names)}{of_versions(name)}. Nothing was read.",
                next="run `lakeupsert schema`, which lists them",
            )
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def batches(
    view: View, files: Iterator[ViewFile], scan: Callable[[int], Scan], without_key: Callable[[int], Scan] | None = None
) -> Iterator[pa.RecordBatch]:
    """The live rows of these files that pass the filter, ordered by partition and key.

    ``without_key``: how to read the files of a partition that need no merging; default: as ``scan`` says, too.
    """
    for _, of_partition in itertools.groupby(files, lambda file: file.partition):
        own = list(of_partition)
        # The files of a bucket are in key order, one after the other.
        runs: dict[object, list[ViewFile]] = {}
        for file in own:
            of_base = file.file.bucket, file.file.bits
            runs.setdefault(file.name if file.name.startswith(f"{DATA}/") else of_base, []).append(file)
        chosen = scan if len(runs) > 1 or without_key is None else without_key
        streams = [
            itertools.chain.from_iterable(_rows(view, file, chosen(file.file.renames)) for file in run)
            for run in runs.values()
        ]
        small = sum(file.bytes for file in own) <= SMALL_BYTES and sum(file.file.rows for file in own) <= RUN_ROWS
        at_once = _sorted(view, own, scan) if len(runs) > 1 and small else None
        yield from in_key_order(streams, view.spec.stored_key) if at_once is None else at_once


def _sorted(view: View, files: Sequence[ViewFile], scan: Callable[[int], Scan]) -> Sequence[pa.RecordBatch] | None:
    """The rows of small files of one partition in key order. To sort them all costs less than to read the files in turns.

    None: they take more memory than a row group, as texts do that repeat each other.
    """
    found: list[pa.RecordBatch] = []
    dead, size = [np.empty(0, np.uint64)], 0
    for file in files:
        own = scan(file.file.renames)
        if file.only is None and own.pushed is own.rest is None:
            # All rows keep their positions, so the superseded ones are left out below, without a pass of their own.
            dead.append(deleted_positions(view.objects.store, file.file) + np.uint64(sum(map(len, found))))
            file = replace(file, file=msgspec.structs.replace(file.file, deleted=None))
        for batch in _rows(view, file, own):
            found.append(batch)
            size += batch.nbytes
            if size > ROW_GROUP_BYTES:
                return None
    if not found:
        return ()
    rows = pa.concat_batches(found)
    lives = np.ones(rows.num_rows, bool)
    lives[np.concatenate(dead)] = False
    order = sort_by_key(rows, view.spec.stored_key).to_numpy()
    return (rows.take(pa.array(order[lives[order]])),)


def _rows(view: View, file: ViewFile, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The live rows of one file that pass the filter."""
    is_small = file.only is None and file.bytes <= SMALL_BYTES and TableObjects.start_of(file.name) is not None
    is_streamed = len(scan.stored) > 0 and (is_small or scan.converts)
    rows = _streamed(view, file, scan) if is_streamed else _scanned(view, file, scan)
    return (batch.rename_columns(scan.names) for batch in rows) if scan.names else rows


def _streamed(view: View, file: ViewFile, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The rows of a file whose columns are converted, or of a small file of ours: a scanner takes three times as long to start
    and end."""
    spec = view.spec if scan.converts else None
    whole = file.file if file.only is None else msgspec.structs.replace(file.file, deleted=None)
    values = partition_scalars(view.spec, file.partition) if len(scan.stored) < len(scan.schema) else {}
    at = 0
    for rows in stream_file(view.objects.store, whole, scan.stored, spec=spec):
        columns = [
            pa.repeat(values[name], rows.num_rows) if name in values else rows[name] for name in scan.schema.names
        ]
        for batch in pa.Table.from_arrays(columns, schema=scan.schema).to_batches():
            found = batch if file.only is None else keep_only(batch, file.only, at)
            at += batch.num_rows
            for condition in (scan.pushed, scan.rest):
                found = found if condition is None else found.filter(condition)
            yield found


def _scanned(view: View, file: ViewFile, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The rows of a file by Arrow's scanner, which skips row groups by their statistics and decodes columns in threads."""
    import pyarrow.dataset as ds  # here, because it imports pandas if that is there: 0.15 s that most commands don't need

    store, only = view.objects.store, file.only
    values = partition_scalars(view.spec, file.partition)
    deleted = deleted_positions(store, file.file) if only is None else only
    with open_object(store, file.name, partition=file.partition) as source:
        whole = ds.ParquetFileFormat().make_fragment(source, partition_expression=partition_expression(values))
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
                yield rows
