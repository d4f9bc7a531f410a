"""Phase two's window engine: Spark ranks the rows, and tasks gather the winning ones. See `SparkEngine`."""

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the name that all of Spark's documentation uses

from lakeupsert.engine.merge import AGE, MergeOutput, MergeTask, MergeWriter
from lakeupsert.engine.spark_session import forget_zip_importers, ids, parallelism, session, spark_may_fail
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.adopted import adopted_rows
from lakeupsert.rows.buckets import in_bucket
from lakeupsert.rows.changes import Tally, of_keys
from lakeupsert.rows.columns import combined
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import POSITION, stream_file
from lakeupsert.rows.digest import as_text, hashed_columns, row_hashes
from lakeupsert.rows.floor import DELETED_AT, forgotten, lacking, since, up_to
from lakeupsert.rows.rank import latest
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, TombstoneFile
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, Ordering, TableSpec

_ARRIVAL = ("age", "file", "place")
_TIES = (AGE, FILE, PLACE)


class SparkEngine:
    """The reference: `row_number() over (partition by key order by ordering desc)`. See `lakeupsert.engine.merge.Engine`.

    Spark sees keys, ordering columns and positions; the winning rows are then read from their files by position, so a
    payload that Spark has no type for passes all the same.
    """

    name = "spark"
    partitions_per_call = 512
    memory_limit: int | None = None
    shares_units = False

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        return 0  # Spark spills

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        sources = [_sources(task) for task in tasks]
        flat = [(unit, number) for unit, of_unit in enumerate(sources) for number in range(len(of_unit))]
        keys = [f"k{i}" for i in range(len(spec.stored_key))]
        orders = {f"o{i}": ordering for i, ordering in enumerate(spec.ordering)}
        content = [f"c{i}" for i in range(len(spec.content))]
        columns = [_comparable(spec, name)[0] for name in (*spec.stored_key, *spec.order_by, *spec.content)]
        ddl = ", ".join(f"{name} {type_}" for name, type_ in zip([*keys, *orders, *content], columns, strict=True))
        has_full = any(task.full for task in tasks)
        if has_full:
            ddl += ", lacking array<int>, void array<int>"

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for number in ids(batches):
                unit, source = flat[number]
                yield from _ranks(store, spec, unit, source, tasks[unit], *sources[unit][source], lacking=has_full)

        def write(batches: Iterator[Any]) -> Iterator[Any]:
            for unit, rows in _by_unit(batches):
                output = _gather(store, spec, spec_version, tasks[unit], sources[unit], rows)
                yield pa.record_batch({"unit": pa.array([unit], pa.int32()), "output": [pickle.dumps(output)]})

        with spark_may_fail():
            spark = session()
            by_key = Window.partitionBy("unit", *keys)
            dead = F.lit(False)
            if has_full:
                came = F.collect_set("age").over(by_key)
                lacked_by = F.array_min(F.filter("lacking", lambda age: ~F.array_contains(came, age)))
                dead = lacked_by.isNotNull()
            greatest_first = [window_order(F.col(name), ordering) for name, ordering in orders.items()]
            ties = [*(["deleted", *content] if spec.ties == "content" else []), *_ARRIVAL]
            newest_first = [*greatest_first, *(F.col(name).desc_nulls_last() for name in ties)]
            rank, void_by = F.lit(0), F.lit(None)
            if any(task.forgets for task in tasks if task.full):
                rank = F.row_number().over(by_key.orderBy(*newest_first))
                void_by = F.array_min(F.filter("void", lambda age: F.array_contains(came, age)))
                void_by = F.when(lacked_by.isNull() | (void_by < lacked_by), void_by)
                dead |= F.exists(_voids(by_key), lambda void: _takes(void, F.col("rank"), F.col("age")))
            greatest_first, newest_first = ([F.col("dead"), *columns] for columns in (greatest_first, newest_first))
            begins = F.col("nth") == 1
            if has_full and spec.history:  # rows that die come first, and have no place
                begins = F.row_number().over(by_key.orderBy("nth")) == 1
            known = F.lit(True)
            if any(task.refuses for task in tasks):
                known = F.coalesce(F.min(F.when(~F.col("dead"), F.col("age"))).over(by_key) == 0, F.lit(False))
            rows = (
                spark.range(0, len(flat), 1, max(1, min(len(flat), 4 * parallelism(spark))))
                .mapInArrow(
                    read,
                    f"unit int, source int, row bigint, age int, file int, place bigint, deleted boolean, hash bigint, {ddl}",
                )
                .withColumns({"rank": rank, "void_by": void_by})
                .withColumn("dead", dead)
                .withColumn(
                    "nth", F.when(F.col("dead"), 0).otherwise(F.row_number().over(by_key.orderBy(*newest_first)))
                )
                .withColumn("begins", begins)
                .withColumn("known", known)
                .withColumn("version", F.dense_rank().over(by_key.orderBy(*greatest_first, *content)))
                .repartition(max(1, min(len(tasks), 4 * parallelism(spark))), "unit")
                .sortWithinPartitions("unit", *keys, "nth")
                .select("unit", "source", "row", "deleted", "hash", "nth", "begins", "known", "version", *_ARRIVAL)
                .mapInArrow(write, "unit int, output binary")
                .collect()
            )
        done = {row.unit: pickle.loads(row.output) for row in rows}
        return [
            done.get(unit) or _gather(store, spec, spec_version, task, [], iter(())) for unit, task in enumerate(tasks)
        ]


