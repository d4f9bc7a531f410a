"""The errors of lakeupsert, one class for each thing that an operator does next.

Classes and `code` are API; wording is not. A message has four parts: what failed and where, what was found against what
was expected, whether data changed, and (in `next`) the command to run now.
"""


class LakeupsertError(Exception):
    """Base of all errors that lakeupsert raises on purpose.

    Attributes:
        code: a stable word for programs, such as ``unknown-setting``.
        data_changed: whether the failed call left a change behind that readers can see.
        next: the command or act that mends it; never empty.
        partition: the partition it is about, as ``transaction_date=2020-01-01``, or None.
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

    def __str__(self) -> str:
        return f"{self.message}\nData changed: {'yes' if self.data_changed else 'no'}. Next: {self.next}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (workers, Spark tasks); the default would call __init__ with the message alone.
        return _rebuild, (type(self), self.code, self.message, self.next, self.data_changed, self.partition)


def _rebuild(
    cls: type[LakeupsertError], code: str, message: str, next: str, data_changed: bool, partition: str | None
) -> LakeupsertError:
    return cls(code, message, next=next, data_changed=data_changed, partition=partition)


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
