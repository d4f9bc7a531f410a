"""Who may send, how often, and how many at the same time. Used by one thread: the server's event loop."""

import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, TryAgainError

LATER = "send the same batch with the same id again"


@dataclass
class Gate:
    """Admits requests. ``rate``: requests a second; as many may come together. ``closing``: whether it admits none."""

    token: str | None
    most_bytes: int
    most_open: int
    rate: int
    closing: Callable[[], bool] = lambda: False
    _open: int = 0
    _allowance: float = 0
    _since: float = float("-inf")

    @contextmanager
    def admit(self, authorization: str) -> Iterator[None]:
        """Count a request as open during the block. Raises the error of a request that may not begin."""
        scheme, _, token = authorization.partition(" ")
        # Wrong tokens do not count for the rate: they would lock out the right one.
        if self.token and not hmac.compare_digest(token.strip().encode(), self.token.encode()):
            is_missing = scheme.lower() != "bearer" or not token
            found = f"The request has {'no' if is_missing else 'the wrong'} token (Authorization: Bearer …)."
            code = "token-missing" if is_missing else "token-refused"
            raise ConfigurationError(code, f"{found} Nothing was stored.", next="send the token of this server")
        if self.closing():
            raise TryAgainError("closing", "The server is shutting down. Nothing was stored.", next=LATER)
        now = clock.elapsed()
        self._allowance = min(self.rate, self._allowance + (now - self._since) * self.rate)
        self._since = now
        if self._allowance < 1 or self._open >= self.most_open:
            found = f"The server takes {self.rate} requests a second and {self.most_open} at the same time; more came."
            raise TryAgainError("too-many-requests", f"{found} Nothing was stored.", next=LATER)
        self._allowance -= 1
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
