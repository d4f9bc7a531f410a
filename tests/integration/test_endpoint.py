"""`lakeupsert serve` and `lakeupsert.Client`, by real servers on loopback."""

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeupsert
from lakeupsert import clock, retries
from lakeupsert.config import DeleteSettings
from lakeupsert.endpoint.batches import ENDINGS, Batches
from lakeupsert.endpoint.client import ARROW
from lakeupsert.endpoint.gate import Gate
from lakeupsert.endpoint.server import STATUSES
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from tests.harness.endpoint import CONFIG, PATH, Server, kill_server, landed, merged, served
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row

ROW = {"id": "a", "day": "2020-01-01", "ts": 1, "v": 1}
CSV = b"id,day,ts,v\na,2020-01-01,1,1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lakeupsert.toml").write_text(CONFIG)
    (tmp_path / "landing").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "lakeupsert.toml").write_text(CONFIG)
    (folder / "landing").mkdir()
    with served(folder, "--max-bytes", "1MiB", "--max-rate", "1000", token="a secret of this test") as server:
        yield server


def arrow(rows: list[dict]) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def parquet(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def test_each_type_of_content_is_merged_by_the_next_run_and_the_same_id_counts_once(folder: Path) -> None:
    line = b'{"id": "%s", "day": "2020-01-01", "ts": 1, "v": 1}'
    bodies = {
        "csv": ("text/csv; charset=utf-8", CSV.replace(b"\na,", b"\ncsv,")),
        "lines": ("application/x-ndjson", line % b"lines"),
        "array": ("application/json", b"[" + line % b"array" + b"]"),
        "parquet": ("application/vnd.apache.parquet", parquet([ROW | {"id": "parquet"}])),
        "arrow": (ARROW, arrow([ROW | {"id": "arrow"}])),
    }
    with served(folder) as server:
        for name, (type_, body) in bodies.items():
            assert server.post(name, body, type_)[:2] == (201, {"ok": True, "batch_id": name, "already": False})
            assert server.post(name, body, type_)[:2] == (200, {"ok": True, "batch_id": name, "already": True})
        assert [row["id"] for row in merged(folder)] == sorted(bodies)
        client = lakeupsert.Client(server.url)
        assert client.send([ROW | {"id": "later"}], "later") is False
        assert client.send([ROW | {"id": "later"}], "later") is True
        assert client.send(pa.Table.from_pylist([ROW | {"id": "table"}]), "table") is False
        assert [row["id"] for row in merged(folder)] == sorted([*bodies, "later", "table"])
        assert server.get("/health") == {"ok": True}
        document = server.get("/openapi.json")
        described = document["paths"]["/tables/{table}/batches/{batch_id}"]["post"]
        assert {str(status) for status in STATUSES.values()} < set(described["responses"])
        assert server.end() == 0


def test_an_id_is_known_after_its_landing_file_is_taken_and_removed(folder: Path) -> None:
    with served(folder) as server:
        assert server.post("a", arrow([ROW]), ARROW)[0] == 201
        assert len(merged(folder)) == 1
        (folder / "landing/endpoint/a.parquet").unlink()
        assert server.post("a", arrow([ROW]), ARROW)[:2] == (200, {"ok": True, "batch_id": "a", "already": True})
        assert landed(folder) == []
        assert server.post("a", CSV)[0] == 409


BAD = {
    "no token": (401, "token-missing", CSV, {"Authorization": "Basic x"}),
    "another token": (403, "token-refused", CSV, {"Authorization": "Bearer another secret"}),
    "too large": (413, "too-large", b"x" * (1 << 20) + b"x", {}),
    "too large in chunks": (413, "too-large", (b"x" * (1 << 16) for _ in range(17)), {}),
    "type": (415, "content-type", CSV, {"type_": "text/plain"}),
    "no type": (415, "content-type", CSV, {"type_": ""}),
    "compressed": (422, "unfit-rows", b"\x1f\x8b\x08\x00", {}),
    "UTF-8": (422, "unfit-rows", CSV + b"\xff,2020-01-01,1,1\n", {}),
    "no column": (422, "unfit-rows", b"id,ts,v\na,1,1\n", {}),
    "no row": (422, "unfit-rows", b"id,day,ts,v\n", {}),
    "nothing": (422, "unfit-rows", b"", {}),
    "null key": (422, "unfit-rows", CSV + b",2020-01-01,1,1\n", {}),
    "broken JSON": (
        422,
        "unfit-rows",
        b'{"id": "a", "day": "2020-01-01", "ts": 1}\n{"id"',
        {"type_": "application/x-ndjson"},
    ),
    "broken Parquet": (
        422,
        "unfit-rows",
        parquet([ROW])[:-20] + b"\0" * 20,
        {"type_": "application/vnd.apache.parquet"},
    ),
    "Parquet is cut": (422, "unfit-rows", parquet([ROW])[:50], {"type_": "application/vnd.apache.parquet"}),
    "Arrow is cut": (422, "unfit-rows", arrow([ROW])[:300], {"type_": ARROW}),
    "no Arrow": (422, "unfit-rows", CSV, {"type_": ARROW}),
}


@pytest.mark.few(len(BAD))
@pytest.mark.parametrize("case", BAD)
def test_refused_body_stores_nothing_and_says_why(server: Server, case: str) -> None:
    status, code, body, given = BAD[case]
    found, answer, headers = server.post("bad", body, **given)
    assert (found, answer["ok"], answer["error"]["code"]) == (status, False, code)
    assert "Nothing was stored." in answer["error"]["message"]
    assert answer["error"]["next"]
    assert "secret" not in json.dumps(answer)
    assert headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)
    assert not list(server.folder.rglob("bad*"))


