"""`lakeupsert fsck`: print what is missing or damaged, each with its repair, and report the first as an error."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, prepare_spark, read_host_option
from lakeupsert.cli.program import main
from lakeupsert.errors import RefusedError
from lakeupsert.phrases import count, size

if TYPE_CHECKING:
    from lakeupsert.engine.by_name import HostName
    from lakeupsert.operations.fsck import FsckResult

MOST_FINDINGS = 20
"""That the text lists."""


@main.command()
@click.option("--deep", is_flag=True, help="Also read each data file and check its bytes, rows and keys.")
@read_host_option
@log_option
def fsck(call: Call, deep: bool, host: "HostName") -> Answer:
    """Check that each object of the table is there and whole.

    Looks at everything that readers of a kept snapshot or the next commands need. Changes nothing.

    \b
    Example:
      lakeupsert fsck --deep
    """
    if host != "local" and not deep:
        raise click.UsageError("--host says where --deep reads the data files. Give --deep, too.")
    with call.open_table() as table, call.progress(table.name) as progress:
        prepare_spark(table, host=host)
        found = table.fsck(deep=deep, host=host, progress=progress)
        result = {
            **output.fields(found, "snapshots", "metadata", "files", "bytes"),
            "deep": deep,
            "findings": [
                {"needed_by": one.needed_by, **output.fields(one.error, "code", "message", "next", "partition")}
                for one in found.findings
            ],
        }
        return Answer(result, output.block(f"Table {table.name}", _facts(found, deep)), error=_error(table.name, found))


def _facts(found: "FsckResult", deep: bool) -> list[output.Fact]:
    metadata = f"{count(len(found.snapshots), 'snapshot')}, {count(found.metadata, 'object')} of metadata"
    facts = [
        ("checked", f"{metadata}, {count(found.files, 'file')} with {size(found.bytes)}"),
        ("data files", "read and compared" if deep else "names and sizes only (--deep reads them)"),
        ("wrong", count(len(found.findings), "object") if found.findings else "nothing"),
    ]
    shown = found.findings[:MOST_FINDINGS]
    facts += [("", f"{one.needed_by}: {one.error.message} Next: {one.error.next}") for one in shown]
    if len(shown) < len(found.findings):
        facts.append(("", f"{len(found.findings) - len(shown):,} more: --json lists all"))
    return facts


def _error(table: str, found: "FsckResult") -> RefusedError | None:
    if not found.findings:
        return None
    first, *others = (one.error for one in found.findings)
    return RefusedError(
        "objects-damaged",
        f"Table {table!r}: {first.message}"
        + (
            f" {count(len(others), 'other object')} {'is' if len(others) == 1 else 'are'} wrong, too." if others else ""
        ),
        next=first.next,
        partition=first.partition,
    )
