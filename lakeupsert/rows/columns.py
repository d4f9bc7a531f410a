"""Mode columns: each column of a row has the value of the record of greatest rank that brings that column.

A record contributes one part to its row: the columns that it brings, and its order. The parts of a key are sorted by rank, and
each column takes its value from the first part that brings it. A delete brings every column, without a value. A group of columns
has an ordering of its own, so a record has one rank in each group that it brings.

A stored row holds the values and the parts that they come from: `HAS` lists the columns of the part with the row's own order,
`OLDER` lists the other parts with their orders. No two parts of a row share a column. So their order of arrival no longer
matters, and a late record can be compared with exactly the part that it would replace.

A row that followed its key from another partition is carried: it has all that was known of the key. What its new partition had
of the key before counts no more: the delete that an earlier move left there. A delete is carried if what was stored is in
quarantine: updates by the key alone that are newer than the delete, which killed the record that had named their partition.

If keys are unique in the whole table, one more bit of `HAS` says that a record named its partition. It is combined as a column
is, so a row knows by which order its partition was named.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.rank import sort_key, sortable
from lakeupsert.table.roles import Ordering
from lakeupsert.table.spec import DELETE_FLAG, HAS, OLDER, TableSpec

_CARRIED = 0
"""The bit of `HAS` that marks carried rows: field ids count from 1."""


class CombinedRows(NamedTuple):
    """The rows that all keys come to.

    Attributes:
        rows: the rows that were combined, with the new rows that several of them make appended.
        chosen: indices of the resulting rows in ``rows``, in key order.
        uses: which of the n combined rows contribute to a result.
    """

    rows: Rows
    chosen: Indices
    uses: Mask


def find_brought_columns(
    columns: Mapping[str, Column], has: Callable[[str], Mask], spec: TableSpec, named: Mask | None = None
) -> tuple[pa.Array, dict[str, Mask]]:
    """`HAS` of n records, and the records that must be refused, by reason.

    ``has`` returns which records have a column. A record does not bring a group in which its ordering columns are null. In a
    table without groups, null is an order like any other. ``named``: which records name their partition; None: all.
    """
    n = len(next(iter(columns.values())))
    bits = np.zeros((n, spec.last_field_id + 1), bool)
    if spec.naming_id is not None:
        bits[:, spec.naming_id] = True if named is None else named
    refused: dict[str, Mask] = {}
    for ordering, ids in spec.columns_of:
        orders = [o.column for o in ordering]
        ordered: Mask = np.ones(n, bool)
        if spec.groups:
            ordered = np.any([as_mask(columns[name].is_valid()) for name in orders], axis=0)
            has_value = [as_mask(columns[name].is_valid()) for name in ids if name not in orders]
            reason = f"It has values that are ordered by {', '.join(orders)}, and no value in these."
            refused[reason] = ~ordered & np.any([np.zeros(n, bool), *has_value], axis=0)
        for name, id_ in ids.items():
            here = np.ones(n, bool) if name in orders else has(name)
            if spec.nulls == "keep" and name not in orders:
                here = here & as_mask(columns[name].is_valid())
            bits[:, id_] = ordered & here
    if spec.groups:
        refused[f"It has no value in any of {', '.join(spec.all_orders)}."] = ~np.any(bits, axis=1)
    return _pack(bits), refused


def fill_in_brought_columns(rows: Rows, spec: TableSpec, names: Sequence[str]) -> Rows:
    """Fill in `HAS` for rows (of the spec's `base_schema`) from a file that has the columns ``names`` and no `HAS` of its own."""
    columns = {name: rows[name].combine_chunks() for name in spec.stored_schema.names}
    has, _ = find_brought_columns(columns, lambda name: np.full(rows.num_rows, name in names), spec)
    return rows.set_column(rows.schema.get_field_index(HAS), HAS, has)


def brought_columns(rows: Rows, spec: TableSpec) -> Iterator[tuple[list[str], Rows]]:
    """Accepted rows by what they bring: the columns' names, key and order among them, and the rows that bring just these.

    In mode rows these are key and order: only a delete is asked for.
    """
    always = spec.tombstone_schema.names
    if spec.mode == "rows":
        yield always, rows
        return
    encoded = rows[HAS].combine_chunks().dictionary_encode()
    ids = {name: id_ for _, of_group in spec.columns_of for name, id_ in of_group.items()}
    for number, bits in enumerate(_unpack(encoded.dictionary, spec.last_field_id + 1)):
        names = [name for name, id_ in ids.items() if bits[id_]]
        yield list(dict.fromkeys([*always, *names])), rows.filter(pc.equal(encoded.indices, number))


def find_rows_that_bring(rows: Rows, spec: TableSpec, some: Indices) -> dict[str, Mask]:
    """For each column of a table in mode columns: which of n accepted rows, by index, bring it. {} in mode rows, where all do."""
    if spec.mode == "rows":
        return {}
    bits = _unpack(pc.fill_null(rows[HAS].take(some).combine_chunks(), b""), spec.last_field_id + 1)
    return {name: bits[:, id_] for _, of_group in spec.columns_of for name, id_ in of_group.items()}


def mark_carried(rows: Rows, spec: TableSpec) -> Rows:
    """Stored rows as rows that their keys carry to another partition, or deletes as such that all before them counts no more."""
    encoded = pc.fill_null(rows[HAS].combine_chunks(), b"").dictionary_encode()
    bits = _unpack(encoded.dictionary, spec.last_field_id + 1)
    bits[:, _CARRIED] = True
    return rows.set_column(rows.schema.get_field_index(HAS), rows.schema.field(HAS), _pack(bits).take(encoded.indices))


def find_naming(rows: Rows, spec: TableSpec) -> tuple[Mask, pa.StructArray, Mask]:
    """Which of these rows named their partition by their own order; for each row the order by which that was done last, null
    for a deleted key; and which rows are carried."""
    n, lists = rows.num_rows, rows[OLDER].combine_chunks()
    within = lists.flatten()
    has = pa.concat_arrays([rows[HAS].combine_chunks(), within.field("has")])
    encoded = pc.fill_null(has, b"").dictionary_encode()
    named = _unpack(encoded.dictionary, spec.last_field_id + 1)[:, spec.naming_id][encoded.indices.to_numpy()]
    named[:n] &= ~as_mask(rows[DELETE_FLAG])
    source = np.full(n, -1)
    source[lists_parents(lists)[named[n:]]] = n + np.flatnonzero(named[n:])
    source[named[:n]] = np.flatnonzero(named[:n])
    orders = [
        pa.concat_arrays([rows[name].combine_chunks(), within.field(f"o{i}")]).take(pa.array(np.maximum(source, 0)))
        for i, name in enumerate(spec.order_by)
    ]
    last = pa.StructArray.from_arrays(orders, names=list(spec.order_by), mask=pa.array(source < 0))
    return named[:n], last, _find_carried(rows, spec)


def all_named(rows: Rows, spec: TableSpec) -> tuple[Mask, pa.StructArray, Mask]:
    """What `find_naming` returns for adopted rows, which are in the partition that each of them names."""
    orders = [rows[name].combine_chunks() for name in spec.order_by]
    none = np.zeros(rows.num_rows, bool)
    return ~none, pa.StructArray.from_arrays(orders, names=list(spec.order_by)), none


def lists_parents(lists: pa.ListArray) -> Indices:
    """For each value within some lists, the place of its list."""
    return np.repeat(np.arange(len(lists)), pc.fill_null(pc.list_value_length(lists), 0).to_numpy())


def parts_of(rows: Rows, spec: TableSpec) -> Rows:
    """Combined rows as records: each part that is no delete, with what it brings in `HAS` and its order."""
    lists = rows[OLDER].combine_chunks()
    within = lists.flatten()
    some = np.flatnonzero(as_mask(within.field("has").is_valid()))
    older = rows.take(pa.array(lists_parents(lists)[some]))
    values = {HAS: within.field("has"), **{name: within.field(f"o{i}") for i, name in enumerate(spec.order_by)}}
    for name, column in values.items():
        at = older.schema.get_field_index(name)
        older = older.set_column(at, older.schema.field(at), column.take(pa.array(some)))
    return pa.concat_tables([rows, older])


def put_counting_first(rows: Rows, spec: TableSpec, order: Indices, wins: Mask, age: str) -> Indices:
    """``order`` with those rows of a key at its end that came before a carried row: they count no more, whatever their order."""
    if not _find_carried(rows, spec).any():
        return order
    of_key = np.cumsum(wins) - 1
    keys = np.empty(rows.num_rows, np.int64)
    keys[order] = of_key
    counting = _find_counting(rows, spec, keys, age)
    return order[np.lexsort((np.arange(len(order)), ~counting[order], of_key))]


def combine_columns(rows: Rows, spec: TableSpec, order: Indices, wins: Mask, ties: Sequence[str]) -> CombinedRows:
    """Combine the rows of each key into one row.

    ``rows`` have the columns of the spec's `base_schema`, `DELETE_FLAG` and ``ties``; ``order`` and ``wins`` are what
    `rank.sort_by_rank` returns for them. All other columns come from the record of greatest rank. If that is a delete,
    the key becomes a tombstone. The first of ``ties`` says with which batch a row came: those before a carried row have no part.
    """
    tops = order[wins]
    key_of = np.empty(rows.num_rows, np.int64)
    key_of[order] = np.cumsum(wins) - 1
    deleted = as_mask(rows[DELETE_FLAG])
    meet = (np.bincount(key_of, minlength=len(tops)) > 1) & ~deleted[tops]
    uses = np.zeros(rows.num_rows, bool)
    uses[tops] = True
    carries: Mask = np.zeros(len(tops), bool)
    carries[key_of[_find_carried(rows, spec)]] = True
    result, chosen = rows, tops
    if meet.any():
        some = np.flatnonzero(meet[key_of] & _find_counting(rows, spec, key_of, ties[0]))
        merged, of_some = _merge_parts(rows, spec, some, (np.cumsum(meet) - 1)[key_of[some]], tops, meet, ties)
        uses[some] |= of_some
        chosen = rows.num_rows + np.arange(len(tops))
        result = pa.concat_tables([rows, merged])
    if carries.any():  # incoming rows are combined before they meet the stored ones, which do not count
        carried = mark_carried(result.take(pa.array(chosen[carries])), spec)
        chosen[carries] = result.num_rows + np.arange(carried.num_rows)
        result = pa.concat_tables([result, carried])
    return CombinedRows(result, chosen, uses)


def columns_by_record(rows: Rows, spec: TableSpec, ties: Sequence[str]) -> list[list[str]]:
    """For each of these records of one key, the columns whose value in the combined row comes from it (see `combine_columns`)."""
    keys = np.zeros(rows.num_rows, np.int64)
    columns: list[list[str]] = [[] for _ in keys]
    counting = np.flatnonzero(_find_counting(rows, spec, keys, ties[0]))
    parts = _Parts(rows.take(counting), spec, keys[counting])
    for number, (ordering, ids) in enumerate(spec.columns_of):
        ranked = parts.rank(number, ordering, ids, ties)
        if number == 0 and parts.deletes[ranked[0]]:
            break
        for name, id_ in ids.items():
            [won] = parts.find_source(id_, ranked)
            if won >= 0:
                columns[counting[parts.row[won]]].append(name)
    return columns


def _find_counting(rows: Rows, spec: TableSpec, keys: Indices, age: str) -> Mask:
    """The rows that did not come before a carried row of their key. A tombstone that did is combined with the incoming rows."""
    is_carried = _find_carried(rows, spec)
    ages = rows[age].to_numpy()
    since = np.zeros(int(keys.max()) + 1, ages.dtype)
    np.maximum.at(since, keys[is_carried], ages[is_carried])
    counting: Mask = ages >= since[keys]
    return counting


def _find_carried(rows: Rows, spec: TableSpec) -> Mask:
    if spec.key_scope != "table":
        return np.zeros(rows.num_rows, bool)
    encoded = pc.fill_null(rows[HAS].combine_chunks(), b"").dictionary_encode()
    carried: Mask = _unpack(encoded.dictionary, _CARRIED + 1)[encoded.indices.to_numpy(), _CARRIED]
    return carried


def _merge_parts(
    rows: Rows, spec: TableSpec, some: Indices, keys: Indices, tops: Indices, meet: Mask, ties: Sequence[str]
) -> tuple[Rows, Mask]:
    """One row per key, and which of ``some`` rows contribute to the keys that ``meet``, which number them in ``keys``. Each of
    these keys has several rows, the greatest not a delete; the row of any other key is in ``tops``."""
    parts = _Parts(rows.select([HAS, OLDER, DELETE_FLAG, *spec.all_orders, *ties]).take(pa.array(some)), spec, keys)
    bits = np.zeros((parts.count, spec.last_field_id + 1), bool)
    older = np.zeros((len(parts.row), spec.last_field_id + 1), bool)
    kept_delete = np.zeros(len(parts.row), bool)
    uses = np.zeros(len(some), bool)
    values: dict[str, Column] = {}
    newest, first = np.zeros(len(parts.row), np.int64), np.zeros(parts.count, np.int64)

    def take(names: list[str], won: Indices) -> None:
        source, lacks = tops.copy(), np.zeros(len(tops), bool)
        source[meet], lacks[meet] = some[parts.row[won]], won < 0
        values.update(zip(names, rows.select(names).take(pa.array(source, mask=lacks)).columns, strict=True))

    for number, (ordering, named) in enumerate(spec.columns_of):
        ids = named if number or spec.naming_id is None else {**named, "": spec.naming_id}
        ranked = parts.rank(number, ordering, ids, ties)
        top = parts.first(ranked)
        if number == 0:
            first, newest[ranked] = top, np.arange(len(ranked))
            deletes = parts.first(ranked[parts.deletes[ranked]])
            kept_delete[deletes[deletes >= 0]] = True
        for columns in parts.groups(ids):
            id_, *_ = own = list(columns.values())
            won = parts.find_source(id_, ranked)
            alive = won >= 0
            take([name for name in columns if name], won)
            bits[:, own] = (alive & (won == top))[:, None]
            older[won[alive & (won != top)][:, None], own] = True
            uses[parts.row[won[alive]]] = True
    uses[parts.row[first]] = uses[parts.row[kept_delete]] = True
    take([name for name in rows.schema.names if name not in {*values, HAS, OLDER}], first)
    places = np.where(meet, rows.num_rows + np.cumsum(meet) - 1, tops)
    for name, column in ((HAS, _pack(bits)), (OLDER, parts.older(older, kept_delete, newest))):
        values[name] = pa.chunked_array([*rows[name].chunks, column]).take(pa.array(places))
    return pa.table([values[name] for name in rows.schema.names], schema=rows.schema), uses


class _Parts:
    """The parts of some rows: each row's own part, then the older parts of all rows.

    Attributes:
        row: the row of each part.
        deletes: which parts are deletes.
        count: the number of keys.

    ``keys`` numbers the key of each row, from 0 on.
    """

    def __init__(self, rows: Rows, spec: TableSpec, keys: Indices) -> None:
        lists = rows[OLDER].combine_chunks()
        within, parents = lists.flatten(), lists_parents(lists)
        n = rows.num_rows
        self._rows, self._spec = rows, spec
        self.row = np.concatenate([np.arange(n), parents])
        self._keys = keys[self.row]
        self.count = int(keys.max()) + 1
        depth = 1 + np.arange(len(parents)) - np.searchsorted(parents, parents)
        self._depth = np.concatenate([np.zeros(n, np.int64), depth])
        has = pa.concat_arrays([rows[HAS].combine_chunks(), within.field("has")])
        self.deletes = np.concatenate([as_mask(rows[DELETE_FLAG]), as_mask(within.field("has").is_null())])
        self._orders = {
            name: pa.concat_arrays([rows[name].combine_chunks(), within.field(f"o{i}")])
            for i, name in enumerate(spec.all_orders)
        }
        encoded = pc.fill_null(has, b"").dictionary_encode()
        self._bits = _unpack(encoded.dictionary, spec.last_field_id + 1)
        self._codes = encoded.indices.to_numpy()

    def groups(self, ids: Mapping[str, int]) -> Iterable[dict[str, int]]:
        """These columns and their field ids, in groups: every part has all columns of a group or none of them."""
        groups: dict[bytes, dict[str, int]] = {}
        for name, id_ in ids.items():
            groups.setdefault(self._bits[:, id_].tobytes(), {})[name] = id_
        return groups.values()

    def find_source(self, id_: int, ranked: Indices) -> Indices:
        """For each key, the part that supplies the column with this field id; -1 if there is none or if it is a delete."""
        won = self.first(ranked[(self._bits[:, id_][self._codes] | self.deletes)[ranked]])
        return np.where(self.deletes[won], -1, won)

    def first(self, ranked: Indices) -> Indices:
        """For each key, the first of these parts, which are sorted by key; -1 if there is none."""
        places = np.full(self.count, -1)
        keys = self._keys[ranked]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        places[keys[begins]] = ranked[begins]
        return places

    def rank(self, number: int, ordering: Sequence[Ordering], ids: Mapping[str, int], ties: Sequence[str]) -> Indices:
        """The parts that have a rank in group ``number``, by key, greatest rank first. In group 0, the row's own order, every
        record has a rank."""
        brings_one: Mask = np.any(self._bits[:, [*ids.values()]], axis=1)
        some = np.flatnonzero(brings_one[self._codes] | self.deletes | ((self._depth == 0) & (number == 0)))
        columns = {"key": pa.array(self._keys[some])}
        sort_keys = [("key", "ascending", "at_end")]
        for i, o in enumerate(ordering):
            columns[f"o{i}"] = sortable(self._orders[o.column].take(some))
            sort_keys.append(sort_key(f"o{i}", o))
        for name in ties:
            columns[name] = self._rows[name].take(self.row[some])
            sort_keys.append((name, "descending", "at_end"))
        columns["depth"] = pa.array(self._depth[some])
        sort_keys.append(("depth", "ascending", "at_end"))
        order: Indices = pc.sort_indices(pa.table(columns), sort_keys=sort_keys).to_numpy()
        return some[order]

    def older(self, bits: Mask, deletes: Mask, newest: Indices) -> pa.Array:
        """`OLDER` of each key: the parts with a column in ``bits`` and the parts in ``deletes``, in the order of ``newest``."""
        stay = np.flatnonzero(bits.any(axis=1) | deletes)
        of_key = self._keys[stay]
        stay = stay[np.lexsort((newest[stay], of_key))]
        type_ = self._spec.base_schema.field(OLDER).type
        has = _pack(bits[stay])
        has = pc.if_else(pa.array(deletes[stay]), pa.scalar(None, pa.binary()), has)
        orders = [self._orders[name].take(stay) for name in self._spec.all_orders]
        within = pa.StructArray.from_arrays([has, *orders], fields=list(type_.value_type))
        lengths = np.bincount(of_key, minlength=self.count)
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), within, type=type_, mask=pa.array(lengths == 0))


def _pack(bits: Mask) -> pa.Array:
    """One bitmap per row of a matrix, as a binary array; bit n is column n."""
    data = np.packbits(bits, axis=1, bitorder="little")
    ends = np.arange(len(data) + 1, dtype=np.int32) * np.int32(data.shape[1])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers)


def _unpack(bitmaps: pa.Array, width: int) -> Mask:
    """The matrix of `_pack`, with ``width`` columns."""
    size = (width + 7) // 8  # not NumPy's ``count``: an empty bitmap is padded with whatever was in memory
    data = b"".join(bitmap[:size].ljust(size, b"\0") for bitmap in bitmaps.to_pylist())
    matrix = np.frombuffer(data, np.uint8).reshape(-1, size)
    return np.unpackbits(matrix, axis=1, bitorder="little")[:, :width].view(bool)
