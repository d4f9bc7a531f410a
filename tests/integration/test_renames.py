"""Columns that are renamed and dropped by command: what each reader and each step sees, what is refused, races and crashes."""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row

FIRST = "d=2020-01-01"
SCHEMA = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "op": "string"}


@pytest.fixture
def lake(folder: Path) -> Lake:
    """A published night of two rows, with the payload columns `v` and `name`."""
    return begun(folder / "lake")


def line(key: str, day: int, ts: int, op: str | None = None, **columns: Any) -> dict[str, Any]:
    """A row with these payload columns."""
    return {**{name: value for name, value in row(key, day, ts, op=op).items() if name != "v"}, **columns}


def begun(root: Path, **settings: Any) -> Lake:
    lake = Lake(root, schema=SCHEMA, **settings)
    lake.land("1.jsonl", [line("a", 0, 1, v=1, name="ann"), line("b", 0, 1, v=2, name="bob")])
    lake.run()
    return lake


def shown(lake: Lake, *columns: str, **options: Any) -> list[Any]:
    """Of each row the key and these columns."""
    found = lake.table.to_arrow(**options).read_all().select(["k", *columns]).to_pylist()
    return [tuple(r.values()) for r in found]


def columns(lake: Lake, snapshot: Any = "published") -> list[str]:
    names: list[str] = lake.table.to_arrow(snapshot).schema.names
    return names[4:]  # without k, l, d, ts


def rename(lake: Lake, old: str, new: str) -> None:
    lake.table.rename_column(old, new)
    lake.table.publish()


def drop(lake: Lake, name: str) -> None:
    lake.table.drop_column(name)
    lake.table.publish()


def prove(lake: Lake) -> None:
    """The sums hold, DuckDB finds the same in what landed, and so does who writes it anew."""
    before = lake.table.to_arrow().read_all()
    for source in ("stored", "landing"):
        checked = lake.table.reconcile(deep=True)
        assert not checked.unbalanced
        assert not checked.gone
        assert not lake.table.reprocess(source=source, host="local").left
        assert lake.table.to_arrow().read_all().equals(before)


# ---------------------------------------------------------------- what readers see


@pytest.mark.parametrize("engine", ["arrow", "spark"])
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.long
def test_name_that_is_used_anew_never_shows_old_data(strategy: str, engine: str, folder: Path, spark: Any) -> None:
    lake = begun(folder, strategy=strategy)
    rename(lake, "v", "amount")
    assert columns(lake) == ["amount", "name"]
    assert shown(lake, "amount") == [("a", 1), ("b", 2)]
    rename(lake, "name", "v")  # text, under the name that numbers had
    lake.land("2.jsonl", [line("c", 0, 1, v="cid", name=7, amount=3)])  # `name` is a new column
    lake.run(engine=engine)
    drop(lake, "amount")
    lake.land("3.jsonl", [line("b", 0, 2, v="bea", amount="new"), line("c", 0, 2, "D")])
    lake.run(engine=engine)
    assert columns(lake) == ["v", "name", "amount"]
    wanted = [("a", "ann", None, None), ("b", "bea", None, "new")]
    assert shown(lake, "v", "name", "amount") == wanted
    assert shown(lake, "v", "name", "amount", snapshot="latest") == wanted

    def by_spark(**options: Any) -> list[Any]:
        frame = lake.table.to_spark(spark, **options).orderBy("k").select("k", "v", "name", "amount")
        return [tuple(r) for r in frame.collect()]

    assert by_spark() == wanted
    for where in ("v >= 'b'", "amount IS NULL", "v = 'ann' AND name IS NULL", "amount = 'new'", "name > 0"):
        found = shown(lake, "v", "name", "amount", where=where)
        assert found == by_spark(where=where)
        assert len(found) == {"name > 0": 0}.get(where, 1), where
    lake.table.export(folder / "out.parquet")
    assert [
        tuple(r.values()) for r in pq.read_table(folder / "out.parquet").select(["k", "v", "amount"]).to_pylist()
    ] == [
        ("a", "ann", None),
        ("b", "bea", "new"),
    ]
    [explained] = lake.table.explain({"k": "b", "l": 0}).partitions
    assert explained.shown is not None
    assert [explained.shown[n] for n in ("v", "name", "amount")] == ["bea", None, "new"]
    [explained] = lake.table.explain({"k": "a", "l": 0}).partitions
    assert [v.outcome for v in explained.versions if v.source == "appended"] == ["shown"], "it is the row that came"
    # Snapshots show the columns of their time.
    assert columns(lake, 0) == ["v", "name"]
    assert shown(lake, "v", snapshot=0) == [("a", 1), ("b", 2)]
    assert columns(lake, 1) == ["amount", "name"]
    assert shown(lake, "amount", snapshot=3) == [("a", 1), ("b", 2), ("c", 3)]
    prove(lake)


