"""The statements of `lakeupsert ddl`, run by the engines that run here, for a table with an odd name in an odd folder."""

import subprocess
from pathlib import Path

import pytest

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from tests.harness.readers import Place, Readers, program

NAME = 'o"r d'
COUNT = "SELECT 1 / (CASE WHEN count(*) = 2 THEN 1 ELSE 0 END) FROM {}"
"""Fails for other rows."""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    folder = tmp_path / "it's a lake"
    (folder / "landing").mkdir(parents=True)
    (folder / "landing" / "0.csv").write_text("k,d,ts\n1,2020-01-01,1\n2,2020-01-02,1\n")
    settings = TableSettings(
        landing=str(folder / "landing"),
        processed=str(folder / "processed"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
        publishers=("delta",),
    )
    table = Table(NAME, settings)
    table.run(host="local")
    return table


def test_spark(readers: Readers, table: Table, tmp_path: Path) -> None:
    """It takes letters, digits and _ in a name alone, so this one is a word of SQL."""
    table = Table("order", table.settings)
    place = Place("delta", str(tmp_path / "it's a lake" / "processed"))
    for statement in (*table.ddl("spark").statements, COUNT.format("`order`")):
        assert readers["spark"].write(place, statement) is None
    assert readers["spark"].write(place, "DROP TABLE `order`") is None


def test_trino(readers: Readers, table: Table, tmp_path: Path) -> None:
    place = Place("delta", str(tmp_path / "it's a lake" / "processed"))
    (statement,) = table.ddl("trino").statements
    filled = statement.replace("CATALOG.", "{catalog}.").replace("'SCHEMA'", "'{schema}'")
    assert readers["trino"].write(place, filled) is None
    assert readers["trino"].write(place, COUNT.format('{catalog}.{schema}."o""r d"')) is None


@pytest.mark.readers
def test_duckdb(table: Table) -> None:
    (extension,) = program("venv").rglob("delta.duckdb_extension")
    install, load, create = table.ddl("duckdb").statements
    assert (install, load) == ("INSTALL delta", "LOAD delta")
    script = [f"LOAD '{extension}'", create, COUNT.format('"o""r d"')]
    code = f"import duckdb\nfor statement in {script!r}:\n    print(duckdb.sql(statement) or '')"
    done = subprocess.run([program("venv") / "bin/python", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
