"""What is set before Spark starts: the interpreter of its workers, and a Java that runs."""

import os
import sys
from pathlib import Path

import pytest

from lakeupsert import phrases, sparkenv
from lakeupsert.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java, and an environment that a test may change."""
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": str(tmp_path / "path")})
    for variable in ("JAVA_HOME", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE", "SPARK_SUBMIT_OPTS"):
        os.environ.pop(variable, None)
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.pop(variable, None)
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", tmp_path / "jvm")
    monkeypatch.setattr(sparkenv.metadata, "version", lambda package: "4.1.4")


def java(home: Path, version: str) -> Path:
    """A program that says it is Java, in the folder where a Java's home has it."""
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


def on_path(tmp_path: Path, program: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path/java").symlink_to(program)


def test_workers_run_this_interpreter_unless_told_otherwise(tmp_path: Path) -> None:
    java(tmp_path / "jvm/java-17", "17.0.15")
    os.environ["PYSPARK_DRIVER_PYTHON"] = "/opt/python"
    sparkenv.prepare()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == "/opt/python"


@pytest.mark.parametrize("has_own", [True, False])
def test_log_settings_of_the_machine_win(tmp_path: Path, has_own: bool) -> None:
    java(tmp_path / "jvm/java-17", "17.0.15")
    os.environ["SPARK_CONF_DIR"] = str(tmp_path)
    if has_own:
        (tmp_path / "log4j2.properties").touch()
    sparkenv.prepare()
    assert ("SPARK_SUBMIT_OPTS" in os.environ) != has_own


def test_java_home_wins(tmp_path: Path) -> None:
    java(tmp_path / "mine", "21.0.1")
    on_path(tmp_path, java(tmp_path / "other", "17.0.15"))
    os.environ["JAVA_HOME"] = str(tmp_path / "mine")
    sparkenv.prepare()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "mine")


def test_java_of_the_path_needs_no_java_home(tmp_path: Path) -> None:
    on_path(tmp_path, java(tmp_path / "some", "17.0.15"))
    sparkenv.prepare()
    assert "JAVA_HOME" not in os.environ


def test_java_home_without_java_is_passed_over(tmp_path: Path) -> None:
    on_path(tmp_path, java(tmp_path / "some", "17.0.15"))
    os.environ["JAVA_HOME"] = str(tmp_path / "gone")
    sparkenv.prepare()
    assert "JAVA_HOME" not in os.environ


def test_java_below_usr_lib_jvm_is_found(tmp_path: Path) -> None:
    java(tmp_path / "jvm/java-17", "17.0.15")
    sparkenv.prepare()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "jvm/java-17")


def test_too_old_java_is_passed_over(tmp_path: Path) -> None:
    on_path(tmp_path, java(tmp_path / "old", "1.8.0_392"))
    java(tmp_path / "jvm/java-11", "11.0.22")
    java(tmp_path / "jvm/java-17", "17.0.15")
    sparkenv.prepare()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "jvm/java-17")


@pytest.mark.parametrize(
    ("release", "javas", "fit"),
    [
        ("3.5.9", (7, 8, 17, 21), {8, 17}),
        ("3.5.6-amzn-1", (8, 11, 17, 21), {8, 11, 17}),
        ("4.0.5", (11, 17, 21, 25), {17, 21}),
        ("4.1.4", (11, 17, 21, 25), {17, 21}),
        ("4.2.1", (11, 17, 21, 25, 26), {17, 21, 25}),
        ("5.0.0", (11, 17, 25, 26), {17, 25}),
        (None, (7, 8, 25, 26), {8, 25}),
    ],
)
def test_each_spark_has_its_javas(release: str | None, javas: tuple[int, ...], fit: set[int]) -> None:
    assert {version for version in javas if version in sparkenv.javas_of(release)} == fit


def test_java_that_spark_supports_goes_before_a_newer_one(tmp_path: Path) -> None:
    on_path(tmp_path, java(tmp_path / "newest", "25.0.1"))
    java(tmp_path / "jvm/java-17", "17.0.15")
    assert sparkenv.find_java("4.1.4").version == 17
    assert sparkenv.find_java("4.3.0").version == 25
    (tmp_path / "jvm/java-17/bin/java").unlink()
    assert sparkenv.find_java("4.1.4").version == 25, "it may run, and doctor warns"


def test_spark_connect_needs_no_java_and_has_its_own_python() -> None:
    os.environ["SPARK_REMOTE"] = "sc://spark.example:15002"
    sparkenv.prepare()
    assert not {"JAVA_HOME", "PYSPARK_PYTHON"} & os.environ.keys()


def test_spark_connect_in_this_process_needs_java() -> None:
    os.environ["SPARK_REMOTE"] = "local[2]"
    with pytest.raises(ConfigurationError) as raised:
        sparkenv.prepare()
    assert raised.value.code == "no-java"


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("sc://host:443/;use_ssl=true;token=secret", "sc://host:443"),
        ("sc://host", "sc://host"),
        ("local[2]", None),
        ("", None),
    ],
)
def test_address_of_a_connect_server_is_named_without_its_token(address: str, server: str | None) -> None:
    os.environ["SPARK_REMOTE"] = address
    assert sparkenv.connect_server() == server


def test_no_java_names_the_package_and_the_way_without() -> None:
    with pytest.raises(ConfigurationError) as raised:
        sparkenv.prepare()
    assert raised.value.code == "no-java"
    assert "openjdk-17-jre-headless" in raised.value.next
    assert "--host local" in raised.value.next


def test_unfit_javas_are_named(tmp_path: Path) -> None:
    old = java(tmp_path / "jvm/java-8", "1.8.0_392")
    broken = java(tmp_path / "jvm/stub", "17")
    broken.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigurationError, match="found only") as raised:
        sparkenv.prepare()
    assert f"{old} (Java 8)" in raised.value.message
    assert f"{broken} (it does not run)" in raised.value.message


def test_no_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigurationError) as raised:
        sparkenv.prepare()
    assert raised.value.code == "no-spark"
    assert phrases.install_extra("spark") in raised.value.next
