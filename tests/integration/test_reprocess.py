"""Partitions written anew, from what is stored and from landing: no row changes, but those that a damaged file lost."""

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.oldcalendar import OldCalendar
from lakeupsert.queue import Message
from lakeupsert.rows.checksums import MAGIC
from lakeupsert.rows.packs import open_pack
from lakeupsert.storage import LocalStore
from lakeupsert.table import metadata
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import Manifest
from tests.harness.faults import FAULTS, Fault, Killed, Points
from tests.harness.lake import DAY, Lake, made_once, row
from tests.harness.model import Row
from tests.harness.processes import LakeProcess, Strike

Source = Literal["stored", "landing"]
both = pytest.mark.parametrize("source", ["stored", "landing"])
FIRST = "d=2020-01-01"


@made_once
def lake(folder: Path) -> Lake:
    """Three published nights in two partitions: a tie, a deletion, a late record, and rows that are refused."""
    lake = Lake(folder)
    lake.land(
        "1.jsonl", [row("a", 0, 5, 1), row("b", 0, 5, 1), row("a", 1, 5, 1)], refused=[{**row("x", 0, 1), "v": "?"}]
    )
    lake.run()
    lake.land("2.jsonl", [row("b", 0, 5, 2), row("a", 0, 7, 2, op="D")])
    lake.land("3.jsonl", [row("b", 0, 5, 3), row("c", 1, 1, 3)])
    lake.run()
    lake.land("4.jsonl", [row("a", 0, 6, 4), row("c", 1, 1, 4)])
    lake.run()
    return lake


def reprocess(lake: Lake, source: Source, **options: Any) -> Any:
    return lake.table.reprocess(source=source, host="local", **options)


def heads(lake: Lake) -> dict[str, Link[Manifest]]:
    partitions = {p for _, entry in lake.entries() for p in entry.touched}
    found = {p: lake.table.objects.partition(p).head() for p in partitions}
    return {p: head for p, head in found.items() if head is not None}


def files_of(head: Link[Manifest]) -> set[str]:
    return {f.name for b in head.body.buckets for f in b.base}


def shows_the_heads(lake: Lake) -> None:
    shown = lake.table.snapshots()[0].body.partitions
    assert {p: s.version for p, s in shown.items()} == {p: head.number for p, head in heads(lake).items()}


# ---------------------------------------------------------------- what it does


@both
def test_rows_stay_and_files_are_new(lake: Lake, source: Source) -> None:
    rows, before = lake.rows(), heads(lake)
    quarantined = {f for f in lake.stored_files() if "quarantine" in f}
    done = reprocess(lake, source)
    after = heads(lake)
    assert lake.rows() == rows == lake.expected(3)
    assert lake.rows(2) == rows, "the snapshot before still reads what it did"
    for partition, head in after.items():
        assert head.number == before[partition].number + 1
        assert head.body.merged == before[partition].body.merged
        assert not files_of(head) & files_of(before[partition])
        assert head.body.buckets[0].counters == before[partition].body.buckets[0].counters
    assert (done.publish.snapshot, done.publish.batch, done.publish.partitions_changed) == (3, 3, 2)
    shows_the_heads(lake)
    assert {f for f in lake.stored_files() if "quarantine" in f} == quarantined
    reprocess(lake, source)
    lake.finish_and_check()
    assert lake.rows() == rows


@pytest.mark.long
@both
def test_dry_run_writes_nothing(lake: Lake, source: Source) -> None:
    before = sorted(p for p in lake.root.rglob("*") if "queue" not in p.name)
    plan = reprocess(lake, source, dry=True).plan
    assert sorted(plan.heads) == sorted(heads(lake))
    assert plan.batches == ((1, 2, 3) if source == "landing" else ())
    landed = sorted((lake.root / "landing").iterdir())
    files = (
        landed
        if source == "landing"
        else [lake.root / "processed" / f for h in heads(lake).values() for f in files_of(h)]
    )
    assert plan.files == len(files)
    inline = sum(f.bytes for h in heads(lake).values() for f in h.body.buckets[0].tombstones)
    assert plan.bytes == sum(f.stat().st_size for f in files) + (inline if source == "stored" else 0)
    assert sorted(p for p in lake.root.rglob("*") if "queue" not in p.name) == before


