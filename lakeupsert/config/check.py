"""Checks of a table's settings that types can't express. No message quotes a credential, which no setting may contain."""

import codecs
import re
from urllib.parse import parse_qsl, urlsplit

from lakeupsert.config.addresses import is_remote
from lakeupsert.config.exclusions import check_rules
from lakeupsert.config.messages import Refusal
from lakeupsert.config.types import (
    DATE_DIRECTIVES,
    LEAST_BUCKET,
    LONGEST,
    TEXT_FORMATS,
    TIME_DIRECTIVES,
    DeleteSettings,
    GlueSettings,
    HiveSettings,
    IcebergSettings,
    Reading,
    TableSettings,
    duration,
    size_of,
)
from lakeupsert.errors import ConfigurationError

_SECRET = re.compile(r"(?i)^sig$|signature|key|secret|token|password")
"""Parameters of an address that are credentials."""
_CATALOG_SECRET = re.compile(
    r"(?i)^iceberg\..*(secret|token|password|credential|authorization|account-key|access-key|connection-string|session)"
)
"""Settings of a catalog that are credentials."""


def check_values(path: str, where: str, settings: TableSettings) -> None:
    """Check the settings of a table. Addresses come first, so that no credential gets into a later message."""
    _check_credentials(path, where, settings)
    refuse = Refusal(path, where)
    _check_sizes(settings, refuse)
    _check_retention(settings, refuse)
    _check_order_in_name(settings, refuse)
    check_rules(settings, refuse)
    _check_catalogs(settings, refuse)
    _check_names(settings, refuse)
    if settings.delete:
        _check_delete(settings.delete, refuse)
    _check_reading(settings, refuse)


def _check_names(settings: TableSettings, refuse: Refusal) -> None:
    for setting, columns in (("schema", settings.schema), ("read.dates", settings.read.dates)):
        names: dict[str, str] = {}
        for name in columns:
            if (other := names.setdefault(name.lower(), name)) != name:
                refuse(setting, [other, name], "names that differ only by case are one column")
    for setting in ("key", "order_by", "partition_by", "publishers"):
        named = getattr(settings, setting)
        if len(set(named)) < len(named):
            refuse(setting, list(named), f"a {'publisher' if setting == 'publishers' else 'column'} is named twice")


def _check_sizes(settings: TableSettings, refuse: Refusal) -> None:
    if settings.queue == "auto" and is_remote(settings.processed):
        refuse("queue", "auto", "`processed` is not on this machine, so the table must name its queue")
    if settings.bucket_bytes < LEAST_BUCKET:
        refuse("bucket", settings.bucket, f'expected a size of at least {LEAST_BUCKET} bytes, for example "256MiB"')
    if settings.large and not size_of(settings.large.bytes):
        refuse("large.bytes", settings.large.bytes, 'expected a size, for example "2GB"')
    if isinstance(settings.quarantine_limit, str) and not re.fullmatch(r"\d+(\.\d+)?%", settings.quarantine_limit):
        refuse("quarantine_limit", settings.quarantine_limit, 'expected a share, for example "1%", or a row count')


def _check_retention(settings: TableSettings, refuse: Refusal) -> None:
    for setting, example in (("superseded_retention", '"24h" or "0s"'), ("tombstone_retention", '"90d"')):
        text = getattr(settings, setting)
        if text is not None and not re.fullmatch(r"\d{1,9}(s|m|h|d)", text):
            refuse(setting, text, f"expected a duration, for example {example}")
        if text is not None and duration(text) > LONGEST:
            refuse(setting, text, f"expected {LONGEST.days}d at most")
    if not settings.retention and settings.keep_snapshots > 1:
        expected = 'with superseded_retention = "0s", older snapshots could not be read; expected 1'
        refuse("keep_snapshots", settings.keep_snapshots, expected)


def _check_order_in_name(settings: TableSettings, refuse: Refusal) -> None:
    if settings.order_in_name is None:
        return
    if (groups := _compiled("order_in_name", settings.order_in_name, refuse).groups) != 1:
        refuse("order_in_name", settings.order_in_name, f"it has {groups} groups; expected one, for the order")
    if len(settings.order_by) != 1:
        expected = "with `order_in_name`, expected one column, which the files do not have"
        refuse("order_by", list(settings.order_by), expected)


