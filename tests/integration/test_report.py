"""The report: it says what the table says, whatever the data look like, and is one page that loads nothing."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.dedupe import dedupe_partitions
from lakeupsert.pipeline.worker import mark_failed
from lakeupsert.report.nights import observe
from lakeupsert.report.page import page
from lakeupsert.testing.lake import DAY, Lake, row

FIGURES = [
    "What needs attention",
    "Calendar of the partitions, by d",
    "Timeline of the last run, by worker",
    "Rows appended per batch",
    "Bytes per batch",
    "Write amplification per batch",
    "Age of the data that comes",
    "Quarantined rows per batch, by reason",
    "Slowest partitions",
    "The batches in numbers",
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 120.0


class Page(HTMLParser):
    """What a browser would make of a page: its facts, and each section's text and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.facts: dict[str, str] = {}
        self.sections: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.title = ""
        self._open: list[str] = []
        self._section = self._term = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")

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
        "quarantined rows": f"{status.quarantined:,}",
        "queue": "0 waiting, 0 being worked on, 0 dead",
    }
    assert status.quarantined == 2
    assert list(found.sections) == FIGURES
    head, *batches = found.tables["The batches in numbers"]
    by_head = [dict(zip(head, batch, strict=True)) for batch in batches]
    entries = [ran.append.entry for ran in reversed(told)]
    assert [b["rows"] for b in by_head] == [f"{x.rows_appended:,}" for x in entries]
    assert [b["superseded"] for b in by_head] == [f"{x.rows_superseded:,}" for x in entries]
    assert [b["quarantined"] for b in by_head] == [f"{x.rows_quarantined:,}" for x in entries]
    assert [b["id"] for b in by_head] == [x.batch_id for x in entries]
    assert "null_key 1" in found.sections["Quarantined rows per batch, by reason"]
    assert "bad_type 1" in found.sections["Quarantined rows per batch, by reason"]


def test_merges_are_those_that_dedupe_told(lake: Lake) -> None:
    told = three_nights(lake)
    seen = observe(lake.opened, 30)
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
    assert observe(lake.opened, 30).nights[-1].bytes_written == result.bytes_written > 0


def test_ages_are_days_from_partition_to_receipt_by_rows(lake: Lake) -> None:
    class Fixed(clock.Source):
        def now(self) -> datetime:
            return datetime(2020, 1, 11, 2, tzinfo=UTC)

    with clock.use(Fixed()):
        lake.land("1.jsonl", [row("a", 10, 1), row("a", 8, 1), row("b", 8, 1), row("a", 12, 1)])
        lake.run()
    assert observe(lake.opened, 30).ages == {0: 1, 2: 2, -2: 1}
    table = Page(lake.table.report()).tables["Age of the data that comes"]
    assert [r[0] for r in table[1:]] == ["before the day", "0", "1", "2 to 3"]
    assert [r[2] for r in table[1:]] == ["1", "1", "0", "2"]


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
    run = observe(lake.opened, 30).last_run()
    assert {(m.partition, m.batch) for m in run} == {("d=2020-01-02", 2), ("d=2020-01-06", 2)}


def test_partition_merged_a_day_late_is_a_run_of_its_own(lake: Lake) -> None:
    source = Passing()
    with clock.use(source):
        lake.land("1.jsonl", [row("a", day, 1) for day in range(3)])
        lake.table.append(host="local")
        dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-01": 1, "d=2020-01-02": 1})
        source.at += timedelta(days=1)
        dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-03": 1})
    seen = observe(lake.opened, 30)
    assert len(seen.merges) == 3
    assert [m.partition for m in seen.last_run()] == ["d=2020-01-03"]


def test_what_needs_attention_is_named_with_its_reason(lake: Lake) -> None:
    three_nights(lake)
    lake.land("late.jsonl", [row("a", 0, 99), row("a", 1, 99)])
    lake.table.append(host="local")
    mark_failed(lake.opened, "d=2020-01-01", 4, "base file is gone")
    found = Page(lake.table.report())
    assert (found.facts["dirty"], found.facts["failed"]) == ("2", "1")
    assert found.tables["What needs attention"][1] == ["d=2020-01-01", "failed", "base file is gone"]
    assert found.tables["What needs attention"][2][:2] == ["d=2020-01-02", "dirty"]
    open_batch = found.tables["The batches in numbers"][1]
    assert open_batch[found.tables["The batches in numbers"][0].index("factor")] == ""
    assert "Left out: 1 batch" in found.sections["Write amplification per batch"]
    assert len(observe(lake.opened, 30).merges) == 6, "a mark is no merge"


