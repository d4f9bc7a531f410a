"""The snapshot name `latest`: every batch of the ledger, whole, even if it is not merged or published yet.

Reads     the ledger's head, then the last snapshot, then of each partition that was touched since or lags its newest version
          up to that head and its pending batches
Writes    nothing in the table; merged files go to a temporary folder of this machine and vanish with the view
Repeat    safe, also beside appends, workers, publishers and restores, since everything that it reads is immutable

The ledger's number is read first and bounds everything else: a partition's head may hold batches that others do not show yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.merge import MergeOutput
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.integrity import refuse_another_entry
from lakeupsert.pipeline.merge.cuts import merge_steps
from lakeupsert.pipeline.merge.next_version import version_after
from lakeupsert.pipeline.merge.state import merged_up_to, merges_one_by_one, next_state, state_at
from lakeupsert.pipeline.merge.steps import Step, step_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.read.view import View, partitions_of
from lakeupsert.retries import LATEST_ATTEMPTS
from lakeupsert.storage import ObjectStore
from lakeupsert.storage.overlay import OverlayStore
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import BucketEntry, Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import VERSION_FIELDS


@dataclass(frozen=True)
class _Heads:
    """What the view is made of: batches up to ``batch``.

    Attributes:
        number: the snapshot's number.
        touched: partitions that the snapshot does not show whole, each with its last batch <= ``batch``.
        newest: the head versions of these, which may be beyond ``batch``; a partition that was never merged has none.
    """

    batch: int
    number: int | None
    snapshot: Snapshot
    touched: dict[str, int]
    newest: dict[str, Link[Manifest]]

    @property
    def numbers(self) -> tuple[int, int | None, dict[str, int]]:
        """These stay equal as long as nothing is appended to any of the chains."""
        return self.batch, self.number, {p: link.number for p, link in self.newest.items()}


def latest(table: OpenTable, where: str | None = None) -> View:
    """A view of every batch in the ledger, with only the partitions that may hold a row of the filter.

    It needs the memory of one merge; the temporary folder holds the dirty partitions. Raises DamagedTableError or RefusedError,
    naming the partition, if a pending batch can't be merged.
    """
    table.history.existing_spec()  # raises if there is no table, or another one
    heads = _read_heads(table.history)
    for _ in range(LATEST_ATTEMPTS - 1):
        try:
            return _merged(table, heads, where)
        except DamagedTableError:
            before, heads = heads, _read_heads(table.history)
            if heads.numbers == before.numbers:
                raise
    return _merged(table, heads, where)


def _read_heads(history: History) -> _Heads:
    ledger = history.ledger_head()  # first: it bounds everything else
    link = history.last_snapshot()
    snapshot = link.body if link else None
    batch = max(ledger.number if ledger else 0, snapshot.batch if snapshot else 0)
    touched = unpublished_up_to(history, snapshot, batch) if ledger else {}
    return _Heads(
        batch=batch,
        number=link.number if link else None,
        snapshot=snapshot or Snapshot(batch=-1, spec_version=0),
        touched=touched,
        newest=history.heads(touched),
    )


def _merged(table: OpenTable, heads: _Heads, where: str | None) -> View:
    entry = table.history.entry(heads.batch)
    spec_version = entry.body.spec_version if entry else 0
    spec = table.history.spec(spec_version)
    # The filter may name them, if the reader has them.
    filterable = pa.schema([*spec.schema, *(VERSION_FIELDS if spec.versions else ())])
    wanted = list(partitions_of(spec, {*heads.snapshot.partitions, *heads.touched}, where, filterable))
    shown = {p: heads.snapshot.partitions[p] for p in wanted if p not in heads.touched}
    # All are planned before any is merged, so that a missing version is found early.
    heads_of = {p: _head(table.history, heads, p, spec_version) for p in wanted if p in heads.touched}
    steps = {p: _step(table, heads, p, head) for p, head in heads_of.items()}
    pinned: dict[str, tuple[BucketEntry, ...]] = {}
    # A restore alone has no task, but batches that are merged one by one may follow it.
    merges = any(step.tasks or step.up_to < heads.touched[p] for p, step in steps.items())
    overlay = OverlayStore(table.resources.store) if merges else None
    store = overlay or table.resources.store
    try:
        for partition, step in steps.items():
            head = heads_of[partition]
            while step.up_to < heads.touched[partition]:
                body = version_after(step, head, _outputs(step, store), {})
                head = Link(number=step.start, write_id="", parent="", written_at="", body=body, read_at=0.0)
                step = _step(table, heads, partition, head)
            step = replace(step, spec=spec)
            body = version_after(step, head, _outputs(step, store), {})
            pinned[partition] = body.buckets
            shown[partition] = PartitionVersion.of(body, -1)
    except BaseException:
        if overlay:
            overlay.remove()
        raise
    snapshot = Snapshot(batch=heads.batch, spec_version=spec_version, partitions=shown)
    return View(TableObjects(overlay) if overlay else table.history.objects, spec, snapshot, None, pinned)


def _head(history: History, heads: _Heads, partition: str, spec_version: int) -> Link[Manifest] | None:
    """The newest version up to the batch that the batch's spec describes.

    A version that was rewritten after a later rename has column names that this spec does not know.
    """
    chain, version = history.objects.partition(partition), heads.newest.get(partition)
    if heads.snapshot.lost(partition, version):
        shown = heads.snapshot.partitions[partition].version
        raise history.objects.missing(partition, shown, f"Snapshot {heads.number}", lost=True)
    renames = len(history.spec(spec_version).renames)
    while version is not None and (
        version.body.merged > heads.batch or len(history.spec(version.body.spec_version).renames) > renames
    ):
        version = next(chain.between(version.number - 2, version.number - 1)) if version.number else None
    if version is not None:
        refuse_another_entry(history, version.body, heads.snapshot)
    return version


def _step(table: OpenTable, heads: _Heads, partition: str, head: Link[Manifest] | None) -> Step:
    """The step that brings a partition up to the batch, or to its first pending batch if they are merged one by one.

    It has no task if nothing is pending, or only a restore.
    """
    history, batch = table.history, heads.touched[partition]
    low = merged_up_to(partition, head, heads.snapshot)
    pending = [link for link in history.entries(low, batch) if partition in link.body.touched]
    state = None
    if merges_one_by_one(head, pending, partition):
        state = next_state(history, partition, batch, heads.snapshot if heads.number is not None else None, head)
    return step_of(history, table.settings, state or state_at(history, partition, head, low, batch))


def _outputs(step: Step, store: ObjectStore) -> Sequence[MergeOutput]:
    if not step.tasks:
        return []
    try:
        [merge] = all_or_raise(merge_steps(ArrowEngine(), store, [step], store.delete, clock.elapsed()))
        return merge.outputs
    except (DamagedTableError, RefusedError) as e:
        raise type(e)(
            e.code,
            f"{step.partition} can't be merged up to batch {step.up_to}, so `latest` can't be read. {e.message}",
            next=f"{e.next}; `published` can be read meanwhile",
            partition=step.partition,
        ) from e
