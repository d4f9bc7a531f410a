"""Warnings and errors that several commands report."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lakeupsert.cli import output
from lakeupsert.cli.frame import Call
from lakeupsert.errors import LakeupsertError, RefusedError, split_text
from lakeupsert.phrases import count, short_list

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.config import TableSettings
    from lakeupsert.pipeline.append.commit import AppendResult
    from lakeupsert.pipeline.merge.commit import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult
    from lakeupsert.pipeline.publishers import PublisherStanding


def append_warnings(appended: "AppendResult | None", early_warnings: Sequence[str]) -> tuple[str, ...]:
    """The warnings of the batch, or those given before it was found that there is no batch."""
    return tuple(early_warnings) if appended is None else appended.warnings


def quarantine_warning(appended: "AppendResult | None", settings: "TableSettings") -> tuple[str, ...]:
    """A warning about quarantined rows for the JSON object. The text for people describes them in more detail."""
    if appended is None or not appended.entry.rows_quarantined:
        return ()
    places = ", ".join(output.quarantine_places(appended, settings))
    return (f"quarantined {output.quarantined_rows(appended)}; `lakeupsert quarantine` shows them, from {places}",)


def skipped_files_warning(table: "Table") -> tuple[str, ...]:
    """A warning about landing files that no batch takes; none if the landing zone can't be listed."""
    with suppress(LakeupsertError, OSError):
        found = table.skipped_files()
        return (str(found),) if found else ()
    return ()


def publish_warnings(published: "PublishResult") -> tuple[str, ...]:
    """Warnings about what a snapshot shows, a lost snapshot, and batches that wait for partitions not merged yet.

    Partitions that failed are an error (`merge_error`), not a warning.
    """
    lost = (
        ()
        if published.lost is None
        else (
            f"snapshot {published.lost} is missing: something other than lakeupsert deleted it. Snapshot {published.snapshot} "
            "replaces it with the newest complete batch. Tags set in the missing snapshot are lost.",
        )
    )
    others = (*published.warnings, *lost, *publisher_warnings(published.publishers))
    if published.failed or not published.waiting:
        return others
    return (
        *others,
        f"batches after {published.batch} are not published yet: they touch "
        f"{count(len(published.waiting), 'partition')} ({short_list(published.waiting)}), not all of them merged. "
        "`lakeupsert run` merges the ones that no worker has taken.",
    )


def publisher_warnings(standings: "Mapping[str, PublisherStanding]") -> tuple[str, ...]:
    """What publishers warn of, and a warning for each one whose readers do not see the newest snapshot."""
    warnings = tuple(f"{name}: {standing.warning}" for name, standing in standings.items() if standing.warning)
    return warnings + tuple(
        f"{_what_readers_see(name, standing)} "
        + (
            f"{standing.problem.message} Next: {standing.problem.next}"
            if standing.problem
            else f"`lakeupsert publish --to {name}` catches up."
        )
        for name, standing in standings.items()
        if not standing.is_newest
    )


def _what_readers_see(name: str, standing: "PublisherStanding") -> str:
    if standing.behind is None:
        return f"it is not known what readers of {name} see."
    seen = "nothing yet" if standing.snapshot is None else f"snapshot {standing.snapshot}"
    return f"readers of {name} see {seen}: the publisher is {count(standing.behind, 'snapshot')} behind."


def merge_error(
    call: Call, table: "Table", results: "Sequence[PartitionResult]", published: "PublishResult | None"
) -> LakeupsertError | None:
    """The error of a command that finished: partitions that failed, or that readers see without the newest batches."""
    changed = published is not None and published.partitions_changed > 0
    call.changed = call.changed or changed
    reasons = {**(published.failed if published else {}), **failure_reasons(results)}
    if reasons:
        return failed_partitions_error(table, reasons, changed=changed)
    return lagging_error(table, published.lagging, changed=changed) if published and published.lagging else None


def failure_reasons(results: "Sequence[PartitionResult]") -> dict[str, str]:
    """The partitions whose last merge failed, with the error's text."""
    last = {r.partition: r for r in results}
    return {p: r.error or "" for p, r in last.items() if r.status == "failed"}


def failed_partitions_error(table: "Table", reasons: Mapping[str, str], *, changed: bool = False) -> RefusedError:
    """``reasons``: the failed partitions, each with its error's text, whose advice becomes the advice of this error."""
    partition, text = next(iter(reasons.items()))
    reason, advice = split_text(text)
    others = [p for p in reasons if p != partition]
    hold = table.settings.on_failed_partition == "hold"
    return RefusedError(
        "failed-partitions",
        f"Table {table.name!r}: {count(len(reasons), 'partition')} can't be merged or shown. {partition}: {reason} "
        + (f"The others are {short_list(others)}. " if others else "")
        + (
            "Readers still see the previous batch"
            if hold
            else "In these partitions readers still see the previous batch"
        )
        + f" (`on_failed_partition` is {table.settings.on_failed_partition!r}).",
        data_changed=changed,
        next=f"{advice or 'fix the cause'}; then run `lakeupsert redrive`, which returns these partitions to the workers, "
        "or `lakeupsert run`, which merges them itself",
        partition=partition,
    )


def lagging_error(table: "Table", lagging: Sequence[str], *, changed: bool = False) -> RefusedError:
    return RefusedError(
        "lagging-partitions",
        f"Table {table.name!r}: readers see {count(len(lagging), 'partition')} without the newest batches: "
        f"{short_list(lagging)}.",
        data_changed=changed,
        next="`lakeupsert run` merges these again and reports why one fails",
        partition=lagging[0],
    )
