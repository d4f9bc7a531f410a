"""Several real processes on one lake: appends, workers, publishers and readers at once, exact against the model."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table, clock
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline import history
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.queue import Message, QueueStats, WorkQueue
from lakeupsert.rows import checksums, vectors
from tests.harness.damage import damage
from tests.harness.faults import Fault, Points
from tests.harness.lake import Lake, row
from tests.harness.model import Row, Rules, expected
from tests.harness.processes import LakeProcess, Strike

EMPTY = QueueStats(visible=0, leased=0, dead=0)


@pytest.fixture
def lake(folder: Path) -> Lake:
    return Lake(folder / "lake")


@pytest.fixture
def processes() -> Iterator[Callable[[Lake, int], list[LakeProcess]]]:
    """Processes that end with the test."""
    with ExitStack() as stack:
        yield lambda lake, number: [stack.enter_context(LakeProcess(lake)) for _ in range(number)]


class StampedLake(Lake):
    """Landing files have no ordering column: each batch's receipt stamp is the order of its rows."""

    rules = Rules(Lake.rules.key, ("record_timestamp",), ("d",), "op", ("D",))

    def __init__(self, root: Path, **settings: Any) -> None:
        schema = {"k": "string", "l": "int", "d": "date", "v": "bigint", "op": "string"}
        super().__init__(root, **{"order_by": ("record_timestamp",), "schema": schema, **settings})

    def land(self, path: str, rows: Sequence[Row], refused: Sequence[Row] = ()) -> None:
        super().land(path, [{c: v for c, v in given.items() if c != "ts"} for given in rows], refused)

    def expected(self, up_to: int, unsettled: Collection[str] = ()) -> list[dict[str, Any]]:
        entries = self.entries()
        stamp = {f.path: stamp_of(entry.received_at) for _, entry in entries for f in entry.files}
        landed = {
            path: [{**given, "record_timestamp": stamp[path]} for given in rows]
            for path, rows in self.landed.items()
            if path in stamp
        }
        return expected(self.rules, entries, landed, up_to)

    def rows(self, snapshot: int | str = "published", *, versions: bool = False) -> list[dict[str, Any]]:
        rows = super().rows(snapshot, versions=versions)
        return [{**given, "record_timestamp": given["record_timestamp"].replace(tzinfo=None)} for given in rows]


def stamp_of(microseconds: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=microseconds)


def check_files(lake: Lake, where: str = "") -> None:
    """Every file that a version names is there; and, since nobody died, nobody left one that no version names."""
    named, stored = lake.named_files(), lake.stored_files()
    assert named <= stored, f"{where}: named and gone: {sorted(named - stored)[:3]}"
    assert stored <= named, f"{where}: left behind: {sorted(stored - named)[:3]}"


def at_once(workers: Sequence[LakeProcess], step: str, options: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """Each waits for the word already, so that they begin within microseconds of each other."""
    for number, worker in enumerate(workers):
        worker.begin(step, **(options[number] if options else {}))
    return [worker.end() for worker in workers]


def name_of(day: int) -> str:
    return f"d={row('', day, 0)['d']}"


def days(lake: Lake, path: str, number: int, touched: Sequence[int], keys: str = "abc") -> None:
    """A landing file with a row for each key in each of these partitions."""
    lake.land(path, [row(k, day, number, number) for day in touched for k in keys])


def merge(lake: Lake, wanted: dict[str, int]) -> None:
    dedupe_partitions(lake.opened, ArrowEngine(), wanted)


# ---------------------------------------------------------------- two appends over one landing zone


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "batch_ids"),
    [
        pytest.param(Lake, "none", marks=pytest.mark.long),
        (Lake, "own"),
        (StampedLake, "none"),
        pytest.param(StampedLake, "same", marks=pytest.mark.long),
    ],
)
def test_appends_at_once_count_each_landing_file_once(
    folder: Path, processes: Callable[[Lake, int], list[LakeProcess]], kind: type[Lake], batch_ids: str
) -> None:
    lake = kind(folder / "lake")
    workers = processes(lake, 2)
    for number in range(1, 7):
        for file in range(3):
            lake.land(f"{number}-{file}.jsonl", [row(k, day, 1, number) for day in range(4) for k in "abc"[file:]])
        ids = {"none": (None, None), "own": (f"{number}a", f"{number}b"), "same": (f"{number}", f"{number}")}[batch_ids]
        results = at_once(workers, "append", [{"batch_id": batch_id} for batch_id in ids])
        assert [r is None for r in results].count(True) == 1, "one commits, and the other finds nothing new"
    entries = [entry for _, entry in lake.entries()]
    assert len(entries) == 7
    stamps = [entry.received_at for entry in entries]
    assert stamps == sorted(set(stamps)), "receipt stamps rise with the batch numbers"
    check_files(lake)
    lake.finish_and_check()
    assert len(lake.rows()) == 12


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [StampedLake, Lake])
def test_appends_at_once_of_different_files_are_two_batches(
    folder: Path, processes: Callable[[Lake, int], list[LakeProcess]], kind: type[Lake]
) -> None:
    """Neither takes the other's files; a stamped table's rows have the stamp of the batch that they are in."""
    lake = kind(folder / "lake", landing_dates="%Y-%m-%d")
    workers = processes(lake, 3)
    for number in range(1, 7):
        received = [datetime(2020, number, 1 + i, tzinfo=UTC).date() for i in range(3)]
        for day in received:
            lake.land(f"{day}/{number}.jsonl", [row(k, n, 1, number * 100 + day.day) for n in range(3) for k in "ab"])
        results = at_once(workers, "append", [{"received": (day, day)} for day in received])
        assert sorted(r.number for r in results) == [3 * number - 2, 3 * number - 1, 3 * number]
    stamps = [entry.received_at for _, entry in lake.entries()]
    assert stamps == sorted(set(stamps))
    check_files(lake)
    lake.finish_and_check()


