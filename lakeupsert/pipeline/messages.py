"""Messages that the queue lacks: what is left to merge by ledger and manifests, which know it when a message is lost.

Reads     ledger entries and the heads of partitions
Writes    messages
Repeat    safe: whoever receives a message too many finds the partition merged, and acks it
"""

from collections.abc import Callable, Iterable

import msgspec

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.queue import Message


def send_missing(
    table: OpenTable,
    selected: Callable[[str], bool] = lambda partition: True,
    *,
    queued: int = 0,
    dead: frozenset[str] = frozenset(),
) -> int:
    """Send a message for every selected partition whose manifest is behind the ledger. Returns how many were sent.

    Only the heads of partitions that are not published up to the ledger's head are read.

    Args:
        queued: how many messages are on their way. If no more partitions than that are behind, the messages are taken for
            theirs and nothing is sent for them.
        dead: partitions whose messages are buried; for these a message is always sent.
    """
    snapshot = table.history.last_snapshot()
    head = table.history.ledger_head()
    if head is None:
        return 0
    due = unpublished(table.history, snapshot, head)
    wanted = {p: batch for p, batch in due.items() if selected(p)}
    heads = table.history.heads(wanted)
    behind = {p: batch for p, batch in wanted.items() if p not in heads or heads[p].body.merged < batch}
    if len(behind.keys() - dead) <= queued:
        behind = {p: batch for p, batch in behind.items() if p in dead}
    # Also if there is nothing to send: a queue that does not work is noticed before anything is appended.
    table.resources.queue.send([Message(table.name, p, batch) for p, batch in behind.items()])
    return len(behind)


def pending_messages(table: OpenTable, units: Iterable[Message]) -> list[Message]:
    """Messages for everything that is left to do in the partitions of these units, unless the partition is marked failed."""
    heads = table.history.heads({message.partition for message in units})
    ledger = table.history.ledger_head()
    found: dict[Message, None] = {}
    for message in units:
        head = heads.get(message.partition)
        if head is not None and head.body.failed is not None:
            continue
        if message.work is not None and (head is None or head.body.reprocessed != message.work):
            found[msgspec.structs.replace(message, unit=None)] = None
        since = table.history.entries(head.body.merged if head else 0, ledger.number) if ledger else []
        pending = [link.number for link in since if message.partition in link.body.touched]
        if pending:
            found[Message(table.name, message.partition, pending[-1])] = None
    return list(found)
