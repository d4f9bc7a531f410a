"""Show the published snapshots to other engines, in their own formats."""