def test_batch_that_is_overtaken_is_stamped_again(
    folder: Path, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    lake = StampedLake(folder / "lake", landing_dates="%Y-%m-%d")
    first, second = processes(lake, 2)
    lake.land("2020-01-01/0.jsonl", [row("a", 0, 1, 1)])
    assert first.do("append").number == 1
    early, late = date(2020, 1, 2), date(2020, 1, 3)
    for day in (early, late):
        lake.land(f"{day}/0.jsonl", [row("a", 0, 1, day.day)])
    second.begin("append", received=(early, early), strike=Strike("create _lakeupsert/ledger", act="hold"))
    second.wait_held()
    assert first.do("append", received=(late, late)).number == 2
    second.go()
    assert second.end().number == 3
    lake.finish_and_check()
    assert [one["v"] for one in lake.rows()] == [early.day]


@pytest.mark.few(1)
@pytest.mark.parametrize("winner", [0, 1])
@pytest.mark.parametrize("lost", ["create _lakeupsert/spec", "create _lakeupsert/ledger"])
def test_append_that_is_overtaken_before_its_commit_leaves_nothing_behind(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]], winner: int, lost: str
) -> None:
    """In either order; the first batch of a table and a later one."""
    workers = processes(lake, 2)
    first, second = workers[winner], workers[1 - winner]
    for number in (1, 2):
        days(lake, f"{number}.jsonl", number, range(3))
        if number == 2 and lost.endswith("spec"):
            break  # the spec is there already
        second.begin("append", strike=Strike(lost, act="hold"))
        second.wait_held()
        assert first.do("append").number == number
        second.go()
        assert second.end() is None
        check_files(lake)
    lake.finish_and_check()


