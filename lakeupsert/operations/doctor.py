"""Look at a table and the machine it runs on, before a night finds out.

Reads     the settings, the heads of the chains, the queue, both zones' folders, Java's and Python's versions
Writes    objects named `_lakeupsert/doctor-…`, which it removes again (and the folders for them, where there are none yet)
Repeat    safe, also beside a running night and before there is a table

Each check gives at least one finding. One that raises becomes a problem, and the others go on.
"""

import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from lakeupsert import clock, sparkenv
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.pipeline.discover import is_landing_file
from lakeupsert.pipeline.landing_dates import fitting, is_stray, received_on
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.worker import LEASE_SECONDS
from lakeupsert.queue import SqliteQueue, SqsQueue
from lakeupsert.storage import LocalStore, NotFoundError, ObjectStore, UnknownOutcomeError, open_store
from lakeupsert.table.chain import Chain
from lakeupsert.table.layout import HOME

Level = Literal["ok", "warning", "problem"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ROUNDS = 20
WRITERS = 8
FUNCTION_SECONDS = 900
"""How long a Lambda function may run at most."""
CLOCKS_APART = timedelta(minutes=5)
CLOCKS_FAR_APART = timedelta(hours=1)
FUTURE = timedelta(seconds=10)
"""How far a stamp may be ahead before it is the future: machines that keep time by NTP differ by less."""


@dataclass(frozen=True)
class Finding:
    """What a check found against what it expected; ``next`` is the command or act that mends it, None where all is well."""

    check: str
    level: Level
    found: str
    next: str | None = None


def doctor(table: OpenTable) -> list[Finding]:
    """The findings of all checks, in their order. Raises nothing: what can't be looked at is a finding too."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            for finding in check(table):
                findings.append(finding)
        except LakeupsertError as e:
            findings.append(Finding(name, "problem", e.message.rstrip("."), e.next))
        except Exception as e:  # a check that fails is news of the machine, and must not hide what the others find
            told = f"this could not be looked at: {type(e).__name__}: {e}"
            findings.append(Finding(name, "problem", told, "mend that, or report it as a bug of lakeupsert"))
    return findings


def _permissions(table: OpenTable) -> Iterator[Finding]:
    for zone, rights in (("landing", os.R_OK | os.X_OK), ("processed", os.R_OK | os.W_OK | os.X_OK)):
        store = open_store(getattr(table.settings, zone))
        if isinstance(store, LocalStore):
            yield _zone(table.name, zone, Path(store.root), rights)
        else:
            first = next(store.list("", limit=1), None)
            read = first is not None and store.head(first.name) is not None
            yield Finding("permissions", "ok", f"{zone}: {store.uri()} can be listed{' and read' if read else ''}")


def _zone(table: str, zone: str, root: Path, rights: int) -> Finding:
    place = _nearest(root)
    if not place.is_dir() or (zone == "landing" and place != root):
        expected = f"create it, or correct `{zone}` in [tables.{table}]"
        return Finding("permissions", "problem", f"{zone}: {root} is no folder", expected)
    # Of the processed zone only what is ours: a disk's lost+found is nobody's.
    tops = [root] if zone == "landing" else [root / HOME, *root.glob("*=*")]
    needed = chain([(place, rights)], *(_needed(top, rights) for top in tops if top.exists()))
    # A running night deletes its temporary files meanwhile.
    denied = next((path for path, right in needed if not os.access(path, right) and path.exists()), None)
    may = "read and write" if rights & os.W_OK else "read"
    if denied is not None:
        return Finding(
            "permissions",
            "problem",
            f"{zone}: user {os.geteuid()} may not {may} {denied}",
            f"give this user the right to {may} {place}" + (" and all below it" if place == root else ""),
        )
    there = "" if place == root else f"; {root} is not there yet"
    return Finding("permissions", "ok", f"{zone}: this user may {may} {place}{there}")


def _needed(top: Path, rights: int) -> Iterator[tuple[Path, int]]:
    """All from ``top`` down: on folders these rights are needed, files must be readable."""
    yield top, rights
    for folder, folders, files in os.walk(top):
        yield from ((Path(folder, name), rights) for name in folders)
        yield from ((Path(folder, name), os.R_OK) for name in files)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _store(table: OpenTable) -> Iterator[Finding]:
    """Every commit is one `create`: a store where two of them win loses batches."""
    store, stem = table.store, f"{HOME}/doctor-{clock.new_id()}-"
    names = [f"{stem}{number:02}" for number in range(ROUNDS)]
    try:
        wrong = _race(store, names)
        if wrong is None:
            before = store.get(names[0])
            if store.create(names[0], b"again") or store.get(names[0]) != before:
                wrong = "create took a name that exists; it must refuse it"
            elif [found.name for found in store.list(stem)] != names:
                wrong = "a listing does not name, in order, the objects that were just created; it must"
    finally:
        store.delete(names)
    if wrong is None:
        yield Finding("store", "ok", f"{ROUNDS} races of {WRITERS} threads to create one object: one won each")
    else:
        yield Finding(
            "store",
            "problem",
            f"{store.uri()}: {wrong}",
            "do not run lakeupsert on this store, where one writer's commit can replace another's: put `processed` on Amazon "
            "S3, Azure Storage or a server that keeps its conditions, a local file system, or NFS with hard links",
        )


def _race(store: ObjectStore, names: list[str]) -> str | None:
    """Let threads create each object at once; what went wrong, or None."""
    wrong = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for name in names:
            bodies = [f"{name} {writer}".encode() for writer in range(WRITERS)]
            answers = list(pool.map(partial(_create, store, name, threading.Barrier(WRITERS)), bodies))
            won = [body for body, answer in zip(bodies, answers, strict=True) if answer]
            unknown = [body for body, answer in zip(bodies, answers, strict=True) if answer is None]
            try:
                stored = store.get(name)
            except NotFoundError:
                stored = b""
            if [stored] != (won or [body for body in unknown if body == stored]):
                wrong.append(len(won))
    if not wrong:
        return None
    return (
        f"in {len(wrong)} of {len(names)} races of {WRITERS} threads to create one object, {max(wrong)} won; exactly one "
        "must win, and its bytes be what is stored"
    )


def _create(store: ObjectStore, name: str, gate: threading.Barrier, body: bytes) -> bool | None:
    gate.wait()
    try:
        return store.create(name, body)
    except UnknownOutcomeError:
        return None  # what is stored tells


def _clock(table: OpenTable) -> Iterator[Finding]:
    name = f"{HOME}/doctor-{clock.new_id()}"
    before = clock.now()
    try:
        table.store.create(name, b"clock")
        after, made = clock.now(), table.store.head(name)
    finally:
        table.store.delete([name])
    if made is None:
        raise NotFoundError(table.store.uri(name))
    modified = datetime.fromtimestamp(made.modified, UTC)
    apart = max(before - modified, modified - after, timedelta(0))
    level: Level = "problem" if apart > CLOCKS_FAR_APART else "warning" if apart > CLOCKS_APART else "ok"
    told = f"this machine's clock and the store's are {_duration(apart)} apart"
    if level == "ok":
        yield Finding("clock", "ok", told)
    else:
        wanted = f"{told} ({before:%Y-%m-%d %H:%M:%S} and {modified:%Y-%m-%d %H:%M:%S} UTC), at most 5 min are expected"
        yield Finding("clock", level, wanted, "set this machine's clock by NTP (`timedatectl set-ntp true`)")

    objects = table.objects
    chains: dict[str, Chain[Any]] = {"spec": objects.specs, "ledger": objects.ledger, "snapshot": objects.snapshots}
    heads = {what: head for what, versions in chains.items() if (head := versions.head()) is not None}
    stamps = {f"{what} {head.number}": datetime.fromisoformat(head.written_at) for what, head in heads.items()}
    if "ledger" in heads:
        received_at = heads["ledger"].body.received_at
        stamps[f"receipt stamp {heads['ledger'].number}"] = EPOCH + timedelta(microseconds=received_at)
    future = [f"{what} by {_duration(stamp - before)}" for what, stamp in stamps.items() if stamp > before + FUTURE]
    if future:
        yield Finding(
            "clock",
            "problem",
            f"in the future of this machine's clock, {before:%Y-%m-%d %H:%M:%S} UTC: {', '.join(future)}; the clock of the "
            "machine that wrote them was ahead, or this one's is behind, and new receipt stamps follow the last one",
            "set the clocks of all machines that write this table by NTP (`timedatectl set-ntp true`)",
        )


def _queues(table: OpenTable) -> Iterator[Finding]:
    yield from _queue(table)
    if table.large_queue is not None:
        for finding in _queue(table.at_large_queue()):
            yield replace(finding, found=f"of large partitions: {finding.found}")


def _queue(table: OpenTable) -> Iterator[Finding]:
    queue = table.queue
    ledger, snapshot = table.objects.ledger.head(), table.last_snapshot()
    waiting = table.unpublished(snapshot.body if snapshot else None, ledger.number) if ledger else {}
    if isinstance(queue, SqliteQueue) and not Path(queue.path).exists():  # opening would make it
        if waiting:
            told = f"{queue.path} is missing, and the ledger is ahead of what is published in {len(waiting)} partitions"
            yield Finding("queue", "warning", told, "`lakeupsert run` makes it anew and sends their messages again")
        else:
            yield Finding("queue", "ok", f"{queue.path} is not there yet, and nothing is to be sent")
        return
    stats = queue.stats()
    yield Finding(
        "queue",
        "ok",
        f"{stats.visible} messages wait, {stats.leased} are being worked on; one that gets no answer comes again after "
        f"{LEASE_SECONDS:g} s, and is dead after {queue.max_receives} receives",
    )
    for letter in queue.dead_letters(1):
        yield Finding(
            "queue",
            "warning",
            f"dead letters: {stats.dead}; the first: {letter.reason}",
            "mend that, then run `lakeupsert redrive`: it gives back those that are not merged and deletes the others",
        )
    if isinstance(queue, SqsQueue) and (visibility := queue.visibility_seconds()) < FUNCTION_SECONDS:
        yield Finding(
            "queue",
            "warning",
            f"the visibility timeout of {queue.name} is {visibility} s, and a function that SQS calls works "
            f"by it: at least {FUNCTION_SECONDS} s are expected, or a second one repeats what the first one merges",
            "set the queue's visibility timeout to six times the function's; `lakeupsert worker` says its own",
        )
    if isinstance(queue, SqliteQueue):
        messages = queue.messages()
        ledger = table.objects.ledger.head()  # again, after the messages: a batch may have been committed meanwhile
        last = ledger.number if ledger else -1
        strays = [m for m in messages if m.table != table.name or m.batch > last]
        if strays:
            yield Finding(
                "queue",
                "warning",
                f"messages about batches that the ledger does not have: {len(strays)}, such as table {strays[0].table!r}, "
                f"batch {strays[0].batch}; the last batch of {table.name!r} is {last if ledger else 'none'}",
                f"stop the workers and delete {queue.path}; `lakeupsert run` sends again what is needed",
            )
        mode = queue.journal_mode()
        if mode != "wal":
            yield Finding(
                "queue",
                "warning",
                f"the journal of {queue.path} is in mode {mode}, not wal: its file system has no shared memory",
                f"name a file on a local disk as `queue` in [tables.{table.name}]",
            )


def _spark(table: OpenTable) -> Iterator[Finding]:
    # `--host local` needs no Spark, and only the engine is a setting
    level: Level = "problem" if table.settings.engine == "spark" else "warning"
    local = "; `--host local` and engine arrow need none of it"
    try:
        spark = sparkenv.require_pyspark()
    except ConfigurationError as e:
        yield Finding("spark", level, e.message, e.next)
        return
    versions = f"pyspark {spark or 'of unknown version'}, pyarrow {pa.__version__}, Python {platform.python_version()}"
    if spark is not None and int(spark.split(".")[0]) < sparkenv.OLDEST_SPARK:
        told = f"{versions}; pyspark {sparkenv.OLDEST_SPARK}.0 or later is expected"
        yield Finding("spark", level, told, f"pip install 'lakeupsert[spark]'{local}")
    else:
        yield Finding("spark", "ok", versions)
    unfit = sparkenv.unfit_workers()
    if unfit is None:
        yield Finding("python", "ok", f"Spark's workers run {os.environ.get('PYSPARK_PYTHON', sys.executable)}")
    else:
        mend = f"unset PYSPARK_PYTHON, or set it to {sys.executable}{local}"
        yield Finding("python", level, f"PYSPARK_PYTHON: {unfit}", mend)
    try:
        java = sparkenv.find_java()
    except ConfigurationError as e:
        yield Finding("java", level, e.message, e.next)
        return
    told = f"Java {java.version}, {java.program}"
    if java.version > sparkenv.NEWEST_JAVA:
        made_for = f"Spark is made for {sparkenv.OLDEST_JAVA} to {sparkenv.NEWEST_JAVA}"
        yield Finding("java", "warning", f"{told}; {made_for}", f"set JAVA_HOME to one of these{local}")
    else:
        yield Finding("java", "ok", told)


def _landing(table: OpenTable) -> Iterator[Finding]:
    pattern = table.settings.landing_dates
    if not pattern:
        return
    paths = [found.name for found in table.landing.list("") if is_landing_file(found.name)]
    others = [path for path in paths if received_on(path, pattern) is None]
    if not others:
        yield Finding("landing", "ok", f"files whose folder is a date by {pattern!r}: {len(paths)}, all that there are")
        return
    dated = [path for path in paths if not is_stray(path, pattern, table.settings.format)]
    usual = fitting({path.rpartition("/")[0] for path in dated})
    yield Finding(
        "landing",
        "warning" if len(others) < len(paths) or not dated else "problem",
        f"by `landing_dates` = {pattern!r}, {len(others)} of {len(paths)} landing files have no date and are not taken, such "
        f"as {others[0]}",
        f"set `landing_dates` in [tables.{table.name}] to what fits all of them: " + " or ".join(map(repr, usual))
        if usual
        else f"correct `landing_dates` in [tables.{table.name}], or move these files into folders that it fits",
    )


def _disk(table: OpenTable) -> Iterator[Finding]:
    store = open_store(table.settings.processed)
    if not isinstance(store, LocalStore):
        return
    snapshot = table.last_snapshot()
    largest = max((shown.bytes for shown in snapshot.body.partitions.values()), default=0) if snapshot else 0
    free = shutil.disk_usage(_nearest(Path(store.root))).free
    told = f"{free / 1e6:,.0f} MB free, the largest partition has {largest / 1e6:,.0f} MB"
    if free < 2 * largest:
        wanted = "twice that is expected, since a merge writes a partition anew beside the old one"
        yield Finding("disk", "warning", f"{told}; {wanted}", f"free space on the file system of {store.root}")
    else:
        yield Finding("disk", "ok", told)


def _settings(table: OpenTable) -> Iterator[Finding]:
    settings = table.settings
    if int(settings.superseded_retention[:-1]) == 0 and settings.keep_snapshots != 1:
        yield Finding(
            "settings",
            "problem",
            f"`superseded_retention` is {settings.superseded_retention!r} and `keep_snapshots` {settings.keep_snapshots}; no "
            "retention needs 1 snapshot, since older ones name superseded files",
            f"set `keep_snapshots` = 1, or `superseded_retention` to a duration, in [tables.{table.name}]",
        )
    spec = table.head_spec()  # refuses a spec that these settings contradict
    yield Finding("settings", "ok", f"as in spec {spec.number}" if spec else "there is no table yet to contradict them")


def _duration(span: timedelta) -> str:
    seconds = span.total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


CHECKS: dict[str, Callable[[OpenTable], Iterator[Finding]]] = {
    "permissions": _permissions,  # first: later ones may make the processed zone
    "store": _store,
    "clock": _clock,
    "queue": _queues,
    "spark": _spark,
    "landing": _landing,
    "disk": _disk,
    "settings": _settings,
}