def _check_catalogs(settings: TableSettings, refuse: Refusal) -> None:
    for name in ("hive", "glue"):
        section: HiveSettings | GlueSettings | None = getattr(settings, name)
        for setting in ("database", "table") if section else ():
            if not re.fullmatch(r"[a-z0-9_-]+", getattr(section, setting)):
                expected = "expected lower-case letters, digits, - and _, to which catalogs change a name"
                refuse(f"{name}.{setting}", getattr(section, setting), expected)
    if settings.hive and not re.fullmatch(r"thrift://[^/:@?]+:\d{1,5}", settings.hive.uri):
        refuse("hive.uri", settings.hive.uri, 'expected "thrift://HOST:PORT"')
    if settings.iceberg:
        _check_iceberg(settings, settings.iceberg, refuse)


def _check_iceberg(settings: TableSettings, iceberg: IcebergSettings, refuse: Refusal) -> None:
    name, uri = iceberg.table, iceberg.properties.get("uri", "")
    if not all(name.split(".")) or "." not in name:
        refuse("iceberg.table", name, 'expected a namespace and a name, for example "sales.receipts"')
    if iceberg.format_version == 3:
        kind = iceberg.properties.get("type") or (uri or "http:").partition(":")[0]
        if kind not in ("rest", "http", "https"):
            expected = f"a catalog of type {kind!r} can't have it; expected 2, or a REST catalog"
            refuse("iceberg.format_version", 3, expected)
    kind = iceberg.properties.get("type", "hive" if uri.startswith("thrift:") else "")  # as pyiceberg does
    other = {"glue": settings.glue, "hive": settings.hive}.get(kind)
    if other is None or (isinstance(other, HiveSettings) and other.uri not in uri.split(",")):
        return
    if name.lower() == f"{other.database}.{other.table}":
        refuse("iceberg.table", name, f"the publisher {kind!r} keeps a table of that name there; expected another name")


def _check_delete(delete: DeleteSettings, refuse: Refusal) -> None:
    if not delete.not_null and not (delete.column and delete.values) and not delete.file_prefix:
        refuse("delete", {}, "expected `column` and `values`, or `file_prefix`, or all three; or `not_null`")
    if both := set(delete.values) & set(delete.upserts or ()):
        refuse("delete.upserts", list(delete.upserts or ()), f"{min(both)!r} is also in `delete.values`")


def _check_credentials(path: str, where: str, settings: TableSettings) -> None:
    addresses = {setting: getattr(settings, setting) for setting in ("landing", "processed", "queue")}
    if settings.large:
        addresses["large.queue"] = settings.large.queue
    come_from = "credentials come from the default chains of boto3 and DefaultAzureCredential"
    if settings.iceberg:
        addresses |= {f"iceberg.catalog.{key}": value for key, value in settings.iceberg.properties.items()}
        name = re.sub(r"[^A-Z0-9]", "_", settings.iceberg.catalog_name.upper())
        come_from += f", those of a catalog from pyiceberg's configuration, as PYICEBERG_CATALOG__{name}__TOKEN"
    if settings.hive:
        addresses["hive.uri"] = settings.hive.uri
    for setting, address in addresses.items():
        if _CATALOG_SECRET.search(setting) or ("://" in address and has_credential(address)):
            raise ConfigurationError(
                "credential-in-configuration",
                f"{path}: {where}: {setting} contains a credential, which no setting may.",
                next=f"remove it; {come_from}",
            )


