"""What the next run will do, before anything is written; and, once its batch is committed, what its merges will.

Reads     what `append` looks at first (landing zone, ledger, spec); of each new landing file its partition column, of text
          a bounded part; the last snapshots; of partitions that are dirty already the manifests. Never a data file
Writes    nothing, and sends nothing

    new landing files -> rows by partition -> their bytes, by habit -> each touched partition, step by step as dedupe goes

How large rows are, how many of them are new keys, and how long it takes is learned from the last nights (`operations.habits`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lakeupsert.config import Reading
from lakeupsert.errors import RefusedError
from lakeupsert.landing.accept import (
    TYPED,
    WHOLE_BYTES,
    LandingInput,
    Preview,
    Survey,
    beginning,
    first_rows,
    format_of,
    preview,
    survey,
)
from lakeupsert.landing.accept import UnreadableFileError as Unreadable
from lakeupsert.operations.habits import (
    Sizes,
    last_batches,
    last_nights,
    learn_seconds,
    learn_sizes,
    parquet_bytes,
)
from lakeupsert.operations.prices import Prices, load_prices
from lakeupsert.pipeline.append import (
    AppendResult,
    look_for_files,
    plan_spec,
    text_columns,
    under_old_names,
    unfit_files,
)
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import next_step
from lakeupsert.pipeline.strategy import SMALL_BYTES, Incoming, SplitRule, as_whole_rows, in_place
from lakeupsert.storage import LocalStore, NotFoundError, open_store
from lakeupsert.storage.base import Call
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import HEADERS_TOGETHER, LedgerEntry
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest, share
from lakeupsert.table.snapshot import Shown
from lakeupsert.table.spec import TableSpec

TEXT_BYTES = 32 << 20
"""Bytes of new text files that are read, of all together; where they are more, partitions and rows are estimated."""
SAMPLE_ROWS = 10_000
"""Rows of a first night that are written to memory, to see how large they become."""


@dataclass(frozen=True)
class Cost:
    """In ``currency``, at prices as of ``as_of``; ``compute`` is None where nobody knows how long it takes."""

    requests: float
    transfer: float
    compute: float | None
    currency: str
    as_of: str

    @property
    def total(self) -> float:
        return self.requests + self.transfer + (self.compute or 0.0)


@dataclass(frozen=True)
class PlannedPartition:
    """One partition that a run will merge.

    Attributes:
        rows: that new landing files bring for it.
        dirty: batches of before are to be merged, too.
        bytes_read: of all files that the merges open; of those that stay in place they read keys and ordering columns alone.
        versions: how many manifests will be made.
        objects: how many data files these read.
        exists: it has a manifest.
        strategy: of the last of these merges, rewrite or delta.
    """

    partition: str
    rows: int
    dirty: bool
    bytes_read: int
    bytes_written: int
    versions: int
    objects: int
    exists: bool
    strategy: str


@dataclass(frozen=True)
class Plan:
    """What the next run will do. Bytes are compressed; requests are those to the processed zone, as `run` counts them.

    Attributes:
        files, landing_bytes, rows: new landing files, and those of their rows that name a (selected) partition.
        append_read: bytes, each file as often as append reads it.
        seconds: None where no night was published yet, or what is to be done is of a kind that none of them was.
        nights: how many nights this was learned from.
        estimated: whether text files were too large to be read whole, so that partitions may be missing.
        notes: what else a person should know.
    """

    files: int
    landing_bytes: int
    rows: int
    partitions: tuple[PlannedPartition, ...]
    append_read: int
    append_written: int
    requests: dict[Call, int]
    landing_requests: dict[Call, int]
    seconds: float | None
    cost: Cost
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


@dataclass(frozen=True)
class Predicted:
    """Bytes that the merges of a run will read and write."""

    bytes_read: int
    bytes_written: int


def plan(table: OpenTable, selected: Callable[[str], bool], prices: str | Path | None) -> Plan:
    """What `run` would do now with the selected partitions.

    Args:
        prices: a file of prices; None: the shipped ones.
    Raises:
        ConfigurationError: what `append` raises before it writes, and where ``prices`` can't be read.
    """
    store = open_store(table.settings.processed)
    price_list = load_prices(prices, local=isinstance(store, LocalStore))
    files, warnings = look_for_files(table)
    head, known = table.ledger_head(), table.head_spec()
    notes = list(warnings)
    spec: TableSpec | None = known.body if known else None
    sample: tuple[tuple[float, float], ...] = ()
    if files and spec is None:
        spec, sample = _first_night(table, files, notes)
    elif files and spec is not None:
        spec = _next_spec(table, files, spec, notes)
    if head:
        notes += table.without_operations(table.headers(head.number))
    if spec is None and files:
        notes.append(f"none of the {len(files)} landing files can be read, and `run` would refuse them")
    previews = [*_previews(table, files, spec, notes)] if spec else []
    batches = last_batches(table, head.number) if head else []
    nights = last_nights(table)
    sizes = learn_sizes(spec, nights, [b.body for b in batches], sample) if spec else Sizes()
    incoming = {
        partition: _Incoming(rows, sizes.appended.at(rows * sizes.kept))
        for partition, rows in _rows(previews).items()
        if selected(partition)
    }
    partitions = _merges(table, sizes, incoming, head.number if head else -1, selected)
    landing_bytes = sum(f.size for f in files)
    reads = [_reads(f, format_of(f.path, table.settings.format), known is not None) for f in files]
    done = Plan(
        files=len(files),
        landing_bytes=landing_bytes,
        rows=sum(i.rows for i in incoming.values()),
        partitions=partitions,
        append_read=sum(f.size * times for f, (_, times) in zip(files, reads, strict=True)),
        append_written=round(sum(i.bytes for i in incoming.values())),
        requests=_requests(head, len(nights), sizes.objects if files else 0, partitions),
        landing_requests={
            "list": 1,
            "get": sum(opened for opened, _ in reads),
            "head": 0 if table.landing.pinned else len(files),
        },
        seconds=learn_seconds(
            table, nights, batches, landing_bytes, sum(p.bytes_read + p.bytes_written for p in partitions)
        ),
        cost=Cost(0.0, 0.0, None, price_list.currency, price_list.as_of),
        nights=len(nights),
        estimated=any(p.share < 1 for p in previews),
        notes=tuple(notes),
    )
    return replace(done, cost=_cost(done, price_list))


def _reads(file: LandingInput, kind: str | None, exists: bool) -> tuple[int, int]:
    """How often append opens a landing file, and how often it reads all of it: for columns or types, for rows, for its hash."""
    if kind in ("parquet", "orc"):
        large = file.size > WHOLE_BYTES
        return 2 + large, 1 + large
    if kind == "avro":
        return 2, 1
    return (1 if exists and kind == "jsonl" else 2), (1 if exists else 2)


def predicted(table: OpenTable, appended: AppendResult | None) -> Predicted | None:
    """What `dedupe` will read and write, once the batch is committed: then rows by partition are no estimate any more.

    For a partition that is not dirty from before it takes no request. None where there is nothing to merge.
    """
    head = table.ledger_head()
    if head is None:
        return None
    entry = appended.entry if appended else None
    before = appended.number - 1 if appended else head.number
    batches = [*(b.body for b in last_batches(table, before)), *([entry] if entry else [])]
    sizes = learn_sizes(table.spec(head.body.spec_version), last_nights(table), batches, ())
    touched = entry.touched if entry else {}
    incoming = {p: _Incoming(sum(f.rows for f in t.files), t.bytes, len(t.files)) for p, t in touched.items()}
    merges = _merges(table, replace(sizes, kept=1.0), incoming, before, lambda partition: True)
    if not merges:
        return None
    return Predicted(sum(m.bytes_read for m in merges), sum(m.bytes_written for m in merges))


def refuse_above(planned: Plan, max_bytes: int | None, max_cost: float | None) -> None:
    """Raise RefusedError where the plan is over a limit; None is no limit."""
    over = []
    if max_bytes is not None and planned.bytes > max_bytes:
        over.append(f"{planned.bytes:,} bytes read and written (at most {max_bytes:,})")
    if max_cost is not None and planned.cost.total > max_cost:
        cost = planned.cost
        over.append(f"{cost.total:.4f} {cost.currency} at prices of {cost.as_of} (at most {max_cost:g})")
    if over:
        raise RefusedError(
            "over-limit",
            f"The run would take {' and '.join(over)}: {planned.files:,} new landing files, {len(planned.partitions):,} "
            "partitions to merge. Nothing was written.",
            next="run `lakeupsert plan` to see what is so large; then raise the limit, or take landing files away",
        )


# ---------------------------------------------------------------- what arrived


def _next_spec(table: OpenTable, files: Sequence[LandingInput], known: TableSpec, notes: list[str]) -> TableSpec:
    """The spec that the next batch would have, from the beginnings of its text files."""
    reading = table.settings.reading
    sizes = _shares(files, reading)
    found = [_survey(table, file, sizes.get(file.path, 0), known) for file in files]
    surveys = [survey for survey in found if survey is not None]
    unfit = {one.path for one in unfit_files(known, surveys)}
    spec, warnings = plan_spec(table, known, [s for s in surveys if s.path not in unfit], ahead=True)
    notes += warnings
    names = ((s.path, {known.called(n): s.own.get(n, n) for n in s.schema.names}) for s in surveys)
    renamed = ((path, spec.under_old_names(of_file)) for path, of_file in names)
    notes += under_old_names(table, renamed)
    return spec


def _survey(table: OpenTable, file: LandingInput, size: int, known: TableSpec | None) -> Survey | None:
    """What append finds first in a file, of text in its beginning; None where it can't be read."""
    reading = table.settings.reading
    schema, text = known.schema if known else None, text_columns(table)
    if format_of(file.path, reading.format) in TYPED:
        found = survey(table.landing, file, reading, schema, text)
        return found if found.schema is not None else None
    with suppress(Unreadable, NotFoundError):
        return beginning(table.landing, file, 0, size, reading, schema, text).survey
    return None


