"""Phase one's row work, the same for every host: landing files in, appended files and reports out. Commits nothing.

    read (landing) -> quarantine what is refused -> (settle early) -> cut by range -> | shuffle | -> settle by G1, sort -> write

A range is a partition, or of a large one the rows whose keys are in one bucket (`AppendJob.bits`). A host runs `split` on
groups of landing files, `Held` and `grouped` on what comes of it, and `settle_and_write` on all rows of a range, or of several.
What these return are small reports; rows never reach the caller.
"""

import hashlib
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.files import Survey, preview
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput, UnplannedColumnError, UnreadableFileError
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import DataFileWriter, Footer, Pack, write_into
from lakeupsert.rows.digest import Digest, as_text, hashed_columns, row_hashes
from lakeupsert.rows.floor import PARTITION, greatest, is_among
from lakeupsert.rows.rank import latest
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, QuarantineFile, Touched
from lakeupsert.table.manifest import DataFile, added
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

RANGE_BYTES = 64 << 20
"""Landing bytes of a range of keys, at most and about: what one task settles, and one unit merges."""
LOOKED_AT = 16
"""Places of a batch at which is looked to find its large partitions, at the least; and one for each `RANGE_BYTES`."""
LINES_BYTES = 1 << 16
"""What is read of a text file for that."""
AT_ONCE = 16
REPEATS = 1 / 3
"""Share of rows that lose to another row of their task, from which on settling them before the shuffle pays."""
SAMPLED_ROWS = 1 << 13


@dataclass(frozen=True)
class AppendJob:
    """Everything that a task needs, wherever it runs; picklable."""

    landing: ObjectStore
    store: ObjectStore
    inputs: tuple[LandingInput, ...]
    reading: Reading
    rules: RowRules
    batch_id: str
    spec_version: int
    start: int
    """How many entries the ledger has; it is in the new files' names."""
    only: frozenset[str] | None = None
    """A batch that is read again for these partitions alone: their rows are written, and nothing to quarantine."""
    left_out: Any = None
    """Of a batch that is read again: keys that merges refused (`floor.refused_by_merges`), whose rows count as superseded now."""
    full: bool = False
    """It is a full extract: what is written tells its greatest order."""
    bits: Mapping[str, int] = field(default_factory=dict)
    """Partitions that are cut: of each, into 2^bits ranges of the hashes of its keys (`rows.buckets`)."""

    compared: float = 1.0
    """The share of the keys, by their hashes, that are looked for in several partitions."""

    @property
    def spec(self) -> TableSpec:
        return self.rules.spec


class FileRead(msgspec.Struct, frozen=True, tag=True):
    """A landing file, or its part, was read to the end; the part that begins the file knows the content's hash.

    ``operations``: whether its rows have the column that the delete rule names.
    """

    path: str
    rows: int
    accepted: int
    """How many of the rows the table takes."""
    sha256: str | None
    operations: bool
    renamed: dict[str, str] = {}
    """Columns that it brings under the name that they had before a rename alone, or under an alias of that: what the file calls
    them, and the name of now."""


