"""Recompute what a snapshot should show from what landed, by other programs than the ones that wrote it.

Reads     the ledger's list of files, and what `load` reads
Writes    temporary files only
Repeat    safe

DuckDB reads Parquet (Arrow its operation column), and Python's own readers read text. Avro and ORC have no second reader, so
they are read as `append` reads them. DuckDB's CAST converts every value to the type that its column had in the spec of the batch,
and what a retype made of it since is computed as readers compute it. DuckDB's window
finds the winners, and all their columns are compared with what readers see; if the table has `versions`, their batches too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.operations.recompute.load import LandedRows
from lakeupsert.operations.recompute.sql import (
    BATCH,
    COMPARED,
    NTH,
    compared_schema,
    connect,
    import_duckdb,
    key_columns,
    winners,
)
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.progress import Share
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.duckdb import identifier
from lakeupsert.read.view import View
from lakeupsert.rows.floor import read_refused_keys
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import find_counting
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@dataclass(frozen=True)
class Comparison:
    """Rows of one partition that readers miss, that they should not see, and whose columns differ from what landed."""

    missing: int = 0
    extra: int = 0
    different: int = 0

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def __str__(self) -> str:
        return f"{self.missing:,} missing, {self.extra:,} extra, {self.different:,} different"


@dataclass(frozen=True)
class Recomputation:
    """A comparison for each partition that could be recomputed.

    Attributes:
        version: of DuckDB.
        gone: batches that could not be read, with the first file of each that is gone or changed.
        files, rows: landing files (of batch 0, adopted files) that were read, and their accepted rows in these partitions.
    """

    version: str
    partitions: dict[str, Comparison] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    files: int = 0
    rows: int = 0


def recompute(
    table: OpenTable, snapshot: Link[Snapshot], partitions: Sequence[str], progress: Callable[[str], None]
) -> Recomputation:
    """Compare these partitions of a snapshot with what the batches that count in them brought.

    Left out are partitions that were adopted and not merged since, which have nothing to be compared with, and those that a
    batch touches whose landing files are gone or changed. If keys are unique in the whole table, all partitions decide which of
    them has a key, so all are compared, or none. Raises ConfigurationError if DuckDB has no type for a column.
    """
    view = View.open(table.history.objects, table.history.existing_spec(), snapshot.number)
    view = view.with_versions(table.history.headers) if view.spec.versions else view
    asked, partitions = partitions, sorted(snapshot.body.partitions) if view.spec.key_scope == "table" else partitions
    entries = table.history.entries(-1, snapshot.body.batch)
    shown = {
        p: table.history.version(p, snapshot.body.partitions[p]) for p in partitions if p in snapshot.body.partitions
    }
    settled = {p: m for p, m in shown.items() if all(b.settled for b in m.buckets)}
    counted = shown if view.spec.key_scope == "table" else settled
    batches = find_counting([link.body for link in entries], {p: m.merged for p, m in counted.items()})
    with connect() as db:
        landed = LandedRows(table, view.spec, db, read_refused_keys(table.resources.store, shown.values(), view.spec))
        gone: dict[int, str] = {}
        unknown: set[str] = set()
        for number, touched in batches.items():
            found = landed.first_gone(entries[number].body, touched)
            if found is not None:
                gone[number] = found
                unknown.update(touched)
        if unknown and view.spec.key_scope == "table":
            unknown.update(shown)
        compared = sorted({p for touched in batches.values() for p in touched} - unknown)
        landed.create_tables()
        for done, (number, touched) in enumerate(batches.items()):
            progress(Share(f"reading batch {number:,} again", done, len(batches)))
            landed.load(number, entries[number].body, [p for p in touched if p not in unknown])
        for done, partition in enumerate(compared):
            progress(Share(f"reading {partition} as readers see it", done, len(compared)))
            schema = _seen_schema(view.spec)
            db.register("reader", to_arrow(view, partition=partition, columns=schema.names).cast(schema))
            db.execute("INSERT INTO published BY NAME SELECT * FROM reader")
        progress("comparing")
        differing = _compare(db, view.spec)
    values = {p: tuple(v.as_py() for v in partition_scalars(view.spec, p).values()) for p in compared}
    return Recomputation(
        version=import_duckdb().__version__,
        partitions={p: differing.get(values[p], Comparison()) for p in compared if p in asked and p in settled},
        gone=gone,
        files=landed.files,
        rows=landed.rows,
    )


def _seen_schema(spec: TableSpec) -> pa.Schema:
    """The columns that are compared: those of the table, and the batch of each row, if it is stored."""
    return pa.schema([*compared_schema(spec), *([pa.field(BATCH, pa.int64())] if spec.versions else [])])


def _compare(db: "DuckDBPyConnection", spec: TableSpec) -> dict[tuple[object, ...], Comparison]:
    key = ", ".join(map(identifier, key_columns(spec)))
    columns = _seen_schema(spec).names
    found = db.execute(
        COMPARED.format(
            partition="".join(f"{identifier(column)}, " for column in spec.partition_by),
            nth=NTH,
            winners=winners(spec, key),
            key=key,
            expected=", ".join(f"e.{identifier(n)}" for n in columns),
            published=", ".join(f"p.{identifier(n)}" for n in columns),
        )
    ).fetchall()
    n = len(spec.partition_by)
    return {row[:n]: Comparison(*row[n:]) for row in found}
