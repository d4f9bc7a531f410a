"""Choose how landing files are read, from a sample: separators, header, decimal comma, null words, and formats of dates.

Reads     the beginnings of sample files (`sample`)
Writes    temporary copies of the beginnings of CSV files, for DuckDB's sniffer
Repeat    safe: the same files give the same choices

    sniff each CSV file -> read the sample -> envelope, decimal commas, null words, formats of dates -> read it again, by these
"""

import csv
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyarrow.types import is_boolean, is_floating, is_integer, is_string

from lakeupsert.config import POSITIONED, DialectSettings, Reading
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.csvfile import Csv, choose_dialect
from lakeupsert.landing.formats.envelopes import TABLE_NAMES
from lakeupsert.landing.formats.escapes import LETTERS
from lakeupsert.landing.formats.inference import FROM_TEXT, THOUSANDS, fits, with_points
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.landing.glimpse import read_head
from lakeupsert.operations.init.dates import MOST, choose_formats, formats_that_fit
from lakeupsert.operations.init.sample import Sample, choose_files, read_sample
from lakeupsert.operations.init.words import Choice, is_named, name_list, words_of
from lakeupsert.phrases import count
from lakeupsert.rows.arrays import Column, Mask
from lakeupsert.rows.convert import as_mask, convert
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectReader
from lakeupsert.table.misnamed import describe_separator, find_envelope, find_typo
from lakeupsert.table.types import is_number

_HEAD_BYTES = 1 << 16
"""Of each CSV file, for the sniffer."""
_DELIMITERS = ",;\t|"
_NULL_WORDS = pa.array(
    ["NA", "N/A", "#N/A", "NaN", "nan", "NULL", "Null", "null", "None", "none", "-", "--", "\\N", "?"]
)
_POINTED, _COMMA, _INTEGER = r"^[+-]?\d*\.\d+$", rf"^(?:[+-]?\d*,\d+|{THOUSANDS})$", r"^[+-]?\d+$"


@dataclass(frozen=True)
class _Sniffed:
    delimiter: str
    quote: str
    has_header: bool
    escape: str = ""


