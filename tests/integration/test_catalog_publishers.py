"""`publishers = ["hive"]` and `["glue"]`: a reader of the catalog sees the rows that our readers see.

The reader here knows nothing of the publisher: it asks the catalog for partitions, reads the manifest in each one's folder, and
opens the files that it lists.
"""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hive_metastore import ttypes
from hive_metastore.ThriftHiveMetastore import Client
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import GlueSettings, HiveSettings, TableSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError, TryAgainError
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.publishers import publisher
from lakeupsert.publishers import glue, hive, symlink
from lakeupsert.storage import open_store
from lakeupsert.testing.faults import Fault, Killed, Points
from lakeupsert.testing.lake import Lake, row
from lakeupsert.testing.publishers import publish_in_threads
from lakeupsert.testing.readers import Readers
from lakeupsert.testing.servers import Server

Values = tuple[str, ...]
Rows = list[dict[str, Any]]


class GlueServer:
    kind = "glue"

    def __init__(self) -> None:
        self.points = Points()
        self.client = boto3.client("glue")
        with suppress(self.client.exceptions.AlreadyExistsException):
            self.client.create_database(DatabaseInput={"Name": "lake"})

    def settings(self, table: str) -> dict[str, Any]:
        return {"glue": GlueSettings(database="lake", table=table)}

    def partitions(self, table: str) -> dict[Values, str]:
        pages = self.client.get_paginator("get_partitions").paginate(DatabaseName="lake", TableName=table)
        return {tuple(p["Values"]): p["StorageDescriptor"]["Location"] for page in pages for p in page["Partitions"]}

    def columns(self, table: str) -> list[list[tuple[str, str]]]:
        """Those of the table, then of each partition."""
        found = [self.client.get_table(DatabaseName="lake", Name=table)["Table"]]
        found += self.client.get_partitions(DatabaseName="lake", TableName=table)["Partitions"]
        return [[(c["Name"], c["Type"]) for c in one["StorageDescriptor"]["Columns"]] for one in found]

    def create_foreign(self, table: str) -> None:
        self.client.create_table(DatabaseName="lake", TableInput={"Name": table, "Parameters": {"owner": "another"}})

    def parameters(self, table: str) -> dict[str, str]:
        return dict(self.client.get_table(DatabaseName="lake", Name=table)["Table"]["Parameters"])

    def drop_partition(self, table: str, values: Values) -> None:
        self.client.delete_partition(DatabaseName="lake", TableName=table, PartitionValues=list(values))

    def add_partition(self, table: str, values: Values) -> None:
        entry = {"Values": list(values), "StorageDescriptor": {"Location": "file:///nowhere"}}
        self.client.create_partition(DatabaseName="lake", TableName=table, PartitionInput=entry)


class HiveServer:
    kind = "hive"

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.points = Points()

    def client(self) -> AbstractContextManager[Any]:
        address = urlsplit(self.uri)
        transport = TBufferedTransport(TSocket(address.hostname, address.port))
        transport.open()
        client = Client(TBinaryProtocol(transport))
        client.close = transport.close  # no generator: thrift's exceptions can't pass through one
        return closing(client)

    def settings(self, table: str) -> dict[str, Any]:
        return {"hive": HiveSettings(uri=self.uri, database="default", table=table)}

    def partitions(self, table: str) -> dict[Values, str]:
        with self.client() as client:
            return {tuple(p.values): p.sd.location for p in client.get_partitions("default", table, -1)}

    def columns(self, table: str) -> list[list[tuple[str, str]]]:
        with self.client() as client:
            found = [client.get_table("default", table), *client.get_partitions("default", table, -1)]
        return [[(c.name, c.type) for c in one.sd.cols] for one in found]

    def create_foreign(self, table: str) -> None:
        descriptor = ttypes.StorageDescriptor(
            cols=[ttypes.FieldSchema("a", "int", None)],
            serdeInfo=ttypes.SerDeInfo(serializationLib=symlink.SERDE, parameters={}),
            inputFormat=symlink.INPUT_FORMAT,
            outputFormat=symlink.OUTPUT_FORMAT,
            bucketCols=[],
            sortCols=[],
            parameters={},
        )
        with self.client() as client:
            client.create_table(
                ttypes.Table(
                    dbName="default",
                    tableName=table,
                    sd=descriptor,
                    partitionKeys=[],
                    parameters={"owner": "another"},
                    tableType="MANAGED_TABLE",
                )
            )

    def parameters(self, table: str) -> dict[str, str]:
        with self.client() as client:
            return dict(client.get_table("default", table).parameters)

    def drop_partition(self, table: str, values: Values) -> None:
        with self.client() as client:
            client.drop_partition("default", table, list(values), False)

    def add_partition(self, table: str, values: Values) -> None:
        with self.client() as client:
            client.append_partition("default", table, list(values))


