"""A prefix of an S3 bucket as an object store; also of other servers that speak S3.

Commits   `create` is one PutObject with `If-None-Match: *`: 412 = the name was taken; 409 = two were at it, so again; no
          answer, 5xx = unknown. The SDK's retries are off for it: they would find our own object and call the race lost.
Reads     what was opened is read by ranges with `If-Match`, so an object that is replaced meanwhile is noticed, never mixed.
Settings  region, endpoint, profile, certificates and credentials are boto3's own (such as AWS_ENDPOINT_URL_S3); a server that
          is not Amazon's is addressed by path. Encryption is the bucket's default.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as errors
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.storage.base import (
    Call,
    NotFoundError,
    ObjectInfo,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
    parts_of,
)
from lakeupsert.storage.remote import PROBE, UNTOUCHED, Conditions, RangeReader, Upload, unreachable

CONNECTIONS = 64
"""Of a process, at once; a thread beyond them still works, on a connection that is not kept."""
ATTEMPTS = 4
"""Of every request but a create, with boto3's exponential pauses; of a create that met another (409), with ours."""
TAIL_BYTES = 256 << 10
"""Read when an object is opened: its size, its etag, a Parquet footer; and all of it where it is small."""
DELETED_AT_ONCE = 1000

_GRANTS = {
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_objects": "s3:DeleteObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}  # all others: s3:PutObject
_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "XAdminUserNotFound",  # versitygw
}
_NETWORK = (
    errors.ConnectionError,
    errors.FlexibleChecksumError,
    errors.HTTPClientError,
    errors.IncompleteReadError,
    ResponseParserError,
)

_counted: ContextVar[tuple[Requests, Call]] = ContextVar("_counted")
"""For whom, and as what, requests of this thread are counted: clients are shared, and each sends by itself what it repeats."""


class _ConditionError(Exception):
    """412: the object is there (create), or is another one (read)."""


class _RangeError(Exception):
    """416: the object has no such bytes."""


class _ConflictError(Exception):
    """409: another request for the same name is under way."""