def window_order(column: Any, ordering: Ordering) -> Any:
    """An ordering column of a table as Spark's window has it."""
    if ordering.ascending:
        return column.asc_nulls_first() if ordering.nulls_first else column.asc_nulls_last()
    return column.desc_nulls_first() if ordering.nulls_first else column.desc_nulls_last()


def _voids(by_key: Any) -> Any:
    """The deletes of a key that full extracts void, each by its rank, its age, and the extract's; but those that an earlier
    extract took away with another one."""
    voids = F.array_sort(
        F.collect_list(F.when(F.col("void_by").isNotNull(), F.struct("void_by", "rank", "age"))).over(by_key)
    )
    none = F.array().cast("array<struct<void_by:int,rank:int,age:int>>")

    def one_more(found: Any, void: Any) -> Any:
        return F.when(
            F.exists(found, lambda other: _takes(other, void.rank, void.age) & (other.void_by < void.void_by)), found
        ).otherwise(F.concat(found, F.array(void)))

    return F.aggregate(voids, none, one_more)


def _takes(void: Any, rank: Any, age: Any) -> Any:
    """Whether a delete that an extract voids takes a row with it: what the delete beat, of before the extract."""
    return (rank >= void.rank) & (age < void.void_by)


def _sources(task: MergeTask) -> list[tuple[DataFile, int]]:
    """The files of a merge, those that are kept first, each with its age (see `arrow`)."""
    stored = [(f, 0) for f in (*task.stored, *task.tombstones)]
    return stored + [(f, age) for age, files in enumerate(task.batches, 1) for f in files]


def _ranks(
    store: ObjectStore,
    spec: TableSpec,
    unit: int,
    source: int,
    task: MergeTask,
    file: DataFile,
    age: int,
    *,
    lacking: bool,
) -> Iterator[Any]:
    """The columns that decide, and the position, of each row of one file that is in the task's bucket; ``lacking``: and which
    full extracts delete it where they lack its key, or where they have it."""
    appended = spec.ranked_schema if age else None
    extra = [appended.field(n) for n in (FILE, PLACE, *([DELETE_FLAG] if spec.has_deletes else []))] if appended else []
    extra += [DELETED_AT] if task.forgets else []
    schema = pa.schema([*spec.deciding_schema, *extra, pa.field(POSITION, pa.int64())])
    for block in stream_file(store, file, schema):
        rows = in_bucket(block, file, task, spec)
        n = rows.num_rows
        columns = {
            "unit": np.full(n, unit, np.int32),
            "source": np.full(n, source, np.int32),
            "row": rows[POSITION],
            "age": np.full(n, age, np.int32),
            "file": rows[FILE]
            if age
            else np.full(n, source, np.int32),  # between stored rows only adopted ones can tie
            "place": rows[PLACE] if age else rows[POSITION],
            "deleted": rows[DELETE_FLAG] if age and spec.has_deletes else np.full(n, isinstance(file, TombstoneFile)),
            "hash": row_hashes(rows, hashed_columns(spec)).view(np.int64),
        }
        columns |= {f"k{i}": _comparable(spec, c)[1](rows[c]) for i, c in enumerate(spec.stored_key)}
        columns |= {f"o{i}": _comparable(spec, c)[1](rows[c]) for i, c in enumerate(spec.order_by)}
        columns |= {f"c{i}": _comparable(spec, c)[1](rows[c]) for i, c in enumerate(spec.content)}
        if lacking:
            columns["lacking"] = _lacking(rows, age, spec, task)
            columns["void"] = _void(rows, columns["deleted"], age, task)
        yield from pa.table(columns).to_batches()


