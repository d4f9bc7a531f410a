"""One Spark session and one server of each kind for the whole run, and folders in memory."""

import atexit
import gc
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lakeupsert import clock
from tests.harness import servers
from tests.harness.proxy import FaultProxy, fault_proxy

gc.disable()  # until all is imported: to look for garbage meanwhile takes a sixth of that time, and finds none
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that signal 11 ends tells where each of its threads was
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
    f' "-XX:SharedArchiveFile={Path(__file__).parents[1]}/build/spark-classes.jsa"',
)  # every JVM of a test is young: the second compiler costs it half of its processor time and gives nothing back. The archive,
# which `make test` writes once, saves ten seconds; a JVM takes one that is missing or of other jars for none
os.environ.setdefault(
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
)  # asks Google by gRPC, which its emulator does not speak
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")  # in memory: thousands of syncs would take minutes


AZURE = {"azurite", "azure", "azure_cloud"}
SERVERS = AZURE | {"elasticmq", "iceberg_rest", "moto", "versitygw", "aws", "gcs", "s3_server", "store_server"}
"""Fixtures, and parameters that name one, that are servers."""
WORDS = {"spark": {"spark"}, "azure": AZURE, "cloud": SERVERS | {"cloud"}, "core": {"mark.core"}}
"""Markers, and words of which a file with such a test has one."""
STARTS = pytest.StashKey[bool]()
"""Whether a test starts Spark or a server."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without the word of a marker that `-m` asks for. To import all of them takes each process of `make test`
    longer than to run many of its tests."""
    expression = config.option.markexpr
    if not collection_path.match("test_*.py") or " or " in expression:
        return None
    asked = [marker for marker in WORDS if re.search(rf"(?<!not ){marker}\b", expression)]
    return True if not all(_has_word_of(marker, collection_path) for marker in asked) else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    """Mark each case of a test function by what it needs, and those that `make test` leaves out as `long`: what needs Spark or a
    server and is not `core`, and of one function all cases but those that `few` asks for."""
    made = yield
    if not isinstance(made, list) or not made:
        return made
    for case in made:
        case.stash[STARTS] = _mark_needs(case)
        if case.stash[STARTS] and case.get_closest_marker("core") is None:
            case.add_marker(pytest.mark.long)
    cases = [case for case in made if case.get_closest_marker("long") is None]
    few = made[0].get_closest_marker("few")
    count = few.args[0] if few else len(cases) if made[0].path.match("unit/*.py") else 1
    for case in {*cases} - {*_spread(cases, count)}:
        case.add_marker(pytest.mark.long)
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: to look at it again and again takes 0.4 s of each process
    atexit.register(gc.unfreeze)  # or the libraries that were imported say that they leak
    gc.enable()


def _mark_needs(case: pytest.Function) -> bool:
    """Mark what needs Spark, a server, or Azure's: `make test` runs each in a process of its own, so that each starts once.
    Returns whether it starts something: a test that only has `spark` in its name does not."""
    callspec = getattr(case, "callspec", None)
    values = callspec.params.values() if callspec else ()
    names = {*case.fixturenames, *(value for value in values if isinstance(value, str))}
    starts_spark = case.get_closest_marker("spark") is not None or any("spark" in name for name in names)
    if (starts_spark or "spark" in case.nodeid) and _has_word_of("spark", case.path):
        case.add_marker(pytest.mark.spark)
        if starts_spark:
            return True
    if names & SERVERS and _has_word_of("cloud", case.path):
        case.add_marker(pytest.mark.cloud)
        if names & AZURE:
            case.add_marker(pytest.mark.azure)
        return True
    return False


