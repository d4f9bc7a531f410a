"""Metadata objects: JSON that ends with the SHA-256 of all its other bytes, so that a damaged byte is detected.

docs/FORMAT.md, "Digests of metadata".
"""

import hashlib
import re
from collections.abc import Callable

import msgspec

from lakeupsert.decoding import UNREADABLE, Content, decoder_of
from lakeupsert.errors import DamagedTableError

FROM_BACKUP = "restore that object from a backup or from the bucket's own versions"

_FIELD = b',"digest":"'
_END = re.compile(re.escape(_FIELD) + rb'([0-9a-f]{64})"}')
_END_BYTES = len(_FIELD) + 64 + len(b'"}')


def encode(content: object) -> bytes:
    """A msgspec struct (with at least one field) as a JSON object with its digest."""
    data = msgspec.json.encode(content)
    return data[:-1] + _FIELD + _digest_of(data[:-1]) + b'"}'


def decode(data: bytes, type_: type[Content], where: Callable[[], str], what: str, next: str = FROM_BACKUP) -> Content:
    """Read the output of `encode` as ``type_``.

    Raises DamagedTableError, code `damaged-object`, with the address from ``where``: a byte was changed, or the object is not
    ``what``. (``where`` is a function because an address costs as much as all the rest, and is rarely needed.)
    """
    try:
        end = _END.fullmatch(data, len(data) - _END_BYTES) if len(data) >= _END_BYTES else None
        if end is None:
            raise ValueError("it does not end with its digest")
        if end[1] != _digest_of(data[: end.start()]):
            raise ValueError("its digest does not match its bytes")
        return decoder_of(type_).decode(data)
    except (*UNREADABLE, ValueError) as e:
        raise damaged(where(), what, str(e), next) from e


def damaged(where: str, what: str, why: str, next: str = FROM_BACKUP) -> DamagedTableError:
    """The error for an object that exists and can't be read as ``what``."""
    return DamagedTableError(
        "damaged-object",
        f"{where} is damaged and can't be read as {what}: {' '.join(why.split()).rstrip('.')}. Something other than "
        "lakeupsert changed it.",
        next=next,
    )


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
