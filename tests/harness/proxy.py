"""An HTTP proxy on loopback that injects faults in front of a working server.

    with fault_proxy(server, Rule("lose", "PUT", "ledger", times=1)) as proxy:
        ...                                     # boto3 with `proxy.server.env`
        assert proxy.struck("lose") == 1

The `Host` header is passed on unchanged, so signatures stay valid. If an answer is lost, the server has acted all the same.
"""

import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote

from lakeupsert import clock
from tests.harness.servers import HOST, Server

Act = Literal["lose", "cut", "sever", "delay", "hold", "answer"]


@dataclass(frozen=True)
class Rule:
    """A fault, and the requests that it strikes.

    Attributes:
        act: `lose` lets the server act and closes the connection without an answer. `cut` closes it in the middle of the
            answer's body. `sever` does so in the middle of the request's body. `delay` waits before it asks the server, `hold`
            waits until `FaultProxy.go`. `answer` answers in place of the server.
        method, path: regular expressions. ``method`` matches the whole method; ``path`` matches anywhere in path and query
            (percent-decoded) or in the operation, which SQS names in a header.
        having: strike only requests with this header, for example `if-none-match`, or with one whose value matches, for example
            `range: bytes=-`.
        skip, times: strike this many matches, starting at match ``skip`` (from 0). None: all of them.
        chance: the probability that a match is struck.
        above: strike only matches above so many a second, which pass.
        seconds: for `delay`.
        status, body, content_type, headers: for `answer`.
    """

    act: Act
    method: str = ".*"
    path: str = ""
    having: str | None = None
    skip: int = 0
    times: int | None = None
    chance: float = 1.0
    above: int | None = None
    seconds: float = 0.0
    status: int = 200
    body: bytes = b""
    content_type: str = "application/xml"
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)


Gate = Callable[[str, str, Mapping[str, str], bytes], Rule | None]
"""Looks at method, path, headers (their names in lower case) and body of each request. A Rule answers in the server's place."""


def refuse(
    status: int, code: str, method: str = ".*", path: str = "", *, times: int | None = None, chance: float = 1.0
) -> Rule:
    """A rule that answers with an error of S3 and of Azure Storage, which has the code in a header: HEAD has no body."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by rule</Message></Error>".encode()
    return Rule(
        "answer", method, path, times=times, chance=chance, status=status, body=body, headers={"x-ms-error-code": code}
    )


@dataclass(frozen=True)
class Event:
    """One request, the faults injected, the server's status (None: the server was not asked), and the bytes of its answer."""

    method: str
    path: str
    conditional: bool
    acts: tuple[Act, ...]
    status: int | None
    bytes: int


class FaultProxy:
    """A running proxy. ``rules`` and ``gate`` may be replaced at any time.

    ``log`` has all requests in the order in which they ended.
    """

    def __init__(self, server: Server, port: int, rules: tuple[Rule, ...], seed: int) -> None:
        self._urls = server.url, f"http://{HOST}:{port}"
        self.server = replace(server, port=port, env={name: self.moved(value) for name, value in server.env.items()})
        self.upstream = server.port
        self._lock = threading.Lock()
        self.reset(*rules, seed=seed)

    def reset(self, *rules: Rule, seed: int = 0) -> None:
        """Begin anew with these rules: no request was matched, held or logged."""
        self.rules = rules
        self.log: list[Event] = []
        self.holds = threading.Event()
        """Set once a request has been held."""
        self._go = threading.Event()
        self._chance = random.Random(seed)
        self._matched: dict[Rule, int] = {}
        self._passed: dict[Rule, deque[float]] = {}
        self.gate: Gate = lambda method, path, headers, body: None

    def moved(self, setting: str) -> str:
        """A client's setting, changed to connect to this proxy."""
        return setting.replace(*self._urls)

    def go(self) -> None:
        """Release held requests, and hold no more."""
        self._go.set()

    def struck(self, act: Act) -> int:
        """How many requests had this act."""
        return sum(act in event.acts for event in self.log)

    def striking(self, method: str, path: str, headers: dict[str, str]) -> list[Rule]:
        """The rules that strike this request. Each matching rule counts it."""
        found = []
        where = f"{unquote(path)} {headers.get('x-amz-target', '')}"
        with self._lock:
            for rule in self.rules:
                matches = re.fullmatch(rule.method, method) and re.search(rule.path, where)
                name, _, value = (rule.having or "").partition(": ")
                if not matches or (name and not (name in headers and re.match(value, headers[name]))):
                    continue
                number = self._matched[rule] = self._matched.get(rule, -1) + 1
                due = number >= rule.skip and (rule.times is None or number < rule.skip + rule.times)
                if due and self._chance.random() < rule.chance and self._is_above(rule):
                    found.append(rule)
        return found

    def _is_above(self, rule: Rule) -> bool:
        if rule.above is None:
            return True
        passed, now = self._passed.setdefault(rule, deque()), clock.elapsed()
        while passed and now - passed[0] > 1:
            passed.popleft()
        if len(passed) < rule.above:
            passed.append(now)
            return False
        return True

    def handle(self, request: "_Handler") -> None:
        """Handle one request according to the rules."""
        method, path = request.command, request.path
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = request.rfile.read(int(headers.get("content-length", 0)))
        conditional = "if-none-match" in headers
        rules = self.striking(method, path, headers)
        refusal = self.gate(method, path, headers, body)
        if refusal is not None:
            rules.insert(0, refusal)
        status, answer, answer_headers = None, b"", [("Content-Type", "")]
        for rule in rules:
            if rule.act == "delay":
                threading.Event().wait(rule.seconds)
            elif rule.act == "hold":
                self.holds.set()
                self._go.wait()
        instead = next((rule for rule in rules if rule.act == "answer"), None)
        acts = {rule.act for rule in rules}
        if instead is None:
            connection = HTTPConnection(HOST, self.upstream)
            sent = body[: len(body) // 2] if "sever" in acts else body
            connection.request(method, path, sent, {**headers, "connection": "close"})
            if "sever" not in acts:
                response = connection.getresponse()
                status, answer, answer_headers = response.status, response.read(), response.getheaders()
            connection.close()
        else:
            answer, answer_headers = instead.body, [("Content-Type", instead.content_type), *instead.headers.items()]
        self.log.append(Event(method, path, conditional, tuple(rule.act for rule in rules), status, len(answer)))
        if acts & {"lose", "sever"}:
            request.close_connection = True
            return
        request.send_response(instead.status if instead else status or 0)
        length = {name.lower(): value for name, value in answer_headers}.get("content-length")
        for name, value in answer_headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                request.send_header(name, value)
        # the answer to HEAD has the length of a body that is not sent
        request.send_header("Content-Length", length if method == "HEAD" and length else str(len(answer)))
        request.end_headers()
        if "cut" in acts:
            answer, request.close_connection = answer[: len(answer) // 2], True
        if method != "HEAD":
            request.wfile.write(answer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "_Listener"

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        self.server.proxy.handle(self)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: `FaultProxy.log` has the request."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: these tests expect clients to hang up."""


@contextmanager
def fault_proxy(server: Server, *rules: Rule, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a proxy in front of ``server`` while the block runs."""
    listener = _Listener((HOST, 0), _Handler)
    proxy = listener.proxy = FaultProxy(server, listener.server_port, rules, seed)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
