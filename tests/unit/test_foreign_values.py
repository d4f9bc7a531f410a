"""Values that writers mean otherwise than Arrow reads them: calendars, zones, INT96, and types that become text."""

import contextlib
import io
import struct
import uuid
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from lakeupsert.config import Reading
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.adopted import read_footer
from lakeupsert.landing.files import survey
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.glimpse import read_beginning
from lakeupsert.storage import LocalStore
from tests.harness.specs import create

ORC = Path(__file__).parent / "orc"
IDS = [uuid.UUID(int=2**127 + 5), None, uuid.UUID(int=1)]
TEXTS = [None if one is None else str(one) for one in IDS]
SPARK = {"org.apache.spark.version": "4.1.4", "org.apache.spark.legacyDateTime": "", "org.apache.spark.legacyINT96": ""}


class Folder:
    """Landing files, each read by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root)

    def put(self, name: str, content: Any, **options: Any) -> LandingInput:
        if isinstance(content, pa.Table):
            pq.write_table(content, self.root / name, **options)
        else:
            (self.root / name).write_bytes(content)
        found = self.store.head(name)
        assert found is not None
        return LandingInput(name, found.size, found.etag, 0)

    def types(self, file: LandingInput) -> dict[str, Any]:
        found = survey(self.store, file, Reading(), None, frozenset())
        assert found.schema is not None, found.unreadable
        return dict(zip(found.schema.names, found.schema.types, strict=True))

    def rows(self, file: LandingInput) -> Any:
        return read_beginning(self.store, file, 1000, 1 << 30).rows

    def read(self, file: LandingInput, types: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """The values of ``v`` in a table with its type, and the places of refused rows."""
        schema = pa.schema([("id", pa.int64()), *types.items()])
        spec = create(schema, table_id="t", key=["id"], order_by=["id"], partition_by=[], delete=None, stamped=False)
        found = list(read_rows(self.store, file, Reading(), RowRules(spec, 0)))
        refused = [row for rows in found for row in rows.quarantined.to_pylist()]
        assert {row["reason_code"] for row in refused} <= {"bad_type"}
        values = [value for rows in found for value in rows.accepted["v"].to_pylist()]
        return values, [row["position"] for row in refused]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def table_of(values: Any, **keys: str) -> Any:
    return pa.table({"id": pa.array(range(len(values)), pa.int64()), "v": values}).replace_schema_metadata(keys or None)


def avro_of(type_: Any, values: list[Any], **keys: str) -> bytes:
    out = io.BytesIO()
    fields = [{"name": "id", "type": "long"}, {"name": "v", "type": ["null", type_]}]
    schema = {"type": "record", "name": "r", "fields": fields}
    fastavro.writer(out, schema, [{"id": i, "v": v} for i, v in enumerate(values)], metadata=keys)
    return out.getvalue()


# ---------------------------------------------------------------- types that are text


def uuids() -> Any:
    return pa.ExtensionArray.from_storage(pa.uuid(), pa.array([v and v.bytes for v in IDS], pa.binary(16)))


def typed_columns() -> dict[str, tuple[Any, list[Any]]]:
    return {
        "uuid": (uuids(), TEXTS),
        "json": (
            pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a":1}', None, "[]"])),
            ['{"a":1}', None, "[]"],
        ),
    }


def nested(values: Any) -> Any:
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), values)
    return pa.StructArray.from_arrays([lists], ["x"])


@pytest.mark.parametrize("name", ["uuid", "json"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_type_of_parquet_that_is_text_goes_into_text_and_the_reverse(
    folder: Folder, name: str, is_nested: bool
) -> None:
    array, texts = typed_columns()[name]
    plain = pa.array(texts, pa.string())
    values: list[Any] = texts
    if is_nested:
        array, plain, values = nested(array), nested(plain), [{"x": [v]} for v in texts]
    typed, text = folder.put("typed.parquet", table_of(array)), folder.put("text.parquet", table_of(plain))
    assert folder.types(typed) == folder.types(text)
    assert folder.rows(typed).equals(folder.rows(text))
    assert folder.read(typed, {"v": plain.type}) == (values, [])
    for file in (typed, text):
        found, refused = folder.read(file, {"v": array.type})
        assert refused == []
        assert (found == array.to_pylist()) or is_nested
    if not is_nested:
        fixed = array.storage.type
        stored = array.storage.to_pylist()
        assert folder.read(typed, {"v": fixed}) == folder.read(text, {"v": fixed}) == (stored, [])


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "logicalType": "uuid"}, {"type": "fixed", "name": "f", "size": 16, "logicalType": "uuid"}],
)
def test_uuid_of_avro_equals_that_of_parquet(folder: Folder, schema: Any) -> None:
    avro = folder.put("a.avro", avro_of(schema, [v if schema["type"] == "string" else v and v.bytes for v in IDS]))
    parquet = folder.put("b.parquet", table_of(uuids()))
    assert folder.rows(avro)["v"].to_pylist() == folder.rows(parquet)["v"].to_pylist() == TEXTS
    for type_ in (pa.string(), pa.uuid(), pa.binary(16)):
        assert folder.read(avro, {"v": type_}) == folder.read(parquet, {"v": type_})


def test_text_that_is_no_uuid_is_refused_where_the_table_has_uuids(folder: Folder) -> None:
    file = folder.put("a.parquet", table_of(pa.array([TEXTS[0], "no", TEXTS[2].upper(), None, f"{TEXTS[0]}\n"])))  # type: ignore[union-attr]
    assert folder.read(file, {"v": pa.uuid()}) == ([IDS[0], IDS[2], None], [1, 4])


def enum_file(folder: Folder) -> LandingInput:
    """No writer in the environment annotates an ENUM: the footer's STRING becomes one, which has as many bytes."""
    file = folder.put("a.parquet", table_of(pa.array(["b", None, "a"])), compression="none", store_schema=False)
    data = (folder.root / file.path).read_bytes()
    # SchemaElement of Thrift: field 6 converted type UTF8 (0), field 10 logical type, a union whose field 1 is STRING.
    string, enum = b"\x25\x00\x4c\x1c\x00\x00", b"\x25\x08\x4c\x4c\x00\x00"
    assert data.count(string) == 1
    return folder.put("a.parquet", data.replace(string, enum))


