"""Events that Debezium recorded (`tests/capture/shorten.py`), in the order of `__log_position`: the table is the database.

They have transactions that were open during the snapshot, inserts that waited for another transaction, key changes, several
changes of a key in one transaction, incremental and blocking snapshots, and events that a killed connector sent again.
"""

import io
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings
from lakeupsert.engine import hosts
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.operations.init.propose import propose
from lakeupsert.pipeline.append import append
from tests.harness.proof import assert_proved

Event = Mapping[str, Any]
Rows = list[list[Any]]
NAMES = ("id", "u", "area", "v")
RECORDED = Path(__file__).with_name("recorded")


def recorded(database: str) -> tuple[list[Event], Rows]:
    """The events, and the rows of the database after them."""
    *events, last = map(json.loads, (RECORDED / f"{database}.jsonl").read_text().splitlines())
    return events, last["rows"]


class Feed:
    """A table of such events, with a file a night."""

    def __init__(self, root: Path, *order_by: str, **settings: Any) -> None:
        self.root, self.nights = root, 0
        (root / "landing").mkdir(parents=True)
        given = {
            "key": ("id",),
            "partition_by": (),
            "order_by": order_by or ("__log_position",),
            "schema": {"id": "bigint", "u": "bigint", "area": "string", "v": "string"},
            "read": ReadSettings(envelope="debezium"),
            "delete": DeleteSettings(column="__op", values=("d",)),
            "quarantine_limit": 99,
            **settings,
        }
        zones = {zone: str(root / zone) for zone in ("landing", "processed")}
        self.table = Table("t", TableSettings(**(zones | given)))

    def land(self, events: Sequence[Event]) -> None:
        self.nights += 1
        text = "".join(json.dumps(event) + "\n" for event in events)
        (self.root / "landing" / f"{self.nights:02}.jsonl").write_text(text)

    def night(self, events: Sequence[Event], host: str = "local", **options: Any) -> Any:
        self.land(events)
        return self.table.run(host=host, **options).append

    def run(self, events: Sequence[Event], host: str = "local") -> list[str]:
        """Land the events in four nights; their warnings."""
        size = len(events) // 4 + 1
        parts = [events[begin : begin + size] for begin in range(0, len(events), size)]
        return [warning for part in parts for warning in self.night(part, host).warnings]

    def reconcile(self) -> None:
        assert_proved(self.table)

    @property
    def rows(self) -> Rows:
        found = self.table.to_arrow(columns=list(NAMES)).read_all().to_pylist()
        return sorted([row[name] for name in NAMES] for row in found)


def event(op: str, id_: int, v: str, source: Mapping[str, Any]) -> Event:
    row = {"id": id_, "u": None, "area": "a", "v": v}
    return {
        "op": op,
        "before": row if op == "d" else None,
        "after": None if op == "d" else row,
        "source": source,
        "ts_ms": 1,
    }


def source(commit: int | None, lsn: int | None, snapshot: str = "false", ts_us: int = 0) -> Mapping[str, Any]:
    sequence = json.dumps([None if n is None else str(n) for n in (commit, lsn)])
    return {"connector": "postgresql", "snapshot": snapshot, "sequence": sequence, "lsn": lsn, "ts_us": ts_us}


@pytest.mark.few(2)
@pytest.mark.parametrize("arrival", ["as sent", "shuffled"])
@pytest.mark.parametrize("settings", [{}, {"partition_by": ("area",), "key_scope": "table"}, {"mode": "columns"}])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_table_is_the_database(database: str, settings: Mapping[str, Any], arrival: str, tmp_path: Path) -> None:
    events, rows = recorded(database)
    if arrival == "shuffled":
        random.Random(database).shuffle(events)
    feed = Feed(tmp_path, **settings)
    warnings = feed.run(events)
    assert feed.rows == rows
    assert not warnings
    feed.reconcile()


@pytest.mark.few(1)
@pytest.mark.spark
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_table_is_the_database_on_spark(database: str, tmp_path: Path) -> None:
    events, rows = recorded(database)
    random.Random(database).shuffle(events)
    feed = Feed(tmp_path, engine="spark")
    feed.run(events, host="spark")
    assert feed.rows == rows


