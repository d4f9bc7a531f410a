"""A `Lake` in other processes: they work on it concurrently, really die at a call (SIGKILL), or are held at a call.

    with LakeProcess(lake) as first, LakeProcess(lake) as second:
        first.begin("append", strike=Strike("create _lakeupsert/ledger", act="hold"))
        first.wait_held()
        assert second.do("append") is not None
        first.go()
        assert first.end() is None

A server process that has imported everything and runs none of our threads forks them (multiprocessing's `forkserver`), so each
starts within milliseconds and shares nothing with the test. ``spawn`` starts a new interpreter instead.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, SupportsIndex

from lakeupsert import clock
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import LakeupsertError
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from tests.harness.faults import Fault, Points
from tests.harness.lake import Lake

PATIENCE_SECONDS = 120.0
"""The longest wait for anything that must happen. It is generous because the machine may be busy."""

_server = get_context("forkserver")
_server.set_forkserver_preload([__name__, "pytest"])


class Died(Exception):
    """The process ended before it answered. ``code`` is the negative number of the signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Strike:
    """What happens before or after call ``number`` (from 0) of those whose name begins with (one of) ``kind``."""

    kind: str | tuple[str, ...] = ""
    number: int = 0
    when: Literal["before", "after"] = "before"
    act: Literal["kill", "hold", "stop"] = "kill"  # stop: SIGSTOP, until somebody sends SIGCONT


class LakeProcess:
    """A process in its own session that runs the requested steps on a lake, one after the other.

    Steps are `append`, `dedupe`, `publish`, `redrive`, `run` and `vacuum` of `Table` with their options (default host: local),
    and those of `STEPS`. Leaving the block kills the process and everything it started.
    """

    def __init__(
        self, lake: Lake, start: Literal["forkserver", "spawn"] = "forkserver", env: Mapping[str, str] = {}
    ) -> None:
        self._pipe, theirs = _server.Pipe()
        context: Any = _server if start == "forkserver" else get_context(start)  # no common type has `Process`
        self._process = context.Process(target=_serve, args=(theirs, {**os.environ, **env}, lake.root, lake.given))
        self._process.start()
        theirs.close()
        self._expect("ready")

    def __enter__(self) -> "LakeProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._pipe.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def begin(self, step: str, /, *, strike: Strike | None = None, **options: Any) -> None:
        self._pipe.send((step, options, strike))

    def strike(self, strike: Strike) -> None:
        """Arm a strike while a step is running. Calls are counted from now on."""
        self._pipe.send(strike)

    def end(self) -> Any:
        """The value that the step returned. Raises what the step raised, or Died."""
        what, answer = self._receive()
        if what == "failed":
            raise answer
        assert what == "done", f"expected the end of the step, but it is {what} at {answer}"
        return answer

    def answered(self) -> bool:
        """Whether the step or the process has ended, so that `end` does not wait."""
        return bool(self._pipe.poll())

    def do(self, step: str, /, *, strike: Strike | None = None, **options: Any) -> Any:
        self.begin(step, strike=strike, **options)
        return self.end()

    def wait_held(self) -> str:
        """Wait until the process is held, and return the call at which it waits for `go`."""
        return str(self._expect("held"))

    def go(self) -> None:
        self._pipe.send("go")

    def kill(self, *, only_itself: bool = False) -> None:
        """Send SIGKILL to the process and everything it started, including Spark; or ``only_itself``."""
        if only_itself:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            end_session(self.pid)
        self._process.join(PATIENCE_SECONDS)

    def _expect(self, wanted: str) -> Any:
        what, answer = self._receive()
        if what == "failed":
            raise answer
        assert what == wanted, f"expected {wanted}, but it is {what}: {answer}"
        return answer

    def _receive(self) -> tuple[str, Any]:
        assert self._pipe.poll(PATIENCE_SECONDS), "the process does not answer"
        try:
            what, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(PATIENCE_SECONDS)
            raise Died(self._process.exitcode) from None
        return what, answer


def wait_until(
    reached: Callable[[], bool], what: str, pause: float = 0.002, patience: float = PATIENCE_SECONDS
) -> None:
    """Return as soon as ``reached`` returns true. ``what`` names it in the failure. To ask a queue takes processor time from who
    empties it, so ask with a longer ``pause``."""
    begun = clock.elapsed()
    while not reached():
        assert clock.elapsed() - begun < patience, f"this never happened: {what}"
        clock.sleep(pause)


