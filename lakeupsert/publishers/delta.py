"""The table as a Delta table: a Delta version for each snapshot, with the snapshot's number.

Reads     the Delta log, the snapshots that it lacks, the manifests of the partitions that these changed
Writes    deletion vectors in objects below `dv/`, then a commit for each snapshot, and some checkpoints; never a data file
Repeat    safe; two publishers write the same bytes, and the first one's count

    read the log -> for each later snapshot: manifests of changed partitions -> vectors -> commit -> each tenth: checkpoint

The log is derived from committed snapshots, so after a crash it is behind, and never wrong. Other programs can't write the
table: the log asks for a writer feature that no program has.
"""

import base64
import hashlib
import itertools
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote

from lakeupsert.engine.runs import runs
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.publishers import VECTOR_OBJECT_BYTES, PublishedTable, TablePublisher, hides_vectors, url_path
from lakeupsert.publishers.delta_log import (
    LOG,
    Action,
    Add,
    CommitInfo,
    DeltaLog,
    Format,
    Metadata,
    Protocol,
    Remove,
    State,
    Txn,
    Vector,
    checkpoint_name,
    commit_name,
    list_log,
)
from lakeupsert.publishers.delta_stats import DeltaStats
from lakeupsert.publishers.delta_types import DeltaSchema, NaiveTime, has_naive_times
from lakeupsert.rows.vectors import frame, vector_bytes
from lakeupsert.storage import ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import value_texts
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

CHECKPOINT_EVERY = 10
"""Versions between checkpoints. More: readers and publishers read more commits. Fewer: more is written."""
MOST_VECTORS = 500
"""delta-rs reads each vector in a thread of its own, of which it has 512, and may wait for another one for ever."""
FENCE = "lakeupsert"
"""A writer feature that no other program has, so none writes to the table."""
_VECTORS, _NAIVE_TIMES, _MAPPING, _TIMESTAMPS = "deletionVectors", "timestampNtz", "columnMapping", "inCommitTimestamp"
_NAIVE_TYPE: NaiveTime = "timestamp_ntz"
_FOLDER = "dv"
"""Of vector objects. Trino refuses names that are not alphanumeric."""
_TAG = "lakeupsert.vector"
_ENABLED = "delta.inCommitTimestampEnablement"
_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""Those of Python's base 85."""
_Z85_DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Those of ZeroMQ's base 85, which Delta uses."""
_TO_Z85, _FROM_Z85 = bytes.maketrans(_DIGITS, _Z85_DIGITS), bytes.maketrans(_Z85_DIGITS, _DIGITS)


@dataclass(frozen=True)
class _Diff:
    """What changes in a partition: ``files`` that readers read from now on, and those of ``gone`` no more. A file whose vector
    changed is in both."""

    values: dict[str, str | None]
    files: tuple[DataFile, ...]
    gone: tuple[Add, ...]
    has_new_rows: bool


