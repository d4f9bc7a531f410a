"""Check a table and the machine it runs on, before a night fails.

Reads     the settings, the heads of the chains, the snapshots, the listing of manifests, the queue, both zones' folders, the
          versions of Java and Python; the databases and topics of the table's sources
Writes    objects named `_lakeupsert/doctor-…`, which it deletes again (and their folders, if they do not exist yet)
Repeat    safe, also during a night and before the table exists

Each check reports findings. A check that raises is reported as a problem, and the other checks go on.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from lakeupsert import clock, sparkenv
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.landing.table_logs import find_log, holds_a_table, log_above
from lakeupsert.operations.snapshots import list_snapshots
from lakeupsert.phrases import count, duration, install_extra, no_folder, when
from lakeupsert.pipeline.append.discover import CLOCKS_APART, is_landing_file
from lakeupsert.pipeline.append.event_order import misplaced_events
from lakeupsert.pipeline.append.landing_dates import fitting, is_stray, received_on
from lakeupsert.pipeline.integrity import missing_groups, missing_manifests
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publishers import standings
from lakeupsert.pipeline.removed_files import removed_files
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.queue import SqliteQueue, SqsQueue
from lakeupsert.retries import LEASE_SECONDS
from lakeupsert.sources.check import check_source
from lakeupsert.storage import LocalStore, NotFoundError, ObjectStore, open_store
from lakeupsert.storage.races import WRITERS, race
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

Level = Literal["ok", "warning", "problem"]

ROUNDS = 20
"""How many objects threads race to create."""
FUNCTION_SECONDS = 900
"""The longest that a Lambda function can run."""
CLOCKS_FAR_APART = timedelta(hours=1)
"""A difference between the clocks of this machine and the store that is a problem; above `CLOCKS_APART` it is a warning."""
FUTURE = timedelta(seconds=10)
"""How far ahead a stamp may be: the clocks of machines that use NTP differ by less."""


@dataclass(frozen=True)
class Finding:
    """What a check found, against what it expected; ``next`` says how to fix it, None if nothing is wrong."""

    check: str
    level: Level
    found: str
    next: str | None = None


def _found(level: Level, found: str, next: str | None = None, check: str = "") -> Finding:
    """``check``: by default the one that yields it."""
    return Finding(check, level, found, next)


_ok, _warning, _problem = (partial(_found, level) for level in get_args(Level))


def doctor(table: OpenTable) -> list[Finding]:
    """Run all checks in order. Raises nothing: a check that fails is a finding, too."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            for finding in check(table):  # one by one: those before a failure are kept
                findings.append(replace(finding, check=finding.check or name))
        except LakeupsertError as e:
            findings.append(Finding(name, "problem", e.message.rstrip("."), e.next))
        except Exception as e:  # a check that fails says something about the machine, and must not hide other findings
            found = f"this check failed: {type(e).__name__}: {e}"
            findings.append(Finding(name, "problem", found, "fix that, or report it as a bug of lakeupsert"))
    return findings


def _permissions(table: OpenTable) -> Iterator[Finding]:
    here = table.resources
    zones = ("landing", here.landing, os.R_OK | os.X_OK), ("processed", here.store, os.R_OK | os.W_OK | os.X_OK)
    for zone, store, rights in zones:
        if isinstance(store, LocalStore):
            yield _zone(table.name, zone, Path(store.root), rights)
        else:
            first = next(store.list("", limit=1), None)
            read = first is not None and store.head(first.name) is not None
            yield _ok(f"{zone}: {store.uri()} can be listed{' and read' if read else ''}")


def _zone(table: str, zone: str, root: Path, rights: int) -> Finding:
    place = _nearest(root)
    if not place.is_dir() or (zone == "landing" and place != root):
        advice = f"create it, or correct `{zone}` in [tables.{table}]"
        return _problem(f"{zone}: {root} {no_folder(root)}", advice)
    # In the processed zone, only our own folders: lost+found of a disk, for example, can't be read.
    tops = [root] if zone == "landing" else [root / HOME, *root.glob("*=*")]
    needed = chain([(place, rights)], *(_needed(top, rights) for top in tops if top.exists()))
    # A running night may delete its temporary files meanwhile.
    denied = next((path for path, right in needed if not os.access(path, right) and path.exists()), None)
    may = "read and write" if rights & os.W_OK else "read"
    if denied is not None:
        return _problem(
            f"{zone}: user {os.geteuid()} is not allowed to {may} {denied}",
            f"allow this user to {may} {place}" + (" and everything below it" if place == root else ""),
        )
    note = "" if place == root else f"; {root} does not exist yet"
    return _ok(f"{zone}: this user is allowed to {may} {place}{note}")


