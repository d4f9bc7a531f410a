"""The account that `ingest` and `maintain` give of a table: sums over all rounds, warnings, and the last error."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from lakeupsert.cli.every_night.signs import Signs
from lakeupsert.cli.frame import Answer, Call

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.errors import LakeupsertError

log = logging.getLogger(__name__)


class Account:
    """Sums and warnings of the rounds of one table. A subclass takes their results.

    Attributes:
        error: why the last round that may fail left work undone; None: it left none.
    """

    def __init__(self, call: Call, table: "Table", signs: Signs) -> None:
        from lakeupsert.operations.rounds import Warner  # imports Arrow

        self.call, self.table, self.signs = call, table, signs
        self._warn = Warner(partial(log.warning, "%s: %s", table.name))
        self.sums = Counter[str]()
        self.error: LakeupsertError | None = None

    def repeat(self, rounds: Callable[..., None], **options: object) -> None:
        """Call ``rounds``, which go on until the command is stopped."""
        self.signs.watch(self.table)
        with self.call.stoppable() as stop:
            rounds(
                **options,
                stop=stop,
                calls_at_once=len(self.call.tables),
                alive=self.signs.alive,
                trouble=partial(self.signs.trouble, self.table.name),
                warn=self._warn,
            )

    def show(self, warnings: Iterable[str], error: "LakeupsertError | None" = None) -> None:
        for text in (*warnings, *([f"{error.message} Next: {error.next}"] if error else [])):
            self._warn(text)

    def answer(self, result: dict[str, object], text: str) -> Answer:
        return Answer(result, text, json_warnings=tuple(self._warn.shown_at), error=self.error)
