"""Nights and the adoption of the lake of `lake`, on paper, and the same by Iceberg (`iceberg`).

It multiplies what the other parts measured on their largest tables; nothing of this size was run. How often a file is read, and
by how many units of work, follows from the product's own constants. `ASSUMED` is what it takes from elsewhere. All assumptions
are printed with the result.

*delta* is a night that pays nothing off, *rewrite* one that writes everything. *auto* is the average night: delta, and what
arrived is folded once for each size of deltas, and read and written 2 / MOST_DEBT times more (ADR 0014).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pyarrow as pa

from benchmarks.scale import iceberg
from benchmarks.scale.lake import (
    ADOPTED_FILE_MB,
    CAME_MB,
    NIGHT_MB,
    PARTITION_MB,
    PARTITION_ROWS,
    PARTITIONS,
    REQUEST_MB,
    TABLE_MB,
    Effort,
    add,
    puts,
)
from benchmarks.scale.lake import ASSUMED as OF_BOTH
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import RUN_EXPANSION, ArrowEngine
from lakeupsert.engine.cut import HELD_BYTES
from lakeupsert.engine.runs import runs
from lakeupsert.operations.plan.prices import Prices
from lakeupsert.pipeline.merge.cuts import ALONE_BUCKETS, MOST_READS
from lakeupsert.pipeline.strategy import MOST_DEBT, TOGETHER
from lakeupsert.rows.checksums import WHOLE_BYTES
from lakeupsert.rows.datafiles import decoded_width
from lakeupsert.rows.filewriter import ROW_GROUP_ROWS
from lakeupsert.storage.base import Call

Measured = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What each part found, by its name and that of the measurement."""
Keys = Literal["clustered", "scattered"]

BUCKET_MB = TableSettings(landing="", processed="", key=(), partition_by=()).bucket_bytes / 1e6
BUCKETS = 2 ** math.ceil(math.log2(PARTITION_MB / BUCKET_MB))
GROUP_MB = PARTITION_MB * ROW_GROUP_ROWS / PARTITION_ROWS
_DECIDING = [pa.string(), pa.timestamp("us")]
_OTHERS = [pa.int64(), pa.string(), *[pa.int32()] * 7]
WIDTH_SHARE = sum(map(decoded_width, _DECIDING)) / sum(map(decoded_width, [*_DECIDING, *_OTHERS]))
"""What the product takes for the share of key and ordering columns in a base (`units`), for the rows of `benchmarks.rows`."""
SIZES = math.log(MOST_DEBT * PARTITION_MB / CAME_MB, TOGETHER)
"""Of deltas, in a bucket that is about to be rewritten."""
DELTAS = (TOGETHER - 1) / 2 * SIZES
"""Of a bucket, on average."""
PACKS = math.ceil(RUN_EXPANSION * BUCKET_MB * 1e6 / HELD_BYTES)
"""That a cut of one bucket's bytes writes."""
ADOPTED_FILES = math.ceil(PARTITION_MB / ADOPTED_FILE_MB)
CUTS = len(list(runs([ADOPTED_FILE_MB] * ADOPTED_FILES, lambda mb: mb, BUCKET_MB)))
"""Units that cut an adopted partition."""
WORKERS = (64, 256, 1024)


def delta_reads() -> float:
    """Requests of a merge for the deltas of its bucket: for each the footer, and what decides of each row group."""
    found = 0.0
    for size in range(math.ceil(SIZES)):
        mb = CAME_MB / BUCKETS * TOGETHER**size
        of_one = 1 if mb * 1e6 <= WHOLE_BYTES else 1 + math.ceil(mb / GROUP_MB)
        found += min(1, SIZES - size) * (TOGETHER - 1) / 2 * of_one
    return found


CASES: tuple[tuple[str, Keys], ...] = (
    ("delta", "clustered"),
    ("delta", "scattered"),
    ("auto", "scattered"),
    ("rewrite", "scattered"),
)

