"""A queue in one SQLite file, for the workers of one machine.

Reads     the queue's file, and /proc to see whether the process behind a lease still lives
Writes    the queue's file, one transaction a call; calls that only look write nothing and need no right to
Repeat    safe: a call that failed changed nothing; a file that is lost costs nothing but the next `lakeupsert run`

A lease ends when its time is up, or at once when the process that holds it is gone, so that a killed worker delays
nobody. Which process that is takes more than its pid: pids are used again, machines restart, and containers that share
the file count their pids separately.
"""

import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakSet

import msgspec

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue.base import ALONE_FROM, DeadLetter, Lease, Message, MessageError, QueueStats

BUSY_SECONDS = 30.0
"""How long a call waits for another process's transaction; these take milliseconds, so longer means one that hangs."""

READS = 10
"""How often a call that only looks begins again, since others opened or closed the file meanwhile."""

Found = TypeVar("Found")

_SCHEMA = (
    # id: order of sending; visible_at: seconds since 1970; token, owner: of the last receive, until it is answered
    # (they outlive its time: an ack counts until somebody else receives); buried: why it is a dead letter, else null
    """CREATE TABLE IF NOT EXISTS messages (
        id INTEGER PRIMARY KEY, body TEXT NOT NULL, visible_at REAL NOT NULL, receives INTEGER NOT NULL DEFAULT 0,
        token TEXT UNIQUE, owner TEXT, buried TEXT)""",
    "CREATE INDEX IF NOT EXISTS owners ON messages (owner) WHERE owner IS NOT NULL",
)


