"""Settings that exclude or need each other: each rule refuses what breaks it, and REFERENCE.md prints them all."""

from pathlib import Path

import pytest

from lakeupsert.config import parse
from lakeupsert.config.exclusions import RULES, Rule
from lakeupsert.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
VALUES = {
    "tombstone_retention": '"90d"',
    "groups": '{ price = { order_by = ["ts"], columns = ["price"] } }',
    "delete.column": '"op"',
    "delete.values": '["D"]',
    "delete.upserts": '["U"]',
    "delete.file_prefix": '"del"',
    "delete.not_null": '"gone"',
    "read.delimiter": '";"',
    "read.header": "false",
    "read.columns": '["a"]',
    "read.null": '"NA"',
    "read.decimal_separator": '","',
    "read.quote": '"\'"',
    "read.escape": '"mysql"',
    "read.dialects": '[{ delimiter = ";" }]',
    "read.encoding": '"latin-1"',
    "read.envelope": '"dms"',
}
"""A value of each setting that a rule names without one."""
SECTIONS = {
    "large": {"queue": '"large.sqlite"', "bytes": '"2GB"'},
    "iceberg": {"catalog": '"lake"', "table": '"lake.sales"'},
    "hive": {"uri": '"thrift://host:9083"', "database": '"lake"', "table": '"sales"'},
    "glue": {"database": '"lake"', "table": '"sales"'},
    "delete": {"file_prefix": '"del"'},
}


def text(*terms: str) -> str:
    """A configuration with the settings that these parts of rules name, each with the first of its values."""
    top = {"landing": '"landing"', "processed": '"processed"', "key": '["id"]', "partition_by": '["day"]'}
    sections: dict[str, dict[str, str]] = {}
    for term in terms:
        if term.startswith("["):
            name = term.removeprefix("[tables.NAME.").removesuffix("]")
            sections.setdefault(name, {}).update(SECTIONS[name])
            continue
        name, _, values = term.partition(" = ")
        section, _, setting = name.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[setting] = values.split(" or ")[0] or VALUES[name]
    lines = [f"{name} = {value}" for name, value in top.items()]
    for section, content in sections.items():
        lines += [f"[tables.sales.{section}]", *(f"{name} = {value}" for name, value in content.items())]
    return "\n".join(["[tables.sales]", *lines])


def message(*terms: str) -> str:
    try:
        parse("/lake/lakeupsert.toml", text(*terms).encode(), {})
    except ConfigurationError as e:
        return e.message
    return ""


@pytest.mark.parametrize("other", [(rule, other) for rule in RULES for other in rule.others], ids=str)
def test_rule_refuses_the_setting_and_names_the_other(other: tuple[Rule, str]) -> None:
    rule, setting = other
    excludes = rule.relation == "excludes"
    without = 'format = "orc"' if rule.first.startswith("format") else 'mode = "rows"'
    terms = [setting, rule.first if excludes else without]
    found = message(*terms, *needed_by(terms, rule))
    name = setting.removeprefix("[tables.NAME.").removesuffix("]").partition(" = ")[0]
    assert f"[tables.sales]: {name} is " in found
    assert f"{'not supported with' if excludes else 'it needs'} {rule.first}" in found


def needed_by(terms: list[str], broken: Rule) -> list[str]:
    """What else these settings need, so that only ``broken`` is broken."""
    return [
        rule.first
        for rule in RULES
        if rule.relation == "is needed by"
        and rule != broken
        and {*terms} & {*rule.others}
        and rule.first not in (*terms, *broken.others)
    ]


def reference_table() -> list[str]:
    """The rows for docs/REFERENCE.md."""

    def shown(term: str) -> str:
        return f"`{term.replace('NAME', '…')}`"

    return [
        f"| {shown(rule.first)} | {rule.relation} | {', '.join(map(shown, rule.others))}{rule.why} |" for rule in RULES
    ]


def test_reference_prints_every_rule() -> None:
    page = (ROOT / "docs/REFERENCE.md").read_text()
    table = page.partition("| setting | relation | settings |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == reference_table()
