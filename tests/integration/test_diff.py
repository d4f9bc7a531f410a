"""`diff`: what changed between two snapshots, against a comparison of all rows as dicts; what it reads for that; its command."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.read import arrow
from lakeupsert.rows import filewriter, vectors
from lakeupsert.rows.streams import windows
from tests.harness.lake import Lake, row

Rows = dict[tuple[Any, ...], dict[str, Any]]


def by_key(lake: Lake, snapshot: int | str) -> Rows:
    return {(r["d"], r["k"], r["l"]): r for r in lake.rows(snapshot)}


def found(lake: Lake, before: int | str, after: int | str, **options: Any) -> list[dict[str, Any]]:
    """The rows that differ, after a check that the counts fit them."""
    rows: list[dict[str, Any]] = []
    result = lake.table.diff(before, after, collect=lambda table: rows.extend(table.to_pylist()), **options)
    assert result == lake.table.diff(before, after, **options)
    for partition in result.partitions:
        own = [r["change"] for r in rows if r["partition"] == partition.partition]
        counts = (partition.inserted, partition.updated, partition.deleted)
        assert counts == tuple(own.count(change) for change in ("inserted", "updated", "deleted"))
    assert len(rows) == result.inserted + result.updated + result.deleted
    return rows


def check(lake: Lake, before: int | str, after: int | str) -> int:
    old, new = by_key(lake, before), by_key(lake, after)
    expected = [
        {
            "change": "updated" if key in old and key in new else "inserted" if key in new else "deleted",
            "partition": f"d={key[0]}",
            "key": {"k": key[1], "l": key[2]},
            "before": old.get(key),
            "after": new.get(key),
        }
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    assert found(lake, before, after) == expected
    return len(expected)


def night(rng: random.Random, number: int) -> list[Any]:
    return [
        row(
            rng.choice("abcdefgh"),
            rng.randrange(3),
            rng.randrange(number * 10),
            rng.randrange(3),
            op=rng.choice([None, None, "D"]),
        )
        for _ in range(rng.randrange(12))
    ]


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["rewrite", "delta", "auto"])
@pytest.mark.parametrize("bucket", ["256MiB", "1KiB"])
def test_every_two_snapshots_of_random_nights(
    tmp_path: Path, strategy: str, bucket: str, seed: int, tiny_files_split: None
) -> None:
    rng = random.Random(seed)
    lake = Lake(tmp_path, strategy=strategy, bucket=bucket, keep_snapshots=100)
    for number in range(1, 6):
        lake.land(f"{number}.jsonl", night(rng, number))
        lake.run()
        if rng.random() < 0.3:
            lake.table.compact(full=True)
    numbers = [link.number for link in lake.table.snapshots()]
    pairs = rng.sample([(before, after) for before in numbers for after in numbers], 10)
    assert max(check(lake, before, after) for before, after in [*pairs, (0, numbers[0])]) > 2
    lake.land("last.jsonl", night(rng, 9))
    lake.table.append(host="local")
    check(lake, numbers[0], "latest")
    check(lake, "latest", numbers[-1])
    lake.run()
    lake.table.restore(numbers[-1], dry=False)
    lake.table.dedupe()
    lake.table.publish()
    assert check(lake, numbers[-1], "published") == 0


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three days; the second night changes one of them."""
    lake = Lake(tmp_path, strategy="rewrite")
    lake.land("1.jsonl", [row(k, day, 1, 1) for day in range(3) for k in "abc"])
    lake.run()
    lake.land("2.jsonl", [row("a", 1, 2, 2), row("b", 1, 2, op="D"), row("d", 1, 2, 4), row("c", 1, 0, 9)])
    lake.run()
    return lake


