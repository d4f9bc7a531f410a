"""Where the objects of a table are, and how partitions are named.

A partition's name is its folder, `transaction_date=2020-01-01`, percent-encoded as in Hive and Spark, so that any engine can
decode the value. A value that has an adopted folder keeps it, however that is written (`level_name`). The name is the
partition's id everywhere: in messages, manifests, options and errors. A table without partition columns has one partition,
`WHOLE_TABLE`, whose base files lie directly in the table's folder.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Literal
from urllib.parse import unquote

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.backup import BackupEntry
from lakeupsert.table.chain import FORMAT, Chain, Held, Link, refuse_newer
from lakeupsert.table.group import FEATURE, read_group, write_group
from lakeupsert.table.lease import Lease
from lakeupsert.table.ledger import LedgerEntry, check_entry
from lakeupsert.table.manifest import Manifest, check_manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot, check_snapshot
from lakeupsert.table.source import SourceEntry
from lakeupsert.table.spec import TableSpec, check_spec

HOME = "_lakeupsert"
PARTITIONS = f"{HOME}/partitions/"
DATA = f"{HOME}/data"
"""All data outside base files: appended rows, and in one folder per partition its deltas, vectors, tombstones and history."""
KEYS = f"{HOME}/keys"
"""The key index of a table whose keys are unique across partitions."""
QUARANTINE = f"{HOME}/quarantine"
STATEMENT_ROWS = f"{HOME}/statements"
"""The appended rows of updates and deletes, which no landing file has."""
ERASURES = f"{HOME}/erasures"
"""Records of `erase`; see `table.erasure`."""
GROUPS = f"{HOME}/groups"
"""Manifests that have no version in a chain."""
LOCAL_QUEUE = f"{HOME}/queue.sqlite"
"""The queue of a local table, by default."""
LISTED_TOGETHER = 1000
"""Objects in an answer to a LIST: S3's limit. Azure's is higher, and a local store has none."""
KEPT_GROUPS = 64
"""How many groups stay in memory, some 2 kB a partition. Fewer: who reads many partitions may read a group twice."""
LONGEST_PARTITION = 200
"""Maximum bytes of a partition's folder name. File systems allow 255, and temporary names need some of them."""
WHOLE_TABLE = "whole-table"
"""The name of the only partition of a table without partition columns. Every other name has a `=`."""
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
_SHORT_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
FileKind = Literal[
    "base", "appended", "statement", "moved", "keys", "delta", "history", "vectors", "tombstones", "quarantine", "cut"
]  # fmt: skip
_FILES: dict[FileKind, tuple[str, str]] = {
    "base": ("", "parquet"),
    "appended": (DATA, "pack"),
    "statement": (STATEMENT_ROWS, "pack"),
    "moved": (DATA, "pack"),
    "keys": (KEYS, "parquet.keys"),
    "delta": (DATA, "parquet.delta"),
    "history": (DATA, "parquet.history"),
    "vectors": (DATA, "roaring"),
    "tombstones": (DATA, "parquet.keys"),
    "quarantine": (QUARANTINE, "parquet.rows"),
    "cut": (f"{HOME}/units", "pack"),
}
"""Folder and ending of each kind of file. Only base files end in `.parquet`: DuckDB and Polars would read others as if their
rows were merged. A cut is stored only until the merge that reads it has ended, like the results of units."""
_KINDS = "|".join(
    rf"{kind}-(\d+)-[0-9a-f]{{32}}\.{re.escape(ending)}"
    for kind, ending in [("unit", "json"), ("group", "json"), *((kind, ending) for kind, (_, ending) in _FILES.items())]
)
OWN_NAMES = re.compile(f"(?:.*/)?(?:{_KINDS})")
"""The names of our files, each of which is written once."""


def _parse_spec(spec: TableSpec, where: str) -> None:
    refuse_newer(where, FORMAT, [feature for feature in spec.requires if feature != FEATURE])
    assert spec.schema is not None, "it is decoded here"


