"""Ten breakages as a new operator meets them: what it says, the commands that it gives, and that these mend it.

The commands in a message's `next` are taken from it and run. "Mended" is: readers see what DuckDB makes of the landing files,
the snapshots can be read, and `lakeupsert reconcile` balances.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import pytest
from click.testing import CliRunner, Result

from lakeupsert import Table, clock, sparkenv
from lakeupsert.cli import main
from tests.harness.damage import damage

ON_HOST = ("--host", "local")
LOCAL = (*ON_HOST, "--workers", "1")
CONFIGURATION = """\
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
order_by = ["ts"]

[tables.sales.schema]
value = "int"
"""
SKIPS = CONFIGURATION.replace('order_by = ["ts"]', 'order_by = ["ts"]\non_failed_partition = "skip"')
DAYS = ("2020-01-01", "2020-01-02", "2020-01-03")
DAMAGED = "day=2020-01-02"
"""The partition that breaks; no other may be touched by it."""


# ---------------------------------------------------------------- a small lake, and its operator


@pytest.fixture(scope="module")
def nights(module_folder: Path) -> Path:
    """Two nights that went well."""
    with contextlib.chdir(module_folder):
        Path("landing").mkdir()
        Path("lakeupsert.toml").write_text(CONFIGURATION)
        for number, keys in enumerate(("abc", "b"), 1):
            land(number, keys)
            done("run", *LOCAL)
    return module_folder


@pytest.fixture
def lake(nights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(nights, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def land(number: int, keys: str, value: int | None = None) -> None:
    """A night's file: these keys in each partition. A night that is lost shows, since the next one brings other keys."""
    stamp = f"2020-02-{number:02d}T02:00:00"
    rows = [f"{key},{day},{stamp},{number if value is None else value}" for day in DAYS for key in keys]
    Path(f"landing/{number}.csv").write_text("\n".join(["id,day,ts,value", *rows, ""]))


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*args: str) -> str:
    """All that a call says that ends well."""
    result = call(*args)
    assert result.exit_code == 0, f"lakeupsert {shlex.join(args)}: {result.output}"
    return result.output


def refused(*args: str, code: str, exits: int, names: tuple[str, ...] = ()) -> str:
    """The `next` of a call that fails so, and whose message names what is broken and where; readers saw no change."""
    result = call(*args, "--json")
    error = json.loads(result.stdout)["error"]
    assert error is not None, f"lakeupsert {shlex.join(args)} ended well"
    assert (error["code"], result.exit_code, error["data_changed"]) == (code, exits, False), error
    for name in names:
        assert name in error["message"]
    return str(error["next"])


def follow(advice: str) -> list[str]:
    """Run each command that a message names, in its order; what was named."""
    commands: list[str] = re.findall(r"`lakeupsert ([^`]+)`", advice)
    assert commands, f"it names no command: {advice}"
    for command in map(shlex.split, commands):
        done(*command)
    return commands


def mended(order: str = "ts", since: int = 0) -> None:
    """Readers see what DuckDB makes of all that landed, and every row that came is accounted for."""
    rows = "select id, day, ts::timestamp, value from read_csv('landing/*.csv', filename = true)"
    newest = f"qualify row_number() over (partition by id, day order by {order} desc) = 1 order by day, id"
    table = Table.open("lakeupsert.toml")
    with contextlib.closing(table):
        found = table.to_arrow().read_all().select(["id", "day", "ts", "value"])
        for snapshot in table.snapshots():
            assert snapshot.number < since or table.to_arrow(snapshot.number).read_all().num_rows == 9
    assert [tuple(row.values()) for row in found.to_pylist()] == duckdb.sql(f"{rows} {newest}").fetchall()
    done("reconcile")


def flipped(data: bytes) -> bytes:
    return bytes(b ^ 0xFF for b in data[:200]) + data[200:]


# ---------------------------------------------------------------- files that somebody deleted or damaged


