"""Let every publisher of `publishers` show what the snapshots show. It runs behind a publish, and never fails it.

Reads     the newest snapshot, and what each publisher has written last
Writes    what the publishers write
Repeat    safe: a publisher goes on from what it has written
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from lakeupsert.config import PUBLISHERS
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError
from lakeupsert.extras import needs_extra
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.publishers import UNFINISHED, PublishedTable, Publisher
from lakeupsert.storage import ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.snapshot import Snapshot

SILENT = "catalog-unreachable"
"""The code of the error of a catalog that gives no answer."""
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublisherStanding:
    """How far a publisher is.

    Attributes:
        snapshot: what its readers see; None: nothing yet, or not known.
        behind: how many snapshots it lacks; None: not known, because its catalog did not answer.
        problem: why it is behind, if it was just tried, or why that is not known.
        warning: about what it has just written.
    """

    snapshot: int | None
    behind: int | None
    problem: LakeupsertError | None = None
    warning: str | None = None

    @property
    def is_newest(self) -> bool:
        """Whether its readers surely see the newest snapshot."""
        return self.behind == 0

    @property
    def is_silent(self) -> bool:
        """Whether its catalog gave no answer. Each question may take minutes."""
        return self.problem is not None and self.problem.code == SILENT


def publisher(table: OpenTable, name: str) -> Publisher:
    """Raises ConfigurationError if the table has no such publisher."""
    if name not in table.settings.publishers:
        raise ConfigurationError(
            "no-such-publisher",
            f"Table {table.name!r} has {', '.join(table.settings.publishers) or 'none'} in `publishers`, and not {name!r}.",
            next=f"add {name!r} to `publishers` in [tables.{table.name}], with the section that its page names",
        )
    # Not the objects of the history: what a leader holds is not checked by what a publisher writes.
    objects = TableObjects(table.resources.store)
    published = PublishedTable(table.settings, objects, table.history.version, table.resources.map_concurrently)
    with needs_extra(f"The publisher {name!r}", PUBLISHERS[name].extra):
        # Only here: a worker of a table without publishers starts without their modules.
        made: Publisher = import_module(f"lakeupsert.publishers.{name}").open_publisher(published)
    return made


def catch_up(table: OpenTable) -> dict[str, PublisherStanding]:
    """Bring each publisher up to the newest snapshot. What stops one is in its standing."""
    newest = table.history.last_snapshot() if table.settings.publishers else None
    return {name: catch_up_one(table, name, newest) for name in table.settings.publishers} if newest else {}


def catch_up_one(table: OpenTable, name: str, newest: Link[Snapshot]) -> PublisherStanding:
    """Bring one publisher up to the newest snapshot."""
    try:
        with _explained(name):
            warning = publisher(table, name).catch_up(newest)
    except LakeupsertError as e:
        if e.code == SILENT:  # and would be asked again in vain
            return PublisherStanding(None, None, e)
        return _standing(table, name, newest.number, e)
    return PublisherStanding(newest.number, 0, warning=warning)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise LakeupsertError for whatever stops a publisher: no night fails because of what another program left there."""
    try:
        yield
    except LakeupsertError:
        raise
    except Exception as e:
        raise DamagedTableError(
            "publisher-failed",
            f"{name}: {type(e).__name__}: {e}. The snapshot is published; readers of {name} still see an older one.",
            next=f"fix the cause that the message names, or start over: `lakeupsert publish --to {name} --reset`. If that "
            "does not help, report it as a bug of lakeupsert",
        ) from e


def standings(table: OpenTable) -> dict[str, PublisherStanding]:
    """How far each publisher is; nothing is written."""
    newest = table.history.known_snapshot
    return {name: _standing(table, name, newest.number if newest else -1) for name in table.settings.publishers}


class Publishers:
    """All publishers of a table, during one command. A silent one is not asked again.

    Args:
        standings: of those that the command has let catch up already.
    """

    def __init__(self, table: OpenTable, standings: Mapping[str, PublisherStanding] = MappingProxyType({})) -> None:
        self._table = table
        silent = {name: standing.problem for name, standing in standings.items() if standing.is_silent}
        self._silent = {name: problem for name, problem in silent.items() if problem is not None}

    def catch_up(self) -> None:
        """Bring each publisher up to the newest snapshot, except those that can't."""
        newest = self._table.history.last_snapshot() if self._table.settings.publishers else None
        if newest is not None:
            self._ask(lambda one: one.catch_up(newest))

    def mend(self) -> None:
        """`Publisher.mend` of all publishers; without that of one that can't be asked."""
        for answer in self._ask(lambda one: one.mend()).values():
            if isinstance(answer, LakeupsertError):
                log.warning("%s", answer.message)

    def least_shown(self) -> int | None:
        """The least snapshot that readers of some publisher may see; None if none shows any. 0 if a catalog does not answer, or
        has a part of a snapshot."""
        shown = []
        for name, answer in self._ask(lambda one: one.shown()).items():
            if isinstance(answer, LakeupsertError):
                why = "files of all snapshots are kept, as nobody knows which one %s shows: %s"
                log.warning(why, name, answer.message)
                answer = 0
            shown.append(answer)
        return min((max(0, number) for number in shown if number is not None), default=None)

    def garbage(self, oldest: int, newest: int) -> list[ObjectInfo]:
        """The `Publisher.garbage` of all publishers; without that of one whose catalog does not answer."""
        found: list[ObjectInfo] = []
        for name, answer in self._ask(lambda one: one.garbage(oldest, newest)).items():
            if isinstance(answer, LakeupsertError):
                log.warning("%s objects that readers no longer need are kept: %s", name, answer.message)
            else:
                found += answer
        return found

    def _ask(self, question: Callable[[Publisher], Answer]) -> dict[str, Answer | LakeupsertError]:
        """What each publisher answers, or why it does not."""
        answers: dict[str, Answer | LakeupsertError] = dict(self._silent)
        for name in self._table.settings.publishers:
            if name in self._silent:
                continue
            try:
                with _explained(name):
                    answers[name] = question(publisher(self._table, name))
            except LakeupsertError as e:
                answers[name] = e
                if e.code == SILENT:
                    self._silent[name] = e
        return answers


def _standing(table: OpenTable, name: str, newest: int, problem: LakeupsertError | None = None) -> PublisherStanding:
    try:
        with _explained(name):
            shown = publisher(table, name).shown()
    except LakeupsertError as e:
        return PublisherStanding(None, None, problem or e)
    if shown is None or shown == UNFINISHED:
        return PublisherStanding(None, newest + 1, problem)
    return PublisherStanding(shown, max(0, newest - shown), problem)
