"""What is new in the landing zone, and the heads that an append stands on.

Reads     the landing zone's listing, content of files that were sent again, the ledger, the spec
Writes    nothing
Repeat    safe
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.accept import (
    ChangedFileError,
    LandingInput,
    content_hash,
)
from lakeupsert.pipeline.landing_dates import Skipped, is_stray, received_on, skipped
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import LocalStore, ObjectInfo, open_store
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import (
    LandingFile,
    LedgerEntry,
    Scope,
    SeenFile,
    counting,
    next_stamp,
    taken,
)
from lakeupsert.table.spec import TableSpec

_IGNORED_STARTS = ("_", ".")
_IGNORED_ENDS = (".tmp", ".crc", "._COPYING_")


@dataclass(frozen=True)
class Ground:
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


def discover(
    table: OpenTable,
    batch_id: str | None,
    received: tuple[date | None, date | None],
    again: bool,
    changed: Sequence[str],
) -> Ground:
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
    return Ground(head, spec_head, inputs, seen, batch_id or clock.new_id(), stamp, left_out)


def new_files(table: OpenTable) -> tuple[LandingInput, ...]:
    """The landing files that the next batch would take. Raises ConfigurationError as `append` does; writes nothing."""
    return look_for_files(table)[0]


def look_for_files(table: OpenTable) -> tuple[tuple[LandingInput, ...], tuple[str, ...]]:
    """`new_files`, and warnings about the files that it would not take."""
    ground = discover(table, None, (None, None), again=False, changed=())
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


def refuse_all_skipped(table: OpenTable, ground: Ground) -> None:
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


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def is_landing_file(path: str) -> bool:
    """Whether the name is one that `append` looks at."""
    parts = path.split("/")  # folders too: `_temporary/` holds what a Spark job has not committed
    return not any(p.startswith(_IGNORED_STARTS) for p in parts) and not parts[-1].endswith(_IGNORED_ENDS)
