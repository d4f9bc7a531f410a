"""`publishers = ["iceberg"]`: what is in the table, what stops the publisher, and its catalogs.

That a reader sees what ours see, whatever fails: `tests/contract/test_publishers.py`.
"""

import random
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table as IcebergTable

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import IcebergSettings, TableSettings, parse
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, TryAgainError
from lakeupsert.operations import vacuum
from lakeupsert.publishers import iceberg, iceberg_catalog, iceberg_snapshot
from lakeupsert.publishers.iceberg_snapshot import FOLDER
from tests.harness.lake import Lake, iceberg_settings, iceberg_table, row
from tests.harness.servers import Server

NAME = "sales.receipts"


class IcebergLake(Lake):
    """A lake with a catalog on SQLite beside its zones."""

    def __init__(self, root: Path, **settings: Any) -> None:
        given = {"publishers": ("iceberg",), "iceberg": iceberg_settings(root), "strategy": "delta", **settings}
        super().__init__(root, **given)

    def published(self) -> IcebergTable:
        """The Iceberg table, as pyiceberg finds it by itself."""
        assert self.settings.iceberg is not None
        table = iceberg_table(self.settings.iceberg)
        assert table is not None
        return table

    def numbers(self) -> list[int]:
        return [int(s.summary["lakeupsert.snapshot"]) for s in self.published().metadata.snapshots if s.summary]

    def objects(self) -> set[str]:
        """What the publisher has written."""
        root = self.root / "processed" / FOLDER
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def data_files(self) -> set[str]:
        """The names of the data files that its readers open."""
        return {task.file.file_path.rpartition("processed/")[2] for task in self.published().scan().plan_files()}


def same(rows: pa.Table, ours: pa.Table) -> bool:
    names = ours.column_names
    return sorted(map(repr, rows.select(names).to_pylist())) == sorted(map(repr, ours.to_pylist()))


def nights(root: Path, count: int = 3, **settings: Any) -> IcebergLake:
    """Three partitions; every night updates another third of the keys."""
    lake = IcebergLake(root, **settings)
    for number in range(count):
        land(lake, number)
    return lake


def land(lake: Lake, number: int) -> None:
    keys = range(number % 3, 90, 3) if number else range(90)
    rows = [row(f"k{i:03}", day, number, number) for day in range(3) for i in keys]
    lake.land(f"{number}.jsonl", rows)
    lake.run()


def standing(lake: Lake) -> tuple[int | None, int]:
    found = lake.table.status().publishers["iceberg"]
    assert found.problem is None
    return found.snapshot, found.behind


