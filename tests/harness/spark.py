"""What tests need of any version of Spark."""

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def collect(frame: "DataFrame") -> pa.Table:
    """The rows of a DataFrame as Arrow. `toArrow` came with 4.0; 3.5 has only the batches that `toPandas` uses."""
    if hasattr(frame, "toArrow"):
        return frame.toArrow()
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.Table.from_batches(frame._collect_as_arrow(), to_arrow_schema(frame.schema))
