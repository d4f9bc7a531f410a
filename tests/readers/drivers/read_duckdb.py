"""DuckDB with its extensions out of wheels. It downloads none."""

import importlib.util
from pathlib import Path

import duckdb
import pyarrow as pa
from worker import Request, serve

CONNECTION = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
for name in ("avro", "delta", "iceberg"):
    (package,) = importlib.util.find_spec(f"duckdb_extension_{name}").submodule_search_locations
    (extension,) = Path(package).rglob("*.duckdb_extension")
    CONNECTION.execute(f"LOAD '{extension}'")
CONNECTION.execute("SET TimeZone = 'UTC'")


def read(request: Request) -> pa.Table:
    if request.format == "delta":
        version = "" if request.version is None else f", version => {request.version}"
        source = f"delta_scan('{request.root}'{version})"
    else:
        version = "" if request.version is None else f", snapshot_from_id => {request.version}"
        source = f"iceberg_scan('{request.iceberg_metadata()}'{version})"
    return CONNECTION.sql(request.select(source)).to_arrow_table()


serve(read)
