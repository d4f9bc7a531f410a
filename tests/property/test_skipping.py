"""Random filters over random tables: what readers find is what the filter keeps of all rows in memory, so no file with such rows
was skipped. By our own readers, by delta-rs and Polars, which skip files by the statistics in the Delta log, and by pyiceberg,
which skips those in Iceberg's manifests. Files that were adopted come from several writers, and DuckDB says what the filter keeps
of them.
"""

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyiceberg import expressions
from pyiceberg.expressions import And, BooleanExpression, In, IsNull, Not, Or, StartsWith
from pyiceberg.table import Table as IcebergTable

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows import datafiles
from tests.harness.lake import iceberg_settings, iceberg_table
from tests.harness.rounds import TIMES

FILTERS = 30
ICEBERG_FILTERS = 12
"""Of these. pyiceberg plans a scan in tens of milliseconds."""
DAYS = [date(2020, 1, 1) + timedelta(days=number) for number in range(4)]
WORDS = ("", "a", "zz", "Zoë", "\uffee", "🦆", "\U0010ffff", "%_")
FIRST = {
    "n": pa.int32(),
    "amount": pa.decimal128(8, 2),
    "name": pa.string(),
    "naive": pa.timestamp("us"),
    "moment": pa.timestamp("us", "UTC"),
    "day": pa.date32(),
    "flag": pa.bool_(),
    "ratio": pa.float64(),
}
COMPARE = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ICEBERG_COMPARE = {
    "=": expressions.EqualTo,
    "<>": expressions.NotEqualTo,
    "<": expressions.LessThan,
    "<=": expressions.LessThanOrEqual,
    ">": expressions.GreaterThan,
    ">=": expressions.GreaterThanOrEqual,
}


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def value(rng: random.Random, type_: pa.DataType, about: int) -> Any:
    """One that is near those of the same ``about``."""
    near = about + rng.randrange(6)
    moment = datetime(1969, 12, 31, 12) + timedelta(hours=near, microseconds=rng.choice((0, 1, 999, 1000, 999_999)))
    if pa.types.is_integer(type_):
        return near * (1 if type_.bit_width == 32 else 1 << 40)
    if pa.types.is_decimal(type_):
        return Decimal(near * 7 - 100).scaleb(-type_.scale)
    if is_text(type_):
        return rng.choice(("", "x" * 30)) + chr(ord("a") + near % 26) + rng.choice(WORDS) * rng.choice((1, 40))
    if pa.types.is_timestamp(type_):
        return moment.replace(tzinfo=UTC) if type_.tz else moment
    if pa.types.is_date(type_):
        return moment.date()
    if pa.types.is_boolean(type_):
        return near % 12 < 6
    return rng.choice((math.nan, -0.0, 0.0, near / 2))


@dataclass
class Lake:
    """A table whose nights bring values that are near each other in each partition."""

    root: Path
    rng: random.Random
    renames: bool
    columns: dict[str, pa.DataType] = field(default_factory=lambda: dict(FIRST))
    nights: int = 0

    def __post_init__(self) -> None:
        (self.root / "landing").mkdir(parents=True)
        settings = TableSettings(
            landing=str(self.root / "landing"),
            processed=str(self.root / "processed"),
            key=("k",),
            partition_by=("d",),
            order_by=("ts",),
            strategy=self.rng.choice(("rewrite", "delta", "auto")),
            mode=self.rng.choice(("rows", "rows", "columns")),
            publishers=("delta", "iceberg"),
            iceberg=iceberg_settings(self.root),
            keep_snapshots=1000,
        )
        self.table = Table("t", settings)

    def night(self) -> None:
        self.nights += 1
        rows = []
        empty = {name for name in self.columns if self.rng.random() < 0.1}
        for day in self.rng.sample(DAYS, self.rng.randrange(1, 4)):
            about = self.rng.randrange(80)
            for key in self.rng.sample(range(30), self.rng.randrange(1, 8)):
                values = {
                    name: None if name in empty or self.rng.random() < 0.15 else value(self.rng, type_, about)
                    for name, type_ in self.columns.items()
                }
                rows.append({"k": f"k{key}", "d": day, "ts": self.nights, **values})
        schema = pa.schema({"k": pa.string(), "d": pa.date32(), "ts": pa.int64(), **self.columns})
        pq.write_table(pa.Table.from_pylist(rows, schema), self.root / "landing" / f"{self.nights}.parquet")
        self.table.run(host="local")

    def widen(self) -> None:
        if self.columns.get("n") == pa.int32():
            self.columns["n"] = pa.int64()
        if self.renames:  # else Polars is asked, which refuses decimals of two widths
            scale = 4 if self.nights % 2 else 2  # Iceberg refuses the table if it grows
            self.columns["amount"] = pa.decimal128(16, scale)

    def rename(self) -> None:
        old = self.rng.choice([name for name in self.columns if name in FIRST])
        new = f"{old}_{self.nights}"
        self.table.rename_column(old, new)
        self.columns[new] = self.columns.pop(old)
        if self.rng.random() < 0.7:  # under its name comes another column, with other values
            self.columns[old] = self.rng.choice((pa.int64(), pa.string(), self.columns[new]))

    def drop(self) -> None:
        name = self.rng.choice([name for name in self.columns if name != "amount"])
        self.table.drop_column(name)
        type_ = self.columns.pop(name)
        self.columns[name if self.rng.random() < 0.5 else f"{name}_again"] = type_

    def restore(self) -> None:
        self.table.restore(self.rng.choice(self.table.snapshots()).number, dry=False)

    def compact(self) -> None:
        self.table.compact(full=True)

    def live(self) -> None:
        changes = [self.widen, self.restore, self.compact, *([self.rename, self.drop] if self.renames else [])]
        self.night()
        for _ in range(8):
            if self.rng.random() < 0.4:
                self.rng.choice(changes)()
            self.night()


