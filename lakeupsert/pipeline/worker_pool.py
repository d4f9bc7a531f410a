"""Several worker processes on one queue: each is `worker.drain`, and they share nothing but the store and the queue."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import connection, forkserver, get_context, parent_process
from typing import Any

from lakeupsert import clock
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline.dedupe import PartitionResult
from lakeupsert.pipeline.memory import limit_bytes
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.worker import drain

log = logging.getLogger(__name__)

FEW_MESSAGES = 16
"""Up to so many messages this process works alone: starting another costs more than it takes over."""
PROGRESS_SECONDS = 2.0
"""How often the queue is asked how many are left; a queue's server counts each question on its bill."""
PROCESS_BYTES = 150 << 20
"""What a worker process takes before it merges: Python, Arrow, boto3."""
MOST_DEATHS = 100
"""How many dead processes are replaced before the command gives up: more than a few partitions that kill their worker
make, fewer than a machine should bear on which no process can live."""


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
    """`worker.drain` with engine arrow in ``workers`` processes; one worker, or few messages, need no other process.

    They share the memory that this process may take.

    One that dies is replaced: its messages are free at once, and one that kills its workers comes to an end by its
    receives. What it had committed stands, but is not among the results.
    Raises TryAgainError after ``MOST_DEATHS``, or where one dies before it began.
    """
    # Only a main thread can be made to abandon a merge, and one that waits is told to end some day.
    alone = until_empty or threading.current_thread() is threading.main_thread()
    results: list[PartitionResult] = []
    begun = told = clock.elapsed()
    if alone and (workers <= 1 or (until_empty and table.queue.stats().visible <= FEW_MESSAGES)):
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
    memory = limit_bytes() // workers - PROCESS_BYTES
    # Forking this process would copy Arrow's and SQLite's locks in whatever state they are; the server only imports.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Ctrl-C reaches the whole process group; the server and its children inherit the mask, and end when we tell them to.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Not context.Event: setting that waits for ever where a process died that was waiting for it.
    listening, stop_all = context.Pipe(duplex=False)
    deaths = 0
    pending: dict[Future[tuple[list[PartitionResult], dict[str, int]]], Future[int]] = {}
    with ExitStack() as pools:

        def begin() -> None:
            left = None if max_seconds is None else max(0.0, max_seconds - (clock.elapsed() - begun))
            # A pool for each, as the death of one process ends the others of its pool.
            pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(listening, stop.grace_seconds, dict(os.environ))
            )
            pools.enter_context(pool)
            began = pool.submit(os.getpid)
            pending[pool.submit(_drain, table.name, table.settings, memory, until_empty, left)] = began

        try:
            for _ in range(workers):
                begin()
            while pending:
                alive()
                for future in wait(pending, timeout=0.5).done:
                    began = pending.pop(future)
                    try:
                        of_worker, requests = future.result()
                    except BrokenProcessPool as e:
                        if stop.is_set():
                            continue  # it did not finish soon enough, and gave up or was killed
                        deaths += 1
                        if began.exception() is not None or deaths > MOST_DEATHS:
                            raise _died(table, deaths) from e
                        log.warning("a worker process died (killed, or out of memory); beginning another one")
                        begin()
                        continue
                    results += of_worker
                    table.store.requests.add(requests)
                if stop.is_set():
                    stop_all.close()
                if progress is not None and clock.elapsed() - told >= PROGRESS_SECONDS:
                    told = clock.elapsed()
                    stats = table.queue.stats()
                    progress(stats.visible + stats.leased)
        finally:
            stop_all.close()
    return results


def _died(table: OpenTable, deaths: int) -> TryAgainError:
    if deaths > MOST_DEATHS:
        what = f"worker processes ended without a word (killed, or out of memory) more than {MOST_DEATHS} times"
    else:
        what = "a worker process ended before it began"
    return TryAgainError(
        "worker-died",
        f"Table {table.name!r}: {what}. What was committed stands, and all messages are free.",
        next="run the same command again, with fewer --workers if memory is short; in a script of your own begin below "
        '`if __name__ == "__main__":`, since every worker imports it',
    )


_stop = Stop(abandon=lambda: os._exit(1))


def _begin(listening: Any, grace_seconds: float, environment: dict[str, str]) -> None:
    # Where pandas is installed, pyarrow imports it to tell its types from numpy's: a third of a second in each worker.
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
    os.environ.update(environment)  # the server has that of the first call, perhaps with another profile or role
    _stop.grace_seconds = grace_seconds
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())  # a service manager sends it to every process of the service
    threading.Thread(target=_listen, args=(listening,), daemon=True).start()


def _listen(listening: Any) -> None:
    """Stop when the parent closes its end; end at once where it was killed, as nobody wants our results any more."""
    parent = parent_process()
    if parent is None or parent.sentinel not in connection.wait([listening, parent.sentinel]):
        _stop.set()
    if parent is not None:
        parent.join()
        os._exit(1)


def _drain(
    name: str, settings: TableSettings, memory: int, until_empty: bool, max_seconds: float | None
) -> tuple[list[PartitionResult], dict[str, int]]:
    table = OpenTable(name, settings)
    results = drain(table, ArrowEngine(memory), until_empty=until_empty, stop=_stop, max_seconds=max_seconds)
    return results, table.store.requests.as_dict()
