"""The state of a table and its last nights, read from its chains: `status`, and the page that `report` writes."""
