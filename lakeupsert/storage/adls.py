"""A path in a container of Azure Storage (ADLS Gen2, or plain blobs) as an object store. Also supports its emulators.

Commits   `create` is one Put Blob with `If-None-Match: *`: 409 BlobAlreadyExists = the name was taken; no answer, 5xx =
          unknown. The SDK's retries are off for it, because they would find our own blob and report the race as lost.
Reads     an open blob is read by ranges with `If-Match`, so a replaced blob is detected, and versions are never mixed
Names     with a hierarchical namespace, the server lists folders like blobs; they are left out here. It sorts blobs by folder, so
          a complete listing is sorted in memory (one with a limit has the server's order).
Settings  account and credentials as in `storage.azureaccount`; encryption, redundancy and soft delete as in the account
"""

import base64
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.storage.blob import BlobBlock, BlobProperties, ContainerClient, ExponentialRetry

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
    parts_of,
)
from lakeupsert.storage.remote import (
    MULTIPART_BYTES,
    PROBE,
    UNTOUCHED,
    Conditions,
    Piece,
    RangeReader,
    Upload,
    unreachable,
)

Result = TypeVar("Result")

HEAD_BYTES = 256 << 10
"""Bytes to read when a blob is opened, with its size and etag. A small blob is then complete. (Azure can't read from the end.)"""
LISTED_AT_ONCE = 5000
DELETED_AT_ONCE = 256

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
        self._conditions = Conditions()

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
            properties = self._call("head", "get_blob_properties", name)
        except NotFoundError:
            return None
        return None if _is_folder(properties) else _info(name, properties)

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        self._conditions.prove(self._create, self.uri())
        return self._create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[Upload]:
        parts_of(name)
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
                blobs = (self._prefix + name for name in batch)
                answers = self._call("delete", "delete_blobs", None, *blobs, raise_on_any_failure=False)
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

        def read(start: int, end: int) -> bytes:
            return self._read(name, start, end - start, first.etag).data

        return pa.PythonFile(RangeReader(read, first.size, first.data, 0), "r")

    # -- how

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._call("create", "upload_blob", name, data, length=len(data), overwrite=False, retry_total=0)
        except _TakenError:
            return False
        except StoreUnavailableError as e:
            raise UnknownOutcomeError(e.message) from e
        return True

    def _list(self, prefix: str, page: int) -> Iterator[ObjectInfo]:
        query = {"name_starts_with": self._prefix + prefix, "include": ["metadata"], "results_per_page": page}
        pages = self._call("list", "list_blobs", None, **query).by_page()

        def next_page() -> list[BlobProperties] | None:
            blobs = next(pages, None)
            return None if blobs is None else list(blobs)

        # A page may be empty without being the last one.
        while (blobs := self._run("list", "list_blobs", "", next_page)) is not None:
            for blob in blobs:
                name = blob.name.removeprefix(self._prefix)
                if name and not name.endswith("/") and name != PROBE and not _is_folder(blob):
                    yield _info(name, blob)

    def _read(self, name: str, at: int | None, size: int | None, etag: str | None = None) -> Piece:
        """``size`` bytes from ``at`` on (None: the whole blob)."""
        condition = {"etag": f'"{etag}"', "match_condition": MatchConditions.IfNotModified} if etag else {}

        def read() -> Piece:
            answer = client.download_blob(offset=at, length=size, **condition)
            data = answer.readall()
            if _is_folder(answer.properties):
                raise NotFoundError(name)
            whole = int(answer.properties.content_range.rpartition("/")[2])
            return Piece(data, whole, answer.properties.etag.strip('"'))

        client = self._client().get_blob_client(self._prefix + name)
        try:
            return self._run("get", "download_blob", name, read)
        except _TakenError as e:
            raise NotFoundError(name) from e
        except _RangeError:  # any range of an empty blob, and one behind the end
            return Piece(b"", 0, "")

    def _call(self, kind: Call, operation: str, name: str | None, *arguments: object, **options: object) -> Any:
        """One operation of the SDK, on the blob ``name`` or the container. Any: each operation has its own result."""
        client = self._client()
        if name is not None:
            client = client.get_blob_client(self._prefix + name)
        return self._run(kind, operation, name or "", lambda: getattr(client, operation)(*arguments, **options))

    def _run(self, kind: Call, operation: str, name: str, call: Callable[[], Result]) -> Result:
        """The result of ``call``. Raises what `_failure` returns for the SDK's errors."""
        before = _counted.set((self.requests, kind))
        try:
            return call()
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

    def _client(self) -> ContainerClient:
        return _container(os.getpid(), azureaccount.environment(), self.container, self._account, self._suffix)

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
            next="log in (`az login`), give this machine a managed identity, or correct AZURE_STORAGE_CONNECTION_STRING",
        )


class _Parts:
    """See `lakeupsert.storage.remote.Parts`: blocks of a block blob. Azure deletes uncommitted blocks after a week."""

    def __init__(self, store: AdlsStore, name: str) -> None:
        self._store, self._name = store, name
        # Azure stores blocks under the blob's name, so those of another upload must have other ids.
        self._upload = clock.new_id()[:8]

    def put(self, data: bytes) -> None:
        self._store._call("put", "upload_blob", self._name, data, length=len(data), overwrite=True)

    def begin(self) -> None:
        pass

    def send(self, number: int, data: bytes) -> str:
        block = base64.b64encode(f"{self._upload}{number:05}".encode()).decode()
        self._store._call("put", "stage_block", self._name, block, data, length=len(data))
        return block

    def join(self, parts: list[str], size: int) -> None:
        self._store._call("put", "commit_block_list", self._name, [BlobBlock(part) for part in parts])

    def drop(self) -> None:
        pass


def _is_folder(blob: BlobProperties) -> bool:
    return bool(blob.metadata) and blob.metadata.get("hdi_isfolder", "").lower() == "true"


def _info(name: str, blob: BlobProperties) -> ObjectInfo:
    return ObjectInfo(name, blob.size, blob.etag.strip('"'), blob.last_modified.timestamp())


@lru_cache(maxsize=8)
def _container(
    process: int, environment: azureaccount.Environment, container: str, account: str | None, suffix: str | None
) -> ContainerClient:
    """A client of one container. Thread-safe.

    Kept per process, because a fork would share connections, and per environment, which holds the credentials.
    """
    options: dict[str, object] = {
        "transport": azureaccount.transport(),
        "retry_policy": ExponentialRetry(**azureaccount.backoff()),
        "raw_request_hook": _count,
        "max_single_put_size": MULTIPART_BYTES,
        "max_single_get_size": MULTIPART_BYTES,
        "max_chunk_get_size": MULTIPART_BYTES,
    }
    if connection := azureaccount.connection_string(account):
        with azureaccount.readable():
            return ContainerClient.from_connection_string(connection, container, **options)
    account = account or azureaccount.account_name()
    if not account:
        raise ConfigurationError(
            "bad-setting",
            f"az://{container} names no storage account, and neither does the environment. Nothing was changed.",
            next=f"write it as abfss://{container}@ACCOUNT.dfs.core.windows.net/path, or set AZURE_STORAGE_ACCOUNT_NAME",
        )
    url = f"https://{account}.blob.{suffix or 'core.windows.net'}"
    return ContainerClient(url, container, credential=azureaccount.credential(), **options)


def _count(request: object) -> None:
    counted, kind = _counted.get()
    counted.count(kind)
