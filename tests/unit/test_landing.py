"""One landing file: which rows are taken, which are refused and why, and what a survey tells of it."""

import base64
import hashlib
import json
import pickle
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.config import Reading
from lakeupsert.config.types import Format
from lakeupsert.landing import accept
from lakeupsert.landing import content as landing_content
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.content import content_hash
from lakeupsert.landing.files import Survey, survey
from lakeupsert.landing.formats import blocks, records
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput, UnplannedColumnError, UnreadableFileError
from lakeupsert.landing.formats.inference import unify, without_nulls
from lakeupsert.landing.formats.registry import FORMATS, UNKNOWN, format_of
from lakeupsert.rows.leaves import decode
from lakeupsert.storage import LocalStore
from lakeupsert.table.roles import DeleteRule
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import normalize
from tests.harness.specs import LANDED as SCHEMA
from tests.harness.specs import create

NOW = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
RECEIVED = int(NOW.timestamp()) * 1_000_000
DELETES = DeleteRule(column="op", values=("D", "X"))


def naive(*parts: int) -> datetime:
    return datetime(*parts)  # type: ignore[arg-type]


def make_spec(schema: Any = SCHEMA, **changes: Any) -> TableSpec:
    settings = {
        "table_id": "t",
        "key": ["id"],
        "order_by": ["at"],
        "partition_by": ["day"],
        "delete": None,
        "stamped": False,
    }
    return create(schema, **(settings | changes))


