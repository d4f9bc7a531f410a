"""`lakeupsert explain`: show all versions of a key and why the current one wins, or the keys that match a part of a key."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import key_values
from lakeupsert.cli.program import main
from lakeupsert.phrases import count, when

if TYPE_CHECKING:
    from lakeupsert.operations.explain.explain import ExplainedPartition, Explanation, Version


@main.command()
@click.argument("key", nargs=-1, required=True, metavar="COLUMN=VALUE...")
@click.option("--partition", metavar="V", help="Search only this partition, by its value (2020-01-01) or its folder.")
def explain(call: Call, key: tuple[str, ...], partition: str | None) -> Answer:
    """Show all stored versions of a key and why the current one wins.

    Give a value for every key column; with only some of them, it lists the keys that match. You may also give the partition
    column. Without it, every partition is searched, which takes a while if there are many.

    \b
    Example:
      lakeupsert explain order_id=7
      lakeupsert explain order_id=7 line_no=2
    """
    values = key_values(key)
    with call.open_table() as table, call.progress(table.name) as progress:
        progress("looking for the key")
        found = table.explain(values, partition)
        if found.matches:
            matches = [dataclasses.asdict(match) for match in found.matches]
            return Answer({"key": found.key, "matches": matches, "more": found.more}, _matches(found))
        text = "\n\n".join(output.block(f"{_pairs(found.key)} in {p.partition}", _facts(p)) for p in found.partitions)
        partitions = [
            {**dataclasses.asdict(p), "gone": [{"batch": batch, "object": name} for batch, name in p.gone]}
            for p in found.partitions
        ]
        return Answer({"key": found.key, "partitions": partitions}, text)


def _matches(found: "Explanation") -> str:
    total = len(found.matches) + found.more
    facts: list[output.Fact] = [
        ({"deletes": "deleted", "won, not published": "not published"}.get(m.state, m.state), _pairs(m.key))
        for m in found.matches
    ]
    if found.more:
        facts.append(("", f"… and {found.more:,} more"))
    first = [f"{name}={value}" for name, value in found.matches[0].key.items()]
    facts.append(("next", shlex.join(["lakeupsert", "explain", *first])))
    return output.block(f"{count(total, 'key')} with {_pairs(found.key)}", facts)


def _facts(found: "ExplainedPartition") -> list[output.Fact]:
    facts = [("readers see", _pairs(found.shown) if found.shown else "no row"), ("why", found.why)]
    if found.since is not None:
        facts.append(("since", f"snapshot {found.since}"))
    for version in found.versions:
        label = "won" if version.outcome == "won, not published" else version.outcome
        event = f", moved to {version.moved_to}" if version.moved_to else ", a delete" if version.delete else ""
        order = f"{_pairs(version.order)}{event}"
        facts += [(label, _origin(version)), ("", f"{order}, in {version.object}")]
        if version.columns is not None:
            facts.append(("", f"sets {', '.join(version.columns)}"))
    for batch, rows in found.settled.items():
        scope = "partition" if found.settled_of_key[batch] is None else "key"
        facts.append(("not in files", f"{count(rows, 'row')} of this {scope} that lost within batch {batch}"))
    batches = [str(batch) for batch in sorted({batch for batch, _ in found.gone})]
    if found.gone_before > 1:
        batches.insert(0, f"all before {found.gone_before}")
    if batches:
        facts.append(
            ("gone", f"appended files (batch {', '.join(batches)}); whether they contained this key is unknown")
        )
    return facts


def _origin(version: "Version") -> str:
    if version.batch is None or version.received_at is None:
        return "stored; its appended file is gone"
    if version.source in ("base", "delta", "tombstone"):
        return f"the same, stored as {'a tombstone' if version.source == 'tombstone' else 'a row'}"
    if version.moved_from:
        return f"batch {version.batch} {version.batch_id}: it came with its key from {version.moved_from}"
    if version.source == "adopted":
        return "adopted when the table was made"
    what = f"{version.file}, place {version.place}"
    if version.file is None:
        what = f"in no file, written by this batch {'to delete the key here' if version.delete else 'of rows that were stored'}"
    return f"batch {version.batch} {version.batch_id}, received {when(version.received_at)}: {what}"


def _pairs(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={'null' if value is None else value}" for name, value in values.items())
