"""The frame around every command: its common options, what it prints, its exit code, signals.

A command returns an `Answer` or raises; only `Program.main` prints and exits. So there is exactly one JSON object on
standard output however a command ends, and one text for people: results on standard output, the rest on standard error.
Importing this brings no Arrow and no Spark: `lakeupsert --help` is instant.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click
from click.shell_completion import shell_complete

from lakeupsert import clock
from lakeupsert.config import Config, load
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.pipeline.stop import Stop

if TYPE_CHECKING:
    from lakeupsert.api import Table

SCHEMA_VERSION = 1
INTERRUPTED = 130
COMPLETION = "_LAKEUPSERT_COMPLETE"
"""The variable in which a shell asks for its completion script, or to complete a command line."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Answer:
    """What a command has to say.

    Attributes:
        result: the `result` of the JSON object.
        text: the same for people.
        warnings: what is not as it should be and stops nothing.
        told: warnings that ``text`` has already; only the JSON object repeats them.
        error: what is wrong although there is a result.
    """

    result: Any
    text: str = ""
    warnings: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    error: LakeupsertError | None = None


class InterruptError(LakeupsertError):
    """Somebody pressed Ctrl-C."""

    exit_code = INTERRUPTED


class Terminated(BaseException):
    """SIGTERM, while nothing runs that could be asked to stop, or for the second time."""


class Call:
    """One call of the program: its common options, and what is known of it before it ends."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.config_path: str | None = None
        self.table: str | None = None
        self.command: str | None = None
        self.changed = False
        """Whether readers see something new since this call began."""
        self.tables: list[Table] = []
        """Those that the command opened."""
        self.stop = Stop(abandon=_terminate)
        self.terminated = False
        self._stoppable = False

    def config(self) -> Config:
        return load(self.config_path)

    @contextmanager
    def open_table(self) -> "Iterator[Table]":
        """The table that the command is about: the only one of the file, or the one of `--table`."""
        from lakeupsert.api import Table  # brings Arrow, which usage errors and help need not wait for

        config = self.config()
        self.table, settings = config.table(self.table)
        table = Table(self.table, settings, origins=config.origins[self.table])
        self.tables = [table]
        try:
            yield table
        finally:
            table.close()

    @contextmanager
    def open_tables(self) -> "Iterator[list[Table]]":
        """All tables of the file in its order, or the one of `--table`."""
        from lakeupsert.api import Table  # as above

        config = self.config()
        if self.table is not None or len(config.tables) == 1:
            self.table, _ = config.table(self.table)
        names = list(config.tables) if self.table is None else [self.table]
        self.tables = [Table(name, config.tables[name], origins=config.origins[name]) for name in names]
        try:
            yield self.tables
        finally:
            for table in self.tables:
                table.close()

    def account(self, error: LakeupsertError, table: "Table | None" = None) -> None:
        """Say in the error what this call committed of the table, by default of the only one."""
        if table is None and len(self.tables) == 1:
            [table] = self.tables
        if table is not None:
            table.account(error, named=len(self.tables) > 1)

    @contextmanager
    def stoppable(self) -> Iterator[Stop]:
        """SIGTERM in the block sets the event and leaves it to the block to end soon; a second one ends it at once."""
        before, self._stoppable = self._stoppable, True
        try:
            yield self.stop
        finally:
            self._stoppable = before

    def on_sigterm(self, number: int, frame: object) -> None:
        if not self._stoppable or self.terminated:
            raise Terminated
        self.terminated = True
        self.stop.set()

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[str], None]]:
        """Tells people at a terminal what is going on; silent where nobody looks on, or several would talk."""
        if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
            yield lambda text: None
            return
        from rich.console import Console  # slow to import, and most calls have nobody who looks on
        from rich.text import Text

        with Console(stderr=True).status(Text(what)) as status:
            yield lambda text: status.update(Text(f"{what}: {text}"))


def _terminate() -> None:
    """Do as a second SIGTERM does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


