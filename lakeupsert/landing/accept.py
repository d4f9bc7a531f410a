"""The rules that a row of a landing file must pass.

Reads     one landing file, block by block; memory follows the block (for Parquet: and a row group, as it is stored; for ORC: a
          stripe)
Writes    nothing: accepted and quarantined rows are handed to the caller
Repeat    safe: the same file gives the same rows at the same places, however it is cut into blocks

    survey -> (the driver plans the spec) -> read_rows -> accepted rows, quarantined rows

A row is refused for the first of these reasons that applies: malformed, missing_column, bad_type, null_key,
bad_partition (also where the partition column alone does not convert), order_missing, future_order. An operation that
nobody declared is told before a null key.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.files import (
    check_unchanged,
    hashed_source,
    kind_of,
    open_blocks,
    read_again,
    required_columns,
    text_of,
    under_table_names,
)
from lakeupsert.landing.formats.blocks import (
    Block,
    ChangedFileError,
    LandingInput,
    UnplannedColumnError,
    UnreadableFileError,
    names_in_file,
)
from lakeupsert.landing.partitions import derived_columns, folder_names, joined_names
from lakeupsert.rows.columns import brought
from lakeupsert.rows.convert import convert, true
from lakeupsert.rows.floor import PARTITION
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.spec import DELETE_FLAG, HAS, PLACE, TableSpec

_LONGEST_REASON = 200
_DAY = 86_400_000_000
_QUARANTINED = pa.schema(
    [
        ("reason_code", pa.string()),
        ("reason", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("raw", pa.string()),
        ("arrow", pa.binary()),
    ]
)


@dataclass(frozen=True)
class RowRules:
    """What decides whether a row is taken; ``received_at`` is the batch's receipt stamp, in microseconds UTC."""

    spec: TableSpec
    received_at: int


@dataclass(frozen=True)
class Rows:
    """One block's rows: each of them is either in ``accepted`` or in ``quarantined`` (both ``pyarrow.Table``)."""

    accepted: Any
    quarantined: Any
    names: dict[str, str]
    """The columns that rows of the block bring, as the table calls them, and as their file does."""


def read_rows(
    store: ObjectStore, file: LandingInput, reading: Reading, rules: RowRules, sha256: Any = None
) -> Iterator[Rows]:
    """The rows of a file, block by block; ``sha256`` (of `hashlib`) takes the whole file's content, read once where possible.

    ``accepted`` has the columns of the spec's `appended_schema`, then ``_lakeupsert_partition`` (the folder's name)
    and ``_lakeupsert_place`` (increasing: the row's index in a typed file, the byte of the text at which a record begins).
    ``quarantined`` has reason_code, reason, file, position (the place), raw (the line, or the row as a JSON object) and
    arrow (see `blocks.Block.arrow`).

    Raises:
        UnreadableFileError: the file as a whole, or from here on, can't be read. What was yielded is to be dropped.
        UnplannedColumnError: the file has an accepted row, and a column that the spec lacks. The same.
        ChangedFileError: it vanished or changed, before the first block or until after the last one. The same.
    """
    try:
        kind = kind_of(file, reading)
        with store.open(file.path, file.etag) as source:
            hashed = None if sha256 is None else hashed_source(source, file, kind, sha256)
            text = text_of(hashed or source, file, kind, reading)
            opened = open_blocks(text, file, kind, reading, required_columns(rules.spec))
            new: set[str] = set()
            has_accepted = False
            for block in opened.blocks:
                if len(block.places) or block.malformed:
                    rows = take(block, opened.missing, file.path, rules, surveyed=file.surveyed)
                    new |= new_columns(block, rules.spec)
                    has_accepted |= rows.accepted.num_rows > 0
                    if new and has_accepted:  # a column must not go lost in silence; it comes with accepted rows alone
                        raise UnplannedColumnError(
                            file.path, f"Column {min(new)!r} came up after the table's columns were planned."
                        )
                    yield rows
        if sha256 is not None and hashed is None:
            read_again(store, file.path, file.etag, sha256)
    except NotFoundError as e:
        raise ChangedFileError(file.path) from e
    except UnreadableFileError:
        check_unchanged(store, file.path, file.etag)
        raise
    if not store.pinned:
        check_unchanged(store, file.path, file.etag)


