"""boto3's client for S3, and what other programs need to reach S3 as it does."""

from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.client import BaseClient
from botocore.config import Config
from botocore.utils import parse_timestamp

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
    core = botocore.session.get_session()
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    return boto3.Session(botocore_session=core)


def _timestamp(value: str | float) -> datetime:
    """The time of a header or of a listing. botocore's own parser takes 20 times as long, since it supports any format.

    ``value``: a number in the answers of services that speak JSON, of which credentials may come.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            time = parsedate_to_datetime(value) if value.endswith("GMT") else datetime.fromisoformat(value)
            if time.tzinfo:
                return time
    other: datetime = parse_timestamp(value)
    return other


@kept("AWS_", 4)
def client_here() -> BaseClient:
    """The client of this process and its environment, which never repeats a request. Thread-safe."""

    def client(style: dict[str, str], agent: str | None = None) -> BaseClient:
        return _session().client(
            "s3",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=CONNECTIONS,
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                s3=style,
                user_agent=agent,
            ),
        )

    first = client({})
    style = first.meta.config.s3 or {}
    if "addressing_style" not in style and not is_amazons(first.meta.endpoint_url):
        style = {"addressing_style": "path"}  # few other servers have an address for bucket.host
    made = client(style, first.meta.config.user_agent)  # a client that has to find its name builds it for each request
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
