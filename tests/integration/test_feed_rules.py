"""What clashes, or comes where the rules of a table do not expect it: told, set aside, never a crash."""

import io
import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.layout import parse_partition
from tests.harness.proof import assert_proved


class Feed:
    """A table `t` of a TOML text, and its landing zone."""

    def __init__(self, root: Path, settings: str) -> None:
        self.root = root
        (root / "landing").mkdir()
        usual = "" if "partition_by" in settings else 'partition_by = ["day"]\n'
        usual += "" if "key =" in settings else 'key = ["id"]\n'
        usual += "" if "quarantine_limit" in settings else 'quarantine_limit = "100%"\n'  # batches of a row or two
        text = f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\n{usual}{settings}'
        (root / "lakeupsert.toml").write_text(text)
        self.table = Table.open(root / "lakeupsert.toml")

    def land(self, name: str, content: str | pa.Table) -> None:
        path = self.root / "landing" / name
        if isinstance(content, str):
            path.write_text(content)
        else:
            pq.write_table(content, path)

    def run(self) -> dict[str, int]:
        """Appended, merged, published, proved; what was quarantined, by reason."""
        result = self.table.run(host="local")
        assert_proved(self.table)
        assert result.append is not None
        return result.append.entry.quarantined

    def rows(self, *columns: str) -> list[Any]:
        rows = self.table.to_arrow().read_all().select(columns).to_pylist()
        return sorted(tuple(str(v) for v in row.values()) for row in rows)


@pytest.mark.parametrize("name", ["g_2990-01-01T10:00:00.csv", "g_2990-01-01T10:00:00.parquet"])
def test_order_in_a_name_that_lies_in_the_future_is_quarantined(tmp_path: Path, name: str) -> None:
    order = "order_by = ['at']\norder_in_name = '_([^.]+)\\.'\n[tables.t.schema]\nat = 'timestamp'\nday = 'date'\n"
    feed = Feed(tmp_path, order)
    feed.land("a_2020-01-01T10:00:00.csv", "id,day\na,2020-01-01\n")
    rows = pa.table({"id": ["b"], "day": pa.array([date(2020, 1, 1)])})
    feed.land(name, "id,day\nb,2020-01-01\n" if name.endswith("csv") else rows)
    assert feed.run() == {"future_order": 1}
    assert feed.rows("id") == [("a",)]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_file_without_the_operation_column_where_all_operations_are_declared(tmp_path: Path, kind: str) -> None:
    feed = Feed(tmp_path, "[tables.t.delete]\ncolumn = 'op'\nvalues = ['D']\nupserts = ['U']\n")
    feed.land("1.csv", "id,day,op\na,2020-01-01,U\n")
    feed.run()
    lines = {"csv": "id,day\nb,2020-01-01\n", "jsonl": '{"id": "b", "day": "2020-01-01"}\n'}
    feed.land(f"2.{kind}", lines.get(kind, pa.table({"id": ["b"], "day": pa.array([date(2020, 1, 1)])})))
    assert feed.run() == {"bad_operation": 1}


@pytest.mark.parametrize("type_", ["timestamp[s]", "timestamp[ms]", "date32", "date64"])
def test_far_dates_make_no_partition(tmp_path: Path, type_: str) -> None:
    types = {"timestamp[s]": pa.timestamp("s"), "timestamp[ms]": pa.timestamp("ms"), "date32": pa.date32()}
    arrow = types.get(type_, pa.date64())
    feed = Feed(tmp_path, "order_by = ['v']\npartition_by = ['month(c)', 'year(c)', 'date(c) as d', 'hour(c)']\n")
    far = {"date32": 2**31 - 1, "timestamp[s]": 15 * 10**11}.get(type_, 86_400_000 * 17_000_000)  # about the year 48000
    values = [0, far, -far]
    raw = pa.array(values, pa.int32() if type_ == "date32" else pa.int64())
    feed.land("1.parquet", pa.table({"id": ["a", "b", "c"], "v": [1, 1, 1], "c": raw.view(arrow)}))
    assert feed.run() == {"bad_partition": 2}
    assert feed.rows("id", "c_month", "c_year", "d", "c_hour") == [
        ("a", "1970-01", "1970", "1970-01-01", "1970-01-01-00")
    ]


