"""What a table is: columns with field ids, key, order and partition columns, the delete rule. A chain; never trimmed.

A field keeps its id for life, and its name until `rename` or `drop`, which the spec remembers: so a file of any age is read by
the names of its time, and a name that is used anew never shows what another column held (ADR 0020).
"""

import base64
import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

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


_EXPRESSION = re.compile(r"(?is)(year|month|date|hour)\((.+?)\)(?:\s+as\s+(.+))?")


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
        if found is None:
            return cls(text)
        function, source, name = found[1].lower(), found[2].strip(), found[3]
        return cls(name.strip() if name else f"{source}_{function}", function, source)

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
        mode: whether the record of greatest rank is the row, or each column is that of the one that brings it (`engine.columns`).
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


_GRAMMAR = {
    "order_by": " (COLUMN, then asc or desc, then nulls first or nulls last)",
    "partition_by": " (COLUMN, or year, month, date or hour of one: `date(COLUMN) as NAME`)",
}


def create(
    schema: Any,
    *,
    table_id: str,
    key: Sequence[str],
    order_by: Sequence[str],
    partition_by: Sequence[str],
    delete: DeleteRule | None,
    stamped: bool,
    order_in_name: str | None = None,
    ties: Literal["arrival", "content"] = "arrival",
    mode: Literal["rows", "columns"] = "rows",
    nulls: Literal["overwrite", "keep"] = "overwrite",
    groups: Sequence[ColumnGroup] = (),
    key_scope: Literal["partition", "table"] = "partition",
    history: bool = False,
) -> TableSpec:
    """The first spec of a table, from the columns that its first batch has (``pyarrow.Schema``, without any ids).

    ``partition_by`` is as in `PartitionColumn.parse`, ``order_by`` as in `Ordering.parse`. The operation column must be in
    ``schema`` where a rule needs it; it is left out unless the rule keeps it. An ordering column that is in no file is added
    here, unless ``schema`` has it already. Raises ConfigurationError where the columns can't be what they are declared to be.
    """
    ordering = [Ordering.parse(text) for text in order_by]
    order_by = [o.column for o in ordering]
    if (stamped or order_in_name) and order_by[0] not in schema.names:
        schema = schema.append(pa.field(order_by[0], pa.timestamp("us", tz="UTC") if stamped else pa.int64()))
    partitions = [PartitionColumn.parse(text) for text in partition_by]
    partition_by = [p.column for p in partitions]
    made = [p for p in partitions if p.function]
    for one in made:
        schema = _with_made(schema, one)
    for role, names in (("key", key), ("partition_by", partition_by), ("order_by", order_by)):
        for name in names:
            if schema.get_field_index(name) < 0:
                raise ConfigurationError(
                    "missing-column",
                    f"`{role}` names the column {name!r}, which no readable landing file has. Found: {', '.join(schema.names)}.",
                    next=f"correct `{role}` in lakeupsert.toml{_GRAMMAR.get(role, '')}, or put files with that column into the "
                    "landing zone",
                )
    _refuse_reserved_and_ambiguous(schema.names)
    if set(key) <= set(partition_by):
        raise ConfigurationError(
            "useless-key",
            f"`key` is {list(key)}, nothing but the partition column: a partition could hold one row only.",
            next="name the columns that identify a row in `key`",
        )
    for name in key:
        _refuse_type(
            "key",
            name,
            schema.field(name).type,
            is_key_type,
            "integers, decimals, text, dates, timestamps, booleans, binary",
        )
    for name in order_by:
        _refuse_type(
            "order_by",
            name,
            schema.field(name).type,
            _is_order_type,
            "numbers, text, dates, times, timestamps, booleans, binary",
        )
    if len(set(order_by)) < len(order_by):
        raise ConfigurationError(
            "bad-setting", f"`order_by` names a column twice: {', '.join(order_by)}.", next="name each column once"
        )
    for name in partition_by:
        _refuse_type(
            "partition_by", name, schema.field(name).type, _is_partition_type, "dates, text, integers, booleans"
        )
        if name in order_by:
            raise ConfigurationError(
                "useless-order",
                f"`order_by` names the partition column {name!r}: all rows of a partition have the same value in it.",
                next="name a column in `order_by` that tells an older version of a row from a newer one",
            )
    if delete and not delete.keep:
        if delete.column in (*key, *order_by, *partition_by):
            raise ConfigurationError(
                "delete-column-in-use",
                f"`delete.column` is {delete.column!r}, which is a key, ordering or partition column too, and `keep` is false.",
                next="set `keep = true` in [tables.….delete], or name another column",
            )
        schema = schema.remove(schema.get_field_index(delete.column)) if delete.column in schema.names else schema
    if ties == "content":
        _refuse_nested(schema)
        if stamped:
            raise ConfigurationError(
                "bad-setting",
                f"`ties` is content, and arrival is the only order: no row has a column {order_by[0]!r}, so each gets its stamp.",
                next='set `ties = "arrival"`, or name a column of the files in `order_by`',
            )
    if groups:
        _refuse_groups(schema, groups, ordering, [*key, *partition_by, *order_by], made)
    if key_scope == "table" and (named := sorted(set(key) & set(partition_by))):
        raise ConfigurationError(
            "bad-setting",
            f"`key_scope` is table, and `key` names the partition column {named[0]!r}: such a key can't change its partition.",
            next=f'leave {named[0]!r} out of `key`, or set `key_scope = "partition"`',
        )
    if history and (ordering[0].ascending or ordering[0].nulls_first):
        raise ConfigurationError(
            "bad-setting",
            f"`order_by` begins with {str(ordering[0])!r}, and with `history` a version holds until the next greater value "
            "of its first column.",
            next="begin `order_by` with a column whose greatest value wins, and whose null loses",
        )
    numbered = _Numbered(0)
    return _spec(
        [numbered.field(f) for f in schema],
        TableSpec(
            table_id=table_id,
            key=tuple(key),
            order_by=tuple(order_by),
            ascending=tuple(o.column for o in ordering if o.ascending),
            nulls_first=tuple(o.column for o in ordering if o.nulls_first),
            order_in_name=order_in_name,
            ties=ties,
            mode=mode,
            nulls=nulls,
            groups=tuple(groups),
            key_scope=key_scope,
            history=history,
            requires=tuple(
                feature
                for feature, needed in (
                    ("columns", mode == "columns"),
                    ("history", history),
                    ("key_scope", key_scope == "table"),
                )
                if needed
            ),
            partition_by=tuple(partition_by),
            partition_from=tuple(made),
            stamped=stamped,
            delete=delete,
            fields=(),
            arrow_schema="",
            last_field_id=0,
        ),
        numbered.last,
    )


