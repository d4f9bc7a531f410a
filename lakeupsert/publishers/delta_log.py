"""A Delta log as we write it: its actions, its commits, its checkpoints, and the table that they describe.

Reads     the listing of `_delta_log/`, the newest checkpoint and the commits behind it
Writes    commits and checkpoints, each created only if it is absent; `_last_checkpoint`, which is a hint
Repeat    safe: a commit or checkpoint that exists is not written again

Every commit has a `txn` action with the table's id and the commit's own number. A commit without it is another program's.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.decoding import UNREADABLE, convert, decoder_of
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.publishers import create_once
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore
from lakeupsert.table.chain import Link
from lakeupsert.table.metadata import damaged
from lakeupsert.table.snapshot import Snapshot

LOG = "_delta_log"
_LAST = f"{LOG}/_last_checkpoint"
_COMMIT = re.compile(rf"{LOG}/(\d{{20}})\.json")
_CHECKPOINT = re.compile(rf"{LOG}/(\d{{20}})\.checkpoint\.parquet")


class _Hint(msgspec.Struct):
    version: int


class Vector(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Where a deletion vector is. ``offset``: of its length in the object; None if the vector is in the log itself."""

    storage_type: str
    path_or_inline_dv: str
    size_in_bytes: int
    cardinality: int
    offset: int | None = None


