"""Who asks which landing files were taken reads one object for up to 4096 batches, and the ledger stays the truth."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.operations.plan.habits import NIGHTS
from lakeupsert.table import ledger
from tests.harness.lake import Lake, row

HEADERS_TOGETHER = (8, 2)
"""Each batch of these tests is an append."""
BATCHES = 2 * 8 + 5


@pytest.fixture(scope="module", autouse=True)
def few_together() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "HEADERS_TOGETHER", HEADERS_TOGETHER)
        yield


@pytest.fixture(scope="module")
def many_batches(module_folder: Path) -> Lake:
    lake = Lake(module_folder)
    for number in range(BATCHES):
        lake.land(f"{number:04d}.jsonl", [row("a", 0, number, number)])
        lake.table.append(host="local")
    return lake


@pytest.fixture
def lake(many_batches: Lake, tmp_path: Path) -> Lake:
    return many_batches.copy(tmp_path / "lake")


def test_an_append_after_many_batches_reads_few_objects_and_takes_nothing_twice(lake: Lake) -> None:
    lake.land("new.jsonl", [row("b", 0, 1)])
    before = lake.table.requests["get"]
    appended = lake.table.append(host="local")
    assert appended is not None
    assert [f.path for f in appended.entry.files] == ["new.jsonl"]
    assert lake.table.requests["get"] - before < 10
    lake.finish_and_check()


def test_a_plan_counts_one_object_for_many_batches_too(lake: Lake) -> None:
    for night in range(NIGHTS + 2):  # it learns from the last nights, and the first one here has all these batches
        lake.run()
        lake.land(f"night-{night}.jsonl", [row("b", 0, 1)])
    lake.reopen()
    planned = lake.table.plan().requests
    lake.reopen()
    lake.run()
    assert sum(planned.values()) == pytest.approx(sum(lake.table.requests.values()), rel=0.3)


def test_headers_that_are_gone_are_made_again(lake: Lake) -> None:
    folder = lake.root / "processed/_lakeupsert/headers"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(before) == 2 + 10, "of 8 and of 2 entries each; the append of the last one saw 21"
    for file in folder.iterdir():
        file.unlink()
    assert lake.table.status().quarantined == 0, "reading needs none"
    assert not list(folder.iterdir())
    lake.reopen()
    assert lake.table.append(host="local") is None
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert (before.items() <= after.items(), len(after)) == (True, len(before) + 1)


def test_damaged_headers_are_named_and_may_be_deleted(lake: Lake) -> None:
    file = lake.root / "processed/_lakeupsert/headers/ledger-000000000000-8.json"
    file.write_bytes(b"{")
    with pytest.raises(DamagedTableError) as damaged:
        lake.table.append(host="local")
    assert (file.name in damaged.value.message, "delete" in damaged.value.next) == (True, True)
    file.unlink()
    assert lake.table.append(host="local") is None
