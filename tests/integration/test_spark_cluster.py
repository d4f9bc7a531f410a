"""Both phases on a cluster of processes: a master and two workers, each with a working directory of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.testing import servers
from lakeupsert.testing.lake import Lake, row
from lakeupsert.testing.processes import wait_until

pytestmark = pytest.mark.spark
DAYS = 24
ROWS = 1500
ARCHIVE = Path(__file__).parents[2] / "dist" / "environment.tar.gz"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[servers.SparkCluster]:
    with servers.spark_cluster(tmp_path) as cluster:
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
    out, _ = process.communicate(timeout=300)
    return json.loads(out)


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


def test_executors_without_lakeupsert(tmp_path: Path, cluster: servers.SparkCluster) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    lake = Lake(tmp_path / "lake")
    land(lake, 0)
    process = start(lake, cluster, "append", "--host", "spark", PYSPARK_PYTHON=str(tmp_path / "bare/bin/python"))
    answer = answer_of(process)
    assert (process.returncode, answer["error"]["code"]) == (2, "executors-unfit")
    assert "module" in answer["error"]["message"]
    assert not lake.entries()


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
