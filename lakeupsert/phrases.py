"""Parts of messages that several rooms need."""

import re
import shlex
import sys
from importlib import metadata
from json import loads
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FILE_URL = re.compile(r"file://(/[\w.~%/-]*[\w~%/-])")
"""As `Path.as_uri` writes them: whatever is no letter or digit and not one of these is encoded."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys. They come with names of files, partition values and rows."""


def count(n: int, noun: str, ending: str = "s") -> str:
    """A number of things: ``1 file``, ``2,000 files``. ``ending``: what more than one of them end in."""
    return f"{n:,} {noun}{'' if n == 1 else ending}"


def no_folder(path: Path) -> str:
    """What is wrong with a path that should be a folder and is none."""
    return "is not a folder" if path.exists() else "does not exist"


def describe_place(position: int | None, line: int | None) -> str:
    """Where a refused row begins in its landing file, after the file's name."""
    if line is not None:
        return f", line {line} (byte {position})"
    return "" if position is None else f", place {position}"


def without_controls(text: str) -> str:
    """A text for a terminal, with escapes in place of the characters that a terminal obeys."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shell_paths(text: str) -> str:
    """A text for people with its `file:` URLs as paths that a shell takes."""
    return _FILE_URL.sub(lambda url: shlex.quote(unquote(url[1])), text)


def install(requirement: str) -> str:
    """The command that installs a package for the Python that runs now, whichever `pip` comes first in the shell."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(requirement)}"


def install_extra(extra: str) -> str:
    """The command that adds an extra of lakeupsert, from where this lakeupsert was installed: a folder, a wheel or an index."""
    return install(f"{_installed_from()}[{extra}]")


def _installed_from() -> str:
    try:
        origin = metadata.distribution("lakeupsert").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a folder on the path, as in an image of functions
        origin = None
    address = urlsplit(loads(origin)["url"]) if origin else None
    return unquote(address.path) if address and address.scheme == "file" else "lakeupsert"
