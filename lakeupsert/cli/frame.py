"""What every command shares: common options, output, exit codes and signals.

A command returns an `Answer` or raises. Only `Program.main` prints and exits, so standard output holds exactly one JSON object
however a command ends. Without `--json`, results go to standard output and everything else to standard error.
Importing this module does not import Arrow or Spark: `lakeupsert --help` is instant.
"""

import errno
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from lakeupsert import clock
from lakeupsert.cli.log import JsonLog, TextLog, is_verbose, wants_json
from lakeupsert.config import Config, load, names_in
from lakeupsert.errors import ConfigurationError, LakeupsertError, Standing, TryAgainError
from lakeupsert.events import CommandError, Notice, Sink
from lakeupsert.phrases import shell_paths, without_controls
from lakeupsert.pipeline.stop import Stop
from lakeupsert.progress import Share

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from lakeupsert.api import Table

SCHEMA_VERSION = 1
INTERRUPTED = 130
COMPLETION = "_LAKEUPSERT_COMPLETE"
"""The variable in which a shell asks for its completion script, or to complete a command line."""

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        result: `result` of the JSON object.
        text: the same for people.
        warnings: problems that did not stop the command.
        json_warnings: warnings for the JSON object only, because ``text`` already contains them.
        error: an error that is reported together with the result.
    """

    result: Mapping[str, object] | None
    text: str = ""
    warnings: tuple[str, ...] = ()
    json_warnings: tuple[str, ...] = ()
    error: LakeupsertError | None = None


class InterruptError(LakeupsertError):
    """The user pressed Ctrl-C."""

    exit_code = INTERRUPTED


class Terminated(BaseException):
    """SIGTERM arrived outside a block that can stop by itself, or for the second time."""


class Call:
    """One call of the program: its common options and its state so far."""

    def __init__(self, *, as_json: bool, log: Sink | None = None) -> None:
        self.as_json = as_json
        self.log = log
        """With `--log json`, takes what is otherwise text on standard error, and every event."""
        self.verbose: Sink | None = None
        """With `--verbose`, takes every event."""
        self.config_path: str | None = None
        self.profile: str | None = None
        self.table: str | None = None
        self.command: str | None = None
        self.changed = False
        """Whether this call has changed what readers see."""
        self.tables: list[Table] = []
        """The tables that the command opened."""
        self.stop = Stop(abandon=_send_sigterm)
        self.terminated = False
        self.hooked = False
        """Whether `on_success` or `on_failure` is called at the end."""
        self._stoppable = False
        self._config: Config | None = None

    def config(self) -> Config:
        if self._config is None:
            self._config = load(self.config_path, profile=self.profile)
            if self.hooked:
                self._config.refuse_unset_hooks(os.environ)
        return self._config

    def call_hook(self, answer: Answer, document: str) -> Answer:
        """Give ``document`` to the hook for this answer, if there is one. What fails there is a warning more."""
        if not self.hooked or self._config is None:
            return answer
        name = "on_failure" if answer.error else "on_success"
        hook = getattr(self._config.hooks, name)
        if hook is None:
            return answer
        from lakeupsert.cli.hooks import call_hook  # few configurations have hooks

        folder = None if "://" in self._config.path else Path(self._config.path).parent
        warning = call_hook(name, hook, document, folder)
        return replace(answer, warnings=(*answer.warnings, warning)) if warning else answer

    @contextmanager
    def open_table(self) -> "Iterator[Table]":
        """Open the only table of the configuration, or the one named by `--table`."""
        from lakeupsert.api import Table  # imports Arrow, which help and usage errors do not need

        config = self.config()
        self.table, settings = config.table(self.table)
        table = Table(self.table, settings, origins=config.origins[self.table])
        self._opened([table])
        try:
            yield table
        finally:
            table.close()

    @contextmanager
    def open_tables(self) -> "Iterator[list[Table]]":
        """Open all tables in the order of the configuration, or the one named by `--table`."""
        from lakeupsert.api import Table  # as above

        config = self.config()
        if self.table is not None or len(config.tables) == 1:
            self.table, _ = config.table(self.table)
        names = list(config.tables) if self.table is None else [self.table]
        self._opened([Table(name, config.tables[name], origins=config.origins[name]) for name in names])
        try:
            yield self.tables
        finally:
            for table in self.tables:
                table.close()

    def _opened(self, tables: "list[Table]") -> None:
        self.tables = tables
        for table in tables:
            for sink in (self.log, self.verbose):
                if sink is not None:
                    table.listen(sink)

    def account(self, error: LakeupsertError, table: "Table | None" = None) -> None:
        """Add to the error what this call committed to the table (default: the only open one)."""
        if table is None and len(self.tables) == 1:
            [table] = self.tables
        if table is not None:
            table.account(error, named=len(self.tables) > 1)

    @contextmanager
    def stoppable(self) -> Iterator[Stop]:
        """A first SIGTERM sets `stop`, and the block ends soon by itself. A second one ends the process at once."""
        before, self._stoppable = self._stoppable, True
        try:
            yield self.stop
        finally:
            self._stoppable = before

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self._stoppable or self.terminated:
            raise Terminated
        self.terminated = True
        self.stop.set_from_signal()

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show progress on a terminal, with the share that is done and the time left if they are known. Does nothing if standard
        error is not a terminal or is a log in JSON, or in a thread beside others."""
        if self.log is not None or not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
            yield lambda text: None
            return
        from lakeupsert.cli.bar import bar  # slow to import, and most calls have no terminal

        with bar(what) as show:
            yield show


