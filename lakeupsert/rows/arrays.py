"""Names for values of Arrow and numpy, for signatures; columns with one value. A schema is a ``pa.Schema``, one type a
``pa.DataType``."""

from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rows: TypeAlias = pa.Table
"""n rows."""
Column: TypeAlias = pa.Array | pa.ChunkedArray
"""One value, or null, of each of n rows."""
Mask = NDArray[np.bool_]
"""Which of n rows are meant."""
Indices = NDArray[np.int64]
"""Places of rows among others, from 0 on."""
Hashes = NDArray[np.uint64]
"""One hash of each of n rows."""


def repeat(value: object, type_: pa.DataType, rows: Rows) -> Column:
    """A column of ``rows`` with this value in each."""
    return pa.repeat(pa.scalar(value, type_), rows.num_rows)


def with_column(rows: Rows, name: str, column: Column) -> Rows:
    """``rows`` with other values in a column that they have."""
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.schema.field(at), column)


def with_value(rows: Rows, name: str, value: object) -> Rows:
    """``rows`` with this value in every row of a column that they have."""
    return with_column(rows, name, repeat(value, rows.schema.field(name).type, rows))
