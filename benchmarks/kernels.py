"""Which library decides a merge: what incoming rows do to a sorted base file, by Arrow in several ways, DuckDB and Polars.

Reads     nothing; gets DuckDB and Polars from the package index, into build/kernels
Writes    build/kernels, and benchmarks/results/kernels.json and kernels.md
Repeat    safe: what was measured is kept in kernels.json, and `--again` measures it anew

    python -m benchmarks.kernels                        # or with --tasks positions, --rows 10000 1000000, ...

`positions` is the question of strategy delta: which stored rows does an incoming row supersede? It reads key and ordering
columns alone. `rewrite` writes the whole base anew. `pruned` asks whether statistics of row groups save reading, `hash` how
many keys a second `lakeupsert.rows.buckets` hashes. Every kernel runs in a process of its own, in one thread; time is the
median of the repetitions (processor time beside it), memory the peak above what the process had with libraries and incoming
rows loaded. All answers are checked. The decision is in docs/adr/0013.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.memory import WORDS, peak_bytes
from lakeupsert.engine.arrow import ArrowEngine, add_ranks
from lakeupsert.engine.merge import AGE, MergeTask
from lakeupsert.engine.merge_writer import MergeWriter
from lakeupsert.engine.resolve import Rules
from lakeupsert.rows import filewriter
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.changes import Tally
from lakeupsert.rows.datafiles import read_file, stream_file
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.rows.rank import count_rows_up_to, sort_by_rank, sortable
from lakeupsert.storage import LocalStore
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import FILE, PLACE, TableSpec
from tests.harness.specs import create

WORK = Path("build/kernels")
RESULTS = Path(__file__).parent / "results"
PEERS = ("duckdb", "polars")
filewriter.FILE_BYTES = 1 << 40  # a base is one file, so that a row's position is one number
PARTITION = "transaction_date=2020-01-01"
KEYS = {"composite": ("order_id", "line_no"), "text": ("order_id",)}
LINES = 4
"""Rows of an order, where the key is composite."""
ORDER = "record_timestamp"
CHUNK = 200_000
LARGE = 500_000
"""Rows of a large block of key and ordering columns."""
GROUP_ROWS = 200_000
"""Rows of a row group, for DuckDB and Polars."""


class Case(NamedTuple):
    """A base file, and what comes in for it: of ``share`` rows one in five has a new key, one in ten of the others is older."""

    rows: int
    columns: int
    key: str
    incoming: int
    clustered: bool = False

    @property
    def base(self) -> str:
        return f"{self.key}-{self.rows}x{self.columns}"

    @property
    def folder(self) -> Path:
        return WORK / "data" / f"{self.base}-{self.incoming}{'-clustered' * self.clustered}"


# ---------------------------------------------------------------- data, as lakeupsert writes it


def keys(numbers: Any, kind: str) -> dict[str, Any]:
    """Key columns of rows by number; numbers sort as the keys do, and stored ones are even."""
    orders = numbers // 2 // LINES * 2 + numbers % 2 if kind == "composite" else numbers
    text = pc.utf8_lpad(pc.cast(pa.array(orders), pa.string()), 12, "0")
    columns = {"order_id": pc.binary_join_element_wise("ord-", text, "")}
    if kind == "composite":
        columns["line_no"] = pa.array((numbers // 2 % LINES + 1).astype(np.int32))
    return columns


def payload(rows: int, columns: int, seed: int) -> dict[str, Any]:
    """So many columns, of seven kinds in turn."""
    chance = np.random.default_rng(seed)
    makers: list[Callable[[], Any]] = [
        lambda: pa.array(chance.integers(0, 10**6, rows)),
        lambda: pa.array(chance.integers(1, 100_000, rows) / 100),
        lambda: pa.array(np.array(WORDS)[chance.integers(0, len(WORDS), rows)]),
        lambda: pa.array(chance.integers(18_000, 18_365, rows).astype(np.int32)).view(pa.date32()),
        lambda: pa.array(chance.integers(1, 9, rows).astype(np.int32)),
        lambda: pa.array(chance.integers(0, 2, rows).astype(bool)),
        lambda: pa.array(chance.integers(0, 10**6, rows).astype(np.int32)).cast(pa.decimal128(12, 0)),
    ]
    return {f"c{i}": makers[i % len(makers)]() for i in range(columns)}


def stamps(numbers: Any) -> Any:
    """When a stored row was recorded: somewhere in a thousand seconds."""
    return numbers * 7919 % 1000 * 1_000_000


def table(numbers: Any, stamped: Any, case: Case, values: dict[str, Any]) -> Any:
    times = pa.array(stamped).cast(pa.timestamp("us"))
    return pa.table({**keys(numbers, case.key), ORDER: times, **values})


def spec_of(case: Case) -> TableSpec:
    empty = table(np.arange(0), np.arange(0), case, payload(0, case.columns - len(KEYS[case.key]) - 1, 0))
    return create(
        empty.schema.append(pa.field("transaction_date", pa.date32())),
        table_id="kernels",
        key=KEYS[case.key],
        order_by=(ORDER,),
        partition_by=("transaction_date",),
        delete=None,
        stamped=False,
    )


def written(folder: Path, name: str, tables: Iterator[Any], schema: Any, spec: TableSpec) -> DataFile:
    footer = Footer(table=spec.table_id, kind="base", batch="1", spec_version=0, partition=PARTITION)
    with DataFileWriter(LocalStore(folder), lambda: name, schema, footer, spec.stored_key) as out:
        for rows in tables:
            out.write(rows)
    return out.files[0]


def make(case: Case) -> None:
    """Base, incoming rows and the expected positions, where they are not there yet."""
    spec = spec_of(case)
    values = case.columns - len(spec.tombstone_schema)
    bases = WORK / "data/bases"
    if not (bases / f"{case.base}.json").exists():
        repeated = payload(CHUNK, values, 1)

        def chunks() -> Iterator[Any]:
            for at in range(0, case.rows, CHUNK):
                numbers = np.arange(at, min(at + CHUNK, case.rows)) * 2
                yield table(numbers, stamps(numbers), case, {k: v[: len(numbers)] for k, v in repeated.items()})

        base = written(bases, f"{case.base}.parquet", chunks(), spec.stored_schema, spec)
        (bases / f"{case.base}.json").write_text(
            json.dumps({"name": base.name, "rows": base.rows, "bytes": base.bytes})
        )
    if (case.folder / "expected.npy").exists():
        return
    shutil.rmtree(case.folder, ignore_errors=True)
    chance = np.random.default_rng(2)
    begin, end = (case.rows // 2, case.rows // 2 + case.rows // 50) if case.clustered else (0, case.rows)
    numbers = np.sort(chance.choice(np.arange(begin, end), case.incoming, replace=False)) * 2
    new, older = chance.random(case.incoming) < 0.2, chance.random(case.incoming) < 0.1
    stamped = stamps(numbers) + np.where(older, -1, 1)
    expected = numbers[~new & ~older] // 2
    incoming = table(np.where(new, numbers + 1, numbers), stamped, case, payload(case.incoming, values, 3))
    by_key = pc.sort_indices(incoming, [(name, "ascending") for name in spec.stored_key])
    incoming = incoming.take(by_key)
    incoming = incoming.append_column(pa.field(FILE, pa.int32()), pa.repeat(pa.scalar(0, pa.int32()), case.incoming))
    incoming = incoming.append_column(PLACE, pa.array(np.arange(case.incoming)))
    found = written(case.folder, "incoming.pack", iter([incoming]), spec.ranked_schema, spec)
    (case.folder / "incoming.json").write_text(
        json.dumps({"name": found.name, "rows": found.rows, "bytes": found.bytes, "new": int(new.sum())})
    )
    np.save(case.folder / "won.npy", (new | ~older)[by_key.to_numpy()])
    np.save(case.folder / "expected.npy", expected)


class Given:
    """What a kernel begins with: the base as a file, incoming rows in memory, one of each key, in key order."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec = case, spec_of(case)
        self.key = list(self.spec.stored_key)
        self.narrow = self.spec.tombstone_schema
        self.base = DataFile(**json.loads((WORK / f"data/bases/{case.base}.json").read_text()))
        self.path = str(WORK / "data/bases" / self.base.name)
        self.store = LocalStore(WORK / "data/bases")
        self.incoming_file = case.folder / "incoming.pack"
        self.incoming = pq.read_table(self.incoming_file, columns=self.spec.stored_schema.names)
        self.out = WORK / "out" / str(os.getpid())