def _send_sigterm() -> None:
    """Act as a second SIGTERM does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


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
        "`lakeupsert reconcile` proves that no row was lost, `lakeupsert doctor` checks the machine",
    ),
    **dict.fromkeys(
        ("repair", "fix"), "`lakeupsert doctor` finds what is damaged, and names the command that mends it"
    ),
    **dict.fromkeys(("clean", "gc"), "`lakeupsert vacuum` deletes files that nobody needs"),
    **dict.fromkeys(
        ("upsert", "load", "ingest", "import", "sync"),
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


class Program(click.Group):
    """The group of all commands. Running it prints the answer and ends the process with one of the documented exit codes."""

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
        _open_streams()
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        call = Call(as_json="--json" in args, log=JsonLog() if wants_json(args) else None)
        if call.log is None and is_verbose(args):
            call.verbose = TextLog()
        if instruction := os.environ.get(COMPLETION):
            from click.shell_completion import shell_complete  # no other call needs it

            sys.exit(shell_complete(self, {"obj": call}, "lakeupsert", COMPLETION, instruction))
        started_at, begun = clock.now().isoformat(), clock.elapsed()
        with (
            _signal_handler(signal.SIGTERM, call.on_sigterm),
            _log_to_stderr(call.log, verbose=call.verbose is not None),
        ):
            try:
                answer = self._run_command(args, call)
            except click.exceptions.Exit as e:
                sys.exit(e.exit_code)
            except BrokenPipeError as e:
                if not _reader_is_gone():  # another pipe broke
                    answer = Answer(None, error=as_lakeupsert_error(e, call))
                else:
                    _redirect_to_null(sys.stdout)
                    sys.exit(0)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                if _debugging():
                    traceback.print_exc()
                answer = Answer(None, error=as_lakeupsert_error(e, call))
            with _no_signals():
                if answer.error is not None:
                    call.account(answer.error)
            seconds = clock.elapsed() - begun
            answer = call.call_hook(answer, json.dumps(_json_object(call, answer, started_at, seconds)))
            with _no_signals():  # a late signal must not cut the JSON object in two
                answer = _print_answer(call, answer, started_at, seconds)
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


def _complete_names(kind: str) -> "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]":
    """A completion of the names of tables or profiles in the configuration; none if it can't be read."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        with suppress(Exception):
            return [CompletionItem(name) for name in names_in(context.obj.config_path)[kind] if name.startswith(begun)]
        return []

    return complete


json_option = click.option("--json", is_flag=True, expose_value=False, help="Print one JSON object on standard output.")
"""`Program.main` looks for it too, because a command line that can't be parsed must also be answered in JSON."""


def common(command: Function) -> Function:
    """Add the options that may stand before or after the name of every command."""

    def store(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            setattr(context.obj, str(parameter.name), value)

    for option in (
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            expose_value=False,
            help="Also print each batch, merge and publish on standard error, as it happens, and what the log says.",
        ),
        json_option,
        click.option(
            "--table",
            metavar="NAME",
            expose_value=False,
            callback=store,
            shell_complete=_complete_names("tables"),
            help="Table name. Optional if the configuration has one table.",
        ),
        click.option(
            "--profile",
            metavar="NAME",
            expose_value=False,
            callback=store,
            shell_complete=_complete_names("profiles"),
            help="Let the settings of [profiles.NAME] override the others.",
        ),
        click.option(
            "--config",
            "config_path",
            metavar="FILE",
            type=click.Path(readable=False),  # `load` says why it can't be read
            expose_value=False,
            callback=store,
            help="Configuration file. Default: the nearest lakeupsert.toml in this folder or above.",
        ),
    ):
        command = option(command)
    return command


