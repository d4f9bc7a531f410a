"""Bad input, as its user meets it: what is said, what is taken all the same, and that nothing is lost or changed.

What the command line says of settings, landing zone, disk and Java stands in test_cli.py; of single values in
tests/unit/test_landing.py. The tables of it all are in docs/REFERENCE.md and
docs/WHEN_SOMETHING_BROKE.md.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import to_arrow
from lakeupsert.storage import LocalStore

HEADER = "id,transaction_date,record_timestamp,note\n"
GOOD = "1,2020-01-01,2020-01-01T00:00:00,fine\n"


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "landing").mkdir()
    configure()
    return tmp_path


def configure(more: str = "") -> None:
    Path("lakeupsert.toml").write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["transaction_date"]\n'
        f"quarantine_limit = 10\n{more}"
    )


def land(name: str, content: str | bytes) -> Path:
    path = Path("landing") / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def land_parquet(name: str, columns: dict[str, Any]) -> None:
    pq.write_table(pa.table(columns), Path("landing") / name)


def run(code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["run", "--host", "local", "--workers", "1", "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def batch(answer: Any) -> Any:
    (found,) = answer["result"]["append"]["batches"]
    return found


def rows(*columns: str) -> list[tuple[Any, ...]]:
    from lakeupsert import Table

    table = Table.open("lakeupsert.toml")
    found = to_arrow(table.view()).read_all().to_pylist()
    table.close()
    return [tuple(row[c] for c in columns) for row in found]


def test_key_column_that_no_file_has_is_named(lake: Path) -> None:
    land("a.csv", "order,transaction_date\n1,2020-01-01\n")
    error = run(2)["error"]
    assert error["code"] == "missing-column"
    assert "'id', which no readable file has. Found: order, transaction_date" in error["message"]
    assert not error["data_changed"]
    assert not Path("processed/_lakeupsert/ledger").exists()


def test_key_column_absent_from_one_file_sends_its_rows_to_quarantine(lake: Path) -> None:
    land("a.csv", HEADER + GOOD)
    land("b.csv", "transaction_date,record_timestamp\n2020-01-01,2020-01-01T00:00:00\n")
    answer = run()
    assert batch(answer)["rows_quarantined"] == 1
    assert any("missing_column" in warning for warning in answer["warnings"])
    assert rows("id", "note") == [("1", "fine")]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"not parquet at all" * 100])
def test_broken_parquet_is_set_aside_and_the_rest_goes_on(lake: Path, content: bytes) -> None:
    land("a.csv", HEADER + GOOD)
    land("b.parquet", content)
    answer = run()
    assert batch(answer)["rows_appended"] == 1
    assert any("unreadable_file" in warning for warning in answer["warnings"])
    assert rows("id") == [("1",)]


@pytest.mark.parametrize("name", ["b.csv.gz", "b.jsonl.bz2", "b.csv.xz", "b.jsonl.zst", "b.avro", "b.orc"])
def test_damaged_file_of_any_format_is_set_aside_and_the_rest_goes_on(lake: Path, name: str) -> None:
    land("a.csv", HEADER + GOOD)
    land(
        name,
        {"gz": gzip.compress(b"x" * 99)[:20]}.get(name.rpartition(".")[2], b"\x28\xb5\x2f\xfd nothing of the kind"),
    )
    answer = run()
    assert batch(answer)["rows_appended"] == 1
    assert any("unreadable_file" in warning for warning in answer["warnings"])
    assert rows("id") == [("1",)]
    assert not run()["result"]["append"]["batches"]


@pytest.mark.parametrize("last", [["3"], []], ids=["rows", "none"])
def test_parquet_files_one_behind_the_other_are_set_aside(lake: Path, last: list[str]) -> None:
    """The last footer finds rows of the first file. With as many of the same length no reader notices."""
    land("a.csv", HEADER + GOOD)
    whole = b""
    for ids in (["2"], last):
        land_parquet("b.parquet", {"id": pa.array(ids, pa.string()), "transaction_date": [date(2020, 1, 1)] * len(ids)})
        whole += Path("landing/b.parquet").read_bytes()
    land("b.parquet", whole)
    answer = run()
    assert any("unreadable_file" in warning for warning in answer["warnings"])
    assert rows("id") == [("1",)]


def test_parquet_cut_off_in_the_middle_is_set_aside(lake: Path) -> None:
    land("a.csv", HEADER + GOOD)
    land_parquet("b.parquet", {"id": ["2"] * 1000, "transaction_date": [date(2020, 1, 1)] * 1000})
    whole = Path("landing/b.parquet").read_bytes()
    land("b.parquet", whole[: len(whole) // 2])
    assert batch(run())["rows_quarantined"] == 1
    # The whole file comes at last: same path, other content.
    land_parquet(
        "b.parquet", {"id": ["2"], "transaction_date": [date(2020, 1, 1)], "record_timestamp": [datetime(2020, 1, 1)]}
    )
    assert batch(run())["rows_appended"] == 1
    assert rows("id") == [("1",), ("2",)]


def test_no_readable_file_at_all_is_refused(lake: Path) -> None:
    land("a.parquet", b"junk")
    error = run(1)["error"]
    assert error["code"] == "no-readable-file"
    assert "a.parquet" in error["message"]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEADER + GOOD,
        (HEADER + GOOD).replace("\n", "\r\n"),
        HEADER + '"1","2020-01-01","2020-01-01T00:00:00","fine"\n',
        HEADER + GOOD + "\n\n",
        (HEADER + GOOD).rstrip("\n"),
    ],
    ids=["byte order mark", "CRLF", "quotes", "blank lines", "no newline at the end"],
)
def test_dialects_of_csv_mean_the_same(lake: Path, text: str) -> None:
    land("a.csv", text)
    run()
    assert rows("id", "transaction_date", "note") == [("1", date(2020, 1, 1), "fine")]


def test_quotes_hold_separators_quotes_and_newlines(lake: Path) -> None:
    land("a.csv", HEADER + '1,2020-01-01,2020-01-01T00:00:00,"a, ""b""\nc"\n')
    run()
    assert rows("note") == [('a, "b"\nc',)]


@pytest.mark.long
def test_two_thousand_columns_pass(lake: Path) -> None:
    names = [f"c{i}" for i in range(2000)]
    for night in (1, 2):
        text = ",".join([*HEADER.strip().split(","), *names]) + "\n"
        land(f"{night}.csv", text + f"1,2020-01-01,2020-01-0{night}T00:00:00,x," + ",".join(["7"] * 2000) + "\n")
        run()
    assert rows("c0", "c1999", "record_timestamp") == [(7, 7, datetime(2020, 1, 2))]


AWKWARD = ["a/b", "..", ".", "100%", "%2F", "line\nbreak", "🦆", " ", "a=b", "x'y\"z", "~", "ü", "C:\\x", "*"]


def test_awkward_partition_values_stay_below_the_table_and_come_back(lake: Path) -> None:
    land_parquet(
        "a.parquet",
        {"id": AWKWARD, "transaction_date": AWKWARD, "record_timestamp": [datetime(2020, 1, 1)] * len(AWKWARD)},
    )
    run()
    assert sorted(rows("id", "transaction_date")) == sorted((v, v) for v in AWKWARD)
    folders = [p for p in Path("processed").iterdir() if p.name != "_lakeupsert"]
    assert len(folders) == len(AWKWARD)
    assert not [p for p in lake.iterdir() if p.name not in ("landing", "processed", "lakeupsert.toml")]


def test_first_and_last_year_come_back(lake: Path) -> None:
    days = [date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31)]
    land_parquet(
        "a.parquet", {"id": ["a", "b", "c"], "transaction_date": days, "record_timestamp": [datetime(2020, 1, 1)] * 3}
    )
    run()
    assert rows("transaction_date") == [(d,) for d in days]
    assert (lake / "processed" / "transaction_date=0001-01-01").is_dir()


def test_impossible_partition_values_go_to_quarantine(lake: Path) -> None:
    configure('[tables.t.schema]\ntransaction_date = "date"\n')
    bad = ["", "yesterday", "2020-02-30", "12020-01-01", "01/02/2020"]
    land("a.csv", HEADER + GOOD + "".join(f"{i},{d},2020-01-01T00:00:00,x\n" for i, d in enumerate(bad)))
    answer = run()
    assert batch(answer)["rows_quarantined"] == len(bad)
    assert any(f"{len(bad)} bad_partition" in warning for warning in answer["warnings"])
    assert rows("id") == [("1",)]


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Something that happens to the landing zone after a file was opened and before it was read to the end."""

    def arrange(happens: Callable[[], None]) -> None:
        acts = iter([lambda: None, happens])  # the survey opens it first
        real = LocalStore.open

        def opening(store: LocalStore, name: str, etag: str | None = None) -> Any:
            file = real(store, name, etag)
            if name == "a.csv":
                next(acts, lambda: None)()
            return file

        monkeypatch.setattr(LocalStore, "open", opening)

    return arrange


