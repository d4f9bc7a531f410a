"""Predict what the next run will do, before anything is written.

Reads     what `append` looks at first (landing zone, ledger, spec); of each new landing file its partition column, of text
          files a bounded part; the last snapshots; the manifests of partitions that are dirty. Never a data file
Writes    nothing, and sends nothing

    new landing files -> rows by partition -> their bytes, by habit -> each touched partition (`merges`)

The sizes of rows, the share of new keys and the seconds are learned from the last nights (`habits`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from lakeupsert.config import Reading, cores
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.content import WHOLE_BYTES
from lakeupsert.landing.files import Survey, survey
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.blocks import UnreadableFileError as Unreadable
from lakeupsert.landing.formats.registry import LandingFormat, format_of
from lakeupsert.landing.glimpse import Preview, preview, read_beginning
from lakeupsert.operations.init.buckets import far_count
from lakeupsert.operations.plan.habits import (
    Sizes,
    last_batches,
    last_nights,
    learn_seconds,
    learn_sizes,
    parquet_bytes,
)
from lakeupsert.operations.plan.merges import Arrival, PlannedPartition, plan_merges
from lakeupsert.operations.plan.prices import Prices, load_prices
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import Ground, discover
from lakeupsert.pipeline.append.full_extract import partitions_in_scope
from lakeupsert.pipeline.append.next_spec import plan_spec, under_old_names, unfit_files, without_operations
from lakeupsert.pipeline.append.trial import Apart
from lakeupsert.pipeline.child import EndedError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.read_cost import ReadCost, read_cost
from lakeupsert.storage import LocalStore, NotFoundError, ObjectReader, open_store
from lakeupsert.storage.base import Call
from lakeupsert.table.layout import LISTED_TOGETHER
from lakeupsert.table.ledger import Scope, header_blocks
from lakeupsert.table.spec import TableSpec

TEXT_BYTES = 32 << 20
"""Bytes that are read of all new text files together; if they have more, partitions and rows are estimated."""
SAMPLE_ROWS = 10_000
"""Rows of a first night that are written to memory to measure their size."""


@dataclass(frozen=True)
class Cost:
    """In ``currency``, at prices as of ``as_of``; ``compute`` is None if the time is not known."""

    requests: float
    transfer: float
    compute: float | None
    currency: str
    as_of: str

    @property
    def total(self) -> float:
        return self.requests + self.transfer + (self.compute or 0.0)


@dataclass(frozen=True)
class Plan:
    """What the next run will do. Bytes are compressed; ``requests`` go to the processed zone, counted as `run` counts them.

    Attributes:
        files, landing_bytes, rows: new landing files, and their rows that name a (selected) partition.
        append_read: bytes, counting each file as often as append reads it.
        reads: what a read of a partition costs at most, before this run.
        seconds: None if no night was published yet, or none did the same steps.
        nights: how many nights this was learned from.
        estimated: text files were too large to be read whole, so partitions may be missing.
        notes: warnings.
    """

    files: int
    landing_bytes: int
    rows: int
    partitions: tuple[PlannedPartition, ...]
    append_read: int
    append_written: int
    requests: dict[Call, int]
    landing_requests: dict[Call, int]
    reads: ReadCost
    seconds: float | None
    prices: Prices
    nights: int
    estimated: bool
    notes: tuple[str, ...] = ()

    @property
    def dirty(self) -> int:
        return sum(p.dirty for p in self.partitions)

    @property
    def dedupe_read(self) -> int:
        return sum(p.bytes_read for p in self.partitions)

    @property
    def dedupe_written(self) -> int:
        return sum(p.bytes_written for p in self.partitions)

    @property
    def bytes(self) -> int:
        return self.append_read + self.append_written + self.dedupe_read + self.dedupe_written

    @property
    def cost(self) -> Cost:
        prices, compute = self.prices, self.seconds
        return Cost(
            requests=prices.of_requests(self.requests) + prices.of_requests(self.landing_requests),
            transfer=prices.of_bytes(self.append_read + self.dedupe_read, self.append_written + self.dedupe_written),
            compute=None if compute is None else compute * prices.compute_second,
            currency=prices.currency,
            as_of=prices.as_of,
        )


def plan(
    table: OpenTable, selected: Callable[[str], bool], prices: str | Path | None, full: Scope | None = None
) -> Plan:
    """Predict what `run` would do now with the selected partitions.

    Args:
        prices: a file of prices; None for the shipped ones.
        full: the new landing files are a full extract, as in `append`.
    Raises:
        ConfigurationError: as `append` before it writes, and if ``prices`` can't be read.
    """
    price_list = load_prices(prices, local=isinstance(open_store(table.settings.processed), LocalStore))
    ground = discover(table)
    files, warnings = ground.inputs, ground.warnings
    head, known = ground.head, ground.spec
    with closing(Apart(table.resources.landing)) as apart:
        expected = _expected_spec(table, apart, files, known)
        spec = expected.spec
        previews = [*_previews(table, apart, files, spec)] if spec else []
    notes = [*warnings, *expected.notes, *without_operations(table, ground.entries)]
    if spec is None and files:
        notes.append(f"0 of {count(len(files), 'landing file')} can be read, and `run` would refuse them")
    batches = last_batches(table.history, head.number) if head else []
    nights = last_nights(table.history)
    sizes = learn_sizes(spec, nights, [b.body for b in batches], expected.sample) if spec else Sizes()
    landed: Counter[str] = Counter()
    for one in previews:
        landed.update(one.partitions)
    emptied: Collection[str] = ()
    if full and spec and landed:  # a full extract also touches partitions without a row of it
        shown = ground.snapshot.body if ground.snapshot else None
        emptied = partitions_in_scope(table.history, spec, full, landed, shown, ground.start - 1) - {*landed}
    arrivals = {p: Arrival(rows, sizes.appended.at(rows * sizes.kept)) for p, rows in landed.items() if selected(p)}
    arrivals |= {p: Arrival(0, 0.0, 0) for p in emptied if selected(p)}
    partitions = plan_merges(table, sizes, arrivals, head.number if head else -1, selected, full=full is not None)
    landing_bytes = sum(f.size for f in files)
    reads = [_reads(f, format_of(f.path, table.settings.format), exists=known is not None) for f in files]
    merge_bytes = sum(p.bytes_read + p.bytes_written for p in partitions)
    if spec is not None and (spec.hash_columns or not spec.partition_by):
        notes += far_count(spec, _sizes_after(table.history, sizes, arrivals), table.settings.bucket_bytes, cores())
    return Plan(
        files=len(files),
        landing_bytes=landing_bytes,
        rows=sum(a.rows for a in arrivals.values()),
        partitions=partitions,
        append_read=sum(f.size * times for f, (_, times) in zip(files, reads, strict=True)),
        append_written=round(sum(a.bytes for a in arrivals.values())),
        requests=_requests(ground, len(nights), sizes.objects if files else 0, partitions),
        landing_requests={
            "list": 1,
            "get": sum(opened for opened, _ in reads),
            "head": 0 if table.resources.landing.pinned else len(files),
        },
        reads=read_cost(ground.snapshot.body.partitions if ground.snapshot else {}),
        seconds=learn_seconds(table.history.objects, nights, batches, landing_bytes, merge_bytes),
        prices=price_list,
        nights=len(nights),
        estimated=any(p.share < 1 for p in previews),
        notes=(*notes, *_left_out(previews)),
    )


def _sizes_after(history: History, sizes: Sizes, arrivals: Mapping[str, Arrival]) -> dict[str, float]:
    """About how many bytes each partition has once what arrives is merged."""
    snapshot = history.last_snapshot()
    shown = {partition: one.bytes for partition, one in snapshot.body.partitions.items()} if snapshot else {}
    gained = {
        p: arrival.rows * sizes.kept * max(0.0, sizes.growth) * sizes.stored.slope for p, arrival in arrivals.items()
    }
    return {partition: shown.get(partition, 0) + gained.get(partition, 0.0) for partition in {*shown, *gained}}


def _reads(file: LandingInput, kind: LandingFormat, *, exists: bool) -> tuple[int, int]:
    """How often append opens a landing file, and how often it reads all of it: for columns or types, for rows, for the hash."""
    if kind.seekable:
        large = file.size > WHOLE_BYTES
        return 2 + large, 1 + large
    if kind.typed:
        return 2, 1
    return (1 if exists and kind.names_by_row else 2), (1 if exists else 2)


def refuse_above(planned: Plan, max_bytes: int | None, max_cost: float | None) -> None:
    """Raise RefusedError if the plan is above a limit; None is no limit."""
    over = []
    if max_bytes is not None and planned.bytes > max_bytes:
        over.append(f"{planned.bytes:,} bytes read and written (at most {max_bytes:,})")
    if max_cost is not None and planned.cost.total > max_cost:
        cost = planned.cost
        over.append(f"{cost.total:.4f} {cost.currency} at prices of {cost.as_of} (at most {max_cost:g})")
    if over:
        raise RefusedError(
            "over-limit",
            f"The run would need {' and '.join(over)}: {count(planned.files, 'new landing file')}, "
            f"{count(len(planned.partitions), 'partition')} to merge. Nothing was written.",
            next="run `lakeupsert plan` to see what is so large; then raise the limit, or remove landing files",
        )


# ---------------------------------------------------------------- what arrived


@dataclass(frozen=True)
class _ExpectedSpec:
    """The spec that the next batch would have, None if no file can be read; and warnings.

    ``sample``: rows and bytes of parts of a first night, which show how large its rows become.
    """

    spec: TableSpec | None
    notes: list[str] = field(default_factory=list)
    sample: tuple[tuple[float, float], ...] = ()


def _expected_spec(
    table: OpenTable, apart: Apart, files: Sequence[LandingInput], known: TableSpec | None
) -> _ExpectedSpec:
    """Of text files, only their beginnings are read."""
    if not files:
        return _ExpectedSpec(known)
    sizes = _shares(files, table.history.reading)
    reading, schema, text = table.history.reading, known.schema if known else None, table.declaration.text_columns
    found = apart.map(partial(_survey, reading, schema, text), [*sizes.items()])
    surveys = {file: one for file, one in zip(files, found, strict=True) if isinstance(one, Survey)}
    if known is None:
        return _first_spec(table, apart, surveys, sizes) if surveys else _ExpectedSpec(None)
    unfit = {one.path for one in unfit_files(known, list(surveys.values()))}
    spec, warnings = plan_spec(table, known, [s for s in surveys.values() if s.path not in unfit], ahead=True)
    names = (
        (s.path, {known.table_name_of(n): s.own.get(n, n) for n in s.schema.names})
        for s in surveys.values()
        if s.schema is not None
    )
    renamed = ((path, spec.under_old_names(of_file)) for path, of_file in names)
    return _ExpectedSpec(spec, [*warnings, *under_old_names(table, renamed)])


def _first_spec(
    table: OpenTable, apart: Apart, surveys: Mapping[LandingInput, Survey], sizes: Mapping[LandingInput, int]
) -> _ExpectedSpec:
    try:
        spec, warnings = plan_spec(table, None, list(surveys.values()), ahead=True)
    except ConfigurationError as e:
        if e.code != "unfit-type" or all(s.typed for s in surveys.values()):
            raise
        spec, warnings = plan_spec(table, None, list(surveys.values()), ahead=True, fitted=True)
        warnings.append(f"rows with other values go to quarantine; if no row is left, the run fails: {e.message}")
    largest = max(surveys, key=lambda f: f.size)
    sample: tuple[tuple[float, float], ...] = ()
    with suppress(EndedError):
        rows = apart.read(read_beginning, largest, SAMPLE_ROWS, sizes[largest], table.history.reading).rows
        sample = tuple((len(part), parquet_bytes(part)) for part in (rows.slice(0, 1), rows) if len(part))
    return _ExpectedSpec(spec, warnings, sample)


def _survey(
    reading: Reading,
    known: pa.Schema | None,
    text: frozenset[str],
    landing: ObjectReader,
    file: LandingInput,
    size: int,
) -> Survey | None:
    """What append finds first in a file (of a text file, in its beginning); None if the file can't be read."""
    with suppress(Unreadable, NotFoundError):
        if not format_of(file.path, reading.format).typed:
            return read_beginning(landing, file, 0, size, reading, known, text).survey
        found = survey(landing, file, reading, known, text)
        return found if found.schema is not None else None
    return None