@dataclass(frozen=True)
class Filter:
    """A condition in our SQL, in that of delta-rs, for Polars, and for pyiceberg."""

    ours: str
    delta_rs: str
    polars: Callable[[], pl.Expr]
    iceberg: BooleanExpression


def literal(one: Any, in_delta_rs: bool = False) -> str:
    if isinstance(one, bool | int | Decimal | float):
        text = str(one).lower()
        return f"CAST('{text}' AS DECIMAL(20, 4))" if in_delta_rs and isinstance(one, Decimal) else text
    if isinstance(one, datetime) and in_delta_rs:
        zone = "None" if one.tzinfo is None else 'Some("UTC")'
        return f"arrow_cast('{one.replace(tzinfo=None).isoformat()}', 'Timestamp(Microsecond, {zone})')"
    if isinstance(one, date) and not isinstance(one, datetime) and in_delta_rs:
        return f"DATE '{one}'"
    return "'" + (one if isinstance(one, str) else one.isoformat()).replace("'", "''") + "'"


def iceberg_literal(one: Any) -> Any:
    return one.isoformat() if isinstance(one, date) and not isinstance(one, datetime) else one


class Filters:
    """Makes filters about the values of a table."""

    def __init__(self, rng: random.Random, rows: pa.Table) -> None:
        self.rng, self.rows = rng, rows
        self.names = [name for name in rows.column_names if not pa.types.is_floating(rows.schema.field(name).type)]
        self.values = {name: [v for v in rows[name].to_pylist() if v is not None] for name in rows.column_names}

    def some(self, name: str) -> Any:
        known = self.values[name]
        if known and self.rng.random() < 0.7:
            return self.rng.choice(known)
        return value(self.rng, self.rows.schema.field(name).type, self.rng.randrange(100))

    def make(self, depth: int = 2) -> Filter:
        kind = self.rng.choice(["compare"] * 4 + ["in", "null", "like"] + ["and", "or", "not"] * (depth > 0))
        if kind == "not":
            inner = self.make(depth - 1)
            return Filter(f"NOT ({inner.ours})", f"NOT ({inner.delta_rs})", lambda: ~inner.polars(), Not(inner.iceberg))
        if kind in ("and", "or"):
            return self.join(kind, self.make(depth - 1), self.make(depth - 1))
        name = self.rng.choice(self.names)
        if kind == "null":
            return Filter(f'"{name}" IS NULL', f'"{name}" IS NULL', lambda: pl.col(name).is_null(), IsNull(name))
        if kind == "in":
            return self.one_of(name, [self.some(name) for _ in range(self.rng.randrange(1, 4))])
        texts = [n for n in self.names if is_text(self.rows.schema.field(n).type)]
        if kind == "like":
            name = self.rng.choice(texts)
            start = str(self.some(name))[: self.rng.choice((0, 1, 31, 33))].replace("%", "").replace("_", "")
            like = f"\"{name}\" LIKE '{start}%'"
            return Filter(like, like, lambda: pl.col(name).str.starts_with(start), StartsWith(name, start))
        sign, one = self.rng.choice(list(COMPARE)), self.some(name)
        return Filter(
            f'"{name}" {sign} {literal(one)}',
            f'"{name}" {sign} {literal(one, in_delta_rs=True)}',
            lambda: COMPARE[sign](pl.col(name), one),
            ICEBERG_COMPARE[sign](name, iceberg_literal(one)),
        )

    def join(self, kind: str, one: Filter, two: Filter) -> Filter:
        both = {"and": operator.and_, "or": operator.or_}[kind]
        return Filter(
            f"({one.ours}) {kind} ({two.ours})",
            f"({one.delta_rs}) {kind} ({two.delta_rs})",
            lambda: both(one.polars(), two.polars()),
            {"and": And, "or": Or}[kind](one.iceberg, two.iceberg),
        )

    def one_of(self, name: str, values: Sequence[Any]) -> Filter:
        def listed(in_delta_rs: bool) -> str:
            return f'"{name}" IN ({", ".join(literal(one, in_delta_rs) for one in values)})'

        def in_polars() -> pl.Expr:
            found = [pl.col(name) == one for one in values]
            return pl.any_horizontal(found) if len(found) > 1 else found[0]

        return Filter(listed(False), listed(True), in_polars, In(name, [iceberg_literal(one) for one in values]))

    def ours_alone(self) -> str:
        """With floats, and columns that are compared with each other."""
        same = [
            (a, b) for a in self.rows.column_names for b in self.rows.column_names
            if a < b and self.rows.schema.field(a).type == self.rows.schema.field(b).type
        ]  # fmt: skip
        if same and self.rng.random() < 0.5:
            one, two = self.rng.choice(same)
            return f'"{one}" {self.rng.choice(list(COMPARE))} "{two}"'
        floats = [n for n in self.rows.column_names if n not in self.names]
        flags = [n for n in self.names if pa.types.is_boolean(self.rows.schema.field(n).type)]
        name = self.rng.choice(floats + flags or ["k"])
        if name in flags:
            return self.rng.choice((f'"{name}"', f'NOT "{name}"'))
        one = self.some(name)
        return f'"{name}" {self.rng.choice(list(COMPARE))} {literal(str(one))}'


