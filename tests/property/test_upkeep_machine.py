"""Nights, and between them everything an operator does to a table, in any order and struck at any call: it equals a dict."""

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lakeupsert import clock
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.pipeline import strategy, table_keys
from lakeupsert.pipeline.merge import units
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.view import View
from lakeupsert.rows import datafiles, vectors
from lakeupsert.table.layout import DATA, KEYS, partition_of
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row
from tests.harness.model import counts_at
from tests.harness.rounds import TIMES

MEMORY = Path("/dev/shm")

# One night is one step here, and keys are fewer than in test_lake_machine: what matters is what upkeep does in between.
records = st.builds(
    row,
    k=st.sampled_from(["a", "b"]),
    day=st.integers(0, 1),
    ts=st.integers(0, 3),
    v=st.integers(0, 9),
    op=st.sampled_from([None, "D"]),
)
nights = st.lists(records, min_size=1, max_size=3)
deletes_by_key = records.map(lambda record: {**record, "d": None, "op": "D"})
adopted = st.builds(
    row, k=st.sampled_from(["a", "b"]), day=st.integers(0, 2), ts=st.sampled_from([None, 1]), v=st.integers(0, 9)
)
calls = st.one_of(st.tuples(st.integers(0, 40), st.just("")), st.tuples(st.integers(0, 2), st.just("create")))
SCHEMA = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "int", "op": "string"}
LARGE = 1 << 40
"""Too large for the column `v`, until a wider type is given."""
strikes = st.one_of(st.none(), st.none(), st.tuples(calls, st.sampled_from(Fault)))


class PassingTime(clock.Source):
    """The machine's clock, and what a test lets pass."""

    passed = timedelta()

    def now(self) -> datetime:
        return super().now() + self.passed

    def elapsed(self) -> float:
        return super().elapsed() + self.passed.total_seconds()


@dataclass
class Reader:
    """Somebody who chose a snapshot and reads it on; ``expired`` is when that expired."""

    view: View
    rows: list[Any]
    expired: datetime | None = None


MANY_BUCKETS = "2500B"
"""A file of one row has some 2,000 bytes, so what two merges bring is split."""