def _spread(cases: list[Any], count: int) -> list[Any]:
    """One after the other the case with most values, then most pairs of values, that no case before it has, then with the
    values that cases before it have least."""
    if count >= len(cases):
        return cases
    values = {case: frozenset((name, id(value)) for name, value in case.callspec.params.items()) for case in cases}
    chosen: list[Any] = []
    seen: Counter[Any] = Counter()
    while len(chosen) < count:
        news = {
            case: (
                len(of_case - seen.keys()),
                len({frozenset(pair) for pair in combinations(of_case, 2)} - seen.keys()),
                -sum(seen[value] for value in of_case),
            )
            for case, of_case in values.items()
            if case not in chosen
        }
        best = max(news, key=news.__getitem__)
        chosen.append(best)
        seen.update([*values[best], *(frozenset(pair) for pair in combinations(values[best], 2))])
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=float, metavar="N", help="run N cases of each test function, 0.5: of each second one; by commit"
    )


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep `--cases` of each test function: the small form of a heavy suite. `CASES_SEED` repeats a choice."""
    if config.option.cases is None:
        return
    seed = os.environ.get("CASES_SEED") or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    print(f"CASES_SEED={seed} --cases {config.option.cases}")
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    whole, part = divmod(config.option.cases, 1)
    chosen = set()
    for function, of_one in cases.items():
        in_turn = sorted(of_one, key=lambda item: _by_lot(f"{seed} {item.nodeid}"))
        chosen |= {*in_turn[: int(whole) + (_by_lot(f"{seed} {function}") < part)]}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _by_lot(text: str) -> float:
    """A number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


