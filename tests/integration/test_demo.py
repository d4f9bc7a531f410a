"""The demo's verdict: exact on what it made, and not equal as soon as one stored row is another than what landed."""

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.demo import compare, main
from lakeupsert.errors import ConfigurationError

NIGHTS = 4
"""So that Parquet, CSV, JSON lines and the file that is sent again all occur."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo that ended well: its folder, which tests leave alone, and what it printed."""
    folder = tmp_path_factory.mktemp("made") / "demo"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["--nights", str(NIGHTS), "--host", "local", "--output", str(folder)]) == 0
    return folder, printed.getvalue()


@pytest.fixture
def folder(made: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy that a test may damage; the paths in its configuration are relative."""
    return shutil.copytree(made[0], tmp_path / "demo")


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Put another file in the place of the first base file."""
    table = Table.open(folder / "lakeupsert.toml")
    path = folder / "processed" / table.files()[0].name
    table.close()
    changed = change(pq.ParquetFile(path).read())
    pq.write_table(changed.replace_schema_metadata(None), path)  # without the checksums of before


def verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of a check of what is there."""
    capsys.readouterr()
    code = main(["--check", "--output", str(folder)])
    return code, capsys.readouterr().out.splitlines()[-1]


def one_amount_changed(rows: Any) -> Any:
    at = rows.schema.get_field_index("sales_value")
    more = pa.scalar(Decimal("0.01"), rows.schema.field(at).type)
    first = pa.array([True] + [False] * (rows.num_rows - 1))
    amounts = pc.if_else(first, pc.add(rows.column(at), more).cast(more.type), rows.column(at))
    return rows.set_column(at, rows.schema.field(at), amounts)


def test_demo_ends_exact_and_a_file_sent_again_counts_once(made: tuple[Path, str]) -> None:
    _, printed = made
    assert printed.splitlines()[-1] == "exact: 15485 rows in 4 partitions, 0 missing, 0 extra, 0 different"
    assert "01/02/2017/lines-1.parquet was sent again and recognised" in printed


def test_demo_brings_late_updates_of_older_days(folder: Path) -> None:
    landed = f"read_parquet('{folder}/landing/01/05/2017/*.parquet')"
    rows = duckdb.sql(f"SELECT count(*), count(DISTINCT transaction_date) FROM {landed}").fetchall()
    assert rows == [(4204 + 868, 4)]


@pytest.mark.parametrize(
    ("change", "missing", "extra", "different"),
    [
        (one_amount_changed, 0, 0, 1),
        (lambda rows: rows.slice(1), 1, 0, 0),
        (lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]), 0, 1, 0),
    ],
    ids=["amount changed", "row lost", "row twice"],
)
def test_one_tampered_row_is_not_equal(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], Any],
    missing: int,
    extra: int,
    different: int,
) -> None:
    rewrite(folder, change)
    rows = 15485 - missing + extra
    code, line = verdict(folder, capsys)
    assert code == 1
    assert line == f"not equal: {rows} rows in 4 partitions, {missing} missing, {extra} extra, {different} different"


def test_a_landing_row_that_was_never_loaded_is_missing(folder: Path) -> None:
    path = folder / "landing/01/05/2017/lines-1.parquet"
    rows = pq.ParquetFile(path).read()
    at = rows.schema.get_field_index("product_id")
    pq.write_table(rows.slice(0, 1).set_column(at, "product_id", pa.array([-1])), path.with_name("late.parquet"))
    found = compare(folder)
    assert (found.missing, found.extra, found.different) == (1, 0, 0)


@pytest.mark.long
def test_demo_begins_again_over_its_own_output_only(folder: Path, tmp_path: Path) -> None:
    (folder / "kept.txt").write_text("mine")
    assert main(["--nights", "1", "--host", "local", "--output", str(folder)]) == 0
    assert (folder / "kept.txt").read_text() == "mine"
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data.parquet").write_text("mine")
    with pytest.raises(ConfigurationError, match="precious") as refused:
        main(["--nights", "1", "--host", "local", "--output", str(tmp_path / "precious")])
    assert refused.value.code == "not-a-demo"
    assert [p.name for p in (tmp_path / "precious").iterdir()] == ["data.parquet"]
