"""Write `aliases` into the configuration for `schema rename --alias`, keeping all other lines and comments."""

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lakeupsert.config import ENVIRONMENT_PREFIX, Config, parse, rename_aliases, toml_aliases, toml_key
from lakeupsert.errors import ConfigurationError, LakeupsertError


@dataclass(frozen=True)
class AliasEdit:
    """The new text of a configuration file."""

    path: Path
    text: str
    aliases: dict[str, str]
    is_change: bool

    def write(self, finished: str) -> None:
        """Replace the file. ``finished``: a sentence for the error, about what is already done."""
        if not self.is_change:
            return
        target = self.path.resolve()
        new = target.with_name(f".{target.name}.new")
        try:
            new.write_bytes(self.text.encode())
            shutil.copymode(target, new)
            new.replace(target)
        except OSError as e:
            new.unlink(missing_ok=True)
            raise LakeupsertError(
                "configuration-not-written",
                f"{finished}, but the alias was not written to {self.path}: {e.strerror}.",
                next="make the file writable and run the same command again, or add this to it: "
                f"{toml_aliases(self.aliases)}",
                data_changed=True,
            ) from e


def plan_alias(config: Config, table: str, old: str, new: str) -> AliasEdit:
    """The configuration with ``old`` as an alias of the column ``new``. Aliases of ``old`` become aliases of ``new``.

    Raises:
        ConfigurationError: the configuration can't be changed safely, or can't be written.
    """
    if "://" in config.path:
        raise _not_editable(f"{config.path} is not a local file", table, old, new)
    variables = config.origins[table].get("read", "").split(", ")
    if by := next(
        (v for v in variables if v.startswith(ENVIRONMENT_PREFIX) and v.upper().endswith(("__READ", "__ALIASES"))), None
    ):
        raise _not_editable(f"the environment variable {by} sets `read` and overrides {config.path}", table, old, new)
    if variables[0].startswith("profile "):
        raise _not_editable(f"{variables[0]} sets `read` in {config.path}", table, old, new)
    path = Path(config.path)
    if not os.access(path, os.W_OK) or not os.access(path.resolve().parent, os.W_OK):
        raise _not_editable(f"this user has no permission to write {path}", table, old, new)
    text = path.read_bytes().decode()
    wanted = tomllib.loads(text)
    before = wanted["tables"][table].get("read", {}).get("aliases", {})
    aliases = rename_aliases(before, old, new)
    if aliases != before:
        wanted["tables"][table].setdefault("read", {})["aliases"] = aliases
    for edited in [text] if aliases == before else _edits(text, table, aliases):
        try:
            if tomllib.loads(edited) != wanted:
                continue
            parse(config.path, edited.encode(), profile=config.profile)
        except tomllib.TOMLDecodeError:
            continue
        except ConfigurationError as e:
            raise _not_editable(f"the changed configuration would not load: {e.message}", table, old, new) from e
        return AliasEdit(path, edited, aliases, is_change=edited != text)
    raise _not_editable(f"{path} has its `read` settings in a form that can't be changed safely", table, old, new)


def _not_editable(reason: str, table: str, old: str, new: str) -> ConfigurationError:
    return ConfigurationError(
        "configuration-not-editable",
        f"The alias can't be written: {reason}. Nothing was changed.",
        next=f"run the command without --alias, and add this to [tables.{toml_key(table)}.read] yourself: "
        f"{toml_aliases({old: new})}",
    )


def _edits(text: str, table: str, aliases: dict[str, str]) -> Iterator[str]:
    """The text with the aliases in each place where they may stand. Only one is right; the caller finds it by parsing."""
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    for begin, line in enumerate(lines):
        header = _header(line)
        stop = next((i for i, other in enumerate(lines[begin + 1 :], begin + 1) if _header(other)), len(lines))
        before, own, behind = lines[: begin + 1], lines[begin + 1 : stop], lines[stop:]
        if header == ["tables", table, "read", "aliases"]:
            present = [_parse_line(line) for line in own]
            same = {alias: column for alias, column in aliases.items() if {alias: column} in present}
            kept = [line for line in own if not _parse_line(line) or _parse_line(line).items() <= same.items()]
            new = [
                f"{toml_key(alias)} = {json.dumps(column, ensure_ascii=False)}{end}"
                for alias, column in aliases.items()
                if alias not in same
            ]
            yield "".join([*before, *new, *kept, *behind])
        elif header == ["tables", table, "read"]:
            at = next((i for i, line in enumerate(own) if "aliases" in _parse_line(line)), None)
            if at is None:
                yield "".join([*before, toml_aliases(aliases) + end, *own, *behind])
            else:
                comment = own[at].rpartition("}")[2].strip()
                changed = f"{toml_aliases(aliases)}{'  ' if comment else ''}{comment}{end}"
                yield "".join([*before, *own[:at], changed, *own[at + 1 :], *behind])
    gap = "" if text.endswith("\n") or not text else end
    yield f"{text}{gap}{end}[tables.{toml_key(table)}.read]{end}{toml_aliases(aliases)}{end}"


def _header(line: str) -> list[str]:
    """The names in the header of a TOML table; empty for any other line."""
    names: list[str] = []
    found = _parse_line(line) if line.lstrip().startswith("[") else {}
    while found:
        name, value = next(iter(found.items()))
        names.append(name)
        found = value if isinstance(value, dict) else {}
    return names


def _parse_line(line: str) -> dict[str, object]:
    """The content of a line of TOML; empty if it is not complete by itself."""
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return {}
