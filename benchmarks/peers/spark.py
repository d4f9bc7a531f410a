"""The sides that upsert inside Spark. Imported where there is only pyspark, of whatever version the side needs.

The night's rows are settled first (the newest of each key), and a MERGE names the touched partitions, as each
documentation advises. A row that deletes its key stays in the table, and readers leave it out: without it an older row
that comes later would bring the key back.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from benchmarks.peers.processes import timed
from benchmarks.workload import Workload

TASKS = 8
"""Shuffle partitions: four for each of the two cores."""


def session(work: Path, jars: Sequence[Path] = (), conf: dict[str, str] | None = None) -> SparkSession:
    """The same session for every side, but for its extensions."""
    settings = {
        "spark.driver.memory": "8g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.jars": ",".join(map(str, jars)),
        "spark.local.dir": str(work / "spark"),
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(TASKS),
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.sources.partitionOverwriteMode": "dynamic",
        **(conf or {}),
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


class SparkTable:
    """One side's table; ``frame`` and the two writing methods are what the sides differ in."""

    conf: ClassVar[dict[str, str]] = {}

    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path]) -> None:
        self.workload = workload
        self.folder = work / "table"
        self.spark = session(work, jars, self.conf)

    def load(self, base: Path) -> None:
        self.write(self.spark.read.parquet(str(base)))

    def land(self, night: Path) -> None:
        self.batch = self.spark.read.parquet(str(night))

    def apply(self) -> dict[str, float]:
        return timed({"merge": self.merge})

    def reads(self) -> Mapping[str, Callable[[str], Any]]:
        return {"Spark": self._read}

    def _read(self, where: str) -> Any:
        seen = self.frame().where(self.workload.visible).where(where)
        return seen.selectExpr(*self.workload.figures.values()).collect()[0]

    def bytes_counted(self) -> int:
        """By Hadoop's file system, through which shuffle files do not pass (nor does Delta's log)."""
        statistics = self.spark.sparkContext._jvm.org.apache.hadoop.fs.FileSystem.getAllStatistics()
        return sum(int(s.getBytesWritten()) for s in statistics if s.getScheme() == "file")

    def requests(self) -> dict[str, int]:
        return {}

    def frame(self) -> DataFrame:
        raise NotImplementedError

    def write(self, rows: DataFrame) -> None:
        raise NotImplementedError

    def merge(self) -> None:
        raise NotImplementedError

    def touched(self) -> list[Any]:
        return [row[0] for row in self.batch.select(self.workload.partition).distinct().collect()]

    def newest(self, rows: DataFrame) -> DataFrame:
        key = (self.workload.partition, *self.workload.key)
        newest_first = Window.partitionBy(*key).orderBy(f.col(self.workload.order).desc())
        return rows.withColumn("_nth", f.row_number().over(newest_first)).where("_nth = 1").drop("_nth")

    def merge_by_sql(self, table: str) -> None:
        w = self.workload
        self.newest(self.batch).createOrReplaceTempView("night")
        touched = ", ".join(f"DATE '{value}'" for value in self.touched())
        same = " AND ".join(f"t.{column} = s.{column}" for column in (w.partition, *w.key))
        self.spark.sql(
            f"MERGE INTO {table} t USING night s ON {same} AND t.{w.partition} IN ({touched}) "
            f"WHEN MATCHED AND s.{w.order} > t.{w.order} THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )


class Plain(SparkTable):
    """What most begin with: append the night, then window the touched partitions by row_number and overwrite them."""

    def frame(self) -> DataFrame:
        return self.spark.read.parquet(str(self.folder))

    def write(self, rows: DataFrame, mode: str = "append") -> None:
        partition = self.workload.partition
        rows.repartition(TASKS, partition).write.mode(mode).partitionBy(partition).parquet(str(self.folder))

    def apply(self) -> dict[str, float]:
        return timed({"append": lambda: self.write(self.batch), "dedupe": self.merge})

    def merge(self) -> None:
        rows = self.frame().where(f.col(self.workload.partition).isin(self.touched()))
        self.write(self.newest(rows), "overwrite")


class Delta(SparkTable):
    conf: ClassVar = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": str(TASKS),  # 50 are for the logs of far larger tables
    }

    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path], deletion_vectors: bool) -> None:
        super().__init__(workload, work, jars)
        default = "spark.databricks.delta.properties.defaults.enableDeletionVectors"
        self.spark.conf.set(default, str(deletion_vectors).lower())

    def frame(self) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder))

    def write(self, rows: DataFrame) -> None:
        partition = self.workload.partition
        rows = rows.repartition(TASKS, partition)
        rows.write.format("delta").partitionBy(partition).save(str(self.folder))

    def merge(self) -> None:
        self.merge_by_sql(f"delta.`{self.folder}`")


