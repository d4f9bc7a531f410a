"""`lakeupsert try`: a first look at a folder of files, without a configuration. Nothing of it stays."""

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.problems import append_warnings
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import rows_result, rows_text
from lakeupsert.cli.set_up.init import file_text
from lakeupsert.cli.set_up.settings_file import plain
from lakeupsert.config import FILE_NAME, TableSettings, parse
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.phrases import count, size

if TYPE_CHECKING:
    from lakeupsert.operations.init.propose import Proposal
    from lakeupsert.pipeline.append.commit import AppendResult

ROWS = 10
"""Rows that are shown."""
LARGEST = 1_000_000_000
"""Bytes of files above which it is no quick look."""
DAY_SECONDS = 86_400.0


@main.command("try")
@click.argument("path")
def try_folder(call: Call, path: str) -> Answer:
    """Show what a table of the files below PATH would look like.

    Proposes settings as `init` does, merges the files in a temporary folder as `run` does, however many rows are refused, and
    shows the first rows. It writes nothing into PATH or this folder, and what it wrote elsewhere is deleted.

    \b
    Example:
      lakeupsert try landing/sales
    """
    from lakeupsert.api import Table  # imports Arrow
    from lakeupsert.operations.init.apart import propose_apart

    with call.progress("try") as progress, tempfile.TemporaryDirectory(prefix="lakeupsert-try-") as folder:
        found = propose_apart(path, call.table, partial(progress, f"sampling {path}"))
        if found.bytes > LARGEST:
            raise ConfigurationError(
                "too-large-to-try",
                f"{path} has {size(found.bytes)}, and `try` merges at most {size(LARGEST)}. Nothing was merged.",
                next=f"run `{_command('init', path)}`, then `lakeupsert run`; or try a folder with some of the files",
            )
        call.table = found.table
        settings = _settings(found, path, Path(folder))
        appended, early_warnings = _merge_apart(found.table, settings, progress)
        with Table(found.table, settings) as table:
            shown = table.snapshot
            rows = table.head(ROWS) if shown else None
    if rows is None or shown is None:
        why = "; ".join(append_warnings(appended, early_warnings)) or "they have no rows"
        raise RefusedError("no-readable-file", f"No row of {path} can be shown: {why}.", next="correct these files")
    warnings = (*found.warnings, *append_warnings(appended, early_warnings))
    chosen = {name: found.settings[name].value for name in ("key", "partition_by", "order_by")}
    refused = dict(appended.entry.quarantined) if appended else {}
    next_step = f"`{_command('init', path)}` writes these settings; then `lakeupsert run`"
    result = {
        "proposed": chosen,
        "rows": shown.rows,
        "partitions": shown.partitions,
        "quarantined": refused,
        "first_rows": rows_result(rows),
        "next": next_step,
    }
    facts = [
        *((name, plain(", ".join(value) if value else "none")) for name, value in chosen.items()),
        ("rows", f"{shown.rows:,} in {count(shown.partitions, 'partition')}"),
        *_refused(appended),
        ("next", next_step),
    ]
    return Answer(result, f"{rows_text(rows)}\n\n{output.block(f'Table {found.table}', facts)}", warnings)


def _merge_apart(
    name: str, settings: TableSettings, progress: Callable[[str], None]
) -> "tuple[AppendResult | None, list[str]]":
    """Merge the files in another process. If one ends that, the next run reads each file in another one first."""
    from lakeupsert.pipeline.child import Child, EndedError

    child = Child()
    try:
        return child.call(DAY_SECONDS, _merge, name, settings, alive=partial(progress, "merging the files"))
    except EndedError:
        return _merge(name, settings)
    finally:
        child.end()


def _merge(name: str, settings: TableSettings) -> "tuple[AppendResult | None, list[str]]":
    """The batch, and earlier warnings."""
    from lakeupsert.api import Table

    warnings: list[str] = []
    with Table(name, settings) as table:
        return table.run(host="local", workers=1, warn=warnings.append).append, warnings


def _command(name: str, path: str) -> str:
    return f"lakeupsert {name} {shlex.quote(path)}"


def _settings(found: "Proposal", path: str, folder: Path) -> TableSettings:
    """The proposed settings, of a table in ``folder`` that takes every readable row."""
    if found.hive:
        raise ConfigurationError(
            "already-partitioned",
            f"{path} is a Hive-partitioned folder of Parquet, which needs no merge to look at. Nothing was written.",
            next=f"run `{_command('init', path)}`, then `lakeupsert adopt`, which makes a table of it and rewrites no file",
        )
    if found.settings["key"].value is None:
        [why] = found.settings["key"].evidence
        raise ConfigurationError(
            "no-key",
            f"The sample of {path} does not show which columns identify a row: {why}. Nothing was merged.",
            next=f"run `{_command('init', path)}`, set `key` in {FILE_NAME}, then `lakeupsert run`",
        )
    parts = replace(found.settings["partition_by"], value=found.settings["partition_by"].value or [])
    table = replace(found, processed=str(folder / "table"), settings={**found.settings, "partition_by": parts})
    text = file_text(table, path, folder)
    _, settings = parse(str(folder / FILE_NAME), text.encode(), {}).table(None)
    return msgspec.structs.replace(settings, quarantine_limit="100%")


def _refused(appended: "AppendResult | None") -> Sequence[tuple[str, str]]:
    """The refused rows by reason, each with an example."""
    if appended is None or not appended.entry.rows_quarantined:
        return []
    examples = [("", f"{code}, for example {plain(text)}") for code, text in sorted(appended.examples.items())]
    return [("refused", output.quarantined_rows(appended)), *examples]
