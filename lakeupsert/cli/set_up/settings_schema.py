"""The JSON Schema of `lakeupsert.toml`, for editors. It is made of the classes in `config`, with their docstrings."""

import ast
import inspect
from typing import Any

import msgspec

from lakeupsert.config import DatabaseSource, Hooks, KafkaSource, TableSettings, sources, types

Schema = dict[str, Any]
"""JSON."""


def settings_schema() -> Schema:
    """The schema of the file. A text with `${VAR}` has to fit it as it is written."""
    _, parts = msgspec.json.schema_components(
        [TableSettings, DatabaseSource, KafkaSource, Hooks], ref_template="#/definitions/{name}"
    )
    descriptions = _descriptions()
    definitions: Schema = {name: _definition(part, descriptions.get(name, {})) for name, part in parts.items()}
    for setting in ("values", "upserts"):  # compared with the text of a column, and may be written without quotes
        definitions["DeleteSettings"]["properties"][setting]["items"] = {
            "type": ["string", "integer", "number", "boolean"]
        }
    hooks = definitions.pop("Hooks")["properties"]
    table = definitions["TableSettings"]
    definitions["ProfileTable"] = {**table, "required": []}
    definitions["Profile"] = {
        **table,
        "description": "``[profiles.NAME]``: settings of all tables, and in ``tables`` of single ones, that override the others.",
        "properties": {**table["properties"], **hooks, "tables": _tables("ProfileTable")},
        "required": [],
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "lakeupsert.toml",
        "type": "object",
        "properties": {
            **hooks,
            "tables": _tables("TableSettings"),
            "sources": _tables("DatabaseSource", "KafkaSource"),
            "profiles": _tables("Profile"),
        },
        "required": ["tables"],
        "additionalProperties": False,
        "definitions": definitions,
    }


def _tables(*definitions: str) -> Schema:
    refs = [{"$ref": f"#/definitions/{definition}"} for definition in definitions]
    return {"type": "object", "additionalProperties": refs[0] if len(refs) == 1 else {"anyOf": refs}}


def _definition(part: Schema, descriptions: dict[str, str]) -> Schema:
    """A class of settings: other keys are refused, as `load` does, and TOML has no null."""
    properties = {name: _without_null(schema) for name, schema in part["properties"].items()}
    for name, text in descriptions.items():
        if name in properties:
            properties[name]["description"] = text
    return {**part, "properties": properties, "additionalProperties": False}


def _without_null(schema: Schema) -> Schema:
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    others = {key: value for key, value in schema.items() if key != "anyOf" and (key, value) != ("default", None)}
    return {**others, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})}


def _descriptions() -> dict[str, dict[str, str]]:
    """The docstrings of the settings, by class and name. Python does not keep them, but its source has them."""
    found: dict[str, dict[str, str]] = {}
    for node in (one for module in (types, sources) for one in ast.parse(inspect.getsource(module)).body):
        if isinstance(node, ast.ClassDef):
            for setting, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr):
                    name, docstring = ast.unparse(setting.target), ast.literal_eval(text.value)
                    found.setdefault(node.name, {})[name] = inspect.cleandoc(docstring)
    return found
