"""`reconcile`: a lake that was left alone balances; one row lost, doubled or altered behind its back does not."""

import json
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table, phrases
from lakeupsert.cli import main
from lakeupsert.config import DeleteSettings
from lakeupsert.operations.recompute import recompute, sql
from lakeupsert.pipeline.workers.worker import UNANSWERED, mark_failed
from lakeupsert.queue import Message
from lakeupsert.rows.datafiles import from_bytes, to_bytes
from lakeupsert.table import metadata
from lakeupsert.table.manifest import Manifest
from tests.harness.lake import Lake, made_once, row

DAYS = 3


@pytest.fixture(autouse=True, scope="module")
def one_duckdb() -> Iterator[None]:
    """None: each recomputation has a database of its own, as it has for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "connect", sql.connect)
        yield


@made_once
def lake(folder: Path) -> Lake:
    """Nights of updates, ties, deletes and refused rows in three partitions, and a night that a restore took back."""
    rng = random.Random(3)
    lake = Lake(folder)
    for night in range(4):
        rows = [
            row(
                rng.choice("abcdefgh"),
                rng.randrange(DAYS),
                rng.randrange(5),
                rng.randrange(99),
                op=rng.choice([None, None, None, "D"]),
            )
            for _ in range(60)
        ]
        lake.land(f"{night}.jsonl", rows, refused=[row("a", 0, 1) | {"l": None}])
        lake.run()
    lake.table.restore(2, dry=False)
    lake.run()
    return lake


def call(lake: Lake, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--config", str(lake.configure()), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def reconcile(lake: Lake, deep: bool = False) -> dict[str, str]:
    """What does not balance, by partition; a new process looks."""
    lake.reopen()
    return {p.partition: p.difference or "" for p in lake.table.reconcile(deep=deep).unbalanced}


def partitions(lake: Lake) -> list[str]:
    return [f"d=2020-01-0{day + 1}" for day in range(DAYS)]


def tamper(lake: Lake, partition: str, change: Callable[[Any], Any], tombstones: bool = False) -> None:
    """Rewrite the file of a partition, and its manifest so that it agrees with itself."""
    folder = lake.root / "processed/_lakeupsert/partitions" / partition
    head = min(folder.glob("v*.json"))
    document = json.loads(head.read_bytes())
    manifest = msgspec.convert(document["body"], Manifest)
    [bucket] = manifest.buckets
    [file] = bucket.tombstones if tombstones else bucket.base
    if tombstones:
        rows = change(from_bytes(file.inline))
        inline = to_bytes(rows)
        files: Any = (msgspec.structs.replace(file, rows=rows.num_rows, bytes=len(inline), inline=inline),)
        changed = {"tombstones": files if rows.num_rows else ()}
    else:
        path = lake.root / "processed" / file.name
        rows = change(pq.ParquetFile(path).read()).replace_schema_metadata(None)  # without the checksums of before
        pq.write_table(rows, path)
        changed = {"base": (msgspec.structs.replace(file, rows=rows.num_rows, bytes=path.stat().st_size),)}
    delta = rows.num_rows - file.rows
    c = bucket.counters
    counters = msgspec.structs.replace(
        c,
        superseded=c.superseded - delta,
        **{"tombstones" if tombstones else "live": (c.tombstones if tombstones else c.live) + delta},
    )
    bucket = msgspec.structs.replace(bucket, counters=counters, **changed)
    document["body"] = msgspec.to_builtins(msgspec.structs.replace(manifest, buckets=(bucket,)))
    head.write_bytes(metadata.encode(document))


def lose(at: int) -> Callable[[Any], Any]:
    return lambda rows: pa.concat_tables([rows.slice(0, at), rows.slice(at + 1)])


def double(at: int) -> Callable[[Any], Any]:
    return lambda rows: pa.concat_tables([rows.slice(0, at + 1), rows.slice(at)])


def alter(at: int) -> Callable[[Any], Any]:
    def change(rows: Any) -> Any:
        values = rows["v"].to_pylist()
        values[at] += 1
        return rows.set_column(rows.schema.get_field_index("v"), rows.schema.field("v"), pa.array(values, pa.int64()))

    return change


# ---------------------------------------------------------------- what balances


def test_lake_with_ties_deletes_refusals_and_a_restore_balances(lake: Lake) -> None:
    found = lake.table.reconcile(deep=True)
    assert not found.unbalanced
    assert all(p.by_digest for p in found.proof)
    assert sum(p.rows_appended for p in found.proof) == 240
    assert sum(p.withdrawn for p in found.proof) == 60
    assert all(p.rows_live and p.rows_superseded for p in found.proof)
    assert sum(p.tombstones for p in found.proof) > 1
    assert found.resent == 0
    assert found.published is None


@pytest.mark.long
def test_the_answer_of_the_command(lake: Lake) -> None:
    found = call(lake, "reconcile", "--deep", "--partition", "2020-01-02")["result"]
    assert list(found) == ["resent", "published", "proof", "deep"]
    (proof,) = found["proof"]
    assert proof["partition"] == "d=2020-01-02"
    assert proof["balanced"] is True
    assert proof["rows_appended"] == sum(
        proof[name]
        for name in ("rows_live", "tombstones", "rows_superseded", "tombstones_dropped", "refused", "withdrawn")
    )
    assert len(call(lake, "reconcile", "--from", "2020-01-02")["result"]["proof"]) == 2


@pytest.mark.long
def test_deep_says_which_engine_compared_what(lake: Lake) -> None:
    assert call(lake, "reconcile")["result"]["deep"] is None
    deep = call(lake, "reconcile", "--deep")["result"]["deep"]
    assert (deep.pop("engine"), deep.pop("version")) == ("duckdb", duckdb.__version__)
    assert deep == {"landing_files": 3, "rows": 180, "partitions": 3, "differ": [], "not_compared": []}
    options = ["--config", str(lake.configure())]
    text = CliRunner().invoke(main, ["reconcile", "--deep", *options]).stdout
    assert re.search(
        rf"DuckDB {re.escape(duckdb.__version__)}.*\b3 landing files.*\b180 rows.*\b3 of 3 partitions", text
    )
    assert "DuckDB" not in CliRunner().invoke(main, ["reconcile", *options]).stdout

    tamper(lake, "d=2020-01-02", alter(0))
    deep = call(lake, "reconcile", "--deep", code=1)["result"]["deep"]
    assert (deep["partitions"], deep["differ"], deep["not_compared"]) == (3, ["d=2020-01-02"], [])
    (lake.root / "landing/1.jsonl").unlink()
    deep = call(lake, "reconcile", "--deep", code=1)["result"]["deep"]
    assert (deep["partitions"], deep["landing_files"], len(deep["not_compared"])) == (0, 0, 3)


@pytest.mark.long
def test_adopted_partition_is_balanced_by_counts_until_a_merge_has_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "processed"
    columns = {"k": ["a", "b", "a"], "l": [0, 0, 0], "ts": [datetime(2020, 1, 1)] * 3, "v": [1, 2, 3]}
    for day in (1, 2):
        (folder / f"d=2020-01-0{day}").mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / f"d=2020-01-0{day}/x.parquet")
    lake = Lake(tmp_path, schema={}, delete=None)
    lake.table.adopt()
    assert [p.by_digest for p in lake.table.reconcile(deep=True).proof] == [False, False]
    (tmp_path / "landing/1.jsonl").write_text('{"k":"b","l":0,"d":"2020-01-01","ts":"2020-01-02","v":9}\n')
    lake.run()
    found = lake.table.reconcile(deep=True)
    assert [(p.difference, p.by_digest, p.rows_superseded) for p in found.proof] == [(None, True, 2), (None, False, 0)]
    assert "d=2020-01-02" in call_warning(lake)
    lake.table.restore(0, dry=False)
    lake.run()
    assert not reconcile(lake, deep=True)
    tamper(lake, "d=2020-01-02", lose(0))
    assert list(reconcile(lake)) == ["d=2020-01-02"]


def call_warning(lake: Lake) -> str:
    lake.configure()
    (warning,) = call(lake, "reconcile")["warnings"]
    return str(warning)


def test_all_types_and_formats_are_recomputed_without_a_false_alarm(tmp_path: Path) -> None:
    """Dates in text, decimals with digits to keep, zones, quotes, blank lines, refused records between good ones."""
    (tmp_path / "landing").mkdir()
    (tmp_path / "lakeupsert.toml").write_text(
        '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["k", "n"]\npartition_by = ["d"]\n'
        'order_by = ["ts", "f"]\nquarantine_limit = 3\n'
        '[tables.t.schema]\nk = "string"\nn = "decimal(30,4)"\nd = "date"\nts = "timestamp_ntz"\n'
        'f = "double"\nt = "string"\nb = "boolean"\nz = "timestamp"\nbin = "binary"\n'
    )
    (tmp_path / "landing/1.csv").write_bytes(
        b"\xef\xbb\xbfk,n,d,ts,f,t,b,z,bin\r\n"
        b'"a,""x""\r\n",12345678901234567890123456.7800,2020-01-01,2020-01-01T02:00:00+02:00,1e3,,TRUE,2020-01-01,\\x41\r\n'
        b"bad,1,2020-01-01\r\n\r\n"
        b",1,2020-01-01,2020-01-01,1,,true,2020-01-01,\r\n"
        b"c,0.5,2020-01-02,2020-01-01 00:00:00.25,-0.0, x ,false,2020-01-01T00:00:00Z,\xc3\xa4\r\n"
    )
    (tmp_path / "landing/2.jsonl").write_text(
        '{"k":"c","n":0.50,"d":"2020-01-02","ts":"2020-01-01 00:00:00.25","f":0,"t":8.70}\n'
        "no json\n\n"
        '{"k":"ä","n":12345678901234567890.5,"d":"2020-01-02","ts":null,"f":null,"t":true,"list":[1,null],"obj":{"x":1.5}}\n'
        '{"k":"e","n":1,"d":"2020-01-02","ts":"2020-01-01","f":"NaN","t":{"x":1},"list":[],"obj":null}\n'
        '{"k":"e","n":1,"d":"2020-01-02","ts":"2020-01-01","f":5,"t":"lost to NaN"}\n',
        encoding="utf-8",
    )
    table = Table.open(tmp_path / "lakeupsert.toml")
    table.run(host="local")
    pq.write_table(
        pa.table(
            {
                "k": pa.array(["p", "p", None, "p"]).dictionary_encode(),
                "n": pa.array([Decimal("1.5"), Decimal("1.5"), Decimal("1"), Decimal("2")], pa.decimal128(5, 1)),
                "d": pa.array([date(2020, 1, 1)] * 4),
                "ts": pa.array([datetime(2020, 1, 1, 0, 0, 0, 5)] * 4, pa.timestamp("us")),
                "f": pa.array([0.1, 0.1, 0.1, None], pa.float32()),
                "narrow": pa.array([0.1, 0.2, 0.3, 0.4], pa.float32()),
            }
        ),
        tmp_path / "landing/3.parquet",
    )
    table.run(host="local")
    (tmp_path / "landing/4.parquet").write_bytes(b"PAR1 no Parquet")
    rows = {"k": ["q"], "n": [Decimal("7")], "d": [date(2020, 1, 1)], "ts": [datetime(2020, 1, 1)], "f": [0.1]}
    pq.write_table(pa.table(rows), tmp_path / "landing/5.parquet")
    table.run(host="local")
    found = table.reconcile(deep=True)
    table.close()
    assert [(p.partition, p.difference, p.by_digest) for p in found.proof] == [
        ("d=2020-01-01", None, True),
        ("d=2020-01-02", None, True),
    ]
    assert sum(p.rows_appended for p in found.proof) == 10


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_are_compared_to_the_last_digit(tmp_path: Path, unit: str) -> None:
    lake = Lake(tmp_path, schema={}, delete=None)
    for night, spans in enumerate(([1, -3, 4], [86_400_000_001, 2, None])):
        rows = {"k": ["a", "b", str(night)], "l": [0] * 3, "d": ["2020-01-01"] * 3}
        columns = {"ts": pa.array([1 - night, 5, 5], pa.duration(unit)), "v": pa.array(spans, pa.duration(unit))}
        pq.write_table(pa.table(rows | columns), tmp_path / f"landing/{night}.parquet")
        lake.run()
    assert not reconcile(lake, deep=True)

    def one_more(rows: Any) -> Any:
        at = rows.schema.get_field_index("v")
        spans = pc.add(rows["v"].cast(pa.int64()), 1).cast(pa.duration(unit))
        return rows.set_column(at, rows.schema.field(at), spans)

    tamper(lake, "d=2020-01-01", one_more)
    assert "3 different" in reconcile(lake, deep=True)["d=2020-01-01"]


def test_column_that_duckdb_can_not_hold_is_no_alarm_but_an_error(tmp_path: Path) -> None:
    type_ = pa.list_(pa.duration("us"))
    lake = Lake(tmp_path, schema={}, delete=None)
    rows = {"k": ["a"], "l": [0], "d": ["2020-01-01"], "ts": [1], "v": pa.nulls(1, type_)}
    pq.write_table(pa.table(rows), tmp_path / "landing/1.parquet")
    lake.run()
    lake.configure()
    error = call(lake, "reconcile", "--deep", code=2)["error"]
    assert error["code"] == "unfit-for-duckdb"
    assert f"'v' is {type_}" in error["message"]


def test_refused_time_does_not_stop_the_other_program(tmp_path: Path) -> None:
    """DuckDB fails at a time beyond the day, wherever it is in a file."""
    lake = Lake(tmp_path, schema={}, delete=None)
    times = pa.array([0, 86_400_000_000, -1, None], pa.int64()).view(pa.time64("us"))
    rows = {"k": ["a", "b", "c", "d"], "l": [0] * 4, "d": ["2020-01-01"] * 4, "ts": [1] * 4, "v": times}
    pq.write_table(pa.table(rows), tmp_path / "landing/1.parquet")
    lake.run()
    assert lake.table.quarantine().read_all()["position"].to_pylist() == [1, 2]
    assert not reconcile(lake, deep=True)


def test_text_that_is_not_utf_8_does_not_stop_the_other_program(tmp_path: Path) -> None:
    """ClickHouse calls bytes text. DuckDB fails at them, wherever they are in a file."""
    lake = Lake(tmp_path, schema={}, delete=None)
    text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff", b"b", b"c"]).buffers())
    rows = {"k": ["a", "b", "c"], "l": [0] * 3, "d": ["2020-01-01"] * 3, "ts": [1] * 3, "v": text}
    pq.write_table(pa.table(rows), tmp_path / "landing/1.parquet")
    lake.run()
    assert lake.table.quarantine().read_all()["position"].to_pylist() == [0]
    assert not reconcile(lake, deep=True)


def test_stamped_rows_rank_by_their_batch_and_place(tmp_path: Path) -> None:
    """In folders that look like partitions, with the operation kept, and a partition column of text."""
    lake = Lake(
        tmp_path,
        schema={},
        order_by=("at",),
        partition_by=("shop",),
        delete=DeleteSettings(column="op", values=("D", "7"), keep=True),
    )
    for night, op in enumerate(["I", "D", "7"]):
        folder = tmp_path / f"landing/d=2020-01-0{night + 1}"
        folder.mkdir()
        lines = [{"k": k, "l": 1, "shop": "a/b 100%", "op": op, "v": v} for v in (1, 2) for k in "abc"[: 3 - night]]
        (folder / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lake.run()
    [proof] = lake.table.reconcile(deep=True).proof
    assert (proof.difference, proof.by_digest) == (None, True)
    assert (proof.rows_appended, proof.rows_live, proof.tombstones) == (12, 1, 2)


def test_digests_do_not_change_with_a_widened_column(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={}, delete=None)
    for night, (type_, amount) in enumerate([(pa.int8(), pa.decimal128(4, 1)), (pa.int64(), pa.decimal128(12, 3))]):
        rows = {"k": ["a", "b", "c"], "l": [-1, 0, 1], "d": ["2020-01-01"] * 3, "v": [1, 2, 3]}
        ordering = {
            "ts": pa.array([-5, 0, 5 - night], type_),
            "amount": pa.array([Decimal(-1), None, Decimal("2.5")], amount),
        }
        pq.write_table(pa.table(rows | ordering), tmp_path / f"landing/{night}.parquet")
        lake.table = Table("t", msgspec.structs.replace(lake.settings, order_by=("ts", "amount")))
        lake.table.run(host="local")
    [proof] = lake.table.reconcile(deep=True).proof
    assert (proof.difference, proof.by_digest, proof.rows_superseded) == (None, True, 3)


# ---------------------------------------------------------------- what does not


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [lose, double, alter])
@pytest.mark.parametrize("seed", range(3))
def test_deep_catches_one_row_lost_doubled_or_altered(lake: Lake, change: Any, seed: int) -> None:
    rng = random.Random(seed)
    partition = rng.choice(partitions(lake))
    tamper(lake, partition, lambda rows: change(rng.randrange(rows.num_rows))(rows))
    found = call(lake, "reconcile", "--deep", code=1)
    assert found["error"]["code"] == "not-balanced"
    assert found["error"]["partition"] == partition
    assert f"lakeupsert reprocess --partition {partition} " in found["error"]["next"]
    assert [p["partition"] for p in found["result"]["proof"] if not p["balanced"]] == [partition]


@pytest.mark.long
@pytest.mark.parametrize("partition", ["d=2020-01-01", "d=2020-01-02", "d=2020-01-03"])
def test_counts_and_digests_catch_lost_and_doubled_rows(lake: Lake, partition: str, tmp_path: Path) -> None:
    n = lake.table.objects.partition(partition).head().body.buckets[0].counters.live  # type: ignore[union-attr]
    for at in range(n):
        other = lake.copy(tmp_path / f"copy-{at}")
        tamper(other, partition, (lose if at % 2 else double)(at))
        assert list(reconcile(other)) == [partition]
        other.table.close()


@pytest.mark.long
def test_one_row_in_place_of_another_is_caught_by_the_digest(lake: Lake) -> None:
    tamper(
        lake,
        "d=2020-01-02",
        lambda rows: rows.set_column(0, rows.schema.field(0), pa.array(["0", *rows["k"].to_pylist()[1:]])),
    )
    assert "digest" in reconcile(lake)["d=2020-01-02"]


@pytest.mark.long
def test_the_command_that_mends_it_names_any_partition(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={}, partition_by=("shop",), delete=None)
    line = {"k": "a", "l": 0, "shop": "it's a/b 100%", "ts": "2020-01-01", "v": 1}
    (tmp_path / "landing/1.jsonl").write_text(json.dumps(line) + "\n")
    lake.run()
    lake.configure()
    [file] = lake.table.files()
    Path(file.path).write_bytes(b"damaged")
    error = call(lake, "reconcile", code=1)["error"]
    _, *command = shlex.split(re.findall(r"`(lakeupsert reprocess [^`]+)`", error["next"])[0])
    assert call(lake, *command, "--host", "local")["result"]["partitions"] == [error["partition"]]
    assert call(lake, "reconcile", "--deep")["ok"]


@pytest.mark.long
@pytest.mark.parametrize("selected", [["--partition", "2020-01-09"], ["--from", "2020-01-09"]])
def test_selection_that_no_partition_is_in_is_warned_of(lake: Lake, selected: list[str]) -> None:
    found = call(lake, "reconcile", *selected)
    assert found["result"]["proof"] == []
    assert "nothing was proved" in found["warnings"][0]
    assert not call(lake, "reconcile")["warnings"]


@pytest.mark.long
def test_missing_tombstone_is_caught(lake: Lake) -> None:
    tamper(lake, "d=2020-01-01", lose(0), tombstones=True)
    assert "digest" in reconcile(lake)["d=2020-01-01"]


@pytest.mark.long
def test_base_file_that_is_gone_is_told_and_the_other_partitions_are_proved(lake: Lake) -> None:
    for file in (lake.root / "processed/d=2020-01-01").iterdir():
        file.unlink()
    found = reconcile(lake)
    assert list(found) == ["d=2020-01-01"]
    assert "is missing" in found["d=2020-01-01"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["manifest", "base file"])
def test_what_is_gone_keeps_no_other_partition_from_its_proof(lake: Lake, kind: str) -> None:
    manifests = lake.root / "processed/_lakeupsert/partitions/d=2020-01-01"
    lost = min(manifests.iterdir()) if kind == "manifest" else Path(lake.table.files(where="d = '2020-01-01'")[0].path)
    lost.unlink()
    tamper(lake, "d=2020-01-03", alter(0))
    found = call(lake, "reconcile", "--deep", code=1)
    assert [p["balanced"] for p in found["result"]["proof"]] == [False, True, False]
    assert (found["error"]["code"], found["error"]["partition"]) == ("not-balanced", "d=2020-01-01")
    assert lost.name in found["error"]["message"]
    assert not found["warnings"]


@pytest.mark.long
def test_partition_whose_version_lacks_a_batch_is_told(lake: Lake) -> None:
    """A snapshot that shows an older version than its batch says, as no publisher ever makes."""
    head = min((lake.root / "processed/_lakeupsert/snapshots").glob("v*.json"))
    document = json.loads(head.read_bytes())
    document["body"]["partitions"]["d=2020-01-01"]["version"] -= 1
    head.write_bytes(metadata.encode(document))
    told = str(reconcile(lake)["d=2020-01-01"])
    assert "merged up to batch 4" in told
    assert "batch 5 touches it" in told


@pytest.mark.long
def test_ledger_entry_that_contradicts_itself_is_told(lake: Lake) -> None:
    entry = sorted((lake.root / "processed/_lakeupsert/ledger").glob("v*.json"))[-2]
    document = json.loads(entry.read_bytes())
    document["body"]["rows_read"] += 1
    entry.write_bytes(metadata.encode(document))
    assert (
        "batch 1: 62 rows read are not 60 appended + 1 quarantined"
        in call(lake, "reconcile", code=1)["error"]["message"]
    )


@pytest.mark.long
def test_reprocess_from_landing_mends_a_row_that_is_lost(lake: Lake) -> None:
    tamper(lake, "d=2020-01-02", lose(0))
    lake.reopen()
    lake.table.reprocess({"d=2020-01-02"}.__contains__, source="landing", host="local")
    assert not reconcile(lake, deep=True)
    assert all(p.by_digest for p in lake.table.reconcile().proof)


@pytest.mark.long
def test_landing_file_that_is_gone_leaves_its_partitions_unproved(lake: Lake) -> None:
    landed = lake.root / "landing/1.jsonl"
    shutil.move(landed, lake.root / "aside")
    error = call(lake, "reconcile", "--deep", code=1)["error"]
    assert error["code"] == "sources-gone"
    assert re.search(r"1\.jsonl of batch (\d+)\. .*\(batches: \1\)", error["message"]), error["message"]
    shutil.copy(lake.root / "aside", landed)  # with another etag, and the same content
    assert call(lake, "reconcile", "--deep")["ok"]
    landed.write_text(landed.read_text().replace('"v": ', '"v": 1'))
    assert call(lake, "reconcile", "--deep", code=1)["error"]["code"] == "sources-gone"
    (lake.root / "landing/3.jsonl").unlink()  # of a withdrawn batch: nobody needs it
    shutil.copy(lake.root / "aside", landed)
    assert call(lake, "reconcile", "--deep")["ok"]


# ---------------------------------------------------------------- what it finishes


def test_lost_message_is_sent_again_and_a_whole_batch_published(lake: Lake) -> None:
    lake.land("4.jsonl", [row("z", day, 9, 1) for day in range(2)])
    lake.table.append(host="local")
    lost, leased = lake.opened.resources.queue.receive(2, 900)
    assert lake.table.reconcile().resent == 0, "both are on their way"
    lake.opened.resources.queue.ack(lost)
    assert lake.table.reconcile().resent == 2
    lake.opened.resources.queue.release(leased)
    lake.table.dedupe()
    snapshot = lake.table.snapshots()[0].number
    found = lake.table.reconcile()
    assert (found.resent, found.published) == (0, snapshot + 1)
    assert not found.unbalanced
    assert lake.table.reconcile().published is None


@pytest.mark.parametrize("doubled", [0, 1])
def test_dead_partition_alone_is_sent_again_however_many_messages_are_on_their_way(lake: Lake, doubled: int) -> None:
    """It is marked by the same call; by the next one, on a queue that is empty, it has failed before and is left alone."""
    lake.land("4.jsonl", [row("z", day, 9, 1) for day in range(3)])
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    dead, other, _ = queue.receive(3, 900)
    queue.bury(dead, UNANSWERED)
    queue.send([other.message] * doubled)
    lake.reopen()
    found = lake.table.reconcile(counted=False)
    assert (found.resent, found.queued) == (1, 2 + doubled + 1)
    assert lake.table.reconcile(counted=False).resent == 0
    *_, sent = lake.opened.resources.queue.receive(9, 900)
    assert sent.message == dead.message


@pytest.mark.long
def test_dead_letter_without_a_mark_is_marked_failed(lake: Lake) -> None:
    """The worker died between the mark and the burial, or the mark's race was given up."""
    lake.land("4.jsonl", [row("z", 0, 9, 1)])
    lake.table.append(host="local")
    queue = lake.opened.resources.queue
    (lease,) = queue.receive(1, 900)
    queue.bury(lease, "the disk is on fire")
    queue.send([Message("another", "d=2020-01-02", 5)])
    (other,) = queue.receive(1, 900)
    queue.bury(other, "no such table")
    found = call(lake, "reconcile", code=1)
    assert found["error"]["code"] == "failed-partitions"
    assert "the disk is on fire" in found["error"]["message"]
    assert all(p["balanced"] for p in found["result"]["proof"])
    lake.reopen()
    assert list(lake.table.status().failed) == ["d=2020-01-01"]
    lake.table.dedupe()
    assert call(lake, "reconcile")["result"]["published"] is not None