def test_moments_before_1970_are_in_their_own_day_to_the_nanosecond(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "order_by = ['v']\npartition_by = ['date(c) as d', 'year(c)']\n")
    moments = pa.array([-1, 0, -86_400_000_000_000], pa.timestamp("ns", tz="UTC"))
    feed.land("1.parquet", pa.table({"id": ["a", "b", "c"], "v": [1, 1, 1], "c": moments}))
    assert feed.run() == {}
    days = [("a", "1969-12-31", "1969"), ("b", "1970-01-01", "1970"), ("c", "1969-12-31", "1969")]
    assert feed.rows("id", "d", "c_year") == days


def test_partition_may_be_made_of_the_order_in_the_name(tmp_path: Path) -> None:
    order = "order_by = ['at']\norder_in_name = '_([^.]+)\\.'\npartition_by = ['date(at) as day']\n"
    feed = Feed(tmp_path, f"{order}[tables.t.schema]\nat = 'timestamp'\n")
    feed.land("a_2020-01-01T10:00:00.csv", "id,v\na,1\n")
    assert feed.run() == {}
    assert feed.rows("id", "day") == [("a", "2020-01-01")]


def test_partition_may_be_made_of_the_receipt_stamp(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "partition_by = ['date(record_timestamp) as received']\n")
    feed.land("a.csv", "id,v\na,1\n")
    assert feed.run() == {}
    assert feed.rows("id", "received") == [("a", datetime.now(UTC).date().isoformat())]


def avro(schema: Any, rows: list[Any]) -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, schema, rows)
    return file.getvalue()


RECORD = {
    "type": "record",
    "name": "A",
    "fields": [{"name": "id", "type": "string"}, {"name": "day", "type": "string"}],
}
WIDER = {**RECORD, "name": "B", "fields": [*RECORD["fields"], {"name": "v", "type": "string"}]}  # type: ignore[misc]
EMPTY = {**RECORD, "fields": [*RECORD["fields"], {"name": "v", "type": {"type": "fixed", "name": "f", "size": 0}}]}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("2.avro", avro([RECORD, WIDER], [("B", {"id": "b", "day": "2020-01-01", "v": "x"})])),
        ("2.avro", avro(["null", RECORD], [None])),
        ("2.avro", avro(EMPTY, [])),
        ("2.csv", b"id,day,a\x00b\nb,2020-01-01,1\n"),
    ],
    ids=["records", "null", "fixed of size 0", "NUL in a name"],
)
def test_file_that_no_table_can_hold_stops_no_other(tmp_path: Path, name: str, content: bytes) -> None:
    feed = Feed(tmp_path, "")
    feed.land("1.csv", "id,day\na,2020-01-01\n")
    (tmp_path / "landing" / name).write_bytes(content)
    assert feed.run() == {"unreadable_file": 1}
    assert feed.rows("id") == [("a",)]


@pytest.mark.parametrize(("encoding", "content"), [("utf-16", b"id,day\nb,2020-01-01\n"), ("utf-32", b"i\0\0\0")])
def test_file_without_the_mark_that_its_encoding_needs_stops_no_other(
    tmp_path: Path, encoding: str, content: bytes
) -> None:
    feed = Feed(tmp_path, f"[tables.t.read]\nencoding = '{encoding}'\n")
    (tmp_path / "landing" / "1.csv").write_bytes("id,day\na,2020-01-01\n".encode(encoding))
    (tmp_path / "landing" / "2.csv").write_bytes(content)
    assert feed.run() == {"unreadable_file": 1}
    assert feed.rows("id") == [("a",)]


