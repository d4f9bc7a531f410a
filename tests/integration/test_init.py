"""`lakeupsert init`: what it proposes for folders of known make, what it leaves open, and that the night then is exact."""

import csv
import json
import random
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.config import load
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init import apart, sample
from lakeupsert.operations.init.propose import propose

Row = dict[str, Any]
NIGHTS = [date(2020, 1, 28) + timedelta(days=n) for n in range(5)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, ["init", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*args: str, code: int = 0) -> Any:
    result = call(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def write(path: str, rows: Sequence[Row]) -> None:
    """Rows of one and the same columns, in the format of the file's name."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    texts = [{n: v.isoformat() if isinstance(v, date) else v for n, v in row.items()} for row in rows]
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), target)
    elif target.suffix == ".csv":
        with target.open("w", newline="") as file:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(texts)
    else:
        target.write_text("".join(json.dumps(text) + "\n" for text in texts))


def order(number: int, line: int, day: date, at: datetime, amount: int, **more: Any) -> Row:
    row = {"order_id": number, "line_no": line, "transaction_date": day, "item": f"item {amount % 7}", "amount": amount}
    return {**row, "record_timestamp": at, **more}


def nights(seed: int = 4) -> list[list[Row]]:
    """Each night 60 new orders of one to three lines, and some older lines again with another amount."""
    chance = random.Random(seed)
    stored: list[Row] = []
    found = []
    for n, day in enumerate(NIGHTS):
        at = datetime(day.year, day.month, day.day, 22)
        fresh = [
            order(n * 1000 + i, line, day, at + timedelta(seconds=i), chance.randrange(500))
            for i in range(60)
            for line in range(1, 2 + chance.randrange(3))
        ]
        again = [
            {**row, "amount": row["amount"] + 1, "record_timestamp": at}
            for row in chance.sample(stored, min(20, len(stored)))
        ]
        stored = [*stored, *fresh]
        found.append([*again, *fresh])
    return found


def land(folder: str, pattern: str, ending: str, batches: Sequence[Sequence[Row]]) -> None:
    for day, rows in zip(NIGHTS, batches, strict=True):
        write(f"{folder}/{day:{pattern}}/sales{ending}", rows)


def newest(batches: Sequence[Sequence[Row]], key: Sequence[str]) -> list[tuple[Any, ...]]:
    """What the table must hold, by a dict: per partition and key the row of the greatest timestamp, less deletes."""
    best: dict[Any, Row] = {}
    for row in (row for rows in batches for row in rows):
        at = (row["transaction_date"], *(row[k] for k in key))
        if at not in best or best[at]["record_timestamp"] <= row["record_timestamp"]:
            best[at] = row
    return sorted(_comparable(row) for row in best.values() if row.get("op") != "D")


def _comparable(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(str(v) for n, v in sorted(row.items()) if n != "op")


def table_rows(config: str = "lakeupsert.toml") -> list[tuple[Any, ...]]:
    """The table after a night under this configuration."""
    table = Table.open(config)
    try:
        table.run(host="local")
        return sorted(_comparable(row) for row in table.to_arrow().read_all().to_pylist())
    finally:
        table.close()


# ---------------------------------------------------------------- landing zones, to the end of a night


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("pattern", ["%Y-%m-%d", "%m/%d/%Y", "dt=%Y-%m-%d", "year=%Y/month=%m/day=%d"])
def test_night_on_the_written_configuration_is_exact(here: Path, ending: str, pattern: str) -> None:
    batches = nights()
    land("landing/sales", pattern, ending, batches)
    found = answer("landing/sales")
    assert found["warnings"] == []
    assert found["table"] == "sales"
    result = found["result"]
    assert result["written"] == str(here / "lakeupsert.toml")
    assert result["next"] == "`lakeupsert run`"
    assert result["looked_at"] == {"files": 5, "rows": sum(map(len, batches)), "of_files": 5}
    assert result["proposed"] == {
        "table": "sales",
        "landing": str(here / "landing/sales"),
        "processed": str(here / "processed/sales"),
        "partition_by": ["transaction_date"],
        "key": ["order_id", "line_no"],
        "order_by": ["record_timestamp"],
        "landing_dates": pattern,
        "delete": None,
        "read": {},
        "schema": {},
    }
    (settings,) = load("lakeupsert.toml").tables.values()
    assert (settings.key, settings.landing_dates) == (("order_id", "line_no"), pattern)
    assert table_rows() == newest(batches, ("order_id", "line_no"))


def test_columns_are_described(here: Path) -> None:
    write(
        "zone/a.csv",
        [order(i, 1, NIGHTS[i % 2], datetime(2020, 2, 1), i, note="" if i % 4 else "x") for i in range(200)],
    )
    columns = {c.pop("name"): c for c in answer("zone")["result"]["columns"]}
    assert columns["order_id"] == {"type": "string", "nulls": 0, "distinct": 200, "low": 0, "high": 199}
    assert columns["note"] == {"type": "string", "nulls": 150, "distinct": 1, "low": "x", "high": "x"}
    assert columns["transaction_date"]["type"] == "date32[day]"
    assert (columns["transaction_date"]["low"], columns["transaction_date"]["high"]) == ("2020-01-28", "2020-01-29")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is read in this process, whose limits a test has changed."""
    monkeypatch.setattr(apart, "_call", lambda address, table, ended, alive: propose(address, table, ended))


@pytest.mark.usefixtures("in_this_process")
def test_only_a_sample_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "FILES", 4)
    monkeypatch.setattr(sample, "ROWS", 100)
    for n in range(10):
        write(f"zone/{n}.csv", [order(n * 100 + i, 1, NIGHTS[0], datetime(2020, 2, 1), i) for i in range(80)])
    result = answer("zone")["result"]
    assert result["looked_at"] == {"files": 4, "rows": 100, "of_files": 10}


@pytest.mark.usefixtures("in_this_process")
def test_sample_of_text_ends_at_a_whole_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of a time is no time, and would make text of its column."""
    rows = [order(i + 1000, 1, NIGHTS[0], datetime(2020, 2, 1, 3), 0) for i in range(100)]
    write("zone/a.csv", rows)
    monkeypatch.setattr(sample, "BYTES", Path("zone/a.csv").stat().st_size - len("03:00:00\r\n"))
    result = answer("zone")["result"]
    assert result["looked_at"]["rows"] == 99
    assert result["columns"][-1]["type"] == "timestamp[us]"


@pytest.mark.long
def test_deletes_are_recognised_and_obeyed() -> None:
    batches = [[{**row, "op": "I"} for row in rows] for rows in nights()]
    stored = {row["order_id"] * 10 + row["line_no"]: row for rows in batches[:-1] for row in rows}
    batches[-1] += [{**r, "op": "D", "record_timestamp": datetime(2020, 3, 1)} for r in list(stored.values())[:30]]
    land("landing/sales", "%Y-%m-%d", ".csv", batches)
    found = answer("landing/sales")
    assert found["result"]["proposed"]["delete"] == {"column": "op", "values": ["D"]}
    rows = table_rows()
    assert len(rows) == len(stored) + len([r for r in batches[-1] if r["order_id"] >= 4000]) - 30
    assert rows == newest(batches, ("order_id", "line_no"))


def test_changes_of_one_key_in_one_file_do_not_hide_the_key() -> None:
    """A log of changes has a key several times; its inserts have it once."""
    at = datetime(2020, 2, 1)
    rows = [order(i, 1, NIGHTS[0], at, i, op="insert") for i in range(150)]
    rows += [order(i, 1, NIGHTS[0], at + timedelta(hours=1), i + 1, op="update") for i in range(100)]
    rows += [order(i, 1, NIGHTS[0], at + timedelta(hours=2), i + 1, op="delete") for i in range(10)]
    write("zone/a.parquet", rows)
    proposed = answer("zone")["result"]["proposed"]
    assert proposed["key"] == ["order_id"]
    assert proposed["delete"] == {"column": "op", "values": ["delete"]}


def test_letters_alone_are_no_operations() -> None:
    """Debits must not delete what credits put there."""
    rows = [order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i, side="CD"[i % 2]) for i in range(200)]
    write("zone/a.csv", rows)
    found = answer("zone")
    assert found["result"]["proposed"]["delete"] is None
    (warning,) = found["warnings"]
    assert "side may hold operations" in warning


def test_flag_of_text_files_is_taken_however_it_is_written() -> None:
    rows = [
        order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i, is_deleted="FALSE" if i % 9 else "TRUE") for i in range(200)
    ]
    write("landing/a.csv", rows)
    answer("landing")
    assert len(table_rows()) == len([row for row in rows if row["is_deleted"] == "FALSE"])


def test_column_of_dates_with_some_bad_values_is_kept_as_dates() -> None:
    """One typing error must not make text of the partition column."""
    rows = [order(i, 1, NIGHTS[i % 2], datetime(2020, 2, 1), i) for i in range(500)]
    bad = [{"order_id": 998, "transaction_date": "2020-13-01"}, {"order_id": 999, "record_timestamp": "noon"}]
    write("landing/a.csv", [*rows, *({**rows[0], **values} for values in bad)])
    proposed = answer("landing")["result"]["proposed"]
    assert (proposed["partition_by"], proposed["order_by"]) == (["transaction_date"], ["record_timestamp"])
    assert proposed["schema"] == {"transaction_date": "date", "record_timestamp": "timestamp_ntz"}
    assert table_rows() == newest([rows], ("order_id",))


def test_t_and_f_of_postgresql_are_booleans() -> None:
    """If both are there and nothing else is: `t` in every row may be a code."""
    flags = [{"paid": "tf"[i % 2], "kind": "t", "size": "tfx"[i % 3]} for i in range(200)]
    rows = [order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i, **flag) for i, flag in enumerate(flags)]
    write("landing/a.csv", rows)
    assert answer("landing")["result"]["proposed"]["schema"] == {"paid": "boolean"}
    found = table_rows()
    assert len(found) == len(rows)
    assert {name: str(Table.open("lakeupsert.toml").schema.field(name).type) for name in flags[0]} == {
        "paid": "bool",
        "kind": "string",
        "size": "string",
    }


def test_numbered_versions_order_rows_where_there_is_no_time() -> None:
    rows = [
        {"account": f"a{i}", "day": NIGHTS[0], "version": v, "balance": i * v} for i in range(100) for v in (1, 2, 3)
    ]
    for v in (1, 2, 3):
        write(f"zone/{v}.jsonl", [row for row in rows if row["version"] == v])
    proposed = answer("zone")["result"]["proposed"]
    assert proposed["order_by"] == ["version"]


# ---------------------------------------------------------------- how files are read


def proposed(zone: str) -> Any:
    return answer(zone, "--dry-run")["result"]["proposed"]


def lines(path: str, *rows: str, encoding: str = "utf-8") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(("\n".join(rows) + "\n").encode(encoding))


@pytest.mark.long
def test_dialect_of_all_files_is_set() -> None:
    for name, delimiter in (("semicolon", ";"), ("tab", "\t"), ("pipe", "|")):
        rows = (f"{i}|2020-01-{1 + i % 28:02d}|a, b|{i},5" for i in range(200))
        lines(f"{name}/a.csv", *(row.replace("|", delimiter) for row in ("id|day|note|price", *rows)))
        read = proposed(name)["read"]
        assert read == {"delimiter": delimiter, "decimal_separator": ","}


@pytest.mark.parametrize(
    ("price", "found"), [("1.{:03},50", {"decimal_separator": ","}), ("1,{:03}", {}), ("{},5", {})]
)
def test_a_decimal_comma_between_quotes_needs_points_for_thousands(price: str, found: dict[str, str]) -> None:
    lines("quoted/a.csv", "id,day,price", *(f'{i},2020-01-{1 + i % 28:02d},"{price.format(i)}"' for i in range(200)))
    assert proposed("quoted")["read"] == found


@pytest.mark.parametrize("has_duckdb", [True, False])
def test_dialect_of_some_files_is_added(monkeypatch: pytest.MonkeyPatch, has_duckdb: bool) -> None:
    if not has_duckdb:
        monkeypatch.setitem(sys.modules, "duckdb", None)
    rows = [f"{i},2020-01-{1 + i % 28:02d},{i}.5" for i in range(200)]
    lines("landing/a.csv", "id,day,price", *rows[:100])
    lines("landing/b.csv", "id,day,price", *rows[100:150])
    lines("landing/c.csv", "id;day;price", *(row.replace(",", ";").replace(".", ",") for row in rows[150:]))
    found = answer("landing")
    assert found["result"]["proposed"]["read"] == {"dialects": [{"delimiter": ";", "decimal_separator": ","}]}
    assert found["result"]["proposed"]["schema"] == {}
    assert "delimiter ';' in 1 of 3 sampled CSV files: c.csv" in Path("lakeupsert.toml").read_text()
    assert sorted(float(row[-2]) for row in table_rows()) == sorted(i + 0.5 for i in range(200))


@pytest.mark.parametrize(
    ("delimiter", "note", "found"),
    [
        (",", r'"say \"hi\", she said"', {"escape": "\\"}),  # Spark
        ("\t", r"a\tb \\ c", {"delimiter": "\t", "escape": "postgresql"}),  # COPY
        ("\t", "two\\\nlines \\\\", {"delimiter": "\t", "escape": "mysql"}),  # OUTFILE
        ("\t", r"C:\new\table", {"delimiter": "\t"}),
        (",", r'"C:\new"', {}),
        (",", '"say ""hi"""', {}),
    ],
)
def test_escapes_are_found(delimiter: str, note: str, found: dict[str, str]) -> None:
    rows = ([str(i), f"2020-01-{1 + i % 28:02d}", note if i % 9 == 0 else "plain", str(i * 3)] for i in range(200))
    lines("zone/a.csv", *map(delimiter.join, [["id", "day", "note", "price"], *rows]))
    assert proposed("zone")["read"] == found


