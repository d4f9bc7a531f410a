"""What `capture` finds in PostgreSQL before it begins and while it runs, and in whose words. Needs `make capture`."""

import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakeupsert import Table
from lakeupsert.config import DatabaseSource, DeleteSettings, ReadSettings, TableSettings
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.report.status import status

pytestmark = pytest.mark.capture
TABLES = """
create role mine login replication password 'mine';
create table plain (id int primary key, v int);
create table unread (id int primary key);
create table keyless (id int);
create table parted (id int) partition by range (id);
create table alike (id int primary key, "Name" text, name text);
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
grant select on plain, alike, keyless, parted, long, odd, "Odd 'name" to mine;
"""


@pytest.fixture(scope="module")
def database(jvm: None) -> Iterator[Any]:
    from databases import Postgresql

    root = Path(tempfile.mkdtemp(prefix="capture-"))
    root.chmod(0o755)
    server = Postgresql(root)
    with server.connect() as db:
        for statement in TABLES.strip().split(";\n"):
            db.execute(statement)
    yield server
    server.stop()
    shutil.rmtree(root)


def source_of(database: Any, tables: tuple[str, ...], user: str = "mine", **given: str) -> DatabaseSource:
    address = f"postgresql://{user}@127.0.0.1:{given.get('port', database.port)}/postgres"
    return msgspec.convert({"from": address, "table": "t", "tables": tables, "seconds": 0.1}, DatabaseSource)


def prepare(
    database: Any, *tables: str, user: str = "mine", name: str = "shop", is_new: bool = True, **given: str
) -> Any:
    from lakeupsert.sources.postgresql import Postgresql

    source = source_of(database, tables, user, **given)
    return Postgresql(name, source, "mine", given.get("mode", "rows")).prepare(is_new=is_new)


