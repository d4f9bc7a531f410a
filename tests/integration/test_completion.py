"""Completion, typed into real shells: the line that Tab makes of what was typed. The setup is that of docs/REFERENCE.md."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lakeupsert import clock

ROOT = Path(__file__).parents[2]
SHELLS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"], "fish": ["--no-config"]}
PATIENCE = 60.0
CONFIGURATION = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
[profiles.production]
keep_snapshots = 3
"""


def documented(shell: str) -> str:
    """What the page tells to put into the shell's own file, or to write to a file that it reads."""
    page = (ROOT / "docs/REFERENCE.md").read_text()
    [line] = re.findall(rf"^.*_LAKEUPSERT_COMPLETE={shell}_source.*$", page, re.MULTILINE)
    return str(line).partition("  #")[0]


@contextmanager
def typed(shell: str, folder: Path) -> Iterator[int]:
    """The terminal of a shell that has our completion and in which `lakeupsert` is on PATH."""
    program = folder / "bin" / "lakeupsert"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom lakeupsert.cli import main\nmain()\n")
    program.chmod(0o755)
    (folder / "lakeupsert.toml").write_text(CONFIGURATION)
    home = folder / "home"
    (home / ".config/fish/completions").mkdir(parents=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "LAKEUPSERT"))},
        "HOME": str(home),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "TERM": "dumb",
        "PS1": "> ",
        "PYTHONPATH": str(ROOT),
    }
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [shell, *SHELLS[shell]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield ours
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, pattern: str) -> str:
    deadline, seen = clock.elapsed() + PATIENCE, ""
    while not re.search(pattern, seen):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - clock.elapsed()))
        assert ready, f"{pattern!r} does not appear in {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_a_real_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "fish":  # without a terminal, since fish asks terminals questions; `complete -C` is what its Tab calls
        run = [shell, "--no-config", "-c"]
        with typed("bash", tmp_path):
            environment = {
                **os.environ,
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "HOME": str(tmp_path / "home"),
            }
        script = f"{documented(shell)}; source ~/.config/fish/completions/lakeupsert.fish\n"
        for line, expected in COMPLETED.items():
            words = subprocess.run(
                [*run, f"{script}complete -C {line!r}"],
                env={**environment, "PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE,
            ).stdout
            assert [word.split("\t")[0] for word in words.splitlines()] == [expected.split()[-1]], line
        return
    begin = {"bash": "bind 'set bell-style none'", "zsh": "bindkey -e; autoload -U compinit; compinit -u"}[shell]
    with typed(shell, tmp_path) as terminal:
        os.write(terminal, f"{begin}; {documented(shell)}; echo begun-$((1+1))\n".encode())
        read_until(terminal, "begun-2")
        for number, (line, expected) in enumerate(COMPLETED.items()):
            # Ctrl-A goes to the beginning of the line, where `echo` makes a word of it instead of a command.
            os.write(terminal, f"{line}\t\x01echo {number}: \n".encode())
            seen = read_until(terminal, rf"\n{number}: .*\r")
            assert f"\n{number}: {expected}" in seen, seen


COMPLETED = {
    "lakeupsert recon": "lakeupsert reconcile",
    "lakeupsert run --eng": "lakeupsert run --engine",
    "lakeupsert run --host sp": "lakeupsert run --host spark",
    "lakeupsert status --table sa": "lakeupsert status --table sales",
    "lakeupsert run --profile pro": "lakeupsert run --profile production",
    "lakeupsert --config lakeu": "lakeupsert --config lakeupsert.toml",
}
"""What was typed before Tab, and the line after it."""
