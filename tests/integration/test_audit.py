"""The setting `audit`: a night in which a query finds a row is held, until it is repaired or let pass."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.config.load import parse
from lakeupsert.config.types import AuditSettings
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline.audit import NOT_ASKED, AuditError
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from tests.harness.lake import Lake, delta_rows, row

GOOD = [row(f"k{n}", n % 3, 1, 10 + n) for n in range(30)]
BAD_NIGHTS: dict[str, tuple[str, list[Any]]] = {
    "a value that can't be": ("SELECT * FROM t WHERE v < 0", [row("k1", 1, 2, -1)]),
    "a value that is missing": ("SELECT * FROM t WHERE v IS NULL", [{**row("k1", 1, 2), "v": None}]),
    "nulls become more": (
        "SELECT n FROM (SELECT avg((v IS NULL)::int) AS n FROM t) WHERE n > 0.1",
        [{**row(f"k{n}", n % 3, 2), "v": None} for n in range(6)],
    ),
    "fewer rows": (
        "SELECT 1 WHERE (SELECT count(*) FROM t) < 0.9 * (SELECT count(*) FROM published)",
        [row(f"k{n}", n % 3, 2, op="D") for n in range(6)],
    ),
    "far more rows": (
        "SELECT 1 FROM (SELECT count(*) AS n FROM published) WHERE n > 0 AND (SELECT count(*) FROM t) > 2 * n",
        [row(f"more{n}", n % 3, 2) for n in range(40)],
    ),
    "a date without rows": (
        "SELECT DISTINCT d FROM published WHERE d NOT IN (SELECT d FROM t)",
        [row(f"k{n}", n % 3, 2, op="D") for n in range(0, 30, 3)],
    ),
    "a date in the future": ("SELECT d FROM t WHERE d > DATE '2020-06-01'", [row("k1", 400, 2)]),
    "a key in two partitions": (
        "SELECT k, l FROM t GROUP BY k, l HAVING count(*) > 1",
        [row("k1", 2, 2)],
    ),
    "an unknown word": ("SELECT DISTINCT k FROM t WHERE k NOT LIKE 'k%'", [row("x", 1, 2)]),
    "the mean drifts": (
        "SELECT 1 WHERE abs((SELECT avg(v) FROM t) / (SELECT avg(v) FROM published) - 1) > 0.5",
        [row("k1", 1, 2, 10_000)],
    ),
    "a sum of a control file": (
        "SELECT c.d, c.total, s.total AS found FROM control c LEFT JOIN (SELECT d, sum(v) AS total FROM t GROUP BY d) s "
        "ON c.d = s.d WHERE c.total IS DISTINCT FROM s.total",
        [row("k1", 1, 2, 12)],
    ),
    "nothing newer": (
        "SELECT 1 WHERE (SELECT max(ts) FROM t) <= (SELECT max(ts) FROM published)",
        [row("k1", 1, 1, 5)],
    ),
}


def audited(root: Path, sql: str, *others: str, **settings: Any) -> Lake:
    """A lake whose control file has the totals of `GOOD`; ``others``: more queries, asked before."""
    control = root / "control.csv"
    root.mkdir(parents=True, exist_ok=True)
    totals = {one["d"]: sum(r["v"] for r in GOOD if r["d"] == one["d"]) for one in GOOD}
    control.write_text("d,total\n" + "".join(f"{day},{total}\n" for day, total in totals.items()))
    queries = {f"q{n}": one for n, one in enumerate([*others, sql])}
    return Lake(root, audit=AuditSettings(queries=queries, files={"control": str(control)}), **settings)


def held(lake: Lake) -> AuditError:
    with pytest.raises(AuditError) as caught:
        lake.run()
    return caught.value


@pytest.mark.few(len(BAD_NIGHTS))
@pytest.mark.parametrize("night", list(BAD_NIGHTS))
def test_a_bad_night_is_held_and_a_good_one_is_not(tmp_path: Path, night: str) -> None:
    sql, bad = BAD_NIGHTS[night]
    lake = audited(tmp_path, sql, "SELECT * FROM t WHERE k IS NULL")
    lake.land("1.jsonl", GOOD)
    lake.run()
    rows = lake.rows()
    assert len(rows) == len(GOOD)
    lake.land("2.jsonl", bad)
    assert "'q1'" in held(lake).message
    assert lake.rows() == rows
    assert held(lake).code == "audit-failed"  # the same command again does not let it pass
    lake.table.publish(audited=False)
    assert lake.rows() == lake.expected(2)
    assert lake.rows() != rows


def test_a_correction_and_a_withdrawal(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT * FROM t WHERE v < 0")
    lake.land("1.jsonl", [row("a", 0, 1, -1)])
    held(lake)
    assert lake.table.snapshots() == []
    lake.land("2.jsonl", [row("a", 0, 2, 1)])
    lake.run()
    lake.check()
    lake.land("3.jsonl", [row("b", 1, 3, -1)])
    held(lake)
    lake.table.restore("published", dry=False)
    lake.run()
    assert [one["k"] for one in lake.rows()] == ["a"]


@pytest.mark.parametrize(
    ("sql", "missing"),
    [
        ("SELECT * FROM nowhere", False),
        ("SELECT * FROM read_csv('/etc/passwd')", False),
        ("SELECT k::int FROM t", False),
        ("SELECT * FROM control", True),
    ],
)
def test_an_audit_that_can_not_be_asked_holds_the_night(tmp_path: Path, sql: str, missing: bool) -> None:
    lake = audited(tmp_path, sql)
    if missing:
        (tmp_path / "control.csv").unlink()
    lake.land("1.jsonl", GOOD)
    assert held(lake).code == "audit-unfit"
    assert "restore" not in held(lake).next  # nothing was published that could be restored
    assert lake.table.snapshots() == []
    lake.table.publish(audited=False)
    assert len(lake.rows()) == len(GOOD)


def test_columns_of_a_control_file_have_the_tables_types(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT c.k FROM control c ANTI JOIN t ON c.k = t.k")
    (tmp_path / "control.csv").write_text("k,n\n007,1\n")
    lake.land("1.jsonl", [row("7", 0, 1)])
    assert "(k = 007)" in held(lake).message
    lake.land("2.jsonl", [row("007", 0, 1)])
    lake.run()
    lake.check()


def test_a_new_column_is_null_before(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT 1 WHERE (SELECT count(x) FROM t) < (SELECT count(x) FROM published)")
    lake.land("1.jsonl", GOOD)
    with pytest.raises(AuditError):
        lake.run()  # there is no such column yet
    lake.land("2.jsonl", [{**row("k1", 1, 2), "x": 1}])
    lake.run()
    lake.land("3.jsonl", [{**row("k1", 1, 3), "x": None}])
    held(lake)


def test_values_that_python_does_not_have(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT 'infinity'::date AS d, k FROM t")
    lake.land("1.jsonl", GOOD)
    assert "30 rows" in held(lake).message


def test_a_repair_that_is_held_can_pass(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT 1", strategy="rewrite")
    lake.land("1.jsonl", GOOD)
    held(lake)
    lake.table.publish(audited=False)
    next((tmp_path / "processed/d=2020-01-01").glob("*.parquet")).unlink()
    with pytest.raises(AuditError):
        lake.table.reprocess(source="landing", host="local")

    def said() -> list[str]:
        return [text for text in lake.table.status().warnings if "were rewritten" in text]

    lake.reopen()
    [warning] = said()
    assert "d=2020-01-01" in warning
    assert "publish --without-audit" in warning
    lake.table.publish(audited=False)
    assert len(lake.rows()) == len(GOOD)
    lake.table.vacuum(dry=False)  # its fences are later versions, too
    assert said() == []


def test_a_publisher_shows_what_is_published_while_a_night_is_held(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT * FROM t WHERE v < 0", publishers=("delta",))
    lake.land("1.jsonl", GOOD)
    lake.run()
    lake.land("2.jsonl", [row("k1", 1, 2, -1)])
    held(lake)
    shutil.rmtree(tmp_path / "processed/_delta_log")
    lake.reopen()
    with pytest.raises(AuditError):
        lake.table.publish(to="delta", reset=True)
    assert len(delta_rows(str(tmp_path / "processed"))) == len(GOOD)


def test_a_refused_correction_is_the_error(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT * FROM t WHERE v < 0", quarantine_limit="0%")
    lake.land("1.jsonl", [row("k1", 1, 2, -1)])
    held(lake)
    lake.land("2.jsonl", [{**row("k1", 1, 3), "k": None}])
    with pytest.raises(RefusedError) as caught:
        lake.run()
    assert not isinstance(caught.value, AuditError)


@pytest.mark.parametrize("name", ["published", "Published", "T", "c"])
def test_two_tables_of_one_name(name: str) -> None:
    table = "t" if len(name) == 1 else name
    files = f'files = {{ {name} = "c.csv", C = "c.csv" }}' if len(name) == 1 else ""
    text = f"""
        [tables.{table}]
        landing = "/l"
        processed = "/p"
        key = ["k"]
        partition_by = []
        [tables.{table}.audit]
        queries = {{ q = "SELECT 1" }}
        {files}
    """
    with pytest.raises(ConfigurationError) as caught:
        parse("/lakeupsert.toml", text.encode())
    assert caught.value.code == "bad-setting"


def test_ingest_continues_until_a_correction_lands(tmp_path: Path) -> None:
    """Its merges have no version of their own, and the queries see them."""
    lake = audited(tmp_path, "SELECT * FROM t WHERE v < 0", strategy="delta")
    lake.land("1.jsonl", GOOD)
    lake.run()
    lake.land("2.jsonl", [row(f"k{n}", n % 3, 2, -1) for n in range(6)])
    stop, warnings, batches = Stop(), list[str](), list[int]()

    def warned(text: str) -> None:
        warnings.append(text)
        lake.land("3.jsonl", [row(f"k{n}", n % 3, 3, 1) for n in range(6)])

    def took(result: object) -> None:
        if isinstance(result, PublishResult):
            batches.append(result.batch)
            if result.batch == 3:
                stop.set()

    lake.table.ingest(seconds=0.01, stop=stop, collect=took, warn=warned)
    assert len([one for one in warnings if "'q0'" in one]) == 1
    assert 2 not in batches
    lake.check()


def test_the_commands(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT k, v FROM t WHERE v < 0 ORDER BY k")
    config = ["--config", str(lake.configure()), "--json"]
    lake.land("1.jsonl", [row(f"k{n}", 0, 1, -n) for n in range(1, 6)])
    run = CliRunner().invoke(main, ["run", "--host", "local", *config])
    error = json.loads(run.stdout)["error"]
    assert (run.exit_code, error["code"]) == (1, "audit-failed")
    assert "5 rows" in error["message"]
    assert "(k = k1, v = -1)" in error["message"]
    assert NOT_ASKED in json.loads(CliRunner().invoke(main, ["status", *config]).stdout)["warnings"]
    passed = CliRunner().invoke(main, ["publish", "--without-audit", *config])
    assert passed.exit_code == 0, passed.output
    assert json.loads(passed.stdout)["result"]["rows"] == 5


def test_maintain_waits(tmp_path: Path) -> None:
    lake = audited(tmp_path, "SELECT * FROM t WHERE v < 0", strategy="delta")
    for night in range(1, 12):
        lake.land(f"{night}.jsonl", [row(f"k{n}", n % 3, night, night) for n in range(30)])
        lake.run()
    lake.land("bad.jsonl", [row("k1", 1, 20, -1)])
    held(lake)
    warnings: list[str] = []
    lake.table.maintain(seconds=0.01, max_seconds=0.05, warn=warnings.append)
    assert any("'q0'" in one for one in warnings)
