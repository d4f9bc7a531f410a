"""The process of one side: load the base, then take what lands until standard input ends.

Reads     the feed's base; the files that land in WORK/landing
Writes    the side's table below WORK/table; WORK/shown.jsonl, a line for each batch that readers see (`Shown`);
          WORK/answers.jsonl, a line when it is ready and one for each line of standard input (`read`, `rows`)
Repeat    in another folder: it loads its base anew

    python -m benchmarks.stream.sides SIDE FEED WORK OPTIONS [JAR...]

`ours` is `ingest` and `maintain` in processes of their own; a fresh process reads, as other users do. `captured` is the same with
`capture`, which follows a database, as `flink-cdc` does, whose Iceberg is read in Spark. All other sides are those of
`benchmarks.peers`: the MERGE of their night is the `foreachBatch` of a stream of files.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from benchmarks.machine import commit, versions
from benchmarks.peers.processes import cpu_seconds
from benchmarks.peers.sides import SIDES
from benchmarks.workload import Workload

OURS = ("lakeupsert", "pyarrow", "duckdb")
READS = 3
KEPT = {"keep_snapshots": 100, "superseded_retention": "10m"}
"""Ten minutes of snapshots at a batch each 6 s."""
CAPTURE, FLINK = Path("build/capture/venv"), Path("build/peers/flink")
OF_DATABASE = ("captured", "flink-cdc")
"""Sides that follow a database."""
READ_AS = {"flink-cdc": "iceberg-mor"}
"""The side of `benchmarks.peers` whose session reads the table of a side."""
CONFIG = """
[tables.t]
landing = "landing"
processed = "table"
key = ["__source_name", "id"]
partition_by = ["day"]
order_by = ["__log_position"]
strategy = "delta"
keep_snapshots = {keep_snapshots}
superseded_retention = "{superseded_retention}"
[tables.t.read]
envelope = "debezium"
[tables.t.delete]
column = "__op"
values = ["d"]
[sources.shop]
from = "postgresql://postgres@127.0.0.1:{port}/postgres"
table = "t"
tables = ["public.sales"]
seconds = {seconds}
"""


@dataclass(frozen=True)
class Options:
    """How often a side looks, in seconds, how often ours vacuums, and the bucket that has the table; "": the disk has it."""

    look: float
    trigger: float
    vacuum: float
    bucket: str = ""


def note(work: Path, what: str, files: Sequence[str], requests: int = 0) -> None:
    """``what``: `published`, `latest` (whoever reads the newest batch sees the files), or `upkeep`."""
    line = {"what": what, "at": time.time(), "files": files, "requests": requests}
    with (work / "shown.jsonl").open("a") as shown:
        shown.write(json.dumps(line) + "\n")


class Streaming(Protocol):
    def load(self, base: Path) -> None: ...
    def start(self) -> None: ...
    def read(self) -> Mapping[str, Any]: ...
    def rows(self, to: Path) -> None:
        """Write the rows that a reader sees."""

    def stop(self) -> None: ...


class Ours:
    def __init__(self, workload: Workload, work: Path, options: Options) -> None:
        from benchmarks.peers.ours import settings

        self.workload, self.work, self.options = workload, work, options
        self.settings = replace(settings(workload, work, "delta"), **KEPT)
        if options.bucket:
            queue = str(work / "queue.sqlite")
            self.settings = replace(self.settings, processed=f"s3://{options.bucket}/table", queue=queue)
        self._spawn = get_context("spawn")

    def load(self, base: Path) -> None:
        from lakeupsert.api import Table

        (self.work / "landing/base.parquet").write_bytes(base.read_bytes())
        table = Table("t", self.settings)
        table.run(host="local", workers=1)
        table.close()

    def start(self) -> None:
        arguments = (self.settings, self.work, self.options)
        self.processes = [self._spawn.Process(target=target, args=arguments) for target in (_ingest, _maintain)]
        for process in self.processes:
            process.start()

    def read(self) -> Mapping[str, Any]:
        with self._spawn.Pool(1) as pool:
            found: Mapping[str, Any] = pool.apply(_read, (self.settings, self.workload))
            return found

    def rows(self, to: Path) -> None:
        with self._spawn.Pool(1) as pool:
            pool.apply(_rows, (self.settings, to))

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


class Captured(Ours):
    """What `capture` lands of a database. The first snapshot is the base."""

    def __init__(self, workload: Workload, work: Path, options: Options, port: int) -> None:
        from lakeupsert.config import load

        super().__init__(of_database(workload), work, options)
        config = work / "lakeupsert.toml"
        config.write_text(CONFIG.format(port=port, seconds=options.look, **KEPT))
        self.settings = load(str(config)).table("t")[1]

    def load(self, base: Path) -> None:
        """Nothing: `start` does."""

    def start(self) -> None:
        packages = next(CAPTURE.absolute().glob("lib/python3*/site-packages"))
        environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{packages}"}
        command = [sys.executable, "-m", "lakeupsert", "capture", "shop"]
        self._capture = subprocess.Popen(command, cwd=self.work, env=environment)
        super().start()

    def stop(self) -> None:
        self._capture.terminate()
        self._capture.wait()
        super().stop()


def of_database(workload: Workload) -> Workload:
    """What a reader computes of the table that a database has."""
    figures = {"rows": "count(*)", "mixed": "sum(cents * (1 + store))", "days": "count(distinct day)"}
    dates = workload.filter.partition(" AND channel")[0].replace(workload.partition, "day")
    return dataclasses.replace(workload, figures=figures, filter=f"{dates} AND status = 'sent'", delete=None)


def _ingest(settings: Any, work: Path, options: Options) -> None:
    from lakeupsert.api import Table
    from lakeupsert.pipeline.append.commit import AppendResult
    from lakeupsert.pipeline.publish import PublishResult

    config, taken = work / "lakeupsert.toml", dict[int, list[str]]()
    table = Table.open(config) if config.exists() else Table("t", settings)  # which knows its sources

    def took(result: object) -> None:
        match result:
            case AppendResult(number=number, entry=entry):
                taken[number] = [file.path for file in entry.files]
                note(work, "latest", taken[number])
            case PublishResult(batch=batch):
                shown = [name for number in sorted(taken) if number <= batch for name in taken.pop(number)]
                note(work, "published", shown, sum(table.requests.values()))

    table.ingest(seconds=options.look, stop=_stop_at_sigterm(), collect=took)


def _maintain(settings: Any, work: Path, options: Options) -> None:
    from lakeupsert.api import Table

    table, noted = Table("t", settings), 0

    def alive() -> None:
        nonlocal noted
        if (requests := sum(table.requests.values())) != noted:
            noted = requests
            note(work, "upkeep", [], requests)

    table.maintain(vacuum_seconds=options.vacuum, stop=_stop_at_sigterm(), alive=alive)


def _stop_at_sigterm() -> Any:
    from lakeupsert.pipeline.stop import Stop

    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.set_from_signal())
    return stop


def _read(settings: Any, workload: Workload) -> Mapping[str, Any]:
    import duckdb

    from lakeupsert.api import Table

    def figures(where: str) -> Any:
        table = Table("t", settings)
        with duckdb.connect(config={"threads": 2}) as db:
            rows = table.to_duckdb(db, where=None if where == "true" else where)
            found = rows.aggregate(", ".join(workload.figures.values())).fetchall()[0]
        table.close()
        return found

    return {"engine": "DuckDB", **timed(figures, workload)}


def _rows(settings: Any, to: Path) -> None:
    import duckdb

    from lakeupsert.api import Table

    with duckdb.connect(config={"threads": 2}) as db:
        Table("t", settings).to_duckdb(db).write_parquet(str(to))


class Peer:
    """A stream of the files that land, and the side's MERGE of each batch."""

    def __init__(self, name: str, workload: Workload, work: Path, jars: Sequence[Path], options: Options) -> None:
        module, _, class_ = SIDES[name].program.partition(":")
        opened = import_module(f"benchmarks.peers.{module}")
        self.table = getattr(opened, class_)(workload, work, jars, **SIDES[name].options)
        self.spark, self.workload, self.work, self.options = self.table.spark, workload, work, options
        self._is_iceberg = class_ == "Iceberg"
        self._taken = -1
        if options.bucket:
            self._to_s3(options.bucket)

    def _to_s3(self, bucket: str) -> None:
        hadoop = self.spark.sparkContext._jsc.hadoopConfiguration()
        place = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "endpoint.region": os.environ["AWS_DEFAULT_REGION"]}
        for name, value in {**place, "path.style.access": "true"}.items():
            hadoop.set(f"fs.s3a.{name}", value)
        self.table.folder = f"s3a://{bucket}/table"
        self.spark.conf.set("spark.sql.catalog.lake.warehouse", self.table.folder)

    def load(self, base: Path) -> None:
        self.table.load(base)
        self.schema = self.spark.read.parquet(str(base)).schema

    def start(self) -> None:
        rows = self.spark.readStream.schema(self.schema).parquet(str(self.work / "landing"))
        stream = rows.writeStream.foreachBatch(self._merge).trigger(processingTime=f"{self.options.trigger} seconds")
        self.query = stream.option("checkpointLocation", str(self.work / "checkpoint")).start()

    def _merge(self, rows: Any, number: int) -> None:
        self.table.spark, self.table.batch = rows.sparkSession, rows.persist()
        self.table.merge()
        rows.unpersist()
        note(self.work, "published", self._files(number))

    def _files(self, number: int) -> list[str]:
        """Of a batch, by the checkpoint: its offset is the last entry of the source's log that it has."""
        last = json.loads((self.work / f"checkpoint/offsets/{number}").read_text().splitlines()[-1])["logOffset"]
        found: list[str] = []
        for entry in range(self._taken + 1, last + 1):
            log = self.work / f"checkpoint/sources/0/{entry}"
            log = log if log.exists() else log.with_suffix(".compact")
            taken = map(json.loads, log.read_text().splitlines()[1:])
            found += [Path(one["path"]).name for one in taken if one["batchId"] == entry]
        self._taken = last
        return found

    def read(self) -> Mapping[str, Any]:
        self._read_newest()
        return {"engine": "Spark", **timed(self.table.reads()["Spark"], self.workload)}

    def rows(self, to: Path) -> None:
        self._read_newest()
        self.table.frame().where(self.workload.visible).write.parquet(str(to))

    def _read_newest(self) -> None:
        """The stream commits in a session of its own; Iceberg's catalog in this one keeps a table for 30 seconds."""
        self.table.spark = self.spark
        if self._is_iceberg:
            self.spark.catalog.refreshTable("lake.db.t")

    def stop(self) -> None:
        self.query.stop()


