"""Row work in Spark tasks: `--host spark`. See `hosts.Host`.

Spark distributes tasks and shuffles. Rows cross the shuffle as Arrow IPC blobs, which keep every type and which the JVM does
not convert. Each job runs one action, once: tasks write files under unique names, so a second run would write them again.
Retried and speculative tasks leave files that no ledger entry names.
"""

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark.sql import SparkSession

from lakeupsert.engine.attempts import Found, Item
from lakeupsert.engine.batch import AppendJob, choose_ranges, read_landing
from lakeupsert.engine.reports import Report, Written, total_by_partition, written_names
from lakeupsert.engine.settle import RowBuffer, group_by_range, settle_and_write
from lakeupsert.engine.spark_session import (
    collect,
    explain_spark_failures,
    forget_zip_importers,
    ids,
    is_local,
    memory_beside_jvm,
    parallelism,
    session,
    task_memory,
    tasks_per_executor,
)
from lakeupsert.engine.spark_tasks import attempt_in_task, require_fit, ship
from lakeupsert.errors import TaskDiedError
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.datafiles import from_bytes, to_bytes

TASK_BYTES = 64 << 20
"""Landing bytes that a task reads, at most. A single row group or text file is not cut, and may be larger."""
HELD_BYTES = 64 << 20
"""Arrow bytes that a task collects before it cuts them by partition, or settles and writes them."""
GROUP_BYTES = 16 << 20
"""Landing bytes of small partitions that are settled and written together; about `HELD_BYTES` when decoded."""
BLOB_BYTES = 1 << 20
BLOBS_PER_BATCH = 32
"""Rows (blobs) that Spark passes to Python at a time. Its default of 10,000 would be gigabytes here."""

TASKS_PER_CORE = 4
"""So many tasks a core share the items of `SparkHost.map`. More: each task costs 50 ms. Fewer: cores wait for the longest."""
PYTHON_BYTES = 150 << 20
"""Memory of a task's Python process before it merges: Python, Arrow, boto3."""
LEAST_TASK = 4 << 20
"""Items of fewer bytes share a task."""


