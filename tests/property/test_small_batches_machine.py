"""Small batches by processes that die, stall and come back, beside workers and upkeep: readers see what a dict has."""

import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
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
from lakeupsert.endpoint.batches import FOLDER, Batches
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.operations.ingest import IngestOptions, Intake
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.stop import Stop, WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.retries import LEADER_SECONDS
from lakeupsert.rows import datafiles
from lakeupsert.sources.draft import ENDING, Draft
from lakeupsert.sources.files import SourceFiles
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, json_lines, row
from tests.harness.model import Row
from tests.property.test_lake_machine import MEMORY, examples
from tests.property.test_upkeep_machine import PassingTime

SOURCE = "events"
TYPE = "application/x-ndjson"
values = st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.sampled_from([None, None, "D"]))
changes = st.lists(values, min_size=1, max_size=3)
calls = st.one_of(
    st.tuples(st.integers(0, 30), st.just("")),
    st.tuples(st.integers(0, 2), st.sampled_from(["create", "landing create"])),
)
strikes = st.one_of(st.none(), st.tuples(calls, st.sampled_from(Fault)))
creates = st.tuples(st.just(0), st.sampled_from(["create", "landing create"]))
few_calls = st.one_of(st.none(), st.tuples(creates, st.sampled_from(Fault)))
OTHERS = ["work", "compact", "vacuum", "lose_messages", "retain"]
which = st.integers(0, 1)


class Source(SourceFiles):
    """A process that reads a list of events. Its position is the number of those that it has read."""

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake.opened, SOURCE, ENDING)
        self._landing = lake.opened.resources.landing  # type: ignore[assignment]  # with points for faults
        self.next: int | None = None

    def read(self, events: Sequence[Row], most: int) -> None:
        if self.next is None:
            self.next = int(self.begin() or 0)
        rows = events[self.next : self.next + most]
        if rows:
            draft = Draft(0, 1, 1)
            for line in json_lines(rows).splitlines():
                draft.add(line)
            self.land(draft.take(), str(self.next + len(rows)))
            self.next += len(rows)


