"""One table of the file: its keys and values become `TableSettings`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time
from typing import get_args, get_type_hints

import msgspec

from lakeupsert.config.addresses import absolute_address
from lakeupsert.config.check import check_values
from lakeupsert.config.messages import refuse_unknown_keys, toml_key
from lakeupsert.config.types import AUDIT_PUBLISHED, SECTIONS, DialectSettings, GroupSettings, TableSettings
from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError

_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "text in quotes",
}
"""What people call msgspec's types of values."""
_TYPES_OF = {"array": list, "bool": bool, "float": float, "int": int, "object": dict, "str": str}


def table_of(path: str, content: Mapping[str, object], key: str, header: str) -> dict[str, object]:
    """The table ``key``; empty if it is missing. ``header``: as it is written."""
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise ConfigurationError(
            "bad-setting", f"{path}: {key} is {found!r}; expected a table.", next=f"write {header} above its settings"
        )
    return found


def tables_of(path: str, content: Mapping[str, object], key: str) -> dict[str, dict[str, object]]:
    """The tables below ``key`` by name; none if it is missing."""
    listed = table_of(path, content, key, f"[{key}.NAME]")
    return {name: table_of(f"{path}: [{key}]", listed, name, f"[{key}.{name}]") for name in listed}


def part_of(path: str, name: str, raw: dict[str, object], part: str) -> dict[str, object]:
    """``[tables.NAME.PART]``; empty if it is missing."""
    return table_of(f"{path}: [tables.{name}]", raw, part, f"[tables.{name}.{part}]")


def parse_table(path: str, name: str, raw: dict[str, object]) -> TableSettings:
    """The settings below ``[tables.NAME]``, checked, with absolute addresses."""
    where = f"[tables.{name}]"
    _refuse_unknown_keys(path, name, raw)
    missing = [f.name for f in msgspec.structs.fields(TableSettings) if f.required and f.name not in raw]
    if missing:
        raise ConfigurationError(
            "missing-setting", f"{path}: {where} lacks {', '.join(missing)}.", next=f"add it to {where}"
        )
    try:
        settings = convert(_with_texts(raw), TableSettings)
    except msgspec.ValidationError as e:
        raise ConfigurationError(
            "bad-setting", f"{path}: {where}: {_why_unfit(raw, e)}.", next=f"correct that setting in {where}"
        ) from e
    check_values(path, where, settings)
    large, audit = settings.large, settings.audit
    names = [AUDIT_PUBLISHED, name, *audit.files] if audit else []
    lowered = [one.lower() for one in names]  # DuckDB ignores case
    if twice := next((one for one in reversed(names) if lowered.count(one.lower()) > 1), None):
        raise ConfigurationError(
            "bad-setting",
            f"{path}: {where}: in the queries of `audit`, {twice!r} is the name of two tables.",
            next="give the control file, or the table, another name; or leave `audit` out",
        )
    files = {name: absolute_address(path, address) for name, address in (audit.files if audit else {}).items()}
    return msgspec.structs.replace(
        settings,
        landing=absolute_address(path, settings.landing),
        processed=absolute_address(path, settings.processed),
        queue=settings.queue if settings.queue == "auto" else absolute_address(path, settings.queue),
        large=large and msgspec.structs.replace(large, queue=absolute_address(path, large.queue)),
        audit=audit and msgspec.structs.replace(audit, files=files),
    )


def _refuse_unknown_keys(path: str, name: str, raw: dict[str, object]) -> None:
    where = f"tables.{name}"
    known_in = {part: {*type_.__struct_fields__} for part, type_ in SECTIONS.items()}
    # What is written below [tables.NAME.schema] by mistake is a column, unless it can't be a type.
    everywhere = set().union(*known_in.values())
    columns = part_of(path, name, raw, "schema").items()
    known_in["schema"] = {key for key, type_ in columns if isinstance(type_, str) or key not in everywhere}
    below = {part: f"[tables.{toml_key(name)}{'.' * bool(part)}{part}]" for part in reversed(known_in)}
    places = {key: place for part, place in below.items() for key in known_in[part]}
    for part, known in known_in.items():
        content = part_of(path, name, raw, part) if part else raw
        refuse_unknown_keys(path, f"[{where}{'.' * bool(part)}{part}]", content, known, places)
    groups, dialects = part_of(path, name, raw, "groups"), part_of(path, name, raw, "read").get("dialects")
    for group, settings in groups.items():
        if isinstance(settings, dict):
            refuse_unknown_keys(path, f"[{where}.groups.{group}]", settings, GroupSettings.__struct_fields__)
    for dialect in dialects if isinstance(dialects, list) else ():
        if isinstance(dialect, dict):
            refuse_unknown_keys(path, f"[{where}]: read.dialects", dialect, DialectSettings.__struct_fields__)


