"""boto3's client for S3, and what other programs need to reach S3 as it does."""

import os
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import urlsplit

import boto3
from botocore.client import BaseClient
from botocore.config import Config

from lakeupsert.retries import CONNECT_SECONDS, READ_SECONDS
from lakeupsert.storage.base import Call, Requests
from lakeupsert.storage.remote import Pace

CONNECTIONS = 64
"""Connections that a process keeps. More threads than that still work, with connections that are not kept."""
Environment = tuple[tuple[str, str], ...]

counted: ContextVar[tuple[Requests, Call]] = ContextVar("counted")
"""How to count this thread's requests. Clients are shared, and send retries by themselves."""


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
    credentials = _session(os.getpid(), environment()).get_credentials()
    if credentials is not None and credentials.method not in ("env", "container-role", "iam-role"):
        settings["aws.credentials.provider"] = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    return settings


def environment() -> Environment:
    """The variables that a client depends on."""
    return tuple((name, value) for name, value in sorted(os.environ.items()) if name.startswith("AWS_"))


@lru_cache(maxsize=4)
def _session(process: int, environment: Environment) -> boto3.Session:
    return boto3.Session()


def client_here() -> BaseClient:
    """The client of this process and its environment."""
    return _client(os.getpid(), environment())


@lru_cache(maxsize=4)
def _client(process: int, environment: Environment) -> BaseClient:
    """A client that never repeats a request. Thread-safe.

    Kept per process, because a fork would share connections, and per environment, which holds the settings.
    """

    def client(style: dict[str, str]) -> BaseClient:
        return _session(process, environment).client(
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
    made.meta.events.register("before-send.s3", _count)
    return made


def pace_of(bucket: str) -> Pace:
    """The rate of this process for a bucket."""
    return _pace(os.getpid(), bucket, environment())


@lru_cache(maxsize=16)
def _pace(process: int, bucket: str, environment: Environment) -> Pace:
    """S3 limits each prefix, and splits a table's prefix as its load grows. Where, it does not say, so a bucket has one rate."""
    return Pace()


def is_amazons(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _count(**event: object) -> None:
    requests, kind = counted.get()
    requests.count(kind)