class SparkHost:
    """See `lakeupsert.engine.hosts.Host`."""

    in_process = False

    def map(
        self, function: Callable[[Item], Found], items: Sequence[Item], sizes: Sequence[float]
    ) -> list[Found | Exception]:
        with explain_spark_failures(), small_batches() as spark:
            packs = pack(sizes, TASKS_PER_CORE * parallelism(spark))
            found = _run_packs(spark, function, items, packs)
            shared = itertools.chain.from_iterable(places for places in packs if len(places) > 1)
            again = [[place] for place in shared if isinstance(found[place], TaskDiedError)]
            if again:  # one of a pack may have taken the others with it
                found |= _run_packs(spark, function, items, again)
        return require_fit([found[place] for place in range(len(items))])

    @staticmethod
    def memory_of_a_task(of_machine: int) -> int:
        """Bytes for the Python process of one task: of what an executor has beside its JVM, or of this machine."""
        with explain_spark_failures():
            spark = session()
            if is_local(spark):
                return of_machine // parallelism(spark) - PYTHON_BYTES
            return memory_beside_jvm(spark) // tasks_per_executor(spark) - PYTHON_BYTES

    def run(self, job: AppendJob, progress: Callable[[str], None] = lambda text: None) -> list[Report]:
        job = choose_ranges(job)
        tasks = _tasks(job.inputs)
        landed = sum(file.size for file in job.inputs)

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in ids(batches):
                yield from _map_side(job, tasks[number], small, numbers)

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"reports": [pickle.dumps(_reduce_side(job, batches))]})

        with explain_spark_failures(), small_batches() as spark:
            parts = max(parallelism(spark), landed // TASK_BYTES)
            small = max(parts, landed // GROUP_BYTES)
            numbers = spread(small + sum(1 << bits for bits in job.bits.values()), parts)
            rows = collect(
                spark.range(0, len(tasks), 1, len(tasks))
                .mapInArrow(ship(read), "number int, rows binary, reports binary")
                .repartition(parts, "number")
                .sortWithinPartitions("number")
                .mapInArrow(ship(write), "reports binary")
            )
        reports: list[Report] = [report for row in rows for report in pickle.loads(row.reports)]
        job.store.requests.add({"put": len(written_names(reports))})  # the tasks' stores counted for themselves
        return reports


def _run_packs(
    spark: SparkSession, function: Callable[[Item], Found], items: Sequence[Item], packs: Sequence[Sequence[int]]
) -> dict[int, Found | Exception]:
    """What came of each item that a pack names, by its place. Each pack is a task."""
    memory = task_memory(spark)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in ids(batches):
            for place in packs[number]:
                found = pickle.dumps(attempt_in_task(function, items[place], memory))
                yield pa.record_batch({"place": [place], "found": [found]})

    tasks = spark.range(0, len(packs), 1, len(packs))
    rows = collect(tasks.mapInArrow(ship(run), "place bigint, found binary"))
    return {row.place: pickle.loads(row.found) for row in rows}


def pack(sizes: Sequence[float], tasks: int) -> list[list[int]]:
    """The places of some items in about so many tasks: the longest first, small ones together."""
    each = max(LEAST_TASK, sum(sizes) / tasks)
    packs: list[list[int]] = []
    left = 0.0
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if not packs or sizes[place] > left:
            packs.append([])
            left = each
        packs[-1].append(place)
        left -= sizes[place]
    return packs


def _tasks(inputs: Sequence[LandingInput]) -> list[list[LandingInput]]:
    """Landing files, or row groups of large Parquet files, in groups of up to `TASK_BYTES`."""
    groups: list[list[LandingInput]] = [[]]
    size = 0
    for file in inputs:
        for part, part_bytes in _parts(file):
            if size + part_bytes > TASK_BYTES and groups[-1]:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part_bytes
    return groups


def _parts(file: LandingInput) -> Iterator[tuple[LandingInput, int]]:
    """The file, or ranges of its row groups, each with its bytes."""
    if file.row_groups is None or file.size <= TASK_BYTES:
        yield file, file.size
        return
    first, end = file.row_groups
    step = max(1, (end - first) * TASK_BYTES // file.size)
    for low in range(first, end, step):
        high = min(end, low + step)
        part = LandingInput(file.path, file.size, file.etag, file.place, (low, high))
        yield part, file.size * (high - low) // (end - first)


def spread(count: int, parts: int) -> list[int]:
    """``count`` numbers that Spark's `repartition` by an integer spreads evenly: the n-th goes to partition n modulo ``parts``.

    Spark partitions by the Murmur3 hash of the number, so 0, 1, 2, … would not be spread evenly: two may share a partition.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    each = -(-count // parts)
    numbers, left = itertools.count(), each * parts
    while left:
        number = next(numbers)
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
            left -= 1
    return [found[n % parts][n // parts] for n in range(count)]


def _map_side(
    job: AppendJob, inputs: Sequence[LandingInput], groups: int, numbers: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """The map side: a record for each blob of rows, with its group's number, and one record for all reports."""
    buffer = RowBuffer(job, HELD_BYTES)
    reports: list[Report] = []
    lost: list[Written] = []
    for item in read_landing(job, inputs):
        if not isinstance(item, pa.Table):
            reports.append(item)
        elif buffer.add(item):
            yield from _blobs(job, buffer.tables, groups, numbers)
            lost += buffer.lost
            buffer = RowBuffer(job, HELD_BYTES)
    if buffer.tables:
        buffer.settle()
        yield from _blobs(job, buffer.tables, groups, numbers)
        lost += buffer.lost
    yield _record(numbers[0], None, pickle.dumps([*reports, *total_by_partition(lost)]))


def _blobs(job: AppendJob, tables: Sequence[Rows], groups: int, numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
    for group, rows in group_by_range(job, tables, groups):
        step = max(1, rows.num_rows * BLOB_BYTES // max(rows.nbytes, 1))
        for at in range(0, rows.num_rows, step):
            yield _record(numbers[group], to_bytes(rows.slice(at, step)), None)


def _record(number: int, rows: bytes | None, reports: bytes | None) -> pa.RecordBatch:
    columns = [pa.array([number], pa.int32()), pa.array([rows], pa.binary()), pa.array([reports], pa.binary())]
    return pa.record_batch(columns, ["number", "rows", "reports"])


def _reduce_side(job: AppendJob, batches: Iterator[pa.RecordBatch]) -> list[Report]:
    """The reduce side: settle and write the rows, which come group by group."""
    reports: list[Report] = []
    lost: list[Written] = []
    held: list[Rows] = []
    size = 0
    group: int | None = None
    for batch in batches:
        for number, rows, pickled in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if pickled is not None:
                for report in pickle.loads(pickled):
                    if isinstance(report, Written):
                        lost.append(report)
                    else:
                        reports.append(report)
                continue
            if number != group and size >= HELD_BYTES:
                reports += settle_and_write(job, held)
                held, size = [], 0
            group = number
            table = from_bytes(rows)
            held.append(table)
            size += table.nbytes
    if held:
        reports += settle_and_write(job, held)
    reports += total_by_partition(lost)
    forget_zip_importers()
    return reports


@contextmanager
def small_batches() -> Iterator[SparkSession]:
    """A session that passes few rows at a time to Python, since each of ours is a blob."""
    spark = session()
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, str(BLOBS_PER_BATCH))
    try:
        yield spark
    finally:
        spark.conf.set(name, before)