def test_filters_and_columns_are_pushed_into_files_of_all_names(lake: Lake, spark: Any) -> None:
    def plan(frame: Any) -> str:
        return str(frame._jdf.queryExecution().executedPlan())

    lake.land("2.jsonl", [line("c", 1, 1, v=3)])
    lake.run()
    before = plan(lake.table.to_spark(spark, where="v >= 3").select("k", "v"))
    assert before.count("FileScan") == 1
    rename(lake, "v", "w")
    rename(lake, "name", "v")
    lake.land("3.jsonl", [line("d", 0, 1, v="dan", w=4)])
    lake.run()
    frame = lake.table.to_spark(spark, where="w >= 3").select("k", "w")
    assert sorted(tuple(r) for r in frame.collect()) == [("c", 3), ("d", 4)]
    scans = plan(frame).split("FileScan")[1:]
    assert ["GreaterThanOrEqual(v,3)" in s for s in scans].count(True) == 1
    assert ["GreaterThanOrEqual(w,3)" in s for s in scans].count(True) == 1
    assert all(
        "ReadSchema: struct<k:string,v:bigint>" in s or "ReadSchema: struct<k:string,w:bigint>" in s for s in scans
    )


def test_table_without_renames_has_no_word_of_them(lake: Lake) -> None:
    home = lake.root / "processed" / "_lakeupsert"
    texts = [p.read_text() for kind in ("ledger", "partitions") for p in (home / kind).rglob("v*.json")]
    assert len(texts) > 2
    assert not any("renames" in text for text in texts)
    assert not any(b"lakeupsert.renames" in p.read_bytes() for p in (lake.root / "processed").rglob("base-*"))


@pytest.mark.parametrize("ids", [False, True])
def test_adopted_files_are_read_by_the_names_that_they_have(ids: bool, folder: Path, spark: Any) -> None:
    """Also where they have ids of somebody else."""
    lake = Lake(folder, schema={"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz"}, delete=None)
    fields = [
        ("k", pa.string()),
        ("l", pa.int32()),
        ("ts", pa.timestamp("us")),
        ("v", pa.int64()),
        ("name", pa.string()),
    ]
    schema = pa.schema(
        [pa.field(n, t, metadata={"PARQUET:field_id": str(6 - i)} if ids else None) for i, (n, t) in enumerate(fields)]
    )
    rows = [line("a", 0, 1, v=1, name="ann"), line("b", 0, 1, v=2, name="bob")]
    (folder / "processed" / FIRST).mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "processed" / FIRST / "x.parquet")
    lake.table.adopt()
    rename(lake, "v", "w")
    drop(lake, "name")
    lake.land(
        "2.jsonl", [{**{n: v for n, v in line("c", 1, 1, v=3).items() if n != "op"}, "name": 9}]
    )  # v and name are new ones
    lake.run()
    wanted = [("a", 1, None, None), ("b", 2, None, None), ("c", None, 3, 9)]
    assert shown(lake, "w", "v", "name") == wanted
    frame = lake.table.to_spark(spark).orderBy("k").select("k", "w", "v", "name")
    assert [tuple(r) for r in frame.collect()] == wanted
    assert shown(lake, "w", where="w = 2") == [("b", 2)]
    assert [r.status for r in lake.table.compact(full=True).dedupe] == ["merged"]
    assert shown(lake, "w", "v", "name") == wanted
    prove(lake)


