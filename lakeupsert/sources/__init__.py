"""Databases and topics whose rows become landing files: the files, and the position behind each."""
