"""The ledger: one entry per batch. Phase one commits a batch by appending its entry. A chain; never trimmed.

docs/FORMAT.md, "Ledger entry", says what each field of an entry means.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import msgspec

from lakeupsert import clock
from lakeupsert.config import Reading
from lakeupsert.errors import DamagedTableError
from lakeupsert.table.manifest import NO_ROWS, BucketEntry, Counters, DataFile, Digests, TombstoneFile
from lakeupsert.table.reading import StoredReading

if TYPE_CHECKING:  # `--help` needs no store, and no Arrow
    pass

Reason = Literal[
    "ambiguous_date",
    "bad_operation",
    "bad_partition",
    "bad_type",
    "below_floor",
    "future_order",
    "malformed",
    "missing_column",
    "null_key",
    "order_missing",
    "retyped",
    "truncate",
    "unknown_key",
    "unreadable_file",
    "unreadable_partition",
]
"""Why a row is refused (docs/WHEN_SOMETHING_BROKE.md, "Rows were refused")."""


class SeenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A landing file as it was read. Its identity is (path, sha256); an unchanged size and etag save reading it again."""

    path: str
    size: int
    etag: str
    sha256: str


class LandingFile(SeenFile, frozen=True, kw_only=True):
    """A landing file that a batch loaded."""

    rows: int