def test_enum_of_parquet_is_text_and_goes_into_bytes(folder: Folder) -> None:
    file = enum_file(folder)
    assert pq.ParquetFile(folder.root / file.path).schema.column(1).logical_type.type == "ENUM"
    assert folder.types(file)["v"] == pa.string()
    assert folder.read(file, {"v": pa.string()}) == (["b", None, "a"], [])
    assert folder.read(file, {"v": pa.binary()}) == ([b"b", None, b"a"], [])


def test_half_precision_becomes_single(folder: Folder) -> None:
    halves = np.array([1.5, 65504, -(2**-24)], np.float16)
    file = folder.put("a.parquet", table_of(pa.array(halves)))
    assert folder.types(file)["v"] == pa.float32()
    assert folder.rows(file)["v"].to_pylist() == halves.tolist()
    assert folder.read(file, {"v": pa.float16()}) == (halves.tolist(), [])


@pytest.mark.parametrize("is_nested", [False, True])
def test_big_decimal_of_avro_names_its_column(folder: Folder, is_nested: bool) -> None:
    type_: Any = {"type": "bytes", "logicalType": "big-decimal"}
    if is_nested:
        type_ = {"type": "array", "items": type_}
    file = folder.put("a.avro", avro_of(type_, [None]))
    found = survey(folder.store, file, Reading(), None, frozenset())
    assert "'v'" in (found.unreadable or "")
    assert "big-decimal" in (found.unreadable or "")


# ---------------------------------------------------------------- INT96


