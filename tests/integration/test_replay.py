"""Quarantined rows, tried again: each counts once, whatever was mended, whatever the format, and whatever happens meanwhile."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyarrow import orc

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.storage import LocalStore
from lakeupsert.table.ledger import LandingFile, LedgerEntry, ReplayedFile, check_entry
from tests.harness.faults import FAULTS, Fault, Points
from tests.harness.lake import Lake, row

NARROW = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "int", "op": "string"}
WIDE = {**NARROW, "v": "bigint"}
FORMATS = ("parquet", "csv", "jsonl")
LARGE = 1 << 40
"""Too large for the column `v` as it is, and not for what it is mended to."""


def large(row: Any) -> bool:
    return row["v"] == LARGE


def larger(row: Any) -> bool:
    return isinstance(row["v"], int) and row["v"] >= LARGE


def land(lake: Lake, name: str, rows: list[dict[str, Any]]) -> None:
    """The same rows in the format that the name says."""
    path = lake.root / "landing" / name
    table = pa.Table.from_pylist(rows)
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".csv"):
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(r, default=str) + "\n" for r in rows))


def replay(lake: Lake) -> Any:
    return lake.table.append(replay_quarantine=True)


def quarantine(lake: Lake) -> list[dict[str, Any]]:
    """The rows of the newest batch's quarantine."""
    _, entry = lake.entries()[-1]
    return [r for f in entry.quarantine for r in pq.read_table(lake.root / "processed" / f.name).to_pylist()]


class BeforeLedger(Points):
    """Something else happens before the next ledger entry."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__()
        self._what: Callable[[], Any] | None = what

    def at(self, name: str, commit: bool = False) -> Any:
        if name.startswith("create _lakeupsert/ledger") and self._what is not None:
            what, self._what = self._what, None
            what()
        return super().at(name, commit)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A published night with a row that is too large for its column, and one that is no number."""
    lake = Lake(tmp_path, schema=NARROW)
    lake.land("1.jsonl", [row("a", 0, 1, 1)], refused=[row("b", 0, 1, LARGE), {**row("x", 0, 1), "v": "no number"}])
    lake.run()
    return lake


# ---------------------------------------------------------------- what can be mended, in each format


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_too_large_for_their_column_pass_when_a_wider_type_is_given(tmp_path: Path, kind: str) -> None:
    lake = Lake(tmp_path, schema={**NARROW, "n": "decimal(4,2)"})
    stamp = datetime(2020, 1, 1, 5)
    good = {"k": "a", "l": 1, "d": date(2020, 1, 1), "ts": stamp, "v": 1, "n": Decimal("1.50")}
    bad = {"k": 'q"é\n,', "l": 2, "d": date(2020, 1, 2), "ts": stamp, "v": LARGE, "n": Decimal("123456.75")}
    land(lake, f"1.{kind}", [good, bad])
    if kind == "parquet":  # its own types would widen the columns at once
        lake.land("0.jsonl", [row("z", 5, 1)])
        text = [{**r, "v": str(r["v"]), "n": str(r["n"])} for r in (good, bad)]
        land(lake, "1.parquet", text)
    lake.run()
    assert lake.table.status().quarantined == 1
    lake.mend(large, schema={**WIDE, "n": "decimal(12,2)"})
    shutil.rmtree(tmp_path / "landing")  # nothing of a row is read there again
    (tmp_path / "landing").mkdir()

    replayed = replay(lake)
    assert (replayed.entry.rows_read, replayed.entry.rows_appended, replayed.entry.files) == (1, 1, ())
    lake.run()
    (found,) = [r for r in lake.rows() if r["k"] == bad["k"]]
    assert {name: found[name] for name in bad} == bad
    assert lake.table.status().quarantined == 0


