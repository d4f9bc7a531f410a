"""Every reader of the bench reads tables that others wrote: each row as it is, or with the difference or refusal recorded here.

Our publishers are tested against the same readers, so what is recorded here is a reader's own and no fault of theirs.
"""

import datetime as dt
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.harness.readers import (
    FORMATS,
    HARMLESS,
    WRITES,
    Difference,
    Place,
    ReaderDied,
    Readers,
    Refusal,
    as_shown,
    canonical,
    compare,
    program,
)
from tests.harness.servers import Server

PARTITIONS = ("a b", "x=y", "ü", "%41", None, "2026-01-01")
GONE = (3, 10)
VECTORED = (6, 1, 2, 9, 16, 26, 11)
"""What Spark deletes by vectors or position deletes: in each partition."""

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "part": pa.string(),
        "flag": pa.bool_(),
        "small": pa.int32(),
        "amount": pa.decimal128(12, 2),
        "ratio": pa.float64(),
        "real": pa.float32(),
        "at": pa.timestamp("us"),
        "seen": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "name": pa.string(),
        "raw": pa.binary(),
        "tags": pa.list_(pa.string()),
        "spot": pa.struct({"height": pa.float64(), "names": pa.list_(pa.string())}),
        "counts": pa.map_(pa.string(), pa.int64()),
    }
)
NULLS = dict.fromkeys(SCHEMA.names)


def row(number: int, night: int) -> dict[str, object]:
    """Every fifth row has nulls alone beside its key and partition."""
    key = {"id": number, "part": PARTITIONS[number % len(PARTITIONS)]}
    if number % 5 == 4:
        return {**NULLS, **key}
    moment = dt.datetime(2026, 1, night, 1, 2, 3, 123_956 + number)
    return {
        **key,
        "flag": number % 2 == 0,
        "small": -number,
        "amount": Decimal(number * night).scaleb(-2) - 5,
        "ratio": (math.nan, math.inf, -1.25)[number % 3],
        "real": 0.1 * number,
        "at": moment,
        "seen": moment.replace(tzinfo=dt.UTC),
        "day": dt.date(1969 + number, 12, 31),
        "name": ("", "Zoë", "'quoted'\n")[number % 3],
        "raw": bytes([0, 255, number]),
        "tags": ([], ["a", None, "ü"], None)[number % 3],
        "spot": ({"height": math.nan, "names": ["n"]}, {"height": None, "names": None}, None)[number % 3],
        "counts": ([], [("x", number), ("y", None)], None)[number % 3],
    }


FIRST = pa.Table.from_pylist([row(number, 1) for number in range(24)], SCHEMA)
SECOND = pa.Table.from_pylist([row(number, 2) for number in (0, 7, 14, 21, *range(24, 30))], SCHEMA)
KEPT = FIRST.filter(pc.invert(pc.is_in(FIRST["id"], pa.concat_arrays([SECOND["id"].combine_chunks(), pa.array(GONE)]))))
BOTH = pa.concat_tables([KEPT, SECOND])
WITHOUT_VECTORED = BOTH.filter(pc.invert(pc.is_in(BOTH["id"], pa.array(VECTORED))))


@dataclass(frozen=True)
class Table:
    """A table and its rows, newest and after the first night."""

    place: Place
    rows: pa.Table
    version: int | None = None


def write_table(kind: str, *places: Path, nights: tuple[pa.Table, pa.Table] = (FIRST, SECOND)) -> int:
    """Let `make_tables.py` write two nights. Returns the version after the first."""
    files = [places[-1].with_suffix(f".{night}") for night in ("first", "second")]
    for path, rows in zip(files, nights, strict=True):
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, SCHEMA) as writer:
            writer.write_table(rows)
    command = [program("venv") / "bin/python", Path(__file__).with_name("make_tables.py"), kind, *places, *files]
    done = subprocess.run([*map(str, command), ",".join(map(str, GONE))], check=True, stdout=subprocess.PIPE)
    return int(done.stdout)


def delta(readers: Readers, folder: Path) -> Table:
    root = folder / "plain"
    version = write_table("delta", root)
    return Table(Place("delta", str(root)), BOTH, version)


def delta_ascii(readers: Readers, folder: Path) -> Table:
    """Trino writes no partition whose name has a letter beyond ASCII."""
    root = folder / "ascii"
    first, second, both = (rows.filter(pc.not_equal(rows["part"], "ü")) for rows in (FIRST, SECOND, BOTH))
    version = write_table("delta", root, nights=(first, second))
    return Table(Place("delta", str(root)), both, version)


def delta_vectors(readers: Readers, folder: Path) -> Table:
    """Spark deletes by a vector in one file, and by nothing else."""
    root = folder / "vectors"
    write_table("delta", root)
    place = Place("delta", str(root))
    for statement in (
        "ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
        f"DELETE FROM {{table}} WHERE id IN {VECTORED}",
    ):
        assert readers["spark"].write(place, statement) is None
    return Table(place, WITHOUT_VECTORED)


