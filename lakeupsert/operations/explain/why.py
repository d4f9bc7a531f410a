"""Say in a sentence why a version of a key wins, for `explain`.

Reads     nothing
Writes    nothing
Repeat    safe
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

import pyarrow as pa

from lakeupsert.operations.explain.rows import AGE, KeyRow
from lakeupsert.rows.rank import sortable
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.spec import FILE, PLACE, TableSpec

Outcome = Literal[
    "shown",
    "deletes",
    "won, not published",
    "pending",
    "superseded",
    "withdrawn",
    "refused",
    "forgotten",
    "lacking",
    "replaced",
    "in part",
]


def why(
    spec: TableSpec,
    outcomes: Mapping[KeyRow, Outcome],
    head: Link[Manifest] | None,
    void: AbstractSet[KeyRow],
    unseen: str,
) -> str:
    """Why the first row that counts wins, or will win.

    Args:
        outcomes: of each row, greatest rank first.
        void: deletes that do not count.
        unseen: the result of `describe_unseen`.
    """
    rows = list(outcomes)
    uncounted = [row for row in rows if outcomes[row] == "withdrawn"]
    aside = f" Of greater rank, but withdrawn: {', '.join(map(str, uncounted))}." if uncounted else ""
    if "replaced" in outcomes.values():
        aside += " A full extract with the key replaced what was before it."
    beaten = {"withdrawn", "superseded", "refused", "lacking", "replaced", "in part"}
    if not {"shown", "won, not published"}.isdisjoint(outcomes.values()):
        beaten.add("forgotten")  # that it is forgotten is why the other row is there
    winner = next((row for row in rows if outcomes[row] not in beaten and row not in void), None)
    if winner is None:
        if any(outcome == "lacking" for outcome in outcomes.values()):
            return f"A full extract lacked the key.{aside}"
        if any(outcome == "refused" for outcome in outcomes.values()):
            return f"All records are below the floor of forgotten deletes or of a full extract, so they are in quarantine.{aside}"
        elsewhere = any(row.lost_in_append for row in rows)
        return f"{'All records lost to a record in another partition.' if elsewhere else 'No version counts.'}{aside}"
    seen = [row for row in rows if outcomes[row] == "shown"]
    still = f"and readers still see {seen[0] if seen else 'no row'}."
    behind = rows[rows.index(winner) + 1 :]
    behind = [row for row in behind if outcomes[row] not in ("withdrawn", "refused", "replaced") and row not in void]
    only = f"it is the only version{' that counts' if len(rows) > 1 else ' that is stored' if unseen else ''}{unseen}"
    reason = _reason(spec, winner, behind[0]) if behind else only
    name = str(winner)[0].upper() + str(winner)[1:]
    match outcomes[winner]:
        case "forgotten":
            late = "what comes below it goes to quarantine, unless a full extract has it"
            return f"Deleted by {winner}, which the table has forgotten; {late}.{aside}"
        case "deletes" if winner.moved_to:
            return f"Moved to {winner.moved_to} by {winner}: {reason}.{aside}"
        case "deletes":
            return f"Deleted by {winner}: {reason}.{aside}"
        case "won, not published":
            return f"{name} won: {reason}. It is not published yet, {still}{aside}"
        case "shown":
            several = f" Readers see all {len(seen)} rows until the partition is merged." if len(seen) > 1 else ""
            return f"{name} is shown: {reason}.{several}{aside}"
    failed = head.body.failed if head else None
    first = failed.reason.partition("\n")[0] if failed else ""
    mark = f" (batch {failed.batch} failed: {first})" if failed else ""
    return f"{name} will win: {reason}. It is not merged yet{mark}, {still}{aside}"


def _reason(spec: TableSpec, winner: KeyRow, other: KeyRow) -> str:
    """What decided between two rows that follow each other by rank: the first part of the rank that differs."""
    both = pa.concat_tables([winner.values, other.values])

    def differ(column: str) -> bool:
        first, second = sortable(both[column]).to_pylist()
        return bool(first != second)

    def against(column: str) -> str:
        first, second = (row.texts([column])[column] for row in (winner, other))
        return (
            f"{column}, {'null' if first is None else first} against {'null' if second is None else second} of {other}"
        )

    for ordering in spec.ordering:
        if differ(ordering.column):
            return f"{'lesser' if ordering.ascending else 'greater'} {against(ordering.column)}"
    equal = f"equal {', '.join(spec.order_by)} and "
    if spec.ties == "content":
        if winner.deletes != other.deletes:
            return f"{equal}a delete, against {other}"
        for column in spec.content:
            if differ(column):
                return f"{equal}greater {against(column)}"
    if winner.link is None or other.link is None:
        return f"{equal}merged when the appended file was there, against {other}"
    ties = {AGE.name: "later batch", FILE: "later file of the batch", PLACE: "later place in the file"}
    return equal + next(text for column, text in ties.items() if differ(column)) + f" than {other}"


def describe_unseen(
    of_key: Mapping[int, int | None], settled: Mapping[int, int], gone: Sequence[tuple[int, str]], gone_before: int
) -> str:
    """Other rows that the key had, or may have had, beside those that were found; empty if there were none.

    Args: as the fields `settled_of_key`, `settled`, `gone` and `gone_before` of `ExplainedPartition`.
    """
    parts = []
    for batch, rows in settled.items():
        is_known = of_key[batch] is not None
        whose = "this key" if is_known else "this partition, perhaps of this key,"
        count = f"{rows} {'other ' if is_known else ''}row{'' if rows == 1 else 's'}"
        parts.append(f"; {count} of {whose} lost within batch {batch} and {'is' if rows == 1 else 'are'} not stored")
    if gone:
        batches = ", ".join(str(batch) for batch in sorted({batch for batch, _ in gone}))
        parts.append(f"; the appended files of batch {batches} are gone and may have held others")
    if gone_before > 1:
        parts.append(f"; the appended files of batches before {gone_before} are gone and may have held others")
    return "".join(parts)


def describe_gone(files: int, before: int) -> str:
    """How many appended files are gone, besides those of batches ``before`` one."""
    some = f"; {files} appended files are gone" if files else ""
    return some + (f"; those of batches before {before} are gone" if before > 1 else "")
