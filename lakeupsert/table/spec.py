"""What a table is: columns with field ids, key, order and partition columns, the delete rule. A chain; never trimmed.

A field keeps its id for life, and its name until `rename` or `drop`, which the spec remembers: so a file of any age is read by
the names of its time, and a name that is used anew never shows what another column held (ADR 0020).
"""

import base64
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError, DamagedTableError, TryAgainError

FIELD_ID = b"PARQUET:field_id"
RESERVED = "_lakeupsert"
"""How no column of a landing file begins, in any case."""
DELETE_FLAG = "_lakeupsert_delete"
"""Boolean column of appended files: the row is a delete. Only there where the table has a delete rule, or its keys are unique in
the whole table."""
FILE = "_lakeupsert_file"
"""Integer column of appended files: the landing file's place in its batch. With `PLACE` it ends G1's rank."""
PLACE = "_lakeupsert_place"
"""Integer column of appended files: the row's place in its landing file."""
HAS = "_lakeupsert_has"
"""Binary column of all files of tables in mode columns: which columns the row brings by its order, a bit for each field id."""
OLDER = "_lakeupsert_older"
"""List column of base and delta files of such tables: which columns the row has from records of lower orders, and these."""
BATCH = "_lakeupsert_batch"
"""Integer column of history files: the ledger number of the row's batch, or of a stored row of the last one that was merged."""
MOVED_TO = "_lakeupsert_moved_to"
"""Text column of appended files with deletes that `append` made: the partition that the key's record came for."""
FEATURES = frozenset({"columns", "history", "renames", "key_scope"})
"""What a spec may require of those who read or write its table."""


class DeleteRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are deletes: those whose ``column``, as text, is one of ``values``, and all of files called by a prefix.

    Attributes:
        keep: the column stays in base rows.
        upserts: the values of all other rows, where they are told: a row with any other goes to quarantine.
        file_prefix: how the names of files begin (without their folders) that hold nothing but deletes.
    """

    column: str | None = None
    values: tuple[str, ...] = ()
    keep: bool = False
    upserts: tuple[str, ...] | None = None
    file_prefix: str | None = None


_ORDERING = re.compile(r"(?is)(?:`(.+)`|(.+?))(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?\s*")


class Ordering(msgspec.Struct, frozen=True):
    """A column of the window's ORDER BY, whose first row wins: the greatest value, or with ``ascending`` the least.

    Null loses to every value, unless it comes first.
    """

    column: str
    ascending: bool = False
    nulls_first: bool = False

    @classmethod
    def parse(cls, text: str) -> "Ordering":
        """Of SQL's `column [asc|desc] [nulls first|last]`, ``desc nulls last`` by default; a column may be in backquotes."""
        found = _ORDERING.fullmatch(text)
        if found is None:
            return cls(text)
        quoted, plain, direction, nulls = found.groups()
        return cls(quoted or plain, (direction or "").lower() == "asc", (nulls or "").lower() == "first")

    def __str__(self) -> str:
        column = self.column if Ordering.parse(self.column) == Ordering(self.column) else f"`{self.column}`"
        return f"{column}{' asc' if self.ascending else ''}{' nulls first' if self.nulls_first else ''}"


class ColumnGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that have an order of their own, as another source brings them; ``order_by`` is as in `Ordering.parse`."""

    name: str
    order_by: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def ordering(self) -> tuple[Ordering, ...]:
        return tuple(map(Ordering.parse, self.order_by))


# A source may have parentheses within its name, but only whole ones, and the column that is made none: two expressions in one
# text, as in `date(at), month(at)` or `date(at) as day, month(at)`, are no column's name.
_EXPRESSION = re.compile(r"(?is)(year|month|date|hour)\(((?:[^()]|\([^()]*\))+)\)(?:\s+as\s+([^(),]+))?")


class PartitionColumn(msgspec.Struct, frozen=True):
    """A partition column: one that rows bring, or what a ``function`` makes of their column ``source``.

    ``year`` is an integer, ``date`` a date, ``month`` and ``hour`` are text such as 2020-01 and 2020-01-31-23; all in UTC.
    """

    column: str
    function: str | None = None
    source: str | None = None

    @classmethod
    def parse(cls, text: str) -> "PartitionColumn":
        """Of a column's name, or of `date(created_at) as day`; without a name of its own it is `created_at_date`."""
        found = _EXPRESSION.fullmatch(text.strip())
        if found is None or not found[2].strip():
            return cls(text)
        function, source, name = found[1].lower(), found[2].strip(), found[3]
        return cls(name.strip() if name else f"{source}_{function}", function, source)

    @classmethod
    def parse_all(cls, texts: Iterable[str]) -> "list[PartitionColumn]":
        """Of `partition_by`. Raises ConfigurationError where two would be one column."""
        found: dict[str, PartitionColumn] = {}
        for one in map(cls.parse, texts):
            other = found.setdefault(one.column.lower(), one)
            if other is not one:
                raise ConfigurationError(
                    "bad-setting",
                    f"`partition_by` has `{other}` and `{one}`, and names that differ by case at most are one column. Nothing "
                    "was changed.",
                    next="name each column once; one that is made of another may have any name: `date(COLUMN) as NAME`",
                )
        return list(found.values())

    def __str__(self) -> str:
        return f"{self.function}({self.source}) as {self.column}" if self.function else self.column

    @property
    def type(self) -> Any:
        """``pyarrow.DataType`` of what the function makes."""
        return {"year": pa.int32(), "date": pa.date32()}.get(self.function or "", pa.string())


class FieldText(msgspec.Struct, frozen=True, kw_only=True):
    """A field for human readers; `arrow_schema` is what counts."""

    id: int
    name: str
    type: str


