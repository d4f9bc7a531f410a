"""The formats of landing files, a module for each, and what they share."""
