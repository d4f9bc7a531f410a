"""The roles that a configuration gives to columns, as text and as stored: ordering, partition columns, groups, deletes."""

import re
from collections.abc import Iterable

import msgspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError


class DeleteRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rows are deletes: rows whose ``column``, as text, is one of ``values``, and all rows of files with a name prefix.

    Attributes:
        keep: the column stays in base rows.
        upserts: the values of all other rows; a row with another value goes to quarantine. None: any value is allowed.
        file_prefix: name prefix (without folders) of files that contain only deletes.
        not_null: in place of all these except `keep`: rows with a value in this column are deletes.
    """

    column: str | None = None
    values: tuple[str, ...] = ()
    keep: bool = False
    upserts: tuple[str, ...] | None = None
    file_prefix: str | None = None
    not_null: str | None = None

    @property
    def operation(self) -> str | None:
        """The column that decides which rows are deletes."""
        return self.column or self.not_null


_ORDERING = re.compile(r"(?is)(?:`(.+)`|(.+?))(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?\s*")


class Ordering(msgspec.Struct, frozen=True):
    """An ordering column, as in a window's ORDER BY whose first row wins: the greatest value, or the least if ``ascending``.

    Null loses to every value, unless ``nulls_first``.
    """

    column: str
    ascending: bool = False
    nulls_first: bool = False

    @classmethod
    def parse(cls, text: str) -> "Ordering":
        """Parse `column [asc|desc] [nulls first|last]`, by default ``desc nulls last``. The column may be in backquotes."""
        match = _ORDERING.fullmatch(text)
        if match is None:
            return cls(text)
        quoted, plain, direction, nulls = match.groups()
        return cls(quoted or plain, (direction or "").lower() == "asc", (nulls or "").lower() == "first")

    def __str__(self) -> str:
        column = self.column if Ordering.parse(self.column) == Ordering(self.column) else f"`{self.column}`"
        return f"{column}{' asc' if self.ascending else ''}{' nulls first' if self.nulls_first else ''}"


class ColumnGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of another source, with their own ordering. ``order_by`` is as in `Ordering.parse`."""

    name: str
    order_by: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def ordering(self) -> tuple[Ordering, ...]:
        return tuple(map(Ordering.parse, self.order_by))

    @property
    def all_columns(self) -> tuple[str, ...]:
        return (*(o.column for o in self.ordering), *self.columns)


# A source's name may contain balanced parentheses, the new column's name none. Otherwise two expressions in one text, for example
# `date(at), month(at)` or `date(at) as day, month(at)`, would match.
_EXPRESSION = re.compile(r"(?is)(year|month|date|hour)\(((?:[^()]|\([^()]*\))+)\)(?:\s+as\s+([^(),]+))?")


_QUOTED = r"\s*(?:`[^`]+`|[^`(),\s](?:[^`(),]*[^`(),\s])?)\s*"


_BUCKET = re.compile(rf"(?is)bucket\(\s*(\d+)\s*((?:,{_QUOTED})+)\)(?:\s+as\s+([^(),]+))?")


MOST_BUCKETS = 65_536
"""The greatest N of `bucket(N, …)`: so many partitions of 256 MiB hold 16 TiB. More would only cost requests."""


class PartitionColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A partition column: a column of the rows, or the result of a ``function`` of others.

    ``year`` of the column ``source`` gives an integer, ``date`` a date, ``month`` and ``hour`` text like 2020-01 and
    2020-01-31-23; all in UTC. ``bucket`` is the hash of the columns ``hashed`` (`rows.buckets`) modulo ``count``.
    """

    column: str
    function: str | None = None
    source: str | None = None
    hashed: tuple[str, ...] = ()
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> "PartitionColumn":
        """Parse a column's name, `date(created_at) as day`, or `bucket(64, order_id) as part`.

        Without `as`, the column is called `created_at_date` or `order_id_bucket`. Raises ConfigurationError if there
        are too many buckets, or if they are of a column twice.
        """
        if match := _BUCKET.fullmatch(text.strip()):
            return cls._bucket(text, int(match[1]), re.findall(_QUOTED, match[2]), match[3])
        match = _EXPRESSION.fullmatch(text.strip())
        if match is None or not match[2].strip():
            return cls(text)
        function, source, name = match[1].lower(), match[2].strip(), match[3]
        return cls(name.strip() if name else f"{source}_{function}", function, source)

    @classmethod
    def _bucket(cls, text: str, count: int, columns: Iterable[str], name: str | None) -> "PartitionColumn":
        hashed = tuple(column.strip().strip("`") for column in columns)
        if not 1 <= count <= MOST_BUCKETS:
            raise ConfigurationError(
                "bad-setting",
                f"`partition_by` has `{text}`: {count:,} buckets, expected 1 to {MOST_BUCKETS:,}. Nothing was changed.",
                next="correct the number; `lakeupsert plan` proposes one from the table's bytes",
            )
        if len(set(hashed)) < len(hashed):
            raise ConfigurationError(
                "bad-setting",
                f"`partition_by` has `{text}`, which names a column twice. Nothing was changed.",
                next="name each column once",
            )
        return cls(name.strip() if name else f"{hashed[0]}_bucket", "bucket", None, hashed, count)

    @classmethod
    def parse_all(cls, texts: Iterable[str]) -> "list[PartitionColumn]":
        """Parse `partition_by`. Raises ConfigurationError if two entries are the same column."""
        columns: dict[str, PartitionColumn] = {}
        for one in map(cls.parse, texts):
            other = columns.setdefault(one.column.lower(), one)
            if other is not one:
                raise ConfigurationError(
                    "bad-setting",
                    f"`partition_by` has `{other}` and `{one}`, whose names differ by case at most, so they are one column. "
                    "Nothing was changed.",
                    next="name each column once; a computed column may have any name: `date(COLUMN) as NAME`",
                )
        return list(columns.values())

    def __str__(self) -> str:
        return f"{self.expression} as {self.column}" if self.function else self.column

    @property
    def expression(self) -> str:
        """The function with its columns, without the name of its result."""
        if self.function != "bucket":
            return f"{self.function}({self.source})"
        return f"bucket({', '.join([str(self.count), *map(_quoted, self.hashed)])})"

    @property
    def default_name(self) -> str:
        """The name of the column if none is given."""
        return f"{self.sources[0]}_{self.function}" if self.function else self.column

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns of the rows that decide the value."""
        return self.hashed or (self.source or self.column,)

    @property
    def type(self) -> pa.DataType:
        """The type of the function's result."""
        return {"year": pa.int32(), "date": pa.date32(), "bucket": pa.int32()}.get(self.function or "", pa.string())


def _quoted(name: str) -> str:
    return name if re.fullmatch(_QUOTED, name) and name == name.strip() else f"`{name}`"
