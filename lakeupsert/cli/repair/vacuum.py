"""`lakeupsert vacuum`: expire snapshots and delete files."""

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.phrases import count, size


@main.command()
@click.option("--yes", is_flag=True, help="Do it. Without --yes, only show what would be deleted.")
def vacuum(call: Call, yes: bool) -> Answer:
    """Expire old snapshots and delete files that nothing needs.

    Keeps the newest `keep_snapshots` snapshots and all tagged ones. Safe at any time, even during a night.

    \b
    Example:
      lakeupsert vacuum --yes
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        found = table.vacuum(dry=not yes, progress=progress)
        sums: dict[str, list[int]] = {}
        for garbage in found.garbage:
            sums.setdefault(garbage.why, []).append(garbage.bytes)
        facts = [("expired" if yes else "would expire", _snapshots(found.expired))]
        facts += [
            (
                "deleted" if yes else "would delete",
                f"{count(len(sizes), 'object')}, {size(sum(sizes))}: {why}",
            )
            for why, sizes in sorted(sums.items())
        ]
        if not sums:
            facts.append(("", "nothing to delete"))
        elif not yes:
            facts.append(("", "nothing was changed; `lakeupsert vacuum --yes` does it"))
        result = {
            **output.fields(found, "dry", "expired", "bytes"),
            "objects": len(found.garbage),
            "garbage": [output.fields(g, "name", "bytes", "why") for g in found.garbage],
        }
        call.changed = call.changed or (yes and bool(found.garbage))
        return Answer(result, output.block(f"Table {table.name}", facts))


def _snapshots(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "no snapshot"
    return f"{count(len(numbers), 'snapshot')} ({numbers[0]} to {numbers[-1]})"