@pytest.fixture
def few_metadata_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of earlier ones keeps two."""
    monkeypatch.setattr(iceberg, "METADATA_KEPT", 2)


@pytest.mark.parametrize(
    ("strategy", "compaction"), [("rewrite", []), ("delta", ["replace"])]
)  # a rewrite leaves nothing to compact
def test_each_snapshot_says_what_it_did(tmp_path: Path, strategy: str, compaction: list[str]) -> None:
    lake = nights(tmp_path / "lake", 2, strategy=strategy)
    lake.table.compact(full=True)
    operations = [s.summary.operation.value for s in lake.published().metadata.snapshots if s.summary]
    assert operations == ["append", "overwrite", *compaction]


def test_names_that_came_back_types_that_grew_and_nested_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are left as they are: columns are found by their ids."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    (tmp_path / "landing").mkdir()
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("k",),
        partition_by=("part",),
        order_by=("ts",),
        strategy="delta",
        publishers=("iceberg",),
        iceberg=iceberg_settings(tmp_path),
    )
    table = Table("t", settings)
    first = pa.table(
        {
            "k": [1, 2, 3],
            "part": ["a b", "x=y", "%41 ü"],
            "ts": [1, 1, 1],
            "name": ["one", "two", None],
            "small": pa.array([1, 2, None], pa.int16()),
            "amount": pa.array([Decimal("1.20"), None, Decimal("-9.99")], pa.decimal128(4, 2)),
            "s": pa.array([{"a": 1}, None, {"a": None}], pa.struct({"a": pa.int32()})),
        }
    )
    pq.write_table(first, tmp_path / "landing" / "0.parquet")
    table.run(host="local")
    table.rename_column("name", "title")
    table.drop_column("amount")
    second = pa.table(
        {
            "k": [1, 4],
            "part": ["a b", "x=y"],
            "ts": [2, 2],
            "title": ["uno", None],
            "name": pa.array([1.5, None]),
            "small": pa.array([1 << 40, None], pa.int64()),
            "amount": ["text", None],
            "s": pa.array(
                [{"a": 1 << 40, "b": ["x", None]}, None], pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})
            ),
        }
    )
    pq.write_table(second, tmp_path / "landing" / "1.parquet")
    assert table.run(host="local").publish.publishers["iceberg"].problem is None
    published = iceberg_table(iceberg_settings(tmp_path))
    assert published is not None
    ours = table.to_arrow().read_all()
    assert same(published.scan().to_arrow(), ours)
    assert same(pl.scan_iceberg(published).collect().to_arrow(), ours)
    before = published.scan(snapshot_id=published.metadata.snapshots[0].snapshot_id).to_arrow()
    assert sorted(before["name"].to_pylist(), key=str) == [None, "one", "two"], "the columns of then"


class TypedLake:
    """A table of one row a night, whose landing files are Parquet."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        (root / "landing").mkdir()
        zones = {"landing": str(root / "landing"), "processed": str(root / "processed")}
        named: dict[str, Any] = {"key": ("k",), "partition_by": ("d",), "order_by": ("ts",), "strategy": "delta"}
        shows = {"publishers": ("iceberg",), "iceberg": iceberg_settings(root)}
        self.table = Table("t", TableSettings(**{**zones, **named, **shows, **settings}))

    def land(self, number: int, columns: dict[str, Any]) -> None:
        rows = pa.table({"k": [number], "d": [date(2020, 1, 1)], "ts": [number], **columns})
        pq.write_table(rows, self.root / "landing" / f"{number}.parquet")

    def published(self) -> IcebergTable | None:
        return iceberg_table(iceberg_settings(self.root))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (pa.decimal128(6, 2), pa.decimal128(8, 4)),
        (pa.uint32(), pa.int64()),
        (pa.timestamp("ms"), pa.timestamp("us")),
    ],
    ids=["scale", "unsigned", "unit"],
)
def test_column_that_grew_as_icebergs_may_not_is_refused(tmp_path: Path, was: pa.DataType, now: pa.DataType) -> None:
    """Engines would read the older file's values wrongly."""
    lake = TypedLake(tmp_path)
    lake.land(0, {"v": pa.array([Decimal("1.25")], was) if pa.types.is_decimal(was) else pa.array([1]).cast(was)})
    lake.table.run(host="local")
    lake.land(1, {"v": pa.array([Decimal("1.2345")], now) if pa.types.is_decimal(now) else pa.array([1]).cast(now)})
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "unfit-for-iceberg"
    assert "'v'" in problem.message
    before = lake.published()
    with pytest.raises(ConfigurationError, match="'v'"):
        lake.table.publish(to="iceberg", reset=True)  # which deletes nothing
    assert (lake.published() is None) == (before is None)
    if (published := lake.published()) is not None:
        assert published.scan().to_arrow()["v"].to_pylist() == [Decimal("1.25")]


def test_names_that_iceberg_can_not_tell_apart(tmp_path: Path) -> None:
    lake = TypedLake(tmp_path)
    lake.land(0, {"a.b": pa.array([1]), "a": pa.array([{"b": 1}])})
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "unfit-for-iceberg"
    assert "a.b" in problem.message


def test_adopted_files_wait_for_a_full_compaction(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path / "lake")
    lake.lay("part-0.parquet", [row(f"k{i}", day, 0, i) for day in range(2) for i in range(5)])
    lake.table.adopt()
    problem = lake.table.publish().publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "unfit-for-iceberg"
    assert "compact --full" in problem.next
    lake.table.compact(full=True)
    assert standing(lake)[1] == 0
    lake.check()


def test_rollback_is_undone(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 3)
    with SqlCatalog("lake", uri=f"sqlite:///{lake.root}/catalog.db") as catalog:
        table = catalog.load_table(NAME)
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    assert standing(lake) == (0, 2)
    lake.table.publish(to="iceberg")
    assert standing(lake) == (2, 0)
    assert sorted(lake.numbers()) == [0, 1, 2]
    lake.check()


