"""The report: it says what the table says, whatever the data look like, and is one page that loads nothing."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.workers.worker import mark_failed
from lakeupsert.report.charts import Mark, Tick, columns
from lakeupsert.report.figures import CLASSES
from lakeupsert.report.nights import observe
from lakeupsert.report.page import page
from lakeupsert.storage import LocalStore
from lakeupsert.table import metadata
from tests.harness.faults import Fault
from tests.harness.lake import DAY, Lake, row

CALENDAR = "Calendar of the partitions, by d"
ROWS = "Rows appended per batch"
AMPLIFICATION = "Write amplification per batch"
AGES = "Age of the data that comes"
QUARANTINE = "Quarantined rows per batch, by reason"
SLOWEST = "Slowest partitions"
NUMBERS = "The batches in numbers"
FIGURES = [CALENDAR, ROWS, "Bytes written per batch", AMPLIFICATION, AGES, QUARANTINE, SLOWEST, NUMBERS]
"""What a night of milliseconds has; its run is one line."""
ATTENTION = "What needs attention"
VOID = ("meta", "br")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 120.0


@dataclass
class Shown:
    """A finding on the page."""

    level: str
    what: str = ""
    why: str = ""
    commands: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """What a browser would make of a page: its verdict, facts and findings, and each section's text and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.facts: dict[str, str] = {}
        self.sections: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.findings: list[Shown] = []
        self.lines: list[str] = []
        self.title = ""
        self._open: list[str] = []
        self._section = self._term = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        level = re.fullmatch("finding (.+)", dict(attrs).get("class") or "")
        if level:
            self.findings.append(Shown(level[1]))
        elif tag == "pre":
            self.findings[-1].commands.append("")
        elif tag == "section":
            self._section = ""
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")

    @property
    def verdict(self) -> Shown:
        return self.findings[0]

    def column(self, section: str, head: str) -> list[str]:
        """The cells of a table's column, from the top."""
        heads, *rows = self.tables[section]
        return [row[heads.index(head)] for row in rows]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "h2":
            self._section = data
            self.sections[data] = ""
        elif inside == "dt":
            self._term = data
        elif inside == "dd":
            self.facts[self._term] = data
        elif inside == "title" and "svg" not in self._open:
            self.title = data
        elif "pre" in self._open:
            self.findings[-1].commands[-1] += data
        elif inside == "strong":
            self.findings[-1].what += data
        elif "li" in self._open or (self.findings and "header" in self._open and inside in ("p", "code")):
            self.findings[-1].why += data
        elif inside == "b" and "svg" not in self._open and not self._section:
            self.lines += data.split("; ")
        elif self._section:
            self.sections[self._section] += f"{data}\n"
            if inside in ("td", "th"):
                self.tables[self._section][-1][-1] += data


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path, quarantine_limit="100%")


def three_nights(lake: Lake) -> list[Any]:
    """Nights that touch days 0 to 3, with refused rows in the second; what each `run` told."""
    told = []
    for night in range(3):
        rows = [row(f"k{i}", day, 10 * night + i, v=night) for day in range(night, night + 2) for i in range(5)]
        refused = [{**row("x", 0, 1), "k": None}, {**row("y", 0, 1), "v": "much"}] if night == 1 else []
        lake.land(f"{night}.jsonl", [*rows, rows[0]], refused)
        told.append(lake.table.run(host="local"))
    return told


def chain(lake: Lake, day: int) -> list[Path]:
    """The versions of a day's partition, oldest first."""
    folder = lake.root / "processed/_lakeupsert/partitions" / f"d={DAY + timedelta(days=day)}"
    return sorted(folder.glob("*.json"), reverse=True)


# ---------------------------------------------------------------- what it says


