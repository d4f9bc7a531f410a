"""`--log json` and `--verbose`: a line on standard error for each event of a command, of JSON or for people."""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from lakeupsert.events import Event
from lakeupsert.phrases import when, without_controls


class JsonLog:
    """Writes events as they happen, from any thread, each as a whole line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = msgspec.json.encode(event).decode() + "\n"
        with self._lock, suppress(OSError):  # a night must not fail because nobody reads its log
            sys.stderr.write(line)
            sys.stderr.flush()


class TextLog:
    """Writes the figures of each event, as it happens."""

    hidden = frozenset({"event", "at", "table", "entry", "earlier", "requests"})
    """Fields that only programs need, and those with a place of their own in the line."""

    def __call__(self, event: Event) -> None:
        fields = msgspec.to_builtins(event)
        figures = [f"{name}={value}" for name, value in fields.items() if name not in self.hidden and value is not None]
        with suppress(OSError):  # as above
            line = " ".join([when(event.at), event.table or "-", fields["event"], *figures])
            print(without_controls(line), file=sys.stderr, flush=True)


def wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for a log in JSON, also one that can't be parsed."""
    following = [*args[1:], ""]
    return any(
        arg == "--log=json" or (arg, value) == ("--log", "json") for arg, value in zip(args, following, strict=True)
    )


def is_verbose(args: Sequence[str]) -> bool:
    return not {"-v", "--verbose"}.isdisjoint(args)