class Renamed(msgspec.Struct, frozen=True, kw_only=True):
    """A rename or drop: until then field ``id`` was called ``name``, and no field had an id above ``last_field_id``."""

    id: int
    name: str
    last_field_id: int


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the spec.

    Attributes:
        order_by: names of the ordering columns, first things first; of these ``ascending`` and ``nulls_first`` (see `Ordering`).
        partition_from: partition columns that are made of others; of these, only the rows of landing files are told.
        stamped: the ordering column is not in the landing files; each batch's receipt stamp is its value.
        order_in_name: the ordering column is not in the landing files: this pattern's group finds its value in their names.
        ties: what decides between rows of a key with equal ordering values: the later ``arrival``, or ``content`` alone.
        mode: whether the record of greatest rank is the row, or each column is that of the one that brings it (`rows.columns`).
        nulls: whether a null is a value that a record brings. Of mode columns alone, as are ``groups``.
        key_scope: where a key has one row: in each ``partition``, or in the ``table`` (`engine.keyindex`).
        history: whether merges keep the versions that they supersede (`read.history`).
        requires: features of the format that who does not know them must not touch the table without.
        arrow_schema: the schema as Arrow IPC in base64, field ids in the fields' metadata, partition columns included.
        renames: every rename and drop that there was, the oldest first.
        bucket_count: hash buckets of a partition; 1 until buckets land.
    """

    table_id: str
    key: tuple[str, ...]
    order_by: tuple[str, ...]
    partition_by: tuple[str, ...]
    partition_from: tuple[PartitionColumn, ...] = ()
    stamped: bool
    ascending: tuple[str, ...] = ()
    nulls_first: tuple[str, ...] = ()
    order_in_name: str | None = None
    ties: Literal["arrival", "content"] = "arrival"
    delete: DeleteRule | None = None
    mode: Literal["rows", "columns"] = "rows"
    nulls: Literal["overwrite", "keep"] = "overwrite"
    groups: tuple[ColumnGroup, ...] = ()
    key_scope: Literal["partition", "table"] = "partition"
    history: bool = False
    requires: tuple[str, ...] = ()
    fields: tuple[FieldText, ...]
    arrow_schema: str
    last_field_id: int
    renames: tuple[Renamed, ...] = ()
    bucket_count: int = 1

    @cached_property
    def schema(self) -> Any:
        """``pyarrow.Schema`` of the table as its readers see it: every column, partition columns inside, in spec order."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))

    @cached_property
    def stored_schema(self) -> Any:
        """``pyarrow.Schema`` of rows in a partition: without the partition columns, which the folder's name holds."""
        return pa.schema([f for f in self.schema if f.name not in self.partition_by])

    @cached_property
    def base_schema(self) -> Any:
        """``pyarrow.Schema`` of base and delta files."""
        if self.mode == "rows":
            return self.stored_schema
        orders = [pa.field(f"o{i}", self.schema.field(name).type) for i, name in enumerate(self.all_orders)]
        parts = pa.list_(pa.struct([pa.field("has", pa.binary()), *orders]))
        return pa.schema([*self.stored_schema, pa.field(HAS, pa.binary()), pa.field(OLDER, parts)])

    @cached_property
    def all_orders(self) -> tuple[str, ...]:
        """The ordering columns of the row and of all groups."""
        return (*self.order_by, *(o.column for group in self.groups for o in group.ordering))

    @cached_property
    def columns_of(self) -> tuple[tuple[tuple[Ordering, ...], dict[str, int]], ...]:
        """Of mode columns: the ordering and the columns, with their field ids, of all that is in no group, then of each group."""
        ids = {f.name: field_id(f) for f in self.stored_schema if f.name not in self.stored_key}
        grouped = [(g.ordering, {n: ids.pop(n) for n in self._in_group(g) if n in ids}) for g in self.groups]
        return ((self.ordering, ids), *grouped)

    def _in_group(self, group: ColumnGroup) -> tuple[str, ...]:
        return (*(o.column for o in group.ordering), *group.columns)

    @cached_property
    def ordering(self) -> tuple[Ordering, ...]:
        """The ordering columns, with what wins in each."""
        return tuple(Ordering(name, name in self.ascending, name in self.nulls_first) for name in self.order_by)

    @cached_property
    def content(self) -> tuple[str, ...]:
        """Columns that decide between equal ordering values, by name, as ids go by arrival; none where arrival does."""
        names = set(self.stored_schema.names) - {*self.stored_key, *self.order_by}
        return tuple(sorted(names)) if self.ties == "content" else ()

    @cached_property
    def stored_key(self) -> tuple[str, ...]:
        """Key columns that the files hold: a partition column in the key has one value in a partition."""
        return tuple(name for name in self.key if name not in self.partition_by)

    @cached_property
    def appended_schema(self) -> Any:
        """``pyarrow.Schema`` of appended files: a row's, in mode columns what it brings, and where rows delete the flag."""
        has = [pa.field(HAS, pa.binary())] if self.mode == "columns" else []
        flag = [pa.field(DELETE_FLAG, pa.bool_(), nullable=False)] if self.has_deletes else []
        return pa.schema([*self.stored_schema, *has, *flag])

    @property
    def has_deletes(self) -> bool:
        """Whether an appended row may be a delete: one that landed, or that of a key whose record went to another partition."""
        return self.delete is not None or self.key_scope == "table"

    @property
    def settles_early(self) -> bool:
        """Whether a row that loses to another one of its batch is of no use any more."""
        return self.mode == "rows" and not self.history

    @cached_property
    def history_schema(self) -> Any:
        """``pyarrow.Schema`` of history files: superseded rows, and the deletes that superseded them."""
        flag = pa.field(DELETE_FLAG, pa.bool_(), nullable=False)
        return pa.schema([*self.stored_schema, flag, pa.field(BATCH, pa.int64(), nullable=False)])

    @cached_property
    def ranked_schema(self) -> Any:
        """``pyarrow.Schema`` of appended files as they are stored: where each row came from, too."""
        place = [pa.field(FILE, pa.int32(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
        return pa.schema([*self.appended_schema, *place])

    @cached_property
    def arriving_schema(self) -> Any:
        """``pyarrow.Schema`` of appended files as a merge reads them: with all columns of base files, too."""
        return pa.unify_schemas([self.ranked_schema, self.base_schema])

    def called(self, name: str) -> str:
        """What the table calls a column of a landing file, whose name may differ by case; itself where it has no such column."""
        return self._called.get(name) or self._called.get(name.lower(), name)

    @cached_property
    def _called(self) -> dict[str, str]:
        names = [*self.schema.names, *([self.delete.column] if self.delete and self.delete.column else [])]
        return {name.lower(): name for name in names} | {name: name for name in names}

    def renamed_since(self, renames: int) -> dict[str, str | None]:
        """Of a spec or a file from when there had been so many ``renames``, the columns that are called otherwise now, by their
        names of then; None: dropped."""
        later = self.renames[renames:]
        then: dict[int, str] = {}
        for one in later:
            if one.id <= later[0].last_field_id:  # else it came when the names had changed already
                then.setdefault(one.id, one.name)
        if not then:
            return {}
        now = {field.id: field.name for field in self.fields}
        return {name: now.get(id_) for id_, name in then.items()}

    def under_old_names(self, names: Mapping[str, str]) -> dict[str, str]:
        """Of the columns that a landing file brings those that come as they were called before a rename, and not as they are now:
        the file's name and that of now. A name that a rename gave to another column since is that column's.

        ``names``: of each column its name by `aliases`, or else in the file, and the file's own."""
        found = {name.lower(): own for name, own in names.items()}
        now = {field.id: field.name for field in self.fields}
        given = {field.name.lower(): field.id for field in self.fields}
        return {
            found[one.name.lower()]: now[one.id]
            for one in self.renames
            if one.id in now
            and one.name.lower() in found
            and now[one.id].lower() not in found
            and given.get(one.name.lower(), one.last_field_id + 1) > one.last_field_id
        }

    def names_in(self, renames: int) -> dict[str, str]:
        """What columns are called in a file from when there had been so many ``renames``, where that is not as they are called
        now; those whose name another column had then get one that is in no file. Nothing in tables without renames."""
        if renames > len(self.renames):  # else its columns would be taken for others, without a word
            raise TryAgainError(
                "columns-renamed",
                f"Columns were renamed while they were looked for: a file has the names of after {renames} renames, and "
                f"{len(self.renames)} were known here. Nothing was changed.",
                next="run the same command again",
            )
        then = self.renamed_since(renames)
        if not then:
            return {}
        own = {now: name for name, now in then.items() if now is not None}
        taken = {name.lower() for name in then}  # Spark tells no case
        others = {f.name: f"{RESERVED}_{f.id}" for f in self.fields if f.name.lower() in taken and f.name not in own}
        return own | others

    @cached_property
    def tombstone_schema(self) -> Any:
        """``pyarrow.Schema`` of tombstone files: key and ordering columns."""
        return pa.schema([self.schema.field(name) for name in dict.fromkeys((*self.stored_key, *self.order_by))])

    @cached_property
    def deciding_schema(self) -> Any:
        """``pyarrow.Schema`` of all that decides which row of a key wins, but where a row came from."""
        return pa.schema([*self.tombstone_schema, *(self.schema.field(name) for name in self.content)])


def refuse_unknown(spec: TableSpec, where: str) -> None:
    """Raise ConfigurationError where the table at ``where`` needs what this lakeupsert does not know."""
    unknown = set(spec.requires) - FEATURES
    if unknown:
        raise ConfigurationError(
            "newer-format",
            f"The table at {where} needs {', '.join(sorted(unknown))}, which this lakeupsert does not know.",
            next="upgrade lakeupsert on this machine (pip install --upgrade lakeupsert)",
        )


def field_id(field: Any) -> int:
    return int(field.metadata[FIELD_ID])


def check_spec(old: TableSpec | None, new: TableSpec) -> None:
    """Invariants of the chain of specs."""
    if old is None:
        return
    kept = {f.id: f.name for f in new.fields}
    renamed = new.renamed_since(len(old.renames))
    fixed = (
        "table_id", "key", "order_by", "ascending", "nulls_first", "order_in_name", "ties", "partition_by",
        "partition_from", "stamped", "mode", "nulls", "groups", "key_scope", "history",
        "delete", "bucket_count",
    )  # fmt: skip
    broken = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    broken += [f"field {f.id} ({f.name})" for f in old.fields if kept.get(f.id) != renamed.get(f.name, f.name)]
    broken += ["renames"] if new.renames[: len(old.renames)] != old.renames else []
    broken += ["requires"] if set(old.requires) - set(new.requires) else []
    if broken or new.last_field_id < old.last_field_id:
        raise DamagedTableError(
            "broken-invariant",
            f"The next spec would change what is fixed: {', '.join(broken) or 'field ids'}. It was not written.",
            next="report this as a bug of lakeupsert, with both spec objects",
        )
