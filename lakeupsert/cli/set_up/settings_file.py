"""Parts of the text of a configuration file."""

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

WIDTH = 118
"""Line width of comments."""


def comments(lines: Sequence[str]) -> list[str]:
    return [f"# {part}" for line in lines for part in textwrap.wrap(plain(line), WIDTH, subsequent_indent="  ")]


def plain(text: str) -> str:
    """Replace control characters: TOML comments must not contain them, and terminals obey them."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


def relative_path(address: str, folder: Path) -> str:
    """Relative to the configuration if it is below its folder, so that both can be moved together."""
    return os.path.relpath(address, folder) if folder in Path(address).parents else address