def int96_file(
    folder: Folder, moments: list[int | None], *, micros: bool = False, shape: Any = None, **keys: str
) -> LandingInput:
    values = pa.array(moments, pa.int64()).view(pa.timestamp("us" if micros else "ns"))
    array = shape(values) if shape else values
    return folder.put("a.parquet", table_of(array, **keys), use_deprecated_int96_timestamps=True, store_schema=False)


NANOS: list[int | None] = [1_704_067_200_123_456_789, -1, None, 9_223_372_036_854_775_807]


@pytest.mark.parametrize("shape", [None, lambda v: nested(v.slice(0, 3))])
def test_int96_keeps_nanoseconds(folder: Folder, shape: Any) -> None:
    file = int96_file(folder, NANOS, shape=shape)
    rows = folder.rows(file)["v"].combine_chunks()
    found = rows if shape is None else rows.field("x").values
    assert found.type == pa.timestamp("ns")
    assert found.view(pa.int64()).to_pylist() == NANOS[: 4 if shape is None else 3]
    if shape is None:
        assert folder.read(file, {"v": pa.timestamp("us")})[1] == [0, 1, 3]


def test_int96_without_nanoseconds_is_microseconds_to_the_year_9999(folder: Folder) -> None:
    far = 253_402_300_799_999_999
    file = int96_file(folder, [0, far, None, -62_135_596_800_000_000], micros=True)
    assert folder.types(file)["v"] == pa.timestamp("us")
    values, refused = folder.read(file, {"v": pa.timestamp("us")})
    assert (values[1], values[3], refused) == (datetime(9999, 12, 31, 23, 59, 59, 999999), datetime(1, 1, 1), [])
    assert folder.read(file, {"v": pa.timestamp("ns")})[1] == [1, 3]


def test_int96_with_nanoseconds_and_far_years_is_decided_by_row(folder: Folder) -> None:
    """No writer in the environment mixes both, so 5,000 nanoseconds become 5,007 in the bytes of a page."""
    rows = table_of(pa.array([253_402_300_799_000_000, 5, None, 1], pa.int64()).view(pa.timestamp("us")))
    plain = {
        "use_dictionary": False,
        "compression": "none",
        "use_deprecated_int96_timestamps": True,
        "store_schema": False,
    }
    file = folder.put("a.parquet", rows, **plain)
    data = (folder.root / file.path).read_bytes()
    five, other = (struct.pack("<qi", nanos, 2_440_588) for nanos in (5000, 5007))
    assert data.count(five) == 1
    file = folder.put("b.parquet", data.replace(five, other))
    assert folder.types(file)["v"] == pa.timestamp("us")
    far, one = datetime(9999, 12, 31, 23, 59, 59), datetime(1970, 1, 1, 0, 0, 0, 1)
    assert folder.read(file, {"v": pa.timestamp("us")}) == ([far, None, one], [1])
    values, refused = folder.read(file, {"v": pa.timestamp("ns")})
    assert ([v and v.value for v in values], refused) == ([5007, None, 1000], [0])


# ---------------------------------------------------------------- old calendars

HYBRID = {
    (1500, 1, 1): -171_655,
    (1582, 10, 4): -141_428,
    (1, 1, 1): -719_164,
    (1582, 10, 15): -141_427,
    (2024, 7, 1): 19_905,
}
"""Days of the hybrid calendar, as Spark 4.1.4 stores them."""
DAYS = [date(*name) for name in HYBRID]


def hybrid_dates() -> Any:
    return pa.array(list(HYBRID.values()), pa.int32()).view(pa.date32())


def hybrid_moments() -> Any:
    """As Spark in New York stores 06:00 of these days: before 1900 it counts by its standard time."""
    seconds = [day * 86_400 + 6 * 3600 + (4 if day > 0 else 5) * 3600 for day in HYBRID.values()]
    return pa.array(seconds, pa.int64()).cast(pa.timestamp("s")).cast(pa.timestamp("us"))


