"""Options that several commands take, and the parsing of their values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lakeupsert import sparkenv
from lakeupsert.cli.frame import Answer, Function
from lakeupsert.config import cores, size_of
from lakeupsert.errors import ConfigurationError

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostChoice, HostName
    from lakeupsert.table.ledger import Scope
    from lakeupsert.table.spec import TableSpec


def together(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options of a command; the help lists the last one first."""
    return lambda command: reduce(lambda so_far, option: option(so_far), options, command)


def _host_option(default: str, what: str) -> Callable[[Function], Function]:
    choice = click.Choice([*(["auto"] if default == "auto" else []), "spark", "local"])
    return click.option("--host", type=choice, default=default, show_default=True, help=what)


host_option = _host_option(
    "auto",
    "Read and merge rows in Spark tasks (spark) or on this machine (local). auto: in Spark only if many bytes landed.",
)
rewrite_host_option = _host_option(
    "auto",
    "Read and merge rows in Spark tasks (spark) or on this machine (local). auto: merge on this machine, and read landing "
    "files in Spark only if they have many bytes.",
)
read_host_option = _host_option("local", "Read data files in Spark tasks, or in this process.")
merge_host_option = _host_option("local", "Merge partitions in Spark tasks, or in processes of this machine.")


processes_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Merge in N processes of this machine. Default: in Spark's tasks if it runs there, else one process for each core.",
)


def processes(host: "HostChoice", workers: int | None) -> int | None:
    """The processes that merge; None: the tasks of ``host`` do."""
    return workers if workers or host == "spark" else cores()


def processes_if_local(host: "HostName", workers: int | None) -> int:
    """The processes that merge on host local. Raises UsageError if they are given for host spark."""
    if workers and host == "spark":
        raise click.UsageError("--workers counts processes of this machine. Give it without --host spark.")
    return processes(host, workers) or 1


def refuse_workers_of_spark(table: "Table", workers: int | None, engine: "EngineName | None") -> None:
    """Raise UsageError if processes are given for engine spark, which has tasks."""
    if workers and (engine or table.settings.engine) == "spark":
        raise click.UsageError(
            f"--workers counts processes of engine arrow, and engine spark merges table {table.name}."
        )


workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=cores,
    metavar="N",
    help="Number of processes that merge partitions (engine arrow). Default: the number of cores.",
)


engine_option = click.option(
    "--engine",
    type=click.Choice(["arrow", "spark"]),
    help="Merge with Arrow in worker processes, or with Spark. Default: the setting `engine`.",
)


log_option = click.option(
    "--log",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    expose_value=False,
    help="Report on standard error as text, or as one line of JSON for each batch, merge, publish, failure and warning.",
)
"""For commands that commit batches, merge or publish. As with `--json`, `Program.main` looks for it."""


batch_id_option = click.option(
    "--batch-id",
    metavar="ID",
    help="Your own name for the batch. A repeated call with the same name and files appends nothing.",
)


full_extract_options = together(
    click.option("--may-shrink", is_flag=True, help="Accept a full extract with over 40 % fewer rows than are stored."),
    click.option(
        "--full",
        type=click.Choice(["table", "partitions"]),
        help="Treat the landing files as a full extract of the table, or of the partitions that their rows are in: keys "
        "missing from the files are deleted.",
    ),
)


def check_full(full: "Scope | None", *, may_shrink: bool) -> None:
    if may_shrink and full is None:
        raise click.UsageError("--may-shrink is only for full extracts: give --full.")


