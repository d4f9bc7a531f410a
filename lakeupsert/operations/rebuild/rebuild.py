"""Make a table of what is left of one whose metadata is lost: its data files, and each version of its chains that still reads.

Reads     `remains` of the lost table; each of its data files that counts
Writes    the rows as new base files; then as `adopt`: the spec, a first manifest for each partition, ledger entry 0, which is the
          commit, and the snapshot
Repeat    safe until the commit; after it, the folder is a table, and the call is refused. The lost table stays as it is

Nothing is guessed in silence: see the warnings, and ADR 0075 for rows that can come back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec
import pyarrow as pa

from lakeupsert import clock
from lakeupsert.config import canonical_address
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.count import count_rows
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.landing.adopted import FileFooter
from lakeupsert.operations.adopt.adopt import commit_first, first_entry, is_partition, plan_spec
from lakeupsert.operations.backup import OF_OTHERS
from lakeupsert.operations.rebuild.remains import (
    PartitionRemains,
    Remains,
    StoredFile,
    find_remains,
    is_of_rebuild,
    read_stored_file,
    settle_by_merge,
)
from lakeupsert.phrases import count, short_list
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.strategy import Incoming, SplitRule
from lakeupsert.pipeline.table_keys import first_index
from lakeupsert.pipeline.workers.drain_queues import limit_bytes
from lakeupsert.rows.floor import Extract
from lakeupsert.storage import ObjectStore, open_store
from lakeupsert.storage.two import TwoStores
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import DATA, ERASURES, HOME, QUARANTINE, WHOLE_TABLE
from lakeupsert.table.ledger import LedgerEntry, Touched
from lakeupsert.table.manifest import NO_DIGESTS, BucketEntry, Counters, DataFile, add_digests
from lakeupsert.table.spec import RESERVED, TableSpec, field_id
from lakeupsert.table.types import normalize

_MEMORY_SHARE = 0.5
"""Of the machine's memory, for the merge of a partition. More: no room for what else runs here."""


@dataclass(frozen=True)
class Guess:
    """A partition whose newest manifest is lost: in each of its keys the latest file decided.

    Attributes:
        why: it is not known.
        doubtful: rows that later merges of their bucket lack: their keys were deleted, or such a merge broke off.
    """

    why: str
    doubtful: int


@dataclass(frozen=True)
class RebuildResult:
    """The table that was made, and what can't be known of the lost one.

    Attributes:
        guessed: the partitions without a manifest.
        taken: landing files that the new table knows as taken.
        waiting: batches that count and may not be in every partition. Their landing files count as new.
        lost_entries: how many batches nobody knows. Their landing files count as new, too.
    """

    partitions: int
    files: int
    rows: int
    bytes: int
    snapshot: int | None
    guessed: Mapping[str, Guess]
    taken: int
    waiting: tuple[int, ...]
    lost_entries: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Rebuilt:
    """A partition of the new table."""

    buckets: tuple[BucketEntry, ...]
    doubtful: int


