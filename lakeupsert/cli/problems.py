"""What several commands say of merges and snapshots, and what is wrong with them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lakeupsert.cli import output
from lakeupsert.cli.frame import Call
from lakeupsert.errors import LakeupsertError, RefusedError, parts

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.pipeline.append import AppendResult
    from lakeupsert.pipeline.dedupe import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult


def append_warnings(
    table: "Table", appended: "AppendResult | None", said: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those to be told, ``said`` where there is no batch, and the one about quarantined rows, that the text has already."""
    if appended is None:
        return tuple(said), ()
    if not appended.entry.rows_quarantined:
        return appended.warnings, ()
    places = ", ".join(output.quarantine_places(appended, table.settings))
    return appended.warnings, (f"quarantined {output.quarantined(appended)}; see {places}",)


def skipped(table: "Table") -> tuple[str, ...]:
    """A warning about landing files that no batch takes. Who may not list landing sees the table's status all the same."""
    with suppress(LakeupsertError, OSError):
        found = table.skipped_files()
        return (str(found),) if found else ()
    return ()


def waiting(published: "PublishResult") -> tuple[str, ...]:
    """Warnings where batches wait for partitions that are only slow (about those that fail `trouble` speaks), and where a
    snapshot was lost."""
    lost = (
        ()
        if published.lost is None
        else (
            f"snapshot {published.lost} was gone: something else deleted it. Snapshot {published.snapshot} shows "
            "the newest whole batch in its place. Tags that were set in the lost one are lost.",
        )
    )
    if published.failed or not published.waiting:
        return lost
    return (
        *lost,
        f"batches after {published.batch} are not published yet: they touch "
        f"{output.count(len(published.waiting), 'partition')} ({output.named(published.waiting)}), and not all are "
        "merged. `lakeupsert run` merges what nobody else is merging.",
    )


def trouble(
    call: Call, table: "Table", results: "Sequence[PartitionResult]", published: "PublishResult | None"
) -> LakeupsertError | None:
    """What is wrong although the command came to its end: partitions that fail, or that readers see as they were."""
    changed = published is not None and published.partitions_changed > 0
    call.changed = call.changed or changed
    failing = unmerged(results)
    if published:
        failing = {**published.failed, **failing}
    if failing:
        return failed(table, failing, changed)
    return lagging(table, published.lagging, changed) if published and published.lagging else None


def unmerged(results: "Sequence[PartitionResult]") -> dict[str, str]:
    """The partitions that failed at their last try, with what it said."""
    last = {r.partition: r for r in results}
    return {p: r.error or "" for p, r in last.items() if r.status == "failed"}


def failed(table: "Table", failed: Mapping[str, str], changed: bool = False) -> RefusedError:
    partition, told = next(iter(failed.items()))
    # The engine's own error ends with what to do about it, and that is the best advice there is.
    reason, advice = parts(told)
    others = [p for p in failed if p != partition]
    hold = table.settings.on_failed_partition == "hold"
    return RefusedError(
        "failed-partitions",
        f"Table {table.name!r}: {output.count(len(failed), 'partition')} can't be merged. {partition}: {reason} "
        + (f"The others are {output.named(others)}. " if others else "")
        + ("Readers keep" if hold else "Of these partitions readers keep")
        + f" the batch before (`on_failed_partition` is {table.settings.on_failed_partition!r}).",
        data_changed=changed,
        next=f"{advice or 'mend the cause'}; then run `lakeupsert redrive`, which gives these partitions "
        "back to the workers, or `lakeupsert run`, which merges them itself",
        partition=partition,
    )


def lagging(table: "Table", lagging: Sequence[str], changed: bool = False) -> RefusedError:
    return RefusedError(
        "lagging-partitions",
        f"Table {table.name!r}: readers see {output.count(len(lagging), 'partition')} without the newest batches: "
        f"{output.named(lagging)}.",
        data_changed=changed,
        next="`lakeupsert run` merges these again and tells why one fails",
        partition=lagging[0],
    )