@cache
def _has_word_of(marker: str, file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return any(word in text for word in WORDS[marker])


@pytest.fixture(autouse=True)
def no_session_by_accident(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that forgot `host="local"` costs the other processes of `make test` a JVM."""
    before = _session()
    yield
    if before is None and not request.node.stash.get(STARTS, False):
        assert _session() is None, "this test started Spark without the fixture `spark`"


def _session() -> Any:
    pyspark = sys.modules.get("pyspark")
    return pyspark and pyspark.SparkContext._active_spark_context


@pytest.fixture(autouse=True)
def session_with_jars(request: pytest.FixtureRequest) -> None:
    """The first session of a process decides which jars all others have. One that lakeupsert begins would have none."""
    if request.node.stash.get(STARTS, False) and request.node.get_closest_marker("spark"):
        request.getfixturevalue("spark")


@pytest.fixture(autouse=True, scope="session")
def few_races() -> Iterator[None]:
    """Each new bucket would be raced for a second. `contract/test_races.py` shows how many are enough."""
    from lakeupsert.storage import remote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "RACES", 1)
        yield


class _Database:
    """A connection that knows which functions it has made."""

    def __init__(self, db: Any) -> None:
        self.db, self.made = db, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def create_function(self, name: str, *args: Any, **options: Any) -> None:
        self.db.create_function(name, *args, **options)
        self.made.append(name)


@pytest.fixture(autouse=True, scope="session")
def one_duckdb() -> Iterator[None]:
    """Half of what a small `reconcile --deep` costs is the database that DuckDB makes for it. Here each has an empty catalog of
    one database instead. `integration/test_reconcile.py` does without."""
    from lakeupsert.operations.recompute import recompute, sql  # brings Arrow

    with ExitStack() as stack:
        kept: list[Any] = []

        @contextmanager
        def connect() -> Iterator[Any]:
            if not kept:
                kept.append(stack.enter_context(sql.connect()))
            name = f"test_{clock.new_id()}"
            with kept[0].cursor() as cursor:
                db = _Database(cursor)
                cursor.execute(f"ATTACH ':memory:' AS {name}; USE {name}; SET TimeZone = 'UTC'")
                try:
                    yield db
                finally:
                    for function in db.made:
                        cursor.remove_function(function)
                    cursor.execute(f"USE memory; DETACH {name}")

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(recompute, "connect", connect)
        yield


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    """Imports a file that is in no package."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def tiny_files_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of few small rows gets many buckets."""
    from tests.harness.lake import split_tiny_files  # brings Arrow

    split_tiny_files(monkeypatch)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[2]")
        .appName("lakeupsert-tests")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.jars", ",".join(map(str, servers.HADOOP_JARS.glob("*.jar"))))
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in servers.CREDENTIALS.items():
            environment.setenv(name, value)  # the JVM keeps what it began with
        session = builder.getOrCreate()
    yield session
    session.stop()


def _in_memory() -> Iterator[Path]:
    """A folder, in memory where possible: thousands of syncs would take minutes, and no test of these is about them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as path:
        yield Path(path)


folder = pytest.fixture(_in_memory)
module_folder = pytest.fixture(_in_memory, scope="module")


@pytest.fixture(scope="session")
def _aws_models() -> Iterator[None]:
    """Let botocore parse what it knows of a service once, not for each of a thousand clients."""
    from botocore import loaders

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "create_loader", cache(loaders.create_loader))
        yield


@pytest.fixture(scope="session")
def elasticmq(_aws_models: None) -> Iterator[servers.Server]:
    with servers.elasticmq() as server:
        yield server


@pytest.fixture
def new_sqs_queue() -> Callable[..., str]:
    """Makes a standard queue, in the SQS of this test's environment, whose dead letters go to another; returns its name."""

    def make(**settings: int) -> str:
        servers.new_queue(name := f"q-{clock.new_id()[:12]}", **settings)
        return name

    return make


@pytest.fixture(scope="session")
def moto(_aws_models: None) -> Iterator[servers.Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(_aws_models: None) -> Iterator[servers.Server]:
    with servers.versitygw() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[servers.Server]:
    with servers.azurite() as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[servers.Server]:
    with servers.gcs() as server:
        yield server


@pytest.fixture(scope="session")
def iceberg_rest() -> Iterator[servers.Server]:
    with servers.iceberg_rest() as server:
        yield server


@pytest.fixture(scope="session")
def metastore() -> Iterator[str]:
    """The address of a Hive metastore."""
    from tests.harness.readers import Readers

    with Readers() as readers:
        yield readers.metastore


@pytest.fixture(scope="session")
def _proxies() -> Iterator[Callable[[servers.Server], FaultProxy]]:
    """One proxy in front of each server: clients of a new address cost more than most tests that need one."""
    with ExitStack() as stack:
        made: dict[int, FaultProxy] = {}

        def proxy(server: servers.Server) -> FaultProxy:
            if server.port not in made:
                made[server.port] = stack.enter_context(fault_proxy(server))
            return made[server.port]

        yield proxy


@pytest.fixture
def new_proxy(_proxies: Callable[[servers.Server], FaultProxy]) -> Callable[[servers.Server], FaultProxy]:
    """The proxy in front of a server, which begins anew."""

    def proxy(server: servers.Server) -> FaultProxy:
        found = _proxies(server)
        found.reset()
        return found

    return proxy


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.long), "versitygw"])
def s3_server(request: pytest.FixtureRequest) -> servers.Server:
    """Each S3 server in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(params=["versitygw", pytest.param("azurite", marks=pytest.mark.long)])
def store_server(request: pytest.FixtureRequest) -> servers.Server:
    """Each server of objects in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def new_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[servers.Server], str]:
    """Makes an empty bucket or container and lets this test's clients use that server; returns its address."""

    def make(server: servers.Server) -> str:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server.new_place(f"b-{clock.new_id()[:12]}")

    return make


@pytest.fixture
def new_bucket(new_place: Callable[[servers.Server], str]) -> Callable[[servers.Server], str]:
    """The same on S3; returns the bucket's name."""
    return lambda server: new_place(server).removeprefix("s3://")


@pytest.fixture
def azure(azurite: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """Azurite, as the Azure of this test's environment."""
    for name, value in azurite.env.items():
        monkeypatch.setenv(name, value)
    return azurite


@pytest.fixture
def new_azure_queue(azure: servers.Server) -> Callable[[], str]:
    """Makes a queue and the one for its dead letters; returns its name."""

    def make() -> str:
        servers.new_azure_queue(name := f"q-{clock.new_id()[:12]}")
        return name

    return make
