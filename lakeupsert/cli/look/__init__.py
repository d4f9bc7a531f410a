"""Commands that look at a table."""
