"""What a landing file holds: its columns, and its rows under the table's names.

Reads     one landing file, block by block; memory follows the block (for Parquet, also a stored row group; for ORC, a stripe)
Writes    nothing
Repeat    safe: the same file gives the same result

The columns of JSON lines are known only once all lines are read. So these files are not surveyed for an existing table, unless
one of them has a new column.
"""

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.content import open_landed
from lakeupsert.landing.formats.blocks import (
    Block,
    Columns,
    Contents,
    DamagedFileError,
    LandingInput,
    RenamedBlock,
    Source,
    UnreadableFileError,
)
from lakeupsert.landing.formats.dates import dated, formats_of, type_by_formats
from lakeupsert.landing.formats.folders import add_folder_columns, folder_values, missing_values, with_folders
from lakeupsert.landing.formats.only import names_in_files, own_rows
from lakeupsert.landing.formats.registry import LandingFormat, readable_format
from lakeupsert.landing.formats.unpacked import ReadAhead, open_text
from lakeupsert.landing.partitions import partition_sources
from lakeupsert.storage import NotFoundError, ObjectReader
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True, kw_only=True)
class Survey(Columns):
    """What a file holds, before any row is accepted.

    Attributes:
        schema: columns in the types that a table would store them in; None if they can't be read. A column of a text file
            without any value has the null type (see `without_nulls`).
        typed: whether the types are the file's own. The types of text are inferred, or the table's.
        unreadable: why the file as a whole can't be read, or None.
        damaged: it is unreadable since the store can't give its bytes.
        changed: the file was deleted or replaced since it was listed; it belongs to the next batch.
    """

    path: str
    schema: pa.Schema | None = None
    typed: bool = False
    unreadable: str | None = None
    damaged: bool = False
    changed: bool = False