@pytest.mark.parametrize(("encoding", "bad"), [("ascii", "é".encode()), ("utf-16-be", b"\xd8\x05")])
def test_bytes_that_the_encoding_lacks_become_no_other_character(tmp_path: Path, encoding: str, bad: bytes) -> None:
    feed = Feed(tmp_path, f"quarantine_limit = 5\n[tables.t.read]\nencoding = '{encoding}'\n")
    head, tail = "id,day\na,2020-01-01\nx".encode(encoding), ",2020-01-01\n".encode(encoding)
    (tmp_path / "landing" / "1.csv").write_bytes(head + bad + tail)
    assert feed.run() == {"malformed": 1}
    assert feed.rows("id") == [("a",)]


def test_first_record_that_never_ends_stops_no_other(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "key = ['_c0']\npartition_by = ['_c1']\n[tables.t.read]\nheader = false\n")
    feed.land("1.csv", "a,2020-01-01\n")
    feed.land("2.csv", '"abc\n')
    assert feed.run() == {"unreadable_file": 1}


@pytest.mark.parametrize("order", ["version descending", "versoin desc", "record_timestamp asc", "versoin", "Ver_sion"])
def test_order_that_is_mistyped_is_no_order_of_arrival(tmp_path: Path, order: str) -> None:
    feed = Feed(tmp_path, f"order_by = ['{order}']\n")
    feed.land("a.csv", "id,day,version\na,2020-01-01,1\n")
    with pytest.raises(ConfigurationError) as raised:
        feed.run()
    assert raised.value.code == "missing-column"
    assert "asc or desc" in raised.value.next


@pytest.mark.parametrize(
    ("settings", "slip"),
    [
        ("order_by = ['versoin']\n[tables.t.schema]\nversoin = 'bigint'\n", "versoin"),
        ("order_by = ['seen_at']\n[tables.t.schema]\nseen_at = 'timestamp'\n", "seen_at"),
        ("mode = 'columns'\norder_by = ['versoin']\n[tables.t.schema]\nversoin = 'bigint'\n", "versoin"),
        ("key = ['idd']\n[tables.t.schema]\nidd = 'string'\n", "idd"),
        ("partition_by = ['dayy']\n[tables.t.schema]\ndayy = 'date'\n", "dayy"),
        ("partition_by = ['date(att) as d']\n[tables.t.schema]\natt = 'timestamp'\n", "att"),
    ],
)
def test_type_that_is_given_makes_no_column_of_a_slip(tmp_path: Path, settings: str, slip: str) -> None:
    feed = Feed(tmp_path, settings)
    feed.land("a.csv", "id,day,version,at\na,2020-01-01,1,2020-01-01T10:00:00Z\n")
    for step in (feed.table.plan, feed.run):
        with pytest.raises(ConfigurationError, match="which no readable file has") as raised:
            step()
        assert raised.value.code == "missing-column"
        assert repr(slip) in raised.value.message
        assert "Found: id, day, version, at" in raised.value.message
    assert not [*(tmp_path / "processed").rglob("*.json")]


def test_first_file_without_a_line_names_no_column(tmp_path: Path) -> None:
    types = "[tables.t.schema]\nid = 'string'\nday = 'date'\nversion = 'bigint'\n"
    feed = Feed(tmp_path, "order_by = ['version']\n" + types)
    feed.land("a.jsonl", "")
    assert feed.run() == {}
    feed.land("b.jsonl", '{"id": "a", "day": "2020-01-01", "version": 1}\n')
    assert feed.run() == {}
    assert feed.rows("id", "version") == [("a", "1")]


def test_column_that_comes_later_has_the_type_that_is_given(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "order_by = ['version']\n[tables.t.schema]\nprice = 'decimal(9,2)'\n")
    feed.land("a.csv", "id,day,version\na,2020-01-01,1\n")
    feed.run()
    feed.land("b.csv", "id,day,version,price\nb,2020-01-01,1,2\n")
    assert feed.run() == {}
    assert feed.rows("id", "price") == [("a", "None"), ("b", "2.00")]


