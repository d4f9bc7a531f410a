"""Phase one: take every landing file that no batch took, as one batch.

Reads     the landing zone's listing and files, the ledger, the spec
Writes    appended and quarantine files under names of their own, then (where columns came) the next spec, then ONE ledger
          entry: that put is the commit and the acknowledgement; then a message for each touched partition
Repeat    safe: a landing file counts once, by path and content; a crash before the ledger entry leaves files that nobody names

    list -> survey -> plan the spec -> row work -> spec -> ledger entry -> messages
      ^                                   |          |          |
      '-- a file failed: go on without it-'          '-- race lost: discard, begin again, or take the next number
"""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from lakeupsert import clock
from lakeupsert.config import Reading, followed, toml_aliases, toml_key
from lakeupsert.engine.batch import AppendJob, quarantine_files
from lakeupsert.engine.hosts import Host
from lakeupsert.engine.reports import FileFailed, FileRead, Refused, Report, Written, touched_by
from lakeupsert.engine.settle import in_several_partitions
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.landing.accept import RowRules
from lakeupsert.landing.files import Survey, content_hash, format_of, line_of
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput
from lakeupsert.landing.formats.dominant import Leaning, together
from lakeupsert.landing.formats.inference import unify, without_nulls
from lakeupsert.pipeline.key_places import placed
from lakeupsert.pipeline.landing_dates import Skipped, is_stray, received_on, skipped
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import Message
from lakeupsert.rows.convert import texts_like
from lakeupsert.rows.floor import greatest
from lakeupsert.storage import LocalStore, ObjectInfo, ObjectStore, open_store
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.evolution import evolve
from lakeupsert.table.ledger import (
    NOTHING,
    FullExtract,
    LandingFile,
    LedgerEntry,
    QuarantineFile,
    Scope,
    SeenFile,
    counting,
    next_stamp,
    taken,
)
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import normal, same_values, type_name, widened

log = logging.getLogger(__name__)

ATTEMPTS = 20
_IGNORED_STARTS = ("_", ".")
_IGNORED_ENDS = (".tmp", ".crc", "._COPYING_")

MOST_SHRINKING = 0.4
"""By how much fewer rows than are stored a full extract may have, unless it is told that it may shrink the table."""
COMPARED_BYTES = 8 << 20
"""Landing bytes of which all keys are looked for in several partitions; of more, some stand for all. More: the driver holds 8
bytes for each of these keys."""


@dataclass(frozen=True)
class AppendResult:
    """The batch that was committed; ``warnings`` are for people.

    Attributes:
        scattered: see `batch.in_several_partitions`.
        examples: of each reason for which rows were refused one of these, for people.
    """

    number: int
    entry: LedgerEntry
    warnings: tuple[str, ...]
    scattered: int = 0
    examples: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class _Ground:
    """What one try stands on: the heads that it read, and what it found new against them."""

    head: Link[LedgerEntry] | None
    spec_head: Link[TableSpec] | None
    inputs: tuple[LandingInput, ...]
    seen: tuple[SeenFile, ...]
    batch_id: str
    received_at: int
    skipped: Skipped | None
    full: Scope | None = None
    may_shrink: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        return (str(self.skipped),) if self.skipped else ()


class _FilesFailed(Exception):
    """Landing files that this try must go on without."""

    def __init__(self, failed: Iterable[FileFailed]) -> None:
        self.failed = list(failed)


