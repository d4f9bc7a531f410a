"""Events of Debezium with their `schema` part (`tests/capture/record_types.py`): values have the types that it states.

The values are those that PostgreSQL and MariaDB print. A table that is there keeps its types.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init.propose import propose

RECORDED = Path(__file__).with_name("recorded")
Message = Mapping[str, Any]
DATE, TIME, MOMENT, TEXT, WHOLE, BYTES = (
    pa.date32(),
    pa.time64("us"),
    pa.timestamp("us"),
    pa.string(),
    pa.int64(),
    pa.binary(),
)
TYPES = {
    "postgresql": {
        "d": DATE, "t": TIME, "ts": MOMENT, "t3": TIME, "ts3": MOMENT, "tz": pa.timestamp("us", "UTC"), "ttz": TIME,
        "n": pa.decimal128(10, 2), "n50": pa.decimal256(50, 10), "n0": pa.decimal128(12, 0), "nv": pa.decimal128(38, 18),
        "m": pa.decimal128(38, 2), "i2": WHOLE, "i4": WHOLE, "i8": WHOLE, "f4": pa.float64(), "f8": pa.float64(),
        "b": pa.bool_(), "v": TEXT, "u": TEXT, "j": TEXT, "x": TEXT, "e": TEXT, "by": BYTES, "bits": BYTES, "iv": WHOLE,
        "ai": pa.list_(WHOLE), "ad": pa.list_(DATE), "an": pa.list_(pa.decimal128(6, 2)),
        "p": pa.struct([("x", pa.float64()), ("y", pa.float64()), ("wkb", TEXT), ("srid", WHOLE)]),
    },
    "mariadb": {
        "d": DATE, "t": TIME, "ts": MOMENT, "t0": TIME, "ts0": MOMENT, "ts3": MOMENT, "tz": pa.timestamp("us", "UTC"),
        "y": WHOLE, "n": pa.decimal128(10, 2), "n65": pa.decimal256(65, 5), "n0": pa.decimal128(12, 0), "i1": WHOLE,
        "i3": WHOLE, "i8": WHOLE, "f4": pa.float64(), "f8": pa.float64(), "v": TEXT, "j": TEXT, "e": TEXT, "s": TEXT,
        "b1": pa.bool_(), "bits": BYTES, "vb": BYTES, "bl": BYTES,
    },
}  # fmt: skip
NANOS = {"t": pa.time64("ns"), "ts": pa.timestamp("ns")}
OTHERWISE = {"ttz": time(21, 59, 59), "iv": 2813645500000, "b1": True, "bits": b"\x05\x04", "y": 2024}
"""Values that Debezium sends in another form than the database prints."""


def recorded(database: str) -> dict[str, tuple[list[dict[str, Any]], list[Message]]]:
    """The rows of the database and the messages, by Debezium's `time.precision.mode`."""
    found: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {}
    for line in map(json.loads, (RECORDED / f"types-{database}.jsonl").read_text().splitlines()):
        if "mode" in line:
            found[line["mode"]] = line["rows"], []
        else:
            [*found.values()][-1][1].append(line)
    return found


class Lake:
    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        (root / "landing").mkdir(parents=True)
        self.set(**settings)

    def set(self, **settings: Any) -> None:
        given = {
            "key": ("id",),
            "partition_by": (),
            "order_by": ("__log_position",),
            "read": ReadSettings(envelope="debezium"),
            "delete": DeleteSettings(column="__op", values=("d",)),
            "quarantine_limit": 99,
            **settings,
        }
        zones = {zone: str(self.root / zone) for zone in ("landing", "processed")}
        self.table = Table("t", TableSettings(**zones, **given))

    def night(self, messages: Sequence[object]) -> Any:
        name = f"{len(list((self.root / 'landing').iterdir())):02}.jsonl"
        (self.root / "landing" / name).write_text("".join(json.dumps(message) + "\n" for message in messages))
        return self.table.run(host="local").append

    @property
    def schema(self) -> dict[str, pa.DataType]:
        return {f.name: f.type for f in self.table.to_arrow().schema if not f.name.startswith("__")}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.table.to_arrow().read_all().to_pylist(), key=lambda row: row["id"])

    @property
    def refused(self) -> list[str]:
        return [row["reason"] for row in self.table.quarantine().read_all().to_pylist()]

    @property
    def differences(self) -> list[object]:
        return [one.difference for one in self.table.reconcile(deep=True).proof if one.difference]


