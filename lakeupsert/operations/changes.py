"""The rows that changed from one snapshot to another, for programs that keep a copy or a total of the table.

Reads     what `diff` reads: of partitions that changed, the files that both snapshots do not share
Writes    nothing
Repeat    safe; the same two snapshots give the same changes

Columns are named as in Delta's change data feed. Changes between the two snapshots that cancel out are not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.diff import Views, changed_partitions, compare_partition, under_newer_spec
from lakeupsert.read.history import with_added
from lakeupsert.read.view import View, choose
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KIND = pa.field("_change_type", pa.string())
"""Column: one of `KINDS`."""
SNAPSHOT = pa.field("_commit_version", pa.int64())
"""Column: the number of the later snapshot."""
TIME = pa.field("_commit_timestamp", pa.timestamp("us", "UTC"))
"""Column: when that one was published."""
KINDS = ("delete", "update_preimage", "update_postimage", "insert")


@dataclass(frozen=True)
class Changes:
    """The changes up to a snapshot, and the snapshot: the next changes begin behind it.

    Attributes:
        rows: the columns of the table, `KIND`, `SNAPSHOT` and `TIME`. A key's delete comes before
            its insert in another partition.
        snapshot: its number; None: nothing was published yet, and there are no rows.
    """

    rows: pa.RecordBatchReader
    snapshot: int | None


def changes(
    objects: TableObjects, newest_spec: TableSpec, since: str | int | date | None, until: str | int | date
) -> Changes:
    """The changes behind the snapshot ``since`` (None: before the first one) up to ``until``. See `choose` for both.

    Raises ConfigurationError if there is no such snapshot, or a column of the table has the name of one that is added.
    """
    views, link = _between(objects, newest_spec, since, until)
    schema = with_added(views[0], (KIND, SNAPSHOT, TIME), "the changes add")
    return Changes(pa.RecordBatchReader.from_batches(schema, _rows(views, link, schema)), link.number if link else None)


def changes_to_spark(
    spark: "SparkSession",
    objects: TableObjects,
    newest_spec: TableSpec,
    since: str | int | date | None,
    until: str | int | date,
) -> "tuple[DataFrame, int | None]":
    """As `changes`, in no particular order, read by Spark's tasks, each some partitions."""
    from pyspark.sql import types as s

    from lakeupsert.engine.spark_session import parallelism
    from lakeupsert.engine.spark_tasks import ship
    from lakeupsert.read.spark import spark_type

    views, link = _between(objects, newest_spec, since, until)
    schema = with_added(views[0], (KIND, SNAPSHOT, TIME), "the changes add")
    columns = s.StructType([s.StructField(field.name, spark_type(field.type, field.name)) for field in schema])
    names = list(changed_partitions(views, None))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _of_partition(views, link, schema, names[number], KINDS)

    tasks = spark.range(0, len(names), 1, max(1, min(len(names), 4 * parallelism(spark))))
    return tasks.mapInArrow(ship(read), columns), link.number if link else None


def _between(
    objects: TableObjects, newest_spec: TableSpec, since: str | int | date | None, until: str | int | date
) -> tuple[Views, Link[Snapshot] | None]:
    link, start = choose(objects, until), None if since is None else choose(objects, since)
    if link and start and start.number > link.number:
        raise ConfigurationError(
            "unfit-order",
            f"Snapshot {start.number} is newer than {link.number}. Nothing was read.",
            next="give the older one first",
        )
    return under_newer_spec(View.of(objects, newest_spec, start), View.of(objects, newest_spec, link)), link


def _passes(spec: TableSpec) -> list[tuple[str, ...]]:
    """The kinds of changes that are read together. A row of a table-wide key moves by a delete and an insert."""
    return [KINDS[:2], KINDS[2:]] if spec.key_scope == "table" else [KINDS]


def _rows(views: Views, link: Link[Snapshot] | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for kinds in _passes(views[0].spec):
        for partition in changed_partitions(views, None):
            yield from _of_partition(views, link, schema, partition, kinds)


def _of_partition(
    views: Views, link: Link[Snapshot] | None, schema: pa.Schema, partition: str, kinds: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    assert link is not None, "a partition is changed by a snapshot"
    published_at = datetime.fromisoformat(link.written_at)
    for pairs in compare_partition(views, None, partition)[0]:
        inserted, deleted = pairs.before < 0, pairs.after < 0
        updated = ~(inserted | deleted)
        before, after = pairs.before, pairs.after
        places = dict(zip(KINDS, (before[deleted], before[updated], after[updated], after[inserted]), strict=True))
        for kind in kinds:
            rows = pairs.rows.take(pa.array(places[kind]))
            for field, value in ((KIND, kind), (SNAPSHOT, link.number), (TIME, published_at)):
                rows = rows.append_column(field, pa.repeat(pa.scalar(value, field.type), len(rows)))
            yield from rows.cast(schema).to_batches()
