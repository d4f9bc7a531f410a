"""Tables that forget deletes: how batches come together, and what upkeep does, changes nothing."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.workers.worker import mark_failed
from tests.harness.lake import Lake, row

DAY = "d=2020-01-01"
# b is stored, a was deleted at 5 and is forgotten.
FORGOTTEN = [[row("a", 0, 1), row("b", 0, 1)], [row("a", 0, 5, op="D")], [row("b", 0, 2)]]


def forgetful(root: Path, nights: list[list[Any]] = FORGOTTEN, **settings: Any) -> Lake:
    lake = Lake(root, tombstone_retention="0s", **settings)
    for number, rows in enumerate(nights):
        night(lake, rows, number)
    return lake


def night(lake: Lake, rows: list[Any], number: int = 100) -> None:
    lake.land(f"{number}.jsonl", rows)
    lake.run()


def seen(lake: Lake, snapshot: str = "published") -> list[tuple[str, int]]:
    return [(r["k"], r["ts"].second) for r in lake.rows(snapshot)]


def refused(lake: Lake) -> int:
    result = lake.table.reconcile(deep=True)
    assert not result.unbalanced
    return sum(p.refused for p in result.proof)


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_late_delete_opens_no_door_for_a_late_row(tmp_path: Path, strategy: Any) -> None:
    lake = forgetful(tmp_path, strategy=strategy)
    night(lake, [row("a", 0, 3, op="D")], 10)
    night(lake, [row("a", 0, 4)], 11)
    assert seen(lake) == [("b", 2)]
    assert refused(lake) == 2
    lake.table.reprocess(source="landing", host="local")
    assert seen(lake) == [("b", 2)]
    assert refused(lake) == 2


def test_work_that_was_planned_before_a_merge_refused_a_row_is_outdated(tmp_path: Path) -> None:
    lake = forgetful(tmp_path)
    table = lake.opened
    work = reprocess(table, ReprocessOptions(source="landing", host="local")).work
    lake.land("10.jsonl", [row("c", 0, 4)])
    lake.table.append(host="local")
    from lakeupsert.engine.arrow import ArrowEngine

    dedupe_partitions(table, ArrowEngine(), {DAY: 4})
    with pytest.raises(LakeupsertError, match="would leave out the wrong") as raised:
        dedupe_partitions(table, ArrowEngine(), {DAY: 4}, work)
    assert raised.value.code == "work-outdated"
    lake.table.publish()
    assert seen(lake) == [("b", 2)]
    assert refused(lake) == 1


def test_replayed_row_that_a_merge_refused_stays_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s", schema=Lake(tmp_path / "x").settings.schema | {"v": "int"})
    lake.land("0.jsonl", [row("a", 0, 1), row("b", 0, 1)])
    lake.run()
    lake.land("1.jsonl", [], refused=[row("c", 0, 4, v=3_000_000_000)])
    lake.run()
    night(lake, [row("a", 0, 5, op="D")], 2)
    night(lake, [row("b", 0, 2)], 3)
    wider = Lake(tmp_path, tombstone_retention="0s")
    assert wider.table.append(host="local", replay_quarantine=True) is not None
    wider.run()
    assert seen(wider) == [("b", 2)]
    wider.table.reprocess(source="landing", host="local")
    assert seen(wider) == [("b", 2)]
    assert sum(p.refused for p in wider.table.reconcile().proof) == 1


def test_batches_that_wait_are_judged_one_by_one(tmp_path: Path) -> None:
    """The reader's `latest`, and a partition that catches up, see what nightly merges would have made."""
    lake = forgetful(tmp_path, [FORGOTTEN[0]], on_failed_partition="skip")
    for number, rows in enumerate([[row("a", 0, 5, op="D")], [row("b", 0, 7)], [row("c", 0, 4)]], 10):
        lake.land(f"{number}.jsonl", rows)
        lake.table.append(host="local")
    assert seen(lake, "latest") == [("b", 7)]
    mark_failed(lake.opened.history, DAY, 2, "of this test")
    lake.table.publish()
    assert lake.table.status().lagging == (DAY,)
    lake.table.dedupe()
    lake.table.publish()
    assert seen(lake) == [("b", 7)]
    assert refused(lake) == 1


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("upkeep", ["nothing", "compact", "stored", "landing"])
@pytest.mark.parametrize("bucket", ["2500B", "256MiB"])
def test_neither_buckets_nor_upkeep_change_what_is_refused(tmp_path: Path, bucket: str, upkeep: str) -> None:
    keys = [f"{n:03d}" for n in range(40)]
    nights = [
        [row(k, 0, 10) for k in keys],
        [row(keys[0], 0, 30, op="D"), row(keys[1], 0, 29, op="D")],
        [row(keys[2], 0, 31)],  # meets one bucket alone
    ]
    lake = forgetful(tmp_path, [], bucket=bucket, strategy="delta")
    for number, rows in enumerate(nights):
        night(lake, rows, number)
        if upkeep == "compact":
            lake.table.compact(full=True)
        elif upkeep != "nothing":
            lake.table.reprocess(source=upkeep, host="local")  # type: ignore[arg-type]
    night(lake, [row(f"new{n}", 0, 20) for n in range(20)] + [row("newer", 0, 30)])
    assert seen(lake) == [(keys[2], 31), *((k, 10) for k in keys[3:]), ("newer", 30)]
    assert refused(lake) == 20


