"""Landing files that end the process which reads them: after such an end, each is first read in another process.

Reads     the chain of signs; landing files
Writes    two signs around the reading of a batch, that it begins and that it has ended; both go if that made no table
Repeat    safe: a sign that is missing costs time only

    newest sign -- ended --> sign: begins --------> read all -- done, or an error of ours --> sign: ended
         '-- begins --> sign: begins, try each file --^    '---- the process ends ----> the sign stays

A library may abort on a damaged file, take all memory, or never end. No `except` helps then. Roles that append may not delete
anything, so no sign is taken back, but those of a first batch that is refused.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TypeVar

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.hosts import Host
from lakeupsert.engine.runs import runs
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.landing.content import open_landed
from lakeupsert.landing.files import Reader, survey
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import AppendOptions, Ground
from lakeupsert.pipeline.child import Children, EndedError
from lakeupsert.pipeline.leadership import this_process
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import ObjectReader
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.lease import Lease

Found = TypeVar("Found")
Share = tuple[LandingInput, int]
"""A landing file, and how many bytes of it are read."""
_NOT_TOLD = ("spark-failed", "task-died", "worker-died")
"""Codes of errors after which nobody knows whether a file has ended a process."""

LEAST_SECONDS = 60.0
"""A file may take so much processor time, and `BYTES_A_SECOND` more. Less: good files are set aside."""
BYTES_A_SECOND = 1_000_000
FILES_A_CALL = 256
"""So many files are read by one call if nobody waits for each. A call takes a millisecond."""


class Trial:
    """The question whether a landing file ended the process that read it last."""

    def __init__(self, table: OpenTable, options: AppendOptions) -> None:
        self._table, self._options = table, options
        self._signs: Chain[Lease] = table.history.objects.reading
        self._begun: Link[Lease] | None = None
        self._is_first = False
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
        if self._options.folder:
            return False  # a stream has written its files itself
        self._is_first = ground.spec is None
        head = self._signs.head()
        self._begun = self._signs.append(Lease(holder=this_process()), head).link
        return head is not None and not head.body.released

    def _end(self) -> None:
        if self._begun is None:
            return
        with suppress(TryAgainError):  # a store that does not answer
            link = self._signs.append(Lease(holder=this_process(), released=True), self._begun).link
            if link and self._is_first and self._table.history.objects.specs.head() is None:
                # Of a first batch that is refused nothing stays, if this role may delete.
                self._table.resources.discard(map(self._signs.name, (self._begun.number, link.number)))


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


class Apart:
    """Landing files as another process reads them."""

    def __init__(self, landing: ObjectReader, alive: Callable[[], object] = lambda: None) -> None:
        self._landing, self._alive = landing, alive
        self._children = Children()
        self.close = self._children.close

    def read(self, function: Callable[..., Found], file: LandingInput, *args: object) -> Found:
        """Return what ``function(landing, file, *args)`` does, or raise what it raises. Raises EndedError if the file ends the
        process."""
        return self._children.call(_seconds(file), function, self._landing, file, *args, alive=self._alive)

    def map(
        self, function: Callable[[ObjectReader, LandingInput, int], Found], files: Sequence[Share]
    ) -> list[Found | EndedError]:
        """Return what ``function(landing, file, bytes)`` does for each of the files. It raises nothing; a file that ends the
        process has an EndedError."""
        found: list[Found | EndedError] = []
        for some in runs(files, lambda file: 1, FILES_A_CALL):
            for _, answer in self._children.by_halves(_seconds_of, partial(_each, function, self._landing), some):
                found += [answer] if isinstance(answer, EndedError) else answer
        return found


def _seconds(*files: LandingInput) -> float:
    return LEAST_SECONDS + sum(file.size for file in files) / BYTES_A_SECOND


def _seconds_of(files: Sequence[Share]) -> float:
    return _seconds(*(file for file, _ in files))


def _each(
    function: Callable[[ObjectReader, LandingInput, int], Found], landing: ObjectReader, files: Sequence[Share]
) -> list[Found]:
    return [function(landing, file, size) for file, size in files]


def _try_all(
    landing: ObjectReader,
    reading: Reading,
    inputs: Iterable[LandingInput],
    alive: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    found: dict[str, str] = {}
    with closing(Apart(landing, alive)) as apart:
        for file in inputs:
            try:
                apart.read(_read, file, reading)
            except EndedError as e:
                found[file.path] = str(e)
    return found


def _read(landing: ObjectReader, file: LandingInput, reading: Reading) -> None:
    """Read a file to its end. Errors of ours say nothing: who reads it next has words of the table for them."""
    try:
        survey(landing, file, reading, None, frozenset())
        with open_landed(landing, file.path, file.listed) as source:
            for block in Reader.of(source, file, readable_format(file, reading), reading).blocks(frozenset()).blocks:
                for name in block.names:
                    block.convert(name, pa.string())
    except MemoryError:
        raise
    except Exception as e:
        if isinstance(e.__cause__, MemoryError):  # of Arrow, for which the file would be damaged
            raise e.__cause__ from e