Server_ = GlueServer | HiveServer
ADD = {"hive": "add_partitions", "glue": "batch_create_partition"}
CHANGE = {"hive": "alter_partitions_with_environment_context", "glue": "batch_update_partition"}


@pytest.fixture(scope="module")
def metastore() -> Iterator[str]:
    with Readers() as readers:
        yield readers.metastore


@pytest.fixture(params=["glue", pytest.param("hive", marks=pytest.mark.readers)])
def catalog(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server_:
    """A real catalog; each request of the publisher goes through its ``points``."""
    if request.param == "hive":
        server: Server_ = HiveServer(request.getfixturevalue("metastore"))

        class FaultyClient:
            def __init__(self, protocol: Any) -> None:
                self._client = Client(protocol)

            def __getattr__(self, name: str) -> Any:
                def call(*arguments: object) -> object:
                    refusal = None
                    with server.points.at(f"catalog {name}"):
                        try:
                            answer = getattr(self._client, name)(*arguments)
                        except TException as e:  # can't pass through a context manager, which would change it
                            refusal = e
                    if refusal is not None:
                        raise refusal
                    return answer

                return call

        monkeypatch.setattr(hive, "Client", FaultyClient)
        return server
    moto: Server = request.getfixturevalue("moto")
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    server = GlueServer()
    send = glue.GlueCatalog._call

    def call(self: Any, operation: str, **parameters: Any) -> Any:
        with server.points.at(f"catalog {operation}"):
            return send(self, operation, **parameters)

    monkeypatch.setattr(glue.GlueCatalog, "_call", call)
    return server


def settings_of(catalog: Server_) -> tuple[str, dict[str, Any]]:
    """The name of a new table, and the settings of a lake that is shown there."""
    name = f"t_{clock.new_id()[:12]}"
    return name, {"publishers": (catalog.kind,), **catalog.settings(name)}


class Shown:
    """A lake that a catalog shows, as ``name`` there."""

    def __init__(self, root: Path, catalog: Server_, count: int = 1, **settings: Any) -> None:
        self.catalog = catalog
        self.name, own = settings_of(catalog)
        self.lake = Lake(root, **{**own, **settings})
        for number in range(count):
            self.night(number)

    def night(self, number: int) -> None:
        """Three partitions; every night updates a third of the keys."""
        rows = [row(f"k{i:03}", day, number, number) for day in range(3) for i in range(0, 90, 3 if number else 1)]
        self.lake.land(f"{number}.jsonl", rows)
        self.lake.run()

    def rows(self, names: Mapping[str, str] = {}) -> Rows:
        """``names``: those in files, where they differ."""
        found = rows_in(self.lake, self.catalog.partitions(self.name), names)
        return [one for _, some in sorted(found.items()) for one in some]

    def assert_exact(self) -> None:
        head = self.lake.table.objects.snapshots.head()
        assert self.standing() == (head and head.number, 0)
        assert self.rows() == self.lake.rows()

    def standing(self) -> tuple[int | None, int | None]:
        found = self.lake.table.status().publishers[self.catalog.kind]
        return found.snapshot, found.behind


def rows_in(lake: Lake, partitions: Mapping[Values, str], names: Mapping[str, str] = {}) -> dict[str, Rows]:
    """The rows that each partition's manifest leads to, by day."""
    store = open_store(lake.settings.processed)
    root = store.uri().rstrip("/") + "/"
    found: dict[str, Rows] = {}
    for (day,), kept in partitions.items():
        location = kept.replace("file:/", "file:///") if kept.startswith("file:/") else kept
        assert location.startswith(root)
        files = store.get(f"{location.removeprefix(root)}/manifest").decode().splitlines()
        assert all(file.startswith(root) for file in files)
        some: Rows = []
        for file in files:
            with store.open(file.removeprefix(root)) as source:
                some += pq.read_table(source).to_pylist()
        some = [{**one, "d": date.fromisoformat(day)} for one in some]
        order = [names.get(name, name) for name in lake.table.to_arrow().schema.names]
        some = [{name: one.get(name) for name in order} for one in some]
        found[day] = sorted(some, key=lambda one: (one["k"], one["l"]))
    return found


def by_day(rows: Rows) -> dict[str, Rows]:
    found = defaultdict(list)
    for one in rows:
        found[one["d"].isoformat()].append(one)
    return dict(found)


def test_every_night_is_shown(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 3)
    shown.assert_exact()
    old = catalog.partitions(shown.name)
    shown.lake.land("one.jsonl", [row("k001", 1, 9, 9), row("new", 5, 9, 9)])
    shown.lake.run()
    shown.assert_exact()
    now = catalog.partitions(shown.name)
    assert {values for values in now if now[values] != old.get(values)} == {("2020-01-02",), ("2020-01-06",)}
    shown.lake.table.reprocess(lambda partition: True, host="local")
    shown.assert_exact()
    shown.lake.table.restore("1", dry=False)
    shown.lake.run()
    shown.assert_exact()
    assert ("2020-01-06",) not in catalog.partitions(shown.name), "the restore took back all of its rows"
    shown.lake.land("gone.jsonl", [row(f"k{i:03}", 0, 99, op="D") for i in range(90)])
    shown.lake.run()
    shown.assert_exact()
    assert sorted(catalog.partitions(shown.name)) == [("2020-01-02",), ("2020-01-03",)]


def test_a_lake_on_s3(tmp_path: Path, moto: Server, catalog: Server_, new_place: Callable[[Server], str]) -> None:
    if catalog.kind == "hive":
        pytest.skip("the metastore looks at folders, and this one has no jars for S3")
    place = new_place(moto)
    shown = Shown(tmp_path / "lake", catalog, 2, processed=f"{place}/sales", queue=str(tmp_path / "queue.sqlite"))
    shown.assert_exact()
    assert all(location.startswith(f"{place}/sales/") for location in catalog.partitions(shown.name).values())


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER, Fault.KILL_AFTER])
@pytest.mark.parametrize("begins", [False, True], ids=["goes on", "begins"])
def test_fault_at_every_call_is_healed_by_the_next_publish(
    tmp_path: Path, catalog: Server_, fault: Fault, begins: bool
) -> None:
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i:03}", day, 0, 0) for day in range(3) for i in range(9)])
    lake.run()
    before = by_day(lake.rows())
    lake.land("1.jsonl", [row(f"k{i:03}", day, 9, 9) for day in (0, 3) for i in range(0, 9, 2)])
    lake.land("2.jsonl", [row(f"k{i:03}", 1, 9, op="D") for i in range(9)])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    calls = []
    for number in itertools.count():
        struck = lake.copy(tmp_path / "struck")
        name, settings = settings_of(catalog)
        struck.mend(lambda row: False, **settings)
        catalog.points.disarm()
        if not begins:
            first = struck.table.objects.snapshots.get(0)
            assert first is not None
            publisher(struck.opened, catalog.kind).catch_up(first)
        catalog.points = struck.points
        struck.points.arm(number, fault, ("catalog", "create _lakeupsert/symlink"))
        with suppress(Killed, TryAgainError):
            struck.table.publish()
        calls.append(struck.points.struck)
        struck.points.disarm()
        struck.reopen()
        catalog.points = struck.points
        after = by_day(struck.rows()) if struck.table.snapshots()[0].number else {}
        with suppress(Exception if begins else ()):  # there may be no table yet
            for day, rows in rows_in(struck, catalog.partitions(name)).items():
                assert rows in (before.get(day), after.get(day)), f"{calls[-1]}: a part of {day}"
        if struck.table.snapshots()[0].number and struck.table.status().publishers[catalog.kind].is_newest:
            assert rows_in(struck, catalog.partitions(name)) == after, f"{calls[-1]}: it says that it shows all"
        struck.table.publish(to=catalog.kind)
        found = rows_in(struck, catalog.partitions(name))
        assert found == by_day(struck.rows()), f"struck at {calls[-1]}"
        assert struck.table.status().publishers[catalog.kind].is_newest
        struck.table.close()
        shutil.rmtree(struck.root)
        if calls[-1] is None:
            break
    assert sum(str(call).startswith("catalog") for call in calls) >= (6 if begins else 7)
    assert sum(str(call).startswith("create _lakeupsert/symlink/") for call in calls) >= 2


