"""The command line. `main` is the program: call it without arguments, or run it with click's test runner."""

try:
    # Each of these registers its commands.
    from lakeupsert.cli import doctor, explain, init, plan, reconcile, redrive, report, reprocess, schema, upkeep  # noqa: F401
    from lakeupsert.cli.commands import main
except KeyboardInterrupt:  # nothing has begun that an answer could tell of
    raise SystemExit(130) from None

__all__ = ["main"]