def _needed(top: Path, rights: int) -> Iterator[tuple[Path, int]]:
    """The rights that are needed on everything from ``top`` down: these on folders, and reading on files."""
    yield top, rights
    for folder, folders, files in os.walk(top):
        yield from ((Path(folder, name), rights) for name in folders)
        yield from ((Path(folder, name), os.R_OK) for name in files)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _store(table: OpenTable) -> Iterator[Finding]:
    """Every commit is one `create`: a store that lets two writers win loses batches."""
    store, stem = table.resources.store, f"{HOME}/doctor-{clock.new_id()}-"
    names = [f"{stem}{number:02}" for number in range(ROUNDS)]
    try:
        wrong = race(store, store.create, names)
        if wrong is None:
            before = store.get(names[0])
            if store.create(names[0], b"again") or store.get(names[0]) != before:
                wrong = "create accepted a name that exists; it must refuse it"
            elif [found.name for found in store.list(stem)] != names:
                wrong = "a listing does not name the objects that were just created, in order; it must"
    finally:
        store.delete(names)
    if wrong is None:
        yield _ok(f"{ROUNDS} races of {WRITERS} threads to create one object: one thread won each")
    else:
        yield _problem(
            f"{store.uri()}: {wrong}",
            "do not run lakeupsert on this store, where one writer's commit can replace another's: put `processed` on Amazon "
            "S3, Azure Storage, a server that keeps their conditional puts, a local file system, or NFS with hard links",
        )


def _clocks(table: OpenTable) -> Iterator[Finding]:
    now = clock.now()
    yield _store_clock(table.resources.store)
    yield from _future_stamps(table, now)


def _store_clock(store: ObjectStore) -> Finding:
    name = f"{HOME}/doctor-{clock.new_id()}"
    before = clock.now()
    try:
        store.create(name, b"clock")
        after, info = clock.now(), store.head(name)
    finally:
        store.delete([name])
    if info is None:
        raise NotFoundError(store.uri(name))
    modified = datetime.fromtimestamp(info.modified, UTC)
    apart = max(before - modified, modified - after, timedelta(0))
    level: Level = "problem" if apart > CLOCKS_FAR_APART else "warning" if apart > CLOCKS_APART else "ok"
    found = f"this machine's clock and the store's are {duration(apart.total_seconds())} apart"
    if level == "ok":
        return _ok(found)
    found += f" ({when(before)} and {when(modified)}), at most 5 min are expected"
    return _found(level, found, "set this machine's clock by NTP (`timedatectl set-ntp true`)")


def _future_stamps(table: OpenTable, now: datetime) -> Iterator[Finding]:
    objects = table.history.objects
    ledger = objects.ledger.head()
    heads: dict[str, Link[TableSpec] | Link[LedgerEntry] | Link[Snapshot] | None] = {
        "spec": objects.specs.head(),
        "ledger": ledger,
        "snapshot": objects.snapshots.head(),
    }
    stamps = {f"{what} {head.number}": datetime.fromisoformat(head.written_at) for what, head in heads.items() if head}
    if ledger is not None:
        stamps[f"receipt stamp {ledger.number}"] = ledger.body.received
    future = [
        f"{what} by {duration((stamp - now).total_seconds())}" for what, stamp in stamps.items() if stamp > now + FUTURE
    ]
    if future:
        yield _problem(
            f"later than this machine's clock, {when(now)}: {', '.join(future)}; the clock of the machine that "
            "wrote them was ahead, or this one is behind. New receipt stamps are later than the last one",
            "set the clocks of all machines that write this table by NTP (`timedatectl set-ntp true`)",
        )


def _queues(table: OpenTable) -> Iterator[Finding]:
    yield from _queue(table)
    if table.resources.large_queue is not None:
        for finding in _queue(table.at_queue(table.resources.large_queue)):
            yield replace(finding, found=f"queue of large partitions: {finding.found}")


