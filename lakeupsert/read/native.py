"""Which snapshots DuckDB and Polars may scan by themselves, from a list of files; they read all others through Arrow.

A scan of their own is faster, and prunes by statistics. It is used only if each file has exactly the types that readers see, so
that nothing is left for an engine to decide. Superseded rows are taken out by an anti-join over their places in the files.
"""

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install
from lakeupsert.read.arrow import reader_schema
from lakeupsert.read.view import View, ViewFile
from lakeupsert.read.where import ArrowTerms, parse_where
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.table.layout import TableObjects, partition_texts
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import is_list

_PATTERN = set("*?[{=")
"""Characters of a path below which engines would look for other files or partition columns."""

MOST_SUPERSEDED = 50_000_000
"""Superseded rows whose places an engine gets, some 16 bytes each. Reading through Arrow holds those of one file at a time."""
DUCKDB_PLACE = "file_row_number"
"""DuckDB's name for a row's place in its file."""

log = logging.getLogger(__name__)


def files_to_scan(view: View, engine: str, where: str | None = None) -> Mapping[int, Sequence[ViewFile]] | None:
    """The files, by the number of renames before they were written. None: read through Arrow, always so with a filter.

    Logs which it is, and why. Raises ConfigurationError if the filter can't be used.
    """
    if where is not None:
        parse_where(where, view.schema, ArrowTerms())
        log.info("%s reads through Arrow: it opens only the files that may have rows of the filter", engine)
        return None
    files = list(view.files())
    if (why := _why_arrow(view, files)) is not None:
        log.info("%s reads through Arrow: %s", engine, why)
        return None
    log.info("%s scans %d files by itself", engine, len(files))
    found: dict[int, list[ViewFile]] = {}
    for file in files:
        found.setdefault(file.file.renames, []).append(file)
    return found


def superseded_rows(view: View, files: Sequence[ViewFile]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For each superseded row the number of its file among ``files``, and its place in that file."""
    places = [deleted_positions(view.objects.store, file.file) for file in files]
    numbers = np.repeat(np.arange(len(files), dtype=np.int32), list(map(len, places)))
    return numbers, np.concatenate(places).astype(np.int64)


def _why_arrow(view: View, files: Sequence[ViewFile]) -> str | None:
    if not files:
        return "there are no files"
    if view.number is None:
        return "the rows are merged while they are read"
    if view.stamps is not None:
        return "the ledger, not the files, has the receipt stamps of batches"
    if not view.objects.store.uri().startswith("file:"):
        return "the table is on a remote store, for which the engine uses its own credentials"
    if (superseded := sum(file.superseded for file in files)) > MOST_SUPERSEDED:
        return f"{superseded:,} rows are superseded; `lakeupsert compact --full` leaves none"
    if adopted := sum(TableObjects.start_of(file.name) is None for file in files):
        return f"{adopted} of {len(files)} files are as they were adopted"
    if older := sum(bool(view.spec.conversions(file.file.renames)) for file in files):
        return f"{older} of {len(files)} files were written before a column was retyped; `lakeupsert compact --full` leaves none"
    if view.retyped():
        return "a column has had another type"
    if view.spec.folder_formats or view.spec.adopted_folders:
        return "another program named the folders of some partitions, and the engine would read their values otherwise"
    if odd := _PATTERN.intersection(files[0].path.removesuffix(files[0].name)):
        return f"the table's path has {''.join(sorted(odd))!r}"
    if any(text.lower() == "null" for file in files for text in partition_texts(file.partition).values()):
        return "a partition is named null, which DuckDB 1.5 takes for no value"
    if any("%" in folder.partition("=")[0] for file in files for folder in file.partition.split("/")):
        return "the name of a partition column is escaped in folders, where the engine would look for it as it is"
    return _unfit(view.spec)


def _unfit(spec: TableSpec) -> str | None:
    """Why the columns are none that every engine reads as we do."""
    schema = reader_schema(spec)
    for field in schema:
        if not _is_plain(field.type):
            return f"column {field.name!r} is {field.type}"
    names = {name.lower() for name in (*schema.names, *spec.names_written.values())}
    if DUCKDB_PLACE in names:
        return f"a column is called {DUCKDB_PLACE}, as what DuckDB counts the rows of a file by"
    if len({name.lower() for name in schema.names}) < len(schema.names):
        return "two columns differ only in case"
    return None


def _is_plain(kind: pa.DataType) -> bool:
    t = pa.types
    if is_list(kind):
        return _is_plain(kind.value_type)
    if t.is_struct(kind):
        return kind.num_fields > 0 and all(_is_plain(field.type) for field in kind)
    if t.is_timestamp(kind):
        return kind.unit == "us" and kind.tz in (None, "UTC")
    plain = (
        t.is_integer,
        t.is_float32,
        t.is_float64,
        t.is_boolean,
        t.is_date32,
        t.is_string,
        t.is_binary,
        t.is_decimal128,
    )
    return any(test(kind) for test in plain)


def require(package: str) -> None:
    """Raise ConfigurationError if the engine is not installed."""
    if find_spec(package) is None:
        raise ConfigurationError(
            "extra-missing",
            f"{package} is not installed, so it can't read the table. Nothing was read.",
            next=f"{install(package)}, or read the table with to_arrow",
        )
