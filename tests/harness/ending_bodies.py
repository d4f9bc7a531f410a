"""A reader of bodies that some bodies end, by a word in them. They hold nothing that would harm a reader."""

import os
import time
from pathlib import Path
from typing import Any

from lakeupsert.endpoint import check

_read = check._read


def read(name: str, file: Any, data: bytes, *given: Any) -> Any:
    if b"ends-abort" in data:
        os.abort()
    if b"ends-never" in data:
        while True:
            pass
    if b"ends-huge" in data:
        bytearray(1 << 46)
    if b"waits-for|" in data:
        place = Path(data.split(b"|")[1].decode())
        place.with_suffix(f".{os.getpid()}").touch()
        while not place.exists():
            time.sleep(0.01)
    return _read(name, file, data, *given)


def begin() -> None:
    """The processes in which this one reads bodies find the function by its module."""
    vars(check)["_read"] = read
