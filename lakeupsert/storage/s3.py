"""A prefix of an S3 bucket as an object store. Also supports other servers with the S3 API.

Commits   `create` is one PutObject with `If-None-Match: *`: 412 = the name was taken; 409 = another create was under way, try
          again; no answer, 5xx = unknown. It is sent once, because a retry would find our own object and report the race as lost.
Retries   our own for all other requests, the SDK's are off. 503 and 429 mean that S3 gets too many requests, not that it is away:
          `remote.Pace` then lowers the rate of this process, and the request is sent again many times
Reads     an open object is read by ranges with `If-Match`, so a replaced object is detected, and versions are never mixed
Settings  region, endpoint, profile, certificates and credentials are boto3's own (for example AWS_ENDPOINT_URL_S3). Servers
          other than Amazon's are addressed by path. Encryption is the bucket's default.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from typing import Any

import botocore.exceptions as errors
import pyarrow as pa
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.retries import REFUSED_ATTEMPTS, STORE_ATTEMPTS
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
    Pace,
    Piece,
    RangeError,
    RangeReader,
    ServerClock,
    ServerStore,
    TooManyRequestsError,
    pause,
    too_many_requests,
    unreachable,
)
from lakeupsert.storage.s3_client import client_here, is_amazons, pace_of

TAIL_BYTES = 256 << 10
"""Bytes to read from the end when an object is opened, with its size and etag: a Parquet footer, or all of a small object."""
DELETED_AT_ONCE = 1000

_GRANTS = {
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_objects": "s3:DeleteObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}  # all others: s3:PutObject
_PROOFS = {"list_objects_v2": "IsTruncated", "put_object": "ETag", "get_object": "ETag", "head_object": "ETag"}
"""What S3's answers to these have, and those of a web server or a proxy do not."""
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


class _ConflictError(Exception):
    """409: another request for the same name is under way."""


