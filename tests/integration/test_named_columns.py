"""A setting that names a column which no file has: refused in the first batch if it is a slip, told in later ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, LakeupsertError

HEADER = "id,day,version,at,price,is_deleted,carrier,shipped_at\n"
ROW = "a,2020-01-01,1,2020-01-01T10:00:00,1.5,N,x,2020-01-02T10:00:00\n"


class Feed:
    def __init__(self, root: Path, settings: str) -> None:
        self.root = root
        (root / "landing").mkdir()
        self.configure(settings)

    def configure(self, settings: str) -> None:
        for setting, usual in {"key": '["id"]', "partition_by": '["day"]', "order_by": '["version"]'}.items():
            settings = (
                settings
                if f"{setting} =" in settings.partition("[tables.t.")[0]
                else f"{setting} = {usual}\n{settings}"
            )
        (self.root / "lakeupsert.toml").write_text(
            f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\n{settings}'
        )
        self.table = Table.open(self.root / "lakeupsert.toml")

    def land(self, name: str, text: str) -> None:
        (self.root / "landing" / name).write_text(text)

    def call(self, *arguments: str) -> tuple[int, Any]:
        config = str(self.root / "lakeupsert.toml")
        done = CliRunner().invoke(main, [*arguments, "--config", config, "--json"])
        return done.exit_code, json.loads(done.stdout)

    def warnings(self, *arguments: str) -> list[str]:
        code, said = self.call(*arguments)
        assert code == 0, said
        return [w for w in said["warnings"] if "'" in w]


COMMANDS = [
    ("run", "--host", "local"),
    ("run", "--host", "local"),
    ("append", "--host", "local"),
    ("plan",),
    ("status",),
]
"""The first takes what landed, and the next two find nothing new."""
DELETED = '[tables.t.delete]\ncolumn = "{}"\nvalues = ["Y"]\n'
SLIPS = {
    "key": ('key = ["idd"]\n', "missing-column", "id"),
    "partition_by": ('partition_by = ["days"]\n', "missing-column", "day"),
    "partition_by, an expression": ('partition_by = ["date(att)"]\n', "missing-column", "at"),
    "order_by": ('order_by = ["versoin"]\n', "missing-column", "version"),
    "order_by with a direction": ('order_by = ["verson asc"]\n', "missing-column", "version"),
    "delete.column": (DELETED.format("isdeleted"), "missing-column", "is_deleted"),
    "delete.column, two letters": (DELETED.format("is_deletde"), "missing-column", "is_deleted"),
    "delete.column, kept": (DELETED.format("is_delete") + "keep = true\n", "missing-column", "is_deleted"),
    "groups, order_by": (
        'mode = "columns"\n[tables.t.groups.g]\norder_by = ["shiped_at"]\ncolumns = ["carrier"]\n',
        "missing-column",
        "shipped_at",
    ),
    "groups, columns": (
        'mode = "columns"\n[tables.t.groups.g]\norder_by = ["shipped_at"]\ncolumns = ["carier"]\n',
        "missing-column",
        "carrier",
    ),
}


@pytest.mark.parametrize(("settings", "code", "near"), SLIPS.values(), ids=SLIPS)
def test_slip_is_refused_in_the_first_batch_with_the_near_name(
    settings: str, code: str, near: str, tmp_path: Path
) -> None:
    feed = Feed(tmp_path, settings)
    feed.land("1.csv", HEADER + ROW)
    for command in ("plan",), ("run", "--host", "local"):
        exit_code, said = feed.call(*command)
        assert (exit_code, said["error"]["code"]) == (2, code)
        assert f"Did you mean {near!r}?" in said["error"]["message"]
    assert not feed.table.exists()


# What comes later, and what the first file has: names of columns that many tables have side by side.
SIDE_BY_SIDE = [
    ("address2", "address1"),
    ("price_2", "price_1"),
    ("col10", "col1"),
    ("name_en", "name_de"),
    ("name_en", "name_es"),
    ("tax_amount", "max_amount"),
    ("active", "inactive"),
    ("billing_street", "billing_street_2"),
    ("deleted", "deleted_at"),
    ("deleted", "selected"),
    ("is_active", "is_archived"),
]


@pytest.mark.parametrize(("later", "first"), SIDE_BY_SIDE)
@pytest.mark.parametrize("settings", ['[tables.t.schema]\n{} = "string"\n', DELETED], ids=["schema", "delete.column"])
def test_column_that_comes_with_later_files_may_be_called_nearly_as_another(
    settings: str, later: str, first: str, tmp_path: Path
) -> None:
    for one, other in ((later, first), (first, later)):
        root = tmp_path / one
        root.mkdir()
        feed = Feed(root, settings.format(one))
        feed.land("1.csv", f"id,day,version,{other}\na,2020-01-01,1,N\n")
        [warning] = feed.warnings(*COMMANDS[0])
        assert repr(one) in warning
        if settings != DELETED:
            assert repr(other) not in warning  # no slip of it
        feed.land("2.csv", f"id,day,version,{one}\na,2020-01-01,2,Y\n")
        assert feed.warnings(*COMMANDS[0]) == []


def test_slip_in_a_type_is_told_and_the_table_is_made(tmp_path: Path) -> None:
    feed = Feed(tmp_path, '[tables.t.schema]\nprices = "double"\n')
    feed.land("1.csv", HEADER + ROW)
    for command in ("plan",), ("run", "--host", "local"):
        [warning] = feed.warnings(*command)
        assert "Did you mean 'price'?" in warning


def test_slip_in_a_type_is_told_of_adopted_files(tmp_path: Path) -> None:
    feed = Feed(tmp_path, '[tables.t.schema]\nprices = "double"\n')
    folder = tmp_path / "processed/day=2020-01-01"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a"], "version": [1], "price": [1.5]}), folder / "a.parquet")
    [warning] = feed.warnings("adopt")
    assert "Did you mean 'price'?" in warning


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ("order_in_name = '_(\\d+)\\.'\norder_by = ['seq']\n", "no-readable-file"),
        ('format = "jsonl"\n[tables.t.read]\nenvelope = "debezium"\n', "no-envelope"),
        ('format = "jsonl"\n[tables.t.read]\nenvelope = "dms"\n', "no-envelope"),
    ],
)
def test_file_that_is_not_as_a_setting_says_makes_no_table(settings: str, code: str, tmp_path: Path) -> None:
    feed = Feed(tmp_path, settings)
    feed.land("1.jsonl", '{"id": "a", "day": "2020-01-01", "version": 1}\n')
    with pytest.raises(LakeupsertError) as caught:
        feed.table.run(host="local")
    assert caught.value.code == code
    assert not feed.table.exists()


@pytest.mark.parametrize(
    ("line", "envelope"),
    [
        ({"before": None, "after": {"id": "a"}, "source": {"lsn": 1}, "op": "c"}, "debezium"),
        ({"schema": {}, "payload": {"after": {"id": "a"}}}, "debezium"),
        ({"data": {"id": "a"}, "metadata": {"operation": "load"}}, "dms"),
    ],
)
def test_envelope_that_is_not_set_is_proposed(line: object, envelope: str, tmp_path: Path) -> None:
    feed = Feed(tmp_path, "")
    feed.land("1.jsonl", json.dumps(line))
    with pytest.raises(ConfigurationError) as caught:
        feed.table.run(host="local")
    assert caught.value.code == "missing-column"
    assert f'envelope = "{envelope}"' in caught.value.message


def test_column_that_nothing_is_near_to_is_told_in_every_batch_until_a_file_has_it(tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("op"))
    for night in range(3):
        feed.land(f"{night}.csv", HEADER + ROW)
        for command in COMMANDS:
            [warning] = feed.warnings(*command)
            assert "'op'" in warning
            assert "batch 1 " in warning
    feed.land("3.csv", "id,day,version,OP\na,2020-01-01,2,Y\n")
    for command in COMMANDS:
        assert feed.warnings(*command) == []
    assert feed.table.to_arrow().read_all().num_rows == 0
    feed.land("4.csv", HEADER + ROW)  # some files of the feed have it
    for command in COMMANDS:
        assert feed.warnings(*command) == []


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_one_file_with_the_column_is_enough(kind: str, tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("op"))
    feed.land("1.csv", "id,day,version\na,2020-01-01,1\n")
    assert len(feed.warnings(*COMMANDS[0])) == 1
    feed.land("2.csv", "id,day,version\na,2020-01-01,1\n\n")
    row = {"id": "b", "day": "2020-01-01", "version": 1, "op": None}
    if kind == "parquet":
        types = pa.schema([("id", "string"), ("day", "string"), ("version", "int64"), ("op", "string")])
        pq.write_table(pa.Table.from_pylist([row], types), tmp_path / "landing/2.parquet")
    else:
        feed.land(f"3.{kind}", json.dumps(row) if kind == "jsonl" else "id,day,version,op\nb,2020-01-01,1,\n")
    assert feed.warnings(*COMMANDS[0]) == []


def test_later_batch_of_a_slip_names_the_near_column(tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("deleted"))
    feed.land("1.csv", "id,day,version\na,2020-01-01,1\n")
    assert len(feed.warnings(*COMMANDS[0])) == 1
    feed.land("2.csv", HEADER + ROW)
    for command in COMMANDS:
        [warning] = feed.warnings(*command)
        assert "Did you mean 'is_deleted'?" in warning


def test_batch_without_a_row_says_nothing(tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("op") + '[tables.t.schema]\nday = "date"\nversion = "bigint"\n')
    feed.land("1.csv", "id,day,version\n")
    assert not any("'op'" in w for command in COMMANDS for w in feed.warnings(*command))


def test_near_column_may_be_another_one(tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("deleted") + '[tables.t.schema]\ndeleted = "string"\n')
    feed.land("1.csv", HEADER + ROW)
    assert len(feed.warnings(*COMMANDS[0])) == 1
    feed.land("2.csv", "id,day,version,deleted\na,2020-01-01,2,Y\n")
    assert feed.warnings(*COMMANDS[0]) == []
    assert feed.table.to_arrow().read_all().num_rows == 0
    assert "deleted" not in feed.table.to_arrow().schema.names


def test_types_of_columns_that_come_later(tmp_path: Path) -> None:
    feed = Feed(tmp_path, '[tables.t.schema]\nprices = "double"\nprice = "double"\ncolour = "string"\n')
    feed.land("1.csv", HEADER + ROW)
    told = feed.warnings(*COMMANDS[0])
    assert sorted(name for name in ("prices", "price", "colour") if any(f"'{name}'" in w for w in told)) == [
        "colour",
        "prices",
    ]
    feed.land("2.csv", HEADER + ROW)
    assert feed.warnings(*COMMANDS[0]) == []


def test_slip_in_a_type_that_is_given_later_is_told(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "")
    feed.land("1.csv", HEADER + ROW)
    assert feed.warnings(*COMMANDS[0]) == []
    feed.configure('[tables.t.schema]\nprices = "double"\nlater = "string"\n')
    feed.land("2.csv", HEADER + ROW)
    [warning] = feed.warnings(*COMMANDS[0])
    assert "Did you mean 'price'?" in warning


def test_own_stamp_is_not_among_the_columns_that_were_found(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 'key = ["nothing"]\norder_by = ["record_timestamp"]\n')
    feed.land("1.csv", HEADER + ROW)
    with pytest.raises(ConfigurationError) as caught:
        feed.table.run(host="local")
    assert caught.value.code == "missing-column"
    assert "record_timestamp" not in caught.value.message


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_spark_looks_for_the_column_too(tmp_path: Path) -> None:
    feed = Feed(tmp_path, DELETED.format("op"))
    feed.land("1.csv", HEADER + ROW)
    first = feed.table.append(host="spark")
    feed.land("2.csv", "id,day,version,op\na,2020-01-01,2,Y\n")
    second = feed.table.append(host="spark")
    assert first is not None
    assert second is not None
    assert (first.entry.operations, second.entry.operations) == (False, True)
