"""The readers, each started once for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeupsert.testing.readers import Readers


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(Path(__file__).parent) and "readers" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.readers)


@pytest.fixture(scope="session")
def readers() -> Iterator[Readers]:
    with Readers() as started:
        yield started
