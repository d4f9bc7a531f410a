"""A batch while its rows are settled against the key index: what stays where it landed, and what is written again elsewhere.

Reads     the appended files
Writes    appended files for the partitions that rows get, deletes for partitions that keys leave, deletion vectors
Repeat    safe: every object has a new name

Memory: key and order of the keys that move; in mode columns, their whole rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.batch import with_partition
from lakeupsert.engine.keys import effects
from lakeupsert.engine.keys.carry import as_carried, newer_parts
from lakeupsert.engine.keys.effects import ALONE, Effect
from lakeupsert.engine.keys.index import IndexTarget, add_hashes, arrived_schema, by_partition
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Column, Indices, Rows, repeat
from lakeupsert.rows.buckets import cut_by_number
from lakeupsert.rows.datafiles import POSITION, align, read_file, stream_file
from lakeupsert.rows.digest import Digest, digests
from lakeupsert.rows.filewriter import PackWriter
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.vectors import deleted_positions, mark_deleted
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, Reason, Touched
from lakeupsert.table.manifest import WHOLE, add_digests
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, MOVED_FROM, MOVED_TO, OLDER, PLACE

SOURCE = "_lakeupsert_source"
"""Integer column: the place of a row's file in `Batch.files`."""


class Batch:
    """The rows of a batch, and what the index made of them.

    Attributes:
        files: the batch's files, each with its partition.
        unknown: how many deletes have no more than the key of a key without a record.
    """

    def __init__(self, to: IndexTarget, touched: dict[str, Touched]) -> None:
        self.files = [(partition, file) for partition, t in touched.items() for file in t.files]
        self.files.sort(key=lambda pair: pair[1].place)
        self.unknown = 0
        self._to, self._touched = to, touched
        self._partitions = pa.array([partition for partition, _ in self.files], pa.string())
        # Digests: of superseded rows by the partition where they landed, or by the one that a row without a partition got; and
        # of the rows that left the partition where they landed, and are not superseded.
        self._lost: defaultdict[str, Digest] = defaultdict(partial(Digest, to.spec))
        self._lost_alone: defaultdict[str, Digest] = defaultdict(partial(Digest, to.spec))
        self._away: defaultdict[str, Digest] = defaultdict(partial(Digest, to.spec))
        self._gone: defaultdict[int, list[Indices]] = defaultdict(list)
        self._placed: defaultdict[int, list[Rows]] = defaultdict(list)
        self._refused: dict[Reason, list[Rows]] = {}
        self._found: defaultdict[type[Effect], list[Rows]] = defaultdict(list)

    @property
    def rows(self) -> int:
        return sum(file.rows for _, file in self.files)

    def arrived(self) -> Iterator[Rows]:
        """Key and rank of all rows."""
        for number, (_, file) in enumerate(self.files):
            for block in stream_file(self._to.store, file, arrived_schema(self._to.spec)):
                yield add_hashes(block.append_column(SOURCE, repeat(number, pa.int32(), block)), self._to.spec)

    def partitions_of(self, rows: Rows) -> Column:
        """The partitions where rows landed, or `UNPLACED`."""
        return self._partitions.take(rows[SOURCE].combine_chunks())

    def take(self, effect: Effect) -> None:
        match effect:
            case effects.Superseded(rows):
                self._leave(rows.filter(pc.invert(rows[ALONE])), self._lost)
                for partition, own in by_partition(rows.filter(rows[ALONE]), self._to.spec):
                    self._lost_alone[partition].add(own)
            case effects.Placed(rows):
                self._leave(rows.filter(pc.invert(rows[ALONE])), self._away)
                for number, of_file in _by_file(rows):
                    self._placed[number].append(of_file.select([POSITION, PARTITION]))
            case effects.Refused(rows, reason):
                self._leave(rows.filter(pc.invert(rows[ALONE])), self._away)
                self._refused.setdefault(reason, []).append(rows.select([SOURCE, POSITION, PARTITION, ALONE]))
            case effects.Left(rows) | effects.Copied(rows) | effects.Moved(rows) | effects.Ended(rows):
                self._found[type(effect)].append(rows)
            case effects.Unknown(count):
                self.unknown += count
            case effects.Indexed():
                pass  # `settle` writes them, range by range

    def _leave(self, rows: Rows, digests: defaultdict[str, Digest]) -> None:
        for number, of_file in _by_file(rows):
            self._gone[number].append(of_file[POSITION].to_numpy())
            digests[self.files[number][0]].add(of_file)

    def written(self, carry: Callable[[Rows], Rows]) -> "WrittenBatch":
        """Write what does not stay where it landed; ``carry`` as in `settle`."""
        spec, found = self._to.spec, self._found
        carried = carry(pa.concat_tables(found[effects.Moved])) if found[effects.Moved] else None
        out = WrittenBatch(self._to, *self._without_gone())
        columns = [*spec.tombstone_schema.names, FILE, PLACE, DELETE_FLAG, PARTITION, MOVED_TO]
        for kind in (effects.Left, effects.Copied):
            if any(rows.num_rows for rows in found[kind]):
                rows = pa.concat_tables([rows.select(columns) for rows in found[kind]])
                out.add(rows, follows=kind is effects.Copied)
        out.refused = self._refused_rows()
        if found[effects.Ended] and carried is not None:
            nowhere = pc.equal(carried[PARTITION], UNPLACED)
            orphans, carried = carried.filter(nowhere), carried.filter(pc.invert(nowhere))
            deletes = as_carried(pa.concat_tables(found[effects.Ended]), spec)
            out.add(deletes, follows=True)
            schema = spec.ranked_schema.append(pa.field(PARTITION, pa.string()))
            orphans = align(newer_parts(orphans, deletes, spec).drop_columns([PARTITION]), schema)
            refused = [align(out.refused[reason], schema) for reason in out.refused if reason == "unknown_key"]
            out.refused["unknown_key"] = pa.concat_tables([*refused, orphans])
        if carried is not None and carried.num_rows:
            out.add(carried, follows=True)
        for number, tables in sorted(self._placed.items()):
            at = pa.concat_tables(tables)
            out.add(self._read(number, at).append_column(PARTITION, at[PARTITION]))
        return out

    def _without_gone(self) -> tuple[dict[str, Touched], set[str]]:
        """The batch without the rows that do not count and without `UNPLACED`, and the vectors that were written for it."""
        stay = [(n, file) for n, (partition, file) in enumerate(self.files) if partition != UNPLACED]
        files = [file for _, file in stay]
        positions = [
            np.concatenate([deleted_positions(self._to.store, file).astype(np.int64), *self._gone.get(n, [])])
            for n, file in stay
        ]
        live = mark_deleted(self._to.store, files, positions, partial(TableObjects.new, "vectors", self._to.start))
        by_place = {f.place: f for f in live}
        result = dict(self._touched)
        result.pop(UNPLACED, None)
        for partition in self._lost.keys() | self._away.keys():
            before, lost, away = result[partition], self._lost[partition], self._away[partition]
            result[partition] = msgspec.structs.replace(
                before,
                files=tuple(by_place[f.place] for f in before.files if f.place in by_place),
                rows=before.rows - away.rows,
                digest=add_digests((before.digest, away.negative())),
                superseded=before.superseded + lost.rows,
                superseded_digest=add_digests((before.superseded_digest, str(lost))),
            )
        result = {partition: t for partition, t in result.items() if t.rows or partition not in self._away}
        for partition, digest in self._lost_alone.items():
            result[partition] = _with_lost(result.get(partition, NOTHING), digest.rows, str(digest))
        return result, {name for f in live for name in f.objects} - {name for f in files for name in f.objects}

    def _refused_rows(self) -> dict[Reason, Rows]:
        """The refused rows with all their columns, see `Settled`."""
        found = {}
        for reason, tables in self._refused.items():
            parts = []
            for number, at in _by_file(pa.concat_tables(tables)):
                own = pc.if_else(at[ALONE], None, at[PARTITION])
                parts.append(self._read(number, at).append_column(PARTITION, own))
            found[reason] = pa.concat_tables(parts)
        return found

    def _read(self, number: int, at: Rows) -> Rows:
        file, spec = msgspec.structs.replace(self.files[number][1], deleted=None), self._to.spec
        return read_file(self._to.store, file, spec.ranked_schema, spec).take(at[POSITION])


