"""Spark SQL with the jars of Delta and Iceberg, or on a Hive metastore: `read_spark.py JAR,… [thrift://…]`."""

import sys
from functools import cache

import pyarrow as pa
from pyspark.sql import SparkSession
from worker import Request, serve

JARS = sys.argv[1]
METASTORE = sys.argv[2] if len(sys.argv) > 2 else None
ICEBERG = "org.apache.iceberg.spark"


def session() -> SparkSession:
    builder = SparkSession.builder.master("local[2]").appName("reader")
    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.jars": JARS,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",  # VACUUM lists with as many tasks
        "spark.databricks.delta.snapshotPartitions": "1",  # a snapshot of a small table takes 50 tasks
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",  # lets VACUUM delete all
    }
    if METASTORE:
        settings["spark.hadoop.hive.metastore.uris"] = METASTORE
        builder = builder.enableHiveSupport()
    else:
        settings["spark.sql.extensions"] = (
            f"io.delta.sql.DeltaSparkSessionExtension,{ICEBERG}.extensions.IcebergSparkSessionExtensions"
        )
        settings["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    return builder.config(map=settings).getOrCreate()


SPARK = session()


@cache
def with_catalog(place: str, name: str) -> SparkSession:
    """A session that knows an Iceberg catalog on SQLite or at a REST server. One session keeps the first catalog that it opens
    under a name."""
    own = SPARK.newSession()
    kind = {".type": "rest", ".uri": place}
    if not place.startswith("http"):
        kind = {
            ".type": "jdbc",
            ".uri": f"jdbc:sqlite:{place}",
            ".jdbc.schema-version": "V1",
            ".warehouse": f"file://{place}.warehouse",
        }
    for key, value in {"": f"{ICEBERG}.SparkCatalog", **kind, ".cache-enabled": "false"}.items():
        own.conf.set(f"spark.sql.catalog.{name}{key}", value)
    return own


def opened(request: Request) -> tuple[SparkSession, str]:
    if request.format == "iceberg":
        return with_catalog(request.catalog, request.name.split(".")[0]), request.name
    return SPARK, f"delta.`{request.root}`" if request.format == "delta" else request.name


def read(request: Request) -> pa.Table:
    spark, table = opened(request)
    version = "" if request.version is None else f" VERSION AS OF {request.version}"
    return spark.sql(request.select(table + version, "`")).toArrow()


def write(request: Request) -> None:
    spark, table = opened(request)
    spark.sql(request.statement.format(table=table, root=request.root)).collect()


serve(read, write)