def _why_unfit(raw: dict[str, object], e: msgspec.ValidationError) -> str:
    """The setting, what it must be and what it is: msgspec names the types of JSON, and no key of a table."""
    text, _, path = str(e).rpartition(" - at `$.")
    steps = re.findall(r"\w+|\[\d+\]|\[\.{3}\]", path)
    expected = re.match(r"Expected `([^`]+)`( of length)?(?: >= (\d+))?(?:, got `(\w+)`)?", text)
    got = expected and expected[4]
    found = list(_settings_at(raw, steps))
    name, value = next((one for one in found if (type(one[1]) is _TYPES_OF.get(got) if got else not one[1])), found[0])
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return f"{name} lacks `{missing[1]}`"
    if expected is None:
        must = " or ".join(map(repr, _choices(steps)))
    else:
        must = " or ".join(_TYPES.get(one, one) for one in expected[1].split(" | ") if one != "null")
        must += " that is not empty" if expected[2] else f" of at least {expected[3]}" if expected[3] else ""
    if must == _TYPES["array"]:
        return f"{name} must be a list: {name.rpartition('.')[2]} = [{json.dumps(value, default=str)}]"
    return f"{name} must be {must}" + ("" if isinstance(value, dict) else f", and is {value!r}")


def _settings_at(value: object, steps: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Name and value of the settings at a path of msgspec, in which ``[...]`` is any key of a table."""
    if not steps:
        yield "", value
    elif isinstance(value, dict):
        for key in value if steps[0] == "[...]" else steps[:1]:
            for name, one in _settings_at(value[key], steps[1:]):
                yield f"{toml_key(key)}{'.' * (name[:1] not in ('', '['))}{name}", one
    elif isinstance(value, list):
        index = int(steps[0][1:-1])
        for name, one in (pair for item in value[index : index + 1] for pair in _settings_at(item, steps[1:])):
            yield f"{steps[0]}{'.' * (name[:1] not in ('', '['))}{name}", one


def _choices(steps: Sequence[str]) -> tuple[object, ...]:
    """The values that the setting at a path of msgspec may have."""
    hint: type = TableSettings
    for step in steps:
        hint = get_args(hint)[step == "[...]"] if step[0] == "[" else get_type_hints(hint)[step]
        hint = get_args(hint)[0] if type(None) in get_args(hint) else hint
    return get_args(hint)


def _with_texts(raw: dict[str, object]) -> dict[str, object]:
    """The settings with all values that are compared as text converted to text."""
    delete, read = raw.get("delete"), raw.get("read")
    if isinstance(delete, dict):
        lists = {setting: delete[setting] for setting in ("values", "upserts") if isinstance(delete.get(setting), list)}
        raw = {**raw, "delete": {**delete, **{setting: _column_texts(values) for setting, values in lists.items()}}}
    if isinstance(read, dict) and isinstance(read.get("only"), dict):
        raw = {**raw, "read": {**read, "only": {name: _column_texts(value) for name, value in read["only"].items()}}}
    return raw


def _column_texts(value: object) -> object:
    return list(map(_column_text, value)) if isinstance(value, list) else _column_text(value)


def _column_text(value: object) -> object:
    """A TOML scalar as the text in a column of its type: true, 1, 0.5, 2020-01-31. Lists and tables are returned unchanged."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, float | date | time):
        return value
    import pyarrow as pa  # slow to import, and rarely needed

    moment = value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value
    return pa.scalar(moment).cast(pa.string()).as_py()
