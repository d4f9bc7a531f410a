"""A landing zone in which some files end whoever reads their rows, by their names. They hold nothing that would harm a reader."""

import os
import signal
import sys
from importlib import import_module
from typing import Any

import pyarrow as pa

from lakeupsert import Table
from lakeupsert.config import TableSettings
from lakeupsert.landing.files import Reader
from lakeupsert.operations.init.propose import propose
from lakeupsert.pipeline.append import trial
from lakeupsert.storage import LocalStore

_read = Reader.of
_read_whole = trial._read
_merge = import_module("lakeupsert.cli.set_up.try")._merge


class EndingStore(LocalStore):
    """Whoever unpickles it imports this module, and so reads as below."""

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        if "ends-abort" in name and name.endswith(".parquet"):
            os.abort()
        return super().open(name, etag)


def _of(source: Any, file: Any, *given: Any) -> Reader:
    if "ends-abort" in file.path:
        os.abort()
    if "ends-never" in file.path:
        signal.pause()
    while "ends-busy" in file.path:
        pass
    if "ends-huge" in file.path:
        bytearray(1 << 46)
    return _read(source, file, *given)


Reader.of = staticmethod(_of)  # type: ignore[assignment, method-assign]


def opened(root: str, **settings: Any) -> Table:
    given: dict[str, Any] = {"landing": f"{root}/landing", "processed": f"{root}/processed", "key": ("id",), **settings}
    table = Table("t", TableSettings(partition_by=(), order_by=("id",), **given))
    table._table.resources.landing = EndingStore(f"{root}/landing")
    return table


# Other processes find these by this module, and so read as above.


def propose_here(*given: Any) -> Any:
    return propose(*given)


def read_here(*given: Any) -> None:
    _read_whole(*given)


def merge_here(*given: Any) -> Any:
    return _merge(*given)


def main() -> None:
    """Take what landed in the folder that the first argument names, on the host of the second, and print the warnings."""
    result = opened(sys.argv[1]).run(host=sys.argv[2]).append  # type: ignore[arg-type]
    print("\n".join(result.warnings if result else ()))