@pytest.mark.parametrize("what", ["vanishes", "changes", "grows"])
def test_file_that_does_not_hold_still_is_left_to_the_next_batch(
    lake: Path, while_read: Callable[[Callable[[], None]], None], what: str
) -> None:
    path = land("a.csv", HEADER + GOOD)
    land("b.csv", HEADER + "2,2020-01-01,2020-01-01T00:00:00,fine\n")
    late = HEADER + GOOD.replace("fine", "late")
    happens: dict[str, Callable[[], Any]] = {
        "vanishes": path.unlink,
        "changes": lambda: land("a.csv", late),
        "grows": lambda: land("a.csv", HEADER + GOOD + "3,2020-01-01,2020-01-01T00:00:00,late\n"),
    }
    while_read(happens[what])
    answer = run()
    assert any("a.csv changed or vanished while it was read" in warning for warning in answer["warnings"])
    assert rows("id") == [("2",)]
    run()
    expected = {"vanishes": [("2",)], "changes": [("1",), ("2",)], "grows": [("1",), ("2",), ("3",)]}
    assert rows("id") == expected[what]


def test_changed_key_is_refused_for_a_table_that_exists(lake: Path) -> None:
    land("a.csv", HEADER + GOOD)
    run()
    Path("lakeupsert.toml").write_text(Path("lakeupsert.toml").read_text().replace('["id"]', '["id", "note"]'))
    error = run(2)["error"]
    assert error["code"] == "another-table"
    assert "holds a table whose `key` is ['id']" in error["message"]
    assert 'key = ["id"]' in error["next"]


