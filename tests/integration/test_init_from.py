"""`lakeupsert init --from-chombo` and `--from-hive`: what each line of the file becomes, what is listed as without counterpart,
and what is refused, with code and line."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lakeupsert.cli import main
from lakeupsert.config import load

ROW = "VR8NCNE7DV,electronics,acme,45.50,88,1427766458\n"
CHOMBO = "rsbm.id.field.ordinals=0\nrsbm.temporal.ordering.field.ordinal=5\nrsbm.deleted.record.file.prefix=del\n"
KEYED = (
    "CREATE TABLE sell (id BIGINT, op STRING) PARTITIONED BY (day DATE)\nTBLPROPERTIES ('primary_key_columns'='id');\n"
)
STAGE = """CREATE TABLE stage (id BIGINT, op STRING, day DATE)
ROW FORMAT DELIMITED FIELDS TERMINATED BY '|'
LOCATION '/land/sell';
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing/feed").write_text(ROW)
    return tmp_path


def call(option: str, content: str | bytes, *args: str) -> Result:
    Path("source").write_bytes(content.encode("latin-1") if isinstance(content, str) else content)
    return CliRunner().invoke(main, ["init", option, "source", *args, "--json"])


def answer(option: str, content: str | bytes, *args: str) -> Any:
    result = call(option, content, *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def chombo(content: str | bytes, *args: str) -> Any:
    """The result for a properties file and the landing folder."""
    return answer("--from-chombo", content, *(args or ("landing",)))["result"]


def hive(content: str, *args: str) -> Any:
    return answer("--from-hive", content, *args)["result"]


def refusal(option: str, content: str | bytes, *args: str) -> tuple[str, int | None]:
    """The code of the error and the line that it names. Nothing is written."""
    result = call(option, content, *args)
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert error["next"]
    assert not Path("lakeupsert.toml").exists()
    line = re.search(r"source, line (\d+):", error["message"])
    return error["code"], int(line[1]) if line else None


# ---------------------------------------------------------------- chombo


def test_that_properties_are_read_as_java_does() -> None:
    content = (
        "! a comment\n# another\n\n"
        "rsbm.id.field.ordinals : 0,\\\n    2\n"
        "rsbm.temporal.ordering.field.ordinal 5\n"
        "rsbm.deleted.record.file.prefix = d\\u0065l\\:\n"
        "field.delim.regex=,\nno.such.option\n"
    )
    found = chombo(content)
    assert found["proposed"]["key"] == ["field_0", "field_2"]
    assert found["proposed"]["delete"] == {"file_prefix": "del:"}
    assert [(one["name"], one["line"]) for one in found["no_counterpart"]] == [("no.such.option", 9)]
    assert "(line 6)" in found["origins"]["order_by"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_by_all_ends_of_lines(end: str) -> None:
    content = CHOMBO.replace("\n", end) + f"debug.on=true{end}"
    assert [one["line"] for one in chombo(content.encode())["no_counterpart"]] == [4]


@pytest.mark.parametrize(
    ("written", "row", "format_", "delimiter"),
    [
        (",", ROW, "csv", ","),
        ("\\\\|", ROW.replace(",", "|"), "csv", "|"),
        ("[|]", ROW.replace(",", "|"), "csv", "|"),
        ("\\t", ROW.replace(",", "\t"), "csv", "\t"),
        ("\\\\t", ROW.replace(",", "\t"), "csv", "\t"),
        ("\\\\s*;\\\\s*", ROW.replace(",", " ; "), "delimited", r"\s*;\s*"),
        ("::", ROW.replace(",", "::"), "delimited", "::"),
    ],
)
def test_delimiters(here: Path, written: str, row: str, format_: str, delimiter: str) -> None:
    (here / "landing/feed").write_text(row)
    proposed = chombo(CHOMBO + f"field.delim.regex={written}\n")["proposed"]
    assert (proposed["format"], proposed["read"]["delimiter"], len(proposed["read"]["columns"])) == (
        format_,
        delimiter,
        6,
    )
    assert load("lakeupsert.toml").tables["landing"].read.delimiter == delimiter


def test_that_text_order_is_text(here: Path) -> None:
    (here / "landing/feed").write_text("a,2015-03-31 01:47:38\n")
    proposed = chombo(
        "id.field.ordinals=0\ntemporal.ordering.field.ordinal=1\ntemporal.ordering.field.numeric=false\n"
        "deleted.record.file.prefix=del\n"
    )["proposed"]
    assert (proposed["order_by"], proposed["schema"]) == (["field_1"], {"field_1": "string"})


def test_that_every_other_property_is_listed(here: Path) -> None:
    content = (
        CHOMBO + "rsbm.deleted.op.code=D\nrsbm.op.code.field.ordinal=-1\nnum.reducer=4\nrug.quantity.attr.ordinals=3\n"
        "incr.filePath=hdfs:///inc/*\nrsbm.id.field.ordinals=0\nrsbm.deleted.op.cod=D\nmapreduce.map.maxattempts=2\n"
        "seq.fieldOrdinal=5\nsync.mode=partial\n"
    )
    found = chombo(content)
    listed = {one["line"]: one["name"] for one in found["no_counterpart"]}
    assert listed == {
        4: "rsbm.deleted.op.code",
        5: "rsbm.op.code.field.ordinal",
        6: "num.reducer",
        7: "rug.quantity.attr.ordinals",
        8: "incr.filePath",
        9: "rsbm.id.field.ordinals",
        10: "rsbm.deleted.op.cod",
        11: "mapreduce.map.maxattempts",
        12: "seq.fieldOrdinal",
        13: "sync.mode",
    }
    text = (here / "lakeupsert.toml").read_text()
    for line, name in listed.items():
        assert re.search(rf"^# line {line}, {re.escape(name)} = ", text, re.M), name


@pytest.mark.parametrize(
    "more",
    [
        "rsbm.temporal.ordering.field.numeric=true\nfield.delim.regex=,\nfield.delim=;\nrsbm.op.code.field.ordinal=4\n",
        "field.delim.in=,\nfield.delim.out=,\nmutation.op=upsert\nmaintain.version=true\nversioned.filePath=/v\n",
        "rsbm.deleted.record.file.prefix=del\nsync.mode=full\nsave.output=false\nmaintain.version=false\n",
    ],
)
def test_that_no_property_is_passed_over(more: str) -> None:
    """Each line is the origin of a setting, or is listed."""
    found = chombo(CHOMBO + more)
    used = {int(n) for origin in found["origins"].values() for n in re.findall(r"\(line (\d+)\)", origin)}
    listed = {one["line"] for one in found["no_counterpart"]}
    assert used | listed == set(range(1, 1 + (CHOMBO + more).count("\n")))
    assert not used & listed


def test_that_negative_and_empty_properties_are_listed() -> None:
    found = chombo("id.field.ordinals=0\ntemporal.ordering.field.ordinal=-1\ndeleted.record.file.prefix=del\n")
    assert [one["line"] for one in found["no_counterpart"]] == [2]
    Path("lakeupsert.toml").unlink()
    found = chombo("id.fieldOrdinals=0\nseq.fieldOrdinal=5\ndeleted.record.file.prefix=\n")
    assert [one["line"] for one in found["no_counterpart"]] == [3]


def test_that_file_and_answer_agree() -> None:
    """Each setting of the answer is in the file, which loads, and the other way round."""
    proposed = chombo(CHOMBO + "rsbm.op.code.field.ordinal=4\nrsbm.deleted.op.code=${GONE}\n")["proposed"]
    written = tomllib.loads(Path("lakeupsert.toml").read_text())["tables"][proposed.pop("table")]
    paths = {name: (proposed.pop(name), str(Path(written.pop(name)).absolute())) for name in ("landing", "processed")}
    assert all(one == other for one, other in paths.values())
    assert written["delete"].pop("values") == ["$${GONE}"]
    assert proposed["delete"].pop("values") == ["${GONE}"]
    assert written == proposed
    assert load("lakeupsert.toml").tables["landing"].delete.values == ("${GONE}",)


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        ("rsbm.temporal.ordering.field.ordinal=5\n", "no-key", None),
        ("a=b\nrsbm.id.field.ordinals=zero\n", "bad-property", 2),
        ("rsbm.id.field.ordinals=0,0\n", "bad-property", 1),
        ("rsbm.id.field.ordinals=-1\n", "bad-property", 1),
        (CHOMBO + "id.field.ordinals=1\n", "contradictory-source", 4),
        (CHOMBO + "rsbm.id.field.ordinals=1\n", "contradictory-source", 4),
        (CHOMBO.replace("=0\n", "=0,6\n"), "ordinal-out-of-range", 1),
        (CHOMBO.replace("=5", "=6"), "ordinal-out-of-range", 2),
        (CHOMBO + "rsbm.op.code.field.ordinal=17\n", "ordinal-out-of-range", 4),
        (CHOMBO + "rsbm.op.code.field.ordinal=5\n", "contradictory-source", 4),
        (CHOMBO + "rsbm.op.code.field.ordinal=\n", "bad-property", 4),
        (CHOMBO + "rsbm.op.code.field.ordinal=4\nrsbm.deleted.op.code=\n", "bad-property", 5),
        (CHOMBO.replace("=0\n", "=0,5\n"), "contradictory-source", 2),
        (CHOMBO + "field.delim.regex=\\t\nfield.delim.in=\\u0020\n", "contradictory-source", 5),
        ("a=b\nrecordSetBulkMutator{\n  sync.mode = full\n}\n", "unreadable-source", 2),
        (CHOMBO.replace("=5", "=3"), "contradictory-source", 2),  # 45.50 is no whole number
        (CHOMBO.replace("rsbm.deleted.record.file.prefix=del\n", ""), "no-delete-rule", None),
        (CHOMBO.replace("prefix=del", "prefix="), "no-delete-rule", 3),
        (CHOMBO + "rsbm.temporal.ordering.field.numeric=yes\n", "bad-property", 4),
        (CHOMBO + "a=1\nb=\\u00zz\n", "unreadable-source", 5),
        (CHOMBO + "field.delim.regex=|\n", "bad-property", 4),
        (CHOMBO + "field.delim.regex=(,|;)\n", "bad-property", 4),
        (CHOMBO + "field.delim.regex=[\n", "bad-property", 4),
        (CHOMBO + "sync.mode=whole\n", "bad-property", 4),
        (CHOMBO + "mutation.op=delete\n", "no-counterpart", 4),
        (CHOMBO + "sync.mode=full\nmutation.op=upsert\n", "contradictory-source", 5),
        ("id.fieldOrdinals=0\n", "no-order", None),
        ("recordSetBulkMutator {\n  sync.mode = full\n}\n", "unreadable-source", 1),
    ],
)
def test_refused_properties(content: str, code: str, line: int | None) -> None:
    assert refusal("--from-chombo", content, "landing") == (code, line)


