"""Requests and answers: `POST /tables/TABLE/batches/ID`, `/health` and `/openapi.json`."""

import asyncio
import logging
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lakeupsert.endpoint.batches import Batches
from lakeupsert.endpoint.gate import LATER, Gate
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError, TryAgainError
from lakeupsert.retries import BODY_SECONDS, GRACE_SECONDS, HEAD_SECONDS

log = logging.getLogger(__name__)

STATUSES = {
    "bad-batch-id": 400,
    "token-missing": 401,
    "token-refused": 403,
    "no-such-address": 404,
    "slow-body": 408,
    "batch-id-taken": 409,
    "too-large": 413,
    "content-type": 415,
    "unfit-rows": 422,
    "too-many-requests": 429,
}
"""The status for the code of an error. Other codes: 503 if the same request may succeed later, otherwise 500."""
_BATCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HEAD_BYTES = 1 << 14


def run_server(tables: Mapping[str, Batches], gate: Gate, listening: socket.socket) -> None:
    """Answer requests for these tables until SIGTERM or SIGINT, then the open ones."""
    document = Path(__file__).with_name("openapi.json")
    routes = [
        *(
            Route(f"/tables/{quote(n)}/batches/{{id}}", _Receiver(t, gate).post, methods=["POST"])
            for n, t in tables.items()
        ),
        Route("/health", lambda _: JSONResponse({"ok": True})),
        Route("/openapi.json", lambda _: FileResponse(document)),
    ]
    # Without a token, a web page in a browser of this machine could send rows by a name that it points to this address.
    hosts = ["*"] if gate.token else ["localhost", "127.0.0.1"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_such_address})
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False)
    config.h11_max_incomplete_event_size, config.timeout_graceful_shutdown = _HEAD_BYTES, round(GRACE_SECONDS)
    server = uvicorn.Server(config)
    gate.closing = lambda: server.should_exit
    before = set[H11Protocol]()

    async def close_idle() -> None:
        """Close connections that have had no request in work since the last call: uvicorn waits for ever for a whole head."""
        found = (c for c in server.server_state.connections if isinstance(c, H11Protocol))
        idle = {c for c in found if c.cycle is None or c.cycle.response_complete}
        for connection in idle & before:
            connection.transport.close()
        before.clear()
        before.update(idle)

    config.callback_notify, config.timeout_notify = close_idle, HEAD_SECONDS
    server.run(sockets=[listening])


class _Receiver:
    """Answers the requests of one table."""

    def __init__(self, batches: Batches, gate: Gate) -> None:
        self._batches, self._gate = batches, gate

    async def post(self, request: Request) -> Response:
        try:
            with self._gate.admit(request.headers.get("authorization", "")):
                batch_id, body = request.path_params["id"], await self._body(request)
                if not _BATCH_ID.fullmatch(batch_id):
                    found = f"{batch_id!r} can't be a batch id; expected: 1 to 128 letters, digits, . _ -. Nothing was stored."
                    raise RefusedError("bad-batch-id", found, next="begin the id with a letter or digit")
                type_ = request.headers.get("content-type", "")
                already = await to_thread.run_sync(self._batches.receive, batch_id, type_, body)
            return JSONResponse({"ok": True, "batch_id": batch_id, "already": already}, 200 if already else 201)
        except LakeupsertError as e:
            return _refusal(e)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception as e:
            log.exception("a batch was not taken, by a bug in lakeupsert")
            found = f"This is a bug in lakeupsert. {type(e).__name__}: {e}. The batch may be stored."
            again = "report it with the traceback in the server's log; the same batch with the same id counts once"
            return _refusal(LakeupsertError("internal-error", found[:500], next=again))

    async def _body(self, request: Request) -> bytes:
        """The body. A client that is cut off while it sends may lose the answer, so up to twice the limit is read."""
        most, body, size = self._gate.most_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > 2 * most:
                        break
                    body += part if size <= most else b""
        except TimeoutError:
            found = f"Only {size:,} bytes of the body came within {BODY_SECONDS:g} s. Nothing was stored."
            raise TryAgainError("slow-body", found, next=LATER) from None
        if size > most:
            found = f"The body has more than {most:,} bytes, the limit of this server. Nothing was stored."
            raise RefusedError("too-large", found, next="send the rows in several batches, each with another id")
        return bytes(body)


def _refusal(error: LakeupsertError) -> JSONResponse:
    status = STATUSES.get(error.code, 503 if isinstance(error, TryAgainError) else 500)
    if status >= 500:
        log.warning("a batch was not taken: %s", error.message)
    headers = {"Retry-After": "1"} if isinstance(error, TryAgainError) else {}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    content = {"ok": False, "error": {"code": error.code, "message": error.message, "next": error.next}}
    return JSONResponse(content, status, headers)


def _no_such_address(request: Request, _: Exception) -> JSONResponse:
    found = f"{request.method} {request.url.path}: this server has no such address. Nothing was stored."
    return _refusal(ConfigurationError("no-such-address", found, next="send POST /tables/TABLE/batches/ID"))