def test_many_publishers_at_once(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0)
    publish_in_threads(shown.lake, catalog.kind, rounds=8)
    shown.assert_exact()


def test_slower_publisher_of_an_earlier_snapshot_shows_the_later_one(tmp_path: Path, catalog: Server_) -> None:
    """It would point partitions back to the earlier one."""
    shown = Shown(tmp_path / "lake", catalog, 1)
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(1)
        shown.night(2)
    slow = Table("t", shown.lake.settings)
    earlier = shown.lake.table.objects.snapshots.get(1)
    assert earlier is not None
    one = publisher(shown.lake.opened, catalog.kind)
    written = f"catalog {CHANGE[catalog.kind]}"
    catalog.points.amid(0, lambda: slow.publish(to=catalog.kind), written)  # type: ignore[arg-type]
    one.catch_up(earlier)
    assert catalog.points.struck == written
    catalog.points.disarm()
    slow.close()
    shown.lake.reopen()
    shown.assert_exact()


def test_foreign_table_is_never_touched(tmp_path: Path, catalog: Server_) -> None:
    name, settings = settings_of(catalog)
    catalog.create_foreign(name)
    before = catalog.parameters(name)
    lake = Lake(tmp_path / "lake", **settings)
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    assert len(lake.rows()) == 1, "the night goes on"
    for reset in (False, True):
        with pytest.raises(RefusedError) as raised:
            lake.table.publish(to=catalog.kind, reset=reset)  # type: ignore[arg-type]
        assert raised.value.code == "foreign-table"
        assert name in raised.value.message
    assert catalog.parameters(name) == before
    assert lake.table.status().publishers[catalog.kind].snapshot is None


