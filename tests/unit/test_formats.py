"""Landing formats beside Parquet, plain CSV and JSON lines: dialects, encodings, compression, Avro, ORC, envelopes.

What all formats have in common stands in test_landing.py.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tracemalloc
import uuid
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyarrow import orc

from lakeupsert.config import Reading
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.files import Survey, survey
from lakeupsert.landing.formats import avrofile, blocks, csvfile, delimited
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.glimpse import preview, read_beginning
from lakeupsert.storage import LocalStore
from lakeupsert.table.spec import TableSpec
from tests.harness.specs import create

RECEIVED = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp()) * 1_000_000
SCHEMA = pa.schema([("id", pa.string()), ("day", pa.date32()), ("at", pa.int64()), ("note", pa.string())])
HEADERLESS = ("id", "day", "at", "note")
PLAIN = "id,day,at,note\na,2026-01-02,1,é\nb,2026-01-02,2,\n"
ROWS = [("a", date(2026, 1, 2), 1, "é"), ("b", date(2026, 1, 2), 2, None)]


def spec_of(schema: Any = SCHEMA, **changes: Any) -> TableSpec:
    given: dict[str, Any] = {"key": ["id"], "order_by": ["at"], "partition_by": ["day"]}
    return create(schema, **{"table_id": "t", "delete": None, "stamped": False, **given, **changes})


class Landing:
    """A landing zone, and how its files are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root)
        self.reading = Reading()

    def put(self, name: str, content: bytes | str) -> LandingInput:
        (self.root / name).write_bytes(content.encode() if isinstance(content, str) else content)
        found = self.store.head(name)
        assert found is not None
        return LandingInput(name, found.size, found.etag, 0)

    def read(self, file: LandingInput, spec: TableSpec, sha256: Any = None) -> tuple[list[Any], list[dict[str, Any]]]:
        """Accepted rows with their places, by place, and quarantined rows."""
        accepted, quarantined = [], []
        for rows in read_rows(self.store, file, self.reading, RowRules(spec, RECEIVED), sha256):
            partitions = rows.accepted["_lakeupsert_partition"].to_pylist()
            for row, partition in zip(rows.accepted.to_pylist(), partitions, strict=True):
                row["day"] = date.fromisoformat(partition.removeprefix("day="))
                accepted.append(row)
            quarantined += rows.quarantined.to_pylist()
        return accepted, quarantined

    def rows(self, file: LandingInput) -> list[tuple[Any, ...]]:
        """The rows of a file of which none is refused."""
        accepted, quarantined = self.read(file, spec_of())
        assert quarantined == []
        return [tuple(row[name] for name in SCHEMA.names) for row in accepted]

    def refused(self, file: LandingInput, spec: TableSpec) -> list[tuple[int, str, str]]:
        _, quarantined = self.read(file, spec)
        return [(q["position"], q["reason"], q["raw"]) for q in quarantined]

    def survey(self, file: LandingInput, known: Any = None) -> Survey:
        return survey(self.store, file, self.reading, known, frozenset(["id"]))

    def columns(self, file: LandingInput) -> dict[str, Any]:
        found = self.survey(file)
        assert found.unreadable is None
        return dict(zip(found.schema.names, found.schema.types, strict=True))

    def unreadable(self, file: LandingInput) -> str:
        """Why the file as a whole is set aside, once it is read."""
        with pytest.raises(UnreadableFileError) as raised:
            self.read(file, spec_of())
        assert raised.value.path == file.path
        return raised.value.reason


@pytest.fixture
def landing(tmp_path: Path) -> Landing:
    return Landing(tmp_path)


@pytest.fixture(params=[1, 7, 64, 1 << 20])
def _any_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", request.param)


# ---------------------------------------------------------------- dialects


DIALECTS: list[tuple[Reading, str]] = [
    (Reading(), PLAIN),
    (Reading(delimiter=";"), PLAIN.replace(",", ";")),
    (Reading(delimiter="\t"), PLAIN.replace(",", "\t")),
    (Reading(delimiter="|", quote="'"), PLAIN.replace(",", "|").replace("a|", "'a'|")),
    (Reading(delimiter="\x01", quote="", null="\\N"), PLAIN.replace(",", "\x01").replace("2\x01\n", "2\x01\\N\n")),
    (Reading(header=False, columns=HEADERLESS), PLAIN.partition("\n")[2]),
    (Reading(format="delimited", columns=HEADERLESS), PLAIN.partition("\n")[2]),
    (Reading(format="delimited", header=True), PLAIN),
    (Reading(format="delimited", header=True, delimiter=r"\|"), PLAIN.replace(",", "|")),
    (Reading(format="delimited", header=True, delimiter=r" *\|\| *"), PLAIN.replace(",", " ||  ")),
    (Reading(format="delimited", columns=HEADERLESS, delimiter="§"), PLAIN.partition("\n")[2].replace(",", "§")),
    (
        Reading(format="delimited", header=True, delimiter="[;,]", null="-"),
        PLAIN.replace("day,", "day;").replace("2,\n", "2,-\n"),
    ),
]


