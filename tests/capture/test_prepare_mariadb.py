"""What `capture` finds in MariaDB before it begins, and in whose words. Needs `make capture`."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakeupsert.config import DatabaseSource
from lakeupsert.errors import ConfigurationError, TryAgainError

pytestmark = pytest.mark.capture
TABLES = """
create table plain (id int primary key, v int)
create table keyless (id int)
create table versioned (id int primary key) with system versioning
create view seen as select id from plain
create table addresses (id int primary key, at inet6)
create table years (id int primary key, y year)
insert into years values (1, 2020), (2, 0)
create table days (id int primary key, d date not null default '2020-01-01', n date)
insert into days (id, n) values (1, '0000-00-00')
create table zeros (id int primary key, d date not null)
insert into zeros values (1, '0000-00-00')
create table moments (id int primary key, t timestamp null)
insert into moments values (1, '0000-00-00')
create table hidden (id int primary key)
create user mine identified by 'mine'
create user lesser identified by 'mine'
grant replication slave, binlog monitor on *.* to mine
grant select on m.plain to lesser
"""
READABLE = ("plain", "keyless", "versioned", "seen", "addresses", "years", "days", "zeros", "moments")


@pytest.fixture(scope="module")
def database(jvm: None) -> Iterator[Any]:
    from databases import Mariadb

    root = Path(tempfile.mkdtemp(prefix="capture-"))
    root.chmod(0o755)
    server = Mariadb(root)
    server._execute(*TABLES.strip().split("\n"), *(f"grant select on m.{name} to mine" for name in READABLE))
    yield server
    server.stop()
    shutil.rmtree(root)


def prepare(database: Any, *tables: str, user: str = "mine", position: Any = None, port: int = 0) -> Any:
    from lakeupsert.sources.mariadb import Mariadb

    address = f"mariadb://{user}@127.0.0.1:{port or database.port}/m"
    given = {"from": address, "table": "t", "tables": tables, "jars": "jars"}
    one = Mariadb("shop", msgspec.convert(given, DatabaseSource), "mine", "rows")
    return one.prepare(position, is_new=position is None)


@pytest.mark.parametrize(
    ("table", "says", "advice"),
    [
        ("m.absent", "no table m.absent", "its database"),
        ("m.hidden", "may not read it", "grant select on `m`.`hidden` to mine"),
        ("m.keyless", "do not say which row", "primary key"),
        ("m.versioned", "system-versioned", "alter table `m`.`versioned` drop system versioning"),
        ("m.seen", "not an ordinary table", "behind the view"),
        ("m.addresses", "column at of m.addresses has the type inet6", "other tables"),
        ("m.years", "column y of m.years has the year 0000", "null"),
        ("m.zeros", "column d of m.zeros has days or months that are zero", "null"),
        ("m.moments", "column t of m.moments has days or months that are zero", "null"),
    ],
)
def test_a_table_that_does_not_fit_is_named(database: Any, table: str, says: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "m.plain", table)
    assert caught.value.code == "source-unfit"
    assert says in caught.value.message
    assert advice in str(caught.value.next)


@pytest.mark.parametrize(
    ("setting", "value", "usual", "says"),
    [
        ("binlog_format", "mixed", "row", "binlog_format is MIXED"),
        ("binlog_row_image", "minimal", "full", "binlog_row_image is MINIMAL"),
        ("log_bin_compress", "1", "0", "log_bin_compress is on"),
    ],
)
def test_a_binary_log_that_lacks_something_is_named(
    database: Any, setting: str, value: str, usual: str, says: str
) -> None:
    database._execute(f"set global {setting} = {value}")
    try:
        with pytest.raises(ConfigurationError) as caught:
            prepare(database, "m.plain")
        assert says in caught.value.message
        assert setting in str(caught.value.next)
    finally:
        database._execute(f"set global {setting} = {usual}")


def test_rights_that_are_missing_are_named(database: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "m.plain", user="lesser")
    assert "grant replication slave on *.* to lesser" in str(caught.value.next)
    assert "grant binlog monitor on *.* to lesser" in str(caught.value.next)
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "m.plain", user="stranger")
    assert "correct the user, the password or the database" in str(caught.value.next)
    with pytest.raises(TryAgainError):
        prepare(database, "m.plain", port=1)


def test_zero_dates_that_may_come_are_a_warning(database: Any) -> None:
    [(warning, _)] = prepare(database, "m.days").warnings
    assert "d of m.days" in warning
    assert prepare(database, "m.plain").warnings == ()


def test_a_binary_log_that_is_gone_is_a_lost_position(database: Any) -> None:
    from databases import wait_until

    from lakeupsert.sources.mariadb import Mariadb

    def purged(database: Any) -> bool:
        db = database.connect()
        with db.cursor() as cursor:
            cursor.execute("purge binary logs to 'binlog.000003'")
            cursor.execute("show binary logs")
            return bool(cursor.fetchall()[0][0] == "binlog.000003")

    address = f"mariadb://mine@127.0.0.1:{database.port}/m"
    source = msgspec.convert({"from": address, "table": "t", "tables": ["m.plain"], "jars": "jars"}, DatabaseSource)
    one = Mariadb("shop", source, "mine", "rows")
    place = one.shown({"partition": {}, "offset": {}})
    with database.connect().cursor() as cursor:
        cursor.execute("select @@gtid_binlog_pos")
        here = {**place, "offset": {**place["offset"], "gtids": cursor.fetchall()[0][0]}}  # as Debezium's
    assert prepare(database, "m.plain", position=here).warnings == ()
    database._execute("flush binary logs", "purge binary logs to 'binlog.000002'")
    assert prepare(database, "m.plain", position=here).warnings == ()  # nothing came behind it in the file that is gone
    database._execute("insert into plain values (1, 1)", "commit", "flush binary logs")
    wait_until(
        lambda: purged(database), "the file is not purged"
    )  # until InnoDB has written what it needs the file for
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "m.plain", position=here)
    assert caught.value.code == "position-lost"
    database._execute("reset master", *(f"insert into plain values ({n}, 1)" for n in range(2, 30)), "commit")
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "m.plain", position=here)
    assert caught.value.code == "position-lost"