def test_table_of_another_lake_is_foreign(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog)
    other = Lake(tmp_path / "other", **{"publishers": (catalog.kind,), **catalog.settings(shown.name)})
    other.land("0.jsonl", [row("k", 0, 0)])
    other.run()
    with pytest.raises(RefusedError, match=shown.name):
        other.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    shown.assert_exact()


def test_publisher_that_was_dead_for_nights_catches_up(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog)
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(1)
        shown.night(2)
    assert shown.standing() == (0, 2)
    shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    shown.assert_exact()


def test_what_others_did_to_partitions_is_mended(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2)
    catalog.drop_partition(shown.name, ("2020-01-01",))
    catalog.add_partition(shown.name, ("2019-01-01",))
    catalog.drop_partition(shown.name, ("2020-01-02",))
    catalog.add_partition(shown.name, ("2020-01-02",))  # to another place
    shown.lake.table.publish()
    shown.assert_exact()


def test_partition_that_the_catalog_refuses_is_compared_and_tried_again(tmp_path: Path, catalog: Server_) -> None:
    """Somebody makes one partition of a batch, and drops one of another batch, just before the request."""
    shown = Shown(tmp_path / "lake", catalog, 0)
    shown.lake.land("0.jsonl", [row("k", 0, 0)])
    shown.lake.run()
    shown.lake.land("1.jsonl", [row("k", day, 1) for day in range(1, 4)])
    made = f"catalog {ADD[catalog.kind]}"
    catalog.points.amid(0, lambda: catalog.add_partition(shown.name, ("2020-01-03",)), made)
    shown.lake.run()
    assert catalog.points.struck == made
    shown.assert_exact()
    shown.lake.land("2.jsonl", [row("k", day, 2) for day in range(4)])
    changed = f"catalog {CHANGE[catalog.kind]}"
    catalog.points.amid(0, lambda: catalog.drop_partition(shown.name, ("2020-01-03",)), changed)
    shown.lake.run()
    assert catalog.points.struck == changed
    catalog.points.disarm()
    shown.assert_exact()