@pytest.mark.parametrize("batch_id", ["_a", ".a", "a%00", "a%2F..%2Fb", "a=b", "x" * 129, "%C3%A9"])
@pytest.mark.few(7)
def test_bad_batch_id_is_refused(server: Server, batch_id: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", PATH + batch_id, CSV, {"Authorization": f"Bearer {server.token}", "Content-Type": "text/csv"}
    )
    assert connection.getresponse().status in (400, 404)
    assert not (server.folder / "landing/endpoint").exists() or batch_id not in "".join(landed(server.folder))


def test_table_that_does_not_exist_is_not_found(server: Server) -> None:
    client = lakeupsert.Client(server.url.replace("sales", "others"), token=server.token)
    with pytest.raises(ConfigurationError) as found:
        client.send([ROW], "a")
    assert found.value.code == "no-such-address"


def test_client_raises_the_servers_errors(server: Server) -> None:
    client = lakeupsert.Client(server.url, token=server.token)
    with pytest.raises(RefusedError) as unfit:
        client.send([ROW | {"id": None}], "unfit")
    assert unfit.value.code == "unfit-rows"
    with pytest.raises(RefusedError) as unequal:
        client.send([ROW, ROW | {"more": 1}], "unequal")
    assert unequal.value.code == "unfit-rows"
    with pytest.raises(ConfigurationError) as refused:
        lakeupsert.Client(server.url, token="wrong").send([ROW], "a")
    assert refused.value.code == "token-refused"
    with pytest.raises(RefusedError) as large:
        client.send([{**ROW, "v": "x" * 1_200_000}], "large")
    assert large.value.code == "too-large"


def test_same_id_from_twenty_threads_counts_once(folder: Path) -> None:
    with served(folder, "--max-open", "20") as server:
        barrier = threading.Barrier(20)

        def send(number: int) -> int:
            barrier.wait()
            return server.post("same", CSV if number < 15 else CSV.replace(b",1\n", b",2\n"))[0]

        with ThreadPoolExecutor(20) as pool:
            statuses = sorted(pool.map(send, range(20)))
        assert statuses.count(201) == 1
        assert set(statuses) == {200, 201, 409}
        assert statuses.count(409) in (5, 15)
        assert landed(folder) == ["same.csv"]
        assert len(merged(folder)) == 1


def test_same_id_with_another_body_or_type_is_refused(folder: Path) -> None:
    with served(folder) as server:
        assert server.post("a", CSV)[0] == 201
        assert server.post("a", CSV + b"b,2020-01-01,1,1\n")[:2][0] == 409
        assert server.post("a", CSV, "application/x-ndjson")[1]["error"]["code"] == "batch-id-taken"
        assert server.post("a", CSV)[0] == 200
        assert landed(folder) == ["a.csv"]


