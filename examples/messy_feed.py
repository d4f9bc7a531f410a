"""Make a feed as shops send it: twelve days of orders in 14 files of many kinds, with mistakes; and the truth about it.

python examples/messy_feed.py FOLDER

FOLDER/landing/orders has a folder a day: CSV with a byte order mark, CSV with semicolons and decimal commas, JSON lines, an array
of JSON objects, Parquet, and a .gz that was cut off. Two files write dates as 01/03/2024. `three` is once a quantity and `oops`
once a price. Updates come up to ten days late, one order comes three times in one file, and `is_deleted` is Y for deletes.
FOLDER/truth.jsonl has the rows that a table must have in the end.
"""

import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, object]
COLUMNS = ("order_id", "order_date", "customer", "quantity", "price", "updated_at", "is_deleted")
DAYS = [date(2024, 3, 1) + timedelta(days=n) for n in range(12)]
ORDERS, UPDATES, DELETES = 4856, 707, 150
"""5,713 rows. 4,704 orders are left: of two, the only row is spoilt."""


class Feed:
    """Rows in the order of their arrival, and what is true after them."""

    def __init__(self) -> None:
        self.chance = random.Random(11)
        self.truth: dict[str, Row] = {}
        self.nights: list[list[Row]] = [[] for _ in DAYS]

    def send(self, night: int, row: Row) -> None:
        self.nights[night].append(row)
        if row["is_deleted"] == "Y":
            del self.truth[str(row["order_id"])]
        else:
            self.truth[str(row["order_id"])] = row

    def order(self, night: int, number: int) -> None:
        day = DAYS[night] - timedelta(days=self.chance.choice([0, 0, 0, 1, 2, 9]))
        at = midnight(night) + timedelta(seconds=number % 40_000)
        row = {"order_id": f"SO-{number}", "order_date": day, "customer": f"customer, {number % 97}"}
        price = self.chance.randrange(100, 99_999) / 100
        self.send(
            night,
            {**row, "quantity": 1 + number % 9, "price": price, "updated_at": at, "is_deleted": "N"},
        )

    def change(self, night: int, order: str, hour: int, **values: object) -> None:
        at = midnight(night) + timedelta(hours=hour, minutes=self.chance.randrange(60))
        self.send(night, {**self.truth[order], **values, "updated_at": at})


def midnight(night: int) -> datetime:
    return datetime.combine(DAYS[night], datetime.min.time())


def make_feed() -> Feed:
    feed = Feed()
    numbers = iter(range(10_000, 10_000 + ORDERS))
    for night in range(len(DAYS)):
        late = [order for order, row in feed.truth.items() if (DAYS[night] - _date_of(row)).days <= 10]
        feed.chance.shuffle(late)
        for _ in range(ORDERS // len(DAYS) + (night < ORDERS % len(DAYS))):
            feed.order(night, next(numbers))
        if night:  # the updates and deletes of eleven nights
            updates = UPDATES // 11 + (night <= UPDATES % 11) - 2 * (night == 5)
            deletes = DELETES // 11 + (night <= DELETES % 11)
            for order in late[:updates]:
                feed.change(night, order, 20, price=feed.chance.randrange(100, 99_999) / 100)
            if night == 5:  # one order three times in one file
                feed.change(night, late[0], 21, quantity=8)
                feed.change(night, late[0], 22, quantity=9)
            for order in late[updates : updates + deletes]:
                feed.change(night, order, 23, is_deleted="Y")
    return feed


def _date_of(row: Row) -> date:
    assert isinstance(row["order_date"], date)
    return row["order_date"]


def spoil(feed: Feed) -> dict[int, Row]:
    """Two rows whose values are no numbers, by night: these rows never come true."""
    bad = {}
    for night, column, value in ((2, "quantity", "three"), (8, "price", "oops")):
        row = next(r for r in feed.nights[night] if feed.truth.get(str(r["order_id"])) is r)
        del feed.truth[str(row["order_id"])]
        bad[night] = {**row, column: value}
        feed.nights[night][feed.nights[night].index(row)] = bad[night]
    return bad


def csv_text(rows: Sequence[Row], delimiter: str = ",", dates: str = "%Y-%m-%d", comma: bool = False) -> str:
    lines = [delimiter.join(COLUMNS)]
    for row in rows:
        price = str(row["price"]).replace(".", ",") if comma else str(row["price"])
        name = f'"{row["customer"]}"' if delimiter in str(row["customer"]) else str(row["customer"])
        fields = [
            row["order_id"],
            _date_of(row).strftime(dates),
            name,
            row["quantity"],
            price,
            row["updated_at"],
            row["is_deleted"],
        ]
        lines.append(delimiter.join(map(str, fields)))
    return "\n".join(lines) + "\n"


def json_rows(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "order_date": str(row["order_date"]), "updated_at": str(row["updated_at"])} for row in rows]


def write(folder: Path) -> None:
    feed = make_feed()
    spoil(feed)
    kinds: dict[int, tuple[str, Callable[[Sequence[Row]], bytes]]] = {
        0: ("orders.csv", lambda rows: csv_text(rows).encode("utf-8-sig")),
        3: ("orders.csv", lambda rows: csv_text(rows, ";", comma=True).encode()),
        4: ("orders.jsonl", lambda rows: "".join(json.dumps(row) + "\n" for row in json_rows(rows)).encode()),
        6: ("orders.json", lambda rows: json.dumps(json_rows(rows), indent=1).encode()),
        7: ("orders.csv", lambda rows: csv_text(rows, dates="%d/%m/%Y").encode()),
        9: ("orders.csv", lambda rows: csv_text(rows, dates="%d/%m/%Y").encode()),
    }
    for night, rows in enumerate(feed.nights):
        target = folder / "landing/orders" / DAYS[night].isoformat()
        target.mkdir(parents=True)
        if night == 10:
            pq.write_table(pa.Table.from_pylist(rows), target / "orders.parquet")
            continue
        name, content = kinds.get(night, ("orders.csv", lambda rows: csv_text(rows).encode()))
        if night == 11:  # a second file of the last day, behind the first
            (target / "orders-2.csv").write_bytes(content(rows[300:]))
            rows = rows[:300]
        (target / name).write_bytes(content(rows))
    whole = gzip.compress(csv_text(feed.nights[1]).encode(), mtime=0)
    (folder / "landing/orders" / DAYS[5].isoformat() / "again.csv.gz").write_bytes(whole[: len(whole) // 2])
    with (folder / "truth.jsonl").open("w") as truth:
        for row in json_rows(list(feed.truth.values())):
            truth.write(json.dumps({name: value for name, value in row.items() if name != "is_deleted"}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
