"""A database under random transactions for `lakeupsert capture`: `python follow.py DATABASE FOLDER SECONDS SEED`.

Writes FOLDER/server.json (its address) when its tables are there, and FOLDER/rows.json (the rows of `wide`) after the last
transaction. Then it waits until standard input ends. Rows 7000 to 7009 have numbers in `v` whose sum no transaction changes.
"""

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from databases import DATABASES, NAMES
from record import ERRORS, Transactions

ACCOUNTS = range(7000, 7010)
PLAIN = {
    "postgresql": """, amount numeric(10,2) default round((random() * 1000)::numeric, 2),
        day date default date '2024-01-01' - (random() * 70000)::int, at timestamptz default clock_timestamp(),
        small numeric(30,20) default -random(), yes boolean default random() < .5""",
    "mariadb": """, amount decimal(10,2) default (round(rand() * 1000, 2)),
        day date default (date_sub('2024-01-01', interval rand() * 9999 day)), at timestamp(6) default now(6),
        small decimal(30,20) default (-rand()), yes boolean default (rand() < .5)""",
}
"""Columns without NaN, infinity and zero dates."""


def move(database: Any, seed: int, ends: float) -> None:
    chance, db = random.Random(seed), database.connect()
    while time.monotonic() < ends:
        with db.cursor() as cursor:
            for id_, change in zip(chance.sample(ACCOUNTS, 2), (1, -1), strict=True):
                cursor.execute("select v from wide where id = %s", [id_])
                cursor.execute("update wide set v = %s where id = %s", [str(int(cursor.fetchone()[0]) + change), id_])
        db.commit()
        time.sleep(0.02)


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
        (folder / "server.json").write_text(json.dumps({"port": database.port}))
        ends = time.monotonic() + seconds
        mover = threading.Thread(target=move, args=(database, seed, ends))
        mover.start()
        while time.monotonic() < ends:
            workers = transactions.run(60)
            transactions.wait_for_an_index()
            for worker in workers:
                worker.join()
        mover.join()
        with db.cursor() as cursor:
            cursor.execute(f"{database.rows} wide order by id")
            (folder / "rows.part").write_text(json.dumps(list(map(list, cursor.fetchall()))))
        (folder / "rows.part").rename(folder / "rows.json")
        sys.stdin.read()
    finally:
        database.stop()
    shutil.rmtree(server)


if __name__ == "__main__":
    name, to, how_long, number = sys.argv[1:]
    with __import__("contextlib").suppress(*ERRORS):
        main(name, Path(to), float(how_long), int(number))