class ReadingChoices:
    """How the files of a sample are read. One setting is chosen after another; each choice uses those before it.

    Attributes:
        settings: those of ``[tables.NAME.read]`` that are not the default, and why.
        failures: why some of the files can't be read.
    """

    def __init__(self, store: ObjectReader, files: Sequence[ObjectInfo], folders: Sequence[str]) -> None:
        self._store, self._files, self._folders = store, files, tuple(folders)
        self._read_by: Reading | None = None
        self.settings: dict[str, Choice] = {}
        self.warnings: list[str] = []
        self._sniffed = {}
        for file in files:
            if format_of(file.name, "auto").delimited and (found := _sniff_file(store, file)):
                self._sniffed[file.name] = found

    @property
    def rows(self) -> Sample:
        """The rows as they are read by the choices so far."""
        reading = self.reading
        if reading != self._read_by:
            self._rows, self.failures = read_sample(self._store, self._files, reading)
            self._read_by = reading
        return self._rows

    @property
    def reading(self) -> Reading:
        values = {name: choice.value for name, choice in self.settings.items()}
        dialects = tuple(DialectSettings(**one) for one in values.pop("dialects", ()))
        null = values.pop("null", None)
        words = tuple(null) if isinstance(null, list) else null
        envelope = values.get("envelope")
        positions, types = envelope in POSITIONED, envelope == "debezium"
        return Reading(**values, positions=positions, types=types, dialects=dialects, null=words, folders=self._folders)

    def describe_empty(self) -> str | None:
        """The lines of the first file that has some and gives no row."""
        for file in self._files:
            lines = _head_of(self._store, file).splitlines() if format_of(file.name, "auto").delimited else []
            if len(lines) > 1:
                fields = count(choose_dialect(self.reading, lines[0])[0].fields_in(lines[0]), "field")
                hint = describe_separator([lines[0].decode(errors="replace")])
                return f"{file.name!r}: {len(lines) - 1:,} lines, none with {fields} like the first one.{hint}"
        return None

    def add_dialects(self) -> None:
        """Delimiters, the quote, and whether there is a header."""
        found = self._sniffed
        delimiters = Counter(one.delimiter for one in found.values())
        usual = max(delimiters, key=lambda one: (delimiters[one], one == ","), default=",")
        if usual != ",":
            self.settings["delimiter"] = Choice(usual, (self._evidence("delimiter", usual),))
        if others := sorted(one for one in delimiters if one != usual):
            evidence = tuple(self._evidence("delimiter", one) for one in others)
            self.settings["dialects"] = Choice([{"delimiter": one} for one in others], evidence)
        for what, usual_signs in (("quote", ("", '"')), ("escape", ("",))):
            signs = Counter(sign for one in found.values() if (sign := getattr(one, what)) not in usual_signs)
            if signs:
                sign = max(signs, key=signs.__getitem__)
                self.settings[what] = Choice(sign, (self._evidence(what, sign),))
        bare = [name for name, one in found.items() if not one.has_header]
        if bare and len(bare) == len(found):
            why = "the first records hold numbers or dates, which are not column names: name the columns with `columns`"
            self.settings["header"] = Choice(False, (why,))
            self.warnings.append(f"header is false: {why}")
        elif bare:
            self.warnings.append(
                f"{count(len(bare), 'CSV file')} of {len(found)} may have no header (the first is {bare[0]!r}): check it"
            )

    def _evidence(self, what: str, value: str) -> str:
        names = [name for name, one in self._sniffed.items() if getattr(one, what) == value]
        return f"{what} {value!r} in {len(names)} of {count(len(self._sniffed), 'sampled CSV file')}: {name_list(names, 2)}"

    def add_only(self, rows: Sample) -> None:
        """The table with the most rows, if messages of several tables come together."""
        name = next((name for name in TABLE_NAMES if name in rows.values), None)
        counts = (
            {} if name is None else {c["values"]: c["counts"] for c in pc.value_counts(rows.values[name]).to_pylist()}
        )
        if name is None or len(counts) < 2:
            return
        table = max((table for table in counts if table is not None), key=lambda table: counts[table])
        shares = ", ".join(f"{one} {number:,}" for one, number in counts.items())
        why = f"the sampled rows are of {len(counts)} tables, by {name}: {shares}"
        self.settings["only"] = Choice({name: table}, (why,))
        self.warnings.append(
            f"{why}. This proposal is for {table}: configure a table for each, with its own `only` and `processed`"
        )

    def add_decimal_commas(self, rows: Sample) -> None:
        files = {path: one.delimiter for path, one in self._sniffed.items()}
        of_row = np.array([files.get(path, "") for path in rows.paths])[rows.file]
        for delimiter in sorted(set(of_row) - {""}):
            with_comma, with_point = _numbers_by_separator(rows, of_row == delimiter)
            if delimiter == ",":  # a quoted "1,234" may have thousands
                with_comma = [name for name in with_comma if _has_thousands(rows.values[name])]
            names = name_list(with_comma, 3)
            comma = f"numbers in {names} have a decimal comma where the delimiter is {str(delimiter)!r}"
            if with_comma and with_point:
                self.warnings.append(
                    f"{comma}, but those in {name_list(with_point, 3)} have a point: they will be refused or text"
                )
            elif with_comma and delimiter == self.reading.delimiter:
                self.settings["decimal_separator"] = Choice(",", (comma,))
            elif with_comma and (old := self.settings.get("dialects")):
                own = [{**one, "decimal_separator": ","} if one["delimiter"] == delimiter else one for one in old.value]
                self.settings["dialects"] = Choice(own, (*old.evidence, comma))

    def add_null_words(self, rows: Sample) -> None:
        """Words like NA between values that are otherwise numbers or dates."""
        is_csv = np.array([format_of(path, "auto").delimited for path in rows.paths])[rows.file]
        found: dict[str, list[str]] = {}
        texts = {
            name: values.filter(pa.array(is_csv)) for name, values in rows.values.items() if is_string(values.type)
        }
        for name, values in texts.items():
            text = values.drop_null().unique()
            is_word = as_mask(pc.is_in(text, _NULL_WORDS))
            others = text.filter(pa.array(~is_word))
            if is_word.any() and len(others) and _is_typed(others):
                found[name] = sorted(text.filter(pa.array(is_word)).to_pylist())
        if not found:
            return
        words = sorted({word for of_column in found.values() for word in of_column})
        why = [
            f"{' and '.join(map(repr, of_column))} in {name}, whose other values are of one type"
            for name, of_column in found.items()
        ]
        also = [name for name, v in texts.items() if name not in found and as_mask(pc.is_in(v, pa.array(words))).any()]
        if also:
            self.warnings.append(
                f"null is {' and '.join(map(repr, words))}, which becomes null in {name_list(also)}, too: remove `null` if it is "
                "a value there"
            )
        self.settings["null"] = Choice(words if len(words) > 1 else words[0], tuple(why))

    def add_aliases(self, rows: Sample) -> None:
        """A column that some files have in place of one of a similar name, if the files are alike otherwise."""
        files = [columns for columns in rows.columns_of if columns]
        some = [name for name in rows.values if not all(name in file for file in files)]
        pairs = [pair for pair in combinations(some, 2) if _replaces(*pair, rows)]
        aliases = {}
        for pair in pairs:
            if sum(not {*pair}.isdisjoint(other) for other in pairs) > 1:
                continue  # nobody knows which of them it replaces
            name, alias = sorted(pair, key=lambda n: (-sum(n in file for file in files), [n not in f for f in files]))
            aliases[alias] = name
        for alias, name in aliases.items():
            have = sum(alias in file for file in files)
            verb = "has" if have == 1 else "have"
            why = f"{have} of {count(len(files), 'sampled file')} {verb} {alias} in place of {name}"
            self.warnings.append(f"{why}, so it is read as {name}: check `aliases`")
            old = self.settings.get("aliases", Choice({}, ()))
            self.settings["aliases"] = Choice({**old.value, alias: name}, (*old.evidence, why))

    def add_dates(self, rows: Sample) -> None:
        null = pa.array(self.reading.null_words, pa.string())
        dates: dict[str, object] = {}
        evidence: list[str] = []
        for name, values in rows.values.items():
            if not is_string(values.type) and not (is_integer(values.type) and is_named(name, "day")):
                continue
            types = zip(rows.paths, (file.get(name, pa.null()) for file in rows.columns_of), strict=True)
            # A column that a typed file has as dates needs no format.
            written = np.array([not format_of(p, "auto").typed or is_string(t) or is_integer(t) for p, t in types])
            words = convert(values.filter(pa.array(written[rows.file])), pa.string())[0].drop_null()
            chosen = choose_formats(name, words.filter(pc.invert(pc.is_in(words, null))))
            if chosen is not None:
                dates[name] = chosen.value[0] if len(chosen.value) == 1 else chosen.value
                evidence += chosen.evidence
                self.warnings += chosen.warnings
        if dates:
            self.settings["dates"] = Choice(dates, tuple(evidence))


