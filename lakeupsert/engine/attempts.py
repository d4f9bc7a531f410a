"""A task's error belongs to that task: it travels as a value, and the others go on."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def attempt(function: Callable[[Item], Found], item: Item) -> Found | Exception:
    """What the function returns, or the error that it raises."""
    try:
        return function(item)
    except Exception as e:
        return e


def all_or_raise(found: Iterable[Found | Exception]) -> list[Found]:
    """The results of `Host.map`. Raises the first error."""
    results: list[Found] = []
    for one in found:
        if isinstance(one, Exception):
            raise one
        results.append(one)
    return results
