"""`publishers = ["delta"]` on S3, Azure and Google Cloud Storage: delta-rs reads every version, and a publish asks for little."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from lakeupsert.storage.azureaccount import EMULATOR
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row
from tests.harness.servers import AZURITE_KEY, CREDENTIALS, Server

PARTITIONS = 30
MOST_PUTS = 4
"""That a publisher may add to a night without a checkpoint. A checkpoint is two more."""


def storage_options(server: Server) -> Mapping[str, str]:
    if "AWS_ENDPOINT_URL" in server.env:
        names = ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", *CREDENTIALS)
        return {**{name: server.env[name] for name in names}, "AWS_ALLOW_HTTP": "true"}
    if "STORAGE_EMULATOR_HOST" in server.env:
        no_account = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {"google_service_account_key": json.dumps({**no_account, "private_key_id": ""})}
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": EMULATOR,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{server.url}/{EMULATOR}",
        "AZURE_ALLOW_HTTP": "true",
    }


@pytest.fixture(params=["versitygw", pytest.param("azurite", marks=pytest.mark.long), "gcs"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def new_lake(server: Server, new_place: Callable[[Server], str], tmp_path: Path) -> Callable[..., Lake]:
    def make(*publishers: str) -> Lake:
        place = new_place(server)
        zones = {zone: f"{place}/{zone}" for zone in ("landing", "processed")}
        folder = tmp_path / place.rpartition("/")[2]
        return Lake(folder, **zones, queue=str(folder / "queue.sqlite"), strategy="delta", publishers=publishers)

    return make


def land(lake: Lake, number: int, days: int) -> None:
    keys = range(number % 3, 30, 3) if number else range(30)
    lake.land(f"{number}.jsonl", [row(f"k{i:02}", day, number, number) for day in range(days) for i in keys])


def test_versions_with_storage_options(server: Server, new_lake: Callable[..., Lake]) -> None:
    lake = new_lake("delta")
    for number in range(4):
        land(lake, number, 2)
        lake.run()
        if number < 2:
            check_versions(server, lake, range(number + 1))
        if number == 2:
            lake.table.publish(to="delta", reset=True)  # it begins with a checkpoint
    check_versions(server, lake, range(2, 4))


def check_versions(server: Server, lake: Lake, versions: range) -> None:
    assert lake.table.status().publishers["delta"].snapshot == versions[-1]
    for version in versions:
        options = dict(storage_options(server))
        engine = QueryBuilder().register("t", DeltaTable(lake.settings.processed, version, storage_options=options))
        rows = pa.table(engine.execute("SELECT * FROM t ORDER BY d, k, l").read_all()).to_pylist()
        assert rows == lake.rows(version)


@pytest.mark.long
def test_requests_of_a_publish(new_lake: Callable[..., Lake]) -> None:
    calls = {}
    for publishers in ((), ("delta",)):
        lake = new_lake(*publishers)
        for number in range(2):
            land(lake, number, PARTITIONS)
            lake.table.append(host="local")
            lake.table.dedupe(host="local")
            lake.points.arm(-1, Fault.BEFORE)
            lake.table.publish()
        calls[publishers] = [call for call in lake.points.seen if not call.startswith(("queue", "landing"))]
    plain, delta = (Counter(call.split()[0] for call in found) for found in calls.values())
    print(f"{PARTITIONS} partitions, calls of a publish: {dict(plain)} without a publisher, {dict(delta)} with it")
    more = delta - plain
    assert more["create"] + more["put"] + more["delete"] <= MOST_PUTS
    assert not [call for call in calls["delta",] if call.split()[0] in ("open", "get") and ".parquet" in call]
