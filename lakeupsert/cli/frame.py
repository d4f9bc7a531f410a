"""What every command has: one call of the program, the answer that the command returns, and the options of all commands.

Importing this module does not import Arrow or Spark: `lakeupsert --help` is instant.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lakeupsert.cli.signals import Terminated, send_sigterm
from lakeupsert.config import Config, load, names_in
from lakeupsert.errors import LakeupsertError
from lakeupsert.events import Sink
from lakeupsert.pipeline.stop import Stop

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from lakeupsert.api import Table

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
        self.stop = Stop(abandon=send_sigterm)
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

    def names(self) -> list[str]:
        """All tables in the order of the configuration, or the one named by `--table`."""
        config = self.config()
        if self.table is not None or len(config.tables) == 1:
            self.table, _ = config.table(self.table)
        return list(config.tables) if self.table is None else [self.table]

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
        self.table, _ = self.config().table(self.table)
        with self.open_tables() as [table]:
            yield table

    @contextmanager
    def open_tables(self) -> "Iterator[list[Table]]":
        """Open all tables in the order of the configuration, or the one named by `--table`."""
        from lakeupsert.api import Table  # imports Arrow, which help and usage errors do not need
        from lakeupsert.pipeline.opened import OpenTable

        names, config = self.names(), self.config()
        origins, sources = config.origins, config.sources_of
        opened = (OpenTable(name, config.tables[name], origins=origins[name], sources=sources(name)) for name in names)
        self.tables = list(map(Table.of, opened))
        for table in self.tables:
            for sink in filter(None, (self.log, self.verbose)):
                table.listen(sink)
        try:
            yield self.tables
        finally:
            for table in self.tables:
                table.close()

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


def _complete_names(kind: str) -> "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]":
    """A completion of the names of tables or profiles in the configuration; none if it can't be read."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        with suppress(Exception):
            return [CompletionItem(name) for name in names_in(context.obj.config_path)[kind] if name.startswith(begun)]
        return []

    return complete


def _store(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        setattr(context.obj, str(parameter.name), value)


JSON = click.Option(["--json"], is_flag=True, expose_value=False, help="Print one JSON object on standard output.")
"""`Program.main` looks for it too, because a command line that can't be parsed must also be answered in JSON."""
COMMON = (
    click.Option(
        ["--config", "config_path"],
        metavar="FILE",
        type=click.Path(readable=False),  # `load` says why it can't be read
        expose_value=False,
        callback=_store,
        help="Configuration file. Default: the nearest lakeupsert.toml in this folder or above.",
    ),
    click.Option(
        ["--profile"],
        metavar="NAME",
        expose_value=False,
        callback=_store,
        shell_complete=_complete_names("profiles"),
        help="Let the settings of [profiles.NAME] override the others.",
    ),
    click.Option(
        ["--table"],
        metavar="NAME",
        expose_value=False,
        callback=_store,
        shell_complete=_complete_names("tables"),
        help="Table name. Optional if the configuration has one table.",
    ),
    JSON,
    click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        help="Also print each batch, merge and publish on standard error, as it happens, and what the log says.",
    ),
)
"""Options that may stand before or after the name of every command."""


class Command(click.Command):
    """A command. Its function gets the `Call`, then the values of the options that only it has."""

    def __init__(self, *, params: Sequence[click.Parameter], **options: Any) -> None:
        super().__init__(params=[*params, *COMMON], **options)

    def invoke(self, ctx: click.Context) -> Answer:
        assert self.callback is not None
        answer: Answer = ctx.invoke(self.callback, ctx.obj, **ctx.params)
        return answer


class Group(click.Group):
    """A group of commands."""

    command_class = Command

    def __init__(self, *, params: Sequence[click.Parameter], **options: Any) -> None:
        super().__init__(params=[*params, *COMMON], **options)
