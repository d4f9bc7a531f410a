"""Files that Spark writes with dates of the old calendar, on both hosts, against what Spark reads from them itself."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert import Table
from lakeupsert.config import TableSettings
from lakeupsert.errors import RefusedError

DAYS = ("0001-01-01", "1500-01-01", "1582-10-04", "1582-10-15", "1899-12-31", "2024-07-01")
OLD = {
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
    "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
    "spark.sql.session.timeZone": "America/New_York",
}
COLUMNS = {
    "d": "date '{0}'",
    "ts": "timestamp '{0} 06:00:00.123456'",
    "s": "named_struct('d', date '{0}', 'list', array(date '{0}', null), 'map', map(date '{0}', timestamp '{0} 06:00:00'))",
}
IN_FILES = {
    "int96": ("parquet", {"spark.sql.parquet.outputTimestampType": "INT96"}),
    "micros": ("parquet", {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}),
    "millis": ("parquet", {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"}),
    "orc": ("orc", {}),
}


@pytest.fixture
def _old_spark(spark: Any) -> Any:
    before = {name: spark.conf.get(name) for name in OLD}
    for name, value in OLD.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.mark.few(2)
@pytest.mark.usefixtures("_old_spark")
@pytest.mark.parametrize("kind", IN_FILES)
def test_dates_of_spark_stay_what_they_are(kind: str, tmp_path: Path, spark: Any) -> None:
    format_, options = IN_FILES[kind]
    # ORC holds no timestamp before 1678 in nanoseconds.
    columns = (
        COLUMNS
        if format_ == "parquet"
        else {"d": COLUMNS["d"], "s": COLUMNS["s"].replace("timestamp '{0}", "timestamp '1960-01-01")}
    )
    rows = " UNION ALL ".join(
        f"SELECT {i} id, " + ", ".join(f"{sql.format(day)} {name}" for name, sql in columns.items())
        for i, day in enumerate(DAYS)
    )
    written = tmp_path / "written"
    for name, value in options.items():
        spark.conf.set(name, value)
    spark.sql(rows).coalesce(1).write.format(format_).save(str(written))
    moments = {"ts": "unix_micros(ts)", "s": "unix_micros(map_values(s.map)[0])"}
    seen = spark.read.format(format_).load(str(written)).selectExpr(
        "cast(d as string) d", "cast(s.list[0] as string) l", "cast(map_keys(s.map)[0] as string) m",
        *(f"{sql} as {name}_us" for name, sql in moments.items() if name in columns and format_ == "parquet"), "id",
    )  # fmt: skip
    expected = {row.id: row.asDict() for row in seen.collect()}
    assert [expected[i]["d"] for i in range(len(DAYS))] == list(DAYS)
    found = []
    for host in ("local", "spark"):
        table = Table(
            "t", TableSettings(landing=str(written), processed=str(tmp_path / host), key=("id",), partition_by=())
        )
        table.run(host=host, workers=1)
        assert not table.reconcile(deep=True).unbalanced
        shown = table.to_arrow().read_all().sort_by("id")
        found.append(shown)
        for i, day in enumerate(DAYS):
            assert str(shown["d"][i].as_py()) == day
            nested = shown["s"][i]
            assert str(nested["list"][0].as_py()) == str(nested["map"][0][0].as_py()) == day
            if format_ == "parquet":
                assert (
                    shown["ts"].cast(pa.timestamp("us", "UTC")).combine_chunks().view(pa.int64())[i].as_py()
                    == expected[i]["ts_us"]
                )
                assert nested["map"][0][1].cast(pa.timestamp("us", "UTC")).value == expected[i]["s_us"]
        table.close()
    assert found[0].select(["id", *columns]).equals(found[1].select(["id", *columns]))


@pytest.mark.usefixtures("_old_spark")
@pytest.mark.parametrize("kind", ["int96", "micros"])
@pytest.mark.parametrize(("day", "is_old"), [("1500-01-01", True), ("1960-01-01", False)])
def test_files_with_old_dates_are_not_adopted(kind: str, day: str, is_old: bool, tmp_path: Path, spark: Any) -> None:
    for name, value in IN_FILES[kind][1].items():
        spark.conf.set(name, value)
    sql = ", ".join(f"{column.format(day)} {name}" for name, column in COLUMNS.items())
    spark.sql(f"SELECT 1 id, {sql}").write.parquet(str(tmp_path / "lake"))
    table = Table(
        "t", TableSettings(landing=str(tmp_path), processed=str(tmp_path / "lake"), key=("id",), partition_by=())
    )
    if is_old:
        with pytest.raises(RefusedError, match="calendar of Spark 2") as refused:
            table.adopt()
        assert refused.value.code == "unreadable-files"
    else:
        table.adopt()
        assert str(table.to_arrow().read_all()["d"][0].as_py()) == day
