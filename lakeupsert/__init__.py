"""Upserts for plain Parquet data lakes: newest record wins, per partition and key."""

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """`Table` on demand: it brings Arrow with it, which `lakeupsert --help` need not wait for."""
    if name == "Table":
        from lakeupsert.api import Table

        return Table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