def test_row_numbers_without_a_name_are_no_key() -> None:
    for v in (1, 2):
        lines(
            f"zone/{v}.csv",
            ",order_id,day,price",
            *(f"{i},{7 * i + v},2020-01-{1 + i % 28:02d},{i}" for i in range(200)),
        )
    assert proposed("zone")["key"] == ["order_id"]
    answer("zone")
    assert sorted(row[0] for row in table_rows())[:2] == ["0", "0"]


def test_excel_needs_no_setting() -> None:
    lines("zone/a.csv", "sep=;", "id;day;price", *(f"{i};2020-01-01;{i}" for i in range(200)), encoding="utf-16")
    found = proposed("zone")
    assert (found["key"], found["read"]) == (["id"], {"delimiter": ";"})


def test_files_without_a_header_are_told() -> None:
    lines("zone/a.csv", *(f"{i},2020-01-{1 + i % 28:02d},x" for i in range(200)))
    found = answer("zone")
    assert found["result"]["proposed"]["read"] == {"header": False}
    assert found["result"]["proposed"]["partition_by"] == ["_c1"]
    assert any(w.startswith("header is false") for w in found["warnings"])


def test_header_of_text_alone_is_a_header() -> None:
    lines("zone/a.csv", "name,city", *(f"n{i % 20},c{i % 7}" for i in range(100)))
    assert "header" not in proposed("zone")["read"]


