"""Propose the settings of a table from a folder of files, with the evidence for each.

Reads     the folder's listing, and sample rows of sample files (`sample`)
Writes    nothing
Repeat    safe: the same files give the same proposal

    list -> choose files -> sample rows -> folder of a table, or landing zone? -> settings (`settings`)

A setting that the sample does not show is left open, with a warning.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_date, is_string, is_timestamp

from lakeupsert.config import DeleteSettings, TableSettings, toml_key
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.landing.formats.folders import folders_of
from lakeupsert.landing.formats.inference import convert_text
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.landing.table_logs import TableLog, find_log, holds_a_table, log_above
from lakeupsert.operations.init.reading import ReadingChoices, choose_reading
from lakeupsert.operations.init.sample import Column, Sample
from lakeupsert.operations.init.settings import HIVE, SettingChoices, folder_of, folder_values
from lakeupsert.operations.init.words import Choice, is_named
from lakeupsert.phrases import no_folder
from lakeupsert.pipeline.append.discover import is_landing_file
from lakeupsert.pipeline.append.next_spec import describe_unfit
from lakeupsert.storage import LocalStore, ObjectInfo, ObjectReader, can_commit, open_landing, open_store
from lakeupsert.table.creation import create
from lakeupsert.table.layout import HOME
from lakeupsert.table.types import named_type, type_name

NO_FILES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Proposal:
    """Settings for one table.

    Attributes:
        hive: the folder holds a Hive-partitioned table, so it becomes ``processed``; otherwise it becomes ``landing``.
        settings: choices for partition_by, key, order_by, landing_dates and delete (``{"column", "values"}``).
        read: choices for settings of ``[tables.NAME.read]``; a setting that is not there keeps its default.
        schema: types that columns must be given for these settings, by column.
        bytes: of all files, of which the sample are some.
        warnings: settings that are open, uncertain or left out.
    """

    table: str
    hive: bool
    landing: str
    processed: str
    settings: dict[str, Choice]
    read: dict[str, Choice]
    schema: dict[str, str]
    columns: tuple[Column, ...]
    files: int
    of_files: int
    bytes: int
    rows: int
    warnings: tuple[str, ...]

    @property
    def open(self) -> list[str]:
        """The required settings that are left open."""
        return [name for name in ("partition_by", "key") if self.settings[name].value is None]


def propose(address: str, table: str | None = None, ended: Mapping[str, str] = NO_FILES) -> Proposal:
    """Propose settings for the landing zone or Hive-partitioned folder ``address``. ``table``: a name instead of the folder's.
    ``ended``: files that ended an earlier process, with the reasons; they are not read.

    Raises:
        ConfigurationError: it is not a folder, has no files, or is the processed zone of a lakeupsert table.
        RefusedError: none of the sample files can be read.
    """
    store = open_landing(address)
    root = store.root if isinstance(store, LocalStore) else store.uri()
    listed, log = landing_files(store, root)
    files = [f for f in listed if f.name not in ended]
    early = [f"{name!r} is not read: {why.rstrip('.')}" for name, why in ended.items()]
    if not files:
        raise _unreadable(root, early[0])
    names = [f.name for f in files]
    folders = _hive_folders(names) if can_commit(address) else None
    read = choose_reading(store, files, (), with_dates=folders is None)  # a table that exists has its types
    others = [] if folders else [name for name in _shared_folders(names) if name not in read.rows.values]
    given = [] if _has_days(read.rows) else others
    if given:
        read = choose_reading(store, files, given, with_dates=True)
    rows, warnings = read.rows, [*early, *read.failures, *read.warnings]
    if not rows.count:
        raise _unreadable(root, warnings[0] if warnings else read.describe_empty() or "they have no rows")
    hive = None if folders is None else _hive_column(folders, rows)
    if hive is not None:
        rows.values[hive] = folder_values(rows.paths).take(pa.array(rows.file))
    dated = list(read.settings["dates"].value) if "dates" in read.settings else []
    choices = SettingChoices(rows, hive, names, sum(f.size for f in files), dated, given)
    settings = choices.settings()
    warnings += _without_column([] if given else others, settings["landing_dates"])
    beside = zone_beside(root, "processed", "landing") if hive else processed_zone(address, root)
    if not hive and next(open_store(beside).list("", limit=1), None) is not None:
        warnings.append(f"{beside}, which is proposed as the processed zone, is not empty: check it")
    log = log or log_above(address)
    if log is not None:
        refused = (
            f"this folder is or holds {log}, which `lakeupsert adopt` refuses: only its log says which files are live"
        )
        warnings.insert(0, refused if hive else holds_a_table(log))
    warnings += _add_types(store, read, choices)
    schema = {**_text_keys(rows, settings["key"].value or [], choices.operation), **choices.schema}
    proposal = Proposal(
        table=table or table_name_of(root),
        hive=hive is not None,
        landing=beside if hive else root,
        processed=root if hive else beside,
        settings=settings,
        read=read.settings,
        schema=choices.schema,
        columns=tuple(_columns(rows, schema)),
        files=len(rows.paths),
        of_files=len(files),
        bytes=sum(f.size for f in files),
        rows=rows.count,
        warnings=(*warnings, *(warning for choice in settings.values() for warning in choice.warnings)),
    )
    return proposal if proposal.open else _with_check(proposal, rows)


def _unreadable(root: str, why: str) -> RefusedError:
    found = f"No row can be read in the sample files of {root}: {why}."
    return RefusedError(
        "no-readable-file", found, next="correct or remove these files, then run the same command again"
    )


def _columns(rows: Sample, schema: Mapping[str, str]) -> Iterator[Column]:
    """The columns with the types that the table has, and the least and greatest values that fit."""
    types = {name: named_type(text, name) for name, text in schema.items() if name in rows.values}
    for name, type_ in types.items():
        if is_string(rows.values[name].type):
            rows.values[name], _ = convert_text(rows.values[name], type_)
    for one in rows.columns():
        yield replace(one, type=str(types.get(one.name, one.type)))


def _text_keys(rows: Sample, key: Sequence[str], operation: str | None) -> dict[str, str]:
    """The columns that a table from these files keeps as text: key and operation, if their types are inferred."""
    if all(format_of(path, "auto").typed for path in rows.paths):
        return {}
    return {name: "string" for name in (*key, operation) if name in rows.dominant_types}


def _add_types(store: ObjectReader, read: ReadingChoices, choices: SettingChoices) -> list[str]:
    """Give a type to each column that only a few values make text, and to one of PostgreSQL's t and f. Returns warnings about
    values that do not fit."""
    key = choices.key.value or []
    warnings = []
    for name, values in read.rows.values.items():
        is_free = name not in (*key, choices.operation, *choices.schema)
        if is_free and is_string(values.type) and set(pc.unique(values.drop_null()).to_pylist()) == {"t", "f"}:
            choices.schema[name] = "boolean"
    for name, dominant in read.rows.dominant_types.items():
        if not is_string(read.rows.values[name].type) or dominant is None or not dominant.is_clear:
            continue
        if name in (*key, choices.operation) and name not in choices.schema:
            continue
        but = describe_unfit(store, dominant, read.reading)
        if name in choices.schema:
            warnings.append(
                f"column {name!r} is kept as {choices.schema[name]}, although {but}: such rows go to quarantine"
            )
            continue
        type_ = choices.schema[name] = type_name(dominant.type)
        warnings.append(
            f"column {name!r} gets the type {type_} in `schema`, although {but}: "
            f"such rows go to quarantine. To keep text instead, remove `{toml_key(name)}` from `schema` before the first run"
        )
    return warnings


# -- the folder


def landing_files(store: ObjectReader, root: str) -> tuple[list[ObjectInfo], TableLog | None]:
    """The files of a landing zone, and the log of a table of another format that lies there.

    Raises ConfigurationError if it has no files, is no folder, or is a table already.
    """
    if isinstance(store, LocalStore) and not Path(root).is_dir():
        raise ConfigurationError("no-landing", f"{root} {no_folder(Path(root))}.", next="name the folder of your files")
    if next(iter(store.list(f"{HOME}/", limit=1)), None) is not None:
        raise ConfigurationError(
            "already-a-table",
            f"{root} is the processed zone of a lakeupsert table already.",
            next="run `lakeupsert status` with its configuration to look at it; for a new table, name its landing zone",
        )
    names = list(store.list(""))
    files = [f for f in names if is_landing_file(f.name)]
    if not files:
        raise ConfigurationError(
            "no-files",
            f"{root} has no files to propose settings from (names that begin with _ or . do not count).",
            next="put some files there first, or start from `lakeupsert config --example`",
        )
    return files, find_log(f.name for f in names)


def _hive_folders(names: Sequence[str]) -> str | None:
    """The column that the names of the folders give a value, if all files are Parquet in folders of one such column."""
    matches = [HIVE.fullmatch(folder_of(name)) for name in names]
    columns = {unquote(m[1]) if m else "" for m in matches}
    if len(columns) > 1 or not all(columns) or any(format_of(n, "auto").name != "parquet" for n in names):
        return None
    return columns.pop()


def _shared_folders(names: Sequence[str]) -> list[str]:
    """The columns that folders above every file give a value, outermost first."""
    columns = [dict(folders_of(name)) for name in names]
    return [column for column in columns[0] if all(column in one for one in columns)]


def _without_column(names: Sequence[str], landing_dates: Choice) -> list[str]:
    """A warning about each column of folders that neither the table nor `landing_dates` has."""
    return [
        f"the folders {name}=… give the table no column: to have it, name it in [tables.….schema]"
        for name in names
        if f"{name}=" not in (landing_dates.value or "")
    ]


def _has_days(rows: Sample) -> bool:
    """Whether rows have days of their own: then folders of dates are days of arrival."""
    return any(
        is_date(values.type) or (is_timestamp(values.type) and not is_named(name, "arrival", "other"))
        for name, values in rows.values.items()
    )


def _hive_column(column: str, rows: Sample) -> str | None:
    """The ``column`` of the folders' names, if the files are those of a Hive-partitioned table.

    A folder like `dt=2020-01-31` of a landing zone is the day of arrival: then the rows have a date of their own.
    """
    arrival = column.lower() in ("dt", "ds") or is_named(column, "arrival")
    dates = any(is_date(values.type) for values in rows.values.values())
    return None if column in rows.values or (arrival and dates) else column


def table_name_of(root: str) -> str:
    """The table's name by the name of its folder."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", Path(root).name) or "table"


