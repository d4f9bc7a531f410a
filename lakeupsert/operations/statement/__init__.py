"""`update` and `delete`: a batch of what the rows of a filter or a list of keys become."""
