"""Chaos: six worker processes on a cloud, one killed every five seconds, one answer in twenty lost; all rows compared.

    python -m tests.harness.chaos --minutes 4 --runs 3

Reads     nothing; needs the servers that `make servers` installs
Writes    a new table for each run, in a bucket of versitygw or a container of Azurite, deleted at the end
Repeat    safe

All requests of workers, appends and publishes to the store go through a proxy that lets the server act and drops one answer in
twenty. A worker dies (SIGKILL) at its next call of a chosen kind. Another worker takes its place, and the messages it held
return when their lease ends. New batches keep coming. A run takes the given time, or longer until it has `LEAST` of
everything. It fails if a snapshot differs from the model in any row, or the counters of a partition do not balance.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from signal import SIGKILL

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError
from lakeupsert.queue import QueueStats
from tests.harness.lake import Lake, row
from tests.harness.processes import PATIENCE_SECONDS, Died, LakeProcess, Strike
from tests.harness.proxy import FaultProxy, Rule, fault_proxy
from tests.harness.servers import CLOUDS

WORKERS = 6
PARTITIONS = 120
LEASE_SECONDS = 10.0
KILL_SECONDS = 5.0
LOST = 0.05
MANIFEST = "create _lakeupsert/partitions"
STRIKES = [
    ("while reading", Strike(("open d=", "open _lakeupsert/data"))),
    ("before a create", Strike(MANIFEST)),
    ("at a data put", Strike("put d=")),
    ("after a create", Strike(MANIFEST, when="after")),
    ("before the ack", Strike("queue ack")),
    ("while reading", Strike("get _lakeupsert/partitions", when="after")),
    ("at a data put", Strike("put d=", when="after")),
]
LEAST = {"kills": 20, "kills at each step": 2, "lost answers": 200, "lost answers of creates": 20}


@dataclass
class Chaos:
    """One run on a new table, and its counts."""

    lake: Lake
    proxy: FaultProxy
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    gave_up: int = 0  # steps that ended because no attempt of a request got an answer
    nights: int = 0

    def __post_init__(self) -> None:
        self._strikes = cycle(STRIKES)
        self._workers: dict[LakeProcess, str | None] = {}  # the value: where the worker is to be killed
        self._step = "append"  # of the writer
        self._at_end = False

    def counts(self) -> dict[str, int]:
        lost = [event for event in self.proxy.log if "lose" in event.acts]
        return {
            "kills": self.kills.total(),
            "kills at each step": min(self.kills[step] for step, _ in STRIKES),
            "lost answers": len(lost),
            "lost answers of creates": sum(event.conditional for event in lost),
        }

    def run(self, seconds: float) -> None:
        begun = clock.elapsed()
        strike_at = begun + KILL_SECONDS
        with ExitStack() as stack:
            writer = stack.enter_context(LakeProcess(self.lake))
            self._land()
            writer.begin(self._step)
            while True:
                now = clock.elapsed()
                over = now - begun > seconds and all(self.counts()[what] >= n for what, n in LEAST.items())
                for _ in range(WORKERS - len(self._workers)):
                    worker = stack.enter_context(LakeProcess(self.lake))
                    worker.begin("work", lease_seconds=LEASE_SECONDS)
                    self._workers[worker] = None
                for worker in [worker for worker in self._workers if worker.answered()]:
                    self._bury(worker)
                if now >= strike_at and not over:
                    strike_at += KILL_SECONDS
                    self._strike()
                if writer.answered() and self._go_on(writer, over=over):
                    return
                assert now - begun < 2 * seconds + PATIENCE_SECONDS, f"the run does not end: {self.counts()}"
                clock.sleep(0.02)

    def _strike(self) -> None:
        free = [worker for worker, step in self._workers.items() if step is None]
        if not free:  # all will die at a call that comes with the next messages
            return
        step, strike = next(self._strikes)
        victim = self.chance.choice(free)
        self._workers[victim] = step
        victim.strike(strike)

    def _bury(self, worker: LakeProcess) -> None:
        step = self._workers.pop(worker)
        try:
            self._finish_step(worker)  # a worker that gave up is replaced too, as a container would do
        except Died as died:
            if step is None or died.code != -SIGKILL:
                raise
            self.kills[step] += 1

    def _go_on(self, writer: LakeProcess, *, over: bool) -> bool:
        """Begin the writer's next step when it is due. True at the end, when everything is merged and published."""
        queue = self.lake.table.objects.queue.stats()
        assert not queue.dead, "a message went to the dead letters"
        if not over and queue.visible + queue.leased > PARTITIONS / 2:
            return False
        if over and queue != QueueStats(0, 0, 0):
            return False
        if not self._finish_step(writer):  # run the same step again, as the error advises
            writer.begin(self._step)
            return False
        if self._at_end:
            return True
        self._at_end = over
        self._step = "publish" if over or self._step == "append" else "append"
        if self._step == "append":
            self._land()
        writer.begin(self._step)
        return False

    def _finish_step(self, process: LakeProcess) -> bool:
        """Wait for the end of the step. False if it gave up."""
        try:
            process.end()
        except LakeupsertError as e:
            print(f"gave up: {e}", file=sys.stderr)
            self.gave_up += 1
            return False
        return True

    def _land(self) -> None:
        """Land a night that touches every partition: few keys, equal times, deletes."""
        self.nights += 1
        rows = [
            row(self.chance.choice("abcdef"), day, self.chance.randrange(9), self.nights * 10 + line, op=op)
            for day in range(PARTITIONS)
            for line, op in enumerate((None, None, self.chance.choice((None, None, "D"))))
        ]
        self.lake.land(f"{self.nights}.jsonl", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cloud", choices=CLOUDS, default="aws", help="default: %(default)s")
    options.add_argument("--minutes", type=float, default=4.0, help="of each run, at least")
    options.add_argument("--runs", type=int, default=1)
    options.add_argument("--seed", type=int, default=0, help="of the first run")
    given = options.parse_args(arguments)
    with (
        CLOUDS[given.cloud]() as cloud,
        fault_proxy(cloud.store, Rule("lose", chance=LOST), seed=given.seed) as proxy,
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
    ):
        os.environ.update(cloud.env)
        root = cloud.store.new_place("lake")
        for number in range(given.runs):
            os.environ.update(proxy.server.env)
            name = f"run-{number}"
            zones = {zone: f"{root}/{name}/{zone}" for zone in ("landing", "processed")}
            lake = Lake(Path(folder) / name, **zones, queue=cloud.queue(name))
            proxy.log.clear()
            begun = clock.elapsed()
            chaos = Chaos(lake, proxy, random.Random(given.seed + number))
            chaos.run(given.minutes * 60)
            seconds, requests = clock.elapsed() - begun, len(proxy.log)
            os.environ.update(cloud.env)
            lake.reopen()
            assert lake.table.status().dirty == 0, "the workers left something"
            lake.finish_and_check()
            print(
                f"run {number + 1}, seed {given.seed + number}: {seconds:.0f} s, {chaos.nights} nights of {PARTITIONS} "
                f"partitions, {requests} requests, {len(lake.rows())} rows in the last of {len(lake.table.snapshots())} "
                f"snapshots: exact and balanced\n  {_text(chaos.counts())}\n  {_text(chaos.kills)}; "
                f"gave up: {chaos.gave_up}",
                flush=True,
            )
    return 0


def _text(counts: dict[str, int]) -> str:
    return ", ".join(f"{what}: {n}" for what, n in counts.items())


if __name__ == "__main__":
    sys.exit(main())
