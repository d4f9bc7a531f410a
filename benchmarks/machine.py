"""What a benchmark ran on and with, for its results. Importing it needs nothing but Python's own library."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    from lakeupsert.sparkenv import find_java, require_pyspark

    java = subprocess.run(
        [find_java(require_pyspark()).program, "-version"], capture_output=True, text=True, check=True
    )
    described = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(": ")[2] for line in described if line.startswith("model name"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "processor": next(models, platform.machine()),
        "system": platform.platform(terse=True),
        "java": java.stderr.partition("\n")[0],
        "python": platform.python_version(),
    }


def sentence(of: dict[str, Any]) -> str:
    """`facts` for people."""
    return f"{of['cores']} cores of {of['processor']}, {of['memory_gb']} GB, {of['system']}, {of['java']}, Python {of['python']}."


def versions(*packages: str) -> list[str]:
    return [f"{package} {version(package)}" for package in packages]


def commit() -> str:
    """Of this clone, with `-dirty` where files differ from it; empty where git does not know."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    with suppress(FileNotFoundError):
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""
