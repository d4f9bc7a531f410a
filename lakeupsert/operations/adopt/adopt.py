"""Turn an existing Hive-partitioned Parquet folder into a table, without rewriting a file.

Reads     one listing of the folder, and the footer of every file in it
Writes    the spec, a first manifest for each partition, then ledger entry 0, which is the commit; then the snapshot
Repeat    safe until the commit; after it, the folder is a table, and the call is refused

The files are batch 0. They may hold a key twice, and readers see them as they are until the first merge of a partition, which
leaves one row per key.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from lakeupsert.engine.hosts import Host
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.landing.adopted import FileFooter, null_key_error
from lakeupsert.landing.adopted_folders import folder_type, keep_folders
from lakeupsert.landing.formats.inference import unify
from lakeupsert.landing.table_logs import TableLog, log_above, log_of
from lakeupsert.operations.adopt.footers import read_footers
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import is_landing_file
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.open_columns import known_types, open_parts
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.table_keys import first_index
from lakeupsert.rows.statistics import columns_with_statistics
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HIVE_NULL, HOME, WHOLE_TABLE, partition_name, partition_of, partition_texts
from lakeupsert.table.ledger import KeyIndex, LandingFile, LedgerEntry, Touched, next_stamp
from lakeupsert.table.manifest import BucketEntry, ColumnStatistics, Manifest
from lakeupsert.table.roles import PartitionColumn
from lakeupsert.table.spec import TableSpec, field_id
from lakeupsert.table.types import same_values, widen

AT_ONCE = 16
"""Concurrent requests."""
Statistics = Mapping[str, tuple[ColumnStatistics, ...]]
"""Of each file, by its name."""


@dataclass(frozen=True)
class AdoptResult:
    """What the table starts with; ``snapshot`` shows it. ``left`` are objects that are not part of it."""

    files: int
    partitions: int
    rows: int
    bytes: int
    snapshot: int | None
    left: tuple[str, ...]
    warnings: tuple[str, ...]


def adopt(table: OpenTable, host: Host, progress: Callable[[str], None] = lambda text: None) -> AdoptResult:
    """Commit the folder at ``processed`` as the table's batch 0, and publish it. ``host``: where the footers are
    read, and the keys of a table with a key index.

    Raises ConfigurationError if it is a table already or its folders are not partitions, and RefusedError if its rows can't be
    kept as they are. Nothing is committed then.
    """
    if table.history.objects.ledger.head() is not None:
        raise _already(table.resources.store)
    if table.settings.groups:
        raise ConfigurationError(
            "bad-setting",
            f"[tables.{table.name}] has `groups`, but adopted rows do not show which groups each record contained. "
            "Nothing was changed.",
            next="land the rows instead, or remove `groups`",
        )
    _refuse_hashes(table.declaration)
    _refuse_log(table, log_above(table.settings.processed))
    folders, others = _list_files(table)
    progress(f"reading the footers of {count(sum(map(len, folders.values())), 'file')}")
    footings = read_footers(table, host, [info for files in folders.values() for info in files])
    spec, warnings = plan_spec(table, footings, list(folders))
    _refuse_null_keys(table.resources.store, footings)
    touched = _touched(folders, footings)
    statistics = _statistics(spec, touched, footings)
    buckets = {partition: _first_buckets(one, statistics) for partition, one in touched.items()}
    index = None
    if spec.key_scope == "table":
        progress("building the key index")
        index = first_index(table.resources, host, spec, buckets)
    progress(f"writing the manifests of {count(len(touched), 'partition')}")
    entry = first_entry(touched, index)
    published = commit_first(table, spec, entry, buckets, "adopt")
    return AdoptResult(
        files=len(footings),
        partitions=len(touched),
        rows=entry.rows_read,
        bytes=sum(t.bytes for t in touched.values()),
        snapshot=published.snapshot,
        left=tuple(others),
        warnings=tuple(warnings),
    )


def first_entry(
    touched: dict[str, Touched], index: KeyIndex | None, files: tuple[LandingFile, ...] = ()
) -> LedgerEntry:
    """The entry that creates a table which has files already. ``files``: landing files whose rows are in them."""
    return LedgerEntry(
        kind="create",
        batch_id="",
        received_at=next_stamp(None),
        spec_version=0,
        touched=touched,
        rows_read=sum(t.rows for t in touched.values()),
        files=files,
        index=index,
    )


def commit_first(
    table: OpenTable, spec: TableSpec, entry: LedgerEntry, buckets: Mapping[str, tuple[BucketEntry, ...]], command: str
) -> PublishResult:
    """Commit the first spec of a table, ledger entry 0 and the ``buckets`` of its partitions, and publish them."""
    _commit_spec(table, spec, command)
    _write_manifests(table, buckets, buckets, command, is_winner=False)
    if table.history.objects.ledger.append(entry, None).result != "won":
        raise _already(table.resources.store)
    # Other attempts may have left manifests: each chain now gets what entry 0 says, even if that is nothing.
    names = table.history.objects.list_manifests().heads.keys()
    _write_manifests(table, sorted(names | set(buckets)), buckets, command, is_winner=True)
    return publish(table)


def _refuse_hashes(declaration: Declaration) -> None:
    """Refuse a table partitioned by hash: other programs hash otherwise, so rows of a key would be in two partitions."""
    for one in PartitionColumn.parse_all(declaration.settings.partition_by):
        if one.function == "bucket":
            raise ConfigurationError(
                "hashed-folders",
                f"`partition_by` of [tables.{declaration.name}] has `{one}`. Files can't be adopted into it: "
                f"lakeupsert's own hash decides the folder of a row (docs/FORMAT.md), and another program that writes folders "
                f"{one.column}=… uses a different hash. Nothing was changed.",
                next="name this folder as `landing` and an empty one as `processed`, then run `lakeupsert run`; or adopt it with "
                "another `partition_by`",
            )


def _refuse_log(table: OpenTable, log: TableLog | None) -> None:
    """Refuse the folder of a table of another format: files that its log has removed are still there."""
    if log is None:
        return
    place = log.place if "://" in log.place else table.resources.store.uri(log.place.rstrip("/"))
    folder = place.rpartition("/")[0]
    columns = ", ".join(json.dumps(p.column) for p in table.declaration.partition_columns)
    write = f"write{f'.partitionBy({columns})' if columns else ''}.parquet(FOLDER)"
    raise ConfigurationError(
        "other-format",
        f"{folder} is {'an' if log.format == 'Iceberg' else 'a'} {log.format} table: {place} says which of its files are live. "
        "`adopt` takes every Parquet file below a folder, so deleted and replaced rows would come back. Nothing was changed.",
        next=f"write its rows to another folder, in Spark `{_READ_BY_SPARK[log.format]}.{write}`, and adopt that folder. "
        "If all files below are live and complete without the log"
        + (f" (for example after {vacuum})" if (vacuum := _ONLY_LIVE_FILES.get(log.format)) else "")
        + f", move {place} elsewhere and run `lakeupsert adopt` again",
    )


_READ_BY_SPARK = {
    "Delta": "spark.read.format('delta').load(TABLE)",
    "Hudi": "spark.read.format('hudi').load(TABLE)",
    "Iceberg": "spark.table(NAME)",
    "lakeupsert": "Table.open(CONFIG, NAME).to_spark(spark)",
}
_ONLY_LIVE_FILES = {
    "Delta": "`VACUUM … RETAIN 0 HOURS` of a table without deletion vectors and column mapping",
    "Hudi": "a `clean` that keeps one version of a copy-on-write table",
    "Iceberg": "`expire_snapshots` and `remove_orphan_files` of a table without delete files",
}


def _touched(folders: Mapping[str, Sequence[ObjectInfo]], footings: Sequence[FileFooter]) -> dict[str, Touched]:
    """The files of each partition, as a ledger entry names them. Their digest is not known."""
    by_name = {f.file.name: f.file for f in footings}
    touched: dict[str, Touched] = {}
    for folder, infos in folders.items():
        files = tuple(by_name[info.name] for info in infos)
        rows, size = sum(f.rows for f in files), sum(f.bytes for f in files)
        touched[folder] = Touched(files=files, rows=rows, superseded=0, bytes=size)
    return touched


def _statistics(spec: TableSpec, touched: Mapping[str, Touched], footings: Sequence[FileFooter]) -> Statistics:
    """Those of each file for its manifest. The ledger's entry, which every command reads, has none."""
    of_file = {footer.file.name: footer.statistics for footer in footings}
    names = {field_id(field): field.name for field in spec.base_schema}
    found: dict[str, tuple[ColumnStatistics, ...]] = {}
    for one in touched.values():
        ids = [column.id for column in columns_with_statistics(spec, len(one.files))]
        for file in one.files:
            own = of_file[file.name]
            found[file.name] = tuple(
                msgspec.structs.replace(own[names[id_]], id=id_) for id_ in ids if names[id_] in own
            )
    return found


