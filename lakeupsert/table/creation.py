"""The first spec of a table, from what its configuration says and its first batch has; or why there can be none.

Reads     nothing
Writes    nothing: `append` and `adopt` add the spec to its chain
"""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pyarrow as pa
from pyarrow.types import is_date, is_timestamp

from lakeupsert.config import TableSettings, toml_key
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.evolution import Numbering, refuse_nested, refuse_reserved_and_ambiguous, spec_of
from lakeupsert.table.misnamed import find_typo, suggest
from lakeupsert.table.roles import ColumnGroup, DeleteRule, Ordering, PartitionColumn
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import is_key_type, is_order_type, is_partition_type

_GRAMMAR = {
    "order_by": " (COLUMN, then asc or desc, then nulls first or nulls last)",
    "partition_by": " (COLUMN, or year, month, date or hour of one: `date(COLUMN) as NAME`, or `bucket(N, COLUMN, …)`)",
}


_ORDER_TYPES = "numbers, text, dates, times, timestamps, booleans, binary"


_NO_EXPRESSION = (
    " It is not an expression either: those are year(COLUMN), month(COLUMN), date(COLUMN), hour(COLUMN) and "
    "bucket(N, COLUMN, …), one each."
)


def create(
    schema: pa.Schema, settings: TableSettings, *, table_id: str, stamped: bool, later: Sequence[pa.Field] = ()
) -> TableSpec:
    """Create the first spec of a table. Raises ConfigurationError if a column can't have the role that a setting gives it.

    Args:
        schema: the columns of the first batch, without field ids. The column of ``delete`` may be missing. The table does not
            keep it unless the rule says so.
        later: columns that the configuration gives types and the first batch does not have. Key, partition and ordering columns
            can't come later, except an ordering column that is in no file, which is added here.
    """
    ordering = [Ordering.parse(text) for text in settings.order_by]
    partitions = PartitionColumn.parse_all(settings.partition_by)
    declared = TableSpec(
        table_id=table_id,
        key=tuple(settings.key),
        order_by=tuple(o.column for o in ordering),
        ascending=tuple(o.column for o in ordering if o.ascending),
        nulls_first=tuple(o.column for o in ordering if o.nulls_first),
        order_in_name=settings.order_in_name,
        stamped=stamped,
        ties=settings.ties,
        delete=DeleteRule(**msgspec.structs.asdict(settings.delete)) if settings.delete else None,
        mode=settings.mode,
        nulls=settings.nulls,
        groups=groups_of(settings),
        key_scope=settings.key_scope,
        history=settings.history,
        versions=settings.versions,
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
    )
    complete = _complete(schema, declared, later)
    numbering = Numbering(0)
    return spec_of([numbering.field(f) for f in complete], declared, numbering.last)


def groups_of(settings: TableSettings) -> tuple[ColumnGroup, ...]:
    """The groups in the order of their names, since tables of TOML have no order."""
    return tuple(
        ColumnGroup(
            name=name, order_by=tuple(str(Ordering.parse(text)) for text in group.order_by), columns=group.columns
        )
        for name, group in sorted(settings.groups.items())
    )


def _complete(schema: pa.Schema, declared: TableSpec, later: Sequence[pa.Field]) -> pa.Schema:
    """All columns that the table begins with. Refuses a column that is unfit for its role in the configuration."""
    types = {field.name: field.type for field in later}
    complete = _with_order(schema, declared, types)
    for computed in declared.partition_from:
        complete = _add_computed(complete, computed, declared)
    _refuse_missing(complete, declared, schema, types)
    for field in later:
        complete = complete if field.name in complete.names else complete.append(field)
    refuse_reserved_and_ambiguous(complete.names)
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
    operation = declared.operation
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
    if declared.ties == "content":
        refuse_nested(schema)
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
        for name in group.all_columns:
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
        for o in group.ordering:
            _refuse_type(
                f"groups.{group.name}.order_by", o.column, schema.field(o.column).type, is_order_type, _ORDER_TYPES
            )


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