@pytest.mark.long
def test_partition_that_fails_for_ever_is_not_sent_again_until_somebody_asks(lake: Lake) -> None:
    """The one without an answer is tried once more, as the store may only have been away."""
    lake.land("4.jsonl", [row("z", day, 9, 1) for day in range(2)])
    lake.table.append(host="local")
    queue = lake.opened.resources.queue

    def bury_all(reason: str) -> None:
        for lease in queue.receive(9, 900):
            queue.bury(lease, reason)

    bury_all(UNANSWERED)
    resent = []
    for _ in range(4):
        lake.reopen()
        resent.append(lake.table.reconcile(counted=False).resent)
        bury_all("it has no such column")
    assert resent == [2, 0, 0, 0]
    assert len(queue.dead_letters()) == 4
    assert set(lake.table.status().failed.values()) == {"it has no such column"}
    lake.run()
    assert not reconcile(lake)
    assert lake.table.reconcile(counted=False).publish.waiting == ()


@pytest.mark.long
def test_without_the_proof_it_costs_as_much_after_many_nights_as_after_one(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    costs = []
    for night in range(12):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.run()
        lake.reopen()
        before = lake.table.requests["get"]
        lake.table.reconcile(counted=False)
        costs.append(lake.table.requests["get"] - before)
    assert costs[-1] == costs[0]


def test_table_that_is_not_there_yet_is_told(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.configure()
    assert call(lake, "reconcile", code=2)["error"]["code"] == "no-table-yet"


@pytest.mark.long
def test_deep_without_duckdb_does_nothing_and_tells_what_to_install(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    error = call(lake, "reconcile", "--deep", code=2)["error"]
    assert error["code"] == "extra-missing"
    assert error["next"] == phrases.install_extra("reconcile")
    assert call(lake, "reconcile")["ok"]


def test_mark_that_nobody_answered_gets_the_reason(lake: Lake) -> None:
    lake.land("4.jsonl", [row("z", 0, 9, 1)])
    lake.table.append(host="local")
    [lease] = lake.opened.resources.queue.receive(9, 900)
    mark_failed(lake.opened.history, lease.message.partition, lease.message.batch, UNANSWERED)
    lake.opened.resources.queue.bury(lease, "the disk is read-only")
    lake.reopen()
    lake.table.reconcile(counted=False)
    assert lake.table.status().failed == {lease.message.partition: "the disk is read-only"}


def test_dead_letter_of_an_earlier_table_does_not_stop_the_proof(lake: Lake) -> None:
    lake.opened.resources.queue.send([Message("t", "store=7", 1)])
    [lease] = lake.opened.resources.queue.receive(9, 900)
    lake.opened.resources.queue.bury(lease, "broken")
    lake.table.close()
    lake.configure()
    found = CliRunner().invoke(main, ["reconcile", "--config", str(lake.root / "lakeupsert.toml"), "--json"])
    assert json.loads(found.stdout)["error"] is None
