"""`lakeupsert ddl`: the statements of the pages, for any table. `readers/test_ddl.py` runs those of engines that run here."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.cli.read.ddl import ENGINES
from lakeupsert.config import GlueSettings, HiveSettings, IcebergSettings, TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.ddl import Engine

PAGES = Path(__file__).parents[2] / "docs/engines"
BLOCK = re.compile(r"```\w*\n(.*?)```\n", re.DOTALL)


@pytest.fixture(autouse=True)
def region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def table(processed: str, name: str = "sales", **settings: Any) -> Table:
    defaults: dict[str, Any] = {"key": ("k",), "partition_by": ("d",), "publishers": ("delta",), "queue": "q"}
    return Table(name, TableSettings(landing="/landing", processed=processed, **{**defaults, **settings}))


def test_command_has_every_engine() -> None:
    assert get_args(Engine) == ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_page_has_the_command_and_its_statements(engine: Engine) -> None:
    blocks = BLOCK.findall((PAGES / f"{engine.upper()}.md").read_text())
    assert any(f"lakeupsert ddl --for {engine}" in block for block in blocks)
    place = "gs://lake/processed/sales" if engine == "bigquery" else "s3://lake/processed/sales"
    if engine == "bigquery":
        pytest.importorskip("gcsfs")
    for statement in table(place).ddl(engine).statements:
        assert any(statement in block for block in blocks), f"{engine}: {statement}"


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ("athena", ["`a``b`", r"'s3://lake/it\'s/'"]),
        ("databricks", ["`a``b`", r"'s3://lake/it\'s'"]),
        ("duckdb", ['"a`b"', "'s3://lake/it''s'"]),
        ("snowflake", ['"A`B"', r"'it\'s/'"]),
        ("spark", ["`a``b`", r"'s3a://lake/it\'s'"]),
        ("trino", ["'a`b'", "'s3://lake/it''s'"]),
    ],
)
def test_names_and_addresses_are_quoted(engine: Engine, parts: list[str]) -> None:
    text = str(table("s3://lake/it's", "a`b").ddl(engine))
    assert all(part in text for part in parts), text


def test_address_on_this_machine_is_not_encoded(tmp_path: Path) -> None:
    place = str(tmp_path / "a b %41")
    assert f"'file://{place}'" in table(place).ddl("spark").statements[0]
    assert f"'{place}'" in table(place).ddl("duckdb").statements[-1]


def test_catalogs_need_no_statement_to_create_a_table() -> None:
    hive = HiveSettings(uri="thrift://host:1", database="lake", table="order")
    glue = GlueSettings(database="lake", table="order")
    in_hive = table("s3://lake/x", publishers=("hive",), hive=hive)
    in_glue = table("s3://lake/x", publishers=("glue",), glue=glue)
    assert in_glue.ddl("athena").statements == ('SELECT * FROM "lake"."order"',)
    for one in (in_hive, in_glue):
        assert one.ddl("trino").statements == ('SELECT * FROM CATALOG."lake"."order"',)
        assert [*one.ddl("trino").replace] == ["CATALOG"]
    iceberg = IcebergSettings(catalog="lake", table="shop.eu.order")
    in_iceberg = table("s3://lake/x", publishers=("iceberg",), iceberg=iceberg)
    assert in_iceberg.ddl("trino").statements == ('SELECT * FROM CATALOG."shop"."eu"."order"',)
    assert in_iceberg.ddl("spark").statements == ("SELECT * FROM CATALOG.`shop`.`eu`.`order`",)
    both = table("s3://lake/x", publishers=("delta", "glue"), glue=glue)
    assert both.ddl("athena").publisher == "delta"


@pytest.mark.parametrize(
    ("engine", "processed", "settings", "told"),
    [
        ("trino", "s3://lake/x", {"publishers": ()}, "none"),
        (
            "spark",
            "s3://lake/x",
            {"publishers": ("glue",), "glue": GlueSettings(database="lake", table="t")},
            "glue",
        ),
        (
            "athena",
            "s3://lake/x",
            {"publishers": ("hive",), "hive": HiveSettings(uri="thrift://h:1", database="lake", table="t")},
            "hive",
        ),
        ("athena", "/lake", {}, "s3://"),
        ("bigquery", "s3://lake/x", {}, "gs://"),
        ("snowflake", "/lake", {}, "abfss://"),
    ],
)
def test_engine_that_can_not_read_the_table(
    engine: Engine, processed: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        table(processed, **settings).ddl(engine)
    assert raised.value.code == "no-statement"
    assert told in raised.value.message
    assert raised.value.next


def test_json_has_the_statements(tmp_path: Path) -> None:
    config = tmp_path / "lakeupsert.toml"
    config.write_text(
        '[tables.sales]\nlanding = "landing"\nprocessed = "s3://lake/processed/sales"\nqueue = "q.sqlite"\nkey = ["k"]\n'
        'partition_by = ["d"]\npublishers = ["delta"]\n'
    )
    answer = CliRunner().invoke(main, ["ddl", "--for", "snowflake", "--json", "--config", str(config)])
    result = json.loads(answer.output)["result"]
    assert [statement.split("\n")[0] for statement in result["statements"]] == [
        "CREATE CATALOG INTEGRATION IF NOT EXISTS delta_files",
        'CREATE ICEBERG TABLE "SALES"',
    ]
    assert (result["engine"], result["publisher"], [*result["replace"]]) == ("snowflake", "delta", ["VOLUME"])
    text = CliRunner().invoke(main, ["ddl", "--for", "snowflake", "--config", str(config)]).output
    assert all(f"{statement};\n" in text for statement in result["statements"])
