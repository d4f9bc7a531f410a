"""Landing files of a source: rows and position count together, whoever dies or stalls wherever."""

import gzip
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import DatabaseSource, DeleteSettings
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.retries import LONGEST_AWAY_SECONDS, TICK_SECONDS
from lakeupsert.sources.draft import ENDING, Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.sources.follow import CaptureOptions, follow
from tests.harness.faults import FAULTS, Fault, Killed
from tests.harness.lake import Lake, row


class Source(SourceFiles):
    """Reads the whole numbers from 0 on, one a file; its position is the next number."""

    def __init__(self, lake: Lake, name: str = "n") -> None:
        super().__init__(lake.opened, name, ENDING)
        self._landing = lake.opened.resources.landing  # type: ignore[assignment]  # with points for faults
        self.lake = lake

    def begin(self) -> str | None:
        self.next = int(super().begin() or 0)
        return str(self.next)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.land(_file(self.next), str(self.next + 1))
            self.next += 1


def _file(number: int) -> bytes:
    draft = Draft(0, 1, 1)
    draft.add(
        json.dumps({"k": f"k{number}", "l": 1, "d": "2020-01-01", "ts": "2020-01-01 00:00:00", "v": number}).encode()
    )
    return draft.take()


def landed(lake: Lake) -> list[int]:
    """The numbers in the landing files that are there and in those that were removed, each as often as it came."""
    files = sorted((lake.root / "landing" / "n").glob("*"))
    texts = [gzip.decompress(data).decode() for path in files if (data := path.read_bytes())]
    return [*getattr(lake, "removed", []), *(json.loads(line)["v"] for text in texts for line in text.splitlines())]


def take_and_remove(lake: Lake) -> None:
    """What `ingest` and a retention of landing files do. An empty file keeps a place for as long as a process may stall."""
    here = landed(lake)
    lake.table.run(host="local", workers=1)
    lake.removed = here  # type: ignore[attr-defined]
    for path in (lake.root / "landing" / "n").glob("*"):
        if path.stat().st_size:
            path.unlink()


def check(lake: Lake) -> None:
    """The next process goes on, and nothing is lost or counts twice."""
    lake.reopen()
    source = Source(lake)
    source.begin()
    assert landed(lake) == list(range(source.next))
    source.step(2)
    assert landed(lake) == list(range(source.next))
    lake.table.run(host="local", workers=1)
    assert sorted(lake.table.to_arrow().read_all()["v"].to_pylist()) == list(range(source.next))


