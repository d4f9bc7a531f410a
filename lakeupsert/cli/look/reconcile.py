"""`lakeupsert reconcile`: print the proof, and report what does not balance as an error."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import PartitionChoice, log_option, partition_options, prepare_spark, read_host_option
from lakeupsert.cli.problems import merge_error, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.errors import LakeupsertError, RefusedError
from lakeupsert.phrases import count, short_list

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import HostName
    from lakeupsert.operations.reconcile import Proof, ReconcileResult


_FIGURES = {
    "appended": "rows_appended",
    "live": "rows_live",
    "tombstones": "tombstones",
    "superseded": "rows_superseded",
    "withdrawn": "withdrawn",
}
_RARE = {"forgotten": "tombstones_dropped", "refused": "refused"}
"""The figures of a proof by their labels for people; the rare ones only if there are such rows."""


@main.command()
@click.option(
    "--deep", is_flag=True, help="Also recompute the rows from the landing files with DuckDB, and compare all columns."
)
@partition_options
@read_host_option
@log_option
def reconcile(call: Call, deep: bool, chosen: PartitionChoice, host: "HostName") -> Answer:
    """Prove that no row was lost, doubled or changed.

    Counts rows and compares digests of keys and ordering columns across ledger, manifests and data files. Also sends lost
    messages again and publishes what is complete. DuckDB recomputes on this machine, whatever --host is.

    \b
    Example:
      lakeupsert reconcile --deep --from 2020-01-01 --to 2020-01-07
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        prepare_spark(table, host=host)
        found = table.reconcile(deep=deep, host=host, selected=chosen.of(table), progress=progress)
        warnings = list(publish_warnings(found.publish))
        if not found.proof and chosen:
            warnings.append("readers see none of the selected partitions, so nothing was proved")
        by_counts = [p.partition for p in found.proof if p.balanced and not p.by_digest]
        if by_counts:
            warnings.append(
                f"{count(len(by_counts), 'partition')} balanced by counts only, because their digests are not known yet: "
                f"{short_list(by_counts)}"
            )
        error = (
            _balance_error(table, found)
            or _missing_sources_error(table, found)
            or merge_error(call, table, [], found.publish)
        )
        call.changed = call.changed or found.published is not None
        if error is not None:
            error.data_changed = call.changed
        return Answer(
            {
                "resent": found.resent,
                "published": found.published,
                "proof": [
                    output.fields(p, "partition", *_FIGURES.values(), *_RARE.values(), "balanced") for p in found.proof
                ],
                "deep": _deep_result(found),
            },
            output.block(f"Table {table.name}", _facts(found)),
            tuple(warnings),
            error=error,
        )


def _deep_result(found: "ReconcileResult") -> dict[str, object] | None:
    """The comparison with the landing files; null without --deep, and if nothing is published."""
    deep = found.recomputed
    if deep is None:
        return None
    return {
        "engine": "duckdb",
        "version": deep.version,
        "landing_files": deep.files,
        "rows": deep.rows,
        "partitions": len(deep.partitions),
        "differ": [p for p, comparison in deep.partitions.items() if not comparison.equal],
        "not_compared": _not_compared(found),
    }


def _not_compared(found: "ReconcileResult") -> list[str]:
    """Partitions that don't balance, that are still as they were adopted, or whose landing files are gone."""
    compared = found.recomputed.partitions if found.recomputed else {}
    return [p.partition for p in found.proof if p.partition not in compared]


def _deep_facts(found: "ReconcileResult") -> list[output.Fact]:
    deep = found.recomputed
    if deep is None:
        return []
    differ = [p for p, comparison in deep.partitions.items() if not comparison.equal]
    files, rows = count(deep.files, "landing file"), count(deep.rows, "row")
    equal = f"{len(deep.partitions) - len(differ):,} of {count(len(deep.partitions), 'partition')} equal"
    facts = [("recomputed", f"by DuckDB {deep.version} from {files} with {rows}: {equal}")]
    if differ:
        facts.append(("differ", short_list(differ)))
    if others := _not_compared(found):
        facts.append(("not compared", short_list(others)))
    return facts


def _facts(found: "ReconcileResult") -> list[output.Fact]:
    facts = [
        ("resent", count(found.resent, "message") if found.resent else "nothing"),
        ("published", f"snapshot {found.published}" if found.published is not None else "nothing new"),
    ]
    for label, name in (_FIGURES | _RARE).items():
        total = sum(getattr(p, name) for p in found.proof)
        if total or label in _FIGURES:
            facts.append((label, f"{total:,}"))
    wrong: list[Proof] = found.unbalanced
    facts.append(("balanced", f"{len(found.proof) - len(wrong):,} of {count(len(found.proof), 'partition')}"))
    facts += _deep_facts(found)
    facts += [("wrong", f"{p.partition}: {p.difference}") for p in wrong]
    return facts


def _balance_error(table: "Table", found: "ReconcileResult") -> LakeupsertError | None:
    if found.batches:
        return RefusedError(
            "not-balanced",
            f"Table {table.name!r}: the ledger contradicts itself. {found.batches[0]}.",
            next="restore that object of _lakeupsert/ledger from a backup or from the versions that the bucket keeps",
        )
    if not found.unbalanced:
        return None
    from lakeupsert.table.layout import rebuild_command  # imports Arrow

    first, *others = found.unbalanced
    return RefusedError(
        "not-balanced",
        f"Table {table.name!r}: {first.partition}: {first.difference}."
        + (f" {count(len(others), 'other partition')} do not balance either." if others else ""),
        next=f"run `{rebuild_command(first.partition)}`, which rewrites it from landing files; or restore its files "
        "from a backup or from the versions that the bucket keeps",
        partition=first.partition,
    )


def _missing_sources_error(table: "Table", found: "ReconcileResult") -> LakeupsertError | None:
    if not found.gone:
        return None
    batch, file = next(iter(found.gone.items()))
    return RefusedError(
        "sources-gone",
        f"Table {table.name!r}: landing files are missing or have changed, for example {file} of batch {batch}. Partitions that "
        f"these batches touch could not be recomputed (batches: {short_list([str(n) for n in found.gone])}). All other "
        "partitions equal their landing files, and all rows are accounted for.",
        next="put these landing files back, or run `lakeupsert reconcile` without --deep",
    )