class S3Store:
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    pinned = True

    def __init__(self, address: str) -> None:
        """``address``: `s3://bucket/prefix`; `s3a://` means the same."""
        self.bucket, _, prefix = address.partition("://")[2].partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        if not self.bucket:
            raise ConfigurationError(
                "bad-setting", f"{address} names no bucket.", next="write it as s3://bucket/prefix"
            )
        self.requests = Requests()
        self._conditions = Conditions()

    def __repr__(self) -> str:
        return f"S3Store({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        return f"s3://{self.bucket}/{self._prefix}{name}".rstrip("/")

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        parts_of(name)  # it may come from a message; `open` reads landing files, whose keys others chose, such as a//b
        wanted = None if part is None else f"bytes={part[0]}-{part[0] + part[1] - 1}"
        return self._read(name, wanted)[0]

    def head(self, name: str) -> ObjectInfo | None:
        try:
            found = self._call("head", "head_object", name)
        except NotFoundError:
            return None
        return ObjectInfo(name, found["ContentLength"], found["ETag"].strip('"'), found["LastModified"].timestamp())

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        self._conditions.prove(self._create, self.uri())
        return self._create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[Any]:
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
        return islice(self._list(prefix, 1000 if limit is None else min(limit, 1000)), limit)

    def delete(self, names: Iterable[str]) -> None:
        waiting = iter(names)
        while batch := list(islice(waiting, DELETED_AT_ONCE)):
            for attempt in range(ATTEMPTS):
                keys = [{"Key": self._prefix + name} for name in batch]
                answer = self._call("delete", "delete_objects", Delete={"Objects": keys, "Quiet": True})
                failed = {e["Key"].removeprefix(self._prefix): e for e in answer.get("Errors", ())}
                batch = [name for name in batch if name in failed and failed[name]["Code"] != "NoSuchKey"]
                denied = next((name for name in batch if failed[name]["Code"] == "AccessDenied"), None)
                if denied is not None:
                    raise self._refused("delete_objects", denied, "AccessDenied", failed[denied].get("Message", ""))
                if not batch:
                    break
                clock.sleep(clock.jitter(0.2 * 2**attempt))
            else:
                raise unreachable(
                    self.uri(batch[0]), f"{failed[batch[0]]['Code']} in each of {ATTEMPTS} attempts to delete it"
                )

    def open(self, name: str, etag: str | None = None) -> Any:
        tail, size, found = self._read(name, f"bytes=-{TAIL_BYTES}", etag)

        def read(start: int, end: int) -> bytes:
            return self._read(name, f"bytes={start}-{end - 1}", found)[0]

        return pa.PythonFile(RangeReader(read, size, tail, size - len(tail)), "r")

    # -- how

    def _create(self, name: str, data: bytes) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                self._call("create", "put_object", name, Body=data, IfNoneMatch="*")
                return True
            except _ConditionError:
                return False
            except _ConflictError:
                clock.sleep(clock.jitter(0.1 * 2**attempt))
            except StoreUnavailableError as e:
                raise UnknownOutcomeError(e.message) from e
        raise UnknownOutcomeError(
            f"{self.uri(name)}: other requests for it were under way in each of {ATTEMPTS} attempts"
        )

    def _list(self, prefix: str, page: int) -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            asked: dict[str, Any] = {"Prefix": self._prefix + prefix, "MaxKeys": page, **more}
            answer = self._call("list", "list_objects_v2", **asked)
            for found in answer.get("Contents", ()):
                name = found["Key"].removeprefix(self._prefix)
                if name and not name.endswith("/") and name != PROBE:  # consoles and Hadoop mark folders so
                    yield ObjectInfo(name, found["Size"], found["ETag"].strip('"'), found["LastModified"].timestamp())
            if not answer["IsTruncated"]:
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _read(self, name: str, wanted: str | None, etag: str | None = None) -> tuple[bytes, int, str]:
        """These bytes (a Range header's value; None: all), the object's size, its etag."""
        asked = {"Range": wanted} if wanted else {}
        if etag is not None:
            asked["IfMatch"] = f'"{etag}"'
        for attempt in range(ATTEMPTS):
            try:
                answer = self._call("get", "get_object", name, **asked)
                with closing(answer["Body"]) as body:
                    data = body.read()
                size = answer.get("ContentRange", "").rpartition("/")[2]
                return data, int(size or len(data)), answer["ETag"].strip('"')
            except _ConditionError as e:
                raise NotFoundError(name) from e
            except _RangeError:  # of an empty object no byte can be asked for, nor behind the end
                return b"", 0, ""
            except _NETWORK as e:  # boto3 does not repeat a body that breaks off
                broken = e
                clock.sleep(clock.jitter(0.1 * 2**attempt))
        raise unreachable(self.uri(name), f"its body broke off in each of {ATTEMPTS} attempts: {broken}") from broken

    def _call(self, kind: Call, operation: str, name: str | None = None, **asked: Any) -> dict[str, Any]:
        """One call of boto3. Raises what `_failure` makes of its errors."""
        if name is not None:
            asked["Key"] = self._prefix + name
        before = _counted.set((self.requests, kind))
        try:
            once, often = _clients(os.getpid(), _environment())
            client = once if kind == "create" else often
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **asked)
        except _NETWORK as e:
            raise unreachable(self.uri(name or ""), f"{operation} got no answer of S3: {e}") from e
        except ClientError as e:
            raise self._failure(e, operation, name or "") from e
        except (BotoCoreError, ValueError) as e:
            raise ConfigurationError(
                "s3-settings",
                f"{self.uri(name or '')}: {operation} could not be sent: {e}. {UNTOUCHED}",
                next="correct the credentials or settings of boto3 (environment, ~/.aws, role of the machine)",
            ) from e
        finally:
            _counted.reset(before)
        proof = {"list_objects_v2": "IsTruncated", "put_object": "ETag", "get_object": "ETag", "head_object": "ETag"}
        if proof.get(operation, "ResponseMetadata") not in answer or _is_page(answer):
            raise unreachable(
                self.uri(name or ""), f"the answer to {operation} is not one of S3; is a proxy or a web server there?"
            )
        return answer

    def _failure(self, error: ClientError, operation: str, name: str) -> Exception:
        """What the operator does next, or what the caller makes of it."""
        answer = error.response
        code, message = answer["Error"].get("Code", ""), answer["Error"].get("Message", "")
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        if _is_page(answer):
            told = f"{operation} was answered with a web page ({status}); is a proxy or a web server there?"
            return unreachable(self.uri(name), told)
        if status == 412:
            return _ConditionError(name)
        if status == 416:
            return _RangeError(name)
        if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and operation == "head_object"):
            return NotFoundError(name)
        if code == "NoSuchBucket":
            return ConfigurationError(
                "no-bucket",
                f"There is no bucket {self.bucket!r} for {self.uri(name)} ({operation}). {UNTOUCHED}",
                next="create it, or correct its name, or the region or endpoint where it is",
            )
        if code == "ConditionalRequestConflict":
            return _ConflictError(name)
        if status >= 500 or status in (409, 429) or code in ("RequestTimeout", "SlowDown"):
            return unreachable(self.uri(name), f"{operation} was answered {status} {code}: {message}")
        return self._refused(operation, name, code, message)

    def _refused(self, operation: str, name: str, code: str, message: str) -> LakeupsertError:
        where, said = self.uri(name), f"{code} {message}".strip()
        if code in _CREDENTIALS:
            return ConfigurationError(
                "bad-credentials",
                f"{where}: {operation} on bucket {self.bucket!r} was refused: {said}. {UNTOUCHED}",
                next="renew or correct the credentials that boto3 finds (environment, ~/.aws, role of the machine)",
            )
        if code in ("AccessDenied", "AllAccessDisabled", "403"):
            grant = _GRANTS.get(operation, "s3:PutObject")
            on = self.bucket if grant == "s3:ListBucket" else f"{self.bucket}/{self._prefix}*"
            also = ""
            if "kms" in message.lower():
                also = ", and kms:GenerateDataKey and kms:Decrypt on the bucket's key"
            elif grant == "s3:GetObject":
                also = f" and s3:ListBucket on {self.bucket}, without which an object that is not there is refused too"
            if code == "403":  # a HEAD has no body to tell more
                also += "; or correct its credentials"
            return ConfigurationError(
                "not-permitted",
                f"Not permitted: {operation} of {where}: {said}. {UNTOUCHED}",
                next=f"grant this role or user {grant} on {on}{also}",
            )
        return ConfigurationError(
            "s3-refused",
            f"{where}: {operation} on bucket {self.bucket!r} was refused: {said}. {UNTOUCHED}",
            next="correct what it names: region, endpoint, credentials, this machine's clock, or what the server can do",
        )


