"""docs/RULES.md names every module that deletes objects, and every constant that says how often something is repeated."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs" / "RULES.md").read_text()
CODE = {
    path.relative_to(ROOT / "lakeupsert").as_posix(): path.read_text() for path in (ROOT / "lakeupsert").rglob("*.py")
}
STORES = re.compile(r"(^|\.|_)(store|target|table|objects)$|^discard$")


def deletes(code: str) -> bool:
    """Whether a module calls `discard`, or `delete` of a store."""
    for node in ast.walk(ast.parse(code)) if "discard" in code or ".delete" in code else ():
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            is_store = bool(STORES.search(owner))
            if (
                called == "discard"
                or (is_store and name == "discard")
                or (is_store and name == "delete" and not node.keywords)
            ):
                return True
    return False


def test_every_module_that_deletes_objects_is_named() -> None:
    deleters = {module for module, code in CODE.items() if not module.startswith("testing/") and deletes(code)}
    section = RULES.split("\n## ")[1]
    named = {*re.findall(r"`([a-z_/]+/[a-z0-9_]+\.py)`", section), "pipeline/opened.py"}  # this has `discard` itself
    assert named == deleters


def test_every_number_of_attempts_is_named() -> None:
    found = {
        f"`{module}` `{name}`"
        for module, code in CODE.items()
        for name in re.findall(r"^((?:[A-Z]+_)?(?:ATTEMPTS|TRIES|RETRIES|SENDS))(?:: \w+)? = \d+$", code, re.MULTILINE)
    }
    table = RULES.split("\n## ")[2]
    named = {
        f"`{module}` `{name}`"
        for row in table.splitlines()
        for name in re.findall(r"`([A-Z_]+)`", row)
        for module in re.findall(r"`([a-z_/]+/[a-z0-9_]+\.py)`", row)
    }
    assert not found - named