class _Fruitless(Exception):
    """Files of which no row was accepted brought columns or types, which come with accepted rows alone."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = list(paths)


class _BeginAgain(Exception):
    """The heads are no longer those that this try stands on.

    ``discard``: no ledger entry can name its files, so they may go (G6: only after *lost*, never after *unknown*).
    """

    def __init__(self, *, discard: bool) -> None:
        self.discard = discard


def append(
    table: OpenTable,
    host: Host,
    *,
    batch_id: str | None = None,
    received: tuple[date | None, date | None] = (None, None),
    again: bool = False,
    full: Scope | None = None,
    may_shrink: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = log.warning,
) -> AppendResult | None:
    """Commit one batch of all new landing files; None where there is none.

    Args:
        again: instead, take those landing files that batches took which a restore withdrew.
        batch_id: the client's name for the batch; with it a repeated call is recognised even before files are compared.
        full: the batch is a full extract of the whole table, or of the partitions that its rows are in: keys that it lacks
            are deleted there. ``may_shrink``: also where it has far fewer rows than are stored.
        received: first and last date (inclusive) of the landing folders to take, where `landing_dates` is set.
        warn: takes the warnings of a call that commits no batch; those of a batch are in the result.
    Raises:
        RefusedError: more rows were refused than `quarantine_limit` allows, or landing has files and all of them are skipped;
            nothing is committed, landing is untouched.
        ConfigurationError: the batch id belongs to other files; the landing zone is missing.
        TryAgainError: races or a silent store; nothing is lost, what was committed shows in the next call.
    """
    if full:
        _refuse_full_extract(table)
    changed: list[str] = []
    unreadable: dict[tuple[str, str], str] = {}  # by path and etag: a file that is whole by now is another one
    wider: set[str] = set()
    plans: dict[str, bool] = {}  # files that had no accepted row: whether their columns are planned all the same
    for attempt in range(ATTEMPTS):
        ground = _look(table, batch_id, received, again, changed)
        _refuse_all_skipped(table, ground)
        if not ground.inputs:
            lacking = table.without_operations(table.headers(ground.head.number)) if ground.head else []
            for warning in (*ground.warnings, *_late(changed), *([_NO_EXTRACT] if full else []), *lacking):
                warn(warning)
            return None
        if full:
            _refuse_part_of_extract(table, ground, changed)
        elif again:
            _refuse_extract_again(table, ground)
        ground = replace(ground, full=full, may_shrink=may_shrink)
        try:
            result = _try(table, host, ground, unreadable, wider, plans, progress)
        except _Fruitless as e:
            plans |= dict.fromkeys(e.paths, False)
            continue
        except _FilesFailed as e:
            changed += [f.path for f in e.failed if f.changed]
            etags = {i.path: i.etag for i in ground.inputs}
            unplanned = {
                f.path for f in e.failed if f.unplanned and (f.path not in wider or not plans.get(f.path, True))
            }
            plans |= dict.fromkeys(unplanned & plans.keys(), True)  # under the other types it has accepted rows
            unreadable |= {
                (f.path, etags[f.path]): f.reason for f in e.failed if not f.changed and f.path not in unplanned
            }
            wider |= unplanned
            continue
        except _BeginAgain:
            clock.sleep(clock.jitter(0.01 * 2 ** min(attempt, 7)))
            continue
        announce(table, result)
        return replace(result, warnings=(*ground.warnings, *result.warnings, *_late(changed)))
    raise races_exhausted(table.store.uri(), ATTEMPTS)


_NO_EXTRACT = "no landing file is new, so there is no full extract and no key is deleted; a file counts once"


def _refuse_all_skipped(table: OpenTable, ground: _Ground) -> None:
    found = ground.skipped
    if found is None or not found.is_all:
        return
    fitting = " or ".join(f"`landing_dates = {json.dumps(pattern, ensure_ascii=False)}`" for pattern in found.fitting)
    raise RefusedError(
        "landing-skipped",
        f"Table {table.name!r} took no landing file: {found} Nothing was committed.",
        next=f"set {fitting} in [tables.{table.name}] and run the same command again"
        if fitting
        else f"correct `landing_dates` in [tables.{table.name}], or move the files; then run the same command again",
    )


def _refuse_full_extract(table: OpenTable) -> None:
    if table.settings.key_scope == "table":
        raise ConfigurationError(
            "full-extract-of-keys",
            f'Table {table.name!r} has `key_scope = "table"`, and full extracts of such tables are not to be had: what an '
            "extract lacks would stay in the key index. Nothing was done.",
            next="append the files without --full, and send deletes for what is gone",
        )
    if table.settings.mode == "columns":
        raise ConfigurationError(
            "full-extract-of-columns",
            f'Table {table.name!r} has `mode = "columns"`, and full extracts of such tables are not to be had yet: what an '
            "extract lacks can't be deleted there. Nothing was done.",
            next="append the files without --full, and send deletes for what is gone",
        )


def _refuse_part_of_extract(table: OpenTable, ground: _Ground, changed: Sequence[str]) -> None:
    """Whatever is not taken of an extract would have its keys deleted."""
    why = [f"{path} changed or vanished while it was read" for path in changed]
    why += [
        f"{f.path} has the content that an earlier batch took under this name, and counts once" for f in ground.seen
    ]
    why += ground.warnings
    if why:
        more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {table.name!r}: {why[0]}{more}. The keys of what is left out would be deleted. Nothing was "
            "committed.",
            next="land the whole extract under names of its own and run the same command again; or append without --full",
        )


def _refuse_extract_again(table: OpenTable, ground: _Ground) -> None:
    taken_again = {(i.path, i.size) for i in ground.inputs}
    for link in table.headers(ground.head.number) if ground.head else ():
        if link.full and any((f.path, f.size) in taken_again for f in link.files):
            raise RefusedError(
                "full-extract-incomplete",
                f"Batch {link.batch_id} was a full extract ({link.full.scope}) before a restore withdrew it; without --full its "
                "files would be rows like others. Nothing was committed.",
                next=f"run `lakeupsert append --again --full {link.full.scope}` where no other batch is withdrawn; else "
                "land the files that are wanted under other names",
            )


def announce(table: OpenTable, result: AppendResult) -> None:
    """Send a message for each partition that the batch touches."""
    try:
        table.queue.send([Message(table.name, partition, result.number) for partition in result.entry.touched])
    except LakeupsertError as e:
        e.data_changed = True  # the batch is committed; `run` sends its messages again
        raise


def _look(
    table: OpenTable,
    batch_id: str | None,
    received: tuple[date | None, date | None],
    again: bool,
    changed: Sequence[str],
) -> _Ground:
    """The heads, and every landing file that no batch took."""
    table.last_snapshot()  # before the ledger, which then has what it shows
    head = table.ledger_head()
    spec_head = table.head_spec()  # after the ledger: an entry's spec is never newer than the one read here
    entries = table.headers(head.number, write=True) if head else []
    known = taken(entries)
    withdrawn = None
    if again:
        count = counting(enumerate(entries))
        known = taken(entry for number, entry in enumerate(entries) if number in count)
        withdrawn = taken(entry for number, entry in enumerate(entries) if number not in count)
    if head is None:
        _refuse_unadopted(table)
    hashes = {(f.path, f.size, f.etag): f.sha256 for entry in entries for f in entry.seen}
    inputs, seen, left_out = _new_files(table, known, hashes, withdrawn, received, frozenset(changed))
    same_id = next((e for e in entries if e.kind == "batch" and e.batch_id == batch_id), None)
    if same_id is not None and inputs:
        raise ConfigurationError(
            "batch-id-taken",
            f"Batch id {batch_id!r} was used for {len(same_id.files)} other files; {inputs[0].path} is not one of them. "
            "Nothing was committed.",
            next="give the new files a --batch-id of their own, or none",
        )
    if spec_head is not None and withdrawn is not None:
        _refuse_renamed(table, spec_head.body, entries, {i.path: i.etag for i in inputs})
    stamp = next_stamp(head.body if head else None)
    return _Ground(head, spec_head, inputs, seen, batch_id or clock.new_id(), stamp, left_out)


def _refuse_renamed(
    table: OpenTable, spec: TableSpec, entries: Sequence[LedgerEntry], inputs: Mapping[str, str]
) -> None:
    """Withdrawn files have the names of their time: under those of now their values would be in other columns."""
    if not spec.renames:
        return
    for entry in entries:
        then = spec.renamed_since(len(table.spec(entry.spec_version).renames))
        same = [file.path for file in entry.files if inputs.get(file.path) == file.etag]
        if then and same:
            raise ConfigurationError(
                "renamed-since",
                f"{same[0]} was read before columns were renamed or dropped ({', '.join(then)}), and would be read under the "
                "names of now: its values would be in other columns. Nothing was committed.",
                next="land these rows in a file of another name, with the columns' names of now",
            )


def new_files(table: OpenTable) -> tuple[LandingInput, ...]:
    """The landing files that the next batch would take. Raises ConfigurationError as `append` does; writes nothing."""
    return look_for_files(table)[0]


def look_for_files(table: OpenTable) -> tuple[tuple[LandingInput, ...], tuple[str, ...]]:
    """`new_files`, and warnings about the files that it would not take."""
    ground = _look(table, None, (None, None), again=False, changed=())
    return ground.inputs, ground.warnings


def skipped_files(table: OpenTable, limit: int) -> Skipped | None:
    """What to say of files that have no date by `landing_dates`, among the first ``limit`` names below landing."""
    pattern = table.settings.landing_dates
    if not pattern:
        return None
    paths = [found.name for found in table.landing.list("", limit=limit) if is_landing_file(found.name)]
    others = [path for path in paths if received_on(path, pattern) is None]
    configured = table.settings.format
    folders = {_folder(path) for path in paths if not is_stray(path, pattern, configured)}
    return skipped(pattern, configured, others, len(paths), folders)


def _refuse_unadopted(table: OpenTable) -> None:
    """A new table in a folder with data would hide them."""
    for found in table.store.list(""):
        if found.name.endswith(".parquet") and is_landing_file(found.name):
            if table.objects.ledger.head() is not None:
                return  # they are those of a table that somebody else began meanwhile
            raise ConfigurationError(
                "not-adopted",
                f"{table.store.uri()} is no table yet and holds Parquet files, such as {found.name}, which a new table would "
                "not show. Nothing was changed.",
                next="run `lakeupsert adopt` to make them the table's first batch, or name an empty folder in `processed`",
            )


def _new_files(
    table: OpenTable,
    known: dict[str, list[LandingFile]],
    hashes: dict[tuple[str, int, str], str],
    among: dict[str, list[LandingFile]] | None,
    received: tuple[date | None, date | None],
    leave_out: frozenset[str],
) -> tuple[tuple[LandingInput, ...], tuple[SeenFile, ...], Skipped | None]:
    """Landing files that no batch took (of ``among``, where it is given), those that had to be read to see that one did,
    and what to say of files that can't be taken as they are called.

    ``hashes`` by path, size and etag are of files that were read so before. The next ledger entry remembers what is read
    here; a night that brings nothing new writes none, so the night after reads the same files once more.
    """
    landing = open_store(table.settings.landing)
    if isinstance(landing, LocalStore) and not Path(landing.root).is_dir():
        raise ConfigurationError(
            "no-landing",
            f"The landing zone {landing.root} of table {table.name!r} is no folder.",
            next=f"create it, or correct `landing` in [tables.{table.name}]",
        )
    listed: list[ObjectInfo] = []
    left_out: list[str] = []
    folders: set[str] = set()
    files = 0
    pattern = table.settings.landing_dates
    for found in table.landing.list(""):
        if (
            not is_landing_file(found.name)
            or found.name in leave_out
            or (among is not None and found.name not in among)
        ):
            continue
        files += 1
        if not is_stray(found.name, pattern, table.settings.format):
            folders.add(_folder(found.name))
        day = received_on(found.name, pattern)
        if day is None:
            left_out.append(found.name)
            continue
        if pattern and not (received[0] or day) <= day <= (received[1] or day):
            continue
        if not any((f.size, f.etag) == (found.size, found.etag) for f in known.get(found.name, ())):
            listed.append(found)

    def sent(found: ObjectInfo) -> SeenFile | None:
        with suppress(ChangedFileError):  # it is left to the next batch
            content = content_hash(table.landing, found.name, found.etag)
            return SeenFile(path=found.name, size=found.size, etag=found.etag, sha256=content)
        return None

    # Same path, other etag: only the content tells whether it is the same file sent again.
    unsure = [f for f in listed if f.name in known and (f.name, f.size, f.etag) not in hashes]
    read = {f.name: file for f, file in zip(unsure, table.at_once(sent, unsure), strict=True)}
    inputs: list[LandingInput] = []
    seen: list[SeenFile] = []
    for found in listed:
        file = read.get(found.name)
        if found.name in read and file is None:
            continue
        content = file.sha256 if file else hashes.get((found.name, found.size, found.etag))
        if not any(f.sha256 == content for f in known.get(found.name, ())):
            inputs.append(LandingInput(found.name, found.size, found.etag, place=len(inputs)))
        elif file:
            seen.append(file)
    return tuple(inputs), tuple(seen), skipped(pattern, table.settings.format, left_out, files, folders)


def _late(changed: Sequence[str]) -> list[str]:
    return [f"{path} changed or vanished while it was read; it is left to the next batch" for path in changed]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def is_landing_file(path: str) -> bool:
    """Whether the name is one that `append` looks at."""
    parts = path.split("/")  # folders too: `_temporary/` holds what a Spark job has not committed
    return not any(p.startswith(_IGNORED_STARTS) for p in parts) and not parts[-1].endswith(_IGNORED_ENDS)


def _try(
    table: OpenTable,
    host: Host,
    ground: _Ground,
    failing: dict[tuple[str, str], str],
    wider: Collection[str],
    plans: Mapping[str, bool],
    progress: Callable[[str], None],
) -> AppendResult:
    """``failing``: files that can't be read, and why; ``wider``: files that have a column which the table has not; ``plans``:
    of files that had no accepted row, whether their columns are planned."""
    unreadable = {i.path: failing[i.path, i.etag] for i in ground.inputs if (i.path, i.etag) in failing}
    given = [i for i in ground.inputs if i.path not in unreadable]
    known = ground.spec_head.body if ground.spec_head else None
    schema = known.schema if known else None
    reading = table.settings.reading
    # All of a file of JSON lines would be decoded for the names of its columns, which are seldom new.
    unsure = [i for i in given if known is None or i.path in wider or format_of(i.path, reading.format) != "jsonl"]
    progress(f"surveying {len(unsure)} landing files")
    surveys = host.survey(table.landing, unsure, reading, schema, text_columns(table))
    failed = [
        FileFailed(s.path, s.changed, s.unreadable or "") for s in surveys if s.changed or s.unreadable is not None
    ]
    if known is not None:
        failed += unfit_files(known, surveys)
    if failed:
        raise _FilesFailed(failed)
    if known is None and not surveys:
        path, reason = next(iter(unreadable.items()))
        raise RefusedError(
            "no-readable-file",
            f"Table {table.name!r} can't be created: none of its {len(unreadable)} landing files can be read. "
            f"The first is {table.landing.uri(path)}: {reason}",
            next="correct or remove these files, then run `lakeupsert run` again",
        )
    planned = [s for s in surveys if plans.get(s.path, True)]
    spec, warnings = plan_spec(table, known, planned)
    version = -1 if ground.spec_head is None else ground.spec_head.number
    groups = {s.path: (0, s.row_groups) for s in surveys if s.row_groups}
    surveyed = {s.path for s in surveys}
    job = AppendJob(
        landing=table.landing,
        store=table.store,
        inputs=tuple(replace(i, row_groups=groups.get(i.path), surveyed=i.path in surveyed) for i in given),
        reading=reading,
        rules=RowRules(spec, ground.received_at),
        batch_id=ground.batch_id,
        spec_version=version + (spec is not known),
        start=ground.head.number + 1 if ground.head else 0,
        full=ground.full is not None,
        compared=min(1.0, COMPARED_BYTES / max(1, sum(i.size for i in given))),
    )
    progress(f"reading, splitting and writing the rows of {len(given)} landing files")
    reports = [*host.run(job), *quarantine_files(job, unreadable)]
    written = list({f.name for r in reports if isinstance(r, Written) for f in r.files})
    refused = [r.file.name for r in reports if isinstance(r, Refused)]
    try:
        failed = [r for r in reports if isinstance(r, FileFailed)]
        if failed:
            raise _FilesFailed(failed)
        fruitless = _fruitless(table, known, spec, [s for s in planned if s.path not in plans], planned, reports)
        if fruitless:
            raise _Fruitless(fruitless)
        entry = _entry(table, ground, job, reports, unreadable)
        _refuse_above_limit(table, ground, entry)
        if ground.full:
            entry = _full(table, spec, ground, entry, reports)
        if spec.key_scope == "table":
            in_table = placed(table, spec, ground.head, entry, progress)
            if in_table is None:
                raise _BeginAgain(discard=True)
            entry = in_table.entry
            written += in_table.objects
        progress("committing")
        link = _commit(table, ground, job, entry)
    except RefusedError:
        table.discard(written)  # the refused rows stay, for who has to find out
        raise
    except (_FilesFailed, _Fruitless):
        table.discard([*written, *refused])
        raise
    except _BeginAgain as e:
        if e.discard:
            table.discard([*written, *refused])
        raise
    warnings += table.without_operations([*table.headers(link.number - 1), link.body])
    warnings += under_old_names(table, ((r.path, r.renamed) for r in reports if isinstance(r, FileRead)))
    scattered = in_several_partitions(job, reports)
    return AppendResult(link.number, link.body, tuple(warnings), scattered, examples_of(reports))


def _fruitless(
    table: OpenTable,
    known: TableSpec | None,
    spec: TableSpec,
    asked: Sequence[Survey],
    planned: Sequence[Survey],
    reports: Iterable[Report],
) -> list[str]:
    """Those of the ``asked`` files without an accepted row, where the spec would be another one without them.

    A new table of which no row is accepted has the columns that its files have, since it needs some; and so do columns stay
    that a table can't be created without.
    """
    accepted = {r.path for r in reports if isinstance(r, FileRead) and r.accepted}
    fruitless = [s.path for s in asked if s.path not in accepted]
    if not fruitless or (known is None and not accepted):
        return []
    try:
        # Without leanings: to warn of them landing files are read, and these warnings are not wanted.
        without, _ = plan_spec(table, known, [replace(s, leanings={}) for s in planned if s.path not in fruitless])
    except ConfigurationError:
        return []
    same = without is spec or msgspec.structs.replace(without, table_id=spec.table_id) == spec
    return [] if same else fruitless


def examples_of(reports: Iterable[Report]) -> dict[str, str]:
    """Of each reason for which rows were refused one of these, for people."""
    return {code: text for r in reports if isinstance(r, Refused) for code, text in r.examples.items()}


def unfit_files(known: TableSpec, surveys: Sequence[Survey]) -> Iterable[FileFailed]:
    """Files whose columns the table can't take, such as one that differs from a stored one by case alone."""
    for survey in surveys:
        if survey.schema is not None:
            try:
                evolve(known, survey.schema)
            except ConfigurationError as e:
                yield FileFailed(survey.path, changed=False, reason=e.message)


