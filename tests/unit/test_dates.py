"""Dates in text: formats agree with strptime, ambiguous values are refused, and other dates stay what they are."""

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeupsert.config import DialectSettings, Reading, parse
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.files import survey
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.dates import DateFormat
from lakeupsert.rows.convert import convert
from lakeupsert.storage import LocalStore
from tests.harness.specs import create

FORMATS = [
    "%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%y", "%Y%m%d", "%b %d %Y", "%d-%b-%Y", "%B %d, %Y", "day %d of %m.%Y",
    "%Y-%m-%d %H:%M", "%d/%m/%Y %H:%M:%S", "%m/%d/%Y %I:%M:%S %p", "%Y%m%d%H%M%S", "%Y-%m-%dT%H:%M:%S.%f",
    "%Y-%m-%dT%H:%M:%S%z", "%d%%%m%%%Y", "(%d+%m)?%Y",
]  # fmt: skip
moments = st.datetimes(datetime(1970, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC))


def read(text: list[str], format_: str) -> list[Any]:
    return convert(DateFormat(format_).to_iso(pa.array(text, pa.string())), pa.timestamp("us"))[0].to_pylist()


@given(st.sampled_from(FORMATS), st.lists(moments, min_size=1, max_size=5))
def test_what_strftime_writes_is_read(format_: str, moments: list[datetime]) -> None:
    texts = [moment.strftime(format_) for moment in moments]
    expected = [datetime.strptime(text, format_) for text in texts]
    assert read(texts, format_) == [e.astimezone(UTC).replace(tzinfo=None) if e.tzinfo else e for e in expected]


@given(st.sampled_from(FORMATS), st.text("0123456789/-.:T +Zaemnpjr", max_size=22))
def test_what_is_read_is_what_strptime_reads(format_: str, text: str) -> None:
    (found,) = read([text], format_)
    if found is not None:
        expected = datetime.strptime(text, format_)
        assert found == (expected.astimezone(UTC).replace(tzinfo=None) if expected.tzinfo else expected)


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("%d/%m/%Y", "31/02/2024"), ("%d/%m/%Y", "1/3/24"), ("%d/%m/%Y", "01/03/2024 "), ("%d/%m/%Y", "2024-03-01"),
        ("%d/%m/%Y", "32/01/2024"), ("%Y%m%d", "2024111"), ("%b %d %Y", "Foo 1 2000"), ("%d/%m/%Y", "x01/03/2024"),
        ("%m/%d/%Y %I:%M:%S %p", "01/02/2024 13:00:00 PM"),
    ],
)  # fmt: skip
def test_other_text_is_no_date(format_: str, text: str) -> None:
    assert read([text], format_) == [None]


def test_single_digits_and_the_pivot_of_years() -> None:
    assert read(["1/3/2024"], "%d/%m/%Y") == [datetime(2024, 3, 1)]
    assert read(["01.03.68", "01.03.69"], "%d.%m.%y") == [datetime(2068, 3, 1), datetime(1969, 3, 1)]
    assert read(["12/31/2024 12:05:00 am", "12/31/2024 12:05:00 PM"], "%m/%d/%Y %I:%M:%S %p") == [
        datetime(2024, 12, 31, 0, 5),
        datetime(2024, 12, 31, 12, 5),
    ]


# ---------------------------------------------------------------- in landing files


def landed(
    tmp_path: Path, name: str, content: bytes, reading: Reading, types: Any = None
) -> tuple[list[Any], list[Any]]:
    """The accepted rows of a file, and the refused ones."""
    (tmp_path / name).write_bytes(content)
    store = LocalStore(tmp_path)
    found = store.head(name)
    assert found is not None
    file = LandingInput(name, found.size, found.etag, 0)
    if types is None:
        surveyed = survey(store, file, reading, None, frozenset())
        assert surveyed.schema is not None, surveyed.unreadable
        types = surveyed.schema
    spec = create(
        types, table_id="t", key=["id"], order_by=["record_timestamp"], partition_by=["day"], delete=None, stamped=True
    )
    accepted, refused = [], []
    for rows in read_rows(store, file, reading, RowRules(spec, 0)):
        for row, partition in zip(
            rows.accepted.to_pylist(), rows.accepted["_lakeupsert_partition"].to_pylist(), strict=True
        ):
            accepted.append({**row, "day": date.fromisoformat(partition.removeprefix("day="))})
        refused += rows.quarantined.to_pylist()
    return accepted, refused


