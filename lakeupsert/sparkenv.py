"""Checks what Spark needs on this machine, before anything imports pyspark. Only changes the process's environment.

Spark starts its Python workers as `python3` by default. In a virtual environment that is another interpreter, without pyarrow.
And Java is often installed where Spark does not look.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lakeupsert.errors import ConfigurationError

OLDEST_SPARK = 4
OLDEST_JAVA = 17
NEWEST_JAVA = 21
"""The newest Java that Spark 4 supports; from 23 on its Hadoop may fail (HADOOP-19212)."""
JVM_FOLDERS = Path("/usr/lib/jvm")


@dataclass(frozen=True)
class Java:
    """A Java that Spark can use. ``home``: the JAVA_HOME with which Spark finds it (None: it is in PATH)."""

    program: Path
    home: Path | None
    version: int


def prepare() -> None:
    """Make Spark's workers run this interpreter, unless the environment says otherwise, and find Java: JAVA_HOME, PATH,
    /usr/lib/jvm.

    Raises:
        ConfigurationError: pyspark is not installed (``no-spark``), or no suitable Java is (``no-java``).
    """
    require_pyspark()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    java = find_java()
    os.environ.pop("JAVA_HOME", None)
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)


def require_pyspark() -> str | None:
    """The version of the installed pyspark; None if it is not a package, as on some clusters. Raises ConfigurationError."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigurationError(
            "no-spark",
            f"pyspark is not installed for {sys.executable}.",
            next="pip install 'lakeupsert[spark]', or use `--host local` and engine arrow, which do not need Spark",
        )
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None


def find_java() -> Java:
    """The Java that `prepare` uses. Only runs `java -version`. Raises ConfigurationError (``no-java``)."""
    rejected = []
    for java, home in _candidates():
        version = _version(java)
        if version is not None and version >= OLDEST_JAVA:
            return Java(java, home, version)
        rejected.append(f"{java} ({f'Java {version}' if version else 'it does not run'})")
    raise ConfigurationError(
        "no-java",
        f"Spark needs Java {OLDEST_JAVA} or later, but there is none in JAVA_HOME, PATH or {JVM_FOLDERS}"
        f"{': found only ' + ', '.join(rejected) if rejected else ''}.",
        next="install it (Debian and Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
        "java-17-openjdk-headless; macOS: brew install openjdk@17) or set JAVA_HOME; or run the same command with "
        "`--host local`, which does not need Java",
    )


def unfit_workers() -> str | None:
    """Why Spark's workers can't use the interpreter of PYSPARK_PYTHON; None if they can, or if it is not set."""
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if python == sys.executable:
        return None
    program = "import sys, lakeupsert, pyarrow; print(*sys.version_info[:2], sep='.')"
    try:
        answer = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
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
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(version[1]) if version else None