def test_who_reads_folders_sees_new_names_in_files_that_were_written_since(lake: Lake) -> None:
    def names() -> list[str]:
        [file] = {f.path for f in lake.table.files()}
        return duckdb.sql(f"SELECT * FROM read_parquet('{file}', hive_partitioning = false)").columns

    rename(lake, "v", "w")
    drop(lake, "name")
    assert names()[3:] == ["v", "name"]
    listed = CliRunner().invoke(main, ["files", "--config", str(lake.configure())])
    assert "1 of 1 files still contain renamed or dropped columns" in listed.stderr
    lake.table.reprocess()
    assert names()[3:] == ["w"]
    listed = CliRunner().invoke(main, ["files", "--config", str(lake.configure())])
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert shown(lake, "w") == [("a", 1), ("b", 2)]
    assert shown(lake, "v", "name", snapshot=0) == [("a", 1, "ann"), ("b", 2, "bob")]


# ---------------------------------------------------------------- beside other steps


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("column", ["v", "name"])
def test_restore_takes_back_rows_and_no_rename(column: str, lake: Lake) -> None:
    rename(lake, "v", "w")
    drop(lake, "name")
    lake.land("2.jsonl", [line("a", 0, 2, **{column: "late"})])  # a new column
    lake.run()
    assert (columns(lake), shown(lake, column)) == (["w", column], [("a", "late"), ("b", None)])
    lake.table.restore(0, dry=False)
    lake.run()
    assert columns(lake) == ["w", column], "columns stay as they are named now"
    assert shown(lake, "w", column) == [("a", 1, None), ("b", 2, None)]
    prove(lake)
    lake.table.restore(lake.table.snapshots()[-4].number, dry=False)  # forth again
    lake.run()
    prove(lake)


def test_restore_to_before_a_rename_alone_changes_nothing(lake: Lake) -> None:
    rename(lake, "v", "w")
    plan = lake.table.restore(0, dry=False)
    assert (plan.withdrawn, plan.entry) == ({}, None)
    assert columns(lake) == ["w", "name"]


@pytest.mark.long
def test_vacuum_leaves_what_renamed_columns_lie_in(folder: Path) -> None:
    lake = begun(folder, keep_snapshots=1, superseded_retention="0s")
    rename(lake, "v", "w")
    lake.land("2.jsonl", [line("c", 0, 1, w=3)])
    lake.run()
    lake.table.vacuum(dry=False)
    assert shown(lake, "w") == [("a", 1), ("b", 2), ("c", 3)]
    rename(lake, "name", "v")
    lake.table.vacuum(dry=False)
    assert shown(lake, "w", "v") == [("a", 1, "ann"), ("b", 2, "bob"), ("c", 3, None)]
    prove(lake)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_quarantined_rows_are_replayed_under_the_names_of_now(kind: str, folder: Path) -> None:
    """Also those that stay in quarantine once more, and in files of the same name that came before and after."""
    lake = Lake(folder, schema={**SCHEMA, "v": "tinyint"}, quarantine_limit=100)

    def land(*rows: dict[str, Any]) -> None:
        path = lake.root / "landing" / f"nightly.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(r, default=str) + "\n" for r in rows))
        else:
            lines = [",".join("" if v is None else str(v) for v in r.values()) for r in rows]
            header = ",".join(rows[0])
            path.write_text("\n".join([header.upper() if "w" in rows[0] else header, *lines, ""]))
        lake.run()

    def given(**types: str) -> None:
        lake.mend(lambda row: True, schema={**SCHEMA, **types})

    def replay() -> Any:
        done = lake.table.append(host="local", replay_quarantine=True)
        lake.run()
        return done and (done.entry.rows_appended, done.entry.quarantined)

    land(line("a", 0, 1, v=1, name="ann"), line("b", 0, 1, v=1000, name="bob"), line("c", 0, 1, v=100000, name="cid"))
    rename(lake, "v", "W")
    land(line("d", 0, 1, w=2000, name="dan"), line("f", 0, 1, w=200000, name="fay"))
    drop(lake, "name")
    rename(lake, "W", "name")
    given(name="tinyint")  # else v is one
    land(line("e", 0, 1, name=3000, v="new"))  # v is another column now
    assert (columns(lake), shown(lake)) == (["name"], [("a",)]), "v comes with its first accepted row"
    given(name="smallint")
    assert replay() == (3, {"bad_type": 2})
    assert shown(lake, "name", "v") == [
        ("a", 1, None),
        ("b", 1000, None),
        ("d", 2000, None),
        ("e", 3000, "new"),
    ]
    rename(lake, "v", "w")
    rename(lake, "name", "v")
    given(v="int")
    assert replay() == (2, {})
    values = {"a": 1, "b": 1000, "c": 100000, "d": 2000, "e": 3000, "f": 200000}
    wanted = [(key, value, "new" if key == "e" else None) for key, value in values.items()]
    assert shown(lake, "v", "w") == wanted
    lake.table.reprocess()
    assert shown(lake, "v", "w") == wanted


