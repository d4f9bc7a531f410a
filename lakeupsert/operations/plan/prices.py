"""Prices of requests, bytes and seconds: a TOML file, by default `prices.toml` beside this module."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError
from lakeupsert.storage.base import Call

SHIPPED = Path(__file__).with_name("prices.toml")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices in ``currency``; what a file leaves out is free. ``as_of`` says how old they are."""

    as_of: str
    currency: str = "USD"
    thousand_requests: dict[Call, float] = {}
    gigabyte_read: float = 0.0
    gigabyte_written: float = 0.0
    compute_second: float = 0.0

    def of_requests(self, requests: Mapping[Call, int]) -> float:
        return sum(n * self.thousand_requests.get(call, 0.0) for call, n in requests.items()) / 1000

    def of_bytes(self, read: int, written: int) -> float:
        return (read * self.gigabyte_read + written * self.gigabyte_written) / 1e9


def load_prices(path: str | Path | None, *, local: bool) -> Prices:
    """Load the prices of ``path``; None loads the shipped ones, where requests and bytes of a ``local`` table are free.

    Raises ConfigurationError if the file does not hold prices.
    """
    given = SHIPPED if path is None else Path(path).expanduser()
    try:
        prices = convert(tomllib.loads(given.read_text(encoding="utf-8")), Prices)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigurationError(
            "unreadable-prices",
            f"{given} can't be read as a price list: {e}. Nothing was changed.",
            next=f"correct it; {SHIPPED} is an example to copy",
        ) from e
    if path is None and local:
        return msgspec.structs.replace(prices, thousand_requests={}, gigabyte_read=0.0, gigabyte_written=0.0)
    return prices
