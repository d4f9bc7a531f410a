"""The functions of Azure, called as their host calls them: zones, configuration and queue in Azurite.

The host's queue trigger is played here: `deliver` receives one message, decodes it with the host's own converter, calls, and
then deletes it, hides it for a while or puts it with the poison, by how the function ended.
"""

import base64
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from azure.core.exceptions import HttpResponseError
from azure.functions.meta import Datum
from azure.functions.queue import QueueMessageInConverter
from azure.storage.queue import QueueClient

from lakeupsert import LakeupsertError, Table, demo
from lakeupsert.operations.run import RunResult
from lakeupsert.pipeline.workers import worker
from lakeupsert.queue.azure import MAX_RECEIVES, POISON
from lakeupsert.storage import open_store
from lakeupsert.storage.azureaccount import EMULATOR
from lakeupsert.table.ledger import ChosenHost
from tests.harness.lake import Lake, row
from tests.harness.servers import Server

ROOT = Path(__file__).parents[2] / "infra/azure"
HOST = json.loads((ROOT / "functions/host.json").read_text())
NIGHTS = [
    [row("a", day, 1, 1) for day in range(5)] + [row("b", 0, 1, 1), row("b", 1, 1, 1)],
    [row("a", day, 2, 2) for day in range(0, 5, 2)] + [row("b", 0, 2, 2, op="D"), row("c", 13, 1, 2)],
]


