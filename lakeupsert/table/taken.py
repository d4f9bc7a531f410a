"""Which landing files batches have taken."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lakeupsert.table.ledger import LedgerEntry, SeenFile

if TYPE_CHECKING:
    from lakeupsert.storage import ObjectInfo

_NUMBERED = re.compile(r"([^/]+)/([0-9]{12})\.[^/]*")


def numbered_file(source: str, number: int, ending: str = "") -> str:
    """The landing file of a source with this number, from 1 on. Each is there before the next one is."""
    return f"{source}/{number:012}{ending}"


def source_of(name: str) -> str | None:
    """The source that names its landing files like this one, if any does."""
    return found[1] if (found := _NUMBERED.fullmatch(name)) else None


class TakenFiles:
    """The landing files that ledger entries loaded or set aside.

    Attributes:
        by_path: one that could not be read is there twice: its content is only in `LedgerEntry.seen`.
        seen: `LedgerEntry.seen` of the entries, by path.
        entries: how many entries were added.
    """

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self.by_path: dict[str, list[SeenFile]] = {}
        self.seen: dict[str, list[SeenFile]] = {}
        self.entries = 0
        self._runs: dict[str, int] = {}
        self._paths: dict[str, dict[int, str]] = {}
        self.add(entries)

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            self.entries += 1
            for file in entry.files:
                self.by_path.setdefault(file.path, []).append(file)
                if found := _NUMBERED.fullmatch(file.path):
                    self._paths.setdefault(found[1], {})[int(found[2])] = file.path
            unread = {file.path for file in entry.files if entry.seen and not file.sha256}
            for seen in entry.seen:
                self.seen.setdefault(seen.path, []).append(seen)
                if seen.path in unread:
                    self.by_path.setdefault(seen.path, []).append(seen)

    def has(self, found: "ObjectInfo") -> bool:
        """Whether a listed file, as it is now, was taken: by size and etag."""
        return any(found.is_same(file.size, file.etag) for file in self.by_path.get(found.name, ()))

    def all_up_to(self, source: str) -> str:
        """The last landing file of a source that was taken like all before it; "" if the first one was not."""
        paths, last = self._paths.get(source, {}), self._runs.get(source, 0)
        while last + 1 in paths:
            last += 1
        self._runs[source] = last
        return paths.get(last, "")

    def lacking(self, source: str, landed: int) -> Sequence[int]:
        """The numbers up to ``landed`` of files of a source that were not taken."""
        self.all_up_to(source)
        paths = self._paths.get(source, {})
        return [number for number in range(self._runs[source] + 1, landed + 1) if number not in paths]
