"""The SQLite queue: the contract of all queues, and what is its own: processes, their deaths, and its one file."""

import os
import pickle
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.queue import Message, QueueStats, SqliteQueue, open_queue, sqlite
from lakeupsert.testing.queue_contract import HOLD, WorkQueueContract, drain, message, messages


class TestSqliteQueue(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "queue.sqlite"

    def new_queue(self) -> SqliteQueue:
        return SqliteQueue(self.path, max_receives=3)

    @pytest.mark.parametrize("answer", ["ack", "extend", "release", "bury"])
    def test_stale_answer_is_refused_and_changes_nothing(self, queue: SqliteQueue, answer: str) -> None:
        stale, current = self.receive_twice(queue)
        more = {"ack": (), "extend": (HOLD,), "release": (), "bury": ("no such table",)}[answer]
        assert getattr(queue, answer)(stale, *more) is False
        assert queue.stats() == QueueStats(visible=0, leased=1, dead=0)
        self.let_time_pass(self.lease_seconds)
        assert self.receive_one(queue).receives == current.receives + 1

    def test_ack_after_a_release_is_refused(self, queue: SqliteQueue) -> None:
        queue.send([message(1)])
        lease = self.receive_one(queue)
        queue.release(lease)
        assert not queue.ack(lease)
        assert self.receive_one(queue).receives == 2

    def test_oldest_message_is_received_first(self, queue: SqliteQueue) -> None:
        queue.send(messages(3))
        queue.send([message(9)])
        assert [lease.message.batch for lease in drain(queue)] == [0, 1, 2, 9]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqliteQueue]:
    queue = SqliteQueue(tmp_path / "queue.sqlite")
    yield queue
    queue.close()


class HoursAhead(clock.Source):
    def now(self) -> datetime:
        return super().now() + timedelta(hours=3)


def test_message_of_a_process_whose_clock_is_ahead_waits_for_nobody(queue: SqliteQueue) -> None:
    """It was hidden until the clocks of all workers had got there."""
    with clock.use(HoursAhead()):
        queue.send(messages(4))
        dead, back, _ = queue.receive(3, HOLD)
        queue.release(back, delay_seconds=5)
        queue.bury(dead, "it failed")
        queue.redrive([dead.message])
    assert queue.stats().visible == 4  # one of them leased, by a process that lives
    assert len(queue.receive(4, HOLD)) == 4
    assert queue.stats().leased == 4


# -- processes

DRAIN = """
import sys
from lakeupsert.queue import SqliteQueue
queue = SqliteQueue(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
while leases := queue.receive(3, 600):
    for lease in leases:
        print(lease.message.batch)
        assert queue.ack(lease)
"""

REDRIVE = """
import sys
from lakeupsert.queue import Message, SqliteQueue
queue = SqliteQueue(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(queue.redrive([Message("sales", "transaction_date=2020-01-01", batch) for batch in range(200)])[0])
"""

HOLD_ONE = """
import sys
from lakeupsert.queue import SqliteQueue
queue = SqliteQueue(sys.argv[1])
[lease] = queue.receive(1, 600)
print("ready", flush=True)
sys.stdin.readline()
"""

HAND_OVER = """
import pickle, sys
from lakeupsert.queue import SqliteQueue
queue = SqliteQueue(sys.argv[1])
[lease] = queue.receive(1, 600)
print("ready", pickle.dumps(lease).hex(), sep="\\n", flush=True)
sys.stdin.readline()
"""