def evolve(spec: TableSpec, schema: Any) -> TableSpec:
    """The spec after a batch whose typed files have ``schema``: columns added at the end, types widened, or unchanged.

    What can't be widened stays as it is; rows whose values don't convert are quarantined later. Key columns never change
    their type: their canonical bytes would.
    """
    fields = list(spec.schema)
    numbered = _Numbered(spec.last_field_id)
    places = {f.name: i for i, f in enumerate(fields)}
    dropped = {spec.delete.column} if spec.delete and not spec.delete.keep else set()
    for incoming in schema:
        name = spec.called(incoming.name)
        if name in dropped:
            continue
        if name not in places:
            _refuse_reserved_and_ambiguous([*(f.name for f in fields), name])
            fields.append(numbered.field(incoming))
            continue
        place = places[name]
        if name not in (*spec.key, *spec.partition_by):
            wider = widened(fields[place].type, normal(incoming.type))
            if not wider.equals(fields[place].type):
                _refuse_ambiguous_within(name, wider)
                fields[place] = fields[place].with_type(numbered.type(wider))
    if pa.schema(fields).equals(spec.schema):
        return spec
    if spec.ties == "content":
        _refuse_nested(fields)
    return _spec(fields, spec, numbered.last)


def refuse_unknown(spec: TableSpec, where: str) -> None:
    """Raise ConfigurationError where the table at ``where`` needs what this lakeupsert does not know."""
    unknown = set(spec.requires) - FEATURES
    if unknown:
        raise ConfigurationError(
            "newer-format",
            f"The table at {where} needs {', '.join(sorted(unknown))}, which this lakeupsert does not know.",
            next="upgrade lakeupsert on this machine (pip install --upgrade lakeupsert)",
        )


