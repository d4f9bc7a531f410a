"""`maintain`: compaction, expiry and vacuum in the background, beside `ingest`, workers and readers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.operations.reprocess import ReprocessResult
from lakeupsert.operations.vacuum import VacuumResult
from lakeupsert.pipeline.history import KEPT_WORKS
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.strategy import MOST_DELTAS
from lakeupsert.read.arrow import to_arrow
from lakeupsert.retries import LEADER_SECONDS
from lakeupsert.table.chain import FORMAT
from lakeupsert.table.work import RewriteOrder, write_order
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, made_once, row
from tests.harness.processes import wait_until
from tests.integration.test_freshness import Later, later

assert later  # a fixture
NIGHTS = MOST_DELTAS + 2


@made_once
def used(root: Path) -> Lake:
    """A table of strategy delta whose first partition has more deltas than upkeep leaves, and that keeps two snapshots."""
    lake = Lake(root, strategy="delta", keep_snapshots=2, superseded_retention="1h")
    for number in range(NIGHTS):
        other = [row("z", 1, number)] if number < 2 else []
        lake.land(f"{number}.jsonl", [row("k", 0, number, number), row(f"n{number}", 0, number), *other])
        lake.run()
    return lake


def deltas(lake: Lake) -> list[int]:
    heads = lake.opened.history.heads(["d=2020-01-01", "d=2020-01-02"])
    return [sum(len(bucket.deltas) for bucket in head.body.buckets) for head in heads.values()]


def one_round(lake: Lake, **options: object) -> list[ReprocessResult | VacuumResult]:
    """What a process did that was stopped behind its first round."""
    results: list[ReprocessResult | VacuumResult] = []
    stop = Stop()

    def done(result: ReprocessResult | VacuumResult) -> None:
        results.append(result)
        if isinstance(result, VacuumResult):
            stop.set()

    lake.table.maintain(seconds=0.001, max_seconds=60, stop=stop, collect=done, **options)  # type: ignore[arg-type]
    return results


def test_a_round_compacts_what_has_many_deltas_expires_and_vacuums(used: Lake, later: Later) -> None:
    assert deltas(used)[0] > 0
    before = used.stored_files()
    used.table.vacuum(dry=False)
    later.seconds = 2 * 3600
    rewritten, vacuumed = one_round(used)
    assert isinstance(rewritten, ReprocessResult)
    assert isinstance(vacuumed, VacuumResult)
    assert [*rewritten.plan.heads] == ["d=2020-01-01"]
    assert deltas(used)[0] == 0
    assert len(used.stored_files()) < len(before)
    assert [*(used.root / "processed" / "_lakeupsert" / "units").glob("reprocess-*")] == []
    assert used.table.status().queue == used.opened.resources.queue.stats(), "no worker got its rewrites"
    assert used.opened.resources.queue.stats().visible == 0
    used.check()


def test_status_and_plan_show_the_bounds_and_who_is_above(used: Lake) -> None:
    due = ("d=2020-01-01",)
    found = used.table.status().reads
    assert (found.most_deltas, found.due) == (deltas(used)[0], due)
    assert found.most_files > found.most_deltas > MOST_DELTAS
    assert found.most_extra_share > 0
    assert used.table.plan().reads == found
    config = str(used.configure())
    for command in ("status", "plan"):
        answer = json.loads(CliRunner().invoke(main, [command, "--json", "--config", config]).stdout)
        assert answer["result"]["reads"]["due"] == [*due]
        assert answer["result"]["reads"]["bounds"]["deltas"] == MOST_DELTAS
        assert (
            "compaction is due in 1 partition: d=2020-01-01"
            in CliRunner().invoke(main, [command, "--config", config]).stdout
        )
    one_round(used)
    after = used.table.status().reads
    assert (after.due, after.most_deltas <= MOST_DELTAS) == ((), True)


def test_few_deltas_are_left_alone(tmp_path: Path) -> None:
    lake = Lake(tmp_path, strategy="delta")
    for number in range(3):
        lake.land(f"{number}.jsonl", [row("k", 0, number, number), row(f"n{number}", 0, number)])
        lake.run()
    assert [type(one) for one in one_round(lake)] == [VacuumResult]


def test_vacuum_has_its_own_interval(used: Lake, later: Later) -> None:
    stop, results = Stop(), list[ReprocessResult | VacuumResult]()
    rounds = iter(range(4))

    def alive() -> None:
        if next(rounds, None) is None:
            stop.set()

    used.table.maintain(seconds=0.001, stop=stop, alive=alive, collect=results.append)
    assert sum(isinstance(one, VacuumResult) for one in results) == 1


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_process_is_followed_by_another(used: Lake, fault: Fault) -> None:
    def next_one(lake: Lake) -> None:
        one_round(lake, leader_seconds=0)
        lake.land("after.jsonl", [row("k", 0, 99, 99), row("z", 1, 99)])
        lake.finish_and_check()

    assert used.strike_every_call(fault, lambda lake: one_round(lake, leader_seconds=0), next_one) > 20


def test_upkeep_at_any_call_of_ingest_changes_no_row(used: Lake, later: Later) -> None:
    """Another process compacts and vacuums in the middle of a batch: readers, appends and merges keep what they need."""
    later.seconds = 2 * 3600
    for number in range(0, 90, 15):
        lake = used.copy(used.root.with_name(f"{number}"))
        other = Lake(lake.root, **lake.given)
        reader = lake.table.view()
        seen = lake.rows()
        stop = Stop()

        def took(result: object, stop: Stop = stop) -> None:
            if isinstance(result, PublishResult) and result.batch > NIGHTS:
                stop.set()

        lake.land("new.jsonl", [row("k", 0, 99, 99), row("z", 1, 99, 99)])
        lake.points.amid(number, lambda other=other: one_round(other))
        lake.table.ingest(seconds=0.001, max_seconds=60, stop=stop, collect=took)
        lake.points.disarm()
        assert stop.is_set()
        lake.check()
        assert to_arrow(reader).read_all().to_pylist() == seen, "its files are kept for its readers"


def test_two_maintainers_and_ingest_lead_by_leases_of_their_own(used: Lake) -> None:
    ingest = Leadership(used.opened.history.objects)
    assert ingest.lead()
    stop, warnings = Stop(), list[str]()
    leader = Leadership(used.opened.history.objects, LEADER_SECONDS, used.opened.history.objects.upkeep)
    assert leader.lead()

    def warn(text: str) -> None:
        warnings.append(text)
        stop.set()

    results: list[object] = []
    used.table.maintain(seconds=0.001, max_seconds=5, stop=stop, warn=warn, collect=results.append)
    assert results == []
    assert leader.leader is not None
    assert leader.leader in warnings[0]
    leader.release()
    assert one_round(used, leader_seconds=1e9) != [], "ingest's lease does not hold it up"
    assert ingest.lead()


def test_the_command_ends_by_sigterm_and_says_what_it_did(used: Lake) -> None:
    health = used.root / "health"
    code = "from lakeupsert.cli import main; main()"
    options = ["--seconds", "0.05", "--health-file", str(health), "--config", str(used.configure()), "--json"]
    process = subprocess.Popen([sys.executable, "-c", code, "maintain", *options], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: deltas(used)[0] == 0, "the partition is compacted")
        health.unlink(missing_ok=True)
        wait_until(health.exists, "the health file is touched")
        process.terminate()
        answer = json.loads(process.communicate()[0])
    finally:
        process.kill()
    assert (process.returncode, answer["error"]["code"]) == (75, "terminated")
    assert answer["result"]["partitions_rewritten"] == 1
    objects = used.opened.history.objects
    assert Leadership(objects, LEADER_SECONDS, objects.upkeep).lead(), "it has released its lease"
    used.check()


def test_the_command_says_which_partition_it_can_not_rewrite(used: Lake) -> None:
    for path in (used.root / "processed").rglob("d=2020-01-01/**/base*.parquet"):
        path.write_bytes(b"x" * path.stat().st_size)
    code = "from lakeupsert.cli import main; main()"
    options = ["--seconds", "0.05", "--max-seconds", "3", "--config", str(used.configure()), "--json"]
    done = subprocess.run([sys.executable, "-c", code, "maintain", *options], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]["code"]) == (1, "failed-partitions")
    assert answer["result"]["partitions_rewritten"] == 0
    assert any("d=2020-01-01" in text and "Next: " in text for text in answer["warnings"])
    assert done.stderr.count("can't be merged or shown") == 1, "a warning is repeated after minutes"


def test_what_fails_no_more_is_told(used: Lake) -> None:
    results, stop, base = (
        list[ReprocessResult](),
        Stop(),
        (used.root / "processed").rglob("d=2020-01-01/**/base*.parquet"),
    )
    whole = {path: path.read_bytes() for path in base}
    for path, data in whole.items():
        path.write_bytes(b"x" * len(data))

    def done(result: ReprocessResult | VacuumResult) -> None:
        if isinstance(result, ReprocessResult):
            results.append(result)
            if [one.status for one in result.dedupe] != ["failed"]:
                stop.set()
            elif len(results) == 1:
                for path, data in whole.items():
                    path.write_bytes(data)
                Lake(used.root, **used.given).table.compact(full=True)

    used.table.maintain(seconds=0.001, max_seconds=60, stop=stop, collect=done)
    assert [len(one.dedupe) for one in results] == [1, 0]


def test_work_objects_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    history = Lake(tmp_path).opened.history
    order = RewriteOrder(FORMAT, "stored", {}, 0)
    for number in range(2 * KEPT_WORKS):
        write_order(history.objects.store, f"work-{number}", order)
        assert history.work(f"work-{number}") == order
    assert len(history._works) == KEPT_WORKS
    assert history.work("work-0") == order
