"""Worlds, and who acts in them."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from lakeupsert.operations import reprocess
from lakeupsert.pipeline import previews, strategy
from lakeupsert.pipeline.append import trial
from lakeupsert.pipeline.merge import units
from lakeupsert.pipeline.workers import worker
from lakeupsert.rows import datafiles, vectors
from tests.harness.lake import row
from tests.simulate import actors
from tests.simulate.actors import Body
from tests.simulate.world import World


@dataclass(frozen=True)
class Scenario:
    """``actors`` by their names in schedules. ``settings`` of the table."""

    actors: Mapping[str, Body]
    prepare: Callable[[World], None]
    settings: Mapping[str, Any]


def empty(world: World) -> None:
    """Two files wait for a table that nobody has created yet."""
    world.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1)])
    world.land("2.jsonl", [row("a", 0, 1, 2)])


def waiting(world: World) -> None:
    """A published night; two files wait. They touch one partition that is there and one that is not, with a tie and a delete."""
    world.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1)])
    world.run()
    world.land("2.jsonl", [row("a", 0, 1, 2), row("b", 1, 2, 2)])
    world.land("3.jsonl", [row("b", 0, 0, 3), row("b", 1, 3, 3, op="D")])


def appended(world: World) -> None:
    """A batch waits to be merged, with each message twice, and another one to be appended."""
    waiting(world)
    world.table.append(host="local")
    world.table.send_missing()
    world.land("4.jsonl", [row("a", 0, 1, 4), row("c", 0, 1, 4)])


def several(world: World) -> None:
    """Three published nights with deltas; a batch waits to be merged, another one to be appended."""
    waiting(world)
    world.run()
    world.land("5.jsonl", [row("c", 0, 3, 5), row("a", 0, 5, 5, op="D")])
    world.run()
    world.land("6.jsonl", [row("a", 0, 4, 6), row("b", 1, 4, 6)])
    world.table.append(host="local")
    world.land("7.jsonl", [row("a", 0, 4, 7)])


def moving(world: World) -> None:
    """As `waiting`, and the key of a row moves to another partition twice."""
    waiting(world)
    world.land("4.jsonl", [row("a", 1, 4, 5), row("c", 0, 4, 5)])
    world.table.append(host="local")
    world.land("5.jsonl", [row("a", 0, 6, 6), row("c", 1, 2, 6)])


def cleaned(world: World) -> None:
    several(world)
    world.scheduler.time.seconds += 9 * 86_400


KEPT = {"keep_snapshots": 1, "superseded_retention": "0s"}
TWO_WORKERS: dict[str, Body] = {"worker": actors.worker, "worker2": actors.worker}
NIGHT: tuple[Body, ...] = (actors.append, actors.worker, actors.publish)


def _of(prepare: Callable[[World], None], settings: Mapping[str, Any], *named: Body, **others: Body) -> Scenario:
    """Actors by the names of their commands, and others."""
    return Scenario({**{body.__name__: body for body in named}, **others}, prepare, settings)


SCENARIOS = {
    "two first appends": _of(empty, {}, one=actors.append, two=actors.append),
    "two appends": _of(waiting, {}, one=actors.append, two=actors.append),
    "append, worker": _of(appended, {}, actors.append, actors.worker),
    "two workers": _of(appended, {}, **TWO_WORKERS),
    "two publishers, worker": _of(appended, {}, actors.worker, one=actors.publish, two=actors.publish),
    "two nights, reader": _of(waiting, {}, actors.reader, one=actors.night, two=actors.night),
    "night by steps, latest": _of(appended, {}, *NIGHT, actors.latest, worker2=actors.worker),
    "rewrite": _of(appended, {"strategy": "rewrite"}, *NIGHT, actors.reader, worker2=actors.worker),
    "two leaders": _of(waiting, {}, actors.lander, actors.worker, one=actors.leader, two=actors.leader),
    "leader, night": _of(waiting, {}, actors.leader, actors.night, actors.lander, actors.latest),
    "compact": _of(several, {}, *NIGHT, actors.compact, actors.reader),
    "append, vacuum": _of(cleaned, KEPT, actors.append, actors.vacuum),
    "worker, vacuum": _of(cleaned, KEPT, actors.worker, actors.vacuum),
    "night, vacuum": _of(cleaned, KEPT, *NIGHT, actors.vacuum, worker2=actors.worker),
    "two vacuums, compact": _of(cleaned, KEPT, actors.night, actors.compact, one=actors.vacuum, two=actors.vacuum),
    "maintain, leader": _of(cleaned, KEPT, actors.leader, actors.maintain, actors.worker, actors.lander),
    "restore": _of(several, {}, *NIGHT, actors.restore, actors.reader),
    "two restores, again": _of(several, {}, actors.night, actors.again, one=actors.restore, two=actors.restore),
    "restore, vacuum": _of(cleaned, KEPT, actors.restore, actors.vacuum, actors.night, actors.latest),
    "reprocess": _of(several, {}, *NIGHT, actors.reprocess, actors.compact),
    "reprocess, restore": _of(several, {}, actors.reprocess, actors.restore, actors.night),
    "keys of the table": _of(moving, {"key_scope": "table"}, actors.night, actors.reader, actors.append, actors.worker),
    "units": _of(several, {"bucket": "2500B"}, *NIGHT, actors.compact, worker2=actors.worker),
    "statements": _of(waiting, {}, actors.update, actors.delete, actors.night, actors.reader),
}


class SerialPool:
    """Does what it is given at once, in the thread of its caller."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> "SerialPool":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        done = Future[Any]()
        done.set_result(call(*given))
        return done


@contextmanager
def constants() -> Iterator[None]:
    """Small tables get deltas, buckets, units and previews. No file is tried in a process, and no other thread works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "SMALL_BYTES", 0)
        patch.setattr(vectors, "INLINE_BYTES", 0)
        patch.setattr(datafiles, "BARE_BYTES", 0)
        patch.setattr(datafiles, "COLUMN_BYTES", 0)
        patch.setattr(units, "ALONE_BUCKETS", 0)
        patch.setattr(previews, "LEAST_PARTITIONS", 1)
        patch.setattr(trial, "ending_files", lambda *args: {})
        patch.setattr(reprocess, "ThreadPoolExecutor", SerialPool)
        patch.setattr(worker, "TICK_SECONDS", 1e6)
        yield


@cache
def prepared(name: str) -> World:
    """The world of a scenario, before its actors move."""
    scenario = SCENARIOS[name]
    world = World(**{"strategy": "delta", **scenario.settings})
    with world.time():
        scenario.prepare(world)
    return world