def _given(path: str, rules: RowRules) -> dict[str, Any]:
    """The column that a file's rows do not bring, and its value (``pyarrow.Array`` of one): the receipt stamp, or the order
    that stands in the file's name. Raises UnreadableFileError where none stands there."""
    spec = rules.spec
    if spec.stamped:
        value = pa.array([rules.received_at], pa.int64()).view(pa.timestamp("us", "UTC"))
    elif spec.order_in_name:
        name = path.rpartition("/")[2]
        found = re.search(spec.order_in_name, name)
        if found is None:
            raise UnreadableFileError(
                path, f"`order_in_name` ({spec.order_in_name}) finds no order in the name {name!r}."
            )
        value = pa.array([found[1]], pa.string())
    else:
        return {}
    column = spec.order_by[0]
    converted, unfit = convert(value, spec.schema.field(column).type)
    if unfit.any() or converted.null_count:
        what = f"{value[0].as_py()!r}, which is no {spec.schema.field(column).type} for column {column!r}"
        raise UnreadableFileError(path, f"`order_in_name` ({spec.order_in_name}) finds {what}.")
    return {column: converted}


# -- which rows are taken


class _Refusals:
    """Why rows of a block are refused. The first reason that a row is given stays."""

    def __init__(self, block: Block, path: str) -> None:
        self._block = block
        self._path = path
        self._found: dict[int, tuple[str, str]] = {}
        self.refused = np.zeros(len(block.places), bool)

    def add(self, code: str, mask: Any, reason: str) -> None:
        """Refuse the rows of a mask, all for the same reason."""
        for row in self._fresh(mask):
            self._found[row] = code, reason

    def add_values(self, code: str, mask: Any, name: str, what: str) -> None:
        """Refuse the rows of a mask for what each of them has in one column."""
        if name not in set(self._block.names):  # no row brings it
            self.add(code, mask, f"Column {name!r} {what}.")
        elif rows := self._fresh(mask):
            for row, value in zip(rows, self._block.found(name, rows), strict=True):
                self._found[row] = code, f"Column {name!r}: {_short(value)} {what}."

    def _fresh(self, mask: Any) -> list[int]:
        fresh = mask & ~self.refused
        self.refused |= fresh
        return np.flatnonzero(fresh).tolist()

    def table(self) -> Any:
        rows = sorted(self._found)
        raws = self._block.raw(rows) if rows else []
        places = self._block.places[rows].tolist()
        found = zip(rows, places, raws, self._block.arrow(rows), strict=True)
        refused = [(place, *self._found[row], raw, arrow) for row, place, raw, arrow in found]
        for one in self._block.malformed:
            refused.append((one.place, "malformed", one.reason, one.raw.decode("utf-8", "backslashreplace"), None))
        refused.sort(key=operator.itemgetter(0))
        return pa.Table.from_arrays(
            [
                pa.array([code for _, code, _, _, _ in refused], pa.string()),
                pa.array([reason[:_LONGEST_REASON] for _, _, reason, _, _ in refused], pa.string()),
                pa.array([self._path] * len(refused), pa.string()),
                pa.array([place for place, _, _, _, _ in refused], pa.int64()),
                pa.array([raw for _, _, _, raw, _ in refused], pa.string()),
                pa.array([arrow for _, _, _, _, arrow in refused], pa.binary()),
            ],
            schema=_QUARANTINED,
        )


def take(block: Block, missing: frozenset[str], path: str, rules: RowRules, *, surveyed: bool = True) -> Rows:
    """The rows of a block under the spec, each accepted or refused; see `read_rows`. ``missing`` columns refuse all.

    Columns that the spec lacks are left out (see `new_columns`). Raises UnplannedColumnError, of a file that was not
    ``surveyed``, where a nested value does not fit: it may have fields that are yet to be planned.
    """
    spec, count = rules.spec, len(block.places)
    block = under_table_names(block, spec)
    refusals = _Refusals(block, path)
    if missing:
        names = ", ".join(sorted(missing))
        reason = f"The file has no column {names}, and every row needs one in its key, partition and order."
        refusals.add("missing_column", np.full(count, True), reason)
        return Rows(_accepted_schema(spec).empty_table(), refusals.table(), names_in_file(block))

    columns, partition_unfit, grown = _columns(block, refusals, rules, _given(path, rules))
    if grown and not surveyed:
        raise UnplannedColumnError(
            path, f"Column {grown[0]!r} has values that do not fit {spec.schema.field(grown[0]).type}."
        )
    is_delete = _deletes(block, refusals, spec, path)
    for name in spec.key:
        absent = true(columns[name].is_null())
        if name in spec.partition_by:
            absent &= ~partition_unfit[name]
        refusals.add("null_key", absent, f"Key column {name!r} is null.")
    sources = {one.column: one.source for one in spec.partition_from}
    folders = [folder_names(name, columns[name]) for name in spec.partition_by]
    for name, of_name in zip(spec.partition_by, folders, strict=True):
        what = f"does not name a partition of {spec.schema.field(name).type}"
        refusals.add_values("bad_partition", true(of_name.is_null()), sources.get(name) or name, what)
    names = joined_names(folders)
    _check_order(columns, is_delete, refusals, rules)
    if spec.mode == "columns":
        columns[HAS], unordered = brought(columns, block.has, spec)
        for reason, rows in unordered.items():
            refusals.add("order_missing", rows, reason)

    if spec.has_deletes:
        columns[DELETE_FLAG] = pa.array(is_delete)
    columns |= {PARTITION: names, PLACE: pa.array(block.places, pa.int64())}
    schema = _accepted_schema(spec)
    accepted = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
    if refusals.refused.any():
        accepted = accepted.filter(pa.array(~refusals.refused))
    return Rows(accepted, refusals.table(), names_in_file(block))


