"""Quarantine files: rows that were refused, with the reason."""

import pyarrow as pa

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("reason_code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("position", pa.int64()),
        pa.field("raw", pa.string()),
        pa.field("arrow", pa.binary()),
        pa.field("batch", pa.string(), nullable=False),
    ]
)
