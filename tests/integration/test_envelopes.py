"""The envelopes of wal2json (recorded from wal2json 2.5 on PostgreSQL 15.18), Singer and Airbyte."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.operations.init.propose import propose

RECORDED = Path(__file__).parent / "recorded"
OTHER = "row of another table"
Messages = list[dict[str, Any]]


def recorded(version: int) -> Messages:
    """Table `o`: rows 1 and 2 (a long note); then 2 updated, 1 became 5, 5 updated and deleted. Table `f`, REPLICA IDENTITY FULL:
    row 1, its day changed, its id became 2, deleted; then a truncate, of which version 1 says nothing; and a message."""
    return [json.loads(line) for line in (RECORDED / f"wal2json_v{version}.jsonl").read_text().splitlines()]


def configure(root: Path, envelope: str, more: str, read: str = "", delete: str = "") -> Table:
    (root / "landing").mkdir(exist_ok=True)
    wrapped = f'envelope = "{envelope}"\n' if envelope else ""
    (root / "lakeupsert.toml").write_text(
        f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\n{more}[tables.t.schema]\nid = "bigint"\n'
        f"[tables.t.read]\n{wrapped}{read}{delete}"
    )
    return Table.open(root / "lakeupsert.toml")


def wal2json(root: Path, table: str, more: str = "") -> Table:
    settings = f'order_by = ["__log_position"]\npartition_by = ["bucket(1, id)"]\n{more}'
    delete = '[tables.t.delete]\ncolumn = "__action"\nvalues = ["D"]\n'
    return configure(root, "wal2json", settings, f'only = {{ __table = "{table}" }}\n', delete)


def land(path: Path, messages: Messages) -> None:
    path.write_text("".join(json.dumps(message) + "\n" for message in messages))


def stored(table: Table) -> list[dict[str, Any]]:
    checked = table.reconcile(deep=True)
    assert not checked.unbalanced
    rows = table.to_arrow().read_all().to_pylist()
    return [{name: v for name, v in row.items() if not name.startswith("_")} for row in rows]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_wal2json_keeps_a_long_value_in_mode_columns(tmp_path: Path, version: int, one_by_one: bool) -> None:
    table = wal2json(tmp_path, "o", 'mode = "columns"\n')
    messages = recorded(version)
    at = next(i for i, message in enumerate(messages) if message.get("xid") == 728)
    if one_by_one:
        land(tmp_path / "landing/1.jsonl", messages[:at])
        table.run()
        messages = messages[at:]
    land(tmp_path / "landing/2.jsonl", messages)
    entry = table.run().append.entry
    [row] = stored(table)
    assert (row["id"], len(row["note"]), float(row["amount"])) == (2, 16000, 3.0)
    markers = {1: 1, 2: 16 if not one_by_one else 14}[version]
    assert entry.skipped["transaction marker"] == markers
    assert entry.skipped["message"] == 1
    assert entry.skipped[OTHER] == {1: 6, 2: 7}[version]


@pytest.mark.parametrize("version", [1, 2])
def test_a_key_change_without_a_long_value_is_told(tmp_path: Path, version: int) -> None:
    """Only such one: not a delete and then an update of another key, nor a change of a whole row."""

    def changes(*rows: tuple[str, dict[str, Any], dict[str, Any]]) -> Messages:
        kinds = {"I": "insert", "U": "update", "D": "delete"}
        if version == 2:
            named = [(k, *([{"name": n, "value": v} for n, v in row.items()] for row in pair)) for k, *pair in rows]
            begin = {"action": "B", "nextlsn": "0/10"}
            return [begin, *({"action": k, "table": "o", "columns": new, "identity": old} for k, new, old in named)]
        change = [
            {
                "kind": kinds[k],
                "table": "o",
                **({"columnnames": [*new], "columnvalues": [*new.values()]} if new else {}),
                "oldkeys": {"keynames": [*old], "keyvalues": [*old.values()]},
            }
            for k, new, old in rows
        ]
        return [{"nextlsn": "0/10", "change": change}]

    table = wal2json(tmp_path, "o", 'mode = "columns"\n')
    land(
        tmp_path / "landing/1.jsonl",
        changes(
            *(("I", {"id": one, "note": "long", "n": 0}, {}) for one in range(4)),
            ("D", {}, {"id": 0}),
            ("U", {"id": 1, "n": 1}, {"id": 1}),
            ("U", {"id": 6, "note": "short", "n": 1}, {"id": 2}),
            ("U", {"id": 7, "n": 1}, {"id": 3}),
            ("U", {"id": 8, "n": 2}, {"id": 6, "note": "short", "n": 1}),
        ),
    )
    night = table.run()
    assert night.append.entry.incomplete_creates == 1
    for warnings in (night.append.warnings, table.status().warnings):
        assert any("1 new row has null" in one and "REPLICA IDENTITY FULL" in one for one in warnings)
    assert {row["id"]: row["note"] for row in stored(table)} == {1: "long", 7: None, 8: "short"}


@pytest.mark.parametrize("version", [1, 2])
def test_an_update_without_a_long_value_is_refused_in_mode_rows(tmp_path: Path, version: int) -> None:
    table = wal2json(tmp_path, "o", 'quarantine_limit = "100%"\n')
    land(tmp_path / "landing/1.jsonl", recorded(version))
    assert table.run().append.entry.quarantined == {"bad_type": 1}
    [row] = stored(table)
    assert (row["id"], len(row["note"]), float(row["amount"])) == (2, 16000, 2.0)
    assert table.append(replay_quarantine=True) is None  # nor does it pass then
    settings = tmp_path / "lakeupsert.toml"
    settings.write_text(settings.read_text().replace('envelope = "wal2json"\n', ""))
    assert not Table.open(settings).reprocess(source="landing").left  # the batch is read as it was read then


@pytest.mark.parametrize("version", [1, 2])
def test_whatever_the_order_of_files_the_commits_decide(tmp_path: Path, version: int) -> None:
    """The lines of a transaction stay together; the transactions come in reverse, one a file. LSNs are not compared as text."""
    text = json.dumps(recorded(version)).replace("0/1531", "9/FFFFF1531").replace("0/152D", "9/FFFFF152D")
    text = text.replace("9/FFFFF1531C", "A/1531C").replace("9/FFFFF1531D", "A/1531D").replace("9/FFFFF1531E", "A/1531E")
    transactions: dict[int, Messages] = {}
    for message in json.loads(text.replace("FFFFF15", "F15")):
        transactions.setdefault(message["xid"], []).append(message)
    table = wal2json(tmp_path, "f")
    wanted = [number for number in sorted(transactions, reverse=True) if number < 732]
    for number, xid in enumerate(wanted):
        land(tmp_path / f"landing/{number}.jsonl", transactions[xid])
        table.run()
    [row] = stored(table)
    assert (row["id"], str(row["day"])) == (2, "2024-01-02")
    land(tmp_path / "landing/last.jsonl", transactions[732])
    table.run()
    assert stored(table) == []


def test_a_file_that_begins_within_a_transaction_has_no_position(tmp_path: Path) -> None:
    table = wal2json(tmp_path, "f", 'quarantine_limit = "100%"\n')
    messages = [message for message in recorded(2) if message["xid"] == 729]
    land(tmp_path / "landing/1.jsonl", [*messages, messages[1]])
    assert table.run().append.entry.quarantined == {"order_missing": 1}
    assert len(stored(table)) == 1


def test_wal2json_without_positions_is_an_error_for_this_order(tmp_path: Path) -> None:
    table = wal2json(tmp_path, "o")
    plain = [{n: v for n, v in message.items() if "lsn" not in n} for message in recorded(2)]
    land(tmp_path / "landing/1.jsonl", plain)
    with pytest.raises(ConfigurationError, match="__log_position"):
        table.run()


def test_a_truncate_of_version_2_refuses_the_batch(tmp_path: Path) -> None:
    table = wal2json(tmp_path, "f")
    land(tmp_path / "landing/1.jsonl", recorded(2))
    with pytest.raises(RefusedError) as e:
        table.run()
    assert e.value.code == "truncated-source"


def test_deletes_of_wal2json_have_the_key_only(tmp_path: Path) -> None:
    settings = 'order_by = ["__log_position"]\npartition_by = ["day"]\nkey_scope = "table"\nmode = "columns"\n'
    delete = '[tables.t.delete]\ncolumn = "__action"\nvalues = ["D"]\n'
    table = configure(tmp_path, "wal2json", settings, 'only = { __table = "o" }\n', delete)
    land(tmp_path / "landing/1.jsonl", recorded(2))
    table.run()
    assert [row["id"] for row in stored(table)] == [2]


SINGER: Messages = [
    {"type": "SCHEMA", "stream": "orders", "schema": {}, "key_properties": ["id"]},
    {"type": "RECORD", "stream": "orders", "record": {"id": 1, "at": 1, "_sdc_deleted_at": None}, "time_extracted": "2024"},
    {"type": "RECORD", "stream": "customers", "record": {"id": 9, "at": 1, "city": "Rome"}},
    {"type": "RECORD", "stream": "orders", "record": {"id": 2, "at": 1, "_sdc_deleted_at": None}},
    {"type": "RECORD", "stream": "orders", "record": {"id": 1, "at": 2, "_sdc_deleted_at": "2024-01-02T00:00:00Z"}},
    {"type": "STATE", "value": {}},
]  # fmt: skip
AIRBYTE: Messages = [
    {"type": "LOG", "log": {"level": "INFO", "message": "x"}},
    {
        "type": "RECORD",
        "record": {"stream": "orders", "data": {"id": 1, "at": 1, "_ab_cdc_deleted_at": None}, "emitted_at": 1},
    },
    {"type": "RECORD", "record": {"stream": "customers", "data": {"id": 9, "at": 1, "city": "Rome"}, "emitted_at": 2}},
    {
        "type": "RECORD",
        "record": {"stream": "orders", "data": {"id": 2, "at": 1, "_ab_cdc_deleted_at": None}, "emitted_at": 3},
    },
    {
        "type": "RECORD",
        "record": {"stream": "orders", "data": {"id": 1, "at": 2, "_ab_cdc_deleted_at": "2024"}, "emitted_at": 4},
    },
    {"type": "STATE", "state": {}},
]
FEEDS = {
    "singer": (SINGER, "_sdc_deleted_at", {"schema message": 1, "state message": 1, OTHER: 1}),
    "airbyte": (AIRBYTE, "_ab_cdc_deleted_at", {"log message": 1, "state message": 1, OTHER: 1}),
}
SETTINGS = 'partition_by = []\norder_by = ["at"]\n'


@pytest.mark.parametrize("envelope", FEEDS)
@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_records_of_one_stream_are_rows_and_other_messages_are_counted(
    tmp_path: Path, envelope: str, mode: str
) -> None:
    messages, gone, skipped = FEEDS[envelope]
    read, delete = 'only = { __stream = "orders" }\n', f'[tables.t.delete]\nnot_null = "{gone}"\n'
    table = configure(tmp_path, envelope, f'{SETTINGS}mode = "{mode}"\n', read, delete)
    land(tmp_path / "landing/1.jsonl", messages)
    entry = table.run().append.entry
    assert (entry.skipped, entry.quarantined, entry.rows_read) == (skipped, {}, 3)
    assert stored(table) == [{"id": 2, "at": 1}]


def test_rows_of_a_raw_table_of_airbyte(tmp_path: Path) -> None:
    table = configure(tmp_path, "airbyte", 'partition_by = []\norder_by = ["_airbyte_extracted_at"]\n')
    raw = [
        {"_airbyte_raw_id": str(i), "_airbyte_extracted_at": i, "_airbyte_data": {"id": 1, "price": i}} for i in (2, 1)
    ]
    land(tmp_path / "landing/1.jsonl", [*raw, {"_airbyte_raw_id": "x", "_airbyte_data": "{}"}])
    table = configure(
        tmp_path, "airbyte", 'partition_by = []\norder_by = ["_airbyte_extracted_at"]\nquarantine_limit = "100%"\n'
    )
    assert table.run().append.entry.quarantined == {"malformed": 1}
    assert stored(table) == [{"id": 1, "price": 2}]


def activate(version: object, stream: str = "orders") -> dict[str, Any]:
    return {"type": "ACTIVATE_VERSION", "stream": stream, "version": version}


def record(id: int, version: int | None, stream: str = "orders") -> dict[str, Any]:
    own = {} if version is None else {"version": version}
    return {"type": "RECORD", "stream": stream, "record": {"id": id, "at": id}, **own}


VERSIONS: dict[str, tuple[Messages, Messages, bool]] = {  # what came before, the batch, whether it is taken
    "first copy, begun before and after it": ([], [activate(2), record(1, 2), activate(2)], True),
    "incremental: the version goes on": ([activate(2), record(1, 2)], [activate(2), record(3, 2)], True),
    "nothing of the stream is stored": ([record(9, 1, "clients")], [record(1, 2), activate(2)], True),
    "another stream begins": ([record(1, 1)], [activate(3, "clients"), record(2, 1)], True),
    "an older one, late": ([record(1, 3)], [record(2, 3), activate(2)], True),
    "refused rows count": ([{**record(1, 1), "record": {"at": 1}}, record(2, 2)], [activate(2)], False),
    "a second copy": ([record(1, 1)], [record(1, 2), activate(2)], False),
    "older rows in the batch": ([], [record(1, 1), record(2, 2), activate(2)], False),
    "stored rows without a version": ([record(1, None)], [record(1, 2), activate(2)], False),
    "a version that is no number": ([], [record(1, 2), activate("x")], False),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_a_new_version_of_a_stream_is_taken_if_no_row_of_it_has_to_go(tmp_path: Path, case: str) -> None:
    before, batch, is_taken = VERSIONS[case]
    only = 'only = { __stream = ["orders", "clients"] }\n'
    table = configure(tmp_path, "singer", f'{SETTINGS}quarantine_limit = "100%"\n', only)
    if before:
        land(tmp_path / "landing/1.jsonl", before)
        table.run()
    land(tmp_path / "landing/2.jsonl", batch)
    if not is_taken:
        with pytest.raises(RefusedError) as e:
            table.run()
        assert e.value.code == "truncated-source"
        return
    entry = table.run().append.entry
    assert entry.skipped == {"activate_version message": sum(m["type"] == "ACTIVATE_VERSION" for m in batch)}
    ids = {m["record"]["id"] for m in [*before, *batch] if m["type"] == "RECORD"}
    assert {row["id"] for row in stored(table)} == ids


def test_a_second_copy_is_a_full_extract(tmp_path: Path) -> None:
    table = configure(tmp_path, "singer", SETTINGS)
    for version, ids in ((1, (1, 2)), (2, (1, 3))):
        land(tmp_path / f"landing/{version}.jsonl", [*(record(one, version) for one in ids), activate(version)])
        table.run(full="table")
    land(tmp_path / "landing/3.jsonl", [activate(2), record(4, 2)])  # the sync after it goes on
    table.run()
    assert [row["id"] for row in stored(table)] == [1, 3, 4]


def control(operation: str, table: str = "orders") -> dict[str, Any]:
    return {
        "metadata": {
            "timestamp": "2020-01-01T00:00:00Z",
            "record-type": "control",
            "operation": operation,
            "table-name": table,
        }
    }


def load(id: int, table: str = "orders") -> dict[str, Any]:
    return {"data": {"id": id, "at": id}, "metadata": {"record-type": "data", "operation": "load", "table-name": table}}


@pytest.mark.parametrize("operation", ["drop-table", "truncate-table", "TRUNCATE", "DROP"])
def test_a_table_that_dms_drops_refuses_its_batch_if_rows_came_before(tmp_path: Path, operation: str) -> None:
    table = configure(tmp_path, "dms", SETTINGS, 'only = { __table_name = "orders" }\n')
    first = [control(operation), control("create-table"), load(1), load(2)]
    land(tmp_path / "landing/1.jsonl", first)
    assert table.run().append.entry.skipped == {"control record": 2}
    land(tmp_path / "landing/2.jsonl", [control(operation, "clients"), control("add-column"), load(2)])
    assert table.run().append.entry.skipped == {"control record": 1, OTHER: 1}
    land(tmp_path / "landing/3.jsonl", [control(operation), control("create-table"), load(2), load(3)])
    with pytest.raises(RefusedError) as e:
        table.run()
    assert e.value.code == "truncated-source"
    table.run(full="table")
    assert [row["id"] for row in stored(table)] == [2, 3]


@pytest.mark.parametrize("full", [None, "table"])
@pytest.mark.parametrize("files", [1, 2])
def test_rows_before_a_dropped_table_of_dms_refuse_their_batch(tmp_path: Path, files: int, full: Any) -> None:
    table = configure(tmp_path, "dms", SETTINGS)
    messages = [load(1), control("drop-table"), load(2)]
    for number in range(files):
        land(tmp_path / f"landing/{number}.jsonl", messages if files == 1 else [messages[:1], messages[1:]][number])
    with pytest.raises(RefusedError) as e:
        table.run(full=full)
    assert e.value.code == "truncated-source"
    for path in (tmp_path / "landing").iterdir():
        path.unlink()
    land(tmp_path / "landing/3.jsonl", messages[1:])
    table.run(full=full)
    assert [row["id"] for row in stored(table)] == [2]


def test_a_full_extract_deletes_no_row_of_its_version(tmp_path: Path) -> None:
    """The copy of version 2 was still running when a batch took its first file."""
    table = configure(tmp_path, "singer", SETTINGS)
    batches = [[activate(1), *(record(one, 1) for one in range(1, 11))], [record(one, 2) for one in (1, 2, 3)]]
    for number, batch in enumerate(batches):
        land(tmp_path / f"landing/{number}.jsonl", batch)
        table.run()
    last = [*(record(one, 2) for one in (4, 6, 7, 8, 9, 10)), activate(2)]
    land(tmp_path / "landing/2.jsonl", last)
    for full in (None, "table"):
        with pytest.raises(RefusedError) as e:
            table.run(full=full)
        assert e.value.code == "truncated-source"
    land(tmp_path / "landing/2.jsonl", [*batches[1], *last])
    table.run(full="table", may_shrink=True)
    assert [row["id"] for row in stored(table)] == [1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_a_new_version_of_another_table_is_not_this_ones(tmp_path: Path) -> None:
    table = configure(tmp_path, "singer", SETTINGS, 'only = { __stream = "orders" }\n')
    land(tmp_path / "landing/1.jsonl", [*SINGER, activate(2, "customers")])
    assert table.run().append.entry.skipped[OTHER] == 2
    land(tmp_path / "landing/2.jsonl", [*SINGER, activate(2)])
    with pytest.raises(RefusedError, match="ACTIVATE_VERSION"):
        table.run()


NAMED: dict[str, tuple[str, str, Messages]] = {
    "debezium": (
        "debezium",
        "__source_table",
        [{"op": "c", "before": None, "after": {"id": 1}, "source": {"schema": "s", "table": t}} for t in ("a", "b")],
    ),
    "schemas": (
        "debezium",
        "__source_schema",
        [{"op": "c", "before": None, "after": {"id": 1}, "source": {"schema": s, "table": "t"}} for s in ("a", "b")],
    ),
    "dms": ("dms", "__table_name", [{"data": {"id": 1}, "metadata": {"table-name": t}} for t in ("a", "b")]),
    "wal2json": (
        "wal2json",
        "__table",
        [{"action": "I", "table": t, "columns": [{"name": "id", "value": 1}]} for t in ("a", "b")],
    ),
    "singer": ("singer", "__stream", [record(1, None, t) for t in ("a", "b")]),
    "airbyte": (
        "airbyte",
        "__stream",
        [{"type": "RECORD", "record": {"stream": t, "data": {"id": 1}}} for t in ("a", "b")],
    ),
    "flat": ("", "__table", [{"id": 1, "__table": t} for t in ("a", "b")]),
}


@pytest.mark.parametrize("feed", NAMED)
def test_rows_of_several_tables_are_a_warning(tmp_path: Path, feed: str) -> None:
    envelope, column, messages = NAMED[feed]

    def warnings(place: Path, messages: Messages, only: str = "") -> list[str]:
        place.mkdir()
        (place / "landing").mkdir()
        for number, message in enumerate(messages):  # files of one batch
            land(place / f"landing/{number}.jsonl", [message])
        table = configure(place, envelope, "partition_by = []\n", only)
        return [one for one in table.run().append.warnings if "several tables" in one]

    [found] = warnings(tmp_path / "mixed", messages)
    assert f"{column!r}: 'a', 'b'" in found
    assert f'only = {{ {column} = "a" }}' in found
    assert f'only = {{ {column} = ["a","b"] }}' in found
    assert warnings(tmp_path / "one", messages[:1]) == []
    assert warnings(tmp_path / "both", messages, f'only = {{ {column} = ["a", "b"] }}\n') == []


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        ("singer", {"type": "BATCH", "stream": "orders", "manifest": ["file:///x"]}),
        ("singer", {"id": 1}),
        ("airbyte", {"id": 1}),
        ("airbyte", {"type": "RECORD", "record": {"stream": "orders"}}),
        ("wal2json", {"id": 1}),
        ("wal2json", {"action": "X", "columns": []}),
        ("wal2json", {"action": "I", "columns": [1]}),
        ("wal2json", {"change": [1]}),
        ("wal2json", {"change": [{"kind": "insert", "columnnames": ["id"], "columnvalues": []}]}),
    ],
)
def test_other_messages_go_to_quarantine(tmp_path: Path, envelope: str, message: dict[str, Any]) -> None:
    good = {
        "singer": SINGER[1],
        "airbyte": AIRBYTE[1],
        "wal2json": {"action": "I", "columns": [{"name": "id", "value": 1}]},
    }
    settings = 'partition_by = ["bucket(1, id)"]\norder_by = ["received"]\nquarantine_limit = "100%"\n'
    table = configure(tmp_path, envelope, settings)
    land(tmp_path / "landing/1.jsonl", [good[envelope], message])
    entry = table.run().append.entry
    assert (entry.quarantined, entry.rows_read, entry.skipped) == ({"malformed": 1}, 2, {})


def test_a_change_that_can_not_be_read_is_refused_without_the_others_of_its_transaction(tmp_path: Path) -> None:
    def change(kind: str, table: str, id: object, **more: object) -> dict[str, Any]:
        return {"kind": kind, "table": table, "columnnames": ["id"], "columnvalues": [id], **more}

    changes = [
        change("insert", "orders", 1),
        change("insert", "orders", 2, columnvalues=[]),
        change("truncate", "customers", None),
        change("update", "orders", 4, oldkeys={"keynames": ["id"], "keyvalues": [1]}),
        change("teleport", "orders", 3),
    ]
    settings = 'order_by = ["__log_position"]\npartition_by = []\nquarantine_limit = "100%"\n'
    delete = '[tables.t.delete]\ncolumn = "__action"\nvalues = ["D"]\n'
    table = configure(tmp_path, "wal2json", settings, 'only = { __table = "orders" }\n', delete)
    land(tmp_path / "landing/1.jsonl", [{"nextlsn": "0/10", "change": changes}])
    entry = table.run().append.entry
    assert (entry.quarantined, entry.rows_read, entry.skipped) == ({"malformed": 2}, 5, {OTHER: 1})
    assert [row["id"] for row in stored(table)] == [4]
    refused = table.quarantine().read_all().to_pylist()
    assert [(row["position"], row["line"], json.loads(row["raw"])) for row in refused] == [
        (2, 1, changes[1]),
        (8, 1, changes[4]),
    ]
    own = [change("insert", "orders", 5), change("truncate", "orders", None)]
    land(tmp_path / "landing/2.jsonl", [{"nextlsn": "0/20", "change": own}])
    with pytest.raises(RefusedError) as e:
        table.run()
    assert e.value.code == "truncated-source"


@pytest.mark.parametrize("envelope", ["wal2json-1", "wal2json-2", "singer", "airbyte"])
def test_init_finds_the_envelope_its_deletes_and_its_tables(tmp_path: Path, envelope: str) -> None:
    (tmp_path / "landing").mkdir()
    name, _, version = envelope.partition("-")
    messages, gone, _ = FEEDS.get(name, ([], "", {}))
    land(tmp_path / "landing/1.jsonl", messages or recorded(int(version)))
    found = propose(str(tmp_path / "landing"))
    answer = CliRunner().invoke(main, ["init", str(tmp_path / "landing"), "--config", str(tmp_path / "new.toml")])
    assert (answer.exit_code, "not_null" in answer.output) == (0, name != "wal2json"), answer.output
    assert found.read["envelope"].value == name
    if name == "wal2json":
        assert found.settings["order_by"].value == ["__log_position"]
        assert found.settings["delete"].value == {"column": "__action", "values": ["D"]}
        assert found.read["only"].value == {"__table": "o"}
    else:
        assert found.settings["delete"].value == {"not_null": gone}
        assert found.read["only"].value == {"__stream": "orders"}


def test_columns_whose_names_are_those_of_an_envelope_by_chance(tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    land(tmp_path / "landing/1.jsonl", [{"type": "a", "record": i, "day": "2024-01-01"} for i in range(9)])
    found = propose(str(tmp_path / "landing"))
    assert "envelope" not in found.read
    assert found.rows == 9


@pytest.mark.long
@pytest.mark.spark
def test_the_host_spark_agrees(tmp_path: Path) -> None:
    table = wal2json(tmp_path, "o", 'mode = "columns"\n')
    land(tmp_path / "landing/1.jsonl", recorded(2))
    table.run(host="spark", engine="arrow")
    assert [row["id"] for row in stored(table)] == [2]