def _commit_spec(table: OpenTable, spec: TableSpec, command: str) -> None:
    table.history.objects.specs.append(spec, None)
    known = table.history.head_spec()  # may be of an attempt that crashed, or of one at the same time
    if table.history.objects.ledger.head() is not None:
        raise _already(table.resources.store)
    if known is None or msgspec.structs.replace(known.body, table_id=spec.table_id) != spec:
        raise DamagedTableError(
            "spec-in-the-way",
            f"{table.resources.store.uri(HOME)} holds a spec without a ledger, from an earlier attempt that found other columns.",
            next=f"delete the folder {table.resources.store.uri(HOME)}, which holds no data, and run `lakeupsert {command}` "
            "again",
        )


def _write_manifests(
    table: OpenTable,
    partitions: Iterable[str],
    buckets: Mapping[str, tuple[BucketEntry, ...]],
    command: str,
    *,
    is_winner: bool,
) -> None:
    """Write the manifest at batch 0 of each partition; ``is_winner``: the ledger entry is committed, and is this attempt's."""

    def write(partition: str) -> None:
        def build(head: Link[Manifest] | None) -> Manifest | None:
            if not is_winner and table.history.objects.ledger.head() is not None:
                raise _already(table.resources.store)  # another adopt committed its files
            return _first_manifest(partition, buckets.get(partition, ()), command, head)

        table.history.objects.partition(partition).extend(build)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(write, partitions))


