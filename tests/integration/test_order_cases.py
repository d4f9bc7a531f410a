"""The order of rows is stated three times (docs/ARCHITECTURE.md, "Which row wins"): engine arrow, engine spark, and the SQL that
proves both choose the same winner in every case of one list."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.table.spec import DELETE_FLAG
from tests.harness.order_cases import ORDER_CASES, OrderCase, Record


def winners(case: OrderCase, folder: Path, engine: Any) -> Mapping[str, Any]:
    """The value that readers see of each key, after nights that bring one record of each; every order of arrival is a key."""
    (folder / "landing").mkdir(parents=True)
    settings = TableSettings(
        landing=str(folder / "landing"),
        processed=str(folder / "processed"),
        key=("k",),
        order_by=case.order_by,
        partition_by=(),
        ties=case.ties,
        engine=engine,
        delete=DeleteSettings(column="op", values=("D",)),
    )
    types = pa.schema(
        {"k": pa.string(), "a": case.type, "b": pa.int64(), "v": pa.string(), "z": pa.int64(), "op": pa.string()}
    )
    with Table("t", settings) as table:
        for night in range(len(case.ranked)):
            rows = [landed(case, key, arrived[night]) for key, (arrived, _) in enumerate(case.arrivals())]
            pq.write_table(pa.Table.from_pylist(rows, types), folder / f"landing/{night}.parquet")
            table.run(host="local")
        assert not table.reconcile(deep=True).unbalanced
        return {row["k"]: row["z"] for row in table.to_arrow().read_all().to_pylist()}


def landed(case: OrderCase, key: int, record: Record) -> Record:
    return {**record, "k": str(key), "z": case.ranked.index(record), "op": "D" if record.get(DELETE_FLAG) else None}


def expected(case: OrderCase) -> Mapping[str, Any]:
    won = {str(key): winner for key, (_, winner) in enumerate(case.arrivals())}
    return {key: case.ranked.index(one) for key, one in won.items() if not one.get(DELETE_FLAG)}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ORDER_CASES, ids=str)
def test_engine_arrow_and_the_proof_choose_the_same_winner(case: OrderCase, tmp_path: Path) -> None:
    assert winners(case, tmp_path, "arrow") == expected(case)


@pytest.mark.long
def test_engine_spark_and_the_proof_choose_the_same_winner(tmp_path: Path, spark: Any) -> None:
    for number, case in enumerate(ORDER_CASES):
        assert winners(case, tmp_path / str(number), "spark") == expected(case), case
