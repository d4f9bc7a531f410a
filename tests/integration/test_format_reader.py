"""A reader in Go, written from docs/FORMAT.md alone (`tests/format_reader`), finds the rows that ours does."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.config import PublisherName
from lakeupsert.pipeline import strategy
from lakeupsert.table.chain import FORMAT
from tests.harness.lake import Lake, row
from tests.harness.servers import PROGRAMS, require

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
PROGRAM = PROGRAMS / "format_reader"


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    """Builds what changed, without asking anybody for modules: the first build got them."""
    built_at = require(PROGRAM, "`make servers` builds it (Go)").stat().st_mtime
    if built_at > max(file.stat().st_mtime for file in (TESTS / "format_reader").iterdir()):
        return
    command = [require(Path(shutil.which("go") or "go"), "install Go"), "build", "-o", PROGRAM, "."]
    built = subprocess.run(command, cwd=TESTS / "format_reader", env={**os.environ, "GOPROXY": "off"}, check=False)
    if built.returncode:
        pytest.fail(
            "`go build` failed, see above. If modules are missing (they are below HOME), `make servers` gets them."
        )


@pytest.fixture(scope="module")
def make_tables(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(GOLDEN / "make_tables.py")


@pytest.fixture(scope="module")
def columns(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """Values of every type."""
    return load_script(Path(__file__).with_name("test_readers.py"))


def call(root: Path, snapshot: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, root, *([] if snapshot is None else [str(snapshot)])]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def as_json(value: Any) -> object:
    """What the program prints for an Arrow scalar."""
    kind = value.type
    if not value.is_valid:
        return None
    if isinstance(value, pa.ExtensionScalar):
        return as_json(value.value)
    if pa.types.is_struct(kind):
        return {name: as_json(part) for name, part in value.items()}
    if pa.types.is_nested(kind):
        return [as_json(item) for item in value.values]
    if pa.types.is_timestamp(kind):
        return str(np.datetime64(value.value, kind.unit))
    if pa.types.is_duration(kind):
        return f"{value.value}{kind.unit}"
    if pa.types.is_time(kind):
        return value.cast(pa.string()).as_py()
    found = value.as_py()
    if pa.types.is_decimal(kind):
        return f"{found:f}"
    if pa.types.is_floating(kind) and not np.isfinite(found):
        return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(float(found))]
    if isinstance(found, bytes):
        return base64.b64encode(found).decode()
    return found.isoformat() if isinstance(found, date) else found


def assert_read(table: Table) -> None:
    """Of every snapshot the program and our reader have the same rows; without a number it takes the newest."""
    newest, *older = (link.number for link in table.snapshots())
    for number in (None, newest, *older):
        expected = table.to_arrow(newest if number is None else number).read_all()
        plain = [f.name for f in expected.schema if not pa.types.is_nested(f.type) and not pa.types.is_floating(f.type)]
        done = call(Path(table.settings.processed), number)
        assert done.returncode == 0, f"snapshot {number}: {done.stderr}"

        def order(one: dict[str, object], plain: list[str] = plain) -> str:
            return json.dumps([one[name] for name in plain])

        rows = [
            dict(zip(expected.schema.names, map(as_json, values), strict=True))
            for values in zip(*expected, strict=True)
        ]
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(found, key=order) == sorted(rows, key=order), f"snapshot {number}"


# ---------------------------------------------------------------- tables of every kind


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in (GOLDEN / "tables").iterdir()))
def test_a_table_of_an_earlier_release(name: str, make_tables: ModuleType, tmp_path: Path) -> None:
    """As it was left, and after one more night."""
    shutil.unpack_archive(GOLDEN / "tables" / f"{name}.tar.gz", tmp_path, filter="data")
    lake = Lake(tmp_path / "lake", **make_tables.CASES[name].settings)
    assert_read(lake.table)
    shutil.copy(tmp_path / "later.jsonl", tmp_path / "lake" / "landing")
    lake.run()
    assert_read(lake.table)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    ["adopted", "columns", "floors", "hashed", "history", "key_scope", "renames", "restored", "versions", "whole"],
)
def test_a_table_of_today(name: str, make_tables: ModuleType, folder: Path) -> None:
    case = make_tables.CASES[name]
    lake = Lake(folder, **case.settings)
    case.prepare(lake)
    if name == "adopted":
        assert_read(lake.table)  # no merge has settled it
    for number in range(1, 6):
        (folder / "landing" / f"{number}.jsonl").write_text(make_tables.lines(make_tables.night(number, name)))
        lake.run()
        if number == 3:
            case.change(lake)
    assert_read(lake.table)


def grown(folder: Path, chosen: str, step: int, *, rows: int = 3000, bucket: str = "64MB") -> Lake:
    """Two nights: ``rows`` of a day, then every ``step``-th again."""
    lake = Lake(folder, strategy=chosen, bucket=bucket)
    lake.land("1.jsonl", [row(f"k{i:05}", 0, 0, i) for i in range(rows)])
    lake.run()
    lake.land("2.jsonl", [row(f"k{i:05}", 0, 1, -i, op="D" if i % 5 == 0 else None) for i in range(0, rows, step)])
    lake.run()
    return lake


def vectors(lake: Lake) -> list[Any]:
    head = lake.table.objects.partition("d=2020-01-01").head()
    assert head is not None
    return [file.deleted for bucket in head.body.buckets for file in bucket.data if file.deleted]


@pytest.fixture
def small_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small partitions get deltas too."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)


@pytest.mark.long
@pytest.mark.usefixtures("small_rewrites")
def test_vectors_in_the_manifest_and_in_objects(folder: Path) -> None:
    inline = grown(folder / "inline", "delta", 100)
    assert [bool(vector.inline) for vector in vectors(inline)] == [True]
    assert_read(inline.table)
    stored = grown(folder / "stored", "delta", 3, rows=9000)
    assert [bool(vector.name) for vector in vectors(stored)] == [True]
    assert_read(stored.table)


@pytest.mark.long
@pytest.mark.usefixtures("small_rewrites")
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_buckets(chosen: str, folder: Path) -> None:
    lake = grown(folder, chosen, 7, bucket="4KiB")
    head = lake.table.objects.partition("d=2020-01-01").head()
    assert head is not None
    assert len(head.body.buckets) > 3
    assert_read(lake.table)


def test_every_type(columns: ModuleType, folder: Path) -> None:
    days = [columns.DAY, date(2020, 1, 2)] * 10
    first, second = (columns.every_type(range(n), n, days[:n], back=False) for n in (20, 8))
    assert_read(columns.nights(folder, first, second, strategy="delta"))


def test_added_and_wider_columns(columns: ModuleType, folder: Path) -> None:
    narrow = {f"w{i}": pa.array(values, one) for i, (one, _, values, _) in enumerate(columns.WIDENED)}
    wide = {f"w{i}": pa.array([value], other) for i, (_, other, _, value) in enumerate(columns.WIDENED)}
    narrow["s"] = pa.array([{"x": 1}, {"x": None}, None], pa.struct({"x": pa.int8()}))
    narrow["l"] = pa.array([[{"a": 0.1}, None], [], None], pa.list_(pa.struct({"a": pa.float32()})))
    wide["s"] = pa.array([{"x": 1 << 40, "y": "new"}])
    wide["l"] = pa.array([[{"a": 0.1, "b": columns.DAY}]])
    wide["added"] = pa.array([7])
    nights = columns.rows([1, 2, 3], narrow), columns.rows([4], wide), columns.rows([3], ts=2)
    assert_read(columns.nights(folder, *nights, strategy="delta"))


@pytest.mark.long
@pytest.mark.parametrize("publishers", [(), ("delta",)])
@pytest.mark.usefixtures("small_rewrites")
def test_a_name_that_was_renamed_dropped_and_comes_back(publishers: tuple[PublisherName, ...], folder: Path) -> None:
    """With a publisher, a column keeps its name in files."""
    schema = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "op": "string"}
    lake = Lake(folder, schema=schema, strategy="delta", publishers=publishers)

    def night(number: int, first: int, **values: object) -> None:
        plain = ({n: v for n, v in row(f"k{i}", 0, number).items() if n != "v"} for i in range(first, first + 4))
        lake.land(f"{number}.jsonl", [{**one, **values} for one in plain])
        lake.run()

    night(1, 0, v=1, name="one")
    lake.table.rename_column("v", "amount")
    night(2, 2, amount=2, name="two")
    lake.table.drop_column("name")
    night(3, 4, amount=3)
    night(4, 6, amount=4, name="four", v="text")
    lake.table.rename_column("name", "title")
    lake.table.publish()
    assert_read(lake.table)
    names = lake.table.to_arrow().read_all().schema.names
    assert names[4:] == ["amount", "title", "v"]


@pytest.mark.long
def test_a_retyped_table_is_refused_by_who_does_not_convert(folder: Path) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", 0, 1, 7)])
    lake.run()
    lake.mend(lambda row: False, schema={**lake.settings.schema, "v": "string"})
    lake.table.retype_column("v", "string")
    assert_read(lake.table)  # it is not published, and the snapshot has the spec of before
    lake.table.publish()
    done = call(folder / "processed")
    assert (done.returncode, done.stdout) == (1, "")
    assert "was retyped" in done.stderr


@pytest.mark.long
def test_odd_partition_values(columns: ModuleType, folder: Path) -> None:
    texts = [*columns.TEXTS, "(null)", "NULL"]
    assert_read(columns.nights(folder / "text", columns.rows(range(len(texts)), d=texts)))
    for values in ([date(1, 1, 1), date(9999, 12, 31)], [-(2**63), -1, 2**63 - 1], [False, True]):
        table = columns.nights(folder / type(values[0]).__name__, columns.rows(range(len(values)), d=pa.array(values)))
        assert_read(table)


def test_odd_column_names(columns: ModuleType, folder: Path) -> None:
    names = {"my key.": [1, 2], "the `d` =%": ["a=b/c", "d"], "t/s": [1, 1], "a.b": [3, 4], "ü \n": [5, 6], "g": [7, 8]}
    roles = {"key": ("my key.",), "partition_by": ("the `d` =%", "g"), "order_by": ("t/s",)}
    assert_read(columns.nights(folder, pa.table(names), **roles))


def test_computed_partitions(columns: ModuleType, folder: Path) -> None:
    moments = pa.array(columns.MOMENTS, pa.timestamp("us", "UTC"))
    functions = ("year", "month", "date", "hour")
    by = tuple(f"{function}(at) as {function}" for function in functions)
    table = columns.nights(folder, columns.rows(range(4), {"at": moments}).drop_columns("d"), partition_by=by)
    assert_read(table)


@pytest.mark.long
def test_adopted_files_of_others(columns: ModuleType, folder: Path) -> None:
    """INT96, a narrower type, nulls alone, a column less, another order, keys twice: before and after the first merge."""
    early = {
        "at": pa.array(columns.MOMENTS[2:3] * 3, pa.timestamp("us")),
        "n": pa.array([1, 2, None], pa.int32()),
        "more": pa.nulls(3),
    }
    late = {"n": pa.array([2**40, 4]), "more": ["x", None]}
    (folder / "processed/d=2020-01-01").mkdir(parents=True)
    for name, rows, old in (
        ("a", columns.rows([1, 2, 3], early), True),
        ("b", columns.rows([3, 2], late, ts=2), False),
    ):
        names = [column for column in reversed(rows.column_names) if column != "d"]
        path = folder / f"processed/d=2020-01-01/{name}.parquet"
        pq.write_table(rows.select(names), path, use_deprecated_int96_timestamps=old, store_schema=not old)
    table = columns.opened(folder)
    table.adopt()
    assert table.to_arrow().read_all().num_rows == 5
    assert_read(table)
    (folder / "landing").mkdir()
    pq.write_table(columns.rows([4], {"n": [5]}), folder / "landing/1.parquet")
    table.run(host="local")
    assert table.to_arrow().read_all().num_rows == 4
    assert_read(table)


@pytest.mark.long
def test_adopted_folders_that_are_written_in_another_way(folder: Path) -> None:
    for name, key in (("n=01/d=2024-1-1/b=True/t=x%20y", "a"), ("n=02/d=2024-01-02/b=False/t=50%", "b")):
        (folder / "processed" / name).mkdir(parents=True)
        pq.write_table(pa.table({"id": [key], "version": [1]}), folder / "processed" / name / "a.parquet")
    lake = Lake(folder, key=("id",), partition_by=("n", "d", "b", "t"), order_by=("version",), delete=None)
    lake.table.adopt()
    (folder / "landing/1.jsonl").write_text(
        '{"id": "a", "version": 2, "n": 1, "d": "2024-01-01", "b": true, "t": "x y"}'
    )
    lake.table.run(host="local")
    assert_read(lake.table)


def test_nothing_is_published_yet(folder: Path) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.table.append(host="local")
    for snapshot, status in ((None, 0), (0, 1)):
        done = call(folder / "processed", snapshot)
        assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.long
def test_tags_and_expired_snapshots(folder: Path) -> None:
    lake = grown(folder, "delta", 7)
    lake.land("3.jsonl", [row("k00001", 0, 2, 3)])
    lake.run()
    lake.table.tag("first", 0)
    lake.settings = msgspec.structs.replace(lake.settings, keep_snapshots=1, superseded_retention="0s")
    lake.reopen()
    lake.table.vacuum(dry=False)
    expired = call(folder / "processed", 1)
    assert (expired.returncode, expired.stdout) == (1, "")
    assert "expired" in expired.stderr
    assert {link.number for link in lake.table.snapshots()} >= {0}
    assert_read(lake.table)


# ---------------------------------------------------------------- what is refused


def first(folder: Path) -> Path:
    return min(path for path in folder.iterdir() if path.suffix == ".json")


def change(path: Path, **values: object) -> None:
    """Write other values into a version's outer fields, or into its body, with a right digest."""
    version = json.loads(path.read_bytes())
    del version["digest"]
    for name, value in values.items():
        (version if name in version else version["body"])[name] = value
    text = json.dumps(version, separators=(",", ":"))[:-1]
    path.write_text(f'{text},"digest":"{hashlib.sha256(text.encode()).hexdigest()}"}}')


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_id(path: Path) -> None:
    """Change what only the digest guards."""
    flip(path, path.read_bytes().index(b'"write_id":"') + 15)


