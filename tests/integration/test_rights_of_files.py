"""Files have the rights that the umask leaves: nothing that a command writes can be read by more users."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from tests.harness.endpoint import served
from tests.harness.lake import Lake, row

ROOT = Path(__file__).parents[2]
COMMANDS = """\
init {lake}/landing
run --host local --workers 2
update --set v=9 --where k='b' --yes
run --host local
compact --full
worker --until-empty --workers 1 --health-file {out}/health
reprocess --host local --source landing --partition 2020-01-01
report --output {out}/report.html
export --output {out}/rows.csv
export --output {out}/folder/
changes --reader r --output {out}/changes.jsonl
erase --keys {folder}/keys.csv --reason asked --landing --yes
backup --output {copy}
recover {copy} --config {folder}/other.toml
reconcile
fsck --deep
vacuum --yes
maintain --max-seconds 0.1
ingest --max-seconds 0.1
doctor"""


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.few(2)
@pytest.mark.parametrize("umask", [0o077, 0o027], indirect=True, ids=oct)
def test_nothing_is_open_to_more_users(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "all"  # pytest made the one above
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    (folder / "temporary").mkdir()
    lake = Lake(folder / "lake", publishers=("delta",), keep_snapshots=1, superseded_retention="0s")
    lake.land("0.jsonl", [row(key, day, 1, 1) for key in "abc" for day in range(2)], refused=[row("x", 0, 1, op="?")])
    (folder / "keys.csv").write_text("k,l\na,0\n")
    config, copy = lake.configure(), folder / "copy"
    (folder / "other.toml").write_text(config.read_text().replace("/processed", "/recovered"))
    out = folder / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    for command in COMMANDS.splitlines():
        words = command.format(out=out, folder=folder, copy=copy, lake=lake.root).split(" ")
        if "--config" not in words and words[0] != "init":
            words += ["--config", str(config)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{command}: {done.output}"
    with served(lake.root) as server:
        assert server.post("one", "k,l,d,ts,v,op\nz,1,2020-01-01,2020-01-01 00:00:00,1,\n")[0] < 500
        server.end()
    made = {path: path.lstat().st_mode & 0o777 for path in [folder, *folder.rglob("*")] if not path.is_symlink()}
    assert len(made) > 50
    assert {str(path): oct(mode) for path, mode in made.items() if mode & umask} == {}


def test_nothing_changes_rights_or_copies_those_of_another_file() -> None:
    """A temporary file is gone before one could look, so no code that could open it to others may be there.

    The file of aliases keeps the rights of the one that it replaces, which is the operator's own."""
    changes = re.compile(r"\b(f?l?chmod|umask|copystat|copymode|copytree|shutil\.(copy2?|move))\(")
    files = [*(ROOT / "lakeupsert").rglob("*.py"), *(ROOT / "lambdas").rglob("*.py")]
    assert {str(f.relative_to(ROOT)) for f in files if changes.search(f.read_text(encoding="utf-8"))} == {
        "lakeupsert/cli/set_up/aliasfile.py"
    }
