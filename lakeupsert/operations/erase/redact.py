"""Take the values of erased keys out of quarantine files, under the names that the ledger has.

Reads     quarantine files
Writes    each redacted file, first aside and then in the place of the one before
Repeat    safe: a call that broke off left the redacted file aside, and the next one puts it in its place
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.config import Reading
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.engine.replay import find_tried
from lakeupsert.operations.erase.find import Keys, find_refused
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.datafiles import from_bytes, open_object, to_bytes
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.storage.base import Sink
from lakeupsert.table.layout import ERASURES, QUARANTINE

ASIDE = f"{ERASURES}/aside/"
ERASED = "Its key was erased."


def redact(store: ObjectStore, name: str, keys: Keys, reading: Reading) -> None:
    """Replace a quarantine file by one whose rows of these keys have no values. Each keeps its place, file and reason code."""
    with open_object(store, name) as source, pq.ParquetFile(source) as file:
        rows, footer = file.read(), Footer.of(file.metadata)
    left = _without_values(rows, find_refused(rows, keys, reading))
    with DataFileWriter(_Aside(store), lambda: name, QUARANTINE_SCHEMA, footer, ()) as out:
        out.write(left.cast(QUARANTINE_SCHEMA))
    _put_in_place(store, name)


def finish(store: ObjectStore) -> None:
    """Put the files in their places that calls which broke off have left aside."""
    for found in store.list(ASIDE):
        _put_in_place(store, f"{QUARANTINE}/{found.name.removeprefix(ASIDE)}")


@dataclass(frozen=True)
class _Aside:
    """Writes objects aside."""

    store: ObjectStore

    def write(self, name: str) -> AbstractContextManager[Sink]:
        return self.store.write(_aside(name))


def _aside(name: str) -> str:
    return f"{ASIDE}{name.removeprefix(f'{QUARANTINE}/')}"


def _put_in_place(store: ObjectStore, name: str) -> None:
    try:
        data = store.get(_aside(name))
    except NotFoundError:  # another call has put it there
        return
    store.delete([name])
    with store.write(name) as sink:
        sink.write(data)
    store.delete([_aside(name)])


def _without_values(rows: Rows, erased: Mask) -> Rows:
    for column, value in {"raw": "{}", "reason": ERASED}.items():
        texts = np.where(erased, value, rows[column].to_numpy(zero_copy_only=False))
        rows = rows.set_column(rows.schema.get_field_index(column), column, pa.array(texts, pa.string()))
    # A stream has its row and some of the next ones (docs/FORMAT.md, "quarantine").
    streams, tried, at = rows["arrow"].to_pylist(), find_tried(rows), 0
    while at < len(tried):
        place, stream = tried[at], streams[tried[at]]
        own = from_bytes(stream) if stream is not None else None
        count = 1 if own is None else own.num_rows
        gone = erased[tried[at : at + count]]
        if own is not None and gone.any():
            streams[place] = to_bytes(own.take(pa.array(np.arange(count), mask=gone)))
        at += count
    return rows.set_column(rows.schema.get_field_index("arrow"), "arrow", pa.array(streams, pa.binary()))