def as_lakeupsert_error(e: BaseException, call: Call) -> LakeupsertError:
    """Turn the exception that ended a command into an error that says what to do next."""
    if isinstance(e, LakeupsertError) and not (call.terminated and isinstance(e, TryAgainError)):
        return e
    error: LakeupsertError
    if isinstance(e, click.ClickException):
        path = f"lakeupsert {call.command or ''}".strip()  # a failure to parse options has no context
        if isinstance(e, click.UsageError) and e.ctx:
            path = e.ctx.command_path
        return ConfigurationError("usage", e.format_message(), next=f"see `{path} --help`")
    if isinstance(e, KeyboardInterrupt):
        found = "Interrupted. Committed work is kept, and the next call continues from there."
        error = InterruptError("interrupted", found, next="run the same command again at any time")
    elif isinstance(e, Terminated) or call.terminated:  # Spark and worker processes may have received it too
        found = (
            "Stopped by SIGTERM. Committed work is kept, and messages of unfinished partitions are in the queue again."
        )
        error = TryAgainError("terminated", found, next="run the same command again")
    elif isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        instead = "free some space there, then run the same command again"
        error = TryAgainError("disk-full", f"No space is left on the disk: {e}.", next=instead)
    elif isinstance(e, PermissionError):
        found = f"User {os.geteuid()} has no permission for this: {e}."
        error = ConfigurationError("not-permitted", found, next="grant it to this user, or use another path")
    elif problem := _path_problem(e):
        instead = "correct that path or what is there, then run the same command again"
        instead += "; LAKEUPSERT_DEBUG=1 shows what used it"
        error = ConfigurationError("unusable-path", f"{problem}.", next=instead)
    else:
        found = f"This is a bug in lakeupsert. {type(e).__name__}: {_short_text(e)}"
        instead = "run it again with LAKEUPSERT_DEBUG=1, which prints the traceback, and report it"
        error = LakeupsertError("internal-error", found, next=instead)
    error.data_changed = call.changed
    return error


def _path_problem(e: BaseException) -> str | None:
    """Why the operating system can't use a path or a text; None if the error is about something else."""
    if isinstance(e, OSError) and e.filename is not None:
        return f"The operating system can't use {e.filename}: {e.strerror}"
    if isinstance(e, FileNotFoundError) and _working_directory_is_gone():
        return "The current folder no longer exists"
    if isinstance(e, RuntimeError) and "home directory" in str(e):  # from `Path.expanduser`
        return "A path begins with ~, but there is no such home folder"
    if isinstance(e, ValueError) and "embedded null" in str(e):
        return "A path contains a NUL character"
    if isinstance(e, UnicodeEncodeError):
        found = repr(e.object[e.start : e.end])
        if sys.getfilesystemencoding() == "utf-8":
            return f"A name or an argument is not UTF-8: it contains {found}"
        return (
            f"A name contains {found}, which this locale's encoding ({e.encoding}) can't represent; LC_ALL=C.UTF-8 can"
        )
    return None


def _working_directory_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _short_text(e: BaseException) -> str:
    """The exception's text, or only its last line if it quotes a traceback, as Spark's exceptions do."""
    text = str(e).strip()
    return text.splitlines()[-1] if "Traceback (most recent call last)" in text else text


def _json_object(call: Call, answer: Answer, started_at: str, seconds: float) -> dict[str, object]:
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


def _print_answer(call: Call, answer: Answer, started_at: str, seconds: float) -> Answer:
    """Print the answer and return it, with an error added if standard output can't be written.

    A reader that closes its end early (`| head`) is not an error. A standard output that can't be written is one, which is
    then printed for people even with `--json`. If standard error can't be written either, only the exit code is left.
    """
    text = json.dumps(_json_object(call, answer, started_at, seconds)) if call.as_json else answer.text
    silent = call.as_json
    try:
        if text:
            print(without_controls(text) if sys.stdout.isatty() else text, flush=True)
    except BrokenPipeError:
        _redirect_to_null(sys.stdout)
    except OSError as e:
        _redirect_to_null(sys.stdout)
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
            _redirect_to_null(sys.stderr)
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


