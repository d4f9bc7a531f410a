#!/usr/bin/env bash
# Guess: pyarrow refuses to write Parquet to a Python file that is opened for append, as it refuses its own append stream.
# Truth: it writes. The new footer counts from 0, so readers find the first file's rows there and the new statistics: pyarrow's
#        filters find nothing, DuckDB counts rows of 1 to 3 as `k >= 4`, and the new rows are nowhere. `cat` leaves the same bytes.
# Versions: pyarrow 26.0.1, duckdb 2.0.0, polars 2.1.0. Seen 2026-11-28.
# It matters for every lake where somebody appends to a file: if pages are as long in both, no reader notices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==26.0.1 duckdb==2.0.0 polars==2.1.0
cat > append.py <<'PYTHON'
import duckdb
import polars
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

for keys in ([1, 2, 3], [4, 5, 6]):
    with open("keys.parquet", "ab") as file:
        pq.write_table(pa.table({"k": keys}), file)
statistics = pq.read_metadata("keys.parquet").row_group(0).column(0).statistics
print("statistics", statistics.min, "to", statistics.max)
print("pyarrow", pq.read_table("keys.parquet")["k"].to_pylist())
print("pyarrow k >= 4", pq.read_table("keys.parquet", filters=[("k", ">=", 4)])["k"].to_pylist())
print("pyarrow k <= 3", pq.read_table("keys.parquet", filters=[("k", "<=", 3)])["k"].to_pylist())
print("polars", polars.read_parquet("keys.parquet")["k"].to_list())
print("duckdb", [k for k, in duckdb.sql("FROM 'keys.parquet'").fetchall()])
print("duckdb k >= 4", duckdb.sql("SELECT count(*) FROM 'keys.parquet' WHERE k >= 4").fetchall()[0][0], "rows")
try:
    with pa.fs.LocalFileSystem().open_append_stream("keys.parquet") as file:
        pq.write_table(pa.table({"k": [7, 8, 9]}), file)
except OSError as refused:
    print("pyarrow's own stream:", refused)
PYTHON
venv/bin/python append.py | tee seen
diff seen - <<'SEEN'
statistics 4 to 6
pyarrow [1, 2, 3]
pyarrow k >= 4 []
pyarrow k <= 3 []
polars [1, 2, 3]
duckdb [1, 2, 3]
duckdb k >= 4 3 rows
pyarrow's own stream: Appending to file not implemented.
SEEN
