"""Keys that are unique in the whole table: the index that says where each is, and how it settles a batch."""
