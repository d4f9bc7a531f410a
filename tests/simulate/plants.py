"""Does the simulation find faults in what commits, and after how many random schedules?

    python tests/simulate/plants.py                  plants each fault of plants.toml, in a copy of the tree
    python tests/simulate/plants.py restore vacuum   those whose name has one of these words
    python tests/simulate/plants.py --schedules 100  gives up sooner

docs/adr/0074-the-real-code-in-every-order.md has the figures, and what finds the others.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.planted.check import HERE, Bug, copy_tree  # noqa: E402  the root is on no path before


def plants() -> list[Bug]:
    known = {bug["name"]: bug for bug in tomllib.loads((HERE / "bugs.toml").read_text(encoding="utf-8"))["bug"]}
    given = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["plant"]
    found = [known[plant["bug"]] if "bug" in plant else plant for plant in given]
    return [Bug(bug["name"], "", bug["old"], bug["new"], []) for bug in found]


def caught(bug: Bug, folder: Path, schedules: int) -> str:
    """What the simulation says of the fault; "" if all its schedules hold."""
    place = bug.place()
    assert place is not None, f"{bug.name}: its `old` is not exactly once in lakeupsert/"
    file = folder / place
    file.write_text(file.read_text(encoding="utf-8").replace(bug.old, bug.new), encoding="utf-8")
    command = ["--schedules", str(schedules), "--shrink", "0", "--progress", str(folder / "progress.json")]
    run = subprocess.run(
        [sys.executable, "-m", "tests.simulate", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "progress.json").unlink(missing_ok=True)
    shutil.copy2(ROOT / place, file)
    found = re.search(r"after ([\d,]+) schedules: (.*)", run.stdout)
    assert found or run.returncode == 0, run.stdout + run.stderr
    return f"{found[1]:>5} schedules  {found[2][:90]}" if found else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python tests/simulate/plants.py")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--schedules", type=int, default=2000)
    options = parser.parse_args(arguments)
    bugs = [bug for bug in plants() if not options.words or any(word in bug.name for word in options.words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="simulated-") as name:
        copy_tree(Path(name).resolve())
        for bug in bugs:
            begun = time.monotonic()
            found = caught(bug, Path(name).resolve(), options.schedules)
            missed += not found
            print(
                f"{'caught' if found else 'MISSED'} {time.monotonic() - begun:4.0f} s  {bug.name}\n    {found}",
                flush=True,
            )
    print(f"{len(bugs) - missed} of {len(bugs)} faults are caught within {options.schedules:,} schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