def test_replayed_rows_are_made_of_quarantine_again_when_partitions_are(folder: Path) -> None:
    lake = Lake(folder, schema={**SCHEMA, "v": "tinyint"}, quarantine_limit=100)
    lake.land("1.jsonl", [line("a", 0, 1, v=1, nam="ann")])
    lake.run()
    rename(lake, "nam", "name")
    lake.land("2.jsonl", [line("b", 0, 1, v=1000, name="bob")])
    lake.run()
    rename(lake, "v", "w")
    drop(lake, "name")
    lake.mend(lambda row: True, schema={**SCHEMA, "w": "int"})
    assert lake.table.append(host="local", replay_quarantine=True) is not None
    rename(lake, "w", "name")
    lake.run()
    assert not lake.table.reprocess(source="landing", host="local").left
    assert shown(lake, "name") == [("a", 1), ("b", 1000)]


@pytest.mark.long
def test_batches_before_and_after_are_merged_and_shown_together(lake: Lake) -> None:
    lake.land("2.jsonl", [line("c", 0, 1, v=3), line("d", 1, 1, v=4)])
    lake.table.append(host="local")
    lake.table.rename_column("v", "w")
    lake.land("3.jsonl", [line("d", 1, 2, w=5), line("e", 2, 2, v=6)])
    lake.table.append(host="local")
    assert lake.table.publish().batch == 1, "nothing is merged"
    wanted = [("a", 1, None), ("b", 2, None), ("c", 3, None), ("d", 5, None), ("e", None, 6)]
    assert shown(lake, "w", "v", snapshot="latest") == wanted
    lake.run()
    assert shown(lake, "w", "v") == wanted
    prove(lake)


# ---------------------------------------------------------------- races and crashes


def amid_every_call(
    lake: Lake, step: Callable[[Lake], Any], other: Callable[[Table], Any], check: Callable[[Lake], Any]
) -> set[str]:
    """Let ``other`` happen, as another process does it, before each store call of ``step``; the calls."""
    counted = lake.copy(lake.root.with_name(clock.new_id()))
    counted.points.arm(-1, Fault.BEFORE)
    step(counted)
    calls = list(counted.points.seen)
    for number, call in enumerate(calls):
        struck = lake.copy(lake.root.with_name(clock.new_id()))
        another = Table("t", struck.settings)
        struck.points.amid(number, partial(other, another))
        step(struck)
        struck.points.disarm()
        struck.reopen()
        try:
            check(struck)
        except BaseException as e:
            e.add_note(f"amid call {number} ({call})")
            raise
    return set(calls)


