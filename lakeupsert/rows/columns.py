"""Rows of which each column has the value of the record of greatest rank that brings it (`mode = "columns"`).

What a record contributes to its row is a part: the columns that it brings, and its order. Of a key's parts, sorted by rank,
each column takes the first that brings it; a delete brings every column, without a value. A group of columns is ordered by
itself, so a record has a rank in each group that it brings. A stored row is the values, and of which parts they are: in `HAS`
those of the row's own order, in `OLDER` the others, with their orders. No two parts of a row have a column in common, so
which arrived first matters no more, and a record that comes late finds whom it has to beat.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.convert import true
from lakeupsert.rows.rank import sortable
from lakeupsert.table.spec import DELETE_FLAG, HAS, OLDER, Ordering, TableSpec


def brought(columns: Mapping[str, Any], has: Callable[[str], Any], spec: TableSpec) -> tuple[Any, dict[str, Any]]:
    """`HAS` of n records with these columns, and for each reason why some can't be taken, which these are (numpy, n).

    ``has`` tells for a column which records have it (numpy, n). A group without an order is not brought; where there are no
    groups, null is an order as any.
    """
    n = len(next(iter(columns.values())))
    bits = np.zeros((n, spec.last_field_id + 1), bool)
    refused: dict[str, Any] = {}
    for ordering, ids in spec.columns_of:
        orders = [o.column for o in ordering]
        ordered = np.ones(n, bool)
        if spec.groups:
            ordered = np.logical_or.reduce([true(columns[name].is_valid()) for name in orders])
            has_value = [true(columns[name].is_valid()) for name in ids if name not in orders]
            reason = f"It has values that are ordered by {', '.join(orders)}, and none there."
            refused[reason] = ~ordered & np.logical_or.reduce([np.zeros(n, bool), *has_value])
        for name, id_ in ids.items():
            here = np.ones(n, bool) if name in orders else has(name)
            if spec.nulls == "keep" and name not in orders:
                here = here & true(columns[name].is_valid())
            bits[:, id_] = ordered & here
    if spec.groups:
        refused[f"It has no value in any of {', '.join(spec.all_orders)}."] = ~bits.any(axis=1)
    return _packed(bits), refused


def with_brought(rows: Any, spec: TableSpec, names: Sequence[str]) -> Any:
    """Rows (the spec's `base_schema`) of a file that has these columns and does not say what they bring, with `HAS`."""
    columns = {name: rows[name].combine_chunks() for name in spec.stored_schema.names}
    has, _ = brought(columns, lambda name: np.full(rows.num_rows, name in names), spec)
    return rows.set_column(rows.schema.get_field_index(HAS), HAS, has)


def combined(rows: Any, spec: TableSpec, order: Any, wins: Any, ties: Sequence[str]) -> tuple[Any, Any, Any]:
    """What every key comes to: a table, indices of these rows in key order, and which of n rows are in it (numpy, n).

    ``rows``: the columns of the spec's `base_schema`, `DELETE_FLAG` and ``ties``; ``order`` and ``wins`` are what `rank.latest`
    says of them. A row has all other columns of the record of greatest rank; where that is a delete, the key is a tombstone.
    """
    places, first = order.to_numpy().astype(np.int64), true(wins)
    tops = places[first]
    key_of = np.empty(rows.num_rows, np.int64)
    key_of[places] = np.cumsum(first) - 1
    deleted = true(rows[DELETE_FLAG])
    meet = (np.bincount(key_of, minlength=len(tops)) > 1) & ~deleted[tops]
    uses = np.zeros(rows.num_rows, bool)
    uses[tops] = True
    if not meet.any():
        return rows, pa.array(tops), uses
    some = np.flatnonzero(meet[key_of])
    number = np.cumsum(meet) - 1
    merged, of_some = _merged(rows.take(some), spec, number[key_of[some]], ties)
    uses[some] |= of_some
    found = np.where(meet, rows.num_rows + number, tops)
    return pa.concat_tables([rows, merged]), pa.array(found), uses


def given(rows: Any, spec: TableSpec, ties: Sequence[str]) -> list[list[str]]:
    """Which columns of what they come to each of these records of one key, as in `combined`, has given."""
    parts = _Parts(rows, spec, np.zeros(rows.num_rows, np.int64))
    found: list[list[str]] = [[] for _ in range(rows.num_rows)]
    for number, (ordering, ids) in enumerate(spec.columns_of):
        ranked = parts.ranked(number, ordering, ids, ties)
        if number == 0 and parts.deletes[ranked[0]]:
            break
        for name, id_ in ids.items():
            [won] = parts.giving(id_, ranked)
            if won >= 0:
                found[parts.row[won]].append(name)
    return found


def _merged(rows: Any, spec: TableSpec, keys: Any, ties: Sequence[str]) -> tuple[Any, Any]:
    """`combined` of rows with keys 0, 1, …, each of several rows, the greatest of them no delete."""
    parts = _Parts(rows, spec, keys)
    count = int(keys.max()) + 1
    bits = np.zeros((count, spec.last_field_id + 1), bool)
    older = np.zeros((len(parts.row), spec.last_field_id + 1), bool)
    kept_delete = np.zeros(len(parts.row), bool)
    uses = np.zeros(rows.num_rows, bool)
    values: dict[str, Any] = {}
    newest = np.zeros(len(parts.row), np.int64)
    tops = np.zeros(count, np.int64)
    for number, (ordering, ids) in enumerate(spec.columns_of):
        ranked = parts.ranked(number, ordering, ids, ties)
        top = parts.first(ranked, np.ones(len(ranked), bool))
        if number == 0:
            tops, newest[ranked] = top, np.arange(len(ranked))
            deletes = parts.first(ranked, parts.deletes[ranked])
            kept_delete[deletes[deletes >= 0]] = True
        for name, id_ in ids.items():
            won = parts.giving(id_, ranked)
            alive = won >= 0
            values[name] = rows[name].take(pa.array(np.where(alive, parts.row[won], 0), mask=~alive))
            bits[:, id_] = alive & (won == top)
            older[won[alive & (won != top)], id_] = True
            uses[parts.row[won[alive]]] = True
    uses[parts.row[tops]] = True
    uses[parts.row[kept_delete]] = True
    merged = rows.take(parts.row[tops])
    values |= {HAS: _packed(bits), OLDER: parts.older(older, kept_delete, newest)}
    names = merged.schema.names
    return pa.table([values.get(name, merged[name]) for name in names], schema=merged.schema), uses


class _Parts:
    """The parts of some rows: each row's own, then the older ones of all. ``row`` is each part's, ``deletes`` tells of deletes.

    ``keys`` has a number for each row's key, from 0 on.
    """

    def __init__(self, rows: Any, spec: TableSpec, keys: Any) -> None:
        lists = rows[OLDER].combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        within = lists.flatten()
        n = rows.num_rows
        self._rows, self._spec = rows, spec
        self.row = np.concatenate([np.arange(n), np.repeat(np.arange(n), lengths)])
        self._keys = keys[self.row]
        self._count = int(keys.max()) + 1
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._depth = np.concatenate([np.zeros(n, np.int64), 1 + np.arange(len(within)) - begins])
        has = pa.concat_arrays([rows[HAS].combine_chunks(), within.field("has")])
        self.deletes = np.concatenate([true(rows[DELETE_FLAG]), true(within.field("has").is_null())])
        self._orders = {
            name: pa.concat_arrays([rows[name].combine_chunks(), within.field(f"o{i}")])
            for i, name in enumerate(spec.all_orders)
        }
        encoded = pc.fill_null(has, b"").dictionary_encode()
        self._bits = _unpacked(encoded.dictionary, spec.last_field_id + 1)
        self._codes = encoded.indices.to_numpy()

    def giving(self, id_: int, ranked: Any) -> Any:
        """For each key which part gives it the column with this field id; -1: none, or a delete, which gives no value."""
        won = self.first(ranked, (self._bits[:, id_][self._codes] | self.deletes)[ranked])
        return np.where(self.deletes[won], -1, won)

    def first(self, ranked: Any, which: Any) -> Any:
        """For each key the first of parts, in the order of `ranked`, of which ``which`` (numpy) holds; -1: none."""
        found = np.full(self._count, -1)
        some = ranked[which]
        keys = self._keys[some]
        begins = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
        found[keys[begins]] = some[begins]
        return found

    def ranked(self, number: int, ordering: Sequence[Ordering], ids: Mapping[str, int], ties: Sequence[str]) -> Any:
        """The parts with a rank in a group, by their keys, the greatest rank first; each record has one in the row's order."""
        has = self._bits[:, list(ids.values())].any(axis=1)[self._codes] | self.deletes
        some = np.flatnonzero(has | (self._depth == 0)) if number == 0 else np.flatnonzero(has)
        columns = {"key": pa.array(self._keys[some])}
        sort_keys = [("key", "ascending", "at_end")]
        for i, o in enumerate(ordering):
            columns[f"o{i}"] = sortable(self._orders[o.column].take(some))
            direction = "ascending" if o.ascending else "descending"
            sort_keys.append((f"o{i}", direction, "at_start" if o.nulls_first else "at_end"))
        for name in ties:
            columns[name] = self._rows[name].take(self.row[some])
            sort_keys.append((name, "descending", "at_end"))
        columns["depth"] = pa.array(self._depth[some])
        sort_keys.append(("depth", "ascending", "at_end"))
        return some[pc.sort_indices(pa.table(columns), sort_keys=sort_keys).to_numpy()]

    def older(self, bits: Any, deletes: Any, newest: Any) -> Any:
        """`OLDER` of each key: of these parts their columns, newest first, and those that are deletes."""
        stay = np.flatnonzero(bits.any(axis=1) | deletes)
        of_key = self._keys[stay]
        stay = stay[np.lexsort((newest[stay], of_key))]
        type_ = self._spec.base_schema.field(OLDER).type
        has = _packed(bits[stay])
        has = pc.if_else(pa.array(deletes[stay]), pa.scalar(None, pa.binary()), has)
        orders = [self._orders[name].take(stay) for name in self._spec.all_orders]
        within = pa.StructArray.from_arrays([has, *orders], fields=list(type_.value_type))
        lengths = np.bincount(of_key, minlength=self._count)
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), within, type=type_, mask=pa.array(lengths == 0))


def _packed(bits: Any) -> Any:
    """A bitmap for each row of a matrix, bit n its column n, as a binary array."""
    data = np.packbits(bits, axis=1, bitorder="little")
    ends = np.arange(len(data) + 1, dtype=np.int32) * np.int32(data.shape[1])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers)


def _unpacked(bitmaps: Any, width: int) -> Any:
    """The matrix of `_packed`, so wide."""
    found = np.zeros((len(bitmaps), width), bool)
    for row, bitmap in zip(found, bitmaps.to_pylist(), strict=True):
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:width]
        row[: len(bits)] = bits.astype(bool)
    return found