@pytest.mark.long
@both
def test_selected_partitions_alone_are_written(lake: Lake, source: Source) -> None:
    before = heads(lake)
    reprocess(lake, source, selected=FIRST.__eq__)
    written = [p for p, head in heads(lake).items() if head.number > before[p].number]
    assert written == [FIRST]
    lake.finish_and_check()


def test_landing_needs_neither_stored_nor_appended_files_and_reads_what_was_asked_for(lake: Lake) -> None:
    rows = lake.rows()
    data = lake.root / "processed/_lakeupsert/data"
    for file in (*data.glob("*.pack"), *(lake.root / "processed" / FIRST).iterdir()):
        file.unlink()
    work = reprocess(lake, "landing", selected=FIRST.__eq__).plan.work
    assert lake.rows() == rows
    made = lake.opened.history.work(work).partitions
    assert list(made) == [FIRST]
    sizes = [int(open_pack(LocalStore(data), pack.name).bytes[-1]) - len(MAGIC) for pack in data.glob("*.pack")]
    assert sum(t.bytes for t in made[FIRST].batches.values()) == sum(sizes)
    lake.land("5.jsonl", [row("a", 0, 6, 5), row("d", 0, 6, 5)])
    lake.run()
    assert lake.rows() == lake.expected(4)


@both
def test_a_message_that_comes_twice_is_done_once(lake: Lake, source: Source) -> None:
    work = reprocess(lake, source).plan.work
    numbers = {p: head.number for p, head in heads(lake).items()}
    lake.table.vacuum(dry=False)
    assert not (lake.root / "processed" / str(work)).exists()
    lake.reopen()
    lake.opened.resources.queue.send([Message("t", FIRST, 3, work), Message("t", FIRST, 0, work)])
    assert {(r.status, r.version) for r in lake.table.dedupe()} == {("clean", numbers[FIRST])}
    assert {p: head.number for p, head in heads(lake).items()} == numbers


@pytest.mark.long
def test_a_dead_letter_of_a_reprocess_is_given_back_until_it_is_done(lake: Lake) -> None:
    queue, base = lake.opened.resources.queue, next(iter(files_of(heads(lake)[FIRST])))
    aside = lake.root / "aside"
    shutil.move(lake.root / "processed" / base, aside)
    assert reprocess(lake, "stored").left == (FIRST,)
    assert heads(lake)[FIRST].body.failed is None, "nothing of a batch failed"
    shutil.move(aside, lake.root / "processed" / base)
    assert lake.table.redrive().redriven == queue.stats().visible > 0
    lake.table.dedupe()
    assert not files_of(heads(lake)[FIRST]) & {base}


@pytest.mark.long
@both
def test_a_failed_partition_keeps_its_batch_and_its_mark(lake: Lake, source: Source) -> None:
    lake.land("5.jsonl", [row("a", 0, 9, 5)])
    appended = lake.table.append(host="local")
    assert appended is not None
    pack = lake.root / "processed" / appended.entry.touched[FIRST].files[0].name
    content = pack.read_bytes()
    pack.write_bytes(b"damaged")
    lake.run()
    assert heads(lake)[FIRST].body.failed is not None
    done = reprocess(lake, source, selected=FIRST.__eq__)
    head = heads(lake)[FIRST]
    assert (head.body.merged, head.body.failed is not None, done.left) == (3, True, ())
    assert done.publish.partitions_changed == 1
    shows_the_heads(lake)
    pack.write_bytes(content)
    lake.finish_and_check()