class Capture:
    """`capture` of tables in a thread, until the block ends."""

    def __init__(self, database: Any, root: Path, *tables: str, user: str = "postgres", name: str = "run") -> None:
        (root / "landing").mkdir()
        settings = TableSettings(
            landing=str(root / "landing"),
            processed=str(root / "processed"),
            key=("__source_name", "id"),
            partition_by=(),
            order_by=("__log_position",),
            read=ReadSettings(envelope="debezium"),
            delete=DeleteSettings(column="__op", values=("d",)),
        )
        self.table, self.root, self.name = OpenTable("t", settings), root, name
        self.source = source_of(database, tables, user)
        self.warnings: list[str] = []
        self.troubles: list[str] = []
        self.rows = 0
        self.stop = Stop()

    def _collect(self, rows: int) -> None:
        self.rows += rows

    def __enter__(self) -> "Capture":
        from lakeupsert.sources.capture import follow_database
        from lakeupsert.sources.follow import CaptureOptions

        given = CaptureOptions(
            stop=self.stop, collect=self._collect, warn=self.warnings.append, trouble=self.troubles.append
        )
        self.pool = ThreadPoolExecutor(1)
        self.future: Future[None] = self.pool.submit(follow_database, self.table, self.name, self.source, "mine", given)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.pool.shutdown()

    def wait_for(self, done: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert not self.future.done(), self.future.exception()
            assert time.monotonic() < end, (self.warnings, self.troubles)
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("table", "says", "advice"),
    [
        ("public.absent", "no table public.absent", "its schema"),
        ("public.unread", "may not read", "grant select on public.unread to mine"),
        ("public.keyless", "do not say which row", "alter table public.keyless replica identity full"),
        ("public.parted", "not an ordinary table", "its partitions"),
        ("public.parent", "inherit from public.parent", "without heirs"),
        ("public.secret", "row-level security", "alter role mine bypassrls"),
        ("public.alike", "columns Name and name of public.alike differ", "rename"),
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
    assert sum("is left out" in warning for warning, _ in found.warnings) == 5
    [(_, advice)] = prepare(database, "public.long", user="postgres", name="long").warnings
    assert "replica identity full" in advice
    assert prepare(database, "public.long", user="postgres", name="long", mode="columns").warnings == ()


def test_a_server_that_does_not_answer_is_asked_again(database: Any) -> None:
    with pytest.raises(TryAgainError) as caught:
        prepare(database, "public.plain", port="1")
    assert caught.value.code == "source-unreachable"


def test_no_slot_is_left(database: Any) -> None:
    with database.connect() as db:
        db.execute(
            "select pg_create_physical_replication_slot('other' || n) from generate_series(1, 10 - (select count(*)"
            " from pg_replication_slots)) n"
        )
    try:
        with pytest.raises(ConfigurationError) as caught:
            prepare(database, "public.plain", user="postgres", name="late")
        assert "all replication slots are in use" in caught.value.message
        assert "max_replication_slots" in str(caught.value.next)
    finally:
        with database.connect() as db:
            db.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name like 'other%'"
            )


def test_a_server_that_is_too_old_is_named(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeupsert.sources import postgresql

    monkeypatch.setattr(postgresql, "_MINE", "select 'logical', 't', '120022'")
    with pytest.raises(ConfigurationError) as caught:
        prepare(database, "public.plain")
    assert "older than 13" in caught.value.message


@pytest.mark.parametrize(
    ("statement", "error"), [("select 1 from pg_authid", ConfigurationError), ("select pg_sleep(9)", TryAgainError)]
)
def test_a_statement_that_is_refused_for_good_ends_the_command(
    database: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statement: str, error: type[Exception]
) -> None:
    """The SQL state decides. `pg_authid` is for superusers; the server cancels the other statement, as it does when it ends."""
    from lakeupsert.sources import postgresql

    with database.connect() as db:
        db.execute("alter role mine set statement_timeout = '100ms'")
    monkeypatch.setattr(postgresql, "_MINE", statement)
    with Capture(database, tmp_path, "public.plain", user="mine", name="refused") as one:
        if error is TryAgainError:
            one.wait_for(lambda: any("statement timeout. No change is lost" in text for text in one.warnings))
        else:
            found = one.future.exception(60)
            assert isinstance(found, ConfigurationError)
            assert (found.code, ".." in str(found)) == ("source-unfit", False)
            assert "permission denied" in found.message


def test_a_publication_or_slot_that_goes_while_it_runs_ends_it(database: Any, tmp_path: Path) -> None:
    """Debezium by itself tries for ever, and nobody hears of it."""
    with database.connect() as db:
        db.execute("create table gone (id int primary key)")
        db.execute("insert into gone values (1)")
    with Capture(database, tmp_path, "public.gone") as one:
        one.wait_for(lambda: one.rows == 1)
        with database.connect() as db:
            db.execute("insert into gone values (2)")
        one.wait_for(lambda: one.rows == 2)
        with database.connect() as db:
            db.execute("drop publication lakeupsert_run")
            db.execute("insert into gone values (3)")
        found = one.future.exception(60)
        assert isinstance(found, ConfigurationError)
        assert "lakeupsert_run lacks changes" in found.message
        assert one.rows == 2
    with database.connect() as db:
        db.execute("select pg_drop_replication_slot('lakeupsert_run')")


def test_a_slot_that_grows_is_an_alarm(database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that is open for long makes the server keep its log, although all changes land."""
    from lakeupsert.sources import capture

    monkeypatch.setattr(capture, "MUCH_LOG", 1_000_000)
    monkeypatch.setattr(capture, "SOURCE_LOOK_SECONDS", 0.5)
    with database.connect() as db:
        db.execute("create table grown (id int primary key, v text)")
    with Capture(database, tmp_path, "public.grown", name="grown") as one:
        one.wait_for(lambda: one.troubles and one.troubles[-1] == "")
        with database.connect() as db, database.connect() as other:
            other.execute("insert into grown values (1, 'open')")
            for number in range(2, 40):
                db.execute(
                    "insert into grown select %s, string_agg(random()::text, '') from generate_series(1, 9999)",
                    [number],
                )
                db.commit()
            one.wait_for(lambda: "of its log for this source" in one.troubles[-1])
            assert [text for text in one.warnings if "of its log for this source" in text]
            one.wait_for(lambda: any("of its log for this source" in text for text in status(one.table).warnings))


def test_a_truncate_deletes_the_rows_that_were_there(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that landed, and those of its own transaction. It waits until a batch has taken what landed."""
    with database.connect() as db:
        db.execute("create table emptied (id int primary key)")
        db.execute("create table kept (id int primary key)")
        db.execute("insert into emptied values (1), (2)")
        db.execute("insert into kept values (9)")
    with Capture(database, tmp_path, "public.emptied", "public.kept", name="emptied") as one:
        one.wait_for(lambda: one.rows == 3)
        monkeypatch.setattr("lakeupsert.sources.truncates._PATIENCE_SECONDS", 0.0)
        with database.connect() as db:
            db.execute("insert into emptied values (3)")
            db.execute("truncate emptied")
            db.execute("insert into emptied values (4)")
        one.wait_for(lambda: any("public.emptied was truncated" in text for text in one.troubles))
        table = Table("t", one.table.settings)
        table.run(host="local")
        one.wait_for(lambda: one.rows == 3 + 1 + 3 + 1)
        table.run(host="local")
    rows = table.to_arrow(columns=["__source_table", "id"]).read_all().to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [("emptied", 4), ("kept", 9)]


def test_an_update_that_changes_the_key_deletes_the_row_of_the_old_one(database: Any, tmp_path: Path) -> None:
    """Debezium sends one update if no unique index says that the row is another one."""
    with database.connect() as db:
        db.execute("create table moved (id int, v numeric(9,2))")
        db.execute("alter table moved replica identity full")
        db.execute("create table unseen (n int primary key, id int)")
        for table in ("moved (id, v)", "unseen (n, id)"):
            db.execute(f"insert into {table} values (1, 1), (2, 2), (3, 3)")
    with Capture(database, tmp_path, "public.moved", "public.unseen", name="moved") as one:
        one.wait_for(lambda: one.rows == 6)
        with database.connect() as db:
            db.execute("update moved set v = 9 where id = 3")
            db.execute("update moved set id = id + 10 where id < 3")
            db.execute("update unseen set n = 4 where n = 3")
        one.wait_for(lambda: one.rows == 6 + 1 + 4 + 2)
        assert not [text for text in one.warnings if "of the key" in text]
        with database.connect() as db:
            db.execute("update unseen set id = 7 where n < 3")
        one.wait_for(lambda: one.rows == 6 + 1 + 4 + 2 + 2)
        assert len([text for text in one.warnings if "id of the key can change in public.unseen" in text]) == 1
    landed = [
        json.loads(line)["payload"]
        for file in sorted((tmp_path / "landing").rglob("*.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    moved = [(one["op"], (one["after"] or one["before"])["id"]) for one in landed if one["source"]["table"] == "moved"]
    assert moved[3:] == [("u", 3), ("d", 1), ("u", 11), ("d", 2), ("u", 12)]