class _Parts:
    """See `lakeupsert.storage.remote.Parts`. What can't be dropped stays invisible until the bucket's lifecycle ends it."""

    def __init__(self, store: S3Store, name: str) -> None:
        self._store, self._name = store, name
        self._id: str | None = None  # of the multipart upload, once there is one

    def put(self, data: bytes) -> None:
        self._store._call("put", "put_object", self._name, Body=data)

    def begin(self) -> None:
        self._id = self._store._call("put", "create_multipart_upload", self._name)["UploadId"]

    def send(self, number: int, data: bytes) -> str:
        return str(self._call("upload_part", PartNumber=number, Body=data)["ETag"])

    def join(self, parts: list[str], size: int) -> None:
        told = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(parts, 1)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": told})
        except NotFoundError as e:
            # Repeated by the SDK after a lost answer, it finds no upload any more, and our object there.
            found = self._store.head(self._name)
            if found is None or found.size != size:
                raise unreachable(
                    self._store.uri(self._name), "the server has forgotten the parts that were sent"
                ) from e

    def drop(self) -> None:
        with suppress(LakeupsertError, NotFoundError):
            self._call("abort_multipart_upload")

    def _call(self, operation: str, **asked: Any) -> dict[str, Any]:
        return self._store._call("put", operation, self._name, UploadId=self._id, **asked)


def s3a_settings() -> dict[str, str]:
    """What Hadoop's S3A has to be told to reach S3 as boto3 does here, by the last part of its settings' names.

    Never a secret: S3A finds credentials by itself, but it looks into profiles and web identities only if it is told to.
    """
    here = os.getpid(), _environment()
    once, _ = _clients(*here)
    found: dict[str, str] = {}
    if once.meta.region_name not in (None, "aws-global"):
        found["endpoint.region"] = once.meta.region_name
    if not _is_amazons(once.meta.endpoint_url):
        found["endpoint"] = once.meta.endpoint_url
    if (once.meta.config.s3 or {}).get("addressing_style") == "path":
        found["path.style.access"] = "true"
    credentials = _session(*here).get_credentials()
    if credentials is not None and credentials.method not in ("env", "container-role", "iam-role"):
        found["aws.credentials.provider"] = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    return found


def _environment() -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in sorted(os.environ.items()) if name.startswith("AWS_"))


@lru_cache(maxsize=4)
def _session(process: int, environment: tuple[tuple[str, str], ...]) -> boto3.Session:
    return boto3.Session()


@lru_cache(maxsize=4)
def _clients(process: int, environment: tuple[tuple[str, str], ...]) -> tuple[Any, Any]:
    """A client that sends a request once, and one that sends it again where that is harmless; safe between threads.

    Of one process: a fork would share connections. Of one environment, since that is where their settings come from.
    """

    def client(attempts: int, style: dict[str, str]) -> Any:
        return _session(process, environment).client(
            "s3",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": attempts},
                max_pool_connections=CONNECTIONS,
                connect_timeout=5,
                read_timeout=30,
                s3=style,
            ),
        )

    often = client(ATTEMPTS, {})
    style = often.meta.config.s3 or {}
    if "addressing_style" not in style and not _is_amazons(often.meta.endpoint_url):
        style = {"addressing_style": "path"}  # bucket.host has an address at few other servers
        often = client(ATTEMPTS, style)
    once = client(1, style)
    for each in (once, often):
        each.meta.events.register("before-send.s3", _count)
    return once, often


def _is_amazons(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _is_page(answer: dict[str, Any]) -> bool:
    """Whether a web server answered, or a proxy's page to sign in at; S3 names each answer in a header of its own."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return "html" in headers.get("content-type", "") and not any(name.startswith("x-amz") for name in headers)


def _count(**sent: Any) -> None:
    requests, kind = _counted.get()
    requests.count(kind)
