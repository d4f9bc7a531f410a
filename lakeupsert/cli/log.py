"""`--log json`: one line of JSON on standard error for each event, warning and error of a command."""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from lakeupsert.events import Event


class JsonLog:
    """Writes events as they happen, from any thread, each as a whole line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = msgspec.json.encode(event).decode() + "\n"
        with self._lock, suppress(OSError):  # a night must not fail because nobody reads its log
            sys.stderr.write(line)
            sys.stderr.flush()


def wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for a log in JSON, also one that can't be parsed."""
    following = [*args[1:], ""]
    return any(
        arg == "--log=json" or (arg, value) == ("--log", "json") for arg, value in zip(args, following, strict=True)
    )
