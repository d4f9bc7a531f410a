"""A key, or a part of one, that somebody gives by column: its values, the filter for it, and its rows in a file."""

from collections.abc import Mapping
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.duckdb import identifier, literal
from lakeupsert.rows.arrays import Column, Rows
from lakeupsert.rows.convert import convert
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.misnamed import did_you_mean
from lakeupsert.table.spec import TableSpec


def key_values(name: str, spec: TableSpec, key: Mapping[str, object]) -> dict[str, Column]:
    """One value for each given column of the key, or of the partition, in the column's type.

    ``name``: of the table. Raises ConfigurationError if a column is another one, or a value does not fit its column.
    """
    known = (*spec.key, *spec.partition_by)
    unknown = [column for column in key if column not in known]
    if unknown:
        wrong = " ".join(
            f"{column!r} is not one of them.{did_you_mean(column, known, cutoff=0.6)}" for column in unknown
        )
        columns = f"partition column{'' if len(spec.partition_by) == 1 else 's'} {', '.join(spec.partition_by)}"
        also = f", and its {columns}" if spec.partition_by else ""
        raise ConfigurationError(
            "not-the-key",
            f"The key of table {name!r} is {', '.join(spec.key)}{also}. {wrong}",
            next=f"give `{' '.join(f'{column}=VALUE' for column in spec.key)}`, or some of these to see which keys fit",
        )
    values: dict[str, Column] = {}
    for column, value in key.items():
        type_ = spec.schema.field(column).type
        try:
            values[column], bad = convert(pa.array([value]), type_)
            fits = not bad.any() and not values[column].null_count
        except UnicodeEncodeError:  # a byte of the command line that is not UTF-8
            fits = False
        if not fits:
            raise ConfigurationError(
                "unfit-value",
                f"{value!r} can't be converted to {type_}, the type of column {column!r}.",
                next="give the value as it stands in the landing files",
            )
    return values


def key_condition(name: str, spec: TableSpec, key: Mapping[str, object]) -> str:
    """The filter for a part of a key, checked as in `key_values`. A literal of text takes the type of its column."""
    key_values(name, spec, key)
    texts = {column: value.decode() if isinstance(value, bytes) else str(value) for column, value in key.items()}
    return " AND ".join(f"{identifier(column)} = {literal(text)}" for column, text in texts.items())


def find_rows(
    store: ObjectStore, file: DataFile, schema: pa.Schema, values: Mapping[str, Column], spec: TableSpec
) -> Rows:
    """The live rows with the one value of each of these columns of the stored key, as `stream_file` gives them."""
    given = {name: values[name] for name in spec.stored_key if name in values}
    found = [schema.empty_table()]
    for rows in stream_file(store, file, schema, given, spec=spec):
        fits = [pc.equal(rows[name], value[0]) for name, value in given.items()]
        found.append(rows.filter(reduce(pc.and_, fits)) if fits else rows)
    return pa.concat_tables(found)