# ---------------------------------------------------------------- positions


def blocks(given: Given, rows: int | None) -> Iterator[tuple[int, Any, Any]]:
    """The base in key order: where a block begins, its rows, and the incoming rows that are not above its last key.

    Blocks have about ``rows`` rows; None: as many as `stream_file` gives, which counts the bytes of all columns.
    """
    at, rest = 0, given.incoming.select(given.narrow.names)
    for stored in stream_file(given.store, given.base, given.narrow) if rows is None else _batches(given, rows):
        met = count_rows_up_to(rest, given.key, [stored[name][-1] for name in given.key])
        yield at, stored, rest.slice(0, met)
        at, rest = at + stored.num_rows, rest.slice(met)


def _batches(given: Given, rows: int) -> Iterator[Any]:
    with pq.ParquetFile(given.path, pre_buffer=True) as parquet:
        for batch in parquet.iter_batches(batch_size=rows, columns=given.narrow.names, use_threads=False):
            yield pa.Table.from_batches([batch])


def floor(given: Given) -> Any:
    """Reading the columns and nothing else."""
    for _ in stream_file(given.store, given.base, given.narrow):
        pass
    return None


def beaten(candidates: Any, at: Any, came: Any, given: Given) -> Any:
    """Those of the positions ``at`` whose stored row has the key of an incoming one that is not older."""
    both = pa.concat_tables([add_ranks(candidates, age=0, deleted=False), add_ranks(came, age=1, deleted=False)])
    order, first = sort_by_rank(both, given.spec, (AGE, FILE, PLACE))
    wins = np.zeros(both.num_rows, bool)
    wins[order.filter(first)] = True
    return at[~wins[: len(at)]]


