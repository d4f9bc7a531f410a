"""`doctor`: every fault that it looks for is planted once, and a healthy table has none."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from lakeupsert import Table, clock, sparkenv
from lakeupsert.cli import main
from lakeupsert.operations.doctor import Finding
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import Message, SqliteQueue
from lakeupsert.storage import LocalStore, ObjectInfo, UnknownOutcomeError
from tests.harness.lake import Lake, row

PROGRAM = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that a test may change, without what another test left for Spark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("PYSPARK_PYTHON", None)


def new_table(root: Path, **settings: Any) -> Table:
    """A table `t` below ``root`` with one row in its landing zone; nothing was appended."""
    lake = Lake(root, **settings)
    lake.land("2020-01-01/a.jsonl", [row("a", 0, 1)])
    lake.configure()
    lake.table.close()
    return Table("t", lake.settings)


def opened(table: Table) -> OpenTable:
    """The table as another process opens it."""
    return OpenTable(table.name, table.settings)


def with_store(table: Table, kind: type[LocalStore]) -> Table:
    other = opened(table)
    other.resources.store = kind(table.settings.processed)
    return Table.of(other)


def found(table: Table, check: str, level: str) -> list[Finding]:
    return [finding for finding in table.doctor() if (finding.check, finding.level) == (check, level)]


def problems(table: Table) -> list[str]:
    return [finding.check for finding in table.doctor() if finding.level == "problem"]


def objects(root: Path) -> dict[str, bytes]:
    """What lies below ``root``, without SQLite's files, which change when they are looked at."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("queue.sqlite"))
    return {str(path): path.read_bytes() for path in files}


class Ahead(clock.Source):
    """A clock that is ahead of the machine's."""

    def __init__(self, **by: int) -> None:
        self.by = timedelta(**by)

    def now(self) -> datetime:
        return super().now() + self.by


# ---------------------------------------------------------------- a healthy table


def test_table_that_does_not_exist_yet_is_healthy(tmp_path: Path) -> None:
    assert problems(new_table(tmp_path)) == []
    assert objects(tmp_path / "processed") == {}


def test_doctor_leaves_a_table_as_it_was(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.run(host="local")
    before = objects(tmp_path)
    assert {f.check for f in table.doctor() if f.level == "ok"} >= {
        "permissions",
        "store",
        "clock",
        "queue",
        "settings",
    }
    assert problems(table) == []
    assert objects(tmp_path) == before


# ---------------------------------------------------------------- store


class CheckThenPut(LocalStore):
    """Looks whether the name is free and then puts, which is no exclusive create. In between it lets another thread look."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._looks: Counter[str] = Counter()
        self._looked = threading.Condition()

    def create(self, name: str, data: bytes) -> bool:
        if self.head(name) is not None:
            return False
        with self._looked:
            self._looks[name] += 1
            self._looked.notify_all()
            self._looked.wait_for(lambda: self._looks[name] > 1, timeout=0.1)
        Path(self.root, name).parent.mkdir(parents=True, exist_ok=True)
        Path(self.root, name).write_bytes(data)
        return True


class LastWins(LocalStore):
    """The first of a name is told that it won, and later ones replace its bytes."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._alone = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        with self._alone:
            free = self.head(name) is None
            self.delete([name])
            return super().create(name, data) and free


class TakesWhatIsThere(LocalStore):
    """Exclusive in a race, but a name that exists is taken later."""

    def create(self, name: str, data: bytes) -> bool:
        if data == b"again":
            self.delete([name])
        return super().create(name, data)


class ListsLate(LocalStore):
    """A listing lacks the object that was created last."""

    def list(self, prefix: str, **given: Any) -> Iterator[ObjectInfo]:
        yield from list(super().list(prefix, **given))[:-1]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (CheckThenPut, "exactly one must win"),
        (LastWins, "20 of 20 races of 8 threads to create one object, 1 won"),
        (TakesWhatIsThere, "a name that exists"),
        (ListsLate, "listing"),
    ],
)
def test_store_unfit_for_commits_is_refused(tmp_path: Path, kind: type[LocalStore], told: str) -> None:
    table = with_store(new_table(tmp_path), kind)
    (problem,) = found(table, "store", "problem")
    assert told in problem.found
    assert "do not run lakeupsert on this store" in str(problem.next)
    assert objects(tmp_path / "processed") == {}