def clocks_in_new_york(values: Any) -> list[str]:
    local = pc.local_timestamp(values.cast(pa.timestamp("us", "America/New_York")))
    return local.cast(pa.timestamp("s")).cast(pa.string()).to_pylist()  # Python has no year 0


CLOCKS = [f"{day} 06:00:00" for day in DAYS]
ZONE = {"org.apache.spark.timeZone": "America/New_York"}


@pytest.mark.parametrize(
    ("keys", "old_dates", "old_int96"),
    [
        (SPARK | ZONE, True, True),
        ({"org.apache.spark.version": "4.1.4", "org.apache.spark.legacyDateTime": ""} | ZONE, True, False),
        ({"org.apache.spark.version": "4.1.4", "org.apache.spark.legacyINT96": ""} | ZONE, False, True),
        ({"org.apache.spark.version": "3.0.1"} | ZONE, False, True),
        ({"org.apache.spark.version": "3.1.0"} | ZONE, False, False),
        ({"org.apache.spark.version": "2.4.8"} | ZONE, True, True),
        ({"org.apache.spark.sql.parquet.row.metadata": "{}"} | ZONE, True, True),
        ({}, False, False),
    ],
)
def test_keys_of_spark_say_which_dates_of_parquet_are_old(
    folder: Folder, keys: dict[str, str], old_dates: bool, old_int96: bool
) -> None:
    moments = hybrid_moments()
    columns = {
        "d": hybrid_dates(),
        "ts": moments.cast(pa.timestamp("us", "UTC")),
        "ms": moments.cast(pa.timestamp("ms", "UTC")),
        "ntz": moments,  # Spark has no old ones
        "x": nested(hybrid_dates().slice(0, 3)).take(pa.array([0, 1, 2, None, None])),
    }
    plain = folder.put("a.parquet", pa.table(columns).replace_schema_metadata(keys))
    int96 = folder.put("b.parquet", table_of(moments, **keys), use_deprecated_int96_timestamps=True)
    rows = folder.rows(plain)
    assert (rows["d"].to_pylist() == DAYS) if old_dates else rows["d"].combine_chunks().equals(hybrid_dates())
    assert (clocks_in_new_york(rows["ts"]) == CLOCKS) == old_dates
    assert (clocks_in_new_york(rows["ms"]) == CLOCKS) == old_dates
    assert rows["ntz"].combine_chunks().equals(moments)
    if old_dates:
        assert rows["x"].to_pylist() == [*({"x": [day]} for day in DAYS[:3]), None, None]
    assert (clocks_in_new_york(folder.rows(int96)["v"]) == CLOCKS) == old_int96
    plain = folder.put("c.parquet", pa.table(columns).slice(0, 2).replace_schema_metadata(keys))  # without the year 0
    int96 = folder.put("d.parquet", table_of(moments.slice(0, 2), **keys), use_deprecated_int96_timestamps=True)
    for file, is_old in ((plain, old_dates), (int96, old_int96)):
        info = folder.store.head(file.path)
        assert info is not None
        with contextlib.nullcontext() if not is_old else pytest.raises(UnreadableFileError, match="calendar of Spark"):
            read_footer(folder.store, info, ["id"], [])


