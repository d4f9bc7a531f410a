"""Which snapshots can be read, and their tags.

Reads     the chain of snapshots
Writes    with `tag`, a snapshot that shows what the one before it shows
Repeat    safe
"""

from datetime import date
from itertools import zip_longest

import msgspec

from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publishers import catch_up
from lakeupsert.read.view import choose, expired_snapshot, newest_snapshot
from lakeupsert.table.chain import Link
from lakeupsert.table.snapshot import Snapshot


def list_snapshots(table: OpenTable) -> list[Link[Snapshot]]:
    """Every snapshot that can be read, newest first, without those of tags and expiry, which show the same as the one before."""
    chain = table.objects.snapshots
    head = newest_snapshot(table.objects)
    kept = [n for n in chain.numbers() if head is not None and head.body.keeps(n)]
    links = [link for n in kept if (link := chain.get(n)) is not None]
    return [a for a, b in zip_longest(links, links[1:]) if b is None or not a.body.shows(b.body)]


def lost_snapshots(table: OpenTable) -> list[int]:
    """Numbers of snapshots that are gone without having expired: something other than lakeupsert deleted them."""
    chain = table.objects.snapshots
    there = set(chain.numbers())
    head = chain.head()
    return [n for n in range(head.body.expired, head.number) if n not in there] if head else []


def list_tags(table: OpenTable) -> dict[str, int]:
    """The number of each tagged snapshot, by tag."""
    head = newest_snapshot(table.objects)
    return head.body.tags if head else {}


def tag(table: OpenTable, name: str, snapshot: str | int | date | None) -> Link[Snapshot] | None:
    """Give a snapshot a tag, or with None remove the tag; returns None if nothing had to change."""
    link = None if snapshot is None else choose(table.objects, snapshot)
    number = link.number if link else None
    if link is not None:  # of several that show the same, the one that `list_snapshots` lists
        number = min([link.number, *(s.number for s in list_snapshots(table) if s.body.shows(link.body))])
    if name in ("published", "latest") or name[:1].isdigit() or not name:
        raise ConfigurationError(
            "unfit-tag",
            f"{name!r} can't be a tag: it would be read as a number, a time, or one of the words published and latest.",
            next="choose a name that begins with a letter",
        )

    def build(head: Link[Snapshot] | None) -> Snapshot | None:
        if head is None or head.body.tags.get(name) == number:
            return None
        if number is not None and not head.body.keeps(number):  # a vacuum may have expired it meanwhile
            raise expired_snapshot(number, head)
        tags = {n: at for n, at in head.body.tags.items() if n != name}
        return msgspec.structs.replace(head.body, tags=tags if number is None else {**tags, name: number})

    appended = table.extend_snapshots(build)
    catch_up(table)
    return appended