def test_facts_and_batches_are_those_of_the_table(lake: Lake) -> None:
    told = three_nights(lake)
    found, status = Page(lake.table.report()), lake.table.status()
    assert found.facts == {
        "rows": f"{status.rows:,}",
        "partitions": f"{status.partitions:,}",
        "size": found.facts["size"],
        "dirty": "0",
        "lagging": "0",
        "failed": "0",
        "newest data": found.facts["newest data"],
        "held back by": "nothing",
        "quarantined": f"{status.quarantined:,}",
        "waiting": "0",
        "in work": "0",
        "dead letters": "0",
    }
    assert status.quarantined == 2
    assert list(found.sections) == [ATTENTION, *FIGURES]
    entries = [ran.append.entry for ran in reversed(told)]
    assert found.column(NUMBERS, "rows") == [f"{x.rows_appended:,}" for x in entries]
    assert found.column(NUMBERS, "superseded") == [f"{x.rows_superseded:,}" for x in entries]
    assert found.column(NUMBERS, "quarantined") == [f"{x.rows_quarantined:,}" for x in entries]
    assert found.column(NUMBERS, "id") == [x.batch_id[:8] for x in entries]
    assert {x.batch_id for x in entries} <= {value for name, value in found.attributes if name == "title"}


def test_merges_are_those_that_dedupe_told(lake: Lake) -> None:
    told = three_nights(lake)
    seen = observe(lake.opened, 30, 0)
    assert [n.bytes_written for n in seen.nights] == [sum(r.bytes_written for r in ran.dedupe) for ran in told]
    assert [n.bytes_appended for n in seen.nights] == [
        sum(t.bytes for t in ran.append.entry.touched.values()) for ran in told
    ]
    assert all(n.whole for n in seen.nights)
    by_partition = {(m.partition, m.batch): m for m in seen.merges}
    assert len(by_partition) == len(seen.merges) == 6
    for ran in told:
        for result in ran.dedupe:
            merge = by_partition[result.partition, result.merged]
            assert merge.rows == result.rows_out
            assert merge.seconds == pytest.approx(result.seconds, abs=1e-3)
            assert re.fullmatch(r".+:\d+", merge.worker or "")


def test_deletes_that_write_no_base_file_count_with_their_bytes(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2, op="D")])
    (result,) = lake.table.run(host="local").dedupe
    assert result.rows_out == 0
    assert observe(lake.opened, 30, 0).nights[-1].bytes_written == result.bytes_written > 0


def test_ages_are_days_from_partition_to_receipt_by_rows(lake: Lake) -> None:
    class Fixed(clock.Source):
        def now(self) -> datetime:
            return datetime(2020, 1, 11, 2, tzinfo=UTC)

    with clock.use(Fixed()):
        lake.land("1.jsonl", [row("a", 10, 1), row("a", 8, 1), row("b", 8, 1), row("a", 12, 1)])
        lake.run()
    assert observe(lake.opened, 30, 0).ages == {0: 1, 2: 2, -2: 1}
    found = Page(lake.table.report())
    assert found.column(AGES, "days late") == ["-2", "0", "2"]
    assert found.column(AGES, "rows") == ["1", "1", "2"]


def test_ages_are_in_few_classes_and_no_row_is_lost(lake: Lake) -> None:
    rows = [row(f"k{day}{i}", day, 1) for day in range(20) for i in range(1 + 10 * (day == 7))]
    lake.land("1.jsonl", rows)
    lake.run()
    found = Page(lake.table.report())
    counts = [int(n) for n in found.column(AGES, "rows")]
    assert len(counts) == CLASSES
    assert sum(counts) == len(rows)
    assert 11 in counts, "the age that most rows have is a class of its own"


class Passing(clock.Source):
    """A clock that goes on by a millisecond at each look, and otherwise when it is told to."""

    at = datetime(2020, 2, 1, 2, tzinfo=UTC)

    def now(self) -> datetime:
        self.at += timedelta(milliseconds=1)
        return self.at


def test_timeline_ends_where_the_next_batch_comes(lake: Lake) -> None:
    with clock.use(Passing()):
        for night in range(2):
            lake.land(f"{night}.jsonl", [row("a", night, 1), row("a", 5, night)])
            lake.run()
    run = observe(lake.opened, 30, 0).last_run()
    assert {(m.partition, m.batch) for m in run} == {("d=2020-01-02", 2), ("d=2020-01-06", 2)}


