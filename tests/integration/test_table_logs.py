"""A table of another format: its log says which files are live. It is not adopted, and as a landing zone it is warned of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.table_logs import likely_log_above, log_above, log_of
from lakeupsert.operations.init.propose import propose
from lakeupsert.storage import open_store
from tests.harness import servers

LOGS = {
    "Delta": "_delta_log/00000000000000000000.json",
    "Hudi": ".hoodie/hoodie.properties",
    "Iceberg": "metadata/v1.metadata.json",
    "lakeupsert": "_lakeupsert/ledger/v99999999999999999999.json",
}
PLACES = {"itself": "", "above": "../", "two above": "../../", "below": "below/", "in a partition": "day=2020-01-01/"}


def _lay(folder: Path) -> None:
    (folder / "day=2020-01-01").mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a"], "version": [1]}), folder / "day=2020-01-01" / "part-0.parquet")


def _log(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")


def _table(**zones: Path) -> Table:
    usual: dict[str, Any] = {"key": ("id",), "partition_by": ("day",), "order_by": ("version",)}
    return Table("t", TableSettings(**{zone: str(path) for zone, path in zones.items()}, **usual))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("format_", LOGS)
def test_such_a_folder_is_not_adopted(tmp_path: Path, format_: str, place: str) -> None:
    lake, landing = tmp_path / "a/b/lake", tmp_path / "landing"
    landing.mkdir()
    _lay(lake)
    _log(lake / PLACES[place], LOGS[format_])
    if (format_, place) == ("lakeupsert", "itself"):  # what an interrupted `adopt` may leave, or a table
        return
    with pytest.raises(ConfigurationError) as refused:
        _table(landing=landing, processed=lake).adopt()
    assert refused.value.code == "other-format"
    assert format_ in refused.value.message
    assert str((lake / PLACES[place]).resolve()) in unquote(refused.value.message)
    assert not (lake / "_lakeupsert/spec").exists()


@pytest.mark.parametrize("format_", LOGS)
def test_a_landing_zone_that_is_one_is_warned_of_everywhere(tmp_path: Path, format_: str) -> None:
    landing = tmp_path / "landing"
    landing.mkdir()
    pq.write_table(pa.table({"id": ["a"], "version": [1], "day": ["2020-01-01"]}), landing / "part-0.parquet")
    table = _table(landing=landing, processed=tmp_path / "lake")
    table.run(host="local")
    assert not [w for w in table.status().warnings if format_ in w]
    if format_ == "Iceberg":  # Table formats keep Avro and JSON there, which are landing files by their names.
        (landing / "metadata").mkdir()
    _log(landing, LOGS[format_])

    table = _table(landing=landing, processed=tmp_path / "lake")
    places = {
        "status": table.status().warnings,
        "doctor": [f.found for f in table.doctor() if f.check == "landing" and f.level == "warning"],
        "init": () if format_ == "lakeupsert" else propose(str(landing)).warnings,  # which it refuses
        "report": [table.report()],
    }
    pq.write_table(pa.table({"id": ["b"], "version": [1], "day": ["2020-01-01"]}), landing / "part-1.parquet")
    appended = table.append(host="local")
    assert appended is not None
    places["append"] = appended.warnings
    missing = [place for place, warnings in places.items() if not any(f"{format_} table" in w for w in warnings)]
    assert missing == (["init"] if format_ == "lakeupsert" else [])


@pytest.mark.parametrize("format_", LOGS)
def test_a_landing_zone_within_one_is_warned_of(tmp_path: Path, format_: str) -> None:
    landing = tmp_path / "t/data"
    landing.mkdir(parents=True)
    _log(tmp_path / "t", LOGS[format_])
    pq.write_table(pa.table({"id": ["a"], "version": [1], "day": ["2020-01-01"]}), landing / "part-0.parquet")
    table = _table(landing=landing, processed=tmp_path / "lake")
    ran = table.run(host="local")
    assert ran.append is not None
    for warnings in (ran.append.warnings, table.status().warnings):
        assert [w for w in warnings if f"{format_} table" in w]


def test_init_of_a_folder_within_one(tmp_path: Path) -> None:
    _lay(tmp_path / "t/data")
    _log(tmp_path / "t", LOGS["Iceberg"])
    assert any("Iceberg table" in warning for warning in propose(str(tmp_path / "t/data")).warnings)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("_delta_log/00000000000000000010.checkpoint.parquet", "_delta_log/"),
        ("a/b/_delta_log/_last_checkpoint", "a/b/_delta_log/"),
        ("t/.hoodie/metadata/.hoodie/hoodie.properties", "t/.hoodie/"),
        ("metadata/00000-1b.gz.metadata.json", "metadata/"),
        ("x/metadata/v1.metadata.json.gz", "x/metadata/"),
        ("metadata/people.json", None),
        ("metadata/a/b.metadata.json", None),
        ("my_delta_log/0.json", None),
        ("people.metadata.json", None),
    ],
)
def test_names_of_logs(name: str, place: str | None) -> None:
    found = log_of(name)
    assert (found.place if found else None) == place


def test_a_part_of_a_table_in_a_bucket(moto: servers.Server, new_place: Callable[[servers.Server], str]) -> None:
    place = new_place(moto)
    open_store(f"{place}/orders").create("_delta_log/00000000000000000000.json", b"{}")
    for address in (f"{place}/orders/day=2020-01-01", f"{place}/orders/a/b/"):
        found = log_above(address)
        assert found is not None
        assert found.place == f"{place}/orders/_delta_log"
    assert log_above(f"{place}/other/a") is None
    open_store(f"{place}/lines").create("metadata/v1.metadata.json", b"{}")
    for address in (f"{place}/orders/day=2020-01-01", f"{place}/lines/data/day=2020-01-01"):
        assert likely_log_above(address) == log_above(address)
    assert likely_log_above(f"{place}/other/data") is None