class DeltaPublisher(TablePublisher):
    """Keeps the Delta log of one table."""

    @property
    def naive_time(self) -> NaiveTime:
        return "timestamp" if self.table.settings.delta_timestamps == "utc" else _NAIVE_TYPE

    def shown(self) -> int | None:
        """The snapshot that readers of Delta see; None if there is no log."""
        return list_log(self.objects.store).head

    def reset(self) -> None:
        """Delete the log. Newest first, so that a reader meanwhile sees an older version, and no mixture."""
        log = list_log(self.objects.store)
        for version in sorted({*log.commits, *log.checkpoints}, reverse=True):
            self.objects.store.delete([commit_name(version), checkpoint_name(version)])
        self.objects.store.delete(info.name for info in self.objects.store.list(f"{LOG}/"))

    def check(self, newest: Link[Snapshot]) -> None:
        """See `Publisher`."""
        spec = self.spec_of(newest.body)
        DeltaSchema(self.naive_time, bool(spec.names_written)).text(spec)
        self._diffs(spec, newest, None, None)

    def garbage(self, oldest: int, newest: int) -> list[ObjectInfo]:
        """Objects that no version from ``oldest`` on needs; none if the log lacks snapshot ``newest``, or is not ours alone.

        Vector objects of a version that is written just now are among them, so young ones must be kept.
        """
        listing, log = list_log(self.objects.store), self._log()
        named = log.points_to()  # readers may begin there
        kept = [v for v in listing.checkpoints if v <= (oldest if named is None else min(oldest, named))]
        if listing.head is None or listing.head < newest or not kept:
            return []
        begin = max(kept)
        try:
            vectors = {add.deletion_vector for add in log.adds(begin, listing.head)}
        except DamagedTableError:
            return []
        needed = {_object_of(vector) for vector in vectors if vector and vector.storage_type == "u"}
        packs = self.objects.store.list(f"{_FOLDER}/deletion_vector_")
        old = [info for kind in (listing.commits, listing.checkpoints) for v, info in kind.items() if v < begin]
        return old + [info for info in packs if info.name not in needed]

    def mend(self) -> None:
        """Let `_last_checkpoint` name the newest checkpoint, if whoever wrote that was not permitted to do so."""
        newest, log = max(list_log(self.objects.store).checkpoints, default=None), self._log()
        if newest is not None and log.points_to() != newest:
            with suppress(DamagedTableError):  # another program's: `catch_up` tells
                log.point_to(newest, len(log.adds(newest, newest)))

    def catch_up(self, newest: Link[Snapshot]) -> str | None:
        """Write a version for each snapshot up to ``newest`` that the log lacks. Returns a warning about the newest version.

        If one in between has expired or can't be shown, the log starts over with a checkpoint at ``newest``. Raises
        ConfigurationError (``unfit-for-delta``) and DamagedTableError (``foreign-delta-commit``).
        """
        listing = list_log(self.objects.store)
        if listing.head is not None and listing.head > newest.number:
            return None
        log = self._log()
        if listing.head == newest.number:
            log.refuse_lost(newest)
            return None
        state = log.read(listing)
        before = self.objects.snapshots.get(state.version) if state else None
        if state and before and state.write_id != before.write_id:
            before = None  # the log shows a snapshot that was lost, so all partitions are compared
        if state is not None:
            self._refuse_other_times(state, self.spec_of((before or newest).body))
        try:
            for number in range(state.version + 1, newest.number) if state else ():
                link = self.objects.snapshots.get(number) if newest.body.keeps(number) else None
                if link is None:
                    state = None
                    break
                state, before = self._append(log, link, before, state), link
        except ConfigurationError:
            state = None
        state = self._append(log, newest, before, state)
        return self._warning([add.path for add in state.adds.values() if add.deletion_vector])

    def _refuse_other_times(self, state: State, spec: TableSpec) -> None:
        """A zone in the bounds of files says how the table shows times, and files that stay keep their bounds."""
        if (_NAIVE_TYPE in state.metadata.schema_string) != self._shows_naive_times(spec):
            raise ConfigurationError(
                "unfit-for-delta",
                "The Delta log was begun with another `delta_timestamps`. Its statistics of times would mislead readers, so "
                "nothing was added to the log; readers of lakeupsert are not affected.",
                next="run `lakeupsert publish --to delta --reset`, which rewrites the log; or set `delta_timestamps` back",
            )

    def _shows_naive_times(self, spec: TableSpec) -> bool:
        return self.naive_time == _NAIVE_TYPE and has_naive_times(spec.schema.types)

    def _warning(self, with_vectors: Sequence[str]) -> str | None:
        count, mend = len(with_vectors), "`lakeupsert compact --full` leaves no vectors"
        unseen = sum(map(hides_vectors, map(unquote, with_vectors)))
        if unseen:
            return (
                f"Polars shows superseded rows of {unseen} files, because it finds no deletion vectors in folders with such "
                f"names. {mend}; later merges rewrite these partitions."
            )
        if self.table.settings.delta_vectors == "file" and count > MOST_VECTORS:
            return (
                f"{count} files have deletion vectors. delta-rs and Polars may hang if a scan reads more than 512. {mend}; "
                '`delta_vectors = "inline"` and `publish --to delta --reset` help too, but Trino refuses those.'
            )
        return None

    def _log(self) -> DeltaLog:
        return DeltaLog(self.objects.store, self.newest_spec.table_id)

    def _append(self, log: DeltaLog, link: Link[Snapshot], before: Link[Snapshot] | None, state: State | None) -> State:
        """Write the version of a snapshot. Without a ``state`` it begins the log."""
        spec = self.spec_of(link.body)
        moment = int(datetime.fromisoformat(link.written_at).timestamp() * 1000)
        if state is not None:
            moment = max(moment, state.timestamp + 1)
        diffs = self._diffs(spec, link, before.body if before and state else None, state)
        vectors = self._write_vectors(log, spec, [f for diff in diffs for f in diff.files])
        actions = [*self._head(spec, link, state, moment, has_vectors=bool(vectors))]
        stats = DeltaStats.of(spec, self.naive_time)
        actions += itertools.chain.from_iterable(_actions(diff, vectors, moment, stats) for diff in diffs)
        if state is None:
            state = State.first(link.number, actions)
            if link.number:  # first, because a log can't begin with a later commit
                log.checkpoint(state)
            log.append(link.number, actions)
            return state
        state = state.after(link.number, log.append(link.number, actions))
        if link.number % CHECKPOINT_EVERY == 0:
            log.checkpoint(state)
        return state

    def _diffs(
        self, spec: TableSpec, link: Link[Snapshot], before: Snapshot | None, state: State | None
    ) -> list[_Diff]:
        shown = link.body.partitions
        old = before.partitions if before else {}
        # Where columns changed, files that stay may have another column's values under the name of a new one.
        same_columns = before is not None and before.spec_version == link.body.spec_version
        changed = [p for p, now in shown.items() if not same_columns or old.get(p) != now]
        known: dict[frozenset[tuple[str, str | None]], dict[str, Add]] = {}
        for add in state.adds.values() if state else ():
            known.setdefault(frozenset(add.partition_values.items()), {})[add.path] = add

        def diff(partition: str) -> _Diff:
            values: dict[str, str | None] = {**value_texts(spec, partition)}
            manifest = self.table.version(partition, shown[partition])
            has_new_rows = partition not in old or old[partition].merged != shown[partition].merged
            return _diff(spec, manifest, values, known.get(frozenset(values.items()), {}), has_new_rows=has_new_rows)

        return self.table.map_concurrently(diff, changed)

    def _write_vectors(self, log: DeltaLog, spec: TableSpec, files: Iterable[DataFile]) -> dict[str, Vector]:
        """Write the vectors of these files. Returns them by the files' names."""
        marked = [(file, file.deleted) for file in files if file.deleted is not None]
        data = self.table.map_concurrently(lambda pair: vector_bytes(self.objects.store, *pair), marked)
        if self.table.settings.delta_vectors == "inline":
            return {
                file.name: Vector("i", _z85(bitmap), len(bitmap), vector.rows)
                for (file, vector), bitmap in zip(marked, data, strict=True)
            }
        found: dict[str, Vector] = {}
        packs = runs(zip(marked, data, strict=True), lambda pair: len(pair[1]), VECTOR_OBJECT_BYTES)
        for pack in packs:
            blobs = [frame(bitmap) for _, bitmap in pack]
            body = b"\x01" + b"".join(blobs)
            # Named by its content, because after a reset another object may be written for the same version.
            id_ = uuid.uuid5(uuid.UUID(spec.table_id), hashlib.sha256(body).hexdigest())
            begins = itertools.accumulate(map(len, blobs), initial=1)
            for ((file, vector), bitmap), begin in zip(pack, begins, strict=False):
                found[file.name] = Vector("u", _FOLDER + _z85(id_.bytes), len(bitmap), vector.rows, offset=begin)
            log.create(_vector_object(id_), body)
        return found

    def _head(
        self, spec: TableSpec, link: Link[Snapshot], state: State | None, moment: int, *, has_vectors: bool
    ) -> Iterator[Action]:
        """What is said of the commit, and of the table if that changed."""
        number = link.number
        yield Action(
            commit_info=CommitInfo(
                in_commit_timestamp=moment,
                timestamp=moment,
                operation="lakeupsert publish",
                operation_parameters={"batch": str(link.body.batch), "snapshot": link.write_id},
                engine_info="lakeupsert",
                txn_id=str(uuid.uuid5(uuid.UUID(spec.table_id), f"delta/{number}")),
            )
        )
        protocol = self._protocol(spec, state.protocol if state else None, has_vectors=has_vectors)
        if state is None or protocol != state.protocol:
            yield Action(protocol=protocol)
        metadata = self._metadata(
            spec, state.metadata if state else None, number, moment, protocol.reader_features or ()
        )
        if state is None or metadata != state.metadata:
            yield Action(meta_data=metadata)
        yield Action(txn=Txn(spec.table_id, number, moment))

    def _protocol(self, spec: TableSpec, before: Protocol | None, *, has_vectors: bool) -> Protocol:
        """Only features that some reader needs: each one keeps some program out. A feature stays."""
        needed = {
            _VECTORS: has_vectors,
            _NAIVE_TIMES: self._shows_naive_times(spec),
            _MAPPING: bool(spec.names_written),
        }
        features = {
            *((before and before.reader_features) or ()),
            *(name for name, is_needed in needed.items() if is_needed),
        }
        return Protocol(
            min_reader_version=3 if features else 1,
            min_writer_version=7,
            reader_features=tuple(sorted(features)) or None,
            writer_features=tuple(sorted({*features, _TIMESTAMPS, FENCE})),
        )

    def _metadata(
        self, spec: TableSpec, before: Metadata | None, number: int, moment: int, features: Collection[str]
    ) -> Metadata:
        kept = f"interval {int(self.table.settings.retention.total_seconds())} seconds"
        mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(spec.last_field_id)}
        enabled = {}
        if before is not None:
            enabled = {name: value for name, value in before.configuration.items() if name.startswith(_ENABLED)}
        elif number:
            enabled = {f"{_ENABLED}Version": str(number), f"{_ENABLED}Timestamp": str(moment)}
        return Metadata(
            id=str(uuid.UUID(spec.table_id)),
            format=Format(),
            schema_string=DeltaSchema(self.naive_time, _MAPPING in features).text(spec),
            partition_columns=spec.partition_by,
            configuration={
                "delta.enableInCommitTimestamps": "true",
                # Without it Trino finds deletion vectors of commits, and overlooks those of checkpoints.
                **({"delta.enableDeletionVectors": "true"} if _VECTORS in features else {}),
                **(mapping if _MAPPING in features else {}),
                **enabled,
                "delta.deletedFileRetentionDuration": kept,
            },
            created_time=before.created_time if before else moment,
        )


