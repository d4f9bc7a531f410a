"""What names and values of columns mean, and the words in which `init` gives its evidence."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_KEYS = [
    "id",
    "key",
    "uuid",
    "guid",
    "number",
    "no",
    "nr",
    "num",
    "code",
    "sku",
    "email",
    "username",
    "symbol",
    "ticker",
]
WORDS = {
    what: frozenset(words.split())
    for what, words in {
        # words of columns' names
        "key": "id key no nr num number code uuid guid sku line isbn ean",
        "newer": "updated update modified changed change record version revision rev lsn scn offset ts timestamp epoch",
        "older": "created creation birth",
        "counter": "updated modified changed version revision rev lsn scn offset ts timestamp epoch",
        "event": "transaction event order sale sales business trade booking partition",
        "day": "day dt date",
        "clock": "ts timestamp time date datetime utc local at",
        "arrival": "updated update modified changed record loaded load ingested ingest received arrival extracted",
        "other": "birth dob expiry expires expiration due valid until",
        "measure": "amount amt price cost total subtotal sum value val qty quantity balance volume vol stock pop population temp "
        "tmin tmax temperature rain precipitation wind humidity pressure height weight width depth size age score rating rate "
        "ratio percent pct share count cnt views visits clicks likes hits income revenue salary tax discount fee profit margin "
        "speed distance duration open high low close min max avg mean median kwh betrag menge preis wert summe anzahl montant "
        "prix quantite importe precio cantidad",
        "operation": "op operation action cdc dml rowkind change",
        "flag": "deleted delete removed",
        # values
        "insert": "i +i c r insert inserted create created",
        "update": "u +u -u update updated upsert upserted",
        "delete": "d -d delete deleted remove removed",
        "true": "true 1 y yes t",
        "false": "false 0 n no f",
    }.items()
}


@dataclass(frozen=True)
class Choice:
    """The value proposed for a setting, None if it is left open or at its default, why, and what a person must check."""

    value: Any  # by setting: a list of columns, a pattern, or a delete rule
    evidence: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def left_open(what: str, why: str, advice: str = "") -> Choice:
    """A setting without a value, and a warning about it."""
    return Choice(None, (why,), (f"{what}: {why}{advice}",))


def words_of(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def is_named(name: str, *kinds: str) -> bool:
    """Whether a word of the column's name is of one of these kinds."""
    return any(words_of(name) & WORDS[kind] for kind in kinds)


def key_rank(name: str) -> int:
    """The place of a column's name among the words for keys, the usual ones first; after them all if it has none."""
    found = words_of(name)
    return next((place for place, word in enumerate(_KEYS) if word in found), len(_KEYS))


def percent(share: float) -> str:
    """A percentage, which is 0 or 100 only if it is exactly that."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}"


def name_list(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
