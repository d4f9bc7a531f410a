"""Append, dedupe, publish, crash, lose and double messages in any order: every snapshot equals a dict."""

import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

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

from lakeupsert import Table
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.operations import vacuum as vacuuming
from lakeupsert.pipeline import previews, strategy, table_keys
from lakeupsert.pipeline.merge import units
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.queue import Message
from lakeupsert.rows import datafiles
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, iceberg_settings, row
from tests.harness.rounds import TIMES

MEMORY = Path("/dev/shm")

records = st.builds(
    row,
    k=st.sampled_from(["a", "b", "ü"]),
    day=st.integers(0, 1),
    ts=st.one_of(st.none(), st.integers(0, 3)),
    v=st.integers(0, 9),
    line=st.integers(0, 1),
    op=st.sampled_from([None, None, None, "U", "D"]),
).map(lambda r: {**r, "ts": row("", 0, 0)["ts"]} if r["op"] == "D" and r["ts"] is None else r)
deletes_by_key = records.map(lambda r: {**r, "d": None, "op": "D", "ts": r["ts"] or row("", 0, 0)["ts"]})
# A step makes dozens of calls and few creates, and the creates are what matters most, above all where their answer is lost.
creates = st.tuples(st.integers(0, 2), st.just("create"))
calls = st.one_of(st.tuples(st.integers(0, 40), st.just("")), creates)
strikes = st.one_of(st.none(), st.tuples(calls, st.sampled_from(Fault)), st.tuples(creates, st.just(Fault.AFTER)))


MANY_BUCKETS = "2500B"
"""A file of one row has some 2,000 bytes, so what two merges bring is split."""


PARTITIONS = st.sampled_from([("d",), ("d",), (), ("bucket(3, k)",), ("d", "bucket(2, k, l)")])
"""By date, none, by hash of the key, and by hash below a date."""


class LakeMachine(RuleBasedStateMachine):
    """Few keys, two dates, ordering values 0 to 3 and null: ties and late rows are the point."""

    engines: Any = (ArrowEngine(),)
    key_scope: Any = "partition"
    retention: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.number = 0
        self.checked = (-1, -1)
        self.patch = pytest.MonkeyPatch()
        # These partitions are tiny: `auto` would rewrite them all, and their deltas are all of one size.
        self.patch.setattr(strategy, "SMALL_BYTES", 0)
        self.patch.setattr(datafiles, "BARE_BYTES", 0)
        self.patch.setattr(datafiles, "COLUMN_BYTES", 0)
        self.lake = Lake(self.root)

    @initialize(
        chosen=st.sampled_from(["rewrite", "delta", "auto"]),
        together=st.sampled_from([2, 99]),
        bucket=st.sampled_from([MANY_BUCKETS, "256MiB"]),
        alone=st.sampled_from([0, 4]),
        backwards=st.booleans(),
        content=st.booleans(),
        publishers=st.sampled_from([(), ("delta",), ("delta", "iceberg")]),
        partition_by=PARTITIONS,
        versions=st.booleans(),
    )
    def choose_settings(
        self,
        chosen: str,
        together: int,
        bucket: str,
        alone: int,
        backwards: bool,
        content: bool,
        publishers: Any,
        partition_by: tuple[str, ...],
        versions: bool,
    ) -> None:
        self.patch.setattr(strategy, "TOGETHER", together)
        self.patch.setattr(table_keys, "MOST_CHANGED", together - 2)
        self.patch.setattr(units, "ALONE_BUCKETS", alone)
        order_by, ties = "ts asc nulls first" if backwards else "ts", "content" if content else "arrival"
        if self.key_scope == "table":
            ties, content = "arrival", False
            partition_by = partition_by if "d" in partition_by else ("d",)  # without a date no key could move
        self.lake = Lake(
            self.root,
            strategy=chosen,
            bucket=bucket,
            order_by=(order_by,),
            partition_by=partition_by,
            ties=ties,
            key_scope=self.key_scope,
            versions=versions,
            publishers=publishers,
            iceberg=iceberg_settings(self.root) if "iceberg" in publishers else None,
            **self.retention,
        )
        self.lake.rules = replace(
            self.lake.rules,
            ascending=("ts",) if backwards else (),
            nulls_first=("ts",) if backwards else (),
            content=tuple(name for name in ("d", "v") if name not in partition_by) if content else None,
        )

    def teardown(self) -> None:
        try:
            self.lake.finish_and_check()
        finally:
            self.patch.undo()
            self.lake.table.close()
            shutil.rmtree(self.root)

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

    @rule(files=st.lists(st.lists(records, max_size=5), min_size=1, max_size=2))
    def land(self, files: list[list[Any]]) -> None:
        for rows in files:
            self.number += 1
            self.lake.land(f"{self.number:03d}.jsonl", rows)

    @precondition(lambda self: self.lake.landed)
    @rule(data=st.data())
    def send_a_file_again(self, data: Any) -> None:
        """Same path, same bytes, another modification time."""
        path = self.root / "landing" / data.draw(st.sampled_from(sorted(self.lake.landed)))
        path.write_bytes(path.read_bytes())

    @rule(strike=strikes)
    def append(self, strike: Any) -> None:
        self.struck(strike, lambda: self.lake.table.append(host="local"))

    @rule(name=st.integers(0, 3))
    def append_with_a_batch_id(self, name: int) -> None:
        taken = {entry.batch_id for _, entry in self.lake.entries()}
        try:
            self.lake.table.append(host="local", batch_id=f"night-{name}")
        except ConfigurationError as e:
            assert e.code == "batch-id-taken"
            assert f"night-{name}" in taken

    @rule(strike=strikes, engine=st.integers(0, 1))
    def dedupe(self, strike: Any, engine: int) -> None:
        chosen = self.engines[engine % len(self.engines)]
        self.struck(strike, lambda: self._drain(chosen))

    def _drain(self, engine: Any) -> None:
        if self.lake.entries():
            drain(self.lake.opened, engine, WorkerOptions())

    @precondition(lambda self: self.lake.entries())
    @rule(times=st.integers(1, 2), unit=st.one_of(st.none(), st.integers(0, 3)), data=st.data())
    def double_a_message(self, times: int, unit: int | None, data: Any) -> None:
        """Any message about any batch may come at any time."""
        entries = [(n, e) for n, e in self.lake.entries() if e.touched]
        if entries:
            number, entry = data.draw(st.sampled_from(entries))
            partition = data.draw(st.sampled_from(sorted(entry.touched)))
            self.lake.opened.resources.queue.send([Message("t", partition, number, unit=unit)] * times)

    @precondition(lambda self: self.lake.entries())
    @rule(keep=st.integers(0, 2))
    def lose_messages(self, keep: int) -> None:
        queue = self.lake.opened.resources.queue
        for lease in queue.receive(1000, 60)[keep:]:
            queue.ack(lease)
        self.lake.reopen()  # what this process leased and kept comes back by its end

    @rule(strike=strikes, full=st.booleans())
    def compact(self, strike: Any, full: bool) -> None:
        if self.lake.entries():
            self.struck(strike, lambda: self.lake.table.compact(full=full))

    @rule(strike=strikes)
    def publish(self, strike: Any) -> None:
        self.struck(strike, lambda: self.lake.table.publish())

    @invariant()
    def every_snapshot_is_right(self) -> None:
        """Snapshots are immutable, so each is compared once for each state of the chains below it."""
        snapshots = self.lake.table.snapshots()
        state = (len(snapshots), len(self.lake.entries()))
        if state != self.checked:
            self.checked = state
            self.lake.check()


