"""`rebuild`: a table of what is left of one whose metadata is lost."""
