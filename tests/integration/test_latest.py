"""`latest`: every batch of the ledger, whole, while partitions are dirty, lag, fail, or move on under the reader."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.read.arrow import to_arrow
from lakeupsert.retries import LATEST_ATTEMPTS
from tests.harness.faults import Points
from tests.harness.lake import Lake, row

FIRST, SECOND, THIRD = [f"d=2020-01-0{day}" for day in (1, 2, 3)]
SNAPSHOTS = "list _lakeupsert/snapshots"


class _Before(Points):
    """Something else happens before the next call whose name begins so; ``times`` tells how often it may."""

    def __init__(self, prefix: str, what: Callable[[], Any], times: int = 1) -> None:
        super().__init__()
        self._prefix, self._what, self.left = prefix, what, times

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        if name.startswith(self._prefix) and self.left:
            self.left -= 1
            self._what()
        with super().at(name, commit):
            yield


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders of this test are made."""
    folder = tmp_path / "tmp [1]%41"  # which Spark must take as it is
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three partitions, one published batch."""
    lake = Lake(tmp_path / "lake")
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(3)])
    lake.run()
    return lake


def head(lake: Lake) -> int:
    return int(lake.entries()[-1][0])


def append(lake: Lake, name: str, *rows: Any) -> None:
    lake.land(name, rows)
    lake.table.append(host="local")


def merge(lake: Lake, partition: str, batch: int) -> None:
    dedupe_partitions(lake.opened, ArrowEngine(), {partition: batch})


def beside(lake: Lake) -> Lake:
    """Another process at the same lake."""
    other = Lake(lake.root, **lake.given)
    other.landed = lake.landed
    return other


def damage(lake: Lake, partition: str) -> Callable[[], Any]:
    """Spoil what the last batch brought for a partition; what is returned mends it."""
    pack = lake.root / "processed" / lake.entries()[-1][1].touched[partition].files[0].name
    content = pack.read_bytes()
    pack.write_bytes(b"damaged")
    return lambda: pack.write_bytes(content)


def test_latest_is_what_publishing_will_show_at_any_stage(lake: Lake) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("a", 1, 2, 2, op="D"))
    append(lake, "3.jsonl", row("a", 1, 1, 3), row("b", 3, 1, 3))
    published = lake.rows()
    for step in (
        lambda: None,
        lambda: merge(lake, SECOND, 2),  # half merged
        lambda: merge(lake, SECOND, 3),
        lake.table.dedupe,  # merged, not published
        lake.table.publish,
    ):
        assert lake.rows() == published
        step()
        assert lake.rows("latest") == lake.expected(3)
    assert lake.rows() == lake.rows("latest") != published


def test_latest_of_a_table_that_was_never_published(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    append(lake, "1.jsonl", row("a", 0, 1), row("a", 0, 2, 2))
    assert (lake.rows(), lake.rows("latest")) == ([], lake.expected(1))


def test_batch_that_is_merged_after_the_ledger_was_read_is_not_shown_in_part(lake: Lake) -> None:
    """It touches one partition that is dirty anyway and one that is not: a head would show one half of it."""
    append(lake, "2.jsonl", row("a", 0, 2, 2))
    other = beside(lake)

    def another_batch() -> None:
        append(other, "3.jsonl", row("a", 0, 3, 3), row("a", 1, 3, 3))
        other.table.dedupe()

    lake.points = _Before(SNAPSHOTS, another_batch)
    lake.reopen()
    assert lake.rows("latest") == lake.expected(2) != lake.expected(3)
    assert head(lake) == 3


def test_batch_that_is_published_after_the_ledger_was_read_is_shown_whole(lake: Lake) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2))
    other = beside(lake)

    def publish_one_append_another() -> None:
        append(other, "3.jsonl", row("a", 0, 3, 3), row("a", 1, 3, 3))
        other.run()
        append(other, "4.jsonl", row("a", 0, 4, 4), row("a", 2, 4, 4))
        other.table.dedupe()

    lake.points = _Before(SNAPSHOTS, publish_one_append_another)
    lake.reopen()
    view = lake.table.view("latest")
    assert view.snapshot.batch == 3, "its spec is chosen by it"
    assert to_arrow(view).read_all().to_pylist() == lake.expected(3)
    assert head(lake) == 4


def test_lagging_partition_is_shown_with_its_batches(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake", on_failed_partition="skip")
    lake.land("1.jsonl", [row("a", 0, 1, 1), row("a", 1, 1, 1)])
    lake.run()
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("b", 0, 2, 2))
    mend = damage(lake, FIRST)
    append(lake, "3.jsonl", row("a", 1, 2, 3))
    for _ in range(5):  # as often as a message is received before it is given up
        lake.run()
    snapshot = lake.table.snapshots()[0].body
    assert (snapshot.batch, snapshot.lagging) == (3, (FIRST,))
    mend()
    assert lake.rows("latest") == lake.expected(3) != lake.rows()


def test_batch_that_cannot_be_merged_is_named_and_the_rest_is_readable(lake: Lake, temporary: Path) -> None:
    published = lake.rows()
    append(lake, "2.jsonl", row("b", 0, 2, 2))
    append(lake, "3.jsonl", row("b", 1, 2, 2))
    mend = damage(lake, SECOND)
    with pytest.raises(DamagedTableError) as damaged:
        lake.rows("latest")
    assert (damaged.value.code, damaged.value.partition) == ("damaged-data-file", SECOND)
    assert SECOND in damaged.value.message
    assert "`published`" in damaged.value.next
    assert not list(temporary.iterdir()), "the other partition's merge left files"
    assert lake.rows() == published
    others = lake.table.to_arrow("latest", where="d <> '2020-01-02'").read_all().to_pylist()
    assert others == [r for r in lake.expected(3) if r["d"] != date(2020, 1, 2)]
    mend()
    assert lake.rows("latest") == lake.expected(3)


def test_pending_restore_is_shown_as_done(lake: Lake) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("a", 1, 2, 2))
    lake.run()
    append(lake, "3.jsonl", row("a", 1, 3, 3), row("a", 2, 3, 3))
    lake.table.restore(0, dry=False)
    assert lake.rows("latest") == lake.expected(4) == lake.expected(1)
    append(lake, "5.jsonl", row("a", 0, 1, 5))
    assert lake.rows("latest") == lake.expected(5)
    merge(lake, SECOND, 4)
    assert lake.rows("latest") == lake.expected(5)
    lake.table.restore(1, dry=False)
    assert lake.rows("latest") == lake.expected(6) == lake.expected(2)


@pytest.mark.long
def test_versions_that_vacuum_takes_while_it_is_read_begin_it_again(lake: Lake) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2))
    other = beside(lake)

    def append_next() -> None:
        number = head(other) + 1
        append(other, f"{number}.jsonl", row("a", 0, number, number))

    def publish_and_trim() -> None:
        append_next()
        other.run()
        for version in sorted((other.root / f"processed/_lakeupsert/partitions/{FIRST}").glob("v*"))[1:]:
            version.unlink()
        append_next()  # so that the partition is dirty when it is looked at again

    lake.points = points = _Before(f"list _lakeupsert/partitions/{FIRST}", publish_and_trim)
    lake.reopen()
    assert lake.rows("latest") == lake.expected(4)

    points.left = LATEST_ATTEMPTS  # where it happens every time, it ends
    with pytest.raises(DamagedTableError) as gone:
        lake.rows("latest")
    assert (gone.value.code, points.left) == ("missing-version", 0)
    assert lake.rows("latest") == lake.expected(head(lake))


def test_damage_in_a_table_that_stands_still_is_told_at_once(lake: Lake) -> None:
    append(lake, "2.jsonl", row("b", 0, 2, 2))
    damage(lake, FIRST)
    lake.points.seen = []
    with pytest.raises(DamagedTableError):
        lake.rows("latest")
    pack = lake.entries()[-1][1].touched[FIRST].files[0].name
    assert lake.points.seen.count(f"open {pack}") == 1


def test_view_shows_what_it_began_with_to_the_end(lake: Lake) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("a", 2, 2, 2))
    view, reader = lake.table.view("latest"), lake.table.to_arrow("latest")
    append(lake, "3.jsonl", row("a", 0, 3, 3), row("a", 1, 3, 3))
    lake.run()
    lake.table.restore(0, dry=False)
    lake.run()
    assert reader.read_all().to_pylist() == lake.expected(2)
    assert sum(file.rows for file in view.files()) == 3


def test_columns_of_pending_batches_are_there(tmp_path: Path) -> None:
    table = _parquet_lake(tmp_path, {"k": [1, 2], "v": pa.array([1, 2], pa.int32())}, {})
    _land(tmp_path, "2", {"k": [2, 3], "v": pa.array([2, 2**40]), "w": ["x", "y"]})
    table.append(host="local")
    rows = table.to_arrow("latest").read_all()
    assert rows.select(["k", "v", "w"]).to_pylist() == [
        {"k": 1, "v": 1, "w": None}, {"k": 2, "v": 2, "w": "x"}, {"k": 3, "v": 2**40, "w": "y"},
    ]  # fmt: skip
    table.run(host="local")
    assert table.to_arrow().read_all().equals(rows)


def test_adopted_partition_is_settled_where_a_batch_is_pending(tmp_path: Path) -> None:
    table = _parquet_lake(tmp_path, {}, {day: {"k": [1, 1], "v": [1, 2]} for day in (1, 2)})
    assert table.to_arrow("latest").read_all()["v"].to_pylist() == [1, 2, 1, 2]
    _land(tmp_path, "1", {"k": [7], "v": [7]})
    table.append(host="local")
    rows = table.to_arrow("latest").read_all()
    assert rows["v"].to_pylist() == [2, 7, 1, 2]
    table.run(host="local")
    assert table.to_arrow().read_all().equals(rows)


def test_filter_merges_only_the_partitions_it_needs(lake: Lake) -> None:
    append(lake, "2.jsonl", *[row("b", day, 2, 2) for day in range(4)])
    lake.points.seen = []
    found = lake.table.to_arrow("latest", where="d = '2020-01-04' AND v = 2").read_all().to_pylist()
    assert found == [r for r in lake.expected(2) if r["d"] == date(2020, 1, 4)]
    [file] = lake.entries()[2][1].touched["d=2020-01-04"].files
    parts = [name for name in lake.points.seen if name.endswith(".pack")]
    assert parts == [f"open {file.name}"]


def test_nothing_in_the_table_changes_and_temporary_files_go_with_their_reader(lake: Lake, temporary: Path) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("a", 1, 2, 2))
    processed = lake.root / "processed"
    before = {path: path.stat().st_mtime_ns for path in processed.rglob("*") if path.is_file()}

    reader = lake.table.to_arrow("latest")
    reader.read_next_batch()
    assert len(list(temporary.rglob("*.parquet"))) == 2
    reader.close()
    del reader
    assert not list(temporary.iterdir())

    view = lake.table.view("latest")
    files = [Path(file.path) for file in view.files()]
    assert [temporary in path.parents for path in files] == [True, True, False]
    assert lake.table.export(lake.root / "out.parquet", snapshot="latest") == 3
    assert len(list(temporary.iterdir())) == 1, "the export's are gone, the view's are there"
    del view
    gc.collect()
    assert not list(temporary.iterdir())

    lake.run()
    assert lake.rows("latest") == lake.expected(2)
    assert not list(temporary.iterdir())
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if "sqlite" not in path.name)


def test_files_of_latest_are_refused(lake: Lake) -> None:
    with pytest.raises(ConfigurationError) as refused:
        lake.table.files("latest")
    assert refused.value.code == "latest-has-no-files"


@pytest.mark.long
def test_spark_and_arrow_agree_on_latest(lake: Lake, temporary: Path, spark: Any) -> None:
    append(lake, "2.jsonl", row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, None, 3))
    append(lake, "3.jsonl", row("a", 3, 2, 3))
    merge(lake, SECOND, 2)
    for where in (None, "v > 1", "d = '2020-01-03'", "d = '2020-01-09'"):
        frame = lake.table.to_spark(spark, "latest", where).orderBy("d", "k", "l")
        gc.collect()  # the frame that it was made of is gone
        assert [r.asDict() for r in frame.collect()] == lake.table.to_arrow("latest", where).read_all().to_pylist()
    assert [r.asDict() for r in lake.table.to_spark(spark, "latest").orderBy("d", "k").collect()] == lake.expected(3)
    assert list(temporary.iterdir()), "they live as long as the session"


def test_spark_on_a_cluster_is_told_that_it_cannot_read_them(lake: Lake, temporary: Path, spark: Any) -> None:
    assert lake.table.to_spark(spark, "latest").count() == 3, "nothing is pending"
    append(lake, "2.jsonl", row("a", 0, 2, 2))
    changed = {"spark.sql.legacy.setCommandRejectsSparkCoreConfs": "false", "spark.master": "spark://far:7077"}
    master = spark.conf.get("spark.master")
    try:
        for name, value in changed.items():
            spark.conf.set(name, value)
        with pytest.raises(ConfigurationError) as refused:
            lake.table.to_spark(spark, "latest")
    finally:
        spark.conf.set("spark.master", master)
        spark.conf.unset("spark.sql.legacy.setCommandRejectsSparkCoreConfs")
    assert refused.value.code == "latest-needs-local-spark"
    assert "spark://far:7077" in refused.value.message


def _land(root: Path, name: str, columns: Any) -> None:
    (root / "landing").mkdir(exist_ok=True)
    size = len(columns["k"])
    table = pa.table({**columns, "d": [date(2020, 1, 1)] * size, "ts": pa.array([int(name)] * size, pa.int64())})
    pq.write_table(table, root / "landing" / f"{name}.parquet")


def _parquet_lake(root: Path, landed: Any, adopted: Any) -> Table:
    """A lake of Parquet files that came in one night, or of folders that were adopted."""
    zones = {"landing": str(root / "landing"), "processed": str(root / "processed")}
    table = Table("t", TableSettings(**zones, key=("k",), partition_by=("d",), order_by=("ts",)))
    for day, columns in adopted.items():
        folder = root / "processed" / f"d=2020-01-{day:02d}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({**columns, "ts": pa.array([0] * len(columns["k"]), pa.int64())}), folder / "x.parquet")
    if adopted:
        table.adopt()
    else:
        _land(root, "1", landed)
        table.run(host="local")
    return table


@pytest.mark.parametrize("retention", [None, "0s"])
@pytest.mark.parametrize("full", [None, "table"])
def test_restore_with_batches_behind_it_is_read_without_a_file_in_the_table(
    tmp_path: Path, retention: Any, full: Any
) -> None:
    """Where each is judged by what the one before left, the restore is a step of its own, and merges nothing."""
    lake = Lake(tmp_path, tombstone_retention=retention)
    for number in (1, 2):
        lake.land(f"{number}.jsonl", [row("a", 0, number), row("b", 0, 1)])
        lake.run()
    lake.table.restore(lake.table.snapshots()[-1].number, dry=False)
    lake.land("3.jsonl", [row("a", 0, 3), row("b", 0, 3), row("c", 0, 5)])
    lake.table.append(host="local", full=full)
    before = lake.stored_files()
    found = lake.rows("latest")
    assert [(r["k"], r["ts"].second) for r in found] == [("a", 3), ("b", 3), ("c", 5)]
    assert lake.stored_files() == before
    lake.run()
    assert lake.rows() == found