def survey(
    store: ObjectReader, file: LandingInput, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> Survey:
    """Columns and types of a file. A file that can't be read, or changed, is reported in the result and not raised.

    Of typed files the footer or the header is read. Of CSV and delimited text the header is read, and all values of columns
    that are neither in ``known`` nor in ``text_columns``. Of JSON lines everything is read, because each line has its own names.

    Args:
        known: the table's columns, None at creation. Text columns have these types.
        text_columns: columns of text files that stay strings unless ``known`` has a type for them: keys without a given
            type, the operation column.
    """
    try:
        with open_landed(store, file.path, file.listed) as source:
            kind = readable_format(file, reading)
            columns = Reader.of(source, file, kind, reading).columns(known, text_columns)
        return Survey(path=file.path, typed=kind.typed, **vars(columns))
    except NotFoundError:
        return Survey(path=file.path, changed=True)
    except UnreadableFileError as e:
        # A file that is still being written is not damaged: as unreadable it would be set aside for good.
        if store.head(file.path) != file.listed:
            return Survey(path=file.path, changed=True)
        return Survey(path=file.path, unreadable=e.reason, damaged=isinstance(e, DamagedFileError))


def share_row_groups(files: Iterable[LandingInput], surveys: Iterable[Survey]) -> tuple[LandingInput, ...]:
    """The files; where a survey found row groups, tasks may share them."""
    groups = {one.path: (0, one.row_groups) for one in surveys if one.row_groups}
    return tuple(replace(file, row_groups=groups.get(file.path)) for file in files)


@dataclass(frozen=True)
class Reader:
    """Reads one opened landing file of any format, with its columns renamed by `aliases`."""

    source: Source
    file: LandingInput
    format: LandingFormat
    reading: Reading

    @classmethod
    def of(cls, source: Source, file: LandingInput, kind: LandingFormat, reading: Reading) -> "Reader":
        """Decompresses and decodes text, and reads Avro in few large parts."""
        if not kind.typed:
            source = open_text(source, file, reading.encoding)
        elif not kind.seekable:
            source = ReadAhead.of(source)
        return cls(source, file, kind, reading)

    def columns(self, known: pa.Schema | None, text_columns: frozenset[str]) -> Columns:
        """The columns of the file; the arguments are those of `survey`."""
        aliases, given = self.reading.aliases, known
        types = {name.lower(): type_by_formats(formats_of(self.reading, name)) for name in self.reading.dates}
        types |= {field.name.lower(): field.type for field in given or ()}
        types |= {old.lower(): types.get(new.lower()) for old, new in aliases.items()}
        known = pa.schema([(name, type_) for name, type_ in types.items() if type_ is not None])
        wanted = {name.lower() for name in text_columns}
        own_texts = text_columns | {old for old, new in aliases.items() if new.lower() in wanted}
        columns = self.format.schema_of(self.source, self.file, self.reading, known, own_texts)
        return _columns_in_table(columns, self.file.path, self.reading, given, text_columns)

    def blocks(self, required: frozenset[str], only: Collection[str] | None = None) -> Contents:
        """The rows of the file. ``required`` and ``only`` are names after the renaming."""
        aliases, path, reading = self.reading.aliases, self.file.path, self.reading
        given = folder_values(path, reading)
        required = frozenset(missing_values(given, dict.fromkeys(required))) if given else required
        if given and only is not None and not missing_values(given, dict.fromkeys(only)):
            only = None  # of no column, Parquet and ORC read no row
        olds = {name: [old for old, new in aliases.items() if new.lower() == name.lower()] for name in required}
        wanted = {name.lower() for name in only or ()}
        more = [old for old, new in aliases.items() if new.lower() in wanted]
        own = self._own_blocks(required.union(*olds.values()), None if only is None else [*only, *more])
        missing = frozenset(name for name in required if own.missing.issuperset([name, *olds[name]]))
        return Contents(missing, _aliased_blocks(own.blocks, path, reading))

    def _own_blocks(self, required: frozenset[str], only: Collection[str] | None) -> Contents:
        if only is not None and self.reading.only:
            only = [*only, *names_in_files(self.reading)]
        contents = self.format.open_blocks(self.source, self.file, self.reading, required, only)
        own = contents.blocks if self.format.names_by_row else own_rows(contents.blocks, self.reading)
        return Contents(contents.missing, own)


def _columns_in_table(
    columns: Columns, path: str, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> Columns:
    """The columns under their names in the table, those with formats of `dates` in the types of these, and those of folders.

    A column that is ``known`` in another type keeps it, and so does one that the file has as dates already.
    """
    columns = _aliased_columns(columns, path, reading)
    others = set() if known is None else {name.lower() for name in known.names}
    schema = columns.schema
    for i, field in enumerate(schema):
        formats = formats_of(reading, field.name)
        is_written = pa.types.is_string(field.type) or pa.types.is_integer(field.type)
        if formats and is_written and field.name.lower() not in others:
            schema = schema.set(i, field.with_type(type_by_formats(formats)))
    schema = add_folder_columns(schema, path, reading, known, text_columns)
    return replace(columns, schema=schema)


def _aliased_columns(columns: Columns, path: str, reading: Reading) -> Columns:
    if not reading.aliases:
        return columns
    own_names = _own_names(path, columns.schema.names, reading)
    schema = pa.schema([(new, columns.schema.field(own).type) for new, own in own_names.items()])
    return replace(
        columns,
        schema=schema,
        dominant_types={reading.table_name_of(own): one for own, one in columns.dominant_types.items()},
        own={new: own for new, own in own_names.items() if new != own},
        stated=frozenset(map(reading.table_name_of, columns.stated)),
    )


def _own_names(path: str, names: Iterable[str], reading: Reading) -> dict[str, str]:
    """The file's names of its columns, by their names after `aliases`. Raises UnreadableFileError if two become the same."""
    own: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name in names:
        new = reading.table_name_of(name)
        other = seen.setdefault(new.lower(), name)
        if other.lower() != name.lower():
            raise UnreadableFileError(
                path,
                f"The file has both {other!r} and {name!r}, and `aliases` under [read] makes both the column {new!r}. "
                "Which value counts is unknown, so no row was taken. Land the rows in two files, each with one of these names.",
            )
        own[new] = name
    return own


def _aliased_blocks(own_blocks: Iterator[Block], path: str, reading: Reading) -> Iterator[Block]:
    seen: dict[str, None] = {}
    for block in own_blocks:
        if reading.aliases and not seen.keys() >= set(block.names):
            seen |= dict.fromkeys(block.names)
            _own_names(path, seen, reading)
        yield dated(with_folders(apply_aliases(block, path, reading), path, reading), reading)


def apply_aliases(block: Block, path: str, reading: Reading) -> Block:
    """The block with its columns renamed by `aliases`. Raises UnreadableFileError if two become the same."""
    own = _own_names(path, block.names, reading) if reading.aliases else {}
    return RenamedBlock(block, own) if any(map(operator.ne, own.keys(), own.values())) else block


def required_columns(spec: TableSpec) -> frozenset[str]:
    """The columns that every landing file of the table must have."""
    in_files = () if spec.stamped or spec.order_in_name or spec.groups else spec.order_by
    absent = {one.column for one in spec.partition_from} | set(() if in_files else spec.order_by)
    placing = () if spec.takes_key_alone else partition_sources(spec)
    return frozenset((*spec.key, *placing, *in_files)) - absent


def under_table_names(block: Block, spec: TableSpec) -> Block:
    """The block with the table's names, which may differ from the file's by case."""
    own = {spec.table_name_of(name): name for name in block.names}
    return block if all(map(operator.eq, own.keys(), own.values())) else RenamedBlock(block, own)
