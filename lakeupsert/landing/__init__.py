"""Landing files to rows: what a file holds, and which of its rows a table takes."""