def test_refused_landing_zones_of_chombo(here: Path) -> None:
    assert refusal("--from-chombo", CHOMBO) == ("no-landing", None)
    assert refusal("--from-chombo", CHOMBO, "nowhere") == ("no-landing", None)
    assert refusal("--from-chombo", CHOMBO + "incr.filePath=nosuch:///inc/*\n") == ("unknown-store", 4)
    assert refusal("--from-chombo", CHOMBO + "incr.filePath=/in/*/x\n") == ("bad-property", 4)
    (here / "landing/feed").unlink()
    assert refusal("--from-chombo", CHOMBO, "landing") == ("no-files", None)


def test_warnings_about_the_feed(here: Path) -> None:
    (here / "landing/short").write_text("VR8NCNE7DV,1\n")
    warnings = answer("--from-chombo", CHOMBO, "landing", "--dry-run")["warnings"]
    assert any("'short'" in text for text in warnings)
    in_name = "rsbm.id.field.ordinals=0\nrsbm.deleted.record.file.prefix=del\n"
    warnings = answer("--from-chombo", in_name, "landing", "--dry-run")["warnings"]
    assert any("2 of 2 files" in text for text in warnings)
    operation = answer("--from-chombo", CHOMBO + "rsbm.op.code.field.ordinal=4\n", "landing", "--dry-run")
    assert any("master" in text for text in operation["warnings"])
    assert not Path("lakeupsert.toml").exists()


