"""Read a view with Spark's own Parquet scans, into which Spark pushes filters and columns.

Deletion vectors are applied by an anti-join with blocks that have one bit for each row of a file. Spark broadcasts the blocks; no
row passes through Python.
A table on S3 or Azure is read through Hadoop's S3A or ABFS. Settings for its bucket or account are options of the scan; settings
of the session take precedence, and are not changed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from pathlib import PurePosixPath
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as s

from lakeupsert.engine.runs import runs
from lakeupsert.engine.spark_versions import frame_of, hadoop_version, reads_wider, s3a_settings_of, scans_one_root
from lakeupsert.engine.spark_window import window_order
from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import choose_columns
from lakeupsert.read.history import FROM, LIVES, UNTIL, history_schema, shared_columns
from lakeupsert.read.native import superseded_rows
from lakeupsert.read.view import View, ViewFile, plain_path
from lakeupsert.read.where import Conjunct, parse_where
from lakeupsert.rows.datafiles import open_object
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import azureaccount
from lakeupsert.table.layout import DATA, TableObjects, partition_texts
from lakeupsert.table.spec import BATCH, DELETE_FLAG, RECEIVED_AT
from lakeupsert.table.types import is_binary, is_list, is_number, normalize

BLOCK = 1024
"""Rows in a block, which Spark looks up at once. More: a lone superseded row takes more memory. Less: adjacent rows are looked up
in more blocks, and a block that is not in the processor's cache costs more than everything else."""
DEAD = "_lakeupsert_dead"
"""Column of a DataFrame beside the table's columns; none of these may have its name."""
BROADCAST_BLOCKS = 3_000_000
"""Up to this many blocks are broadcast to every executor. More: executors need the memory, about 330 bytes a block. Less: Spark
sorts and shuffles the rows it reads for the join."""
_ESCAPED_BYTE = re.compile("%([0-9A-Fa-f]{2})")
OPEN_FILES = 16
"""Footers that are read at the same time."""
Narrow = tuple[tuple[str, pa.DataType], ...]
"""Columns that a file has in a narrower type than the table, and the types as which Spark reads them."""
_VIEWS: WeakKeyDictionary[SparkSession, list[View]] = WeakKeyDictionary()
"""Views with temporary files, kept for the life of the session: there is no way to know which DataFrames still need them."""


def to_spark(
    spark: SparkSession, view: View, *, where: str | None = None, columns: Sequence[str] | None = None
) -> DataFrame:
    """A DataFrame of the view's rows, with these columns of the view; default: all, in its order.

    Raises ConfigurationError if Spark has no type for a column, if there is no such column, or if the filter can't be used.
    """
    choose_columns(view.schema, columns)
    frame = _frame(spark, view, _types_in_files(view), view.files(where))
    if view.stamps is not None:
        frame = _add_received_at(spark, frame, view.stamps)
    return _select(_where(frame, parse_where(where, view.schema, SparkTerms())), columns)


def _types_in_files(view: View) -> dict[str, s.DataType]:
    """The types of the view's columns without `RECEIVED_AT`, which no file has."""
    return {field.name: spark_type(field.type, field.name) for field in view.schema if field.name != RECEIVED_AT}


def _add_received_at(spark: SparkSession, frame: DataFrame, stamps: pa.Array) -> DataFrame:
    """``frame``, which has `BATCH`, with `RECEIVED_AT`. A null, of an adopted file, becomes batch 0."""
    of_batch = frame_of(spark, pa.table({BATCH: np.arange(len(stamps)), RECEIVED_AT: stamps}))
    numbered = frame.withColumn(BATCH, f.coalesce(f.col(BATCH), f.lit(0).cast("bigint")))
    found = numbered.join(f.broadcast(of_batch), BATCH, "left")
    return found.select([_quote(name) for name in (*frame.columns, RECEIVED_AT)])


def _select(frame: DataFrame, columns: Sequence[str] | None) -> DataFrame:
    return frame if columns is None else frame.select([_quote(name) for name in columns])


