"""`lakeupsert.toml`, parsed once into frozen types. Flag > environment > profile > file > default.

Unknown keys are refused with a suggestion, because a typo must not become a default. Credentials are never read here.
"""

import codecs
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, NoReturn, get_args, get_type_hints
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError
from lakeupsert.variables import expand, references, without_references

FILE_NAME = "lakeupsert.toml"
ENVIRONMENT_PREFIX = "LAKEUPSERT__TABLES__"
PROFILE_VARIABLE = "LAKEUPSERT_PROFILE"

_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "text in quotes",
}
"""What people call msgspec's types of values."""
_TYPES_OF = {"array": list, "bool": bool, "float": float, "int": int, "object": dict, "str": str}
_SECRET = re.compile(r"(?i)(^|&)(sig|[^=&]*(key|secret|token|password)[^=&]*)=")

_CATALOG_SECRET = re.compile(
    r"(?i)^iceberg\..*(secret|token|password|credential|authorization|account-key|access-key|connection-string|session)"
)
"""Settings of a catalog that are credentials."""

Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
VectorPlace = Literal["file", "inline"]
DeltaTimestamps = Literal["naive", "utc"]
FormatVersion = Literal[2, 3]
PublisherName = Literal["delta", "iceberg", "hive", "glue"]
Format = Literal["auto", "parquet", "csv", "delimited", "jsonl", "avro", "orc"]


EnvelopeName = Literal["debezium", "dms", "wal2json", "singer", "airbyte"]
POSITIONED = ("debezium", "wal2json")
"""The envelopes with events of which some have a place in the database's log."""
DecimalSeparator = Literal[".", ","]
TEXT_FORMATS = ("postgresql", "mysql", "hive")
"""The values of `read.escape` that are no character: whose text format the files have."""


class DialectSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of ``[tables.NAME.read] dialects``: how other CSV files separate fields and write numbers."""

    delimiter: str
    decimal_separator: DecimalSeparator = "."


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``[tables.NAME.read]``: how the bytes of landing files become rows."""

    delimiter: str = ","
    """For CSV one ASCII character, for delimited text a regular expression."""
    quote: str | None = None
    """For CSV. Empty: no character quotes. Default: double quotes; none in a text format that `escape` names."""
    escape: str = ""
    """For CSV. A character before quotes and before itself within quotes, as Spark writes it; or ``postgresql`` (COPY),
    ``mysql`` (LOAD DATA, OUTFILE) or ``hive``: the escapes of their text formats, by a backslash. There ``\\N`` is null."""
    header: bool | None = None
    """Whether the first record names the columns. Default: yes for CSV, no for delimited text."""
    columns: tuple[str, ...] = ()
    """Column names if there is no header. Default: Spark's names, ``_c0``, ``_c1``, ..."""
    encoding: str = "utf-8"
    """Encoding of text, any that Python supports."""
    null: str | tuple[str, ...] | None = None
    """Texts that mean null, in addition to empty text."""
    decimal_separator: DecimalSeparator = "."
    """Before the fraction of a number in CSV and delimited text."""
    dialects: tuple[DialectSettings, ...] = ()
    """More dialects of CSV. A file has the one whose delimiter cuts its first record into the most fields."""
    dates: dict[str, str | tuple[str, ...]] = {}
    """Dates and timestamps in text, by the table's columns: one or more formats of strptime. A value that several formats read
    differently is refused."""
    envelope: EnvelopeName | None = None
    """The envelope around each row of JSON lines; Debezium's also in Avro."""
    only: dict[str, str | tuple[str, ...]] = {}
    """Which rows of several tables are this table's: a column's text, or several, for example ``{ __source_table = "orders" }``.
    Other rows are skipped and counted."""
    aliases: dict[str, str] = {}
    """Columns with another name in landing files: the name there, and the table's name."""


class Reading(ReadSettings, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that, with a landing file's name, decides which rows the file has. Each batch keeps its own in the ledger."""

    format: Format = "auto"
    positions: bool = False
    """Whether events get the column `__log_position` (`POSITIONED`). Those of an earlier lakeupsert's batches have none."""
    types: bool = False
    """Whether the `schema` part of an event of Debezium states types. In batches of an earlier lakeupsert it did not count."""
    folders: tuple[str, ...] = ()
    """The columns that folders `name=value` give to files that lack them; of a batch, those that its folders have. In batches of
    an earlier lakeupsert none did."""

    @property
    def has_header(self) -> bool:
        return self.format != "delimited" if self.header is None else self.header

    @property
    def quote_sign(self) -> str:
        """`quote`, or its default; empty if no character quotes."""
        default = "" if self.escape in TEXT_FORMATS else '"'
        return default if self.quote is None else self.quote

    @property
    def own_texts(self) -> dict[str, tuple[str, ...]]:
        """`only`, by names in lower case, always with several texts."""
        return {name.lower(): (text,) if isinstance(text, str) else text for name, text in self.only.items()}

    @property
    def null_words(self) -> tuple[str, ...]:
        """`null`, always as several."""
        return (self.null,) if isinstance(self.null, str) else self.null or ()

    def date_formats(self, column: str) -> tuple[str, ...]:
        """The formats of `dates` for a column of the table, ignoring case; none if the column has none."""
        found = next((formats for name, formats in self.dates.items() if name.lower() == column.lower()), ())
        return (found,) if isinstance(found, str) else found

    def table_name_of(self, name: str) -> str:
        """The table's name for a column of a landing file by `aliases`, ignoring case; ``name`` itself if it has no alias."""
        own = name.lower()
        return next((column for alias, column in self.aliases.items() if alias.lower() == own), name)


class DeleteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.delete]``: which rows delete their key: by a column, by file names, or by both; or by `not_null`."""

    column: str | None = None
    values: tuple[str, ...] = ()
    """Compared with the column's text. A number, boolean or date of TOML stands for the text in a column of its type."""
    keep: bool = False
    """Keep the operation column in base rows."""
    upserts: Names | None = None
    """The values of rows that are not deletes. If set, a row with any other value goes to quarantine."""
    file_prefix: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Name prefix of files that contain only deletes."""
    not_null: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """In place of `column` and `values`: a column with a value in deletes only, as ``_sdc_deleted_at`` of Singer."""

    @property
    def operation(self) -> str | None:
        """The column that decides which rows are deletes."""
        return self.column or self.not_null


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.groups.GROUP]``, for mode columns: columns from another source, with ordering columns of their own."""

    order_by: Names
    columns: Names


class HiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.hive]``: where the publisher keeps the table in a Hive metastore."""

    uri: str
    """`thrift://HOST:PORT`."""
    database: str
    table: str


class GlueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.glue]``: where the publisher keeps the table in the AWS Glue Data Catalog."""

    database: str
    table: str
    region: str | None = None
    """By default boto3's own."""


class LargeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.large]``: partitions whose merge reads more than ``bytes`` go to a separate queue, for Spark."""

    queue: str
    bytes: str | int

    @property
    def most_bytes(self) -> int:
        """Maximum compressed bytes, stored and incoming, of a partition that engine arrow merges."""
        return size_of(self.bytes) or 0


class IcebergSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.iceberg]``: where the Iceberg table is registered."""

    catalog: str | dict[str, str]
    """The name of a catalog in pyiceberg's own configuration, or its ``name`` and properties for pyiceberg."""
    table: str
    """Namespace and name, for example ``sales.receipts``."""
    format_version: FormatVersion = 2
    """Of the Iceberg table. 3 needs a REST catalog."""

    @property
    def catalog_name(self) -> str:
        return self.catalog if isinstance(self.catalog, str) else self.catalog.get("name", "default")

    @property
    def properties(self) -> dict[str, str]:
        """Of the catalog, beside those in pyiceberg's own configuration."""
        return {} if isinstance(self.catalog, str) else {k: v for k, v in self.catalog.items() if k != "name"}


class TableSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME]``: four settings are required, the others have defaults that suit most tables."""

    landing: str
    """The folder or address where files arrive."""
    processed: str
    """The folder or address of the table."""
    key: Names
    """The columns that identify a row. Of all rows of a partition with the same key, the newest stays."""
    partition_by: tuple[str, ...]
    """The partition columns: columns of the files, or for example ``date(created_at) as day`` or ``bucket(64, order_id)``. Empty:
    the table is one partition."""
    order_by: Names = ("record_timestamp",)
    """As in a window's ORDER BY, by default ``desc nulls last``. If landing files lack the column, it is stamped on receipt."""
    order_in_name: str | None = None
    """Pattern whose group finds the ordering column's value in the names of landing files, for example ``_(\\d+)\\.``."""
    ties: Literal["arrival", "content"] = "arrival"
    """What decides between rows with equal ordering values: the later arrival, or the content of their other columns."""
    mode: Literal["rows", "columns"] = "rows"
    """``columns``: a record changes the columns that it brings; the others keep their values."""
    nulls: Literal["overwrite", "keep"] = "overwrite"
    """For mode columns: whether a null in a record replaces a value."""
    groups: dict[str, GroupSettings] = {}
    key_scope: Literal["partition", "table"] = "partition"
    """Whether a key has one row per partition, or one in the table. In the latter case a record for another partition moves
    it."""
    unknown_deletes: Literal["keep", "quarantine"] = "keep"
    """With `key_scope = "table"`: what becomes of a delete that brings its key alone if no record has come for the key. ``keep``:
    older records of the key stay dead, whatever their partition."""
    history: bool = False
    """Keep superseded versions of rows. Readers of the history see when each version was valid."""
    versions: bool = False
    """Store with each row the batch that it came with. Readers may ask for it, and for when the batch was received."""
    full_extract: Literal["merge", "replace"] = "merge"
    """What the rows of a full extract do to older batches: they are compared by order, or replace everything that was there."""
    format: Format = "auto"
    """Of the landing files. ``auto``: as each file's name says."""
    read: ReadSettings = ReadSettings()
    landing_dates: str = ""
    """strftime pattern of the first folders below landing, for example ``%m/%d/%Y``. Empty: all files below it."""
    queue: str = "auto"
    """A file for SQLite, ``sqs://QUEUE`` or ``azqueue://ACCOUNT/QUEUE``. ``auto``: a file beside the table."""
    engine: Literal["arrow", "spark"] = "arrow"
    """What merges."""
    strategy: Literal["auto", "rewrite", "delta"] = "auto"
    """What a merge writes: the whole partition, or a delta beside it. ``auto`` chooses for each partition."""
    bucket: str | int = "256MiB"
    """Compressed bytes of base files above which a partition is split into buckets. Each bucket is merged separately, so memory
    use follows this size."""
    on_failed_partition: Literal["hold", "skip"] = "hold"
    """``hold`` publishes nothing newer while a partition fails; ``skip`` publishes, and lists the partition as lagging."""
    quarantine_limit: str | int = "1%"
    """Refused rows, as a number or a share, above which a batch is refused as a whole."""
    keep_snapshots: Annotated[int, msgspec.Meta(ge=1)] = 7
    """How many snapshots ``vacuum`` keeps, beside those with a tag."""
    superseded_retention: str = "24h"
    """How long ``vacuum`` keeps files that no kept snapshot needs, for example ``24h`` or ``7d``."""
    tombstone_retention: str | None = None
    """How long deleted keys are known. A row that arrives even later goes to quarantine (`below_floor`). Not set: for ever."""
    publishers: tuple[PublisherName, ...] = ()
    """Formats in which other engines read the table: after each publish, these are brought up to its snapshot."""
    delta_vectors: VectorPlace = "file"
    """Where the Delta log has deletion vectors: in files, or in the log itself, which delta-rs and Polars need for many."""
    delta_timestamps: DeltaTimestamps = "naive"
    """How readers of Delta see times without a zone: as they are, or as instants, which Fabric and BigQuery need."""
    iceberg: IcebergSettings | None = None
    schema: dict[str, str] = {}
    """Types of columns, by Spark's or Arrow's names. Other columns get theirs from the first batch."""
    delete: DeleteSettings | None = None
    large: LargeSettings | None = None
    hive: HiveSettings | None = None
    glue: GlueSettings | None = None

    @property
    def reading(self) -> Reading:
        """`format` and `read`."""
        envelope, own = self.read.envelope, msgspec.structs.asdict(self.read)
        return Reading(format=self.format, positions=envelope in POSITIONED, types=envelope == "debezium", **own)

    @property
    def bucket_bytes(self) -> int:
        """`bucket`."""
        return size_of(self.bucket) or 0

    @property
    def retention(self) -> timedelta:
        """`superseded_retention`."""
        return _duration(self.superseded_retention)

    @property
    def tombstones_kept(self) -> int | None:
        """`tombstone_retention`, in microseconds."""
        kept = self.tombstone_retention
        return None if kept is None else _duration(kept) // timedelta(microseconds=1)

    @property
    def one_name_in_files(self) -> bool:
        """Whether a renamed column keeps its name in data files, for engines that look for one name in all of them.

        Otherwise files that are written later have the new name, which is what readers of folders expect.
        """
        return not {"delta", "hive", "glue"}.isdisjoint(self.publishers)

    def within_limit(self, refused: int, rows: int, *, is_first: bool) -> bool:
        """Whether a batch (``is_first``: the table's first one) may have ``refused`` of its ``rows`` refused (ADR 0024)."""
        if isinstance(self.quarantine_limit, int):
            return refused <= self.quarantine_limit
        share = Decimal(self.quarantine_limit.rstrip("%"))
        if share and refused <= QUARANTINE_FLOOR and refused < rows and not is_first:
            return True
        return refused * 100 <= share * rows

    def limit_text(self, refused: int, rows: int, *, is_first: bool) -> str:
        """The limit of `within_limit` in words, for a batch that exceeds it."""
        limit = self.quarantine_limit
        if isinstance(limit, int):
            return f"{limit} rows"
        if not Decimal(limit.rstrip("%")):
            return limit
        if refused > QUARANTINE_FLOOR:
            return limit if is_first else f"{limit} of the rows, or {QUARANTINE_FLOOR} rows if that is more"
        case = "in a table's first batch" if is_first else "if all rows of a batch are refused"
        return f"{limit} {case} (otherwise also up to {QUARANTINE_FLOOR} rows)"


