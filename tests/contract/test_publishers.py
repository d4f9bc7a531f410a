"""What every publisher keeps: a program that knows nothing of lakeupsert sees a published snapshot, whole and exact.

Most tests begin with the same lake of two nights, which is made once and put back before each use.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.pipeline.publishers import PublisherStanding, catch_up_one, publisher
from tests.harness.faults import Fault, Killed
from tests.harness.lake import DAY, Lake, row
from tests.harness.outsiders import Outsider, Rows, in_order, new_outsider, show_first
from tests.harness.processes import Died, LakeProcess, Strike
from tests.harness.publishers import publish_in_processes, publish_in_threads

CATALOGS = ["iceberg", pytest.param("glue", marks=pytest.mark.cloud), pytest.param("hive", marks=pytest.mark.readers)]
READS = ("get", "head", "list", "open", "catalog get", "catalog load")
"""Calls without an effect. Who dies there leaves what the call before left."""
WAYS = (Fault.BEFORE, Fault.AFTER, Fault.KILL_AFTER)
NEVER = -1


@pytest.fixture(scope="module", params=["delta", *CATALOGS])
def other(request: pytest.FixtureRequest) -> Iterator[Outsider]:
    with new_outsider(request) as found:
        yield found


class Stage:
    """A lake of two published nights, of which the publisher has shown the first one, or nothing."""

    def __init__(self, folder: Path, other: Outsider) -> None:
        self._root, self._other = folder / "lake", other
        lake = Lake(self._root, publishers=(), strategy=other.strategies[0])
        lake.land("0.jsonl", [row(f"k{i}", day, 0, i) for day in range(3) for i in range(9)])
        lake.run()
        lake.land("1.jsonl", [row(f"k{i}", day, 1, 10 + i) for day in (0, 3) for i in range(0, 9, 2)])
        lake.land("2.jsonl", [row(f"k{i}", 1, 1, op="D") for i in range(9)])
        lake.run()
        lake.mend(lambda row: False, **other.settings(self._root))
        self._saved = {False: lake.copy(folder / "nothing")}
        show_first(lake, other.name)
        self._saved[True] = lake.copy(folder / "first")

    def lake(self, *, shown: bool = True, **settings: Any) -> Lake:
        """Put it back, to where it was before, because paths of Iceberg are absolute."""
        shutil.rmtree(self._root)
        lake = self._saved[shown].copy(self._root)
        lake.points = self._other.points
        lake.points.disarm()
        lake.mend(lambda row: False, **settings)
        self._other.restore(lake, shown=shown)
        return lake


@pytest.fixture(scope="module")
def stage(module_folder: Path, other: Outsider) -> Stage:
    return Stage(module_folder / other.name, other)


def night(lake: Lake, number: int) -> PublisherStanding:
    """Some keys of each partition and a new partition. Returns how far the publisher is."""
    lake.land(f"{number}.jsonl", [row(f"k{i}", day, number, i) for day in (0, 2, number) for i in range(0, 9, 3)])
    (standing,) = lake.table.run(host="local").publish.publishers.values()
    return standing


def standing(lake: Lake) -> tuple[int | None, int | None, LakeupsertError | None]:
    (found,) = lake.table.status().publishers.values()
    return found.snapshot, found.behind, found.problem


def assert_exact(lake: Lake, other: Outsider) -> None:
    assert standing(lake) == (lake.table.objects.snapshots.newest_number(), 0, None)
    assert other.rows(lake) == in_order(lake.rows())


@contextmanager
def broken(lake: Lake, *calls: str, error: Exception) -> Iterator[None]:
    """These calls of the lake's publisher fail."""

    def fail(*arguments: object) -> None:
        raise error

    (name,) = lake.settings.publishers
    with pytest.MonkeyPatch.context() as patch:
        for call in calls:
            patch.setattr(type(publisher(lake.opened, name)), call, fail)
        yield


# ---------------------------------------------------------------- nights


