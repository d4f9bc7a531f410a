"""The chain: one writer a version, lost answers found again, nothing guessed."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

import msgspec
import pytest

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, DamagedTableError, TryAgainError
from lakeupsert.retries import SENDS
from lakeupsert.storage import LocalStore, ObjectInfo, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.table import metadata
from lakeupsert.table.chain import LARGEST, REMEMBERED, Chain, Held, Link
from tests.harness.faults import Fault, FaultyStore, Killed, Points


class Body(msgspec.Struct, frozen=True):
    value: int


def never_falls(old: Body | None, new: Body) -> None:
    if old is not None and new.value < old.value:
        raise DamagedTableError("broken-invariant", f"{new.value} < {old.value}", next="-")


class Boat(clock.Source):
    """A clock that a test moves, and that does not sleep."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def elapsed(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += 0.001


@pytest.fixture
def time() -> Boat:
    return Boat()


@pytest.fixture(autouse=True)
def _moved_by_hand(time: Boat):
    with clock.use(time):
        yield


@pytest.fixture
def points() -> Points:
    return Points()


@pytest.fixture
def chain(tmp_path: Path, points: Points) -> Chain[Body]:
    return Chain(FaultyStore(LocalStore(tmp_path), points), "c", "thing", Body, never_falls)


def grown(chain: Chain[Body], *values: int) -> None:
    for value in values:
        assert chain.append(Body(value), chain.head()).result == "won"


def test_versions_are_numbered_from_zero_and_know_their_parent(chain: Chain[Body]) -> None:
    assert chain.head() is None
    grown(chain, 5, 6, 7)
    links = list(chain.between(-1, 2))
    assert [(x.number, x.body.value) for x in links] == [(0, 5), (1, 6), (2, 7)]
    assert [x.parent for x in links] == [None, links[0].write_id, links[1].write_id]
    assert [*chain.numbers()] == [2, 1, 0]


def test_head_costs_one_list_and_one_get_however_long_the_chain(chain: Chain[Body], points: Points) -> None:
    grown(chain, *range(30))
    points.arm(-1, Fault.BEFORE)
    head = chain.head()
    assert head is not None
    assert head.number == 29
    assert [name.split()[0] for name in points.seen] == ["list", "get"]


def test_head_that_took_the_number_of_a_lost_one_is_read(chain: Chain[Body], tmp_path: Path) -> None:
    grown(chain, 0, 1)
    lost = chain.head()
    assert lost is not None
    (tmp_path / chain.name(1)).unlink()
    assert chain.append(Body(2), chain.get(0)).result == "won"
    head = chain.head(known=lost)
    assert (head and head.number, head and head.body) == (1, Body(2))


def test_names_count_down_so_that_the_head_is_listed_first(chain: Chain[Body], tmp_path: Path) -> None:
    grown(chain, 0, 1)
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == [f"v{LARGEST - 1:020d}.json", f"v{LARGEST:020d}.json"]


def test_append_behind_an_old_head_is_lost_and_changes_nothing(chain: Chain[Body]) -> None:
    grown(chain, 1)
    old = chain.head()
    grown(chain, 2)
    assert chain.append(Body(3), old).result == "lost"
    head = chain.head()
    assert head is not None
    assert head.body.value == 2


def test_lost_answer_of_a_create_is_found_to_be_won(chain: Chain[Body], points: Points) -> None:
    grown(chain, 1)
    head = chain.head()
    points.arm(0, Fault.AFTER)
    assert chain.append(Body(2), head).result == "won"
    assert points.struck is not None
    points.disarm()
    assert [link.body.value for link in chain.between(-1, 1)] == [1, 2]


def test_create_that_never_arrived_is_sent_again(chain: Chain[Body], points: Points) -> None:
    grown(chain, 1)
    head = chain.head()
    points.arm(0, Fault.BEFORE)
    assert chain.append(Body(2), head).result == "won"
    assert [name.split()[0] for name in points.seen] == ["create", "get", "list", "create"]


def test_lost_answer_behind_another_writer_is_found_to_be_lost(chain: Chain[Body], points: Points) -> None:
    grown(chain, 1)
    head = chain.head()
    grown(chain, 2)
    points.arm(0, Fault.BEFORE)
    assert chain.append(Body(3), head).result == "lost"