def test_manifest_with_other_files_stops_the_publisher(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 1)
    before = shown.rows()
    stray = tmp_path / "lake/processed/_lakeupsert/symlink/1/d=2020-01-02/manifest"
    stray.parent.mkdir(parents=True)
    stray.write_text("file:///nowhere\n")
    shown.night(1)
    with pytest.raises(DamagedTableError, match="2020-01-02/manifest") as raised:
        shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    assert raised.value.code == "damaged-object"
    assert shown.rows() == before
    stray.unlink()
    shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    shown.assert_exact()


def test_reset_begins_anew(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2)
    shown.lake.table.publish(to=catalog.kind, reset=True)  # type: ignore[arg-type]
    shown.assert_exact()


def requests_of(catalog: Server_, call: Callable[[], object]) -> list[str]:
    catalog.points.arm(-1, Fault.BEFORE)
    call()
    seen = [name.removeprefix("catalog ") for name in catalog.points.seen]
    catalog.points.disarm()
    return seen


def test_only_what_changed_is_sent_in_batches(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0)
    days = 230
    shown.lake.land("0.jsonl", [row("k", day, 0) for day in range(days)])
    first = requests_of(catalog, shown.lake.run)
    add, change = ADD[catalog.kind], CHANGE[catalog.kind]
    assert (first.count(add), first.count(change)) == (3, 0)
    shown.lake.land("1.jsonl", [row("k", day, 1) for day in range(0, days, 2)])
    second = requests_of(catalog, shown.lake.run)
    assert (second.count(add), second.count(change)) == (0, 2)
    assert not {add, change} & {*requests_of(catalog, shown.lake.table.publish)}
    shown.assert_exact()


