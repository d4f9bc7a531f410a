"""delta-rs. Its `to_pyarrow_table` refuses vectors; its SQL reads them."""

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from worker import Request, serve


def read(request: Request) -> pa.Table:
    table = DeltaTable(request.root, version=request.version)
    return pa.table(QueryBuilder().register("t", table).execute(request.select("t")).read_all())


def write_row(table: DeltaTable, mode: str) -> None:
    rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t LIMIT 1").read_all())
    write_deltalake(table, rows, mode=mode)


OPERATIONS = {
    "append": lambda table: write_row(table, "append"),
    "overwrite": lambda table: write_row(table, "overwrite"),
    "delete": lambda table: table.delete(),
    "optimize": lambda table: table.optimize.compact(),
    "vacuum": lambda table: table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False),
    "restore": lambda table: table.restore(0),
    "checkpoint": lambda table: table.create_checkpoint(),
    "clean-up": lambda table: table.cleanup_metadata(),
}


def write(request: Request) -> None:
    OPERATIONS[request.statement](DeltaTable(request.root))


serve(read, write)
