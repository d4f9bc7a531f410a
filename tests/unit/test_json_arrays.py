"""Arrays of JSON objects: cut into the objects that JSON has there, at any size of block, each with its byte and line."""

import gzip
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeupsert.config import Reading
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.files import survey
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.jsonarray import array_begin, cut_elements
from lakeupsert.landing.glimpse import preview, read_beginning
from lakeupsert.storage import LocalStore
from lakeupsert.table.evolution import evolve
from lakeupsert.table.spec import TableSpec
from tests.harness.specs import create

values = st.recursive(
    st.none() | st.integers() | st.text('ab"\\\\[]{},é \n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\\\]}', max_size=3), inner, max_size=3),
    max_leaves=8,
)
SPEC = create(
    pa.schema([("id", pa.string()), ("day", pa.date32()), ("v", pa.int64()), ("note", pa.string())]),
    table_id="t",
    key=["id"],
    order_by=["v"],
    partition_by=["day"],
    delete=None,
    stamped=False,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=5), st.sampled_from([None, 1]))
@pytest.mark.long
def test_elements_are_those_that_json_has(elements: list[Any], indent: int | None) -> None:
    text = json.dumps(elements, indent=indent, ensure_ascii=False).encode()
    begin = array_begin(text)
    assert begin is not None
    cut = cut_elements(text[begin:])
    assert [json.loads(t) for t in cut.texts if t] == elements
    assert (cut.closed, begin + cut.used) == (True, len(text))
    for element, start in zip(cut.texts, cut.starts, strict=True):
        assert text[begin + start :].startswith(element)


def put(root: Path, name: str, content: bytes) -> tuple[LocalStore, LandingInput]:
    (root / name).write_bytes(content)
    store = LocalStore(root)
    found = store.head(name)
    assert found is not None
    return store, LandingInput(name, found.size, found.etag, 0)


def read(
    root: Path, name: str, content: bytes, reading: Reading | None = None, spec: TableSpec = SPEC
) -> tuple[list[Any], list[Any]]:
    store, file = put(root, name, content)
    accepted, refused = [], []
    for rows in read_rows(store, file, reading or Reading(), RowRules(spec, 0)):
        accepted += rows.accepted.to_pylist()
        refused += rows.quarantined.to_pylist()
    return accepted, refused


ROWS = [{"id": f"k{i}", "day": "2024-03-01", "v": i, "note": '"]},{\\' if i % 2 else "é\n"} for i in range(8)]


@pytest.fixture(params=[1, 50, 1 << 20])
def _any_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


@pytest.mark.few(10)
@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("name", "pack"), [("a.json", bytes), ("a.json.gz", gzip.compress), ("a.jsonl", bytes)])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\n  "])
def test_rows_of_an_array(tmp_path: Path, indent: int | None, name: str, pack: Any, begin: str) -> None:
    text = begin + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n\n"
    accepted, refused = read(tmp_path, name, pack(text.encode()))
    assert refused == []
    assert [(r["id"], r["v"], r["note"]) for r in accepted] == [(r["id"], r["v"], r["note"]) for r in ROWS]
    whole = text.encode()
    assert all(whole[r["_lakeupsert_place"] :].startswith(b"{") for r in accepted)
    store, file = put(tmp_path, name, pack(text.encode()))
    assert (survey(store, file, Reading(), None, frozenset()).schema or pa.schema([])).names == [
        "id",
        "day",
        "v",
        "note",
    ]


@pytest.mark.usefixtures("_any_block_size")
def test_bad_elements_are_refused_alone_with_their_line(tmp_path: Path) -> None:
    good = json.dumps(ROWS[0], ensure_ascii=False)
    text = f'[\n{good},\n7,\n  {{"id":01}},\n{{"id":null,\n"day":"2024-03-01"}}, {good}\n]'
    accepted, refused = read(tmp_path, "a.json", text.encode())
    assert len(accepted) == 2
    assert [(r["reason_code"], r["line"], r["raw"]) for r in refused] == [
        ("malformed", 3, "7"),
        ("malformed", 4, '{"id":01}'),
        ("null_key", 5, '{"id":null,\n"day":"2024-03-01"}'),
    ]
    assert [text.encode()[r["position"] :].startswith(r["raw"].encode()) for r in refused] == [True] * 3


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize(
    ("text", "what"), [(json.dumps(ROWS)[:-20], "not closed"), (json.dumps(ROWS) + "\n[]", "the file continues")]
)
def test_a_part_of_an_array_is_not_taken(tmp_path: Path, text: str, what: str) -> None:
    """Of a file that is cut off, nobody knows what is missing."""
    with pytest.raises(UnreadableFileError, match=what):
        read(tmp_path, "a.json", text.encode())