FORK = """
import os, sys
from lakeupsert.queue import Message, SqliteQueue
queue = SqliteQueue(sys.argv[1])
queue.send([Message("sales", "d=1", 0)])
closed, close = os.pipe()
child = os.fork()
if child == 0:
    queue.send([Message("sales", "d=1", 1)])
    os.read(closed, 1)
    queue.send([Message("sales", "d=1", 2)])
    os._exit(0)
queue.send([Message("sales", "d=1", 3)])
queue.close()
os.write(close, b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@contextmanager
def running(script: str, queue: SqliteQueue) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has come as far as "ready" and waits for a line."""
    command = [sys.executable, "-c", script, queue.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_two_processes_that_drain_get_each_message_once(queue: SqliteQueue) -> None:
    queue.send(messages(200))
    with running(DRAIN, queue) as first, running(DRAIN, queue) as second:
        for process in (first, second):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        received = [process.communicate()[0].split() for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(int(batch) for batch in received[0] + received[1]) == list(range(200))
    assert queue.stats() == QueueStats(visible=0, leased=0, dead=0)


@pytest.mark.long
def test_two_processes_that_redrive_bring_each_dead_letter_back_once(queue: SqliteQueue) -> None:
    queue.send(messages(200))
    for lease in drain(queue):
        queue.bury(lease, "no such table")
    with running(REDRIVE, queue) as first, running(REDRIVE, queue) as second:
        for process in (first, second):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        counts = [int(process.communicate()[0]) for process in (first, second)]
    assert sum(counts) == 200
    assert [lease.message.batch for lease in drain(queue)] == list(range(200))


@pytest.mark.long
def test_fork_keeps_what_parent_and_child_send(queue: SqliteQueue) -> None:
    """A child with an inherited connection loses its writes when the parent closes (sqlite.org/howtocorrupt.html)."""
    subprocess.run([sys.executable, "-c", FORK, queue.path], check=True)
    assert sorted(lease.message.batch for lease in drain(queue)) == [0, 1, 2, 3]


def test_pickled_queue_is_the_same_queue(queue: SqliteQueue) -> None:
    queue.send([message(1)])
    copy = pickle.loads(pickle.dumps(queue))
    assert copy.max_receives == queue.max_receives
    [lease] = copy.receive(10, HOLD)
    assert queue.ack(lease)
    assert copy.stats() == QueueStats(visible=0, leased=0, dead=0)
    copy.close()


# -- a lease whose process is gone

NO_PID = 2**22 + 1  # Linux counts to 2**22
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process started")


def test_lease_of_a_living_process_is_kept(queue: SqliteQueue) -> None:
    queue.send([message(1)])
    with running(HOLD_ONE, queue):
        assert drain(queue) == []


@needs_proc
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_lease_of_a_killed_process_is_free_at_once(queue: SqliteQueue, reaped: bool) -> None:
    queue.send([message(1)])
    with running(HOLD_ONE, queue) as holder:
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        assert queue.stats() == QueueStats(visible=1, leased=0, dead=0)
        [lease] = queue.receive(10, HOLD)
    assert (lease.message, lease.receives) == (message(1), 2)


@needs_proc
def test_lease_that_a_living_process_extended_outlives_its_receiver(queue: SqliteQueue) -> None:
    queue.send([message(1)])
    with running(HAND_OVER, queue) as receiver:
        assert receiver.stdout
        lease = pickle.loads(bytes.fromhex(receiver.stdout.readline()))
        assert queue.extend(lease, HOLD)
    assert drain(queue) == []
    assert queue.ack(lease)


@needs_proc
@pytest.mark.parametrize(
    ("other", "visible"),
    [
        pytest.param({"started": 1}, 1, id="pid used again"),
        pytest.param({"boot": "another"}, 1, id="restarted machine"),
        pytest.param({"pid": NO_PID}, 1, id="no such process"),
        pytest.param(
            {"pid": NO_PID, "boot": "another", "host": "another"}, 0, id="another host, of which we know nothing"
        ),
    ],
)
def test_lease_of_another_owner_is_free_where_that_is_gone(
    queue: SqliteQueue, other: dict[str, object], visible: int
) -> None:
    queue.send([message(1)])
    assert len(drain(queue)) == 1
    with closing(sqlite3.connect(queue.path)) as db, db:
        [[owner]] = db.execute("SELECT owner FROM messages").fetchall()
        changed = msgspec.json.encode(msgspec.json.decode(owner) | other).decode()
        db.execute("UPDATE messages SET owner = ?", (changed,))
    assert len(drain(queue)) == visible


# -- trouble with the file


def test_queue_held_by_another_process_asks_to_try_again(queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send([message(1)])
    queue.close()
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0)
    with closing(sqlite3.connect(queue.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TryAgainError, match="over 0 s") as caught:
            queue.send([message(2)])
    assert caught.value.code == "queue-busy"
    assert [lease.message for lease in drain(queue)] == [message(1)]


def test_send_beyond_the_disk_quota_sends_nothing(queue: SqliteQueue) -> None:
    queue.send([message(1)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(TryAgainError, match="free space") as caught:
            queue.send(messages(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "queue-disk"
    assert queue.stats() == QueueStats(visible=1, leased=0, dead=0)


@pytest.mark.parametrize("folder", ["/proc", "/no such folder"])
def test_folder_that_takes_no_file_is_a_configuration_error(folder: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{folder}/queue.sqlite to write") as caught:
        SqliteQueue(f"{folder}/queue.sqlite").send([message(1)])
    assert caught.value.code == "queue-not-permitted"


def test_file_that_is_no_database_is_refused_and_left_as_it_is(queue: SqliteQueue) -> None:
    Path(queue.path).write_text("order_id,amount\n" * 100)
    with pytest.raises(ConfigurationError, match="`lakeupsert run`") as caught:
        queue.receive(10, HOLD)
    assert caught.value.code == "queue-unusable"
    assert Path(queue.path).read_text() == "order_id,amount\n" * 100


def test_database_of_another_program_is_refused(queue: SqliteQueue) -> None:
    with closing(sqlite3.connect(queue.path)) as db:
        db.execute("CREATE TABLE messages (subject TEXT)")
    with pytest.raises(ConfigurationError, match="is not a queue"):
        queue.send([message(1)])


# -- messages and addresses


@pytest.mark.parametrize(
    "body",
    [
        '{"v":2,"table":"sales","partition":"d=1","batch":1}',
        '{"table":"sales","partition":"d=1","batch":1}',
        '{"v":1,"table":"","partition":"d=1","batch":1}',
        '{"v":1,"table":"sales","partition":"","batch":1}',
        '{"v":1,"table":"sales","partition":"d=1","batch":-1}',
        '{"v":1,"table":"sales","partition":"d=1","batch":"1"}',
        '{"v":1,"table":"sales","partition":"d=1"}',
        "[]",
        "not JSON",
    ],
)
def test_unreadable_message_is_buried_and_keeps_nobody_from_the_next(queue: SqliteQueue, body: str) -> None:
    queue.send([message(1)])
    with closing(sqlite3.connect(queue.path)) as db, db:
        db.execute("UPDATE messages SET body = ?", (body,))
    queue.send([message(2)])
    assert [lease.message for lease in queue.receive(1, HOLD)] == [message(2)]
    assert queue.stats() == QueueStats(visible=0, leased=1, dead=1)
    [letter] = queue.dead_letters(10)
    assert letter.message is None
    assert "Expected version 1" in letter.reason
    assert queue.redrive([message(1)], drop=[message(2)]) == (0, 0)
    assert queue.dead_letters(10) == [letter]


def test_message_that_was_received_twice_before_comes_alone(queue: SqliteQueue) -> None:
    queue.send([message(1), message(2)])
    for _ in range(2):
        for lease in queue.receive(9, HOLD):
            queue.release(lease)
    queue.send([message(3), message(4)])
    found = [[lease.message.batch for lease in queue.receive(9, HOLD)] for _ in range(4)]
    assert found == [[1], [2], [3, 4], []]


def test_message_is_small_versioned_json() -> None:
    assert Message("sales", "d=1", 3).encode() == '{"v":1,"table":"sales","partition":"d=1","batch":3}'


def test_message_may_name_a_work_object() -> None:
    sent = Message("sales", "d=1", 3, "_lakeupsert/units/reprocess-1.json")
    assert Message.decode(sent.encode()) == sent
    assert Message.decode('{"v":1,"table":"sales","partition":"d=1","batch":3}').work is None


def test_message_with_a_field_of_a_later_release_is_read() -> None:
    assert Message.decode('{"v":1,"table":"sales","partition":"d=1","batch":3,"hint":[1]}') == Message(
        "sales", "d=1", 3
    )


@pytest.mark.parametrize("slashes", ["", "sqlite://"])
def test_address_of_a_file_opens_it(queue: SqliteQueue, slashes: str) -> None:
    queue.send([message(1)])
    opened = open_queue(slashes + queue.path)
    assert opened.stats().visible == 1
    opened.close()


@pytest.mark.parametrize(
    "address",
    [
        "sqs://key:secret@queue",
        "sqs://secret.fifo",
        "sqs://secret/queue",
        "sqs://",
        "sqlite://secret/queue.sqlite",
        "sqlite://",
    ],
)
def test_unknown_address_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigurationError, match="sqlite:///absolute/path") as caught:
        open_queue(address)
    assert "secret" not in str(caught.value)
