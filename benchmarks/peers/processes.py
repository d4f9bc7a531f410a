"""What a process and all below it have taken: seconds, and from Linux's /proc processor time, memory and descriptors."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

SAMPLE_SECONDS = 0.5


def tree(root: int | None = None) -> list[int]:
    """A process (None: this one) and every one below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root or os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int | None = None) -> float:
    """Used so far by the tree, those that have ended included.

    It tells the cost of a night also on a machine that others use at the same time, where seconds tell little.
    """
    ticks = 0
    for pid in tree(root):
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(root: int | None = None) -> tuple[int, int]:
    """What the tree holds now, and its JVMs, as PSS: a page that several processes share counts once."""
    kilobytes = [0, 0]
    for pid in tree(root):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
            kilobytes[0] += held
            kilobytes[1] += held * (Path(f"/proc/{pid}/comm").read_text() == "java\n")
    return kilobytes[0] // 1024, kilobytes[1] // 1024


def descriptors(root: int | None = None) -> int:
    """Open files, sockets and pipes of the tree."""
    count = 0
    for pid in tree(root):
        with suppress(OSError):
            count += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return count


class PeakMemory:
    """The most that the tree held at once while the block ran, sampled, and how much of it its JVMs held; and the processor
    time that sampling took."""

    def __init__(self) -> None:
        self.mb = self.jvm_mb = 0
        self.cpu_seconds = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mb, self.jvm_mb = max((self.mb, self.jvm_mb), memory_mb())
            if self._done.wait(SAMPLE_SECONDS):
                self.cpu_seconds = thread_time()
                return


def timed(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Do one after the other; the seconds of each."""
    seconds = {}
    for name, do in steps.items():
        begun = perf_counter()
        do()
        seconds[name] = round(perf_counter() - begun, 2)
    return seconds


class InThisProcess:
    """What the sides have in common that merge in this process, by ``_merge``, and whose table DuckDB reads, by ``_read``."""

    _merge: Callable[[], None]
    _read: Callable[[str], Any]

    def land(self, night: Path) -> None:
        self.night = night

    def apply(self) -> dict[str, float]:
        return timed({"merge": self._merge})

    def reads(self) -> Mapping[str, Callable[[str], Any]]:
        return {"DuckDB": self._read}

    def bytes_counted(self) -> int:
        return 0

    def requests(self) -> dict[str, int]:
        return {}
