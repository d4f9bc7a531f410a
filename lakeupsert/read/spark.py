"""Reading a view with Spark: native Parquet scans, so filters and columns are pushed down into them.

Rows that a deletion vector names are left out by an anti-join with blocks of marks, one for each row of a file, which Spark
broadcasts; no row passes through Python.
A table on S3 or Azure is read through Hadoop's S3A or ABFS, whose settings for the table's bucket or account come with the scan
as its options: the session's own stay as they are, and go before them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from pyarrow.types import is_binary, is_fixed_size_binary, is_large_binary
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as s

from lakeupsert.engine.spark_window import window_order
from lakeupsert.errors import ConfigurationError
from lakeupsert.read.history import FROM, LIVES, UNTIL, history_schema, shared_columns
from lakeupsert.read.view import View, ViewFile, plain_path
from lakeupsert.read.where import Conjunct, parse_where
from lakeupsert.rows.convert import plain
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.storage import azureaccount
from lakeupsert.table.spec import BATCH, DELETE_FLAG

BLOCK = 1024
"""Rows whose marks Spark looks up at once. More: a superseded row that is alone takes more memory. Less: rows side by side
are looked up in more places, and each place that the processor's cache has not costs more than all else."""
DEAD = "_lakeupsert_dead"
"""In the join with a table's columns, whose names it must not share."""
BROADCAST_BLOCKS = 3_000_000
"""Blocks with superseded rows up to which each executor gets all of them. More: executors need that much memory, about 330
bytes each. Less: Spark sorts and shuffles what it reads to join it."""
_KEPT: WeakKeyDictionary[SparkSession, list[View]] = WeakKeyDictionary()
"""Views with temporary files. They live as long as the session: which frames are made of theirs, nobody can tell."""


def to_spark(spark: SparkSession, view: View, where: str | None = None) -> DataFrame:
    """A DataFrame over the view's files, with the columns of the spec in its order.

    Raises ConfigurationError naming the column and type where Spark can't hold one, and for a filter that can't be used.
    """
    types = {field.name: spark_type(field.type, field.name) for field in view.spec.schema}
    frame = _frame(spark, view, types, view.files(where))
    return _where(frame, parse_where(where, view.spec.schema, SparkTerms()))


def history_to_spark(spark: SparkSession, view: View, where: str | None = None) -> DataFrame:
    """A DataFrame of all versions, as `history_to_arrow` has them; in no order. Raises as `to_spark` does."""
    spec, schema = view.spec, history_schema(view.spec)
    types = {field.name: spark_type(field.type, field.name) for field in spec.schema}
    conjuncts = parse_where(where, schema, SparkTerms())
    partitions = list(view.partitions(where, schema))
    alive = _frame(spark, view, types, (file for name in partitions for file in view.files(only=name)))
    alive = alive.withColumns({DELETE_FLAG: f.lit(False), BATCH: f.lit(LIVES)})
    types |= {DELETE_FLAG: s.BooleanType(), BATCH: s.LongType()}
    past = _frame(spark, view, types, (file for name in partitions for file in view.history(name)))
    rows = _where(alive.union(past), [c for c in conjuncts if c.columns <= shared_columns(spec)])
    columns = {name: f.col(_quoted(name)) for name in types}
    lives = columns[BATCH] == LIVES
    newest_first = [*(window_order(columns[o.column], o) for o in spec.ordering), lives.desc()]
    ties = [*([DELETE_FLAG, *spec.content] if spec.ties == "content" else []), BATCH, DELETE_FLAG]
    key = [columns[name] for name in dict.fromkeys((*spec.partition_by, *spec.key))]
    of_key = Window.partitionBy(key).orderBy(*newest_first, *(columns[name].desc_nulls_last() for name in ties))
    orders = f.struct(*[columns[name].alias(f"o{i}") for i, name in enumerate(spec.order_by)])
    # Of rows with one ordering value the first alone was ever a version.
    is_version = ~f.coalesce(f.lag(orders).over(of_key).eqNullSafe(orders), f.lit(False))
    # What a full extract has lives, also below a delete that the table has forgotten.
    until = f.when(~lives, f.lag(columns[spec.order_by[0]]).over(of_key))
    found = rows.withColumns({FROM: columns[spec.order_by[0]], UNTIL: until, DEAD: ~is_version | columns[DELETE_FLAG]})
    return _where(found.where(~f.col(DEAD)).select([_quoted(name) for name in schema.names]), conjuncts)