def _shares(files: Sequence[LandingInput], reading: Reading) -> dict[LandingInput, int]:
    """How many bytes are read of each file: of text and Avro `TEXT_BYTES` in all, small files whole; 0 for others, which say
    where their columns are."""
    shares = dict.fromkeys(files, 0)
    text = sorted((f for f in files if not format_of(f.path, reading.format).seekable), key=lambda f: f.size)
    left = TEXT_BYTES
    for i, file in enumerate(text):
        shares[file] = min(file.size, left // (len(text) - i))
        left -= shares[file]
    return shares


def _previews(table: OpenTable, apart: Apart, files: Sequence[LandingInput], spec: TableSpec) -> Iterator[Preview]:
    reading = table.history.reading
    found = apart.map(partial(_preview, reading, spec), [*_shares(files, reading).items()])
    for file, one in zip(files, found, strict=True):
        if one is not None:
            yield Preview(file.path, {}, unreadable=str(one)) if isinstance(one, EndedError) else one


def _preview(reading: Reading, spec: TableSpec, landing: ObjectReader, file: LandingInput, size: int) -> Preview | None:
    with suppress(NotFoundError):
        return preview(landing, file, reading, spec, size)
    return None


def _left_out(previews: Sequence[Preview]) -> Iterator[str]:
    """Warnings about files that can't be read, and about rows that name no partition."""
    if unreadable := [f"{one.path!r}: {one.unreadable}" for one in previews if one.unreadable is not None]:
        yield f"{count(len(unreadable), 'landing file')} can't be read and would be set aside; {unreadable[0]}"
    if rows := sum(one.unplaced for one in previews):
        yield (
            f"{count(rows, 'row')} of the new files {'names' if rows == 1 else 'name'} no partition. The key index decides where "
            "they count, so the plan leaves them out, and partitions that only they touch"
        )


# ---------------------------------------------------------------- requests and money


def _requests(ground: Ground, nights: int, objects: int, partitions: Sequence[PlannedPartition]) -> dict[Call, int]:
    """Requests of `run` in one process to the processed zone.

    For each partition: its manifest and its files are read, one is written and a version is created. For the table: the ledger,
    the nights, the heads of the chains in each step, and listings of all manifests. ``objects``: how many a batch has.
    """
    head, stored = ground.head, ground.snapshot.body.manifests if ground.snapshot else 0
    ends = head.number + 1 if head else 0
    entries = ends - sum(count - 1 for _, count in header_blocks(ends))
    versions = sum(p.versions for p in partitions)
    pages = 1 + stored // LISTED_TOGETHER if stored else len(partitions)
    return {
        "get": entries + 4 + nights + sum(p.exists + p.objects for p in partitions),
        "head": 0,
        "list": 12 + pages + min(pages, len(partitions)) + 2 * min(pages, sum(p.dirty for p in partitions)),
        "put": versions + objects,
        "create": versions + bool(objects) + bool(partitions) + (2 if objects and head is None else 0),
        "delete": 0,
    }
