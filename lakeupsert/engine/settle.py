"""Rows of a batch: cut by range, settled by G1, sorted and written as appended files. See `batch`."""

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.reports import Report, Written
from lakeupsert.landing.accept import PARTITION
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import Footer, Pack, write_into
from lakeupsert.rows.digest import as_text, hashed_columns, row_hashes
from lakeupsert.rows.floor import greatest
from lakeupsert.rows.rank import latest
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

REPEATS = 1 / 3
"""Share of rows that lose to another row of their task, from which on settling them before the shuffle pays."""
SAMPLED_ROWS = 1 << 13


class Held:
    """Rows of a task that are not passed on yet. Where many are versions of few keys, those that lost go, and more fit in.

    ``lost`` reports those that went, ``tables`` has the others.
    """

    def __init__(self, job: AppendJob, limit: int) -> None:
        self.tables: list[Any] = []
        self.lost: list[Written] = []
        self._job = job
        self._limit = limit
        self._bytes = 0

    def add(self, rows: Any) -> bool:
        """Whether it is full: then pass ``tables`` on, and begin with another one."""
        self.tables.append(rows)
        self._bytes += rows.nbytes
        if self._bytes <= self._limit:
            return False
        self.settle()
        return self._bytes > self._limit // 2

    def settle(self) -> None:
        """Drop the rows that lost to another one here, where they are many."""
        rows = pa.concat_tables(self.tables)
        if not self._job.spec.settles_early or not _repeats(rows, self._job.spec):
            return
        ranked = _Ranked(self._job.spec, rows)
        losers = ranked.order.filter(pc.invert(ranked.wins))
        columns = hashed_columns(self._job.spec)
        hashes = row_hashes(rows.select(columns).take(losers), columns)
        counts = np.bincount(ranked.codes[losers.to_numpy()], minlength=len(ranked.partitions))
        for partition, count, total in zip(ranked.partitions, counts.tolist(), _sums(hashes, counts), strict=True):
            if count:
                self.lost.append(Written(partition, count, count, as_text(total), as_text(total), ()))
        self.tables = [rows.take(ranked.order.filter(ranked.wins))]
        self._bytes = self.tables[0].nbytes


def _repeats(rows: Any, spec: TableSpec) -> bool:
    """Whether at least `REPEATS` of the rows are further versions of a key, by a sample: the same one each time."""
    if not rows.num_rows:  # every row of a file was refused
        return False
    places = np.unique(np.random.default_rng(0).integers(0, rows.num_rows, SAMPLED_ROWS))[: rows.num_rows]

    def repeated(hashes: Any) -> float:
        return float(1 - len(np.unique(hashes)) / len(hashes)) if len(hashes) else 0.0

    keys = rows.select([PARTITION, *spec.stored_key])
    some = _version_hashes(keys.take(pa.array(places)), spec)
    if repeated(some) >= REPEATS:
        return True
    # Of few rows of many, few meet. That they meet as often as this is needed for so many versions, and is not enough.
    counts = np.unique(some, return_counts=True)[1]
    if (counts * (counts - 1)).sum() * rows.num_rows < REPEATS * len(some) ** 2:
        return False
    every = _version_hashes(keys, spec)
    return repeated(every[every < 2.0**64 * SAMPLED_ROWS / rows.num_rows]) >= REPEATS  # all versions of some keys


def _version_hashes(keys: Any, spec: TableSpec) -> Any:
    """Equal where partition and key are, within this table."""
    codes = keys[PARTITION].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.uint64)
    return key_hashes(keys, spec) ^ (codes * np.uint64(0x9E3779B97F4A7C15))


class _Ranked:
    """Rows of one batch, and where the row of greatest rank of every key is (see `rank.latest`), partition by partition.

    ``codes`` has of each row the number of its partition in ``partitions``.
    """

    def __init__(self, spec: TableSpec, rows: Any) -> None:
        # Partition names are long and few; their numbers sort faster.
        encoded = rows[PARTITION].combine_chunks().dictionary_encode()
        self.partitions: list[str] = encoded.dictionary.to_pylist()
        self.codes = encoded.indices.to_numpy()
        numbered = rows.set_column(rows.schema.get_field_index(PARTITION), PARTITION, encoded.indices)
        self.order, self.wins = latest(numbered, spec, (FILE, PLACE), by=[PARTITION])


def _sums(hashes: Any, counts: Any) -> list[int]:
    """The sum of the first so many hashes, of the next, and so on, modulo 2^64."""
    until = np.append(np.uint64(0), np.cumsum(hashes, dtype=np.uint64))[np.append(0, np.cumsum(counts))]
    return [int(total) for total in np.diff(until)]


