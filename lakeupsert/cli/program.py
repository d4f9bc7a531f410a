"""`main`, the program that all commands belong to.

The function of a command has one parameter for each of its options, however many: click passes them by name.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import click

from lakeupsert import __version__, clock
from lakeupsert.cli.answer import json_object, print_answer
from lakeupsert.cli.failures import as_lakeupsert_error
from lakeupsert.cli.frame import Answer, Call, Group
from lakeupsert.cli.log import JsonLog, TextLog, is_debugging, is_verbose, log_to_stderr, wants_json
from lakeupsert.cli.signals import (
    Terminated,
    no_signals,
    open_streams,
    reader_is_gone,
    redirect_to_null,
    signal_handler,
)

COMPLETION = "_LAKEUPSERT_COMPLETE"
"""The variable in which a shell asks for its completion script, or to complete a command line."""
GROUPS = {
    "Every night": ("run", "plan", "append", "dedupe", "worker", "publish", "ingest", "maintain", "capture", "serve"),
    "Look": ("status", "history", "report", "quarantine", "diff", "explain", "reconcile", "fsck"),
    "Read": ("head", "query", "files", "export", "changes", "ddl"),
    "Change": ("update", "delete", "erase"),
    "Repair": ("redrive", "restore", "reprocess", "compact", "vacuum", "backup", "recover", "rebuild"),
    "Set up": ("try", "init", "adopt", "config", "doctor", "schema", "demo"),
}
"""The commands as `lakeupsert --help` lists them. Each has a module of its name in the room of its heading."""
_MEANT = {
    "replay": "`lakeupsert append --replay-quarantine` takes refused rows again, `lakeupsert reprocess` merges partitions again",
    "tag": "`lakeupsert publish --tag NAME` names the newest snapshot, and `--untag NAME` removes a name",
    "untag": "`lakeupsert publish --untag NAME` removes the name of a snapshot",
    "rename": "`lakeupsert schema rename OLD NEW` renames a column",
    "retype": "`lakeupsert schema retype COLUMN TYPE` gives a column another type",
    "snapshots": "`lakeupsert history` lists the snapshots",
    "tags": "`lakeupsert history` lists the snapshots with their tags",
    "show": "`lakeupsert head` shows rows, and `lakeupsert query` runs SQL",
    **dict.fromkeys(("rollback", "undo", "revert"), "`lakeupsert restore` goes back to a snapshot"),
    **dict.fromkeys(("select", "sql"), "`lakeupsert query` runs SQL, and `lakeupsert head` shows rows"),
    **dict.fromkeys(
        ("check", "verify", "validate"),
        "`lakeupsert reconcile` proves that no row was lost, `lakeupsert fsck` checks objects, `lakeupsert doctor` the machine",
    ),
    **dict.fromkeys(("repair", "fix"), "`lakeupsert fsck` finds what is damaged, and names the command that mends it"),
    **dict.fromkeys(("clean", "gc"), "`lakeupsert vacuum` deletes files that nobody needs"),
    **dict.fromkeys(
        ("upsert", "load", "import", "sync"),
        "`lakeupsert run` takes what has landed, merges and publishes it",
    ),
    **dict.fromkeys(("drop", "alter"), "`lakeupsert schema` renames, drops and retypes columns"),
    **dict.fromkeys(("list", "ls"), "`lakeupsert files` lists the table's files, `lakeupsert status` the tables"),
    "watch": "`lakeupsert status --watch` refreshes every second",
    "help": "`lakeupsert --help` lists the commands",
    "version": "`lakeupsert --version` prints the version",
    "merge": "`lakeupsert dedupe` merges what was appended, and `lakeupsert run` appends first",
    "optimize": "`lakeupsert compact` rewrites partitions that have become slow to read",
}
"""For words that people type, which are no commands, the commands that they mean."""


class Program(Group):
    """The group of all commands. Running it prints the answer and ends the process with one of the documented exit codes."""

    group_class = Group

    def __init__(self, *, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        """``groups``: the names of the commands by the heading under which the help lists them. ``options``: those of click."""
        super().__init__(**options)
        self.groups = groups

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: object,
    ) -> NoReturn:
        """Run ``args``, by default the arguments of the process, or complete them for a shell that asks.

        The other parameters are those of click and its test runner; they change nothing.
        """
        open_streams()
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        call = Call(as_json="--json" in args, log=JsonLog() if wants_json(args) else None)
        if call.log is None and is_verbose(args):
            call.verbose = TextLog()
        if instruction := os.environ.get(COMPLETION):
            from click.shell_completion import shell_complete  # no other call needs it

            sys.exit(shell_complete(self, {"obj": call}, "lakeupsert", COMPLETION, instruction))
        started_at, begun = clock.now().isoformat(), clock.elapsed()
        with signal_handler(signal.SIGTERM, call.on_sigterm), log_to_stderr(call.log, verbose=call.verbose is not None):
            try:
                answer = self._run_command(args, call)
            except click.exceptions.Exit as e:
                sys.exit(e.exit_code)
            except BrokenPipeError as e:
                if not reader_is_gone():  # another pipe broke
                    answer = Answer(None, error=as_lakeupsert_error(e, call))
                else:
                    redirect_to_null(sys.stdout)
                    sys.exit(0)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                if is_debugging():
                    traceback.print_exc()
                answer = Answer(None, error=as_lakeupsert_error(e, call))
            with no_signals():
                if answer.error is not None:
                    call.account(answer.error)
            seconds = clock.elapsed() - begun
            answer = call.call_hook(answer, json.dumps(json_object(call, answer, started_at, seconds)))
            with no_signals():  # a late signal must not cut the JSON object in two
                answer = print_answer(call, answer, started_at, seconds)
        sys.exit(answer.error.exit_code if answer.error else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use, not the alphabet

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group, with the whole first sentence of each."""
        width = max(map(len, self.commands))
        for heading, names in self.groups.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit=1000)) for name in names]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        meant = _MEANT.get(args[0])
        if meant is not None:
            raise click.UsageError(f"There is no command {args[0]!r}: {meant}.")
        name, command, rest = super().resolve_command(ctx, args)
        ctx.obj.command = name
        return name, command, rest

    def _run_command(self, args: list[str], call: Call) -> Answer:
        if call.log is not None and is_verbose(args):
            raise click.UsageError("--log json writes every event already: leave out --verbose.")
        with self.make_context("lakeupsert", args, obj=call) as context:
            answer: Answer = self.invoke(context)
        if call.terminated:
            return replace(answer, error=as_lakeupsert_error(Terminated(), call))
        return answer


@click.group(cls=Program, groups=GROUPS)
@click.version_option(__version__, message="lakeupsert %(version)s")
def main() -> None:
    """Upserts for plain Parquet data lakes: newest record wins, per partition and key.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
      lakeupsert run
    """