# ---------------------------------------------------------------- Hive


def test_statements_with_a_staging_table(here: Path) -> None:
    found = hive(KEYED.replace("id')", "id', 'op_code_column'='op')") + STAGE)
    proposed = found["proposed"]
    assert (proposed["table"], proposed["landing"], proposed["key"]) == ("sell", "/land/sell", ["id"])
    assert proposed["partition_by"] == ["day"]
    assert proposed["read"] == {
        "delimiter": "|",
        "quote": "",
        "null": "\\N",
        "header": False,
        "columns": ["id", "op", "day"],
    }
    assert proposed["schema"] == {"id": "bigint", "op": "string", "day": "date"}
    assert proposed["delete"] == {"column": "op", "values": ["D"], "keep": True}
    assert load("lakeupsert.toml").tables["sell"].read.delimiter == "|"
    assert found["no_counterpart"] == [
        {"name": "files", "value": "text", "line": 1, "reason": "the files of sell become Parquet"}
    ]


def test_types_and_clauses_of_hive(here: Path) -> None:
    content = """
CREATE TABLE IF NOT EXISTS `shop`.`Orders` (
  `Id` BIGINT COMMENT 'the key', code VARCHAR(10), at TIMESTAMP, price DECIMAL(10,2), whole DECIMAL, tags ARRAY<STRING>,
  CONSTRAINT pk PRIMARY KEY (Id) DISABLE NOVALIDATE RELY)
COMMENT 'orders'
CLUSTERED BY (id) SORTED BY (id ASC) INTO 4 BUCKETS
SKEWED BY (code) ON ('a', 'b') STORED AS DIRECTORIES
ROW FORMAT SERDE 'org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe'
WITH SERDEPROPERTIES ('field.delim'='\\t', 'serialization.format'='\\t', 'escape.delim'='!')
STORED AS INPUTFORMAT 'org.apache.hadoop.mapred.TextInputFormat'
OUTPUTFORMAT 'org.apache.hadoop.hive.ql.io.HiveIgnoreKeyTextOutputFormat'
TBLPROPERTIES ('skip.header.line.count'='1', 'transient_lastDdlTime'='1');
"""
    found = hive(content, "landing")
    proposed = found["proposed"]
    assert (proposed["table"], proposed["key"], proposed["partition_by"]) == ("orders", ["id"], [])
    assert proposed["schema"] == {
        "id": "bigint",
        "code": "string",
        "at": "timestamp_ntz",
        "price": "decimal(10, 2)",
        "whole": "decimal(10,0)",
    }
    assert (proposed["read"]["delimiter"], proposed["read"]["header"]) == ("\t", True)
    assert "delete" not in proposed
    listed = {(one["name"], one["line"]) for one in found["no_counterpart"]}
    assert listed == {
        ("column Id", 3),
        ("column code", 3),
        ("column tags", 3),
        ("DISABLE NOVALIDATE", 4),
        ("COMMENT", 3),
        ("CLUSTERED BY", 6),
        ("SORTED BY", 6),
        ("SKEWED BY", 7),
        ("SERDEPROPERTIES escape.delim", 9),
        ("INPUTFORMAT", 10),
        ("OUTPUTFORMAT", 11),
        ("TBLPROPERTIES transient_lastDdlTime", 12),
    }
    text = (here / "lakeupsert.toml").read_text()
    for name, line in listed:
        assert re.search(rf"^# line {line}, {re.escape(name)} = ", text, re.M), name