class FlinkCdc:
    """Flink follows the database and commits to Iceberg at each checkpoint. A commit shows the transactions of its new files."""

    def __init__(self, workload: Workload, work: Path, options: Options, port: int, jars: Sequence[Path]) -> None:
        from benchmarks.peers.spark import Iceberg

        self.workload, self.work, self.options, self.port = of_database(workload), work, options, port
        self.table = Iceberg(self.workload, work, jars, "merge-on-read")
        self.table.spark.conf.set("spark.sql.catalog.lake.cache-enabled", "false")
        self._ended = Event()

    def load(self, base: Path) -> None:
        """Nothing: Flink reads what the database has, and then its changes."""

    def start(self) -> None:
        given = [self.work, self.port, self.options.trigger, *sorted(FLINK.absolute().glob("*.jar"))]
        command = [CAPTURE.absolute() / "bin/python", Path(__file__).with_name("flink.py"), *given]
        self._flink = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE)
        Thread(target=self._note_commits, daemon=True).start()

    def _note_commits(self) -> None:
        table, known, last = self.work / "table/db/t", set[Path](), ""
        hint = table / "metadata/version-hint.text"
        while not self._ended.wait(0.2):
            if self._flink.poll() is not None:
                os.kill(os.getpid(), signal.SIGKILL)  # this side is over
            if not hint.exists() or (version := hint.read_text()) == last:
                continue
            last, shown = version, set[str]()
            for path in set(table.glob("data/**/*.parquet")) - known:
                with suppress(pa.ArrowInvalid):  # Flink still writes it
                    if "tx" in pq.read_schema(path).names:  # else it has keys of rows that were replaced
                        shown |= set(
                            map(str, pq.read_table(path, columns=["tx"], partitioning=None)["tx"].unique().to_pylist())
                        )
                    known.add(path)
            note(self.work, "published", sorted(shown))

    def read(self) -> Mapping[str, Any]:
        return {"engine": "Spark", **timed(self.table.reads()["Spark"], self.workload)}

    def rows(self, to: Path) -> None:
        self.table.frame().write.parquet(str(to))

    def stop(self) -> None:
        self._ended.set()
        assert self._flink.stdin is not None
        self._flink.stdin.close()
        self._flink.wait(60)


