"""Write the golden tables: small tables as lakeupsert 0.1.0 left them, and what it read of them.

    PYTHONPATH=CHECKOUT python tests/golden/make_tables.py FOLDER

CHECKOUT is a clone of the release that writes: the first commit with ADR 0051 wrote those in `tables/`, and one of that format
`appended`. The first commit with format 2 (ADR 0053) wrote `appended_2`, and the first one with ADR 0066 `groups`. No later
change may break them, so never write one of them again: add a new one beside it. Each table becomes one archive:
`lake/landing`, `lake/processed`, `later.jsonl` (the files of one more night), `expected.json` (what readers saw before and after
that night) and `README` (this promise).
`tests/integration/test_golden_tables.py` reads, merges, compacts and vacuums them.
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from lakeupsert import Table
from lakeupsert.pipeline.opened import OpenTable
from tests.harness.lake import Lake, row

NIGHTS, KEYS, DAYS = 5, 40, 3
README = """A table of format 1 (docs/FORMAT.md), as lakeupsert 0.1.0 wrote it.

These tables were written anew once, before the first release: that was the one break of the stored format (ADR 0051).
Every later lakeupsert reads, merges, compacts and vacuums this table, and shows exactly the rows of expected.json.
"""


@dataclass(frozen=True)
class Case:
    """Settings of a table; ``prepare`` runs before its first night, ``change`` after its third, ``leave`` at the end.

    ``lead``: one process leads it through all nights.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[Lake], object] = lambda lake: None
    change: Callable[[Lake], object] = lambda lake: None
    leave: Callable[[Lake], object] = lambda lake: None
    lead: bool = False


def adopt(lake: Lake) -> None:
    lake.lay("old.parquet", [row(f"k{i:02}", i % DAYS, 0, 1000 + i) for i in range(KEYS)])
    lake.table.adopt()


def restore(lake: Lake) -> None:
    lake.table.restore(lake.table.snapshots()[1].number, dry=False)
    lake.table.dedupe()
    lake.table.publish()


def append(lake: Lake) -> None:
    """A batch that nobody has merged, with so many rows that its files are in pieces."""
    lake.land("pending.jsonl", [row(f"k{i:04}", i % DAYS, NIGHTS, i) for i in range(4000)])
    lake.table.append()


CASES = {
    "rewrite": Case({"strategy": "rewrite"}),
    "delta": Case({"strategy": "delta"}),
    "buckets": Case({"strategy": "delta", "bucket": "2KB"}),
    "history": Case({"history": True, "strategy": "delta"}),
    "columns": Case({"mode": "columns"}),
    "key_scope": Case({"key_scope": "table"}),
    "renames": Case({"strategy": "delta"}, change=lambda lake: lake.table.rename_column("v", "amount")),
    "adopted": Case({"strategy": "auto"}, prepare=adopt),
    "restored": Case({"strategy": "delta"}, change=restore),
    "whole": Case({"partition_by": (), "strategy": "delta"}),
    "hashed": Case({"partition_by": ("d", "bucket(3, k)"), "strategy": "delta"}),
    "versions": Case({"versions": True, "strategy": "delta"}, prepare=adopt),
    "floors": Case({"tombstone_retention": "0s", "strategy": "rewrite"}),
    "appended": Case({"strategy": "delta", "bucket": "2KB"}, leave=append),
    "appended_2": Case({"strategy": "delta", "bucket": "2KB"}, leave=append),
    "groups": Case({"strategy": "delta"}, lead=True),
}


def night(number: int, case: str) -> list[dict[str, object]]:
    """Updates, late and equal records, deletes; of mode columns some columns only, after a rename the new name."""
    chance = random.Random(f"{case} {number}")
    rows = []
    for _ in range(30):
        one = dict(
            row(
                f"k{chance.randrange(KEYS):02}",
                chance.randrange(DAYS),
                chance.randrange(2 * NIGHTS),
                chance.randrange(10**6),
                op="D" if chance.random() < 0.15 else None,
            )
        )
        if case == "columns" and chance.random() < 0.3:
            del one["v"]
        if case == "renames" and number > 3:
            one["amount"] = one.pop("v")
        rows.append(one)
    return rows


def as_text(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps({name: as_text(value) for name, value in one.items()}) + "\n" for one in rows)


def read(lake: Lake) -> dict[str, object]:
    """All that readers see: each snapshot, and all versions where the table has a history."""
    found: dict[str, object] = {str(link.number): lake.rows(link.number) for link in lake.table.snapshots()}
    if lake.settings.history:
        found["history"] = lake.table.to_arrow(history=True).read_all().to_pylist()
    return found


def make(name: str, case: Case, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "lake"
        lake = Lake(root, **case.settings)
        case.prepare(lake)
        opened = OpenTable("t", lake.settings)
        leader = Table.of(opened)
        for number in range(1, NIGHTS + 1):
            (root / "landing" / f"{number}.jsonl").write_text(lines(night(number, name)))
            with opened.leading() if case.lead else nullcontext():
                (leader if case.lead else lake.table).run(host="local")
            if number == 3:
                case.change(lake)
        leader.close()
        case.leave(lake)
        expected = {"before": read(lake)}
        lake.table.close()
        shutil.copytree(root, Path(folder) / "kept" / "lake")
        later = lines(night(NIGHTS + 1, name))
        (Path(folder) / "kept" / "later.jsonl").write_text(later)
        (root / "landing" / "later.jsonl").write_text(later)
        lake.reopen()
        lake.run()
        expected["after"] = read(lake)
        lake.table.close()
        (Path(folder) / "kept" / "expected.json").write_text(json.dumps(expected, default=as_text))
        (Path(folder) / "kept" / "README").write_text(README)
        shutil.make_archive(str(target / name), "gztar", Path(folder) / "kept")


if __name__ == "__main__":
    for one, settings in CASES.items():
        make(one, settings, Path(sys.argv[1]))
