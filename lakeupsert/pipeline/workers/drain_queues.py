"""Phase two for a whole call: which queues are drained, by which engine, in how many processes.

Reads     the queues of the table; the chains, as `pipeline.merge.dedupe` does
Writes    what `pipeline.merge.dedupe` and `pipeline.publish` write
Repeat    safe
"""

import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lakeupsert import clock
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.by_name import EngineName, HostName, arrow_on_spark, spark_engine
from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.audit import AuditError
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import publish
from lakeupsert.pipeline.standing import is_through
from lakeupsert.pipeline.stop import Stop, WorkerOptions
from lakeupsert.pipeline.workers.pool import PROCESS_BYTES, drain_in_processes
from lakeupsert.pipeline.workers.worker import drain, drain_received
from lakeupsert.queue import AzureQueue, SqsQueue
from lakeupsert.retries import IDLE_SECONDS, LEASE_SECONDS, PUBLISH_SECONDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DrainOptions(WorkerOptions):
    """Who works on the queues.

    Attributes:
        host: where engine arrow runs: in ``workers`` processes of this machine, or in Spark tasks.
        workers: more than one means processes; a script that asks for them needs the usual `if __name__ == "__main__":`.
        calls_at_once: how many calls in this process share its memory, with this one.
        engine: None for the one of the settings.
        both_queues: if the table has a queue for large partitions, Spark drains it after the other one. Without it (or without
            ``until_empty``) engine spark drains only the queue of large partitions, and engine arrow only the other.
    """

    host: HostName = "local"
    workers: int = 1
    calls_at_once: int = 1
    engine: EngineName | None = None
    both_queues: bool = True


def drain_queues(table: OpenTable, options: DrainOptions) -> list[PartitionResult]:
    """Merge the partitions that the queues name. If the table does not exist yet, wait for it as for messages.

    Returns the results, or nothing if ``options.collect`` takes them.
    """
    begun, limit, stop = clock.elapsed(), options.max_seconds, options.stop or Stop()
    results: list[PartitionResult] = []
    while table.history.head_spec() is None:  # nothing was ever appended, so there is no queue yet either
        options.alive()
        if options.until_empty or (limit is not None and clock.elapsed() - begun >= limit) or stop.wait(IDLE_SECONDS):
            return results
    if limit is not None:
        options = replace(options, max_seconds=max(0.0, limit - (clock.elapsed() - begun)))
    both = options.until_empty and options.both_queues
    large = table.at_queue(table.resources.large_queue) if table.resources.large_queue is not None else None
    collect, statuses = options.collect or results.append, set[str]()

    def collect_with_status(result: PartitionResult) -> None:
        statuses.add(result.status)
        collect(result)

    options = replace(options, collect=collect_with_status)
    memory = limit_bytes() // options.calls_at_once
    if (options.engine or table.settings.engine) == "spark":
        drain(table if both or large is None else large, spark_engine(memory), options)
    elif options.host == "spark":
        drain(table, arrow_on_spark(memory), options)
    else:
        drain_in_processes(table, options.workers, options, memory=memory)
    # Spark takes seconds to start; a queue's server may count what was just sent a minute later.
    if both and large is not None and ("large" in statuses or large.resources.queue.stats().visible):
        drain(large, spark_engine(memory), options)
    return results


def merge_received(
    table: OpenTable,
    records: Sequence[Mapping[str, Any]],  # JSON of AWS or Azure
    *,
    workers: int,
    memory_bytes: int,
    seconds_left: Callable[[], float],
) -> list[Mapping[str, Any]]:
    """Merge the partitions of messages that a cloud function received, then publish; returns the records to give back.

    All other messages were acked, requeued or buried. Engine arrow runs in ``workers`` threads, which share ``memory_bytes``
    (or the limit of this process, if that is less), as long as ``seconds_left`` is above 0. It publishes if no partition is
    left to merge, there is time and no object is damaged; otherwise `reconcile` publishes.
    """
    queue = table.resources.queue
    assert isinstance(queue, SqsQueue | AzureQueue), f"nobody receives for {queue}"
    memory = min(memory_bytes, limit_bytes()) - PROCESS_BYTES
    with queue.leases_of(records) as leases:
        back = drain_received(
            table,
            lambda threads: ArrowEngine(memory // threads),
            list(leases),
            workers=workers,
            seconds_left=seconds_left,
            # The host of Azure's functions extends what it delivered; Lambda hides a message once, for as long as the queue says.
            lease_seconds=LEASE_SECONDS if isinstance(queue, SqsQueue) else None,
        )
    if seconds_left() >= PUBLISH_SECONDS:
        try:
            # Not the queue's counts: they lag, the last worker would still count itself, and nobody would publish.
            if is_through(table.history):
                publish(table)
        except (AuditError, DamagedTableError) as e:  # the merges are good all the same, and reconcile reports it
            log.warning("not published: %s", e)
    return [leases[lease] for lease in back]


def limit_bytes(root: Path = Path("/")) -> int:
    """The smallest of the machine's memory, the limits of its control groups (v2 and v1), and RLIMIT_AS. ``root`` has proc and
    sys."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_control_group_limits(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def _control_group_limits(root: Path) -> Iterator[int]:
    """The limits of this process's groups and their parents. "No limit" is a number near 2^63 in v1, and "max" in v2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        # In a container, the path may be the host's. Then the container's own group is at the top.
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            try:
                yield int((root / "sys/fs/cgroup" / folder / place / name).read_text())
            except (OSError, ValueError):
                continue