@dataclass(frozen=True)
class Manifests:
    """One listing of all manifests since ``read_at``: the newest of each partition, and names that it was to find and lacks."""

    read_at: float
    heads: dict[str, ObjectInfo]
    absent: set[str]


class TableObjects:
    """The chains of one table, and names for its files."""

    ARRIVED = f"{HOME}/headers/arrived-"

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.held = held = Held()
        self.specs: Chain[TableSpec] = Chain(store, f"{HOME}/spec", "spec", TableSpec, check_spec, _parse_spec, held)
        self.ledger: Chain[LedgerEntry] = Chain(store, f"{HOME}/ledger", "ledger", LedgerEntry, check_entry, held=held)
        self.leases: Chain[Lease] = Chain(store, f"{HOME}/leases", "lease", Lease, lambda old, new: None)  # never held
        self.reading: Chain[Lease] = Chain(store, f"{HOME}/reading", "lease", Lease, lambda old, new: None)
        self.upkeep: Chain[Lease] = Chain(store, f"{HOME}/upkeep", "lease", Lease, lambda old, new: None)
        self.snapshots = Chain(store, f"{HOME}/snapshots", "snapshot", Snapshot, check_snapshot, held=held)
        self.backups: Chain[BackupEntry] = Chain(store, f"{HOME}/backups", "backup", BackupEntry, lambda old, new: None)
        self._groups: dict[str, dict[str, Manifest]] = {}  # the last `KEPT_GROUPS`

    def __reduce__(self) -> tuple[type["TableObjects"], tuple[ObjectStore]]:
        return TableObjects, (self.store,)

    def source(self, name: str) -> Chain[SourceEntry]:
        """The landing files of a source, each with the position behind it."""
        return Chain(self.store, f"{HOME}/sources/{name}/files", "source", SourceEntry, lambda old, new: None)

    def leases_of_source(self, name: str) -> Chain[Lease]:
        return Chain(self.store, f"{HOME}/sources/{name}/leases", "lease", Lease, lambda old, new: None)

    def partition(self, partition: str) -> Chain[Manifest]:
        return Chain(self.store, f"{PARTITIONS}{partition}", "manifest", Manifest, check_manifest, held=self.held)

    def grouped(self, partition: str, shown: PartitionVersion) -> Link[Manifest]:
        """The manifest that a snapshot shows, if it is in a group. It has the number of the version below it."""
        assert shown.group is not None
        name = shown.group.name
        if (manifests := self._groups.get(name)) is None:
            try:
                manifests = self._keep_group(name, read_group(self.store, name, _merged_again(partition)))
            except NotFoundError as e:
                raise self.missing_group(partition, name) from e
        if partition not in manifests or manifests[partition].merged != shown.merged:
            why = f"it lacks {partition} at batch {shown.merged}"
            raise metadata.damaged(self.store.uri(name), "a group", why, _merged_again(partition))
        return Link(shown.version, shown.write_id, None, "", manifests[partition], clock.elapsed())

    def missing_group(self, partition: str, name: str) -> DamagedTableError:
        """The error for a missing group, in which a snapshot shows the partition."""
        return DamagedTableError(
            "missing-version",
            f"A snapshot shows {partition} in a group of manifests that is missing: {self.store.uri(name)}. Something other "
            "than lakeupsert deleted it. No row is lost, but the partition can't be read in that snapshot.",
            next=_merged_again(partition),
            partition=partition,
        )

    def store_group(self, number: int, manifests: dict[str, Manifest]) -> str:
        """Write manifests that snapshot ``number`` is to name. Returns the object's name."""
        name = f"{GROUPS}/group-{number}-{clock.new_id()}.json"
        write_group(self.store, name, self._keep_group(name, manifests))
        return name

    def _keep_group(self, name: str, manifests: dict[str, Manifest]) -> dict[str, Manifest]:
        self._groups[name] = manifests
        for oldest in list(self._groups)[:-KEPT_GROUPS]:
            self._groups.pop(oldest, None)  # another thread may have been faster
        return manifests

    def list_manifests(self, snapshots: Iterable[Snapshot] = ()) -> Manifests:
        """One LIST for every `LISTED_TOGETHER` stored manifests. It is to find those of these snapshots."""
        names = (self.partition(p).name(v.version) for snapshot in snapshots for p, v in snapshot.partitions.items())
        found = Manifests(clock.elapsed(), {}, set(names))
        for info in self.store.list(PARTITIONS):
            partition, _, name = info.name.removeprefix(PARTITIONS).rpartition("/")
            if name.startswith("v"):
                found.heads.setdefault(partition, info)  # the first name of a chain is its head's
            found.absent.discard(info.name)
        return found

    def missing_spec(self, version: int, named_by: str) -> DamagedTableError:
        """The error for a missing version of the spec, under which ``named_by`` was written."""
        return DamagedTableError(
            "missing-version",
            f"{named_by} was written under version {version} of the spec, which is missing: "
            f"{self.store.uri(self.specs.name(version))}. Something other than lakeupsert deleted it.",
            next=metadata.FROM_BACKUP,
        )

    def missing(self, partition: str, version: int, named_by: str, *, lost: bool) -> DamagedTableError:
        """The error for a missing manifest that ``named_by`` names. ``lost``: readers have no newer one."""
        where = self.store.uri(self.partition(partition).name(version))
        backup = metadata.FROM_BACKUP
        return DamagedTableError(
            "missing-version",
            f"{named_by} names version {version} of {partition}, but that manifest is missing: {where}. Something other than "
            "lakeupsert deleted it.",
            next=f"run `{rebuild_command(partition)}`, which rebuilds the partition from its landing files; or {backup}"
            if lost
            else f"{backup}; newer snapshots do not need it, and `lakeupsert run` publishes one if there is none",
            partition=partition,
        )

    def missing_snapshot(self, number: int, known_by: int, newest: int | None) -> DamagedTableError:
        """The error for a lost newest snapshot that ledger entry ``known_by`` names. ``newest``: the newest that still exists."""
        others = "No snapshot exists" if newest is None else f"The newest that exists is snapshot {newest}"
        return DamagedTableError(
            "missing-version",
            f"Ledger entry {known_by} was written when snapshot {number} was the newest, but that snapshot is missing: "
            f"{self.store.uri(self.snapshots.name(number))}. {others}. Something other than lakeupsert deleted it.",
            next=f"{metadata.FROM_BACKUP}; or run `lakeupsert publish`, which publishes the newest complete batch as snapshot "
            f"{number + 1}; tags that were set {'before' if newest is None else f'after snapshot {newest}'} are then lost",
        )

    @staticmethod
    def ledger_headers(first: int, count: int) -> str:
        size = "" if count == 64 else f"-{count}"  # earlier versions have written those of 64
        return f"{HOME}/headers/ledger-{first:012d}{size}.json"

    @staticmethod
    def arrived(batch: int) -> str:
        return f"{TableObjects.ARRIVED}{batch:012d}.json"

    # `start` is how many versions the chain had when the writer started: the partition's chain, or the ledger for what append
    # writes. Vacuum deletes an unnamed file only if its writer started below a fence, and so can no longer commit.

    @staticmethod
    def new(kind: FileKind, start: int, partition: str | None = None) -> str:
        """A new name for a file of a partition; None: of several, or of none."""
        folder, ending = _FILES[kind]
        inside = f"{folder}/" if partition is None else f"{folder}/{partition}/" if folder else base_prefix(partition)
        return f"{inside}{kind}-{start}-{clock.new_id()}.{ending}"

    @staticmethod
    def is_moved(name: str) -> bool:
        """Whether this is a pack of deletes that got their partitions from the key index (`engine.keys`)."""
        return name.startswith(f"{DATA}/moved-")

    @staticmethod
    def new_key_cut(start: int, rebuild: str) -> str:
        """Stored here only while the index is rebuilt. ``rebuild``: 16 hex digits that identify this rebuild."""
        return f"{TableObjects.key_cuts(start, rebuild)}{clock.new_id()[:16]}.pack"

    @staticmethod
    def key_cuts(start: int, rebuild: str) -> str:
        """The prefix of the names of all that a rebuild has cut."""
        return f"{KEYS}/cut-{start}-{rebuild}"

    @staticmethod
    def unit_results(partition: str) -> str:
        """The prefix of the names of all unit results of a partition."""
        return f"{HOME}/units/{partition}/unit-"

    @staticmethod
    def new_unit_result(partition: str, start: int, key: str) -> str:
        """``key``: 32 hex digits that identify the unit."""
        return f"{TableObjects.unit_results(partition)}{start}-{key}.json"

    @staticmethod
    def is_cut(name: str) -> bool:
        return name.startswith(f"{HOME}/units/")

    @staticmethod
    def unit_key(name: str) -> str:
        return name.rpartition("-")[2].removesuffix(".json")

    @staticmethod
    def start_of(name: str) -> int | None:
        """The `start` in one of these names; None if it has none, for example an adopted file."""
        match = OWN_NAMES.fullmatch(name)
        return int(match[match.lastindex]) if match and match.lastindex else None

    @staticmethod
    def new_work() -> str:
        return f"{HOME}/units/reprocess-{clock.new_id()}.json"


