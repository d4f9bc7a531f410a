"""S3 keeps the object store's contract on each server, and what only S3 can do wrong is told apart."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.config import Reading
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput
from lakeupsert.rows.datafiles import read_file
from lakeupsert.storage import (
    NotFoundError,
    ObjectStore,
    StoreUnavailableError,
    UnknownOutcomeError,
    open_listed,
    open_store,
    remote,
    s3,
)
from lakeupsert.table.chain import Chain
from lakeupsert.table.manifest import DataFile
from lakeupsert.testing.contracts import ObjectStoreContract
from tests.harness.proxy import FaultProxy, Rule, refuse
from tests.harness.servers import Server
from tests.harness.specs import create

NewBucket = Callable[[Server], str]
NewProxy = Callable[[Server], FaultProxy]
VERBS: dict[str, Callable[[ObjectStore], Any]] = {
    "get": lambda store: store.get("a"),
    "head": lambda store: store.head("a"),
    "open": lambda store: store.open("a"),
    "list": lambda store: list(store.list("")),
    "write": lambda store: write(store, "b", b"two"),
    "delete": lambda store: store.delete(["a"]),
}
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body><p>Sign in<br></body></html>"


class TestS3Store(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def on_server(self, s3_server: Server, new_bucket: NewBucket) -> None:
        self.bucket = new_bucket(s3_server)

    def new_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"s3://{self.bucket}/lake")

    def test_schemes_are_one_store(self, store: ObjectStore) -> None:
        store.create("a", b"x")
        other = open_store(f"s3a://{self.bucket}/lake/")
        assert other.get("a") == b"x"
        assert other.uri("a") == store.uri("a") == f"s3://{self.bucket}/lake/a"

    def test_bucket_itself_is_a_store(self, store: ObjectStore) -> None:
        store.create("a", b"x")
        assert [found.name for found in open_store(f"s3://{self.bucket}").list("lake/a")] == ["lake/a"]

    def test_more_than_a_page_is_listed_and_deleted(self, store: ObjectStore) -> None:
        boto = boto3.client("s3")
        for number in range(1005):
            boto.put_object(Bucket=self.bucket, Key=f"lake/n/{number:04}")
        names = [found.name for found in store.list("n/")]
        assert names == [f"n/{number:04}" for number in range(1005)]
        store.delete(names)
        assert list(store.list("")) == []

    def test_marker_of_a_folder_is_no_object(self, store: ObjectStore) -> None:
        for key in ("lake/", "lake/folder/"):
            boto3.client("s3").put_object(Bucket=self.bucket, Key=key)
        store.create("folder/a", b"")
        assert [found.name for found in store.list("", limit=1)] == ["folder/a"]

    def test_object_that_is_replaced_while_it_is_read_is_noticed(self, store: ObjectStore) -> None:
        data = np.random.default_rng(1).bytes(3 * s3.TAIL_BYTES)
        write(store, "a", data)
        with store.open("a") as file:
            assert file.read(10) == data[:10]
            write(store, "a", data[::-1])
            with pytest.raises(NotFoundError):
                file.read(10)

    def test_landing_file_that_is_replaced_while_it_is_read_is_changed(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lakeupsert.landing.formats.blocks.BLOCK_BYTES", 1 << 20)
        ids = np.random.default_rng(1).permutation(200_000)
        rows = pa.table({"id": ids, "day": ["2026-01-02"] * len(ids)})
        spec = create(
            rows.schema, table_id="t", key=("id",), order_by=("at",), partition_by=("day",), delete=None, stamped=True
        )
        for name, write_it in {"a.parquet": write_parquet, "a.jsonl": write_lines}.items():
            write_it(store, name, rows)
            (listed,) = store.list(name)
            file = LandingInput(name, listed.size, listed.etag, 0)
            blocks = read_rows(store, file, Reading(), RowRules(spec, 0))
            next(blocks)
            write_it(store, name, rows.slice(1))
            with pytest.raises(ChangedFileError):
                list(blocks)

    def test_multipart_upload_is_the_object_that_was_written(self, store: ObjectStore, small_parts: None) -> None:
        data = np.random.default_rng(1).bytes(23 << 20)
        with store.write("a") as sink:
            for start in range(0, len(data), 3 << 20):
                sink.write(data[start : start + (3 << 20)])
            assert store.head("a") is None
        assert store.get("a") == data
        assert store.requests.as_dict()["put"] == 1 + 5 + 1

    def test_failed_block_aborts_its_multipart_upload(self, store: ObjectStore, small_parts: None) -> None:
        def fail() -> None:
            with store.write("a") as sink:
                sink.write(bytes(23 << 20))
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            fail()
        assert store.head("a") is None
        assert not boto3.client("s3").list_multipart_uploads(Bucket=self.bucket).get("Uploads")

    def test_missing_bucket_is_named(self, store: ObjectStore) -> None:
        absent = open_store(f"s3://{self.bucket}-absent/lake")
        for verb in ("get", "open", "list", "write", "delete"):
            with pytest.raises(ConfigurationError, match=f"{self.bucket}-absent") as raised:
                VERBS[verb](absent)
            assert raised.value.code == "no-bucket"
        with pytest.raises(ConfigurationError, match=f"{self.bucket}-absent"):
            absent.create("a", b"")

    def test_parquet_is_read_by_few_requests(self, store: ObjectStore) -> None:
        table = pa.table({f"c{i}": np.random.default_rng(i).random(200_000) for i in range(5)})
        with store.write("a") as sink:
            pq.write_table(table, sink, row_group_size=50_000, compression="none", use_dictionary=False)  # 2 MB each
        file = DataFile(name="a", rows=table.num_rows, bytes=0)
        for names in (table.schema.names, ["c0", "c1"], ["c0", "c4"]):
            before = store.requests.as_dict()["get"]
            assert read_file(store, file, pa.schema([table.schema.field(n) for n in names])).equals(table.select(names))
            assert store.requests.as_dict()["get"] - before <= 1 + 2 * 4, names

    def test_small_object_is_read_by_its_opening_alone(self, store: ObjectStore) -> None:
        write_parquet(store, "a", pa.table({"a": range(1000)}))
        before = store.requests.as_dict()["get"]
        with store.open("a") as file:
            pq.read_table(file)
        assert store.requests.as_dict()["get"] == before + 1


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)  # S3 takes no smaller ones
    monkeypatch.setattr(remote, "MULTIPART_BYTES", 10 << 20)


@pytest.fixture
def proxy(versitygw: Server, new_proxy: NewProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    monkeypatch.setattr(s3, "STORE_ATTEMPTS", 2)
    monkeypatch.setattr(s3, "REFUSED_ATTEMPTS", 2)
    return new_proxy(versitygw)


@pytest.fixture
def store(proxy: FaultProxy, new_bucket: NewBucket) -> ObjectStore:
    """A store behind the proxy, with an object `a`."""
    store = open_store(f"s3://{new_bucket(proxy.server)}/lake")
    store.create("a", b"one")
    proxy.log.clear()
    return store


# -- create


@pytest.mark.core
def test_create_whose_answer_is_lost_is_unknown_and_sent_once(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = (Rule("lose", "PUT", having="if-none-match"),)
    with pytest.raises(UnknownOutcomeError):
        store.create("b", b"two")
    assert len(proxy.log) == 1
    assert store.get("b") == b"two"


@pytest.mark.core
def test_chain_takes_a_version_whose_answer_was_lost_as_won(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = (Rule("lose", "PUT", having="if-none-match", times=1),)
    chain = Chain(store, "chain", "test", Body, lambda old, new: None)
    outcome = chain.append(Body(text="mine"), None)
    assert (outcome.result, proxy.struck("lose")) == ("won", 1)
    assert [link.body.text for link in chain.between(-1, 0)] == ["mine"]


def test_create_that_met_another_is_sent_again(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = (refuse(409, "ConditionalRequestConflict", "PUT", times=1),)
    assert store.create("b", b"two") is True
    assert store.create("b", b"three") is False
    proxy.rules = (refuse(409, "ConditionalRequestConflict", "PUT"),)
    with pytest.raises(UnknownOutcomeError):
        store.create("c", b"")


@pytest.mark.parametrize(
    "rule",
    [
        refuse(500, "InternalError"),
        refuse(503, "SlowDown"),
        Rule("answer", body=PAGE, content_type="text/html"),
        Rule("answer", status=502, body=PAGE, content_type="text/html"),
    ],
)
def test_create_without_an_answer_of_s3_is_unknown(store: ObjectStore, proxy: FaultProxy, rule: Rule) -> None:
    proxy.rules = (rule,)
    with pytest.raises(UnknownOutcomeError):
        store.create("b", b"")
    assert len(proxy.log) == 1


@pytest.mark.core
def test_server_that_ignores_conditions_is_refused_before_anything_is_committed(store: ObjectStore) -> None:
    def leave_out(request: Any, **_: Any) -> None:  # before it is signed, as if the server did not know it
        del request.headers["If-None-Match"]

    events = s3.client_here().meta.events
    events.register("before-sign.s3.PutObject", leave_out)
    fresh = open_store(store.uri())
    for _ in range(2):
        with pytest.raises(ConfigurationError) as raised:
            fresh.create("b", b"")
        assert raised.value.code == "conditions-ignored"
    events.unregister("before-sign.s3.PutObject", leave_out)
    assert [found.name for found in store.list("")] == ["a"]


# -- what is no answer, and what is a clear one


@pytest.mark.core
@pytest.mark.few(12)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "rule",
    [
        refuse(503, "SlowDown"),
        Rule("answer", body=PAGE, content_type="text/html"),
        Rule("answer", body=b"<html><body>well formed</body></html>", content_type="text/html"),
        Rule("answer", status=404, body=PAGE, content_type="text/html"),
        Rule("answer", status=403, body=PAGE, content_type="text/html; charset=utf-8"),
        Rule("lose"),
    ],
    ids=["503", "page", "xml page", "404 page", "403 page", "reset"],
)
def test_store_that_does_not_answer_as_s3_is_unavailable(
    store: ObjectStore, proxy: FaultProxy, verb: str, rule: Rule
) -> None:
    proxy.rules = (rule,)
    with pytest.raises(StoreUnavailableError) as raised:
        VERBS[verb](store)
    assert raised.value.code == "store-unreachable"


@pytest.mark.parametrize("verb", ["get", "head", "open", "list", "write"])
def test_success_that_does_not_say_what_s3_says_is_not_believed(
    store: ObjectStore, proxy: FaultProxy, verb: str
) -> None:
    proxy.rules = (Rule("answer", body=b"<ok/>", content_type="text/plain"),)
    with pytest.raises(StoreUnavailableError):
        VERBS[verb](store)


@pytest.mark.core
@pytest.mark.parametrize("verb", VERBS)
def test_passing_failure_is_not_noticed(store: ObjectStore, proxy: FaultProxy, verb: str) -> None:
    for rule in (refuse(503, "SlowDown", times=1), Rule("lose", times=1), Rule("cut", "GET", times=1)):
        proxy.rules = (rule,)
        before = sum(store.requests.as_dict().values())
        sent = len(proxy.log)
        VERBS[verb](store)
        assert sum(store.requests.as_dict().values()) - before == len(proxy.log) - sent
        store.create("a", b"one")


@pytest.mark.core
@pytest.mark.parametrize(
    ("verb", "grant"),
    [
        ("get", "s3:GetObject"),
        ("head", "s3:GetObject"),
        ("open", "s3:GetObject"),
        ("list", "s3:ListBucket"),
        ("write", "s3:PutObject"),
        ("delete", "s3:DeleteObject"),
    ],
)
def test_missing_permission_is_named(store: ObjectStore, proxy: FaultProxy, verb: str, grant: str) -> None:
    proxy.rules = (refuse(403, "AccessDenied"),)
    with pytest.raises(ConfigurationError) as raised:
        VERBS[verb](store)
    assert raised.value.code == "not-permitted"
    assert grant in raised.value.next
    assert store.uri().split("/")[2] in raised.value.next


def test_missing_permission_to_create_is_named(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = (refuse(403, "AccessDenied"),)
    with pytest.raises(ConfigurationError, match="put_object") as raised:
        store.create("b", b"")
    assert "s3:PutObject" in raised.value.next


def test_object_that_may_not_be_deleted_is_named(store: ObjectStore, proxy: FaultProxy) -> None:
    error = b"<Error><Key>lake/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    proxy.rules = (Rule("answer", "POST", "delete", body=b"<DeleteResult>" + error + b"</DeleteResult>"),)
    with pytest.raises(ConfigurationError, match="lake/b") as raised:
        store.delete(["a", "b"])
    assert "s3:DeleteObject" in raised.value.next


def test_object_that_could_not_be_deleted_is_deleted_again(store: ObjectStore, proxy: FaultProxy) -> None:
    error = b"<Error><Key>lake/a</Key><Code>InternalError</Code><Message>no</Message></Error>"
    proxy.rules = (Rule("answer", "POST", "delete", times=1, body=b"<DeleteResult>" + error + b"</DeleteResult>"),)
    store.delete(["a", "b"])
    assert store.head("a") is None


@pytest.mark.core
@pytest.mark.parametrize("status_code", [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
def test_credentials_that_are_not_accepted_are_a_setting_to_correct(
    store: ObjectStore, proxy: FaultProxy, status_code: tuple[int, str]
) -> None:
    proxy.rules = (refuse(*status_code),)
    for call in (*(VERBS[verb] for verb in VERBS if verb != "head"), lambda store: store.create("b", b"")):
        with pytest.raises(ConfigurationError, match=status_code[1]) as raised:
            call(store)
        assert raised.value.code == "bad-credentials"


def test_wrong_credentials_are_refused(
    versitygw: Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"s3://{new_bucket(versitygw)}/lake")
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "wrong")
        with pytest.raises(ConfigurationError) as raised:
            list(store.list(""))
        assert raised.value.code == "bad-credentials"


def test_no_credentials_are_a_setting_to_correct(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigurationError, match="credentials"):
        store.get("a")


# -- bodies and parts


def test_body_that_always_breaks_off_is_unavailable(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.rules = (Rule("cut", "GET"),)
    with pytest.raises(StoreUnavailableError):
        store.get("a")


@pytest.mark.core
def test_absence_whose_answer_breaks_off_is_asked_for_again(store: ObjectStore, proxy: FaultProxy) -> None:
    """The cut answer has no code of S3, and was taken as a refusal."""
    proxy.rules = (Rule("cut", "GET", times=1),)
    with pytest.raises(NotFoundError):
        store.get("gone")
    assert proxy.struck("cut") == 1


def test_failure_while_arrow_reads_keeps_its_class(store: ObjectStore, proxy: FaultProxy) -> None:
    table = pa.table({"a": np.random.default_rng(1).random(200_000), "b": range(200_000)})
    write_parquet(store, "b.parquet", table)
    for pre_buffer in (False, True):
        with store.open("b.parquet") as file:
            proxy.rules = (refuse(503, "SlowDown", "GET"),)
            with pytest.raises(StoreUnavailableError):
                pq.ParquetFile(file, pre_buffer=pre_buffer).read()
        proxy.rules = ()


@pytest.mark.parametrize(
    "rule",
    [
        refuse(200, "InternalError", "POST", "uploadId=", times=1),
        Rule("lose", "POST", "uploadId=", times=1),
        Rule("lose", "POST", "uploads", times=1),
        Rule("lose", "PUT", "partNumber=2", times=1),
    ],
    ids=["an error in an answer of success", "completed, answer lost", "begun, answer lost", "part sent, answer lost"],
)
def test_multipart_upload_goes_on_after_a_passing_failure(
    store: ObjectStore, proxy: FaultProxy, small_parts: None, rule: Rule
) -> None:
    proxy.rules = (rule,)
    data = np.random.default_rng(1).bytes(12 << 20)
    write(store, "b", data)
    assert store.get("b") == data


def test_multipart_upload_that_is_complete_and_forgotten_is_found(
    store: ObjectStore, proxy: FaultProxy, small_parts: None
) -> None:
    again = replace(refuse(404, "NoSuchUpload", "POST", "uploadId="), skip=1)
    proxy.rules = (Rule("lose", "POST", "uploadId=", times=1), again)
    write(store, "b", bytes(12 << 20))
    proxy.rules = (refuse(404, "NoSuchUpload", "POST", "uploadId="),)
    with pytest.raises(StoreUnavailableError):
        write(store, "c", bytes(12 << 20))


@pytest.mark.core
@pytest.mark.parametrize("path", ["partNumber=2", "uploadId=.*(?<!partNumber)$"])
def test_multipart_upload_that_fails_leaves_nothing(
    store: ObjectStore, proxy: FaultProxy, small_parts: None, path: str
) -> None:
    proxy.rules = (refuse(503, "SlowDown", "PUT|POST", path),)
    with pytest.raises(StoreUnavailableError):
        write(store, "b", bytes(12 << 20))
    assert store.head("b") is None
    bucket = store.uri().split("/")[2]
    assert not boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads")


# -- ranges

NO_SUFFIXES = replace(refuse(416, "InvalidRange", "GET"), having="range: bytes=-")
"""rclone serve s3 1.75.2 and gofakes3 1.2.0 answer the last 256 KB of a smaller object with 416."""


@pytest.mark.core
def test_object_is_empty_only_if_its_size_says_so(store: ObjectStore, proxy: FaultProxy) -> None:
    small, large, opened = b"k,v\n1,2\n" * 9, bytes(s3.TAIL_BYTES + 1), s3.TAIL_BYTES
    for name, data in {"small": small, "whole": bytes(opened), "large": large, "empty": b""}.items():
        write(store, name, data)
    proxy.rules = (NO_SUFFIXES,)
    for name, data in {"small": small, "whole": bytes(opened), "empty": b""}.items():
        (listed,) = store.list(name)
        for source in (store.open(name), open_listed(store, listed)):
            with source as file:
                assert (file.size(), file.read()) == (len(data), data), name
    with pytest.raises(ConfigurationError, match="416") as raised:
        store.open("large")
    assert raised.value.code == "store-contradicts-itself"
    with pytest.raises(NotFoundError):
        store.open("absent")


@pytest.mark.core
def test_size_that_is_not_the_listed_one_is_no_end_of_the_file(store: ObjectStore, proxy: FaultProxy) -> None:
    """The server names another size, sends less than the range, or knows no ranges."""
    data = np.random.default_rng(1).bytes(3 * s3.TAIL_BYTES)
    write(store, "b", data)
    (listed,) = store.list("b")
    etag = {"ETag": f'"{listed.etag}"', "x-amz-request-id": "1"}
    for rule, reads in (
        (Rule("answer", "GET", "/b", status=200, headers=etag), 0),
        (Rule("answer", "GET", "/b", status=200, body=data[:-1], headers=etag), 0),
        (Rule("answer", "GET", "/b", status=206, body=b"1", skip=1, headers=etag), 10),
        (Rule("answer", "GET", "/b", status=200, body=data, skip=1, headers=etag), 10),
    ):
        proxy.reset(rule)
        with pytest.raises(ConfigurationError) as raised, open_listed(store, listed) as file:
            file.read(reads)
        assert raised.value.code == "store-contradicts-itself"
    proxy.reset(refuse(416, "InvalidRange", "GET", "/b"))
    proxy.rules = (replace(proxy.rules[0], skip=1),)
    with pytest.raises(ConfigurationError), open_listed(store, listed) as file:
        file.read(10)


def test_checksum_of_the_whole_with_a_range_is_told(store: ObjectStore, proxy: FaultProxy) -> None:
    write(store, "b", b"x" * 10)
    headers = {
        "ETag": '"1"',
        "Content-Range": "bytes 0-9/99",
        "x-amz-checksum-crc32": "AAAAAA==",
        "x-amz-request-id": "1",
    }
    proxy.rules = (Rule("answer", "GET", "/b", status=206, body=b"x" * 10, headers=headers),)
    with pytest.raises(StoreUnavailableError, match="checksum of the whole object") as raised:
        store.open("b")
    assert "AWS_RESPONSE_CHECKSUM_VALIDATION" in raised.value.next


@pytest.mark.parametrize("verb", ["get", "head", "open", "list", "write"])
def test_server_without_etags_is_told(store: ObjectStore, proxy: FaultProxy, verb: str) -> None:
    listing = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>lake/a</Key><Size>1</Size>"
        b"<LastModified>2026-01-02T03:04:05Z</LastModified></Contents></ListBucketResult>"
    )
    body = listing if verb == "list" else b""
    proxy.rules = (Rule("answer", status=200, body=body, headers={"x-amz-request-id": "1"}),)
    with pytest.raises(ConfigurationError, match="ETag") as raised:
        VERBS[verb](store)
    assert raised.value.code == "no-etag"


class Body(msgspec.Struct):
    text: str


def write(store: ObjectStore, name: str, data: bytes) -> None:
    with store.write(name) as sink:
        sink.write(data)


def write_parquet(store: ObjectStore, name: str, table: pa.Table) -> None:
    with store.write(name) as sink:
        pq.write_table(table, sink, row_group_size=50_000)


def write_lines(store: ObjectStore, name: str, table: pa.Table) -> None:
    write(store, name, b"".join(msgspec.json.encode(row) + b"\n" for row in table.to_pylist()))