ASSUMED = (
    "Seconds of processor per MB that append takes, and per MB that dedupe reads and writes, stay what they are in `rows`; of "
    "the adoption, in `adoption`.",
    "So do the share of the stored bytes that dedupe reads, and what append and dedupe write for each MB that lands. Keys are "
    "numbers as text there, which compress well; of random keys a delta's merge reads more.",
    f"A partition has {BUCKETS} buckets, and a row group {ROW_GROUP_ROWS:,} rows, {GROUP_MB:.1f} MB. What arrives lies in "
    "pieces, and each bucket reads its own by one request.",
    f"A unit of work is a run of buckets that read up to {BUCKET_MB:.0f} MB together; a delta's merge counts as "
    f"{WIDTH_SHARE:.0%} of a base. Whoever does it asks for 4 lists and a create, if files were cut 5 lists. A worker takes "
    f"{ArrowEngine.partitions_per_call} units at a time, which share a manifest and the results of cuts. The last unit reads all "
    "results; publish lists and reads the manifest.",
    f"A bucket's merge reads the footer of its base, then all by requests of {REQUEST_MB:.0f} MB, since Arrow joins what lies "
    "together; a delta's merge gets key and ordering columns of each row group by one. It reads, on average, "
    f"{DELTAS:.0f} deltas in the same way, so by {delta_reads():.0f} requests, and a vector of each file. It writes one file, "
    "larger ones in parts, and its vectors.",
    f"The first merge of an adopted partition cuts its files first, since more than {MOST_READS} merges would read each. A unit "
    f"cuts up to {BUCKET_MB:.0f} MB of files, read by such requests, to {PACKS} packs, of which every bucket reads its piece.",
)


def night(strategy: str, keys: Keys, measured: Measured) -> Effort:
    """A night. Raises KeyError or ValueError if `rows` measured no such table."""
    rows = measured["rows"]
    if strategy == "auto":
        anew = (SIZES + 2 / MOST_DEBT) * NIGHT_MB
        processor = _seconds_a_mb(_largest(rows, f"rewrite {keys}"), "dedupe_") * 2 * anew
        paid: dict[Call, float] = {"get": anew / REQUEST_MB, "put": anew / BUCKET_MB * puts(BUCKET_MB)}
        return night("delta", keys, measured) + Effort(processor, anew, anew, paid)
    m, scattered = _largest(rows, f"{strategy} {keys}"), _largest(rows, f"{strategy} scattered")
    nights, share = NIGHT_MB / m["mb_landed"], share_read(m)
    is_delta = strategy == "delta"
    read = TABLE_MB * share
    written = m["dedupe_mb_written"] * (nights if is_delta else TABLE_MB / m["mb_stored"])
    merges = PARTITIONS * BUCKETS
    reads = TABLE_MB / GROUP_MB * share / share_read(scattered) if is_delta else TABLE_MB / REQUEST_MB
    of_merges: dict[Call, float] = {"get": reads + 2 * merges, "put": merges * puts(written / merges)}
    vectors_and_deltas: dict[Call, float] = {"get": merges * (1 + DELTAS + delta_reads()), "put": merges}
    of_units = _of_units(units_of((CAME_MB + PARTITION_MB * (WIDTH_SHARE if is_delta else 1)) / BUCKETS))
    return Effort(
        m["append_processor"] * nights + _seconds_a_mb(m, "dedupe_") * (read + written),
        m["append_mb_read"] * nights + read,
        m["append_mb_written"] * nights + written,
        add(of_merges, vectors_and_deltas if is_delta else {}, of_units),
    )


def adoption(measured: Measured) -> Effort:
    """The first merge of every adopted partition, without what arrives with it. Raises KeyError or ValueError as `night`."""
    m = _largest(measured["adoption"], "")
    read, written = (TABLE_MB * m[f"mb_{what}"] / m["mb_adopted"] for what in ("read", "written"))
    packs, bucket_mb = CUTS * PACKS, PARTITION_MB / BUCKETS
    of_a_partition: dict[Call, float] = {
        "get": PARTITION_MB / REQUEST_MB + ADOPTED_FILES + packs * BUCKETS,
        "put": packs * puts(PARTITION_MB / packs) + BUCKETS * puts(bucket_mb),
    }
    of_all: dict[Call, float] = {call: PARTITIONS * n for call, n in of_a_partition.items()}
    requests = add(of_all, _of_units(units_of(bucket_mb), CUTS))
    return Effort(_seconds_a_mb(m) * (read + written), read, written, requests)


