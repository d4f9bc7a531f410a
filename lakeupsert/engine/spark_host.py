"""Spark, as the host of phase one and as an engine of phase two. Works under Spark Connect: no JVM object, no RDD.

Spark distributes tasks and shuffles; rows cross the shuffle as Arrow IPC blobs, which keep every type and which the JVM
never converts. Each call runs one action, once: tasks write files under unique names, so a second run of an action would
write them again; retried and speculative tasks leave files that nobody names.
"""

import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.engine.batch import AppendJob, split, with_ranges
from lakeupsert.engine.reports import Refused, Report, Written, added_up
from lakeupsert.engine.settle import Held, grouped, settle_and_write
from lakeupsert.engine.spark_session import forget_zip_importers, ids, parallelism, session, spark_may_fail
from lakeupsert.landing.accept import TYPED, LandingInput, Survey, format_of, survey
from lakeupsert.rows.datafiles import from_bytes, to_bytes
from lakeupsert.storage import ObjectStore

TASK_BYTES = 64 << 20
"""Landing bytes that a task reads, at most (one row group or text file is not cut)."""
HELD_BYTES = 64 << 20
"""Arrow bytes that a task collects before it cuts them by partition, or settles and writes them."""
GROUP_BYTES = 16 << 20
"""Landing bytes of the small partitions that are settled and written at once; decoded about `HELD_BYTES`."""
BLOB_BYTES = 1 << 20
BLOBS_PER_BATCH = 32
"""How many rows (blobs) Spark hands to Python at once; its default of 10,000 would be gigabytes here."""
SURVEYED_HERE = 64 << 20
"""Bytes of text files up to which a survey is not worth a Spark job."""


