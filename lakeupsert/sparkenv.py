"""What the machine must have before anything imports pyspark; sets the process's environment, nothing else.

Spark starts its Python workers by name, `python3` unless told: in a virtual environment that is another interpreter,
which has no pyarrow. And Java is often there, but not where Spark looks.
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
"""The last one that Spark 4 is made for; from 23 on the Hadoop in it may fail (HADOOP-19212)."""
JVM_FOLDERS = Path("/usr/lib/jvm")


@dataclass(frozen=True)
class Java:
    """A Java that Spark runs on; ``home`` is the JAVA_HOME that makes Spark take it (None: it is the one of PATH)."""

    program: Path
    home: Path | None
    version: int


def prepare() -> None:
    """Let Spark's workers run this interpreter, unless told otherwise, and find Java: JAVA_HOME, PATH, /usr/lib/jvm.

    Raises:
        ConfigurationError: pyspark is not installed (``no-spark``), or there is no Java that it runs on (``no-java``).
    """
    require_pyspark()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    java = find_java()
    os.environ.pop("JAVA_HOME", None)
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)


def require_pyspark() -> str | None:
    """The installed pyspark's version; None where it is no package, as on some clusters. Else ConfigurationError."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigurationError(
            "no-spark",
            f"pyspark is not installed for {sys.executable}.",
            next="pip install 'lakeupsert[spark]', or use `--host local` and engine arrow, which need no Spark",
        )
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None


def find_java() -> Java:
    """The Java that `prepare` would take. Starts nothing but `java -version`; raises ConfigurationError (``no-java``)."""
    found = []
    for java, home in _candidates():
        version = _version(java)
        if version is not None and version >= OLDEST_JAVA:
            return Java(java, home, version)
        found.append(f"{java} ({f'Java {version}' if version else 'it does not run'})")
    raise ConfigurationError(
        "no-java",
        f"Spark needs Java {OLDEST_JAVA} or later, and there is none in JAVA_HOME, PATH or {JVM_FOLDERS}"
        f"{': found only ' + ', '.join(found) if found else ''}.",
        next="install it (Debian and Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
        "java-17-openjdk-headless; macOS: brew install openjdk@17) or set JAVA_HOME; or run the same command with "
        "`--host local`, which needs none",
    )


def unfit_workers() -> str | None:
    """Why Spark's workers can't run the interpreter of PYSPARK_PYTHON; None where they can, or where it is not set."""
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    if python == sys.executable:
        return None
    asks = "import sys, lakeupsert, pyarrow; print(*sys.version_info[:2], sep='.')"
    try:
        said = subprocess.run([python, "-c", asks], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as e:
        return f"{python} does not run: {e}"
    if said.returncode:
        *_, last = said.stderr.splitlines() or [f"exit code {said.returncode}"]
        return f"{python} lacks what the workers import: {last}"
    mine, its = f"{sys.version_info[0]}.{sys.version_info[1]}", said.stdout.strip()
    if its != mine:
        return f"{python} is Python {its}, the driver {sys.executable} is {mine}; they must be equal"
    return None


def _candidates() -> Iterator[tuple[Path, Path | None]]:
    """Programs to try, each with the JAVA_HOME that makes Spark take it (None: it is the one of PATH)."""
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
    """Its major version; None where it does not run (macOS has a /usr/bin/java that only tells where to buy one)."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(version[1]) if version else None
