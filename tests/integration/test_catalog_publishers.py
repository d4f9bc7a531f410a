"""`publishers = ["hive"]` and `["glue"]`: what is in the catalog, and what stops the publisher.

That a reader sees what ours see, whatever fails: `tests/contract/test_publishers.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import InvalidOperationException, MetaException

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import GlueSettings, HiveSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError, TryAgainError
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.publishers import publisher
from lakeupsert.publishers import glue, symlink
from lakeupsert.storage import open_store
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row
from tests.harness.outsiders import CatalogOutsider, HiveOutsider, Rows, new_outsider, rows_in
from tests.harness.servers import Server


@pytest.fixture(
    scope="module",
    params=[pytest.param("glue", marks=pytest.mark.cloud), pytest.param("hive", marks=pytest.mark.readers)],
)
def catalog(request: pytest.FixtureRequest) -> Iterator[CatalogOutsider]:
    """A real catalog; each request of the publisher goes through its ``points``."""
    with new_outsider(request) as found:
        assert isinstance(found, CatalogOutsider)
        yield found


class Shown:
    """A lake that a catalog shows, as ``name`` there."""

    def __init__(self, root: Path, catalog: CatalogOutsider, count: int = 1, **settings: Any) -> None:
        self.catalog = catalog
        catalog.points.disarm()
        self.lake = Lake(root, **{**catalog.settings(root), **settings})
        self.name = catalog.table(self.lake)
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
        found = self.lake.table.status().publishers[self.catalog.name]
        return found.snapshot, found.behind


def test_a_lake_on_s3(
    tmp_path: Path, moto: Server, catalog: CatalogOutsider, new_place: Callable[[Server], str]
) -> None:
    if catalog.name == "hive":
        pytest.skip("the metastore looks at folders, and this one has no jars for S3")
    place = new_place(moto)
    shown = Shown(tmp_path / "lake", catalog, 2, processed=f"{place}/sales", queue=str(tmp_path / "queue.sqlite"))
    shown.assert_exact()
    assert all(location.startswith(f"{place}/sales/") for location in catalog.partitions(shown.name).values())


def test_slower_publisher_of_an_earlier_snapshot_shows_the_later_one(tmp_path: Path, catalog: CatalogOutsider) -> None:
    """It would point partitions back to the earlier one."""
    shown = Shown(tmp_path / "lake", catalog, 1)
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(1)
        shown.night(2)
    slow = Table("t", shown.lake.settings)
    earlier = shown.lake.table.objects.snapshots.get(1)
    assert earlier is not None
    one = publisher(shown.lake.opened, catalog.name)
    written = f"catalog {catalog.changes_partitions}"
    catalog.points.amid(0, lambda: slow.publish(to=catalog.name), written)
    one.catch_up(earlier)
    assert catalog.points.struck == written
    catalog.points.disarm()
    slow.close()
    shown.lake.reopen()
    shown.assert_exact()


def test_foreign_table_is_never_touched(tmp_path: Path, catalog: CatalogOutsider) -> None:
    lake = Lake(tmp_path / "lake", **catalog.settings(tmp_path))
    name = catalog.table(lake)
    catalog.create_table(name)
    before = catalog.parameters(name)
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    assert len(lake.rows()) == 1, "the night goes on"
    for reset in (False, True):
        with pytest.raises(RefusedError) as raised:
            lake.table.publish(to=catalog.name, reset=reset)
        assert raised.value.code == "foreign-table"
        assert name in raised.value.message
    assert catalog.parameters(name) == before
    assert lake.table.status().publishers[catalog.name].snapshot is None


def test_partition_that_the_catalog_refuses_is_compared_and_tried_again(
    tmp_path: Path, catalog: CatalogOutsider
) -> None:
    """Somebody makes one partition of a batch, and drops one of another batch, just before the request."""
    shown = Shown(tmp_path / "lake", catalog, 0)
    shown.lake.land("0.jsonl", [row("k", 0, 0)])
    shown.lake.run()
    shown.lake.land("1.jsonl", [row("k", day, 1) for day in range(1, 4)])
    made = f"catalog {catalog.adds}"
    catalog.points.amid(0, lambda: catalog.add_partition(shown.name, ("2020-01-03",)), made)
    shown.lake.run()
    assert catalog.points.struck == made
    shown.assert_exact()
    shown.lake.land("2.jsonl", [row("k", day, 2) for day in range(4)])
    changed = f"catalog {catalog.changes_partitions}"
    catalog.points.amid(0, lambda: catalog.drop_partition(shown.name, ("2020-01-03",)), changed)
    shown.lake.run()
    assert catalog.points.struck == changed
    catalog.points.disarm()
    shown.assert_exact()


MEANWHILE = {
    "get_table": None,
    "get_partition_names": MetaException(
        "A lock could not be obtained due to a deadlock, cycle of locks and waiters is:"
    ),
    "alter_table_with_environment_context": InvalidOperationException("partition keys can not be changed."),
    **dict.fromkeys(
        ("add_partitions", "alter_partitions_with_environment_context", "drop_partition"),
        MetaException("Invalid partition key & values; keys [], values [2020-01-01, ]"),
    ),
}
"""What a metastore may answer while it changes the table for somebody else. None: a table without partition columns."""


@pytest.mark.parametrize("catalog", [pytest.param("hive", marks=pytest.mark.readers)], indirect=True)
@pytest.mark.parametrize("call", MEANWHILE)
@pytest.mark.parametrize(("times", "code"), [(3, None), (99, "catalog-busy")])
def test_metastore_that_changes_the_table_for_somebody_else_is_asked_again(
    tmp_path: Path,
    catalog: CatalogOutsider,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    times: int,
    code: str | None,
) -> None:
    shown = Shown(tmp_path / "lake", catalog, schema={})
    gone = [row(f"k{i:03}", 2, 1, op="D") for i in range(90)]
    shown.lake.land("1.jsonl", [{**row("k", 1, 1), "new": 1}, row("k", 5, 1), *gone])
    shown.lake.table.append(host="local")
    shown.lake.table.dedupe(host="local")
    left, written = [None] * times, []

    def half_changed(client: object, real: Callable[..., Any], *arguments: object) -> Any:
        if not left:
            return real(client, *arguments)
        left.pop()
        error = MEANWHILE[call]
        if error is not None:
            raise error
        table = real(client, *arguments)
        table.partitionKeys = []
        return table

    def alter_table(
        client: object, real: Callable[..., Any], database: str, name: str, table: Any, *more: object
    ) -> None:
        written.append(len(table.partitionKeys))
        real(client, database, name, table, *more)

    with monkeypatch.context() as patch:
        for name, wrapper in (("alter_table_with_environment_context", alter_table), (call, half_changed)):
            patch.setattr(Client, name, partialmethod(wrapper, getattr(Client, name)))
        problem = shown.lake.table.publish().publishers["hive"].problem
    assert (problem and problem.code) == code
    assert (not left) == (code is None)
    assert {*written} <= {1}, "no table is written without its columns"
    if code is not None:
        shown.lake.table.publish()
    shown.assert_exact()
    assert {columns[-1][0] for columns in catalog.columns(shown.name)} == {"new"}


def test_manifest_with_other_files_stops_the_publisher(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 1)
    before = shown.rows()
    shown.lake.land("1.jsonl", [row("k001", 1, 9)])
    shown.lake.table.append(host="local")
    shown.lake.table.dedupe(host="local")
    head = shown.lake.table.objects.partition("d=2020-01-02").head()
    assert head is not None
    stray = tmp_path / f"lake/processed/_lakeupsert/symlink/{head.number}-{head.write_id[:8]}/d=2020-01-02/manifest"
    stray.parent.mkdir(parents=True)
    stray.write_text("file:///nowhere\n")
    with pytest.raises(DamagedTableError, match="2020-01-02/manifest") as raised:
        shown.lake.table.publish(to=catalog.name)
    assert raised.value.code == "damaged-object"
    assert shown.rows() == before
    stray.unlink()
    shown.lake.table.publish(to=catalog.name)
    shown.assert_exact()


@pytest.mark.long
def test_version_that_was_lost_and_rebuilt_with_equal_figures_is_shown(
    tmp_path: Path, catalog: CatalogOutsider
) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2)
    damaged, before = "d=2020-01-02", catalog.partitions(shown.name)
    shown.lake.rebuild_newest_version(damaged)
    now = catalog.partitions(shown.name)
    assert {values for values in now if now[values] != before[values]} == {("2020-01-02",)}
    manifests = [Path("/" + location.removeprefix("file:").lstrip("/")) / "manifest" for location in now.values()]
    listed = {line.rpartition("processed/")[2] for path in manifests for line in path.read_text().splitlines()}
    assert listed == {file.name for file in shown.lake.table.files()}
    shown.assert_exact()


def requests_of(catalog: CatalogOutsider, call: Callable[[], object]) -> list[str]:
    catalog.points.arm(-1, Fault.BEFORE)
    call()
    seen = [name.removeprefix("catalog ") for name in catalog.points.seen]
    catalog.points.disarm()
    return seen


def test_only_what_changed_is_sent_in_batches(
    tmp_path: Path, catalog: CatalogOutsider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert symlink.TOGETHER <= 100, "Glue takes no more"
    monkeypatch.setattr(symlink, "TOGETHER", 10)
    shown = Shown(tmp_path / "lake", catalog, 0)
    days = 23
    shown.lake.land("0.jsonl", [row("k", day, 0) for day in range(days)])
    first = requests_of(catalog, shown.lake.run)
    add, change = catalog.adds, catalog.changes_partitions
    assert (first.count(add), first.count(change)) == (3, 0)
    shown.lake.land("1.jsonl", [row("k", day, 1) for day in range(0, days, 2)])
    second = requests_of(catalog, shown.lake.run)
    assert (second.count(add), second.count(change)) == (0, 2)
    assert not {add, change} & {*requests_of(catalog, shown.lake.table.publish)}
    shown.assert_exact()


@pytest.mark.long
def test_merges_rewrite(tmp_path: Path, catalog: CatalogOutsider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lakes = [Shown(tmp_path / "lake", catalog, 0).lake, Lake(tmp_path / "plain")]
    for lake in lakes:
        lake.land("0.jsonl", [row(f"k{i}", 0, 0, i * i) for i in range(5_000)])
        lake.run()
        lake.land("1.jsonl", [row(f"k{i}", 0, 1) for i in range(5)])
        lake.run()
    assert [sum(file.superseded for file in lake.table.files()) for lake in lakes] == [0, 5]


def test_vectors_from_before_are_refused_until_a_compaction(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, publishers=(), strategy="delta")
    shown.night(0)
    shown.night(1)
    shown.lake.mend(lambda row: False, publishers=(catalog.name,), strategy="auto")
    with pytest.raises(ConfigurationError) as raised:
        shown.lake.table.publish(to=catalog.name)
    assert raised.value.code == f"unfit-for-{catalog.name}"
    assert "compact --full" in raised.value.next
    assert shown.standing() == (None, 2)
    shown.lake.table.compact(full=True)
    shown.assert_exact()


def test_renamed_column_keeps_its_name_there(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2)
    before = catalog.columns(shown.name)
    shown.lake.table.rename_column("v", "value")
    schema = {("value" if name == "v" else name): type_ for name, type_ in shown.lake.settings.schema.items()}
    shown.lake.mend(lambda row: False, schema=schema)
    shown.lake.land("2.jsonl", [{("value" if name == "v" else name): v for name, v in row("k000", 0, 5, 5).items()}])
    standing = shown.lake.table.run(host="local").publish.publishers[catalog.name]
    assert (standing.problem, standing.behind) == (None, 0)
    assert "'value' is 'v'" in str(standing.warning)
    assert catalog.columns(shown.name) == before
    ours = [{("v" if name == "value" else name): value for name, value in one.items()} for one in shown.lake.rows()]
    assert shown.rows(names={"value": "v"}) == ours


def test_files_with_other_names_need_a_reprocess_and_a_drop_a_reset(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, publishers=())
    shown.night(0)
    shown.lake.table.rename_column("v", "value")
    shown.lake.mend(lambda row: False, publishers=(catalog.name,))

    def refused() -> str:
        with pytest.raises(ConfigurationError) as raised:
            shown.lake.table.publish(to=catalog.name)
        assert raised.value.code == f"unfit-for-{catalog.name}"
        return raised.value.next

    assert "reprocess" in refused()
    shown.lake.table.reprocess(lambda partition: True, host="local")
    shown.assert_exact()
    shown.lake.table.drop_column("value")
    assert "--reset" in refused()
    assert "value" in {name for some in catalog.columns(shown.name) for name, _ in some}
    shown.lake.table.publish(to=catalog.name, reset=True)
    shown.assert_exact()


def test_dropped_column_whose_name_comes_back_is_another(tmp_path: Path, catalog: CatalogOutsider) -> None:
    """Name and type are as before, but old files have the old column's values."""
    shown = Shown(tmp_path / "lake", catalog, 0, schema={}, delete=None)
    shown.lake.land("0.jsonl", [{**row("k", day, 0, 7), "z": 1} for day in range(2)])
    shown.lake.run()
    shown.lake.table.drop_column("z")
    shown.lake.land("1.jsonl", [{**row("k", 1, 1, 8), "z": 2}])
    shown.lake.run()
    with pytest.raises(ConfigurationError) as raised:
        shown.lake.table.publish(to=catalog.name)
    assert "--reset" in raised.value.next
    shown.lake.table.publish(to=catalog.name, reset=True)
    (written,) = {name for some in catalog.columns(shown.name) for name, _ in some if name.startswith("z")}
    assert written != "z"
    ours = [{(written if name == "z" else name): value for name, value in one.items()} for one in shown.lake.rows()]
    assert shown.rows(names={"z": written}) == ours


