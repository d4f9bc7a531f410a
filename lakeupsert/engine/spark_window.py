"""Engine spark, the reference: `row_number() over (partition by key order by ordering desc)`. See `merge.Engine`.

Spark sees key and ordering columns and positions. Tasks then read the winning rows from their files by position, so a payload
that Spark has no type for passes unchanged. Each call runs one action, once (see `spark_host`).
"""

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that all of Spark's documentation uses

from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.cut import Cuts, CutTask
from lakeupsert.engine.hosted import HostedEngine
from lakeupsert.engine.merge import Merged, MergeTask
from lakeupsert.engine.spark_gather import Source, gather
from lakeupsert.engine.spark_host import TASKS_PER_CORE, SparkHost, pack, spread
from lakeupsert.engine.spark_session import (
    collect,
    explain_spark_failures,
    forget_zip_importers,
    ids,
    parallelism,
    session,
    task_memory,
)
from lakeupsert.engine.spark_tasks import (
    TaskMemory,
    attempt_in_task,
    explain_death,
    require_a_try,
    require_fit,
    ship,
)
from lakeupsert.errors import ConfigurationError, TaskDiedError
from lakeupsert.landing.adopted import ADOPTED_RANK
from lakeupsert.rows.arrays import Column as ArrowColumn
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.buckets import in_bucket
from lakeupsert.rows.datafiles import POSITION, stream_file
from lakeupsert.rows.digest import hashed_columns, row_hashes
from lakeupsert.rows.floor import DELETED_AT, add_deletion_times, find_forgotten
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, TombstoneFile
from lakeupsert.table.roles import Ordering
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec
from lakeupsert.table.types import is_binary, is_text

_ARRIVAL = ("age", "file", "place")
_DECIDED = ["unit", "source", "row", "deleted", "hash", "error", "nth", "begins", "known", "killed_by", "lacked"]


def _sources(unit: int, task: MergeTask) -> list[Source]:
    files = [(file, 0) for file in (*task.stored, *task.tombstones)]
    files += [(file, age) for age, batch in enumerate(task.batches, 1) for file in batch]
    return [Source(unit, number, file, age) for number, (file, age) in enumerate(files)]


def _in_pieces(task: MergeTask) -> MergeTask:
    """The same task, with files that are in key order each."""

    def pieces(files: Sequence[DataFile]) -> tuple[DataFile, ...]:
        return tuple(piece for file in files for piece in file.in_pieces)

    batches = tuple(map(pieces, task.batches))
    return replace(task, base=pieces(task.base), deltas=pieces(task.deltas), batches=batches)


class SparkEngine:
    """See `lakeupsert.engine.merge.Engine`. ``of_machine``: as in `by_name.spark_engine`, for what cuts files; None: no limit."""

    name = "spark"
    partitions_per_call = 512
    memory_limit: int | None = None
    shares_units = False

    def __init__(self, of_machine: int | None = None) -> None:
        self._of_machine = of_machine

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        return 0  # Spark spills

    def merge(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]) -> Merged:
        if any(task.erased for task in tasks):  # rare, and all rows but a few only pass through
            return ArrowEngine().merge(store, spec, spec_version, tasks)
        with explain_spark_failures():
            spark = session()
            most = TASKS_PER_CORE * parallelism(spark)
            outputs = _run_window(spark, store, spec, spec_version, tasks, most)
            died = [n for n, output in enumerate(outputs) if isinstance(output, TaskDiedError)]
            if died and len(tasks) > 1:  # one may have taken others with it
                again = _run_window(spark, store, spec, spec_version, [tasks[n] for n in died], None)
                for n, output in zip(died, again, strict=True):
                    outputs[n] = output
        return require_fit(outputs)

    def cut(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[CutTask]) -> Cuts:
        limit = None if self._of_machine is None else SparkHost.memory_of_a_task(self._of_machine)
        return HostedEngine(SparkHost(), limit).cut(store, spec, spec_version, tasks)