def grouped(job: AppendJob, tables: Sequence[Any], groups: int) -> Iterator[tuple[int, Any]]:
    """Rows cut into one table for each group of ranges, the order of rows kept; a range is in the same group in every task.

    There are so many groups, to which partitions are spread evenly, and behind them one for each range of those that are cut.
    """
    rows = pa.concat_tables(tables)
    partitions, most, ranges = _ranges(job, rows)
    own = np.cumsum([groups, *(1 << bits for bits in job.bits.values())]).tolist()
    firsts = dict(zip(job.bits, own, strict=False))
    group_of = np.empty((len(partitions), 1 << most), np.int64)
    for code, name in enumerate(partitions):
        if name in firsts:
            group_of[code] = firsts[name] + np.arange(1 << most)
        else:
            group_of[code] = zlib.crc32(name.encode()) % groups
    yield from _slices(rows, group_of.ravel()[ranges])


def _ranges(job: AppendJob, rows: Any) -> tuple[list[str], int, Any]:
    """The partitions of these rows, the most bits that one has, and of each row partition << bits | bucket."""
    encoded = rows[PARTITION].combine_chunks().dictionary_encode()
    partitions, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    bits = np.array([job.bits.get(name, 0) for name in partitions], np.int64)
    most = int(bits.max(initial=0))
    ranges = codes.astype(np.int64) << most
    for some in sorted({*bits.tolist()} - {0}):
        here = bits[codes] == some
        hashes = key_hashes(rows.select(job.spec.stored_key).filter(pa.array(here)), job.spec)
        ranges[here] |= buckets(hashes, some)
    return partitions, most, ranges


def _slices(rows: Any, numbers: Any) -> Iterator[tuple[int, Any]]:
    """A table for each number, of the rows that have it, in their order."""
    if (numbers[1:] < numbers[:-1]).any():
        # numpy sorts small integers by radix.
        order = np.argsort(numbers.astype(np.min_scalar_type(numbers.max())), kind="stable")
        rows, numbers = rows.take(pa.array(order)), numbers[order]
    ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, len(numbers)).tolist()
    for begin, end in itertools.pairwise([0, *ends] if len(numbers) else []):
        yield int(numbers[begin]), rows.slice(begin, end - begin)


def settle_and_write(job: AppendJob, tables: Sequence[Any]) -> Iterator[Written]:
    """A file (more where it grows large) for each partition in ``tables``, or range of one, all in one object (ADR 0008).

    In each there is one row per key, sorted by key; in mode columns and with a history all rows, since none is of no use.
    """
    spec = job.spec
    rows = pa.concat_tables(tables)
    if rows.num_rows == 0:
        return
    ranked = _Ranked(spec, rows)
    places, wins = ranked.order.to_numpy(), true(ranked.wins)
    stays = wins if spec.settles_early else np.ones(len(wins), bool)
    winners = rows.take(ranked.order.filter(pa.array(stays)))
    n = len(ranked.partitions)
    came = np.bincount(ranked.codes, minlength=n)
    codes = ranked.codes[places[stays]]
    stayed = np.bincount(codes, minlength=n)
    hashes = row_hashes(rows, hashed_columns(spec))[places]
    digests = _sums(hashes, came)
    hashes[stays] = 0
    lost = _sums(hashes, came)
    files: dict[str, list[DataFile]] = defaultdict(list)
    order = greatest((), winners, spec) if job.full else None
    alive = ~true(winners[DELETE_FLAG]) if spec.has_deletes else np.ones(winners.num_rows, bool)
    live = np.bincount(codes[alive], minlength=n).tolist()
    keys = _compared_keys(job, winners.select(spec.stored_key).filter(pa.array(alive & wins[stays])))
    partitions, most, ranges = _ranges(job, winners)
    with Pack(job.store, TableObjects.new_appended(job.start)) as pack:
        for number, kept in _slices(winners, ranges):
            partition, bucket = partitions[number >> most], number & ((1 << most) - 1)
            bits = job.bits.get(partition, 0)
            renames = len(spec.renames)
            footer = Footer(spec.table_id, "appended", job.batch_id, job.spec_version, partition, bucket, bits, renames)
            files[partition] += write_into(pack, kept, spec.ranked_schema, footer, spec.stored_key)
    for i, partition in enumerate(ranked.partitions):
        digest, lost_digest = as_text(digests[i]), as_text(lost[i])
        lost_rows = int(came[i] - stayed[i])
        written = tuple(files[partition])
        yield Written(partition, int(came[i]), lost_rows, digest, lost_digest, written, order, live[i], keys)
        keys = b""


def _compared_keys(job: AppendJob, rows: Any) -> bytes:
    if job.spec.key_scope == "table" or set(job.spec.key) & set(job.spec.partition_by):
        return b""
    hashes = key_hashes(rows, job.spec)
    return bytes(hashes[hashes <= 2.0**64 * job.compared])


def in_several_partitions(job: AppendJob, reports: Iterable[Report]) -> int:
    """How many keys came for more than one partition, other than by deletes; of a large batch about how many."""
    # A key is written once for each of its partitions.
    keys = [np.frombuffer(report.keys, np.uint64) for report in reports if isinstance(report, Written)]
    _, times = np.unique(np.concatenate([np.empty(0, np.uint64), *keys]), return_counts=True)
    return round(np.count_nonzero(times > 1) / job.compared)
