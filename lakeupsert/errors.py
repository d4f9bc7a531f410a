"""The errors of lakeupsert: one class for each thing that an operator does next.

Classes and `code` are API; wording is not. A message has four parts: what failed and where; what was found and what was expected;
what is committed and what readers see; and, in `next`, the command to run now.
"""

import re
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Standing:
    """The state of a table after a failed call.

    Attributes:
        committed: the last batch that this call committed; None: none. (Merges commit no batch.)
        readers_see: the newest snapshot; None: there is none, or it can't be read.
        certain: whether ``committed`` is known. If not, a store that did not answer may have committed a batch.
        table: its name, if the call was about several tables.
        published: whether this call published ``readers_see``.
    """

    committed: int | None
    readers_see: int | None
    certain: bool = True
    table: str | None = None
    published: bool = False

    def __str__(self) -> str:
        nothing = "no batch" if self.certain else "unknown"
        committed = nothing if self.committed is None else f"batch {self.committed}"
        of = f" of table {self.table!r}" if self.table else ""
        seen = "" if self.readers_see is None else f" · Readers see: snapshot {self.readers_see}"
        seen += ", published by this call" if seen and self.published else ""
        return f"Committed: {committed}{of}{seen}"


class LakeupsertError(Exception):
    """Base of all errors that lakeupsert raises on purpose.

    Attributes:
        code: a stable word for programs, for example ``unknown-setting``.
        data_changed: whether the failed call left a change that readers can see.
        next: the command or action that resolves the error; never empty.
        partition: the affected partition, for example ``transaction_date=2020-01-01``, or None.
        standing: the state of the table; None until a call of `Table` ends with this error.
    """

    exit_code = 1

    def __init__(
        self, code: str, message: str, *, next: str, data_changed: bool = False, partition: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.next = next
        self.data_changed = data_changed
        self.partition = partition
        self.standing: Standing | None = None

    def __str__(self) -> str:
        standing = "" if self.standing is None else f"{self.standing} · "
        return f"{self.message}\n{standing}Next: {self.next}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled (by workers, Spark tasks). The default would call __init__ with the message alone.
        kind = partial(type(self), next=self.next, data_changed=self.data_changed, partition=self.partition)
        return kind, (self.code, self.message), {"standing": self.standing}


def split_text(text: str) -> tuple[str, str]:
    """Split an error's text, as in a failed mark or a dead letter, into message and next command ("" if it has none)."""
    reason, *advice = re.split(r"\n(?:Committed: [^\n]* · )?Next: ", text, maxsplit=1)
    return reason, advice[0] if advice else ""


_OBJECT_ID = re.compile("[0-9a-f]{32}")


def cause_of(text: str, partition: str) -> str:
    """The first line of an error without the ``partition`` and the ids of objects: equal if several fail for one cause."""
    return _OBJECT_ID.sub("", text.partition("\n")[0].replace(partition, ""))


class ConfigurationError(LakeupsertError):
    """Change the command line, the configuration or the machine, then run again."""

    exit_code = 2


class ExecutorError(ConfigurationError):
    """Change the machines or the settings of Spark's executors. No partition is at fault, so none is marked failed."""


class RefusedError(LakeupsertError):
    """Data were refused or held back: look at them, then decide."""

    exit_code = 1


class TaskDiedError(RefusedError):
    """The process of a Spark task was killed, or ran out of memory."""


class TryAgainError(LakeupsertError):
    """Nothing is wrong with the data or the settings: run the same command again later."""

    exit_code = 75


class DamagedTableError(LakeupsertError):
    """An object of the table is missing or damaged: nothing is written until that is repaired."""

    exit_code = 1
