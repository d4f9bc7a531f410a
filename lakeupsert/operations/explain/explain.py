"""Explain one key: show every stored version of it, where it is, and why the current one wins.

Reads     the newest snapshot, the ledger from the first batch on whose appended files may be there, the newest and the published
          manifest of each partition, and the files that these and the ledger name (`rows`)
Writes    nothing
Repeat    safe, also during a night

Nothing is decided here: `rows.rank` orders the versions, and the manifests' files say what counts. Rows that lost to another
row of their batch are in no file, so only their number is known. If keys are unique in the whole table, these rows are in the
files, marked, and so are rows that lost to a row in another partition.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import pyarrow as pa

from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.operations.explain.entries import Entries
from lakeupsert.operations.explain.rows import (
    AGE,
    FilePlace,
    JsonValue,
    KeyRow,
    Match,
    RowSearch,
    Source,
    forgotten_before_extract,
    replaced,
)
from lakeupsert.operations.explain.why import Outcome, describe_gone, describe_unseen, why
from lakeupsert.pipeline.merge.state import merged_up_to
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.keys import key_values
from lakeupsert.read.view import View
from lakeupsert.rows.buckets import hash_numbers
from lakeupsert.rows.columns import columns_by_record
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import parse_partition, partition_scalars
from lakeupsert.table.ledger import NOTHING, LedgerEntry
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import FILE, PLACE, TableSpec

MOST_MATCHES = 20
"""How many matching keys are listed for a part of a key. More: users see more at once, and have to scroll."""


@dataclass(frozen=True)
class Version:
    """One version of the key, in one place. A winner is in two: as it arrived, and as it is stored.

    Attributes:
        batch, batch_id, received_at, file, place: where it came from; None if its appended file is gone. ``file`` is the landing
            file (for a replayed row, the quarantine file) and ``place`` the row's place in it; None for adopted rows.
        order: values of the ordering columns, as JSON has them.
        object: the object that holds it, relative to the table.
        outcome: *shown* to readers; it *deletes* the row that they would see; it *won, not published*; *pending*: its batch is
            not merged; *superseded*; *withdrawn*: of greater rank than what is stored, but does not count; *refused*: below the
            floor, so in quarantine; *forgotten*: a delete whose tombstone was dropped; *lacking*: a full extract lacked the key;
            *replaced*: a full extract had the key and replaced what was before it; *in part*: in mode columns, readers see some
            columns of it.
        columns: in mode columns, the columns of it that readers see.
        moved_to: for a delete that `append` wrote, the partition that the key moved to.
        moved_from: for a row that followed its key, the partition that it comes from; what made it came with earlier batches.
    """

    source: Source
    batch: int | None
    batch_id: str | None
    received_at: str | None
    file: str | None
    place: int | None
    order: dict[str, JsonValue]
    delete: bool
    object: str
    outcome: Outcome
    columns: tuple[str, ...] | None = None
    moved_to: str | None = None
    moved_from: str | None = None


@dataclass(frozen=True)
class ExplainedPartition:
    """The key in one partition.

    Attributes:
        versions: greatest rank first; a stored copy follows the version that it is a copy of.
        shown: the row that readers see, with all columns, as JSON has them.
        version, since: the partition's version that readers see, and the first snapshot with its row, of those kept.
        settled: batches that brought the key, with the number of rows of this partition that lost within the batch.
        settled_of_key: how many of these were of this key; None if that is not known, since no file has them.
        gone: appended files that were deleted, by batch; what they held of the key is not known.
        gone_before: the appended files of all batches before this one were deleted, except those of statements.
    """

    partition: str
    versions: tuple[Version, ...]
    shown: dict[str, JsonValue] | None
    why: str
    version: int | None
    since: int | None
    settled: dict[int, int]
    settled_of_key: dict[int, int | None]
    gone: tuple[tuple[int, str], ...]
    gone_before: int


@dataclass(frozen=True)
class Explanation:
    """The key, as values of its columns' types, and each partition that has it; for a part of a key, the first keys that fit.

    Attributes:
        matches: up to `MOST_MATCHES`, by partition and key; empty for a whole key.
        more: how many other keys fit.
    """

    key: dict[str, JsonValue]
    partitions: tuple[ExplainedPartition, ...]
    matches: tuple[Match, ...] = ()
    more: int = 0


def explain(table: OpenTable, key: Mapping[str, JsonValue], partition: str | None = None) -> Explanation:
    """Find every version of ``key``, in one partition or in all. For a part of a key, find the keys that fit.

    Args:
        key: a value for each key column, as text or in the column's type; the partition column may be among them.
        partition: `2020-01-01`, or its folder.
    Raises:
        ConfigurationError: a column is not part of the key; a value does not fit its column.
        RefusedError: the table has no version of the key, or no key fits.
    """
    snapshot = table.history.last_snapshot()
    ledger = table.history.ledger_head()
    spec = table.history.existing_spec()
    view = View.of(table.history.objects, spec, snapshot)
    values = key_values(table.name, spec, key)
    chosen = None if partition is None else partition_scalars(spec, parse_partition(spec, partition))
    wanted_values = {**(chosen or {}), **{c: values[c][0] for c in spec.partition_by if c in values}}
    for one in spec.hash_columns:
        if chosen is None and one.count is not None and values.keys() >= set(one.hashed):
            wanted_values.setdefault(one.column, hash_numbers([values[c] for c in one.hashed], one.count)[0])
    if chosen is not None and any(chosen[column] != value for column, value in wanted_values.items()):
        named = ", ".join(f"{column}={key[column]}" for column in spec.partition_by if column in key)
        raise ConfigurationError(
            "two-partitions",
            f"{named} and --partition {partition} name different partitions.",
            next="give the partition once",
        )
    search = _Search(
        table, RowSearch(table, spec, values), view, snapshot, Entries.of(table, ledger.number if ledger else -1)
    )
    later = table.history.entries(snapshot.body.batch if snapshot else -1, search.entries.last)
    partitions = {p for link in later for p in link.body.touched}
    partitions |= view.snapshot.partitions.keys()
    wanted = sorted(p for p in partitions if wanted_values.items() <= partition_scalars(spec, p).items())
    is_whole = set(spec.key) <= values.keys()
    named_key = {name: to_json_values(values[name])[0] for name in (spec.key if is_whole else values)}
    if is_whole:
        found = Explanation(named_key, tuple(search.explain_all(wanted)))
    else:
        found = Explanation(named_key, (), *search.matches(wanted))
    if found.partitions or found.matches:
        return found
    text = " ".join(f"{name}={value}" for name, value in named_key.items())
    where = f"{len(wanted)} partition{'' if len(wanted) == 1 else 's'}"
    if not wanted:
        named = ", ".join(str(key[column]) for column in spec.partition_by if column in key)
        where = f"there is no partition {partition or named!r}"
    raise RefusedError(
        "key-not-found",
        f"Table {table.name!r} has no version of {text}. Searched: {where}, {search.rows.files} files, up to batch "
        f"{search.entries.last}" + describe_gone(search.gone, search.entries.first) + ".",
        next="check the value; `lakeupsert quarantine` shows refused rows, and `lakeupsert run` appends files that are "
        "in no batch yet",
    )


@dataclass(frozen=True)
class _Found:
    """What was found of the key in a partition; all but ``rows`` as in `ExplainedPartition`."""

    rows: list[KeyRow]
    settled: dict[int, int]
    settled_of_key: dict[int, int | None]
    gone: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class _Ranking:
    """The rows of the key in a partition, greatest rank first, and what decides their outcomes.

    Attributes:
        shown, won: the rows that readers see, and that the newest version stores, each with its stored copy.
        merged, counts: the last batch that is merged, and the batches that count there.
        uncounted: rows that do not count because of a full extract that lacks the key, or that has it and replaces them, or a
            floor, each with its outcome.
        void: deletes that do not count because they were forgotten.
        forgets: the partition has forgotten tombstones.
    """

    rows: list[KeyRow]
    shown: dict[KeyRow, KeyRow]
    won: dict[KeyRow, KeyRow]
    merged: int
    counts: AbstractSet[int]
    uncounted: Mapping[KeyRow, Outcome]
    void: AbstractSet[KeyRow]
    forgets: bool

    def outcomes(self) -> dict[KeyRow, Outcome]:
        uncounted = self.uncounted.keys() | self.void
        deletes = (row for row in self.rows if row.deletes and row.age in self.counts and row not in uncounted)
        forgotten = next(deletes, None) if self.forgets and not self.won else None
        standing = [*self.won, *([forgotten] if forgotten else [])]
        lowest = max((self.rows.index(row) for row in standing), default=len(self.rows))
        return {row: self._outcome(row, forgotten, is_above=rank < lowest) for rank, row in enumerate(self.rows)}

    def _outcome(self, row: KeyRow, forgotten: KeyRow | None, *, is_above: bool) -> Outcome:
        """``is_above``: it has greater rank than the rows that are stored, or than ``forgotten``."""
        if row.lost_in_append:
            return "superseded"
        if row in self.shown:
            return "deletes" if row.deletes else "shown"
        if row in self.won:
            return "won, not published"
        if row.age > self.merged:
            return "pending"
        if row in self.uncounted:
            return self.uncounted[row]
        if row is forgotten:
            return "forgotten"
        if not is_above:
            return "superseded"
        if row.age not in self.counts or not self.forgets:
            return "withdrawn"
        # Above what is stored: a full extract had the key after the delete was forgotten; the other rows lost to the delete.
        return "forgotten" if row.deletes else "superseded"


@dataclass
class _Search:
    """One key, looked for in one partition after the other. ``gone``: how many appended files that entries name were missing."""

    table: OpenTable
    rows: RowSearch
    view: View
    snapshot: Link[Snapshot] | None
    entries: Entries
    gone: int = 0

    @property
    def spec(self) -> TableSpec:
        return self.rows.spec

    def matches(self, partitions: Sequence[str]) -> tuple[tuple[Match, ...], int]:
        """The first keys that fit, and how many others fit."""
        found: list[Match] = []
        total = 0
        for partition in partitions:
            head, readers = self._versions(partition)
            counts = self.entries.counting(self.entries.last)
            merged = merged_up_to(partition, head, self.snapshot.body if self.snapshot else None)
            entries = self.table.history.entries(merged, self.entries.last)
            pending = [link for link in entries if link.number in counts and partition in link.body.touched]
            folders = partition_scalars(self.spec, partition)
            some, count = self.rows.matches(partition, readers, head, pending, folders, MOST_MATCHES - len(found))
            found, total = [*found, *some], total + count
        return tuple(found), total - len(found)

    def _versions(self, partition: str) -> tuple[Link[Manifest] | None, Link[Manifest] | None]:
        """The partition's newest version, and the one that readers see."""
        head = self.table.history.objects.partition(partition).head()
        shown = self.view.manifest(partition, head) if partition in self.view.snapshot.partitions else None
        is_ahead = shown is not None and head is not None and shown.body.merged > head.body.merged  # in a group
        return shown if is_ahead else head, shown

    def explain_all(self, partitions: Sequence[str]) -> list[ExplainedPartition]:
        """The key in each partition that has it, several partitions at a time."""
        searches = [replace(self, rows=replace(self.rows, files=0), gone=0) for _ in partitions]
        found = self.table.resources.map_concurrently(
            lambda one: one[0].explain(one[1]), [*zip(searches, partitions, strict=True)]
        )
        self.rows.files += sum(search.rows.files for search in searches)
        self.gone += sum(search.gone for search in searches)
        return [one for one in found if one is not None]

    def explain(self, partition: str) -> ExplainedPartition | None:
        """The key in one partition; None if it is not there."""
        head, readers = self._versions(partition)
        entries = self.entries.with_files(max(self.entries.last, head.body.merged if head else -1))
        self._follow_renames(entries, head)
        found = self._find(partition, entries)
        self.gone += len(found.gone)
        ranking = self._rank(partition, found.rows, head, readers)
        if not ranking.rows:
            return None
        copies = ranking.won | ranking.shown
        outcomes = ranking.outcomes()
        columns = self._columns([row for row, o in outcomes.items() if o in ("shown", "superseded")], ranking.shown)
        outcomes |= {row: "in part" for row in columns if outcomes[row] == "superseded"}
        versions: list[Version] = []
        for row, outcome in outcomes.items():
            versions.append(self._version(row, row, outcome, columns.get(row)))
            if row in copies and copies[row].object != row.object:
                versions.append(self._version(row, copies[row], outcome))
        seen = next((row for row, outcome in outcomes.items() if outcome == "shown"), None)
        unseen = describe_unseen(found.settled_of_key, found.settled, found.gone, self.entries.first)
        return ExplainedPartition(
            partition=partition,
            versions=tuple(versions),
            shown=self._as_shown(partition, ranking.shown.get(seen, seen), readers) if seen else None,
            why=why(self.spec, outcomes, head, ranking.void, unseen),
            version=readers.number if readers else None,
            since=self._since(partition, next(iter(ranking.shown), None)),
            settled=found.settled,
            settled_of_key=found.settled_of_key,
            gone=found.gone,
            gone_before=self.entries.first,
        )

    def _follow_renames(self, entries: Sequence[Link[LedgerEntry]], head: Link[Manifest] | None) -> None:
        """Take the newest spec, if columns were renamed since the search began."""
        newest = self.table.history.spec(
            max(entries[-1].body.spec_version if entries else 0, head.body.spec_version if head else 0)
        )
        if len(newest.renames) > len(self.spec.renames):
            self.rows.spec = newest

    def _find(self, partition: str, entries: Sequence[Link[LedgerEntry]]) -> _Found:
        rows: list[KeyRow] = []
        settled: dict[int, int] = {}
        settled_of_key: dict[int, int | None] = {}
        gone: list[tuple[int, str]] = []
        for link in entries:
            touched = link.body.touched.get(partition, NOTHING)
            source: Source = "adopted" if link.body.kind == "create" else "appended"
            for number, file in enumerate(touched.files):
                try:
                    found = self.rows.rows_in(file, FilePlace(source, link.number, link, number))
                except DamagedTableError as e:
                    e.partition = e.partition or partition
                    if self.table.resources.store.head(file.name) is not None:
                        raise
                    gone.append((link.number, file.name))
                    continue
                rows += found
                unseen = touched.superseded - sum(f.deleted.rows for f in touched.files if f.deleted)
                if found and unseen:
                    settled[link.number] = unseen
                    # A row that lost, lost to a row of its own key.
                    is_alone = sum(f.rows for f in touched.files) == len(found)
                    settled_of_key[link.number] = unseen if is_alone else None
        return _Found(rows, settled, settled_of_key, tuple(gone))

    def _rank(
        self,
        partition: str,
        rows: list[KeyRow],
        head: Link[Manifest] | None,
        readers: Link[Manifest] | None,
    ) -> _Ranking:
        merged = head.body.merged if head else -1
        counts = self.entries.counting(merged)
        decide = self.entries.that_decide([row.age for row in rows], merged)
        counted = [link for link in decide if link.number in counts and partition in link.body.touched]
        counting = [row for row in rows if row.age in counts]
        outcomes: dict[KeyRow, Outcome] = {
            **dict.fromkeys(replaced(counting, counted), "replaced"),
            **dict.fromkeys(self.rows.lacking(counting, counted), "lacking"),
            **dict.fromkeys(self.rows.refused(rows, [link.body for link in (head, readers) if link]), "refused"),
        }
        void = forgotten_before_extract(rows, counted)
        uncounted = {*outcomes, *void, *(row for row in rows if row.age not in counts)}
        # Readers' version first: if the newest one holds the same row in another file, that is not another version.
        rows, shown = self.rows.with_stored(rows, partition, readers, uncounted)
        won = shown
        if head is not None and (readers is None or head.number != readers.number):
            rows, won = self.rows.with_stored(rows, partition, head, uncounted)
        return _Ranking(
            rows=rows,
            shown=shown,
            won=won,
            merged=merged,
            counts=counts,
            uncounted=outcomes,
            void=void - won.keys() - shown.keys(),
            forgets=head is not None and any(bucket.floor for bucket in head.body.buckets),
        )

    def _columns(self, rows: Sequence[KeyRow], shown: Mapping[KeyRow, KeyRow]) -> dict[KeyRow, tuple[str, ...]]:
        """In mode columns: the columns of each row that readers see."""
        seen = next(iter(shown), None)
        if self.spec.mode == "rows" or seen is None or seen not in rows:
            return {}
        merged = shown[seen].age
        counts = self.entries.counting(merged)
        rows = [row for row in rows if row.age <= merged and (row.link is None or row.link.number in counts)]
        names = columns_by_record(pa.concat_tables([row.values for row in rows]), self.spec, (AGE.name, FILE, PLACE))
        return {row: tuple(columns) for row, columns in zip(rows, names, strict=True) if columns}

    def _version(
        self, origin: KeyRow, row: KeyRow, outcome: Outcome, columns: tuple[str, ...] | None = None
    ) -> Version:
        link = origin.link
        return Version(
            source=row.source,
            batch=link.number if link else None,
            batch_id=link.body.batch_id if link else None,
            received_at=link.body.received.isoformat() if link else None,
            file=origin.file,
            place=origin.value(PLACE) if origin.file else None,
            order=row.texts(self.spec.all_orders),
            delete=row.deletes,
            object=row.object,
            outcome=outcome,
            columns=columns,
            moved_to=origin.moved_to,
            moved_from=origin.moved_from,
        )

    def _as_shown(self, partition: str, row: KeyRow, readers: Link[Manifest] | None) -> dict[str, JsonValue]:
        """The row under the names that readers see, which may be those before a rename that is not published."""
        if self.view.spec.renames == self.spec.renames:
            return _row_of(self.spec, partition, row)
        [row, *_], _ = replace(self.rows, spec=self.view.spec).with_stored([], partition, readers, set())
        return _row_of(self.view.spec, partition, row)

    def _since(self, partition: str, shown: KeyRow | None) -> int | None:
        """The first snapshot, of those kept, in which the row's batch is merged."""
        link = self.snapshot
        while link is not None and shown is not None and shown.link is not None:
            before = self.table.history.objects.snapshots.get(link.number - 1)
            there = before.body.partitions.get(partition) if before else None
            if there is None or there.merged < shown.link.number:
                return link.number
            link = before
        return None


def _row_of(spec: TableSpec, partition: str, row: KeyRow) -> dict[str, JsonValue]:
    folders = partition_scalars(spec, partition)
    values: dict[str, JsonValue] = {column: to_json_values(pa.repeat(value, 1))[0] for column, value in folders.items()}
    values |= row.texts(spec.stored_schema.names)
    return {name: values[name] for name in spec.schema.names}