def names_of(lake: Lake, batch_file: str) -> bool:
    """Whether the batch of that file is behind the rename."""
    kinds = [(e.kind, [f.path for f in e.files]) for _, e in lake.entries()]
    at = next(i for i, (_, files) in enumerate(kinds) if batch_file in files)
    return any(kind == "schema" for kind, _ in kinds[:at])


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"new": 1}])
def test_rename_amid_an_append_never_puts_values_under_another_name(more: dict[str, Any], lake: Lake) -> None:
    """Also where the append brings a column, and with it a spec of its own."""
    lake.land("2.jsonl", [line("c", 0, 1, v=3, **more)])
    seen: set[bool] = set()

    def check(struck: Lake) -> None:
        struck.run()
        behind = names_of(struck, "2.jsonl")
        seen.add(behind)
        found = columns(struck)
        assert sorted(found) == sorted({"name", "w", *more} | ({"v"} if behind else set()))
        assert shown(struck, "w") == [("a", 1), ("b", 2), ("c", None if behind else 3)]
        assert not behind or shown(struck, "v") == [("a", None), ("b", None), ("c", 3)]
        assert not struck.table.reconcile(deep=True).unbalanced

    calls = amid_every_call(
        lake, lambda struck: struck.table.append(host="local"), lambda o: o.rename_column("v", "w"), check
    )
    assert seen == {True, False} or seen == {True}
    assert any(call.startswith("create _lakeupsert/ledger") for call in calls)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_rename_and_reuse_amid_a_merge(strategy: str, folder: Path) -> None:
    lake = begun(folder / "lake", strategy=strategy)
    lake.land("2.jsonl", [line("b", 0, 2, v=3), line("c", 0, 1, v=4)])
    lake.table.append(host="local")

    def swap(other: Table) -> None:
        other.rename_column("v", "w")
        other.rename_column("name", "v")

    def check(struck: Lake) -> None:
        struck.run()
        assert shown(struck, "w", "v") == [("a", 1, "ann"), ("b", 3, None), ("c", 4, None)]

    def merge(struck: Lake) -> None:
        struck.table.dedupe()
        struck.table.publish()

    amid_every_call(lake, merge, swap, check)


def merged_and_reused(other: Table) -> None:
    """All is merged, `name` takes the place of `v`, and the files have the new names."""
    other.run(host="local")
    other.drop_column("v")
    other.rename_column("name", "v")
    other.publish()
    other.reprocess(host="local")


@pytest.mark.long
@pytest.mark.parametrize("step", ["latest", "explain"])
def test_names_that_change_amid_a_read_are_those_of_before_or_after(step: str, lake: Lake) -> None:
    lake.land("2.jsonl", [line("c", 0, 2, v=3, name="cid")])
    lake.table.append(host="local")

    def read(struck: Lake) -> None:
        if step == "latest":
            rows = struck.table.to_arrow("latest").read_all().to_pylist()
            found = [[r[name] for name in ("v", "name") if name in r] for r in rows]
            assert found in ([[1, "ann"], [2, "bob"], [3, "cid"]], [["ann"], ["bob"], ["cid"]])
        else:
            [one] = struck.table.explain({"k": "a", "l": 0}).partitions
            assert one.shown is not None
            assert [one.shown[name] for name in ("v", "name") if name in one.shown] in ([1, "ann"], ["ann"])

    amid_every_call(lake, read, merged_and_reused, lambda struck: None)


def test_explain_has_the_names_that_readers_see(lake: Lake) -> None:
    lake.land("2.jsonl", [line("c", 0, 2, v=3, name="cid")])
    lake.table.append(host="local")
    drop(lake, "v")
    rename(lake, "name", "v")
    [one] = lake.table.explain({"k": "a", "l": 0}).partitions
    [seen, *_] = lake.table.to_arrow().read_all().to_pylist()
    assert one.shown is not None
    assert (one.shown["v"], one.shown["name"]) == (seen["v"], seen["name"]) == (1, "ann")


def test_files_of_before_a_rename_are_not_taken_again(lake: Lake) -> None:
    lake.land("2.jsonl", [line("a", 0, 2, v=9, name="new")])
    lake.run()
    rename(lake, "v", "x")
    rename(lake, "name", "v")
    lake.table.restore(0, dry=False)
    lake.run()
    with pytest.raises(ConfigurationError, match=r"2\.jsonl was read before columns were renamed or dropped") as e:
        lake.table.append(host="local", again=True)
    assert e.value.code == "renamed-since"


def test_old_name_that_comes_again_is_told(lake: Lake) -> None:
    rename(lake, "v", "amount")
    lake.land("2.jsonl", [line("c", 0, 1, v=3)])
    done = lake.table.append(host="local")
    assert done is not None
    [warning] = done.warnings
    assert all(text in warning for text in ("'amount'", "'v'", "2.jsonl", 'aliases = { v = "amount" }'))


