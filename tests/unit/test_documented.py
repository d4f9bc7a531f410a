"""Whatever an operator can run, or be told, stands in the documentation."""

import re
from pathlib import Path

import pytest

from lakeupsert import errors
from lakeupsert.cli import main

ROOT = Path(__file__).parents[2]
ERRORS = (ROOT / "docs/ERRORS.md").read_text()
PAGES = (
    "README.md",
    "docs/FIRST_NIGHT.md",
    "docs/EVERY_NIGHT.md",
    "docs/WHEN_SOMETHING_BROKE.md",
    "docs/CHANGING_ROWS.md",
    "docs/CLEANING_UP.md",
    "docs/QUEUES.md",
    "docs/STORES.md",
    "docs/BENCHMARKS.md",
    "docs/REFERENCE.md",
)
CLASSES = {name for name, of in vars(errors).items() if isinstance(of, type) and issubclass(of, errors.LakeupsertError)}


def codes() -> set[str]:
    """The first argument of every call that makes one of our errors."""
    made = re.compile(rf'\b(?:\w*Error|{"|".join(CLASSES)})\(\s*"([a-z0-9]+(?:-[a-z0-9]+)+)"')
    return {code for file in (ROOT / "lakeupsert").rglob("*.py") for code in made.findall(file.read_text())}


@pytest.mark.parametrize("code", sorted(codes()))
def test_error_is_in_the_table_of_errors(code: str) -> None:
    assert f"\n| `{code}` |" in ERRORS


def test_errors_are_in_alphabetical_order_each_once() -> None:
    table = ERRORS.partition("\n## All codes\n")[2]
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE)
    assert listed == sorted(set(listed))
    assert listed


@pytest.mark.parametrize("command", sorted(main.commands))
def test_command_is_in_the_documentation_with_an_example(command: str) -> None:
    documentation = "".join((ROOT / page).read_text() for page in PAGES)
    assert re.search(rf"lakeupsert {command}\b", documentation)


def test_architecture_has_one_room_for_each_question() -> None:
    rows = (ROOT / "docs/ARCHITECTURE.md").read_text().partition("| question | room |")[2].splitlines()
    questions = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert len(questions) == len(set(questions)) > 5
