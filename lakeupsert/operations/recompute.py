"""What a snapshot should show, computed anew from what landed, by other programs than the ones that made it.

Reads     the ledger's list of files, quarantine files (for which rows were refused), the landing files, adopted files
Writes    nothing but temporary files: what does not fit into DuckDB's memory, one landing file of a remote store at a time
Repeat    safe

Parquet is read by DuckDB (its operation column by Arrow), text by Python's own readers; Avro and ORC, which have no second
one, as `append` reads them. Every value is converted by DuckDB's CAST to the type that the spec gives its column. DuckDB's
window finds the winners, and compares all their columns with what readers see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakeupsert.operations.recompute_load import Inputs
from lakeupsert.operations.recompute_sql import (
    COMPARED,
    NTH,
    compared_schema,
    connected,
    identifier,
    import_duckdb,
    key_of,
    winners,
)
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.view import View
from lakeupsert.rows.floor import refused_by_merges
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import LedgerEntry, counting
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Comparison:
    """Rows of one partition that readers miss, that they should not see, and whose columns are not what landed."""

    missing: int = 0
    extra: int = 0
    different: int = 0

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def __str__(self) -> str:
        return f"{self.missing:,} missing, {self.extra:,} extra, {self.different:,} different"


@dataclass(frozen=True)
class Recomputed:
    """A comparison for each partition that could be recomputed; batches that could not be read, with the first file gone.

    Attributes:
        version: DuckDB's, which computed.
        files, rows: landing files (of batch 0 adopted ones) that were read, and the rows of these partitions in them that were
            not refused.
    """

    version: str
    partitions: dict[str, Comparison] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    files: int = 0
    rows: int = 0


def recompute(
    table: OpenTable, snapshot: Link[Snapshot], partitions: Sequence[str], progress: Callable[[str], None]
) -> Recomputed:
    """Compare these partitions of a snapshot with what the batches that count in them brought.

    A partition that is still as it was adopted has nothing to be compared with, and is left out; so are those that a batch
    touches whose landing files are gone or changed. Where keys are unique in the whole table, every partition says which of
    them has a key, so all are compared, or none. Raises ConfigurationError where DuckDB has no type for a column.
    """
    view = View.open(table.objects, table.existing_spec(), snapshot.number)
    asked, partitions = partitions, sorted(snapshot.body.partitions) if view.spec.key_scope == "table" else partitions
    entries = table.entries(-1, snapshot.body.batch)
    shown = {
        p: table.version(p, snapshot.body.partitions[p].version) for p in partitions if p in snapshot.body.partitions
    }
    settled = {p: m for p, m in shown.items() if all(b.settled for b in m.buckets)}
    batches = _counted(entries, shown if view.spec.key_scope == "table" else settled)
    with connected() as db:
        inputs = Inputs(table, view.spec, db, refused_by_merges(table.store, shown.values(), view.spec))
        gone: dict[int, str] = {}
        unknown: set[str] = set()
        for number, touched in batches.items():
            found = inputs.first_gone(entries[number].body, touched)
            if found is not None:
                gone[number] = found
                unknown.update(touched)
        if unknown and view.spec.key_scope == "table":
            unknown.update(shown)
        compared = sorted({p for touched in batches.values() for p in touched} - unknown)
        inputs.create_tables()
        for number, touched in batches.items():
            progress(f"reading batch {number:,} of {len(entries) - 1:,} again")
            inputs.load(number, entries[number].body, [p for p in touched if p not in unknown])
        for partition in compared:
            progress(f"reading {partition} as readers see it")
            db.register("reader", to_arrow(view, partition=partition).cast(compared_schema(view.spec)))
            db.execute("INSERT INTO published SELECT * FROM reader")
        progress("comparing")
        differing = _compared(db, view.spec)
    values = {p: tuple(v.as_py() for v in partition_scalars(view.spec, p).values()) for p in compared}
    return Recomputed(
        version=import_duckdb().__version__,
        partitions={p: differing.get(values[p], Comparison()) for p in compared if p in asked and p in settled},
        gone=gone,
        files=inputs.files,
        rows=inputs.rows,
    )


def _counted(entries: Sequence[Link[LedgerEntry]], shown: dict[str, Manifest]) -> dict[int, list[str]]:
    """For each batch, in ledger order, the partitions that it touches and in whose version it counts."""
    counts = {
        merged: {0, *counting((n.number, n.body) for n in entries[: merged + 1])}
        for merged in {m.merged for m in shown.values()}
    }
    found: dict[int, list[str]] = {}
    for link in entries:
        for partition in link.body.touched:
            if partition in shown and link.number in counts[shown[partition].merged]:
                found.setdefault(link.number, []).append(partition)
    return found


def _compared(db: Any, spec: TableSpec) -> dict[Any, Comparison]:
    """By the values of the partition columns."""
    key = ", ".join(map(identifier, key_of(spec)))
    columns = spec.schema.names
    found = db.execute(
        COMPARED.format(
            partition=", ".join(map(identifier, spec.partition_by)),
            nth=NTH,
            winners=winners(spec, key),
            key=key,
            expected=", ".join(f"e.{identifier(n)}" for n in columns),
            published=", ".join(f"p.{identifier(n)}" for n in columns),
        )
    ).fetchall()
    n = len(spec.partition_by)
    return {row[:n]: Comparison(*row[n:]) for row in found}