class Iceberg(SparkTable):
    """Format version 3, whose merge-on-read writes deletion vectors."""

    conf: ClassVar = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
    }

    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path], mode: str) -> None:
        self.conf = {**self.conf, "spark.sql.catalog.lake.warehouse": str(work / "table")}
        super().__init__(workload, work, jars)
        self.mode = mode

    def frame(self) -> DataFrame:
        return self.spark.table("lake.db.t")

    def write(self, rows: DataFrame) -> None:
        rows.createOrReplaceTempView("base")
        self.spark.sql(
            f"CREATE TABLE lake.db.t USING iceberg PARTITIONED BY ({self.workload.partition}) TBLPROPERTIES "
            f"('format-version' = '3', 'write.merge.mode' = '{self.mode}', 'write.distribution-mode' = 'hash') "
            "AS SELECT * FROM base"
        )

    def merge(self) -> None:
        self.merge_by_sql("lake.db.t")


class Hudi(SparkTable):
    """Upserts by index; no MERGE, whose touched partitions the index finds by itself. It settles the night's rows too."""

    conf: ClassVar = {
        "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
        "spark.kryo.registrator": "org.apache.spark.HoodieSparkKryoRegistrar",
        "spark.sql.extensions": "org.apache.spark.sql.hudi.HoodieSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.hudi.catalog.HoodieCatalog",
        "spark.sql.parquet.inferTimestampNTZ.enabled": "false",  # it can't write timestamps without a zone
    }
    indexes: ClassVar = {
        "record": {"hoodie.metadata.record.index.enable": "true", "hoodie.index.type": "RECORD_INDEX"},
        "bucket": {
            "hoodie.index.type": "BUCKET",
            "hoodie.bucket.index.num.buckets": "1",
            "hoodie.storage.layout.type": "BUCKET",
            "hoodie.storage.layout.partitioner.class": "org.apache.hudi.table.action.commit.SparkBucketIndexPartitioner",
        },
    }

    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path], table: str, index: str) -> None:
        super().__init__(workload, work, jars)
        self.options = {
            "hoodie.table.name": "t",
            "hoodie.datasource.write.table.type": table,
            "hoodie.datasource.write.recordkey.field": ",".join(workload.key),
            "hoodie.datasource.write.precombine.field": workload.order,
            "hoodie.datasource.write.partitionpath.field": workload.partition,
            "hoodie.datasource.write.hive_style_partitioning": "true",
            "hoodie.record.merge.mode": "EVENT_TIME_ORDERING",
            "hoodie.parquet.compression.codec": "zstd",
            "hoodie.parquet.bloom.filter.enabled": "false",  # neither index looks into it
            "hoodie.upsert.shuffle.parallelism": str(TASKS),
            "hoodie.bulkinsert.shuffle.parallelism": str(TASKS),
            "hoodie.compact.inline": str(workload.every_night).lower(),  # every five nights, where there are so many
            **self.indexes[index],
        }

    def frame(self) -> DataFrame:
        return self.spark.read.format("hudi").load(str(self.folder))

    def write(self, rows: DataFrame) -> None:
        self._write(rows.repartition(TASKS, self.workload.partition), "bulk_insert", "overwrite")

    def merge(self) -> None:
        self._write(self.batch, "upsert", "append")

    def _write(self, rows: DataFrame, operation: str, mode: str) -> None:
        options = {**self.options, "hoodie.datasource.write.operation": operation}
        rows.write.format("hudi").options(**options).mode(mode).save(str(self.folder))