def test_create_that_arrives_between_the_looks_for_it_has_won(tmp_path: Path) -> None:
    """Found by `make simulate`: it counted as trimmed, so nobody sent the messages of a committed batch."""

    class Late(FaultyStore):
        sent: tuple[str, bytes] | None = None

        def create(self, name: str, data: bytes) -> bool:
            self.sent = name, data
            raise UnknownOutcomeError(name)

        def list(self, prefix: str, **options: Any) -> Iterator[ObjectInfo]:
            if self.sent is not None:
                self._store.create(*self.sent)
            return super().list(prefix, **options)

    chain = Chain(Late(LocalStore(tmp_path), Points()), "c", "thing", Body, never_falls)
    assert chain.append(Body(5), None).result == "won"


def test_head_that_is_trimmed_before_it_is_read_gives_way_to_the_newer_one(
    chain: Chain[Body], points: Points, tmp_path: Path
) -> None:
    """Found by `make simulate`: a vacuum beside another command ended that one with an error of a missing object."""
    grown(chain, 5)
    other = Chain(LocalStore(tmp_path), "c", "thing", Body, never_falls)

    def trim() -> None:
        grown(other, 6)
        LocalStore(tmp_path).delete([other.name(0)])

    points.amid(0, trim, "get")
    head = chain.head()
    assert head is not None
    assert (head.number, head.body.value) == (1, 6)


def test_trimmed_version_behind_a_lost_answer_is_unknown(chain: Chain[Body], points: Points, tmp_path: Path) -> None:
    """It may have been ours: nothing may be deleted."""
    grown(chain, 1)
    head = chain.head()
    grown(chain, 2, 3)
    (tmp_path / "c" / f"v{LARGEST - 1:020d}.json").unlink()
    points.arm(0, Fault.BEFORE)
    assert chain.append(Body(4), head).result == "unknown"


