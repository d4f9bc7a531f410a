"""Chaos: six workers and a writer on a cloud or on a local disk, under every fault that we can make; all rows compared.

    python -m tests.harness.chaos --minutes 60
    python -m tests.harness.chaos --cloud local --minutes 4 --runs 3

Reads     nothing; needs the servers that `make servers` installs. Full disks need the right to mount, clocks libfaketime (apt)
Writes    a new table for each run, in a bucket of versitygw, a container of Azurite or a folder; deleted at the end
Repeat    safe

New batches keep coming, and a vacuum after every tenth. Meanwhile
- a worker dies (SIGKILL) at its next call of a chosen kind, and another one takes its place; or it stops there (SIGSTOP) for
  longer than a lease, while others get its messages, and then continues (SIGCONT);
- the clock of one process jumps, by hours or by minutes, to and fro;
- the disk is full: that of the store's server, of temporary files, and with `--cloud local` of the lake and its queue;
- the store answers 503 for a while (of an hour: for minutes), loses one answer in twenty after it acted, and now and then cuts
  the body of an answer or of a request in the middle.

A run takes the given time, or longer until it has `LEAST` of everything. It fails if a snapshot differs from the model in any
row, if the counters of a partition do not balance, or if a process that lived through it holds more memory, descriptors, threads
or temporary files in its last third than in its first.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from signal import SIGCONT, SIGKILL
from typing import Any

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError, TryAgainError
from tests.harness.lake import Lake, row
from tests.harness.machine import Disk, Usage, fake_clocks, is_flat, is_stopped, small_disk, thirds, usage_of
from tests.harness.processes import PATIENCE_SECONDS, Died, LakeProcess, Strike, wait_until
from tests.harness.proxy import FaultProxy, Rule, fault_proxy, refuse
from tests.harness.servers import CLOUDS

WORKERS = 6
STEADY = 2
"""So many of them are never killed. So their figures are of the whole run."""
PARTITIONS = 120
VACUUM_EVERY = 10
LEASE_SECONDS = 10.0
STRIKE_SECONDS = 5.0
STOP_SECONDS = 1.5 * LEASE_SECONDS
RESTART_SECONDS = 3.0
"""Until a process that gave up begins again, as a container would."""
OPTIONS: dict[str, dict[str, Any]] = {"work": {"lease_seconds": LEASE_SECONDS}, "vacuum": {"dry": False}}
SAMPLE_SECONDS = 1.0
MANIFEST = "create _lakeupsert/partitions"
STRIKES = [
    ("while reading", Strike(("open d=", "open _lakeupsert/data"))),
    ("before a create", Strike(MANIFEST, act="stop")),
    ("before a create", Strike(MANIFEST)),
    ("at a data put", Strike("put d=")),
    ("before the ack", Strike("queue ack", act="stop")),
    ("after a create", Strike(MANIFEST, when="after")),
    ("before the ack", Strike("queue ack")),
    ("while reading", Strike("get _lakeupsert/partitions", when="after", act="stop")),
    ("after a read", Strike("get _lakeupsert/partitions", when="after")),
    ("after a data put", Strike("put d=", when="after")),
]
JUMPS, REFUSED_SECONDS = [10800, -600, 600, -10800], 900
"""S3 refuses requests from a clock that is more than 15 minutes off."""
RULES = (
    Rule("lose", chance=0.05),
    Rule("cut", "GET", chance=0.02),
    Rule("sever", "PUT|POST", chance=0.02),
)
OUTAGE = refuse(503, "SlowDown")
NAMES = {"lose": "lost answer", "cut": "cut answer", "sever": "cut request", "answer": "503"}
LEAST = {
    **{("SIGKILL", name): 2 for name, strike in STRIKES if strike.act == "kill"},
    **{("SIGSTOP", name): 1 for name, strike in STRIKES if strike.act == "stop"},
    **{("clock", f"{jump:+} s"): 1 for jump in JUMPS},
    ("full disk", ""): 2,
    ("503", "GET"): 20,
    ("503", "create"): 2,
    ("lost answer", "GET"): 100,
    ("lost answer", "create"): 20,
    ("cut answer", "GET"): 20,
    ("cut request", "create"): 5,
    ("cut request", "PUT"): 5,
}
NEEDS_STORE = {"503", "lost answer", "cut answer", "cut request"}


@dataclass
class Episode:
    """A fault that comes every so many seconds and lasts for some of them."""

    fault: Callable[[], AbstractContextManager[None]]
    every: float
    lasts: float
    due: float
    _open: ExitStack | None = None
    _until: float = 0.0

    def tick(self, now: float, *, over: bool) -> None:
        if self._open is not None and (over or now >= self._until):
            self._open.close()
            self._open = None
        elif self._open is None and not over and now >= self.due:
            self._open = ExitStack()
            self._open.enter_context(self.fault())
            self.due, self._until = now + self.every, now + self.lasts


@dataclass(eq=False)
class Member:
    """A process of the run.

    Attributes:
        folder, clock: where its temporary files are; the file that says how far its clock is off.
        aim: where it will be killed or stopped.
        stopped_at, again_at: since when it is stopped; when it begins its step again.
    """

    process: LakeProcess
    name: str
    folder: Path
    clock: Path
    steady: bool
    step: str = ""
    aim: tuple[str, Strike] | None = None
    stopped_at: float | None = None
    again_at: float | None = None
    samples: list[Usage] = field(default_factory=list)

    def begin(self, step: str) -> None:
        self.step, self.aim, self.again_at = step, None, None
        self.process.begin(step, **OPTIONS.get(step, {}))

    def set_clock(self, seconds: int) -> None:
        new = self.clock.with_suffix(".new")
        new.write_text(f"{seconds:+}\n")
        new.replace(self.clock)


@dataclass
class Chaos:
    """One run on a new table. ``hits``: how often each fault struck, and what; ``gave_up``: steps that ended with an error."""

    lake: Lake
    env: Mapping[str, str]  # of its processes
    proxy: FaultProxy | None
    disk: Disk
    clocks: Path | None
    chance: random.Random
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    gave_up: Counter[str] = field(default_factory=Counter)
    nights: int = 0
    requests: int = 0
    dead: int = 0  # messages that went to the dead letters

    def __post_init__(self) -> None:
        self._strikes, self._jumps = cycle(STRIKES), cycle(JUMPS)
        self._workers: list[Member] = []
        self._steady: list[Member] = []
        self._count = 0
        self._at_end = False

    def missing(self) -> dict[tuple[str, str], int]:
        """Which of `LEAST` has not come yet, and how often."""
        left_out = set() if self.proxy else NEEDS_STORE
        left_out |= set() if self.disk.small else {"full disk"}
        left_out |= set() if self.clocks else {"clock"}
        return {
            what: n - self.hits[what] for what, n in LEAST.items() if self.hits[what] < n and what[0] not in left_out
        }

    def run(self, seconds: float) -> None:
        with ExitStack() as stack:
            stack.callback(self._end)
            self._land()
            writer = self._start("append", steady=True)
            wait_until(writer.process.answered, "the first batch")  # it first proves that the server is fit, for long
            if self.proxy:
                self.proxy.rules = RULES
            begun = clock.elapsed()
            strike_at = sample_at = begun + STRIKE_SECONDS
            episodes = self._episodes(begun, seconds)
            while True:
                now = clock.elapsed()
                over = now - begun > seconds and not self.missing()
                for episode in episodes:
                    episode.tick(now, over=over)
                for _ in range(0 if self.disk.is_full else WORKERS - len(self._workers)):
                    self._workers.append(self._start("work", steady=len(self._steady) <= STEADY))
                for member in [writer, *self._workers]:
                    self._tend(member, now)
                if now >= strike_at and not over:
                    strike_at += STRIKE_SECONDS
                    self._strike()
                if now >= sample_at:
                    sample_at += SAMPLE_SECONDS
                    self._sample()
                if not self.disk.is_full and self._go_on(writer, over=over):
                    return
                assert now - begun < 2 * seconds + 5 * PATIENCE_SECONDS, (
                    f"the run does not end: {self.missing()}, {self.hits}"
                )
                clock.sleep(0.02)

    def _episodes(self, begun: float, seconds: float) -> list[Episode]:
        """Each comes twice in two minutes. Outages last for minutes in a run of an hour."""
        outage = Episode(self._outage, max(50.0, seconds / 6), min(150.0, max(10.0, seconds / 12)), begun + 20)
        full = Episode(self._full_disk, 40.0, 4.0, begun + 10)
        jump = Episode(self._jump, 12.0, 9.0, begun + 5)
        return [outage] * bool(self.proxy) + [full] * self.disk.small + [jump] * bool(self.clocks)

    def _start(self, step: str, *, steady: bool) -> Member:
        self._count += 1
        name = f"{step} {self._count}"
        folder, clock_file = self.disk.folder / f"tmp-{self._count}", Path(self.clocks or "") / f"clock-{self._count}"
        folder.mkdir()
        env = {**self.env, "TMPDIR": str(folder), "FAKETIME_TIMESTAMP_FILE": str(clock_file)}
        member = Member(LakeProcess(self.lake, env=env), name, folder, clock_file, steady)
        self._steady += [member] * steady
        if self.clocks:
            member.set_clock(0)
        member.begin(step)
        return member

    def _end(self) -> None:
        if self.proxy:
            self.proxy.rules = ()
        for member in {*self._steady, *self._workers}:
            member.process.__exit__()

    # -- faults

    @contextmanager
    def _outage(self) -> Iterator[None]:
        assert self.proxy is not None
        self.proxy.rules = (*RULES, OUTAGE)
        yield
        self.proxy.rules = RULES

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        self.hits["full disk", ""] += 1
        with self.disk.full():
            yield

    @contextmanager
    def _jump(self) -> Iterator[None]:
        seconds = next(self._jumps)
        # A store refuses a clock that is hours off, and then a long step of the one writer never ends. A worker that gave up may
        # have hidden messages for hours. Their queue frees these once its process ends.
        writer = [] if self.proxy and abs(seconds) > REFUSED_SECONDS else self._steady[:1]
        workers = [m for m in self._workers if not m.steady or abs(seconds) <= REFUSED_SECONDS]
        member = self.chance.choice([*writer, *workers])
        member.set_clock(seconds)
        self.hits["clock", f"{seconds:+} s"] += 1
        yield
        member.set_clock(0)

    def _strike(self) -> None:
        name, strike = next(self._strikes)
        free = [m for m in self._workers if m.aim is None and m.again_at is None]
        free = [m for m in free if strike.act == "stop" or not m.steady]
        if free:  # or all will die or stop at a call that comes with the next messages
            victim = self.chance.choice(free)
            victim.aim = name, strike
            victim.process.strike(strike)

    # -- what they led to

    def _tend(self, member: Member, now: float) -> None:
        """Let a process continue that was stopped, begin again that gave up, or bury it."""
        if member.stopped_at is not None:
            if now >= member.stopped_at + STOP_SECONDS:
                os.kill(member.process.pid, SIGCONT)
                member.stopped_at = member.aim = None
        elif member.aim is not None and member.aim[1].act == "stop" and is_stopped(member.process.pid):
            self.hits["SIGSTOP", member.aim[0]] += 1
            member.stopped_at = now
        elif member.again_at is not None:
            if now >= member.again_at:
                member.begin(member.step)
        elif member in self._workers and member.process.answered():
            self._finish_step(member, now)

    def _finish_step(self, member: Member, now: float) -> bool:
        """Take the end of its step. False if it gave up, and will begin the step again as the error advises."""
        try:
            member.process.end()
        except Died as died:
            if member.aim is None or died.code != -SIGKILL:
                raise
            self.hits["SIGKILL", member.aim[0]] += 1
            self._replace(member)
        except (LakeupsertError, RuntimeError) as e:
            code = e.code if isinstance(e, LakeupsertError) else "disk-full" if "No space left" in str(e) else None
            if not (isinstance(e, TryAgainError) or code == "disk-full" or "RequestTimeTooSkewed" in str(e)):
                raise
            print(f"{member.name}: {member.step} gave up: {e}", file=sys.stderr)
            self.gave_up[f"{member.step}: {code}"] += 1
            if not member.steady:
                self._replace(member)
                return False
            member.again_at = now + RESTART_SECONDS
        return member.again_at is None

    def _replace(self, worker: Member) -> None:
        """Bury a worker, as a container would. Another one takes its place."""
        self._workers.remove(worker)
        worker.process.__exit__()
        shutil.rmtree(worker.folder, ignore_errors=True)

    def _go_on(self, writer: Member, *, over: bool) -> bool:
        """Begin the writer's next step when it is due. True at the end, when everything is merged and published."""
        if writer.again_at is not None or not writer.process.answered():
            return False
        queue = self.lake.table.objects.queue.stats()
        waiting = queue.visible + queue.leased
        if waiting > (0 if over else PARTITIONS / 2) or not self._finish_step(writer, clock.elapsed()):
            return False
        if self._at_end:
            return True
        if queue.dead and writer.step != "redrive":
            self.dead += queue.dead
            writer.begin("redrive")
        elif over or writer.step == "append":
            self._at_end = over
            writer.begin("publish")
        elif writer.step == "publish" and self.nights % VACUUM_EVERY == 0:
            writer.begin("vacuum")
        else:
            self._land()
            writer.begin("append")
        return False

    def _sample(self) -> None:
        for member in self._steady:
            member.samples.append(usage_of(member.process.pid, member.folder))
        if self.proxy is None:
            return
        events, self.proxy.log = self.proxy.log, []
        self.requests += len(events)
        for event in events:
            what = "create" if event.conditional else event.method
            self.hits.update((NAMES[act], what) for act in event.acts)
            if event.status is not None and event.status >= 500:
                self.hits["full disk", f"{event.status} to {what}"] += 1

    def usage(self) -> tuple[str, bool]:
        """What the processes that lived through the run held in its first and last third, and whether that is flat."""
        parts = {member.name: thirds(member.samples) for member in self._steady}
        text = "\n".join(f"  {name}: {first}; at the end {last}" for name, (first, last) in parts.items())
        return text, all(is_flat(*part) for part in parts.values())

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
    options.add_argument("--cloud", choices=[*CLOUDS, "local"], default="aws", help="default: %(default)s")
    options.add_argument("--minutes", type=float, default=4.0, help="of each run, at least")
    options.add_argument("--runs", type=int, default=1)
    options.add_argument("--seed", type=int, default=0, help="of the first run")
    given = options.parse_args(arguments)
    with ExitStack() as stack:
        clocks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clocks-")))  # the disk may be full
        may_fake = fake_clocks()
        disk = stack.enter_context(small_disk())
        settings: dict[str, object] = {"superseded_retention": "0s", "keep_snapshots": 1}
        env: Mapping[str, str] = {}
        cloud = proxy = None
        if given.cloud != "local":
            cloud = stack.enter_context(CLOUDS[given.cloud]())
            proxy = stack.enter_context(fault_proxy(cloud.store, seed=given.seed))
            os.environ.update(cloud.env)
            env, root = proxy.server.env, cloud.store.new_place("lake")
        for lacks, how in (
            (not disk.small, "mount a tmpfs"),
            (not may_fake, "load libfaketime (apt install faketime)"),
        ):
            if lacks:
                print(f"left out, as this user can't {how}: see the counts", file=sys.stderr)
        for number in range(given.runs):
            name = f"run-{number}"
            if cloud:
                settings |= {zone: f"{root}/{name}/{zone}" for zone in ("landing", "processed")}
                settings["queue"] = cloud.queue(name)
            lake = Lake(disk.folder / name, **settings)
            begun = clock.elapsed()
            chaos = Chaos(lake, env, proxy, disk, clocks if may_fake else None, random.Random(given.seed + number))
            chaos.run(given.minutes * 60)
            seconds = clock.elapsed() - begun
            lake.reopen()
            assert lake.table.status().dirty == 0, "the workers left something"
            lake.finish_and_check()
            usage, flat = chaos.usage()
            print(
                f"run {number + 1}, {given.cloud}, seed {given.seed + number}: {seconds:.0f} s, {chaos.nights} nights of "
                f"{PARTITIONS} partitions, {chaos.requests} requests, {len(lake.rows())} rows in the last of "
                f"{len(lake.table.snapshots())} snapshots: exact and balanced\n{_text(chaos.hits)}\n"
                f"  gave up: {dict(chaos.gave_up)}; dead letters that were sent again: {chaos.dead}\n{usage}",
                flush=True,
            )
            assert flat, "a process holds more than in the first third"
    return 0


def _text(hits: Counter[tuple[str, str]]) -> str:
    kinds: dict[str, list[str]] = {}
    for (kind, what), n in sorted(hits.items()):
        kinds.setdefault(kind, []).append(f"{what} {n}".strip())
    return "\n".join(f"  {kind}: {', '.join(found)}" for kind, found in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
