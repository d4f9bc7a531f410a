"""Polars, lazily scanned and then collected."""

import polars as pl
import pyarrow as pa
from worker import Request, serve


def read(request: Request) -> pa.Table:
    if request.format == "delta":
        frame = pl.scan_delta(request.root, version=request.version)
    else:
        frame = pl.scan_iceberg(request.iceberg_metadata(), snapshot_id=request.version)
    return pl.SQLContext(t=frame).execute(request.select("t")).collect().to_arrow()


serve(read)
