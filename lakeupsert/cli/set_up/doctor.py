"""`lakeupsert doctor`: check a table and its machine, and print the findings."""

import dataclasses
from typing import TYPE_CHECKING

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import count

if TYPE_CHECKING:
    from lakeupsert.operations.doctor import Finding

LEVELS = ("ok", "warning", "problem")


@main.command()
def doctor(call: Call) -> Answer:
    """Check a table and its machine before a night does.

    Checks permissions, conditional writes of the store, clocks, the queue, Spark and Java, landing dates, disk space and
    settings. Writes only test objects of its own to the processed zone, and removes them.

    \b
    Example:
      lakeupsert doctor
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        progress("checking the table and this machine")
        findings = table.doctor()
        problems = [finding for finding in findings if finding.level == "problem"]
        error = None
        if problems:
            first = problems[0]
            error = ConfigurationError(
                "doctor-found-problems",
                f"Table {table.name!r}: {count(len(problems), 'problem')}. {first.check}: {first.found}.",
                next=first.next or "see the findings",
            )
        result = {"findings": [dataclasses.asdict(finding) for finding in findings]}
        return Answer(result, output.block(f"Table {table.name}", _facts(findings)), error=error)


def _facts(findings: "list[Finding]") -> list[output.Fact]:
    facts = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        facts.append((finding.check, f"{finding.level:<9}{finding.found}"))
        if finding.next:
            facts.append(("", f"{'next:':<9}{finding.next}"))
    return facts
