"""`head` and `query`: the rows that they show, what they read, and what a query can't do."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.cli.rows import CELL, rows_text
from lakeupsert.errors import ConfigurationError, DamagedTableError
from tests.harness.lake import Lake, row


def begun(root: Path, **settings: Any) -> Lake:
    """Three days of two keys, updated in the second night."""
    lake = Lake(root, **settings)
    lake.land("1.jsonl", [row(k, day, 1, day) for day in range(3) for k in "ab"])
    lake.run()
    lake.land("2.jsonl", [row("a", day, 2, 10 + day) for day in range(3)])
    lake.run()
    return lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return begun(tmp_path)


def invoke(lake: Lake, *args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, [*args, "--config", str(lake.configure())])
    assert result.exit_code == code, result.output
    return result.stdout


def answer(lake: Lake, *args: str, code: int = 0) -> Any:
    return json.loads(invoke(lake, *args, "--json", code=code))


# ---------------------------------------------------------------- head


def test_head_shows_the_first_rows_by_partition_and_key(lake: Lake) -> None:
    everything = lake.table.to_arrow().read_all()
    for rows in (1, 2, 3, 6, 100):
        assert lake.table.head(rows).equals(everything.slice(0, rows))
    assert lake.table.head(0).num_rows == 0
    found = lake.table.head(2, where="v >= 1 and v < 11", columns=["v", "k"], snapshot=1)
    assert found.to_pylist() == [{"v": 10, "k": "a"}, {"v": 1, "k": "b"}]
    assert lake.table.head(1, columns=["v"], snapshot=0).to_pylist() == [{"v": 0}]


def test_head_opens_only_the_files_that_its_rows_are_in(lake: Lake) -> None:
    lake.reopen()
    lake.points.seen.clear()
    lake.table.head(1)
    opened = [call for call in lake.points.seen if call.startswith("open ")]
    assert opened
    assert all("d=2020-01-01/" in call for call in opened)
    assert sum("/partitions/" in call and call.startswith("get") for call in lake.points.seen) < 3


def test_head_command(lake: Lake) -> None:
    found = answer(lake, "head", "2", "--columns", "k, v", "--where", "d = '2020-01-02'")["result"]
    assert found["snapshot"] == 1
    assert found["columns"] == [{"name": "k", "type": "string"}, {"name": "v", "type": "int64"}]
    assert found["rows"] == [{"k": "a", "v": 11}, {"k": "b", "v": 1}]
    lines = invoke(lake, "head", "1").splitlines()
    assert lines[0].split() == ["k", "l", "d", "ts", "v"]
    assert lines[2].split() == ["a", "0", "2020-01-01", "2020-01-01", "00:00:02", "10"]
    assert len(lines) == 3
    assert len(answer(lake, "head")["result"]["rows"]) == 6
    assert len(answer(lake, "head", "--snapshot", "latest")["result"]["rows"]) == 6
    assert invoke(lake, "head", "--where", "v = 99").strip() == "no rows"
    assert answer(lake, "head", "--columns", "k,nix", code=2)["error"]["code"] == "unknown-column"
    assert answer(lake, "head", "0", code=2)["error"]["code"] == "usage"


def test_text_is_one_line_a_row_whatever_is_in_it() -> None:
    rows = pa.table(
        {
            "text": ["two\nlines", None, "é" * 100],
            "number": [1, None, 1000],
            "list": [[1, None], [], None],
            "bytes": pa.array([b"\xff", b"", None]),
            "x": pa.array([float("nan"), -0.5, None]),
        }
    )
    lines = rows_text(rows).splitlines()
    assert len(lines) == 5
    assert lines[2].split()[:2] == [r"two\nlines", "1"]
    assert "[1, null]" in lines[2]
    assert "é" * (CELL - 1) + "…" in lines[4]
    assert lines[3].split()[0] == "null"
    assert lines[2].index("1") == lines[4].index("1000") + 3


def test_text_is_a_block_a_row_if_the_terminal_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    narrow, wide = pa.table({"a": [1], "b": [2]}), pa.table({f"column{i}": [i, i] for i in range(9)})
    assert len(rows_text(narrow).splitlines()) == 3
    lines = rows_text(wide).splitlines()
    assert len(lines) == 2 * 10
    assert lines[1].split() == ["column0", "0"]


# ---------------------------------------------------------------- query


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_query_sees_the_exact_rows_under_the_name_of_the_table(tmp_path: Path, strategy: str) -> None:
    lake = begun(tmp_path, strategy=strategy)
    sql = "select k, sum(v)::bigint as total from t group by k order by k"
    assert lake.table.query(sql).read_all().to_pylist() == [{"k": "a", "total": 33}, {"k": "b", "total": 3}]
    assert lake.table.query(sql, snapshot=0).read_all().to_pylist()[0] == {"k": "a", "total": 3}
    made = "select r.range as n, e.value from range(2) r, json_each('[7]') e, unnest([1]) u where exists (from t) order by 1"
    assert [r["n"] for r in lake.table.query(made).read_all().to_pylist()] == [0, 1]
    assert {r["column_name"] for r in lake.table.query("describe t").read_all().to_pylist()} == {
        "k",
        "l",
        "d",
        "ts",
        "v",
    }
    joined = "with n as (select * from t where v > 9) from n join t using (k, d) select count(*) as rows"
    assert lake.table.query(joined).read_all().to_pylist() == [{"rows": 3}]


def test_query_sees_the_rows_of_latest_and_of_an_adopted_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("part.parquet", [row("a", 0, 1, 1), row("a", 0, 2, 2), row("b", 1, 1, 1)])
    lake.table.adopt()
    assert lake.table.query("select count(*) as n from t").read_all().to_pylist() == [{"n": 3}]
    lake.land("1.jsonl", [row("c", 0, 1, 5)])
    lake.table.append(host="local")
    latest = lake.table.query("select k, v from t order by k", snapshot="latest").read_all().to_pylist()
    assert [tuple(r.values()) for r in latest] == [("a", 2), ("b", 1), ("c", 5)]


FORBIDDEN = [
    "copy (select 1) to '{root}/out.csv'",
    "copy t to '{file}' (format parquet)",
    "create table x as select 1",
    "insert into t select * from t",
    "delete from t",
    "drop view t",
    "set enable_external_access = true",
    "attach '{root}/x.db' as x",
    "install httpfs",
    "explain analyze select 1",
    "pragma database_list",
    "call pragma_version()",
    "select 1; select 2",
    "select 1; copy (select 1) to '{root}/out.csv'",
    "",
    "select * from read_csv('{root}/secret.csv')",
    "select * from '{root}/secret.csv'",
    "select * from read_text('{root}/lakeupsert.toml')",
    "select * from glob('{root}/*')",
    "select * from read_parquet('{file}')",
    "with x as (select 1) select * from x, lateral (select * from main.Enable_Logging(storage = 'file'))",
    "select (select count(*) from query('select 1'))",
    "select * from duckdb_settings()",
    "select * from source",  # a variable of the function that runs the query
    "select nix from t",
    "select * from nix",
    "selec 1",
    "select cast(k as int) from t",
    "select k, k from t",
]


@pytest.fixture(scope="module", params=["rewrite", "delta"])
def still_lake(module_folder: Path, request: pytest.FixtureRequest) -> Lake:
    """A lake that nobody has open, with a file beside it that is not its own."""
    lake = begun(module_folder / request.param, strategy=request.param)
    (lake.root / "secret.csv").write_text("a\n1\n")
    lake.configure()
    lake.table.close()
    return lake


@pytest.mark.few(10)
@pytest.mark.parametrize("sql", FORBIDDEN)
def test_query_can_only_read_the_table(still_lake: Lake, sql: str) -> None:
    root, file = still_lake.root, still_lake.table.files()[0].path
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError) as raised:
        still_lake.table.query(sql.format(root=root, file=file)).read_all()
    assert raised.value.code == "unfit-query"
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_query_that_writes_to_a_file_of_the_table_changes_nothing_even_if_it_were_a_select(lake: Lake) -> None:
    """Reading its own files is allowed to DuckDB's scan, so writing them must be out of reach of every SELECT."""
    import duckdb

    from lakeupsert.read import query as ours

    path = lake.table.files()[0].path
    before = Path(path).read_bytes()
    connection = duckdb.connect()
    ours.lock(connection, [path])
    with pytest.raises(duckdb.Error):
        connection.execute(f"copy (select 1 as a) to '{path}' (format parquet)")
    connection.close()
    assert Path(path).read_bytes() == before