def test_numbers_for_clock_times_of_orc_are_those_of_a_direct_landing(tmp_path: Path) -> None:
    """Spark's ORC has timestamp_ntz as bigint. A table that took it for one, at any depth, keeps its microseconds."""
    at = pa.field("at", pa.int64(), metadata={"spark.sql.catalyst.type": "timestamp_ntz"})
    inner = pa.struct([("x", pa.string()), at, ("l", pa.list_(at)), ("m", pa.map_(pa.string(), pa.struct([at])))])
    types = {"k": pa.string(), "l": pa.int64(), "d": pa.date32(), "ts": pa.timestamp("us"), "v": pa.int64(), "n": inner}
    schema = pa.schema([*types.items(), at])
    lake = Lake(tmp_path, schema=NARROW)
    values = {"at": 5, "n": {"x": "y", "at": 6, "l": [7, None], "m": [("k", {"at": 8})]}}
    rows = [
        {"k": k, "l": 1, "d": date(2020, 1, 1), "ts": datetime(2020, 1, 1), "v": v, **values}
        for k, v in (("old", 1), ("new", 2), ("late", LARGE))
    ]
    plain = pa.Table.from_pylist(rows[:1], schema).set_column(4, "v", pa.array([1], pa.int32()))
    pq.write_table(plain, tmp_path / "landing" / "1.parquet")
    lake.table.run(host="local", workers=1)
    as_text = schema.set(4, pa.field("v", pa.string()))  # a number of its own would widen the column
    told = [{**r, "v": str(r["v"])} for r in rows[1:]]
    orc.write_table(pa.Table.from_pylist(told, as_text), tmp_path / "landing" / "2.orc")
    lake.table.run(host="local", workers=1)
    assert lake.table.status().quarantined == 1
    lake.mend(large, schema=WIDE)
    replay(lake)
    lake.table.run(host="local", workers=1)
    assert lake.table.to_arrow().schema.field("at").type == pa.int64()
    found = {r["k"]: r for r in lake.table.to_arrow().read_all().to_pylist()}
    assert found.keys() == {"old", "new", "late"}
    assert [{"at": r["at"], "n": r["n"]} for r in found.values()] == 3 * [values]


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_the_future_pass_when_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lake = Lake(tmp_path, schema=NARROW)
    now = datetime(2030, 1, 1, tzinfo=UTC)
    monkeypatch.setattr(clock, "now", lambda: now)
    monkeypatch.setattr(LocalStore, "clock_ahead", lambda self: None)  # the disk's clock does not go with it
    then = {"k": "a", "l": 1, "d": date(2020, 1, 1), "ts": datetime(2030, 1, 3), "v": 1}
    land(lake, f"1.{kind}", [then, {**then, "k": "b", "ts": datetime(2029, 1, 1)}])
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["b"]
    assert replay(lake) is None
    now = datetime(2030, 1, 2, 12, tzinfo=UTC)
    assert replay(lake).entry.received_at == int(now.timestamp() * 1e6)
    lake.run()
    assert [(r["k"], r["ts"]) for r in lake.rows()] == [("a", then["ts"]), ("b", datetime(2029, 1, 1))]


def test_columns_of_parquet_come_back_as_they_were(tmp_path: Path) -> None:
    """Whose text would be another value: bytes, text that is not UTF-8, floats, maps; also where it takes two fixes."""
    schema = {**NARROW, "n": "int"}
    lake = Lake(tmp_path, schema=schema)
    lake.land("0.jsonl", [row("z", 5, 1)])
    columns = {
        "k": pa.array(["a", "b", "c"]),
        "l": pa.array([1, 1, 1], pa.int32()),
        "d": pa.array([date(2020, 1, 1)] * 3),
        "ts": pa.array([datetime(2020, 1, 1)] * 3),
        "v": pa.array([str(LARGE), "1", "1"]),
        "n": pa.array(["1", "1", str(LARGE)]),
        "bytes": pa.array([b"\x00\xff", b"", b"\xfe"]),
        "map": pa.array([[("x", 1), ("y", None)]] * 3, pa.map_(pa.string(), pa.int64())),
        "double": pa.array([float("nan"), -0.0, 1e300]),
        "float": pa.array([0.1] * 3, pa.float32()),
        "list": pa.array([[{"at": datetime(2020, 1, 1, 1), "of": b"\xfe"}], [], None]),
    }
    broken = pa.array([b"ok", b"\xff", b"ok"]).view(pa.string())
    pq.write_table(pa.table({**columns, "text": broken}), tmp_path / "landing/1.parquet")
    lake.run()
    assert [(r["position"], r["reason_code"]) for r in quarantine(lake)] == [(n, "bad_type") for n in range(3)]
    lake.mend(large, schema={**schema, "v": "bigint"})
    replay(lake)
    lake.mend(large, schema={**schema, "v": "bigint", "n": "bigint"})
    assert replay(lake).entry.quarantined == {"bad_type": 1}, "text that is not UTF-8 still is not"
    lake.run()
    came = pa.table({**columns, "v": pa.array([LARGE, 1, 1]), "n": pa.array([1, 1, LARGE])}).to_pylist()
    found = [{name: r[name] for name in columns} for r in lake.rows() if r["k"] != "z"]
    assert str(found) == str([came[0], came[2]])  # as text, since NaN is not equal to itself


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_a_stamped_table_takes_later_have_the_stamp_of_the_replay(tmp_path: Path, kind: str) -> None:
    schema = {"k": "string", "l": "int", "d": "date", "v": "int"}
    lake = Lake(tmp_path, schema=schema, order_by=("received",), delete=None)
    rows = [{"k": "a", "l": 1, "d": date(2020, 1, 1), "v": LARGE}, {"k": "b", "l": 1, "d": date(2020, 1, 1), "v": 1}]
    if kind == "parquet":
        land(lake, "0.jsonl", [rows[1]])
        rows = [{**r, "v": str(r["v"])} for r in rows]
    land(lake, f"1.{kind}", rows)
    lake.run()
    lake.mend(large, schema={**schema, "v": "bigint"})
    stamp = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=replay(lake).entry.received_at)
    lake.run()
    assert [(r["v"], r["received"]) for r in lake.rows() if r["k"] == "a"] == [(LARGE, stamp)]


