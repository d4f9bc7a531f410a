"""Work queues. `open_queue` chooses the backend for an address."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lakeupsert.errors import ConfigurationError
from lakeupsert.queue import azure, sqs
from lakeupsert.queue.azure import AzureQueue
from lakeupsert.queue.base import DeadLetter, Lease, Message, MessageError, QueueStats, WorkQueue
from lakeupsert.queue.sqlite import SqliteQueue
from lakeupsert.queue.sqs import SqsQueue

__all__ = [
    "AzureQueue",
    "DeadLetter",
    "Lease",
    "Message",
    "MessageError",
    "QueueStats",
    "SqliteQueue",
    "SqsQueue",
    "WorkQueue",
    "open_queue",
]


def open_queue(address: str) -> WorkQueue:
    """The queue at ``address``: a path, ``sqlite:///absolute/path``, ``sqs://[ACCOUNT/]QUEUE`` or ``azqueue://ACCOUNT/QUEUE``."""
    if "://" not in address:
        return SqliteQueue(Path(address).expanduser())
    parts = urlsplit(address)
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.strip("/"):
        return SqliteQueue(unquote(parts.path))
    if named := sqs.ADDRESS.fullmatch(address):
        return SqsQueue(named["name"], named["account"])
    if named := azure.ADDRESS.fullmatch(address):
        return AzureQueue(named["account"], named["name"])
    # The message does not contain the address, because people paste accounts and keys into addresses.
    raise ConfigurationError(
        "unknown-queue",
        f"This {parts.scheme}:// address is not a queue that this version of lakeupsert supports. Expected sqs://QUEUE or "
        "sqs://ACCOUNT/QUEUE (the name of a standard queue, not .fifo, in AWS_DEFAULT_REGION), azqueue://ACCOUNT/QUEUE "
        "(lower-case letters, digits, single hyphens), sqlite:///absolute/path, or a plain path. No queue was opened.",
        next="correct `queue`",
    )