@pytest.mark.few(24)
@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize(("reading", "text"), DIALECTS)
@pytest.mark.parametrize("lines", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_dialects_give_the_same_rows(landing: Landing, reading: Reading, text: str, lines: str, mark: str) -> None:
    landing.reading = reading
    file = landing.put("a.csv", mark + text.replace("\n", lines * 2))
    assert landing.rows(file) == ROWS
    found = landing.columns(file)
    assert list(found) == SCHEMA.names
    assert found["at"] == pa.int64()


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("format", ["csv", "delimited"])
def test_columns_without_names_are_called_as_spark_calls_them(landing: Landing, format: Any) -> None:
    landing.reading = Reading(format=format, header=False)
    file = landing.put("a", "\n\nx,2026-01-02,1\ny,2026-01-02,2,3\nz,2026-01-02,3\n")
    spec = spec_of(
        pa.schema([("_c0", pa.string()), ("_c1", pa.date32()), ("_c2", pa.int64())]),
        key=["_c0"],
        partition_by=["_c1"],
        order_by=["_c2"],
    )
    assert list(landing.columns(file)) == ["_c0", "_c1", "_c2"]
    found = [
        rows.accepted["_c0"].to_pylist()
        for rows in read_rows(landing.store, file, landing.reading, RowRules(spec, RECEIVED))
    ]
    assert [k for keys in found for k in keys] == ["x", "z"]
    landing.reading = Reading(format=format, header=True)
    file = landing.put("b", ",,_C0,id,_c1,\n0,1,2,3,4,5\n")
    assert list(landing.columns(file)) == ["_c6", "_c7", "_C0", "id", "_c1", "_c5"]


@pytest.mark.parametrize(
    ("reading", "where"),
    [
        (Reading(), "the header"),
        (Reading(header=False, columns=HEADERLESS), "`columns`"),
        (Reading(format="delimited", header=True), "the header"),
        (Reading(format="delimited", columns=HEADERLESS, delimiter="[,]"), "`columns`"),
    ],
)
def test_record_of_another_number_of_fields_is_refused_at_its_place(
    landing: Landing, reading: Reading, where: str
) -> None:
    landing.reading = reading
    begin = PLAIN if reading.has_header else PLAIN.partition("\n")[2]
    text = f"{begin}c,2026-01-02,3\nd,2026-01-02,4,x,y\ne,2026-01-02,5,é\n"
    accepted, quarantined = landing.read(landing.put("a.csv", text), spec_of())
    assert [row["id"] for row in accepted] == ["a", "b", "e"]
    assert [row["_lakeupsert_place"] for row in accepted][-1] == text.encode().index(b"e,2026")
    assert [(q["reason_code"], q["position"], q["raw"], q["reason"]) for q in quarantined] == [
        ("malformed", text.encode().index(b"\nc,") + 1, "c,2026-01-02,3", f"3 fields, but {where} has 4."),
        ("malformed", text.encode().index(b"\nd,") + 1, "d,2026-01-02,4,x,y", f"5 fields, but {where} has 4."),
    ]


@pytest.mark.parametrize(
    ("pattern", "sign"),
    [
        (",", ","), (r"\|", "|"), ("\t", "\t"), (r"\.", "."), ("#", "#"),
        (".", None), ("|", None), (r"\d", None), (r"\t", None), ("::", None), ("[,]", None), ("§", None),
    ],
)  # fmt: skip
def test_pattern_that_means_one_character_is_read_as_csv_is(pattern: str, sign: str | None) -> None:
    dialect, _ = delimited.choose_dialect(Reading(format="delimited", delimiter=pattern), b"")
    assert (dialect.reading.delimiter if isinstance(dialect, csvfile.Csv) else None) == sign


def test_without_quotes_a_quote_is_a_character(landing: Landing) -> None:
    for reading in (Reading(quote=""), Reading(format="delimited", header=True)):
        landing.reading = reading
        text = 'id,day,at,note\n"a,2026-01-02,1,5" pipe\nb",2026-01-02,2,"x"\n'
        assert landing.rows(landing.put("a.csv", text)) == [
            ('"a', date(2026, 1, 2), 1, '5" pipe'),
            ('b"', date(2026, 1, 2), 2, '"x"'),
        ]


def test_other_quotes_hold_delimiters_quotes_and_line_ends(landing: Landing) -> None:
    landing.reading = Reading(delimiter="|", quote="'")
    text = "id|day|at|note\na|2026-01-02|1|'x|''y''\n\"z'\nb|2026-01-02|2|5' pipe\n"
    rows = landing.rows(landing.put("a.csv", text))
    assert [row[3] for row in rows] == ["x|'y'\n\"z", "5' pipe"]


def test_quote_that_is_never_closed_refuses_its_record_also_without_a_header(landing: Landing) -> None:
    landing.reading = Reading(header=False, columns=HEADERLESS)
    accepted, quarantined = landing.read(landing.put("a.csv", 'a,2026-01-02,1,x\nb,"2026\nc,d\n'), spec_of())
    assert [row["id"] for row in accepted] == ["a"]
    assert [(q["position"], q["reason"]) for q in quarantined] == [(17, "A quote is opened and never closed.")]


# ---------------------------------------------------------------- encodings


@pytest.mark.few(28)
@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.csv.gz"])
def test_encodings_give_the_same_rows_at_the_same_places(landing: Landing, encoding: str, name: str) -> None:
    text = PLAIN
    if name == "a.jsonl":
        lines = [{"id": i, "day": str(d), "at": at, "note": note} for i, d, at, note in ROWS]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    pack = gzip.compress if name.endswith(".gz") else bytes
    expected, _ = landing.read(landing.put(name, pack(text.encode())), spec_of())
    landing.reading = Reading(encoding=encoding)
    file = landing.put(name, pack(text.encode(encoding)))
    mark = 3 if encoding == "utf-8-sig" else 0
    found, quarantined = landing.read(file, spec_of())
    assert quarantined == []
    assert [{**row, "_lakeupsert_place": row["_lakeupsert_place"] - mark} for row in found] == expected
    assert list(landing.columns(file)) == SCHEMA.names


@pytest.mark.parametrize(
    ("encoding", "bad", "raw"),
    [
        ("utf-8", b"b\xff,2026-01-02,2,", "b\\xff,2026-01-02,2,"),
        ("cp1252", b"b\x81,2026-01-02,2,", "b\\xff\\x81,2026-01-02,2,"),
        (
            "utf-16-le",
            "b".encode("utf-16-le") + b"\x41\xd8" + ",2026-01-02,2,".encode("utf-16-le"),
            "b\\xff\\xc1\\xff\\xd8",
        ),
    ],
)
def test_byte_that_the_encoding_has_not_refuses_its_record_alone(
    landing: Landing, encoding: str, bad: bytes, raw: str
) -> None:
    for reading in (Reading(encoding=encoding), Reading(format="delimited", encoding=encoding, header=True)):
        landing.reading = reading
        before, after = ("id,day,at,note\na,2026-01-02,1,é\n", "c,2026-01-02,3,\n")
        line_end = "\n".encode(encoding)
        file = landing.put("a.csv", before.encode(encoding) + bad + line_end + after.encode(encoding))
        accepted, quarantined = landing.read(file, spec_of())
        assert [row["id"] for row in accepted] == ["a", "c"]
        assert [(q["reason_code"], q["reason"], q["position"]) for q in quarantined] == [
            ("malformed", f"Not {encoding.upper()}.", len(before.encode()))
        ]
        assert quarantined[0]["raw"].startswith(raw)


def test_text_that_ends_within_a_character_refuses_its_record_alone(landing: Landing) -> None:
    landing.reading = Reading(encoding="utf-16-le")
    file = landing.put("a.csv", (PLAIN + "c,2026-01-02,3,x").encode("utf-16-le")[:-1])
    accepted, quarantined = landing.read(file, spec_of())
    assert [row["id"] for row in accepted] == ["a", "b"]
    assert [q["reason"] for q in quarantined] == ["Not UTF-16-LE."]


# ---------------------------------------------------------------- compression


def zstd(data: bytes) -> bytes:
    return _through_arrow(data, "zstd")


def lz4(data: bytes) -> bytes:
    return _through_arrow(data, "lz4")


def _through_arrow(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as packed:
        packed.write(data)
    packed = sink.getvalue().to_pybytes()
    return bytes(packed)


class _Pipe(io.BytesIO):
    def tell(self) -> int:
        raise OSError("a pipe has no places")


def zipped(data: bytes, *others: bytes, method: int = zipfile.ZIP_DEFLATED, streamed: bool = False) -> bytes:
    """An archive with a member for each; ``streamed``: sizes are behind the members, as in what a pipe gets."""
    sink = _Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for i, member in enumerate((data, *others)):
            archive.writestr(f"{i}.csv", member)
    return sink.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".lz4": lz4, ".zip": zipped,
}  # fmt: skip
each_compression = pytest.mark.parametrize("ending", PACK)


@pytest.mark.few(12)
@each_compression
@pytest.mark.usefixtures("_any_block_size")
def test_compressed_text_is_read_at_the_places_of_the_text(landing: Landing, ending: str) -> None:
    text = PLAIN.encode() + b"c,2026-01-02\n"
    plain = landing.read(landing.put("a.csv", text), spec_of())
    packed = PACK[ending](text)
    parts = PACK[ending](text[:20]) + PACK[ending](text[20:])
    for content in (packed, zipped(text, streamed=True) if ending == ".zip" else parts):
        file = landing.put(f"a.CSV{ending}", content)
        sha256 = hashlib.sha256()
        accepted, quarantined = landing.read(file, spec_of(), sha256)
        assert accepted == plain[0]
        assert [{**q, "file": "a.csv"} for q in quarantined] == plain[1]
        assert sha256.hexdigest() == hashlib.sha256(content).hexdigest()
    assert landing.columns(file) == landing.columns(landing.put("a.csv", text))


def test_zip_is_read_if_it_has_one_file(landing: Landing) -> None:
    text = PLAIN.encode()
    expected = landing.read(landing.put("a.csv", text), spec_of())[0]
    for content in (zipped(text, method=zipfile.ZIP_STORED), zipped(text, streamed=True), zipped(text)):
        assert landing.read(landing.put("a.csv.zip", content), spec_of())[0] == expected
    empty = landing.put("a.csv.zip", zipped(b"", method=zipfile.ZIP_STORED))
    assert landing.columns(empty) == landing.columns(landing.put("a.csv", b""))
    whole = zipped(text)
    wrong = {
        "several files": (
            zipped(text, text),
            zipped(text, text, streamed=True),
            zipped(b"", text, method=zipfile.ZIP_STORED),
        ),
        "no member": (zipped(b"")[-22:],),
        "encrypted": (whole[:6] + b"\x01" + whole[7:],),
        "method 12": (zipped(text, method=zipfile.ZIP_BZIP2),),
        "checksum": (zipped(text, method=zipfile.ZIP_STORED).replace(b"2026", b"2027", 1),),
        "Truncated": (whole[:20], whole[:60], whole[: whole.index(b"PK\x01\x02")]),
        "not a zip archive": (text * 3,),
    }
    for reason, contents in wrong.items():
        for content in contents:
            assert reason in landing.unreadable(landing.put("a.csv.zip", content))


@pytest.mark.few(12)
@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("ending", ["", *PACK])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_json_lines_that_name_a_column_late_are_read_again(landing: Landing, ending: str, encoding: str) -> None:
    landing.reading = Reading(encoding=encoding)
    line = '{"id":"a","day":"2026-01-02"}\n'
    lines = line * 3 + '{"id":"b","day":"2026-01-02","at":1}\n' + line * 30
    content = PACK.get(ending, bytes)(lines.encode(encoding))
    sha256 = hashlib.sha256()
    accepted, _ = landing.read(landing.put(f"a.jsonl{ending}", content), spec_of(), sha256)
    assert [row["at"] for row in accepted] == [None, None, None, 1, *[None] * 30]
    assert [row["_lakeupsert_place"] for row in accepted][:4] == [i * len(line) for i in range(4)]
    assert sha256.hexdigest() == hashlib.sha256(content).hexdigest()


@each_compression
def test_damaged_archive_is_unreadable(landing: Landing, ending: str) -> None:
    text = b"".join(b"%d,2026-01-02,1,%s\n" % (i, hashlib.sha256(b"%d" % i).hexdigest().encode()) for i in range(500))
    packed = PACK[ending](b"id,day,at,note\n" + text)
    kind = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4", ".zip": "zip"}[ending]
    for content in (packed[: len(packed) // 2], packed[:-1], packed + b"something else", b"not compressed at all"):
        reason = landing.unreadable(landing.put(f"a.csv{ending}", content))
        assert reason.startswith(f"Not readable as {kind} ({len(content)} bytes): ")
        assert landing.survey(landing.put(f"b.csv{ending}", content)).unreadable


def test_empty_files_hold_no_rows(landing: Landing) -> None:
    for name in ("a.csv", "a.csv.gz", "a.csv.xz", "a.jsonl.zst"):
        assert landing.rows(landing.put(name, b"")) == []
    assert landing.rows(landing.put("a.csv.gz", gzip.compress(b""))) == []
    landing.reading = Reading(format="delimited")
    assert landing.rows(landing.put("a", b"")) == []


@pytest.mark.long
@pytest.mark.parametrize("ending", [pytest.param(e, marks=pytest.mark.long) if e != ".gz" else e for e in PACK])
def test_memory_follows_the_block_and_not_what_an_archive_unpacks_to(
    landing: Landing, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(blocks, "LONGEST_RECORD", 1 << 18)
    row = b"x" * 99 + b",2026-01-02,1,\n"
    bomb = landing.put(f"a.csv{ending}", PACK[ending](b"id,day,at,note\n" + row * 200_000))
    endless = landing.put(f"b.csv{ending}", PACK[ending](b"id,day,at,note\n" + b"x" * 60_000_000))
    tracemalloc.start()
    try:
        rules = RowRules(spec_of(), RECEIVED)
        rows = sum(r.accepted.num_rows for r in read_rows(landing.store, bomb, landing.reading, rules))
        assert "longer than" in landing.unreadable(endless) or "more than" in landing.unreadable(endless)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 200_000
    assert peak < 30_000_000


def test_xz_may_not_take_more_memory_than_any_level_of_xz_makes_it(
    landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.landing.formats.unpacked.XZ_MEMORY", 1 << 20)
    reason = landing.unreadable(landing.put("a.csv.xz", lzma.compress(PLAIN.encode(), preset=9)))
    assert "emory" in reason


# ---------------------------------------------------------------- Avro


def avro(schema: Any, rows: list[Any], codec: str = "null", **options: Any) -> bytes:
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(schema), rows, codec=codec, **options)
    return out.getvalue()


def record(name: str = "r", **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


AVRO = record(id="string", day={"type": "int", "logicalType": "date"}, at="long", note=["null", "string"])
AVRO_ROWS = [dict(zip(SCHEMA.names, row, strict=True)) for row in ROWS]


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("sync", [1, 16_000])
def test_avro_gives_rows_at_their_index(landing: Landing, sync: int) -> None:
    rows = [{**AVRO_ROWS[i % 2], "at": i} for i in range(50)]
    file = landing.put("a.avro", avro(AVRO, rows, sync_interval=sync))
    accepted, quarantined = landing.read(file, spec_of())
    assert quarantined == []
    assert [row["_lakeupsert_place"] for row in accepted] == [row["at"] for row in accepted] == list(range(50))
    assert landing.columns(file) == {name: SCHEMA.field(name).type for name in SCHEMA.names}
    assert landing.survey(file).typed


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_avro_is_read_in_the_codecs_that_python_writes(landing: Landing, codec: str) -> None:
    sha256 = hashlib.sha256()
    content = avro(AVRO, AVRO_ROWS, codec)
    file = landing.put("a.avro", content)
    landing.read(file, spec_of(), sha256)
    assert landing.rows(file) == ROWS
    assert sha256.hexdigest() == hashlib.sha256(content).hexdigest()


def recoded(content: bytes, codec: str, pack: Callable[[bytes], bytes]) -> bytes:
    """A container file of codec null in another one."""
    text = io.BytesIO(content)
    head = avrofile.HEADER
    header: Any = fastavro.schemaless_reader(text, head, None)
    out = io.BytesIO()
    header["meta"]["avro.codec"] = codec.encode()
    fastavro.schemaless_writer(out, head, header)
    while (count := avrofile._number(text)) is not None:
        size = avrofile._number(text)
        data = pack(text.read(size))
        fastavro.schemaless_writer(out, "long", count)
        fastavro.schemaless_writer(out, "bytes", data)
        out.write(text.read(16))
    return out.getvalue()


def snappy(data: bytes) -> bytes:
    return bytes(pa.compress(data, "snappy", asbytes=True)) + zlib.crc32(data).to_bytes(4, "big")


@pytest.mark.parametrize(("codec", "pack"), [("snappy", snappy), ("zstandard", zstd)])
def test_avro_is_read_in_the_codecs_of_spark_and_flink(
    landing: Landing, codec: str, pack: Callable[[bytes], bytes]
) -> None:
    content = recoded(avro(AVRO, AVRO_ROWS), codec, pack)
    assert landing.rows(landing.put("a.avro", content)) == ROWS


def test_types_of_avro_are_kept(landing: Landing) -> None:
    nested = record(
        "inner",
        x=["null", "int"],
        t={"type": "long", "logicalType": "timestamp-millis"},
        d={"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2},
    )
    types: dict[str, tuple[Any, Any, Any, Any]] = {
        # the type, the value as fastavro writes it, the column, and what is in it
        "flag": ("boolean", True, pa.bool_(), True),
        "i": ("int", -7, pa.int32(), -7),
        "l": ("long", 2**62, pa.int64(), 2**62),
        "f": ("float", 0.5, pa.float32(), 0.5),
        "g": ("double", 0.1, pa.float64(), 0.1),
        "b": ("bytes", b"\0\xff", pa.binary(), b"\0\xff"),
        "s": (["null", "string"], None, pa.string(), None),
        "both": (["int", "null", "long"], 5, pa.int64(), 5),
        "fixed": ({"type": "fixed", "name": "fx", "size": 3}, b"abc", pa.binary(3), b"abc"),
        "enum": ({"type": "enum", "name": "en", "symbols": ["A", "B"]}, "B", pa.string(), "B"),
        "again": ("en", "A", pa.string(), "A"),
        "day": ({"type": "int", "logicalType": "date"}, date(1, 1, 1), pa.date32(), date(1, 1, 1)),
        "far": (
            {"type": "long", "logicalType": "timestamp-micros"},
            253_402_300_799_999_999,
            pa.timestamp("us", "UTC"),
            datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
        ),
        "beyond": (
            {"type": "long", "logicalType": "timestamp-millis"},
            2**60,
            pa.timestamp("ms", "UTC"),
            2**60,
        ),
        "nanos": ({"type": "long", "logicalType": "timestamp-nanos"}, 1, pa.timestamp("ns", "UTC"), 1),
        "local": ({"type": "long", "logicalType": "local-timestamp-micros"}, 1, pa.timestamp("us"), 1),
        "time": ({"type": "int", "logicalType": "time-millis"}, 1, pa.time32("ms"), 1),
        "micros": ({"type": "long", "logicalType": "time-micros"}, 1, pa.time64("us"), 1),
        "money": (
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 10},
            Decimal("-1234567890123456789012345678.0123456789"),
            pa.decimal128(38, 10),
            Decimal("-1234567890123456789012345678.0123456789"),
        ),
        "wide": (
            {"type": "fixed", "name": "fw", "size": 20, "logicalType": "decimal", "precision": 40, "scale": 1},
            Decimal("1.5"),
            pa.decimal256(40, 1),
            Decimal("1.5"),
        ),
        "u": (
            {"type": "string", "logicalType": "uuid"},
            str(uuid.UUID(int=7)),
            pa.string(),
            str(uuid.UUID(int=7)),
        ),
        "ub": (
            {"type": "fixed", "name": "ub", "size": 16, "logicalType": "uuid"},
            uuid.UUID(int=7).bytes,
            pa.string(),
            str(uuid.UUID(int=7)),
        ),
        "list": ({"type": "array", "items": ["null", "long"]}, [1, None], pa.list_(pa.int64()), [1, None]),
        "map": (
            {"type": "map", "values": {"type": "int", "logicalType": "date"}},
            {"k": date(2020, 1, 1)},
            pa.map_(pa.string(), pa.date32()),
            [("k", date(2020, 1, 1))],
        ),
        "deep": (
            ["null", {"type": "array", "items": nested}],
            [{"x": None, "t": datetime(2020, 1, 1, tzinfo=UTC), "d": Decimal("1.50")}],
            pa.list_(pa.struct([("x", pa.int32()), ("t", pa.timestamp("ms", "UTC")), ("d", pa.decimal128(5, 2))])),
            [{"x": None, "t": datetime(2020, 1, 1, tzinfo=UTC), "d": Decimal("1.50")}],
        ),
        "one": (["null", "inner"], None, None, None),
    }
    schema = record(**{name: t[0] for name, t in types.items()})
    row = {name: t[1] for name, t in types.items()}
    plain = avrofile.without(schema, "logicalType")
    pairs = zip(schema["fields"], plain["fields"], strict=True)
    as_written = {**schema, "fields": [p if f["name"] in _RAW else f for f, p in pairs]}
    file = landing.put("a.avro", with_schema(avro(as_written, [row]), schema))
    found = landing.columns(file)
    for name, (_, _, type_, _) in types.items():
        if type_ is not None:
            assert found[name] == type_, name
    assert found["one"] == found["deep"].value_type
    rows = read_beginning(landing.store, file, 10, 1).rows
    for name, (_, _, _, value) in types.items():
        column = rows[name].combine_chunks()
        if isinstance(value, int) and not isinstance(value, bool) and pa.types.is_temporal(column.type):
            bits = pa.int32() if column.type.bit_width == 32 else pa.int64()
            assert column.view(bits).to_pylist() == [value], name
        else:
            assert column.to_pylist() == [value], name


_RAW = ("far", "beyond", "nanos", "local", "time", "micros", "ub")
"""Fields that are written as plain numbers and bytes: fastavro's own way would end before these values."""


def with_schema(content: bytes, schema: Any) -> bytes:
    """The same records under another schema in the header."""
    text = io.BytesIO(content)
    header: Any = fastavro.schemaless_reader(text, avrofile.HEADER, None)
    header["meta"]["avro.schema"] = json.dumps(schema).encode()
    out = io.BytesIO()
    fastavro.schemaless_writer(out, avrofile.HEADER, header)
    return out.getvalue() + text.read()


def test_default_that_does_not_fit_its_type_is_none_of_our_business(landing: Landing) -> None:
    schema = {**AVRO, "fields": [{**f, "default": {}} for f in AVRO["fields"]]}
    assert landing.rows(landing.put("a.avro", with_schema(avro(AVRO, AVRO_ROWS), schema))) == ROWS


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.xz", "a.utf16", "a.avro"])
def test_what_is_read_bit_by_bit_is_fetched_in_few_parts(
    landing: Landing, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a remote store each read is a request."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    rows = [{"id": hashlib.sha256(b"%d" % i).hexdigest(), "day": date(2026, 1, 1), "at": i} for i in range(8_000)]
    text = "id,day,at\n" + "".join(f"{r['id']},{r['day']},{r['at']}\n" for r in rows)
    landing.reading = Reading(format="csv", encoding="utf-16") if name == "a.utf16" else Reading()
    file = landing.put(
        name,
        {
            "a.csv.gz": lambda: gzip.compress(text.encode()),
            "a.csv.xz": lambda: lzma.compress(text.encode(), preset=0),
            "a.utf16": lambda: text.encode("utf-16"),
            "a.avro": lambda: avro(AVRO, rows),
        }[name](),
    )
    asked: list[int] = []

    class Counted(AbstractContextManager["Counted"]):
        def __init__(self, source: Any) -> None:
            self._source = source
            self.size = source.size

        def __exit__(self, *raised: object) -> None:
            self._source.close()

        def read(self, size: int) -> bytes:
            asked.append(size)
            return self._source.read(size)

        def seek(self, place: int) -> None:
            self._source.seek(place)

    def counted(self: LocalStore, name: str, etag: str | None = None) -> Counted:
        return Counted(opened(self, name, etag))

    opened = LocalStore.open
    monkeypatch.setattr(LocalStore, "open", counted)
    accepted, _ = landing.read(file, spec_of())
    assert len(accepted) == 8_000
    assert len(asked) <= 3 + file.size / (1 << 16) + 2


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (record(id="string", x=["int", "string"]), "a union of int, string"),
        (record("node", id="string", next=["null", "node"]), "contains itself"),
        (record(id="string", x=record("empty")), "without fields"),
    ],
)
def test_avro_that_no_table_can_hold_is_unreadable(landing: Landing, schema: Any, told: str) -> None:
    assert told in landing.unreadable(landing.put("a.avro", avro(schema, [])))
    assert told in str(landing.survey(landing.put("a.avro", avro(schema, []))).unreadable)


def test_records_without_their_envelope_or_of_no_record_are_unreadable(landing: Landing) -> None:
    assert "no records" in landing.unreadable(landing.put("a.avro", avro("string", ["x"])))
    landing.reading = Reading(envelope="debezium")
    assert "change events" in landing.unreadable(landing.put("a.avro", avro(AVRO, AVRO_ROWS)))


def test_damaged_avro_is_unreadable_and_never_other_rows(landing: Landing) -> None:
    rows = [{**AVRO_ROWS[0], "at": i} for i in range(100)]
    content = avro(AVRO, rows, sync_interval=200)
    whole = landing.rows(landing.put("a.avro", content))
    header = len(avro(AVRO, []))
    for size in (0, 3, 20, header - 1, *range(header + 1, len(content), 97)):
        file = landing.put("a.avro", content[:size])
        if content[size - 16 : size] == content[-16:]:  # cut behind a block: such a file is whole
            assert landing.rows(file) == whole[: len(landing.rows(file))]
        else:
            assert landing.unreadable(file).startswith("Not readable as Avro"), size
    assert landing.unreadable(landing.put("a.avro", content[:-1] + bytes([content[-1] ^ 1])))
    assert "checksum" in landing.unreadable(
        landing.put("a.avro", recoded(content, "snappy", lambda d: snappy(d)[:-1] + b"?"))
    )
    assert "codec 'lzo'" in landing.unreadable(landing.put("a.avro", recoded(content, "lzo", bytes)))
    assert landing.unreadable(landing.put("a.avro", b"PAR1" * 100))


@pytest.mark.parametrize(
    ("codec", "pack"),
    [
        ("deflate", lambda d: zlib.compress(d)[2:-4]),
        ("bzip2", bz2.compress),
        ("xz", lzma.compress),
        ("zstandard", zstd),
        ("snappy", snappy),
    ],
)
@pytest.mark.long
def test_block_of_avro_that_unpacks_to_too_much_is_unreadable(
    landing: Landing, monkeypatch: pytest.MonkeyPatch, codec: str, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(avrofile, "LARGEST_BLOCK", 1 << 16)
    content = recoded(avro(AVRO, [{**AVRO_ROWS[0], "note": "x" * (1 << 26)}]), codec, pack)
    file = landing.put("a.avro", content)
    tracemalloc.start()
    try:
        assert "a block of" in landing.unreadable(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 25


# ---------------------------------------------------------------- ORC


def orc_of(table: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    orc.write_table(table, out, **options)
    return out.getvalue()


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.long
def test_orc_gives_rows_at_their_index_in_the_file(landing: Landing) -> None:
    rows = [{**AVRO_ROWS[i % 2], "at": i, "note": "x" * 5000} for i in range(2000)]
    content = orc_of(pa.Table.from_pylist(rows, SCHEMA), stripe_size=1 << 16, compression="uncompressed")
    assert orc.ORCFile(pa.BufferReader(content)).nstripes > 1
    file = landing.put("a.orc", content)
    sha256 = hashlib.sha256()
    found = list(read_rows(landing.store, file, landing.reading, RowRules(spec_of(), RECEIVED), sha256))
    places = [place for r in found for place in r.accepted["_lakeupsert_place"].to_pylist()]
    assert places == [at for r in found for at in r.accepted["at"].to_pylist()] == list(range(2000))
    assert sha256.hexdigest() == hashlib.sha256(content).hexdigest()
    assert landing.columns(file) == {name: SCHEMA.field(name).type for name in SCHEMA.names}
    assert landing.survey(file).typed


def test_types_of_orc_are_kept(landing: Landing) -> None:
    types = {
        "i": pa.int8(),
        "f": pa.float32(),
        "n": pa.decimal128(38, 10),
        "b": pa.binary(),
        "ts": pa.timestamp("ns"),
        "z": pa.timestamp("ns", "UTC"),
        "list": pa.list_(pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])),
        "map": pa.map_(pa.string(), pa.float64()),
    }
    row = {
        "i": 1, "f": 0.5, "n": Decimal("-12.3450000000"), "b": b"\xff", "ts": datetime(1900, 1, 1), "map": [("k", 1.5)],
        "z": datetime(2020, 1, 1, tzinfo=UTC), "list": [{"x": None, "y": ["é"]}],
    }  # fmt: skip
    table = pa.Table.from_pylist([row, dict.fromkeys(types)], pa.schema(list(types.items())))
    file = landing.put("a.orc", orc_of(table))
    assert landing.columns(file) == types
    assert read_beginning(landing.store, file, 10, 1).rows.equals(table)


def test_timestamp_of_orc_that_nanoseconds_can_not_hold_is_unreadable_and_no_other_time(landing: Landing) -> None:
    far = pa.table({"id": ["a"], "at": pa.array([datetime(9999, 12, 31)], pa.timestamp("us"))})
    assert "out of range" in landing.unreadable(landing.put("a.orc", orc_of(far)))


def test_damaged_orc_is_unreadable(landing: Landing) -> None:
    content = orc_of(pa.Table.from_pylist(AVRO_ROWS, SCHEMA), compression="uncompressed")
    at = content.index(b"\n\x06\x08\x06\x10\x00")  # a message in the footer of a stripe
    too_long = content[:at] + b"\n" + b"\xff" * 10 + b"\x01" + content[at + 12 :]
    for damaged in (b"", b"ORC", content[:-1], content[: len(content) // 2], b"x" * 300, too_long):
        assert landing.unreadable(landing.put("a.orc", damaged)).startswith("Not readable as ORC")


# ---------------------------------------------------------------- envelopes


SOURCE = {"version": "3.0", "lsn": 17, "ts_ms": 5, "table": "orders", "snapshot": None, "nested": {"x": 1}}
EXTRA = {"__source_lsn": 17, "__source_table": "orders", "__source_snapshot": None}
ENVELOPED = pa.schema([*SCHEMA, ("__op", pa.string()), ("__ts_ms", pa.int64()), ("__source_lsn", pa.int64())])


def change(op: str, before: Any = None, after: Any = None, **more: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op, "ts_ms": 9, "source": SOURCE, **more}


def row_of(id_: str, at: int) -> dict[str, Any]:
    return {"id": id_, "day": "2026-01-02", "at": at, "note": None}


EVENTS = [change("c", None, row_of("a", 1)), change("u", row_of("a", 1), row_of("a", 2)), change("d", row_of("a", 2))]


def enveloped(*columns: str) -> TableSpec:
    names = [*SCHEMA.names, "__op", "__ts_ms", *(f"__source_{n}" for n in SOURCE if n != "nested"), *columns]
    types = {**{f.name: f.type for f in SCHEMA}, "__ts_ms": pa.int64(), "__source_lsn": pa.int64()}
    return spec_of(pa.schema([(n, types.get(n, pa.string())) for n in names]))


@pytest.mark.usefixtures("_any_block_size")
@pytest.mark.parametrize("wrapped", [False, True])
def test_debezium_gives_the_row_after_the_change_and_of_a_delete_the_one_before(
    landing: Landing, wrapped: bool
) -> None:
    landing.reading = Reading(envelope="debezium")
    events = [
        {"schema": {"type": "struct"}, "payload": e} if wrapped else e
        for e in (*EVENTS, change("r", None, row_of("b", 3)))
    ]
    tombstone: Any = {"schema": None, "payload": None} if wrapped else None
    text = "".join(json.dumps(e) + "\n" for e in (*events, tombstone))
    file = landing.put("a.jsonl", text)
    accepted, quarantined = landing.read(file, enveloped())
    assert quarantined == []
    assert [(r["id"], r["at"], r["__op"], r["__ts_ms"], r["__source_lsn"], r["__source_table"]) for r in accepted] == [
        ("a", 1, "c", 9, 17, "orders"),
        ("a", 2, "u", 9, 17, "orders"),
        ("a", 2, "d", 9, 17, "orders"),
        ("b", 3, "r", 9, 17, "orders"),
    ]
    assert [r["_lakeupsert_place"] for r in accepted] == [0, *(i + 1 for i, c in enumerate(text) if c == "\n")][:4]
    found = landing.columns(file)
    assert found["__source_lsn"] == found["__ts_ms"] == pa.int64()
    assert "__source_nested" not in found


def test_what_is_no_change_event_is_refused_with_its_reason(landing: Landing) -> None:
    landing.reading = Reading(envelope="debezium")
    lines = [
        json.dumps(change("t")), "[]", "{", json.dumps({"id": 1}), json.dumps(change("c", None, "text")),
        json.dumps({"op": "m", "message": {}}), json.dumps(change("d")),
    ]  # fmt: skip
    accepted, quarantined = landing.read(landing.put("a.jsonl", "\n".join(lines)), enveloped())
    assert accepted == []
    assert [(q["reason_code"], q["reason"].partition(":")[0]) for q in quarantined] == [
        ("truncate", "Table orders was truncated at the source (op t)."),
        ("malformed", "Not a change event of Debezium"),
        ("malformed", "Not JSON"),
        ("malformed", "Not a change event of Debezium"),
        ("malformed", "The row in a change event of Debezium is str, not an object."),
        (
            "missing_column",
            "The file has no column at, day, id, which every row needs.",
        ),
    ]
    assert quarantined[0]["raw"] == lines[0]


def test_refused_row_of_an_envelope_is_kept_as_the_row_that_it_is(landing: Landing) -> None:
    landing.reading = Reading(envelope="debezium")
    line = '{"op":"c","after":{"id":"a","day":"soon","at":1.50,"big":123456789012345678901234567890},"ts_ms":1}'
    [(_, _, raw)] = landing.refused(landing.put("a.jsonl", line), enveloped("big"))
    assert raw == '{"id":"a","day":"soon","at":1.50,"big":123456789012345678901234567890,"__op":"c","__ts_ms":1}'


def avro_envelope() -> Any:
    value = record("Value", id="string", day={"type": "int", "logicalType": "date"}, at="long", note=["null", "string"])
    source = record("Source", lsn=["null", "long"], table="string", inner=["null", record("Inner", x="int")])
    return record(
        "Envelope", before=["null", value], after=["null", "Value"], source=source, op="string", ts_ms=["null", "long"]
    )


@pytest.mark.usefixtures("_any_block_size")
def test_debezium_in_avro_gives_the_same(landing: Landing) -> None:
    landing.reading = Reading(envelope="debezium")
    events = [
        {
            **e,
            "source": {**SOURCE, "inner": {"x": 1}},
            **{s: e[s] and {**e[s], "day": date(2026, 1, 2)} for s in ("before", "after")},
        }
        for e in (*EVENTS, change("t"))
    ]
    file = landing.put("a.avro", avro(avro_envelope(), events))
    schema = pa.schema([*ENVELOPED, ("__source_table", pa.string())])
    accepted, quarantined = landing.read(file, spec_of(schema))
    assert [(r["id"], r["at"], r["__op"], r["__ts_ms"], r["__source_lsn"]) for r in accepted] == [
        ("a", 1, "c", 9, 17), ("a", 2, "u", 9, 17), ("a", 2, "d", 9, 17),
    ]  # fmt: skip
    assert [(q["reason_code"], q["position"]) for q in quarantined] == [("truncate", 3)]
    assert landing.columns(file) == {f.name: f.type for f in schema}


def test_messages_of_dms_give_their_data_and_metadata(landing: Landing) -> None:
    landing.reading = Reading(envelope="dms")
    metadata = {"timestamp": "2026-01-02T00:00:00Z", "record-type": "data", "operation": "update", "schema-name": "s"}
    lines = [
        {"metadata": {**metadata, "record-type": "control", "operation": "create-table"}},
        {"data": row_of("a", 1), "metadata": metadata},
        {"data": row_of("a", 2)},
        {"data": None, "metadata": metadata},
        {"data": row_of("b", 2), "metadata": {**metadata, "operation": "delete"}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    schema = pa.schema([*SCHEMA, *((f"__{n.replace('-', '_')}", pa.string()) for n in metadata)])
    accepted, quarantined = landing.read(landing.put("a.json", text), spec_of(schema))
    assert [(r["id"], r["at"], r["__operation"], r["__schema_name"], r["__timestamp"]) for r in accepted] == [
        ("a", 1, "update", "s", "2026-01-02T00:00:00Z"), ("b", 2, "delete", "s", "2026-01-02T00:00:00Z"),
    ]  # fmt: skip
    assert [q["reason"] for q in quarantined] == [
        "Not a message of AWS DMS: it has no `metadata`.",
        "Not a message of AWS DMS: its `data` is not an object.",
    ]


@pytest.mark.parametrize(("name", "envelope"), [("a.csv", "debezium"), ("a.parquet", "debezium"), ("a.avro", "dms")])
def test_file_that_comes_in_no_envelope_is_unreadable(landing: Landing, name: str, envelope: Any) -> None:
    landing.reading = Reading(envelope=envelope)
    file = landing.put(name, PLAIN)
    assert "`envelope`" in landing.unreadable(file)
    assert landing.survey(file).unreadable == landing.unreadable(file)


# ---------------------------------------------------------------- looks at a part


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.xz", "a.utf16", "a.avro"])
def test_preview_of_what_can_only_be_read_from_its_beginning_is_of_its_beginning(
    landing: Landing, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    rows = [
        {"id": hashlib.sha256(b"%d" % i).hexdigest(), "day": date(2026, 1, 1 + i % 2), "at": i} for i in range(20_000)
    ]
    text = "id,day,at\n" + "".join(f"{r['id']},{r['day']},{r['at']}\n" for r in rows)
    content = {
        "a.csv.gz": lambda: gzip.compress(text.encode()),
        "a.jsonl.xz": lambda: lzma.compress(
            "".join(json.dumps(r, default=str) + "\n" for r in rows).encode(), preset=0
        ),
        "a.utf16": lambda: text.encode("utf-16"),
        "a.avro": lambda: avro(AVRO, rows),
    }[name]()
    if name == "a.utf16":
        landing.reading = Reading(format="csv", encoding="utf-16")
    file = landing.put(name, content)
    found = preview(landing.store, file, landing.reading, spec_of(), 100_000)
    assert 0.03 < found.share < 0.9
    assert found.partitions.keys() == {"day=2026-01-01", "day=2026-01-02"}
    assert sum(found.partitions.values()) == pytest.approx(20_000, rel=0.2)
    whole = preview(landing.store, file, landing.reading, spec_of(), 1 << 30)
    assert (whole.share, whole.partitions) == (1, {"day=2026-01-01": 10_000, "day=2026-01-02": 10_000})
    few = read_beginning(landing.store, file, 7, 10_000, landing.reading).rows
    assert few["at"].to_pylist() == list(range(7))