def test_partition_column_in_the_key_may_get_a_type(folder: Path) -> None:
    lake = begun(folder, key=("k", "l", "d"))
    lake.mend(lambda row: True, schema={**SCHEMA, "d": "string"})
    lake.land("2.jsonl", [line("c", 0, 1, v=3)])
    lake.run()
    assert shown(lake, "v") == [("a", 1), ("b", 2), ("c", 3)]


@pytest.mark.long
def test_renames_race(lake: Lake) -> None:
    def check(struck: Lake) -> None:
        struck.table.publish()
        assert shown(struck, "w", "n") == [("a", 1, "ann"), ("b", 2, "bob")]

    amid_every_call(lake, lambda s: s.table.rename_column("v", "w"), lambda o: o.rename_column("name", "n"), check)

    def to(name: str, table: Table) -> None:
        try:
            table.rename_column("v", name)
        except ConfigurationError as e:
            assert e.code == "unknown-column"  # the other was first

    def one_of_them(struck: Lake) -> None:
        struck.table.publish()
        [name] = {"w", "x"} & set(columns(struck))
        assert shown(struck, name) == [("a", 1), ("b", 2)]

    amid_every_call(lake, lambda s: to("w", s.table), partial(to, "x"), one_of_them)


def test_renames_of_many_threads_all_count(lake: Lake) -> None:
    lake.land("2.jsonl", [line("a", 0, 2, **{f"c{i}": i for i in range(6)})])
    lake.run()
    barrier, failed = threading.Barrier(6), []

    def one(number: int) -> None:
        table = Table("t", lake.settings)
        barrier.wait()
        try:
            table.rename_column(f"c{number}", f"n{number}")
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    lake.table.publish()
    assert shown(lake, *(f"n{i}" for i in range(6)))[0] == ("a", *range(6))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("again", [True, False])
