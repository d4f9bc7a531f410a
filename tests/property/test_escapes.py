r"""Escapes in CSV and in the text formats of databases: values come back as they were written, each at its byte of the file."""

import itertools
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeupsert.config import Reading
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.operations.recompute.text import read_text
from lakeupsert.storage import LocalStore
from tests.harness.rounds import TIMES
from tests.harness.specs import create

NAMES = ("id", "day", "note")
SPEC = create(
    pa.schema([(name, pa.string()) for name in NAMES]),
    table_id="t", key=["id"], order_by=["at"], partition_by=["day"], delete=None, stamped=True,
)  # fmt: skip
Row = tuple[str, str, str | None]
NOTES = st.none() | st.text(st.sampled_from("a\\\",\t\n\r'|;Nntbx041é\x08\x1a"), min_size=1, max_size=8)
COPY = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v"}


def spark(value: str | None, delimiter: str, quote: str) -> str:
    """As Spark writes it: a value in quotes if it has a sign that needs them, and escapes only in quotes."""
    if value is None:
        return ""
    if not set(value) & {delimiter, quote, "\n", "\r"}:
        return value
    return quote + re.sub(rf"([\\{quote}])", r"\\\1", value) + quote


def text_format(value: str | None, delimiter: str, letters: dict[str, str]) -> str:
    """As COPY, OUTFILE or Hive write it: a backslash before whatever has a meaning, or before a letter for it."""
    if value is None:
        return "\\N"
    return "".join(f"\\{letters.get(c, c)}" if c in {"\\", delimiter, *letters} else c for c in value)


def in_quotes(value: str | None) -> str:
    return "\\N" if value is None else f'"{text_format(value, "", {chr(10): chr(10), chr(34): chr(34)})}"'


WRITERS: dict[str, Any] = {
    "spark": (Reading(escape="\\"), lambda v: spark(v, ",", '"')),
    "spark ; '": (Reading(escape="\\", delimiter=";", quote="'"), lambda v: spark(v, ";", "'")),
    "postgresql": (Reading(escape="postgresql", delimiter="\t"), lambda v: text_format(v, "\t", COPY)),
    "postgresql |": (Reading(escape="postgresql", delimiter="|"), lambda v: text_format(v, "|", COPY)),
    "mysql": (Reading(escape="mysql", delimiter="\t"), lambda v: text_format(v, "\t", {"\n": "\n", "\0": "0"})),
    "mysql in quotes": (Reading(escape="mysql", quote='"'), in_quotes),
    "hive": (Reading(escape="hive", delimiter="\x01"), lambda v: text_format(v, "\x01", {"\n": "n", "\r": "r"})),
}
"""By name: how text is read, and how a value is written."""


def read(folder: Path, text: bytes, reading: Reading) -> tuple[list[tuple[Row, int]], list[dict[str, Any]]]:
    """Accepted rows with their places, and quarantined rows. `reconcile --deep` must read the same."""
    file = folder / "a.csv"
    file.write_bytes(text)
    store = LocalStore(folder)
    info = store.head("a.csv")
    assert info is not None
    accepted: list[tuple[Row, int]] = []
    quarantined: list[dict[str, Any]] = []
    for rows in read_rows(store, LandingInput("a.csv", info.size, info.etag, 0), reading, RowRules(SPEC, 0)):
        columns = (rows.accepted[c].to_pylist() for c in ("id", "_lakeupsert_partition", "note", "_lakeupsert_place"))
        accepted += [((i, day.removeprefix("day="), note), place) for i, day, note, place in zip(*columns, strict=True)]
        quarantined += rows.quarantined.to_pylist()
    refused = frozenset(row["position"] for row in quarantined)
    deep = [tuple(row.values()) for row in read_text(str(file), "a.csv", refused, reading, ())]
    assert deep == [row for row, _ in accepted]
    return accepted, quarantined


