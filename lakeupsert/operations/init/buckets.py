"""How many partitions by hash a table should have: the N of `bucket(N, …)` that `init` and `plan` propose.

Reads     nothing
Writes    nothing
Repeat    safe
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil, prod

from lakeupsert.phrases import count
from lakeupsert.pipeline.merge.cuts import ALONE_BUCKETS
from lakeupsert.table.layout import partition_texts
from lakeupsert.table.roles import MOST_BUCKETS, PartitionColumn
from lakeupsert.table.spec import TableSpec

FAR = 4
"""A number so many times as large or small as the proposed one gets a warning."""


def propose_count(size: float, bucket_bytes: int, workers: int) -> int:
    """How many partitions for ``size`` compressed bytes. 1 if one worker merges that alone (`ALONE_BUCKETS` buckets); otherwise
    no partition is larger than that, and the number is a multiple of ``workers``, so that all have work to the end."""
    least = ceil(size / (ALONE_BUCKETS * bucket_bytes))
    return 1 if least <= 1 else min(MOST_BUCKETS, ceil(least / workers) * workers)


def describe_rule(bucket_bytes: int, workers: int) -> str:
    """What `propose_count` aims at."""
    return (
        f"at most {ALONE_BUCKETS * bucket_bytes / 1e6:,.0f} MB in a partition, so that one worker can merge it, and a multiple "
        f"of {count(workers, 'core')}"
    )


def expression(number: int, columns: Sequence[str]) -> str:
    """The entry of `partition_by`."""
    return PartitionColumn("", "bucket", None, tuple(columns), number).expression


def far_count(spec: TableSpec, sizes: Mapping[str, float], bucket_bytes: int, workers: int) -> list[str]:
    """A warning if another number of partitions by hash would suit these partitions, with their bytes, far better.

    ``spec``: of a table with partitions by hash, or with one partition.
    """
    hashed = {one.column for one in spec.hash_columns}
    others = [column for column in spec.partition_by if column not in hashed]
    if not sizes:
        return []
    whole: dict[tuple[str, ...], float] = defaultdict(float)
    for partition, size in sizes.items():
        texts = partition_texts(partition)
        whole[tuple(texts[column] for column in others)] += size
    mean = sum(whole.values()) / len(whole)
    now, better = prod(one.count or 1 for one in spec.hash_columns), propose_count(mean, bucket_bytes, workers)
    if now < FAR * better and better < FAR * now:
        return []
    have = f"{count(now, 'partition')} by hash" if hashed else "one partition"
    if others:
        have += f" for each {', '.join(others)}"
    columns = spec.hash_columns[0].hashed if hashed else spec.stored_key
    instead = f"`{expression(better, columns)}`" if better > 1 else "one"
    return [
        f"the table has {have}, for about {mean / 1e6:,.1f} MB; {instead} would suit that "
        f"({describe_rule(bucket_bytes, workers)}). `partition_by` is fixed when a table is created: to change it, create "
        "another table and land an export of this one"
    ]
