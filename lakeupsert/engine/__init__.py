"""Row work on the files it is given. Nothing is committed here: what is written counts only when a chain names it."""
