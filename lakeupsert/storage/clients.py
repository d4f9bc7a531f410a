"""Common to the clients of AWS and of Azure: for how long one is kept, and whose requests it counts."""

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TypeVar, TypeVarTuple

from lakeupsert.storage.base import Call, Requests

Given = TypeVarTuple("Given")
Made = TypeVar("Made")

CONNECTIONS = 64
"""Connections that a client keeps. More threads than that still work, with connections that are not kept."""

counted: ContextVar[tuple[Requests, Call]] = ContextVar("counted")
"""How to count this thread's requests. Clients are shared, and send retries by themselves."""


def count(*request: object, **event: object) -> None:
    """To be called by a client for every request that it sends, retries among them."""
    requests, kind = counted.get()
    requests.count(kind)


def kept(variables: str, most: int) -> Callable[[Callable[[*Given], Made]], Callable[[*Given], Made]]:
    """Keep what a function makes of its arguments, at most so many.

    It is kept for this process, because a fork would share connections, and while the environment's variables that begin with
    ``variables`` are unchanged, because they hold the settings and credentials.
    """

    def keep(make: Callable[[*Given], Made]) -> Callable[[*Given], Made]:
        @lru_cache(maxsize=most)
        def made(process: int, environment: object, *given: *Given) -> Made:
            return make(*given)

        @wraps(make)
        def made_here(*given: *Given) -> Made:
            # The names first: each request looks here, and all other values would be decoded for nothing.
            environment = tuple((name, os.environ[name]) for name in sorted(os.environ) if name.startswith(variables))
            return made(os.getpid(), environment, *given)

        return made_here

    return keep