def _first_night(
    table: OpenTable, files: Sequence[LandingInput], notes: list[str]
) -> tuple[TableSpec | None, tuple[tuple[float, float], ...]]:
    """The spec that the first batch would make, from the beginnings of its text files; and how large its rows become.

    None where no file can be read. ``notes`` get what that batch would warn of.
    """
    reading = table.settings.reading
    sizes = _shares(files, reading)
    found = {file: _survey(table, file, sizes.get(file.path, 0), None) for file in files}
    surveys = {file: one for file, one in found.items() if one is not None}
    if not surveys:
        return None, ()
    spec, warnings = plan_spec(table, None, list(surveys.values()), ahead=True)
    notes += warnings
    largest = max(surveys, key=lambda f: f.size)
    sample = first_rows(table.landing, largest, SAMPLE_ROWS, sizes.get(largest.path, 0), reading)
    return spec, tuple((len(rows), parquet_bytes(rows)) for rows in (sample.slice(0, 1), sample) if len(rows))


def _shares(files: Sequence[LandingInput], reading: Reading) -> dict[str, int]:
    """Of each file that is read from its beginning how many bytes are: `TEXT_BYTES` in all, small files whole."""
    text = sorted(
        (f for f in files if format_of(f.path, reading.format) not in ("parquet", "orc")), key=lambda f: f.size
    )
    left, found = TEXT_BYTES, {}
    for i, file in enumerate(text):
        found[file.path] = min(file.size, left // (len(text) - i))
        left -= found[file.path]
    return found


def _previews(table: OpenTable, files: Sequence[LandingInput], spec: TableSpec, notes: list[str]) -> Iterator[Preview]:
    sizes = _shares(files, table.settings.reading)
    unreadable = []
    for file in files:
        try:
            found = preview(table.landing, file, table.settings.reading, spec, sizes.get(file.path, 0))
        except NotFoundError:
            continue
        if found.unreadable is not None:
            unreadable.append(f"{found.path!r}: {found.unreadable}")
        yield found
    if unreadable:
        notes.append(f"{len(unreadable)} landing files can't be read and would be set aside; {unreadable[0]}")


def _rows(previews: Iterable[Preview]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in previews:
        for partition, rows in one.partitions.items():
            found[partition] = found.get(partition, 0) + rows
    return found


# ---------------------------------------------------------------- the merges


@dataclass(frozen=True)
class _Incoming:
    """What one batch brings for one partition: accepted rows, bytes of its appended file, and how many there are."""

    rows: int
    bytes: float
    files: int = 1


@dataclass(frozen=True)
class _Stored:
    rows: float
    bytes: float

    def and_merged(self, rows: float, sizes: Sizes) -> "_Stored":
        if not self.rows:
            return _Stored(rows, sizes.stored.at(rows))
        gained = max(rows * sizes.growth, -self.rows)
        return _Stored(self.rows + gained, max(0.0, self.bytes + gained * sizes.stored.slope))


def _merges(
    table: OpenTable,
    sizes: Sizes,
    incoming: Mapping[str, _Incoming],
    up_to: int,
    selected: Callable[[str], bool],
) -> tuple[PlannedPartition, ...]:
    """Each selected partition that a run would merge, with what the ledger has up to ``up_to`` and with what comes."""
    snapshot = table.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    behind = table.unpublished(snapshot.body if snapshot else None, up_to) if up_to >= 0 else {}
    found = []
    for partition in sorted({*behind, *incoming}):
        if not selected(partition):
            continue
        rows, read, written, versions, objects = 0, 0, 0, 0, 0
        buckets: tuple[BucketEntry, ...] = (BucketEntry(id=""),)
        if partition in behind:
            head = table.newest(partition, snapshot)
            exists = head is not None
            buckets = (head.body.buckets if head else ()) or buckets
            while step := next_step(table, partition, behind[partition], snapshot.body if snapshot else None, head):
                buckets = step.buckets
                if step.tasks:  # a restore alone moves no bytes
                    read, objects = read + step.bytes, objects + len(step.read)
                    came = sum(f.rows for f in dict.fromkeys(f for t in step.tasks for b in t.batches for f in b))
                    kept = [next((t.kept for t in step.tasks if share(b, t)), ()) for b in buckets]
                    buckets, wrote = _merged(buckets, kept, came, sizes)
                    written += wrote
                versions += 1
                head = _imagined(partition, step.up_to, buckets)
        elif exists := partition in shown:
            buckets = _buckets(table, partition, shown[partition])
        dirty = versions > 0
        if partition in incoming:
            next_one = incoming[partition]
            rows = next_one.rows
            stored = [f for b in buckets for f in (*b.data, *b.tombstones)]
            read += sum(f.bytes for f in stored) + round(next_one.bytes)
            objects += next_one.files + sum(len(b.data) for b in buckets)
            spec = table.head_spec()
            types = spec.body.base_schema.types if spec else ()
            rule = SplitRule.of(table.settings.bucket_bytes, types, buckets, rows)
            parts = {b: 0.5**b.bits for b in buckets}
            comes = {
                b: Incoming(next_one.bytes * part, rows * part, next_one.files * part) for b, part in parts.items()
            }
            if table.settings.mode == "columns":
                comes = {b: as_whole_rows(b, came) for b, came in comes.items()}
            kept = [in_place(table.strategy, b, came, rule)[0] for b, came in comes.items()]
            buckets, wrote = _merged(buckets, kept, rows * sizes.kept, sizes)
            written, versions = written + wrote, versions + 1
        if versions:
            last = "delta" if any(b.deltas for b in buckets) else "rewrite"
            planned = PlannedPartition(partition, rows, dirty, read, written, versions, objects, exists, last)
            found.append(planned)
    return tuple(found)


def _buckets(table: OpenTable, partition: str, shown: Shown) -> tuple[BucketEntry, ...]:
    """What is stored of a clean partition: as one base file where that is enough to tell how it will be merged."""
    if table.strategy == "rewrite" or (table.strategy == "auto" and shown.bytes < SMALL_BYTES):
        file = DataFile(name="", rows=shown.rows, bytes=shown.bytes)
        return (BucketEntry(id="", base=(file,) if file.rows else ()),)
    return table.version(partition, shown.version).buckets


def _merged(
    buckets: Sequence[BucketEntry], kept: Sequence[Sequence[DataFile]], rows: float, sizes: Sizes
) -> tuple[tuple[BucketEntry, ...], int]:
    """What a merge of so many rows that settled would make of some buckets, of which it keeps these files, and about how
    many bytes it would write. A split changes neither."""
    pairs = zip(buckets, kept, strict=True)
    made = [_bucket_merged(b, of_bucket, rows * 0.5**b.bits, sizes) for b, of_bucket in pairs]
    return tuple(bucket for bucket, _ in made), sum(wrote for _, wrote in made)


def _bucket_merged(bucket: BucketEntry, kept: Sequence[DataFile], rows: float, sizes: Sizes) -> tuple[BucketEntry, int]:
    stored = _Stored(sum(f.live for f in bucket.data), sum(f.bytes for f in (*bucket.data, *bucket.tombstones)))
    if not kept:
        new = stored.and_merged(rows, sizes)
        file = DataFile(name="", rows=round(new.rows), bytes=round(new.bytes))
        base = (file,) if file.rows else ()
        return msgspec.structs.replace(bucket, settled=True, base=base, deltas=(), tombstones=()), file.bytes
    folded = [f for f in bucket.deltas if f not in kept]
    delta = DataFile(
        name="",
        rows=round(rows) + sum(f.rows for f in folded),
        bytes=round(sizes.stored.at(rows)) + sum(f.bytes for f in folded),
    )
    return msgspec.structs.replace(bucket, deltas=(*(f for f in bucket.deltas if f in kept), delta)), delta.bytes


def _imagined(partition: str, merged: int, buckets: tuple[BucketEntry, ...]) -> Link[Manifest]:
    """The version that a step would make, for the next step to begin from."""
    body = Manifest(partition=partition, merged=merged, spec_version=0, buckets=buckets)
    return Link(number=0, write_id="", parent=None, written_at="", body=body, read_at=0.0)


def _requests(
    head: Link[LedgerEntry] | None, nights: int, objects: int, partitions: Sequence[PlannedPartition]
) -> dict[Call, int]:
    """What `run` will ask of the processed zone.

    For a partition: its manifest listed and read by the merge, the same by publish, its files read and one written, a
    version created. For the table: the ledger, the nights, and by each step the heads of the chains. ``objects`` are those
    that the batch is written to, 0 where there is none.
    """
    entries = sum(divmod(head.number + 1, HEADERS_TOGETHER)) if head else 0
    versions = sum(p.versions for p in partitions)
    return {
        "get": entries + 4 + nights + sum(p.exists + p.objects + 1 + 2 * p.dirty for p in partitions),
        "head": 0,
        "list": 11 + len(partitions) // 8 + sum(2 + p.dirty for p in partitions),
        "put": versions + objects,
        "create": versions + bool(objects) + bool(partitions) + (2 if objects and head is None else 0),
        "delete": 0,
    }


def _cost(planned: Plan, prices: Prices) -> Cost:
    return Cost(
        requests=prices.of_requests(planned.requests) + prices.of_requests(planned.landing_requests),
        transfer=prices.of_bytes(
            planned.append_read + planned.dedupe_read, planned.append_written + planned.dedupe_written
        ),
        compute=None if planned.seconds is None else planned.seconds * prices.compute_second,
        currency=prices.currency,
        as_of=prices.as_of,
    )
