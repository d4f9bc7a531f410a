"""What actors do: each gives a command of the product in a process of its own, and notes what it was told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.operations.ingest import IngestOptions, Intake
from lakeupsert.operations.maintain import MaintainOptions, Upkeep
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.read.arrow import to_arrow
from tests.harness.lake import row
from tests.harness.model import Row
from tests.simulate.world import Read, World

Body = Callable[[World, Table], object]


class PausingStop(Stop):
    """Never set; whoever waits for it pauses."""

    def wait(self, timeout: float | None = None) -> bool:
        clock.sleep(timeout or 0.0)
        return False


def note(world: World, told: AppendResult | PartitionResult | PublishResult | None) -> None:
    """Note what the product says is committed."""
    if isinstance(told, AppendResult):
        world.acknowledged.append(("ledger", told.number, f'"batch_id":"{told.entry.batch_id}"'))
    elif isinstance(told, PartitionResult) and told.status == "merged":
        world.acknowledged.append((f"partitions/{told.partition}", told.version, f'"merged":{told.merged},'))
    elif isinstance(told, PublishResult) and told.snapshot is not None:
        world.acknowledged.append(("snapshots", told.snapshot, f'"batch":{told.batch},'))


@contextmanager
def refused(code: str) -> Iterator[None]:
    """The product may refuse this with an error of this code."""
    try:
        yield
    except (ConfigurationError, RefusedError) as e:
        if e.code != code:
            raise


def append(world: World, table: Table, *, again: bool = False) -> None:
    note(world, table.append(host="local", again=again))


def again(world: World, table: Table) -> None:
    """Takes what a restore has withdrawn."""
    append(world, table, again=True)


def worker(world: World, table: Table) -> None:
    for one in table.dedupe():
        note(world, one)


def publish(world: World, table: Table) -> None:
    note(world, table.publish())


def night(world: World, table: Table) -> None:
    done = table.run(host="local", stop=PausingStop())
    for one in (done.append, *done.dedupe, done.publish):
        note(world, one)


def reader(world: World, table: Table, snapshot: str = "published", times: int = 2) -> None:
    """Reads more than once, to see whether it is shown less later."""
    for _ in range(times):
        view = table.view(snapshot)
        rows = to_arrow(view).read_all().to_pylist()
        shown = view.number if snapshot == "published" else None
        world.reads.append(Read(world.scheduler.actor, view.snapshot.batch, shown, rows))


def latest(world: World, table: Table) -> None:
    reader(world, table, "latest", times=1)


def lander(world: World, table: Table) -> None:
    """Files arrive while others look."""
    for number, rows in enumerate(LANDED):
        world.land(f"9{number}.jsonl", rows)


LANDED: tuple[list[Row], ...] = ([row("a", 0, 4, 40)], [row("a", 0, 4, 41), row("b", 1, 0, 42)])


def leader(world: World, table: Table) -> None:
    """Rounds of `ingest`, and a pause between two in which it may lose its lease. Its merges are previews until it publishes."""

    def collect(told: AppendResult | PartitionResult | PublishResult) -> None:
        if not isinstance(told, PartitionResult):
            note(world, told)

    options = IngestOptions(collect=collect, stop=PausingStop(), warn=lambda text: None)
    intake = Intake(table._table, options)
    for _ in range(3):
        intake.once(PausingStop())
        clock.sleep(1.0)
    intake.end()


def compact(world: World, table: Table) -> None:
    for one in table.compact(full=True, stop=PausingStop()).dedupe:
        note(world, one)


def maintain(world: World, table: Table) -> None:
    Upkeep(table._table, MaintainOptions(stop=PausingStop(), warn=lambda text: None)).once(PausingStop())


def vacuum(world: World, table: Table) -> None:
    table.vacuum(dry=False)


def restore(world: World, table: Table) -> None:
    """Goes back to the snapshot that was there at first, and merges that."""
    with refused("expired-snapshot"):
        plan = table.restore(FIRST, dry=False)
        if plan.entry is not None:
            world.acknowledged.append(("ledger", plan.entry, '"kind":"restore"'))


FIRST = 0
"""The number of a world's first snapshot."""


def reprocess(world: World, table: Table, source: str = "landing") -> None:
    done = table.reprocess(source="landing" if source == "landing" else "stored", host="local", stop=PausingStop())
    for one in done.dedupe:
        note(world, one)


def update(world: World, table: Table) -> None:
    """Sets a column of all rows of a key; refused if a batch is not published yet that touches them."""
    world.statements["update"] = lambda one: {**one, "v": 99} if one["k"] == "a" else None
    with refused("unpublished-batch"):
        note(world, table.update({"v": "99"}, where="k = 'a'", batch_id="update", dry=False, stop=PausingStop()).append)


def delete(world: World, table: Table) -> None:
    world.statements["delete"] = lambda one: {**one, "op": "D"} if one["k"] == "b" else None
    with refused("unpublished-batch"):
        note(world, table.delete(where="k = 'b'", batch_id="delete", dry=False, stop=PausingStop()).append)
