"""What a night costs as its table, its workers and the partitions that it touches grow; and what that means for 15 TB.

Reads     nothing; rows are made from their numbers
Writes    build/scale, and benchmarks/results/scale.json and scale.md, a line for each measurement
Repeat    safe: measurements that are in scale.json already are kept (--again makes those that are asked for anew)

    make bench-scale                                    # or with SCALE_ARGS="rows --millions 1 5 --strategy rewrite"

    rows      the same night over 1, 5, 20, 50 million stored rows (benchmarks/scale/rows.py)
    adoption  the first merge of adopted partitions of many buckets (adoption.py)
    workers   1 to 64 of them, on a store that is far away and has S3's limits (workers.py)
    driver    its memory, with 100 to 5,000 touched partitions (driver.py)
    damaged   seconds of a `dedupe` on Spark with one damaged file, and without (damaged.py)
    publish   a publish of 545 partitions, without readers' logs and with Delta's (publish.py)
    nights    requests of each command after 100 to 3,000 nights (nights.py)
    load      landing files, batches that wait, garbage, columns and workers, at three sizes, and how figures grow (load.py)
    peers     what a stored row costs a night of Iceberg (peers.py); needs `make peers`
    model     15 TB on paper, from what `rows`, `adoption` and `peers` measured (model.py); without the others it measures nothing

A measurement takes under ten minutes; a call that was broken off goes on behind the last one that it finished.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, facts, sentence, versions
from benchmarks.scale import adoption, damaged, driver, load, model, nights, peers, publish, rows, workers
from lakeupsert.operations.plan.prices import load_prices

HOME = Path("build/scale")
RESULTS = Path(__file__).parents[1] / "results"
SHOWN = {
    "rows": rows.SHOWN,
    "adoption": adoption.SHOWN,
    "workers": workers.SHOWN,
    "driver": driver.SHOWN,
    "damaged": damaged.SHOWN,
    "publish": publish.SHOWN,
    "nights": nights.SHOWN,
    "load": load.SHOWN,
    "peers": peers.SHOWN,
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(SHOWN)}, model (default: all)")
    options.add_argument("--millions", type=int, nargs="+", default=[1, 5, 20, 50], help="rows, adoption: stored")
    options.add_argument("--strategy", nargs="+", choices=["delta", "rewrite", "auto"], default=["delta", "rewrite"])
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options.add_argument("--far", type=int, default=545, help="workers: so many partitions, of which a call takes 8")
    options.add_argument("--partitions", type=int, nargs="+", default=[100, 1000, 5000], help="driver: that it touches")
    options.add_argument("--nights", type=int, nargs="+", default=[100, 267, 1000, 3000])
    options.add_argument("--cases", nargs="+", choices=list(load.SIZES), default=list(load.SIZES), help="load")
    options.add_argument("--prices", help="model: a file as `lakeupsert plan` takes it")
    options.add_argument("--again", action="store_true")
    given = options.parse_args()
    if unknown := set(given.parts) - {*SHOWN, "model"}:
        options.error(f"no such part: {', '.join(unknown)}")
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "scale.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for part, name, measure in _measurements(given):
        if part in (given.parts or SHOWN):
            of_part = found.setdefault(part, {})
            if name not in of_part or given.again:
                when = {
                    "commit": commit(),
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "load": round(os.getloadavg()[0], 1),
                }
                of_part[name] = {**measure(), **when}
                kept.write_text(json.dumps(found, indent=1))
            print(f"{part}: {_line(part, name, of_part[name])}", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    print(*load.growth(found.get("load", {})), sep="\n")
    on_paper = list(model.report(found, load_prices(given.prices, local=False)))
    print(*on_paper, sep="\n")
    lines = ["# Scale", "", sentence(facts()), ", ".join(versions("lakeupsert", "pyarrow", "pyspark")) + "."]
    for part, measured in found.items():
        names = ("", *SHOWN[part].values(), "commit", "date", "load before")
        lines += ["", f"## {part}", "", f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
        lines += [_line(part, name, m) for name, m in measured.items()]
    lines += ["", *load.growth(found.get("load", {}))]
    (RESULTS / "scale.md").write_text("\n".join([*lines, "", "## model", "", *on_paper, ""]))
    return 0


def _measurements(given: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], dict[str, float]]]]:
    """Part, name, and what measures it."""
    for millions in given.millions:
        for strategy in given.strategy:
            for keys in ("clustered", "scattered"):
                yield "rows", f"{millions} {strategy} {keys}", partial(rows.measured, HOME, millions, strategy, keys)
        yield "adoption", f"{millions}", partial(adoption.measured, HOME, millions)
    for number in given.workers:
        yield "workers", f"{number}", partial(workers.measured, number, number, given.far)
    yield "workers", "1, stretched", partial(workers.measured, 1, 3, given.far)
    for number in given.partitions:
        yield "driver", f"{number}", partial(driver.measured, HOME, number)
    yield "damaged", "one of 21", partial(damaged.measured, HOME)
    yield "publish", "plain", partial(publish.measured, HOME, ())
    yield "publish", "delta", partial(publish.measured, HOME, ("delta",))
    for number in sorted(given.nights):
        yield "nights", f"{number}", partial(nights.measured, number)
    for case in given.cases:
        for part in (4, 2, 1):
            yield (
                "load",
                f"{case} {load.SIZES[case] // part}",
                partial(load.measured, HOME, case, load.SIZES[case] // part),
            )
    for side in peers.ROWS:
        yield "peers", side, partial(peers.measured, HOME, side)


def _line(part: str, name: str, measured: dict[str, Any]) -> str:
    figures = " | ".join(f"{measured[figure]:,g}" for figure in SHOWN[part])
    return f"| {name} | {figures} | {measured['commit']} | {measured['date']} | {measured['load']} |"


if __name__ == "__main__":
    raise SystemExit(main())