@pytest.mark.parametrize(
    ("keys", "is_old"),
    [
        (SPARK | ZONE, True),
        ({"org.apache.spark.version": "2.4.8"} | ZONE, True),
        ({"org.apache.spark.version": "4.1.4"} | ZONE, False),
        ({}, False),
    ],
)
def test_keys_of_spark_say_which_dates_of_avro_are_old(folder: Folder, keys: dict[str, str], is_old: bool) -> None:
    days, moments = list(HYBRID.values()), hybrid_moments().view(pa.int64()).to_pylist()
    day = {"type": "int", "logicalType": "date"}
    types: dict[str, tuple[Any, list[Any]]] = {
        "d": (["null", day], days),
        "ts": ({"type": "long", "logicalType": "timestamp-micros"}, moments),
        "ntz": ({"type": "long", "logicalType": "local-timestamp-micros"}, moments),
        "x": ({"type": "array", "items": {"type": "map", "values": day}}, [[{"k": one}] for one in days]),
    }
    fields = [{"name": name, "type": type_} for name, (type_, _) in types.items()]
    rows = [dict(zip(types, row, strict=True)) for row in zip(*(values for _, values in types.values()), strict=True)]
    out = io.BytesIO()
    fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, rows, metadata=keys)
    found = folder.rows(folder.put("a.avro", out.getvalue()))
    assert (found["d"].to_pylist() == DAYS) if is_old else found["d"].combine_chunks().equals(hybrid_dates())
    assert (clocks_in_new_york(found["ts"]) == CLOCKS) == is_old
    assert found["ntz"].combine_chunks().view(pa.int64()).to_pylist() == moments
    assert not is_old or found["x"].to_pylist() == [[[("k", one)]] for one in DAYS]


# ---------------------------------------------------------------- ORC


def lines_of(name: str) -> list[str]:
    return (ORC / name).read_text().splitlines()


@pytest.mark.parametrize("zone", ["new-york", "kolkata", "paris"])
def test_timestamps_of_orc_are_those_that_java_reads(folder: Folder, zone: str) -> None:
    """The files hold the lines of `labels.txt`, written by orc-core 2.2.2 in this zone, and `ZONE.txt` has what it reads.

    In the last millisecond before 1970 of UTC the format is ambiguous, so Java, too, does not read what it wrote.
    """
    file = folder.put("a.orc", (ORC / f"orc-2.2.2-{zone}.orc").read_bytes())
    rows = folder.rows(file)
    java = [line.split("\t") for line in lines_of(f"{zone}.txt")]
    labels = lines_of("labels.txt")
    for i, (clock, milliseconds, _) in enumerate(java):
        seconds, _, fraction = clock.partition(".")
        assert rows["ts"].combine_chunks()[i].cast(pa.string()).as_py() == f"{seconds}.{fraction:<09}"
        assert rows["l"][i][0].as_py() == rows["ts"][i].as_py()
        assert rows["tsi"].combine_chunks().view(pa.int64())[i].as_py() // 10**6 == int(milliseconds)
        assert str(rows["d"][i].as_py()) == labels[i][:10]


def test_dates_of_orc_of_spark_stay_what_they_are(folder: Folder) -> None:
    rows = folder.rows(folder.put("a.orc", (ORC / "spark-4.1.4-new-york.orc").read_bytes()))
    assert rows["d"].to_pylist() == [date(1500, 1, 1), date(1582, 10, 4), date(1, 1, 1), date(2024, 7, 1)]
    clocks = [
        "1700-01-01 00:00:00",
        "1850-06-01 12:00:00.123456",
        "1969-12-31 23:59:59.500000",
        "2024-07-01 12:00:00.123456",
    ]
    assert [str(one) for one in rows["ts"].cast(pa.timestamp("us")).to_pylist()] == clocks