@dataclass
class WrittenBatch:
    """A batch after what does not stay where it landed was written.

    Attributes:
        touched: what it has of each partition.
        vectors: the deletion vectors that were written.
        refused: see `Settled`.
    """

    to: IndexTarget
    touched: dict[str, Touched]
    vectors: set[str]
    refused: dict[Reason, Rows] = field(default_factory=dict)

    def add(self, rows: Rows, *, follows: bool = False) -> None:
        """Write these rows, for the partitions that they have in `PARTITION`.

        With `MOVED_TO` or `MOVED_FROM` they did not land. They are deletes for partitions that keys leave, of another record's
        rank, or (``follows``) deletes and rows for partitions that keys come to.
        """
        to, spec, result = self.to, self.to.spec, self.touched
        schema, moves = spec.ranked_schema, [name for name in (MOVED_TO, MOVED_FROM) if name in rows.schema.names]
        if moves == [MOVED_FROM]:
            schema = pa.schema([*schema, *(f for f in spec.base_schema if f.name in (OLDER, BATCH))])
        schema = pa.schema([*schema, *(pa.field(name, pa.string()) for name in moves)])
        schema = pa.schema([*schema, *(spec.schema.field(name) for name in spec.partition_by)])
        parts = by_partition(rows, spec)
        found = digests([[own] for _, own in parts], spec)
        with PackWriter(to.store, TableObjects.new("moved", to.start), schema, to.footer("appended"), spec) as pack:
            for (partition, own), digest in zip(parts, found, strict=True):
                file = pack.write_file([align(with_partition(own, spec, partition), schema)], WHOLE)
                before = result.get(partition, NOTHING)
                result[partition] = msgspec.structs.replace(
                    before,
                    files=(*before.files, file),
                    rows=before.rows + file.rows,
                    moved=before.moved + (file.rows if moves else 0),
                    followed=before.followed + (file.rows if follows else 0),
                    bytes=before.bytes + file.bytes,
                    digest=add_digests((before.digest, digest)),
                )

    @property
    def objects(self) -> set[str]:
        """All objects that were written."""
        return self.vectors | {f.name for t in self.touched.values() for f in t.files if TableObjects.is_moved(f.name)}


def _by_file(rows: Rows) -> Iterator[tuple[int, Rows]]:
    return cut_by_number(rows, rows[SOURCE].to_numpy())


def _with_lost(touched: Touched, rows: int, digest: str | None) -> Touched:
    """``touched`` with more rows, which are superseded."""
    return msgspec.structs.replace(
        touched,
        rows=touched.rows + rows,
        superseded=touched.superseded + rows,
        digest=add_digests((touched.digest, digest)),
        superseded_digest=add_digests((touched.superseded_digest, digest)),
    )
