"""The same rows are accepted, whatever dialect, encoding or compression their text is in."""

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeupsert.config import Reading
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.storage import ObjectInfo
from tests.harness.rounds import TIMES
from tests.harness.specs import create

NAMES = ("id", "day", "note")
SPEC = create(
    pa.schema([("id", pa.string()), ("day", pa.string()), ("note", pa.string())]),
    table_id="t", key=["id"], order_by=["at"], partition_by=["day"], delete=None, stamped=True,
)  # fmt: skip


@dataclass
class OneFile:
    """A store of one file in memory."""

    data: bytes
    pinned = True

    def open(self, name: str, etag: str | None = None) -> Any:
        return pa.BufferReader(self.data)

    def head(self, name: str) -> ObjectInfo | None:
        return ObjectInfo(name, len(self.data), "e", 0)


def rows_of(name: str, data: bytes, reading: Reading) -> list[tuple[Any, ...]]:
    store: Any = OneFile(data)
    found = []
    for rows in read_rows(store, LandingInput(name, len(data), "e", 0), reading, RowRules(SPEC, 0)):
        assert rows.quarantined.num_rows == 0, rows.quarantined.to_pylist()
        columns = (rows.accepted[c].to_pylist() for c in ("id", "_lakeupsert_partition", "note"))
        found += list(zip(*columns, strict=True))
    return found


def written(rows: list[tuple[str, str, str]], header: bool, **dialect: Any) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, **dialect).writerows([*([NAMES] if header else []), *rows])
    return out.getvalue()


def plain(rows: list[tuple[str, str, str]], separator: str, header: bool) -> str:
    return "".join(separator.join(r) + "\n" for r in [*([NAMES] if header else []), *rows])


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return bytes(sink.getvalue().to_pybytes())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip
ANY = st.text(st.sampled_from("ab1 é,;|'\"\n\r\\N\x01"), max_size=6)
SIMPLE = st.text(st.sampled_from("ab1 é,;'\"\\N"), max_size=6)


def rows(field: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, str, str]]]:
    return st.lists(st.tuples(field.map(lambda f: f"k{f}"), field.map(lambda f: f"d{f}"), field), max_size=8)


how = st.tuples(
    st.sampled_from(list(PACK)),
    st.sampled_from(["utf-8", "latin-1", "utf-16", "utf-16-be", "cp1252"]),
    st.booleans(),
    st.sampled_from([1, 13, 1 << 20]),
)


@settings(max_examples=25 * TIMES, deadline=None)
@given(rows(ANY), how, st.sampled_from([(",", '"'), (";", '"'), ("\t", "'"), ("|", "'"), ("\x01", "^")]))
def test_any_dialect_of_csv_gives_what_plain_csv_gives(
    rows: list[tuple[str, str, str]], how: tuple[str, str, bool, int], signs: tuple[str, str]
) -> None:
    ending, encoding, header, size = how
    expected = rows_of("a.csv", written(rows, True, quoting=csv.QUOTE_ALL).encode(), Reading())
    text = written(rows, header, delimiter=signs[0], quotechar=signs[1], quoting=csv.QUOTE_ALL)
    reading = Reading(
        delimiter=signs[0], quote=signs[1], encoding=encoding, header=header, columns=() if header else NAMES
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        assert rows_of(f"a.csv{ending}", PACK[ending](text.encode(encoding)), reading) == expected


@settings(max_examples=25 * TIMES, deadline=None)
@given(
    rows(SIMPLE), how, st.sampled_from([("|", r"\|"), ("|", "[|]"), (" || ", r"\s*\|+\s*"), ("\t", "\t"), ("::", "::")])
)
def test_any_delimited_text_gives_what_plain_csv_gives(
    rows: list[tuple[str, str, str]], how: tuple[str, str, bool, int], signs: tuple[str, str]
) -> None:
    ending, encoding, header, size = how
    if signs[1].startswith(r"\s"):
        rows = [tuple(f.strip() for f in r) for r in rows]  # type: ignore[misc]  # three fields stay three
    expected = rows_of("a.csv", written(rows, True, quoting=csv.QUOTE_ALL).encode(), Reading())
    reading = Reading(
        format="delimited", delimiter=signs[1], encoding=encoding, header=header, columns=() if header else NAMES
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        text = plain(rows, signs[0], header).encode(encoding)
        assert rows_of(f"a.csv{ending}", PACK[ending](text), reading) == expected