def choose_reading(
    store: ObjectReader, files: Sequence[ObjectInfo], folders: Sequence[str], *, with_dates: bool
) -> ReadingChoices:
    """Choose how ``files`` are read, some of which are the sample; formats of dates only ``with_dates``.

    ``folders``: the columns that their folders give.
    """
    choices = ReadingChoices(store, choose_files(files), folders)
    choices.add_dialects()
    names = list(choices.rows.values)
    if envelope := find_envelope(names):
        why = f"each row is in an envelope of {envelope}: {name_list(names)}"
        choices.settings["envelope"] = Choice(envelope, (why,))
        if not choices.rows.count:  # the names of the columns are like those of an envelope by chance
            del choices.settings["envelope"]
        choices.add_only(choices.rows)
    if (rows := choices.rows).count:
        choices.add_decimal_commas(rows)
        choices.add_null_words(rows)
        if with_dates:
            choices.add_dates(rows)
    if with_dates and choices.rows.count:  # now columns have their types
        choices.add_aliases(choices.rows)
    return choices


def _usual_type(rows: Sample, name: str) -> pa.DataType:
    """The type of a column, a few slips aside."""
    dominant = rows.dominant_types.get(name)
    return dominant.type if dominant is not None and dominant.is_clear else rows.values[name].type


def _replaces(one: str, other: str, rows: Sample) -> bool:
    """Whether each file has one of two columns, which have similar names and types, and most other columns in common."""
    files = [columns for columns in rows.columns_of if columns]
    if not all((one in file) != (other in file) for file in files):
        return False
    types = {_usual_type(rows, name) for name in (one, other)}
    if not (len(types) == 1 or all(map(is_number, types))):
        return False
    first, second = (next(file for file in files if name in file) for name in (one, other))
    words = words_of(one), words_of(other)
    similar = words[0] < words[1] or words[1] < words[0] or find_typo(one, [other]) is not None
    return similar and 2 * len(first.keys() & second.keys()) >= max(len(first), len(second))


def _sniff_file(store: ObjectReader, file: ObjectInfo) -> _Sniffed | None:
    """The dialect of a CSV file, also if it names its delimiter itself (`sep=;`); None if it is not known."""
    head = _head_of(store, file)
    dialect, used = choose_dialect(Reading(), head)
    if used:
        return _Sniffed(dialect.reading.delimiter, "", True)
    return _sniff(head) if head.strip() else None