@pytest.fixture(scope="module")
def functions(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(ROOT / "functions/function_app.py")


@pytest.fixture
def lake(
    azure: Server,
    new_place: Callable[[Server], str],
    new_azure_queue: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lake]:
    """Its first night has landed."""
    root = f"{new_place(azure).replace('az:', 'abfss:')}@{EMULATOR}.dfs.core.windows.net"
    queue = new_azure_queue()
    lake = Lake(
        tmp_path,
        landing=f"{root}/landing",
        processed=f"{root}/processed",
        queue=f"azqueue://{EMULATOR}/{queue}",
    )
    with open_store(root).write("lakeupsert.toml") as sink:
        sink.write(lake.configure().read_bytes())
    settings = {"CONFIG": f"{root}/lakeupsert.toml", "TABLE": "t", "QUEUE": queue, "ZONE": "Etc/UTC"}
    for name, value in settings.items():
        monkeypatch.setenv(f"LAKEUPSERT_{name}", value)
    lake.land("1.jsonl", NIGHTS[0])
    yield lake
    lake.table.close()


def trigger(name: str, azure: Server, functions: ModuleType) -> str | None:
    """One message of the queue as the host delivers it: "deleted", "hidden" or "poison" then; None where there is none."""
    queue = QueueClient.from_connection_string(azure.env["AZURE_STORAGE_CONNECTION_STRING"], name)
    found = queue.receive_message(visibility_timeout=600)
    if found is None:
        return None
    metadata = {
        "Id": Datum(found.id, "string"),
        "DequeueCount": Datum(str(found.dequeue_count), "string"),
        "PopReceipt": Datum(found.pop_receipt, "string"),
    }
    text = base64.b64decode(found.content).decode()
    message = QueueMessageInConverter.decode(Datum(text, "string"), trigger_metadata=metadata)
    try:
        functions.dedupe(message)
    except LakeupsertError:
        last = found.dequeue_count >= HOST["extensions"]["queues"]["maxDequeueCount"]
        with suppress(HttpResponseError):  # the function answered the message itself, which the host takes as well
            if not last:
                queue.update_message(found, visibility_timeout=0)
            else:
                queue.delete_message(found)
                poison = QueueClient.from_connection_string(azure.env["AZURE_STORAGE_CONNECTION_STRING"], name + POISON)
                poison.send_message(found.content)
        return "poison" if last else "hidden"
    with suppress(HttpResponseError):
        queue.delete_message(found)
    return "deleted"


def queue_of(lake: Lake) -> str:
    return lake.settings.queue.rpartition("/")[2]


def deliver(lake: Lake, azure: Server, functions: ModuleType) -> int:
    calls = 0
    while trigger(queue_of(lake), azure, functions) is not None:
        calls += 1
    return calls


@pytest.fixture
def two_am(functions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "is_night", lambda now, zone: True)


@pytest.mark.core
def test_nights_through_the_functions_equal_the_model(
    lake: Lake, azure: Server, functions: ModuleType, two_am: None
) -> None:
    for number, rows in enumerate(NIGHTS, 1):
        if number > 1:
            lake.land(f"{number}.jsonl", rows)
        functions.append(None)
        assert deliver(lake, azure, functions) == (5 if number == 1 else 4)
        functions.reconcile(None)
        lake.reopen()
        assert lake.rows() == lake.expected(number)
    functions.append(None)
    assert deliver(lake, azure, functions) == 0
    lake.check()


def test_append_waits_for_the_hour(lake: Lake, functions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "is_night", lambda now, zone: False)
    functions.append(None)
    assert not lake.table.exists()


def test_functions_log_the_lines_that_alerts_wait_for(
    lake: Lake, functions: ModuleType, two_am: None, caplog: pytest.LogCaptureFixture
) -> None:
    lake.land("2.jsonl", [], refused=[{**row("x", 1, 1), "v": "no number"}])
    with caplog.at_level(logging.INFO):
        functions.append(None)
        functions.reconcile(None)
    template = (ROOT / "main.bicep").read_text()
    lines = [record.getMessage() for record in caplog.records]
    assert "rows: 7 appended, 1 quarantined" in lines
    assert "waiting: 5 partitions" in lines
    for parsed in re.findall(r"parse message with (.+?) \|", template):
        pattern = re.sub(r" ?\w+:long ?", r"(\\d+)", parsed.replace('"', ""))
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    for start in re.findall(r'message startswith "(appended: )"', template):
        assert any(line.startswith(start) for line in lines)


def test_reconcile_sends_what_got_lost_and_needs_no_table(
    lake: Lake, azure: Server, functions: ModuleType, two_am: None
) -> None:
    functions.reconcile(None)
    functions.append(None)
    QueueClient.from_connection_string(azure.env["AZURE_STORAGE_CONNECTION_STRING"], queue_of(lake)).clear_messages()
    functions.reconcile(None)
    assert deliver(lake, azure, functions) == 5
    lake.reopen()
    assert lake.rows() == lake.expected(1)


@pytest.mark.long
def test_poison_partition_is_tried_and_buried_with_its_reason(
    lake: Lake, azure: Server, functions: ModuleType, two_am: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.0)
    functions.append(None)
    [*_, (_, entry)] = lake.entries()
    poison, touched = next(iter(entry.touched.items()))
    store = open_store(lake.settings.processed)
    [file] = touched.files
    store.delete([file.name])
    told = deliver(lake, azure, functions)
    letters = lake.table.objects.queue.dead_letters()
    partitions = {p for p, t in entry.touched.items() if any(f.name == file.name for f in t.files)}
    assert {letter.message.partition for letter in letters if letter.message} == partitions
    assert poison in partitions
    assert {letter.receives for letter in letters} == {MAX_RECEIVES}
    assert all("is missing" in letter.reason for letter in letters)
    assert told == 5 - len(partitions) + MAX_RECEIVES * len(partitions)


def test_message_that_can_not_be_read_is_buried(lake: Lake, azure: Server, functions: ModuleType, two_am: None) -> None:
    functions.append(None)
    queue = QueueClient.from_connection_string(azure.env["AZURE_STORAGE_CONNECTION_STRING"], queue_of(lake))
    queue.send_message(base64.b64encode(b"<html>").decode())
    assert deliver(lake, azure, functions) == 6
    [letter] = lake.table.objects.queue.dead_letters()
    assert letter.message is None
    assert "Expected version 1" in letter.reason


def test_message_goes_back_where_no_time_is_left(
    lake: Lake, azure: Server, functions: ModuleType, two_am: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions.append(None)
    monkeypatch.setenv("AzureFunctionsJobHost__functionTimeout", "00:00:10")
    assert trigger(queue_of(lake), azure, functions) == "hidden"
    monkeypatch.delenv("AzureFunctionsJobHost__functionTimeout")
    assert deliver(lake, azure, functions) == 5


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Etc/UTC", "2026-06-01", [2]),
        ("Europe/Berlin", "2026-06-01", [0]),
        ("Europe/Berlin", "2026-03-29", [1]),  # 2 am is skipped
        ("Europe/Berlin", "2026-10-25", [0]),  # there are two
        ("America/New_York", "2026-03-08", [7]),
        ("America/New_York", "2026-11-01", [7]),
        ("Asia/Kolkata", "2026-06-01", [21]),  # 20:30
    ],
)
def test_night_is_once_a_day(functions: ModuleType, zone: str, day: str, hours: list[int]) -> None:
    midnight = datetime.fromisoformat(day).replace(tzinfo=UTC)
    for late in (-2, 2, 1200):
        times = [midnight + timedelta(hours=hour, seconds=late) for hour in range(24)]
        assert [hour for hour in range(24) if functions.is_night(times[hour], ZoneInfo(zone))] == hours


