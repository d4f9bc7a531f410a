"""A database under random transactions for `lakeupsert capture`: `python follow.py DATABASE FOLDER SECONDS SEED`.

Writes FOLDER/DATABASE.json (its port) when its tables are there, and FOLDER/DATABASE.rows.json (columns that were added, and the
rows of `wide` with these at their end) after the last transaction. Then it waits until standard input ends. Rows 7000 to 7009
have numbers in `v` whose sum no transaction changes.
"""

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from databases import DATABASES, NAMES, wait_until
from record import ERRORS, Transactions

ACCOUNTS = range(7000, 7010)
PLAIN = {
    "postgresql": """, amount numeric(10,2) default round((random() * 1000)::numeric, 2),
        day date default date '2024-01-01' - (random() * 70000)::int, at timestamptz default clock_timestamp(),
        small numeric(30,20) default -random(), yes boolean default random() < .5""",
    "mariadb": """, amount decimal(10,2) default (round(rand() * 1000, 2)),
        day date default (date_sub('2024-01-01', interval rand() * 9999 day)), at timestamp(6) default now(6),
        small decimal(30,20) default (-rand()), yes bit(1) default (rand() < .5)""",
}
"""Columns without NaN, infinity and zero dates."""


def move(database: Any, seed: int, ends: float) -> None:
    chance = random.Random(seed)
    while time.monotonic() < ends:
        # A victim of a deadlock is rolled back; a connection may be lost; a truncate takes the accounts for a moment.
        with suppress(*ERRORS, TypeError), closing(database.connect()) as db:
            while time.monotonic() < ends:
                with db.cursor() as cursor:
                    for id_, change in zip(chance.sample(ACCOUNTS, 2), (1, -1), strict=True):
                        cursor.execute("select v from wide where id = %s", [id_])
                        row = [str(int(cursor.fetchone()[0]) + change), id_]
                        cursor.execute("update wide set v = %s where id = %s", row)
                db.commit()
                time.sleep(0.02)


class Columns:
    """Adds columns to `wide`, widens, renames and drops them, and truncates it, one step a call. No event has rows that a step
    does not touch, so each step touches all."""

    def __init__(self, kind: str, database: Any) -> None:
        self.database, self.kind, self.names = database, kind, []  # type: ignore[var-annotated]
        self.steps = cycle((self.add, self.widen, self.truncate, self.rename, self.add, self.drop, self.drop))
        self.number = 0

    def step(self) -> None:
        step, done = next(self.steps), []
        self.number = self.number % 14 + 1  # names come back, or the lake's table would get hundreds of columns

        def run() -> bool:
            """A statement may wait for too long, or be a victim of a deadlock."""
            with suppress(*ERRORS):
                for statement in step()[len(done) :]:
                    self._execute(statement)
                    done.append(statement)
                return True
            return False

        wait_until(run, f"step {self.number} fails")
        if step == self.add:
            self.names.append(f"a{self.number}")
        elif step == self.rename:
            self.names[-1] = f"b{self.number}"
        elif step == self.drop:
            del self.names[0]

    def _execute(self, statement: str) -> None:
        db = self.database.connect()
        try:
            with db.cursor() as cursor:
                cursor.execute(statement)
            db.commit()
        finally:
            db.close()

    def add(self) -> list[str]:
        new = f"a{self.number}"
        return [f"alter table wide add column {new} int default -1", f"update wide set {new} = id"]

    def widen(self) -> list[str]:
        old, to = self.names[-1], {"postgresql": "alter column {0} type bigint", "mariadb": "modify column {0} bigint"}
        return [f"alter table wide {to[self.kind].format(old)}", f"update wide set {old} = id + 3000000000"]

    def truncate(self) -> list[str]:
        rows = ", ".join(f"({id_}, null, 'a', '100', 'w')" for id_ in ACCOUNTS)
        statements = ["truncate table wide", f"insert into wide ({NAMES}) values {rows}"]
        return (
            ["; ".join(statements)] if self.kind == "postgresql" else statements
        )  # one transaction, if there can be one

    def rename(self) -> list[str]:
        old, new = self.names[-1], f"b{self.number}"
        return [f"alter table wide rename column {old} to {new}", f"update wide set {new} = {new} + 1"]

    def drop(self) -> list[str]:
        return [f"alter table wide drop column {self.names[0]}"]


def main(kind: str, folder: Path, seconds: float, seed: int) -> None:
    server = Path(tempfile.mkdtemp(prefix="capture-"))
    server.chmod(0o755)
    database = DATABASES[kind](server)
    database.typed = PLAIN[kind]
    try:
        database.create()
        db = database.connect()
        with db.cursor() as cursor:
            for id_ in ACCOUNTS:
                cursor.execute(f"insert into wide ({NAMES}) values (%s, null, 'a', '100', 'w')", [id_])
        db.commit()
        transactions = Transactions(database, seed)
        for worker in transactions.run(200, pause=0):
            worker.join()
        (folder / f"{kind}.json").write_text(json.dumps({"port": database.port}))
        ends = time.monotonic() + seconds
        mover = threading.Thread(target=move, args=(database, seed, ends))
        mover.start()
        columns = Columns(kind, database)
        while time.monotonic() < ends:
            workers = transactions.run(60)
            transactions.wait_for_an_index()
            for worker in workers:
                worker.join()
            columns.step()
        mover.join()
        more = "".join(f", {name}" for name in columns.names)
        with db.cursor() as cursor:
            selected = database.rows.removesuffix(" from ").replace(
                ", yes", ", yes" if kind == "postgresql" else ", yes + 0"
            )
            cursor.execute(f"{selected}{more} from wide order by id")
            found = {"columns": columns.names, "rows": list(map(list, cursor.fetchall()))}
            (folder / f"{kind}.part").write_text(json.dumps(found))
        (folder / f"{kind}.part").rename(folder / f"{kind}.rows.json")
        sys.stdin.read()
    finally:
        database.stop()
    shutil.rmtree(server)


if __name__ == "__main__":
    name, to, how_long, number = sys.argv[1:]
    with __import__("contextlib").suppress(*ERRORS):
        main(name, Path(to), float(how_long), int(number))
