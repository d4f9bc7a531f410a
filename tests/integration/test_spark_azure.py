"""Spark and a table on Azure: an emulator's is read through WASB, on the one port that it asks; ABFS is told who it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.engine.spark_versions import hadoop_version
from lakeupsert.storage.azureaccount import abfs_settings
from tests.harness import servers
from tests.harness.lake import Lake, row
from tests.harness.servers import Server

WASB_PORT = 10000


@pytest.fixture
def azurite_of_wasb() -> Any:
    with servers.azurite(blob_port=WASB_PORT) as server:
        yield server


def nights(lake: Lake) -> None:
    for night in range(3):
        lake.land(f"{night}.jsonl", [row(k, day, night, night) for day in range(3) for k in "abcde"[night:]])
        lake.run()


@pytest.mark.long
def test_view_with_deltas_is_read(
    azurite_of_wasb: Server, new_place: Callable[[Server], str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    servers.require(servers.HADOOP_JARS, "`make servers` gets it (Maven)")
    place = new_place(azurite_of_wasb)
    zones = {"landing": f"{place}/landing", "processed": f"{place}/lake"}
    lake = Lake(tmp_path, **zones, queue=str(tmp_path / "queue.sqlite"), strategy="delta")
    nights(lake)
    spark = request.getfixturevalue("spark")
    for where in (None, "v = 2", "d = '2020-01-02'"):
        frame = lake.table.to_spark(spark, where=where).orderBy("d", "k")
        assert [r.asDict() for r in frame.collect()] == lake.table.to_arrow(where=where).read_all().to_pylist()
    assert "wasb://" in frame._jdf.queryExecution().executedPlan().toString()


@pytest.mark.parametrize(
    ("variables", "provider", "others"),
    [
        ({"AZURE_CLIENT_ID": "me"}, "Msi", {"client.id": "me"}),
        (
            {"AZURE_CLIENT_ID": "me", "AZURE_TENANT_ID": "us", "AZURE_FEDERATED_TOKEN_FILE": "/token"},
            "WorkloadIdentity",
            {"client.id": "me", "msi.tenant": "us", "token.file": "/token"},
        ),
    ],
)
def test_abfs_is_told_who_it_is(
    variables: dict[str, str], provider: str, others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID", "FEDERATED_TOKEN_FILE"):
        monkeypatch.delenv(f"AZURE_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert abfs_settings() == {
        "auth.type": "OAuth",
        "oauth.provider.type": f"org.apache.hadoop.fs.azurebfs.oauth2.{provider}TokenProvider",
        **{f"oauth2.{name}": value for name, value in others.items()},
    }
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "secret")
    assert abfs_settings() == {}, "no secret is passed on"
    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.delenv("AZURE_CLIENT_SECRET")
    assert abfs_settings() == {}, "a cluster may have a way of its own"


def test_what_abfs_is_told_stands_in_its_jar(spark: Any) -> None:
    """Its classes and the names of its settings, as far as those are constants."""
    servers.require(servers.HADOOP_JARS, "`make servers` gets it (Maven)")
    if hadoop_version(spark).startswith("3.3."):
        pytest.skip("the Hadoop of Spark 3.5 knows no workload identity (HADOOP-18610)")
    oauth = "org.apache.hadoop.fs.azurebfs.oauth2."
    for provider in ("Msi", "WorkloadIdentity"):
        assert spark._jvm.java.lang.Class.forName(f"{oauth}{provider}TokenProvider", False, _loader(spark))
    keys = spark._jvm.java.lang.Class.forName(
        "org.apache.hadoop.fs.azurebfs.constants.ConfigurationKeys", True, _loader(spark)
    )
    known = {str(field.get(None)) for field in keys.getFields() if field.getType().getName() == "java.lang.String"}
    for name in ("auth.type", "oauth.provider.type", "oauth2.client.id", "oauth2.msi.tenant", "oauth2.token.file"):
        assert f"fs.azure.account.{name}" in known


def _loader(spark: Any) -> Any:
    return spark._jvm.Thread.currentThread().getContextClassLoader()