# ---------------------------------------------------------------- once


def test_rows_that_fail_again_stay_with_their_new_reason_and_are_tried_again(lake: Lake) -> None:
    lake.land("2.jsonl", [], refused=[{**row("c", 0, 1, LARGE), "l": None}])
    lake.run()
    assert replay(lake) is None, "nothing was mended"
    assert len(lake.entries()) == 3
    lake.mend(large, schema=WIDE)
    before = quarantine(lake)
    replayed = replay(lake)
    assert (replayed.entry.rows_appended, replayed.entry.quarantined) == (1, {"bad_type": 1})
    assert [(f.batch, f.rows) for f in replayed.entry.replayed] == [(1, 2)], "of batch 2 no row passes"
    (stays,) = quarantine(lake)
    (_, first), *_ = [e for e in lake.entries() if e[1].kind == "batch"]
    assert (stays["file"], stays["batch"], json.loads(stays["raw"])["k"]) == ("1.jsonl", first.batch_id, "x")
    assert before[0]["reason_code"] == "bad_type"
    assert lake.table.status().quarantined == 2
    assert replay(lake) is None
    lake.finish_and_check()


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_two_fixes_mend_pass_after_the_second(tmp_path: Path, kind: str) -> None:
    schema = {**NARROW, "n": "int"}
    lake = Lake(tmp_path, schema=schema)
    lake.land("0.jsonl", [row("z", 5, 1)])
    one, two, never = [
        {**row(k, 0, 1), "v": str(LARGE), "n": n} for k, n in (("a", "1"), ("b", str(LARGE)), (None, "1"))
    ]
    land(lake, f"1.{kind}", [one, two, never])
    lake.run()
    assert {r["reason_code"] for r in quarantine(lake)} == {"bad_type"}
    lake.mend(large, schema={**schema, "v": "bigint"})
    replay(lake)
    stay = quarantine(lake)
    assert [r["reason_code"] for r in stay] == ["bad_type", "null_key"]
    assert "Column 'n'" in stay[0]["reason"]
    lake.mend(large, schema={**schema, "v": "bigint", "n": "bigint"})
    replay(lake)
    lake.table.dedupe()  # by the messages that the replays sent
    lake.table.publish()
    assert [(r["k"], r["v"], r["n"]) for r in lake.rows() if r["k"] != "z"] == [("a", LARGE, 1), ("b", LARGE, LARGE)]


def test_rows_without_columns_are_carried_along_as_they_are(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema=NARROW)
    header, good, bad = "k,l,d,ts,v\n", "a,1,2020-01-01,2020-01-01,1\n", f"b,1,2020-01-01,2020-01-01,{LARGE}\n"
    (tmp_path / "landing/1.csv").write_text(header + "too,few\n" + bad + "x,1,2020-01-01,2020-01-01,?\n" + good)
    (tmp_path / "landing/2.csv").write_text("k,l,d\na,1,2020-01-01\n")
    (tmp_path / "landing/3.parquet").write_text("not whole")
    (tmp_path / "landing/4.csv").write_text(header + '"open\n')
    lake.run()
    before = quarantine(lake)
    lake.mend(large, schema=WIDE)
    replayed = replay(lake)
    assert replayed.entry.quarantined == {"bad_type": 1, "malformed": 2, "missing_column": 1}
    names = ("file", "position", "reason_code", "raw", "batch")
    stay = [r for r in before if r["file"] != "3.parquet" and str(LARGE) not in r["raw"]]
    assert [tuple(r[n] for n in names) for r in quarantine(lake)] == [tuple(r[n] for n in names) for r in stay]
    assert lake.table.status().quarantined == 5
    lake.run()
    assert [r["k"] for r in lake.rows()] == ["a", "b"]


