"""A table's settings from the properties file of chombo's RecordSetBulkMutator, on Hadoop or on Spark.

Reads     the file, and the first rows of sample files of the feed, for the number of columns
Writes    nothing
Repeat    safe: the same files give the same settings

    properties -> options by either spelling -> columns of the feed -> settings · what has no counterpart

`javaproperties` reads the file as Java does: escapes, continuation lines, ISO 8859-1.
"""

import difflib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import javaproperties
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init.chombo_feed import SEQUENCE, Feed, look_at_feed
from lakeupsert.operations.init.propose import landing_files, processed_zone, table_name_of
from lakeupsert.operations.init.translation import Leftover, Setting, SourceFile, Translation

OPTION = "--from-chombo"
KEY, ORDER, NUMERIC = "id.field.ordinals", "temporal.ordering.field.ordinal", "temporal.ordering.field.numeric"
OPERATION, DELETED, PREFIX = "op.code.field.ordinal", "deleted.op.code", "deleted.record.file.prefix"
DELIMITER, SYNC, MUTATION = "field.delim.regex", "sync.mode", "mutation.op"
FEED, VERSIONS = "incr.filePath", "maintain.version"

_OF_SPARK = {"id.fieldOrdinals": KEY, "seq.fieldOrdinal": ORDER, "field.delim.in": DELIMITER} | {
    name: name for name in (SYNC, MUTATION, FEED, VERSIONS)
}
"""Options that only the job on Spark has, and the names by which they are known here."""
_OPTIONS = {name: name for name in (KEY, ORDER, NUMERIC, OPERATION, DELETED, PREFIX, DELIMITER)} | _OF_SPARK
_PREFIX = re.compile(r"^(rsbm|recordSetBulkMutator)\.")
"""Before the options of this job, on Hadoop and on Spark. The article about chombo leaves them out."""
_NO_COUNTERPART = {
    "field.delim": "the table is Parquet; `lakeupsert export` writes CSV",
    "field.delim.out": "the table is Parquet; `lakeupsert export` writes CSV",
    "versioned.filePath": "superseded versions stay in the table: `lakeupsert export --history`",
    "num.reducer": "`lakeupsert run --workers` says how many processes merge",
    "debug.on": "`--verbose` shows what a command does",
    "save.output": "`lakeupsert plan` shows a night without running it",
}


def translate_properties(path: str, landing: str | None, table: str | None) -> Translation:
    """The settings of the table that chombo keeps by the properties file ``path``.

    Args:
        landing: the folder of the feed; None: that of `incr.filePath`.
        table: the table's name; None: that of the folder.

    Raises:
        ConfigurationError: the file can't be read, contradicts itself or the feed, or says something that lakeupsert can't do.
        RefusedError: no file of the feed can be read.
    """
    source = SourceFile(path, OPTION)
    properties = _Properties(source, landing)
    store, root = source.open_landing(properties.landing, properties.landing_line)
    key = properties.key()
    order = properties.order(taken=key.ordinals)
    delete = properties.delete(taken=[*key.ordinals, *order.ordinals])
    reading = properties.reading()
    as_read = convert({setting.name.removeprefix("read."): setting.value for setting in reading}, Reading)
    history = properties.flag(VERSIONS)
    feed = look_at_feed(store, landing_files(store, root)[0], as_read, has_order_in_name=not order.ordinals)
    for part in (key, order, delete):
        _check_feed(source, feed, part)
    settings = [
        Setting("landing", root, properties.landing_origin),
        Setting("processed", processed_zone(properties.landing, root), "new: the master's files land as a batch"),
        Setting("partition_by", (), "chombo's master has no partitions"),
        *key.settings,
        *order.settings,
        *([Setting("history", history.is_true, history.origin)] if history else []),
        *reading,
        Setting("read.columns", tuple(map(_column, range(feed.width))), feed.origin),
        *(Setting(f"schema.{name}", type_, order.origin) for name, type_ in order.types.items()),
        *delete.settings,
    ]
    full = properties.is_full_extract()
    night = (
        "`lakeupsert run --full table`, because a key that a full extract lacks is deleted"
        if full
        else "`lakeupsert run`"
    )
    return Translation(
        table=table or table_name_of(root),
        settings=tuple(settings),
        leftovers=tuple(properties.leftovers()),
        warnings=(*properties.warnings, *feed.warnings),
        next=f"give the columns their names, put the files of chombo's master into landing, then {night}",
    )


