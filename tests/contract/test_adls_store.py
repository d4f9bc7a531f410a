"""Azure Storage keeps the object store's contract on Azurite, and what only Azure can do wrong is told apart."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    adls_client,
    open_store,
    remote,
)
from lakeupsert.storage.azureaccount import EMULATOR
from lakeupsert.testing.contracts import ObjectStoreContract
from tests.harness.proxy import FaultProxy, Rule, fault_proxy, refuse
from tests.harness.servers import Server, free_port

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
    monkeypatch.setattr(adls.azureaccount, "STORE_ATTEMPTS", 2)
    monkeypatch.setenv("AZURE_TEST", "another environment has another client")


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

    @pytest.mark.long
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
        before = store.requests.as_dict()["get"]
        with store.open("a") as file:
            assert pq.ParquetFile(file, pre_buffer=True).read(columns=["c1", "c3"]).num_rows == 200_000
        assert store.requests.as_dict()["get"] - before <= 1 + 1 + 4

    @pytest.mark.parametrize("name", ["a?versionid=1", "a\nb", "a\tb", "a?b#c"])
    def test_name_that_adlfs_takes_for_another_is_refused(self, store: ObjectStore, name: str) -> None:
        with pytest.raises(ValueError, match="not an object name"):
            store.create(name, b"x")
        with pytest.raises(ValueError, match="not an object name"):
            write(store, name, b"x")
        assert list(store.list("")) == []

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


# -- what adlfs must not hide


@pytest.fixture
def proxy(azurite: Server) -> Iterator[FaultProxy]:
    with fault_proxy(azurite) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(proxy: FaultProxy, new_place: Callable[[Server], str]) -> ObjectStore:
    return open_store(f"{new_place(proxy.server)}/lake")


@pytest.mark.core
def test_create_without_an_answer_is_sent_once_and_never_guessed(through_proxy: ObjectStore, proxy: FaultProxy) -> None:
    store = through_proxy
    store.create("first", b"")  # brings the proof of conditions
    for theirs in (None, b"theirs"):
        name = f"a-{theirs is None}"
        if theirs is not None:
            write(store, name, theirs)
        proxy.log.clear()
        proxy.rules = (Rule("lose", "PUT", f"lake/{name}"),)
        with pytest.raises(UnknownOutcomeError):
            store.create(name, b"mine")
        proxy.rules = ()
        assert [event.acts for event in proxy.log if name in event.path] == [("lose",)]
        assert store.get(name) == (theirs or b"mine")


def test_every_request_is_counted_as_it_is_sent(through_proxy: ObjectStore, proxy: FaultProxy) -> None:
    """Also a repeated one. aiohttp would repeat some by itself, unseen."""
    store = through_proxy
    write(store, "a", b"x")
    calls: dict[str, Callable[[], object]] = {"get": lambda: store.get("a"), "put": lambda: write(store, "a", b"y")}
    for kind, call in calls.items():
        before = store.requests.as_dict()[kind]
        proxy.log.clear()
        proxy.rules = (Rule("lose", kind.upper(), "lake/a", times=1),)
        call()
        assert store.requests.as_dict()[kind] - before == len(proxy.log) == 2


@pytest.mark.core
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("BlobAlreadyExists", False),
        ("ContainerBeingDeleted", UnknownOutcomeError),
        ("ResourceTypeMismatch", ConfigurationError),
    ],
)
def test_conflict_is_told_by_azures_own_code(
    through_proxy: ObjectStore, proxy: FaultProxy, code: str, outcome: Any
) -> None:
    """adlfs makes FileExistsError of each. A caller that handles an error of its own must not replace what is behind it."""
    store = through_proxy
    store.create("first", b"")
    proxy.rules = (refuse(409, code, "PUT", "lake/a"),)
    try:
        raise KeyError("of the caller")
    except KeyError:
        if outcome is False:
            assert store.create("a", b"x") is False
        else:
            with pytest.raises(outcome, match=code):
                store.create("a", b"x")


def test_request_that_is_cancelled_is_no_answer(azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's `sync` returns None for it."""

    async def cancelled(*given: object, **more: object) -> None:
        raise asyncio.CancelledError

    store = open_store("az://lake/x")
    monkeypatch.setattr(adls_client._FileSystem, "_pipe_file", cancelled)
    with pytest.raises(UnknownOutcomeError, match="cancelled"):
        store.create("a", b"x")
    with pytest.raises(StoreUnavailableError, match="cancelled"):
        write(store, "a", b"x")


FORKED = """
import os, sys
from lakeupsert.storage import open_store
store = open_store(sys.argv[1])
assert store.create("parent", b"1")
pid = os.fork()
if pid:
    _, status = os.waitpid(pid, 0)
    assert store.get("child") == b"2"
    sys.exit(os.waitstatus_to_exitcode(status))
assert store.get("parent") == b"1"
assert store.create("child", b"2")
assert not store.create("parent", b"2")
"""


def test_forked_child_has_a_client_of_its_own_and_ends(azure: Server, new_place: Callable[[Server], str]) -> None:
    """Both end as programs do, with what is to be done at exit: adlfs would wait there for a thread that a fork does not copy."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, f"{new_place(azure)}/lake"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- accounts and credentials


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_connection_string_of_another_account_is_not_used(azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    mine, other = adls_client.file_system(None, None), adls_client.file_system("other", "core.chinacloudapi.cn")
    assert mine.service_client.url.startswith(azure.url)
    assert other.service_client.url == "https://other.blob.core.chinacloudapi.cn/"
    assert other.service_client.credential.account_name == "other"


@pytest.mark.usefixtures("no_connection")
def test_queue_has_the_credentials_that_adlfs_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(adls_client.credential("sales")).__name__ == "DefaultAzureCredential"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=2")
    assert adls_client.credential("sales") == "?sv=1&sig=2"
    assert adls_client.file_system("sales", None).service_client.url.endswith("?sv=1&sig=2")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert adls_client.credential("sales") == "a2V5"


@pytest.mark.parametrize(
    ("connection", "code"), [("secret", "bad-setting"), ("AccountName=a;AccountKey=secret!!!", "bad-credentials")]
)
def test_connection_string_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, connection: str, code: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    with pytest.raises(ConfigurationError, match="AZURE_STORAGE_") as raised:
        open_store("az://lake/x").get("a")
    assert raised.value.code == code
    assert "secret" not in str(raised.value)


@pytest.mark.long
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


@pytest.mark.usefixtures("no_connection")
def test_address_without_an_account_is_refused_where_the_environment_names_none() -> None:
    with pytest.raises(ConfigurationError, match="No storage account is named"):
        open_store("az://lake/x").get("a")
