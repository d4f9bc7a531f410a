"""Commands of the night."""