def _lacking(rows: Any, age: int, spec: TableSpec, task: MergeTask) -> Any:
    """For each row the ages of the full extracts that delete it where they lack its key."""
    later = [(of_it, order) for of_it, order in task.full if age < of_it]
    return _ages([of_it for of_it, _ in later], [up_to(rows, order, spec) for _, order in later], rows.num_rows)


def _void(rows: Any, deleted: Any, age: int, task: MergeTask) -> Any:
    """For each row the ages of the full extracts that take it away where they have its key (see `floor.lacking`)."""
    forgets = task.forgets
    if forgets is None:
        return _ages([], [], rows.num_rows)
    deletes = pa.table({DELETE_FLAG: deleted, DELETED_AT.name: rows[DELETED_AT.name]})
    deletes = since(deletes, np.full(rows.num_rows, age), forgets)
    later = [of_it for of_it, _ in task.full if age < of_it]
    return _ages(later, [forgotten(deletes, forgets, of_it) for of_it in later], rows.num_rows)


def _ages(ages: Sequence[int], masks: Sequence[Any], rows: int) -> Any:
    """For each of so many rows a list of those ages whose mask (numpy) has it."""
    marked = np.array(masks, bool).reshape(len(ages), rows).T
    flat = np.broadcast_to(np.array(ages, np.int32), marked.shape)[marked]
    ends = np.cumsum([0, *marked.sum(axis=1)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, pa.int32()))


def _comparable(spec: TableSpec, name: str) -> tuple[str, Callable[[Any], Any]]:
    """Spark's type for a column that decides, and what turns the Arrow column into it without changing its order."""
    t = pa.types
    type_ = spec.schema.field(name).type

    def to(arrow: Any) -> Callable[[Any], Any]:
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
    if t.is_string(type_) or t.is_large_string(type_):
        return "string", to(pa.string())
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_):
        return "binary", to(pa.binary())
    if t.is_decimal(type_) and type_.precision <= 38:
        return f"decimal({type_.precision},{type_.scale})", to(pa.decimal128(type_.precision, type_.scale))
    raise ConfigurationError(
        "unfit-for-spark",
        f"Column {name!r} is {type_}, which Spark can't compare, and it decides which row of a key wins.",
        next="use --engine arrow for this table",
    )


def _by_unit(batches: Iterator[Any]) -> Iterator[tuple[int, Iterator[Any]]]:
    """The rows of one unit after the other, each in key order, those of a key as they rank: tables of source, row, deleted, hash,
    nth, known, version, arrival."""
    pending: list[Any] = []
    unit: int | None = None
    for batch in batches:
        units = batch["unit"].to_numpy()
        borders = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), len(units)]
        for low, high in itertools.pairwise(borders):
            if low == high:
                continue
            if unit is not None and int(units[low]) != unit:
                yield unit, iter(pending)
                pending = []
            unit = int(units[low])
            pending.append(batch.slice(low, high - low))
    if unit is not None:
        yield unit, iter(pending)
    forget_zip_importers()


def _gather(
    store: ObjectStore,
    spec: TableSpec,
    spec_version: int,
    task: MergeTask,
    sources: list[tuple[DataFile, int]],
    ranked: Iterator[Any],
) -> MergeOutput:
    """Write the winning rows, in key order, but those in files that are kept; add up the others.

    Files are sorted by key too, so each is read forward once; but adopted ones. In mode columns and with a history all rows of a
    key are read; in mode columns those in files that are kept are written anew where a record of the batches is part of what
    they come to.
    """
    by_columns = spec.mode == "columns"
    whole_keys = by_columns or spec.history
    schema = spec.base_schema.append(DELETED_AT) if task.forgets else spec.base_schema
    cursors = [
        _Cursor(stream_file(store, msgspec.structs.replace(file, deleted=None), schema, spec=spec))
        if age or task.settled
        else adopted_rows(store, file, spec, task.partition)
        for file, age in sources
    ]
    lost = lost_sum = adopted_sum = 0
    superseded: list[list[Any]] = [[] for _ in task.kept]
    tally = Tally()
    met: list[list[Any]] = []
    with MergeWriter(store, spec, spec_version, task, tally) as out:
        for batch in _whole_keys(ranked) if whole_keys else ranked:
            met.append([batch[name].to_numpy(zero_copy_only=False) for name in ("nth", "age", "deleted", "version")])
            wins, hashes = batch["nth"].to_numpy() == 1, batch["hash"].to_numpy().view(np.uint64)
            lost += int(np.count_nonzero(~wins))
            lost_sum += int(hashes[~wins].sum())
            source, row = batch["source"].to_numpy(), batch["row"].to_numpy()
            adopted_sum += int(hashes[source < len(task.base)].sum())
            is_kept = source < len(task.kept)
            if by_columns:
                rows, order = _read(batch, cursors, schema, task)
                rows, chosen, uses = combined(rows, spec, order, pa.array(wins), _TIES)
                uses = uses[order]
                met[-1].append(uses)
                changed = of_keys(wins, uses & ~is_kept)
                out.write(rows, chosen.filter(pa.array(changed)))
                goes = changed[np.cumsum(wins) - 1]
            else:
                won = pa.array(wins & ~is_kept)
                some = batch if spec.history else batch.filter(won)
                if some.num_rows:
                    rows, order = _read(some, cursors, schema, task)
                    if spec.history:
                        _keep_past(out, spec, task, batch, rows, order)
                        order = order.filter(won)
                    out.write(rows, order, true(batch["known"].filter(won)) if task.refuses else None)
                goes = ~wins
            for number, positions in enumerate(superseded):
                positions.append(row[goes & (source == number)])
        if met:
            _count(spec, tally, *(np.concatenate(parts) for parts in zip(*met, strict=True)))
    positions = [np.sort(np.concatenate([np.empty(0, np.int64), *found])) for found in superseded]
    return out.output(lost, as_text(lost_sum), None if task.settled else as_text(adopted_sum), positions)