def rename(spec: TableSpec, column: str, name: str) -> TableSpec:
    """The spec in which a column is called ``name``. Raises ConfigurationError where it can't be."""
    field = _own(spec, column, f"be called {name!r}")
    clash = next((own for own in (*spec.schema.names, _operation(spec)) if own.lower() == name.lower()), None)
    if name == field.name:
        raise ConfigurationError(
            "column-exists",
            f"The column is called {name!r} already. Nothing was changed.",
            next="give another name; `lakeupsert schema` lists the columns",
        )
    if clash not in (None, field.name):
        raise ConfigurationError(
            "column-exists",
            f"The column {field.name!r} can't be called {name!r}: the table has a column {clash!r}, and names that differ by "
            "case alone are the same. Nothing was changed.",
            next="choose another name, or rename or drop that column first",
        )
    if not name.strip() or name.lower().startswith(RESERVED) or not name.isprintable():
        raise ConfigurationError(
            "unfit-column-name",
            f"No column can be called {name!r}: it is blank, begins with {RESERVED}, or has characters that can't be printed. "
            "Nothing was changed.",
            next="choose another name",
        )
    fields = [f.with_name(name) if f.name == field.name else f for f in spec.schema]
    return _renamed(spec, field, fields)


def drop(spec: TableSpec, column: str) -> TableSpec:
    """The spec without a column. Raises ConfigurationError where it can't do without."""
    field = _own(spec, column, "be dropped")
    return _renamed(spec, field, [f for f in spec.schema if f.name != field.name])


def roles(spec: TableSpec) -> dict[str, str]:
    """What the configuration names columns for, each by the first such thing."""
    sources = [one.source for one in spec.partition_from if one.source]
    named = {"key": spec.key, "order_by": spec.order_by, "partition_by": (*spec.partition_by, *sources)}
    named |= {f"groups.{g.name}": (*(o.column for o in g.ordering), *g.columns) for g in spec.groups}
    found = {column: role for role in reversed(named) for column in named[role]}
    return ({_operation(spec): "delete"} if _operation(spec) else {}) | found


def _operation(spec: TableSpec) -> str:
    return spec.delete.column or "" if spec.delete else ""


def _own(spec: TableSpec, column: str, what: str) -> Any:
    """The field (``pyarrow.Field``) of a column whose name may change."""
    name = spec.called(column)
    role = roles(spec).get(name)
    if role is not None:
        raise ConfigurationError(
            "column-in-use",
            f"The column {name!r} can't {what}: `{role}` names it. Nothing was changed.",
            next="these columns are fixed when a table is created; a table of another name and `processed` can have others",
        )
    if name not in spec.schema.names:
        close = difflib.get_close_matches(name, spec.schema.names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            "unknown-column",
            f"The table has no column {column!r}.{hint} Its columns: {', '.join(spec.schema.names)}. Nothing was changed.",
            next="`lakeupsert schema` lists the columns",
        )
    if spec.ties == "content":
        raise ConfigurationError(
            "content-decides",
            f"The column {name!r} can't {what}: `ties` is content, so between equal ordering values all columns decide, in the "
            "order of their names. Nothing was changed.",
            next="leave it as it is, or give readers a view under other names",
        )
    return spec.schema.field(name)