@settings(max_examples=25 * TIMES, deadline=None)
@given(
    st.lists(NOTES, min_size=1, max_size=5),
    st.sampled_from(sorted(WRITERS)),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([1, 3, 1 << 20]),
)
def test_values_come_back_at_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str | None], name: str, end: str, block: int
) -> None:
    reading, write = WRITERS[name]
    if name == "mysql":  # there a CR is a character, but not before a line end
        notes = [note and f"{note}." for note in notes]
    records = [reading.delimiter.join(NAMES) + end]
    records += [reading.delimiter.join([f"k{i}", "d", write(note)]) + end for i, note in enumerate(notes)]
    places = [sum(len(r.encode()) for r in records[: i + 1]) for i in range(len(notes))]
    expected = [((f"k{i}", "d", note), place) for i, (note, place) in enumerate(zip(notes, places, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block)
        found = read(tmp_path_factory.getbasetemp(), "".join(records).encode(), reading)
    assert found == (expected, [])


REFUSED = object()
FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({}, r'"say \"hi\""', REFUSED),
    ({}, '"a "b" c"', REFUSED),
    ({}, '"x"y', REFUSED),
    ({}, '"x" ', REFUSED),
    ({}, '5" pipe', '5" pipe'),
    ({}, ' "x"', ' "x"'),
    ({}, '"a ""b"" c"', 'a "b" c'),
    ({"quote": "'"}, "'x'y", REFUSED),
    ({"quote": ""}, '"x"y', '"x"y'),
    ({"escape": "\\"}, r'"say \"hi\""', 'say "hi"'),
    ({"escape": "\\"}, r'"a\nb\\c"', r"a\nb\c"),
    ({"escape": "\\"}, r"a\nb\\c", r"a\nb\\c"),
    ({"escape": "\\"}, r'"x\\"y', REFUSED),
    ({"escape": "\\"}, r'"a "b" \"c"', REFUSED),
    ({"escape": "\\"}, r'5" \"pipe', r'5" \"pipe'),
    ({"escape": "^"}, '"a^"b^^c"', 'a"b^c'),
    ({"escape": "postgresql"}, r"a\tb\\n\x41\101\qe", "a\tb\\nAAqe"),
    ({"escape": "postgresql"}, r"\xc3\xa9\303\251", "éé"),
    ({"escape": "postgresql"}, r"\xff", REFUSED),
    ({"escape": "postgresql"}, '"x"y', '"x"y'),
    ({"escape": "postgresql"}, "a\\\nb", "a\nb"),
    ({"escape": "postgresql"}, r"\N", None),
    ({"escape": "postgresql"}, r"\\N", r"\N"),
    ({"escape": "postgresql"}, r"\Nx", "Nx"),
    ({"escape": "mysql"}, r"a\tb\x41\0\Z\s", "a\tbx41\0\x1as"),
    ({"escape": "mysql"}, "a\rb", "a\rb"),
    ({"escape": "mysql", "quote": '"'}, r'"\N"', None),
    ({"escape": "mysql", "quote": '"'}, r'"say \"hi\", ""he"""', 'say "hi", "he"'),
    ({"escape": "mysql", "quote": '"'}, r'\"a"', '"a"'),
    ({"escape": "mysql", "quote": '"'}, r'"x"y', REFUSED),
    ({"escape": "hive"}, r"a\nb\tc\,d", "a\nbtc,d"),
]
"""Settings, the text of a field, and its value or that its record is refused. As Spark 4.1, PostgreSQL 15, MariaDB 10.11 and
Hive's LazySimpleSerDe 2.3 read them; what these take with text after a closing quote is refused here."""


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_field_has_its_value_or_its_record_is_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    for given_settings, field, value in FIELDS:
        text = f"id,day,note\nk0,d,x\nk1,d,{field}\nk2,d,y\n"
        accepted, quarantined = read(tmp_path, text.encode(), Reading(**given_settings))
        place = text.index("k1")
        assert [row for row, _ in accepted if row[0] != "k1"] == [("k0", "d", "x"), ("k2", "d", "y")], field
        found = [(row[2], at) for row, at in accepted if row[0] == "k1"]
        refused = [(q["reason_code"], q["position"], q["line"], q["raw"]) for q in quarantined]
        if value is REFUSED:
            assert (found, refused) == ([], [("malformed", place, 3, f"k1,d,{field}")])
        else:
            assert (found, refused) == ([(value, place)], [])


def test_text_after_a_closing_quote_is_refused_beside_any_other_quotes(tmp_path: Path) -> None:
    """Blocks in which all quotes look right, and blocks in which some do not, are read in two ways."""
    for other in ("x", '5" pipe', '"x,""y"""', '"two\nlines"'):
        text = f'id,day,note\nk0,d,{other}\nk1,"d"e,"x"\nk2,d,"x"\n'
        accepted, quarantined = read(tmp_path, text.encode(), Reading())
        assert [row[0] for row, _ in accepted] == ["k0", "k2"]
        assert [(q["reason_code"], q["raw"]) for q in quarantined] == [("malformed", 'k1,"d"e,"x"')]


def test_file_that_ends_in_an_escape_has_a_malformed_record(tmp_path: Path) -> None:
    for escape in ("postgresql", "mysql", "hive"):
        accepted, quarantined = read(tmp_path, b"id,day,note\nk,d,x\nk,d,y\\", Reading(escape=escape))
        assert (len(accepted), [q["position"] for q in quarantined]) == (1, [18])


def test_spark_writes_what_is_read(spark: Any, tmp_path: Path) -> None:
    """Values of awkward signs, written by Spark's own CSV writer in its default dialect and with all values in quotes."""
    awkward = ["a", "\\", '"', ",", "\n", "\\n", " "]
    notes = ["".join(signs) for n in (1, 2, 3) for signs in itertools.product(awkward, repeat=n)]
    rows = [(f"k{i}", "d", note) for i, note in enumerate(notes)]
    frame = spark.createDataFrame(rows, list(NAMES)).coalesce(1)
    for quote_all in (False, True):
        folder = tmp_path / str(quote_all)
        options = {"quoteAll": quote_all, "ignoreLeadingWhiteSpace": False, "ignoreTrailingWhiteSpace": False}
        frame.write.options(**options).csv(str(folder), header=True)
        [file] = folder.glob("*.csv")
        accepted, quarantined = read(tmp_path, file.read_bytes(), Reading(escape="\\"))
        assert ([row for row, _ in accepted], quarantined) == (rows, [])
