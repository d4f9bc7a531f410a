"""Lakeupsert as functions of AWS Lambda: one folder each, with its handler, an event that it takes, and its answer to that."""
