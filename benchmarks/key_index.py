"""What `key_scope = "table"` costs: the key index at 10 million keys, and appends of 100,000 rows that look their keys up in it.

Reads     nothing; makes a table of plain Parquet in 365 partitions, with keys of whole numbers and with keys of text
Writes    build/bench, and benchmarks/results/key-index.md
Repeat    safe: begins anew

The files are adopted twice, by a table of either `key_scope`; the difference is what making the index takes. With `--host spark`
tasks make it, and what they pass on goes through packs in the store. Then the same batches come to both: nine of ten rows for
the partition where their key is, one of twenty moves its key, one of twenty brings a new one. As many keys have to move as were
told to; otherwise it ends with an error. With `--mode columns` their stored rows go with them. At last, when all that is merged,
deletes come that bring their key alone, as many as a batch has rows: their `append`, and a whole night of others with its merges.
"""

import argparse
import resource
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.machine import commit, facts, sentence, versions
from lakeupsert import sparkenv
from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.engine.keys import rebuild as engine_rebuild
from lakeupsert.engine.keys import settle as engine_settle
from lakeupsert.pipeline import table_keys

RESULTS = Path(__file__).parent / "results"
PARTITIONS = 365
FIRST = date(2020, 1, 1)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keys", type=int, default=10_000_000)
    options.add_argument("--rows", type=int, default=100_000, help="of each batch, default: %(default)s")
    options.add_argument("--batches", type=int, default=5, help="default: %(default)s")
    options.add_argument("--mode", choices=["rows", "columns"], default="rows", help="default: %(default)s")
    options.add_argument("--host", choices=["local", "spark"], default="local", help="default: %(default)s")
    options.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    given = options.parse_args()
    sparkenv.prepare()
    lines = []
    for kind in ("int64", "text"):
        lines.append(measured(kind, given, given.work.absolute() / "key-index"))
        print(lines[-1], flush=True)
    head = [
        "key", "keys", "index, bytes a key", "adopt, s", "with index, s", "packs, MB",
        "append, s", "with index, s", "of these settle, s", "anew, s", "of these settle, s",
        "deletes by key: append, s", "requests", "their night, s", "requests", "peak, MB",
    ]  # fmt: skip
    told = [
        "# The key index",
        "",
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'pyarrow'))},",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}.",
        f"`python -m benchmarks.key_index --mode {given.mode} --host {given.host}`:",
        f"{given.batches} batches of {given.rows:,} rows,",
        'medians of `append` without and with `key_scope = "table"`; *anew*: the last one, which wrote it.',
        "Packs: what tasks passed on through the store. Peak memory is of the driver, which made the data too.",
        "",
        f"| {' | '.join(head)} |",
        "|---|" + "---:|" * (len(head) - 1),
        *lines,
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "key-index.md").write_text("\n".join(told))
    return 0


