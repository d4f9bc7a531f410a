"""Objects of metadata: JSON that ends with the SHA-256 of all its other bytes, so that a damaged byte is found.

docs/FORMAT.md, "Digests of metadata". An object that does not end so is one of an earlier lakeupsert, and is read as it is.
"""

import hashlib
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from lakeupsert.errors import DamagedTableError

FROM_BACKUP = "restore that object from a backup or from the bucket's own versions"

_FIELD = b',"digest":"'
_END = re.compile(re.escape(_FIELD) + rb'([0-9a-f]{64})"}')
_END_BYTES = len(_FIELD) + 64 + len(b'"}')

Content = TypeVar("Content")


def encode(content: object) -> bytes:
    """A msgspec struct, which has fields, as a JSON object with its digest."""
    data = msgspec.json.encode(content)
    return data[:-1] + _FIELD + _digest_of(data[:-1]) + b'"}'


def decode(data: bytes, type_: type[Content], where: Callable[[], str], what: str, next: str = FROM_BACKUP) -> Content:
    """What `encode` made, read as ``type_``.

    Raises DamagedTableError, code `damaged-object`, with the address that ``where`` gives: a byte is another, or it is not
    ``what``. (An address costs as much as all the rest, and is seldom asked for.)
    """
    try:
        end = _END.fullmatch(data, len(data) - _END_BYTES) if len(data) >= _END_BYTES else None
        if end is not None and end[1] != _digest_of(data[: end.start()]):
            raise ValueError("its digest is not that of its bytes")
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise damaged(where(), what, str(e), next) from e


def damaged(where: str, what: str, why: str, next: str = FROM_BACKUP) -> DamagedTableError:
    """The error of an object that is there and can't be read as ``what``."""
    return DamagedTableError(
        "damaged-object",
        f"{where} is damaged and can't be read as {what}: {' '.join(why.split()).rstrip('.')}. Something other than "
        "lakeupsert changed it.",
        next=next,
    )


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
