"""adlfs for an account, with a client that counts its requests, repeats them within seconds, and never repeats a create."""

import os
import weakref
from typing import TYPE_CHECKING

import aiohttp
from adlfs import AzureBlobFileSystem
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobServiceClient, ExponentialRetry

from lakeupsert.errors import ConfigurationError
from lakeupsert.retries import CONNECT_SECONDS, READ_SECONDS
from lakeupsert.storage import azureaccount
from lakeupsert.storage.clients import count, kept
from lakeupsert.storage.remote import MULTIPART_BYTES, ServerClock

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.core.pipeline.transport import AsyncHttpResponse, HttpRequest


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
        """adlfs would take the environment's for every account."""
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
            transport=_Transport(self.clock, connection_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS),
            retry_policy=ExponentialRetry(**azureaccount.backoff()),
            raw_request_hook=count,
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


@kept("AZURE_", 8)
def file_system(account: str | None, suffix: str | None) -> AzureBlobFileSystem:
    """adlfs for an account (None: the environment's). Thread-safe. Raises ConfigurationError if no account is named."""
    made = _FileSystem(account, suffix)
    _made.add(made)
    return made


def credential(account: str) -> "TokenCredential | str | None":
    """An identity, a key or a shared access signature, as adlfs found it for an account; None for a connection string."""
    found = file_system(account, None)
    return found.sync_credential or found.account_key or found.sas_token


_made: "weakref.WeakSet[_FileSystem]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closing a client at exit is the parent's. The child has no thread for the parent's event loop and would wait for ever."""
    for made in _made:
        for reference in weakref.getweakrefs(made):
            if isinstance(reference.__callback__, weakref.finalize):
                reference.__callback__.detach()


os.register_at_fork(after_in_child=_leave_to_parent)
