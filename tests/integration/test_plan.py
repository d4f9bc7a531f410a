"""A plan beside the run that follows it: what it touches, how many bytes it moves, and that a plan moves none."""

import csv
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.operations.plan import plan as plan_module
from lakeupsert.operations.plan.habits import NIGHTS, last_nights
from lakeupsert.operations.plan.merges import predict_merges
from lakeupsert.table.ledger import LedgerEntry, next_stamp
from tests.harness.lake import Lake, row

SCHEMA = pa.schema([
    ("k", pa.string()), ("l", pa.int32()), ("d", pa.date32()), ("ts", pa.timestamp("us")), ("v", pa.int64()),
    ("op", pa.string()),
])  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def land_csv(lake: Lake, name: str, rows: Rows) -> None:
    with (lake.root / "landing" / name).open("w", newline="") as f:
        writer = csv.DictWriter(f, SCHEMA.names)
        writer.writeheader()
        writer.writerows({c: v.isoformat() if c == "ts" and v else v for c, v in r.items()} for r in rows)


def land_parquet(lake: Lake, name: str, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist([dict(r) for r in rows], SCHEMA), lake.root / "landing" / name)


def everything(lake: Lake) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in lake.root.rglob("*")}


def run(lake: Lake) -> Any:
    lake.reopen()
    return lake.table.run(host="local")


def touched(ran: Any) -> set[str]:
    return {r.partition for r in ran.dedupe if r.status == "merged"}


def planned(plan: Any) -> set[str]:
    return {p.partition for p in plan.partitions}


def day(number: int) -> str:
    return f"d=2020-01-{number + 1:02d}"


# ---------------------------------------------------------------- what it touches


def test_plan_writes_nothing_and_sends_no_message(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2), row("b", 1, 2)])
    lake.table.append(host="local")  # dirty, with messages sent
    lake.land("3.jsonl", [row("c", 2, 3)])
    lake.reopen()
    before = everything(lake)
    assert planned(lake.table.plan()) == {day(0), day(1), day(2)}
    assert everything(lake) == before


def test_plan_before_there_is_a_table_creates_none(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1), row("b", 1, 1)])
    before = everything(lake)
    plan = lake.table.plan()
    assert everything(lake) == before
    assert planned(plan) == {day(0), day(1)} == touched(run(lake))
    assert (plan.files, plan.rows, plan.nights, plan.seconds) == (1, 2, 0, None)


def test_nothing_new_is_a_plan_of_nothing(lake: Lake) -> None:
    empty = lake.table.plan()
    assert (empty.files, empty.partitions, empty.bytes) == (0, (), 0)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    again = lake.table.plan()
    assert (again.files, again.partitions, again.bytes, again.seconds) == (0, (), 0, 0.0)


def test_missing_landing_zone_is_the_error_that_run_has(lake: Lake) -> None:
    (lake.root / "landing").rmdir()
    with pytest.raises(ConfigurationError) as refused:
        lake.table.plan()
    assert refused.value.code == "no-landing"


@pytest.mark.parametrize("first", [True, False], ids=["first night", "later night"])
def test_partitions_are_those_of_the_run_whatever_the_format(tmp_path: Path, first: bool) -> None:
    lake = Lake(tmp_path, quarantine_limit="100%")
    if not first:
        lake.land("0.jsonl", [row("a", 0, 1), row("b", 5, 1)])
        lake.run()
    lake.land("1.jsonl", [row("a", 0, 2), row("b", 1, 2)])
    land_csv(lake, "2.csv", [row("c", 2, 2), row("d", 2, 2), {**row("e", 3, 2), "d": None}])
    land_parquet(lake, "3.parquet", [row("f", 4, 2), {**row("g", 4, 2), "d": None}, row("h", 5, 2)])
    (lake.root / "landing" / "4.csv").write_text("d,v\n2020-01-20,1\n")  # no key column: all of it is refused
    (lake.root / "landing" / "5.parquet").write_bytes(b"no Parquet")
    (lake.root / "landing" / "6.csv").write_bytes(b"")
    plan = lake.table.plan()
    assert planned(plan) == touched(run(lake)) == {day(n) for n in (0, 1, 2, 4, 5)}
    assert {p.partition: p.rows for p in plan.partitions}[day(2)] == 2
    assert plan.rows == 6
    assert not plan.estimated
    assert ["5.parquet" in note for note in plan.notes] == [True]


