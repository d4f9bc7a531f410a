"""The readers, each started once for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.readers import Readers
from tests.harness.servers import Server


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(Path(__file__).parent) and "readers" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.readers)


@pytest.fixture(scope="session")
def readers(versitygw: Server) -> Iterator[Readers]:
    with Readers(versitygw.env) as started:
        yield started
