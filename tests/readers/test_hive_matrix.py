"""Trino reads what `publishers = ["hive"]` keeps in a Hive metastore, each row as our own readers do. Spark refuses it."""

import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import HiveSettings
from tests.harness import typed_lake
from tests.harness.readers import Place, Readers, Refusal, canonical, compare
from tests.harness.typed_lake import KINDS, TypedLake, days, schema_without

SCHEMA = schema_without("at_ms", "at_s")
SPOT = SCHEMA.field("spot").type
rows = partial(typed_lake.rows, SCHEMA)


class Lake(TypedLake):
    """Shown by the metastore at ``uri``."""

    def __init__(self, folder: Path, uri: str, **settings: Any) -> None:
        self.name, self.uri = f"t_{clock.new_id()[:12]}", uri
        shown = HiveSettings(uri=uri, database="default", table=self.name)
        super().__init__(folder, **{"publishers": ("hive",), "hive": shown, **settings})

    def change(self, **settings: Any) -> None:
        self.table.close()
        self.settings = msgspec.structs.replace(self.settings, **settings)
        self.table = Table("t", self.settings)

    @property
    def place(self) -> Place:
        return Place("hive", catalog=self.uri, name=f"default.{self.name}")

    def expected(self) -> pa.Table:
        """In the names that the catalog has: those of the files, in lower case."""
        names = self.table.view().spec.names_written
        found = canonical(self.table.to_arrow().read_all())
        kinds = {names.get(f.name, f.name).lower(): _lower(f.type) for f in found.schema}
        columns = [[_with_lower_names(value) for value in column.to_pylist()] for column in found.columns]
        return pa.table([pa.array(c, kind) for c, kind in zip(columns, kinds.values(), strict=True)], pa.schema(kinds))


def _lower(kind: pa.DataType) -> pa.DataType:
    return pa.struct([(f.name.lower(), _lower(f.type)) for f in kind]) if pa.types.is_struct(kind) else kind


def _with_lower_names(value: object) -> object:
    return {name.lower(): _with_lower_names(v) for name, v in value.items()} if isinstance(value, dict) else value


FIRST = rows(range(24), 1)
SECOND = rows([*range(0, 24, 5), *range(24, 30)], 2)
FEW = rows([0, 5], 2)


def widened(folder: Path, uri: str) -> Lake:
    """Only one partition is written anew, so the files of the others have the older types."""
    float32, decimal = pa.array([1.5] * 24, pa.float32()), pa.array([Decimal("1.25")] * 24, pa.decimal128(5, 2))
    lake = Lake(folder, uri).run(FIRST.append_column("f", float32).append_column("d", decimal))
    wide = FEW.set_column(FEW.column_names.index("small"), "small", pa.array([1 << 40] * 2, pa.int64()))
    wide = wide.append_column("f", pa.array([1.1] * 2)).append_column(
        "d", pa.array([Decimal("123456.125")] * 2, pa.decimal128(12, 3))
    )
    return lake.run(wide)


def grown(folder: Path, uri: str) -> Lake:
    """The metastore takes no struct that grew, so the publisher asks for a reset."""
    kind = pa.struct([*SPOT, pa.field("extra", pa.int64())])
    lake = Lake(folder, uri).run(FIRST)
    spots = pa.array([{"height": 1.0, "names": ["x"], "extra": 7}] * 2, kind)
    lake.land(FEW.set_column(FEW.column_names.index("spot"), "spot", spots))
    problem = lake.table.run(host="local").publish.publishers["hive"].problem
    assert problem is not None
    assert (problem.code, "--reset" in problem.next) == ("catalog-refused", True)
    lake.table.publish(to="hive", reset=True)
    return lake


def renamed(folder: Path, uri: str) -> Lake:
    lake = Lake(folder, uri).run(FIRST)
    lake.table.rename_column("name", "title")
    again = SECOND.rename_columns({"name": "title"})
    return lake.run(again.append_column("name", pa.array([None, *["again"] * (again.num_rows - 1)])))


def dropped(folder: Path, uri: str) -> Lake:
    lake = Lake(folder, uri).run(FIRST)
    lake.table.drop_column("small")
    lake.table.publish(to="hive", reset=True)
    return lake.run(SECOND)


def upper_case(folder: Path, uri: str) -> Lake:
    kind = pa.struct({"Height": pa.float64(), "Names": pa.list_(pa.string())})
    spots = pa.array([{"Height": n / 2, "Names": [str(n)]} for n in range(24)], kind)
    place = FIRST.column_names.index("spot")
    night = FIRST.set_column(place, "Spot", spots).rename_columns({"name": "Full Name"})
    return Lake(folder, uri).run(night.append_column("a b-c.é", FIRST["id"]))


def restored(folder: Path, uri: str) -> Lake:
    lake = Lake(folder, uri).run(FIRST, SECOND)
    lake.table.restore(0, dry=False)
    return lake.run(rows([3], 3))


def in_between(folder: Path, uri: str) -> Lake:
    lake = Lake(folder, uri).run(FIRST)
    lake.land(SECOND)
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    return lake


def deltas(folder: Path, uri: str) -> Lake:
    """Rows that supersede nothing, from before the table had the publisher: deltas without deletion vectors."""
    lake = Lake(folder, uri, publishers=(), hive=None, strategy="delta").run(FIRST, rows(range(24, 34), 2))
    assert any(file.path.endswith(".delta") for file in lake.table.files())
    lake.change(publishers=("hive",), strategy="auto", hive=HiveSettings(uri=uri, database="default", table=lake.name))
    lake.table.publish(to="hive")
    return lake


