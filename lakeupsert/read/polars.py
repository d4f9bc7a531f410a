"""Read a view with Polars: with its own Parquet scan if the files allow it, otherwise through Arrow. Both are lazy."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lakeupsert.engine.runs import runs
from lakeupsert.read.arrow import choose_columns, reader_schema, to_arrow
from lakeupsert.read.native import files_to_scan, require, superseded_rows
from lakeupsert.read.view import View, ViewFile
from lakeupsert.table.spec import PLACE

if TYPE_CHECKING:
    import polars as pl

MOST_ROWS = 2**32 - 1
"""In one scan. Polars counts them with 32 bits, unless it is the build for more."""


def to_polars(view: View, *, where: str | None = None, columns: Sequence[str] | None = None) -> "pl.LazyFrame":
    """A LazyFrame of the view's rows that pass the filter. No row is read before `collect`. With a filter they are read through
    Arrow.

    Args:
        columns: of the view, in this order; default: all.

    Raises:
        ConfigurationError: Polars is not installed, there is no such column, or the filter can't be used.
    """
    require("polars")
    import polars as pl

    schema = reader_schema(view)
    choose_columns(schema, columns)
    empty = pl.from_arrow(schema.empty_table())
    assert isinstance(empty, pl.DataFrame)
    files = files_to_scan(view, "Polars", where)
    if files is None:
        frame = _through_arrow(view, empty.schema, where)
    else:
        scans = [
            _scan(view, empty.schema, renames, some)
            for renames, of_one_time in files.items()
            for some in runs(of_one_time, lambda file: file.file.rows, MOST_ROWS)
        ]
        frame = pl.concat(scans)
    return frame if columns is None else frame.select(columns)


def _scan(view: View, schema: "pl.Schema", renames: int, files: Sequence[ViewFile]) -> "pl.LazyFrame":
    """The rows of files whose columns have the names after so many renames. A column that no file has is null."""
    import polars as pl

    names, parts = view.spec.names_in(renames), view.spec.partition_by
    own = {name: names.get(name, name) for name in schema}
    numbers, places = superseded_rows(view, files)
    firsts = np.cumsum([0, *(file.file.rows for file in files)])  # Polars counts the rows of all files together
    scan = pl.scan_parquet(
        [file.path for file in files],
        glob=False,
        row_index_name=PLACE if len(places) else None,
        schema={own[name]: type_ for name, type_ in schema.items() if name not in parts},
        hive_partitioning=bool(parts),
        hive_schema={own[name]: schema[name] for name in parts} or None,
        missing_columns="insert",
        extra_columns="ignore",
    )
    if len(places):
        marked = pl.LazyFrame({PLACE: firsts[numbers] + places})
        scan = scan.join(marked.cast(pl.get_index_type()), on=PLACE, how="anti")
    return scan.select([pl.col(own[name]).alias(name) for name in schema])


def _through_arrow(view: View, schema: "pl.Schema", where: str | None) -> "pl.LazyFrame":
    import polars as pl
    from polars.io.plugins import register_io_source

    def source(
        columns: list[str] | None, predicate: "pl.Expr | None", limit: int | None, batch_size: int | None
    ) -> Iterator["pl.DataFrame"]:
        tested = [] if predicate is None else predicate.meta.root_names()
        needed = None if columns is None else [*dict.fromkeys((*columns, *tested))]
        for batch in to_arrow(view, where, columns=needed):
            rows = pl.from_arrow(batch)
            assert isinstance(rows, pl.DataFrame)
            if limit is not None:
                rows = rows.head(limit)
                limit -= rows.height
            if predicate is not None:
                rows = rows.filter(predicate)
            yield rows if columns is None else rows.select(columns)
            if limit == 0:
                return

    return register_io_source(source, schema=schema)
