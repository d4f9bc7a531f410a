"""The flow, one module a step. Each looks at the table's state, never at what a step before it did, so each repeats."""
