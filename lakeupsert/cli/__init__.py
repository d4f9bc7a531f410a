"""The command line. `main` is the program: call it without arguments, or run it with click's test runner."""

try:
    from importlib import import_module

    from lakeupsert.cli.program import COMMANDS, main

    for _command in COMMANDS:
        import_module(f"lakeupsert.cli.{_command}")  # registers the command with `main`
except KeyboardInterrupt:  # nothing has started that an answer could report
    raise SystemExit(130) from None

__all__ = ["main"]
