"""Run a night, then read the table.

python examples/with_python.py
"""

from pathlib import Path

from lakeupsert import Table

if __name__ == "__main__":
    with_config = Path(__file__).with_name("lakeupsert.toml")
    sales = Table.open(with_config)
    night = sales.run(host="local")
    print(f"snapshot {night.publish.snapshot}: {night.publish.rows} rows")
    for row in sales.to_arrow(where="transaction_date < '2020-07-01'").read_all().to_pylist():
        print(row["order_id"], row["item"], row["amount"])
    sales.close()