def _where(frame: DataFrame, conjuncts: Sequence[Conjunct]) -> DataFrame:
    return reduce(lambda found, conjunct: found.where(conjunct.expression), conjuncts, frame)


def _frame(spark: SparkSession, view: View, types: dict[str, s.DataType], files: Iterable[ViewFile]) -> DataFrame:
    """The rows of these files that live, with these columns."""
    together: dict[tuple[str, int], list[ViewFile]] = {}
    for file in files:
        root = _hadoop_path(file.uri).removesuffix(file.name)
        together.setdefault((root, file.file.renames), []).append(file)
    if not together:
        return spark.createDataFrame([], s.StructType([s.StructField(name, type_) for name, type_ in types.items()]))
    home = _hadoop_path(view.objects.store.uri()) + "/"
    roots = {root for root, _ in together}
    if roots - {home}:
        _keep(spark, view)
    options = {
        "datetimeRebaseMode": "CORRECTED",  # our files hold the calendar of today, also before 1582
        "ignoreMissingFiles": "false",  # whatever the session says: no row goes missing in silence
        "ignoreCorruptFiles": "false",
        "parquet.page.verify-checksum.enabled": "true",  # of pages; what else is in a file, Spark takes as it is
        "parquet.filter.columnindex.enabled": "false",  # no checksum covers it, and a wrong bit there hides rows
        # One scan for partition folders of the root and of `_lakeupsert/data`: a union of two makes a row object of each row.
        "ignoreInvalidPartitionPaths": "true",
    }
    if home in roots:
        options |= _hadoop_options(spark, home)

    def scan(root: str, renames: int, files: Sequence[ViewFile]) -> DataFrame:
        names = view.spec.names_in(renames)
        schema = s.StructType([s.StructField(names.get(name, name), type_) for name, type_ in types.items()])
        found = _scan(spark, view, spark.read.schema(schema).options(**options, basePath=root), files)
        # In the spec's order, as a union needs it, partition columns inside.
        columns = {name: f.col(_quoted(names.get(name, name))) for name in types}
        return found.select(*[column.alias(name) if name in names else column for name, column in columns.items()])

    # More than one root only where `latest` has files on this machine; and files whose columns have other names.
    with _jars_may_be_missing(spark), _files_looked_at_here(spark, local=home.startswith("file:")):
        return reduce(DataFrame.union, [scan(root, renames, files) for (root, renames), files in together.items()])


def _scan(spark: SparkSession, view: View, reader: DataFrameReader, files: Sequence[ViewFile]) -> DataFrame:
    scan = reader.parquet(*[_escaped(_hadoop_path(file.uri)) for file in files])
    superseded = [file for file in files if file.superseded]
    if not superseded:
        return scan
    table = pa.concat_tables([_blocks(view, file) for file in superseded])
    # Where sizes tell files apart they do: a seventh of a read's time is hashing names.
    by_size = len({file.bytes for file in superseded}) == len(superseded)
    file, of_file = (
        ("shiftleft(_metadata.file_size, 32)", "shiftleft(size, 32)")
        if by_size
        else ("xxhash64(_metadata.file_name)", "xxhash64(dead.file)")
    )
    dead = spark.createDataFrame(table).selectExpr(f"dead AS {DEAD}", f"{of_file} ^ block AS {DEAD}_key")
    if table.num_rows <= BROADCAST_BLOCKS:
        dead = f.broadcast(dead)
    # One long, since Spark looks these up twice as fast as text and long. Where two are the same the name decides; not by `=`,
    # which Spark would make part of the key.
    row, name = "_metadata.row_index", "_metadata.file_name"
    word = f"get({DEAD}.words, CAST(shiftright({row}, 6) & {BLOCK // 64 - 1} AS INT))"
    same_block = f"{DEAD}_key = {file} ^ shiftright({row}, {BLOCK.bit_length() - 1})"
    is_dead = f"getbit({word}, CAST({row} & 63 AS INT)) = 1"
    same_file = f"{name} >= {DEAD}.file AND {name} <= {DEAD}.file"
    return scan.join(dead, f.expr(f"{same_block} AND {is_dead} AND {same_file}"), "left_anti")


