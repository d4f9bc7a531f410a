"""Rebuild the key index from all rows that count at a ledger number.

Reads     all live rows and deletes of the partitions' files: their keys and orders
Writes    the index. While tasks of a host rebuild it, packs that go from one task to another
Repeat    safe: every object has a new name, and the same ledger gives the same index

    all rows -> spill, or on a host with tasks: packs in pieces -> for each range: settle by rank -> the index
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.cut import HeldPieces, write_packs
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.keys.carry import Source
from lakeupsert.engine.keys.index import (
    HASH,
    NAMED,
    NAMING,
    IndexTarget,
    add_hashes,
    arrived_schema,
    naming_fields,
    with_naming_order,
    without_order,
    write_index,
)
from lakeupsert.engine.keys.spill import Ranges, ranges_of
from lakeupsert.engine.merge import AGE
from lakeupsert.engine.runs import runs
from lakeupsert.errors import RefusedError
from lakeupsert.landing.adopted import refuse_null_keys
from lakeupsert.rows.arrays import Rows, repeat, with_column
from lakeupsert.rows.columns import all_named, find_naming
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import POSITION, read_file, stream_file
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile, Part, TombstoneFile
from lakeupsert.table.spec import DELETE_FLAG, FILE, HAS, OLDER, PLACE, TableSpec

RUN_ROWS = 1 << 20
"""Rows of the files that a task of a host cuts, at least. Only key and order are read of them, so their bytes say little."""
CUT_BYTES = 64 << 20
"""Compressed bytes that such a task holds before it writes them. More: fewer and larger pieces. Less: memory."""
MOST_RUNS = 512
"""Larger tables are cut by about so many tasks. Each range reads a piece of each. More: requests. Fewer: cores wait."""
FILE_ROWS = 1 << 12
"""A file with fewer rows counts as so many, because it is opened."""
FILES_A_CALL = 1 << 14
"""So many files are handed to the host at a time, and so many the driver holds."""
_ALIVE = "_lakeupsert_alive"
_CARRIED = "_lakeupsert_carried"


@dataclass(frozen=True)
class _Ranked:
    """A range after its rows were ranked.

    Attributes:
        files: its part of the index.
        several: rows of keys that have one in another partition, too; then there are no files.
        example: one of these rows, for people.
    """

    files: tuple[DataFile, ...] = ()
    several: int = 0
    example: str = ""


def rebuild_index(
    to: IndexTarget, host: Host, sources: Iterable[Source], rows: int, discard: Callable[[Iterable[str]], None]
) -> tuple[DataFile, ...]:
    """Rebuild the index from all live rows and deletes in these files, about ``rows``; files of a partition rank by their age.

    ``discard`` gets the objects that are left over. Raises RefusedError if a key has rows in several partitions.
    """
    ranges = ranges_of(rows)
    if host.in_process or len(ranges) == 1:
        ranked = _rank_here(to, sources, rows)
    else:
        ranked = _rank_on_host(to, host, sources, rows, discard)
    files = tuple(file for of_range in ranked for file in of_range.files)
    wrong = [of_range for of_range in ranked if of_range.several]
    if wrong:
        discard([file.name for file in files])
        raise RefusedError(
            "key-in-several-partitions",
            f"At least {sum(of_range.several for of_range in wrong)} keys have a row in several partitions, for example "
            f'{wrong[0].example}. With `key_scope = "table"` a key has one row. Nothing was changed.',
            next='leave one row of each key in these files, or set `key_scope = "partition"`',
        )
    return files


def _rank_here(to: IndexTarget, sources: Iterable[Source], rows: int) -> list[_Ranked]:
    with Ranges(rows) as spilled:
        for source in sources:
            for block in _source_blocks(to.store, to.spec, source):
                spilled.add(add_hashes(block, to.spec))
        return [_rank(to, range_, spilled.take(range_)) for range_ in spilled.ranges]


def _rank_on_host(
    to: IndexTarget, host: Host, sources: Iterable[Source], rows: int, discard: Callable[[Iterable[str]], None]
) -> list[_Ranked]:
    """The rows go to the tasks of their ranges through packs in the store, which are deleted afterwards."""
    ranges, rebuild = ranges_of(rows), clock.new_id()[:16]
    cut = partial(_cut, to, ranges[0].bits, rebuild)
    packs: list[DataFile] = []
    try:
        for call in runs(sources, lambda source: 1, FILES_A_CALL):
            items = list(runs(call, lambda source: max(source.file.rows, FILE_ROWS), max(RUN_ROWS, rows // MOST_RUNS)))
            sizes = [float(sum(source.file.bytes for source in run)) for run in items]
            for of_run in all_or_raise(map_counted(host, to.store, cut, items, sizes)):
                packs += of_run
        rank = partial(_rank_pieces, to, packs)
        sizes = [float(sum(file.within(range_).bytes for file in packs)) for range_ in ranges]
        return all_or_raise(map_counted(host, to.store, rank, ranges, sizes))
    finally:
        discard(found.name for found in to.store.list(TableObjects.key_cuts(to.start, rebuild)))


def _cut(to: IndexTarget, bits: int, rebuild: str, run: Sequence[Source]) -> tuple[DataFile, ...]:
    """Copy what the index needs of some files into pieces, one for each range."""
    blocks = itertools.chain.from_iterable(_source_blocks(to.store, to.spec, source) for source in run)
    held = HeldPieces(to.spec, _source_schema(to.spec), to.footer("cut"), bits)
    return write_packs(to.store, partial(TableObjects.new_key_cut, to.start, rebuild), blocks, held, CUT_BYTES)


def _rank_pieces(to: IndexTarget, packs: Sequence[DataFile], range_: Part) -> _Ranked:
    pieces = [piece for pack in packs if (piece := pack.within(range_)).rows]
    tables = [read_file(to.store, piece, _source_schema(to.spec)) for piece in pieces]
    return _rank(to, range_, add_hashes(pa.concat_tables(tables), to.spec) if tables else None)


def _rank(to: IndexTarget, range_: Part, rows: Rows | None) -> _Ranked:
    """Write the record of greatest rank of every key, unless a key has a row in several partitions."""
    if rows is None:
        return _Ranked()
    if to.spec.mode == "columns":
        rows = _with_naming(rows, to.spec)
    order, wins = sort_by_rank(rows, to.spec, (AGE, FILE, PLACE), by=[PARTITION])
    best = rows.take(order.filter(wins))
    # When a key moves, the delete that it leaves behind has the same order.
    best = best.append_column(_ALIVE, pa.array((~as_mask(best[DELETE_FLAG])).astype(np.int8)))
    order, wins = sort_by_rank(best, to.spec, (_ALIVE,))
    others = best.take(order.filter(pc.invert(wins)))
    others = others.filter(pc.equal(others[_ALIVE], 1))
    if others.num_rows:
        first = others.slice(0, 1).to_pylist()[0]
        key = " ".join(f"{name}={first[name]}" for name in to.spec.key)
        return _Ranked(several=others.num_rows, example=f"{key} in {first[PARTITION]}")
    best = best.take(order.filter(wins))
    return _Ranked(tuple(write_index(to, range_, best.take(pc.sort_indices(best[HASH])))))


def _with_naming(rows: Rows, spec: TableSpec) -> Rows:
    """The records of a range that count, each with the order by which its key's partition was named last."""
    order, wins = sort_by_rank(rows, without_order(spec), (AGE, FILE, PLACE), by=[PARTITION])
    rows = rows.take(order)
    key = np.cumsum(as_mask(wins)) - 1
    ages, since = rows[AGE].to_numpy(), np.zeros(int(key[-1]) + 1 if len(key) else 0, np.int64)
    carried = as_mask(rows[_CARRIED])
    np.maximum.at(since, key[carried], ages[carried])
    counts = ages >= since[key]
    names = rows.filter(pa.array(counts & as_mask(rows[NAMING].is_valid())))
    last = np.full(len(since), -1)
    if names.num_rows:
        by_rank, first = sort_by_rank(with_naming_order(names, spec), spec, (AGE, FILE, PLACE), by=[PARTITION])
        greatest = by_rank.filter(first).to_numpy()
        places = np.flatnonzero(counts & as_mask(rows[NAMING].is_valid()))[greatest]
        last[key[places]] = places
    own = as_mask(rows[NAMED]) | (last[key] < 0)
    found = rows[NAMING].combine_chunks().take(pa.array(last[key], mask=own))
    return with_column(rows, NAMING, found).filter(pa.array(counts))