def test_merges_rewrite(tmp_path: Path, catalog: Server_, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lakes = [Shown(tmp_path / "lake", catalog, 0).lake, Lake(tmp_path / "plain")]
    for lake in lakes:
        lake.land("0.jsonl", [row(f"k{i}", 0, 0, i * i) for i in range(20_000)])
        lake.run()
        lake.land("1.jsonl", [row(f"k{i}", 0, 1) for i in range(5)])
        lake.run()
    assert [sum(file.superseded for file in lake.table.files()) for lake in lakes] == [0, 5]


def test_vectors_from_before_are_refused_until_a_compaction(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, publishers=(), strategy="delta")
    shown.night(0)
    shown.night(1)
    shown.lake.mend(lambda row: False, publishers=(catalog.kind,), strategy="auto")
    with pytest.raises(ConfigurationError) as raised:
        shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    assert raised.value.code == f"unfit-for-{catalog.kind}"
    assert "compact --full" in raised.value.next
    assert shown.standing() == (None, 2)
    shown.lake.table.compact(full=True)
    shown.assert_exact()


def test_renamed_column_keeps_its_name_there(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2)
    before = catalog.columns(shown.name)
    shown.lake.table.rename_column("v", "value")
    schema = {("value" if name == "v" else name): type_ for name, type_ in shown.lake.settings.schema.items()}
    shown.lake.mend(lambda row: False, schema=schema)
    shown.lake.land("2.jsonl", [{("value" if name == "v" else name): v for name, v in row("k000", 0, 5, 5).items()}])
    standing = shown.lake.table.run(host="local").publish.publishers[catalog.kind]
    assert (standing.problem, standing.behind) == (None, 0)
    assert "'value' is 'v'" in str(standing.warning)
    assert catalog.columns(shown.name) == before
    ours = [{("v" if name == "value" else name): value for name, value in one.items()} for one in shown.lake.rows()]
    assert shown.rows(names={"value": "v"}) == ours


def test_files_with_other_names_need_a_reprocess_and_a_drop_a_reset(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, publishers=())
    shown.night(0)
    shown.lake.table.rename_column("v", "value")
    shown.lake.mend(lambda row: False, publishers=(catalog.kind,))

    def refused() -> str:
        with pytest.raises(ConfigurationError) as raised:
            shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
        assert raised.value.code == f"unfit-for-{catalog.kind}"
        return raised.value.next

    assert "reprocess" in refused()
    shown.lake.table.reprocess(lambda partition: True, host="local")
    shown.assert_exact()
    shown.lake.table.drop_column("value")
    assert "--reset" in refused()
    assert "value" in {name for some in catalog.columns(shown.name) for name, _ in some}
    shown.lake.table.publish(to=catalog.kind, reset=True)  # type: ignore[arg-type]
    shown.assert_exact()


def test_dropped_column_whose_name_comes_back_is_another(tmp_path: Path, catalog: Server_) -> None:
    """Name and type are as before, but old files have the old column's values."""
    shown = Shown(tmp_path / "lake", catalog, 0, schema={}, delete=None)
    shown.lake.land("0.jsonl", [{**row("k", day, 0, 7), "z": 1} for day in range(2)])
    shown.lake.run()
    shown.lake.table.drop_column("z")
    shown.lake.land("1.jsonl", [{**row("k", 1, 1, 8), "z": 2}])
    shown.lake.run()
    with pytest.raises(ConfigurationError) as raised:
        shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    assert "--reset" in raised.value.next
    shown.lake.table.publish(to=catalog.kind, reset=True)  # type: ignore[arg-type]
    (written,) = {name for some in catalog.columns(shown.name) for name, _ in some if name.startswith("z")}
    assert written != "z"
    ours = [{(written if name == "z" else name): value for name, value in one.items()} for one in shown.lake.rows()]
    assert shown.rows(names={"z": written}) == ours


def test_new_column_and_wider_type_reach_every_partition(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 1, schema={"k": "string", "l": "int", "d": "date", "v": "int"})
    shown.lake.mend(lambda row: False, schema={"k": "string", "l": "int", "d": "date", "v": "bigint"})
    shown.lake.land("1.jsonl", [{**row("k000", 0, 5, 1 << 40), "more": "x"}])
    shown.lake.run()
    for columns in catalog.columns(shown.name):
        assert ("v", "bigint") in columns
        assert columns[-1] == ("more", "string")
    assert len(catalog.columns(shown.name)) == 4
    shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [
        ("odd", pa.uint32()),
        ("odd", pa.timestamp("ns")),
        ("odd", pa.float16()),
        ("odd", pa.time64("us")),
        ("odd", pa.struct({"a b": pa.int64()})),
        ("a,b", pa.int64()),
    ],
    ids=str,
)
def test_unfit_column_is_named_and_the_night_goes_on(
    tmp_path: Path, catalog: Server_, field: tuple[str, pa.DataType]
) -> None:
    name, settings = settings_of(catalog)
    (tmp_path / "landing").mkdir()
    rows = pa.table({"k": [1], "d": [date(2020, 1, 1)], "ts": [1], field[0]: pa.array([None], field[1])})
    pq.write_table(rows, tmp_path / "landing" / "0.parquet")
    zones = {"landing": str(tmp_path / "landing"), "processed": str(tmp_path / "processed")}
    table = Table("t", TableSettings(**zones, key=("k",), partition_by=("d",), order_by=("ts",), **settings))
    published = table.run(host="local").publish
    assert published.rows == 1
    problem = published.publishers[catalog.kind].problem
    assert problem is not None
    assert problem.code == f"unfit-for-{catalog.kind}"
    assert repr(field[0]) in problem.message
    assert published.publishers[catalog.kind].snapshot is None
    with pytest.raises(Exception, match=name):
        catalog.parameters(name)


