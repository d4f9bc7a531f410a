"""What a table is: columns with field ids, key, order and partition columns, the delete rule. A chain; never trimmed.

A field keeps its id for life; ids are in every Parquet file we write, so that files of any age can be told apart by id.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError, DamagedTableError

FIELD_ID = b"PARQUET:field_id"
DELETE_FLAG = "_lakeupsert_delete"
"""Boolean column of appended files: the row is a delete. Only there where the table has a delete rule."""
FILE = "_lakeupsert_file"
"""Integer column of appended files: the landing file's place in its batch. With `PLACE` it ends G1's rank."""
PLACE = "_lakeupsert_place"
"""Integer column of appended files: the row's place in its landing file."""


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


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the spec.

    Attributes:
        order_by: names of the ordering columns, first things first; of these ``ascending`` and ``nulls_first`` (see `Ordering`).
        partition_from: partition columns that are made of others; of these, only the rows of landing files are told.
        stamped: the ordering column is not in the landing files; each batch's receipt stamp is its value.
        order_in_name: the ordering column is not in the landing files: this pattern's group finds its value in their names.
        ties: what decides between rows of a key with equal ordering values: the later ``arrival``, or ``content`` alone.
        arrow_schema: the schema as Arrow IPC in base64, field ids in the fields' metadata, partition columns included.
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
    fields: tuple[FieldText, ...]
    arrow_schema: str
    last_field_id: int
    bucket_count: int = 1

    @cached_property
    def schema(self) -> Any:
        """``pyarrow.Schema`` of the table as its readers see it: every column, partition columns inside, in spec order."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))

    @cached_property
    def stored_schema(self) -> Any:
        """``pyarrow.Schema`` of base files: without the partition columns, which the folder's name holds."""
        return pa.schema([f for f in self.schema if f.name not in self.partition_by])

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
        """``pyarrow.Schema`` of appended files: a base file's, and the delete flag where the table has a delete rule."""
        flag = [pa.field(DELETE_FLAG, pa.bool_(), nullable=False)] if self.delete else []
        return pa.schema([*self.stored_schema, *flag])

    @cached_property
    def ranked_schema(self) -> Any:
        """``pyarrow.Schema`` of appended files as they are stored: where each row came from, too."""
        place = [pa.field(FILE, pa.int32(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
        return pa.schema([*self.appended_schema, *place])

    def called(self, name: str) -> str:
        """What the table calls a column of a landing file, whose name may differ by case; itself where it has no such column."""
        return self._called.get(name) or self._called.get(name.lower(), name)

    @cached_property
    def _called(self) -> dict[str, str]:
        names = [*self.schema.names, *([self.delete.column] if self.delete and self.delete.column else [])]
        return {name.lower(): name for name in names} | {name: name for name in names}

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


def check_spec(old: TableSpec | None, new: TableSpec) -> None:
    """Invariants of the chain of specs."""
    if old is None:
        return
    kept = {f.id: f.name for f in new.fields}
    fixed = (
        "table_id", "key", "order_by", "ascending", "nulls_first", "order_in_name", "ties", "partition_by",
        "partition_from", "stamped",
        "delete", "bucket_count",
    )  # fmt: skip
    broken = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    broken += [f"field {f.id} ({f.name})" for f in old.fields if kept.get(f.id) != f.name]
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
        if name.lower().startswith("_lakeupsert") or other is not name:
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
        fields=tuple(FieldText(id=int(f.metadata[FIELD_ID]), name=f.name, type=str(f.type)) for f in schema),
        arrow_schema=base64.b64encode(schema.serialize()).decode(),
        last_field_id=last_field_id,
    )
