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
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
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
from lakeupsert.landing.formats.envelopes import CONTROL_RECORD, NEW_TABLE
from lakeupsert.landing.formats.folders import count_contrary
from lakeupsert.landing.formats.positions import LOG_POSITION
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.landing.origins import NO_ORIGINS, Origins, origins_of
from lakeupsert.landing.partitions import UNPLACED, derived_columns, folder_names, joined_names, partition_sources
from lakeupsert.landing.refusals import Refusals
from lakeupsert.landing.unsent import (
    drop_empty_texts,
    find_hollow_deletes,
    find_incomplete_creates,
    find_moved_without_value,
    find_unsent,
    refuse_incomplete,
)
from lakeupsert.phrases import when
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.columns import find_brought_columns
from lakeupsert.rows.convert import READABLE_MOMENTS, as_mask, convert, unreadable_moments
from lakeupsert.rows.floor import PARTITION
from lakeupsert.storage import NotFoundError, ObjectReader
from lakeupsert.table.misnamed import describe_separator
from lakeupsert.table.roles import DeleteRule
from lakeupsert.table.spec import DELETE_FLAG, HAS, PLACE, TableSpec
from lakeupsert.table.types import type_name

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_KEY_ALONE = ' A delete that has only its key needs `key_scope = "table"`.'
_DAY = 86_400_000_000


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
    refusals = Refusals(block, path, rules.table)
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
        refuse_incomplete(block, is_delete, refusals, spec)
    partitions = _partitions(converted, is_delete, refusals, spec)
    _check_order(columns, is_delete, refusals, rules)
    if spec.mode == "columns":
        named = as_mask(pc.not_equal(partitions, UNPLACED))
        columns[HAS], unordered = find_brought_columns(columns, partial(_has, block, converted, spec), spec, named)
        for reason, rows in unordered.items():
            refusals.add("order_missing", rows, reason)

    hollow = find_hollow_deletes(columns, is_delete & ~refusals.refused, spec)
    wal2json = rules.envelope == "wal2json" and spec.mode == "columns"
    incomplete = (
        find_moved_without_value(block, spec) if wal2json else find_incomplete_creates(block, converted.unavailable)
    )
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
    block: Block, refusals: Refusals, rules: RowRules, given: Mapping[str, pa.Array]
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
        unavailable = find_unsent(block, name, columns[name], unfit)
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


def _partitions(converted: _ConvertedColumns, is_delete: Mask, refusals: Refusals, spec: TableSpec) -> pa.Array:
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


def _deletes(block: Block, refusals: Refusals, spec: TableSpec, path: str) -> Mask:
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


def _check_order(columns: Mapping[str, pa.Array], is_delete: Mask, refusals: Refusals, rules: RowRules) -> None:
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
