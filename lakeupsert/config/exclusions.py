"""Settings that exclude or need each other. docs/REFERENCE.md prints `RULES`, and a test compares the two.

A rule names a setting as TOML does. ``ties = "content"`` is that value, with ``or`` one of several, and for a list one that
contains these. ``groups`` is any value except the default, and ``[tables.NAME.hive]`` a section.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from lakeupsert.config.messages import Refusal
from lakeupsert.config.publishers import PUBLISHERS
from lakeupsert.config.types import DeleteSettings, ReadSettings, TableSettings


@dataclass(frozen=True)
class Rule:
    """``first`` is not supported with any of ``others``, or each of these needs it. ``why`` continues the sentence."""

    first: str
    relation: Literal["excludes", "is needed by"]
    others: tuple[str, ...]
    why: str = ""


_OF_TEXT = ("read.delimiter", "read.header", "read.columns", "read.null", "read.decimal_separator")
_NOT_BY_KEY = ('ties = "content"', "tombstone_retention", 'on_failed_partition = "skip"', "groups")
_JSON_ENVELOPES = 'read.envelope = "dms" or "wal2json" or "singer" or "airbyte"'


def _rules_of_publishers() -> Iterator[Rule]:
    for name, kind in PUBLISHERS.items():
        named, section = f'publishers = ["{name}"]', f"[tables.NAME.{name}]"
        yield Rule(named, "is needed by", (section,) if kind.section else kind.settings)
        if kind.section:
            yield Rule(section, "is needed by", (named,))
        if kind.plain_files:
            why = f", because {name.capitalize()} reads no deletion vectors"
            yield Rule(section, "excludes", ('strategy = "delta"',), why)


RULES = (
    Rule("[tables.NAME.large]", "excludes", ('engine = "spark"',), ", because Arrow merges the small partitions"),
    *_rules_of_publishers(),
    Rule('key_scope = "table"', "excludes", _NOT_BY_KEY),
    Rule('key_scope = "table"', "is needed by", ('unknown_deletes = "quarantine"',)),
    Rule("[tables.NAME.delete]", "is needed by", ('unknown_deletes = "quarantine"',)),
    Rule("[tables.NAME.delete]", "excludes", ("groups",), ", because a delete has the order of the whole row"),
    Rule("delete.not_null", "excludes", ("delete.column", "delete.values", "delete.upserts", "delete.file_prefix")),
    Rule("delete.column", "is needed by", ("delete.values", "delete.upserts")),
    Rule('mode = "columns"', "is needed by", ('nulls = "keep"', "groups")),
    Rule('mode = "columns"', "excludes", ('ties = "content"', "tombstone_retention")),
    Rule("history = true", "excludes", ('mode = "columns"', 'key_scope = "table"')),
    Rule('mode = "columns"', "excludes", ('full_extract = "replace"',), ", because it takes no extracts"),
    Rule('key_scope = "table"', "excludes", ('full_extract = "replace"',), ", because it takes no extracts"),
    Rule('ties = "content"', "excludes", ('full_extract = "replace"',), ", because arrival never counts there"),
    Rule("history = true", "excludes", ('full_extract = "replace"',), ", because versions keep their rows' order"),
    Rule('format = "auto" or "csv" or "delimited"', "is needed by", _OF_TEXT),
    Rule('format = "auto" or "csv"', "is needed by", ("read.quote", "read.escape", "read.dialects")),
    Rule('format = "auto" or "csv" or "delimited" or "jsonl"', "is needed by", ("read.encoding",)),
    Rule('format = "auto" or "jsonl" or "avro"', "is needed by", ("read.envelope",)),
    Rule('format = "avro"', "excludes", (_JSON_ENVELOPES,), ": these messages are JSON"),
)


def check_rules(settings: TableSettings, refuse: Refusal) -> None:
    """Refuse the first setting that breaks a rule."""
    for rule in RULES:
        excludes, found = rule.relation == "excludes", _value(settings, _name(rule.first))
        if _holds(rule.first, settings) != excludes:
            continue
        but = f", but `{_name(rule.first)}` is {found}" if isinstance(found, str) and not excludes else ""
        for other in rule.others:
            if _holds(other, settings):
                default = _default(_name(other))
                instead = f"expected {default!r}" if default else "leave it out"
                expected = f"{'not supported with' if excludes else 'it needs'} {rule.first}{but}{rule.why}; {instead}"
                value = _value(settings, _name(other))
                refuse(
                    _name(other),
                    list(value) if isinstance(value, tuple | dict) else getattr(value, "table", value),
                    expected,
                )


def _holds(text: str, settings: TableSettings) -> bool:
    """Whether the settings have what ``text`` names."""
    value, values = _value(settings, _name(text)), text.partition(" = ")[2]
    if not values:
        return value != _default(_name(text))
    named = map(json.loads, values.split(" or "))
    return any(set(one) <= set(value) if isinstance(value, tuple) else one == value for one in named)


def _name(text: str) -> str:
    return text[len("[tables.NAME.") : -1] if text[0] == "[" else text.partition(" = ")[0]


def _value(settings: TableSettings, name: str) -> object:
    section, _, setting = name.rpartition(".")
    return getattr(settings if not section else getattr(settings, section) or _DEFAULTS[section], setting)


def _default(name: str) -> object:
    section, _, setting = name.rpartition(".")
    return getattr(_DEFAULTS[section], setting)


_DEFAULTS: dict[str, msgspec.Struct] = {
    "": TableSettings(landing="", processed="", key=("",), partition_by=()),
    "delete": DeleteSettings(),
    "read": ReadSettings(),
}
