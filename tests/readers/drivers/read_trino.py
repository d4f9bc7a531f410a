"""Trino, by its client: `read_trino.py PORT FOLDER`. It makes a catalog for each catalog of Iceberg, and for Hive."""

import hashlib
import os
import sys
from functools import cache

import pyarrow as pa
import trino
from worker import Request, serve

PORT, FOLDER = int(sys.argv[1]), sys.argv[2]
CURSOR = trino.dbapi.connect(host="127.0.0.1", port=PORT, user="reader", timezone="UTC").cursor()
SCALARS = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "varchar": pa.string(),
    "varbinary": pa.binary(),
    "timestamp": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
}


def execute(statement: str) -> list[list[object]]:
    CURSOR.execute(statement)
    return CURSOR.fetchall()


@cache
def catalog(connector: str, settings: tuple[tuple[str, str], ...]) -> str:
    own = f"c{hashlib.sha1(repr((connector, settings)).encode()).hexdigest()[:12]}"
    listed = ", ".join(f"\"{key}\" = '{value}'" for key, value in settings)
    execute(f"CREATE CATALOG IF NOT EXISTS {own} USING {connector} WITH ({listed})")
    return own


def s3() -> tuple[tuple[str, str], ...]:
    """Settings for the store of this environment, if it has one."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        return ()
    return (
        ("fs.native-s3.enabled", "true"),
        ("s3.endpoint", os.environ["AWS_ENDPOINT_URL"]),
        ("s3.region", os.environ["AWS_DEFAULT_REGION"]),
        ("s3.path-style-access", "true"),
        ("s3.aws-access-key", os.environ["AWS_ACCESS_KEY_ID"]),
        ("s3.aws-secret-key", os.environ["AWS_SECRET_ACCESS_KEY"]),
    )


@cache
def delta_schema() -> str:
    own = catalog(
        "delta_lake",
        (
            ("hive.metastore", "file"),
            ("hive.metastore.catalog.dir", f"file://{FOLDER}/delta"),
            ("delta.register-table-procedure.enabled", "true"),
            ("delta.vacuum.min-retention", "0s"),
            ("delta.metadata.cache-ttl", "0s"),
            ("fs.hadoop.enabled", "true"),
            *s3(),
        ),
    )
    schema = (
        f"{own}.process_{os.getpid()}"  # what an earlier process registered is in the server, but not in these caches
    )
    execute(f"CREATE SCHEMA {schema}")
    return schema


@cache
def delta_table(root: str) -> str:
    own, schema = delta_schema().split(".")
    table = f"t{hashlib.sha1(root.encode()).hexdigest()[:12]}"
    address = (root if "://" in root else f"file://{root}").replace("'", "''")
    execute(f"CALL {own}.system.register_table('{schema}', '{table}', '{address}')")
    return f"{own}.{schema}.{table}"


def opened(request: Request) -> str:
    if request.format == "delta":
        return delta_table(request.root)
    if request.format == "hive":
        settings = (
            ("hive.metastore.uri", request.catalog),
            ("hive.timestamp-precision", "MICROSECONDS"),
            ("hive.security", "read-only"),
            ("fs.hadoop.enabled", "true"),
        )
        return f"{catalog('hive', settings)}.{request.name}"
    name, identifier = request.name.split(".", 1)
    if request.has_rest_catalog:
        kind = (("iceberg.catalog.type", "rest"), ("iceberg.rest-catalog.uri", request.catalog))
        return f"{catalog('iceberg', (*kind, ('fs.hadoop.enabled', 'true')))}.{identifier}"
    settings = (
        ("iceberg.catalog.type", "jdbc"),
        ("fs.hadoop.enabled", "true"),
        ("iceberg.jdbc-catalog.driver-class", "org.sqlite.JDBC"),
        ("iceberg.jdbc-catalog.connection-url", f"jdbc:sqlite:{request.catalog}"),
        ("iceberg.jdbc-catalog.catalog-name", name),
        ("iceberg.jdbc-catalog.default-warehouse-dir", f"file://{request.catalog}.warehouse"),
        ("iceberg.jdbc-catalog.schema-version", "V1"),
        ("iceberg.expire-snapshots.min-retention", "0s"),
        ("iceberg.remove-orphan-files.min-retention", "0s"),
    )
    return f"{catalog('iceberg', settings)}.{identifier}"


def arrow_type(signature: dict) -> pa.DataType:
    arguments = [argument["value"] for argument in signature["arguments"]]
    match signature["rawType"]:
        case "row":
            return pa.struct([(item["fieldName"]["name"], arrow_type(item["typeSignature"])) for item in arguments])
        case "array":
            return pa.list_(arrow_type(arguments[0]))
        case "map":
            return pa.map_(*map(arrow_type, arguments))
        case "decimal":
            return pa.decimal128(*arguments)
        case scalar:
            return SCALARS[scalar]


def as_arrow_takes_it(value: object, kind: pa.DataType) -> object:
    """The client gives rows as tuples and maps as dicts."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: as_arrow_takes_it(item, field.type) for field, item in zip(kind, value, strict=True)}
    if pa.types.is_map(kind):
        return [(key, as_arrow_takes_it(item, kind.item_type)) for key, item in value.items()]
    if pa.types.is_list(kind):
        return [as_arrow_takes_it(item, kind.value_type) for item in value]
    return value


def read(request: Request) -> pa.Table:
    version = "" if request.version is None else f" FOR VERSION AS OF {request.version}"
    rows = execute(request.select(opened(request) + version))
    schema = pa.schema([(column["name"], arrow_type(column["typeSignature"])) for column in CURSOR._query.columns])
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [
        pa.array([as_arrow_takes_it(value, field.type) for value in values], field.type)
        for values, field in zip(columns, schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def write(request: Request) -> None:
    table = opened(request)
    own, schema, name = table.split(".")
    execute(request.statement.format(table=table, catalog=own, schema=schema, name=name))


serve(read, write)
