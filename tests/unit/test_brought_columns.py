"""Which columns rows bring: `rows.columns`, with bitmaps of every length."""

import numpy as np
import pyarrow as pa

from lakeupsert.rows.columns import find_rows_that_bring, mark_carried
from lakeupsert.table.spec import HAS, TableSpec
from tests.harness.specs import create

NAMES = [f"c{i}" for i in range(9)]
SCHEMA = pa.schema([("k", pa.string()), ("p", pa.string()), ("ts", pa.int64()), *((n, pa.string()) for n in NAMES)])


def use_memory(*sizes: int) -> None:
    """Leave ones where NumPy puts its next arrays of these sizes."""
    for size in sizes:
        used = [np.ones(size, np.uint8) for _ in range(50)]
        del used


def bitmap(spec: TableSpec, *names: str, carried: bool = False) -> bytes:
    [(_, ids)] = spec.columns_of
    return (sum(1 << ids[name] for name in names) | carried).to_bytes(2, "little")


def test_row_without_columns_brings_none_and_is_not_carried() -> None:
    """A tombstone has no bitmap. If it is read with what was in memory, its key can stay as it was."""
    spec = create(SCHEMA, mode="columns", key_scope="table", key=["k"], order_by=["ts"], partition_by=["p"])
    short, long = bitmap(spec, "c1")[:1], bitmap(spec, "c8") + b"\1"
    rows = pa.table({HAS: pa.array([None, b"", bitmap(spec, "c0", "c8"), short, long], pa.binary())})
    use_memory(1, spec.last_field_id + 1)
    brings = find_rows_that_bring(rows, spec, np.arange(5))
    assert [[name for name in NAMES if brings[name][i]] for i in range(5)] == [[], [], ["c0", "c8"], ["c1"], ["c8"]]
    use_memory(1, spec.last_field_id + 1)
    assert mark_carried(rows, spec)[HAS].to_pylist() == [
        bitmap(spec, *names, carried=True) for names in ([], [], ["c0", "c8"], ["c1"], ["c8"])
    ]