def test_that_parquet_is_adopted_where_it_is(here: Path) -> None:
    table = KEYED.replace("TBL", f"STORED AS PARQUET LOCATION '{here}/warehouse/sell' TBL")
    found = hive(table + STAGE)
    assert found["proposed"]["processed"] == f"{here}/warehouse/sell"
    assert "adopt" in found["next"]
    Path("lakeupsert.toml").unlink()
    assert hive(table, "landing")["proposed"]["processed"] == f"{here}/warehouse/sell"
    versioned = table.replace("day DATE", "day DATE, v INT").replace("id')", "id', 'version_id_column'='v')")
    found = hive(versioned + STAGE, "--config", "other.toml")
    assert found["proposed"]["processed"] == "/land/sell-processed"
    assert ("LOCATION", f"{here}/warehouse/sell") in {(one["name"], one["value"]) for one in found["no_counterpart"]}


def test_that_other_files_are_left_where_they_are(here: Path) -> None:
    for stored in ("TEXTFILE", "RCFILE", "ORC"):
        table = KEYED.replace("TBL", f"STORED AS {stored} LOCATION '{here}/warehouse/sell' TBL")
        found = hive(table + STAGE, "--dry-run")
        assert found["proposed"]["processed"] == "/land/sell-processed"
        listed = {(one["name"], one["value"]) for one in found["no_counterpart"]}
        assert ("LOCATION", f"{here}/warehouse/sell") in listed
        assert any(name == "files" for name, _ in listed)


