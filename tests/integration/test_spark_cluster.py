"""Both phases on a cluster of processes: a master and two workers, each with a working directory of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import servers
from tests.harness.lake import Lake, row
from tests.harness.processes import wait_until

pytestmark = pytest.mark.cluster
DAYS = 24
ROWS = 1500
PROJECT = Path(__file__).parents[2]
ARCHIVE = PROJECT / "dist" / "environment.tar.gz"
OLD_PYARROW = PROJECT / "build" / "old-pyarrow"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[servers.SparkCluster]:
    with servers.spark_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kept_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.SparkCluster]:
    """For tests that leave its workers alive."""
    with servers.spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def land(lake: Lake, night: int) -> None:
    keys = range(0, ROWS, 1 if night == 0 else 3)
    lake.land(f"{night}.jsonl", [row(f"k{i:05}", day, night, i + night) for day in range(DAYS) for i in keys])


def start(lake: Lake, cluster: servers.SparkCluster, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """`python -m lakeupsert.spark` on the cluster, with speculation."""
    settings = {
        "spark.driver.host": servers.HOST,
        "spark.driver.bindAddress": servers.HOST,
        "spark.speculation": "true",
        "spark.executor.memory": "600m",
        "spark.executor.memoryOverhead": "2g",
    }
    submit = " ".join(f"--conf {name}={value}" for name, value in settings.items())
    submit = f"--master {cluster.url} {submit} {env.pop('SUBMIT', '')} pyspark-shell"
    command = [sys.executable, "-m", "lakeupsert.spark", *arguments, "--config", str(lake.configure()), "--json"]
    given = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": submit, **env}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **given}, cwd=lake.root)


def answer_of(process: subprocess.Popen[str]) -> Any:
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return json.loads(out)


def on_executors(**env: str) -> str:
    return " ".join(f"--conf spark.executorEnv.{name}={value}" for name, value in env.items())


def kill_tree(pid: int) -> None:
    """Kill a worker with its executors and their Python processes."""
    for path in Path("/proc").glob("[0-9]*"):
        if _parent_of(path) == pid:
            kill_tree(int(path.name))
    os.kill(pid, signal.SIGKILL)


def _parent_of(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return None


@pytest.mark.parametrize("killed_in", [pytest.param("append", marks=pytest.mark.crash), "dedupe"])
def test_nights_are_exact(tmp_path: Path, cluster: servers.SparkCluster, killed_in: str) -> None:
    lake = Lake(tmp_path / "lake", strategy="rewrite")
    land(lake, 0)
    lake.run()
    land(lake, 1)
    files = {"append": "_lakeupsert/data/appended-*", "dedupe": "d=*/base-1-*"}[killed_in]
    before = set((lake.root / "processed").glob(files))
    process = start(lake, cluster, "run", "--host", "spark")
    wait_until(lambda: set((lake.root / "processed").glob(files)) - before, f"{killed_in} has written a file")
    kill_tree(cluster.workers[0].pid)
    answer = answer_of(process)
    assert (process.returncode, answer["error"]) == (0, None)
    assert {p["status"] for p in answer["result"]["dedupe"]["partitions"]} == {"merged"}
    lake.reopen()
    lake.check()
    assert lake.table.status().dirty == 0


made = pytest.mark.skipif(not ARCHIVE.exists(), reason="`make dist` makes it")


@made
def test_a_shipped_archive(tmp_path: Path, cluster: servers.SparkCluster) -> None:
    """The executors have no lakeupsert but the one in the archive."""
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    settings = f"--conf spark.archives={ARCHIVE}#environment"
    process = start(lake, cluster, "run", "--host", "spark", PYSPARK_PYTHON="./environment/bin/python", SUBMIT=settings)
    assert (answer_of(process)["error"], process.returncode) == (None, 0)
    assert list(tmp_path.glob("worker-*/*/*/environment/bin/python"))
    lake.reopen()
    lake.check()


@made
def test_a_wheel_without_pyspark_runs_a_night(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    python = ARCHIVE.parents[1] / "build/dist/environment/bin/python"
    assert subprocess.run([python, "-c", "import pyspark"], capture_output=True, check=False).returncode == 1
    command = [python, "-m", "lakeupsert.spark", "run", "--host", "local", "--config", str(lake.configure())]
    subprocess.run(command, check=True, cwd=tmp_path)
    lake.reopen()
    lake.check()


# ---------------------------------------------------------------- bad executors: a code, an exit code, an end

minutes = pytest.mark.skipif(not ARCHIVE.exists(), reason="`make test-spark-cluster` runs it, after `make dist`")


def fails(lake: Lake, cluster: servers.SparkCluster, *arguments: str, **env: str) -> tuple[int, str, Any]:
    """Exit code, code and answer of a command that must fail. A Spark that tries for ever is killed, and gives no answer."""
    process = start(lake, cluster, *arguments, "--host", "spark", **env)
    answer = answer_of(process)
    return process.returncode, answer["error"]["code"], answer


def environment(folder: Path, *without: str, instead: Path | None = None) -> str:
    """A Python with the packages of this one, except some; those in ``instead`` come in their place."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    given = [path for path in Path(sysconfig.get_path("purelib")).iterdir() if not path.name.startswith(without)]
    for path in [*given, *(instead.iterdir() if instead else ())]:
        if not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return str(folder / "bin/python")


def another_python() -> str:
    own = sys.version_info[1]
    names = [f"python3.{minor}" for minor in range(10, 15) if minor != own]
    beside = [path for name in names for path in Path(sys.base_prefix).parent.glob(f"*/bin/{name}")]
    for python in [*map(str, beside), *filter(None, map(shutil.which, names))]:
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("this machine has one version of Python alone")