def three(lake: Lake) -> None:
    source = Source(lake)
    source.begin()
    source.step(3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_is_struck_at_any_call_loses_and_repeats_nothing(tmp_path: Path, fault: Fault) -> None:
    assert Lake(tmp_path / "first").strike_every_call(fault, three, check) >= 8


def test_files_that_were_taken_and_removed_count(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    three(lake)
    take_and_remove(lake)
    check(lake)


@pytest.mark.parametrize("meanwhile", [lambda lake: None, take_and_remove], ids=["kept", "taken and removed"])
def test_a_process_that_stalls_at_any_call_is_replaced(tmp_path: Path, meanwhile: Callable[[Lake], object]) -> None:
    """Another process begins before each call of the first one, and lands two files. Then the first one goes on."""
    stalled_in = set[str]()
    for number in range(50):
        lake = Lake(tmp_path / str(number))

        def takes_over(lake: Lake = lake) -> None:
            other = Source(Lake(lake.root))
            other.begin()
            other.step(2)
            meanwhile(lake)

        lake.points.amid(number, takes_over)
        replaced = None
        with suppress(TryAgainError):
            three(lake)
            replaced = False
        struck = lake.points.struck
        lake.points.disarm()
        if replaced is None:
            assert struck is not None
            stalled_in.add(struck.split()[0])
        check(lake)
        if struck is None:
            break
    assert stalled_in >= {"create", "landing"}


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(30))
def test_random_deaths_stalls_and_removals(tmp_path: Path, seed: int) -> None:
    """Three processes, each of which may wait before any of its calls while the others work, or die there."""
    chance, lake = random.Random(seed), Lake(tmp_path)
    depth = [0]

    def process(one: Lake) -> None:
        depth[0] += 1
        if depth[0] < 4 and chance.random() < 0.7:
            one.points.amid(chance.randrange(12), lambda: process(Lake(tmp_path)))
        elif chance.random() < 0.7:
            one.points.arm(chance.randrange(12), chance.choice(list(Fault)))
        with suppress(Killed, TryAgainError):
            three(one)
        one.points.disarm()
        depth[0] -= 1

    for _ in range(4):
        process(Lake(tmp_path))
        if chance.random() < 0.3:
            here = [*getattr(lake, "removed", [])]
            take_and_remove(lake)
            assert landed(lake)[: len(here)] == here
    check(lake)


def test_a_position_without_rows_needs_no_file(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    source = Source(lake)
    assert source.begin() == "0"
    source.land(b"", "7")
    assert Source(lake).begin() == "7"
    assert not (tmp_path / "landing" / "n").exists()
    source.step()
    assert [path.name for path in (tmp_path / "landing" / "n").iterdir()] == ["000000000001.jsonl.gz"]


def test_files_without_a_position_are_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    three(lake)
    other = Lake(tmp_path, processed=str(tmp_path / "other"))
    with pytest.raises(ConfigurationError) as caught:
        Source(other).begin()
    assert caught.value.code == "position-lost"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"landing_dates": "%Y-%m-%d"},
        {"format": "csv"},
        {"format": "parquet"},
        {"delete": DeleteSettings(file_prefix="0")},
    ],
    ids=str,
)
def test_tables_that_would_not_read_the_files_as_they_are_meant(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Source(Lake(tmp_path, **settings))
    assert caught.value.code == "source-files-unread"


def test_a_position_that_is_older_than_the_landing_files_is_refused(tmp_path: Path) -> None:
    """The processed zone comes back from a backup. The source then sends other rows for the name of a file that is there."""
    lake = Lake(tmp_path)
    source = Source(lake)
    source.begin()
    source.step(2)
    shutil.copytree(tmp_path / "processed", tmp_path / "backup")
    source.step()
    newest = sorted((tmp_path / "landing" / "n").iterdir())[-1]
    content = newest.read_bytes()
    shutil.rmtree(tmp_path / "processed")
    shutil.copytree(tmp_path / "backup", tmp_path / "processed")
    restored = Source(Lake(tmp_path))
    assert restored.begin() == "2"
    for again in (lambda: restored.land(_file(8), "9"), lambda: Source(Lake(tmp_path)).begin()):
        with pytest.raises(ConfigurationError) as caught:
            again()
        assert caught.value.code == "position-lost"
    assert newest.read_bytes() == content


def test_another_file_of_that_name_that_a_batch_took_does_not_count(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    file = tmp_path / "landing" / "n" / "000000000001.jsonl.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(_file(8))
    lake.table.run(host="local", workers=1)
    file.unlink()
    source = Source(lake)
    source.begin()
    source._create = lambda entry, data: False  # type: ignore[method-assign]  # it ends between its two creates
    with pytest.raises(TryAgainError):
        source.step()
    assert Source(Lake(tmp_path)).begin() == "0"


def test_old_entries_are_deleted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    three(lake)
    chain = lake.opened.history.objects.source("n")
    hour = time.time() - 3600
    for number, when in ((0, 0.0), (1, hour)):
        os.utime(tmp_path / "processed" / chain.name(number), (when, when))
    assert Source(lake).begin() == "3"
    assert sorted(chain.numbers()) == [1, 2]


def test_a_draft_is_due_by_seconds_rows_or_bytes() -> None:
    assert not Draft(0, 1, 1).is_due
    assert Draft(0, 1, 1).take() == b""
    for limits, due in [((0, 9, 99), True), ((99, 2, 99), True), ((99, 9, 4), True), ((99, 9, 99), False)]:
        draft = Draft(*limits)
        draft.add(b"{}")
        draft.add(b"{}")
        assert draft.is_due is due
        assert gzip.decompress(draft.take()) == b"{}\n{}\n"
        assert not draft.is_due


def test_an_outage_of_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives signs of life all the time, and the first trouble after hours of work is a first one again."""
    now, tried, signs = [0.0], list[float](), [0.0]
    stop = Stop()
    monkeypatch.setattr(clock, "elapsed", lambda: now[0])

    def wait(seconds: float) -> bool:
        now[0] += seconds
        return stop.is_set()

    stop.wait = wait  # type: ignore[method-assign, assignment]

    def run() -> None:
        tried.append(now[0])
        if len(tried) == 1100:
            now[0] += 3600.0
        if len(tried) == 1102:
            stop.set()
        raise TryAgainError("source-unreachable", "It is away.", next="wait")

    files = SimpleNamespace(leadership=SimpleNamespace(lead=lambda: True, release=lambda: None), removed=list)
    options = CaptureOptions(stop=stop, warn=lambda text: None, alive=lambda: signs.append(now[0]))
    follow("n", files, run, options)  # type: ignore[arg-type]
    assert len(tried) == 1102
    assert sum(b - a > TICK_SECONDS for a, b in pairwise(signs)) == 1, "the hours of work, which here give no sign"
    assert tried[1099] - tried[1098] == pytest.approx(LONGEST_AWAY_SECONDS)
    assert tried[1101] - tried[1100] < LONGEST_AWAY_SECONDS / 10


def test_a_file_of_a_source_is_whole_at_the_first_look(tmp_path: Path) -> None:
    """One of others is not: somebody may be copying it."""
    lake, stop = Lake(tmp_path), Stop()
    source = Source(lake)
    source.begin()
    source.step()
    lake.land("n/copied.jsonl", [row("a", 0, 0, 0)])
    of_table = DatabaseSource(from_="postgresql://me@localhost/s", table="t", tables=("a.b",))

    def took(result: object) -> None:
        if isinstance(result, AppendResult):
            assert [file.path for file in result.entry.files] == ["n/000000000001.jsonl.gz"]
            stop.set()

    with Table.of(OpenTable("t", lake.settings, sources={"n": of_table})) as table:
        table.ingest(seconds=0.001, stop=stop, collect=took, max_seconds=20)
    assert stop.is_set()
