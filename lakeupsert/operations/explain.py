"""Explain one key: every version of it that the table knows, where it is, and why the winner won.

Reads     the newest snapshot, the ledger, and of each partition its newest and its published manifest, and the files that
          these and the ledger name; Parquet's statistics tell which row groups can hold the key
Writes    nothing
Repeat    safe, also while a night is at work

Nothing is decided here: `rows.rank` orders the versions, and what counts is what the manifests' files hold. Rows that
lost to another row of their own batch are in no file, so that they were there is all that can be told. Where keys are unique in
the whole table, they are in its files, marked, as are those that lost to what lies in another partition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import and_
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.operations.matches import Match, MatchSearch
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.rows.columns import given, with_brought
from lakeupsert.rows.convert import convert, plain
from lakeupsert.rows.datafiles import POSITION, aligned, opened, renamed, stream_file
from lakeupsert.rows.floor import PARTITION, Forgetting, is_among, refused_by_merges, up_to
from lakeupsert.rows.rank import latest, sortable
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.table.chain import Link
from lakeupsert.table.evolution import nearest
from lakeupsert.table.layout import HOME, parse_partition, partition_scalars
from lakeupsert.table.ledger import NOTHING, LedgerEntry, counting
from lakeupsert.table.manifest import DataFile, Manifest, TombstoneFile
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_TO, PLACE, TableSpec

Source = Literal["appended", "adopted", "base", "delta", "tombstone"]
Outcome = Literal[
    "shown",
    "deletes",
    "won, not published",
    "pending",
    "superseded",
    "withdrawn",
    "refused",
    "forgotten",
    "lacking",
    "in part",
]

MOST_MATCHES = 20
"""How many of the keys that a part of a key fits are listed. More: who searches sees more at once, and has to scroll."""
_AGE = pa.field("_lakeupsert_age", pa.int64())
"""The batch's number; of a stored row the last that was merged into it."""
_RANK = (pa.field(DELETE_FLAG, pa.bool_()), pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64()), _AGE)
"""What ranks a row beside its ordering columns."""


@dataclass(frozen=True)
class Version:
    """One version of the key, in one place; a winner is in two: as it came, and as it is stored.

    Attributes:
        batch, batch_id, received_at, file, place: where it came from; None where its appended file is gone. ``file`` is the
            landing file (the quarantine file of a row that was tried again) and ``place`` the row's in it; None for adopted rows.
        order: values of the ordering columns, as JSON has them.
        object: what it lies in, relative to the table.
        outcome: *shown* to readers; it *deletes* what they would see; it *won, not published*; *pending*: its batch is not
            merged; *superseded*; *withdrawn*: of greater rank than what is stored, and does not count; *refused*: below the
            floor, in quarantine; *forgotten*: a delete, whose tombstone was dropped; *lacking*: a full extract lacked the key;
            *in part*: of mode columns, some columns that readers see are its own.
        columns: of mode columns, those.
        moved_to: of a delete that `append` made, the partition that the record came for which took the key away.
    """

    source: Source
    batch: int | None
    batch_id: str | None
    received_at: str | None
    file: str | None
    place: int | None
    order: dict[str, Any]
    delete: bool
    object: str
    outcome: Outcome
    columns: tuple[str, ...] | None = None
    moved_to: str | None = None


@dataclass(frozen=True)
class ExplainedPartition:
    """The key in one partition.

    Attributes:
        versions: greatest rank first, what is stored behind the version that it is a copy of.
        shown: the row that readers see, all columns, as JSON has them.
        version, since: the partition's version that readers see, and the first snapshot that has its row, of those kept.
        settled: batches that brought the key, with the rows of this partition that lost within the batch.
        settled_of_key: of these, how many were of this key; None where that is not known, as no file of the table has them.
        gone: appended files that are not there any more, by batch; what they held of the key can't be told.
    """

    partition: str
    versions: tuple[Version, ...]
    shown: dict[str, Any] | None
    why: str
    version: int | None
    since: int | None
    settled: dict[int, int]
    settled_of_key: dict[int, int | None]
    gone: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Explanation:
    """The key as its columns' types have it, and each partition that knows it; of a part of a key the first keys that fit.

    Attributes:
        matches: up to `MOST_MATCHES`, in the order of partition and key; empty for a whole key.
        more: how many other keys fit.
    """

    key: dict[str, Any]
    partitions: tuple[ExplainedPartition, ...]
    matches: tuple[Match, ...] = ()
    more: int = 0


