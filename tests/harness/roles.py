"""What the policies of `infra/` let a role do, and gates that refuse everything else.

An evaluator of IAM's statements and of Azure's role definitions, for what `infra/` uses of them. An element, an operator or a
request that it does not know is an error, so nothing passes unread. moto's evaluator takes a condition that is not met for a
denial and ignores `?`, so it does not serve here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree

from tests.harness.proxy import Gate, Rule, refuse

Statement = Mapping[str, Any]
Asks = Callable[[str, str, Mapping[str, str], bytes], list["Ask"]]
"""Which rights a request needs: its method, path, headers and body."""
ACCOUNT = "123456789012"
REGION = "eu-central-1"
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers"
QUEUES = "Microsoft.Storage/storageAccounts/queueServices/queues"


@dataclass(frozen=True)
class Ask:
    """A right that a request needs: one of ``actions`` on ``resource``.

    Attributes:
        context: the request's values of condition keys. A key that the request does not have is absent.
    """

    actions: tuple[str, ...]
    resource: str
    context: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Call:
    """A right that a role needed for a request, and whether it has it."""

    role: str
    ask: Ask
    allowed: bool


# ---------------------------------------------------------------- IAM


def permits(statements: Sequence[Statement], ask: Ask) -> bool:
    """Whether IAM permits it: a statement allows it and none denies it."""
    effects = {s["Effect"] for s in statements if any(_applies(s, action, ask) for action in ask.actions)}
    return effects == {"Allow"}


def _applies(statement: Statement, action: str, ask: Ask) -> bool:
    unknown = statement.keys() - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    if unknown or statement.get("Principal", "*") != "*":
        raise ValueError(f"not evaluated here: {sorted(unknown)} of {statement}")
    return (
        any(_like(pattern.lower(), action.lower()) for pattern in _several(statement["Action"]))
        and any(_like(pattern, ask.resource) for pattern in _several(statement["Resource"]))
        and all(
            _holds(operator, ask.context.get(key), _several(wanted))
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, found: str | None, wanted: Sequence[str]) -> bool:
    if operator == "Null":
        return any((found is None) == (value == "true") for value in wanted)
    if operator in ("StringEquals", "Bool"):
        return found in wanted
    if operator == "StringLike":
        return found is not None and any(_like(pattern, found) for pattern in wanted)
    raise ValueError(f"the operator {operator} is not evaluated here")


def _like(pattern: str, text: str) -> bool:
    parts = (".*" if one == "*" else "." if one == "?" else re.escape(one) for one in pattern)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _several(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


# ---------------------------------------------------------------- Azure


@dataclass(frozen=True)
class Assignment:
    """A role's permissions, at a scope: an account (`lake`) or a container or queue of it (`lake/processed`)."""

    scope: str
    actions: Sequence[str]
    data_actions: Sequence[str]
    not_actions: Sequence[str] = ()
    not_data_actions: Sequence[str] = ()


def azure_permits(assignments: Sequence[Assignment], ask: Ask) -> bool:
    """Whether an assignment at the resource, or above it, has the action and does not take it away again."""
    return any(
        f"{ask.resource}/".startswith(f"{one.scope}/") and _has(one, action)
        for one in assignments
        for action in ask.actions
    )


def _has(one: Assignment, action: str) -> bool:
    of_data = "/blobs/" in action or "/messages/" in action
    given, taken = (one.data_actions, one.not_data_actions) if of_data else (one.actions, one.not_actions)
    return any(_like(p.lower(), action.lower()) for p in given) and not any(
        _like(p.lower(), action.lower()) for p in taken
    )


# ---------------------------------------------------------------- which rights a request needs


def s3_asks(method: str, path: str, headers: Mapping[str, str], body: bytes) -> list[Ask]:
    """Of a request by path, `/bucket/key`."""
    where = urlsplit(path)
    query = dict(parse_qsl(where.query, keep_blank_values=True))
    bucket, _, key = unquote(where.path).lstrip("/").partition("/")
    context = {"aws:SecureTransport": "true"}  # the proxy has no TLS; clients of Amazon's own S3 do
    if "if-none-match" in headers:
        context["s3:if-none-match"] = headers["if-none-match"]
    if "prefix" in query:
        context["s3:prefix"] = query["prefix"]

    def ask(action: str, name: str = key) -> Ask:
        return Ask((f"s3:{action}",), f"arn:aws:s3:::{bucket}{'/' if name else ''}{name}", context)

    if not key:
        if method == "POST" and "delete" in query:
            names = [e.text or "" for e in ElementTree.fromstring(body).iter() if e.tag.endswith("Key")]
            return [ask("DeleteObject", name) for name in names]
        if method in ("GET", "HEAD") and query.keys() <= LISTING:
            return [ask("ListBucket")]
    elif method in ("GET", "HEAD") and query.keys() <= {"partNumber"}:
        return [ask("GetObject")]
    elif method in ("PUT", "POST") and query.keys() <= {"partNumber", "uploadId", "uploads"}:
        if "x-amz-copy-source" in headers:
            raise ValueError(f"{method} {path}: a copy reads its source, which is not evaluated here")
        return [ask("PutObject")]
    elif method == "DELETE":
        uploads, versions = "uploadId" in query, "versionId" in query
        return [ask("AbortMultipartUpload" if uploads else "DeleteObjectVersion" if versions else "DeleteObject")]
    raise ValueError(f"{method} {path}: not evaluated here")


