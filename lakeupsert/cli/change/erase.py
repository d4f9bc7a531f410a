"""`lakeupsert erase`: make keys vanish from every object of the table."""

from typing import TYPE_CHECKING, Unpack

import click

from lakeupsert.cli import output as shapes
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count

if TYPE_CHECKING:
    from typing import TypedDict

    from lakeupsert.operations.erase.erase import EraseResult

    class Flags(TypedDict):
        """Flags that are options of `Table.erase` as they are."""

        keys: str
        reason: str
        landing: bool


@main.command()
@click.option(
    "--keys",
    metavar="FILE",
    required=True,
    help="The keys: CSV, JSON lines, Parquet, Avro or ORC with the key columns, and if you like with partition columns.",
)
@click.option("--reason", metavar="TEXT", required=True, help="Why, for the record that stays in the table.")
@click.option(
    "--landing",
    is_flag=True,
    help="Also delete each landing file with one of the keys, whole, also if another table has not taken it.",
)
@click.option("--yes", is_flag=True, help="Do it. Without --yes, only look where the keys are.")
@log_option
def erase(call: Call, yes: bool, **flags: "Unpack[Flags]") -> Answer:
    """Make keys vanish: their rows, deletes and older versions, from quarantine, statements and the key index.

    All older snapshots without a tag end now. Versions of partitions are kept for 7 days, so give the same command again after
    them: it says `erased` once no object is left that has a key or may have one. It erases rows that came since, too. The record
    has hashes of the keys.

    \b
    Example:
      lakeupsert erase --keys forget.csv --reason "request of 2026-11-30" --yes
    """
    with call.open_table() as table, call.progress(table.name) as progress, call.stoppable() as stop:
        found = table.erase(**flags, dry=not yes, stop=stop, progress=progress)
        call.changed = call.changed or found.record is not None
        return _answer(table.name, found)


def _answer(table: str, found: "EraseResult") -> Answer:
    facts = [("keys", f"{found.keys:,} listed")]
    facts.append(("found in", f"{count(len(found.partitions), 'partition')} that readers see"))
    if found.older:
        facts.append(("", f"{count(len(found.older), 'partition')} of older snapshots"))
    kinds = {"statement pack": found.statements, "quarantine file": found.quarantine, "landing file": found.landing}
    facts += [("", count(len(names), kind)) for kind, names in kinds.items() if names]
    warnings: tuple[str, ...] = ()
    if found.left is None:
        facts.append(("", "nothing was changed; the same command with --yes erases them"))
    elif found.is_erased:
        facts.append(("erased", f"no object that was searched has one of them; record {found.record}"))
    else:
        warnings = tuple(f"not erased yet: {why} ({number:,})" for why, number in found.left.items())
        facts.append(("next", "give the same command again once the reasons are gone"))
    names = ("keys", "partitions", "statements", "quarantine", "landing", "older", "deleted", "left", "record")
    result = {**shapes.fields(found, *names), "erased": found.is_erased}
    return Answer(result, shapes.block(f"Table {table}", facts), warnings)