class Program(click.Group):
    """The group of all commands; running it prints, and ends the process with the contract's exit codes."""

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
        call = Call(as_json="--json" in args)
        if instruction := os.environ.get(COMPLETION):
            sys.exit(shell_complete(self, {"obj": call}, "lakeupsert", COMPLETION, instruction))
        started_at, begun = clock.now().isoformat(), clock.elapsed()
        with _handler(signal.SIGTERM, call.on_sigterm), _logged():
            try:
                answer = self._answer(args, call)
            except click.exceptions.Exit as e:
                sys.exit(e.exit_code)
            except BrokenPipeError as e:
                if not _reader_is_gone():  # it was another pipe
                    answer = Answer(None, error=as_ours(e, call))
                else:
                    _discard(sys.stdout)
                    sys.exit(0)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                if _debugging():
                    traceback.print_exc()
                answer = Answer(None, error=as_ours(e, call))
            # What is left is to say it: a late signal must not cut the one object in two.
            with _handler(signal.SIGTERM, signal.SIG_IGN), _handler(signal.SIGINT, signal.SIG_IGN):
                if answer.error is not None:
                    call.account(answer.error)
                answer = _say(call, answer, started_at, clock.elapsed() - begun)
        sys.exit(answer.error.exit_code if answer.error else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they are used, not by the alphabet

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        ctx.obj.command = name
        return name, command, rest

    def _answer(self, args: list[str], call: Call) -> Answer:
        with self.make_context("lakeupsert", args, obj=call) as context:
            answer: Answer = self.invoke(context)
        if call.terminated:
            return Answer(answer.result, answer.text, answer.warnings, answer.told, as_ours(Terminated(), call))
        return answer


json_option = click.option("--json", is_flag=True, expose_value=False, help="Print one JSON object on standard output.")
"""`Program.main` looks for it itself, since also a command line that can't be parsed is answered in JSON."""


def common(command: Function) -> Function:
    """The options that the program and every command take, so that they may stand before the command or after it."""

    def keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            setattr(context.obj, str(parameter.name), value)

    for option in (
        json_option,
        click.option(
            "--table",
            metavar="NAME",
            expose_value=False,
            callback=keep,
            help="Table name. Optional if the configuration has one table.",
        ),
        click.option(
            "--config",
            "config_path",
            metavar="FILE",
            expose_value=False,
            callback=keep,
            help="Configuration file. Default: the nearest lakeupsert.toml in this folder or above.",
        ),
    ):
        command = option(command)
    return command


def as_ours(e: BaseException, call: Call) -> LakeupsertError:
    """Whatever ended a command, as an error that says what to do next."""
    if isinstance(e, LakeupsertError) and not (call.terminated and isinstance(e, TryAgainError)):
        return e
    if isinstance(e, click.ClickException):
        path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else "lakeupsert"
        return ConfigurationError("usage", e.format_message(), next=f"see `{path} --help`")
    if isinstance(e, KeyboardInterrupt):
        return InterruptError(
            "interrupted",
            "Interrupted. What was committed stands; the next call goes on from there.",
            data_changed=call.changed,
            next="run the same command again when you like",
        )
    if isinstance(e, Terminated) or call.terminated:  # Spark and worker processes may have been told to end too
        return TryAgainError(
            "terminated",
            "Stopped by SIGTERM. What was committed stands, and unfinished messages were given back.",
            data_changed=call.changed,
            next="run the same command again; it goes on from there",
        )
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        return TryAgainError(
            "disk-full",
            f"No room is left: {e}.",
            data_changed=call.changed,
            next="free space there, then run the same command again",
        )
    if isinstance(e, PermissionError):
        return ConfigurationError(
            "not-permitted",
            f"User {os.geteuid()} may not do this: {e}.",
            data_changed=call.changed,
            next="give this user the right to, or name another path",
        )
    if refused := _refusal(e):
        return ConfigurationError(
            "unusable-path",
            f"{refused}.",
            data_changed=call.changed,
            next="correct that path or what is there, then run the same command again; LAKEUPSERT_DEBUG=1 shows what needed it",
        )
    return LakeupsertError(
        "internal-error",
        f"This is a bug of lakeupsert. {type(e).__name__}: {_in_short(e)}",
        data_changed=call.changed,
        next="run it again with LAKEUPSERT_DEBUG=1, which prints where it happened, and report that",
    )


def _refusal(e: BaseException) -> str | None:
    """What the operating system says of a path or a text that it can't use; None: it is about something else."""
    if isinstance(e, OSError) and e.filename is not None:
        return f"The operating system can't use {e.filename}: {e.strerror}"
    if isinstance(e, FileNotFoundError) and _is_nowhere():
        return "The current folder does not exist any more"
    if isinstance(e, RuntimeError) and "home directory" in str(e):  # of `Path.expanduser`
        return "A path begins with ~, and no user has that home folder"
    if isinstance(e, ValueError) and "embedded null" in str(e):
        return "A path holds a NUL character"
    if isinstance(e, UnicodeEncodeError):
        found = repr(e.object[e.start : e.end])
        if sys.getfilesystemencoding() == "utf-8":
            return f"A name or an argument is not UTF-8: it has {found}"
        return f"A name has {found}, which this locale's encoding ({e.encoding}) does not have; LC_ALL=C.UTF-8 has it"
    return None


def _is_nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _in_short(e: BaseException) -> str:
    """What it says; of one that quotes a traceback, as Spark's do, the last line, which says what it was."""
    text = str(e).strip()
    return text.splitlines()[-1] if "Traceback (most recent call last)" in text else text


def _object(call: Call, answer: Answer, started_at: str, seconds: float) -> dict[str, Any]:
    error = answer.error
    return {
        "schema_version": SCHEMA_VERSION,
        "command": call.command,
        "table": call.table,
        "ok": error is None,
        "exit_code": error.exit_code if error else 0,
        "started_at": started_at,
        "seconds": round(seconds, 3),
        "result": answer.result,
        "warnings": [*answer.warnings, *answer.told],
        "error": error
        and {
            "code": error.code,
            "message": error.message,
            "data_changed": error.data_changed,
            "committed": error.standing.committed if error.standing else None,
            "certain": error.standing.certain if error.standing else True,
            "readers_see": error.standing.readers_see if error.standing else None,
            "table": error.standing.table if error.standing else None,
            "next": error.next,
            "partition": error.partition,
        },
    }


def _say(call: Call, answer: Answer, started_at: str, seconds: float) -> Answer:
    """Print the answer; it comes back with an error where nobody could read it.

    Who reads our output may have had enough (`| head`): that is no error. A standard output that takes nothing is one, which
    people are told also with `--json`. Where standard error takes nothing, the exit code is all that is left.
    """
    text = json.dumps(_object(call, answer, started_at, seconds)) if call.as_json else answer.text
    silent = call.as_json
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as e:
        _discard(sys.stdout)
        silent = False
        if answer.error is None:
            unread = TryAgainError(
                "output-failed",
                f"The command came to its end, but its answer can't be written to standard output: {e.strerror or e}.",
                data_changed=call.changed,
                next="mend where standard output goes, then run the same command again, which does nothing twice",
            )
            call.account(unread)
            answer = replace(answer, error=unread)
    if not silent:
        try:
            _tell(answer)
        except (OSError, SystemExit):  # rich ends the process if nobody reads its pipe
            _discard(sys.stderr)
    return answer


def _tell(answer: Answer) -> None:
    if not answer.warnings and answer.error is None:
        return
    from rich.console import Console  # knows NO_COLOR, and whether anybody sees colours
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    for warning in answer.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), warning))
    if answer.error is not None:
        error = answer.error
        console.print(Text.assemble(("Error: ", "bold red"), error.message))
        console.print(Text(str(error.standing or "Committed: no batch")))
        console.print(Text(f"Next: {error.next}"))


