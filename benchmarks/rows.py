"""Rows for benchmarks, each made from a number: a text key of 16 characters, an ordering column and nine others.

About 20 compressed bytes a row. Stored keys are even numbers, so odd ones are new, wherever they lie among the others.
"""

from datetime import date, timedelta
from pathlib import Path

from lakeupsert.config import TableSettings

COLUMNS = ("k", "ts", "amount", "quantity", "note", *(f"c{n}" for n in range(6)))


def columns(partition: int, source: str, key: str, night: int) -> str:
    """SQL: ``key`` is an expression of ``i``, which comes from ``source``; another night has other values for a key.

    No value depends on i alone: what repeats from partition to partition would vanish when a landing file is compressed.
    """
    values = ", ".join(f"(hash(n + {c}, {night}) % 1000)::INTEGER AS c{c}" for c in range(6))
    return f"""SELECT lpad(n::VARCHAR, 16, '0') AS k, TIMESTAMP '2026-01-01' + INTERVAL {night} DAY AS ts,
        (hash(n, {night}) % 100000)::BIGINT AS amount, (hash(n) % 9)::INTEGER AS quantity,
        substr(md5(n::VARCHAR), 1, 12) AS note, {values}
        FROM (SELECT {partition}00000000000 + {key} AS n FROM {source} t(i))"""


def stored(partition: int, rows: int) -> str:
    """SQL for so many rows that are there before the first night."""
    return f"{columns(partition, f'range({rows})', 'i * 2', 0)} ORDER BY k"


def coming(partition: int, rows: int, key: str, night: int) -> str:
    """SQL for so many rows or, where keys come twice, fewer; with their partition."""
    once = f"{columns(partition, f'range({rows})', key, night)} QUALIFY row_number() OVER (PARTITION BY k) = 1"
    return f"SELECT DATE '{day(partition)}' AS d, * FROM ({once})"


def day(number: int) -> date:
    return date(2026, 1, 1) + timedelta(days=number)


def settings(lake: Path, strategy: str, **more: object) -> TableSettings:
    """Zones are folders of ``lake``, of which landing is made."""
    (lake / "landing").mkdir(parents=True, exist_ok=True)
    return TableSettings(
        landing=str(lake / "landing"),
        processed=str(lake / "table"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
        strategy=strategy,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