def test_damaged_file_is_the_error_of_the_table_where_arrow_reads(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("part.parquet", [row("a", 0, 1, 1)])
    lake.table.adopt()
    Path(lake.table.files()[0].path).unlink()
    with pytest.raises(DamagedTableError) as raised:
        lake.table.query("select count(*) from t").read_all()
    assert raised.value.code == "damaged-data-file"


def test_query_shows_types_that_arrow_lacks_as_text_and_times_in_utc(lake: Lake) -> None:
    sql = "select interval 2 day as i, '01'::bit as b, timestamptz '2020-01-01 00:00:00+02' as t, date_part('hour', t) as h"
    [found] = answer(lake, "query", sql)["result"]["rows"]
    assert found == {"i": "2 days", "b": "01", "t": "2019-12-31 22:00:00.000000Z", "h": 22}


def test_query_command(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(lake, "query", "select k, v from t where d = '2020-01-01' order by k")["result"]
    assert found["rows"] == [{"k": "a", "v": 10}, {"k": "b", "v": 0}]
    assert (found["snapshot"], found["output"], found["written"]) == (1, None, None)
    lines = invoke(lake, "query", "select count(*) as n from t").splitlines()
    assert lines == ["n", "-", "6", "(1 row)"]
    assert answer(lake, "query", "drop table t", code=2)["error"]["code"] == "unfit-query"
    target = lake.root / "out.parquet"
    found = answer(lake, "query", "select k, v from t order by v", "--output", str(target))["result"]
    assert (found["rows"], found["written"]) == (None, 6)
    assert pq.read_table(target)["v"].to_pylist() == [0, 1, 2, 10, 11, 12]
    assert answer(lake, "query", "select 1 as a", "--output", str(target), code=2)["error"]["code"] == "output-exists"
    inside = str(lake.root / "processed/out.csv")
    assert answer(lake, "query", "select 1 as a", "--output", inside, code=2)["error"]["code"] == "overlapping-zones"
    monkeypatch.setattr("lakeupsert.cli.read.query.MOST_ROWS", 4)
    found = answer(lake, "query", "select * from t")
    assert len(found["result"]["rows"]) == 4
    assert len(found["warnings"]) == 1
    assert answer(lake, "query", "select * from t limit 4")["warnings"] == []


def test_query_of_a_table_whose_name_is_a_word_of_sql(tmp_path: Path) -> None:
    lake = begun(tmp_path)
    config = lake.configure()
    config.write_text(config.read_text().replace("[tables.t]", '[tables."order"]'))
    found = CliRunner().invoke(main, ["query", 'select max(v) as m from "order"', "--json", "--config", str(config)])
    assert json.loads(found.stdout)["result"]["rows"] == [{"m": 12}]