class UpkeepMachine(RuleBasedStateMachine):
    key_scope: Any = "partition"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.context = ExitStack()
        self.patch = self.context.enter_context(pytest.MonkeyPatch.context())
        self.patch.setattr(strategy, "SMALL_BYTES", 0)  # these partitions are tiny: `auto` would rewrite them all
        self.patch.setattr(datafiles, "BARE_BYTES", 0)
        self.patch.setattr(datafiles, "COLUMN_BYTES", 0)
        self.patch.setattr(units, "ALONE_BUCKETS", 0)
        self.patch.setattr(vectors, "INLINE_BYTES", 0)  # so that there are objects to be deleted, and to be kept
        self.lake = Lake(self.root, keep_snapshots=2, schema=SCHEMA, key_scope=self.key_scope)
        self.number = 0
        self.mended = False
        self.changes: list[tuple[str, int]] = []
        self.checked: Any = None
        self.readers: list[Reader] = []
        self.time = PassingTime()
        self.context.enter_context(clock.use(self.time))

    def teardown(self) -> None:
        try:
            self.lake.finish_and_check()
            if self.lake.entries():
                self.nothing_is_left_over()
        finally:
            self.context.close()
            self.lake.table.close()
            shutil.rmtree(self.root)

    def nothing_is_left_over(self) -> None:
        """Once nobody reads what is expired, exactly the files of kept snapshots are there, and of versions that wait to be
        published, as those of a reprocess that died."""
        for _ in range(2):
            self.lake.table.vacuum(dry=False)
            self.time.passed += timedelta(days=8)
        self.lake.table.vacuum(dry=False)
        self.lake.check()
        table = self.lake.opened
        named: set[str] = set()
        newest, *_ = snapshots = self.lake.table.snapshots()
        for link in snapshots:
            for partition, shown in link.body.partitions.items():
                versions = table.history.objects.partition(partition).numbers()
                for number in versions if link is newest else [shown.version]:
                    if number >= shown.version:
                        buckets = table.history.version(partition, number).buckets
                        named |= {name for b in buckets for name in b.objects}
        stored = {name for name in self.lake.stored_files() if "/quarantine/" not in name}
        assert stored == named, f"left over: {stored - named}, lost: {named - stored}"
        keys = {f.name for f in table.resources.store.list(f"{KEYS}/")}
        index = table_keys.named_index(table.history.headers(self.lake.entries()[-1][0]))
        assert keys == {f.name for f in (index.all if index else ())}

    def struck(self, strike: Any, step: Any) -> None:
        """Run a step; where it is struck, a new process goes on."""
        if strike is not None:
            (number, kind), fault = strike
            self.lake.points.arm(number, fault, kind)
        try:
            step()
        except (Killed, TryAgainError):
            self.lake.points.disarm()
            self.lake.reopen()
        finally:
            self.lake.points.disarm()

    @initialize(
        files=st.one_of(st.just([]), st.lists(st.lists(adopted, min_size=1, max_size=4), min_size=1, max_size=2)),
        strike=strikes,
        call=calls,
        chosen=st.sampled_from(["rewrite", "delta", "auto"]),
        together=st.sampled_from([2, 99]),
        bucket=st.sampled_from([MANY_BUCKETS, "256MiB"]),
        publishers=st.sampled_from([(), ("delta",)]),
        partition_by=st.sampled_from([("d",), ("d",), (), ("bucket(2, k)",), ("d", "bucket(2, k)")]),
        versions=st.booleans(),
    )
    def adopt(
        self,
        files: list[list[Any]],
        strike: Any,
        call: Any,
        chosen: str,
        together: int,
        bucket: str,
        publishers: Any,
        partition_by: tuple[str, ...],
        versions: bool,
    ) -> None:
        """Some lakes begin as plain Parquet with a key more than once; who adopts it dies, and then two do it at once."""
        self.patch.setattr(strategy, "TOGETHER", together)
        self.patch.setattr(
            table_keys, "MOST_CHANGED", together - 2
        )  # the index is written anew by every append, or by none
        if self.key_scope == "table" and "d" not in partition_by:
            partition_by = ("d",)
        if any(text.startswith("bucket") for text in partition_by):
            files = []  # nobody else's files are in these folders
        settings = {"strategy": chosen, "bucket": bucket, "publishers": publishers, "partition_by": partition_by}
        self.lake = Lake(self.root, **self.lake.given, **settings, versions=versions)
        homes: dict[str, date] = {}
        for number, rows in enumerate(files):
            if self.key_scope == "table":  # others are refused
                rows = [r for r in rows if homes.setdefault(r["k"], r["d"]) == r["d"]]
            self.lake.lay(f"{number}.parquet", rows)
        if not self.lake.adopted:
            return
        if strike is not None:
            self.struck(strike, lambda: self.adopt_unless_done(self.lake))
        beside = Lake(self.root, **self.lake.given)
        number, kind = call
        self.lake.points.amid(number, lambda: self.adopt_unless_done(beside), kind)
        self.adopt_unless_done(self.lake)
        self.lake.points.disarm()
        beside.table.close()
        _, entry = self.lake.entries()[0]
        assert {f.name for touched in entry.touched.values() for f in touched.files} == set(self.lake.adopted)

    def adopt_unless_done(self, lake: Lake) -> None:
        try:
            lake.table.adopt()
        except ConfigurationError as e:
            assert e.code == "already-a-table"
            assert lake.entries()

    @precondition(lambda self: self.lake.entries())
    @rule()
    def adopt_what_is_a_table(self) -> None:
        before = self.everything()
        self.adopt_unless_done(self.lake)
        assert self.everything() == before

    @rule(strike=strikes, full=st.booleans())
    def compact(self, strike: Any, full: bool) -> None:
        self.lake.table.run(host="local")
        if self.lake.entries():
            self.struck(strike, lambda: self.lake.table.compact(full=full))
            if strike is None:
                assert not self.lake.unsettled_in(self.lake.table.view())
                left = [f for f in self.lake.table.files() if f.superseded or f.name.startswith(DATA)]
                assert not left or not full

    def land(self, rows: list[Any]) -> None:
        self.number += 1
        self.lake.land(f"{self.number:03d}.jsonl", rows)

    @rule(rows=nights, strike=strikes)
    def night(self, rows: list[Any], strike: Any) -> None:
        self.land(rows)
        self.struck(strike, lambda: self.lake.table.run(host="local"))

    @rule(rows=nights, call=calls, hours=st.sampled_from([0, 2, 25]))
    def night_that_a_vacuum_crosses(self, rows: list[Any], call: Any, hours: int) -> None:
        """Somewhere in it the process stalls, and goes on when a vacuum is done."""

        def vacuum() -> None:
            self.time.passed += timedelta(hours=hours)
            beside = Lake(self.root, **self.lake.given)
            if beside.entries():
                beside.table.vacuum(dry=False)
            beside.table.close()
            self.note_what_expired()

        self.land(rows)
        number, kind = call
        self.lake.points.amid(number, vacuum, kind)
        self.lake.table.run(host="local")
        self.lake.points.disarm()

    def change(self, latest: bool) -> None:
        """Add to the values of a key's rows, or delete them (with 0), as the last of ``changes`` says."""
        key, add = self.changes[-1]

        def changed(row: Any) -> Any:
            return None if row["k"] != key else {**row, "v": row["v"] + add} if add else {**row, "op": "D"}

        name, values = f"change-{len(self.changes)}", {"v": f"v + {add}"} if add else None
        snapshot = "latest" if latest else "published"
        try:
            self.lake.change(name, values, f"k = '{key}'", changed, snapshot=snapshot)
        except RefusedError as e:
            assert e.code in ("unpublished-batch", "repeated-keys")
            assert e.code == "repeated-keys" or not latest
        except ConfigurationError as e:
            assert e.code in ("no-table-yet", "batch-id-taken")
            if e.code == "batch-id-taken":  # it was withdrawn
                entries = dict(self.lake.entries())
                [number] = [n for n, entry in entries.items() if entry.batch_id == name]
                assert number not in counts_at(entries, max(entries))

    @rule(key=st.sampled_from(["a", "b"]), add=st.integers(0, 2), latest=st.booleans(), strike=strikes)
    def change_rows(self, key: str, add: int, latest: bool, strike: Any) -> None:
        self.changes.append((key, add))
        self.struck(strike, lambda: self.change(latest))

    @precondition(lambda self: self.changes)
    @rule(latest=st.booleans(), strike=strikes)
    def repeat_the_last_change(self, latest: bool, strike: Any) -> None:
        self.struck(strike, lambda: self.change(latest))

    @rule(
        key=st.sampled_from(["a", "b"]),
        add=st.integers(0, 2),
        latest=st.booleans(),
        before=nights,
        meanwhile=nights,
        call=st.one_of(calls, st.tuples(st.just(0), st.just("create _lakeupsert/ledger"))),
        whole=st.sampled_from([False, False, True]),
    )
    def change_rows_beside_a_night(
        self, key: str, add: int, latest: bool, before: list[Any], meanwhile: list[Any], call: Any, whole: bool
    ) -> None:
        """Somewhere in the statement another process appends records of the same keys, or runs a whole night of them."""

        def night() -> None:
            beside = Lake(self.root, **self.lake.given)
            beside.table.run(host="local") if whole else beside.table.append(host="local")
            beside.table.close()

        self.land([{**row, "k": key, "op": None} for row in before])
        self.lake.table.run(host="local")
        self.changes.append((key, add))
        self.land([{**row, "k": key, "d": before[0]["d"]} for row in meanwhile])
        number, kind = call
        self.lake.points.amid(number, night, kind)
        self.change(latest)
        self.lake.points.disarm()

    @rule(rows=nights)
    def append_alone(self, rows: list[Any]) -> None:
        self.land(rows)
        self.lake.table.append(host="local")

    @rule(rows=nights, refused=nights)
    def append_with_refused_rows(self, rows: list[Any], refused: list[Any]) -> None:
        self.number += 1
        self.lake.land(f"{self.number:03d}.jsonl", rows, [{**r, "v": LARGE + r["v"]} for r in refused])
        self.lake.table.append(host="local")

    @precondition(lambda self: self.lake.entries())
    @rule(strike=strikes)
    def mend_and_replay(self, strike: Any) -> None:
        if not self.mended:
            self.lake.mend(lambda row: True, schema={**SCHEMA, "v": "bigint"})
            self.mended = True
        self.struck(strike, lambda: self.lake.table.append(replay_quarantine=True))

    @rule()
    def merge_without_publishing(self) -> None:
        if self.lake.entries():
            self.lake.table.dedupe()

    @precondition(lambda self: any(entry.touched for _, entry in self.lake.entries()))
    @rule(data=st.data())
    def merge_one_partition(self, data: Any) -> None:
        pairs = [(p, number) for number, entry in self.lake.entries() for p in sorted(entry.touched)]
        dedupe_partitions(self.lake.opened, ArrowEngine(), dict([data.draw(st.sampled_from(pairs))]))

    @precondition(lambda self: self.lake.entries())
    @rule()
    def read_latest(self) -> None:
        """Whatever is half merged, not published or withdrawn."""
        view = self.lake.view("latest")
        assert view.snapshot.batch == self.lake.entries()[-1][0]
        assert to_arrow(view).read_all().to_pylist() == self.lake.expected_in(view)

    @precondition(lambda self: self.lake.table.snapshots())
    @rule(strike=strikes, data=st.data(), finish=st.booleans())
    def restore(self, strike: Any, data: Any, finish: bool) -> None:
        to = data.draw(st.sampled_from([link.number for link in self.lake.table.snapshots()]))
        self.struck(strike, lambda: self.lake.table.restore(to, dry=False))
        if finish:
            self.lake.table.run(host="local")

    @rule(strike=strikes)
    def append_what_was_withdrawn(self, strike: Any) -> None:
        self.struck(strike, lambda: self.lake.table.append(host="local", again=True))

    @rule(strike=strikes)
    def vacuum(self, strike: Any) -> None:
        if self.lake.entries():
            self.struck(strike, lambda: self.lake.table.vacuum(dry=False))
            self.note_what_expired()

    def note_what_expired(self) -> None:
        self.checked = None
        kept = {link.number for link in self.lake.table.snapshots()}
        for reader in self.readers:
            if reader.view.number not in kept and reader.expired is None:
                reader.expired = clock.now()

    @rule(hours=st.sampled_from([1, 23, 25, 200]))
    def pass_time(self, hours: int) -> None:
        self.time.passed += timedelta(hours=hours)

    @precondition(lambda self: self.lake.table.snapshots())
    @rule(data=st.data())
    def begin_to_read(self, data: Any) -> None:
        numbers = [link.number for link in self.lake.table.snapshots()]
        view = self.lake.view(data.draw(st.sampled_from([*numbers, "latest"])))
        self.readers.append(Reader(view, self.lake.expected_in(view)))

    @precondition(lambda self: self.lake.table.snapshots())
    @rule(name=st.sampled_from(["x", "y"]), data=st.data())
    def tag(self, name: str, data: Any) -> None:
        numbers = [link.number for link in self.lake.table.snapshots()]
        there = [None] if name in self.lake.table.tags() else []
        self.lake.table.tag(name, data.draw(st.sampled_from([*numbers, *there])))
        self.note_what_expired()  # what the name alone had kept

    @precondition(lambda self: self.lake.entries())
    @rule(source=st.sampled_from(["stored", "landing"]), strike=strikes, days=st.sampled_from([(1,), (2,), (1, 2)]))
    def reprocess(self, source: Any, strike: Any, days: tuple[int, ...]) -> None:
        dates = {f"d=2020-01-{day:02d}" for day in days}

        def selected(partition: str) -> bool:
            return "d" not in self.lake.settings.partition_by or partition.partition("/")[0] in dates

        again = self.lake.table.reprocess
        try:
            self.struck(strike, lambda: again(selected, source=source, host="local"))
        except RefusedError as e:
            if self.key_scope == "table":
                assert (e.code, source) == ("keys-of-the-table", "landing")
                return
            assert e.code == "source-gone"
            assert source == "landing"
            needed = {name for name in self.lake.adopted if selected(partition_of(name) or "")}
            assert not needed <= self.lake.stored_files(), "all that was adopted is still there"

    @rule()
    def plan_then_run(self) -> None:
        """Whatever is pending, the plan writes nothing, and the run merges what it said, and what a reprocess that died left."""
        before = self.everything()
        planned = {p.partition for p in self.lake.table.plan().partitions}
        assert self.everything() == before
        merged = {r.partition for r in self.lake.table.run(host="local").dedupe if r.status == "merged"}
        assert planned <= merged
        # A plan does not look for keys that move.
        assert self.key_scope == "table" or all(self.anew()[p] for p in merged - planned)

    def anew(self) -> dict[str, str | None]:
        """Of each partition the reprocess that was done to it last."""
        touched = {p for _, entry in self.lake.entries() for p in entry.touched}
        return {p: head.body.reprocessed for p, head in self.lake.table.objects.heads(touched).items()}

    def everything(self) -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in self.root.rglob("*")}

    @rule(strike=strikes)
    def reconcile(self, strike: Any) -> None:
        def balanced() -> None:
            if self.lake.entries():
                found = self.lake.table.reconcile()
                assert not found.unbalanced
                assert not found.batches
                unsettled = self.lake.unsettled_in(self.lake.table.view()) if self.lake.table.snapshots() else set()
                assert {p.partition for p in found.proof if not p.by_digest} == unsettled

        self.struck(strike, balanced)

    @invariant()
    def every_snapshot_is_right(self) -> None:
        """Snapshots are immutable, so each is compared once for each state of the chains below it, and after each vacuum."""
        state = [link.number for link in self.lake.table.snapshots()], len(self.lake.entries())
        if state != self.checked:
            self.checked = state
            self.lake.check()
            retained = clock.now() - self.lake.settings.retention + timedelta(minutes=1)
            self.readers = [r for r in self.readers if r.expired is None or r.expired > retained]
            for reader in self.readers:
                assert to_arrow(reader.view).read_all().to_pylist() == reader.rows, "a reader lost its snapshot"


def examples(number: int) -> settings:
    return settings(
        max_examples=TIMES * number if TIMES > 1 else number // 3 or 1,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_lake_under_upkeep_equals_a_dict_after_every_step() -> None:
    run_state_machine_as_test(UpkeepMachine, settings=examples(5))


def test_lake_of_keys_that_move_equals_a_dict_under_upkeep() -> None:
    """Restores, vacuums and adoption keep the key index right, or make it anew; deletes need not say where their key is."""

    class OneRowAKey(UpkeepMachine):
        key_scope = "table"

        @precondition(lambda self: any(entry.touched for _, entry in self.lake.entries()))
        @rule(rows=st.lists(st.one_of(records, deletes_by_key), min_size=1, max_size=3), strike=strikes)
        def night_of_deletes_by_key(self, rows: list[Any], strike: Any) -> None:
            self.night(rows, strike)

    run_state_machine_as_test(OneRowAKey, settings=examples(3))