def test_rate_and_open_requests_are_limited(folder: Path) -> None:
    with served(folder, "--max-rate", "2", "--max-open", "1") as server:
        with server.connect() as slow:
            slow.sendall(f"POST {PATH}slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode())
            time.sleep(0.3)
            status, answer, headers = server.post("a", CSV)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "too-many-requests", "1")
        statuses = [server.post(str(number), CSV.replace(b"a,", b"%d," % number))[0] for number in range(6)]
        assert {201, 429} == set(statuses)
        assert statuses.count(201) <= 4
        client = lakeupsert.Client(server.url)
        assert [client.send([ROW], f"client-{number}") for number in range(4)] == [False] * 4


def test_clients_that_stop_or_lie_leave_nothing(folder: Path) -> None:
    limits = "retries.BODY_SECONDS = 0.5; retries.HEAD_SECONDS = 1"
    with served(folder, limits=limits) as server:
        head = f"POST {PATH}x HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/csv\r\n"
        cut = [
            head + f"Content-Length: {len(CSV) + 1}\r\n\r\n" + CSV.decode(),
            head + "Transfer-Encoding: chunked\r\n\r\n1c\r\n" + CSV.decode(),
            head + "Content-Length: 10\r\n\r\nid",
        ]
        for sent in cut:
            with server.connect() as client:
                client.sendall(sent.encode())
                client.shutdown(socket.SHUT_WR)
                client.recv(1000)
        with server.connect() as client:  # a body that does not end
            client.sendall(cut[0].encode())
            assert b" 408 " in client.recv(1000).split(b"\r\n")[0]
        with server.connect() as client:  # more bytes than Content-Length: the rest is no request
            client.sendall((head + "Content-Length: 5\r\n\r\n" + CSV.decode()).encode())
            assert client.recv(1000).split(b" ")[1] in (b"422", b"400")
        with server.connect() as client:  # a head that never ends
            flood = b"x-a: " + b"a" * 1000 + b"\r\n"
            with pytest.raises((ConnectionError, TimeoutError)):
                client.sendall(head.encode() + flood * 100_000)
        with server.connect() as client:  # or that comes slowly
            client.sendall(b"POST ")
            assert client.recv(1000) == b""
        assert not list(folder.rglob("x.*"))
        assert server.post("x", CSV)[0] == 201


def test_a_thousand_columns_are_taken(folder: Path) -> None:
    with served(folder) as server:
        client = lakeupsert.Client(server.url)
        assert client.send([ROW | {f"c{i}": i for i in range(1000)}], "wide") is False
        assert len(merged(folder)[0]) == 1004


def test_sigterm_finishes_open_requests(folder: Path) -> None:
    with served(folder) as server, server.connect() as client:
        client.sendall(f"POST {PATH}open HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/csv\r\n".encode())
        client.sendall(f"Content-Length: {len(CSV)}\r\n\r\n".encode() + CSV[:10])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        client.sendall(CSV[10:])
        assert b" 201 " in client.recv(1000).split(b"\r\n")[0]
        assert server.process.wait(timeout=30) == 0
    assert landed(folder) == ["open.csv"]


def test_closing_server_answers_that_it_closes() -> None:
    gate = Gate(None, 1, 1, 1, closing=lambda: True)
    with pytest.raises(TryAgainError) as found, gate.admit(""):
        pass
    assert found.value.code == "closing"


AWAY = """
from lakeupsert.storage import LocalStore, StoreUnavailableError
create = LocalStore.create
def fail(store, name, data):
    LocalStore.create = create
    raise StoreUnavailableError("store-unreachable", "The disk is away.", next="wait")
LocalStore.create = fail
"""


def test_store_that_is_away_is_503_and_the_client_repeats(folder: Path) -> None:
    with served(folder, limits=AWAY) as server:
        status, answer, headers = server.post("a", CSV)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "store-unreachable", "1")
    with served(folder, limits=AWAY) as server:
        assert lakeupsert.Client(server.url).send([ROW], "b") is False
    assert landed(folder) == ["b.parquet"]