def test_silent_store_is_try_again_after_bounded_sends(
    chain: Chain[Body], time: Boat, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    grown(chain, 1)
    head = chain.head()

    class Silent(FaultyStore):
        def create(self, name: str, data: bytes) -> bool:
            with Points_that_always_fail().at("create", commit=True):
                raise AssertionError("not reached")

    chain._store = Silent(chain._store, Points())
    with pytest.raises(StoreUnavailableError, match="got no answer"):
        chain.append(Body(2), head)
    assert len(pauses) == SENDS - 1, "none after the last send"


class Points_that_always_fail(Points):  # noqa: N801 - reads as a sentence where it is used
    def __init__(self) -> None:
        super().__init__()
        self.arm(0, Fault.BEFORE)


def test_head_that_was_read_long_ago_is_read_again(chain: Chain[Body], points: Points, time: Boat) -> None:
    grown(chain, 1)
    for value, seconds, calls in (2, 3600, ["create"]), (3, 3601, ["list", "create"]):
        head = chain.head()
        time.seconds += seconds
        points.arm(-1, Fault.BEFORE)
        assert chain.append(Body(value), head).result == "won"
        assert [name.split()[0] for name in points.seen] == calls


def test_stalled_writer_does_not_take_a_trimmed_number(chain: Chain[Body], time: Boat, tmp_path: Path) -> None:
    grown(chain, 1)
    head = chain.head()
    grown(chain, 2, 3)
    (tmp_path / "c" / f"v{LARGEST - 1:020d}.json").unlink()
    time.seconds += 3601
    assert chain.append(Body(9), head).result == "lost"


def test_success_after_a_long_sleep_is_believed_only_if_the_head_descends_from_it(
    chain: Chain[Body], time: Boat, tmp_path: Path
) -> None:
    """The machine slept between the look at the clock and the create; meanwhile the number was used and trimmed."""
    grown(chain, 1)
    head = chain.head()
    grown(chain, 2, 3)
    (tmp_path / "c" / f"v{LARGEST - 1:020d}.json").unlink()

    class Sleepy(FaultyStore):
        def create(self, name: str, data: bytes) -> bool:
            time.seconds += 90_000
            return super().create(name, data)

    chain._store = Sleepy(LocalStore(tmp_path), Points())
    assert chain.append(Body(9), head).result == "unknown"


def test_success_after_a_long_sleep_is_won_where_the_head_descends_from_it(chain: Chain[Body], time: Boat) -> None:
    grown(chain, 1)
    head = chain.head()
    inner = chain._store

    class Sleepy(FaultyStore):
        def create(self, name: str, data: bytes) -> bool:
            time.seconds += 90_000
            done = super().create(name, data)
            chain._store = inner
            grown(chain, 3, 4)
            return done

    chain._store = Sleepy(inner, Points())
    assert chain.append(Body(2), head).result == "won"


def test_a_chain_remembers_its_last_tries_only(chain: Chain[Body]) -> None:
    link = None
    for value in range(3 * REMEMBERED):
        link = chain.append(Body(value), link).link
    assert (chain.tries(), len(chain._tries)) == (3 * REMEMBERED, REMEMBERED)
    last = [*range(2 * REMEMBERED, 3 * REMEMBERED)]
    assert chain.find_appended() == (last, True)
    assert chain.find_appended(chain.tries() - 2) == (last[-2:], True)
    assert chain.find_appended(chain.tries()) == ([], True)


def test_versions_whose_answers_never_came_are_read_back(chain: Chain[Body], points: Points, tmp_path: Path) -> None:
    """An interrupt came before the answer."""

    def interrupted(fault: Fault) -> None:
        head = chain.head()
        points.arm(0, fault)
        with pytest.raises(Killed):
            chain.append(Body(9), head)
        points.disarm()

    grown(chain, 1)
    interrupted(Fault.KILL_BEFORE)
    assert chain.find_appended() == ([0], False), "it may still appear"
    grown(Chain(LocalStore(tmp_path), "c", "thing", Body, never_falls), 2)
    assert chain.find_appended() == ([0], True), "another writer was faster"
    interrupted(Fault.KILL_AFTER)
    assert chain.find_appended(since=2) == ([2], True)


def test_leader_takes_a_head_from_memory_until_something_may_be_newer(
    tmp_path: Path, points: Points, time: Boat
) -> None:
    held = Held()
    chain = Chain(FaultyStore(LocalStore(tmp_path), points), "c", "thing", Body, never_falls, held=held)

    def looks(known: Link[Body] | None = None, least: int = -1) -> bool:
        points.arm(-1, Fault.BEFORE)
        head = chain.head(known, least=least)
        assert head is not None
        return bool(points.seen)

    time.seconds = 5
    grown(chain, 1)
    link = chain.head()
    assert link is not None
    assert looks(), "nobody leads"
    held.leader = get_ident()
    assert not looks(least=0)
    assert looks(least=1)
    assert not looks(known=link)
    assert looks(known=dataclasses.replace(link, number=1))
    held.look()
    assert looks(), "a head that was seen at the same time may be older than the look"
    assert held.covers(5, partition=True)
    time.seconds = 6
    assert looks()
    assert not looks()
    assert chain.append(Body(2), None).result == "lost"
    assert not held.covers(6, partition=True)
    time.seconds = 7
    assert looks()
    assert not looks()
    held.leader = get_ident() + 1
    assert looks(), "another thread leads"


def test_head_that_is_known_is_read_again_only_after_an_hour(chain: Chain[Body], points: Points, time: Boat) -> None:
    link = chain.append(Body(1), None).link
    for seconds, calls in (3599.0, ["list"]), (3600.0, ["list", "get"]):
        time.seconds = seconds
        points.arm(-1, Fault.BEFORE)
        head = chain.head(known=link)
        assert (head and head.write_id) == (link and link.write_id)
        assert [name.split()[0] for name in points.seen] == calls


def test_extend_stands_behind_a_version_that_is_missing(chain: Chain[Body]) -> None:
    grown(chain, 1)
    lost = Link(4, "another", None, "2026-01-01T00:00:00", Body(7), 0.0)
    for number, value in (5, 8), (6, 9):
        link = chain.extend(lambda head: Body(head.body.value + 1), behind=lost)
        assert link is not None
        assert (link.number, link.body) == (number, Body(value))
    link = chain.extend(lambda head: Body(head.body.value + 1), behind=dataclasses.replace(lost, number=6))
    assert (link and link.number, link and link.body) == (7, Body(10)), "it is there, so it stands for itself"
    assert chain.extend(lambda head: None) is None
    assert chain.newest_number() == 7


def test_invariants_run_before_every_append(chain: Chain[Body]) -> None:
    grown(chain, 5)
    with pytest.raises(DamagedTableError):
        chain.append(Body(4), chain.head())
    assert len(list(chain.between(-1, 0))) == 1
    assert chain.get(1) is None


def test_extend_rebases_on_each_new_head(chain: Chain[Body]) -> None:
    grown(chain, 1)
    rivals = iter([2, 3])

    def build(head):
        for value in rivals:
            grown(chain, value)
            break
        return Body(head.body.value + 10)

    link = chain.extend(build)
    assert link is not None
    assert (link.number, link.body.value) == (3, 13)


def test_extend_gives_up_with_a_clear_error(chain: Chain[Body]) -> None:
    grown(chain, 1)

    def build(head):
        grown(chain, head.body.value + 1)
        return Body(100)

    with pytest.raises(TryAgainError, match="in each of 3 attempts"):
        chain.extend(build, attempts=3)


def test_newer_format_is_refused_clearly(chain: Chain[Body], tmp_path: Path) -> None:
    grown(chain, 1)
    path = tmp_path / "c" / f"v{LARGEST:020d}.json"
    path.write_bytes(metadata.encode({**json.loads(path.read_bytes()), "format": 99}))
    with pytest.raises(ConfigurationError, match="has format 99; this lakeupsert reads format 2 and older"):
        chain.head()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"format":1}'])