@pytest.mark.long
def test_snapshot_that_took_the_number_of_a_lost_one_is_shown(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 3)
    folder = lake.root / "processed" / "_lakeupsert" / "snapshots"
    min(folder.iterdir()).unlink()  # the newest one, which no ledger entry names yet
    lake.reopen()
    lake.land("3.jsonl", [row("k000", 2, 8, 8)])
    lake.run()  # the next one has this batch, too
    assert standing(lake) == (lake.table.snapshots()[0].number, 0)
    assert lake.numbers() == sorted(link.number for link in lake.table.snapshots())
    ours = {link.number: link.write_id for link in lake.table.snapshots()}
    known = lake.published().metadata.snapshots
    assert {int(s.summary["lakeupsert.snapshot"]): s.summary["lakeupsert.write_id"] for s in known if s.summary} == ours
    lake.land("one.jsonl", [row("k000", 0, 9, 9)])
    lake.run()
    lake.check()
    head = lake.table.snapshots()[0].body.partitions
    manifests = [lake.opened.history.version(p, shown.version) for p, shown in head.items()]
    assert lake.data_files() == {file.name for m in manifests for bucket in m.buckets for file in bucket.data}


def test_version_that_was_lost_and_rebuilt_with_equal_figures_is_shown(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2, strategy="rewrite")
    before = lake.data_files()
    lake.rebuild_newest_version("d=2020-01-01")
    assert standing(lake)[1] == 0
    assert lake.data_files() == {file.name for file in lake.table.files()} != before
    lake.check()


