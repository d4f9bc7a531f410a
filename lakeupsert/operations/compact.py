"""Rewrite partitions that have become slow to read.

Reads     the published snapshot and the heads of its partitions
Writes    what `reprocess` writes, from what is stored
Repeat    safe: a partition that was rewritten is not slow any more
"""

from collections.abc import Callable, Sequence

from lakeupsert.engine.by_name import HostName
from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult, reprocess_and_publish
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import publish
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.strategy import SplitRule, worth_compacting
from lakeupsert.table.manifest import BucketEntry


def compact(
    table: OpenTable, *, full: bool, host: HostName, workers: int, stop: Stop, progress: Callable[[str], None]
) -> ReprocessResult:
    """Rewrite partitions whose deltas and superseded rows cost readers much, whose buckets are far smaller than `bucket`, or
    that were adopted and not merged since. ``full``: all partitions that a rewrite improves, also those with files from before a
    retype."""
    snapshot = table.history.last_snapshot()
    table.history.ledger_head()  # an error if a newer snapshot is gone
    shown = snapshot.body.partitions if snapshot else {}
    heads = table.history.heads(shown)
    if ahead := [p for p, head in heads.items() if head.number > shown[p].version]:
        publish(table, also=ahead)  # an earlier compact wrote these versions and died before it published them
    spec = table.history.spec(snapshot.body.spec_version) if snapshot else None
    types = spec.base_schema.types if spec else ()

    def is_costly(buckets: Sequence[BucketEntry]) -> bool:
        rule = SplitRule.of(table.settings.bucket_bytes, types, buckets)
        if full and spec and any(spec.conversions(file.renames) for bucket in buckets for file in bucket.data):
            return True
        return len(rule.join(buckets)) < len(buckets) or any(worth_compacting(b, full=full) for b in buckets)

    costly = {p for p, head in heads.items() if is_costly(head.body.buckets)}
    merges = None if host == "spark" else workers
    options = ReprocessOptions(costly.__contains__, host=host, workers=merges, stop=stop, progress=progress)
    return reprocess_and_publish(table, options)
