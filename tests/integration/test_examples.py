"""The scripts in examples/, each run as its reader does."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs one of them in a copy of the folder, which has the table of the first; what it printed."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("processed"))

    def run(name: str) -> list[str]:
        call = [sys.executable, str(folder / f"with_{name}.py")]
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.long
def test_python(run: Callable[[str], list[str]]) -> None:
    first = ["snapshot 0: 3 rows", "1 shoes 8.67", "2 socks 3.00"]
    assert run("python") == first
    assert run("python")[1:] == first[1:]


@pytest.mark.long
@pytest.mark.parametrize(
    "reader", ["duckdb", "polars", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long])]
)
def test_reader(run: Callable[[str], list[str]], reader: str) -> None:
    run("python")
    assert run(reader) == ["2020-01-01 11.67", "2020-07-07 4.33"]
