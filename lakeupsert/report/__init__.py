"""What an operator asks about a table, read from its chains: its state now, and the page about its last nights."""
