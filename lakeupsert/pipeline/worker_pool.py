"""Several worker processes on one queue. Each runs `worker.drain`; they share nothing but the store and the queue."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, parent_process
from types import TracebackType

from lakeupsert import clock
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline.dedupe import PartitionResult
from lakeupsert.pipeline.memory_limit import limit_bytes
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.worker import drain

log = logging.getLogger(__name__)

FEW_MESSAGES = 16
"""Up to so many messages, this process works alone: starting another one costs more than it takes over."""
PROGRESS_SECONDS = 2.0
"""How often the queue is asked how many messages are left. Queue services charge for each request."""
PROCESS_BYTES = 150 << 20
"""Memory of a worker process before it merges: Python, Arrow, boto3."""
MOST_DEATHS = 100
"""How many dead processes are replaced before the command gives up. That is more than a few partitions that kill their workers
cause, and fewer than a machine should suffer on which no process can live."""


def drain_in_processes(
    table: OpenTable,
    workers: int,
    *,
    until_empty: bool,
    stop: Stop,
    max_seconds: float | None = None,
    progress: Callable[[int], None] | None = None,
    alive: Callable[[], object] = lambda: None,
) -> list[PartitionResult]:
    """`worker.drain` with engine arrow in ``workers`` processes, which share the memory that this process may use.

    One worker, or few messages, need no other process. A process that dies is replaced. Its messages are free at once, and a
    message that kills its workers ends by the number of its receives. What the process had committed stands, but is not in the
    results.
    Raises TryAgainError after ``MOST_DEATHS``, or if a process dies before it starts to work.
    """
    begun = clock.elapsed()
    results: list[PartitionResult] = []
    # Only the main thread can be made to abandon a merge, and a worker that waits for messages must be able to stop.
    may_work_here = until_empty or threading.current_thread() is threading.main_thread()
    if may_work_here and (workers <= 1 or (until_empty and table.queue.stats().visible <= FEW_MESSAGES)):
        results += drain(
            table,
            ArrowEngine(limit_bytes() - PROCESS_BYTES),
            until_empty=until_empty,
            stop=stop,
            most_messages=None if workers <= 1 else FEW_MESSAGES,
            max_seconds=max_seconds,
            progress=progress,
            alive=alive,
        )
        if workers <= 1 or stop.is_set() or table.queue.stats().visible <= FEW_MESSAGES:
            return results
    deadline = None if max_seconds is None else begun + max_seconds
    reported = begun
    with _Processes(
        table, limit_bytes() // workers - PROCESS_BYTES, stop, deadline, until_empty=until_empty
    ) as processes:
        for _ in range(workers):
            processes.start()
        while processes.pending:
            alive()
            results += processes.collect()
            if stop.is_set():
                processes.stop()
            if progress is not None and clock.elapsed() - reported >= PROGRESS_SECONDS:
                reported = clock.elapsed()
                stats = table.queue.stats()
                progress(stats.visible + stats.leased)
    return results


@dataclass(frozen=True)
class _Answer:
    """What a worker process did, and how often it sent each kind of request to the store."""

    results: list[PartitionResult]
    requests: dict[str, int]


class _Processes:
    """The worker processes of one call; leaving the block stops them and waits for their end.

    Attributes:
        pending: the answers that are awaited. Each has its process's start, which fails if the process never lived.
    """

    def __init__(self, table: OpenTable, memory: int, stop: Stop, deadline: float | None, *, until_empty: bool) -> None:
        self._table, self._memory, self._stop = table, memory, stop
        self._deadline, self._until_empty = deadline, until_empty
        self._deaths = 0
        self.pending: dict[Future[_Answer], Future[int]] = {}
        # Forking this process would copy Arrow's and SQLite's locks in whatever state they are. The fork server only imports.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        # Ctrl-C reaches the whole process group. The server and its children inherit the mask; they stop when we tell them to.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Not context.Event: setting one waits for ever if a process died while it waited for the event.
        self._listening, self._stop_all = self._context.Pipe(duplex=False)
        self._pools = ExitStack()

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._pools.__exit__(kind, error, traceback)

    def start(self) -> None:
        """Start one process. It has a pool of its own, because the death of a process ends all others of its pool."""
        pool = ProcessPoolExecutor(
            1,
            mp_context=self._context,
            initializer=_begin,
            initargs=(self._listening, self._stop.grace_seconds, dict(os.environ)),
        )
        self._pools.enter_context(pool)
        started = pool.submit(os.getpid)
        left = None if self._deadline is None else max(0.0, self._deadline - clock.elapsed())
        table, answer = self._table, Future[_Answer]()
        try:
            answer = pool.submit(_drain, table.name, table.settings, self._memory, left, until_empty=self._until_empty)
        except BrokenProcessPool as e:  # the process is dead already
            answer.set_exception(e)
        self.pending[answer] = started

    def collect(self) -> list[PartitionResult]:
        """Wait a moment for answers and return their results. Processes that died are replaced."""
        results: list[PartitionResult] = []
        for future in wait(self.pending, timeout=0.5).done:
            started = self.pending.pop(future)
            try:
                answer = future.result()
            except BrokenProcessPool as e:
                if self._stop.is_set():
                    continue  # it did not finish soon enough, and gave up or was killed
                self._deaths += 1
                if started.exception() is not None or self._deaths > MOST_DEATHS:
                    raise _died(self._table, self._deaths) from e
                log.warning("a worker process died (killed, or out of memory); starting another one")
                self.start()
                continue
            results += answer.results
            self._table.store.requests.add(answer.requests)
        return results

    def stop(self) -> None:
        """Let every process take no new message."""
        self._stop_all.close()


def _died(table: OpenTable, deaths: int) -> TryAgainError:
    if deaths > MOST_DEATHS:
        what = f"more than {MOST_DEATHS} worker processes died (killed, or out of memory)"
    else:
        what = "a worker process ended before it began to work"
    return TryAgainError(
        "worker-died",
        f"Table {table.name!r}: {what}. What was committed stands, and all messages are back in the queue.",
        next="run the same command again, with fewer --workers if memory is short; in a script of your own, call it below "
        '`if __name__ == "__main__":`, because every worker imports the script',
    )


_stop = Stop(abandon=lambda: os._exit(1))


def _begin(listening: connection.Connection, grace_seconds: float, environment: dict[str, str]) -> None:
    # If pandas is installed, pyarrow imports it to tell its types from numpy's: a third of a second in each worker.
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
    os.environ.update(environment)  # the fork server has that of the first call, perhaps with another profile or role
    _stop.grace_seconds = grace_seconds
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())  # a service manager sends it to every process of the service
    threading.Thread(target=_listen, args=(listening,), daemon=True).start()


def _listen(listening: connection.Connection) -> None:
    """Stop when the parent closes its end. If the parent was killed, exit at once, because nobody waits for the results."""
    parent = parent_process()
    if parent is None or parent.sentinel not in connection.wait([listening, parent.sentinel]):
        _stop.set()
    if parent is not None:
        parent.join()
        os._exit(1)


def _drain(name: str, settings: TableSettings, memory: int, max_seconds: float | None, *, until_empty: bool) -> _Answer:
    table = OpenTable(name, settings)
    results = drain(table, ArrowEngine(memory), until_empty=until_empty, stop=_stop, max_seconds=max_seconds)
    return _Answer(results, table.store.requests.as_dict())