def history_to_spark(
    spark: SparkSession, view: View, *, where: str | None = None, columns: Sequence[str] | None = None
) -> DataFrame:
    """A DataFrame of all versions, as of `history_to_arrow`, in no particular order. Raises as `to_spark` does."""
    spec, schema = view.spec, history_schema(view)
    choose_columns(schema, columns)
    types = _types_in_files(view)
    conjuncts = parse_where(where, schema, SparkTerms())
    partitions = list(view.partitions(where, schema))
    alive = _frame(spark, view, types, (file for name in partitions for file in view.files(only=name)))
    batch = f.col(BATCH) if BATCH in types else f.lit(0).cast("bigint")
    alive = alive.withColumns({BATCH: batch, DELETE_FLAG: f.lit(False), LIVES: f.lit(True)})
    types |= {BATCH: s.LongType(), DELETE_FLAG: s.BooleanType()}
    past = _frame(spark, view, types, (file for name in partitions for file in view.history(name)))
    rows = alive.unionByName(past.withColumn(LIVES, f.lit(False)))
    if view.stamps is not None:
        rows = _add_received_at(spark, rows, view.stamps)
    rows = _where(rows, [c for c in conjuncts if c.columns <= shared_columns(spec)])
    value = {name: f.col(_quote(name)) for name in types}
    lives = f.col(LIVES)
    newest_first = [*(window_order(value[o.column], o) for o in spec.ordering), lives.desc()]
    ties = [*([DELETE_FLAG, *spec.content] if spec.ties == "content" else []), BATCH, DELETE_FLAG]
    key = [value[name] for name in dict.fromkeys((*spec.partition_by, *spec.key))]
    of_key = Window.partitionBy(key).orderBy(*newest_first, *(value[name].desc_nulls_last() for name in ties))
    orders = f.struct(*[value[name].alias(f"o{i}") for i, name in enumerate(spec.order_by)])
    # Among rows with one ordering value only the first was ever a version.
    is_version = ~f.coalesce(f.lag(orders).over(of_key).eqNullSafe(orders), f.lit(False))
    # A full extract's row lives, even below a delete that the table has forgotten.
    until = f.when(~lives, f.lag(value[spec.order_by[0]]).over(of_key))
    found = rows.withColumns({FROM: value[spec.order_by[0]], UNTIL: until, DEAD: ~is_version | value[DELETE_FLAG]})
    versions = found.where(~f.col(DEAD)).select([_quote(name) for name in schema.names])
    return _select(_where(versions, conjuncts), columns)


def _where(frame: DataFrame, conjuncts: Sequence[Conjunct]) -> DataFrame:
    return reduce(lambda found, conjunct: found.where(conjunct.expression), conjuncts, frame)


def _frame(spark: SparkSession, view: View, types: dict[str, s.DataType], files: Iterable[ViewFile]) -> DataFrame:
    files = list(files)
    _refuse_conversions(view, files)
    one_root, narrow = scans_one_root(spark), {} if reads_wider(spark) else _narrow_columns(view, files)
    together: dict[tuple[str, int, Narrow], list[ViewFile]] = {}
    for file in files:
        root = _hadoop_path(file.uri).removesuffix(file.name)
        if one_root and file.name.startswith(f"{DATA}/"):
            root += f"{DATA}/"
        together.setdefault((root, file.file.renames, narrow.get(file.name, ())), []).append(file)
    if not together:
        return spark.createDataFrame([], s.StructType([s.StructField(name, type_) for name, type_ in types.items()]))
    home = _hadoop_path(view.objects.store.uri()) + "/"
    roots = {root for root, _, _ in together}
    if any(not root.startswith(home) for root in roots):
        _keep(spark, view)
    options = {
        "datetimeRebaseMode": "CORRECTED",  # our files use the Gregorian calendar, also before 1582
        "ignoreMissingFiles": "false",  # whatever the session says: no row may go missing silently
        "ignoreCorruptFiles": "false",
        "parquet.page.verify-checksum.enabled": "true",  # pages only; Spark verifies nothing else in a file
        "parquet.filter.columnindex.enabled": "false",  # no checksum covers it, and a wrong bit there hides rows
        # One scan for partition folders below the root and `_lakeupsert/data`: a union of two creates an object for every row.
        "ignoreInvalidPartitionPaths": "true",
    }
    if any(root.startswith(home) for root in roots):
        options |= _hadoop_options(spark, home)

    misread = _misread_texts(view, files)

    def scan(root: str, renames: int, narrow: Narrow, files: Sequence[ViewFile]) -> DataFrame:
        names = view.spec.names_in(renames)
        stored = types | {name: spark_type(type_, name) for name, type_ in narrow}
        schema = s.StructType([s.StructField(names.get(name, name), type_) for name, type_ in stored.items()])
        found = _scan(spark, view, spark.read.schema(schema).options(**options, basePath=root), files)
        for column, texts in misread.items():
            found = found.replace(texts, subset=[_quote(names.get(column, column))])
        # In the spec's order, including partition columns, as a union needs it.
        columns = {name: f.col(_quote(names.get(name, name))) for name in types}
        columns |= {name: columns[name].cast(types[name]) for name, _ in narrow}
        other = {*names, *dict(narrow)}
        return found.select(*[column.alias(name) if name in other else column for name, column in columns.items()])

    # There are several scans if `latest` has temporary files here, if files have columns with former names, and in Spark 3.5.
    with _explain_missing_jars(spark), _list_files_in_driver(spark, local=home.startswith("file:")):
        return reduce(DataFrame.union, [scan(*kind, files) for kind, files in together.items()])


