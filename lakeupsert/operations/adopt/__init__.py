"""`adopt`: the files that another program wrote become a table."""