def test_new_column_and_wider_type_reach_every_partition(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 1, schema={"k": "string", "l": "int", "d": "date", "v": "int"})
    shown.lake.mend(lambda row: False, schema={"k": "string", "l": "int", "d": "date", "v": "bigint"})
    shown.lake.land("1.jsonl", [{**row("k000", 0, 5, 1 << 40), "more": "x"}])
    shown.lake.run()
    for columns in catalog.columns(shown.name):
        assert ("v", "bigint") in columns
        assert columns[-1] == ("more", "string")
    assert len(catalog.columns(shown.name)) == 4
    shown.lake.table.publish(to=catalog.name)


def test_server_that_is_not_there(tmp_path: Path, catalog: CatalogOutsider, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = catalog.settings(tmp_path)
    if catalog.name == "hive":
        settings["hive"] = HiveSettings(uri="thrift://127.0.0.1:1", database="default", table="t")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", "http://127.0.0.1:1")
        monkeypatch.setattr(glue, "GLUE_ATTEMPTS", 1)
    lake = Lake(tmp_path / "lake", **settings)
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    with pytest.raises(TryAgainError) as raised:
        lake.table.publish(to=catalog.name)
    assert raised.value.code == "catalog-unreachable"


def test_database_that_is_not_there(tmp_path: Path, catalog: CatalogOutsider) -> None:
    own: Any = (
        HiveSettings(uri=catalog.uri, database="nowhere", table="t")
        if isinstance(catalog, HiveOutsider)
        else GlueSettings(database="nowhere", table="t")
    )
    lake = Lake(tmp_path / "lake", publishers=(catalog.name,), **{catalog.name: own})
    lake.land("0.jsonl", [row("k", 0, 0)])
    lake.run()
    with pytest.raises(LakeupsertError) as raised:
        lake.table.publish(to=catalog.name)
    assert raised.value.code == "catalog-refused"
    assert "nowhere" in raised.value.message


class Later(clock.Source):
    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


@pytest.mark.long
def test_vacuum_keeps_manifests_as_long_as_their_files(tmp_path: Path, catalog: CatalogOutsider) -> None:
    """A query that was planned before a publish still reads them."""
    shown = Shown(tmp_path / "lake", catalog, 3)
    with clock.use(Later()):
        shown.lake.table.vacuum(dry=False)
    assert len(list(open_store(shown.lake.settings.processed).list("_lakeupsert/symlink/"))) == 9


def test_vacuum_keeps_what_a_table_that_is_not_whole_points_to(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 0, superseded_retention="0s", keep_snapshots=1)
    lake = shown.lake
    lake.land("0.jsonl", [row("k", day, 0) for day in range(3)])
    catalog.points.arm(0, Fault.KILL_AFTER, (f"catalog {catalog.adds}",))
    with suppress(Killed):
        lake.run()
    assert catalog.points.struck
    catalog.points.disarm()
    lake.reopen()
    standing = lake.table.status().publishers[catalog.name]
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


@pytest.mark.long
def test_vacuum_deletes_old_manifests_and_keeps_what_is_shown(tmp_path: Path, catalog: CatalogOutsider) -> None:
    shown = Shown(tmp_path / "lake", catalog, 2, superseded_retention="0s", keep_snapshots=1)
    before = shown.rows()
    with pytest.MonkeyPatch.context() as dead:
        dead.setattr(symlink.SymlinkPublisher, "catch_up", lambda *a: None)
        shown.night(2)
        with clock.use(Later()):
            shown.lake.table.vacuum(dry=False)
        assert shown.rows() == before
    shown.lake.table.publish(to=catalog.name)
    with clock.use(Later()):
        deleted = [g.name for g in shown.lake.table.vacuum(dry=False).garbage]
    assert sum(name.startswith("_lakeupsert/symlink/") for name in deleted) == 6
    assert len(list(open_store(shown.lake.settings.processed).list("_lakeupsert/symlink/"))) == 3
    shown.assert_exact()