def test_every_snapshot_is_shown(stage: Stage, other: Outsider) -> None:
    lake = stage.lake()
    lake.table.publish()
    assert_exact(lake, other)
    for number, strategy in enumerate(other.strategies * 2, 4):
        lake.mend(lambda row: False, strategy=strategy)
        night(lake, number)
        assert_exact(lake, other)
    lake.table.compact(full=True)
    assert_exact(lake, other)
    lake.table.restore("1", dry=False)
    night(lake, 9)
    assert_exact(lake, other)
    assert other.numbers(lake) in (None, [link.number for link in reversed(lake.table.snapshots())])
    lake.check()


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("partition_by", [(), ("bucket(2, k)",), ("d", "bucket(2, k, l)")], ids=str)
def test_a_table_without_partition_columns_and_one_by_hash_are_shown(
    folder: Path, other: Outsider, partition_by: tuple[str, ...]
) -> None:
    lake = Lake(folder, **{"strategy": other.strategies[0], **other.settings(folder), "partition_by": partition_by})
    other.points.disarm()
    lake.points = other.points
    lake.reopen()
    for number in (1, 2):
        night(lake, number)
        assert_exact(lake, other)
    lake.land("gone.jsonl", [row(f"k{i}", day, 9, op="D") for day in (0, 1, 2) for i in range(9)])
    lake.run()
    assert lake.rows() == []
    assert_exact(lake, other)
    for number in range(3, 30):  # a fault at the first call of a publish, the second, …
        lake.land(f"{number}.jsonl", [row(f"k{number}", 0, number), row("k0", 1, number)])
        lake.points.arm(number - 3, Fault.AFTER, ("catalog ", "create _delta_log/"))
        with suppress(Killed, TryAgainError):
            lake.run()
        struck = lake.points.struck
        lake.points.disarm()
        lake.reopen()
        lake.run()
        assert_exact(lake, other)
        if struck is None:
            break
    lake.table.publish(to=other.name, reset=True)
    assert_exact(lake, other)
    lake.check()


def test_reset_begins_anew_with_the_newest_snapshot(stage: Stage, other: Outsider) -> None:
    lake = stage.lake()
    lake.table.publish(to=other.name, reset=True)
    assert_exact(lake, other)
    assert other.numbers(lake) in (None, [1])
    lake.check()


def test_retype_is_shown_once_no_file_is_older(stage: Stage, other: Outsider) -> None:
    lake = stage.lake()
    lake.table.publish()
    before = other.rows(lake)
    lake.mend(lambda row: False, schema={**lake.settings.schema, "v": "string"})
    lake.table.retype_column("v", "string")
    for number in (None, 4):  # no partition changes, and some do
        found = lake.table.publish().publishers[other.name] if number is None else night(lake, number)
        assert found.problem is not None
        assert (found.problem.code, found.snapshot) == (f"unfit-for-{other.name}", 1)
        assert other.rows(lake) == before
    lake.table.compact(full=True)
    if other.switches_parts:  # its readers would see a mixture, so the table is made anew
        lake.table.publish(to=other.name, reset=True)
    assert_exact(lake, other)
    assert {type(one["v"]) for one in other.rows(lake) or ()} == {str}
    assert night(lake, 5).problem is None
    assert_exact(lake, other)
    lake.table.restore(1, dry=False)
    (found,) = lake.table.run(host="local").publish.publishers.values()
    assert found.problem is not None, "old files are shown again"
    lake.table.compact(full=True)
    assert_exact(lake, other)


def test_columns_that_others_can_not_read_are_named_and_the_night_goes_on(tmp_path: Path, other: Outsider) -> None:
    (tmp_path / "landing").mkdir()
    odd = {name: pa.array([None], type_) for name, type_ in other.unfit.items()}
    pq.write_table(pa.table({"k": [1], "d": [DAY], "ts": [1], **odd}), tmp_path / "landing" / "0.parquet")
    lake = Lake(tmp_path, **other.settings(tmp_path), key=("k",), schema={}, delete=None)
    published = lake.table.run(host="local").publish
    assert published.rows == 1
    (found,) = published.publishers.values()
    assert found.problem is not None
    assert found.problem.code == f"unfit-for-{other.name}"
    assert [name for name in odd if repr(name) not in found.problem.message] == []
    with pytest.raises(type(found.problem)):
        lake.table.publish(to=other.name)
    assert other.rows(lake) is None


# ---------------------------------------------------------------- faults


LATER = [pytest.param(begins, 3, marks=pytest.mark.long) for begins in ("behind", "with nothing", "with a reset")]