def test_partition_merged_a_day_late_is_a_run_of_its_own(lake: Lake) -> None:
    source = Passing()
    with clock.use(source):
        lake.land("1.jsonl", [row("a", day, 1) for day in range(3)])
        lake.table.append(host="local")
        dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-01": 1, "d=2020-01-02": 1})
        source.at += timedelta(days=1)
        dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-03": 1})
    seen = observe(lake.opened, 30, 0)
    assert len(seen.merges) == 3
    assert [m.partition for m in seen.last_run()] == ["d=2020-01-03"]


def test_what_needs_attention_is_named_with_its_reason(lake: Lake) -> None:
    three_nights(lake)
    lake.land("late.jsonl", [row("a", 0, 99), row("a", 1, 99)])
    lake.table.append(host="local")
    mark_failed(lake.opened.history, "d=2020-01-01", 4, "base file is gone\nNext: run `lakeupsert doctor`, then think")
    found = Page(lake.table.report())
    assert (found.facts["dirty"], found.facts["failed"]) == ("2", "1")
    assert (found.verdict.level, found.verdict.commands) == ("bad", ["lakeupsert run --table t"])
    assert "batch 4" in found.verdict.what
    assert "batch 3" in found.verdict.why, "what readers see"
    failed, dirty, refused = found.findings[1:]
    assert (failed.level, dirty.level, refused.level) == ("bad", "warn", "warn")
    assert "2020-01-01" in failed.what
    assert failed.why == "base file is goneNext: run lakeupsert doctor, then think."
    assert failed.commands == ["lakeupsert doctor", "lakeupsert run --table t"]
    assert "2020-01-02" in dirty.what
    assert found.column(NUMBERS, "factor")[0] == ""
    assert "Left out: 1 batch" in found.sections[AMPLIFICATION]
    assert len(observe(lake.opened, 30, 0).merges) == 6, "a mark is no merge"


def test_partitions_that_fail_for_one_cause_are_one_finding(lake: Lake) -> None:
    three_nights(lake)
    lake.land("late.jsonl", [row("a", 0, 99), row("a", 1, 99)])
    lake.table.append(host="local")
    for n in (1, 2):
        name = f"d=2020-01-0{n}"
        mark_failed(lake.opened.history, name, 4, f"/lake/{name}/base-0-{n:032x}.parquet is gone\nNext: think")
    [failed] = [one for one in Page(lake.table.report()).findings if "failed" in one.what]
    assert "2 partitions failed: 2020-01-01, 2020-01-02" in failed.what


def test_restore_and_what_it_withdrew_are_shown_as_that(lake: Lake) -> None:
    three_nights(lake)
    lake.table.restore(0, dry=False)
    lake.run()  # merges the restore: its number is none of a batch
    text = lake.table.report()
    found = Page(text)
    assert (found.verdict.level, found.findings[-1].level) == ("good", "note")
    assert "2, 3" in found.findings[-1].why
    states = dict(zip(found.column(NUMBERS, "batch"), found.column(NUMBERS, "state"), strict=True))
    assert states == {"4": "restore to snapshot 0", "3": "withdrawn", "2": "withdrawn", "1": ""}
    assert text.count('<tr class="withdrawn">') == 2
    seen = observe(lake.opened, 30, 0)
    assert [n.number for n in seen.nights if n.withdrawn] == [2, 3]
    assert seen.nights[-1].kind == "restore"
    assert {m.batch for m in seen.last_run()} == {4}
    assert sum(seen.ages.values()) == seen.nights[0].rows, "rows of withdrawn batches have no age"
    assert {p.name: p.times for p in seen.partitions} == {f"d=2020-01-0{n}": int(n < 3) for n in (1, 2, 3, 4)}
    assert "Left out:" not in found.sections[AMPLIFICATION], "a restore brings no bytes"

    lake.table.restore(2, dry=False)  # back again: batches 2 and 3 count once more
    assert not [n.number for n in observe(lake.opened, 30, 0).nights if n.withdrawn]
    assert Page(lake.table.report(nights=1)).column(NUMBERS, "state")[0] == "restore to snapshot 2"


