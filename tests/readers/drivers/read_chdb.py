"""chDB: ClickHouse within the process."""

import os

import pyarrow as pa
from chdb.session import Session
from worker import Request, serve

SESSION = Session()


def read(request: Request) -> pa.Table:
    settings = {"output_format_arrow_low_cardinality_as_dictionary": 0}
    if request.format == "delta":
        source = f"deltaLakeLocal('{request.root}')"
        if request.version is not None:
            settings["delta_lake_snapshot_version"] = request.version
    else:
        source = f"icebergLocal('{request.root}')"
        settings["iceberg_metadata_file_path"] = f"'{os.path.relpath(request.iceberg_metadata(), request.root)}'"
        if request.version is not None:
            settings["iceberg_snapshot_id"] = request.version
    listed = ", ".join(f"{name} = {value}" for name, value in settings.items())
    answer = SESSION.query(f"{request.select(source)} SETTINGS {listed}", "ArrowStream")
    return pa.ipc.open_stream(answer.bytes()).read_all()


serve(read)