QUARANTINE_FLOOR = 10
"""Up to this many refused rows, a share in `quarantine_limit` does not apply. It does apply to a table's first batch, and if all
rows are refused."""


DATE_DIRECTIVES = {
    "Y": r"\d{4}",
    "y": r"\d{2}",
    "m": r"0?[1-9]|1[0-2]",
    "b": "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec",
    "B": "january|february|march|april|may|june|july|august|september|october|november|december",
    "d": r"0?[1-9]|[12]\d|3[01]",
    "H": r"[01]?\d|2[0-3]",
    "I": r"0?[1-9]|1[0-2]",
    "M": r"[0-5]?\d",
    "S": r"[0-5]?\d",
    "f": r"\d{1,6}",
    "p": "am|pm",
    "z": r"Z|[+-]\d{2}:?\d{2}",
}
"""What the directives of a date format match, as in strptime, in upper and lower case."""
TIME_DIRECTIVES = frozenset("HIMSfpz")


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


LONGEST = timedelta(days=36_500)
"""The longest duration of a setting. For ever is expressed by leaving the setting out."""
LEAST_BUCKET = 1 << 10
"""Minimum of `bucket` in bytes. A bucket's file has more bytes than that besides its rows (`datafiles.BARE_BYTES`), and no
bucket is split for less, so a smaller value would have no effect."""


def _duration(text: str) -> timedelta:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    return timedelta(**{units[text[-1]]: int(text[:-1])})


Hook = str | Names
"""The address of a webhook, or a command with its arguments."""


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """What `lakeupsert run` calls at its end, with the object of `--json` as body or on standard input.

    The values are as they are written: `${VAR}` is replaced when a hook is called, so that nobody prints a secret.
    """

    on_success: Hook | None = None
    """Called after a run with exit code 0: an https or http address, or a command as a list of arguments."""
    on_failure: Hook | None = None
    """Called after a run with any other exit code: an https or http address, or a command as a list of arguments."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration file, with its chosen profile and the environment's settings, and with absolute local paths."""

    path: str
    profile: str | None
    hooks: Hooks
    tables: dict[str, TableSettings]
    origins: dict[str, dict[str, str]]
    """By table and setting: ``file``, a profile, or environment variables. A setting that is not listed has its default."""

    def refuse_unset_hooks(self, environment: Mapping[str, str]) -> None:
        """Raise ConfigurationError (``unset-variable``) if a variable of a hook is not set. Only a run calls hooks."""
        for name in _HOOKS:
            hook: Hook = getattr(self.hooks, name) or ""
            expand(hook if isinstance(hook, str) else list(hook), f"{self.path}: {name}", environment, secrets=True)

    def table(self, name: str | None) -> tuple[str, TableSettings]:
        """A table by name; None: the only table."""
        if name is None:
            if len(self.tables) == 1:
                return next(iter(self.tables.items()))
            raise ConfigurationError(
                "which-table",
                f"{self.path} has {len(self.tables)} tables: {', '.join(self.tables)}.",
                next="choose one with --table NAME",
            )
        if name not in self.tables:
            raise ConfigurationError(
                "unknown-table",
                f"{self.path} has no table {name!r}.{_did_you_mean(name, self.tables)} It has "
                f"{', '.join(self.tables)}.",
                next="give one of these names with --table",
            )
        return name, self.tables[name]


def load(path: str | None, environment: Mapping[str, str] = os.environ, *, profile: str | None = None) -> Config:
    """Read ``path``, which may be a URL like `s3://lake/lakeupsert.toml`. By default, search `lakeupsert.toml` from the working
    directory upwards. ``profile``: by default that of the environment variable LAKEUPSERT_PROFILE, if it is set."""
    if path and "://" in path:
        where, content = path, _remote(path)
    else:
        file = Path(path).expanduser().absolute() if path else _search()
        where, content = str(file), _local(file)
    return parse(where, content, environment, profile=profile)


def names_in(path: str | None) -> dict[str, list[str]]:
    """The names of the ``tables`` and ``profiles`` in a local configuration file, which is not checked further."""
    document = tomllib.loads(_local(Path(path).expanduser() if path else _search()).decode())
    return {kind: list(document.get(kind, {})) for kind in ("tables", "profiles")}


