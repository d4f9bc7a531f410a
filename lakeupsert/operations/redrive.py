"""Return dead letters to the queue, once their cause is fixed.

Reads     the queue's dead letters, the ledger entries that they name, and the heads of their partitions
Writes    the queue: letters that are still to be merged become visible, those that were merged meanwhile are deleted
Repeat    safe: no letter is returned twice
"""

from collections.abc import Callable
from dataclasses import dataclass

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import DeadLetter, Message
from lakeupsert.table.manifest import Manifest


@dataclass(frozen=True)
class RedriveResult:
    """What became of the dead letters.

    Attributes:
        letters: all of them as they were before, including those that were not selected.
        redriven, dropped: how many returned to the queue, and how many were deleted because their partition is merged.
        left: how many are still dead letters: not selected, not readable, or of no batch of this table.
    """

    letters: tuple[DeadLetter, ...]
    redriven: int
    dropped: int
    left: int


def redrive(table: OpenTable, selected: Callable[[str], bool] = lambda partition: True) -> RedriveResult:
    """Return the dead letters of the selected partitions to the queue."""
    if table.history.head_spec() is None:  # nothing was ever appended, so there is no queue either
        return RedriveResult((), 0, 0, 0)
    total = RedriveResult((), 0, 0, 0)
    for queue in table.resources.queues:
        letters = queue.dead_letters()
        wanted = {
            x.message for x in letters if x.message and is_ours(table, x.message) and selected(x.message.partition)
        }
        heads = table.history.heads({message.partition for message in wanted})
        done = {x for x in wanted if x.partition in heads and _is_done(heads[x.partition].body, x)}
        redriven, dropped = queue.redrive(wanted - done, drop=done)
        total = RedriveResult(
            (*total.letters, *letters),
            total.redriven + redriven,
            total.dropped + dropped,
            total.left + sum(x.message not in wanted for x in letters),
        )
    return total


def _is_done(head: Manifest, message: Message) -> bool:
    return head.merged >= message.batch if message.work is None else head.reprocessed == message.work


def is_ours(table: OpenTable, message: Message) -> bool:
    """Whether a letter is about a batch of this table. A queue may outlive its table; such letters would only be buried again."""
    return message.table == table.name and table.history.entry(message.batch) is not None