def _misread_texts(view: View, files: Sequence[ViewFile]) -> dict[str, dict[str, str]]:
    """For each partition column of text, the values that Spark reads from the names of adopted folders, with the right ones.

    It takes every escaped byte for a character, so that `p=%C3%A9`, as DuckDB, Polars and pyarrow write é, becomes Ã©. Raises
    ConfigurationError if a partition really has such a value.
    """
    found: dict[str, dict[str, str]] = {}
    for one in view.spec.adopted_folders:
        read = _ESCAPED_BYTE.sub(lambda byte: chr(int(byte[1], 16)), one.folder.partition("=")[2])
        [(column, text)] = partition_texts(one.folder).items()
        if read != text and pa.types.is_string(view.spec.schema.field(column).type):
            found.setdefault(column, {})[read] = text
    for partition in {file.partition for file in files} if found else ():
        for column, text in partition_texts(partition).items():
            if text in found.get(column, ()):
                raise ConfigurationError(
                    "unfit-for-spark",
                    f"Spark would read the partition {partition} as {column} = {found[column][text]!r}: it takes every escaped "
                    "byte of a folder's name for a character. Nothing was read.",
                    next="read the table with to_arrow, to_duckdb or to_polars",
                )
    return found


def _refuse_conversions(view: View, files: Sequence[ViewFile]) -> None:
    """Spark's casts are not those by which a retype converts: they trim blanks, for example."""
    older = {name for file in files for name in view.spec.conversions(file.file.renames)}
    if older:
        count = sum(bool(view.spec.conversions(file.file.renames)) for file in files)
        raise ConfigurationError(
            "unconverted-files",
            f"{count:,} of {len(files):,} files were written before a retype of {', '.join(map(repr, sorted(older)))}, and Spark "
            "does not convert their values as lakeupsert does. Nothing was read.",
            next="run `lakeupsert compact --full`, which converts all except the files of a history; or read the table with "
            "to_arrow, DuckDB or Polars",
        )


def _narrow_columns(view: View, files: Sequence[ViewFile]) -> dict[str, Narrow]:
    """By file name. Opens adopted files, and all files if some column of the table has had another type."""
    spec = view.spec
    if not view.retyped():
        files = [file for file in files if TableObjects.start_of(file.name) is None]

    def of_file(file: ViewFile) -> Narrow:
        names = spec.names_in(file.file.renames)
        with open_object(view.objects.store, file.name, partition=file.partition) as source:
            stored = {field.name: normalize(field.type) for field in pq.read_schema(source)}
        read = {t.name: _readable(t.type, stored.get(names.get(t.name, t.name), t.type)) for t in spec.schema}
        return tuple((field.name, read[field.name]) for field in spec.schema if read[field.name] != field.type)

    with ThreadPoolExecutor(OPEN_FILES) as pool:
        return dict(zip((file.name for file in files), pool.map(of_file, files), strict=True))


def _readable(now: pa.DataType, stored: pa.DataType) -> pa.DataType:
    """The column's type now, but with numbers as they are stored. Fields that a stored struct lacks are read as null."""
    t = pa.types
    if t.is_struct(now):
        own = {field.name: field.type for field in stored}
        return pa.struct([x.with_type(_readable(x.type, own.get(x.name, x.type))) for x in now])
    if t.is_map(now):
        return pa.map_(now.key_type, _readable(now.item_type, stored.item_type))
    if is_list(now):
        return pa.list_(_readable(now.value_type, stored.value_type))
    return stored if is_number(now) else now