LISTING = {
    *("list-type", "prefix", "delimiter", "max-keys", "start-after", "continuation-token", "encoding-type"),
    "fetch-owner",
}


def sqs_asks(method: str, path: str, headers: Mapping[str, str], body: bytes) -> list[Ask]:
    """Of a request in SQS's JSON. A batch needs the right of its single form."""
    given = json.loads(body)
    name = given["QueueName"] if "QueueName" in given else given["QueueUrl"].rpartition("/")[2]
    action = headers["x-amz-target"].partition(".")[2].removesuffix("Batch")
    return [Ask((f"sqs:{action}",), f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}", {"aws:SecureTransport": "true"})]


def blob_asks(method: str, path: str, headers: Mapping[str, str], body: bytes) -> list[Ask]:
    """Of a request to an emulator, `/account/container/blob`. As in "Permissions for calling data operations" of the REST API."""
    where = urlsplit(path)
    query = dict(parse_qsl(where.query, keep_blank_values=True))
    _, container, *_ = unquote(where.path).lstrip("/").split("/", 2)
    scope, of_container = f"lake/{container}", query.get("restype") == "container"
    comp = query.get("comp", "")
    if method in ("GET", "HEAD"):
        if of_container and comp != "list":
            return [Ask((f"{BLOBS}/read",), scope)]
        return [Ask((f"{BLOBS}/blobs/read",), scope)]
    if method == "PUT" and not of_container:
        creates = not comp and headers.get("if-none-match") == "*"
        return [Ask((f"{BLOBS}/blobs/write", *([f"{BLOBS}/blobs/add/action"] if creates else ())), scope)]
    if method == "DELETE" or (method == "POST" and comp == "batch"):
        return [Ask((f"{BLOBS}/blobs/delete",), scope)]
    raise ValueError(f"{method} {path}: not evaluated here")


def queue_asks(method: str, path: str, headers: Mapping[str, str], body: bytes) -> list[Ask]:
    """Of a request to an emulator, `/account/queue/messages`."""
    where = urlsplit(path)
    _, queue, *rest = where.path.lstrip("/").split("/")
    if not rest and method in ("GET", "HEAD"):
        return [Ask((f"{QUEUES}/read",), f"work/{queue}")]
    peeks = "peekonly" in where.query
    actions = {
        "POST": ("add/action", "write"),
        "GET": ("read",) if peeks else ("process/action",),
        "PUT": ("write",),
        "DELETE": ("delete", "process/action"),
    }[method]
    return [Ask(tuple(f"{QUEUES}/messages/{action}" for action in actions), f"work/{queue}")]


# ---------------------------------------------------------------- gates

_DENIED_BY_SQS = b'{"__type": "com.amazon.coral.service#AccessDeniedException", "message": "by its role"}'
DENIALS: Mapping[Asks, Rule] = {
    s3_asks: refuse(403, "AccessDenied"),
    sqs_asks: Rule("answer", status=400, body=_DENIED_BY_SQS, content_type="application/x-amz-json-1.0"),
    blob_asks: refuse(403, "AuthorizationPermissionMismatch"),
    queue_asks: refuse(403, "AuthorizationPermissionMismatch"),
}


class Roles:
    """Who calls now, and what everybody called.

    Attributes:
        role: its rights count; None: the test itself, which may do everything and is not recorded.
        calls: one for each right that a request needed, in order.
        unknown: requests that are not evaluated here. They were refused.
    """

    def __init__(self, permits: Callable[[str, Ask], bool]) -> None:
        self._permits = permits
        self.role: str | None = None
        self.calls: list[Call] = []
        self.unknown: list[str] = []

    def gate(self, asks: Asks) -> Gate:
        """The gate of a server whose requests need these rights. It answers as the cloud does if one is lacking."""

        def look(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Rule | None:
            role = self.role
            if role is None:
                return None
            try:
                found = [Call(role, ask, self._permits(role, ask)) for ask in asks(method, path, headers, body)]
            except ValueError as e:
                self.unknown.append(str(e))
                return DENIALS[asks]
            self.calls += found
            refused = [call.ask for call in found if not call.allowed]
            if refused and method == "POST" and "delete" in path:  # S3 answers by object
                return Rule("answer", status=200, body=_none_deleted(refused))
            return DENIALS[asks] if refused else None

        return look


def _none_deleted(refused: Sequence[Ask]) -> bytes:
    keys = (ask.resource.partition(":::")[2].partition("/")[2] for ask in refused)
    errors = "".join(f"<Error><Key>{key}</Key><Code>AccessDenied</Code></Error>" for key in keys)
    return f"<DeleteResult>{errors}</DeleteResult>".encode()
