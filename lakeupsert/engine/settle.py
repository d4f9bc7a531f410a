"""Rows of a batch in memory: cut by range, settled by rank, sorted, and written as appended files. See `batch`."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lakeupsert.engine.batch import AppendJob, with_partition
from lakeupsert.engine.misplaced import count_misplaced
from lakeupsert.engine.reports import Report, Written
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Hashes, Indices, Rows
from lakeupsert.rows.buckets import buckets, cut_by_number, cut_into_pieces, key_hashes
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import EXPANSION
from lakeupsert.rows.digest import digest_text, hashed_columns, row_hashes
from lakeupsert.rows.floor import PARTITION, greatest_floor
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.table.manifest import DataFile, Part
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

EARLY_SHARE = 1 / 3
"""Rows are settled before the shuffle if at least this share of them loses to another row of the same task."""
SAMPLED_ROWS = 1 << 13


class RowBuffer:
    """Rows of a task that are not passed on yet. If many of them are versions of few keys, losers are dropped and more rows fit.

    ``tables`` has the rows; ``lost`` reports the losers.
    """

    def __init__(self, job: AppendJob, limit: int) -> None:
        self.tables: list[Rows] = []
        self.lost: list[Written] = []
        self._job = job
        self._limit = limit
        self._bytes = 0

    def add(self, rows: Rows) -> bool:
        """Returns True if the buffer is full: pass ``tables`` on, and continue with a new buffer."""
        self.tables.append(rows)
        self._bytes += rows.nbytes
        if self._bytes <= self._limit:
            return False
        self.settle()
        return self._bytes > self._limit // 2

    def settle(self) -> None:
        """Drop the rows that lose to another one in the buffer, if there are many."""
        rows = pa.concat_tables(self.tables)
        if not self._job.spec.settles_early or not _has_many_versions(rows, self._job.spec):
            return
        ranked = _Ranked(self._job.spec, rows)
        losers = ranked.order.filter(pa.array(~ranked.stays))
        columns = hashed_columns(self._job.spec)
        hashes = row_hashes(rows.select(columns).take(losers), columns)
        counts = np.bincount(ranked.codes[losers.to_numpy()], minlength=len(ranked.partitions))
        misplaced = ranked.misplaced
        for partition, count, total in zip(ranked.partitions, counts.tolist(), _sums(hashes, counts), strict=True):
            if count:
                digest = digest_text(total)
                self.lost.append(Written(partition, count, count, digest, digest, (), misplaced=misplaced))
                misplaced = 0
        self.tables = [rows.take(ranked.order.filter(pa.array(ranked.stays)))]
        self._bytes = self.tables[0].nbytes


def _has_many_versions(rows: Rows, spec: TableSpec) -> bool:
    """Whether at least `EARLY_SHARE` of the rows are further versions of a key. Estimated from a sample, the same in each run."""
    if not rows.num_rows:  # every row of a file was refused
        return False
    places = np.unique(np.random.default_rng(0).integers(0, rows.num_rows, SAMPLED_ROWS))[: rows.num_rows]

    def repeated(hashes: Hashes) -> float:
        return float(1 - len(np.unique(hashes)) / len(hashes)) if len(hashes) else 0.0

    keys = rows.select([PARTITION, *spec.stored_key])
    sample = _hashes_with_partition(keys.take(pa.array(places)), spec)
    if repeated(sample) >= EARLY_SHARE:
        return True
    # A small sample of many rows has few pairs of versions. Fewer than this rule out `EARLY_SHARE`; enough do not prove it,
    # so all versions of some keys are counted.
    counts = np.unique(sample, return_counts=True)[1]
    if (counts * (counts - 1)).sum() * rows.num_rows < EARLY_SHARE * len(sample) ** 2:
        return False
    every = _hashes_with_partition(keys, spec)
    return repeated(every[every < 2.0**64 * SAMPLED_ROWS / rows.num_rows]) >= EARLY_SHARE


def _hashes_with_partition(keys: Rows, spec: TableSpec) -> Hashes:
    """Hashes of partition and key, comparable within this table only."""
    codes = keys[PARTITION].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.uint64)
    hashes: Hashes = key_hashes(keys, spec) ^ (codes * np.uint64(0x9E3779B97F4A7C15))
    return hashes


class _Ranked:
    """Rows of one batch in the order of `rank.sort_by_rank`, partition by partition.

    Attributes:
        partitions: their names.
        codes: for each row the number of its partition in ``partitions``.
        order, wins: as of `rank.sort_by_rank`.
        stays: in that order, the rows that no other one makes superfluous. A row without a partition stays, even if it loses:
            if the key index refuses the one that wins, it refuses all of its key.
        misplaced: see `count_misplaced`.
    """

    def __init__(self, spec: TableSpec, rows: Rows) -> None:
        # Partition names are long and few; their numbers sort faster. Numbers are in the order of the names, as the messages are:
        # who merges partition after partition reads on in the pack.
        encoded = rows[PARTITION].combine_chunks().dictionary_encode()
        by_name = pc.sort_indices(encoded.dictionary)
        names = encoded.dictionary.take(by_name)
        self.partitions: list[str] = names.to_pylist()
        self.codes: NDArray[np.int64] = np.argsort(by_name.to_numpy())[encoded.indices.to_numpy()]
        numbered = rows.set_column(rows.schema.get_field_index(PARTITION), PARTITION, pa.array(self.codes))
        self.order, self.wins = sort_by_rank(numbered, spec, (FILE, PLACE), by=[PARTITION])
        alone = self.codes[self.order.to_numpy()] == names.index(UNPLACED).as_py()
        self.stays = as_mask(self.wins) | alone if spec.settles_early else np.ones(rows.num_rows, bool)
        self.misplaced = count_misplaced(rows, spec, self.order, self.wins)


def _sums(hashes: Hashes, counts: Indices) -> list[int]:
    """Sums modulo 2^64 of consecutive runs of hashes; ``counts`` has the length of each run."""
    until = np.append(np.uint64(0), np.cumsum(hashes, dtype=np.uint64))[np.append(0, np.cumsum(counts))]
    return [int(total) for total in np.diff(until)]


@dataclass(frozen=True)
class _RangeNumbers:
    """The range of each of n rows, as a number.

    Attributes:
        partitions: their names; places in this list are partition codes.
        bits: the most bits that one of them is cut by.
        numbers: for each row (partition code << bits) | bucket.
    """

    partitions: list[str]
    bits: int
    numbers: Indices


def group_by_range(job: AppendJob, tables: Sequence[Rows], groups: int) -> Iterator[tuple[int, Rows]]:
    """Cut rows into one table for each group of ranges, in their order. Every task assigns a range to the same group.

    Whole partitions are spread evenly over the first ``groups`` groups. Each range of a partition that is cut has a group of
    its own, numbered after those.
    """
    rows = pa.concat_tables(tables)
    ranges = _range_numbers(job, rows)
    own = np.cumsum([groups, *(1 << bits for bits in job.bits.values())]).tolist()
    firsts = dict(zip(job.bits, own, strict=False))
    group_of = np.empty((len(ranges.partitions), 1 << ranges.bits), np.int64)
    for code, name in enumerate(ranges.partitions):
        if name in firsts:
            group_of[code] = firsts[name] + np.arange(1 << ranges.bits)
        else:
            group_of[code] = zlib.crc32(name.encode()) % groups
    yield from cut_by_number(rows, group_of.ravel()[ranges.numbers])


def _range_numbers(job: AppendJob, rows: Rows) -> _RangeNumbers:
    encoded = rows[PARTITION].combine_chunks().dictionary_encode()
    partitions, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    bits = np.array([job.bits.get(name, 0) for name in partitions], np.int64)
    most = int(bits.max(initial=0))
    numbers = codes.astype(np.int64) << most
    for some in sorted({*bits.tolist()} - {0}):
        here = bits[codes] == some
        hashes = key_hashes(rows.select(job.spec.stored_key).filter(pa.array(here)), job.spec)
        numbers[here] |= buckets(hashes, some)
    return _RangeNumbers(partitions, most, numbers)


def settle_and_write(job: AppendJob, tables: Sequence[Rows]) -> list[Written]:
    """Settle the rows and write a file for each partition, or range of one, all into one object (ADR 0008).

    Each file is sorted by key, with one row per key; a large one becomes several. In mode columns and in a table with a
    history the files keep every row, since a row that loses is still needed. So do those of rows without a partition.
    """
    spec = job.spec
    rows = pa.concat_tables(tables)
    if rows.num_rows == 0:
        return []
    ranked = _Ranked(spec, rows)
    places, wins, stays = ranked.order.to_numpy(), as_mask(ranked.wins), ranked.stays
    kept = rows.take(ranked.order.filter(pa.array(stays)))
    n = len(ranked.partitions)
    count = np.bincount(ranked.codes, minlength=n)
    codes = ranked.codes[places[stays]]
    lost_count = count - np.bincount(codes, minlength=n)
    hashes = row_hashes(rows, hashed_columns(spec))[places]
    digests = _sums(hashes, count)
    hashes[stays] = 0
    lost_digests = _sums(hashes, count)
    order = greatest_floor((), kept, spec) if job.full else None
    alive = ~as_mask(kept[DELETE_FLAG]) if spec.has_deletes else np.ones(kept.num_rows, bool)
    live = np.bincount(codes[alive], minlength=n)
    keys = _compared_keys(job, kept.select(spec.stored_key).filter(pa.array(alive & wins[stays])))
    files = _write(job, kept)
    return [
        Written(
            partition,
            int(count[i]),
            int(lost_count[i]),
            digest_text(digests[i]),
            digest_text(lost_digests[i]),
            tuple(files[partition]),
            order,
            int(live[i]),
            keys if i == 0 else b"",
            ranked.misplaced if i == 0 else 0,
        )
        for i, partition in enumerate(ranked.partitions)
    ]


def _write(job: AppendJob, rows: Rows) -> dict[str, list[DataFile]]:
    """Write rows, sorted by partition and key, as one object. Returns the files in it by partition."""
    files: defaultdict[str, list[DataFile]] = defaultdict(list)
    ranges = _range_numbers(job, rows)
    # If all rows fit into one bucket, each range does, and counting the bytes of each would take long.
    in_pieces = job.bits or job.stored_bits or rows.nbytes > EXPANSION * (job.bucket_bytes or rows.nbytes)
    with job.new_pack() as pack:
        for number, of_range in cut_by_number(rows, ranges.numbers):
            partition, bucket = ranges.partitions[number >> ranges.bits], number & ((1 << ranges.bits) - 1)
            of = Part(bucket, job.bits.get(partition, 0))
            bits = job.piece_bits(partition, of_range) if in_pieces else 0
            pieces = cut_into_pieces(of_range, of, bits, job.spec) if bits else [of_range]
            files[partition].append(pack.write_file([with_partition(p, job.spec, partition) for p in pieces], of))
    return files


def _compared_keys(job: AppendJob, rows: Rows) -> bytes:
    spec = job.spec
    if spec.key_scope == "table" or spec.key_decides_partition or set(spec.key) & set(spec.partition_by):
        return b""
    hashes = key_hashes(rows, spec)
    return bytes(hashes[hashes <= 2.0**64 * job.compared])


def count_keys_in_several_partitions(job: AppendJob, reports: Iterable[Report]) -> int:
    """How many keys the batch has in more than one partition, deletes not counted; in a large batch an estimate."""
    # Each partition writes a key once.
    keys = [np.frombuffer(report.keys, np.uint64) for report in reports if isinstance(report, Written)]
    _, times = np.unique(np.concatenate([np.empty(0, np.uint64), *keys]), return_counts=True)
    return round(np.count_nonzero(times > 1) / job.compared)
