"""A sample of the rows of many files: one type a column, and which values and combinations of values are equal.

Reads     the first rows of at most `FILES` files: at most `ROWS` rows, and `BYTES` bytes of text, of all files together
Writes    nothing
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lakeupsert.config import Reading
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.dominant import DominantType, combine
from lakeupsert.landing.formats.inference import unify, without_nulls
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.landing.glimpse import Beginning, read_beginning
from lakeupsert.phrases import count
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.convert import as_mask, convert
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectReader

Item = TypeVar("Item")

FILES = 32
"""Most files that are read, spread evenly over the folders."""
ROWS = 200_000
"""Most rows that are read, of all files together."""
BYTES = 1 << 25
"""Most bytes of text files that are read, of all files together."""


@dataclass(frozen=True)
class Column:
    """A column in the sample; ``low`` and ``high`` are JSON values, None if the type has no order."""

    name: str
    type: str
    nulls: int
    distinct: int
    low: object
    high: object


class Sample:
    """The rows that were read.

    Attributes:
        paths: the files.
        columns_of: the columns of each file, with their types.
        whole: whether all their rows were read.
        file: the index of each row's file.
        values: the values of each column, one a row; null if the row's file lacks the column.
        dominant_types: the type of most values of each text column whose type was inferred.
        derived: more columns, computed from `values`, that rows can be grouped by.
        fresh: which rows are not an exact copy of an earlier row. Under any key, an exact copy is not another record.
    """

    def __init__(self, beginnings: Sequence[tuple[str, Beginning]]) -> None:
        self.dominant_types: dict[str, DominantType | None] = {}
        called: dict[str, str] = {}  # names that differ only by case are one column, as in a table
        tables = []
        for path, first in beginnings:
            own = [called.setdefault(name.lower(), name) for name in first.rows.schema.names]
            tables.append((path, first.rows.rename_columns(own)))
            for column, more in first.survey.dominant_types.items():
                name = called[column.lower()]
                self.dominant_types[name] = combine(self.dominant_types.get(name), more)
        types: dict[str, pa.DataType] = {}
        for name, table in tables:
            typed = format_of(name, "auto").typed
            for field in table.schema:
                types[field.name] = unify(types.get(field.name, pa.null()), field.type, typed=typed)
        self.values = {
            name: pa.concat_arrays(
                [
                    convert(t[name].combine_chunks(), type_)[0] if name in t.schema.names else pa.nulls(len(t), type_)
                    for _, t in tables
                ]
            )
            for name, type_ in ((n, without_nulls(t)) for n, t in types.items())
        }
        self.paths = [path for path, _ in tables]
        self.columns_of = [dict(zip(table.schema.names, table.schema.types, strict=True)) for _, table in tables]
        self.whole = all(first.whole for _, first in beginnings)
        self.file = np.repeat(np.arange(len(tables)), np.array([len(t) for _, t in tables], np.int64))
        self.count = len(self.file)
        self.derived: dict[str, pa.Array] = {}
        self._codes: dict[str, NDArray[np.int64]] = {}

    def codes(self, name: str) -> NDArray[np.int64]:
        """One number for each row, equal if the values are equal. A null counts as a value."""
        if name not in self._codes:
            values = self._column(name)
            if pa.types.is_nested(values.type):
                values = pa.array([repr(v) for v in to_json_values(values)], pa.string())
            indices = values.dictionary_encode("encode").indices
            self._codes[name] = indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return self._codes[name]

    def group(
        self, names: Iterable[str], start: Indices | None = None, rows: Indices | None = None
    ) -> NDArray[np.int64]:
        """One number for each row, or each of ``rows``, equal if all these columns (and ``start``) are equal."""
        ids = np.zeros(self.count, np.int64) if start is None else start
        ids = ids if rows is None else ids[rows]
        for name in names:
            codes = self.codes(name) if rows is None else self.codes(name)[rows]
            _, ids = np.unique(ids * (codes.max(initial=0) + 1) + codes, return_inverse=True)
        return ids

    @cached_property
    def fresh(self) -> Mask:
        _, firsts = np.unique(self.group(self.values), return_index=True)
        return np.isin(np.arange(self.count), firsts)

    def present(self, names: Iterable[str]) -> Mask:
        """Which rows have a value in each of these columns."""
        valid: Mask = np.logical_and.reduce(
            [np.full(self.count, True), *(as_mask(self._column(n).is_valid()) for n in names)]
        )
        return valid

    def _column(self, name: str) -> pa.Array:
        return self.derived[name] if name in self.derived else self.values[name]

    def nulls(self, name: str) -> float:
        return float(self.values[name].null_count / self.count)

    def distinct(self, name: str) -> int:
        return len(np.unique(self.codes(name)[self.present([name])]))

    def range(self, name: str) -> tuple[object, object]:
        try:
            ends = pc.min_max(self.values[name])
        except pa.ArrowNotImplementedError:
            return None, None
        low, high = to_json_values(pa.array([ends["min"].as_py(), ends["max"].as_py()], self.values[name].type))
        return low, high

    def columns(self) -> Iterator[Column]:
        for name, values in self.values.items():
            yield Column(
                name, str(values.type), values.null_count, self.distinct(name), *map(_shorten, self.range(name))
            )


def _shorten(value: object) -> object:
    return f"{value[:37]}..." if isinstance(value, str) and len(value) > 40 else value


def read_sample(store: ObjectReader, files: Sequence[ObjectInfo], reading: Reading) -> tuple[Sample, list[str]]:
    """The first rows of ``files``, which `choose_files` chose, and why some of them can't be read."""
    beginnings, failures = read_beginnings(store, files, ROWS // len(files), BYTES // len(files), reading)
    more = len(failures) - 3
    return Sample(beginnings), failures[:3] + ([f"{count(more, 'more file')} can't be read"] if more > 0 else [])


def read_beginnings(
    store: ObjectReader, files: Sequence[ObjectInfo], rows: int, size: int, reading: Reading
) -> tuple[list[tuple[str, Beginning]], list[str]]:
    """At most so many rows and bytes of each file, by its name, and why some files can't be read."""
    beginnings, failures = [], []
    for file in files:
        given = LandingInput(file.name, file.size, file.etag, place=0)
        try:
            beginnings.append((file.name, read_beginning(store, given, rows, size, reading)))
        except UnreadableFileError as e:
            failures.append(f"{file.name!r} can't be read: {e.reason.rstrip('.')}")
        except NotFoundError:
            failures.append(f"{file.name!r} was deleted while the sample was read")
    return beginnings, failures


def choose_files(files: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """At most `FILES` files, several of a folder: files of one day or partition show most together."""
    folders: dict[str, list[ObjectInfo]] = {}
    for file in files:
        folders.setdefault(file.name.rpartition("/")[0], []).append(file)
    few = _choose_evenly(list(folders.values()), FILES // 2)
    return [f for folder in few for f in _choose_evenly(folder, FILES // len(few))]


def _choose_evenly(things: list[Item], count: int) -> list[Item]:
    return [things[i * len(things) // count] for i in range(count)] if count < len(things) else things