@pytest.mark.parametrize(
    "variables",
    [{"KEY": '["idd"]'}, {"PARTITION_BY": '["note"]'}, {"DELETE__COLUMN": "note", "DELETE__VALUES": '["x"]'}],
)
def test_setting_of_the_environment_that_makes_another_table_is_named(
    lake: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    land("a.csv", HEADER + GOOD)
    run()
    for setting, value in variables.items():
        monkeypatch.setenv(f"LAKEUPSERT__TABLES__T__{setting}", value)
    error = run(2)["error"]
    assert error["code"] == "another-table"
    for setting in variables:
        assert f"LAKEUPSERT__TABLES__T__{setting}" in error["message"]
        assert f"LAKEUPSERT__TABLES__T__{setting}" in error["next"]
    with pytest.raises(ConfigurationError) as caught:
        Table.open("lakeupsert.toml").run(host="local")
    assert f"LAKEUPSERT__TABLES__T__{setting}" in caught.value.message


def test_file_with_two_columns_that_differ_by_case_alone_is_set_aside(lake: Path) -> None:
    land("a.csv", "id,transaction_date,Note,note\n1,2020-01-01,a,b\n")
    error = run(1)["error"]
    assert error["code"] == "no-readable-file"
    assert "'Note' and 'note', which differ only by case" in error["message"]
    land("b.csv", HEADER + GOOD)
    assert batch(run())["rows_quarantined"] == 1
    assert rows("id", "note") == [("1", "fine")]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root; test_cli.py has the message")
def test_disk_that_is_full_loses_nothing_and_the_next_run_finishes(lake: Path) -> None:
    small = lake / "processed"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        text = "".join(f"{i},2020-01-0{1 + i % 9},2020-01-01T00:00:00,{os.urandom(40).hex()}\n" for i in range(12_000))
        land("a.csv", HEADER + text)
        error = run(75)["error"]
        assert error["code"] == "disk-full"
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        run()
        assert len(rows("id")) == 12_000
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv (util-linux) to make root respect file modes")
def test_right_that_is_missing_is_told_once_by_the_place_that_lacks_it(lake: Path) -> None:
    respecting_modes = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    program = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]
    program += ["run", "--host", "local", "--workers", "1", "--json"]

    def run(code: int) -> tuple[Any, str]:
        done = subprocess.run([*respecting_modes, *program], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)["error"], done.stderr

    days = [f"2020-01-0{day}" for day in range(1, 9)]

    def rows(version: int) -> str:
        return HEADER + "".join(f"{n},{day},{day}T00:00:0{version},x\n" for n, day in enumerate(days))

    for folder in ("readable", "secret"):
        Path("landing", folder).mkdir()
    land("readable/a.csv", rows(1))
    for unreadable in (Path("landing/secret"), Path("landing/secret/b.csv")):
        land("secret/b.csv", rows(2))
        unreadable.chmod(0)
        error, _ = run(2)
        unreadable.chmod(0o755)
        assert (error["code"], error["committed"]) == ("not-permitted", None)
        assert f"{unreadable.resolve()}: Permission denied (user" in error["message"]
        assert f"right to read {unreadable.resolve()}," in error["next"], "the landing zone is only read"
    run(0)
    land("readable/c.csv", rows(3))
    folders = [path for path in Path("processed").glob("*=*") if path.is_dir()]
    assert len(folders) == 8
    for folder in folders:
        folder.chmod(0o555)
    error, told = run(1)
    for folder in folders:
        folder.chmod(0o755)
    assert told.count("will be tried again") == 1
    assert error["committed"] == 2


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv (util-linux) to make root respect file modes")
def test_read_only_folder_is_told(lake: Path) -> None:
    land("a.csv", HEADER + GOOD)
    (lake / "processed").mkdir(mode=0o555)
    respecting_modes = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    program = [sys.executable, "-c", "from lakeupsert.cli import main; main()", "run", "--host", "local", "--json"]
    done = subprocess.run([*respecting_modes, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "not-permitted"
    assert f"(user {os.geteuid()})" in error["message"]
