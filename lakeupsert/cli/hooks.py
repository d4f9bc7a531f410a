"""`on_success` and `on_failure`: what `lakeupsert run` calls at its end, with its JSON object.

A hook has `HOOK_SECONDS` to end. One that fails, or takes longer, is a warning: it changes neither the table nor the exit code.
"""

import base64
import http.client
import os
import signal
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote_to_bytes, urlsplit

from lakeupsert import __version__
from lakeupsert.config import Hook
from lakeupsert.errors import ConfigurationError
from lakeupsert.retries import HOOK_SECONDS
from lakeupsert.variables import expand, references


class HookError(Exception):
    """A hook failed. The text says why, without what may be secret."""


def call_hook(name: str, hook: Hook, document: str, folder: Path | None) -> str | None:
    """Call a hook with ``document``. Returns a warning if it fails, else None.

    ``folder``: of the configuration, to which the path of a program is relative; None if it was read from a URL.
    """
    try:
        given = hook if isinstance(hook, str) else list(hook)
        ready = expand(given, name, os.environ, secrets=True)
        if isinstance(ready, str):
            _post(ready, document.encode())
        else:
            assert isinstance(ready, list)
            _run([str(argument) for argument in ready], document.encode(), folder)
    except ConfigurationError as e:
        reason = e.message
    except HookError as e:
        reason = _without_values(f"{name}: {e}", hook)
    else:
        return None
    return f"{reason.rstrip('.')}. The commits and the exit code of this command stay the same."


def _without_values(text: str, hook: Hook) -> str:
    """The text with the variables of the hook in place of their values, longer values first: they may contain others."""
    values = {os.environ[variable]: variable for variable in references(hook if isinstance(hook, str) else list(hook))}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, f"${{{values[value]}}}")
    return text


# ---------------------------------------------------------------- commands


def _run(arguments: Sequence[str], document: bytes, folder: Path | None) -> None:
    program = arguments[0]
    if folder is not None and "/" in program:
        program = str(folder / program)
    # Files instead of pipes: a hook may read nothing, write much, and leave processes behind that hold its streams.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(document)
        given.seek(0)
        try:
            process = subprocess.Popen(
                [program, *arguments[1:]], stdin=given, stdout=said, stderr=said, start_new_session=True
            )
        except (OSError, ValueError) as e:  # ValueError: a character that no argument may have
            raise HookError(f"{program} can't be started: {getattr(e, 'strerror', e)}") from e
        try:
            code = process.wait(HOOK_SECONDS)
        except BaseException as e:  # a signal ends the hook, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(e, subprocess.TimeoutExpired):
                raise HookError(f"{program} did not end within {HOOK_SECONDS:.0f} seconds and was killed") from e
            raise HookError(f"{program} was killed, because this command was stopped") from e
        if code:
            raise HookError(f"{program} ended with exit code {code}{_last_line(said)}")


def _last_line(said: BinaryIO) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


# ---------------------------------------------------------------- webhooks


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would follow a redirection with GET, and the object would be lost."""

    def redirect_request(self, *args: object) -> None:
        return None


def _post(address: str, document: bytes) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise HookError("it is not an https or http address")
    failures: list[HookError] = []

    def post() -> None:
        try:
            _send(address, document)
        except HTTPError as e:  # its reason is whatever the server says, for example a part of the address
            failures.append(
                HookError(f"{parts.hostname} answered {e.code} {http.client.responses.get(e.code, '')}".strip())
            )
        except URLError as e:
            failures.append(HookError(f"{parts.hostname} can't be reached: {e.reason}"))
        except (OSError, ValueError, http.client.HTTPException) as e:
            failures.append(HookError(f"{parts.hostname} gave no answer: {type(e).__name__}"))

    # The time limit of a socket is for each byte, so a server that dawdles would exceed it.
    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    try:
        thread.join(HOOK_SECONDS)
    except BaseException as e:
        raise HookError(f"this command was stopped before {parts.hostname} answered") from e
    if thread.is_alive():
        raise HookError(f"{parts.hostname} did not answer within {HOOK_SECONDS:.0f} seconds")
    if failures:
        raise failures[0]


def _send(address: str, document: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": f"lakeupsert/{__version__}"}
    parts = urlsplit(address)
    user, at, server = parts.netloc.rpartition("@")
    if at:  # urllib would look for a server of that whole name
        headers["Authorization"] = f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}"
    address = parts._replace(netloc=server).geturl()
    request = urllib.request.Request(address, data=document, headers=headers, method="POST")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=HOOK_SECONDS):
        pass