def test_damaged_version_is_named(chain: Chain[Body], tmp_path: Path, body: bytes) -> None:
    grown(chain, 1)
    path = tmp_path / "c" / f"v{LARGEST:020d}.json"
    path.write_bytes(body)
    with pytest.raises(DamagedTableError, match=path.name):
        chain.head()


def test_version_of_another_chain_is_refused(chain: Chain[Body], tmp_path: Path) -> None:
    grown(chain, 1, 2)
    (tmp_path / "c" / f"v{LARGEST - 1:020d}.json").write_bytes((tmp_path / "c" / f"v{LARGEST:020d}.json").read_bytes())
    with pytest.raises(DamagedTableError, match=f"{LARGEST - 1:020d}.json") as refused:
        chain.head()
    assert refused.value.code == "damaged-object"


@pytest.mark.parametrize("bit", range(8))
def test_every_byte_of_a_version_counts(chain: Chain[Body], tmp_path: Path, bit: int) -> None:
    """What was read before the damage is refused after it, or is the same; also times and ids, which nothing else checks."""
    grown(chain, 1, 2)
    path, before = tmp_path / "c" / f"v{LARGEST - 1:020d}.json", chain.get(1)
    good = path.read_bytes()
    assert before is not None
    refused = 0
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        try:
            found = chain.get(1)
        except DamagedTableError as e:
            assert (e.code, path.name in e.message) == ("damaged-object", True)
            refused += 1
        else:
            assert found is not None
            assert dataclasses.replace(found, read_at=0) == dataclasses.replace(before, read_at=0)
    assert refused >= good.index(b',"digest":')


def test_a_version_that_says_something_else_than_a_version_is_damaged(chain: Chain[Body], tmp_path: Path) -> None:
    """Without its digest, or with a right one."""
    grown(chain, 1)
    path = tmp_path / "c" / f"v{LARGEST:020d}.json"
    without = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "digest"}
    for damaged in (
        msgspec.json.encode(without),
        metadata.encode({**without, "written_at": "2026-13-01"}),
        metadata.encode({name: value for name, value in without.items() if name != "parent"}),
        b"\xff",
    ):
        path.write_bytes(damaged)
        with pytest.raises(DamagedTableError, match=path.name) as refused:
            chain.head()
        assert refused.value.code == "damaged-object"


def test_gap_in_a_chain_is_named(chain: Chain[Body], tmp_path: Path) -> None:
    grown(chain, 1, 2, 3)
    (tmp_path / "c" / f"v{LARGEST - 1:020d}.json").unlink()
    with pytest.raises(DamagedTableError, match="thing version 1 is missing"):
        list(chain.between(-1, 2))


FIRST_USE = """
import sys, threading
import msgspec
from lakeupsert.decoding import convert, decoder_of
sys.setswitchinterval(1e-6)
for _ in range(30):
    for i in range(40):
        exec(f"class C{i}(msgspec.Struct):\\n a: 'list[C{i + 1}]'\\n b: 'dict[str, C{i + 1}]'")
    class C40(msgspec.Struct): pass
    together = threading.Barrier(4)
    def use():
        together.wait()
        USE
    threads = [threading.Thread(target=use) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


@pytest.mark.parametrize("use", ["""decoder_of(C0).decode(b'{"a": [], "b": {}}')""", 'convert({"a": [], "b": {}}, C0)'])
def test_threads_may_be_the_first_to_read_an_object_of_a_kind(use: str) -> None:
    """Without a lock the process dies in msgspec (0.22.0). Nothing else in lakeupsert decodes: ruff's banned-api."""
    subprocess.run([sys.executable, "-c", FIRST_USE.replace("USE", use)], check=True)