def _run_window(
    spark: SparkSession,
    store: ObjectStore,
    spec: TableSpec,
    spec_version: int,
    tasks: Sequence[MergeTask],
    most: int | None,
) -> Merged:
    """One job for all ``tasks``. ``most``: of Spark's tasks in each of its halves; None: one for each file and for each unit."""
    has_full = any(task.full for task in tasks)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in ids(batches):
            for source in (flat[place] for place in packs[number]):
                task = by_unit[source.unit]
                yield from _deciding_rows_or_error(store, spec, task, source, memory, has_full=has_full)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for unit, rows in _by_unit(batches):
            of_unit = partial(gather, store, spec, spec_version, by_unit[unit], sources[unit])
            output = pickle.dumps(attempt_in_task(of_unit, rows, memory))
            yield pa.record_batch({"unit": pa.array([unit], pa.int32()), "output": [output]})

    memory, schema = task_memory(spark), _deciding_ddl(spec, has_full=has_full)
    parts = max(1, min(len(tasks), most or len(tasks)))
    units = spread(len(tasks), parts)
    by_unit = dict(zip(units, map(_in_pieces, tasks), strict=True))
    sources = {unit: _sources(unit, task) for unit, task in by_unit.items()}
    flat = list(itertools.chain.from_iterable(sources.values()))
    packs = pack([float(source.file.bytes) for source in flat], most) if most else [[n] for n in range(len(flat))]
    rows = collect(
        spark.range(0, len(packs), 1, max(1, len(packs)))
        .mapInArrow(ship(read), schema)
        .transform(_rank, spec, tasks)
        .repartition(parts, "unit")
        .sortWithinPartitions("unit", *_key_names(spec), "nth", *_ARRIVAL)
        .select(*_DECIDED, "version", *_ARRIVAL)
        .mapInArrow(ship(write), "unit int, output binary")
    )
    outputs = {row.unit: pickle.loads(row.output) for row in rows}
    return [outputs.get(unit) or gather(store, spec, spec_version, task, [], []) for unit, task in by_unit.items()]


# ---------------------------------------------------------------- the window


def window_order(column: Column, ordering: Ordering) -> Column:
    """The sort order of an ordering column in Spark's window."""
    if ordering.ascending:
        return column.asc_nulls_first() if ordering.nulls_first else column.asc_nulls_last()
    return column.desc_nulls_first() if ordering.nulls_first else column.desc_nulls_last()


def _key_names(spec: TableSpec) -> list[str]:
    return [f"k{i}" for i in range(len(spec.stored_key))]


def _rank(frame: DataFrame, spec: TableSpec, tasks: Sequence[MergeTask]) -> DataFrame:
    """Rank the rows of every key. ``frame`` has the columns of `_deciding_ddl`; the columns that are added:

    nth: 1 for the winner, then 2, 3, …; 0 for rows that a full extract deletes
    killed_by: the age of that extract, or 0
    lacked: the full extract of a later batch lacks the key
    begins: the row is the first of its key when sorted by ``nth``
    known: the table stores something under the key
    version: equal for the rows of a key that are equal in the ordering columns and in content
    """
    by_key = Window.partitionBy("unit", *_key_names(spec))
    content = [f"c{i}" for i in range(len(spec.content))]
    greatest_first = [window_order(F.col(f"o{i}"), ordering) for i, ordering in enumerate(spec.ordering)]
    ties = [*(["deleted", *content] if spec.ties == "content" else []), *_ARRIVAL]
    newest_first = [*greatest_first, *(F.col(name).desc_nulls_last() for name in ties)]
    has_full = any(task.full for task in tasks)
    if has_full:
        newest_first = [F.col("era").desc(), *newest_first]
    killed_by, lacked, rank, void_by = F.lit(None), F.lit(False), F.lit(0), F.lit(None)
    if has_full:
        ages = F.collect_set("age").over(by_key)
        lacked = F.exists("extracts", lambda age: ~F.array_contains(ages, age))
        lacking = F.col("lacking")
        if any(extract.replaces for task in tasks for extract in task.full):
            # A row may have replaced greater ones, which go with it.
            before = by_key.orderBy(*newest_first).rowsBetween(Window.unboundedPreceding, Window.currentRow)
            lacking = F.filter(F.flatten(F.collect_list("lacking").over(before)), lambda age: age > F.col("age"))
        killed_by = lacked_by = F.array_min(F.filter(lacking, lambda age: ~F.array_contains(ages, age)))
        if any(task.forgets for task in tasks if task.full):
            rank = F.row_number().over(by_key.orderBy(*newest_first))
            void_by = F.array_min(F.filter("void", lambda age: F.array_contains(ages, age)))
            void_by = F.when(lacked_by.isNull() | (void_by < lacked_by), void_by)
            fatal = F.filter(_void_deletes(by_key), lambda void: _takes_away(void, F.col("rank"), F.col("age")))
            killed_by = F.least(lacked_by, F.array_min(F.transform(fatal, lambda void: void.void_by)))
    dead_last = F.col("killed_by") > 0
    begins = F.col("nth") == 1
    if has_full and spec.history:  # a dead row may be the first of its key
        begins = F.row_number().over(by_key.orderBy("nth", *_ARRIVAL)) == 1
    known = F.lit(True)
    if any(task.refuses for task in tasks):
        known = F.coalesce(F.min(F.when(~dead_last, F.col("age"))).over(by_key) == 0, F.lit(False))
    nth = F.row_number().over(by_key.orderBy(dead_last, *newest_first))
    return (
        frame.withColumns({"rank": rank, "void_by": void_by})
        .withColumn("killed_by", F.coalesce(killed_by, F.lit(0)).cast("int"))
        .withColumn("lacked", lacked)
        .withColumn("nth", F.when(dead_last, 0).otherwise(nth))
        .withColumn("begins", begins)
        .withColumn("known", known)
        .withColumn("version", F.dense_rank().over(by_key.orderBy(dead_last, *greatest_first, *content)))
    )


