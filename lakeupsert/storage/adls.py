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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from adlfs import AzureBlobFileSystem
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.storage.blob import BlobBlock, BlobProperties
from azure.storage.blob.aio import BlobClient, ContainerClient
from fsspec.asyn import sync

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.retries import AZURE_PAUSE_SECONDS, STORE_ATTEMPTS
from lakeupsert.storage import azureaccount
from lakeupsert.storage.adls_client import file_system
from lakeupsert.storage.azureaccount import ADDRESS
from lakeupsert.storage.base import (
    NOTHING,
    Call,
    NotFoundError,
    ObjectInfo,
    StoreUnavailableError,
    UnknownOutcomeError,
    last_left_out,
    not_as_listed,
    parts_of,
)
from lakeupsert.storage.clients import counted
from lakeupsert.storage.remote import (
    PROBE,
    UNTOUCHED,
    ConditionError,
    Parts,
    Piece,
    RangeError,
    RangeReader,
    ServerStore,
    unreachable,
)

if TYPE_CHECKING:
    from azure.core.pipeline.transport import AsyncHttpResponse

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


class AdlsStore(ServerStore):
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

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
        super().__init__()

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

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        listed = self._list(prefix, LISTED_AT_ONCE if limit is None else min(limit, LISTED_AT_ONCE))
        infos = (info for info in listed if not last_left_out(info.name, above))
        if limit is not None:
            return islice(infos, limit)
        return iter(sorted(infos, key=lambda info: info.name))

    def delete(self, names: Iterable[str]) -> None:
        waiting = iter(names)
        while batch := list(islice(waiting, DELETED_AT_ONCE)):
            for attempt in range(STORE_ATTEMPTS):
                if attempt:
                    clock.sleep(clock.jitter(AZURE_PAUSE_SECONDS * 2 ** (attempt - 1)))
                answers = self._delete(batch)
                failed = {n: a for n, a in zip(batch, answers, strict=True) if a.status_code not in (202, 404)}
                for name, answer in failed.items():
                    if not azureaccount.is_busy(answer.status_code):
                        reason = f"{answer.status_code} {answer.headers.get('x-ms-error-code', answer.reason)}"
                        raise self._refusal("delete_blobs", name, answer.status_code, reason)
                if not failed:
                    break
                batch = list(failed)
            else:
                raise unreachable(
                    self.uri(batch[0]), f"the server was busy in each of {STORE_ATTEMPTS} attempts to delete it"
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

    def _parts(self, name: str) -> "_Parts":
        return _Parts(self, name)

    def _create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._run(
                "create", "upload_blob", name, lambda: self._fs._pipe_file(path, data, mode="create", retry_total=0)
            )
        except ConditionError:
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
        except ConditionError as e:
            raise NotFoundError(name) from e
        except RangeError:  # any range of an empty blob, and one behind the end
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

        before = counted.set((self.requests, kind))
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
            counted.reset(before)
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
            return ConditionError(name)
        if status == 416:
            return RangeError(name)
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


class _Parts(Parts):
    """See `lakeupsert.storage.remote.Parts`: blocks of a block blob. Azure deletes uncommitted blocks after a week."""

    def __init__(self, store: AdlsStore, name: str) -> None:
        self._store, self._name = store, name
        # Azure stores blocks under the blob's name, so those of another upload must have other ids.
        self._upload = clock.new_id()[:8]

    def put(self, data: bytes) -> None:
        self._store._put(self._name, data)

    def send(self, number: int, data: bytes) -> str:
        block = base64.b64encode(f"{self._upload}{number:05}".encode()).decode()
        blob = self._store._blob(self._name)
        self._store._run("put", "stage_block", self._name, lambda: blob.stage_block(block, data, len(data)))
        return block

    def join(self, parts: list[str], size: int) -> None:
        blob, blocks = self._store._blob(self._name), [BlobBlock(part) for part in parts]
        self._store._run("put", "commit_block_list", self._name, lambda: blob.commit_block_list(blocks))


def _is_folder(blob: BlobProperties) -> bool:
    return bool(blob.metadata) and blob.metadata.get("hdi_isfolder", "").lower() == "true"


def _info(name: str, blob: BlobProperties) -> ObjectInfo:
    return ObjectInfo(name, blob.size, blob.etag.strip('"'), blob.last_modified.timestamp())
