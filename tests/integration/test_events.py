"""What a night tells while it runs: lines of a log, metrics, spans; and that a worker that lives long remembers no result."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.events import Event
from lakeupsert.pipeline import history
from lakeupsert.pipeline.merge import units
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers import pool as worker_pool
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.queue import Message, QueueStats
from lakeupsert.report.totals import MergeTotals
from lakeupsert.table.ledger import LedgerEntry
from tests.harness.damage import damage
from tests.harness.lake import Lake, row
from tests.harness.processes import PATIENCE_SECONDS, wait_until

DAYS = 21
WORKERS = pytest.mark.parametrize("workers", ["1", "2"])
PROGRAM = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]
WITHOUT = "import sys; sys.modules[{module!r}] = None; from lakeupsert.cli import main; main()"


@pytest.fixture
def lake(folder: Path) -> Lake:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(DAYS)])
    return lake


def call(lake: Lake, *args: str, code: int = 0) -> tuple[Any, list[Any]]:
    """The object on standard output, and the lines on standard error, each of which is JSON."""
    result = CliRunner().invoke(main, [*args, "--config", str(lake.configure()), "--log", "json", "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout), [json.loads(line) for line in result.stderr.splitlines()]


def of_kind(lines: list[Any], kind: str) -> list[Any]:
    return [line for line in lines if line["event"] == kind]


def damage_last_batch(lake: Lake, partition: str) -> None:
    _, entry = lake.entries()[-1]
    [file] = entry.touched[partition].files
    damage(Path(lake.settings.processed), file)


# ---------------------------------------------------------------- lines


@WORKERS
def test_one_id_leads_from_a_batch_to_its_merges_and_its_snapshot(lake: Lake, workers: str) -> None:
    answer, lines = call(lake, "run", "--host", "local", "--workers", workers, "--batch-id", "night 1")
    assert Counter(line["event"] for line in lines) == {"batch": 1, "merge": DAYS, "publish": 1}
    ledger = lake.table.objects.ledger.head()
    assert ledger is not None
    assert {(line["table"], line["batch"], line["entry"]) for line in lines} == {("t", 1, ledger.write_id)}
    [batch], [publish] = of_kind(lines, "batch"), of_kind(lines, "publish")
    assert (batch["batch_id"], batch["rows_read"], batch["partitions"]) == ("night 1", DAYS, DAYS)
    told = {p["partition"]: p for p in answer["result"]["dedupe"]["partitions"]}
    for merge in of_kind(lines, "merge"):
        result = told.pop(merge["partition"])
        for name in ("version", "rows_in", "rows_out", "bytes_read", "bytes_written", "engine", "strategy"):
            assert merge[name] == result[name]
    assert not told
    assert publish["snapshot"] == answer["result"]["publish"]["snapshot"]


def test_requests_of_all_lines_add_up(lake: Lake) -> None:
    answer, lines = call(lake, "run", "--host", "local", "--workers", "1")
    told: Counter[str] = Counter()
    for line in lines:
        told.update(line["requests"])
    after = {name: number for name, number in answer["result"]["requests"].items() if number != told[name]}
    assert after.keys() <= {"get", "list"}, "only reads come after the last commit"
    assert told.total() > 0.9 * sum(answer["result"]["requests"].values())


def test_merge_of_several_batches_names_them_all(lake: Lake) -> None:
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    _, [second] = call(lake, "append", "--host", "local")
    lake.land("3.jsonl", [row("a", 1, 3, 3)])
    _, [third] = call(lake, "append", "--host", "local")
    _, lines = call(lake, "dedupe", "--workers", "1")
    merges, [publish] = of_kind(lines, "merge"), of_kind(lines, "publish")
    assert [(line["batch"], line["entry"]) for line in merges] == [(x["batch"], x["entry"]) for x in (second, third)]
    assert (publish["entry"], publish["earlier"]) == (third["entry"], [second["entry"]])


def test_rewrite_names_its_work_object_and_the_batch_that_it_keeps(lake: Lake) -> None:
    lake.run()
    _, lines = call(lake, "reprocess", "--partition", "2020-01-01", "--workers", "1")
    [merge], [publish] = of_kind(lines, "merge"), of_kind(lines, "publish")
    head = lake.table.objects.partition("d=2020-01-01").head()
    assert head is not None
    assert (merge["work"], merge["entry"], merge["version"]) == (head.body.reprocessed, head.body.entry, head.number)
    assert merge["entry"] == publish["entry"]


def test_units_have_lines_and_the_last_commits_them_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_files_split: None
) -> None:
    monkeypatch.setattr(units, "ALONE_BUCKETS", 1)
    lake = Lake(folder, bucket="6KiB")
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 10, i) for i in range(3000)])
    lake.run()
    lake.land("1.jsonl", [row(f"k{i:05}", 0, 20, -i) for i in range(0, 3000, 5)])
    lake.table.append(host="local")
    _, lines = call(lake, "dedupe", "--workers", "1")
    [merge], found = of_kind(lines, "merge"), [line for line in of_kind(lines, "unit") if not line["cut"]]
    assert merge["units"] == len(found) > 2
    assert {line["unit"] for line in found} == set(range(merge["units"]))
    assert {(line["entry"], line["partition"]) for line in found} == {(merge["entry"], merge["partition"])}
    assert sum(line["bytes_written"] for line in found) == merge["bytes_written"]


def test_log_of_a_night_that_goes_wrong_is_json_too(lake: Lake) -> None:
    lake.run()
    lake.land("2.jsonl", [row("a", day, 2, 2) for day in range(DAYS)], refused=[{"k": None, "d": None}])
    answer, lines = call(lake, "append", "--host", "local")
    assert [line["message"] for line in of_kind(lines, "warning")] == answer["warnings"]
    damage_last_batch(lake, "d=2020-01-01")
    answer, lines = call(lake, "dedupe", "--workers", "1", code=1)
    tries = [line for line in of_kind(lines, "warning") if line["partition"] == "d=2020-01-01"]
    assert {line["table"] for line in tries} == {"t"}
    [failure], [error] = of_kind(lines, "failure"), of_kind(lines, "error")
    assert (failure["partition"], failure["batch"], failure["engine"]) == ("d=2020-01-01", 2, "arrow")
    assert failure["next"]
    assert lines[-1] == error
    assert {name: error[name] for name in ("code", "message", "next", "partition")} == {
        name: answer["error"][name] for name in ("code", "message", "next", "partition")
    }
    assert len(of_kind(lines, "merge")) == DAYS - 1


def test_warnings_of_worker_processes_are_lines_too(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "FEW_MESSAGES", 0)
    lake.table.append(host="local")
    damage_last_batch(lake, "d=2020-01-01")
    _, lines = call(lake, "dedupe", "--workers", "2", code=1)
    assert {line["partition"] for line in of_kind(lines, "warning") if line["logger"]} == {"d=2020-01-01"}
    assert [line["partition"] for line in of_kind(lines, "failure")] == ["d=2020-01-01"]
    assert len(of_kind(lines, "merge")) == DAYS - 1


def test_command_line_that_can_not_be_parsed_is_answered_in_json(lake: Lake) -> None:
    _, [error] = call(lake, "append", "--no-such-option", code=2)
    assert (error["event"], error["code"], error["exit_code"]) == ("error", "usage", 2)


def test_command_that_has_no_events_has_no_such_log(lake: Lake) -> None:
    _, [error] = call(lake, "status", code=2)
    assert "--log" in error["message"]


def test_log_is_text_unless_it_is_asked_for(lake: Lake) -> None:
    result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(lake.configure())])
    assert (result.exit_code, result.stderr) == (0, "")


def test_sink_that_fails_loses_no_commit(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no")

    lake.table.listen(fail)
    lake.run()
    lake.check()
    assert len([record for record in caplog.records if "ValueError" in record.message]) == DAYS + 2


# ---------------------------------------------------------------- while it runs


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(lake: Lake, tmp_path: Path) -> Iterator[Begin]:
    """Begins a command in a process of its own, whose standard error is the file `log`."""
    with ExitStack() as left:

        def begin(*args: str) -> subprocess.Popen[str]:
            command = [*PROGRAM, *args, "--config", str(lake.configure()), "--json"]
            log = left.enter_context((tmp_path / "log").open("w"))
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            left.callback(process.kill)
            return process

        yield begin


@pytest.mark.long
@pytest.mark.few(1)
@WORKERS
def test_21_messages_give_21_lines_while_the_worker_runs(
    lake: Lake, begin: Begin, tmp_path: Path, workers: str
) -> None:
    metrics = tmp_path / "lakeupsert.prom"
    worker = begin("worker", "--workers", workers, "--log", "json", "--metrics-file", str(metrics))
    lake.table.append(host="local")

    def merges() -> list[Any]:
        lines = (tmp_path / "log").read_text().splitlines(keepends=True)
        return of_kind([json.loads(line) for line in lines if line.endswith("\n")], "merge")

    wait_until(lambda: len(merges()) == DAYS, "each message has a line", 0.02)
    wait_until(lambda: samples(metrics)["lakeupsert_merges_total"] == DAYS, "the metrics have them all", 0.02)
    assert worker.poll() is None
    worker.terminate()
    out, _ = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == 75
    assert {line["partition"] for line in merges()} == {f"d=2020-01-{day + 1:02}" for day in range(DAYS)}
    result = json.loads(out)["result"]
    assert result["partitions"] == []
    assert (result["totals"]["merged"], result["totals"]["rows_in"]) == (DAYS, DAYS)
    found = samples(metrics)
    assert found["lakeupsert_merges_total"] == len(merges())
    assert found["lakeupsert_read_bytes_total"] == sum(line["bytes_read"] for line in merges())


def test_results_of_a_worker_process_that_is_killed_are_kept(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "FEW_MESSAGES", 0)
    lake.table.append(host="local")
    results: list[PartitionResult] = []

    def kill_first(result: PartitionResult) -> None:
        if not results:
            head = lake.table.objects.partition(result.partition).head()
            assert head is not None
            os.kill(int(str(head.body.made["worker"]).rpartition(":")[2]), signal.SIGKILL)
        results.append(result)

    lake.table.dedupe(workers=2, collect=kill_first)
    assert results[0].status == "merged"
    lake.table.publish()
    lake.check()
    assert lake.rows() == lake.expected(1)


def samples(file: Path) -> dict[str, float]:
    """The values of table t by name, as Prometheus reads the file; 0 before it is there."""
    text = file.read_text() if file.exists() else ""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["table"] for sample in found} <= {"t"}
    return Counter({sample.name: sample.value for sample in found if sample.labels.keys() == {"table"}})


MESSAGES = 400


@pytest.mark.long
@pytest.mark.few(1)
@WORKERS
def test_worker_forgets_its_results(lake: Lake, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.run()
    partitions = [f"d=2020-01-{day + 1:02}" for day in range(20)]
    queue = lake.table.objects.queue
    lake.opened.resources.queue.send(
        Message("t", partition, 1) for _ in range(MESSAGES // 20) for partition in partitions
    )
    alive: list[int] = []

    def count_and_stop() -> None:
        wait_until(lambda: queue.stats() == QueueStats(0, 0, 0), "all messages are answered", 0.02)
        alive.append(sum(isinstance(x, PartitionResult) for x in gc.get_objects()))
        os.kill(os.getpid(), signal.SIGTERM)

    counting = threading.Thread(target=count_and_stop)
    counting.start()
    answer, lines = call(lake, "worker", "--workers", workers, code=75)
    counting.join()
    assert answer["error"]["code"] == "terminated"
    assert alive[0] < 100
    assert answer["result"]["totals"]["clean"] == MESSAGES
    assert of_kind(lines, "merge") == []


@pytest.mark.long
def test_worker_forgets_batches_that_readers_see(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_ENTRIES", 3)
    lake.run()
    worker = OpenTable("t", lake.settings)

    def held() -> int:
        gc.collect()
        return sum(isinstance(x, LedgerEntry) for x in gc.get_objects())

    lake.reopen()  # it remembers batches, too
    before, most = held(), 0
    for number in range(2, 14):
        lake.reopen()
        lake.land(f"{number}.jsonl", [row("a", 0, number, number)])
        lake.table.append(host="local")
        drain(worker, ArrowEngine(), WorkerOptions())
        lake.table.publish()
        lake.reopen()
        most = max(most, held() - before)  # other tests of the process may hold some
    worker.resources.close()
    assert most < 8
    lake.check()


def test_worker_that_waits_remembers_failures_until_they_are_mended(lake: Lake) -> None:
    lake.table.append(host="local")
    damage_last_batch(lake, "d=2020-01-01")
    results: list[PartitionResult] = []
    drain(lake.opened, ArrowEngine(), WorkerOptions(collect=results.append))
    totals = MergeTotals.of(results)
    assert (list(totals.failures), totals.merged) == (["d=2020-01-01"], DAYS - 1)
    totals.add(PartitionResult("d=2020-01-01", status="merged"))
    assert not totals.failures


def test_metrics_that_can_not_be_written_are_one_warning(lake: Lake, tmp_path: Path) -> None:
    lake.table.append(host="local")
    too_long = tmp_path / f"{'x' * 250}.prom"  # with what is added while it is written
    _, lines = call(lake, "worker", "--workers", "1", "--until-empty", "--metrics-file", str(too_long))
    [warning] = of_kind(lines, "warning")
    assert str(too_long) in warning["message"]
    assert len(of_kind(lines, "merge")) == DAYS


def test_metrics_without_their_library_are_refused(lake: Lake, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT.format(module="prometheus_client"),
        "worker",
        "--config",
        str(lake.configure()),
    ]
    done = subprocess.run(
        [*command, "--metrics-file", str(tmp_path / "x.prom"), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "extra-missing"


# ---------------------------------------------------------------- spans


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """A process has one provider for good; other tests of it have spans too, and nobody reads them."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@WORKERS
def test_steps_are_spans_below_that_of_the_caller(
    lake: Lake, exporter: InMemorySpanExporter, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.clear()
    events: list[Any] = []
    lake.table.listen(events.append)
    with trace.get_tracer("the caller").start_as_current_span("night") as night:
        lake.table.run(host="local", workers=int(workers))
    spans = [span for span in exporter.get_finished_spans() if span.name != "night"]
    assert Counter(span.name for span in spans) == {
        "lakeupsert.append": 1,
        "lakeupsert.merge": DAYS,
        "lakeupsert.commit": 1 + DAYS,
        "lakeupsert.publish": 1,
    }
    by_id = {span.context.span_id: span for span in spans if span.context}
    entry = events[0].entry
    for span in spans:
        assert span.parent is not None
        assert span.context is not None
        assert span.context.trace_id == night.get_span_context().trace_id
        if span.name == "lakeupsert.commit":
            above = by_id[span.parent.span_id]
            assert above.name in ("lakeupsert.append", "lakeupsert.merge")
            assert lasts(span) <= lasts(above)
        else:
            assert span.parent.span_id == night.get_span_context().span_id
            assert span.attributes is not None
            assert (span.attributes["lakeupsert.entry"], span.attributes["lakeupsert.table"]) == (entry, "t")
    merged = {span.attributes["lakeupsert.partition"] for span in spans if span.attributes and "merge" in span.name}
    assert len(merged) == DAYS


def lasts(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def test_failed_partition_is_a_span_with_an_error(lake: Lake, exporter: InMemorySpanExporter) -> None:
    lake.table.append(host="local")
    damage_last_batch(lake, "d=2020-01-01")
    exporter.clear()
    lake.table.dedupe()
    [span] = [span for span in exporter.get_finished_spans() if not span.status.is_ok and not span.status.is_unset]
    assert span.attributes is not None
    assert (span.name, span.attributes["lakeupsert.partition"]) == ("lakeupsert.merge", "d=2020-01-01")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("missing", [False, True])
def test_night_imports_no_opentelemetry_and_needs_none(lake: Lake, missing: bool) -> None:
    block = "sys.modules['opentelemetry'] = None" if missing else ""
    code = (
        f"import sys; {block}\n"
        f"from lakeupsert import Table\n"
        f"Table.open({str(lake.configure())!r}).run(host='local')\n"
        f"print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    lake.check()