def _source_schema(spec: TableSpec) -> pa.Schema:
    ranks = [
        (FILE, pa.int32()),
        (PLACE, pa.int64()),
        (DELETE_FLAG, pa.bool_()),
        (AGE, pa.int64()),
        (PARTITION, pa.string()),
    ]
    carried = [pa.field(_CARRIED, pa.bool_())] if spec.mode == "columns" else []
    return pa.schema([*spec.tombstone_schema, *(pa.field(*rank) for rank in ranks), *naming_fields(spec), *carried])


def _source_blocks(store: ObjectStore, spec: TableSpec, source: Source) -> Iterator[Rows]:
    """The rows of a file with rank and partition."""
    file = source.file
    given = {
        FILE: source.number,
        DELETE_FLAG: isinstance(file, TombstoneFile),
        AGE: source.age,
        PARTITION: source.partition,
    }
    result = _source_schema(spec)
    schema = arrived_schema(spec)
    if not source.age:
        schema = pa.schema([*spec.tombstone_schema, pa.field(POSITION, pa.int64())])
    if spec.mode == "columns" and not source.unsettled:
        schema = pa.schema([*schema, *(spec.base_schema.field(name) for name in (HAS, OLDER))])
    for block in stream_file(store, file, schema):
        if source.unsettled:
            refuse_null_keys(store, file, spec, block, source.partition)
        if PLACE not in block.schema.names:
            block = block.append_column(PLACE, block[POSITION])
        for name, value in given.items():
            if name in result.names and name not in block.schema.names:
                block = block.append_column(name, repeat(value, result.field(name).type, block))
        if spec.mode == "columns":
            naming = all_named(block, spec) if source.unsettled else find_naming(block, spec)
            for name, column in zip((NAMED, NAMING, _CARRIED), naming, strict=True):
                block = block.append_column(name, pa.array(column))
        yield pa.table([block[name] for name in result.names], schema=result)