def test_dirty_partition_is_merged_once_for_each_batch(lake: Lake) -> None:
    for night, rows in ((1, 2000), (2, 300)):  # the second tells that what comes again are old keys
        lake.land(f"{night}.jsonl", [row(str(i), 0, night) for i in range(rows)])
        lake.run()
    for night in (3, 4):
        lake.land(f"{night}.jsonl", [row(str(i), 0, night) for i in range(500)])
        lake.table.append(host="local")
    lake.land("5.jsonl", [row(str(i), 0, 5) for i in range(500)])
    lake.reopen()
    plan = lake.table.plan()
    (partition,) = plan.partitions
    assert (partition.dirty, partition.versions, plan.dirty) == (True, 3, 1)
    (merged,) = run(lake).dedupe
    assert partition.bytes_read == pytest.approx(merged.bytes_read, rel=0.2)
    assert partition.bytes_written == pytest.approx(merged.bytes_written, rel=0.2)


def test_restore_that_is_not_merged_yet_moves_no_bytes(lake: Lake) -> None:
    for night in (1, 2):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.run()
    lake.table.restore(0, dry=False)
    lake.reopen()
    plan = lake.table.plan()
    assert (planned(plan), plan.bytes, plan.dirty) == ({day(0)}, 0, 1)
    assert touched(run(lake)) == {day(0)}


