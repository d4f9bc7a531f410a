"""Make some keys vanish from every object of a table, and prove it."""
