"""Phase two, for one partition: its next step, and the version that it makes."""
