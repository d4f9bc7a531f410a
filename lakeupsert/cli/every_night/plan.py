"""`lakeupsert plan`, and `run --dry-run`: show what the next run will do."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import PartitionChoice, limit_options, partition_options
from lakeupsert.cli.program import main
from lakeupsert.cli.reads import reads_result, reads_text
from lakeupsert.cli.tables import for_each_table
from lakeupsert.errors import RefusedError
from lakeupsert.phrases import count, duration, short_list, size

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.operations.plan.plan import Plan
    from lakeupsert.table.ledger import Scope


@main.command()
@partition_options
@limit_options
def plan(
    call: Call, chosen: PartitionChoice, prices: Path | None, max_bytes: int | None, max_cost: float | None
) -> Answer:
    """Show what the next run will do. Writes nothing.

    Shows new files, partitions to merge, bytes, requests, seconds and cost. --partition, or --from and --to, limit the plan
    to these partitions. Plans all tables of the configuration unless you give --table.

    \b
    Example:
      lakeupsert plan --max-bytes 50GB
    """

    def plan_table(table: "Table") -> Answer:
        if chosen:
            return plan_answer(call, table, prices, max_bytes, max_cost, chosen.of(table))
        return plan_answer(call, table, prices, max_bytes, max_cost)

    return for_each_table(call, plan_table)


def plan_answer(
    call: Call,
    table: "Table",
    prices: Path | None,
    max_bytes: int | None,
    max_cost: float | None,
    selected: Callable[[str], bool] = lambda partition: True,
    full: "Scope | None" = None,
) -> Answer:
    """The plan of the next run, with an error if that run would be refused."""
    from lakeupsert.operations.plan.plan import refuse_above  # imports Arrow

    with call.progress(table.name) as progress:
        progress("looking for new files")
        plan = table.plan(selected=selected, prices=prices, full=full)
    error = None
    try:
        refuse_above(plan, max_bytes, max_cost)
    except RefusedError as e:
        error = e
    warnings = plan.notes
    if plan.estimated:
        warnings += (
            "the new text files are too large to read completely: partitions, rows and bytes are estimated from a sample, "
            "which may miss partitions with few rows",
        )
    warnings += unknown_time_warning(plan, max_cost)
    return Answer(_result(plan), output.block(f"Table {table.name}", _facts(plan)), warnings, error=error)


def unknown_time_warning(plan: "Plan | None", max_cost: float | None) -> tuple[str, ...]:
    """A warning if a limit was compared with only a part of the cost."""
    if plan is None or max_cost is None or plan.cost.compute is not None:
        return ()
    return ("no earlier night shows how long it takes, so --max-cost was compared with requests and bytes only",)


def _result(plan: "Plan") -> dict[str, object]:
    names = ("partition", "rows", "dirty", "strategy", "bytes_read", "bytes_written")
    return {
        **output.fields(plan, "files", "landing_bytes", "rows", "estimated"),
        "partitions": [output.fields(p, *names) for p in plan.partitions],
        "dirty": plan.dirty,
        "append": {"bytes_read": plan.append_read, "bytes_written": plan.append_written},
        "dedupe": {"bytes_read": plan.dedupe_read, "bytes_written": plan.dedupe_written},
        **output.fields(plan, "bytes", "requests", "landing_requests"),
        "reads": reads_result(plan.reads),
        "seconds": None if plan.seconds is None else round(plan.seconds, 3),
        "cost": {**dataclasses.asdict(plan.cost), "total": plan.cost.total},
        "nights": plan.nights,
    }


def _facts(plan: "Plan") -> list[output.Fact]:
    about = "about " if plan.estimated else ""
    found = f"{count(plan.files, 'new file')}, {size(plan.landing_bytes)}, {about}{count(plan.rows, 'row')}"
    landing, readers = ("landing", found if plan.files else "no new file"), ("readers open", reads_text(plan.reads))
    if not plan.partitions:
        return [landing, ("merges", "nothing"), readers]
    names = short_list([p.partition for p in plan.partitions])
    dirty = f", {plan.dirty:,} of them already dirty" if plan.dirty else ""
    requests = ", ".join(f"{n:,} {call}" for call, n in plan.requests.items() if n)
    with_delta = sum(p.strategy == "delta" for p in plan.partitions)
    deltas = f"; {with_delta:,} of them keep their base files" if with_delta else ""
    cost = plan.cost
    compute = "time unknown" if cost.compute is None else f"{cost.compute:.4f} for time"
    return [
        landing,
        ("merges", f"{about}{count(len(plan.partitions), 'partition')}{dirty}: {names}"),
        ("append", f"reads {size(plan.append_read)}, writes {size(plan.append_written)}"),
        ("dedupe", f"reads {size(plan.dedupe_read)}, writes {size(plan.dedupe_written)}{deltas}"),
        (
            "requests",
            f"{sum(plan.requests.values()):,} ({requests}), and {sum(plan.landing_requests.values()):,} to the landing zone",
        ),
        (
            "takes",
            "unknown: no history yet"
            if plan.seconds is None
            else f"about {duration(plan.seconds)}, like the last {count(plan.nights, 'night')}",
        ),
        (
            "costs",
            f"{cost.total:.4f} {cost.currency}: {cost.requests:.4f} for requests, {cost.transfer:.4f} for bytes, {compute} "
            f"(prices of {cost.as_of})",
        ),
        readers,
    ]
