"""Query the table with Polars, after `with_python.py` or `lakeupsert run`.

python examples/with_polars.py
"""

from pathlib import Path

import polars as pl

from lakeupsert import Table

if __name__ == "__main__":
    table = Table.open(Path(__file__).with_name("lakeupsert.toml"))
    sales = table.to_polars().group_by("transaction_date").agg(pl.col("amount").sum()).sort("transaction_date")
    for day, amount in sales.collect().rows():
        print(day, amount)
    table.close()