def unfit_python(folder: Path, kind: str) -> str:
    if kind == "another Python":
        return another_python()
    if kind == "an older pyarrow":
        if not OLD_PYARROW.exists():
            pytest.skip("`make test-spark-cluster` gets it")
        return environment(folder, "pyarrow", instead=OLD_PYARROW)
    missing = {"no lakeupsert": ("lakeupsert", "_editable_impl_lakeupsert"), "no pyarrow": ("pyarrow",)}
    return environment(folder, *missing[kind])


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("no lakeupsert", "lakeupsert"),
        pytest.param("no pyarrow", "pyarrow", marks=minutes),
        pytest.param("an older pyarrow", "pyarrow 20.", marks=minutes),
        pytest.param("another Python", "driver: 3.", marks=minutes),
    ],
)
def test_unfit_executors(tmp_path: Path, kept_cluster: servers.SparkCluster, kind: str, place: str) -> None:
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    python = unfit_python(tmp_path / "python", kind)
    elsewhere = on_executors(PYTHONPATH=str(tmp_path)) if kind == "no lakeupsert" else ""
    code, name, answer = fails(lake, kept_cluster, "append", PYSPARK_PYTHON=python, SUBMIT=elsewhere)
    assert (code, name) == (2, "executors-unfit")
    assert place in answer["error"]["message"]
    assert "spark.archives" in answer["error"]["next"]
    assert not lake.entries()


@minutes
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_unfit_executors_of_a_merge(tmp_path: Path, kept_cluster: servers.SparkCluster, engine: str) -> None:
    """No partition is at fault: none is marked, and all are merged when the executors are fit."""
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    lake.table.append(host="local")
    python = unfit_python(tmp_path / "python", "no pyarrow")
    code, name, _ = fails(lake, kept_cluster, "dedupe", "--engine", engine, PYSPARK_PYTHON=python)
    assert (code, name) == (2, "executors-unfit")
    lake.reopen()
    assert not lake.table.status().failed
    lake.run()
    lake.check()


@minutes
@pytest.mark.parametrize("command", ["append", "dedupe"])
def test_executors_without_credentials(
    tmp_path: Path, kept_cluster: servers.SparkCluster, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """They know where the store is, and the driver has its credentials."""
    with servers.versitygw() as s3:
        for variable, value in s3.env.items():
            monkeypatch.setenv(variable, value)
        servers.new_bucket("lake")
        zones = {"landing": "s3://lake/landing", "processed": "s3://lake/processed"}
        lake = Lake(tmp_path, **zones, queue=str(tmp_path / "queue"))
        land(lake, 0)
        if command == "dedupe":
            lake.table.append(host="local")
        before = len(lake.entries())
        settings = on_executors(**{k: v for k, v in s3.env.items() if k not in servers.CREDENTIALS})
        code, name, answer = fails(lake, kept_cluster, command, SUBMIT=settings)
        assert (code, name) == (2, "bad-credentials")
        assert "executors" in answer["error"]["message"]
        assert "s3://lake/" in answer["error"]["message"]
        lake.reopen()
        assert len(lake.entries()) == before
        assert not lake.table.status().failed


KILLER = """
import os, signal, sys

def strike(event, arguments):
    if any(os.environ["KILLED_AT"] in str(argument) for argument in arguments if isinstance(argument, str | os.PathLike)):
        os.kill(os.getpid(), signal.SIGKILL)

if "KILLED_AT" in os.environ:
    sys.addaudithook(strike)
"""


def killed_at(folder: Path, name: str) -> str:
    """Settings with which a process of a task dies when it names a file with ``name`` in its path."""
    (folder / "sitecustomize.py").write_text(KILLER)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return on_executors(PYTHONPATH=paths, KILLED_AT=name)


@minutes
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_a_killer_among_partitions(tmp_path: Path, kept_cluster: servers.SparkCluster, engine: str) -> None:
    lake = Lake(tmp_path / "lake", strategy="rewrite")
    land(lake, 0)
    lake.run()
    land(lake, 1)
    lake.table.append(host="local")
    settings = killed_at(tmp_path, "d=2020-01-05/base-")
    code, name, answer = fails(lake, kept_cluster, "dedupe", "--engine", engine, SUBMIT=settings)
    assert (code, name, answer["error"]["partition"]) == (1, "failed-partitions", "d=2020-01-05")
    assert "2,147 MB" in answer["error"]["message"]
    assert "spark.executor.memoryOverhead" in answer["error"]["next"]
    lake.reopen()
    assert set(lake.table.status().failed) == {"d=2020-01-05"}
    assert lake.table.status().dirty == 1, "the others are committed"
    lake.run()
    lake.check()


@minutes
def test_a_killer_in_append(tmp_path: Path, kept_cluster: servers.SparkCluster) -> None:
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    settings = killed_at(tmp_path, "data/appended-")
    code, name, answer = fails(lake, kept_cluster, "append", SUBMIT=settings)
    assert (code, name) == (1, "task-died")
    assert "2,147 MB" in answer["error"]["message"]
    assert "spark.executor.memoryOverhead" in answer["error"]["next"]
    assert not lake.entries()


@minutes
def test_too_little_memory_for_python(tmp_path: Path, kept_cluster: servers.SparkCluster) -> None:
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    settings = "--conf spark.executor.pyspark.memory=200m"
    code, name, answer = fails(lake, kept_cluster, "append", SUBMIT=settings)
    assert (code, name) == (1, "task-died")
    assert "210 MB" in answer["error"]["message"]
    assert "spark.executor.pyspark.memory" in answer["error"]["next"]
    assert not lake.entries()
