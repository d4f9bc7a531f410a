"""Where row work runs. `LocalHost` is `--host local`: this process, for small nights and for tests.

In phase one, up to ``HELD_BYTES`` of rows stay in memory; beyond that they go to a temporary folder, one file for each group of
ranges.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.engine.attempts import Found, Item, all_or_raise, attempt
from lakeupsert.engine.batch import AppendJob, choose_ranges, read_landing
from lakeupsert.engine.reports import FileRead, Report
from lakeupsert.engine.settle import RowBuffer, group_by_range, settle_and_write
from lakeupsert.engine.spilled import Spilled
from lakeupsert.landing.files import Survey, survey
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.progress import Share
from lakeupsert.rows.arrays import Rows
from lakeupsert.storage import ObjectReader, ObjectStore

HELD_BYTES = 256 << 20
SPILL_FILES = 64
SURVEYED_HERE = 64 << 20
"""Bytes of text files up to which a survey runs in this process, since a job of the host would not pay."""


class Host(Protocol):
    """Where the row work runs. `spark_host.SparkHost` is the other one; it needs pyspark.

    ``in_process``: `map` works here, on one item after the other. Then rows go from step to step in memory or in temporary files,
    and otherwise through the store.
    """

    in_process: bool

    def run(self, job: AppendJob, progress: Callable[[str], None] = lambda text: None) -> list[Report]:
        """Do phase one's row work of the whole batch, once."""

    def map(
        self, function: Callable[[Item], Found], items: Sequence[Item], sizes: Sequence[float]
    ) -> Iterable[Found | Exception]:
        """What ``function`` returns for each item, in their order, or the error that it raised. May be read once, and does the
        work no sooner.

        Args:
            function, items: picklable. An item may be done twice; then one of the results counts.
            sizes: of the items, as shares of the work.
        """


def map_counted(
    host: Host, store: ObjectStore, function: Callable[[Item], Found], items: Sequence[Item], sizes: Sequence[float]
) -> Iterable[Found | Exception]:
    """`Host.map`. What tasks elsewhere request of ``store``, which ``function`` holds, is added to its requests.

    What a task requests that raises is not counted.
    """
    if host.in_process:
        return host.map(function, items, sizes)
    return _add_requests(store, host.map(partial(count_requests, store, function), items, sizes))


def count_requests(store: ObjectStore, function: Callable[[Item], Found], item: Item) -> tuple[Found, dict[str, int]]:
    """What the function returns, and how many requests of each kind it sent to the store."""
    before = store.requests.as_dict()
    found = function(item)
    return found, {call: count - before[call] for call, count in store.requests.as_dict().items()}


def _add_requests(
    store: ObjectStore, found: Iterable[tuple[Found, dict[str, int]] | Exception]
) -> Iterator[Found | Exception]:
    for one in found:
        if isinstance(one, Exception):
            yield one
        else:
            result, requests = one
            store.requests.add(requests)
            yield result


def survey_files(
    host: Host,
    landing: ObjectReader,
    inputs: Sequence[LandingInput],
    reading: Reading,
    known: pa.Schema | None,
    text_columns: frozenset[str],
) -> list[Survey]:
    """`landing.files.survey` of each file."""
    look = partial(survey, landing, reading=reading, known=known, text_columns=text_columns)
    text_bytes = sum(file.size for file in inputs if not format_of(file.path, reading.format).typed)
    if host.in_process or text_bytes <= SURVEYED_HERE:
        return [look(file) for file in inputs]
    return all_or_raise(host.map(look, inputs, [float(file.size) for file in inputs]))


class LocalHost:
    """See `Host`."""

    in_process = True

    def map(
        self, function: Callable[[Item], Found], items: Sequence[Item], sizes: Sequence[float]
    ) -> Iterable[Found | Exception]:
        return (attempt(function, item) for item in items)

    def run(self, job: AppendJob, progress: Callable[[str], None] = lambda text: None) -> list[Report]:
        job = choose_ranges(job)
        reports: list[Report] = []
        sizes, done = {i.path: i.size for i in job.inputs}, 0
        buffer = RowBuffer(job, HELD_BYTES)
        with Spilled() as spilled:
            for item in read_landing(job, job.inputs):
                if not isinstance(item, pa.Table):
                    reports.append(item)
                    if isinstance(item, FileRead):
                        done += sizes[item.path]
                        progress(Share(f"reading {len(sizes):,} landing files", done, sum(sizes.values())))
                elif buffer.add(item):
                    _spill(job, buffer.tables, spilled)
                    reports += buffer.lost
                    buffer = RowBuffer(job, HELD_BYTES)
            reports += buffer.lost
            if not spilled.numbers:
                return reports + (settle_and_write(job, buffer.tables) if buffer.tables else [])
            if buffer.tables:
                _spill(job, buffer.tables, spilled)
            for number in spilled.numbers:
                reports += settle_and_write(job, [spilled.take(number)])
        return reports


def _spill(job: AppendJob, tables: Sequence[Rows], to: Spilled) -> None:
    """All rows of a range get the same number."""
    for number, rows in group_by_range(job, tables, SPILL_FILES):
        to.add(number, rows)