def by_is_in(given: Given, rows: int | None = None) -> Any:
    """`is_in` of each key column leaves few candidates; these alone are compared exactly."""
    found = []
    for begin, stored, came in blocks(given, rows):
        mask = None
        for name in given.key:
            here = pc.is_in(stored[name], came[name].combine_chunks())
            mask = here if mask is None else pc.and_(mask, here)
        at = np.flatnonzero(mask.to_numpy())
        found.append(begin + beaten(stored.take(at), at, came, given))
    return np.concatenate(found)


def by_search(given: Given, rows: int | None = None) -> Any:
    """Each incoming key is looked up in the block, which is sorted: a binary search of all of them at once."""
    found = []
    for begin, stored, came in blocks(given, rows):
        at, same = searched(stored, came, given.key)
        at, came = at[same], came.filter(pa.array(same))
        found.append(begin + at[not_older(came, stored.take(at), given.spec.order_by)])
    return np.concatenate(found)


def searched(stored: Any, came: Any, key: Sequence[str]) -> tuple[Any, Any]:
    """Where each row of ``came`` is among the rows ``stored``, which are in key order, or would be; and whether it is there."""
    low, high = np.zeros(came.num_rows, np.int64), np.full(came.num_rows, stored.num_rows)
    columns = [(sortable(stored[name]).combine_chunks(), sortable(came[name]).combine_chunks()) for name in key]
    for _ in range(stored.num_rows.bit_length()):
        middle = (low + high) // 2
        below, _ = compared(columns, np.minimum(middle, stored.num_rows - 1))
        below &= low < high
        low, high = np.where(below, middle + 1, low), np.where(below | (low >= high), high, middle)
    _, same = compared(columns, np.minimum(low, stored.num_rows - 1))
    return low, same & (low < stored.num_rows)


def compared(columns: Sequence[tuple[Any, Any]], at: Any) -> tuple[Any, Any]:
    """Whether the stored keys at these places are below the incoming ones, and whether they are the same."""
    below, same = np.zeros(len(at), bool), np.ones(len(at), bool)
    for stored, came in columns:
        there = stored.take(pa.array(at))
        below |= same & pc.less(there, came).to_numpy(zero_copy_only=False)
        same &= pc.equal(there, came).to_numpy(zero_copy_only=False)
    return below, same


def not_older(came: Any, stored: Any, order_by: Sequence[str]) -> Any:
    """Whether the incoming row of each pair wins: the rank's order of ordering columns, and incoming where they are equal."""
    greater, same = np.zeros(came.num_rows, bool), np.ones(came.num_rows, bool)
    for name in order_by:
        new, old = (sortable(t[name]) for t in (came, stored))
        no_new, no_old = (pc.is_null(c).to_numpy() for c in (new, old))
        more = pc.fill_null(pc.greater(new, old), False).to_numpy() | (~no_new & no_old)
        greater |= same & more
        same &= pc.fill_null(pc.equal(new, old), False).to_numpy() | (no_new & no_old)
    return greater | same