def folder_name(column: str, text: str) -> str | None:
    """The folder for a partition value's text, or None if no folder can have it (empty, Hive's null, too long)."""
    name = f"{_escape(column)}={_escape(text)}"
    return None if text in ("", HIVE_NULL) or len(name.encode("utf-8", "replace")) > LONGEST_PARTITION else name


def level_name(spec: TableSpec, column: str, text: str) -> str | None:
    """The folder of a value's text in a table, which may have been adopted; otherwise as `folder_name`."""
    format_ = spec.format_of_column.get(column)
    name = folder_name(column, format(int(text), format_) if format_ else text)
    return None if name is None else spec.folder_of_name.get(name, name)


def partition_name(texts: Mapping[str, str]) -> str | None:
    """The folder of a partition, one level per column, or None if no folder can have one of the values; without columns
    `WHOLE_TABLE`."""
    folders = [folder_name(column, text) for column, text in texts.items()]
    return None if None in folders else "/".join(map(str, folders)) or WHOLE_TABLE


def base_prefix(partition: str) -> str:
    """What the names of a partition's base files begin with: its folder, or nothing if the table is one partition."""
    return "" if partition == WHOLE_TABLE else f"{partition}/"


def partition_of(name: str) -> str | None:
    """The partition that a stored file belongs to; None for a file of several partitions."""
    if not name.startswith(f"{HOME}/"):
        return name.rpartition("/")[0] or WHOLE_TABLE
    folder, _, _ = name.removeprefix(f"{DATA}/").removeprefix(f"{HOME}/units/").rpartition("/")
    return folder if "=" in folder or folder == WHOLE_TABLE else None


