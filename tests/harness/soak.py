"""Nights with kills, vacuums and a dead publisher, while other engines read the Delta table in a loop: every read compared.

    python -m tests.harness.soak --nights 20 --retention 24h --readers duckdb delta-rs polars trino spark

Reads     nothing; needs the engines that `make readers` installs
Writes    a new table in a temporary folder, deleted at the end
Repeat    safe

Each night updates a third of the keys, deletes some and brings new ones. The process that runs it dies (SIGKILL) between snapshot
and commit, behind the commit, or at any call, and another one does the night again. Every third night is compacted and vacuumed,
and every second vacuum dies too. For three nights in the middle the store refuses what the publisher creates.

Every reader reads again and again, in turn the newest version and the one that was the newest as the read began. A read is wrong
unless its rows are those that the model expects of one snapshot that was the newest during the read. With "24h" no read may fail.
With "0s" a read may fail if a newer version came meanwhile, as a vacuum may then delete its files.
"""

import argparse
import random
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.operations.vacuum import VacuumResult
from lakeupsert.publishers.delta_log import list_log
from lakeupsert.storage import StoreUnavailableError, open_store
from tests.harness.faults import Points
from tests.harness.lake import Lake, delta_rows, row
from tests.harness.processes import STEPS, Died, LakeProcess, Strike, wait_until
from tests.harness.readers import FORMATS, Place, Reader, ReaderDied, Readers, Refusal, canonical

READERS = tuple(name for name, formats in FORMATS.items() if "delta" in formats)
DAYS = 12
KEYS = 60
VACUUM_EVERY = 3
DEAD_NIGHTS = 3
CALLS = 200
"""About as many as a night makes. A strike at a later call kills nobody."""
STRIKES = {
    "between snapshot and commit": Strike("create _delta_log", when="before"),
    "behind the commit": Strike("create _delta_log", when="after"),
    "between vectors and commit": Strike("create dv", when="after"),
    "at any call": None,
}


class DeadPublisher(Points):
    """The store creates nothing for the publisher."""

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        if name.startswith(("create _delta_log", "create dv")):
            raise StoreUnavailableError("store-unreachable", f"injected at {name}", next="run it again")
        yield


@dataclass(frozen=True)
class Read:
    """One read of an engine.

    Attributes:
        low, high: the newest versions when it began and when it ended.
        pinned: whether it asked for version ``low``.
        digest: of its rows.
        failure: what kept it from reading, in short; None if it read.
    """

    reader: str
    low: int
    high: int
    pinned: bool
    digest: str = ""
    failure: str | None = None


@dataclass
class Tally:
    """What happened. ``digests``: of each snapshot's rows, by the model."""

    digests: dict[int, str] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    deleted: int = 0
    versions: int = 0

    @property
    def wrong(self) -> list[Read]:
        """Reads with rows of no snapshot that they may show."""
        return [
            read
            for read in self.reads
            if read.failure is None
            and read.digest
            not in {self.digests.get(n) for n in range(read.low, (read.low if read.pinned else read.high) + 1)}
        ]

    @property
    def broken(self) -> list[Read]:
        """Reads that failed although their version was the newest until they ended: no vacuum may delete its files."""
        return [read for read in self.reads if read.failure is not None and read.low == read.high]

    @property
    def failures(self) -> Counter[tuple[str, str]]:
        """By reader and kind."""
        return Counter((read.reader, read.failure) for read in self.reads if read.failure is not None)

    def text(self) -> str:
        lines = [
            f"{len(self.digests)} snapshots, {self.kills.total()} kills ({_listed(self.kills)}), {self.deleted} objects deleted "
            f"by vacuums, {self.versions} versions read again behind them; {len(self.broken)} failed reads of the newest version",
            f"{'reader':10} {'reads':>6} {'pinned':>6} {'wrong':>6} {'failed':>6}",
        ]
        for reader in sorted({read.reader for read in self.reads}):
            own = [read for read in self.reads if read.reader == reader]
            wrong = sum(read.reader == reader for read in self.wrong)
            failed = sum(read.failure is not None for read in own)
            lines.append(f"{reader:10} {len(own):6} {sum(read.pinned for read in own):6} {wrong:6} {failed:6}")
        lines += [f"  {reader}, {count} times: {kind}" for (reader, kind), count in self.failures.most_common()]
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{what}: {n}" for what, n in counts.items())


