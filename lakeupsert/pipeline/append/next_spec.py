"""The spec that a batch is written under, and the warnings about it.

Reads     the configuration, surveys of landing files, and for some warnings the files themselves
Writes    nothing
Repeat    safe
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import pyarrow as pa

from lakeupsert.config import Reading, rename_aliases, toml_aliases, toml_key
from lakeupsert.engine.reports import FileFailed, FileRead, Report
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.files import Survey
from lakeupsert.landing.formats.dates import is_dated
from lakeupsert.landing.formats.dominant import DominantType, combine
from lakeupsert.landing.formats.folders import folder_values
from lakeupsert.landing.formats.inference import known_part, unify
from lakeupsert.landing.formats.positions import LOG_POSITION
from lakeupsert.landing.glimpse import line_of
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.quarantine_limit import truncated
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.open_columns import Types, fitted_types, known_types, open_parts
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.rows.convert import texts_like
from lakeupsert.storage import ObjectReader
from lakeupsert.table.evolution import evolve, is_retypable
from lakeupsert.table.group import FEATURE
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.misnamed import did_you_mean
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import normalize, same_values, type_name, widen


def plan_spec(
    table: OpenTable, known: TableSpec | None, surveys: Sequence[Survey], *, ahead: bool = False, fitted: bool = False
) -> tuple[TableSpec, list[str]]:
    """The spec that a batch is written under, and warnings. It is ``known`` itself if no column came or grew.

    Columns grow to the types that the files have, and to those given in the configuration. ``ahead``: the warnings are about a
    batch that is only planned. ``fitted``: a new table's columns have types that its settings accept (`fitted_types`).
    """
    names, given = table.declaration.given_types(known.schema.names if known is not None else ())
    if known is not None:
        _refuse_other_keys(table, known, given)
    observed = _observed_types(known, surveys, names, table.history.reading)
    if known is None:
        observed = fitted_types(table.declaration, observed, given) if fitted else observed
        return _first_spec(table, surveys, observed, given, ahead=ahead)
    own = {field.name: field.type for field in known.schema}
    grown = {name: part for name in observed if name in own and (part := known_part(observed[name])) is not None}
    new = known_types(table.declaration, {name: type_ for name, type_ in observed.items() if name not in own}, given)
    found = grown | new
    fields = [(name, found[name]) for name in observed if name in found]
    spec = evolve(known, pa.schema([*fields, *((name, type_) for name, type_ in given.items() if name in own)]))
    if table.history.previews.wanted and FEATURE not in spec.requires:
        table.history.previews.forget()
        spec = msgspec.structs.replace(spec, requires=(*spec.requires, FEATURE))
    warnings = [
        *open_parts(table.declaration, observed, given, own, ahead=ahead),
        *_renamed_at_the_source(table.declaration, known, spec, surveys),
        *_text_by_few(table, known, spec, surveys, given, ahead=ahead).values(),
        *_types_without_effect(table, spec, given),
        *_misspelt_types(table.declaration, spec, given),
        *_dates_without_effect(table.declaration, spec),
        *_aliased_columns(table.declaration, spec),
        *_delete_values_without_effect(table.name, spec, surveys),
    ]
    return spec, warnings


def fruitless_files(
    table: OpenTable,
    known: TableSpec | None,
    spec: TableSpec,
    undecided: Sequence[Survey],
    planned: Sequence[Survey],
    reports: Iterable[Report],
) -> list[str]:
    """Those of the ``undecided`` files that have no accepted row and without which the spec would be another one.

    ``planned`` are the surveys that ``spec`` was planned with. A new table of which no row is accepted keeps the columns that its
    files have, since it needs some. So do columns without which the table can't be created.
    """
    accepted = {r.path for r in reports if isinstance(r, FileRead) and r.accepted}
    fruitless = [s.path for s in undecided if s.path not in accepted]
    if not fruitless or (known is None and not accepted):
        return []
    try:
        same = is_planned_by(table, known, spec, [s for s in planned if s.path not in fruitless])
    except (ConfigurationError, RefusedError):
        return []
    return [] if same else fruitless


def is_planned_by(table: OpenTable, known: TableSpec | None, spec: TableSpec, surveys: Sequence[Survey]) -> bool:
    """Whether `plan_spec` gives this spec for these files, too. Raises what it does."""
    # Without dominant_types: their warnings read landing files, and are not wanted here.
    other, _ = plan_spec(table, known, [replace(s, dominant_types={}) for s in surveys])
    return other is spec or msgspec.structs.replace(other, table_id=spec.table_id) == spec


def unfit_files(known: TableSpec, surveys: Sequence[Survey]) -> Iterable[FileFailed]:
    """Files with a column that the table can't have, for example one that differs from a stored column only in case."""
    for survey in surveys:
        if survey.schema is not None:
            try:
                evolve(known, survey.schema)
            except ConfigurationError as e:
                yield FileFailed(survey.path, changed=False, reason=e.message)


