"""Columns come, are renamed, dropped, retyped, and come again under names that others had; batches, merges and restores in
between: what readers see, of every snapshot, by Arrow, by Spark, and by delta-rs as a Delta table, is a model's."""

import json
import random
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline import strategy
from lakeupsert.publishers.delta_log import list_log
from lakeupsert.storage import open_store
from tests.harness.lake import Lake, delta_rows
from tests.harness.proof import assert_proved
from tests.harness.rounds import TIMES
from tests.harness.spark import collect

NAMES = ("a", "b", "c", "e", "A")
DAYS = (date(2020, 1, 1), date(2020, 1, 2))
TYPES = {"int": pa.int64(), "text": pa.string(), "float": pa.float64()}
"""Of new columns."""
RETYPED = {**TYPES, "money": pa.decimal128(9, 2), "date": pa.date32(), "time": pa.timestamp("us")}
NUMBERS = ("int", "float", "money")
SCHEMA = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "op": "string"}
FIXED = {"k": pa.string(), "l": pa.int32(), "d": pa.date32(), "ts": pa.timestamp("us")}


@dataclass
class Column:
    """One for life, whatever it is called, and whatever its type is."""

    type: str

    def value(self, rng: random.Random) -> Any:
        if rng.random() < 0.2:
            return None
        number, day = rng.randrange(100), date(2020, 1, 1 + rng.randrange(9))
        texts = [f"t{number}", f"{number}", f"{number}.5", f" {number}", f"0x{number}", str(day), f"{day} 03:04:05"]
        return {
            "int": number,
            "text": rng.choice(texts),
            "float": number / 4,
            "money": Decimal(number).scaleb(-2),
            "date": day,
            "time": datetime.combine(day, time(3 * (number % 2))),
        }[self.type]


def retyped(value: Any, was: str, now: str) -> Any:
    """The value in another type; None if that can't hold it."""
    if value is None or was == now:
        return value
    if now == "text":
        if was == "time":
            return f"{value:%Y-%m-%d %H:%M:%S.%f}"
        return str(int(value)) if was == "float" and value == int(value) else str(value)
    if was == "text":
        return from_text(value, now)
    if was in NUMBERS and now in NUMBERS:
        exact = Decimal(str(value))
        if now == "float":
            return float(value)
        return as_int(exact) if now == "int" else as_money(exact)
    if was == "date" and now == "time":
        return datetime.combine(value, time())
    return value.date() if was == "time" and now == "date" and value.time() == time() else None


def from_text(text: str, now: str) -> Any:
    with suppress(ValueError):
        if now == "date":
            return date.fromisoformat(text)
        if now == "time":
            return datetime.fromisoformat(text)
    if now not in NUMBERS or not re.fullmatch(r"-?\d+" if now == "int" else r"-?\d+(\.\d*)?", text):
        return None
    return {"int": as_int, "float": float, "money": as_money}[now](Decimal(text))


def as_int(number: Decimal) -> int | None:
    return int(number) if number == int(number) else None


def as_money(number: Decimal) -> Decimal | None:
    cents = number.scaleb(2)
    return number.quantize(Decimal("0.01")) if cents == int(cents) and abs(number) < 10**7 else None


def literal(value: Any) -> str:
    return repr(value) if isinstance(value, int | float) else f"'{value}'"


Record = tuple[int, int, bool, dict[int, Any]]


@dataclass
class Model:
    """``rows`` by partition and key, as they rank: order, arrival, whether it is a delete, and values by column."""

    by_columns: bool
    columns: dict[str, Column] = field(default_factory=dict)
    rows: dict[tuple[Any, str], list[Record]] = field(default_factory=dict)

    def came(self, day: date, key: str, ts: int, deleted: bool, values: dict[int, Any]) -> None:
        records = self.rows.get((day, key), [])
        arrival = sum(map(len, self.rows.values()))
        self.rows[day, key] = sorted([*records, (ts, arrival, deleted, values)], key=lambda r: r[:2], reverse=True)

    def value(self, records: list[Record], column: int) -> Any:
        brought = [r for r in records if column in r[3] or r[2]] if self.by_columns else records
        return brought[0][3].get(column) if brought and not brought[0][2] else None

    def seen(self) -> list[dict[str, Any]]:
        return [
            {"k": key, "d": day, "ts": rs[0][0], **{name: self.value(rs, id(c)) for name, c in self.columns.items()}}
            for (day, key), rs in sorted(self.rows.items())
            if not rs[0][2]
        ]


