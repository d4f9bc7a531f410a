"""The cost of reads of rows that are not in one base file, and where a compaction is due. Nothing is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from lakeupsert.pipeline.strategy import MOST_DEBT, MOST_DELTAS, SMALL_BYTES, is_due
from lakeupsert.table.snapshot import PartitionVersion

BOUNDS = {"deltas": MOST_DELTAS, "extra_share": MOST_DEBT / 2, "small_bytes": SMALL_BYTES}
"""`maintain` rewrites a base of less than ``small_bytes`` that has more deltas, a larger one with a greater share of bytes."""


@dataclass(frozen=True)
class ReadCost:
    """The highest figures of all partitions that readers see.

    Attributes:
        most_files: the most objects of a partition, which a reader opens at most.
        most_deltas: the most deltas of a bucket.
        most_extra_share: bytes of a partition for deltas and superseded rows, as a share of the bytes of its live rows.
        due: partitions above a bound, which `maintain` rewrites.
    """

    most_files: int
    most_deltas: int
    most_extra_share: float
    due: tuple[str, ...]


def read_cost(partitions: Mapping[str, PartitionVersion]) -> ReadCost:
    shown = partitions.values()
    return ReadCost(
        most_files=max((one.files for one in shown), default=0),
        most_deltas=max((one.deltas for one in shown), default=0),
        most_extra_share=max((one.debt / max(1, one.bytes - one.debt) for one in shown), default=0.0),
        due=tuple(sorted(name for name, one in partitions.items() if is_due(one))),
    )