@contextmanager
def _signal_handler(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Use this handler while the block runs. Only the main thread can; in others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _no_signals() -> Iterator[None]:
    with _signal_handler(signal.SIGTERM, signal.SIG_IGN), _signal_handler(signal.SIGINT, signal.SIG_IGN):
        yield


class _StderrLog(logging.Handler):
    """Prints a line for each warning of the libraries, to what standard error is at that time; or gives it to ``log``."""

    def __init__(self, log: Sink | None, level: int) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        # py4j logs every call that an interrupt cuts off, with a traceback, and then raises the interrupt anyway.
        if not _debugging() and "py4j" in record.pathname:
            return
        text = self.format(record) if _debugging() else record.getMessage()
        if self._log is not None:
            table, partition = getattr(record, "table", None), getattr(record, "partition", None)
            self._log(Notice(message=text, logger=record.name, table=table, partition=partition))
            return
        with suppress(OSError):  # a night must not fail because its warnings can't be written
            print(without_controls(text), file=sys.stderr)


@contextmanager
def _log_to_stderr(log: Sink | None, *, verbose: bool) -> Iterator[None]:
    """Print warnings. If ``verbose``, print everything that lakeupsert itself logs."""
    own = logging.getLogger("lakeupsert")
    level = own.level
    handler = _StderrLog(log, logging.DEBUG if verbose else logging.WARNING)
    logging.getLogger().addHandler(handler)
    if verbose:
        own.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        own.setLevel(level)
        logging.getLogger().removeHandler(handler)


def _debugging() -> bool:
    return os.environ.get("LAKEUPSERT_DEBUG") == "1"


def _open_streams() -> None:
    """Open missing standard streams (`>&-`) on the null device, and make them accept every character.

    Otherwise the next opened file, for example a data file, would become standard output for every library that prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  stays open until the process ends
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_is_gone() -> bool:
    """Whether the reader of standard output has closed its end."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _redirect_to_null(stream: TextIO) -> None:
    """Discard all further output, including what Python flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def for_each_table(
    call: Call, run: "Callable[[Table], Answer]", *, parallel: int = 1, concurrently: bool = False
) -> Answer:
    """Run the command for each table, ``parallel`` of them at once, begun in the order of the configuration.

    A table that fails does not stop the others. The first failure in that order is the error of the call. With ``concurrently``,
    for calls that go on until they are stopped, all run at once, and the first failure stops all.
    """
    with call.open_tables() as tables:
        if len(tables) == 1:
            return run(tables[0])

        def run_guarded(table: "Table") -> Answer:
            try:
                answer = run(table)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                answer = Answer(None, error=as_lakeupsert_error(e, call))
            if answer.error is not None:
                call.account(answer.error, table)
            return answer

        answers: dict[str, Answer] = {}
        if concurrently:
            with ThreadPoolExecutor(len(tables)) as pool, call.stoppable() as stop:
                futures = {pool.submit(run_guarded, table): table.name for table in tables}
                try:
                    for future in as_completed(futures):
                        if future.result().error:
                            break  # whoever started this process should know, and start it again
                finally:
                    stop.set()
            answers = {name: future.result() for future, name in futures.items()}
        elif parallel > 1:
            answers = _run_in_threads(call, tables, run_guarded, parallel)
        else:
            for table in tables:
                if not call.stop.is_set():
                    answers[table.name] = answer = run_guarded(table)
                    if answer.error is not None and answer.error.code in ("interrupted", "terminated"):
                        break
    failed = [(name, a.error) for name, a in answers.items() if a.error]
    return Answer(
        {"tables": {name: a.result for name, a in answers.items()}},
        "\n\n".join(a.text for a in answers.values() if a.text),
        (
            *(f"{name}: {w}" for name, a in answers.items() for w in a.warnings),
            *(f"{name}: {e.message} Next: {e.next}" for name, e in failed[1:]),
        ),
        tuple(f"{name}: {w}" for name, a in answers.items() for w in a.json_warnings),
        failed[0][1] if failed else None,
    )


def _run_in_threads(
    call: Call, tables: "Sequence[Table]", run: "Callable[[Table], Answer]", parallel: int
) -> dict[str, Answer]:
    """The answers by table. After a signal, tables that have not begun are left out."""

    def run_unless_stopped(table: "Table") -> Answer | None:
        return None if stop.is_set() else run(table)

    done = 0
    with call.progress("tables") as progress, ThreadPoolExecutor(parallel) as pool, call.stoppable() as stop:
        futures = {table.name: pool.submit(run_unless_stopped, table) for table in tables}
        try:
            for future in as_completed(futures.values()):
                future.result()
                done += 1
                progress(Share(f"{done:,} of {len(tables):,} are done", done, len(tables), whole=True))
        finally:
            if done < len(tables):
                stop.set()
    return {name: answer for name, future in futures.items() if (answer := future.result()) is not None}
