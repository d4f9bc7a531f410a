"""The rows that an update or delete is for, and the rows that it makes of them.

Reads     the files of a view that may have such rows
Writes    packs of appended rows, under names of their own; a ledger entry may name them (`statement`)
Repeat    safe

    view -> rows of the filter and of the keys -> new values, the receipt stamp -> settle, sort by key -> write

Memory: `CHUNK_BYTES` of rows, their new values, and the list of keys.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import pyarrow as pa

from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.reports import Report, appended_names
from lakeupsert.engine.settle import settle_and_write
from lakeupsert.errors import RefusedError
from lakeupsert.landing.accept import receipt_stamp
from lakeupsert.operations.statement.assignments import Assignments, UnfitValueError
from lakeupsert.operations.statement.key_list import KeyList, Pairs
from lakeupsert.read.arrow import batches, scans, to_arrow
from lakeupsert.read.skipping import key_test
from lakeupsert.read.view import View, ViewFile
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.buckets import may_be_in
from lakeupsert.rows.columns import find_brought_columns
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.spec import DELETE_FLAG, FILE, HAS, PLACE, TableSpec

CHUNK_BYTES = 64 << 20
"""Rows that are changed and written at once. More: memory. Fewer: each partition of a statement for many rows gets more files."""
SAMPLE_ROWS = 5


@dataclass(frozen=True)
class Chosen:
    """Rows of one partition that the statement is for."""

    partition: str
    rows: Rows


@dataclass
class RowChoice:
    """Which rows of a view a statement is for. ``found`` says which of the listed keys had a row so far."""

    view: View
    where: str | None
    keys: KeyList | None
    found: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.found = np.zeros(self.keys.rows.num_rows if self.keys else 0, bool)

    @property
    def unseen(self) -> int:
        """How many of the listed keys had no row so far."""
        return int(np.count_nonzero(~self.found))

    def rows(self) -> Iterator[Chosen]:
        """The rows, in chunks of about `CHUNK_BYTES`, by partition and key."""
        scan = scans(self.view.spec, self.where)
        for partition, files in groupby(self._files(), key=lambda file: file.partition):
            held: list[Rows] = []
            size = 0
            for batch in batches(self.view, files, scan):
                if (rows := self._listed(pa.Table.from_batches([batch]))).num_rows:
                    held.append(rows)
                    size += rows.nbytes
                if size >= CHUNK_BYTES:
                    yield self._checked(partition, pa.concat_tables(held))
                    held, size = [], 0
            if held:
                yield self._checked(partition, pa.concat_tables(held))

    def _files(self) -> Iterator[ViewFile]:
        files = self.view.files(self.where)
        if self.keys is None:
            return files
        keys, may_have = self.keys, key_test(self.view.spec, self.keys.rows)
        return (
            file
            for file in files
            if may_be_in(keys.hashes, file.file)
            and may_have(file.file, partition_scalars(self.view.spec, file.partition))
        )

    def _listed(self, rows: Rows) -> Rows:
        if self.keys is None:
            return rows
        pairs = Pairs.of(rows, self.keys.rows)
        self.found[pairs.keys] = True
        return rows.take(pa.array(np.sort(pairs.rows)))

    def _checked(self, partition: str, rows: Rows) -> Chosen:
        """Raises RefusedError if one of the rows is not the only one of its key, in adopted files."""
        if not self.view.is_settled(partition):
            key = list(self.view.spec.key)
            keys = rows.select(key).group_by(key).aggregate([]).select(key)
            stored = to_arrow(self.view, partition=partition, columns=key)
            repeats = sum(len(Pairs.of(pa.Table.from_batches([batch]), keys).rows) for batch in stored)
            if repeats > keys.num_rows:
                raise RefusedError(
                    "repeated-keys",
                    f"{partition}: the statement matches {repeats} adopted rows, which have only {keys.num_rows} different keys. "
                    "No merge has removed these duplicates yet. Nothing was changed.",
                    next=f"run `lakeupsert reprocess --partition {partition}`, which leaves one row of each key, then run the "
                    "same command again",
                    partition=partition,
                )
        return Chosen(partition, rows)


@dataclass
class Changes:
    """What a statement makes of the rows: their figures and, with a ``job``, the packs of new rows.

    Attributes:
        assignments: the new values; None: the rows are deleted.
        rows: how many, by partition.
        before, after: the first of them, as readers see them. Of a delete there is no ``after``.
        reports: of what was written.
    """

    spec: TableSpec
    assignments: Assignments | None
    job: AppendJob | None
    rows: Counter[str] = field(default_factory=Counter)
    before: Rows | None = None
    after: Rows | None = None
    reports: list[Report] = field(default_factory=list)
    _held: list[Rows] = field(default_factory=list)
    _held_bytes: int = 0

    @property
    def packs(self) -> set[str]:
        """The packs that were written."""
        return appended_names(self.reports)

    def add(self, chosen: Chosen) -> None:
        """Raises RefusedError if a new value does not fit, and ConfigurationError if an expression can't be computed."""
        rows, partition = chosen.rows, chosen.partition
        try:
            values = self.assignments.of(rows) if self.assignments else {}
        except UnfitValueError as e:
            raise self._unfit(chosen, e.at, e.text) from e
        new = self._appended(chosen, values)
        self._sample(rows, values)
        if self.job is not None:
            self._held.append(_ranked(self.job, new, partition, self.rows.total()))
            self._held_bytes += new.nbytes
            if self._held_bytes >= CHUNK_BYTES:
                self.flush()
        self.rows[partition] += rows.num_rows

    def flush(self) -> None:
        """Write the rows that are still held."""
        if self.job is not None and self._held:
            self.reports += settle_and_write(self.job, self._held)
            self._held, self._held_bytes = [], 0

    def _sample(self, rows: Rows, values: Mapping[str, pa.Array]) -> None:
        missing = SAMPLE_ROWS - (self.before.num_rows if self.before else 0)
        if missing > 0:
            some = rows.slice(0, missing)
            self.before = pa.concat_tables([self.before, some]) if self.before else some
            if self.assignments:
                changed = _with(some, values)
                self.after = pa.concat_tables([self.after, changed]) if self.after else changed

    def _appended(self, chosen: Chosen, values: Mapping[str, pa.Array]) -> Rows:
        """The rows as the batch has them, without their places. A column that the record does not bring is null."""
        spec, rows = self.spec, chosen.rows
        columns: dict[str, pa.Array] = {}
        kept = _kept_columns(spec, values)
        for name in spec.stored_schema.names:
            type_ = spec.schema.field(name).type
            if name in values:
                columns[name] = values[name]
            elif spec.stamped and name == spec.order_by[0] and self.job is not None:
                columns[name] = pa.repeat(receipt_stamp(self.job.rules)[0], rows.num_rows)
            elif name in kept:
                columns[name] = rows[name].combine_chunks().cast(type_)
            else:
                columns[name] = pa.nulls(rows.num_rows, type_)
        if spec.mode == "columns":
            columns[HAS], unordered = find_brought_columns(
                columns, lambda name: np.full(rows.num_rows, name in values), spec
            )
            self._refuse_unfit_columns(chosen, values, unordered)
        columns[DELETE_FLAG] = pa.repeat(pa.scalar(self.assignments is None), rows.num_rows)
        return pa.table(columns)

    def _refuse_unfit_columns(
        self, chosen: Chosen, values: Mapping[str, pa.Array], unordered: Mapping[str, Mask]
    ) -> None:
        for reason, mask in unordered.items():
            if mask.any():
                raise self._unfit(chosen, int(mask.argmax()), f"it can't be set: {reason.rstrip('.')}")
        for name, column in values.items() if self.spec.nulls == "keep" else ():
            if column.null_count:
                at = int(as_mask(column.is_null()).argmax())
                raise self._unfit(chosen, at, f"{name} = null keeps its value, by `nulls` = keep")

    def _unfit(self, chosen: Chosen, at: int, what: str) -> RefusedError:
        row = chosen.rows.slice(at, 1)
        key = " ".join(f"{name}={to_json_values(row[name].combine_chunks())[0]}" for name in self.spec.key)
        return RefusedError(
            "unfit-new-value",
            f"Row {key} of {chosen.partition}: {what}. Nothing was changed.",
            next="correct the expression, for example with round(…, 2) or CAST(… AS …), or leave this row out by --where",
            partition=chosen.partition,
        )