def many_partition_columns(folder: Path, uri: str) -> Lake:
    night = FIRST.append_column("n", pa.array([i % 2 for i in range(24)], pa.int32()))
    night = night.append_column("b", pa.array([i % 2 == 0 for i in range(24)]))
    night = night.append_column("d", pa.array([dt.date(2020, 1, 1 + i % 2) for i in range(24)]))
    return Lake(folder, uri, partition_by=("n", "b", "d", "part")).run(night)


def adopted(folder: Path, uri: str) -> Lake:
    """A key comes twice, as in our own readers; one file has timestamps as INT96."""
    lake = Lake(folder, uri, order_by=("at",))
    root = folder / "processed" / "part=a b"
    root.mkdir(parents=True)
    night = rows([0, 5, 10], 1).drop_columns(["part", "seen"])
    pq.write_table(night, root / "one.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(night.slice(0, 1), root / "two.parquet")
    lake.table.adopt()
    lake.table.publish(to="hive")
    return lake


def of_kind(kind: str, folder: Path, uri: str) -> Lake:
    return Lake(folder, uri, partition_by=KINDS[kind]).run_changes(SCHEMA)


def many_days(folder: Path, uri: str) -> Lake:
    return Lake(folder, uri, partition_by=("day",)).run(*days())


CASES: Mapping[str, Callable[[Path, str], Lake]] = {
    "clean": lambda folder, uri: Lake(folder, uri).run(FIRST, SECOND),
    "new column": lambda folder, uri: Lake(folder, uri).run(FIRST, SECOND.append_column("more", SECOND["id"])),
    "widened": widened,
    "grown": grown,
    "renamed": renamed,
    "dropped": dropped,
    "upper case": upper_case,
    "mode columns": lambda folder, uri: Lake(folder, uri, mode="columns").run(
        FIRST, SECOND.select(["id", "part", "seen", "amount"])
    ),
    "history": lambda folder, uri: Lake(folder, uri, history=True).run(FIRST, SECOND),
    "restored": restored,
    "in between": in_between,
    **{kind: partial(of_kind, kind) for kind in KINDS},
    "deltas": deltas,
    "many partition columns": many_partition_columns,
    "adopted": adopted,
    "545 partitions": many_days,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, readers: Readers, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = CASES[request.param](tmp_path_factory.mktemp("lake"), readers.metastore)
    assert lake.table.status().publishers["hive"].is_newest
    return lake


def test_trino_reads_every_row(readers: Readers, case: Lake) -> None:
    difference = compare(readers["trino"].read(case.place), case.expected(), ["id"])
    assert difference.exact, str(difference)


def test_spark_refuses_the_table(readers: Readers, case: Lake) -> None:
    """Spark's reader of Parquet would take the manifests for data, and its other reader shows nothing that is right."""
    with pytest.raises(Refusal, match=r"DATA_SOURCE_NOT_FOUND.* lakeupsert"):
        readers["spark-hive"].read(case.place)


WRITES = {
    "spark-hive": (
        "INSERT INTO {table} VALUES (1)",
        "INSERT OVERWRITE {table} SELECT 1",
        "MSCK REPAIR TABLE {table}",
        "TRUNCATE TABLE {table}",
        "ALTER TABLE {table} DROP PARTITION (part = 'ü')",
        "ALTER TABLE {table} ADD COLUMN added INT",
    ),
    "trino": (
        "INSERT INTO {table} SELECT * FROM {table} LIMIT 1",
        "DELETE FROM {table}",
        "ALTER TABLE {table} ADD COLUMN added integer",
        "CALL {catalog}.system.sync_partition_metadata('{schema}', '{name}', 'FULL')",
        "ANALYZE {table}",
        "DROP TABLE {table}",
    ),
}


@pytest.mark.parametrize(("reader", "statement"), [(r, s) for r, listed in WRITES.items() for s in listed])
@pytest.mark.parametrize("convert", ["true", "false"], ids=["native", "serde"])
def test_no_engine_writes(readers: Readers, tmp_path: Path, reader: str, statement: str, convert: str) -> None:
    """Trino with `hive.security = read-only`, as its page says."""
    if reader == "trino" and convert == "false":
        pytest.skip("a setting of Spark")
    lake = Lake(tmp_path, readers.metastore).run(FIRST)
    before = sorted(path for path in (tmp_path / "processed").rglob("*") if "queue.sqlite" not in path.name)
    if reader == "spark-hive":
        setting = f"SET spark.sql.hive.convertMetastoreParquet={convert}"
        assert readers[reader].write(lake.place, setting) is None
    refused = readers[reader].write(lake.place, statement)
    assert refused is not None
    assert sorted(path for path in (tmp_path / "processed").rglob("*") if "queue.sqlite" not in path.name) == before
    assert compare(readers["trino"].read(lake.place), lake.expected(), ["id"]).exact


def test_statement_for_trino_reads_the_table(readers: Readers, tmp_path: Path) -> None:
    lake = Lake(tmp_path, readers.metastore).run(FIRST)
    shown = str(lake.table.ddl("trino").statements[0])
    assert shown == f'SELECT * FROM CATALOG."default"."{lake.name}"'
    found = readers["trino"].write(lake.place, shown.replace("CATALOG", "{catalog}"))
    assert found is None
