"""Write the table of `values.py` by the Python packages of `make writers`; run by their Python, with a folder as argument.

A writer's function gives the table as the writer's own reader reads it back, or None if it has no reader that keeps the types.
`NAME.told` has the columns of file NAME, and their values if the reader told other ones than those of `values.py`.
"""

import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC
from pathlib import Path
from typing import Any

import arro3.io
import avro.datafile
import avro.io
import avro.schema
import chdb
import daft
import datafusion
import duckdb
import fastavro
import fastparquet
import pandas
import polars
import pyarrow as pa
import pyorc
from values import VALUES, as_arrow, as_text

OUT = Path(sys.argv[1])
ALL = set(VALUES)
TIMES = {"time_ms", "time_us", "time_ns"}
NESTED = {"list", "lists", "days", "struct", "map"}
OLD = {f"ts_{unit}{zone}" for unit in ("ms", "us") for zone in ("", "_utc")}
PLAIN = {
    *("id", "bool", "float64", "text", "date", "ts_us"),
    *(n for n in ALL if "int" in n or n.startswith("decimal")),
}
"""Columns of CSV. With `list` and `struct` those of JSON lines."""
Written = pa.Table | None


def by_polars(table: pa.Table, file: str) -> Written:
    polars.from_arrow(table).write_parquet(file)
    return polars.read_parquet(file).to_arrow()


def by_polars_avro(table: pa.Table, file: str) -> Written:
    polars.from_arrow(table).write_avro(file)
    return polars.read_avro(file).to_arrow()


def by_duckdb(table: pa.Table, file: str) -> Written:
    duckdb.from_arrow(table).create_view("written")
    duckdb.sql(f"COPY written TO '{file}'")
    return duckdb.sql(f"FROM '{file}'").to_arrow_table() if file.endswith("parquet") else None


def by_datafusion(table: pa.Table, file: str) -> Written:
    context = datafusion.SessionContext()
    frame = context.from_arrow(table)
    {
        "parquet": frame.write_parquet,
        "csv": lambda to: frame.write_csv(to, with_header=True),
        "jsonl": frame.write_json,
    }[file.rpartition(".")[2]](file)
    read = context.read_parquet(file).to_arrow_table() if file.endswith("parquet") else None
    return single(file) or read


def by_daft(table: pa.Table, file: str) -> Written:
    daft.from_arrow(table).write_parquet(file)
    read = daft.read_parquet(f"{file}/*.parquet").to_arrow()
    return single(file) or read


def single(folder: str) -> None:
    """Put the one file of a folder in its place."""
    if Path(folder).is_dir():
        (part,) = (path for path in Path(folder).iterdir() if path.stat().st_size)
        part.rename(f"{folder}.part")
        shutil.rmtree(folder)
        Path(f"{folder}.part").rename(folder)


def by_arro3(table: pa.Table, file: str) -> Written:
    arro3.io.write_parquet(table, file)
    return pa.table(arro3.io.read_parquet(file).read_all())


def by_chdb(table: pa.Table, file: str) -> Written:
    formats = {"parquet": "Parquet", "orc": "ORC", "avro": "Avro", "csv": "CSVWithNames", "jsonl": "JSONEachRow"}
    format_ = formats[file.rpartition(".")[2]]
    chdb.query(f"SELECT * FROM Python(table) INTO OUTFILE '{file}' FORMAT {format_}")
    if format_ not in ("Parquet", "ORC", "Avro"):
        return None
    read = pa.ipc.open_file(chdb.query(f"SELECT * FROM file('{file}', {format_})", "Arrow").bytes()).read_all()
    return read.drop_columns(["struct"])  # it shows a null of Parquet as a struct of nulls


