"""Random nights against models of a few lines: values that files bring in other types, and versions in a history."""

import csv
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.errors import ConfigurationError
from tests.harness.rounds import TIMES

DAYS = ("2020-01-01", "2020-01-02")

Record = dict[str, Any]


def opened(root: Path, more: str = "", **settings: Any) -> Table:
    (root / "landing").mkdir(parents=True)
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    file = root / "lakeupsert.toml"
    file.write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
        f'order_by = ["version"]\nquarantine_limit = 1000\nkeep_snapshots = 100\n{"".join(lines)}{more}'
    )
    return Table.open(file)


# ---------------------------------------------------------------- values in other types


def lists(rng: random.Random, of: Callable[[], Any]) -> list[Any]:
    return [of() for _ in range(rng.randint(0, 3))]


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "integers": lambda rng: lists(rng, lambda: rng.randint(0, 9)),
    "digits": lambda rng: lists(rng, lambda: str(rng.randint(0, 9))),
    "words": lambda rng: lists(rng, lambda: rng.choice("abc")),
    "mixed": lambda rng: lists(rng, lambda: rng.choice([1, "1", "x", 2.5, None])),
    "struct": lambda rng: {"x": rng.randint(0, 9)},
    "struct of text": lambda rng: {"x": rng.choice(["7", "seven"])},
    "more fields": lambda rng: {"x": rng.randint(0, 9), "y": rng.choice(["q", 1])},
    "integer": lambda rng: rng.randint(0, 99),
    "text": lambda rng: rng.choice(["a", "7", "[1,2]", '{"x": 1}', '{"x":1}', '["é"]']),
    "null": lambda rng: None,
}
FAMILIES = (
    ("integers", "digits", "words", "mixed", "null", "text"),
    ("struct", "struct of text", "more fields", "null", "text"),
    ("integer", "text", "integers", "struct", "null"),
)
TYPED = {
    "integers": pa.list_(pa.int64()),
    "digits": pa.list_(pa.string()),
    "words": pa.list_(pa.string()),
    "struct": pa.struct([("x", pa.int64())]),
    "struct of text": pa.struct([("x", pa.string())]),
    "integer": pa.int64(),
    "text": pa.string(),
    "null": pa.string(),
}
KINDS = ("jsonl", "jsonl", "parquet", "csv")


class Refused(Exception):
    """The column's type has no such value."""


def kept(value: Any, type_: Any, kind: str) -> Any:
    """What a column of a type shows of a value, by what docs/SEMANTICS.md says of types."""
    t = pa.types
    if value is None:
        return None
    if t.is_string(type_):
        if isinstance(value, list | dict) and kind == "parquet":
            raise Refused
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return value if isinstance(value, str) else text
    if t.is_list(type_) and isinstance(value, list):
        return [kept(item, type_.value_type, kind) for item in value]
    if t.is_struct(type_) and isinstance(value, dict):
        if value.keys() - {field.name for field in type_}:
            raise Refused
        return {field.name: kept(value.get(field.name), field.type, kind) for field in type_}
    if t.is_integer(type_) and re.fullmatch(r"\d+", str(value)):
        return int(value)
    if t.is_floating(type_) and re.fullmatch(r"[\d.]+", str(value)):
        return float(value)
    raise Refused