def readers_here() -> set[int]:
    """The processes of `lakeupsert.pipeline.child` that this one has, by their numbers."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(one) for one in children.split() if b"answer_calls" in Path(f"/proc/{one}/cmdline").read_bytes()}


def processes_of_session(session: int) -> Iterator[tuple[int, int, str]]:
    """Pid, pid of the parent and command line of every running process of a session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended in the meantime
                state, parent, _, its_session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
                if int(its_session) == session and state not in (b"Z", b"X"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    yield int(folder.name), int(parent), line


def end_session(session: int) -> None:
    """Send SIGKILL to every process of a session until none is left."""

    def none_left() -> bool:
        found = list(processes_of_session(session))
        for pid, _, _ in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(none_left, f"the end of session {session}")


# ---------------------------------------------------------------- in the process


class _ActingPoints(Points):
    """Points whose strike is an act, not an error: the process dies or waits there."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        self._listening = threading.Lock()
        self._act: Callable[[str], None] = _die

    def __reduce__(self) -> tuple[type[Points], tuple[()]]:
        return Points, ()  # Spark's tasks count their own calls

    def prepare(self, strike: Strike | None) -> None:
        self.disarm()
        self._kind = "\0"  # or it would remember the names of all its calls
        if strike is not None:
            self._act = {"kill": _die, "stop": _stop, "hold": self._wait}[strike.act]
            self.arm(strike.number, Fault.BEFORE if strike.when == "before" else Fault.AFTER, strike.kind)

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        with self._listening:
            if self._pipe.poll():
                self.prepare(self._pipe.recv())
        with super().at(name, commit):
            yield

    def _strike_if(self, fails: Fault, kills: Fault, name: str, *, commit: bool) -> None:
        if self._fault is fails:
            self._act(name)

    def _wait(self, name: str) -> None:
        with self._listening:  # another thread would receive the message
            self._pipe.send(("held", name))
            assert self._pipe.recv() == "go"


def _die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(seconds: float | SupportsIndex) -> None:
    select.select((), (), (), float(seconds))


def _serve(pipe: Connection, environment: dict[str, str], root: Path, given: dict[str, Any]) -> None:
    os.setsid()
    faulthandler.enable()  # if a library crashes, prints where each thread was
    if "faketime" in os.environ.get("LD_PRELOAD", ""):  # its 0.9.10 fails sleeps of the monotonic clock
        time.sleep = _sleep
    os.environ.update(environment)  # the server has the environment of the first test
    lake = Lake(root, **given)
    points = lake.points = _ActingPoints(pipe)
    lake.reopen()
    pipe.send(("ready", None))
    while True:
        try:
            step, options, strike = pipe.recv()
        except EOFError:
            return
        points.prepare(strike)
        try:
            answer = "done", STEPS[step](lake, **options)
        except Exception as e:
            answer = (
                "failed",
                e if isinstance(e, LakeupsertError) else RuntimeError(repr(e)),
            )  # other exceptions may not pickle
        pipe.send(answer)


def _of_table(name: str, lake: Lake, **options: Any) -> Any:
    defaults = {"host": "local"} if name in ("append", "run") else {}
    return getattr(lake.table, name)(**{**defaults, **options})


def _work(lake: Lake, lease_seconds: float) -> None:
    """A worker that waits for messages until it is killed."""
    drain(lake.opened, ArrowEngine(), WorkerOptions(until_empty=False), lease_seconds=lease_seconds)


def _repeat(lake: Lake, step: str, until: str, **options: Any) -> list[Any]:
    """Repeat a step until the file ``until`` exists in the lake's folder. Returns the result of each repetition."""
    answers = []
    while not (lake.root / until).exists():
        answers.append(STEPS[step](lake, **options))
    return answers


def _watch(lake: Lake, until: int) -> list[tuple[int, int, Any]]:
    """Read the published snapshot until it shows the batch ``until``. Returns snapshot, batch and rows of each change."""
    seen: list[tuple[int, int, Any]] = []
    while not seen or seen[-1][1] < until:
        view = lake.table.view()
        if view.number is not None:
            now = view.number, view.snapshot.batch, lake.rows(view.number)
            if not seen or now != seen[-1]:
                seen.append(now)
    return seen


STEPS: dict[str, Callable[..., Any]] = {
    **{name: partial(_of_table, name) for name in ("append", "dedupe", "publish", "redrive", "run", "vacuum")},
    "repeat": _repeat,
    "work": _work,
    "watch": _watch,
}
