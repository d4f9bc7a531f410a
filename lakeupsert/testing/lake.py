"""A small lake for tests: write landing files, run steps with faults, read any snapshot, compare with the model."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings, is_remote
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.reconcile import prove
from lakeupsert.queue import WorkQueue
from lakeupsert.storage import ObjectStore, open_store
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.testing.faults import FaultyQueue, FaultyStore, Points
from lakeupsert.testing.model import Row, Rules, counts_at, expected

DAY = date(2020, 1, 1)
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class _FaultyTable(OpenTable):
    """A table whose stores and queue have a point at each call."""

    def __init__(self, name: str, settings: TableSettings, points: Points) -> None:
        super().__init__(name, settings)
        self._points = points

    @cached_property
    def store(self) -> ObjectStore:
        return FaultyStore(open_store(self.settings.processed), self._points)

    @cached_property
    def landing(self) -> ObjectStore:
        return FaultyStore(open_store(self.settings.landing), self._points, "landing ")

    @cached_property
    def queue(self) -> WorkQueue:
        return FaultyQueue(super().queue, self._points)


class Lake:
    """One table `t` below ``root``: key (k, l), partition column d, ordering column ts, operation column op.

    Its zones are folders there. ``settings`` replace or add to those: zones in another store come with a queue. ``points``
    sees every call of the stores and of the queue.
    """

    rules = Rules(key=("k", "l"), order_by=("ts",), partition="d", delete_column="op", delete_values=("D",))

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.given = settings
        usual = {
            "key": ("k", "l"),
            "partition_by": ("d",),
            "order_by": ("ts",),
            "schema": {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint", "op": "string"},
            "delete": DeleteSettings(column="op", values=("D",)),
        }
        zones = {"landing": str(root / "landing"), "processed": str(root / "processed")}
        self.settings = TableSettings(**{**zones, **usual, **settings})
        self.landed: dict[str, list[Row]] = {}
        self.refused: dict[str, list[Row]] = {}
        self.passes: Callable[[Row, LedgerEntry], bool] = lambda row, entry: False
        self.table = Table("t", self.settings)
        self.points = Points()
        (root / "landing").mkdir(parents=True, exist_ok=True)
        self.reopen()

    def reopen(self) -> None:
        """A new process's view of the table: nothing is remembered."""
        self.table.close()
        self.table = Table("t", self.settings)
        self.table._table = _FaultyTable("t", self.settings, self.points)

    def copy(self, root: Path) -> "Lake":
        """The same lake, as it is now, in another folder."""
        self.table.close()
        shutil.copytree(self.root, root)
        other = type(self)(root, **self.given)
        other.landed, other.refused, other.passes = dict(self.landed), dict(self.refused), self.passes
        return other

    def mend(self, mended: Callable[[Row], bool], **settings: Any) -> None:
        """Change settings so that the next spec takes these of the refused rows."""
        head = self.table._table.objects.specs.head()
        since = head.number + 1 if head else 0
        self.passes = lambda row, entry: entry.spec_version >= since and mended(row)
        self.given = {**self.given, **settings}
        self.settings = msgspec.structs.replace(self.settings, **settings)
        self.reopen()

    def land(self, path: str, rows: Sequence[Row], refused: Sequence[Row] = ()) -> None:
        """Write one JSON-lines landing file, at its end rows that must go to quarantine."""
        lines = [json.dumps({c: _text(v) for c, v in row.items()}) + "\n" for row in (*rows, *refused)]
        if is_remote(self.settings.landing):
            with open_store(self.settings.landing).write(path) as sink:
                sink.write("".join(lines).encode())
        else:
            target = Path(self.settings.landing) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(lines), encoding="utf-8")
        self.landed[path], self.refused[path] = list(rows), list(refused)

    def entries(self) -> list[tuple[int, Any]]:
        """Number and body of every ledger entry."""
        ledger = self.table._table.objects.ledger
        head = ledger.head()
        return [(link.number, link.body) for link in ledger.between(-1, head.number)] if head else []

    def expected(self, up_to: int) -> list[dict[str, Any]]:
        return expected(self.rules, self.entries(), self.landed, up_to, self.refused, self.passes)

    def rows(self, snapshot: int | str = "published") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table.to_arrow(snapshot).read_all().to_pylist()
        return rows

    def check(self) -> None:
        """No landing file counts twice; every snapshot that was ever published shows whole batches, and the right rows;
        every partition knows where each row is that ever came."""
        entries = self.entries()
        ledger = dict(entries)
        for number in ledger:
            taken = [(f.path, f.sha256) for batch in counts_at(ledger, number) for f in ledger[batch].files]
            assert len(taken) == len(set(taken)), f"a landing file counts twice at {number}: {taken}"
        for partition in {p for entry in ledger.values() for p in entry.touched}:
            head = self.table._table.objects.partition(partition).head()
            if head is not None and head.body.buckets:
                counters, merged = head.body.buckets[0].counters, head.body.merged
                came = {n: e.touched[partition].rows for n, e in entries if n <= merged and partition in e.touched}
                assert counters.appended == sum(came.values()), f"{partition}: {counters}, and {came} came"
                gone = sum(rows for n, rows in came.items() if n and n not in counts_at(ledger, merged))
                assert counters.withdrawn == gone, f"{partition}: {counters}, and {gone} were withdrawn"
        for link in self.table.snapshots()[:1]:
            wrong = {p.partition: p.difference for p in prove(self.table._table, link) if not p.balanced}
            assert not wrong, f"it does not balance: {wrong}"
        for link in self.table.snapshots():
            assert not link.body.lagging
            assert self.rows(link.number) == self.expected(link.body.batch), f"snapshot {link.number} is wrong"

    def named_files(self) -> set[str]:
        """Every data file that some version of the table names, those of batches that are not merged yet too."""
        objects = self.table._table.objects
        named = {f.name for _, entry in self.entries() for t in entry.touched.values() for f in t.files}
        named |= {f.name for _, entry in self.entries() for f in entry.quarantine}
        for partition in {p for _, entry in self.entries() for p in entry.touched}:
            head = objects.partition(partition).head()
            for link in objects.partition(partition).between(-1, head.number) if head else ():
                named |= {f.name for b in link.body.buckets for f in (*b.base, *b.tombstones)}
        return named - {""}  # tombstones that lie in the manifest

    def stored_files(self) -> set[str]:
        """Every data file that is there, named by a version or not."""
        names = {f.name for f in open_store(self.settings.processed).list("")}
        return {
            n
            for n in names
            if not n.startswith("_lakeupsert/") or n.startswith(("_lakeupsert/data/", "_lakeupsert/quarantine/"))
        }

    def run(self, host: Any = "local", **options: Any) -> None:
        self.table.run(host=host, **options)

    def finish_and_check(self) -> None:
        """After whatever happened: one undisturbed run, and the table is the model."""
        self.points.disarm()
        self.reopen()
        self.run()
        self.check()
        entries = self.entries()
        last = self.table.snapshots()[0].body.batch if entries else 0
        assert last == max((n for n, e in entries if e.kind != "fence"), default=0), "the last batch is not published"
        taken = {f.path for _, entry in entries for f in entry.files}
        assert taken == set(self.landed), "a landing file was not taken"


def row(k: str, day: int, ts: int | None, v: int = 0, line: int = 0, op: str | None = None) -> Mapping[str, Any]:
    """A record of `Lake`; ``ts`` counts seconds, ``day`` counts days, from the first of 2020."""
    stamp = None if ts is None else EPOCH.replace(tzinfo=None) + timedelta(seconds=ts)
    return {"k": k, "l": line, "d": DAY + timedelta(days=day), "ts": stamp, "v": v, "op": op}


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value