def test_only_partitions_whose_manifests_differ_are_read(lake: Lake) -> None:
    lake.reopen()
    lake.points.seen.clear()
    assert [one.partition for one in lake.table.diff(0, 1).partitions] == ["d=2020-01-02"]
    manifests = [call for call in lake.points.seen if call.startswith("get") and "/partitions/" in call]
    assert len(manifests) == 2
    opened = [call for call in lake.points.seen if call.startswith("open ")]
    assert len(opened) == 2
    assert all("d=2020-01-02/" in call for call in opened)
    lake.points.seen.clear()
    assert lake.table.diff(1, 1).partitions == ()
    assert not [call for call in lake.points.seen if "/partitions/" in call or call.startswith("open ")]


def test_files_that_both_snapshots_share_are_not_read(tmp_path: Path) -> None:
    lake = Lake(tmp_path, strategy="delta")
    lake.land("1.jsonl", [row(k, 0, 1, 1) for k in "abc"])
    lake.run()
    lake.land("2.jsonl", [row("d", 0, 2, 2)])  # a new key: the base stays as it is
    lake.run()
    lake.reopen()
    lake.points.seen.clear()
    assert lake.table.diff(0, 1).inserted == 1
    [opened] = [call for call in lake.points.seen if call.startswith("open ")]
    assert ".delta" in opened


@pytest.mark.long
def test_of_a_file_that_both_share_only_row_groups_with_superseded_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filewriter, "ROW_GROUP_ROWS", 10)
    lake = Lake(tmp_path, strategy="delta")
    lake.land("1.jsonl", [row(f"{k:03}", 0, 1, 1) for k in range(100)])
    lake.run()
    lake.land("2.jsonl", [row("042", 0, 2, 2), row("043", 0, 2, op="D"), row("999", 0, 2, 3)])
    lake.run()
    base, delta = lake.table.files()
    assert pq.ParquetFile(base.path).num_row_groups == 10
    read = []
    keep = arrow.keep_only
    monkeypatch.setattr(
        arrow, "keep_only", lambda rows, only, at: read.append((at, rows.num_rows)) or keep(rows, only, at)
    )
    changes = [(r["change"], r["key"]["k"]) for r in found(lake, 0, 1)]
    assert changes == [("updated", "042"), ("deleted", "043"), ("inserted", "999")]
    assert set(read) == {(40, 10)}
    assert [(r["change"], r["key"]["k"]) for r in found(lake, 1, 0)] == [
        ("updated", "042"),
        ("inserted", "043"),
        ("deleted", "999"),
    ]
    assert delta.superseded == 0


@pytest.mark.long
def test_superseded_rows_of_latest_are_known_to_its_own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    lake = Lake(tmp_path, strategy="delta")
    lake.land("1.jsonl", [row(k, 0, 1, 1) for k in "abc"])
    lake.run()
    lake.land("2.jsonl", [row("b", 0, 2, 2)])
    lake.table.append(host="local")
    assert check(lake, "published", "latest") == check(lake, "latest", "published") == 1


def test_rewrite_changes_no_row(lake: Lake) -> None:
    lake.table.reprocess(host="local")
    newest = lake.table.snapshots()[0].number
    assert lake.table.diff(1, newest).partitions == ()


@pytest.mark.long
def test_key_selects_and_is_refused_if_it_is_not_the_key(lake: Lake) -> None:
    assert [r["key"]["k"] for r in found(lake, 0, 1, key={"k": "a"})] == ["a"]
    assert [r["change"] for r in found(lake, 0, 1, key={"k": "b", "l": "0", "d": "2020-01-02"})] == ["deleted"]
    assert found(lake, 0, 1, key={"k": "a", "d": "2020-01-01"}) == []
    lake.points.seen.clear()
    assert found(lake, 0, 1, key={"l": 7}) == []
    for key, code in (({"v": 1}, "not-the-key"), ({"l": "one"}, "unfit-value"), ({"d": "x"}, "unfit-value")):
        with pytest.raises(ConfigurationError) as raised:
            lake.table.diff(0, 1, key=key)
        assert raised.value.code == code
    with pytest.raises(ConfigurationError) as raised:
        lake.table.diff(0, 9)
    assert raised.value.code == "unknown-snapshot"