def by_search_sorted(given: Given) -> Any:
    """As `by_search`, by pyarrow's own search in the first key column (pyarrow 26 has it, but not for decimals)."""
    found = []
    for begin, stored, came in blocks(given, LARGE):
        first, sought = stored[given.key[0]], came[given.key[0]].combine_chunks()
        low, high = (
            pc.search_sorted(first, sought, side=side).to_numpy().astype(np.int64) for side in ("left", "right")
        )
        many = high - low
        of = np.repeat(np.arange(len(low)), many)
        at = np.arange(len(of)) + np.repeat(low - np.cumsum(many) + many, many)
        for name in given.key[1:]:
            same = pc.equal(stored[name].take(pa.array(at)), came[name].take(pa.array(of))).to_numpy()
            at, of = at[same], of[same]
        found.append(begin + at[not_older(came.take(pa.array(of)), stored.take(pa.array(at)), given.spec.order_by)])
    return np.concatenate(found)


def by_sort(given: Given) -> Any:
    """Block and incoming rows are sorted together, as `lakeupsert.engine.arrow` does."""
    found = []
    for begin, stored, came in blocks(given, None):
        found.append(begin + beaten(stored, np.arange(stored.num_rows), came, given))
    return np.concatenate(found)


def by_join(given: Given) -> Any:
    """`index_in` where the key is one column, Arrow's hash join where it has several."""
    found = []
    for begin, stored, came in blocks(given, None):
        if len(given.key) == 1:
            index = pc.index_in(stored[given.key[0]], came[given.key[0]].combine_chunks())
            at = np.flatnonzero(pc.is_valid(index).to_numpy())
            pairs = came.take(index.take(pa.array(at)))
        else:
            numbered = stored.select(given.key).append_column("at", pa.array(np.arange(stored.num_rows)))
            came = came.append_column("of", pa.array(np.arange(came.num_rows)))
            joined = numbered.join(came.select([*given.key, "of"]), given.key, join_type="inner", use_threads=False)
            at, pairs = joined["at"].to_numpy(), came.take(joined["of"])
        found.append(begin + at[not_older(pairs, stored.take(at), given.spec.order_by)])
    return np.sort(np.concatenate(found))


def by_duckdb(given: Given) -> Any:
    db = _duckdb(given)
    on = " AND ".join(f"b.{k} = i.{k}" for k in given.key)
    return np.sort(
        db.execute(
            f"SELECT file_row_number AS at FROM read_parquet('{given.path}', file_row_number = true) b "
            f"JOIN incoming i ON {on} WHERE i.{ORDER} >= b.{ORDER}"
        ).fetchnumpy()["at"]
    )


def by_polars(given: Given) -> Any:
    import polars as pl

    came = pl.from_arrow(given.incoming.select(given.narrow.names)).lazy()
    base = pl.scan_parquet(given.path, row_index_name="at").select("at", *given.narrow.names)
    joined = base.join(came, on=given.key, how="inner", suffix="_new").filter(pl.col(f"{ORDER}_new") >= pl.col(ORDER))
    return np.sort(joined.select("at").collect(engine="streaming")["at"].to_numpy())


POSITIONS = {
    "floor": floor,
    "arrow is_in": by_is_in,
    "arrow search": by_search,
    "arrow sort": by_sort,
    "arrow join": by_join,
    "is_in, large blocks": partial(by_is_in, rows=LARGE),
    "search, large blocks": partial(by_search, rows=LARGE),
    "search_sorted": by_search_sorted,
    "duckdb": by_duckdb,
    "polars": by_polars,
}


# ---------------------------------------------------------------- rewrite


def _task(given: Given) -> MergeTask:
    described = json.loads((given.case.folder / "incoming.json").read_text())
    described.pop("new")
    name = f"../{given.case.folder.name}/{described['name']}"
    return MergeTask(PARTITION, (given.base,), (), ((DataFile(**{**described, "name": name}),),), 2, 1)


class _Store(LocalStore):
    """Reads below build/kernels/data, writes into a folder of its own."""

    def __init__(self, given: Given) -> None:
        super().__init__(given.out)
        self._data = given.store

    def open(self, name: str) -> Any:
        return pa.OSFile(str(WORK / "data/bases" / name))


def rewritten_by_engine(given: Given) -> None:
    ArrowEngine().merge(_Store(given), given.spec, 0, [_task(given)])


