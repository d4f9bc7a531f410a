"""What Debezium sends of every type, with the `schema` part: `python record_types.py DATABASE > recorded/types-DATABASE.jsonl`.

Lines are `{"mode", "rows"}`, the rows as the database prints them, and then the messages of this `time.precision.mode`. Row 1
holds values, row 2 nulls, and row 3 what no type of a lake holds.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from databases import DATABASES

MODES = ("adaptive_time_microseconds", "adaptive", "connect", "isostring", "nanoseconds")
MOMENTS = ("d", "t", "ts")
PRINTED = {"bits": "bin(bits)", "vb": "hex(vb)", "bl": "hex(bl)"}
TABLES = {
    "postgresql": (
        "mood as enum ('ok', 'bad')",
        {
            "d date": "'2024-01-02'", "t time": "'23:59:59.999999'", "ts timestamp": "'2024-01-02 03:04:05.678901'",
            "t3 time(3)": "'10:20:30.456'", "ts3 timestamp(3)": "'1969-12-31 23:59:59.999'",
            "tz timestamptz": "'2024-03-31 00:30:00.123456+01'", "ttz timetz": "'23:59:59+02'",
            "n numeric(10,2)": "-12345678.90", "n50 numeric(50,10)": "1234567890123456789012345678901234567890.5",
            "n0 numeric(12,0)": "123456789012", "nv numeric": "-12.50", "m money": "1234.5", "i2 smallint": "-32768",
            "i4 int": "2147483647", "i8 bigint": "9223372036854775807", "f4 real": "1.5", "f8 double precision": "-0.1",
            "b boolean": "true", "v varchar(20)": "'2024-01-02'", "u uuid": "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
            "j jsonb": """'{"a": [1, 2.50]}'""", "x xml": "'<a/>'", "e mood": "'ok'", "by bytea": "'\\x00ff'",
            "bits bit(11)": "B'10000000101'", "iv interval": "'1 month 2 days 03:04:05.5'", "ai int[]": "'{1,NULL,3}'",
            "ad date[]": "'{2024-01-02,NULL}'", "an numeric(6,2)[]": "'{1.50,-2.25}'", "p point": "'(1.5,2)'",
        },
        {"t": "'24:00:00'", "ts": "'infinity'", "d": "'infinity'", "nv": "123456789012345678901234567890", "tz": "'infinity'"},
    ),
    "mariadb": (
        None,
        {
            "d date": "'2024-01-02'", "t time(6)": "'23:59:59.999999'", "ts datetime(6)": "'2024-01-02 03:04:05.678901'",
            "t0 time": "'10:20:30'", "ts0 datetime": "'1969-12-31 23:59:59'", "ts3 datetime(3)": "'1001-01-01 00:00:00.001'",
            "tz timestamp(6) null": "'2024-03-31 00:30:00.123456'", "y year": "2024", "n decimal(10,2)": "-12345678.90",
            "n65 decimal(65,5)": "'123456789012345678901234567890123456789012345678901234567890.12345'",
            "n0 decimal(12,0)": "123456789012", "i1 tinyint": "-128", "i3 mediumint unsigned": "16777215",
            "i8 bigint": "9223372036854775807", "f4 float": "1.5", "f8 double": "-0.1", "v varchar(20)": "'2024-01-02'",
            "j json": """'{"a": [1, 2.50]}'""", "e enum('ok','bad')": "'ok'", "s set('a','b')": "'a,b'", "b1 bit(1)": "b'1'",
            "bits bit(11)": "b'10000000101'", "vb varbinary(4)": "x'00ff'", "bl blob": "x'0102ff'",
        },
        {"t": "'-838:59:59'", "d": "null"},
    ),
}  # fmt: skip


def record(kind: str, database: Any, mode: str, feed: Path) -> tuple[list[Any], list[str]]:
    enum, columns, odd = TABLES[kind]
    columns = columns if mode == MODES[0] else {c: v for c, v in columns.items() if c.split()[0] in MOMENTS}
    names = [column.split()[0] for column in columns]
    db = database.connect()
    with db.cursor() as cursor:
        if enum and mode == MODES[0]:
            cursor.execute(f"create type {enum}")
        cursor.execute(f"create table typed (id int primary key, {', '.join(columns)})")
        if kind == "postgresql":
            cursor.execute("create publication dbz_publication for table typed")
        cursor.execute(f"insert into typed values (1, {', '.join(columns.values())})")
        db.commit()
        connector = database.connector(feed)
        connector.properties |= {"value.converter.schemas.enable": "true", "time.precision.mode": mode}
        connector.properties["table.include.list"] = "m.typed" if kind == "mariadb" else "public.typed"
        connector.start()
        connector.wait_for('"op":"r"')
        cursor.execute("insert into typed (id) values (2)")
        if mode == MODES[0]:
            cursor.execute(f"insert into typed (id, {', '.join(odd)}) values (3, {', '.join(odd.values())})")
        db.commit()
        connector.wait_for('"op":"c"', 2 if mode == MODES[0] else 1)
        printed = [f"{n}::text" if kind == "postgresql" else PRINTED.get(n, f"cast({n} as char)") for n in names]
        cursor.execute(f"select id, {', '.join(printed)} from typed order by id")
        rows = [dict(zip(["id", *names], row, strict=True)) for row in cursor.fetchall()]
        connector.stop()
        cursor.execute("drop table typed")
        if kind == "postgresql":
            cursor.execute("drop publication dbz_publication")
        db.commit()
    db.close()
    return rows, [line.partition("\t")[2] for line in feed.read_text().splitlines()]


def main(kind: str) -> None:
    root = Path(tempfile.mkdtemp(prefix="capture-"))
    root.chmod(0o755)
    database = DATABASES[kind](root)
    try:
        for number, mode in enumerate(MODES):
            if kind == "mariadb" and mode == "adaptive":
                continue
            rows, messages = record(kind, database, mode, root / f"{number}.tsv")
            print(json.dumps({"mode": mode, "rows": rows}))
            for message in messages:
                if message != "null" and '"op"' in message:
                    print(json.dumps(json.loads(message)))
            if number < len(MODES) - 1:
                database.forget()
    finally:
        database.stop()
    shutil.rmtree(root)


if __name__ == "__main__":
    main(sys.argv[1])
