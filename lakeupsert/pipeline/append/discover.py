"""Discover what a new batch can take: the heads of the chains, and the landing files that no batch took yet.

Reads     the last snapshot, the ledger, the newest spec, the listing of the landing zone, and the content of files sent again
Writes    nothing but the headers of ledger entries, which only repeat what the ledger says
Repeat    safe
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path

from lakeupsert import clock
from lakeupsert.engine.by_name import HostChoice
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.content import content_hash
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput
from lakeupsert.landing.table_logs import TableLog, holds_a_table, likely_log_above, log_of
from lakeupsert.phrases import count, duration, no_folder, short_list
from lakeupsert.pipeline.append.landing_dates import Skipped, arrival_order, describe_skipped, is_stray, received_on
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.storage import LocalStore, ObjectInfo, ObjectStore, open_landing
from lakeupsert.storage.base import NOTHING
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import (
    LedgerEntry,
    Scope,
    SeenFile,
    active_batches,
    next_stamp,
)
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.taken import TakenFiles

log = logging.getLogger(__name__)

_IGNORED_STARTS = ("_", ".")
_IGNORED_ENDS = (".tmp", ".crc", "._COPYING_", "_$folder$")  # the last: a folder on S3, as EMR marks it


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch of landing files is made.

    Attributes:
        host: where landing files are read; ``auto``: in this process, or in Spark if they have many bytes.
        batch_id: your name for the batch. A repeated call with it is recognised before files are compared; None: a new name.
        full: the batch is a full extract: it deletes the keys that it lacks, in the whole ``table`` or in the ``partitions``
            of its rows.
        may_shrink: accept a full extract that would delete 40 %.
        warn: takes the warnings of a call that commits no batch.
    """

    host: HostChoice = "auto"
    batch_id: str | None = None
    full: Scope | None = None
    may_shrink: bool = False
    progress: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = log.warning


@dataclass(frozen=True, kw_only=True)
class AppendOptions(BatchOptions):
    """Which landing files become a batch.

    Attributes:
        received: first and last date (inclusive) of the landing folders to take, if `landing_dates` is set.
        again: take only landing files whose batches were all withdrawn by a restore.
        replay_quarantine: commit the quarantined rows that pass now, instead of landing files (always in this process).
        only: the files that may be taken, as they were listed, by path; None: all.
        listed: all files of the landing zone, if it was listed for ``only``; None: list it.
        folder: look only at files below it. Its own name may be one that others leave out, like ``_spark/``.
        careful: for a leader: the one before may have been ended by a file (`trial`).
    """

    received: tuple[date | None, date | None] = (None, None)
    again: bool = False
    replay_quarantine: bool = False
    only: Mapping[str, ObjectInfo] | None = None
    listed: Iterable[ObjectInfo] | None = None
    folder: str = ""
    careful: bool = False


CLOCKS_APART = timedelta(minutes=5)
"""A greater difference between the clocks of this machine and the store is worth a warning."""
ALL_NEW = AppendOptions()
"""All new landing files."""


