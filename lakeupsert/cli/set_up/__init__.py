"""Commands that set a table up."""
