"""The ledger: one entry per batch. Appending an entry is the commit of phase one. A chain; never trimmed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from lakeupsert import clock
from lakeupsert.config import Reading
from lakeupsert.errors import DamagedTableError
from lakeupsert.table.manifest import NO_ROWS, BucketEntry, Counters, DataFile, Digests


class SeenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A landing file as it was read: (path, sha256) is its identity; size and etag only save reading it again."""

    path: str
    size: int
    etag: str
    sha256: str


class LandingFile(SeenFile, frozen=True, kw_only=True):
    """A landing file that a batch took."""

    rows: int


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch brought for one partition.

    ``rows`` were accepted; ``superseded`` of them lost to another row of the same batch, or where keys are unique in the whole
    table to what another partition has, and nobody reads them. ``moved`` of them are deletes that did not land: `append` made
    them, as their keys' records came for other partitions. In each file there is one row per key, sorted by key. ``digest`` is
    of all these rows, ``superseded_digest`` of those that lost; None: not known, as of adopted files, which nobody has read yet.
    """

    files: tuple[DataFile, ...]
    rows: int
    superseded: int
    bytes: int
    digest: str | None = None
    superseded_digest: str | None = None
    moved: int = 0

    def as_adopted(self) -> BucketEntry:
        """The bucket of a partition that begins with these files, of batch 0, as others wrote them."""
        counters = Counters(appended=self.rows, live=self.rows)
        digests = Digests(superseded=NO_ROWS, withdrawn=NO_ROWS)
        return BucketEntry(id=clock.new_id(), settled=False, base=self.files, counters=counters, digests=digests)


NOTHING = Touched(files=(), rows=0, superseded=0, bytes=0, digest=NO_ROWS, superseded_digest=NO_ROWS)


class QuarantineFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rows: int


class Replayed(QuarantineFile, frozen=True, kw_only=True):
    """A quarantine file whose rows a later batch tried again, all of them; ``batch`` has it in its ``quarantine``."""

    batch: int


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore goes back to: a snapshot, its batch, and of each touched partition the manifest version (-1: none)."""

    snapshot: int
    batch: int
    versions: dict[str, int]


class KeyIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Where the record of greatest rank of every key is, and its order, when the ledger ended with ``up_to``."""

    up_to: int
    files: tuple[DataFile, ...]


Scope = Literal["table", "partitions"]


class FullExtract(msgspec.Struct, frozen=True, kw_only=True):
    """The batch has all rows that its partitions have at its source; keys that it lacks are deleted there.

    Attributes:
        scope: ``table``: it touches every partition of the table; ``partitions``: those that its rows are in.
        order: the greatest order of its rows (see `rows.floor`). What it lacks is deleted up to that order.
    """

    scope: Scope
    order: str


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the ledger.

    Attributes:
        kind: ``create`` (number 0, with the adopted files), ``batch``, ``restore``, ``fence``, ``schema``: from here on columns
            are called, or dropped, as ``spec_version`` says.
        batch_id: what the client calls it; a second batch of the same id is refused or is this one.
        received_at: the batch's receipt stamp, microseconds since 1970 UTC, above that of every entry before.
        files: the landing files, in the order that ranks their rows.
        reading: how their bytes were made rows, and are whenever this batch is read again; None, in entries of an earlier
            lakeupsert: as it is configured now.
        quarantined: refused rows by reason.
        seen: landing files that entries before took and that were sent again unchanged, under another etag; not taken here.
        replayed: where the batch took its rows instead of landing files, in the order that ranks them (ADR 0010).
        fence: behind a fence no append commits that began when the ledger had this many entries, or fewer: a vacuum deleted
            what those left. A restore gives up at any fence: the snapshot that it chose may have expired.
        full: set where the batch was declared to be a full extract.
        retention: microseconds that a deleted key is known when the batch is merged (`tombstone_retention` at its append); None:
            for ever.
        operations: whether a landing file had the column that the delete rule names; None where there is no such rule or no row,
            and in entries of an earlier lakeupsert.
        keys: where keys are unique in the whole table, what the batch changes in the key index.
        snapshot: the newest snapshot that its writer saw, None if there was none: a chain of snapshots that ends before it has
            lost the newest.
        index: that index as it was before the batch, where the batch wrote it anew; otherwise it is that of the last entry which
            has one, with the ``keys`` of what came since. A restore is not in it: who appends next makes it anew.
    """

    kind: str
    batch_id: str
    received_at: int
    spec_version: int
    files: tuple[LandingFile, ...] = ()
    touched: dict[str, Touched] = {}
    rows_read: int = 0
    quarantined: dict[str, int] = {}
    quarantine: tuple[QuarantineFile, ...] = ()
    restored: Restored | None = None
    replayed: tuple[Replayed, ...] = ()
    fence: int | None = None
    seen: tuple[SeenFile, ...] = ()
    full: FullExtract | None = None
    retention: int | None = None
    reading: Reading | None = None
    operations: bool | None = None
    keys: tuple[DataFile, ...] = ()
    index: KeyIndex | None = None
    snapshot: int | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """What its rows came from, by the place that ranks them: landing files, or quarantine files."""
        return tuple(f.name for f in self.replayed) or tuple(f.path for f in self.files)

    @property
    def rows_appended(self) -> int:
        """Rows that landed and were accepted."""
        return sum(t.rows - t.moved for t in self.touched.values())

    @property
    def keys_moved(self) -> int:
        """Keys whose record came for another partition than the one where their row was."""
        return sum(t.moved for t in self.touched.values())

    @property
    def rows_superseded(self) -> int:
        return sum(t.superseded for t in self.touched.values())

    @property
    def rows_quarantined(self) -> int:
        return sum(self.quarantined.values())


