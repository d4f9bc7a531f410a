"""An entry of a source's chain: a landing file, and the source's position before and after it."""

import msgspec


class SourceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Counts if its landing file is there, or a batch took the file. An entry without a file always counts.

    Attributes:
        files: how many landing files the source has had up to this entry; its own file's number.
        file: the landing file; empty: no rows came up to this position.
        size, sha256: of the landing file.
        before, after: positions, in the source's own words; None: nothing was read yet.
    """

    files: int
    file: str = ""
    size: int = 0
    sha256: str = ""
    before: str | None
    after: str
