"""A queue in one SQLite file, for the workers of one machine.

Reads     the queue's file, and /proc to see whether the process behind a lease still lives
Writes    the queue's file, one transaction a call
Repeat    safe: a call that failed changed nothing; a file that is lost costs nothing but the next `lakeupsert run`

A lease ends when its time is up, or at once when the process that holds it is gone, so that a killed worker delays
nobody. Which process that is takes more than its pid: pids are used again, machines restart, and containers that share
the file count their pids separately.
"""

import os
import socket
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

import msgspec

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue.base import ALONE_FROM, DeadLetter, Lease, Message, MessageError, QueueStats

BUSY_SECONDS = 30.0
"""How long a call waits for another process's transaction; these take milliseconds, so longer means one that hangs."""

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
        with self._transaction() as db:
            now = clock.now().timestamp()
            _free_leases_of_the_gone(db, now, _this_process())
            counted = db.execute(
                "SELECT count(*) FILTER (WHERE buried IS NULL AND visible_at <= ?1), "
                "count(*) FILTER (WHERE buried IS NULL AND visible_at > ?1), count(buried) FROM messages",
                (now,),
            ).fetchone()
        return QueueStats(*counted)

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        with self._transaction() as db:
            found = db.execute(
                "SELECT body, buried, receives FROM messages WHERE buried IS NOT NULL ORDER BY id LIMIT ?",
                (-1 if limit is None else limit,),
            ).fetchall()
        return [DeadLetter(_decoded(body), reason, receives) for body, reason, receives in found]

    def messages(self) -> list[Message]:
        """Those that can be read and are not dead, leased ones too; they stay."""
        with self._transaction() as db:
            bodies = db.execute("SELECT body FROM messages WHERE buried IS NULL ORDER BY id").fetchall()
        return [message for (body,) in bodies if (message := _decoded(body)) is not None]

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

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            _connected.add(self)
            self._connection = db = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            _write_ahead(db)
            db.execute("PRAGMA synchronous = NORMAL")  # a power cut may take the last messages, never the file
            for statement in _SCHEMA:
                db.execute(statement)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failure(self, e: sqlite3.Error) -> LakeupsertError:
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
            return ConfigurationError(
                "queue-not-permitted",
                f"The queue {self.path} can't be opened for writing by user {os.geteuid()}: {e}. Its folder must "
                f"exist, and folder and file be writable. {nothing}",
                next="give this user the right to write there, or name another path in `queue`",
            )
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


def _free_leases_of_the_gone(db: sqlite3.Connection, now: float, me: _Process | None) -> None:
    owners = db.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall()
    gone = [owner for owner in owners if me and _is_gone(msgspec.json.decode(owner[0], type=_Process), me)]
    db.executemany("UPDATE messages SET visible_at = ?, owner = NULL WHERE owner = ?", [(now, *o) for o in gone])