class SparkHost:
    """See `lakeupsert.engine.hosts.Host`."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        reading: Reading,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        if sum(i.size for i in inputs if format_of(i.path, reading.format) not in TYPED) <= SURVEYED_HERE:
            return [survey(landing, given, reading, known, text_columns) for given in inputs]

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            for place in ids(batches):
                found = survey(landing, inputs[place], reading, known, text_columns)
                yield pa.record_batch({"place": [place], "found": [pickle.dumps(found)]})

        with spark_may_fail(), _small_batches() as spark:
            rows = spark.range(0, len(inputs), 1, len(inputs)).mapInArrow(run, "place bigint, found binary").collect()
        return [pickle.loads(row.found) for row in sorted(rows, key=lambda row: row.place)]

    def run(self, job: AppendJob) -> list[Report]:
        job = with_ranges(job)
        groups = _task_groups(job.inputs)
        landed = sum(given.size for given in job.inputs)

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for number in ids(batches):
                yield from _sent(job, split(job, groups[number]), small, numbers)

        def write(batches: Iterator[Any]) -> Iterator[Any]:
            yield pa.record_batch({"reports": [pickle.dumps(list(_settled(job, batches)))]})

        with spark_may_fail(), _small_batches() as spark:
            parts = max(parallelism(spark), landed // TASK_BYTES)
            small = max(parts, landed // GROUP_BYTES)
            numbers = spread(small + sum(1 << bits for bits in job.bits.values()), parts)
            rows = (
                spark.range(0, len(groups), 1, len(groups))
                .mapInArrow(read, "number int, rows binary, reports binary")
                .repartition(parts, "number")
                .sortWithinPartitions("number")
                .mapInArrow(write, "reports binary")
                .collect()
            )
        reports: list[Report] = [report for row in rows for report in pickle.loads(row.reports)]
        names = {f.name for r in reports if isinstance(r, Written) for f in r.files}
        names |= {r.file.name for r in reports if isinstance(r, Refused)}
        job.store.requests.add({"put": len(names)})  # the tasks' stores counted for themselves
        return reports


def _task_groups(inputs: Sequence[LandingInput]) -> list[list[LandingInput]]:
    """Landing files, or row groups of large Parquet files, in groups of up to `TASK_BYTES`."""
    groups: list[list[LandingInput]] = [[]]
    size = 0
    for given in inputs:
        for part, part_bytes in _parts(given):
            if size + part_bytes > TASK_BYTES and groups[-1]:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part_bytes
    return groups


def _parts(given: LandingInput) -> Iterator[tuple[LandingInput, int]]:
    if given.row_groups is None or given.size <= TASK_BYTES:
        yield given, given.size
        return
    first, end = given.row_groups
    each = max(1, (end - first) * TASK_BYTES // given.size)
    for low in range(first, end, each):
        high = min(end, low + each)
        part = LandingInput(given.path, given.size, given.etag, given.place, (low, high))
        yield part, given.size * (high - low) // (end - first)


def spread(count: int, parts: int) -> list[int]:
    """So many numbers that Spark's `repartition` by an integer spreads evenly, the n-th to partition n modulo ``parts``.

    It takes the Murmur3 hash of the number; others would do as well, but not as evenly: of two, both may meet.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    each = -(-count // parts)
    for number in itertools.count():
        mixed = number * 0xCC9E2D51 & 0xFFFFFFFF
        mixed = (mixed << 15 | mixed >> 17) * 0x1B873593 & 0xFFFFFFFF
        mixed ^= 42
        mixed = ((mixed << 13 | mixed >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
        mixed ^= 4
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
        part = found[(mixed - (mixed >> 31 << 32)) % parts]
        if len(part) < each:
            part.append(number)
            if sum(map(len, found)) == each * parts:
                break
    return [found[n % parts][n // parts] for n in range(count)]


def _sent(job: AppendJob, found: Iterator[Any], small: int, numbers: Sequence[int]) -> Iterator[Any]:
    """What the map side sends: a row for each piece of a group, by its number, and one for all reports."""
    held = Held(job, HELD_BYTES)
    reports: list[Report] = []
    lost: list[Written] = []

    def pieces() -> Iterator[Any]:
        for group, rows in grouped(job, held.tables, small):
            step = max(1, rows.num_rows * BLOB_BYTES // max(rows.nbytes, 1))
            for at in range(0, rows.num_rows, step):
                yield _wire(numbers[group], to_bytes(rows.slice(at, step)), None)
        lost.extend(held.lost)

    for item in found:
        if not isinstance(item, pa.Table):
            reports.append(item)
        elif held.add(item):
            yield from pieces()
            held = Held(job, HELD_BYTES)
    if held.tables:
        held.settle()
        yield from pieces()
    yield _wire(numbers[0], None, pickle.dumps([*reports, *added_up(lost)]))


def _wire(number: int, rows: bytes | None, reports: bytes | None) -> Any:
    columns = [pa.array([number], pa.int32()), pa.array([rows], pa.binary()), pa.array([reports], pa.binary())]
    return pa.record_batch(columns, ["number", "rows", "reports"])


def _settled(job: AppendJob, batches: Iterator[Any]) -> Iterator[Report]:
    """What the reduce side does with its rows, which come group by group."""
    held: list[Any] = []
    size = 0
    group: int | None = None
    lost: list[Written] = []
    for batch in batches:
        for number, rows, reports in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if reports is not None:
                for report in pickle.loads(reports):
                    if isinstance(report, Written):
                        lost.append(report)
                    else:
                        yield report
                continue
            if number != group and size >= HELD_BYTES:
                yield from settle_and_write(job, held)
                held, size = [], 0
            group = number
            table = from_bytes(rows)
            held.append(table)
            size += table.nbytes
    if held:
        yield from settle_and_write(job, held)
    yield from added_up(lost)
    forget_zip_importers()


@contextmanager
def _small_batches() -> Iterator[Any]:
    """A session that hands few rows at a time to Python, since ours are blobs."""
    spark = session()
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, str(BLOBS_PER_BATCH))
    try:
        yield spark
    finally:
        spark.conf.set(name, before)
