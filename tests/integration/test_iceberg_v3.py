"""`format_version = 3`: deletion vectors in shared Puffin objects, and row ids, in a table of a REST catalog."""

import json
import shutil
import zlib
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastavro
import pyiceberg.catalog
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table as IcebergTable
from pyiceberg.utils.config import Config

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.config import IcebergSettings, parse
from lakeupsert.errors import ConfigurationError, DamagedTableError, TryAgainError
from lakeupsert.publishers import iceberg_catalog, iceberg_deletes, iceberg_snapshot
from lakeupsert.publishers.iceberg import IcebergPublisher
from lakeupsert.publishers.iceberg_snapshot import FOLDER
from lakeupsert.rows.vectors import MAGIC
from tests.harness.faults import FAULTS, Fault, Killed, Points
from tests.harness.lake import Lake, row
from tests.harness.publishers import publish_in_threads
from tests.harness.servers import Server


class RestLake(Lake):
    """A lake whose Iceberg table is in a REST catalog; delta files, so that rows are superseded by vectors."""

    def __init__(self, root: Path, uri: str, **settings: Any) -> None:
        catalog = {"type": "rest", "uri": uri}
        self.iceberg = IcebergSettings(catalog=catalog, table=f"sales.t{clock.new_id()}", format_version=3)
        super().__init__(root, **{"publishers": ("iceberg",), "iceberg": self.iceberg, "strategy": "delta", **settings})

    @property
    def catalog(self) -> Catalog:
        return load_catalog("default", **self.iceberg.properties)

    @property
    def published(self) -> IcebergTable:
        """The Iceberg table, as pyiceberg finds it by itself."""
        return self.catalog.load_table(self.iceberg.table)

    def metadata(self) -> dict[str, Any]:
        """What the catalog has written."""
        location = self.published.metadata_location.removeprefix("file:")
        found: dict[str, Any] = json.loads(Path("/" + location.lstrip("/")).read_bytes())
        return found

    def numbers(self) -> list[int]:
        return [int(s["summary"]["lakeupsert.snapshot"]) for s in self.metadata()["snapshots"]]

    def manifests(self, content: int) -> list[dict[str, Any]]:
        """Of data (0) or of deletes (1), in the newest snapshot."""
        metadata = self.metadata()
        (current,) = (s for s in metadata["snapshots"] if s["snapshot-id"] == metadata["current-snapshot-id"])
        return [manifest for manifest in avro(current["manifest-list"]) if manifest["content"] == content]

    def listed(self, content: int) -> list[dict[str, Any]]:
        """Of live files."""
        found = [entry for manifest in self.manifests(content) for entry in avro(manifest["manifest_path"])]
        return [entry for entry in found if entry["status"] != 2]

    def objects(self, ending: str = "") -> set[str]:
        """What the publisher has written."""
        root = self.root / "processed" / FOLDER
        found = {path for path in root.rglob("*") if path.is_file() and path.name.endswith(ending)}
        return {str(path.relative_to(root)) for path in found if path.name[0] != "."}  # Hadoop's checksums

    def update(self, number: int, days: range = range(3), keys: range | None = None) -> None:
        """A night that brings the next version of some keys."""
        self.land(f"{number}.jsonl", [row(f"k{i:03}", day, number, number) for day in days for i in keys or range(30)])
        self.run()


def avro(address: str) -> list[dict[str, Any]]:
    with open(address.removeprefix("file://"), "rb") as source:
        return list(fastavro.reader(source))  # type: ignore[arg-type]


@pytest.fixture
def uri(iceberg_rest: Server) -> str:
    return f"http://127.0.0.1:{iceberg_rest.port}"


@pytest.fixture
def lake(tmp_path: Path, uri: str) -> RestLake:
    return RestLake(tmp_path / "lake", uri)


def test_every_snapshot_is_its_snapshot(lake: RestLake) -> None:
    """Nights, a rename, a compaction, a restore, a reset."""
    for number in range(4):
        lake.update(number, keys=range(number, 30, number + 1))
    lake.table.rename_column("v", "value")
    lake.land("renamed.jsonl", [{**row("k000", 0, 50), "value": 7, "v": 8}])
    lake.run()
    lake.table.compact(full=True)
    lake.table.restore("1", dry=False)
    lake.update(6, keys=range(3))
    for reset in (False, True):
        lake.table.publish(to="iceberg", reset=reset)
        table = lake.published
        assert table.metadata.format_version == 3
        known = table.metadata.snapshots
        assert len(known) == (1 if reset else len(lake.table.snapshots()))
        for snapshot in known:
            assert snapshot.summary
            number = int(snapshot.summary["lakeupsert.snapshot"] or -1)
            assert rows_of(table, snapshot.snapshot_id) == lake_rows(lake, number), number
    assert not lake.objects(".deletes")


