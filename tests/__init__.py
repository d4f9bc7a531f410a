"""The tests, and what they are made of: `tests.harness`."""