class Add(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A data file that readers read."""

    path: str
    partition_values: dict[str, str | None]
    size: int
    modification_time: int
    data_change: bool
    stats: str | None = None
    tags: dict[str, str] | None = None
    deletion_vector: Vector | None = None


class Remove(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A data file that readers no longer read."""

    path: str
    deletion_timestamp: int
    data_change: bool
    extended_file_metadata: bool
    partition_values: dict[str, str | None]
    size: int
    deletion_vector: Vector | None = None


class Format(msgspec.Struct, frozen=True):
    provider: str = "parquet"
    options: dict[str, str] = {}


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    format: Format
    schema_string: str
    partition_columns: tuple[str, ...]
    configuration: dict[str, str]
    created_time: int


class Protocol(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    min_reader_version: int
    min_writer_version: int
    reader_features: tuple[str, ...] | None = None
    writer_features: tuple[str, ...] | None = None


class Txn(msgspec.Struct, frozen=True, rename="camel"):
    app_id: str
    version: int
    last_updated: int


class CommitInfo(msgspec.Struct, frozen=True, rename="camel"):
    in_commit_timestamp: int
    timestamp: int
    operation: str
    operation_parameters: dict[str, str]
    engine_info: str
    txn_id: str

    @property
    def snapshot(self) -> str:
        """The write id of the snapshot that the commit shows."""
        return self.operation_parameters["snapshot"]


class Action(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One line of a commit: exactly one of these is set, or none if it is an action that we never write."""

    commit_info: CommitInfo | None = None
    protocol: Protocol | None = None
    meta_data: Metadata | None = None
    txn: Txn | None = None
    add: Add | None = None
    remove: Remove | None = None


@dataclass
class State:
    """The table that the log describes at a version.

    Attributes:
        timestamp: of the last commit, in milliseconds since 1970. Each commit's is greater than the one's before.
        adds: by path. Their order depends on where the reading began, so what is written is sorted.
        write_id: of the snapshot that the version shows; empty before the first commit was read.
    """

    version: int
    timestamp: int
    protocol: Protocol
    metadata: Metadata
    adds: dict[str, Add] = field(default_factory=dict)
    write_id: str = ""

    @classmethod
    def first(cls, version: int, actions: Sequence[Action]) -> "State":
        """The state of a log that begins with these actions."""
        protocol = next((a.protocol for a in actions if a.protocol), None)
        metadata = next((a.meta_data for a in actions if a.meta_data), None)
        if protocol is None or metadata is None:
            raise damaged(
                f"Version {version} of the Delta log", "the first one that is there", "it does not describe the table"
            )
        return cls(version, 0, protocol, metadata).after(version, actions)

    def after(self, version: int, actions: Iterable[Action]) -> "State":
        """The state after one more commit. Changes and returns this one."""
        self.version = version
        for action in actions:
            if action.commit_info:
                self.timestamp = action.commit_info.in_commit_timestamp
                self.write_id = action.commit_info.snapshot
            self.protocol = action.protocol or self.protocol
            self.metadata = action.meta_data or self.metadata
            if action.remove:
                self.adds.pop(action.remove.path, None)
            if action.add:
                self.adds[action.add.path] = action.add
        return self


@dataclass(frozen=True)
class Listing:
    """Commits and checkpoints by version, in ascending order."""

    commits: dict[int, ObjectInfo]
    checkpoints: dict[int, ObjectInfo]

    @property
    def head(self) -> int | None:
        return max(self.commits, default=None)


def list_log(store: ObjectStore) -> Listing:
    found = Listing({}, {})
    for info in store.list(f"{LOG}/"):
        for pattern, kind in ((_COMMIT, found.commits), (_CHECKPOINT, found.checkpoints)):
            if match := pattern.fullmatch(info.name):
                kind[int(match[1])] = info
    return found


class DeltaLog:
    """The log of the table in ``store``. ``table_id``: in the `txn` of every commit of ours."""

    def __init__(self, store: ObjectStore, table_id: str) -> None:
        self.store = store
        self._table_id = table_id

    def read(self, listing: Listing) -> State | None:
        """The newest state; None if there is no commit.

        Raises DamagedTableError if a commit is missing, or another program's (``foreign-delta-commit``).
        """
        head = listing.head
        if head is None:
            return None
        checkpoint = max((v for v in listing.checkpoints if v <= head), default=None)
        state = None if checkpoint is None else self._from_checkpoint(checkpoint)
        for version in range(min(listing.commits) if checkpoint is None else checkpoint, head + 1):
            actions = self.commit(version)
            state = State.first(version, actions) if state is None else state.after(version, actions)
        return state

    def adds(self, checkpoint: int, head: int) -> list[Add]:
        """All files that a version from this checkpoint to the ``head`` reads."""
        actions = (action for version in range(checkpoint + 1, head + 1) for action in self.commit(version))
        return [*self._from_checkpoint(checkpoint).adds.values(), *(a.add for a in actions if a.add)]

    def commit(self, version: int) -> list[Action]:
        """The actions of a commit of ours."""
        name = commit_name(version)
        try:
            actions = decoder_of(Action).decode_lines(self.store.get(name))
        except (NotFoundError, *UNREADABLE) as e:
            raise self._foreign(version, f"can't be read ({e})") from e
        if not any(a.txn and (a.txn.app_id, a.txn.version) == (self._table_id, version) for a in actions):
            raise self._foreign(version, "was not written by this table's publisher")
        return actions

    def refuse_lost(self, newest: Link[Snapshot]) -> None:
        """Raise DamagedTableError (``foreign-delta-commit``) if the commit of its number shows another snapshot."""
        shown = {a.commit_info.snapshot for a in self.commit(newest.number) if a.commit_info}
        if newest.write_id not in shown:
            raise self._foreign(newest.number, "shows a snapshot that was lost since, and another one took its number")

    def append(self, version: int, actions: Sequence[Action]) -> Sequence[Action]:
        """Write a commit, and return it; or that of a publisher that was faster, and may have had other settings.

        Raises DamagedTableError (``foreign-delta-commit``) if another program was.
        """
        data = msgspec.json.Encoder().encode_lines(actions)
        return actions if self.create(commit_name(version), data) else self.commit(version)

    def checkpoint(self, state: State) -> None:
        """Write the checkpoint of a state, and point `_last_checkpoint` to it."""
        rows: list[Action] = [
            Action(protocol=state.protocol),
            Action(meta_data=state.metadata),
            Action(txn=Txn(self._table_id, state.version, state.timestamp)),
            *(Action(add=add) for _, add in sorted(state.adds.items())),
        ]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist([msgspec.to_builtins(row) for row in rows], _SCHEMA), sink)
        self.create(checkpoint_name(state.version), sink.getvalue().to_pybytes())
        self.point_to(state.version, len(rows))

    def point_to(self, version: int, size: int) -> None:
        """Let `_last_checkpoint` name a checkpoint of so many actions.

        It is a hint. Who may not delete, such as a worker on AWS, leaves it as it is: readers then begin at an older checkpoint.
        """
        data = msgspec.json.encode({"version": version, "size": size})
        if not self.create(_LAST, data):
            with suppress(ConfigurationError):
                # Only `create` is atomic in every store, and readers do without it meanwhile.
                self.store.delete([_LAST])
                self.create(_LAST, data)

    def points_to(self) -> int | None:
        """The checkpoint that `_last_checkpoint` names; None if it names none."""
        try:
            return decoder_of(_Hint).decode(self.store.get(_LAST)).version
        except (NotFoundError, *UNREADABLE):
            return None

    def _from_checkpoint(self, version: int) -> State:
        try:
            with self.store.open(checkpoint_name(version)) as source:
                rows = pq.read_table(source, columns=["protocol", "metaData", "add"]).to_pylist(
                    maps_as_pydicts="strict"
                )
        except (NotFoundError, pa.ArrowException) as e:
            raise self._foreign(version, f"has a checkpoint that can't be read ({e})") from e
        actions = [convert(_without_nulls(row), Action) for row in rows]
        return State.first(version, actions)

    def create(self, name: str, data: bytes) -> bool:
        """Whether this call surely created the object. Otherwise it exists all the same."""
        return create_once(self.store, name, data, "delta", "Readers of Delta see the version before, or this one.")

    def _foreign(self, version: int, what: str) -> DamagedTableError:
        return DamagedTableError(
            "foreign-delta-commit",
            f"Version {version} of the Delta log {what}: {self.store.uri(commit_name(version))}. Nothing was added to the log; "
            "readers of lakeupsert are not affected, and readers of Delta see that version.",
            next="find out what wrote it; then `lakeupsert publish --to delta --reset` rewrites the log from the published "
            "snapshot",
        )


def commit_name(version: int) -> str:
    return f"{LOG}/{version:020}.json"


def checkpoint_name(version: int) -> str:
    return f"{LOG}/{version:020}.checkpoint.parquet"


def _without_nulls(value: object) -> object:
    """The same, without the fields of structs that are null: a checkpoint has every field of every action."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return value


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct(list(fields.items()))


_TEXT, _INT, _LONG, _BOOL = pa.string(), pa.int32(), pa.int64(), pa.bool_()
_STRINGS, _TEXTS = pa.map_(_TEXT, _TEXT), pa.list_(_TEXT)
_VECTOR = _struct(storageType=_TEXT, pathOrInlineDv=_TEXT, offset=_INT, sizeInBytes=_INT, cardinality=_LONG)
_FILE = {"path": _TEXT, "partitionValues": _STRINGS, "size": _LONG, "dataChange": _BOOL}
_ACTIONS = _struct(
    protocol=_struct(minReaderVersion=_INT, minWriterVersion=_INT, readerFeatures=_TEXTS, writerFeatures=_TEXTS),
    metaData=_struct(
        id=_TEXT,
        format=_struct(provider=_TEXT, options=_STRINGS),
        schemaString=_TEXT,
        partitionColumns=_TEXTS,
        configuration=_STRINGS,
        createdTime=_LONG,
    ),
    txn=_struct(appId=_TEXT, version=_LONG, lastUpdated=_LONG),
    add=_struct(**_FILE, modificationTime=_LONG, stats=_TEXT, tags=_STRINGS, deletionVector=_VECTOR),
    remove=_struct(**_FILE, deletionTimestamp=_LONG, extendedFileMetadata=_BOOL, deletionVector=_VECTOR),
)
_SCHEMA = pa.schema(list(_ACTIONS))
"""The schema of a checkpoint."""
