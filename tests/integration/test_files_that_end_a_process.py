"""A landing file that ends the process which reads it costs itself only: the next process finds out, and takes all others."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import ConfigurationError, RefusedError, Table
from lakeupsert.cli import main
from lakeupsert.operations import vacuum
from lakeupsert.operations.ingest import IngestOptions, ingest
from lakeupsert.operations.init import apart
from lakeupsert.pipeline import child
from lakeupsert.pipeline.append import trial
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.workers.drain_queues import limit_bytes
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.lease import Lease
from tests.harness import ending_store
from tests.harness.ending_store import opened

KINDS = {
    "ends-abort": f"A process that reads it ends ({signal.strsignal(signal.SIGABRT)})",
    "ends-huge": "GB of memory",
}


def land(root: Path, *names: str, rows: int = 1) -> None:
    (root / "landing").mkdir(exist_ok=True)
    for name in names:
        (root / "landing" / f"{name}.csv").write_text("id,v\n" + "".join(f"{name}-{n},1\n" for n in range(rows)))


def refused(table: Table) -> list[str]:
    rows = table.quarantine().read_all().to_pylist()
    return sorted(f"{row['file']}: {row['reason']}" for row in rows if row["reason_code"] == "unreadable_file")


def ids(table: Table) -> list[str]:
    return [str(row["id"]) for row in table.to_arrow(columns=["id"]).read_all().to_pylist()]


def has_sign(root: Path) -> bool:
    """Whether somebody reads landing files, or has ended while they did."""
    head = TableObjects(LocalStore(root / "processed")).reading.head()
    return head is not None and not head.body.released


def leave_sign(table: Table) -> None:
    """As a process does that ends while it reads landing files."""
    signs = table._table.history.objects.reading
    signs.append(Lease(holder="test"), signs.head())


def run(root: Path, host: str = "local") -> tuple[int, str]:
    """Of a process: how it ended, and the warnings."""
    code = "from tests.harness.ending_store import main; main()"  # whose class other processes can import
    ended = subprocess.run(
        [sys.executable, "-c", code, str(root), host], check=False, stdout=subprocess.PIPE, text=True
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("host", ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long])])
def test_it_is_set_aside_and_the_others_are_taken(host: Any, tmp_path: Path) -> None:
    land(tmp_path, "a")
    assert run(tmp_path)[0] == 0
    land(tmp_path, *KINDS, "z")
    assert run(tmp_path) == (-signal.SIGABRT, "")
    assert has_sign(tmp_path)
    code, warnings = run(tmp_path, host)
    assert code == 0
    assert "3 files of this batch had to pass in another process" in warnings
    table = opened(str(tmp_path))
    assert ids(table) == ["a-0", "z-0"]
    for text, (kind, reason) in zip(refused(table), sorted(KINDS.items()), strict=True):
        assert text.startswith(f"{kind}.csv")
        assert reason in text
    assert not has_sign(tmp_path)
    land(tmp_path, "later")
    assert run(tmp_path, host) == (0, "\n")
    assert ids(table) == ["a-0", "later-0", "z-0"]


def test_the_first_batch_of_a_table(tmp_path: Path) -> None:
    land(tmp_path, "a", "ends-abort")
    assert run(tmp_path) == (-signal.SIGABRT, "")
    assert has_sign(tmp_path)
    code, warnings = run(tmp_path)
    assert code == 0
    assert "2 files of this batch had to pass in another process" in warnings
    table = opened(str(tmp_path))
    assert ids(table) == ["a-0"]
    assert [text.partition(":")[0] for text in refused(table)] == ["ends-abort.csv"]
    assert not has_sign(tmp_path)


def test_a_first_batch_that_is_refused_leaves_no_sign(tmp_path: Path) -> None:
    land(tmp_path, "a")
    with pytest.raises(ConfigurationError, match="which no readable file has"):
        opened(str(tmp_path), key=("absent",)).run(host="local")
    assert not [*LocalStore(tmp_path / "processed").list("")]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "reason"), [("never", "or waited too long"), ("busy", "1 seconds of processor time")])
def test_a_file_whose_reading_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    """Somebody has killed the process."""
    land(tmp_path, "a")
    table = opened(str(tmp_path))
    table.run(host="local")
    leave_sign(table)
    land(tmp_path, f"ends-{kind}")
    monkeypatch.setattr(trial, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(child, "WAITS", 1 if kind == "never" else 600)
    table.run(host="local")
    assert reason in refused(table)[0]
    assert not has_sign(tmp_path)


def test_small_files_whose_values_repeat_in_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four gigabytes in rows, which no footer names."""
    land(tmp_path, "a")
    table = opened(str(tmp_path))
    table.run(host="local")
    leave_sign(table)
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), ["x" * 1_000_000])
    rows = pa.table({"id": [str(n) for n in range(4000)], "w": value})
    pq.write_table(rows, tmp_path / "landing/repeats.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "landing/repeats.parquet").stat().st_size < 100_000
    land(tmp_path, "b")
    monkeypatch.setattr(child, "MEMORY_SHARE", 2**28 / limit_bytes())
    monkeypatch.setattr(
        trial, "LEAST_SECONDS", 600.0
    )  # a process that others keep waiting lacks time before it lacks memory
    table.run(host="local")
    [reason] = refused(table)
    assert reason.startswith("repeats.parquet: It takes more than 0.3 GB of memory")
    assert ids(table) == ["a-0", "b-0"]


def test_an_error_that_is_told_is_no_such_end(tmp_path: Path) -> None:
    table = opened(str(tmp_path), schema={"v": "bigint"})
    land(tmp_path, "a")
    table.run(host="local")
    (tmp_path / "landing" / "b.csv").write_text("id,v\nb,no number\n")
    with pytest.raises(RefusedError):
        table.append(host="local")
    assert not has_sign(tmp_path)


def test_who_takes_over_from_a_leader_that_ended_tries_the_files(tmp_path: Path) -> None:
    land(tmp_path, "a")
    table = opened(str(tmp_path))
    table.run(host="local")
    open_table, warnings = table._table, list[str]()
    options = IngestOptions(seconds=0, max_seconds=0.5, leader_seconds=0.1, warn=warnings.append)
    land(tmp_path, "b")
    ingest(open_table, options)
    assert not [text for text in warnings if "another process" in text]
    assert Leadership(open_table.history.objects, 0.1).lead()
    land(tmp_path, "ends-huge", "c")
    ingest(open_table, options)
    assert ids(table) == ["a-0", "b-0", "c-0"]
    assert len(refused(table)) == 1


def test_a_vacuum_keeps_the_newest_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "VERSIONS_KEPT", timedelta(0))
    table = opened(str(tmp_path))
    for name in "abc":
        land(tmp_path, name)
        table.run(host="local")
    signs = table._table.history.objects.reading
    assert len([*signs.numbers()]) == 6
    table.vacuum(dry=False)
    assert [*signs.numbers()] == [5]


