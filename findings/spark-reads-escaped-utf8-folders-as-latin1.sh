#!/usr/bin/env bash
# Guess: a partition folder that DuckDB, Polars or pyarrow wrote is read by Spark with the value that was written.
# Truth: they escape the bytes of UTF-8 (`p=%C3%A9`), and Spark takes each escaped byte for a character: é becomes Ã©, without an error.
# Versions: pyspark 4.1.4, duckdb 1.4.2, pyarrow 22.0.0. Seen 2026-11-27.
# It matters for every Hive-style lake with partition values outside ASCII that two programs write or read: joins and filters miss them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyspark==4.1.4 duckdb==1.4.2 pyarrow==22.0.0
cat > look.py <<'PYTHON'
import os

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

duckdb.sql("COPY (SELECT 1 AS id, 'é' AS p) TO 'duckdb' (FORMAT parquet, PARTITION_BY (p))")
ds.write_dataset(pa.table({"id": [1], "p": ["é"]}), "pyarrow", format="parquet", partitioning=["p"], partitioning_flavor="hive")
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
for writer in ("duckdb", "pyarrow"):
    [name] = [one for one in os.listdir(writer) if "=" in one]
    print(writer, name, "spark reads", spark.read.parquet(writer).first().p)
spark.createDataFrame([(1, "é")], ["id", "p"]).write.partitionBy("p").parquet("spark")
print("spark", [one for one in os.listdir("spark") if "=" in one][0])
PYTHON
venv/bin/python look.py 2> errors | tee seen || { cat errors; exit 1; }
grep --quiet "duckdb p=%C3%A9 spark reads Ã©" seen
grep --quiet "pyarrow p=%C3%A9 spark reads Ã©" seen
grep --quiet "spark p=é" seen
