"""How much memory this process may take before something kills it."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def limit_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine has, its control groups (v2 and v1) allow, and RLIMIT_AS; ``root`` holds proc and sys."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_of_control_groups(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append(soft)
    return min(found)


def _of_control_groups(root: Path) -> Iterator[int]:
    """The limits of this process's groups and of those that they are in; v1 says a number near 2^63 for none, v2 "max"."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        # In a container the path may be the host's: then the container's own group lies at the top.
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            try:
                yield int((root / "sys/fs/cgroup" / folder / place / name).read_text())
            except (OSError, ValueError):
                continue
