"""The examples of the systems whose users come here, each with its own data: chombo's bulk mutator, Hive as a database, the
data lake of receipts, and the telecom store of changes. Files that come again under other names change nothing that readers see.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lakeupsert import Table
from lakeupsert.operations.run import RunResult
from lakeupsert.pipeline import strategy as strategies


def opened(root: Path, settings: str) -> Table:
    file = root / "lakeupsert.toml"
    file.write_text(f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\n{settings}')
    return Table.open(file)


def night(table: Table, root: Path, files: dict[str, str]) -> RunResult:
    for name, text in files.items():
        path = root / "landing" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return table.run(host="local")


def rows(table: Table, *names: str, history: bool = False) -> list[tuple[str, ...]]:
    found = table.to_arrow(history=history).read_all().to_pylist()
    return sorted(tuple(str(row[name]) for name in names) for row in found)


def assert_files_that_come_again_change_nothing(table: Table, root: Path) -> None:
    before = table.to_arrow().read_all()
    landed = [path for path in (root / "landing").rglob("*") if path.is_file()]
    for path in sorted(landed):
        path.with_name(f"{path.stem}_again{path.suffix}").write_bytes(path.read_bytes())
    assert table.run(host="local").append is not None
    after = table.to_arrow().read_all()
    names = [name for name in before.schema.names if name != "record_timestamp"]
    assert after.select(names) == before.select(names)
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_products_of_chombo(tmp_path: Path, strategy: str) -> None:
    """A file of inserts and updates and a file of deletes in one run: no header, `id.field.ordinals=0`, epoch seconds last,
    `deleted.record.file.prefix=del`; and two updates of one product in one file, the last of which wins. `maintain.version`: what
    is superseded stays in a history."""
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nkey = ["_c0"]\npartition_by = ["_c1"]\norder_by = ["_c5"]\nformat = "delimited"\n'
        "history = true\n"
        '[tables.t.read]\ndelimiter = ","\n[tables.t.schema]\n_c5 = "bigint"\n[tables.t.delete]\nfile_prefix = "del"\n',
    )
    master = [
        "VR8NCNE7DV,electronics,acme,45.50,88,1427766458",
        "K1Q0MB22TL,electronics,zenith,12.00,7,1427766458",
        "9TT3HHW0PX,garden,acme,3.25,140,1427766458",
    ]
    night(table, tmp_path, {"products_0": "\n".join(master) + "\n"})
    mixed = [
        "VR8NCNE7DV,electronics,acme,45.50,85,1428000000",
        "VR8NCNE7DV,electronics,acme,45.50,82,1428415316",
        "M4UN1D6RZA,garden,zenith,8.00,20,1428415316",
        "9TT3HHW0PX,garden,acme,3.25,1,1427000000",
    ]
    gone = "K1Q0MB22TL,electronics,zenith,12.00,7,1428415316\nNEVERTHERE,garden,acme,1.00,1,1428415316\n"
    night(table, tmp_path, {"products_1": "\n".join(mixed) + "\n", "del_1": gone})
    assert rows(table, "_c0", "_c4") == [("9TT3HHW0PX", "140"), ("M4UN1D6RZA", "20"), ("VR8NCNE7DV", "82")]
    changes = table.snapshots()[0].body.changes
    assert (changes.inserted, changes.updated, changes.deleted, changes.unchanged, changes.late) == (1, 1, 1, 1, 1)
    versions = [
        ("9TT3HHW0PX", "1", "1427000000", "1427766458"),
        ("9TT3HHW0PX", "140", "1427766458", "None"),
        ("K1Q0MB22TL", "7", "1427766458", "1428415316"),
        ("M4UN1D6RZA", "20", "1428415316", "None"),
        ("VR8NCNE7DV", "82", "1428415316", "None"),
        ("VR8NCNE7DV", "85", "1428000000", "1428415316"),
        ("VR8NCNE7DV", "88", "1427766458", "1428000000"),
    ]
    assert rows(table, "_c0", "_c4", "valid_from", "valid_to", history=True) == versions
    assert_files_that_come_again_change_nothing(table, tmp_path)
    assert rows(table, "_c0", "_c4", "valid_from", "valid_to", history=True) == versions


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_sales_of_hive(tmp_path: Path, strategy: str) -> None:
    """Batches of regional databases, comma-delimited, without header: partitions by store and date, operations I, U, D. The
    batch decides, not `change_ts`, as clocks of regions differ; a key is one of its partition."""
    columns = ["sell_id", "acct_id", "change_ts", "create_ts", "payment_type_id", "status_id", "total_amt", "batch"]
    columns += ["op_code", "store_id", "create_date"]
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nkey = ["sell_id"]\npartition_by = ["store_id", "create_date"]\norder_by = ["batch"]\n'
        f'format = "csv"\n[tables.t.read]\nheader = false\ncolumns = {columns}\n'
        '[tables.t.schema]\nbatch = "int"\nsell_id = "bigint"\n'
        '[tables.t.delete]\ncolumn = "op_code"\nvalues = ["D"]\nupserts = ["I", "U"]\n',
    )

    def sale(sell_id: int, amount: float, batch: int, op: str, store: int, day: str, changed: str = "12:00:00") -> str:
        return f"{sell_id},7,2013-06-02 {changed},2013-06-01 09:00:00,1,open,{amount},{batch},{op},{store},{day}\n"

    first = sale(1, 10.0, 1, "I", 3, "2013-06-01") + sale(2, 20.0, 1, "I", 3, "2013-06-01")
    first += sale(1, 11.0, 1, "I", 4, "2013-06-01") + sale(3, 30.0, 1, "I", 4, "2013-06-02")
    night(table, tmp_path, {"stage/1": first})
    second = sale(1, 10.5, 2, "U", 3, "2013-06-01", "11:00:00") + sale(2, 20.0, 2, "D", 3, "2013-06-01")
    second += sale(4, 40.0, 2, "I", 4, "2013-06-02") + sale(3, 31.0, 2, "U", 4, "2013-06-02")
    night(table, tmp_path, {"stage/2": second})
    assert rows(table, "store_id", "create_date", "sell_id", "total_amt") == [
        ("3", "2013-06-01", "1", "10.5"),
        ("4", "2013-06-01", "1", "11.0"),
        ("4", "2013-06-02", "3", "31.0"),
        ("4", "2013-06-02", "4", "40.0"),
    ]
    assert_files_that_come_again_change_nothing(table, tmp_path)


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_shoes_and_shorts_of_the_data_lake(tmp_path: Path, strategy: str) -> None:
    """Shorts that are bought in July make the shoes of January cheaper: a record of the same transaction and date, received
    later. Landing folders are days of receipt; no record has a time of its own, so receipt decides."""
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nkey = ["transaction_id"]\npartition_by = ["transaction_date"]\n'
        'landing_dates = "%d/%m/%Y"\n',
    )
    header = "transaction_id,transaction_date,product,price\n"
    night(table, tmp_path, {"02/01/2020/a.csv": header + "1,2020-01-01,shoes,10.00\n2,2020-01-01,socks,2.00\n"})
    night(table, tmp_path, {"08/07/2020/a.csv": header + "3,2020-07-07,shorts,4.33\n1,2020-01-01,shoes,8.67\n"})
    assert rows(table, "transaction_date", "product", "price") == [
        ("2020-01-01", "shoes", "8.67"),
        ("2020-01-01", "socks", "2.0"),
        ("2020-07-07", "shorts", "4.33"),
    ]
    assert sorted(p.name for p in (tmp_path / "processed").glob("transaction_date=*")) == [
        "transaction_date=2020-01-01",
        "transaction_date=2020-07-07",
    ]
    assert_files_that_come_again_change_nothing(table, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_shoes_and_shorts_as_an_update(tmp_path: Path, strategy: str) -> None:
    """The statement that the data lake starts from, `UPDATE … SET … WHERE pk IN (…)`: shoes of January at $10 and shorts of July
    at $5 become a bundle for $13, 0.133 off each. Both keep transaction, date and id, and are received anew."""
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nkey = ["transaction_id"]\npartition_by = ["transaction_date"]\n'
        'landing_dates = "%d/%m/%Y"\n[tables.t.schema]\nprice = "decimal(9,2)"\n',
    )
    header = "transaction_id,transaction_date,product,price\n"
    night(table, tmp_path, {"02/01/2020/a.csv": header + "1,2020-01-01,shoes,10.00\n2,2020-01-01,socks,2.00\n"})
    night(table, tmp_path, {"08/07/2020/a.csv": header + "3,2020-07-07,shorts,5.00\n"})
    before = table.to_arrow().read_all().to_pylist()
    bundle = {"price": "round(price * (1 - 0.133), 1)"}
    planned = table.update(bundle, where="transaction_id in ('1', '3')", batch_id="bundle")
    assert planned.rows == {"transaction_date=2020-01-01": 1, "transaction_date=2020-07-07": 1}
    assert table.to_arrow().read_all().to_pylist() == before
    for _ in range(2):
        table.update(bundle, where="transaction_id in ('1', '3')", batch_id="bundle", dry=False)
        assert rows(table, "transaction_date", "product", "price") == [
            ("2020-01-01", "shoes", "8.70"),
            ("2020-01-01", "socks", "2.00"),
            ("2020-07-07", "shorts", "4.30"),
        ]
    now = table.to_arrow().read_all().to_pylist()
    raised = [new["record_timestamp"] > old["record_timestamp"] for new, old in zip(now, before, strict=True)]
    assert raised == [True, False, True]
    assert len(list((tmp_path / "processed").glob("transaction_date=*"))) == 2
    for _ in range(2):
        assert not table.reconcile(deep=True).unbalanced
        table.reprocess(source="landing", host="local")
        assert table.to_arrow().read_all().to_pylist() == now


@pytest.mark.few(1)
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_subscribers_of_a_telecom_store(tmp_path: Path, strategy: str) -> None:
    """Micro-batches of changes that hold only what changed, hashed by subscriber into buckets, are merged into full records;
    billing and the network own their columns. A batch that comes late or again changes nothing that is newer."""
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nbucket = "6kB"\nkey = ["msisdn"]\npartition_by = ["circle"]\norder_by = ["billed_at"]\n'
        'mode = "columns"\n[tables.t.schema]\nmsisdn = "bigint"\nbilled_at = "bigint"\nseen_at = "bigint"\ncell = "string"\n'
        '[tables.t.groups.network]\norder_by = ["seen_at"]\ncolumns = ["cell", "roaming"]\n',
    )
    numbers = [919810000000 + n for n in range(300)]

    def lines(*records: str) -> str:
        return "\n".join(records) + "\n"

    plans = lines(
        *(f'{{"msisdn":{n},"circle":"delhi","billed_at":10,"plan":"basic","balance":{n % 90}}}' for n in numbers)
    )
    cells = lines(
        *(f'{{"msisdn":{n},"circle":"delhi","seen_at":7,"cell":"c{n % 5}","roaming":false}}' for n in numbers)
    )
    night(table, tmp_path, {"billing/1.jsonl": plans, "network/1.jsonl": cells})
    first, second, third = numbers[:3]
    night(
        table,
        tmp_path,
        {
            "billing/2.jsonl": lines(
                f'{{"msisdn":{first},"circle":"delhi","billed_at":12,"balance":500}}',
                f'{{"msisdn":{second},"circle":"delhi","billed_at":13,"plan":"gold"}}',
            ),
            "network/2.jsonl": lines(
                f'{{"msisdn":{first},"circle":"delhi","seen_at":6,"cell":"late"}}',
                f'{{"msisdn":{third},"circle":"delhi","seen_at":9,"roaming":true}}',
            ),
        },
    )
    night(
        table,
        tmp_path,
        {
            "billing/3.jsonl": lines(
                f'{{"msisdn":{first},"circle":"delhi","billed_at":11,"plan":"silver","balance":1}}',
                f'{{"msisdn":{second},"circle":"delhi","billed_at":11,"plan":"silver","balance":2}}',
            )
        },
    )
    assert rows(table, "msisdn", "billed_at", "plan", "balance", "seen_at", "cell", "roaming")[:4] == [
        (str(first), "12", "silver", "500", "7", f"c{first % 5}", "False"),
        (str(second), "13", "gold", "2", "7", f"c{second % 5}", "False"),
        (str(third), "10", "basic", str(third % 90), "9", f"c{third % 5}", "True"),
        (str(numbers[3]), "10", "basic", str(numbers[3] % 90), "7", f"c{numbers[3] % 5}", "False"),
    ]
    assert len(rows(table, "msisdn")) == len(numbers)
    assert 1 < len({(file.file.bucket, file.file.bits) for file in table.files()}) < 20
    assert_files_that_come_again_change_nothing(table, tmp_path)


BUCKETS = 8
SUBSCRIBERS = [919810000000 + n for n in range(160)]
COLUMNS = ("msisdn", "scn", "circle", "plan", "balance", "cell")
Record = dict[str, Any]


def bucket_of(msisdn: int) -> str:
    """The partition, by the reference XXH64 of the bytes that docs/FORMAT.md gives an integer."""
    return f"msisdn_bucket={int(xxhash.xxh64_intdigest(msisdn.to_bytes(8, 'little', signed=True))) % BUCKETS}"


def micro_batches(rng: random.Random) -> list[list[Record]]:
    """All subscribers, then changes by the commit numbers of their database: the key and what changed. A batch has so many
    records, and a record may come several batches too late. Some subscribers leave and come back, some are new."""
    first = [
        {"msisdn": n, "scn": scn, "op": "I", "circle": "delhi", "plan": "basic", "balance": scn % 90}
        for scn, n in enumerate(SUBSCRIBERS[:150])
    ]
    changes: list[Record] = []
    for scn in range(len(first), len(first) + 84):
        values = {
            "plan": rng.choice(["gold", "silver", None]),
            "balance": rng.randrange(900),
            "cell": f"c{rng.randrange(9)}",
        }
        changed = rng.sample(sorted(values), rng.choice([1, 1, 2]))
        op = rng.choice("UUUUUUUD")
        record = {"msisdn": rng.choice(SUBSCRIBERS[110:]), "scn": scn, "op": op}
        changes.append(record if op == "D" else {**record, **{name: values[name] for name in changed}})
    changes.sort(key=lambda record: record["scn"] + rng.uniform(0, 60))
    return [first, *(changes[n : n + 12] for n in range(0, len(changes), 12))]


def merged(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The full records, as `rows` gives them: what each brings in the order of the database, from nothing after a delete."""
    found: dict[int, Record] = {}
    for record in sorted(records, key=lambda record: record["scn"]):
        if record["op"] == "D":
            found.pop(record["msisdn"], None)
        else:
            found[record["msisdn"]] = {**dict.fromkeys(COLUMNS), **found.get(record["msisdn"], {}), **record}
    return sorted(tuple(str(row[name]) for name in COLUMNS) for row in found.values())


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_micro_batches_of_a_telecom_store_by_hash(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base data by the hash of the key; micro-batches of partial updates become full records, and each is acknowledged as a
    whole; a running query sees none of them; minor and major compaction; a look-up by key opens one bucket."""
    monkeypatch.setattr(strategies, "SMALL_BYTES", 0)
    monkeypatch.setattr(strategies, "TOGETHER", 3)  # so that deltas are folded: minor compaction
    table = opened(
        tmp_path,
        f'strategy = "{strategy}"\nkey = ["msisdn"]\npartition_by = ["bucket({BUCKETS}, msisdn)"]\norder_by = ["scn"]\n'
        'mode = "columns"\n[tables.t.schema]\nmsisdn = "bigint"\nscn = "bigint"\nbalance = "bigint"\ncell = "string"\n'
        '[tables.t.delete]\ncolumn = "op"\nvalues = ["D"]\n',
    )
    came: list[Record] = []
    deltas = 0
    for number, batch in enumerate(micro_batches(random.Random(4))):
        before = table.to_arrow().read_all() if came else None
        running, files = (table.to_arrow(), table.files()) if came else (None, ())
        done = night(table, tmp_path, {f"{number:02d}.jsonl": "".join(json.dumps(record) + "\n" for record in batch)})
        assert running is None or running.read_all() == before
        came += batch
        assert rows(table, *COLUMNS) == merged(came)
        assert done.append is not None
        assert done.append.entry.touched.keys() == {bucket_of(record["msisdn"]) for record in batch}
        assert {f.name for f in files if f.partition not in done.append.entry.touched} <= {
            f.name for f in table.files()
        }
        deltas = max(deltas, sum(file.path.endswith(".delta") for file in table.files()))
    assert len({file.partition for file in table.files()}) == BUCKETS
    assert (deltas > BUCKETS) == (strategy == "delta")
    shown = rows(table, *COLUMNS)
    for row in shown[::40]:
        look_up = f"msisdn = {row[0]}"
        assert {file.partition for file in table.files(where=look_up)} == {bucket_of(int(row[0]))}
        found = table.to_arrow(where=look_up).read_all().to_pylist()
        assert [tuple(str(one[name]) for name in COLUMNS) for one in found] == [row]
    table.compact(full=True)
    assert not any(file.path.endswith(".delta") for file in table.files())
    assert rows(table, *COLUMNS) == shown == merged(came)
    assert_files_that_come_again_change_nothing(table, tmp_path)
