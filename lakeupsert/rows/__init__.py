"""Rules and arithmetic on rows in memory, and the files that hold rows. Nothing here knows a night, a queue or a chain's head."""
