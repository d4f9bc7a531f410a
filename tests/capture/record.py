"""Record what Debezium sends of a database that random transactions change: `python record.py DATABASE FOLDER TRANSACTIONS SEED`.

FOLDER gets `feed-1.tsv` (topic and value of each record) and `rows-1.json` (the tables at the end). Then the connector loses its
slot and offsets, rows change, and another connector begins: `feed-2.tsv`, `rows-2.json`.
"""

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from databases import DATABASES, NAMES, wait_until

KEYS, WORKERS, PAUSE = 40, 3, 0.05
ERRORS = (psycopg.Error, pymysql.Error)


class Transactions:
    """Random transactions of several workers at once. Those that fail, for example in a deadlock, are rolled back."""

    def __init__(self, database: Any, seed: int) -> None:
        self.database, self.seed, self.done = database, seed, 0
        self.version = iter(range(1, 1 << 30))

    def run(self, count: int, pause: float = PAUSE) -> "list[threading.Thread]":
        """Start workers that make so many transactions together."""
        end = self.done + count
        self.seed += WORKERS
        workers = [threading.Thread(target=self._work, args=(self.seed + n, end, pause)) for n in range(WORKERS)]
        for worker in workers:
            worker.start()
        return workers

    def _work(self, seed: int, end: int, pause: float) -> None:
        chance, db = random.Random(seed), self.database.connect()
        while self.done < end:
            self.done += 1
            try:
                with db.cursor() as cursor:
                    table = chance.choice(self.database.tables)
                    for _ in range(chance.choice([1, 1, 2, 3, 6])):
                        chance.choice(STATEMENTS)(self, cursor, table, chance)
                if chance.random() < 0.1:
                    db.rollback()
                else:
                    db.commit()
            except ERRORS:
                db.rollback()
            time.sleep(chance.random() * 2 * pause)
        db.close()

    def text(self) -> str:
        return f"v{next(self.version)}"

    def insert(self, cursor: Any, table: str, chance: random.Random, id_: int | None = None) -> None:
        id_ = chance.randrange(KEYS) if id_ is None else id_
        values = [
            id_,
            chance.randrange(KEYS * 20),
            chance.choice("abc"),
            self.text(),
            self.text() * chance.choice([1, 900]),
        ]
        cursor.execute(f"insert into {table} ({NAMES}) values (%s, %s, %s, %s, %s)", values)

    def update(self, cursor: Any, table: str, chance: random.Random) -> None:
        cursor.execute(f"update {table} set v = %s where id = %s", [self.text(), chance.randrange(KEYS)])

    def update_many(self, cursor: Any, table: str, chance: random.Random) -> None:
        cursor.execute(f"update {table} set v = %s where id between %s and 9", [self.text(), chance.randrange(KEYS)])

    def move(self, cursor: Any, table: str, chance: random.Random) -> None:
        values = [chance.choice("abc"), self.text() * 900, chance.randrange(KEYS)]
        cursor.execute(f"update {table} set area = %s, wide = %s where id = %s", values)

    def change_key(self, cursor: Any, table: str, chance: random.Random) -> None:
        # The create of the new key lacks a long value that was not set, unless the replica identity is full.
        sent = "" if table == "wide" else ", wide = 'short'"
        cursor.execute(
            f"update {table} set id = %s{sent} where id = %s", [chance.randrange(KEYS), chance.randrange(KEYS)]
        )

    def delete(self, cursor: Any, table: str, chance: random.Random) -> None:
        cursor.execute(f"delete from {table} where id = %s", [chance.randrange(KEYS)])

    def delete_and_insert(self, cursor: Any, table: str, chance: random.Random) -> None:
        id_ = chance.randrange(KEYS)
        cursor.execute(f"delete from {table} where id = %s", [id_])
        self.insert(cursor, table, chance, id_)

    def roll_back_a_part(self, cursor: Any, table: str, chance: random.Random) -> None:
        cursor.execute("savepoint s")
        self.update(cursor, table, chance)
        self.delete(cursor, table, chance)
        cursor.execute("rollback to savepoint s")

    def copy(self, cursor: Any, table: str, chance: random.Random) -> None:
        """COPY on PostgreSQL, one insert of several rows on MariaDB."""
        begin = KEYS + chance.randrange(1000)
        rows = [[n, None, chance.choice("abc"), self.text(), "w"] for n in range(begin, begin + 3)]
        if hasattr(cursor, "copy"):
            with cursor.copy(f"copy {table} ({NAMES}) from stdin") as copy:
                for row in rows:
                    copy.write_row(row)
        else:
            cursor.executemany(f"insert into {table} ({NAMES}) values (%s, %s, %s, %s, %s)", rows)

    def log_a_message(self, cursor: Any, table: str, chance: random.Random) -> None:
        if hasattr(cursor, "copy"):
            cursor.execute("select pg_logical_emit_message(true, 'app', %s)", [self.text()])

    def wait_for_an_index(self) -> None:
        """An insert that is written first, waits for `u`, and is let in by the commit that deletes its key."""
        for table in self.database.tables:
            first, second = self.database.connect(), self.database.connect()
            try:
                with first.cursor() as one, second.cursor() as two:
                    one.execute(f"delete from {table} where id in (9001, 9002)")
                    one.execute(f"insert into {table} ({NAMES}) values (9001, 9050, 'a', 'old', 'w')")
                    first.commit()
                    one.execute(f"insert into {table} ({NAMES}) values (9002, 9060, 'a', 'other', 'w')")
                    values = [9001, 9060, "b", self.text(), "w"]
                    waits = threading.Thread(
                        target=_quietly,
                        args=(two.execute, f"insert into {table} ({NAMES}) values (%s, %s, %s, %s, %s)", values),
                    )
                    waits.start()
                    time.sleep(0.3)
                    one.execute(f"delete from {table} where id in (9001, 9002)")
                    first.commit()
                    waits.join()
                    second.commit()
            except ERRORS:
                second.rollback()
            finally:
                first.close()
                second.close()


