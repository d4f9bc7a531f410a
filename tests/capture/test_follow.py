"""`lakeupsert capture` and `ingest`, killed at random: the table is the database, row by row and value by value.

Meanwhile a reader sees whole transactions only. Needs `make capture`. SECONDS=600 asks for a longer run.
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
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import lakeupsert
from lakeupsert.errors import LakeupsertError
from tests.capture.test_capture import BUILD, NEEDED

pytestmark = pytest.mark.capture
SECONDS = float(os.environ.get("SECONDS", 120))
BETWEEN_KILLS = (10.0, 30.0)
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
[sources.shop]
from = "{address}"
table = "t"
tables = ["{table}"]
seconds = 0.3
rows = {rows}
{more}
"""
ADDRESSES = {"postgresql": ("postgresql://postgres@127.0.0.1:{port}/postgres", "public.wide", "")}
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
        self.environment = {**os.environ, "PYTHONPATH": str(packages)}
        self.log = open(folder / f"{command[0]}.log", "ab")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        code = "from lakeupsert import retries; retries.LEADER_SECONDS = 2; from lakeupsert.cli import main; main()"
        given = {"cwd": self.folder, "env": self.environment, "stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen([sys.executable, "-c", code, *self.command], **given)  # type: ignore[call-overload]

    def look(self) -> None:
        if self.process.poll() is not None:
            self.log.write(f"ended with {self.process.returncode}\n".encode())
            assert self.process.returncode in (-signal.SIGKILL, 75), (
                self.folder / f"{self.command[0]}.log"
            ).read_text()
            self.start()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)


def rows_of(table: lakeupsert.Table) -> Rows:
    columns = ["id", "u", "area", "v", "wide", "amount", "day", "at", "small", "yes"]
    try:
        rows = table.to_arrow(columns=columns).read_all().to_pylist()
    except LakeupsertError:  # there is no table yet
        return []
    return sorted(tuple(row[name] for name in columns) for row in rows)


def rows_of_database(folder: Path) -> Rows:
    def plain(row: list[Any]) -> tuple[Any, ...]:
        from datetime import date, timedelta
        from decimal import Decimal

        day = None if row[6] is None else date(1970, 1, 1) + timedelta(days=row[6])
        return (*row[:5], Decimal(row[5]), day, datetime.fromisoformat(row[7]), Decimal(row[8]), bool(row[9]))

    return sorted(map(plain, json.loads((folder / "rows.json").read_text())))


def look_at_accounts(table: lakeupsert.Table) -> bool:
    """Whether a snapshot has them. If it does, no transaction is halfway in it."""
    with suppress(LakeupsertError):
        where = f"id >= {ACCOUNTS[0]} and id < {ACCOUNTS[1]}"
        values = table.to_arrow(columns=["v"], where=where).read_all()["v"].to_pylist()
        if len(values) == 10:
            assert sum(map(int, values)) == 1000, values
            return True
    return False


@pytest.mark.parametrize("rows", [10_000, 40], ids=["snapshot in one file", "snapshot in many files"])
@pytest.mark.parametrize("kind", list(ADDRESSES))
def test_table_is_the_database_whoever_is_killed(kind: str, rows: int, tmp_path: Path) -> None:
    """Readers see parts of a first snapshot that comes in many files, so they look only if it does not."""
    for needed in (NEEDED[kind], BUILD / "venv"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    chance = random.Random(seed := int(os.environ.get("SEED", random.randrange(1 << 30))))
    print("SEED", seed)
    tmp_path.chmod(0o755)
    (tmp_path / "landing").mkdir()
    script = Path(__file__).with_name("follow.py")
    command = [BUILD / "venv/bin/python", script, kind, tmp_path, SECONDS, seed]
    with process(*command, stdin=subprocess.PIPE) as server, ExitStack() as ending:
        wait_for(tmp_path / "server.json", server, 120)
        address, name, more = ADDRESSES[kind]
        port = json.loads((tmp_path / "server.json").read_text())["port"]
        config = tmp_path / "lakeupsert.toml"
        config.write_text(CONFIG.format(address=address.format(port=port), table=name, more=more, rows=rows))
        services = [Service(tmp_path, "capture", "shop"), Service(tmp_path, "ingest", "--seconds", "0.3")]
        for service in services:
            ending.callback(service.end)
        table = lakeupsert.Table.open(config)
        looks = kills = 0
        next_kill = time.monotonic() + chance.uniform(*BETWEEN_KILLS)
        while not (tmp_path / "rows.json").exists():
            assert server.poll() is None
            looks += rows == 40 or look_at_accounts(table)
            if time.monotonic() > next_kill:
                chance.choice(services).end()
                kills += 1
                next_kill = time.monotonic() + chance.uniform(*BETWEEN_KILLS)
            for service in services:
                service.look()
            time.sleep(0.1)
        wanted, end = rows_of_database(tmp_path), time.monotonic() + 180
        while rows_of(table) != wanted and time.monotonic() < end:
            looks += rows == 40 or look_at_accounts(table)
            for service in services:
                service.look()
            time.sleep(0.5)
        assert rows_of(table) == wanted
        looks += rows == 40 or look_at_accounts(table)
        assert looks
        print(f"{kills} kills, {looks} looks, {len(wanted)} rows")
        for service in services:
            service.end(signal.SIGTERM)
            assert service.process.returncode == 75
