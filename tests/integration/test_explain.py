"""`explain`: what it tells of a key is what readers see, and the order that it tells is the model's."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.operations.explain.explain import ExplainedPartition, Version
from lakeupsert.rows import datafiles, filewriter
from lakeupsert.table.ledger import LedgerEntry, Touched
from lakeupsert.table.manifest import BucketEntry, Counters, DataFile, FailedMark, Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from tests.harness.lake import DAY, Lake, row
from tests.harness.model import rank
from tests.harness.specs import create

FIRST = "d=2020-01-01"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def explained(lake: Lake, k: str = "a", line: int = 0, partition: str = FIRST) -> ExplainedPartition:
    [found] = lake.table.explain({"k": k, "l": line}, partition).partitions
    return found


def told(found: ExplainedPartition) -> list[tuple[str, int | None, str]]:
    return [(v.source, v.batch, v.outcome) for v in found.versions]


def nights(lake: Lake, *rows: Sequence[Any]) -> None:
    """A published night for each group of rows."""
    for each in rows:
        append(lake, each)
        lake.run()


def append(lake: Lake, rows: Sequence[Any]) -> None:
    lake.land(f"{len(lake.landed)}.jsonl", rows)
    lake.table.append(host="local")


# ---------------------------------------------------------------- every key, against readers and the model


@pytest.mark.parametrize("seed", range(6))
def test_versions_are_the_models_and_the_shown_row_is_the_readers(lake: Lake, seed: int) -> None:
    """Ties, late rows and deletes in several files and batches; the last batches are unpublished and unmerged."""
    chance = random.Random(seed)
    for number in range(6):
        for file in range(2):
            rows = [
                row(chance.choice("abc"), chance.randrange(2), chance.randrange(4), chance.randrange(3), op=op)
                for op in chance.choices(["I", "D"], [3, 1], k=6)
            ]
            lake.land(f"{number}-{file}.jsonl", rows)
        lake.table.append(host="local")
        if number < 5:
            lake.table.dedupe()
        if number < 4:
            lake.table.publish()
    seen = {(r["k"], r["d"]): r for r in lake.rows()}
    for k in "abc":
        for found in lake.table.explain({"k": k, "l": 0}).partitions:
            day = next(DAY.replace(day=n) for n in (1, 2) if found.partition == f"d=2020-01-0{n}")
            assert in_short(found.shown) == in_short(seen.get((k, day)))
            appended = [(v.batch, v.file, v.delete) for v in found.versions if v.source == "appended"]
            assert appended == models(lake, k, day)


def in_short(row: Mapping[str, Any] | None) -> dict[str, str] | None:
    """As text, timestamps to the second."""
    return row and {column: str(value)[:19] for column, value in row.items()}


def models(lake: Lake, k: str, day: Any) -> list[tuple[int, str, bool]]:
    """Batch, landing file and delete of the best row of each batch, greatest rank first."""
    best: dict[int, Any] = {}
    for number, entry in lake.entries():
        for at, file in enumerate(entry.files):
            for place, r in enumerate(lake.landed[file.path]):
                if (r["k"], r["d"]) == (k, day):
                    ranked = rank(r, lake.rules, number, at, place), file.path, r["op"] == "D"
                    best[number] = max(best.get(number, ranked), ranked, key=lambda x: x[0])
    by_rank = sorted(best.items(), key=lambda item: item[1][0], reverse=True)
    return [(number, path, deletes) for number, (_, path, deletes) in by_rank]


# ---------------------------------------------------------------- what became of each version, and why


def test_greater_order_wins_however_late_the_other_comes(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)], [row("a", 0, 3, 2)])
    found = explained(lake)
    assert told(found) == [("appended", 1, "shown"), ("base", 1, "shown"), ("appended", 2, "superseded")]
    assert "Batch 1's row (0.jsonl) is shown: greater ts, 2020-01-01 00:00:05" in found.why
    assert "against 2020-01-01 00:00:03" in found.why
    assert (found.version, found.since) == (1, 0)


def test_equal_order_is_won_by_the_later_batch(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)], [row("b", 0, 9)], [row("a", 0, 5, 2)], [row("b", 0, 10)])
    found = explained(lake)
    assert told(found) == [("appended", 3, "shown"), ("base", 3, "shown"), ("appended", 1, "superseded")]
    assert found.why == "Batch 3's row (2.jsonl) is shown: equal ts and later batch than batch 1's row (0.jsonl)."
    assert found.shown
    assert (found.shown["v"], found.since) == (2, 2)


def test_null_loses_against_any_order(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)], [row("a", 0, None, 2)])
    assert "against null of batch 2's row" in explained(lake).why


def test_only_version_says_so(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)])
    found = explained(lake)
    assert found.why == "Batch 1's row (0.jsonl) is shown: it is the only version."
    [appended, base] = found.versions
    assert (appended.file, appended.place, appended.delete) == ("0.jsonl", 0, False)
    assert appended.object.startswith("_lakeupsert/data/appended-")
    assert (lake.root / "processed" / base.object).is_file()


@pytest.mark.parametrize("many", [1, 500], ids=["in the manifest", "in a file"])
def test_deleted_key_tells_its_tombstone(lake: Lake, many: int) -> None:
    lots = [row(f"{n:040d}", 0, 1) for n in range(many)]
    nights(lake, [row("a", 0, 5), *lots], [row("a", 0, 6, op="D"), *({**r, "ts": r["ts"], "op": "D"} for r in lots)])
    found = explained(lake)
    assert told(found) == [("appended", 2, "deletes"), ("tombstone", 2, "deletes"), ("appended", 1, "superseded")]
    assert found.shown is None
    assert found.why.startswith("Deleted by batch 2's delete (1.jsonl): greater ts")
    assert ("tombstones-" in found.versions[1].object) is (many > 1)


def test_delete_that_was_forgotten_when_an_extract_had_the_key_was_not_taken_back(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s")
    nights(lake, [row("a", 0, 5, op="D")], [row("b", 0, 2)])
    lake.land("full.jsonl", [row("a", 0, 3), row("b", 0, 3)])
    lake.run(full="table")
    found = explained(lake)
    assert told(found) == [("appended", 1, "forgotten"), ("appended", 3, "shown"), ("base", 3, "shown")]
    assert found.why == "Batch 3's row (full.jsonl) is shown: it is the only version that counts."


def test_row_that_a_forgotten_delete_had_beaten_was_not_taken_back(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s")
    nights(lake, [row("a", 0, 4)], [row("a", 0, 5, op="D")], [row("b", 0, 2)])
    lake.land("full.jsonl", [row("a", 0, 3), row("b", 0, 3)])
    lake.run(full="table")
    assert told(explained(lake))[:2] == [("appended", 2, "forgotten"), ("appended", 1, "superseded")]


@pytest.mark.long
def test_delete_that_does_not_count_is_none_that_was_forgotten(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s")
    nights(lake, [row("a", 0, 5, op="D"), row("b", 0, 1)], [row("b", 0, 2), row("c", 0, 9, op="D")], [row("b", 0, 3)])
    nights(lake, [row("a", 0, 7, op="D")], [row("a", 0, 8, op="D"), row("a", 0, 20, op="D")])
    lake.table.restore(lake.table.snapshots()[1].number, dry=False)
    lake.run()
    found = explained(lake)
    assert told(found) == [("appended", 5, "withdrawn"), ("appended", 4, "refused"), ("appended", 1, "forgotten")]
    assert found.why.startswith("Deleted by batch 1's delete")


@pytest.mark.long
def test_delete_after_one_that_an_extract_found_forgotten_is_the_one_that_counts(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s")
    nights(lake, [row("a", 0, 5, op="D"), row("b", 0, 1)], [row("b", 0, 2)])
    lake.land("full.jsonl", [row("a", 0, 3), row("b", 0, 9)])
    lake.run(full="table")
    nights(lake, [row("a", 0, 4, op="D")])
    assert explained(lake).why.startswith("Deleted by batch 4's delete (3.jsonl): greater ts")
    nights(lake, [row("b", 0, 10)])
    found = explained(lake)
    assert [t[1:] for t in told(found)] == [(1, "forgotten"), (4, "forgotten"), (3, "superseded")]
    assert found.why.startswith("Deleted by batch 4's delete (3.jsonl), which the table has forgotten")
    nights(lake, [row("a", 0, 7)], [row("a", 0, 12)])
    found = explained(lake)
    assert [t[1:] for t in told(found)][:4] == [(7, "shown"), (7, "shown"), (6, "refused"), (1, "superseded")]
    assert "batch 6" not in found.why


def test_extract_that_was_taken_back_deletes_nothing(lake: Lake) -> None:
    nights(lake, [row("a", 0, 1), row("b", 0, 1)], [row("a", 0, 2)])
    lake.land("full.jsonl", [row("b", 0, 9)])
    lake.run(full="table", may_shrink=True)
    assert {t[2] for t in told(explained(lake))} == {"lacking"}
    lake.table.restore(lake.table.snapshots()[1].number, dry=False)
    lake.run()
    assert [t[2] for t in told(explained(lake))] == ["shown", "shown", "superseded"]


def test_stored_delete_is_not_the_equal_one_that_was_forgotten(tmp_path: Path) -> None:
    """By content the forgotten one is the greater; a tombstone has key and order alone."""
    lake = Lake(tmp_path, tombstone_retention="0s", ties="content")
    nights(lake, [row("a", 0, 2, 1, op="D"), row("b", 0, 1)], [row("b", 0, 2)])
    lake.land("full.jsonl", [row("a", 0, 2, 0, op="D"), row("b", 0, 3)])
    lake.run(full="table")
    found = explained(lake)
    assert {t[1:] for t in told(found)} == {(1, "forgotten"), (3, "deletes")}
    assert found.why.startswith("Deleted by batch 3's delete")


def test_row_that_was_taken_back_is_lacking_in_no_later_extract(lake: Lake) -> None:
    nights(lake, [row("b", 0, 1)], [row("a", 0, 2)])
    lake.table.restore(lake.table.snapshots()[1].number, dry=False)
    lake.run()
    lake.land("full.jsonl", [row("b", 0, 9)])
    lake.run(full="table")
    assert [t[2] for t in told(explained(lake))] == ["withdrawn"]


def test_key_of_which_all_was_refused_says_where_it_is(lake: Lake) -> None:
    nights(lake, [row("b", 0, 1)])
    lake.land("full.jsonl", [row("b", 0, 9)])
    lake.run(full="table")
    nights(lake, [row("a", 0, 2)])
    found = explained(lake)
    assert [t[2] for t in told(found)] == ["refused"]
    assert found.why.startswith("All records are below the floor of forgotten deletes or of a full extract")


def test_batch_that_is_not_merged_is_pending(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)])
    append(lake, [row("a", 0, 6, 2)])
    append(lake, [row("a", 0, 1, 3)])
    found = explained(lake)
    assert told(found) == [
        ("appended", 2, "pending"),
        ("appended", 1, "shown"),
        ("base", 1, "shown"),
        ("appended", 3, "pending"),
    ]
    assert found.why.startswith("Batch 2's row (1.jsonl) will win: greater ts")
    assert found.why.endswith("It is not merged yet, and readers still see batch 1's row (0.jsonl).")
    assert found.shown
    assert found.shown["v"] == 1


def test_key_of_no_snapshot_yet_is_pending_and_then_unpublished(lake: Lake) -> None:
    append(lake, [row("a", 0, 5)])
    assert told(explained(lake)) == [("appended", 1, "pending")]
    lake.table.dedupe()
    found = explained(lake)
    assert told(found) == [("appended", 1, "won, not published"), ("base", 1, "won, not published")]
    assert found.why.endswith("It is not published yet, and readers still see no row.")
    assert (found.shown, found.version, found.since) == (None, None, None)


def test_merged_row_is_unpublished_while_readers_see_the_one_before(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1), row("b", 0, 5)])
    append(lake, [row("a", 0, 6, op="D")])
    lake.table.dedupe()
    found = explained(lake)
    assert told(found) == [
        ("appended", 2, "won, not published"),
        ("tombstone", 2, "won, not published"),
        ("appended", 1, "shown"),
        ("base", 1, "shown"),
    ]
    assert found.why.endswith("It is not published yet, and readers still see batch 1's row (0.jsonl).")
    other = explained(lake, "b")
    assert told(other) == [("appended", 1, "shown"), ("base", 1, "shown")]
    assert other.versions[1].object in {f.name for f in lake.table.files()}, (
        "the same row, in the file that readers open"
    )


def test_record_that_comes_again_takes_over_when_it_is_merged(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)])
    append(lake, [row("a", 0, 5, 1)])
    assert told(explained(lake)) == [("appended", 2, "pending"), ("appended", 1, "shown"), ("base", 1, "shown")]
    lake.run()
    assert told(explained(lake)) == [("appended", 2, "shown"), ("base", 2, "shown"), ("appended", 1, "superseded")]


def test_partition_that_fails_tells_why_its_batch_is_pending(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5)])
    append(lake, [row("a", 0, 6)])
    chain = lake.opened.history.objects.partition(FIRST)
    head = chain.head()
    assert head
    chain.append(msgspec.structs.replace(head.body, failed=FailedMark(batch=2, reason="no memory\nat all")), head)
    assert "It is not merged yet (batch 2 failed: no memory), and" in explained(lake).why


def test_losers_within_the_batch_are_told_as_a_number(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5), row("a", 0, 4), row("b", 0, 1)], [row("b", 0, 2), row("b", 0, 3)])
    found = explained(lake)
    assert told(found) == [("appended", 1, "shown"), ("base", 1, "shown")]
    assert found.settled == {1: 1}


# ---------------------------------------------------------------- files that are gone, batches that do not count


def remove(lake: Lake, versions: Sequence[Version]) -> None:
    for version in versions:
        (lake.root / "processed" / version.object).unlink(missing_ok=True)
    lake.reopen()  # what was read of a small pack is remembered


def test_appended_files_that_are_gone_are_told(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1)], [row("a", 0, 6, 2)])
    before = explained(lake)
    remove(lake, [v for v in before.versions if v.batch == 1])
    found = explained(lake)
    assert (found.gone, found.gone_before) == ((), 2)
    assert (found.versions, found.shown) == (before.versions[:-1], before.shown)


@pytest.mark.parametrize("op", ["I", "D"])
def test_stored_row_whose_appended_file_is_gone_is_told_without_its_batch(lake: Lake, op: str) -> None:
    nights(lake, [row("a", 0, 5, 1)], [row("a", 0, 5, 2, op=op)])
    before = explained(lake)
    remove(lake, [v for v in before.versions if v.source == "appended" and v.batch == 2])
    append(lake, [row("a", 0, 4, 3)])
    found = explained(lake)
    stored = "tombstone" if op == "D" else "base"
    outcome = "deletes" if op == "D" else "shown"
    assert told(found) == [(stored, None, outcome), ("appended", 1, "superseded"), ("appended", 3, "pending")]
    assert "merged when the appended file was there, against batch 1's row" in found.why
    assert (found.shown, found.since) == (before.shown, None)


def test_damaged_appended_file_is_no_file_that_is_gone(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5)])
    pack = lake.root / "processed" / explained(lake).versions[0].object
    pack.write_bytes(b"\0" * pack.stat().st_size)
    lake.reopen()
    with pytest.raises(Exception, match="can't be read"):
        explained(lake)


def test_row_of_a_batch_that_does_not_count_is_withdrawn(lake: Lake) -> None:
    """A partition that goes back to the version before: what a restore makes of it."""
    chain = lake.opened.history.objects.partition(FIRST)
    append(lake, [row("a", 0, 5, 1)])
    lake.table.dedupe()
    before = chain.head()
    append(lake, [row("a", 0, 6, 2)])
    lake.table.dedupe()
    assert before
    bucket = before.body.buckets[0]
    counters = msgspec.structs.replace(bucket.counters, appended=2, withdrawn=1)
    restored = msgspec.structs.replace(bucket, counters=counters)
    body = msgspec.structs.replace(before.body, merged=2, entry=None, buckets=(restored,))
    assert chain.append(body, chain.head()).result == "won"
    lake.table.publish()
    found = explained(lake)
    assert told(found) == [("appended", 2, "withdrawn"), ("appended", 1, "shown"), ("base", 1, "shown")]
    assert found.why.endswith(
        "it is the only version that counts. Of greater rank, but withdrawn: batch 2's row (1.jsonl)."
    )


def adopt(lake: Lake, *files: Sequence[Any]) -> None:
    """A table that begins with files as another program left them: unsorted, and a key may be there twice."""
    names = ("k", "l", "ts", "v")
    types = [pa.string(), pa.int32(), pa.timestamp("us"), pa.int64()]
    schema = pa.schema(list(zip(names, types, strict=True)))
    stored = []
    for number, rows in enumerate(files):
        path = lake.root / "processed" / FIRST / f"part-{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{c: r[c] for c in names} for r in rows], schema)
        pq.write_table(table, path, use_deprecated_int96_timestamps=True)
        stored.append(DataFile(name=f"{FIRST}/{path.name}", rows=len(rows), bytes=path.stat().st_size))
    objects, settings = lake.opened.history.objects, lake.settings
    spec = create(
        schema.append(pa.field("d", pa.date32())),
        table_id="t",
        key=settings.key,
        order_by=settings.order_by,
        partition_by=settings.partition_by,
        delete=None,
        stamped=False,
    )
    n = sum(f.rows for f in stored)
    bucket = BucketEntry(id="0", base=tuple(stored), counters=Counters(appended=n, live=n))
    touched = {FIRST: Touched(files=tuple(stored), rows=n, superseded=0, bytes=sum(f.bytes for f in stored))}
    objects.specs.append(spec, None)
    objects.partition(FIRST).append(Manifest(partition=FIRST, merged=0, spec_version=0, buckets=(bucket,)), None)
    entry = LedgerEntry(kind="create", batch_id="", received_at=0, spec_version=0, touched=touched, rows_read=n)
    objects.ledger.append(entry, None)
    shown = {FIRST: PartitionVersion(version=0, merged=0, rows=n, bytes=touched[FIRST].bytes, files=1, write_id="")}
    objects.snapshots.append(Snapshot(batch=0, spec_version=0, partitions=shown), None)


def test_adopted_rows_are_batch_0(tmp_path: Path) -> None:
    lake = Lake(tmp_path, delete=None)
    adopt(lake, [row("a", 0, 5, 1), row("b", 0, 5)])
    found = explained(lake)
    assert told(found) == [("adopted", 0, "shown")], "the file is stored and brought at once"
    assert (found.versions[0].file, found.versions[0].object) == (None, f"{FIRST}/part-0.parquet")
    assert found.why == "The adopted row is shown: it is the only version."
    nights(lake, [row("a", 0, 5, 2)])
    found = explained(lake)
    assert told(found) == [("appended", 1, "shown"), ("base", 1, "shown"), ("adopted", 0, "superseded")]
    assert found.why == "Batch 1's row (0.jsonl) is shown: equal ts and later batch than the adopted row."


def test_adopted_timestamps_of_old_sparks_keep_their_year(tmp_path: Path) -> None:
    """As nanoseconds, which INT96 is by default, far years wrap round without a word."""
    lake = Lake(tmp_path, delete=None)
    adopt(lake, [row("a", 0, 250_000_000_000)])
    assert str(explained(lake).versions[0].order["ts"]).startswith("9942-")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([[row("a", 0, 5, 1)], [row("a", 0, 5, 2)]], "equal ts and later file of the batch"),
        ([[row("a", 0, 5, 1), row("b", 0, 9), row("a", 0, 5, 2)]], "equal ts and later place in the file"),
        ([[row("a", 0, 5, 2), row("a", 0, 5, 2)]], "equal ts and later place in the file"),
        ([[row("a", 0, 6, 2), row("a", 0, 5, 1)]], "greater ts"),
    ],
)
def test_key_that_was_adopted_twice_is_shown_twice(tmp_path: Path, files: list[Any], reason: str) -> None:
    lake = Lake(tmp_path, delete=None)
    adopt(lake, *files)
    found = explained(lake)
    assert told(found) == [("adopted", 0, "shown")] * 2
    assert reason in found.why
    assert found.why.endswith("Readers see all 2 rows until the partition is merged.")
    assert found.shown
    assert found.shown["v"] == 2


# ---------------------------------------------------------------- keys, partitions, columns


def test_key_is_looked_for_in_every_partition_or_the_one_that_is_given(lake: Lake) -> None:
    nights(lake, [row("a", day, 5) for day in range(3)])
    key = {"k": "a", "l": 0}
    assert [p.partition for p in lake.table.explain(key).partitions] == [f"d=2020-01-0{n}" for n in (1, 2, 3)]
    for given in ("2020-01-02", "d=2020-01-02"):
        assert [p.partition for p in lake.table.explain(key, given).partitions] == ["d=2020-01-02"]
    [found] = lake.table.explain({**key, "d": "2020-01-02"}).partitions
    assert found.partition == "d=2020-01-02"
    with pytest.raises(ConfigurationError, match="name different partitions"):
        lake.table.explain({**key, "d": "2020-01-02"}, "2020-01-01")


def test_partition_column_in_the_key_says_where_to_look(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key=("k", "d"))
    nights(lake, [row("a", 0, 5), row("a", 1, 6)])
    found = lake.table.explain({"k": "a", "d": "2020-01-02"})
    assert found.key == {"k": "a", "d": "2020-01-02"}
    assert [p.partition for p in found.partitions] == ["d=2020-01-02"]
    assert [m.partition for m in lake.table.explain({"k": "a"}).matches] == [FIRST, "d=2020-01-02"]


@pytest.mark.parametrize(
    ("type_", "landed", "given"),
    [
        ("bigint", -7, "-7"),
        ("decimal(7,2)", "12.50", "12.5"),
        ("date", "2020-02-29", "2020-02-29"),
        ("timestamp", "2020-02-29T12:00:00Z", "2020-02-29 13:00:00+01:00"),
        ("boolean", True, "true"),
        ("binary", "ü", "ü"),
        ("large_string", 'it\'s "q" = ü', 'it\'s "q" = ü'),
    ],
)
def test_value_is_read_by_its_columns_type(tmp_path: Path, type_: str, landed: Any, given: str) -> None:
    schema = {"k": type_, "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint"}
    lake = Lake(tmp_path, schema=schema, delete=None, key=("k",))
    nights(lake, [{**row("", 0, 5, 1), "k": landed}], [{**row("", 0, 6, 2), "k": landed}])
    [found] = lake.table.explain({"k": given}).partitions
    assert told(found) == [("appended", 2, "shown"), ("base", 2, "shown"), ("appended", 1, "superseded")]


def test_columns_that_came_or_grew_later_are_read_under_todays_names(tmp_path: Path) -> None:
    schema = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz"}
    lake = Lake(tmp_path, schema=schema, delete=None)
    columns = [("k", pa.string()), ("l", pa.int32()), ("d", pa.date32()), ("ts", pa.timestamp("us"))]
    for number, more in enumerate(([("v", pa.int32())], [("v", pa.int64()), ("w", pa.int64())])):
        given = pa.schema([*columns, *more])
        rows = [{**row("a", 0, number, 1), "w": 4}, {**row("b", number, number, 2), "w": 5}]
        pq.write_table(pa.Table.from_pylist(rows, given), lake.root / "landing" / f"{number}.parquet")
        lake.run()
    assert told(explained(lake)) == [("appended", 2, "shown"), ("base", 2, "shown"), ("appended", 1, "superseded")]
    shown = explained(lake, "b").shown
    assert shown
    assert (list(shown), shown["v"], shown["w"]) == (["k", "l", "d", "ts", "v", "w"], 2, None)
    assert [v.batch for v in explained(lake, "b").versions] == [1, 1]


# ---------------------------------------------------------------- the command


def call(lake: Lake, *args: str) -> Result:
    return CliRunner().invoke(main, ["explain", *args, "--config", str(lake.configure())])


def test_command_tells_people_and_programs_the_same(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5, 1), row("a", 0, 4)], [row("a", 0, 6, 2)])
    remove(lake, explained(lake).versions[:1])
    result = call(lake, "k=a", "l=0", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)["result"]
    assert answer["key"] == {"k": "a", "l": 0}
    [partition] = answer["partitions"]
    fields = {"partition", "versions", "shown", "why", "version", "since", "settled", "settled_of_key"}
    fields |= {"gone", "gone_before"}
    assert set(partition) == fields
    assert [v["source"] for v in partition["versions"]] == ["base", "appended"]
    assert set(partition["versions"][0]) == {
        *("source", "batch", "batch_id", "received_at", "file", "place", "order", "delete", "object", "outcome"),
        "columns",
        "moved_to",
        "moved_from",
    }
    assert partition["shown"]["v"] == 2
    assert partition["settled"] == {"1": 1}
    assert [gone["batch"] for gone in partition["gone"]] == [2]

    text = call(lake, "k=a", "l=0", "--partition", "2020-01-01").stdout
    assert text.startswith(f"k=a l=0 in {FIRST}\n  readers see  k=a l=0 d=2020-01-01 ts=")
    assert partition["why"] in text
    assert all(v["object"] in text for v in partition["versions"])
    assert "0.jsonl, place 0" in text
    assert "1 row of this key that lost within batch 1" in text
    assert "appended files (batch 2)" in text


@pytest.mark.parametrize(
    ("args", "code", "error", "message"),
    [
        (
            ["k=z", "l=0"],
            1,
            "key-not-found",
            "k=z l=0. Searched: 1 partition, 2 files, up to batch 1",
        ),
        (["k=a", "l=0", "d=2020-01-09"], 1, "key-not-found", "there is no partition '2020-01-09'"),
        (["k=z"], 1, "key-not-found", "k=z. Searched: 1 partition, 1 files, up to batch 1"),
        (["k=a", "ll=0"], 2, "not-the-key", "'l'"),
        (["k=a", "l=0", "v=1"], 2, "not-the-key", "'v' is not one of them"),
        (["k=a", "l=x"], 2, "unfit-value", "'x' can't be converted to int32, the type of column 'l'"),
        (["k=\udcff", "l=0"], 2, "unfit-value", r"'\udcff' can't be converted to string, the type of column 'k'"),
        (["k=a", "l=0", "--partition", "x"], 2, "not-a-partition", "'x' is not a value of the partition column"),
        (["k=a", "l"], 2, "usage", "'l' is not COLUMN=VALUE"),
        (["k=a", "k=b", "l=0"], 2, "usage", "'k=b' is a second value"),
        ([], 2, "usage", "Missing argument"),
    ],
)
def test_what_can_not_be_explained_says_why(lake: Lake, args: list[str], code: int, error: str, message: str) -> None:
    nights(lake, [row("a", 0, 5)])
    result = call(lake, *args, "--json")
    found = json.loads(result.stdout)["error"]
    assert (result.exit_code, found["code"]) == (code, error)
    assert message in found["message"]


def test_table_that_is_not_there_yet_is_told(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match="does not exist yet"):
        lake.table.explain({"k": "a", "l": 0})


def test_version_that_readers_need_and_that_is_gone_is_told_with_what_mends_it(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5)], [row("a", 0, 6)])
    chain = lake.opened.history.objects.partition(FIRST)
    (lake.root / "processed" / chain.name(1)).unlink()
    lake.reopen()
    with pytest.raises(DamagedTableError) as gone:
        lake.table.explain({"k": "a", "l": 0})
    assert f"Snapshot 1 names version 1 of {FIRST}" in gone.value.message
    assert f"`lakeupsert reprocess --partition {FIRST} --source landing`" in gone.value.next
    lake.table.reprocess(source="landing", host="local")
    assert explained(lake).shown


def test_null_is_no_value_of_a_key(lake: Lake) -> None:
    nights(lake, [row("a", 0, 5)])
    with pytest.raises(ConfigurationError, match="None can't be converted to string"):
        lake.table.explain({"k": None, "l": 0})
    with pytest.raises(RefusedError):
        lake.table.explain({"k": "", "l": 0})


# ---------------------------------------------------------------- a part of a key


def matched(lake: Lake, **given: Any) -> list[tuple[str, int, str, str]]:
    return [(m.key["k"], m.key["l"], m.partition[-2:], m.state) for m in lake.table.explain(given).matches]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"strategy": "delta", "bucket": "1500B"}])
def test_a_part_of_a_key_lists_the_keys_that_fit(tmp_path: Path, settings: dict[str, Any]) -> None:
    lake = Lake(tmp_path, **settings)
    nights(
        lake,
        [
            row(k, day, 5, line=line)
            for k in ("a", "b", *(f"x{i}" for i in range(600)))
            for line in (1, 2)
            for day in (0, 1)
        ],
        [row("a", 0, 6, line=1), row("a", 1, 6, line=2, op="D"), row("c", 0, 1, op="D")],
    )
    append(lake, [row("a", 0, 7, line=3), row("a", 0, 7, line=1)])
    lake.table.dedupe()
    append(lake, [row("a", 1, 8, line=4), row("a", 1, 8, line=2), row("b", 2, 8)])
    first = [("a", 1, "01", "shown"), ("a", 2, "01", "shown"), ("a", 3, "01", "won, not published")]
    second = [("a", 1, "02", "shown"), ("a", 2, "02", "deletes"), ("a", 4, "02", "pending")]
    assert matched(lake, k="a") == [*first, *second]
    assert matched(lake, k="a", d="2020-01-02") == second
    assert matched(lake, l=4) == second[2:]
    assert matched(lake, k="c") == [("c", 0, "01", "deletes")]
    assert matched(lake, k="b")[-1] == ("b", 0, "03", "pending")
    found = lake.table.explain({"l": "1"}, "2020-01-01")
    assert (len(found.matches), found.more) == (20, 602 - 20)
    assert found.key == {"l": 1}


def test_matches_as_json_and_as_text(lake: Lake) -> None:
    nights(lake, [row("a b", 0, 5, line=line) for line in range(25)])
    found = json.loads(call(lake, "k=a b", "--json").stdout)["result"]
    assert (found["key"], found["more"], len(found["matches"])) == ({"k": "a b"}, 5, 20)
    assert found["matches"][1] == {"key": {"k": "a b", "l": 1, "d": "2020-01-01"}, "partition": FIRST, "state": "shown"}
    text = call(lake, "k=a b").stdout
    assert text.startswith("25 keys")
    assert "5 more" in text
    assert "lakeupsert explain 'k=a b' l=0 d=2020-01-01" in text


# ---------------------------------------------------------------- rows that lost within their own batch


def test_the_only_version_that_is_stored_is_not_told_as_the_only_one(lake: Lake) -> None:
    """Of a batch that brought one key, all that lost was of this key; of others nobody knows."""
    nights(
        lake,
        [row("a", 0, n) for n in range(4)],
        [row(k, 0, 9) for k in "bc"],
        [row(k, 0, n) for k in "def" for n in (1, 2)],
    )
    alone, no_other, some = (explained(lake, k) for k in "abd")
    assert (alone.settled, alone.settled_of_key) == ({1: 3}, {1: 3})
    assert (no_other.settled, no_other.settled_of_key) == ({}, {})
    assert (some.settled, some.settled_of_key) == ({3: 3}, {3: None})
    assert "only version." in no_other.why
    assert not any("only version." in found.why for found in (alone, some))
    assert "3 other rows of this key" in alone.why
    assert "3 rows of this partition" in some.why


def test_versions_whose_files_are_gone_are_not_told_as_never_there(lake: Lake) -> None:
    nights(lake, [row("a", 0, 1)])
    remove(lake, explained(lake).versions[:1])
    assert "only version." not in explained(lake).why


def test_row_groups_are_skipped_by_every_column_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first one has one value. explain reads one row group, and so does a merge by strategy delta."""
    monkeypatch.setattr(filewriter, "ROW_GROUP_ROWS", 100)
    lake = Lake(tmp_path, strategy="delta")
    nights(lake, [row("a", 0, 1, n, line=n) for n in range(1_000)])
    assert pq.ParquetFile(lake.table.files()[0].path).num_row_groups == 10
    read = []
    align = datafiles.align
    monkeypatch.setattr(datafiles, "align", lambda rows, schema: read.append(rows.num_rows) or align(rows, schema))
    explained(lake, "a", 742)
    assert read == [100, 100], "of the base, and of the appended file"
    read.clear()
    lake.land("2.jsonl", [row("a", 0, 2, 2, line=742)])
    lake.run()
    assert sorted(read) == [1, 100]
