"""A night of the table that this was built for, on paper: 15 TB in 545 partitions of 27.5 GB, and 45 GB that touch all of them.

It multiplies what `rows` measured on its largest table; nothing of this size was run. `ASSUMED` is what it takes from
elsewhere, and is printed with the result. *delta* is a night that pays nothing off, *rewrite* one that writes everything;
*auto* is the average night: delta, and 2 / MOST_DEBT times the bytes that came read and written anew (ADR 0014).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lakeupsert.operations.prices import Prices
from lakeupsert.pipeline.strategy import MOST_DEBT
from lakeupsert.storage.base import Call

PARTITIONS, PARTITION_MB, NIGHT_MB = 545, 27_500.0, 45_000.0
TABLE_MB = PARTITIONS * PARTITION_MB
UNIT_MB, GROUP_MB = 256.0, 8.0
WAIT_SECONDS = 0.03
MB_A_SECOND = 80.0
WORKERS = (1, 64, 256, 1024)
CASES = (("delta", "clustered"), ("delta", "scattered"), ("auto", "scattered"), ("rewrite", "scattered"))

ASSUMED = (
    "Seconds of processor per MB that append takes, and per MB that dedupe reads and writes, stay what they are there.",
    "So do the share of the stored bytes that dedupe reads, and what append and dedupe write for each MB that lands.",
    f"A unit of work is {UNIT_MB:.0f} MB of a partition, and asks for what a small one does (tests/integration/test_s3.py): "
    "2 lists, 4 gets (its manifest twice, what came, a footer), a put (delta: 2, with its vectors), a create; then row groups.",
    f"A row group has {GROUP_MB:.0f} MB compressed. A delta's merge gets its key and its ordering columns by a request each.",
    f"A request takes {1000 * WAIT_SECONDS:.0f} ms, and a worker has one under way at a time: it has many, so this is too slow.",
    f"A worker has one processor and reads and writes {MB_A_SECOND:.0f} MB a second, during which it does not compute.",
    "Work is shared out evenly, also that of append (host spark), and no other limit is met: see requests a second, of which S3 "
    "takes 5,500 reads for each of its partitions, and makes more of these as a table grows.",
    "A machine of the price list has two processors and so two workers. SQS, what is stored, and starting machines cost nothing.",
)


@dataclass(frozen=True)
class Night:
    """Seconds of processors, MB read and written by append and dedupe, and requests."""

    processor: float
    mb_read: float
    mb_written: float
    requests: Mapping[Call, int]

    @property
    def worker_seconds(self) -> float:
        waiting = sum(self.requests.values()) * WAIT_SECONDS
        return self.processor + waiting + (self.mb_read + self.mb_written) / MB_A_SECOND

    def cost(self, prices: Prices) -> float:
        of_bytes = prices.of_bytes(round(self.mb_read * 1e6), round(self.mb_written * 1e6))
        return prices.of_requests(self.requests) + of_bytes + self.worker_seconds / 2 * prices.compute_second


def night(strategy: str, keys: str, measured: Mapping[str, Mapping[str, Any]]) -> Night:
    """``measured``: what `rows` found, by its names. Raises KeyError where no such table was measured."""
    kind = "rewrite" if strategy == "rewrite" else "delta"
    m, scattered = _largest(measured, kind, keys), _largest(measured, kind, "scattered")
    nights = NIGHT_MB / m["mb_landed"]
    read = TABLE_MB * _share_read(m)
    written = m["dedupe_mb_written"] * (TABLE_MB / m["mb_stored"] if kind == "rewrite" else nights)
    gets = TABLE_MB / GROUP_MB * (1 if kind == "rewrite" else 2 * _share_read(m) / _share_read(scattered))
    processor = m["append"] * nights + _seconds_a_mb(m) * (read + written)
    if strategy == "auto":
        anew = 2 / MOST_DEBT * NIGHT_MB
        processor += _seconds_a_mb(_largest(measured, "rewrite", keys)) * 2 * anew
        read, written, gets = read + anew, written + anew, gets + anew / GROUP_MB
    units = PARTITIONS * math.ceil(PARTITION_MB / UNIT_MB)
    return Night(
        processor,
        m["append_mb_read"] * nights + read,
        m["append_mb_written"] * nights + written,
        {
            "get": round(gets) + 4 * units,
            "list": 2 * units,
            "put": units * (1 if kind == "rewrite" else 2),
            "create": units,
        },
    )


def report(measured: Mapping[str, Mapping[str, Any]], prices: Prices) -> Iterator[str]:
    """Markdown."""
    try:
        nights = {f"{strategy}, {keys}": night(strategy, keys, measured) for strategy, keys in CASES}
    except (KeyError, ValueError):
        yield "Not reckoned: `rows` has not measured its largest table with strategies delta and rewrite."
        return
    yield (
        f"| strategy, keys | GB read | GB written | million requests | {prices.currency} | "
        + " | ".join(f"{n:,} workers" for n in WORKERS)
        + " | requests a second with most |"
    )
    yield "|---|" + "---:|" * (5 + len(WORKERS))
    for name, n in nights.items():
        requests = sum(n.requests.values())
        cells = [
            name,
            *(f"{x:,.1f}" for x in (n.mb_read / 1000, n.mb_written / 1000, requests / 1e6, n.cost(prices))),
            *(_time(n.worker_seconds / workers) for workers in WORKERS),
            f"{requests * max(WORKERS) / n.worker_seconds:,.0f}",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    millions = max(int(name.split()[0]) for name in measured)
    yield f"By the rates of the table of {millions} million rows, and prices of {prices.as_of}. Assumed:"
    yield ""
    yield from (f"- {text}" for text in ASSUMED)


def _largest(measured: Mapping[str, Mapping[str, Any]], strategy: str, keys: str) -> Mapping[str, Any]:
    millions = max(int(name.split()[0]) for name in measured)
    return measured[f"{millions} {strategy} {keys}"]


def _share_read(m: Mapping[str, Any]) -> float:
    """Of the stored bytes, by dedupe."""
    return float(m["dedupe_mb_read"] / m["mb_stored"])


def _seconds_a_mb(m: Mapping[str, Any]) -> float:
    """Of dedupe, for what it reads and writes."""
    return float(m["dedupe"] / (m["dedupe_mb_read"] + m["dedupe_mb_written"]))


def _time(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.0f} h"
