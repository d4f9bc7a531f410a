"""Every object of small tables of each kind, in turn missing, empty, cut in half, or with one bit changed.

Whoever asks gets the answer from before, or an error that names an object; never another answer, never a traceback. If somebody
gets an error, `fsck` has a finding. `make test`
takes two of the tables, and every second damage of each object; `make test-damage` takes all, and changes 64 bits.
"""

import dataclasses
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table
from lakeupsert.errors import LakeupsertError
from tests.harness.lake import Lake, row

FLIPS = int(os.environ.get("DAMAGE_FLIPS", "1"))
ALL_KINDS = "DAMAGE_FLIPS" in os.environ
ROWS = 3000
"""So many that a delta's deletion vector is an object of its own."""
HINTS = ("queue.sqlite", "/tmp/")
"""What may be lost or damaged and changes no answer: `reconcile` sends lost messages again."""

KINDS: dict[str, dict[str, Any]] = {
    "rewrite": {"strategy": "rewrite"},
    "delta": {"strategy": "delta"},
    "history": {"strategy": "delta", "history": True},
    "columns": {"mode": "columns"},
    "key index": {"key_scope": "table"},
    "forgetting": {"tombstone_retention": "0s"},
}
SOME = list(KINDS) if ALL_KINDS else ["delta", pytest.param("key index", marks=pytest.mark.long)]


def made(folder: Path, kind: str) -> Lake:
    """Nights with updates, deletes and refused rows; the last one is appended and not merged."""
    lake = Lake(folder, quarantine_limit="50%", **KINDS[kind])
    count = ROWS if kind == "delta" else 60
    lake.land("1.jsonl", [row(f"{n:05d}", n % 2, 1, n) for n in range(count)])
    lake.run()
    for night in (2, 3):
        keys = range(night, count, 7)
        rows = [row(f"{n:05d}", n % 2, night, n, op="D" if n % 5 == 0 else None) for n in keys]
        bad = [{**row("bad", 0, night), "k": None}]
        lake.land(f"{night}.jsonl", [*rows, *bad], refused=bad)
        lake.run()
    lake.land("4.jsonl", [row(f"{n:05d}", n % 2, 4, -n) for n in range(0, count, 9)])
    lake.table.append(host="local")
    lake.table.close()
    return lake


# ---------------------------------------------------------------- what people ask


class Told(LakeupsertError):
    """What an answer says besides."""


def rows_of(table: Table, snapshot: str) -> Any:
    return table.to_arrow(snapshot).read_all()


def snapshots_of(table: Table) -> Any:
    if lost := table.lost_snapshots():
        raise Told("lost-snapshots", f"/{lost}", next="-")
    return [(s.number, s.written_at, s.body) for s in table.snapshots()]


def proof_of(table: Table) -> Any:
    proof = table.reconcile().proof
    for partition in proof:
        if not partition.balanced:
            raise Told("not-balanced", str(partition.difference), next="-")
    return proof


def explanation_of(table: Table) -> Any:
    found = table.explain({"k": "00009", "l": 0})
    if any(partition.gone or partition.gone_before > 1 for partition in found.partitions):
        raise Told("appended-file-gone", str(found.partitions), next="-")
    return [dataclasses.replace(partition, since=None) for partition in found.partitions]


QUESTIONS: dict[str, Callable[[Table], Any]] = {
    "published rows": lambda table: rows_of(table, "published"),
    "latest rows": lambda table: rows_of(table, "latest"),
    "history of rows": lambda table: table.to_arrow(history=True).read_all() if table.settings.history else None,
    "snapshots": snapshots_of,
    "proof": proof_of,
    "explanation": explanation_of,
    "quarantined rows": lambda table: table.quarantine().read_all(),
    "difference": lambda table: table.diff(0, "latest"),
    "columns": lambda table: table.columns(),
}


def answers(lake: Lake) -> Iterator[tuple[str, Any]]:
    """Each question's answer, or the error that came instead, as a new process gets it."""
    for name, ask in QUESTIONS.items():
        table = Table("t", lake.settings)
        try:
            yield name, ask(table)
        except LakeupsertError as e:
            yield name, e
        finally:
            table.close()