def rebuild(
    table: OpenTable, address: str, host: Host, progress: Callable[[str], None] = lambda text: None
) -> RebuildResult:
    """Make the table, which does not exist, of what is left of another at ``address``. ``host``: where rows are merged.

    Raises:
        ConfigurationError: there is a table already, or nothing is left.
        DamagedTableError: a data file that counts is damaged.
        RefusedError: the spec is lost, and the files do not say which of their columns are which.
    """
    _refuse_place(table, address)
    progress("looking at what is left")
    remains = find_remains(open_store(address))
    columns = [one.column for one in table.declaration.partition_columns]
    found = {name: one for name, one in remains.partitions.items() if is_partition(_folder(name), columns)}
    if not found:
        raise ConfigurationError(
            "nothing-to-rebuild",
            f"{address} has no data file of a table that is partitioned by {columns or 'no column'}. Nothing was written.",
            next=f"give the folder of the lost table, or correct `partition_by` in [tables.{table.name}]",
        )
    spec, warnings = _spec_of(table, remains, found)
    progress(f"writing {count(len(found), 'partition')}")
    made = _rebuild_partitions(table, remains, spec, found, host)
    buckets = {name: one.buckets for name, one in made.items()}
    touched = {name: _touched(of) for name, of in buckets.items()}
    index = None
    if spec.key_scope == "table":
        progress("building the key index")
        index = first_index(table.resources, host, spec, buckets)
    for name in remains.names:
        if name.startswith(OF_OTHERS) and "leases" not in name.split("/")[3:4]:
            table.resources.store.create(name, remains.store.get(name))
    taken = (link.body.files for n, link in sorted(remains.entries.items()) if n not in remains.waiting)
    entry = first_entry(touched, index, tuple(chain.from_iterable(taken)))
    published = commit_first(table, spec, entry, buckets, "rebuild")
    guessed = {name: Guess(found[name].why, one.doubtful) for name, one in made.items() if found[name].manifest is None}
    return RebuildResult(
        partitions=len(touched),
        files=sum(len(t.files) for t in touched.values()),
        rows=sum(file.rows for t in touched.values() for file in t.files),
        bytes=sum(t.bytes for t in touched.values()),
        snapshot=published.snapshot,
        guessed=guessed,
        taken=len(entry.files),
        waiting=tuple(n for n, one in remains.waiting.items() if one.kind == "batch"),
        lost_entries=remains.lost_entries,
        warnings=(*warnings, *_warnings(spec, remains, found, guessed)),
    )


def _refuse_place(table: OpenTable, address: str) -> None:
    """Raises ConfigurationError unless the folder is empty, apart from what a call that broke off has left."""
    store = table.resources.store
    others = (f.name for f in store.list("") if not (f.name.startswith(f"{HOME}/") or is_of_rebuild(store, f)))
    found, lost, place = "", canonical_address(address), canonical_address(table.settings.processed)
    if lost.startswith(place) or place.startswith(lost):
        found = f"and {address} are one folder, or one is inside the other"
    elif table.history.objects.ledger.newest_number() is not None:
        found = "is a table already"
    elif other := next(others, None):
        found = f"has {other}"
    if found:
        raise ConfigurationError(
            "already-a-table",
            f"{store.uri()} {found}. `rebuild` makes a new table and leaves the lost one as it is. Nothing was written.",
            next="name an empty folder in `processed`",
        )


def _folder(partition: str) -> str:
    return "" if partition == WHOLE_TABLE else partition


# -- the spec


def _spec_of(table: OpenTable, remains: Remains, found: Mapping[str, PartitionRemains]) -> tuple[TableSpec, list[str]]:
    if remains.spec is not None:
        table.declaration.refuse_other(remains.spec)
        return remains.spec, []
    listed = {info.name: info for info in remains.store.list("")}
    stored = [one for partition in found.values() for one in partition.files]
    for partition in found.values():
        names = {f.name for f in _files(partition)} if partition.manifest else ()
        stored += [read_stored_file(remains.store, listed[name]) for name in sorted(names)]
    rows = [one for one in stored if one.kind != "tombstones"]
    ids = _ids_of(remains, rows)
    footings = [FileFooter(one.file, _own_columns(one.schema), {}, {}) for one in rows]
    spec, warnings = plan_spec(table, footings, list(found), ids)
    if any(field_id(spec.schema.field(name)) != number for name, number in ids.items()):
        raise _unknown_columns(remains, f"their field ids are {ids}, which is not what this configuration gives")
    return spec, [
        "the spec is lost: columns and types are those of the data files, all else is as the configuration says now. Look at "
        "`lakeupsert schema` before the next run, above all if arrival decided in the lost table (its ordering column is now one "
        "that files must have)",
        *warnings,
    ]