def _column(ordinal: int) -> str:
    return f"field_{ordinal}"


# -- the file


@dataclass(frozen=True)
class _Property:
    """A property as it is written. ``bare``: its name without the job's prefix."""

    name: str
    value: str
    line: int
    bare: str

    @property
    def option(self) -> str | None:
        """What it is known by here; None if it is none of this job's options."""
        return _OPTIONS.get(self.bare)

    @property
    def origin(self) -> str:
        return f"{self.name} = {self.value} (line {self.line})"

    @property
    def is_true(self) -> bool:
        return self.value.strip().lower() == "true"


@dataclass(frozen=True)
class _Part:
    """Settings of one kind.

    Attributes:
        properties: where they come from.
        ordinals: the fields of the feed that they need.
        types: the types that they give to columns.
    """

    settings: tuple[Setting, ...]
    properties: tuple[_Property, ...] = ()
    ordinals: tuple[int, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return "; ".join(p.origin for p in self.properties)


def _parse(source: SourceFile) -> Iterator[_Property]:
    content, line = source.read(), 1
    try:
        for element in javaproperties.parse(io.BytesIO(content)):
            if isinstance(element, javaproperties.KeyValue):
                if element.value.endswith("{") or element.key.endswith(("{", "}")):
                    raise source.error(
                        "unreadable-source",
                        line,
                        "this is a block of Typesafe's format HOCON, and not a Java property.",
                        change="write the block's settings as properties, for example `recordSetBulkMutator.sync.mode=partial`,",
                    )
                yield _Property(element.key, element.value, line, _PREFIX.sub("", element.key))
            line += len(re.findall(r"\r\n|\r|\n", element.source))
    except javaproperties.InvalidUEscapeError as e:
        raise source.error("unreadable-source", line, f"Java reads no such escape as {e.escape}.") from e


class _Properties:
    """The properties of one file, and the settings that each group of them stands for."""

    def __init__(self, source: SourceFile, landing: str | None) -> None:
        """``landing`` as in `translate_properties`."""
        self.source = source
        self.all = list(_parse(source))
        self.by_option: dict[str, _Property] = {}
        self.warnings: list[str] = []
        self._idle: dict[_Property, str] = {}
        for one in self.all:
            if one.option is None:
                continue
            first = self.by_option.setdefault(one.option, one)
            if first.value != one.value:
                raise self._contradicts(one, f"line {first.line} says {first.name} = {first.value}")
            if first is not one:
                self._idle[one] = f"it repeats line {first.line}"
        self.is_spark = any(one.bare in _OF_SPARK for one in self.all)
        self.landing, self.landing_origin = self._landing(landing)
        self.landing_line = None if landing is not None else self.by_option[FEED].line

    def leftovers(self) -> Iterator[Leftover]:
        """All properties that stand for no setting, in the file's order."""
        for one in self.all:
            reason = self._idle.get(one) or (None if one.option else _why_left(one))
            if reason:
                yield Leftover(one.name, one.value, one.line, reason)

    def key(self) -> _Part:
        found = self.by_option.get(KEY)
        ordinals = self._ordinals(found) if found else ()
        if not found or not ordinals:
            raise self.source.error(
                "no-key",
                found.line if found else None,
                f"there is no ordinal in rsbm.{KEY}, so no column identifies a record.",
                change=f"write for example `rsbm.{KEY}=0`",
            )
        if len(set(ordinals)) < len(ordinals):
            raise self._bad(found, "expected each ordinal once")
        return _Part((Setting("key", tuple(map(_column, ordinals)), found.origin),), (found,), ordinals)

    def order(self, taken: tuple[int, ...]) -> _Part:
        """``taken``: the ordinals of the key: each version would be a key of its own."""
        found, numeric = self.by_option.get(ORDER), self.flag(NUMERIC)
        ordinal = self._ordinal(found)
        if found and ordinal is not None:
            if ordinal in taken:
                raise self._contradicts(found, "the same field is part of the key")
            type_ = "string" if numeric and not numeric.is_true else "bigint"
            name = _column(ordinal)
            given = (found, numeric) if numeric else (found,)
            return _Part((Setting("order_by", (name,), found.origin),), given, (ordinal,), {name: type_})
        if self.is_spark:
            raise self.source.error(
                "no-order",
                found.line if found else None,
                "there is no seq.fieldOrdinal, which the job on Spark needs to find the newest record.",
                change="write it",
            )
        if found:
            self._idle[found] = "it is negative, so the order is in file names"
        if numeric:
            self._idle[numeric] = "the order is a number in file names"
        name = "file_sequence"
        origin = f"no {ORDER}: the order is the number behind the last _ of a file's name"
        settings = (Setting("order_by", (name,), origin), Setting("order_in_name", SEQUENCE, "as in chombo"))
        return _Part(settings, types={name: "bigint"})

    def delete(self, taken: list[int]) -> _Part:
        """``taken``: the ordinals of the key and the order, which can't be the operation as well."""
        operation, code, prefix = (self.by_option.get(name) for name in (OPERATION, DELETED, PREFIX))
        ordinal = self._ordinal(operation)
        self._check_mutation(self.by_option.get(MUTATION))
        if operation and ordinal is not None:
            if ordinal in taken:
                raise self._contradicts(operation, "the same field is part of the key or the order")
            if code and not code.value:
                raise self._bad(code, "expected the text of an operation")
            if prefix:
                self._idle[prefix] = f"chombo does not look at it if {OPERATION} is set"
            value = code.value if code else "D"
            settings = [Setting("delete.column", _column(ordinal), operation.origin)]
            settings.append(
                Setting("delete.values", (value,), code.origin if code else f"chombo's default of {DELETED}")
            )
            self.warnings.append(
                f"every record needs the operation in field {ordinal}: chombo's output does not have it, so add it to the "
                f"records of the master (any text but {value!r})"
            )
            return _Part(tuple(settings), (operation, code) if code else (operation,), (ordinal,))
        if operation:
            self._idle[operation] = "it is negative, which says that there is no such field"
        if code:
            self._idle[code] = f"chombo ignores it if {OPERATION} is not set"
        if prefix and prefix.value:
            return _Part((Setting("delete.file_prefix", prefix.value, prefix.origin),), (prefix,))
        if prefix and self.is_spark:
            self._idle[prefix] = "it is empty"
        if not self.is_spark:
            raise self.source.error(
                "no-delete-rule",
                prefix.line if prefix else None,
                f"neither rsbm.{OPERATION} nor rsbm.{PREFIX} says which records delete; chombo stops with an "
                "IllegalArgumentException.",
                change=f"write for example `rsbm.{PREFIX}=del`",
            )
        return _Part(())

    def _check_mutation(self, mutation: _Property | None) -> None:
        if mutation is None:
            return
        if mutation.value.strip() == "delete":
            raise self.source.error(
                "no-counterpart",
                mutation.line,
                f"{MUTATION} = delete makes every record of a run a delete. lakeupsert recognizes deletes by an operation or by "
                "names of files.",
                change=f"let the names of files of deletes begin with del, write `rsbm.{PREFIX}=del` instead of this line",
            )
        if mutation.value.strip() != "upsert":
            raise self._bad(mutation, "expected upsert or delete")
        if self.is_full_extract():
            raise self._contradicts(mutation, f"chombo then does not look at {self.by_option[SYNC].origin}")
        self._idle[mutation] = "every run inserts and updates"

    def is_full_extract(self) -> bool:
        sync = self.by_option.get(SYNC)
        if sync is None:
            return False
        if sync.value.strip() not in ("partial", "full"):
            raise self._bad(sync, "expected partial or full")
        is_full = sync.value.strip() == "full"
        self._idle[sync] = f"each run says so: `lakeupsert run{' --full table' if is_full else ''}`"
        return is_full

    def reading(self) -> tuple[Setting, ...]:
        """How the feed's lines become fields: chombo knows no quotes and no header."""
        found = self.by_option.get(DELIMITER)
        pattern = found.value if found else ","
        origin = found.origin if found else f"chombo's default of {DELIMITER}"
        sign = _sign(pattern)
        if sign is None and found and (flaw := _flaw(pattern)):
            raise self._bad(found, flaw)
        kind = Setting("format", "csv" if sign else "delimited", "whatever ending the files' names have")
        delimiter = Setting("read.delimiter", sign or pattern, origin)
        if not sign:
            return kind, delimiter
        quote = Setting("read.quote", "", "chombo knows no quotes")
        return kind, delimiter, quote, Setting("read.header", False, "chombo knows no header")

    def flag(self, option: str) -> _Property | None:
        """A property that is true or false; Hadoop takes its default for any other text, and says nothing."""
        found = self.by_option.get(option)
        if found and found.value.strip().lower() not in ("true", "false"):
            raise self._bad(found, "expected true or false")
        return found

    def _landing(self, given: str | None) -> tuple[str, str]:
        found = self.by_option.get(FEED)
        if given is not None:
            if found:
                self._idle[found] = f"{given}, which was given, takes its place"
            return given, "as it was given"
        if found is None:
            raise ConfigurationError(
                "no-landing",
                f"{self.source.path} does not say where the feed is: a job on Hadoop takes that as an argument. Nothing was "
                "written.",
                next=f"name the folder of the feed: {self.source.command_with_path}",
            )
        folder = re.sub(r"/\*?$", "", found.value.strip())
        if re.search(r"[*?\[{,]", folder):
            raise self._bad(found, f"expected one folder; name it with {self.source.command_with_path}")
        return folder, found.origin

    def _ordinals(self, found: _Property) -> tuple[int, ...]:
        parts = [part.strip() for part in found.value.strip().removeprefix("[").removesuffix("]").split(",")]
        if not all(re.fullmatch(r"\d{1,6}", part) for part in parts):
            raise self._bad(found, "expected the numbers of fields from 0, with commas between them")
        return tuple(map(int, parts))

    def _ordinal(self, found: _Property | None) -> int | None:
        """One field's number; None if there is none, which chombo also writes as a negative number."""
        if found is None:
            return None
        if not re.fullmatch(r"-?\d{1,6}", found.value.strip()):
            raise self._bad(found, "expected the number of one field, from 0")
        return None if int(found.value) < 0 else int(found.value)

    def _bad(self, found: _Property, expected: str) -> ConfigurationError:
        return self.source.error("bad-property", found.line, f"{found.name} is {found.value!r}; {expected}.")

    def _contradicts(self, found: _Property, why: str) -> ConfigurationError:
        return self.source.contradiction(found.line, found.name, found.value, why)


def _why_left(one: _Property) -> str:
    """Why a property that is none of `_OPTIONS` stands for no setting."""
    if one.bare in _NO_COUNTERPART:
        return _NO_COUNTERPART[one.bare]
    if re.match(r"(mapreduce|mapred|hadoop|yarn|dfs|fs|io)\.", one.name):
        return "a setting of Hadoop"
    close = difflib.get_close_matches(one.bare, [*_OPTIONS, *_NO_COUNTERPART], n=1, cutoff=0.85)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"not an option of chombo's RecordSetBulkMutator{hint}"


def _sign(pattern: str) -> str | None:
    """The one character that a regular expression of Java matches, if format csv can have it as its delimiter."""
    if pattern == r"\t":
        return "\t"
    found = re.fullmatch(r"[^.^$*+?{}\[\]\\|()]|\\(?P<escaped>[^A-Za-z0-9])|\[(?P<only>[^\^\\\]])\]", pattern)
    sign = (found["escaped"] or found["only"] or pattern) if found else ""
    return sign if len(sign) == 1 and sign.isascii() and sign not in "\r\n\0" else None


def _flaw(pattern: str) -> str | None:
    """Why a pattern can't be the delimiter of format delimited; None if it can."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        return f"lakeupsert reads it as a regular expression of Python, which it is not: {e}"
    if compiled.search(""):
        return "it matches empty text; write a character like | as \\\\|, which Java's properties files need for \\|"
    return "expected a pattern without groups: (?:…) instead of (…)" if compiled.groups else None


def _check_feed(source: SourceFile, feed: Feed, part: _Part) -> None:
    """Raises ConfigurationError if the feed does not have the fields of a part, or if its order is not of its type."""
    for ordinal in part.ordinals:
        found = part.properties[0]
        if ordinal >= feed.width:
            raise source.error(
                "ordinal-out-of-range",
                found.line,
                f"{found.name} names field {ordinal}, but records of the feed have only fields 0 to {feed.width - 1} "
                f"({feed.origin}).",
            )
        type_ = feed.types[ordinal]
        is_number = pa.types.is_integer(type_) or pa.types.is_null(type_)
        if part.types.get(_column(ordinal)) == "bigint" and not is_number:
            raise source.error(
                "contradictory-source",
                found.line,
                f"the order is a whole number, but field {ordinal} of the feed has values of type {type_} ({feed.origin}).",
                change=f"write `rsbm.{NUMERIC}=false` or another ordinal",
            )