def partition_texts(partition: str) -> dict[str, str]:
    """The texts of a partition's values, by column, decoded from its name."""
    if partition == WHOLE_TABLE:
        return {}
    parts = (folder.partition("=") for folder in partition.split("/"))
    return {unquote(column): unquote(text) for column, _, text in parts}


def value_texts(spec: TableSpec, partition: str) -> dict[str, str]:
    """The texts of a partition's values for other programs' metadata, however its folder is written: `1`, not `01`."""
    return {column: _text(value.as_py()) for column, value in partition_scalars(spec, partition).items()}


def partition_text(partition: str) -> str:
    """The values of `partition_texts` without the columns, for people who know these; the name if there are none."""
    return "/".join(partition_texts(partition).values()) or partition


def _merged_again(partition: str) -> str:
    """The advice if a group of manifests can't be read."""
    command = f"lakeupsert reprocess --partition {shlex.quote(partition)}"
    return f"run `{command}`, which merges its last batches again and publishes them; or {metadata.FROM_BACKUP}"


def rebuild_command(partition: str) -> str:
    """The command that rebuilds a partition from its landing files, for messages."""
    return f"lakeupsert reprocess --partition {shlex.quote(partition)} --source landing"


def partition_scalars(spec: TableSpec, partition: str) -> dict[str, pa.Scalar]:
    """The partition's values in their columns' types, in the order of the columns.

    Raises DamagedTableError if the table can't have a partition of that name: the object that names it was damaged.
    """
    texts = partition_texts(partition)
    try:
        if not spec.partition_by and texts:
            raise ValueError(partition)
        return {column: _scalar(spec, column, texts[column]) for column in spec.partition_by}
    except (KeyError, ValueError) as e:
        columns = ", ".join(spec.partition_by) or "no column"
        raise metadata.damaged(
            f"An object that names the partition {partition!r}", f"one of a table partitioned by {columns}", repr(e)
        ) from e