def new_columns(block: Block, spec: TableSpec) -> set[str]:
    """Those columns of a block that the spec lacks."""
    known = {*spec.schema.names, *([spec.delete.column] if spec.delete else [])}
    return {name for name in block.names if spec.called(name) not in known}


def _accepted_schema(spec: TableSpec) -> Any:
    ours = [pa.field(PARTITION, pa.string(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
    return pa.schema([*spec.appended_schema, *ours])


def _columns(
    block: Block, refusals: _Refusals, rules: RowRules, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Every column in the table's type, where the partition columns' values have none there, and nested columns with values
    that do not fit."""
    columns: dict[str, Any] = {}
    partition_unfit = {}
    grown = []
    made = {one.column for one in rules.spec.partition_from}
    for field in rules.spec.schema:
        name, type_ = field.name, field.type
        if name in given:
            columns[name] = pa.repeat(given[name][0], len(block.places))
            source = "the table is stamped on receipt" if rules.spec.stamped else "its order is that in the file's name"
            refusals.add_values("bad_type", block.brings(name), name, f"must not come with a row: {source}")
            continue
        if name in made:
            partition_unfit[name] = np.zeros(len(block.places), bool)
            refusals.add_values(
                "bad_type", block.brings(name), name, "must not come with a row: it is made of another column"
            )
            continue
        columns[name], unfit = block.convert(name, type_)
        if name in rules.spec.partition_by:
            partition_unfit[name] = unfit
        else:
            refusals.add_values("bad_type", unfit, name, f"does not fit {type_}")
            grown += [name] if pa.types.is_nested(type_) and unfit.any() else []
    return columns | derived_columns(rules.spec, columns), partition_unfit, grown


def _deletes(block: Block, refusals: _Refusals, spec: TableSpec, path: str) -> Any:
    """A mask of the rows that are deletes."""
    rule, count = spec.delete, len(block.places)
    if rule is None:
        return np.zeros(count, bool)
    if rule.file_prefix is not None and path.rpartition("/")[2].startswith(rule.file_prefix):
        return np.full(count, True)
    if rule.column is None:
        return np.zeros(count, bool)
    text, unfit = block.convert(rule.column, pa.string())
    refusals.add_values("bad_type", unfit, rule.column, "can't be compared with `delete.values` as text")
    is_delete = true(pc.is_in(text, pa.array(rule.values, pa.string())))
    if rule.upserts is not None:
        declared = is_delete | true(pc.is_in(text, pa.array(rule.upserts, pa.string())))
        what = "is neither in `delete.values` nor in `delete.upserts`"
        refusals.add_values("bad_operation", ~declared, rule.column, what)
    return is_delete


def _check_order(columns: dict[str, Any], is_delete: Any, refusals: _Refusals, rules: RowRules) -> None:
    spec = rules.spec
    if spec.stamped:
        return
    if not spec.nulls_first:
        absent = np.logical_and.reduce([true(columns[name].is_null()) for name in spec.order_by])
        reason = f"A delete without a value in {', '.join(spec.order_by)} loses to every row that has one."
        refusals.add("order_missing", is_delete & absent, reason)
    received = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=rules.received_at)
    what = f"is more than a day after its receipt, {received.isoformat()}"
    for name in (o.column for ordering, _ in spec.columns_of for o in ordering if not o.ascending):
        refusals.add_values("future_order", _is_after(columns[name], rules.received_at + _DAY), name, what)


def _is_after(column: Any, limit: int) -> Any:
    """A mask of the dates (as midnight) and timestamps beyond ``limit`` (microseconds UTC); other types never are."""
    t, type_ = pa.types, column.type
    if t.is_date32(type_):
        return true(pc.greater(column.view(pa.int32()), limit // _DAY))
    if t.is_date64(type_):
        return true(pc.greater(column.view(pa.int64()), limit // 1000))
    if t.is_timestamp(type_):
        per_unit = {"s": limit // 10**6, "ms": limit // 1000, "us": limit, "ns": min(limit * 1000, 2**63 - 1)}
        return true(pc.greater(column.view(pa.int64()), per_unit[type_.unit]))
    return np.zeros(len(column), bool)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a value that is nested too deep"
    return text if len(text) <= 80 else f"{text[:77]}..."
