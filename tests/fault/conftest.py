"""The lakes whose steps are struck."""

from pathlib import Path

import pytest

from lakeupsert.testing.lake import Lake, row


@pytest.fixture(scope="module")
def lakes(module_folder: Path) -> dict[str, Lake]:
    """A lake before each step: nothing at all, one night published, and a second one that has come as far as the step."""
    new = Lake(module_folder / "new")
    new.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)])
    second = new.copy(module_folder / "append")
    second.run()
    second.land("2.jsonl", [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)])
    second.land("3.jsonl", [row("a", 0, 2, 3), row("a", 1, 1, 3)], refused=[{**row("x", 1, 1, 3), "v": "no number"}])
    appended = second.copy(module_folder / "dedupe")
    appended.table.append(host="local")
    deduped = appended.copy(module_folder / "publish")
    deduped.table.dedupe()
    return {"first append": new, "append": second, "dedupe": appended, "publish": deduped}
