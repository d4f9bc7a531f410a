"""Quarantine files: rows that were refused, each with the reason. Merges write them too, so this must not import `batch`."""

from collections import Counter
from functools import partial
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.reports import Refused
from lakeupsert.landing.refusals import REFUSED_SCHEMA
from lakeupsert.phrases import describe_place
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import QuarantineFile

QUARANTINE_SCHEMA = REFUSED_SCHEMA.append(pa.field("batch", pa.string(), nullable=False))


class QuarantineWriter:
    """Writes a task's refused rows to one file, or to several if there are many, and counts them by reason.

    The files are in the store when the block ends. ``start`` is as in `TableObjects`.
    """

    def __init__(self, store: ObjectStore, start: int, footer: Footer) -> None:
        self._out = DataFileWriter(store, partial(TableObjects.new, "quarantine", start), QUARANTINE_SCHEMA, footer, ())
        self._batch_id = footer.batch
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def __enter__(self) -> "QuarantineWriter":
        self._out.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.__exit__(kind, error, trace)

    def write(self, rows: Rows) -> None:
        """``rows`` has the columns of `QUARANTINE_SCHEMA`, ``batch`` only if an earlier batch read and refused them."""
        if rows.num_rows:
            counts = pc.value_counts(rows["reason_code"].combine_chunks()).to_pylist()
            self._reasons.update({c["values"]: c["counts"] for c in counts})
            for code in {c["values"] for c in counts} - self._examples.keys():
                [row] = rows.slice(pc.index(rows["reason_code"], code).as_py(), 1).to_pylist()
                name = row["file"] if row["file"].isprintable() else repr(row["file"])
                self._examples[code] = f"{name}{describe_place(row['position'], row['line'])}: {row['reason']}"
            if "batch" not in rows.schema.names:
                rows = rows.append_column("batch", pa.array([self._batch_id] * rows.num_rows))
            self._out.write(rows.cast(QUARANTINE_SCHEMA))

    def reports(self) -> list[Refused]:
        """After the block: one report a file. The first one has the reasons and examples of all files."""
        return [
            Refused(
                QuarantineFile(name=file.name, rows=file.rows),
                dict(self._reasons) if number == 0 else {},
                self._examples if number == 0 else {},
            )
            for number, file in enumerate(self._out.files)
        ]
