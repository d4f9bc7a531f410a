"""How much memory this process may use before something kills it.

What a merge needs: `ArrowEngine.memory_of`. Who refuses a merge that needs more: `dedupe`.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def limit_bytes(root: Path = Path("/")) -> int:
    """The smallest of the machine's memory, the limits of its control groups (v2 and v1), and RLIMIT_AS. ``root`` has proc and
    sys."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_control_group_limits(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def _control_group_limits(root: Path) -> Iterator[int]:
    """The limits of this process's groups and their parents. "No limit" is a number near 2^63 in v1, and "max" in v2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        # In a container, the path may be the host's. Then the container's own group is at the top.
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            try:
                yield int((root / "sys/fs/cgroup" / folder / place / name).read_text())
            except (OSError, ValueError):
                continue