def describe_unfit(store: ObjectReader, dominant: DominantType, reading: Reading) -> str:
    """How many values of a column do not fit the type that most of them have, and where the first of these is."""
    unfit = dominant.first_unfit
    assert unfit is not None, "the dominant is clear"
    line = line_of(store, unfit, reading)
    value = unfit.value if len(unfit.value) <= 40 else f"{unfit.value[:37]}..."
    where = f"{value!r} in {unfit.path!r}" + (f" line {line:,}" if line else "")
    type_ = type_name(dominant.type)
    if dominant.unfit == 1:
        return f"1 of {dominant.values:,} values is not of type {type_} ({where})"
    return f"{dominant.unfit:,} of {dominant.values:,} values are not of type {type_} (the first is {where})"


def under_old_names(table: OpenTable, files: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A warning for each renamed column that landing files still bring under its old name.

    ``files`` are paths, each with its `FileRead.renamed`.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for path, renamed in files:
        for names in renamed.items():
            found.setdefault(names, set()).add(path)
    reading, aliases = table.history.reading, dict(table.settings.read.aliases)
    for own, new in found:
        aliases = rename_aliases(aliases, reading.table_name_of(own), new)
    return [
        f"column {new!r} is null in the rows of {_files(paths)}: it was renamed from {reading.table_name_of(own)!r}, and these "
        f"files still have {_old_name(own, reading)}, which is now a separate column; set `{toml_aliases(aliases)}` under "
        f"[tables.{table.name}.read] before the next files come"
        for (own, new), paths in found.items()
    ]


def contrary_rows(declaration: Declaration, entries: Iterable[LedgerEntry]) -> list[str]:
    """A warning for each column in which rows of these batches have another value than their folder says."""
    counts = sum((Counter(entry.contrary) for entry in entries), Counter[str]())
    return [
        f"column {name!r}: {count(number, 'row')} {'has' if number == 1 else 'have'} another value than the folder {name}=… of "
        f"the landing file; the row's own value counts. If the folder is the day of arrival, say so by `landing_dates` in "
        f"[tables.{declaration.name}]"
        for name, number in counts.items()
        if name.lower() not in declaration.arrival_folders
    ]


def _renamed_at_the_source(
    declaration: Declaration, known: TableSpec, spec: TableSpec, surveys: Sequence[Survey]
) -> list[str]:
    """A warning for files with a new column that lack an old one: it may be the same column under another name."""
    # An old name that comes again is told by `under_old_names`.
    before = {*known.schema.names, *(one.name for one in known.renames)}
    in_no_file = {one.column for one in known.partition_from} | set(
        known.order_by if known.stamped or known.order_in_name else ()
    )
    renamed = {known.names_by_id.get(one.id) for one in known.renames}
    aliased = {alias.lower() for alias in declaration.settings.read.aliases}  # `_aliased_columns` of these
    told = {name for name in known.schema.names if name in renamed or name.lower() in aliased}
    expected = [n for n in known.schema.names if n not in in_no_file | told] if known.mode == "rows" else []
    found: dict[tuple[str, str], set[str]] = {}
    for survey in surveys:
        names = {spec.table_name_of(name) for name in survey.schema.names} if survey.schema is not None else set()
        added = names - before
        new = [name for name in spec.schema.names if name in added]
        lacking = [name for name in expected if name not in names]
        if new and lacking:
            found.setdefault((", ".join(map(repr, new)), ", ".join(map(repr, lacking))), set()).add(survey.path)
    return [
        f"{new}, which the table did not have, came in {_files(paths)} without {lacking}: if that is the new name of an old "
        f"column, `aliases` under [tables.{declaration.name}.read] makes them one"
        for (new, lacking), paths in found.items()
    ]


def without_operations(table: OpenTable, entries: Sequence[LedgerEntry]) -> list[str]:
    """A warning if no file of ``entries``, which are all of the ledger, had the column that `[delete]` names."""
    batches = {number: e.operations for number, e in enumerate(entries) if e.operations is not None}
    if not batches or any(batches.values()):
        return []
    spec = table.history.spec(entries[-1].spec_version)
    column = spec.delete.operation or "" if spec.delete else ""
    return [
        f"no file since batch {min(batches)} has the column {column!r} of [tables.{table.name}.delete], so it deletes nothing."
        f"{did_you_mean(column, spec.schema.names)} If the name is wrong, correct it and create the table again: "
        "it is fixed when a table is created."
    ]


def _observed_types(
    known: TableSpec | None, surveys: Sequence[Survey], names: Mapping[str, str], reading: Reading
) -> dict[str, pa.DataType]:
    """The types that columns have in the files; ``names`` are the columns' names by their lower-case names."""
    called = dict(names)
    observed: dict[str, pa.DataType] = {}
    types = dict(zip(known.schema.names, known.schema.types, strict=True)) if known is not None else {}
    for survey in surveys:
        if survey.schema is None:
            continue
        in_folders = folder_values(survey.path, reading)
        for field in survey.schema:
            name = called.setdefault(field.name.lower(), field.name)
            typed = survey.typed and name not in in_folders
            stored = types.get(name)
            grows = stored is None or pa.types.is_nested(stored) or pa.types.is_decimal(stored)
            if not typed and not grows:
                continue  # text has no types of its own: values that do not convert are quarantined
            before = observed.get(name)
            observed[name] = field.type if before is None else unify(before, field.type, typed=typed)
    return observed


def _first_spec(
    table: OpenTable, surveys: Sequence[Survey], observed: Types, given: Types, *, ahead: bool
) -> tuple[TableSpec, list[str]]:
    """The spec of a new table, and warnings."""
    declaration = table.declaration
    flaws = [f"{table.resources.landing.uri(s.path)}, {s.flaw}" for s in surveys if s.flaw]
    truncates = [s for s in surveys if s.flaw and s.flaw.truncate is not None]
    if truncates and not observed:
        raise truncated(table.name, f"{truncates[0].path}, {truncates[0].flaw}.")
    try:
        fields = [pa.field(*one) for one in known_types(declaration, observed, given).items()]
    except ConfigurationError:
        _refuse_without_rows(table.name, flaws)
        raise
    later = [pa.field(name, type_) for name, type_ in given.items() if name not in observed]
    if not fields and not later and table.settings.read.envelope:
        raise ConfigurationError(
            "no-envelope",
            f"No readable file of table {table.name!r} holds a row in the envelope that `read.envelope` names, "
            f"{table.settings.read.envelope}.{f' The first is {flaws[0]}.' if flaws else ''} Nothing was committed.",
            next=f"correct `envelope` in [tables.{table.name}.read], or leave it out if the rows are not wrapped",
        )
    if not fields:
        _refuse_without_rows(table.name, flaws)
    if not fields:  # files without a line have no columns: only the given ones are known
        fields, later = later, []
    spec = declaration.new_spec(pa.schema(fields), later)
    text = {f.name for f in spec.schema if pa.types.is_string(f.type)} - given.keys() - {LOG_POSITION}
    by_few = _text_by_few(table, None, spec, surveys, given, ahead=ahead)
    guessed = {n for s in surveys if s.schema is not None and not s.typed for n in s.schema.names if n not in s.stated}
    undated = text & set(map(spec.table_name_of, guessed)) - by_few.keys()
    warnings = [
        *declaration.stamped_by_name(spec),
        *declaration.types_alone(observed, [field.name for field in later]),
        *open_parts(declaration, observed, given, {}, ahead=ahead),
        *(
            f"ordering column {n!r} is text and compared as text: '9' is above '10'"
            for n in spec.order_by
            if n in text - {LOG_POSITION}
        ),
        *(
            f"partition column {n!r} is kept as text, since not every value is a date; if it should be one, remove "
            f'{table.settings.processed}, set `{toml_key(n)} = "date"` in [tables.{table.name}.schema], and run again'
            for n in spec.partition_by
            if n in undated
        ),
        *by_few.values(),
        *_dates_without_effect(table.declaration, spec),
        *_aliased_columns(table.declaration, spec),
        *_delete_values_without_effect(table.name, spec, surveys),
    ]
    return spec, warnings


def _refuse_without_rows(name: str, flaws: Sequence[str]) -> None:
    """Refuse files of which no record can be read; ``flaws`` are the first ones of such files."""
    if flaws:
        raise RefusedError(
            "no-readable-file",
            f"Table {name!r} can't be created: no landing file has a row that can be read. The first is {flaws[0]}. "
            "Nothing was committed.",
            next="correct or remove these files, or the settings that say how they are read, then run `lakeupsert run` again",
        )


def _text_by_few(
    table: OpenTable, known: TableSpec | None, spec: TableSpec, surveys: Sequence[Survey], given: Types, *, ahead: bool
) -> dict[str, str]:
    """By column, a warning for each one that a few values make text."""
    own = known.schema.names if known is not None else ()
    columns = {f.name for f in spec.schema if pa.types.is_string(f.type)}
    columns -= {*own, *given, *table.declaration.text_columns}
    known_names = (n for s in surveys if s.schema is not None for n in (s.schema.names if s.typed else s.stated))
    columns -= set(map(spec.table_name_of, known_names))
    dominant_types: dict[str, DominantType | None] = {}
    for survey in surveys:
        for column, more in survey.dominant_types.items():
            name = spec.table_name_of(column)
            dominant_types[name] = combine(dominant_types.get(name), more)
    warnings = {}
    for name in spec.schema.names:
        dominant = dominant_types.get(name) if name in columns else None
        if dominant is not None and dominant.is_clear:
            unfit = describe_unfit(table.resources.landing, dominant, table.history.reading)
            type_ = type_name(dominant.type)
            setting = f'`{toml_key(name)} = "{type_}"` under [tables.{table.name}.schema]'
            if ahead:
                repair = f"to keep the type, set {setting} before the run"
            elif is_retypable(spec, name):
                repair = f"to change that, `lakeupsert schema retype {shlex.join([name, type_])}`"
            elif known is None:
                repair = f"to change that, remove {table.settings.processed}, set {setting} and run again"
            else:
                repair = f"to change that, `lakeupsert schema drop {name}`, set {setting} and land the files under other names"
            verb = "will be" if ahead else "is"
            warnings[name] = f"column {name!r} {verb} text: {unfit}; {repair}: then such rows go to quarantine"
    return warnings


def _refuse_other_keys(table: OpenTable, known: TableSpec, given: Types) -> None:
    for name in known.stored_key:  # a partition column is not part of a key's bytes
        type_, where = known.schema.field(name).type, f"[tables.{table.name}.schema]"
        own, other = type_name(type_), type_name(given[name]) if name in given else ""
        if name in given and not same_values(type_, given[name]):
            raise ConfigurationError(
                "key-type-fixed",
                f"The key column {name!r} is {own} in table {table.name!r}, and {where} says {other}. A key's type is "
                "fixed when a table is created. Nothing was committed.",
                next=f"remove {name!r} from {where}, or create a table with another name and `processed`",
            )


def _types_without_effect(table: OpenTable, spec: TableSpec, given: Types) -> list[str]:
    """A warning for each type in the configuration that the stored type neither holds nor grows to."""
    stored = dict(zip(spec.schema.names, spec.schema.types, strict=True))
    types = {name: stored[name] for name in given if name in stored}
    return [
        f"column {name!r} stays {type_name(type_)}: [tables.{table.name}.schema] says {type_name(given[name])}, and "
        f"{type_name(type_)} can't be widened to that; rows with values that do not fit {type_name(type_)} go to quarantine"
        for name, type_ in types.items()
        if not same_values(widen(normalize(given[name]), type_), type_)
    ]


def _dates_without_effect(declaration: Declaration, spec: TableSpec) -> list[str]:
    """A warning for each column under `read.dates` that the table has in another type, or does not have."""
    where, warnings = f"`dates` under [tables.{declaration.name}.read]", []
    for column in declaration.settings.read.dates:
        name = spec.table_name_of(column)
        if name not in spec.schema.names:
            hint = did_you_mean(column, spec.schema.names)
            warnings.append(f"the table has no column {column!r}, to which {where} gives formats.{hint}")
        elif not is_dated(spec.schema.field(name).type):
            type_ = type_name(spec.schema.field(name).type)
            warnings.append(f"{where} has no effect on column {name!r}, which is {type_} in the table")
    return warnings


def _misspelt_types(declaration: Declaration, spec: TableSpec, given: Types) -> list[str]:
    """A warning for each type in the configuration that is given to a misspelt column."""
    names = set(spec.schema.names)
    absent = [name for name in given if name not in names]
    return [
        f"the table has no column {name!r}, to which [tables.{declaration.name}.schema] gives a type. Did you mean {close!r}?"
        for name, close in declaration.misspelt_columns(spec.schema.names, absent).items()
    ]


def _aliased_columns(declaration: Declaration, spec: TableSpec) -> list[str]:
    """A warning for each column of the table whose values `aliases` put into another column.

    There is none if that other column was renamed from it: files still had the old name, which became a column of its own,
    and the alias puts its values back.
    """
    names = {id_: name.lower() for id_, name in spec.names_by_id.items()}
    renamed = {(one.name.lower(), names[one.id]) for one in spec.renames if one.id in names}
    own = {
        name.lower(): name for name in (*spec.schema.names, *([spec.delete.operation] if spec.delete else [])) if name
    }
    return [
        f"column {own[alias.lower()]!r} gets no value from landing files: `aliases` under [tables.{declaration.name}.read] put "
        f"their {alias!r} into the column {column!r}; if that is wrong, remove this alias and land the files that came since "
        "then under other names"
        for alias, column in declaration.settings.read.aliases.items()
        if alias.lower() in own and (alias.lower(), column.lower()) not in renamed
    ]


def _delete_values_without_effect(name: str, spec: TableSpec, surveys: Sequence[Survey]) -> list[str]:
    """A warning for each type of the operation column in typed files whose texts never equal any of `delete.values`."""
    rule = spec.delete
    if rule is None or rule.column is None:
        return []
    paths: dict[pa.DataType, list[str]] = {}
    for survey in surveys:
        for field in survey.schema if survey.typed and survey.schema is not None else ():
            if field.name.lower() == rule.column.lower() and not pa.types.is_nested(field.type):
                paths.setdefault(field.type, []).append(survey.path)
    warnings = []
    for type_, of_type in paths.items():
        alike = texts_like(rule.values, type_)
        if pa.types.is_null(type_) or any(text == value for text, value in zip(alike, rule.values, strict=True)):
            continue
        values = ", ".join(map(repr, rule.values))
        instead = ", ".join(repr(text) for text in alike if text is not None)
        warnings.append(
            f"column {rule.column!r} deletes nothing in {_files(of_type)}: its type is {type_} there, and the text of such a "
            f"column is never one of the values of [tables.{name}.delete], {values}"
            f"{f'; they would be {instead} there' if instead else ''}. Values are fixed when a table is created: land the files "
            "with another type in that column, or create the table with other values"
        )
    return warnings


def _old_name(own: str, reading: Reading) -> str:
    old = reading.table_name_of(own)
    return "the old name" if old == own else f"{own!r}, an alias of {old!r}"


def _files(paths: Collection[str]) -> str:
    return f"{min(paths)!r}" if len(paths) == 1 else f"{len(paths)} files, the first of them {min(paths)!r}"