def _head_of(store: ObjectReader, file: ObjectInfo) -> bytes:
    try:
        return read_head(store, LandingInput(file.name, file.size, file.etag, place=0), _HEAD_BYTES)
    except (UnreadableFileError, NotFoundError):
        return b""  # `read_sample` says why


def _sniff(head: bytes) -> _Sniffed | None:
    """By DuckDB's sniffer, or if it is not installed or finds nothing, by Python's, which finds most delimiters."""
    delimiter, quote, has_header = "", "", True
    with suppress(ModuleNotFoundError):
        import duckdb

        # To make a database takes DuckDB longer than to sniff a file, so all files share its default one.
        with tempfile.NamedTemporaryFile(suffix=".csv") as copy, duckdb.cursor() as db:
            copy.write(head)
            copy.flush()
            query = "SELECT Delimiter, Quote, HasHeader FROM sniff_csv(?, ignore_errors = true, null_padding = true)"
            try:
                delimiter, quote, has_header = db.execute(query, [copy.name]).fetchall()[0]
            except duckdb.Error:
                has_header = False
    if len(delimiter) != 1 or delimiter not in _DELIMITERS:
        try:
            delimiter = csv.Sniffer().sniff(head.decode(errors="replace"), _DELIMITERS).delimiter
        except csv.Error:
            return None
    quote = quote if len(quote) == 1 and quote in "\"'" else ""
    escape = _find_escape(head[: head.rfind(b"\n") + 1], Reading(delimiter=delimiter, quote=quote or None))
    # DuckDB takes a record of text before other text for data.
    return _Sniffed(delimiter, quote, has_header or not _is_data(head, delimiter), escape)


def _find_escape(records: bytes, reading: Reading) -> str:
    """Which `escape` whole records need; empty if none. A single backslash, as in C:\\new, is no evidence of a text format."""
    if b"\\" not in records:
        return ""
    if _flaws(records, escaped := replace(reading, escape="\\")) < _flaws(records, reading):
        return escaped.escape
    signs = {*re.findall(rb"\\(.)", records, re.DOTALL)} - {reading.delimiter.encode()}
    fields = re.split(rb"[\r\n]|" + re.escape(reading.delimiter.encode()), records)
    if signs <= {b"N"} or not (b"\\" in signs or b"\\N" in fields):
        return ""
    for name in ("postgresql", "mysql"):
        letters = LETTERS[name].keys() if name == "postgresql" else {b"0", b"Z", b"\n", b"\r", b"\t", b'"'}
        if signs <= {b"N", b"\\", *letters}:
            return name
    return ""


def _flaws(records: bytes, reading: Reading) -> int:
    """How many of some records are malformed by their quotes."""
    dialect = Csv(reading)
    ends, _ = dialect.ends(records, final=True)
    return len(dialect.flaws(records, np.concatenate([[0], ends[:-1]]), ends)) if len(ends) else 0


def _is_data(head: bytes, delimiter: str) -> bool:
    """Whether the first record has a number or a date, which are no names of columns."""
    line = next((line for line in head.decode(errors="replace").splitlines() if line.strip()), "")
    fields = pa.array([one.strip(" \"'") for one in line.split(delimiter)], pa.string())
    return any(bool(fits(fields, type_).any()) for type_ in FROM_TEXT if not is_boolean(type_))


def _numbers_by_separator(rows: Sample, use: Mask) -> tuple[list[str], list[str]]:
    """The columns whose numbers have a decimal comma in some rows, and those whose numbers have a point there."""
    with_comma: list[str] = []
    with_point: list[str] = []
    for name, values in rows.values.items():
        if not is_string(values.type) and not is_floating(values.type):
            continue
        text = convert(values.filter(pa.array(use)), pa.string())[0].drop_null()
        whole = as_mask(pc.match_substring_regex(text, _INTEGER))
        for columns, pattern in ((with_comma, _COMMA), (with_point, _POINTED)):
            found = as_mask(pc.match_substring_regex(text, pattern))
            if found.any() and (found | whole).mean() >= MOST:
                columns.append(name)
    return with_comma, with_point


def _has_thousands(values: Column) -> bool:
    """Whether a number is written like 1.234,50, where the comma can only separate decimals."""
    return is_string(values.type) and bool(pc.any(pc.match_substring_regex(values, f"^{THOUSANDS}$")).as_py())


def _is_typed(words: Column) -> bool:
    """Whether most words are values of one type that is not text."""
    most = max(float(fits(text, type_).mean()) for type_ in FROM_TEXT for text in (words, with_points(words)))
    return most >= MOST or bool(formats_that_fit(words))
