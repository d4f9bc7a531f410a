"""An open table: its declaration, its resources, and its history as far as it was read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from threading import get_ident

from lakeupsert.config import SourceSettings, TableSettings
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.resources import Resources
from lakeupsert.queue import WorkQueue
from lakeupsert.storage.keeping import KeepingStore
from lakeupsert.table.layout import OWN_NAMES


class OpenTable:
    """One table. A function that needs one part of it takes only that part.

    Args:
        origins: the environment variables that settings came from, as in `Config.origins`.
        sources: those of the configuration that land files for it.
        by_folder: it was opened by its folder (`pipeline.by_folder`).
        resources: those of ``settings`` if they are left out.
    """

    def __init__(
        self,
        name: str,
        settings: TableSettings,
        *,
        origins: Mapping[str, str] | None = None,
        sources: Mapping[str, SourceSettings] | None = None,
        by_folder: bool = False,
        resources: Resources | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.sources = sources or {}
        self.declaration = Declaration(name, settings, origins or {}, by_folder=by_folder)
        self.resources = resources or Resources(name, settings)
        self.history = History(self.declaration, self.resources)
        self._keeping: KeepingStore | None = None

    @contextmanager
    def leading(self, *, look: bool = False) -> Iterator[None]:
        """For `append`, `dedupe` and `publish` of the process that leads the table: what it read or wrote before, it takes from
        memory (ADR 0060). Others may commit meanwhile. ``look``: for what they have appended and published by now."""
        objects, resources = self.history.objects, self.resources
        if look:
            objects.held.look()
        if self._keeping is None:
            self._keeping = KeepingStore(objects.store, OWN_NAMES)
        resources.store, objects.held.leader = self._keeping, get_ident()
        try:
            yield
        finally:
            resources.store, objects.held.leader = objects.store, None

    def at_queue(self, queue: WorkQueue) -> "OpenTable":
        """The same table for workers of another queue; see `Resources.at_queue`."""
        other = copy(self)
        other.resources = self.resources.at_queue(queue)
        return other
