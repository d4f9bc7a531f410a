"""Several worker processes on one queue. Each runs `worker.drain`; they share nothing but the store and the queue.

Each sends what happens to the process that started it: results, events and warnings. That one alone writes them, so lines of a
log are whole, and what a process had sent is kept when it dies.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from logging.handlers import QueueHandler
from multiprocessing import connection, forkserver, get_context, parent_process
from types import ModuleType, TracebackType

from lakeupsert import clock
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import TryAgainError
from lakeupsert.events import Event
from lakeupsert.phrases import BELOW_MAIN
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.pipeline.stop import Stop, WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.retries import PARENT_LOOK_SECONDS, PROGRESS_SECONDS
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import Manifest

log = logging.getLogger(__name__)
_End = tuple[dict[str, int], Mapping[str, Link[Manifest]]]

FEW_MESSAGES = 16
"""Up to so many messages, this process works alone: starting another one costs more than it takes over."""
PROCESS_BYTES = 150 << 20
"""Memory of a worker process before it merges: Python, Arrow, boto3."""
MOST_DEATHS = 100
"""How many dead processes are replaced before the command gives up. That is more than a few partitions that kill their workers
cause, and fewer than a machine should suffer on which no process can live."""


def drain_in_processes(table: OpenTable, workers: int, options: WorkerOptions, *, memory: int) -> None:
    """`worker.drain` with engine arrow in ``workers`` processes, which share so many bytes of ``memory``.

    One worker, or few messages, need no other process. A process that dies is replaced. Its messages are free at once, and a
    message that kills its workers ends by the number of its receives. What the process had committed stands; the result of its
    last call may be missing.
    Raises TryAgainError after ``MOST_DEATHS``, or if a process dies before it starts to work.
    """
    begun, until_empty, stop = clock.elapsed(), options.until_empty, options.stop or Stop()
    collect = options.collect or (lambda result: None)
    # Only the main thread can be made to abandon a merge, and a worker that waits for messages must be able to stop.
    may_work_here = until_empty or threading.current_thread() is threading.main_thread()
    if may_work_here and (workers <= 1 or (until_empty and table.resources.queue.stats().visible <= FEW_MESSAGES)):
        most_messages = None if workers <= 1 else FEW_MESSAGES
        drain(table, ArrowEngine(memory - PROCESS_BYTES), options, most_messages=most_messages)
        if workers <= 1 or stop.is_set() or table.resources.queue.stats().visible <= FEW_MESSAGES:
            return
    deadline = None if options.max_seconds is None else begun + options.max_seconds
    reported = begun
    with _Processes(table, memory // workers - PROCESS_BYTES, stop, deadline, until_empty=until_empty) as processes:
        for _ in range(workers):
            processes.start()
        while processes.pending:
            options.alive()
            processes.listen(collect)
            if stop.is_set():
                processes.stop()
            if options.progress is not None and clock.elapsed() - reported >= PROGRESS_SECONDS:
                reported = clock.elapsed()
                stats = table.resources.queue.stats()
                options.progress(stats.visible + stats.leased)


@dataclass(frozen=True)
class _Process:
    """A worker process. ``started`` fails if it never lived. At its end it answers how often it sent each kind of request to the
    store, and the heads that it knows."""

    started: Future[int]
    end: Future[_End]


class _Processes:
    """The worker processes of one call; leaving the block stops them and waits for their end.

    Attributes:
        pending: the processes that have not ended, by what each is heard through. It sends results, events and log records,
            and None when it has sent all.
    """

    def __init__(self, table: OpenTable, memory: int, stop: Stop, deadline: float | None, *, until_empty: bool) -> None:
        self._table, self._memory, self._stop = table, memory, stop
        self._deadline, self._until_empty = deadline, until_empty
        self._deaths = 0
        self.pending: dict[connection.Connection, _Process] = {}
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
        hearing, telling = self._context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(
            1,
            mp_context=self._context,
            initializer=_begin,
            initargs=(self._listening, telling, self._stop.grace_seconds, dict(os.environ)),
        )
        self._pools.enter_context(pool)
        self._pools.callback(hearing.close)  # before the pool waits for the process, which may wait to be heard
        started = pool.submit(os.getpid)
        telling.close()  # the process has its own by now: so the death of the process ends what is heard
        left = None if self._deadline is None else max(0.0, self._deadline - clock.elapsed())
        table, end = self._table, Future[_End]()
        try:
            end = pool.submit(_drain, table.name, table.settings, self._memory, left, until_empty=self._until_empty)
        except BrokenProcessPool as e:  # the process is dead already
            end.set_exception(e)
        self.pending[hearing] = _Process(started, end)

    def listen(self, collect: Callable[[PartitionResult], object]) -> None:
        """Wait a moment for what processes send, and pass it on. Processes that died are replaced."""
        for hearing in connection.wait(self.pending, PARENT_LOOK_SECONDS):
            assert isinstance(hearing, connection.Connection)
            try:
                told = hearing.recv()
            except (EOFError, OSError):  # the process died, perhaps while it sent
                told = None
            match told:
                case PartitionResult():
                    collect(told)
                case Event():
                    self._table.resources.emit(told)
                case logging.LogRecord():
                    logging.getLogger(told.name).handle(told)
                case None:
                    hearing.close()
                    self._end(self.pending.pop(hearing))

    def _end(self, process: _Process) -> None:
        try:
            requests, heads = process.end.result()
            self._table.resources.store.requests.add(requests)
            self._table.history.keep_heads(heads)  # for `publish`
        except BrokenProcessPool as e:
            if self._stop.is_set():
                return  # it did not finish soon enough, and gave up or was killed
            self._deaths += 1
            if process.started.exception() is not None or self._deaths > MOST_DEATHS:
                raise _died(self._table.name, self._deaths) from e
            log.warning("a worker process died (killed, or out of memory); starting another one")
            self.start()

    def stop(self) -> None:
        """Let every process take no new message."""
        self._stop_all.close()


def _died(name: str, deaths: int) -> TryAgainError:
    many = f"more than {MOST_DEATHS} worker processes died (killed, or out of memory)"
    what = many if deaths > MOST_DEATHS else "a worker process ended before it began to work"
    return TryAgainError(
        "worker-died",
        f"Table {name!r}: {what}. Committed work is kept, and all messages are back in the queue.",
        next=f"run the same command again, with fewer --workers if memory is short; {BELOW_MAIN}",
    )


_stop = Stop(abandon=lambda: os._exit(1))


class _Parent(QueueHandler):
    """Sends to the parent of this worker process, from any of its threads. Also handles log records."""

    def __init__(self, telling: connection.Connection) -> None:
        super().__init__(telling)  # type: ignore[arg-type]  # `enqueue` alone uses it
        self.setLevel(logging.WARNING)
        self._telling, self._sending = telling, threading.Lock()

    def enqueue(self, record: logging.LogRecord) -> None:
        self.send(record)

    def send(self, told: PartitionResult | Event | logging.LogRecord | None) -> None:
        # Only a parent that gave up does not listen. Then this process ends soon (`_listen`).
        with self._sending, suppress(OSError):
            self._telling.send(told)


_parent: _Parent
"""In a worker process, once it has begun."""


def _begin(
    listening: connection.Connection,
    telling: connection.Connection,
    grace_seconds: float,
    environment: dict[str, str],
) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    os.environ.update(environment)  # the fork server has that of the first call, perhaps with another profile or role
    global _parent
    _stop.grace_seconds = grace_seconds
    _parent = _Parent(telling)
    logging.getLogger().addHandler(_parent)
    signal.signal(signal.SIGTERM, lambda *_: _stop.set_from_signal())  # a service manager sends it to each process
    threading.Thread(target=_listen, args=(listening,), daemon=True).start()


class _WithoutPandas(MetaPathFinder):
    """If pandas is installed, pyarrow imports it to tell its types from numpy's: a third of a second in each worker.

    (None in `sys.modules` does not do: pyarrow's compiled modules take that for pandas, and the first merge failed.)
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("a worker process has no use for pandas", name=name)


def _listen(listening: connection.Connection) -> None:
    """Stop when the parent closes its end. If the parent was killed, exit at once, because nobody waits for the results."""
    parent = parent_process()
    if parent is None or parent.sentinel not in connection.wait([listening, parent.sentinel]):
        _stop.set()
    if parent is not None:
        parent.join()
        os._exit(1)


def _drain(name: str, settings: TableSettings, memory: int, max_seconds: float | None, *, until_empty: bool) -> _End:
    table = OpenTable(name, settings, resources=Resources(name, settings, [_parent.send]))
    try:
        options = WorkerOptions(until_empty=until_empty, max_seconds=max_seconds, stop=_stop, collect=_parent.send)
        drain(table, ArrowEngine(memory), options)
    finally:
        _parent.send(None)
    return table.resources.store.requests.as_dict(), table.history.kept_heads