def by_key(rows: pa.Table) -> list[str]:
    return sorted(repr((row["d"], row["k"], row["ts"])) for row in rows.to_pylist())


def kept(rows: pa.Table, where: str) -> pa.Table:
    return rows.filter(all_of(parse_where(where, rows.schema, ArrowTerms())))


def check_ours(table: Table, rows: pa.Table, where: str) -> int:
    """Returns how many files were skipped."""
    found = table.to_arrow(where=where).read_all()
    assert repr(found.to_pylist()) == repr(kept(rows, where).to_pylist()), where
    return len(table.files()) - len(table.files(where=where))


def check_pyiceberg(table: IcebergTable, rows: pa.Table, one: Filter) -> int:
    """Returns how many files were skipped.

    pyiceberg 0.12 may find more, also without bounds: rows that have null there, of a file that lacks the column (`<>`), or whose
    column is narrower than the literal (`<`).
    """
    found = table.scan(row_filter=one.iceberg, selected_fields=("d", "k", "ts")).to_arrow()
    missing = set(by_key(kept(rows, one.ours))).difference(by_key(found))
    assert not missing, f"pyiceberg: {one.ours}"
    return len(table.inspect.files()) - len(list(table.scan(row_filter=one.iceberg).plan_files()))


@pytest.mark.parametrize("renames", [False, True])
@pytest.mark.parametrize("seed", range(2 * TIMES))
@pytest.mark.long
def test_no_file_with_a_row_is_skipped(
    seed: int, renames: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 200)  # several row groups a file
    lake = Lake(tmp_path, rng, renames)
    lake.live()
    standings = lake.table.status().publishers
    assert standings["delta"].behind == 0
    rows = lake.table.to_arrow().read_all()
    filters, skipped = Filters(rng, rows), Counter[str]()
    engine = QueryBuilder().register("t", DeltaTable(str(tmp_path / "processed")))
    frame = pl.scan_delta(str(tmp_path / "processed")) if not renames else None
    iceberg = iceberg_table(lake.table.settings.iceberg) if standings["iceberg"].behind == 0 else None
    assert iceberg is not None or pa.decimal128(16, 4) in rows.schema.types
    for number in range(FILTERS):
        one = filters.make()
        skipped["ours"] += check_ours(lake.table, rows, one.ours)
        check_ours(lake.table, rows, filters.ours_alone())
        wanted = by_key(kept(rows, one.ours))
        found = pa.table(engine.execute(f"SELECT d, k, ts FROM t WHERE {one.delta_rs}").read_all())
        assert by_key(found) == wanted, f"delta-rs: {one.delta_rs}"
        if frame is not None:
            found = frame.filter(one.polars()).select("d", "k", "ts").collect().to_arrow()
            assert by_key(found) == wanted, f"Polars: {one.ours}"
        if iceberg is not None and number < ICEBERG_FILTERS:
            skipped["iceberg"] += check_pyiceberg(iceberg, rows, one)
    assert skipped["ours"] > 0
    assert skipped["iceberg"] > 0 or iceberg is None


