"""The command line. `main` is the program: call it without arguments, or run it with click's test runner."""

try:
    from importlib import import_module

    from lakeupsert.cli.program import GROUPS, main

    for _heading, _names in GROUPS.items():
        _room = _heading.lower().replace(" ", "_")
        for _name in _names:
            import_module(f"lakeupsert.cli.{_room}.{_name}")  # registers the command with `main`
except KeyboardInterrupt:  # nothing has started that an answer could report
    raise SystemExit(130) from None

__all__ = ["main"]
