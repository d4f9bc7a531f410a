"""Landing files of sources that somebody removed before a batch took them: their rows come only once.

Reads     the head of each source's chain, the ledger, a few names in the landing zone
Writes    nothing
Repeat    safe, also while files land and batches take them
"""

from collections.abc import Iterable, Iterator

from lakeupsert.phrases import count
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.taken import TakenFiles, numbered_file

MOST_LOOKS = 10
"""How many files of a source are looked for, by a LIST each: the oldest that no batch took, which a rule by age removes first."""


def removed_files(table: OpenTable, sources: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
    """For each source that lacks files a warning, and what to do. ``sources``: None are those of the table."""
    for source in table.sources if sources is None else sources:
        head = table.history.objects.source(source).head()
        # The file of the head may still be on its way. Each other one was there before the next entry was written.
        landed = head.body.files - bool(head.body.file) if head else 0
        looked = _untaken(table, source, landed)[:MOST_LOOKS]
        missing = [name for name in looked if next(iter(table.resources.landing.list(name, limit=1)), None) is None]
        if missing:  # unless a batch took them meanwhile
            missing = sorted({*missing}.intersection(_untaken(table, source, landed)))
        if missing:
            least = "at least " if len(looked) == MOST_LOOKS else ""
            yield (
                f"{least}{count(len(missing), 'landing file')} of source {source!r} left the landing zone before a batch took "
                f"them, first {table.resources.landing.uri(missing[0])}. Their rows come only once, so the table lacks them",
                'put them back from a backup, or begin again with another source, see "Begin again" in docs/CAPTURE.md',
            )


def _untaken(table: OpenTable, source: str, landed: int) -> list[str]:
    """The landing files up to number ``landed`` that no batch took, in their order and without their endings."""
    head = table.history.newest_entry()
    taken = table.history.taken(head.number) if head else TakenFiles()
    return [numbered_file(source, number) for number in taken.lacking(source, landed)]