def _void_deletes(by_key: Window) -> Column:
    """The deletes of a key that full extracts void, each with its rank, its age, and the extract's age.

    A delete that an earlier extract took away together with another void delete is not among them.
    """
    voids = F.array_sort(
        F.collect_list(F.when(F.col("void_by").isNotNull(), F.struct("void_by", "rank", "age"))).over(by_key)
    )
    none = F.array().cast("array<struct<void_by:int,rank:int,age:int>>")

    def add(found: Column, void: Column) -> Column:
        return F.when(
            F.exists(found, lambda other: _takes_away(other, void.rank, void.age) & (other.void_by < void.void_by)),
            found,
        ).otherwise(F.concat(found, F.array(void)))

    return F.aggregate(voids, none, add)


def _takes_away(void: Column, rank: Column, age: Column) -> Column:
    """Whether a void delete takes a row away with it: one that ranks below the delete and is older than the extract."""
    return (rank >= void.rank) & (age < void.void_by)


# ---------------------------------------------------------------- what Spark sees of a file


def _deciding_ddl(spec: TableSpec, *, has_full: bool) -> str:
    """The columns of `_deciding_rows`. Keys, ordering columns and content are k0, k1, …, o0, … and c0, …; a row with an error
    says why its unit fails."""
    names = [*_key_names(spec), *(f"o{i}" for i in range(len(spec.order_by)))]
    names += [f"c{i}" for i in range(len(spec.content))]
    types = [_comparable(spec, name)[0] for name in (*spec.stored_key, *spec.order_by, *spec.content)]
    ddl = "unit int, source int, row bigint, age int, file int, place bigint, deleted boolean, hash bigint, error binary, "
    ddl += ", ".join(f"{name} {type_}" for name, type_ in zip(names, types, strict=True))
    return ddl + ", era int, extracts array<int>, lacking array<int>, void array<int>" if has_full else ddl


def _deciding_rows_or_error(
    store: ObjectStore, spec: TableSpec, task: MergeTask, source: Source, memory: TaskMemory, *, has_full: bool
) -> Iterator[pa.RecordBatch]:
    """The same, and a row with the error if the file can't be read: the unit fails, and the others of the call do not."""
    try:
        require_a_try(memory)
        yield from _deciding_rows(store, spec, task, source, has_full=has_full)
    except Exception as e:
        nothing = _read_schema(spec, task, source).empty_table()
        schema = pa.table(_deciding_columns(spec, task, source, nothing, has_full=has_full)).schema
        row = {"unit": source.unit, "source": source.number, "row": -1, "age": 0, "deleted": False, "hash": 0}
        yield from pa.Table.from_pylist(
            [{**row, "error": pickle.dumps(explain_death(e, memory))}], schema=schema
        ).to_batches()


def _deciding_rows(
    store: ObjectStore, spec: TableSpec, task: MergeTask, source: Source, *, has_full: bool
) -> Iterator[pa.RecordBatch]:
    """Deciding columns and position of each row of one file that is in the task's bucket."""
    for block in stream_file(store, source.file, _read_schema(spec, task, source)):
        rows = in_bucket(block, source.file, task, spec)
        yield from pa.table(_deciding_columns(spec, task, source, rows, has_full=has_full)).to_batches()


def _has_rank(task: MergeTask, source: Source) -> bool:
    """Whether the rows of the file have the columns that decide between equal ordering values."""
    return source.age > 0 or (task.cut and source.number < len(task.base))


def _read_schema(spec: TableSpec, task: MergeTask, source: Source) -> pa.Schema:
    extra = list(ADOPTED_RANK) if _has_rank(task, source) else []
    extra += [spec.ranked_schema.field(DELETE_FLAG)] if source.age and spec.has_deletes else []
    extra += [DELETED_AT] if task.forgets else []
    return pa.schema([*spec.deciding_schema, *extra, pa.field(POSITION, pa.int64())])