def _already(store: ObjectStore) -> ConfigurationError:
    return ConfigurationError(
        "already-a-table",
        f"{store.uri()} is a table already.",
        next="run `lakeupsert run` to append to it, or `lakeupsert status` to look at it",
    )


def _list_files(table: OpenTable) -> tuple[dict[str, list[ObjectInfo]], list[str]]:
    """The files of each partition folder, and objects that are not data."""
    columns = [p.column for p in table.declaration.partition_columns]
    shape = "/".join(f"{column}=VALUE" for column in columns)
    place = f"in a folder {shape} directly below" if columns else "directly in"
    folders: defaultdict[str, list[ObjectInfo]] = defaultdict(list)
    others = []
    uri = table.resources.store.uri
    for info in table.resources.store.list(""):
        folder, _, name = info.name.rpartition("/")
        if info.name.startswith(f"{HOME}/"):
            continue
        _refuse_log(table, log_of(info.name))
        if not is_landing_file(info.name):
            others.append(info.name)
        elif not folder and not name.endswith(".parquet"):
            others.append(info.name)  # a README, for example
        elif columns and not {"", HIVE_NULL}.isdisjoint(partition_texts(folder).values()):
            raise ConfigurationError(
                "not-partitioned",
                f"{uri(info.name)}: the rows in this folder have no value in a partition column, and every row of a "
                "table needs one. Nothing was changed.",
                next="move the folder out, or move its files to the folder of a value, for example unknown or 1970-01-01",
            )
        elif not is_partition(folder, columns):
            raise ConfigurationError(
                "not-partitioned",
                f"{uri(info.name)} is not {place} {uri()}, as `partition_by` = {columns} of "
                f"[tables.{table.name}] requires. Nothing was changed.",
                next="correct `partition_by`, or move this file out of the folder if it is not part of the table",
            )
        else:
            folders[folder or WHOLE_TABLE].append(info)
    if not folders:
        raise ConfigurationError(
            "nothing-to-adopt",
            f"{table.resources.store.uri()} holds no Parquet files{f' in folders {shape}' if columns else ''}.",
            next=f"correct `processed` in [tables.{table.name}]; a new table does not need `adopt`: `lakeupsert run` creates it",
        )
    return dict(folders), others


def is_partition(folder: str, columns: Sequence[str]) -> bool:
    if not columns:
        return not folder
    texts = partition_texts(folder)
    return list(texts) == [*columns] and folder.count("/") == len(columns) - 1 and partition_name(texts) is not None


