"""A truncate that `capture` reads becomes deletes of the rows that are there, at its place. The messages are recorded ones."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.sources.truncates import Truncates
from lakeupsert.table.types import is_key_type
from tests.integration.test_stated_types import recorded

Message = Any  # decoded JSON


class Lake:
    def __init__(self, root: Path, **settings: Any) -> None:
        self.landing = root / "landing"
        (self.landing / "shop").mkdir(parents=True, exist_ok=True)
        given = {
            "key": ("id",),
            "partition_by": (),
            "order_by": ("__log_position",),
            "read": ReadSettings(envelope="debezium"),
            "delete": DeleteSettings(column="__op", values=("d",)),
            **settings,
        }
        name = given.pop("name", "t")
        self.settings = TableSettings(landing=str(self.landing), processed=str(root / name), **given)
        self.table, self.open = Table(name, self.settings), OpenTable(name, self.settings)

    def land(self, lines: list[Any]) -> None:
        texts = [line.decode() if isinstance(line, bytes) else json.dumps(line) for line in lines]
        name = f"{len(list((self.landing / 'shop').iterdir())):012}.jsonl"
        (self.landing / "shop" / name).write_text("".join(f"{text}\n" for text in texts))

    def night(self, lines: list[Any]) -> None:
        self.land(lines)
        self.table.run(host="local")
        assert not self.table.quarantine().read_all().num_rows

    @property
    def rows(self) -> list[tuple[str, int]]:
        names = list(map(self.settings.reading.table_name_of, ("__source_table", "id")))
        return sorted(tuple(row.values()) for row in self.table.to_arrow(columns=names).read_all().to_pylist())


def changes(kind: str, mode: str = "adaptive_time_microseconds") -> list[Message]:
    """One recorded change without nulls, at several places, of several rows."""
    one = next(m for m in recorded(kind)[mode][1] if None not in (m["payload"]["after"] or {}).values())
    found = []
    for number in range(4):
        message = copy.deepcopy(one)
        message["payload"]["after"]["id"] = number
        found.append(at(message, number))
    return found


def at(message: Message, place: int, **payload: Any) -> Message:
    message = copy.deepcopy(message)
    source = message["payload"]["source"]
    source["snapshot"], message["payload"]["op"] = "false", "c"
    if source["connector"] == "mariadb":
        source["pos"] += place * 1000
    else:
        source["lsn"] += place * 1000
        source["sequence"] = json.dumps([str(source["lsn"] - 8), str(source["lsn"])])
    message["payload"].update(payload)
    return message


def truncate(message: Message, place: int) -> Message:
    return at(message, place, op="t", before=None, after=None)


def truncates(*lakes: Lake) -> Truncates:
    return Truncates("shop", [lake.open for lake in lakes], Stop())


def of_other_table(messages: list[Message]) -> list[Message]:
    others = copy.deepcopy(messages)
    for message in others:
        message["payload"]["source"]["table"] = "other"
        message["payload"]["after"]["id"] += 10
    return others


def line(message: Message) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_rows_of_every_type_are_deleted(tmp_path: Path, kind: str) -> None:
    """All columns that may be of a key are of it: a value that comes back as another one would leave its row."""
    rows = changes(kind)
    look = Lake(tmp_path / "look")
    look.night(rows)
    schema = look.table.to_arrow().schema
    key = tuple(f.name for f in schema if is_key_type(f.type) and not f.name.startswith("__"))
    assert len(key) > 15
    lake = Lake(tmp_path / "all", key=key)
    lake.night(rows[:2])
    deletes = truncates(lake).deletes(line(truncate(rows[0], 8)), map(line, rows[2:]))
    lake.night([*rows[2:], *deletes, at(rows[3], 9)])
    assert [id_ for _, id_ in lake.rows] == [3]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"partition_by": ("date(ts) as day", "v"), "key": ("__source_table", "id")},
        {"order_by": ("ts",), "order_in_name": None},
        {"mode": "columns", "key_scope": "table", "partition_by": ("v",)},
        {
            "read": ReadSettings(envelope="debezium", aliases={"__source_table": "origin", "id": "number"}),
            "key": ("origin", "number"),
        },
    ],
    ids=["partitions", "order", "columns", "aliases"],
)
def test_only_the_rows_of_the_truncated_table_go(tmp_path: Path, settings: dict[str, Any]) -> None:
    lake, rows = Lake(tmp_path, **settings), changes("postgresql")
    others = of_other_table(rows)
    lake.night([*rows[:2], *others[:2]])
    waiting = [rows[2], others[2], at(rows[0], 3, op="d", before=rows[0]["payload"]["after"], after=None)]
    deletes = truncates(lake).deletes(line(truncate(rows[0], 8)), map(line, waiting))
    lake.night([*waiting, *deletes, at(rows[1], 9)])
    assert lake.rows == [("other", 10), ("other", 11), ("other", 12), ("typed", 1)]


def test_two_tables_take_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the rows of one table of the database, by `only`, and another key."""
    rows = changes("postgresql")
    others = of_other_table(rows)
    typed, other = (
        Lake(tmp_path, name=name, key=key, read=ReadSettings(envelope="debezium", only={"__source_table": name}))
        for name, key in (("typed", ("id",)), ("other", ("i8", "id")))
    )
    typed.night([*rows[:2], *others[:2]])
    both = truncates(typed, other)
    event = line(truncate(others[0], 8))
    monkeypatch.setattr("lakeupsert.sources.truncates._PATIENCE_SECONDS", 0.0)
    with pytest.raises(TryAgainError) as caught:
        list(both.deletes(event, []))
    assert caught.value.code == "truncate-waits"
    assert "'other' has all of them: 1 file" in caught.value.message
    other.table.run(host="local")
    typed.land(list(both.deletes(event, map(line, others[2:]))))
    for lake in (typed, other):
        lake.table.run(host="local")
        assert not lake.table.quarantine().read_all().num_rows
    assert (typed.rows, other.rows) == ([("typed", 0), ("typed", 1)], [])


def test_a_table_that_does_not_say_where_its_rows_came_from(tmp_path: Path) -> None:
    lake, rows = Lake(tmp_path, key=("id",)), changes("postgresql")
    lake.night(rows)
    lake.table.drop_column("__source_table")
    with pytest.raises(ConfigurationError) as caught:
        list(truncates(lake).deletes(line(truncate(rows[0], 8)), []))
    assert caught.value.code == "truncate-unapplied"
    assert "__source_table" in caught.value.message


def test_a_table_without_a_batch_has_no_rows(tmp_path: Path) -> None:
    lake, rows = Lake(tmp_path), changes("mariadb")
    assert len(list(truncates(lake).deletes(line(truncate(rows[0], 8)), map(line, rows)))) == 4
