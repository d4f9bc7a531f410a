"""What an operator calls: one module for each command beside the night itself, and what several of them need."""
