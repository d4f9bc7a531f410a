"""Files of other packages, landed: every value is the one that was written, or its file or row is refused.

`make test-writers` installs the packages of `generate.py`. Values here are of its constants.
"""

import subprocess
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert import Table
from lakeupsert.config import TableSettings
from lakeupsert.errors import RefusedError

pytestmark = pytest.mark.writers
PYTHON = Path(__file__).parents[2] / "build/writers/venv/bin/python"
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
SET_ASIDE = {"duckdb_variant.parquet": "'v' is a VARIANT", "polars_int128.parquet": "128 bits"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writers")
    subprocess.run([PYTHON, Path(__file__).with_name("generate.py"), folder], check=True)
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
