"""Columns that landing files call by another name than the table: `aliases`, and what is told where they are missing."""

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from pyarrow import orc

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from tests.harness.proof import assert_proved

FORMATS = ("csv", "jsonl", "parquet", "avro", "orc")
ALIASES = '[tables.t.read]\naliases = { price = "unit_price", identifier = "id" }\n'


def in_format(kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind == "csv":
        return "".join(",".join(map(str, values)) + "\n" for values in (rows[0], *(r.values() for r in rows))).encode()
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    out: Any = io.BytesIO()
    if kind == "avro":
        types = {str: "string", int: "long", float: "double"}
        fields = [{"name": name, "type": types[type(value)]} for name, value in rows[0].items()]
        fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, rows)
    else:
        (pq if kind == "parquet" else orc).write_table(pa.Table.from_pylist(rows), out)
    return bytes(out.getvalue())


class Lake:
    """One table with the key `id`, the partition column `day` and the ordering column `version`."""

    def __init__(self, root: Path, more: str = "") -> None:
        self.root, self.nights = root, 0
        (root / "landing").mkdir(parents=True)
        self.config = root / "lakeupsert.toml"
        self.configure(more)

    def configure(self, more: str = "") -> None:
        self.config.write_text(
            '[tables.t]  # ours\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
            f'order_by = ["version"]\nquarantine_limit = 100\n\n{more}'
        )
        self.table = Table.open(self.config)

    def night(self, kind: str = "csv", host: Any = "local", **columns: Any) -> Any:
        """One row of these columns, in a file of its own, and the run that takes it."""
        self.nights += 1
        (self.root / "landing" / f"{self.nights}.{kind}").write_bytes(in_format(kind, [columns]))
        done = self.table.run(host=host).append
        assert done is not None
        return done

    def rows(self, *columns: str) -> list[Any]:
        return [tuple(row.values()) for row in self.table.to_arrow().read_all().select(columns).to_pylist()]

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--config", str(self.config)])

    def json(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call(*arguments, "--json").stdout)
        return found

    def prove(self) -> None:
        """DuckDB finds the same rows in what landed, and so does who makes them anew of it."""
        assert_proved(self.table)
        before = self.table.to_arrow().read_all()
        assert not self.table.reprocess(source="landing", host="local").left
        assert self.table.to_arrow().read_all().equals(before)