class Machine:
    def __init__(self, root: Path, rng: random.Random, adopted: bool, retypes: bool, **settings: Any) -> None:
        self.lake, self.rng = Lake(root, schema=SCHEMA, **settings), rng
        self.more: list[Callable[[], None]] = [self.retype, self.retype] if retypes else []
        self.model = Model(settings["mode"] == "columns")
        self.kept: list[Column] = []  # a dropped one must not leave its address to another
        self.batches = 0
        self.snapshots: dict[int, tuple[Model, list[dict[str, Any]]]] = {}
        self.retypes: list[tuple[int, str, str]] = []
        self.retyped_at: dict[int, int] = {}
        if adopted:
            self.adopt()
        else:
            self.append()
        self.publish()

    def column(self, name: str) -> None:
        self.model.columns[name] = Column(self.rng.choice(list(TYPES)))
        self.kept.append(self.model.columns[name])

    def free(self) -> list[str]:
        taken = {name.lower() for name in self.model.columns}
        return [name for name in NAMES if name.lower() not in taken]

    def table(self, rows: list[dict[str, Any]], names: list[str], more: dict[str, Any]) -> Any:
        types = FIXED | {name: RETYPED[self.model.columns[name].type] for name in names} | more
        stamped = [{**r, "ts": datetime(2020, 1, 1) + timedelta(seconds=r["ts"])} for r in rows]
        return pa.Table.from_pylist(stamped, pa.schema(list(types.items())))

    def some(self, count: int, deletes: bool, new: Collection[str] = ()) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows with some of the columns, and all that are ``new``, which the table else has not."""
        rows, names = [], [n for n in self.model.columns if n in new or self.rng.random() < 0.8]
        for _ in range(count):
            day, key, ts = self.rng.choice(DAYS), self.rng.choice("uvwxyz"), self.rng.randrange(6)
            values = {name: self.model.columns[name].value(self.rng) for name in names}
            deleted = deletes and self.rng.random() < 0.2
            rows.append({"k": key, "l": 0, "d": day, "ts": ts, "op": "D" if deleted else None, **values})
            self.model.came(day, key, ts, deleted, {id(self.model.columns[n]): v for n, v in values.items()})
        return rows, names

    def adopt(self) -> None:
        for name in ("a", "b", "c"):
            self.column(name)
        rows, names = self.some(12, deletes=False)
        self.model.columns = {n: c for n, c in self.model.columns.items() if n in names}
        rows = list({(r["d"], r["k"]): r for r in rows}.values())  # readers see them as they are, in any order
        self.model.rows = {}
        for row in rows:
            values = {id(self.model.columns[n]): row[n] for n in names}
            self.model.came(row["d"], row["k"], row["ts"], False, values)
        for day in DAYS:
            target = self.lake.root / "processed" / f"d={day}" / "part-0.parquet"
            target.parent.mkdir(parents=True)
            table = self.table([r for r in rows if r["d"] == day], names, {}).drop_columns(["d"])
            if self.rng.random() < 0.5:  # somebody else's ids, which are not ours
                fields = [f.with_metadata({"PARQUET:field_id": str(9 - i)}) for i, f in enumerate(table.schema)]
                table = table.cast(pa.schema(fields))
            pq.write_table(table, target)
        self.lake.table.adopt()

    def append(self) -> None:
        new = []
        for _ in range(self.rng.randrange(3)):
            if self.free():
                new.append(self.rng.choice(self.free()))
                self.column(new[-1])
        rows, names = self.some(self.rng.randrange(1, 6), deletes=True, new=new)
        table = self.table(rows, names, {"op": pa.string()})
        self.batches += 1
        path = self.lake.root / "landing" / f"{self.batches:03}"
        if new or self.rng.random() < 0.5:  # text does not tell the type of a new column
            pq.write_table(table, path.with_suffix(".parquet"))
        else:
            lines = [
                json.dumps({n: str(v) if isinstance(v, date | Decimal) else v for n, v in r.items()})
                for r in table.to_pylist()
            ]
            path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
        assert self.lake.table.append(host="local") is not None

    def rename(self) -> None:
        if self.model.columns and self.free():
            old = self.rng.choice(list(self.model.columns))
            new = self.rng.choice([*self.free(), old.swapcase()])
            self.lake.table.rename_column(old, new)
            self.model.columns = {new if n == old else n: c for n, c in self.model.columns.items()}
        if len(self.model.columns) > 1:
            one, other = self.rng.sample(list(self.model.columns), 2)
            with pytest.raises(ConfigurationError, match=repr(other)) as refused:
                self.lake.table.rename_column(one, other)
            assert refused.value.code == "column-exists"

    def drop(self) -> None:
        if self.model.columns:
            name = self.rng.choice(list(self.model.columns))
            self.lake.table.drop_column(name)
            del self.model.columns[name]

    def retype(self) -> None:
        if not self.model.columns:
            return
        name = self.rng.choice(list(self.model.columns))
        column = self.model.columns[name]
        was, now = column.type, self.rng.choice([t for t in RETYPED if t != column.type])

        def become(**options: Any) -> Any:
            return self.lake.table.retype_column(name, str(RETYPED[now]), **options)

        if self.model.by_columns:
            with pytest.raises(ConfigurationError) as refused:
                become()
            assert refused.value.code == "retype-not-supported"
            return
        unfit = [r for r in self.model.seen() if r[name] is not None and retyped(r[name], was, now) is None]
        planned = become(dry=True)
        assert planned.entry is None
        assert planned.conversion.unfit >= len(unfit)
        if planned.conversion.unfit:
            with pytest.raises(RefusedError) as held:
                become()
            assert held.value.code == "unfit-values"
        done = become(quarantine_unfit=True)
        assert done.quarantined == planned.conversion.unfit
        kept = [json.loads(r["raw"]) for r in self.quarantined(done.entry)]
        values = {(r["d"], r["k"], str(r[name])) for r in kept}
        assert {(str(r["d"]), r["k"], str(json_of(r[name]))) for r in unfit} <= values
        self.retypes.append((id(column), was, now))
        column.type = now
        self.follow_retypes(len(self.retypes) - 1)

    def quarantined(self, entry: int) -> Iterator[dict[str, Any]]:
        rows = self.lake.table.quarantine("retyped").read_all().to_pylist()
        return (r for r in rows if r["batch"] == entry)

    def follow_retypes(self, since: int) -> None:
        """Convert every record that came, also those that lost: a restore may bring it back."""
        for column, was, now in self.retypes[since:]:
            for records in self.model.rows.values():
                for record in records:
                    if column in record[3]:
                        record[3][column] = retyped(record[3][column], was, now)

    def publish(self) -> None:
        self.lake.run()
        number = self.lake.table.publish().snapshot or 0
        self.snapshots[number] = deepcopy_model(self.model), self.model.seen()
        self.retyped_at[number] = len(self.retypes)

    def restore(self) -> None:
        self.publish()  # all that came counts, or does not
        number = self.rng.choice(list(self.snapshots))
        self.lake.table.restore(number, dry=False)
        self.model.rows = deepcopy(self.snapshots[number][0].rows)
        self.follow_retypes(self.retyped_at[number])
        self.publish()

    def rewrite(self) -> None:
        self.publish()
        self.lake.table.reprocess(source=self.rng.choice(["stored", "landing"]), host="local")
        self.publish()

    def step(self) -> None:
        steps = [self.append, self.append, self.append, self.rename, self.rename, self.drop, self.publish]
        self.rng.choice([*steps, self.restore, self.rewrite, *self.more])()

    def check(self) -> None:
        assert self.shown("latest") == self.model.seen()
        if (name := self.rng.choice([*self.model.columns, ""])) and self.model.seen():
            value = self.model.columns[name].value(self.rng)
            where = f'"{name}" IS NULL' if value is None else f'"{name}" >= {literal(value)}'
            wanted = [
                r
                for r in self.model.seen()
                if (r[name] is None) == (value is None) and (value is None or r[name] >= value)
            ]
            assert self.shown("latest", where) == wanted, where

    def shown(self, snapshot: Any = "published", where: str | None = None) -> list[dict[str, Any]]:
        return as_seen(self.lake.table.to_arrow(snapshot, where).read_all())


def deepcopy_model(model: Model) -> Model:
    return Model(model.by_columns, dict(model.columns), deepcopy(model.rows))


def json_of(value: Any) -> Any:
    """The value as the JSON of a quarantined row has it."""
    return f"{value:%Y-%m-%d %H:%M:%S.%f}" if isinstance(value, datetime) else value


def as_seen(table: Any) -> list[dict[str, Any]]:
    rows = [{n: v for n, v in r.items() if n != "l"} for r in table.to_pylist()]
    return sorted(({**r, "ts": (r["ts"] - datetime(2020, 1, 1)).seconds} for r in rows), key=lambda r: (r["d"], r["k"]))


def by_delta(machine: Machine, snapshot: int) -> list[dict[str, Any]]:
    return as_seen(pa.Table.from_pylist(delta_rows(machine.lake.settings.processed, snapshot)))


def by_spark(spark: Any, machine: Machine, snapshot: Any, where: str | None = None) -> list[dict[str, Any]]:
    return as_seen(collect(machine.lake.table.to_spark(spark, snapshot, where)))


@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("seed", range(3 * TIMES))
@pytest.mark.long
def test_readers_see_columns_by_what_they_are_not_by_what_they_were_called(
    seed: int, mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(seed, mode, folder, monkeypatch, steps=30)


@pytest.mark.parametrize("seed", range(300, 300 + 4 * TIMES))
@pytest.mark.long
def test_retyped_columns_are_what_their_values_convert_to(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a merge or a rewrite converted them, and whatever a restore brings back."""
    run(seed, "rows", folder, monkeypatch, steps=30, retypes=True)


