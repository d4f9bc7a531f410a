"""Sixty nights on partitions that are large enough for deltas: what does a night write and a reader read, for what came?

Reads     nothing; DuckDB makes every row from its number
Writes    build/amplification, and amplification-STRATEGY.json, .md and .svg in benchmarks/results
Repeat    safe: it begins with a new table

    make month                                          # after the receipts, whose partitions are too small for deltas

Three partitions of 400,000 rows get a quarter, one and four per cent of that every night, anywhere among their keys; three of
four rows are updates. A night, at 2 am of a simulated clock, is append, dedupe, publish and vacuum; with strategy `delta`,
which never pays off its debt, every seventh one compacts, too. A byte counts as written when it is in an object that was not
there before, manifests and vectors included.

    write amplification   bytes that dedupe (and compact) wrote until now, for each byte that was appended
    read amplification    bytes of the files and vectors that a reader opens, for each byte of its rows in one new base

The latter's lower part is reckoned with the base's bytes a row; after the last night a full compaction shows what it is.
Exit code 1: a row differs from DuckDB's, or strategy `auto` leaves the bounds that pipeline/strategy.py (ADR 0014) states.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.machine import commit, facts, sentence, versions
from benchmarks.month import KEPT, RESULTS, TwoOclock, panels
from benchmarks.rows import COLUMNS, coming, day, settings, stored
from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.pipeline.strategy import MOST_DEBT, TOGETHER

WORK = Path("build/amplification")
ROWS = 400_000
SHARES = (0.0025, 0.01, 0.04)
COMPACT_EVERY = 7
HEAD = (
    "| night | MB appended | MB written | write amplification | read amplification | deltas | objects |",
    "|---:|---:|---:|---:|---:|---:|---:|",
)
BOUNDED = ("debt / base", "deltas", "write amplification")
FIGURES = {
    "written": "MB that a night's dedupe wrote",
    "write_amplification": "write amplification until then",
    "read_amplification": "read amplification",
    "deltas": "deltas, of all partitions",
    "objects": "objects that a reader opens",
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nights", type=int, default=60)
    options.add_argument("--check-every", type=int, default=1, help="Compare with DuckDB every so many nights.")
    options.add_argument("--strategy", choices=["auto", "delta", "rewrite"], default="auto")
    given = options.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    nights = list(_nights(given.nights, given.check_every, given.strategy))
    wrong = [f"night {n['night']}: {n['different']} rows differ" for n in nights if n["different"]]
    summary = ["| partition, and bounds of `auto` | " + " | ".join(BOUNDED) + " |", "|---|" + "---:|" * len(BOUNDED)]
    for partition in nights[-1]["partitions"]:
        bounded = list(_bounded([night["partitions"][partition] for night in nights]))
        summary.append(
            f"| {partition} | " + " | ".join(f"{found:.2f} ({most:.2f})" for _, found, most in bounded) + " |"
        )
        if given.strategy == "auto":
            wrong += [f"{partition}: {what} is above its bound" for what, found, most in bounded if found > most]
    verdict = "; ".join(wrong) or "Every night that was compared is exact"
    if given.strategy == "auto" and not wrong:
        verdict += ", and all is within its bounds (in brackets)"
    verdict += f". Read amplification of the last night by a full compaction: {nights[-1]['compacted']:.2f}."
    RESULTS.mkdir(exist_ok=True)
    results = RESULTS / f"amplification-{given.strategy}"
    results.with_suffix(".json").write_text(json.dumps(nights, indent=1))
    results.with_suffix(".svg").write_bytes(panels(nights, FIGURES))
    ran_on = (
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'pyarrow'))}, {commit()}, {datetime.now(UTC):%Y-%m-%d}."
    )
    title = [f"# Nights of deltas, strategy `{given.strategy}`", "", ran_on, "", f"![nights]({results.name}.svg)", ""]
    results.with_suffix(".md").write_text(
        "\n".join([*title, *HEAD, *map(_line, nights), "", *summary, "", verdict, ""])
    )
    print(*summary, verdict, sep="\n")
    return 1 if wrong else 0


def _nights(number: int, check_every: int, strategy: str) -> Iterator[dict[str, Any]]:
    at = TwoOclock()
    at.night = day(0)
    given = settings(WORK, strategy, keep_snapshots=KEPT)
    came, written = Counter[str](), Counter[str]()
    with duckdb.connect(config={"threads": 2}) as db, clock.use(at):
        db.execute("CREATE TABLE seen AS " + " UNION ALL ".join(_base(n) for n in range(len(SHARES))))
        db.execute(f"COPY seen TO '{WORK}/landing/0.parquet' (FORMAT parquet, COMPRESSION zstd)")
        Table("t", given).run(host="local")
        print("\n".join(HEAD))
        for night in range(1, number + 1):
            at.night = day(night)
            landed = WORK / "landing" / f"{night}.parquet"
            query = " UNION ALL ".join(_night(p, night, share) for p, share in enumerate(SHARES))
            db.execute(f"COPY ({query}) TO '{landed}' (FORMAT parquet, COMPRESSION zstd)")
            table = Table("t", given)  # a new process each night
            appended = table.append(host="local")
            assert appended is not None
            before = _bytes()
            table.dedupe()
            table.publish()
            if strategy == "delta" and night % COMPACT_EVERY == 0:
                table.compact()
            wrote = _bytes() - before
            came.update({partition: t.bytes for partition, t in appended.entry.touched.items()})
            written.update(wrote)
            figures = {
                "night": night,
                "appended": sum(t.bytes for t in appended.entry.touched.values()) / 1e6,
                "written": wrote.total() / 1e6,
                **_figures(table, came, written),
            }
            db.execute(f"""DELETE FROM seen USING '{landed}' c WHERE seen.d = c.d AND seen.k = c.k;
                INSERT INTO seen FROM '{landed}'""")
            checked = night % check_every == 0 or night == number
            figures["different"] = _different(db, table) if checked else None
            if night == number:
                opened = figures["opened"]
                table.compact(full=True)
                [newest, *_] = table.snapshots()
                figures["compacted"] = opened / sum(p.bytes for p in newest.body.partitions.values())
            else:
                table.vacuum(dry=False)
            table.close()
            print(_line(figures), flush=True)
            yield figures


def _base(partition: int) -> str:
    return f"SELECT DATE '{day(partition)}' AS d, * FROM ({stored(partition, ROWS)})"


def _night(partition: int, night: int, share: float) -> str:
    key = f"(hash(i, {night}) % {ROWS})::BIGINT * 2 + (i % 4 = 0)::INTEGER"
    return coming(partition, round(ROWS * share), key, night)


def _bytes() -> Counter[str]:
    """Of the objects of each partition; of what `append` writes the ledger tells."""
    found = Counter[str]()
    for path in (WORK / "table").rglob("d=*/*"):
        found[path.parent.name] += path.stat().st_size
    return found


def _figures(table: Table, came: Counter[str], written: Counter[str]) -> dict[str, Any]:
    """Of what is published now, altogether and by partition."""
    [newest, *_] = table.snapshots()
    of = {}
    for partition, shown in newest.body.partitions.items():
        buckets = table.objects.partition(partition).get(shown.version).body.buckets
        base = [file for bucket in buckets for file in bucket.base]
        base_bytes = sum(file.bytes for file in base)
        of[partition] = {
            "appended": came[partition],
            "written": written[partition],
            "opened": shown.bytes,
            "new_base": shown.rows * base_bytes / sum(file.rows for file in base),
            "base": base_bytes,
            "debt": sum(bucket.debt for bucket in buckets),
            "deltas": sum(len(bucket.deltas) for bucket in buckets),
            "objects": shown.files,
        }
    total = {name: sum(p[name] for p in of.values()) for name in ("opened", "new_base", "deltas", "objects")}
    return {
        "write_amplification": written.total() / came.total(),
        "read_amplification": total["opened"] / total["new_base"],
        **total,
        "partitions": of,
    }


def _different(db: Any, table: Table) -> int:
    """Rows that DuckDB expects and that are not published, and how many more or fewer there are."""
    names = ", ".join(("d", *COLUMNS))
    db.register("reader", table.to_arrow())
    db.execute(f"CREATE OR REPLACE TABLE published AS SELECT {names} FROM reader")
    return int(
        db.execute(f"""SELECT (SELECT count(*) FROM seen ANTI JOIN published USING ({names}))
            + abs((SELECT count(*) FROM seen) - (SELECT count(*) FROM published))""").fetchall()[0][0]
    )


def _bounded(nights: list[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Each of `BOUNDED` at its most in these nights of a partition, and its bound by pipeline/strategy.py."""
    last = nights[-1]
    sizes = 1
    while TOGETHER**sizes * last["appended"] / len(nights) < MOST_DEBT * last["base"]:
        sizes += 1
    debt_to_base = max(night["debt"] / night["base"] for night in nights)
    deltas = max(night["deltas"] for night in nights)
    found = (debt_to_base, deltas, last["written"] / last["appended"])
    most = (MOST_DEBT, (TOGETHER - 1) * sizes, 1 + sizes + 2 / MOST_DEBT)
    yield from zip(BOUNDED, found, most, strict=True)


def _line(night: dict[str, Any]) -> str:
    figures = (night[name] for name in ("appended", "written", "write_amplification", "read_amplification"))
    counts = (night["deltas"], night["objects"])
    return f"| {night['night']} | " + " | ".join([*(f"{f:.2f}" for f in figures), *map(str, counts)]) + " |"


if __name__ == "__main__":
    sys.exit(main())
