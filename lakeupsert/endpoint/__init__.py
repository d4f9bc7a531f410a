"""The endpoint: an HTTP server that makes a landing file of each batch of rows, once, and its client (ADR 0059)."""
