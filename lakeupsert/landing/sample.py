"""A sample of the rows of many files: one type a column, and which values and combinations of them are equal.

Reads     at most `FILES` files, of each its first rows: at most `ROWS`, and of text `BYTES`, of all of them together
Writes    nothing
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.files import TYPED, Beginning, beginning, format_of
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.inference import unify, without_nulls
from lakeupsert.landing.formats.leaning import Leaning, together
from lakeupsert.rows.convert import convert, plain, true
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore

FILES = 32
"""Most files that are looked at, spread evenly over the folders."""
ROWS = 200_000
"""Most rows that are looked at, of all files together."""
BYTES = 1 << 25
"""Most bytes of text files that are read, of all files together."""


@dataclass(frozen=True)
class Column:
    """A column as the sample has it; ``low`` and ``high`` as JSON has them, None where the type has no order."""

    name: str
    type: str
    nulls: int
    distinct: int
    low: Any
    high: Any


class Sample:
    """The rows that are looked at.

    Attributes:
        paths: the files.
        file: of each row the index of its file.
        values: by column a ``pyarrow.Array`` of one value a row; what a file lacks is null.
        leanings: of text columns whose types were inferred what most of their values are.
        fresh: a mask of the rows that repeat no other in every column: for no key are those two records.
    """

    def __init__(self, beginnings: Sequence[tuple[str, Beginning]]) -> None:
        self.leanings: dict[str, Leaning | None] = {}
        for _, found in beginnings:
            for column, more in found.survey.leanings.items():
                self.leanings[column] = together(self.leanings.get(column), more)
        tables = [(name, found.rows) for name, found in beginnings]
        types: dict[str, Any] = {}
        for name, table in tables:
            typed = format_of(name, "auto") in TYPED
            for field in table.schema:
                types[field.name] = unify(types.get(field.name, pa.null()), field.type, typed)
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
        self.file = np.repeat(np.arange(len(tables)), np.array([len(t) for _, t in tables], np.int64))
        self.count = len(self.file)
        self._codes: dict[str, Any] = {}

    def codes(self, name: str) -> Any:
        """Numbers that are equal where the values are; a null is a value."""
        if name not in self._codes:
            values = self.values[name]
            if pa.types.is_nested(values.type):
                values = pa.array([repr(v) for v in plain(values)], pa.string())
            indices = values.dictionary_encode("encode").indices
            self._codes[name] = indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return self._codes[name]

    def group(self, names: Iterable[str], start: Any = None) -> Any:
        """Numbers that are equal where all these columns (and ``start``) are."""
        ids = np.zeros(self.count, np.int64) if start is None else start
        for name in names:
            codes = self.codes(name)
            _, ids = np.unique(ids * (codes.max(initial=0) + 1) + codes, return_inverse=True)
        return ids

    @cached_property
    def fresh(self) -> Any:
        _, firsts = np.unique(self.group(self.values), return_index=True)
        mask = np.zeros(self.count, bool)
        mask[firsts] = True
        return mask

    def present(self, names: Iterable[str]) -> Any:
        """A mask of the rows that have a value in each of these columns."""
        return np.logical_and.reduce([np.full(self.count, True), *(true(self.values[n].is_valid()) for n in names)])

    def nulls(self, name: str) -> float:
        return float(self.values[name].null_count / self.count)

    def distinct(self, name: str) -> int:
        return len(np.unique(self.codes(name)[self.present([name])]))

    def range(self, name: str) -> tuple[Any, Any]:
        try:
            ends = pc.min_max(self.values[name])
        except pa.ArrowNotImplementedError:
            return None, None
        low, high = plain(pa.array([ends["min"].as_py(), ends["max"].as_py()], self.values[name].type))
        return low, high

    def columns(self) -> Iterator[Column]:
        for name, values in self.values.items():
            yield Column(
                name, str(values.type), values.null_count, self.distinct(name), *map(_shortened, self.range(name))
            )


def _shortened(value: Any) -> Any:
    return f"{value[:37]}..." if isinstance(value, str) and len(value) > 40 else value


def read_sample(store: ObjectStore, files: Sequence[ObjectInfo]) -> tuple[Sample, list[str]]:
    """First rows of some of ``files``, and what is wrong with those that can't be read."""
    tables, failed = [], []
    chosen = _spread(files)
    for file in chosen:
        given = LandingInput(file.name, file.size, file.etag, place=0)
        try:
            tables.append((file.name, beginning(store, given, ROWS // len(chosen), BYTES // len(chosen))))
        except UnreadableFileError as e:
            failed.append(f"{file.name!r} can't be read: {e.reason.rstrip('.')}")
        except NotFoundError:
            failed.append(f"{file.name!r} vanished while it was looked at")
    more = len(failed) - 3
    return Sample(tables), failed[:3] + ([f"{more} more files can't be read"] if more > 0 else [])


def _spread(files: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """`FILES` of them: several of a folder, since files of one day or partition tell most together."""
    folders: dict[str, list[ObjectInfo]] = {}
    for file in files:
        folders.setdefault(file.name.rpartition("/")[0], []).append(file)
    few = _evenly(list(folders.values()), FILES // 2)
    return [f for folder in few for f in _evenly(folder, FILES // len(few))]


def _evenly(things: list[Any], count: int) -> list[Any]:
    return [things[i * len(things) // count] for i in range(count)] if count < len(things) else things
