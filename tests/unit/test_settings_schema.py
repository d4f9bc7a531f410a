"""`config --schema`: it accepts every configuration that the documentation shows and refuses what `load` refuses by its form."""

import json
import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.cli.set_up import config as config_command
from lakeupsert.config import Hooks, TableSettings

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
REQUIRED = {"landing": "l", "processed": "p", "key": ["k"], "partition_by": ["d"]}
TOP = {"tables", "sources", "profiles", *Hooks.__struct_fields__}

EXAMPLE = Path(config_command.__file__).with_name("example.toml").read_text("utf-8")


@cache
def schema() -> Any:
    return json.loads(CliRunner().invoke(main, ["config", "--schema"]).stdout)


def problems(document: object) -> list[str]:
    found = jsonschema.Draft7Validator(schema()).iter_errors(as_json(document))
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in found]


def as_json(value: object) -> object:
    """TOML's dates as the texts that an editor sees."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


def blocks() -> Iterator[Any]:
    for page in PAGES:
        for number, text in enumerate(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            yield pytest.param(text, id=f"{page.name} {number}")


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration of what may be only a part: settings of a table, or a table without those that are required."""
    top = {key: value for key, value in document.items() if key in TOP}
    settings = {key: value for key, value in document.items() if key not in TOP}
    tables = top.get("tables") or {"sales": {}}
    return {**top, "tables": {name: {**REQUIRED, **settings, **table} for name, table in tables.items()}}


@pytest.mark.parametrize("text", list(blocks()))
def test_documentation_shows_what_the_schema_accepts(text: str) -> None:
    assert problems(completed(tomllib.loads(text))) == []


@pytest.mark.parametrize(
    "path", [ROOT / "examples" / "lakeupsert.toml", *sorted((ROOT / "infra").rglob("lakeupsert*.toml"))]
)
def test_example_files_are_accepted(path: Path) -> None:
    assert problems(tomllib.loads(path.read_text())) == []


def test_example_is_accepted_also_with_every_setting() -> None:
    assert problems(tomllib.loads(EXAMPLE)) == []
    lines = [line.removeprefix("# ") for line in EXAMPLE.splitlines()]
    whole = tomllib.loads("\n".join(line for line in lines if line.startswith("[") or " = " in line.split("#")[0]))
    assert {"groups", "glue", "read"} <= whole["tables"]["sales"].keys()
    assert problems(whole) == []
    assert EXAMPLE.startswith("#:schema ./lakeupsert.schema.json\n")


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"tables": {"sales": {**REQUIRED, "keyy": 1}}}, "tables.sales"),
        ({"tables": {"sales": {"landing": "l"}}}, "tables.sales"),
        ({"tables": {"sales": {**REQUIRED, "order_by": "ts"}}}, "tables.sales.order_by"),
        ({"tables": {"sales": {**REQUIRED, "engine": "sparc"}}}, "tables.sales.engine"),
        ({"tables": {"sales": {**REQUIRED, "read": {"delimeter": ";"}}}}, "tables.sales.read"),
        ({"tables": {"sales": {**REQUIRED, "keep_snapshots": 0}}}, "tables.sales.keep_snapshots"),
        ({"tables": {}, "profiles": {"prod": {"engin": "arrow"}}}, "profiles.prod"),
        ({"tables": {}, "profiles": {"prod": {"tables": {"sales": {"key": "k"}}}}}, "profiles.prod.tables.sales.key"),
        ({"tables": {}, "on_failure": []}, "on_failure"),
        ({"tables": {}, "table": {}}, ""),
        ({}, ""),
    ],
)
def test_schema_refuses_slips_at_their_place(document: object, place: str) -> None:
    assert {problem.partition(":")[0] for problem in problems(document)} == {place}


def test_every_setting_is_described_and_has_its_default() -> None:
    found = schema()
    jsonschema.Draft7Validator.check_schema(found)
    table = found["definitions"]["TableSettings"]["properties"]
    assert set(table) == set(TableSettings.__struct_fields__)
    described = [name for name, part in table.items() if "description" in part or "definitions" in json.dumps(part)]
    assert set(table) - set(described) == set()
    for field in msgspec.structs.fields(TableSettings):
        if isinstance(field.default, str | int | bool):
            assert table[field.name]["default"] == field.default
    assert '{"type": "null"}' not in json.dumps(found), "TOML has no null"