def _deciding_columns(
    spec: TableSpec, task: MergeTask, source: Source, rows: Rows, *, has_full: bool
) -> dict[str, ArrowColumn | Indices | Mask]:
    age, file, n = source.age, source.file, rows.num_rows
    has_rank = _has_rank(task, source)
    deletes = rows[DELETE_FLAG] if age and spec.has_deletes else np.full(n, isinstance(file, TombstoneFile))
    columns = {
        "unit": np.full(n, source.unit, np.int32),
        "source": np.full(n, source.number, np.int32),
        "row": rows[POSITION],
        "age": np.full(n, age, np.int32),
        # Among stored rows only adopted ones can tie, by file and position.
        "file": rows[FILE] if has_rank else np.full(n, source.number, np.int32),
        "place": rows[PLACE] if has_rank else rows[POSITION],
        "deleted": deletes,
        "hash": row_hashes(rows, hashed_columns(spec)).view(np.int64),
        "error": pa.nulls(n, pa.binary()),
    }
    for letter, names in (("k", spec.stored_key), ("o", spec.order_by), ("c", spec.content)):
        columns |= {f"{letter}{i}": _comparable(spec, name)[1](rows[name]) for i, name in enumerate(names)}
    if has_full:
        later = [extract for extract in task.full if age < extract.age]
        # A row that came before an extract that replaces it loses to those that came with it or since.
        columns["era"] = np.full(n, sum(extract.replaces and extract.age <= age for extract in task.full), np.int32)
        ages = [extract.age for extract in later]
        columns["extracts"] = _age_lists(ages, [np.ones(n, bool)] * len(later), n)
        # The ages of the full extracts that delete a row if they lack its key; and of those that void it if they have the key.
        columns["lacking"] = _age_lists(ages, [extract.find_reached(rows, spec) for extract in later], n)
        columns["void"] = _void_ages(rows, deletes, age, task)
    return columns


def _void_ages(rows: Rows, deleted: ArrowColumn | Mask, age: int, task: MergeTask) -> pa.ListArray:
    """For each row, the ages of the full extracts that void it if they have its key (see `floor.find_missing_keys`)."""
    forgets = task.forgets
    if forgets is None:
        return _age_lists([], [], rows.num_rows)
    deletes = pa.table({DELETE_FLAG: deleted, DELETED_AT.name: rows[DELETED_AT.name]})
    deletes = add_deletion_times(deletes, np.full(rows.num_rows, age), forgets)
    later = [extract.age for extract in task.full if age < extract.age]
    return _age_lists(later, [find_forgotten(deletes, forgets, extract) for extract in later], rows.num_rows)


def _age_lists(ages: Sequence[int], masks: Sequence[Mask], rows: int) -> pa.ListArray:
    """For each row, the list of the ages whose mask marks it."""
    marked = np.array(masks, bool).reshape(len(ages), rows).T
    flat = np.broadcast_to(np.array(ages, np.int32), marked.shape)[marked]
    ends = np.cumsum([0, *marked.sum(axis=1)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, pa.int32()))


def _comparable(spec: TableSpec, name: str) -> tuple[str, Callable[[ArrowColumn], ArrowColumn]]:
    """Spark's type for a deciding column, and a conversion of the Arrow column to it that preserves its order."""
    t = pa.types
    type_ = spec.schema.field(name).type

    def to(arrow: pa.DataType) -> Callable[[ArrowColumn], ArrowColumn]:
        return lambda column: pc.cast(column, arrow)

    if t.is_uint64(type_):
        return "decimal(20,0)", to(pa.decimal128(20, 0))
    if t.is_integer(type_) or t.is_timestamp(type_) or t.is_duration(type_) or t.is_time64(type_) or t.is_date64(type_):
        return "bigint", to(pa.int64())
    if t.is_date32(type_) or t.is_time32(type_):
        return "int", to(pa.int32())
    if t.is_floating(type_):
        return "double", to(pa.float64())
    if t.is_boolean(type_):
        return "boolean", to(pa.bool_())
    if is_text(type_):
        return "string", to(pa.string())
    if is_binary(type_):
        return "binary", to(pa.binary())
    if t.is_decimal(type_) and type_.precision <= 38:
        return f"decimal({type_.precision},{type_.scale})", to(pa.decimal128(type_.precision, type_.scale))
    raise ConfigurationError(
        "unfit-for-spark",
        f"Column {name!r} is {type_}, which Spark can't compare, but the column decides which row of a key wins.",
        next="use --engine arrow for this table",
    )


# ---------------------------------------------------------------- from ranks to files


def _by_unit(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """The ranked rows of one unit after the other, in key order and within a key by ``nth``."""
    pending: list[pa.RecordBatch] = []
    unit: int | None = None
    for batch in batches:
        units = batch["unit"].to_numpy()
        borders = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), len(units)]
        for low, high in itertools.pairwise(borders):
            if low == high:
                continue
            if unit is not None and int(units[low]) != unit:
                yield unit, pending
                pending = []
            unit = int(units[low])
            pending.append(batch.slice(low, high - low))
    if unit is not None:
        yield unit, pending
    forget_zip_importers()
