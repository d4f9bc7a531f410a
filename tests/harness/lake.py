"""A small lake for tests: land files, run steps with faults, read any snapshot, compare it with the model."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, IcebergSettings, TableSettings, is_remote
from lakeupsert.engine.by_name import HostName
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.errors import TryAgainError
from lakeupsert.operations.reconcile import prove
from lakeupsert.operations.statement.statement import StatementResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.publishers.delta_log import list_log
from lakeupsert.queue import WorkQueue
from lakeupsert.read.view import View
from lakeupsert.rows import datafiles
from lakeupsert.storage import ObjectStore, open_store
from lakeupsert.table.layout import WHOLE_TABLE
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.roles import PartitionColumn
from lakeupsert.table.types import named_type
from tests.harness.faults import Fault, FaultyQueue, FaultyStore, Killed, Points
from tests.harness.model import Change, Row, Rules, counts_at, expected

if TYPE_CHECKING:
    from pyiceberg.table import Table as IcebergTable

DAY = date(2020, 1, 1)
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class FaultyResources(Resources):
    """Stores and a queue with a fault point at each call."""

    def __init__(self, name: str, settings: TableSettings, points: Points) -> None:
        super().__init__(name, settings)
        self._points, self._zones = points, settings

    @cached_property
    def store(self) -> ObjectStore:
        return FaultyStore(open_store(self._zones.processed), self._points)

    @cached_property
    def landing(self) -> ObjectStore:
        return FaultyStore(open_store(self._zones.landing), self._points, "landing ")

    @cached_property
    def queue(self) -> WorkQueue:
        return FaultyQueue(super().queue, self._points)


class Lake:
    """One table `t` below ``root``: key (k, l), ordering column ts, operation column op; by default partitioned by d.

    Its zones are folders below ``root``. ``settings`` replace or extend the usual ones; a zone in another store needs a queue.
    ``points`` sees every call of the stores and of the queue.
    """

    rules = Rules(key=("k", "l"), order_by=("ts",), partition=("d",), delete_column="op", delete_values=("D",))

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.given = settings
        defaults = {
            "key": ("k", "l"),
            "partition_by": ("d",),
            "order_by": ("ts",),
            "schema": {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint", "op": "string"},
            "delete": DeleteSettings(column="op", values=("D",)),
            "quarantine_limit": "100%",  # batches are small here, and most tests are not about this limit
        }
        zones = {"landing": str(root / "landing"), "processed": str(root / "processed")}
        self.settings = TableSettings(**{**zones, **defaults, **settings})
        partitions = [PartitionColumn.parse(text) for text in self.settings.partition_by]
        self.rules = replace(
            type(self).rules,
            partition=tuple(one.column for one in partitions),
            hashed={one.column: (one.hashed, one.count) for one in partitions if one.count is not None},
            in_table=self.settings.key_scope == "table",
            versions=self.settings.versions,
        )
        self.landed: dict[str, list[Row]] = {}
        self.refused: dict[str, list[Row]] = {}
        self.adopted: dict[str, list[Row]] = {}
        self.statements: dict[str, Change] = {}
        self.passes: Callable[[Row, LedgerEntry], bool] = lambda row, entry: False
        self.table = Table("t", self.settings)
        self.points = Points()
        (root / "landing").mkdir(parents=True, exist_ok=True)
        self.reopen()

    def reopen(self) -> None:
        """Open the table as a new process would, with nothing cached."""
        self.table.close()
        resources = FaultyResources("t", self.settings, self.points)
        self.opened = OpenTable("t", self.settings, resources=resources)
        self.table = Table.of(self.opened)

    def copy(self, root: Path) -> "Lake":
        """Copy the lake in its current state to another folder. Zones in a store are copied to another prefix."""
        self.table.close()
        shutil.copytree(self.root, root)
        other = type(self)(root, **{name: self._relocate(value, root) for name, value in self.given.items()})
        for zone in ("landing", "processed"):
            if is_remote(getattr(self.settings, zone)):
                here, there = open_store(getattr(self.settings, zone)), open_store(getattr(other.settings, zone))
                for found in here.list(""):
                    with there.write(found.name) as sink:
                        sink.write(here.get(found.name))
        other.landed, other.refused, other.adopted = dict(self.landed), dict(self.refused), dict(self.adopted)
        other.passes, other.statements = self.passes, dict(self.statements)
        return other

    def _relocate(self, setting: object, root: Path) -> object:
        """The setting for a copy: a path below the root moves to ``root``, an address in a store gets a new prefix."""
        if isinstance(setting, dict):
            return {name: self._relocate(value, root) for name, value in setting.items()}
        if isinstance(setting, msgspec.Struct):
            return msgspec.convert(self._relocate(msgspec.to_builtins(setting), root), type(setting))
        if not isinstance(setting, str):
            return setting
        if str(self.root) not in setting and is_remote(setting) and not setting.startswith(("sqs:", "azqueue:")):
            return f"{setting}-{clock.new_id()}"
        return setting.replace(str(self.root), str(root))

    def mend(self, mended: Callable[[Row], bool], **settings: Any) -> None:
        """Change settings so that the next spec accepts those refused rows for which ``mended`` is true."""
        head = self.table.objects.specs.head()
        since = head.number + 1 if head else 0
        self.passes = lambda row, entry: entry.spec_version >= since and mended(row)
        self.given = {**self.given, **settings}
        self.settings = msgspec.structs.replace(self.settings, **settings)
        self.reopen()

    def configure(self, **settings: Any) -> Path:
        """Write the settings, changed by ``settings``, as a configuration for the command line. Returns its path."""
        given = msgspec.to_builtins(msgspec.structs.replace(self.settings, **settings))
        lines = [f"{name} = {_toml(value)}\n" for name, value in given.items() if value is not None]
        path = self.root / "lakeupsert.toml"
        path.write_text("".join(["[tables.t]\n", *lines]), encoding="utf-8")
        return path

    def land(self, path: str, rows: Sequence[Row], refused: Sequence[Row] = ()) -> None:
        """Write one landing file of JSON lines. ``refused`` rows, at its end, must go to quarantine."""
        data = json_lines([*rows, *refused])
        if is_remote(self.settings.landing):
            with open_store(self.settings.landing).write(path) as sink:
                sink.write(data)
        else:
            target = Path(self.settings.landing) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self.landed[path], self.refused[path] = list(rows), list(refused)

    def change(
        self, batch_id: str, values: Mapping[str, str] | None, where: str, change: Change, **options: Any
    ) -> StatementResult:
        """Update rows, or without ``values`` delete them. ``change`` does the same to a row as a dict."""
        self.statements[batch_id] = change
        given = {"where": where, "batch_id": batch_id, "dry": False, **options}
        return self.table.delete(**given) if values is None else self.table.update(values, **given)

    def lay(self, name: str, rows: Sequence[Row]) -> None:
        """Write plain Parquet for `Table.adopt`: a file of that name in each partition's folder, without the operation column."""
        left_out = (*self.settings.partition_by, "op")
        columns = {c: named_type(type_, c) for c, type_ in self.settings.schema.items() if c not in left_out}
        folders = {"": list(rows)} if not self.settings.partition_by else {}
        for day in {row["d"] for row in rows} if not folders else ():
            folders[f"d={day}/"] = [row for row in rows if row["d"] == day]
        for folder, of_folder in folders.items():
            target = self.root / "processed" / f"{folder}{name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(of_folder, pa.schema(list(columns.items()))), target)
            self.adopted[f"{folder}{name}"] = of_folder

    def entries(self) -> list[tuple[int, LedgerEntry]]:
        """Number and body of every ledger entry."""
        ledger = self.table.objects.ledger
        head = ledger.head()
        return [(link.number, link.body) for link in ledger.between(-1, head.number)] if head else []

    def is_merged(self, partition: str, batch: int) -> bool:
        """Whether the partition's newest version includes ``batch``."""
        head = self.table.objects.partition(partition).head()
        return head is not None and head.body.merged >= batch

    def expected(self, up_to: int, unsettled: Collection[str] = ()) -> list[dict[str, Any]]:
        return expected(
            self.rules,
            self.entries(),
            self.landed,
            up_to,
            self.refused,
            self.passes,
            self.adopted,
            unsettled,
            self.statements,
        )

    def expected_in(self, view: View) -> list[dict[str, Any]]:
        return self.expected(view.snapshot.batch, self.unsettled_in(view))

    def unsettled_in(self, view: View) -> set[str]:
        """Partitions in which the view shows exactly the adopted files. A batch that counts must have settled all others."""
        entries = dict(self.entries())
        batches = counts_at(entries, view.snapshot.batch)
        merged = {p for n in batches for p, touched in entries[n].touched.items() if touched.files}
        adopted = {p: [f.name for f in touched.files] for p, touched in entries[0].touched.items()}
        unsettled = {p for p, names in adopted.items() if [f.name for f in view.files(only=p)] == names}
        assert not unsettled & merged, f"a batch was merged, but {unsettled & merged} still have their adopted files"
        return unsettled

    def view(self, snapshot: int | str) -> View:
        """A view whose rows have all that the model knows of them."""
        view = self.table.view(snapshot)
        return view.with_versions(self.opened.history.headers) if self.settings.versions else view

    def rows(self, snapshot: int | str = "published", *, versions: bool = False) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table.to_arrow(snapshot, versions=versions).read_all().to_pylist()
        return rows

    def check(self) -> None:
        """Check the table: no landing file counts twice, every snapshot shows complete batches and the expected rows, and
        the counters of every partition account for each row that ever arrived."""
        entries = self.entries()
        ledger = dict(entries)
        for number in ledger:
            taken = [(f.path, f.sha256) for batch in counts_at(ledger, number) for f in ledger[batch].files]
            assert len(taken) == len(set(taken)), f"a landing file counts twice at {number}: {taken}"
            named = [ledger[batch].batch_id for batch in counts_at(ledger, number)]
            assert len(named) == len(set(named)), f"a batch id counts twice at {number}: {named}"
        for partition in {p for entry in ledger.values() for p in entry.touched}:
            assert partition == WHOLE_TABLE or "=" in partition, f"{partition} is no partition"
            head = self.table.objects.partition(partition).head()
            if head is not None and head.body.buckets:
                counters, merged = [b.counters for b in head.body.buckets], head.body.merged
                arrived = {n: e.touched[partition].rows for n, e in entries if n <= merged and partition in e.touched}
                assert sum(c.appended for c in counters) == sum(arrived.values()), (
                    f"{partition}: {counters}, but {arrived} arrived"
                )
                withdrawn = sum(rows for n, rows in arrived.items() if n and n not in counts_at(ledger, merged))
                assert sum(c.withdrawn for c in counters) == withdrawn, (
                    f"{partition}: {counters}, but {withdrawn} were withdrawn"
                )
        for link in self.table.snapshots()[:1]:
            wrong = {p.partition: p.difference for p in prove(self.opened, link, LocalHost()) if not p.balanced}
            assert not wrong, f"it does not balance: {wrong}"
        for link in self.table.snapshots():
            assert not link.body.lagging
            expected = self.expected_in(self.table.view(link.number))
            found = self.rows(link.number, versions=self.settings.versions)
            assert found == expected, f"snapshot {link.number} is wrong"
        if "delta" in self.settings.publishers:
            self._check_delta()
        if self.settings.iceberg is not None:
            self._check_iceberg(self.settings.iceberg)

    def _check_delta(self) -> None:
        """Check that every version that a Delta reader can open is the snapshot of its number."""
        log = list_log(open_store(self.settings.processed))
        first = max((n for n in log.checkpoints), default=min(log.commits, default=0))
        for link in self.table.snapshots():
            if first <= link.number <= (-1 if log.head is None else log.head):
                rows, ours = delta_rows(self.settings.processed, link.number), self.rows(link.number)
                # Only partitions that a merge has settled are in the order of their keys.
                assert sorted(rows, key=repr) == sorted(ours, key=repr), (
                    f"version {link.number} of the Delta log is wrong"
                )

    def _check_iceberg(self, settings: IcebergSettings) -> None:
        """Check that every snapshot of the Iceberg table, if there is one, is the snapshot of its number."""
        table = iceberg_table(settings)
        for snapshot in table.metadata.snapshots if table else ():
            assert table is not None
            assert snapshot.summary is not None
            rows = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
            number = int(snapshot.summary["lakeupsert.snapshot"] or -1)
            ours = self.table.to_arrow(number).read_all()
            found = rows.select(ours.column_names).to_pylist()
            assert sorted(found, key=repr) == sorted(ours.to_pylist(), key=repr), (
                f"Iceberg's snapshot of {number} is wrong"
            )
            marked = int(snapshot.summary["total-position-deletes"] or 0)
            assert int(snapshot.summary["total-records"] or 0) - marked == ours.num_rows

    def named_files(self) -> set[str]:
        """Every data file that any version of the table names, including those of batches not merged yet."""
        objects = self.table.objects
        named = {
            name for _, entry in self.entries() for t in entry.touched.values() for f in t.files for name in f.objects
        }
        named |= {f.name for _, entry in self.entries() for f in entry.quarantine}
        for partition in {p for _, entry in self.entries() for p in entry.touched}:
            head = objects.partition(partition).head()
            for link in objects.partition(partition).between(-1, head.number) if head else ():
                named |= {name for b in link.body.buckets for name in b.objects}
        return named

    def stored_files(self) -> set[str]:
        """Every data file in the store, named by a version or not."""
        names = {f.name for f in open_store(self.settings.processed).list("")}
        return {
            n
            for n in names
            if not n.startswith(("_lakeupsert/", "_delta_log/", "dv/"))
            or n.startswith(("_lakeupsert/data/", "_lakeupsert/quarantine/"))
        }

    def run(self, host: HostName = "local", **options: Any) -> None:
        self.table.run(host=host, **options)

    def strike_every_call(
        self, fault: Fault, step: Callable[["Lake"], object], check: Callable[["Lake"], object]
    ) -> int:
        """Strike ``step`` at its first call, its second, and so on, each time in a copy of this lake. Returns how many calls.

        ``check`` gets each copy as the next process would see it.
        """
        folder = self.root.with_name(f"{self.root.name} struck")
        counted = self.copy(folder)
        counted.points.arm(-1, fault)
        step(counted)
        counted.table.close()
        shutil.rmtree(folder)
        for number, call in enumerate(counted.points.seen):
            struck = self.copy(folder)
            struck.points.arm(number, fault)
            with suppress(Killed, TryAgainError):
                step(struck)
            assert struck.points.struck is not None, f"{call} was not struck"
            struck.points.disarm()
            struck.reopen()
            try:
                check(struck)
            except BaseException as e:
                e.add_note(f"struck at call {number} ({call}): {fault.value}")
                raise
            struck.table.close()
            shutil.rmtree(folder)
        return len(counted.points.seen)

    def rebuild_newest_version(self, partition: str) -> None:
        """Lose the newest version of a partition's manifest, and let a reprocess make it again, with equal figures."""
        chain = self.table.objects.partition(partition)
        number = chain.newest_number()
        assert number is not None
        (self.root / "processed" / chain.name(number)).unlink()
        self.reopen()
        self.table.reprocess(lambda one: one == partition, source="landing", host="local")

    def finish_and_check(self) -> None:
        """Run once without faults, then check that the table equals the model."""
        self.points.disarm()
        self.reopen()
        self.run()
        self.check()
        entries = self.entries()
        last = self.table.snapshots()[0].body.batch if entries else 0
        assert last == max((n for n, e in entries if e.kind != "fence"), default=0), "the last batch is not published"
        taken = {f.path for _, entry in entries for f in entry.files}
        assert taken == set(self.landed), "a landing file was not taken"


