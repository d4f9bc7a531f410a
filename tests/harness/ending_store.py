"""A landing zone in which some files end whoever reads their rows, by their names. They hold nothing that would harm a reader."""

import os
import signal
import sys
from typing import Any

from lakeupsert import Table
from lakeupsert.config import TableSettings
from lakeupsert.landing.files import Reader
from lakeupsert.storage import LocalStore

_read = Reader.of


class EndingStore(LocalStore):
    """Whoever unpickles it imports this module, and so reads as below."""


def _of(source: Any, file: Any, *given: Any) -> Reader:
    if "ends-abort" in file.path:
        os.abort()
    if "ends-never" in file.path:
        signal.pause()
    if "ends-huge" in file.path:
        bytearray(1 << 46)
    return _read(source, file, *given)


Reader.of = staticmethod(_of)  # type: ignore[assignment, method-assign]


def opened(root: str, **settings: Any) -> Table:
    given: dict[str, Any] = {"landing": f"{root}/landing", "processed": f"{root}/processed", "key": ("id",), **settings}
    table = Table("t", TableSettings(partition_by=(), order_by=("id",), **given))
    table._table.resources.landing = EndingStore(f"{root}/landing")
    return table


def main() -> None:
    """Take what landed in the folder that the first argument names, on the host of the second, and print the warnings."""
    result = opened(sys.argv[1]).run(host=sys.argv[2]).append  # type: ignore[arg-type]
    print("\n".join(result.warnings if result else ()))
