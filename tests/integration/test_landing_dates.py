"""Landing files that `landing_dates` does not place: every command says so, and none is silent about all of them."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.append import discover
from lakeupsert.pipeline.append.landing_dates import arrival_order, fitting


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "landing").mkdir()
    configure("%Y%m%d")
    return tmp_path


def configure(pattern: str, *tables: str) -> None:
    settings = 'key = ["id"]\npartition_by = ["day"]\norder_by = ["version"]\n'
    Path("lakeupsert.toml").write_text(
        "\n".join(
            f'[tables.{name}]\nlanding = "landing"\nprocessed = "processed/{name}"\nlanding_dates = "{pattern}"\n{settings}'
            for name in tables or ("t",)
        )
    )


def land(*folders: str) -> None:
    for number, folder in enumerate(folders):
        path = Path("landing", folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "a.csv").write_text(f"id,day,version\nk{number},2024-03-01,1\n")


def call(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


APPENDING = [("run", "--host", "local"), ("append", "--host", "local")]
LOOKING = [("plan",), ("run", "--dry-run"), ("status",)]
DAYS = [f"2024-03-{day:02d}" for day in range(1, 19)]


@pytest.mark.parametrize("command", APPENDING, ids=" ".join)
def test_all_files_skipped_is_a_failure_with_the_pattern_that_fits(command: tuple[str, ...]) -> None:
    land(*DAYS)
    code, said = call(*command)
    assert (code, said["error"]["code"]) == (1, "landing-skipped")
    for part in ("18 of 18", '"2024-03-01"', '"%Y%m%d"', '"%Y-%m-%d"'):
        assert part in said["error"]["message"]
    assert 'landing_dates = "%Y-%m-%d"' in said["error"]["next"]
    assert not Table.open("lakeupsert.toml").exists()
    configure("%Y-%m-%d")
    code, said = call(*command)
    assert (code, said["warnings"]) == (0, [])


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_commands_that_look_warn(command: tuple[str, ...]) -> None:
    land(*DAYS)
    code, said = call(*command)
    assert code == 0
    [warning] = said["warnings"]
    for part in ("18 of 18", '"2024-03-01"', '"%Y%m%d"', '"%Y-%m-%d"'):
        assert part in warning


@pytest.mark.parametrize("command", [*APPENDING, *LOOKING], ids=" ".join)
@pytest.mark.parametrize("taken", [False, True])
def test_some_files_skipped_is_a_warning_of_every_call(command: tuple[str, ...], taken: bool) -> None:
    land("20240301", "20240302", "2024-03-03")
    if taken:  # nothing is new, and still it is said
        assert call("run", "--host", "local")[0] == 0
    code, said = call(*command)
    assert code == 0
    [warning] = said["warnings"]
    assert "1 of 3" in warning
    assert '"2024-03-03"' in warning
    assert "%Y-%m-%d" not in warning  # it would not fit the others


def test_warning_is_told_to_people() -> None:
    land("20240301", "2024-03-03")
    for command in ("run --host local", "run --host local", "plan", "status"):
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0
        assert [line.startswith("Warning: ") for line in done.stderr.splitlines()] == [True], command


def test_each_table_has_its_own_warning() -> None:
    configure("%Y%m%d", "one", "two")
    land("20240301", "2024-03-03")
    for _ in range(2):
        code, said = call("run", "--host", "local")
        assert code == 0
        assert [warning.partition(":")[0] for warning in said["warnings"]] == ["one", "two"]


def test_files_that_are_not_selected_are_not_skipped() -> None:
    land("20240301", "20240302")
    code, said = call("append", "--host", "local", "--received-from", "2025-01-01")
    assert (code, said["warnings"]) == (0, [])


def test_pattern_that_fits_some_days_by_chance_is_not_taken_for_the_right_one() -> None:
    configure("%d/%m/%Y")
    land("03/11/2024", "03/12/2024", "03/13/2024")
    code, said = call("plan")
    assert code == 0
    [warning] = said["warnings"]
    assert "1 of 3" in warning
    assert '"%m/%d/%Y"' in warning


@pytest.mark.parametrize("stray", ["README.md", "notes.csv", "docs/plan.pdf"])
def test_stray_file_in_an_empty_landing_zone_is_a_warning(stray: str) -> None:
    land("20240301")
    assert call("run", "--host", "local")[0] == 0
    shutil.rmtree("landing/20240301")
    Path("landing", stray).parent.mkdir(exist_ok=True)
    Path("landing", stray).write_text("x")
    for command in (*APPENDING, *LOOKING):
        code, said = call(*command)
        assert code == 0
        [warning] = said["warnings"]
        assert "1 of 1" in warning
        assert stray.partition("/")[0] in warning
    code, said = call("doctor")
    assert (code, [c["level"] for c in said["result"]["findings"] if c["check"] == "landing"]) == (0, ["warning"])


def test_stray_file_beside_folders_that_no_pattern_fits() -> None:
    land(*DAYS)
    Path("landing/README.md").write_text("x")
    code, said = call("run", "--host", "local")
    assert (code, said["error"]["code"]) == (1, "landing-skipped")
    assert "19 of 19" in said["error"]["message"]
    assert '"2024-03-01"' in said["error"]["message"]
    assert ".." not in said["error"]["message"]
    assert 'landing_dates = "%Y-%m-%d"' in said["error"]["next"]


def test_pattern_that_is_proposed_is_toml() -> None:
    land('q"\\x=2024-03-01')
    code, said = call("run", "--host", "local")
    assert code == 1
    proposed = re.findall("`(landing_dates = [^`]+)`", said["error"]["next"])
    assert [tomllib.loads(line)["landing_dates"] for line in proposed] == ['q"\\x=%Y-%m-%d']


def test_run_merges_what_was_there_before_it_fails() -> None:
    land("20240301")
    assert call("append", "--host", "local")[0] == 0
    configure("%Y-%m-%d")
    code, said = call("run", "--host", "local")
    assert (code, said["error"]["code"]) == (1, "landing-skipped")
    assert Table.open("lakeupsert.toml").to_arrow().read_all().num_rows == 1


def test_python_is_told_too() -> None:
    land("20240301", "2024-03-03")
    table, said = Table.open("lakeupsert.toml"), list[str]()
    assert table.append(host="local") is not None
    assert table.append(host="local", warn=said.append) is None
    assert len(said) == 1
    configure("%Y")
    with pytest.raises(RefusedError):
        Table.open("lakeupsert.toml").append(host="local")


def test_name_that_is_not_utf_8_is_skipped() -> None:
    configure("")
    land("x")
    Path(os.fsdecode(b"landing/caf\xe9.csv")).write_text("id,day,version\na,2024-03-01,1\n")
    code, said = call("run", "--host", "local")
    assert code == 0
    assert "1 of 2" in said["warnings"][0]


def test_status_without_a_landing_zone() -> None:
    land("20240301")
    assert call("run", "--host", "local")[0] == 0
    Path("landing").rename("elsewhere")
    code, said = call("status")
    assert (code, said["warnings"]) == (0, [])


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["2024-03-01", "2024-03-02/10"], ("%Y-%m-%d",)),
        (["2024/03/01"], ("%Y/%m/%d",)),
        (["03/13/2024"], ("%m/%d/%Y",)),
        (["03/11/2024"], ("%m/%d/%Y", "%d/%m/%Y")),
        (["dt=2024-03-01"], ("dt=%Y-%m-%d",)),
        (["year=2024/month=03/day=01"], ("year=%Y/month=%m/day=%d",)),
        (["2024-03-01", ""], ()),
        (["2024-03-01", "20240301"], ()),
        (["north"], ()),
    ],
)
def test_pattern_of_folders(folders: list[str], expected: tuple[str, ...]) -> None:
    assert fitting(folders) == expected


# -- the order of files in a batch


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("%m/%d/%Y", ["12/31/2020/a", "01/01/2021/a"]),
        ("%d/%m/%Y", ["31/01/2021/a", "01/02/2021/a", "01/02/2021/b"]),
        ("%d-%m-%Y", ["31-01-2021/a", "01-02-2021/a"]),
        ("%Y/%m/%d", ["2021/9/30/a", "2021/10/1/a"]),
        ("%Y%m%d", ["20210101/part-2", "20210101/part-10", "20210102/part-1"]),
        ("", ["2/a", "10/a", "a-2", "a2", "a2b", "a10", "a10-1", "b-007", "b-7", "b-08", "z9/1", "z10/0", "é"]),
        ("", ["1" * 65, "2" * 65]),
        ("%Y-%m-%d/%I%p", ["2021-01-31/11AM/a", "2021-01-31/01PM/a", "2021-02-01/12AM/a"]),
        ("%Y-%m-%dT%H", ["2021-01-31T9/b", "2021-01-31T10/a"]),
        ("%M-%H/%Y-%m-%d", ["59-01/2021-01-31/a", "00-02/2021-01-31/a"]),
        ("", ["v1.9", "v1.10", "v1.10.1"]),
        ("", ["sales.2024.9.30.csv", "sales.2024.10.1.csv"]),
        ("", ["20240131.2.csv", "20240131.10.csv"]),
        ("", ["2024-01-31.2.csv", "2024-01-31.10.csv"]),
        ("", ["part2of10.csv", "part10of10.csv"]),
        ("", ["customertransactions9.csv", "customertransactions10.csv"]),
        ("", ["customertransactions9of10.csv", "customertransactions10of10.csv"]),
        ("", ["2024w9", "2024w10"]),
        ("", ["20240101T9", "20240101T10", "20240131_9h30", "20240131_9h31", "20240131_10h05"]),
        # names that sort as text by design: UUIDs, identifiers, fractions of seconds
        ("", ["0190fc3e-7d1a-7cc3-98c4-dc0c0c07398f.csv", "019a1b2c-7d1a-7cc3-98c4-dc0c0c07398f.csv"]),
        ("", ["01901234-1111-7111-8111-111111111111", "019012ab-0000-7000-8000-000000000000"]),
        ("", ["01J1ZD0000ABCDEFGHJKMNPQRS", "01J1ZD9999ABCDEFGHJKMNPQRS", "01J20D0000ABCDEFGHJKMNPQRS"]),
        ("", ["2024-07-01T10:00:05.123456Z.csv", "2024-07-01T10:00:05.124Z.csv"]),
        ("", ["a-1720000000.25.csv", "a-1720000000.5.csv"]),
        ("", ["x_100005.123456.csv", "x_100005.124.csv"]),
        ("", ["2024-01-01-10-00-05.25.csv", "2024-01-01-10-00-05.5.csv"]),
        ("", ["f1704067200.25.csv", "f1704067200.5.csv"]),
        ("", ["20240701100005.123456.csv", "20240701100005.124.csv"]),
        ("", ["0ARYKAZ3R4YDJ", "0ARYKB12R4YDJ"]),  # TSID
        ("", ["65a1f0000000000000000001", "65a1f10000000000000000a2"]),  # ObjectId
        # of numbers of one length, the order of their text
        ("", ["A", "a", "a-00001-f3", "a-00002-03", "a.2020-01-01", "a.2020-01-02", "a/x", "a0", "aa"]),
    ],
)
@pytest.mark.few(100)
def test_files_of_a_batch_are_in_the_order_of_their_dates_and_numbers(pattern: str, paths: list[str]) -> None:
    listed = sorted(paths)
    assert sorted(listed, key=lambda path: arrival_order(path, pattern)) == paths


def test_order_of_files_is_that_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch keeps its winners whatever is done again, also if its files were ranked in another way than today."""
    Path("lakeupsert.toml").write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed/t"\nlanding_dates = "%d-%m-%Y"\nkey = ["id"]\n'
        'partition_by = ["day"]\n'
    )

    def land_both(id_: str) -> None:
        for day, price in (("31-01-2021", "old"), ("01-02-2021", "new")):
            path = Path("landing", day, f"{id_}.csv")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"id,day,price\n{id_},2024-03-01,{price}\n")

    table = Table.open("lakeupsert.toml")
    with monkeypatch.context() as then:
        then.setattr(discover, "arrival_order", lambda path, pattern: path)
        land_both("a")
        table.run(host="local", workers=1)
    land_both("b")
    table.run(host="local", workers=1)
    seen = [{"a": "old", "b": "new"}]
    proved = table.reconcile(deep=True)
    assert all(p.balanced for p in proved.proof)
    table.reprocess(source="landing", host="local", workers=1)
    seen.append({r["id"]: r["price"] for r in table.to_arrow().read_all().to_pylist()})
    assert seen[1] == seen[0]
