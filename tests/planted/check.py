"""Do the tests notice the faults that lakeupsert once had? `make planted`

    python tests/planted/check.py                 plants every fault of bugs.toml, one after the other
    python tests/planted/check.py restore queue   plants those whose name or area has one of these words

Each runs in a copy of the tree, in which `old` is replaced by `new`; then one of its tests must fail. A fault is reported as
stale if `old` is not exactly once in `lakeupsert/`, or if a test is gone, is not part of `make test`, or fails without the fault.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SELECTION = "not long and not crash and not big and not readers and not capture and not writers and not cluster"
"""As in the Makefile: the tests that `make test` runs."""
COPIED = ("lakeupsert", "lambdas", "tests")
# The warning is of plugins that this process has imported already.
OPTIONS = ("-m", SELECTION, "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class Bug:
    """A fault: what readers or operators saw, the code that mended it, the code without, and tests that fail then."""

    name: str
    area: str
    old: str
    new: str
    tests: list[str]

    @property
    def paths(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests]

    def place(self) -> Path | None:
        """The one file, relative to the tree, in which `old` is, once."""
        hits = [
            (path, path.read_text(encoding="utf-8").count(self.old)) for path in (ROOT / "lakeupsert").rglob("*.py")
        ]
        found = [(path, times) for path, times in hits if times]
        return found[0][0].relative_to(ROOT) if len(found) == 1 and found[0][1] == 1 else None


def copy_tree(folder: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.endswith("_cache"):
            (folder / entry.name).symlink_to(entry)


def pytest_exit_code(folder: Path, *args: str) -> int:
    """Run pytest in a fork: modules of others are imported already, ours are imported from the copy as it is now."""
    child = os.fork()
    if child == 0:
        log = os.open(folder / "planted.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            code = pytest.main([*OPTIONS, *args])
            sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_others(folder: Path, tests: Sequence[str]) -> None:
    """Import all that these tests import, and forget the modules of the copy. That takes longer than most tests."""
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--collect-only", *tests])
    for name, module in [*sys.modules.items()]:
        if name.startswith("tests") or str(getattr(module, "__file__", "")).startswith(f"{folder}/"):
            del sys.modules[name]


def plant(bug: Bug, folder: Path) -> str:
    """Empty if a test fails with the fault; else what is wrong."""
    place = bug.place()
    if place is None:
        return "stale: its `old` is not exactly once in lakeupsert/"
    file = folder / place
    file.write_text(file.read_text(encoding="utf-8").replace(bug.old, bug.new), encoding="utf-8")
    code = pytest_exit_code(folder, "-x", *bug.paths)
    shutil.copy2(ROOT / place, file)  # with its time, so that Python compiles it again
    if code == pytest.ExitCode.TESTS_FAILED:
        return ""
    if code == pytest.ExitCode.OK:
        return f"NOT CAUGHT by {', '.join(bug.tests)}"
    return f"stale: its tests did not run\n{(folder / 'planted.log').read_text()}"


def main(words: list[str]) -> int:
    table = tomllib.loads((HERE / "bugs.toml").read_text(encoding="utf-8"))
    bugs = [Bug(**bug) for bug in table["bug"]]
    bugs = [bug for bug in bugs if not words or any(word in f"{bug.area} {bug.name}" for word in words)]
    tests = list(dict.fromkeys(path for bug in bugs for path in bug.paths))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = name
        sys.path.insert(0, name)
        import_others(folder, tests)
        if pytest_exit_code(folder, *tests) != pytest.ExitCode.OK:
            print((folder / "planted.log").read_text(), "Without a fault, these tests must pass.", sep="\n")
            return 1
        for bug in bugs:
            begun = time.monotonic()
            problem = plant(bug, folder)
            wrong += bool(problem)
            print(f"{problem or 'caught':10} {time.monotonic() - begun:4.0f} s  {bug.area}: {bug.name}", flush=True)
    print(f"{len(bugs) - wrong} of {len(bugs)} faults are caught by tests of `make test`")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
