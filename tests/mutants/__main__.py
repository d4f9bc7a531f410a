"""Would the tests notice a small change of what decides? `make mutants`

    python -m tests.mutants                                   a sample of every row of modules.toml
    python -m tests.mutants --module chain --sample 0         all mutants of one
    python -m tests.mutants --seed 3                          another sample

Reads     modules.toml, the modules, and build/mutants/killed.jsonl: mutants that an earlier run killed
Writes    there; results.json, and the table of docs/RELIABILITY.md to standard output
Repeat    safe: continues. What survived is tried again, since a test may have come that kills it

A mutant is a module with one change (`changes`). It is killed if a test fails, or does not end. pytest imports and collects once
for each row, and forks for each mutant; there a function gets the mutant's code (`live`). No file changes, so processes that a
test starts have no mutant.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.changes import Mutant, mutants
from tests.mutants.live import put_live
from tests.planted.check import OPTIONS, ROOT, SELECTION

HERE = Path(__file__).resolve().parent
KILLED = ROOT / "build/mutants/killed.jsonl"
RESULTS = HERE / "results.json"
PASSED = "passed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of modules.toml."""

    name: str
    files: list[str]
    tests: list[str]
    same: list[dict[str, Any]] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [test if test.startswith("-") else f"tests/{test}" for test in self.tests]

    def mutants(self) -> list[Mutant]:
        paths = [path for pattern in self.files for path in sorted((ROOT / "lakeupsert").glob(pattern))]
        return [found for path in paths for found in mutants(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]

    def sample(self, count: int, seed: int) -> list[Mutant]:
        """So many mutants by lot, each with the same chance; 0: all. A change elsewhere in the file leaves their lots alone."""
        in_turn = sorted(self.mutants(), key=lambda one: hashlib.sha256(f"{seed} {one.lot}".encode()).digest())
        return [*islice((one for one in in_turn if one.code), count or None)]


@dataclass
class Judge:
    """A plugin of pytest that runs the tests once as they are, and once for each mutant.

    Attributes:
        known: the test that failed, by the mutant's hash.
        seconds: of the tests as they are.
        killed: how many mutants each file of tests has killed.
    """

    row: Row
    sample: list[Mutant]
    known: dict[str, str]
    seconds: float = 0.0
    killed: Counter[str] = field(default_factory=Counter)
    survived: list[str] = field(default_factory=list)
    same: int = 0
    answers: int = -1

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        begun = time.monotonic()
        found = self._in_child(lambda: self._run(session))
        if found != PASSED or not session.items:
            sys.exit(f"{self.row.name}: without a mutant, its tests must pass: {found}")
        self.seconds = time.monotonic() - begun
        for mutant in self.sample:
            old, new = mutant.change
            if any(old == one["old"] and new in one["new"] for one in self.row.same):
                self.same += 1
                continue
            found = self.known.get(mutant.hash)
            if found is None:
                begun = time.monotonic()
                found = self._try(session, mutant)
                print(f"{time.monotonic() - begun:4.0f} s  {found}: {mutant}", file=sys.stderr, flush=True)
            if found == PASSED:
                self.survived.append(str(mutant))
            else:
                self.killed[found.partition("::")[0]] += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.answers, report.nodeid.encode())
            os._exit(1)  # without the end of the session: its processes are killed, its folders belong to the next one

    def _try(self, session: pytest.Session, mutant: Mutant) -> str:
        """The test that fails with the mutant, or how it ends."""

        def run() -> None:
            put_live(mutant)
            self._run(session)

        found = self._in_child(run)
        if found != PASSED:
            with KILLED.open("a", encoding="utf-8") as lines:
                lines.write(f"{json.dumps({'mutant': mutant.hash, 'by': found})}\n")
        return found

    def _run(self, session: pytest.Session) -> None:
        for item, after in zip(session.items, [*session.items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        os._exit(0)

    def _in_child(self, run: Callable[[], None]) -> str:
        """What happens to the tests in another process: a test's name, ``PASSED``, or how the process ends."""
        answers, self.answers = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgrp()
            signal.alarm(int(5 * self.seconds) + 20 if self.seconds else 0)
            silent = os.open(os.devnull, os.O_RDWR)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            try:
                run()
            finally:
                os._exit(1)
        os.close(self.answers)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        with os.fdopen(answers) as lines:
            return (
                PASSED if code == 0 else lines.read() or ("no end" if code == -signal.SIGALRM else f"exit code {code}")
            )

    def result(self) -> dict[str, object]:
        return {
            "mutants": len(self.row.mutants()),
            "tried": len(self.sample) - self.same,
            "killed": self.killed.total(),
            "same": self.same,
            "seconds": round(self.seconds, 1),
            "by": dict(self.killed.most_common()),
            "survived": sorted(self.survived),
        }


def table(results: dict[str, dict[str, object]]) -> Iterator[str]:
    yield "| module | mutants | tried | killed | change nothing |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in results.items():
        share = f"{row['killed'] / row['tried']:.0%}"
        yield f"| `{name}` | {row['mutants']} | {row['tried']} | {row['killed']} ({share}) | {row['same']} |"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", help="a row of modules.toml; all if it is not given")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each row; 0: all (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    options = parser.parse_args()
    rows = [Row(**row) for row in tomllib.loads((HERE / "modules.toml").read_text())["module"]]
    lines = KILLED.read_text(encoding="utf-8").splitlines() if KILLED.exists() else []
    known = {row["mutant"]: row["by"] for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory(
        prefix="mutants-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        for row in rows:
            if options.module and row.name not in options.module:
                continue
            judge = Judge(row, row.sample(options.sample, options.seed), known)
            pytest.main(
                [*OPTIONS, "-m", f"{SELECTION} and not core", "-s", f"--basetemp={folder}/t", *row.paths],
                plugins=[judge],
            )
            found = {**(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}), row.name: judge.result()}
            found = {one.name: found[one.name] for one in rows if one.name in found}
            RESULTS.write_text(f"{json.dumps(found, indent=1)}\n")
    print(*table(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
