"""`reconcile --deep`: DuckDB makes the table's rows of what landed, and compares."""
