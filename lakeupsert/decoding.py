"""JSON and plain values as classes of ours, in any thread.

msgspec (0.22.0) looks into a class at its first use without a lock, and the process dies if two threads do so at once. So its
decoders are made here only; ruff refuses them elsewhere (`banned-api` in pyproject.toml).
"""

import threading
from typing import TypeVar

import msgspec

Content = TypeVar("Content")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of decoders for bytes of others: no JSON or other fields, no UTF-8, too many brackets."""
_first_use = threading.Lock()


def decoder_of(type_: type[Content]) -> msgspec.json.Decoder[Content]:
    with _first_use:
        return msgspec.json.Decoder(type_)


def convert(value: object, type_: type[Content]) -> Content:
    """Raises msgspec.ValidationError."""
    decoder_of(type_)
    return msgspec.convert(value, type_)