def _kept_columns(spec: TableSpec, values: Mapping[str, pa.Array]) -> set[str]:
    """The columns whose values a record brings as they are, beside those that it sets.

    A delete needs what decides about it. An update brings the whole row, or in mode columns the orders of what it sets.
    """
    if values and spec.mode == "rows":
        return set(spec.stored_schema.names)
    sources = {one.source for one in spec.partition_from if one.source}
    orders = {o.column for ordering, ids in spec.columns_of[1:] if ids.keys() & values.keys() for o in ordering}
    return {*spec.stored_key, *spec.order_by, *sources, *orders}


def _ranked(job: AppendJob, rows: Rows, partition: str, first: int) -> Rows:
    """Rows with the ranked schema and `PARTITION`; their places count from ``first``."""
    ranks = {
        FILE: pa.array(np.zeros(rows.num_rows, np.int32)),
        PLACE: pa.array(np.arange(first, first + rows.num_rows)),
        PARTITION: pa.repeat(pa.scalar(partition), rows.num_rows),
    }
    schema = pa.schema([*job.spec.ranked_schema, pa.field(PARTITION, pa.string(), nullable=False)])
    columns = [ranks[name] if name in ranks else rows[name] for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


def _with(rows: Rows, values: Mapping[str, pa.Array]) -> Rows:
    for name, column in values.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(
            at, rows.schema.field(at), column.slice(0, rows.num_rows).cast(rows.schema.field(at).type)
        )
    return rows