def _renamed(spec: TableSpec, field: Any, fields: Sequence[Any]) -> TableSpec:
    one = Renamed(id=field_id(field), name=field.name, last_field_id=spec.last_field_id)
    requires = tuple(sorted({*spec.requires, "renames"}))  # by name alone such a table would be misread
    return msgspec.structs.replace(
        _spec(fields, spec, spec.last_field_id), renames=(*spec.renames, one), requires=requires
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


def normal(type_: Any) -> Any:
    """The type under which a landing column is kept: encodings undone, nested fields nullable. Values stay what they are."""
    t = pa.types
    if t.is_dictionary(type_):
        return normal(type_.value_type)
    if t.is_run_end_encoded(type_):
        return normal(type_.value_type)
    if t.is_string_view(type_):
        return pa.string()  # pyarrow's filter and take lack kernels for views
    if t.is_binary_view(type_):
        return pa.binary()
    if t.is_list(type_) or t.is_list_view(type_):
        return pa.list_(_nullable(type_.value_field))
    if t.is_large_list(type_) or t.is_large_list_view(type_):
        return pa.large_list(_nullable(type_.value_field))
    if t.is_fixed_size_list(type_):
        return pa.list_(_nullable(type_.value_field), type_.list_size)
    if t.is_map(type_):
        return pa.map_(normal(type_.key_type), _nullable(type_.item_field), type_.keys_sorted)
    if t.is_struct(type_):
        return pa.struct([_nullable(f) for f in type_])
    return type_


def _nullable(field: Any) -> Any:
    return pa.field(field.name, normal(field.type), nullable=True)


_SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
_FLOATS = [pa.float32(), pa.float64()]  # not float16: Spark reads no such file, and not as a wider type either
_UNITS = ["s", "ms", "us"]  # not ns: years beyond 2262 would no longer fit


def widened(current: Any, incoming: Any) -> Any:
    """The smallest type that holds all values of both without changing one, or ``current`` where there is none.

    A struct gets the fields that it lacks behind its own, whose places and ids stay; lists and maps what is in them.
    """
    t = pa.types
    if t.is_null(current):
        return incoming
    if t.is_struct(current) and t.is_struct(incoming):
        types = {f.name: f.type for f in incoming}
        own = [f.with_type(widened(f.type, types.pop(f.name, f.type))) for f in current]
        return pa.struct([*own, *(f for f in incoming if f.name in types)])
    for is_list, list_of in ((t.is_list, pa.list_), (t.is_large_list, pa.large_list)):
        if is_list(current) and is_list(incoming):
            return list_of(current.value_field.with_type(widened(current.value_type, incoming.value_type)))
    if t.is_map(current) and t.is_map(incoming):
        item = current.item_field.with_type(widened(current.item_type, incoming.item_type))
        return pa.map_(current.key_field, item, current.keys_sorted)
    for family in (_SIGNED, _UNSIGNED, _FLOATS):
        if current in family and incoming in family:
            return family[max(family.index(current), family.index(incoming))]
    if current in _UNSIGNED[:3] and incoming in _SIGNED:
        return _SIGNED[max(_UNSIGNED.index(current) + 1, _SIGNED.index(incoming))]
    if current in _SIGNED and incoming in _UNSIGNED[:3]:
        return _SIGNED[max(_SIGNED.index(current), _UNSIGNED.index(incoming) + 1)]
    if t.is_decimal(current) and t.is_decimal(incoming):
        scale = max(current.scale, incoming.scale)
        precision = max(current.precision - current.scale, incoming.precision - incoming.scale) + scale
        if precision <= 38:
            return (
                current if (precision, scale) == (current.precision, current.scale) else pa.decimal128(precision, scale)
            )
        return current if precision > 76 else pa.decimal256(precision, scale)
    if (
        t.is_timestamp(current)
        and t.is_timestamp(incoming)
        and current.tz == incoming.tz
        and (
            current.unit in _UNITS
            and incoming.unit in _UNITS
            and _UNITS.index(incoming.unit) > _UNITS.index(current.unit)
        )
    ):
        return incoming
    if t.is_string(current) and t.is_large_string(incoming):
        return incoming
    if t.is_binary(current) and t.is_large_binary(incoming):
        return incoming
    return current


def same_key_bytes(one: Any, other: Any) -> bool:
    """Whether a key's canonical bytes are the same under both types (docs/FORMAT.md, "Buckets")."""
    p = pa.types
    if p.is_timestamp(one) and p.is_timestamp(other):
        return bool((one.unit == "ns") == (other.unit == "ns"))
    if p.is_decimal(one) and p.is_decimal(other):
        return bool(one.scale == other.scale and (one.precision > 38) == (other.precision > 38))
    alike = (
        (p.is_integer,),
        (p.is_string, p.is_large_string),
        (p.is_binary, p.is_large_binary, p.is_fixed_size_binary),
    )
    return bool(one.equals(other)) or any(
        any(is_one(one) for is_one in kind) and any(is_one(other) for is_one in kind) for kind in alike
    )


def is_key_type(t: Any) -> bool:
    p = pa.types
    return bool(
        p.is_integer(t) or p.is_decimal(t) or p.is_string(t) or p.is_large_string(t) or p.is_date(t) or p.is_timestamp(t)
        or p.is_boolean(t) or p.is_binary(t) or p.is_large_binary(t) or p.is_fixed_size_binary(t)
    )  # fmt: skip


def _is_order_type(t: Any) -> bool:
    return is_key_type(t) or bool(pa.types.is_floating(t) or pa.types.is_time(t) or pa.types.is_duration(t))


def _is_partition_type(t: Any) -> bool:
    p = pa.types
    return bool(p.is_date32(t) or p.is_string(t) or p.is_large_string(t) or p.is_integer(t) or p.is_boolean(t))


def _refuse_type(role: str, name: str, type_: Any, allowed: Any, names: str) -> None:
    if allowed(type_):
        return
    hint = ""
    if role == "partition_by" and pa.types.is_timestamp(type_):
        hint = f', for example `{name} = "date"` where all its times are midnight'
    raise ConfigurationError(
        "unfit-type",
        f"Column {name!r} is {type_} and can't be in `{role}`, which takes {names}.",
        next=f"name another column in `{role}`, or give {name!r} another type under [tables.….schema]{hint}",
    )


def _refuse_groups(
    schema: Any,
    groups: Sequence[ColumnGroup],
    ordering: Sequence[Ordering],
    of_row: Sequence[str],
    made: Sequence[PartitionColumn],
) -> None:
    def refuse(what: str, instead: str) -> NoReturn:
        raise ConfigurationError("bad-setting", what, next=instead)

    if made:
        refuse(
            f"`partition_by` makes {made[0].column!r} of {made[0].source!r}, which every record has to bring, and with `groups` "
            "no record need bring a column of another source.",
            "partition by a column that is there",
        )
    for where, orders in (("order_by", ordering), *((f"groups.{g.name}.order_by", g.ordering) for g in groups)):
        for o in orders:
            if o.nulls_first:
                refuse(
                    f"`{where}` has {str(o)!r}; with `groups` null says that a record does not bring them.",
                    "leave it out",
                )
    taken = dict.fromkeys(of_row, "a key, ordering or partition column of the table")
    for group in groups:
        order_by = [o.column for o in group.ordering]
        for name in (*order_by, *group.columns):
            if name in taken:
                refuse(
                    f"`groups.{group.name}` names {name!r}, which is {taken[name]}.", "name each column in one place"
                )
            taken[name] = f"in `groups.{group.name}` already"
            if name not in schema.names:
                raise ConfigurationError(
                    "missing-column",
                    f"`groups.{group.name}` names the column {name!r}, which no readable landing file has. Found: "
                    f"{', '.join(schema.names)}.",
                    next=f'correct it, or give a column that comes later its type under [tables.….schema]: `{name} = "…"`',
                )
        for name in order_by:
            what = "numbers, text, dates, times, timestamps, booleans, binary"
            _refuse_type(f"groups.{group.name}.order_by", name, schema.field(name).type, _is_order_type, what)


def _with_made(schema: Any, made: PartitionColumn) -> Any:
    at = schema.get_field_index(made.source)
    t = pa.types
    if at < 0 or not (t.is_timestamp(schema.field(at).type) or t.is_date(schema.field(at).type)):
        found = "which no readable landing file has" if at < 0 else f"which is {schema.field(at).type}"
        raise ConfigurationError(
            "unfit-type" if at >= 0 else "missing-column",
            f"`partition_by` takes the {made.function} of the column {made.source!r}, {found}; expected a date or timestamp.",
            next=f'correct `partition_by`, or give it a type such as `{made.source} = "timestamp"` under [tables.….schema]',
        )
    if made.column in schema.names:
        raise ConfigurationError(
            "partition-in-files",
            f"`partition_by` makes the column {made.column!r} of {made.source!r}, and the landing files have one of that name.",
            next=f"give it another name: `{made.function}({made.source}) as NAME`",
        )
    return schema.append(pa.field(made.column, made.type))


def _refuse_nested(fields: Iterable[Any]) -> None:
    for field in fields:
        if pa.types.is_nested(field.type):
            raise ConfigurationError(
                "unfit-type",
                f"Column {field.name!r} is {field.type}, whose values have no order, and `ties` is content.",
                next=f'set `ties = "arrival"`, or give {field.name!r} the type string under [tables.….schema]',
            )


def _refuse_reserved_and_ambiguous(names: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if name.lower().startswith(RESERVED) or other is not name:
            what = "is reserved for lakeupsert" if other is name else f"differs from {other!r} by case at most"
            raise ConfigurationError(
                "unfit-column-name",
                f"The column name {name!r} {what}, and engines such as Spark could not tell them apart.",
                next="rename the column where the landing files are made",
            )


def _refuse_ambiguous_within(column: str, type_: Any) -> None:
    names = [f.name.lower() for f in type_] if pa.types.is_struct(type_) else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            "unfit-column-name",
            f"Column {column!r} would have two fields within it whose names differ by case at most, {twice!r} in small letters; "
            "engines such as Spark could not tell them apart.",
            next="rename the field where the landing files are made",
        )
    for i in range(type_.num_fields if pa.types.is_nested(type_) else 0):
        _refuse_ambiguous_within(column, type_.field(i).type)


class _Numbered:
    """Gives ids to fields that have none, depth first; nested fields have ids of their own, as Iceberg's have."""

    def __init__(self, last: int) -> None:
        self.last = last

    def _next(self) -> int:
        self.last += 1
        return self.last

    def field(self, field: Any) -> Any:
        metadata = {FIELD_ID: str(self._next()).encode()}
        return pa.field(field.name, self.type(normal(field.type)), nullable=True, metadata=metadata)

    def type(self, type_: Any) -> Any:
        t = pa.types
        if t.is_list(type_):
            return pa.list_(self._child(type_.value_field))
        if t.is_large_list(type_):
            return pa.large_list(self._child(type_.value_field))
        if t.is_fixed_size_list(type_):
            return pa.list_(self._child(type_.value_field), type_.list_size)
        if t.is_map(type_):
            return pa.map_(self._child(type_.key_field), self._child(type_.item_field), type_.keys_sorted)
        if t.is_struct(type_):
            return pa.struct([self._child(f) for f in type_])
        return type_

    def _child(self, field: Any) -> Any:
        metadata = field.metadata or {FIELD_ID: str(self._next()).encode()}
        return pa.field(field.name, self.type(field.type), field.nullable, metadata)


def _spec(fields: Sequence[Any], like: TableSpec, last_field_id: int) -> TableSpec:
    schema = pa.schema(fields)
    return msgspec.structs.replace(
        like,
        fields=tuple(FieldText(id=field_id(f), name=f.name, type=str(f.type)) for f in schema),
        arrow_schema=base64.b64encode(schema.serialize()).decode(),
        last_field_id=last_field_id,
    )