def test_null_words_are_set_where_other_values_have_a_type() -> None:
    rows = [f"{i},2020-01-01,{'NA' if i % 9 else i},{'-' if i % 7 else 'x'}" for i in range(200)]
    lines("zone/a.csv", "id,day,price,note", *rows)
    found = answer("zone")
    assert found["result"]["proposed"]["read"] == {"null": "NA"}
    (price,) = [c for c in found["result"]["columns"] if c["name"] == "price"]
    assert price["type"] == "int64"
    assert not [w for w in found["warnings"] if "null" in w]
    lines("other/a.csv", "id,day,price,country", *(row.replace("-,", "x").replace(",x", ",NA") for row in rows))
    assert any("'NA', which becomes null in country, too" in w for w in answer("other", "--dry-run")["warnings"])


@pytest.mark.parametrize(
    ("days", "formats", "warned"),
    [
        (["25/03/2024", "01/03/2024"], "%d/%m/%Y", False),
        (["03/25/2024", "03/01/2024"], "%m/%d/%Y", False),
        (["01/03/2024", "02/03/2024"], ["%d/%m/%Y", "%m/%d/%Y"], True),
        (["25/03/2024", "03/25/2024", "01/03/2024"], ["%d/%m/%Y", "%m/%d/%Y"], True),
        (["2024-03-02", "2024-03-09", "01/03/2024", "09/03/2024"], ("%Y-%m-%d", "%d/%m/%Y"), True),
        (["01.03.2024", "25.03.2024"], "%d.%m.%Y", False),
        (["Jan 1 2000", "Feb 11 2000"], "%b %d %Y", False),
        (["20240301", "20240302"], "%Y%m%d", False),
        (["2024-03-01", "2024-03-02"], None, False),
    ],
)
def test_formats_of_dates_are_what_the_values_settle(days: Sequence[str], formats: Any, warned: bool) -> None:
    lines("zone/a.csv", "id,day", *(f"k{i},{days[i % len(days)]}" for i in range(200)))
    found = answer("zone")
    read = found["result"]["proposed"]["read"]
    expected = list(formats) if isinstance(formats, tuple) else formats
    assert read == ({} if formats is None else {"dates": {"day": expected}})
    assert found["result"]["proposed"]["partition_by"] == (None if isinstance(formats, list) and warned else ["day"])
    assert any("day: '0" in w and "may be %d/%m/%Y or %m/%d/%Y" in w for w in found["warnings"]) == warned


