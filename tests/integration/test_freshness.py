"""How old the newest data are that readers see, and each cause that holds newer data back: `status`, its page, its metrics."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.report import status
from lakeupsert.report.freshness import SourceFreshness
from lakeupsert.retries import LEADER_SECONDS
from lakeupsert.table.lease import Lease
from tests.harness.lake import Lake, row, without_base


class Later(clock.Source):
    """A wall clock that the test sets forward."""

    seconds = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.seconds)


@pytest.fixture
def later() -> Iterator[Later]:
    source = Later()
    with clock.use(source):
        yield source


def held_by(lake: Lake) -> dict[str, int]:
    return dict(lake.table.status().freshness.held_by)


def two_batches(root: Path, later: Later) -> Lake:
    """A lake that shows a batch; 100 seconds later the next one lands."""
    lake = Lake(root)
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    later.seconds = 100
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    return lake


def test_age_is_since_the_newest_batch_that_readers_see(tmp_path: Path, later: Later) -> None:
    lake = two_batches(tmp_path, later)
    lake.table.append(host="local")
    assert (lake.table.status().freshness.age_seconds or 0) == pytest.approx(100, abs=10)
    lake.run()
    found = lake.table.status().freshness
    assert (found.age_seconds, found.held_by) == (pytest.approx(0, abs=10), {})


def test_files_that_no_batch_took(tmp_path: Path, later: Later) -> None:
    lake = Lake(tmp_path)
    assert lake.table.status().freshness.age_seconds is None
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    lake.land("_not yet/3.jsonl", [])
    lake.landed.pop("_not yet/3.jsonl")
    later.seconds = 50
    found = lake.table.status().freshness
    assert (found.held_by, found.oldest_waiting_seconds) == ({"waiting_files": 1}, pytest.approx(50, abs=10))


def test_files_without_a_date_do_not_wait(tmp_path: Path) -> None:
    lake = Lake(tmp_path, landing_dates="%Y-%m-%d")
    lake.land("2020-01-01/1.jsonl", [row("a", 0, 1, 1)])
    lake.land("README.jsonl", [])
    assert (held_by(lake), lake.table.status().freshness.sources) == ({"waiting_files": 1}, {})


def test_a_landing_zone_without_right_holds_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    (tmp_path / "landing").rmdir()
    assert held_by(lake) == {}


def test_only_the_first_names_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_LISTED", 2)
    lake = Lake(tmp_path)
    for number in range(5):
        lake.land(f"{number}.jsonl", [row("a", 0, 1, 1)])
    assert held_by(lake) == {"waiting_files": 2}


def test_partitions_that_are_not_merged_and_batches_that_are_not_published(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for number in (1, 2):
        lake.land(f"{number}.jsonl", [row("a", 0, number, 1), row("b", 1, number, 1)])
        lake.table.append(host="local")
    assert held_by(lake) == {"unmerged_partitions": 2, "unpublished_batches": 2}
    drain_queues(lake.opened, DrainOptions())
    assert held_by(lake) == {"unpublished_batches": 2}
    lake.table.publish()
    assert held_by(lake) == {}


def test_a_partition_that_failed(tmp_path: Path) -> None:
    lake, _ = without_base(tmp_path)
    for _ in range(lake.opened.resources.queue.max_receives):
        drain_queues(lake.opened, DrainOptions())
    assert held_by(lake) == {"failed_partitions": 1, "unpublished_batches": 1}


def test_a_table_that_nobody_ingests_any_more(tmp_path: Path, later: Later) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    assert held_by(lake) == {"waiting_files": 1}, "nobody ever led: a schedule may run it"
    leader = Leadership(lake.opened.history.objects)
    assert leader.lead()
    assert held_by(lake) == {"waiting_files": 1}
    later.seconds = LEADER_SECONDS + 1
    assert held_by(lake) == {"waiting_files": 1, "no_leader": 1}
    later.seconds = 0
    leader.release()
    assert held_by(lake) == {"waiting_files": 1, "no_leader": 1}
    lake.run()
    assert held_by(lake) == {}


def test_a_batch_above_the_quarantine_limit(tmp_path: Path) -> None:
    lake = Lake(tmp_path, quarantine_limit="1%")
    lake.land("1.jsonl", [row("a", 0, 1, 1)], [{**row("b", 0, 1, 1), "k": None}])
    with pytest.raises(RefusedError):
        lake.table.ingest(seconds=0.001)
    assert held_by(lake) == {"waiting_files": 1, "quarantine-limit": 1}


def test_each_source_has_its_own_age(tmp_path: Path, later: Later) -> None:
    lake = Lake(tmp_path)
    lake.land("endpoint/1.jsonl", [row("a", 0, 1, 1)])
    lake.land("2020-01-01/1.jsonl", [row("a", 0, 1, 1)])
    lake.land("day=x/1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    later.seconds = 100
    lake.land("orders db/1.jsonl", [row("b", 0, 1, 1)])
    lake.run()
    lake.land("endpoint/2.jsonl", [row("a", 0, 2, 2)])
    lake.land("endpoint/3.jsonl", [row("a", 0, 3, 3)])
    lake.table.append(host="local")
    lake.land("new/1.jsonl", [row("a", 0, 3, 3)])
    assert lake.table.status().freshness.sources == {
        "endpoint": SourceFreshness(pytest.approx(100, abs=10), 0, 1),
        "new": SourceFreshness(None, 1, 0),
        "orders db": SourceFreshness(pytest.approx(0, abs=10), 0, 0),
    }


def test_trouble_of_a_source_is_a_warning(tmp_path: Path, later: Later) -> None:
    lake = Lake(tmp_path)
    lake.land("shop/000000000001.jsonl", [row("a", 0, 1, 1)])
    lake.land("other/1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    assert not any("Source" in text for text in lake.table.status().warnings)
    lease = Lease(holder="process 1", trouble="it keeps more than 2 GB.")
    lake.opened.history.objects.leases_of_source("shop").append(lease, None)
    found = lake.table.status()
    assert (found.freshness.sources["shop"].trouble, found.freshness.sources["other"].trouble) == (lease.trouble, "")
    assert "Source shop: it keeps more than 2 GB." in found.warnings
    later.seconds = 1000
    [text] = [text for text in lake.table.status().warnings if "Source" in text]
    assert text.startswith("Source shop: no `capture` has run for 16 min 40 s")


def test_how_far_a_source_is_behind_as_long_as_its_process_says_so(tmp_path: Path, later: Later) -> None:
    lake = Lake(tmp_path)
    for folder in ("events", "by hand"):
        lake.land(f"{folder}/{'0' * 11}1.jsonl", [row("a", 0, 1, 1)])
    objects = lake.opened.history.objects
    reader = Leadership(objects, chain=objects.leases_of_source("events"))

    def behind() -> list[int | None]:
        return [one.behind for one in lake.table.status().freshness.sources.values()]

    assert behind() == [None, None]
    reader.behind = 7
    assert reader.lead()
    assert behind() == [None, 7]
    arguments = ["status", "--config", str(lake.configure())]
    assert "events none (7 messages behind)" in CliRunner().invoke(main, arguments).stdout
    later.seconds = LEADER_SECONDS + 1
    assert behind() == [None, None]
    later.seconds = 0
    reader.release()
    assert behind() == [None, None]


def test_a_withdrawn_batch_is_not_seen(tmp_path: Path, later: Later) -> None:
    lake = two_batches(tmp_path, later)
    lake.run()
    lake.table.restore(0, dry=False)
    lake.run()
    assert (lake.table.status().freshness.age_seconds or 0) == pytest.approx(100, abs=10)


def test_the_command_and_the_page_say_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("endpoint/1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    lake.land("endpoint/2.jsonl", [row("a", 0, 2, 2)])
    config = str(lake.configure())
    answer = json.loads(CliRunner().invoke(main, ["status", "--json", "--config", config]).stdout)
    found = answer["result"]["freshness"]
    assert found["held_by"] == {"waiting_files": 1}
    assert found["sources"]["endpoint"].items() >= {"waiting_files": 1, "unpublished_batches": 0}.items()
    text = CliRunner().invoke(main, ["status", "--config", config]).stdout
    assert "waiting files: 1 (oldest" in text
    assert "waiting files: 1 (oldest" in lake.table.report()
    assert "endpoint" in text


def test_ingest_writes_it_into_its_metrics(tmp_path: Path) -> None:
    lake, metrics = Lake(tmp_path), tmp_path / "lakeupsert.prom"
    lake.land("endpoint/1.jsonl", [row("a", 0, 1, 1)])
    lake.run()
    lake.land("endpoint/2.jsonl", [row("a", 0, 2, 2)])
    arguments = ["ingest", "--max-seconds", "0.01", "--config", str(lake.configure()), "--metrics-file", str(metrics)]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    values = dict(line.rsplit(" ", 1) for line in metrics.read_text().splitlines() if line[0] != "#")
    newest = float(values['lakeupsert_newest_batch_timestamp_seconds{table="t"}'])
    assert newest == pytest.approx(clock.now().timestamp(), abs=30)
    of_source = float(values['lakeupsert_newest_source_batch_timestamp_seconds{source="endpoint",table="t"}'])
    assert of_source == pytest.approx(newest, abs=1)
    assert values['lakeupsert_held_back{cause="waiting_files",table="t"}'] == "1.0"
