"""`Table` as an object: what it shows of itself, its schema and snapshot, `with`, and `columns=` of every reader."""

import inspect
import pickle
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any
from xml.etree import ElementTree

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import ConfigurationError, DamagedTableError, LakeupsertError, Table
from lakeupsert.config import DeleteSettings, GroupSettings, TableSettings
from lakeupsert.read.view import View
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import TableObjects
from tests.harness.spark import collect

DAYS = [date(2020, 1, 1) + timedelta(days=n) for n in range(20)]
NAME = '<b>&na"me'


def rows(ts: int, days: Sequence[date] = DAYS) -> pa.Table:
    number = len(days)
    return pa.table(
        {"k": range(number), "day": days, NAME: [ts] * number, "v": pa.nulls(number, pa.string()), "ts": [ts] * number}
    )


def opened(folder: Path, **settings: Any) -> Table:
    given: dict[str, Any] = {"key": ("k",), "partition_by": ("day",), "order_by": ("ts",), "history": True}
    zones = {"landing": str(folder / "landing"), "processed": str(folder / "processed")}
    return Table("sales", TableSettings(**{**zones, **given, **settings}))


def land(folder: Path, table: pa.Table, name: str) -> None:
    (folder / "landing").mkdir(exist_ok=True)
    pq.write_table(table, folder / "landing" / name)


@pytest.fixture(scope="module")
def nights(module_folder: Path) -> Path:
    """Two nights."""
    with opened(module_folder) as table:
        for ts, days in ((1, DAYS), (2, DAYS[:5])):
            land(module_folder, rows(ts, days), f"{ts}.parquet")
            table.run(host="local", workers=1)
    return module_folder


@pytest.fixture
def table(nights: Path, tmp_path: Path) -> Table:
    """A copy of them."""
    shutil.copytree(nights, tmp_path, dirs_exist_ok=True)
    return opened(tmp_path)


def test_snapshot_is_in_figures(table: Table, tmp_path: Path) -> None:
    shown = table.snapshot
    assert shown is not None
    assert (shown.number, shown.rows, shown.partitions) == (1, 20, 20)
    assert shown.batch == table.status().batch
    assert timedelta(0) < datetime.now(UTC) - shown.published_at < timedelta(minutes=5)
    assert opened(tmp_path / "other").snapshot is None


def test_schema_is_what_readers_see(table: Table, tmp_path: Path) -> None:
    assert table.schema == table.to_arrow().schema
    land(tmp_path, rows(3).append_column("more", pa.array(["x"] * 20)), "3.parquet")
    table.append(host="local")
    assert "more" not in table.schema.names
    table.run(host="local", workers=1)
    assert "more" in table.schema.names
    with pytest.raises(ConfigurationError) as missing:
        _ = opened(tmp_path / "other").schema
    assert missing.value.code == "no-table-yet"


def test_table_shows_figures_and_columns_and_reads_no_manifest_for_it(table: Table, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "processed/_lakeupsert/partitions")
    for folder in (tmp_path / "processed").glob("day=*"):
        shutil.rmtree(folder)
    before = table.requests
    text, page = repr(table), table._repr_html_()
    after = table.requests
    assert sum(after.values()) - sum(before.values()) < 20
    assert ElementTree.fromstring(page.replace("<br>", "<br/>")).tag == "div"
    seen = "".join(ElementTree.fromstring(page.replace("<br>", "<br/>")).itertext())
    for shown in (text, seen):
        assert all(
            part in shown for part in ("sales", str(tmp_path / "processed"), "snapshot 1", "20 rows", "20 partitions")
        )
        assert all(part in shown for part in (NAME, "date32[day]", "partition", "key", "order"))
    assert re.search(rf"(?m)^  {re.escape(NAME)} +int64$", text)


def test_what_can_not_be_read_is_shown_and_not_raised(table: Table, tmp_path: Path) -> None:
    assert "no-table-yet" in repr(opened(tmp_path / "other"))
    shutil.rmtree(tmp_path / "processed/_lakeupsert/spec")
    with pytest.raises(DamagedTableError) as damaged:
        _ = table.schema
    for shown in (repr(table), table._repr_html_()):
        assert damaged.value.code in shown


def test_before_the_first_publish_the_columns_are_those_of_the_batch(tmp_path: Path) -> None:
    land(tmp_path, rows(1), "1.parquet")
    table = opened(tmp_path)
    table.append(host="local")
    assert table.snapshot is None
    assert table.schema.names == [*rows(1).column_names]
    assert "date32" in repr(table)


def test_table_goes_to_another_process(table: Table, tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(opened(tmp_path))).to_arrow().read_all() == table.to_arrow().read_all()


def test_with_closes_the_queue(table: Table, tmp_path: Path) -> None:
    def open_queues() -> list[str]:
        paths = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return [path for path in paths if path.startswith(f"{tmp_path}/processed/_lakeupsert/queue.sqlite")]

    table.close()
    assert not open_queues()
    with opened(tmp_path) as again:
        again.dedupe()
        assert open_queues()
    assert not open_queues()