def _ids_of(remains: Remains, files: Sequence[StoredFile]) -> dict[str, int]:
    """The field ids of the columns. Raises RefusedError if columns were renamed, dropped or retyped: only the spec knows how."""
    ids: dict[str, int] = {}
    names: dict[int, str] = {}
    for one in files:
        if one.file.renames:
            raise _unknown_columns(
                remains, f"{one.file.name} was written after columns were renamed, dropped or retyped"
            )
        for name, number in one.ids.items():
            if ids.setdefault(name, number) != number or names.setdefault(number, name) != name:
                raise _unknown_columns(
                    remains, f"column {name!r} of {one.file.name} is called or numbered otherwise in others"
                )
    return ids


def _unknown_columns(remains: Remains, why: str) -> RefusedError:
    return RefusedError(
        "columns-unknown",
        f"The newest spec of {remains.store.uri()} is lost, and its data files do not say which columns are which: {why}. "
        "Nothing was written.",
        next=f"put back the objects below {remains.store.uri(f'{HOME}/spec')}, for example from the bucket's own versions, "
        "then run the same command again",
    )


def _own_columns(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f.name, normalize(f.type)) for f in schema if not f.name.startswith(RESERVED)])


# -- the rows


def _files(one: PartitionRemains) -> list[DataFile]:
    known = one.manifest.buckets if one.manifest else ()
    return [f for bucket in known for f in bucket.data] + [stored.file for stored in one.files]


def _rebuild_partitions(
    table: OpenTable, remains: Remains, spec: TableSpec, found: Mapping[str, PartitionRemains], host: Host
) -> dict[str, _Rebuilt]:
    """The new partitions that have a bucket."""
    store, items = table.resources.store, list(found.items())
    sizes = [float(sum(f.bytes for f in _files(one))) for _, one in items]
    work = partial(_rebuild_partition, remains.store, store, spec, table.settings.bucket_bytes)
    try:
        made = all_or_raise(map_counted(host, store, work, items, sizes))
    except DamagedTableError as e:
        e.next = (
            f"put back that object at {remains.store.uri()}, or move it away there: its partition is then made of its other "
            "files. Then run the same command again"
        )
        raise
    return {name: one for name, one in zip(found, made, strict=True) if one.buckets}


def _rebuild_partition(
    lost: ObjectStore, store: ObjectStore, spec: TableSpec, bucket_bytes: int, item: tuple[str, PartitionRemains]
) -> _Rebuilt:
    """Write the rows of a partition of the store ``lost`` to ``store``, one for each key."""
    partition, found = item
    doubtful, old = 0, found.manifest.buckets if found.manifest else ()
    if found.manifest is None:
        settled = settle_by_merge(lost, spec, found.files)
        doubtful, old = settled.doubtful, (settled.bucket,)
    engine = ArrowEngine(int(limit_bytes() * _MEMORY_SHARE))
    new = []
    for task in _tasks(spec, bucket_bytes, partition, old, found.pending):
        [output] = engine.merge(TwoStores(lost, store), spec, 0, [task])
        if isinstance(output, Exception):
            raise output
        new.append(_bucket_of(store, spec, task, output))
    return _Rebuilt(tuple(new), doubtful)


def _tasks(
    spec: TableSpec, bucket_bytes: int, partition: str, old: Sequence[BucketEntry], pending: Sequence[Link[LedgerEntry]]
) -> Iterator[MergeTask]:
    """Tasks that settle the buckets, and merge the batches that wait."""
    bodies = [link.body for link in pending]
    batches = tuple(body.touched[partition].files for body in bodies)
    incoming = Incoming(sum(f.bytes for of in batches for f in of), sum(f.rows for of in batches for f in of))
    full = tuple(Extract(age, b.full.order, b.full.replaces) for age, b in enumerate(bodies, 1) if b.full)
    old = old or ((BucketEntry(id=""),) if pending else ())
    floors = tuple(sorted({bucket.floor for bucket in old if bucket.floor}))
    rule = SplitRule.of(bucket_bytes, spec.base_schema.types, old, incoming.rows)
    for bucket in old:
        bits = rule.extra_bits(bucket, incoming) if spec.stored_key else 0
        for number in range(2**bits):
            yield MergeTask(
                partition=partition,
                base=bucket.data,
                tombstones=bucket.tombstones,
                batches=batches,
                up_to=0,
                start=0,
                settled=False,
                bucket=(bucket.bucket << bits) + number,
                bits=bucket.bits + bits,
                floors=floors,
                full=full,
                numbers=(0,) * (len(batches) + 1),
            )


