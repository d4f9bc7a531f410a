"""Whatever an operator can run, or be told, stands in the documentation."""

import ast
import re
from pathlib import Path

import pytest

from lakeupsert import errors
from lakeupsert.cli import main

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/OPERATIONS.md").read_text()
CLASSES = {name for name, of in vars(errors).items() if isinstance(of, type) and issubclass(of, errors.LakeupsertError)}


def codes() -> set[str]:
    """The first argument of every call that makes one of our errors."""
    found = set()
    for file in (ROOT / "lakeupsert").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                value = node.args[0].value
                if (
                    (name in CLASSES or name.endswith("Error"))
                    and isinstance(value, str)
                    and re.fullmatch(r"[a-z]+(-[a-z]+)+", value)
                ):
                    found.add(value)
    return found


@pytest.mark.parametrize("code", sorted(codes()))
def test_error_is_in_the_operators_manual(code: str) -> None:
    assert f"`{code}`" in OPERATIONS


@pytest.mark.parametrize("command", sorted(main.commands))
def test_command_is_in_the_documentation_with_an_example(command: str) -> None:
    documentation = OPERATIONS + (ROOT / "README.md").read_text()
    assert re.search(rf"lakeupsert {command}\b", documentation)


def test_architecture_has_one_room_for_each_question() -> None:
    rows = (ROOT / "docs/ARCHITECTURE.md").read_text().partition("| question | room |")[2].splitlines()
    questions = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert len(questions) == len(set(questions)) > 5