def test_metadata_that_was_lost_is_written_anew_by_a_reset(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 2)
    for path in (lake.root / "processed" / FOLDER / "metadata").glob("*.metadata.json"):
        path.unlink()
    with pytest.raises(DamagedTableError) as raised:
        lake.table.publish(to="iceberg")
    assert "--reset" in raised.value.next
    lake.table.publish(to="iceberg", reset=True)
    assert standing(lake) == (1, 0)
    lake.check()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[IcebergSettings]:
    """A catalog that takes connections, and says nothing."""
    monkeypatch.setattr(iceberg_catalog, "CATALOG_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield IcebergSettings(catalog={"type": "rest", "uri": uri}, table=NAME)


def test_catalog_without_an_answer_is_asked_once_a_command_and_the_night_goes_on(
    tmp_path: Path, silent: IcebergSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    ask = iceberg_catalog.IcebergCatalog._ask

    def counted(catalog: Any, question: Any) -> Any:
        asked.append(question)
        return ask(catalog, question)

    lake = nights(tmp_path / "lake", 1, keep_snapshots=1, superseded_retention="0s")
    lake.mend(lambda row: False, iceberg=silent)
    lake.land("1.jsonl", [row("k000", 0, 9, 9)])
    before = {name for name in lake.stored_files() if not name.endswith(".pack")}
    monkeypatch.setattr(iceberg_catalog.IcebergCatalog, "_ask", counted)
    published = lake.table.run(host="local").publish  # which vacuums, too
    assert (published.snapshot, len(asked)) == (1, 1)
    problem = published.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "catalog-unreachable"
    status = lake.table.status().publishers["iceberg"]
    assert (status.behind, status.problem is None, len(asked)) == (None, False, 2)
    config = str(lake.configure())
    assert "not known" in CliRunner().invoke(main, ["status", "--config", config]).output
    lake.table.compact(full=True)
    asked.clear()
    lake.table.vacuum(dry=False)
    assert len(asked) == 1
    assert before <= lake.stored_files(), "nobody knows what is shown"
    for reset in (False, True):
        asked.clear()
        with pytest.raises(TryAgainError):
            lake.table.publish(to="iceberg", reset=reset)
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError, "catalog-unreachable"), (ValueError, "catalog-refused"), (ModuleNotFoundError, "extra-missing")],
)
def test_error_of_a_catalog_has_no_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: str
) -> None:
    def fail(name: str, **properties: str) -> Catalog:
        raise error("postgresql://me:open-sesame@db/x: open-sesame is wrong, and so is 1234-token")

    monkeypatch.setenv("PYICEBERG_CATALOG__ELSEWHERE__URI", "postgresql://me:open-sesame@db/x")
    monkeypatch.setenv("PYICEBERG_CATALOG__ELSEWHERE__TOKEN", "1234-token")
    monkeypatch.setattr(iceberg_catalog, "load_catalog", fail)
    lake = nights(tmp_path / "lake", 1, iceberg=IcebergSettings(catalog="elsewhere", table=NAME))
    with pytest.raises(LakeupsertError) as raised:
        lake.table.publish(to="iceberg")
    assert raised.value.code == code
    assert "open-sesame" not in str(raised.value)
    assert "1234-token" not in str(raised.value)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = nights(tmp_path / "lake", 0)
    for name in [name for name in sys.modules if name.startswith("lakeupsert.publishers.iceberg")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyiceberg.schema", None)
    lake.land("0.jsonl", [row("k000", 0, 1)])
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "extra-missing"
    assert "[iceberg]" in problem.next


class Later(clock.Source):
    """Two hours from now: objects of a commit that somebody may make just now are kept for an hour."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


@pytest.mark.usefixtures("few_metadata_files")
def test_vacuum_deletes_what_no_kept_snapshot_needs(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 1, superseded_retention="1h", keep_snapshots=2)
    for number in range(1, 7):
        keys = range(number, 90, 20)
        lake.land(f"{number}.jsonl", [row(f"k{i:03}", day, number, i) for day in range(3) for i in keys])
        lake.run()
    lake.table.vacuum(dry=False)
    before = lake.objects()
    assert len(lake.numbers()) == 3, "two, and the one that says which have expired"
    orphan = lake.root / "processed" / FOLDER / "deletes" / "3-orphan.deletes"
    orphan.write_text("of a publisher that died")
    with clock.use(Later()):
        lake.table.vacuum(dry=False)
        lake.table.vacuum(dry=False)
    after = lake.objects()
    assert len(after) < len(before) / 2
    assert not orphan.exists()
    assert len([name for name in after if name.endswith(".metadata.json")]) <= iceberg.METADATA_KEPT + 1
    lake.reopen()
    lake.check()


@pytest.mark.long
def test_night_rewrites_only_the_manifests_of_its_partitions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random nights over many partitions with few files to a manifest."""
    monkeypatch.setattr(iceberg_snapshot, "MOST_ENTRIES", 6)
    lake = IcebergLake(folder / "lake")
    chance = random.Random(7)
    for number in range(12):
        days = chance.sample(range(30), chance.choice([1, 2, 25]))
        rows = [row(f"k{i}", day, number, number) for day in days for i in range(chance.randint(1, 6))]
        lake.land(f"{number}.jsonl", rows)
        lake.run()
        if number == 7:
            lake.table.compact(full=True)
    lake.check()
    kept = {m.manifest_path for m in manifests(lake)}
    assert len(kept) > 4
    lake.land("last.jsonl", [row("k0", 4, 99)])
    lake.run()
    assert len(kept - {m.manifest_path for m in manifests(lake)}) <= 2, "of data and of deletes"
    lake.check()


def manifests(lake: IcebergLake) -> list[Any]:
    table = lake.published()
    current = table.current_snapshot()
    assert current is not None
    return current.manifests(table.io)


def test_manifests_say_what_came_when_and_what_went(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 1, strategy="rewrite")
    lake.land("one.jsonl", [row("k000", 1, 9, 9)])
    lake.run()
    table = lake.published()
    first, second = (snapshot.snapshot_id for snapshot in table.metadata.snapshots)
    entries = [e for m in manifests(lake) for e in m.fetch_manifest_entry(table.io, discard_deleted=False)]
    found = {(e.data_file.partition[0], e.status.name): (e.snapshot_id, e.sequence_number) for e in entries}
    day = (date(2020, 1, 1) - date(1970, 1, 1)).days
    assert found == {
        (day, "EXISTING"): (first, 1),
        (day + 1, "DELETED"): (second, 1),
        (day + 1, "ADDED"): (second, 2),
        (day + 2, "EXISTING"): (first, 1),
    }


@pytest.mark.long
def test_both_publishers_at_once(tmp_path: Path) -> None:
    lake = nights(tmp_path / "lake", 3, publishers=("delta", "iceberg"))
    assert {name: (s.snapshot, s.behind) for name, s in lake.table.status().publishers.items()} == {
        "delta": (2, 0),
        "iceberg": (2, 0),
    }
    lake.check()


def season(lake: Lake, published: Callable[[], IcebergTable]) -> None:
    """Nights with a column that gets another name and its own again, with expiry and a reset."""
    for number in range(3):
        land(lake, number)
    lake.table.rename_column("v", "value")
    lake.land("renamed.jsonl", [{**row("k000", 0, 50), "value": 7, "v": 8}])
    lake.run()
    for number in range(4, 7):
        lake.land(f"{number}.jsonl", [row("k000", 0, 70 + number, number)])
        lake.run()
    lake.mend(lambda row: False, keep_snapshots=4)
    assert lake.table.vacuum(dry=False).expired == (0, 1, 2)
    with pytest.MonkeyPatch.context() as later:
        later.setattr(vacuum, "ORPHANS_KEPT", timedelta(0))
        assert lake.table.vacuum(dry=False).garbage, "metadata files that their log has forgotten"
    assert standing(lake)[1] == 0
    for reset in (False, True):
        lake.table.publish(to="iceberg", reset=reset)
        table = published()
        assert len(table.metadata.snapshots) == (1 if reset else 5)
        for snapshot in table.metadata.snapshots:
            assert snapshot.summary
            rows = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
            ours = lake.table.to_arrow(int(snapshot.summary["lakeupsert.snapshot"] or -1)).read_all()
            assert same(rows, ours)
    foreign = published()
    foreign.append(foreign.scan().to_arrow().slice(0, 1))
    lake.land("last.jsonl", [row("k000", 0, 99)])
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "foreign-iceberg-commit"


@pytest.mark.usefixtures("few_metadata_files")
def test_rest_catalog(tmp_path: Path, iceberg_rest: Server) -> None:
    catalog = {"type": "rest", "uri": f"http://127.0.0.1:{iceberg_rest.port}"}
    lake = IcebergLake(tmp_path / "lake", iceberg=IcebergSettings(catalog=catalog, table=NAME))
    season(lake, lambda: load_catalog("default", **catalog).load_table(NAME))
    other = nights(tmp_path / "other", 1, iceberg=lake.settings.iceberg)
    problem = other.table.status().publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "iceberg-table-taken"


@pytest.mark.long
@pytest.mark.usefixtures("few_metadata_files")
def test_glue(
    tmp_path: Path, moto: Server, new_place: Callable[[Server], str], new_sqs_queue: Callable[..., str]
) -> None:
    lake = IcebergLake(
        tmp_path / "lake",
        processed=f"{new_place(moto)}/lake",
        queue=f"sqs://{new_sqs_queue()}",
        iceberg=IcebergSettings(catalog={"type": "glue"}, table=NAME),
    )
    properties = {
        "s3.endpoint": moto.env["AWS_ENDPOINT_URL"],
        "s3.access-key-id": moto.env["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": moto.env["AWS_SECRET_ACCESS_KEY"],
        "s3.region": moto.env["AWS_DEFAULT_REGION"],
    }
    season(lake, lambda: load_catalog("default", type="glue", **properties).load_table(NAME))


def test_settings_that_config_prints_are_the_same(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path / "lake")
    answer = CliRunner().invoke(main, ["config", "--config", str(lake.configure())])
    assert parse(str(lake.root / "lakeupsert.toml"), answer.output.encode(), {}).tables["t"] == lake.settings


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ('publishers = ["iceberg"]', "bad-setting"),
        ('iceberg = { catalog = "lake", table = "a.b" }', "bad-setting"),
        ('publishers = ["iceberg"]\niceberg = { catalog = "lake", table = "receipts" }', "bad-setting"),
        ('publishers = ["iceberg"]\niceberg = { catalog = "lake", table = "a.b", other = 1 }', "unknown-setting"),
        (
            'publishers = ["iceberg"]\niceberg = { table = "a.b", catalog = { type = "rest", token = "x" } }',
            "credential-in-configuration",
        ),
        (
            'publishers = ["iceberg"]\niceberg = { table = "a.b", catalog = { uri = "postgresql://me:secret@db/x" } }',
            "credential-in-configuration",
        ),
        (
            'publishers = ["iceberg"]\niceberg = { table = "a.b", catalog = { "s3.secret-access-key" = "x" } }',
            "credential-in-configuration",
        ),
    ],
)
def test_wrong_settings_are_refused(lines: str, code: str) -> None:
    text = f'[tables.t]\nlanding = "/a/l"\nprocessed = "/a/p"\nkey = ["k"]\npartition_by = ["d"]\n{lines}\n'
    with pytest.raises(ConfigurationError) as raised:
        parse("lakeupsert.toml", text.encode(), {})
    assert raised.value.code == code
    assert "secret" not in raised.value.message.replace("secret-access-key", "")