def test_hosts_settings_are_those_that_the_queue_counts_on() -> None:
    assert HOST["extensions"]["queues"]["maxDequeueCount"] == MAX_RECEIVES + 1
    assert HOST["extensions"]["queues"]["messageEncoding"] == "base64"
    assert HOST["extensions"]["queues"]["batchSize"] == 1


def test_template_sets_what_the_functions_read() -> None:
    template, code = ((ROOT / name).read_text() for name in ("main.bicep", "functions/function_app.py"))
    settings = set(re.findall(r"LAKEUPSERT_\w+|AzureFunctionsJobHost__\w+", code))
    assert len(settings) == 5
    assert settings == set(re.findall(r"name: '(LAKEUPSERT_\w+|AzureFunctionsJobHost__\w+)'", template))
    assert {"queue_name", "connection"} <= set(
        re.findall(r"(\w+)=\"(?:%LAKEUPSERT_QUEUE%|AzureWebJobsStorage)\"", code)
    )


def test_requirements_have_what_the_functions_import() -> None:
    locked = (ROOT / "functions/requirements.txt").read_text()
    for package in (
        "azure-functions",
        "azure-identity",
        "azure-storage-blob",
        "azure-storage-queue",
        "pyarrow",
        "msgspec",
    ):
        assert f"\n{package}==" in locked
    assert "pyspark" not in locked


@pytest.mark.long
def test_receipts_through_the_functions_are_exact(
    azure: Server,
    new_place: Callable[[Server], str],
    new_azure_queue: Callable[[], str],
    functions: ModuleType,
    two_am: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The demo, whose nights are not the command's but the host's."""
    queue = new_azure_queue()
    settings = {"CONFIG": str(tmp_path / "lakeupsert.toml"), "TABLE": "receipts", "QUEUE": queue, "ZONE": "Etc/UTC"}
    for name, value in settings.items():
        monkeypatch.setenv(f"LAKEUPSERT_{name}", value)

    def night(table: Table, **_: Any) -> RunResult:
        functions.append(None)
        while trigger(queue, azure, functions) is not None:
            pass
        functions.reconcile(None)
        host = ChosenHost(name="local", landing_bytes=None, missing=None)
        return RunResult(host=host, append=None, dedupe=[], publish=table.publish())

    monkeypatch.setattr(Table, "run", night)
    places = ["--lake", f"{new_place(azure)}/demo", "--queue", f"azqueue://{EMULATOR}/{queue}"]
    assert demo.main(["--nights", "4", "--host", "local", "--output", str(tmp_path), *places]) == 0
    assert "exact: " in capsys.readouterr().out.splitlines()[-1]