def _queue(table: OpenTable) -> Iterator[Finding]:
    queue = table.resources.queue
    ledger, snapshot = table.history.objects.ledger.head(), table.history.last_snapshot()
    waiting = unpublished(table.history, snapshot, ledger)
    if isinstance(queue, SqliteQueue) and not Path(queue.path).exists():  # opening would create it
        if waiting:
            found = (
                f"{queue.path} is missing, and {count(len(waiting), 'partition')} with batches that are not published"
            )
            yield _warning(found, "`lakeupsert run` creates it and sends their messages again")
        else:
            yield _ok(f"{queue.path} does not exist yet, and there is nothing to send")
        return
    stats = queue.stats()
    yield _ok(
        f"{count(stats.visible, 'message')} waiting, {stats.leased} leased; a message without an answer is delivered again after "
        f"{LEASE_SECONDS:g} s, and becomes a dead letter after {queue.max_receives} receives",
    )
    for letter in queue.dead_letters(1):
        yield _warning(
            f"dead letters: {stats.dead}; the first: {letter.reason}",
            "fix that, then run `lakeupsert redrive`: it returns those of unmerged partitions to the queue and deletes the rest",
        )
    if isinstance(queue, SqsQueue) and (visibility := queue.visibility_seconds()) < FUNCTION_SECONDS:
        yield _warning(
            f"the visibility timeout of {queue.name} is {visibility} s; at least {FUNCTION_SECONDS} s are expected. Otherwise "
            "SQS gives messages to a second function before the first one has started on them",
            "set the queue's visibility timeout to the function's timeout or more; `lakeupsert worker` sets its own",
        )
    if isinstance(queue, SqliteQueue):
        messages = queue.messages()
        ledger = table.history.objects.ledger.head()  # again, after the messages: there may be a new batch
        last = ledger.number if ledger else -1
        strays = [m for m in messages if m.table != table.name or m.batch > last]
        if strays:
            yield _warning(
                f"messages of batches that are not in the ledger: {len(strays)}, for example table {strays[0].table!r}, "
                f"batch {strays[0].batch}; the last batch of {table.name!r} is {last if ledger else 'none'}",
                f"stop the workers and delete {queue.path}; `lakeupsert run` sends the needed messages again",
            )
        mode = queue.journal_mode()
        if mode != "wal":
            yield _warning(
                f"the journal of {queue.path} is in mode {mode}, not wal: its file system has no shared memory",
                f"name a file on a local disk as `queue` in [tables.{table.name}]",
            )


def _spark(table: OpenTable) -> Iterator[Finding]:
    # `--host auto` works without Spark, and only the engine is a setting
    level: Level = "problem" if table.settings.engine == "spark" else "warning"
    local = "; without it, `--host auto` takes `local`, and engine arrow works"
    try:
        spark = sparkenv.require_pyspark()
    except ConfigurationError as e:
        yield _found(level, e.message, e.next)
        return
    versions = f"pyspark {spark or 'of unknown version'}, pyarrow {pa.__version__}, Python {platform.python_version()}"
    if not sparkenv.is_supported(spark):
        found = f"{versions}; pyspark {'.'.join(map(str, sparkenv.OLDEST_SPARK))} or later is expected"
        yield _found(level, found, f"{install_extra('spark')}{local}")
    else:
        yield _ok(versions)
    if server := sparkenv.connect_server():
        yield _ok(f"Spark runs at {server}, with its own Python and Java", check="java")
        return
    unfit = sparkenv.unfit_workers()
    if unfit is None:
        yield _ok(f"Spark's workers run {os.environ.get('PYSPARK_PYTHON', sys.executable)}", check="python")
    else:
        advice = f"unset PYSPARK_PYTHON, or set it to {sys.executable}{local}"
        yield _found(level, f"PYSPARK_PYTHON: {unfit}", advice, check="python")
    try:
        java = sparkenv.find_java(spark)
    except ConfigurationError as e:
        yield _found(level, e.message, e.next, check="java")
        return
    found = f"Java {java.version}, {java.program}"
    fit = sparkenv.javas_of(spark)
    if java.version not in fit:
        found += f"; Spark {spark or ''} supports {fit[0]} to {fit[-1]}"
        yield _warning(found, f"set JAVA_HOME to one of these{local}", check="java")
    else:
        yield _ok(found, check="java")


