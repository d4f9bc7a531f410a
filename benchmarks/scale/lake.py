"""The lake that this was built for, on paper: its sizes, the machines that work on it, and what a piece of work takes.

15 TB in 545 partitions of 27.5 GB and a thousand million rows; 45 GB arrive a night and touch all of them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lakeupsert.operations.plan.prices import Prices
from lakeupsert.storage.base import Call
from lakeupsert.storage.remote import MULTIPART_BYTES, PART_BYTES

PARTITIONS, PARTITION_MB, PARTITION_ROWS, NIGHT_MB = 545, 27_500.0, 1e9, 45_000.0
TABLE_MB = PARTITIONS * PARTITION_MB
CAME_MB = NIGHT_MB / PARTITIONS
WAIT_SECONDS = 0.03
MB_A_SECOND = 80.0
ADOPTED_FILE_MB = 256.0
REQUEST_MB = 33.6
"""Arrow joins columns and row groups that lie together into requests of up to so many MB."""

ASSUMED = (
    f"A request takes {1000 * WAIT_SECONDS:.0f} ms, and a worker has one under way at a time. It has many, so this is too slow.",
    f"A worker has one processor and reads and writes {MB_A_SECOND:.0f} MB a second, during which it does not compute.",
    "Work is shared out evenly, and no other limit is met. See requests a second, of which S3 takes 5,500 reads for each of its "
    "partitions; it makes more of these as a table grows.",
    "A machine of the price list has two processors and so two workers. Queues, storage, starting machines and machines that "
    "wait cost nothing. Neither does EMR: the price list has no price for it.",
    f"Adopted files have {ADOPTED_FILE_MB:.0f} MB each.",
    "Seconds of processor grow with the bytes that are read and written.",
)


@dataclass(frozen=True)
class Effort:
    """Seconds of processors, MB read from the store and written to it, and requests."""

    processor: float
    mb_read: float
    mb_written: float
    requests: Mapping[Call, float]

    @property
    def worker_seconds(self) -> float:
        waiting = sum(self.requests.values()) * WAIT_SECONDS
        return self.processor + waiting + (self.mb_read + self.mb_written) / MB_A_SECOND

    def cost(self, prices: Prices) -> float:
        of_bytes = prices.of_bytes(round(self.mb_read * 1e6), round(self.mb_written * 1e6))
        requests = {call: round(n) for call, n in self.requests.items()}
        return prices.of_requests(requests) + of_bytes + self.worker_seconds / 2 * prices.compute_second

    def __add__(self, other: "Effort") -> "Effort":
        return Effort(
            self.processor + other.processor,
            self.mb_read + other.mb_read,
            self.mb_written + other.mb_written,
            add(self.requests, other.requests),
        )


def add(*requests: Mapping[Call, float]) -> Counter[Call]:
    total: Counter[Call] = Counter()
    for some in requests:
        total.update(some)
    return total


def puts(mb: float, part_mb: float = PART_BYTES / 1e6) -> int:
    """Requests that write an object: one, or those of an upload in parts."""
    return 1 if mb * 1e6 <= MULTIPART_BYTES else 2 + math.ceil(mb / part_mb)
