"""A queue in one SQLite file, for the workers of one machine.

Reads     the queue's file, and /proc to see whether the process that holds a lease still lives
Writes    the queue's file, one transaction per call; calls that only read write nothing and need no write permission
Repeat    safe: a failed call changed nothing; if the file is lost, the next `lakeupsert run` sends the messages again

A lease ends when its time is up, or as soon as its process is gone, so that a killed worker delays nobody. A pid is not enough to
identify the process: pids are reused, machines restart, and containers that share the file count pids separately.
"""

import os
import shlex
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
from lakeupsert.decoding import decoder_of
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue.base import ALONE_FROM, NOTHING_DONE, DeadLetter, Lease, Message, MessageError, QueueStats
from lakeupsert.retries import BUSY_PAUSE_SECONDS, BUSY_SECONDS, LONGEST_SQLITE_LEASE_SECONDS, SQLITE_READS

Found = TypeVar("Found")

_SCHEMA = (
    # id: order of sending; visible_at: seconds since 1970, or 0: the clock may be set back later
    # token, owner: of the last receive, until it is answered (they stay
    # after the lease's time: an ack is valid until somebody else receives); buried: why it is a dead letter, else null
    """CREATE TABLE IF NOT EXISTS messages (
        id INTEGER PRIMARY KEY, body TEXT NOT NULL, visible_at REAL NOT NULL, receives INTEGER NOT NULL DEFAULT 0,
        token TEXT UNIQUE, owner TEXT, buried TEXT)""",
    "CREATE INDEX IF NOT EXISTS owners ON messages (owner) WHERE owner IS NOT NULL",
)
_HIDDEN = f"visible_at > :now AND visible_at <= :now + {LONGEST_SQLITE_LEASE_SECONDS}"


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
        if not bodies:  # sending nothing needs no write permission
            return
        with self._transaction() as db:
            db.executemany("INSERT INTO messages (body, visible_at) VALUES (?, 0)", [(body,) for body in bodies])

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        me = _this_process()
        with self._transaction() as db:
            now = clock.now().timestamp()
            _free_leases_of_ended(db, now, me)
            rows = db.execute(
                f"SELECT id, body, receives + 1 FROM messages WHERE buried IS NULL AND NOT ({_HIDDEN}) ORDER BY id",
                {"now": now},
            )
            leases: list[Lease] = []
            while len(leases) < limit and (row := rows.fetchone()):
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
                    (lease.token, _encode_owner(me), receives, _visible_at(lease_seconds), id_),
                )
                leases.append(lease)
        return leases

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        # This process now owns the lease: it may be a worker that got it from the receiving process.
        values = _visible_at(lease_seconds), _encode_owner(_this_process())
        return self._answer(lease, "UPDATE messages SET visible_at = ?, owner = ?", *values)

    def ack(self, lease: Lease) -> bool:
        return self._answer(lease, "DELETE FROM messages")

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        visible_at = _visible_at(delay_seconds) if delay_seconds else 0.0
        return self._answer(lease, "UPDATE messages SET visible_at = ?, token = NULL, owner = NULL", visible_at)

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._answer(lease, "UPDATE messages SET buried = ?, token = NULL, owner = NULL", reason)

    def stats(self) -> QueueStats:
        def count(db: sqlite3.Connection) -> QueueStats:
            now = clock.now().timestamp()
            visible, leased, dead = db.execute(
                f"SELECT count(*) FILTER (WHERE buried IS NULL AND NOT ({_HIDDEN})), "
                f"count(*) FILTER (WHERE buried IS NULL AND {_HIDDEN}), count(buried) FROM messages",
                {"now": now},
            ).fetchone()
            of_owner = f"SELECT count(*) FROM messages WHERE buried IS NULL AND {_HIDDEN} AND owner = :owner"
            # Messages of ended processes count as visible, although only the next receive frees them.
            ended = _ended_owners(db, _this_process())
            free = sum(db.execute(of_owner, {"now": now, "owner": owner}).fetchone()[0] for owner in ended)
            return QueueStats(visible + free, leased - free, dead)

        return self._read(count) or QueueStats(0, 0, 0)

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        rows = self._read(
            lambda db: db.execute(
                "SELECT body, buried, receives FROM messages WHERE buried IS NOT NULL ORDER BY id LIMIT ?",
                (-1 if limit is None else limit,),
            ).fetchall()
        )
        return [DeadLetter(_decode(body), reason, receives) for body, reason, receives in rows or ()]

    def messages(self) -> list[Message]:
        """All readable messages that are not dead, including leased ones. They stay."""
        bodies = self._read(
            lambda db: db.execute("SELECT body FROM messages WHERE buried IS NULL ORDER BY id").fetchall()
        )
        return [message for (body,) in bodies or () if (message := _decode(body)) is not None]

    def journal_mode(self) -> str:
        """`wal`, or the mode that SQLite falls back to on a file system without support for it."""
        with self._transaction() as db:
            return str(db.execute("PRAGMA journal_mode").fetchone()[0])

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        again, drop = frozenset(again), frozenset(drop)
        with self._transaction() as db:
            rows = db.execute("SELECT id, body FROM messages WHERE buried IS NOT NULL").fetchall()
            letters = [(id_, _decode(body)) for id_, body in rows]
            again_rows = [(id_,) for id_, message in letters if message in again]
            dropped_rows = [(id_,) for id_, message in letters if message in drop]
            db.executemany("UPDATE messages SET visible_at = 0, receives = 0, buried = NULL WHERE id = ?", again_rows)
            db.executemany("DELETE FROM messages WHERE id = ?", dropped_rows)
        return len(again_rows), len(dropped_rows)

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
                # Takes the write lock first: a call can't wait for one that it takes later.
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException as e:
                self._disconnect()  # rolls back; the next call connects again
                if isinstance(e, sqlite3.Error):
                    raise self._failure(e) from e
                raise

    def _read(self, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
        """The result of ``look`` on one state of the file; None if no message was ever sent. Writes nothing, not even beside
        it."""
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
            except OSError as e:  # for example a folder without search permission: the queue may exist
                raise self._permission_error(e, to="read") from e

    def _read_as_guest(self, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
        """Read without write permission.

        SQLite then opens a file in WAL mode only while others have it open, or as `immutable`. The latter is wrong once somebody
        opens the file, so its result only counts if nobody has opened it during the read.
        """
        for _ in range(SQLITE_READS):
            before = _file_state(self.path)
            how = "mode=ro" if before is None else "mode=ro&immutable=1"
            try:
                with closing(self._open(f"{Path(self.path).as_uri()}?{how}")) as db:
                    result = _look(db, look)
            except sqlite3.Error:
                if _file_state(self.path) == before:
                    raise
                continue
            if before is None or _file_state(self.path) == before:
                return result
        raise TryAgainError(
            "queue-busy",
            f"The queue {self.path} changed during each of {SQLITE_READS} attempts to read it. Nothing was changed by this call.",
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
            db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last messages, never the file
            for statement in _SCHEMA:
                db.execute(statement)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _permission_error(self, e: Exception, *, to: Literal["read", "write"]) -> ConfigurationError:
        if to == "read":
            needs = "The folder, the file and its files -wal and -shm must be readable."
        else:
            needs = "The folder must exist, and folder and file must be writable."
        return ConfigurationError(
            "queue-not-permitted",
            f"User {os.geteuid()} can't open the queue {self.path} to {to} it: {e}. {needs} {NOTHING_DONE}",
            next=f"give this user permission to {to} there, or set another path in `queue`",
        )

    def _failure(self, e: sqlite3.Error, *, to: Literal["read", "write"] = "write") -> LakeupsertError:
        """The error for SQLite's, by what the operator does next."""
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the low byte is the kind, the rest detail
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            return TryAgainError(
                "queue-busy",
                f"Another process has locked the queue {self.path} for over {BUSY_SECONDS:g} s; a few milliseconds are "
                f"expected: {e}. {NOTHING_DONE}",
                next=f"find that process (`fuser {shlex.quote(str(self.path))}`), then run the same command again",
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return TryAgainError(
                "queue-disk",
                f"The queue {self.path} can't be read or written: {e}. {NOTHING_DONE}",
                next="free space on that file system, check the disk and its quota, then run the same command again",
            )
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return self._permission_error(e, to=to)
        return ConfigurationError(
            "queue-unusable",
            f"{self.path} is not a queue that this version of lakeupsert can use: {e}. {NOTHING_DONE}",
            next="if it is the queue, stop its workers and delete it (`lakeupsert run` sends the messages again); if it is "
            "another file, set another path in `queue`",
        )


def _visible_at(seconds: float) -> float:
    return clock.now().timestamp() + min(LONGEST_SQLITE_LEASE_SECONDS, seconds)


def _decode(body: str) -> Message | None:
    try:
        return Message.decode(body)
    except MessageError:
        return None


_lock = threading.Lock()
_connected: WeakSet[SqliteQueue] = WeakSet()


def _before_fork() -> None:
    # SQLite counts file locks per process. A child inherits the count with an open connection, but not the locks: what it wrote,
    # even over its own connection, was lost when its parent closed (sqlite.org/howtocorrupt.html).
    _lock.acquire()
    for queue in _connected:
        queue._disconnect()


os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)


def _look(db: sqlite3.Connection, look: Callable[[sqlite3.Connection], Found]) -> Found | None:
    db.execute("BEGIN")  # all queries see one state
    try:
        there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone()
        return look(db) if there else None
    finally:
        db.execute("ROLLBACK")


def _file_state(path: str) -> tuple[int, int, int] | None:
    """Other figures whenever the file changes. None: somebody has the file open, or has crashed, so a part of the queue is in a
    file beside it."""
    if any(os.path.lexists(f"{path}{suffix}") for suffix in ("-wal", "-journal")):
        return None
    status = Path(path).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _write_ahead(db: sqlite3.Connection) -> None:
    deadline = clock.elapsed() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as e:
            # if two processes create the file at once, SQLite fails one of them without waiting
            if e.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or clock.elapsed() >= deadline:
                raise
            clock.sleep(clock.jitter(BUSY_PAUSE_SECONDS))


class _Process(msgspec.Struct, frozen=True):
    host: str
    boot: str
    pid: int
    started: int


def _this_process() -> _Process | None:
    """None if there is no /proc. Leases then only end by time."""
    pid = os.getpid()
    try:
        namespace = Path("/proc/self/ns/pid").readlink()  # containers may share a host name, but not pids
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _Process(f"{socket.gethostname()} {namespace}", boot, pid, _start_time(pid))
    except OSError:
        return None


def _encode_owner(process: _Process | None) -> str | None:
    return None if process is None else msgspec.json.encode(process).decode()


def _start_time(pid: int) -> int:
    """In ticks since boot. Raises ProcessLookupError also for a zombie, which holds nothing any more."""
    # The process name before the last parenthesis may contain anything.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(fields[19])


def _has_ended(owner: _Process, me: _Process) -> bool:
    if owner.host != me.host:
        return False
    if owner.boot != me.boot:
        return True
    try:
        with suppress(PermissionError):  # another user's process, which lives
            os.kill(owner.pid, 0)  # sends no signal, and also finds processes that /proc may hide
        return _start_time(owner.pid) != owner.started
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _ended_owners(db: sqlite3.Connection, me: _Process | None) -> list[str]:
    owners = db.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall()
    return [owner for (owner,) in owners if me and _has_ended(decoder_of(_Process).decode(owner), me)]


def _free_leases_of_ended(db: sqlite3.Connection, now: float, me: _Process | None) -> None:
    ended = _ended_owners(db, me)
    db.executemany(
        "UPDATE messages SET visible_at = ?, owner = NULL WHERE owner = ?", [(now, owner) for owner in ended]
    )
