"""A table on a local disk whose queue is in SQS: a night, workers, a partition that fails, and what operators see of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from click.testing import CliRunner

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.queue import Message, QueueStats
from tests.harness import servers
from tests.harness.damage import damage as damage_files
from tests.harness.lake import Lake, row
from tests.harness.processes import wait_until
from tests.harness.servers import Server, new_queue

PARTITIONS = [f"d=2020-01-{day:02}" for day in range(1, 9)]


@pytest.fixture
def lake(
    tmp_path: Path, elasticmq: Server, new_sqs_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lake]:
    """A published night, and one of all partitions that is appended; two tries a message."""
    for name, value in elasticmq.env.items():
        monkeypatch.setenv(name, value)
    name = new_sqs_queue(max_receive_count=3)
    lake = Lake(tmp_path, queue=f"sqs://{name}")
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(len(PARTITIONS))])
    lake.run()
    lake.land("2.jsonl", [row("a", day, 2, 2) for day in range(len(PARTITIONS))])
    lake.table.append(host="local")
    (tmp_path / "lakeupsert.toml").write_text(
        f'[tables.t]\nlanding = "{tmp_path}/landing"\nprocessed = "{tmp_path}/processed"\nqueue = "sqs://{name}"\n'
        'key = ["k", "l"]\npartition_by = ["d"]\norder_by = ["ts"]\n[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n'
    )
    yield lake
    lake.table.close()


def begin(lake: Lake, *args: str) -> subprocess.Popen[str]:
    """The command in a process of its own, as in a container."""
    command = [
        sys.executable,
        "-c",
        "from lakeupsert.cli import main; main()",
        *args,
        "--config",
        str(lake.root / "lakeupsert.toml"),
        "--json",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def end(process: subprocess.Popen[str], code: int = 0) -> Any:
    out, errors = process.communicate()
    assert process.returncode == code, errors
    return json.loads(out)


def call(lake: Lake, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--config", str(lake.root / "lakeupsert.toml"), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def queue(lake: Lake) -> Any:
    return lake.opened.resources.queue


def damage(lake: Lake, partition: str) -> Any:
    """Make the partition's appended file unreadable; call what this returns to mend it."""
    [*_, (_, entry)] = lake.entries()
    return damage_files(lake.root / "processed", entry.touched[partition].files[0])


@pytest.mark.core
def test_night_is_merged_by_two_workers_that_wait_for_it(lake: Lake) -> None:
    workers = [begin(lake, "worker", "--workers", "1") for _ in range(2)]
    wait_until(lambda: queue(lake).stats() == QueueStats(0, 0, 0), "the first night is merged", 0.1)
    lake.land("3.jsonl", [row("a", day, 3, 3) for day in range(len(PARTITIONS))])
    call(lake, "append", "--host", "local")
    wait_until(lambda: queue(lake).stats() == QueueStats(0, 0, 0), "the second night is merged, without a call", 0.1)
    merged = 0
    for worker in workers:
        worker.terminate()
        merged += end(worker, 75)["result"]["totals"]["merged"]
    assert merged == 2 * len(PARTITIONS)
    call(lake, "publish")
    assert lake.rows() == lake.expected(3)
    lake.check()


def test_poison_partition_is_a_dead_letter_until_redrive(lake: Lake) -> None:
    mend = damage(lake, PARTITIONS[3])
    call(lake, "dedupe", code=1)
    status = call(lake, "status", code=1)
    assert status["result"]["queue"] == {"visible": 0, "leased": 0, "dead": 1}
    assert "lakeupsert redrive" in status["error"]["next"]
    [letter] = queue(lake).dead_letters()
    assert (letter.message.partition, letter.receives) == (PARTITIONS[3], 2)
    assert "Data file" in letter.reason
    mend()
    assert call(lake, "redrive")["result"] == {"redriven": 1, "dropped": 0, "left": 0}
    [merged] = call(lake, "worker", "--until-empty", "--workers", "1")["result"]["partitions"]
    assert merged["partition"] == PARTITIONS[3]
    assert call(lake, "status")["result"]["queue"] == {"visible": 0, "leased": 0, "dead": 0}
    assert lake.rows() == lake.expected(2)


def test_messages_of_another_table_and_of_nobody_are_buried(lake: Lake) -> None:
    name = lake.settings.queue.removeprefix("sqs://")
    sqs = boto3.client("sqs")
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    for body in ('{"v":2,"table":"t"}', "<html>", '{"v":1,"table":"s3://elsewhere/t","partition":"d=1","batch":1}'):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    queue(lake).send([Message("another", PARTITIONS[0], 2)])
    call(lake, "dedupe")
    letters = queue(lake).dead_letters()
    assert sorted(x.message.table if x.message else "" for x in letters) == ["", "", "another", "s3://elsewhere/t"]
    assert lake.rows() == lake.expected(2)
    found = call(lake, "redrive")
    assert found["result"] == {"redriven": 0, "dropped": 0, "left": 4}


def test_run_sends_again_what_a_queue_has_lost(lake: Lake) -> None:
    sqs = boto3.client("sqs")
    sqs.purge_queue(QueueUrl=sqs.get_queue_url(QueueName=lake.settings.queue.removeprefix("sqs://"))["QueueUrl"])
    end(begin(lake, "run", "--host", "local", "--workers", "2"))
    assert lake.rows() == lake.expected(2)


@pytest.mark.long
def test_append_commits_though_its_queue_is_away_and_reconcile_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is stopped before the append, and another one, whose queues are empty, is there after it."""
    lake = Lake(tmp_path, queue="sqs://work")

    def use(server: Server) -> None:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        new_queue("work")

    with servers.elasticmq() as server:
        use(server)
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(3)])
    lake.configure()
    appended = call(lake, "append", "--host", "local")
    assert appended["exit_code"] == 0
    [batch] = appended["result"]["batches"]
    [warning] = [w for w in appended["warnings"] if "reconcile" in w]
    assert "'work'" in warning
    seen = call(lake, "status")
    assert (seen["result"]["dirty"], seen["result"]["queue"]["visible"]) == (3, None)
    assert any("'work'" in w for w in seen["warnings"])
    assert call(lake, "run", "--host", "local", code=75)["error"]["code"] == "queue-unreachable"
    with servers.elasticmq() as server:
        use(server)
        lake.reopen()
        assert call(lake, "reconcile")["result"]["resent"] == len(batch["touched_partitions"])
        call(lake, "worker", "--until-empty", "--workers", "1")
        lake.reopen()
        assert lake.rows() == lake.expected(1)


def queue_findings(lake: Lake, name: str) -> list[tuple[str, str]]:
    table = Table("t", msgspec.structs.replace(lake.settings, queue=f"sqs://{name}"))
    try:
        return [(x.level, x.found) for x in table.doctor() if x.check == "queue"]
    finally:
        table.close()


def test_doctor_finds_a_queue_without_dead_letters(lake: Lake) -> None:
    name = f"q-{clock.new_id()}"
    boto3.client("sqs").create_queue(QueueName=name)
    [(level, found)] = queue_findings(lake, name)
    assert level == "problem"
    assert "no redrive policy" in found


def test_doctor_finds_a_visibility_that_a_function_outlives(lake: Lake, new_sqs_queue: Callable[..., str]) -> None:
    [(usual, _), (level, found)] = queue_findings(lake, new_sqs_queue(visibility_seconds=30))
    assert (usual, level) == ("ok", "warning")
    assert "is 30 s" in found
