"""One refused row of each reason, for people.

Reads     quarantine files, newest first, until every reason has an example
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.errors import LakeupsertError
from lakeupsert.phrases import describe_place
from lakeupsert.rows.datafiles import open_object
from lakeupsert.storage import ObjectStore

MOST_FILES = 64
"""Quarantine files that are read. More: a report about large nights takes longer. Fewer: some reasons have no example."""


@dataclass(frozen=True)
class Example:
    """``where``: a landing file, and where the row begins in it, if that is known."""

    where: str
    reason: str


def find_examples(store: ObjectStore, refused: Sequence[tuple[Collection[str], Sequence[str]]]) -> dict[str, Example]:
    """A refused row of each reason. ``refused``: reasons, and the quarantine files that have such rows; the newest first.

    A reason has no example if it is in none of the first `MOST_FILES`, or if its file is gone.
    """
    found: dict[str, Example] = {}
    read = 0
    for reasons, names in refused:
        for name in names:
            if found.keys() >= set(reasons) or read == MOST_FILES:
                break
            read += 1
            try:
                for code, example in _examples(store, name, set(reasons) - found.keys()):
                    found[code] = example
            except LakeupsertError:
                continue  # a vacuum has deleted it
    return found


def _examples(store: ObjectStore, name: str, reasons: set[str]) -> Iterator[tuple[str, Example]]:
    with open_object(store, name) as source:
        file = pq.ParquetFile(source)
        columns = [c for c in ("reason_code", "reason", "file", "position", "line") if c in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            for code in sorted(reasons):
                at = pc.index(batch["reason_code"], code).as_py()
                if at >= 0:
                    reasons.remove(code)
                    [row] = batch.slice(at, 1).to_pylist()
                    yield code, Example(row["file"] + describe_place(row["position"], row.get("line")), row["reason"])
            if not reasons:
                return