ROW = {"id": "a", "day": "2020-01-01", "version": 1, "price": 1.5}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A night, and a rename of its column `price` to `unit_price`."""
    lake = Lake(tmp_path)
    lake.night(**ROW)
    lake.table.rename_column("price", "unit_price")
    return lake


@pytest.mark.parametrize("kind", FORMATS)
def test_files_with_an_alias_are_read_as_those_with_the_tables_name(kind: str, lake: Lake) -> None:
    lake.configure(ALIASES)
    path = lake.root / "landing" / f"2.{kind}"
    old = {"Identifier": "b", "day": "2020-01-01", "version": 1, "PRICE": 2.5}
    path.write_bytes(in_format(kind, [old]))
    assert [p.rows for p in lake.table.plan().partitions] == [1]
    path.unlink()
    entry = lake.night(kind, **old).entry
    assert (entry.reading.aliases, entry.quarantined) == ({"price": "unit_price", "identifier": "id"}, {})
    lake.night(kind, id="a", day="2020-01-01", version=2, unit_price=3.5)
    assert lake.table.to_arrow().schema.names == ["id", "day", "version", "unit_price"]
    assert lake.rows("id", "unit_price") == [("a", 3.5), ("b", 2.5)]
    lake.prove()
    lake.configure()  # batches keep their own reading
    lake.prove()


def test_aliases_count_from_the_first_batch_on_for_types_and_keys(tmp_path: Path) -> None:
    lake = Lake(tmp_path, ALIASES + '[tables.t.schema]\nunit_price = "decimal(6,2)"\n')
    lake.night(identifier="0042", day="2020-01-01", version=1, price="2.50")
    assert [(f.name, str(f.type)) for f in lake.table.to_arrow().schema][::3] == [
        ("id", "string"),
        ("unit_price", "decimal128(6, 2)"),
    ]
    lake.prove()


@pytest.mark.spark
@pytest.mark.long
def test_aliases_hold_in_spark_tasks(lake: Lake, spark: Any) -> None:
    lake.configure(ALIASES)
    lake.night("parquet", host="spark", identifier="b", day="2020-01-01", version=1, price=2.5)
    assert lake.rows("id", "unit_price") == [("a", 1.5), ("b", 2.5)]
    lake.configure()
    assert lake.night("jsonl", host="spark", **{**ROW, "id": "c"}).warnings, "the old name is told"


@pytest.mark.parametrize("kind", FORMATS)
def test_file_with_an_alias_beside_its_column_is_set_aside(kind: str, lake: Lake) -> None:
    lake.configure(ALIASES)
    entry = lake.night(kind, **{**ROW, "id": "b", "unit_price": 2.5}).entry
    assert entry.quarantined == {"unreadable_file": 1}
    assert lake.rows("id", "unit_price") == [("a", 1.5)]


def test_lines_of_json_may_not_change_between_both_names(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeupsert.landing.formats import blocks

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)
    lake.configure(ALIASES)
    lines = in_format("jsonl", [{**ROW, "id": "b"}, {"id": "c", "day": "2020-01-01", "version": 1, "unit_price": 2}])
    (lake.root / "landing" / "2.jsonl").write_bytes(lines)
    done = lake.table.run(host="local").append
    assert done is not None
    assert done.entry.quarantined == {"unreadable_file": 1}
    [reason] = done.examples.values()
    assert all(text in reason for text in ("'price'", "'unit_price'", "`aliases`", "two files"))
    for name, content in zip(("3.jsonl", "4.jsonl"), lines.splitlines(keepends=True), strict=True):  # as it says
        (lake.root / "landing" / name).write_bytes(content)
    assert lake.table.run(host="local").append.entry.rows_appended == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", FORMATS)
def test_refused_rows_are_replayed_by_the_aliases_of_then(kind: str, lake: Lake) -> None:
    """Then is when they are replayed; who makes the replay's rows anew reads its ledger entry."""
    bad = {"identifier": "b", "day": "2020-01-01", "version": 1, "price": "dear"}
    lake.configure(ALIASES)
    lake.night(kind, **{**bad, "identifier": "x", "day": "no date"} if kind == "csv" else bad)
    assert lake.rows("id") == [("a",)]
    lake.table.rename_column("unit_price", "cost")
    lake.configure(ALIASES.replace("unit_price", "cost"))
    before = lake.table.append(host="local", replay_quarantine=True)
    assert before is None, "the value is as bad as it was"


def test_replay_reads_by_aliases_and_its_entry_keeps_them(tmp_path: Path) -> None:
    lake = Lake(tmp_path, '[tables.t.schema]\nprice = "tinyint"\n')
    lake.night(**{**ROW, "price": 1})
    lake.night(**{**ROW, "id": "b", "price": 1000})
    lake.table.rename_column("price", "unit_price")
    types = '[tables.t.schema]\nunit_price = "TYPE"\n'
    lake.configure(ALIASES + types.replace("TYPE", "tinyint"))
    lake.night(**{**ROW, "id": "c", "price": 2000})
    lake.night("jsonl", **{**ROW, "id": "d", "price": 3000})
    lake.configure(ALIASES + types.replace("TYPE", "int"))
    done = lake.table.append(host="local", replay_quarantine=True)
    assert done is not None
    lake.table.run(host="local")
    wanted = [("a", 1), ("b", 1000), ("c", 2000), ("d", 3000)]
    assert lake.rows("id", "unit_price") == wanted
    lake.configure(types.replace("TYPE", "int"))
    assert not lake.table.reprocess(source="landing", host="local").left
    assert lake.rows("id", "unit_price") == wanted