def values(found: Any) -> list[tuple[object, ...]]:
    return sorted(map(tuple, (row.values() for row in found.to_pylist())), key=repr)


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("columns", [["ts"], ["v", "day"], ["day"], ["ts", NAME, "k"]], ids=str)
def test_columns_of_every_reader(strategy: str, columns: list[str], tmp_path: Path) -> None:
    table = opened(tmp_path, strategy=strategy)
    for ts in (1, 2):
        land(tmp_path, rows(ts, [DAYS[0], *DAYS[: 20 - ts * 9]]), f"{ts}.parquet")
        table.run(host="local", workers=1)
    expected = table.to_arrow().read_all().select(columns)
    assert table.to_arrow(columns=columns).read_all() == expected, "in the order of a key that is not shown"
    assert table.to_pandas(columns=columns).equals(expected.to_pandas())
    assert values(table.to_polars(columns=columns).collect().to_arrow()) == values(expected)
    relation = table.to_duckdb(duckdb.connect(), columns=columns)
    assert relation.columns == columns
    assert values(relation.to_arrow_table()) == values(expected)
    filtered = table.to_arrow(where="ts = 2", columns=columns).read_all()
    assert filtered == table.to_arrow(where="ts = 2").read_all().select(columns)


def test_columns_of_a_history(table: Table) -> None:
    whole = table.to_arrow(history=True).read_all()
    chosen = table.to_arrow(history=True, columns=["valid_to", "k"], where="valid_from = 1").read_all()
    assert chosen == table.to_arrow(history=True, where="valid_from = 1").read_all().select(["valid_to", "k"])
    assert 0 < chosen.num_rows < whole.num_rows


def test_columns_in_spark(table: Table, spark: Any) -> None:
    frame = table.to_spark(spark, where="ts = 2", columns=["v", "k"])
    assert values(collect(frame)) == values(table.to_arrow(where="ts = 2", columns=["v", "k"]).read_all())
    assert table.to_spark(spark, history=True, columns=["valid_to", "k"]).columns == ["valid_to", "k"]


@pytest.mark.few(2)
@pytest.mark.parametrize("reader", ["arrow", "duckdb", "polars", "pandas"])
@pytest.mark.parametrize("columns", [["k", "nope"], "k"])
def test_columns_that_are_not_there_are_refused_at_once(reader: str, columns: Any, table: Table) -> None:
    with pytest.raises(ConfigurationError) as refused:
        getattr(table, f"to_{reader}")(columns=columns)
    assert refused.value.code == "unknown-column"
    assert repr(columns if columns == "k" else "nope") in refused.value.message