def test_ambiguous_dates_are_refused_with_both_meanings_and_their_line(tmp_path: Path) -> None:
    reading = Reading(dates={"DAY": ("%d/%m/%Y", "%m/%d/%Y", "%Y-%m-%d")})
    text = "id,day\na,25/03/2024\nb,01/03/2024\nc,03/25/2024\nd,2024-03-01\ne,03/03/2024\nf,never\ng,\n"
    accepted, refused = landed(tmp_path, "x.csv", text.encode(), reading)
    days = {row["id"]: row["day"].isoformat() for row in accepted}
    assert days == {"a": "2024-03-25", "c": "2024-03-25", "d": "2024-03-01", "e": "2024-03-03"}
    assert [(r["reason_code"], r["line"], r["position"]) for r in refused] == [
        ("ambiguous_date", 3, text.index("b,")),
        ("bad_partition", 7, text.index("f,")),
        ("bad_partition", 8, text.index("g,")),
    ]
    assert "'01/03/2024' is 2024-03-01 by %d/%m/%Y and 2024-01-03 by %m/%d/%Y" in refused[0]["reason"]
    assert json.loads(refused[0]["raw"]) == {"id": "b", "day": "01/03/2024"}


def test_every_format_has_dates(tmp_path: Path) -> None:
    reading = Reading(dates={"day": ("%d.%m.%Y", "%Y%m%d"), "at": "%d.%m.%Y %H:%M"}, aliases={"Tag": "day"})
    lines = (
        b'{"id":1,"Tag":"05.03.2024","at":"05.03.2024 06:07"}\n{"id":2,"Tag":20240305,"at":null}\n{"id":3,"Tag":[1]}\n'
    )
    accepted, refused = landed(tmp_path, "x.jsonl", lines, reading)
    assert [(r["day"], r["at"]) for r in accepted] == [
        (date(2024, 3, 5), datetime(2024, 3, 5, 6, 7)),
        (date(2024, 3, 5), None),
    ]
    assert [(r["reason_code"], r["line"]) for r in refused] == [("bad_partition", 3)]
    written = pa.table({"id": [1], "Tag": ["05.03.2024"], "at": [datetime(2024, 3, 5)]})
    pq.write_table(written, tmp_path / "a.parquet")
    (row,), _ = landed(tmp_path, "x.parquet", (tmp_path / "a.parquet").read_bytes(), reading)
    assert (row["day"], row["at"]) == (date(2024, 3, 5), datetime(2024, 3, 5))
    numbers = pa.table({"id": [1], "Tag": pa.array([20240305], pa.int32()), "at": [None]})
    pq.write_table(numbers, tmp_path / "a.parquet")
    (row,), _ = landed(tmp_path, "y.parquet", (tmp_path / "a.parquet").read_bytes(), reading)
    assert row["day"] == date(2024, 3, 5)


def test_column_that_the_table_has_as_text_stays_as_it_is_written(tmp_path: Path) -> None:
    reading = Reading(dates={"note": "%d/%m/%Y"})
    types = pa.schema([("id", pa.string()), ("day", pa.date32()), ("note", pa.string())])
    (row,), _ = landed(tmp_path, "x.csv", b"id,day,note\na,2024-03-01,01/03/2024\n", reading, types)
    assert row["note"] == "01/03/2024"


