"""A lake as a dict: the expected rows after the ledger's batches, computed without any code of the product."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import total_ordering
from typing import Any

from lakeupsert.table.ledger import LedgerEntry

Row = Mapping[str, Any]  # values of ordering columns are compared, which `object` does not allow
Change = Callable[[Row], Row | None]
"""What an update or delete makes of a row: the changed row, a delete, or None if it is not for this row."""


@dataclass(frozen=True)
class Rules:
    """Which columns decide, and which rows are deletes.

    ``partition`` names the partition columns. Those that are ``hashed`` are not in the rows that land: each is the hash of some
    columns modulo a number. In ``ascending`` ordering columns the smallest value wins, in ``nulls_first`` ones null wins.
    ``content``: the columns that decide between equal ordering values, instead of arrival. With ``in_table`` a key has one row
    in the whole table. With ``versions`` rows have the batch that they came with, and its receipt stamp.
    """

    key: tuple[str, ...]
    order_by: tuple[str, ...]
    partition: tuple[str, ...]
    delete_column: str | None = None
    delete_values: tuple[str, ...] = ()
    ascending: tuple[str, ...] = ()
    nulls_first: tuple[str, ...] = ()
    content: tuple[str, ...] | None = None
    in_table: bool = False
    hashed: Mapping[str, tuple[Sequence[str], int]] = field(default_factory=dict)
    versions: bool = False

    def complete(self, row: Row) -> dict[str, Any]:
        """A row that landed with its hashed columns, as readers see it."""
        return {**row, **{name: hash_of([row[c] for c in of]) % n for name, (of, n) in self.hashed.items()}}

    def deletes(self, row: Row) -> bool:
        return str(row.get(self.delete_column or "")) in self.delete_values


@total_ordering
@dataclass(frozen=True)
class Backwards:
    """A value that sorts in reverse order."""

    value: Any

    def __lt__(self, other: "Backwards") -> bool:
        return bool(other.value < self.value)


def rank(row: Row, rules: Rules, batch: int, file: int, place: int) -> tuple[Any, ...]:
    """The rank: ordering columns, then content if given, then batch, file and place in the file."""
    order = []
    for c in rules.order_by:
        value = Backwards(row[c]) if c in rules.ascending and row[c] is not None else row[c]
        order.append(((row[c] is None) == (c in rules.nulls_first), value))
    content: tuple[Any, ...] = ()
    if rules.content is not None:
        content = (rules.deletes(row), *((row[c] is not None, row[c]) for c in rules.content))
    return tuple(order), content, batch, file, place


def expected(
    rules: Rules,
    entries: Iterable[tuple[int, LedgerEntry]],
    landed: Mapping[str, Sequence[Row]],
    up_to: int,
    refused: Mapping[str, Sequence[Row]] | None = None,
    passes: Callable[[Row, LedgerEntry], bool] = lambda row, entry: False,
    adopted: Mapping[str, Sequence[Row]] | None = None,
    unsettled: Collection[str] = (),
    statements: Mapping[str, Change] | None = None,
    known: dict[int, list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """The rows of the table after the ledger entries up to number ``up_to``, by partition and key.

    Args:
        landed: the rows of every landing file ever written, by path; the ledger says which batch took which file.
        refused: the rows at the ends of these files that go to quarantine, unless a row ``passes`` in a batch or a replay. A
            batch must have at most one quarantine file.
        adopted: the rows of the files that the table started with, by name. They are batch 0 and always count.
        unsettled: partitions that show their adopted files unchanged, one after the other. If a key has one row in the whole
            table, these rows still compete with those of other partitions.
        statements: by batch id, what an update or delete does.
        known: the rows after earlier entries, filled here: each statement asks for those before it.
    """
    known = {} if known is None else known
    entries = list(entries)
    ledger = dict(entries)
    best: dict[tuple[Any, ...], tuple[tuple[Any, ...], dict[str, Any], bool]] = {}
    quarantined: dict[str, Sequence[Row]] = {}

    def add(landed_row: Row, batch: int, file: int, place: int, *, is_shown: bool = True) -> None:
        row = rules.complete(landed_row)
        key = (*(() if rules.in_table else (row[c] for c in rules.partition)), *(row[c] for c in rules.key))
        ranked = rank(row, rules, batch, file, place)
        row |= version(batch)
        if key not in best or best[key][0] < ranked:
            best[key] = ranked, row, is_shown

    def version(batch: int) -> dict[str, Any]:
        received_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ledger[batch].received_at)
        names = ("_lakeupsert_batch", "_lakeupsert_received_at")
        return dict(zip(names, (batch, received_at), strict=True)) if rules.versions else {}

    unchanged: list[Row] = []
    for partition, touched in ledger[0].touched.items():
        files = [(adopted or {})[f.name] for f in touched.files]
        if partition in unsettled:
            unchanged += [{**row, **version(0)} for rows in files for row in rows]
            if not rules.in_table:
                continue
        for file, rows in enumerate(files):
            for place, row in enumerate(rows):
                add(row, 0, file, place, is_shown=partition not in unsettled)
    for number in counts_at(ledger, up_to):
        entry = ledger[number]
        if entry.statement is not None:
            for at in (entry.statement.seen, number - 1):
                if at not in known:
                    known[at] = expected(rules, entries, landed, at, refused, passes, adopted, (), statements, known)
            seen, before = known[entry.statement.seen], known[number - 1]
            change = (statements or {})[entry.batch_id]
            assert entry.touched.keys() == {_partition(row, rules) for row in seen if change(row)}
            # Where it found rows, it must have seen everything that is before it.
            found = [row for row in before if _partition(row, rules) in entry.touched]
            for place, row in enumerate(filter(None, map(change, found))):
                add(row, number, 0, place)
            continue
        attempted = [(landed[f.path], (refused or {}).get(f.path, ())) for f in entry.files]
        attempted += [((), quarantined.pop(f.name)) for f in entry.replayed]  # fails if rows are replayed twice
        remaining = [row for _, doubtful in attempted for row in doubtful if not passes(row, entry)]
        quarantined |= {f.name: remaining for f in entry.quarantine}
        for file, (good, doubtful) in enumerate(attempted):
            for place, row in enumerate([*good, *(row for row in doubtful if passes(row, entry))]):
                add(row, number, file, place)
    live = [row for _, row, is_shown in best.values() if is_shown and not rules.deletes(row)]
    live.sort(key=lambda row: [row[c] for c in rules.key])
    shown = sorted((*live, *unchanged), key=lambda row: [row[c] for c in rules.partition])
    return [{c: v for c, v in row.items() if c != rules.delete_column} for row in shown]


def _partition(row: Row, rules: Rules) -> str:
    return "/".join(f"{name}={row[name]}" for name in rules.partition) or "whole-table"


def hash_of(values: Sequence[str | int]) -> int:
    """The key hash of docs/FORMAT.md, of text and integers, by the reference XXH64."""
    import xxhash  # few tests need it

    def canonical(value: str | int) -> bytes:
        if isinstance(value, int):
            return value.to_bytes(8, "little", signed=True)
        data = value.encode()
        return len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8)

    return int(xxhash.xxh64_intdigest(b"".join(map(canonical, values))))


def counts_at(entries: Mapping[int, LedgerEntry], number: int) -> list[int]:
    """The batches that count at a ledger entry. After a restore, these are the batches that counted at its target."""
    if number < 0:
        return []
    entry = entries[number]
    if entry.restored is not None:
        return counts_at(entries, entry.restored.batch)
    return counts_at(entries, number - 1) + ([number] if entry.kind == "batch" else [])
