"""Our own files: how their columns are written."""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.rows import datafiles
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.storage import LocalStore
from lakeupsert.table.manifest import DataFile

ROWS = 1000


def test_nested_columns_leave_the_choice_of_dictionaries_to_the_others(tmp_path: Path) -> None:
    """What repeats has a dictionary, and what does not has none (ADR 0006); what can't be counted has one."""
    parts = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])
    nested = {
        "struct": pa.array([{"x": n, "y": [str(n)]} for n in range(ROWS)], parts),
        "list": pa.array([[n] for n in range(ROWS)], pa.list_(pa.int64())),
        "large": pa.array([[n] for n in range(ROWS)], pa.large_list(pa.int64())),
        "fixed": pa.array([[n, n] for n in range(ROWS)], pa.list_(pa.int64(), 2)),
        "map": pa.array([[(str(n), {"x": n, "y": []})] for n in range(ROWS)], pa.map_(pa.string(), parts)),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int64(), (2,)), pa.array([[n, n] for n in range(ROWS)], pa.list_(pa.int64(), 2))
        ),
    }
    rows = pa.table({"key": [str(n) for n in range(ROWS)], "repeats": ["a", "b"] * (ROWS // 2), **nested})
    footer = Footer("t", "base", "1", 0)
    store = LocalStore(tmp_path)
    with DataFileWriter(store, lambda: "base.parquet", rows.schema, footer, ("key",)) as out:
        out.write(rows)
    written = pq.ParquetFile(tmp_path / "base.parquet")
    assert written.read().select(["key", "list", "map"]).equals(rows.select(["key", "list", "map"]))
    group = written.metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    without = {c.path_in_schema for c in columns if c.dictionary_page_offset is None}
    assert without == {"key"}
    assert len(columns) == 2 + 2 + 1 + 1 + 1 + 3 + 1


def test_columns_of_narrow_decimals_are_counted(tmp_path: Path) -> None:
    """Arrow counts their values, and has no `unique` for them."""
    prices = pa.array([Decimal(n % 2) for n in range(ROWS)])
    rows = pa.table({"d32": prices.cast(pa.decimal32(5, 2)), "d64": prices.cast(pa.decimal64(12, 2))})
    with DataFileWriter(
        LocalStore(tmp_path), lambda: "base.parquet", rows.schema, Footer("t", "base", "1", 0), ()
    ) as out:
        out.write(rows)
    group = pq.ParquetFile(tmp_path / "base.parquet").metadata.row_group(0)
    assert group.num_rows == ROWS
    assert all(group.column(i).dictionary_page_offset is not None for i in range(2))


@pytest.mark.parametrize("type_", [pa.int32(), pa.uint64(), pa.string(), pa.large_string(), pa.date32()], ids=str)
def test_row_groups_are_read_that_may_hold_a_value(tmp_path: Path, type_: pa.DataType) -> None:
    """Group n has 100 n to 100 n + 90: both ends are in it, and what lies between two groups is in none."""

    def typed(numbers: Sequence[int]) -> pa.Array:
        if pa.types.is_string(type_) or pa.types.is_large_string(type_):
            return pa.array([f"{n:04}" for n in numbers], type_)
        return pa.array(numbers, pa.int32()).cast(type_)

    each, path = datafiles.FEW_ROWS // 4, tmp_path / "base.parquet"
    numbers = [100 * group + n * 90 // (each - 1) for group in range(10) for n in range(each)]
    pq.write_table(pa.table({"k": typed(numbers)}), path, row_group_size=each)
    file = DataFile(name=path.name, rows=len(numbers), bytes=path.stat().st_size)
    schema = pa.schema([("k", type_), (datafiles.POSITION, pa.int64())])

    def groups(*wanted: int) -> list[int]:
        """The groups that are read for these values."""
        blocks = datafiles.stream_file(LocalStore(tmp_path), file, schema, {"k": typed(wanted)})
        return sorted({at // each for block in blocks for at in block[datafiles.POSITION].to_pylist()})

    assert groups(200) == groups(290) == groups(245, 250) == [2]
    assert groups(295) == groups(991) == groups() == []
    assert groups(0, 990) == [0, 9]
    assert groups(290, 300, 495) == [2, 3]
    assert groups(195, 600) == [6]