class Process:
    """One of two machines, each with an `ingest`, a reader of the source, and an endpoint. It dies as a whole."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.start()

    def start(self) -> None:
        self.lake.points.disarm()
        self.lake.reopen()
        self.intake = Intake(self.lake.opened, IngestOptions(batch_bytes=300, warn=lambda text: None))
        self.source = Source(self.lake)
        self.endpoint = Batches(self.lake.opened)
        self.endpoint._landing = self.lake.opened.resources.landing  # type: ignore[assignment]

    @contextmanager
    def struck(self, strike: Any) -> Iterator[None]:
        """A step. Its process may die there, or goes on after an error."""
        if strike is not None:
            (number, kind), fault = strike
            self.lake.points.arm(number, fault, kind)
        try:
            yield
        except Killed:
            self.start()
        except TryAgainError:
            self.source.next = None
        finally:
            self.lake.points.disarm()


@dataclass
class Sent:
    """A batch that a client sends until it has an answer."""

    rows: list[Row]
    is_acknowledged: bool = False


class SmallBatches(RuleBasedStateMachine):
    """Each change has a time of its own, so a dict knows which one wins wherever and however often it came."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.context = ExitStack()
        patch = self.context.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(strategy, "SMALL_BYTES", 0)  # `auto` would rewrite these partitions
        patch.setattr(datafiles, "BARE_BYTES", 0)
        patch.setattr(datafiles, "COLUMN_BYTES", 0)
        self.time = PassingTime()
        self.context.enter_context(clock.use(self.time))
        self.changes: list[Row] = []
        """All changes that came from anywhere."""
        self.events: list[Row] = []
        """Those that the source has."""
        self.sent: dict[str, Sent] = {}
        self.checked: Any = None

    @initialize(chosen=st.sampled_from(["rewrite", "delta", "auto"]))
    def begin(self, chosen: str) -> None:
        self.lake = Lake(self.root, strategy=chosen, keep_snapshots=2, superseded_retention="0s")
        self.processes = [Process(Lake(self.root, **self.lake.given)) for _ in range(2)]

    def changed(self, given: list[tuple[str, int, str | None]]) -> list[Row]:
        """Changes, each later than all before."""
        rows = [row(k, day, ts, v=ts, op=op) for ts, (k, day, op) in enumerate(given, len(self.changes))]
        self.changes += rows
        return rows

    @rule(given=changes)
    def land(self, given: Any) -> None:
        rows = self.changed(given)
        self.lake.land(f"{len(self.changes)}.jsonl", rows)

    @rule(one=which, most=st.integers(1, 3), strike=few_calls, given=changes)
    def read_the_source(self, one: int, most: int, strike: Any, given: Any) -> None:
        self.events += self.changed(given)
        process = self.processes[one]
        with process.struck(strike):
            process.source.read(self.events, most)

    @rule(one=which, call=st.one_of(creates, calls), given=changes)
    def source_that_stalls(self, one: int, call: Any, given: Any) -> None:
        """Before one of its calls, another process takes over the source."""
        self.events += self.changed(given)
        process = self.processes[one]
        process.lake.points.amid(call[0], lambda: self.read_the_source(1 - one, 3, None, []), call[1])
        with process.struck(None):
            process.source.read(self.events, 2)

    @rule(one=which, strike=few_calls, given=changes)
    def send(self, one: int, strike: Any, given: Any) -> None:
        batch_id = f"id-{len(self.changes)}"
        self.sent[batch_id] = Sent(self.changed(given))
        self.post(one, strike, batch_id)

    @precondition(lambda self: self.sent)
    @rule(one=which, strike=few_calls, data=st.data())
    def send_again(self, one: int, strike: Any, data: Any) -> None:
        self.post(one, strike, data.draw(st.sampled_from(sorted(self.sent))))

    def post(self, one: int, strike: Any, batch_id: str) -> None:
        batch, process = self.sent[batch_id], self.processes[one]
        with process.struck(strike):
            was_stored = process.endpoint.receive(batch_id, TYPE, json_lines(batch.rows))
            assert was_stored or not batch.is_acknowledged, f"{batch_id} is forgotten"
            batch.is_acknowledged = True

    @precondition(lambda self: any(one.is_acknowledged for one in self.sent.values()))
    @rule(one=which, data=st.data())
    def send_other_rows(self, one: int, data: Any) -> None:
        batch_id = data.draw(st.sampled_from(sorted(name for name, one in self.sent.items() if one.is_acknowledged)))
        with pytest.raises(RefusedError) as caught:
            self.processes[one].endpoint.receive(batch_id, TYPE, json_lines([row("a", 0, 999)]))
        assert caught.value.code == "batch-id-taken"

    @rule(one=which, rounds=st.integers(1, 3), is_late=st.booleans(), strike=strikes)
    def ingest(self, one: int, rounds: int, is_late: bool, strike: Any) -> None:
        """Who does not lead leaves the table alone."""
        process = self.processes[one]
        for _ in range(rounds):
            before = self.state()
            with process.struck(strike):
                process.intake.once(Stop())
                assert process.intake.leadership.leads or self.state() == before, "two processes lead"
            self.time.passed += timedelta(seconds=LEADER_SECONDS * is_late)

    def state(self) -> tuple[int, int]:
        return len(self.lake.table.snapshots()), len(self.lake.entries())

    @rule(one=which, call=calls, others=st.lists(st.sampled_from(OTHERS), max_size=3))
    def ingest_that_stalls(self, one: int, call: Any, others: list[str]) -> None:
        """Somewhere in a round the process stalls for a minute. It goes on when another one has taken over."""

        def take_over() -> None:
            self.read_the_source(1 - one, 3, None, [])
            self.ingest(1 - one, 3, is_late=True, strike=None)
            for name in others:
                getattr(self, name)()

        process = self.processes[one]
        process.lake.points.amid(call[0], take_over, call[1])
        with process.struck(None):
            process.intake.once(Stop())

    @rule(names=st.lists(st.sampled_from(OTHERS), min_size=1, max_size=3))
    def others_work(self, names: list[str]) -> None:
        for name in names:
            getattr(self, name)()

    def work(self) -> None:
        if self.lake.entries():
            drain(self.lake.opened, ArrowEngine(), WorkerOptions())

    def compact(self) -> None:
        if self.lake.entries():
            self.lake.table.compact()

    def vacuum(self) -> None:
        if self.lake.table.snapshots():
            self.lake.table.vacuum(dry=False)
        self.time.passed += timedelta(hours=2)

    def lose_messages(self) -> None:
        if self.lake.entries():
            queue = self.lake.opened.resources.queue
            for lease in queue.receive(1000, 60):
                queue.ack(lease)

    def retain(self) -> None:
        """A night takes what landed, and its files are removed. An empty one keeps a place for as long as a process may stall."""
        self.lake.table.run(host="local", workers=1)
        self.note_landed()
        for path in {f.path for _, entry in self.lake.entries() for f in entry.files}:
            file = self.root / "landing" / path
            if file.exists() and file.stat().st_size:
                file.unlink()

    @rule()
    def lose_the_position(self) -> None:
        """The newest entry of the source's chain is gone. Nothing is lost in silence, and the entry comes back from a backup."""
        chain = self.lake.opened.history.objects.source(SOURCE)
        head = chain.head()
        if head is None or not (self.root / "landing" / head.body.file).is_file():
            return
        entry = self.root / "processed" / chain.name(head.number)
        backup = entry.read_bytes()
        entry.unlink()
        process = self.processes[0]
        process.start()
        try:
            with process.struck(None):
                process.source.read(self.events, 3)
        except ConfigurationError as e:
            assert e.code == "position-lost"
            entry.write_bytes(backup)
        if not entry.exists():
            entry.write_bytes(backup)
        for one in self.processes:
            one.source.next = None

    def note_landed(self) -> None:
        """Tell the model of the lake what is in the files that the source and the endpoint landed."""
        for folder in (SOURCE, FOLDER):
            for path in (self.root / "landing" / folder).glob("*"):
                data = path.read_bytes()
                lines = (gzip.decompress(data) if path.suffix == ".gz" and data else data).splitlines()
                self.lake.landed[f"{folder}/{path.name}"] = [_row(json.loads(line)) for line in lines]

    @invariant()
    def every_snapshot_is_right(self) -> None:
        if self.state() != self.checked:
            self.checked = self.state()
            self.note_landed()
            self.lake.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "lake"):
                self.everything_arrives()
        finally:
            for lake in [self.lake, *(process.lake for process in self.processes)]:
                lake.table.close()
            self.context.close()
            shutil.rmtree(self.root)

    def everything_arrives(self) -> None:
        """Clients send until they have an answer, the source is read to its end, and a night takes the rest."""
        self.land([("a", 0, None)])
        for batch_id in self.sent:
            self.post(0, None, batch_id)
        process = self.processes[0]
        process.start()
        process.source.next = int(process.source.begin() or 0)
        while process.source.next < len(self.events):
            process.source.read(self.events, 3)
        self.note_landed()
        self.lake.finish_and_check()
        newest = {(change["d"], change["k"]): change for change in self.changes}
        live = [change for _, change in sorted(newest.items()) if change["op"] is None]
        assert self.lake.rows() == [{c: v for c, v in change.items() if c != "op"} for change in live]


def _row(record: dict[str, Any]) -> Row:
    return {**record, "d": date.fromisoformat(record["d"]), "ts": datetime.fromisoformat(record["ts"])}


def test_small_batches_equal_a_dict_after_every_step() -> None:
    # A failure is not made shorter, to save minutes.
    run_state_machine_as_test(SmallBatches, settings=settings(examples(60), phases=[Phase.generate]))