def by_fastparquet(table: pa.Table, file: str) -> Written:
    """pandas' own types; a float without a value is NaN."""
    kinds = {name: name.replace("i", "I", 1).replace("uI", "UI") for name in table.column_names if "int" in name}
    series = {
        name: pandas.Series(table[name].to_pylist(), dtype=kinds.get(name, "object")) for name in table.column_names
    }
    fastparquet.write(file, pandas.DataFrame(series), object_encoding="infer")
    back = fastparquet.ParquetFile(file).to_pandas()
    return pa.table({field.name: pa.array(back[field.name], type=field.type) for field in table.schema})


def by_pandas(table: pa.Table, file: str) -> Written:
    frame = table.to_pandas(types_mapper=pandas.ArrowDtype)
    if file.endswith("csv"):
        frame.to_csv(file, index=False)
    else:
        frame.to_json(file, orient="records", lines=True, double_precision=15, date_format="iso", date_unit="us")


def by_polars_text(table: pa.Table, file: str) -> Written:
    frame = polars.from_arrow(table)
    frame.write_csv(file) if file.endswith("csv") else frame.write_ndjson(file)


def avro_type(name: str, type_: pa.DataType) -> Any:
    units = {"ms": "millis", "us": "micros", "ns": "nanos"}
    t = pa.types
    if t.is_decimal(type_):
        return {"type": "bytes", "logicalType": "decimal", "precision": type_.precision, "scale": type_.scale}
    if t.is_timestamp(type_):
        return {"type": "long", "logicalType": f"{'' if type_.tz else 'local-'}timestamp-{units[type_.unit]}"}
    if t.is_time(type_):
        return {"type": "int" if type_.unit == "ms" else "long", "logicalType": f"time-{units[type_.unit]}"}
    if t.is_date(type_):
        return {"type": "int", "logicalType": "date"}
    if t.is_list(type_):
        return {"type": "array", "items": ["null", avro_type(name, type_.value_type)]}
    if t.is_map(type_):
        return {"type": "map", "values": ["null", avro_type(name, type_.item_type)]}
    if t.is_struct(type_):
        return {"type": "record", "name": name, "fields": [field(f.name, f.type) for f in type_]}
    if t.is_integer(type_):
        return "long" if type_.bit_width == 64 else "int"
    special = {
        "uuid": {"type": "string", "logicalType": "uuid"},
        "enum": {"type": "enum", "name": "e", "symbols": ["a", "b"]},
    }
    names = {"bool": "boolean", "double": "double", "float": "float", "string": "string", "binary": "bytes"}
    return special.get(name, names[str(type_)])


def field(name: str, type_: pa.DataType) -> dict[str, Any]:
    return {"name": name, "type": ["null", avro_type(name, type_)]}


def avro_schema(table: pa.Table) -> dict[str, Any]:
    return {"type": "record", "name": "row", "fields": [field(f.name, f.type) for f in table.schema]}


def records(table: pa.Table) -> list[dict[str, Any]]:
    return list(table.to_pylist(maps_as_pydicts="strict"))


def by_fastavro(table: pa.Table, file: str) -> Written:
    with open(file, "wb") as to:
        fastavro.writer(to, fastavro.parse_schema(avro_schema(table)), records(table))
    with open(file, "rb") as source:
        return from_records(fastavro.reader(source), table.schema)


def by_avro(table: pa.Table, file: str) -> Written:
    schema = avro.schema.parse(json.dumps(avro_schema(table)))
    with avro.datafile.DataFileWriter(open(file, "wb"), avro.io.DatumWriter(), schema) as writer:
        for row in records(table):
            writer.append(row)
    with avro.datafile.DataFileReader(open(file, "rb"), avro.io.DatumReader()) as reader:
        return from_records(reader, table.schema)