def expected(name: str, printed: str | None, type_: pa.DataType) -> object:
    """The value that a database prints."""
    if printed is None:
        return None
    if name in OTHERWISE:
        printed = OTHERWISE[name]
    elif type_ == BYTES:
        return bytes.fromhex(printed.removeprefix("\\x"))
    elif pa.types.is_list(type_):
        items = [None if one == "NULL" else one for one in printed.strip("{}").split(",")]
        return pa.array(items).cast(type_.value_type).to_pylist()
    elif pa.types.is_struct(type_):
        return {"x": 1.5, "y": 2.0, "wkb": "AQEAAAAAAAAAAAD4PwAAAAAAAABA", "srid": None}
    elif pa.types.is_decimal(type_):
        return Decimal(re.sub(r"[$,]", "", printed))
    elif pa.types.is_time(type_):
        return time.fromisoformat(printed)
    elif pa.types.is_timestamp(type_) and type_.tz:
        printed = printed.removesuffix("+00") + "Z"
    return pa.array([printed]).cast(type_)[0].as_py() if isinstance(printed, str) else printed


@pytest.mark.parametrize("database", TYPES)
def test_values_are_those_of_the_database(database: str, tmp_path: Path) -> None:
    for mode, (rows, messages) in recorded(database).items():
        lake = Lake(tmp_path / mode)
        lake.night(messages)
        types = {n: t for n, t in TYPES[database].items() if n in rows[0]} | (NANOS if mode == "nanoseconds" else {})
        assert lake.schema == {"id": WHOLE, **types}
        for row, printed in zip(lake.rows, rows, strict=False):
            for name, type_ in types.items():
                value = expected(name, printed[name], type_)
                if mode == "connect" and printed[name] and name in ("t", "ts"):
                    value = value.replace(microsecond=value.microsecond // 1000 * 1000)  # Debezium cuts them
                assert row[name] == value, (mode, name)
        if not {"n50", "n65"} & types.keys():  # more digits than DuckDB has
            assert lake.differences == []
        odd = [row for row in rows if row["id"] == 3]
        assert len(lake.refused) == len(odd)
        if odd:
            assert "'t'" in lake.refused[0]
            assert ("'d'" in lake.refused[0]) == (database == "postgresql")


@pytest.mark.parametrize("database", TYPES)
def test_reconcile_reads_the_values_itself(database: str, tmp_path: Path) -> None:
    _, messages = recorded(database)["adaptive_time_microseconds"]
    lake = Lake(tmp_path, schema={"n50" if database == "postgresql" else "n65": "string"})
    lake.night(messages)
    assert lake.differences == []


@pytest.mark.parametrize("database", TYPES)
def test_table_that_is_there_keeps_its_types(database: str, tmp_path: Path) -> None:
    """It got numbers and base64, and goes on so. A column of a type that takes the values gets them."""
    rows, messages = recorded(database)["adaptive_time_microseconds"]
    lake = Lake(tmp_path, schema={"n0": "bigint", "n": "double"})
    plain = messages[0]["payload"]
    before = {**plain, "after": {n: v for n, v in plain["after"].items() if n not in ("ts", "n", "n0")}}
    lake.night([before])
    types = lake.schema
    assert (types["d"], types["t"], types["n0"]) == (WHOLE, WHOLE, WHOLE)
    lake.night([{**messages[0], "payload": {**plain, "after": {**plain["after"], "id": 9}}}])
    assert lake.schema == {**types, "ts": MOMENT}
    row, again = lake.rows
    for name in plain["after"].keys() - {"id", "ts", "n", "n0"}:
        assert row[name] == again[name], name
    assert again["d"] == plain["after"]["d"]
    assert again["n0"] == int(rows[0]["n0"])
    assert again["n"] == float(rows[0]["n"])
    assert again["ts"] == expected("ts", rows[0]["ts"], MOMENT)
    assert lake.differences == []


def message(fields: Mapping[str, Mapping[str, Any]], **after: Any) -> Message:
    columns = [{"type": "int32", "field": "id"}, *({"field": name, **one} for name, one in fields.items())]
    schema = {"type": "struct", "fields": [{"type": "struct", "field": "after", "fields": columns}]}
    source = {"connector": "mariadb", "file": "binlog.1", "pos": after["id"], "row": 0}
    return {"schema": schema, "payload": {"op": "c", "before": None, "after": after, "source": source}}


def number(precision: int, scale: int) -> dict[str, Any]:
    parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": parameters}


DAY = {"type": "int32", "name": "io.debezium.time.Date"}


def test_quarantined_rows_keep_their_types(tmp_path: Path) -> None:
    fields = {"d": DAY, "n": number(6, 2), "blob": {"type": "bytes"}, "due": {"type": "string"}}
    lake = Lake(tmp_path, schema={"due": "date"})
    good = message(fields, id=1, d=19724, n="AJY=", blob="AP8=", due="2024-01-02")
    lake.night([good, message(fields, id=2, d=19725, n="/x8=", blob="AQ==", due="03.01.2024")])
    assert len(lake.refused) == 1
    lake.set(schema={"due": "date"}, read=ReadSettings(envelope="debezium", dates={"due": "%d.%m.%Y"}))
    lake.table.append(replay_quarantine=True)
    lake.table.run(host="local")
    assert lake.refused == []
    assert [(str(r["d"]), r["n"], r["blob"], str(r["due"])) for r in lake.rows] == [
        ("2024-01-02", Decimal("1.50"), b"\0\xff", "2024-01-02"),
        ("2024-01-03", Decimal("-2.25"), b"\1", "2024-01-03"),
    ]


def test_decimals_grow_with_the_source(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.night([message({"n": number(6, 2)}, id=1, n="AJY=")])
    lake.night([message({"n": number(8, 4)}, id=2, n="AJY=")])
    assert (lake.schema["n"], [row["n"] for row in lake.rows]) == (
        pa.decimal128(8, 4),
        [Decimal("1.5"), Decimal("0.015")],
    )


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        (number(1000, 400), "AQ=="),  # 400 places
        (number(6, 2), "AQIDBAUGBwg="),  # more digits than the schema says
        (number(6, 2), "no base64"),
        ({"type": "bytes"}, "no base64"),
        (DAY, "2024-01-02"),
        (DAY, 2**31),
        ({"type": "int64", "name": "io.debezium.time.MicroTime"}, -1),
        ({"type": "int64", "name": "io.debezium.time.Timestamp"}, 2**62),
        ({"type": "string", "name": "io.debezium.time.ZonedTime"}, "10:00:00+02:00"),
        ({"type": "string", "name": "io.debezium.time.ZonedTimestamp"}, "infinity"),
        ({"type": "struct", "name": "io.debezium.data.VariableScaleDecimal"}, {"scale": 19, "value": "AQ=="}),
    ],
)
def test_values_that_no_type_holds_are_refused(stated: Mapping[str, Any], value: object, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.night([message({"x": stated}, id=1, x=None), message({"x": stated}, id=2, x=value)])
    assert [row["x"] for row in lake.rows] == [None]
    [reason] = lake.refused
    assert "Column 'x'" in reason


@pytest.mark.parametrize(
    "stated",
    [
        {"type": ["string"], "name": {}},
        {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": []},
        {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "9" * 40}},
        {"type": "map", "keys": 1, "values": DAY},
        {"type": "array", "items": None},
        {"type": "struct", "fields": [1, {"field": None}]},
    ],
)
def test_schema_of_another_kind_says_nothing(stated: Mapping[str, Any], tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.night([message({"x": stated}, id=1, x="AQ=="), {"schema": 7, "payload": message({}, id=2)["payload"]}])
    assert [row.get("x") for row in lake.rows] == ["AQ==", None]


def test_init_finds_the_types(tmp_path: Path) -> None:
    Lake(tmp_path)
    (tmp_path / "landing" / "a.jsonl").write_text(
        "".join(json.dumps(message({"d": DAY}, id=n, d=19724 + n % 5)) + "\n" for n in range(40))
    )
    found = propose(str(tmp_path / "landing"))
    chosen = {name: choice.value for name, choice in (found.settings | found.read).items()}
    assert (chosen["envelope"], chosen["partition_by"]) == ("debezium", ["d"])
    assert {c.name: c.type for c in found.columns}["id"] == "int64"


def test_position_is_text(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={"__log_position": "bigint"})
    with pytest.raises(ConfigurationError) as e:
        lake.night([message({}, id=1)])
    assert e.value.code == "bad-setting"
    lake.set(schema={"__log_position": "string"})
    lake.night([message({}, id=1)])


@pytest.mark.parametrize("is_stated", [True, False])
def test_warnings_about_text_are_of_guessed_types(is_stated: bool, tmp_path: Path) -> None:
    """Of a partition column, and of one in which a word is no date."""
    lake = Lake(tmp_path, partition_by=["p"])
    fields = {"p": {"type": "string"}, "day": {"type": "string"}}
    messages = [message(fields, id=i, p="east", day="2024-01-01" if i else "x") for i in range(40)]
    warnings = lake.night([one if is_stated else one["payload"] for one in messages]).warnings
    assert [w.split("'")[1] for w in warnings if " text" in w] == ([] if is_stated else ["p", "day"])
