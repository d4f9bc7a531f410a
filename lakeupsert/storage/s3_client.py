"""boto3's client for S3, and what other programs need to reach S3 as it does."""

from urllib.parse import urlsplit

import boto3
from botocore.client import BaseClient
from botocore.config import Config

from lakeupsert.retries import CONNECT_SECONDS, READ_SECONDS
from lakeupsert.storage.clients import CONNECTIONS, count, kept
from lakeupsert.storage.remote import Pace


def s3a_settings() -> dict[str, str]:
    """Settings with which Hadoop's S3A reaches S3 as boto3 does here, by the last part of their names.

    Never contains a secret: S3A finds credentials by itself, but looks for profiles and web identities only if a setting says so.
    """
    client = client_here()
    settings: dict[str, str] = {}
    if client.meta.region_name not in (None, "aws-global"):
        settings["endpoint.region"] = client.meta.region_name
    if not is_amazons(client.meta.endpoint_url):
        settings["endpoint"] = client.meta.endpoint_url
    if (client.meta.config.s3 or {}).get("addressing_style") == "path":
        settings["path.style.access"] = "true"
    credentials = _session().get_credentials()
    if credentials is not None and credentials.method not in ("env", "container-role", "iam-role"):
        settings["aws.credentials.provider"] = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    return settings


@kept("AWS_", 4)
def _session() -> boto3.Session:
    return boto3.Session()


@kept("AWS_", 4)
def client_here() -> BaseClient:
    """The client of this process and its environment, which never repeats a request. Thread-safe."""

    def client(style: dict[str, str]) -> BaseClient:
        return _session().client(
            "s3",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=CONNECTIONS,
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                s3=style,
            ),
        )

    made = client({})
    style = made.meta.config.s3 or {}
    if "addressing_style" not in style and not is_amazons(made.meta.endpoint_url):
        made = client({"addressing_style": "path"})  # few other servers have an address for bucket.host
    made.meta.events.register("before-send.s3", count)
    return made


@kept("AWS_", 16)
def pace_of(bucket: str) -> Pace:
    """The rate of this process for a bucket.

    S3 limits each prefix, and splits a table's prefix as its load grows. Where, it does not say, so a bucket has one rate.
    """
    return Pace()


def is_amazons(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