def plan_spec(
    table: OpenTable, known: TableSpec | None, surveys: Sequence[Survey], *, ahead: bool = False
) -> tuple[TableSpec, list[str]]:
    """The spec that a batch is written under: ``known`` itself where no column came or grew; and warnings, ``ahead`` of the batch
    or of what is done.

    Columns grow to the types that files have, and to those given in the configuration.
    """
    where = f"[tables.{table.name}.schema]"
    names, given = table.given_types(known.schema.names if known is not None else ())
    if known is not None:
        _refuse_other_keys(table, known, given)
    observed: dict[str, Any] = {}
    for survey in surveys:
        if survey.schema is None:
            continue
        for field in survey.schema:
            name = names.setdefault(field.name.lower(), field.name)
            stored = known.schema.field(name).type if known is not None and name in known.schema.names else None
            if stored is not None and not survey.typed and not pa.types.is_nested(stored):
                continue  # text has no types of its own: what does not convert is quarantined
            before = observed.get(name)
            observed[name] = field.type if before is None else unify(before, field.type, typed=survey.typed)
    fields = []
    for name, type_ in observed.items():
        if known is None or name not in known.schema.names:
            type_ = given.get(name, type_)
        type_ = without_nulls(type_)
        fields.append(pa.field(name, type_))
    if known is not None:
        fields += [pa.field(name, type_) for name, type_ in given.items() if name in known.schema.names]
        spec = evolve(known, pa.schema(fields))
        almost = _almost(table, known, spec, surveys, given, ahead=ahead)
        warnings = [*almost.values(), *_given_in_vain(spec, given, where), *_slips(table, spec, given)]
        return spec, [*warnings, *_taken_by_aliases(table, spec), *_values_in_vain(table, spec, surveys)]
    later = [pa.field(name, type_) for name, type_ in given.items() if name not in observed]
    if not fields and not later and table.settings.read.envelope:
        raise ConfigurationError(
            "no-envelope",
            f"No readable file of table {table.name!r} holds a row in the envelope that `read.envelope` names, "
            f"{table.settings.read.envelope}. Nothing was committed.",
            next=f"correct `envelope` in [tables.{table.name}.read], or leave it out if the rows are not wrapped",
        )
    if not fields:  # files without a line name no column, and what is given is all that is known
        fields, later = later, []
    spec = table.new_spec(pa.schema(fields), later)
    text = {f.name for f in spec.schema if pa.types.is_string(f.type)} - given.keys()
    warnings = [*table.stamped_by_name(spec), *table.types_alone(observed, [field.name for field in later])]
    warnings += [
        f"ordering column {n!r} is text and compared as text: '9' is above '10'" for n in spec.order_by if n in text
    ]
    almost = _almost(table, None, spec, surveys, given, ahead=ahead)
    warnings += [
        f"partition column {n!r} is kept as text, since not every value is a date; if it should be one, remove "
        f'{table.settings.processed}, set `{toml_key(n)} = "date"` in {where}, and run again'
        for n in spec.partition_by
        if n in text - {one.column for one in spec.partition_from} - almost.keys() and not all(s.typed for s in surveys)
    ]
    warnings += [*almost.values(), *_taken_by_aliases(table, spec), *_values_in_vain(table, spec, surveys)]
    return spec, warnings


