"""Landing files that end the process which reads them: after such an end, each is first read in another process.

Reads     the chain of signs; landing files
Writes    two signs around the reading of a batch: one that it begins, one that it has ended
Repeat    safe: a sign that is missing costs time only

    newest sign -- ended --> sign: begins --------> read all -- done, or an error of ours --> sign: ended
         '-- begins --> sign: begins, try each file --^    '---- the process ends ----> the sign stays

A library may abort on a damaged file, take all memory, or never end. No `except` helps then. Roles that append may not delete
anything, so a sign is never taken back.
"""

import resource
import signal
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.config import Reading
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.hosts import Host
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.landing.content import open_landed
from lakeupsert.landing.files import Reader, survey
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.phrases import BELOW_MAIN, count
from lakeupsert.pipeline.append.discover import AppendOptions, Ground
from lakeupsert.pipeline.leadership import this_process
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.workers.drain_queues import limit_bytes
from lakeupsert.storage import ObjectReader
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.lease import Lease

_NOT_TOLD = ("spark-failed", "task-died", "worker-died")
"""Codes of errors after which nobody knows whether a file has ended a process."""

LEAST_SECONDS = 60.0
"""A file may take so long, and `BYTES_A_SECOND` more. Less: a busy machine sets good files aside."""
BYTES_A_SECOND = 1_000_000
MEMORY_SHARE = 0.5
"""A file may take so much of this machine's memory. More would end other processes."""


class Trial:
    """The question whether a landing file ended the process that read it last."""

    def __init__(self, table: OpenTable, options: AppendOptions) -> None:
        self._table, self._options = table, options
        self._signs: Chain[Lease] = table.history.objects.reading
        self._begun: Link[Lease] | None = None
        self.files: int | None = None
        """How many files were tried; None: nobody has asked whether to."""

    @contextmanager
    def attempts(self) -> Iterator[None]:
        """Around all attempts of a batch: an error that they raise is not the end of a process."""
        try:
            yield
        except LakeupsertError as e:
            if e.code not in _NOT_TOLD:
                self._end()
            raise
        self._end()

    def set_aside(self, ground: Ground, host: Host) -> dict[tuple[str, str], str]:
        """The reasons why files end a process that reads them, by path and etag. It asks once."""
        if self.files is not None:
            return {}
        self.files = 0
        if not self._must_try(ground):
            return {}
        self.files, options = len(ground.inputs), self._options
        alive = partial(options.progress, f"reading {count(self.files, 'landing file')} in another process first")
        alive()
        return ending_files(host, self._table.resources.landing, ground.inputs, self._table.history.reading, alive)

    @property
    def warnings(self) -> list[str]:
        if not self.files:
            return []
        return [
            "the last process that read landing files did not end as it should, so "
            f"{count(self.files, 'file')} of this batch had to pass in another process first"
        ]

    def _must_try(self, ground: Ground) -> bool:
        if self._table.history.objects.held.leads:
            return self._options.careful  # its lease is the sign
        # A stream has written its files itself. Before the first batch nothing is written until the settings are known to fit.
        if self._options.folder or ground.spec is None:
            return False
        head = self._signs.head()
        self._begun = self._signs.append(Lease(holder=this_process()), head).link
        return head is not None and not head.body.released

    def _end(self) -> None:
        if self._begun is not None:
            with suppress(TryAgainError):  # a store that does not answer
                self._signs.append(Lease(holder=this_process(), released=True), self._begun)


def ending_files(
    host: Host, landing: ObjectReader, inputs: Sequence[LandingInput], reading: Reading, alive: Callable[[], object]
) -> dict[tuple[str, str], str]:
    """As `Trial.set_aside`. An error that a file raises does not count. ``alive``: called every second if this process waits."""
    if host.in_process:
        found: Mapping[str, str] = _try_all(landing, reading, inputs, alive)
    else:
        sizes = [float(file.size) for file in inputs]
        tried = host.map(partial(_try_all, landing, reading), [(file,) for file in inputs], sizes)
        found = ChainMap(*all_or_raise(tried))
    return {(file.path, file.etag): found[file.path] for file in inputs if file.path in found}


def _try_all(
    landing: ObjectReader,
    reading: Reading,
    inputs: Iterable[LandingInput],
    alive: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    found: dict[str, str] = {}
    child: _Child | None = None
    try:
        for file in inputs:
            child = child or _Child(landing, reading)
            if reason := child.read(file, alive):
                found[file.path] = reason
                child.end()
                child = None
    finally:
        if child:
            child.end()
    return found


class _Child:
    """A process that reads files for this one."""

    def __init__(self, landing: ObjectReader, reading: Reading) -> None:
        context = get_context("spawn")  # a copy of this process would have its locks and connections
        self._answers, theirs = context.Pipe()
        memory = int(limit_bytes() * MEMORY_SHARE)
        self._process = context.Process(target=_read_all, args=(theirs, landing, reading, memory), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answers.recv()  # it has started, which takes long on a busy machine
        except EOFError as e:
            raise TryAgainError(
                "worker-died",
                f"The process that reads landing files first ended before it began ({self._ending()}). Nothing was committed.",
                next=f"run the same command again; {BELOW_MAIN}",
            ) from e

    def read(self, file: LandingInput, alive: Callable[[], object]) -> str:
        """Why the file ends the process, or "". The process is of no use then."""
        seconds, begun = LEAST_SECONDS + file.size / BYTES_A_SECOND, clock.elapsed()
        try:
            self._answers.send(file)
            while not self._answers.poll(min(1.0, seconds)):
                alive()
                if clock.elapsed() - begun > seconds:
                    return f"It was not read to its end within {seconds:.0f} seconds."
            return str(self._answers.recv())
        except (EOFError, OSError):
            return f"A process that reads it ends ({self._ending()})."

    def _ending(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return (signal.strsignal(-code) or f"signal {-code}") if code < 0 else f"exit code {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._answers.close()


def _read_all(answers: Connection, landing: ObjectReader, reading: Reading, memory: int) -> None:
    """Read files until the other end is closed, and answer for each whether it takes too much memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.send("")
    with suppress(EOFError):
        while True:
            file: LandingInput = answers.recv()
            try:
                _read(landing, file, reading)
                answer = ""
            except (MemoryError, pa.ArrowMemoryError):
                answer = f"It takes more than {memory / 1e9:.1f} GB of memory."
            except Exception:
                answer = ""  # who reads it next says why, in words of the table
            answers.send(answer)


def _read(landing: ObjectReader, file: LandingInput, reading: Reading) -> None:
    survey(landing, file, reading, None, frozenset())
    with open_landed(landing, file.path, file.listed) as source:
        for block in Reader.of(source, file, readable_format(file, reading), reading).blocks(frozenset()).blocks:
            for name in block.names:
                block.convert(name, pa.string())


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
