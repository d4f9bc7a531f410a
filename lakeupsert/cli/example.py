"""What `lakeupsert config --example` prints: a configuration to start from. A test loads it."""

EXAMPLE = """\
# lakeupsert.toml: found upward from the working directory, or given with --config.
# Relative paths are relative to this file. An environment variable wins over it:
#   LAKEUPSERT__TABLES__SALES__ENGINE=spark
# Credentials are never written here: they come from the default chains of boto3 and DefaultAzureCredential.

[tables.sales]
# Four settings are required.
landing      = "landing/sales"         # where files arrive
processed    = "processed/sales"       # the table: Hive-style folders of plain Parquet
key          = ["order_id", "line_no"] # of the rows with one key in a partition the newest stays
partition_by = ["transaction_date"]    # also several, or "date(created_at) as day"; year, month, hour

# The others, with their defaults. Remove the # to set one.
# order_by            = ["record_timestamp"]  # what is newest; stamped on receipt where landing has no such column;
#                                 # also "priority asc", "version desc nulls first"
# order_in_name       = '_(\\d+)\\.'  # where that column's value stands in the names of the files; not set by default
# ties                = "arrival"  # between equal ordering values the later row wins; "content": whatever came first
# mode                = "rows"     # "columns": a record changes the columns that it brings, the others keep their values
# nulls               = "overwrite"  # with mode columns "keep": a null that a record brings changes nothing
# key_scope           = "partition"  # of a key one row in each partition; "table": one in all, which moves with its records
# history             = false      # true: keep superseded versions, for `export --history`
# format              = "auto"     # by file name; or "parquet", "csv", "delimited", "jsonl", "avro", "orc"
# landing_dates       = ""         # pattern of the folders below landing, such as "%Y-%m-%d" or "dt=%Y-%m-%d"
# queue               = "auto"     # <processed>/_lakeupsert/queue.sqlite; or the path of another file, or sqs://QUEUE
# engine              = "arrow"    # or "spark"
# strategy            = "auto"     # or "rewrite", "delta"
# bucket              = "256MiB"   # bytes of a partition from which it is split, so that workers share it
# on_failed_partition = "hold"     # publish nothing newer while a partition fails; "skip" lists it as lagging
# quarantine_limit    = "1%"       # or a number of rows; above it a batch is refused as a whole; 1% counts above 10 rows
# keep_snapshots      = 7
# superseded_retention = "24h"
# tombstone_retention  = "90d"    # how long a deleted key is known; not set by default: for ever

# [tables.sales.schema]            # optional; otherwise the first batch infers and records it
# order_id = "string"

# [tables.sales.read]              # optional: how the bytes of landing files become rows (docs/FORMATS.md)
# delimiter = ","                  # of CSV one character; of format "delimited" a regular expression
# quote     = '"'                  # of CSV; "" for none
# header    = true                 # by default false with format "delimited"
# columns   = []                   # where there is no header, such as ["id", "price"]; else _c0, _c1, ...
# encoding  = "utf-8"              # or any other that Python has, such as "latin-1"
# null      = '\\N'                 # text that is null, as empty text is; not set by default
# aliases   = {}                   # names in the files, and the table's names for them: { price = "unit_price" }
# envelope  = "debezium"           # or "dms": JSON lines (Debezium: or Avro) whose rows are wrapped; not set by default

# [tables.sales.delete]            # optional: these rows delete their key
# column = "op"
# values = ["D"]                   # or [true], [1]: compared with the column's text
# keep   = false                   # keep that column in the table
# upserts = ["I", "U"]             # all other values go to quarantine; not set by default
# file_prefix = "del"              # or: files called so hold deletes alone; not set by default

# [tables.sales.groups.shipping]   # optional, with mode columns: columns of another source, with an order of their own
# order_by = ["shipped_at"]
# columns  = ["carrier", "state"]

# [tables.sales.large]             # optional: partitions whose merge reads more bytes go to workers of engine spark
# queue = "sqs://sales-large"
# bytes = "2GB"
"""