@pytest.mark.long
def test_landing_rows_keep_their_first_receipt_stamps_and_refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the stamp of today the table's order would be another, and the row of the future would be taken."""
    stamped = Lake(folder / "stamped", order_by=("record_timestamp",))
    for night in (1, 2):
        stamped.land(f"{night}.jsonl", [row(k, 0, night, night) for k in "ab"[:night]])
        stamped.run()
    stamps = [r["record_timestamp"] for r in stamped.rows()]
    reprocess(stamped, "landing")
    assert [r["record_timestamp"] for r in stamped.rows()] == stamps

    class TwoYearsAgo(clock.Source):
        def now(self) -> Any:
            return super().now() - timedelta(days=730)

    lake = Lake(folder / "future")
    soon = (clock.now() - timedelta(days=365)).replace(tzinfo=None)
    lake.land("1.jsonl", [row("a", 0, 1, 1)], refused=[{**row("a", 0, 1, 2), "ts": soon}])
    monkeypatch.setattr(LocalStore, "clock_ahead", lambda self: None)  # the disk's clock does not go with it
    with clock.use(TwoYearsAgo()):
        lake.run()
    assert lake.entries()[1][1].quarantined == {"future_order": 1}
    reprocess(lake, "landing")
    lake.finish_and_check()
    assert [r["v"] for r in lake.rows()] == [1]


def test_landing_files_are_read_by_spark_to_the_same_end(folder: Path, spark: Any) -> None:
    lake = Lake(folder / "lake")
    for night in range(3):
        rows = [row(k, day, (night * 7 + day) % 3, night) for day in range(3) for k in "abc"]
        lake.land(f"{night}.jsonl", rows)
        schema = pa.schema(
            [("k", "string"), ("l", pa.int32()), ("d", pa.date32()), ("ts", pa.timestamp("us")), ("v", "int64")]
        )
        pq.write_table(
            pa.Table.from_pylist([{**r, "op": None} for r in rows], schema), lake.root / f"landing/{night}.parquet"
        )
        lake.landed[f"{night}.parquet"] = rows
        lake.run()
    lake.table.reprocess(source="landing", host="spark")
    shows_the_heads(lake)
    lake.finish_and_check()
    lake.table.reprocess(source="stored", engine="spark")
    lake.finish_and_check()


# ---------------------------------------------------------------- sources


@pytest.mark.long
def test_a_damaged_base_file_is_mended_from_landing(lake: Lake) -> None:
    rows = lake.rows()
    damaged = lake.root / "processed" / next(iter(files_of(heads(lake)[FIRST])))
    damaged.write_bytes(b"damaged")
    with pytest.raises(Exception, match="can't be read") as read:
        lake.rows()
    assert "`lakeupsert reprocess --partition d=2020-01-01 --source landing`" in read.value.next  # type: ignore[attr-defined]
    reprocess(lake, "landing", selected=FIRST.__eq__)
    assert lake.rows() == rows
    lake.land("5.jsonl", [row("a", 0, 9, 5)])
    lake.run()
    assert lake.rows() == lake.expected(4)


@pytest.mark.parametrize("on_failed", ["hold", "skip"])
def test_a_partition_whose_manifest_is_gone_does_not_lag_for_it(folder: Path, on_failed: str) -> None:
    """A rebuild that was stopped leaves it as it is, and it lacks no batch."""
    lake = Lake(folder / "lake", on_failed_partition=on_failed)
    lake.land("1.jsonl", [row("a", 0, 1), row("b", 1, 1)])
    lake.run()
    objects, stop = lake.opened.history.objects, threading.Event()
    (lake.root / "processed" / objects.partition(FIRST).name(0)).unlink()
    stop.set()
    stopped = reprocess(lake, "landing", stop=stop)
    assert (len(stopped.left), stopped.publish.snapshot, stopped.publish.lagging) == (2, 0, ())
    reprocess(lake, "landing")
    lake.finish_and_check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda file: file.unlink(), "source-gone"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b'"v": 2', b'"v": 3')), "source-changed"),
    ],
)
def test_a_source_that_is_not_what_was_taken_is_refused_before_anything_is_written(
    lake: Lake, spoil: Callable[[Path], Any], code: str
) -> None:
    spoil(lake.root / "landing/2.jsonl")
    before, rows = lake.stored_files(), lake.rows()
    with pytest.raises(RefusedError):
        reprocess(lake, "landing", dry=True)
    with pytest.raises(RefusedError) as refused:
        reprocess(lake, "landing")
    assert refused.value.code == code
    assert "2.jsonl" in refused.value.message
    assert "batch 2" in refused.value.message
    assert "--source stored" in refused.value.next
    assert (lake.stored_files(), lake.rows()) == (before, rows)
    assert not list((lake.root / "processed/_lakeupsert").glob("units/*"))
    reprocess(lake, "stored")
    assert lake.rows() == rows


