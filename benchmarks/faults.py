"""What a table loses under faults: lakeupsert, delta-rs, and the script that everybody writes first.

    python -m benchmarks.faults --nights 60 naive delta-rs ours

Reads     nothing; needs the servers that `make servers` installs
Writes    a new table for each side, in a bucket of versitygw; deleted at the end
Repeat    safe

Each night updates a third of the keys and has new ones, of which no later night knows. The job that merges it reaches the
store through a proxy that loses one answer in fifty after the store acted, and cuts one body in a hundred. Every second night
has another fault at a request that chance chooses: the job is killed (SIGKILL); it stops there (SIGSTOP) until another one has
merged this night and the next, and then continues; the store answers 503 for ten seconds. A job that failed is started again,
as a scheduler does.

Meanwhile a reader, whom no fault strikes, reads the whole table again and again. A read is wrong if its rows are those of no
night that was merged or being merged.
"""

import argparse
import io
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, timedelta
from itertools import cycle
from multiprocessing import get_context
from typing import Any, Protocol

import boto3
import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from lakeupsert import Table, clock
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.storage import open_store
from tests.harness.proxy import FaultProxy, Rule, fault_proxy, refuse
from tests.harness.servers import aws

DATES, KEYS = [date(2020, 1, 1) + timedelta(days=n) for n in range(8)], 60
RULES = (Rule("lose", chance=0.02), Rule("cut", "GET", chance=0.01), Rule("sever", "PUT|POST", chance=0.01))
OUTAGE_SECONDS = 10.0
LEASE_SECONDS = 10.0
MOST_TRIES = 50
FAULTS = (None, "SIGKILL", None, "SIGSTOP", None, "503")
SCHEMA = pa.schema({"d": pa.date32(), "k": pa.string(), "ts": pa.int64(), "v": pa.int64()})
Rows = list[tuple[Any, ...]]


def rows_of(night: int) -> pa.Table:
    keys = [f"k{i:03}" for i in range(night % 3, KEYS, 3 if night else 1)] + [f"n{night:03}-{i}" for i in range(3)]
    return pa.Table.from_pylist([{"d": d, "k": k, "ts": night, "v": night} for d in DATES for k in keys], SCHEMA)


def canonical(rows: pa.Table) -> Rows:
    return sorted(tuple(row[name] for name in SCHEMA.names) for row in rows.to_pylist())


def state_after(night: int) -> Rows:
    found = {(d, k): (d, k, ts, v) for n in range(night + 1) for d, k, ts, v in canonical(rows_of(n))}
    return sorted(found.values())


class Side(Protocol):
    """A table at an address, in the store of this environment. Each call opens it."""

    def __init__(self, root: str) -> None: ...
    def merge(self, night: int) -> None: ...
    def read(self) -> pa.Table: ...


class Naive:
    """For each partition of the night: read its file, merge, overwrite it in place by one put, which is atomic."""

    def __init__(self, root: str) -> None:
        self.bucket, _, self.prefix = root.removeprefix("s3://").partition("/")

    def merge(self, night: int) -> None:
        s3, new = boto3.client("s3"), rows_of(night)
        for day in new["d"].unique():
            stored = self._stored(s3, day.as_py()) if night else SCHEMA.empty_table()
            found = pa.concat_tables([stored, new.filter(pc.equal(new["d"], day))])  # noqa: F841 - read below
            newest = "FROM found QUALIFY row_number() OVER (PARTITION BY k ORDER BY ts DESC) = 1 ORDER BY k"
            data = io.BytesIO()
            pq.write_table(duckdb.sql(newest).to_arrow_table().cast(SCHEMA), data)
            s3.put_object(Bucket=self.bucket, Key=self._key(day.as_py()), Body=data.getvalue())

    def read(self) -> pa.Table:
        s3 = boto3.client("s3")
        return pa.concat_tables([self._stored(s3, day) for day in DATES])

    def _key(self, day: date) -> str:
        return f"{self.prefix}/d={day}/part-0.parquet"

    def _stored(self, s3: Any, day: date) -> pa.Table:
        data = s3.get_object(Bucket=self.bucket, Key=self._key(day))["Body"].read()
        return pq.read_table(io.BytesIO(data)).cast(SCHEMA)


