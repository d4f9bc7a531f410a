"""An open table: its declaration, its resources, and its history as far as it was read."""

from collections.abc import Mapping
from copy import copy

from lakeupsert.config import TableSettings
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.resources import Resources


class OpenTable:
    """One table. A function that needs one part of it takes only that part.

    Args:
        origins: the environment variables that settings came from, as in `Config.origins`.
        by_folder: it was opened by its folder (`pipeline.by_folder`).
        resources: those of ``settings`` if they are left out.
    """

    def __init__(
        self,
        name: str,
        settings: TableSettings,
        *,
        origins: Mapping[str, str] | None = None,
        by_folder: bool = False,
        resources: Resources | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.declaration = Declaration(name, settings, origins or {}, by_folder=by_folder)
        self.resources = resources or Resources(name, settings)
        self.history = History(self.declaration, self.resources)

    def at_large_queue(self) -> "OpenTable":
        """The same table for the workers of its large partitions; see `Resources.at_large_queue`."""
        other = copy(self)
        other.resources = self.resources.at_large_queue()
        return other