def test_retype_is_refused_where_each_column_has_its_winner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(7, "columns", folder, monkeypatch, steps=10, retypes=True)


def test_spark_sees_the_same_or_says_that_files_must_be_rewritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spark: Any
) -> None:
    machine = run(310, "rows", folder, monkeypatch, steps=30, retypes=True)
    machine.lake.table.compact(full=True)
    machine.publish()
    seen: set[bool] = set()
    for number, (_, rows) in [*machine.snapshots.items()][-12:]:
        view = machine.lake.table.view(number)
        unconverted = any(view.spec.conversions(file.file.renames) for file in view.files())
        seen.add(unconverted)
        if unconverted:
            with pytest.raises(ConfigurationError) as refused:
                by_spark(spark, machine, number)
            assert refused.value.code == "unconverted-files"
        else:
            assert by_spark(spark, machine, number) == rows
    assert seen == {True, False}


@pytest.mark.parametrize("seed", range(400, 400 + TIMES))
def test_delta_table_waits_for_files_from_before_a_retype(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = run(seed, "rows", folder, monkeypatch, steps=30, retypes=True, publishers=("delta",))
    machine.lake.table.compact(full=True)
    machine.publish()
    assert machine.lake.table.status().publishers["delta"].behind == 0
    log = list_log(open_store(machine.lake.settings.processed))
    for number in (n for n in machine.snapshots if n >= max(log.checkpoints)):
        assert by_delta(machine, number) == machine.snapshots[number][1], f"version {number}"


@pytest.mark.parametrize("seed", [*(pytest.param(n, marks=pytest.mark.long) for n in (100, 101)), 102])
def test_spark_sees_the_same(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, spark: Any) -> None:
    machine = run(seed, ("rows", "columns")[seed % 2], folder, monkeypatch, steps=20)
    for number, (model, rows) in list(machine.snapshots.items())[-6:]:
        assert by_spark(spark, machine, number) == rows
        for name, column in model.columns.items():
            least = {"int": 50, "text": "t5", "float": 12.5}[column.type]
            wanted = [r for r in rows if r[name] is not None and r[name] >= least]
            assert by_spark(spark, machine, number, f'"{name}" >= {least!r}') == wanted


@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("seed", range(200, 200 + 2 * TIMES))
@pytest.mark.long
def test_delta_table_is_the_same_and_no_rename_holds_it(
    seed: int, later: bool, mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``later``: columns were renamed before the table got its publisher."""
    if later:
        before = run(seed, mode, folder, monkeypatch, steps=8)
        machine = run(seed, mode, folder, monkeypatch, steps=10, publishers=("delta",), before=before)
        machine.lake.table.reprocess(host="local")
        machine.publish()
    else:
        machine = run(seed, mode, folder, monkeypatch, steps=15, publishers=("delta",))
    assert machine.lake.table.status().publishers["delta"].behind == 0
    log = list_log(open_store(machine.lake.settings.processed))
    first = max(log.checkpoints) if later else 0
    versions = [number for number in machine.snapshots if number >= first]
    assert versions
    for number in versions:
        assert by_delta(machine, number) == machine.snapshots[number][1], f"version {number}"


def run(
    seed: int,
    mode: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    before: Machine | None = None,
    *,
    retypes: bool = False,
    **settings: Any,
) -> Machine:
    """Take some steps with a new table, or go on with that of ``before``."""
    monkeypatch.setattr(strategy, "TOGETHER", 2)
    settings |= {"strategy": ("rewrite", "delta")[seed % 2], "keep_snapshots": 1000, "mode": mode}
    if before is None:
        machine = Machine(folder, random.Random(seed), adopted=seed % 3 == 0, retypes=retypes, **settings)
    else:
        machine = before
        machine.lake = Lake(folder, schema=SCHEMA, **settings)
    for _ in range(steps):
        machine.step()
        machine.check()
    machine.publish()
    for number, (_, rows) in machine.snapshots.items():
        assert machine.shown(number) == rows, f"snapshot {number}"
    assert_proved(machine.lake.table)
    return machine