def test_unreachable_catalog_stops_neither_night_nor_status_nor_vacuum(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2, keep_snapshots=1, superseded_retention="0s")
    before = shown.rows()

    def refuse(*_: object, **__: object) -> None:
        raise TryAgainError("catalog-unreachable", "no answer", next="wait")

    with pytest.MonkeyPatch.context() as away:
        away.setattr(catalog.points, "at", refuse)
        shown.night(2)
        standing = shown.lake.table.status().publishers[catalog.kind]
        assert (standing.snapshot, standing.behind) == (None, None)
        config = str(shown.lake.configure())
        answer = CliRunner().invoke(main, ["status", "--json", "--config", config])
        found = json.loads(answer.output)
        assert found["result"]["publishers"][catalog.kind]["problem"]["code"] == "catalog-unreachable"
        assert found["warnings"]
        assert [f.level for f in shown.lake.table.doctor() if f.check == "publishers"] == ["problem"]
        page = tmp_path / "report.html"
        assert CliRunner().invoke(main, ["report", "--config", config, "--output", str(page)]).exit_code == 0
        shown.lake.table.vacuum(dry=False)
    assert shown.rows() == before, "it shows the night before, whose files are still there"
    shown.night(3)
    shown.assert_exact()


def test_server_that_is_not_there(tmp_path: Path, catalog: Server_, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = settings_of(catalog)
    if catalog.kind == "hive":
        settings["hive"] = HiveSettings(uri="thrift://127.0.0.1:1", database="default", table="t")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:1")
        monkeypatch.setattr(glue, "SDK_ATTEMPTS", 1)
    lake = Lake(tmp_path / "lake", **settings)
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    with pytest.raises(TryAgainError) as raised:
        lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    assert raised.value.code == "catalog-unreachable"


def test_database_that_is_not_there(tmp_path: Path, catalog: Server_) -> None:
    own: Any = (
        HiveSettings(uri=catalog.uri, database="nowhere", table="t")
        if isinstance(catalog, HiveServer)
        else GlueSettings(database="nowhere", table="t")
    )
    lake = Lake(tmp_path / "lake", publishers=(catalog.kind,), **{catalog.kind: own})
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    with pytest.raises(LakeupsertError) as raised:
        lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    assert raised.value.code == "catalog-refused"
    assert "nowhere" in raised.value.message


class Later(clock.Source):
    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


def test_vacuum_keeps_manifests_as_long_as_their_files(tmp_path: Path, catalog: Server_) -> None:
    """A query that was planned before a publish still reads them."""
    shown = Shown(tmp_path / "lake", catalog, 3)
    with clock.use(Later()):
        shown.lake.table.vacuum(dry=False)
    assert len(list(open_store(shown.lake.settings.processed).list("_lakeupsert/symlink/"))) == 9


def test_vacuum_keeps_what_a_table_that_is_not_whole_points_to(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, superseded_retention="0s", keep_snapshots=1)
    lake = shown.lake
    lake.land("0.jsonl", [row("k", day, 0) for day in range(3)])
    catalog.points.arm(0, Fault.KILL_AFTER, (f"catalog {ADD[catalog.kind]}",))
    with suppress(Killed):
        lake.run()
    assert catalog.points.struck
    catalog.points.disarm()
    lake.reopen()
    standing = lake.table.status().publishers[catalog.kind]
    assert (standing.snapshot, standing.behind) == (None, 1)
    before = shown.rows()
    assert before
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(1)
        shown.night(2)
        with clock.use(Later()):
            lake.table.vacuum(dry=False)
    assert shown.rows() == before


def test_vacuum_deletes_old_manifests_and_keeps_what_is_shown(tmp_path: Path, catalog: Server_) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2, superseded_retention="0s", keep_snapshots=1)
    before = shown.rows()
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(2)
        with clock.use(Later()):
            shown.lake.table.vacuum(dry=False)
        assert shown.rows() == before
    shown.lake.table.publish(to=catalog.kind)  # type: ignore[arg-type]
    with clock.use(Later()):
        deleted = [g.name for g in shown.lake.table.vacuum(dry=False).garbage]
    assert sum(name.startswith("_lakeupsert/symlink/") for name in deleted) == 6
    assert len(list(open_store(shown.lake.settings.processed).list("_lakeupsert/symlink/"))) == 3
    shown.assert_exact()
