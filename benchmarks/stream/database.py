"""A PostgreSQL database of sales. A number on standard input asks for a second of transactions, which update and insert rows.

Reads     standard input: the number of the second, or `rows`
Writes    FOLDER/port when the base is there; FOLDER/commits.jsonl, a line for each commit when it has returned; FOLDER/rows.csv
          and then FOLDER/rows.done after `rows`
Repeat    in another folder. It ends with its input

    build/capture/venv/bin/python benchmarks/stream/database.py FOLDER TRANSACTIONS ROWS PARTITIONS TOUCHED BASE_ROWS

It runs in the environment of `make capture`, which has a client of PostgreSQL.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/capture"))
from databases import Postgresql

COLUMNS = "id, day, tx, store, cents, status, note"
CREATE = """create table sales (id bigint primary key, day date not null, tx int not null, store int not null,
    cents bigint not null, status text not null, note text not null)"""
INSERT = f"""insert into sales ({COLUMNS}) select id, date '2025-01-01' + mod(id, %(partitions)s)::int, %(tx)s, mod(id, 2000),
    mod(id * 7919, 90000), 'new', md5(id::text) from """
UPDATE = "update sales set tx = %(tx)s, cents = cents + 1, status = 'sent', note = md5(note) where id = any(%(ids)s)"


class Sales:
    """A row's day follows from its key, so no row moves."""

    def __init__(self, folder: Path, db: Any, *sizes: int) -> None:
        self.folder, self.db = folder, db
        self.transactions, self.rows, self.partitions, self.touched, self.base_rows = sizes
        self._new = self.base_rows

    def create(self) -> None:
        self.db.execute(CREATE)
        self.db.execute("alter table sales replica identity full")
        given = {"partitions": self.partitions, "tx": 0, "last": self.partitions * self.base_rows - 1}
        self.db.execute(f"{INSERT} generate_series(0, %(last)s) id", given)
        self.db.commit()

    def second(self, number: int) -> None:
        chance, begun = random.Random(number), time.monotonic()
        dates = chance.sample(range(self.partitions), self.touched)
        with (self.folder / "commits.jsonl").open("a") as commits:
            for nth in range(self.transactions):
                time.sleep(max(0, begun + nth / self.transactions - time.monotonic()))
                tx, half = number * self.transactions + nth, self.rows // self.transactions // 2
                given: dict[str, Any] = {"partitions": self.partitions, "tx": tx}
                changed = {
                    chance.randrange(self.base_rows) * self.partitions + chance.choice(dates) for _ in range(half)
                }
                self.db.execute(UPDATE, {**given, "ids": list(changed)})
                new = [(self._new + n) * self.partitions + chance.choice(dates) for n in range(half)]
                self._new += half
                self.db.execute(f"{INSERT} unnest(%(ids)s::bigint[]) id", {**given, "ids": new})
                self.db.commit()
                commits.write(json.dumps({"tx": tx, "at": time.time()}) + "\n")
                commits.flush()

    def write(self) -> None:
        query = f"copy (select {COLUMNS} from sales) to stdout (format csv, header)"
        with (self.folder / "rows.csv").open("wb") as file, self.db.cursor().copy(query) as rows:
            file.writelines(rows)
        (self.folder / "rows.done").touch()


def main(folder: Path, sizes: list[int]) -> None:
    server = Path(tempfile.mkdtemp(prefix="stream-"))
    server.chmod(0o755)
    database = Postgresql(server)
    try:
        sales = Sales(folder, database.connect(), *sizes)
        sales.create()
        (folder / "port.part").write_text(str(database.port))
        (folder / "port.part").rename(folder / "port")
        for line in sys.stdin:
            if line.strip() == "rows":
                sales.write()
            else:
                sales.second(int(line))
    finally:
        database.stop()
        shutil.rmtree(server)


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
