"""What the publisher of Iceberg says if objects are damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.publishers.iceberg_snapshot import FOLDER
from tests.harness.lake import Lake, iceberg_settings, iceberg_table, row

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two nights; the second one supersedes rows."""
    root = tmp_path / "lake"
    lake = Lake(root, publishers=("iceberg",), iceberg=iceberg_settings(root), strategy="delta")
    for number in range(2):
        lake.land(f"{number}.jsonl", [row(f"k{i}", day, number, i) for day in range(2) for i in range(number, 9)])
        lake.run()
    return lake


def damages() -> dict[str, Callable[[bytes], bytes]]:
    return {
        "cut": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "no text": lambda data: b"\xff\xfe" + data,
        "other JSON": lambda data: b'{"format-version": 2}',
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", damages())
def test_damaged_metadata_is_named(lake: Lake, damage: str) -> None:
    table = iceberg_table(iceberg_settings(lake.root))
    assert table is not None
    path = Path(table.metadata_location.removeprefix("file://"))
    path.write_bytes(damages()[damage](path.read_bytes()))
    with pytest.raises(DamagedTableError) as raised:
        lake.table.publish(to="iceberg")
    assert raised.value.code == "damaged-object"
    assert path.name in raised.value.message
    assert "publish --to iceberg --reset" in raised.value.next
    problem = lake.table.status().publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "damaged-object"
    lake.land("2.jsonl", [row("k0", 0, 5)])
    assert lake.table.run(host="local").publish.snapshot == 2, "the night is published"
    lake.table.publish(to="iceberg", reset=True)
    lake.check()


@pytest.mark.parametrize("kind", ["snap-", "manifest-"])
def test_damaged_manifests_are_named(lake: Lake, kind: str) -> None:
    for path in (lake.root / "processed" / FOLDER / "metadata").glob(f"{kind}*"):
        path.write_bytes(path.read_bytes()[:-20])
    lake.land("2.jsonl", [row("k0", day, 5) for day in range(2)])
    problem = lake.table.run(host="local").publish.publishers["iceberg"].problem
    assert problem is not None
    assert problem.code == "damaged-object"
    assert f"/metadata/{kind}" in problem.message
    assert "publish --to iceberg --reset" in problem.next
    lake.table.publish(to="iceberg", reset=True)
    lake.check()