def test_restore_and_what_it_withdrew_are_shown_as_that(lake: Lake) -> None:
    three_nights(lake)
    lake.table.restore(0, dry=False)
    lake.run()  # merges the restore: its number is none of a batch
    text = lake.table.report()
    head, *batches = Page(text).tables["The batches in numbers"]
    states = {row[head.index("batch")]: row[head.index("state")] for row in batches}
    assert states == {"4": "restore to snapshot 0", "3": "withdrawn", "2": "withdrawn", "1": ""}
    assert text.count('<tr class="withdrawn">') == 2
    seen = observe(lake.opened, 30)
    assert [n.number for n in seen.nights if n.withdrawn] == [2, 3]
    assert seen.nights[-1].restored is not None
    assert {m.batch for m in seen.last_run()} == {4}
    assert sum(seen.ages.values()) == seen.nights[0].rows, "rows of withdrawn batches have no age"
    assert {p.name: p.times for p in seen.partitions} == {f"d=2020-01-0{n}": int(n < 3) for n in (1, 2, 3, 4)}
    assert "Left out:" not in Page(text).sections["Write amplification per batch"], "a restore brings no bytes"

    lake.table.restore(2, dry=False)  # back again: batches 2 and 3 count once more
    assert not [n.number for n in observe(lake.opened, 30).nights if n.withdrawn]
    assert Page(lake.table.report(nights=1)).tables["The batches in numbers"][1][1] == "restore to snapshot 2"