@pytest.mark.parametrize(
    ("usual", "slip", "read"),
    [
        ("2024-01-{:02d}", "05/06/2024", {}),
        ("2024-01-{:02d}", "unknown", {}),
        ("{:02d}/01/2024", "2024-13-45", {"dates": {"day": "%d/%m/%Y"}}),
        ("{:02d}/01/2024", "2024-01-05", {"dates": {"day": "%d/%m/%Y"}}),
    ],
)
def test_slip_is_no_format_and_is_named(usual: str, slip: str, read: Any) -> None:
    lines("landing/a.csv", "id,day", *(f"{i},{slip if i == 77 else usual.format(1 + i % 28)}" for i in range(300)))
    found = answer("landing")
    assert found["result"]["proposed"]["read"] == read
    assert found["result"]["proposed"]["partition_by"] == ["day"]
    assert any(f"'{slip}'" in w and "go to quarantine" in w for w in found["warnings"])
    assert len(table_rows()) == 299


def test_points_between_thousands_show_the_decimal_comma() -> None:
    lines(
        "landing/a.csv", "id;day;betrag", *(f"{i};2024-01-01;{1 + i % 9}.{100 + i},{10 + i % 90}" for i in range(200))
    )
    assert answer("landing")["result"]["proposed"]["read"] == {"delimiter": ";", "decimal_separator": ","}
    assert sorted(float(row[0]) for row in table_rows()) == sorted(
        float(f"{1 + i % 9}{100 + i}.{10 + i % 90}") for i in range(200)
    )


@pytest.mark.parametrize(
    ("names", "aliases"),
    [
        (("price", "price", "unit_price"), {"unit_price": "price"}),
        (("price", "unit_price"), {"unit_price": "price"}),
        (("unit_price", "price", "price"), {"unit_price": "price"}),
        (("quantity", "quantty"), {"quantty": "quantity"}),
        (("price", "colour"), None),
        (("price", "unit_price", "list_price"), None),
        (("price", "price,unit_price"), None),
        (("price", "slips", "unit_price"), {"unit_price": "price"}),
    ],
)
def test_column_in_place_of_one_of_a_similar_name_is_its_alias(names: Sequence[str], aliases: Any) -> None:
    for n, name in enumerate(names):
        more, slip = ",1" * name.count(","), name == "slips"
        name = "price" if slip else name
        lines(
            f"landing/{n}.csv",
            f"id,day,{name}",
            *(f"{n * 100 + i},2024-01-01,{'oops' if slip and i == 9 else i / 4}{more}" for i in range(100)),
        )

    Path("landing/empty.csv").write_text("")
    found = answer("landing")
    assert found["result"]["proposed"]["read"].get("aliases") == aliases
    assert any("check `aliases`" in w for w in found["warnings"]) == (aliases is not None)
    assert all("None" not in row for row in table_rows()) == (aliases is not None)


def test_file_of_no_known_format_does_not_hide_the_dates_of_folders() -> None:
    land("landing", "%Y-%m-%d", ".csv", nights())
    lines("landing/README.txt", "about these files")
    assert answer("landing")["result"]["proposed"]["landing_dates"] == "%Y-%m-%d"
    lines("landing/other.csv", "order_id", "1")
    assert any(
        "fits 5 of 6 files; the others would not be taken: other.csv" in w
        for w in answer("landing", "--dry-run")["warnings"]
    )


def test_times_have_formats_too() -> None:
    rows = (f"{i},2020-01-01,{1 + i % 28:02d}.01.2024 {i % 24:02d}:00" for i in range(300))
    lines("zone/a.csv", "id,day,updated_at", *rows)
    found = proposed("zone")
    assert (found["order_by"], found["read"]) == (["updated_at"], {"dates": {"updated_at": "%d.%m.%Y %H:%M"}})


def test_array_of_objects_is_sampled() -> None:
    rows = [{"id": i, "day": "2020-01-01", "n": i} for i in range(300)]
    Path("zone").mkdir()
    Path("zone/a.json").write_text(json.dumps(rows, indent=2))
    found = answer("zone")["result"]
    assert (found["looked_at"]["rows"], found["proposed"]["key"]) == (300, ["id"])


def test_column_that_a_slip_makes_text_gets_its_type_and_a_warning() -> None:
    lines("zone/a.csv", "id,day,quantity", *(f"{i},2020-01-01,{'three' if i == 7 else i}" for i in range(200)))
    found = answer("zone")
    assert found["result"]["proposed"]["schema"] == {"quantity": "bigint"}
    assert any("'three' in 'a.csv' line 9" in w for w in found["warnings"])


