"""A connection to a database by the drivers among Debezium's jars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

import jpype

from lakeupsert.config import DatabaseSource
from lakeupsert.errors import ConfigurationError, TryAgainError

Row = tuple[str | None, ...]


Problem = tuple[str, str]
"""A fault of a database, or a reason for a warning, and what to do."""
BEGIN_AGAIN = 'begin again with another source, see "Begin again" in docs/CAPTURE.md'


@dataclass(frozen=True)
class Prepared:
    """A database that may be followed.

    Attributes:
        left_out: columns that are not followed.
        lacks_long: whether updates may lack long values that they did not change.
        is_read: whether a program follows it right now.
    """

    left_out: tuple[str, ...]
    warnings: tuple[Problem, ...]
    lacks_long: bool = False
    is_read: bool = False


_WRONG = ("28", "3D")
"""Classes of SQL states: who asks is not let in, or there is no such database."""
_REFUSED = (*_WRONG, "0A", "22", "23", "42", "55000", "53400")
"""The same statement will be refused again: a right or an object is missing, or a limit of the configuration is reached."""


class StatementError(Exception):
    """The database refused a statement, and will refuse it again, in its words."""


class Connection:
    """Runs statements, each as one transaction."""

    def __init__(self, kind: str, settings: DatabaseSource, password: str) -> None:
        server, self._settings = settings.server, settings
        properties = jpype.JClass("java.util.Properties")()
        properties.setProperty("user", unquote(server.username or ""))
        properties.setProperty("password", password)
        address = f"jdbc:{kind}://{server.hostname}{f':{server.port}' if server.port else ''}{server.path}"
        try:
            self._connection = jpype.JClass("java.sql.DriverManager").getConnection(address, properties)
        except jpype.JClass("java.sql.SQLException") as e:
            if str(e.getSQLState()).startswith(_WRONG):
                problem = str(e.getMessage()), "correct the user, the password or the database"
                raise unfit(settings, [problem]) from None
            raise unreachable(settings, str(e.getMessage())) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def rows(self, statement: str, *parameters: str) -> list[Row]:
        """The rows of a query, as text. Raises StatementError, and TryAgainError if it may work later."""
        try:
            prepared = self._connection.prepareStatement(statement)
            for number, value in enumerate(parameters, 1):
                prepared.setString(number, value)
            if not prepared.execute():
                return []
            found, rows = prepared.getResultSet(), []
            width = range(1, found.getMetaData().getColumnCount() + 1)
            while found.next():
                values: Sequence[object] = [found.getString(number) for number in width]
                rows.append(tuple(None if value is None else str(value) for value in values))
            return rows
        except jpype.JClass("java.sql.SQLException") as e:
            if str(e.getSQLState()).startswith(_REFUSED):
                raise StatementError(str(e.getMessage()).rstrip(".")) from None
            raise unreachable(self._settings, str(e.getMessage())) from None


def unfit(settings: DatabaseSource, problems: Sequence[Problem]) -> ConfigurationError:
    found, then = zip(*problems, strict=True)
    return ConfigurationError(
        "source-unfit", f"{settings.from_} can't be followed: {'; '.join(found)}.", next="; ".join(dict.fromkeys(then))
    )


def unreachable(settings: DatabaseSource, why: str) -> TryAgainError:
    return TryAgainError(
        "source-unreachable",
        f"{settings.from_}: {why.rstrip('.')}. No change is lost: the database keeps it until this source has landed it.",
        next="start the database, or correct the address",
    )