def iceberg(readers: Readers, folder: Path) -> Table:
    version = write_table("iceberg", folder / "catalog.sqlite", folder / "plain_iceberg")
    return Table(iceberg_place(folder, "plain_iceberg"), BOTH, version)


def iceberg_deletes(readers: Readers, folder: Path) -> Table:
    return deleted_by_spark(readers, folder, "deletes", "'write.delete.mode' = 'merge-on-read'")


def iceberg_vectors(readers: Readers, folder: Path) -> Table:
    return deleted_by_spark(
        readers, folder, "vectors3", "'write.delete.mode' = 'merge-on-read', 'format-version' = '3'"
    )


def deleted_by_spark(readers: Readers, folder: Path, name: str, properties: str) -> Table:
    write_table("iceberg", folder / "catalog.sqlite", folder / name)
    place = iceberg_place(folder, name)
    for statement in (
        f"ALTER TABLE {{table}} SET TBLPROPERTIES ({properties})",
        f"DELETE FROM {{table}} WHERE id IN {VECTORED}",
    ):
        assert readers["spark"].write(place, statement) is None
    return Table(place, WITHOUT_VECTORED)


def iceberg_place(folder: Path, name: str) -> Place:
    return Place("iceberg", str(folder / name), str(folder / "catalog.sqlite"), f"lake.sales.{name}")


def hive(readers: Readers, folder: Path) -> Table:
    """Plain Parquet in folders, each registered as a partition."""
    place = Place("hive", catalog=readers.metastore, name="default.plain")
    types = (
        "id BIGINT, flag BOOLEAN, small INT, amount DECIMAL(12, 2), ratio DOUBLE, `real` FLOAT, at TIMESTAMP, seen TIMESTAMP,"
        " day DATE, name STRING, raw BINARY, tags ARRAY<STRING>, spot STRUCT<height: DOUBLE, names: ARRAY<STRING>>,"
        " counts MAP<STRING, BIGINT>"
    )
    spark = readers["spark-hive"]
    create = f"CREATE EXTERNAL TABLE {{table}} ({types}) PARTITIONED BY (part STRING) STORED AS PARQUET LOCATION"
    assert spark.write(place, f"{create} '{folder / 'hive'}'") is None
    for number, value in enumerate(PARTITIONS):
        path = folder / "hive" / str(number)
        path.mkdir(parents=True)
        here = BOTH.filter(pc.equal(BOTH["part"], value) if value else pc.is_null(BOTH["part"]))
        pq.write_table(here.drop(["part"]), path / "a.parquet")
        shown = value or "__HIVE_DEFAULT_PARTITION__"
        assert spark.write(place, f"ALTER TABLE {{table}} ADD PARTITION (part = '{shown}') LOCATION '{path}'") is None
    return Table(place, BOTH)


TABLES: Mapping[str, Callable[[Readers, Path], Table]] = {
    "delta": delta,
    "delta_ascii": delta_ascii,
    "delta_vectors": delta_vectors,
    "iceberg": iceberg,
    "iceberg_deletes": iceberg_deletes,
    "iceberg_vectors": iceberg_vectors,
    "hive": hive,
}
PAIRS = [(name, table) for name, formats in FORMATS.items() for table in TABLES if table.split("_")[0] in formats]
REFUSES: Mapping[tuple[str, str], str] = {
    ("trino", "iceberg_vectors"): "Unexpected PUFFIN file format",
    ("chdb", "iceberg_vectors"): "Position deletes are supported only for parquet format",
}
"""What the message of a reader says when it refuses a table."""
KEEPS_DELETED: Mapping[tuple[str, str], set[int]] = {
    ("polars", "delta_vectors"): {1, 2, 6, 9, 26},
}
"""Deleted rows that a reader shows. Polars looks up vectors by path. It gets the data files' paths decoded and the vectors' not,
so it finds none for a folder with a percent sign in its name."""


@pytest.fixture(scope="session")
def tables(readers: Readers, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Table]:
    folder = tmp_path_factory.mktemp("tables")
    made: dict[str, Table] = {}

    def table(name: str) -> Table:
        if name not in made:
            made[name] = TABLES[name](readers, folder)
        return made[name]

    return table


@pytest.mark.parametrize(("reader", "name"), PAIRS)
def test_rows_are_as_written(readers: Readers, tables: Callable[[str], Table], reader: str, name: str) -> None:
    table = tables(name)
    if (reader, name) in REFUSES:
        with pytest.raises(Refusal, match=REFUSES[reader, name]):
            readers[reader].read(table.place)
        return
    found = compare(readers[reader].read(table.place), as_shown(reader, table.place.format, table.rows), ["id"])
    kept = tuple(sorted(((number,) for number in KEEPS_DELETED.get((reader, name), ())), key=repr))
    assert found == Difference(unexpected=kept), str(found)