@pytest.mark.parametrize("type_", ["timestamp", "timestamp_ntz"])
def test_receipt_stamps_have_the_type_that_is_given(tmp_path: Path, type_: str) -> None:
    feed = Feed(tmp_path, f"[tables.t.schema]\nrecord_timestamp = '{type_}'\n")
    feed.land("a.csv", "id,day\na,2020-01-01\n")
    assert ["no file has the ordering column" in note for note in feed.table.plan().notes] == [True]
    assert feed.run() == {}
    [row] = feed.table.to_arrow().read_all().to_pylist()
    assert (row["record_timestamp"].tzinfo is None) == (type_ == "timestamp_ntz")


def test_receipt_stamps_are_nothing_but_timestamps(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "[tables.t.schema]\nrecord_timestamp = 'bigint'\n")
    feed.land("a.csv", "id,day\na,2020-01-01\n")
    with pytest.raises(ConfigurationError, match=r"'record_timestamp'.* int64"):
        feed.run()


def test_order_of_arrival_may_be_called_like_another_column(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "order_by = ['received_at']\n")
    feed.land("a.csv", "id,day,received_by,created_on\na,2020-01-01,x,y\n")
    assert feed.run() == {}
    assert "received_at" in feed.table.view().spec.schema.names


@pytest.mark.parametrize("near", ["updatd_at", "UpdatedAt"])
def test_order_that_is_mistyped_is_no_order_of_adopted_files(tmp_path: Path, near: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Did you mean '{near}'") as raised:
        adopted(tmp_path, "day=2020-01-01", "order_by = ['updated_at']\n", id=["a"], version=[1], **{near: [1]})
    assert raised.value.code == "missing-column"
    assert not (tmp_path / "processed/_lakeupsert").exists()


@pytest.mark.parametrize(("settings", "told"), [("order_by = ['received_at']\n", 1), ("", 0)])
def test_order_of_arrival_in_a_column_of_their_choice_is_told(tmp_path: Path, settings: str, told: int) -> None:
    """Also where a name is alike and another one. By `plan` too, as it is for good; who leaves `order_by` out knows."""
    feed = Feed(tmp_path, settings)
    feed.land("a.csv", "id,day,created_at\na,2020-01-01,9\na,2020-01-01,3\n")
    notes = feed.table.plan().notes
    result = feed.table.run(host="local").append
    assert result is not None
    assert result.warnings == notes
    assert ["no file has the ordering column 'received_at'" in note for note in notes] == [True] * told
    assert feed.rows("created_at") == [("3",)]
    feed.land("b.csv", "id,day,created_at\nb,2020-01-01,9\n")
    result = feed.table.run(host="local").append
    assert result is not None
    assert not result.warnings, "once"


def test_order_of_arrival_in_a_column_of_their_choice_is_told_of_adopted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Feed(tmp_path, "order_by = ['received_at']\n")
    target = tmp_path / "processed/day=2020-01-01"
    target.mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a"]}), target / "part-0.parquet")
    answer = json.loads(CliRunner().invoke(main, ["adopt", "--json"]).stdout)
    assert ["'received_at'" in warning for warning in answer["warnings"]] == [True]


@pytest.mark.parametrize("by", [["date(at) as d", "month(at) as D"], ["date(at) as d", "d"]])
def test_partition_columns_of_one_name_are_both_named(tmp_path: Path, by: list[str]) -> None:
    feed = Feed(tmp_path, f"partition_by = {by}\n[tables.t.schema]\nat = 'timestamp'\n")
    feed.land("a.csv", "id,at\na,2020-01-01T10:00:00Z\n")
    for step in (feed.run, feed.table.adopt):
        with pytest.raises(ConfigurationError) as raised:
            step()
        assert raised.value.code == "bad-setting"
        assert "`date(at) as d` and `" + by[1] in raised.value.message
    assert not [*(tmp_path / "processed").rglob("*.json")]


@pytest.mark.parametrize(
    "by", ["date(at) as day, month(at) as m", "date(at) as day)", "date(at), month(at)", "date( )"]
)
def test_what_is_no_partition_expression_is_told(tmp_path: Path, by: str) -> None:
    feed = Feed(tmp_path, f"partition_by = ['{by}']\n[tables.t.schema]\nat = 'timestamp'\n")
    feed.land("a.csv", "id,at\na,2020-01-01T10:00:00Z\n")
    with pytest.raises(ConfigurationError, match=r"year\(COLUMN\)") as raised:
        feed.run()
    assert raised.value.code == "missing-column"
    assert not [*(tmp_path / "processed").rglob("*.json")]


def test_partition_expression_that_is_also_a_columns_name_is_refused_until_it_says_which(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "partition_by = ['date(at)']\n[tables.t.schema]\nat = 'timestamp'\n")
    feed.land("a.csv", "id,at,date(at)\na,2020-01-01T10:00:00Z,2020-01-02\n")
    with pytest.raises(ConfigurationError, match="the landing files have both") as raised:
        feed.run()
    assert "write `date(at) as NAME`" in raised.value.next
    (tmp_path / "b").rename(tmp_path / "named")
    named = Feed(tmp_path / "named", "partition_by = ['date(at) as day']\n[tables.t.schema]\nat = 'timestamp'\n")
    named.land("a.csv", "id,at,date(at)\na,2020-01-01T10:00:00Z,2020-01-02\n")
    named.run()
    assert named.rows("day", "date(at)") == [("2020-01-01", "2020-01-02")]


@pytest.mark.parametrize("name", ["price", "PRICE"])
def test_type_is_given_under_a_name_in_any_case(tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path, "order_by = ['version']\n")
    feed.land("a.csv", "id,day,version,Price\na,2020-01-01,1,2\n")
    feed.run()
    mended = Table.open(configured(tmp_path, f"\n[tables.t.schema]\n{name} = 'string'\n"))
    feed.land("b.csv", "id,day,version,Price\nb,2020-01-01,1,x\n")
    assert ["'Price' stays bigint" in note for note in mended.plan().notes] == [True]
    appended = mended.append(host="local")
    assert appended is not None
    assert ["'Price' stays bigint" in warning for warning in appended.warnings] == [True]


@pytest.mark.parametrize("name", ["id", "Id"])
def test_plan_refuses_another_type_for_a_key_as_append_does(tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path, "order_by = ['version']\n")
    feed.land("a.csv", "id,day,version\na,2020-01-01,1\n")
    feed.run()
    other = Table.open(configured(tmp_path, f"\n[tables.t.schema]\n{name} = 'bigint'\n"))
    feed.land("b.csv", "id,day,version\n7,2020-01-01,1\n")
    for step in (other.plan, lambda: other.append(host="local")):
        with pytest.raises(ConfigurationError) as raised:
            step()
        assert raised.value.code == "key-type-fixed"


def test_key_that_is_stored_as_a_narrow_decimal_is_of_the_type_that_is_given(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "order_by = ['version']\n")
    narrow = pa.table({"id": pa.array([1], pa.decimal32(5, 2)), "day": pa.array([date(2020, 1, 1)]), "version": [1]})
    feed.land("a.parquet", narrow)
    feed.run()
    other = Table.open(configured(tmp_path, "\n[tables.t.schema]\nid = 'decimal(5,2)'\n"))
    feed.land("b.csv", "id,day,version\n1.00,2020-01-01,2\n")
    other.run(host="local")
    assert feed.rows("id", "version") == [("1.00", "2")]


def test_refused_rows_are_told_by_one_of_each_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deletes = "[tables.t.delete]\ncolumn = 'op'\nvalues = ['D']\nupserts = ['U']\n"
    feed = Feed(tmp_path, "order_by = ['version']\n" + deletes)
    feed.land("a.csv", "id,day,version,op\na,2020-01-01,1,U\nb,2020-01-01,1,X\n")
    feed.land("b.csv", "id,version,op\nc,1,U\n")
    feed.land("c.parquet", "torn")
    feed.land("d\n\x1b[31m.csv", "id,day,version,op\n,2020-01-01,1,U\n")
    text = CliRunner().invoke(main, ["run", "--host", "local"]).stdout
    assert "unreadable_file, for example c.parquet: " in text
    assert "null_key, for example 'd\\n\\x1b[31m.csv', line 2 (byte 18): Key column 'id' is null." in text
    assert "bad_operation, for example a.csv, line 3 (byte 35): Column 'op': 'X' is not in" in text
    assert "missing_column, for example b.csv, line 2 (byte 14): The file has no column day" in text
    assert "bad_operation, missing_column, null_key: fix these rows at the source" in text
    assert "unreadable_file: correct the file, or the settings that say how it is read" in text


def test_type_of_adopted_files_is_given_in_any_case(tmp_path: Path) -> None:
    types = "[tables.t.schema]\nPRICE = 'decimal(9,2)'\nCreated_On = 'date'\n"
    by = f"order_by = ['version']\npartition_by = ['created_on']\n{types}"
    narrow = pa.array([1], pa.decimal128(5, 2))
    table = adopted(tmp_path, "created_on=2020-01-01", by, id=["a"], version=[1], Price=narrow)
    assert table.view().spec.schema.field("Price").type == pa.decimal128(9, 2)


@pytest.mark.parametrize(
    "settings",
    [
        "[tables.t.schema]\nID = 'string'\nVersion = 'bigint'\nDAY = 'date'\n",
        "[tables.t.schema]\nSEEN = 'date'\n[tables.t.groups.g]\norder_by = ['seen']\ncolumns = ['c']\n",
        "partition_by = ['date(at) as day']\n[tables.t.schema]\nAT = 'timestamp'\n",
    ],
)
def test_type_of_a_column_that_has_a_role_is_given_in_any_case(tmp_path: Path, settings: str) -> None:
    mode = "mode = 'columns'\n" if "groups" in settings else ""
    feed = Feed(tmp_path, f"order_by = ['version']\n{mode}{settings}")
    made = "" if "date(at)" in settings else ",day"
    feed.land("a.csv", f"id,version,at,seen,c{made}\na,1,2020-01-01,2020-01-01,1{made and ',2020-01-01'}\n")
    assert feed.run() == {}
    names = feed.table.view().spec.schema.names
    assert {"id", "version", "at", "seen", "c", "day"} == set(names)


@pytest.mark.parametrize("type_", ["timestamp_ntz", None])
def test_order_of_arrival_of_adopted_files_has_the_type_that_is_given(tmp_path: Path, type_: str | None) -> None:
    given = f"[tables.t.schema]\nRecord_Timestamp = '{type_}'\n" if type_ else ""
    table = adopted(tmp_path, "day=2020-01-01", given, id=["a"], v=[1])
    zone = table.view().spec.schema.field("record_timestamp").type.tz
    assert zone == (None if type_ else "UTC")


def test_adopted_files_lack_no_column_that_rows_are_ordered_by(tmp_path: Path) -> None:
    for number, settings in enumerate(["seen_at = 'timestamp'", "record_timestamp = 'bigint'"]):
        order = "order_by = ['seen_at']\n" if "seen" in settings else ""
        with pytest.raises(ConfigurationError, match=settings.split()[0]):
            adopted(tmp_path / "ab"[number], "day=2020-01-01", f"{order}[tables.t.schema]\n{settings}\n", id=["a"])
        assert not (tmp_path / "ab"[number] / "processed/_lakeupsert").exists()


def test_adopted_decimals_are_of_the_type_that_is_given_however_narrow_they_lie(tmp_path: Path) -> None:
    given = "order_by = ['version']\n[tables.t.schema]\nprice = 'decimal(5,2)'\n"
    table = adopted(tmp_path, "day=2020-01-01", given, id=["b"], version=[1], price=pa.array([1], pa.decimal32(5, 2)))
    assert table.view().spec.schema.field("price").type == pa.decimal128(5, 2)
    assert [str(r["price"]) for r in table.to_arrow().read_all().to_pylist()] == ["1.00"]


def configured(root: Path, more: str) -> Path:
    path = root / "lakeupsert.toml"
    path.write_text(path.read_text() + more)
    return path


def adopted(tmp_path: Path, folder: str, settings: str, **columns: Any) -> Table:
    feed = Feed(tmp_path, settings)
    target = tmp_path / "processed" / folder
    target.mkdir(parents=True)
    pq.write_table(pa.table(columns), target / "part-0.parquet")
    feed.table.adopt()
    feed.land("1.csv", "id,version,year,month,created_at\na,2,2020,1,2020-01-01T10:00:00\n")
    feed.run()
    return feed.table


def test_rows_go_to_the_adopted_folder_of_their_value(tmp_path: Path) -> None:
    by = "order_by = ['version']\npartition_by = ['year', 'month']\n[tables.t.schema]\nyear = 'int'\nmonth = '{}'\n"
    for place, folder in (("a", "year=2020/month=01"), ("b", "year=2020/month=1")):
        table = adopted(tmp_path / place, folder, by.format("int"), id=["a"], version=[1])
        assert [r["version"] for r in table.to_arrow().read_all().to_pylist()] == [2]


def test_folders_of_a_made_column_are_adopted(tmp_path: Path) -> None:
    by = "order_by = ['version']\npartition_by = ['date(created_at) as day']\n"
    moments = pa.array([datetime(2020, 1, 1, 9)], pa.timestamp("us"))
    table = adopted(tmp_path, "day=2020-01-01", by, id=["a"], version=[1], created_at=moments)
    [row] = table.to_arrow().read_all().to_pylist()
    assert (row["version"], row["day"]) == (2, date(2020, 1, 1))


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    "given",
    ["7/x/2020-01-01", "07/x/2020-01-01", "+7/x/20200101", "s=07/k%2Fx=x/d=2020-01-01", "s=7/k%2Fx=x/2020-01-01"],
)
def test_partition_is_named_by_value_and_by_its_folder(tmp_path: Path, given: str) -> None:
    feed = Feed(tmp_path, "order_by = ['v']\npartition_by = ['s', 'k/x', 'd']\n[tables.t.schema]\ns = 'int'\n")
    feed.land("1.csv", "id,v,s,k/x,d\na,1,7,x,2020-01-01\n")
    feed.run()
    spec = feed.table.view().spec
    assert parse_partition(spec, given) == "s=7/k%2Fx=x/d=2020-01-01"
    with pytest.raises(ConfigurationError) as raised:
        parse_partition(spec, "7/2020-01-01")
    assert "s=VALUE/k%2Fx=VALUE/d=VALUE" in raised.value.next


def test_delete_wins_by_content_where_there_is_no_other_column(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "order_by = ['v']\nties = 'content'\n[tables.t.delete]\ncolumn = 'op'\nvalues = ['D']\n")
    for number, operation in enumerate("UDU"):
        feed.land(f"{number}.csv", f"id,day,v,op\na,2020-01-01,1,{operation}\n")
        feed.run()
    assert feed.rows("id") == []


def test_columns_that_come_in_another_order_make_the_same_row_win(tmp_path: Path) -> None:
    files = ["id,day,v,p\na,2020-01-01,1,2\n", "id,day,v,q\na,2020-01-01,1,1\n"]
    found = []
    for place, order in (("a", files), ("b", files[::-1])):
        feed = Feed(tmp_path / place, "order_by = ['v']\nties = 'content'\n")
        for number, text in enumerate(order):
            feed.land(f"{number}.csv", text)
            feed.run()
        found.append(feed.rows("id", "p", "q"))
    assert found[0] == found[1] == [("a", "2", "None")]
