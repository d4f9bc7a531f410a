"""Columns that only the folders of a landing file have: `day=2024-01-01/part.parquet` without a column `day`.

A folder counts only for columns that the configuration names (`Reading.folders`), since `dt=2024-01-02` may be the day of
arrival. A value in the file itself always counts more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats.blocks import ArrowBlock, Block, RenamedBlock, given_types
from lakeupsert.landing.formats.dates import dated, formats_of, type_by_formats
from lakeupsert.landing.formats.inference import FROM_TEXT, convert_text, infer_type
from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import Converted, as_mask
from lakeupsert.table.layout import HIVE_NULL
from lakeupsert.table.spec import TableSpec

FolderValues = Mapping[str, str | None]
"""The text that folders give to each column, None for null; names are the table's."""


def folders_of(path: str) -> Iterator[tuple[str, str]]:
    """Name and value, as text, of each folder `name=value` above a file."""
    for folder in path.split("/")[:-1]:
        name, sign, value = folder.partition("=")
        if sign and name:
            yield _unescaped(name), _unescaped(value)


def _unescaped(text: str) -> str:
    """A name or value as the folder means it; as it is written if its escapes are no UTF-8, so that `%FE` and `%FF` are two."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def folder_values(path: str, reading: Reading) -> FolderValues:
    """What the folders above a landing file give to columns that the configuration names. Of two folders the inner one counts."""
    if "=" not in path or not reading.folders:
        return {}
    called = {name.lower(): name for name in reading.folders}
    nulls = ("", HIVE_NULL, *reading.null_words)
    found = ((called.get(reading.table_name_of(name).lower()), text) for name, text in folders_of(path))
    return {name: None if text in nulls else text for name, text in found if name}


def reading_of(paths: Iterable[str], reading: Reading) -> Reading:
    """How these files are read, without names that none of their folders has."""
    names = dict.fromkeys(name for path in paths for name in folder_values(path, reading))
    return msgspec.structs.replace(reading, folders=tuple(names))


def missing_values(names: Iterable[str], given: FolderValues) -> FolderValues:
    """Those of ``given`` that are of none of these columns, whatever their case."""
    own = set(map(str.lower, names)) if given else set()
    return {name: text for name, text in given.items() if name.lower() not in own}


def add_folder_columns(
    schema: pa.Schema, path: str, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> pa.Schema:
    """The columns of a file and those that its folders give, in types as `files.survey` reports them for text."""
    type_of = given_types(known, text_columns)
    for name, text in missing_values(schema.names, folder_values(path, reading)).items():
        formats = formats_of(reading, name)
        inferred = type_by_formats(formats) if formats else infer_type(pa.array([text], pa.string()), FROM_TEXT)
        schema = schema.append(pa.field(name, type_of(name) or inferred))
    return schema


def with_folders(block: Block, path: str, reading: Reading) -> Block:
    """The block with the columns that folders give."""
    values = folder_values(path, reading)
    if not values:
        return block
    own = {name.lower(): name for name in block.names}
    return FolderBlock(
        block, {name: name for name in own.values()}, {own.get(n.lower(), n): text for n, text in values.items()}
    )


def count_contrary(block: Block, path: str, reading: Reading, spec: TableSpec) -> dict[str, int]:
    """How many rows have another value of their own in a column than their folder gives, by column."""
    found = {}
    for name, text in folder_values(path, reading).items():
        at = spec.schema.get_field_index(spec.table_name_of(name))
        type_ = spec.schema.field(at).type if at >= 0 else pa.string()
        own = block.convert(next(own for own in block.names if own.lower() == name.lower()), type_)[0]
        given = dated(ArrowBlock({name: pa.array([text], pa.string())}, np.zeros(1, np.int64)), reading)
        value = given.convert(name, type_)[0][0]
        same = pc.equal(own, value).fill_null(False) if value.is_valid else own.is_null()
        found[name] = len(own) - (pc.sum(same).as_py() or 0)
    return {name: number for name, number in found.items() if number}


@dataclass(frozen=True)
class FolderBlock(RenamedBlock):
    """A block whose rows get values from folders in columns that they lack. Rows that go to quarantine keep what the file has.

    Attributes:
        given: the text of each column.
    """

    given: FolderValues

    @property
    def names(self) -> Iterable[str]:
        return dict.fromkeys((*self.own, *self.given))

    def name_in_file(self, name: str) -> str:
        return super().name_in_file(name) if name in self.own else name

    def convert(self, name: str, type_: pa.DataType) -> Converted:
        own = super().convert(name, type_)
        return self._fill(name, own, convert_text(self._given(name), type_)) if name in self.given else own

    def texts(self, name: str) -> Converted | None:
        own = super().texts(name)
        if name not in self.given or (name in self.own and own is None):
            return own
        nothing = pa.nulls(len(self.places), pa.string()), np.zeros(len(self.places), bool)
        return self._fill(name, own or nothing, (self._given(name), np.zeros(1, bool)))

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        if name in self.own and (rows & super().has(name)).any():
            return super().type_of(name, rows, typed=typed)
        return infer_type(self._given(name), FROM_TEXT)

    def has(self, name: str) -> Mask:
        return super().has(name) | (name in self.given)

    def is_valid(self, name: str) -> Mask:
        own = super().is_valid(name) if name in self.own else np.zeros(len(self.places), bool)
        return own | (~super().has(name) & (self.given.get(name) is not None))

    def originals(self, name: str, rows: Sequence[int]) -> list[object]:
        own = super().originals(name, rows) if name in self.own else [None] * len(rows)
        lacks = ~super().has(name) if name in self.given else np.zeros(len(self.places), bool)
        return [self.given[name] if lacks[row] else value for row, value in zip(rows, own, strict=True)]

    def _given(self, name: str) -> pa.Array:
        return pa.array([self.given[name]], pa.string())

    def _fill(self, name: str, own: Converted, given: Converted) -> Converted:
        """A column of the file, and a folder's one value in the rows that lack it."""
        lacks = ~super().has(name)
        if not lacks.any():
            return own
        value, unfit = given[0][0], as_mask(pa.array(given[1]))[0]
        filled = pa.repeat(value, len(lacks)) if lacks.all() else pc.if_else(pa.array(lacks), value, own[0])
        return filled, np.where(lacks, unfit, own[1])