@pytest.mark.parametrize(
    "aliases",
    ['{ a = "b", b = "c" }', '{ a = "A" }', '{ a = "b", A = "c" }', '{ a = "" }', '{ " " = "a" }', '["a"]'],
)
def test_aliases_that_have_no_meaning_are_refused(aliases: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as e:
        Lake(tmp_path, f"[tables.t.read]\naliases = {aliases}\n")
    assert e.value.code == "bad-setting"
    assert "aliases" in e.value.message


# ---------------------------------------------------------------- the old name without an alias


@pytest.mark.parametrize("kind", FORMATS)
def test_old_name_is_told_every_night_and_in_the_plan(kind: str, lake: Lake) -> None:
    def told(warnings: Any) -> list[str]:
        return [w for w in warnings if "'price'" in w and "'unit_price'" in w]

    for night in (2, 3):
        path = lake.root / "landing" / f"{night}.{kind}"
        path.write_bytes(in_format(kind, [{**ROW, "id": "b", "version": night}]))
        [warning] = told(lake.table.plan().notes)
        assert path.name in warning
        assert "aliases" in warning
        [warning] = told(lake.json("run", "--host", "local")["warnings"])
        assert path.name in warning
        lake.nights += 1
    assert not told(lake.night(kind, **{**ROW, "unit_price": 2.5}).warnings), "it brings both"
    assert not told(lake.night(kind, id="c", day="2020-01-01", version=1).warnings), "it brings neither"
    lake.configure(ALIASES)
    assert not told(lake.night(kind, **{**ROW, "id": "d"}).warnings)


def test_name_that_a_rename_gave_to_another_column_is_not_told(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.night(**ROW, cost=7.5)
    lake.table.rename_column("price", "unit_price")
    lake.table.rename_column("cost", "price")
    assert not lake.night(**{**ROW, "version": 2}).warnings


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("own", ["price", "Unit_Price", "up"])
def test_line_that_is_proposed_can_be_used_as_it_is(own: str, kind: str, tmp_path: Path) -> None:
    """Where the old name has aliases, and where several columns were renamed."""
    given = '[tables.t.read]\naliases = { price = "up", unit_price = "up" }\n'
    lake = Lake(tmp_path, given)
    lake.night(id="a", day="2020-01-01", version=1, price=1.5, size=1)
    lake.table.rename_column("up", "up2")
    lake.table.rename_column("size", "size2")
    row = {"id": "b", "day": "2020-01-01", "version": 1, own: 2.5, "size": 2}
    (lake.root / "landing" / f"2.{kind}").write_bytes(in_format(kind, [row]))
    lines = set()
    for found in (lake.table.plan().notes, lake.json("run", "--host", "local")["warnings"]):
        texts = [w for w in found if "'up2'" in w]
        assert len(texts) == 1
        assert repr(own) in texts[0]
        lines |= set(re.findall(r"`(aliases = .*?)`", "".join(found)))
    [line] = lines
    lake.configure(f"[tables.t.read]\n{line}\n")
    lake.nights = 2
    assert not lake.night(kind, **{**row, "id": "c"}).warnings
    assert lake.rows("id", "up2", "size2") == [("a", 1.5, 1), ("b", None, None), ("c", 2.5, 2)]


# ---------------------------------------------------------------- an alias that is a column of the table


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_alias_that_takes_the_values_of_a_column_is_told(kind: str, tmp_path: Path) -> None:
    def told(warnings: Any) -> list[str]:
        return [w for w in warnings if "'price'" in w.lower() and "'cost'" in w and "aliases" in w]

    lake = Lake(tmp_path)
    assert not told(lake.night(kind, **ROW).warnings)
    lake.configure('[tables.t.read]\naliases = { Price = "cost" }\n')
    for night in (2, 3):
        (lake.root / "landing" / f"{night}.{kind}").write_bytes(in_format(kind, [{**ROW, "version": night}]))
        assert len(told(lake.json("plan")["warnings"])) == 1
        answer = lake.json("run" if night == 2 else "append", "--host", "local")
        assert len(told(answer["warnings"])) == 1
        assert answer["error"] is None


def test_alias_that_takes_the_operations_is_told(tmp_path: Path) -> None:
    more = '[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n[tables.t.read]\naliases = { op = "price" }\n'
    lake = Lake(tmp_path, more)
    assert any("'op'" in w and "'price'" in w for w in lake.night(id="a", day="2020-01-01", version=1, op="D").warnings)


def test_alias_for_a_column_that_was_renamed_takes_nothing_away(lake: Lake) -> None:
    """Also where files went on with the old name until the alias was there: it is what mends them."""
    assert lake.night(**{**ROW, "version": 2}).warnings
    lake.configure(ALIASES)
    assert not lake.night(**{**ROW, "version": 3}).warnings
    assert lake.rows("unit_price", "price") == [(1.5, None)]


# ---------------------------------------------------------------- schema rename --alias


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", '\n[tables.t.read]\naliases = { price = "unit_price" }\n'),
        ('[tables.t.read]  # how\nnull = "-"  # nothing\n', 'aliases = { price = "unit_price" }\n'),
        ('[tables.t.read]\naliases = { p = "price" } # theirs\nnull = "-"\n', None),
        ('[tables.t.read.aliases]  # theirs\n# of 2019\np = "price"\nk = "id"  # key\n', None),
        ('[tables."t"."read"]\n\n[tables.t.schema]\nid = "string"', 'aliases = { price = "unit_price" }\n'),
    ],
)
def test_rename_writes_its_alias_and_leaves_the_rest_of_the_file(given: str, added: str | None, tmp_path: Path) -> None:
    lake = Lake(tmp_path, given)
    lake.night(**ROW)
    before = lake.config.read_text()
    dry = lake.json("schema", "rename", "price", "unit_price", "--alias")
    assert lake.config.read_text() == before
    result = lake.json("schema", "rename", "price", "unit_price", "--alias", "--yes")["result"]
    assert result["aliases"] == dry["result"]["aliases"]
    after = lake.config.read_text()
    wanted = {"price": "unit_price"} | ({"p": "unit_price"} if '"price"' in given else {})
    wanted |= {"k": "id"} if '"id"' in given and "aliases]" in given else {}
    assert tomllib.loads(after)["tables"]["t"]["read"]["aliases"] == wanted == result["aliases"]
    lost = [line for line in before.splitlines() if line not in after.splitlines() and '= "price"' not in line]
    assert not lost
    assert after.count("#") == before.count("#")
    if added is not None:
        assert after.replace(added, "", 1).rstrip("\n") == before.rstrip("\n")
    lake.table = Table.open(lake.config)
    lake.night(**{**ROW, "id": "b"})
    assert lake.rows("id", "unit_price") == [("a", 1.5), ("b", 1.5)]
    result = lake.json("schema", "rename", "unit_price", "price", "--alias", "--yes")["result"]  # and back
    assert result["aliases"] == {
        **{alias: "price" if of == "unit_price" else of for alias, of in wanted.items() if alias != "price"},
        "unit_price": "price",
    }


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("", {}), ('[tables.t.read]\naliases = { p = "price", k = "id" }\n', {"p": "Price", "k": "id"})],
)
def test_names_that_differ_by_case_alone_get_no_alias(given: str, wanted: dict[str, str], tmp_path: Path) -> None:
    lake = Lake(tmp_path, given)
    lake.night(**ROW)
    before = lake.config.read_text()
    answer = lake.json("schema", "rename", "price", "Price", "--alias", "--yes")
    assert answer["error"] is None
    assert answer["result"]["aliases"] == wanted
    assert (lake.config.read_text() == before) == (not given)
    lake.table = Table.open(lake.config)
    lake.night(**{**ROW, "id": "b", "version": 2})
    assert lake.rows("id", "Price") == [("a", 1.5), ("b", 1.5)]


