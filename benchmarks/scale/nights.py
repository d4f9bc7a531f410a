"""How many requests each command sends after 100 to 3,000 nights that are published, merged and vacuumed.

A night brings six rows to three partitions. The clock is simulated, so that a `vacuum` each week finds garbage of a week, and
what was written gets the time of its night. A `reconcile` follows it. Each command is the first call of a new `Table`, as in a
process of its own, and together they are one more night. `s` are the seconds of all of them, and `MB` is the peak of this process
while they ran.
"""

import os
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.memory import peak_bytes
from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import TableSettings

BEGUN = datetime(2012, 1, 1, 2, tzinfo=UTC)
WEEK = 7
PARTITIONS = 3
KEY = {"k": "a", "d": "0"}
COMMANDS = {
    "plan": lambda table, out: table.plan(),
    "append": lambda table, out: table.append(host="local"),
    "dedupe": lambda table, out: table.dedupe(),
    "publish": lambda table, out: table.publish(),
    "status": lambda table, out: table.status(),
    "reconcile": lambda table, out: table.reconcile(),
    "history": lambda table, out: table.snapshots(),
    "explain": lambda table, out: table.explain(KEY),
    "vacuum": lambda table, out: table.vacuum(dry=False),
    "first backup": lambda table, out: table.backup(out),
    "backup": lambda table, out: table.backup(out),
    "fsck": lambda table, out: table.fsck(),
}
SHOWN = {**{name: name for name in COMMANDS}, "seconds": "s", "mb": "MB", "night_seconds": "s a night"}


class Nights(clock.Source):
    """2 am of one day after the other, and a little later as the work goes on."""

    night = 0

    def now(self) -> datetime:
        return BEGUN + timedelta(days=self.night, seconds=self.elapsed() % 3600)


@cache
def _home() -> TemporaryDirectory[str]:
    """In memory, since a night of so few rows would only wait for the disk."""
    return TemporaryDirectory(dir="/dev/shm")


def measured(nights: int) -> dict[str, float]:
    """Requests of each command. The table of the call before is played on, if it has fewer nights."""
    lake = Path(_home().name)
    (lake / "landing").mkdir(exist_ok=True)
    given = TableSettings(
        landing=str(lake / "landing"),
        processed=str(lake / "table"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
    )
    at, begun = Nights(), perf_counter()
    first = at.night = len([*(lake / "landing").iterdir()])
    with clock.use(at):
        while at.night < nights:
            _land(lake, at.night)
            with Table("t", given) as table:
                table.run(host="local")
                if at.night % WEEK == 0:
                    table.vacuum(dry=False)
                    table.reconcile()
            _date(lake / "table", at)
            at.night += 1
        each = (perf_counter() - begun) / max(1, nights - first)
        _land(lake, at.night)
        begun, found = perf_counter(), {}
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        with TemporaryDirectory() as out:
            for name, command in COMMANDS.items():
                with Table("t", given) as table:
                    command(table, out)
                    found[name] = float(sum(table.requests.values()))
        _date(lake / "table", at)
    seconds = round(perf_counter() - begun, 2)
    return {**found, "seconds": seconds, "mb": round(peak_bytes() / 1e6), "night_seconds": round(each, 3)}


def _land(lake: Path, night: int) -> None:
    n = PARTITIONS * 2
    columns = {
        "k": pa.array(["a", "b"] * PARTITIONS),
        "d": pa.array([str(i // 2) for i in range(n)]),
        "ts": pa.array([night] * n),
        "v": pa.array([night] * n),
    }
    pq.write_table(pa.table(columns), lake / "landing" / f"{night:05d}.parquet")


def _date(table: Path, at: Nights) -> None:
    """Give what was written since the last call the time of its night."""
    now, real = at.now().timestamp(), datetime.now(UTC).timestamp() - 30 * 86400
    for path in table.rglob("*"):
        if path.is_file() and path.stat().st_mtime > real:
            os.utime(path, (now, now))
