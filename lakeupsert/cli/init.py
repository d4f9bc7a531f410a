"""`lakeupsert init`: propose a configuration from the files that are there. The texts of the answer and of the file."""

import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.output import block, columns, count, toml_value
from lakeupsert.cli.program import main
from lakeupsert.config import FILE_NAME, is_remote, toml_key
from lakeupsert.errors import ConfigurationError

if TYPE_CHECKING:
    from lakeupsert.operations.propose import Proposal

WIDTH = 118
"""Of the comments in the file."""
SHOWN = 40
"""Most columns that a table for people has."""


@main.command()
@click.argument("path")
@click.option("--dry-run", is_flag=True, help="Print the file instead of writing it.")
@common
@click.pass_obj
def init(call: Call, path: str, dry_run: bool) -> Answer:
    """Write a configuration for the files below PATH.

    PATH is a landing zone, or a Hive-partitioned Parquet folder that will become a table. Reads a sample of the files; comments
    in the configuration give the evidence for each setting. Never overwrites a file.

    \b
    Example:
      lakeupsert init landing/sales
    """
    target = Path(call.config_path or FILE_NAME).expanduser().absolute()
    folder = Path(path).expanduser().resolve()
    if target.exists() and not dry_run:
        raise _exists(target)
    if not is_remote(path) and folder in target.resolve().parents:
        raise ConfigurationError(
            "configuration-in-landing",
            f"{target} would lie in {folder}, among the data.",
            next="run this from another folder, or name a file outside with --config",
        )
    from lakeupsert.operations.propose import propose  # brings Arrow

    with call.progress("init") as progress:
        progress(f"looking at {path}")
        found = propose(path, call.table)
    text = _file_text(found, path, target.parent)
    call.table = found.table
    what = f"`lakeupsert adopt {shlex.quote(path)}`" if found.hive else "`lakeupsert run`"
    left = [*found.open, *(["queue"] if is_remote(found.processed) else [])]
    steps = f"correct {', '.join(left)} in it, then {what}" if left else what
    result = {
        "written": None if dry_run else str(target),
        "proposed": {
            "table": found.table,
            "landing": found.landing,
            "processed": found.processed,
            **{name: choice.value for name, choice in found.settings.items()},
            "schema": found.schema,
        },
        "columns": [asdict(c) for c in found.columns],
        "looked_at": {"files": found.files, "rows": found.rows, "of_files": found.of_files},
        "next": steps,
    }
    if dry_run:
        return Answer(result, text.rstrip("\n"), found.warnings)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as e:
        raise _exists(target) from e
    except FileNotFoundError as e:
        raise ConfigurationError(
            "no-folder", f"There is no folder {target.parent}.", next="create it, or give another file with --config"
        ) from e
    return Answer(result, _told(found, target, steps), found.warnings)


def _exists(target: Path) -> ConfigurationError:
    return ConfigurationError(
        "configuration-exists",
        f"{target} exists, and is not overwritten.",
        next="name another file with --config, or print the proposal with --dry-run",
    )


def _told(found: "Proposal", target: Path, steps: str) -> str:
    facts = [("looked at", _looked_at(found))]
    for name, choice in found.settings.items():
        value = choice.value
        if isinstance(value, dict):
            value = f"{value['column']}: {', '.join(value['values'])}"
        elif isinstance(value, list):
            value = ", ".join(value)
        nothing = "left open" if name in found.open else "none"
        facts += [("dates" if name == "landing_dates" else name, _plain(value or nothing))]
        facts += [("", f"  {_plain(line)}") for line in choice.evidence]
    facts += [("written", str(target)), ("next", steps)]
    return "\n".join([*_columns(found), "", block(f"Table {found.table}", facts)])


def _looked_at(found: "Proposal") -> str:
    kind = "a Hive-partitioned folder" if found.hive else "a landing zone"
    return f"{found.files:,} of {count(found.of_files, 'file')} and {count(found.rows, 'row')}, as {kind}"


def _columns(found: "Proposal") -> list[str]:
    rows = [("column", "type", "nulls", "distinct", "low", "high")]
    for c in found.columns[:SHOWN]:
        low, high = ("" if v is None else str(v) for v in (c.low, c.high))
        rows.append((c.name, c.type[:30], f"{c.nulls / found.rows:.1%}", f"{c.distinct:,}", low, high))
    lines = columns([[_plain(cell) for cell in row] for row in rows], str.ljust)
    more = len(found.columns) - SHOWN
    return [*lines, f"and {more} more columns"] if more > 0 else lines


def _file_text(found: "Proposal", path: str, folder: Path) -> str:
    """The configuration: what is proposed as settings, what is open as comments, above each the evidence."""
    name = toml_key(found.table)
    zones = {"landing": found.landing, "processed": found.processed}
    guessed = "landing" if found.hive else "processed"
    lines = [
        *_comments([f"Proposed by `lakeupsert init {path}`, which looked at {_looked_at(found)}."]),
        "# Check it before the first night. `lakeupsert config --example` shows every setting.",
        "",
        f"[tables.{name}]",
    ]
    for zone, address in zones.items():
        note = "  # a guess: correct it" if zone == guessed else ""
        lines.append(f"{zone} = {toml_value(_near(address, folder))}{note}")
    if is_remote(found.processed):
        lines += ["", "# A table that is not on this machine names its queue.", '# queue = ""']
    for setting in ("key", "partition_by", "order_by", "landing_dates"):
        choice = found.settings[setting]
        lines += ["", *_comments(choice.evidence)]
        if choice.value is not None:
            lines.append(f"{setting} = {toml_value(choice.value)}")
        else:
            lines.append(f"# {setting} = {'[]' if setting in found.open else toml_value('')}")
    if found.schema:
        lines += ["", f"[tables.{name}.schema]"]
        lines += [f"{toml_key(column)} = {toml_value(type_)}" for column, type_ in found.schema.items()]
    delete = found.settings["delete"]
    lines += ["", *_comments(delete.evidence)]
    if delete.value is not None:
        lines.append(f"[tables.{name}.delete]")
        lines += [f"{key} = {toml_value(value)}" for key, value in delete.value.items()]
    lines += ["", "# The columns of the sample:", *(f"# {line}" for line in _columns(found))]
    return "\n".join(lines) + "\n"


def _comments(lines: Sequence[str]) -> list[str]:
    return [f"# {part}" for line in lines for part in textwrap.wrap(_plain(line), WIDTH, subsequent_indent="  ")]


def _plain(text: str) -> str:
    """Without control characters, which comments of TOML must not have and terminals obey."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


def _near(address: str, folder: Path) -> str:
    """Relative to the file where it is below it, so that both can be moved together."""
    return os.path.relpath(address, folder) if folder in Path(address).parents else address