class Landing:
    """A landing zone with one file at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root)

    def put(self, name: str, content: bytes | str | Any) -> LandingInput:
        path = self.root / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        found = self.store.head(name)
        assert found is not None
        return LandingInput(name, found.size, found.etag, 0)

    def read(self, file: LandingInput, spec: TableSpec) -> tuple[Any, list[dict[str, Any]]]:
        """Accepted rows as one table, quarantined rows as dicts."""
        found = list(read_rows(self.store, file, Reading(), RowRules(spec, RECEIVED)))
        quarantined = [row for rows in found for row in rows.quarantined.to_pylist()]
        assert all(row["file"] == file.path and 0 < len(row["reason"]) <= 400 for row in quarantined)
        accepted = [rows.accepted for rows in found]
        return (pa.concat_tables(accepted) if accepted else None), quarantined

    def refused(self, file: LandingInput, spec: TableSpec) -> list[tuple[str, int]]:
        """Reason and place of every refused row; there must be no other row."""
        accepted, quarantined = self.read(file, spec)
        assert accepted is None or accepted.num_rows == 0
        return [(row["reason_code"], row["position"]) for row in quarantined]

    def columns(self, file: LandingInput, known: Any = None, text: frozenset[str] = frozenset()) -> dict[str, Any]:
        found = survey(self.store, file, Reading(), known, text)
        assert found.unreadable is None
        assert not found.changed
        return dict(zip(found.schema.names, found.schema.types, strict=True))

    def unreadable(self, file: LandingInput) -> str:
        """Why the file as a whole is set aside; survey and reading must agree."""
        found = survey(self.store, file, Reading(), None, frozenset())
        with pytest.raises(UnreadableFileError) as raised:
            self.read(file, make_spec())
        assert raised.value.path == file.path
        assert found.unreadable == raised.value.reason
        return raised.value.reason


@pytest.fixture
def landing(tmp_path: Path) -> Landing:
    return Landing(tmp_path)


@pytest.fixture(params=[1, 7, 64, 1 << 20])
def _any_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", request.param)


def good(**changes: Any) -> dict[str, Any]:
    row = {"id": 1, "day": date(2026, 1, 2), "at": NOW, "amount": Decimal("8.70"), "note": "n"}
    return row | changes


def table_of(*rows: dict[str, Any], schema: Any = SCHEMA) -> Any:
    return pa.Table.from_pylist(list(rows), schema=schema)


def csv_of(*rows: str, header: str = "id,day,at,amount,note") -> str:
    return "".join(f"{line}\n" for line in (header, *rows))


# ---------------------------------------------------------------- what comes out


def test_values_are_looked_at_again_only_if_a_row_is_refused(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    originals = blocks.ArrowBlock.originals

    def counted(block: blocks.ArrowBlock, name: str, rows: Sequence[int]) -> list[object]:
        asked.append(name)
        return originals(block, name, rows)

    monkeypatch.setattr(blocks.ArrowBlock, "originals", counted)
    accepted, quarantined = landing.read(landing.put("a.parquet", table_of(good(), good(id=2))), make_spec())
    assert (accepted.num_rows, quarantined, asked) == (2, [], [])


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_every_format_gives_the_same_rows_under_the_schema_of_the_spec(landing: Landing, name: str) -> None:
    content: Any = {
        "a.parquet": table_of(good(), good(id=2, note=None)),
        "a.csv": csv_of("1,2026-01-02,2026-03-01T02:00:00Z,8.70,n", "2,2026-01-02,2026-03-01 02:00:00,8.7,"),
        "a.jsonl": '{"id":1,"day":"2026-01-02","at":"2026-03-01T02:00:00Z","amount":8.70,"note":"n"}\n'
        '{"at":"2026-03-01T04:00:00+02:00","id":"2","day":"2026-01-02","amount":"8.7"}\n',
    }[name]
    spec = make_spec(delete=DELETES)
    accepted, quarantined = landing.read(landing.put(name, content), spec)
    assert quarantined == []
    places = accepted["_lakeupsert_place"].to_pylist()
    expected = [
        {"id": 1, "at": NOW, "amount": Decimal("8.70"), "note": "n"},
        {"id": 2, "at": NOW, "amount": Decimal("8.70"), "note": None},
    ]
    for row, place in zip(expected, places, strict=True):
        row |= {
            "_lakeupsert_delete": False,
            "_lakeupsert_partition": "day=2026-01-02",
            "_lakeupsert_place": place,
        }
    assert accepted.to_pylist() == expected
    ours = [
        pa.field("_lakeupsert_partition", pa.string(), nullable=False),
        pa.field("_lakeupsert_place", pa.int64(), nullable=False),
    ]
    assert accepted.schema.equals(pa.schema([*spec.appended_schema, *ours]), check_metadata=True)


def test_columns_come_in_any_order_and_may_be_absent(landing: Landing) -> None:
    file = landing.put("a.csv", csv_of("2026-03-01T02:00:00Z,2026-01-02,1", header="at,day,id"))
    accepted, quarantined = landing.read(file, make_spec())
    assert quarantined == []
    assert accepted.select(["id", "amount", "note"]).to_pylist() == [{"id": 1, "amount": None, "note": None}]


def test_place_is_the_row_index_in_parquet_also_of_a_share_of_the_row_groups(landing: Landing) -> None:
    file = landing.put("a.parquet", b"")
    pq.write_table(table_of(*(good(id=i) for i in range(10))), landing.root / file.path, row_group_size=3)
    found = landing.store.head(file.path)
    assert found is not None
    for row_groups, ids in ((None, range(10)), ((0, 2), range(6)), ((2, 4), range(6, 10)), ((1, 1), [])):
        part = LandingInput(file.path, found.size, found.etag, 0, row_groups)
        accepted, _ = landing.read(part, make_spec())
        if not ids:
            assert accepted is None
        else:
            assert accepted["_lakeupsert_place"].to_pylist() == accepted["id"].to_pylist() == list(ids)


def test_place_is_the_byte_at_which_a_text_record_begins(landing: Landing) -> None:
    lines = csv_of("1,2026-01-02,2026-03-01,1,é\n", "2,2026-01-02,2026-03-01,1,n").encode()
    for bom in (b"", b"\xef\xbb\xbf"):
        accepted, _ = landing.read(landing.put("a.csv", bom + lines), make_spec())
        begins = [(bom + lines).index(start) + 1 for start in (b"\n1,", b"\n2,")]
        assert accepted["_lakeupsert_place"].to_pylist() == begins
    lines = b'{"id":1}\n\n \t\r\n[]\n{"id":"\xc3\xa9"}\n'
    _, quarantined = landing.read(landing.put("a.jsonl", lines), make_spec())
    assert [q["position"] for q in quarantined] == [0, lines.index(b"[]"), lines.rindex(b"{")]


@pytest.mark.usefixtures("_any_block_size")
def test_rows_and_places_are_the_same_however_a_file_is_cut(landing: Landing) -> None:
    text = (
        'id,day,at,amount,note\r\n1,2026-01-02,2026-03-01,1,"a\r\nb ""q"", é"\r\n\r\n'
        '2,2026-01-02,2026-03-01,x,5" pipe\r\n3,2026-01-02,2026-03-01,1\n4,,2026-03-01,1,"\n"\r'
        "\ufeff5,2026-01-02,2026-03-01,1,\n6,2026-01-02,2026-03-01,1,\ufeff\n,2026-01-02,2026-03-01,1,z"
    )
    accepted, quarantined = landing.read(landing.put("a.csv", text), make_spec())
    data = text.encode()
    assert accepted.select(["id", "note", "_lakeupsert_place"]).to_pylist() == [
        {"id": 1, "note": 'a\r\nb "q", é', "_lakeupsert_place": data.index(b"1,2026")},
        {"id": 6, "note": "\ufeff", "_lakeupsert_place": data.index(b"6,2026")},
    ]
    assert [(q["reason_code"], q["position"]) for q in quarantined] == [
        ("bad_type", data.index(b"2,2026-01-02,2026-03-01,x")),
        ("malformed", data.index(b"3,2026")),
        ("bad_partition", data.index(b"4,,")),
        ("bad_type", data.index(b"\xef\xbb\xbf5")),
        ("null_key", data.index(b",2026-01-02,2026-03-01,1,z")),
    ]
    lines = (
        '{"id":1,"day":"2026-01-02","at":"2026-03-01","note":"é"}\r\n\n{"id":2}\nnonsense\n{"id":3,"day":"2026-01-02"}'
    )
    accepted, quarantined = landing.read(landing.put("a.jsonl", lines), make_spec())
    assert accepted["_lakeupsert_place"].to_pylist() == [0, lines.encode().rindex(b"{")]
    assert [q["reason_code"] for q in quarantined] == ["bad_partition", "malformed"]
    file = landing.put("a.parquet", table_of(*(good(id=i or None) for i in range(30))))
    accepted, quarantined = landing.read(file, make_spec())
    assert accepted["_lakeupsert_place"].to_pylist() == accepted["id"].to_pylist() == list(range(1, 30))
    assert [q["position"] for q in quarantined] == [0]


def test_memory_follows_the_block(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 50)
    rules = RowRules(make_spec(), RECEIVED)
    contents: dict[str, Any] = {
        "a.parquet": table_of(*(good(id=i) for i in range(1000))),
        "a.csv": csv_of(*(f"{i},2026-01-02,2026-03-01,1,n" for i in range(1000))),
        "a.jsonl": '{"id":1,"day":"2026-01-02","at":"2026-03-01"}\n' * 1000,
    }
    for name, content in contents.items():
        sizes = [r.accepted.num_rows for r in read_rows(landing.store, landing.put(name, content), Reading(), rules)]
        assert sum(sizes) == 1000
        assert max(sizes) < 250


@pytest.mark.parametrize(
    ("type_", "value", "name"),
    [
        (pa.date32(), date(1, 1, 1), "day=0001-01-01"),
        (pa.date32(), date(9999, 12, 31), "day=9999-12-31"),
        (pa.int32(), -7, "day=-7"),
        (pa.bool_(), True, "day=true"),
        (pa.string(), "a/b é", "day=a%2Fb é"),
        (pa.large_string(), "x", "day=x"),
    ],
)
def test_partition_is_the_name_of_its_folder(landing: Landing, type_: Any, value: Any, name: str) -> None:
    schema = SCHEMA.set(1, pa.field("day", type_))
    accepted, quarantined = landing.read(
        landing.put("a.parquet", table_of(good(day=value), schema=schema)), make_spec(schema)
    )
    assert quarantined == []
    assert accepted["_lakeupsert_partition"].to_pylist() == [name]


# ---------------------------------------------------------------- why rows are refused


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [
        ("1,2026-01-02,2026-03-01", "malformed", "3 fields, but the header has 5"),
        ("1,2026-01-02,2026-03-01,1,n,", "malformed", "6 fields, but the header has 5"),
        ("x,2026-01-02,2026-03-01,1,n", "bad_type", "Column 'id': 'x' does not fit bigint."),
        ("1,2026-01-02,2026-03-01,8.705,n", "bad_type", "'8.705' does not fit decimal(12,2)"),
        ("1,2026-01-02,soon,1,n", "bad_type", "Column 'at': 'soon'"),
        (",2026-01-02,2026-03-01,1,n", "null_key", "Key column 'id' is null."),
        ('"",2026-01-02,2026-03-01,1,n', "null_key", "'id'"),
        ("1,,2026-03-01,1,n", "bad_partition", "Column 'day': null"),
        ("1,2026-02-30,2026-03-01,1,n", "bad_partition", "Column 'day': '2026-02-30'"),
        ("1,0000-01-01,2026-03-01,1,n", "bad_partition", "'0000-01-01'"),
        ("1,2026-01-02,2026-03-02T02:00:00.000001Z,1,n", "future_order", "2026-03-01 02:00:00 UTC"),
        # several at once: the first reason in the order of the list
        (",x,2027-01-01,y,n", "bad_type", "'amount'"),
        (",,2027-01-01,1,n", "null_key", "'id'"),
        ("1,,2027-01-01,1,n", "bad_partition", "'day'"),
    ],
)
def test_row_is_refused_for_its_first_reason(landing: Landing, row: str, code: str, told: str) -> None:
    other = "7,2026-01-02,2026-03-02T02:00:00Z,1,good"
    accepted, quarantined = landing.read(landing.put("a.csv", csv_of(other, row, other)), make_spec())
    assert accepted["id"].to_pylist() == [7, 7]
    assert [q["reason_code"] for q in quarantined] == [code]
    assert told in quarantined[0]["reason"]


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
@pytest.mark.parametrize("absent", ["id", "day", "at"])
def test_file_without_a_needed_column_goes_to_quarantine_as_a_whole(landing: Landing, name: str, absent: str) -> None:
    columns = [c for c in ("id", "day", "at") if c != absent]
    text = {"id": "1", "day": "2026-01-02", "at": "2026-03-01"}
    content: Any = {
        "a.parquet": table_of(good(), good()).select(columns),
        "a.csv": csv_of(*[",".join(text[c] for c in columns)] * 2, header=",".join(columns)),
        "a.jsonl": (json.dumps({c: text[c] for c in columns}) + "\n") * 2,
    }[name]
    file = landing.put(name, content)
    assert [code for code, _ in landing.refused(file, make_spec())] == ["missing_column"] * 2


def test_json_column_is_missing_only_where_no_line_has_it(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)
    lines = '{"id":1,"day":"2026-01-02"}\n' * 20 + '{"id":1,"day":"2026-01-02","at":null}\n'
    accepted, quarantined = landing.read(landing.put("a.jsonl", lines), make_spec())
    assert quarantined == []
    assert accepted["at"].null_count == 21


def test_malformed_comes_before_missing_column(landing: Landing) -> None:
    file = landing.put("a.csv", csv_of("2026-01-02,2026-03-01", "x", header="day,at"))
    assert [code for code, _ in landing.refused(file, make_spec())] == ["missing_column", "malformed"]


def test_null_order_of_a_row_is_accepted_and_of_a_delete_is_not(landing: Landing) -> None:
    header = "id,day,at,op"
    file = landing.put(
        "a.csv", csv_of("1,2026-01-02,,U", "2,2026-01-02,,D", "3,2026-01-02,2026-03-01,X", header=header)
    )
    accepted, quarantined = landing.read(file, make_spec(delete=DELETES))
    assert accepted.select(["id", "at", "_lakeupsert_delete"]).to_pylist() == [
        {"id": 1, "at": None, "_lakeupsert_delete": False},
        {"id": 3, "at": NOW.replace(hour=0), "_lakeupsert_delete": True},
    ]
    assert [q["reason_code"] for q in quarantined] == ["order_missing"]


def test_delete_needs_one_of_several_ordering_columns(landing: Landing) -> None:
    schema = SCHEMA.append(pa.field("seq", pa.int32()))
    spec = make_spec(schema, order_by=["at", "seq"], delete=DELETES)
    file = landing.put("a.csv", csv_of("1,2026-01-02,,5,D", "2,2026-01-02,,,D", header="id,day,at,seq,op"))
    accepted, quarantined = landing.read(file, spec)
    assert accepted["id"].to_pylist() == [1]
    assert [q["reason_code"] for q in quarantined] == ["order_missing"]


@pytest.mark.parametrize(
    ("type_", "last", "first_refused"),
    [
        (pa.date32(), date(2026, 3, 2), date(2026, 3, 3)),
        (pa.timestamp("s"), naive(2026, 3, 2, 2), naive(2026, 3, 2, 2, 0, 1)),
        (pa.timestamp("ms", "Asia/Tokyo"), NOW + timedelta(days=1), NOW + timedelta(days=1, milliseconds=1)),
        (pa.timestamp("us"), naive(2026, 3, 2, 2), naive(2026, 3, 2, 2, 0, 0, 1)),
        (pa.timestamp("ns", "UTC"), NOW + timedelta(days=1), NOW + timedelta(days=1, microseconds=1)),
    ],
)
def test_order_more_than_a_day_ahead_is_refused(landing: Landing, type_: Any, last: Any, first_refused: Any) -> None:
    schema = SCHEMA.set(2, pa.field("at", type_))
    file = landing.put("a.parquet", table_of(good(at=last), good(at=first_refused, id=2), good(at=None), schema=schema))
    accepted, quarantined = landing.read(file, make_spec(schema))
    assert accepted["id"].to_pylist() == [1, 1]
    assert [(q["reason_code"], q["position"]) for q in quarantined] == [("future_order", 1)]


@pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__", "x" * 250, None])
def test_text_that_names_no_folder_is_no_partition(landing: Landing, text: str | None) -> None:
    schema = SCHEMA.set(1, pa.field("day", pa.string()))
    file = landing.put("a.parquet", table_of(good(day=text), schema=schema))
    assert landing.refused(file, make_spec(schema)) == [("bad_partition", 0)]


@pytest.mark.parametrize("days", [-800_000, 3_000_000, 2**31 - 1])
def test_date_out_of_range_is_no_partition(landing: Landing, days: int) -> None:
    column = pa.array([days], pa.int32()).view(pa.date32())
    file = landing.put("a.parquet", table_of(good()).set_column(1, "day", column))
    _, quarantined = landing.read(file, make_spec())
    assert [q["reason_code"] for q in quarantined] == ["bad_partition"]
    assert json.loads(quarantined[0]["raw"])["day"] == days


def test_key_that_is_the_partition_column_is_null_or_does_not_convert(landing: Landing) -> None:
    file = landing.put("a.csv", csv_of("1,,2026-03-01,1,n", "1,x,2026-03-01,1,n"))
    _, quarantined = landing.read(file, make_spec(key=["id", "day"]))
    assert [q["reason_code"] for q in quarantined] == ["null_key", "bad_partition"]


# ---------------------------------------------------------------- receipt stamp and deletes


def test_stamp_is_filled_in_and_must_not_come_with_a_row(landing: Landing) -> None:
    spec = make_spec(SCHEMA.remove(2), stamped=True)
    accepted, _ = landing.read(landing.put("a.csv", csv_of("1,2026-01-02", header="id,day")), spec)
    assert accepted["at"].to_pylist() == [NOW]
    for name, content in {
        "b.csv": csv_of("1,2026-01-02,", header="id,day,at"),
        "b.parquet": table_of(good(at=None)),
        "b.jsonl": '{"id":1,"day":"2026-01-02","at":"2026-03-01"}',
    }.items():
        file = landing.put(name, content)
        _, quarantined = landing.read(file, spec)
        assert [q["reason_code"] for q in quarantined] == ["bad_type"]
        assert "stamped on receipt" in quarantined[0]["reason"]
    accepted, _ = landing.read(landing.put("c.jsonl", '{"id":1,"day":"2026-01-02","at":null}'), spec)
    assert accepted["at"].to_pylist() == [NOW]


@pytest.mark.parametrize(
    ("type_", "values", "flags"),
    [
        (pa.string(), ["D", "U", None, "d", "X"], [True, False, False, False, True]),
        (pa.int8(), [1, 0, None], [True, False, False]),
        (pa.bool_(), [True, False, None], [True, False, False]),
        (pa.dictionary(pa.int8(), pa.string()), ["D", None], [True, False]),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_operation_is_compared_as_text(landing: Landing, type_: Any, values: Any, flags: Any, keep: bool) -> None:
    rule = DeleteRule(column="op", values=("D", "X", "1", "true"), keep=keep)
    rows = pa.table({"op": pa.array(values, type_)})
    for i, name in enumerate(SCHEMA.names):
        rows = rows.append_column(name, pa.array([good()[name]] * len(values), SCHEMA.types[i]))
    spec = make_spec(SCHEMA.append(pa.field("op", type_)), delete=rule)
    accepted, quarantined = landing.read(landing.put("a.parquet", rows), spec)
    assert quarantined == []
    assert accepted["_lakeupsert_delete"].to_pylist() == flags
    assert ("op" in accepted.schema.names) == keep


def test_delete_needs_no_more_than_key_partition_and_order(landing: Landing) -> None:
    file = landing.put("a.jsonl", '{"id":1,"day":"2026-01-02","at":"2026-03-01","op":"D"}\n{"op":4.0,"id":2}')
    accepted, quarantined = landing.read(file, make_spec(delete=DeleteRule(column="op", values=("D", "4.0"))))
    assert accepted["_lakeupsert_delete"].to_pylist() == [True]
    assert [q["reason_code"] for q in quarantined] == ["bad_partition"]


def test_without_the_operation_column_nothing_is_a_delete(landing: Landing) -> None:
    accepted, _ = landing.read(landing.put("a.parquet", table_of(good())), make_spec(delete=DELETES))
    assert accepted["_lakeupsert_delete"].to_pylist() == [False]


def test_operation_without_a_text_is_refused(landing: Landing) -> None:
    rows = table_of(good()).append_column("op", pa.array([b"\xff"], pa.binary()))
    assert landing.refused(landing.put("a.parquet", rows), make_spec(delete=DELETES)) == [("bad_type", 0)]


def test_column_that_nobody_planned_for_does_not_vanish(landing: Landing) -> None:
    """Unless no row of its file is accepted: none goes lost then."""
    line = '{"id":ID,"day":"2026-01-02","at":"2026-03-01"}\n'
    for name, content in {
        "a.csv": csv_of("ID,2026-01-02,2026-03-01,2", header="id,day,at,extra"),
        "a.jsonl": line + line.replace("}", ',"extra":1}'),
        "a.parquet": table_of(good()).append_column("extra", pa.array([2])),
    }.items():
        accepted, refused = (
            content.set_column(0, "id", pa.array([id_], pa.int64()))
            if isinstance(content, pa.Table)
            else content.replace("ID", text)
            for id_, text in ((1, "1"), (None, "null" if name == "a.jsonl" else ""))
        )
        with pytest.raises(UnplannedColumnError, match="extra"):
            landing.read(landing.put(name, accepted), make_spec())
        rows, quarantined = landing.read(landing.put(name, refused), make_spec())
        assert (rows.num_rows, {q["reason_code"] for q in quarantined}) == (0, {"null_key"})


# ---------------------------------------------------------------- quarantine keeps what came


def test_raw_is_the_line_where_it_can_not_be_split(landing: Landing) -> None:
    lines = b'id,day,at\r\na,"b\nc"\r\n1,\xff\xfe,3\r\n"never closed,\r\n1,2,3\r\n'
    _, quarantined = landing.read(landing.put("a.csv", lines), make_spec())
    assert [(q["reason_code"], q["raw"]) for q in quarantined] == [
        ("malformed", 'a,"b\nc"'),
        ("malformed", "1,\\xff\\xfe,3"),
        ("malformed", '"never closed,\r\n1,2,3'),
    ]
    lines = b'{"id":1,}\r\n[1]\n{"id":"\xff"}\n' + b"[" * 5000
    _, quarantined = landing.read(landing.put("a.jsonl", lines), make_spec())
    assert [q["raw"] for q in quarantined] == ['{"id":1,}', "[1]", '{"id":"\\xff"}', "[" * 5000]
    assert {q["reason_code"] for q in quarantined} == {"malformed"}


def test_raw_is_the_row_by_column_name_otherwise(landing: Landing) -> None:
    _, quarantined = landing.read(landing.put("a.csv", csv_of('x,,"a""b",1,"é\n"')), make_spec())
    assert json.loads(quarantined[0]["raw"]) == {"id": "x", "day": None, "at": 'a"b', "amount": "1", "note": "é\n"}
    line = '{ "id": null, "amount": 8.70e0, "note": {"a": [1]} }'
    _, quarantined = landing.read(landing.put("a.jsonl", f"{line}\r\n"), make_spec())
    assert quarantined[0]["raw"] == line


EVERY_TYPE: dict[str, Any] = {
    "int8": pa.array([-1], pa.int8()),
    "uint64": pa.array([2**64 - 1], pa.uint64()),
    "half": pa.array(np.array([1.5], np.float16)),
    "float": pa.array([float("nan")], pa.float32()),
    "double": pa.array([float("-inf")]),
    "bool": pa.array([True]),
    "decimal": pa.array([Decimal("-0.10")]),
    "decimal256": pa.array([Decimal(10**60)], pa.decimal256(76, 2)),
    "string": pa.array([b'a\xff"\n']).view(pa.string()),
    "large_string": pa.array(["é"], pa.large_string()),
    "view": pa.array(["v"], pa.string_view()),
    "binary": pa.array([b"\x00\xff"]),
    "binary_view": pa.array([b"\x00"], pa.binary_view()),
    "fixed": pa.array([b"\x00\xff"], pa.binary(2)),
    "date": pa.array([date(1, 1, 1)]),
    "far_date": pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
    "time32": pa.array([1], pa.time32("ms")),
    "time64": pa.array([1], pa.time64("ns")),
    "bad_time": pa.array([2**62], pa.int64()).view(pa.time64("us")),
    "naive": pa.array([naive(2026, 1, 1)], pa.timestamp("us")),
    "ns": pa.array([1], pa.timestamp("ns", "Europe/Berlin")),
    "nowhere": pa.array([1], pa.timestamp("us", "Not/AZone")),
    "far": pa.array([2**62], pa.timestamp("us")),
    "duration": pa.array([timedelta(1)], pa.duration("us")),
    "dictionary": pa.array(["d"]).dictionary_encode(),
    "list": pa.array([[1, None]]),
    "large_list": pa.array([[b"x"]], pa.large_list(pa.binary())),
    "fixed_list": pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
    "struct": pa.array([{"a": Decimal("1.0"), "b": [date(2026, 1, 1)]}]),
    "map": pa.array([[(date(2026, 1, 1), None)]], pa.map_(pa.date32(), pa.string())),
    "uuid": pa.array([b"0" * 16], pa.uuid()),
    "nothing": pa.nulls(1),
}


def test_raw_holds_every_type_of_parquet(landing: Landing) -> None:
    one = pa.table(EVERY_TYPE)
    nulls = pa.table([pa.nulls(1, c.type) for c in one.columns], schema=one.schema)
    file = landing.put("a.parquet", pa.concat_tables([one, nulls]))
    columns = ((name, without_nulls(type_)) for name, type_ in landing.columns(file).items())
    spec = make_spec(pa.schema([*SCHEMA, *columns]))
    _, quarantined = landing.read(file, spec)
    found, empty = (json.loads(q["raw"]) for q in quarantined)
    assert set(empty.values()) == {None}
    assert found == {
        "int8": -1,
        "uint64": 2**64 - 1,
        "half": 1.5,
        "float": "nan",
        "double": "-inf",
        "bool": True,
        "decimal": "-0.10",
        "decimal256": f"{10**60}.00",
        "string": 'a\\xff"\n',
        "large_string": "é",
        "view": "v",
        "binary": base64.b64encode(b"\x00\xff").decode(),
        "binary_view": base64.b64encode(b"\x00").decode(),
        "fixed": base64.b64encode(b"\x00\xff").decode(),
        "date": "0001-01-01",
        "far_date": 2**31 - 1,
        "time32": "00:00:00.001",
        "time64": "00:00:00.000000001",
        "bad_time": 2**62,
        "naive": "2026-01-01 00:00:00.000000",
        "ns": "1970-01-01 00:00:00.000000001Z",
        "nowhere": "1970-01-01 00:00:00.000001Z",
        "far": 2**62,
        "duration": 86_400_000_000,
        "dictionary": "d",
        "list": [1, None],
        "large_list": [base64.b64encode(b"x").decode()],
        "fixed_list": [1, 2],
        "struct": {"a": "1.0", "b": ["2026-01-01"]},
        "map": [{"key": "2026-01-01", "value": None}],
        "uuid": ZEROS,
        "nothing": None,
    }


def test_every_type_of_parquet_passes_unchanged(landing: Landing) -> None:
    types = {n: a for n, a in EVERY_TYPE.items() if n not in ("string", "nothing", *UNREADABLE)}
    rows = table_of(good())
    for name, array in types.items():
        rows = rows.append_column(name, array)
    file = landing.put("a.parquet", rows)
    spec = make_spec(survey(landing.store, file, Reading(), None, frozenset()).schema)
    accepted, quarantined = landing.read(file, spec)
    assert quarantined == []
    read = pq.read_table(landing.root / file.path)
    for name in types:
        plain = {"half": pa.float32(), "dictionary": pa.string(), "view": pa.string(), "binary_view": pa.binary()}
        kept = pa.chunked_array([[ZEROS]]) if name == "uuid" else read[name].cast(plain.get(name, read[name].type))
        assert accepted[name].to_string() == kept.to_string(), name


ZEROS = "30303030-3030-3030-3030-303030303030"
UNREADABLE = ("far_date", "bad_time", "far")


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("nested", [False, True])
def test_moment_that_readers_can_not_show_is_refused_by_row(landing: Landing, name: str, nested: bool) -> None:
    bad = EVERY_TYPE[name]
    fine = pa.array([0], pa.int32() if bad.type.bit_width == 32 else pa.int64()).view(bad.type)
    values = pa.concat_arrays([fine, bad, pa.nulls(1, bad.type)])
    if nested:
        values = pa.StructArray.from_arrays(
            [pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), values)], ["x"]
        )
    file = landing.put("a.parquet", table_of(good(), good(), good()).append_column(name, values))
    accepted, quarantined = landing.read(file, make_spec(pa.schema([*SCHEMA, (name, values.type)])))
    assert accepted["_lakeupsert_place"].to_pylist() == [0, 2]
    assert [(q["reason_code"], q["position"]) for q in quarantined] == [("bad_type", 1)]
    assert repr(name) in quarantined[0]["reason"]


def test_text_that_is_not_utf8_is_found_in_a_parquet_column(landing: Landing) -> None:
    rows = table_of(good(), good()).set_column(4, "note", pa.array([b"ok", b"\xff"]).view(pa.string()))
    accepted, quarantined = landing.read(landing.put("a.parquet", rows), make_spec())
    assert accepted["note"].to_pylist() == ["ok"]
    assert [(q["reason_code"], q["position"]) for q in quarantined] == [("bad_type", 1)]


# ---------------------------------------------------------------- Parquet


@pytest.mark.parametrize("year", [1, 1582, 1970, 2262, 9999])
def test_int96_keeps_its_year(landing: Landing, year: int) -> None:
    rows = table_of(good()).append_column("when", pa.array([naive(year, 12, 31, 23, 59, 59)], pa.timestamp("us")))
    file = landing.put("a.parquet", b"")
    pq.write_table(rows, landing.root / "a.parquet", use_deprecated_int96_timestamps=True)
    found = landing.store.head("a.parquet")
    assert found is not None
    file = LandingInput("a.parquet", found.size, found.etag, 0)
    spec = make_spec(survey(landing.store, file, Reading(), None, frozenset()).schema)
    accepted, quarantined = landing.read(file, spec)
    assert quarantined == []
    assert accepted["when"].to_pylist() == [naive(year, 12, 31, 23, 59, 59)]


def test_nanoseconds_are_refused_where_the_table_has_microseconds(landing: Landing) -> None:
    schema = SCHEMA.set(2, pa.field("at", pa.timestamp("ns", "UTC")))
    file = landing.put("a.parquet", table_of(good(at=1000), good(at=1001), schema=schema))
    accepted, quarantined = landing.read(file, make_spec())
    assert accepted["_lakeupsert_place"].to_pylist() == [0]
    assert [q["reason_code"] for q in quarantined] == ["bad_type"]


def test_parquet_survey_reads_the_footer_alone(landing: Landing) -> None:
    schema = pa.schema(
        [("d", pa.dictionary(pa.int8(), pa.string())), ("v", pa.string_view()), ("n", pa.timestamp("ns"))]
    )
    file = landing.put("a.parquet", pa.table([["a"], ["b"], [1]], schema=schema))
    found = survey(landing.store, file, Reading(), None, frozenset())
    assert found == Survey(
        path=file.path,
        schema=pa.schema([("d", pa.string()), ("v", pa.string()), ("n", pa.timestamp("ns"))]),
        typed=True,
        row_groups=1,
        rows=1,
    )
    assert pickle.loads(pickle.dumps((found, file))) == (found, file)


def test_damaged_parquet_is_unreadable(landing: Landing) -> None:
    whole = (landing.root / landing.put("a.parquet", table_of(*[good(id=i) for i in range(1000)])).path).read_bytes()
    assert "0 bytes" in landing.unreadable(landing.put("empty.parquet", b""))
    for damaged in (whole[:-10], whole[: len(whole) // 2], b"PAR1" + whole[8:-8] + b"\xff" * 8, b"id,day\n1,2\n"):
        assert "Parquet" in landing.unreadable(landing.put("b.parquet", damaged))


def test_damaged_page_in_the_middle_is_unreadable(landing: Landing) -> None:
    rows = table_of(*[good(id=i, note=f"note {i * 7919}") for i in range(2000)])
    path = landing.root / "a.parquet"
    pq.write_table(rows, path, row_group_size=500, compression="none", write_page_checksum=True, use_dictionary=False)
    content = path.read_bytes()
    middle = content.index(f"note {1700 * 7919}".encode())  # not one of the statistics, which no checksum covers
    file = landing.put("a.parquet", content[:middle] + b"XXXX" + content[middle + 4 :])
    found = read_rows(landing.store, file, Reading(), RowRules(make_spec(), RECEIVED))
    assert [next(found).accepted.num_rows for _ in range(3)] == [500, 500, 500]
    with pytest.raises(UnreadableFileError, match=r"a\.parquet"):
        next(found)


def test_columns_that_can_not_be_told_apart_are_unreadable(landing: Landing) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])
    assert "'id'" in landing.unreadable(landing.put("a.parquet", twice))
    assert "'day'" in landing.unreadable(landing.put("a.csv", "id,day,day\n"))
    assert "Column 2 of 2" in landing.unreadable(landing.put("b.parquet", pa.table({"id": [1], " ": [2]})))


def test_parquet_without_rows_or_columns_has_none(landing: Landing) -> None:
    assert landing.read(landing.put("a.parquet", SCHEMA.empty_table()), make_spec()) == (None, [])
    file = landing.put("b.parquet", pa.table({"id": [1]}).select([]))
    assert landing.read(file, make_spec())[1] == []


def test_wide_rows_make_small_blocks(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2000)
    file = landing.put("a.parquet", table_of(*[good(id=i, note=str(i) * 500) for i in range(20)]))
    found = list(read_rows(landing.store, file, Reading(), RowRules(make_spec(), RECEIVED)))
    assert max(rows.accepted.num_rows for rows in found) < 5


# ---------------------------------------------------------------- CSV


def test_csv_knows_bom_crlf_quotes_and_lines_in_quotes(landing: Landing) -> None:
    text = '\ufeffid,day,at,amount,note\r\n"1","2026-01-02","2026-03-01","1","a ""b"", c\r\nd"\r\n\r\n2,2026-01-02,,,""'
    accepted, quarantined = landing.read(landing.put("A.CSV", text), make_spec())
    assert quarantined == []
    assert accepted["note"].to_pylist() == ['a "b", c\r\nd', None]


def test_csv_quote_inside_a_field_is_a_character(landing: Landing) -> None:
    rows = ['1,2026-01-02,2026-03-01,1,5" pipe', '2,2026-01-02,2026-03-01,1,"a"b"c', '3,2026-01-02,2026-03-01,1, "x"']
    accepted, quarantined = landing.read(landing.put("a.csv", csv_of(*rows)), make_spec())
    assert [q["raw"] for q in quarantined] == [rows[1]], "text after a closing quote"
    assert accepted["note"].to_pylist() == ['5" pipe', ' "x"']


@pytest.mark.long
def test_csv_of_2000_columns(landing: Landing) -> None:
    names = ["id", "day", "at", *(f"c{i}" for i in range(1997))]
    row = ["1", "2026-01-02", "2026-03-01", *(str(i) for i in range(1997))]
    file = landing.put("a.csv", csv_of(*[",".join(row)] * 20, header=",".join(names)))
    found = survey(landing.store, file, Reading(), None, frozenset(["id"]))
    accepted, quarantined = landing.read(file, make_spec(found.schema))
    assert quarantined == []
    assert (accepted.num_rows, accepted["c1996"].to_pylist()[0], accepted["c1996"].type) == (20, 1996, pa.int64())


@pytest.mark.parametrize("content", ["", "\ufeff", "\n\r\n", "id,day,at", "id,day,at\r\n", "\n\nid,day,at\n\n"])
def test_csv_without_rows_has_none(landing: Landing, content: str) -> None:
    file = landing.put("a.csv", content)
    assert landing.read(file, make_spec()) == (None, [])
    assert set(landing.columns(file)) == ({"id", "day", "at"} if "id" in content else set())


@pytest.mark.parametrize("content", [b"\xff\xffi\x00d\x00\n\x00", b'"id,day\n1,2\n', b'"' + b"x" * 200_000 + b'",b\n'])
def test_csv_without_a_header_that_can_be_read_is_unreadable(landing: Landing, content: bytes) -> None:
    assert "header" in landing.unreadable(landing.put("a.csv", content))


def test_record_without_end_does_not_fill_the_memory(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST_RECORD", 100)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 30)
    for name, content in {
        "a.csv": csv_of("1,2026-01-02,2026-03-01,1,n", *['"'] + ["x" * 60] * 3),
        "a.jsonl": '{"id":1}\n{"id":"' + "x" * 400 + '"}\n',
    }.items():
        with pytest.raises(UnreadableFileError, match="100 bytes"):
            landing.read(landing.put(name, content), make_spec())


def test_csv_survey_reads_no_more_than_it_must(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_HEADER_BYTES", 100)
    file = landing.put("a.csv", csv_of(*["1,2026-01-02,2026-03-01,1,n,U"] * 1000, header="id,day,at,amount,note,op"))
    read = []
    store = CountingStore(landing.root, read)
    found = survey(store, file, Reading(), SCHEMA, frozenset(["op", "id"]))
    assert found.schema == SCHEMA.append(pa.field("op", pa.string()))
    assert sum(read) == 100
    found = survey(store, file, Reading(), SCHEMA.remove(3), frozenset(["op"]))
    assert found.schema.field("amount").type == pa.int64()
    assert sum(read) > file.size


class CountingStore(LocalStore):
    def __init__(self, root: Path, read: list[int]) -> None:
        super().__init__(root)
        self.read = read

    def open(self, name: str, etag: str | None = None) -> Any:
        source, read = super().open(name, etag), self.read

        class Counting:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: Any) -> None:
                source.close()

            def size(self) -> int:
                return int(source.size())

            def read(self, size: int) -> bytes:
                found = source.read(size)
                read.append(len(found))
                return bytes(found)

        return Counting()


# ---------------------------------------------------------------- JSON lines


def test_json_numbers_keep_their_digits(landing: Landing) -> None:
    schema = pa.schema(
        [*SCHEMA, ("big", pa.decimal128(38, 0)), ("u", pa.uint64()), ("f", pa.float64()), ("i", pa.int32())]
    )
    line = (
        '{"id":9007199254740993,"day":"2026-01-02","at":"2026-03-01","amount":9999999999.99,"note":8.70,'
        '"big":12345678901234567890123456789012345678,"u":18446744073709551615,"f":9007199254740993,"i":8.0}'
    )
    accepted, quarantined = landing.read(landing.put("a.jsonl", line), make_spec(schema))
    assert quarantined == []
    assert accepted.select(["id", "amount", "note", "big", "u", "f", "i"]).to_pylist() == [
        {
            "id": 9007199254740993,
            "amount": Decimal("9999999999.99"),
            "note": "8.70",
            "big": Decimal("12345678901234567890123456789012345678"),
            "u": 2**64 - 1,
            "f": 9007199254740992.0,
            "i": 8,
        }
    ]


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (pa.string(), "12345678901234567890123", "12345678901234567890123"),
        (pa.string(), "1.50E+2", "1.50E+2"),
        (pa.string(), "true", "true"),
        (pa.string(), '""', ""),
        (pa.string(), '{"b": [1.10, "x", {"c": 12345678901234567890}]}', '{"b":[1.10,"x",{"c":12345678901234567890}]}'),
        (pa.string(), "[1, 2.50]", "[1,2.50]"),
        (pa.large_string(), "[]", "[]"),
        (pa.int64(), '"42"', 42),
        (pa.int64(), "1e3", 1000),
        (pa.float32(), "0.5", 0.5),
        (pa.bool_(), '"TRUE"', True),
        (pa.binary(), '"ab"', b"ab"),
        (pa.decimal128(4, 1), "10", Decimal("10.0")),
        (pa.date32(), '"2026-01-02"', date(2026, 1, 2)),
        (pa.list_(pa.decimal128(4, 2)), "[1, 2.5, null]", [Decimal("1.00"), Decimal("2.50"), None]),
        (pa.large_list(pa.string()), '["a", 1]', ["a", "1"]),
        (pa.list_(pa.int8(), 2), "[1,2]", [1, 2]),
        (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.bool_()))]), '{"b":[true]}', {"a": None, "b": [True]}),
        (pa.map_(pa.string(), pa.int64()), '{"x":1,"y":null}', [("x", 1), ("y", None)]),
        (pa.map_(pa.int8(), pa.struct([("a", pa.string())])), '{"7":{"a":"b"},"8":null}', [(7, {"a": "b"}), (8, None)]),
    ],
)  # fmt: skip
def test_json_value_goes_into_its_column(landing: Landing, type_: Any, text: str, value: Any) -> None:
    lines = [f'{{"id":1,"day":"2026-01-02","at":"2026-03-01","v":{v}}}' for v in (text, "null", text)]
    accepted, quarantined = landing.read(
        landing.put("a.jsonl", "\n".join(lines)), make_spec(SCHEMA.append(pa.field("v", type_)))
    )
    assert quarantined == []
    assert accepted["v"].to_pylist() == [value, None, value]


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (pa.int64(), "8.5"),
        (pa.int64(), "true"),
        (pa.int64(), '""'),
        (pa.int64(), "9223372036854775808"),
        (pa.int8(), "128"),
        (pa.decimal128(4, 2), "1.005"),
        (pa.decimal128(4, 2), "123"),
        (pa.float64(), "1e999"),
        (pa.float64(), "false"),
        (pa.bool_(), "1"),
        (pa.date32(), "20260102"),
        (pa.timestamp("us"), "1767312000"),
        (pa.timestamp("us"), "1767312000.5"),
        (pa.binary(), "1.5"),
        (pa.int64(), "{}"),
        (pa.int64(), "[1]"),
        (pa.list_(pa.int64()), '[1,"x"]'),
        (pa.list_(pa.int64()), "1"),
        (pa.list_(pa.int64()), '{"a":1}'),
        (pa.list_(pa.int64(), 2), "[1]"),
        (pa.struct([("a", pa.int64())]), '{"a":"x"}'),
        (pa.struct([("a", pa.int64())]), '{"a":1,"b":2}'),
        (pa.struct([("a", pa.int64())]), "[1]"),
        (pa.map_(pa.int64(), pa.int64()), '{"x":1}'),
        (pa.map_(pa.string(), pa.int64()), '{"x":1.5}'),
        (pa.map_(pa.string(), pa.int64()), "[]"),
    ],
)
def test_json_value_that_does_not_fit_is_found_alone(landing: Landing, type_: Any, text: str) -> None:
    lines = [f'{{"id":1,"day":"2026-01-02","at":"2026-03-01","v":{v}}}' for v in ("null", text, "null")]
    spec = make_spec(SCHEMA.append(pa.field("v", type_)))
    accepted, quarantined = landing.read(landing.put("a.jsonl", "\n".join(lines)), spec)
    assert accepted.num_rows == 2
    assert [(q["reason_code"], q["raw"]) for q in quarantined] == [("bad_type", lines[1])]


@pytest.mark.parametrize(
    "line",
    [
        '{"id":01}',
        '{"id":NaN}',
        '{"id":1} x',
        '{"id":1}{"id":2}',
        "[]",
        '"text"',
        "null",
        '{"id":"\\ud800"}',
        '{"id":' + "9" * 5000 + "}",
    ],
)
def test_json_line_that_is_no_object_is_malformed(landing: Landing, line: str) -> None:
    other = '{"id":7,"day":"2026-01-02","at":"2026-03-01"}'
    accepted, quarantined = landing.read(landing.put("a.json", "\n".join([other, line, other])), make_spec())
    assert accepted["id"].to_pylist() == [7, 7]
    assert [(q["reason_code"], q["raw"], q["position"]) for q in quarantined] == [("malformed", line, len(other) + 1)]


@pytest.mark.parametrize("content", ["", "\n", "\r\n \n", "\ufeff"])
def test_json_without_rows_has_none(landing: Landing, content: str) -> None:
    file = landing.put("a.ndjson", content)
    assert landing.read(file, make_spec()) == (None, [])
    assert landing.columns(file) == {}


@pytest.mark.few(20)
@pytest.mark.parametrize("depth", [*range(1, 30), *range(600, 1000, 7)])
def test_json_of_any_depth_stops_nothing(landing: Landing, depth: int) -> None:
    line = '{"id":1,"day":"2026-01-02","at":"2026-03-01","note":%s,"amount":1}'
    deep = line % ('{"a":[' * depth + "1" + "]}" * depth)
    file = landing.put("a.jsonl", "\n".join([line % "null", deep, deep.replace('"amount":1', '"amount":[[]]')]))
    accepted, quarantined = landing.read(file, make_spec())
    assert accepted.num_rows + len(quarantined) == 3
    assert accepted["note"][0].as_py() is None
    note = landing.columns(file)["note"]
    file = landing.put("a.jsonl", deep)
    accepted, quarantined = landing.read(file, make_spec(SCHEMA.set(4, pa.field("note", without_nulls(note)))))
    assert accepted.num_rows + len(quarantined) == 1
    assert accepted.num_rows == 1 or depth > 100


def test_json_duplicate_name_keeps_the_last(landing: Landing) -> None:
    line = '{"id":1,"day":"2026-01-02","at":"2026-03-01","id":2}'
    accepted, _ = landing.read(landing.put("a.jsonl", line), make_spec())
    assert accepted["id"].to_pylist() == [2]


# ---------------------------------------------------------------- a file that changes


class TouchingStore(LocalStore):
    """Replaces (or removes) a file before the call ``at``."""

    def __init__(self, root: Path, at: str, content: bytes | None) -> None:
        super().__init__(root)
        self.at, self.content = at, content

    def head(self, name: str) -> Any:
        self.touch("head", name)
        return super().head(name)

    def open(self, name: str, etag: str | None = None) -> Any:
        self.touch("open", name)
        return super().open(name, etag)

    def touch(self, call: str, name: str) -> None:
        if call == self.at:
            path = Path(self.root) / name
            path.unlink()
            if self.content is not None:
                path.write_bytes(self.content)


@pytest.mark.parametrize("at", ["open", "head"])
@pytest.mark.parametrize("content", [None, b"id\n"])
def test_file_that_changes_while_it_is_read_is_left_to_the_next_batch(
    landing: Landing, at: str, content: bytes | None
) -> None:
    for name, before in {"a.csv": csv_of("1,2026-01-02,2026-03-01,1,n"), "a.parquet": table_of(good())}.items():
        file = landing.put(name, before)
        with pytest.raises(ChangedFileError) as raised:
            list(read_rows(TouchingStore(landing.root, at, content), file, Reading(), RowRules(make_spec(), RECEIVED)))
        assert raised.value.path == name
        assert pickle.loads(pickle.dumps(raised.value)).path == name


def test_file_that_is_still_written_is_changed_and_not_unreadable(landing: Landing) -> None:
    file = landing.put("a.parquet", b"PAR1 half a file")
    landing.put("a.parquet", table_of(good()))
    with pytest.raises(ChangedFileError):
        landing.read(file, make_spec())
    landing.put("a.parquet", b"PAR1 another half")
    assert survey(landing.store, file, Reading(), None, frozenset()) == Survey(path=file.path, changed=True)


def test_file_that_vanished_is_changed(landing: Landing) -> None:
    file = landing.put("a.csv", "id\n")
    (landing.root / "a.csv").unlink()
    assert survey(landing.store, file, Reading(), None, frozenset()).changed
    with pytest.raises(ChangedFileError):
        content_hash(landing.store, file.path)


def test_errors_cross_process_borders() -> None:
    error = pickle.loads(pickle.dumps(UnreadableFileError("a.csv", "why")))
    assert (error.path, error.reason) == ("a.csv", "why")


def test_rules_cross_process_borders() -> None:
    rules = RowRules(make_spec(), RECEIVED)
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_content_hash_is_the_files_sha256(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2)
    landing.put("a.csv", "abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert content_hash(landing.store, "a.csv") == expected


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "b.jsonl", "a.parquet", "large.parquet"])
def test_content_is_hashed_while_rows_are_read(landing: Landing, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also of a file that is read again from its beginning, as JSON lines are whose first block lacks a column."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 16)
    if name == "large.parquet":
        monkeypatch.setattr(landing_content, "WHOLE_BYTES", 0)
    rows = [good(id=i) for i in range(9)]
    if name.endswith("parquet"):
        file = landing.put(name, table_of(*rows))
    elif name.endswith("csv"):
        file = landing.put(name, "\n".join([",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)]))
    else:
        rows = [{}, *rows] if name == "b.jsonl" else rows
        file = landing.put(name, "\n".join(json.dumps(r, default=str) for r in rows))
    sha256 = hashlib.sha256()
    found = list(accept.read_rows(landing.store, file, Reading(), RowRules(make_spec(), RECEIVED), sha256))
    assert sum(r.accepted.num_rows for r in found) == 9
    assert sha256.hexdigest() == hashlib.sha256((landing.root / name).read_bytes()).hexdigest()


# ---------------------------------------------------------------- names and types


@pytest.mark.parametrize(
    ("path", "configured", "expected"),
    [
        ("x/a.parquet", "auto", "parquet"),
        ("a.CSV", "auto", "csv"),
        ("a.jsonl", "auto", "jsonl"),
        ("a.ndjson", "auto", "jsonl"),
        ("a.json", "auto", "jsonl"),
        ("a.csv.gz", "auto", "csv"),
        ("x/a.JSONL.ZST", "auto", "jsonl"),
        ("a.parquet.gz", "auto", UNKNOWN.name),
        ("a.gz", "auto", UNKNOWN.name),
        ("a.gz", "delimited", "delimited"),
        ("a.avro", "auto", "avro"),
        ("a.orc", "auto", "orc"),
        ("part-0001", "auto", UNKNOWN.name),
        ("part-0001", "csv", "csv"),
        ("a.parquet", "jsonl", "jsonl"),
    ],
)
def test_format_is_told_by_the_ending_unless_configured(path: str, configured: str, expected: str) -> None:
    assert format_of(path, configured).name == expected


def test_every_value_of_the_setting_has_a_format() -> None:
    assert {"auto", *FORMATS} == {*get_args(Format)}


def test_file_of_no_known_format_is_unreadable(landing: Landing) -> None:
    file = landing.put("a.txt", "id\n")
    assert "a.txt" not in str(survey(landing.store, file, Reading(), None, frozenset()).unreadable)
    with pytest.raises(UnreadableFileError):
        landing.read(file, make_spec())
    assert landing.store.head("a.txt") is not None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "-5", "0", ""], pa.int64()),
        (["1", "007"], pa.string()),
        (["-0"], pa.int64()),
        (["1" * 18], pa.int64()),
        (["1" * 19], pa.string()),
        (["+1"], pa.string()),
        ([" 1"], pa.string()),
        (["1", "2.5"], pa.float64()),
        (["1e5", ".5", "5."], pa.float64()),
        (["00.5"], pa.string()),
        (["1e999"], pa.string()),
        (["nan"], pa.string()),
        (["true", "FALSE"], pa.bool_()),
        (["true", "1"], pa.string()),
        (["2026-01-02"], pa.date32()),
        (["2026-02-30"], pa.string()),
        (["2026-1-2"], pa.string()),
        (["2026-01-02", "2026-01-02T03:04:05"], pa.timestamp("us")),
        (["2026-01-02 03:04", "2026-01-02 03:04:05.123456"], pa.timestamp("us")),
        (["2026-01-02T03:04:05.1234567"], pa.string()),
        (["2026-01-02T03:04:05Z", "2026-01-02T03:04:05+02:00"], pa.timestamp("us", "UTC")),
        (["2026-01-02T03:04:05Z", "2026-01-02T03:04:05"], pa.timestamp("us")),
        (["2026-01-02T03:04:05Z", "2026-01-02"], pa.timestamp("us")),
        (["2026-01-02T25:04:05"], pa.string()),
        (["2026-01-02", "1"], pa.string()),
        (["", ""], pa.null()),
        (["x"], pa.string()),
    ],
)
def test_types_of_text_come_from_all_its_values(
    landing: Landing, monkeypatch: pytest.MonkeyPatch, values: list[str], expected: Any
) -> None:
    file = landing.put("a.csv", csv_of(*(f"k,{v}" for v in values), header="k,v"))
    assert landing.columns(file)["v"] == expected
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5)  # the same, block by block
    assert landing.columns(file)["v"] == expected
    assert landing.columns(file, text=frozenset(["v"]))["v"] == pa.string()
    assert landing.columns(file, known=pa.schema([("v", pa.int8())]))["v"] == pa.int8()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "null"], pa.int64()),
        (["1", "2.5"], pa.float64()),
        (["9223372036854775808"], pa.string()),
        (["1e999"], pa.string()),
        (["true"], pa.bool_()),
        (["true", "1"], pa.string()),
        (['"1"'], pa.string()),
        (['"true"'], pa.string()),
        (['"2026-01-02"', "null"], pa.date32()),
        (['"2026-01-02"', '"2026-01-02T00:00:00Z"'], pa.timestamp("us")),
        (['"2026-01-02T00:00:00Z"'], pa.timestamp("us", "UTC")),
        (['"2026-01-02"', "5"], pa.string()),
        (['""'], pa.string()),
        (["null"], pa.null()),
        (["[1]", "[2.5, null]", "[]"], pa.list_(pa.float64())),
        (["[]"], pa.list_(pa.null())),
        (['{"a":1}', '{"a":2.5,"b":["x"]}'], pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))])),
        (['{"a":1}', '{"a":"x"}'], pa.struct([("a", pa.string())])),
        (['{"d":"2026-01-02"}'], pa.struct([("d", pa.string())])),
        (["{}"], pa.string()),
        (['{"a":1}', "[1]"], pa.string()),
        (['{"a":1}', "1"], pa.string()),
    ],
)
def test_json_types_are_its_own_and_dates(
    landing: Landing, monkeypatch: pytest.MonkeyPatch, values: list[str], expected: Any
) -> None:
    file = landing.put("a.jsonl", "\n".join(f'{{"k":"k","v":{v}}}' for v in values))
    assert landing.columns(file) == {"k": pa.string(), "v": expected}
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5)
    assert landing.columns(file) == {"k": pa.string(), "v": expected}


def test_json_columns_come_from_every_line(landing: Landing) -> None:
    file = landing.put("a.jsonl", '{"a":1}\nnonsense\n{"b":2,"a":1}\n{"c":null}\n')
    assert landing.columns(file) == {"a": pa.int64(), "b": pa.int64(), "c": pa.null()}
    assert "no name" in str(
        survey(landing.store, landing.put("b.jsonl", '{"":1}'), Reading(), None, frozenset()).unreadable
    )


@pytest.mark.parametrize(
    ("a", "b", "typed", "expected"),
    [
        (pa.int32(), pa.int32(), True, pa.int32()),
        (pa.null(), pa.int32(), True, pa.int32()),
        (pa.int32(), pa.null(), False, pa.int32()),
        (pa.int32(), pa.int64(), True, pa.int64()),
        (pa.int64(), pa.int32(), True, pa.int64()),
        (pa.int64(), pa.float64(), True, pa.float64()),
        (pa.float64(), pa.int64(), False, pa.float64()),
        (pa.float32(), pa.int8(), True, pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(5, 0), True, pa.decimal128(7, 2)),
        (pa.int64(), pa.string(), True, pa.int64()),
        (pa.string(), pa.int64(), True, pa.string()),
        (pa.int64(), pa.string(), False, pa.string()),
        (pa.bool_(), pa.int64(), False, pa.string()),
        (pa.date32(), pa.timestamp("us", "UTC"), False, pa.timestamp("us")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), False, pa.timestamp("us")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), True, pa.timestamp("us", "UTC")),
        (pa.list_(pa.null()), pa.list_(pa.int64()), False, pa.list_(pa.int64())),
        (pa.struct([("a", pa.int64())]), pa.list_(pa.int64()), False, pa.string()),
    ],
)
def test_files_agree_on_one_type(a: Any, b: Any, typed: bool, expected: Any) -> None:
    assert unify(a, b, typed=typed) == expected
    if not typed or expected not in (a, b):
        assert unify(b, a, typed=typed) == expected


def test_types_without_a_value_become_text() -> None:
    type_ = pa.struct([("a", pa.null()), ("b", pa.list_(pa.null())), ("c", pa.int8())])
    assert without_nulls(type_) == pa.struct([("a", pa.string()), ("b", pa.list_(pa.string())), ("c", pa.int8())])


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
def test_list_views_with_nulls_lose_nothing(view: Any) -> None:
    """pyarrow's cast of a list view to a list loses values as soon as one list is null."""
    rows = [None, [1, None], [], [2, 3, 4], None, [5], [6, 7]]
    structs = [None if row is None else {"x": row, "y": 1} for row in rows]
    for values, type_ in (
        (rows, view(pa.int32())),
        ([rows, None, rows[1:]], view(view(pa.int32()))),
        (structs, pa.struct([("x", view(pa.int32())), ("y", pa.int8())])),
    ):
        array = pa.array(values, type_)
        for start in range(len(values)):
            found = decode(array.slice(start))
            found.validate(full=True)
            assert found.to_pylist() == values[start:]
            assert found.type.equals(normalize(type_))
