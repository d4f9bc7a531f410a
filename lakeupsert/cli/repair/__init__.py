"""Commands that repair a table."""
