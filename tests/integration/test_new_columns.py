"""Columns that landing files bring: with which rows they come."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from tests.harness.proof import assert_proved

GOOD = "id,day,version,price\na,2020-01-01,1,1.5\nb,2020-01-01,1,2.5\n"
WRONG_DELIMITER = "id;day;version;price;colour\nc;2020-01-01;1;3.5;red\n"
OWN = ["id", "day", "version", "price"]


class Lake:
    """One table with the key `id`, the partition column `day` and the ordering column `version`."""

    def __init__(self, root: Path, more: str = "", **settings: Any) -> None:
        self.root = root
        (root / "landing").mkdir(parents=True)
        given = {"key": ["id"], "partition_by": ["day"], "order_by": ["version"], "quarantine_limit": 100, **settings}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
        self.config = root / "lakeupsert.toml"
        self.config.write_text('[tables.t]\nlanding = "landing"\nprocessed = "processed"\n' + "".join(lines) + more)
        self.table = Table.open(self.config)

    def land(self, name: str, content: Any) -> None:
        path = self.root / "landing" / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_text(content, encoding="utf-8")

    def night(self, host: Any = "local", **files: Any) -> Any:
        """Landing files, whose names have `_` for the point, and the run that takes them."""
        for name, content in files.items():
            self.land(name.replace("_", "."), content)
        done = self.table.run(host=host)
        assert done.append is not None
        return done

    def columns(self, **options: Any) -> list[str]:
        names: list[str] = self.table.to_arrow(**options).schema.names
        return names

    def rows(self, *columns: str, **options: Any) -> list[Any]:
        """Of one column its values, of several tuples."""
        found = self.table.to_arrow(**options).read_all().select(columns).to_pylist()
        return [tuple(row.values()) if len(columns) > 1 else row[columns[0]] for row in found]

    def prove(self) -> None:
        """DuckDB finds the same rows in what landed, and so does who makes them anew of it."""
        assert_proved(self.table)
        before = self.table.to_arrow().read_all()
        assert not self.table.reprocess(source="landing", host="local").left
        assert self.table.to_arrow().read_all().equals(before)


# ---------------------------------------------------------------- columns come with accepted rows


FRUITLESS = {
    "csv": "id,day,version,price,colour\nc,no date,1,3.5,red\n,2020-01-01,1,3.5,red\n",
    "jsonl": '{"id": "c", "day": "no date", "version": 1, "colour": "red", "at": {"x": 1}}\n',
    "parquet": pa.table({"id": ["c"], "day": ["no date"], "version": [1], "colour": ["red"], "tags": [[1]]}),
}
"""Files of which every row is refused, and that have columns which the table has not."""


@pytest.mark.parametrize("kind", FRUITLESS)
@pytest.mark.parametrize("ties", ["arrival", "content"])
def test_file_without_an_accepted_row_brings_no_column(kind: str, ties: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path, ties=ties, more='[tables.t.schema]\nday = "date"\n')
    lake.night(a_csv=GOOD)
    fruitless = FRUITLESS[kind]
    if ties == "content" and isinstance(fruitless, pa.Table):
        fruitless = fruitless.drop_columns(["tags"])  # no such table has nested columns: the file would be set aside
    if ties == "content" and kind == "jsonl":
        fruitless = FRUITLESS["jsonl"].replace(', "at": {"x": 1}', "")
    lake.land(f"b.{kind}", fruitless)
    entry = lake.night(c_csv=WRONG_DELIMITER, d_csv="id,day,version,price,size\nd,2020-01-01,1,4.5,7\n").append.entry
    assert (entry.rows_appended, entry.rows_quarantined) == (1, 3 if kind == "csv" else 2)
    assert lake.columns() == [*OWN, "size"]
    assert lake.rows("id", "size") == [("a", None), ("b", None), ("d", 7)]
    entry = lake.night(e_csv=WRONG_DELIMITER + "d;2020-01-01;1;3.5;red\n").append.entry
    assert (entry.rows_appended, lake.columns()) == (0, [*OWN, "size"])
    lake.prove()


@pytest.mark.few(1)
@pytest.mark.parametrize("host", ["local", "spark"])
def test_hosts_agree_on_the_columns_that_come(host: str, tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\nday = "date"\n')
    lake.land("b.parquet", FRUITLESS["parquet"])
    lake.night(host, a_csv=GOOD, c_csv=WRONG_DELIMITER)
    assert lake.columns() == OWN
    lake.land("f.parquet", FRUITLESS["parquet"])
    lake.land("g.jsonl", FRUITLESS["jsonl"])
    done = lake.night(host, d_csv=WRONG_DELIMITER, e_csv="id,day,version,shape,nothing\na,2020-01-01,2,round,\n")
    assert done.append.entry.quarantined == {"bad_partition": 2, "missing_column": 1}
    assert lake.columns() == [*OWN, "shape"], "a column without any value waits"


def test_first_batch_has_the_columns_and_types_of_its_accepted_rows(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("b.jsonl", '{"id": null, "day": "2020-01-01", "version": "first", "price": "cheap"}\n')
    lake.night(a_csv=GOOD, c_csv=WRONG_DELIMITER, d_csv="id,day,version,price\n,2020-01-01,one,dear\n")
    assert lake.columns() == OWN
    assert lake.table.to_arrow().schema.field("price").type == pa.float64()
    assert lake.table.to_arrow().schema.field("version").type == pa.int64()
    lake.prove()


def test_column_of_json_lines_comes_with_an_accepted_row_wherever_that_is(tmp_path: Path, small: None) -> None:
    lake = Lake(tmp_path)
    lake.night(a_csv=GOOD)
    refused = '{"id": null, "day": "2020-01-01", "version": 1, "colour": "red"}\n'
    taken = '{"id": "c", "day": "2020-01-01", "version": 1, "price": 1.5}\n'
    lake.night(b_jsonl=refused * 9)
    assert lake.columns() == OWN
    lake.night(c_jsonl=refused.replace("colour", "shape") * 9 + taken.replace("price", "colour"))
    assert lake.columns() == [*OWN, "colour"]
    lake.night(d_jsonl=taken.replace("price", "shape") + refused * 9)
    assert lake.columns() == [*OWN, "colour", "shape"]
    lake.prove()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few lines."""
    from lakeupsert.landing.formats import blocks

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 400)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_replayed_rows_bring_their_columns(kind: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\nprice = "tinyint"\n')
    lake.night(a_csv="id,day,version,price\na,2020-01-01,1,1\n")
    row = {"id": "b", "day": "2020-01-01", "version": 1, "price": 1000, "size": 7, "colour": "red"}
    texts = {
        "csv": ",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n",
        "jsonl": json.dumps({**row, "who": {"name": "Ann"}}) + "\n",
        "parquet": pa.Table.from_pylist([{**row, "price": "1000", "size": 7.5, "tags": [1, 2]}]),
    }
    lake.night(**{f"b_{kind}": texts[kind]})
    assert lake.columns() == OWN
    lake.config.write_text(lake.config.read_text().replace("tinyint", "int"))
    lake.table = Table.open(lake.config)
    assert lake.table.append(host="local", replay_quarantine=True) is not None
    lake.table.run(host="local")
    more = {"csv": [], "jsonl": ["who"], "parquet": ["tags"]}[kind]
    assert lake.columns() == [*OWN, "size", "colour", *more]
    values = {"csv": (7, "red"), "jsonl": (7, "red", {"name": "Ann"}), "parquet": (7.5, "red", [1, 2])}[kind]
    assert lake.rows("id", "price", "size", "colour", *more) == [
        ("a", 1, *[None] * len(values)),
        ("b", 1000, *values),
    ]
    before = lake.table.to_arrow().read_all()
    assert not lake.table.reprocess(source="landing", host="local").left
    assert lake.table.to_arrow().read_all().equals(before)


@pytest.mark.parametrize(
    ("ties", "impossible"), [("arrival", {"_lakeupsert_x": 1}), ("content", {"s": {"a": 1}}), ("content", {"s": [1]})]
)
def test_rows_with_a_column_that_the_table_can_not_have_stay_quarantined(
    ties: str, impossible: dict[str, Any], tmp_path: Path
) -> None:
    """And stop no other row, also of the same batch; their other columns do not come."""
    lake = Lake(tmp_path, ties=ties, more='[tables.t.schema]\nprice = "tinyint"\n')
    lake.night(a_csv="id,day,version,price\na,2020-01-01,1,1\n")
    row = {"id": "b", "day": "2020-01-01", "version": 1, "price": 1000}
    lake.night(
        b_jsonl=json.dumps({**row, **impossible, "shape": 1}) + "\n",
        c_jsonl=json.dumps({**row, "id": "c", "size": 7}) + "\n",
        d_csv="id,day,version,price\nd,2020-01-01,1,1000\n",
    )
    lake.config.write_text(lake.config.read_text().replace("tinyint", "int"))
    lake.table = Table.open(lake.config)
    done = lake.table.append(host="local", replay_quarantine=True)
    assert done is not None
    assert told(done.warnings, "'b.jsonl'", "quarantine")
    assert (done.entry.rows_appended, done.entry.quarantined) == (2, {"bad_type": 1})
    lake.table.run(host="local")
    assert lake.table.status().quarantined == 1
    assert lake.columns() == [*OWN, "size"]
    assert lake.rows("id", "price", "size") == [("a", 1, None), ("c", 1000, 7), ("d", 1000, None)]
    assert lake.table.append(host="local", replay_quarantine=True) is None
    before = lake.table.to_arrow().read_all()
    assert not lake.table.reprocess(source="landing", host="local").left
    assert lake.table.to_arrow().read_all().equals(before)


# ---------------------------------------------------------------- columns that a few values make text


def feed(kind: str, values: list[Any], first: int = 0, name: str = "price") -> str:
    rows = [{"id": f"k{first + i}", "day": "2020-01-01", "version": 1, name: v} for i, v in enumerate(values)]
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows), ""])