@dataclass(frozen=True)
class Ground:
    """What one attempt to commit a batch is based on. Each of these is read once, here.

    Attributes:
        batch_id: the batch's id.
        received_at: the batch's receipt stamp, above that of the ledger's head.
        begun: `clock.elapsed` when the attempt began.
        snapshot: the last snapshot; None before the first publish.
        head: the ledger's head; None before the first batch.
        spec_head: the newest spec, never older than the one that ``head`` names.
        entries: all ledger entries up to ``head``, without the partitions that they touched.
        inputs: landing files to take, in the order that ranks their rows.
        seen: landing files that had to be read to find out that an earlier batch took the same content.
        skipped: landing files that have no date by `landing_dates`.
        by_size: how many landing files are known by nothing but their names and sizes.
        clock_ahead: see `LedgerEntry.clock_ahead`.
        log: of a table of another format in the landing zone.
    """

    batch_id: str
    received_at: int
    begun: float
    snapshot: Link[Snapshot] | None
    head: Link[LedgerEntry] | None
    spec_head: Link[TableSpec] | None
    entries: Sequence[LedgerEntry]
    inputs: tuple[LandingInput, ...] = ()
    seen: tuple[SeenFile, ...] = ()
    skipped: Skipped | None = None
    by_size: int = 0
    clock_ahead: int = 0
    log: TableLog | None = None
    foreign: tuple[str, ...] = ()

    @property
    def spec(self) -> TableSpec | None:
        return self.spec_head.body if self.spec_head else None

    @property
    def start(self) -> int:
        """How many entries the ledger has."""
        return len(self.entries)

    @property
    def snapshot_number(self) -> int | None:
        return self.snapshot.number if self.snapshot else None

    @property
    def stored_bits(self) -> dict[str, int]:
        """See `AppendJob.stored_bits`; of what readers see, so at most a night old."""
        return self.snapshot.body.bits if self.snapshot else {}

    @property
    def night_bytes(self) -> int:
        """Landing bytes of this batch, and of earlier ones that no snapshot shows yet."""
        shown = self.snapshot.body.batch if self.snapshot else 0
        earlier = (file.size for entry in self.entries[shown + 1 :] for file in entry.files)
        return sum(i.size for i in self.inputs) + sum(earlier)

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [str(self.skipped)] if self.skipped else []
        if self.clock_ahead:
            apart, side = duration(abs(self.clock_ahead) / 1e6), "ahead of" if self.clock_ahead > 0 else "behind"
            found.append(
                f"receipt stamps are {apart} {side} the store's clock, as this machine's clock is or one before was; rows whose "
                "order is in the future are refused by the store's. Set clocks by NTP"
            )
        if self.log:
            found.append(holds_a_table(self.log))
        found += foreign_files(self.foreign)
        if self.by_size:
            found.append(
                f"the landing zone reports only the size of {count(self.by_size, 'file')}: if a file is replaced by another of "
                "the same size, lakeupsert can't notice it. Land each change under a new name"
            )
        return tuple(found)

    def version_of(self, spec: TableSpec) -> int:
        """The version of ``spec`` once this batch is committed: the head's own, or the one after it."""
        number = self.spec_head.number if self.spec_head else -1
        return number + (spec is not self.spec)


def read_heads(table: OpenTable, batch_id: str | None) -> Ground:
    """The ground of a batch that takes no landing files."""
    begun = clock.elapsed()
    table.history.last_snapshot()  # before the ledger, which then covers what the snapshot shows
    head = table.history.ledger_head()
    spec_head = table.history.head_spec()  # after the ledger: an entry's spec is never newer than the one read here
    received_at = next_stamp(head.body if head else None)
    return Ground(
        batch_id=batch_id or clock.new_id(),
        received_at=received_at,
        begun=begun,
        snapshot=table.history.known_snapshot,
        head=head,
        spec_head=spec_head,
        entries=table.history.headers(head.number, write=True) if head else (),
        clock_ahead=_clock_ahead(table.resources.store, received_at),
    )


def _clock_ahead(store: ObjectStore, received_at: int) -> int:
    """See `LedgerEntry.clock_ahead`. The heads have been read, so the store has answered."""
    ahead = received_at + int(((store.clock_ahead() or 0) - clock.now().timestamp()) * 1_000_000)
    return ahead if abs(ahead) > CLOCKS_APART // timedelta(microseconds=1) else 0


def discover(table: OpenTable, options: AppendOptions = ALL_NEW, excluded: Collection[str] = ()) -> Ground:
    """The heads, and every landing file that no batch took; ``excluded`` are paths to leave out.

    Raises ConfigurationError if the batch id belongs to other files, if the landing zone is missing, or if the processed
    zone holds Parquet files but no table.
    """
    ground = read_heads(table, options.batch_id)
    entries, known, withdrawn = ground.entries, table.history.taken(len(ground.entries) - 1), None
    seen_before = known.seen
    if options.again:
        count = active_batches(enumerate(entries))
        known = TakenFiles(entry for number, entry in enumerate(entries) if number in count)
        withdrawn = TakenFiles(entry for number, entry in enumerate(entries) if number not in count)
    if ground.head is None:
        refuse_unadopted(table)
    candidates = None if withdrawn is None else withdrawn.by_path.keys()
    listing = _list_landing(
        table, options, known, lambda path: path not in excluded and (candidates is None or path in candidates)
    )
    inputs, seen = _new_files(table, listing.files, known.by_path, seen_before)
    with_id = entries if options.batch_id is not None else ()
    same_id = next((e for e in with_id if e.kind == "batch" and e.batch_id == options.batch_id), None)
    if same_id is not None and inputs:
        raise ConfigurationError(
            "batch-id-taken",
            f"Batch id {options.batch_id!r} was used for {len(same_id.files)} other files; {inputs[0].path} is not one of "
            "them. Nothing was committed.",
            next="give the new files another --batch-id, or none",
        )
    if ground.spec is not None and withdrawn is not None:
        _refuse_renamed(table.history, ground.spec, entries, {i.path: i.listed for i in inputs})
    return replace(
        ground,
        received_at=next_stamp(ground.head.body if ground.head else None),  # listing and hashing may have taken a while
        inputs=inputs,
        seen=seen,
        skipped=listing.skipped,
        by_size=listing.by_size,
        log=listing.log,
        foreign=listing.foreign,
    )