def test_lines_that_are_no_rows_are_told() -> None:
    lines("zone/a.csv", "a^b", *("1,2,3" for _ in range(150)))
    error = answer("zone", code=1)["error"]
    assert error["code"] == "no-readable-file"
    assert "150 lines" in error["message"]


# ---------------------------------------------------------------- days of timestamps, and keys of feeds with updates


def test_day_of_a_timestamp_is_the_partition_where_there_is_no_date() -> None:
    rows = [
        {"id": i, "created_at": datetime(2020, 2, 1 + i % 20, 3), "updated_at": datetime(2020, 3, 1), "v": i}
        for i in range(300)
    ]
    write("landing/a.parquet", rows)
    found = answer("landing")
    assert found["result"]["proposed"]["partition_by"] == ["date(created_at) as day"]
    assert found["result"]["proposed"]["order_by"] == ["updated_at"]
    assert not [w for w in found["warnings"] if "partition_by" in w]
    assert len(table_rows()) == 300


def test_day_of_a_time_that_may_change_is_told() -> None:
    rows = [{"id": i, "day": "mon", "ts": datetime(2020, 2, 1 + i % 20, 3)} for i in range(300)]
    write("zone/a.parquet", rows)
    found = answer("zone")
    assert found["result"]["proposed"]["partition_by"] == ["date(ts)"]
    assert any("partition_by is the day of ts" in w for w in found["warnings"])


def test_key_of_a_feed_with_updates_in_one_file_says_how_many_rows_are_replaced() -> None:
    """`id` and `amount` together are unique only because each update has another amount."""
    at = datetime(2020, 2, 1)
    rows = [{"id": i, "day": NIGHTS[0], "amount": 10_000 + i, "updated_at": at} for i in range(300)]
    rows += [{**row, "amount": row["id"], "updated_at": at + timedelta(hours=n)} for n in (1, 2) for row in rows[:40]]
    rows = [{**row, "amount": row["amount"] + n * 1000} for n, row in enumerate(rows)]
    write("landing/a.csv", rows)
    found = answer("landing")
    assert found["result"]["proposed"]["key"] == ["id"]
    assert any("80 rows of 380 repeat id within one file" in w for w in found["warnings"])
    assert len(table_rows()) == 300