def by_pyorc(table: pa.Table, file: str) -> Written:
    """Its fields without a value are None at every depth; timestamps are moments, which a clock in UTC shows."""
    struct = "struct<" + ",".join(f"{f.name}:{orc_type(f.name, f.type)}" for f in table.schema) + ">"
    with open(file, "wb") as to, pyorc.Writer(to, struct, struct_repr=pyorc.StructRepr.DICT) as writer:
        for row in table.to_pylist(maps_as_pydicts="strict"):
            writer.write(row | ({"ts_ns": row["ts_ns"] and row["ts_ns"].replace(tzinfo=UTC)} if "ts_ns" in row else {}))
    with open(file, "rb") as source:
        return from_records(pyorc.Reader(source, struct_repr=pyorc.StructRepr.DICT), table.schema)


def orc_type(name: str, type_: pa.DataType) -> str:
    t = pa.types
    if t.is_list(type_):
        return f"array<{orc_type(name, type_.value_type)}>"
    if t.is_map(type_):
        return f"map<{orc_type(name, type_.key_type)},{orc_type(name, type_.item_type)}>"
    if t.is_struct(type_):
        return "struct<" + ",".join(f"{f.name}:{orc_type(f.name, f.type)}" for f in type_) + ">"
    if t.is_timestamp(type_):
        return "timestamp with local time zone" if type_.tz else "timestamp"
    names = {"bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"}
    names |= {"double": "double", "float": "float", "date32[day]": "date"}
    return f"decimal({type_.precision},{type_.scale})" if t.is_decimal(type_) else names.get(str(type_), str(type_))


def from_records(rows: Iterable[Any], schema: pa.Schema) -> pa.Table:
    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: plain(value) for key, value in one.items()}
        return str(one) if isinstance(one, uuid.UUID) else one

    return pa.Table.from_pylist([plain(row) for row in rows], schema)


def write(name: str, by: Callable[[pa.Table, str], Written], columns: set[str], **types: pa.DataType) -> None:
    names = [one for one in VALUES if one in columns]
    table = pa.table({one: as_arrow(one, types.get(one)) for one in names})
    back = by(table, str(OUT / name))
    told = {one: as_text(back[one]) if back is not None and one in back.column_names else None for one in names}
    (OUT / f"{name}.told").write_text(json.dumps({one: told[one] or VALUES[one] for one in names}))


INTEGERS = {name for name in ALL if "int" in name} | {"id"}
UNSIGNED = {name for name in INTEGERS if "uint" in name}
SHORT = {"int8", "int16", *UNSIGNED}
NANOS = {"ts_ns", "ts_ns_utc"}
write("polars.parquet", by_polars, ALL, enum=pa.dictionary(pa.int32(), pa.string()))
write("polars.avro", by_polars_avro, ALL - SHORT - TIMES - NANOS - {"ts_ms_utc", "ts_us_utc", "map"})
write("duckdb.parquet", by_duckdb, ALL)
write("datafusion.parquet", by_datafusion, ALL)
write("daft.parquet", by_daft, ALL - {"time_ms"})
write("arro3.parquet", by_arro3, ALL)
write("chdb.parquet", by_chdb, ALL - TIMES - {"binary"})
write("chdb.orc", by_chdb, ALL - TIMES - OLD - {"binary"})
write("chdb.avro", by_chdb, ALL - TIMES - NANOS - {"binary"})
write("fastparquet.parquet", by_fastparquet, INTEGERS | {"bool", "text", "binary", "uuid"})
write("fastavro.avro", by_fastavro, ALL - SHORT - {"time_ns"} - NANOS)
write("avro.avro", by_avro, ALL - SHORT - {"time_ns"} - NANOS - {"ts_ms", "ts_us"})
write("pyorc.orc", by_pyorc, ALL - TIMES - OLD - {"json", "uuid", "enum"} - UNSIGNED)
TEXT = {
    "pandas": by_pandas,
    "polars": by_polars_text,
    "duckdb": by_duckdb,
    "datafusion": by_datafusion,
    "chdb": by_chdb,
}
for writer, by in TEXT.items():
    write(f"{writer}.csv", by, PLAIN)
    write(f"{writer}.jsonl", by, PLAIN - {"date"} if writer == "pandas" else PLAIN | {"list", "struct"})
