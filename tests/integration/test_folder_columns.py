"""Columns that only the landing folders have: `day=2024-01-01/part.parquet` without a column `day`."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, Reading, ReadSettings, TableSettings
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.folders import folder_values
from lakeupsert.operations.init.propose import propose
from lakeupsert.pipeline.declared import Declaration

Rows = Sequence[Mapping[str, Any]]
DAY = date(2024, 1, 1)


def as_csv(rows: Rows) -> bytes:
    text = io.StringIO()
    written = csv.DictWriter(text, list(rows[0]))
    written.writeheader()
    written.writerows(rows)
    return text.getvalue().encode()


def as_json(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_events(rows: Rows) -> bytes:
    return as_json([{"before": None, "after": row, "op": "c", "source": {}, "ts_ms": 1} for row in rows])


def as_parquet(rows: Rows) -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue().to_pybytes()


def as_orc(rows: Rows) -> bytes:
    file = io.BytesIO()
    orc.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def as_avro(rows: Rows) -> bytes:
    types = [{"name": n, "type": "string" if isinstance(v, str) else "long"} for n, v in rows[0].items()]
    file = io.BytesIO()
    fastavro.writer(file, {"type": "record", "name": "r", "fields": types}, list(rows))
    return file.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "csv": (".csv", as_csv),
    "jsonl": (".jsonl", as_json),
    "events": (".jsonl", as_events),
    "parquet": (".parquet", as_parquet),
    "orc": (".orc", as_orc),
    "avro": (".avro", as_avro),
}
USES: dict[str, dict[str, Any]] = {
    "partition": {"partition_by": ("day",)},
    "source": {"partition_by": ("month(day) as m",), "schema": {"day": "date"}},
    "key": {"key": ("k", "day"), "schema": {"day": "date"}},
    "order": {"order_by": ("day",)},
    "type": {"schema": {"day": "date"}},
}


def opened(root: Path, kind: str, **settings: Any) -> Table:
    given = {"key": ("k",), "partition_by": (), "order_by": ("v",), "quarantine_limit": "100%", **settings}
    if kind == "events":
        given["read"] = ReadSettings(envelope="debezium")
    return Table("t", TableSettings(landing=str(root / "landing"), processed=str(root / "processed"), **given))


def land(root: Path, folder: str, kind: str, rows: Rows, name: str = "part") -> None:
    ending, write = FORMATS[kind]
    path = root / "landing" / folder / (name + ending)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write(rows))


def shown(table: Table, *names: str) -> list[tuple[Any, ...]]:
    rows = table.to_arrow().read_all().select(list(names)).to_pylist()
    return sorted(tuple(row.values()) for row in rows)


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", FORMATS)
def test_folder_gives_its_column(tmp_path: Path, kind: str, use: str, mode: str) -> None:
    table = opened(tmp_path, kind, mode=mode, **USES[use])
    land(tmp_path, "a/day=2024-01-01", kind, [{"k": "a", "v": 1}, {"k": "b", "v": 2}])
    table.run()
    assert shown(table, "k", "v", "day") == [("a", 1, DAY), ("b", 2, DAY)]
    land(tmp_path, "b/day=2024-02-01", kind, [{"k": "b", "v": 3}])
    land(tmp_path, "b/day=2024-02-01", kind, [{"k": "b", "v": 3}], "other")
    table.run()
    later = ("b", 3, date(2024, 2, 1))
    keeps = use in ("partition", "source", "key")
    assert shown(table, "k", "v", "day") == sorted([("a", 1, DAY), later, *([("b", 2, DAY)] if keeps else [])])
    table.reprocess(source="landing", host="local", workers=1)
    assert shown(table, "k", "v", "day") == sorted([("a", 1, DAY), later, *([("b", 2, DAY)] if keeps else [])])
    assert not table.reconcile(deep=True).unbalanced
    assert not table.quarantine().read_all().num_rows


@pytest.mark.parametrize("kind", FORMATS)
def test_value_that_does_not_fit_goes_to_quarantine_and_passes_when_the_type_is_mended(
    tmp_path: Path, kind: str
) -> None:
    table = opened(tmp_path, kind, schema={"day": "date"})
    land(tmp_path, "day=2024-01-01", kind, [{"k": "a", "v": 1}])
    land(tmp_path, "day=soon", kind, [{"k": "b", "v": 2}])
    table.run()
    assert shown(table, "k", "day") == [("a", DAY)]
    [refused] = table.quarantine().read_all().to_pylist()
    assert (refused["reason_code"], "day" in refused["raw"]) == ("bad_type", False)
    assert "'soon'" in refused["reason"]
    assert not table.reconcile(deep=True).unbalanced
    table = opened(tmp_path, kind)  # as the error of a retype under another type says
    table.retype_column("day", "string")
    table.update({"day": "'2024-01-02'"}, where="k = 'a'", dry=False)  # the newest entry says nothing of landing files
    table = opened(tmp_path, kind)
    table.append(replay_quarantine=True)
    table.run()
    assert shown(table, "k", "day") == [("a", "2024-01-02"), ("b", "soon")]


@pytest.mark.parametrize("kind", FORMATS)
def test_value_of_the_file_counts_more_and_folders_that_nobody_names_give_nothing(tmp_path: Path, kind: str) -> None:
    table = opened(tmp_path, kind, partition_by=("day",), schema={"day": "date"})
    land(tmp_path, "dt=2024-05-05/DAY=2024-01-01", kind, [{"k": "a", "v": 1, "day": "2024-03-03"}])
    land(tmp_path, "dt=2024-05-05/DAY=2024-01-01", kind, [{"k": "b", "v": 1}], "lacks")
    appended = table.run().append
    assert appended is not None
    assert appended.entry.contrary == {"day": 1}
    [warning] = appended.warnings
    assert "'day': 1 row" in warning
    assert warning in table.status().warnings
    assert shown(table, "k", "day") == [("a", date(2024, 3, 3)), ("b", DAY)]
    assert "dt" not in table.schema.names
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize("kind", FORMATS)
def test_escaped_and_null_values_and_a_column_of_all_types(tmp_path: Path, kind: str) -> None:
    table = opened(tmp_path, kind, key=("k", "p"), schema={"n": "string"})
    for i, (p, n) in enumerate([("x%20y", "__HIVE_DEFAULT_PARTITION__"), ("7", "a%3Db")]):
        land(tmp_path, f"p={p}/n={n}", kind, [{"k": "a", "v": i}])
    land(tmp_path, "p=__HIVE_DEFAULT_PARTITION__", kind, [{"k": "c", "v": 1}])
    table.run()
    assert shown(table, "p", "n", "v") == [("7", "a=b", 1), ("x y", None, 0)]
    assert table.quarantine().read_all()["reason_code"].to_pylist() == ["null_key"]
    assert not table.reconcile(deep=True).unbalanced


def test_types_of_several_folders_are_one_type(tmp_path: Path) -> None:
    for kind in ("csv", "parquet"):
        root = tmp_path / kind
        table = opened(root, kind, partition_by=("hour",))
        for hour in ("07", "10"):
            land(root, f"hour={hour}", kind, [{"k": "a", "v": 1}])
        table.run()
        assert shown(table, "hour") == [("07",), ("10",)], kind


def test_a_delete_by_its_folder_and_an_arrival_folder_of_a_stamped_table(tmp_path: Path) -> None:
    table = opened(tmp_path, "csv", order_by=("loaded",))
    land(tmp_path, "", "csv", [{"k": "a", "v": 1}])
    table.run()
    land(tmp_path, "loaded=2024-01-01", "csv", [{"k": "b", "v": 1}])
    table.run()
    assert shown(table, "k") == [("a",), ("b",)]  # arrival decides in this table, for good
    assert not table.reconcile(deep=True).unbalanced


def test_plan_counts_rows_by_folder(tmp_path: Path) -> None:
    for kind in FORMATS:
        for key, by, partition in (("k", ("day",), "day=2024-01-01"), ("day", (), "whole-table")):
            root = tmp_path / kind / key
            table = opened(root, kind, key=(key,), partition_by=by)
            land(root, "day=2024-01-01", kind, [{"k": "a", "v": 1}, {"k": "b", "v": 2}])
            planned = table.plan()
            assert (planned.rows, [p.partition for p in planned.partitions]) == (2, [partition]), (kind, key)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "avro"])
def test_batches_are_read_again_as_they_were(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    land(tmp_path, "day=2024-01-01", kind, [{"k": "a", "v": 1}])
    with monkeypatch.context() as earlier:
        earlier.setattr(Declaration, "folder_columns", ())
        opened(tmp_path, kind, schema={"day": "date"}).run()
    land(tmp_path, "day=2024-01-02", kind, [{"k": "b", "v": 1}])
    table = opened(tmp_path, kind, schema={"day": "date"})
    table.run()
    table.reprocess(source="landing", host="local", workers=1)
    assert shown(table, "k", "day") == [("a", None), ("b", date(2024, 1, 2))]
    assert not table.reconcile(deep=True).unbalanced


def test_names_of_folders_follow_aliases_and_their_case_and_the_file_is_no_folder() -> None:
    reading = Reading(folders=("Day",), aliases={"tag": "day"}, null=("NA",))
    assert folder_values("day=2024-01-01/a.csv", Reading()) == {}
    assert folder_values("tag=1/b=2/a.csv", reading) == {"Day": "1"}
    assert folder_values("day=1/x/DAY=NA/a.csv", reading) == {"Day": None}
    assert folder_values("a/day=1.csv", reading) == {}


@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_blocks_do_not_decide_whose_value_counts(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON lines each row decides, wherever the file is cut."""
    rows = [
        {"k": str(i), "v": 1, **({"day": None} if i == 3 else {"day": "2024-05-05"} if i % 2 else {})} for i in range(8)
    ]
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 40)
    table = opened(tmp_path, "jsonl", mode=mode, schema={"day": "date"})
    land(tmp_path, "day=2024-01-01", "jsonl", rows)
    table.run()
    days = [DAY, date(2024, 5, 5), DAY, None, DAY, date(2024, 5, 5), DAY, date(2024, 5, 5)]
    assert shown(table, "k", "day") == list(zip("01234567", days, strict=True))
    assert not table.reconcile(deep=True).unbalanced


