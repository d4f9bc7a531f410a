"""Nights and the adoption of the same lake by Iceberg's MERGE INTO and its procedures, on paper, by the same assumptions.

Copy-on-write rewrites every file that has a row of the night (https://iceberg.apache.org/docs/latest/spark-writes/), and a night
has rows in all of them. Merge-on-read reads keys and ordering columns of all files, and writes what arrived and deletion vectors.
Seconds of processor are those that ours would take, times what `peers` measured. Sizes are the defaults of Iceberg 1.12.0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.scale.lake import ADOPTED_FILE_MB, CAME_MB, NIGHT_MB, PARTITIONS, TABLE_MB, Effort, puts
from lakeupsert.pipeline.strategy import MOST_DEBT

FILE_MB, GROUP_MB, PART_MB = 536.9, 134.2, 33.6


def assumed(peers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What is taken from elsewhere, with the figures of the part `peers`."""
    cow, mor = (ratio(peers, mode) for mode in ("cow", "mor"))
    return (
        f"Iceberg takes {cow:.1f} times the seconds of processor for a stored row in a copy-on-write night as ours does with "
        f"strategy rewrite, and {mor:.1f} times in a merge-on-read night as ours with delta (`peers`, from two sizes, so without "
        "what starting Spark's jobs costs). For a byte that a rewrite or a compaction moves, it takes what copy-on-write does.",
        f"Iceberg's files have {FILE_MB:.0f} MB (`write.target-file-size-bytes`), row groups {GROUP_MB:.0f} MB "
        f"(`write.parquet.row-group-size-bytes`), parts of an upload {PART_MB:.0f} MB (`s3.multipart.part-size-bytes`): "
        "its defaults.",
        "In Iceberg's favour: a row group, or its key and ordering columns, come by one request. What Spark shuffles goes to "
        "local disks that take no time. It reads what arrives once, and copy-on-write reads the table once, without the pass "
        "before that looks for the files (runtime filters). Metadata, vectors, retries after conflicts and memory cost nothing.",
        f"Its compaction pays as our auto does: {2 / MOST_DEBT:.0f} times what arrived is read and written. By its default it "
        "would wait until 30 % of a file's rows are deleted (`delete-ratio-threshold`).",
        "`add_files` reads footers and rewrites nothing, as `adopt` does, and leaves two rows where a key came twice: a MERGE "
        "updates both. INSERT OVERWRITE of the newest row of each key, which reads and writes the table once and shuffles it, "
        "does what our first merges do.",
    )


def ratio(peers: Mapping[str, Mapping[str, Any]], mode: str) -> float:
    """How many seconds of processor a night takes for each that ours takes, of what grows with the stored rows."""
    ours = {"cow": "ours-rewrite", "mor": "ours-delta"}[mode]
    theirs, its = (peers[side]["large"] - peers[side]["small"] for side in (f"iceberg-{mode}", ours))
    return float(theirs / its)


def efforts(
    rewrite: Effort, delta: Effort, share_of_deciding: float, peers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Effort]:
    """Nights and the adoption.

    Args:
        rewrite, delta: our nights, whose seconds of processor count.
        share_of_deciding: of the stored bytes, key and ordering columns.
    Raises KeyError if ``peers`` lacks a side.
    """
    cow_mb = rewrite.processor / (rewrite.mb_read + rewrite.mb_written) * ratio(peers, "cow")
    groups, files = TABLE_MB / GROUP_MB, TABLE_MB / FILE_MB
    table = Effort(
        cow_mb * 2 * TABLE_MB, TABLE_MB, TABLE_MB, {"get": files + groups, "put": files * puts(FILE_MB, PART_MB)}
    )
    night = Effort(0.0, NIGHT_MB, 0.0, {"get": NIGHT_MB / GROUP_MB})
    anew = 2 / MOST_DEBT * NIGHT_MB / TABLE_MB
    compaction = Effort(
        table.processor * anew,
        TABLE_MB * anew,
        TABLE_MB * anew,
        {call: n * anew for call, n in table.requests.items()},
    )
    merge_on_read = Effort(
        delta.processor * ratio(peers, "mor"),
        TABLE_MB * share_of_deciding,
        NIGHT_MB,
        {"get": files + groups, "put": PARTITIONS * (puts(CAME_MB, PART_MB) + 1)},
    )
    footers = TABLE_MB / ADOPTED_FILE_MB
    return {
        "Iceberg: night, merge-on-read": night + merge_on_read,
        "Iceberg: night, merge-on-read, and its compaction": night + merge_on_read + compaction,
        "Iceberg: night, copy-on-write": night + replace(table, processor=rewrite.processor * ratio(peers, "cow")),
        "Iceberg: add_files": Effort(0.0, 0.0, 0.0, {"list": footers / 1000, "get": footers}),
        "Iceberg: INSERT OVERWRITE of the newest rows": table,
    }