def test_timestamp_ntz_of_orc_of_spark_is_a_timestamp(folder: Folder) -> None:
    """Spark stores it as bigint. A table that took it for one keeps it so."""
    file = folder.put("a.orc", (ORC / "spark-4.1.4-new-york.orc").read_bytes())
    assert folder.types(file)["ntz"] == pa.timestamp("us")
    assert str(folder.rows(file)["ntz"][1].as_py()) == "1850-06-01 12:00:00.123456"
    column = pa.field("v", pa.int64(), metadata={"spark.sql.catalyst.type": "timestamp_ntz"})
    out = io.BytesIO()
    nested = pa.struct([column, ("l", pa.list_(column))])
    values = [{"v": 1, "l": [2, None]}, None, {"v": None, "l": None}]
    schema = pa.schema([("id", pa.int64()), ("n", nested), column])
    table = pa.Table.from_arrays([pa.array([1, 2, 3]), pa.array(values, nested), pa.array([4, None, 5])], schema=schema)
    orc.write_table(table, out)
    file = folder.put("b.orc", out.getvalue())
    clock = pa.timestamp("us")
    assert folder.types(file)["v"] == clock
    assert folder.rows(file)["n"].type == pa.struct([("v", clock), ("l", pa.list_(clock))])
    assert folder.read(file, {"v": pa.int64(), "n": folder.types(file)["n"]}) == ([4, None, 5], [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"id,v\n0,t\n1,f\n2,TRUE\n3,\n4,T\n5,yes\n"),
        (
            "a.jsonl",
            b"".join(
                b'{"id": %d, "v": %s}\n' % one for one in enumerate([b'"t"', b'"f"', b"true", b"null", b'"T"', b"7"])
            ),
        ),
        ("a.parquet", table_of(["t", "f", "true", None, "T", "yes"])),
    ],
)
def test_t_and_f_of_postgresql_are_booleans(folder: Folder, name: str, content: Any) -> None:
    values, refused = folder.read(folder.put(name, content), {"v": pa.bool_()})
    assert values == [True, False, True, None]
    assert len(refused) == 2


def test_timestamps_that_are_finer_than_their_column_name_the_type_that_holds_them(folder: Folder) -> None:
    """In place of formats of dates, which a column that is a timestamp in the file does not need."""
    nanos, millis, far = (
        pa.array([1], pa.timestamp("ns")),
        pa.array([1001], pa.timestamp("ms")),
        b"id,v\n0,03/04/2024\n",
    )
    int96 = {"use_deprecated_int96_timestamps": True, "store_schema": False}
    for name, content, options, type_, expected in (
        ("a.parquet", table_of(nanos), int96, pa.timestamp("us"), "schema retype v 'timestamp[ns]'"),
        ("b.parquet", table_of(nanos), {}, pa.timestamp("us", "UTC"), "schema retype v 'timestamp[ns, tz=UTC]'"),
        ("c.parquet", table_of(millis), {}, pa.timestamp("s"), "schema retype v 'timestamp[us]'"),
        (
            "d.csv",
            b"id,v\n0,2024-01-01 00:00:00.123456789\n",
            {},
            pa.timestamp("us"),
            "schema retype v 'timestamp[ns]'",
        ),
        ("e.csv", far, {}, pa.timestamp("us"), "under [tables.t.read], for example `dates = {"),
    ):
        schema = pa.schema([("id", pa.int64()), ("v", type_)])
        spec = create(schema, table_id="t", key=["id"], order_by=["id"], partition_by=[], delete=None, stamped=False)
        rows = next(
            read_rows(folder.store, folder.put(name, content, **options), Reading(), RowRules(spec, 0, table="t"))
        )
        reason = rows.quarantined["reason"][0].as_py()
        assert expected in reason
        assert ("`dates = {" in reason) == (name == "e.csv")


def test_timestamps_of_orc_of_pyarrow_around_1970_stay(folder: Folder) -> None:
    moments = pa.array([-1_500_000, -1_000_000, -500_000, -1, 0, 1, 500_000, 1_500_000], pa.timestamp("us"))
    out = io.BytesIO()
    orc.write_table(pa.table({"v": moments}), out)
    assert (
        folder.rows(folder.put("a.orc", out.getvalue()))["v"].combine_chunks().cast(pa.timestamp("us")).equals(moments)
    )


def test_timestamps_of_orc_java_2_3_in_new_york(folder: Folder) -> None:
    rows = folder.rows(folder.put("a.orc", (ORC / "orc-2.3.0-new-york.orc").read_bytes()))
    clocks = [
        "2024-07-01 12:00:00.123456",
        "1969-12-31 23:59:58.500000",
        "1969-12-31 20:00:00.500000",
        "1700-01-01 00:00:00",
    ]
    values = rows["v"].combine_chunks().view(pa.int64()).to_pylist()
    assert [str(datetime(1970, 1, 1) + timedelta(microseconds=one // 1000)) for one in values] == clocks
