"""How the spec of a table changes: new columns, wider types, renames, drops and retypes.

Each function returns the next version of a spec, or raises. Nothing is written here: `append` and `schema` add it to the chain.
"""

import base64
from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa

from lakeupsert.config import toml_key
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.misnamed import did_you_mean
from lakeupsert.table.spec import (
    FIELD_ID,
    RESERVED,
    FieldText,
    FileName,
    Rename,
    Retype,
    TableSpec,
    TypeChange,
    field_id,
)
from lakeupsert.table.types import normalize, type_name, widen, with_fields


def evolve(spec: TableSpec, schema: pa.Schema) -> TableSpec:
    """The spec after a batch whose files have ``schema``: new columns at the end, wider types, or unchanged.

    A type that can't be widened stays; rows whose values don't convert go to quarantine later. Key columns never change their
    type, because their canonical bytes would change.
    """
    fields = list(spec.schema)
    numbering = Numbering(spec.last_field_id)
    places = {f.name: i for i, f in enumerate(fields)}
    dropped = {spec.delete.operation} if spec.delete and not spec.delete.keep else set()
    for incoming in schema:
        name = spec.table_name_of(incoming.name)
        if name in dropped:
            continue
        if name not in places:
            refuse_reserved_and_ambiguous([*(f.name for f in fields), name])
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
        refuse_nested(fields)
    return spec_of(fields, spec, numbering.last)


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
    clash = next((own for own in (*spec.schema.names, spec.operation) if own.lower() == name.lower()), None)
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
    numbering = Numbering(spec.last_field_id)
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
    named |= {f"groups.{g.name}": g.all_columns for g in spec.groups}
    by_column = {column: role for role in reversed(named) for column in named[role]}
    return ({spec.operation: "delete"} if spec.operation else {}) | by_column


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
    return spec_of(fields, changed, max(spec.last_field_id, *map(field_id, fields)))


def refuse_nested(fields: Iterable[pa.Field]) -> None:
    for field in fields:
        if pa.types.is_nested(field.type):
            raise ConfigurationError(
                "unfit-type",
                f"Column {field.name!r} is {field.type}, whose values have no order, but `ties` is content.",
                next=f'set `ties = "arrival"`, or give {field.name!r} the type string under [tables.….schema]',
            )


def refuse_reserved_and_ambiguous(names: Iterable[str]) -> None:
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
            f"Column {column!r} has two fields called {twice!r}, if case is ignored, as engines like Spark do.",
            next="rename the field at the source of the landing files",
        )
    for i in range(type_.num_fields if pa.types.is_nested(type_) else 0):
        _refuse_ambiguous_within(column, type_.field(i).type)


class Numbering:
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
        return with_fields(type_, self._child)

    def _child(self, field: pa.Field) -> pa.Field:
        metadata = field.metadata or {FIELD_ID: str(self._next()).encode()}
        return pa.field(field.name, self.type(field.type), field.nullable, metadata)


def spec_of(fields: Sequence[pa.Field], like: TableSpec, last_field_id: int) -> TableSpec:
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