def processed_zone(landing: str, root: str) -> str:
    """Where a table may be whose landing zone is at the address ``landing``, with the root ``root``."""
    return zone_beside(root, "landing", "processed") if can_commit(landing) else str(Path("processed").absolute())


def zone_beside(root: str, word: str, other: str) -> str:
    """A place for the other zone: `/lake/processed/sales` for `/lake/landing/sales`, otherwise beside it under another name."""
    scheme, mark, rest = root.rpartition("://")
    path = PurePosixPath(rest)
    if path.name == word:
        return f"{scheme}{mark}{path.with_name(other)}"
    if path.parent.name == word:
        return f"{scheme}{mark}{path.parent.with_name(other) / path.name}"
    return f"{root}-{other}"


def _with_check(proposal: Proposal, rows: Sample) -> Proposal:
    """The proposal, with a warning if a table can't be created with these settings."""
    value = {name: choice.value for name, choice in proposal.settings.items()}
    types = {name: values.type for name, values in rows.values.items()}
    types |= {name: named_type(text, name) for name, text in proposal.schema.items()}
    try:
        settings = TableSettings(
            landing="",
            processed="",
            key=tuple(value["key"]),
            order_by=tuple(value["order_by"]),
            partition_by=tuple(value["partition_by"]),
            delete=DeleteSettings(**value["delete"]) if value["delete"] else None,
        )
        create(pa.schema(list(types.items())), settings, table_id="", stamped=value["order_by"][0] not in types)
    except LakeupsertError as e:
        warning = f"the table can't be created with these settings yet: {e.message} {e.next}"
        return replace(proposal, warnings=(*proposal.warnings, warning))
    return proposal