class SqliteQueue:
    """See `lakeupsert.queue.base.WorkQueue` for what each method promises. Its folder must exist."""

    def __init__(self, path: str | os.PathLike[str], max_receives: int = 5) -> None:
        self.path = str(Path(path).absolute())
        self.max_receives = max_receives
        self._connection: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"SqliteQueue({self.path!r}, max_receives={self.max_receives})"

    def __reduce__(self) -> tuple[type["SqliteQueue"], tuple[str, int]]:
        return SqliteQueue, (self.path, self.max_receives)

    def send(self, messages: Iterable[Message]) -> None:
        bodies = [message.encode() for message in messages]
        if not bodies:  # who has nothing to send needs no right to
            return
        with self._transaction() as db:
            now = clock.now().timestamp()
            db.executemany("INSERT INTO messages (body, visible_at) VALUES (?, ?)", [(body, now) for body in bodies])

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        me = _this_process()
        with self._transaction() as db:
            now = clock.now().timestamp()
            _free_leases_of_the_gone(db, now, me)
            found = db.execute(
                "SELECT id, body, receives + 1 FROM messages WHERE buried IS NULL AND visible_at <= ? ORDER BY id",
                (now,),
            )
            leases: list[Lease] = []
            while len(leases) < limit and (row := found.fetchone()):
                id_, body, receives = row
                if receives >= ALONE_FROM:
                    if leases:
                        break
                    limit = 1
                try:
                    lease = Lease(Message.decode(body), receives, clock.new_id())
                except MessageError as e:
                    db.execute("UPDATE messages SET buried = ? WHERE id = ?", (e.message, id_))
                    continue
                db.execute(
                    "UPDATE messages SET token = ?, owner = ?, receives = ?, visible_at = ? WHERE id = ?",
                    (lease.token, _text(me), receives, now + lease_seconds, id_),
                )
                leases.append(lease)
        return leases

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        # the lease is now this process's: a worker may have got it from the one that received
        visible_at, owner = clock.now().timestamp() + lease_seconds, _text(_this_process())
        return self._answer(lease, "UPDATE messages SET visible_at = ?, owner = ?", visible_at, owner)

    def ack(self, lease: Lease) -> bool:
        return self._answer(lease, "DELETE FROM messages")

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        visible_at = clock.now().timestamp() + delay_seconds
        return self._answer(lease, "UPDATE messages SET visible_at = ?, token = NULL, owner = NULL", visible_at)

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._answer(lease, "UPDATE messages SET buried = ?, token = NULL, owner = NULL", reason)

    def stats(self) -> QueueStats:
        def count(db: sqlite3.Connection) -> QueueStats:
            now = clock.now().timestamp()
            visible, leased, dead = db.execute(
                "SELECT count(*) FILTER (WHERE buried IS NULL AND visible_at <= ?1), "
                "count(*) FILTER (WHERE buried IS NULL AND visible_at > ?1), count(buried) FROM messages",
                (now,),
            ).fetchone()
            of_owner = "SELECT count(*) FROM messages WHERE buried IS NULL AND visible_at > ? AND owner = ?"
            # The next receive frees what these leased; until then it is free all the same.
            free = sum(db.execute(of_owner, (now, gone)).fetchone()[0] for gone in _owners_gone(db, _this_process()))
            return QueueStats(visible + free, leased - free, dead)

        return self._read(count) or QueueStats(0, 0, 0)

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        found = self._read(
            lambda db: db.execute(
                "SELECT body, buried, receives FROM messages WHERE buried IS NOT NULL ORDER BY id LIMIT ?",
                (-1 if limit is None else limit,),
            ).fetchall()
        )
        return [DeadLetter(_decoded(body), reason, receives) for body, reason, receives in found or ()]

    def messages(self) -> list[Message]:
        """Those that can be read and are not dead, leased ones too; they stay."""
        bodies = self._read(
            lambda db: db.execute("SELECT body FROM messages WHERE buried IS NULL ORDER BY id").fetchall()
        )
        return [message for (body,) in bodies or () if (message := _decoded(body)) is not None]

    def journal_mode(self) -> str:
        """`wal`, or what SQLite keeps to on a file system that can't have that."""
        with self._transaction() as db:
            return str(db.execute("PRAGMA journal_mode").fetchone()[0])

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        again, drop = frozenset(again), frozenset(drop)
        with self._transaction() as db:
            now = clock.now().timestamp()
            found = db.execute("SELECT id, body FROM messages WHERE buried IS NOT NULL").fetchall()
            letters = [(id_, _decoded(body)) for id_, body in found]
            back = [(now, id_) for id_, message in letters if message in again]
            gone = [(id_,) for id_, message in letters if message in drop]
            db.executemany("UPDATE messages SET visible_at = ?, receives = 0, buried = NULL WHERE id = ?", back)
            db.executemany("DELETE FROM messages WHERE id = ?", gone)
        return len(back), len(gone)

    def close(self) -> None:
        with _lock:
            self._disconnect()

    # -- how

    def _answer(self, lease: Lease, change: str, *values: object) -> bool:
        with self._transaction() as db:
            return db.execute(f"{change} WHERE token = ?", (*values, lease.token)).rowcount == 1

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _lock:
            try:
                db = self._connect()
                db.execute("BEGIN IMMEDIATE")  # the write lock first: one taken later can't be waited for
                yield db
                db.execute("COMMIT")
            except BaseException as e:
                self._disconnect()  # rolls back, and the next call begins afresh
                if isinstance(e, sqlite3.Error):
                    raise self._failure(e) from e
                raise

    def _read(self, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
        """What ``look`` finds in one state of the file; None if no message was ever sent. Writes nothing, not even beside it."""
        with _lock:
            try:
                if self._connection is not None:
                    return _look(self._connection, look)
                return self._read_as_guest(look)
            except sqlite3.Error as e:
                self._disconnect()
                raise self._failure(e, to="read") from e
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as e:  # its folder can't be searched, or the like: nobody knows whether there is a queue
                raise self._not_permitted(e, to="read") from e

    def _read_as_guest(self, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
        """Without the right to write there.

        Then SQLite opens a file in WAL mode only while others have it open, or as `immutable`. That is wrong as soon as
        somebody opens it, so what was read so counts only if nobody did meanwhile.
        """
        for _ in range(READS):
            before = _state(self.path)
            how = "mode=ro" if before is None else "mode=ro&immutable=1"
            try:
                with closing(self._open(f"{Path(self.path).as_uri()}?{how}")) as db:
                    found = _look(db, look)
            except sqlite3.Error:
                if _state(self.path) == before:
                    raise
                continue
            if before is None or _state(self.path) == before:
                return found
        raise TryAgainError(
            "queue-busy",
            f"The queue {self.path} changed during each of {READS} attempts to read it. Nothing was changed by this call.",
            next="run the same command again",
        )

    def _open(self, path: str) -> sqlite3.Connection:
        return sqlite3.connect(
            path, uri=path.startswith("file:"), timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            _connected.add(self)
            self._connection = db = self._open(self.path)
            _write_ahead(db)
            db.execute("PRAGMA synchronous = NORMAL")  # a power cut may take the last messages, never the file
            for statement in _SCHEMA:
                db.execute(statement)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _not_permitted(self, e: Exception, *, to: Literal["read", "write"]) -> ConfigurationError:
        if to == "read":
            needs = "Its folder and the file must be readable, and so must the files -wal and -shm beside it."
        else:
            needs = "Its folder must exist, and folder and file be writable."
        return ConfigurationError(
            "queue-not-permitted",
            f"User {os.geteuid()} can't open the queue {self.path} to {to} it: {e}. {needs} "
            "This call sent, received and answered nothing.",
            next=f"give this user the right to {to} there, or name another path in `queue`",
        )

    def _failure(self, e: sqlite3.Error, *, to: Literal["read", "write"] = "write") -> LakeupsertError:
        """SQLite's word, as what the operator does next."""
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the low byte is the kind, the rest detail
        nothing = "This call sent, received and answered nothing."
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            return TryAgainError(
                "queue-busy",
                f"The queue {self.path} was held by another process for over {BUSY_SECONDS:g} s, where milliseconds "
                f"are expected: {e}. {nothing}",
                next=f"see who holds it (`fuser {self.path}`), then run the same command again",
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return TryAgainError(
                "queue-disk",
                f"The queue {self.path} can't be read or written: {e}. {nothing}",
                next="free space on that file system, check the disk and its quota, then run the same command again",
            )
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return self._not_permitted(e, to=to)
        return ConfigurationError(
            "queue-unusable",
            f"{self.path} is not a queue that this version of lakeupsert can use: {e}. {nothing}",
            next="if it is the queue, stop its workers and delete it: a queue is only a hint, `lakeupsert run` sends "
            "the messages again; if it is another file, name another path in `queue`",
        )


def _decoded(body: str) -> Message | None:
    try:
        return Message.decode(body)
    except MessageError:
        return None


_lock = threading.Lock()
_connected: WeakSet[SqliteQueue] = WeakSet()


def _before_fork() -> None:
    # SQLite counts its file locks per process, and a child inherits the count with an open connection, but no lock:
    # what it wrote, even over a connection of its own, was lost when its parent closed (sqlite.org/howtocorrupt.html).
    _lock.acquire()
    for queue in _connected:
        queue._disconnect()


os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)


def _look(db: sqlite3.Connection, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
    db.execute("BEGIN")  # one state for all that is asked
    try:
        there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone()
        return look(db) if there else None
    finally:
        db.execute("ROLLBACK")


def _state(path: str) -> tuple[int, int, int] | None:
    """What changes with the file if it is all there is; None: somebody has it open, or ended without closing it, and a part
    of it is in a file beside it."""
    if any(os.path.lexists(f"{path}{suffix}") for suffix in ("-wal", "-journal")):
        return None
    found = Path(path).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _write_ahead(db: sqlite3.Connection) -> None:
    deadline = clock.elapsed() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as e:
            # of two processes that make a new file at once, SQLite fails one without waiting
            if e.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or clock.elapsed() >= deadline:
                raise
            clock.sleep(clock.jitter(0.05))


class _Process(msgspec.Struct, frozen=True):
    host: str
    boot: str
    pid: int
    started: int


def _this_process() -> _Process | None:
    """None where there is no /proc: leases then end by time alone."""
    pid = os.getpid()
    try:
        namespace = Path("/proc/self/ns/pid").readlink()  # containers may share a host's name, not its pids
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _Process(f"{socket.gethostname()} {namespace}", boot, pid, _start_time(pid))
    except OSError:
        return None


def _text(process: _Process | None) -> str | None:
    return None if process is None else msgspec.json.encode(process).decode()


def _start_time(pid: int) -> int:
    """In ticks since boot. Raises ProcessLookupError for a zombie as well: it has let go of everything."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name before it may hold anything
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(fields[19])


def _is_gone(owner: _Process, me: _Process) -> bool:
    if owner.host != me.host:
        return False
    if owner.boot != me.boot:
        return True
    try:
        with suppress(PermissionError):  # another user's process lives too
            os.kill(owner.pid, 0)  # sends nothing, and sees processes that /proc may hide
        return _start_time(owner.pid) != owner.started
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _owners_gone(db: sqlite3.Connection, me: _Process | None) -> list[str]:
    owners = db.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall()
    return [owner for (owner,) in owners if me and _is_gone(msgspec.json.decode(owner, type=_Process), me)]


def _free_leases_of_the_gone(db: sqlite3.Connection, now: float, me: _Process | None) -> None:
    gone = _owners_gone(db, me)
    db.executemany("UPDATE messages SET visible_at = ?, owner = NULL WHERE owner = ?", [(now, owner) for owner in gone])