def rows_of(table: IcebergTable, snapshot: int | None = None) -> list[str]:
    found = table.scan(snapshot_id=snapshot).to_arrow()
    return sorted(repr(sorted(one.items())) for one in found.to_pylist())


def lake_rows(lake: Lake, snapshot: int | str = "published") -> list[str]:
    return sorted(repr(sorted(one.items())) for one in lake.rows(snapshot))


def test_vectors_of_a_commit_share_an_object(lake: RestLake) -> None:
    """In the bytes of Delta: length, magic number, bitmap, CRC-32."""
    lake.update(0, range(20))
    lake.update(1, range(20), range(0, 30, 7))
    assert len(lake.objects(".puffin")) == 1
    entries = [entry["data_file"] for entry in lake.listed(1)]
    assert len(entries) == 20
    (address,) = {entry["file_path"] for entry in entries}
    body = Path(address.removeprefix("file://")).read_bytes()
    size = int.from_bytes(body[-12:-8], "little")
    footer = json.loads(body[-12 - size : -12])
    assert (body[:4], body[-4:], body[-16 - size : -12 - size], body[-8:-4]) == (b"PFA1", b"PFA1", b"PFA1", bytes(4))
    by_file = {blob["properties"]["referenced-data-file"]: blob for blob in footer["blobs"]}
    for entry in entries:
        blob = by_file.pop(entry["referenced_data_file"])
        at, length = entry["content_offset"], entry["content_size_in_bytes"]
        assert (at, length) == (blob["offset"], blob["length"])
        assert blob["type"] == "deletion-vector-v1"
        assert (blob["snapshot-id"], blob["sequence-number"], blob["fields"]) == (-1, -1, [2147483645])
        assert blob["properties"]["cardinality"] == str(entry["record_count"]) == "5"
        data = body[at : at + length]
        assert data[:4] == (length - 8).to_bytes(4)
        assert data[4:8] == MAGIC
        assert data[-4:] == zlib.crc32(data[4:-4]).to_bytes(4)
        assert (entry["file_format"], entry["file_size_in_bytes"]) == ("PUFFIN", len(body))
    assert not by_file


def test_vectors_that_are_too_large_for_one_object(lake: RestLake, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2000
    monkeypatch.setattr(iceberg_deletes, "VECTOR_OBJECT_BYTES", most)
    lake.update(0, range(12))
    lake.update(1, range(12), range(0, 30, 7))
    sizes = {entry["data_file"]["file_path"]: entry["data_file"]["file_size_in_bytes"] for entry in lake.listed(1)}
    assert 1 < len(sizes) < 12
    assert max(sizes.values()) <= most
    lake.check()


def test_row_keeps_its_id_while_its_file_stays(lake: RestLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_snapshot, "MOST_ENTRIES", 4)  # some manifests are written again, and some are not
    ids: dict[str, int] = {}
    for number in range(6):
        lake.update(number, range(number % 4, 8, 1 + number % 3), range(number, 30, number + 1))
        metadata, ranges = lake.metadata(), []
        (current,) = (s for s in metadata["snapshots"] if s["snapshot-id"] == metadata["current-snapshot-id"])
        for manifest in lake.manifests(0):
            row_id = manifest["first_row_id"]
            for entry in avro(manifest["manifest_path"]):
                file = entry["data_file"]
                if entry["status"] == 2:
                    continue
                first = file["first_row_id"]
                if first is None:  # it inherits one
                    first, row_id = row_id, row_id + file["record_count"]
                assert ids.setdefault(file["file_path"], first) == first
                ranges.append((first, first + file["record_count"]))
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges)), ranges
        assert ranges[-1][1] <= metadata["next-row-id"] == current["first-row-id"] + current["added-rows"]
    assert len(lake.manifests(0)) > 1


def test_vector_that_came_back_by_a_restore(lake: RestLake) -> None:
    """pyiceberg applies all vectors of an object that it reads. Here partition 1 has its vector in the object that also has the
    withdrawn one of partition 0, whose data file has an earlier one again."""
    lake.update(0, range(2))
    lake.update(1, range(2), range(3))
    lake.update(2, range(1), range(3, 9))
    lake.table.publish(to="iceberg", reset=True)
    assert len({entry["data_file"]["file_path"] for entry in lake.listed(1)}) == 1
    lake.table.restore("1", dry=False)
    lake.run()
    assert rows_of(lake.published) == lake_rows(lake)
    lake.table.restore("0", dry=False)
    lake.update(3, range(1, 2), range(20, 25))
    lake.check()


