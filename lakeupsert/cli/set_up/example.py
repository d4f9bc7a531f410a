"""What `lakeupsert config --example` prints: a configuration to start from. A test loads it."""

EXAMPLE = """\
#:schema ./lakeupsert.schema.json
# For editors with taplo: `lakeupsert config --schema > lakeupsert.schema.json` writes the schema that the first line names.

# lakeupsert.toml: searched in the working directory and above, or given with --config.
# Paths are relative to this file. An environment variable overrides a setting:
#   LAKEUPSERT__TABLES__SALES__ENGINE=spark
# In texts, ${VAR} is the value of an environment variable; $${ is a literal ${.
# Never put credentials here. They come from the default chains of boto3 and DefaultAzureCredential.

# on_success = ["/usr/local/bin/notify", "lake"]  # called after `run`, with its JSON on standard input
# on_failure = "${PAGER_URL}"                      # or an address, which gets the JSON by POST

[tables.sales]
# Four settings are required.
landing      = "landing/sales"         # where files arrive
processed    = "processed/sales"       # the table: Hive-style folders of plain Parquet
key          = ["order_id", "line_no"] # of all rows of a partition with the same key, the newest one stays
partition_by = ["transaction_date"]    # one or several; also "date(created_at) as day", or year, month, hour;
#                                      # "bucket(64, order_id)": by hash of the key; []: the table is one partition

# All other settings with their defaults. Remove the # to change one.
# order_by            = ["record_timestamp"]  # decides which row is newest; added on receipt if the files lack it;
#                                 # also "priority asc", "version desc nulls first"
# order_in_name       = '_(\\d+)\\.'  # takes that column's value from the file name; not set by default
# ties                = "arrival"  # if ordering values are equal, the later row wins; "content": the larger row, whenever it came
# mode                = "rows"     # "columns": a record changes only the columns that it contains
# nulls               = "overwrite"  # with mode "columns", "keep": a null in a record changes nothing
# key_scope           = "partition"  # one row per key and partition; "table": one row per key, which moves between partitions
# unknown_deletes     = "keep"       # with key_scope "table": deletes with only the key, of keys that never came; or "quarantine"
# history             = false      # true: keep superseded versions, for `export --history`
# versions            = false      # true: store with each row which batch it came with, for `export --versions`
# full_extract        = "merge"    # rows of `run --full` win by their order; "replace": they replace everything before them
# format              = "auto"     # by file name; or "parquet", "csv", "delimited", "jsonl", "avro", "orc"
# landing_dates       = ""         # pattern of the folders below landing, for example "%Y-%m-%d" or "dt=%Y-%m-%d"
# queue               = "auto"     # <processed>/_lakeupsert/queue.sqlite; or another file, or sqs://QUEUE
# engine              = "arrow"    # or "spark"
# strategy            = "auto"     # or "rewrite", "delta"
# bucket              = "256MiB"   # split larger partitions, so that several workers share them
# on_failed_partition = "hold"     # publish nothing newer while a partition fails; "skip": publish, and list it as lagging
# quarantine_limit    = "1%"       # or a row count; a batch above it is refused as a whole; 1% counts above 10 rows
# keep_snapshots      = 7
# superseded_retention = "24h"
# publishers          = []         # ["delta", "iceberg", "hive", "glue"]: as what other engines read the table (docs/engines)
# delta_timestamps    = "naive"    # or "utc": readers of Delta see times without a zone as UTC (Fabric, BigQuery)
# delta_vectors       = "file"     # or "inline", for delta-rs and Polars with more than 512 deletion vectors
# tombstone_retention  = "90d"    # how long deleted keys are remembered; by default for ever

# [tables.sales.schema]            # optional; otherwise inferred from the first batch and recorded
# order_id = "string"

# [tables.sales.read]              # optional: how the bytes of landing files become rows (docs/FORMATS.md)
# delimiter = ","                  # CSV: one character; format "delimited": a regular expression
# quote     = '"'                  # CSV only; "" for none
# escape    = '\\'                 # CSV only: before quotes in quotes, as Spark writes it; or "postgresql", "mysql", "hive"
# header    = true                 # false by default with format "delimited"
# columns   = []                   # names if there is no header, for example ["id", "price"]; by default _c0, _c1, ...
# encoding  = "utf-8"              # or any other that Python has, for example "latin-1"
# null      = '\\N'                 # text that means null, besides empty text, or several: ["NA", "-"]; not set by default
# dates     = {}                   # formats of dates in text: { order_date = ["%d/%m/%Y", "%Y-%m-%d"] }; else as in ISO 8601
# decimal_separator = "."          # or ",": before the fraction of a number in text
# dialects  = []                   # more kinds of CSV in the folder: [{ delimiter = ";", decimal_separator = "," }]
# only      = {}                   # of several tables in the folder, the rows with these values: { __source_table = "orders" }
# aliases   = {}                   # names in the files and their names in the table: { price = "unit_price" }
# envelope  = "debezium"           # or "dms", "wal2json", "singer", "airbyte": wrapped rows in JSON lines; not set by default

# [tables.sales.delete]            # optional: rows that delete their key
# column = "op"
# values = ["D"]                   # or [true], [1]: compared with the text of the column
# keep   = false                   # keep that column in the table
# upserts = ["I", "U"]             # rows with any other value go to quarantine; not set by default
# file_prefix = "del"              # or: files whose names start with this contain only deletes; not set by default
#                                    in place of these but keep, not_null names a column: rows with a value there are deletes

# [tables.sales.groups.shipping]   # optional, with mode "columns": columns of another source, with their own order
# order_by = ["shipped_at"]
# columns  = ["carrier", "state"]

# [tables.sales.large]             # optional: partitions whose merge reads more bytes than this go to Spark workers
# queue = "sqs://sales-large"
# bytes = "2GB"

# [tables.sales.iceberg]           # with publishers = ["iceberg"]: where the table is registered (docs/ICEBERG.md)
# catalog = { name = "lake", type = "rest", uri = "https://catalog.example.com" }   # or a name in pyiceberg's configuration
# table   = "shop.sales"

# [tables.sales.hive]              # with publisher "hive": the table in a Hive metastore
# uri      = "thrift://metastore:9083"
# database = "lake"
# table    = "sales"

# [tables.sales.glue]              # with publisher "glue": the table in the AWS Glue Data Catalog
# database = "lake"
# table    = "sales"
# region   = "eu-west-1"           # by default boto3's

# [profiles.test]                  # with --profile test or LAKEUPSERT_PROFILE=test: overrides settings of all tables,
# keep_snapshots = 2
# [profiles.test.tables.sales]     # and of single ones
# landing   = "test/landing/sales"
# processed = "test/processed/sales"
"""
