"""Signals and the standard streams of the process."""

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO


class Terminated(BaseException):
    """SIGTERM arrived outside a block that can stop by itself, or for the second time."""


def send_sigterm() -> None:
    """Act as a second SIGTERM does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextmanager
def signal_handler(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Use this handler while the block runs. Only the main thread can; in others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def no_signals() -> Iterator[None]:
    with signal_handler(signal.SIGTERM, signal.SIG_IGN), signal_handler(signal.SIGINT, signal.SIG_IGN):
        yield


def open_streams() -> None:
    """Open missing standard streams (`>&-`) on the null device, and make them accept every character.

    Otherwise the next opened file, for example a data file, would become standard output for every library that prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  stays open until the process ends
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def reader_is_gone() -> bool:
    """Whether the reader of standard output has closed its end."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def redirect_to_null(stream: TextIO) -> None:
    """Discard all further output, including what Python flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