def test_a_script_runs_once(tmp_path: Path) -> None:
    """Each process that multiprocessing starts would run it again."""
    land(tmp_path, "a")
    table = opened(str(tmp_path))
    table.run(host="local")
    leave_sign(table)
    land(tmp_path, "b", "ends-abort")
    script = tmp_path / "script.py"
    script.write_text("from tests.harness.ending_store import main\nprint('begun')\nmain()\n")
    run = [sys.executable, script, tmp_path, "local"]
    ended = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert ended.stdout.count("begun") == 1
    assert ids(table) == ["a-0", "b-0"]
    assert len(refused(table)) == 1
    assert not has_sign(tmp_path)


def test_plan_says_that_it_would_be_set_aside(tmp_path: Path) -> None:
    land(tmp_path, "ends-abort", "a", rows=2)
    for rows in (2, 5):  # of a table that there is not yet, and of one
        planned = opened(str(tmp_path)).plan()
        assert planned.rows == rows
        assert "'ends-abort.csv': A process that reads it ends" in " ".join(planned.notes)
        if rows == 2:
            leave_sign(opened(str(tmp_path)))
            opened(str(tmp_path)).run(host="local")
            (tmp_path / "landing" / "ends-abort.csv").write_text("id,v\nother,1\n")
            land(tmp_path, "b", rows=5)


def test_adopt_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "processed"
    folder.mkdir()
    for name in ("a", "ends-abort", "b", "c", "d"):
        pq.write_table(pa.table({"id": [name]}), folder / f"{name}.parquet")
    table = ending_store.opened(str(tmp_path))
    table._table.resources.store = ending_store.EndingStore(folder)
    with pytest.raises(
        RefusedError, match=r"ends-abort.parquet: A process that reads it ends .*Nothing was changed"
    ) as found:
        table.adopt(host="local")
    assert found.value.message.startswith("1 of 5 files")
    (folder / "ends-abort.parquet").unlink()
    assert table.adopt(host="local").rows == 4
    assert sorted(ids(table)) == ["a", "b", "c", "d"]


def test_init_and_try_leave_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "propose", ending_store.propose_here)
    monkeypatch.setattr(trial, "_read", ending_store.read_here)
    monkeypatch.setattr("lakeupsert.cli.set_up.try._merge", ending_store.merge_here)
    land(tmp_path, "ends-abort")
    landing = str(tmp_path / "landing")
    with pytest.raises(RefusedError, match="is not read: A process that reads it ends"):
        apart.propose_apart(landing, None, lambda: None)
    land(tmp_path, "a", "b", rows=3)
    done = CliRunner().invoke(main, ["try", landing, "--json"])
    answer = json.loads(done.stdout)
    assert "'ends-abort.csv' is not read: A process that reads it ends" in " ".join(answer["warnings"])
    assert (answer["result"]["rows"], answer["result"]["quarantined"]) == (6, {"unreadable_file": 1})
