"""Which messages the queue lacks, by what ledger and manifests say is still to merge.

Reads     the ledger's entries and the heads of partitions
Writes    messages
Repeat    safe: a message too many is acked by whoever receives it
"""

from collections.abc import Callable, Iterable

import msgspec

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import Message


def send_missing(
    table: OpenTable,
    selected: Callable[[str], bool] = lambda partition: True,
    *,
    queued: int = 0,
    dead: frozenset[str] = frozenset(),
) -> int:
    """Send a message for every selected partition where the ledger is ahead of the manifest; how many were sent.

    Of those that are not ``dead`` none is sent where there are no more of them than ``queued`` messages on their way, which
    are then taken for theirs. It reads the heads of the partitions that are not published up to the ledger's head, and no
    others.
    """
    snapshot = table.last_snapshot()
    head = table.ledger_head()
    if head is None:
        return 0
    wanted = {
        p: b for p, b in table.unpublished(snapshot.body if snapshot else None, head.number).items() if selected(p)
    }
    heads = table.heads(wanted)
    behind = {p: batch for p, batch in wanted.items() if p not in heads or heads[p].body.merged < batch}
    if len(behind.keys() - dead) <= queued:
        behind = {p: batch for p, batch in behind.items() if p in dead}
    # Also where there is none: a queue that can't be used is found out before anything is appended.
    table.queue.send([Message(table.name, p, batch) for p, batch in behind.items()])
    return len(behind)


def messages_left(table: OpenTable, spare: Iterable[Message]) -> list[Message]:
    """Messages for all that is left to do in the partitions of units, but where it failed."""
    heads = table.heads({message.partition for message in spare})
    ledger = table.ledger_head()
    found: dict[Message, None] = {}
    for message in spare:
        head = heads.get(message.partition)
        if head is not None and head.body.failed is not None:
            continue
        if message.work is not None and (head is None or head.body.reprocessed != message.work):
            found[msgspec.structs.replace(message, unit=None)] = None
        since = table.entries(head.body.merged if head else 0, ledger.number) if ledger else []
        pending = [link.number for link in since if message.partition in link.body.touched]
        if pending:
            found[Message(table.name, message.partition, pending[-1])] = None
    return list(found)
