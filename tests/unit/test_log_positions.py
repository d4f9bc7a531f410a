"""The position that an event of Debezium gets: as text, it sorts like the log of its database."""

import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from lakeupsert.landing.formats.positions import log_position


def postgresql(commit: int | None, change: int | None, snapshot: str = "false") -> dict[str, Any]:
    """As in `source`; ``commit``: the end of the last commit before the event."""
    first, second = (f'"{n}"' if n is not None else "null" for n in (commit, change))
    return {"connector": "postgresql", "snapshot": snapshot, "sequence": f"[{first},{second}]", "lsn": change}


def mariadb(file: str, place: int, row: int | None = 0) -> dict[str, Any]:
    return {"connector": "mariadb", "file": file, "pos": place, "row": row}


def sqlserver(commit: int, change: int | None, serial: int | None = None) -> dict[str, Any]:
    lsn = "00000027:{:08x}:0001".format
    made = None if change is None else lsn(change)
    return {"connector": "sqlserver", "commit_lsn": lsn(commit), "change_lsn": made, "event_serial_no": serial}


@pytest.mark.parametrize(
    "log",
    [
        [
            postgresql(None, 500, "first"),
            postgresql(None, 400),  # open while the snapshot was read
            postgresql(None, 600),  # of the same transaction
            postgresql(700, 690),
            postgresql(
                1000, None, "incremental"
            ),  # a snapshot's row has no LSN, and comes after the commit that ends at 1000
            postgresql(1000, 90),  # waited for the commit before
            postgresql(1000, 1010),
            postgresql(10**18, 2),
        ],
        [
            mariadb("bin.999999", 154, 0),
            mariadb("bin.999999", 2**33, 2),
            mariadb("bin.999999", 2**33, 10),
            mariadb("bin.1000000", 4, None),
        ],
        [
            sqlserver(9, None),
            sqlserver(9, 4, 1),
            sqlserver(9, 4, 2),
            sqlserver(9, 4, 10),
            sqlserver(9, 8, 1),
            sqlserver(10, 2, 1),
        ],
    ],
    ids=["postgresql", "mariadb", "sqlserver"],
)
def test_positions_sort_like_the_log(log: list[dict[str, Any]]) -> None:
    positions = [log_position(source) for source in log]
    assert None not in positions
    for earlier, later in permutations(range(len(log)), 2):
        assert (earlier < later) == (positions[earlier] < positions[later]), (log[earlier], log[later])  # type: ignore[operator]


@pytest.mark.parametrize(
    "source",
    [
        None,
        {},
        {"connector": "oracle", "scn": "1"},
        {"connector": "postgresql", "lsn": 1},
        {"connector": "postgresql", "sequence": None},
        {"connector": "postgresql", "sequence": "7"},
        {"connector": "postgresql", "sequence": '["x",null]'},
        {"connector": "mysql", "file": "binlog", "pos": 4},
        {"connector": "mysql", "file": "binlog.000001"},
        {"connector": "sqlserver", "commit_lsn": None},
        {"connector": "sqlserver", "commit_lsn": "27:758:5"},
        {"connector": "postgresql", "sequence": "[1e3,2e3.5]"},
        {"connector": "postgresql", "sequence": '["1.5","2"]'},
        {"connector": "postgresql", "sequence": '["-1","2"]'},
        {"connector": "postgresql", "sequence": '["1","2","3"]'},
        {"connector": "postgresql", "sequence": f'["{10**19}","2"]'},
        {"connector": "mysql", "file": "binlog.000001", "pos": 10.0},
        {"connector": "mysql", "file": "binlog.000001", "pos": True},
        {"connector": "mysql", "file": "binlog.000001", "pos": -4},
    ],
)
def test_no_position_is_made_up(source: Any) -> None:
    assert log_position(source) is None


