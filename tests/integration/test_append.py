"""Phase one's counterexamples: each of these lost, doubled or held back something once."""

import hashlib
import json
import os
import uuid
from datetime import date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from lakeupsert.engine import hosts as engine_hosts
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing import accept
from lakeupsert.landing import content as landing_content
from lakeupsert.pipeline.append import append as pipeline_append
from lakeupsert.pipeline.append import discover
from lakeupsert.storage import LocalStore
from tests.harness.lake import Lake, row


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path, quarantine_limit=0)


def test_batch_that_spills_to_its_last_block_is_whole(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that filled the memory was the last one, and nothing was left to spill."""
    monkeypatch.setattr(engine_hosts, "HELD_BYTES", 1)
    lake.land("1.jsonl", [row("a", 0, 1), row("b", 1, 1)])
    lake.land("2.jsonl", [row("a", 0, 2, 2), row("c", 2, 1)])
    lake.run()
    lake.check()
    assert len(lake.rows()) == 3


@pytest.mark.parametrize("folder", ["_temporary/0/attempt_1", ".spark-staging-1", "_delta_log"])
def test_uncommitted_output_of_another_job_is_not_taken(lake: Lake, folder: str) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.land(f"{folder}/part-0.jsonl", [row("ghost", 0, 1)])
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["a"]


def test_file_that_became_whole_between_two_tries_is_taken(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try met half of it; the second one listed the whole file and must not remember the half."""
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    half = lake.root / "landing" / "2.parquet"
    half.write_bytes(b"PAR1 half of it")
    real = pipeline_append.discover
    tries = []

    def look(*args: Any) -> Any:
        tries.append(args)
        if len(tries) == 2:
            columns = {"k": ["b"], "l": [0], "d": [date(2020, 1, 1)], "ts": [datetime(2020, 1, 1)], "v": [1]}
            pq.write_table(pa.table(columns), half)
        return real(*args)

    monkeypatch.setattr(pipeline_append, "discover", look)
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["a", "b"]


@pytest.mark.parametrize(
    ("step", "name"), [("take", "1.jsonl"), ("take", "1.parquet"), ("hash_object", "1.parquet"), ("take", "1.csv")]
)
def test_file_replaced_while_it_is_read_is_left_to_the_next_batch(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, step: str, name: str
) -> None:
    """Old rows under the new content's hash would make the new content look taken for ever."""

    def land(*keys: str) -> None:
        columns = {"k": keys, "l": [0] * len(keys), "d": [date(2020, 1, 1)] * len(keys), "v": [1] * len(keys)}
        table = pa.table({**columns, "ts": [datetime(2020, 1, 1)] * len(keys)})
        file = lake.root / "landing" / name
        file.parent.mkdir(exist_ok=True)
        if name.endswith("jsonl"):
            file.write_text("".join(json.dumps(r, default=str) + "\n" for r in table.to_pylist()))
        else:
            (pq.write_table if name.endswith("parquet") else pa.csv.write_csv)(table, file)

    land("a")
    if step == "hash_object":  # what is too large to be in memory, as it lies there
        monkeypatch.setattr(landing_content, "WHOLE_BYTES", 0)
    real = getattr(accept, step)

    def replaced(*given: Any, **named: Any) -> Any:
        if given[-2 if step == "take" else 1] == name:
            monkeypatch.setattr(accept, step, real)
            land("a", "b")
        return real(*given, **named)

    monkeypatch.setattr(accept, step, replaced)
    lake.land("0.jsonl", [row("z", 0, 1)])
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["z"]
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["a", "b", "z"]
    content = hashlib.sha256((lake.root / "landing" / name).read_bytes()).hexdigest()
    assert [(f.path, f.sha256) for f in lake.entries()[-1][1].files] == [(name, content)]


def send_again(lake: Lake, *paths: str) -> None:
    """The same content, as another file of that name."""
    for path in paths:
        file = lake.root / "landing" / path
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
        os.utime(file, (1, 1))


def test_file_that_was_sent_again_is_read_once_and_not_by_every_later_batch(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = discover.content_hash

    def counted(store: Any, path: str, *etag: str) -> str:
        read.append(path)
        return real(store, path, *etag)

    monkeypatch.setattr(discover, "content_hash", counted)
    for name in ("1.jsonl", "2.jsonl", "3.jsonl"):
        lake.land(name, [row(name, 0, 1)])
    lake.run()
    send_again(lake, "1.jsonl", "2.jsonl", "3.jsonl")
    for night in (4, 5, 6):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.reopen()
        lake.run()
    assert sorted(read) == ["1.jsonl", "2.jsonl", "3.jsonl"]
    lake.land("2.jsonl", [row("a", 0, 9), row("b", 0, 9)])
    lake.run()
    assert [f.path for f in lake.entries()[-1][1].files] == ["2.jsonl"]


@pytest.mark.parametrize(("withdrawn_first", "taken_again"), [(True, ["2.jsonl"]), (False, ["2.jsonl", "3.jsonl"])])
def test_file_that_was_sent_again_counts_by_the_batch_that_took_it_alone(
    lake: Lake, withdrawn_first: bool, taken_again: list[str]
) -> None:
    """Whether the batch that met it again counts says nothing about its rows."""
    for night in (1, 2):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.run()
    snapshot = lake.table.snapshots()[1].number
    if withdrawn_first:
        lake.table.restore(snapshot, dry=False)
    send_again(lake, "1.jsonl", "2.jsonl")
    lake.land("3.jsonl", [row("a", 0, 3)])
    lake.run()
    assert [f.path for f in lake.entries()[-1][1].seen] == ["1.jsonl", "2.jsonl"]
    if not withdrawn_first:
        lake.table.restore(snapshot, dry=False)
    lake.reopen()
    taken = lake.table.append(host="local", again=True)
    assert taken is not None
    assert [f.path for f in taken.entry.files] == taken_again
    lake.finish_and_check()


def test_refused_batch_does_not_hold_back_what_was_committed_before(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.table.append(host="local")
    lake.land("2.jsonl", [], refused=[{**row("x", 0, 1), "v": "no number"}])
    with pytest.raises(RefusedError):
        lake.run()
    assert [r["k"] for r in lake.rows()] == ["a"]


def test_file_whose_columns_do_not_fit_is_set_aside_and_the_rest_goes_on(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("2.jsonl", [row("b", 0, 1)])
    (lake.root / "landing" / "3.csv").write_text("k,l,d,ts,_lakeupsert_v\nc,0,2020-01-01,2020-01-01T00:00:00,1\n")
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["a", "b"]
    (_, entry) = lake.entries()[-1]
    assert entry.quarantined == {"unreadable_file": 1}


def land_two(lake: Lake, **more: Any) -> None:
    """A Parquet file of the rows a and b, with this column beside the usual ones."""
    columns = {
        "k": pa.array(["a", "b"]),
        "l": pa.array([0, 0], pa.int32()),
        "d": pa.array([date(2020, 1, 1)] * 2),
        "ts": pa.array([datetime(2020, 1, 1)] * 2, pa.timestamp("us")),
        "v": pa.array([1, 2]),
    }
    pq.write_table(pa.table({**columns, **more}), lake.root / "landing" / "1.parquet")


def test_uuid_column_comes_back_as_text(lake: Lake) -> None:
    values = [uuid.UUID(int=1).bytes, None]
    land_two(lake, u=pa.ExtensionArray.from_storage(pa.uuid(), pa.array(values, pa.binary(16))))
    lake.run()
    assert [r["u"] for r in lake.rows()] == [str(uuid.UUID(int=1)), None]


def test_base_files_of_nan_are_filtered_rightly_by_other_programs(lake: Lake) -> None:
    """NaN is greatest, and a statistic of the greatest value leaves it out: a reader would skip rows of the answer."""
    land_two(lake, x=pa.array([1.0, float("nan")]))
    lake.run()
    (file,) = lake.table.files()
    group = pq.read_metadata(file.path).row_group(0)
    has_statistics = {group.column(i).path_in_schema: group.column(i).is_stats_set for i in range(group.num_columns)}
    assert has_statistics == {"k": True, "l": True, "ts": True, "v": True, "x": False}
    assert duckdb.sql(f"select k from read_parquet('{file.path}') where x > 8").fetchall() == [("b",)]


def test_who_may_not_delete_is_told_why_and_leaves_its_files_to_vacuum(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a role without that right: only vacuum needs it."""

    def denied(store: LocalStore, names: Any) -> None:
        raise ConfigurationError("not-permitted", "Not permitted.", next="grant it")

    monkeypatch.setattr(LocalStore, "delete", denied)
    lake.land("1.jsonl", [row("a", 0, 1)], [{**row("b", 0, 1), "k": None}])
    with pytest.raises(RefusedError) as refused:
        lake.table.append(host="local")
    assert refused.value.code == "quarantine-limit"
    assert "until the next vacuum" in caplog.text
