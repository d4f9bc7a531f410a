"""What retypes make of the values that a table holds, and the ledger entry from which on a changed spec counts.

Reads     the last snapshot, the heads of partitions that it does not show whole, ledger entries, and the data files that these
          name: the key and the retyped column; for the quarantine all columns of a file with an unfit value
Writes    quarantine files, then ONE ledger entry that names them and the spec
Repeat    safe: if the ledger has the spec already, nothing is written

A value that does not convert is null from the entry on. The same entry names the quarantine files with its row, so no value is
lost. A batch that gets the next number first is looked at, too, before the entry is tried again (ADR 0038).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA, QuarantineWriter
from lakeupsert.engine.reports import Refused
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.state import merged_up_to, state_at
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.progress import Share
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.convert import convert
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.rows.filewriter import Footer
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import ObjectStore
from lakeupsert.table.chain import LOST, Link, Lost, until_won
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import LedgerEntry, next_stamp
from lakeupsert.table.manifest import BucketEntry, DataFile
from lakeupsert.table.spec import DELETE_FLAG, TableSpec, TypeChange
from lakeupsert.table.types import type_name

MOST_VALUES = 1000
"""Different unfit values that are listed with their places. The rows of all others are counted."""


class Held(NamedTuple):
    """A data file of a partition."""

    partition: str
    file: DataFile


@dataclass(frozen=True)
class UnfitValue:
    """A value that does not convert, as JSON has it: in how many rows it is, and partition and key of one of them."""

    value: object
    rows: int
    partition: str
    key: dict[str, object]


@dataclass
class Conversion:
    """What a retype makes of the values that the table holds, merged or waiting. Nulls stay null and are not counted.

    Attributes:
        converted, unfit: rows whose value converts, and does not.
        values: the first `MOST_VALUES` different values that do not.
    """

    column: str
    change: TypeChange
    converted: int = 0
    unfit: int = 0
    values: dict[str, UnfitValue] = field(default_factory=dict)

    def add(self, value: object, partition: str, key: dict[str, object]) -> None:
        """Count one more row with an unfit value."""
        self.unfit += 1
        text = str(value)
        if known := self.values.get(text):
            self.values[text] = replace(known, rows=known.rows + 1)
        elif len(self.values) < MOST_VALUES:
            self.values[text] = UnfitValue(value, 1, partition, key)


@dataclass(frozen=True)
class Retyping:
    """A retype of ``column``, as it is called in the spec ``before``; the spec ``after`` is the next one."""

    before: TableSpec
    after: TableSpec
    version: int
    column: str
    change: TypeChange


def look(
    table: OpenTable,
    head: Link[LedgerEntry],
    before: TableSpec,
    after: TableSpec,
    progress: Callable[[str], None] = lambda text: None,
) -> Conversion | None:
    """What the retype between two specs makes of the values in the table as of ledger number ``head``; None if there is none."""
    retype = next(iter(_retypes(0, [before, after])), None)
    if retype is None:
        return None
    found = Conversion(retype.column, retype.change)
    files = list(_held(table.history, head))
    for done, held in enumerate(files):
        progress(Share(f"looking at {held.partition}", done, len(files)))
        for _ in _unfit_rows(table.resources.store, held, retype, found):
            pass
    return found


def is_waiting(history: History, spec: Link[TableSpec], head: Link[LedgerEntry]) -> bool:
    """Whether the spec retypes a column and no ledger entry names it yet: whoever wrote it died before the entry."""
    return spec.number > head.body.spec_version and bool(retypes_between(history, head.body.spec_version, spec.number))


def enter(table: OpenTable, version: int) -> int:
    """Commit the spec by a ledger entry; returns the first ledger number with ``version`` or a newer one.

    The entry names quarantine files with the rows whose values do not convert. Raises TryAgainError after too many lost races.
    """
    work = _Entering(table, version, clock.new_id())
    link = until_won(table.resources.store.uri(), work.attempt)
    if link is not None:
        return link.number
    head = table.history.ledger_head()
    number = head.number if head else 0
    while number and table.history.entries(number - 2, number - 1)[0].body.spec_version >= version:
        number -= 1
    return number


def restored_files(
    history: History, versions: Mapping[str, int], batch: int, active: Collection[int]
) -> Iterator[Held]:
    """The files of these versions, and of batches above them up to ``batch`` that count."""
    for partition, version in versions.items():
        manifest = history.version(partition, version)
        yield from _stored(partition, manifest.buckets)
        for link in history.entries(manifest.merged, batch):
            if link.number in active and partition in link.body.touched:
                yield from (Held(partition, file) for file in link.body.touched[partition].files)


def retypes_between(history: History, since: int, version: int) -> list[Retyping]:
    """The retypes after version ``since`` of the spec, up to ``version``."""
    if not any(one.retyped for one in history.spec(version).renames):
        return []
    return _retypes(since, [history.spec(number) for number in range(since, version + 1)])


def count_unfit(store: ObjectStore, retypes: Sequence[Retyping], files: Iterable[Held]) -> int:
    """How many rows of these files have a value that one of the retypes does not convert."""
    found = (_unfit_rows(store, held, retype) for held in (files if retypes else ()) for retype in retypes)
    return sum(rows.num_rows for of_file in found for rows in of_file)


def quarantine_unfit(
    store: ObjectStore, retypes: Sequence[Retyping], files: Iterable[Held], start: int, batch_id: str
) -> list[Refused]:
    """Write these rows to quarantine files, which nothing names yet. ``start`` is as in `TableObjects`."""
    if not retypes:
        return []
    spec = retypes[-1].after
    footer = Footer(spec.table_id, "quarantine", batch_id, retypes[-1].version)
    with QuarantineWriter(store, start, footer) as out:
        for held in files:
            for retype in retypes:
                for rows in _unfit_rows(store, held, retype, whole=True):
                    out.write(_quarantined(rows, held, retype))
    return out.reports()


@dataclass
class _Entering:
    """The attempts to commit a spec. ``seen`` is the ledger number whose files were looked at."""

    table: OpenTable
    version: int
    batch_id: str
    seen: int | None = None
    reports: list[Refused] = field(default_factory=list)

    def attempt(self) -> Link[LedgerEntry] | Lost | None:
        """The entry; None if the ledger has the spec, by a batch or by a later change."""
        table = self.table
        table.history.last_snapshot()  # before the ledger, so that the ledger has everything that it shows
        head = table.history.ledger_head()
        assert head is not None, "the table exists"
        if head.body.spec_version >= self.version:
            self._forget()
            return None
        self._look(head)
        rows = sum(report.file.rows for report in self.reports)
        entry = LedgerEntry(
            kind="schema",
            batch_id=self.batch_id,
            received_at=next_stamp(head.body),
            spec_version=self.version,
            rows_read=rows,
            quarantined={"retyped": rows} if rows else {},
            quarantine=tuple(report.file for report in self.reports),
            snapshot=head.body.snapshot,
        )
        outcome = table.history.objects.ledger.append(entry, head)
        if outcome.result == "unknown":  # the entry may be there, and name the files
            self.reports, self.seen = [], None
        return outcome.link or LOST

    def _look(self, head: Link[LedgerEntry]) -> None:
        """Quarantine the unfit rows up to ``head``: after a lost race, those of the batches that were faster. Merges bring no
        value that was not there; a restore may, and behind a fence the files may be gone that were written before it."""
        retypes = retypes_between(self.table.history, head.body.spec_version, self.version)
        if not retypes:
            return
        newer = [] if self.seen is None else [link.body for link in self.table.history.entries(self.seen, head.number)]
        if self.seen is None or any(entry.kind in ("restore", "fence") for entry in newer):
            self._forget()
            files: Iterable[Held] = _held(self.table.history, head)
        else:
            touched = ((partition, entry.touched[partition].files) for entry in newer for partition in entry.touched)
            files = (Held(partition, file) for partition, of_batch in touched for file in of_batch)
        self.reports += quarantine_unfit(self.table.resources.store, retypes, files, head.number + 1, self.batch_id)
        self.seen = head.number

    def _forget(self) -> None:
        self.table.resources.discard(report.file.name for report in self.reports)
        self.reports.clear()


def _retypes(since: int, specs: Sequence[TableSpec]) -> list[Retyping]:
    """The retypes between consecutive specs, the first of which is version ``since``."""
    found = []
    for version, (before, after) in enumerate(pairwise(specs), since + 1):
        for one in after.renames[len(before.renames) :]:
            if one.retyped is not None:
                found.append(Retyping(before, after, version, one.name, one.retyped.change))
    return found


def _held(history: History, head: Link[LedgerEntry]) -> Iterator[Held]:
    """The files that hold the rows of the table as of a ledger number: of each partition those that the last snapshot shows, or
    of one that it does not show whole what the next merge starts from and reads."""
    link = history.known_snapshot
    snapshot = link.body if link else None
    touched = unpublished(history, link, head)
    heads = history.heads(touched)
    for partition in sorted({*(snapshot.partitions if snapshot else ()), *touched}):
        if snapshot is not None and partition not in touched:
            shown = history.version(partition, snapshot.partitions[partition])
            yield from _stored(partition, shown.buckets)
            continue
        newest = history.behind(link, partition, heads.get(partition), up_to=head.number)
        number = max(head.number, newest.body.merged if newest else 0)
        state = state_at(history, partition, newest, merged_up_to(partition, newest, snapshot), number)
        yield from _stored(partition, state.base.buckets)
        touches = (entry.body.touched[partition] for entry in state.counted)
        yield from (Held(partition, file) for touch in touches for file in touch.files)


def _stored(partition: str, buckets: Iterable[BucketEntry]) -> Iterator[Held]:
    """The files of these buckets, those of superseded versions included."""
    return (Held(partition, file) for bucket in buckets for file in (*bucket.data, *bucket.history))


def _unfit_rows(
    store: ObjectStore, held: Held, retype: Retyping, found: Conversion | None = None, *, whole: bool = False
) -> Iterator[Rows]:
    """The live rows of a file whose values a retype does not convert, with the columns of before: all of them if ``whole``, else
    the key and the retyped one. ``found`` counts them, and those that convert."""
    spec, column = retype.before, retype.column
    if held.file.renames >= len(retype.after.renames):
        return
    names = spec.stored_schema.names if whole else [*spec.stored_key, column]
    schema = pa.schema([*map(spec.schema.field, names), pa.field(DELETE_FLAG, pa.bool_())])
    for block in stream_file(store, held.file, schema, spec=spec):
        rows = block.filter(pc.invert(pc.fill_null(block[DELETE_FLAG], False))).drop_columns(DELETE_FLAG)
        bad = [convert(chunk, retype.change.after)[1] for chunk in rows[column].chunks]
        unfit = rows.filter(pa.array(np.concatenate([np.zeros(0, bool), *bad])))
        if found is not None:
            found.converted += rows.num_rows - rows[column].null_count - unfit.num_rows
            _count(unfit, held.partition, retype, found)
        if unfit.num_rows:
            yield unfit


def _count(unfit: Rows, partition: str, retype: Retyping, found: Conversion) -> None:
    folders = partition_scalars(retype.before, partition)
    columns = {name: to_json_values(unfit[name].combine_chunks()) for name in retype.before.stored_key}
    columns |= {name: to_json_values(pa.repeat(value, unfit.num_rows)) for name, value in folders.items()}
    for place, value in enumerate(to_json_values(unfit[retype.column].combine_chunks())):
        found.add(value, partition, {name: columns[name][place] for name in retype.before.key})


def _quarantined(unfit: Rows, held: Held, retype: Retyping) -> Rows:
    """The rows as quarantine files have them. Their landing files may be gone, so the data file is named."""
    count, every = unfit.num_rows, range(unfit.num_rows)
    folders = partition_scalars(retype.before, held.partition)
    columns = {name: unfit[name].combine_chunks() for name in unfit.schema.names}
    columns |= {name: pa.repeat(value, count) for name, value in folders.items()}
    block = ArrowBlock(columns, np.arange(count))
    type_ = type_name(retype.change.after)
    values = [_shorten(repr(value)) for value in block.originals(retype.column, every)]
    nowhere = pa.nulls(count, pa.int64())
    return pa.table(
        {
            "reason_code": ["retyped"] * count,
            "reason": [f"The value {value} of {retype.column!r} does not convert to {type_}." for value in values],
            "file": [held.file.name] * count,
            "position": nowhere,
            "line": nowhere,
            "raw": block.raw(every),
            "arrow": block.arrow(every),
        },
        schema=QUARANTINE_SCHEMA.remove(QUARANTINE_SCHEMA.get_field_index("batch")),
    )


def _shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
