"""The lakes whose steps are struck."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.lake import Lake, row
from tests.harness.servers import Server


@pytest.fixture(scope="module")
def lakes(module_folder: Path) -> dict[str, Lake]:
    return before_each_step(Lake(module_folder / "new"), module_folder)


@pytest.fixture(scope="module", params=["versitygw", "azurite"])
def server(request: pytest.FixtureRequest) -> Server:
    """One of each cloud in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def lakes_far_away(server: Server, module_folder: Path) -> Iterator[dict[str, Lake]]:
    folder = module_folder / str(server.port)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        place = server.new_place("struck")
        zones = {zone: f"{place}/{zone}" for zone in ("landing", "processed")}
        new = Lake(folder / "new", **zones, queue=str(folder / "new" / "queue.sqlite"))
        yield before_each_step(new, folder)


def before_each_step(new: Lake, folder: Path) -> dict[str, Lake]:
    """A lake before each step: nothing at all, one night published, and a second one that has come as far as the step."""
    new.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)])
    second = new.copy(folder / "append")
    second.run()
    second.land("2.jsonl", [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)])
    second.land("3.jsonl", [row("a", 0, 2, 3), row("a", 1, 1, 3)], refused=[{**row("x", 1, 1, 3), "v": "no number"}])
    appended = second.copy(folder / "dedupe")
    appended.table.append(host="local")
    deduped = appended.copy(folder / "publish")
    deduped.table.dedupe()
    return {"first append": new, "append": second, "dedupe": appended, "publish": deduped}
