"""Rows that the key index refuses, in quarantine files from which a replay takes each row as it came.

Reads     of a batch that is itself a replay, the quarantine files that it read
Writes    quarantine files. Commits nothing
Repeat    safe: files that no ledger entry names count for nothing
"""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.keys.index import IndexTarget
from lakeupsert.engine.keys.placing import WHY_REFUSED
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA, QuarantineWriter
from lakeupsert.engine.replay import STORED_ROW, read_again
from lakeupsert.engine.reports import Refused
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.columns import brought_columns
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import LedgerEntry, Reason
from lakeupsert.table.spec import DELETE_FLAG, FILE, OF_EARLIER_BATCH, PLACE, TableSpec


def quarantine_refused(to: IndexTarget, entry: LedgerEntry, refused: Mapping[Reason, Rows]) -> list[Refused]:
    """Write these rows of the batch of ``entry``, or of earlier ones, to quarantine files."""
    with QuarantineWriter(to.store, to.start, to.footer("quarantine")) as out:
        for reason, rows in refused.items():
            for table in _as_refused(to, entry, rows):
                count = table.num_rows
                columns = dict(zip(table.schema.names, table.columns, strict=True))
                columns |= {"reason_code": pa.repeat(reason, count), "reason": pa.repeat(WHY_REFUSED[reason], count)}
                out.write(pa.table(columns, schema=pa.schema([f for f in QUARANTINE_SCHEMA if f.name in columns])))
    return out.reports()


def _as_refused(to: IndexTarget, entry: LedgerEntry, rows: Rows) -> Iterator[Rows]:
    stored = pc.equal(rows[FILE], OF_EARLIER_BATCH)
    landed = rows.filter(pc.invert(stored))
    yield from _as_quarantined(to, entry, landed) if entry.replayed else _as_landed(entry, landed, to.spec)
    yield from _as_landed(entry, rows.filter(stored), to.spec)


def _as_quarantined(to: IndexTarget, entry: LedgerEntry, rows: Rows) -> Iterator[Rows]:
    """Rows of a replay as they are in the quarantine files that it read."""
    for number, of_file in _by_file(rows):
        yield from read_again(to.store, entry.replayed[number], of_file[PLACE].to_numpy())


def _by_file(rows: Rows) -> Iterator[tuple[int, Rows]]:
    for number in sorted(pc.unique(rows[FILE]).to_pylist()):
        yield number, rows.filter(pc.equal(rows[FILE], number))


def _as_landed(entry: LedgerEntry, rows: Rows, spec: TableSpec) -> Iterator[Rows]:
    """Rows of landing files, so that a replay takes each as it came: its values, its partition and its operation.

    Of operations with one meaning, the first one that the rule declares stands for all.
    """
    given = spec.order_by if spec.stamped or spec.order_in_name else ()
    computed = {one.column for one in spec.partition_from}
    rule = spec.delete
    pieces = ((*brought, number) for number, of_file in _by_file(rows) for brought in brought_columns(of_file, spec))
    for names, some, number in pieces:
        count = some.num_rows
        columns = {name: some[name].combine_chunks() for name in names if name not in given}
        values = [None if name is None else partition_scalars(spec, name) for name in some[PARTITION].to_pylist()]
        for name in spec.partition_by:
            if name not in computed:
                column = [None if of_row is None else of_row[name].as_py() for of_row in values]
                columns[name] = pa.array(column, spec.schema.field(name).type)
        deletes = as_mask(some[DELETE_FLAG])
        is_kept = rule is not None and rule.keep and spec.mode == "columns"  # then it is among what the rows brought
        if rule and rule.column and rule.values and (deletes.any() or rule.upserts) and not is_kept:
            upsert = rule.upserts[0] if rule.upserts else None
            operations = [rule.values[0] if dies else upsert for dies in deletes.tolist()]
            columns[rule.column] = pa.array(operations, pa.string())
        if rule and rule.not_null and deletes.any() and not rule.keep:
            columns[rule.not_null] = pa.array(["true" if dies else None for dies in deletes.tolist()], pa.string())
        block = ArrowBlock(columns, some[PLACE].to_numpy())
        is_stored = number == OF_EARLIER_BATCH
        yield pa.table(
            {
                "file": pa.repeat(STORED_ROW if is_stored else entry.files[number].path, count),
                "position": pa.nulls(count, pa.int64()) if is_stored else some[PLACE],
                "line": pa.nulls(count, pa.int64()),
                "raw": pa.array(block.raw(range(count)), pa.string()),
                "arrow": pa.array(block.arrow(range(count)), pa.binary()),
            }
        )
