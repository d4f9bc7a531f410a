"""An HTTP proxy on loopback that goes wrong as it is told, in front of a server that does not.

    with fault_proxy(server, Rule("lose", "PUT", "ledger", times=1)) as proxy:
        ...                                     # boto3 with `proxy.server.env`
        assert proxy.struck("lose") == 1

The `Host` header goes on as it came, so signatures hold. What a server did before its answer was lost, it did.
"""

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote

from lakeupsert.testing.servers import HOST, Server

Act = Literal["lose", "cut", "delay", "hold", "answer", "strip"]


@dataclass(frozen=True)
class Rule:
    """What happens to which requests.

    Attributes:
        act: `lose` lets the server act and closes the connection without its answer; `cut` closes it in the middle of the
            answer's body; `delay` waits before the server is asked; `hold` does so until `FaultProxy.go`; `answer` answers
            instead of it; `strip` leaves a header out.
        method, path: regular expressions; the whole method, anywhere in path and query (not percent-encoded), or in the
            operation, which SQS names in a header.
        having: only requests with this header, such as `if-none-match`.
        skip, times: strike from the match ``skip`` (from 0) on, this often; None: always.
        chance: of each of these.
        seconds: of `delay`.
        status, body, content_type: of `answer`.
        header: of `strip`.
    """

    act: Act
    method: str = ".*"
    path: str = ""
    having: str | None = None
    skip: int = 0
    times: int | None = None
    chance: float = 1.0
    seconds: float = 0.0
    status: int = 200
    body: bytes = b""
    content_type: str = "application/xml"
    header: str = ""


def refuse(
    status: int, code: str, method: str = ".*", path: str = "", *, times: int | None = None, chance: float = 1.0
) -> Rule:
    """A rule that answers with an error of S3."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by rule</Message></Error>".encode()
    return Rule("answer", method, path, times=times, chance=chance, status=status, body=body)


@dataclass(frozen=True)
class Event:
    """One request, what was done to it, and how the server answered it (None: it was not asked)."""

    method: str
    path: str
    conditional: bool
    acts: tuple[Act, ...]
    status: int | None


class FaultProxy:
    """See the module. ``rules`` may be replaced at any time; ``log`` has every request in the order of their ends."""

    def __init__(self, server: Server, port: int, rules: tuple[Rule, ...], seed: int) -> None:
        self._urls = server.url, f"http://{HOST}:{port}"
        self.server = replace(server, port=port, env={name: self.moved(value) for name, value in server.env.items()})
        self.rules = rules
        self.log: list[Event] = []
        self.upstream = server.port
        self.holds = threading.Event()
        """Whether a request is, or was, held."""
        self._go = threading.Event()
        self._chance = random.Random(seed)
        self._matched: dict[Rule, int] = {}
        self._lock = threading.Lock()

    def moved(self, setting: str) -> str:
        """The setting of a client, which then comes here."""
        return setting.replace(*self._urls)

    def go(self) -> None:
        """Let go of what is held, and hold nothing more."""
        self._go.set()

    def struck(self, act: Act) -> int:
        """How often that was done."""
        return sum(act in event.acts for event in self.log)

    def striking(self, method: str, path: str, headers: dict[str, str]) -> list[Rule]:
        """The rules for this request, which count it."""
        found = []
        where = f"{unquote(path)} {headers.get('x-amz-target', '')}"
        with self._lock:
            for rule in self.rules:
                fits = re.fullmatch(rule.method, method) and re.search(rule.path, where)
                if not fits or (rule.having is not None and rule.having not in headers):
                    continue
                number = self._matched[rule] = self._matched.get(rule, -1) + 1
                due = number >= rule.skip and (rule.times is None or number < rule.skip + rule.times)
                if due and self._chance.random() < rule.chance:
                    found.append(rule)
        return found

    def handle(self, request: "_Handler") -> None:
        """Forward one request, or not."""
        method, path = request.command, request.path
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = request.rfile.read(int(headers.get("content-length", 0)))
        conditional = "if-none-match" in headers
        rules = self.striking(method, path, headers)
        status, answer, told = None, b"", [("Content-Type", "")]
        for rule in rules:
            if rule.act == "delay":
                threading.Event().wait(rule.seconds)
            elif rule.act == "hold":
                self.holds.set()
                self._go.wait()
            elif rule.act == "strip":
                headers.pop(rule.header.lower(), None)
        instead = next((rule for rule in rules if rule.act == "answer"), None)
        if instead is None:
            connection = HTTPConnection(HOST, self.upstream)
            connection.request(method, path, body, {**headers, "connection": "close"})
            response = connection.getresponse()
            status, answer, told = response.status, response.read(), response.getheaders()
            connection.close()
        else:
            answer, told = instead.body, [("Content-Type", instead.content_type)]
        acts = {rule.act for rule in rules}
        self.log.append(Event(method, path, conditional, tuple(rule.act for rule in rules), status))
        if "lose" in acts:
            request.close_connection = True
            return
        request.send_response(instead.status if instead else status or 0)
        length = {name.lower(): value for name, value in told}.get("content-length")
        for name, value in told:
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                request.send_header(name, value)
        # a HEAD tells the length of what it does not send
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
        """`FaultProxy.log` has it."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is what these tests are about."""


@contextmanager
def fault_proxy(server: Server, *rules: Rule, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy in front of ``server`` while the block runs."""
    listener = _Listener((HOST, 0), _Handler)
    proxy = listener.proxy = FaultProxy(server, listener.server_port, rules, seed)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
