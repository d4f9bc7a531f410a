"""`make lint` refuses what is above a limit of ADR 0026 and not listed, and a list that is longer than it needs to be."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "house" / "check.py"

SMALL = '"""A module."""\n\n\ndef small(a: int) -> int:\n    """Return ``a``."""\n    return a\n'
LONG = "def long() -> None:\n" + "    print()\n" * 60
BRANCHES = "def branches(a: int) -> None:\n" + "    if a:\n        pass\n" * 20
PARAMETERS = "class Some:\n    @property\n    def many(self, a, b, c, d, e, f, *, g, h): ...\n"


def check(tree: Path, listed: str = "", *options: str) -> tuple[int, str]:
    """The exit code and the output of the check of ``tree`` with this list of offenders."""
    (tree / "offenders.toml").write_text(listed)
    command = [sys.executable, CHECK, "--root", tree, "--list", tree / "offenders.toml", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ended.stderr
    return ended.returncode, ended.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "lakeupsert" / "room").mkdir(parents=True)
    (tmp_path / "lakeupsert" / "room" / "small.py").write_text(SMALL)
    return tmp_path


def test_a_small_tree_passes(tree: Path) -> None:
    assert check(tree) == (0, "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            LONG,
            [
                "lines lakeupsert/room/new.py:long: 61 (limit 60)",
                "statements lakeupsert/room/new.py:long: 60 (limit 50)",
            ],
        ),
        (BRANCHES, ["complexity lakeupsert/room/new.py:branches: 21 (limit 20)"]),
        (PARAMETERS, ["parameters lakeupsert/room/new.py:Some.many: 8 (limit 7)"]),
        ("#\n" * 451, ["module lakeupsert/room/new.py: 451 (limit 450)"]),
        ('"""Names of those that it brings."""\n', ["phrases lakeupsert/room/new.py:bring: 1", "pronoun-chain"]),
    ],
)
def test_a_new_offender_is_named(tree: Path, text: str, named: list[str]) -> None:
    (tree / "lakeupsert" / "room" / "new.py").write_text(text)
    code, output = check(tree)
    assert code == 1
    assert all(name in output for name in named)


def test_a_folder_and_the_whole_have_a_limit(tree: Path) -> None:
    for number in range(25):
        (tree / "lakeupsert" / "room" / f"m{number}.py").write_text("\n" * 2000)
    code, output = check(tree)
    assert code == 1
    assert "folder lakeupsert/room: 26 (limit 25)" in output
    assert "product lakeupsert: 50006 (limit 48000)" in output


def test_a_page_is_read_without_its_code(tree: Path) -> None:
    (tree / "README.md").write_text("```\nbrings\n```\n\nIt has `brings` and\nno more.\n")
    assert check(tree) == (0, "")
    (tree / "README.md").write_text("It brings more.\n")
    assert check(tree)[0] == 1


def test_the_list_only_shrinks(tree: Path) -> None:
    page = tree / "README.md"
    listed = '[phrases]\n"README.md:bring" = 2\n"README.md:alone" = 1\n'
    page.write_text("It brings more, and it brings less. It stands alone.\n")
    assert check(tree, listed) == (0, "")
    page.write_text("It brings more.\n")
    code, output = check(tree, listed)
    assert code == 1
    assert "README.md:bring: 1, listed 2" in output
    assert check(tree, listed, "--shrink") == (0, "")
    assert '"README.md:bring" = 1\n' in (tree / "offenders.toml").read_text()
    page.write_text("It brings more, brings this and brings that.\n")
    assert check(tree, '[phrases]\n"README.md:bring" = 1\n', "--shrink")[0] == 1
    assert '"README.md:bring" = 1\n' in (tree / "offenders.toml").read_text()