def test_rename_that_is_cut_off_is_repeated_or_comes_with_the_next_batch(again: bool, fault: Fault, lake: Lake) -> None:
    came = set()

    def check(struck: Lake) -> None:
        if again:
            assert struck.table.rename_column("v", "w").entry == 2
            struck.table.publish()
            assert columns(struck) == ["w", "name"]
        struck.land("2.jsonl", [line("c", 0, 1, w=3)])
        struck.run()
        is_one = columns(struck) == ["w", "name"]
        came.add(is_one)
        assert shown(struck, "w") == (
            [("a", 1), ("b", 2), ("c", 3)] if is_one else [("a", None), ("b", None), ("c", 3)]
        )
        if not is_one:
            assert shown(struck, "v") == [("a", 1), ("b", 2), ("c", None)]
        assert not struck.table.reconcile(deep=True).unbalanced

    calls = lake.strike_every_call(fault, lambda s: rename(s, "v", "w"), check)
    assert calls > 5
    assert came == ({True} if again else {True, False})


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def refusing(folder: Path) -> Table:
    """Columns in every role."""
    (folder / "landing").mkdir()
    (folder / "landing" / "1.csv").write_text("id,at,version,price,note,op\na,2020-01-01T01:00:00,1,1.5,x,I\n")
    config = folder / "lakeupsert.toml"
    config.write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["date(at) as day"]\n'
        'order_by = ["version"]\n[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n'
    )
    table = Table.open(config)
    table.run(host="local")
    return table


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("price", "note", "column-exists"),
        ("price", "NOTE", "column-exists"),
        ("price", "day", "column-exists"),
        ("price", "OP", "column-exists"),  # of landing files alone
        ("price", "price", "column-exists"),
        ("id", "key", "column-in-use"),
        ("ID", None, "column-in-use"),
        ("version", None, "column-in-use"),
        ("day", None, "column-in-use"),
        ("at", "moment", "column-in-use"),
        ("op", None, "column-in-use"),
        ("prise", "cost", "unknown-column"),
        ("nothing", None, "unknown-column"),
        ("price", "_lakeupsert_x", "unfit-column-name"),
        ("price", "_LAKEUPSERT_file", "unfit-column-name"),
        ("price", " ", "unfit-column-name"),
        ("price", "a\0b", "unfit-column-name"),
        ("price", "\udcff", "unfit-column-name"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_can_not_be_is_refused_and_changes_nothing(
    old: str, new: str | None, code: str, dry: bool, refusing: Table
) -> None:
    before = refusing.columns()
    with pytest.raises(ConfigurationError) as e:
        refusing.drop_column(old, dry=dry) if new is None else refusing.rename_column(old, new, dry=dry)
    assert e.value.code == code
    assert "Nothing was changed" in e.value.message
    assert ("'price'" in e.value.message) or old != "prise"
    assert refusing.columns() == before
    assert refusing.publish().batch == 1


def test_columns_that_decide_by_content_keep_their_names(folder: Path) -> None:
    """Each decides, in the order of their names."""
    lake = begun(folder, ties="content")
    for change in (lambda: lake.table.drop_column("v"), lambda: lake.table.rename_column("v", "w")):
        with pytest.raises(ConfigurationError) as e:
            change()
        assert e.value.code == "content-decides"


@pytest.mark.long
def test_column_may_be_called_in_another_case(lake: Lake) -> None:
    rename(lake, "V", "Name2")
    rename(lake, "name2", "NAME2")
    lake.land("2.jsonl", [line("c", 0, 1, name2=3)])
    del lake.landed["2.jsonl"][0]
    (lake.root / "landing" / "2.jsonl").write_text(
        json.dumps({"k": "c", "l": 0, "d": "2020-01-01", "ts": "2020-01-01T00:00:01", "name2": 3}) + "\n"
    )
    lake.run()
    assert columns(lake) == ["NAME2", "name"]
    assert shown(lake, "NAME2") == [("a", 1), ("b", 2), ("c", 3)]
    prove(lake)


def test_no_table_yet(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist yet"):
        Lake(folder).table.rename_column("v", "w")


# ---------------------------------------------------------------- the command


@pytest.mark.long
def test_command_lists_renames_and_drops(lake: Lake) -> None:
    config = str(lake.configure())

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, ["schema", *words, "--config", config])

    assert [line.split()[1] for line in run().stdout.splitlines()[2:]] == ["k", "l", "d", "ts", "v", "name"]
    dry = json.loads(run("rename", "v", "w", "--json").stdout)
    assert (dry["result"]["dry"], [c["name"] for c in dry["result"]["columns"]][4:]) == (True, ["w", "name"])
    assert columns(lake) == ["v", "name"]
    done = json.loads(run("rename", "v", "w", "--yes", "--json").stdout)
    assert (done["command"], done["exit_code"], done["result"]["published"], done["result"]["entry"]) == (
        "schema",
        0,
        True,
        2,
    )
    assert done["result"]["columns"][4] == {"id": 5, "name": "w", "type": "bigint", "role": None}
    assert columns(lake) == ["w", "name"]
    again = json.loads(run("rename", "v", "w", "--yes", "--json").stdout)
    assert (again["exit_code"], again["result"]["entry"]) == (0, 2), "it is so already"
    refused = run("rename", "w", "Name", "--yes", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (2, "column-exists")
    lake.land("2.jsonl", [line("c", 0, 1)])
    lake.table.append(host="local")
    waits = run("drop", "name", "--yes")
    assert waits.exit_code == 0
    assert "lakeupsert run" in waits.stderr
    lake.run()
    assert "name" not in columns(lake)
    assert "lakeupsert schema rename price unit_price" in run("rename", "--help").stdout


# ---------------------------------------------------------------- types: nothing gets narrower, and no key changes its bytes


def test_narrower_types_are_taken_and_values_that_do_not_fit_are_refused(folder: Path) -> None:
    lake = begun(folder, quarantine_limit=100)
    rename(lake, "v", "w")

    def landed(name: str, type_: Any, value: Any) -> dict[str, int]:
        rows = {"k": [name], "l": [0], "d": ["2020-01-01"], "ts": [1], "w": pa.array([value], type_)}
        table = pa.table(rows).set_column(3, "ts", pa.array([1], pa.timestamp("s")))
        pq.write_table(table, folder / "landing" / f"{name}.parquet")
        appended = lake.table.append(host="local")
        assert appended is not None
        return appended.entry.quarantined

    assert landed("narrow", pa.int32(), 7) == {}
    assert landed("text", pa.string(), "eight") == {"bad_type": 1}
    assert landed("fraction", pa.float64(), 1.5) == {"bad_type": 1}
    assert landed("whole", pa.float64(), 2.0) == {}
    lake.run()
    assert lake.table.view().spec.schema.field("w").type == pa.int64()
    assert shown(lake, "w") == [("a", 1), ("b", 2), ("narrow", 7), ("whole", 2)]


@pytest.mark.parametrize(
    ("first", "second"), [(pa.int32(), pa.int64()), (pa.int64(), pa.int32()), (pa.int64(), pa.string())]
)
def test_key_keeps_its_type_and_its_canonical_bytes(first: Any, second: Any, folder: Path) -> None:
    """A wider key column is converted value by value: what does not fit is refused, and a key stays the key that it is."""
    (folder / "landing").mkdir()
    config = folder / "lakeupsert.toml"
    config.write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
        'order_by = ["version"]\nquarantine_limit = 10\n'
    )
    table = Table.open(config)
    for version, (type_, ids) in enumerate([(first, [1, 2]), (second, [2, 2**40])]):
        values = (
            [str(i) for i in ids]
            if type_ == pa.string()
            else [i if type_ == pa.int64() else min(i, 2**31 - 1) for i in ids]
        )
        rows = {"id": pa.array(values, type_), "day": ["2020-01-01"] * 2, "version": [version] * 2}
        pq.write_table(pa.table(rows), folder / "landing" / f"{version}.parquet")
        table.run(host="local")
    found = table.to_arrow().read_all()
    assert found.schema.field("id").type == first
    wide = {pa.int32(): [2**31 - 1], pa.int64(): [2**40], pa.string(): [2**40]}[second] if first == pa.int64() else []
    assert found["id"].to_pylist() == [1, 2, *wide]
    assert found["version"].to_pylist()[:2] == [0, 1]
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize(
    ("given", "refused"),
    [("int", False), ("bigint", True), ("smallint", True), ("string", True), ("decimal(10,0)", True), ("date", True)],
)
def test_other_type_for_a_key_is_refused(given: str, refused: bool, folder: Path) -> None:
    lake = begun(folder)
    lake.mend(lambda row: True, schema={**SCHEMA, "l": given})
    lake.land("2.jsonl", [line("c", 0, 1, v=3)])
    if refused:
        for again in ({}, {"replay_quarantine": True}):
            with pytest.raises(ConfigurationError, match="fixed when a table is created") as e:
                lake.table.append(host="local", **again)
            assert e.value.code == "key-type-fixed"
        assert lake.table.publish().batch == 1
    else:
        lake.run()
        assert lake.table.view().spec.schema.field("l").type == pa.int32()
        assert shown(lake, "v") == [("a", 1), ("b", 2), ("c", 3)]


def test_columns_with_dots_and_spaces_are_found_in_old_files(lake: Lake, spark: Any) -> None:
    rename(lake, "v", "unit.price `x`")
    lake.land("2.jsonl", [line("c", 0, 1, **{"unit.price `x`": 3, "v": 9})])
    lake.run()
    assert shown(lake, "unit.price `x`", "v") == [("a", 1, None), ("b", 2, None), ("c", 3, 9)]
    rename(lake, "unit.price `x`", "v.v")
    wanted = [("a", 1, None), ("b", 2, None), ("c", 3, 9)]
    assert shown(lake, "v.v", "v") == wanted
    frame = lake.table.to_spark(spark).orderBy("k").select("k", "`v.v`", "v")
    assert [tuple(r) for r in frame.collect()] == wanted
    [explained] = lake.table.explain({"k": "c", "l": 0}).partitions
    assert explained.shown is not None
    assert (explained.shown["v.v"], explained.shown["v"]) == (3, 9)
    prove(lake)
