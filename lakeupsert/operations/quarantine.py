"""Read the refused rows of a table: those that batches refused, and those that merges refused.

Reads     the ledger and the quarantine files; also the newest manifest of each partition if a merge may have refused a row
Writes    nothing
Repeat    safe, also during a night
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.rows.datafiles import align, open_object
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import QUARANTINE
from lakeupsert.table.ledger import LedgerEntry, Reason, find_quarantined

QUARANTINED = pa.schema(
    [
        ("batch", pa.int64()),
        ("batch_id", pa.string()),
        ("reason_code", pa.string()),
        ("reason", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("position", pa.int64()),
        ("raw", pa.string()),
    ]
)
"""``batch`` is null for a batch that was refused as a whole; ``line`` if the format has no lines, and in files of an earlier
lakeupsert."""


def quarantined_rows(table: OpenTable, reason: Reason | None = None, files: Sequence[str] = ()) -> pa.RecordBatchReader:
    """Read the rows in quarantine as `QUARANTINED`, those of the newest batch first, then those that merges refused.

    Rows that a replay refused again are among those of the replay; ``batch`` is the one that read them from a landing file.
    Before the first batch is committed, these are the rows for which it was refused. Rows of batches that a restore
    withdrew are left out, and so are rows that a replay has taken. Memory: a row group.

    Args:
        reason: only rows that were refused for it.
        files: only these quarantine files, whether a batch names them or not: names below the table, paths or addresses.

    Raises:
        ConfigurationError: there is no table yet, or no quarantine file of such a name.
        DamagedTableError: while reading, a quarantine file is missing or can't be read.
    """
    ledger = table.history.ledger_head()
    headers = table.history.headers(ledger.number) if ledger else []
    if files:
        names = [_named(table, file) for file in files]
    elif ledger is None:  # every first batch was refused as a whole, the newest of them with these rows
        newest = max(table.resources.store.list(f"{QUARANTINE}/"), key=lambda file: file.modified, default=None)
        if newest is None:
            raise table.history.no_table_yet()
        names = [newest.name]
    else:
        batches = [file.name for file in reversed(find_quarantined(headers))]
        names = [*batches, *_refused_by_merges(table.history, headers)]
    return pa.RecordBatchReader.from_batches(QUARANTINED, _read(table.resources.store, names, reason, headers))


def _named(table: OpenTable, file: str) -> str:
    """The name below the table of a quarantine file."""
    name = file[max(file.find(f"{QUARANTINE}/"), 0) :]
    if not name.startswith(f"{QUARANTINE}/") or table.resources.store.head(name) is None:
        raise ConfigurationError(
            "no-quarantine-file",
            f"Table {table.name!r} has no quarantine file {file!r}. Nothing was read.",
            next="give the name as the error or warning has it; `lakeupsert quarantine` without a file reads all of them",
        )
    return name


def _refused_by_merges(history: History, headers: Sequence[LedgerEntry]) -> list[str]:
    """The quarantine files of merges. Only a table that has forgotten deletes refuses rows while it merges."""
    if not any(entry.full or entry.retention is not None for entry in headers):
        return []
    snapshot = history.last_snapshot()
    shown = snapshot.body if snapshot else None
    partitions = {*(shown.partitions if shown else ()), *unpublished_up_to(history, shown, len(headers) - 1)}
    heads = history.heads(sorted(partitions))
    return [name for head in heads.values() for name in reversed(head.body.quarantine)]


def _read(
    store: ObjectStore, names: Sequence[str], reason: Reason | None, headers: Sequence[LedgerEntry]
) -> Iterator[pa.RecordBatch]:
    numbers = {entry.batch_id: number for number, entry in enumerate(headers)}
    for name in names:
        with open_object(store, name) as source:
            file = pq.ParquetFile(source)
            wanted = [column for column in ("batch", *QUARANTINED.names[2:]) if column in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number, columns=wanted)
                if reason is not None:
                    rows = rows.filter(pc.equal(rows["reason_code"], reason))
                ids = rows["batch"]
                batches = pa.array([numbers.get(id_) for id_ in ids.to_pylist()], pa.int64())
                rows = rows.drop_columns("batch").append_column("batch", batches).append_column("batch_id", ids)
                yield from align(rows, QUARANTINED).to_batches()