def test_renames_replays_and_restores_are_marked_on_the_charts(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "clock_ahead", lambda self: None)  # the disk's clock does not go with it
    source = Passing()
    with clock.use(source):
        lake.land("1.jsonl", [row("a", 0, 1)], [row("b", 0, 40 * 86_400)])  # too far in the future
        lake.run()
        source.at += timedelta(days=20)
        lake.table.append(host="local", replay_quarantine=True)
        lake.table.rename_column("v", "amount")
        lake.run()
        text = lake.table.report()
    found = Page(text)
    assert found.column(NUMBERS, "state") == ["v renamed amount", "replay", ""]
    assert found.column(NUMBERS, "rows") == ["", "1", "1"]
    assert text.count('class="event"><title>') == 2 * 4, "each of the four charts has a line for each"


def test_row_that_a_manifest_lost_makes_the_table_not_exact(lake: Lake) -> None:
    three_nights(lake)
    page = lake.table.report()
    found = Page(page)
    assert found.verdict.what.endswith(", exact")
    assert re.search("batches 1 to 3.*`?lakeupsert reconcile --table t --deep", found.verdict.why), "what it rests on"
    assert page.index(ATTENTION) < page.index("<dl>") < page.index(CALENDAR), "problems are first"
    newest = chain(lake, 2)[-1]
    link = json.loads(newest.read_text())
    counters = link["body"]["buckets"][0]["counters"]
    counters["appended"] -= 1
    newest.write_bytes(metadata.encode(link))
    lake.reopen()
    found = Page(lake.table.report())
    assert (found.verdict.level, found.verdict.commands) == ("bad", ["lakeupsert reconcile --table t"])
    assert "2020-01-03" in found.findings[1].what


def test_restores_do_not_count_as_batches(lake: Lake) -> None:
    three_nights(lake)
    for snapshot in (0, 2):
        lake.table.restore(snapshot, dry=False)
        lake.run()
    assert [n.number for n in observe(lake.opened, 2, 0).nights] == [2, 3, 4, 5]
    assert [observe(lake.opened, nights, 0).older for nights in (2, 3, 30)] == [True, False, False]


def test_first_version_that_merged_batches_before_those_shown_is_exact(lake: Lake) -> None:
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    for number, day in ((2, 1), (3, 0)):
        lake.land(f"{number}.jsonl", [row("a", day, number)])
        lake.table.append(host="local")
    lake.table.restore(0, dry=False)  # before batch 2 was merged, so its partition begins with the restore
    lake.run()
    assert {m.batch for m in observe(lake.opened, 1, 0).merges} == {4}
    assert observe(lake.opened, 1, 0).unaccounted == []


def test_refused_rows_need_attention_and_have_an_example(lake: Lake) -> None:
    three_nights(lake)
    found = Page(lake.table.report())
    _, refused = found.findings
    replay = ["lakeupsert append --replay-quarantine --table t", "lakeupsert run --table t"]
    assert (refused.level, refused.commands) == ("warn", ["lakeupsert quarantine --table t", *replay])
    assert all(command in found.sections[QUARANTINE] for command in replay), "beside the figures"
    assert refused.what.startswith("2 ")
    assert "batch 2" in refused.why
    assert sorted(found.column(QUARANTINE, "reason")) == ["bad_type", "null_key"]
    assert found.column(QUARANTINE, "rows") == ["1", "1"]
    assert all(re.fullmatch(r"1\.jsonl, \w+ \d+.*", where) for where in found.column(QUARANTINE, "for example"))
    assert any("much" in why for why in found.column(QUARANTINE, "why"))

    for file in (lake.root / "processed/_lakeupsert/quarantine").iterdir():
        file.unlink()
    lake.reopen()
    assert found.column(QUARANTINE, "rows") == Page(lake.table.report()).column(QUARANTINE, "rows")