def _blocks(view: View, file: ViewFile) -> pa.Table:
    """A row for each block with superseded rows: the file's size, the block's number, and the file's name with a bit a row."""
    positions = deleted_positions(view.objects.store, file.file).astype(np.int64)
    numbers, at = np.unique(positions // BLOCK, return_inverse=True)
    bits = np.zeros((len(numbers), BLOCK), np.uint8)
    bits[at, positions % BLOCK] = 1
    words = pa.array(np.packbits(bits, axis=1, bitorder="little").view(np.int64).ravel())
    ends = pa.array(np.arange(len(numbers) + 1, dtype=np.int32) * (BLOCK // 64))
    # In one struct, since Spark takes apart what is beside it for each row; our names have an id in them: they tell files apart.
    names = pa.repeat(PurePosixPath(file.name).name, len(numbers))
    dead = pa.StructArray.from_arrays([names, pa.ListArray.from_arrays(ends, words)], ["file", "words"])
    return pa.table({"size": np.full(len(numbers), file.bytes), "block": numbers, "dead": dead})


def _hadoop_options(spark: SparkSession, home: str) -> dict[str, str]:
    """What Hadoop has to be told to reach the table's bucket or account, but what the session says, for this one or all."""

    def given(*names: str) -> bool:
        return any(spark.conf.get(f"{way}{name}", None) is not None for way in ("", "spark.hadoop.") for name in names)

    scheme, place = urlsplit(home)[:2]
    if scheme == "s3a":
        from lakeupsert.storage.s3 import s3a_settings  # brings boto3

        wanted, bucket = s3a_settings(), f"fs.s3a.bucket.{place}."
        if given("fs.s3a.access.key", f"{bucket}access.key"):
            wanted.pop("aws.credentials.provider", None)  # S3A's own chain begins with the key
        return {
            f"{bucket}{name}": value for name, value in wanted.items() if not given(f"fs.s3a.{name}", f"{bucket}{name}")
        }
    if scheme == "abfss":
        account = place.partition("@")[2]
        ways = [f"fs.azure.account.{way}{of}" for way in ("auth.type", "key") for of in ("", f".{account}")]
        if not given(*ways):
            return {f"fs.azure.account.{name}.{account}": value for name, value in azureaccount.abfs_settings().items()}
    if scheme == "wasb":
        return {"fs.azure.storage.emulator.account.name": azureaccount.EMULATOR}
    return {}


@contextmanager
def _files_looked_at_here(spark: SparkSession, *, local: bool) -> Iterator[None]:
    """Spark looks at more than 32 files by a job with a task for each: 730 local ones took it 3.0 s so, and 0.5 s one by one."""
    name = "spark.sql.sources.parallelPartitionDiscovery.threshold"
    before = spark.conf.get(name)
    if local:
        spark.conf.set(name, "1000000")
    try:
        yield
    finally:
        spark.conf.set(name, before)


_JARS = {"s3a|awssdk": ("S3", "hadoop-aws"), r"azurebfs|fs\.azure": ("Azure Storage", "hadoop-azure")}


@contextmanager
def _jars_may_be_missing(spark: SparkSession) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # Py4J's or Spark Connect's
        for classes, (store, jar) in _JARS.items():
            if missing := re.search(rf"(ClassNotFoundException|NoClassDefFoundError): .*({classes}).*", str(e)):
                asked = spark.sql("SELECT java_method('org.apache.hadoop.util.VersionInfo', 'getVersion')")
                hadoop = asked.collect()[0][0]
                raise ConfigurationError(
                    "no-hadoop-jar",
                    f"Spark {spark.version} lacks what reads {store}, which is no part of it: {missing[0]}.",
                    next=f"start the session with spark.jars.packages=org.apache.hadoop:{jar}:{hadoop}, which is made for the "
                    f"Hadoop {hadoop} in this Spark; or read the table with to_arrow",
                ) from e
        raise


def _keep(spark: SparkSession, view: View) -> None:
    master = spark.conf.get("spark.master") or ""
    if not master.startswith("local"):
        raise ConfigurationError(
            "latest-needs-local-spark",
            f"`latest` is merged into files on this machine, which the executors of {master!r} can't read.",
            next="publish (`lakeupsert run`) and read `published`; or read it with to_arrow, or in a session with a local master",
        )
    _KEPT.setdefault(spark, []).append(view)


class SparkTerms:
    """``pyspark.sql.Column``, typed as the files are: what Spark's own parser makes of a literal depends on the session."""

    def column(self, field: Any) -> Column:
        return f.col(_quoted(field.name))

    def literal(self, value: Any) -> Column:
        t = value.type
        if is_binary(t) or is_large_binary(t) or is_fixed_size_binary(t):
            return f.lit(value.as_py())
        return f.lit(str(plain(pa.repeat(value, 1))[0])).cast(spark_type(t, ""))

    def is_null(self, column: Column) -> Column:
        return column.isNull()

    def is_nan(self, value: Column) -> Column:
        return f.when(value.isNotNull(), f.isnan(value))

    def is_in(self, column: Column, values: Any) -> Column:
        return column.isin(*[self.literal(value) for value in values])

    def like(self, column: Column, pattern: str) -> Column:
        return column.like(pattern)


def spark_type(type_: Any, column: str) -> s.DataType:
    """Spark's type for an Arrow type, as its Parquet reader has it."""
    t = pa.types
    plain_types: list[tuple[Any, s.DataType]] = [
        (t.is_boolean, s.BooleanType()),
        (t.is_int8, s.ByteType()),
        (t.is_int16, s.ShortType()),
        (t.is_int32, s.IntegerType()),
        (t.is_int64, s.LongType()),
        (t.is_uint8, s.ShortType()),
        (t.is_uint16, s.IntegerType()),
        (t.is_uint32, s.LongType()),
        (t.is_uint64, s.DecimalType(20, 0)),
        (t.is_float32, s.FloatType()),
        (t.is_float64, s.DoubleType()),
        (t.is_string, s.StringType()),
        (t.is_large_string, s.StringType()),
        (t.is_binary, s.BinaryType()),
        (t.is_large_binary, s.BinaryType()),
        (t.is_fixed_size_binary, s.BinaryType()),
        (t.is_date32, s.DateType()),
        (t.is_date64, s.DateType()),
    ]
    for is_type, found in plain_types:
        if is_type(type_):
            return found
    if t.is_decimal(type_) and type_.precision <= 38:
        return s.DecimalType(type_.precision, type_.scale)
    if t.is_timestamp(type_) and type_.unit != "ns":
        return s.TimestampType() if type_.tz else s.TimestampNTZType()
    if t.is_list(type_) or t.is_large_list(type_) or t.is_fixed_size_list(type_):
        return s.ArrayType(spark_type(type_.value_type, column))
    if t.is_map(type_):
        return s.MapType(spark_type(type_.key_type, column), spark_type(type_.item_type, column))
    if t.is_struct(type_):
        return s.StructType([s.StructField(child.name, spark_type(child.type, column)) for child in type_])
    raise ConfigurationError(
        "unfit-for-spark",
        f"Column {column!r} is {type_}, and Spark has no type that holds it.",
        next="read the table with to_arrow, DuckDB or Polars, or give the column another type under [tables.….schema]",
    )


def _hadoop_path(uri: str) -> str:
    """Hadoop decodes nothing in an address, not even a `file:` one's; to it `s3:` is something else, which is gone."""
    return (
        "file:" + plain_path(uri) if uri.startswith("file:") else re.sub("^s3:", "s3a:", azureaccount.hadoop_place(uri))
    )


def _escaped(path: str) -> str:
    """Files to read are patterns to Spark, also where they are given one by one; the base path is none."""
    return "".join("\\" + c if c in "{}[]*?\\" else c for c in path)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
