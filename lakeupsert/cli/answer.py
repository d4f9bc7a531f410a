"""The answer of a command as JSON, as text, and as lines of the log. Only this module prints it."""

import json
import sys
from dataclasses import replace

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.signals import redirect_to_null
from lakeupsert.errors import Standing, TryAgainError
from lakeupsert.events import CommandError, Notice, Sink
from lakeupsert.phrases import shell_paths, without_controls

SCHEMA_VERSION = 1


def json_object(call: Call, answer: Answer, started_at: str, seconds: float) -> dict[str, object]:
    error = answer.error
    standing = error.standing if error and error.standing else Standing(None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": call.command,
        "table": call.table,
        "ok": error is None,
        "exit_code": error.exit_code if error else 0,
        "started_at": started_at,
        "seconds": round(seconds, 3),
        "result": answer.result,
        "warnings": [*answer.warnings, *answer.json_warnings],
        "error": error
        and {
            **{name: getattr(error, name) for name in ("code", "message", "data_changed")},
            **{name: getattr(standing, name) for name in ("committed", "certain", "readers_see", "table")},
            **{name: getattr(error, name) for name in ("next", "partition")},
        },
    }


def print_answer(call: Call, answer: Answer, started_at: str, seconds: float) -> Answer:
    """Print the answer and return it, with an error added if standard output can't be written.

    A reader that closes its end early (`| head`) is not an error. A standard output that can't be written is one, which is
    then printed for people even with `--json`. If standard error can't be written either, only the exit code is left.
    """
    text = json.dumps(json_object(call, answer, started_at, seconds)) if call.as_json else answer.text
    silent = call.as_json
    try:
        if text:
            print(without_controls(text) if sys.stdout.isatty() else text, flush=True)
    except BrokenPipeError:
        redirect_to_null(sys.stdout)
    except OSError as e:
        redirect_to_null(sys.stdout)
        silent = False
        if answer.error is None:
            error = TryAgainError(
                "output-failed",
                f"The command finished, but its answer can't be written to standard output: {e.strerror or e}.",
                data_changed=call.changed,
                next="fix the target of standard output, then run the same command again; it does nothing twice",
            )
            call.account(error)
            answer = replace(answer, error=error)
    if call.log is not None:
        _log_problems(call.log, call, answer)
    elif not silent:
        try:
            _print_problems(answer)
        except (OSError, SystemExit):  # rich exits if nobody reads its pipe
            redirect_to_null(sys.stderr)
    return answer


def _print_problems(answer: Answer) -> None:
    if not answer.warnings and answer.error is None:
        return
    from rich.console import Console  # respects NO_COLOR and uses colours only on a terminal
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    for warning in answer.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), _for_people(warning)))
    if answer.error is not None:
        error = answer.error
        console.print(Text.assemble(("Error: ", "bold red"), _for_people(error.message)))
        console.print(Text(str(error.standing or "Committed: no batch")))
        console.print(Text(f"Next: {_for_people(error.next)}"))


def _for_people(text: str) -> str:
    return without_controls(shell_paths(text))


def _log_problems(log: Sink, call: Call, answer: Answer) -> None:
    for warning in (*answer.warnings, *answer.json_warnings):
        log(Notice(table=call.table, message=warning))
    if answer.error is not None:
        names = ("code", "message", "exit_code", "data_changed", "next", "partition")
        log(CommandError(table=call.table, **{name: getattr(answer.error, name) for name in names}))
