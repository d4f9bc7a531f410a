"""Work queues; `open_queue` finds the backend of an address."""

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
    # the address itself stays out of the message: accounts and keys get pasted into addresses
    raise ConfigurationError(
        "unknown-queue",
        f"This {parts.scheme}:// address names no queue that this version of lakeupsert can use. Expected sqs://QUEUE or "
        "sqs://ACCOUNT/QUEUE (a standard queue, not .fifo, by its name; AWS_DEFAULT_REGION says where), azqueue://ACCOUNT/QUEUE "
        "(small letters, digits, single hyphens), or sqlite:///absolute/path or a plain path. No queue was opened.",
        next="correct `queue`",
    )
