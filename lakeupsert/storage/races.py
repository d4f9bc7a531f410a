"""Races of threads to create one object. A store on which two of them win would lose commits.

A server may refuse an existing name and still let two creates win that come at the same time: of Adobe S3Mock 5.2.0, 13 of 40
races of 8 threads have several winners.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lakeupsert import clock
from lakeupsert.storage.base import NotFoundError, ObjectStore, StoreUnavailableError, UnknownOutcomeError

WRITERS = 8
"""Threads that race to create each object."""
SLOW_SECONDS = 0.5
AT_ONCE = 4
"""A server that takes longer for a race waits most of the time (SeaweedFS 4.48: 1.5 s), so it gets several at once. On a fast
one, more threads than `WRITERS` would only keep each other from sending at the same time."""

Create = Callable[[str, bytes], bool]


def race(store: ObjectStore, create: Create, names: Sequence[str]) -> str | None:
    """Let threads race to create each object; returns what went wrong, or None.

    ``create``: as `ObjectStore.create`. The objects stay.
    """
    begin, at_once = 0, 1
    wrong: list[int] = []
    with ThreadPoolExecutor(WRITERS * AT_ONCE) as pool:
        while begin < len(names):
            group, started = names[begin : begin + at_once], clock.elapsed()
            answers = [_begin(pool, create, name) for name in group]
            winners = [_winners(store, name, {body: made() for body, made in bodies}) for name, bodies in answers]
            wrong += [number for number in winners if number is not None]
            begin += len(group)
            at_once = AT_ONCE if clock.elapsed() - started > SLOW_SECONDS else 1
    if not wrong:
        return None
    return (
        f"in {len(wrong)} of {len(names)} races of {WRITERS} threads to create one object, {max(wrong)} won; exactly one must "
        "win, and its bytes must be stored"
    )


_Bodies = list[tuple[bytes, Callable[[], bool | None]]]


def _begin(pool: ThreadPoolExecutor, create: Create, name: str) -> tuple[str, _Bodies]:
    gate = threading.Barrier(WRITERS)
    bodies = [f"{name} {writer}".encode() for writer in range(WRITERS)]
    return name, [(body, pool.submit(partial(_create, create, name, gate, body)).result) for body in bodies]


def _create(create: Create, name: str, gate: threading.Barrier, body: bytes) -> bool | None:
    gate.wait()
    try:
        return create(name, body)
    except UnknownOutcomeError:
        return None  # what is stored shows who won


def _winners(store: ObjectStore, name: str, answers: dict[bytes, bool | None]) -> int | None:
    """How many threads won, if that or what is stored is wrong."""
    try:
        stored = store.get(name)
    except NotFoundError:
        stored = b""
    won = [body for body, answer in answers.items() if answer]
    unknown = [body for body, answer in answers.items() if answer is None]
    if not stored and len(unknown) == len(answers):  # of a store that is away or full, nothing is shown
        raise StoreUnavailableError(
            "store-unreachable",
            f"{store.uri(name)}: none of {len(answers)} creates was answered, and nothing is stored. "
            "Earlier commits are untouched.",
            next="check that the store can be reached and has space, then run the same command again",
        )
    right = [stored] == (won or [body for body in unknown if body == stored])
    return None if right else len(won)