def explain(table: OpenTable, key: Mapping[str, Any], partition: str | None = None) -> Explanation:
    """Every version of ``key``, in one partition or in all. Of a part of a key: which keys fit.

    Args:
        key: a value for each key column, as text or in the column's type; the partition column may be among them.
        partition: `2020-01-01`, or its folder.
    Raises:
        ConfigurationError: a column is none of the key; a value does not fit its column.
        RefusedError: the table knows no version of the key, or no key fits.
    """
    snapshot = table.last_snapshot()
    ledger = table.ledger_head()
    spec = table.existing_spec()
    values = _values(table.name, spec, key)
    chosen = None if partition is None else partition_scalars(spec, parse_partition(spec, partition))
    wanted_values = {**(chosen or {}), **{c: values[c][0] for c in spec.partition_by if c in values}}
    if chosen is not None and any(chosen[column] != value for column, value in wanted_values.items()):
        named = ", ".join(f"{column}={key[column]}" for column in spec.partition_by if column in key)
        raise ConfigurationError(
            "two-partitions", f"{named} and --partition {partition} are two partitions.", next="give the partition once"
        )
    search = _Search(table, spec, values, snapshot, ledger.number if ledger else -1)
    partitions = {p for link in table.entries(-1, search.last) for p in link.body.touched}
    partitions |= set(snapshot.body.partitions if snapshot else ())
    wanted = sorted(p for p in partitions if wanted_values.items() <= partition_scalars(spec, p).items())
    is_whole = set(spec.key) <= values.keys()
    named_key = {name: plain(values[name])[0] for name in (spec.key if is_whole else values)}
    if is_whole:
        found = Explanation(named_key, tuple(found for p in wanted if (found := search.explained(p))))
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
        f"Table {table.name!r} knows no version of {text}. Searched: {where}, {search.files} files, up to batch "
        f"{search.last}" + (f"; {search.gone} appended files are gone." if search.gone else "."),
        next="check the value; rows that were refused are in quarantine (`lakeupsert status`), and files that no batch "
        "took yet are appended by `lakeupsert run`",
    )


def _values(name: str, spec: TableSpec, key: Mapping[str, Any]) -> dict[str, Any]:
    """An array of one value for each column that is given."""
    known = (*spec.key, *spec.partition_by)
    unknown = [column for column in key if column not in known]
    if unknown:
        wrong = " ".join(f"{column!r} is none of them.{_did_you_mean(column, known)}" for column in unknown)
        columns = f"partition column{'' if len(spec.partition_by) == 1 else 's'} {', '.join(spec.partition_by)}"
        raise ConfigurationError(
            "not-the-key",
            f"The key of table {name!r} is {', '.join(spec.key)}, and its {columns}. {wrong}",
            next=f"give `{' '.join(f'{column}=VALUE' for column in spec.key)}`, or some of these to see which keys fit",
        )
    values = {}
    for column, value in key.items():
        type_ = spec.schema.field(column).type
        try:
            values[column], bad = convert(pa.array([value]), type_)
            fits = not bad.any() and not values[column].null_count
        except UnicodeEncodeError:  # a byte of the command line that is no UTF-8
            fits = False
        if not fits:
            raise ConfigurationError(
                "unfit-value",
                f"{value!r} is no {type_}, the type of the column {column!r}.",
                next="give the value as it stands in the landing files",
            )
    return values


def _did_you_mean(column: str, known: Sequence[str]) -> str:
    near = nearest(column, known, cutoff=0.6)
    return f" Did you mean {near!r}?" if near else ""


