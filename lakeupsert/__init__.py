"""Upserts for plain Parquet data lakes: newest record wins, per partition and key."""

from typing import TYPE_CHECKING

from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError, TryAgainError

if TYPE_CHECKING:
    from lakeupsert.api import Table

__all__ = [
    "ConfigurationError",
    "DamagedTableError",
    "LakeupsertError",
    "RefusedError",
    "Table",
    "TryAgainError",
    "__version__",
]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    """Import `Table` on demand: it imports Arrow, which would slow `lakeupsert --help` down."""
    if name == "Table":
        from lakeupsert.api import Table

        return Table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