@pytest.mark.parametrize("lost", [1, 2], ids=["the newest", "all"])
def test_deleted_manifest(lake: Path, lost: int) -> None:
    """The night after must not go on behind what is left of the chain: without a word it would lose the night before."""
    manifests = sorted(Path(f"processed/_lakeupsert/partitions/{DAMAGED}").iterdir())
    for manifest in manifests[:lost]:
        manifest.unlink()
    missing = partial(refused, code="missing-version", exits=1, names=(DAMAGED, manifests[0].name))
    advice = missing("files")
    told = refused("reconcile", code="not-balanced", exits=1, names=(DAMAGED, manifests[0].name))
    assert re.findall(r"`[^`]+`", told) == re.findall(r"`[^`]+`", advice)
    assert missing("reprocess", "--partition", DAMAGED) == advice
    land(3, "c")
    told = refused("run", *LOCAL, code="failed-partitions", exits=1, names=(DAMAGED, manifests[0].name))
    assert told.startswith(advice)
    assert missing("plan") == missing("export", "--snapshot", "latest", "--output", "x.csv") == advice
    assert "lakeupsert redrive" in refused("status", code="dead-letters", exits=1)
    follow(told)
    if lost == 2:  # what only an old snapshot needs, no command makes again, and it says so
        assert "backup" in refused("files", "--snapshot", "0", code="missing-version", exits=1, names=(DAMAGED,))
    mended(since=lost - 1)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "an older version is marked failed"])
def test_deleted_manifest_under_skip(lake: Path, marked: bool) -> None:
    """The other partitions are published, and the run says what is wrong with this one."""
    Path("lakeupsert.toml").write_text(SKIPS)
    if marked:
        [file] = [Path(line) for line in done("files", "--where", "day = '2020-01-02'").split()]
        data = file.read_bytes()
        file.write_bytes(flipped(data))
        land(3, "c")
        assert call("run", *LOCAL).exit_code == 1
        file.write_bytes(data)
        done("run", *LOCAL)
    manifest = min(Path(f"processed/_lakeupsert/partitions/{DAMAGED}").iterdir())
    manifest.unlink()
    land(4, "c")
    for changes in (True, False):
        error = json.loads(call("run", *LOCAL, "--json").stdout)["error"]
        assert (error["code"], error["partition"], error["data_changed"]) == ("failed-partitions", DAMAGED, changes)
        assert manifest.name in error["message"]
    with contextlib.closing(Table.open("lakeupsert.toml")) as table:
        assert table.snapshots()[0].body.lagging == (DAMAGED,)
        others = table.to_arrow(where="day <> '2020-01-02'").read_all().to_pylist()
        assert [row["value"] for row in others if row["id"] == "c"] == [4, 4]
        assert DAMAGED in table.publish().failed
    follow(error["next"])
    mended()