def split_tiny_files(patch: pytest.MonkeyPatch) -> None:
    """What a file takes beside its rows counts as rows, so that a table of few small rows gets many buckets."""
    patch.setattr(datafiles, "BARE_BYTES", 0)
    patch.setattr(datafiles, "COLUMN_BYTES", 0)


def made_once(make: Callable[[Path], Lake]) -> Any:
    """A fixture named as ``make``: each test gets a copy of the lake that it makes in a folder, once a module. To a lake, the
    landing files of a copy are other files of the same content."""
    made = cache(make)

    @pytest.fixture(name=make.__name__)
    def copied(module_folder: Path, tmp_path: Path) -> Lake:
        return made(module_folder / "lake").copy(tmp_path / "lake")

    return copied


def json_lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps({c: _text(v) for c, v in row.items()}) + "\n" for row in rows).encode()


def without_base(root: Path) -> tuple[Lake, Path]:
    """A lake whose first partition can't be merged, as its base file is gone, and the path of that file. A batch waits."""
    lake = Lake(root)
    lake.land("1.jsonl", [row("a", 0, 1, 1), row("b", 1, 1, 1)])
    lake.run()
    base = min((root / "processed").glob("d=*/base-*"))
    base.unlink()
    lake.land("2.jsonl", [row("a", 0, 2, 2), row("b", 1, 2, 2)])
    lake.table.append(host="local")
    return lake, base


