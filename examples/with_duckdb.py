"""Query the table with DuckDB, after `with_python.py` or `lakeupsert run`.

python examples/with_duckdb.py
"""

from pathlib import Path

import duckdb

from lakeupsert import Table

if __name__ == "__main__":
    table = Table.open(Path(__file__).with_name("lakeupsert.toml"))
    sales = table.to_duckdb()
    query = "select transaction_date, sum(amount) as amount from sales group by all order by all"
    for day, amount in duckdb.sql(query).fetchall():
        print(day, amount)
    table.close()