def test_vacuum_does_not_hide_a_deleted_manifest(lake: Path) -> None:
    """Its fence would take the number of the one that is gone, and the files of that look like garbage."""
    keeps_one = 'order_by = ["ts"]\nkeep_snapshots = 1\nsuperseded_retention = "0s"'
    Path("lakeupsert.toml").write_text(CONFIGURATION.replace('order_by = ["ts"]', keeps_one))
    min(Path(f"processed/_lakeupsert/partitions/{DAMAGED}").iterdir()).unlink()
    follow(refused("vacuum", "--yes", code="missing-version", exits=1, names=(DAMAGED,)))
    mended(since=2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
def test_damaged_data_file(lake: Path, damage: str) -> None:
    [file] = [Path(line) for line in done("files", "--where", "day = '2020-01-02'").split()]
    data = file.read_bytes()
    file.unlink()
    if damage != "deleted":
        file.write_bytes(data[:-100] if damage == "cut" else flipped(data))
    advice = refused("export", "--output", "x.csv", code="damaged-data-file", exits=1, names=(file.name,))
    assert "backup" in advice
    told = refused("reconcile", code="not-balanced", exits=1, names=(DAMAGED, file.name))
    land(3, "c")
    failed = refused("run", *LOCAL, code="failed-partitions", exits=1, names=(DAMAGED, file.name))
    follow(told if damage == "cut" else failed)
    done("run", *LOCAL)
    mended(since=2)


@pytest.mark.parametrize("broken", ["manifest", "data file"])
def test_landing_was_purged(lake: Path, broken: str) -> None:
    """Nothing makes the version anew; the table goes back to the one before, and takes again what is still there."""
    manifest = min(Path(f"processed/_lakeupsert/partitions/{DAMAGED}").iterdir())
    gone = manifest if broken == "manifest" else Path(done("files", "--where", "day = '2020-01-02'").strip())
    gone.unlink()
    Path("landing/1.csv").unlink()
    code = "missing-version" if broken == "manifest" else "damaged-data-file"
    advice = refused("export", "--output", "x.csv", code=code, exits=1, names=(gone.name,))
    [again] = re.findall(r"`lakeupsert (reprocess [^`]+)`", advice)
    told = refused(*shlex.split(again), *ON_HOST, code="source-gone", exits=1, names=("1.csv",))
    [back] = re.findall(r"`lakeupsert (restore ID [^`]+)`", told)
    done(*shlex.split(back.replace("ID", "0")))
    assert _values() == {"a": 1, "b": 1, "c": 1}
    done("reconcile")
    done("append", "--again", *ON_HOST)
    done("run", *LOCAL)
    assert _values() == {"a": 1, "b": 2, "c": 1}
    done("reconcile")
    done("status")


def _values() -> dict[str, int]:
    """What readers see of each key, which is the same in each partition."""
    with contextlib.closing(Table.open("lakeupsert.toml")) as table:
        rows = table.to_arrow().read_all().to_pylist()
    values = {(row["id"], row["value"]) for row in rows}
    assert (len(rows), len(values)) == (9, 3)
    return dict(values)


def test_damaged_data_file_while_the_night_is_held(lake: Path) -> None:
    """Another partition can't be merged, so what is made anew of this one, with the new night in it, is not shown."""
    shown = {day: Path(done("files", "--where", f"day = '{day}'").strip()) for day in DAYS}
    shown["2020-01-03"].write_bytes(flipped(shown["2020-01-03"].read_bytes()))
    land(3, "c")
    refused("run", *LOCAL, code="failed-partitions", exits=1, names=("day=2020-01-03",))
    shown["2020-01-02"].write_bytes(flipped(shown["2020-01-02"].read_bytes()))
    export = partial(refused, "export", "--where", "day = '2020-01-02'", "--output", "x.csv", "--overwrite")
    [advised] = re.findall(r"`lakeupsert (reprocess [^`]+)`", export(code="damaged-data-file", exits=1))
    again = (*shlex.split(advised), *ON_HOST)
    told = refused(*again, code="not-shown", exits=1, names=(DAMAGED, "day=2020-01-03"))
    assert follow(told)[0] == "reprocess --partition day=2020-01-03 --source landing"
    mended(since=3)


def test_poison_partition(lake: Path) -> None:
    """What was appended for one partition can't be read; readers keep the night before, of all partitions."""
    land(3, "c")
    done("append", *ON_HOST)
    with contextlib.closing(Table.open("lakeupsert.toml")) as table:
        [link] = table.objects.ledger.between(2, 3)
    [file] = link.body.touched[DAMAGED].files
    pack = Path("processed", file.name)
    damage(Path("processed"), file)
    before = done("export", "--output", "before.csv")
    advice = refused("run", *LOCAL, code="failed-partitions", exits=1, names=(DAMAGED, pack.name, "hold"))
    assert done("export", "--output", "after.csv").split(" to ")[0] == before.split(" to ")[0]
    assert Path("after.csv").read_bytes() == Path("before.csv").read_bytes()
    assert follow(advice)[:2] == ["restore published --yes", "append --again"]
    mended()


def test_deleted_queue(lake: Path) -> None:
    land(3, "c")
    done("append", *ON_HOST)
    for file in Path("processed/_lakeupsert").glob("queue.sqlite*"):
        file.unlink()
    [found] = [f for f in json.loads(done("doctor", "--json"))["result"]["findings"] if f["check"] == "queue"]
    assert (found["level"], "queue.sqlite is missing" in found["found"]) == ("warning", True)
    said = done("dedupe")  # makes an empty one
    assert "the queue was empty" in said
    assert "3 partitions (day=2020-01-01" in said
    assert follow(said) == ["run"]
    mended()


# ---------------------------------------------------------------- a night that does not come to its end


@pytest.mark.long
def test_half_finished_append(lake: Path) -> None:
    """Killed when its files are written and its batch is not committed: nothing of it counts, and nothing is in the way."""
    land(3, "c")
    killed = subprocess.run([sys.executable, "-c", DIES_AT_COMMIT, "append", *ON_HOST], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(Path("processed/_lakeupsert/data").iterdir())) == 3
    assert "up to batch 2" in done("status")
    assert "1 new file" in done("plan")
    done("run", *LOCAL)
    mended()


DIES_AT_COMMIT = """
import os, signal
from lakeupsert.cli import main
from lakeupsert.storage.local import LocalStore

create = LocalStore.create

def create_or_die(self, name, data):
    if "/ledger/" in name:
        os.kill(os.getpid(), signal.SIGKILL)
    return create(self, name, data)

LocalStore.create = create_or_die
main()
"""


@pytest.fixture
def small_disk(lake: Path) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """The processed zone moves to a disk of one megabyte; what is returned leaves it so many bytes of room for a while.

    Where this user may not mount one, the system's sync fails as on a full disk.
    """
    small = lake / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    shutil.copytree("processed", small, dirs_exist_ok=True)
    Path("lakeupsert.toml").write_text(CONFIGURATION.replace('"processed"', '"small"'))

    @contextmanager
    def filled(room: int) -> Iterator[None]:
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / ".filler").write_bytes(bytes(free - room))
        yield
        (small / ".filler").unlink()

    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        yield filled if mounted else lambda room: mock.patch("os.fsync", side_effect=no_room)
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("room", [0, 40960, 57344], ids=["none", "for the queue", "for some files"])
def test_full_disk(small_disk: Callable[[int], AbstractContextManager[Any]], room: int) -> None:
    land(3, "c")
    ledger = Path("small/_lakeupsert/ledger")
    before = len(list(ledger.iterdir()))
    with small_disk(room):
        result = call("run", *LOCAL, "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["data_changed"]) == (75, len(list(ledger.iterdir())) > before)
    assert error["code"] in ("disk-full", "queue-disk")
    assert "/small/_lakeupsert/" in error["message"] or "/small/day=" in error["message"]
    assert "free space on that file system" in error["next"]
    assert "the same command again" in error["next"]
    done("run", *LOCAL)
    mended()


def test_missing_java(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(3, "c")
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", lake / "none")
    monkeypatch.setenv("PATH", str(lake))
    monkeypatch.setenv("JAVA_HOME", str(lake / "jdk-that-was-removed"))
    advice = refused("run", "--host", "spark", code="no-java", exits=2, names=("Java 17", "JAVA_HOME", "PATH"))
    assert "apt install openjdk-17-jre-headless" in advice
    assert "3.csv" not in done("status")  # nothing was begun
    [option] = re.findall(r"the same command with `([^`]+)`", advice)
    done("run", *shlex.split(option))
    mended()


# ---------------------------------------------------------------- what is not as it was agreed


def test_schema_drift(lake: Path) -> None:
    """A column outgrows its type: its rows wait in quarantine, the others are merged."""
    land(3, "c", value=3_000_000_000)
    land(4, "a")
    said = done("run", *LOCAL)
    assert "3 of 6 rows: 3 bad_type" in said
    assert "a wider type in `schema`" in said
    Path("lakeupsert.toml").write_text(CONFIGURATION.replace('value = "int"', 'value = "bigint"'))
    assert follow(said) == ["quarantine", "append --replay-quarantine", "run"]
    assert "quarantined  0 rows" in done("status")
    mended()


def test_two_configurations_for_one_table(lake: Path) -> None:
    """The second one would merge rows by another key."""
    other = Path("other.toml")
    other.write_text(CONFIGURATION.replace('["id"]', '["id", "value"]'))
    land(3, "c")
    again = ("run", *LOCAL, "--config", str(other))
    advice = refused(
        *again, code="another-table", exits=2, names=(str(lake / "processed"), "['id', 'value']", "['id']")
    )
    assert advice == refused("doctor", "--config", str(other), code="doctor-found-problems", exits=2)
    [setting] = re.findall(r"set `(key = [^`]+)`", advice)
    other.write_text(re.sub("key = .*", setting, other.read_text()))
    done(*again)
    mended()


class _Behind(clock.Source):
    def now(self) -> datetime:
        return super().now() - timedelta(minutes=61)


def test_clock_an_hour_off(lake: Path) -> None:
    """Rows are stamped on receipt, and the machine of the second night is behind: what came later wins all the same."""
    stamped = CONFIGURATION.replace('order_by = ["ts"]\n', "").replace('"processed"', '"stamped"')
    Path("lakeupsert.toml").write_text(stamped)
    done("run", *LOCAL)
    land(3, "ab", value=-1)
    with clock.use(_Behind()):
        advice = refused("doctor", code="doctor-found-problems", exits=2, names=("clock", "1 h 1 min apart"))
        done("run", *LOCAL)
    assert "`timedatectl set-ntp true`" in advice  # the machine's command: a test must not set its clock
    assert "problem" not in done("doctor")
    mended(order="filename")
