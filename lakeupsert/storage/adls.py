"""A path in a container of Azure Storage (ADLS Gen2, or plain blobs) as an object store. Also supports its emulators.

Library   adlfs, the file system of fsspec: its credentials, event loop, client and puts. What it can't promise (a condition on a
          read, an etag, a listing without cache, each answer to a delete) is asked of its client, `service_client`.
Commits   `create` is one Put Blob with `If-None-Match: *`: 409 BlobAlreadyExists = the name was taken; no answer, 5xx =
          unknown. The SDK's retries are off for it, and aiohttp's for all, because they would find our own blob and report the
          race as lost.
Reads     an open blob is read by ranges with `If-Match`, so a replaced blob is detected, and versions are never mixed
Names     with a hierarchical namespace, the server lists folders like blobs; they are left out here. It sorts blobs by folder, so
          a complete listing is sorted in memory (one with a limit has the server's order).
Settings  account and credentials as in `storage.azureaccount`; encryption, redundancy and soft delete as in the account
"""

import base64
import os
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import aiohttp
import pyarrow as pa
from adlfs import AzureBlobFileSystem
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob import BlobBlock, BlobProperties
from azure.storage.blob.aio import BlobClient, BlobServiceClient, ContainerClient, ExponentialRetry
from fsspec.asyn import sync

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.storage import azureaccount
from lakeupsert.storage.azureaccount import ADDRESS, ATTEMPTS
from lakeupsert.storage.base import (
    Call,
    NotFoundError,
    ObjectInfo,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
    not_as_listed,
    parts_of,
)
from lakeupsert.storage.remote import (
    MULTIPART_BYTES,
    PROBE,
    UNTOUCHED,
    Conditions,
    Piece,
    RangeReader,
    ServerClock,
    Upload,
    unreachable,
)

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.core.pipeline.transport import AsyncHttpResponse, HttpRequest

Result = TypeVar("Result")

HEAD_BYTES = 256 << 10
"""Bytes to read when a blob is opened, with its size and etag. A small blob is then complete. (Azure can't read from the end.)"""
LISTED_AT_ONCE = 5000
DELETED_AT_ONCE = 256

_AZURES = (
    ".core.windows.net",
    ".core.chinacloudapi.cn",
    ".core.usgovcloudapi.net",
    ".storage.azure.net",
    ".fabric.microsoft.com",
)
"""Hosts of Microsoft's own storage. Others are emulators."""
_TAKEN = {"BlobAlreadyExists", "ConditionNotMet", "PathAlreadyExists", "UnauthorizedBlobOverwrite"}
_counted: ContextVar[tuple[Requests, Call]] = ContextVar("_counted")
"""Where and how to count this thread's requests. Clients are shared, and send retries by themselves."""


class _TakenError(Exception):
    """The blob exists (create), or was replaced (read)."""


class _RangeError(Exception):
    """The range is behind the end of the blob."""