def rewritten_by_search(given: Given) -> None:
    """As the engine does it, but incoming rows are looked up in the block and put in their places: nothing is sorted."""
    store, task = _Store(given), _task(given)
    rest = read_file(store, task.batches[0][0], given.spec.stored_schema)
    with MergeWriter(store, given.spec, 0, task, Rules(given.spec, task), Tally()) as out:
        for stored in stream_file(store, given.base, given.spec.stored_schema):
            met = count_rows_up_to(rest, given.key, [stored[name][-1] for name in given.key])
            came, rest = rest.slice(0, met), rest.slice(met)
            if not met:
                out.live.write(stored)
                continue
            at, same = searched(stored, came, given.key)
            wins = ~same
            wins[same] = not_older(came.filter(pa.array(same)), stored.take(at[same]), given.spec.order_by)
            index = np.arange(stored.num_rows)
            index[at[same & wins]] = stored.num_rows + np.flatnonzero(same & wins)
            index = np.insert(index, at[~same], stored.num_rows + np.flatnonzero(~same))
            out.live.write(pa.concat_tables([stored, came]).take(pa.array(index)))
        out.live.write(rest)


def rewritten_by_duckdb(given: Given) -> None:
    db, keys_ = _duckdb(given), ", ".join(given.key)
    given.out.mkdir(parents=True)
    base = f"read_parquet('{given.path}')"
    db.execute(
        f"CREATE TEMP TABLE won AS SELECT i.* FROM incoming i LEFT JOIN "
        f"(SELECT b.* FROM (SELECT {keys_}, {ORDER} FROM {base}) b SEMI JOIN incoming USING ({keys_})) s "
        f"USING ({keys_}) WHERE s.{ORDER} IS NULL OR i.{ORDER} >= s.{ORDER}"
    )
    db.execute(
        f"COPY (FROM (FROM {base} b ANTI JOIN won USING ({keys_})) UNION ALL BY NAME FROM won ORDER BY {keys_}) "
        f"TO '{given.out}/out.parquet' (COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE {GROUP_ROWS})"
    )


def rewritten_by_polars(given: Given) -> None:
    import polars as pl

    given.out.mkdir(parents=True)
    came, base = pl.from_arrow(given.incoming).lazy(), pl.scan_parquet(given.path)
    met = base.select(given.narrow.names).join(came.select(given.key), on=given.key, how="semi")
    won = came.join(met.rename({ORDER: "old"}), on=given.key, how="left")
    won = won.filter(pl.col("old").is_null() | (pl.col(ORDER) >= pl.col("old"))).drop("old").collect().lazy()
    kept = base.join(won.select(given.key), on=given.key, how="anti")
    pl.concat([kept, won.select(given.spec.stored_schema.names)]).sort(given.key).sink_parquet(
        given.out / "out.parquet", compression="zstd", compression_level=1, row_group_size=GROUP_ROWS
    )


def copied(given: Given) -> None:
    """Reading and writing every row with Arrow, and nothing else."""
    task = _task(given)
    with MergeWriter(_Store(given), given.spec, 0, task, Rules(given.spec, task), Tally()) as out:
        for stored in stream_file(given.store, given.base, given.spec.stored_schema):
            out.live.write(stored)


REWRITE = {
    "floor": copied,
    "arrow engine": rewritten_by_engine,
    "arrow search": rewritten_by_search,
    "duckdb": rewritten_by_duckdb,
    "polars": rewritten_by_polars,
}


def _duckdb(given: Given) -> Any:
    import duckdb

    db = duckdb.connect(config={"threads": 1})
    db.register("incoming", given.incoming)
    return db


# ---------------------------------------------------------------- row groups of which statistics tell enough


def pruned(given: Given) -> Any:
    """As `by_search`, but only of row groups between whose least and greatest first key column an incoming key falls."""
    found = [np.empty(0, np.int64)]
    incoming = given.incoming.select(given.narrow.names)
    with pq.ParquetFile(given.path, pre_buffer=True) as parquet:
        for group, begin, within in met(given, parquet):
            came = incoming.filter(within)
            stored = parquet.read_row_group(group, columns=given.narrow.names, use_threads=False)
            at, same = searched(stored, came, given.key)
            at, came = at[same], came.filter(pa.array(same))
            found.append(begin + at[not_older(came, stored.take(at), given.spec.order_by)])
    return np.concatenate(found)


