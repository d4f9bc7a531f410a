"""What a worker merged, in memory that does not grow with the number of results."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.table.manifest import NO_CHANGES, Changes


@dataclass
class MergeTotals:
    """Sums over results.

    Attributes:
        merged, clean, large: how many results had this status. A partition that is merged again counts again.
        changes: counts keys.
        failures: the results of partitions that failed and were not merged since.
    """

    merged: int = 0
    clean: int = 0
    large: int = 0
    rows_in: int = 0
    rows_superseded: int = 0
    rows_refused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    changes: Changes = NO_CHANGES
    failures: dict[str, PartitionResult] = field(default_factory=dict)

    @staticmethod
    def of(results: Iterable[PartitionResult]) -> "MergeTotals":
        totals = MergeTotals()
        for result in results:
            totals.add(result)
        return totals

    def add(self, result: PartitionResult) -> None:
        self.failures.pop(result.partition, None)
        self.merged += result.status == "merged"
        self.clean += result.status == "clean"
        self.large += result.status == "large"
        if result.status == "failed":
            self.failures[result.partition] = result
        self.rows_in += result.rows_in
        self.rows_superseded += result.rows_superseded
        self.rows_refused += result.rows_refused
        self.bytes_read += result.bytes_read
        self.bytes_written += result.bytes_written
        self.seconds += result.seconds
        self.changes += result.changes