def adopt() -> Effort:
    """The command: it reads footers, and writes manifests."""
    files = PARTITIONS * ADOPTED_FILES
    requests: dict[Call, float] = {
        "list": files / 1000 + 2 * PARTITIONS,
        "get": files + PARTITIONS,
        "create": PARTITIONS,
    }
    return Effort(0.0, 0.0, 0.0, requests)


def units_of(mb: float) -> int:
    """In how many units a partition is merged, each of whose buckets reads so many MB."""
    if mb * BUCKETS <= ALONE_BUCKETS * BUCKET_MB:
        return 1
    return len(list(runs([mb] * BUCKETS, lambda size: size, BUCKET_MB)))


def _of_units(merges: int, cuts: int = 0) -> dict[Call, float]:
    """Requests of all partitions beside those for data files."""
    units = merges + cuts
    workers = math.ceil(units / ArrowEngine.partitions_per_call)
    manifests = 2 + workers  # also of the worker that finds the units, and of publish
    return {
        "list": PARTITIONS * (3 + (5 if cuts else 4) * units),
        "get": PARTITIONS * (manifests + merges + workers * cuts),
        "create": PARTITIONS * (units + 1),
    }


def report(measured: Measured, prices: Prices) -> Iterator[str]:
    """Markdown."""
    try:
        efforts = {f"night, {strategy}, keys {keys}": night(strategy, keys, measured) for strategy, keys in CASES}
        efforts |= {"adopt the lake": adopt(), "first merge of all that was adopted": adoption(measured)}
        share = share_read(_largest(measured["rows"], "delta scattered"))
    except (KeyError, ValueError):
        yield "Not reckoned: `rows` and `adoption` have not measured their largest tables, with strategies delta and rewrite."
        return
    assumed = [*OF_BOTH, *ASSUMED]
    try:
        efforts |= iceberg.efforts(share, measured["peers"])
        assumed += iceberg.assumed(measured["peers"])
    except KeyError:
        assumed.append("Iceberg is not reckoned: `peers` has not measured it.")
    yield (
        f"| | GB read | GB written | million requests | worker hours | {prices.currency} | "
        + " | ".join(f"{n:,} workers" for n in WORKERS)
        + " | requests a second with most |"
    )
    yield "|---|" + "---:|" * (6 + len(WORKERS))
    for name, effort in efforts.items():
        requests, seconds = sum(effort.requests.values()), effort.worker_seconds
        cells = [
            name,
            *(f"{x:,.0f}" for x in (effort.mb_read / 1000, effort.mb_written / 1000)),
            f"{requests / 1e6:,.1f}",
            f"{seconds / 3600:,.0f}",
            f"{effort.cost(prices):,.2f}",
            *(_time(seconds / workers) for workers in WORKERS),
            f"{requests * max(WORKERS) / seconds:,.0f}",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield (
        f"By the rates of {_millions(measured['rows'])} million stored rows and {_millions(measured['adoption'])} million "
        f"adopted ones, and prices of {prices.as_of}. A delta's merge of scattered keys reads {share:.1%} of the stored bytes. "
        f"If each of the {BUCKETS} merges of an adopted partition read all of it, as without a cut, the first merges would read "
        f"{TABLE_MB * BUCKETS / 1e9:.1f} PB. Assumed:"
    )
    yield ""
    yield from (f"- {text}" for text in assumed)


def share_read(m: Mapping[str, Any]) -> float:
    """Of the stored bytes, by dedupe."""
    return float(m["dedupe_mb_read"] / m["mb_stored"])


def _millions(of_part: Mapping[str, Mapping[str, Any]]) -> int:
    return max(int(name.split()[0]) for name in of_part)


def _largest(of_part: Mapping[str, Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return of_part[f"{_millions(of_part)} {kind}".strip()]


def _seconds_a_mb(m: Mapping[str, Any], of: str = "") -> float:
    """Of processor, for what is read and written."""
    return float(m[f"{of}processor"] / (m[f"{of}mb_read"] + m[f"{of}mb_written"]))


def _time(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.0f} h"
