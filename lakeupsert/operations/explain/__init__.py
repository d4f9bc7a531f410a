"""`explain`: every stored version of a key, and why the current one won."""