def met(given: Given, parquet: Any) -> Iterator[tuple[int, int, Any]]:
    """Row groups that may hold an incoming key by their statistics: number, first row, mask of the incoming rows."""
    first, begin = given.incoming[given.key[0]], 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        extremes = group.column(0).statistics
        within = pc.and_(pc.greater_equal(first, extremes.min), pc.less_equal(first, extremes.max))
        if pc.any(within).as_py():
            yield number, begin, within
        begin += group.num_rows


TASKS: dict[str, dict[str, Callable[[Given], Any]]] = {
    "positions": POSITIONS,
    "rewrite": REWRITE,
    "pruned": {"all row groups": by_search, "pruned": pruned},
}


# ---------------------------------------------------------------- hashes of keys


def hashes() -> list[dict[str, Any]]:
    rows = 1_000_000
    numbers = np.random.default_rng(4).permutation(rows)
    text = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 12, "0")
    lines = pa.array((numbers % 9).astype(np.int32))
    some = pa.array(np.array(["x" * n for n in range(11)])[numbers % 11])
    of_20, of_16 = (pc.binary_join_element_wise(head, text, "") for head in ("order-at", "ord-"))
    of_many = pc.binary_join_element_wise("ord", some, text, "")
    keys_ = {
        "int64": [pa.array(numbers)],
        "int64, int32": [pa.array(numbers), lines],
        "text of 20 bytes": [of_20],
        "text of 15 to 25 bytes": [of_many],
        "text of 16 bytes, int32": [of_16, lines],
        "text of 15 to 25 bytes, int32": [of_many, lines],
        "text of 20 bytes, text of 16 bytes": [of_20, of_16],
        "decimal128(20, 0)": [pa.array(numbers).cast(pa.decimal128(20, 0))],
    }
    found = []
    for name, columns in keys_.items():
        key = pa.table(columns, [f"k{i}" for i in range(len(columns))])
        schema = key.schema.append(pa.field("ts", pa.int64())).append(pa.field("day", pa.date32()))
        spec = create(
            schema,
            table_id="t",
            key=key.schema.names,
            order_by=["ts"],
            partition_by=["day"],
            delete=None,
            stamped=False,
        )
        key_hashes(key, spec)
        seconds = []
        for _ in range(15):
            begun = time.process_time()
            key_hashes(key, spec)
            seconds.append(time.process_time() - begun)
        rates = [round(rows / s / 1e6, 1) for s in (min(seconds), statistics.median(seconds))]
        found.append({"key": name, "million keys a second and core": rates[0], "median of 15": rates[1]})
    return found


# ---------------------------------------------------------------- sketches of keys


def sketches(columns: int) -> list[dict[str, Any]]:
    """What a Bloom filter of a base's keys weighs (10 bits a key: one new key in a hundred is taken for a stored one).

    Beside it what it would save reading: key and ordering columns, as they are stored.
    """
    rows = 1_000_000
    found = []
    for kind in KEYS:
        case = Case(rows, columns, kind, rows // 100)
        make(case)
        found.append((kind, WORK / f"data/bases/{case.base}.parquet", len(KEYS[kind]) + 1))
    spec, chance = spec_of(Case(0, 3, "text", 0)), np.random.default_rng(5)
    numbers = np.sort(chance.integers(0, 2**63, rows))
    times = pa.array(stamps(numbers)).cast(pa.timestamp("us"))
    at_random = pa.table([[f"{n:016x}" for n in numbers], times], spec.tombstone_schema.names)
    shutil.rmtree(WORK / "data/random", ignore_errors=True)
    written(WORK / "data/random", "random.parquet", iter([at_random]), spec.tombstone_schema, spec)
    found.append(("text, random digits", WORK / "data/random/random.parquet", 2))
    table_ = []
    for name, path, narrow in found:
        with pq.ParquetFile(path) as parquet:
            groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
            saved = sum(group.column(i).total_compressed_size for group in groups for i in range(narrow))
        table_.append({"key": name, "key and ordering columns, bytes a row": round(saved / rows, 2), "filter": 10 / 8})
    return table_


# ---------------------------------------------------------------- one kernel, in its own process


def measure(task: str, kernel: str, case: Case, repeat: int) -> dict[str, Any]:
    pa.set_cpu_count(1)
    if kernel in PEERS:
        importlib.import_module(kernel)
    given, do = Given(case), TASKS[task][kernel]
    small = Given(Case(10_000, case.columns, case.key, 100))  # what only a first call costs is not the kernel's
    _run(do, small)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, seconds, cpu = peak_bytes(), [], []
    for number in range(repeat):
        shutil.rmtree(given.out, ignore_errors=True)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        answer = do(given)
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - begun_cpu)
        if number == 0:
            peak = peak_bytes() - before
    if kernel != "floor":
        _check(task, given, answer)
    shutil.rmtree(given.out, ignore_errors=True)
    with pq.ParquetFile(given.path) as parquet:
        groups = [len(list(met(given, parquet))), parquet.num_row_groups]
    return {
        "row_groups": groups,
        "seconds": statistics.median(seconds),
        "cpu": statistics.median(cpu),
        "mb": peak / 1e6,
        "repeat": repeat,
    }


