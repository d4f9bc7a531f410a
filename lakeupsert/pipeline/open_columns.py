"""Columns and fields of landing files that show no type yet, because no row has a value in them (ADR 0049).

They stay open: the table gets them with their first value, so that nobody's guess is their type for good.

Reads     the configuration, and the columns that surveys found
Writes    nothing
Repeat    safe
"""

from collections.abc import Iterator, Mapping

import pyarrow as pa

from lakeupsert.config import toml_key
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.formats.inference import known_part, without_nulls
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.table.types import is_partition_type

Types = Mapping[str, pa.DataType]


def known_types(declaration: Declaration, observed: Types, given: Types) -> dict[str, pa.DataType]:
    """The types of columns that a table lacks: those ``given`` by the configuration, else as ``observed`` in files.

    Open columns are left out. Keys and the operation column are text. In mode columns an open column is text, too: a null there
    is a value that a record brings, and needs a column.

    Raises ConfigurationError if an ordering or a partition column is open: what it is decides order and place of every row.
    """
    types: dict[str, pa.DataType] = {}
    for name, type_ in observed.items():
        if name in given:
            types[name] = given[name]
        elif name in declaration.text_columns or not declaration.nulls_say_nothing:
            _refuse_open(declaration, name, type_)
            types[name] = without_nulls(type_)
        elif (known := known_part(type_)) is not None:
            types[name] = known
        else:
            _refuse_open(declaration, name, type_)
    return types


def _refuse_open(declaration: Declaration, name: str, type_: pa.DataType) -> None:
    if not pa.types.is_null(type_) or name not in declaration.deciding_columns:
        return
    raise ConfigurationError(
        "open-column",
        f"No row has a value in the column {name!r} yet, so its type is unknown, and `order_by` or `partition_by` of table "
        f"{declaration.name!r} needs it: as text, 9 would be above 10. Nothing was committed, and the landing files wait.",
        next=f"give it a type under [tables.{declaration.name}.schema], for example `{toml_key(name)} = "
        '"bigint"`, or run again once a file has a value in it',
    )


def fitted_types(declaration: Declaration, observed: Types, given: Types) -> dict[str, pa.DataType]:
    """``observed``, with a type that the settings accept for each column whose type they refuse: rows that do not fit it would be
    refused anyway, and other rows may show another type once those are left out."""
    parts = declaration.partition_columns
    moments = {one.source for one in parts if one.source}
    whole = {one.column for one in parts} - moments
    types: dict[str, pa.DataType] = {}
    for name, type_ in observed.items():
        nested = pa.types.is_nested(type_) and (
            name in declaration.deciding_columns or declaration.settings.ties == "content"
        )
        if name in given or pa.types.is_null(type_):
            types[name] = type_
        elif name in moments and pa.types.is_string(type_):
            types[name] = pa.timestamp("us")
        else:
            types[name] = pa.string() if nested or (name in whole and not is_partition_type(type_)) else type_
    return types


def open_parts(declaration: Declaration, observed: Types, given: Types, own: Types, *, ahead: bool) -> list[str]:
    """Warnings about what shows no type in files and was not in the table before, whose columns are ``own``.

    ``ahead``: also about whole columns. After a run the files that were read say which these are (`waiting_columns`).
    """
    waiting: list[str] = []
    guessed: dict[str, str] = {}
    for name, type_ in observed.items():
        if name in given or name in declaration.text_columns or (pa.types.is_null(type_) and name in own):
            continue
        if pa.types.is_null(type_):
            if not declaration.nulls_say_nothing:
                guessed[name] = "text"
            elif ahead:
                waiting.append(name)
            continue
        for path, kept in _unknown_within(name, type_):
            if kept:
                guessed[path] = "text"
            else:
                waiting.append(path)
    kept_as_text = [
        f"column {name!r} is {type_} from now on, since no row shows another type; if that is wrong, give it its type under "
        f"[tables.{declaration.name}.schema] before the first batch, or drop it (`lakeupsert schema drop`) before values come"
        for name, type_ in guessed.items()
    ]
    return [*waiting_columns(waiting), *kept_as_text]


def _unknown_within(path: str, type_: pa.DataType) -> Iterator[tuple[str, bool]]:
    """The parts of a column without any value, and whether `known_part` keeps them as text."""
    t = pa.types
    if t.is_struct(type_):
        whole = known_part(type_) is not None and all(known_part(f.type) is None for f in type_)
        for field in type_:
            if t.is_null(field.type):
                yield f"{path}.{field.name}", whole
            else:
                yield from _unknown_within(f"{path}.{field.name}", field.type)
    elif t.is_list(type_):
        if t.is_null(type_.value_type):
            yield f"{path}[]", True
        else:
            yield from _unknown_within(f"{path}[]", type_.value_type)


def waiting_columns(names: list[str]) -> list[str]:
    """A warning about columns and fields that the table does not have yet. Fields of a change feed's `source` are no data, and
    some are null in every event."""
    names = [name for name in names if not name.startswith("__source_")]
    if not names:
        return []
    one = len(names) == 1
    what = f"{'column' if one else 'columns'} {', '.join(map(repr, names))}"
    return [
        f"{what}: no row has a value there yet, so the table gets {'it' if one else 'them'}, with "
        f"{'its type' if one else 'their types'}, once a file has one"
    ]