@pytest.mark.long
def test_append_that_has_committed_and_sends_late_changes_nothing(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    late, other = processes(lake, 2)
    days(lake, "1.jsonl", 1, range(5))
    late.begin("append", strike=Strike("queue send", act="hold"))
    late.wait_held()
    done = other.do("run")
    assert done.append is None
    assert {r.status for r in done.dedupe} == {"merged"}
    assert done.publish.batch == 1
    late.go()
    assert late.end().number == 1
    assert {r.status for r in other.do("dedupe")} == {"clean"}
    check_files(lake)
    lake.finish_and_check()
    assert lake.table.objects.queue.stats() == EMPTY


@pytest.mark.long
def test_append_whose_spec_is_overtaken_begins_again_under_the_newer_one(
    folder: Path, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    lake = Lake(folder / "lake", landing_dates="%Y-%m-%d")
    days(lake, "2020-01-01/1.jsonl", 1, range(2))
    lake.run()
    late, other = processes(lake, 2)
    first, second = datetime(2020, 1, 2, tzinfo=UTC).date(), datetime(2020, 1, 3, tzinfo=UTC).date()
    days(lake, f"{first}/2.jsonl", 2, range(3))
    lake.land(f"{second}/3.jsonl", [{**row("a", day, 3, 3), "w": "new"} for day in range(2)])
    late.begin("append", strike=Strike("create _lakeupsert/ledger", act="hold"), received=(first, first))
    late.wait_held()
    assert other.do("append", received=(second, second)).entry.spec_version == 1
    late.go()
    done = late.end()
    assert (done.number, done.entry.spec_version) == (3, 1)
    check_files(lake)
    lake.run()
    assert lake.rows() == [{**given, "w": given.get("w")} for given in lake.expected(3)]


def test_receipt_stamps_rise_though_the_clock_falls(folder: Path) -> None:
    class Falling(clock.Source):
        def now(self) -> datetime:
            nonlocal time
            time -= timedelta(seconds=1)
            return time

    time = datetime(2026, 1, 1, tzinfo=UTC)
    lake = StampedLake(folder / "lake")
    with clock.use(Falling()):
        for number in range(1, 4):
            days(lake, f"{number}.jsonl", number, range(2))
            lake.table.append(host="local")
    stamps = [entry.received_at for _, entry in lake.entries()]
    assert stamps == sorted(set(stamps))
    lake.finish_and_check()


# ---------------------------------------------------------------- a step beside another, at every call


class _Wedge(Points):
    """At one call something else happens, whole."""

    def __init__(self, at: int, what: Callable[[], object]) -> None:
        super().__init__()
        self.calls = 0
        self._at = at
        self._what = what

    def at(self, name: str, commit: bool = False) -> Any:
        self.calls += 1
        if self.calls == self._at:
            self._what()
        return super().at(name, commit)


@pytest.fixture(scope="module")
def stages(module_folder: Path) -> dict[str, Lake]:
    """The second night of a lake, as it is before each step."""
    new = Lake(module_folder / "first append")
    new.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("c", 1, 5, 1)])
    second = new.copy(module_folder / "append")
    second.run()
    second.land("2.jsonl", [row("a", 0, 1, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)])
    appended = second.copy(module_folder / "dedupe")
    appended.table.append(host="local")
    merged = appended.copy(module_folder / "publish")
    merged.table.dedupe()
    return {"first append": new, "append": second, "dedupe": appended, "publish": merged}


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["first append", "append", "dedupe", "publish"])
@pytest.mark.parametrize("other", ["the same", "run"])
def test_step_beside_another_at_every_call_of_it_is_exact(
    stages: dict[str, Lake], folder: Path, stage: str, other: str
) -> None:
    """The other's step happens whole, between two calls of this one's."""
    step = stage.split()[-1]
    number, more = 0, True
    while more:
        number += 1
        lake = stages[stage].copy(folder / str(number))
        beside = Lake(lake.root)
        points = lake.points = _Wedge(number, lambda beside=beside: do(beside, step if other == "the same" else other))
        lake.reopen()
        do(lake, step)
        more = points.calls >= number
        lake.points = Points()
        try:
            lake.finish_and_check()
            check_files(lake)
            assert lake.table.objects.queue.stats() == EMPTY
        except BaseException as e:
            e.add_note(f"{stage} beside {other}, at call {number}")
            raise
        beside.table.close()
        lake.table.close()
        shutil.rmtree(lake.root)
    assert number > 8


# ---------------------------------------------------------------- heads from one listing


@pytest.mark.parametrize("number", [0, ArrowEngine.partitions_per_call + 1])
@pytest.mark.parametrize("call", ["get", "create"])
def test_heads_that_another_worker_has_moved_since_the_listing_are_found_by_the_commit(
    folder: Path, call: str, number: int
) -> None:
    """A worker takes the heads of three calls from one listing, and all partitions are merged by another one meanwhile."""
    lake = Lake(folder)
    touched = range(2 * ArrowEngine.partitions_per_call + 3)
    days(lake, "1.jsonl", 1, touched)
    lake.run()
    days(lake, "2.jsonl", 2, touched, "ab")
    lake.table.append(host="local")
    beside = Lake(lake.root)
    lake.reopen()  # knows no head
    wanted = {name_of(day): 2 for day in touched}
    lake.points.amid(number, lambda: merge(beside, wanted), f"{call} _lakeupsert/partitions/")
    merged = lake.table.dedupe(workers=1)
    assert lake.points.struck
    lake.points.disarm()
    assert {result.version for result in merged} == {1}
    lake.finish_and_check()
    check_files(lake)
    assert {lake.table.objects.partition(name_of(day)).newest_number() for day in touched} == {1}


def test_publish_shows_what_another_worker_merged_since_this_process_read_the_heads(lake: Lake) -> None:
    touched = range(3)
    for night in (1, 2):
        days(lake, f"{night}.jsonl", night, touched)
        lake.table.run(host="local")  # keeps its heads
        days(lake, f"{night}-later.jsonl", night + 10, touched)
        beside = Lake(lake.root)
        beside.table.append(host="local")
        merge(beside, {name_of(day): 2 * night for day in touched})
        assert lake.table.publish().batch == 2 * night
    lake.finish_and_check()


def test_a_night_reads_each_head_once_and_lists_no_partition_alone(folder: Path) -> None:
    lists = []
    for partitions in (20, 40):
        lake = Lake(folder / f"{partitions}")
        for night in (1, 2, 3):
            days(lake, f"{night}.jsonl", night, range(partitions))
            lake.reopen()
            lake.points.arm(-1, Fault.BEFORE)
            for step in ("append", "dedupe", "publish"):
                do(lake, step)
        lists.append([call for call in lake.points.seen if call.startswith("list ")])
        heads = [call for call in lake.points.seen if call.startswith("get _lakeupsert/partitions/")]
        assert len(heads) == len({*heads}) == partitions
    assert len(lists[0]) == len(lists[1]) == 10, lists
    assert lists[0].count("list _lakeupsert/partitions/") == 2


