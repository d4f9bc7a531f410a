"""How to reach an Azure Storage account: its blobs (`storage.adls`) and its queues (`queue.azure`).

With AZURE_STORAGE_CONNECTION_STRING if it is set and belongs to the account (usually an emulator's); otherwise with what adlfs
finds: AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or DefaultAzureCredential. An address without an account means the
account of the connection string, or AZURE_STORAGE_ACCOUNT_NAME.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lakeupsert.errors import ConfigurationError
from lakeupsert.retries import AZURE_PAUSE_SECONDS, CONNECT_SECONDS, READ_SECONDS, STORE_ATTEMPTS
from lakeupsert.storage.clients import CONNECTIONS

if TYPE_CHECKING:
    from azure.core.exceptions import HttpResponseError
    from azure.core.pipeline.transport import RequestsTransport

ADDRESS = re.compile(
    r"(abfss?|az)://(?P<container>[^/@]+)(@(?P<account>[a-z0-9]+)\.(dfs|blob)\.(?P<suffix>[^/]+))?(/(?P<path>.*))?"
)
EMULATOR = "devstoreaccount1"
"""The account name of every emulator."""


def connection_string(account: str | None) -> str | None:
    """The environment's connection string, if it belongs to this account, or if ``account`` is None."""
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    return connection if connection and account in (None, _account_of(connection)) else None


def account_name() -> str | None:
    """The account for addresses without one."""
    connection = connection_string(None)
    return _account_of(connection) if connection else os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")


def place(address: str) -> str:
    """A canonical address: the same for all addresses of one place. Other addresses are returned unchanged."""
    parts = ADDRESS.fullmatch(address)
    account = parts and (parts["account"] or account_name())
    if not parts or not account:
        return address
    suffix = parts["suffix"] or "core.windows.net"
    return f"abfss://{parts['container']}@{account}.dfs.{suffix}/{parts['path'] or ''}"


def hadoop_place(address: str) -> str:
    """The address for Hadoop: `abfss://`, or `wasb://` for an emulator, which has no ABFS endpoint."""
    return re.sub(rf"^abfss://([^/]+)@{EMULATOR}\.[^/]+", rf"wasb://\1@{EMULATOR}", place(address))


def abfs_settings() -> dict[str, str]:
    """Settings that give Hadoop's ABFS the identity that the environment names, by their names after `fs.azure.account.`.

    This is a managed identity, or one with a federated token. If the environment names none, there are no settings, because a
    cluster may have its own. Never contains a secret: if the environment has one, there are no settings either.
    """
    variables = {
        "client.id": "AZURE_CLIENT_ID",
        "msi.tenant": "AZURE_TENANT_ID",
        "token.file": "AZURE_FEDERATED_TOKEN_FILE",
    }
    settings = {f"oauth2.{name}": os.environ[of] for name, of in variables.items() if os.environ.get(of)}
    if os.environ.get("AZURE_CLIENT_SECRET") or "oauth2.client.id" not in settings:
        return {}
    provider = "WorkloadIdentity" if "oauth2.token.file" in settings else "Msi"
    return {
        "auth.type": "OAuth",
        "oauth.provider.type": f"org.apache.hadoop.fs.azurebfs.oauth2.{provider}TokenProvider",
        **settings,
    }


def transport() -> "RequestsTransport":
    import requests  # comes with azure-core, which is an extra
    from azure.core.pipeline.transport import RequestsTransport
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return RequestsTransport(
        session=session, session_owner=False, connection_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS
    )


def backoff() -> dict[str, float]:
    """Arguments of the SDK's ExponentialRetry: at most `STORE_ATTEMPTS` within about eight seconds."""
    pauses = {"initial_backoff": AZURE_PAUSE_SECONDS, "increment_base": 2, "random_jitter_range": 1}
    return {**pauses, "retry_total": STORE_ATTEMPTS - 1}


def is_busy(status: int) -> bool:
    """Whether an answer means: try again later."""
    return status >= 500 or status in (408, 429)


def error_code(error: "HttpResponseError") -> str:
    """Azure's code for an error that has a response; "" if it gave none."""
    code = error.response.headers.get("x-ms-error-code") or getattr(error, "error_code", None) or ""
    return str(getattr(code, "value", code))


@contextmanager
def readable() -> Iterator[None]:
    """Raises ConfigurationError if the block can't parse the connection string. The original error may contain the key."""
    try:
        yield
    except ValueError as e:
        raise ConfigurationError(
            "bad-setting",
            "AZURE_STORAGE_CONNECTION_STRING can't be read. Nothing was done.",
            next="copy it again, as `az storage account show-connection-string` prints it",
        ) from e


def _account_of(connection: str) -> str | None:
    fields = {name.lower(): value for name, _, value in (part.partition("=") for part in connection.split(";"))}
    if "usedevelopmentstorage" in fields:
        return EMULATOR
    endpoint = fields.get("blobendpoint") or fields.get("queueendpoint") or ""
    named = re.match(r"https://([a-z0-9]+)\.", endpoint)  # a shared access signature names the account only there
    return fields.get("accountname") or (named[1] if named else None)
