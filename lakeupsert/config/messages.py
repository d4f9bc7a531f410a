"""Parts of messages about settings, which name them as TOML does."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

from lakeupsert.errors import ConfigurationError


@dataclass(frozen=True)
class Refusal:
    """Raises the error for a setting; ``where`` is its table in the file ``path``."""

    path: str
    where: str

    def __call__(self, setting: str, found: object, expected: str) -> NoReturn:
        raise ConfigurationError(
            "bad-setting",
            f"{self.path}: {self.where}: {setting} is {found!r}; {expected}.",
            next=f"correct {setting} in {self.where}",
        )


_WHY_NOT = {
    "by_key": ' A delete that has only its key needs `key_scope = "table"`: the key index knows the partition of each key. '
    "Without the index such a delete would read all partitions."
}


def refuse_unknown_keys(
    path: str, where: str, keys: Iterable[str], known: Iterable[str], places: Mapping[str, str] = MappingProxyType({})
) -> None:
    """``places``: where other keys belong."""
    for key in keys:
        if key not in known:
            place = places.get(key)
            hint = f" It is a setting of {place}." if place else _WHY_NOT.get(key) or did_you_mean(key, known)
            instead = (
                f"move it below {place}" if place else f"correct or remove it; known keys: {', '.join(sorted(known))}"
            )
            raise ConfigurationError(
                "unknown-setting", f"{path}: {where} has an unknown key {key!r}.{hint}", next=instead
            )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def of_table(text: str, table: str) -> str:
    """A message with the table's name in it, where it was written by code that does not know the table."""
    return text.replace("[tables.….", f"[tables.{toml_key(table)}.")


def toml_key(text: str) -> str:
    """A name as a TOML key, for the left side of `=`."""
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text, ensure_ascii=False)


def toml_aliases(aliases: Mapping[str, str]) -> str:
    """The TOML line that sets aliases."""
    pairs = (f"{toml_key(alias)} = {json.dumps(column, ensure_ascii=False)}" for alias, column in aliases.items())
    return f"aliases = {{ {', '.join(pairs)} }}"


def rename_aliases(aliases: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """The aliases after a rename: the column's aliases and its old name stand for its new name.

    Names that differ only by case are one column, which needs no alias for itself."""
    kept = {alias: column for alias, column in aliases.items() if alias.lower() not in (old.lower(), new.lower())}
    own = {} if old.lower() == new.lower() else {old: new}
    return {alias: new if column.lower() == old.lower() else column for alias, column in kept.items()} | own