def landed(path: Path, records: Sequence[Record], type_: Any) -> None:
    """A landing file; CSV has lists and structs as JSON text, which is what the records hold then."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif path.suffix == ".csv":
        for r in records:
            r["c"] = json.dumps(r["c"]) if isinstance(r["c"], list | dict) else r["c"]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        columns: dict[str, Any] = {name: [r[name] for r in records] for name in records[0]}
        pq.write_table(pa.table(columns | {"c": pa.array(columns["c"], type_)}), path)


def shown(rows: list[Record]) -> dict[str, Any]:
    return {r["id"]: (r["version"], r["c"]) for r in sorted(rows, key=lambda r: r["version"])}


def grown(value: Any, type_: Any) -> Any:
    """A value of an older file under the fields of now, as who opens files sees to it."""
    return {f.name: value.get(f.name) for f in type_} if pa.types.is_struct(type_) and value is not None else value


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6 * TIMES))
def test_every_reader_shows_a_value_as_the_column_has_it(seed: int, tmp_path: Path) -> None:
    """Whatever type files bring it in: text and numbers within lists and structs, JSON text, and text that looks like it."""
    rng = random.Random(seed)
    table = opened(tmp_path, strategy="rewrite")
    family = FAMILIES[seed % len(FAMILIES)]
    came: list[tuple[Record, str]] = []
    version = 0
    for night in range(rng.randint(2, 4)):
        for number in range(rng.randint(1, 2)):
            kind = rng.choice(KINDS)
            whats = [rng.choice([w for w in family if w in TYPED or kind != "parquet"])]
            if not night and seed % 4:  # so the column is a list, struct or integer, which later files bring otherwise
                kind, whats = rng.choice(["jsonl", "parquet"]), [family[0]]
            elif kind != "parquet":
                whats.append(rng.choice(family))
            records = []
            for _ in range(rng.randint(2, 5)):
                version += 1
                value = VALUES[rng.choice(whats)](rng)
                records.append({"id": rng.choice("abcd"), "day": DAYS[0], "version": version, "c": value})
            landed(tmp_path / "landing" / f"{night}-{number}.{kind}", records, TYPED.get(whats[0]))
            came += [(record, kind) for record in records]
        before = set(table.to_arrow().read_all()["version"].to_pylist()) if night else set()
        table.run(host="local")
        rows = table.to_arrow().read_all()
        type_ = rows.schema.field("c").type
        expected: dict[str, Any] = {}
        for record, kind in came:
            try:
                expected[record["id"]] = record["version"], kept(record["c"], type_, kind)
            except Refused:
                assert record["version"] not in before
        assert shown(rows.to_pylist()) == expected
        assert shown(table.to_arrow("latest").read_all().to_pylist()) == expected
        out = tmp_path / f"{night}.parquet"
        table.export(out)
        assert shown(pq.read_table(out).to_pylist()) == expected
        paths = [file.path for file in table.files()]
        by_duckdb = duckdb.sql(
            f"SELECT id, version, c FROM read_parquet({paths}, hive_partitioning = false)"
        ).fetchall()
        assert {id_: (at, grown(c, type_)) for id_, at, c in by_duckdb} == expected
        assert not table.reconcile(deep=True).unbalanced
    before_all = table.to_arrow().read_all()
    assert not table.reprocess(source="landing", host="local").left
    assert table.to_arrow().read_all().equals(before_all)


@pytest.mark.spark
def test_spark_shows_the_values_that_arrow_shows(tmp_path: Path, spark: Any) -> None:
    table = opened(tmp_path)
    nights: list[list[Record]] = [
        [{"i": [1, 2], "s": {"x": 1}, "t": '{"x": 1}'}],
        [{"i": ["3", 4.0], "s": {"x": "2", "y": "new"}, "t": {"x": 1.50}}, {"i": ["x"], "s": None, "t": ["é", None]}],
    ]
    for night, values in enumerate(nights):
        records = [{"id": f"{night}{n}", "day": DAYS[0], "version": 1, **row} for n, row in enumerate(values)]
        (tmp_path / "landing" / f"{night}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        table.run(host="local")
    wanted = [
        ("00", [1, 2], {"x": 1, "y": None}, '{"x": 1}'),
        ("10", [3, 4], {"x": 2, "y": "new"}, '{"x":1.5}'),
    ]
    assert [(r["id"], r["i"], r["s"], r["t"]) for r in table.to_arrow().read_all().to_pylist()] == wanted
    found = table.to_spark(spark).orderBy("id").select("id", "i", "s", "t").collect()
    assert [(r.id, r.i, r.s.asDict(), r.t) for r in found] == wanted


# ---------------------------------------------------------------- versions in a history


Batch = dict[str, list[Record]]
"""Landing files, by name."""


def versions(batches: Sequence[Batch], ties: str) -> list[tuple[Any, ...]]:
    """Of each key one version for each ordering value, until the next one or a delete."""
    best: dict[tuple[str, str, int], Record] = {}
    for record in (r for batch in batches for _, records in sorted(batch.items()) for r in records):
        at = record["day"], record["id"], record["version"]
        if ties == "content" and at in best:
            best[at] = max(best[at], record, key=lambda r: (r["op"] == "D", r["v"]))
        else:
            best[at] = record
    order = sorted(best)
    ends = {one: two[2] for one, two in itertools.pairwise(order) if one[:2] == two[:2]}
    return [(*at, best[at]["v"], ends.get(at)) for at in order if best[at]["op"] != "D"]


@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_history_has_every_version_after_restores_files_taken_again_and_renames(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    ties = rng.choice(["arrival", "arrival", "content"])
    settings = {"strategy": rng.choice(["rewrite", "delta"]), "bucket": rng.choice(["256MiB", "2KB"]), "ties": ties}
    more = '[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n[tables.t.schema]\nop = "string"\n'
    table = opened(tmp_path, more, history=True, **settings)
    counted: list[Batch] = []
    withdrawn: list[Batch] = []
    at: dict[int, list[Batch]] = {}
    column, files = "v", 0

    def land() -> None:
        nonlocal files
        batch: Batch = {}
        for _ in range(rng.randint(1, 2)):
            files += 1
            records = [
                {
                    "id": rng.choice("abc"),
                    "day": rng.choice(DAYS),
                    "version": rng.randint(1, 6),
                    "v": rng.randint(0, 10**6),
                    "op": rng.choice("UUUD"),
                }
                for _ in range(rng.randint(1, 4))
            ]
            batch[f"{files:03}.jsonl"] = records
            lines = [json.dumps({(column if name == "v" else name): v for name, v in r.items()}) for r in records]
            (tmp_path / "landing" / f"{files:03}.jsonl").write_text("\n".join([*lines, ""]))
        assert table.append(host="local") is not None
        counted.append(batch)

    for step in range(rng.randint(5, 12)):
        what = rng.choice(["land", "land", "land", "restore", "again", "rename", "compact", "reprocess"])
        if what == "land" or not at:
            land()
            if rng.random() < 0.3:  # two batches are merged at once
                land()
        elif what == "restore":
            number = rng.choice(list(at))
            table.restore(number, dry=False)
            withdrawn = [b for b in [*withdrawn, *counted] if b not in at[number]]
            counted = list(at[number])
        elif what == "again":
            try:
                done = table.append(host="local", again=True)
            except ConfigurationError as e:
                assert e.code == "renamed-since"
            else:
                names = {f.path for f in done.entry.files} if done else set()
                lost = {name: records for b in withdrawn for name, records in b.items()}
                assert names == lost.keys() - {name for b in counted for name in b}
                counted = [*counted, {name: lost[name] for name in names}] if names else counted
                withdrawn = []
        elif what == "rename" and ties == "arrival":
            table.rename_column(column, f"v{step}")
            column = f"v{step}"
        elif what == "compact":
            table.compact(full=True)
        elif what == "reprocess":
            table.reprocess(source=rng.choice(["stored", "landing"]), host="local")
        table.run(host="local")
        at[table.snapshots()[0].number] = list(counted)
        rows = table.to_arrow(history=True).read_all().to_pylist()
        found = sorted(
            ((str(r["day"]), r["id"], r["version"], r[column], r["valid_to"]) for r in rows), key=lambda r: r[:3]
        )
        wanted = versions(counted, ties)
        assert found == wanted, f"after {what}, step {step}"
        live = table.to_arrow().read_all().to_pylist()
        assert sorted((str(r["day"]), r["id"], r[column]) for r in live) == [
            (day, id_, v) for day, id_, _, v, end in wanted if end is None
        ]