def parse(
    path: str, content: bytes, environment: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> Config:
    """Parse the ``content`` of a configuration file; ``path`` is its path or URL. ``profile`` as in `load`."""
    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigurationError(
            "unreadable-configuration", f"{path} is not TOML: {e}.", next="correct that line"
        ) from e
    known = {"tables", "profiles", *_HOOKS}
    for key in document:
        if key not in known:
            raise _unknown(path, "", key, known)
    listed = _tables_of(path, document, "tables")
    chosen = _profile(path, document, profile or environment.get(PROFILE_VARIABLE) or None, listed)
    tables: dict[str, TableSettings] = {}
    origins: dict[str, dict[str, str]] = {}
    for name, written in listed.items():
        written = _merge(written, chosen.settings_of(name))
        raw = {key: expand(value, f"{path}: [tables.{name}]: {key}", environment) for key, value in written.items()}
        try:
            merged, variables = _overlay(path, raw, name, environment)
            tables[name] = _settings(path, name, merged)
        except ConfigurationError as e:
            raise chosen.named_in(_with_variables(e, path, name, raw, environment), path) from e
        origins[name] = {
            setting: ", ".join(sorted(variables.get(setting, []))) or chosen.origin(name, setting, written)
            for setting in merged
        }
    if not tables:
        raise ConfigurationError(
            "no-table", f"{path} has no table.", next="add [tables.NAME] with landing, processed, key and partition_by"
        )
    _refuse_overlaps(path, tables)
    hooks = _hooks(path, {**document, **chosen.hooks}, environment)
    return Config(path=path, profile=chosen.name, hooks=hooks, tables=tables, origins=origins)


_HOOKS = tuple(Hooks.__struct_fields__)


def _tables_of(path: str, content: Mapping[str, object], key: str) -> dict[str, dict[str, object]]:
    """The tables below ``key`` by name; none if it is missing."""
    listed = content.get(key, {})
    if not isinstance(listed, dict):
        raise ConfigurationError(
            "bad-setting", f"{path}: `{key}` is {listed!r}; expected a table of tables.", next=f"write [{key}.NAME]"
        )
    for name, raw in listed.items():
        if not isinstance(raw, dict):
            raise ConfigurationError(
                "bad-setting", f"{path}: [{key}] contains {name!r}, which is not a table.", next=f"write [{key}.NAME]"
            )
    return listed


@dataclass(frozen=True)
class _Profile:
    """What ``[profiles.NAME]`` says: settings of all tables, of single tables, and hooks. Without a name, nothing."""

    name: str | None
    settings: Mapping[str, object]
    tables: Mapping[str, Mapping[str, object]]
    hooks: Mapping[str, object]

    def named_in(self, error: ConfigurationError, path: str) -> ConfigurationError:
        """The error of a table's settings, which may come from this profile."""
        if self.name is None:
            return error
        message = error.message.replace(path, f"{path} with profile {self.name}", 1)
        return ConfigurationError(error.code, message, next=error.next)

    def settings_of(self, table: str) -> dict[str, object]:
        return _merge(self.settings, self.tables.get(table, {}))

    def origin(self, table: str, setting: str, written: Mapping[str, object]) -> str:
        """Where a setting comes from, and the variables that are in it."""
        source = f"profile {self.name}" if setting in self.settings_of(table) else "file"
        names = "".join(f" with ${{{name}}}" for name in references(written[setting]))
        return f"{source}{names}"


def _profile(path: str, document: Mapping[str, object], name: str | None, tables: Mapping[str, object]) -> _Profile:
    """The profile of this name. Keys of all profiles are checked, so that a slip shows before its profile is needed."""
    profiles = _tables_of(path, document, "profiles")
    settings = {f.name for f in msgspec.structs.fields(TableSettings)}
    for profile, content in profiles.items():
        for key in content:
            if key not in (known := settings | {"tables", *_HOOKS}):
                raise _unknown(path, f"[profiles.{profile}]", key, known)
        for table in _tables_of(f"{path}: [profiles.{profile}]", content, "tables"):
            if table not in tables:
                raise ConfigurationError(
                    "unknown-table",
                    f"{path}: [profiles.{profile}.tables.{table}] is for a table that the file does not have."
                    f"{_did_you_mean(table, tables)}",
                    next=f"correct the name, or add [tables.{toml_key(table)}]",
                )
    if name is None:
        return _Profile(None, {}, {}, {})
    if name not in profiles:
        raise ConfigurationError(
            "unknown-profile",
            f"{path} has no [profiles.{toml_key(name)}].{_did_you_mean(name, profiles)} It has "
            f"{', '.join(profiles) or 'no profile'}.",
            next=f"give one of these with --profile or {PROFILE_VARIABLE}, or none",
        )
    content = profiles[name]
    own = {key: value for key, value in content.items() if key in settings}
    hooks = {key: value for key, value in content.items() if key in _HOOKS}
    return _Profile(name, own, _tables_of(path, content, "tables"), hooks)


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """``base`` with the settings of ``over``. Tables are merged; everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = base.get(key)
        merged[key] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _hooks(path: str, content: Mapping[str, object], environment: Mapping[str, str]) -> Hooks:
    """The hooks as they are written. No message quotes a value, which may have a secret in it."""
    written = {name: content[name] for name in _HOOKS if name in content}
    for name, value in written.items():
        _refuse_secret(path, name, value)
        is_command = isinstance(value, list) and value and all(isinstance(part, str) and part for part in value)
        is_address = isinstance(value, str)
        if is_address and all(map(environment.get, references(value))):  # else see `Config.refuse_unset_hooks`
            is_address = _is_web_address(str(expand(value, f"{path}: {name}", environment, secrets=True)))
        if not is_address and not is_command:
            raise ConfigurationError(
                "bad-setting",
                f"{path}: {name} is neither an https or http address nor a command as a list of texts.",
                next=f'write for example {name} = ["/usr/local/bin/page", "lake"], or {name} = "${{HOOK_URL}}"',
            )
    return convert(written, Hooks)


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for example `http://[::1/x`, and a port that is not a number
        return False


def _refuse_secret(path: str, name: str, written: object) -> None:
    """Refuse addresses, also among the arguments of a command, with a credential in them that is not a variable."""
    texts = [text for text in (written if isinstance(written, list) else [written]) if isinstance(text, str)]
    if any(map(_has_credential, re.findall(r"\w+://\S+", without_references(" ".join(texts))))):
        raise ConfigurationError(
            "credential-in-configuration",
            f"{path}: {name} contains a credential, which the file may not.",
            next=f"put it into an environment variable and write ${{VARIABLE}} in {name}",
        )


def _has_credential(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:  # it is no address, which other checks say
        return False
    return bool(parts.password) or any(_SECRET.match(f"{key}=") for key, _ in parse_qsl(parts.query))


def _with_variables(
    error: ConfigurationError, path: str, name: str, raw: dict[str, object], environment: Mapping[str, str]
) -> ConfigurationError:
    """The error as one of the environment variables that cause it. If none does, the file is at fault, and the error stays."""

    def differs(variable: str) -> bool:
        try:
            others = {v: text for v, text in environment.items() if v != variable}
            merged, _ = _overlay(path, raw, name, others)
            _settings(path, name, merged)
        except ConfigurationError as other:
            return other.message != error.message
        return True

    variables = sorted(v for v in environment if v.upper().startswith(_prefix(name)) and differs(v))
    if not variables:
        return error
    named = ", ".join(variables)
    return ConfigurationError(
        error.code,
        f"Environment variable {named}{error.message.removeprefix(path)}",
        next=f"correct {named} or unset it: it overrides {path}",
    )


def _prefix(name: str) -> str:
    """The prefix of a table's environment variables, in upper case."""
    return f"{ENVIRONMENT_PREFIX}{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}__"


def _local(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as e:
        raise ConfigurationError(
            "no-configuration",
            f"There is no {file}.",
            next="name a file with --config, or in Python with `Table.open`, which also takes the folder of a table",
        ) from e
    except OSError as e:
        raise ConfigurationError(
            "unreadable-configuration",
            f"{file} can't be read: {e.strerror}.",
            next="pass a readable file with --config",
        ) from e


def _remote(address: str) -> bytes:
    from lakeupsert.storage import NotFoundError, open_store  # imports Arrow, which a local file does not need

    folder, _, name = address.rpartition("/")
    if not name or folder.endswith("/"):
        raise ConfigurationError(
            "no-configuration",
            f"{address} does not name a file.",
            next=f"write for example {address.rstrip('/')}/{FILE_NAME}",
        )
    try:
        return open_store(f"{folder}/").get(name)
    except NotFoundError as e:
        raise ConfigurationError(
            "no-configuration", f"There is no {address}.", next="create it, or correct the URL"
        ) from e


def _search() -> Path:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise ConfigurationError(
        "no-configuration",
        f"There is no {FILE_NAME} in {here} or above it.",
        next=f"write one (`lakeupsert init` with the folder of your files, or `lakeupsert config --example > {FILE_NAME}`), "
        "or pass one with --config",
    )


def _overlay(
    path: str, raw: dict[str, object], name: str, environment: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, list[str]]]:
    """The settings after ``LAKEUPSERT__TABLES__<NAME>__<SETTING>[__<PART>]``, and the variables that set each.

    Values are TOML, or plain text.
    """
    merged = dict(raw)
    variables: dict[str, list[str]] = {}
    prefix = _prefix(name)
    for variable, text in environment.items():
        if variable.upper().startswith(prefix):
            setting, _, part = variable[len(prefix) :].lower().partition("__")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                value = text
            merged[setting] = {**_part(path, name, merged, setting), part: value} if part else value
            variables.setdefault(setting, []).append(variable)
    return merged, variables


def _part(path: str, name: str, raw: dict[str, object], part: str) -> dict[str, object]:
    """``[tables.NAME.PART]``; empty if it is missing."""
    content = raw.get(part, {})
    if not isinstance(content, dict):
        raise ConfigurationError(
            "bad-setting",
            f"{path}: [tables.{name}]: {part} is {content!r}; expected a table.",
            next=f"write [tables.{name}.{part}] above its settings",
        )
    return content


def _settings(path: str, name: str, raw: dict[str, object]) -> TableSettings:
    where = f"[tables.{name}]"
    parts: dict[str, type[msgspec.Struct]] = {"": TableSettings, "delete": DeleteSettings, "read": ReadSettings}
    parts |= {"large": LargeSettings, "iceberg": IcebergSettings, "hive": HiveSettings, "glue": GlueSettings}
    known_in = {part: {*type_.__struct_fields__} for part, type_ in parts.items()}
    # What is written below [tables.NAME.schema] by mistake is a column, unless it can't be a type.
    everywhere = set().union(*known_in.values())
    columns = _part(path, name, raw, "schema").items()
    known_in["schema"] = {key for key, type_ in columns if isinstance(type_, str) or key not in everywhere}
    for part, known in known_in.items():
        for key in _part(path, name, raw, part) if part else raw:
            if key not in known:
                others = (other for other, its in known_in.items() if key in its)
                place = next((f"[tables.{toml_key(name)}{'.' * bool(one)}{one}]" for one in others), None)
                raise _unknown(path, f"[tables.{name}{'.' * bool(part)}{part}]", key, known, place)
    known = {f.name for f in msgspec.structs.fields(GroupSettings)}
    for group, content in _part(path, name, raw, "groups").items():
        for key in content if isinstance(content, dict) else ():
            if key not in known:
                raise _unknown(path, f"[tables.{name}.groups.{group}]", key, known)
    dialects = _part(path, name, raw, "read").get("dialects")
    known = {f.name for f in msgspec.structs.fields(DialectSettings)}
    for dialect in dialects if isinstance(dialects, list) else ():
        for key in dialect if isinstance(dialect, dict) else ():
            if key not in known:
                raise _unknown(path, f"{where}: read.dialects", key, known)
    missing = [f.name for f in msgspec.structs.fields(TableSettings) if f.required and f.name not in raw]
    if missing:
        raise ConfigurationError(
            "missing-setting", f"{path}: {where} lacks {', '.join(missing)}.", next=f"add it to {where}"
        )
    try:
        settings = convert(_with_texts(raw), TableSettings)
    except msgspec.ValidationError as e:
        raise ConfigurationError(
            "bad-setting", f"{path}: {where}: {_why_unfit(raw, e)}.", next=f"correct that setting in {where}"
        ) from e
    _check_values(path, where, settings)
    large = settings.large
    return msgspec.structs.replace(
        settings,
        landing=_absolute(path, settings.landing),
        processed=_absolute(path, settings.processed),
        queue=settings.queue if settings.queue == "auto" else _absolute(path, settings.queue),
        large=large and msgspec.structs.replace(large, queue=_absolute(path, large.queue)),
    )


def _why_unfit(raw: dict[str, object], e: msgspec.ValidationError) -> str:
    """The setting, what it must be and what it is: msgspec names the types of JSON, and no key of a table."""
    text, _, path = str(e).rpartition(" - at `$.")
    steps = re.findall(r"\w+|\[\d+\]|\[\.{3}\]", path)
    expected = re.match(r"Expected `([^`]+)`( of length)?(?: >= (\d+))?(?:, got `(\w+)`)?", text)
    got = expected and expected[4]
    found = list(_settings_at(raw, steps))
    name, value = next((one for one in found if (_json_type(one[1]) == got if got else not one[1])), found[0])
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return f"{name} lacks `{missing[1]}`"
    if expected is None:
        must = " or ".join(map(repr, _choices(steps)))
    else:
        must = " or ".join(_TYPES.get(one, one) for one in expected[1].split(" | ") if one != "null")
        must += " that is not empty" if expected[2] else f" of at least {expected[3]}" if expected[3] else ""
    if must == _TYPES["array"]:
        return f"{name} must be a list: {name.rpartition('.')[2]} = [{json.dumps(value, default=str)}]"
    return f"{name} must be {must}" + ("" if isinstance(value, dict) else f", and is {value!r}")


def _settings_at(value: object, steps: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Name and value of the settings at a path of msgspec, in which ``[...]`` is any key of a table."""
    if not steps:
        yield "", value
    elif isinstance(value, dict):
        for key in value if steps[0] == "[...]" else steps[:1]:
            for name, one in _settings_at(value[key], steps[1:]):
                yield f"{toml_key(key)}{'.' * (name[:1] not in ('', '['))}{name}", one
    elif isinstance(value, list):
        index = int(steps[0][1:-1])
        for name, one in (pair for item in value[index : index + 1] for pair in _settings_at(item, steps[1:])):
            yield f"{steps[0]}{'.' * (name[:1] not in ('', '['))}{name}", one


def _choices(steps: Sequence[str]) -> tuple[object, ...]:
    """The values that the setting at a path of msgspec may have."""
    hint: type = TableSettings
    for step in steps:
        hint = get_args(hint)[step == "[...]"] if step[0] == "[" else get_type_hints(hint)[step]
        hint = get_args(hint)[0] if type(None) in get_args(hint) else hint
    return get_args(hint)


def _json_type(value: object) -> str:
    return next((name for name, its in _TYPES_OF.items() if type(value) is its), "")


def _with_texts(raw: dict[str, object]) -> dict[str, object]:
    """The settings with all values that are compared as text converted to text."""
    delete, read = raw.get("delete"), raw.get("read")
    if isinstance(delete, dict):
        lists = {setting: delete[setting] for setting in ("values", "upserts") if isinstance(delete.get(setting), list)}
        raw = {**raw, "delete": {**delete, **{setting: _column_texts(values) for setting, values in lists.items()}}}
    if isinstance(read, dict) and isinstance(read.get("only"), dict):
        raw = {**raw, "read": {**read, "only": {name: _column_texts(value) for name, value in read["only"].items()}}}
    return raw


def _column_texts(value: object) -> object:
    return list(map(_column_text, value)) if isinstance(value, list) else _column_text(value)


def _column_text(value: object) -> object:
    """A TOML scalar as the text in a column of its type: true, 1, 0.5, 2020-01-31. Lists and tables are returned unchanged."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, float | date | time):
        return value
    import pyarrow as pa  # slow to import, and rarely needed

    moment = value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value
    return pa.scalar(moment).cast(pa.string()).as_py()


@dataclass(frozen=True)
class _Refusal:
    """Raises the error for a setting; ``where`` is its table in the file ``path``."""

    path: str
    where: str

    def __call__(self, setting: str, found: object, expected: str) -> NoReturn:
        raise ConfigurationError(
            "bad-setting",
            f"{self.path}: {self.where}: {setting} is {found!r}; {expected}.",
            next=f"correct {setting} in {self.where}",
        )


def _check_values(path: str, where: str, settings: TableSettings) -> None:
    """Check what types can't express. Addresses come first, so that no credential gets into a later message."""
    _check_credentials(path, where, settings)
    refuse = _Refusal(path, where)
    _check_sizes(settings, refuse)
    _check_retention(settings, refuse)
    _check_order_in_name(settings, refuse)
    if "delta" not in settings.publishers:
        unused = {"delta_vectors": "file", "delta_timestamps": "naive"}
        _check_alone(settings, unused, 'it has no effect without publishers = ["delta"]', refuse)
    _check_catalogs(settings, refuse)
    names: dict[str, str] = {}
    for name in settings.schema:
        if (other := names.setdefault(name.lower(), name)) != name:
            refuse("schema", [other, name], "names that differ only by case are one column")
    if settings.key_scope == "table":
        alone = {"ties": "arrival", "tombstone_retention": None, "on_failed_partition": "hold"}
        _check_alone(settings, alone, 'not supported with key_scope = "table"', refuse)
        if settings.groups:
            refuse("groups", list(settings.groups), 'not supported with key_scope = "table"; leave it out')
    if settings.key_scope == "partition" or settings.delete is None:
        expected = 'it has no effect without key_scope = "table" and [delete]'
        _check_alone(settings, {"unknown_deletes": "keep"}, expected, refuse)
    _check_delete(settings, refuse)
    for setting, what in {
        "key": "column",
        "order_by": "column",
        "partition_by": "column",
        "publishers": "publisher",
    }.items():
        named = getattr(settings, setting)
        if len(set(named)) < len(named):
            refuse(setting, list(named), f"a {what} is named twice")
    if settings.history:
        alone = {"mode": "rows", "key_scope": "partition"}
        _check_alone(settings, alone, "not supported yet with history", refuse)
    _check_mode(settings, refuse)
    if settings.full_extract == "replace":
        _check_replacing(settings, refuse)
    _check_read(settings.reading, refuse)
    _check_dates(settings, refuse)


def _check_credentials(path: str, where: str, settings: TableSettings) -> None:
    addresses = {setting: getattr(settings, setting) for setting in ("landing", "processed", "queue")}
    if settings.large:
        addresses["large.queue"] = settings.large.queue
    come_from = "credentials come from the default chains of boto3 and DefaultAzureCredential"
    if settings.iceberg:
        addresses |= {f"iceberg.catalog.{key}": value for key, value in settings.iceberg.properties.items()}
        name = re.sub(r"[^A-Z0-9]", "_", settings.iceberg.catalog_name.upper())
        come_from += (
            f", those of a catalog from pyiceberg's configuration, for example PYICEBERG_CATALOG__{name}__TOKEN"
        )
    if settings.hive:
        addresses["hive.uri"] = settings.hive.uri
    for setting, address in addresses.items():
        parts = urlsplit(address) if "://" in address else None
        if _CATALOG_SECRET.search(setting) or (parts and (parts.password is not None or _SECRET.search(parts.query))):
            raise ConfigurationError(
                "credential-in-configuration",
                f"{path}: {where}: {setting} contains a credential, which no setting may.",
                next=f"remove it; {come_from}",
            )


def _check_sizes(settings: TableSettings, refuse: _Refusal) -> None:
    """Queue, sizes and the quarantine limit."""
    if settings.queue == "auto" and is_remote(settings.processed):
        refuse("queue", "auto", "`processed` is not on this machine, so the table must name its queue")
    if settings.bucket_bytes < LEAST_BUCKET:
        expected = f'expected a size of at least {LEAST_BUCKET} bytes, for example "256MiB"'
        refuse("bucket", settings.bucket, expected)
    if settings.large:
        if not size_of(settings.large.bytes):
            refuse("large.bytes", settings.large.bytes, 'expected a size, for example "2GB"')
        if settings.engine == "spark":
            refuse("engine", "spark", "with `large`, Arrow merges all partitions except the large ones")
    if isinstance(settings.quarantine_limit, str) and not re.fullmatch(r"\d+(\.\d+)?%", settings.quarantine_limit):
        refuse("quarantine_limit", settings.quarantine_limit, 'expected a share, for example "1%", or a number of rows')


def _check_retention(settings: TableSettings, refuse: _Refusal) -> None:
    for setting, example in (("superseded_retention", '"24h" or "0s"'), ("tombstone_retention", '"90d"')):
        duration = getattr(settings, setting)
        if duration is not None and not re.fullmatch(r"\d{1,9}(s|m|h|d)", duration):
            refuse(setting, duration, f"expected a duration, for example {example}")
        if duration is not None and _duration(duration) > LONGEST:
            refuse(setting, duration, f"expected {LONGEST.days}d at most")
    if not settings.retention and settings.keep_snapshots > 1:
        expected = 'with superseded_retention = "0s", older snapshots could not be read; expected 1'
        refuse("keep_snapshots", settings.keep_snapshots, expected)


def _check_alone(settings: TableSettings, alone: Mapping[str, str | None], why: str, refuse: _Refusal) -> None:
    """Refuse all other values of these settings."""
    for setting, only in alone.items():
        value = getattr(settings, setting)
        if value != only:
            refuse(setting, value, f"{why}; {'leave it out' if only is None else f'expected {only!r}'}")


def _check_catalogs(settings: TableSettings, refuse: _Refusal) -> None:
    """The publishers that keep a table in a catalog."""
    for name, section in {"iceberg": settings.iceberg, "hive": settings.hive, "glue": settings.glue}.items():
        if section is None and name in settings.publishers:
            refuse("publishers", list(settings.publishers), f"{name!r} needs a section [tables.NAME.{name}]")
        if section is not None and name not in settings.publishers:
            refuse(name, section.table, f'it has no effect without publishers = ["{name}"]')
    iceberg = settings.iceberg
    if iceberg and (not all(iceberg.table.split(".")) or "." not in iceberg.table):
        refuse("iceberg.table", iceberg.table, 'expected a namespace and a name, for example "sales.receipts"')
    if iceberg and iceberg.format_version == 3:
        kind = iceberg.properties.get("type") or urlsplit(iceberg.properties.get("uri", "http:")).scheme
        if kind not in ("rest", "http", "https"):
            refuse(
                "iceberg.format_version", 3, f"a catalog of type {kind!r} can't have it; expected 2, or a REST catalog"
            )
    for name, of_hive in {"hive": settings.hive, "glue": settings.glue}.items():
        if of_hive is None:
            continue
        for setting in ("database", "table"):
            if not re.fullmatch(r"[a-z0-9_-]+", getattr(of_hive, setting)):
                expected = "expected lower-case letters, digits, - and _, to which catalogs change a name"
                refuse(f"{name}.{setting}", getattr(of_hive, setting), expected)
        if settings.strategy == "delta":
            refuse("strategy", "delta", f"readers of {name} know no deletion vectors; expected 'auto' or 'rewrite'")
    if settings.hive and not re.fullmatch(r"thrift://[^/:@?]+:\d{1,5}", settings.hive.uri):
        refuse("hive.uri", settings.hive.uri, 'expected "thrift://HOST:PORT"')
    _check_one_table(settings, refuse)


def _check_one_table(settings: TableSettings, refuse: _Refusal) -> None:
    """Refuse two publishers that would keep their tables under one name of one catalog."""
    if settings.iceberg is None:
        return
    name, uri = settings.iceberg.table, settings.iceberg.properties.get("uri", "")
    kind = settings.iceberg.properties.get("type", "hive" if uri.startswith("thrift:") else "")  # as pyiceberg does
    other = {"glue": settings.glue, "hive": settings.hive}.get(kind)
    if other is None or (isinstance(other, HiveSettings) and other.uri not in uri.split(",")):
        return
    if name.lower() == f"{other.database}.{other.table}":
        refuse("iceberg.table", name, f"the publisher {kind!r} keeps a table of that name there; expected another name")


def _check_delete(settings: TableSettings, refuse: _Refusal) -> None:
    delete = settings.delete
    if delete is None:
        return
    if delete.not_null is not None:
        for setting in ("column", "values", "upserts", "file_prefix"):
            if value := getattr(delete, setting):
                refuse(
                    f"delete.{setting}", value, "not supported with `delete.not_null`, which says it all; leave one out"
                )
        return
    if not (delete.column and delete.values) and not delete.file_prefix:
        refuse("delete", {}, "expected `column` and `values`, or `file_prefix`, or all three; or `not_null`")
    if delete.column is None and (delete.values or delete.upserts):
        refuse("delete", {"values": list(delete.values)}, "`column` must say where these values are")
    if both := set(delete.values) & set(delete.upserts or ()):
        refuse("delete.upserts", list(delete.upserts or ()), f"{min(both)!r} is also in `delete.values`")


def _check_mode(settings: TableSettings, refuse: _Refusal) -> None:
    if settings.mode == "rows":
        for setting, value in (("nulls", settings.nulls), ("groups", list(settings.groups))):
            if value not in ("overwrite", []):
                refuse(setting, value, 'only supported with mode = "columns"')
        return
    for setting in ("ties", "tombstone_retention"):
        value = getattr(settings, setting)
        if value not in ("arrival", None):
            refuse(setting, value, 'not supported yet with mode = "columns"; leave it out')
    if settings.groups and settings.delete:
        refuse(
            "groups",
            list(settings.groups),
            "not supported with [delete], because a delete has the order of the whole row",
        )


def _check_replacing(settings: TableSettings, refuse: _Refusal) -> None:
    reasons = {
        'mode = "columns"': (settings.mode != "rows", "takes no full extracts"),
        'key_scope = "table"': (settings.key_scope != "partition", "takes no full extracts"),
        'ties = "content"': (settings.ties != "arrival", "promises the same table whenever a record arrives"),
        "history = true": (settings.history, "has no place for a version above the order of the row that replaces it"),
    }
    for setting, (is_set, why) in reasons.items():
        if is_set:
            refuse("full_extract", "replace", f"not supported with {setting}, which {why}; expected 'merge'")


_MEANT_FOR: dict[str, tuple[Format, ...]] = {
    "delimiter": ("csv", "delimited"),
    "quote": ("csv",),
    "escape": ("csv",),
    "header": ("csv", "delimited"),
    "columns": ("csv", "delimited"),
    "encoding": ("csv", "delimited", "jsonl"),
    "null": ("csv", "delimited"),
    "decimal_separator": ("csv", "delimited"),
    "dialects": ("csv",),
    "envelope": ("jsonl", "avro"),
}


def _check_read(reading: Reading, refuse: _Refusal) -> None:
    defaults = ReadSettings()
    for setting, formats in _MEANT_FOR.items():
        value = getattr(reading, setting)
        if reading.format not in ("auto", *formats) and value != getattr(defaults, setting):
            refuse(
                f"read.{setting}",
                value,
                f"only supported for format {' and '.join(formats)}, but `format` is {reading.format}",
            )
    if reading.format == "delimited":
        try:
            pattern = re.compile(reading.delimiter)
        except re.error as e:
            refuse("read.delimiter", reading.delimiter, f"not a regular expression: {e}")
        else:
            if pattern.groups or pattern.search(""):
                refuse(
                    "read.delimiter",
                    reading.delimiter,
                    "expected a pattern without groups that does not match empty text",
                )
    elif not _is_sign(reading.delimiter):
        refuse("read.delimiter", reading.delimiter, 'expected one ASCII character; for others use format = "delimited"')
    if reading.quote and (not _is_sign(reading.quote) or reading.quote == reading.delimiter):
        refuse("read.quote", reading.quote, 'expected one ASCII character other than the delimiter, or "" for none')
    if reading.escape:
        _check_escape(reading, refuse)
    if reading.columns and reading.has_header:
        refuse("read.columns", list(reading.columns), "the header already names the columns; set header = false")
    names = {name.lower() for name in reading.columns}
    if len(names) < len(reading.columns) or not all(name.strip() for name in names):
        refuse("read.columns", list(reading.columns), "expected a different name for each column")
    if "" in reading.null_words:
        refuse("read.null", reading.null, "empty text is always null")
    _check_separators(reading, refuse)
    aliases = {alias.lower(): column for alias, column in reading.aliases.items()}
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
    if not all(name.strip() for name in reading.only) or len(reading.own_texts) < len(reading.only):
        refuse("read.only", reading.only, "expected a different name for each column")
    if "" in (texts := {text for several in reading.own_texts.values() for text in several or ("",)}):
        refuse("read.only", reading.only, f"expected a value for each column; found {sorted(texts)}")
    if reading.envelope not in (None, "debezium") and reading.format == "avro":
        refuse("read.envelope", reading.envelope, "these messages are JSON")
    try:
        codecs.getincrementaldecoder(reading.encoding)().decode(b"")
        "".encode(reading.encoding)
    except (LookupError, TypeError, ValueError):  # also UnicodeError; some codecs are not text encodings
        refuse(
            "read.encoding", reading.encoding, 'expected a text encoding that Python supports, for example "latin-1"'
        )


def _check_escape(reading: Reading, refuse: _Refusal) -> None:
    escape, others = (
        reading.escape,
        {reading.delimiter, *(one.delimiter for one in reading.dialects), reading.quote_sign},
    )
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
        refuse(
            "read.escape", escape, f"it escapes quotes, but `quote` is empty; expected one of {', '.join(TEXT_FORMATS)}"
        )


def _check_separators(reading: Reading, refuse: _Refusal) -> None:
    """The separators of fields and of decimals, in all dialects."""
    dialects = [DialectSettings(delimiter=reading.delimiter, decimal_separator=reading.decimal_separator)]
    if reading.format != "delimited":
        dialects += reading.dialects
    for one in reading.dialects:
        if not _is_sign(one.delimiter) or one.delimiter == reading.quote_sign:
            refuse("read.dialects", one.delimiter, "expected one ASCII character other than the quote as delimiter")
    delimiters = [one.delimiter for one in dialects]
    if len(set(delimiters)) < len(delimiters):
        refuse(
            "read.dialects", delimiters, "each dialect needs its own delimiter, because the delimiter tells them apart"
        )


def _check_dates(settings: TableSettings, refuse: _Refusal) -> None:
    names: dict[str, str] = {}
    for column in settings.read.dates:
        if (other := names.setdefault(column.lower(), column)) != column:
            refuse("read.dates", [other, column], "names that differ only by case are one column")
        formats = settings.reading.date_formats(column)
        if not formats or len(set(formats)) < len(formats):
            refuse(f"read.dates.{column}", list(formats), "expected one or more formats, each once")
        for text in formats:
            if expected := _flaw_of_date_format(text):
                refuse(f"read.dates.{column}", text, expected)
    for column, type_ in settings.schema.items():
        if column.lower() in names and not re.match(r"(?i)date|timestamp", type_):
            refuse(
                "read.dates",
                column,
                f"[schema] says {type_}, so no value would be read as a date; leave out one of them",
            )


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


def _check_order_in_name(settings: TableSettings, refuse: _Refusal) -> None:
    pattern = settings.order_in_name
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as e:
        refuse("order_in_name", pattern, f"not a regular expression: {e}")
    else:
        if groups != 1:
            refuse("order_in_name", pattern, f"it has {groups} groups; expected one, for the order")
    if len(settings.order_by) != 1:
        refuse(
            "order_by",
            list(settings.order_by),
            "with `order_in_name`, expected one column, which the files do not have",
        )


def _refuse_overlaps(path: str, tables: dict[str, TableSettings]) -> None:
    """Two tables in one place would merge each other's rows. A table inside its landing zone would load its own files."""
    queue_by: dict[str, str] = {}
    for name, settings in tables.items():
        landing, processed = canonical_address(settings.landing), canonical_address(settings.processed)
        queues = [
            canonical_address(settings.queue) if settings.queue != "auto" else f"{processed}_lakeupsert/queue.sqlite/"
        ]
        if settings.large:
            queues.append(canonical_address(settings.large.queue))
        for other, others in tables.items():
            elsewhere = canonical_address(others.processed)
            if _overlap(landing, elsewhere):
                raise ConfigurationError(
                    "overlapping-zones",
                    f"{path}: landing of [tables.{name}], {settings.landing}, and processed of [tables.{other}], "
                    f"{others.processed}, overlap: one is inside the other.",
                    next="put landing and processed into separate folders",
                )
            if other != name and _overlap(processed, elsewhere):
                raise ConfigurationError(
                    "shared-processed",
                    f"{path}: the processed paths of tables {name!r} and {other!r} are equal, or one is inside the other: "
                    f"{settings.processed} and {others.processed}.",
                    next="give each table its own processed path",
                )
        if len(set(queues)) < len(queues):
            raise ConfigurationError(
                "shared-queue",
                f"{path}: table {name!r} has one queue for all partitions, {queues[0].rstrip('/')}; the messages that a worker "
                "passes on to Spark would come back to it.",
                next=f"give [tables.{name}.large] its own queue",
            )
        for queue in queues:
            other = queue_by.setdefault(queue, name)
            if other != name:
                raise ConfigurationError(
                    "shared-queue",
                    f"{path}: tables {other!r} and {name!r} have the same queue, {queue.rstrip('/')}; the workers of one would "
                    "move the messages of the other to the dead letters.",
                    next="give each table its own queues, or leave out `queue`",
                )


def size_of(text: str | int) -> int | None:
    """The bytes of a size like 1000000, 50GB or 1.5TiB; None if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", str(text).strip().lower())
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** (" kmgt".index(unit) if unit else 0))


def cores() -> int:
    """The processor cores that this process may use, the default of ``--workers``."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_in_zones(settings: TableSettings, output: str) -> None:
    """Raise ConfigurationError if an output would be in the landing or the processed zone of the table."""
    place = canonical_address(output)
    for zone in (settings.landing, settings.processed):
        if place.startswith(canonical_address(zone)):
            raise ConfigurationError(
                "overlapping-zones",
                f"--output {output} is inside {zone}, a zone of the table: the next run would take it for landing files, or a "
                "vacuum for its own. Nothing was written.",
                next="give an --output outside of both zones",
            )


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def canonical_address(address: str) -> str:
    """A canonical address, for comparisons: links resolved, one name per scheme, a slash at the end."""
    scheme, _, rest = address.rpartition("://")
    if scheme in ("", "file", "sqlite"):
        address = os.path.realpath(unquote(urlsplit(address).path) if scheme else address)
    elif scheme == "s3a":
        address = f"s3://{rest}"
    elif scheme in ("abfss", "abfs", "az"):
        from lakeupsert.storage import azureaccount  # imports pyarrow

        address = azureaccount.place(address)
    return address.rstrip("/") + "/"


def is_remote(address: str) -> bool:
    """Whether the address is not on a file system of this machine."""
    return "://" in address and not address.startswith("file:")


def _absolute(path: str, address: str) -> str:
    if urlsplit(address).scheme and "://" in address:
        return address
    local = Path(address).expanduser()
    if "://" in path and not local.is_absolute():
        raise ConfigurationError(
            "relative-path",
            f"{path} contains the relative path {address!r}, but a configuration read from a URL must use absolute paths.",
            next="write an absolute path, or a URL like s3://bucket/prefix",
        )
    return os.path.normpath(Path(path).parent / local)


_WHY_NOT = {
    "by_key": ' A delete that brings its key alone needs `key_scope = "table"`: its key index knows the partition of each key. '
    "Without an index such a delete would have to read all partitions."
}


def _unknown(path: str, where: str, key: str, known: set[str], place: str | None = None) -> ConfigurationError:
    """``place``: where the key would be known."""
    hint = f" It is a setting of {place}." if place else _WHY_NOT.get(key) or _did_you_mean(key, known)
    return ConfigurationError(
        "unknown-setting",
        f"{path}: {where or 'the file'} has an unknown key {key!r}.{hint}",
        next=f"move it below {place}" if place else f"correct or remove it; known keys: {', '.join(sorted(known))}",
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
