"""Other bytes from bytes that a reader takes, at random: for a minute in CI. `python -m tests.fuzz` is guided by coverage."""

import random
from collections.abc import Callable

TOKENS = (
    *(b"\0", b"\n", b"\r\n", b"\t", b'"', b"'", b"\\", b"{", b"[" * 50, b"}", b"]", b",", b";", b"%", b"=", b"(", b")"),
    *(b"null", b"NaN", b"-1", b"1e999", b"9" * 40, b"0001-01-01", b"9999-12-31T23:59:59.999999Z"),
    *(b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x80\x80\x80\x80\x10"),
)


def _replace(rng: random.Random, data: bytearray, seeds: tuple[bytes, ...]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _insert(rng: random.Random, data: bytearray, seeds: tuple[bytes, ...]) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.choice(TOKENS)


def _cut(rng: random.Random, data: bytearray, seeds: tuple[bytes, ...]) -> None:
    at = rng.randint(0, len(data))
    del data[at : at + rng.randint(1, 30)]


def _repeat(rng: random.Random, data: bytearray, seeds: tuple[bytes, ...]) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = data[at : at + rng.randint(1, 60)] * rng.randint(1, 8)


def _splice(rng: random.Random, data: bytearray, seeds: tuple[bytes, ...]) -> None:
    other = rng.choice(seeds)
    data[rng.randint(0, len(data)) :] = other[rng.randint(0, len(other)) :]


_STEPS: tuple[Callable[[random.Random, bytearray, tuple[bytes, ...]], None], ...] = (
    _replace, _replace, _insert, _insert, _cut, _repeat, _splice,
)  # fmt: skip


def mutated(rng: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        rng.choice(_STEPS)(rng, data, seeds)
    return bytes(data[:20_000])
