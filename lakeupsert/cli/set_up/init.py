"""`lakeupsert init`: propose a configuration from a sample of files. Texts of the answer and of the configuration."""

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.output import block, columns, fields, toml_value
from lakeupsert.cli.program import main
from lakeupsert.cli.set_up.settings_file import comments, plain, relative_path
from lakeupsert.cli.set_up.translation import translation_file, translation_result, translation_text
from lakeupsert.config import FILE_NAME, is_remote, parse, toml_key
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import count

if TYPE_CHECKING:
    from lakeupsert.operations.init.propose import Proposal

_LABELS = {"landing_dates": "folders", "decimal_separator": "decimals"}
"""Shorter names of settings, for people."""
SHOWN = 40
"""The largest number of columns listed for people."""


@main.command()
@click.argument("path", required=False)
@click.option("--from-chombo", "chombo", metavar="FILE", help="Take the settings from chombo's properties FILE.")
@click.option(
    "--from-hive", "hive", metavar="FILE", help="Take the settings from Hive's CREATE TABLE statements in FILE."
)
@click.option("--from", "database", metavar="URL", help="Propose a table of PostgreSQL and its source: see --table.")
@click.option("--dry-run", is_flag=True, help="Print the file instead of writing it.")
def init(
    call: Call, path: str | None, chombo: str | None, hive: str | None, database: str | None, dry_run: bool
) -> Answer:
    """Write a configuration for the files below PATH.

    PATH is a landing zone, or a Hive-partitioned Parquet folder that will become a table. Reads a sample of the files; comments
    in the configuration give the evidence for each setting. Never overwrites a file.

    With --from-chombo or --from-hive, the settings come from the file of that system. Everything in it that has no counterpart
    is listed. PATH is then the landing zone, and needed if the file does not name one.

    With --from, they come from the catalogue of a database, which `capture` then follows, and --table is the name there. It also
    creates the landing zone.

    \b
    Example:
      lakeupsert init landing/sales
      lakeupsert init --from-chombo bumu.properties landing/products
      lakeupsert init --from postgresql://me@db.example/shop --table public.orders
    """
    target = Path(call.config_path or FILE_NAME).expanduser().absolute()
    if target.exists() and not dry_run:
        raise _exists(target)
    if path is not None:
        _refuse_inside(path, target)
    systems = {"--from-chombo": chombo, "--from-hive": hive, "--from": database}
    given = {option: value for option, value in systems.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError(f"Give only one of {' and '.join(given)}.")
    if given:
        [(option, value)] = given.items()
        return _translate(call, target, path, option, value, dry_run=dry_run)
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.")
    return _propose(call, target, path, dry_run=dry_run)


def _refuse_inside(landing: str, target: Path) -> None:
    """Raise ConfigurationError if the configuration would be one of the landing files."""
    folder = Path(landing).expanduser().resolve()
    if not is_remote(landing) and folder in target.resolve().parents:
        raise ConfigurationError(
            "configuration-in-landing",
            f"The configuration {target} would be written into {folder}, among the data.",
            next="run this in another folder, or give a file elsewhere with --config",
        )


def _translate(call: Call, target: Path, path: str | None, option: str, source: str, *, dry_run: bool) -> Answer:
    with call.progress("init") as progress:
        progress(f"reading {source}")
        if option == "--from-chombo":
            from lakeupsert.operations.init.from_chombo import translate_properties as translate  # imports Arrow
        elif option == "--from-hive":
            from lakeupsert.operations.init.from_hive import translate_ddl as translate
        else:
            from lakeupsert.operations.init.from_database import propose_database

            translate = partial(propose_database, folder=target.parent)
        found = translate(source, path, call.table)
    named = ["--table", call.table] if option == "--from" and call.table is not None else []
    command = shlex.join(["lakeupsert", "init", option, source, *named, *([path] if path is not None else [])])
    _refuse_inside(found.text("landing"), target)
    text = translation_file(found, command, target.parent)
    if not is_remote(found.text("processed")):
        parse(str(target), text.encode(), {})
    call.table = found.table
    result = {"written": None if dry_run else str(target), **translation_result(found)}
    if dry_run:
        return Answer(result, text.rstrip("\n"), found.warnings)
    _write(target, text)
    if option == "--from" and not is_remote(found.text("landing")):
        Path(found.text("landing")).mkdir(parents=True, exist_ok=True)
    return Answer(result, translation_text(found, target), found.warnings)


def _propose(call: Call, target: Path, path: str, *, dry_run: bool) -> Answer:
    from lakeupsert.operations.init.apart import propose_apart  # imports Arrow

    with call.progress("init") as progress:
        found = propose_apart(path, call.table, partial(progress, f"sampling {path}"))
    text = file_text(found, path, target.parent)
    call.table = found.table
    command = f"`lakeupsert adopt {shlex.quote(path)}`" if found.hive else "`lakeupsert run`"
    missing = [*found.open, *(["queue"] if is_remote(found.processed) else [])]
    steps = f"set {', '.join(missing)} in it, then {command}" if missing else command
    result = {
        "written": None if dry_run else str(target),
        "proposed": {
            **fields(found, "table", "landing", "processed"),
            **{name: choice.value for name, choice in found.settings.items()},
            "read": {name: choice.value for name, choice in found.read.items()},
            "schema": found.schema,
        },
        "columns": [asdict(c) for c in found.columns],
        "looked_at": fields(found, "files", "rows", "of_files"),
        "next": steps,
    }
    if dry_run:
        return Answer(result, text.rstrip("\n"), found.warnings)
    _write(target, text)
    return Answer(result, _text(found, target, steps), found.warnings)


def _write(target: Path, text: str) -> None:
    """Write the configuration, unless there is one by now."""
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as e:
        raise _exists(target) from e
    except FileNotFoundError as e:
        raise ConfigurationError(
            "no-folder",
            f"The folder {target.parent} does not exist.",
            next="create it, or give another file with --config",
        ) from e


def _exists(target: Path) -> ConfigurationError:
    return ConfigurationError(
        "configuration-exists",
        f"{target} already exists. It was not changed.",
        next="give another file with --config, or print the proposal with --dry-run",
    )


def _text(found: "Proposal", target: Path, steps: str) -> str:
    facts = [("sampled", _sample(found))]
    for name, choice in found.settings.items():
        value = choice.value
        if isinstance(value, dict):
            known = value.get("not_null")
            value = f"not_null: {known}" if known else f"{value['column']}: {', '.join(value['values'])}"
        elif isinstance(value, list):
            value = ", ".join(value)
        empty = "left open" if name in found.open else "none"
        facts += [(_LABELS.get(name, name), plain(value or empty))]
        facts += [("", f"  {plain(line)}") for line in choice.evidence]
    for name, choice in found.read.items():
        facts.append((_LABELS.get(name, name), plain(toml_value(choice.value))))
        facts += [("", f"  {plain(line)}") for line in choice.evidence]
    facts += [("written", str(target)), ("next", steps)]
    return "\n".join([*_columns(found), "", block(f"Table {found.table}", facts)])


def _sample(found: "Proposal") -> str:
    kind = "a Hive-partitioned folder" if found.hive else "a landing zone"
    return f"{found.files:,} of {count(found.of_files, 'file')} and {count(found.rows, 'row')}, as {kind}"


def _columns(found: "Proposal") -> list[str]:
    rows = [("column", "type", "nulls", "distinct", "low", "high")]
    for c in found.columns[:SHOWN]:
        low, high = ("" if v is None else str(v) for v in (c.low, c.high))
        rows.append((c.name, c.type[:30], f"{c.nulls / found.rows:.1%}", f"{c.distinct:,}", low, high))
    lines = columns([[plain(cell) for cell in row] for row in rows], str.ljust)
    more = len(found.columns) - SHOWN
    return [*lines, f"and {more} more columns"] if more > 0 else lines


def file_text(found: "Proposal", path: str, folder: Path) -> str:
    """The configuration: proposals as settings, open settings as comments, each below its evidence."""
    name = toml_key(found.table)
    zones = {"landing": found.landing, "processed": found.processed}
    guess = "landing" if found.hive else "processed"
    lines = [
        *comments([f"Proposed by `lakeupsert init {path}`, from {_sample(found)}."]),
        "# Check it before the first night. `lakeupsert config --example` shows every setting.",
        "",
        f"[tables.{name}]",
    ]
    for zone, address in zones.items():
        note = "  # a guess: correct it" if zone == guess else ""
        lines.append(f"{zone} = {toml_value(relative_path(address, folder))}{note}")
    if is_remote(found.processed):
        lines += ["", "# A remote table needs a queue.", '# queue = ""']
    for setting in ("key", "partition_by", "order_by", "landing_dates"):
        choice = found.settings[setting]
        lines += ["", *comments(choice.evidence)]
        if choice.value is not None:
            lines.append(f"{setting} = {toml_value(choice.value)}")
        else:
            lines.append(f"# {setting} = {'[]' if setting in found.open else toml_value('')}")
    if found.read:
        lines += ["", f"[tables.{name}.read]"]
        for setting, choice in found.read.items():
            lines += [*comments(choice.evidence), f"{setting} = {toml_value(choice.value)}"]
    if found.schema:
        lines += ["", f"[tables.{name}.schema]"]
        lines += [f"{toml_key(column)} = {toml_value(type_)}" for column, type_ in found.schema.items()]
    delete = found.settings["delete"]
    lines += ["", *comments(delete.evidence)]
    if delete.value is not None:
        lines.append(f"[tables.{name}.delete]")
        lines += [f"{key} = {toml_value(value)}" for key, value in delete.value.items()]
    lines += ["", "# The columns of the sample:", *(f"# {line}" for line in _columns(found))]
    return "\n".join(lines) + "\n"
