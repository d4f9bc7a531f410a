"""Every landing format through the whole flow: it lands, some of it is refused, and what readers see is recomputed from it."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyarrow import orc

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.config import DeleteSettings, DialectSettings, Reading, ReadSettings
from lakeupsert.table import metadata
from tests.harness.lake import Lake, row

NARROW = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "int", "op": "string"}
WIDE = {**NARROW, "v": "bigint"}
LARGE = 1 << 40
"""Too large for the column `v`, until it is mended."""
COLUMNS = ("k", "l", "d", "ts", "v", "op")

Rows = Sequence[dict[str, Any]]


def zipped(data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.csv", data)
    return sink.getvalue()


def delimited(rows: Rows, separator: str, header: bool, null: str = "") -> str:
    lines = [COLUMNS, *([null if r[c] is None else str(r[c]) for c in COLUMNS] for r in rows)]
    return "".join(separator.join(line) + "\n" for line in lines[not header :])


def quoted(rows: Rows, quote: str) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quotechar=quote, delimiter=";", quoting=csv.QUOTE_ALL)
    writer.writerows([COLUMNS, *([r[c] for c in COLUMNS] for r in rows)])
    return out.getvalue()


def json_lines(rows: Rows) -> str:
    return "".join(json.dumps(r, default=str, ensure_ascii=False) + "\n" for r in rows)


def events(rows: Rows) -> str:
    """As Debezium tells of them; each delete has its tombstone behind it."""
    found: list[Any] = []
    for r in rows:
        value = {c: r[c] for c in COLUMNS if c != "op"}
        deleted = r["op"] == "D"
        side = {"before": value, "after": None} if deleted else {"before": None, "after": value}
        found += [
            {"payload": {**side, "op": "d" if deleted else "c", "ts_ms": 1}, "schema": {}},
            *([None] if deleted else []),
        ]
    return "".join(json.dumps(e, default=str) + "\n" for e in found)


def array(rows: Rows) -> str:
    return json.dumps(rows, default=str, ensure_ascii=False, indent=1)


EUROPEAN = Reading(
    dialects=(DialectSettings(delimiter=";", decimal_separator=","),),
    dates={"d": ("%Y-%m-%d", "%d.%m.%Y"), "ts": "%d.%m.%Y %H:%M:%S"},
    null=("NA", "-"),
)


def european_dates(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "d": row["d"].strftime("%d.%m.%Y"), "ts": row["ts"].strftime("%d.%m.%Y %H:%M:%S")}


def european(rows: Rows) -> str:
    written = [{**european_dates(r), "v": f"{r['v']:,}".replace(",", ".") + ",0", "op": r["op"] or "-"} for r in rows]
    return delimited(written, ";", True)


def messages(rows: Rows) -> str:
    """As AWS DMS tells of them."""
    control = {"metadata": {"record-type": "control", "operation": "create-table"}}
    data = [
        {
            "data": {c: r[c] for c in COLUMNS if c != "op"},
            "metadata": {"record-type": "data", "operation": "delete" if r["op"] == "D" else "insert"},
        }
        for r in rows
    ]
    return "".join(json.dumps(m, default=str) + "\n" for m in (control, *data))


def avro(rows: Rows) -> bytes:
    types = {"k": "string", "l": "int", "d": {"type": "int", "logicalType": "date"}, "v": "string", "op": "string"}
    types["ts"] = {"type": "long", "logicalType": "local-timestamp-micros"}
    fields = [{"name": c, "type": ["null", types[c]]} for c in COLUMNS]
    out = io.BytesIO()
    schema = fastavro.parse_schema({"type": "record", "name": "r", "fields": fields})
    fastavro.writer(out, schema, [{**r, "v": str(r["v"])} for r in rows])
    return out.getvalue()


def orc_file(rows: Rows, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> bytes:
    """``change`` makes text of the dates and times of a row."""
    times = (pa.string(), pa.string()) if change else (pa.date32(), pa.timestamp("us"))
    schema = pa.schema(list(zip(COLUMNS, (pa.string(), pa.int32(), *times, pa.string(), pa.string()), strict=True)))
    out = io.BytesIO()
    written = [{**(change(r) if change else r), "v": str(r["v"])} for r in rows]
    orc.write_table(pa.Table.from_pylist(written, schema), out)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return bytes(sink.getvalue().to_pybytes())


Write = Callable[[Rows], bytes]
DEBEZIUM = {"delete": DeleteSettings(column="__op", values=("d",)), "schema": {**NARROW, "__op": "string"}}
DMS = {
    "delete": DeleteSettings(column="__operation", values=("delete",)),
    "schema": {**NARROW, "__operation": "string"},
}
FORMATS: dict[str, tuple[str, Reading, dict[str, Any], Write]] = {
    # the file's name, how it is read, other settings, and what writes it
    "semicolons": ("x.csv", Reading(delimiter=";", quote="'"), {}, lambda rows: quoted(rows, "'").encode()),
    "hive": (
        "000000_0",
        Reading(format="csv", delimiter="\x01", quote="", header=False, columns=COLUMNS, null="\\N"),
        {"delete": DeleteSettings(column="op", values=("D",), keep=True)},
        lambda rows: delimited(rows, "\x01", False, "\\N").encode(),
    ),
    "no names": (
        "part-0.csv",
        Reading(header=False),
        {
            "key": ("_c0", "_c1"), "partition_by": ("_c2",), "order_by": ("_c3",),
            "delete": DeleteSettings(column="_c5", values=("D",)),
            "schema": {f"_c{i}": NARROW[c] for i, c in enumerate(COLUMNS)},
        },
        lambda rows: delimited(rows, ",", False).encode(),
    ),
    "regex": (
        "x.txt",
        Reading(format="delimited", delimiter=r"\s*\|\|\s*", columns=COLUMNS),
        {},
        lambda rows: delimited(rows, "  || ", False).encode(),
    ),
    "latin": ("x.csv", Reading(encoding="latin-1"), {}, lambda rows: delimited(rows, ",", True).encode("latin-1")),
    "utf-16": ("x.jsonl", Reading(encoding="utf-16"), {}, lambda rows: json_lines(rows).encode("utf-16")),
    "marked": ("x.jsonl", Reading(), {}, lambda rows: json_lines(rows).encode("utf-8-sig")),
    "gz": ("x.csv.gz", Reading(), {}, lambda rows: gzip.compress(delimited(rows, ",", True).encode())),
    "bz2": ("x.jsonl.bz2", Reading(), {}, lambda rows: bz2.compress(json_lines(rows).encode())),
    "zip": ("x.csv.zip", Reading(), {}, lambda rows: zipped(delimited(rows, ",", True).encode())),
    "xz": ("x.csv.xz", Reading(encoding="utf-16"), {}, lambda rows: lzma.compress(delimited(rows, ",", True).encode("utf-16"))),
    "zst": ("x.jsonl.zst", Reading(), {}, lambda rows: zstd(json_lines(rows).encode())),
    "avro": ("x.avro", Reading(), {}, avro),
    "orc": ("x.orc", Reading(), {}, orc_file),
    "array": ("x.json.gz", Reading(), {}, lambda rows: gzip.compress(array(rows).encode())),
    "excel": ("x.csv", Reading(), {}, lambda rows: f"sep=;\r\n{delimited(rows, ';', True)}".encode("utf-16")),
    "european": ("x.csv", EUROPEAN, {"schema": {**NARROW, "v": "decimal(9,1)"}}, lambda rows: european(rows).encode("utf-8-sig")),
    "dates in orc": ("x.orc", EUROPEAN, {}, lambda rows: orc_file(rows, european_dates)),
    "debezium": ("x.jsonl.gz", Reading(envelope="debezium"), DEBEZIUM, lambda rows: gzip.compress(events(rows).encode())),
    "dms": ("x.json", Reading(envelope="dms"), DMS, lambda rows: messages(rows).encode()),
}  # fmt: skip
every_format = pytest.mark.parametrize("kind", FORMATS)

NIGHTS: list[Rows] = [
    [
        dict(row("é", 0, 5, 1)), dict(row("b", 0, 5, 1)), dict(row("a", 1, 5, 1)), dict(row("w", 1, 5, LARGE)),
        dict(row("b", 0, 5, 2)),
    ],
    [dict(row("é", 0, 6, 2345)), dict(row("b", 0, 7, 3, op="D")), dict(row("a", 1, 4, 9)), dict(row("c", 2, 1, 4))],
]  # fmt: skip
SHOWN = [("a", 1, 1), ("c", 2, 4), ("é", 0, 2345)]


def opened(root: Path, kind: str, **changes: Any) -> Lake:
    _, reading, settings, _ = FORMATS[kind]
    read = ReadSettings(**{f: getattr(reading, f) for f in ReadSettings.__struct_fields__})
    return Lake(root, **{"schema": NARROW, "format": reading.format, "read": read, **settings, **changes})


def land(lake: Lake, kind: str, night: int) -> None:
    name, _, _, write = FORMATS[kind]
    folder = lake.root / "landing" / str(night)
    folder.mkdir()
    (folder / name).write_bytes(write(NIGHTS[night]))


def shown(lake: Lake) -> list[tuple[str, int, int]]:
    names = ("_c0", "_c2", "_c4") if "_c0" in lake.settings.key else ("k", "d", "v")
    rows = ([r[n] for n in names] for r in lake.rows())
    return sorted((k, (d - date(2020, 1, 1)).days, v) for k, d, v in rows)


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lake(tmp_path: Path, kind: str) -> Lake:
    """Two nights in one format; a row of the first is too large for its column."""
    lake = opened(tmp_path, kind)
    for night in range(2):
        land(lake, kind, night)
        lake.run()
    return lake


def test_newest_rows_are_shown_and_are_what_landed(lake: Lake) -> None:
    assert shown(lake) == SHOWN
    assert lake.table.status().quarantined == 1
    lake.reopen()
    found = lake.table.reconcile(deep=True)
    assert not found.unbalanced
    assert len(found.proof) == 3


@pytest.mark.few(2)
def test_deep_sees_that_a_row_is_another_one(lake: Lake, kind: str) -> None:
    """A recomputation that read nothing would find no difference either."""
    name, _, _, write = FORMATS[kind]
    other = [{**r, "v": 77} if r["k"] == "c" else r for r in NIGHTS[1]]
    path = lake.root / "landing/1" / name
    stat = path.stat()
    path.write_bytes(write(other))
    entries = lake.root / "processed/_lakeupsert/ledger"
    for file in entries.glob("v*.json"):  # as if this had been its content when it was taken
        text = file.read_text().replace(f'"size":{stat.st_size}', f'"size":{path.stat().st_size}')
        now = path.stat()
        before, after = (f"{s.st_mtime_ns}-{s.st_ino}-{s.st_ctime_ns}" for s in (stat, now))
        text = text.replace(before, after)
        file.write_bytes(metadata.encode({name: x for name, x in json.loads(text).items() if name != "digest"}))
    lake.reopen()
    differing = {p.partition: p.difference or "" for p in lake.table.reconcile(deep=True).unbalanced}
    assert [p.rpartition("=")[2] for p in differing] == ["2020-01-03"]
    assert "1 different" in next(iter(differing.values()))


@pytest.mark.few(2)
def test_refused_row_passes_without_its_file_when_it_is_mended(lake: Lake) -> None:
    wide = "decimal(20,1)" if "decimal" in "".join(lake.settings.schema.values()) else "bigint"
    names = {"_c4": wide} if "_c0" in lake.settings.key else {"v": wide}
    lake.mend(lambda r: True, schema={**lake.settings.schema, **names})
    shutil.rmtree(lake.root / "landing")
    (lake.root / "landing").mkdir()
    lake.table.append(replay_quarantine=True)
    lake.run()
    assert shown(lake) == [("a", 1, 1), ("c", 2, 4), ("w", 1, LARGE), ("é", 0, 2345)]
    assert lake.table.status().quarantined == 0


@pytest.mark.few(2)
def test_batches_are_read_again_as_they_were_read_though_other_settings_hold_now(lake: Lake) -> None:
    rows = lake.rows()
    for path in lake.root.glob("processed/*=*/**/*.parquet"):
        path.unlink()  # only landing has the rows now
    changed = Reading(format="csv", delimiter="^", encoding="cp037")
    read = ReadSettings(**{f: getattr(changed, f) for f in ReadSettings.__struct_fields__})
    lake.settings = msgspec.structs.replace(lake.settings, format="csv", read=read)
    lake.reopen()
    lake.table.reprocess(source="landing", host="local")
    lake.run()
    assert lake.rows() == rows
    assert not lake.table.reconcile(deep=True).unbalanced


MALFORMED: dict[str, bytes] = {
    # between good records: too few fields, too many, or what the encoding has not
    "semicolons": b"'a'\n'x';'0';'2020-01-01';'';'';'';''\n'\xff';'0';'2020-01-01';'';'';''\n",
    "hive": b"a\nx\x01\x01\x01\x01\x01\x01\n\xff\x01\x01\x01\x01\x01\n",
    "no names": b"a\nx,,,,,,\n\xff,,,,,\n\n",
    "regex": b"a\nx||||||||||||y\n\xff||||||||||\n",
    "latin": "é\né,,,,,,\n\n".encode("latin-1"),
    "utf-16": "é\n[1]\n\n".encode("utf-16-le") + b"\x00\xd8\n\x00",
    "marked": b"{\xff\n[]\n\n",
    "debezium": b'{"op":1,"after":1}\n[]\nnull\n{"schema":null,"payload":null}\n{\n',
    "dms": b'{"metadata":1}\n[]\n{\n',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_records_are_refused_and_what_follows_them_is_taken(tmp_path: Path, kind: str) -> None:
    lake = opened(tmp_path, kind, quarantine_limit=100)
    land(lake, kind, 0)
    path = tmp_path / "landing/0" / FORMATS[kind][0]
    unpack, pack = (gzip.decompress, gzip.compress) if path.name.endswith(".gz") else (bytes, bytes)
    end = b"\n" if kind != "utf-16" else "\n".encode("utf-16-le")
    content = unpack(path.read_bytes())
    first = content.index(end) + len(end)
    path.write_bytes(pack(content[:first] + MALFORMED[kind] + content[first:]))
    plain = opened(tmp_path / "plain", kind)
    land(plain, kind, 0)
    for each in (lake, plain):
        each.run()
        assert not each.table.reconcile(deep=True).unbalanced
    assert lake.rows() == plain.rows()
    [(_, entry)] = [e for e in lake.entries() if e[1].kind == "batch"]
    assert entry.quarantined["malformed"] == {"latin": 2, "utf-16": 3, "marked": 2}.get(kind, 3)
    assert entry.quarantined["bad_type"] == 1


@pytest.mark.few(2)
def test_plan_tells_the_partitions_that_are_touched(tmp_path: Path, kind: str) -> None:
    lake = opened(tmp_path, kind)
    for night in range(2):
        land(lake, kind, night)
        column = lake.settings.partition_by[0]
        days = {r["d"] for r in NIGHTS[night]}
        assert {p.partition for p in lake.table.plan().partitions} == {f"{column}={d}" for d in days}
        lake.run()
        lake.reopen()


def test_hosts_agree_on_every_format(tmp_path: Path, spark: Any) -> None:
    """One night of a table whose files come in all formats that need no settings of their own."""
    kinds = ("marked", "gz", "bz2", "zst", "avro", "orc")
    for kind in kinds:
        name, _, _, write = FORMATS[kind]
        (tmp_path / "files" / kind).mkdir(parents=True)
        (tmp_path / "files" / kind / name).write_bytes(write(NIGHTS[0]))
    found = []
    for host in ("local", "spark"):
        lake = opened(tmp_path / host, "gz")
        shutil.copytree(tmp_path / "files", lake.root / "landing", dirs_exist_ok=True)
        lake.run(host)
        (_, _), (_, entry) = lake.entries()
        found.append((lake.rows(), entry.rows_read, entry.quarantined, [f.sha256 for f in entry.files]))
    assert found[0] == found[1]
    assert found[0][1:3] == (len(kinds) * 5, {"bad_type": len(kinds)})


# ---------------------------------------------------------------- as other systems have it


def config(folder: Path, text: str) -> Path:
    path = folder / "lakeupsert.toml"
    path.write_text(text)
    (folder / "landing").mkdir()
    return path


def run(path: Path) -> Any:
    result = CliRunner().invoke(main, ["run", "--host", "local", "--workers", "1", "--json", "--config", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rows_of(path: Path) -> list[dict[str, Any]]:
    table = Table.open(path)
    try:
        found: list[dict[str, Any]] = table.to_arrow().read_all().to_pylist()
        assert not table.reconcile(deep=True).unbalanced
        return found
    finally:
        table.close()


def examples() -> dict[str, str]:
    """The configurations in docs/FORMATS.md, by the heading that they stand under."""
    text = (Path(__file__).parents[2] / "docs/FORMATS.md").read_text()
    found = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        block = re.search(r"```toml\n(.*?)```", part, re.DOTALL)
        if block:
            found[part.partition("\n")[0]] = block[1]
    return found


TABLE = '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'


@pytest.mark.parametrize("heading", sorted(examples()))
def test_examples_of_the_documentation_are_configurations(tmp_path: Path, heading: str) -> None:
    path = config(tmp_path, TABLE.replace("tables.t]", "tables.sales]") + examples()[heading])
    result = CliRunner().invoke(main, ["config", "--json", "--config", str(path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("header", [False, True])
def test_files_of_aws_dms_need_no_envelope(tmp_path: Path, header: bool) -> None:
    """Full load first, without an operation unless it is asked for; then changes, the operation in front."""
    read = "" if header else '[tables.t.read]\nheader = false\ncolumns = ["Op", "id", "day", "price", "at"]\n'
    path = config(tmp_path, TABLE + f'order_by = ["at"]\n{read}[tables.t.delete]\ncolumn = "Op"\nvalues = ["D"]\n')
    first = "Op,id,day,price,at\n" if header else ""
    (tmp_path / "landing/LOAD00000001.csv").write_text(
        f"{first}I,1,2020-01-01,5,2020-01-01 00:00:00\nI,2,2020-01-01,6,2020-01-01 00:00:00\n"
    )
    run(path)
    (tmp_path / "landing/20200102-1.csv").write_text(
        f"{first}U,1,2020-01-01,7,2020-01-02 00:00:00.5\nD,2,2020-01-01,6,2020-01-02 00:00:00\n"
    )
    run(path)
    assert [(r["id"], r["price"], r["at"]) for r in rows_of(path)] == [("1", 7, datetime(2020, 1, 2, 0, 0, 0, 500_000))]


def test_table_that_keeps_timestamp_ntz_of_orc_as_a_number_is_proved(tmp_path: Path) -> None:
    column = pa.field("at", pa.int64(), metadata={"spark.sql.catalyst.type": "timestamp_ntz"})
    path = config(tmp_path, TABLE + 'order_by = ["at"]\n[tables.t.schema]\nat = "bigint"\n')
    arrays = [pa.array(["a", "b"]), pa.array(["2020-01-01"] * 2), pa.array([5, -7])]
    orc.write_table(
        pa.Table.from_arrays(arrays, schema=pa.schema([("id", pa.string()), ("day", pa.string()), column])),
        tmp_path / "landing/a.orc",
    )
    run(path)
    assert sorted(row["at"] for row in rows_of(path)) == [-7, 5]


def test_text_in_a_binary_column_is_proved_also_if_it_is_not_utf8(tmp_path: Path) -> None:
    values = [b"a\xe9b\xff", "é\\x41".encode(), b"ok"]
    text = pa.array(values, pa.binary()).view(pa.string())
    table = pa.table({"id": ["a", "b", "c"], "day": ["2020-01-01"] * 3, "v": [1, 2, 3], "b": text})
    for ending in ("orc", "parquet"):
        (tmp_path / ending).mkdir()
        path = config(tmp_path / ending, TABLE + 'order_by = ["v"]\n[tables.t.schema]\nb = "binary"\n')
        landing = tmp_path / ending / "landing" / f"a.{ending}"
        (orc.write_table if ending == "orc" else pq.write_table)(table, str(landing))
        run(path)
        assert sorted(row["b"] for row in rows_of(path)) == sorted(values)  # and `reconcile --deep` agrees


# ---------------------------------------------------------------- nested JSON


def test_nested_json_goes_through_the_whole_flow(tmp_path: Path) -> None:
    path = config(tmp_path, TABLE + 'order_by = ["at"]\nquarantine_limit = 1\n')
    nights = [
        [
            {"id": "1", "day": "2020-01-01", "at": 1, "who": {"name": "é", "tags": ["x", None]}, "lines": [{"n": 1, "price": 9}]},
            {"id": "2", "day": "2020-01-01", "at": 1, "who": None, "lines": []},
            {"id": "3", "day": "2020-01-02", "at": 1, "who": {"name": None, "tags": None}},
        ],
        [{"id": "1", "day": "2020-01-01", "at": 2, "who": {"tags": []}, "lines": [{"n": 2}, {"price": 1}]}],
    ]  # fmt: skip
    for i, night in enumerate(nights):
        (tmp_path / f"landing/{i}.jsonl").write_text(json_lines(night), encoding="utf-8")
        run(path)
    assert [(r["id"], r["who"], r["lines"]) for r in rows_of(path)] == [
        ("1", {"name": None, "tags": []}, [{"n": 2, "price": None}, {"n": None, "price": 1.0}]),
        ("2", None, []),
        ("3", {"name": None, "tags": None}, None),
    ]
    # A part that the column has not is one that it gets; a value that no part takes is refused.
    (tmp_path / "landing/2.jsonl").write_text('{"id":"4","day":"2020-01-01","at":1,"who":{"age":1}}\n')
    assert run(path)["result"]["append"]["batches"][0]["rows_quarantined"] == 0
    assert {r["id"]: r["who"] for r in rows_of(path)}["4"] == {"name": None, "tags": None, "age": 1}
    (tmp_path / "landing/3.jsonl").write_text('{"id":"5","day":"2020-01-01","at":1,"who":{"age":"old"}}\n')
    assert run(path)["result"]["append"]["batches"][0]["rows_quarantined"] == 1
    out = CliRunner().invoke(main, ["export", "--output", str(tmp_path / "o.jsonl"), "--config", str(path)])
    assert out.exit_code == 0, out.output
    exported = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert exported[0]["lines"] == [{"n": 2, "price": None}, {"n": None, "price": 1.0}]


def test_nested_json_is_kept_as_text_where_its_column_is_text(tmp_path: Path) -> None:
    path = config(tmp_path, TABLE + 'order_by = ["at"]\n[tables.t.schema]\nwho = "string"\n')
    for at, who in enumerate(({"name": "é"}, {"age": 1.50, "more": [1, None]})):
        line = json.dumps({"id": "1", "day": "2020-01-01", "at": at, "who": who}, ensure_ascii=False)
        (tmp_path / f"landing/{at}.jsonl").write_text(line.replace("1.5,", "1.50,"), encoding="utf-8")
        run(path)
    assert [r["who"] for r in rows_of(path)] == ['{"age":1.50,"more":[1,null]}']


TABLE = "[tables.t]\nlanding = 'landing'\nprocessed = 'out'\nkey = ['id']\npartition_by = ['day']\n"


def replay(path: Path) -> Table:
    """The table after a replay of its quarantined rows and another night."""
    again = CliRunner().invoke(main, ["append", "--replay-quarantine", "--config", str(path)])
    assert again.exit_code == 0, again.output
    run(path)
    return Table.open(path)


def test_ambiguous_dates_pass_once_one_format_is_meant(tmp_path: Path) -> None:
    """With what else their file says: its decimal comma, its null words."""
    read = "[tables.t.read]\ndialects = [{ delimiter = ';', decimal_separator = ',' }]\nnull = '-'\n"
    both = f"{read}dates = {{ day = ['%d/%m/%Y', '%m/%d/%Y'] }}\n"
    path = config(tmp_path, f"{TABLE}quarantine_limit = '50%'\n{both}")
    (tmp_path / "landing/a.csv").write_text("id;day;price;n\na;25/03/2024;1,5;1\nb;01/03/2024;2,5;-\n")
    assert run(path)["result"]["append"]["batches"][0]["rows_quarantined"] == 1
    assert [r["id"] for r in rows_of(path)] == ["a"]
    path.write_text(path.read_text().replace(", '%m/%d/%Y'", ""))
    table = replay(path)
    rows = [(r["id"], r["day"], r["price"], r["n"]) for r in table.to_arrow().read_all().to_pylist()]
    table.close()
    assert rows == [("b", date(2024, 3, 1), 2.5, None), ("a", date(2024, 3, 25), 1.5, 1)]


def test_dates_without_effect_are_told(tmp_path: Path) -> None:
    read = "[tables.t.read]\ndates = { shipedd = '%d/%m/%Y', day = '%d/%m/%Y' }\n"
    path = config(tmp_path, f"{TABLE}{read}")
    (tmp_path / "landing/a.csv").write_text("id,day,shipped\na,25/03/2024,x\n")
    (warning,) = [w for w in run(path)["warnings"] if "dates" in w]
    assert "Did you mean 'shipped'?" in warning
