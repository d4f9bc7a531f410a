"""Statements of other engines on a table that `publishers = ["iceberg"]` shows: Iceberg lets them commit, but no file of the
table is deleted. After a commit the publisher stops at the next night, and a reset shows the table again."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import IcebergSettings, TableSettings
from lakeupsert.publishers.iceberg_snapshot import FOLDER
from tests.harness.readers import Place, Readers, compare

STATEMENTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "spark": {
        "INSERT": ("INSERT INTO {table} SELECT * FROM {table} LIMIT 1", "foreign"),
        "DELETE": ("DELETE FROM {table}", "foreign"),
        "ADD COLUMN": ("ALTER TABLE {table} ADD COLUMN added INT", "foreign"),
        "expire": (
            "CALL lake.system.expire_snapshots(table => 'sales.receipts', older_than => TIMESTAMP '2100-01-01 00:00:00', "
            "retain_last => 1)",
            "refused",
        ),
        "orphans": (
            "CALL lake.system.remove_orphan_files(table => 'sales.receipts', older_than => TIMESTAMP '2100-01-01 00:00:00')",
            "refused",
        ),
        "rewrite": (
            "CALL lake.system.rewrite_data_files(table => 'sales.receipts', options => map('rewrite-all','true'))",
            "foreign",
        ),
        "PURGE": ("DROP TABLE {table} PURGE", "refused"),
        "DROP": ("DROP TABLE {table}", "gone"),
    },
    "trino": {
        "INSERT": ("INSERT INTO {table} SELECT * FROM {table} LIMIT 1", "foreign"),
        "DELETE": ("DELETE FROM {table} WHERE id = 1", "foreign"),
        "optimize": ("ALTER TABLE {table} EXECUTE optimize", "foreign"),
        "expire": ("ALTER TABLE {table} EXECUTE expire_snapshots(retention_threshold => '0s')", "refused"),
        "orphans": ("ALTER TABLE {table} EXECUTE remove_orphan_files(retention_threshold => '0s')", "kept"),
        "DROP": ("DROP TABLE {table}", "gone"),
    },
}
"""What happens, as it was seen: ``refused`` by the engine, all is ``kept`` as it was, a ``foreign`` commit, or the table is
``gone`` from the catalog, for Trino with the folder that it takes for the table's."""


def night(ids: range, seen: int) -> pa.Table:
    return pa.table({"id": list(ids), "part": [f"p{i % 3}" for i in ids], "seen": [seen] * len(ids)})


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, of in STATEMENTS.items() for name in of])
def test_no_file_of_the_table_is_deleted(readers: Readers, folder: Path, reader: str, name: str) -> None:
    statement, expected = STATEMENTS[reader][name]
    (folder / "landing").mkdir()
    settings = TableSettings(
        landing=str(folder / "landing"),
        processed=str(folder / "processed"),
        key=("id",),
        partition_by=("part",),
        order_by=("seen",),
        strategy="delta",
        publishers=("iceberg",),
        iceberg=IcebergSettings(
            catalog={"name": "lake", "type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}, table="sales.receipts"
        ),
    )
    table = Table("t", settings)
    for seen, ids in enumerate((range(30), range(0, 30, 2), range(0, 40, 3))):
        pq.write_table(night(ids, seen), folder / "landing" / f"{seen}.parquet")
        table.run(host="local")
    place = Place("iceberg", str(folder / "processed"), str(folder / "catalog.db"), "lake.sales.receipts")
    before = {path for path in (folder / "processed").rglob("*") if path.is_file()}
    refusal = readers[reader].write(place, statement)
    assert (refusal is not None) == (expected == "refused"), refusal
    deleted = {path for path in before if not path.exists()}
    assert all(path.is_relative_to(folder / "processed" / FOLDER) for path in deleted)
    assert not deleted or (reader, expected) == ("trino", "gone")
    pq.write_table(night(range(5), 9), folder / "landing" / "9.parquet")
    table = Table("t", settings)  # as a new process, which does not know the folders that Trino has deleted
    problem = table.run(host="local").publish.publishers["iceberg"].problem
    assert (problem.code if problem else None) == ("foreign-iceberg-commit" if expected == "foreign" else None)
    if problem:
        table.publish(to="iceberg", reset=True)
    assert compare(readers[reader].read(place), table.to_arrow().read_all(), ["id"]).exact
