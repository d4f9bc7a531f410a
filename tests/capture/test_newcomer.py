"""docs/FROM_POSTGRESQL.md block by block, from an empty folder and a database with one table. Only the address is another.

Needs `make capture`; with `make readers`, DuckDB reads the table as on the page, otherwise delta-rs does.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from lakeupsert.config import DatabaseSource
from lakeupsert.errors import ConfigurationError
from tests.capture.test_capture import BUILD, NEEDED
from tests.harness.processes import processes_of_session, wait_until
from tests.harness.readers import PROGRAMS
from tests.integration.test_documentation import BLOCK, ROOT, shim

pytestmark = pytest.mark.capture
PAGE = (ROOT / "docs/FROM_POSTGRESQL.md").read_text()
ORDERS = """
create table orders (id int primary key, item text, price numeric(10,2), placed timestamptz default now(), note text, at time);
alter table orders alter note set storage external;
insert into orders select n, 'item ' || n, n, now(), repeat('long ', 1000), '12:00' from generate_series(1, 50) n
"""
CHANGES = (
    "update orders set price = price + 1 where id <= 10",
    "delete from orders where id between 11 and 20",
    "insert into orders values (100, 'socks', 3.50, now(), null, null), (101, 'hat', 9, now(), 'short', null)",
    "begin; update orders set item = 'shoes' where id = 30; delete from orders where id = 31; commit",
)


def block(kind: str, said: str) -> str:
    [text] = [one["text"] for one in BLOCK.finditer(PAGE) if one["kind"] == kind and said in one["text"]]
    return str(text)


@pytest.fixture(scope="module")
def database() -> Iterator[Any]:
    """A server with the databases `shop` and `postgres`. It asks the user `me` for a password."""
    for needed in (NEEDED["postgresql"], BUILD / "venv"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    packages = [str(next((BUILD / "venv").glob("lib/python3*/site-packages"))), str(Path(__file__).parent)]
    sys.path += packages
    from databases import Postgresql

    root = Path(tempfile.mkdtemp(prefix="capture-"))
    root.chmod(0o755)
    server = Postgresql(root)
    hba = root / "data/pg_hba.conf"
    hba.write_text("host all me 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
    for statement in (
        "create role me login password 'secret'",
        "create database shop owner me",
        block("sql", "replic"),
    ):
        ask(server, statement, "postgres", "postgres")
    ask(server, "select pg_reload_conf()", "postgres", "postgres")
    yield server
    server.stop()
    shutil.rmtree(root)
    for one in packages:
        sys.path.remove(one)


def ask(server: Any, statement: str, database: str = "shop", user: str = "me") -> list[tuple[Any, ...]]:
    import psycopg

    address = {"host": "127.0.0.1", "port": server.port, "dbname": database, "user": user, "password": "secret"}
    with psycopg.connect(**address, autocommit=True) as db:
        found = db.execute(statement)
        return found.fetchall() if found.description else []


class Newcomer:
    """An empty folder, and the program on the path of a shell."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "work"
        self.folder.mkdir()
        shim(root / "bin/lakeupsert")
        packages = next((BUILD / "venv").glob("lib/python3*/site-packages"))
        path = f"{root / 'bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{packages}:{ROOT}"}

    @contextmanager
    def shell(self, text: str) -> Iterator[None]:
        """Runs a script with commands that do not end, as somebody at a terminal does, and stops all of them."""
        with open(self.root / "log", "ab") as log:
            given: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": self.folder, "env": self.environment}
            started = subprocess.Popen(["bash", "-c", text], start_new_session=True, **given)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
            started.wait(60)
            wait_until(lambda: not list(processes_of_session(started.pid)), "the commands end", 0.1)

    def run(self, *words: str) -> dict[str, Any]:
        """The object of a command with --json."""
        command = [self.root / "bin/lakeupsert", *words, "--json"]
        given: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "capture_output": True}
        return dict(json.loads(subprocess.run(command, text=True, check=False, **given).stdout))

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows that the page's Python shows; none as long as there is no table."""
        if not (self.folder / "processed/orders/_delta_log").exists():
            return []
        if not (PROGRAMS / "venv").exists():
            table = DeltaTable(self.folder / "processed/orders").to_pyarrow_table(columns=["id", "item", "price"])
            return sorted(tuple(row.values()) for row in table.to_pylist())
        (extension,) = (PROGRAMS / "venv").rglob("delta.duckdb_extension")
        text = block("python", "delta_scan").replace("INSTALL delta; LOAD delta", f"LOAD '{extension}'")
        assert "LOAD '" in text
        assert text.rstrip().endswith(".show()")
        script = text.rstrip().removesuffix(".show()").replace('duckdb.sql("FROM', 'rows = duckdb.sql("FROM')
        script += "\nimport json; print(json.dumps(rows.fetchall(), default=str))"
        command = [PROGRAMS / "venv/bin/python", "-c", script]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True)
        return [(id_, item, Decimal(price)) for id_, item, price in json.loads(done.stdout)]