def _almost(
    table: OpenTable,
    known: TableSpec | None,
    spec: TableSpec,
    surveys: Sequence[Survey],
    given: Mapping[str, Any],
    *,
    ahead: bool,
) -> dict[str, str]:
    """For each column that a few values make text, for good, a warning."""
    own = known.schema.names if known is not None else ()
    asked = {f.name for f in spec.schema if pa.types.is_string(f.type)} - {*own, *given, *text_columns(table)}
    asked -= {spec.called(n) for s in surveys if s.typed and s.schema is not None for n in s.schema.names}
    leanings: dict[str, Leaning | None] = {}
    for survey in surveys:
        for column, more in survey.leanings.items():
            name = spec.called(column)
            leanings[name] = together(leanings.get(name), more)
    found = {}
    for name in spec.schema.names:
        leaning = leanings.get(name) if name in asked else None
        if leaning is not None and leaning.is_clear:
            what = almost_all(table.landing, leaning, table.settings.reading)
            setting = f'`{toml_key(name)} = "{type_name(leaning.type)}"` under [tables.{table.name}.schema]'
            if ahead:
                mend = f"to keep the type, set {setting} before the run"
            elif known is None:
                mend = f"to mend that, remove {table.settings.processed}, set {setting} and run again"
            else:
                mend = (
                    f"to mend that, `lakeupsert schema drop {name}`, set {setting} and land the files under other names"
                )
            verb = "will be" if ahead else "is"
            found[name] = f"column {name!r} {verb} text for good: {what}; {mend}: then such rows go to quarantine"
    return found


