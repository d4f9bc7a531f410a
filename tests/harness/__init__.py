"""What only lakeupsert's own tests, benchmarks and demos use. Authors of backends find theirs in `lakeupsert.testing`."""
