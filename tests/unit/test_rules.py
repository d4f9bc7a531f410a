"""docs/RULES.md names every module that deletes objects, and every figure that says how often something is repeated."""

import ast
import re
from pathlib import Path

from lakeupsert import retries

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs" / "RULES.md").read_text()
CODE = {
    path.relative_to(ROOT / "lakeupsert").as_posix(): path.read_text() for path in (ROOT / "lakeupsert").rglob("*.py")
}
STORES = re.compile(r"(^|\.|_)(store|target|resources|objects)$|^discard$")


def deletes(code: str) -> bool:
    """Whether a module calls `discard`, or `delete` of a store."""
    for node in ast.walk(ast.parse(code)) if "discard" in code or ".delete" in code else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "discard") in ("discard", "delete"):
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
    named = {*re.findall(r"`([a-z_/]+/[a-z0-9_]+\.py)`", section), "pipeline/resources.py"}  # this has `discard` itself
    assert named == deleters


def test_every_number_of_attempts_is_named() -> None:
    """With its value, and a module that takes it from `retries`."""
    rows = [row.split("|") for row in RULES.split("\n## ")[2].splitlines() if "`" in row and row.startswith("|")]
    named: dict[str, int] = {}
    for _, _, times, _, where, _ in rows:
        *modules, name = re.findall(r"`([a-z0-9_/]+\.py|[A-Z_]+)`", where)
        named[name] = int(times.split()[0])
        assert all(re.search(rf"\b{name}\b", CODE[module]) for module in modules), where
    assert named == {name: getattr(retries, name) for name in named}
    assert not {name for name in vars(retries) if re.search("(^|_)(ATTEMPTS|TRIES|RETRIES|SENDS|READS)", name)} - {
        *named
    }


def test_no_other_module_says_how_long_something_waits() -> None:
    """No call sleeps, waits or gives up after a figure of its own, and no other module names such a figure."""
    own = re.compile(
        r"^(?:[A-Z]+_)*(?:ATTEMPTS|TRIES|RETRIES|SENDS|(?:LEASE|PAUSE|BACKOFF|WAIT|BUSY|RETRY)_SECONDS)(?:: \w+)? = "
        r"|\.(?:sleep|jitter|wait)\((?:\w+=)?\d|timeout=\d",
        re.MULTILINE,
    )
    assert [module for module, code in CODE.items() if module != "retries.py" and own.search(code)] == []