def _bucket_of(store: ObjectStore, spec: TableSpec, task: MergeTask, output: MergeOutput) -> BucketEntry:
    live, dead = sum(f.rows for f in output.written), sum(f.rows for f in output.tombstones)
    bucket = BucketEntry(
        id=clock.new_id(),
        bucket=task.bucket,
        bits=task.bits,
        base=output.written,
        tombstones=output.tombstones,
        history=output.history,
        floor=output.floor,
        counters=Counters(appended=live + dead, live=live, tombstones=dead),
    )
    rows = count_rows(store, spec, bucket)
    if rows.wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"{task.partition}: the rebuilt files are wrong: {'; '.join(rows.wrong)}. Nothing was committed.",
            next="report this as a bug of lakeupsert; the lost table is as it was",
            partition=task.partition,
        )
    digest = add_digests([rows.live_digest, rows.tombstone_digest])
    return msgspec.structs.replace(bucket, digests=msgspec.structs.replace(NO_DIGESTS, adopted=digest))


def _touched(buckets: Sequence[BucketEntry]) -> Touched:
    files = tuple(msgspec.structs.replace(file, statistics=()) for bucket in buckets for file in bucket.base)
    return Touched(
        files=files,
        rows=sum(bucket.counters.appended for bucket in buckets),
        superseded=0,
        bytes=sum(file.bytes for file in files),
        tombstones=tuple(file for bucket in buckets for file in bucket.tombstones),
    )


# -- what is not known


def _warnings(
    spec: TableSpec, remains: Remains, found: Mapping[str, PartitionRemains], guessed: Mapping[str, Guess]
) -> Iterator[str]:
    if left := sorted(name for name, one in remains.partitions.items() if name not in found and one.has_files):
        yield f"{count(len(left), 'folder')} with data files are in no partition of the table, so left out: {short_list(left)}"
    if gone := sorted(name for name, one in remains.partitions.items() if one.is_gone):
        yield (
            f"{count(len(gone), 'partition')} that the ledger or a snapshot names have no file left: {short_list(gone)}. "
            "Their rows are missing, unless a restore withdrew them. Put the files back and run `lakeupsert rebuild` with an "
            "empty `processed` again, or land the rows again"
        )
    if guessed:
        first, partitions = min(guessed), count(len(guessed), "partition")
        yield (
            f"{partitions} of {len(found):,} have lost the newest manifest, so the latest file with a key decided (between "
            f"files that no merge made: the order of rows). The first is {first}: {guessed[first].why}. Rows that a restore "
            "withdrew, or keys that a full extract lacked, may be in them"
        )
        if not any(name.startswith(f"{DATA}/") for name in remains.names):
            yield f"{partitions} may have lost delta files, since no object is below {DATA}: older rows of their keys are there"
        if spec.has_deletes or spec.delete:
            yield (
                f"{partitions} may have rows again whose delete was only in a lost manifest. Nothing says how many. Land the "
                "files with the deletes again"
            )
    if doubtful := {name: one.doubtful for name, one in sorted(guessed.items()) if one.doubtful}:
        each = short_list([f"{name} ({number:,})" for name, number in doubtful.items()])
        yield (
            f"{count(sum(doubtful.values()), 'row')} are only in files that later merges replaced: {each}. Their keys were "
            "deleted, and are back, unless such a merge broke off"
        )
    if any(name.startswith(f"{ERASURES}/") for name in remains.names):
        yield (
            "keys were erased from the lost table. The new one has no record of them, and partitions without a manifest may "
            "have such keys again: give `lakeupsert erase` with the same lists again"
        )
    if bad := [name for one in found.values() for name in one.unreadable]:
        yield f"{count(len(bad), 'data file')} can't be read, and the rows in them are missing: {short_list(bad)}"
    if remains.snapshot is None:
        yield "no snapshot can be read: rows that were merged are there, published or not. Tags and older snapshots are lost"
    yield from _of_ledger(spec, remains)
    for folder, ending, rows in ((QUARANTINE, ".rows", "refused rows"), (DATA, ".history", "earlier versions of rows")):
        if number := sum(name.startswith(f"{folder}/") and name.endswith(ending) for name in remains.names):
            yield f"{count(number, 'file')} with {rows} stay at {remains.store.uri()}, and are not in the new table"


