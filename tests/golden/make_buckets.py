"""Makes buckets.json: keys of every type and their hashes, from docs/FORMAT.md alone and the reference XXH64.

It shares nothing with lakeupsert, and needs the package xxhash:

    python3 -m venv build/golden && build/golden/bin/pip install xxhash
    build/golden/bin/python tests/golden/make_buckets.py > tests/golden/buckets.json

A case has the Arrow types of the key columns, some keys, their hashes, and of two numbers of partitions by hash the value of
`bucket(N, …)` for each key. Decimals are unscaled numbers, dates and timestamps
numbers in their own unit, binary values hexadecimal digits.
"""

import json
import random
import string
from typing import Any

import xxhash

INTEGERS = {
    f"{u}int{bits}": (0 if u else -(2 ** (bits - 1)), 2 ** (bits - (not u)) - 1)
    for u in ("", "u")
    for bits in (8, 16, 32, 64)
}
DAY = 86_400_000
RANGES = {
    **INTEGERS,
    "bool": (0, 1),
    "date32": (-719_162, 2_932_896),
    "date64": (-719_162 * DAY, 2_932_896 * DAY),
    **{f"timestamp[{unit}{zone}]": (-(2**62) // factor, 2**62 // factor)
       for unit, factor in (("s", 10**6), ("ms", 1000), ("us", 1), ("ns", 1)) for zone in ("", ", UTC", ", Europe/Zurich")},
    "decimal32(5, 2)": (-99_999, 99_999),
    "decimal64(18, 0)": (-(10**18) + 1, 10**18 - 1),
    "decimal128(38, 10)": (-(10**38) + 1, 10**38 - 1),
    "decimal256(38, 38)": (-(10**38) + 1, 10**38 - 1),
    "decimal256(76, 3)": (-(10**76) + 1, 10**76 - 1),
}  # fmt: skip
ALPHABET = string.ascii_letters + string.digits + "äß漢🦆\0"


def canonical(type_: str, value: Any) -> bytes:
    if type_ in ("string", "large_string"):
        value = value.encode().hex()
    if isinstance(value, str):
        data = bytes.fromhex(value)
        return len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8)
    if type_.startswith("decimal"):
        precision = int(type_.partition("(")[2].partition(",")[0])
        return int(value).to_bytes(32 if precision > 38 else 16, "little", signed=True)
    factor = {"timestamp[s": 10**6, "timestamp[ms": 1000}.get(type_.partition(",")[0].rstrip("]"), 1)
    value = value // DAY if type_ == "date64" else value * factor
    return int(value % 2**64).to_bytes(8, "little")


def case(types: list[str], keys: list[list[Any]]) -> dict[str, Any]:
    messages = [b"".join(map(canonical, types, key)) for key in keys]
    hashes = [xxhash.xxh64_hexdigest(m) for m in messages]
    partitions = {count: [int(found, 16) % count for found in hashes] for count in (64, 1000)}
    return {"types": types, "keys": keys, "hashes": hashes, "partitions": partitions}


def value(type_: str, rng: random.Random) -> Any:
    if type_ in RANGES:
        low, high = RANGES[type_]
        number = rng.choice([low, high, 0, 1, rng.randint(low, high), rng.randint(low, high)])
        number = number // DAY * DAY if type_ == "date64" else number
        return bool(number) if type_ == "bool" else number
    if type_.startswith("fixed"):
        return rng.randbytes(11).hex()
    length = rng.choice([0, 7, 8, 9, 20, 24, 25, rng.randint(0, 100)])
    return "".join(rng.choices(ALPHABET, k=length)) if type_.endswith("string") else rng.randbytes(length).hex()


def main() -> None:
    rng = random.Random(20200101)
    texts = ["string", "large_string", "binary", "large_binary"]
    types = [*RANGES, *texts, "fixed_size_binary[11]"]
    cases = [case([t], [[value(t, rng)] for _ in range(12)]) for t in RANGES]
    cases += [case(["string"], [["".join(rng.choices(ALPHABET[:62], k=n))] for n in range(101)])]
    cases += [case([t], [[rng.randbytes(n).hex()] for n in range(101)]) for t in ("binary", "large_binary")]
    cases += [case(["large_string"], [["".join(rng.choices(ALPHABET, k=n))] for n in range(0, 101, 7)])]
    cases += [case(["fixed_size_binary[11]"], [[rng.randbytes(11).hex()] for _ in range(5)])]
    cases += [case(["string"], [["x" * 1000], [""], ["y" * 33]])]
    for _ in range(40):
        some = rng.choices(types, k=rng.randint(2, 5))
        cases.append(case(some, [[value(t, rng) for t in some] for _ in range(15)]))
    print(json.dumps(cases, indent=None, separators=(",", ":")).replace('},{"types"', '},\n{"types"'))


if __name__ == "__main__":
    main()
