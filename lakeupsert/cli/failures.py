"""Exceptions as errors that say what to do next."""

import errno
import os
import sys
from pathlib import Path

import click

from lakeupsert.cli.frame import Call
from lakeupsert.cli.signals import Terminated
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError


class InterruptError(LakeupsertError):
    """The user pressed Ctrl-C."""

    exit_code = 130


def as_lakeupsert_error(e: BaseException, call: Call) -> LakeupsertError:
    """Turn the exception that ended a command into an error that says what to do next."""
    if isinstance(e, LakeupsertError) and not (call.terminated and isinstance(e, TryAgainError)):
        return e
    error: LakeupsertError
    if isinstance(e, click.ClickException):
        path = f"lakeupsert {call.command or ''}".strip()  # a failure to parse options has no context
        if isinstance(e, click.UsageError) and e.ctx:
            path = e.ctx.command_path
        return ConfigurationError("usage", e.format_message(), next=f"see `{path} --help`")
    if isinstance(e, KeyboardInterrupt):
        found = "Interrupted. Committed work is kept, and the next call continues from there."
        error = InterruptError("interrupted", found, next="run the same command again at any time")
    elif isinstance(e, Terminated) or call.terminated:  # Spark and worker processes may have received it too
        found = (
            "Stopped by SIGTERM. Committed work is kept, and messages of unfinished partitions are in the queue again."
        )
        error = TryAgainError("terminated", found, next="run the same command again")
    elif isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        instead = "free some space there, then run the same command again"
        error = TryAgainError("disk-full", f"No space is left on the disk: {e}.", next=instead)
    elif isinstance(e, PermissionError):
        found = f"User {os.geteuid()} has no permission for this: {e}."
        error = ConfigurationError("not-permitted", found, next="grant it to this user, or use another path")
    elif problem := _path_problem(e):
        instead = "correct that path or what is there, then run the same command again"
        instead += "; LAKEUPSERT_DEBUG=1 shows what used it"
        error = ConfigurationError("unusable-path", f"{problem}.", next=instead)
    else:
        found = f"This is a bug in lakeupsert. {type(e).__name__}: {_short_text(e)}"
        instead = "run it again with LAKEUPSERT_DEBUG=1, which prints the traceback, and report it"
        error = LakeupsertError("internal-error", found, next=instead)
    error.data_changed = call.changed
    return error


def _path_problem(e: BaseException) -> str | None:
    """Why the operating system can't use a path or a text; None if the error is about something else."""
    if isinstance(e, OSError) and e.filename is not None:
        return f"The operating system can't use {e.filename}: {e.strerror}"
    if isinstance(e, FileNotFoundError) and _working_directory_is_gone():
        return "The current folder no longer exists"
    if isinstance(e, RuntimeError) and "home directory" in str(e):  # from `Path.expanduser`
        return "A path begins with ~, but there is no such home folder"
    if isinstance(e, ValueError) and "embedded null" in str(e):
        return "A path contains a NUL character"
    if isinstance(e, UnicodeEncodeError):
        found = repr(e.object[e.start : e.end])
        if sys.getfilesystemencoding() == "utf-8":
            return f"A name or an argument is not UTF-8: it contains {found}"
        return (
            f"A name contains {found}, which this locale's encoding ({e.encoding}) can't represent; LC_ALL=C.UTF-8 can"
        )
    return None


def _working_directory_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _short_text(e: BaseException) -> str:
    """The exception's text, or only its last line if it quotes a traceback, as Spark's exceptions do."""
    text = str(e).strip()
    return text.splitlines()[-1] if "Traceback (most recent call last)" in text else text