class Far(LocalStore):
    """A folder as a remote store that answers for a manifest only when it is asked for four of them at once."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.four = Barrier(4, timeout=60)

    def uri(self, name: str = "") -> str:
        return f"far://{super().uri(name)}"

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        if "/partitions/" in name:
            self.four.wait()
        return super().get(name, part)


def test_manifests_of_a_remote_table_are_read_side_by_side(table: Table) -> None:
    far = TableObjects(Far(table.settings.processed))
    listed = [file.name for file in View.open(far, table.objects.spec()).files()]
    assert listed == [file.name for file in table.files()]


# ---------------------------------------------------------------- by its folder, without a configuration

GROUP = {"g": GroupSettings(order_by=("ts",), columns=(NAME,))}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"partition_by": ("bucket(3, k) as b",), "versions": True},
    {"partition_by": ("month(day) as m",), "order_by": ("ts desc nulls last", "v asc")},
    {"partition_by": (), "ties": "content", "history": False},
    {"history": False, "mode": "columns", "order_by": ("n",), "groups": GROUP},
    {"key_scope": "table", "history": False},
    {"delete": DeleteSettings(column=NAME, values=("9",))},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ",".join(one) or "none")
def test_table_opened_by_its_folder_reads_the_same(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = opened(tmp_path, **settings)
    for ts in (1, 2, 3):
        land(
            tmp_path, rows(ts, DAYS[: 20 - ts * 6]).append_column("n", pa.array([ts] * (20 - ts * 6))), f"{ts}.parquet"
        )
        written.run(host="local", workers=1) if ts < 3 else written.append(host="local")
    monkeypatch.chdir(tmp_path)
    more = () if settings else (Path("processed"), f"{tmp_path}/processed/", (tmp_path / "processed").as_uri())
    for address in ("processed", *more):
        read = Table.open(address)
        for snapshot in ("published", "latest", 0):
            assert read.to_arrow(snapshot).read_all() == written.to_arrow(snapshot).read_all()
        assert read.snapshot == written.snapshot
        assert values(read.query("from processed").read_all()) == values(written.query("from sales").read_all())
    assert Table.open("processed", "sales").explain({"k": 0}) == written.explain({"k": 0})


def test_table_opened_by_its_folder_is_read_only(table: Table, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    read = Table.open(tmp_path / "processed")
    calls = [
        read.run, read.append, read.dedupe, read.publish, read.vacuum, read.compact, read.reconcile, read.status, read.report,
        read.plan, read.adopt, read.reprocess, lambda: read.delete(where="k = 1", dry=False), lambda: read.tag("x"),
        lambda: read.update({"v": "'x'"}, where="k = 1", dry=False), lambda: read.restore(0, dry=False),
        lambda: read.rename_column("v", "w"), lambda: read.drop_column("v"), lambda: read.retype_column("v", "int"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigurationError) as refused:
            call()
        assert refused.value.code == "opened-by-folder"
    assert sorted(tmp_path.rglob("*")) == before
    assert read.export(tmp_path / "out.parquet") == 20


def test_folder_that_is_no_table_is_told(table: Table, tmp_path: Path) -> None:
    def code(address: Path, **options: str) -> str:
        with pytest.raises(LakeupsertError) as refused:
            Table.open(address, **options)
        return refused.value.code

    assert code(tmp_path) == code(tmp_path / "landing") == "no-table-yet"
    assert code(tmp_path / "nowhere") == "no-configuration"
    assert code(tmp_path / "processed", profile="prod") == "bad-setting"
    shutil.rmtree(tmp_path / "processed/_lakeupsert/spec")
    assert code(tmp_path / "processed") == "missing-version"


def test_pandas_takes_a_snapshot_first_as_other_readers_do(table: Table) -> None:
    for snapshot in (0, 1, table.snapshot.published_at if table.snapshot else 0):
        assert table.to_pandas(snapshot).equals(table.to_arrow(snapshot).read_pandas())


# ---------------------------------------------------------------- what a query returns


def test_result_of_a_query_shows_rows_and_keeps_them(table: Table) -> None:
    for limit, more in ((3, False), (20, False), (50, True)):
        sql = f"select k from sales, range({2 if more else 1}) order by k limit {limit}"
        result = table.query(sql)
        text = repr(result)
        assert "int64" in text
        assert ("read_all()" in text) == more
        assert repr(result) == text
        assert result.read_all() == table.query(sql).read_all()
    assert pl.DataFrame(table.query("select k from sales")).height == 20
    assert pa.table(table.query("select k from sales")).num_rows == 20
    with table.query("select 1 as n where false") as empty:
        assert "n" in repr(empty)
        assert empty.read_pandas().empty


def test_integer_beside_text_is_its_digits_in_every_filter(tmp_path: Path) -> None:
    """As a key of a CSV file is text."""
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing/1.csv").write_text("id,n,é\n" + "".join(f"{id_},7,é\n" for id_ in ("1", "01", "-2", "A17")))
    table = opened(tmp_path, key=("id",), partition_by=(), order_by=("received",), history=False)
    table.run(host="local", workers=1)
    for where, ids in {
        "id = 1": ["1"],
        "é = 'é' and 1 = id": ["1"],
        "id <> 1": ["-2", "01", "A17"],
        "id in (1, -2, 3)": ["-2", "1"],
        "id not in (1, -2)": ["01", "A17"],
        "id = -2 and n = 7": ["-2"],
        "n = 7 and not (id = 1 or id = '01')": ["-2", "A17"],
    }.items():
        assert sorted(table.to_arrow(where=where).read_all()["id"].to_pylist()) == ids, where
        assert sorted(table.query(f"select id from sales where {where}").read_all()["id"].to_pylist()) == ids, where
    joined = "with other as (select 1 as id) select s.id from sales s, other o where s.id = 1 and o.id = 1"
    assert table.query(joined).read_all()["id"].to_pylist() == ["1"]
    for where in ("id < 1", "id between 1 and 2"):
        for read in (lambda w: table.to_arrow(where=w), lambda w: table.query(f"from sales where {w}")):
            with pytest.raises(ConfigurationError):
                read(where)


@pytest.mark.parametrize("name", ["append", "dedupe", "delete", "reprocess", "run", "update"])
def test_help_describes_every_option(name: str) -> None:
    """Those of a method are the fields of a dataclass, and its lines under Attributes."""
    method = getattr(Table, name)
    described = {
        one
        for line in re.findall(r"^    (\w+(?:, \w+)*):", inspect.getdoc(method) or "", re.M)
        for one in line.split(", ")
    }
    options = {*inspect.signature(method).parameters} - {"self", "progress"}
    assert options - {"selected"} <= described, options - described
    assert described <= {*options, "progress"}


def test_unknown_option_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    table = opened(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="wokers"):
        table.run(wokers=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError) as refused:
        table.run(host="laptop")  # type: ignore[arg-type]
    assert refused.value.code == "unknown-word"
