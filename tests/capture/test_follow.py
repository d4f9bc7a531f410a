"""Two databases flow into one table while `capture` and `ingest` are killed at random: the table is both databases, row by row
and value by value.

Meanwhile keys change, tables are truncated, columns are added, widened, renamed and dropped, and a reader sees whole
transactions only. Needs `make capture`. SECONDS=1800 asks for a longer run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import lakeupsert
from lakeupsert.errors import LakeupsertError
from tests.capture.test_capture import BUILD, NEEDED

pytestmark = pytest.mark.capture
SECONDS = float(os.environ.get("SECONDS", 120))
BETWEEN_KILLS = (10.0, 30.0)
KINDS = ("postgresql", "mariadb")
ACCOUNTS = (7000, 7010)
CONFIG = """
[tables.t]
landing = "landing"
processed = "processed"
key = ["__source_name", "id"]
partition_by = []
order_by = ["__log_position"]
[tables.t.read]
envelope = "debezium"
[tables.t.delete]
column = "__op"
values = ["d"]
[sources.postgresql]
from = "postgresql://postgres@127.0.0.1:{ports[postgresql]}/postgres"
table = "t"
tables = ["public.wide"]
seconds = 0.3
rows = {rows}
[sources.mariadb]
from = "mariadb://d@127.0.0.1:{ports[mariadb]}/m"
table = "t"
tables = ["m.wide"]
jars = "{jars}"
seconds = 0.3
rows = {rows}
"""
Rows = list[tuple[Any, ...]]


@contextmanager
def process(*command: object, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(list(map(str, command)), **given)
    try:
        yield started
    finally:
        if started.stdin is not None:  # the end of its input makes it stop its server
            started.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                started.wait(60)
        started.kill()
        started.wait()


def wait_for(path: Path, server: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert server.poll() is None, "the database has ended"
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.1)


class Service:
    """A command of lakeupsert, as a service manager runs it: started again whenever it has ended."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self.command = folder, command
        packages = next((BUILD / "venv").glob("lib/python3*/site-packages"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(packages),
            "LAKEUPSERT__SOURCES__MARIADB__PASSWORD": "d",
        }
        self.log_file = folder / f"{'-'.join(command[:2])}.log"
        self.log = open(self.log_file, "ab")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        code = "from lakeupsert import retries; retries.LEADER_SECONDS = 2; from lakeupsert.cli import main; main()"
        given = {"cwd": self.folder, "env": self.environment, "stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen([sys.executable, "-c", code, *self.command], **given)  # type: ignore[call-overload]

    def look(self) -> None:
        if self.process.poll() is not None:
            self.log.write(f"ended with {self.process.returncode}\n".encode())
            assert self.process.returncode in (-signal.SIGKILL, 75), self.log_file.read_text()
            self.start()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)


def rows_of(table: lakeupsert.Table, wanted: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    """By source, with the columns that its database has in the end."""
    names = ["id", "u", "area", "v", "wide", "amount", "day", "at", "small", "yes"]
    more = {name for one in wanted.values() for name in one["columns"]}
    found: dict[str, Rows] = {kind: [] for kind in wanted}
    with suppress(LakeupsertError):  # there is no table yet, or not all columns
        for row in table.to_arrow(columns=["__source_name", *names, *more]).read_all().to_pylist():
            kind = row["__source_name"]
            found[kind].append(tuple(row[name] for name in (*names, *wanted[kind]["columns"])))
    return {kind: sorted(rows) for kind, rows in found.items()}


def rows_of_database(rows: list[list[Any]]) -> Rows:
    def plain(row: list[Any]) -> tuple[Any, ...]:
        day = None if row[6] is None else date(1970, 1, 1) + timedelta(days=row[6])
        return (
            *row[:5],
            Decimal(row[5]),
            day,
            datetime.fromisoformat(row[7]),
            Decimal(row[8]),
            bool(row[9]),
            *row[10:],
        )

    return sorted(map(plain, rows))


def look_at_accounts(table: lakeupsert.Table) -> bool:
    """Whether a snapshot has those of both databases. If it does, no transaction is halfway in it."""
    with suppress(LakeupsertError):
        where = f"id >= {ACCOUNTS[0]} and id < {ACCOUNTS[1]}"
        rows = table.to_arrow(columns=["__source_name", "v"], where=where).read_all().to_pylist()
        values = {kind: [int(row["v"]) for row in rows if row["__source_name"] == kind] for kind in KINDS}
        for found in values.values():
            assert len(found) in (0, 10), values
            assert not found or sum(found) == 1000, values
        return all(values.values())
    return False


@pytest.mark.parametrize("rows", [10_000, 40], ids=["snapshot in one file", "snapshot in many files"])
def test_table_is_both_databases_whoever_is_killed(rows: int, tmp_path: Path) -> None:
    """Readers see parts of a first snapshot that comes in many files, so they look only if it does not."""
    for needed in (*NEEDED.values(), BUILD / "venv", BUILD / "mariadb"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    chance = random.Random(seed := int(os.environ.get("SEED", random.randrange(1 << 30))))
    print("SEED", seed)
    tmp_path.chmod(0o755)
    (tmp_path / "landing").mkdir()
    script = Path(__file__).with_name("follow.py")
    with ExitStack() as ending:
        commands = [[BUILD / "venv/bin/python", script, kind, tmp_path, SECONDS, seed] for kind in KINDS]
        servers = [ending.enter_context(process(*command, stdin=subprocess.PIPE)) for command in commands]
        for server, kind in zip(servers, KINDS, strict=True):
            wait_for(tmp_path / f"{kind}.json", server, 120)
        ports = {kind: json.loads((tmp_path / f"{kind}.json").read_text())["port"] for kind in KINDS}
        config = tmp_path / "lakeupsert.toml"
        config.write_text(CONFIG.format(ports=ports, jars=BUILD / "mariadb", rows=rows))
        commands = [["capture", kind] for kind in KINDS]
        services = [Service(tmp_path, *command) for command in (*commands, ["ingest", "--seconds", "0.3"])]
        for service in services:
            ending.callback(service.end)
        table = lakeupsert.Table.open(config)
        looks = kills = 0
        next_kill = time.monotonic() + chance.uniform(*BETWEEN_KILLS)
        while not all((tmp_path / f"{kind}.rows.json").exists() for kind in KINDS):
            assert not any(server.poll() is not None for server in servers)
            looks += rows == 40 or look_at_accounts(table)
            if time.monotonic() > next_kill:
                chance.choice(services).end()
                kills += 1
                next_kill = time.monotonic() + chance.uniform(*BETWEEN_KILLS)
            for service in services:
                service.look()
            time.sleep(0.1)
        found = {kind: json.loads((tmp_path / f"{kind}.rows.json").read_text()) for kind in KINDS}
        wanted, end = (
            {kind: rows_of_database(one["rows"]) for kind, one in found.items()},
            time.monotonic() + max(180, SECONDS / 4),
        )
        while rows_of(table, found) != wanted and time.monotonic() < end:
            looks += rows == 40 or look_at_accounts(table)
            for service in services:
                service.look()
            time.sleep(0.5)
        assert rows_of(table, found) == wanted
        looks += rows == 40 or look_at_accounts(table)
        assert looks
        counts = {kind: (len(rows), found[kind]["columns"]) for kind, rows in wanted.items()}
        print(f"{kills} kills, {looks} looks, rows and added columns {counts}, batches {table.status().batch}")
        for service in services:
            service.end(signal.SIGTERM)
            assert service.process.returncode == 75