class Soak:
    """A lake, and readers that read it all the time."""

    def __init__(self, lake: Lake, readers: Sequence[Reader], seed: int = 0) -> None:
        self.lake = lake
        self.tally = Tally()
        self._readers = readers
        self._chance = random.Random(seed)
        self._strikes = cycle(STRIKES.items())
        self._store = open_store(lake.settings.processed)
        self._over = threading.Event()
        self._problems: list[BaseException] = []

    def run(self, nights: int) -> Tally:
        """Run the nights. Raises what a reader's thread raised."""
        dead_nights = range(nights // 2 - 1, nights // 2 - 1 + DEAD_NIGHTS)
        self._night(0)
        threads = [threading.Thread(target=self._loop, args=(reader,)) for reader in self._readers]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, nights):
                self.lake.points = DeadPublisher() if number in dead_nights else Points()
                self._night(number)
                if number % VACUUM_EVERY == 0:
                    self._vacuum(number)
                self._wait_for_reads()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        if self._problems:
            raise self._problems[0]
        self._note_snapshots()
        self.lake.check()
        return self.tally

    def _night(self, number: int) -> None:
        keys = range(number % 3, KEYS, 3) if number else range(KEYS)
        rows = [row(f"k{i:03}", day, number, number) for day in range(DAYS) for i in keys]
        gone = [row(f"k{(7 * number + day) % KEYS:03}", day, number, op="D") for day in range(DAYS)]
        self.lake.land(f"{number}.jsonl", [*rows, *gone, row(f"n{number}", number % DAYS, number, number)])
        self._do("run", next(self._strikes) if number else None)

    def _vacuum(self, number: int) -> None:
        self.lake.table.compact(full=True)
        self._note_snapshots()  # a vacuum may expire them
        at = Strike("delete", self._chance.randrange(20))
        done = self._do("vacuum", ("in a vacuum", at) if number % (2 * VACUUM_EVERY) else None, dry=False)
        assert isinstance(done, VacuumResult)
        self.tally.deleted += len(done.garbage)
        self._travel()

    def _do(self, step: str, strike: tuple[str, Strike | None] | None, **options: Any) -> object:
        """Let another process do the step, and die if it comes to the strike; then a third one does it again. With a dead
        publisher this process does it."""
        self.lake.reopen()
        if isinstance(self.lake.points, DeadPublisher):
            answer = STEPS[step](self.lake, **options)
            assert not self.lake.table.status().publishers["delta"].is_newest
        else:
            if strike is not None:
                self._die(step, *strike, **options)
            with LakeProcess(self.lake) as process:
                answer = process.do(step, **options)
            self.lake.reopen()
            assert self.lake.table.status().publishers["delta"].behind == 0
        self._note_snapshots()
        return answer

    def _die(self, step: str, name: str, at: Strike | None, **options: Any) -> None:
        with LakeProcess(self.lake) as process:
            try:
                process.do(step, strike=at or Strike(number=self._chance.randrange(CALLS)), **options)
            except Died:
                self.tally.kills[name] += 1

    def _kept(self) -> list[int]:
        """Snapshots that readers may choose, with those of expiry, which `snapshots` leaves out."""
        chain = self.lake.table.objects.snapshots
        head = chain.head()
        return [n for n in chain.numbers() if head is not None and head.body.keeps(n)]

    def _note_snapshots(self) -> None:
        self.lake.reopen()
        schema = self.lake.table.to_arrow().schema
        for number in self._kept():
            if number not in self.tally.digests:
                expected = self.lake.expected_in(self.lake.table.view(number))
                self.tally.digests[number] = digest(pa.Table.from_pylist(expected, schema))

    def _travel(self) -> None:
        """Read every version that a reader may choose."""
        log = list_log(self._store)
        assert log.head is not None
        for number in self._kept():
            if min(log.checkpoints, default=0) <= number <= log.head:
                rows = delta_rows(self.lake.settings.processed, number)
                assert rows == self.lake.rows(number), f"version {number} is wrong after a vacuum"
                self.tally.versions += 1

    def _wait_for_reads(self) -> None:
        """Until every reader has begun and ended a read."""
        before = Counter(read.reader for read in self.tally.reads)

        def all_have_read() -> bool:
            clock.sleep(0.05)
            now = Counter(read.reader for read in self.tally.reads)
            return bool(self._problems) or all(now[r.name] >= before[r.name] + 2 for r in self._readers)

        wait_until(all_have_read, "a read of every reader")

    def _loop(self, reader: Reader) -> None:
        try:
            for pinned in cycle((False, True)):
                if self._over.is_set():
                    return
                self.tally.reads.append(self._read(reader, pinned=pinned))
        except BaseException as problem:
            self._problems.append(problem)

    def _read(self, reader: Reader, *, pinned: bool) -> Read:
        low = self._head()
        try:
            rows = reader.read(Place("delta", self.lake.settings.processed), version=low if pinned else None)
            return Read(reader.name, low, self._head(), pinned, digest(rows))
        except (Refusal, ReaderDied) as failure:
            return Read(reader.name, low, self._head(), pinned, failure=kind_of(str(failure)))

    def _head(self) -> int:
        head = list_log(self._store).head
        assert head is not None, "the table has no version"
        return head


def digest(rows: pa.Table) -> str:
    """The same for the same rows in any order."""
    found = canonical(rows.select(sorted(rows.column_names)))
    return sha256("\n".join(sorted(map(repr, found.to_pylist()))).encode()).hexdigest()


def kind_of(message: str) -> str:
    """A failure without what differs from one read to the next."""
    line = next(iter(message.splitlines()), "")
    return re.sub(r"[0-9a-f]{8,}[^\s\"']*|\S*/\S*|\b\d+\b", "…", line)[:160]


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nights", type=int, default=20, help="default: %(default)s")
    options.add_argument("--retention", default="24h", help='`superseded_retention`; "0s" keeps one snapshot')
    options.add_argument("--readers", nargs="+", choices=READERS, default=READERS)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args(arguments)
    begun = clock.elapsed()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Readers() as readers:
        tally = soak(Path(folder), readers, given.readers, given.nights, given.retention, given.seed)
    print(
        f"{given.nights} nights, superseded_retention {given.retention!r}, {clock.elapsed() - begun:.0f} s: {tally.text()}"
    )
    return bool(tally.wrong or tally.broken or (tally.failures and given.retention != "0s"))


def soak(folder: Path, readers: Readers, names: Sequence[str], nights: int, retention: str, seed: int = 0) -> Tally:
    """Run the nights on a new table below ``folder`` while the named readers read it."""
    kept = 1 if retention == "0s" else 5
    settings = {
        "publishers": ("delta",),
        "strategy": "delta",
        "superseded_retention": retention,
        "keep_snapshots": kept,
    }
    for name in names:
        readers[name].start()
    return Soak(Lake(folder / "lake", **settings), [readers[name] for name in names], seed).run(nights)


if __name__ == "__main__":
    sys.exit(main())