@pytest.mark.parametrize(("reader", "name"), [pair for pair in PAIRS if pair[1] in ("delta", "iceberg")])
def test_an_earlier_version(readers: Readers, tables: Callable[[str], Table], reader: str, name: str) -> None:
    table = tables(name)
    found = readers[reader].read(table.place, version=table.version)
    assert compare(found, as_shown(reader, table.place.format, FIRST), ["id"]).exact


@pytest.mark.parametrize(("reader", "name"), [pair for pair in PAIRS if pair[1] in ("delta", "iceberg", "hive")])
def test_some_columns(readers: Readers, tables: Callable[[str], Table], reader: str, name: str) -> None:
    table = tables(name)
    found = readers[reader].read(table.place, columns=["name", "part", "id"])
    assert compare(found, canonical(BOTH.select(["id", "part", "name"])), ["id"]).exact


def test_a_process_that_gives_no_answer_is_replaced(readers: Readers, tables: Callable[[str], Table]) -> None:
    place = tables("delta").place
    for reader in ("duckdb", "trino"):
        readers[reader].start()
        with pytest.raises(ReaderDied):
            readers[reader].read(place, patience=0)
        assert readers[reader].read(place).num_rows == BOTH.num_rows


@dataclass(frozen=True)
class Copy:
    """A copy of a Delta table: where a reader finds it, and its folder."""

    place: Place
    folder: Path

    def files(self, pattern: str = "**/*") -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.glob(pattern) if path.is_file()}

    def commits(self) -> dict[str, bytes]:
        return self.files("_delta_log/*.json")


@pytest.fixture
def copy(versitygw: Server, new_bucket: Callable[[Server], str], tmp_path: Path) -> Callable[..., Copy]:
    """Copies a Delta table, to S3 for Trino, which writes to no local folder. ``fence`` adds a commit with a writer feature that
    nobody knows."""

    def make(table: Table, reader: str, *, fence: bool) -> Copy:
        assert versitygw.root is not None
        name = "fenced" if fence else "open"
        bucket = new_bucket(versitygw) if reader == "trino" else None
        folder = versitygw.root / bucket / name if bucket else tmp_path / name
        shutil.copytree(table.place.root, folder)
        if fence:
            add_fence(folder / "_delta_log")
        return Copy(Place("delta", f"s3://{bucket}/{name}" if bucket else str(folder)), folder)

    return make


def add_fence(log: Path) -> None:
    commits = sorted(log.glob("*.json"))
    actions = [json.loads(line) for path in commits for line in path.read_text().splitlines()]
    protocol = [action["protocol"] for action in actions if "protocol" in action][-1]
    protocol["writerFeatures"].append("lakeupsert")
    (log / f"{len(commits):020}.json").write_text(json.dumps({"protocol": protocol}) + "\n")


STATEMENTS = [(reader, statement) for reader, statements in WRITES.items() for statement in statements]


@pytest.mark.parametrize(("reader", "statement"), STATEMENTS)
def test_a_statement_writes_unless_a_fence_refuses_it(
    readers: Readers, tables: Callable[[str], Table], copy: Callable[..., Copy], reader: str, statement: str
) -> None:
    table = tables(
        "delta_ascii" if reader == "trino" else "delta_vectors"
    )  # Trino's vacuum refuses any table with vectors
    unfenced = copy(table, reader, fence=False)
    before = unfenced.files()
    assert readers[reader].write(unfenced.place, WRITES[reader][statement]) is None
    assert unfenced.files() != before

    fenced = copy(table, reader, fence=True)
    before = fenced.commits()
    refused = readers[reader].write(fenced.place, WRITES[reader][statement])
    assert refused is not None
    assert "lakeupsert" in refused
    assert (
        fenced.commits() == before
    )  # Spark leaves data files, as it refuses some statements only when it commits them


@pytest.mark.parametrize(
    ("reader", "statement"), [(reader, statement) for reader, found in HARMLESS.items() for statement in found]
)
def test_what_a_fence_allows_changes_no_row(
    readers: Readers, tables: Callable[[str], Table], copy: Callable[..., Copy], reader: str, statement: str
) -> None:
    table = tables("delta_vectors")
    fenced = copy(table, reader, fence=True)
    before = fenced.commits()
    assert readers[reader].write(fenced.place, HARMLESS[reader][statement]) is None
    assert before.items() <= fenced.commits().items()
    found = readers["duckdb"].read(Place("delta", str(fenced.folder)))
    assert compare(found, canonical(table.rows), ["id"]).exact
