"""Files of other packages, landed: every value is the one that was written, or its file or row is refused.

`make test-writers` installs the packages. `values.py` has the table that all of them write; `special.py` writes values that few
have, and the constants here are its own.
"""

import json
import os
import subprocess
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert import Table
from lakeupsert.config import ReadSettings, TableSettings
from lakeupsert.errors import RefusedError

pytestmark = pytest.mark.writers
HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build/writers"
PYTHON = BUILD / "venv/bin/python"
FIRST, SECOND = "80000000-0000-0000-0000-000000000005", "00000000-0000-0000-0000-000000000001"
HOURS = (-4.5, -0.25, 0.5, 4.5, 24 * 365)


def clocks(offset: float) -> list[datetime]:
    """What a clock showed; no daylight saving time in winter."""
    return [datetime(1970, 1, 1) + timedelta(hours=hours + offset, milliseconds=500) for hours in HOURS]


EXPECTED: dict[str, tuple[Any, list[Any], list[int]]] = {
    "duckdb_uuid.parquet": (pa.string(), [FIRST, SECOND], []),
    "duckdb_json.parquet": (pa.string(), ['{"a":1}', "[]"], []),
    "duckdb_enum.parquet": (pa.string(), ["b", "a"], []),
    "duckdb_time24.parquet": (pa.time64("us"), [time(23, 59, 59, 999999)], [1]),  # 24:00:00 is a value of its TIME
    "duckdb_infinity.parquet": (pa.date32(), [date(9999, 12, 31)], [1]),
    "duckdb_nested.parquet": (pa.struct([("l", pa.list_(pa.string()))]), [{"l": [FIRST]}, {"l": [SECOND, None]}], []),
    "chdb_enum.parquet": (pa.string(), ["b", "a"], []),
    "chdb_uuid.parquet": (pa.string(), [FIRST, SECOND], []),
    "chdb_bytes.parquet": (pa.string(), ["é"], [1]),  # its String is bytes, called text
    "polars_half.parquet": (pa.float32(), [1.5, -2.0], []),
    "polars_enum.parquet": (pa.string(), ["b", "a"], []),
    "fastparquet_int96.parquet": (pa.timestamp("ns"), [1_704_067_200_123_456_789, -1], []),
    # A timedelta becomes a time of day: it has no other type.
    "fastparquet_timedelta.parquet": (pa.time64("us"), [time(1)], [1, 2]),
    "pyorc_America_New_York.orc": (pa.timestamp("ns"), clocks(-5), []),
    "pyorc_Asia_Kolkata.orc": (pa.timestamp("ns"), clocks(5.5), []),
    "fastavro_uuid.avro": (pa.string(), [FIRST, SECOND], []),
    "fastavro_decimal.avro": (pa.decimal128(9, 2), [Decimal("0.29"), Decimal("-1.00")], []),
    "fastavro_enum.avro": (pa.string(), ["b", "a"], []),
}
"""The type of the column, the values, and the places of refused rows."""
SET_ASIDE = {"duckdb_variant.parquet": "'v' is a VARIANT", "polars_int128.parquet": "'v': integers of 128 bits"}
SET_ASIDE["chdb_nanos.avro"] = (
    "column 'v': Decimal"  # nanoseconds as decimal(18, 9), which does not hold those of today
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writers")
    subprocess.run([PYTHON, HERE / "special.py", folder], check=True)
    return folder


def test_every_file_is_expected(files: Path) -> None:
    assert {path.name for path in files.iterdir()} == {*EXPECTED, *SET_ASIDE}


@pytest.mark.parametrize("name", [*EXPECTED, *SET_ASIDE])
def test_values_are_those_that_were_written(name: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / name).write_bytes((files / name).read_bytes())
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("id",),
        partition_by=(),
        schema={"id": "bigint"},
        quarantine_limit="100%",
    )
    table = Table("t", settings)
    if name in SET_ASIDE:
        with pytest.raises(RefusedError, match=SET_ASIDE[name]):
            table.run(host="local")
        return
    table.run(host="local")
    refused = table.quarantine().read_all().to_pylist()
    type_, values, places = EXPECTED[name]
    shown = table.to_arrow().read_all().sort_by("id")
    assert not table.reconcile(deep=True).unbalanced
    assert shown.schema.field("v").type == type_
    found = [one.value if isinstance(values[0], int) else one.as_py() for one in shown["v"].combine_chunks()]
    assert found == values
    assert [row["position"] for row in refused] == places


OWN = {
    "chdb.orc": {"uint8", "uint16", "uint32", "uint64", "list", "lists", "days", "map"},
    "chdb.avro": {"uint32", "uint64", "list", "lists", "days", "map"},
    "chdb.parquet": {"list", "lists", "days", "map"},
    "dsnp-parquetjs.parquet": {"ts_us_utc", "decimal_9_2", "json"},
    "parquetjs.parquet": {"float32", "float64", "json"},
    "parquets.parquet": {"float32", "float64", "json"},
    "polars.avro": {"decimal_38_10"},
    "pyorc.orc": {"ts_ns", "ts_ns_utc"},
}
"""Columns in which a writer stores other values than it was given, as its own reader shows."""
NO_NUMBER = dict.fromkeys(("Infinity", "-Infinity", "NaN"))
INSTEAD: dict[str, dict[str, dict[str, Any]]] = {
    "chdb.jsonl": {"float64": {**NO_NUMBER, "-0.0": "0.0"}},  # -0, a whole number
    "datafusion.jsonl": {"float64": NO_NUMBER},
    "pandas.jsonl": {"float64": {**NO_NUMBER, "-0.0": "0.0"}},
    "polars.jsonl": {"float64": NO_NUMBER},
}
"""What the text of a writer has instead of a value."""
REFUSED = {
    "pandas.jsonl": (
        {4},
        "Column 'float64'",
    ),  # 1.79769313486232e+308: its fifteen digits are above the greatest double
    "duckdb.jsonl": ({2, 3, 8}, "NaN and Infinity are not JSON"),
}
"""The ids of refused rows, and what the reason says."""


