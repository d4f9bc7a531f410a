"""How the spec of a table is created, and how it changes: new columns, wider types, renames, drops and retypes.

Each function returns the next version of a spec, or raises. Nothing is written here: `append` and `schema` add it to the chain.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypedDict, Unpack

import msgspec
import pyarrow as pa
from pyarrow.types import is_date, is_timestamp

from lakeupsert.config import toml_key
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.misnamed import did_you_mean, find_typo, suggest
from lakeupsert.table.spec import (
    FIELD_ID,
    RESERVED,
    ColumnGroup,
    DeleteRule,
    FieldText,
    FileName,
    Ordering,
    PartitionColumn,
    Rename,
    Retype,
    TableSpec,
    TypeChange,
    field_id,
)
from lakeupsert.table.types import is_key_type, is_order_type, is_partition_type, normalize, type_name, widen

_GRAMMAR = {
    "order_by": " (COLUMN, then asc or desc, then nulls first or nulls last)",
    "partition_by": " (COLUMN, or year, month, date or hour of one: `date(COLUMN) as NAME`, or `bucket(N, COLUMN, …)`)",
}
_ORDER_TYPES = "numbers, text, dates, times, timestamps, booleans, binary"
_NO_EXPRESSION = (
    " It is not an expression either: those are year(COLUMN), month(COLUMN), date(COLUMN), hour(COLUMN) and "
    "bucket(N, COLUMN, …), one each."
)


class Usual(TypedDict, total=False):
    """Fields of a `TableSpec` that never change, and that few tables set."""

    order_in_name: str | None
    ties: Literal["arrival", "content"]
    mode: Literal["rows", "columns"]
    nulls: Literal["overwrite", "keep"]
    groups: tuple[ColumnGroup, ...]
    key_scope: Literal["partition", "table"]
    history: bool
    versions: bool


class Fixed(Usual):
    """Fields of a `TableSpec` that never change, as its caller chooses them."""

    table_id: str
    stamped: bool
    delete: DeleteRule | None


_ROWS = Usual(
    order_in_name=None, ties="arrival", mode="rows", nulls="overwrite", groups=(), history=False, versions=False
)
_USUAL: Usual = {**_ROWS, "key_scope": "partition"}


def create(
    schema: pa.Schema,
    *,
    key: Sequence[str],
    order_by: Sequence[str],
    partition_by: Sequence[str],
    later: Sequence[pa.Field] = (),
    **fixed: Unpack[Fixed],
) -> TableSpec:
    """Create the first spec of a table.

    Args:
        schema: the columns of the first batch, without field ids.
        order_by, partition_by: as in `Ordering.parse` and `PartitionColumn.parse`.
        later: columns that the configuration gives types and the first batch does not have. Key, partition and ordering columns
            can't come later, except an ordering column that is in no file, which is added here.
        fixed: the column of ``delete`` may be missing in the first batch. The table does not keep it unless the rule says so.
    Raises:
        ConfigurationError: a column can't have the role that the configuration gives it.
    """
    ordering = [Ordering.parse(text) for text in order_by]
    partitions = PartitionColumn.parse_all(partition_by)
    settings: Fixed = {**_USUAL, **fixed}
    declared = TableSpec(
        key=tuple(key),
        order_by=tuple(o.column for o in ordering),
        ascending=tuple(o.column for o in ordering if o.ascending),
        nulls_first=tuple(o.column for o in ordering if o.nulls_first),
        statements=False,
        requires=(),
        partition_by=tuple(p.column for p in partitions),
        partition_from=tuple(p for p in partitions if p.function),
        fields=(),
        arrow_schema="",
        last_field_id=0,
        renames=(),
        one_name_since=None,
        file_names=(),
        folder_formats=(),
        adopted_folders=(),
        **settings,
    )
    complete = _complete(schema, declared, later)
    numbering = _Numbering(0)
    return _spec([numbering.field(f) for f in complete], declared, numbering.last)


def _complete(schema: pa.Schema, declared: TableSpec, later: Sequence[pa.Field]) -> pa.Schema:
    """All columns that the table begins with; refuses those that can't have the role that the configuration gives them."""
    types = {field.name: field.type for field in later}
    complete = _with_order(schema, declared, types)
    for computed in declared.partition_from:
        complete = _add_computed(complete, computed, declared)
    _refuse_missing(complete, declared, schema, types)
    for field in later:
        complete = complete if field.name in complete.names else complete.append(field)
    _refuse_reserved_and_ambiguous(complete.names)
    _refuse_unfit(complete, declared)
    complete = _without_operation(complete, declared)
    _refuse_unfit_rules(complete, declared)
    return complete


