"""What objects of a table store, field by field. Whoever changes a line here changes the format (docs/FORMAT.md)."""

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lakeupsert.config import DialectSettings, Reading
from lakeupsert.decoding import convert, decoder_of
from lakeupsert.table import chain
from lakeupsert.table.group import Group
from lakeupsert.table.ledger import Headers, LedgerEntry
from lakeupsert.table.manifest import NO_ROWS, Manifest
from lakeupsert.table.reading import StoredReading
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.work import RewriteOrder

BODIES = (TableSpec, LedgerEntry, Headers, Manifest, Group, Snapshot, RewriteOrder)
OF_SETTINGS = (
    b'{"format":"auto","delimiter":",","quote":null,"escape":"","header":null,"columns":[],"encoding":"utf-8","null":null,'
    b'"decimal_separator":".","dialects":[],"dates":{},"envelope":null,"only":{},"aliases":{},"positions":false,"types":false,'
    b'"folders":[]}'
)
"""The reading of a table without any setting of `[read]`."""
READING = Reading(
    format="csv",
    delimiter=";",
    quote="'",
    escape="\\",
    header=False,
    columns=("a", "b"),
    encoding="latin-1",
    null=("-", "NA"),
    decimal_separator=",",
    dialects=(DialectSettings(delimiter="|"), DialectSettings(delimiter=",", decimal_separator=",")),
    dates={"a": "%d.%m.%Y", "b": ("%Y", "%m/%Y")},
    envelope="debezium",
    only={"t": "x", "u": ("y", "z")},
    aliases={"A": "a"},
    positions=True,
    types=True,
    folders=("d",),
)
SPARSE = {
    "PartitionColumn": {"function": None, "source": None, "hashed": (), "count": None},
    "DeleteRule": {
        "column": None,
        "values": (),
        "keep": False,
        "upserts": None,
        "file_prefix": None,
        "not_null": None,
    },
    "Rename": {"retyped": None},
    "DataFile": {
        "at": None,
        "row": None,
        "deleted": None,
        "bucket": 0,
        "bits": 0,
        "renames": 0,
        "pieces": (),
        "statistics": (),
    },
    "TombstoneFile": {"inline": b"", "since": None},
    "DeletionVector": {"name": "", "at": 0, "inline": b"", "crc": None},
    "ColumnStatistics": {"least": None, "greatest": None},
    "BucketEntry": {
        "bucket": 0,
        "bits": 0,
        "settled": True,
        "base": (),
        "deltas": (),
        "tombstones": (),
        "history": (),
        "floor": None,
        "counters": {},
        "digests": {},
    },
    "Digests": {
        "adopted": None,
        "superseded": None,
        "withdrawn": None,
        "tombstones_dropped": NO_ROWS,
        "refused": NO_ROWS,
    },
    "Touched": {
        "digest": None,
        "superseded_digest": None,
        "tombstones": (),
        "moved": 0,
        "followed": 0,
        "extract": None,
    },
    "FullExtract": {"replaces": False, "within": ()},
    "Statement": {"set": {}, "where": None, "keys": None},
    "PartitionVersion": {"added": -1, "bits": 0, "deltas": 0, "debt": 0, "group": None},
}
"""Fields that may be absent, and what that means; in all other objects a field that is absent is null, 0, false or empty."""


def test_reading_is_stored_field_by_field_whatever_the_defaults_are() -> None:
    assert msgspec.json.encode(StoredReading.of(Reading())) == OF_SETTINGS
    for reading in (Reading(), READING):
        stored = decoder_of(StoredReading).decode(msgspec.json.encode(StoredReading.of(reading)))
        assert stored.settings == reading
    assert not [f.name for f in msgspec.structs.fields(StoredReading) if not f.required]
    assert {*StoredReading.__struct_fields__} == {*Reading.__struct_fields__}, "a setting that no entry stores"


@pytest.mark.parametrize("name", StoredReading.__struct_fields__)
def test_reading_without_a_field_is_refused(name: str) -> None:
    stored = msgspec.json.decode(OF_SETTINGS)
    del stored[name]
    with pytest.raises(msgspec.ValidationError, match=name):
        convert(stored, StoredReading)


def test_absent_fields_mean_what_they_always_did() -> None:
    """An object writes all fields, or leaves those out that have a default. So every default is part of the format."""
    seen = {type_.__name__: type_ for body in BODIES for type_ in structs_in(body)}
    for name, type_ in seen.items():
        own = {f.name: default_of(f) for f in msgspec.structs.fields(type_) if not f.required}
        inherited = {n: v for base in type_.__mro__[1:] for n, v in SPARSE.get(base.__name__, {}).items()}
        config = type_.__struct_config__
        assert config.omit_defaults or config.array_like or not own, (
            f"{name} writes {sorted(own)}, and need not have them"
        )
        if name in SPARSE:
            assert own == msgspec.to_builtins(inherited | SPARSE[name]), name
        else:
            assert not any(own.values()), name


def test_every_object_has_the_newest_format() -> None:
    assert chain.FORMAT == 2


def default_of(field: Any) -> Any:
    return msgspec.to_builtins(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)


def structs_in(type_: Any) -> Iterator[Any]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        yield type_
        for hint in typing.get_type_hints(type_).values():
            yield from structs_in(hint)
    for part in typing.get_args(type_):
        yield from structs_in(part)
