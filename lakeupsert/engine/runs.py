"""Consecutive items that are worth doing together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def runs(items: Iterable[Item], size: Callable[[Item], float], most: float) -> Iterator[list[Item]]:
    """Runs of items whose sizes add up to at most ``most``; a larger item is a run of its own."""
    run: list[Item] = []
    total = 0.0
    for item in items:
        if run and total + size(item) > most:
            yield run
            run, total = [], 0.0
        run.append(item)
        total += size(item)
    if run:
        yield run
