"""Worlds, and who acts in them.

A world has three published batches, so that there is something to restore, to compact and to expire; and files that wait.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from lakeupsert.pipeline import previews, strategy
from lakeupsert.pipeline.append import trial
from lakeupsert.pipeline.merge import units
from lakeupsert.rows import datafiles, vectors
from tests.harness.lake import row
from tests.simulate import actors
from tests.simulate.actors import Body
from tests.simulate.world import World


@dataclass(frozen=True)
class Scenario:
    """``actors`` by their names in schedules. ``settings`` of the table; ``constants`` of the product, by module."""

    actors: Mapping[str, Body]
    prepare: Callable[[World], None]
    settings: Mapping[str, Any] = field(default_factory=dict)


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
    """A batch waits to be merged, another one to be appended."""
    waiting(world)
    world.table.append(host="local")
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


def cleaned(world: World) -> None:
    several(world)
    world.scheduler.time.seconds += 9 * 86_400


KEPT = {"keep_snapshots": 1, "superseded_retention": "0s"}
NIGHT: dict[str, Body] = {"append": actors.append, "worker": actors.worker, "publish": actors.publish}
SCENARIOS = {
    "two first appends": Scenario({"one": actors.append, "two": actors.append}, empty),
    "two appends": Scenario({"one": actors.append, "two": actors.append}, waiting),
    "append, worker": Scenario({"append": actors.append, "worker": actors.worker}, appended),
    "two workers": Scenario({"worker": actors.worker, "worker2": actors.worker}, appended),
    "two publishers, worker": Scenario({"one": actors.publish, "two": actors.publish, "worker": actors.worker}, appended),
    "two nights, reader": Scenario({"one": actors.night, "two": actors.night, "reader": actors.reader}, waiting),
    "night by steps, latest": Scenario({**NIGHT, "worker2": actors.worker, "latest": actors.latest}, appended),
    "rewrite": Scenario({**NIGHT, "worker2": actors.worker, "reader": actors.reader}, appended, {"strategy": "rewrite"}),
    "two leaders": Scenario({"one": actors.leader, "two": actors.leader, "lander": actors.lander, "worker": actors.worker}, waiting),
    "leader, night": Scenario({"leader": actors.leader, "night": actors.night, "lander": actors.lander, "latest": actors.latest}, waiting),
    "compact": Scenario({**NIGHT, "compact": actors.compact, "reader": actors.reader}, several),
    "vacuum": Scenario({**NIGHT, "worker2": actors.worker, "vacuum": actors.vacuum}, cleaned, KEPT),
    "two vacuums, compact": Scenario({"night": actors.night, "one": actors.vacuum, "two": actors.vacuum, "compact": actors.compact}, cleaned, KEPT),
    "maintain, leader": Scenario({"leader": actors.leader, "maintain": actors.maintain, "worker": actors.worker, "lander": actors.lander}, cleaned, KEPT),
    "restore": Scenario({**NIGHT, "restore": actors.restore, "reader": actors.reader}, several),
    "two restores, again": Scenario({"one": actors.restore, "two": actors.restore, "night": actors.night, "again": lambda w, t: actors.append(w, t, again=True)}, several),
    "restore, vacuum": Scenario({"restore": actors.restore, "vacuum": actors.vacuum, "night": actors.night, "latest": actors.latest}, cleaned, KEPT),
    "reprocess": Scenario({**NIGHT, "reprocess": actors.reprocess, "compact": actors.compact}, several),
    "reprocess, restore": Scenario({"reprocess": actors.reprocess, "restore": actors.restore, "night": actors.night}, several),
    "statements": Scenario({"update": actors.update, "delete": actors.delete, "night": actors.night, "reader": actors.reader}, waiting),
}


@contextmanager
def constants() -> Iterator[None]:
    """Small tables get deltas, several buckets and objects of their own; nothing starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "SMALL_BYTES", 0)
        patch.setattr(vectors, "INLINE_BYTES", 0)
        patch.setattr(previews, "LEAST_PARTITIONS", 1)
        patch.setattr(trial, "ending_files", lambda *args: {})
        yield


@cache
def prepared(name: str) -> World:
    """The world of a scenario, before its actors move."""
    scenario = SCENARIOS[name]
    world = World(**{"strategy": "delta", **scenario.settings})
    with world.time():
        scenario.prepare(world)
    return world
