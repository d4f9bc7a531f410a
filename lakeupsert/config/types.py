"""The settings of `lakeupsert.toml` as frozen types: `[tables.NAME]`, its sections, and hooks."""

import os
import re
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Literal

import msgspec

from lakeupsert.config.publishers import PUBLISHERS, PublisherName

Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
VectorPlace = Literal["file", "inline"]
DeltaTimestamps = Literal["naive", "utc"]
FormatVersion = Literal[2, 3]
Hook = str | Names
"""The address of a webhook, or a command with its arguments."""
Format = Literal["auto", "parquet", "csv", "delimited", "jsonl", "avro", "orc"]
EnvelopeName = Literal["debezium", "dms", "wal2json", "singer", "airbyte"]
POSITIONED = ("debezium", "wal2json")
"""The envelopes with events of which some have a place in the database's log."""
DecimalSeparator = Literal[".", ","]
TEXT_FORMATS = ("postgresql", "mysql", "hive")
"""The values of `read.escape` that name a database's text format instead of a character."""
QUARANTINE_FLOOR = 10
"""Up to this many refused rows, a share in `quarantine_limit` does not apply. It does apply to a table's first batch, and if all
rows are refused."""
LONGEST = timedelta(days=36_500)
"""The longest duration of a setting. To keep something forever, leave the setting out."""
LEAST_BUCKET = 1 << 10
"""Minimum of `bucket` in bytes. A bucket's file has more bytes than that besides its rows (`datafiles.BARE_BYTES`), and no
bucket is split for less, so a smaller value would have no effect."""


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
    """The character before the fraction of a number, in CSV and delimited text."""
    dialects: tuple[DialectSettings, ...] = ()
    """More dialects of CSV. A file has the one whose delimiter cuts its first record into the most fields."""
    dates: dict[str, str | tuple[str, ...]] = {}
    """Dates and timestamps in text, by the table's columns: one or more formats of strptime. A value that several formats read
    differently is refused."""
    envelope: EnvelopeName | None = None
    """The envelope around each row of JSON lines; Debezium's also in Avro."""
    only: dict[str, str | tuple[str, ...]] = {}
    """If the files have rows of several tables: a column and its texts in this table's rows, for example
    ``{ __source_table = "orders" }``. Other rows are skipped and counted."""
    aliases: dict[str, str] = {}
    """Column names in landing files and the table's names for them, for example ``{ price = "unit_price" }``."""


class Reading(ReadSettings, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that, with a landing file's name, decides which rows the file has. Each batch keeps its own in the ledger."""

    format: Format = "auto"
    positions: bool = False
    """Whether events get the column `__log_position` (`POSITIONED`)."""
    types: bool = False
    """Whether the `schema` part of an event of Debezium states types."""
    folders: tuple[str, ...] = ()
    """The columns that folders `name=value` give to files that lack them. In a ledger entry: only the columns of its folders."""

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
"""The pattern of each directive of a date format, as in strptime, in upper and lower case."""
TIME_DIRECTIVES = frozenset("HIMSfpz")


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
    """In place of `column` and `values`: a column that has a value only in deletes, for example Singer's ``_sdc_deleted_at``."""

    @property
    def operation(self) -> str | None:
        """The column that decides which rows are deletes."""
        return self.column or self.not_null


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.groups.GROUP]``, for mode columns: columns from another source, with their own ordering columns."""

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


AUDIT_PUBLISHED = "published"
"""In the queries of an audit, the table that readers see now."""


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME.audit]``: queries that must find no row in what readers are to see next, or it is not published."""

    queries: dict[str, str]
    """A name for each SELECT in DuckDB's SQL. The next snapshot has the table's own name there; what readers see until then is
    the table ``published``."""
    files: dict[str, str] = {}
    """CSV files with a header, for example of control totals, each with the name that it has in the queries."""


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
    """The format version of the Iceberg table. 3 needs a REST catalog."""

    @property
    def catalog_name(self) -> str:
        return self.catalog if isinstance(self.catalog, str) else self.catalog.get("name", "default")

    @property
    def properties(self) -> dict[str, str]:
        """Properties of the catalog, in addition to pyiceberg's own configuration."""
        return {} if isinstance(self.catalog, str) else {k: v for k, v in self.catalog.items() if k != "name"}


class TableSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[tables.NAME]``: four settings are required, the others have defaults that suit most tables."""

    landing: str
    """The folder or address where files arrive."""
    processed: str
    """The folder or address of the table."""
    key: Names
    """The columns that identify a row. If several rows of a partition have the same key, the newest stays."""
    partition_by: tuple[str, ...]
    """The partition columns: columns of the files, or for example ``date(created_at) as day`` or ``bucket(64, order_id)``. Empty:
    the table is one partition."""
    order_by: Names = ("record_timestamp",)
    """As in a window's ORDER BY, by default ``desc nulls last``. If landing files lack the column, it is stamped on receipt."""
    order_in_name: str | None = None
    """Pattern whose group finds the ordering column's value in the names of landing files, for example ``_(\\d+)\\.``."""
    ties: Literal["arrival", "content"] = "arrival"
    """If ordering values are equal, the later row wins (``arrival``), or the row with the greater content (``content``)."""
    mode: Literal["rows", "columns"] = "rows"
    """``columns``: a record changes only the columns that it has; the others keep their values."""
    nulls: Literal["overwrite", "keep"] = "overwrite"
    """For mode columns: whether a null in a record replaces a value."""
    groups: dict[str, GroupSettings] = {}
    key_scope: Literal["partition", "table"] = "partition"
    """Whether a key has one row per partition, or one row in the table. With ``table``, a record for another partition moves the
    row."""
    erased_keys: Literal["admit", "refuse"] = "admit"
    """Whether rows that land later with a key that `erase` has erased come in as others do, or are left out."""
    unknown_deletes: Literal["keep", "quarantine"] = "keep"
    """With `key_scope = "table"`: what to do with a delete that has only its key, if the key has no record. ``keep``: keep it, so
    that older records of the key lose in every partition. ``quarantine``: refuse it."""
    history: bool = False
    """Keep superseded versions of rows. Readers of the history see when each version was valid."""
    versions: bool = False
    """Store with each row its batch. Readers can then ask for the batch, and for the time when it was received."""
    full_extract: Literal["merge", "replace"] = "merge"
    """``merge``: rows of a full extract compete with stored rows by their order. ``replace``: they replace everything before."""
    format: Format = "auto"
    """The format of the landing files. ``auto``: by each file's name."""
    read: ReadSettings = ReadSettings()
    landing_dates: str = ""
    """strftime pattern of the first folders below landing, for example ``%m/%d/%Y``. Empty: all files below it."""
    queue: str = "auto"
    """A file for SQLite, ``sqs://QUEUE`` or ``azqueue://ACCOUNT/QUEUE``. ``auto``: a file in the table's folder."""
    engine: Literal["arrow", "spark"] = "arrow"
    """The program that merges."""
    strategy: Literal["auto", "rewrite", "delta"] = "auto"
    """A merge writes the whole partition (``rewrite``) or a delta file. ``auto`` chooses for each partition."""
    bucket: str | int = "256MiB"
    """Compressed bytes of base files above which a partition is split into buckets. Each bucket is merged separately, so memory
    use follows this size."""
    on_failed_partition: Literal["hold", "skip"] = "hold"
    """``hold`` publishes nothing newer while a partition fails; ``skip`` publishes, and lists the partition as lagging."""
    quarantine_limit: str | int = "1%"
    """Refused rows, as a number or a share, above which a batch is refused as a whole."""
    keep_snapshots: Annotated[int, msgspec.Meta(ge=1)] = 7
    """How many snapshots ``vacuum`` keeps, in addition to snapshots with a tag."""
    superseded_retention: str = "24h"
    """How long ``vacuum`` keeps files that no kept snapshot needs, for example ``24h`` or ``7d``."""
    tombstone_retention: str | None = None
    """How long deleted keys are known; by default forever. A row that arrives even later goes to quarantine (`below_floor`)."""
    publishers: tuple[PublisherName, ...] = ()
    """Formats in which other engines read the table. Each publish updates them to its snapshot."""
    delta_vectors: VectorPlace = "file"
    """Keep deletion vectors of the Delta log in files, or inline in the log, which delta-rs and Polars need if there are many."""
    delta_timestamps: DeltaTimestamps = "naive"
    """Show times without a zone to readers of Delta as they are, or as instants in UTC, which Fabric and BigQuery need."""
    iceberg: IcebergSettings | None = None
    schema: dict[str, str] = {}
    """Types of columns, by Spark's or Arrow's names. Other columns get theirs from the first batch."""
    delete: DeleteSettings | None = None
    audit: AuditSettings | None = None
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
        return duration(self.superseded_retention)

    @property
    def tombstones_kept(self) -> int | None:
        """`tombstone_retention`, in microseconds."""
        kept = self.tombstone_retention
        return None if kept is None else duration(kept) // timedelta(microseconds=1)

    @property
    def one_name_in_files(self) -> bool:
        """Whether a renamed column keeps its name in data files, for engines that look for one name in all of them.

        Otherwise files that are written later have the new name, which is what readers of folders expect.
        """
        return any(PUBLISHERS[name].by_name for name in self.publishers)

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


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Hooks that `lakeupsert run` calls at its end, with the object of `--json` as body or on standard input.

    The values are as they are written: `${VAR}` is replaced when a hook is called, so that no command prints a secret.
    """

    on_success: Hook | None = None
    """Called after a run with exit code 0: an https or http address, or a command as a list of arguments."""
    on_failure: Hook | None = None
    """Called after a run with any other exit code: an https or http address, or a command as a list of arguments."""


def duration(text: str) -> timedelta:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    return timedelta(**{units[text[-1]]: int(text[:-1])})


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


SECTIONS: dict[str, type[msgspec.Struct]] = {"": TableSettings, "delete": DeleteSettings, "read": ReadSettings}
SECTIONS |= {
    "audit": AuditSettings,
    "large": LargeSettings,
    "iceberg": IcebergSettings,
    "hive": HiveSettings,
    "glue": GlueSettings,
}
"""The classes of ``[tables.NAME]`` and of its sections."""
HOOKS = tuple(Hooks.__struct_fields__)