@pytest.mark.parametrize("touched", [1, 3])
def test_few_partitions_of_a_table_of_many_manifests_are_listed_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, touched: int
) -> None:
    monkeypatch.setattr(history, "LISTED_TOGETHER", 5)  # 12 manifests are 3 answers to a LIST
    lake = Lake(folder)
    days(lake, "1.jsonl", 1, range(12))
    lake.run()
    days(lake, "2.jsonl", 2, range(touched))
    lake.table.append(host="local")
    lake.points.arm(-1, Fault.BEFORE, "list _lakeupsert/partitions/")
    lake.table.dedupe()
    assert len(lake.points.seen) == touched
    assert "list _lakeupsert/partitions/" not in lake.points.seen
    lake.points.disarm()
    lake.finish_and_check()


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_a_night_reads_on_in_its_batch_and_each_vector_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(checksums, "WHOLE_BYTES", 0)
    monkeypatch.setattr(checksums, "TAIL_BYTES", 8)
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    lake = Lake(folder, strategy=strategy)
    partitions = 19
    for night, keys in enumerate(("abcdefg", "ab", "ac", "d"), 1):
        shuffled = random.Random(night).sample(range(partitions), partitions)
        days(lake, f"{night}.jsonl", night, shuffled, keys)
        lake.table.append(host="local")
        lake.reopen()
        lake.points.arm(-1, Fault.BEFORE, "get _lakeupsert/data/")
        lake.table.dedupe(workers=1)
        lake.points.disarm()
        lake.table.publish()
    assert sum(call.endswith(".pack") for call in lake.points.seen) <= 6
    # The third night marked rows of the base and of the second night's delta.
    assert sum(call.endswith(".roaring") for call in lake.points.seen) == (2 * partitions if strategy == "delta" else 0)
    lake.finish_and_check()


def do(lake: Lake, step: str) -> None:
    getattr(lake.table, step)(**({"host": "local"} if step in ("append", "run") else {}))


# ---------------------------------------------------------------- workers


