"""`--log json` and `--verbose`: a line on standard error for each event of a command, of JSON or for people."""

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from lakeupsert.events import Event, Notice, Sink
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


class _StderrLog(logging.Handler):
    """Prints a line for each warning of the libraries, to what standard error is at that time; or gives it to ``log``."""

    def __init__(self, log: Sink | None, level: int) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        # py4j logs every call that an interrupt cuts off, with a traceback, and then raises the interrupt anyway.
        if not is_debugging() and "py4j" in record.pathname:
            return
        text = self.format(record) if is_debugging() else record.getMessage()
        if self._log is not None:
            table, partition = getattr(record, "table", None), getattr(record, "partition", None)
            self._log(Notice(message=text, logger=record.name, table=table, partition=partition))
            return
        with suppress(OSError):  # a night must not fail because its warnings can't be written
            print(without_controls(text), file=sys.stderr)


@contextmanager
def log_to_stderr(log: Sink | None, *, verbose: bool) -> Iterator[None]:
    """Print warnings. If ``verbose``, print everything that lakeupsert itself logs."""
    own = logging.getLogger("lakeupsert")
    level = own.level
    handler = _StderrLog(log, logging.DEBUG if verbose else logging.WARNING)
    logging.getLogger().addHandler(handler)
    if verbose:
        own.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        own.setLevel(level)
        logging.getLogger().removeHandler(handler)


def is_debugging() -> bool:
    return os.environ.get("LAKEUPSERT_DEBUG") == "1"