def _scan(spark: SparkSession, view: View, reader: DataFrameReader, files: Sequence[ViewFile]) -> DataFrame:
    scan = reader.parquet(*[_escape(_hadoop_path(file.uri)) for file in files])
    superseded = [file for file in files if file.superseded]
    if not superseded:
        return scan
    # Small files together, whose rows have at most a block each: call by call, numpy takes longer than their rows do.
    parts = runs(superseded, lambda file: file.superseded, BROADCAST_BLOCKS)
    table = pa.concat_tables([_blocks(view, part) for part in parts])
    # Sizes identify files if all differ: hashing names would take a seventh of the time of a read.
    by_size = len({file.bytes for file in superseded}) == len(superseded)
    file = "shiftleft(_metadata.file_size, 32)" if by_size else "xxhash64(_metadata.file_name)"
    of_file = "shiftleft(size, 32)" if by_size else "xxhash64(dead.file)"
    dead = frame_of(spark, table).selectExpr(f"dead AS {DEAD}", f"{of_file} ^ block AS {DEAD}_key")
    if table.num_rows <= BROADCAST_BLOCKS:
        dead = f.broadcast(dead)
    # Columns of the scan, since Spark 3.5 can't join by `_metadata`.
    row, name, key = f"{DEAD}_row", f"{DEAD}_name", f"{DEAD}_block"
    block = f"{file} ^ shiftright(_metadata.row_index, {BLOCK.bit_length() - 1})"
    scan = scan.selectExpr("*", f"_metadata.row_index AS {row}", f"_metadata.file_name AS {name}", f"{block} AS {key}")
    # Spark finds one long twice as fast as text and a long. If two keys collide the name decides: by `=` it would be in the key.
    number, bit = f"CAST(shiftright({row}, 6) & {BLOCK // 64 - 1} AS INT)", f"CAST({row} & 63 AS INT)"
    is_dead = f"getbit(get({DEAD}.words, {number}), {bit}) = 1"
    same_file = f"{name} >= {DEAD}.file AND {name} <= {DEAD}.file"
    return scan.join(dead, f.expr(f"{DEAD}_key = {key} AND {is_dead} AND {same_file}"), "left_anti")


