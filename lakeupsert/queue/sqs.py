"""A queue in Amazon SQS, for workers on any number of machines.

Reads     the queue and the dead-letter queue that its redrive policy names; region, endpoint and credentials from boto3's
          chain (AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_SQS, profile, role)
Writes    both queues; it creates none and does not change their settings
Repeat    safe: a message that is sent or received twice finds its partition merged

SQS itself moves a message to the dead letters, without a reason, when it would be received more than `maxReceiveCount` times.
`max_receives` is one less, so that a worker can bury the message before that, and mark its partition failed.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from lakeupsert import clock, retries
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.extras import needs_extra
from lakeupsert.queue.base import NOTHING_DONE, DeadLetter, Lease, Message, MessageError, QueueStats
from lakeupsert.queue.service import Received, Record, ServiceQueue

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.exceptions import ClientError

ADDRESS = re.compile(r"sqs://(?:(?P<account>\d{12})/)?(?P<name>[A-Za-z0-9_-]{1,80})")
TOGETHER = 10
"""Maximum messages that SQS accepts or returns in one request."""
REASON_CHARACTERS = 4_000
BODY_CHARACTERS = 60_000
"""Body and reason together stay below SQS's 256 KiB, with any characters. Only messages of other programs are longer."""

_STALE = {"ReceiptHandleIsInvalid", "MessageNotInflight", "InvalidParameterValue"}
"""SQS's codes for an invalid receipt. It uses the same for a visibility that would exceed 12 hours in total."""
_MISSING = {"QueueDoesNotExist", "NonExistentQueue"}
_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_LATER = {"RequestThrottled", "ThrottlingException", "Throttling", "TooManyRequestsException", "OverLimit"}
_NOT_IN_SQS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _DeadLetters(msgspec.Struct, frozen=True):
    """The redrive policy: where SQS moves a message after ``max_receive_count`` receives."""

    url: str
    max_receive_count: int