@contextmanager
def _handler(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Handle the signal so while the block runs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class _Log(logging.Handler):
    """Warnings of the libraries below, a line each, to wherever standard error goes by then."""

    def emit(self, record: logging.LogRecord) -> None:
        # py4j logs each call that an interrupt breaks off, with a traceback, before it raises the interrupt anyway.
        if _debugging() or "py4j" not in record.pathname:
            with suppress(OSError):  # a night does not end because nobody can read its warnings
                print(self.format(record) if _debugging() else record.getMessage(), file=sys.stderr)


@contextmanager
def _logged() -> Iterator[None]:
    handler = _Log(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _debugging() -> bool:
    return os.environ.get("LAKEUPSERT_DEBUG") == "1"


def _open_streams() -> None:
    """Give a process that was started without standard streams (`>&-`) ones that lead nowhere, and let no character fail.

    Else the next file that is opened, such as a data file, would be standard output for every library that prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  until the process ends
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_is_gone() -> bool:
    """Whether nobody reads standard output any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard(stream: TextIO) -> None:
    """Let the rest go nowhere, also what Python flushes when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def each(call: Call, one: "Callable[[Table], Answer]", at_once: bool = False) -> Answer:
    """The command for each table: in the order of the file, or at once where each goes on until it is stopped.

    A table that fails does not keep the others from their turn; the first failure is the call's.
    """
    with call.open_tables() as tables:
        if len(tables) == 1:
            return one(tables[0])

        def guarded(table: "Table") -> Answer:
            try:
                answer = one(table)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                answer = Answer(None, error=as_ours(e, call))
            if answer.error is not None:
                call.account(answer.error, table)
            return answer

        answers: dict[str, Answer] = {}
        if at_once:
            with ThreadPoolExecutor(len(tables)) as pool, call.stoppable() as stop:
                futures = {pool.submit(guarded, table): table.name for table in tables}
                try:
                    for future in as_completed(futures):
                        if future.result().error:
                            break  # who started us should know, and start us again
                finally:
                    stop.set()
            answers = {name: future.result() for future, name in futures.items()}
        else:
            for table in tables:
                if not call.stop.is_set():
                    answers[table.name] = answer = guarded(table)
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
        tuple(f"{name}: {w}" for name, a in answers.items() for w in a.told),
        failed[0][1] if failed else None,
    )