def write_plainly(rng: random.Random, rows: pa.Table, path: Path) -> None:
    """As one of several programs does, with columns in any order behind a nested one, and ids that are not the table's."""
    names = rng.sample(rows.column_names, len(rows.column_names))
    rows = rows.select(names).add_column(0, "nested", pa.array([{"n": -99, "k": "!"}] * rows.num_rows))
    rows = rows.cast(
        pa.schema([field.with_metadata({"PARQUET:field_id": str(40 - n)}) for n, field in enumerate(rows.schema)])
    )
    writers: list[Callable[[], object]] = [
        lambda: pq.write_table(rows, path, row_group_size=rng.randrange(1, 5), use_dictionary=rng.random() < 0.5),
        lambda: pq.write_table(rows, path, version="1.0", store_decimal_as_integer=True),
        lambda: pq.write_table(rows.drop_columns("moment"), path, use_deprecated_int96_timestamps=True),
        lambda: pq.write_table(rows, path, write_statistics=["k", "n"]),
        lambda: pq.write_table(rows, path, write_statistics=False),
        lambda: duckdb.from_arrow(rows).write_parquet(str(path)),
        lambda: pl.from_arrow(rows).write_parquet(path, statistics="full"),  # type: ignore[union-attr]
    ]
    rng.choice(writers)()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(2 * TIMES))
@pytest.mark.long
def test_no_adopted_file_with_a_row_is_skipped(seed: int, mixed: bool, tmp_path: Path) -> None:
    """``mixed``: columns are narrower in some files, and missing in others."""
    rng = random.Random(seed)
    settings = TableSettings(
        landing=str(tmp_path / "landing"),
        processed=str(tmp_path / "processed"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
        publishers=("delta",) if not mixed else (),
    )
    for number in range(12):
        columns = dict(FIRST)
        if mixed and number:
            columns |= {"n": rng.choice((pa.int16(), pa.int32(), pa.int64())), "amount": pa.decimal128(8, 2)}
            columns.pop(rng.choice([name for name in columns if name != "moment"]))
        about, empty = rng.randrange(80), rng.choice([*columns, None])
        rows = [
            {name: None if name == empty or rng.random() < 0.15 else value(rng, FIRST[name], about) for name in columns}
            for _ in range(rng.randrange(1, 8))
        ]
        keys = {"k": [f"k{number}-{n}" for n in range(len(rows))], "ts": pa.array([number] * len(rows), pa.int64())}
        table = pa.Table.from_pylist(rows, pa.schema(columns))
        folder = tmp_path / "processed" / f"d={rng.choice(DAYS)}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in keys.items():
            table = table.append_column(name, pa.array(values))
        write_plainly(rng, table, folder / f"{number}.parquet")
    adopted = Table("t", settings)
    adopted.adopt()
    rows = adopted.to_arrow().read_all()
    files = f"read_parquet('{tmp_path}/processed/d=*/*.parquet', union_by_name = true, hive_partitioning = true)"
    database = duckdb.connect()
    database.execute(
        f"CREATE TABLE t AS FROM {files}"
    )  # DuckDB 2.0 finds too many rows that are null in such a file itself
    filters, skipped = Filters(rng, rows.drop_columns("nested")), 0
    engine = QueryBuilder().register("t", DeltaTable(str(tmp_path / "processed"))) if not mixed else None
    for _ in range(FILTERS // 2):
        one = filters.make()
        skipped += check_ours(adopted, rows, one.ours)
        check_ours(adopted, rows, filters.ours_alone())
        wanted = by_key(kept(rows, one.ours))
        found = database.sql(f"SELECT d, k, ts FROM t WHERE {one.ours}").to_arrow_table()
        assert by_key(found) == wanted, f"DuckDB: {one.ours}"
        if engine is not None:
            found = pa.table(engine.execute(f"SELECT d, k, ts FROM t WHERE {one.delta_rs}").read_all())
            assert by_key(found) == wanted, f"delta-rs: {one.delta_rs}"
    assert skipped > 0