def skipped_files(table: OpenTable, limit: int) -> Skipped | None:
    """The files that have no date by `landing_dates` among the first ``limit`` names in the landing zone; None if none."""
    pattern = table.settings.landing_dates
    if not pattern:
        return None
    paths = [found.name for found in table.resources.landing.list("", limit=limit) if is_landing_file(found.name)]
    undated = [path for path in paths if received_on(path, pattern) is None]
    format_ = table.settings.format
    folders = {_folder(path) for path in paths if not is_stray(path, pattern, format_)}
    return describe_skipped(pattern, format_, undated, len(paths), folders)


def foreign_files(names: Sequence[str]) -> list[str]:
    """The warning for names in a landing folder that are not read."""
    if not names:
        return []
    found = f"the landing zone has {count(len(names), 'link')} out of it, or devices or pipes, which are not read"
    advice = "Land the files themselves, mount the folder there, or make it a landing zone of a table"
    return [f"{found}: {short_list(names)}. {advice}"]


def is_landing_file(path: str) -> bool:
    """Whether `append` looks at a file of this name."""
    parts = path.split("/")  # folders too: `_temporary/` holds what a Spark job has not committed
    return not any(p.startswith(_IGNORED_STARTS) for p in parts) and not parts[-1].endswith(_IGNORED_ENDS)


def refuse_all_skipped(name: str, ground: Ground) -> None:
    """Raises RefusedError if the landing zone has files and all of them are skipped."""
    found = ground.skipped
    if found is None or not found.is_all:
        return
    fitting = " or ".join(f"`landing_dates = {json.dumps(pattern, ensure_ascii=False)}`" for pattern in found.fitting)
    raise RefusedError(
        "landing-skipped",
        f"Table {name!r} took no landing file: {found} Nothing was committed.",
        next=f"set {fitting} in [tables.{name}] and run the same command again"
        if fitting
        else f"correct `landing_dates` in [tables.{name}], or move the files; then run the same command again",
    )


def _refuse_renamed(
    history: History, spec: TableSpec, entries: Sequence[LedgerEntry], inputs: Mapping[str, ObjectInfo]
) -> None:
    """Refuse withdrawn files that were written before a rename: their values would be read into other columns.

    ``inputs`` are the files to take, by path.
    """
    if not spec.renames:
        return
    for entry in entries:
        renamed = spec.changed_names(len(history.spec(entry.spec_version).renames))
        same = [f.path for f in entry.files if f.path in inputs and inputs[f.path].is_same(f.size, f.etag)]
        if renamed and same:
            raise ConfigurationError(
                "renamed-since",
                f"{same[0]} was read before columns were renamed or dropped ({', '.join(renamed)}). If it were read under the "
                "present names, its values would be in other columns. Nothing was committed.",
                next="land these rows in a file of another name, with the present names of the columns",
            )


def refuse_unadopted(table: OpenTable) -> None:
    """Refuse to create a table in a folder that holds data: the table would hide it."""
    store = table.resources.store
    for found in store.list(""):
        if found.name.endswith(".parquet") and is_landing_file(found.name):
            if table.history.objects.ledger.head() is not None:
                return  # another process has just created the table, and these are its files
            raise ConfigurationError(
                "not-adopted",
                f"{store.uri()} is not a table yet and holds Parquet files, for example {found.name}. A new table would "
                "not show them. Nothing was changed.",
                next="run `lakeupsert adopt` to make them the table's first batch, or name an empty folder in `processed`",
            )


def list_landing(
    table: OpenTable,
    below: str = "",
    limit: int | None = None,
    taken: TakenFiles | None = None,
) -> Iterator[ObjectInfo]:
    """All files of the landing zone, or the first ``limit``. Raises ConfigurationError if it is missing.

    Files of a source that were ``taken`` are left out, up to the first that was not: it writes so many that to list them all
    would soon take longer than a batch.
    """
    landing = open_landing(table.settings.landing)
    if isinstance(landing, LocalStore) and not Path(landing.root).is_dir():
        raise ConfigurationError(
            "no-landing",
            f"The landing zone {landing.root} of table {table.name!r} {no_folder(Path(landing.root))}.",
            next=f"create it, or correct `landing` in [tables.{table.name}]",
        )
    above = {source: taken.all_up_to(source) for source in table.sources} if taken else NOTHING
    return table.resources.landing.list(below, limit=limit, above=above)