def test_formats_of_landing_files() -> None:
    for stored, format_ in {
        "STORED AS PARQUET": "parquet",
        "STORED AS ORC": "orc",
        "STORED AS AVRO": "avro",
        "ROW FORMAT SERDE 'org.apache.hive.hcatalog.data.JsonSerDe'": "jsonl",
        "ROW FORMAT SERDE 'org.apache.hadoop.hive.serde2.OpenCSVSerde'": "csv",
    }.items():
        content = KEYED + STAGE.replace("ROW FORMAT DELIMITED FIELDS TERMINATED BY '|'", stored)
        proposed = hive(content, "--dry-run")["proposed"]
        assert proposed["format"] == format_
        assert ("read" in proposed) == (format_ == "csv")


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        ("", "unreadable-source", None),
        ("SELECT 1;\n", "unreadable-source", None),
        ("SELECT 'a\n", "unreadable-source", None),
        ("\n\nCREATE TABLE t (id BIGINT,\n  name);;\nCREATE TABLE t (id BIGINT", "unreadable-source", 5),
        (STAGE, "no-key", 1),
        (KEYED.replace("'id'", "''") + STAGE, "no-key", 2),
        (KEYED.replace("'id'", "'nr'") + STAGE, "contradictory-source", 2),
        (
            KEYED.replace("op STRING", "op STRING, PRIMARY KEY (op) DISABLE NOVALIDATE") + STAGE,
            "contradictory-source",
            2,
        ),
        (KEYED + KEYED.replace("sell", "buy") + STAGE, "which-table", 3),
        (KEYED + STAGE + STAGE.replace("stage", "stage_2"), "contradictory-source", 6),
        (KEYED.replace("op STRING", "op STRING, Op INT") + STAGE, "contradictory-source", 1),
        (KEYED.replace("id')", "id', 'op_code_column'='o')") + STAGE, "contradictory-source", 2),
        (KEYED.replace("id')", "id', 'version_id_column'='v')") + STAGE, "contradictory-source", 2),
        (KEYED.replace("id')", "id', 'primary_key_columns'='op')") + STAGE, "contradictory-source", 2),
        (KEYED, "no-landing", None),
        (KEYED + STAGE.replace("/land", "nosuch://nn/land"), "unknown-store", 5),
        (KEYED + STAGE.replace("'|'", "'||'"), "no-counterpart", 3),
        (KEYED + STAGE.replace("LOCATION", "STORED AS SEQUENCEFILE LOCATION"), "no-counterpart", 3),
        (KEYED + STAGE.replace(";", "\nTBLPROPERTIES ('skip.header.line.count'='2');"), "no-counterpart", 6),
    ],
)
def test_refused_statements(content: str, code: str, line: int | None) -> None:
    assert refusal("--from-hive", content) == (code, line)


def test_that_table_chooses_one_of_several(here: Path) -> None:
    both = KEYED + KEYED.replace("sell", "buy") + STAGE
    found = hive(both, "--table", "buy", "--dry-run")
    assert found["proposed"]["table"] == "buy"
    assert ("table", "sell") in {(one["name"], one["value"]) for one in found["no_counterpart"]}
    assert refusal("--from-hive", both, "--table", "neither") == ("which-table", 3)


# ---------------------------------------------------------------- both


def test_usage(here: Path) -> None:
    for args in (["init"], ["init", "--from-chombo", "a", "--from-hive", "b", "landing"]):
        result = CliRunner().invoke(main, [*args, "--json"])
        assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "usage")
    result = CliRunner().invoke(main, ["init", "--from-chombo", "missing", "landing", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "unreadable-source")


def test_that_no_configuration_is_replaced_or_written_among_the_data(here: Path) -> None:
    (here / "lakeupsert.toml").write_text("# mine\n")
    result = call("--from-chombo", CHOMBO, "landing")
    assert json.loads(result.stdout)["error"]["code"] == "configuration-exists"
    assert (here / "lakeupsert.toml").read_text() == "# mine\n"
    (here / "lakeupsert.toml").unlink()
    assert refusal("--from-chombo", CHOMBO, str(here)) == ("configuration-in-landing", None)
    assert refusal("--from-hive", KEYED + STAGE.replace("/land/sell", str(here))) == ("configuration-in-landing", None)


def test_what_people_see(here: Path) -> None:
    Path("source").write_text(CHOMBO + "debug.on=true\n")
    result = CliRunner().invoke(main, ["init", "--from-chombo", "source", "landing"])
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert re.search(r"^key +\[\"field_0\"\] +rsbm.id.field.ordinals = 0 \(line 1\)$", shown, re.M)
    assert re.search(r"^debug.on +true +4 ", shown, re.M)
    assert str(here / "lakeupsert.toml") in shown