def test_folder_of_arrival_gives_nothing_that_a_row_may_leave_out(tmp_path: Path) -> None:
    """In mode columns such a row keeps its value. A folder of arrival may name another day than the row."""
    for scope, by, day in (("table", ("day",), date(2024, 3, 3)), ("partition", (), date(2024, 3, 3))):
        root = tmp_path / scope
        settings = {"mode": "columns", "key_scope": scope, "schema": {"day": "date"}, "partition_by": by}
        table = opened(root, "jsonl", landing_dates="day=%Y-%m-%d", **settings)
        land(root, "day=2024-01-01", "jsonl", [{"k": "a", "v": 1, "day": "2024-03-03"}])
        table.run()
        land(root, "day=2024-01-02", "jsonl", [{"k": "a", "v": 2}])
        table.run()
        assert shown(table, "k", "v", "day") == [("a", 2, day)]
        assert not table.status().warnings
    needed = opened(tmp_path / "by", "jsonl", mode="columns", partition_by=("day",), landing_dates="day=%Y-%m-%d")
    land(tmp_path / "by", "day=2024-01-01", "jsonl", [{"k": "a", "v": 1}])
    needed.run()
    assert shown(needed, "k", "day") == [("a", DAY)]


@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_delete_by_key_alone_is_of_its_folder_or_of_its_key(tmp_path: Path, mode: str) -> None:
    for scope, left in (("partition", [("b", DAY)]), ("table", [])):
        root = tmp_path / scope
        rule = DeleteSettings(column="op", values=("D",))
        table = opened(root, "csv", mode=mode, key_scope=scope, partition_by=("day",), delete=rule)
        land(root, "day=2024-01-01", "csv", [{"k": key, "v": 1, "op": "U"} for key in "ab"])
        table.run()
        land(root, "day=2024-01-01", "csv", [{"k": "a", "v": 2, "op": "D"}], "deletes")
        land(root, "day=1970-01-01", "csv", [{"k": "b", "v": 2, "op": "D"}])
        table.run()
        assert shown(table, "k", "day") == left
        assert not table.reconcile(deep=True).unbalanced


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_hosts_and_engines_agree(tmp_path: Path, mode: str) -> None:
    found = []
    for host, engine, workers in (("local", "arrow", 1), ("local", "arrow", 2), ("spark", "spark", None)):
        root = tmp_path / f"{host}-{workers}"
        table = opened(root, "csv", mode=mode, key=("k", "p"), partition_by=("day",), schema={"day": "date"})
        for night in (1, 2):
            for kind in ("csv", "jsonl", "parquet", "orc", "avro"):
                for p in ("x%20y", "__HIVE_DEFAULT_PARTITION__"):
                    for day in ("2024-01-01", "soon"):
                        land(root, f"p={p}/day={day}", kind, [{"k": kind, "v": night}], f"{night}")
                own = [{"k": kind, "v": night, "p": "", "day": "2024-01-03"}]
                land(root, "p=7/day=2024-01-01", kind, own, f"{night}")
            entry = table.run(host=host, engine=engine, workers=workers).append.entry
        found.append((shown(table, "k", "p", "v", "day"), entry.quarantined, entry.contrary, entry.rows_read))
        assert not table.reconcile(deep=True).unbalanced
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 9  # CSV has no empty text


