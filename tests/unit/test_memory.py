"""The memory limit of a process, as Linux tells it in files."""

from pathlib import Path

import pytest

from lakeupsert.pipeline.workers.drain_queues import limit_bytes


def machine(root: Path, groups: str, **limits: str) -> Path:
    """A folder with the files of /proc and /sys that tell limits; ``limits`` by path, with __ for a slash."""
    files = {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{p.replace('__', '/')}": text for p, text in limits.items()},
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V1 = "12:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/system"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": "1000"}, 1000),  # in a container, its own group is at the top
        ("0::/pods/a", {"pods__a__memory.max": "max", "pods__memory.max": "2000"}, 2000),  # of a pod
        ("0::/pods/a", {"pods__a__memory.max": "1000", "pods__memory.max": "2000"}, 1000),
        (V1, {"memory__docker__1__memory.limit_in_bytes": "3000"}, 3000),
        (V1, {"memory__memory.limit_in_bytes": "4000"}, 4000),  # in a container: the path is the host's
        (V1, {"cpu,cpuacct__memory.limit_in_bytes": "1", "memory__memory.limit_in_bytes": "4000"}, 4000),
    ],
)
def test_limit_is_the_least_of_the_groups(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    assert limit_bytes(machine(tmp_path, groups, **limits)) == expected


@pytest.mark.parametrize(
    "limits", [{}, {"memory.max": "max"}, {"memory__memory.limit_in_bytes": "9223372036854771712"}]
)
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, limits: dict[str, str]) -> None:
    assert limit_bytes(machine(tmp_path, "0::/\n3:memory:/", **limits)) == limit_bytes(tmp_path / "no Linux")
