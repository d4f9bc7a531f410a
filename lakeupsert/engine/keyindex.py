"""The key index of a table whose keys are unique in the whole of it: where the record of greatest rank of every key is.

Reads     the rows that a batch appended, and the index as of one ledger entry; or, to make it anew, all that counts there
Writes    what the batch changes in the index, the index with these changes in it, deletes for partitions that keys leave, and
          deletion vectors of appended files. Commits nothing: a ledger entry names all of it (`LedgerEntry.keys`, `.index`)
Repeat    safe: objects have names of their own, and the same ledger gives the same answer

    appended rows -> spill by hash -> of each range: settle by G1 -> meet the index -> late for another partition: superseded
                                                                                    '-> won, elsewhere before: a delete there too

A row of the index has the key columns themselves and the ordering columns, no payload. Hashes only say which rows may be of
one key: rows are told apart by their keys, so that two keys with one hash are two keys. A delete stays in the index, so that
older records stay dead wherever they come. Which record wins is `rank.latest`'s to say, as everywhere.

Memory: the rows of one range, and key and order of the keys that move. Ranges grow where there would be over 2^`MOST_BITS`.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE
from lakeupsert.errors import RefusedError
from lakeupsert.landing.adopted import refuse_null_keys
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import POSITION, DataFileWriter, Footer, Pack, aligned, stream_file, write_into
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import latest, sorted_by
from lakeupsert.rows.vectors import with_deleted
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, Touched
from lakeupsert.table.manifest import Bucketed, DataFile, TombstoneFile, added, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_TO, PLACE, TableSpec

PACK_BYTES = 64 << 20
"""Of a pack with up to so many bytes all files are read by one request."""
RANGE_ROWS = 1 << 20
"""Rows of the index, and incoming ones, that are looked at at once, about. More: memory. Less: objects."""
HELD_ROWS = 1 << 17
"""Rows that are cut into ranges at once: appended files are many and small."""
MOST_BITS = 8
"""Of at most so many bits are ranges: each has a temporary file that is open."""

_HASH = "_lakeupsert_hash"
_SOURCE = "_lakeupsert_source"
_ALIVE = "_lakeupsert_alive"


@dataclass(frozen=True)
class Writing:
    """Under what name, and of what batch, objects are written; ``start`` is as in `TableObjects`."""

    store: ObjectStore
    spec: TableSpec
    spec_version: int
    batch_id: str
    start: int

    def footer(self, kind: str, partition: str | None = None, bucket: int = 0, bits: int = 0) -> Footer:
        renames = len(self.spec.renames)
        return Footer(self.spec.table_id, kind, self.batch_id, self.spec_version, partition, bucket, bits, renames)


@dataclass(frozen=True)
class Source:
    """Files of one partition, of which the ones of greater ``age`` are later; ``unsettled``: adopted, keys may repeat in them."""

    partition: str
    age: int
    files: tuple[DataFile, ...]
    unsettled: bool = False


@dataclass(frozen=True)
class Settled:
    """A batch after it met the index.

    Attributes:
        touched: with what is late for another partition superseded, and deletes where keys were before.
        keys: what the batch changes in the index.
        index: the index before it, with all changes in it; None: it was not to be written.
        objects: all that was written.
    """

    touched: dict[str, Touched]
    keys: tuple[DataFile, ...]
    index: tuple[DataFile, ...] | None
    objects: frozenset[str]


@dataclass(frozen=True)
class _Range:
    bucket: int
    bits: int


def key_schema(spec: TableSpec) -> Any:
    """``pyarrow.Schema`` of the index."""
    place = [pa.field(PARTITION, pa.string()), pa.field(DELETE_FLAG, pa.bool_())]
    return pa.schema([pa.field(_HASH, pa.uint64()), *spec.tombstone_schema, *place])


def settle(
    to: Writing, touched: dict[str, Touched], index: Sequence[DataFile], deltas: Sequence[DataFile], *, fold: bool
) -> Settled:
    """Let the rows of a batch meet the index, which is ``index`` with the changes ``deltas``, the oldest first.

    Of every key the record of greatest rank stays, wherever it came from; between equal orders an incoming one wins. Incoming
    rows that lost to what lies in another partition are superseded; those that lost to their own partition stay, for its
    merge to tell. Where one won against a row in another partition, a delete of its rank goes there. ``fold``: write the index
    anew.
    """
    spec = to.spec
    files = [(partition, file) for partition, t in touched.items() for file in t.files]
    files.sort(key=lambda pair: (pair[1].name, pair[1].at or 0))
    packs = _Packs(to.store, [file for _, file in files])
    partitions = pa.array([partition for partition, _ in files], pa.string())
    rows = sum(file.rows for _, file in files) + sum(file.rows for file in (*index, *deltas))
    late: defaultdict[int, list[Any]] = defaultdict(list)
    lost: defaultdict[str, Digest] = defaultdict(lambda: Digest(spec))
    moved: list[Any] = []
    new_name = partial(TableObjects.new_keys, to.start)
    folded: list[DataFile] = []
    with ExitStack() as stack:
        keys = stack.enter_context(DataFileWriter(to.store, new_name, key_schema(spec), to.footer("keys"), ()))
        arrived = stack.enter_context(_Ranges(rows))
        for number, (_, file) in enumerate(files):
            for block in stream_file(packs, file, _arrived_schema(spec)):
                arrived.add(_hashed(block.append_column(_SOURCE, _repeated(number, pa.int32(), block)), spec))
        for one in arrived.ranges:
            came = arrived.take(one)
            if came is None and not fold:
                continue
            hashes = np.unique(came[_HASH].to_numpy()) if came is not None else np.empty(0, np.uint64)
            stored = _stored(to.store, spec, index, deltas, one, None if fold else hashes)
            if fold:
                footer = to.footer("keys", bucket=one.bucket, bits=one.bits)
                with DataFileWriter(to.store, new_name, stored.schema, footer, ()) as out:
                    out.write(stored)
                folded += out.files
                stored = stored.filter(pa.array(_is_among(stored, hashes)))
            if came is None:
                continue
            order, wins = latest(came, spec, (FILE, PLACE))
            best = came.take(order.filter(wins))
            met = _meet(best, stored, partitions, spec)
            moved.append(met.moved)
            keys.write(met.won.take(pc.sort_indices(met.won[_HASH])))
            for rows_lost in (came.take(order.filter(pc.invert(wins))), met.late):
                for number in pc.unique(rows_lost[_SOURCE]).to_pylist():
                    of_file = rows_lost.filter(pc.equal(rows_lost[_SOURCE], number))
                    late[number].append(of_file[POSITION].to_numpy())
                    lost[files[number][0]].add(of_file)
    result, written = _without_late(to, touched, files, late, lost)
    result = _with_moved(to, result, pa.concat_tables(moved)) if any(m.num_rows for m in moved) else result
    written |= {f.name for f in (*keys.files, *folded)} | {
        f.name for t in result.values() for f in t.files if TableObjects.is_moved(f.name)
    }
    return Settled(dict(sorted(result.items())), tuple(keys.files), tuple(folded) if fold else None, frozenset(written))


def made_anew(to: Writing, sources: Iterable[Source], rows: int) -> tuple[DataFile, ...]:
    """The index of all rows, about ``rows``, that live or are deleted in these files, those of a partition by their age.

    Raises RefusedError where a key has a row in several partitions.
    """
    spec, found = to.spec, []
    with _Ranges(rows) as spilled:
        for source in sources:
            for number, file in enumerate(source.files):
                for block in _blocks(to.store, spec, source, file, number):
                    spilled.add(_hashed(block, spec))
        for one in spilled.ranges:
            rows_here = spilled.take(one)
            if rows_here is None:
                continue
            order, wins = latest(rows_here, spec, (AGE, FILE, PLACE), by=[PARTITION])
            best = rows_here.take(order.filter(wins))
            alive = pa.array((~true(best[DELETE_FLAG])).astype(np.int8))
            best = best.append_column(_ALIVE, alive)  # of a key that moved, the delete that it left has the same order
            order, wins = latest(best, spec, (_ALIVE,))
            twice = best.take(order.filter(pc.invert(wins)))
            twice = twice.filter(pc.equal(twice[_ALIVE], 1))
            if twice.num_rows:
                raise _several(spec, twice)
            best = best.take(order.filter(wins))
            best = best.take(pc.sort_indices(best[_HASH])).select(key_schema(spec).names)
            footer = to.footer("keys", bucket=one.bucket, bits=one.bits)
            new_name = partial(TableObjects.new_keys, to.start)
            with DataFileWriter(to.store, new_name, key_schema(spec), footer, ()) as out:
                out.write(best)
            found += out.files
    return tuple(found)


def _several(spec: TableSpec, rows: Any) -> RefusedError:
    first = rows.slice(0, 1).to_pylist()[0]
    key = " ".join(f"{name}={first[name]}" for name in spec.key)
    return RefusedError(
        "key-in-several-partitions",
        f"{rows.num_rows} keys, at the least, have a row in several partitions, such as {key} in {first[PARTITION]}; with "
        '`key_scope = "table"` a key has one. Nothing was changed.',
        next='leave one row of each key in these files, or set `key_scope = "partition"`',
    )


# ---------------------------------------------------------------- one range


@dataclass(frozen=True)
class _Met:
    """``won``: the changes of the index; ``late``: rows that lost to another partition; ``moved``: rows that won, with the
    partition where the key was in `PARTITION` and theirs in `MOVED_TO`."""

    won: Any
    late: Any
    moved: Any


def _meet(best: Any, stored: Any, partitions: Any, spec: TableSpec) -> _Met:
    """``best`` and ``stored`` have a key once each."""
    n = stored.num_rows
    both = pa.concat_tables(
        [
            rows.select(spec.tombstone_schema.names).append_column(AGE, _repeated(age, pa.int8(), rows))
            for age, rows in enumerate((stored, best))
        ]
    )
    order, wins = latest(both, spec, (AGE,))
    places, begins = order.to_numpy(), np.flatnonzero(true(wins))
    alone = np.diff(np.append(begins, len(places))) == 1
    first = places[begins]
    second = np.where(alone, 0, places[np.minimum(begins + 1, len(places) - 1)])
    won = first >= n
    here = partitions.take(best[_SOURCE].combine_chunks())

    def pairs(which: Any, incoming: Any, known: Any) -> tuple[Any, Any, Any]:
        """Incoming and stored rows that meet, and where they are of two partitions."""
        mine, theirs = pa.array(incoming[which] - n), stored.take(pa.array(known[which]))
        return mine, theirs, true(pc.not_equal(here.take(mine), theirs[PARTITION].combine_chunks()))

    mine, theirs, apart = pairs(won & ~alone, first, second)
    leaves = pa.array(apart & ~true(theirs[DELETE_FLAG]))
    moved = best.take(mine.filter(leaves)).drop_columns(DELETE_FLAG)
    moved = moved.append_column(PARTITION, theirs[PARTITION].filter(leaves))
    moved = moved.append_column(MOVED_TO, here.take(mine.filter(leaves)))
    mine, _, apart = pairs(~won & ~alone, second, first)
    late = best.take(mine.filter(pa.array(apart)))
    winners = pa.array(first[won] - n)
    rows = best.take(winners).append_column(PARTITION, here.take(winners)).select(key_schema(spec).names)
    return _Met(rows, late, moved)


def _stored(
    store: ObjectStore,
    spec: TableSpec,
    index: Sequence[DataFile],
    deltas: Sequence[DataFile],
    one: _Range,
    hashes: Any,
) -> Any:
    """The rows of the index in a range, one a key, by hash; those alone that may have one of these ``hashes``, None: all."""
    schema = key_schema(spec)

    def read(files: Iterable[DataFile]) -> Any:
        tables = [schema.empty_table()]
        near = (_HASH, _span(one) if hashes is None else pa.array(hashes))
        for file in files:
            if share(file, one):
                for block in stream_file(store, file, schema, near):
                    own = block[_HASH].to_numpy()
                    wanted = _is_here(own, one) if hashes is None else _is_among(block, hashes)
                    tables.append(block.filter(pa.array(wanted)))
        return pa.concat_tables(tables)

    base, changes = read(index), [read([file]) for file in deltas]
    # A change is later than what it changes, and has won against it.
    newer = pa.concat_tables(
        [rows.append_column(AGE, _repeated(age, pa.int32(), rows)) for age, rows in enumerate(changes, 1)]
        or [schema.append(pa.field(AGE, pa.int32())).empty_table()]
    )
    if not newer.num_rows:
        return base
    contested = _is_among(base, np.unique(newer[_HASH].to_numpy()))
    older = base.filter(pa.array(contested))
    both = pa.concat_tables([older.append_column(AGE, _repeated(0, pa.int32(), older)), newer])
    order, wins = latest(both, spec, (AGE,))
    rows = pa.concat_tables([base.filter(pa.array(~contested)), both.take(order.filter(wins)).select(schema.names)])
    return rows.take(pc.sort_indices(rows[_HASH]))


def _span(one: Bucketed) -> slice:
    """The least and the greatest hash of a range."""
    width = 1 << 64 - one.bits
    return slice(one.bucket * width, (one.bucket + 1) * width - 1)


def _is_here(hashes: Any, one: Bucketed) -> Any:
    return buckets(hashes, one.bits) == one.bucket


def _is_among(rows: Any, hashes: Any) -> Any:
    """A mask (numpy) of the rows whose hash is one of these, which are sorted."""
    own = rows[_HASH].to_numpy()
    if not len(hashes):
        return np.zeros(len(own), bool)
    return hashes[np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)] == own


def _hashed(rows: Any, spec: TableSpec) -> Any:
    return rows.append_column(_HASH, pa.array(key_hashes(rows, spec)))


def _repeated(value: Any, type_: Any, rows: Any) -> Any:
    return pa.repeat(pa.scalar(value, type_), rows.num_rows)


# ---------------------------------------------------------------- what a batch becomes


def _without_late(
    to: Writing,
    touched: dict[str, Touched],
    files: Sequence[tuple[str, DataFile]],
    late: dict[int, list[Any]],
    lost: dict[str, Digest],
) -> tuple[dict[str, Touched], set[str]]:
    """What is touched with these positions of its files superseded, and the object that was written for it, if one was."""
    nothing = np.empty(0, np.int64)
    positions = [np.concatenate([nothing, *late.get(number, [])]) for number in range(len(files))]
    written: set[str] = set()

    def new_name() -> str:
        written.add(name := TableObjects.new_late(to.start))
        return name

    left = {(f.name, f.at): f for f in with_deleted(to.store, [f for _, f in files], positions, new_name)}
    result = dict(touched)
    for partition, digest in lost.items():
        before = touched[partition]
        result[partition] = msgspec.structs.replace(
            before,
            files=tuple(left[f.name, f.at] for f in before.files if (f.name, f.at) in left),
            superseded=before.superseded + digest.rows,
            superseded_digest=added((before.superseded_digest, str(digest))),
        )
    return result, written


def _with_moved(to: Writing, touched: dict[str, Touched], rows: Any) -> dict[str, Touched]:
    """What is touched with a delete in the partition that a key leaves, of the rank of the record that takes it away."""
    spec, result = to.spec, dict(touched)
    schema = spec.ranked_schema.append(pa.field(MOVED_TO, pa.string()))
    rows = rows.append_column(DELETE_FLAG, _repeated(True, pa.bool_(), rows))
    with Pack(to.store, TableObjects.new_moved(to.start)) as pack:
        for partition in sorted(pc.unique(rows[PARTITION]).to_pylist()):
            leaving = aligned(rows.filter(pc.equal(rows[PARTITION], partition)), schema)
            digest = Digest(spec)
            digest.add(leaving)
            ordered = leaving.take(sorted_by(leaving, spec.stored_key))
            files = write_into(pack, ordered, schema, to.footer("appended", partition), spec.stored_key)
            before = result.get(partition, NOTHING)
            result[partition] = msgspec.structs.replace(
                before,
                files=(*before.files, *files),
                rows=before.rows + digest.rows,
                moved=before.moved + digest.rows,
                bytes=before.bytes + sum(f.bytes for f in files),
                digest=added((before.digest, str(digest))),
            )
    return result


def _arrived_schema(spec: TableSpec) -> Any:
    """What is read of appended rows."""
    ranks = [spec.ranked_schema.field(name) for name in (FILE, PLACE, DELETE_FLAG)]
    return pa.schema([*spec.tombstone_schema, *ranks, pa.field(POSITION, pa.int64())])


def _found_schema(spec: TableSpec) -> Any:
    """What the index is made anew of."""
    ranks = [
        (FILE, pa.int32()),
        (PLACE, pa.int64()),
        (DELETE_FLAG, pa.bool_()),
        (AGE, pa.int64()),
        (PARTITION, pa.string()),
    ]
    return pa.schema([*spec.tombstone_schema, *(pa.field(*rank) for rank in ranks)])


def _blocks(store: ObjectStore, spec: TableSpec, source: Source, file: DataFile, number: int) -> Iterator[Any]:
    """The rows of a file with what ranks them and where they are; those that bring no rank are ranked by file and place."""
    given = {FILE: number, DELETE_FLAG: isinstance(file, TombstoneFile), AGE: source.age, PARTITION: source.partition}
    schema = _arrived_schema(spec)
    if not source.age:
        schema = pa.schema([*spec.tombstone_schema, pa.field(POSITION, pa.int64())])
    for block in stream_file(store, file, schema):
        if source.unsettled:
            refuse_null_keys(store, file, spec, block, source.partition)
        if PLACE not in block.schema.names:
            block = block.append_column(PLACE, block[POSITION])
        for name, value in given.items():
            if name not in block.schema.names:
                block = block.append_column(name, _repeated(value, _found_schema(spec).field(name).type, block))
        yield pa.table([block[name] for name in _found_schema(spec).names], schema=_found_schema(spec))


class _Packs:
    """The store of files that are read pack by pack: a pack that is not large is read once, and kept until the next one."""

    def __init__(self, store: ObjectStore, files: Iterable[DataFile]) -> None:
        self._store = store
        self._sizes: defaultdict[str, int] = defaultdict(int)
        for file in files:
            self._sizes[file.name] = max(self._sizes[file.name], (file.at or 0) + file.bytes)
        self._held = ("", b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        if part is None or not part[1] < self._sizes[name] <= PACK_BYTES:
            return self._store.get(name, part)
        if self._held[0] != name:
            self._held = (name, self._store.get(name))
        at, size = part
        return self._held[1][at : at + size]


class _Ranges:
    """Rows by ranges of their hashes: in memory where there is one range, else in temporary Arrow files."""

    def __init__(self, rows: int) -> None:
        bits = min(MOST_BITS, (rows // RANGE_ROWS).bit_length())
        self.ranges = [_Range(bucket, bits) for bucket in range(1 << bits)]
        self._bits = bits
        self._tables: list[Any] = []
        self._held = 0
        self._writers: dict[int, Any] = {}

    def __enter__(self) -> "_Ranges":
        self._folder = tempfile.TemporaryDirectory(prefix="lakeupsert-") if self._bits else None
        return self

    def __exit__(self, *error: Any) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, rows: Any) -> None:
        self._tables.append(rows)
        self._held += rows.num_rows
        if self._bits and self._held >= HELD_ROWS:
            self._spill()

    def _spill(self) -> None:
        if not self._held:
            return
        rows = pa.concat_tables(self._tables)
        self._tables, self._held = [], 0
        numbers = buckets(rows[_HASH].to_numpy(), self._bits)
        order = np.argsort(numbers.astype(np.min_scalar_type(1 << self._bits)), kind="stable")
        rows, numbers = rows.take(pa.array(order)), numbers[order]
        for number in np.unique(numbers).tolist():
            begin, end = np.searchsorted(numbers, [number, number + 1]).tolist()
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(
                    self._path(number), rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
                )
            self._writers[number].write_table(rows.slice(begin, end - begin))

    def take(self, one: _Range) -> Any:
        """The rows of a range, once; None where there are none."""
        if not self._bits:
            tables, self._tables = self._tables, []
            return pa.concat_tables(tables) if tables else None
        self._spill()
        writer = self._writers.pop(one.bucket, None)
        if writer is None:
            return None
        writer.close()
        with pa.OSFile(self._path(one.bucket)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()

    def _path(self, number: int) -> str:
        assert self._folder is not None, "there are several ranges"
        return str(Path(self._folder.name) / f"{number}.arrow")
