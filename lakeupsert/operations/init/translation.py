"""A table's settings from another system: what `from_chombo`, `from_hive` and `from_database` return."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import LocalStore, ObjectReader, open_landing

Value = str | bool | tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A setting of ``[tables.NAME]``, by its dotted name (``read.delimiter``), or of ``[sources.NAME]`` by its whole name
    (``sources.shop.from``), and what it comes from."""

    name: str
    value: Value
    origin: str


@dataclass(frozen=True)
class Leftover:
    """What the file says and no setting of lakeupsert does, and why.

    Attributes:
        line: of the file, counted from 1.
    """

    name: str
    value: str
    line: int
    reason: str


@dataclass(frozen=True)
class Translation:
    """The settings of one table, in the order in which people read them.

    Attributes:
        next: what to do once the configuration is written.
    """

    table: str
    settings: tuple[Setting, ...]
    leftovers: tuple[Leftover, ...]
    warnings: tuple[str, ...]
    next: str

    def text(self, name: str) -> str:
        """The value of a setting that is text and that every translation has: ``landing``, ``processed``."""
        return next(s.value for s in self.settings if s.name == name and isinstance(s.value, str))


@dataclass(frozen=True)
class SourceFile:
    """The other system's file, which errors name with a line. ``option`` is the option of `init` that names it."""

    path: str
    option: str

    def read(self) -> bytes:
        """Raises ConfigurationError if the file can't be read."""
        try:
            return Path(self.path).expanduser().read_bytes()
        except OSError as e:
            reason = e.strerror or str(e)
            raise ConfigurationError(
                "unreadable-source",
                f"{self.path} can't be read: {reason}. Nothing was written.",
                next=f"name a readable file with {self.option}",
            ) from e

    @property
    def command_with_path(self) -> str:
        """The command that names the landing zone."""
        return f"`lakeupsert init {self.option} {shlex.quote(self.path)} PATH`"

    def error(
        self, code: str, line: int | None, message: str, *, change: str = "correct that", next: str | None = None
    ) -> ConfigurationError:
        """An error about one line of the file, or about the whole file.

        ``next`` is the next command; by default, ``change`` the file and try again.
        """
        where = f"{self.path}, line {line}" if line else self.path
        again = f"{change} in a copy of the file, then run `lakeupsert init` with the copy as {self.option}"
        return ConfigurationError(code, f"{where}: {message} Nothing was written.", next=next or again)

    def contradiction(self, line: int, name: str, value: str, why: str) -> ConfigurationError:
        return self.error("contradictory-source", line, f"{name} is {value!r}, but {why}.")

    def open_landing(self, address: str, line: int | None) -> tuple[ObjectReader, str]:
        """The landing zone at ``address``, and its root as a setting has it.

        Raises ConfigurationError if lakeupsert can't open such an address, which the file has in ``line``; None: it was given.
        """
        try:
            store = open_landing(address)
        except ConfigurationError as e:
            if line is None:
                raise
            raise ConfigurationError(
                e.code,
                f"{self.path}, line {line}: {e.message}",
                next=f"{e.next}; or copy the files to a folder or bucket, and give its address: {self.command_with_path}",
            ) from e
        return store, store.root if isinstance(store, LocalStore) else store.uri()
