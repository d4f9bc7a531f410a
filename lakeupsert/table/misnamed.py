"""Columns that no file has: which one a name is a typo of, and which setting of `read` would make it appear."""

import difflib
import re
from collections.abc import Iterable
from os.path import commonprefix

import pyarrow as pa

from lakeupsert.config import EnvelopeName

_WRAPPED: dict[EnvelopeName, tuple[set[str], ...]] = {
    "debezium": ({"op", "before", "after"}, {"op", "after", "source"}, {"schema", "payload"}),
    "dms": ({"data", "metadata"},),
    "wal2json": ({"action", "schema", "table"}, {"xid", "change"}, {"nextlsn", "change"}, {"timestamp", "change"}),
    "singer": ({"type", "stream", "record"},),
    "airbyte": ({"type", "record"}, {"_airbyte_data"}),
}
"""The columns of change events that are read without the setting `read.envelope`. In a snapshot `before` is always null."""
_UNSPLIT = re.compile(r"[^;,|\t]+([;,|\t])(?:[^;,|\t]+\1)*[^;,|\t]+")


def suggest(name: str, schema: pa.Schema) -> str:
    """Suggests the column of ``schema`` that ``name`` may be a typo of, and lists them all."""
    envelope = find_envelope(schema.names)
    wrapped = f' The rows look wrapped: set `envelope = "{envelope}"` in [tables.….read].' if envelope else ""
    found = f" Found: {', '.join(schema.names)}."
    return f"{did_you_mean(name, schema.names)}{found}{wrapped}{describe_separator(schema.names)}"


def find_envelope(columns: Iterable[str]) -> EnvelopeName | None:
    """The envelope that rows with these columns are in, if they were read without the setting."""
    found = {*columns}
    wal2json: EnvelopeName | None = "wal2json" if found == {"change"} else None  # without any of its options
    return next((e for e, names in _WRAPPED.items() if any(n <= found for n in names)), wal2json)


def describe_separator(names: Iterable[str]) -> str:
    """What to set if one of these columns looks like a header that was not split; empty if none does."""
    found = next((match for name in names if (match := _UNSPLIT.fullmatch(name))), None)
    if found is None:
        return ""
    separator = found[1].replace("\t", "\\t")
    return (
        f' The header looks separated by "{separator}": set `delimiter = "{separator}"` in [tables.….read], or add it to '
        "`dialects` if other files have another."
    )


def nearest_name(name: str, columns: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The column that ``name`` is most likely a typo of, ignoring case; None if none is as similar as ``cutoff`` (1: equal)."""
    called = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), called, n=1, cutoff=cutoff)
    return called[close[0]] if close else None


def did_you_mean(name: str, columns: Iterable[str], cutoff: float = 0.8) -> str:
    close = nearest_name(name, columns, cutoff)
    return f" Did you mean {close!r}?" if close else ""


def find_typo(name: str, columns: Iterable[str]) -> str | None:
    """The column that ``name`` is a typo of: they differ by one letter, by two swapped letters, or only by `_` or case.

    Other digits or another word make another name: a table may have `price_1` and `price_2`, or `deleted` and `deleted_at`.
    """
    return next((column for column in columns if column != name and _is_slip(name.lower(), column.lower())), None)


def _is_slip(name: str, column: str) -> bool:
    here, there = (re.split(r"[\W_]+", text) for text in (name, column))
    if "".join(here) == "".join(there):
        return True
    others = [(one, other) for one, other in zip(here, there, strict=False) if one != other]
    return len(here) == len(there) and len(others) == 1 and _is_one_slip(*others[0])


def _is_one_slip(word: str, other: str) -> bool:
    """Short words that differ by a letter are different words, for example `en` and `es`. So are words with another first
    letter."""
    if min(len(word), len(other)) < 4 or word[0] != other[0] or re.findall(r"\d", word) != re.findall(r"\d", other):
        return False
    begin = len(commonprefix([word, other]))  # noqa: RUF071  words, and no paths
    end = len(commonprefix([word[begin:][::-1], other[begin:][::-1]]))  # noqa: RUF071
    own, others = word[begin : len(word) - end], other[begin : len(other) - end]
    return max(len(own), len(others)) == 1 or (len(own) == 2 and own == others[::-1])
