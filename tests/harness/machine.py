"""A machine for tests: a disk that fills up, clocks that jump, and what its processes hold."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from statistics import median

DISK = "4g"
_PAGE = os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True)
class Usage:
    """At one moment. ``files``: below the folder of its temporary files."""

    megabytes: float
    descriptors: float
    threads: float
    files: float

    def __str__(self) -> str:
        return (
            f"{self.megabytes:.0f} MB, {self.descriptors:g} descriptors, {self.threads:g} threads, {self.files:g} files"
        )


ROOM = Usage(megabytes=48, descriptors=4, threads=16, files=0)
"""How much more the last third may hold. A process remembers 64 ledger entries (`KEPT_ENTRIES`), 30 MB of 120 partitions; a
step has up to 16 threads while it asks the store; pools of connections and of memory fill up by chance."""


class Disk:
    """A file system with all that the servers and processes of a run write. ``small``: this user could mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_full = False
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
        self.small = subprocess.run(mount, check=False, capture_output=True).returncode == 0

    @contextmanager
    def full(self) -> Iterator[None]:
        """While the block runs there is no room on it."""
        while not self._resize(str(shutil.disk_usage(self.folder).used)):
            pass  # somebody wrote something meanwhile
        self.is_full = True
        try:
            yield
        finally:
            self.is_full = not self._resize(DISK)

    def _resize(self, size: str) -> bool:
        mount = ["mount", "-o", f"remount,size={size}", str(self.folder)]
        return subprocess.run(mount, check=False, capture_output=True).returncode == 0


@contextmanager
def small_disk() -> Iterator[Disk]:
    """All temporary files of this process, and so of servers that it starts, are there."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    disk, before = Disk(folder), tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield disk
    finally:
        tempfile.tempdir = before
        if disk.small:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def fake_clocks() -> bool:
    """Let a `LakeProcess` that starts from now on have the clock of the file that `FAKETIME_TIMESTAMP_FILE` names."""
    found = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if found is None:
        return False
    preload = {
        "LD_PRELOAD": str(found),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    os.environ.update(preload)
    ensure_running()
    for name in preload:
        del os.environ[name]
    return True


def is_stopped(pid: int) -> bool:
    """Whether the process waits for SIGCONT."""
    return _figures(pid)[0] == b"T"


def usage_of(pid: int, folder: Path) -> Usage:
    figures = _figures(pid)
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    files = sum(len(names) for _, _, names in os.walk(folder))
    return Usage(int(figures[21]) * _PAGE, descriptors, int(figures[17]), files)


def thirds(samples: Sequence[Usage]) -> tuple[Usage, Usage]:
    """The medians of the first and of the last third."""
    part = max(1, len(samples) // 3)
    first, last = (
        Usage(*(median(values) for values in zip(*map(astuple, some), strict=True)))
        for some in (samples[:part], samples[-part:])
    )
    return first, last


def is_flat(first: Usage, last: Usage) -> bool:
    return all(b <= a + room for a, b, room in zip(astuple(first), astuple(last), astuple(ROOM), strict=True))


def _figures(pid: int) -> list[bytes]:
    """Of /proc/PID/stat, from the state on. A process that has ended is a zombie."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return [b"X"] + [b"0"] * 50
