"""`lakeupsert.Client`: send rows to `lakeupsert serve`. It needs no extra."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError, TryAgainError
from lakeupsert.retries import CLIENT_ATTEMPTS, CLIENT_SECONDS, LONGEST_PAUSE_SECONDS, PAUSE_SECONDS

ARROW = "application/vnd.apache.arrow.stream"


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """The token is for one server."""


class Client:
    """Sends batches to one table of a server, for example ``http://127.0.0.1:8421/tables/sales``.

    ``token``: of the server; by default the value of LAKEUPSERT_TOKEN, if that is set.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self._token = url.rstrip("/"), token or os.environ.get("LAKEUPSERT_TOKEN")
        self._opener = build_opener(_NoRedirects)

    def send(self, rows: pa.Table | Sequence[Mapping[str, object]], batch_id: str) -> bool:
        """Send rows, and return once they are durable: whether an earlier request stored them already.

        A call that failed may be repeated with the same rows and id: they count once. ``rows`` are mappings, an Arrow table, or a
        frame of Polars or pandas.

        Raises:
            RefusedError: the table would refuse a row, the id was used for other rows, or the batch is too large.
            TryAgainError: no attempt succeeded, since the server did not answer or takes nothing now.
            ConfigurationError: the URL or the token is wrong, or something else than `lakeupsert serve` answers there.
        """
        headers = {"Content-Type": ARROW}
        headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = Request(f"{self.url}/batches/{quote(batch_id, safe='')}", _as_stream(rows), headers, method="POST")
        last = ""
        for attempt in range(CLIENT_ATTEMPTS):
            wait = 0.0
            try:
                with self._opener.open(request, timeout=CLIENT_SECONDS) as answer:
                    with suppress(ValueError, LookupError, TypeError):
                        return bool(json.load(answer)["already"])
                    raise _foreign(self.url, answer.status)
            except HTTPError as e:
                last, wait = _message(e), _seconds_until(e.headers.get("Retry-After", ""))
            except (OSError, HTTPException) as e:
                last = f"{self.url}: {e}."
            if attempt + 1 < CLIENT_ATTEMPTS:
                clock.sleep(wait + clock.jitter(min(PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS)))
        found = f"{CLIENT_ATTEMPTS} attempts to send batch {batch_id!r} failed, the last so: {last} It may be stored."
        raise TryAgainError("endpoint-unreachable", found, next="call send again with the same rows and id")


def _message(answer: HTTPError) -> str:
    """The message of an answer after which a request may be repeated. Raises the error of another one."""
    kind = RefusedError if answer.code in (400, 409, 413, 422) else ConfigurationError
    found, is_ours = _foreign(answer.url, answer.code), False
    with suppress(ValueError, LookupError, TypeError, OSError, HTTPException):
        error = json.load(answer)["error"]
        found, is_ours = kind(error["code"], error["message"], next=error["next"]), True
    # A proxy that can't reach the server may answer with any 5xx.
    if answer.code in (408, 429, 502, 503, 504) or (answer.code >= 500 and not is_ours):
        return found.message
    raise found from answer


def _foreign(url: str, status: int) -> LakeupsertError:
    found = f"{url} answered {status}, and not as `lakeupsert serve` does. The batch may be stored."
    return ConfigurationError("endpoint-refused", found, next="correct the URL, or the proxy before the server")


def _seconds_until(retry_after: str) -> float:
    """The wait that an answer asks for, by seconds or by a date; otherwise 0."""
    if retry_after.isdecimal():
        return min(float(retry_after), CLIENT_SECONDS)
    with suppress(ValueError):
        seconds = parsedate_to_datetime(retry_after).timestamp() - clock.now().timestamp()
        return min(max(0.0, seconds), CLIENT_SECONDS)
    return 0.0


def _as_stream(rows: pa.Table | Sequence[Mapping[str, object]]) -> bytes:
    """The rows as a stream of Arrow IPC: the same bytes for the same table."""
    if not hasattr(rows, "__arrow_c_stream__"):
        rows = list(rows)
        _refuse_unequal_columns(rows)
        rows = pa.Table.from_pylist(rows)
    table = pa.table(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return sink.getvalue()


def _refuse_unequal_columns(rows: Sequence[Mapping[str, object]]) -> None:
    """Arrow would drop columns that the first row lacks, and fill others with nulls."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            found = f"Row {number} has the columns {', '.join(row)}; row 0 has {', '.join(rows[0])}. Nothing was sent."
            instead = "send rows of equal columns; others in a batch with another id"
            raise RefusedError("unfit-rows", found, next=instead)