def plan_spec(
    table: OpenTable, footings: Sequence[FileFooter], folders: Sequence[str], ids: Mapping[str, int] | None = None
) -> tuple[TableSpec, list[str]]:
    """The spec of all files, in which each column has a type that holds the values of every file; and warnings.

    ``ids``: field ids that columns of the files have. Partition columns take the other ones.
    """
    settings = table.settings
    partitions = {p.column for p in table.declaration.partition_columns}
    types: dict[str, pa.DataType] = {}
    for file in footings:
        for field in file.schema:
            if field.name not in partitions:  # the folder's name counts
                before = types.get(field.name)
                types[field.name] = field.type if before is None else unify(before, field.type, typed=True)
    _, given = table.declaration.given_types((*types, *partitions))
    waiting = open_parts(table.declaration, types, given, {}, ahead=True)
    types = known_types(table.declaration, types, given)
    _refuse_mixed_types(table, footings, types, given.keys())
    delete = settings.delete
    if delete and not delete.keep and delete.operation in types:
        raise ConfigurationError(
            "operations-stored",
            f"The files hold the operation column {delete.operation!r}, and `delete.keep` is false: rows with "
            f"{list(delete.values) or 'a value'} there would appear as live rows. Nothing was changed.",
            next=f"set `keep = true` in [tables.{table.name}.delete]",
        )
    for column in (p.column for p in table.declaration.partition_columns if not p.function):
        values = {partition_texts(folder)[column] for folder in folders}
        types[column] = given.get(column, folder_type(values))
    later = [pa.field(name, type_) for name, type_ in given.items() if name not in types]
    if ids:
        others = iter([name for name in types if name not in ids])
        named = {number: name for name, number in ids.items()}
        types = {name: types[name] for n in range(1, len(types) + 1) if (name := named.get(n) or next(others))}
    new = table.declaration.new_spec(pa.schema(list(types.items())), later)
    kept = keep_folders(new, folders, f"[tables.{table.name}.schema]")
    spec = kept.spec
    return spec, [
        *kept.warnings,
        *table.declaration.stamped_by_name(spec),
        *table.declaration.types_alone(types, [field.name for field in later]),
        *waiting,
    ]


def _refuse_mixed_types(
    table: OpenTable, footings: Sequence[FileFooter], types: Mapping[str, pa.DataType], given: Container[str]
) -> None:
    where = f"[tables.{table.name}.schema]"
    for file in footings:
        for field in file.schema:
            wide = types.get(field.name, field.type)
            if not pa.types.is_null(field.type) and not same_values(widen(field.type, wide), wide):
                raise RefusedError(
                    "mixed-types",
                    f"Column {field.name!r} is {field.type} in {table.resources.store.uri(file.file.name)} and {wide} "
                    + (f"by {where}" if field.name in given else "in other files")
                    + "; the one can't be widened to the other. Nothing was changed.",
                    next="rewrite the files that differ under one type"
                    + (f", or give {field.name!r} their type in {where}" if field.name in given else "")
                    + "; then run `lakeupsert adopt` again",
                )


def _refuse_null_keys(store: ObjectStore, footings: Sequence[FileFooter]) -> None:
    for file in footings:
        for name, nulls in file.nulls.items():
            if nulls:
                raise null_key_error(store, file.file, name, nulls, partition_of(file.file.name) or "")


def _first_buckets(touched: Touched, statistics: Statistics) -> tuple[BucketEntry, ...]:
    base = tuple(msgspec.structs.replace(file, statistics=statistics[file.name]) for file in touched.files)
    return (msgspec.structs.replace(touched.as_adopted(), base=base),)


def _first_manifest(
    partition: str, buckets: tuple[BucketEntry, ...], command: str, head: Link[Manifest] | None
) -> Manifest | None:
    """The partition's manifest at batch 0; None if it is there already, or a later batch is."""
    if head is not None and (head.body.merged or [b.base for b in head.body.buckets] == [b.base for b in buckets]):
        return None
    first = Manifest(partition=partition, merged=0, spec_version=0, buckets=buckets, made={"engine": command})
    return msgspec.structs.replace(first, added=len(first.objects - (head.body.objects if head else set())))