@dataclass(frozen=True)
class _Listing:
    """Landing files that have a date in the requested range and are not known, what to say of files that have no date, how many
    files are known by nothing but their names and sizes, and the log of a table that lies there."""

    files: tuple[ObjectInfo, ...]
    skipped: Skipped | None
    by_size: int
    log: TableLog | None
    foreign: tuple[str, ...]


def _list_landing(
    table: OpenTable, options: AppendOptions, known: TakenFiles, is_candidate: Callable[[str], bool]
) -> _Listing:
    pattern, format_ = table.settings.landing_dates, table.settings.format
    first, last = options.received
    files: list[ObjectInfo] = []
    undated: list[str] = []
    foreign: list[str] = []
    folders: set[str] = set()
    listed = by_size = 0
    log: TableLog | None = None
    for found in list_landing(table, options.folder) if options.listed is None else options.listed:
        log = log or log_of(found.name)
        if found.is_foreign:
            foreign += [found.name] if is_landing_file(found.name) else []
            continue
        if not is_landing_file(found.name.removeprefix(options.folder)) or not is_candidate(found.name):
            continue
        listed += 1
        by_size += found.is_by_size
        if not is_stray(found.name, pattern, format_):
            folders.add(_folder(found.name))
        day = received_on(found.name, pattern)
        if day is None:
            undated.append(found.name)
        elif pattern and not (first or day) <= day <= (last or day):
            continue
        elif (options.only is None or options.only.get(found.name) == found) and not known.has(found):
            files.append(found)
    log = log or likely_log_above(table.settings.landing)
    skipped = describe_skipped(pattern, format_, undated, listed, folders)
    return _Listing(tuple(files), skipped, by_size, log, tuple(foreign))


def _new_files(
    table: OpenTable,
    files: Sequence[ObjectInfo],
    known: Mapping[str, list[SeenFile]],
    seen_before: Mapping[str, list[SeenFile]],
) -> tuple[tuple[LandingInput, ...], tuple[SeenFile, ...]]:
    """Those of ``files`` whose content no batch took, in the order that ranks their rows, and those that had to be read to find
    that one did. None of ``files`` is ``known`` by size and etag.

    ``seen_before`` are files that earlier batches read for the same reason, by path. The next ledger entry remembers what is
    read here. A night without new files writes no entry, so the next night reads these files once more.
    """

    def content_before(found: ObjectInfo) -> str | None:
        same = (f.sha256 for f in seen_before.get(found.name, ()) if found.is_same(f.size, f.etag))
        return next(same, None)

    # Same path, other etag: only the content shows whether it is the same file sent again.
    unsure = [f for f in files if f.name in known and content_before(f) is None]
    contents = table.resources.map_concurrently(partial(_read_content, table.resources), unsure)
    read = {f.name: file for f, file in zip(unsure, contents, strict=True)}
    inputs: list[LandingInput] = []
    seen: list[SeenFile] = []
    for found in sorted(files, key=lambda file: arrival_order(file.name, table.settings.landing_dates)):
        file = read.get(found.name)
        if found.name in read and file is None:
            continue
        content = file.sha256 if file else content_before(found)
        if not any(f.sha256 == content for f in known.get(found.name, ())):
            inputs.append(LandingInput(found.name, found.size, found.etag, place=len(inputs)))
        elif content and file:
            seen.append(file)
    return tuple(inputs), tuple(seen)


def contents_of(resources: Resources, inputs: Iterable[LandingInput]) -> tuple[SeenFile, ...]:
    """These files with the hashes of their content, without those that have changed since they were listed."""
    found = resources.map_concurrently(partial(_read_content, resources), [i.listed for i in inputs])
    return tuple(file for file in found if file is not None)


def _read_content(resources: Resources, found: ObjectInfo) -> SeenFile | None:
    """The file with the hash of its content, which is empty if the store can't give its bytes; None if it has changed since it
    was listed: the next batch takes it."""
    with suppress(ChangedFileError):
        content = content_hash(resources.landing, found.name, found)
        return SeenFile(path=found.name, size=found.size, etag=found.etag, sha256=content)
    return None


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
