"""Upserts for plain Parquet data lakes: newest record wins, per partition and key."""

from typing import TYPE_CHECKING

from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError, TryAgainError

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.endpoint.client import Client

__all__ = [
    "Client",
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
    """Import `Table` and `Client` on demand: they import Arrow, which would slow `lakeupsert --help` down."""
    if name == "Table":
        from lakeupsert.api import Table

        return Table
    if name == "Client":
        from lakeupsert.endpoint.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