def test_folder_keeps_its_column_after_a_rename_or_warns(tmp_path: Path) -> None:
    table = opened(tmp_path, "csv", schema={"day": "date"})
    land(tmp_path, "day=2024-01-01", "csv", [{"k": "a", "v": 1}])
    table.run()
    table.rename_column("day", "sold", dry=False)
    for i, aliases in enumerate(({}, {"day": "sold"})):
        table = opened(tmp_path, "csv", schema={"sold": "date"}, read=ReadSettings(aliases=aliases))
        land(tmp_path, "day=2024-01-02", "csv", [{"k": str(i), "v": 1}], str(i))
        appended = table.run().append
        assert appended is not None
        assert [('day = "sold"' in warning) for warning in appended.warnings] == ([] if aliases else [True])
    assert shown(table, "k", "sold") == [("0", None), ("1", date(2024, 1, 2)), ("a", DAY)]
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize("kind", ["csv", "jsonl", "avro"])
def test_init_proposes_the_folders_as_partitions(tmp_path: Path, kind: str) -> None:
    for day in (1, 2):
        rows = [{"k": f"{day}-{i}", "updated_at": f"2024-03-0{day}T00:00:0{i}", "v": i} for i in range(5)]
        land(tmp_path, f"region=eu/day=2024-01-0{day}", kind, rows)
    found = propose(str(tmp_path / "landing"))
    assert found.settings["partition_by"].value == ["region", "day"]
    types = {column.name: column.type for column in found.columns}
    assert (types["region"], types["day"]) == ("string", "date32[day]")
    assert found.settings["landing_dates"].value is None


def test_init_takes_days_for_days_of_arrival_if_rows_have_their_own_and_tells_of_other_folders(tmp_path: Path) -> None:
    for day in (1, 2):
        rows = [{"k": f"{day}-{i}", "sold_at": f"2024-03-0{day}T00:00:0{i}", "v": i} for i in range(5)]
        land(tmp_path, f"dt=2024-01-0{day}/region=eu", "csv", rows)
    found = propose(str(tmp_path / "landing"))
    assert found.settings["partition_by"].value == ["date(sold_at) as day"]
    assert found.settings["landing_dates"].value == "dt=%Y-%m-%d"
    assert [text for text in found.warnings if "region=" in text]
    assert not [text for text in found.warnings if "dt=" in text]
