"""The landing formats: who reads each, and what it can do. Everybody else asks for a property and knows no format by name."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, get_args

import pyarrow as pa

from lakeupsert.config import EnvelopeName, Reading
from lakeupsert.landing.formats import avrofile, csvfile, delimited, jsonlines, parquetfile, records
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Columns,
    Contents,
    LandingInput,
    Source,
    UnreadableFileError,
)
from lakeupsert.landing.formats.orc import file as orcfile
from lakeupsert.landing.formats.unpacked import compression_of, several_members, without_compression

SchemaOf = Callable[[Source, LandingInput, Reading, pa.Schema | None, frozenset[str]], Columns]
OpenBlocks = Callable[[Source, LandingInput, Reading, frozenset[str], Collection[str] | None], Contents]


@dataclass(frozen=True)
class LandingFormat:
    """A format of landing files.

    Attributes:
        schema_of: the columns of a file; after `Reading` it takes what `files.survey` takes.
        open_blocks: the rows; after `Reading` it takes the required columns, and the columns to read (None: all).
        endings: of the names of its files, if `format` is auto.
        typed: its files say the types of their columns. The others are text, and such files may be compressed as a whole.
        seekable: read at many places, not from the beginning to the end.
        shared: tasks may share a file, by its row groups.
        delimited: a delimiter cuts its text into values, which are text.
        names_by_row: each row names its columns, so these are known only once the whole file is read.
        envelopes: of the messages that it may hold.
        block: makes a block of its rows that went to quarantine as Arrow rows.
    """

    name: str
    schema_of: SchemaOf
    open_blocks: OpenBlocks
    endings: tuple[str, ...] = ()
    typed: bool = False
    seekable: bool = False
    shared: bool = False
    delimited: bool = False
    names_by_row: bool = False
    envelopes: tuple[EnvelopeName, ...] = ()
    block: type[ArrowBlock] = ArrowBlock


def _refuse_unknown(source: Source | None, file: LandingInput, *_: object) -> NoReturn:
    why = several_members(file.path)
    if compression_of(file.path) != "zip":
        endings = ", ".join(ending for one in FORMATS.values() for ending in one.endings)
        known = f"{endings} (text may be compressed, for example .csv.gz)"
        why = f"`format` is auto, and its name does not end in one of {known}."
    raise UnreadableFileError(file.path, why)


def _by_dialect(choose: records.ChooseDialect) -> tuple[SchemaOf, OpenBlocks]:
    return partial(records.schema_of, choose), partial(records.open_blocks, choose)


UNKNOWN = LandingFormat("unknown", _refuse_unknown, _refuse_unknown)
"""The format of a file whose name does not say it."""
FORMATS = {
    one.name: one
    for one in (
        LandingFormat(
            "parquet",
            parquetfile.schema_of,
            parquetfile.open_blocks,
            (".parquet",),
            typed=True,
            seekable=True,
            shared=True,
        ),
        LandingFormat("csv", *_by_dialect(csvfile.choose_dialect), (".csv",), delimited=True),
        LandingFormat("delimited", *_by_dialect(delimited.choose_dialect), delimited=True),
        LandingFormat(
            "jsonl",
            jsonlines.schema_of,
            jsonlines.open_blocks,
            (".jsonl", ".ndjson", ".json"),
            names_by_row=True,
            envelopes=get_args(EnvelopeName),
        ),
        LandingFormat(
            "avro", avrofile.schema_of, avrofile.open_blocks, (".avro",), typed=True, envelopes=("debezium",)
        ),
        LandingFormat(
            "orc", orcfile.schema_of, orcfile.open_blocks, (".orc",), typed=True, seekable=True, block=orcfile.OrcBlock
        ),
    )
}
"""Each by the value of the setting `format` that names it."""


def format_of(path: str, configured: str) -> LandingFormat:
    """The configured format, or for `auto` the format by the ending of the name; `UNKNOWN` if the ending is."""
    if configured != "auto":
        return FORMATS[configured]
    name = without_compression(path).lower()
    found = next((one for one in FORMATS.values() if name.endswith(one.endings)), UNKNOWN)
    return UNKNOWN if found.typed and name != path.lower() else found


def is_read(ending: str, configured: str) -> bool:
    """Whether a table with this setting `format` reads files with that ending as what they are."""
    own, given = format_of(ending, "auto"), format_of(ending, configured)
    return own is given or (own.delimited and given.delimited)


def readable_format(file: LandingInput, reading: Reading) -> LandingFormat:
    """The file's format. Raises UnreadableFileError if its name has no known ending, or the format does not fit `envelope`."""
    found = format_of(file.path, reading.format)
    if found is UNKNOWN:
        _refuse_unknown(None, file)
    if reading.envelope and reading.envelope not in found.envelopes:
        raise UnreadableFileError(
            file.path, f"`envelope` is {reading.envelope}, which is not supported for {found.name} files."
        )
    return found
