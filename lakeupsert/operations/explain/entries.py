"""The ledger entries that `explain` reads. It reads only the headers of nights whose appended files are all deleted.

Reads     headers of the ledger, names of appended files, entries
Writes    nothing
Repeat    safe
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import DATA, TableObjects
from lakeupsert.table.ledger import LedgerEntry, active_batches


@dataclass(frozen=True)
class Entries:
    """The ledger of a search.

    Attributes:
        headers: all entries in short.
        first: appended files of earlier batches are deleted, except those of statements.
    """

    history: History
    headers: Sequence[LedgerEntry]
    first: int

    @classmethod
    def of(cls, table: OpenTable, last: int) -> "Entries":
        """Those up to ``last``. An appended file has the number of entries that there were before its own in its name."""
        headers, store = table.history.headers(last), table.resources.store
        names = [found.name for kind in ("appended", "moved") for found in store.list(f"{DATA}/{kind}-")]
        first = max(1, min((TableObjects.start_of(name) or 0 for name in names), default=len(headers)))
        while first > 1 and not _had_files(headers[first - 1]):
            first -= 1
        return cls(table.history, headers, first)

    @property
    def last(self) -> int:
        return len(self.headers) - 1

    def with_files(self, high: int) -> list[Link[LedgerEntry]]:
        """The entries up to ``high`` whose files may be there: the first one, statements, and all from ``first`` on."""
        older = [n for n, entry in enumerate(self.headers[: self.first]) if n == 0 or entry.statement is not None]
        links = [link for n in older for link in self.history.entries(n - 1, n)]
        return links + self.history.entries(self.first - 1, high)

    def that_decide(self, ages: Sequence[int], high: int) -> list[Link[LedgerEntry]]:
        """The entries up to ``high`` that may decide over rows of these batches: later ones, if there are full extracts."""
        extracts = any(entry.full for entry in self.headers)
        return self.history.entries(min(ages) - 1, high) if ages and extracts else []

    def counting(self, up_to: int) -> set[int]:
        """The batches that count at ``up_to``, batch 0 included."""
        later = self.history.entries(self.last, up_to)
        numbered = [*enumerate(self.headers), *((link.number, link.body) for link in later)]
        return {0, *active_batches(numbered[: up_to + 1])}


def _had_files(entry: LedgerEntry) -> bool:
    return entry.kind == "batch" and entry.statement is None and entry.rows_read > entry.rows_quarantined
