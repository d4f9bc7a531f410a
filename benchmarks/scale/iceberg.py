"""Nights and the adoption of the same lake by Iceberg's MERGE INTO and its procedures, on paper, by the same assumptions.

Copy-on-write rewrites every file that has a row of the night (https://iceberg.apache.org/docs/latest/spark-writes/), and a night
has rows in all of them. Merge-on-read reads keys and ordering columns of all files, and writes what arrived and deletion vectors.
Seconds of processor are what `peers` measured. Sizes are the defaults of Iceberg 1.12.0.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.scale.lake import ADOPTED_FILE_MB, CAME_MB, NIGHT_MB, PARTITION_ROWS, PARTITIONS, TABLE_MB, Effort, puts
from lakeupsert.pipeline.strategy import MOST_DEBT

FILE_MB, GROUP_MB, PART_MB = 536.9, 134.2, 33.6


def assumed(peers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What is taken from elsewhere, with the figures of the part `peers`."""
    cow, mor = (1e6 * seconds_a_row(peers, mode) for mode in ("cow", "mor"))
    return (
        f"For each stored row Iceberg takes {cow:.1f} millionths of a second of processor in a copy-on-write night, and "
        f"{mor:.1f} in a merge-on-read night (`peers`, from two sizes, so without what starting Spark's jobs costs). For each "
        "row that a rewrite or a compaction moves, it takes what copy-on-write does.",
        f"Iceberg's files have {FILE_MB:.0f} MB (`write.target-file-size-bytes`), row groups {GROUP_MB:.0f} MB "
        f"(`write.parquet.row-group-size-bytes`), parts of an upload {PART_MB:.0f} MB (`s3.multipart.part-size-bytes`): "
        "its defaults.",
        "In Iceberg's favour: a row group, or its key and ordering columns, come by one request. What arrives takes no "
        "processor, and is read once. What Spark shuffles goes to local disks that take no time. Copy-on-write reads the table "
        "once, without the pass before that looks for the files (runtime filters). Metadata, vectors, retries after conflicts "
        "and memory cost nothing.",
        f"Its compaction pays as our auto does: {2 / MOST_DEBT:.0f} times what arrived is read and written. By its default it "
        "would wait until 30 % of a file's rows are deleted (`delete-ratio-threshold`).",
        "`add_files` reads footers and rewrites nothing, as `adopt` does, and leaves two rows where a key came twice: a MERGE "
        "updates both. INSERT OVERWRITE of the newest row of each key, which reads and writes the table once and shuffles it, "
        "does what our first merges do.",
    )


def seconds_a_row(peers: Mapping[str, Mapping[str, Any]], mode: str) -> float:
    """Of processor, for each stored row in a night."""
    found = peers[f"iceberg-{mode}"]
    return float((found["large"] - found["small"]) / found["more_rows"])


def efforts(share_of_deciding: float, peers: Mapping[str, Mapping[str, Any]]) -> dict[str, Effort]:
    """Nights and the adoption.

    ``share_of_deciding``: of the stored bytes, key and ordering columns. Raises KeyError if ``peers`` lacks a side.
    """
    rows = PARTITIONS * PARTITION_ROWS
    groups, files = TABLE_MB / GROUP_MB, TABLE_MB / FILE_MB
    table = Effort(
        seconds_a_row(peers, "cow") * rows,
        TABLE_MB,
        TABLE_MB,
        {"get": files + groups, "put": files * puts(FILE_MB, PART_MB)},
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
        seconds_a_row(peers, "mor") * rows,
        TABLE_MB * share_of_deciding,
        NIGHT_MB,
        {"get": files + groups, "put": PARTITIONS * (puts(CAME_MB, PART_MB) + 1)},
    )
    footers = TABLE_MB / ADOPTED_FILE_MB
    return {
        "Iceberg: night, merge-on-read": night + merge_on_read,
        "Iceberg: night, merge-on-read, and its compaction": night + merge_on_read + compaction,
        "Iceberg: night, copy-on-write": night + table,
        "Iceberg: add_files": Effort(0.0, 0.0, 0.0, {"list": footers / 1000, "get": footers}),
        "Iceberg: INSERT OVERWRITE of the newest rows": table,
    }
