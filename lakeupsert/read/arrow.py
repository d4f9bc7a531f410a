"""Reading a view with Arrow; Polars and DuckDB take the reader as it is."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from lakeupsert.engine.datafiles import opened
from lakeupsert.read.view import View, ViewFile
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.table.layout import partition_scalar
from lakeupsert.table.spec import TableSpec, normal

READAHEAD = 2
"""Batches decoded ahead of the consumer; more hides latency and holds more memory."""


def reader_schema(spec: TableSpec) -> Any:
    """``pyarrow.Schema`` of a table's readers: the columns of the spec, and nothing of ours such as field ids."""
    return pa.schema([(field.name, normal(field.type)) for field in spec.schema])


def to_arrow(view: View, where: str | None = None, partition: str | None = None) -> Any:
    """``pyarrow.RecordBatchReader`` over the view's rows: columns of the spec, ordered by partition and key.

    Files are opened one after the other while the reader is consumed; a missing column of an old file is null, a
    narrower one widened. Memory: one row group, and a few batches. With ``partition``, that one's rows alone.

    Raises ConfigurationError for a filter that can't be used; DamagedTableError, while it is consumed, where a file is
    missing or not readable; StoreUnavailableError where the disk or mount failed.
    """
    schema = reader_schema(view.spec)
    conjuncts = parse_where(where, schema, ArrowTerms())
    pushed, rest = all_of([c for c in conjuncts if c.prunes]), all_of([c for c in conjuncts if not c.prunes])
    files = view.files(where, partition)
    return pa.RecordBatchReader.from_batches(schema, _batches(view, files, schema, pushed, rest))


def _batches(view: View, files: Iterator[ViewFile], schema: Any, pushed: Any, rest: Any) -> Iterator[Any]:
    column = ds.field(view.spec.partition_by[0])
    for file in files:
        value = partition_scalar(view.spec, file.partition)
        with opened(view.objects.store, file.name, partition=file.partition) as source:
            whole = ds.ParquetFileFormat().make_fragment(source, partition_expression=column == value)
            # By row group: the scanner keeps what it has read of a fragment until it is through with it.
            for group in whole.split_by_row_group(pushed, schema):
                scanner = group.scanner(schema=schema, filter=pushed, batch_readahead=READAHEAD, use_threads=True)
                for batch in scanner.to_batches():
                    yield batch if rest is None else batch.filter(rest)
