"""Azure Storage keeps the object store's contract on Azurite, and what only Azure can do wrong is told apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.storage.blob import BlobServiceClient

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import (
    NotFoundError,
    ObjectStore,
    StoreUnavailableError,
    UnknownOutcomeError,
    adls,
    open_store,
    remote,
)
from lakeupsert.storage.azureaccount import EMULATOR
from lakeupsert.testing.contracts import ObjectStoreContract
from lakeupsert.testing.servers import Server, free_port

VERBS: dict[str, Callable[[ObjectStore], Any]] = {
    "get": lambda store: store.get("a"),
    "head": lambda store: store.head("a"),
    "open": lambda store: store.open("a"),
    "list": lambda store: list(store.list("")),
    "write": lambda store: write(store, "b", b"two"),
    "delete": lambda store: store.delete(["a"]),
}


def write(store: ObjectStore, name: str, data: bytes) -> None:
    with store.write(name) as sink:
        sink.write(data)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(remote, "MULTIPART_BYTES", 2 << 20)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pause of the SDK instead of three."""
    monkeypatch.setattr(adls.azureaccount, "ATTEMPTS", 2)
    adls._file_system.cache_clear()


class TestAdlsStore(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def on_server(self, azure: Server, new_place: Callable[[Server], str]) -> None:
        self.container = new_place(azure).removeprefix("az://")

    def new_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"abfss://{self.container}@{EMULATOR}.dfs.core.windows.net/lake")

    def client(self) -> Any:
        import os

        service = BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
        return service.get_container_client(self.container)

    @pytest.mark.parametrize("scheme", ["az", "abfs"])
    def test_schemes_are_one_store(self, store: ObjectStore, scheme: str) -> None:
        store.create("a", b"x")
        assert open_store(f"{scheme}://{self.container}/lake/").get("a") == b"x"

    def test_address_is_the_one_that_spark_takes(self, store: ObjectStore) -> None:
        account = f"{self.container}@{EMULATOR}.dfs.core.windows.net"
        assert store.uri("a") == f"abfss://{account}/lake/a"
        assert open_store(f"abfs://{account}/lake").uri() == f"abfss://{account}/lake"

    def test_container_itself_is_a_store(self, store: ObjectStore) -> None:
        store.create("a", b"x")
        assert [found.name for found in open_store(f"az://{self.container}").list("lake/a")] == ["lake/a"]

    def test_more_than_a_page_is_listed_and_deleted(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adls, "LISTED_AT_ONCE", 100)
        names = [f"n/{number:03}" for number in range(260)]
        for name in names:
            self.client().upload_blob(f"lake/{name}", b"")
        assert [found.name for found in store.list("n/")] == names
        store.delete(names)
        assert list(store.list("")) == []
        assert store.requests.as_dict() == {"get": 0, "head": 0, "list": 4, "put": 0, "create": 0, "delete": 2}

    def test_folder_of_a_hierarchical_namespace_is_no_object(self, store: ObjectStore) -> None:
        for name in ("lake", "lake/folder"):
            self.client().upload_blob(name, b"", metadata={"hdi_isfolder": "true"})
        self.client().upload_blob("lake/marker/", b"")
        store.create("folder/a", b"")
        assert [found.name for found in store.list("")] == ["folder/a"]
        assert [found.name for found in store.list("", limit=1)] == ["folder/a"]
        assert store.head("folder") is None
        with pytest.raises(NotFoundError):
            store.get("folder")
        with pytest.raises(NotFoundError):
            store.open("folder")

    def test_object_that_is_replaced_while_it_is_read_is_noticed(self, store: ObjectStore) -> None:
        data = np.random.default_rng(1).bytes(3 * adls.HEAD_BYTES)
        write(store, "a", data)
        with store.open("a") as file:
            assert file.read(10) == data[:10]
            write(store, "a", data[::-1])
            file.seek(2 * adls.HEAD_BYTES)
            with pytest.raises(NotFoundError):
                file.read(10)

    def test_reads_across_what_came_with_the_opening_are_whole(self, store: ObjectStore) -> None:
        data = np.random.default_rng(1).bytes(3 * adls.HEAD_BYTES)
        write(store, "a", data)
        with store.open("a") as file:
            assert file.size() == len(data)
            file.seek(adls.HEAD_BYTES - 5)
            assert file.read(10) == data[adls.HEAD_BYTES - 5 :][:10]
            file.seek(-7, 2)
            assert file.read() == data[-7:]

    def test_blocks_are_the_object_that_was_written(self, store: ObjectStore, small_parts: None) -> None:
        data = np.random.default_rng(1).bytes(9 << 20)
        with store.write("a") as sink:
            for start in range(0, len(data), 700_000):
                sink.write(data[start : start + 700_000])
            assert store.head("a") is None
            assert list(store.list("")) == []
        assert store.get("a") == data
        assert store.requests.as_dict()["put"] == 9 + 1

    def test_blocks_of_a_failed_block_are_no_object(self, store: ObjectStore, small_parts: None) -> None:
        def fail() -> None:
            with store.write("a") as sink:
                sink.write(bytes(9 << 20))
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            fail()
        assert store.head("a") is None
        assert list(store.list("")) == []
        write(store, "a", b"x")
        assert store.get("a") == b"x"

    def test_parquet_is_read_by_few_requests(self, store: ObjectStore) -> None:
        table = pa.table({f"c{i}": np.random.default_rng(i).random(200_000) for i in range(5)})
        with store.write("a") as sink:
            pq.write_table(table, sink, row_group_size=100_000)
        with store.open("a") as file:
            assert pq.ParquetFile(file, pre_buffer=True).read(columns=["c1", "c3"]).num_rows == 200_000
        assert store.requests.as_dict()["get"] <= 1 + 1 + 4

    def test_missing_container_is_named(self, store: ObjectStore) -> None:
        absent = open_store(f"az://{self.container}-absent/lake")
        for verb in ("get", "open", "list", "write"):  # of a batch of deletes each says that its blob is not there
            with pytest.raises(ConfigurationError, match=f"{self.container}-absent") as raised:
                VERBS[verb](absent)
            assert raised.value.code == "no-container"
        with pytest.raises(ConfigurationError, match=f"{self.container}-absent"):
            absent.create("a", b"")

    def test_wrong_key_is_told(self, store: ObjectStore, azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        store.create("a", b"x")
        given = azure.env["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", given.replace("AccountKey=E", "AccountKey=F"))
        for verb in ("get", "open", "list", "write", "delete"):
            with pytest.raises(ConfigurationError) as raised:
                VERBS[verb](store)
            # Azurite's word for a wrong signature is Azure's for a firewall or a missing role.
            assert raised.value.code == "not-permitted"
            assert "correct its credentials" in raised.value.next


def test_nobody_listens(azure: Server, monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    given = azure.env["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", given.replace(str(azure.port), str(free_port())))
    store = open_store("az://lake/x")
    for verb, call in VERBS.items():
        with pytest.raises(StoreUnavailableError, match="untouched") as raised:
            call(store)
        assert raised.value.code == "store-unreachable", verb
    with pytest.raises(UnknownOutcomeError):
        store.create("a", b"x")


@pytest.mark.parametrize("address", ["abfss://@account.dfs.core.windows.net/x", "abfss:///x", "az://"])
def test_address_without_a_container_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="container"):
        open_store(address)


def test_address_without_an_account_is_refused_where_the_environment_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="names no storage account"):
        open_store("az://lake/x").get("a")