def _quietly(call: Callable[..., object], *given: object) -> None:
    with suppress(*ERRORS):
        call(*given)


STATEMENTS = [
    *[Transactions.insert] * 5, *[Transactions.update] * 6, Transactions.update_many, *[Transactions.move] * 2,
    *[Transactions.change_key] * 3, *[Transactions.delete] * 3, *[Transactions.delete_and_insert] * 3,
    Transactions.roll_back_a_part, Transactions.copy, Transactions.log_a_message,
]  # fmt: skip


def record(kind: str, folder: Path, count: int, seed: int) -> None:
    server = Path(tempfile.mkdtemp(prefix="capture-"))
    server.chmod(0o755)  # the server may run as a user of its own
    database = DATABASES[kind](server)
    try:
        database.create()
        transactions = Transactions(database, seed)
        connector = database.connector(folder / "feed-1.tsv")
        _first_connector(database, connector, transactions, count)
        _dump(database, folder / "rows-1.json")
        database.forget()
        for worker in transactions.run(count // 10, pause=0):
            worker.join()
        connector = database.connector(folder / "feed-2.tsv")
        _second_connector(database, connector, transactions, count // 10)
        _dump(database, folder / "rows-2.json")
    finally:
        database.stop()
    shutil.rmtree(server)


def _first_connector(database: Any, connector: Any, transactions: Transactions, count: int) -> None:
    for worker in transactions.run(count // 10, pause=0):
        worker.join()
    ends = [_open_transaction(database, n) for n in range(3)]
    connector.start()
    workers = transactions.run(count // 5)
    connector.wait_for('"op":"r"')
    for end in ends:
        end()
    connector.save_offsets()
    for worker in workers:
        worker.join()
    begin = transactions.done
    workers = transactions.run(count - begin)
    steps: list[Callable[[], object]] = [
        transactions.wait_for_an_index,
        lambda: database.signal("one", "incremental"),
        transactions.wait_for_an_index,
        lambda: (connector.stop(), database.turn_log(), connector.start()),
        lambda: (database.signal("two", "incremental"), transactions.wait_for_an_index()),
        lambda: (connector.kill(), connector.start()),
        lambda: _read_blocking(database, connector),
        transactions.wait_for_an_index,
        lambda: (database.signal("four", "incremental"), time.sleep(0.2), connector.kill(), connector.start()),
        transactions.wait_for_an_index,
    ]
    for n, step in enumerate(steps):
        due = begin + (count - begin) * n // len(steps)
        while transactions.done < due and any(worker.is_alive() for worker in workers):
            time.sleep(0.02)
        step()
    for worker in workers:
        worker.join()
    _finish(database, connector, 1)


def _read_blocking(database: Any, connector: Any) -> None:
    """MariaDB's connector sometimes never begins it after a crash; then there is one snapshot less."""
    database.signal("three", "blocking")
    with suppress(TimeoutError):
        connector.wait_for('"snapshot":"last"', times=2, seconds=20)


def _second_connector(database: Any, connector: Any, transactions: Transactions, count: int) -> None:
    connector.start()
    workers = transactions.run(count)
    wait_until(database.is_followed, "no slot")
    end = _open_transaction(database, 4)
    connector.wait_for('"op":"r"')
    end()
    for worker in workers:
        worker.join()
    _finish(database, connector, 2)


def _open_transaction(database: Any, n: int) -> Callable[[], None]:
    """Change rows of its own, and commit when the result is called."""
    db = database.connect()
    with db.cursor() as cursor:
        for table in database.tables:
            cursor.execute(f"insert into {table} ({NAMES}) values (%s, null, 'a', 'before', 'w')", [8000 + n])
            cursor.execute(f"insert into {table} ({NAMES}) values (%s, null, 'a', 'before', 'w')", [8100 + n])
        db.commit()
        for table in database.tables:
            cursor.execute(f"update {table} set v = 'open' where id = %s", [8000 + n])
            cursor.execute(f"delete from {table} where id = %s", [8100 + n])

    def end() -> None:
        db.commit()
        db.close()

    return end


def _finish(database: Any, connector: Any, number: int) -> None:
    time.sleep(3)  # chunks of a snapshot end in transactions of their own
    db = database.connect()
    with db.cursor() as cursor:
        cursor.execute("insert into marker values (%s)", [number])
    db.commit()
    db.close()
    connector.wait_for(f'"after":{{"n":{number}}}')
    connector.stop()


def _dump(database: Any, to: Path) -> None:
    db, rows = database.connect(), {}
    with db.cursor() as cursor:
        for table in database.tables:
            cursor.execute(f"{database.rows} {table} order by id")
            rows[table] = list(map(list, cursor.fetchall()))
    db.close()
    to.write_text(json.dumps(rows))


if __name__ == "__main__":
    name, to, transactions, seed = sys.argv[1:]
    Path(to).mkdir(parents=True)
    record(name, Path(to), int(transactions), int(seed))