# ---------------------------------------------------------------- separators, null words, Excel


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("id;day;price;note\na;2024-03-01;1,5;x, y\n\"b;\";2024-03-01;-;\n", "utf-8"),
        ("id,day,price,note\na,2024-03-01,1.5,\"x, y\"\nb;,2024-03-01,-,\n", "utf-8-sig"),
        ("sep=;\r\nid;day;price;note\r\na;2024-03-01;1,5;x, y\r\nb\\;;2024-03-01;NA;\r\n".replace("b\\;", '"b;"'), "utf-16"),
        ("SEP=|\nid|day|price|note\na|2024-03-01|1.5|x, y\nb;|2024-03-01||\n", "utf-8-sig"),
    ],
)  # fmt: skip
def test_each_file_has_its_own_dialect(tmp_path: Path, text: str, encoding: str) -> None:
    reading = Reading(null=("-", "NA"), dialects=(DialectSettings(delimiter=";", decimal_separator=","),))
    accepted, refused = landed(tmp_path, "x.csv", text.encode(encoding), reading)
    assert [(r["id"], r["price"], r["note"]) for r in accepted] == [("a", 1.5, "x, y"), ("b;", None, None)]
    assert refused == []


def test_a_point_is_no_decimal_comma(tmp_path: Path) -> None:
    """1.234 with decimal commas would be 1234, or a slip: no one knows. In 1.234,50 and 1.234.567,5 it can only be the former."""
    reading = Reading(delimiter=";", decimal_separator=",")
    types = pa.schema([("id", pa.string()), ("day", pa.date32()), ("price", pa.decimal128(9, 2)), ("n", pa.int64())])
    text = "id;day;price;n\na;2024-03-01;12,50;7\nb;2024-03-01;1.25;7\nc;2024-03-01;1.234;7\nd;2024-03-01;-,5;7\n"
    text += "e;2024-03-01;-1.234,50;7\nf;2024-03-01;1.234.567,5;7\ng;2024-03-01;12.34,50;7\nh;2024-03-01;1.2345,5;7\n"
    accepted, refused = landed(tmp_path, "x.csv", text.encode(), reading, types)
    taken = [("a", "12.50"), ("d", "-0.50"), ("e", "-1234.50"), ("f", "1234567.50")]
    assert [(r["id"], str(r["price"])) for r in accepted] == taken
    assert [(r["reason_code"], r["line"]) for r in refused] == [("bad_type", line) for line in (3, 4, 8, 9)]


def test_wrong_delimiter_is_told_in_the_reason(tmp_path: Path) -> None:
    types = pa.schema([("id", pa.string()), ("day", pa.date32())])
    _, refused = landed(tmp_path, "x.csv", b"Kunde;Datum\n1;2024-03-01\n", Reading(), types)
    assert [r["reason_code"] for r in refused] == ["missing_column"]
    assert 'set `delimiter = ";"`' in refused[0]["reason"]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "read",
    [
        'dates = { day = "%d/%m" }', 'dates = { day = "%d/%m/%Y %q" }', 'dates = { day = "%d/%m/%Y %M" }',
        'dates = { day = "%d/%m/%Y %I" }', "dates = { day = [] }", 'dates = { day = ["%Y-%m-%d", "%Y-%m-%d"] }',
        'dates = { day = "%d/%m/%Y", DAY = "%Y-%m-%d" }', 'dates = { day = "%Y-%m-%d %d" }', 'dates = { id = "%Y-%m-%d" }',
        'dialects = [{ delimiter = "," }]', 'dialects = [{ delimiter = ";;" }]', 'decimal_separator = "\'"',
        'null = ["", "NA"]', "dialects = [{ delimiter = '\"' }]",
    ],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(read: str) -> None:
    assert refused(read).code == "bad-setting"


def test_misspelt_setting_of_a_dialect_is_refused() -> None:
    error = refused('dialects = [{ delimeter = ";" }]')
    assert (error.code, "'delimiter'" in error.message) == ("unknown-setting", True)


def refused(read: str) -> ConfigurationError:
    text = f"""
[tables.t]
landing = "/in"
processed = "/out"
key = ["id"]
partition_by = ["day"]
[tables.t.schema]
id = "bigint"
[tables.t.read]
{read}"""
    with pytest.raises(ConfigurationError) as raised:
        parse("lakeupsert.toml", text.encode(), {})
    return raised.value
