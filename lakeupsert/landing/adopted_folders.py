"""What the folders of an adopted lake say: the type and value of each partition, and how its folder is written.

Spark and Hive escape fewer characters than DuckDB, Polars and pyarrow do, and people write `month=01`. A value keeps the folder
that it has. Two folders of one value would be two partitions with one key each, so they are refused.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.formats.inference import infer_type
from lakeupsert.table.layout import LONGEST_PARTITION, level_name, parse_value, partition_texts
from lakeupsert.table.spec import AdoptedFolder, FolderFormat, TableSpec

_FOLDER_TYPES = [pa.bool_(), pa.int64(), pa.date32()]
_NUMBER_OR_TIME = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\d{4}-\d\d-\d\d[T ].*|\d{8}|\d{4}/\d\d?/\d\d?")
"""Text that a column of another type has, too, where it may be written in another way."""


def folder_type(texts: Iterable[str]) -> pa.DataType:
    """The type of a partition column: integer (also `01`), date (also `2024-1-1`), boolean (also `True`), or else text."""
    return infer_type(pa.array(list(map(_usual, texts)), pa.string()), _FOLDER_TYPES)


def _usual(text: str) -> str:
    if date := re.fullmatch(r"(\d{4})-(\d\d?)-(\d\d?)", text):
        return f"{date[1]}-{date[2]:0>2}-{date[3]:0>2}"
    return re.sub(r"^(-?)0+(?=\d)", r"\1", text.lower() if text.lower() in ("true", "false") else text)


@dataclass(frozen=True)
class Folders:
    """The spec of a table that keeps its adopted folders, and warnings about values that may be landed in another way."""

    spec: TableSpec
    warnings: tuple[str, ...]


def keep_folders(spec: TableSpec, folders: Iterable[str], where: str) -> Folders:
    """``folders``: the adopted partitions; ``where``: the section of the configuration with types, for messages.

    Raises ConfigurationError if a folder has no value of the column's type, or two have the same.
    """
    levels: dict[str, dict[str, str]] = {column: {} for column in spec.partition_by}  # text by level
    for folder in folders:
        for level, (column, text) in zip(folder.split("/"), partition_texts(folder).items(), strict=False):
            levels.get(column, {})[level] = text
    formats = {c: f for c, texts in levels.items() if (f := _format(spec, c, texts.values()))}
    spec = msgspec.structs.replace(
        spec, folder_formats=tuple(FolderFormat(column=c, format=f) for c, f in formats.items())
    )
    adopted: dict[str, str] = {}
    warnings: list[str] = []
    for column, texts in levels.items():
        names = {level: _name(spec, column, level, text, where) for level, text in texts.items()}
        adopted |= _others(names, texts, where)
        warnings += _warnings(spec, column, texts, names)
    if formats or adopted:
        kept = tuple(AdoptedFolder(name=name, folder=folder) for name, folder in sorted(adopted.items()))
        spec = msgspec.structs.replace(spec, adopted_folders=kept)
    return Folders(spec, tuple(warnings))


def _format(spec: TableSpec, column: str, texts: Iterable[str]) -> str | None:
    """How integers with leading zeros are written, if one width makes all of the texts."""
    texts = list(texts)
    if not pa.types.is_integer(spec.schema.field(column).type) or not all(re.fullmatch(r"\d+", text) for text in texts):
        return None
    padded = [len(text) for text in texts if text != str(int(text))]
    format_ = f"0{min(padded)}d" if padded else ""
    return format_ if padded and all(format(int(text), format_) == text for text in texts) else None


def _name(spec: TableSpec, column: str, level: str, text: str, where: str) -> str:
    """What the level of a value would be called, if it had not been adopted."""
    type_ = spec.schema.field(column).type
    unfit = ConfigurationError(
        "not-partitioned",
        f"Folder {level}: {text!r} is not a value of the partition column {column!r} ({type_}). Nothing was changed.",
        next="rename the folder"
        + ("" if pa.types.is_string(type_) else f", or give {column!r} the type string in {where}"),
    )
    if "\ufffd" in text:  # bytes that are no UTF-8: two such folders could have one value
        raise unfit
    if pa.types.is_date(type_) and not re.fullmatch(r"\d{4}-\d\d?-\d\d?", text):
        raise unfit  # Spark, for one, would read 20240101 as no date
    if pa.types.is_string(type_):
        name = level_name(spec, column, text)
    else:
        try:
            value = parse_value(spec, column, text).as_py()
        except ConfigurationError:
            raise unfit from None
        name = level_name(spec, column, str(value).lower() if isinstance(value, bool) else str(value))
    if name is None or len(level.encode()) > LONGEST_PARTITION or name.partition("=")[0] != level.partition("=")[0]:
        raise unfit
    return name


def _others(names: Mapping[str, str], texts: Mapping[str, str], where: str) -> dict[str, str]:
    """The levels that have another name than their value, by that name. Equal ``texts`` are one value of every type."""
    levels: dict[str, str] = {}
    for level, name in names.items():
        other = levels.setdefault(name, level)
        if other != level:
            column = name.partition("=")[0]
            raise ConfigurationError(
                "not-partitioned",
                f"Folders {other} and {level} have one value, so rows of one key could be in both. Nothing was changed.",
                next="move the files of one into the other, below all other partition columns"
                + (f"; or give {column!r} the type string in {where}" if texts[level] != texts[other] else ""),
            )
    return {name: level for name, level in levels.items() if name != level}


def _warnings(spec: TableSpec, column: str, texts: Mapping[str, str], names: Mapping[str, str]) -> Sequence[str]:
    type_ = spec.schema.field(column).type
    if column in spec.format_of_column:
        example = next(level for level, text in texts.items() if text != str(int(text)))
        return [
            f"partition column {column!r} is a number ({type_}), written as in {example}; new folders are written so, too"
        ]
    if pa.types.is_string(type_):
        like = next((level for level, text in texts.items() if _NUMBER_OR_TIME.fullmatch(text)), None)
        if like is None:
            return []
        return [
            f"partition column {column!r} is text, as in {like}: a number or time that lands goes to the folder of its usual "
            "text, which may be another one. Land it written as the folders are"
        ]
    other = next((level for level, name in names.items() if name != level), None)
    return [f"partition column {column!r}: new folders are written as {names[other]}, not as {other}"] if other else []