def timed(figures: Callable[[str], Any], workload: Workload) -> dict[str, Any]:
    """Medians of the seconds of reads, and the processor time of one, by what is read."""
    found: dict[str, Any] = {}
    for kind, where in (("full", "true"), ("filtered", workload.filter)):
        seconds, used = [], []
        for _ in range(READS):
            begun, before = time.perf_counter(), cpu_seconds()
            figures(where)
            seconds.append(time.perf_counter() - begun)
            used.append(cpu_seconds() - before)
        found[kind] = {"seconds": round(median(seconds), 3), "cpu": round(median(used), 3)}
    return found


def main() -> None:
    name, *places, text = sys.argv[1:5]
    feed, work = map(Path, places)
    given = json.loads(text)
    options, workload = Options(**given["options"]), Workload(**given["workload"])
    (work / "landing").mkdir(parents=True)
    (work / "shown.jsonl").touch()
    jars = list(map(Path, sys.argv[5:]))
    side: Streaming
    if name == "captured":
        side = Captured(workload, work, options, given["port"])
    elif name == "flink-cdc":
        side = FlinkCdc(workload, work, options, given["port"], jars)
    else:
        side = Ours(workload, work, options) if name == "ours" else Peer(name, workload, work, jars, options)
    side.load(feed / "base.parquet")
    side.start()
    flink = [jar.stem for jar in FLINK.glob("flink-sql-connector-*.jar")] if name == "flink-cdc" else []
    peer = SIDES.get(READ_AS.get(name, name))
    used = versions(*(peer.versions if peer else OURS)) + [jar.stem for jar in jars] + flink
    answer(work, {"versions": used, "commit": commit()})
    for line in sys.stdin:
        match line.split():
            case ["read"]:
                answer(work, side.read())
            case ["rows"]:
                side.rows(work / "rows.parquet")
                answer(work, {})
    side.stop()


def answer(work: Path, found: Mapping[str, Any]) -> None:
    with (work / "answers.jsonl").open("a") as answers:
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