def test_night_adds_only_its_vectors(lake: RestLake) -> None:
    lake.update(0, range(20))
    lake.update(1, range(20), range(3))
    before = lake.objects()
    lake.update(2, range(2), range(5, 7))
    added = lake.objects() - before
    assert len([name for name in added if name.endswith(".puffin")]) == 1
    shared = {entry["data_file"]["file_path"] for entry in lake.listed(1)}
    assert len(shared) == 2, "18 partitions keep theirs"
    assert len(added) == 5, "vectors, two manifests, a list, metadata"
    lake.check()


@pytest.mark.parametrize("newest_is_new", [True, False])
def test_upgrade_and_no_way_back(tmp_path: Path, uri: str, newest_is_new: bool) -> None:
    root = tmp_path / "lake"
    lake = RestLake(root, uri)
    two = IcebergSettings(catalog=lake.iceberg.catalog, table=lake.iceberg.table)
    lake.mend(lambda row: False, iceberg=two)
    for number in range(2):
        lake.update(number, keys=range(0, 30, 2 + number))
    assert lake.published.metadata.format_version == 2
    assert lake.objects(".deletes")
    lake.mend(lambda row: False, iceberg=lake.iceberg)
    if newest_is_new:
        lake.update(2, range(1), range(3))
    else:
        lake.table.publish(to="iceberg")
        assert lake.published.metadata.format_version == 2, "it has nothing to commit"
        lake.update(2, range(1), range(3))
    assert lake.published.metadata.format_version == 3
    assert {entry["data_file"]["file_format"] for entry in lake.listed(1)} == {"PUFFIN"}
    lake.update(3, keys=range(5))
    lake.check()
    assert lake.numbers() == [0, 1, 2, 3]
    lake.mend(lambda row: False, iceberg=two)
    lake.land("4.jsonl", [row("k000", 0, 9, 9)])
    lake.table.run(host="local")
    with pytest.raises(ConfigurationError) as raised:
        lake.table.publish(to="iceberg")
    assert raised.value.code == "bad-setting"
    assert "--reset" in raised.value.next
    assert lake.numbers() == [0, 1, 2, 3]
    lake.table.publish(to="iceberg", reset=True)
    assert lake.published.metadata.format_version == 2
    lake.check()


def test_metadata_that_was_lost_is_written_anew_by_a_reset(lake: RestLake) -> None:
    """The catalog answers with an error of its own, which names it."""
    lake.update(0)
    (path,) = (lake.root / "processed" / FOLDER / "metadata").glob("*.metadata.json")
    path.unlink()
    with pytest.raises(DamagedTableError) as raised:
        lake.table.publish(to="iceberg")
    assert raised.value.code == "damaged-object"
    assert path.name in raised.value.message
    assert "publish --to iceberg --reset" in raised.value.next
    lake.table.publish(to="iceberg", reset=True)
    lake.check()


def test_many_publishers_at_once_make_one_snapshot_each(lake: RestLake) -> None:
    publish_in_threads(lake, "iceberg", rounds=6)
    assert lake.numbers() == list(range(6))
    lake.check()


class FaultyCatalog:
    """A catalog with a fault point at each call."""

    points = Points()

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._catalog, name)
        if name not in ("load_table", "register_table", "commit_table", "create_namespace"):
            return found

        def call(*arguments: Any) -> Any:
            with self.points.at(f"catalog {name}", commit=name == "commit_table"):
                return found(*arguments)

        return call