class S3Store(ServerStore):
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    def __init__(self, address: str) -> None:
        """``address``: `s3://bucket/prefix`; `s3a://` means the same."""
        self.bucket, _, prefix = address.partition("://")[2].partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        if not self.bucket:
            raise ConfigurationError(
                "bad-setting", f"{address} names no bucket.", next="write it as s3://bucket/prefix"
            )
        self._clock = ServerClock()
        super().__init__()

    def __repr__(self) -> str:
        return f"S3Store({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        return f"s3://{self.bucket}/{self._prefix}{name}".rstrip("/")

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        parts_of(name)  # may come from a message; `open` also reads landing files, with keys like a//b
        wanted = None if part is None else f"bytes={part[0]}-{part[0] + part[1] - 1}"
        try:
            return self._read(name, wanted).data
        except RangeError:
            return b""

    def head(self, name: str) -> ObjectInfo | None:
        try:
            answer = self._call("head", "head_object", name)
        except NotFoundError:
            return None
        return ObjectInfo(name, answer["ContentLength"], answer["ETag"].strip('"'), answer["LastModified"].timestamp())

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        return islice(self._list(prefix, 1000 if limit is None else min(limit, 1000), above), limit)

    def delete(self, names: Iterable[str]) -> None:
        waiting = iter(names)
        while batch := list(islice(waiting, DELETED_AT_ONCE)):
            for attempt in itertools.count():
                keys = [{"Key": self._prefix + name} for name in batch]
                answer = self._call("delete", "delete_objects", Delete={"Objects": keys, "Quiet": True})
                failed = {e["Key"].removeprefix(self._prefix): e for e in answer.get("Errors", ())}
                batch = [name for name in batch if name in failed and failed[name]["Code"] != "NoSuchKey"]
                denied = next((name for name in batch if failed[name]["Code"] == "AccessDenied"), None)
                if denied is not None:
                    raise self._refusal("delete_objects", denied, "AccessDenied", failed[denied].get("Message", ""))
                if not batch:
                    break
                refused = any(failed[name]["Code"] == "SlowDown" for name in batch)
                if refused:
                    self._pace.slow_down()
                if attempt + 1 >= (REFUSED_ATTEMPTS if refused else STORE_ATTEMPTS):
                    what = f"{failed[batch[0]]['Code']} in each of {attempt + 1} attempts to delete it"
                    raise unreachable(self.uri(batch[0]), what)
                pause(attempt)

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        try:
            tail = self._read(name, f"bytes=-{TAIL_BYTES}", etag)
        except RangeError:
            tail = self._read_without_range(name, etag)

        def read(start: int, end: int) -> bytes:
            try:
                return self._read(name, f"bytes={start}-{end - 1}", tail.etag).data
            except RangeError:
                return b""

        opened = ObjectInfo(name, tail.size, tail.etag, 0.0)
        return pa.PythonFile(RangeReader(self, opened, read, tail.data, tail.size - len(tail.data)), "r")

    def _server(self) -> str:
        return self._clock.server

    def clock_ahead(self) -> float | None:
        return self._clock.ahead

    # -- how

    def _parts(self, name: str) -> "_Parts":
        return _Parts(self, name)

    def _create(self, name: str, data: bytes) -> bool:
        for attempt in range(STORE_ATTEMPTS):
            try:
                self._call("create", "put_object", name, Body=data, IfNoneMatch="*")
                return True
            except ConditionError:
                return False
            except _ConflictError:
                pause(attempt)
            except StoreUnavailableError as e:
                raise UnknownOutcomeError(e.message) from e
        raise UnknownOutcomeError(
            f"{self.uri(name)}: another request for it was under way in each of {STORE_ATTEMPTS} attempts"
        )

    def _list(self, prefix: str, page: int, above: Mapping[str, str]) -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            skipped = ""
            answer = self._call("list", "list_objects_v2", Prefix=self._prefix + prefix, MaxKeys=page, **more)
            for entry in answer.get("Contents", ()):
                name = entry["Key"].removeprefix(self._prefix)
                skipped = last_left_out(name, above)
                if skipped:
                    continue
                # Consoles and Hadoop mark folders by a slash at the end.
                if name and not name.endswith("/") and not name.startswith(PROBE):
                    etag = entry.get("ETag", "").strip('"')
                    if not etag:
                        raise self._no_etag(name, "list_objects_v2")
                    yield ObjectInfo(name, entry["Size"], etag, entry["LastModified"].timestamp())
            if not answer["IsTruncated"]:
                return
            # A page that ends among names that are left out is not followed by more of them.
            more = (
                {"StartAfter": self._prefix + skipped}
                if skipped
                else {"ContinuationToken": answer["NextContinuationToken"]}
            )

    def _read_without_range(self, name: str, etag: str | None) -> Piece:
        """An object of which the server has refused the last bytes: it is empty, or shorter, and the server not Amazon's."""
        found = self.head(name)
        if found is None or etag not in (None, found.etag):
            raise NotFoundError(name)
        if found.size > TAIL_BYTES:
            raise not_as_listed(self, found, f"it refused its last {TAIL_BYTES:,} bytes (416)")
        whole = self._read(name, None, found.etag) if found.size else Piece(b"", 0, found.etag)
        if whole.size != found.size:
            raise not_as_listed(self, found, f"read, it has {whole.size:,}")
        return whole

    def _read(self, name: str, wanted: str | None, etag: str | None = None) -> Piece:
        """The range ``wanted`` (the value of a Range header; None: the whole object).

        Raises RangeError if the object has no byte of it, by what the server says.
        """
        options = {"Range": wanted} if wanted else {}
        if etag is not None:
            options["IfMatch"] = f'"{etag}"'
        for attempt in range(STORE_ATTEMPTS):
            try:
                answer = self._call("get", "get_object", name, **options)
                with closing(answer["Body"]) as body:
                    data = body.read()
                size = answer.get("ContentRange", "").rpartition("/")[2]
                return Piece(data, int(size or len(data)), answer["ETag"].strip('"'))
            except ConditionError as e:
                raise NotFoundError(name) from e
            except _NETWORK as e:  # boto3 does not retry an incomplete body
                last_error = e
                pause(attempt)
        if isinstance(last_error, errors.FlexibleChecksumError):
            raise self._wrong_checksum(name, last_error, ranged=wanted is not None) from last_error
        raise unreachable(
            self.uri(name), f"the body was incomplete in each of {STORE_ATTEMPTS} attempts: {last_error}"
        ) from last_error

    def _wrong_checksum(self, name: str, error: Exception, *, ranged: bool) -> LakeupsertError:
        what = f"the bytes did not have the checksum that came with them in any of {STORE_ATTEMPTS} attempts: {error}"
        if not ranged:
            return unreachable(self.uri(name), what)
        return StoreUnavailableError(
            "store-unreachable",
            f"{self.uri(name)}: {what.rstrip('.')}. The request was for a range of the object, and some servers (rclone "
            f"serve s3, gofakes3) answer with the checksum of the whole object. {UNTOUCHED}",
            next="with such a server, set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required; with another one, check the network; "
            "then run the same command again",
        )

    def _no_etag(self, name: str, operation: str) -> ConfigurationError:
        return ConfigurationError(
            "no-etag",
            f"{self.uri(name)}: the server's answer to {operation} has no ETag, so a replaced object would not be noticed "
            f"(s3s-fs sends none in listings, JuiceFS's gateway none at all). {UNTOUCHED}",
            next="start JuiceFS's gateway with --keep-etag and write the objects again; or use another server",
        )

    @property
    def _others_endpoint(self) -> str | None:
        endpoint: str = client_here().meta.endpoint_url
        return None if is_amazons(endpoint) else endpoint

    @property
    def _pace(self) -> Pace:
        return pace_of(self.bucket)

    def _call(self, kind: Call, operation: str, name: str | None = None, **options: object) -> dict[str, Any]:
        """One call of boto3, again if S3 does not answer or refuses it (except a create). Any: each operation has its own answer.

        Raises what `_failure` returns for boto3's errors.
        """
        attempt = 0
        while True:
            self._pace.wait()
            try:
                return self._send(kind, operation, name, **options)
            except StoreUnavailableError as e:
                most = STORE_ATTEMPTS
                if isinstance(e, TooManyRequestsError):
                    self._pace.slow_down()
                    most = REFUSED_ATTEMPTS
                if attempt + 1 >= most or kind == "create":
                    raise
            pause(attempt)
            attempt += 1

    def _send(self, kind: Call, operation: str, name: str | None, **options: object) -> dict[str, Any]:
        if name is not None:
            options["Key"] = self._prefix + name
        before = counted.set((self.requests, kind))
        try:
            client = client_here()
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **options)
        except _NETWORK as e:
            raise unreachable(self.uri(name or ""), f"{operation} got no answer from S3: {e}") from e
        except ClientError as e:
            self._clock.note(e.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
            raise self._failure(e, operation, name or "") from e
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError) as e:
            raise ConfigurationError(
                "bad-credentials",
                f"{self.uri(name or '')}: {operation} could not be sent: {e}. {UNTOUCHED}",
                next="give the machine a role or a profile (AWS_PROFILE), or log in",
            ) from e
        except (BotoCoreError, ValueError) as e:
            raise ConfigurationError(
                "s3-settings",
                f"{self.uri(name or '')}: {operation} could not be sent: {e}. {UNTOUCHED}",
                next="correct the credentials or settings of boto3 (environment, ~/.aws, the machine's role)",
            ) from e
        finally:
            counted.reset(before)
        self._clock.note(answer["ResponseMetadata"]["HTTPHeaders"])
        proof = _PROOFS.get(operation, "ResponseMetadata")
        if proof == "ETag" and not answer.get(proof) and _is_of_s3(answer):
            raise self._no_etag(name or "", operation)
        if proof not in answer or _is_page(answer):
            raise unreachable(
                self.uri(name or ""), f"the answer to {operation} is not from S3; is a proxy or a web server there?"
            )
        return answer

    def _failure(self, error: ClientError, operation: str, name: str) -> Exception:
        """The error by what the operator does next, or one that the caller handles."""
        answer = error.response
        code, message = answer["Error"].get("Code", ""), answer["Error"].get("Message", "")
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        if _is_page(answer):
            what = f"{operation} was answered with a web page ({status}); is a proxy or a web server there?"
            return unreachable(self.uri(name), what)
        if status == 412:
            return ConditionError(name)
        if status == 416:
            return RangeError(name)
        if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and operation == "head_object"):
            return NotFoundError(name)
        if code == "NoSuchBucket":
            return ConfigurationError(
                "no-bucket",
                f"There is no bucket {self.bucket!r} for {self.uri(name)} ({operation}). {UNTOUCHED}",
                next="create it, or correct its name, region or endpoint",
            )
        if code == "ConditionalRequestConflict":
            return _ConflictError(name)
        what = f"{operation} was answered {status} {code}: {message}"
        if status in (429, 503) or code == "SlowDown":
            return too_many_requests(self.uri(name), what)
        # A body that broke off has no code. Nor has the answer to a HEAD, which has no body.
        is_cut = code in ("400", "404") and operation != "head_object"
        if status >= 500 or status == 409 or code == "RequestTimeout" or is_cut:
            return unreachable(self.uri(name), what)
        return self._refusal(operation, name, code, message)

    def _refusal(self, operation: str, name: str, code: str, message: str) -> LakeupsertError:
        where, reason = self.uri(name), f"{code} {message}".strip()
        if code in _CREDENTIALS:
            return ConfigurationError(
                "bad-credentials",
                f"{where}: {operation} on bucket {self.bucket!r} was refused: {reason}. {UNTOUCHED}",
                next="renew or correct the credentials that boto3 finds (environment, ~/.aws, the machine's role)",
            )
        if code in ("AccessDenied", "AllAccessDisabled", "403"):
            grant = _GRANTS.get(operation, "s3:PutObject")
            on = self.bucket if grant == "s3:ListBucket" else f"{self.bucket}/{self._prefix}*"
            also = ""
            if "kms" in message.lower():
                also = ", and kms:GenerateDataKey and kms:Decrypt on the bucket's key"
            elif grant == "s3:GetObject":
                also = (
                    f" and s3:ListBucket on {self.bucket}, without which S3 also refuses requests for missing objects"
                )
            if code == "403":  # the answer to a HEAD has no body with details
                also += "; or correct its credentials"
            return ConfigurationError(
                "not-permitted",
                f"Not permitted: {operation} of {where}: {reason}. {UNTOUCHED}",
                next=f"grant this role or user {grant} on {on}{also}",
            )
        return ConfigurationError(
            "s3-refused",
            f"{where}: {operation} on bucket {self.bucket!r} was refused: {reason}. {UNTOUCHED}",
            next="correct what the message names: region, endpoint, credentials, this machine's clock, or a feature of the "
            "server",
        )


class _Parts:
    """See `lakeupsert.storage.remote.Parts`. Parts that can't be discarded stay, invisible, until the bucket's lifecycle
    rules delete them."""

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
        numbered = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(parts, 1)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": numbered})
        except NotFoundError as e:
            # `_call` retries after a lost answer. Then the upload is gone and our object exists.
            info = self._store.head(self._name)
            if info is None or info.size != size:
                raise unreachable(
                    self._store.uri(self._name), "the server no longer has the parts that were sent"
                ) from e

    def drop(self) -> None:
        with suppress(LakeupsertError, NotFoundError):
            self._call("abort_multipart_upload")

    def _call(self, operation: str, **options: object) -> dict[str, Any]:
        return self._store._call("put", operation, self._name, UploadId=self._id, **options)


def _is_page(answer: dict[str, Any]) -> bool:
    """Whether the answer is a web page, for example a proxy's login."""
    return "html" in answer["ResponseMetadata"]["HTTPHeaders"].get("content-type", "") and not _is_of_s3(answer)


def _is_of_s3(answer: dict[str, Any]) -> bool:
    """Answers of S3 have headers of their own."""
    return any(name.startswith("x-amz") for name in answer["ResponseMetadata"]["HTTPHeaders"])