def test_compaction_drops_no_delete(tmp_path: Path) -> None:
    """Not even where the table shall forget sooner than before: the next merge does, by its batch's stamp."""
    lake = Lake(tmp_path, tombstone_retention="1d", strategy="delta")
    for number, rows in enumerate(FORGOTTEN):
        night(lake, rows, number)

    def known_and_dropped() -> tuple[int, int]:
        [proof] = lake.table.reconcile().proof
        return proof.tombstones, proof.tombstones_dropped

    lake.mend(lambda row: True, tombstone_retention="0s")
    lake.table.compact(full=True)
    assert known_and_dropped() == (1, 0)
    night(lake, [row("b", 0, 3)])
    assert known_and_dropped() == (0, 1)


def test_extract_brings_a_key_back_below_its_forgotten_delete(tmp_path: Path) -> None:
    lake = forgetful(tmp_path)
    lake.land("10.jsonl", [row("a", 0, 2), row("b", 0, 3)])
    lake.run(full="table")
    assert seen(lake) == [("a", 2), ("b", 3)]


def test_what_lost_to_a_refused_row_is_no_version(tmp_path: Path) -> None:
    lake = forgetful(tmp_path, history=True)
    night(lake, [row("a", 0, 2), row("a", 0, 3)])
    past = lake.table.to_arrow(history=True).read_all().to_pylist()
    assert [one["ts"].second for one in past if one["k"] == "a"] == [1]


@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.long
def test_key_that_an_extract_brings_back_below_its_forgotten_delete_stays(
    tmp_path: Path, history: bool, engine: Any, request: pytest.FixtureRequest
) -> None:
    """Made anew of landing, the delete and the extract meet in one merge."""
    if engine == "spark":
        request.getfixturevalue("spark")
    beaten = [[row("a", 0, 5), row("b", 0, 1)], [row("a", 0, 3), row("a", 0, 6, op="D")], [row("b", 0, 2)]]
    lake = forgetful(tmp_path, beaten, history=history)
    lake.land("10.jsonl", [row("a", 0, 2), row("b", 0, 3), row("c", 0, 3)])
    lake.run(full="table")
    # This one is not forgotten when the next extract comes, which has an old row of its key.
    night(lake, [row("c", 0, 9, op="D")], 11)
    lake.land("12.jsonl", [row("a", 0, 2), row("b", 0, 8), row("c", 0, 3)])
    lake.run(full="table")
    night(lake, [row("a", 0, 4)], 13)
    wanted = [("a", 4), ("b", 8)]
    past = lake.table.to_arrow(history=True).read_all() if history else None
    assert seen(lake) == wanted
    assert refused(lake) == 0
    assert all(p.difference is None for p in lake.table.reconcile(deep=True).proof)
    for source in ("stored", "landing"):
        lake.table.reprocess(source=source, host="local", engine=engine)
        assert seen(lake) == wanted
        if history:
            assert lake.table.to_arrow(history=True).read_all().equals(past)
    assert all(p.difference is None for p in lake.table.reconcile(deep=True).proof)


def test_where_content_decides_a_row_of_the_same_order_as_a_forgotten_delete_is_late(tmp_path: Path) -> None:
    lake = forgetful(tmp_path, ties="content")
    night(lake, [row("a", 0, 5), row("c", 0, 6)])
    assert seen(lake) == [("b", 2), ("c", 6)]
    assert refused(lake) == 1