def row(k: str, day: int | None, ts: int | None, v: int = 0, line: int = 0, op: str | None = None) -> Mapping[str, Any]:
    """A record of `Lake`. ``ts`` counts seconds and ``day`` counts days from 2020-01-01; None: it names no day."""
    stamp = None if ts is None else EPOCH.replace(tzinfo=None) + timedelta(seconds=ts)
    return {"k": k, "l": line, "d": None if day is None else DAY + timedelta(days=day), "ts": stamp, "v": v, "op": op}


def delta_rows(table: str, version: int | None = None) -> list[dict[str, Any]]:
    """The rows that delta-rs reads of a version, in our readers' order for `Lake`."""
    from deltalake import DeltaTable, QueryBuilder  # slow to import, and few tests need it

    engine = QueryBuilder().register("t", DeltaTable(table, version=version))
    rows: list[dict[str, Any]] = pa.table(engine.execute("SELECT * FROM t ORDER BY d, k, l").read_all()).to_pylist()
    return rows


def iceberg_settings(root: Path) -> IcebergSettings:
    """A catalog in a file of SQLite beside the zones of a `Lake`."""
    catalog = {"name": "lake", "type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
    return IcebergSettings(catalog=catalog, table="sales.receipts")


def iceberg_table(settings: IcebergSettings) -> "IcebergTable | None":
    """The Iceberg table as pyiceberg finds it by itself; None if the catalog has none."""
    from pyiceberg.catalog import load_catalog  # slow to import, and few tests need it

    with load_catalog(settings.catalog_name, **settings.properties) as catalog:
        return catalog.load_table(settings.table) if catalog.table_exists(settings.table) else None


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(name)} = {_toml(v)}' for name, v in value.items() if v is not None)} }}"
    return json.dumps(value)


def _text(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value