def test_selected_partitions_alone_are_counted(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", n, 1) for n in range(4)])
    lake.run()
    lake.land("2.jsonl", [row("a", n, 2) for n in range(4)])
    whole, one = lake.table.plan(), lake.table.plan(selected=lambda p: p == day(2))
    assert planned(one) == {day(2)}
    assert (one.rows, one.dedupe_written * 4) == (1, whole.dedupe_written)


@pytest.mark.parametrize("name", ["1.parquet", "1.unknown"])
def test_first_night_without_a_file_that_can_be_read_is_told(lake: Lake, name: str) -> None:
    (lake.root / "landing" / name).write_bytes(b"no Parquet")
    plan = lake.table.plan()
    assert plan.partitions == ()
    assert "0 of 1 landing file can" in plan.notes[0]


def test_full_extract_is_planned_as_one(tmp_path: Path) -> None:
    """It rewrites every partition in its scope, also those that it has no row in, and with strategy delta."""
    lake = Lake(tmp_path, strategy="delta")
    lake.land("1.jsonl", [row(f"{k}", number, 1) for k in range(300) for number in (0, 1, 2)])
    lake.run()
    lake.land("2.jsonl", [row("0", 0, 2)])
    assert planned(lake.table.plan()) == planned(lake.table.plan(full="partitions")) == {day(0)}
    plan = lake.table.plan(full="table")
    assert planned(plan) == {day(0), day(1), day(2)}
    assert {p.strategy for p in plan.partitions} == {"rewrite"}
    assert (plan.rows, [p.rows for p in plan.partitions]) == (1, [1, 0, 0])
    before = everything(lake)
    with pytest.raises(RefusedError) as refused:
        lake.run(full="table", may_shrink=True, max_bytes=plan.bytes - 1)
    assert refused.value.code == "over-limit"
    assert everything(lake) == before
    ran = lake.table.run(host="local", full="table", may_shrink=True)
    assert touched(ran) == planned(plan)
    assert ran.predicted is not None
    assert ran.predicted.bytes_read == sum(p.bytes_read for p in ran.dedupe)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_large_text_is_estimated_from_places_all_over_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    rows = [
        row(f"{i:06d}", i // 1000, 1, i) for i in range(12_000)
    ]  # sorted by partition: its beginning knows one of them
    lake.land("1.jsonl", rows) if ending == "jsonl" else land_csv(lake, "1.csv", rows)
    monkeypatch.setattr(plan_module, "TEXT_BYTES", 160_000)
    plan = lake.table.plan()
    assert plan.estimated
    assert planned(plan) == {day(n) for n in range(12)}
    assert plan.rows == pytest.approx(12_000, rel=0.1)


def test_plan_reads_neither_data_files_nor_partitions_that_are_not_touched(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", n, 1) for n in range(31)])
    lake.run()
    lake.land("2.jsonl", [row("a", 3, 2)])
    lake.reopen()
    lake.points.seen.clear()
    lake.table.plan()
    assert not [call for call in lake.points.seen if call.startswith("open ")]
    assert len([call for call in lake.points.seen if "/partitions/" in call]) <= NIGHTS
    assert sum(lake.table.requests.values()) < 31


# ---------------------------------------------------------------- how much


@pytest.mark.long
def test_eight_nights_of_mixed_sizes_are_predicted_within_a_fifth(lake: Lake) -> None:
    chance = random.Random(7)
    errors, written_errors = [], []
    for night in range(1, 9):
        rows = [
            row(f"{night}-{i}", night, night, chance.randrange(10**9)) for i in range(chance.choice([30, 800, 5000]))
        ]
        for old in chance.sample(range(night), k=min(night, 4)):  # updates of old days, and some rows that come late
            rows += [row(f"{old}-{i}", old, night, chance.randrange(10**9)) for i in range(chance.choice([1, 40, 900]))]
        chance.shuffle(rows)
        land = [lambda lake, name, rows: lake.land(name, rows), land_csv, land_parquet][night % 3]
        land(lake, f"{night}.{['jsonl', 'csv', 'parquet'][night % 3]}", rows)
        lake.reopen()
        plan = lake.table.plan()
        ran = run(lake)
        assert planned(plan) == touched(ran)
        read, written = sum(r.bytes_read for r in ran.dedupe), sum(r.bytes_written for r in ran.dedupe)
        appended = sum(t.bytes for t in ran.append.entry.touched.values())
        guess = plan.append_written + plan.dedupe_read + plan.dedupe_written  # what append reads is known anyway
        errors.append(abs(guess / (appended + read + written) - 1))
        assert ran.predicted.bytes_read == read  # once the batch is committed, that is no guess
        written_errors.append(abs(ran.predicted.bytes_written / written - 1))
        measured = sum(lake.table.requests.values())
        assert sum(plan.requests.values()) == pytest.approx(measured, rel=0.3)
    assert statistics.median(errors) < 0.2, errors
    assert statistics.median(written_errors) < 0.2, written_errors


class Later(clock.Source):
    """A clock that a test puts forward."""

    ahead = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.ahead


def test_waiting_for_workers_is_no_time_of_a_run(lake: Lake) -> None:
    source = Later()
    with clock.use(source):
        for night in (1, 2, 3):
            lake.land(f"{night}.jsonl", [row("a", 0, night)])
            lake.table.append(host="local")
            source.ahead += timedelta(hours=8)
            lake.table.dedupe()
            lake.table.publish()
        lake.land("4.jsonl", [row("a", 0, 4)])
        seconds = lake.table.plan().seconds
    assert seconds is not None
    assert 0 < seconds < 3600


@pytest.mark.long
def test_time_of_a_larger_night_grows_at_most_in_proportion(lake: Lake) -> None:
    """Nights of about one size that took longer each time give a slope that is chance: a larger one must not go by it."""
    source = Later()
    with clock.use(source):
        for night in range(1, 8):
            lake.land(f"{night}.jsonl", [row(str(i), 0, night, i * i) for i in range(500 + 5 * night)])
            lake.table.append(host="local")
            source.ahead += timedelta(seconds=5 * night)
            lake.table.dedupe()
            lake.table.publish()
        usual = lake.table.snapshots()[0].body.bytes
        lake.land("8.jsonl", [row(str(i), 0, 8, i * i) for i in range(5000)])
        plan = lake.table.plan()
    assert plan.seconds is not None
    assert 5 < plan.seconds < 35 * (plan.dedupe_read + plan.dedupe_written) / usual


def test_entries_that_bring_no_batch_are_no_nights_to_learn_from(lake: Lake) -> None:
    """Quiet days of vacuums, each with its fence: the habits of the last nights hold all the same."""
    for night in range(3):
        lake.land(f"{night}.jsonl", [row(f"{night}-{i}", i % 3, night, i * i) for i in range(500)])
        lake.run()
    lake.land("3.jsonl", [row(f"3-{i}", i % 3, 3, i * i) for i in range(500)])

    def learned() -> Any:
        lake.reopen()
        plan = lake.table.plan()
        return plan.append_written, plan.dedupe_written, plan.seconds, plan.cost.compute

    def fence(head: Any) -> LedgerEntry:
        return LedgerEntry(
            kind="fence", batch_id=clock.new_id(), received_at=next_stamp(head.body), spec_version=0, fence=0
        )

    before = learned()
    for _ in range(NIGHTS):
        lake.opened.history.objects.ledger.extend(fence)
    assert learned() == before


def test_damaged_version_that_a_restore_needs_keeps_no_other_partition_from_the_run(lake: Lake) -> None:
    for night in (1, 2):
        lake.land(f"{night}.jsonl", [row("a", 0, night), row("a", 1, night)])
        lake.run()
    lake.table.restore(0, dry=False)
    versions = sorted((lake.root / "processed" / "_lakeupsert" / "partitions" / day(0)).iterdir())
    versions[-1].unlink()  # names count down
    ran = run(lake)
    assert ran.predicted is None
    assert {r.partition: r.status for r in ran.dedupe} == {day(0): "failed", day(1): "merged"}


# ---------------------------------------------------------------- money and limits


def test_limit_stops_the_run_before_it_writes(lake: Lake, tmp_path: Path) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    prices = tmp_path / "prices.toml"
    prices.write_text('as_of = "2026-01-01"\ngigabyte_read = 1000000.0\n')
    before = everything(lake)
    plan = lake.table.plan(prices=prices)
    limits: list[dict[str, Any]] = [
        {"max_bytes": plan.bytes - 1},
        {"max_cost": plan.cost.total * 0.99, "prices": prices},
    ]
    for limit in limits:
        with pytest.raises(RefusedError) as refused:
            lake.table.run(host="local", **limit)
        assert refused.value.code == "over-limit"
        assert not refused.value.data_changed
        assert everything(lake) == before
    lake.table.run(host="local", max_bytes=plan.bytes, max_cost=plan.cost.total, prices=prices)
    assert len(lake.rows()) == 1


def test_limit_also_stops_what_an_earlier_run_left(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.table.append(host="local")
    (lake.root / "processed" / "_lakeupsert" / "queue.sqlite").unlink()  # the run would send the message again
    lake.reopen()
    before = everything(lake)
    with pytest.raises(RefusedError):
        lake.table.run(host="local", max_bytes=10)
    assert everything(lake) == before


def test_prices_of_a_file_are_what_it_costs(lake: Lake, tmp_path: Path) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2)])
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'as_of = "2026-01-01"\ncurrency = "EUR"\ngigabyte_written = 2.0\ncompute_second = 3.0\n'
        "[thousand_requests]\nget = 5.0\n"
    )
    plan = lake.table.plan(prices=prices)
    gets = plan.requests["get"] + plan.landing_requests["get"]
    assert plan.cost.requests == pytest.approx(gets * 5 / 1000)
    assert plan.cost.transfer == pytest.approx((plan.append_written + plan.dedupe_written) * 2 / 1e9)
    assert plan.seconds is not None
    assert plan.cost.compute == pytest.approx(plan.seconds * 3)
    assert (plan.cost.currency, plan.cost.as_of) == ("EUR", "2026-01-01")