@pytest.mark.few(2)
@pytest.mark.parametrize(("begins", "most"), [("behind", 1), *LATER])
def test_fault_at_any_call_is_healed_by_the_next_publish(stage: Stage, other: Outsider, begins: str, most: int) -> None:
    """``most``: each call fails in so many ways, or each second call in one; calls take turns with the ways there are."""

    def strike(number: int, fault: Fault) -> Lake:
        lake = stage.lake(shown=begins != "with nothing")
        newest = lake.table.snapshots()[0]
        lake.points.arm(number, fault)
        with suppress(Killed):
            if begins == "with a reset":
                with suppress(TryAgainError):
                    publisher(lake.opened, other.name).reset()
            else:
                problem = catch_up_one(lake.opened, other.name, newest).problem
                assert problem is None or isinstance(problem, TryAgainError)
        return lake

    lake = strike(NEVER, Fault.BEFORE)
    calls = [*lake.points.seen]
    first, second = in_order(lake.rows(0)), in_order(lake.rows(1))
    assert other.rows(lake) == (None if begins == "with a reset" else second)
    assert len(calls) > (1 if begins == "with a reset" else 10)
    for number, call in [*enumerate(calls)][:: 2 if most == 1 else 1]:
        for fault in (Fault.BEFORE,) if call.startswith(READS) else (WAYS[number % 3 :] + WAYS)[:most]:
            try:
                lake = strike(number, fault)
                assert lake.points.struck
                check_healing(lake, other, first, second, begins)
            except BaseException as e:
                e.add_note(f"struck at call {number} ({call}): {fault.value}")
                raise


def check_healing(lake: Lake, other: Outsider, first: Rows, second: Rows, begins: str) -> None:
    lake.points.disarm()
    lake.reopen()
    found = other.rows(lake)
    if found is None:
        assert begins != "behind"
    elif other.switches_parts:
        for day in {one["d"] for one in found}:
            now, *snapshots = ([one for one in rows if one["d"] == day] for rows in (found, first, second))
            assert now in snapshots, f"a part of {day}"
    else:
        assert found in (first, second)
    if standing(lake)[1] == 0:
        assert found == second, "it says that it shows the newest snapshot"
    lake.table.publish(to=other.name)
    assert standing(lake) == (1, 0, None)
    assert other.rows(lake) == second
    assert other.numbers(lake) in {"behind": (None, [0, 1]), "with nothing": (None, [1])}.get(
        begins, (None, [0, 1], [1])
    )


@pytest.mark.few(1)
def test_process_killed_behind_its_snapshot(stage: Stage, other: Outsider) -> None:
    """By SIGKILL."""
    lake = stage.lake()
    lake.table.publish()
    before = other.rows(lake)
    lake.land("4.jsonl", [row("k0", 0, 4, 4)])
    with LakeProcess(lake) as process, pytest.raises(Died):
        process.do("run", strike=Strike("create _lakeupsert/snapshots", when="after"))
    lake.reopen()
    assert standing(lake) == (1, 1, None)
    assert other.rows(lake) == before
    lake.run()
    assert_exact(lake, other)


# ---------------------------------------------------------------- many at once


@pytest.mark.few(1)
def test_many_publishers_at_once_make_one_version_a_snapshot(folder: Path, other: Outsider) -> None:
    lake = Lake(folder / "lake", **other.settings(folder / "lake"), strategy=other.strategies[0])
    publish_in_threads(lake, other.name, rounds=8)
    assert other.numbers(lake) in (None, [*range(8)])
    assert_exact(lake, other)
    lake.check()


@pytest.mark.crash
def test_two_processes_at_once_make_one_version_a_snapshot(folder: Path, other: Outsider) -> None:
    settings = {**other.settings(folder / "lake"), "keep_snapshots": 1000}
    lake = Lake(folder / "lake", **settings, strategy=other.strategies[0])
    publish_in_processes(lake, other.name, rounds=200)
    assert other.numbers(lake) in (None, [*range(200)])
    assert_exact(lake, other)
    lake.check()


# ---------------------------------------------------------------- a publisher that fails