def _of_ties(spec: TableSpec, remains: Remains, batches: Mapping[int, LedgerEntry]) -> str:
    """The warning about landing files that are taken again, ``batches`` among them."""
    made = [f"{link.body.statement} (batch {n})" for n, link in sorted(remains.entries.items()) if link.body.statement]
    made += [f"column {one.name!r} {'retyped' if one.retyped else 'renamed or dropped'}" for one in spec.renames]
    held = [n for n, one in batches.items() if any(remains.partitions[p].may_have(n) for p in one.touched)]
    files = [file.path for number in held for file in batches[number].files]
    return (
        f"files that are taken again win {'always, since arrival decides' if spec.stamped else 'ties'}. So they undo updates, "
        "deletes by statement, renames and retypes, also in partitions that are known"
        + (f" (still recorded: {short_list(made)})" if made else "")
        + ". Before `lakeupsert run`, move landing files away whose rows are in the table"
        + (f": {short_list(files)} had rows there" if files else "")
        + ("; nobody knows the files of lost entries" if remains.lost_entries else "")
    )


def _of_ledger(spec: TableSpec, remains: Remains) -> Iterator[str]:
    batches = {n: one for n, one in remains.waiting.items() if one.kind == "batch" or one.files}
    again = "Their landing files count as new, and the next run takes them again"
    if batches:
        numbers = short_list([str(number) for number in batches])
        yield f"{count(len(batches), 'batch', 'es')} may not be merged everywhere: {numbers}. {again}"
    if not remains.entries:
        yield f"the ledger is lost, and nobody knows its batches. {again}"
    elif remains.lost_entries:
        yield f"{remains.lost_entries:,} of {remains.lost_entries + len(remains.entries):,} ledger entries are lost. {again}"
    if batches or remains.lost_entries:
        yield _of_ties(spec, remains, batches)
    if remains.of_no_entry:
        yield (
            f"{count(len(remains.of_no_entry), 'file')} of appended rows may be of a lost ledger entry, or of a call that broke "
            f"off: {short_list(remains.of_no_entry)}. Rows in them that were not merged are missing. Before `lakeupsert run`, "
            "look if their landing files are there, and give updates and deletes again"
        )
    known = [one.manifest.buckets for one in remains.partitions.values() if one.manifest]
    if remains.lost_entries and (withdrawn := sum(any(b.counters.withdrawn for b in of) for of in known)):
        yield (
            f"a restore withdrew rows of {count(withdrawn, 'partition')}, and the next run takes them again: move their landing "
            "files away before `lakeupsert run`"
        )
    if hand := [str(n) for n, one in batches.items() if one.statement or one.replayed]:
        yield f"batches {short_list(hand)} are updates, deletes or replays, which no landing file has: give them again"
    if full := [str(n) for n, one in batches.items() if one.full]:
        yield f"batches {short_list(full)} are full extracts. Keys that they lacked can be back: take a new extract with `--full`"
    if restores := [number for number, one in remains.waiting.items() if one.restored]:
        yield f"restore {restores[0]} was not merged everywhere: rows that it withdrew are in the table"