def test_columns_that_are_new_renamed_wider_or_dropped(tmp_path: Path) -> None:
    lake = Lake(tmp_path)

    def land(number: int, rows: list[dict[str, Any]], **types: pa.DataType) -> None:
        table = pa.Table.from_pylist(rows)
        for name, type_ in types.items():
            table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(type_))
        pq.write_table(table, tmp_path / f"landing/{number}.parquet")
        lake.run()

    land(1, [{**row("a", 0, 1), "w": 1, "op": ""}, {**row("b", 0, 1), "w": 2, "op": ""}], w=pa.int32())
    lake.table.rename_column("w", "width")
    lake.table.publish()
    first, second = (link.number for link in reversed(lake.table.snapshots()))
    result = lake.table.diff(first, second)
    assert (result.partitions, result.not_compared) == ((), ())
    land(2, [{**row("b", 0, 2), "width": 1 << 40, "new": "x", "op": ""}], width=pa.int64())
    [one] = found(lake, first, "published")
    assert (one["key"]["k"], one["before"]["width"], one["after"]["width"]) == ("b", 2, 1 << 40)
    assert (one["before"]["new"], one["after"]["new"]) == (None, "x")
    lake.table.drop_column("width")
    lake.table.publish()
    result, back = lake.table.diff(first, "published"), lake.table.diff("published", first)
    assert (result.not_compared, result.updated) == (("w",), 1)
    assert (back.not_compared, back.updated) == (("w",), 1)


def test_nested_values_and_values_that_are_hard_to_compare(tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("k",),
        partition_by=("p",),
        order_by=("ts",),
    )
    table = Table("t", settings)
    nan = float("nan")
    values: list[tuple[str, Any, Any]] = [
        *(("f", nan, nan), ("f", nan, 1.0), ("f", None, nan)),
        *(("s", {"x": nan, "y": [1]}, {"x": nan, "y": [1]}), ("s", {"x": 1.0, "y": None}, {"x": 1.0, "y": []})),
        *(("s", None, {"x": None, "y": None}), ("b", b"", None), ("b", b"\xff", b"\xff")),
        *(("m", [("a", 1)], [("a", 2)]), ("m", [("a", 1)], [("a", 1)]), ("n", None, None), ("n", 1, None)),
    ]
    struct = pa.struct({"x": pa.float64(), "y": pa.list_(pa.int64())})
    columns = {"f": pa.float64(), "s": struct, "b": pa.binary(), "m": pa.map_(pa.string(), pa.int64()), "n": pa.int32()}
    schema = pa.schema({"k": pa.int64(), "p": pa.string(), "ts": pa.int64(), **columns})
    for number, side in enumerate((1, 2)):
        rows = [{"k": k, "p": "x", "ts": 1, one[0]: one[side]} for k, one in enumerate(values)]
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / f"landing/{number}.parquet")
        table.run(host="local")
    keys: list[int] = []
    table.diff(0, 1, collect=lambda rows: keys.extend(r["k"] for r in rows["key"].to_pylist()))
    assert keys == [k for k, (_, one, other) in enumerate(values) if repr(one) != repr(other)]