def almost_all(store: ObjectStore, leaning: Leaning, reading: Reading) -> str:
    """How many values are not of the type that most of them have, and which and where the first of these is."""
    unfit = leaning.first_unfit
    assert unfit is not None, "it is clear"
    line = line_of(store, unfit, reading)
    value = unfit.value if len(unfit.value) <= 40 else f"{unfit.value[:37]}..."
    where = f"{value!r} in {unfit.path!r}" + (f" line {line:,}" if line else "")
    type_ = type_name(leaning.type)
    if leaning.unfit == 1:
        return f"1 of {leaning.values:,} values is not of type {type_} ({where})"
    return f"{leaning.unfit:,} of {leaning.values:,} values are not of type {type_} (the first is {where})"


def under_old_names(table: OpenTable, files: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A warning for each renamed column that landing files still bring under its old name; ``files`` as `FileRead.renamed`."""
    found: dict[tuple[str, str], set[str]] = {}
    for path, renamed in files:
        for names in renamed.items():
            found.setdefault(names, set()).add(path)
    reading, aliases = table.settings.reading, dict(table.settings.read.aliases)
    for own, new in found:
        aliases = followed(aliases, reading.called(own), new)
    return [
        f"column {new!r} is null in the rows of {_files(paths)}: it was renamed from {reading.called(own)!r}, and these files "
        f"still have {_old_name(own, reading)}, which is now a column of its own; set `{toml_aliases(aliases)}` under "
        f"[tables.{table.name}.read] before the next files come"
        for (own, new), paths in found.items()
    ]


def _old_name(own: str, reading: Reading) -> str:
    old = reading.called(own)
    return "the old name" if old == own else f"{own!r}, an alias of {old!r}"


def _files(paths: Collection[str]) -> str:
    return f"{min(paths)!r}" if len(paths) == 1 else f"{len(paths)} files, the first of them {min(paths)!r}"


def _refuse_other_keys(table: OpenTable, known: TableSpec, given: Mapping[str, Any]) -> None:
    for name in known.stored_key:  # a partition column is no part of a key's bytes
        type_, where = known.schema.field(name).type, f"[tables.{table.name}.schema]"
        if name in given and not same_values(type_, given[name]):
            raise ConfigurationError(
                "key-type-fixed",
                f"The key column {name!r} is {type_} in table {table.name!r}, and {where} says {given[name]}. A key's type is "
                "fixed when a table is created. Nothing was committed.",
                next=f"take {name!r} out of {where}, or give a table of another name its own `processed`",
            )


def _given_in_vain(spec: TableSpec, given: Mapping[str, Any], where: str) -> list[str]:
    """A warning for each type in the configuration that the stored one neither holds nor grows to."""
    types = {name: spec.schema.field(name).type for name in given if name in spec.schema.names}
    return [
        f"column {name!r} is {type_} and stays so: {where} says {given[name]}, which that does not grow to; rows with values "
        f"that do not fit {type_} go to quarantine"
        for name, type_ in types.items()
        if not same_values(widened(normal(given[name]), type_), type_)
    ]


def _taken_by_aliases(table: OpenTable, spec: TableSpec) -> list[str]:
    """A warning for each column of the table whose values `aliases` put into another one. Where that other one was renamed from
    it, they belong there: files went on with the old name, which became a column of its own."""
    now = {field.id: field.name.lower() for field in spec.fields}
    back = {(one.name.lower(), now[one.id]) for one in spec.renames if one.id in now}
    own = {name.lower(): name for name in (*spec.schema.names, *([spec.delete.column] if spec.delete else [])) if name}
    return [
        f"column {own[alias.lower()]!r} gets no value from landing files: `aliases` under [tables.{table.name}.read] put what "
        f"they have in {alias!r} into the column {column!r}; if that is wrong, remove this alias and land the files that came "
        "since then under other names"
        for alias, column in table.settings.read.aliases.items()
        if alias.lower() in own and (alias.lower(), column.lower()) not in back
    ]


def _values_in_vain(table: OpenTable, spec: TableSpec, surveys: Sequence[Survey]) -> list[str]:
    """A warning for each type of the operation column in typed files whose texts none of `delete.values` can ever equal."""
    rule = spec.delete
    if rule is None or rule.column is None:
        return []
    paths: dict[Any, list[str]] = {}
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
            f"column {rule.column!r} deletes nothing in {_files(of_type)}: it is {type_} there, and none of the values of "
            f"[tables.{table.name}.delete], {values}, is ever the text of such a column"
            f"{f'; they would be {instead} there' if instead else ''}. Values are fixed when a table is created: land the files "
            "with another type in that column, or create the table with other values"
        )
    return warnings


def _slips(table: OpenTable, spec: TableSpec, given: Mapping[str, Any]) -> list[str]:
    """A warning for each type in the configuration of a column that the table has not, and has one called nearly so."""
    absent = [name for name in given if name not in spec.schema.names]
    return [
        f"the table has no column {name!r}, to which [tables.{table.name}.schema] gives a type. Did you mean {close!r}?"
        for name, close in table.slips(spec.schema.names, absent).items()
    ]


def text_columns(table: OpenTable) -> frozenset[str]:
    """Columns that stay text in text files unless their type is given: keys, so that 0042 stays 0042; the operation."""
    delete = table.settings.delete
    operation = {delete.column} if delete and delete.column else set()
    return (frozenset(table.settings.key) | operation) - frozenset(table.settings.schema)


def _entry(
    table: OpenTable, ground: _Ground, job: AppendJob, reports: Sequence[Report], unreadable: dict[str, str]
) -> LedgerEntry:
    rows: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    quarantine: list[QuarantineFile] = []
    operations = False
    for report in reports:
        if isinstance(report, FileRead):
            rows[report.path] += report.rows
            operations |= report.operations
            if report.sha256 is not None:
                hashes[report.path] = report.sha256
        elif isinstance(report, Refused):
            reasons.update(report.reasons)
            quarantine.append(report.file)
    return LedgerEntry(
        kind="batch",
        batch_id=ground.batch_id,
        received_at=ground.received_at,
        spec_version=job.spec_version,
        reading=job.reading,
        files=tuple(
            LandingFile(path=i.path, size=i.size, etag=i.etag, sha256=hashes.get(i.path, ""), rows=rows[i.path])
            for i in ground.inputs
        ),
        seen=ground.seen,
        touched=touched_by(reports),
        rows_read=sum(rows.values()) + len(unreadable),  # an unreadable file counts as the one row that tells of it
        quarantined=dict(sorted(reasons.items())),
        quarantine=tuple(quarantine),
        retention=table.settings.tombstones_kept,
        snapshot=table.known_snapshot,
        operations=operations if rows.total() and job.spec.delete and job.spec.delete.column else None,
    )


def _refuse_above_limit(table: OpenTable, ground: _Ground, entry: LedgerEntry) -> None:
    unreadable = entry.quarantined.get("unreadable_file", 0)  # each is one row, which tells of the file
    refused, rows = entry.rows_quarantined - unreadable, entry.rows_read - unreadable
    is_first = _is_first(table, ground)
    if table.settings.within_limit(refused, rows, is_first=is_first):
        return
    allowed = table.settings.limit_text(refused, rows, is_first=is_first)
    reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
    files = ", ".join(table.store.uri(f.name) for f in entry.quarantine[:3])
    raise RefusedError(
        "quarantine-limit",
        f"Batch of {len(entry.files)} files for table {table.name!r}: {refused} of {rows} rows would be quarantined "
        f"({reasons}). `quarantine_limit` allows {allowed}. Nothing was committed. The refused rows are in {files} (Parquet).",
        next="look at the refused rows; correct the landing files, or raise `quarantine_limit` and run the same command again",
    )


def _is_first(table: OpenTable, ground: _Ground) -> bool:
    """Whether no batch is there yet, nor an adopted file: then this one decides which types the columns have."""
    if ground.head is None:
        return True
    begin = table.entry(0)
    return not any(e.kind == "batch" for e in table.headers(ground.head.number)) and not (begin and begin.body.touched)


def _full(
    table: OpenTable, spec: TableSpec, ground: _Ground, entry: LedgerEntry, reports: Sequence[Report]
) -> LedgerEntry:
    """The entry of a full extract, which touches all partitions that it is the extract of. Refuses one that may not be whole."""
    nothing = "Nothing was committed."
    if entry.quarantined:
        reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {table.name!r}: {entry.rows_quarantined} of {entry.rows_read} rows would be quarantined "
            f"({reasons}), and their keys deleted. {nothing}",
            next="correct these rows or files in the landing zone and run the same command again; or append without --full",
        )
    if not entry.rows_appended:
        raise RefusedError(
            "empty-full-extract",
            f"Full extract for table {table.name!r}: its {len(entry.files)} files hold no row. {nothing}",
            next="look at what made the files; remove them from the landing zone, or append them without --full",
        )
    touched = dict(entry.touched)
    snapshot = table.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    if ground.full == "table" and ground.head:
        since = table.entries(snapshot.body.batch if snapshot else -1, ground.head.number)
        every = {*shown, *(p for link in since for p in link.body.touched)}
        touched |= dict.fromkeys(sorted(every - touched.keys()), NOTHING)
    stored = sum(shown[p].rows for p in touched if p in shown)
    came = sum(r.live for r in reports if isinstance(r, Written))
    if came < (1 - MOST_SHRINKING) * stored and not ground.may_shrink:
        raise RefusedError(
            "full-extract-shrinks",
            f"Full extract for table {table.name!r}: {came:,} rows for {len(touched)} partitions, which hold {stored:,}: "
            f"over {MOST_SHRINKING:.0%} fewer. {nothing}",
            next="look whether the extract is whole; if it is, run the same command with --may-shrink",
        )
    orders = [r.order for r in reports if isinstance(r, Written) and r.order]
    order = greatest(orders, spec.tombstone_schema.empty_table(), spec)
    assert order is not None, "it has rows"
    full = FullExtract(scope=ground.full or "table", order=order)
    return msgspec.structs.replace(entry, touched=dict(sorted(touched.items())), full=full)


def _commit(table: OpenTable, ground: _Ground, job: AppendJob, entry: LedgerEntry) -> Link[LedgerEntry]:
    """Spec, then ledger entry. Raises _BeginAgain where what was written does not fit the new heads."""
    ledger = table.objects.ledger
    planned = ground.spec_head is None or job.spec is not ground.spec_head.body
    if planned and table.objects.specs.append(job.spec, ground.spec_head).result != "won":
        raise _BeginAgain(discard=True)
    head = ground.head
    if head is None:
        begin = LedgerEntry(kind="create", batch_id="", received_at=entry.received_at - 1, spec_version=0)
        head = ledger.append(begin, None).link
        if head is None:
            raise _BeginAgain(discard=True)
    while True:
        outcome = ledger.append(entry, head)
        if outcome.link is not None:
            return outcome.link
        if outcome.result == "unknown":
            raise _BeginAgain(discard=False)
        newer = ledger.head()
        if newer is None:
            raise _BeginAgain(discard=True)
        entry = _rebased(table, job, entry, head, newer)
        head = newer


def _rebased(
    table: OpenTable, job: AppendJob, entry: LedgerEntry, head: Link[LedgerEntry], newer: Link[LedgerEntry]
) -> LedgerEntry:
    """The same batch behind a newer head, where nothing that it stands on has changed."""
    if job.spec.key_scope == "table":  # the winner may have moved the same keys
        raise _BeginAgain(discard=True)
    won = [link.body for link in table.entries(head.number, newer.number)]
    paths = {f.path for f in entry.files}
    if any(f.path in paths for e in won for f in e.files) or any(e.batch_id == entry.batch_id for e in won):
        raise _BeginAgain(discard=True)
    # After a restore it is another question which files are withdrawn; behind a fence our files may be gone already.
    if any(e.kind == "restore" or (e.fence is not None and job.start <= e.fence) for e in won):
        raise _BeginAgain(discard=True)
    if newer.body.spec_version > entry.spec_version or entry.full:  # others may have begun partitions
        raise _BeginAgain(discard=True)
    if newer.body.received_at < entry.received_at:
        return entry
    if job.spec.stamped:  # the stamp is in the rows already
        raise _BeginAgain(discard=True)
    return msgspec.structs.replace(entry, received_at=newer.body.received_at + 1)
