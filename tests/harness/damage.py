"""Damage to what was appended for some partitions: their row groups in a pack."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lakeupsert.rows.checksums import MAGIC
from lakeupsert.rows.packs import open_pack
from lakeupsert.storage.local import LocalStore
from lakeupsert.table.manifest import DataFile


def damage(root: Path, *files: DataFile, cut: int = 0) -> Callable[[], None]:
    """Overwrite the files' bytes, but for the first ``cut`` ones, below the processed zone ``root``. All are in one pack.

    Call what this returns to mend them.
    """
    [name] = {file.name for file in files}
    pack, path = open_pack(LocalStore(root), name), root / name
    good = path.read_bytes()
    bad = bytearray(good)
    for file in files:
        begin = int(pack.bytes[np.searchsorted(pack.rows, file.row or 0)]) or len(MAGIC)
        bad[begin + cut : begin + file.bytes] = bytes(file.bytes - cut)
    path.write_bytes(bad)
    return lambda: write(path, good)


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
