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
from pathlib import Path

from lakeupsert.errors import ConfigurationError

OLDEST_JAVA = 17
JVM_FOLDERS = Path("/usr/lib/jvm")


def prepare() -> None:
    """Let Spark's workers run this interpreter, unless told otherwise, and find Java: JAVA_HOME, PATH, /usr/lib/jvm.

    Raises:
        ConfigurationError: pyspark is not installed (``no-spark``), or there is no Java that it runs on (``no-java``).
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigurationError(
            "no-spark",
            f"pyspark is not installed for {sys.executable}.",
            next="pip install 'lakeupsert[spark]', or use `--host local` and engine arrow, which need no Spark",
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    found = []
    for java, home in _candidates():
        version = _version(java)
        if version is not None and version >= OLDEST_JAVA:
            os.environ.pop("JAVA_HOME", None)
            if home is not None:
                os.environ["JAVA_HOME"] = str(home)
            return
        found.append(f"{java} ({f'Java {version}' if version else 'it does not run'})")
    raise ConfigurationError(
        "no-java",
        f"Spark needs Java {OLDEST_JAVA} or later, and there is none in JAVA_HOME, PATH or {JVM_FOLDERS}"
        f"{': found only ' + ', '.join(found) if found else ''}.",
        next="install it (Debian and Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
        "java-17-openjdk-headless; macOS: brew install openjdk@17) or set JAVA_HOME; `--host local` needs none",
    )


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