@dataclass(frozen=True, eq=False)
class _Row:
    """A version: one row with every column that ranks it, and where it lies. ``link`` is the batch it came with, if known."""

    values: Any
    source: Source
    object: str
    link: Link[LedgerEntry] | None = None
    moved_to: str | None = None
    lost_in_append: bool = False

    def value(self, column: str) -> Any:
        return self.values[column][0].as_py()

    @property
    def age(self) -> int:
        return int(self.value(_AGE.name))

    @property
    def deletes(self) -> bool:
        return bool(self.value(DELETE_FLAG))

    def texts(self, columns: Sequence[str]) -> dict[str, Any]:
        return {column: plain(self.values[column].combine_chunks())[0] for column in columns}

    @property
    def file(self) -> str | None:
        return self.link.body.sources[self.value(FILE)] if self.link and self.source == "appended" else None

    def __str__(self) -> str:
        what = f"record of {self.moved_to}" if self.moved_to else "delete" if self.deletes else "row"
        if self.link is None:
            return f"the stored {what}"
        return f"the adopted {what}" if self.source == "adopted" else f"batch {self.link.number}'s {what} ({self.file})"


@dataclass
class _Search:
    """One key, looked for in one partition after the other; counts what was read."""

    table: OpenTable
    spec: TableSpec
    key: Mapping[str, Any]
    snapshot: Link[Snapshot] | None
    last: int
    files: int = 0
    gone: int = 0

    def matches(self, partitions: Sequence[str]) -> tuple[tuple[Match, ...], int]:
        """The first keys that fit what is given, and how many others do."""
        found: list[Match] = []
        total = 0
        search = MatchSearch(self.table, self.spec, self.key)
        for partition in partitions:
            head, readers = self._versions(partition)
            entries = self.table.entries(-1, self.last)
            counts = counting((link.number, link.body) for link in entries)
            merged = head.body.merged if head else 0
            pending = [x for x in entries if x.number > merged and x.number in counts and partition in x.body.touched]
            folders = partition_scalars(self.spec, partition)
            some, count = search.matches(partition, readers, head, pending, folders, MOST_MATCHES - len(found))
            found, total = [*found, *some], total + count
        self.files = search.files
        return tuple(found), total - len(found)

    def _versions(self, partition: str) -> tuple[Link[Manifest] | None, Link[Manifest] | None]:
        """The newest one, and that which readers see."""
        chain = self.table.objects.partition(partition)
        head = chain.head()
        published = self.snapshot.body.partitions.get(partition) if self.snapshot else None
        readers = chain.get(published.version) if published else None
        if self.snapshot and published and (readers is None or readers.body.merged != published.merged):
            lost = self.snapshot.body.lost(partition, head)
            raise self.table.objects.missing(
                partition, published.version, f"Snapshot {self.snapshot.number}", lost=lost
            )
        return head, readers

    def explained(self, partition: str) -> ExplainedPartition | None:
        head, readers = self._versions(partition)
        merged = head.body.merged if head else -1
        entries = self.table.entries(-1, max(self.last, merged))
        newest = self.table.spec(
            max(entries[-1].body.spec_version if entries else 0, head.body.spec_version if head else 0)
        )
        if len(newest.renames) > len(self.spec.renames):  # since the search began
            self.spec = newest

        rows: list[_Row] = []
        settled: dict[int, int] = {}
        settled_of_key: dict[int, int | None] = {}
        gone: list[tuple[int, str]] = []
        for link in entries:
            touched = link.body.touched.get(partition, NOTHING)
            source: Source = "adopted" if link.body.kind == "create" else "appended"
            for number, file in enumerate(touched.files):
                try:
                    found = self._rows(partition, file, source, link.number, link, number)
                except DamagedTableError:
                    if self.table.store.head(file.name) is not None:
                        raise
                    gone.append((link.number, file.name))
                    continue
                rows += found
                unseen = touched.superseded - sum(f.deleted.rows for f in touched.files if f.deleted)
                if found and unseen:
                    settled[link.number] = unseen
                    # Whatever lost, lost to a row of its own key.
                    is_alone = sum(f.rows for f in touched.files) == len(found)
                    settled_of_key[link.number] = unseen if is_alone else None
        self.gone += len(gone)

        counts = {0, *counting((link.number, link.body) for link in entries[: merged + 1])}
        counted = [link for link in entries if link.number in counts and partition in link.body.touched]
        refused = self._refused(rows, [link.body for link in (head, readers) if link])
        lacking = self._lacking([row for row in rows if row.age in counts], counted) - refused
        void = _void(rows, counted)
        gone_rows = refused | lacking | void | {row for row in rows if row.age not in counts}

        # Readers' version first: where the newest one holds the same row in another file, that file is nobody's news.
        rows, shown = self._standing(rows, partition, readers, gone_rows)
        won = shown
        if head is not None and (readers is None or head.number != readers.number):
            rows, won = self._standing(rows, partition, head, gone_rows)
        if not rows:
            return None
        copies = won | shown
        void -= copies.keys()
        forgets = head is not None and any(bucket.floor for bucket in head.body.buckets)
        deletes = (row for row in rows if row.deletes and row.age in counts and row not in lacking | refused | void)
        forgotten = next(deletes, None) if forgets and not won else None
        lowest = max((rows.index(row) for row in (*won, *([forgotten] if forgotten else []))), default=len(rows))

        def outcome(rank: int, row: _Row) -> Outcome:
            if row.lost_in_append:
                return "superseded"
            if row in shown:
                return "deletes" if row.deletes else "shown"
            if row in won:
                return "won, not published"
            if row.age > merged:
                return "pending"
            if row in lacking:
                return "lacking"
            if row in refused:
                return "refused"
            if row is forgotten:
                return "forgotten"
            if rank >= lowest:
                return "superseded"
            if row.age not in counts or not forgets:
                return "withdrawn"
            # Above what is stored: a full extract had the key when the delete was forgotten, and what that had beaten.
            return "forgotten" if row.deletes else "superseded"

        outcomes = {row: outcome(rank, row) for rank, row in enumerate(rows)}
        columns = self._columns([row for row in rows if outcomes[row] in ("shown", "superseded")], shown)
        outcomes |= {row: "in part" for row in columns if outcomes[row] == "superseded"}
        versions: list[Version] = []
        for row in rows:
            versions.append(self._version(row, row, outcomes[row], columns.get(row)))
            if row in copies and copies[row].object != row.object:
                versions.append(self._version(row, copies[row], outcomes[row]))
        seen = next((row for row in rows if outcomes[row] == "shown"), None)
        return ExplainedPartition(
            partition=partition,
            versions=tuple(versions),
            shown=self._as_shown(partition, shown.get(seen, seen), readers) if seen else None,
            why=self._why(rows, outcomes, head, void, _unseen(settled_of_key, settled, gone)),
            version=readers.number if readers else None,
            since=self._since(partition, next(iter(shown), None)),
            settled=settled,
            settled_of_key=settled_of_key,
            gone=tuple(gone),
        )

    def _rows(
        self,
        partition: str,
        file: DataFile,
        source: Source,
        age: int,
        link: Link[LedgerEntry] | None = None,
        number: int = 0,
        manifest: str = "",
    ) -> list[_Row]:
        """The rows of the key in a file; those that bring no rank columns are ranked by their file and place in it."""
        self.files += 1
        condition = reduce(and_, [ds.field(name) == self.key[name][0] for name in self.spec.stored_key])
        lost: Any = np.empty(0, np.uint64)
        if file.deleted and source == "appended":
            lost = deleted_positions(self.table.store, file)
            whole = msgspec.structs.replace(file, deleted=None)
            schema = self.spec.ranked_schema.append(pa.field(POSITION, pa.int64()))
            blocks = stream_file(self.table.store, whole, schema, spec=self.spec)
            rows = pa.concat_tables([block.filter(condition) for block in blocks])
        elif file.deleted or (isinstance(file, TombstoneFile) and file.inline):
            schema = self.spec.tombstone_schema if isinstance(file, TombstoneFile) else self.spec.base_schema
            found = [r.filter(condition) for r in stream_file(self.table.store, file, schema, spec=self.spec)]
            rows = pa.concat_tables([schema.empty_table(), *found])
        else:
            part = None if file.at is None else (file.at, file.bytes)
            with opened(self.table.store, file.name, part, partition) as opened_file:
                parquet = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")  # Spark's, in adopted files
                fragment, names = parquet.make_fragment(opened_file), self.spec.names_in(file.renames)
                ours = (*(field.name for field in _RANK), MOVED_TO)
                asked = [names.get(n, n) for n in (*self.spec.base_schema.names, *ours)]
                there = set(fragment.physical_schema.names)
                rows = renamed(fragment.to_table(columns=[n for n in asked if n in there], filter=condition), names)
        n = rows.num_rows
        given = (np.full(n, source == "tombstone"), np.full(n, number), np.arange(n), np.full(n, age))
        for field, values in zip(_RANK, given, strict=True):
            if field.name not in rows.schema.names:
                rows = rows.append_column(field, pa.array(values, field.type))
        names_there = rows.schema.names
        moved_to = rows[MOVED_TO].to_pylist() if MOVED_TO in names_there else [None] * n
        is_lost = np.isin(rows[POSITION].to_numpy(), lost) if POSITION in names_there else np.zeros(n, bool)
        rows = aligned(rows, pa.schema([*self.spec.base_schema, *_RANK]))
        if self.spec.mode == "columns" and source == "adopted":
            rows = with_brought(rows, self.spec, names_there)
        return [
            _Row(rows.slice(i, 1), source, file.name or manifest, link, moved_to[i], bool(is_lost[i])) for i in range(n)
        ]

    def _standing(
        self, rows: list[_Row], partition: str, version: Link[Manifest] | None, gone: set[_Row]
    ) -> tuple[list[_Row], dict[_Row, _Row]]:
        """``rows`` by rank, with what ``version`` holds where none is a copy of it; and the copied rows with their copies.

        Those that are ``gone`` now are copied by none where another one is equal. A key has one stored row, or tombstone; only
        adopted partitions that were never merged may hold it twice.
        """
        stored: list[_Row] = []
        if version is not None:
            age, home = version.body.merged, f"{HOME}/partitions/{partition} version {version.number}"
            for bucket in version.body.buckets:
                for file in bucket.data:
                    stored += self._rows(partition, file, "base" if file in bucket.base else "delta", age)
                for tombstones in bucket.tombstones:
                    stored += self._rows(partition, tombstones, "tombstone", age, manifest=home)
        rows = self._ranked(rows)
        standing: dict[_Row, _Row] = {}
        for copy in stored:
            by_order = copy.deletes or self.spec.mode == "columns"
            same = (self.spec.tombstone_schema if by_order else self.spec.stored_schema).names
            before = (row for row in rows if row not in standing and row.age <= copy.age and not row.lost_in_append)
            equal = [row for row in before if row.deletes == copy.deletes and row.texts(same) == copy.texts(same)]
            standing[min(equal, key=gone.__contains__, default=copy)] = copy
        return self._ranked([*rows, *(row for row in standing if row not in rows)]), standing

    def _lacking(self, rows: Sequence[_Row], counted: Sequence[Link[LedgerEntry]]) -> set[_Row]:
        """Those that a full extract deleted, which came later and lacks the key."""
        full = [(link.number, link.body.full.order) for link in counted if link.body.full]
        full = [(number, order) for number, order in full if not any(row.age == number for row in rows)]
        return {
            row
            for row in rows
            if any(row.age < number and up_to(row.values, order, self.spec).all() for number, order in full)
        }

    def _refused(self, rows: Sequence[_Row], manifests: Sequence[Manifest]) -> set[_Row]:
        """Those that merges put into quarantine."""
        keys = refused_by_merges(self.table.store, manifests, self.spec)
        refused = set()
        for row in rows:
            if row.link is not None and row.source == "appended" and row.link.body.batch_id in keys:
                named = row.values.append_column(PARTITION, pa.array([manifests[0].partition]))
                if is_among(named, keys[row.link.body.batch_id], self.spec).any():
                    refused.add(row)
        return refused

    def _ranked(self, rows: list[_Row]) -> list[_Row]:
        if not rows:
            return []
        table = pa.concat_tables([row.values for row in rows])
        order, _ = latest(table, self.spec, (_AGE.name, FILE, PLACE))
        return [rows[i] for i in order.to_pylist()]

    def _columns(self, rows: Sequence[_Row], shown: Mapping[_Row, _Row]) -> dict[_Row, tuple[str, ...]]:
        """Of mode columns: what each of these rows has given to the one that readers see."""
        seen = next(iter(shown), None)
        if self.spec.mode == "rows" or seen is None or seen not in rows:
            return {}
        merged = shown[seen].age
        counts = {0, *counting((link.number, link.body) for link in self.table.entries(-1, merged))}
        rows = [row for row in rows if row.age <= merged and (row.link is None or row.link.number in counts)]
        names = given(pa.concat_tables([row.values for row in rows]), self.spec, (_AGE.name, FILE, PLACE))
        return {row: tuple(of_it) for row, of_it in zip(rows, names, strict=True) if of_it}

    def _version(self, origin: _Row, row: _Row, outcome: Outcome, columns: tuple[str, ...] | None = None) -> Version:
        link = origin.link
        return Version(
            source=row.source,
            batch=link.number if link else None,
            batch_id=link.body.batch_id if link else None,
            received_at=_moment(link.body.received_at) if link else None,
            file=origin.file,
            place=origin.value(PLACE) if origin.file else None,
            order=row.texts(self.spec.all_orders),
            delete=row.deletes,
            object=row.object,
            outcome=outcome,
            columns=columns,
            moved_to=origin.moved_to,
        )

    def _as_shown(self, partition: str, row: _Row, readers: Link[Manifest] | None) -> dict[str, Any]:
        """The row under the names that readers see, which may be those of before a rename that is not published."""
        assert self.snapshot is not None, "readers see the row"
        then = self.table.spec(self.snapshot.body.spec_version)
        if then.renames == self.spec.renames:
            return self._row_of(partition, row)
        search = replace(self, spec=then)
        rows, _ = search._standing([], partition, readers, set())
        return search._row_of(partition, rows[0])

    def _row_of(self, partition: str, row: _Row) -> dict[str, Any]:
        folders = partition_scalars(self.spec, partition)
        shown = {column: plain(pa.repeat(value, 1))[0] for column, value in folders.items()}
        shown |= row.texts(self.spec.stored_schema.names)
        return {name: shown[name] for name in self.spec.schema.names}

    def _since(self, partition: str, shown: _Row | None) -> int | None:
        """The first snapshot that has the row's batch merged."""
        link = self.snapshot
        while link is not None and shown is not None and shown.link is not None:
            before = self.table.objects.snapshots.get(link.number - 1)
            there = before.body.partitions.get(partition) if before else None
            if there is None or there.merged < shown.link.number:
                return link.number
            link = before
        return None

    def _why(
        self,
        rows: Sequence[_Row],
        outcomes: Mapping[_Row, Outcome],
        head: Link[Manifest] | None,
        void: set[_Row],
        unseen: str,
    ) -> str:
        """Why the row won, or will win, that is first of those that count; ``void`` deletes do not. ``unseen``: see `_unseen`."""
        uncounted = [row for row in rows if outcomes[row] == "withdrawn"]
        aside = f" Of greater rank, but withdrawn: {', '.join(map(str, uncounted))}." if uncounted else ""
        beaten = {"withdrawn", "superseded", "refused", "lacking", "in part"}
        if not {"shown", "won, not published"}.isdisjoint(outcomes.values()):
            beaten.add("forgotten")  # that it was is why the other is there
        winner = next((row for row in rows if outcomes[row] not in beaten and row not in void), None)
        if winner is None:
            if any(outcome == "lacking" for outcome in outcomes.values()):
                return f"A full extract lacked the key.{aside}"
            if any(outcome == "refused" for outcome in outcomes.values()):
                return (
                    f"What came is below what the table has forgotten, or a full extract had, and in quarantine.{aside}"
                )
            elsewhere = any(row.lost_in_append for row in rows)
            return f"{'What came lost to a record in another partition.' if elsewhere else 'No version counts.'}{aside}"
        seen = [row for row in rows if outcomes[row] == "shown"]
        still = f"and readers still see {seen[0] if seen else 'no row'}."
        behind = rows[rows.index(winner) + 1 :]
        behind = [row for row in behind if outcomes[row] not in ("withdrawn", "refused") and row not in void]
        only = (
            f"it is the only version{' that counts' if len(rows) > 1 else ' that is stored' if unseen else ''}{unseen}"
        )
        reason = self._reason(winner, behind[0]) if behind else only
        called = str(winner)[0].upper() + str(winner)[1:]
        match outcomes[winner]:
            case "forgotten":
                late = "what comes below it goes to quarantine, unless a full extract has it"
                return f"Deleted by {winner}, which the table has forgotten; {late}.{aside}"
            case "deletes" if winner.moved_to:
                return f"Moved to {winner.moved_to} by {winner}: {reason}.{aside}"
            case "deletes":
                return f"Deleted by {winner}: {reason}.{aside}"
            case "won, not published":
                return f"{called} won: {reason}. It is not published yet, {still}{aside}"
            case "shown":
                several = f" Readers see all {len(seen)} rows until the partition is merged." if len(seen) > 1 else ""
                return f"{called} is shown: {reason}.{several}{aside}"
        failed = head.body.failed if head else None
        first = failed.reason.partition("\n")[0] if failed else ""
        mark = f" (batch {failed.batch} failed: {first})" if failed else ""
        return f"{called} will win: {reason}. It is not merged yet{mark}, {still}{aside}"

    def _reason(self, winner: _Row, other: _Row) -> str:
        """What decided between a row and the one that follows it by rank: the first part of the rank that differs."""
        both = pa.concat_tables([winner.values, other.values])

        def differ(column: str) -> bool:
            first, second = sortable(both[column]).to_pylist()
            return bool(first != second)

        def against(column: str) -> str:
            first, second = (row.texts([column])[column] for row in (winner, other))
            return f"{column}, {'null' if first is None else first} against {'null' if second is None else second} of {other}"

        for ordering in self.spec.ordering:
            if differ(ordering.column):
                return f"{'lesser' if ordering.ascending else 'greater'} {against(ordering.column)}"
        equal = f"equal {', '.join(self.spec.order_by)} and "
        if self.spec.ties == "content":
            if winner.deletes != other.deletes:
                return f"{equal}a delete, against {other}"
            for column in self.spec.content:
                if differ(column):
                    return f"{equal}greater {against(column)}"
        if winner.link is None or other.link is None:
            return f"{equal}merged when the appended file was there, against {other}"
        ties = {_AGE.name: "later batch", FILE: "later file of the batch", PLACE: "later place in the file"}
        return equal + next(text for column, text in ties.items() if differ(column)) + f" than {other}"


