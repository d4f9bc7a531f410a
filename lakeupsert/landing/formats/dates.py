"""Dates and timestamps as people write them: text by the formats of `dates` under `[read]`.

A value is read only if its formats agree. `01/03/2024` is two different dates by `%d/%m/%Y` and `%m/%d/%Y`, and no other value of
the file decides between them: a row must not get another date because another row came with it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import DATE_DIRECTIVES, TIME_DIRECTIVES, Reading
from lakeupsert.landing.formats.blocks import Block, RenamedBlock
from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import Converted, as_mask, convert

_PIVOT = 69
"""Of years without a century, those from here on are in the 20th, as in POSIX."""


@dataclass(frozen=True)
class DateFormat:
    """A format of strptime with the directives `DATE_DIRECTIVES`. Names of months are English."""

    text: str

    @cached_property
    def directives(self) -> frozenset[str]:
        return frozenset(re.findall(r"%(.)", self.text)) - {"%"}

    @property
    def has_time(self) -> bool:
        return not TIME_DIRECTIVES.isdisjoint(self.directives)

    @cached_property
    def _pattern(self) -> str:
        parts = re.split(r"%(.)", self.text)
        # Without a sign between two numbers, both need all their digits: else 2024111 may be two dates.
        adjacent = any(not between for between in parts[2:-1:2])
        patterns = {name: r"\d{2}" if adjacent and name in "mdHIMS" else p for name, p in DATE_DIRECTIVES.items()}
        found = [f"(?P<{one}>{patterns[one]})" if one != "%" else "%" for one in parts[1::2]]
        literals = map(re.escape, parts[::2])
        return "(?i)^" + next(literals) + "".join(a + b for a, b in zip(found, literals, strict=True)) + "$"

    def to_iso(self, text: pa.Array) -> pa.Array:
        """Text as `convert` reads dates and timestamps; null for a value that is not written in this format."""
        found = pc.extract_regex(text, self._pattern)
        part = {name: pc.struct_field(found, name) for name in self.directives}
        days = pc.binary_join_element_wise(_year(part), _month(part), _two_digits(part["d"]), "-")
        if not self.has_time:
            return days
        parts = [_hour(part), *(_two_digits(part[name]) if name in part else "00" for name in "MS")]
        times = pc.binary_join_element_wise(*parts, ":")
        fraction = pc.binary_join_element_wise("", part["f"], ".") if "f" in part else ""
        zone = pc.replace_substring(pc.utf8_upper(part["z"]), ":", "") if "z" in part else ""
        return pc.binary_join_element_wise(pc.binary_join_element_wise(days, times, " "), fraction, zone, "")


def _two_digits(part: pa.Array) -> pa.Array:
    return pc.utf8_lpad(part, 2, "0")


def _year(part: Mapping[str, pa.Array]) -> pa.Array:
    if "Y" in part:
        return part["Y"]
    century = pc.if_else(pc.less(part["y"].cast(pa.int32()), _PIVOT), "20", "19")
    return pc.binary_join_element_wise(century, part["y"], "")


def _month(part: Mapping[str, pa.Array]) -> pa.Array:
    if "m" in part:
        return _two_digits(part["m"])
    name = "b" if "b" in part else "B"
    names = pa.array(DATE_DIRECTIVES[name].split("|"))
    return _two_digits(pc.add(pc.index_in(pc.utf8_lower(part[name]), names), 1).cast(pa.string()))


def _hour(part: Mapping[str, pa.Array]) -> pa.Array:
    if "H" in part:
        return _two_digits(part["H"])
    hours = part["I"].cast(pa.int32())
    hours = pc.if_else(pc.equal(hours, 12), 0, hours)
    return _two_digits(pc.add(hours, pc.if_else(pc.equal(pc.utf8_lower(part["p"]), "pm"), 12, 0)).cast(pa.string()))


_format_of = cache(DateFormat)


def formats_of(reading: Reading, column: str) -> list[DateFormat]:
    """The formats of a column of the table; none if it has none."""
    return [_format_of(text) for text in reading.date_formats(column)]


def type_by_formats(formats: Sequence[DateFormat]) -> pa.DataType:
    """The type of a column with these formats: a date, or with times a timestamp, in UTC if every format has a zone."""
    if not any(one.has_time for one in formats):
        return pa.date32()
    return pa.timestamp("us", "UTC" if all("z" in one.directives for one in formats) else None)


def is_dated(type_: pa.DataType) -> bool:
    """Whether formats apply to a column of this type."""
    return bool(pa.types.is_date(type_) or pa.types.is_timestamp(type_))


@dataclass(frozen=True)
class _Dates:
    """The values of a column; which of them no format reads; and what those mean that several formats read differently."""

    values: pa.Array
    unfit: Mask
    ambiguous: dict[int, str]


@dataclass(frozen=True)
class DatedBlock(RenamedBlock):
    """A block whose dates are written in formats. Rows that go to quarantine keep the text of the file.

    Attributes:
        formats: those of each column, by its lower-case name.
    """

    formats: Mapping[str, Sequence[DateFormat]]

    def convert(self, name: str, type_: pa.DataType) -> Converted:
        texts = self._texts(name) if is_dated(type_) else None
        if texts is None:
            return self.block.convert(name, type_)
        dates = self._read(name, texts[0], type_)
        return dates.values, dates.unfit | texts[1]

    def ambiguous(self, name: str, type_: pa.DataType) -> Mapping[int, str]:
        texts = self._texts(name) if is_dated(type_) and len(self.formats.get(name.lower(), ())) > 1 else None
        return {} if texts is None else self._read(name, texts[0], type_).ambiguous

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        if self._texts(name) is not None:
            return type_by_formats(self.formats[name.lower()])
        return self.block.type_of(name, rows, typed=typed)

    def _texts(self, name: str) -> Converted | None:
        """The text of a column that has formats."""
        return self.block.texts(name) if name.lower() in self.formats else None

    def _read(self, name: str, text: pa.Array, type_: pa.DataType) -> _Dates:
        encoded = text.dictionary_encode()  # most columns have few different dates
        words = encoded.dictionary
        formats = self.formats[name.lower()]
        readings = [convert(one.to_iso(words), type_)[0] for one in formats]
        values, differs = readings[0], np.zeros(len(words), bool)
        for more in readings[1:]:
            differs |= as_mask(pc.not_equal(values, more))  # a null, which is not a reading, differs from nothing
            values = pc.coalesce(values, more)
        values = pc.if_else(pa.array(differs), None, values)
        meanings = {
            i: " and ".join(
                f"{dates[i]} by {one.text}" for one, dates in zip(formats, readings, strict=True) if dates[i].is_valid
            )
            for i in np.flatnonzero(differs).tolist()
        }
        taken = values.take(encoded.indices)
        ambiguous = {}
        if meanings:
            indices = encoded.indices.to_numpy(zero_copy_only=False)
            rows = np.flatnonzero(np.isin(indices, list(meanings))).tolist()
            ambiguous = {row: f"{words[int(indices[row])].as_py()!r} is {meanings[int(indices[row])]}" for row in rows}
        return _Dates(taken, as_mask(text.is_valid()) & as_mask(taken.is_null()), ambiguous)


def dated(block: Block, reading: Reading) -> Block:
    """The block with the formats of `dates`; names are the table's."""
    formats = {name.lower(): formats_of(reading, name) for name in reading.dates}
    if not any(name.lower() in formats for name in block.names):
        return block
    return DatedBlock(block, {name: name for name in block.names}, formats)