def test_three_commands_lead_from_a_table_to_a_delta_table(database: Any, tmp_path: Path) -> None:
    for statement in ORDERS.strip().split(";\n"):
        ask(database, statement)
    newcomer = Newcomer(tmp_path)
    commands = block("sh", "--from").replace("db.example:5432", f"127.0.0.1:{database.port}")
    assert len(re.findall(r"(?m)^lakeupsert ", commands)) <= 3

    def is_equal() -> bool:
        rows = newcomer.rows()
        return bool(rows) and rows == ask(database, "select id, item, price from orders order by id")

    with newcomer.shell(commands):
        wait_until(is_equal, "the snapshot is in the Delta table", 1, 180)
        for statement in CHANGES:
            ask(database, statement)
        wait_until(is_equal, "the changes are in the Delta table", 1)
        newcomer.environment |= dict(re.findall(r"export (\w+)=(\w+)", commands))
        found = newcomer.run("doctor")
        assert found["ok"], found
        assert "a program follows it" in " ".join(one["found"] for one in of_source(found))
    rows = newcomer.run("query", "select id, note from orders where note is not null order by id")["result"]["rows"]
    notes = ask(database, "select id, note from orders where note is not null order by id")
    assert [tuple(row.values()) for row in rows] == notes  # long values that an update did not change
    [sign] = [one for one in of_source(newcomer.run("doctor")) if one["level"] == "warning"]
    assert "no program follows it" in sign["found"]
    file = min((newcomer.folder / "landing/orders/shop").glob("*"))
    file.unlink()
    assert newcomer.run("status")["warnings"] == []  # a batch took it


def of_source(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in found["result"]["findings"] if one["check"] == "source shop"]


@pytest.mark.parametrize(
    ("statement", "code", "says"),
    [
        ("create table named (id int primary key)", "unknown-table", "Did you mean 'public.named'"),
        ("create table keyless (id int)", "source-unfit", "do not say which row"),
        ("create table keyless (id int); alter table keyless replica identity full", "no-key", "no primary key and"),
        ("create table parted (id int primary key) partition by range (id)", "source-unfit", "not an ordinary table"),
        (None, "which-table", "public.named"),
    ],
)
def test_a_table_that_can_not_be_proposed_is_named(
    database: Any, tmp_path: Path, statement: str | None, code: str, says: str
) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.environment["LAKEUPSERT__SOURCES__SHOP__PASSWORD"] = "secret"
    name = [] if statement is None else ["--table", f"public.{statement.split()[2]}"]
    if code == "unknown-table":
        name = ["--table", "public.names"]
    if statement is not None:
        ask(database, f"drop table if exists {statement.split()[2]}")
        for one in statement.split("; "):
            ask(database, one)
    found = newcomer.run("init", "--from", f"postgresql://me@127.0.0.1:{database.port}/shop", *name)
    assert not found["ok"]
    assert (found["error"]["code"], says in found["error"]["message"]) == (code, True), found
    assert list(newcomer.folder.iterdir()) == []


def test_proposals_by_the_catalogue(database: Any, tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.environment["LAKEUPSERT__SOURCES__SHOP__PASSWORD"] = "secret"
    ask(database, 'create schema "My Shop"')
    ask(database, 'create table "My Shop"."Unique" (a int not null, b int not null, c time, d timetz, unique (b, a))')
    ask(database, 'alter table "My Shop"."Unique" replica identity full')
    words = ["init", "--from", f"postgresql://me@127.0.0.1:{database.port}/shop", "--table", "My Shop.Unique"]
    found = newcomer.run(*words, "--dry-run")
    proposed = found["result"]["proposed"]
    assert proposed["key"] == ["__source_name", "b", "a"]
    assert "mode" not in proposed
    assert proposed["schema"] == {"c": "bigint", "d": "string"}
    assert list(newcomer.folder.iterdir()) == []
    if not ask(database, "select 1 from pg_replication_slots where slot_name = 'lakeupsert_shop'"):
        ask(database, "select pg_create_logical_replication_slot('lakeupsert_shop', 'pgoutput')")
    other = newcomer.run(*words)
    assert "sources.shop_unique" in other["result"]["proposed"]
    assert any("called shop_unique" in warning for warning in other["warnings"])
    assert (newcomer.folder / "landing/Unique").is_dir()
    assert not newcomer.run(*words)["ok"]  # it never overwrites


def test_a_look_creates_nothing_and_names_what_would_fail(database: Any) -> None:
    from lakeupsert.sources.debezium import start_jvm
    from lakeupsert.sources.postgresql import Postgresql

    start_jvm()
    ask(database, "create table looked (id int primary key)")
    ask(database, "create role reader login replication password 'secret'", "shop", "postgres")
    ask(database, "grant select on looked to reader")

    def look(user: str) -> None:
        address = f"postgresql://{user}@127.0.0.1:{database.port}/shop"
        source = DatabaseSource(from_=address, table="t", tables=("public.looked",))
        Postgresql("look", source, "secret", "rows").prepare(is_new=True, only_look=True)

    with pytest.raises(ConfigurationError) as caught:
        look("reader")
    assert "may not make the publication lakeupsert_look" in caught.value.message
    assert "create publication lakeupsert_look for table public.looked" in str(caught.value.next)
    look("me")
    for what, name in (("pg_publication", "pubname"), ("pg_replication_slots", "slot_name")):
        assert ask(database, f"select 1 from {what} where {name} = 'lakeupsert_look'") == []