class AdlsStore:
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    pinned = True

    def __init__(self, address: str) -> None:
        """``address``: `abfss://container@account.dfs.core.windows.net/path`, or `az://container/path`; `abfs` as `abfss`."""
        parts = ADDRESS.fullmatch(address)
        if parts is None:
            raise ConfigurationError(
                "bad-setting",
                f"{address} is not the address of a container and path.",
                next="write it as abfss://container@account.dfs.core.windows.net/path, or az://container/path",
            )
        self.container = parts["container"]
        self._account, self._suffix = parts["account"], parts["suffix"]
        self._prefix = f"{(parts['path'] or '').strip('/')}/".lstrip("/")
        self.requests = Requests()
        self._conditions = Conditions(self._server)

    def __repr__(self) -> str:
        return f"AdlsStore({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        account = f"@{self._account}.dfs.{self._suffix}" if self._account else ""
        return f"{'abfss' if account else 'az'}://{self.container}{account}/{self._prefix}{name}".rstrip("/")

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        parts_of(name)  # may come from a message; `open` also reads landing files, with names like a//b
        return self._read(name, *(part or (None, None))).data

    def head(self, name: str) -> ObjectInfo | None:
        try:
            properties = self._run("head", "get_blob_properties", name, self._blob(name).get_blob_properties)
        except NotFoundError:
            return None
        return None if _is_folder(properties) else _info(name, properties)

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        self._conditions.prove(self, self._create, self._others_endpoint)
        return self._create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[Upload]:
        parts_of(name)
        self._conditions.prove_before_write(self, self._create, self._others_endpoint)
        upload = Upload(_Parts(self, name))
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.stop(abort=True)
            raise
        upload.stop(abort=False)

    def list(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        infos = self._list(prefix, LISTED_AT_ONCE if limit is None else min(limit, LISTED_AT_ONCE))
        if limit is not None:
            return islice(infos, limit)
        return iter(sorted(infos, key=lambda info: info.name))

    def delete(self, names: Iterable[str]) -> None:
        waiting = iter(names)
        while batch := list(islice(waiting, DELETED_AT_ONCE)):
            for attempt in range(ATTEMPTS):
                answers = self._delete(batch)
                failed = {n: a for n, a in zip(batch, answers, strict=True) if a.status_code not in (202, 404)}
                for name, answer in failed.items():
                    if not azureaccount.is_busy(answer.status_code):
                        reason = f"{answer.status_code} {answer.headers.get('x-ms-error-code', answer.reason)}"
                        raise self._refusal("delete_blobs", name, answer.status_code, reason)
                if not failed:
                    break
                batch = list(failed)
                clock.sleep(clock.jitter(0.2 * 2**attempt))
            else:
                raise unreachable(
                    self.uri(batch[0]), f"the server was busy in each of {ATTEMPTS} attempts to delete it"
                )

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        first = self._read(name, 0, HEAD_BYTES, etag)
        if not first.data:  # the answer for an empty blob has no etag
            info = self.head(name)
            if info is None or etag not in (None, info.etag):
                raise NotFoundError(name)
            if info.size:
                raise not_as_listed(self, info, "opened, it is empty")

        def read(start: int, end: int) -> bytes:
            return self._read(name, start, end - start, first.etag).data

        opened = ObjectInfo(name, first.size, first.etag, 0.0)
        return pa.PythonFile(RangeReader(self, opened, read, first.data), "r")

    def _server(self) -> str:
        return str(self._fs.clock.server)

    def clock_ahead(self) -> float | None:
        ahead: float | None = self._fs.clock.ahead
        return ahead

    # -- how

    def _create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._run(
                "create", "upload_blob", name, lambda: self._fs._pipe_file(path, data, mode="create", retry_total=0)
            )
        except _TakenError:
            return False
        except StoreUnavailableError as e:
            raise UnknownOutcomeError(e.message) from e
        return True

    def _put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._run("put", "upload_blob", name, lambda: self._fs._pipe_file(path, data))

    def _delete(self, names: Iterable[str]) -> "Sequence[AsyncHttpResponse]":
        """Azure's answer for each blob."""

        async def delete() -> "Sequence[AsyncHttpResponse]":
            blobs = (self._prefix + name for name in names)
            answers = await self._container.delete_blobs(*blobs, raise_on_any_failure=False)
            return [answer async for answer in answers]

        return self._run("delete", "delete_blobs", "", delete)

    def _list(self, prefix: str, page: int) -> Iterator[ObjectInfo]:
        query = {"name_starts_with": self._prefix + prefix, "include": ["metadata"], "results_per_page": page}
        pages = self._container.list_blobs(**query).by_page()

        async def next_page() -> Sequence[BlobProperties] | None:
            blobs = await anext(pages, None)
            return None if blobs is None else [blob async for blob in blobs]

        # A page may be empty without being the last one.
        while (blobs := self._run("list", "list_blobs", "", next_page)) is not None:
            for blob in blobs:
                name = blob.name.removeprefix(self._prefix)
                if name and not name.endswith("/") and not name.startswith(PROBE) and not _is_folder(blob):
                    yield _info(name, blob)

    def _read(self, name: str, at: int | None, size: int | None, etag: str | None = None) -> Piece:
        """``size`` bytes from ``at`` on (None: the whole blob)."""
        condition = {"etag": f'"{etag}"', "match_condition": MatchConditions.IfNotModified} if etag else {}
        blob = self._blob(name)

        async def read() -> Piece:
            answer = await blob.download_blob(offset=at, length=size, **condition)
            data = await answer.readall()
            if _is_folder(answer.properties):
                raise NotFoundError(name)
            whole = int(answer.properties.content_range.rpartition("/")[2])
            return Piece(data, whole, answer.properties.etag.strip('"'))

        try:
            return self._run("get", "download_blob", name, read)
        except _TakenError as e:
            raise NotFoundError(name) from e
        except _RangeError:  # any range of an empty blob, and one behind the end
            return Piece(b"", 0, "")

    @property
    def _others_endpoint(self) -> str | None:
        parts = urlsplit(self._fs.service_client.url)
        return None if (parts.hostname or "").endswith(_AZURES) else f"{parts.scheme}://{parts.netloc}"

    @property
    def _fs(self) -> AzureBlobFileSystem:
        return file_system(self._account, self._suffix)

    @property
    def _container(self) -> ContainerClient:
        return self._fs.service_client.get_container_client(self.container)

    def _blob(self, name: str) -> BlobClient:
        return self._fs.service_client.get_blob_client(self.container, self._prefix + name)

    def _path(self, name: str) -> str:
        """The path of a blob, for adlfs. Raises ValueError if adlfs would take it for that of another blob."""
        path = f"{self.container}/{self._prefix}{name}"
        if self._fs.split_path(path) != (self.container, self._prefix + name, None):
            raise ValueError(f"not an object name: {name!r}")  # adlfs drops line breaks, tabs and `?versionid=`
        return path

    def _run(self, kind: Call, operation: str, name: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """The result of ``call`` in adlfs's event loop. Raises what `_failure` returns for the SDK's errors."""

        async def answer() -> tuple[Result]:
            try:
                return (await call(),)
            except FileExistsError as e:  # adlfs's word for every conflict; what Azure said is behind it
                raise e.__context__ or e from None

        before = _counted.set((self.requests, kind))
        try:
            answered: tuple[Result] | None = sync(self._fs.loop, answer)
        except HttpResponseError as e:
            if e.response is not None:
                raise self._failure(e, kind, operation, name) from e
            if isinstance(e, ClientAuthenticationError):  # before anything was sent
                raise self._no_credentials(name, operation, e.message) from e
            raise unreachable(self.uri(name), f"{operation} got no complete answer: {e.message}") from e
        except (AzureError, OSError, ValueError) as e:
            raise unreachable(self.uri(name), f"{operation} got no answer from Azure Storage: {e}") from e
        finally:
            _counted.reset(before)
        if answered is None:  # fsspec's answer for a request that was cancelled, for example while the process ends
            raise unreachable(self.uri(name), f"{operation} was cancelled")
        return answered[0]

    def _failure(self, error: HttpResponseError, kind: Call, operation: str, name: str) -> Exception:
        """The error by what the operator does next, or one that the caller handles."""
        status, code = error.status_code or 0, azureaccount.error_code(error)
        message = (error.message or "").partition("\n")[0]
        if not code and "x-ms-request-id" not in error.response.headers:
            what = f"{operation} was answered {status} by something that is not Azure Storage; is a proxy or a web server there?"
            return unreachable(self.uri(name), what)
        if kind in ("create", "get") and (status == 412 or code in _TAKEN):
            return _TakenError(name)
        if status == 416:
            return _RangeError(name)
        if code in ("ContainerNotFound", "FilesystemNotFound"):
            return ConfigurationError(
                "no-container",
                f"There is no container {self.container!r} for {self.uri(name)} ({operation}). {UNTOUCHED}",
                next="create it, or correct its name or the account's",
            )
        if status == 404:
            return NotFoundError(name)
        if azureaccount.is_busy(status) or code == "ContainerBeingDeleted":
            return unreachable(self.uri(name), f"{operation} was answered {status} {code}: {message}")
        return self._refusal(operation, name, status, f"{status} {code} {message}".strip(), code)

    def _refusal(self, operation: str, name: str, status: int, reason: str, code: str = "") -> LakeupsertError:
        what = f"{operation} of {self.uri(name)} was refused: {reason}. {UNTOUCHED}"
        if status == 401 or code in (
            "AuthenticationFailed",
            "InvalidAuthenticationInfo",
            "NoAuthenticationInformation",
        ):
            return self._no_credentials(name, operation, reason)
        if status == 403:
            return ConfigurationError(
                "not-permitted",
                f"Not permitted: {what}",
                next=f"give this identity the role `Storage Blob Data Contributor` on container {self.container!r}, let this "
                "machine through the account's firewall, or correct its credentials",
            )
        return ConfigurationError(
            "azure-refused",
            what,
            next="correct what the message names: account, container, endpoint, this machine's clock, or a feature of the "
            "account",
        )

    def _no_credentials(self, name: str, operation: str, reason: str) -> LakeupsertError:
        return ConfigurationError(
            "bad-credentials",
            f"{operation} of {self.uri(name)} found no valid credentials: {' '.join(reason.split())} {UNTOUCHED}",
            next="log in (`az login`), give this machine a managed identity, or correct the AZURE_STORAGE_… variable in use",
        )


class _Parts:
    """See `lakeupsert.storage.remote.Parts`: blocks of a block blob. Azure deletes uncommitted blocks after a week."""

    def __init__(self, store: AdlsStore, name: str) -> None:
        self._store, self._name = store, name
        # Azure stores blocks under the blob's name, so those of another upload must have other ids.
        self._upload = clock.new_id()[:8]

    def put(self, data: bytes) -> None:
        self._store._put(self._name, data)

    def begin(self) -> None:
        pass

    def send(self, number: int, data: bytes) -> str:
        block = base64.b64encode(f"{self._upload}{number:05}".encode()).decode()
        blob = self._store._blob(self._name)
        self._store._run("put", "stage_block", self._name, lambda: blob.stage_block(block, data, len(data)))
        return block

    def join(self, parts: list[str], size: int) -> None:
        blob, blocks = self._store._blob(self._name), [BlobBlock(part) for part in parts]
        self._store._run("put", "commit_block_list", self._name, lambda: blob.commit_block_list(blocks))

    def drop(self) -> None:
        pass


def _is_folder(blob: BlobProperties) -> bool:
    return bool(blob.metadata) and blob.metadata.get("hdi_isfolder", "").lower() == "true"


def _info(name: str, blob: BlobProperties) -> ObjectInfo:
    return ObjectInfo(name, blob.size, blob.etag.strip('"'), blob.last_modified.timestamp())


class _FileSystem(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs has no types
    """adlfs for one account, with a client that counts its requests and repeats them within seconds."""

    cachable = False  # fsspec would keep one for each thread
    service_client: BlobServiceClient

    def __init__(self, account: str | None, suffix: str | None) -> None:
        self.clock = ServerClock()
        self._account = account
        account = account or azureaccount.account_name()
        if not account and not self.connection_string:
            raise ConfigurationError(
                "bad-setting",
                "No storage account is named in the address or in the environment. Nothing was changed.",
                next="write it as abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/path, or set AZURE_STORAGE_ACCOUNT_NAME",
            )
        host = account and f"{account}.blob.{suffix or 'core.windows.net'}"
        super().__init__(account_name=account, account_host=host, use_listings_cache=False)

    @property
    def connection_string(self) -> str | None:
        """adlfs would take that of the environment for every account."""
        return azureaccount.connection_string(self._account)

    @connection_string.setter
    def connection_string(self, value: str | None) -> None:
        pass

    def do_connect(self) -> None:
        with azureaccount.readable():
            super().do_connect()
        found = self.service_client
        # adlfs has no way to set these. The address and the credential that it found stay.
        self.service_client = BlobServiceClient(
            found.url,
            credential=found.credential,
            transport=_Transport(
                self.clock, connection_timeout=azureaccount.CONNECTION_SECONDS, read_timeout=azureaccount.READ_SECONDS
            ),
            retry_policy=ExponentialRetry(**azureaccount.backoff()),
            raw_request_hook=_count,
            max_single_put_size=MULTIPART_BYTES,
            max_single_get_size=MULTIPART_BYTES,
            max_chunk_get_size=MULTIPART_BYTES,
        )


class _Transport(AioHttpTransport):  # type: ignore[misc]
    """aiohttp as Azure's library uses it, but each request is sent once: aiohttp would repeat a PUT after a lost connection, and
    a create would then find its own blob."""

    def __init__(self, server: ServerClock, **options: float) -> None:
        super().__init__(**options)
        self._server = server

    async def send(self, request: "HttpRequest", **options: object) -> "AsyncHttpResponse":
        answer = await super().send(request, middlewares=(_send_once,), **options)
        self._server.note({name.lower(): value for name, value in answer.headers.items()})
        return answer


async def _send_once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as e:
        raise aiohttp.ClientConnectionError(str(e)) from e  # aiohttp repeats after the other two


def file_system(account: str | None, suffix: str | None = None) -> AzureBlobFileSystem:
    """adlfs for an account (None: the environment's). Thread-safe. Raises ConfigurationError if no account is named."""
    return _file_system(os.getpid(), azureaccount.environment(), account, suffix)


def credential(account: str) -> "TokenCredential | str | None":
    """What adlfs found for an account besides a connection string: an identity, a key or a shared access signature."""
    found = file_system(account)
    return found.sync_credential or found.account_key or found.sas_token


@lru_cache(maxsize=8)
def _file_system(
    process: int, environment: azureaccount.Environment, account: str | None, suffix: str | None
) -> AzureBlobFileSystem:
    """Kept per process, because a fork would share connections, and per environment, which holds the credentials."""
    made = _FileSystem(account, suffix)
    _made.add(made)
    return made


_made: "weakref.WeakSet[_FileSystem]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closing a client at exit is the parent's. The child has no thread for the parent's event loop and would wait for ever."""
    for made in _made:
        for reference in weakref.getweakrefs(made):
            if isinstance(reference.__callback__, weakref.finalize):
                reference.__callback__.detach()


os.register_at_fork(after_in_child=_leave_to_parent)


def _count(request: object) -> None:
    counted, kind = _counted.get()
    counted.count(kind)