@pytest.mark.parametrize("column", ["__source_lsn", "__source_file"])
def test_order_that_loses_rows_is_warned_of_for_good(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append, "refuse_misplaced", lambda *given: None)
    events, rows = recorded("postgresql" if column == "__source_lsn" else "mariadb")
    feed = Feed(tmp_path, column, *(("__source_pos", "__source_row") if column == "__source_file" else ()))
    warnings = feed.run(events)
    assert (feed.rows == rows) == (column == "__source_file")  # whose files have names of one length
    warnings = [w for w in warnings if "compared as text" not in w or "begins" in w]
    assert len(warnings) == 4
    lasting = [*feed.table.status().warnings, *(f.next for f in feed.table.doctor() if f.level == "warning")]
    assert len([w for w in (*warnings, *lasting) if '`order_by = ["__log_position"]`' in str(w)]) == 6
    (tmp_path / "processed").rename(tmp_path / "old")
    again = Feed(tmp_path / "again")
    again.table = Table("t", TableSettings(**{**_given(feed), "order_by": ("__log_position",)}))
    again.table.run(host="local")
    assert again.rows == rows


def _given(feed: Feed) -> dict[str, Any]:
    settings = feed.table.settings
    return {
        name: getattr(settings, name)
        for name in ("landing", "processed", "key", "partition_by", "schema", "read", "delete")
    }