class History:
    """A small PostgreSQL with a connector: transactions that overlap, a slot, a first snapshot, and incremental ones.

    ``committed`` has what the connector streams: changes of a transaction as (lsn, key, value), or a signal.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.lsn = chance, 100
        self.rows: dict[int, int | None] = {}
        self.open: list[list[tuple[int, int, int | None]]] = []
        self.waiting: dict[int, tuple[int, int, list[tuple[int, int, int | None]]]] = {}
        """By the identity of a transaction, an insert that it wrote already: its LSN, its key, and whose end it waits for."""
        self.committed: list[tuple[int, Any]] = []
        self.events: list[tuple[int, int | None, dict[str, Any]]] = []

    def tick(self) -> int:
        self.lsn += self.chance.choice([1, 8, 900])
        return self.lsn

    def change(self) -> None:
        """A key that another open transaction changed is left alone, or an insert of it waits for the other's end."""
        if len(self.open) == len(self.waiting) or (len(self.open) < 3 and self.chance.random() < 0.4):
            self.open.append([])
        one = self.chance.choice([found for found in self.open if id(found) not in self.waiting])
        key = self.chance.randrange(4)
        holder = next((more for more in self.open if more is not one and key in {other[1] for other in more}), None)
        if holder is not None:
            waited_for = any(other is one for _, _, other in self.waiting.values())
            if id(holder) not in self.waiting and not waited_for:
                self.waiting[id(one)] = (self.tick(), key, holder)
        else:
            one.append((self.tick(), key, self.chance.choice([None, self.lsn, self.lsn])))

    def commit(self) -> None:
        ready = [found for found in self.open if id(found) not in self.waiting]
        if ready:
            changes = self.chance.choice(ready)
            self.open = [found for found in self.open if found is not changes]
            self.rows |= {key: value for _, key, value in changes}
            self.committed.append((self.tick(), changes))
            for one in self.open:
                lsn, key, holder = self.waiting.get(id(one), (0, 0, None))
                if holder is changes:
                    del self.waiting[id(one)]
                    if self.rows.get(key) is None and not any(key == c[1] for more in self.open for c in more):
                        one.append((lsn, key, lsn))  # deleted: the insert goes on

    def some(self) -> None:
        for _ in range(self.chance.randrange(6)):
            self.chance.choice([self.change, self.change, self.commit])()

    def signal(self, chunk: dict[int, int | None] | None) -> None:
        """Open a window, or close it with the rows that were read in it."""
        self.tick()
        self.committed.append((self.tick(), chunk))

    def read(self, commit: int | None, change: int | None, kind: str, rows: dict[int, int | None]) -> None:
        found = postgresql(commit, change, kind)
        self.events += [(key, value, found) for key, value in rows.items() if value is not None]

    def stream(self) -> None:
        last: int | None = None
        seen: set[int] = set()
        for end, what in self.committed:
            if what is None:
                seen = set()
            elif isinstance(what, dict):
                self.read(last, end - 1, "incremental", {k: v for k, v in what.items() if k not in seen})
            else:
                self.events += [(key, value, postgresql(last, lsn)) for lsn, key, value in what]
                seen |= {key for _, key, _ in what}
            last = end


@pytest.mark.parametrize("slot", ["before the snapshot", "with the snapshot"])
def test_greatest_position_is_the_row_of_the_database(slot: str) -> None:
    wrong_by_lsn = 0
    for seed in range(1000):
        history = History(random.Random(seed))
        history.some()
        while history.open:
            history.commit()  # to make a slot waits for open transactions
        history.committed = []
        if slot == "before the snapshot":
            history.some()
        history.read(None, history.tick(), "true", dict(history.rows))
        for _ in range(3):
            history.some()
            history.signal(None)
            history.some()
            chunk = dict(history.rows)
            history.some()
            history.signal(chunk)
        history.some()
        history.stream()
        expected = {key: value for key, value in history.rows.items() if value is not None}
        assert winners(history, log_position) == expected, seed
        wrong_by_lsn += winners(history, lambda source: source["lsn"] or 0) != expected
    assert wrong_by_lsn > 50


def winners(history: History, order: Callable[[dict[str, Any]], Any]) -> dict[int, int]:
    best: dict[int, tuple[Any, int, int | None]] = {}
    for place, (key, value, found) in enumerate(history.events):
        best[key] = max(best.get(key, (order(found), -1, None)), (order(found), place, value), key=lambda one: one[:2])
    return {key: value for key, (_, _, value) in best.items() if value is not None}
