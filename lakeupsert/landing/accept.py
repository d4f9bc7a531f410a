"""The rules that a row of a landing file must pass.

Reads     one landing file, block by block; memory follows the block (for Parquet, also a stored row group; for ORC, a stripe)
Writes    nothing: the caller gets accepted and quarantined rows
Repeat    safe: the same file gives the same rows at the same places, however it is cut into blocks

    files.survey -> (the driver plans the spec) -> read_rows -> accepted rows, quarantined rows

A row is refused for the first of these reasons that applies: malformed (or truncate, which refuses the whole batch),
missing_column, ambiguous_date (by the formats of `dates`) or bad_type, bad_operation (not in `delete.values` or
`delete.upserts`), null_key, bad_partition (also if only the partition column does not convert), order_missing, future_order.
"""

import dataclasses
import operator
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading, of_table, toml_key
from lakeupsert.landing.content import check_unchanged, hash_object, hashed_source, open_landed
from lakeupsert.landing.files import Reader, required_columns, under_table_names
from lakeupsert.landing.formats.blocks import (
    Block,
    ChangedFileError,
    LandingInput,
    UnplannedColumnError,
    UnreadableFileError,
    names_in_file,
)
from lakeupsert.landing.formats.dates import is_dated
from lakeupsert.landing.formats.envelopes import CONTROL_RECORD, NEW_TABLE
from lakeupsert.landing.formats.folders import count_contrary
from lakeupsert.landing.formats.positions import LOG_POSITION
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.landing.formats.unavailable import find_unavailable, is_unavailable
from lakeupsert.landing.hollow import drop_empty_texts, find_hollow_deletes
from lakeupsert.landing.origins import NO_ORIGINS, Origins, origins_of
from lakeupsert.landing.partitions import UNPLACED, derived_columns, folder_names, joined_names, partition_sources
from lakeupsert.phrases import when
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.columns import find_brought_columns
from lakeupsert.rows.convert import READABLE_MOMENTS, as_mask, convert, unreadable_moments
from lakeupsert.rows.floor import PARTITION
from lakeupsert.storage import NotFoundError, ObjectReader
from lakeupsert.table.ledger import Reason
from lakeupsert.table.misnamed import describe_separator
from lakeupsert.table.roles import DeleteRule
from lakeupsert.table.spec import DELETE_FLAG, HAS, PLACE, TableSpec
from lakeupsert.table.types import type_name

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_LONGEST_REASON = 400
_KEY_ALONE = ' A delete that has only its key needs `key_scope = "table"`.'
_DAY = 86_400_000_000
_FRACTION = re.compile(r":\d\d\.(\d+)")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_QUARANTINED = pa.schema(
    [
        ("reason_code", pa.string()),
        ("reason", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("line", pa.int64()),
        ("raw", pa.string()),
        ("arrow", pa.binary()),
    ]
)


@dataclass(frozen=True)
class RowRules:
    """The spec whose rules rows must pass, and the batch's receipt stamp ``received_at`` in microseconds UTC.

    ``clock_ahead``: as in the batch's ledger entry.
    ``table``: the table's name in the configuration, for reasons that name a setting.
    """

    spec: TableSpec
    received_at: int
    clock_ahead: int = 0
    table: str = "…"
    envelope: str | None = None


@dataclass(frozen=True)
class CheckedRows:
    """The rows of one block: each is in ``accepted`` or in ``quarantined``.

    Attributes:
        names: the columns that the block has, by the table's names, with the file's name of each.
        skipped: how many messages of the block hold no row, by their kind.
        origins: see `landing.origins`.
        hollow_deletes: how many accepted deletes bring nothing but their key (`find_hollow_deletes`).
        incomplete_creates: how many accepted rows begin with a value that the source did not send.
        contrary: how many rows have another value in a column than the folders of their file say, by column.
    """

    accepted: Rows
    quarantined: Rows
    names: dict[str, str]
    skipped: Mapping[str, int]
    hollow_deletes: int = 0
    incomplete_creates: int = 0
    origins: Origins = NO_ORIGINS
    contrary: Mapping[str, int] = dataclasses.field(default_factory=dict)


def read_rows(
    store: ObjectReader, file: LandingInput, reading: Reading, rules: RowRules, sha256: "Hash | None" = None
) -> Iterator[CheckedRows]:
    """The rows of a file, block by block. ``sha256`` is updated with the whole file, which is read only once if possible.

    ``accepted`` has the columns of the spec's `appended_schema`, then ``_lakeupsert_partition`` (the folder's name)
    and ``_lakeupsert_place`` (increasing: the row's index in a typed file, the byte at which a record of text begins).
    ``quarantined`` has reason_code, reason, file, position (the place), line (in a text file, counted from 1), raw (the line, or
    the row as a JSON object) and arrow (see `blocks.Block.arrow`).

    After each of these errors, rows that were already yielded must be dropped.

    Raises:
        UnreadableFileError: the file can't be read, as a whole or from here on.
        UnplannedColumnError: the file has an accepted row, and a column that the spec lacks.
        ChangedFileError: the file was deleted or changed before or while it was read.
    """
    try:
        kind = readable_format(file, reading)
        with open_landed(store, file.path, file.listed) as source:
            hashed = None if sha256 is None else hashed_source(source, file, kind, sha256)
            contents = Reader.of(hashed or source, file, kind, reading).blocks(required_columns(rules.spec))
            for block in contents.blocks:
                if len(block.places) or block.malformed or block.skipped:
                    rows = take(block, contents.missing, file.path, rules, surveyed=file.surveyed)
                    if new := new_columns(block, rules.spec, rows.accepted):  # else the column's values would be lost
                        raise UnplannedColumnError(
                            file.path, f"Column {min(new)!r} is not among the columns that were planned for the table."
                        )
                    contrary = count_contrary(block, file.path, reading, rules.spec)
                    yield replace(rows, origins=origins_of(block, reading), contrary=contrary)
        if sha256 is not None and hashed is None:
            hash_object(store, file.path, file.listed, sha256)
    except NotFoundError as e:
        raise ChangedFileError(file.path) from e
    except UnreadableFileError:
        check_unchanged(store, file.listed)
        raise
    if not store.pinned:
        check_unchanged(store, file.listed)


def receipt_stamp(rules: RowRules) -> pa.Array:
    """The receipt stamp in the type of the ordering column of a stamped table: an array of one."""
    return convert(_receipt(rules), rules.spec.schema.field(rules.spec.order_by[0]).type)[0]


def _receipt(rules: RowRules) -> pa.Array:
    return pa.array([rules.received_at], pa.int64()).view(pa.timestamp("us", "UTC"))


def _file_order(path: str, rules: RowRules) -> dict[str, pa.Array]:
    """The ordering column if it has one value for the whole file (an array of one): the receipt stamp, or the order in its name.

    Raises UnreadableFileError if `order_in_name` finds no order in the name.
    """
    spec = rules.spec
    if spec.stamped:
        value = _receipt(rules)
    elif spec.order_in_name:
        name = path.rpartition("/")[2]
        match = re.search(spec.order_in_name, name)
        if match is None:
            raise UnreadableFileError(
                path, f"`order_in_name` ({spec.order_in_name}) finds no order in the name {name!r}."
            )
        value = pa.array([match[1]], pa.string())
    else:
        return {}
    column = spec.order_by[0]
    converted, unfit = convert(value, spec.schema.field(column).type)
    if unfit.any() or converted.null_count:
        what = f"{value[0].as_py()!r}, which is not of type {type_name(spec.schema.field(column).type)} (column {column!r})"
        raise UnreadableFileError(path, f"`order_in_name` ({spec.order_in_name}) finds {what}.")
    return {column: converted}


class _Refusals:
    """Why rows of a block are refused. The first reason that is added for a row counts; faults of other values are told, too."""

    def __init__(self, block: Block, path: str, table: str) -> None:
        self._block = block
        self._path = path
        self._table = table
        self._reasons: dict[int, tuple[Reason, str]] = {}
        self._faulty: dict[int, set[str]] = {}  # columns by row
        self.refused = np.zeros(len(block.places), bool)

    def add(self, code: Reason, mask: Mask, reason: str, *, of: str | None = None) -> None:
        """Refuse these rows, all for the same reason. ``of``: the column at fault, which rows with other faults are told, too."""
        new = self._mark_refused(mask)
        for row in new if of is None else np.flatnonzero(mask).tolist():
            if of not in self._faulty.get(row, ()):
                self._tell(row, code, reason)

    def add_values(self, code: Reason, mask: Mask, name: str, what: str, type_: pa.DataType | None = None) -> None:
        """Refuse these rows for the value that each has in one column. ``type_``: the column's, if the value does not fit it."""
        if name not in set(self._block.names):  # no row has it
            self.add(code, mask, f"Column {name!r} {what}.")
        else:
            self._mark_refused(mask)
            rows = [row for row in np.flatnonzero(mask).tolist() if name not in self._faulty.get(row, ())]
            is_text = bool(rows) and self._block.texts(name) is not None
            for row, value in zip(rows, self._block.originals(name, rows), strict=True):
                _, before = self._reasons.get(row, (code, ""))
                hint = _hint(name, type_, value, is_text=is_text) if type_ else ""
                about = f" {hint}" if hint and hint.partition(",")[0] not in before else ""
                self._tell(row, code, f"Column {name!r}: {_shorten(value)} {what}.{about}", name)

    def add_meanings(self, name: str, meanings: Mapping[int, str]) -> None:
        """Refuse rows with an ambiguous value in a column, see `Block.ambiguous`."""
        mask = np.zeros(len(self.refused), bool)
        mask[list(meanings)] = True
        for row in self._mark_refused(mask):
            self._tell(row, "ambiguous_date", f"Column {name!r}: {meanings[row]}.", name)

    def _tell(self, row: int, code: Reason, reason: str, column: str | None = None) -> None:
        first, before = self._reasons.get(row, (code, ""))
        self._reasons[row] = first, f"{before} {reason}".lstrip()
        if column is not None:
            self._faulty.setdefault(row, set()).add(column)

    def _mark_refused(self, mask: Mask) -> list[int]:
        """Mark rows as refused, and return those that were not refused before."""
        new = mask & ~self.refused
        self.refused |= new
        return np.flatnonzero(new).tolist()

    def table(self) -> Rows:
        """The refused rows and the malformed records, by their places."""
        rows = sorted(self._reasons)
        places = self._block.places[rows].tolist()
        block = self._block
        raws = block.raw(rows) if rows else []
        refused = [
            (*self._reasons[row], *where)
            for row, *where in zip(rows, places, block.line_numbers(rows), raws, block.arrow(rows), strict=True)
        ]
        for one in (one for one in block.malformed if one.version is None):
            raw = one.raw.decode("utf-8", "backslashreplace")
            code = "malformed" if one.truncate is None else "truncate"
            refused.append((code, one.reason, one.place, one.line, raw, None))
        refused.sort(key=operator.itemgetter(2))
        codes, reasons, *others = zip(*refused, strict=True) if refused else [()] * 6
        columns = (
            codes,
            [of_table(reason, self._table)[:_LONGEST_REASON] for reason in reasons],
            [self._path] * len(refused),
            *others,
        )
        arrays = [pa.array(values, field.type) for values, field in zip(columns, _QUARANTINED, strict=True)]
        return pa.Table.from_arrays(arrays, schema=_QUARANTINED)


def take(block: Block, missing: frozenset[str], path: str, rules: RowRules, *, surveyed: bool = True) -> CheckedRows:
    """Accept or refuse each row of a block under the spec, see `read_rows`. If columns are ``missing``, all rows are refused.

    Columns that the spec lacks are left out (see `new_columns`). Raises UnplannedColumnError if the file was not ``surveyed``
    and a nested value or a decimal does not fit: a survey may find more fields or digits.
    """
    spec, count = rules.spec, len(block.places)
    begun = [one.version for one in block.malformed if one.version is not None]
    kinds = (CONTROL_RECORD if version == NEW_TABLE else "activate_version message" for version in begun)
    skipped = Counter(block.skipped) + Counter(kinds)
    block = under_table_names(block, spec)
    refusals = _Refusals(block, path, rules.table)
    if missing:
        names = ", ".join(sorted(missing))
        own = [block.name_in_file(name) for name in block.names]
        alone = _KEY_ALONE if spec.delete and missing <= {*partition_sources(spec)} else ""
        reason = f"The file has no column {names}, which every row needs.{describe_separator(own)}{alone}"
        refusals.add("missing_column", np.full(count, True), reason)
        none = _accepted_schema(spec).empty_table()
        return CheckedRows(none, refusals.table(), names_in_file(block), skipped)

    converted = _convert_columns(block, refusals, rules, _file_order(path, rules))
    columns = converted.columns
    if converted.may_grow and not surveyed:
        name = converted.may_grow[0]
        raise UnplannedColumnError(
            path, f"Column {name!r} has values that do not fit {type_name(spec.schema.field(name).type)}."
        )
    is_delete = _deletes(block, refusals, spec, path)
    for name in spec.key:
        absent = as_mask(columns[name].is_null())
        if name in spec.partition_by:
            absent &= ~converted.partition_unfit[name]
        refusals.add("null_key", absent, f"Key column {name!r} is null.", of=name)
    if rules.envelope == "wal2json" and spec.mode == "rows":
        _refuse_incomplete(block, is_delete, refusals, spec)
    partitions = _partitions(converted, is_delete, refusals, spec)
    _check_order(columns, is_delete, refusals, rules)
    if spec.mode == "columns":
        named = as_mask(pc.not_equal(partitions, UNPLACED))
        columns[HAS], unordered = find_brought_columns(columns, partial(_has, block, converted, spec), spec, named)
        for reason, rows in unordered.items():
            refusals.add("order_missing", rows, reason)

    hollow = find_hollow_deletes(columns, is_delete & ~refusals.refused, spec)
    wal2json = rules.envelope == "wal2json" and spec.mode == "columns"
    incomplete = _find_moved_without_value(block, spec) if wal2json else _find_incomplete_creates(block, converted)
    incomplete &= ~refusals.refused
    if spec.has_deletes:
        columns[DELETE_FLAG] = pa.array(is_delete)
    columns |= {PARTITION: partitions, PLACE: pa.array(block.places, pa.int64())}
    schema = _accepted_schema(spec)
    accepted = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
    if refusals.refused.any():
        accepted = accepted.filter(pa.array(~refusals.refused))
    hollows, incompletes = (int(np.count_nonzero(found)) for found in (hollow, incomplete))
    return CheckedRows(accepted, refusals.table(), names_in_file(block), skipped, hollows, incompletes)


def new_columns(block: Block, spec: TableSpec, accepted: Rows) -> set[str]:
    """The columns that the spec lacks and that are not open: an accepted row has a value there, or a null that may be one."""
    known = {*spec.schema.names, *([spec.delete.operation] if spec.delete else [])}
    new = {name for name in block.names if spec.table_name_of(name) not in known}
    brought = block.has if spec.mode == "columns" and spec.nulls == "overwrite" else block.is_valid
    rows = np.isin(block.places, accepted[PLACE].to_numpy()) if new else np.zeros(0, bool)
    return {name for name in new if bool((brought(name) & rows).any())}


def _accepted_schema(spec: TableSpec) -> pa.Schema:
    ours = [pa.field(PARTITION, pa.string(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
    return pa.schema([*spec.appended_schema, *ours])


@dataclass(frozen=True)
class _ConvertedColumns:
    """A block in the table's types.

    Attributes:
        columns: every column of the table; null for values that do not fit.
        partition_unfit: which values of each partition column do not fit. These rows are refused later, as bad_partition.
        may_grow: the nested and decimal columns with values that do not fit.
        unavailable: which values of a column are Debezium's placeholder; only columns that have one. They are null.
    """

    columns: dict[str, pa.Array]
    partition_unfit: dict[str, Mask]
    may_grow: list[str]
    unavailable: dict[str, Mask]


def _has(block: Block, converted: _ConvertedColumns, spec: TableSpec, name: str) -> Mask:
    """Which rows bring a column. One that a partition is computed from they bring with a value: without it they name none."""
    brings = block.has(name)
    if name in partition_sources(spec):
        brings = brings & as_mask(converted.columns[name].is_valid())
    return brings & ~converted.unavailable[name] if name in converted.unavailable else brings


def _convert_columns(
    block: Block, refusals: _Refusals, rules: RowRules, given: Mapping[str, pa.Array]
) -> _ConvertedColumns:
    """Convert every column, and refuse rows that have a value for a column that is ``given`` or derived."""
    columns: dict[str, pa.Array] = {}
    partition_unfit: dict[str, Mask] = {}
    may_grow = []
    all_unavailable: dict[str, Mask] = {}
    derived = {one.column for one in rules.spec.partition_from}
    sources = {one.source for one in rules.spec.partition_from}  # beyond all years: `bad_partition`
    for field in rules.spec.schema:
        name, type_ = field.name, field.type
        if name in given:
            columns[name] = pa.repeat(given[name][0], len(block.places))
            source = "the table is stamped on receipt" if rules.spec.stamped else "the order is in the file's name"
            refusals.add_values("bad_type", block.brings(name), name, f"must not be in a row: {source}")
            continue
        if name in derived:
            partition_unfit[name] = np.zeros(len(block.places), bool)
            what = "must not be in a row: it is derived from another column"
            refusals.add_values("bad_type", block.brings(name), name, what)
            continue
        columns[name], unfit = block.convert(name, type_)
        unreadable = unreadable_moments(columns[name])
        unavailable = _unavailable(block, name, columns[name], unfit)
        if unavailable.any():
            columns[name] = pc.if_else(pa.array(unavailable), None, columns[name])
            unfit, all_unavailable[name] = unfit & ~unavailable, unavailable
            if rules.spec.mode == "rows":
                what = (
                    'stands for a value that Debezium did not get; `mode = "columns"` keeps the stored one, and '
                    "`REPLICA IDENTITY FULL` at the source sends it"
                )
                refusals.add_values("bad_type", unavailable, name, what)
        refusals.add_meanings(name, block.ambiguous(name, type_))
        if name in rules.spec.partition_by:
            partition_unfit[name] = unfit | unreadable
        else:
            if name not in sources:
                refusals.add_values(
                    "bad_type", unreadable, name, f"is nothing that readers can show: {READABLE_MOMENTS}"
                )
            refusals.add_values("bad_type", unfit, name, f"does not fit {type_name(type_)}", type_)
            grows = pa.types.is_nested(type_) or pa.types.is_decimal(type_)
            may_grow += [name] if grows and unfit.any() else []
    columns |= derived_columns(rules.spec, columns)
    return _ConvertedColumns(columns, partition_unfit, may_grow, all_unavailable)


def _unavailable(block: Block, name: str, column: pa.Array, unfit: Mask) -> Mask:
    """Which values of a column are Debezium's placeholder, also where they do not fit the column's type."""
    found = find_unavailable(column)
    if rows := np.flatnonzero(unfit).tolist():
        found[rows] = [is_unavailable(value) for value in block.originals(name, rows)]
    return found


def _find_incomplete_creates(block: Block, converted: _ConvertedColumns) -> Mask:
    """Which rows lack an unavailable value and begin, so no stored row has it: the key of a row changed at the source."""
    if not converted.unavailable:
        return np.zeros(len(block.places), bool)
    incomplete: Mask = np.logical_or.reduce([*converted.unavailable.values()])
    return incomplete & as_mask(pc.is_in(block.convert("__op", pa.string())[0], pa.array(["c", "r"])))


def _partitions(converted: _ConvertedColumns, is_delete: Mask, refusals: _Refusals, spec: TableSpec) -> pa.Array:
    """The name of every row's partition: `UNPLACED` for rows that the key index has to place. Refuses others without one."""
    drop_empty_texts(converted.columns, is_delete, spec)
    absent = {name: as_mask(converted.columns[name].is_null()) for name in partition_sources(spec)}
    for name in absent.keys() & converted.partition_unfit.keys():
        absent[name] &= ~converted.partition_unfit[name]
    may_lack = is_delete | (spec.mode == "columns")
    alone = may_lack & np.logical_or.reduce([np.zeros(len(is_delete), bool), *absent.values()])
    sources = {one.column: one.sources[0] for one in spec.partition_from}
    folders = [folder_names(spec, name, converted.columns[name]) for name in spec.partition_by]
    for name, folder in zip(spec.partition_by, folders, strict=True):
        source, type_ = sources.get(name, name), spec.schema.field(name).type
        unfit, what = as_mask(folder.is_null()), f"does not name a partition of {type_name(type_)}"
        if spec.takes_key_alone:
            unfit &= ~(alone & absent.get(source, False))
        else:
            refusals.add_values("bad_partition", unfit & alone & is_delete, source, f"{what}.{_KEY_ALONE.rstrip('.')}")
        refusals.add_values("bad_partition", unfit, source, what, type_)
    names = joined_names(folders, len(is_delete))
    return pc.if_else(pa.array(alone), UNPLACED, names) if spec.takes_key_alone else names


def _deletes(block: Block, refusals: _Refusals, spec: TableSpec, path: str) -> Mask:
    """Which rows are deletes."""
    rule, count = spec.delete or DeleteRule(), len(block.places)
    if rule.file_prefix is not None and path.rpartition("/")[2].startswith(rule.file_prefix):
        return np.full(count, True)
    if rule.not_null is not None:
        text, unfit = block.convert(rule.not_null, pa.string())  # a value that is no text is one, too
        return as_mask(text.is_valid()) | unfit
    if rule.column is None:
        return np.zeros(count, bool)
    text, unfit = block.convert(rule.column, pa.string())
    refusals.add_values("bad_type", unfit, rule.column, "can't be compared with `delete.values` as text")
    is_delete: Mask = as_mask(pc.is_in(text, pa.array(rule.values, pa.string())))
    if rule.upserts is not None:
        declared = is_delete | as_mask(pc.is_in(text, pa.array(rule.upserts, pa.string())))
        what = "is not in `delete.values` or `delete.upserts`"
        refusals.add_values("bad_operation", ~declared, rule.column, what)
    return is_delete


def _long_columns(spec: TableSpec) -> list[str]:
    """Columns whose values PostgreSQL may store apart (TOAST). Numbers, dates and times are short."""
    computed = {one.column for one in spec.partition_from}
    fields = (f for f in spec.schema if not pa.types.is_primitive(f.type) and f.name not in computed)
    return [f.name for f in fields if not f.name.startswith("__")]


def _find_moved_without_value(block: Block, spec: TableSpec) -> Mask:
    """Which rows of wal2json are new ones of a changed identity, after its delete, and lack a long value.

    The delete of a whole row (REPLICA IDENTITY FULL) has all columns, and so has the row after it.
    """
    action = block.convert("__action", pa.string())[0]
    is_delete, found = as_mask(pc.equal(action, "D")), as_mask(pc.equal(action, "U"))
    follows = np.flatnonzero(is_delete[:-1] & found[1:] & (np.diff(block.places) == 1))
    found[:] = False
    if len(follows):
        has = [block.has(name) for name in block.names]
        is_whole = ~np.logical_or.reduce([one[follows + 1] & ~one[follows] for one in has])
        lacks = np.logical_or.reduce([~block.has(name)[follows + 1] for name in _long_columns(spec)] or [is_whole])
        found[follows + 1] = lacks & ~is_whole
    return found


def _refuse_incomplete(block: Block, is_delete: Mask, refusals: _Refusals, spec: TableSpec) -> None:
    """Refuse updates of wal2json without a column that may be stored apart (TOAST): it is left out if it did not change."""
    update = as_mask(pc.equal(block.convert("__action", pa.string())[0], "U")) & ~is_delete
    for name in _long_columns(spec):
        reason = (
            f"The update lacks column {name!r}: PostgreSQL does not send a long value that stayed. "
            '`mode = "columns"` keeps it, and `ALTER TABLE … REPLICA IDENTITY FULL` sends it. If the source dropped the '
            "column, drop it here: `lakeupsert schema drop`."
        )
        refusals.add("bad_type", update & ~block.has(name), reason)


def _check_order(columns: Mapping[str, pa.Array], is_delete: Mask, refusals: _Refusals, rules: RowRules) -> None:
    """Refuse deletes without an order, events without a place in the log, and rows whose order is in the future."""
    spec = rules.spec
    if spec.stamped:
        return
    if not spec.nulls_first:
        absent = np.logical_and.reduce([as_mask(columns[name].is_null()) for name in spec.order_by])
        reason = f"A delete without a value in {', '.join(spec.order_by)} loses to every row that has one."
        refusals.add("order_missing", is_delete & absent, reason)
    if LOG_POSITION in spec.order_by:
        reason = f"The event has no {LOG_POSITION}: it lacks what its place in the log is made of (docs/FORMATS.md)."
        refusals.add("order_missing", as_mask(columns[LOG_POSITION].is_null()), reason)
    received_at = rules.received_at - rules.clock_ahead
    received = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=received_at)
    what = f"is more than a day after its receipt, {when(received)}"
    for name in (o.column for ordering, _ in spec.columns_of for o in ordering if not o.ascending):
        refusals.add_values("future_order", _is_after(columns[name], received_at + _DAY), name, what)


def _is_after(column: pa.Array, limit: int) -> Mask:
    """Which dates (as midnight) and timestamps are after ``limit`` in microseconds UTC; values of other types never are."""
    t, type_ = pa.types, column.type
    if not (t.is_date(type_) or t.is_timestamp(type_)):
        return np.zeros(len(column), bool)
    per_unit = {"s": limit // 10**6, "ms": limit // 1000, "us": limit, "ns": min(limit * 1000, 2**63 - 1)}
    in_unit = limit // _DAY if t.is_date32(type_) else per_unit[type_.unit if t.is_timestamp(type_) else "ms"]
    stored = column.view(pa.int32() if t.is_date32(type_) else pa.int64())
    after: Mask = as_mask(pc.greater(stored, in_unit))
    return after


def _hint(name: str, type_: pa.DataType, value: object, *, is_text: bool) -> str:
    """What to do about a value that a column of a type does not take. ``is_text``: the file has the column as text."""
    if not is_dated(type_) or not isinstance(value, str):
        return ""
    found = _FRACTION.search(value) if pa.types.is_timestamp(type_) else None
    digits = len(found[1].rstrip("0")) if found else 0
    if digits > _DIGITS[type_.unit if digits else "ns"]:
        finer = pa.timestamp("us" if digits <= _DIGITS["us"] else "ns", type_.tz)
        retype = shlex.join(["lakeupsert", "schema", "retype", name, str(finer)])
        return f"To keep its fraction: `{retype} --yes`, then `lakeupsert append --replay-quarantine`."
    example = f'dates = {{ {toml_key(name)} = "%d/%m/%Y" }}'
    return f"If it is a date, set its format under [tables.….read], for example `{example}`." if is_text else ""


def _shorten(value: object) -> str:
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."
