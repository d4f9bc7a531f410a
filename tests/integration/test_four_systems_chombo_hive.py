"""The examples of chombo and of Hive as a database, by the files of these systems: chombo's `bumu.properties` and product feed,
unpartitioned, and the CREATE TABLE statements of the sell tables. `init` reads them; nights follow what it wrote."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main

BUMU = r"""field.delim.regex=,
field.delim=,
debug.on=true
num.reducer=1
mapreduce.map.maxattempts=2
mapreduce.reduce.maxattempts=2

#RecordSetBulkMutator
#rsbm.op.code.field.ordinal=4
rsbm.deleted.op.code=D
rsbm.deleted.record.file.prefix=del
rsbm.temporal.ordering.field.ordinal=5
rsbm.temporal.ordering.field.numeric=true
rsbm.id.field.ordinals=0
"""
MASTER = """VR8NCNE7DV,electronics,acme,45.50,88,1427766458
K1Q0MB22TL,electronics,zenith,12.00,7,1427766458
9TT3HHW0PX,garden,acme,3.25,140,1427766458
"""
UPSERTS = """VR8NCNE7DV,electronics,acme,45.50,85,1428000000
VR8NCNE7DV,electronics,acme,45.50,82,1428415316
M4UN1D6RZA,garden,zenith,8.00,20,1428415316
9TT3HHW0PX,garden,acme,3.25,1,1427000000
"""
DELETES = """K1Q0MB22TL,electronics,zenith,12.00,7,1428415316
NEVERTHERE,garden,acme,1.00,1,1428415316
"""
SELL = """CREATE EXTERNAL TABLE test.sell_stage (
  sell_id BIGINT, acct_id BIGINT, change_ts STRING, create_ts STRING, payment_type_id INT, status_id STRING,
  total_amt DOUBLE, batch INT, op_code STRING, store_id STRING, create_date STRING)
ROW FORMAT DELIMITED FIELDS TERMINATED BY ','
STORED AS TEXTFILE
LOCATION 'LANDING';

CREATE TABLE test.sell (
  sell_id BIGINT, acct_id BIGINT, change_ts STRING, create_ts STRING, payment_type_id INT, status_id STRING,
  total_amt DOUBLE, batch INT, op_code STRING)
PARTITIONED BY (store_id STRING, create_date STRING, version_id INT)
SORTED BY (sell_id)
ROW FORMAT SERDE 'org.apache.hadoop.hive.serde2.columnar.ColumnarSerDe'
STORED AS INPUTFORMAT 'org.example.RCFileInputFormat' OUTPUTFORMAT 'org.example.RCFileOutputFormat'
TBLPROPERTIES ('op_code_column' = 'op_code', 'version_id_column' = 'version_id', 'primary_key_columns' = 'sell_id');

