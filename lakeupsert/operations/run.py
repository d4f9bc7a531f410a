"""A night: append what is new, merge what is dirty, publish.

Reads     what `plan`, `append`, `dedupe` and `publish` read
Writes    what `append`, `dedupe` and `publish` write; without `superseded_retention` it vacuums, too
Repeat    safe: each step looks at the table, not at what this call did, so after a crash the next run finishes

    (plan, limits) -> send missing messages -> append -> dedupe -> publish -> (vacuum)
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lakeupsert.engine.by_name import EngineName, choose_host
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError
from lakeupsert.operations.plan.habits import Night, last_nights, learn_append_part
from lakeupsert.operations.plan.merges import Prediction, predict_merges
from lakeupsert.operations.plan.plan import Plan, plan, refuse_above
from lakeupsert.operations.vacuum import vacuum
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions, BatchOptions, read_heads
from lakeupsert.pipeline.audit import AuditError
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.progress import Countdown, NightProgress
from lakeupsert.table.ledger import ChosenHost


@dataclass(frozen=True, kw_only=True)
class RunOptions(BatchOptions):
    """How a night runs. With ``host`` auto, the landing bytes that it has to merge decide where; the result says why.

    Attributes:
        workers: processes of this machine that merge; None: Spark's tasks if the night runs there, otherwise ``local_workers``.
        local_workers: processes of this machine that merge if ``workers`` does not say.
        calls_at_once: how many calls run in threads of this process; each takes its share of the memory.
        engine: as for `dedupe`.
        max_bytes, max_cost: refuse a run whose plan is above these, before it writes anything; None is no limit.
        prices: a file of prices for the plan, like `lakeupsert/operations/plan/prices.toml`, which is the default.
        stop: once set, the merges that run are finished, and no others are begun.
    """

    workers: int | None = None
    local_workers: int = 1
    calls_at_once: int = 1
    engine: EngineName | None = None
    max_bytes: int | None = None
    max_cost: float | None = None
    prices: str | Path | None = None
    stop: Stop | None = None

    @property
    def is_limited(self) -> bool:
        return self.max_bytes is not None or self.max_cost is not None


@dataclass(frozen=True)
class RunResult:
    """The three steps of a night; ``append`` is None if nothing was new.

    ``predicted``: what `dedupe` was expected to read and write once the batch was committed; None if there was nothing to
    merge, or a manifest that it reads is damaged. ``planned``: the plan that the limits were compared with; None without
    limits.
    """

    host: ChosenHost
    append: AppendResult | None
    dedupe: list[PartitionResult]
    publish: PublishResult
    predicted: Prediction | None = None
    planned: Plan | None = None


def run(table: OpenTable, options: RunOptions) -> RunResult:
    """Run a night.

    Raises:
        RefusedError: before anything is written, the plan is above a limit; or, after the other steps, `append` refused what
            landed.
        ConfigurationError: after the other steps, from `append`.
    """
    progress = options.progress
    planned = None
    if options.is_limited:
        progress("planning")
        planned = plan(table, lambda partition: True, options.prices, options.full)
        refuse_above(planned, options.max_bytes, options.max_cost)
    send_missing(table)
    nights: list[Night] = []
    with suppress(DamagedTableError):  # whatever needs the damaged object fails because of it
        nights = last_nights(table.history)
    night = NightProgress(progress, learn_append_part(nights))
    appended, refused = None, None
    try:
        of_batch = AppendOptions(
            host=options.host,
            batch_id=options.batch_id,
            full=options.full,
            may_shrink=options.may_shrink,
            progress=night.append,
            warn=options.warn,
        )
        appended = append(table, of_batch)
    except (ConfigurationError, RefusedError) as e:
        refused = e  # what was committed before is finished all the same
    host = _merge_host(table, options, appended)
    expected = None
    with suppress(DamagedTableError):  # the merge of that partition fails because of it, and the others go on
        expected = predict_merges(table, appended, nights)
    drain = DrainOptions(
        host=host.name if options.workers is None else "local",
        workers=options.workers or options.local_workers,
        calls_at_once=options.calls_at_once,
        engine=options.engine,
        stop=options.stop,
        progress=Countdown("merging partitions", night.merge),
    )
    try:
        merged, published = merge_and_publish(table, drain, progress)
    except LakeupsertError as e:
        if isinstance(e, AuditError) and refused is not None:
            raise refused from e  # what was refused may be the correction
        e.data_changed |= appended is not None or (refused is not None and refused.data_changed)
        raise
    if refused is not None:
        raise refused
    return RunResult(host, appended, merged, published, expected, planned)


def merge_and_publish(
    table: OpenTable, options: DrainOptions, progress: Callable[[str], None]
) -> tuple[list[PartitionResult], PublishResult]:
    """The steps of a night behind its append."""
    merged = drain_queues(table, options)
    progress("publishing")
    return merged, show(table, progress)


def show(table: OpenTable, progress: Callable[[str], None] = lambda text: None) -> PublishResult:
    """Publish, and vacuum if the table keeps no old files."""
    published = publish(table)
    clean(table, published, progress)
    return published


def clean(table: OpenTable, published: PublishResult, progress: Callable[[str], None] = lambda text: None) -> None:
    """Vacuum if the table keeps no old files, for readers that list folders."""
    if not table.settings.retention and published.snapshot is not None:
        vacuum(table, dry=False, progress=progress, standings=published.publishers)


def _merge_host(table: OpenTable, options: RunOptions, appended: AppendResult | None) -> ChosenHost:
    """The host of the batch. Without one, that of batches that an earlier run left to merge."""
    if appended is not None and appended.entry.host is not None:
        return appended.entry.host
    chosen = choose_host(options.host, read_heads(table, None).night_bytes if options.host == "auto" else 0)
    for warning in chosen.warnings:
        options.warn(warning)
    return chosen
