"""Query the table with Spark, after `with_python.py` or `lakeupsert run`.

python examples/with_spark.py
"""

from pathlib import Path

from pyspark.sql import SparkSession

from lakeupsert import Table

if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    table = Table.open(Path(__file__).with_name("lakeupsert.toml"))
    table.to_spark(spark).createOrReplaceTempView("sales")
    query = (
        "select transaction_date, sum(amount) as amount from sales group by transaction_date order by transaction_date"
    )
    for day, amount in spark.sql(query).collect():
        print(day, amount)
    table.close()
    spark.stop()