CREATE VIEW test.sell_stage_view AS SELECT *, 7 AS version_id FROM test.sell_stage;
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def land(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def rows(*names: str) -> list[tuple[object, ...]]:
    with Table.open("lakeupsert.toml") as table:
        found = table.to_arrow().read_all().to_pylist()
        assert not table.reconcile(deep=True).unbalanced
    return sorted(tuple(row[name] for name in names) for row in found)


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_products_of_chombo_by_its_own_properties(here: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master, then inserts, updates and deletes in one run; then the same files under other names, and a second feed."""
    monkeypatch.setenv("LAKEUPSERT__TABLES__PRODUCTS__STRATEGY", strategy)
    (here / "bumu.properties").write_text(BUMU)
    landing = here / "landing/products"
    land(landing, {"base_prod.txt": MASTER})
    proposed = command("init", "--from-chombo", "bumu.properties", "landing/products")["result"]["proposed"]
    assert proposed["partition_by"] == []
    command("run", "--host", "local")
    assert rows("field_0", "field_4") == [("9TT3HHW0PX", 140), ("K1Q0MB22TL", 7), ("VR8NCNE7DV", 88)]

    land(landing, {"ups_prod.txt": UPSERTS, "del_prod.txt": DELETES})
    command("run", "--host", "local")
    newest = [("9TT3HHW0PX", 140, 1427766458), ("M4UN1D6RZA", 20, 1428415316), ("VR8NCNE7DV", 82, 1428415316)]
    assert rows("field_0", "field_4", "field_5") == newest
    assert not list((here / "processed").rglob("*=*"))  # no partition's folder

    land(landing, {"base_prod_again.txt": MASTER, "ups_prod_again.txt": UPSERTS, "del_prod_again.txt": DELETES})
    command("run", "--host", "local")
    assert rows("field_0", "field_4", "field_5") == newest

    second = "VR8NCNE7DV,electronics,acme,45.50,79,1428500000\nK1Q0MB22TL,electronics,zenith,12.00,3,1428500000\n"
    land(landing, {"ups_prod2.txt": second, "del_prod2.txt": "M4UN1D6RZA,garden,zenith,8.00,20,1428500000\n"})
    command("run", "--host", "local")
    assert rows("field_0", "field_4") == [("9TT3HHW0PX", 140), ("K1Q0MB22TL", 3), ("VR8NCNE7DV", 79)]


def test_products_of_chombo_with_operations(here: Path) -> None:
    """`op.code.field.ordinal`, as the article has it: the operation does not stay in the table, and a second run reads the same
    feed as the first, which chombo's own second run does not."""
    text = BUMU.replace("#rsbm.op", "rsbm.op").replace("rsbm.deleted.record", "#rsbm.deleted.record")
    (here / "bumu.properties").write_text(text)

    def with_operation(operation: str, records: str) -> str:
        return "".join(
            ",".join([*fields[:4], operation, *fields[5:]]) + "\n"
            for fields in (line.split(",") for line in records.splitlines())
        )

    landing = here / "landing/products"
    land(landing, {"base_prod.txt": with_operation("I", MASTER)})
    proposed = command("init", "--from-chombo", "bumu.properties", "landing/products")["result"]["proposed"]
    assert proposed["delete"] == {"column": "field_4", "values": ["D"]}
    command("run", "--host", "local")
    land(landing, {"prod_1.txt": with_operation("U", UPSERTS) + with_operation("D", DELETES)})
    command("run", "--host", "local")
    land(landing, {"prod_2.txt": with_operation("D", UPSERTS.replace("1428415316", "1428500000"))})
    command("run", "--host", "local")
    assert rows("field_0", "field_5") == [("9TT3HHW0PX", 1427766458)]
    with Table.open("lakeupsert.toml") as table:
        assert "field_4" not in table.to_arrow().schema.names


def test_order_at_the_end_of_file_names(here: Path) -> None:
    """chombo's third kind of order: the number behind the last _ of a file's name. Of several records of a key in one file the
    last wins, where chombo picks one at random."""
    text = "".join(line for line in BUMU.splitlines(keepends=True) if "temporal.ordering.field.ordinal" not in line)
    (here / "bumu.properties").write_text(text)
    landing = here / "landing/products"
    land(landing, {"prod_1428415316": UPSERTS, "prod_1427766458": MASTER, "del_prod_1428000000": DELETES})
    proposed = command("init", "--from-chombo", "bumu.properties", "landing/products")["result"]["proposed"]
    assert (proposed["order_by"], proposed["order_in_name"]) == (["file_sequence"], r"_(\d+)$")
    command("run", "--host", "local")
    newest = [("9TT3HHW0PX", 1), ("M4UN1D6RZA", 20), ("VR8NCNE7DV", 82)]
    assert rows("field_0", "field_4") == newest


def test_job_of_chombo_on_spark(here: Path) -> None:
    """A composite key, full synchronization and versions: `sync.mode`, `maintain.version`, by properties that Typesafe reads."""
    landing = here / "landing/inventory"
    (here / "etl.properties").write_text(
        "recordSetBulkMutator.field.delim.in=,\nrecordSetBulkMutator.sync.mode=full\n"
        f"recordSetBulkMutator.incr.filePath={landing}/*\nrecordSetBulkMutator.id.fieldOrdinals=0,1\n"
        "recordSetBulkMutator.seq.fieldOrdinal=4\nrecordSetBulkMutator.maintain.version=true\n"
        "recordSetBulkMutator.versioned.filePath=/other/bmu/ver\n"
    )
    land(landing, {"full_1": "dc1,A,acme,10,100\ndc1,B,acme,5,100\ndc2,A,acme,7,100\n"})
    answer = command("init", "--from-chombo", "etl.properties")["result"]
    assert answer["proposed"]["key"] == ["field_0", "field_1"]
    assert answer["proposed"]["history"] is True
    assert "--full table" in answer["next"]
    listed = [one["name"].partition(".")[2] for one in answer["no_counterpart"]]
    assert listed == ["sync.mode", "versioned.filePath"]
    command("run", "--host", "local", "--full", "table")
    land(landing, {"full_2": "dc1,A,acme,9,200\ndc2,A,acme,7,200\n"})
    command("run", "--host", "local", "--full", "table")
    assert rows("field_0", "field_1", "field_3") == [("dc1", "A", 9), ("dc2", "A", 7)]
    with Table.open("lakeupsert.toml") as table:
        past = table.to_arrow(history=True).read_all().to_pylist()
    assert sorted((row["field_0"], row["field_1"], row["field_3"]) for row in past if row["valid_to"] is not None) == [
        ("dc1", "A", 10),
        ("dc1", "B", 5),
        ("dc2", "A", 7),
    ]


def sale(sell_id: int, amount: float, batch: int, op: str, store: int, day: str, at: str = "12:00:00") -> str:
    return f"{sell_id},7,2013-06-02 {at},2013-06-01 09:00:00,1,open,{amount},{batch},{op},{store},{day}\n"


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_sell_tables_of_hive_by_their_statements(here: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch decides, not `change_ts`; a key is one of its partition; deletes bring the partition columns."""
    monkeypatch.setenv("LAKEUPSERT__TABLES__SELL__STRATEGY", strategy)
    landing = here / "landing/sell"
    (here / "sell.sql").write_text(SELL.replace("LANDING", str(landing)))
    landing.mkdir(parents=True)
    answer = command("init", "--from-hive", "sell.sql")["result"]
    assert answer["proposed"]["partition_by"] == ["store_id", "create_date"]
    assert {one["name"] for one in answer["no_counterpart"]} == {
        "EXTERNAL",
        "files",
        "SORTED BY",
        "INPUTFORMAT",
        "OUTPUTFORMAT",
        "TBLPROPERTIES version_id_column",
        "statement",
    }
    first = sale(1, 10.0, 1, "I", 3, "2013-06-01") + sale(2, 20.0, 1, "I", 3, "2013-06-01")
    first += sale(1, 11.0, 1, "I", 4, "2013-06-01") + sale(3, 30.0, 1, "I", 4, "2013-06-02")
    land(landing, {"batch_1": first})
    command("run", "--host", "local")
    second = sale(1, 10.5, 2, "U", 3, "2013-06-01", "11:00:00") + sale(2, 20.0, 2, "D", 3, "2013-06-01")
    second += sale(4, 40.0, 2, "I", 4, "2013-06-02") + sale(3, 31.0, 2, "U", 4, "2013-06-02").replace("open", "\\N")
    land(landing, {"batch_2": second})
    command("run", "--host", "local")
    assert rows("store_id", "create_date", "sell_id", "total_amt", "op_code") == [
        ("3", "2013-06-01", 1, 10.5, "U"),
        ("4", "2013-06-01", 1, 11.0, "I"),
        ("4", "2013-06-02", 3, 31.0, "U"),
        ("4", "2013-06-02", 4, 40.0, "I"),
    ]
    with Table.open("lakeupsert.toml") as table:
        found = table.to_arrow().read_all()
    assert "version_id" not in found.schema.names
    assert {row["sell_id"]: row["status_id"] for row in found.to_pylist()}[3] is None
    types = {name: str(found.schema.field(name).type) for name in ("sell_id", "batch", "total_amt", "change_ts")}
    assert types == {"sell_id": "int64", "batch": "int32", "total_amt": "double", "change_ts": "string"}


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_sell_tables_of_hive_with_deletes_by_the_key_alone(
    here: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the warning of `init` says: with one row a key in the table, a delete need not know store and date."""
    monkeypatch.setenv("LAKEUPSERT__TABLES__SELL__STRATEGY", strategy)
    monkeypatch.setenv("LAKEUPSERT__TABLES__SELL__KEY_SCOPE", "table")
    landing = here / "landing/sell"
    (here / "sell.sql").write_text(SELL.replace("LANDING", str(landing)))
    landing.mkdir(parents=True)
    answer = CliRunner().invoke(main, ["init", "--from-hive", "sell.sql", "--json"])
    assert any("key_scope" in warning for warning in json.loads(answer.stdout)["warnings"])
    land(landing, {"batch_1": "".join(sale(n, 10.0 * n, 1, "I", 3 + n % 2, "2013-06-01") for n in range(1, 5))})
    command("run", "--host", "local")

    def delete(sell_id: int, batch: int) -> str:
        return f"{sell_id},\\N,\\N,\\N,\\N,\\N,\\N,{batch},D,\\N,\\N\n"

    moved = sale(3, 33.0, 2, "U", 5, "2013-06-02")
    new = sale(9, 90.0, 2, "I", 3, "2013-06-03")
    land(landing, {"batch_2": delete(1, 2) + moved + new + delete(9, 2), "batch_3": delete(3, 3)})
    answer = command("run", "--host", "local")["result"]
    assert answer["append"]["batches"][0]["unknown_deletes"] == 0, "the batch itself has a record of key 9"
    assert rows("store_id", "create_date", "sell_id") == [("3", "2013-06-01", 2), ("3", "2013-06-01", 4)]


def test_that_parquet_of_hive_is_adopted(here: Path) -> None:
    """A table without versions whose files are Parquet stays where it is: what is in it is the state before the first night."""
    landing, warehouse = here / "landing/sell", here / "warehouse/sell"
    stored = warehouse / "store_id=3" / "create_date=2013-06-01"
    stored.mkdir(parents=True)
    pq.write_table(
        pa.table({"sell_id": pa.array([1, 2]), "amount": [10.0, 20.0], "op_code": ["I", "I"]}),
        stored / "000000_0.parquet",
    )
    (here / "sell.sql").write_text(
        "CREATE TABLE sell (sell_id BIGINT, amount DOUBLE, op_code STRING)\n"
        "PARTITIONED BY (store_id STRING, create_date STRING)\n"
        f"STORED AS PARQUET LOCATION '{warehouse}'\n"
        "TBLPROPERTIES ('primary_key_columns'='sell_id', 'op_code_column'='op_code');\n"
        "CREATE TABLE stage (sell_id BIGINT, amount DOUBLE, op_code STRING, store_id STRING, create_date STRING)\n"
        f"ROW FORMAT DELIMITED FIELDS TERMINATED BY '\\t' LOCATION '{landing}';\n"
    )
    land(landing, {"batch_1": "1\t10.5\tU\t3\t2013-06-01\n2\t20.0\tD\t3\t2013-06-01\n"})
    assert "adopt" in command("init", "--from-hive", "sell.sql")["result"]["next"]
    command("adopt", str(warehouse))
    command("run", "--host", "local")
    assert rows("store_id", "sell_id", "amount") == [("3", 1, 10.5)]


def test_that_a_shorter_record_goes_to_quarantine(here: Path) -> None:
    """What `init` warns of: a file of deletes that has the key alone."""
    (here / "bumu.properties").write_text(BUMU)
    landing = here / "landing/products"
    land(landing, {"base_prod.txt": MASTER, "del_prod.txt": "K1Q0MB22TL\n"})
    result = CliRunner().invoke(main, ["init", "--from-chombo", "bumu.properties", "landing/products", "--json"])
    assert any("'del_prod.txt'" in text for text in json.loads(result.stdout)["warnings"])
    (landing / "del_prod.txt").rename(here / "later")
    command("run", "--host", "local")
    (here / "later").rename(landing / "del_prod.txt")
    result = CliRunner().invoke(main, ["run", "--host", "local", "--json"])
    assert "malformed" in result.stdout
    assert len(rows("field_0")) == 3