class SqsQueue(ServiceQueue[dict[str, Any]]):
    """See `lakeupsert.queue.base.WorkQueue` and `lakeupsert.queue.service` for what each method promises."""

    together = TOGETHER

    def __init__(self, name: str, account: str | None = None) -> None:
        self.name = name
        self.account = account
        self._connection: tuple[int, BaseClient] | None = None

    def __repr__(self) -> str:
        return f"SqsQueue({self.name!r}, {self.account!r})"

    def __reduce__(self) -> tuple[type["SqsQueue"], tuple[str, str | None]]:
        return SqsQueue, (self.name, self.account)

    @property
    def max_receives(self) -> int:
        return max(1, self._dead.max_receive_count - 1)

    def send(self, messages: Iterable[Message]) -> None:
        entries = [{"MessageBody": _body(message)} for message in messages]
        self._send_batches("SendMessageBatch", self._url, entries, "sent")

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        return self._hide(lease.token, lease_seconds)

    def ack(self, lease: Lease) -> bool:
        return self._answer("DeleteMessage", lease.token)

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        return self._hide(lease.token, delay_seconds)

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._bury(self._dead, _body(lease.message), lease.token, lease.receives, reason)

    def stats(self) -> QueueStats:
        visible, leased = self._counts(self._url)
        return QueueStats(visible, leased, sum(self._counts(self._dead.url)))

    def visibility_seconds(self) -> int:
        """The queue's own visibility timeout, which applies to a Lambda event source. Our receives set their own."""
        return int(self._attributes(self._url, "VisibilityTimeout")["VisibilityTimeout"])

    def close(self) -> None:
        if self._connection is not None and self._connection[0] == os.getpid():
            self._connection[1].close()
        self._connection = None

    # -- one of the two queues

    @cached_property
    def _url(self) -> str:
        return self._url_of(self.name, self.account)

    @cached_property
    def _dead(self) -> _DeadLetters:
        policy = self._attributes(self._url, "RedrivePolicy").get("RedrivePolicy")
        if policy is None:
            raise ConfigurationError(
                "no-dead-letter-queue",
                f"The queue {self.name!r} has no redrive policy, but lakeupsert needs a dead-letter queue for messages that fail "
                f"at every try. {NOTHING_DONE}",
                next="set a redrive policy on it: `deadLetterTargetArn`, a second standard queue, and `maxReceiveCount`, for "
                "example 6 for five tries",
            )
        target = json.loads(policy)
        *_, account, name = target["deadLetterTargetArn"].split(":")
        return _DeadLetters(self._url_of(name, account), int(target["maxReceiveCount"]))

    def _url_of(self, name: str, account: str | None) -> str:
        owner = {"QueueOwnerAWSAccountId": account} if account else {}
        answer = self._call("GetQueueUrl", {"QueueName": name, **owner})
        if "QueueUrl" not in answer:
            raise ConfigurationError(
                "queue-unusable",
                f"The server at {self._client.meta.endpoint_url} is not SQS: its answer to GetQueueUrl has no QueueUrl. "
                f"{NOTHING_DONE}",
                next="correct AWS_ENDPOINT_URL_SQS (or AWS_ENDPOINT_URL), or unset it",
            )
        return str(answer["QueueUrl"])

    def _attributes(self, url: str, *names: str) -> dict[str, str]:
        answer = self._call("GetQueueAttributes", {"QueueUrl": url, "AttributeNames": list(names)})
        return dict(answer.get("Attributes", {}))  # absent if the queue has none of them

    def _counts(self, url: str) -> tuple[int, int]:
        """SQS's estimate of visible and of hidden messages."""
        about = "ApproximateNumberOfMessages"
        names = [about, f"{about}NotVisible", f"{about}Delayed"]
        visible, leased, delayed = map(int, map(self._attributes(url, *names).__getitem__, names))
        return visible, leased + delayed

    def _receive(self, url: str, number: int, lease_seconds: float, wait_seconds: float) -> list[dict[str, Any]]:
        answer = self._call(
            "ReceiveMessage",
            {
                "QueueUrl": url,
                "MaxNumberOfMessages": number,
                "VisibilityTimeout": _visibility(lease_seconds),
                "WaitTimeSeconds": min(retries.MOST_WAIT_SECONDS, int(wait_seconds)),
                "MessageSystemAttributeNames": ["ApproximateReceiveCount"],
                "MessageAttributeNames": ["reason", "receives"],
            },
        )
        return list(answer.get("Messages", ()))

    def _hide(self, token: str, seconds: float) -> bool:
        return self._answer("ChangeMessageVisibility", token, VisibilityTimeout=_visibility(seconds))

    def _answer(self, operation: str, token: str, **parameters: object) -> bool:
        """Returns whether the receipt was still valid. SQS may also accept an invalid one, and then changes nothing."""
        message = {"QueueUrl": self._url, "ReceiptHandle": token, **parameters}
        return self._call(operation, message, stale=None) is not None

    def _bury(self, dead: _DeadLetters, body: str, token: str, receives: int, reason: str) -> bool:
        # Two queues need two requests: a process that dies in between leaves a letter and the message.
        if not self._hide(token, retries.PEEK_SECONDS):
            return False
        reason = _NOT_IN_SQS.sub("\ufffd", reason[:REASON_CHARACTERS]) or "no reason was given"
        self._call(
            "SendMessage",
            {
                "QueueUrl": dead.url,
                "MessageBody": body[:BODY_CHARACTERS],
                "MessageAttributes": {
                    "reason": {"DataType": "String", "StringValue": reason},
                    "receives": {"DataType": "Number", "StringValue": str(receives)},
                },
            },
        )
        return self._answer("DeleteMessage", token)

    def _receive_one(self, lease_seconds: float, wait_seconds: float | None) -> Received | None:
        dead = self._dead  # a queue without dead letters is refused before anything is received
        wait = 0 if wait_seconds is None else max(retries.LEAST_WAIT_SECONDS, wait_seconds)
        for letter in self._receive(self._url, 1, lease_seconds, wait):
            return self._received(dead, letter["Body"], letter["ReceiptHandle"], letter["Attributes"])
        return None

    def _of_record(self, record: Record) -> Received:
        return self._received(self._dead, record["body"], record["receiptHandle"], record["attributes"])

    def _received(self, dead: _DeadLetters, body: str, token: str, attributes: Mapping[str, str]) -> Received:
        receives = int(attributes["ApproximateReceiveCount"])
        return Received(body, receives, token, partial(self._bury, dead, body, token, receives))

    def _receive_dead(self, number: int) -> dict[str, dict[str, Any]]:
        letters = self._receive(self._dead.url, number, retries.PEEK_SECONDS, retries.LEAST_WAIT_SECONDS)
        return {letter["MessageId"]: letter for letter in letters}

    def _delete_dead(self, held: dict[str, dict[str, Any]], ids: Sequence[str]) -> None:
        handles = [{"ReceiptHandle": held.pop(id_)["ReceiptHandle"]} for id_ in ids]
        self._send_batches("DeleteMessageBatch", self._dead.url, handles, "deleted from the dead letters")

    def _return_dead(self, letters: Sequence[dict[str, Any]]) -> None:
        visible = [{"ReceiptHandle": letter["ReceiptHandle"], "VisibilityTimeout": 0} for letter in letters]
        self._send_batches("ChangeMessageVisibilityBatch", self._dead.url, visible, "returned to the dead letters")

    def _dead_letter(self, letter: Mapping[str, Any]) -> DeadLetter:
        # Another program may have written these attributes.
        attributes = {name: value.get("StringValue", "") for name, value in letter.get("MessageAttributes", {}).items()}
        count = attributes.get("receives", "")
        receives = int(count) if count.isdecimal() else self._dead.max_receive_count
        reason = attributes.get(
            "reason", f"SQS gave it up after {receives} receives, none of which a worker acknowledged"
        )
        try:
            return DeadLetter(Message.decode(letter["Body"]), reason, receives)
        except MessageError as e:
            return DeadLetter(None, attributes.get("reason", e.message), receives)

    # -- requests

    def _send_batches(self, operation: str, url: str, entries: Sequence[Mapping[str, object]], done: str) -> None:
        """Send ten entries per request, and rejected ones again a few times. Entries with an invalid receipt count as done."""
        stale = set() if operation == "SendMessageBatch" else _STALE
        accepted = 0
        for first in range(0, len(entries), TOGETHER):
            pending = {str(i): entry for i, entry in enumerate(entries[first : first + TOGETHER])}
            for attempt in range(retries.SQS_ATTEMPTS):
                if attempt:
                    clock.sleep(clock.jitter(retries.SQS_PAUSE_SECONDS * 2**attempt))
                answer = self._call(
                    operation,
                    {"QueueUrl": url, "Entries": [{"Id": id_, **entry} for id_, entry in pending.items()]},
                    f"At least {accepted} of {len(entries)} messages were {done}.",
                )
                failed = answer.get("Failed", ())
                outdated = [x for x in failed if x["Code"].rpartition(".")[2] in stale]
                refused = [x for x in failed if x not in outdated]
                done_now = (*answer.get("Successful", ()), *outdated)
                accepted += sum(pending.pop(x["Id"], None) is not None for x in done_now)
                if not pending or any(x["SenderFault"] for x in refused):
                    break
            if pending:
                raise self._not_taken(operation, f"{accepted} of {len(entries)} messages were {done}.", refused)

    def _not_taken(self, operation: str, progress: str, entries: Sequence[Mapping[str, Any]]) -> LakeupsertError:
        for refused in entries:
            if refused["SenderFault"]:
                return ConfigurationError(
                    "queue-unusable",
                    f"The queue {self.name!r} refuses a message in {operation}: {refused['Code']}: "
                    f"{refused.get('Message', 'no reason given')}. {progress}",
                    next="correct the queue's settings, for example its maximum message size, then run the same command again",
                )
        codes = ", ".join(sorted({x["Code"] for x in entries})) or "no answer"
        return TryAgainError(
            "queue-busy",
            f"The queue {self.name!r} did not accept the other messages of {operation} in {retries.SQS_ATTEMPTS} attempts: "
            f"{codes}. {progress}",
            next="run the same command again; `lakeupsert run` sends missing messages",
        )

    def _call(
        self, operation: str, parameters: Mapping[str, object], progress: str = NOTHING_DONE, stale: object = ...
    ) -> Any:
        """SQS's answer (Any: each operation has its own); ``stale`` if given and if SQS reports an invalid receipt."""
        client = self._client
        from botocore import xform_name
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(client, xform_name(operation))(**parameters)
        except ClientError as e:
            if stale is not ... and _code(e) in _STALE:
                return stale
            raise self._refusal(operation, e, progress) from e
        except BotoCoreError as e:
            raise self._failure(e, progress) from e

    @property
    def _client(self) -> "BaseClient":
        """A client of this process. A connection shared with a parent process would mix their answers."""
        if self._connection is None or self._connection[0] != os.getpid():
            with needs_extra(f"The queue {self.name!r}", "aws", NOTHING_DONE):
                import boto3
                from botocore.config import Config
                from botocore.exceptions import BotoCoreError
            config = Config(
                connect_timeout=retries.CONNECT_SECONDS,
                read_timeout=retries.MOST_WAIT_SECONDS + retries.ANSWER_SECONDS,
                # A message that is sent twice is harmless. If a receive is repeated, its first message stays hidden for a while.
                retries={"mode": "standard", "total_max_attempts": retries.SQS_ATTEMPTS},
            )
            try:
                # its own session, because the default one is not thread-safe
                client = boto3.session.Session().client("sqs", config=config)
            except (BotoCoreError, ValueError) as e:
                raise self._failure(e, NOTHING_DONE) from e
            self._connection = (os.getpid(), client)
        return self._connection[1]

    def _refusal(self, operation: str, e: "ClientError", progress: str) -> LakeupsertError:
        """The error for SQS's answer, by what the operator does next."""
        code = _code(e)
        what = f"SQS refused {operation} for the queue {self.name!r}: {code}: {e.response['Error'].get('Message')}. {progress}"
        if code in _MISSING:
            where = f"region {self._client.meta.region_name}, {self._client.meta.endpoint_url}"
            return ConfigurationError(
                "no-such-queue",
                f"There is no queue {self.name!r} in {where}, or these credentials have no access to it. {progress}",
                next="create it with its dead-letter queue, or correct `queue`, AWS_DEFAULT_REGION or the credentials",
            )
        if code in _CREDENTIALS:
            return ConfigurationError(
                "bad-credentials",
                what,
                next="renew this machine's credentials (`aws sts get-caller-identity` shows whose they are)",
            )
        if "AccessDenied" in code:
            action = operation.removesuffix("Batch")
            return ConfigurationError(
                "queue-not-permitted",
                what,
                next=f"grant these credentials `sqs:{action}` on it and its dead-letter queue",
            )
        status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _LATER or status >= 500:
            return TryAgainError("queue-busy", what, next="run the same command again")
        if "json" not in e.response["ResponseMetadata"]["HTTPHeaders"].get("content-type", ""):
            return ConfigurationError(
                "queue-unusable",
                f"The server at {self._client.meta.endpoint_url} answered {operation} with {status}, and not in SQS's JSON "
                f"protocol, the only one that boto3 speaks now. goaws 0.4.5 and sqslite 2.1.1 do not know it. {progress}",
                next="use SQS or an emulator that knows it (ElasticMQ, moto, MiniStack), or correct AWS_ENDPOINT_URL_SQS",
            )
        return ConfigurationError(
            "queue-unusable", what, next="correct what the message says about the queue, or AWS_ENDPOINT_URL_SQS"
        )

    def _failure(self, e: Exception, progress: str) -> LakeupsertError:
        """The error for a request that got no answer, or could not be sent."""
        from botocore import exceptions

        what = f"The queue {self.name!r} in SQS: {e}. {progress}"
        if isinstance(e, exceptions.ConnectionError | exceptions.HTTPClientError):
            return TryAgainError(
                "queue-unreachable",
                what,
                next="check the network connection to it (AWS_ENDPOINT_URL_SQS, AWS_DEFAULT_REGION), then run the same "
                "command again",
            )
        if isinstance(
            e, exceptions.NoCredentialsError | exceptions.PartialCredentialsError | exceptions.CredentialRetrievalError
        ):
            return ConfigurationError(
                "bad-credentials", what, next="give this machine a role or a profile (AWS_PROFILE), or log in"
            )
        return ConfigurationError(
            "queue-unusable", what, next="correct AWS_DEFAULT_REGION, AWS_PROFILE or AWS_ENDPOINT_URL_SQS"
        )


def _body(message: Message) -> str:
    """JSON that escapes U+FFFE and U+FFFF, which SQS does not accept. A reader decodes the same text."""
    return _NOT_IN_SQS.sub(lambda c: f"\\u{ord(c[0]):04x}", message.encode())


def _code(e: "ClientError") -> str:
    """The error's code without the prefix of the older protocol."""
    return str(e.response["Error"].get("Code", "")).rpartition(".")[2]


def _visibility(seconds: float) -> int:
    return min(retries.LONGEST_SQS_LEASE_SECONDS, ceil(seconds))