def test_rows_that_a_merge_refused_need_attention(tmp_path: Path) -> None:
    lake = Lake(tmp_path, tombstone_retention="0s")
    for night, rows in enumerate([[row("a", 0, 1)], [row("a", 0, 5, op="D")], [row("b", 0, 6)], [row("a", 0, 4)]]):
        lake.land(f"{night}.jsonl", rows)
        lake.run()
    _, refused = Page(lake.table.report()).findings
    assert refused.what.startswith("1 row ")
    assert refused.commands == ["lakeupsert quarantine --table t"]


def test_dead_letters_are_bad_and_redriven(lake: Lake) -> None:
    three_nights(lake)
    lake.land("late.jsonl", [row("a", 0, 99)])
    lake.table.append(host="local")
    (lease,) = lake.opened.resources.queue.receive(1, 60)
    lake.opened.resources.queue.bury(lease, "no memory")
    found = Page(lake.table.report())
    assert found.facts["dead letters"] == "1"
    assert found.verdict.level == "bad"
    (letter,) = [one for one in found.findings if one.commands == ["lakeupsert redrive --table t"]]
    assert letter.level == "bad"


def test_skipped_landing_files_need_attention(tmp_path: Path) -> None:
    lake = Lake(tmp_path, landing_dates="%Y%m%d")
    lake.land("20200101/1.jsonl", [row("a", 0, 1)])
    lake.run()
    assert len(Page(lake.table.report()).findings) == 1
    lake.land("2020-01-02/2.jsonl", [row("a", 0, 2)])
    skipped = Page(lake.table.report()).findings[1]
    assert skipped.level == "warn"
    assert "2020-01-02" in skipped.why
    lake.points.arm(1, Fault.BEFORE, "landing list")  # the first is for how old the newest data are
    skipped = Page(lake.table.report()).findings[1]
    assert "injected" in skipped.why, "the landing zone can't be listed"


def test_data_that_stopped_coming_need_attention(lake: Lake) -> None:
    source = Passing()
    with clock.use(source):
        for night in range(3):
            source.at += timedelta(days=1)
            lake.land(f"{night}.jsonl", [row("a", 0, night)])
            lake.run()
        source.at += timedelta(days=1)
        assert len(Page(lake.table.report()).findings) == 1
        source.at += timedelta(days=1, hours=1)
        found = Page(lake.table.report())
    assert found.facts["newest data"] == "2 d 1 h"
    assert (found.findings[1].level, found.findings[1].commands) == ("warn", ["lakeupsert run --table t"])


def test_lagging_partitions_make_the_verdict_bad(tmp_path: Path) -> None:
    lake = Lake(tmp_path, on_failed_partition="skip")
    three_nights(lake)
    lake.land("late.jsonl", [row("a", 0, 99), row("a", 1, 99)])
    lake.table.append(host="local")
    mark_failed(lake.opened.history, "d=2020-01-01", 4, "base file is gone")
    dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-02": 4})
    lake.table.publish()
    found = Page(lake.table.report())
    assert (found.verdict.level, found.facts["lagging"]) == ("bad", "1")
    assert "batch 4" in found.verdict.what.lower()
    assert "2020-01-01" in found.findings[1].what


def test_publisher_that_is_behind_needs_attention(tmp_path: Path) -> None:
    lake = Lake(tmp_path, publishers=("delta",))
    three_nights(lake)
    assert Page(lake.table.report()).facts["delta"] == "0 behind"
    newest = sorted((lake.root / "processed/_delta_log").glob("*2.json"))[-1]
    newest.unlink()
    lake.reopen()
    found = Page(lake.table.report())
    assert found.facts["delta"] == "1 behind"
    (behind,) = [one for one in found.findings if one.commands == ["lakeupsert publish --to delta --table t"]]
    assert behind.level == "warn"


