"""What must hold after every schedule, wherever its actors were interrupted.

Reads     all that was ever created, what actors were told and what readers were shown; then the table, after one more night
Writes    that night

The dict of `tests.harness.model` says which rows the ledger makes. It shares no code with the product.
"""

import hashlib
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import msgspec

from lakeupsert.errors import TryAgainError
from lakeupsert.table.layout import HOME
from tests.simulate.world import World

_MEASURED = re.compile(rb'"seconds":[\d.]+|"digest":"[0-9a-f]{64}"')
LEASES_END = 600.0
"""After so many seconds, messages that dead workers had received come again."""
_CHAIN = re.compile(rf"{HOME}/(.*)/v(\d{{20}})\.json")


def check(world: World) -> None:
    """Raises AssertionError, or the product's error, if something is wrong with the world after a schedule."""
    for name, error in world.scheduler.errors.items():
        if not isinstance(error, TryAgainError):
            error.add_note(f"it ended {name}")
            raise error
    check_reads(world)
    finish(world)
    check_chains(world)
    world.check()
    for told in world.acknowledged:
        check_acknowledged(world, *told)
    found = world.table.fsck()
    assert not found.findings, f"fsck: {found.findings}"


def finish(world: World) -> None:
    """One more night, in a new process, takes and shows all that is left. No message is missing unless its sender died."""
    world.reopen()
    world.scheduler.time.seconds += LEASES_END
    table = world.table
    table.dedupe()
    missing = table.send_missing()
    ended = {*world.scheduler.killed, *world.scheduler.errors}
    sender_ended = any(not name.startswith("worker") for name in ended)
    assert sender_ended or not missing, f"{missing} messages are missing, and nobody died before sending one"
    table.append(host="local")
    failed = [one for one in table.dedupe() if one.status == "failed"]
    assert not failed, f"it can't be merged: {failed}"
    table.publish()
    entries = world.entries()
    last = max((n for n, e in entries if e.kind != "fence"), default=0)
    assert table.snapshots()[0].body.batch == last, "the last batch is not published"
    taken = {f.path for _, entry in entries for f in entry.files}
    assert taken == set(world.landed), "a landing file was not taken"


def check_chains(world: World) -> None:
    """A number is used once, a version follows the one before it, and neither `merged` nor a snapshot's batch falls."""
    chains: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, data in world.processed.created:
        if found := _CHAIN.fullmatch(name):
            chains[found[1]].append(msgspec.json.decode(data))
    for folder, versions in chains.items():
        if folder == "spec" or folder.partition("/")[0] in ("ledger", "partitions", "snapshots"):
            for place, version in enumerate(versions):
                before = versions[place - 1] if place else None
                assert version["number"] == place, f"{folder}: {version['number']} was created as the {place}th"
                assert version["parent"] == (before and before["write_id"]), (
                    f"{folder}: {place} follows another version"
                )
            for low, high in pairwise(versions):
                for field in ("merged", "batch"):
                    old, new = low["body"].get(field, 0), high["body"].get(field, 0)
                    assert old <= new, f"{folder}: {field} falls from {old} to {new} at {high['number']}"


def check_acknowledged(world: World, folder: str, number: int, part: str) -> None:
    versions = {n: data for n, data in world.processed.created if (m := _CHAIN.fullmatch(n)) and m[1] == folder}
    name = f"{HOME}/{folder}/v{10**20 - 1 - number:020d}.json"
    assert name in versions, f"{folder}: version {number} was acknowledged and never created"
    assert part.encode() in versions[name], (
        f"{folder}: version {number} was acknowledged with {part}, and has {versions[name]!r}"
    )


def check_reads(world: World) -> None:
    """Each reader saw whole batches and their rows, and never less than before."""
    entries = world.entries()
    shown: dict[str, int] = {}
    for read in world.reads:
        assert read.rows == world.expected(read.batch), f"{read.reader} read other rows of batch {read.batch}"
        assert shown.get(read.reader, -1) <= read.batch, f"{read.reader} saw an older batch than before"
        assert read.batch <= entries[-1][0]
        shown[read.reader] = read.batch


def state(world: World) -> bytes:
    """A hash of all that `check` looks at, less how long merges took. Equal states need one check."""
    seen = hashlib.sha256()
    for store in (world.processed, world.landing):
        for name, one in sorted(store.objects.items()):
            data = _MEASURED.sub(b"", one.data) if name.endswith(".json") else one.data
            seen.update(f"{name} {one.modified} ".encode() + data)
    told = (
        world.acknowledged,
        world.reads,
        world.messages.waiting,
        world.scheduler.errors,
        world.scheduler.time.seconds,
    )
    seen.update(repr(told).encode())
    return seen.digest()