def test_rows_that_repeat_a_name_without_a_newer_order_are_no_updates() -> None:
    at = datetime(2020, 2, 1)
    rows = [{"id": i // 2, "day": NIGHTS[0], "amount": i // 2 % 5, "updated_at": at} for i in range(300)]
    write("zone/a.csv", [{**row, "note": i / 7} for i, row in enumerate(rows)])
    assert answer("zone")["result"]["proposed"]["key"] is None


def test_readings_of_a_sensor_are_no_updates() -> None:
    """As a key, the sensor would leave one reading of a hundred."""
    rows = [
        {"sensor_id": i % 10, "day": NIGHTS[0], "updated_at": datetime(2020, 2, 1) + timedelta(minutes=i), "v": 0.5}
        for i in range(1000)
    ]
    write("zone/a.csv", rows)
    found = answer("zone")
    assert found["result"]["proposed"]["key"] != ["sensor_id"]


# ---------------------------------------------------------------- keys, and what is unique by accident

CHANCE = random.Random(5)
AMOUNTS = [n * 7919 % 1_000_003 * n for n in range(1, 2000)]
"""All different, of one to ten digits."""


def day(n: int) -> str:
    return f"{date(2024, 1, 1) + timedelta(days=n)}"


def clock(n: int, minutes: int = 60) -> str:
    return f"{datetime(2024, 1, 1) + timedelta(minutes=minutes * n)}"


def event(n: int) -> str:
    """Moments without a rhythm, all different."""
    return f"{datetime(2024, 1, 1) + timedelta(minutes=n, seconds=n * n % 59)}"


KEYS: dict[str, tuple[str, list[str], list[str] | None, list[str]]] = {
    "receipts": (
        "receipt_id,line_no,date,amount", [f"{i // 3},{i % 3},{day(i // 30)},{AMOUNTS[i]}" for i in range(300)],
        ["receipt_id", "line_no"], ["date"],
    ),
    "stock by shop, with an amount": (
        "date,stock,shop,sku", [f"{day(i // 50)},{AMOUNTS[i]},{i % 5},K{i // 5 % 10}" for i in range(500)],
        ["sku", "shop"], ["date"],
    ),
    "id at the end": (
        "name,balance,signup_date,user_id", [f"n{i % 9},{AMOUNTS[i]},{day(i // 9)},{i}" for i in range(200)],
        ["user_id"], ["signup_date"],
    ),
    "a customer once": (
        "customer_id,date,order_id",
        [f"{i * 77 % 200},{day(i // 9)},{i}" for i in range(200)],
        ["order_id"],
        ["date"],
    ),
    "only an amount": (
        "date,customer,amount", [f"{day(i // 20)},c{i % 7},{AMOUNTS[i]}" for i in range(400)],
        None, ["date"],
    ),
    "countries by year": (
        "country,year,pop", [f"c{i % 9},{1950 + i // 9},{AMOUNTS[i]}" for i in range(180)],
        ["country", "year"], [],
    ),
    "days": (
        "Date,Open,Close,Volume", [f"{day(i)},{i / 7},{i / 9},{AMOUNTS[i]}" for i in range(400)],
        ["Date"], ["year(Date)"],
    ),
    "days of one symbol": (
        "symbol,day,close", [f"IBM,{day(i * 7 // 5)},{AMOUNTS[i]}" for i in range(400)],
        ["symbol", "day"], ["year(day)"],
    ),
    "days with a number": (
        "order_id,day,total", [f"{i},{day(i)},{AMOUNTS[i]}" for i in range(100)],
        ["order_id"], ["day"],
    ),
    "readings": (
        "sensor,ts,celsius", [f"s{i % 5},{clock(i // 5)},{i / 7}" for i in range(1000)],
        ["sensor", "ts"], ["date(ts) as day"],
    ),
    "a meter": (
        "timestamp,kwh", [f"{clock(i, 15)},{i / 7}" for i in range(900)],
        ["timestamp"], ["date(timestamp) as day"],
    ),
    "log lines": (
        "time,level,message", [f"{event(i)},l{i % 3},m{i % 40}" for i in range(500)],
        None, ["date(time) as day"],
    ),
    "events": (
        "ts,event,user,uuid", [f"{event(i)},e{i % 3},{i % 40},{CHANCE.getrandbits(64):x}" for i in range(500)],
        ["uuid"], ["date(ts) as day"],
    ),
    "users": (
        "name,email,created_at", [f"n{i},n{i}@x.org,{event(i * 60)}" for i in range(300)],
        ["email"], ["date(created_at) as day"],
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KEYS)
def test_key_is_what_tells_things_apart(name: str) -> None:
    header, rows, key, partition_by = KEYS[name]
    lines("landing/a.csv", header, *rows)
    result = answer("landing")["result"]
    assert (result["proposed"]["key"], result["proposed"]["partition_by"]) == (key, partition_by)
    if key is not None:
        assert len(table_rows()) == len(rows)


def test_series_in_files_that_nothing_tells_apart_has_no_key() -> None:
    for name in ("AAPL", "MSFT"):
        lines(f"zone/{name}.csv", "date,close", *(f"{day(i)},{i / len(name) + ord(name[0])}" for i in range(100)))
    found = answer("zone")
    assert found["result"]["proposed"]["key"] is None
    assert any("no column says what a file is about" in w for w in found["warnings"])


def test_series_that_comes_in_parts_and_again_is_one() -> None:
    lines("landing/1.csv", "date,close", *(f"{day(i)},{i}" for i in range(100)))
    lines("landing/2.csv", "date,close", *(f"{day(i)},{i + (i == 95)}" for i in range(90, 140)))
    assert answer("landing")["result"]["proposed"]["key"] == ["date"]
    assert len(table_rows()) == 140


def test_columns_whose_names_differ_by_case_are_one() -> None:
    lines("landing/1.csv", "id,day,price", *(f"a{i},2020-01-{1 + i % 28:02d},{i}" for i in range(200)))
    lines("landing/2.csv", "ID,Day,price", *(f"b{i},2020-02-{1 + i % 28:02d},{i or '?'}" for i in range(50)))
    lines("landing/3.csv", "id,DAY,PRICE", *(f"c{i},2020-03-{1 + i % 28:02d},{i}" for i in range(50)))
    found = answer("landing")["result"]
    assert [column["name"] for column in found["columns"]] == ["id", "day", "price"]
    assert (found["proposed"]["key"], found["proposed"]["partition_by"]) == (["id"], ["day"])
    assert (found["proposed"]["read"], found["proposed"]["schema"]) == ({"null": "?"}, {})
    assert len(table_rows()) == 300


def test_dates_of_typed_files_add_no_format() -> None:
    lines("landing/1.csv", "id,day", *(f"a{i},{1 + i % 28:02d}.01.2020" for i in range(200)))
    write("landing/2.parquet", [{"id": f"b{i}", "day": datetime(2020, 1, 1 + i % 28)} for i in range(200)])
    found = proposed("landing")
    assert found["read"] == {"dates": {"day": "%d.%m.%Y"}}


@pytest.mark.parametrize("endings", [[".csv"], [".jsonl"], [".parquet"], [".csv", ".parquet"]])
def test_types_of_the_proposal_are_those_of_the_table(endings: list[str]) -> None:
    """A key of a text file stays text, so that 0042 stays 0042, also if other files have numbers."""
    for start, ending in enumerate(endings):
        rows = [order(i, 1, NIGHTS[i % 3], datetime(2020, 2, 1), i) for i in range(start * 200, start * 200 + 200)]
        write(f"landing/a{ending}", rows)
    found = {column["name"]: column["type"] for column in answer("landing")["result"]["columns"]}
    assert found["order_id"] == ("int64" if endings == [".parquet"] else "string")
    table_rows()
    with Table.open("lakeupsert.toml") as table:
        assert {field.name: str(field.type) for field in table.schema} == found


# ---------------------------------------------------------------- what is left open


def test_no_unique_key_is_left_open_with_the_closest() -> None:
    rows = [order(i // 4, i % 2, NIGHTS[0], datetime(2020, 2, 1), i % 3) for i in range(400)]
    write("zone/a.csv", [{**row, "note": i / 7} for i, row in enumerate(rows)])  # no two rows are the same throughout
    found = answer("zone")
    assert found["ok"] is True
    assert found["result"]["proposed"]["key"] is None
    assert found["result"]["next"].startswith("set key in it, then `lakeupsert run`")
    (warning,) = [w for w in found["warnings"] if w.startswith("key")]
    assert "no combination of columns is unique within one file and one transaction_date (400 rows compared)" in warning
    assert "order_id + amount 75.0%" in warning  # of four lines of an order two have one amount
    assert "# key = []" in Path("lakeupsert.toml").read_text()
    with pytest.raises(ConfigurationError, match="lacks key"):
        load("lakeupsert.toml")


def test_thin_evidence_is_told() -> None:
    write("zone/a.csv", [order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i) for i in range(3)])
    found = answer("zone")
    assert found["result"]["proposed"]["key"] == ["order_id"]
    assert any("thin evidence: only 3 rows" in w for w in found["warnings"])


def test_rows_that_lie_alone_prove_no_key() -> None:
    write("zone/a.csv", [order(i, 1, NIGHTS[i], datetime(2020, 2, 1), i) for i in range(3)])
    found = answer("zone")
    assert found["result"]["proposed"]["key"] is None
    assert any(
        "key is left open: no two rows" in w and "order_id, line_no may be in it" in w for w in found["warnings"]
    )


def test_table_without_dates_is_one_partition() -> None:
    rows = [
        {"id": i, "region": "north" if i % 2 else "south", "updated_at": datetime(2020, 2, 1, 3)} for i in range(300)
    ]
    write("zone/a.parquet", rows)
    found = answer("zone")
    assert found["result"]["proposed"]["partition_by"] == []
    assert found["result"]["proposed"]["key"] == ["id"]
    assert not found["warnings"]
    assert "partition; columns of few values: region" in Path("lakeupsert.toml").read_text()
    assert len(table_rows()) == 300


def test_day_of_a_change_is_no_partition() -> None:
    """A changed row would go to another partition, beside the old one."""
    write("zone/a.parquet", [{"id": i, "updated_date": NIGHTS[i % 3]} for i in range(300)])
    found = answer("zone")
    assert found["result"]["proposed"]["partition_by"] is None
    assert any("only updated_date" in w for w in found["warnings"])


def test_without_an_ordering_column_rows_are_stamped() -> None:
    rows = [{"id": i, "day": NIGHTS[i % 3], "value": i} for i in range(300)]
    write("landing/1.csv", rows)
    found = answer("landing")
    assert found["result"]["proposed"]["order_by"] == ["record_timestamp"]
    assert any("stamped on receipt" in w and "arrives later wins" in w for w in found["warnings"])
    assert len(table_rows()) == 300


def test_time_that_all_versions_share_does_not_order_them() -> None:
    """A column of the default's name that can't tell versions apart is not taken in silence."""
    at = datetime(2020, 2, 1)
    for n in range(2):
        write(f"landing/{n}.csv", [order(i, 1, NIGHTS[0], at, i + n) for i in range(200)])
    result = call("landing")
    assert re.search(r"of 200 rows .*, 100% have an equal value", result.stdout)
    assert "stamped on receipt" in result.stderr
    assert load("lakeupsert.toml").tables["landing"].order_by == ("received_at",)


def test_file_that_came_twice_says_nothing_about_the_order() -> None:
    for name in ("a", "b"):
        write(f"zone/{name}.csv", [order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i) for i in range(200)])
    found = answer("zone")
    assert found["result"]["proposed"]["order_by"] == ["record_timestamp"]
    assert found["warnings"] == []


def test_days_that_may_be_months_are_told() -> None:
    """The likelier reading is proposed: nights that follow each other."""
    for day in (1, 2, 3):
        rows = [order(100 * day + i, 1, NIGHTS[0], datetime(2020, 2, 1), i) for i in range(99)]
        write(f"english/{day:02d}/01/2020/a.csv", rows)
        write(f"american/01/{day:02d}/2020/a.csv", rows)
    for zone, first, other in (("english", "%d/%m/%Y", "%m/%d/%Y"), ("american", "%m/%d/%Y", "%d/%m/%Y")):
        found = answer(zone, "--dry-run")
        assert found["result"]["proposed"]["landing_dates"] == first
        (warning,) = found["warnings"]
        assert f"may be {first} or {other}" in warning


def test_pattern_that_misses_files_is_not_set() -> None:
    """Files outside would never be taken."""
    land("zone", "%Y-%m-%d", ".csv", nights())
    write("zone/late/a.csv", nights(5)[0])
    found = answer("zone")
    assert found["result"]["proposed"]["landing_dates"] is None
    assert any("%Y-%m-%d fits 5 of 6 files" in w for w in found["warnings"])


# ---------------------------------------------------------------- Hive-partitioned folders


def hive(folder: str, name: str = "transaction_date") -> None:
    for day, rows in zip(NIGHTS, nights(), strict=True):
        own = [
            {n: v for n, v in row.items() if n != "transaction_date"} for row in rows if row["transaction_date"] == day
        ]
        write(f"{folder}/{name}={day}/part-00000.parquet", own)
    (Path(folder) / "_SUCCESS").touch()


def test_hive_folder_is_proposed_for_adoption(here: Path) -> None:
    hive("lake/sales")
    found = answer("lake/sales")
    proposed = found["result"]["proposed"]
    assert found["result"]["next"] == "`lakeupsert adopt lake/sales`"
    assert proposed["processed"] == str(here / "lake/sales")
    assert proposed["landing"] == str(here / "lake/sales-landing")
    assert (proposed["partition_by"], proposed["key"]) == (["transaction_date"], ["order_id", "line_no"])
    assert proposed["order_by"] == ["record_timestamp"]
    text = Path("lakeupsert.toml").read_text()
    assert "5 partitions of date32[day] from 2020-01-28 to 2020-02-01 (5 days)" in text
    assert 'landing = "lake/sales-landing"  # a guess: correct it' in text
    (settings,) = load("lakeupsert.toml").tables.values()
    assert settings.processed == str(here / "lake/sales")


def test_folders_of_days_of_arrival_are_a_landing_zone(here: Path) -> None:
    land("lake/raw", "dt=%Y-%m-%d", ".parquet", nights())
    assert answer("lake/raw")["result"]["proposed"]["landing"] == str(here / "lake/raw")


def test_dt_folders_of_rows_without_a_date_are_a_table(here: Path) -> None:
    hive("lake/sales", name="dt")
    proposed = answer("lake/sales")["result"]["proposed"]
    assert (proposed["processed"], proposed["partition_by"]) == (str(here / "lake/sales"), ["dt"])


# ---------------------------------------------------------------- what is refused, what is passed over


def test_no_files_are_a_clear_error() -> None:
    Path("zone/_temporary").mkdir(parents=True)
    Path("zone/_temporary/a.csv").write_text("a\n1\n")
    error = answer("zone", code=2)["error"]
    assert error["code"] == "no-files"
    assert "zone" in error["message"]
    assert not Path("lakeupsert.toml").exists()
    assert answer("nowhere", code=2)["error"]["code"] == "no-landing"


def test_existing_configuration_is_never_overwritten() -> None:
    land("landing/sales", "%Y-%m-%d", ".csv", nights())
    Path("lakeupsert.toml").write_text("# mine\n")
    error = answer("landing/sales", code=2)["error"]
    assert error["code"] == "configuration-exists"
    assert "--config" in error["next"]
    assert Path("lakeupsert.toml").read_text() == "# mine\n"
    assert answer("landing/sales", "--config", "other.toml")["result"]["written"].endswith("other.toml")
    assert list(load("other.toml").tables) == ["sales"]
    answer("landing/sales", "--config", "third.toml", "--table", "revenue")
    assert list(load("third.toml").tables) == ["revenue"]


def test_processed_zone_that_is_taken_is_told() -> None:
    land("landing/sales", "%Y-%m-%d", ".csv", nights())
    write("processed/sales/other.csv", nights()[0])
    (warning,) = answer("landing/sales")["warnings"]
    assert "processed/sales" in warning


def test_dry_run_prints_the_file_that_would_be_written() -> None:
    land("landing/sales", "%Y-%m-%d", ".csv", nights())
    result = call("landing/sales", "--dry-run")
    assert result.exit_code == 0
    assert not Path("lakeupsert.toml").exists()
    call("landing/sales")
    assert Path("lakeupsert.toml").read_text() == result.stdout
    assert call("landing/sales", "--dry-run").stdout == result.stdout
    assert answer("landing/sales", "--dry-run")["result"]["written"] is None


def test_configuration_is_not_written_among_the_data() -> None:
    write("a.csv", [order(1, 1, NIGHTS[0], datetime(2020, 2, 1), 1)])
    assert answer(".", code=2)["error"]["code"] == "configuration-in-landing"


def test_table_of_ours_is_recognised() -> None:
    land("landing/sales", "%Y-%m-%d", ".csv", nights())
    answer("landing/sales")
    table_rows()
    error = answer("processed/sales", "--config", "other.toml", code=2)["error"]
    assert error["code"] == "already-a-table"


def test_nested_columns_and_unreadable_files_do_not_end_it() -> None:
    rows = [order(i, 1, NIGHTS[0], datetime(2020, 2, 1), i, tags=["a", "b"], place={"x": i}) for i in range(200)]
    write("zone/a.parquet", rows)
    write("zone/b.jsonl", [{**row, "order_id": row["order_id"] + 500} for row in rows])
    Path("zone/broken.parquet").write_bytes(b"PAR1 this is no Parquet")
    Path("zone/notes.txt").write_text("remember the milk")
    Path("zone/empty.csv").write_text("")
    found = answer("zone")
    assert found["result"]["proposed"]["key"] == ["order_id"]
    assert [w.split()[0] for w in found["warnings"]] == ["'broken.parquet'", "'notes.txt'"]
    (tags,) = [c for c in found["result"]["columns"] if c["name"] == "tags"]
    assert (tags["distinct"], tags["low"]) == (1, None)


def test_only_unreadable_files_are_an_error() -> None:
    Path("zone").mkdir()
    Path("zone/broken.parquet").write_bytes(b"PAR1 this is no Parquet")
    error = answer("zone", code=1)["error"]
    assert error["code"] == "no-readable-file"
    assert "broken.parquet" in error["message"]


def test_names_and_values_can_not_break_the_file() -> None:
    """Whatever stands in the data, the written file is TOML."""
    rows = [{'o"id': i, "transaction_date": NIGHTS[0], "a\nb = 1": f"x\x00\n[tables.evil] {i % 2}"} for i in range(200)]
    write("land ing.ü/a.parquet", rows)
    found = answer("land ing.ü")
    document = tomllib.loads(Path("lakeupsert.toml").read_text())
    assert list(document["tables"]) == [found["table"]] == ["land_ing__"]
    assert document["tables"]["land_ing__"]["key"] == ['o"id']


def test_evidence_is_told_to_people() -> None:
    land("landing/sales", "%Y-%m-%d", ".csv", nights())
    lines = call("landing/sales").stdout.splitlines()
    assert lines[0].split() == ["column", "type", "nulls", "distinct", "low", "high"]
    assert "  sampled      5 of 5 files" in "\n".join(lines)
    assert any(line.split() == ["key", "order_id,", "line_no"] for line in lines)
    assert any("order_id + line_no: unique within one file and one transaction_date" in line for line in lines)
    assert lines[-1].split() == ["next", "`lakeupsert", "run`"]