def test_local_requests_are_free_unless_a_file_of_prices_is_given(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    plan = lake.table.plan()
    assert (plan.cost.requests, plan.cost.transfer, plan.cost.compute) == (0.0, 0.0, None)
    assert lake.table.plan(prices=Path(plan_module.__file__).with_name("prices.toml")).cost.requests > 0


@pytest.mark.parametrize(
    "text", ["", "as_of = ", 'as_of = "2026"\n[thousand_requests]\nfetch = 1.0\n', 'as_of = "2026"\nget = 1.0\n', None]
)
def test_file_that_holds_no_prices_is_refused(lake: Lake, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        lake.table.plan(prices=tmp_path / "prices.toml")
    assert refused.value.code == "unreadable-prices"


# ---------------------------------------------------------------- the commands


@pytest.fixture
def here(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.chdir(lake.root)
    lake.configure()
    lake.land("1.jsonl", [row("a", n, 1) for n in range(3)])
    lake.run()
    lake.land("2.jsonl", [row("a", n, 2) for n in range(3)])
    return lake


def answer(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_dry_run_is_the_plan(here: Lake) -> None:
    before = everything(here)
    plan, dry = answer("plan")["result"], answer("run", "--dry-run")["result"]
    assert plan == dry
    assert everything(here) == before
    assert [p["partition"] for p in plan["partitions"]] == [day(0), day(1), day(2)]
    assert plan["bytes"] == sum(
        plan[step][kind] for step in ("append", "dedupe") for kind in ("bytes_read", "bytes_written")
    )
    ran = answer("run", "--host", "local")["result"]
    measured = {kind: sum(p[kind] for p in ran["dedupe"]["partitions"]) for kind in ("bytes_read", "bytes_written")}
    assert ran["plan"]["measured"] == measured
    assert ran["plan"]["predicted"]["bytes_read"] == measured["bytes_read"]
    assert answer("run", "--host", "local")["result"]["plan"] is None


def test_plan_takes_partition_values(here: Lake) -> None:
    def partitions(*args: str) -> list[str]:
        return [p["partition"] for p in answer("plan", *args)["result"]["partitions"]]

    assert partitions("--from", "2020-01-02") == [day(1), day(2)]
    assert partitions("--partition", "2020-01-01", "--partition", day(2)) == [day(0), day(2)]
    assert answer("plan", "--from", "2020-01-02", "--partition", "2020-01-02", code=2)["error"]["code"] == "usage"


@pytest.mark.parametrize("command", [["plan"], ["run", "--host", "local"], ["run", "--dry-run"]])
def test_limit_on_the_command_line_ends_with_1_and_the_figures(here: Lake, command: list[str]) -> None:
    before = everything(here)
    needed = answer("plan")["result"]["bytes"]
    error = answer(*command, "--max-bytes", f"{(needed - 1) / 1000}kB", code=1)["error"]
    assert error["code"] == "over-limit"
    assert f"{needed:,}" in error["message"]
    assert everything(here) == before
    answer("plan", "--max-bytes", "1MiB", "--max-cost", "3.50")
    answer("plan", "--max-bytes", "9" * 400 + "TB")
    for wrong in (("--max-bytes", "much"), ("--max-cost", "nan"), ("--max-cost", "-1")):
        assert answer(*command, *wrong, code=2)["error"]["code"] == "usage"


def test_limit_of_cost_warns_while_the_time_is_unknown(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    config = str(lake.configure())
    limited = ("--max-cost", "3.50", "--config", config)
    for command in (["plan"], ["run", "--host", "local"]):
        assert "--max-cost was compared with requests and bytes only" in answer(*command, *limited)["warnings"][0]
    lake.land("2.jsonl", [row("a", 0, 2)])
    assert not answer("run", "--host", "local", *limited)["warnings"]


def test_plan_tells_people_in_a_few_lines(here: Lake) -> None:
    lines = CliRunner().invoke(main, ["plan"]).stdout.splitlines()
    assert lines[0] == "Table t"
    assert "1 new file, 2" in lines[1]
    assert f"3 partitions: {day(0)}, {day(1)}, {day(2)}" in lines[2]
    assert "about " in lines[6]
    assert "1 night" in lines[6]
    assert "readers open" in lines[8]
    assert "1 file and 0 deltas" in lines[8]
    assert len(lines) == 9


def test_prediction_of_a_committed_batch_takes_no_request_for_a_partition(tmp_path: Path) -> None:
    def requests(days: int) -> dict[str, int]:
        lake = Lake(tmp_path / f"{days}")
        lake.land("1.jsonl", [row("a", day, 1) for day in range(days)])
        appended = lake.table.append(host="local")
        lake.reopen()
        assert predict_merges(lake.opened, appended, last_nights(lake.opened.history)) is not None
        return lake.table.requests

    assert requests(40) == requests(1)
