"""The tables of a feed that rows come from, and the versions of Singer's streams and of dropped tables of AWS DMS.

A version of a stream is a full copy of its table, or that copy and the changes since. ACTIVATE_VERSION says that rows of lower
versions are gone; taps send it before and after a copy, and before each incremental sync with the version that goes on.
"""

from collections.abc import Iterable
from functools import reduce

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats.blocks import Block
from lakeupsert.landing.formats.envelopes import NEW_TABLE, TABLE_NAMES

_NAMES = (*TABLE_NAMES, "__source_schema", "__source_db", "__schema_name", "__schema", "__db", "__namespace")
_MOST_NAMES = 20
UNKNOWN_VERSION = -1
"""Of a row without a version."""


class Origins(msgspec.Struct, frozen=True):
    """Where rows come from.

    Attributes:
        tables: the names of their tables, schemas or databases, by the column that has these; the first `_MOST_NAMES` of a file.
        versions: the lowest version of the rows of each stream of Singer, refused ones too; of DMS see `_versions_of_dms`.
        begun: the highest version of each stream that ACTIVATE_VERSION names, `NEW_TABLE` of a table that DMS drops or empties.
    """

    tables: dict[str, tuple[str, ...]] = {}
    versions: dict[str, int] = {}
    begun: dict[str, int] = {}

    def __or__(self, other: "Origins") -> "Origins":
        if other == NO_ORIGINS:
            return self
        columns = {*self.tables, *other.tables}
        tables = {n: sorted({*self.tables.get(n, ()), *other.tables.get(n, ())})[:_MOST_NAMES] for n in columns}
        lowest = {s: min(v, self.versions.get(s, v)) for s, v in other.versions.items()}
        highest = {s: max(v, self.begun.get(s, v)) for s, v in other.begun.items()}
        emptied = [s for s, v in other.begun.items() if v == NEW_TABLE and s in self.versions]
        lowest |= dict.fromkeys(emptied, UNKNOWN_VERSION)
        names = {n: tuple(tables[n]) for n in _NAMES if n in tables}
        return Origins(names, {**self.versions, **lowest}, {**self.begun, **highest})


NO_ORIGINS = Origins()


def all_origins(several: Iterable[Origins]) -> Origins:
    return reduce(Origins.__or__, several, NO_ORIGINS)


def origins_of(block: Block, reading: Reading) -> Origins:
    """Where the rows of a block come from. With `only` the tables do not matter."""
    tables: dict[str, tuple[str, ...]] = {}
    if not reading.only:
        for name in {*block.names}.intersection(_NAMES):
            found = pc.unique(block.convert(name, pa.string())[0]).drop_null().to_pylist()
            tables[name] = tuple(sorted(found)[:_MOST_NAMES])
    begun: dict[str, int] = {}
    for one in block.malformed:
        if one.version is not None and one.truncate is not None:
            name = str(one.truncate.get("__stream", one.truncate.get("__table_name", "")))
            begun[name] = max(one.version, begun.get(name, one.version))
    if reading.envelope == "dms":
        return Origins(tables, _versions_of_dms(block, reading), begun)
    if reading.envelope != "singer":
        return Origins(tables)
    stream, version = (reading.table_name_of(name) for name in ("__stream", "__version"))
    columns = [
        pc.fill_null(block.convert(stream, pa.string())[0], ""),
        pc.fill_null(block.convert(version, pa.int64())[0], UNKNOWN_VERSION),
    ]
    lowest = pa.table(columns, ["stream", "version"]).group_by("stream").aggregate([("version", "min")]).to_pylist()
    return Origins(tables, {row["stream"]: row["version_min"] for row in lowest}, begun)


def _versions_of_dms(block: Block, reading: Reading) -> dict[str, int]:
    """`NEW_TABLE` for each table that a block has rows of; lower if one of them comes before a record that drops the table."""
    names = pc.fill_null(block.convert(reading.table_name_of("__table_name"), pa.string())[0], "").to_pylist()
    first = dict(zip(reversed(names), block.places[::-1].tolist(), strict=True))
    versions = dict.fromkeys(first, NEW_TABLE)
    for one in block.malformed:
        name = str((one.truncate or {}).get("__table_name", ""))
        if one.version is not None and first.get(name, one.place) < one.place:
            versions[name] = UNKNOWN_VERSION
    return versions
