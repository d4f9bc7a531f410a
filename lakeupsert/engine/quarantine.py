"""Quarantine files: rows that were refused, with the reason."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.reports import Refused
from lakeupsert.rows.datafiles import DataFileWriter, Footer
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import QuarantineFile

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("reason_code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("position", pa.int64()),
        pa.field("raw", pa.string()),
        pa.field("arrow", pa.binary()),
        pa.field("batch", pa.string(), nullable=False),
    ]
)


class QuarantineWriter:
    """Collects refused rows of one task in one file, which appears when the task is done with its landing files."""

    def __init__(self, store: ObjectStore, start: int, footer: Footer) -> None:
        self._out = DataFileWriter(store, partial(TableObjects.new_quarantine, start), QUARANTINE_SCHEMA, footer, ())
        self._batch_id = footer.batch
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def __enter__(self) -> "QuarantineWriter":
        self._out.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.__exit__(*error)

    def write(self, rows: Any) -> None:
        if rows.num_rows:
            counts = pc.value_counts(rows["reason_code"].combine_chunks()).to_pylist()
            self._reasons.update({c["values"]: c["counts"] for c in counts})
            for code in {c["values"] for c in counts} - self._examples.keys():
                [row] = rows.slice(pc.index(rows["reason_code"], code).as_py(), 1).to_pylist()
                name = row["file"] if row["file"].isprintable() else repr(row["file"])
                place = "" if row["position"] is None else f", place {row['position']}"
                self._examples[code] = f"{name}{place}: {row['reason']}"
            if "batch" not in rows.schema.names:  # a row that is tried again keeps that of the batch that read it
                rows = rows.append_column("batch", pa.array([self._batch_id] * rows.num_rows))
            self._out.write(rows.cast(QUARANTINE_SCHEMA))

    def report(self) -> Iterator[Refused]:
        """One report a file; what is told of the reasons of all of them stands in the first."""
        reasons, examples = dict(self._reasons), self._examples
        for file in self._out.files:
            yield Refused(QuarantineFile(name=file.name, rows=file.rows), reasons, examples)
            reasons, examples = {}, {}
