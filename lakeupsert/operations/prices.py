"""What requests, bytes and seconds cost: a TOML file, `prices.toml` beside this where the user gives none."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage.base import Call

SHIPPED = Path(__file__).with_name("prices.toml")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In ``currency``; what a file leaves out costs nothing. ``as_of`` is for people: prices are as old as their file."""

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
    """The prices of ``path``; by None the shipped ones, in which a ``local`` table's requests and bytes are free.

    Raises ConfigurationError where the file is not one of prices.
    """
    given = SHIPPED if path is None else Path(path).expanduser()
    try:
        prices = msgspec.convert(tomllib.loads(given.read_text(encoding="utf-8")), Prices)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigurationError(
            "unreadable-prices",
            f"{given} can't be read as a file of prices: {e}. Nothing was changed.",
            next=f"correct it; {SHIPPED} is one to copy",
        ) from e
    if path is None and local:
        return msgspec.structs.replace(prices, thousand_requests={}, gigabyte_read=0.0, gigabyte_written=0.0)
    return prices
