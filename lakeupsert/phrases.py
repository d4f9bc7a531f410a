"""Parts of messages that several rooms need: numbers, times, lists of names, paths, commands."""

import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from json import loads
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FILE_URL = re.compile(r"file://(/[\w.~%/-]*[\w~%/-])")
"""As `Path.as_uri` writes them: whatever is no letter or digit and not one of these is encoded."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys. They come with names of files, partition values and rows."""

MOST_NAMES = 3
"""How many partitions a text names before it only counts the rest."""

BELOW_MAIN = 'in your own script, call it below `if __name__ == "__main__":`, because each process that it starts runs the script'


def count(n: int, noun: str, ending: str = "s") -> str:
    """A number of things: ``1 file``, ``2,000 files``. ``ending``: what more than one of them end in."""
    return f"{n:,} {noun}{'' if n == 1 else ending}"


def when(moment: datetime | str) -> str:
    """A time for people, in this form everywhere: ``2020-01-31 02:14:05 UTC``. As text it is ISO 8601, by default in UTC."""
    time = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return f"{time.astimezone(UTC) if time.tzinfo else time:%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """A length of time for people: ``250 ms``, ``1.5 s``, ``2 min 5 s``, ``3 h 10 min``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:,.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = minutes // 60
    large, unit, small, name = (minutes, "min", rest, "s") if minutes < 60 else (hours, "h", minutes % 60, "min")
    if hours >= 48:
        large, unit, small, name = hours // 24, "d", hours % 24, "h"
    return f"{large:,} {unit} {small} {name}" if small else f"{large:,} {unit}"


def with_advice(found: str, advice: str) -> str:
    """A warning of two sentences, without the last full stop: what was found, and what to do."""
    return f"{found}. {advice[0].upper()}{advice[1:]}"


def size(n: float) -> str:
    """Bytes in decimal units: ``900 B``, ``1.5 MB``."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while n >= 1000 and len(units) > 1:
        n, _ = n / 1000, units.pop()
    return f"{n:,.{0 if units[-1] == 'B' else 1}f} {units[-1]}"


def short_list(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


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
