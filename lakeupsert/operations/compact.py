"""Rewrite partitions that have become slow to read.

Reads     the published snapshot and the heads of its partitions
Writes    what `reprocess` writes, from what is stored
Repeat    safe: a partition that was rewritten is not slow any more
"""

from collections.abc import Sequence
from dataclasses import replace

from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult, reprocess_and_publish
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import publish
from lakeupsert.pipeline.strategy import SplitRule, worth_compacting
from lakeupsert.table.manifest import BucketEntry


def compact(
    table: OpenTable, options: ReprocessOptions, *, full: bool = False, most_deltas: int | None = None
) -> ReprocessResult:
    """Rewrite partitions whose deltas and superseded rows cost readers much, whose buckets are far smaller than `bucket`, or
    that were adopted and not merged since.

    Args:
        full: rewrite all partitions that a rewrite improves, also those with files from before a retype.
        most_deltas: as for `worth_compacting`.
    """
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
        return len(rule.join(buckets)) < len(buckets) or any(
            worth_compacting(b, full=full, most_deltas=most_deltas) for b in buckets
        )

    costly = {p for p, head in heads.items() if is_costly(head.body.buckets)}
    return reprocess_and_publish(table, replace(options, selected=costly.__contains__))