@pytest.mark.long
def test_four_workers_on_two_hundred_partitions_are_exact_though_messages_are_lost_doubled_and_reordered(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    chance = random.Random(7)
    touched = {1: range(200), 2: range(0, 200, 2), 3: range(50, 200, 3)}
    for number, of_it in touched.items():
        lake.land(
            f"{number}.jsonl",
            [row(k, day, chance.randrange(4), number, op=chance.choice([None, "D"])) for day in of_it for k in "abcd"],
        )
        lake.table.append(host="local")
    queue = lake.opened.resources.queue
    lost = {name_of(day) for day in range(90, 100)}
    messages = [m for m in drained(queue) if m.partition not in lost]
    messages += chance.choices(messages, k=200)
    chance.shuffle(messages)
    queue.send(messages)

    workers = processes(lake, 4)
    results = [result for of_one in at_once(workers, "dedupe") for result in of_one]
    assert queue.stats() == EMPTY
    needed = {name_of(day): sum(day in of_it for of_it in touched.values()) for day in range(200)}
    assert versions(lake, needed) == {p: 0 if p in lost else n for p, n in needed.items()}, "no more than needed"
    assert {r.status for r in results} == {"merged", "clean"}
    check_files(lake)
    assert lake.table.publish().batch == 0, "partitions that nobody was told of hold the batches back"
    lake.check()

    assert at_once(workers, "run")  # each sends what was lost, and all finish it together
    assert versions(lake, needed) == needed
    assert queue.stats() == EMPTY
    check_files(lake)
    lake.finish_and_check()
    assert lake.table.snapshots()[0].body.batch == 3
    found = lake.rows()
    assert len({(r["d"], r["k"], r["l"]) for r in found}) == len(found) > 100


def drained(queue: WorkQueue) -> list[Message]:
    """Every message, taken off the queue: lost."""
    messages = []
    while leases := queue.receive(1000, 60):
        for lease in leases:
            messages.append(lease.message)
            queue.ack(lease)
    return messages


def versions(lake: Lake, partitions: Mapping[str, int]) -> dict[str, int]:
    heads = {p: lake.table.objects.partition(p).head() for p in partitions}
    return {p: 0 if head is None else head.number + 1 for p, head in heads.items()}


@pytest.mark.long
def test_steady_stream_is_published_while_it_flows(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    """New batches for every partition come as fast as they can; workers and a publisher keep up all the same."""
    days(lake, "000.jsonl", 0, range(6))
    lake.run()
    workers = processes(lake, 3)
    for worker, step in zip(workers, ("dedupe", "dedupe", "publish"), strict=True):
        worker.begin("repeat", step=step, until="end of the stream")
    published = {0}
    number = 0
    while len(published) < 6:
        number += 1
        assert number <= 300, f"only {sorted(published)} were published while 300 batches came"
        days(lake, f"{number:03d}.jsonl", number, range(6))
        lake.table.append(host="local")
        published.add(lake.table.status().batch)
    (lake.root / "end of the stream").touch()
    for worker in workers:
        worker.end()
    lake.finish_and_check()
    check_files(lake)


@pytest.mark.long
def test_publish_keeps_up_where_no_partition_ever_stands_still(lake: Lake) -> None:
    """Each round one half of the partitions is brought to the newest batch, in turns: if they jumped over the batch between,
    there would never be one that both halves have."""
    for number in range(1, 11):
        days(lake, f"{number:02d}.jsonl", number, range(4))
        lake.table.append(host="local")
        merge(lake, {name_of(day): number for day in range(number % 2, 4, 2)})
        assert lake.table.publish().batch == number - 1
    lake.finish_and_check()


# ---------------------------------------------------------------- publishing


def test_batch_that_is_half_merged_is_not_seen(lake: Lake) -> None:
    for number in range(1, 8):
        days(lake, f"{number}.jsonl", number, range(4))
        lake.run()
    days(lake, "8.jsonl", 8, range(4))
    lake.table.append(host="local")
    merge(lake, {name_of(day): 8 for day in range(2)})
    half = lake.table.publish()
    assert (half.batch, half.waiting) == (7, tuple(name_of(day) for day in range(4)))
    assert lake.rows() == lake.expected(7)
    merge(lake, {name_of(day): 8 for day in range(2, 4)})
    whole = lake.table.publish()
    assert (whole.batch, whole.waiting, whole.partitions_changed) == (8, (), 4)
    assert lake.rows() == lake.expected(8)
    assert lake.table.publish() == replace(whole, partitions_changed=0)
    lake.finish_and_check()


def test_batch_is_published_though_half_of_the_next_is_merged_already(lake: Lake) -> None:
    """Versions of both are kept, so 7 can be shown where 8 is merged too."""
    for number in (7, 8):
        days(lake, f"{number}.jsonl", number, range(4))
        lake.table.append(host="local")
    merge(lake, {name_of(day): 2 for day in range(2)})
    assert lake.table.publish().batch == 0
    merge(lake, {name_of(day): 1 for day in range(2, 4)})
    assert lake.table.publish().batch == 1
    assert lake.rows() == lake.expected(1)
    merge(lake, {name_of(day): 2 for day in range(2, 4)})
    assert lake.table.publish().batch == 2
    lake.finish_and_check()


def test_partition_that_jumped_beyond_a_batch_is_shown_with_the_later_one(lake: Lake, folder: Path) -> None:
    """A version that has 1 and 2 at once, as a lagging partition's has: 1 can't be shown, 2 can."""
    days(lake, "1.jsonl", 1, range(2))
    lake.table.append(host="local")
    days(lake, "2.jsonl", 2, [0])
    lake.table.append(host="local")
    days(lake, "3.jsonl", 3, [1])
    lake.table.append(host="local")
    elsewhere = lake.copy(folder / "elsewhere")
    lake.reopen()
    merge(elsewhere, {name_of(0): 2})
    jumped = elsewhere.table.objects.partition(name_of(0)).head()
    assert jumped is not None
    shutil.copytree(elsewhere.root / "processed" / name_of(0), lake.root / "processed" / name_of(0))
    lake.opened.history.objects.partition(name_of(0)).append(jumped.body, None)
    merge(lake, {name_of(1): 1})
    assert lake.table.publish().batch == 2
    assert lake.rows() == lake.expected(2)
    merge(lake, {name_of(1): 3})
    assert lake.table.publish().batch == 3
    lake.finish_and_check()


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(10))
def test_publish_shows_the_greatest_batch_that_is_whole(lake: Lake, seed: int) -> None:
    """Batches touch some partitions, workers merge some of those up to some batch, in any order."""
    chance = random.Random(seed)
    touches: dict[int, set[str]] = {}
    published = 0
    for step in range(30):
        if not touches or chance.random() < 0.3:
            number = len(touches) + 1
            of_it = chance.sample(range(4), chance.randint(1, 3))
            days(lake, f"{number:02d}.jsonl", chance.randrange(4), of_it, "ab")
            lake.table.append(host="local")
            touches[number] = {name_of(day) for day in of_it}
        else:
            merge(lake, {name_of(chance.randrange(4)): chance.randint(1, len(touches))})
        merged = {name_of(day): merged_batches(lake, name_of(day)) for day in range(4)}
        # the last batch that touches a partition, up to a batch, must be a version of its own
        whole = [
            batch
            for batch in range(len(touches) + 1)
            if all(
                max((n for n, of_it in touches.items() if p in of_it and n <= batch), default=0) in merged[p]
                for p in merged
            )
        ]
        assert lake.table.publish().batch == max(whole), f"step {step}"
        assert max(whole) >= published
        published = max(whole)
        assert lake.rows() == lake.expected(published)
        behind = unpublished_up_to(lake.opened.history, lake.table.snapshots()[0].body, len(touches))
        assert behind == {
            p: max(n for n, of_it in touches.items() if p in of_it)
            for p in merged
            if any(p in of_it for n, of_it in touches.items() if n > published)
        }
    lake.finish_and_check()


def merged_batches(lake: Lake, partition: str) -> set[int]:
    chain = lake.opened.history.objects.partition(partition)
    head = chain.head()
    return {0, *(link.body.merged for link in chain.between(-1, head.number))} if head else {0}


@pytest.mark.long
def test_publishers_at_once_publish_each_batch_once(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    publishers = processes(lake, 3)
    for number in range(1, 9):
        days(lake, f"{number}.jsonl", number, range(6))
        lake.table.append(host="local")
        lake.table.dedupe()
        results = at_once(publishers, "publish")
        assert {(r.snapshot, r.batch, r.rows, r.waiting) for r in results} == {(number - 1, number, 18, ())}
        assert sorted(r.partitions_changed for r in results) == [0, 0, 6]
    assert len(lake.table.snapshots()) == 8
    lake.finish_and_check()


def test_batch_half_merged_under_a_wider_schema_is_shown_under_its_own(folder: Path) -> None:
    """Batch 2 widens a column and adds one; partitions of both are merged in one call while 1 is not yet published."""
    landing = folder / "landing"
    landing.mkdir()
    settings = TableSettings(
        landing=str(landing), processed=str(folder / "processed"), key=("k",), partition_by=("p",), order_by=("t",)
    )
    table = Table("t", settings)

    def land(name: str, type_: Any, partitions: str, **more: Any) -> None:
        n = len(partitions)
        columns = {"k": [1] * n, "p": list(partitions), "t": [int(name)] * n, "v": pa.array([7] * n, type_), **more}
        pq.write_table(pa.table(columns), landing / f"{name}.parquet")

    land("1", pa.int32(), "ab")
    table.append(host="local")
    land("2", pa.int64(), "bc", w=["new", "new"])
    table.append(host="local")
    opened = OpenTable("t", settings)
    dedupe_partitions(opened, ArrowEngine(), {"p=a": 2, "p=c": 2})
    dedupe_partitions(opened, ArrowEngine(), {"p=b": 1})
    assert table.publish().batch == 1
    found = table.to_arrow().read_all()
    assert found.schema.names == ["k", "p", "t", "v"]
    assert (found.schema.field("v").type, found["v"].to_pylist()) == (pa.int32(), [7, 7])
    table.run(host="local")
    found = table.to_arrow().read_all()
    assert found.schema.field("v").type == pa.int64()
    assert found.select(["p", "v", "w"]).to_pylist() == [
        {"p": "a", "v": 7, "w": None},
        {"p": "b", "v": 7, "w": "new"},
        {"p": "c", "v": 7, "w": "new"},
    ]
    table.close()


# ---------------------------------------------------------------- readers


@pytest.mark.long
def test_readers_beside_running_nights_see_whole_nights(
    lake: Lake, processes: Callable[[Lake, int], list[LakeProcess]]
) -> None:
    days(lake, "01.jsonl", 1, range(12))
    lake.run()
    [night, *readers] = processes(lake, 3)
    for reader in readers:
        reader.begin("watch", until=8)
    held = lake.table.to_arrow()  # opened now, read to its end as the nights go by
    read = [held.read_next_batch()]
    first = lake.expected(1)
    for number in range(2, 9):
        days(lake, f"{number:02d}.jsonl", number, range(number % 3, 12, 2))
        night.do("run")
        read.append(held.read_next_batch())
    read += list(held)
    assert pa.Table.from_batches(read).to_pylist() == first
    seen = [reader.end() for reader in readers]
    for of_one in seen:
        snapshots = [snapshot for snapshot, _, _ in of_one]
        assert snapshots == sorted(set(snapshots)), "a snapshot reads the same each time, and none comes before"
        for _, batch, rows in of_one:
            assert rows == lake.expected(batch)
    assert len(seen[0]) > 1
    lake.finish_and_check()


# ---------------------------------------------------------------- a partition that fails


@pytest.fixture(params=["hold", "skip"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def damaged(lake: Lake, batch: int, *of: int, cut: int = 0) -> Iterator[Path]:
    """In the block, the rows that ``batch`` brought for these days are not readable, but for the first ``cut`` bytes."""
    entry = dict(lake.entries())[batch]
    files = [f for day in of for f in entry.touched[name_of(day)].files]
    mend = damage(lake.root / "processed", *files, cut=cut)
    yield lake.root / "processed" / files[0].name
    mend()


def mark(lake: Lake, day: int) -> Any:
    head = lake.table.objects.partition(name_of(day)).head()
    return head.body.failed if head else None


def shown(lake: Lake, lagging: Mapping[int, int], batch: int) -> list[dict[str, Any]]:
    """The rows of ``batch``, and of the partitions that lag those of an older one."""
    lag = {row("", day, 0)["d"]: behind for day, behind in lagging.items()}
    found = [r for r in lake.expected(batch) if r["d"] not in lag]
    found += [r for day, behind in lag.items() for r in lake.expected(behind) if r["d"] == day]
    return sorted(found, key=lambda r: (r["d"], r["k"]))


@pytest.mark.few(2)
@pytest.mark.parametrize("cut", [0, 40])
def test_partition_that_fails_holds_the_night_or_lags_until_it_is_mended(folder: Path, policy: str, cut: int) -> None:
    """Partition 1 fails in batch 2, and is touched again by batch 3; the new partition 4 fails with it."""
    lake = Lake(folder / "lake", on_failed_partition=policy)
    queue = lake.opened.resources.queue
    days(lake, "1.jsonl", 1, range(4))
    lake.run()
    days(lake, "2.jsonl", 2, [0, 1, 2, 4])
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    with damaged(lake, 2, 1, 4, cut=cut) as path:
        ran = lake.table.run(host="local")
        failed = {r.partition: r for r in ran.dedupe if r.status == "failed"}
        assert set(failed) == {name_of(1), name_of(4)}
        for day in (1, 4):
            assert path.name in (failed[name_of(day)].error or "")
            assert mark(lake, day).batch == 2
            assert path.name in mark(lake, day).reason
        assert {r.partition for r in ran.dedupe if r.status == "merged"} == {name_of(0), name_of(2)}
        letters = queue.dead_letters(99)
        assert {letter.message.partition for letter in letters} == set(failed)
        assert all(path.name in letter.reason for letter in letters)
        assert queue.stats() == QueueStats(visible=0, leased=0, dead=len(letters))
        assert set(ran.publish.failed) == set(failed)
        if policy == "hold":
            assert (ran.publish.batch, ran.publish.lagging) == (1, ())
            assert lake.rows() == lake.expected(1), "the others' progress is not shown either"
            assert lake.is_merged(name_of(0), 2), "and it is kept"
        else:
            assert (ran.publish.batch, ran.publish.lagging) == (2, (name_of(1), name_of(4)))
            assert lake.rows() == shown(lake, {1: 1, 4: 1}, 2)
        status = lake.table.status()
        assert (status.dirty, status.failed) == (2, {name_of(day): mark(lake, day).reason for day in (1, 4)})

        days(lake, "3.jsonl", 3, [1, 3])
        ran = lake.table.run(host="local")
        assert {r.partition for r in ran.dedupe if r.status == "failed"} == set(failed), "each run tries them again"
        assert mark(lake, 1).batch == 2, "what fails is still batch 2"
        if policy == "hold":
            assert (ran.publish.batch, ran.publish.lagging) == (1, ())
            assert lake.rows() == lake.expected(1)
        else:
            assert (ran.publish.batch, ran.publish.lagging) == (3, (name_of(1), name_of(4)))
            assert lake.rows() == shown(lake, {1: 1, 4: 1}, 3)

    ran = lake.table.run(host="local")
    assert (ran.publish.batch, ran.publish.lagging, ran.publish.failed) == (3, (), {})
    assert (mark(lake, 1), mark(lake, 4)) == (None, None)
    assert lake.rows() == lake.expected(3)
    assert lake.table.status().dirty == 0
    snapshots = len(lake.table.snapshots())
    lake.run()
    assert len(lake.table.snapshots()) == snapshots, "nothing is left to do"
    assert lake.named_files() <= lake.stored_files()


def test_partition_that_fails_at_first_and_is_mended_before_the_last_try_is_not_marked(lake: Lake, policy: str) -> None:
    days(lake, "1.jsonl", 1, range(2))
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    with damaged(lake, 1, 1):
        for lease in queue.receive(9, 60):
            [result] = dedupe_partitions(lake.opened, ArrowEngine(), {lease.message.partition: 1})
            answer = queue.release if result.status == "failed" else queue.ack
            answer(lease)
    assert [(r.partition, r.status) for r in lake.table.dedupe()] == [(name_of(1), "merged")]
    assert mark(lake, 1) is None
    assert queue.stats() == EMPTY
    lake.finish_and_check()


# ---------------------------------------------------------------- queues and messages


def test_tables_of_one_configuration_do_not_meet(folder: Path) -> None:
    text = ""
    for name in ("sales", "returns"):
        (folder / "landing" / name).mkdir(parents=True)
        text += f'[tables.{name}]\nlanding = "landing/{name}"\nprocessed = "processed/{name}"\n'
        text += 'key = ["k"]\npartition_by = ["d"]\norder_by = ["t"]\n'
    (folder / "lakeupsert.toml").write_text(text)
    tables = {name: Table.open(folder / "lakeupsert.toml", name) for name in ("sales", "returns")}
    for number in (1, 2):
        for name in tables:
            (folder / "landing" / name / f"{number}.csv").write_text(f"k,d,t,v\n1,2020-01-01,{number},{name}{number}\n")
    for table in tables.values():
        table.append(host="local")
    assert [r.partition for r in tables["sales"].dedupe()] == ["d=2020-01-01"]
    assert tables["returns"].status().queue.visible == 1
    for name, table in tables.items():
        table.run(host="local")
        assert table.to_arrow().read_all()["v"].to_pylist() == [f"{name}2"]
        assert table.status().queue == EMPTY
        table.close()


def test_run_finishes_a_table_whose_queue_file_was_deleted(lake: Lake) -> None:
    days(lake, "1.jsonl", 1, range(3))
    lake.table.append(host="local")
    lake.table.close()
    for path in (lake.root / "processed/_lakeupsert").glob("queue.sqlite*"):
        path.unlink()
    lake.reopen()
    assert lake.table.dedupe() == []
    lake.finish_and_check()
    assert lake.table.status().batch == 1


@pytest.mark.parametrize(
    ("message", "end"),
    [
        pytest.param(Message("t", "d=2020-01-01", 0), EMPTY, id="batch nought"),
        pytest.param(Message("t", "d=2020-01-01", 1), EMPTY, id="done already"),
        pytest.param(Message("t", "d=1999-01-01", 2), EMPTY, id="no such partition"),
        pytest.param(Message("t", "nonsense", 2), EMPTY, id="no partition's name"),
        pytest.param(Message("u", "d=2020-01-01", 2), QueueStats(0, 0, 1), id="another table"),
        pytest.param(Message("t", "d=2020-01-01", 99), QueueStats(0, 0, 1), id="no such batch"),
        pytest.param(Message("t", "d=1999-01-01", 99), QueueStats(0, 0, 1), id="neither"),
        pytest.param(Message("t", "../../d=1999-01-01", 2), EMPTY, id="a path"),
    ],
)
def test_message_that_makes_no_sense_is_answered_and_stops_nobody(
    lake: Lake, message: Message, end: QueueStats
) -> None:
    """Messages outlive tables: one is made anew, or its queue belonged to another. What is no error of the table must
    neither end the worker nor say that the table is damaged, nor keep that partition's own messages from their merge."""
    days(lake, "1.jsonl", 1, range(3))
    lake.run()
    days(lake, "2.jsonl", 2, range(3))
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    queue.send([message])
    results = lake.table.dedupe()
    assert queue.stats() == end
    assert {r.partition for r in results if r.status == "merged"} == {name_of(day) for day in range(3)}
    assert not [r for r in results if r.status == "failed"]
    assert [mark(lake, day) for day in range(3)] == [None] * 3
    made = {p.name for p in (lake.root / "processed/_lakeupsert/partitions").iterdir()}
    assert made == {name_of(day) for day in range(3)}, "no partition was made"
    assert lake.table.publish().batch == 2
    lake.finish_and_check()


@pytest.mark.long
def test_script_that_its_own_workers_run_again_is_told_why(lake: Lake) -> None:
    days(lake, "1.jsonl", 1, range(20))
    lake.table.append(host="local")
    script = lake.root / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.harness.lake import Lake\n"
        f"Lake(Path({str(lake.root)!r})).table.dedupe(workers=2)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "ended before it began" in done.stderr
    assert "starting another one" not in done.stderr
    lake.finish_and_check()


def test_store_that_fails_at_any_call_leaves_no_message_leased(lake: Lake, folder: Path) -> None:
    """The process may live on, and then its leases would hide the messages from everybody until their time is up."""
    days(lake, "1.jsonl", 1, range(3))
    lake.table.append(host="local")
    number, struck = 0, True
    while struck:
        other = lake.copy(folder / str(number))
        other.points.arm(number, Fault.BEFORE)
        with suppress(TryAgainError):
            other.table.dedupe()
        struck = other.points.struck is not None
        other.points.disarm()
        if not (other.points.struck or "").startswith("queue"):
            left = other.table.objects.queue.stats().leased
            assert left == 0, f"{left} after {other.points.struck} failed"
        other.table.close()
        number += 1
    assert number > 10
