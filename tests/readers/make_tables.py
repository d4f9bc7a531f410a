"""Tables that others wrote.

    make_tables.py delta ROOT FIRST SECOND GONE
    make_tables.py iceberg CATALOG ROOT FIRST SECOND GONE

FIRST and SECOND are Arrow files of two nights. The second one replaces the rows of its ids and deletes those of GONE, ids with
commas between them. Prints the version after the first night. It runs in the environment of `make readers`.
"""

import sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import In
from pyiceberg.transforms import IdentityTransform


def rows(path: str) -> pa.Table:
    with pa.OSFile(path) as source:
        return pa.ipc.open_file(source).read_all()


def delta(root: str, first: pa.Table, second: pa.Table, ids: list[int]) -> int:
    write_deltalake(root, first, partition_by=["part"])
    version = DeltaTable(root).version()
    DeltaTable(root).delete(f"id IN ({', '.join(map(str, ids))})")
    write_deltalake(root, second, mode="append")
    return version


def iceberg(path: str, root: str, first: pa.Table, second: pa.Table, ids: list[int]) -> int:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{path}")
    catalog.create_namespace_if_not_exists("sales")
    table = catalog.create_table(f"sales.{root.rpartition('/')[2]}", first.schema, location=f"file://{root}")
    with table.update_spec() as update:
        update.add_field("part", IdentityTransform(), "part")
    table.append(first)
    version = table.current_snapshot().snapshot_id
    table.delete(In("id", ids))
    table.append(second)
    return version


kind, *places, first, second, gone = sys.argv[1:]
nights = rows(first), rows(second)
ids = sorted({*nights[1]["id"].to_pylist(), *map(int, gone.split(","))})
print({"delta": delta, "iceberg": iceberg}[kind](*places, *nights, ids))