def check_entry(old: LedgerEntry | None, new: LedgerEntry) -> None:
    """Invariants of the ledger; that no landing or quarantine file counts twice is the appender's to see, over all entries."""
    wrong = []
    if (old is None) != (new.kind == "create"):
        wrong.append(f"kind {new.kind} {'begins' if old is None else 'follows in'} the ledger")
    if old is not None and new.received_at <= old.received_at:
        wrong.append(f"receipt stamp {new.received_at} is not above {old.received_at}")
    if old is not None and new.spec_version < old.spec_version:
        wrong.append(f"spec version falls from {old.spec_version} to {new.spec_version}")
    if (new.kind == "restore") != (new.restored is not None) or (new.restored and new.rows_read):
        wrong.append(
            f"kind {new.kind} with {new.rows_read} rows and {'a' if new.restored else 'no'} version to go back to"
        )
    if new.restored is not None and new.touched.keys() != new.restored.versions.keys():
        wrong.append("it touches other partitions than it restores")
    if new.kind == "schema" and (new.touched or new.rows_read):
        wrong.append(f"kind schema touches {len(new.touched)} partitions and has {new.rows_read} rows")
    if (new.kind == "fence") != (new.fence is not None):
        wrong.append(f"kind {new.kind} with fence {new.fence}")
    if new.replayed and (new.kind != "batch" or new.files):
        wrong.append(f"kind {new.kind} with {len(new.files)} landing files replays quarantined rows")
    if new.replayed and new.rows_read != sum(f.rows for f in new.replayed):
        wrong.append(f"{new.rows_read} rows read, {sum(f.rows for f in new.replayed)} in what it replays")
    if len({f.name for f in new.replayed}) < len(new.replayed):
        wrong.append("it replays a quarantine file twice")
    if new.rows_read != new.rows_appended + new.rows_quarantined:
        wrong.append(f"{new.rows_read} rows read, {new.rows_appended} appended + {new.rows_quarantined} quarantined")
    for partition, touched in new.touched.items():
        if touched.rows != touched.superseded + sum(f.live for f in touched.files):
            wrong.append(
                f"{partition}: {touched.rows} rows are not {touched.superseded} superseded + those in its files"
            )
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The ledger entry of batch {new.batch_id!r} contradicts itself: {'; '.join(wrong)}. It was not written.",
            next="report this as a bug of lakeupsert; the landing files are untouched and will be taken by a mended version",
        )


def taken(entries: Iterable[LedgerEntry]) -> dict[str, list[LandingFile]]:
    """Every landing file that some entry took, by path."""
    found: dict[str, list[LandingFile]] = {}
    for entry in entries:
        for file in entry.files:
            found.setdefault(file.path, []).append(file)
    return found


def next_stamp(head: LedgerEntry | None) -> int:
    """The receipt stamp of an entry behind ``head``: now, and above its stamp also where the clock went back."""
    now = int(clock.now().timestamp() * 1_000_000)
    return now if head is None else max(now, head.received_at + 1)


HEADERS_TOGETHER = 64


class Headers(msgspec.Struct, frozen=True, kw_only=True):
    """A run of entries without what they touched, in one object: who asks what was taken need not read each entry.

    ``format`` as in a chain's version. The ledger itself stays whole; where this object is missing, it is made again.
    """

    format: int
    first: int
    entries: tuple[LedgerEntry, ...]


def header(entry: LedgerEntry) -> LedgerEntry:
    """The entry without what it touched."""
    return msgspec.structs.replace(
        entry, touched={}, restored=entry.restored and msgspec.structs.replace(entry.restored, versions={})
    )


def counting(entries: Iterable[tuple[int, LedgerEntry]]) -> set[int]:
    """Numbers of those batches among ``entries`` (numbered upwards, none left out) that count after the last of them.

    A batch adds itself; a restore sets what counts to what counted at the batch that it goes back to. Of batches before
    the first entry nothing is said.
    """
    at: dict[int, _Counting | None] = {}
    now: _Counting | None = None
    for number, entry in entries:
        if entry.restored is not None:
            now = at.get(entry.restored.batch)
        elif entry.kind == "batch":
            now = _Counting(number, now)
        at[number] = now
    found = set()
    while now is not None:
        found.add(now.number)
        now = now.before
    return found


def still_quarantined(entries: Sequence[LedgerEntry]) -> list[Replayed]:
    """Quarantine files of batches that count after the last of ``entries`` (all there are), replayed by none that counts."""
    count = counting(enumerate(entries))
    replayed = {f.name for number in count for f in entries[number].replayed}
    return [
        Replayed(batch=number, name=f.name, rows=f.rows)
        for number in sorted(count)
        for f in entries[number].quarantine
        if f.name not in replayed
    ]


@dataclass(frozen=True, slots=True)
class _Counting:
    """The batches that count at one number, as a list that shares its tail with those of other numbers."""

    number: int
    before: "_Counting | None"