def test_publisher_that_fails_is_reported_and_the_next_one_shows_what_is_missing(stage: Stage, other: Outsider) -> None:
    lake = stage.lake()
    with broken(lake, "catch_up", error=ZeroDivisionError()):
        found = night(lake, 4)
        assert found.problem is not None
        assert (found.problem.code, found.snapshot, found.behind) == ("publisher-failed", 0, 2)
        assert night(lake, 5).behind == 3
    assert [link.number for link in lake.table.snapshots()] == [3, 2, 1, 0], "no night failed"
    config = str(lake.configure())
    answer = json.loads(CliRunner().invoke(main, ["status", "--json", "--config", config]).output)
    told = {"snapshot": 0, "behind": 3, "warning": None, "problem": None}
    assert answer["result"]["publishers"] == {other.name: told}
    assert f"publish --to {other.name}" in answer["warnings"][0]
    page = lake.root / "report.html"

    def report() -> tuple[list[str], str]:
        assert CliRunner().invoke(main, ["report", "--config", config, "--output", str(page)]).exit_code == 0
        return [f.level for f in lake.table.doctor() if f.check == "publishers"], page.read_text("utf-8")

    levels, text = report()
    assert levels == ["warning"]
    assert "3 behind" in text
    assert CliRunner().invoke(main, ["publish", "--to", other.name, "--config", config]).exit_code == 0
    levels, text = report()
    assert levels == ["ok"]
    assert "0 behind" in text
    assert_exact(lake, other)
    assert other.numbers(lake) in (None, [0, 1, 2, 3])
    lake.check()


@pytest.mark.long
def test_publisher_without_an_answer_stops_neither_night_nor_status_nor_vacuum(stage: Stage, other: Outsider) -> None:
    lake = stage.lake(keep_snapshots=1, superseded_retention="0s")
    before = other.rows(lake)
    silent = TryAgainError("catalog-unreachable", "no answer", next="wait")
    with broken(lake, "shown", "catch_up", "mend", "garbage", error=silent):
        problem = night(lake, 4).problem
        assert problem is not None
        assert problem.code == "catalog-unreachable"
        lake.table.compact(full=True)
        assert standing(lake)[:2] == (None, None)
        assert [f.level for f in lake.table.doctor() if f.check == "publishers"] == ["problem"]
        config = str(lake.configure())
        assert "not known" in CliRunner().invoke(main, ["status", "--config", config]).output
        assert (
            CliRunner().invoke(main, ["report", "--config", config, "--output", f"{lake.root}/report.html"]).exit_code
            == 0
        )
        lake.table.vacuum(dry=False)
    assert other.rows(lake) == before, "nobody knew that it is shown"
    lake.table.publish()
    assert_exact(lake, other)


def test_vacuum_keeps_what_a_publisher_that_is_behind_shows(stage: Stage, other: Outsider) -> None:
    lake = stage.lake(keep_snapshots=1, superseded_retention="0s")
    before = other.rows(lake)
    with broken(lake, "catch_up", error=ZeroDivisionError()):
        night(lake, 4)
        lake.table.compact(full=True)
        lake.table.vacuum(dry=False)
    assert other.rows(lake) == before
    lake.table.publish()
    assert lake.table.vacuum(dry=False).garbage
    assert_exact(lake, other)
    lake.check()


# ---------------------------------------------------------------- what other programs do


def test_what_another_program_did_is_undone_or_stops_the_publisher_until_a_reset(stage: Stage, other: Outsider) -> None:
    for change in other.changes:
        lake = stage.lake()
        lake.table.publish()
        change(lake)
        there = other.rows(lake) if other.stops else None
        problems = [night(lake, number).problem for number in (4, 5)]
        if other.stops:
            assert problems[-1] is not None, change
            assert problems[-1].code == other.stops
            assert f"publish --to {other.name} --reset" in problems[-1].next
            assert other.rows(lake) == there, "nothing is built upon it"
            lake.table.vacuum(dry=False)
            assert other.rows(lake) == there
            lake.table.publish(to=other.name, reset=True)
        assert_exact(lake, other)


@pytest.mark.parametrize("other", CATALOGS, indirect=True)
def test_table_of_another_lake_is_left_alone(stage: Stage, other: Outsider, tmp_path: Path) -> None:
    first = stage.lake()
    first.table.publish()
    second = Lake(tmp_path / "second", **{name: value for name, value in first.given.items() if name != "strategy"})
    second.land("0.jsonl", [row("k0", 0, 0)])
    second.run()
    assert len(second.rows()) == 1, "the night goes on"
    for reset in (False, True):
        with pytest.raises(LakeupsertError) as raised:
            second.table.publish(to=other.name, reset=reset)
        assert raised.value.code == other.taken
    assert_exact(first, other)
