"""The shape of the files that chombo's jobs read: how many fields a record has, and of which types.

Reads     the first rows of sample files
Writes    nothing
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.errors import RefusedError
from lakeupsert.operations.init.sample import choose_files, read_beginnings
from lakeupsert.phrases import count
from lakeupsert.storage import ObjectInfo, ObjectReader

SEQUENCE = r"_(\d+)$"
"""Where chombo looks for the order of a file without an ordering column: behind the last _ of its name."""
_ROWS, _BYTES = 1000, 1 << 20
"""Most rows and bytes that are read of each sample file."""


@dataclass(frozen=True)
class Feed:
    """The shape of the widest records.

    Attributes:
        width: the number of their fields.
        origin: where that was seen.
        types: the types of their values in the sample, by ordinal; null if all are empty.
        warnings: files that can't be read, that have shorter records, or whose names lack the order.
    """

    width: int
    origin: str
    types: tuple[pa.DataType, ...]
    warnings: tuple[str, ...]


def look_at_feed(
    store: ObjectReader, files: Sequence[ObjectInfo], reading: Reading, *, has_order_in_name: bool
) -> Feed:
    """Raises RefusedError if no record of the sample can be read."""
    beginnings, warnings = read_beginnings(store, choose_files(files), _ROWS, _BYTES, reading)
    shapes = {name: first.rows.schema for name, first in beginnings if first.rows.schema.names}
    if not shapes:
        raise RefusedError(
            "no-readable-file",
            f"No record can be read in the files of {store.uri()}: {warnings[0] if warnings else 'they are empty'}.",
            next="put a file of the feed there, then run the same command again",
        )
    name, widest = max(shapes.items(), key=lambda shape: len(shape[1].names))
    width = len(widest.names)
    for other, schema in shapes.items():
        if len(schema.names) < width:
            warnings.append(
                f"records of {other!r} have {count(len(schema.names), 'field')} and those of {name!r} {width}: shorter records "
                "go to quarantine (malformed), so write them with all fields"
            )
    bare = [f.name for f in files if not re.search(SEQUENCE, PurePosixPath(f.name).name)] if has_order_in_name else []
    if bare:
        warnings.append(
            f"{len(bare)} of {count(len(files), 'file')} have no number after the last _ of their names, for example "
            f"{bare[0]!r}: such files are set aside"
        )
    return Feed(width, f"{count(width, 'field')} in {name!r}", tuple(widest.types), tuple(warnings))