def call(folder: Path, *arguments: str, **env: str) -> dict:
    process = subprocess.run(
        [sys.executable, "-m", "lakeupsert", "serve", "--json", *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    return json.loads(process.stdout)["error"]


def test_start_is_refused_without_a_token_a_port_or_a_landing_zone(folder: Path) -> None:
    assert call(folder, "--host", "0.0.0.0")["code"] == "token-needed"
    (folder / "empty").write_text("\n")
    assert call(folder, "--token-file", "empty")["code"] == "token-needed"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert call(folder, "--port", str(taken.getsockname()[1]))["code"] == "unusable-address"
    (folder / "lakeupsert.toml").write_text(CONFIG + 'landing_dates = "%Y-%m-%d"\n')
    assert call(folder)["code"] == "not-servable"


def test_a_page_of_another_name_reaches_no_server_without_a_token(folder: Path) -> None:
    with served(folder) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert b" 400 " in client.recv(1000).split(b"\r\n")[0]


ONE = b"k,l,d,ts,v,op\na,1,2020-01-01,2020-01-01 00:00:00,1,\n"


def batches_of(lake: Lake) -> Batches:
    batches = Batches(lake.opened)
    batches._landing = lake.opened.resources.landing  # with a fault point at each call
    return batches


@pytest.mark.few(4)
@pytest.mark.parametrize("fault", list(Fault))
def test_a_batch_that_is_struck_at_any_call_is_stored_by_the_next_request(tmp_path: Path, fault: Fault) -> None:
    for number in range(100):
        lake = Lake(tmp_path / str(number))
        lake.points.arm(number, fault)
        with suppress(Killed, TryAgainError):
            assert batches_of(lake).receive("a", "text/csv", ONE) is False
        struck = lake.points.struck
        lake.points.disarm()
        lake.reopen()
        batches_of(lake).receive("a", "text/csv", ONE)
        [file] = (lake.root / "landing/endpoint").iterdir()
        assert file.read_bytes() == ONE
        assert batches_of(lake).receive("a", "text/csv", ONE) is True
        with pytest.raises(RefusedError):
            batches_of(lake).receive("a", "text/csv", ONE * 2)
        if struck is None:
            break
    assert number >= 3


def test_a_landing_file_without_a_claim_is_not_replaced(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert batches_of(lake).receive("a", "text/csv", ONE) is False
    (lake.root / "processed/_lakeupsert/batches/a.json").unlink()
    assert batches_of(lake).receive("a", "text/csv", ONE) is True
    (lake.root / "processed/_lakeupsert/batches/a.json").unlink()
    with pytest.raises(RefusedError) as found:
        batches_of(lake).receive("a", "text/csv", ONE.replace(b"a,1", b"a,2"))
    assert found.value.code == "batch-id-taken"


def test_two_servers_give_an_id_to_one_body(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path), []
    line = b'{"k": "a", "l": 1, "d": "2020-01-01", "ts": "2020-01-01 00:00:00", "v": 1}'

    def send() -> None:
        other.append(Batches(OpenTable("t", lake.settings)).receive("a", "application/x-ndjson", line))

    batches = batches_of(lake)
    lake.points.amid(0, send, kind="create _lakeupsert/batches")
    with pytest.raises(RefusedError) as found:
        batches.receive("a", "text/csv", ONE)
    assert (other, found.value.code) == ([False], "batch-id-taken")
    assert "new columns of these rows may be in the table" in found.value.message
    assert [path.name for path in (tmp_path / "landing/endpoint").iterdir()] == ["a.jsonl"]
    with pytest.raises(RefusedError, match=r"Nothing was stored\."):
        batches.receive("a", "text/csv", ONE)


def test_a_key_that_the_rows_lack_is_perhaps_a_wrong_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The client can't mend that, and the server's owner hears of it."""
    with pytest.raises(RefusedError) as found:
        batches_of(Lake(tmp_path, key=("k", "absent"))).receive("a", "text/csv", ONE)
    assert found.value.code == "unfit-rows"
    assert "If they are right, the owner of the server must act: " in found.value.next
    assert "`key` names the column 'absent'" in caplog.text


def test_another_file_of_that_name_is_not_taken_for_the_batch(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    (tmp_path / "landing/endpoint").mkdir()
    (tmp_path / "landing/endpoint/a.csv").write_bytes(ONE.replace(b"a", b"b"))
    for _ in range(2):
        with pytest.raises(RefusedError) as found:
            batches_of(lake).receive("a", "text/csv", ONE)
        assert found.value.code == "batch-id-taken"
        lake.table.run(host="local")


def test_nothing_acknowledged_is_lost_by_a_server_that_is_killed(folder: Path) -> None:
    kill_server(folder, int(os.environ.get("KILLS", "3")), seed=1)


@pytest.mark.long
def test_nothing_acknowledged_is_lost_by_a_server_that_is_killed_often(folder: Path) -> None:
    kill_server(folder, int(os.environ.get("KILLS", "20")), seed=2)


def test_client_gives_up_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.endpoint.client.PAUSE_SECONDS", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(TryAgainError) as found:
        lakeupsert.Client(f"http://127.0.0.1:{port}/tables/sales").send([ROW], "a")
    assert found.value.code == "endpoint-unreachable"
    assert str(retries.CLIENT_ATTEMPTS) in found.value.message


def in_an_hour() -> str:
    return formatdate(time.time() + 3600, usegmt=True)


FOREIGN: dict[str, tuple[list[tuple], list[int] | type[Exception]]] = {
    "text": ([(502, b'{"error":"Bad gateway"}')], [0]),
    "page": ([(503, b"<html>", "3")], [3]),
    "no fields": ([(503, b'{"error":{"type":"x"}}', "-3"), (504, b"{}"), (520, b"[]", "nan")], [0, 0, 0]),
    "date": (
        [(503, b"{}", in_an_hour()), (429, b"", "Wed, 21 Oct 2015 07:28:00 GMT"), (503, b"", "soon")],
        [120, 0, 0],
    ),
    "bytes": ([(500, b"\xff")], [0]),
    "always": ([(502, b"")] * 9, TryAgainError),
    "login": ([(200, b"<html>login</html>")], ConfigurationError),
    "other program": ([(200, b'{"ok": true}')], ConfigurationError),
    "list": ([(200, b"[1]")], ConfigurationError),
    "moved": ([(302, b"")], ConfigurationError),
    "forbidden": ([(403, b'{"error": 5}')], ConfigurationError),
    "fields": ([(418, b'{"error":{"code":"x"}}')], ConfigurationError),
}
"""Answers, and the seconds that `Client` waits after each, or the error that it raises."""


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.few(len(FOREIGN))
def test_answers_of_a_proxy_are_errors_of_the_project(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    foreign, expected = FOREIGN[case]
    answers, pauses = iter(foreign), list[float]()
    monkeypatch.setattr(clock, "jitter", lambda seconds: 0.0)
    monkeypatch.setattr(clock, "sleep", pauses.append)

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body, *wait = next(answers, (201, b'{"ok": true, "already": false}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for value in wait:
                self.send_header("Retry-After", value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            client = lakeupsert.Client(f"http://127.0.0.1:{proxy.server_port}/tables/sales", token="a secret")
            if isinstance(expected, list):
                assert client.send([ROW], "a") is False
                assert [round(pause) for pause in pauses] == expected
            else:
                with pytest.raises(expected) as found:
                    client.send([ROW], "a")
                assert found.value.code in ("endpoint-refused", "endpoint-unreachable")
                assert found.value.next
                assert "secret" not in str(found.value)
        finally:
            proxy.shutdown()
            thread.join()


def refused(lake: Lake, batch_id: str, body: bytes, type_: str = "application/x-ndjson") -> tuple[str, str]:
    with pytest.raises((RefusedError, ConfigurationError)) as found:
        batches_of(lake).receive(batch_id, type_, body)
    return found.value.code, found.value.message


def line(**values: object) -> bytes:
    return json.dumps({"k": "a", "l": 1, "d": "2020-01-01", "ts": "2020-01-01 00:00:00", **values}).encode() + b"\n"


CLASHES = {
    "number and text": (line(n=1), line(k="b", n="x"), line(k="b", n=2)),
    "text and struct": (line(n="x"), line(k="b", n={"x": 1}), line(k="b", n="y")),
    "case": (line(n=1), line(k="b", N=1, n=1), line(k="b", N=1)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("case", CLASHES)
def test_what_is_accepted_is_taken_also_beside_another_batch_with_the_same_new_column(
    tmp_path: Path, case: str, *, exists: bool
) -> None:
    first, clash, fits = CLASHES[case]
    lake = Lake(tmp_path, schema={"k": "string"}, quarantine_limit="0%")
    if exists:
        lake.land("0.jsonl", [row("z", 0, 0, 0)])
        lake.run()
    accepted: list[bytes] = []
    for number, body in enumerate((first, clash, fits)):
        try:  # a night infers the types of JSON over all of its files, so only typed files show the fault
            assert batches_of(lake).receive(f"{number}", ARROW, arrow([json.loads(body)])) is False
            accepted.append(body)
        except RefusedError as e:
            assert (number, e.code) == (1, "unfit-rows")
    assert {first, fits} <= {*accepted}
    lake.table.status()
    lake.run()
    assert lake.entries()[-1][1].quarantined == {}
    assert len(lake.rows()) == exists + len({json.loads(body)["k"] for body in accepted})
    lake.reopen()
    assert [number for number, _ in lake.entries()] == [*range(len(lake.entries()))]


def test_two_servers_agree_on_a_new_column(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path, schema={"k": "string"}), []

    def send() -> None:
        batches = Batches(OpenTable("t", lake.settings))
        other.append(batches.receive("b", "application/x-ndjson", line(k="b", n=1)))

    lake.points.amid(0, send, kind="create _lakeupsert/spec")
    with pytest.raises(RefusedError) as found:
        batches_of(lake).receive("a", "application/x-ndjson", line(n="x"))
    assert (other, found.value.code) == ([False], "unfit-rows")
    lake.run()
    assert [row["k"] for row in lake.rows()] == ["b"]


def test_an_append_that_is_overtaken_by_a_new_column_keeps_the_batch(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={"k": "string"})
    (tmp_path / "landing/0.jsonl").write_bytes(line(k="c", n={"x": 1}))

    def send() -> None:
        Batches(OpenTable("t", lake.settings)).receive("b", "application/x-ndjson", line(k="b", n="x"))

    lake.points.amid(0, send, kind="create _lakeupsert/spec")
    lake.run()
    assert "b" in {row["k"] for row in lake.rows()}


def test_a_folder_that_was_not_adopted_gets_no_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("old.parquet", [row("a", 0, 1, 1)])
    code, message = refused(lake, "a", ONE, "text/csv")
    assert (code, "not a table yet" in message) == ("not-adopted", True)
    assert not (tmp_path / "processed/_lakeupsert").exists()


def test_a_type_of_body_that_the_table_does_not_read_is_refused(tmp_path: Path) -> None:
    reads = {
        "csv": {"text/csv"},
        "delimited": {"text/csv"},
        "jsonl": {"application/x-ndjson", "application/json"},
        "parquet": {ARROW, "application/vnd.apache.parquet"},
        "avro": set(),
        "auto": {*ENDINGS},
    }
    for format_, types in reads.items():
        lake = Lake(tmp_path / format_, format=format_)
        for type_ in ENDINGS:
            code, _ = refused(lake, "a", b"\xff", type_)
            assert code == ("unfit-rows" if type_ in types else "content-type")


def test_an_id_can_not_make_its_rows_deletes(tmp_path: Path) -> None:
    lake = Lake(tmp_path, delete=DeleteSettings(file_prefix="del.csv"))
    assert batches_of(lake).receive("a", "text/csv", ONE) is False
    assert refused(lake, "del", ONE, "text/csv")[0] == "bad-batch-id"
    assert batches_of(lake).receive("del", "application/x-ndjson", line()) is False


def test_a_repeated_id_does_not_read_the_landing_file_again(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    batches = batches_of(lake)
    assert batches.receive("a", "text/csv", ONE) is False
    lake.points.arm(-1, Fault.BEFORE, "landing ")
    assert batches.receive("a", "text/csv", ONE) is True
    assert lake.points.seen == ["landing head endpoint/a.csv"]
    (tmp_path / "landing/endpoint/a.csv").unlink()
    assert batches.receive("a", "text/csv", ONE) is False
    (tmp_path / "landing/endpoint/a.csv").write_bytes(ONE * 2)
    lake.points.arm(-1, Fault.BEFORE, "landing get")
    with pytest.raises(RefusedError):
        batches_of(lake).receive("a", "text/csv", ONE)
    assert lake.points.seen == []


BROKEN = """
from lakeupsert.config import DeleteSettings
from lakeupsert.endpoint.batches import ENDINGS, Batches
def fail(*_):
    raise RuntimeError("a bug of this test")
Batches.receive = fail
"""


def test_every_answer_has_the_same_form(folder: Path) -> None:
    with served(folder, limits=BROKEN) as server:
        status, answer, _ = server.post("a", CSV)
        assert (status, answer["ok"], answer["error"]["code"]) == (500, False, "internal-error")
        assert "a bug of this test" in answer["error"]["message"]
        status, answer, _ = server.post("a/b", CSV)
        assert (status, answer["ok"], answer["error"]["code"]) == (404, False, "no-such-address")
        with pytest.raises(ConfigurationError) as found:
            lakeupsert.Client(server.url).send([ROW], "a")
        assert (found.value.code, bool(found.value.next)) == ("internal-error", True)