def test_figures_of_large_nights_are_short_and_whole_in_the_tooltip(lake: Lake) -> None:
    three_nights(lake)
    seen = observe(lake.opened, 30, 0)
    large = [replace(night, rows=1_234_567_890) for night in seen.nights]
    found = Page(page("t", replace(seen, nights=large)))
    assert found.column(NUMBERS, "rows") == ["1,234.6 M"] * 3
    assert ("title", "1,234,567,890") in found.attributes


@pytest.mark.parametrize("nights", [3, 30, 300])
def test_charts_fill_their_axis_and_label_few_bars(nights: int) -> None:
    ticks = [Tick(str(n), f"{DAY + timedelta(days=n):%m-%d}") for n in range(nights)]
    chart = columns([[Mark(1.0, "", "fill")] for _ in ticks], ticks, text="{:.0f}".format, y="rows")
    bars = [(float(r.get("x", "")[:-1]), float(r.get("width", "")[:-1])) for r in chart.iter("rect")]
    assert len(bars) == nights
    assert bars[0][0] >= 0
    assert bars[0][1] <= 10, "a bar looks like a block"
    assert bars[-1][0] + bars[-1][1] == pytest.approx(100 - bars[0][0], abs=0.01)
    assert all(left + wide <= right + 0.002 for (left, wide), (right, _) in pairwise(bars)), "bars overlap"
    axis = next(div for div in chart.iter("div") if div.get("class") == "x")
    labels = [number.text for number in axis.iter("b")]
    assert len(labels) == min(nights, 6)
    assert labels[-1] == str(nights - 1), "the newest batch has a label"


def test_date_of_a_batch_is_written_where_it_changes() -> None:
    ticks = [Tick(str(n), "01-01" if n < 4 else "01-02") for n in range(6)]
    chart = columns([[Mark(1.0, "", "fill")] for _ in ticks], ticks, text="{:.0f}".format, y="rows")
    axis = next(div for div in chart.iter("div") if div.get("class") == "x")
    assert [(span.text or "").strip() for span in axis] == ["01-01", "", "", "", "01-02", ""]