def test_lost_answer_of_a_create_is_no_fault_of_the_store(tmp_path: Path) -> None:
    class LosesAnswers(LocalStore):
        def create(self, name: str, data: bytes) -> bool:
            if super().create(name, data):
                raise UnknownOutcomeError(name)
            return False

    table = with_store(new_table(tmp_path), LosesAnswers)
    assert found(table, "store", "ok")


# ---------------------------------------------------------------- permissions, disk


def test_missing_landing_zone_is_a_problem_and_the_others_are_looked_at(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    shutil.rmtree(tmp_path / "landing")
    assert problems(table) == ["permissions"]
    assert found(table, "store", "ok")


def test_processed_path_that_is_a_file_is_a_problem(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    (tmp_path / "processed").write_text("")
    (problem,) = found(table, "permissions", "problem")
    assert f"{tmp_path / 'processed'} is not a folder" in problem.found


def findings_without_privileges(root: Path) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings of a process that file modes hold back, about the zones below ``root``."""
    respecting_modes = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*respecting_modes, *PROGRAM, "--config", str(root / "lakeupsert.toml"), "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)["result"]["findings"]


@pytest.mark.few(1)
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv (util-linux) to make root respect file modes")
@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("", 0o555),  # processed is not there yet, and can't be made
        ("processed", 0o555),
        ("processed/d=2020-01-01", 0o555),
        ("landing/2020-01-01", 0o300),
        ("landing/2020-01-01/a.jsonl", 0o200),
    ],
)
def test_missing_right_is_told_with_the_path(tmp_path: Path, path: str, mode: int) -> None:
    root = tmp_path / "lake"
    table = new_table(root)
    if path.startswith("processed"):
        table.run(host="local")
    table.close()
    place = root / path
    place.chmod(mode)
    code, findings = findings_without_privileges(root)
    place.chmod(0o755)
    assert code == 2
    denied = [f for f in findings if f["check"] == "permissions"]
    (problem,) = [f for f in denied if f["level"] == "problem"]
    assert problem["found"].endswith(str(place))


@pytest.mark.skipif(not shutil.which("setpriv"), reason="as above")
def test_folder_beside_the_partitions_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "processed/lost+found").mkdir(parents=True, mode=0)
    Lake(tmp_path).configure()
    assert findings_without_privileges(tmp_path)[0] == 0


def test_disk_without_room_for_the_largest_partition_is_warned_of(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.run(host="local")
    assert found(table, "disk", "ok")
    head = table.objects.snapshots.head()
    assert head is not None
    shown = {p: msgspec.structs.replace(s, bytes=10**17) for p, s in head.body.partitions.items()}
    opened(table).history.objects.snapshots.append(msgspec.structs.replace(head.body, partitions=shown), head)
    assert found(table, "disk", "warning")


# ---------------------------------------------------------------- clock


@pytest.mark.parametrize(
    ("ahead", "level"),
    [({}, "ok"), ({"minutes": 4}, "ok"), ({"minutes": 10}, "warning"), ({"hours": -2}, "problem")],
)
def test_clock_is_compared_with_the_stores(tmp_path: Path, ahead: dict[str, int], level: str) -> None:
    with clock.use(Ahead(**ahead)):
        assert found(new_table(tmp_path), "clock", level)


def test_stamps_of_a_clock_that_was_ahead_are_a_problem(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    with clock.use(Ahead(minutes=2)):
        table.run(host="local")
    (problem,) = found(table, "clock", "problem")
    for stamp in ("spec 0", "ledger 1", "snapshot 0", "receipt stamp 1"):
        assert re.search(rf"\b{stamp} by (2 min|1 min 5\d s)", problem.found)  # by what is left of them


# ---------------------------------------------------------------- queue


def lose_queue(root: Path) -> None:
    for path in (root / "processed/_lakeupsert").glob("queue.sqlite*"):
        path.unlink()


def test_lost_queue_is_a_warning_while_the_ledger_is_ahead(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.append(host="local")
    table.close()
    lose_queue(tmp_path)
    (warning,) = found(table, "queue", "warning")
    assert "lakeupsert run" in str(warning.next)
    assert not (tmp_path / "processed/_lakeupsert/queue.sqlite").exists()
    table.run(host="local")
    table.close()
    lose_queue(tmp_path)
    assert found(table, "queue", "ok")


@pytest.mark.parametrize("stray", [Message("t", "d=2020-01-01", 7), Message("other", "d=2020-01-01", 0)])
def test_message_about_a_batch_that_is_not_in_the_ledger_is_a_warning(tmp_path: Path, stray: Message) -> None:
    table = new_table(tmp_path)
    table.append(host="local")
    assert found(table, "queue", "warning") == []
    opened(table).resources.queue.send([stray])
    (warning,) = found(table, "queue", "warning")
    assert f"{stray.table!r}, batch {stray.batch}" in warning.found


def test_dead_letter_is_a_warning_with_its_reason(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.append(host="local")
    queue = opened(table).resources.queue
    (lease,) = queue.receive(1, 60)
    queue.bury(lease, "the disk is on fire")
    (warning,) = found(table, "queue", "warning")
    assert "the disk is on fire" in warning.found
    assert "`lakeupsert redrive`" in str(warning.next)
    table.run(host="local")  # merges it, and leaves the letter
    assert found(table, "queue", "warning") == [warning]
    table.redrive()
    assert not found(table, "queue", "warning")


def test_queue_without_write_ahead_log_is_a_warning(tmp_path: Path) -> None:
    class WithoutSharedMemory(SqliteQueue):
        """What SQLite answers on a file system that has no shared memory."""

        def journal_mode(self) -> str:
            assert super().journal_mode() == "wal"
            return "delete"

    table = new_table(tmp_path)
    table.append(host="local")
    other = opened(table)
    other.resources.queue = WithoutSharedMemory(tmp_path / "processed/_lakeupsert/queue.sqlite")
    table = Table.of(other)
    (warning,) = found(table, "queue", "warning")
    assert "mode delete" in warning.found


def test_damaged_queue_is_a_problem(tmp_path: Path) -> None:
    table = new_table(tmp_path, queue=str(tmp_path / "queue"))
    (tmp_path / "queue").write_text("no database, " * 100)
    (problem,) = found(table, "queue", "problem")
    assert "delete it" in str(problem.next)


# ---------------------------------------------------------------- Spark


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("engine", "level"), [("arrow", "warning"), ("spark", "problem")])
def test_missing_java_is_a_problem_only_where_spark_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, level: str
) -> None:
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", tmp_path / "jvm")
    os.environ.pop("JAVA_HOME", None)
    os.environ["PATH"] = str(tmp_path)
    table = new_table(tmp_path, engine=engine)
    assert "openjdk-17" in str(found(table, "java", level)[0].next)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert "[spark]" in str(found(table, "spark", level)[0].next)


def test_java_that_spark_is_not_made_for_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "java/bin/java", "echo 'openjdk version \"99.0.1\" 2099-10-21' >&2")
    os.environ["JAVA_HOME"] = str(tmp_path / "java")
    os.environ["PATH"] = str(tmp_path)
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", tmp_path / "jvm")
    (warning,) = found(new_table(tmp_path), "java", "warning")
    assert warning.found.startswith("Java 99")
    assert os.environ["JAVA_HOME"] == str(tmp_path / "java")


def test_spark_connect_needs_no_java_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", tmp_path / "jvm")
    os.environ.pop("JAVA_HOME", None)
    os.environ |= {"PATH": str(tmp_path), "SPARK_REMOTE": "sc://spark.example:15002/;token=secret"}
    (finding,) = found(new_table(tmp_path, engine="spark"), "java", "ok")
    assert "sc://spark.example:15002" in finding.found
    assert "secret" not in finding.found


@pytest.mark.parametrize(
    ("text", "told"),
    [("echo 3.1", "Python 3.1,"), ("echo No module named lakeupsert >&2; exit 1", "No module named lakeupsert")],
)
def test_python_of_sparks_workers_that_is_unfit_is_a_warning(tmp_path: Path, text: str, told: str) -> None:
    os.environ["PYSPARK_PYTHON"] = program(tmp_path / "python", text)
    (warning,) = found(new_table(tmp_path), "python", "warning")
    assert told in warning.found
    os.environ["PYSPARK_PYTHON"] = str(tmp_path / "gone")
    assert "does not run" in found(new_table(tmp_path), "python", "warning")[0].found


def test_other_python_that_can_do_the_work_is_fine(tmp_path: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = program(tmp_path / "python", f'exec "{sys.executable}" "$@"')
    assert found(new_table(tmp_path), "python", "ok")


# ---------------------------------------------------------------- landing, settings


@pytest.mark.parametrize(
    ("pattern", "folders", "level", "told"),
    [
        ("%Y-%m-%d", ["2020-01-31"], "ok", "2 landing files"),
        ("%Y-%m-%d", ["other"], "warning", "1 of 2 landing files"),
        ("%m/%d/%Y", [], "problem", "2020-01-01/a.jsonl"),
    ],
)
def test_landing_files_without_a_date_are_counted(
    tmp_path: Path, pattern: str, folders: list[str], level: str, told: str
) -> None:
    table = new_table(tmp_path, landing_dates=pattern)
    for folder in [*folders, "_temporary"]:
        (tmp_path / "landing" / folder).mkdir()
        (tmp_path / "landing" / folder / "b.jsonl").write_text("")
    (finding,) = found(table, "landing", level)
    assert told in finding.found


@pytest.mark.parametrize(
    ("paths", "fits"),
    [
        (["01/31/2020/a.csv", "02/01/2020/a.csv"], "'%m/%d/%Y'"),
        (["02/01/2020/a.csv"], "'%m/%d/%Y' or '%d/%m/%Y'"),
        (["dt=2020-01-31/a.csv"], "'dt=%Y-%m-%d'"),
    ],
)
def test_pattern_that_fits_all_landing_files_is_named(tmp_path: Path, paths: list[str], fits: str) -> None:
    table = new_table(tmp_path, landing_dates="%Y-%m-%d")
    shutil.rmtree(tmp_path / "landing")
    for path in paths:
        (tmp_path / "landing" / path).parent.mkdir(parents=True)
        (tmp_path / "landing" / path).write_text("")
    (problem,) = found(table, "landing", "problem")
    assert str(problem.next).endswith(f"fits all of them: {fits}")


def test_pattern_that_fits_only_some_landing_files_is_not_named(tmp_path: Path) -> None:
    table = new_table(tmp_path, landing_dates="%Y-%m-%d")
    (tmp_path / "landing/01/31/2020").mkdir(parents=True)
    (tmp_path / "landing/01/31/2020/b.jsonl").write_text("")
    (warning,) = found(table, "landing", "warning")
    assert "fits all" not in str(warning.next)


def test_table_without_landing_dates_has_no_finding_about_them(tmp_path: Path) -> None:
    assert [f for f in new_table(tmp_path).doctor() if f.check == "landing"] == []


def test_changed_key_is_a_problem_and_the_others_are_looked_at(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.run(host="local")
    changed = Table("t", msgspec.structs.replace(table.settings, key=("k",)))
    assert problems(changed) == ["settings"]
    assert "`key`" in found(changed, "settings", "problem")[0].found


def test_no_retention_needs_one_snapshot(tmp_path: Path) -> None:
    assert found(new_table(tmp_path / "a", superseded_retention="0h"), "settings", "problem")
    assert problems(new_table(tmp_path / "b", superseded_retention="0s", keep_snapshots=1)) == []


def test_check_that_raises_is_a_problem_and_the_others_are_looked_at(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.run(host="local")
    for version in (tmp_path / "processed/_lakeupsert/ledger").iterdir():
        version.write_text("{")
    assert problems(table) == ["clock", "queue"]
    assert {f.check for f in table.doctor() if f.level == "ok"} >= {"permissions", "store", "disk", "settings"}


# ---------------------------------------------------------------- the command


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    Lake(tmp_path).configure()
    return tmp_path


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *args])


def test_healthy_table_ends_with_zero(configured: Path) -> None:
    done = json.loads(call("--json").stdout)
    assert (done["exit_code"], done["error"]) == (0, None)
    assert list(done["result"]) == ["findings"]
    for finding in done["result"]["findings"]:
        assert list(finding) == ["check", "level", "found", "next"]
        assert (finding["level"] == "ok") == (finding["next"] is None)


def test_problems_end_with_two_and_come_last(configured: Path) -> None:
    (configured / "landing").rmdir()
    done = json.loads(call("--json").stdout)
    assert (done["exit_code"], done["error"]["code"]) == (2, "doctor-found-problems")
    (problem,) = [f for f in done["result"]["findings"] if f["level"] == "problem"]
    assert problem["found"] in done["error"]["message"]
    assert problem["next"] == done["error"]["next"]
    result = call()
    assert result.exit_code == 2
    *_, told, mends = result.stdout.splitlines()
    assert told.split() == ["permissions", "problem", *problem["found"].split()]
    assert mends.split() == ["next:", *problem["next"].split()]
