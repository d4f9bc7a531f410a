"""A caller of the library under mypy's strict rules: `make lint` checks what it is told about types. Nothing runs this."""

from typing import assert_type

import duckdb
import polars as pl

from lakeupsert import Table
from lakeupsert.operations.run import RunResult
from lakeupsert.operations.statement.statement import StatementResult
from lakeupsert.read.view import SnapshotFigures

with Table.open("lakeupsert.toml") as table:
    assert_type(table, Table)
    assert_type(table.to_polars(columns=["item"]), pl.LazyFrame)
    assert_type(table.to_duckdb(columns=["item"]), duckdb.DuckDBPyRelation)
    assert_type(table.snapshot, SnapshotFigures | None)
    assert_type(table.files()[0].rows, int)
    assert_type(table.update({"amount": "amount * 2"}, where="item = 'shoes'"), StatementResult)
    assert_type(table.run(host="local", workers=2, max_cost=1.5), RunResult)
    table.run(wokers=2)  # type: ignore[call-arg]  # mypy knows the options of a night, and warns if this line becomes right
    table.run(host="laptop")  # type: ignore[arg-type]
    table.reprocess(lambda partition: partition > "2020", source="landing")