def _run(do: Callable[[Given], Any], given: Given) -> None:
    do(given)
    shutil.rmtree(given.out, ignore_errors=True)


def _check(task: str, given: Given, answer: Any) -> None:
    expected = np.load(given.case.folder / "expected.npy")
    if task != "rewrite":
        assert np.array_equal(answer, expected), "other positions"
        return
    columns = [*given.narrow.names, "c0"]
    base, came, out = (
        pq.read_table(path, columns=columns, partitioning=None)
        for path in (given.path, given.incoming_file, next(given.out.rglob("*.parquet")))
    )
    won, lost = came.filter(pa.array(np.load(given.case.folder / "won.npy"))), base.take(pa.array(expected))
    assert out.num_rows == base.num_rows - lost.num_rows + won.num_rows, "other rows"
    for name in (ORDER, "c0"):
        sums = [pc.sum(t[name].cast(pa.int64())).as_py() for t in (base, lost, won, out)]
        assert sums[3] == sums[0] - sums[1] + sums[2], f"other values of {name}"
    by_key = pc.sort_indices(out, [(name, "ascending") for name in given.key])
    assert np.array_equal(by_key, np.arange(out.num_rows)), "not in key order"


# ---------------------------------------------------------------- a guard: kernels beside pyarrow in the same run


def rewritten_by_pyarrow(given: Given) -> None:
    given.out.mkdir(parents=True)
    pq.write_table(
        pq.read_table(given.path, use_threads=False, partitioning=None),
        given.out / "out.parquet",
        compression="zstd",
        compression_level=1,
    )


def guard() -> int:
    """Compare kernels with what pyarrow alone does with the same rows, by processor time. Returns 1 if one takes far longer.

    Bounds are less than twice what was measured, so a merge that does its work twice fails. No noise of a machine reaches them:
    processor time of a kernel and of what it is compared with grow together.
    """
    pa.set_cpu_count(1)
    case = Case(400_000, 16, "composite", 4_000)
    make(case)
    given = Given(case)
    stored = pq.read_table(given.path, columns=given.key, partitioning=None).combine_chunks()
    kernels: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {
        "a merge, beside reading and writing its base": (
            partial(rewritten_by_engine, given),
            partial(rewritten_by_pyarrow, given),
            1.7,
        ),
        "hashes of keys, beside dictionaries of them": (
            partial(key_hashes, stored, given.spec),
            lambda: [pc.dictionary_encode(stored[name]) for name in given.key],
            3.0,
        ),
    }
    slow = 0
    for name, (kernel, beside, bound) in kernels.items():
        seconds = [min(_seconds(do, given) for _ in range(4)) for do in (kernel, beside)]
        ratio = seconds[0] / seconds[1]
        slow += ratio > bound
        print(f"{name}: {seconds[0]:.2f} s and {seconds[1]:.2f} s, {ratio:.1f} times as long (at most {bound})")
    return 1 if slow else 0


def _seconds(do: Callable[[], object], given: Given) -> float:
    begun = time.process_time()
    do()
    taken = time.process_time() - begun
    shutil.rmtree(given.out, ignore_errors=True)
    return taken


# ---------------------------------------------------------------- all of them, and the report


def jobs(given: argparse.Namespace) -> Iterator[tuple[str, str, Case, int]]:
    """Task, kernel, case, repetitions."""
    for task in given.tasks:
        for case in cases(task, given):
            repeat = 15 if case.rows <= 10_000 else 1 if task == "rewrite" and case.rows * case.columns > 10**8 else 3
            for kernel in TASKS[task]:
                yield task, kernel, case, repeat