def _with_order(schema: pa.Schema, declared: TableSpec, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Add the ordering column, if it is not in the files but is a receipt stamp or comes from file names."""
    name = declared.order_by[0]
    if not (declared.stamped or declared.order_in_name) or name in schema.names:
        return schema
    type_ = types.get(name, pa.timestamp("us", tz="UTC") if declared.stamped else pa.int64())
    if declared.stamped and not pa.types.is_timestamp(type_):
        raise ConfigurationError(
            "unfit-type",
            f"No file has the ordering column {name!r}, so lakeupsert would store each row's receipt stamp in it. That is a "
            f"timestamp, but [tables.….schema] says {type_}.",
            next=f"remove {name!r} from [tables.….schema], or add files that have that column",
        )
    return schema.append(pa.field(name, type_))


def _refuse_missing(schema: pa.Schema, declared: TableSpec, files: pa.Schema, types: Mapping[str, pa.DataType]) -> None:
    """Refuse roles of columns that are not in ``schema``. ``types``: of columns that come with later files."""
    comes = types if declared.groups else {}  # with groups, a record need not bring its ordering columns
    for role in ("key", "partition_by", "order_by"):
        for name in getattr(declared, role):
            if name not in schema.names and not (role == "order_by" and name in comes):
                hint = suggest(name, files)
                if role == "partition_by" and re.search(r"[()]", name):
                    hint = _NO_EXPRESSION + hint
                without = "; without `order_by`, arrival decides" if role == "order_by" else ""
                raise ConfigurationError(
                    "missing-column",
                    f"`{role}` names the column {name!r}, which no readable file has.{hint}",
                    next=f"correct `{role}` in lakeupsert.toml{_GRAMMAR.get(role, '')}, or add files that "
                    f"have that column{without}",
                )
    operation = _operation(declared)
    if operation and operation not in types:
        _refuse_operation_slip(operation, files, [*declared.key, *declared.order_by, *declared.partition_by])


def _refuse_unfit(schema: pa.Schema, declared: TableSpec) -> None:
    """Refuse key, ordering and partition columns that have an unsupported type or contradict each other."""
    if set(declared.key) <= set(declared.partition_by):
        raise ConfigurationError(
            "useless-key",
            f"`key` is {list(declared.key)}, which only names partition columns: a partition could hold just one row.",
            next="name the columns that identify a row in `key`",
        )
    for role, is_fit, names in (
        ("key", is_key_type, "integers, decimals, text, dates, timestamps, booleans, binary"),
        ("order_by", is_order_type, _ORDER_TYPES),
    ):
        for name in getattr(declared, role):
            _refuse_type(role, name, schema.field(name).type, is_fit, names)
    if len(set(declared.order_by)) < len(declared.order_by):
        raise _bad_setting(f"`order_by` names a column twice: {', '.join(declared.order_by)}.", "name each column once")
    for name in declared.partition_by:
        type_ = schema.field(name).type
        _refuse_type("partition_by", name, type_, is_partition_type, "dates, text, integers, booleans")
        if name in declared.order_by:
            raise ConfigurationError(
                "useless-order",
                f"`order_by` names the partition column {name!r}, which has the same value in all rows of a partition.",
                next="name a column in `order_by` whose value differs between older and newer versions of a row",
            )


def _without_operation(schema: pa.Schema, declared: TableSpec) -> pa.Schema:
    """Remove the delete rule's column, unless the rule keeps it."""
    delete = declared.delete
    if delete is None or delete.keep:
        return schema
    if delete.operation in (*declared.key, *declared.order_by, *declared.partition_by):
        setting = "not_null" if delete.not_null else "column"
        raise ConfigurationError(
            "delete-column-in-use",
            f"`delete.{setting}` is {delete.operation!r}, which is also a key, ordering or partition column, and `keep` is "
            "false.",
            next="set `keep = true` in [tables.….delete], or name another column",
        )
    return schema.remove(schema.get_field_index(delete.operation)) if delete.operation in schema.names else schema


def _refuse_unfit_rules(schema: pa.Schema, declared: TableSpec) -> None:
    """Refuse settings that contradict each other or the columns."""
    if declared.ties == "content":
        _refuse_nested(schema)
        if declared.stamped:
            raise _bad_setting(
                f"`ties` is content, but only arrival orders the rows: no file has the column {declared.order_by[0]!r}, so it "
                "holds receipt stamps.",
                'set `ties = "arrival"`, or name a column of the files in `order_by`',
            )
    if declared.groups:
        _refuse_groups(schema, declared)
    if declared.key_scope == "table" and (named := sorted(set(declared.key) & set(declared.partition_by))):
        raise _bad_setting(
            f"`key_scope` is table, but `key` names the partition column {named[0]!r}, so a key could never change its "
            f"partition.",
            f'remove {named[0]!r} from `key`, or set `key_scope = "partition"`',
        )
    if declared.key_scope == "table" and declared.key_decides_partition:
        parts = ", ".join(one.expression for one in declared.hash_columns)
        why = f"`partition_by` is {parts}" if parts else "the table has one partition"
        raise _bad_setting(
            f"`key_scope` is table, but {why}, so a key has one row in the whole table anyway: the setting would have no effect.",
            'set `key_scope = "partition"`, or leave it out',
        )
    first = declared.ordering[0]
    if declared.history and (first.ascending or first.nulls_first):
        raise _bad_setting(
            f"`order_by` begins with {str(first)!r}. With `history`, a version is valid until the next greater value of the "
            "first ordering column.",
            "begin `order_by` with a column in which the greatest value wins and null loses",
        )


def evolve(spec: TableSpec, schema: pa.Schema) -> TableSpec:
    """The spec after a batch whose files have ``schema``: new columns at the end, wider types, or unchanged.

    A type that can't be widened stays; rows whose values don't convert go to quarantine later. Key columns never change their
    type, because their canonical bytes would change.
    """
    fields = list(spec.schema)
    numbering = _Numbering(spec.last_field_id)
    places = {f.name: i for i, f in enumerate(fields)}
    dropped = {spec.delete.operation} if spec.delete and not spec.delete.keep else set()
    for incoming in schema:
        name = spec.table_name_of(incoming.name)
        if name in dropped:
            continue
        if name not in places:
            _refuse_reserved_and_ambiguous([*(f.name for f in fields), name])
            fields.append(numbering.field(incoming))
            continue
        place = places[name]
        if name not in (*spec.key, *spec.partition_by):
            wider = widen(fields[place].type, normalize(incoming.type))
            if not wider.equals(fields[place].type):
                _refuse_ambiguous_within(name, wider)
                fields[place] = fields[place].with_type(numbering.type(wider))
    if pa.schema(fields).equals(spec.schema):
        return spec
    if spec.ties == "content":
        _refuse_nested(fields)
    return _spec(fields, spec, numbering.last)


def rename(spec: TableSpec, column: str, name: str, *, one_name: bool = False) -> TableSpec:
    """The spec with a column renamed to ``name``. Raises ConfigurationError if that is not possible.

    ``one_name``: from now on no column changes its name in data files.
    """
    field = _free_field(spec, column, f"be called {name!r}")
    if not name.strip() or name.lower().startswith(RESERVED) or not name.isprintable():
        raise ConfigurationError(
            "unfit-column-name",
            f"A column can't be called {name!r}: the name is blank, begins with {RESERVED}, or has unprintable characters. "
            "Nothing was changed.",
            next="choose another name",
        )
    clash = next((own for own in (*spec.schema.names, _operation(spec)) if own.lower() == name.lower()), None)
    if name == field.name:
        raise ConfigurationError(
            "column-exists",
            f"The column is already called {name!r}. Nothing was changed.",
            next="give another name; `lakeupsert schema` lists the columns",
        )
    if clash not in (None, field.name):
        raise ConfigurationError(
            "column-exists",
            f"The column {field.name!r} can't be called {name!r}: the table has a column {clash!r}, and names must differ by "
            "more than case. Nothing was changed.",
            next="choose another name, or rename or drop that column first",
        )
    fields = [f.with_name(name) if f.name == field.name else f for f in spec.schema]
    return _record(spec, _rename_of(spec, field), fields, one_name=one_name)


def drop(spec: TableSpec, column: str, *, one_name: bool = False) -> TableSpec:
    """The spec without a column. Raises ConfigurationError if the column is needed. ``one_name`` as in `rename`."""
    field = _free_field(spec, column, "be dropped")
    fields = [f for f in spec.schema if f.name != field.name]
    return _record(spec, _rename_of(spec, field), fields, one_name=one_name)


def retype(spec: TableSpec, column: str, type_: pa.DataType, *, one_name: bool = False) -> TableSpec:
    """The spec with a column whose values become ``type_``, under a new field id. ``one_name`` as in `rename`.

    Raises ConfigurationError if that is not possible. Whether the values convert is not asked here.
    """
    field, type_ = _free_field(spec, column, f"become {type_}"), normalize(type_)
    _refuse_retype(spec, field, type_)
    numbering = _Numbering(spec.last_field_id)
    became = numbering.field(pa.field(field.name, type_))
    change = Retype.of(numbering.last, TypeChange(field.type, type_))
    one = msgspec.structs.replace(_rename_of(spec, field), retyped=change)
    fields = [became if f.name == field.name else f for f in spec.schema]
    return _record(spec, one, fields, one_name=one_name)


def is_retypable(spec: TableSpec, column: str) -> bool:
    """Whether the text of a column may become another type."""
    fits = spec.mode == "rows" and spec.ties == "arrival"
    return fits and column in spec.schema.names and column not in roles(spec)


def _refuse_retype(spec: TableSpec, field: pa.Field, type_: pa.DataType) -> None:
    name, now = field.name, field.type
    was, becomes = type_name(now), type_name(type_)
    if type_.equals(now):
        raise ConfigurationError(
            "same-type",
            f"The column {name!r} is {was} already. Nothing was changed.",
            next="give another type; `lakeupsert schema` lists the columns",
        )
    odd = next((t for t in (now, type_) if pa.types.is_nested(t) or isinstance(t, pa.BaseExtensionType)), None)
    if odd is not None or pa.types.is_null(type_):
        raise ConfigurationError(
            "unfit-type",
            f"The column {name!r} is {was} and can't become {becomes}: {type_name(odd or type_)} does not convert value by "
            "value. Nothing was changed.",
            next="drop the column and land its values again under another name",
        )
    if widen(now, type_).equals(type_):
        raise ConfigurationError(
            "grows-by-itself",
            f"The column {name!r} is {was}, and every value of it is one of {becomes}. It grows to that without a retype. "
            "Nothing was changed.",
            next=f'set `{toml_key(name)} = "{becomes}"` under [tables.….schema]; the next batch widens the column',
        )
    if spec.mode == "columns":
        raise ConfigurationError(
            "retype-not-supported",
            f'The column {name!r} can\'t become {becomes}: in a table with `mode = "columns"`, files list the columns of each '
            "row by their ids. Nothing was changed.",
            next="drop the column and land its values again under another name",
        )


def roles(spec: TableSpec) -> dict[str, str]:
    """The setting that names each column; the first one, if several do."""
    sources = [source for one in spec.partition_from for source in one.sources]
    named = {"key": spec.key, "order_by": spec.order_by, "partition_by": (*spec.partition_by, *sources)}
    named |= {f"groups.{g.name}": (*(o.column for o in g.ordering), *g.columns) for g in spec.groups}
    by_column = {column: role for role in reversed(named) for column in named[role]}
    return ({_operation(spec): "delete"} if _operation(spec) else {}) | by_column


def _operation(spec: TableSpec) -> str:
    return spec.delete.operation or "" if spec.delete else ""


def _free_field(spec: TableSpec, column: str, what: str) -> pa.Field:
    """The field of a column that may be renamed or dropped. Raises ConfigurationError if the column can't ``what``."""
    name = spec.table_name_of(column)
    role = roles(spec).get(name)
    if role is not None:
        raise ConfigurationError(
            "column-in-use",
            f"The column {name!r} can't {what}: `{role}` names it. Nothing was changed.",
            next="these columns are fixed when a table is created; create a table with another name and `processed` to "
            "change them",
        )
    if name not in spec.schema.names:
        hint = did_you_mean(name, spec.schema.names, cutoff=0.6)
        raise ConfigurationError(
            "unknown-column",
            f"The table has no column {column!r}.{hint} Its columns: {', '.join(spec.schema.names)}. Nothing was changed.",
            next="`lakeupsert schema` lists the columns",
        )
    if spec.ties == "content":
        raise ConfigurationError(
            "content-decides",
            f"The column {name!r} can't {what}: `ties` is content, so all columns decide between equal ordering values, in the "
            "order of their names. Nothing was changed.",
            next="keep the column, or give readers a view with other names",
        )
    return spec.schema.field(name)


def _rename_of(spec: TableSpec, field: pa.Field) -> Rename:
    return Rename(id=field_id(field), name=field.name, last_field_id=spec.last_field_id)


def _record(spec: TableSpec, one: Rename, fields: Sequence[pa.Field], *, one_name: bool) -> TableSpec:
    """The next spec, with ``fields``. A field with a new id is the one that a retype brings."""
    changed = msgspec.structs.replace(spec, renames=(*spec.renames, one))
    if spec.one_name_since is not None or one_name:
        written = [] if one.id in {other.id for other in spec.file_names} else [FileName(id=one.id, name=one.name)]
        changed = msgspec.structs.replace(
            changed,
            one_name_since=len(spec.renames) if spec.one_name_since is None else spec.one_name_since,
            file_names=(*spec.file_names, *written),
        )
    return _spec(fields, changed, max(spec.last_field_id, *map(field_id, fields)))


def _refuse_type(role: str, name: str, type_: pa.DataType, allowed: Callable[[pa.DataType], bool], names: str) -> None:
    if allowed(type_):
        return
    hint = ""
    if role == "partition_by" and pa.types.is_timestamp(type_):
        hint = f', for example `{toml_key(name)} = "date"` if all its times are midnight'
    raise ConfigurationError(
        "unfit-type",
        f"Column {name!r} is {type_} and can't be in `{role}`, which accepts {names}.",
        next=f"name another column in `{role}`, or give {name!r} another type under [tables.….schema]{hint}",
    )


def _refuse_operation_slip(column: str, files: pa.Schema, named: Sequence[str]) -> None:
    """Refuse a delete column that is probably a typo of a column in the files: it would delete nothing.

    A first load without the column is common and allowed.
    """
    close = find_typo(column, [name for name in files.names if name not in named])
    if column in files.names or close is None:
        return
    raise ConfigurationError(
        "missing-column",
        f"`delete.column` names the column {column!r}, which no readable file has.{suggest(column, files)}",
        next=f"correct `delete.column` in lakeupsert.toml; if {column!r} comes with later files, give it its type under "
        f'[tables.….schema]: `{toml_key(column)} = "string"`',
    )


def _refuse_groups(schema: pa.Schema, declared: TableSpec) -> None:
    computed = next((one for one in declared.partition_from if one not in declared.hash_columns), None)
    if computed is not None:
        raise _bad_setting(
            f"`partition_by` computes {computed.column!r} from {computed.source!r}, so every record needs that column. With "
            "`groups`, records of one source do not have the columns of another.",
            "partition by a column that every record has",
        )
    orderings = {"order_by": declared.ordering} | {f"groups.{g.name}.order_by": g.ordering for g in declared.groups}
    for where, ordering in orderings.items():
        for o in ordering:
            if o.nulls_first:
                raise _bad_setting(
                    f"`{where}` has {str(o)!r}. With `groups`, a null in an ordering column means that a record does not "
                    "have the group.",
                    "remove `nulls first`",
                )
    of_row = (*declared.key, *declared.partition_by, *declared.order_by)
    uses = dict.fromkeys(of_row, "a key, ordering or partition column of the table")
    for group in declared.groups:
        order_by = [o.column for o in group.ordering]
        for name in (*order_by, *group.columns):
            if name in uses:
                raise _bad_setting(
                    f"`groups.{group.name}` names {name!r}, which is {uses[name]}.", "name each column in one place"
                )
            uses[name] = f"in `groups.{group.name}` already"
            if name not in schema.names:
                raise ConfigurationError(
                    "missing-column",
                    f"`groups.{group.name}` names the column {name!r}, which no readable file has.{suggest(name, schema)}",
                    next="correct the name; if the column comes with later files, give it a type under [tables.….schema]: "
                    f'`{toml_key(name)} = "…"`',
                )
        for name in order_by:
            _refuse_type(f"groups.{group.name}.order_by", name, schema.field(name).type, is_order_type, _ORDER_TYPES)


def _bad_setting(what: str, instead: str) -> ConfigurationError:
    return ConfigurationError("bad-setting", what, next=instead)


def _add_computed(schema: pa.Schema, computed: PartitionColumn, declared: TableSpec) -> pa.Schema:
    """Add a computed partition column. Raises ConfigurationError if it can't be computed, or has the name of another column."""
    takes = f"`partition_by` has `{computed.expression}` of the column"
    for source in computed.sources:
        if source not in schema.names:
            raise ConfigurationError(
                "missing-column",
                f"{takes} {source!r}, which no readable file has.{suggest(source, schema)}",
                next="correct `partition_by` in lakeupsert.toml, or add files that have that column",
            )
    if computed.function == "bucket":
        _refuse_unfit_hash(computed, declared)
    elif not (is_timestamp(type_ := schema.field(computed.sources[0]).type) or is_date(type_)):
        raise ConfigurationError(
            "unfit-type",
            f"{takes} {computed.source!r}, which is {type_}; expected a date or timestamp.",
            next=f'name another column, or give this one a type, for example `{toml_key(computed.sources[0])} = "timestamp"`, '
            "under [tables.….schema]",
        )
    text = computed.expression
    if text.lower() in map(str.lower, schema.names) and computed.column == computed.default_name:
        raise ConfigurationError(
            "bad-setting",
            f"`partition_by` has {text!r}. That may be an expression or the column with that name; the landing files have both.",
            next=f"for the former write `{text} as NAME`; for the latter rename the column at the source of the landing files",
        )
    if computed.column in schema.names:
        raise ConfigurationError(
            "partition-in-files",
            f"`partition_by` computes the column {computed.column!r} by `{text}`, but the landing files have a column with that "
            "name.",
            next=f"choose another name: `{text} as NAME`",
        )
    return schema.append(pa.field(computed.column, computed.type))


def _refuse_unfit_hash(computed: PartitionColumn, declared: TableSpec) -> None:
    """Only what never changes of a key may decide its partition, or the key would move without notice."""
    for source in computed.hashed:
        if source not in declared.key:
            raise _bad_setting(
                f"`partition_by` has `{computed.expression}`, but {source!r} is not in `key`: a row whose {source!r} changes "
                "would leave its old version in another partition.",
                f"name columns of `key` in it: {', '.join(declared.key)}",
            )
        if source in declared.partition_by:
            raise _bad_setting(
                f"`partition_by` has `{computed.expression}`, but {source!r} is a partition column itself, with one value in "
                "each partition.",
                f"remove {source!r} from `{computed.expression}`",
            )


def _refuse_nested(fields: Iterable[pa.Field]) -> None:
    for field in fields:
        if pa.types.is_nested(field.type):
            raise ConfigurationError(
                "unfit-type",
                f"Column {field.name!r} is {field.type}, whose values have no order, but `ties` is content.",
                next=f'set `ties = "arrival"`, or give {field.name!r} the type string under [tables.….schema]',
            )


def _refuse_reserved_and_ambiguous(names: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if name.lower().startswith(RESERVED) or other is not name:
            reason = f"begins with {RESERVED}, which is reserved for lakeupsert"
            if other is not name:
                reason = f"differs from {other!r} only by case, and engines like Spark take the two for one"
            raise ConfigurationError(
                "unfit-column-name",
                f"The column name {name!r} {reason}.",
                next="rename the column at the source of the landing files",
            )


def _refuse_ambiguous_within(column: str, type_: pa.DataType) -> None:
    names = [f.name.lower() for f in type_] if pa.types.is_struct(type_) else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            "unfit-column-name",
            f"Column {column!r} would contain two fields whose names are equal or differ only by case ({twice!r} in lower "
            "case); engines like Spark take them for one.",
            next="rename the field at the source of the landing files",
        )
    for i in range(type_.num_fields if pa.types.is_nested(type_) else 0):
        _refuse_ambiguous_within(column, type_.field(i).type)


class _Numbering:
    """Assigns ids to fields without one, depth first. Nested fields get their own ids, as in Iceberg."""

    def __init__(self, last: int) -> None:
        self.last = last

    def _next(self) -> int:
        self.last += 1
        return self.last

    def field(self, field: pa.Field) -> pa.Field:
        metadata = {FIELD_ID: str(self._next()).encode()}
        return pa.field(field.name, self.type(normalize(field.type)), nullable=True, metadata=metadata)

    def type(self, type_: pa.DataType) -> pa.DataType:
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

    def _child(self, field: pa.Field) -> pa.Field:
        metadata = field.metadata or {FIELD_ID: str(self._next()).encode()}
        return pa.field(field.name, self.type(field.type), field.nullable, metadata)


def _spec(fields: Sequence[pa.Field], like: TableSpec, last_field_id: int) -> TableSpec:
    schema = pa.schema(fields)
    texts = tuple(FieldText(id=field_id(f), name=f.name, type=str(f.type)) for f in schema)
    return msgspec.structs.replace(
        like,
        fields=texts,
        arrow_schema=base64.b64encode(schema.serialize()).decode(),
        last_field_id=last_field_id,
        file_names=_with_new_names(like, texts),
    )


def _with_new_names(spec: TableSpec, fields: Iterable[FieldText]) -> tuple[FileName, ...]:
    """`file_names`, with those of the ``fields`` that are new and whose name is that of another field in files."""
    found = list(spec.file_names)
    for field in fields:
        if field.id <= spec.last_field_id:
            continue
        name, taken = field.name, {one.name.lower() for one in found}
        while name.lower() in taken:
            name, taken = f"{name}_{field.id}", taken | {other.name.lower() for other in fields}
        if name != field.name:
            found.append(FileName(id=field.id, name=name))
    return tuple(found)
