"""A task's error belongs to that task: it travels as a value, and the others go on."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lakeupsert.storage import ObjectStore

Item = TypeVar("Item")
Found = TypeVar("Found")


def attempt(function: Callable[[Item], Found], item: Item) -> Found | Exception:
    """What the function returns, or the error that it raises."""
    try:
        return function(item)
    except Exception as e:
        return e


def count_requests(store: ObjectStore, function: Callable[[Item], Found], item: Item) -> tuple[Found, dict[str, int]]:
    """What the function returns, and how many requests of each kind it sent to the store."""
    before = store.requests.as_dict()
    found = function(item)
    return found, {call: count - before[call] for call, count in store.requests.as_dict().items()}


def add_requests(
    store: ObjectStore, found: Iterable[tuple[Found, dict[str, int]] | Exception]
) -> Iterator[Found | Exception]:
    """The results of `count_requests` in other processes. Their requests are added to those of the store."""
    for one in found:
        if isinstance(one, Exception):
            yield one
        else:
            result, requests = one
            store.requests.add(requests)
            yield result


def all_or_raise(found: Iterable[Found | Exception]) -> list[Found]:
    """The results of `Host.map`. Raises the first error."""
    results: list[Found] = []
    for one in found:
        if isinstance(one, Exception):
            raise one
        results.append(one)
    return results
