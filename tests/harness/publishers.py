"""Several publishers of one table at once: in threads, and in processes. Each round brings a night to show."""

import threading
from contextlib import ExitStack

from lakeupsert.api import Table
from lakeupsert.config import PublisherName
from tests.harness.lake import Lake, row
from tests.harness.processes import LakeProcess

DAYS = 3
THREADS = 4


def publish_in_threads(lake: Lake, name: PublisherName, rounds: int) -> None:
    """Publish each round by several threads. Raises AssertionError if the publisher of one has a problem."""
    problems: list[object] = []
    for number in range(rounds):
        _merge(lake, number)
        tables = [Table("t", lake.settings) for _ in range(THREADS)]
        ready = threading.Barrier(len(tables))

        def publish(table: Table, ready: threading.Barrier = ready) -> None:
            ready.wait()
            problems.append(table.publish().publishers[name].problem)

        threads = [threading.Thread(target=publish, args=(table,)) for table in tables]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for table in tables:
            table.close()
    assert problems == [None] * rounds * THREADS, [repr(problem) for problem in problems if problem]
    lake.reopen()


def publish_in_processes(lake: Lake, name: PublisherName, rounds: int) -> None:
    """Publish each round by two processes. Raises AssertionError if one does not show the newest snapshot."""
    with ExitStack() as stack:
        pair = [stack.enter_context(LakeProcess(lake)) for _ in range(2)]
        for number in range(rounds):
            _merge(lake, number)
            for process in pair:
                process.begin("publish")
            standings = [process.end().publishers[name] for process in pair]
            assert [(s.problem, s.behind) for s in standings] == [(None, 0)] * 2
    lake.reopen()


def _merge(lake: Lake, number: int) -> None:
    """A night with all keys of each day, or each second or third one, up to its publish."""
    keys = range(0, 30, 1 + number % 3)
    lake.land(f"{number}.jsonl", [row(f"k{i:02}", day, number, number) for day in range(DAYS) for i in keys])
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