def open_publisher(table: PublishedTable) -> DeltaPublisher:
    return DeltaPublisher(table)


def _diff(
    spec: TableSpec, manifest: Manifest, values: dict[str, str | None], known: dict[str, Add], *, has_new_rows: bool
) -> _Diff:
    """``known``: what readers read of the partition so far, by path."""
    files, stay = [], set()
    for file in (file for bucket in manifest.buckets for file in bucket.data):
        if spec.conversions(file.renames):
            raise ConfigurationError(
                "unfit-for-delta",
                f"{file.name} was written before a column was retyped, and readers of Delta would not convert its values. They "
                "see the last version from before; readers of lakeupsert are not affected.",
                next="run `lakeupsert compact --full`, which converts them",
            )
        if spec.names_in(file.renames) != spec.names_written:
            raise ConfigurationError(
                "unfit-for-delta",
                f"{file.name} has other column names than newer files, because columns were renamed or dropped before the table "
                "had this publisher. Readers of Delta would look for one name in all files. They see the last version from "
                "before; readers of lakeupsert are not affected.",
                next="run `lakeupsert reprocess` over all partitions, which writes all files with one name a column",
            )
        path = url_path(file.name)
        if path in known and (known[path].tags or {}) == _tags(file):
            stay.add(path)
        else:
            files.append(file)
    gone = tuple(add for path, add in sorted(known.items()) if path not in stay)
    return _Diff(values, tuple(files), gone, has_new_rows)


