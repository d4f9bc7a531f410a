"""The position that an event of Debezium gets: as text, it sorts like the log of its database."""

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
    ],
)
def test_no_position_is_made_up(source: Any) -> None:
    assert log_position(source) is None