@pytest.mark.parametrize("text", ["[]", " [ ]\n", "[\n\n]"])
def test_empty_array_has_no_rows(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, "a.json", text.encode()) == ([], [])


def test_events_in_an_array(tmp_path: Path) -> None:
    events = [{"op": "c", "before": None, "after": row} for row in ROWS[:3]]
    spec = evolve(SPEC, pa.schema([("__op", pa.string()), ("__ts_ms", pa.int64())]))
    accepted, refused = read(tmp_path, "a.json", json.dumps(events).encode(), Reading(envelope="debezium"), spec)
    assert ([r["id"] for r in accepted], refused) == (["k0", "k1", "k2"], [])


def test_lines_that_are_arrays_are_lines(tmp_path: Path) -> None:
    accepted, refused = read(tmp_path, "a.jsonl", b"[1]\n" + json.dumps(ROWS[0]).encode() + b"\n")
    assert (len(accepted), [r["line"] for r in refused]) == (1, [1])


def test_only_the_beginning_of_a_large_array_is_looked_at(tmp_path: Path) -> None:
    text = json.dumps(ROWS * 150, ensure_ascii=False).encode()
    store, file = put(tmp_path, "a.json", text)
    few = read_beginning(store, file, 1000, 2000)
    assert 10 < few.rows.num_rows < 40
    assert few.rows["id"].to_pylist() == [r["id"] for r in (ROWS * 150)[: few.rows.num_rows]]
    found = preview(store, file, Reading(), SPEC, 1000)
    assert found.partitions.keys() == {f"day={date(2024, 3, 1)}"}
    assert found.unreadable is None


def test_partitions_of_large_utf16_are_previewed(tmp_path: Path) -> None:
    """Its lines can't be read from the middle, as those of UTF-8 can."""
    text = "id,day,v,note\n" + "".join(f"{i},2024-03-0{1 + i % 2},1,\n" for i in range(2000))
    store, file = put(tmp_path, "a.csv", text.encode("utf-16"))
    found = preview(store, file, Reading(), SPEC, 1000)
    assert (found.partitions.keys(), found.unreadable) == ({"day=2024-03-01", "day=2024-03-02"}, None)
    assert found.share < 1


def test_memory_follows_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 10)
    store, file = put(tmp_path, "a.json", json.dumps(ROWS * 150).encode())
    most = max(
        rows.accepted.num_rows + rows.quarantined.num_rows
        for rows in read_rows(store, file, Reading(), RowRules(SPEC, 0))
    )
    assert most < 40


# ---------------------------------------------------------------- lines of other text


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_refused_rows_of_csv(tmp_path: Path, end: str) -> None:
    lines = [
        "id,day,v,note",
        "a,2024-03-01,1,",
        "",
        'b,2024-03-01,1,"two',
        'lines"',
        ",2024-03-01,1,",
        "too,few",
        "c,never,1,",
    ]
    accepted, refused = read(tmp_path, "a.csv", end.join(lines).encode("utf-8-sig"))
    assert [r["id"] for r in accepted] == ["a", "b"]
    assert [(r["reason_code"], r["line"]) for r in refused] == [("null_key", 6), ("malformed", 7), ("bad_partition", 8)]


@pytest.mark.usefixtures("_any_block_size")
def test_lines_of_refused_rows_of_json_lines(tmp_path: Path) -> None:
    good = json.dumps(ROWS[0]).encode()
    _, refused = read(
        tmp_path, "a.jsonl", b"\n".join([good, b"", b"{", good, b"[]", good, b'{"id":null,"day":"2024-03-01"}'])
    )
    assert [(r["reason_code"], r["line"]) for r in refused] == [("malformed", 3), ("malformed", 5), ("null_key", 7)]


def test_rows_of_typed_files_have_no_line(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": [None], "day": [date(2024, 3, 1)], "v": [1]}), tmp_path / "a.parquet")
    _, (row,) = read(tmp_path, "b.parquet", (tmp_path / "a.parquet").read_bytes())
    assert (row["position"], row["line"]) == (0, None)
