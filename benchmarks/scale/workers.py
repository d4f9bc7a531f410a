"""Do more workers make phase two shorter where every request takes 30 ms longer, and S3 refuses more than so many a second?

The machine has no processors for 64 workers, so time is stretched: with N workers each wait for store or queue takes N times
as long, and a worker that computed for some time waits N - 1 times that before its next request. All that is measured is then
divided by N. Workers are threads of one process, which share about one processor; in stretched time each of them needs an
Nth of it. So the figures are those of workers with a processor each, and `one worker, stretched` shows how well that holds:
it should be what one worker takes.

What they tell: whether workers wait for each other, for the queue or for S3's limits (3,500 writes and 5,500 reads a second,
as if all the table were one of S3's partitions, with a second's burst), and how evenly the partitions go round. The code is
the product's; only the store's delay and limits are made here (`tests.harness.faults` calls before each request).
What they can't: how fast a real S3 answers, what its bandwidth is, that it grows into a new table's load only in minutes,
what SQS refuses, and how long hundreds of processes take to begin. The queue is SQLite, with 30 ms for each call too. Work
that Arrow does in threads of its own is not stretched, but these partitions are tiny: almost all of the time is waiting.
`make bench-latency` measures up to 8 processes unstretched, by HTTP.

append (host local) and publish have no workers, and their time is not stretched.
"""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from lakeupsert.api import Table
from lakeupsert.pipeline import resources
from tests.harness.faults import Points
from tests.harness.lake import Lake, row

SHOWN = {
    "append": "s append",
    "dedupe": "s dedupe",
    "publish": "s publish",
    "requests": "requests of dedupe",
    "requests_a_second": "a second",
    "held": "held by limits",
    "most_a_worker": "most partitions of a worker",
    "busy": "processor",
}
DELAY_SECONDS = 0.03
LIMITS = {"write": 3500, "read": 5500}
KINDS = {
    "put": "write",
    "create": "write",
    "delete": "write",
    "get": "read",
    "head": "read",
    "list": "read",
    "open": "read",
}


class FarStore(Points):
    """A point at each call of store and queue: it takes the delay longer, and waits where the limits are reached."""

    def __init__(self, stretch: int) -> None:
        super().__init__()
        self.stretch = stretch
        self.calls = Counter[str]()
        self.held = 0
        """Calls that waited for the limits."""
        self._free = dict.fromkeys(LIMITS, 0.0)
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        now = time.thread_time()
        computed = now - getattr(self._thread, "computed", now)  # what the thread did before is none of ours
        kind = KINDS.get(name.split()[0])
        time.sleep(
            (self.stretch - 1) * computed + self.stretch * DELAY_SECONDS + (self._limited(kind) if kind else 0.0)
        )
        self._thread.computed = time.thread_time()
        yield

    def _limited(self, kind: str) -> float:
        """Seconds that this call has to wait for its turn."""
        with self._lock:
            self.calls[kind] += 1
            now = time.monotonic()
            self._free[kind] = max(self._free[kind], now - self.stretch) + self.stretch / LIMITS[kind]
            waits = max(0.0, self._free[kind] - now)
            self.held += waits > 0
            return waits


def measured(workers: int, stretch: int, partitions: int) -> dict[str, float]:
    """Seconds of a night that touches every partition with a few rows, and its requests.

    ``busy``: how much of the processor phase two took; near 1 its seconds are this machine's, and not the workers'.
    Raises AssertionError where a row is not the model's.
    """
    # In memory, as a disk would wait unstretched; and what is asked of a store that is far is asked at once.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, patch.object(resources, "is_remote", lambda place: True):
        return _measured(Path(root), workers, stretch, partitions)


def _measured(root: Path, workers: int, stretch: int, partitions: int) -> dict[str, float]:
    lake = Lake(root)
    for night in range(2):
        rows = [row(k, day, night, night) for day in range(partitions) for k in "abc"[night % 2 :]]
        lake.land(f"{night}.jsonl", rows)
        if not night:  # the first one makes the table
            lake.run()
    near, far = FarStore(1), FarStore(stretch)
    at_store = _opened(root, near)
    begun = time.perf_counter()
    at_store.append(host="local")
    appended = time.perf_counter()
    used = time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        merged = list(pool.map(lambda _: _opened(root, far).dedupe(), range(workers)))
    deduped = time.perf_counter()
    busy = (time.process_time() - used) / (deduped - appended)
    assert sum(map(len, merged)) == partitions
    at_store.publish()
    seconds = {
        "append": appended - begun,
        "dedupe": (deduped - appended) / stretch,
        "publish": time.perf_counter() - deduped,
    }
    lake.finish_and_check()
    return {
        **{step: round(value, 3) for step, value in seconds.items()},
        "requests": sum(far.calls.values()),
        "requests_a_second": round(sum(far.calls.values()) / seconds["dedupe"]),
        "held": far.held,
        "most_a_worker": max(map(len, merged)),
        "busy": round(busy, 2),
    }


def _opened(root: Path, points: FarStore) -> Table:
    """As a new process opens it."""
    lake = Lake(root)
    lake.points = points
    lake.reopen()
    return lake.table
