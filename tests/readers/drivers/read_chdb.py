"""chDB: ClickHouse within the process."""

import os

import pyarrow as pa
from chdb.session import Session
from worker import Request, serve

os.chdir("/")  # chDB reads files below the working directory only
SESSION = Session()


def text_or_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """ClickHouse has one type for both."""
    if column.type != pa.string():
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return column.cast(pa.binary())
    return column


def read(request: Request) -> pa.Table:
    settings = {"output_format_arrow_low_cardinality_as_dictionary": 0}
    if request.format == "delta":
        source = f"deltaLakeLocal('{request.root}')"
        if request.version is not None:
            settings["delta_lake_snapshot_version"] = request.version
    else:
        metadata = os.path.relpath(request.iceberg_metadata(), request.root)
        source = f"icebergLocal('{request.root}', SETTINGS iceberg_metadata_file_path = '{metadata}')"
        if request.version is not None:
            settings["iceberg_snapshot_id"] = request.version
    listed = ", ".join(f"{name} = {value}" for name, value in settings.items())
    try:
        answer = SESSION.query(f"{request.select(source)} SETTINGS {listed}", "ArrowStream")
    except RuntimeError:
        SESSION.query("SELECT 1")  # chDB answers the query after one that failed midway without rows, whatever it asks
        raise
    rows = pa.ipc.open_stream(answer.bytes()).read_all()
    return pa.table({name: text_or_bytes(rows[name]) for name in rows.column_names})


serve(read)
