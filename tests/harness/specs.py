"""Specs for tests of one module, made as a table's configuration would make them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from lakeupsert.config import DeleteSettings, GroupSettings, TableSettings
from lakeupsert.table import creation
from lakeupsert.table.roles import ColumnGroup, DeleteRule
from lakeupsert.table.spec import TableSpec

LANDED = pa.schema(
    [
        ("id", pa.int64()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("amount", pa.decimal128(12, 2)),
        ("note", pa.string()),
    ]
)
"""Columns of landing files, for tests that need some of each type."""


def create(
    schema: pa.Schema,
    *,
    table_id: str = "t",
    stamped: bool = False,
    delete: DeleteRule | None = None,
    groups: Sequence[ColumnGroup] = (),
    later: Sequence[pa.Field] = (),
    **given: Any,
) -> TableSpec:
    """`creation.create` with settings by their names."""
    others: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = TableSettings(
        landing="",
        processed="",
        delete=None if delete is None else DeleteSettings(**msgspec.structs.asdict(delete)),
        groups={g.name: GroupSettings(order_by=g.order_by, columns=g.columns) for g in groups},
        **others,
    )
    return creation.create(schema, settings, table_id=table_id, stamped=stamped, later=later)