class Touched(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a batch brings to one partition. Each of the files has one row per key, sorted by key within a piece."""

    files: tuple[DataFile, ...]
    rows: int
    superseded: int
    bytes: int
    digest: str | None = None
    superseded_digest: str | None = None
    tombstones: tuple[TombstoneFile, ...] = ()
    moved: int = 0
    followed: int = 0
    extract: int | None = None

    def as_adopted(self) -> BucketEntry:
        """The first bucket of a partition that starts with these files of batch 0, as another system wrote them."""
        dead = sum(file.rows for file in self.tombstones)
        return BucketEntry(
            id=clock.new_id(),
            settled=False,
            base=self.files,
            tombstones=self.tombstones,
            counters=Counters(appended=self.rows, live=self.rows - dead, tombstones=dead),
            digests=Digests(superseded=NO_ROWS, withdrawn=NO_ROWS),
        )


NOTHING = Touched(files=(), rows=0, superseded=0, bytes=0, digest=NO_ROWS, superseded_digest=NO_ROWS)


class QuarantineFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rows: int


class ReplayedFile(QuarantineFile, frozen=True, kw_only=True):
    """A quarantine file whose rows a later batch loaded again, all of them. It is in ``quarantine`` of the entry ``batch``."""

    batch: int


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore goes back to: a snapshot, its batch, and each touched partition's manifest version (-1: none)."""

    snapshot: int
    batch: int
    versions: dict[str, int]


class KeyIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The key index as of ledger entry ``up_to``: for every key, where its record of greatest rank is, and its order."""

    up_to: int
    files: tuple[DataFile, ...]


HostName = Literal["spark", "local"]


class ChosenHost(msgspec.Struct, frozen=True, kw_only=True):
    """Where landing files are read, and what decided that (ADR 0037)."""

    name: HostName
    landing_bytes: int | None
    missing: str | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning for people about a large night that this machine works on alone; otherwise none."""
        if self.missing is None or self.landing_bytes is None:
            return ()
        return (
            f"{self.landing_bytes / 1e9:.1f} GB landed. Spark would be faster, but the night runs on this machine: "
            f"{self.missing} `--host local` does the same and does not warn.",
        )


Scope = Literal["table", "partitions"]


class FullExtract(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The batch contains all rows that its source has in its partitions. Keys that it lacks are deleted there."""

    scope: Scope
    order: str
    replaces: bool = False
    within: tuple[str, ...] = ()


LONGEST_STATEMENT = 200
"""Characters of a statement that people see; a filter may list thousands of values."""


class Statement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `update` or `delete` that made a batch of rows that the table had (ADR 0041)."""

    set: dict[str, str] = {}
    where: str | None = None
    keys: str | None = None
    seen: int
    objects: tuple[str, ...]

    @property
    def kind(self) -> Literal["update", "delete"]:
        return "update" if self.set else "delete"

    def is_same(self, other: "Statement") -> bool:
        """Whether both were asked for the same."""
        return (self.set, self.where, self.keys) == (other.set, other.where, other.keys)

    def __str__(self) -> str:
        """The statement for people, cut if it is long."""
        sets = f" set {', '.join(f'{column} = {value}' for column, value in self.set.items())}" if self.set else ""
        text = f"{self.kind}{sets}{' for a list of keys' if self.keys else ''}{f' where {self.where}' if self.where else ''}"
        return text if len(text) <= LONGEST_STATEMENT else f"{text[: LONGEST_STATEMENT - 1]}…"


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number of the ledger. For its fields see docs/FORMAT.md, "Ledger entry"."""

    kind: str
    batch_id: str
    received_at: int
    spec_version: int
    files: tuple[LandingFile, ...] = ()
    touched: dict[str, Touched] = {}
    rows_read: int = 0
    quarantined: dict[str, int] = {}
    quarantine: tuple[QuarantineFile, ...] = ()
    restored: RestorePoint | None = None
    replayed: tuple[ReplayedFile, ...] = ()
    statement: Statement | None = None
    fence: int | None = None
    seen: tuple[SeenFile, ...] = ()
    full: FullExtract | None = None
    retention: int | None = None
    reading: StoredReading | None = None
    operations: bool | None = None
    keys: tuple[DataFile, ...] = ()
    index: KeyIndex | None = None
    unknown_deletes: int = 0
    orphans: int = 0
    snapshot: int | None = None
    hollow_deletes: int = 0
    incomplete_creates: int = 0
    contrary: dict[str, int] = {}
    positions: tuple[str, ...] = ()
    skipped: dict[str, int] = {}
    host: ChosenHost | None = None
    clock_ahead: int = 0
    versions: dict[str, int] | None = None

    @property
    def received(self) -> datetime:
        """`received_at` as a time."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self.received_at)

    @property
    def sources(self) -> tuple[str, ...]:
        """What its rows come from, in the order that ranks them: landing files, quarantine files, or a statement."""
        if self.statement is not None:
            return (str(self.statement),)
        return tuple(f.name for f in self.replayed) or tuple(f.path for f in self.files)

    @property
    def reading_of_files(self) -> Reading:
        """`reading` of an entry with landing files."""
        assert self.reading is not None, "every batch of landing files says how they were read"
        return self.reading.settings

    @property
    def rows_appended(self) -> int:
        """Rows that landed and were accepted."""
        return sum(t.rows - t.moved for t in self.touched.values())

    @property
    def keys_moved(self) -> int:
        """Keys that moved to another partition."""
        return sum(t.moved - t.followed for t in self.touched.values())

    @property
    def rows_superseded(self) -> int:
        return sum(t.superseded for t in self.touched.values())

    @property
    def rows_quarantined(self) -> int:
        return sum(self.quarantined.values())


def check_entry(old: LedgerEntry | None, new: LedgerEntry) -> None:
    """Check the invariants of the ledger. `append` itself checks, over all entries, that no file is loaded twice."""
    wrong = []
    if (old is None) != (new.kind == "create"):
        wrong.append(f"kind {new.kind} {'begins' if old is None else 'follows in'} the ledger")
    if old is not None and new.received_at <= old.received_at:
        wrong.append(f"receipt stamp {new.received_at} is not greater than {old.received_at}")
    if old is not None and new.spec_version < old.spec_version:
        wrong.append(f"spec version decreases from {old.spec_version} to {new.spec_version}")
    if (new.kind == "restore") != (new.restored is not None) or (new.restored and new.rows_appended):
        wrong.append(
            f"kind {new.kind} with {new.rows_appended} rows and {'a' if new.restored else 'no'} version to go back to"
        )
    if new.restored is not None and new.touched.keys() != new.restored.versions.keys():
        wrong.append("it touches and restores different partitions")
    if new.kind == "schema" and new.touched:
        wrong.append(f"kind schema touches {len(new.touched)} partitions")
    if new.kind in ("schema", "restore") and new.quarantined.keys() - {"retyped"}:
        wrong.append(f"kind {new.kind} refuses rows: {', '.join(new.quarantined)}")
    if (new.kind == "fence") != (new.fence is not None):
        wrong.append(f"kind {new.kind} with fence {new.fence}")
    if new.replayed and (new.kind != "batch" or new.files):
        wrong.append(f"kind {new.kind} with {len(new.files)} landing files replays quarantined rows")
    if new.replayed and new.rows_read != sum(f.rows for f in new.replayed) + new.orphans:
        wrong.append(f"{new.rows_read} rows read, {sum(f.rows for f in new.replayed)} in what it replays")
    if new.statement is not None and (new.kind != "batch" or new.files or new.replayed or new.full or new.quarantined):
        wrong.append(f"kind {new.kind} is a statement and has {len(new.sources)} other sources or refused rows")
    if len({f.name for f in new.replayed}) < len(new.replayed):
        wrong.append("it replays a quarantine file twice")
    if new.rows_read != new.rows_appended + new.rows_quarantined:
        wrong.append(f"{new.rows_read} rows read, {new.rows_appended} appended + {new.rows_quarantined} quarantined")
    for partition, touched in new.touched.items():
        if touched.rows != touched.superseded + sum(f.live for f in (*touched.files, *touched.tombstones)):
            wrong.append(f"{partition}: {touched.rows} rows, but {touched.superseded} superseded + those in its files")
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The ledger entry of batch {new.batch_id!r} contradicts itself: {'; '.join(wrong)}. It was not written.",
            next="report this as a bug of lakeupsert; the landing files are unchanged and a fixed version will load them",
        )


def next_stamp(head: LedgerEntry | None) -> int:
    """The receipt stamp of the entry after ``head``: now, or just above its stamp if the clock went back."""
    now = int(clock.now().timestamp() * 1_000_000)
    return now if head is None else max(now, head.received_at + 1)


def fence_behind(head: LedgerEntry | None, fence: int, snapshot: int | None) -> LedgerEntry:
    """The entry that stops writers who began when the ledger had up to ``fence`` entries. ``snapshot``: the newest."""
    assert head is not None, "there is a spec, so there is a ledger"
    return LedgerEntry(
        kind="fence",
        batch_id=clock.new_id(),
        received_at=next_stamp(head),
        spec_version=head.spec_version,
        fence=fence,
        snapshot=snapshot,
    )


HEADERS_TOGETHER = (4096, 512, 64, 8)
"""How many entries one object has in short, in descending order: each is a multiple of the next one."""


class Headers(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive entries without what they touched, in one object, so that finding loaded files needs fewer reads.

    ``format`` is as in a chain's version. The ledger itself stays complete; if this object is missing, it is written again.
    """

    format: int
    first: int
    entries: tuple[LedgerEntry, ...]


def header_blocks(count: int, first: int = 0, below: int = HEADERS_TOGETHER[0] + 1) -> Iterator[tuple[int, int]]:
    """The fewest objects of fewer than ``below`` entries with those from ``first`` up to ``count``, but the last few: the first
    entry of each, and how many it has."""
    sizes = [size for size in HEADERS_TOGETHER if size < below]
    while size := next((size for size in sizes if first % size == 0 and first + size <= count), 0):
        yield first, size
        first += size


def blocks_around(end: int, above: int) -> list[tuple[int, int]]:
    """The objects of more than ``above`` entries that end there, as from `header_blocks`."""
    return [(end - size, size) for size in HEADERS_TOGETHER if size > above and end % size == 0]


def without_touched(entry: LedgerEntry) -> LedgerEntry:
    """The entry without what it touched."""
    return msgspec.structs.replace(
        entry, touched={}, restored=entry.restored and msgspec.structs.replace(entry.restored, versions={})
    )


def active_batches(entries: Iterable[tuple[int, LedgerEntry]]) -> set[int]:
    """The batches among ``entries`` (numbered, ascending, without gaps) that count after the last of them.

    A batch adds itself. A restore sets the batches that count to those that counted at its snapshot's batch. Batches before the
    first entry are not included.
    """
    listed = list(entries)
    numbers = set()
    at = len(listed) - 1
    while at >= 0:  # backwards, so that what a restore withdrew is never met
        number, entry = listed[at]
        at -= 1
        if entry.restored is not None:
            at -= max(0, number - 1 - entry.restored.batch)
        elif entry.kind == "batch":
            numbers.add(number)
    return numbers


def find_counting(entries: Sequence[LedgerEntry], merged: Mapping[str, int]) -> dict[int, list[str]]:
    """The batches, 0 included, that count in partitions at their `merged`, in order, each with these partitions. ``entries``: the
    ledger, at least up to the greatest of these numbers."""
    numbered = list(enumerate(entries))
    active = {at: {0, *active_batches(numbered[: at + 1])} for at in set(merged.values())}
    counting = {n: [p for p in entry.touched if n in active.get(merged.get(p, -1), ())] for n, entry in numbered}
    return {number: partitions for number, partitions in counting.items() if partitions}


def find_quarantined(entries: Sequence[LedgerEntry]) -> list[ReplayedFile]:
    """The quarantine files of all batches that count and that no counting batch replayed, and those of retypes, which no restore
    takes back. ``entries``: the whole ledger."""
    count = active_batches(enumerate(entries))
    replayed = {f.name for number in count for f in entries[number].replayed}
    return [
        ReplayedFile(batch=number, name=f.name, rows=f.rows)
        for number, entry in enumerate(entries)
        if number in count or entry.kind != "batch"
        for f in entry.quarantine
        if f.name not in replayed
    ]