def test_a_source_that_was_touched_and_holds_the_same_bytes_is_taken(lake: Lake) -> None:
    file = lake.root / "landing/2.jsonl"
    os.utime(file, ns=(1, 1))
    reprocess(lake, "landing")
    lake.finish_and_check()


def test_a_file_that_changes_while_it_is_read_is_refused_and_leaves_nothing(lake: Lake) -> None:
    class Spoil(Points):
        def at(self, name: str, commit: bool = False) -> Any:
            if name == "put _lakeupsert/data" or (name.startswith("put") and "appended" in name):
                (lake.root / "landing/4.jsonl").write_text("")
            return super().at(name, commit)

    before = lake.stored_files()
    lake.points = Spoil()
    lake.reopen()
    with pytest.raises(RefusedError) as refused:
        reprocess(lake, "landing")
    assert refused.value.code == "source-changed"
    assert "batch 3" in refused.value.message
    assert lake.stored_files() == before


@pytest.mark.parametrize(("before", "after"), [("auto", "jsonl"), ("jsonl", "parquet"), ("csv", "delimited")])
def test_batch_is_read_again_as_it_was_whatever_is_configured_since(folder: Path, before: str, after: str) -> None:
    lake = Lake(folder / "lake", format=before)
    if before == "jsonl":
        lake.land("1.csv", [row("a", 0, 1)])
    else:
        (lake.root / "landing/1.csv").write_text("k,l,d,ts,v,op\na,0,2020-01-01,2020-01-01T00:00:00,1,\n")
    lake.run()
    other = Lake(lake.root, format=after)
    rows = other.rows()
    reprocess(other, "landing")
    other.run()
    assert other.rows() == rows
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("before", "after", "told"), [("auto", "jsonl", "give 0 rows"), ("jsonl", "parquet", "can't be read")]
)
def test_landing_that_is_read_in_another_way_than_then_is_refused(
    folder: Path, before: str, after: str, told: str
) -> None:
    lake = Lake(folder / "lake", format=before)
    if before == "auto":
        (lake.root / "landing/1.csv").write_text("k,l,d,ts,v,op\na,0,2020-01-01,2020-01-01T00:00:00,1,\n")
    else:
        lake.land("1.csv", [row("a", 0, 1)])
    lake.run()
    read_as(lake, after)
    other = Lake(lake.root, format=before)
    stored = other.stored_files()
    with pytest.raises(RefusedError) as refused:
        reprocess(other, "landing")
    assert refused.value.code == "source-differs"
    assert told in refused.value.message
    assert other.stored_files() == stored


