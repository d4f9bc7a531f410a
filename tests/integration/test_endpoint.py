"""`lakeupsert serve` and `lakeupsert.Client`, by real servers on loopback."""

import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeupsert
from lakeupsert import retries
from lakeupsert.endpoint.batches import Batches
from lakeupsert.endpoint.client import ARROW
from lakeupsert.endpoint.gate import Gate
from lakeupsert.endpoint.server import STATUSES
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake

CONFIG = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
order_by = ["ts"]
"""
ROW = {"id": "a", "day": "2020-01-01", "ts": 1, "v": 1}
CSV = b"id,day,ts,v\na,2020-01-01,1,1\n"
PATH = "/tables/sales/batches/"


class Server:
    """A server process and one connection a request."""

    def __init__(self, folder: Path, *options: str, token: str | None = None, limits: str = "") -> None:
        self.folder, self.token = folder, token
        env = {**os.environ, **({"LAKEUPSERT_TOKEN": token} if token else {})}
        command = [
            sys.executable,
            "-c",
            f"from lakeupsert import retries; {limits}\nfrom lakeupsert.cli import main; main()",
        ]
        self.process = subprocess.Popen(
            [*command, "serve", "--port", "0", *options],
            cwd=folder,
            env=env,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        found = re.search(r"at http://127.0.0.1:(\d+)", said)
        assert found, said + self.process.stderr.read()
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/tables/sales"

    def post(self, batch_id: str, body: object, type_: str = "text/csv", **headers: str) -> tuple[int, dict, Message]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Content-Type": type_, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if self.token and "Authorization" not in given:
            given["Authorization"] = f"Bearer {self.token}"
        connection.request("POST", PATH + batch_id, body, given)  # type: ignore[arg-type]
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content, answer.headers

    def get(self, path: str) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def served(folder: Path, *options: str, **more: str) -> Iterator[Server]:
    server = Server(folder, *options, **more)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


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


def landed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "landing" / "endpoint").glob("*"))


def merged(folder: Path) -> list[dict]:
    table = lakeupsert.Table.open(folder / "lakeupsert.toml")
    table.run(host="local", workers=1)
    return table.to_arrow().read_all().sort_by("id").to_pylist()


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
    assert found.value.code == "endpoint-refused"


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
    assert [path.name for path in (tmp_path / "landing/endpoint").iterdir()] == ["a.jsonl"]


def test_another_file_of_that_name_is_not_taken_for_the_batch(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    (tmp_path / "landing/endpoint").mkdir()
    (tmp_path / "landing/endpoint/a.csv").write_bytes(ONE.replace(b"a", b"b"))
    for _ in range(2):
        with pytest.raises(RefusedError) as found:
            batches_of(lake).receive("a", "text/csv", ONE)
        assert found.value.code == "batch-id-taken"
        lake.table.run(host="local")


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def kill_server(folder: Path, cases: int, seed: int) -> None:
    """Clients repeat batches while the server is killed again and again."""
    chance, port_file = random.Random(seed), folder / "port"
    done = threading.Event()
    lock, acknowledged = threading.Lock(), set()

    def send(client: int) -> None:
        number = 0
        while not done.is_set():
            name = f"{client}-{number}"
            rows = [{"id": name, "day": f"2020-01-0{1 + number % 3}", "ts": number, "v": client}]
            while True:
                try:
                    lakeupsert.Client(port_file.read_text()).send(rows, name)
                    break
                except TryAgainError:
                    if done.is_set():
                        return
            with lock:
                acknowledged.add(name)
            number += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lakeupsert.endpoint.client.PAUSE_SECONDS", 0.01)
        server = Server(folder)
        port_file.write_text(server.url)
        threads = [threading.Thread(target=send, args=(client,)) for client in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(cases):
            before = len(acknowledged)
            wait_until(lambda: len(acknowledged) > before)  # noqa: B023  called in this turn only
            time.sleep(chance.uniform(0, 0.2))
            server.end(signal.SIGKILL)
            server = Server(folder)
            port_file.write_text(server.url)
        done.set()
        for thread in threads:
            thread.join()
        assert server.end() == 0
    found = [row["id"] for row in merged(folder)]
    assert len(found) == len(set(found))
    assert acknowledged <= set(found)
    assert len(acknowledged) >= cases
    assert [name.removesuffix(".parquet") for name in landed(folder)] == sorted(found)


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