@dataclass(frozen=True)
class PartitionChoice:
    """The values of `--from`, `--to` and `--partition`."""

    first: str | None = None
    last: str | None = None
    partitions: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.first or self.last or self.partitions)

    def of(self, table: "Table") -> Callable[[str], bool]:
        """A filter of partitions: those given, or those with a value from ``first`` to ``last``, compared by their type."""
        if self.partitions and (self.first or self.last):
            raise click.UsageError("Give either --partition, or --from and --to.")
        from lakeupsert.table.layout import WHOLE_TABLE, parse_partition, ranged_column  # imports Arrow

        spec = table.view().spec
        if self.partitions:
            wanted = {parse_partition(spec, p) for p in self.partitions}
            return wanted.__contains__
        if not self:
            return lambda partition: True  # names are not parsed: those of dead letters may be of an earlier table
        column = ranged_column(spec)
        if column is None:
            raise ConfigurationError(
                "not-a-partition",
                f"--from and --to select partitions, and the table has no partition columns: it is one partition, {WHOLE_TABLE}. "
                "Nothing was done.",
                next="leave them out",
            )
        return self._in_range(spec, column)

    def _in_range(self, spec: "TableSpec", column: str) -> Callable[[str], bool]:
        from lakeupsert.table.layout import parse_value, partition_scalars

        low = parse_value(spec, column, self.first).as_py() if self.first else None
        high = parse_value(spec, column, self.last).as_py() if self.last else None
        if low is not None and high is not None and low > high:
            raise click.UsageError(f"--from {self.first} is after --to {self.last}.")

        def is_in_range(partition: str) -> bool:
            value = partition_scalars(spec, partition)[column].as_py()
            return (low is None or value >= low) and (high is None or value <= high)

        return is_in_range


def partition_options(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """`--from`, `--to` and `--partition`: the command's argument ``chosen``, a `PartitionChoice`."""

    @wraps(command)
    def call(
        *args: object, first: str | None, last: str | None, partitions: Sequence[str], **options: object
    ) -> Answer:
        return command(*args, chosen=PartitionChoice(first, last, partitions), **options)

    text = "partition value, inclusive. With several partition columns, the date."
    for option in (
        partitions_option("A partition, by its value (2020-01-01) or its folder. Repeatable."),
        click.option("--to", "last", metavar="V", help=f"Last {text}"),
        click.option("--from", "first", metavar="V", help=f"First {text}"),
    ):
        call = option(call)
    return call


def partitions_option(text: str) -> Callable[[Function], Function]:
    return click.option("--partition", "partitions", metavar="V", multiple=True, help=text)


def key_values(arguments: Sequence[str]) -> dict[str, str]:
    """Values of key columns, each given as COLUMN=VALUE."""
    values: dict[str, str] = {}
    for argument in arguments:
        column, equals, value = argument.partition("=")
        if not equals or column in values:
            raise click.UsageError(f"{argument!r} {'is a second value' if equals else 'is not COLUMN=VALUE'}.")
        values[column] = value
    return values


where_option = click.option("--where", metavar="SQL", help='Filter, for example "store = 7".')


snapshot_option = click.option(
    "--snapshot",
    metavar="ID|TIME|TAG|latest",
    default="published",
    show_default=True,
    help="A snapshot's number or tag, or a time (the newest snapshot published by then). `export` also takes latest: all "
    "appended rows, merged for this export.",
)


def parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    size = size_of(text)
    if size is None:
        raise click.BadParameter(f"{text!r} is not a size, for example 50GB.")
    return size


def _check_amount(context: click.Context, parameter: click.Parameter, amount: float | None) -> float | None:
    if amount is not None and math.isnan(amount):  # no cost is higher than NaN, so it would limit nothing
        raise click.BadParameter(f"{amount} is not an amount.")
    return amount


limit_options = together(
    click.option(
        "--prices",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Use the prices in this TOML file.",
    ),
    click.option(
        "--max-cost",
        type=click.FloatRange(min=0),
        callback=_check_amount,
        metavar="MONEY",
        help="Fail before writing anything if the planned cost is higher.",
    ),
    click.option(
        "--max-bytes",
        callback=parse_size,
        metavar="SIZE",
        help="Fail before writing anything if the plan reads and writes more than this in total, for example 50GB.",
    ),
)


def prepare_spark(
    table: "Table", *, host: "HostChoice" = "local", engine: "EngineName | None" = "arrow", large: bool = False
) -> None:
    """Set up the environment for Spark if this call is known to use it. ``large``: the call merges large partitions too."""
    if host == "spark" or (engine or table.settings.engine) == "spark" or (large and table.settings.large):
        sparkenv.prepare()