@pytest.mark.parametrize(("before", "after"), [("90d", "0s"), ("0s", "90d"), (None, "0s"), ("0s", None)])
def test_retention_holds_from_the_next_batch_on(tmp_path: Path, before: Any, after: Any) -> None:
    """What had been forgotten when an extract came stays so, whatever is set later, when landing is read again too."""
    first, then = before == "0s", after == "0s"
    lake = Lake(tmp_path, tombstone_retention=before)
    night(lake, [row("b", 0, 1), row("a", 0, 5, op="D"), row("e", 0, 5, op="D")], 1)
    night(lake, [row("b", 0, 2)], 2)
    extract(lake, [row("a", 0, 2), row("b", 0, 3)], 3)
    assert seen(lake) == [("a", 2)] * first + [("b", 3)]
    lake.mend(lambda row: True, tombstone_retention=after)
    stays_when_made_anew(lake)
    night(lake, [row("c", 0, 9, op="D"), row("d", 0, 9)], 4)
    for number in (5, 6):
        extract(lake, [row("a", 0, 4), row("b", 0, 9), row("c", 0, 4), row("d", 0, 9), row("e", 0, 4)], number)
        # Under the first retention for ever, what was deleted then is as old as the first batch of the second one.
        forgot = first or (then and (before is not None or number == 6))
        again = then and number == 6
        assert seen(lake) == [("a", 4)] * forgot + [("b", 9)] + [("c", 4)] * again + [("d", 9)] + [("e", 4)] * forgot
        stays_when_made_anew(lake)


