"""The errors of lakeupsert, one class for each thing that an operator does next.

Classes and `code` are API; wording is not. A message has four parts: what failed and where, what was found against what
was expected, what is committed and what readers see, and (in `next`) the command to run now.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """Where a table stands after a call that failed.

    Attributes:
        committed: the last batch that this call committed; None: none. (Merges commit no batch; what they do is told apart.)
        readers_see: the newest snapshot; None: there is none, or it can't be read.
        certain: whether ``committed`` is known; else a store that does not answer may have committed a batch.
        table: which one, if the call was about several.
        published: whether this call published what readers see.
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
        code: a stable word for programs, such as ``unknown-setting``.
        data_changed: whether the failed call left a change behind that readers can see.
        next: the command or act that mends it; never empty.
        partition: the partition it is about, as ``transaction_date=2020-01-01``, or None.
        standing: where the table stands; None as long as no call of `Table` has ended with this error.
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
        # Exceptions cross process borders (workers, Spark tasks); the default would call __init__ with the message alone.
        given = (type(self), self.code, self.message, self.next, self.data_changed, self.partition)
        return _rebuild, given, {"standing": self.standing}


def _rebuild(
    cls: type[LakeupsertError], code: str, message: str, next: str, data_changed: bool, partition: str | None
) -> LakeupsertError:
    return cls(code, message, next=next, data_changed=data_changed, partition=partition)


def parts(told: str) -> tuple[str, str]:
    """The message and the next command of an error's text, as a mark or a dead letter keeps it; "" where it has none.

    Also of one that an earlier lakeupsert wrote, with ``Data changed: no.`` before the command.
    """
    reason, *advice = re.split(r"\n(?:Data changed: no\. |Committed: [^\n]* · )?Next: ", told, maxsplit=1)
    return reason, advice[0] if advice else ""


class ConfigurationError(LakeupsertError):
    """Change the command line, the configuration or the machine, then run again."""

    exit_code = 2


class RefusedError(LakeupsertError):
    """The data were refused or held back: look at them, then decide."""

    exit_code = 1


class TryAgainError(LakeupsertError):
    """Nothing is wrong with the data or the settings: run the same command again later."""

    exit_code = 75


class DamagedTableError(LakeupsertError):
    """An object of the table is missing or not what its manifest says: nothing is written until that is mended."""

    exit_code = 1