def test_batch_that_comes_while_the_report_is_read_is_no_error(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    three_nights(lake)
    heads = lake.opened.heads

    def later(partitions: Any) -> Any:
        if not partitions:  # asked by `status`, before the ledger's head is read
            return heads(partitions)
        monkeypatch.undo()
        lake.land("later.jsonl", [row("k1", 0, 99)])
        Table("t", lake.settings).run(host="local")
        return heads(partitions)

    monkeypatch.setattr(lake.opened, "heads", later)
    seen = observe(lake.opened, 30)
    assert max(m.batch for m in seen.merges) == max(n.number for n in seen.nights) == 3


def test_partition_that_is_no_date_has_a_list_and_no_ages(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={"k": "string", "l": "int", "d": "string", "ts": "timestamp_ntz", "v": "bigint"})
    lake.land("1.jsonl", [{**row("a", 0, 1), "d": shop} for shop in ("north", "south")])
    lake.run()
    lake.land("2.jsonl", [{**row("a", 0, 2), "d": "south"}])
    lake.run()
    found = Page(lake.table.report())
    assert [r[0] for r in found.tables["Most touched partitions, by d"][1:]] == ["south", "north"]
    assert "d is not a date" in found.sections["Age of the data that comes"]


def test_table_without_a_batch_says_so_in_every_figure(lake: Lake) -> None:
    found = Page(lake.table.report())
    assert found.facts["rows"] == "0"
    assert len(found.sections) == len(FIGURES)
    assert all(re.search(r"\b(No|Nothing)\b", text) for text in found.sections.values()), found.sections
    assert "rect" not in found.tags


# ---------------------------------------------------------------- what it reads


def test_manifests_read_follow_the_nights_shown(lake: Lake) -> None:
    for night in range(8):
        lake.land(f"{night}.jsonl", [row("a", 0, night)])
        lake.run()

    def manifests(nights: int) -> int:
        lake.reopen()
        lake.points.seen.clear()
        lake.table.report(nights)
        return sum(name.startswith("get _lakeupsert/partitions/") for name in lake.points.seen)

    # One more than is shown: what a merge wrote is what the version below does not have.
    assert [manifests(nights) for nights in (1, 3, 5)] == [2, 4, 6]


def test_versions_of_an_earlier_lakeupsert_are_shown_too(lake: Lake) -> None:
    three_nights(lake)
    for path in (lake.root / "processed/_lakeupsert/partitions").rglob("*.json"):
        link = json.loads(path.read_text())
        del link["body"]["made"]["worker"]
        path.write_text(json.dumps(link))
    lake.reopen()
    assert "unknown worker: 2 merges" in Page(lake.table.report(1)).sections["Timeline of the last run, by worker"]
    for path in (lake.root / "processed/_lakeupsert/partitions").rglob("*.json"):
        path.write_text(json.dumps({**(link := json.loads(path.read_text())), "body": {**link["body"], "made": {}}}))
    lake.reopen()
    found = Page(lake.table.report())
    assert "don't say how long they took" in found.sections["Timeline of the last run, by worker"]
    assert "No merge in these batches says" in found.sections["Slowest partitions"]
    assert all(n.whole for n in observe(lake.opened, 30).nights)


def test_trimmed_versions_are_no_error_and_no_figure_counts_them_as_nothing(lake: Lake) -> None:
    three_nights(lake)
    first, _ = chain(lake, 1)  # batches 1 and 2
    first.unlink()
    lake.reopen()
    seen = observe(lake.opened, 30)
    assert [n.whole for n in seen.nights] == [False, True, True]
    assert "Left out: 1 batch" in Page(page("t", seen)).sections["Write amplification per batch"]


# ---------------------------------------------------------------- what comes from the data stays data

SCRIPT = "<script>document.title='ran'</script>"
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
    mark_failed(lake.opened, partition, 2, f"can't be read: {SCRIPT}\0\x1b[31m")
    return lake


def test_data_that_look_like_html_are_text(hostile: Lake) -> None:
    text = page(SCRIPT, observe(hostile.opened, 30))
    found = Page(text)
    assert not {"script", "img", "iframe", "object", "link"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert SCRIPT in found.title
    assert found.tables["Most touched partitions, by d"][1][0] == SCRIPT
    assert found.tables["The batches in numbers"][2][-1] == IMAGE
    assert f"can't be read: {SCRIPT}" in found.tables["What needs attention"][1][2]
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
    assert "the last 2 batches, 2 to 3" in Path("report.html").read_text()
    assert not [path for path in Path().iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("output", "code"),
    [("lakeupsert.toml", "unknown-format"), ("landing", "unknown-format"), ("none/report.html", "no-folder")],
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
      sections: [...page.querySelectorAll("section")].map(s => [s.querySelector("h2").textContent, s.offsetHeight]),
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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_browser_shows_every_figure_at_every_width_and_runs_nothing(
    hostile: Lake, tmp_path: Path, served: str, asked: list[str]
) -> None:
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    text = page("t", observe(hostile.opened, 30))
    # Without the policy, so that the escapes alone must hold.
    (tmp_path / "report.html").write_text(policy.sub("", text))
    found = measured(tmp_path, served)
    assert set(found) == {"390", "1440"}
    for width, of_it in found.items():
        assert of_it["title"].startswith("t: lakeupsert report"), "a script ran"
        assert of_it["wide"] <= int(width), "it has to be moved sideways"
        assert of_it["charts"] > 0
        assert of_it["flat"] == 0, "a chart has no room"
        assert len(of_it["sections"]) == len(FIGURES)
        assert min(height for _, height in of_it["sections"]) > 40
    assert set(asked) <= {"/measure.html", "/report.html", "/favicon.ico"}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_browser_that_prefers_dark_gets_it(lake: Lake, tmp_path: Path, served: str) -> None:
    three_nights(lake)
    (tmp_path / "report.html").write_text(lake.table.report())
    light = measured(tmp_path, served, "--blink-settings=preferredColorScheme=1")
    dark = measured(tmp_path, served, "--blink-settings=preferredColorScheme=0")
    bright = [sum(map(int, re.findall(r"\d+", of["390"]["ground"])[:3])) for of in (dark, light)]
    assert bright[0] < 150 < 600 < bright[1]
    assert all(of[width]["wide"] <= int(width) for of in (light, dark) for width in of)