@pytest.mark.parametrize("retention", ["0s", "30000d"])  # the longer one reaches back to before 1970
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("bucket", ["3000B", "256MiB"])
def test_what_was_deleted_when_deletes_were_known_for_ever_is_forgotten_in_every_bucket(
    tmp_path: Path, bucket: str, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{n:03d}" for n in range(40)]
    lake = Lake(tmp_path, tombstone_retention="90d", bucket=bucket, strategy="delta")
    night(lake, [row(k, 0, 5) for k in keys], 1)
    night(lake, [row(k, 0, 6, op="D") for k in keys[:5]], 2)
    chain = lake.opened.history.objects.partition(DAY)
    # A batch's file tells which buckets it meets.
    monkeypatch.setattr("lakeupsert.engine.batch.RANGE_BYTES", 40)
    known = []
    for number, (then, rows) in enumerate(
        [
            (None, [row(k, 0, 7, op="D") for k in keys[5:10]] + [row(k, 0, 7) for k in keys[:5]]),
            (retention, [row(keys[20], 0, 7)]),  # meets one bucket alone
            ("0s", [row(keys[20], 0, 8)]),
        ],
        3,
    ):
        lake.mend(lambda row: True, tombstone_retention=then)
        night(lake, rows, number)
        [proof] = lake.table.reconcile().proof
        known.append((proof.tombstones, proof.tombstones_dropped))
        assert len(chain.head().body.buckets) == {"3000B": 4, "256MiB": 1}[bucket]
    assert known == [(5, 0), (5, 0), (0, 5)]


# What is stored when the partition begins to lag, and the batches that it catches up with at once, of which some are extracts.
Nights = list[tuple[list[Any], str | None]]
CAUGHT_UP: dict[str, tuple[list[Any], Nights, list[tuple[str, int]]]] = {
    "a tombstone is void": (
        [[row("a", 0, 5, op="D"), row("b", 0, 1)]],
        [([row("b", 0, 2)], None), ([row("a", 0, 3), row("b", 0, 3)], "table")],
        [("a", 3), ("b", 3)],
    ),
    "a row was beaten by one that is void": (
        [[row("a", 0, 3), row("b", 0, 1)]],
        [([row("a", 0, 5, op="D")], None), ([row("b", 0, 2)], None), ([row("a", 0, 2), row("b", 0, 3)], "table")],
        [("a", 2), ("b", 3)],
    ),
    "two extracts have a row": (
        [[row("a", 0, 3), row("b", 0, 1)]],
        [([row("a", 0, 1), row("b", 0, 9)], "table"), ([row("a", 0, 2), row("b", 0, 9)], "table")],
        [("a", 3), ("b", 9)],
    ),
}


@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("retention", [None, "0s"])
@pytest.mark.parametrize("case", CAUGHT_UP)
@pytest.mark.long
def test_restore_that_merges_an_extract_with_others_forgets_what_nights_would_have(
    tmp_path: Path, case: str, retention: str | None, history: bool, engine: Any, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    before, later, wanted = CAUGHT_UP[case]
    settings = {"tombstone_retention": retention, "history": history}
    nightly = Lake(tmp_path / "nightly", **settings)
    lake = Lake(tmp_path / "at once", **settings, on_failed_partition="skip")
    for number, rows in enumerate(before):
        night(nightly, rows, number)
        night(lake, rows, number)
    for number, (rows, full) in enumerate(later, 10):
        for each in (nightly, lake):
            each.land(f"{number}.jsonl", rows)
        nightly.run(full=full, may_shrink=bool(full))
        lake.table.append(host="local", full=full, may_shrink=bool(full))
    catch_up_by_restore(lake, first=len(before) + 1, engine=engine)
    assert lake.rows() == nightly.rows()
    if retention is not None:
        assert seen(lake) == wanted
    stays_when_made_anew(lake)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_delete_that_an_extract_lacked_is_not_void_once_more(
    tmp_path: Path, engine: Any, request: pytest.FixtureRequest
) -> None:
    """Nights would refuse the late row by the first extract's floor; at once, the floor before both of them counts."""
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = forgetful(tmp_path, [[row("b", 0, 1)]], on_failed_partition="skip")
    for number, (rows, full) in enumerate(
        [
            ([row("a", 0, 5, op="D")], None),
            ([row("b", 0, 9)], "table"),
            ([row("a", 0, 4)], None),
            ([row("a", 0, 3), row("b", 0, 9)], "table"),
        ],
        10,
    ):
        lake.land(f"{number}.jsonl", rows)
        lake.table.append(host="local", full=full)
    catch_up_by_restore(lake, first=2, engine=engine)
    assert seen(lake) == [("a", 4), ("b", 9)]
    stays_when_made_anew(lake)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_delete_that_went_with_another_one_is_not_void_once_more(
    tmp_path: Path, engine: Any, request: pytest.FixtureRequest
) -> None:
    """Made anew of landing, both meet two extracts; the second is forgotten when the first has taken it away already."""
    if engine == "spark":
        request.getfixturevalue("spark")
    source = Later()
    with clock.use(source):
        lake = Lake(tmp_path, tombstone_retention="50s")
        for seconds, rows, full in [
            (0, [row("a", 0, 9, op="D"), row("b", 0, 1)], None),
            (100, [row("a", 0, 6, op="D")], None),
            (110, [row("b", 0, 2)], None),  # forgets the first
            (111, [row("a", 0, 2), row("b", 0, 10)], "table"),
            (112, [row("a", 0, 4)], None),
            (200, [row("b", 0, 11)], None),  # would forget the second
            (201, [row("a", 0, 3), row("b", 0, 12)], "table"),
        ]:
            source.seconds = seconds
            lake.land(f"{seconds}.jsonl", rows)
            lake.run(full=full)
        assert seen(lake) == [("a", 4), ("b", 12)]
        lake.table.reprocess(source="landing", host="local", engine=engine)
        assert seen(lake) == [("a", 4), ("b", 12)]
        stays_when_made_anew(lake)


class Later(clock.Source):
    """So many seconds after now."""

    seconds = 0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.seconds)


@pytest.mark.long
def test_restore_alone_forgets_nothing(tmp_path: Path) -> None:
    """It is later than the delete, but what decides is the batch that the partition gets."""
    lake = forgetful(tmp_path, [[row("b", 0, 1)]], on_failed_partition="skip")
    lake.land("1.jsonl", [row("a", 0, 5, op="D")])
    lake.table.append(host="local")
    catch_up_by_restore(lake, first=2, engine="arrow")
    extract(lake, [row("a", 0, 2), row("b", 0, 3)], 50)
    assert seen(lake) == [("b", 3)]
    stays_when_made_anew(lake)


def extract(lake: Lake, rows: list[Any], number: int) -> None:
    lake.land(f"{number}.jsonl", rows)
    lake.run(full="table")


def catch_up_by_restore(lake: Lake, first: int, engine: Any) -> None:
    """Publish a snapshot that the partition lags in, from that batch on, and go back to it from a later one."""
    mark_failed(lake.opened.history, DAY, first, "of this test")
    lagging = lake.table.publish().snapshot
    assert lake.table.status().lagging == (DAY,)
    lake.land("99.jsonl", [row("withdrawn", 0, 9)])
    lake.table.append(host="local")
    lake.table.restore(lagging, dry=False)
    lake.table.dedupe(engine=engine)
    lake.table.publish()


def stays_when_made_anew(lake: Lake) -> None:
    """Each column of each row, by DuckDB, and by both kinds of upkeep."""
    rows = lake.rows()
    assert all(p.difference is None for p in lake.table.reconcile(deep=True).proof)
    for source in ("stored", "landing"):
        lake.table.reprocess(source=source, host="local")  # type: ignore[arg-type]
        assert lake.rows() == rows