@pytest.mark.parametrize("how", ["inline", "variable", "read-only", "address"])
def test_rename_whose_alias_can_not_be_written_changes_nothing(
    how: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "inline":
        lake.config.write_text(lake.config.read_text().rstrip() + '\nread = { null = "-" }\n')
    elif how == "variable":
        monkeypatch.setenv("LAKEUPSERT__TABLES__T__READ__ALIASES", '{ p = "unit_price" }')
    elif how == "read-only":
        monkeypatch.setattr("os.access", lambda path, mode: False)
    else:
        text = lake.config.read_text()
        for zone in ("landing", "processed"):
            text = text.replace(f'"{zone}"', f'"{lake.root / zone}"')
        lake.config.write_text(text)
        monkeypatch.setattr(lake, "config", f"file://{lake.config}")
    before = lake.json("schema")["result"]
    answer = lake.json("schema", "rename", "unit_price", "cost", "--alias", "--yes")
    assert answer["error"]["code"] == "configuration-not-editable"
    assert answer["error"]["data_changed"] is False
    assert 'unit_price = "cost"' in answer["error"]["next"]
    assert lake.json("schema")["result"] == before


def test_rename_without_an_alias_tells_those_that_name_the_column(lake: Lake) -> None:
    lake.configure(ALIASES)
    answer = lake.json("schema", "rename", "unit_price", "cost", "--yes")
    assert any("'price'" in warning and "'cost'" in warning for warning in answer["warnings"])
