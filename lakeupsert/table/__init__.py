"""The format: what the objects of a table say. No row is read here. Described in docs/FORMAT.md."""