def test_event_without_a_position_is_refused(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    lacks = {"connector": "postgresql", "snapshot": "false", "lsn": 9}
    appended = feed.night([event("c", 1, "x", source(None, 5)), event("u", 1, "y", lacks)])
    assert appended.entry.quarantined == {"order_missing": 1}
    assert feed.rows == [[1, None, "a", "x"]]


def test_snapshot_may_be_a_boolean(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    of_mysql = {"connector": "mysql", "file": "b.000001"}
    feed.night([event("r", 1, "x", {**of_mysql, "pos": 4, "snapshot": True})])
    feed.night([event("u", 1, "y", {**of_mysql, "pos": 9, "snapshot": False})])
    assert [row[-1] for row in feed.rows] == ["y"]


def test_connector_without_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as e:
        Feed(tmp_path).night([event("c", 1, "x", {"connector": "oracle", "scn": "1"})])
    assert e.value.code == "missing-column"


def test_incremental_snapshot_under_an_order_by_time_is_warned_of(tmp_path: Path) -> None:
    """It was sent after the commit of a change that is streamed after it."""
    events = [
        event("r", 1, "old", source(50, None, "incremental", ts_us=9)),
        event("u", 1, "new", source(50, 60, ts_us=8)),
    ]
    types = {"id": "bigint", "u": "bigint", "__source_lsn": "bigint"}
    by_time = Feed(tmp_path / "time", *BY_TIME, schema=types)
    assert any("incremental" in warning for warning in by_time.night(events[:1]).warnings)
    by_time.night(events[1:])
    assert by_time.rows == [[1, None, "a", "old"]]
    by_position = Feed(tmp_path / "position")
    assert not by_position.night(events).warnings
    assert by_position.rows == [[1, None, "a", "new"]]


BY_LSN, BY_TIME = ("__source_lsn",), ("__source_ts_us", "__source_lsn")
SNAPSHOT = source(None, 500, "first", ts_us=5)
MISPLACED = {
    "open during the snapshot": (BY_LSN, [("r", "old", SNAPSHOT), ("u", "new", source(None, 400, ts_us=9))]),
    "deleted then": (BY_LSN, [("r", "old", SNAPSHOT), ("d", "old", source(None, 400, ts_us=9))]),
    "waited for an index": (BY_LSN, [("d", "old", source(5, 30)), ("c", "new", source(40, 10))]),
    "incremental": (BY_LSN, [("u", "old", source(10, 20)), ("r", "new", source(30, None, "incremental"))]),
    "incremental by time": (
        BY_TIME,
        [("r", "old", source(50, None, "incremental", ts_us=9)), ("u", "new", source(50, 60, ts_us=8))],
    ),
}
IN_PLACE = {
    "streamed": (BY_LSN, [("r", "old", SNAPSHOT), ("u", "new", source(600, 700)), ("d", "new", source(800, 900))]),
    "sent again": (BY_LSN, [("u", "old", source(5, 10)), ("u", "new", source(20, 30)), ("u", "old", source(5, 10))]),
    "began again": (BY_LSN, [("u", "old", source(5, 10)), ("r", "new", source(None, 90, "first"))]),
    "read what is streamed later": (BY_LSN, [("r", "new", source(10, 90, "true")), ("u", "new", source(20, 30))]),
}


@pytest.mark.parametrize("files", ["one file", "two files"])
@pytest.mark.parametrize("case", [*MISPLACED, *IN_PLACE])
def test_batch_that_shows_its_order_to_be_wrong_is_refused(case: str, files: str, tmp_path: Path) -> None:
    """What comes later in the files and in the log has to win. One of the two says nothing: the row may be right."""
    order, steps = (MISPLACED | IN_PLACE)[case]
    keys = range(1, 3 if files == "one file" else 2)
    events = [event(op, id_, v, given) for id_ in keys for op, v, given in steps]
    feed = Feed(tmp_path, *order, partition_by=("area",))
    if files == "two files":
        feed.land(events[:1])
        events = events[1:]
    if case in IN_PLACE:
        feed.night(events)
        return
    with pytest.raises(RefusedError, match=f"{len(keys)} key") as e:
        feed.night(events)
    assert (e.value.code, "__log_position" in e.value.next) == ("misplaced-events", True)
    assert not (tmp_path / "processed/_lakeupsert/ledger").exists()
    right = Feed(tmp_path / "right", landing=str(tmp_path / "landing"))
    right.table.run(host="local")
    assert [row[3] for row in right.rows] == ([] if case == "deleted then" else ["new"] * len(keys))


@pytest.mark.spark
def test_versions_that_are_settled_early_show_it_too(tmp_path: Path) -> None:
    feed, steps = Feed(tmp_path, *BY_LSN), MISPLACED["open during the snapshot"][1]
    with pytest.raises(RefusedError, match="1 key") as e:
        feed.night([event(op, 1, v, given) for op, v, given in [*steps] * 50], host="spark")
    assert e.value.code == "misplaced-events"


def test_later_event_with_the_same_values_shows_no_wrong_order(tmp_path: Path) -> None:
    """The incremental snapshot sends the long value that the update left as it is, and values that pyarrow does not compare."""
    steps = [("u", "__debezium_unavailable_value", source(100, 200)), ("r", "long", source(200, None, "incremental"))]
    events = [event(op, 1, v, given) for op, v, given in steps]
    for sent in events:
        sent["after"]["u"] = {"x": [1, None]}
    feed = Feed(tmp_path, *BY_LSN, mode="columns", schema={"id": "bigint"})
    feed.night(
        [event("c", 1, "long", source(50, 100)) | {"after": {"id": 1, "u": {"x": [0]}, "area": "a", "v": "long"}}]
    )
    feed.night(events)
    assert feed.rows == [[1, {"x": [1, None]}, "a", "long"]]
    events[1]["after"]["u"] = {"x": [2]}
    with pytest.raises(RefusedError, match="1 key"):
        feed.night(events)


def test_every_part_of_a_large_batch_shows_its_order_to_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lose are dropped each time that memory is full; the wrong one is in the last part."""
    monkeypatch.setattr(hosts, "HELD_BYTES", 60_000)
    feed = Feed(tmp_path, *BY_LSN)
    for part in range(6):
        feed.land([event("u", 1, f"{part}-{i}", source(n, n)) for i in range(500) if (n := 500 * part + i + 1)])
    with pytest.raises(RefusedError, match="1 key"):
        feed.night([event("u", 1, "new", source(29_000, 500))] * 50)


def test_transaction_that_was_open_during_the_snapshot(tmp_path: Path) -> None:
    """Its changes have lower LSNs than the snapshot, and it is the first that the connector streams."""
    read = [event("r", n, "old", source(None, 500, "first" if n == 1 else "true")) for n in (1, 2, 3)]
    changes = [event("u", 1, "new", source(None, 400)), event("d", 2, "old", source(None, 450))]
    feed = Feed(tmp_path)
    for night in (changes, read):
        assert not feed.night(night).warnings
    assert [(row[0], row[3]) for row in feed.rows] == [(1, "new"), (3, "old")]


def test_slot_that_is_older_than_the_snapshot(tmp_path: Path) -> None:
    """It sends what was committed before the snapshot, too: in the snapshot's batch or later that is no second connector."""
    read, sent = event("r", 1, "read", source(None, 500, "last")), event("u", 1, "sent", source(300, 350))
    for nights in ([[read, sent]], [[read], [sent]]):
        feed = Feed(tmp_path / str(len(nights)))
        assert [feed.night(night).warnings for night in nights] == [()] * len(nights)
        assert [row[3] for row in feed.rows] == ["sent"]


def test_connector_that_lost_its_offsets(tmp_path: Path) -> None:
    """Rows 1 and 2 changed, and 3 was deleted, before it began again; a transaction is open while it reads."""
    before = [
        *(event("r", n, "first", source(None, 10, kind)) for n, kind in enumerate(("first", "true", "last"), 1)),
        *(event("u", n, "streamed", source(20, 30)) for n in (1, 2, 3)),
    ]
    after = [
        event("r", 1, "second", source(None, 90, "first")),
        event("r", 2, "second", source(None, 90, "last")),
        event("u", 2, "open", source(None, 80)),
    ]
    told, full = Feed(tmp_path / "told"), Feed(tmp_path / "full", full_extract="replace")
    for feed in (told, full):
        assert not feed.night(before).warnings
    assert ["began again" in warning for warning in told.night(after).warnings] == [True]
    assert not told.night(after).warnings, "the same snapshot"
    assert not full.night(after, full="table").warnings
    assert not full.night([event("u", 1, "third", source(100, 110))]).warnings
    assert [(row[0], row[3]) for row in full.rows] == [(1, "third"), (2, "open")]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("known", ["snapshot", "changes"])
def test_snapshot_of_a_connector_that_began_again_is_found_in_any_order(
    tmp_path: Path, known: str, order: Sequence[int]
) -> None:
    """By the snapshot before, or by a commit that was streamed before."""
    first = event("r", 1, "x", source(None, 10, "last")) if known == "snapshot" else event("u", 1, "x", source(20, 30))
    files = [first, event("r", 2, "y", source(None, 90, "last")), event("u", 2, "z", source(95, 96))]
    feed = Feed(tmp_path)
    warnings = [feed.night([files[n]]).warnings for n in order]
    later = max(order.index(0), order.index(1))
    if known == "changes" and later == order.index(0):
        later = -1  # so does a slot that is older than the snapshot
    assert [any("began again" in one for one in night) for night in warnings] == [n == later for n in range(3)]


def test_batches_are_read_again_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, rows = recorded("mariadb")
    feed = Feed(tmp_path, "__source_file", "__source_pos", "__source_row")
    now = TableSettings.reading.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as earlier:
        earlier.setattr(
            TableSettings, "reading", property(lambda own: msgspec.structs.replace(now(own), positions=False))
        )
        feed.night(events[:100])
    assert "__log_position" not in feed.table.to_arrow().schema.names
    feed.night(events[100:])
    assert feed.rows == rows
    feed.reconcile()
    feed.table.reprocess(source="landing")
    assert feed.rows == rows


def test_position_of_events_in_avro(tmp_path: Path) -> None:
    row = {
        "type": "record",
        "name": "Value",
        "fields": [{"name": "id", "type": "long"}, {"name": "v", "type": "string"}],
    }
    texts = [{"name": name, "type": ["null", "string"]} for name in ("connector", "snapshot", "sequence")]
    fields = [
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
        {
            "name": "source",
            "type": {"type": "record", "name": "Source", "fields": [*texts, {"name": "lsn", "type": ["null", "long"]}]},
        },
    ]
    schema = {"type": "record", "name": "Envelope", "fields": fields}
    events = [event("u", 1, "later", source(20, 5)), event("r", 1, "first", source(None, 30, "first"))]
    out = io.BytesIO()
    fastavro.writer(
        out, fastavro.parse_schema(schema), [{**e, "after": {k: e["after"][k] for k in ("id", "v")}} for e in events]
    )
    feed = Feed(tmp_path, schema={})
    (tmp_path / "landing" / "1.avro").write_bytes(out.getvalue())
    feed.table.run(host="local")
    [found] = feed.table.to_arrow().read_all().to_pylist()
    assert (found["v"], found["__log_position"]) == ("later", f"{20:019}-1-{5:019}")


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_init_proposes_envelope_order_and_deletes(database: str, tmp_path: Path) -> None:
    events, rows = recorded(database)
    feed = Feed(tmp_path)
    (tmp_path / "landing" / "1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    proposal = propose(str(tmp_path / "landing"))
    chosen = {name: choice.value for name, choice in (proposal.settings | proposal.read).items()}
    assert (chosen["envelope"], chosen["key"], chosen["order_by"]) == ("debezium", ["id"], ["__log_position"])
    assert chosen["delete"] == {"column": "__op", "values": ["d"]}
    feed.table.run(host="local")
    assert feed.rows == rows


def test_init_doubts_the_order_of_flattened_events(tmp_path: Path) -> None:
    rows = [{"id": n, "v": "x", "__op": "c", "__source_ts_us": n, "__source_lsn": n} for n in range(300)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    proposal = propose(str(tmp_path))
    assert proposal.settings["order_by"].value == ["__source_ts_us", "__source_lsn"]
    assert any("flattened" in warning for warning in proposal.warnings)