def _keep_past(out: MergeWriter, spec: TableSpec, task: MergeTask, batch: Any, rows: Any, order: Any) -> None:
    """Put what is superseded into the history; ``rows``, taken by ``order``, are those that the batch names."""
    nth = batch["nth"].to_numpy()
    if not nth.all():
        ages = rows[AGE].to_numpy()
        out.keep_lacking(rows, lacking(rows, *latest(rows, spec, _TIES), ages, task.full, spec, task.forgets))
    known = true(batch["known"])[nth == 1] if task.refuses else None
    out.keep_past(rows, order.filter(pa.array(nth > 0)), pa.array(nth[nth > 0] == 1), known)


def _whole_keys(ranked: Iterator[Any]) -> Iterator[Any]:
    """The same rows, those of a key in one batch."""
    held: list[Any] = []
    for batch in ranked:
        begins = np.flatnonzero(true(batch["begins"]))
        if len(begins) and (held or begins[-1]):
            yield pa.Table.from_batches([*held, batch.slice(0, begins[-1])]).combine_chunks()
            held = []
        held.append(batch.slice(begins[-1]) if len(begins) else batch)
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _read(batch: Any, cursors: Sequence[Any], schema: Any, task: MergeTask) -> tuple[Any, Any]:
    """The rows that a batch names, file by file, with what ranks them; and indices that put them into its order."""
    source, row = batch["source"].to_numpy(), batch["row"].to_numpy()
    by_source = np.lexsort((row, source))
    found = [cursors[s].take(np.sort(row[source == s])) for s in np.unique(source)]
    if task.forgets:  # adopted files do not say when
        found.append(schema.empty_table())
    rows = pa.concat_tables(found, promote_options="default" if task.forgets else "none")
    for name, column in ((DELETE_FLAG, "deleted"), (AGE, "age"), (FILE, "file"), (PLACE, "place")):
        rows = rows.append_column(name, batch[column].take(pa.array(by_source)))
    if task.forgets:
        rows = since(rows, rows[AGE], task.forgets)
    return rows, pa.array(np.argsort(by_source, kind="stable"))


def _count(spec: TableSpec, tally: Tally, nth: Any, ages: Any, deleted: Any, versions: Any, uses: Any = None) -> None:
    dies = nth == 0
    tally.lacking(ages[dies], deleted[dies])
    nth, ages, deleted, versions = (column[~dies] for column in (nth, ages, deleted, versions))
    by_content = (lambda one, other: versions[one] == versions[other]) if spec.ties == "content" else None
    tally.meet(nth == 1, ages, deleted, by_content, uses)


class _Cursor:
    """Reads a file forward and hands out rows by their place in it."""

    def __init__(self, blocks: Iterator[Any]) -> None:
        self._blocks = blocks
        self._block: Any = None
        self._begin = 0

    def take(self, rows: Any) -> Any:
        """The rows at these places, which ascend and are all above those of the call before."""
        found = []
        while len(rows):
            if self._block is None or rows[0] >= self._begin + self._block.num_rows:
                self._begin += self._block.num_rows if self._block is not None else 0
                self._block = next(self._blocks)
                continue
            here = int(np.searchsorted(rows, self._begin + self._block.num_rows))
            found.append(self._block.take(pa.array(rows[:here] - self._begin)))
            rows = rows[here:]
        return pa.concat_tables(found)