ALMOST = {
    "integer": ([*range(700), "three", *range(99)], "three", 700, "bigint"),
    "number": (["oops", *(n / 4 for n in range(800))], "oops", 0, "double"),
    "date": ([*["2020-02-28"] * 800, "2020-02-30"], "2020-02-30", 800, "date"),
    "flag": ([True, False] * 300 + ["maybe"] + [True] * 300, "maybe", 600, "boolean"),
}


def told(warnings: Any, *texts: str) -> list[str]:
    return [w for w in warnings if all(text in w for text in texts)]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("what", ALMOST)
def test_value_that_makes_a_column_text_is_told_before_and_after(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `init`, `plan` and `run`, on the first night and where a later batch brings the column; also in JSON."""
    monkeypatch.chdir(tmp_path)
    values, bad, place, type_ = ALMOST[what]
    texts = "'price'", repr(bad), f"a.{kind}", f"line {place + (2 if kind == 'csv' else 1)}", f'price = "{type_}"'
    figures = f"1 of {len(values)} values"
    lake = Lake(tmp_path)
    lake.land(f"a.{kind}", feed(kind, values))

    def warnings(*command: str) -> list[str]:
        answer = CliRunner().invoke(main, [*command, "--json"])
        name, _, type_name = texts[-1].partition(" = ")
        cure = {
            "init": "",
            "run": f"schema retype {name} {type_name.strip(chr(34))}`",
        }  # `init` writes the setting itself
        asked = (*texts[:-1], cure.get(command[0], texts[-1]))
        found: list[str] = told(json.loads(answer.stdout)["warnings"], *asked, figures)
        people = CliRunner().invoke(main, command)
        assert bool(found) == (bad in people.stderr and figures in people.stderr) or command[0] == "run"
        return found

    assert len(warnings("init", "landing", "--config", "other.toml", "--dry-run")) == 1
    assert len(warnings("plan")) == 1
    assert len(warnings("run", "--host", "local")) == 1
    lake.land(f"b.{kind}", feed(kind, values, 1000))
    assert not warnings("plan"), "the column is text by now"
    assert not warnings("run", "--host", "local")
    texts = tuple(text.replace("price", "cost").replace("a.", "c.") for text in texts)
    lake.land(f"c.{kind}", feed(kind, values, 2000, "cost"))
    assert len(warnings("plan")) == 1
    assert len(warnings("run", "--host", "local")) == 1


def test_type_that_is_given_keeps_the_column_and_refuses_the_row(tmp_path: Path) -> None:
    lake = Lake(tmp_path, more='[tables.t.schema]\nprice = "double"\n')
    done = lake.night(a_csv=feed("csv", ALMOST["number"][0])).append
    assert (done.warnings, done.entry.quarantined) == ((), {"bad_type": 1})


def test_values_of_all_blocks_and_files_are_counted(tmp_path: Path, small: None) -> None:
    lake = Lake(tmp_path)
    files = {
        "a_csv": feed("csv", list(range(50))),
        "b_csv": feed("csv", ["", "n/a"], 100),
        "c_csv.gz": feed("csv", [*range(50), "?", *range(9)], 200),
    }
    zipped = lake.root / "landing" / "c.csv.gz"
    zipped.write_bytes(gzip.compress(files.pop("c_csv.gz").encode()))
    done = lake.night(**files).append
    assert told(done.warnings, "'price'", "2 of 111 values", "'n/a' in 'b.csv' line 3", "retype price bigint")


@pytest.mark.parametrize(
    "content",
    [
        feed("csv", ["ann", "bob", "7", "8"] * 9),  # text
        feed("csv", ["1", "x", "2", "y", "3"]),  # too many to be mistakes
        feed("csv", ["1", "x"]),
        feed("csv", [1, 2.5, 3]),
        feed("jsonl", ["1", "2", "3"]),  # text of JSON is text
        feed("jsonl", [[1], [2], [3], "x"]),
        feed("csv", list(range(30)), name="id2").replace("k7,", "seven,"),  # keys are text anyway
    ],
)
def test_columns_that_are_text_are_not_told(content: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    name = "a_jsonl" if content.startswith("{") else "a_csv"
    assert not told(lake.night(**{name: content}).append.warnings, "is text:")


CODES = {
    "zeros": ["02134"] * 3 + ["10234"] * 40,
    "long": [str(10**18 - 21 + n) for n in range(22)],
    "beyond": [*range(40), str(10**25)],
    "decimals": [*(n + 0.5 for n in range(40)), "007.5"],
    "both": [*range(40), "007", "oops"],
    "nan": [*(n + 0.5 for n in range(40)), "nan"],  # double has it: no row would go to quarantine
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("what", "files"), [(what, files) for what in CODES for files in (1, 2) if (what, files) != ("nan", 2)]
)
def test_codes_are_text_on_purpose(
    what: str, files: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numbers they would lose their zeros or digits, without a row in quarantine: nobody may be told to make them numbers."""
    monkeypatch.chdir(tmp_path)
    lake = Lake(tmp_path)
    values = sorted(CODES[what], key=lambda v: isinstance(v, str))  # two files: of numbers, and of codes
    at = next(i for i, v in enumerate(values) if isinstance(v, str)) if files == 2 else 0
    for name, some, first in (("a", values[at:], at), ("b", values[:at], 0)):
        if some:
            lake.land(f"{name}.{kind}", feed(kind, some, first))
    for command in (["init", "landing", "--config", "o.toml", "--dry-run"], ["plan"], ["run", "--host", "local"]):
        answer = CliRunner().invoke(main, [*command, "--json"])
        assert not told(json.loads(answer.stdout)["warnings"], "'price'")


def test_landing_files_are_read_once_to_tell_where_a_value_is(tmp_path: Path) -> None:
    """Also where the columns are planned a second time, because every row of another file is refused."""

    def gets(root: Path, value: str) -> int:
        lake = Lake(root, more='[tables.t.schema]\nday = "date"\n')
        lake.night(a_csv="id,day,version,price\na,2020-01-01,1,1\n")
        before = lake.table.objects.landing.requests.as_dict()["get"]
        done = lake.night(b_csv=feed("csv", [1, 2, value], 10, "size"), c_csv="id,day,version,price\nc,no date,1,1\n")
        assert len(told(done.append.warnings, "'size' is text")) == (value == "oops")
        return lake.table.objects.landing.requests.as_dict()["get"] - before

    assert gets(tmp_path / "told", "oops") == gets(tmp_path / "plain", "3") + 1


def test_codes_hide_no_mistake_in_a_date(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    done = lake.night(a_csv=feed("csv", [*["2020-02-28"] * 20, "0007"]))
    assert told(done.append.warnings, "'price'", "1 of 21 values", "'0007'", "retype price date")


@pytest.mark.spark
def test_spark_tells_it_too(tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.engine.hosts.SURVEYED_HERE", 0)
    lake = Lake(tmp_path)
    done = lake.night("spark", a_csv=feed("csv", ALMOST["integer"][0]), b_jsonl=feed("jsonl", [1, 2, "x"], 1000)).append
    assert told(done.warnings, "'three' in 'a.csv' line 702", f"2 of {len(ALMOST['integer'][0]) + 3}")