@pytest.mark.parametrize("column", ["v", "k", "ts"])
@pytest.mark.few(2)
def test_file_whose_values_are_read_in_another_way_than_then(
    folder: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows with other values: other keys and orders are refused, other columns are warned of, in figures."""
    days = [date(1500, 1, 1), date(2020, 1, 1), date(2021, 1, 1)]
    other = [date(2000, 1, n) for n in (1, 2, 3)]
    columns = {name: pa.array(days if name == column else other, pa.date32()) for name in ("k", "ts", "v")}
    footer = {"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyDateTime": ""}
    rows = pa.table({**columns, "d": ["a", "a", "b"]}).replace_schema_metadata(footer)
    settings = {"key": ("k",), "order_by": ("ts",), "partition_by": ("d",), "delete": None, "schema": {}}
    lake = Lake(folder / "lake", **settings)
    pq.write_table(rows, lake.root / "landing/1.parquet")
    with monkeypatch.context() as then:
        then.setattr(OldCalendar, "of", classmethod(lambda cls, keys: cls()))
        lake.run()
    before = lake.table.to_arrow().read_all()
    if column == "v":
        for warns in (True, False):
            done = lake.table.reprocess(source="landing", host="local", workers=1)
            assert [("1 key" in one, "d=a" in one) for one in done.warnings] == [(True, True)] * warns
        after = lake.table.to_arrow().read_all()
        assert (before != after, after.num_rows) == (True, 3)
        shown = {n: lake.table.to_arrow(n).read_all() for n in (0, 1)}
        assert (shown[0], shown[1]) == (before, after)
        for to, rewritten in (
            (0, ("d=a",)),
            (0, ()),
            (1, ("d=a",)),
            (1, ()),
            (0, ("d=a",)),
        ):  # a restore is taken back, too
            plan = lake.table.restore(to, dry=False)
            assert (plan.withdrawn, plan.rewritten, plan.entry is None) == ({}, rewritten, not rewritten)
            lake.run()
            assert lake.table.to_arrow().read_all() == shown[to]
    else:
        with pytest.raises(RefusedError, match="d=a") as refused:
            lake.table.reprocess(source="landing", host="local", workers=1)
        assert refused.value.code == "source-differs"
        assert lake.table.to_arrow().read_all() == before


def read_as(lake: Lake, format_: str) -> None:
    """As if another version of lakeupsert had read the files of every entry as this one reads this format."""
    for path in (lake.root / "processed/_lakeupsert/ledger").glob("v*.json"):
        document = json.loads(path.read_bytes())
        del document["digest"]
        if "reading" in document["body"]:
            document["body"]["reading"]["format"] = format_
        path.write_bytes(metadata.encode(document))


def test_an_adopted_file_that_is_gone_is_refused(folder: Path) -> None:
    lake = adopted(folder)
    next((lake.root / "processed" / FIRST).glob("*.parquet")).unlink()
    with pytest.raises(RefusedError) as refused:
        reprocess(lake, "landing")
    assert refused.value.code == "source-gone"
    assert "adopted" in refused.value.message


# ---------------------------------------------------------------- beside nights


def adopted(folder: Path) -> Lake:
    """A lake that begins with Parquet files of others: in the first partition a key twice, with a tie in two files."""
    lake = Lake(folder / "lake")
    lake.lay("a.parquet", [row("a", 0, 1, 1), row("a", 0, 2, 2), row("b", 0, 1, 3)])
    lake.lay("b.parquet", [row("b", 0, 1, 4), row("c", 1, 1, 5)])
    lake.table.adopt()
    return lake


@both
def test_adopted_files_are_settled_by_it(folder: Path, source: Source) -> None:
    lake = adopted(folder)
    assert len(lake.rows()) == 5
    reprocess(lake, source)
    assert [(r["k"], r["v"]) for r in lake.rows()] == [("a", 2), ("b", 4), ("c", 5)]
    bucket = heads(lake)[FIRST].body.buckets[0]
    assert (bucket.settled, bucket.counters.superseded) == (True, 2)


@pytest.mark.long
@pytest.mark.few(2)
@both
@pytest.mark.parametrize("seed", range(6))
def test_after_random_nights_no_row_changes(folder: Path, source: Source, seed: int) -> None:
    chance = random.Random(seed)
    lake = adopted(folder) if seed % 2 else Lake(folder / "lake")
    for night in range(8):
        for file in range(chance.randint(1, 2)):
            rows: list[Row] = [
                row(
                    chance.choice("abc"),
                    chance.randrange(3),
                    chance.randrange(4),
                    chance.randrange(99),
                    op=chance.choice([None, None, "D"]),
                )
                for _ in range(chance.randint(1, 6))
            ]
            lake.land(
                f"{chance.randrange(9)}-{night}-{file}.jsonl", rows
            )  # a listing is in another order than the nights
        lake.run()
        if chance.random() < 0.3:
            lake.table.restore(chance.choice(lake.table.snapshots()).number, dry=False)
            if chance.random() < 0.5:
                lake.table.append(host="local", again=True)
            lake.run()
    lake.check()
    reprocess(lake, source)
    assert lake.rows() == lake.expected(lake.entries()[-1][0])
    shows_the_heads(lake)
    lake.check()
    reprocess(lake, source)
    lake.land("last.jsonl", [row("a", 0, 2, 100), row("b", 2, 0, 100)])
    lake.run()
    assert lake.rows() == lake.expected(lake.entries()[-1][0])


@both
@pytest.mark.long
def test_thirty_dates_in_the_middle_of_a_night_with_four_workers(folder: Path, source: Source) -> None:
    """Workers are about to commit when it begins, and go on when its messages are there."""
    lake = Lake(folder / "lake")
    for night in (1, 2, 3):
        lake.land(f"{night}.jsonl", [row(k, day, night % 2, night) for day in range(40) for k in "abc"[night % 2 :]])
        lake.table.append(host="local") if night == 3 else lake.run()
    before = heads(lake)
    selected = {f"d={DAY + timedelta(days=day)}" for day in range(5, 35)}
    with ExitStack() as stack:
        workers = [stack.enter_context(LakeProcess(lake)) for _ in range(4)]
        for worker in workers:
            worker.begin("dedupe", strike=Strike("create _lakeupsert/partitions", number=2, act="hold"))
            worker.wait_held()
        held = list(workers)

        def go_on(text: str) -> None:
            while held and text.startswith("writing partitions"):
                held.pop().go()

        done = reprocess(lake, source, selected=selected.__contains__, progress=go_on)
        for worker in workers:
            worker.end()
    assert done.left == ()
    for partition, head in heads(lake).items():
        made = head.number - before[partition].number
        assert made == 1 + (partition in selected), f"{partition}: {made} versions"
        assert (head.body.reprocessed is not None) == (partition in selected)
    lake.table.publish()
    shows_the_heads(lake)
    lake.finish_and_check()


@both
def test_a_merge_that_wins_is_not_overwritten(lake: Lake, source: Source) -> None:
    """It comes between reading and commit; with source landing its rows are in none of the files that were made."""
    beside = Lake(lake.root)
    beside.landed = lake.landed

    class NightBetween(Points):
        came = False

        def at(self, name: str, commit: bool = False) -> Any:
            if not self.came and name.startswith(f"create _lakeupsert/partitions/{FIRST}"):
                self.came = True
                beside.land("5.jsonl", [row("b", 0, 4, 5), row("d", 0, 1, 5)])
                beside.run()
            return super().at(name, commit)

    lake.points = NightBetween()
    lake.reopen()
    reprocess(lake, source)
    head = heads(lake)[FIRST]
    assert (head.body.merged, head.body.reprocessed is not None) == (4, True)
    shows_the_heads(lake)
    lake.finish_and_check()


@pytest.mark.long
@both
def test_a_restore_that_comes_first_is_kept(lake: Lake, source: Source) -> None:
    """The rebuild leaves out what is withdrawn at the `merged` that it keeps, and no more than that."""
    lake.table.restore(1, dry=False)
    reprocess(lake, source, selected=FIRST.__eq__)  # merges the restore on its way, as any worker does
    lake.finish_and_check()
    rows = lake.rows()
    assert rows == lake.expected(4) != lake.expected(3)
    reprocess(lake, source)
    lake.finish_and_check()
    assert lake.rows() == rows


@pytest.mark.long
def test_what_a_newer_entry_withdraws_is_still_rebuilt(lake: Lake) -> None:
    """The partition has not merged the restore yet, so readers of its `merged` see what the restore withdraws."""
    before = lake.rows()
    plan = reprocess(lake, "landing", dry=True).plan
    lake.table.restore(0, dry=False)
    with_restore = reprocess(lake, "landing", dry=True).plan
    assert with_restore.batches == plan.batches
    queue = lake.opened.resources.queue
    for lease in queue.receive(10, 1000):
        queue.ack(lease)  # the restore's messages are lost, so nobody merges it yet
    reprocess(lake, "landing")
    assert lake.rows() == before
    shows_the_heads(lake)
    lake.finish_and_check()


@pytest.mark.long
def test_a_restore_between_plan_and_work_brings_back_what_was_not_read(lake: Lake) -> None:
    lake.table.restore(0, dry=False)
    lake.run()
    lake.points = points = Points()
    lake.reopen()
    points.arm(0, Fault.KILL_BEFORE, "queue receive")
    with pytest.raises(Killed):
        reprocess(lake, "landing")
    points.disarm()
    lake.reopen()
    lake.table.restore(2, dry=False)
    results = lake.table.dedupe()
    failed = [r for r in results if r.status == "failed"]
    assert {r.partition for r in failed} <= set(heads(lake))
    assert all("run `lakeupsert reprocess` again" in (r.error or "") for r in failed)
    lake.finish_and_check()
    reprocess(lake, "landing")
    lake.finish_and_check()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("source", ["stored", "landing"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.long
def test_struck_anywhere_a_rerun_is_exact(lake: Lake, source: Source, fault: Fault) -> None:
    lake.land("5.jsonl", [row("b", 0, 8, 5), row("e", 2, 1, 5)])
    lake.table.append(host="local")

    def check(struck: Lake) -> None:
        struck.check()
        reprocess(struck, source)
        struck.finish_and_check()
        shows_the_heads(struck)

    lake.strike_every_call(fault, lambda struck: reprocess(struck, source), check)


# ---------------------------------------------------------------- the command


def test_the_command(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake.root)
    lake.configure()
    lake.table.close()
    rows = lake.rows()

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(main, ["reprocess", "--host", "local", *arguments, "--json"])
        assert done.exit_code == code, done.output
        return msgspec.json.decode(done.stdout)

    dry = run("--from", "2020-01-01", "--to", "2020-01-01", "--source", "landing", "--dry-run")["result"]
    assert (dry["partitions"], dry["batches"], dry["files"], dry["publish"]) == ([FIRST], [1, 2, 3], 4, None)
    done = run("--from", "2020-01-01", "--to", "2020-01-01", "--source", "landing")["result"]
    assert [(p["partition"], p["status"], p["merged"]) for p in done["dedupe"]["partitions"]] == [(FIRST, "merged", 3)]
    assert (done["publish"]["partitions_changed"], done["left"]) == (1, [])
    assert len(run("--from", "2020-01-01")["result"]["partitions"]) == 2
    assert run("--partition", "1999-01-01")["result"]["partitions"] == []
    assert run(code=2)["error"]["code"] == "usage"
    told = CliRunner().invoke(main, ["reprocess", "--host", "local", "--partition", FIRST, "--source", "landing"])
    assert (told.exit_code, "of 3 batches" in told.stdout, "1 partition changed" in told.stdout) == (0, True, True)
    (lake.root / "landing/2.jsonl").unlink()
    refused = run("--partition", FIRST, "--source", "landing", code=1)["error"]
    assert (refused["code"], refused["data_changed"]) == ("source-gone", False)
    lake.reopen()
    assert lake.rows() == rows


@pytest.mark.long
def test_the_command_says_which_partitions_wait_for_others(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is merged already and written anew with the new batch in it; another one is not merged yet."""
    lake.land("5.jsonl", [row("a", 0, 8, 5), row("c", 1, 8, 5)])
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    leases = {lease.message.partition: lease for lease in queue.receive(10, 1000)}
    queue.release(leases[FIRST])
    lake.table.dedupe()
    monkeypatch.chdir(lake.root)
    lake.configure()
    done = CliRunner().invoke(main, ["reprocess", "--partition", FIRST, "--json"])
    answer = msgspec.json.decode(done.stdout)
    assert (done.exit_code, answer["error"]["code"], answer["result"]["unseen"]) == (1, "not-shown", [FIRST])
    assert "`lakeupsert run`" in answer["error"]["next"]
    lake.finish_and_check()
    shows_the_heads(lake)