def _unseen(of_key: Mapping[int, int | None], settled: Mapping[int, int], gone: Sequence[tuple[int, str]]) -> str:
    """What there was, or may have been, of the key beside the rows that were found; empty where that was all."""
    told = []
    for batch, rows in settled.items():
        is_known = of_key[batch] is not None
        whose = "this key" if is_known else "this partition, perhaps of this key,"
        count = f"{rows} {'other ' if is_known else ''}row{'' if rows == 1 else 's'}"
        told.append(f"; {count} of {whose} lost within batch {batch} and {'is' if rows == 1 else 'are'} not stored")
    if gone:
        batches = ", ".join(str(batch) for batch in sorted({batch for batch, _ in gone}))
        told.append(f"; the appended files of batch {batches} are gone and may have held others")
    return "".join(told)


def _void(rows: Sequence[_Row], counted: Sequence[Link[LedgerEntry]]) -> set[_Row]:
    """The deletes that had been forgotten when a full extract came that has the key."""
    batches = [link for link in counted if link.number]
    forgets = Forgetting(tuple((link.body.received_at, link.body.retention) for link in batches))
    brought = {row.age for row in rows}
    extracts = [age for age, link in enumerate(batches, 1) if link.body.full and link.number in brought]
    found = {batches[of_it - 1].number for age in extracts for of_it in forgets.forgotten_ages(age)}
    return {row for row in rows if row.deletes and row.age in found}


def _moment(microseconds: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).isoformat()