class FileFailed(msgspec.Struct, frozen=True, tag=True):
    """A landing file can't be taken: ``changed`` while it was read (next batch), or unreadable (quarantine).

    ``unplanned``: it has a column that the table has not, and may be taken after a survey.
    """

    path: str
    changed: bool
    reason: str
    unplanned: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A quarantine file, the reasons of its rows, and of each reason a row that tells it to people."""

    file: QuarantineFile
    reasons: dict[str, int]
    examples: dict[str, str]


class Written(msgspec.Struct, frozen=True, tag=True):
    """Rows of one partition went through: ``rows`` in, ``superseded`` lost among themselves, the rest is in ``files``.

    ``digest`` is of all, ``superseded_digest`` of those that lost.
    """

    partition: str
    rows: int
    superseded: int
    digest: str
    superseded_digest: str
    files: tuple[DataFile, ...]
    order: str | None = None
    """Of a full extract, the greatest order of these rows (see `floor`)."""
    live: int = 0
    """How many of the rows in ``files`` are no deletes."""
    keys: bytes = b""
    """Hashes (uint64) of those keys that are compared, of all partitions that were written with this one; see
    `in_several_partitions`."""


Report = FileRead | FileFailed | Refused | Written


def added_up(reports: Iterable[Written]) -> Iterator[Written]:
    """One report for each partition, of them all."""
    for partition, t in touched_by(reports).items():
        yield Written(partition, t.rows, t.superseded, t.digest or "", t.superseded_digest or "", t.files)


def touched_by(reports: Iterable[Report]) -> dict[str, Touched]:
    """What was written, for each partition."""
    touched: dict[str, Touched] = {}
    for report in reports:
        if isinstance(report, Written):
            before = touched.get(report.partition, NOTHING)
            touched[report.partition] = Touched(
                files=(*before.files, *report.files),
                rows=before.rows + report.rows,
                superseded=before.superseded + report.superseded,
                bytes=before.bytes + sum(f.bytes for f in report.files),
                digest=added((before.digest, report.digest)),
                superseded_digest=added((before.superseded_digest, report.superseded_digest)),
            )
    return dict(sorted(touched.items()))


def in_several_partitions(job: AppendJob, reports: Iterable[Report]) -> int:
    """How many keys came for more than one partition, other than by deletes; of a large batch about how many."""
    # A key is written once for each of its partitions.
    keys = [np.frombuffer(report.keys, np.uint64) for report in reports if isinstance(report, Written)]
    _, times = np.unique(np.concatenate([np.empty(0, np.uint64), *keys]), return_counts=True)
    return round(np.count_nonzero(times > 1) / job.compared)


class Host(Protocol):
    """Where the row work runs."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        reading: Reading,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        """`landing.survey` of each file."""

    def run(self, job: AppendJob) -> list[Report]:
        """The row work of the whole batch, once."""


def with_ranges(job: AppendJob) -> AppendJob:
    """The job with `bits` for the partitions that get more than `RANGE_BYTES`, the same for every task, host and run.

    How much a partition gets is estimated from its column in some row groups, or some lines, spread evenly over the batch.
    One that is small, and so may be missed, is in one piece.
    """
    if sum(given.size for given in job.inputs) <= RANGE_BYTES:
        return job

    def look(place: tuple[LandingInput, float]) -> dict[str, float]:
        given, stands_for = place
        try:
            rows = preview(job.landing, given, job.reading, job.spec, LINES_BYTES).partitions
        except NotFoundError:  # whoever reads its rows tells
            return {}
        return {name: stands_for * count / sum(rows.values()) for name, count in rows.items()}

    sizes: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(look, _places(job.inputs)):
            sizes.update(found)
    ranges = {name: ceil(size / RANGE_BYTES) for name, size in sizes.items() if size > RANGE_BYTES}
    return replace(job, bits={name: (count - 1).bit_length() for name, count in sorted(ranges.items())})


def _places(inputs: Sequence[LandingInput]) -> list[tuple[LandingInput, float]]:
    """Row groups, and text files, evenly by bytes; and the bytes of the batch that each stands for."""
    landed = sum(given.size for given in inputs)
    count = max(LOOKED_AT, landed // RANGE_BYTES)
    found: Counter[LandingInput] = Counter()
    begin = 0
    for given in inputs:
        for number in range(ceil(begin * count / landed), ceil((begin + given.size) * count / landed)):
            part = given
            if given.row_groups is not None:
                first, end = given.row_groups
                group = min(end - 1, first + int((number * landed / count - begin) / given.size * (end - first)))
                part = replace(given, row_groups=(group, group + 1))
            found[part] += 1
        begin += given.size
    return [(part, times * landed / count) for part, times in found.items()]


def split(job: AppendJob, inputs: Iterable[LandingInput]) -> Iterator[Report | Any]:
    """Read landing files: reports, and accepted rows as tables of the ranked schema and `PARTITION`."""
    with QuarantineWriter(job) as quarantine:
        for given in inputs:
            rows_read = rows_accepted = 0
            names: dict[str, str] = {}
            begins = given.row_groups is None or given.row_groups[0] == 0
            sha256 = hashlib.sha256() if begins else None
            try:
                for rows in read_rows(job.landing, given, job.reading, job.rules, sha256):
                    rows_read += rows.accepted.num_rows + rows.quarantined.num_rows
                    accepted = rows.accepted
                    rows_accepted += accepted.num_rows
                    names |= rows.names
                    if job.only is None:
                        quarantine.write(rows.quarantined)
                    else:
                        accepted = accepted.filter(
                            pc.is_in(accepted[PARTITION], pa.array(sorted(job.only), pa.string()))
                        )
                    accepted, reports = without_refused(job, accepted)
                    yield from reports
                    place = pa.array(np.full(accepted.num_rows, given.place, np.int32))
                    yield accepted.append_column(FILE, place).select([*job.spec.ranked_schema.names, PARTITION])
                content = sha256.hexdigest() if sha256 else None
                operations = job.spec.delete is not None and job.spec.delete.column in names
                renamed = job.spec.under_old_names(names)
                yield FileRead(given.path, rows_read, rows_accepted, content, operations, renamed)
            except UnreadableFileError as e:
                yield FileFailed(
                    given.path, changed=False, reason=e.reason, unplanned=isinstance(e, UnplannedColumnError)
                )
            except ChangedFileError:
                yield FileFailed(given.path, changed=True, reason="it changed or vanished while it was read")
    yield from quarantine.report()


def without_refused(job: AppendJob, rows: Any) -> tuple[Any, list[Written]]:
    """``rows`` but those that are left out, and what is told of these."""
    if job.left_out is None:
        return rows, []
    is_out = is_among(rows, job.left_out, job.spec)
    out, reports = rows.filter(pa.array(is_out)), []
    for partition in pc.unique(out[PARTITION]).to_pylist():
        digest = Digest(job.spec)
        digest.add(out.filter(pc.equal(out[PARTITION], partition)))
        reports.append(Written(partition, digest.rows, digest.rows, str(digest), str(digest), ()))
    return rows.filter(pa.array(~is_out)), reports


def quarantine_files(job: AppendJob, unreadable: dict[str, str]) -> Iterator[Report]:
    """One quarantine row for each file that can't be read at all: path and reason."""
    with QuarantineWriter(job) as quarantine:
        n = len(unreadable)
        columns = [["unreadable_file"] * n, list(unreadable.values()), list(unreadable), *([[None] * n] * 3)]
        quarantine.write(pa.table(columns, schema=QUARANTINE_SCHEMA.remove(6)))
    yield from quarantine.report()


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


