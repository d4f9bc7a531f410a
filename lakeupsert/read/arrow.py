"""Reading a view with Arrow; Polars and DuckDB take the reader as it is."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from lakeupsert.read.view import View, ViewFile, partition_expression
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.datafiles import opened
from lakeupsert.rows.rank import rows_up_to, sorted_by
from lakeupsert.rows.vectors import deleted_positions, without
from lakeupsert.table.layout import DATA, partition_scalars
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import normal

READAHEAD = 2
"""Batches decoded ahead of the consumer; more hides latency and holds more memory."""


def reader_schema(spec: TableSpec) -> Any:
    """``pyarrow.Schema`` of a table's readers: the columns of the spec, and nothing of ours such as field ids."""
    return pa.schema([(field.name, normal(field.type)) for field in spec.schema])


def to_arrow(view: View, where: str | None = None, partition: str | None = None) -> Any:
    """``pyarrow.RecordBatchReader`` over the view's rows: columns of the spec, ordered by partition and key.

    Files are opened while the reader is consumed, one after the other, and those of several buckets and deltas of a
    partition together; a missing column of an old file is null, a narrower one widened. Memory: a row group and a few
    batches of each. With ``partition``, that one's rows alone.

    Raises ConfigurationError for a filter that can't be used; DamagedTableError, while it is consumed, where a file is
    missing or not readable; StoreUnavailableError where the disk or mount failed.
    """
    scan = scans(view.spec, where)
    scan(len(view.spec.renames))  # refuses the filter now, not when the first file is opened
    files = view.files(where, partition)
    return pa.RecordBatchReader.from_batches(reader_schema(view.spec), batches(view, files, scan))


@dataclass(frozen=True)
class Scan:
    """How the files that have as many renames behind them are read, whose names ``schema`` and the filters have.

    Attributes:
        pushed, rest: the filter, what statistics may decide of it and what they may not; None for none.
        names: what readers call the columns, where that differs.
    """

    schema: Any
    pushed: Any
    rest: Any
    names: list[str] | None


def scans(
    spec: TableSpec, where: str | None, filterable: Any = None, only: Collection[str] | None = None
) -> Callable[[int], Scan]:
    """How files are read, by how many renames they have behind them.

    ``filterable`` (``pyarrow.Schema``) has the columns that the filter may name, where these are not the table's; with ``only``
    those of its conditions alone hold that are about such columns.
    """
    return cache(partial(_scan, spec, where, filterable, only))


def _scan(spec: TableSpec, where: str | None, filterable: Any, only: Collection[str] | None, renames: int) -> Scan:
    schema, names = reader_schema(spec), spec.names_in(renames)
    conjuncts = parse_where(where, schema if filterable is None else filterable, ArrowTerms(names))
    if only is not None:
        conjuncts = [c for c in conjuncts if c.columns <= set(only)]
    pushed, rest = all_of([c for c in conjuncts if c.prunes]), all_of([c for c in conjuncts if not c.prunes])
    in_file = pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema]) if names else schema
    return Scan(in_file, pushed, rest, schema.names if names else None)


def batches(view: View, files: Iterator[ViewFile], scan: Callable[[int], Scan]) -> Iterator[Any]:
    """The rows of these files that live and that the filter takes, in record batches, ordered by partition and key."""
    for _, of_partition in itertools.groupby(files, lambda file: file.partition):
        # The files of a bucket are in key order, one after the other.
        base: dict[tuple[int, int], list[Iterator[Any]]] = {}
        deltas: list[Iterator[Any]] = []
        for file in of_partition:
            rows = _rows(view, file, scan(file.file.renames))
            is_delta = file.name.startswith(f"{DATA}/")
            (deltas if is_delta else base.setdefault((file.file.bucket, file.file.bits), [])).append(rows)
        of_buckets = map(itertools.chain.from_iterable, base.values())
        yield from in_key_order([*of_buckets, *deltas], view.spec.stored_key)


def _rows(view: View, file: ViewFile, scan: Scan) -> Iterator[Any]:
    """The rows of one file that live and that the filter takes, in record batches."""
    store = view.objects.store
    deleted = deleted_positions(store, file.file)
    with opened(store, file.name, partition=file.partition) as source:
        expression = partition_expression(partition_scalars(view.spec, file.partition))
        whole = ds.ParquetFileFormat().make_fragment(source, partition_expression=expression)
        begins = [0, *itertools.accumulate(group.num_rows for group in whole.row_groups)] if len(deleted) else []
        # By row group: the scanner keeps what it has read of a fragment until it is through with it.
        for group in whole.split_by_row_group(scan.pushed, scan.schema):
            # With positions to leave out, the filter comes after them: what a scanner has filtered has none any more.
            in_scan, after = (None, (scan.pushed, scan.rest)) if len(deleted) else (scan.pushed, (scan.rest,))
            at = begins[group.row_groups[0].id] if len(deleted) else 0
            scanner = group.scanner(schema=scan.schema, filter=in_scan, batch_readahead=READAHEAD, use_threads=True)
            for batch in scanner.to_batches():
                rows = without(batch, deleted, at)
                at += batch.num_rows
                for condition in after:
                    rows = rows if condition is None else rows.filter(condition)
                yield rows.rename_columns(scan.names) if scan.names else rows


def in_key_order(streams: Sequence[Iterator[Any]], key: Sequence[str]) -> Iterator[Any]:
    """Record batches of several streams, each of them in key order, as one that is so; a key is in one stream alone."""
    heads = [(head, stream) for stream in streams if (head := _next(stream)) is not None]
    while len(heads) > 1:
        ends = pa.concat_tables([pa.table(head.select(key).slice(head.num_rows - 1)) for head, _ in heads])
        first = sorted_by(ends, key)[0].as_py()
        end = [ends[name][first] for name in key]
        parts = [(head, stream, rows_up_to(head, key, end)) for head, stream in heads]
        rows = pa.Table.from_batches([head.slice(0, n) for head, _, n in parts])
        yield from rows.take(sorted_by(rows, key)).combine_chunks().to_batches()
        left = [(head.slice(n) if n < head.num_rows else _next(stream), stream) for head, stream, n in parts]
        heads = [(head, stream) for head, stream in left if head is not None]
    for head, stream in heads:
        yield head
        yield from stream


def _next(stream: Iterator[Any]) -> Any:
    return next((batch for batch in stream if batch.num_rows), None)