def _landing(table: OpenTable) -> Iterator[Finding]:
    pattern = table.settings.landing_dates
    names = [found.name for found in table.resources.landing.list("")]
    log = find_log(names) or log_above(table.settings.landing)
    if log is not None:
        advice = "land what that table exports, or its change feed"
        yield _warning(holds_a_table(log).partition(". Land")[0], advice)
    if not pattern:
        return
    paths = [name for name in names if is_landing_file(name)]
    others = [path for path in paths if received_on(path, pattern) is None]
    if not others:
        yield _ok(f"{count(len(paths), 'landing file')}, all in folders that are dates by {pattern!r}")
        return
    dated = [path for path in paths if not is_stray(path, pattern, table.settings.format)]
    usual = fitting({path.rpartition("/")[0] for path in dated})
    yield _found(
        "warning" if len(others) < len(paths) or not dated else "problem",
        f"by `landing_dates` = {pattern!r}, {len(others)} of {len(paths)} landing files have no date and are not taken, for "
        f"example {others[0]}",
        f"set `landing_dates` in [tables.{table.name}] to a pattern that fits all of them: "
        + " or ".join(map(repr, usual))
        if usual
        else f"correct `landing_dates` in [tables.{table.name}], or move these files into folders that fit it",
    )


def _disk(table: OpenTable) -> Iterator[Finding]:
    store = open_store(table.settings.processed)
    if not isinstance(store, LocalStore):
        return
    snapshot = table.history.last_snapshot()
    largest = max((shown.bytes for shown in snapshot.body.partitions.values()), default=0) if snapshot else 0
    free = shutil.disk_usage(_nearest(Path(store.root))).free
    found = f"{free / 1e6:,.0f} MB free, the largest partition has {largest / 1e6:,.0f} MB"
    if free < 2 * largest:
        found += "; a merge needs twice as much, because it writes a new copy of a partition before the old one goes"
        yield _warning(found, f"free space on the file system of {store.root}")
    else:
        yield _ok(found)


def _settings(table: OpenTable) -> Iterator[Finding]:
    settings = table.settings
    if int(settings.superseded_retention[:-1]) == 0 and settings.keep_snapshots != 1:
        yield _problem(
            f"`superseded_retention` is {settings.superseded_retention!r} and `keep_snapshots` {settings.keep_snapshots}; "
            "without retention it must be 1, since older snapshots name superseded files",
            f"set `keep_snapshots` = 1, or `superseded_retention` to a duration, in [tables.{table.name}]",
        )
    spec = table.history.head_spec()  # raises if the settings contradict the spec
    yield _ok(f"they fit spec {spec.number}" if spec else "the table does not exist yet")
    for warning in misplaced_events(table.declaration, spec.body) if spec else ():
        found, _, advice = warning.partition("Rows may be wrong. ")
        yield _warning(found.rstrip(". "), advice)


def _manifests(table: OpenTable) -> Iterator[Finding]:
    objects = table.history.objects
    kept = {link.number: link.body for link in list_snapshots(objects)}
    missing = missing_groups(objects, kept) | missing_manifests(objects, kept)
    if missing and [link.number for link in list_snapshots(objects)] != [*kept]:  # a vacuum has trimmed them meanwhile
        kept = {link.number: link.body for link in list_snapshots(objects)}
        missing = missing_groups(objects, kept) | missing_manifests(objects, kept)
    for error in missing.values():
        yield _problem(error.message.rstrip("."), error.next)
    if kept and not missing:
        named = sum(len(body.partitions) for body in kept.values())
        yield _ok(f"{count(len(kept), 'snapshot')} name {named:,}; all are stored")


def _publishers(table: OpenTable) -> Iterator[Finding]:
    table.history.last_snapshot()
    for name, standing in standings(table).items():
        shown = "nothing yet" if standing.snapshot is None else f"snapshot {standing.snapshot}"
        if standing.behind is None and standing.problem is not None:
            yield _problem(standing.problem.message, standing.problem.next)
        elif standing.behind:
            yield _warning(
                f"readers of {name} see {shown}: {standing.behind} behind",
                f"`lakeupsert publish --to {name}`",
            )
        else:
            yield _ok(f"readers of {name} see {shown}, the newest")


def _sources(table: OpenTable) -> Iterator[Finding]:
    for name, source in table.sources.items():
        check = f"source {name}"
        try:
            for found, advice in check_source(table, name, source):
                yield _found("warning" if advice else "ok", found, advice, check)
        except LakeupsertError as e:  # another source may be well
            yield _problem(e.message.rstrip("."), e.next, check)
    for found, advice in removed_files(table):
        yield _problem(found, advice)


CHECKS: dict[str, Callable[[OpenTable], Iterator[Finding]]] = {
    "permissions": _permissions,  # first: later checks may create the processed zone
    "store": _store,
    "clock": _clocks,
    "queue": _queues,
    "spark": _spark,
    "landing": _landing,
    "disk": _disk,
    "settings": _settings,
    "manifests": _manifests,
    "publishers": _publishers,
    "sources": _sources,
}