def measured(kind: str, given: Any, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(1)
    homes = rng.integers(0, PARTITIONS, given.keys)
    for day in range(PARTITIONS):
        write(folder / "partition" / name(day) / "base.parquet", kind, np.flatnonzero(homes == day), 0)
    shutil.copytree(folder / "partition", folder / "table")
    tables, adopting, appending = {}, {}, {}
    packs, settling = watch()
    for scope in ("partition", "table"):
        (folder / f"landing-{scope}").mkdir()
        tables[scope] = Table("t", settings(folder, scope, given.mode))
        begun = perf_counter()
        tables[scope].adopt(host=given.host)
        adopting[scope] = perf_counter() - begun
        appending[scope] = list(appended(tables[scope], kind, given, folder / f"landing-{scope}", homes.copy()))
    size, keys = bytes_of_index(tables["table"]), given.keys + given.batches * (given.rows // 20)
    deletes = [*deleted(tables["table"], kind, given, folder / "landing-table", keys)]
    shutil.rmtree(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    appends = [median(appending[s][:-1]) for s in ("partition", "table")]
    seconds = [*appends, median(settling[:-1]), appending["table"][-1], settling[-1]]
    cells = [kind, f"{keys:,}", f"{size / keys:.1f}", *(f"{adopting[s]:.2f}" for s in ("partition", "table"))]
    cells += [f"{sum(packs) / 1e6:.0f}", *(f"{s:.2f}" for s in seconds), *deletes, f"{peak:,.0f}"]
    return f"| {' | '.join(cells)} |"


def watch() -> tuple[list[int], list[float]]:
    """Two lists that grow: bytes of packs that a rebuild deletes, and seconds of each `settle`."""
    packs: list[int] = []
    seconds: list[float] = []

    def rebuild(to: Any, host: Any, sources: Any, rows: Any, discard: Any) -> Any:
        def counted(names: Iterable[str]) -> None:
            names = [*names]
            packs.extend(to.store.head(name).size for name in names)
            discard(names)

        return engine_rebuild.rebuild_index(to, host, sources, rows, counted)

    def settle(*given: Any, **options: Any) -> Any:
        begun = perf_counter()
        settled = engine_settle.settle(*given, **options)
        seconds.append(perf_counter() - begun)
        return settled

    table_keys.rebuild_index, table_keys.settle = rebuild, settle
    return packs, seconds


def settings(folder: Path, scope: Any, mode: Any) -> TableSettings:
    return TableSettings(
        landing=str(folder / f"landing-{scope}"),
        processed=str(folder / scope),
        key=("id",),
        partition_by=("day",),
        order_by=("at",),
        key_scope=scope,
        mode=mode,
        delete=DeleteSettings(column="op", values=("D",)),
    )


def appended(table: Table, kind: str, given: Any, landing: Path, homes: Any) -> Iterator[float]:
    """Seconds of each batch; ``homes`` has the partition of each key, and moves on."""
    rng = np.random.default_rng(2)
    for number in range(1, given.batches + 1):
        ids = rng.choice(len(homes), given.rows - given.rows // 20, replace=False)
        moves = ids[: given.rows // 20]
        homes[moves] = (homes[moves] + 1 + rng.integers(0, PARTITIONS - 1, len(moves))) % PARTITIONS
        homes = np.append(homes, rng.integers(0, PARTITIONS, given.rows // 20))
        ids = np.append(ids, np.arange(len(homes) - given.rows // 20, len(homes)))
        days = pa.array([FIRST + timedelta(days=n) for n in range(PARTITIONS)]).take(pa.array(homes[ids]))
        pq.write_table(rows_of(kind, ids, number).append_column("day", days), landing / f"{number}.parquet")
        # The last one writes the index anew, which the others leave, as little of it has changed.
        table_keys.MOST_CHANGED = 0 if number == given.batches else 1
        begun = perf_counter()
        result = table.append(host=given.host)
        yield perf_counter() - begun
        assert result is not None
        moved = result.entry.keys_moved
        if table.settings.key_scope == "table" and moved != len(moves):
            raise SystemExit(f"{moved} keys moved, and {len(moves)} were to move")


def deleted(table: Table, kind: str, given: Any, landing: Path, keys: int) -> Iterator[str]:
    """Seconds and requests of an `append` of deletes that bring their key alone, and of the night that merges them."""
    table_keys.MOST_CHANGED = 1 / 4
    table.run(host=given.host)
    before = table.to_arrow(columns=["id"]).read_all().num_rows
    for night in (0, 1):
        ids = np.random.default_rng(3).permutation(keys)[night * given.rows : (night + 1) * given.rows]
        rows = rows_of(kind, ids, given.batches + 1).select(["id", "at"])
        pq.write_table(rows.append_column("op", pa.repeat("D", len(ids))), landing / f"deletes-{night}.parquet")
        requests = sum(table.objects.store.requests.as_dict().values())
        begun = perf_counter()
        (table.run if night else table.append)(host=given.host)
        yield f"{perf_counter() - begun:.2f}"
        yield f"{sum(table.objects.store.requests.as_dict().values()) - requests:,}"
    after = table.to_arrow(columns=["id"]).read_all().num_rows
    if before - after != 2 * given.rows:
        raise SystemExit(f"{before - after} rows are gone, and {2 * given.rows} were deleted")


def bytes_of_index(table: Table) -> int:
    """With what changed since it was written."""
    head = table.objects.ledger.head()
    assert head is not None
    index = table_keys.named_index([link.body for link in table.objects.ledger.between(-1, head.number)])
    return sum(f.bytes for f in index.all) if index else 0


def rows_of(kind: str, ids: Any, batch: int) -> pa.Table:
    key = pa.array(ids.astype(np.int64))
    if kind == "text":  # like an order's number, 20 characters
        padded = pc.utf8_lpad(pc.cast(key, pa.string()), width=12, padding="0")
        key = pc.binary_join_element_wise("ORD-2020", padded, "")
    at = pa.array(ids.astype(np.int64) * 7919 % 86_400_000_000 + batch * 86_400_000_000).cast(pa.timestamp("us"))
    return pa.table({"id": key, "at": at, "price": pa.array(ids % 9973 / 100)})


def write(path: Path, kind: str, ids: Any, batch: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows_of(kind, ids, batch), path)


def name(day: int) -> str:
    return f"day={FIRST + timedelta(days=day)}"


if __name__ == "__main__":
    raise SystemExit(main())
