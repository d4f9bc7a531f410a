"""An upgrade takes weeks: two versions of lakeupsert work on one table, in turn and at the same time."""

import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.lake import Lake, row

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FORMAT_2 = "163003f288c961d4f1b9d632a7df5ad052911f1e"
FORMAT_1 = "b51a51a05c4af4114555f68658cb94b380d84e8d"
"""The first commit with each format (ADR 0053, 0051), as for the golden tables. The newest tag, once there is one, is used for
the first."""
NIGHTS, DAYS, KEYS = 30, 4, 12
KEPT = {"keep_snapshots": 1, "superseded_retention": "0s"}
SERVER = """
import json, sys
from lakeupsert import LakeupsertError, Table
print(json.dumps(__import__("lakeupsert").__file__), flush=True)
for line in sys.stdin:
    step, options = json.loads(line)
    try:
        with Table.open(sys.argv[1], "t") as table:
            answer = getattr(table, step)(**options)
            answer = [list(map(str, row.values())) for row in answer.read_all().to_pylist()] if step == "to_arrow" else None
    except LakeupsertError as e:
        answer = f"{e.code}: {e.message}"
    print(json.dumps(answer), flush=True)
"""
AFTER = {"append": "dedupe", "dedupe": "publish", "publish": "to_arrow", "vacuum": "vacuum"}
OPTIONS: dict[str, dict[str, object]] = {
    "append": {"host": "local"},
    "compact": {"full": True},
    "vacuum": {"dry": False},
}


class Version:
    """A process with one version of lakeupsert, which opens the table for each step."""

    def __init__(self, process: "subprocess.Popen[str]", tree: Path) -> None:
        self._process = process
        assert Path(self.end()).is_relative_to(tree)

    def begin(self, step: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([step, OPTIONS.get(step, {})]) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended with code {self._process.wait()}"
        return json.loads(line)

    def do(self, step: str) -> Any:
        self.begin(step)
        return self.end()


@contextmanager
def version(tree: Path, config: Path) -> Iterator[Version]:
    command = [sys.executable, "-c", SERVER, str(config)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tree, **pipes) as process:
        try:
            yield Version(process, tree)
        finally:
            process.kill()


def tree_of(commit: str) -> Path:
    """The package as it was then, below build/. Skips the test in a clone without that commit."""
    tree = ROOT / "build" / "before" / commit
    if not tree.exists():
        found = subprocess.run(["git", "archive", commit, "lakeupsert"], cwd=ROOT, check=False, capture_output=True)
        if found.returncode:
            pytest.skip(f"this clone has no history up to {commit[:8]}: {found.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(tree, filter="data")
    return tree


def newest_release() -> str:
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-version:refname"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return next(iter(tags.stdout.split()), FORMAT_2)


def write_config(lake: Lake, **settings: object) -> Path:
    """A configuration that earlier versions know, too."""
    given = {name: getattr(lake.settings, name) for name in ("landing", "processed", "key", "partition_by", "order_by")}
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**given, **settings}.items()]
    columns = ", ".join(f'{name} = "{type_}"' for name, type_ in lake.settings.schema.items())
    lines += [f"schema = {{ {columns} }}", 'delete = { column = "op", values = ["D"] }', 'quarantine_limit = "100%"']
    path = lake.root / "lakeupsert.toml"
    path.write_text("\n".join(["[tables.t]", *lines, ""]))
    return path


def land(lake: Lake, number: int, chance: random.Random) -> None:
    rows = [
        row(
            f"k{chance.randrange(KEYS):02}",
            day,
            chance.randrange(9),
            10 * number + n,
            op=chance.choice((None, None, "D")),
        )
        for day in range(DAYS)
        for n in range(5)
    ]
    lake.land(f"{number}.jsonl", rows)


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "delta"}, {"strategy": "auto", "history": True}, {"key_scope": "table"}],
    ids=["delta", "history", "key_scope"],
)
def test_two_versions_share_thirty_nights(settings: dict[str, object], tmp_path: Path) -> None:
    lake, chance = Lake(tmp_path / "lake", **KEPT, **settings), random.Random(7)
    config, tree = write_config(lake, **KEPT, **settings), tree_of(newest_release())
    with version(tree, config) as older, version(ROOT, config) as newer:
        both = [older, newer]
        for night in range(NIGHTS):
            land(lake, 2 * night, chance)
            assert chance.choice(both).do("append") is None
            if chance.random() < 0.5:
                land(lake, 2 * night + 1, chance)
                for one in both:
                    one.begin("append")
                assert [one.end() for one in both] == [None, None]
            for one in both:
                one.begin("dedupe")
            assert [one.end() for one in both] == [None, None]
            assert chance.choice(both).do("publish") is None
            if night % 3 == 2:
                assert chance.choice(both).do(chance.choice(("vacuum", "vacuum", "compact"))) is None
                assert chance.choice(both).do("publish") is None
            lake.reopen()
            expected = [[*map(str, found.values())] for found in lake.expected(lake.table.snapshots()[0].body.batch)]
            assert older.do("to_arrow") == expected, f"night {night}, read by the older version"
            assert newer.do("to_arrow") == expected, f"night {night}, read by this version"
            lake.check()
    lake.finish_and_check()
    proof = lake.table.reconcile(deep=True).proof
    assert proof
    assert all(one.balanced for one in proof)


def test_version_of_an_earlier_format_refuses_each_step_once_this_one_has_written(tmp_path: Path) -> None:
    lake, chance = Lake(tmp_path / "lake", **KEPT), random.Random(7)
    config, tree = write_config(lake, **KEPT), tree_of(FORMAT_1)
    with version(tree, config) as older, version(ROOT, config) as newer:
        for night in range(NIGHTS):
            land(lake, night, chance)
            writer = older if night < 5 else newer
            for step in ("append", "dedupe", "publish", *(("vacuum",) if night % 3 == 2 else ())):
                assert writer.do(step) is None
                if writer is newer:  # what follows a step of the night, or comes at any time
                    stored, tried = lake.stored_files(), chance.choice((AFTER[step], "append", "compact"))
                    refusal = str(older.do(tried))
                    assert refusal.startswith("newer-format: "), f"{tried} behind {step}: {refusal}"
                    assert lake.stored_files() == stored
            lake.reopen()
            lake.check()
    lake.finish_and_check()


def test_version_that_does_not_know_groups_refuses_them_by_name(tmp_path: Path) -> None:
    shutil.unpack_archive(ROOT / "tests" / "golden" / "tables" / "groups.tar.gz", tmp_path, filter="data")
    config, tree = write_config(Lake(tmp_path / "lake")), tree_of(FORMAT_2)
    shutil.copy(tmp_path / "later.jsonl", tmp_path / "lake" / "landing")
    with version(tree, config) as older:
        for step in ("append", "compact", "vacuum", "to_arrow"):
            refusal = str(older.do(step))
            assert refusal.startswith("newer-format: "), f"{step}: {refusal}"
            assert "requires groups" in refusal
