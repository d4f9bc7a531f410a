"""Write files with values that few writers have, by the Python packages of `make writers`; run with a folder as argument."""

import datetime as dt
import decimal
import sys
import uuid
from pathlib import Path
from zoneinfo import ZoneInfo

import chdb
import duckdb
import fastavro
import fastparquet
import pandas
import polars
import pyorc

OUT = Path(sys.argv[1])
FIRST, SECOND = uuid.UUID(int=2**127 + 5), uuid.UUID(int=1)
NANOS = [1_704_067_200_123_456_789, -1]


def by_duckdb() -> None:
    values = {
        "uuid": (f"UUID '{FIRST}'", f"UUID '{SECOND}'"),
        "json": ("""'{"a":1}'::JSON""", "'[]'::JSON"),
        "enum": ("'b'::ENUM('a', 'b')", "'a'::ENUM('a', 'b')"),
        "time24": ("TIME '23:59:59.999999'", "TIME '24:00:00'"),
        "infinity": ("DATE '9999-12-31'", "'infinity'::DATE"),
        "variant": ("1::VARIANT", "'x'::VARIANT"),
        "nested": (f"{{'l': [UUID '{FIRST}']}}", f"{{'l': [UUID '{SECOND}', NULL]}}"),
    }
    for name, (one, other) in values.items():
        duckdb.sql(f"COPY (SELECT 0 id, {one} v UNION ALL SELECT 1, {other}) TO '{OUT}/duckdb_{name}.parquet'")


def by_chdb() -> None:
    values = {
        "enum.parquet": ("CAST('b' AS Enum8('a' = 1, 'b' = 2))", "CAST('a' AS Enum8('a' = 1, 'b' = 2))"),
        "uuid.parquet": (f"toUUID('{FIRST}')", f"toUUID('{SECOND}')"),
        "bytes.parquet": ("'é'", "unhex('ff')"),
        "nanos.avro": ("toDateTime64('2024-01-01 00:00:00', 9)", "toDateTime64('2024-01-01 00:00:00', 9)"),
    }
    formats = {"parquet": "Parquet", "avro": "Avro"}
    for name, (one, other) in values.items():
        rows = f"SELECT 0 id, {one} v UNION ALL SELECT 1, {other}"
        format_ = formats[name.rpartition(".")[2]]
        chdb.query(f"SELECT * FROM ({rows}) INTO OUTFILE '{OUT}/chdb_{name}' FORMAT {format_}")


def by_polars() -> None:
    polars.DataFrame({"id": [0, 1], "v": polars.Series([1.5, -2.0], dtype=polars.Float16)}).write_parquet(
        OUT / "polars_half.parquet"
    )
    polars.DataFrame({"id": [0, 1], "v": polars.Series(["b", "a"], dtype=polars.Enum(["a", "b"]))}).write_parquet(
        OUT / "polars_enum.parquet"
    )
    polars.DataFrame({"id": [0, 1], "v": polars.Series([1, 2], dtype=polars.Int128)}).write_parquet(
        OUT / "polars_int128.parquet"
    )


def by_fastparquet() -> None:
    moments = pandas.DataFrame({"id": [0, 1], "v": pandas.to_datetime(NANOS)})
    fastparquet.write(str(OUT / "fastparquet_int96.parquet"), moments, times="int96")
    spans = pandas.DataFrame({"id": [0, 1, 2], "v": pandas.to_timedelta([3600, -1, 90_000], unit="s")})
    fastparquet.write(str(OUT / "fastparquet_timedelta.parquet"), spans)


def by_pyorc() -> None:
    """Its values are moments in UTC; the file has what a clock in the zone showed."""
    for zone in ("America/New_York", "Asia/Kolkata"):
        place = ZoneInfo(zone)
        name = OUT / f"pyorc_{zone.replace('/', '_')}.orc"
        with name.open("wb") as file, pyorc.Writer(file, "struct<id:bigint,v:timestamp>", timezone=place) as writer:
            for i, hours in enumerate((-4.5, -0.25, 0.5, 4.5, 24 * 365)):
                writer.write((i, dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=hours, milliseconds=500)))


def by_fastavro() -> None:
    types = {
        "uuid": ({"type": "string", "logicalType": "uuid"}, [FIRST, SECOND]),
        "decimal": (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            [decimal.Decimal("0.29"), decimal.Decimal("-1.00")],
        ),
        "enum": ({"type": "enum", "name": "e", "symbols": ["a", "b"]}, ["b", "a"]),
    }
    for name, (type_, values) in types.items():
        fields = [{"name": "id", "type": "long"}, {"name": "v", "type": type_}]
        with (OUT / f"fastavro_{name}.avro").open("wb") as file:
            fastavro.writer(
                file,
                {"type": "record", "name": "r", "fields": fields},
                [{"id": i, "v": v} for i, v in enumerate(values)],
            )


for write in (by_duckdb, by_chdb, by_polars, by_fastparquet, by_pyorc, by_fastavro):
    write()