class DeltaRs:
    """`MERGE` of delta-rs, which commits by creating an object if it is absent."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _options(self) -> dict[str, str]:
        return {
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
            "aws_conditional_put": "etag",
        }

    def merge(self, night: int) -> None:
        if night == 0:
            write_deltalake(self.root, rows_of(0), partition_by=["d"], storage_options=self._options())
            return
        table = DeltaTable(self.root, storage_options=self._options())
        same = "t.d = s.d AND t.k = s.k"
        merge = table.merge(rows_of(night), same, source_alias="s", target_alias="t")
        merge.when_matched_update_all("s.ts > t.ts").when_not_matched_insert_all().execute()

    def read(self) -> pa.Table:
        found = DeltaTable(self.root, storage_options=self._options())
        return pa.table(QueryBuilder().register("t", found).execute("SELECT * FROM t").read_all())


class Ours:
    def __init__(self, root: str) -> None:
        schema = {"d": "date", "k": "string", "ts": "bigint", "v": "bigint"}
        zones = {"landing": f"{root}/landing", "processed": f"{root}/processed", "queue": "sqs://ours"}
        self.settings = TableSettings(**zones, key=("k",), partition_by=("d",), order_by=("ts",), schema=schema)

    def land(self, night: int) -> None:
        data = io.BytesIO()
        pq.write_table(rows_of(night), data)
        with open_store(self.settings.landing).write(f"{night}.parquet") as sink:
            sink.write(data.getvalue())

    def merge(self, night: int) -> None:
        opened = OpenTable("t", self.settings)
        table = Table.of(opened)
        table.append(host="local")
        table.send_missing()
        while True:
            drain(opened, ArrowEngine(), WorkerOptions(), lease_seconds=LEASE_SECONDS)
            if not table.publish().waiting:
                return
            clock.sleep(1.0)  # another job, which may be stopped, still has the message of a partition

    def read(self) -> pa.Table:
        return Table("t", self.settings).to_arrow().read_all()


SIDES: dict[str, type[Side]] = {"naive": Naive, "delta-rs": DeltaRs, "ours": Ours}
_server = get_context("forkserver")
_server.set_forkserver_preload([__name__])


def _job(side: Side, night: int, env: dict[str, str]) -> None:
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed job is counted
    side.merge(night)


class Trial:
    """One side's nights."""

    def __init__(self, side: Side, proxy: FaultProxy, seed: int) -> None:
        self.side, self.proxy, self.chance = side, proxy, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.merged = self.begun = 0
        self._stopped: Any = None
        self._faults, self._requests = cycle(FAULTS), 2  # so many requests had the last night without another fault
        self._over = threading.Event()

    def run(self, nights: int) -> None:
        self._land(0)
        self.side.merge(0)
        reader = threading.Thread(target=self._read)
        reader.start()
        try:
            for night in range(1, nights):
                self.begun = night
                self._land(night)
                self._night(night)
                self.merged = night
            self._continue()
        finally:
            self._over.set()
            reader.join()
        found, expected = Counter(row[:2] for row in self._rows()), state_after(nights - 1)
        stored = {row[:2]: row for row in self._rows()}
        self.counts["rows"] = len(expected)
        self.counts["lost"] = sum(stored.get(row[:2]) != row for row in expected)
        self.counts["doubled"] = sum(n - 1 for n in found.values())

    def _land(self, night: int) -> None:
        if isinstance(self.side, Ours):
            self.side.land(night)

    def _rows(self) -> Rows:
        return canonical(self.side.read())

    def _night(self, night: int) -> None:
        fault = planned = next(self._faults)
        at = self.chance.randrange(1, self._requests)
        waiting, self._stopped = self._stopped, None
        self.proxy.log.clear()
        job = self._start(night)
        ends_at: float | None = None
        for _ in range(MOST_TRIES):
            while job.is_alive():
                if fault is not None and len(self.proxy.log) >= at:
                    self.counts[fault] += 1
                    if fault == "503":
                        self.proxy.rules, ends_at = (*RULES, refuse(503, "SlowDown")), clock.elapsed() + OUTAGE_SECONDS
                    else:
                        os.kill(job.pid, getattr(signal, fault))
                    if fault == "SIGSTOP":
                        self._stopped, job = job, self._start(night)
                    fault = None
                if ends_at is not None and clock.elapsed() >= ends_at:
                    self.proxy.rules, ends_at = RULES, None
                clock.sleep(0.002)
            if job.exitcode == 0:
                break
            if job.exitcode != -signal.SIGKILL:
                self.counts["failed jobs"] += 1
            job = self._start(night)
        if planned is None:
            self._requests = max(2, len(self.proxy.log))
        self.proxy.rules = RULES
        assert job.exitcode == 0, f"night {night} never ends"
        if waiting is not None:
            self._stopped, stopped_now = waiting, self._stopped
            self._continue()
            self._stopped = stopped_now

    def _start(self, night: int) -> Any:
        job = _server.Process(target=_job, args=(self.side, night, dict(self.proxy.server.env)))
        job.start()
        return job

    def _continue(self) -> None:
        """Let the stopped job continue to its end."""
        if self._stopped is not None:
            with suppress(ProcessLookupError):
                os.kill(self._stopped.pid, signal.SIGCONT)
            self._stopped.join(120)
            self._stopped.kill()
            self._stopped = None

    def _read(self) -> None:
        while not self._over.is_set():
            clock.sleep(0.1)
            low = self.merged
            self.counts["reads"] += 1
            try:
                rows = self._rows()
            except Exception as e:
                self.counts["failed reads"] += 1
                print(f"a read failed: {str(e)[:200]}", file=sys.stderr)
                continue
            if all(rows != state_after(night) for night in range(low, self.begun + 1)):
                self.counts["wrong reads"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("sides", nargs="*", choices=list(SIDES), default=list(SIDES))
    options.add_argument("--nights", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args(arguments)
    names = (
        "rows",
        "lost",
        "doubled",
        "reads",
        "failed reads",
        "wrong reads",
        "failed jobs",
        "SIGKILL",
        "SIGSTOP",
        "503",
    )
    print("| side |", " | ".join(names), "|")
    with aws() as cloud, fault_proxy(cloud.store, *RULES, seed=given.seed) as proxy:
        os.environ.update(cloud.env)
        root = cloud.store.new_place("lake")
        cloud.queue("ours")
        for name in given.sides:
            proxy.reset(*RULES, seed=given.seed)
            trial = Trial(SIDES[name](f"{root}/{name}"), proxy, given.seed)
            trial.run(given.nights)
            print(f"| {name} |", " | ".join(str(trial.counts[what]) for what in names), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
