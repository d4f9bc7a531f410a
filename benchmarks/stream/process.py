"""A side's process, seen from outside: what lands for it, what its readers see and when, and what it takes."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import cpu_seconds
from benchmarks.peers.sides import SIDES
from benchmarks.stream.feed import Feed, differences, rows_in
from benchmarks.stream.sides import CAPTURE, OF_DATABASE, READ_AS, Options
from tests.harness.servers import HADOOP_JARS, Server, versitygw

TRANSACTIONS = 20
"""A second, in a database."""


class Side:
    """A side's process, and what its folder shows of it.

    Attributes:
        landed: when each file got its name.
        shown: when readers of the newest snapshot saw each file, and ``latest`` when those of the newest batch did.
    """

    def __init__(self, process: subprocess.Popen[str], work: Path, store: "Store | None" = None) -> None:
        self.process, self.work, self.store = process, work, store
        self.landed: dict[str, float] = {}
        self.shown: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.batches = 0
        self.bytes_written = 0
        self._requests: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._read_up_to = self._answers = 0

    def land(self, feed: Path, name: str) -> None:
        hidden = self.work / f".{name}"
        shutil.copy(feed / name, hidden)
        self.landed[name] = time.time()
        hidden.rename(self.work / "landing" / name)

    def look(self) -> None:
        """Read what it has noted since."""
        if self.process.poll() is not None:
            raise RuntimeError(f"it ended with {self.process.returncode}; see {self.work / 'log'}")
        with (self.work / "shown.jsonl").open() as shown:
            shown.seek(self._read_up_to)
            lines = shown.read().rpartition("\n")[0]
        self._read_up_to += len(lines) + bool(lines)
        for line in map(json.loads, lines.splitlines()):
            seen = self.latest if line["what"] == "latest" else self.shown
            seen |= dict.fromkeys(line["files"], line["at"])
            self.batches += line["what"] == "published" and bool(line["files"])
            if line["requests"]:
                self._requests[line["what"]] = line["requests"]

    def names(self, files: Sequence[str]) -> Sequence[str]:
        """What `landed`, `shown` and `latest` call them."""
        return files

    def wait_for(self, names: Sequence[str], seconds: float) -> None:
        """Until readers see ``names``."""
        end = time.monotonic() + seconds
        while any(name not in self.shown for name in names):
            if time.monotonic() > end:
                raise RuntimeError(f"not through {seconds:.0f} s behind the last file")
            time.sleep(0.1)
            self.look()

    def ask(self, what: str = "") -> Mapping[str, Any]:
        """Its answer; without a question, what it says when it is ready."""
        assert self.process.stdin is not None
        if what:
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        answers: list[str] = []
        while len(answers) <= self._answers:
            time.sleep(0.1)
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with {self.process.returncode}; see {self.work / 'log'}")
            if (path := self.work / "answers.jsonl").exists():
                answers = path.read_text().splitlines()
        self._answers += 1
        found: Mapping[str, Any] = json.loads(answers[-1])
        return found

    def figures(self) -> dict[str, float]:
        """What it has taken so far, and its objects now. A file that came and went since the last call is not counted."""
        self.look()
        found = _sizes(self.store.root if self.store else self.work / "table")
        self.bytes_written += sum(size for path, size in found.items() if path not in self._files)
        self._files = found
        return {
            "cpu": cpu_seconds(self.process.pid),
            "bytes": self.bytes_written,
            "requests": self.store.requests() if self.store else sum(self._requests.values()),
            "batches": self.batches,
        }

    def different(self, feed: Feed, folder: Path) -> int:
        """How many rows of the table are not those that landed, or are missing."""
        self.ask("rows")
        return feed.differences(folder, feed.names, self.work / "rows.parquet")

    def objects(self) -> tuple[int, float]:
        """How many there are, and their MB."""
        return len(self._files), sum(self._files.values()) / 1e6


class Store:
    """A server of S3 on this machine, which writes a line for each request."""

    def __init__(self, server: Server, bucket: str) -> None:
        assert server.root is not None
        self.env, self.root, self._bucket = server.env, server.root / bucket, f"/{bucket}".encode()
        self.root.mkdir()
        self._log, self._counted, self._requests = server.root.parent / "log", 0, 0

    def requests(self) -> int:
        with self._log.open("rb") as log:
            log.seek(self._counted)
            new = log.read()
        self._counted += len(new)
        self._requests += sum(self._bucket in line for line in new.splitlines())
        return self._requests


class Captured(Side):
    """A side that follows a database. What "lands" is a transaction, by its number, when its commit has returned."""

    def __init__(self, process: subprocess.Popen[str], work: Path, database: "Database") -> None:
        super().__init__(process, work)
        self.database = database
        self._in_file: dict[str, set[str]] = {}

    def land(self, feed: Path, name: str) -> None:
        self.database.say(str(int(Path(name).stem)))

    def look(self) -> None:
        super().look()
        self.landed = self.database.commits()
        for seen in (self.latest, self.shown):
            for file in [name for name in seen if name.endswith(".gz")]:
                seen |= dict.fromkeys(self._transactions(file), seen.pop(file))

    def _transactions(self, file: str) -> set[str]:
        if file not in self._in_file:
            with gzip.open(self.work / "landing" / file) as lines:
                rows = (json.loads(line) for line in lines)
                found = {str(after["tx"]) for row in rows if (after := row.get("payload", row).get("after"))}
            self._in_file[file] = found
        return self._in_file[file]

    def names(self, files: Sequence[str]) -> Sequence[str]:
        numbers = [int(Path(name).stem) for name in files]
        return [str(number * TRANSACTIONS + nth) for number in numbers for nth in range(TRANSACTIONS)]

    def different(self, feed: Feed, folder: Path) -> int:
        self.ask("rows")
        self.database.say("rows")
        self.database.wait_for("rows.done", 120)
        return differences(f"read_csv('{self.database.folder / 'rows.csv'}')", rows_in(self.work / "rows.parquet"))


class Database:
    """A server in a process of its own (`benchmarks.stream.database`)."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.wait_for("port", 600)
        self.port = int((folder / "port").read_text())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def commits(self) -> dict[str, float]:
        path = self.folder / "commits.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return {str(line["tx"]): line["at"] for line in map(json.loads, lines)}

    def wait_for(self, file: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not (self.folder / file).exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the database did not write {file}; see {self.folder / 'log'}")
            time.sleep(0.1)


@contextmanager
def database(feed: Feed, folder: Path) -> Iterator[Database]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sizes = (TRANSACTIONS, feed.rows, feed.partitions, feed.touched, feed.base_rows)
    command = [CAPTURE.absolute() / "bin/python", Path(__file__).with_name("database.py"), folder, *sizes]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
    try:
        yield Database(process, folder)
    finally:  # the end of its input makes it stop its server
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


def _sizes(folder: Path) -> dict[str, int]:
    """Of each object of the table; Hadoop's checksums and the queue of ours are no part of it."""
    found: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".crc") and not name.startswith("queue.sqlite"):
                with suppress(FileNotFoundError):  # vacuumed meanwhile
                    path = f"{place}/{name}"
                    found[path] = Path(path).stat().st_size
    return found


@contextmanager
def started(name: str, feed: Feed, folder: Path, work: Path, options: Options) -> Iterator[Side]:
    """The side over a new folder or a new bucket, not yet ready."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    peer = SIDES.get(READ_AS.get(name, name))
    jars = [path.absolute() for path in peer.paths()] if peer else []
    jars += sorted(HADOOP_JARS.glob("*.jar")) if options.bucket and jars else []
    with ExitStack() as running:
        followed = running.enter_context(database(feed, work / "database")) if name in OF_DATABASE else None
        store = Store(running.enter_context(versitygw()), options.bucket) if options.bucket else None
        given = {"options": asdict(options), "workload": asdict(feed.workload()), "port": followed and followed.port}
        environment = {**os.environ, **(store.env if store else {})}
        command = [sys.executable, "-m", "benchmarks.stream.sides", name, folder, work, json.dumps(given), *jars]
        log = running.enter_context((work / "log").open("ab"))
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            yield Captured(process, work, followed) if followed else Side(process, work, store)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