@pytest.fixture
def faulty_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = iceberg_catalog._open
    monkeypatch.setattr(iceberg_catalog, "_open", lambda settings: FaultyCatalog(opened(settings)))


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("begins", [False, pytest.param(True, marks=pytest.mark.long)], ids=["goes on", "begins"])
@pytest.mark.usefixtures("faulty_catalog")
def test_fault_at_every_call_of_a_publish_is_healed_by_the_next(
    folder: Path, uri: str, fault: Fault, begins: bool
) -> None:
    root, copy = folder / "lake", folder / "copy"  # Iceberg's paths are absolute: each try is made in the same place
    lake = RestLake(root, uri)
    with pytest.MonkeyPatch.context() as dead:
        if begins:
            dead.setattr(IcebergPublisher, "catch_up", lambda *a: None)
        lake.update(0)
        lake.update(1, keys=range(0, 30, 4))
    before = lake_rows(lake)
    lake.land("2.jsonl", [row(f"k{i:03}", day, 9, 9) for day in range(3) for i in range(0, 30, 3)])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    lake.table.close()
    location = None if begins else lake.published.metadata_location
    shutil.copytree(root, copy)

    def strike(number: int) -> list[str]:
        catalog = lake.catalog
        if catalog.namespace_exists("sales") and catalog.table_exists(lake.iceberg.table):
            catalog.drop_table(lake.iceberg.table)
        shutil.rmtree(root)
        shutil.copytree(copy, root)
        if location:
            catalog.register_table(lake.iceberg.table, location)
        lake.points = FaultyCatalog.points = Points()
        lake.reopen()
        lake.points.arm(number, fault)
        with suppress(Killed, TryAgainError):
            lake.table.publish()
        seen = lake.points.seen
        lake.points.disarm()
        lake.reopen()
        return seen

    calls = strike(-1)
    assert any("catalog" in call for call in calls)
    assert any(".puffin" in call for call in calls), calls
    for number, call in enumerate(calls):
        strike(number)
        try:
            if lake.catalog.table_exists(lake.iceberg.table):
                assert rows_of(lake.published) in (before, lake_rows(lake))
            lake.table.publish(to="iceberg")
            assert lake.numbers() == ([2] if begins else [0, 1, 2])
            lake.check()
        except BaseException as e:
            e.add_note(f"struck at call {number} ({call}): {fault.value}")
            raise


class Later(clock.Source):
    """Two hours from now: objects of a commit that somebody may make just now are kept for an hour."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


def test_vacuum_keeps_vectors_that_are_needed(tmp_path: Path, uri: str) -> None:
    lake = RestLake(tmp_path / "lake", uri, superseded_retention="1h", keep_snapshots=2)
    lake.update(0)
    lake.update(1, range(2, 3), range(9))  # the vector of this partition stays as it is
    lasting = lake.objects(".puffin")
    for number in range(2, 8):
        lake.update(number, range(2), range(number, 30, 5))
    lake.table.vacuum(dry=False)
    orphan = lake.root / "processed" / FOLDER / "deletes" / "3-orphan.puffin"
    orphan.write_text("of a publisher that died")
    before = lake.objects(".puffin")
    with clock.use(Later()):
        lake.table.vacuum(dry=False)
        lake.table.vacuum(dry=False)
    lake.reopen()
    needed = {entry["data_file"]["file_path"].rpartition("/")[2] for entry in lake.listed(1)}
    after = {name.rpartition("/")[2] for name in lake.objects(".puffin")}
    assert needed <= after
    assert lasting <= lake.objects(".puffin")
    assert len(after) <= 4 < len(before)
    assert not orphan.exists()
    lake.check()


def test_other_catalogs_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zones = f'[tables.t]\nlanding = "{tmp_path}/l"\nprocessed = "{tmp_path}/p"\nkey = ["k"]\npartition_by = ["d"]\n'
    shown = 'publishers = ["iceberg"]\niceberg = {{ table = "a.b", format_version = {}, catalog = {} }}\n'
    others = ('{ type = "sql", uri = "sqlite:////x.db" }', '{ uri = "sqlite:////x.db" }', '{ type = "glue" }')
    for version, catalog in (*((3, other) for other in others), (4, '"lake"')):
        with pytest.raises(ConfigurationError) as raised:
            parse("lakeupsert.toml", (zones + shown.format(version, catalog)).encode(), {})
        assert raised.value.code == "bad-setting"
        assert "format_version" in raised.value.message
    # What kind a catalog in pyiceberg's own configuration is, only its first call tells.
    monkeypatch.setenv("PYICEBERG_CATALOG__ELSEWHERE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # which it has read already
    lake = Lake(
        tmp_path / "lake",
        publishers=("iceberg",),
        iceberg=IcebergSettings(catalog="elsewhere", table="a.b", format_version=3),
    )
    lake.land("0.jsonl", [row("k000", 0, 1)])
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "bad-setting"


def test_settings_that_config_prints_are_the_same(tmp_path: Path) -> None:
    lake = RestLake(tmp_path / "lake", "http://127.0.0.1:1")
    answer = CliRunner().invoke(main, ["config", "--config", str(lake.configure())])
    assert parse(str(lake.root / "lakeupsert.toml"), answer.output.encode(), {}).tables["t"] == lake.settings