def test_ties_go_to_the_replay_and_within_it_to_the_later_batch_and_row(lake: Lake) -> None:
    lake.land("2.jsonl", [row("b", 0, 1, 2), row("c", 0, 2, 2)], refused=[row("b", 0, 1, LARGE + n) for n in (3, 2)])
    lake.run()
    lake.land("3.jsonl", [], refused=[row("a", 0, 1, LARGE + 9), row("a", 0, 1, LARGE + 8), row("c", 0, 1, LARGE)])
    lake.run()
    lake.mend(larger, schema=WIDE)
    replay(lake)
    lake.finish_and_check()
    assert {r["k"]: r["v"] for r in lake.rows()} == {"a": LARGE + 8, "b": LARGE + 2, "c": 2}


@pytest.mark.long
def test_replay_that_a_restore_withdrew_can_be_repeated_and_brought_back(lake: Lake) -> None:
    lake.mend(large, schema=WIDE)
    replay(lake)
    lake.run()
    assert lake.table.status().quarantined == 1
    lake.table.restore(0, dry=False)
    lake.run()
    assert lake.table.status().quarantined == 2
    assert [r["k"] for r in lake.rows()] == ["a"]

    assert replay(lake).entry.rows_appended == 1
    lake.run()
    lake.table.restore(1, dry=False)
    assert replay(lake) is None, "the first replay counts again"
    lake.finish_and_check()
    assert [r["k"] for r in lake.rows()] == ["a", "b"]
    assert lake.table.status().quarantined == 1


def test_rows_of_a_withdrawn_batch_are_not_replayed(lake: Lake) -> None:
    lake.land("2.jsonl", [row("c", 0, 1, 1)], refused=[row("d", 0, 1, LARGE)])
    lake.run()
    lake.table.restore(0, dry=False)
    lake.mend(large, schema=WIDE)
    assert [f.batch for f in replay(lake).entry.replayed] == [1]
    lake.finish_and_check()
    assert [r["k"] for r in lake.rows()] == ["a", "b"]


@pytest.mark.parametrize("meanwhile", ["replay", "append", "restore"])
def test_replay_that_loses_a_race_looks_again(lake: Lake, meanwhile: str) -> None:
    lake.land("2.jsonl", [row("c", 0, 1, 1)], refused=[row("d", 0, 1, LARGE)])
    lake.run()
    lake.land("3.jsonl", [row("e", 0, 1, 1)])
    lake.mend(large, schema=WIDE)
    other = Lake(lake.root, **lake.given)
    acts: dict[str, Callable[[], Any]] = {
        "replay": lambda: replay(other),
        "append": lambda: other.table.append(host="local"),
        "restore": lambda: other.table.restore(0, dry=False),
    }
    lake.points = BeforeLedger(acts[meanwhile])
    lake.reopen()
    replayed = replay(lake)
    batches = [] if replayed is None else [f.batch for f in replayed.entry.replayed]
    assert batches == {"replay": [], "append": [1, 2], "restore": [1]}[meanwhile]
    assert lake.stored_files() == lake.named_files(), "what the loser wrote is gone"
    lake.finish_and_check()
    other.table.close()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_struck_replay_counts_every_row_once(folder: Path, fault: Fault) -> None:
    """Every call of a replay fails before its effect, after it, and kills it; then it is repeated, and again."""
    begun = Lake(folder / "begun", schema=NARROW)
    begun.land("1.jsonl", [row("a", 0, 1, 1)], refused=[row("b", 0, 1, LARGE), {**row("x", 0, 1), "v": "no number"}])
    begun.run()
    begun.land("2.jsonl", [row("a", 1, 1, 1)], refused=[row("b", 1, 2, LARGE), row("b", 0, 2, LARGE)])
    begun.run()
    begun.mend(large, schema=WIDE)

    def check(lake: Lake) -> None:
        replay(lake)
        replay(lake)
        lake.finish_and_check()
        assert [(r["k"], r["v"]) for r in lake.rows()] == [("a", 1), ("b", LARGE), ("a", 1), ("b", LARGE)]
        assert sum(e.rows_appended for _, e in lake.entries() if e.replayed) == 3
        assert lake.table.status().quarantined == 1

    assert begun.strike_every_call(fault, replay, check) > 10


# ---------------------------------------------------------------- around it


def test_nothing_to_replay_is_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert replay(lake) is None
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    assert replay(lake) is None
    assert len(lake.entries()) == 2


