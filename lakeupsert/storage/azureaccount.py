"""How this machine reaches an account of Azure Storage: its blobs (`storage.adls`) and its queues (`queue.azure`).

By AZURE_STORAGE_CONNECTION_STRING, if that is set and is the account's, which is mostly an emulator's; otherwise by
DefaultAzureCredential. An address that names no account means that of the connection string, or AZURE_STORAGE_ACCOUNT_NAME.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lakeupsert.errors import ConfigurationError

ADDRESS = re.compile(
    r"(abfss?|az)://(?P<container>[^/@]+)(@(?P<account>[a-z0-9]+)\.(dfs|blob)\.(?P<suffix>[^/]+))?(/(?P<path>.*))?"
)
CONNECTIONS = 64
"""Of a client, at once; a thread beyond them still works, on a connection that is not kept."""
EMULATOR = "devstoreaccount1"
"""The account of every emulator."""
ATTEMPTS = 4
"""Of a request that may be repeated, with the SDK's exponential pauses."""

Environment = tuple[tuple[str, str], ...]


def environment() -> Environment:
    """What clients depend on, to tell whether one that is kept is still the right one."""
    return tuple((name, value) for name, value in sorted(os.environ.items()) if name.startswith("AZURE_"))


def connection_string(account: str | None) -> str | None:
    """The environment's, where it is of this account, or the account is not named."""
    given = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    return given if given and account in (None, _account_of(given)) else None


def account_name() -> str | None:
    """The account of addresses that name none."""
    given = connection_string(None)
    return _account_of(given) if given else os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")


def place(address: str) -> str:
    """One of several addresses of the same place; what is none stays as it is."""
    parts = ADDRESS.fullmatch(address)
    account = parts and (parts["account"] or account_name())
    if not parts or not account:
        return address
    suffix = parts["suffix"] or "core.windows.net"
    return f"abfss://{parts['container']}@{account}.dfs.{suffix}/{parts['path'] or ''}"


def hadoop_place(address: str) -> str:
    """What Hadoop calls it: ABFS's address, but of an emulator, which has no endpoint for ABFS, that of the driver before it."""
    return re.sub(rf"^abfss://([^/]+)@{EMULATOR}\.[^/]+", rf"wasb://\1@{EMULATOR}", place(address))


def abfs_settings() -> dict[str, str]:
    """What Hadoop's ABFS has to be told to be whom the environment names, by its settings' names after `fs.azure.account.`.

    A managed identity, or one with a federated token; nothing where the environment names none, as a cluster may have a way of
    its own. Never a secret: where the environment has one, nothing is told.
    """
    variables = {
        "client.id": "AZURE_CLIENT_ID",
        "msi.tenant": "AZURE_TENANT_ID",
        "token.file": "AZURE_FEDERATED_TOKEN_FILE",
    }
    found = {f"oauth2.{name}": os.environ[of] for name, of in variables.items() if os.environ.get(of)}
    if os.environ.get("AZURE_CLIENT_SECRET") or "oauth2.client.id" not in found:
        return {}
    provider = "WorkloadIdentity" if "oauth2.token.file" in found else "Msi"
    return {
        "auth.type": "OAuth",
        "oauth.provider.type": f"org.apache.hadoop.fs.azurebfs.oauth2.{provider}TokenProvider",
        **found,
    }


def transport() -> Any:
    import requests  # comes with azure-core, and both are an extra
    from azure.core.pipeline.transport import RequestsTransport
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return RequestsTransport(session=session, session_owner=False, connection_timeout=5, read_timeout=30)


def backoff() -> dict[str, Any]:
    """Of the SDK's ExponentialRetry: at most `ATTEMPTS`, in about eight seconds."""
    return {"initial_backoff": 0.2, "increment_base": 2, "random_jitter_range": 1, "retry_total": ATTEMPTS - 1}


def is_busy(status: int) -> bool:
    """Whether an answer means: later."""
    return status >= 500 or status in (408, 429)


def error_code(error: Any) -> str:
    """Azure's word for what was wrong with a request, of an HttpResponseError that has a response; "" where it said none."""
    found = error.response.headers.get("x-ms-error-code") or getattr(error, "error_code", None) or ""
    return str(getattr(found, "value", found))


@contextmanager
def readable() -> Iterator[None]:
    """Raises ConfigurationError where the block can't read the connection string; its own words may hold the key."""
    try:
        yield
    except ValueError as e:
        raise ConfigurationError(
            "bad-setting",
            "AZURE_STORAGE_CONNECTION_STRING can't be read. Nothing was done.",
            next="copy it again, as `az storage account show-connection-string` prints it",
        ) from e


def credential() -> Any:
    return _credential(os.getpid(), environment())


def _account_of(connection: str) -> str | None:
    fields = {name.lower(): value for name, _, value in (part.partition("=") for part in connection.split(";"))}
    if "usedevelopmentstorage" in fields:
        return EMULATOR
    endpoint = fields.get("blobendpoint") or fields.get("queueendpoint") or ""
    named = re.match(r"https://([a-z0-9]+)\.", endpoint)  # with a shared access signature it is named there alone
    return fields.get("accountname") or (named[1] if named else None)


@lru_cache(maxsize=4)
def _credential(process: int, environment: Environment) -> Any:
    from azure.identity import DefaultAzureCredential  # half a second, and an emulator needs none

    return DefaultAzureCredential()