@pytest.fixture(scope="module")
def values(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(HERE / "values.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, values: ModuleType) -> Path:
    """A folder with a file of each writer."""
    inputs, folder = tmp_path_factory.mktemp("values"), tmp_path_factory.mktemp("written")
    (inputs / "table.json").write_text(json.dumps(values.VALUES))
    table = pa.table({name: values.as_arrow(name) for name in values.VALUES})
    with pa.OSFile(str(inputs / "table.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    # A module is looked up from where the script lies.
    script = BUILD / "npm/write_in_node.mjs"
    script.write_bytes((HERE / script.name).read_bytes())
    for command in (
        [PYTHON, HERE / "write_in_python.py", folder],
        ["node", script, inputs / "table.json", folder],
        [BUILD / "go", inputs / "table.json", inputs / "table.arrow", folder],
    ):
        subprocess.run(list(map(str, command)), check=True, env={**os.environ, "NODE_NO_WARNINGS": "1"})
    return folder


FILES: tuple[str, ...] = (
    *(f"{name}.parquet" for name in ("arro3", "arrow-go", "chdb", "daft", "datafusion", "dsnp-parquetjs", "duckdb")),
    *(f"{name}.parquet" for name in ("fastparquet", "fraugster-parquet-go", "hyparquet-writer", "parquet-go")),
    *(f"{name}.parquet" for name in ("parquet-wasm", "parquetjs", "parquets", "polars", "xitongsys-parquet-go")),
    *(f"{name}.avro" for name in ("avro-js", "avro", "avsc", "chdb", "fastavro", "goavro", "hamba", "polars", "twmb")),
    *(f"{name}.orc" for name in ("chdb", "pyorc")),
    *(f"{name}.csv" for name in ("arrow-go", "chdb", "csv-stringify", "datafusion", "duckdb", "encoding-csv")),
    *(f"{name}.csv" for name in ("pandas", "papaparse", "polars")),
    *(f"{name}.jsonl" for name in ("chdb", "datafusion", "duckdb", "json-stringify", "pandas", "polars")),
)


def test_every_written_file_is_tested(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == {*FILES, *(f"{name}.told" for name in FILES)}


@pytest.mark.parametrize("name", FILES)
def test_table_is_the_one_that_was_written(name: str, written: Path, values: ModuleType, tmp_path: Path) -> None:
    told = json.loads((written / f"{name}.told").read_text())
    assert {column for column in told if told[column] != values.VALUES[column]} == OWN.get(name, set())
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / name).write_bytes((written / name).read_bytes())
    is_text = name.endswith(("csv", "jsonl"))
    flat = {column: values.TYPES[column] for column in told if not pa.types.is_nested(values.TYPES[column])}
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("id",),
        partition_by=(),
        schema={
            column: str(type_).partition("[day]")[0] for column, type_ in flat.items() if is_text or column == "id"
        },
        read=ReadSettings(null=("\\N",) if name == "chdb.csv" else ()),
        quarantine_limit="100%",
    )
    table = Table("t", settings)
    table.run(host="local")
    assert not table.reconcile(deep=True).unbalanced
    ids, reason = REFUSED.get(name, (set(), ""))
    refused = table.quarantine().read_all()["reason"].to_pylist()
    assert len(refused) == len(ids)
    assert all(reason in one for one in refused)
    shown = table.to_arrow().read_all().sort_by("id")
    assert shown["id"].to_pylist() == [i for i in range(values.ROWS) if i not in ids]
    for column in told:
        type_ = shown.schema.field(column).type
        assert kind(type_) == kind(values.TYPES[column]) or (name.startswith("chdb") and column.startswith("ts_")), (
            column
        )
        if (name, column) == ("chdb.jsonl", "list"):
            told[column][-1] = []  # its arrays are never null
        expected = [told[column][i] for i in shown["id"].to_pylist()]
        instead = INSTEAD.get(name, {}).get(column, {"": None} if name.endswith("csv") else {})
        assert values.as_text(shown[column]) == [
            instead.get(one, one) if isinstance(one, str) else one for one in expected
        ], column


def kind(type_: pa.DataType) -> Any:
    """A type without the widths and units that writers choose."""
    t = pa.types
    if t.is_map(type_):
        return "map", kind(type_.key_type), kind(type_.item_type)
    if t.is_list(type_) or t.is_large_list(type_):
        return "list", kind(type_.value_type)
    if t.is_struct(type_):
        return "struct", [(field.name, kind(field.type)) for field in type_]
    if t.is_timestamp(type_):
        return "timestamp", type_.tz
    of_kind = {"integer": t.is_integer, "time": t.is_time, "string": t.is_large_string, "binary": t.is_large_binary}
    return next((name for name, is_of in of_kind.items() if is_of(type_)), str(type_))
