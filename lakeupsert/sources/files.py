"""The landing files of one source, and its position behind each.

Reads     the source's chain; its head's landing file and, if that is gone, the ledger
Writes    an entry with the position, then the landing file, both by a create; a lease
Repeat    safe: rows and position count together, when the landing file is there

    begin: head -- its file is there, or a batch took it --> its position `after`
             '--- otherwise --> create an EMPTY file of that name --> its position `before`
    land:  entry -- lost --> another process has taken over
             '--- won --> landing file -- taken, and empty --> the same

So a process that stalls between the two creates finds its place taken, and what it read is read again by its successor.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress

from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError, TryAgainError
from lakeupsert.landing.formats.registry import is_read
from lakeupsert.phrases import with_advice
from lakeupsert.pipeline.append.landing_dates import received_on
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.removed_files import removed_files
from lakeupsert.retries import LEADER_SECONDS, SENDS, SOURCE_ENTRIES_SECONDS
from lakeupsert.storage import NotFoundError, StoreUnavailableError, UnknownOutcomeError, can_commit, open_own_folder
from lakeupsert.table.chain import Chain, Link, sends
from lakeupsert.table.layout import HOME
from lakeupsert.table.source import SourceEntry
from lakeupsert.table.taken import numbered_file

_TRIM_EVERY = 1000


class SourceFiles:
    """Writes the landing files of one source of a table, `<source>/<number><ending>`.

    Call `lead` until it is true, then `begin`, then `land` and `lead` in turns. After an error, begin again.

    Attributes:
        leadership: which of several processes works on the source. It decides who waits, and never what counts.

    Raises ConfigurationError if it can't land files in the table's landing zone.
    """

    def __init__(self, table: OpenTable, source: str, ending: str, leader_seconds: float = LEADER_SECONDS) -> None:
        address = table.settings.landing
        for code, why in _why_not(table.settings, source, ending):
            raise ConfigurationError(
                code,
                f"Source {source!r} can't land files for table {table.name!r}: {why}.",
                next="name another table, or change that setting of this one",
            )
        self._table, self._source, self._ending = table, source, ending
        self._landing = open_own_folder(address, source)
        self._chain: Chain[SourceEntry] = table.history.objects.source(source)
        self._head: Link[SourceEntry] | None = None
        self._position: str | None = None
        self._kept = f"{HOME}/sources/{source}/kept/"
        leases = table.history.objects.leases_of_source(source)
        self.leadership = Leadership(table.history.objects, leader_seconds, leases)

    def removed(self) -> Iterator[str]:
        """A warning if landing files of the source left the landing zone before a batch took them."""
        with suppress(
            DamagedTableError, RefusedError, ConfigurationError, OSError
        ):  # it needs no right to read the ledger
            for found, advice in removed_files(self._table, [self._source]):
                yield with_advice(found, advice)

    def begin(self) -> str | None:
        """The position behind all that counts; None: nothing was read yet.

        A file that another process has not created by now never counts.
        """
        self._head = self.find_head()
        if self._head is not None:
            entry = self._head.body
            self._position = entry.after if self._counts(entry) else entry.before
            self._trim()
        return self._position

    def find_head(self) -> Link[SourceEntry] | None:
        """The newest entry. Raises ConfigurationError (``position-lost``) if there is none, but landing files of the source."""
        head = self._chain.head()
        file = None if head else next(iter(self._landing.list(f"{self._source}/", limit=1)), None)
        if file is not None:
            head = self._chain.head()  # another process may have begun between the two calls
            if head is None:
                raise self._position_lost(file.name, "no position")
        return head

    def land(self, data: bytes, after: str, ending: str | None = None) -> None:
        """Make the rows of a file durable, and with them the position behind them. Without ``data``, only the position.

        Raises TryAgainError (``source-taken``) if another process has taken over: nothing of this file counts then.
        """
        number = (self._head.body.files if self._head else 0) + bool(data)
        entry = SourceEntry(
            files=number,
            file=numbered_file(self._source, number, ending or self._ending) if data else "",
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest() if data else "",
            before=self._position,
            after=after,
        )
        won = self._chain.append(entry, self._head).link
        if won is None or not self._create(entry, data):
            raise self._taken()
        self._head, self._position = won, after
        if won.number % _TRIM_EVERY == 0:
            self._trim()

    def keep(self, data: bytes) -> str:
        """Keep what a position needs and is too long for. The result names it; the position that has the name comes later."""
        name = f"{self._kept}{hashlib.sha256(data).hexdigest()}"
        for _ in sends():
            with suppress(UnknownOutcomeError):
                self._table.resources.store.create(name, data)
                return name
        raise self._no_answer(self._table.resources.store.uri(name))

    def kept(self, name: str) -> bytes:
        return self._table.resources.store.get(name)

    def _counts(self, entry: SourceEntry) -> bool:
        """Whether the file of the head counts. If not, it never will: an empty file has its name."""
        if not entry.file:
            return True
        found = self._landing.head(entry.file)
        if found is None and self._was_taken(entry):
            return True
        return not self._create(entry, b"")

    def _was_taken(self, entry: SourceEntry) -> bool:
        """Whether a batch took the file before somebody removed it."""
        head = self._table.history.newest_entry()
        batches = self._table.history.headers(head.number) if head else []
        return any((file.path, file.sha256) == (entry.file, entry.sha256) for batch in batches for file in batch.files)

    def _create(self, entry: SourceEntry, data: bytes) -> bool:
        """Create the landing file of an entry, or an empty one. False: the other one of the two is there.

        Raises ConfigurationError if a third one is: the chain is older than the landing files.
        """
        if not entry.file:
            return True
        for _ in sends():
            try:
                if self._landing.create(entry.file, data):
                    return True
            except UnknownOutcomeError:
                pass
            with suppress(NotFoundError):
                stored = self._landing.get(entry.file)
                if stored and hashlib.sha256(stored).hexdigest() != entry.sha256:
                    raise self._position_lost(entry.file, "another position")
                return bool(stored) == bool(data)
        raise self._no_answer(self._landing.uri(entry.file))

    def _no_answer(self, address: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            "store-unreachable",
            f"{address}: {SENDS} attempts to create it got no answer.",
            next="start the command again; it finds out what happened",
        )

    def _taken(self) -> TryAgainError:
        return TryAgainError(
            "source-taken",
            f"Another process has taken over source {self._source!r}. It reads again the rows that this one had not landed.",
            next="start only one process for a source, or let this one wait by starting it again",
        )

    def _position_lost(self, file: str, what: str) -> ConfigurationError:
        source, name = self._source, self._table.name
        return ConfigurationError(
            "position-lost",
            f"{self._landing.uri(file)} is a landing file of source {source!r}, and table {name!r} has {what} of that "
            "source. Nobody knows which changes came since. The file stays as it is.",
            next=f"copy the newest `_lakeupsert/sources/{source}` from the folder of the table that had it, or begin again with "
            'another source, see "Begin again" in docs/CAPTURE.md',
        )

    def _trim(self) -> None:
        """Delete entries that are so much older than the head that no stalled process may still write after them, and what only
        these needed."""
        store, head = self._table.resources.store, self._head
        listed = list(store.list(self._chain.prefix))
        found = [*listed, *store.list(self._kept)]
        old = [one.name for one in found if listed[0].modified - one.modified > SOURCE_ENTRIES_SECONDS]
        positions = f"{head.body.before}{head.body.after}" if head else ""
        store.delete([name for name in old if name not in positions])


def _why_not(settings: TableSettings, source: str, ending: str) -> Iterator[tuple[str, str]]:
    """The settings of a table that do not fit a source's files, each with the code of its error."""
    if not can_commit(settings.landing):
        yield "source-without-landing", f"the landing zone {settings.landing} can only be read"
    if received_on(f"{source}/x", settings.landing_dates) is None:
        yield "source-files-unread", f"`landing_dates` is {settings.landing_dates}, and its files have no date"
    if not is_read(ending, settings.format):
        yield "source-files-unread", f"`format` is {settings.format}, and its files end in {ending}"
    prefix = settings.delete and settings.delete.file_prefix
    if prefix and prefix[0].isdigit():
        yield "source-files-unread", f"`delete.file_prefix` is {prefix!r}, and the names of its files are numbers"