def examples(number: int) -> settings:
    return settings(
        max_examples=TIMES * number if TIMES > 1 else number // 3 or 1,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_lake_equals_a_dict_after_every_step() -> None:
    run_state_machine_as_test(LakeMachine, settings=examples(12))


def test_lake_of_keys_that_move_equals_a_dict_after_every_step() -> None:
    """A key has one row in the whole table, wherever its records come, and deletes need not say where it is."""

    class OneRowAKey(LakeMachine):
        key_scope = "table"

        @precondition(lambda self: any(entry.touched for _, entry in self.lake.entries()))
        @rule(rows=st.lists(st.one_of(records, deletes_by_key), min_size=1, max_size=4))
        def land_deletes_by_key(self, rows: list[Any]) -> None:
            self.land([rows])

    run_state_machine_as_test(OneRowAKey, settings=examples(6))


class LedLake(LakeMachine):
    """One process leads for long, takes heads from memory and publishes groups, while all others commit beside it."""

    leader: Any = None
    retention: ClassVar[dict[str, Any]] = {"keep_snapshots": 2, "superseded_retention": "0s"}

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(previews, "LEAST_PARTITIONS", 1)
        self.patch.setattr(previews, "MOST_MERGES", 3)
        for age in ("ORPHANS_KEPT", "ORPHANED_PACKS_KEPT"):  # so that fences alone protect what is not committed
            self.patch.setattr(vacuuming, age, vacuuming.timedelta(0))

    @rule(steps=st.lists(st.sampled_from(["append", "dedupe", "publish"]), min_size=1, max_size=4))
    def lead(self, steps: list[str]) -> None:
        if self.leader is None:
            self.leader = OpenTable("t", self.lake.settings)
        table = Table.of(self.leader)
        with self.leader.leading():
            for step in steps:
                if step == "append":
                    table.append(host="local")
                elif step == "dedupe":
                    table.dedupe()
                else:
                    table.publish()

    @rule()
    def lead_a_batch(self) -> None:
        """What landed is seen if nobody else is in the way."""
        before = len(self.lake.entries())
        self.lead(["append", "dedupe", "publish"])
        if len(self.lake.entries()) > before:
            self.lake.check()

    @precondition(lambda self: self.lake.table.snapshots())
    @rule()
    def vacuum(self) -> None:
        self.lake.table.vacuum(dry=False)

    @precondition(lambda self: self.lake.table.snapshots())
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        numbers = [link.number for link in self.lake.table.snapshots()]
        with suppress(RefusedError):
            self.lake.table.restore(data.draw(st.sampled_from(numbers)), dry=False)

    def teardown(self) -> None:
        if self.leader is not None:
            self.leader.resources.close()
        self.land([[row("a", 0, 0)]])  # a table that is never created has nothing to vacuum
        super().teardown()


def test_lake_with_a_leader_equals_a_dict_after_every_step() -> None:
    run_state_machine_as_test(LedLake, settings=examples(12))


def test_lake_equals_a_dict_with_either_engine(spark: Any) -> None:
    """A partition goes from one engine to the other and back, and from this process to Spark's tasks."""
    from lakeupsert.engine.hosted import HostedEngine
    from lakeupsert.engine.spark_host import SparkHost
    from lakeupsert.engine.spark_window import SparkEngine

    class BothEngines(LakeMachine):
        engines = (SparkEngine(), ArrowEngine(), HostedEngine(SparkHost(), None))

    run_state_machine_as_test(BothEngines, settings=examples(5))