def test_quarantine_limit_does_not_hold_for_rows_that_fail_again(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema=NARROW, quarantine_limit=3)
    wrong = [{**row("x", 0, 1), "v": "no number"}] * 2
    lake.land("1.jsonl", [row("a", 0, 1, 1)], refused=[row("b", 0, 1, LARGE), *wrong])
    lake.run()
    lake.mend(large, schema=WIDE, quarantine_limit=0)
    assert replay(lake).entry.quarantined == {"bad_type": 2}


def test_batch_id_of_another_batch_is_refused(lake: Lake) -> None:
    lake.land("2.jsonl", [row("c", 0, 1, 1)], refused=[row("d", 0, 1, LARGE)])
    lake.table.append(host="local", batch_id="night")
    lake.mend(large, schema=WIDE)
    files = lake.stored_files()
    with pytest.raises(ConfigurationError) as refused:
        lake.table.append(replay_quarantine=True, batch_id="night")
    assert refused.value.code == "batch-id-taken"
    assert lake.stored_files() == files
    assert lake.table.append(replay_quarantine=True, batch_id="mended") is not None
    assert lake.table.append(replay_quarantine=True, batch_id="mended") is None, "a repeated call"


def test_explain_names_the_quarantine_file_of_a_replayed_row(lake: Lake) -> None:
    (_, entry) = lake.entries()[-1]
    lake.mend(large, schema=WIDE)
    replay(lake)
    lake.run()
    ((_, came),) = [
        (v.outcome, v)
        for p in lake.table.explain({"k": "b", "l": 0}).partitions
        for v in p.versions
        if v.source == "appended"
    ]
    assert (came.batch, came.file, came.place) == (2, entry.quarantine[0].name, 0)


def test_rows_that_spark_refused_are_replayed(tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path, schema=NARROW)
    for kind in FORMATS:
        land(lake, f"1.{kind}", [{**row(kind, 0, 1), "v": str(v)} for v in (LARGE, 1)])
    lake.run(host="spark")
    assert lake.table.status().quarantined == 3
    lake.mend(large, schema=WIDE)
    assert lake.table.append(host="spark", replay_quarantine=True) is not None
    lake.run(host="local")
    assert [(r["k"], r["v"]) for r in lake.rows()] == [(kind, LARGE) for kind in sorted(FORMATS)]


def test_command_says_what_was_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lake = """
        [tables.t]
        landing = "landing"
        processed = "processed"
        key = ["k"]
        partition_by = ["d"]
        order_by = ["ts"]
        quarantine_limit = 2
        [tables.t.schema]
        v = "int"
        """
    Path("landing").mkdir()
    Path("lakeupsert.toml").write_text(lake)
    Path("landing/1.csv").write_text(f"k,d,ts,v\na,2020-01-01,1,1\nb,2020-01-01,1,{LARGE}\nc,2020-01-01,1,?\n")

    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == code, result.output
        return result.stdout

    call("run", "--host", "local")
    assert json.loads(call("append", "--replay-quarantine", "--json", code=1))["error"]["code"] == "nothing-passes"
    Path("lakeupsert.toml").write_text(lake.replace('"int"', '"bigint"'))
    assert "replay of 2 quarantined rows, 1 row" in call("append", "--replay-quarantine")
    call("append", "--replay-quarantine", code=1)
    assert json.loads(call("status", "--json"))["result"]["quarantined"] == 1
    error = json.loads(call("append", "--replay-quarantine", "--again", "--json", code=2))["error"]
    assert error["code"] == "two-sources"


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "restore"},
        {"files": (LandingFile(path="1.jsonl", size=1, etag="", sha256="", rows=2),)},
        {"replayed": (ReplayedFile(batch=1, name="a", rows=3),)},
        {"replayed": (ReplayedFile(batch=1, name="a", rows=1), ReplayedFile(batch=1, name="a", rows=1))},
    ],
)
def test_ledger_entry_that_contradicts_what_it_replays_is_not_written(wrong: dict[str, Any]) -> None:
    before = LedgerEntry(kind="create", batch_id="", received_at=1, spec_version=0)
    right = LedgerEntry(
        kind="batch",
        batch_id="again",
        received_at=2,
        spec_version=0,
        rows_read=2,
        quarantined={"null_key": 2},
        replayed=(ReplayedFile(batch=1, name="a", rows=2),),
    )
    check_entry(before, right)
    with pytest.raises(DamagedTableError, match="replay"):
        check_entry(before, msgspec.structs.replace(right, **wrong))
