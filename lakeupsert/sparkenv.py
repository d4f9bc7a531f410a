"""Checks what Spark needs on this machine, before anything imports pyspark. Only changes this process.

Spark starts its Python workers as `python3` by default. In a virtual environment that is another interpreter, without pyarrow.
And Java is often installed where Spark does not look.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install_extra
from lakeupsert.retries import PROGRAM_SECONDS

OLDEST_SPARK = (3, 5)
_JAVAS = (((4, 2), 17, 25), ((4, 0), 17, 21), (OLDEST_SPARK, 8, 17))
"""From which Spark on which Java is the oldest and the newest. Newer ones may fail: Hadoop 3.4 does from 24 on (HADOOP-19212)."""
JVM_FOLDERS = Path("/usr/lib/jvm")
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


@dataclass(frozen=True)
class Java:
    """A Java that Spark can use. ``home``: the JAVA_HOME with which Spark finds it (None: it is in PATH)."""

    program: Path
    home: Path | None
    version: int


def prepare() -> None:
    """Make Spark's workers run this interpreter, unless the environment says otherwise, and find Java: JAVA_HOME, PATH,
    /usr/lib/jvm. A Spark Connect server has its own of both.

    Raises:
        ConfigurationError: pyspark is not installed (``no-spark``), or no suitable Java is (``no-java``).
    """
    spark = require_pyspark()
    # Spark warns from 4.2 on; no row of ours passes through pandas there.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    if connect_server() is not None:
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    _log_errors_only()
    java = find_java(spark)
    os.environ.pop("JAVA_HOME", None)
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)


def _log_errors_only() -> None:
    """Keep what Spark logs at every start off the screen, unless this machine has log settings of its own."""
    own = os.environ.get("SPARK_CONF_DIR") or f"{os.environ.get('SPARK_HOME', '')}/conf"
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "log4j" not in options and not (Path(own) / "log4j2.properties").exists():
        os.environ["SPARK_SUBMIT_OPTS"] = f"{options} -Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}".lstrip()


def require_pyspark() -> str | None:
    """The version of the installed pyspark; None if it is not a package, as on some clusters. Raises ConfigurationError."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigurationError(
            "no-spark",
            f"pyspark is not installed for {sys.executable}.",
            next=f"{install_extra('spark')}, or use `--host local` and engine arrow, which do not need Spark",
        )
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None


def connect_server() -> str | None:
    """The Spark Connect server of SPARK_REMOTE, without the parameters of its address, which may hold a token; None: Spark
    starts here, also with SPARK_REMOTE=local."""
    address = os.environ.get("SPARK_REMOTE", "")
    return address.partition(";")[0].rstrip("/") if address.startswith("sc://") else None


def is_supported(spark: str | None) -> bool:
    """Whether lakeupsert runs on this version of pyspark; an unknown one counts."""
    return spark is None or _numbers(spark) >= OLDEST_SPARK


def javas_of(spark: str | None) -> range:
    """The Java versions that this version of pyspark runs on; if it is unknown, those that any does."""
    for since, oldest, newest in _JAVAS:
        if spark is not None and _numbers(spark) >= since:
            return range(oldest, newest + 1)
    return range(_JAVAS[-1][1], _JAVAS[0][2] + 1)


def _numbers(version: str) -> tuple[int, ...]:
    """Its first two numbers. Vendors add letters to the rest: 3.5.6-amzn-1."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_java(spark: str | None) -> Java:
    """The Java that `prepare` uses with this version of pyspark: the first that Spark supports, or else the first newer one.

    Only runs `java -version`. Raises ConfigurationError (``no-java``).
    """
    fit, name = javas_of(spark), f"Spark {spark}" if spark else "Spark"
    rejected = []
    newer = None
    for java, home in _candidates():
        version = _version(java)
        if version is not None and version in fit:
            return Java(java, home, version)
        if version is not None and version >= fit.stop:
            newer = newer or Java(java, home, version)
        rejected.append(f"{java} ({f'Java {version}' if version else 'it does not run'})")
    if newer is not None:
        return newer
    raise ConfigurationError(
        "no-java",
        f"{name} needs Java {fit.start} or later, but there is none in JAVA_HOME, PATH or {JVM_FOLDERS}"
        f"{': found only ' + ', '.join(rejected) if rejected else ''}.",
        next="install it (Debian and Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
        "java-17-openjdk-headless; macOS: brew install openjdk@17) or set JAVA_HOME; or set SPARK_REMOTE to a Spark Connect "
        "server; or run the same command with `--host local`, which does not need Java",
    )


def unfit_workers() -> str | None:
    """Why Spark's workers can't use the interpreter of PYSPARK_PYTHON; None if they can, or if it is not set."""
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if python == sys.executable:
        return None
    program = "import sys, lakeupsert, pyarrow; print(*sys.version_info[:2], sep='.')"
    try:
        answer = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as e:
        return f"{python} does not run: {e}"
    if answer.returncode:
        *_, last = answer.stderr.splitlines() or [f"exit code {answer.returncode}"]
        return f"{python} lacks packages that the workers import: {last}"
    mine, its = f"{sys.version_info[0]}.{sys.version_info[1]}", answer.stdout.strip()
    if its != mine:
        return f"{python} is Python {its}, the driver {sys.executable} is {mine}; they must be equal"
    return None


def _candidates() -> Iterator[tuple[Path, Path | None]]:
    """Java programs to try, each with the JAVA_HOME with which Spark finds it (None: it is in PATH)."""
    if os.environ.get("JAVA_HOME"):
        home = Path(os.environ["JAVA_HOME"])
        if (home / "bin/java").exists():
            yield home / "bin/java", home
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path), None
    for java in sorted(JVM_FOLDERS.glob("*/bin/java")):
        yield java, java.parent.parent


def _version(java: Path) -> int | None:
    """The major version; None if it does not run (macOS has a /usr/bin/java that only says where to get one)."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(version[1]) if version else None
