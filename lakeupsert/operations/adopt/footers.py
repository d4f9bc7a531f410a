"""The footers of files that another program wrote: rows, types and statistics, without a row of them.

Reads     about 64 KiB at the end of each file, in another process, since a file may end the one that reads it (ADR 0069)
Writes    nothing
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import pyarrow as pa

from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.hosts import Host, count_requests, map_counted
from lakeupsert.engine.runs import runs
from lakeupsert.errors import RefusedError
from lakeupsert.landing.adopted import FileFooter, read_footer
from lakeupsert.landing.formats.blocks import UnreadableFileError
from lakeupsert.pipeline.append.trial import LEAST_SECONDS
from lakeupsert.pipeline.child import Children, EndedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore

AT_ONCE = 16
"""Concurrent requests."""
FILES_AN_ITEM = 256
"""So many footers are read by one item of the host's work."""
FOOTER_BYTES = 64 << 10
"""About what is read of each file."""
Footers = list[FileFooter | str]
"""Of some files, or why they have none."""


def read_footers(table: OpenTable, host: Host, files: Sequence[ObjectInfo]) -> list[FileFooter]:
    """Raises RefusedError, which names the first file that can't be read."""
    items = list(runs(files, lambda file: 1, FILES_AN_ITEM))
    sizes = [float(len(item) * FOOTER_BYTES) for item in items]
    store = table.resources.store
    read = partial(_read, store, table.settings.key, table.declaration.order_columns)
    with closing(Children()) as readers:  # a task elsewhere has its own
        found = map_counted(host, store, partial(_read_apart, store, readers, read), items, sizes)
        results = [result for of_item in all_or_raise(found) for result in of_item]
    bad = [r for r in results if isinstance(r, str)]
    if bad:
        raise RefusedError(
            "unreadable-files",
            f"{len(bad)} of {len(files)} files can't be adopted. The first is {bad[0]} Nothing was changed.",
            next="repair these files or move them out of the folder, then run `lakeupsert adopt` again",
        )
    return [r for r in results if isinstance(r, FileFooter)]


def _read_apart(
    store: ObjectStore, readers: Children, read: Callable[[Sequence[ObjectInfo]], Footers], files: Sequence[ObjectInfo]
) -> Footers:
    """Return what ``read`` does in another process. A file that ends it has no footer."""
    footers: Footers = []
    for part, answer in readers.by_halves(_seconds, partial(count_requests, store, read), files):
        if isinstance(answer, EndedError):
            footers += [f"{store.uri(file.name)}: {answer}" for file in part]
        else:
            footers += answer[0]
            store.requests.add(answer[1])
    return footers


def _seconds(files: Sequence[ObjectInfo]) -> float:
    return LEAST_SECONDS + len(files)


def _read(store: ObjectStore, key: Sequence[str], order_by: Sequence[str], files: Sequence[ObjectInfo]) -> Footers:
    """The footer of each file, or why it has none. Equal schemas are one object, which makes the pickled result small."""
    schemas: dict[pa.Schema, pa.Schema] = {}

    def read(info: ObjectInfo) -> FileFooter | str:
        try:
            footer = read_footer(store, info, key, order_by)
        except UnreadableFileError as e:
            return f"{store.uri(info.name)}: {e.reason}"
        except NotFoundError:
            return f"{store.uri(info.name)} was deleted while it was read"
        return replace(footer, schema=schemas.setdefault(footer.schema, footer.schema))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(read, files))
