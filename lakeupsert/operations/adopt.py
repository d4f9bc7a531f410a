"""Make a table of an existing Hive-partitioned Parquet folder, without rewriting a file.

Reads     one listing of the folder, and the footer of every file in it
Writes    the spec, a first manifest for each partition, then ledger entry 0: that put is the commit; then the snapshot
Repeat    safe until the commit, and afterwards refused: the folder is a table then

The files are batch 0. Nobody knows yet whether they hold a key once, so readers see them as they are until a partition's
first merge, which settles them by G1 with what comes in.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.landing.adopted import Footing, footing, null_keys
from lakeupsert.landing.formats.blocks import UnreadableFileError
from lakeupsert.landing.formats.inference import inferred, unify, without_nulls
from lakeupsert.pipeline.discover import is_landing_file
from lakeupsert.pipeline.key_places import adopted_index
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import publish
from lakeupsert.storage import NotFoundError, ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME, parse_partition, partition_name, partition_texts
from lakeupsert.table.ledger import LedgerEntry, Touched, next_stamp
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.spec import PartitionColumn, TableSpec
from lakeupsert.table.types import same_values, widened

AT_ONCE = 16
"""Requests under way at a time."""
_TEXTS = [pa.int64(), pa.date32()]


@dataclass(frozen=True)
class Adopted:
    """What the table began with; ``snapshot`` shows it. ``left`` are objects that are no part of it; ``warnings`` are for
    people."""

    files: int
    partitions: int
    rows: int
    bytes: int
    snapshot: int | None
    left: tuple[str, ...]
    warnings: tuple[str, ...]


def adopt(table: OpenTable, progress: Callable[[str], None] = lambda text: None) -> Adopted:
    """Commit the folder at ``processed`` as the table's batch 0, and publish it.

    Raises ConfigurationError where it is a table already, or is not laid out as one partition column, and RefusedError
    where its rows can't be kept as they are; nothing is committed then.
    """
    if table.objects.ledger.head() is not None:
        raise _already(table)
    if table.settings.groups:
        raise ConfigurationError(
            "bad-setting",
            f"[tables.{table.name}] has `groups`, and adopted rows do not say which of them brought which. Nothing was changed.",
            next="land the rows instead, or leave out `groups`",
        )
    folders, left = _listed(table)
    progress(f"reading the footers of {sum(map(len, folders.values()))} files")
    footings = _footings(table, [found for files in folders.values() for found in files])
    spec, warnings = _planned(table, footings, list(folders))
    _refuse_null_keys(table, footings)
    for folder in folders:
        canonical = parse_partition(spec, folder)
        if canonical != folder:
            raise ConfigurationError(
                "not-partitioned",
                f"{table.store.uri(folder)}: rows that land there would go to {canonical}, as values are compared by their type. "
                "Nothing was changed.",
                next=f"give the partition column the type string under [tables.{table.name}.schema], or rename the folder",
            )
    touched: dict[str, Touched] = {}
    by_name = {f.file.name: f.file for f in footings}
    for folder, found in folders.items():
        partition = partition_name(partition_texts(folder))
        assert partition is not None, "_listed refuses those"
        files = tuple(by_name[f.name] for f in found)
        before = touched.get(partition, Touched(files=(), rows=0, superseded=0, bytes=0))  # its digest is not known
        touched[partition] = msgspec.structs.replace(
            before,
            files=(*before.files, *files),
            rows=before.rows + sum(f.rows for f in files),
            bytes=before.bytes + sum(f.bytes for f in files),
        )
    index = None
    if spec.key_scope == "table":
        progress("making the key index")
        index = adopted_index(table, spec, touched)
    table.objects.specs.append(spec, None)
    known = table.head_spec()  # perhaps of an attempt that came this far and no further, or of one beside this
    if table.objects.ledger.head() is not None:
        raise _already(table)
    if known is None or known.body.arrow_schema != spec.arrow_schema:
        raise DamagedTableError(
            "spec-in-the-way",
            f"{table.store.uri(HOME)} holds a spec without a ledger, which an attempt left that found other columns.",
            next=f"delete the folder {table.store.uri(HOME)}, which holds no data, and run `lakeupsert adopt` again",
        )
    progress(f"writing the manifests of {len(touched)} partitions")

    def begin(partition: str, won: bool) -> None:
        def build(head: Link[Manifest] | None) -> Manifest | None:
            if not won and table.objects.ledger.head() is not None:
                raise _already(table)  # by another adopt, whose files count
            return _first(partition, touched.get(partition), head)

        table.objects.partition(partition).extend(build)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(begin, won=False), touched))
    entry = LedgerEntry(
        kind="create",
        batch_id="",
        received_at=next_stamp(None),
        spec_version=0,
        touched=touched,
        rows_read=sum(t.rows for t in touched.values()),
        index=index,
    )
    if table.objects.ledger.append(entry, None).result != "won":
        raise _already(table)
    # Whatever an attempt that did not win wrote: each chain says now what entry 0 says, also that there is nothing.
    chains = f"{HOME}/partitions/"
    names = {found.name.removeprefix(chains).rpartition("/")[0] for found in table.store.list(chains)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(begin, won=True), sorted(names | set(touched))))
    published = publish(table)
    return Adopted(
        files=len(by_name),
        partitions=len(touched),
        rows=entry.rows_read,
        bytes=sum(t.bytes for t in touched.values()),
        snapshot=published.snapshot,
        left=tuple(left),
        warnings=tuple(warnings),
    )


def _already(table: OpenTable) -> ConfigurationError:
    return ConfigurationError(
        "already-a-table",
        f"{table.store.uri()} is a table already.",
        next="run `lakeupsert run` to append to it, or `lakeupsert status` to look at it",
    )


def _listed(table: OpenTable) -> tuple[dict[str, list[ObjectInfo]], list[str]]:
    """The files of each partition folder, and objects that are no data."""
    columns = [p.column for p in PartitionColumn.parse_all(table.settings.partition_by)]
    shape = "/".join(f"{column}=VALUE" for column in columns)
    folders: defaultdict[str, list[ObjectInfo]] = defaultdict(list)
    left = []
    for found in table.store.list(""):
        folder, _, name = found.name.rpartition("/")
        if found.name.startswith(f"{HOME}/"):
            continue
        if not is_landing_file(found.name):
            left.append(found.name)
        elif not folder and not name.endswith(".parquet"):
            left.append(found.name)  # a README, for example
        elif not _is_partition(folder, columns):
            raise ConfigurationError(
                "not-partitioned",
                f"{table.store.uri(found.name)} is not in a folder {shape} right below {table.store.uri()}, as "
                f"`partition_by` of [tables.{table.name}] says. Nothing was changed.",
                next="correct `partition_by`, or move that file out of the folder if it is not to be part of the table",
            )
        else:
            folders[folder].append(found)
    if not folders:
        raise ConfigurationError(
            "nothing-to-adopt",
            f"{table.store.uri()} holds no Parquet files in folders {shape}.",
            next=f"correct `processed` in [tables.{table.name}]; a new table needs no `adopt`, `lakeupsert run` creates it",
        )
    return dict(folders), left


def _is_partition(folder: str, columns: Sequence[str]) -> bool:
    texts = partition_texts(folder)
    return list(texts) == [*columns] and folder.count("/") == len(columns) - 1 and partition_name(texts) is not None


def _footings(table: OpenTable, files: Sequence[ObjectInfo]) -> list[Footing]:
    def read(found: ObjectInfo) -> Footing | str:
        try:
            return footing(table.store, found, table.settings.key)
        except UnreadableFileError as e:
            return f"{table.store.uri(found.name)}: {e.reason}"
        except NotFoundError:
            return f"{table.store.uri(found.name)} vanished while it was read"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        read_ones = list(pool.map(read, files))
    bad = [r for r in read_ones if isinstance(r, str)]
    if bad:
        raise RefusedError(
            "unreadable-files",
            f"{len(bad)} of {len(files)} files can't be read as Parquet. The first: {bad[0]} Nothing was changed.",
            next="repair these files or move them out of the folder, then run `lakeupsert adopt` again",
        )
    return [r for r in read_ones if isinstance(r, Footing)]


def _planned(table: OpenTable, footings: Sequence[Footing], folders: Sequence[str]) -> tuple[TableSpec, list[str]]:
    """The spec of all files, each column under a type that holds the values of every file; and warnings."""
    settings = table.settings
    where = f"[tables.{table.name}.schema]"
    partitions = {p.column for p in map(PartitionColumn.parse, settings.partition_by)}
    types: dict[str, Any] = {}
    for found in footings:
        for field in found.schema:
            if field.name not in partitions:  # the folder's name counts
                before = types.get(field.name)
                types[field.name] = field.type if before is None else unify(before, field.type, typed=True)
    _, given = table.declaration.given_types((*types, *partitions))
    types = {name: given.get(name, without_nulls(type_)) for name, type_ in types.items()}
    for found in footings:
        for field in found.schema:
            wide = types.get(field.name, field.type)
            if not pa.types.is_null(field.type) and not same_values(widened(field.type, wide), wide):
                raise RefusedError(
                    "mixed-types",
                    f"Column {field.name!r} is {field.type} in {table.store.uri(found.file.name)} and {wide} "
                    + (f"by {where}" if field.name in given else "in other files")
                    + "; the one does not grow to the other. Nothing was changed.",
                    next="rewrite the files that differ under one type"
                    + (f", or give {field.name!r} theirs in {where}" if field.name in given else "")
                    + "; then run `lakeupsert adopt` again",
                )
    delete = settings.delete
    if delete and not delete.keep and delete.column in types:
        raise ConfigurationError(
            "operations-stored",
            f"The files hold the operation column {delete.column!r}, and `delete.keep` is false: rows that say "
            f"{list(delete.values)} there would show as live ones. Nothing was changed.",
            next=f"set `keep = true` in [tables.{table.name}.delete]",
        )
    for column in (p.column for p in map(PartitionColumn.parse, settings.partition_by) if not p.function):
        values = pa.array([partition_texts(folder)[column] for folder in folders])
        types[column] = given.get(column, inferred(values, _TEXTS))
    later = [pa.field(name, type_) for name, type_ in given.items() if name not in types]
    spec = table.declaration.new_spec(pa.schema(list(types.items())), later)
    return spec, [
        *table.declaration.stamped_by_name(spec),
        *table.declaration.types_alone(types, [field.name for field in later]),
    ]


def _refuse_null_keys(table: OpenTable, footings: Sequence[Footing]) -> None:
    for found in footings:
        for name, nulls in found.nulls.items():
            if nulls:
                raise null_keys(table.store, found.file, name, nulls, found.file.name.rpartition("/")[0])


def _first(partition: str, touched: Touched | None, head: Link[Manifest] | None) -> Manifest | None:
    """The partition's manifest at batch 0; None where it stands already, or a night has gone on from it."""
    buckets = (touched.as_adopted(),) if touched else ()
    if head is not None and (head.body.merged or [b.base for b in head.body.buckets] == [b.base for b in buckets]):
        return None
    made: dict[str, str | float | int] = {"engine": "adopt"}
    return Manifest(partition=partition, merged=0, spec_version=0, buckets=buckets, made=made)