def test_batch_that_comes_while_the_report_is_read_is_no_error(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    three_nights(lake)
    heads = lake.opened.history.heads

    def later(partitions: Any) -> Any:
        if not partitions:  # asked by `status`, before the ledger's head is read
            return heads(partitions)
        monkeypatch.undo()
        lake.land("later.jsonl", [row("k1", 0, 99)])
        Table("t", lake.settings).run(host="local")
        return heads(partitions)

    monkeypatch.setattr(lake.opened.history, "heads", later)
    seen = observe(lake.opened, 30, 0)
    assert max(m.batch for m in seen.merges) == max(n.number for n in seen.nights) == 3


def test_partition_that_is_no_date_has_a_list_and_no_ages(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={"k": "string", "l": "int", "d": "string", "ts": "timestamp_ntz", "v": "bigint"})
    lake.land("1.jsonl", [{**row("a", 0, 1), "d": shop} for shop in ("north", "south")])
    lake.run()
    lake.land("2.jsonl", [{**row("a", 0, 2), "d": "south"}])
    lake.run()
    found = Page(lake.table.report())
    assert [r[0] for r in found.tables["Most touched partitions, by d"][1:]] == ["south", "north"]
    assert AGES in found.lines


def test_table_without_a_batch_has_a_line_for_every_figure(lake: Lake) -> None:
    found = Page(lake.table.report())
    assert found.facts["rows"] == "0"
    assert (found.verdict.level, found.verdict.commands) == ("warn", ["lakeupsert run --table t"])
    assert found.sections == {}
    assert {*FIGURES[1:], "Last run"} <= set(found.lines)
    assert not {"rect", "table"} & set(found.tags)


# ---------------------------------------------------------------- what it reads


def test_manifests_read_follow_the_nights_shown(lake: Lake) -> None:
    for night in range(8):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.run()

    def manifests(nights: int) -> int:
        lake.reopen()
        lake.points.seen.clear()
        lake.table.report(nights)
        assert not [name for name in lake.points.seen if name.startswith("list _lakeupsert/partitions/")]
        return sum(name.startswith("get _lakeupsert/partitions/") for name in lake.points.seen)

    # One more than is shown: what a merge wrote is what the version below does not have.
    assert [manifests(nights) for nights in (1, 3, 5)] == [2, 4, 6]


def test_trimmed_versions_are_no_error_and_no_figure_counts_them_as_nothing(lake: Lake) -> None:
    three_nights(lake)
    first, _ = chain(lake, 1)  # batches 1 and 2
    first.unlink()
    lake.reopen()
    seen = observe(lake.opened, 30, 0)
    assert [n.whole for n in seen.nights] == [False, True, True]
    found = Page(page("t", seen))
    assert "Left out: 1 batch" in found.sections[AMPLIFICATION]
    assert found.verdict.what.endswith(", exact"), "the newest batch can still be counted"
    _, second = chain(lake, 2)  # batches 2 and 3
    second.with_name(chain(lake, 2)[0].name).unlink()
    lake.reopen()
    verdict = Page(lake.table.report()).verdict
    assert verdict.level == "good"
    assert not verdict.what.endswith(", exact"), "what batch 3 brought can't be counted any more"


# ---------------------------------------------------------------- what comes from the data stays data

SCRIPT = "<script>document.title='ran'</script>"
QUOTED = "'\"'\"'"
"""A quote within quotes, for the shell."""
IMAGE = "<img src=x onerror=\"document.title='ran'\">"


@pytest.fixture
def hostile(tmp_path: Path) -> Lake:
    """Script as partition value, batch id and reason of a failure."""
    lake = Lake(tmp_path, schema={"k": "string", "l": "int", "d": "string", "ts": "timestamp_ntz", "v": "bigint"})
    lake.land("1.jsonl", [{**row("a", 0, 1), "d": SCRIPT}])
    lake.run(batch_id=IMAGE)
    lake.land("2.jsonl", [{**row("a", 0, 2), "d": SCRIPT}])
    lake.table.append(host="local")
    (partition,) = lake.entries()[-1][1].touched
    mark_failed(lake.opened.history, partition, 2, f"can't be read: {SCRIPT}\0\x1b[31m")
    return lake


def test_data_that_look_like_html_are_text(hostile: Lake) -> None:
    text = page(SCRIPT, observe(hostile.opened, 30, 0))
    found = Page(text)
    assert not {"script", "img", "iframe", "object", "link"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert SCRIPT in found.title
    assert found.tables["Most touched partitions, by d"][1][0] == SCRIPT
    assert found.column(NUMBERS, "id")[1] == IMAGE
    assert SCRIPT in found.findings[1].why
    assert found.verdict.commands == [f"lakeupsert run --table '{SCRIPT.replace(chr(39), QUOTED)}'"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_page_loads_nothing(lake: Lake) -> None:
    three_nights(lake)
    text = lake.table.report()
    assert not re.search(r"https?:|@import|url\(|//", text)
    assert not {"src", "href", "xlink:href", "srcset", "data"} & {name for name, _ in Page(text).attributes}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in Page(text).attributes


# ---------------------------------------------------------------- the command


def call(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    return json.loads(result.stdout)


@pytest.fixture
def configured(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.chdir(lake.root)
    three_nights(lake)
    lake.configure()
    return lake


def test_command_writes_the_page_and_replaces_it(configured: Lake) -> None:
    Path("report.html").write_text("an old one")
    found = call("report", "--output", "report.html", "--nights", "2")
    assert found["result"] == {"output": "report.html", "bytes": Path("report.html").stat().st_size}
    assert Page(Path("report.html").read_text()).column(NUMBERS, "batch") == ["3", "2"]
    assert not [path for path in Path().iterdir() if path.name.endswith(".tmp")]
    assert call("report")["result"]["output"] == "report-t.html"
    assert Path("report-t.html").is_file()


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("lakeupsert.toml", "unknown-format"),
        ("landing", "unknown-format"),
        ("none/report.html", "no-folder"),
        ("landing/report.html", "overlapping-zones"),
    ],
)
def test_command_replaces_nothing_but_a_page(configured: Lake, output: str, code: str) -> None:
    before = Path("lakeupsert.toml").read_text()
    found = call("report", "--output", output)
    assert (found["exit_code"], found["error"]["code"]) == (2, code)
    assert Path("lakeupsert.toml").read_text() == before


# ---------------------------------------------------------------- in a browser

MEASURE = """<!doctype html><title>measuring</title><body><script>
const widths = [390, 1440], found = {};
function measure(width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const page = frame.contentDocument, boxes = [...page.querySelectorAll("svg")].map(s => s.getBoundingClientRect());
    found[width] = {
      title: page.title, wide: page.documentElement.scrollWidth, charts: boxes.length,
      flat: boxes.filter(b => b.width < 5 || b.height < 5).length,
      sections: [...page.querySelectorAll("section")].map(s => [s.textContent, s.offsetHeight]),
      cut: [...page.querySelectorAll("table, pre, .finding, .plot")].filter(
        b => b.scrollWidth > b.clientWidth + 1 || b.getBoundingClientRect().right > width).length,
      ground: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    };
    widths.length ? measure(widths.shift()) : document.body.textContent = JSON.stringify(found);
  };
  frame.src = "report.html";
  document.body.append(frame);
}
measure(widths.shift());
</script>"""


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def served(tmp_path: Path, asked: list[str]) -> Iterator[str]:
    """The address of ``tmp_path``; each path that anybody asks for goes to ``asked``."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measured(tmp_path: Path, address: str, *options: str) -> Any:
    """What the browser says about report.html at the width of a phone and of a desktop."""
    (tmp_path / "measure.html").write_text(MEASURE)
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile"),
        # The browser's own errands find nobody.
        *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=20000", "--dump-dom"),
        *options,
        f"http://{address}/measure.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    body = re.search(r"<body>(\{.*\})</body>", done.stdout)
    assert body, done.stderr
    return json.loads(body[1])


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_browser_shows_every_figure_at_every_width_and_runs_nothing(
    hostile: Lake, tmp_path: Path, served: str, asked: list[str]
) -> None:
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    name = "t" * 60  # too long for a line of a phone, in the commands
    text = page(name, observe(hostile.opened, 30, 0))
    # Without the policy, so that the escapes alone must hold.
    (tmp_path / "report.html").write_text(policy.sub("", text))
    found = measured(tmp_path, served)
    assert set(found) == {"390", "1440"}
    for width, of_it in found.items():
        assert of_it["title"].startswith(f"{name}: lakeupsert report"), "a script ran"
        assert of_it["wide"] <= int(width), "it has to be moved sideways"
        assert of_it["charts"] > 0
        assert of_it["flat"] == 0, "a chart has no room"
        assert of_it["cut"] == 0, "a table or a command is cut"
        assert len(of_it["sections"]) > 3
        assert min(height for _, height in of_it["sections"]) > 40
    assert set(asked) <= {"/measure.html", "/report.html", "/favicon.ico"}


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_browser_that_prefers_dark_gets_it(lake: Lake, tmp_path: Path, served: str) -> None:
    three_nights(lake)
    (tmp_path / "report.html").write_text(lake.table.report())
    light = measured(tmp_path, served, "--blink-settings=preferredColorScheme=1")
    dark = measured(tmp_path, served, "--blink-settings=preferredColorScheme=0")
    bright = [sum(map(int, re.findall(r"\d+", of["390"]["ground"])[:3])) for of in (dark, light)]
    assert bright[0] < 150 < 600 < bright[1]
    assert all(of[width]["wide"] <= int(width) for of in (light, dark) for width in of)