class QuarantineWriter:
    """Collects refused rows of one task in one file, which appears when the task is done with its landing files."""

    def __init__(self, job: AppendJob) -> None:
        footer = Footer(job.spec.table_id, "quarantine", job.batch_id, job.spec_version)
        self._out = DataFileWriter(
            job.store, partial(TableObjects.new_quarantine, job.start), QUARANTINE_SCHEMA, footer, ()
        )
        self._batch_id = job.batch_id
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def __enter__(self) -> "QuarantineWriter":
        self._out.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.__exit__(*error)

    def write(self, rows: Any) -> None:
        if rows.num_rows:
            counts = pc.value_counts(rows["reason_code"].combine_chunks()).to_pylist()
            self._reasons.update({c["values"]: c["counts"] for c in counts})
            for code in {c["values"] for c in counts} - self._examples.keys():
                [row] = rows.slice(pc.index(rows["reason_code"], code).as_py(), 1).to_pylist()
                name = row["file"] if row["file"].isprintable() else repr(row["file"])
                place = "" if row["position"] is None else f", place {row['position']}"
                self._examples[code] = f"{name}{place}: {row['reason']}"
            if "batch" not in rows.schema.names:  # a row that is tried again keeps that of the batch that read it
                rows = rows.append_column("batch", pa.array([self._batch_id] * rows.num_rows))
            self._out.write(rows.cast(QUARANTINE_SCHEMA))

    def report(self) -> Iterator[Refused]:
        """One report a file; what is told of the reasons of all of them stands in the first."""
        reasons, examples = dict(self._reasons), self._examples
        for file in self._out.files:
            yield Refused(QuarantineFile(name=file.name, rows=file.rows), reasons, examples)
            reasons, examples = {}, {}
