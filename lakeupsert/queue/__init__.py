"""Work queues; `open_queue` finds the backend of an address."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lakeupsert.errors import ConfigurationError
from lakeupsert.queue.base import DeadLetter, Lease, Message, MessageError, QueueStats, WorkQueue
from lakeupsert.queue.sqlite import SqliteQueue

__all__ = [
    "DeadLetter",
    "Lease",
    "Message",
    "MessageError",
    "QueueStats",
    "SqliteQueue",
    "WorkQueue",
    "open_queue",
]


def open_queue(address: str) -> WorkQueue:
    """The queue at ``address``: a path or ``sqlite:///absolute/path`` (sqs:// and azqueue:// come later)."""
    if "://" not in address:
        return SqliteQueue(Path(address).expanduser())
    parts = urlsplit(address)
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.strip("/"):
        return SqliteQueue(unquote(parts.path))
    # the address itself stays out of the message: accounts and keys get pasted into addresses
    raise ConfigurationError(
        "unknown-queue",
        f"No backend for this {parts.scheme}:// queue: this version of lakeupsert takes sqlite:///absolute/path or a "
        "plain path. No queue was opened.",
        next="name a local file in `queue`",
    )