def has_credential(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:  # it is no address, which other checks say
        return False
    return bool(parts.password) or any(_SECRET.search(key) for key, _ in parse_qsl(parts.query))


def _check_reading(settings: TableSettings, refuse: Refusal) -> None:
    reading = settings.reading
    if reading.format == "delimited":
        pattern = _compiled("read.delimiter", reading.delimiter, refuse)
        if pattern.groups or pattern.search(""):
            expected = "expected a pattern without groups that does not match empty text"
            refuse("read.delimiter", reading.delimiter, expected)
    elif not _is_sign(reading.delimiter):
        refuse("read.delimiter", reading.delimiter, 'expected one ASCII character; for others use format = "delimited"')
    if reading.quote and (not _is_sign(reading.quote) or reading.quote == reading.delimiter):
        refuse("read.quote", reading.quote, 'expected one ASCII character other than the delimiter, or "" for none')
    if reading.escape:
        _check_escape(reading, refuse)
    _check_separators(reading, refuse)
    _check_columns(reading, refuse)
    _check_dates(settings, refuse)
    if "" in reading.null_words:
        refuse("read.null", reading.null, "empty text is always null")
    try:
        codecs.getincrementaldecoder(reading.encoding)().decode(b"")
        "".encode(reading.encoding)
    except (LookupError, TypeError, ValueError):  # also UnicodeError; some codecs are not text encodings
        expected = 'expected a text encoding that Python supports, for example "latin-1"'
        refuse("read.encoding", reading.encoding, expected)


def _compiled(setting: str, pattern: str, refuse: Refusal) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as e:
        refuse(setting, pattern, f"not a regular expression: {e}")


def _check_columns(reading: Reading, refuse: Refusal) -> None:
    """The names of `columns`, `aliases` and `only`."""
    if reading.columns and reading.has_header:
        refuse("read.columns", list(reading.columns), "the header already names the columns; set header = false")
    for setting, named in (("columns", list(reading.columns)), ("only", reading.only)):
        if len({name.lower() for name in named}) < len(named) or not all(name.strip() for name in named):
            refuse(f"read.{setting}", named, "expected a different name for each column")
    if "" in (texts := {text for several in reading.own_texts.values() for text in several or ("",)}):
        refuse("read.only", reading.only, f"expected a value for each column; found {sorted(texts)}")
    aliases = {alias.lower() for alias in reading.aliases}
    for alias, column in reading.aliases.items():
        expected = None
        if not alias.strip() or not column.strip():
            expected = 'expected names, as in { price = "unit_price" }'
        elif column.lower() in aliases:
            expected = f"{column!r} is itself an alias; map each old name to the current name in the table"
        elif len(aliases) < len(reading.aliases):
            expected = "names that differ only by case are one column; name each alias once"
        if expected:
            refuse("read.aliases", {alias: column}, expected)


def _check_escape(reading: Reading, refuse: Refusal) -> None:
    escape = reading.escape
    others = {reading.delimiter, *(one.delimiter for one in reading.dialects), reading.quote_sign}
    if escape in TEXT_FORMATS:
        if "\\" in others:
            refuse("read.escape", escape, "a backslash escapes there, so it can't be the delimiter or the quote")
        if escape != "mysql" and reading.quote:
            refuse("read.quote", reading.quote, f"no character quotes in the text format of {escape}; leave it out")
        if "\\N" in reading.null_words:
            refuse("read.null", reading.null, f"with escape = {escape!r}, \\N is null anyway; leave it out")
    elif not _is_sign(escape) or escape in others:
        expected = "expected one ASCII character other than the delimiter and the quote, or the text format of"
        refuse("read.escape", escape, f"{expected} {', '.join(TEXT_FORMATS[:-1])} or {TEXT_FORMATS[-1]}")
    elif not reading.quote_sign:
        expected = f"it escapes quotes, but `quote` is empty; expected one of {', '.join(TEXT_FORMATS)}"
        refuse("read.escape", escape, expected)


def _check_separators(reading: Reading, refuse: Refusal) -> None:
    for one in reading.dialects:
        if not _is_sign(one.delimiter) or one.delimiter == reading.quote_sign:
            refuse("read.dialects", one.delimiter, "expected one ASCII character other than the quote as delimiter")
    delimiters = [reading.delimiter, *(one.delimiter for one in reading.dialects)]
    if len(set(delimiters)) < len(delimiters):
        refuse("read.dialects", delimiters, "each dialect needs its own delimiter")


def _check_dates(settings: TableSettings, refuse: Refusal) -> None:
    for column in settings.read.dates:
        formats = settings.reading.date_formats(column)
        if not formats or len(set(formats)) < len(formats):
            refuse(f"read.dates.{column}", list(formats), "expected one or more formats, each once")
        for text in formats:
            if expected := _flaw_of_date_format(text):
                refuse(f"read.dates.{column}", text, expected)
    for column, type_ in settings.schema.items():
        if settings.reading.date_formats(column) and not re.match(r"(?i)date|timestamp", type_):
            expected = f"[schema] says {type_}, so no value would be read as a date; leave out one of them"
            refuse("read.dates", column, expected)


def _flaw_of_date_format(text: str) -> str | None:
    """What is wrong with a format of `dates`, as what was expected; None if nothing is."""
    directives = re.findall(r"%(.?)", text)
    for one in directives:
        if one not in DATE_DIRECTIVES and one != "%":
            return f"%{one} is not supported; expected directives of strptime: %{' %'.join(DATE_DIRECTIVES)} %%"
    given = [{"y": "Y", "b": "m", "B": "m", "I": "H"}.get(one, one) for one in directives if one != "%"]
    if len(set(given)) < len(given):
        return "expected each part of a date once"
    if not {"Y", "m", "d"} <= set(given):
        return 'expected a year, a month and a day, as in "%d/%m/%Y"'
    if ("I" in directives) != ("p" in directives):
        return "expected %I and %p together (hours from 1 to 12)"
    if TIME_DIRECTIVES & set(given) and "H" not in given:
        return "expected the hour (%H, or %I and %p) with the other parts of a time"
    return None


def _is_sign(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in "\r\n\0"
