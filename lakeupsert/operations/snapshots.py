"""Which snapshots can be read, and their tags.

Reads     the chain of snapshots
Writes    with `tag`, a snapshot that shows what the one before it shows
Repeat    safe
"""

from datetime import date
from itertools import zip_longest

import msgspec

from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.integrity import extend_snapshots
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publishers import catch_up
from lakeupsert.read.view import choose, expired_snapshot, newest_snapshot
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.snapshot import Snapshot


def list_snapshots(objects: TableObjects) -> list[Link[Snapshot]]:
    """Every snapshot that can be read, newest first, without those of tags and expiry, which show the same as the one before."""
    chain = objects.snapshots
    head = newest_snapshot(objects)
    kept = [n for n in chain.numbers() if head is not None and head.body.keeps(n)]
    links = [link for n in kept if (link := chain.get(n)) is not None]
    return [a for a, b in zip_longest(links, links[1:]) if b is None or not a.body.shows(b.body)]


def lost_snapshots(objects: TableObjects) -> list[int]:
    """Numbers of snapshots that are gone without having expired: something other than lakeupsert deleted them."""
    chain = objects.snapshots
    there = set(chain.numbers())
    head = chain.head()
    return [n for n in range(head.body.expired, head.number) if n not in there] if head else []


def list_tags(objects: TableObjects) -> dict[str, int]:
    """The number of each tagged snapshot, by tag."""
    head = newest_snapshot(objects)
    return head.body.tags if head else {}


def refuse_unfit_tag(name: str) -> None:
    """Raises ConfigurationError for a tag that readers would take for something else."""
    if name in ("published", "latest") or name[:1].isdigit() or not name:
        raise ConfigurationError(
            "unfit-tag",
            f"{name!r} can't be a tag: it would be read as a number, a time, or one of the words published and latest. Nothing "
            "was published.",
            next="choose a name that begins with a letter",
        )


def tag(table: OpenTable, name: str, snapshot: str | int | date | None) -> Link[Snapshot] | None:
    """Give a snapshot a tag, or with None remove the tag; returns None if nothing had to change.

    Raises ConfigurationError if there is no such snapshot, or no such tag to remove.
    """
    refuse_unfit_tag(name)
    link = None if snapshot is None else choose(table.history.objects, snapshot)
    number = link.number if link else None
    if link is not None:  # of several that show the same, the one that `list_snapshots` lists
        same = (s.number for s in list_snapshots(table.history.objects) if s.body.shows(link.body))
        number = min([link.number, *same])

    def build(head: Link[Snapshot] | None) -> Snapshot | None:
        tags = head.body.tags if head else {}
        if number is None and name not in tags:
            there = f"the tags are {', '.join(map(repr, sorted(tags)))}" if tags else "the table has no tags"
            raise ConfigurationError(
                "unknown-snapshot",
                f"{name!r} is not a tag: {there}. Nothing was published.",
                next="`lakeupsert history` lists the snapshots and their tags",
            )
        if head is None or tags.get(name) == number:
            return None
        if number is not None and not head.body.keeps(number):  # a vacuum may have expired it meanwhile
            raise expired_snapshot(number, head)
        others = {n: at for n, at in tags.items() if n != name}
        return msgspec.structs.replace(head.body, tags=others if number is None else {**others, name: number})

    appended = extend_snapshots(table.history, build)
    catch_up(table)
    return appended
