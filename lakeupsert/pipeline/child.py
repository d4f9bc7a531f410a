"""A process that reads what others wrote, for this one: its crash, its hang and its lack of memory are errors here.

this process -- a function and its arguments --> child -- the result, or the error that it raised --> this process
"""

import math
import os
import resource
import select
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen
from typing import TypeVar, cast

from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline.workers.drain_queues import limit_bytes

Found = TypeVar("Found")
Item = TypeVar("Item")
MEMORY_SHARE = 0.5
"""A call may take so much of this machine's memory. More would end other processes."""


_OURS = {signal.SIGINT, signal.SIGTERM}
"""Ctrl-C, and the SIGTERM of a service's manager, reach a child, too. Its parent decides when it ends."""
START_SECONDS = 300.0
WAITS = 10
"""A call may take ten times as long as its processor time. Less: a busy machine, or one that was suspended, ends it."""


class EndedError(Exception):
    """The process was ended by what it read, or would have been. The text says how, in one sentence."""


class KilledError(EndedError):
    """Somebody else ended the process, or it waited too long. The same call in another process may succeed."""


class Child:
    """One process, for one call at a time. After an EndedError it has ended."""

    def __init__(self) -> None:
        self._answers, theirs = Pipe()
        memory = int(limit_bytes() * MEMORY_SHARE)
        # A copy of this process would have its locks and connections. One of multiprocessing would run the user's script again.
        code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import answer_calls; "
        code += f"answer_calls({theirs.fileno()}, {memory})"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            self._process = Popen([sys.executable, "-c", code], stdin=DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        weakref.finalize(self, self._process.kill)
        try:
            with self._ends_within(START_SECONDS):
                self._answers.recv()  # it has started, which takes long on a busy machine
        except (EOFError, OSError) as e:
            raise TryAgainError(
                "worker-died",
                f"The process that reads for this one ended before it began ({self._ending()}). Nothing was committed.",
                next="run the same command again",
            ) from e

    def call(
        self,
        seconds: float,
        function: Callable[..., Found],
        *args: object,
        alive: Callable[[], object] = lambda: None,
    ) -> Found:
        """Return what a picklable function returns there, or raise what it raises. ``alive``: called every second.

        Raises EndedError if the process ends, or if the call takes more than ``seconds`` of processor time or too much memory.
        """
        with self._ends_within(WAITS * seconds):
            try:
                self._answers.send((seconds, function, args))
                while not self._answers.poll(1.0):
                    alive()
                found = self._answers.recv()
            except (EOFError, OSError) as e:
                raise self._error(seconds) from e
        if isinstance(found, EndedError):
            self.end()
        if isinstance(found, Exception):
            raise found
        return cast(Found, found)

    @contextmanager
    def _ends_within(self, seconds: float) -> Iterator[None]:
        """Kill the process after these seconds, also if somebody has stopped it, so that it takes no call."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _error(self, seconds: float) -> EndedError:
        ending = self._ending()
        match -(self._process.returncode):
            case signal.SIGXCPU:
                return EndedError(f"It was not read to its end within {seconds:.0f} seconds of processor time.")
            case signal.SIGKILL | signal.SIGTERM | signal.SIGHUP:
                return KilledError(
                    f"Each process that reads it was ended by another one ({ending}), or waited too long."
                )
        return EndedError(f"A process that reads it ends ({ending}).")

    def _ending(self) -> str:
        code = self._process.wait()
        return (signal.strsignal(-code) or f"signal {-code}") if code < 0 else f"exit code {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()


class Children:
    """Processes that stay for later calls, from any thread. A call whose process somebody else ended is made once more.

    Pickled, it has no process.
    """

    def __init__(self) -> None:
        self._idle: list[Child] = []

    def __reduce__(self) -> tuple[type["Children"], tuple[()]]:
        return Children, ()

    def call(
        self,
        seconds: float,
        function: Callable[..., Found],
        *args: object,
        alive: Callable[[], object] = lambda: None,
    ) -> Found:
        """As `Child.call`. Raises KilledError if somebody else ended two processes."""

        def ask(child: Child) -> Found:
            try:
                found = child.call(seconds, function, *args, alive=alive)
            except EndedError:
                raise
            except Exception:  # the function's
                self._idle.append(child)
                raise
            self._idle.append(child)  # else its answer is still to come, and would be the next call's
            return found

        try:
            return ask(self._idle.pop() if self._idle else Child())
        except KilledError:
            return ask(Child())

    def by_halves(
        self,
        seconds: Callable[[Sequence[Item]], float],
        function: Callable[[Sequence[Item]], Found],
        items: Sequence[Item],
    ) -> Iterator[tuple[Sequence[Item], Found | EndedError]]:
        """Yield parts of ``items``, in their order, with what ``function`` makes of each.

        An item that ends the process is found by halves of halves, and is a part with its EndedError. ``seconds``: of a part.
        """
        try:
            found: Found | EndedError = self.call(seconds(items), function, items)
        except EndedError as e:
            if len(items) > 1:
                half = len(items) // 2
                yield from self.by_halves(seconds, function, items[:half])
                yield from self.by_halves(seconds, function, items[half:])
                return
            found = e
        yield items, found

    def close(self) -> None:
        for child in self._idle:
            child.end()


def answer_calls(pipe: int, memory: int) -> None:
    """Call functions until the other end of a pipe is closed. ``memory``: bytes that they may take."""
    answers = Connection(pipe)
    signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.send(None)
    with suppress(EOFError):
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a call that has begun is answered first
            seconds, function, args = answers.recv()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            _limit_processor_time(seconds)
            try:
                found = function(*args)
            except MemoryError:
                found = EndedError(f"It takes more than {memory / 1e9:.1f} GB of memory.")
            except Exception as e:
                e.add_note(f"In another process:\n{traceback.format_exc()}")
                found = e
            answers.send(found)


def _limit_processor_time(seconds: float) -> None:
    """Let the system end this process once it has used so much more. No limit is above the one that it was started with."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _end_with_parent(pipe: int) -> None:
    """A call that never ends would outlive a parent that was killed."""
    closed = select.poll()
    closed.register(pipe, 0)  # no event but that the other end is closed
    closed.poll()
    os._exit(1)


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
