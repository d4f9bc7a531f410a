"""`lakeupsert serve` with both zones on S3 or in Azure Storage."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import lakeupsert
from lakeupsert.errors import RefusedError
from tests.harness.endpoint import CONFIG, kill_server, landed, merged, served
from tests.harness.servers import Server

ROW = {"id": "a", "day": "2020-01-01", "ts": 1, "v": 1}


@pytest.fixture
def folder(store_server: Server, new_place: Callable[[Server], str], tmp_path: Path) -> Path:
    place = new_place(store_server)
    config = CONFIG.replace('"landing"', f'"{place}/landing"').replace('"processed"', f'"{place}/processed"')
    (tmp_path / "lakeupsert.toml").write_text(f'{config}queue = "{tmp_path}/queue.sqlite"\n')
    return tmp_path


def test_batches_count_once_also_behind_a_server_that_was_killed(folder: Path) -> None:
    with served(folder) as server:
        client = lakeupsert.Client(server.url)
        assert [client.send([ROW], "a"), client.send([ROW], "a")] == [False, True]
        server.end(signal.SIGKILL)
    assert merged(folder) == [ROW]
    with served(folder) as server:
        client = lakeupsert.Client(server.url)
        assert [client.send([ROW], "a"), client.send([ROW | {"id": "b"}], "b")] == [True, False]
        with pytest.raises(RefusedError) as taken:
            client.send([ROW | {"v": 2}], "a")
        assert taken.value.code == "batch-id-taken"
        assert server.end() == 0
    assert landed(folder) == ["a.parquet", "b.parquet"]
    assert [row["id"] for row in merged(folder)] == ["a", "b"]


def test_nothing_acknowledged_is_lost_by_a_server_that_is_killed_often(folder: Path) -> None:
    kill_server(folder, int(os.environ.get("KILLS", "10")), seed=3)