def cases(task: str, given: argparse.Namespace) -> Iterator[Case]:
    largest = max(given.rows)
    if task == "pruned":
        for columns in given.columns:
            for clustered in (True, False):
                for incoming in (10, largest // 1000):
                    yield Case(largest, columns, "composite", incoming, clustered)
        return
    for rows in given.rows:
        for columns in given.columns:
            for key in KEYS:
                yield Case(rows, columns, key, rows // 100)
    if task == "positions" and largest > 1_000_000:
        yield Case(largest, min(given.columns), "composite", 10_000)
        yield Case(1_000_000, min(given.columns), "composite", 300_000)


FIGURES = ("sketches", "hashes", "weight")


def weight() -> list[dict[str, Any]]:
    """What a library adds to an installation, and to the start of a process that has pyarrow."""
    found = []
    for name in PEERS:
        script = f"import time, pyarrow.parquet; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
        seconds = [float(_python(["-c", script]).stdout) for _ in range(5)]
        size = sum(f.stat().st_size for f in (WORK / "peers" / name).rglob("*") if f.is_file())
        installed = _python(["-c", f"from importlib.metadata import version; print(version('{name}'))"]).stdout.strip()
        found.append(
            {
                "library": f"{name} {installed}",
                "MB": round(size / 1e6),
                "import, s": round(statistics.median(seconds), 2),
            }
        )
    return found


def install() -> None:
    for name in PEERS:
        folder = WORK / "peers" / name
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--target", str(folder), name], check=True)


def _python(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    paths = [str(WORK.absolute() / "peers" / name) for name in PEERS]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *paths]), "POLARS_MAX_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=env)


def markdown(report: dict[str, Any]) -> str:
    lines = ["# Kernels of a merge", "", f"`python -m benchmarks.kernels`, {report['machine']}.", ""]
    for task, kernels in TASKS.items():
        lines += [f"## {task}", ""]
        head = ["stored x columns, key, incoming", *kernels]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        found: dict[str, dict[str, Any]] = {}
        for measured in report["measured"].values():
            if measured["task"] == task:
                case = Case(**measured["case"])
                text = f"{case.rows:,} x {case.columns}, {case.key}, {case.incoming:,}{' clustered' * case.clustered}"
                found.setdefault(text, {})[measured["kernel"]] = measured
        for text, of_case in found.items():
            cells = [
                f"{m['cpu']:.3g} s ({m['seconds']:.3g}), {m['mb']:.0f} MB" if (m := of_case.get(k)) else ""
                for k in kernels
            ]
            if task == "pruned":
                text += ": {} of {} row groups".format(*next(iter(of_case.values()))["row_groups"])
            lines.append(f"| {text} | {' | '.join(cells)} |")
        lines.append("")
    for title in FIGURES:
        rows = report.get(title, [])
        if rows:
            lines += [f"## {title}", "", f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
            lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows] + [""]
    lines.append("Processor time (wall time), peak memory.")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, *FIGURES], choices=[*TASKS, *FIGURES])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 5_000_000])
    parser.add_argument("--columns", type=int, nargs="+", default=[16, 100])
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    parser.add_argument(
        "--guard", action="store_true", help="only: no kernel is far slower than pyarrow allows; seconds"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.guard:
        return guard()
    if given.one:
        task, kernel, case, repeat = json.loads(given.one)
        print(json.dumps(hashes() if task == "hashes" else measure(task, kernel, Case(**case), repeat)))
        return 0
    install()
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "kernels.json"
    report: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"measured": {}}
    report["machine"] = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"pyarrow {version('pyarrow')}, numpy {version('numpy')}"
    )
    if "weight" in given.tasks:
        report["weight"] = weight()
    if "sketches" in given.tasks:
        report["sketches"] = sketches(min(given.columns))
    if "hashes" in given.tasks:
        report["hashes"] = json.loads(_one("hashes", "", {}, 0))
    given.tasks = [task for task in given.tasks if task in TASKS]
    for task, kernel, case, repeat in jobs(given):
        name = f"{task}, {kernel}, {case}"
        if name in report["measured"] and not given.again:
            continue
        make(case)
        make(Case(10_000, case.columns, case.key, 100))
        measured = json.loads(_one(task, kernel, case._asdict(), repeat))
        report["measured"][name] = {"task": task, "kernel": kernel, "case": case._asdict(), **measured}
        kept.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {measured}", flush=True)
    kept.write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "kernels.md").write_text(markdown(report))
    print(markdown(report))
    return 0


def _one(task: str, kernel: str, case: dict[str, Any], repeat: int) -> str:
    return _python(["-m", "benchmarks.kernels", "--one", json.dumps([task, kernel, case, repeat])]).stdout.splitlines()[
        -1
    ]


if __name__ == "__main__":
    sys.exit(main())