@pytest.mark.long
def test_adopted_partition_is_compared_by_the_newest_row_of_each_key(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("b.parquet", [row("z", 0, 1, 1), row("a", 0, 2, 2), row("a", 0, 1, 1), row("m", 0, 5, 5)])
    lake.lay("c.parquet", [row("a", 0, 2, 3), row("q", 1, 1, 1)])
    lake.table.adopt()
    lake.land("1.jsonl", [row("m", 0, 6, 6), row("n", 0, 1, 1)])
    lake.run()
    assert [(r["change"], r["key"]["k"]) for r in found(lake, 0, 1)] == [("updated", "m"), ("inserted", "n")]
    [partition] = lake.table.diff(0, 1).partitions
    assert (partition.partition, partition.repeated) == ("d=2020-01-01", 2)
    result = answer(lake, "0", "1")
    assert any("2 rows" in warning for warning in result["warnings"])


# ---------------------------------------------------------------- the command


def invoke(lake: Lake, *args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["diff", *args, "--config", str(lake.configure())])
    assert result.exit_code == code, result.output
    return result.stdout


def answer(lake: Lake, *args: str, code: int = 0) -> Any:
    return json.loads(invoke(lake, *args, "--json", code=code))


def test_command_counts_and_shows_rows(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    result = answer(lake, "0")["result"]
    assert {k: v for k, v in result.items() if k != "partitions"} == {
        "before": 0, "after": 1, "inserted": 1, "updated": 1, "deleted": 1, "rows": None,
    }  # fmt: skip
    assert result["partitions"] == [
        {"partition": "d=2020-01-02", "inserted": 1, "updated": 1, "deleted": 1, "repeated": 0}
    ]
    rows = answer(lake, "0", "1", "--rows")["result"]["rows"]
    assert [(r["change"], r["key"]) for r in rows] == [
        ("updated", {"k": "a", "l": 0}),
        ("deleted", {"k": "b", "l": 0}),
        ("inserted", {"k": "d", "l": 0}),
    ]
    assert (rows[0]["before"]["v"], rows[0]["after"]["v"], rows[1]["after"], rows[2]["before"]) == (1, 2, None, None)
    lines = [line.strip() for line in invoke(lake, "0", "1", "--rows").splitlines()]
    assert lines[-3].startswith("~ k=a l=0 in d=2020-01-02: ")
    assert lines[-3].endswith("v: 1 -> 2")
    assert lines[-2].startswith("- k=b")
    assert lines[-1].startswith("+ k=d")
    assert [r["key"]["k"] for r in answer(lake, "0", "--rows", "--key", "k=d")["result"]["rows"]] == ["d"]
    assert answer(lake, "0", "--key", "k", code=2)["error"]["code"] == "usage"
    assert answer(lake, "7", code=2)["error"]["code"] == "unknown-snapshot"
    monkeypatch.setattr("lakeupsert.cli.look.diff.MOST_ROWS", 2)
    cut = answer(lake, "0", "1", "--rows")
    assert len(cut["result"]["rows"]) == 2
    assert len(cut["warnings"]) == 1
    assert cut["result"]["updated"] == 1


def test_command_names_dropped_columns(lake: Lake) -> None:
    lake.table.drop_column("v")
    lake.table.publish()
    found = answer(lake, "0")
    assert any("v" in warning.split(": ")[-1].split(", ") for warning in found["warnings"])
    assert found["result"]["updated"] == 1  # a has another ts


# ---------------------------------------------------------------- memory


@pytest.mark.long
def test_windows_hold_no_more_than_a_batch_of_each_stream() -> None:
    """However differently the keys of two streams lie, nothing is gathered up."""
    rng = random.Random(1)
    for _ in range(200):
        keys = [sorted(rng.sample(range(300), rng.choice([0, 1, 5, 200]))) for _ in range(2)]
        streams = [batches(rng, own) for own in keys]
        seen: list[list[int]] = [[], []]
        before = -1
        for window in windows(streams, ["k"]):
            parts = {number: part["k"].to_pylist() for number, part in window.items()}
            for number, part in parts.items():
                assert len(part) <= 7
                seen[number] += part
            both = sorted(key for part in parts.values() for key in part)
            assert not both or both[0] > before, "a key is in two windows"
            before = both[-1] if both else before
        assert seen == keys


def batches(rng: random.Random, keys: list[int]) -> Iterator[pa.RecordBatch]:
    while keys:
        count = rng.randrange(8)
        yield pa.record_batch({"k": pa.array(keys[:count], pa.int64())})
        keys = keys[count:]