def ranged_column(spec: TableSpec) -> str | None:
    """The partition column that ``--from`` and ``--to`` refer to: the first date column, or else the first column. None if the
    table has no partition columns."""
    dates = (column for column in spec.partition_by if pa.types.is_date(spec.schema.field(column).type))
    return next(dates, next(iter(spec.partition_by), None))


def _scalar(spec: TableSpec, column: str, text: str) -> pa.Scalar:
    type_ = spec.schema.field(column).type
    if pa.types.is_date(type_):
        short = _SHORT_DATE.fullmatch(text)
        return pa.scalar(date(*map(int, short.groups())) if short else date.fromisoformat(text), type_)
    if pa.types.is_boolean(type_):
        return pa.scalar({"true": True, "false": False}[text.lower()], type_)
    return pa.scalar(int(text) if pa.types.is_integer(type_) else text, type_)


def parse_partition(spec: TableSpec, text: str) -> str:
    """The partition that a user means by ``2020-01-01`` or ``transaction_date=2020-01-01``, or with several columns by
    ``7/2020-01-01`` or ``store=7/day=2020-01-01``. Without partition columns there is one, `WHOLE_TABLE`."""
    if not spec.partition_by:
        if text == WHOLE_TABLE:
            return text
        raise ConfigurationError(
            "not-a-partition",
            f"The table has no partition columns, so it has one partition, {WHOLE_TABLE}, and not {text!r}.",
            next=f"give {WHOLE_TABLE}, or leave the option out",
        )
    if len(spec.partition_by) == 1:
        return _folder_of(spec, spec.partition_by[0], text)
    folders = text.split("/")
    if len(folders) == len(spec.partition_by):
        names = [_parse_folder(spec, *pair) for pair in zip(spec.partition_by, folders, strict=True)]
        if None not in names:
            return "/".join(map(str, names))
    types = ", ".join(str(spec.schema.field(column).type) for column in spec.partition_by)
    raise ConfigurationError(
        "not-a-partition",
        f"{text!r} is not a partition by {'/'.join(spec.partition_by)} ({types}).",
        next=f"give a value for each column: {'/'.join(f'{_escape(column)}=VALUE' for column in spec.partition_by)}",
    )


def parse_value(spec: TableSpec, column: str, text: str) -> pa.Scalar:
    """The value of a partition column that a user means by ``2020-01-01`` or ``day=2020-01-01``."""
    return _scalar(spec, column, partition_texts(_folder_of(spec, column, text))[column])


def _folder_of(spec: TableSpec, column: str, text: str) -> str:
    folder = _parse_folder(spec, column, text)
    if folder is None:
        type_ = spec.schema.field(column).type
        raise ConfigurationError(
            "not-a-partition",
            f"{text!r} is not a value of the partition column {column!r} ({type_}).",
            next=f"give a value, for example 2020-01-01 or {column}=2020-01-01",
        )
    return folder


def _parse_folder(spec: TableSpec, column: str, given: str) -> str | None:
    if given in spec.folder_of_name.values():
        return given
    text = given.removeprefix(f"{_escape(column)}=").removeprefix(f"{column}=")
    if given != text and _escape(unquote(text)) == text:
        text = unquote(text)
    try:
        value = _scalar(spec, column, text).as_py()
    except (KeyError, ValueError, pa.ArrowInvalid):
        return None
    return level_name(spec, column, _text(value))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda m: f"%{ord(m.group()):02X}", text)
