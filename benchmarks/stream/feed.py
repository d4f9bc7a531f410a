"""What lands: files of sales, the same for every side, and the rows that a table of them has to show.

Reads     nothing: every value comes from a hash of its row's number
Writes    FOLDER/base.parquet, FOLDER/00000001.parquet, ..., and last FOLDER/feed.json (`Feed`)
Repeat    safe: a finished feed of the same size is kept

Half of a file's rows are new keys; the others change keys of the base, and one in fifty of these deletes its key.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb

from benchmarks.workload import Sales, Size, Workload, attributes

SOURCE = Sales(Size())


@dataclass(frozen=True)
class Feed:
    """So many ``files`` of ``rows`` rows for ``touched`` of ``partitions`` dates, whose base has ``base_rows`` rows each."""

    files: int
    rows: int
    partitions: int
    touched: int
    base_rows: int

    @property
    def names(self) -> Sequence[str]:
        return [f"{number:08}.parquet" for number in range(1, self.files + 1)]

    def workload(self) -> Workload:
        filter_ = SOURCE.filter(Size(partitions=self.partitions))
        return Workload("stream", asdict(self), filter=filter_, every_night=True, nights=(), **SOURCE.facts)

    def make(self, below: Path) -> Path:
        folder = below / f"feed-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"
        if (folder / "feed.json").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with duckdb.connect(config={"threads": 2}) as db:
            for name, query in [("base.parquet", self._base())] + [
                (name, self._file(number)) for number, name in enumerate(self.names, start=1)
            ]:
                db.execute(f"COPY ({query}) TO '{folder / name}' (FORMAT parquet, COMPRESSION zstd)")
        (folder / "feed.json").write_text(json.dumps(asdict(self)))
        return folder

    def differences(self, folder: Path, names: Sequence[str], table: Path) -> int:
        """Of the rows of ``table``, a Parquet file or a folder of such, from those that these files give."""
        w = self.workload()
        key = ", ".join((w.partition, *w.key))
        landed = [str(folder / name) for name in ("base.parquet", *names)]
        newest = (
            f"FROM read_parquet({landed}) QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {w.order} DESC) = 1"
        )
        return differences(f"(SELECT * EXCLUDE op FROM ({newest}) WHERE {w.visible})", rows_in(table))

    def _base(self) -> str:
        return f"""SELECT {_day("i % " + str(self.partitions))} AS transaction_date, {_key("i")} AS order_id,
            {attributes("i", "i", "'I'", "TIMESTAMP '2026-01-01' + to_seconds((hash(i) % 80000)::BIGINT)")}
            FROM range({self.partitions * self.base_rows}) t(i) ORDER BY ALL"""

    def _file(self, number: int) -> str:
        dates = random.Random(number).sample(range(self.partitions), self.touched)
        operation = "CASE WHEN i % 2 = 1 THEN 'I' WHEN h % 50 = 0 THEN 'D' ELSE 'U' END"
        stamp = f"TIMESTAMP '2026-02-01' + INTERVAL {number} SECOND + to_microseconds(i)"
        changed = _key(f"(h % {self.base_rows} * {self.partitions} + p)")
        new = f"'N{number:06}-' || lpad(i::VARCHAR, 8, '0')"
        return f"""
            WITH numbered AS (SELECT i, hash(i + {number} * 1000000) // 1024 AS h FROM range({self.rows}) t(i)),
                 placed AS (SELECT *, {dates}[1 + (hash(h) % {self.touched})::INT] AS p FROM numbered)
            SELECT {_day("p")} AS transaction_date, CASE WHEN i % 2 = 1 THEN {new} ELSE {changed} END AS order_id,
                   {attributes("h", "h", operation, stamp)} FROM placed"""


def rows_in(table: Path) -> str:
    """The relation of a Parquet file, or of a folder of such."""
    return f"read_parquet('{table / '*.parquet' if table.is_dir() else table}')"


def differences(wanted: str, found: str) -> int:
    """How many rows are in only one of two relations, in the columns of the first."""
    with duckdb.connect(config={"threads": 2}) as db:
        columns = ", ".join(db.sql(f"FROM {wanted} LIMIT 0").columns)
        for name, rows in (("wanted", wanted), ("found", found)):
            db.execute(f"CREATE TEMP TABLE {name} AS SELECT {columns} FROM {rows}")
        pairs = (("wanted", "found"), ("found", "wanted"))
        only = " UNION ALL ".join(f"(FROM {one} EXCEPT ALL FROM {other})" for one, other in pairs)
        return int(db.execute(f"SELECT count(*) FROM ({only})").fetchall()[0][0])


def _day(number: str) -> str:
    return f"(DATE '2025-01-01' + CAST({number} AS INT))::DATE"


def _key(number: str) -> str:
    """Keys that follow each other are far apart."""
    return f"'O' || lpad(({number} * 2654435761 % 4294967296)::BIGINT::VARCHAR, 10, '0')"
