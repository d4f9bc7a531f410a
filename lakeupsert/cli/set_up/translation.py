"""Texts of `lakeupsert init --from`, `--from-chombo` and `--from-hive`: the configuration, the answer and its JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lakeupsert.cli.output import block, columns, toml_value
from lakeupsert.cli.set_up.settings_file import comments, plain, relative_path
from lakeupsert.config import is_remote, toml_key
from lakeupsert.phrases import MOST_NAMES, short_list

if TYPE_CHECKING:
    from lakeupsert.operations.init.translation import Setting, Translation, Value


def translation_result(found: "Translation") -> dict[str, object]:
    """The object of `--json`."""
    proposed: dict[str, object] = {"table": found.table}
    for part, settings in _parts(found).items():
        values: dict[str, object] = {_last(setting): setting.value for setting in settings}
        proposed |= {part: values} if part else values
    return {
        "proposed": proposed,
        "origins": {setting.name: setting.origin for setting in found.settings if setting.origin},
        "no_counterpart": [asdict(one) for one in found.leftovers],
        "next": _steps(found),
    }


def translation_text(found: "Translation", target: Path) -> str:
    """What people see."""
    settings = [(s.name, plain(_shown(s.value)), plain(s.origin)) for s in found.settings]
    lines = columns([("setting", "value", "from"), *settings], str.ljust)
    if found.leftovers:
        left = [(one.name, one.value, str(one.line), one.reason) for one in found.leftovers]
        rows = [("no counterpart", "value", "line", "why"), *(tuple(map(plain, row)) for row in left)]
        lines += ["", *columns(rows, str.ljust)]
    return "\n".join([*lines, "", block(f"Table {found.table}", [("written", str(target)), ("next", _steps(found))])])


def translation_file(found: "Translation", command: str, folder: Path) -> str:
    """The configuration: each setting below what it comes from, and at its end what has no counterpart."""
    name = toml_key(found.table)
    lines = comments([f"Written by `{command}`.", "`lakeupsert config --example` shows every setting."])
    for part, settings in _parts(found).items():
        is_source = part.startswith("sources.")
        lines += ["", f"[{part}]" if is_source else f"[tables.{name}{'.' + part if part else ''}]"]
        for setting in settings:
            value = _without_variables(setting.value)
            if setting.name in ("landing", "processed"):
                value = relative_path(str(value), folder)
            lines += comments([setting.origin] if setting.origin else [])
            lines.append(f"{toml_key(_last(setting))} = {toml_value(value)}")
        if not part and is_remote(found.text("processed")):
            lines += ["# A remote table needs a queue.", '# queue = ""']
    if found.leftovers:
        left = [f"line {one.line}, {one.name} = {one.value}: {one.reason}" for one in found.leftovers]
        lines += ["", "# What no setting stands for:", *comments(left)]
    if found.warnings:
        lines += ["", "# Look at this before the first night:", *comments(found.warnings)]
    return "\n".join(lines) + "\n"


def _parts(found: "Translation") -> dict[str, list["Setting"]]:
    """The settings by the table of TOML that they are in, ``""`` for the first one."""
    parts: dict[str, list[Setting]] = {}
    for setting in found.settings:
        parts.setdefault(setting.name.removesuffix(_last(setting)).rstrip("."), []).append(setting)
    return parts


def _shown(value: "Value") -> str:
    return short_list(value) if isinstance(value, tuple) and len(value) > MOST_NAMES else toml_value(value)


def _without_variables(value: "Value") -> "Value":
    """A value that is the same after a configuration's variables are replaced."""
    if isinstance(value, tuple):
        return tuple(one.replace("${", "$${") for one in value)
    return value.replace("${", "$${") if isinstance(value, str) else value


def _last(setting: "Setting") -> str:
    part, dot, name = setting.name.partition(".")
    return name.partition(".")[2] if part == "sources" else name if dot else part


def _steps(found: "Translation") -> str:
    return f"set queue in it, then {found.next}" if is_remote(found.text("processed")) else found.next