def _actions(diff: _Diff, vectors: dict[str, Vector], moment: int, stats: DeltaStats) -> Iterator[Action]:
    for add in diff.gone:
        yield Action(
            remove=Remove(
                path=add.path,
                deletion_timestamp=moment,
                data_change=diff.has_new_rows,
                extended_file_metadata=True,
                partition_values=add.partition_values,
                size=add.size,
                deletion_vector=add.deletion_vector,
            )
        )
    for file in diff.files:
        yield Action(
            add=Add(
                path=url_path(file.name),
                partition_values=diff.values,
                size=file.bytes,
                modification_time=moment,
                data_change=diff.has_new_rows,
                stats=stats.text(file),
                tags=_tags(file) or None,
                deletion_vector=vectors.get(file.name),
            )
        )


def _vector_object(id_: uuid.UUID) -> str:
    return f"{_FOLDER}/deletion_vector_{id_}.bin"


def _z85(data: bytes) -> str:
    return base64.b85encode(data, pad=True).translate(_TO_Z85).decode()


def _object_of(vector: Vector) -> str:
    digits = vector.path_or_inline_dv.removeprefix(_FOLDER).encode().translate(_FROM_Z85)
    return _vector_object(uuid.UUID(bytes=base64.b85decode(digits)))


def _tags(file: DataFile) -> dict[str, str]:
    """Which vector the file has."""
    return {_TAG: file.deleted.identity} if file.deleted else {}
