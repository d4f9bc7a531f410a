"""Phase one: what is new in the landing zone becomes a batch."""