def night_after(lake: Lake) -> Any:
    """The rows after the next night and a replay of what was refused, or the error that came instead."""
    lake.land("5.jsonl", [row("00001", 1, 5, 5), row("new", 0, 5, 5)])
    table = Table("t", lake.settings)
    try:
        for result in table.run(host="local", workers=1).dedupe:
            if result.status == "failed":
                raise Told("failed-partition", str(result.error), next="-")
        table.append(replay_quarantine=True)
        return rows_of(table, "published")
    except LakeupsertError as e:
        return e
    finally:
        table.close()


# ---------------------------------------------------------------- damage


def damages(good: bytes, number: int) -> Iterator[tuple[str, bytes | None]]:
    """What is done to object ``number``."""
    every = all_damages(good, number)
    return every if ALL_KINDS else islice(every, number % 2, None, 2)


def all_damages(good: bytes, seed: int) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    if good:
        yield "empty", b""
        yield "half", good[: len(good) // 2]
        for bit in random.Random(seed).sample(range(len(good) * 8), min(FLIPS, len(good) * 8)):
            damaged = bytearray(good)
            damaged[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit}", bytes(damaged)


@dataclass
class Outcome:
    """How often damage was named, and had no effect; and each time that it was neither."""

    named: int = 0
    without_effect: int = 0
    wrong: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    def take(self, what: str, found: Any, before: Any, *, is_found: bool) -> None:
        """``is_found``: `fsck` has a finding."""
        if isinstance(found, LakeupsertError):
            self.named += 1
            self.codes[found.code] += 1
            if not is_found:
                self.wrong.append(f"{what}: fsck finds nothing, and this ends with {found}")
            if not ("/" in found.message and found.next):
                self.wrong.append(f"{what}: names no object: {found}")
        elif found == before:
            self.without_effect += 1
        else:
            self.wrong.append(f"{what}: answers otherwise")


def is_found(lake: Lake) -> bool:
    with closing(Table("t", lake.settings)) as table:
        return bool(table.fsck(deep=True).findings)


def objects_of(lake: Lake) -> list[Path]:
    return sorted(p for p in (lake.root / "processed").rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.long
def test_readers(folder: Path, kind: str) -> None:
    lake = made(folder / "lake", kind)
    before = dict(answers(lake))
    assert not [a for a in before.values() if isinstance(a, LakeupsertError)]
    shutil.copytree(lake.root, folder / "whole")
    newest_entry = min((lake.root / "processed/_lakeupsert/ledger").iterdir())
    outcome = Outcome()
    for number, path in enumerate(objects_of(lake)):
        if any(hint in str(path) for hint in HINTS):
            continue
        good = path.read_bytes()
        for how, damaged in damages(good, number):
            if damaged is None and path == newest_entry:
                continue  # nobody else knows of a batch that nobody has merged yet (docs/FORMAT.md)
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            found_by_fsck = is_found(lake)
            for question, found in answers(lake):
                nobody_needs = question == "explanation" and path.suffix == ".pack"
                what = f"{path.relative_to(folder)}, {how}: {question}"
                outcome.take(what, found, before[question], is_found=found_by_fsck or nobody_needs)
            shutil.rmtree(lake.root)
            shutil.copytree(folder / "whole", lake.root)
    print(kind, outcome.named, outcome.without_effect, dict(outcome.codes))
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert outcome.named


@pytest.mark.long
@pytest.mark.parametrize("kind", SOME)
def test_the_night_after(folder: Path, kind: str) -> None:
    """Also of the queue: what was lost there is sent again."""
    lake = made(folder / "lake", kind)
    struck = lake.copy(folder / "struck")
    before = night_after(struck)
    assert not isinstance(before, LakeupsertError)
    outcome = Outcome()
    for number, path in enumerate(objects_of(lake)):
        good = path.read_bytes()
        for how, damaged in damages(good, number):
            shutil.rmtree(folder / "struck")
            struck = lake.copy(folder / "struck")
            there = folder / "struck" / path.relative_to(lake.root)
            there.unlink()
            if damaged is not None:
                there.write_bytes(damaged)
            found_by_fsck = is_found(struck) or any(hint in str(path) for hint in HINTS)
            outcome.take(f"{path.relative_to(folder)}, {how}", night_after(struck), before, is_found=found_by_fsck)
    print(kind, outcome.named, outcome.without_effect, dict(outcome.codes))
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert outcome.named