NEWER = FORMAT + 1
REFUSED: dict[str, Callable[[Path, Path], object]] = {
    "snapshot's digest": lambda inner, _: flip_id(first(inner / "snapshots")),
    "manifest's digest": lambda inner, _: flip_id(first(inner / "partitions/d=2020-01-01")),
    "spec's digest": lambda inner, _: flip_id(first(inner / "spec")),
    "ledger's digest": lambda inner, _: flip_id(first(inner / "ledger")),
    "snapshot's format": lambda inner, _: change(first(inner / "snapshots"), format=NEWER),
    "manifest's format": lambda inner, _: change(first(inner / "partitions/d=2020-01-01"), format=NEWER),
    "spec's format": lambda inner, _: change(first(inner / "spec"), format=NEWER),
    "ledger's format": lambda inner, _: change(first(inner / "ledger"), format=NEWER),
    "requirement": lambda inner, _: change(first(inner / "spec"), requires=["geometry"]),
    "snapshot that is gone": lambda inner, _: first(inner / "snapshots").unlink(),
    "another manifest": lambda inner, _: change(first(inner / "partitions/d=2020-01-01"), merged=1),
    "page": lambda _, file: flip(file, 100),
    "footer": lambda _, file: flip(file, -100),
    "vector": lambda inner, _: flip(next(inner.rglob("*.roaring")), 30),
}


@pytest.fixture(scope="module")
def damaged(module_folder: Path) -> Path:
    """A table whose newest ledger entry names its newest snapshot, with a vector in an object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "SMALL_BYTES", 0)
        lake = grown(module_folder / "lake", "delta", 3, rows=9000)
        lake.land("3.jsonl", [row("k00001", 1, 2, 3)])
        lake.table.append(host="local")
        assert vectors(lake)[0].name
        lake.table.close()
    return module_folder / "lake/processed"


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, damaged: Path, folder: Path) -> None:
    root = folder / "processed"
    shutil.copytree(damaged, root)
    assert call(root).returncode == 0
    REFUSED[what](root / "_lakeupsert", next((root / "d=2020-01-01").iterdir()))
    done = call(root)
    assert (done.returncode, done.stdout) == (1, "")
    assert "panic" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