def _blocks(view: View, files: Sequence[ViewFile]) -> pa.Table:
    """A row for each block with superseded rows: the file's size, the block's number, and the file's name with a bit per row."""
    of_rows, positions = superseded_rows(view, files)
    per_file, per_block = max(file.file.rows for file in files) // BLOCK + 1, BLOCK // 64
    places, at = np.unique(of_rows.astype(np.int64) * per_file + positions // BLOCK, return_inverse=True)
    of_blocks, numbers = np.divmod(places, per_file)
    words = np.zeros(len(places) * per_block, np.uint64)
    np.bitwise_or.at(words, at * per_block + positions % BLOCK // 64, 1 << (positions % 64).astype(np.uint64))
    marks = pa.ListArray.from_arrays(np.arange(len(places) + 1, dtype=np.int32) * per_block, words.view(np.int64))
    # In one struct, since Spark would unpack separate columns for each row. Names have an id in them, so they are unique.
    names = pa.array([PurePosixPath(file.name).name for file in files]).take(pa.array(of_blocks))
    dead = pa.StructArray.from_arrays([names, marks], ["file", "words"])
    return pa.table({"size": np.array([file.bytes for file in files])[of_blocks], "block": numbers, "dead": dead})


def _hadoop_options(spark: SparkSession, home: str) -> dict[str, str]:
    """Hadoop's settings for the table's bucket or account, without those that the session sets for this one or for all."""

    def is_set(*names: str) -> bool:
        return any(spark.conf.get(f"{p}{name}", None) is not None for p in ("", "spark.hadoop.") for name in names)

    scheme, place = urlsplit(home)[:2]
    if scheme == "s3a":
        from lakeupsert.storage.s3_client import s3a_settings  # brings boto3

        wanted, bucket = s3a_settings_of(spark, s3a_settings()), f"fs.s3a.bucket.{place}."
        if is_set("fs.s3a.access.key", f"{bucket}access.key"):
            wanted.pop("aws.credentials.provider", None)  # S3A's default chain starts with the key
        return {
            f"{bucket}{name}": value
            for name, value in wanted.items()
            if not is_set(f"fs.s3a.{name}", f"{bucket}{name}")
        }
    if scheme == "abfss":
        account = place.partition("@")[2]
        names = [f"fs.azure.account.{kind}{of}" for kind in ("auth.type", "key") for of in ("", f".{account}")]
        if not is_set(*names):
            return {f"fs.azure.account.{name}.{account}": value for name, value in azureaccount.abfs_settings().items()}
    if scheme == "wasb":
        return {"fs.azure.storage.emulator.account.name": azureaccount.EMULATOR}
    return {}


@contextmanager
def _list_files_in_driver(spark: SparkSession, *, local: bool) -> Iterator[None]:
    """Keep Spark from checking more than 32 local files in a job with a task for each: 730 files took 3.0 s so, 0.5 s without."""
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
def _explain_missing_jars(spark: SparkSession) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # Py4J's or Spark Connect's
        for classes, (store, jar) in _JARS.items():
            if missing := re.search(rf"(ClassNotFoundException|NoClassDefFoundError): .*({classes}).*", str(e)):
                hadoop = hadoop_version(spark)
                raise ConfigurationError(
                    "no-hadoop-jar",
                    f"Spark {spark.version} has no client for {store}, which is a separate package: {missing[0]}.",
                    next=f"start the session with spark.jars.packages=org.apache.hadoop:{jar}:{hadoop}, which matches the "
                    f"Hadoop {hadoop} of this Spark; or read the table with to_arrow",
                ) from e
        raise


def _keep(spark: SparkSession, view: View) -> None:
    master = spark.conf.get("spark.master") or ""
    if not master.startswith("local"):
        raise ConfigurationError(
            "latest-needs-local-spark",
            f"`latest` is merged into files on this machine, which the executors of {master!r} can't read.",
            next="publish (`lakeupsert run`) and read `published`; or use to_arrow, or a session with a local master",
        )
    _VIEWS.setdefault(spark, []).append(view)


class SparkTerms:
    """Expressions of Spark. Literals get the type in the files; how Spark would parse a literal depends on the session."""

    def column(self, field: pa.Field) -> Column:
        return f.col(_quote(field.name))

    def literal(self, value: pa.Scalar) -> Column:
        t = value.type
        if is_binary(t):
            return f.lit(value.as_py())
        return f.lit(str(to_json_values(pa.repeat(value, 1))[0])).cast(spark_type(t, ""))

    def is_null(self, column: Column) -> Column:
        return column.isNull()

    def is_nan(self, value: Column) -> Column:
        return f.when(value.isNotNull(), f.isnan(value))

    def is_in(self, column: Column, values: pa.Array) -> Column:
        return column.isin(*[self.literal(value) for value in values])

    def like(self, column: Column, pattern: str) -> Column:
        return column.like(pattern)


_PLAIN_TYPES: dict[pa.DataType, s.DataType] = {
    pa.bool_(): s.BooleanType(),
    pa.int8(): s.ByteType(),
    pa.int16(): s.ShortType(),
    pa.int32(): s.IntegerType(),
    pa.int64(): s.LongType(),
    pa.uint8(): s.ShortType(),
    pa.uint16(): s.IntegerType(),
    pa.uint32(): s.LongType(),
    pa.uint64(): s.DecimalType(20, 0),
    pa.float32(): s.FloatType(),
    pa.float64(): s.DoubleType(),
    pa.string(): s.StringType(),
    pa.large_string(): s.StringType(),
    pa.binary(): s.BinaryType(),
    pa.large_binary(): s.BinaryType(),
    pa.date32(): s.DateType(),
    pa.date64(): s.DateType(),
}


def spark_type(type_: pa.DataType, column: str) -> s.DataType:
    """Spark's type for an Arrow type, as its Parquet reader has it."""
    t = pa.types
    if type_ in _PLAIN_TYPES:
        return _PLAIN_TYPES[type_]
    if t.is_fixed_size_binary(type_):
        return s.BinaryType()
    if t.is_decimal(type_) and type_.precision <= 38:
        return s.DecimalType(type_.precision, type_.scale)
    if t.is_timestamp(type_) and type_.unit != "ns":
        return s.TimestampType() if type_.tz else s.TimestampNTZType()
    if is_list(type_) or t.is_fixed_size_list(type_):
        return s.ArrayType(spark_type(type_.value_type, column))
    if t.is_map(type_):
        return s.MapType(spark_type(type_.key_type, column), spark_type(type_.item_type, column))
    if t.is_struct(type_):
        return s.StructType([s.StructField(child.name, spark_type(child.type, column)) for child in type_])
    raise ConfigurationError(
        "unfit-for-spark",
        f"Column {column!r} is {type_}, and Spark has no type for it.",
        next="read the table with to_arrow, DuckDB or Polars, or set another type for the column in [tables.….schema]",
    )


def _hadoop_path(uri: str) -> str:
    """The path for Hadoop, which decodes nothing in a URL, not even in `file:`. Its own `s3:` client was removed long ago."""
    return (
        "file:" + plain_path(uri) if uri.startswith("file:") else re.sub("^s3:", "s3a:", azureaccount.hadoop_place(uri))
    )


def _escape(path: str) -> str:
    """Spark reads every path as a pattern, so special characters are escaped. The base path is not a pattern."""
    return "".join("\\" + c if c in "{}[]*?\\" else c for c in path)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
