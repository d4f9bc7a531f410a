"""The cost of reads, for `plan` and `status`."""

import dataclasses
from typing import TYPE_CHECKING

from lakeupsert.phrases import count, short_list

if TYPE_CHECKING:
    from lakeupsert.pipeline.read_cost import ReadCost


def reads_result(reads: "ReadCost") -> dict[str, object]:
    from lakeupsert.pipeline.read_cost import BOUNDS  # imports Arrow

    return {**dataclasses.asdict(reads), "bounds": BOUNDS}


def reads_text(reads: "ReadCost") -> str:
    files, deltas = count(reads.most_files, "file"), count(reads.most_deltas, "delta")
    due = f"; compaction is due in {count(len(reads.due), 'partition')}: {short_list(reads.due)}" if reads.due else ""
    return f"at most {files} and {deltas} a partition, {reads.most_extra_share:.0%} more bytes than its rows need{due}"
