"""What the sides' results say, as a table, as data and as a plot: all sides that have results, whoever ran them when."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as Svg

from benchmarks.machine import facts, sentence
from benchmarks.peers.run import nights_done
from benchmarks.peers.sides import SIDES
from benchmarks.workload import Workload

READS = ("full in Spark", "filtered in Spark", "full in DuckDB", "filtered in DuckDB")
PLOTTED = {
    "apply_seconds": "s, upsert",
    "cpu_seconds": "s of processor, upsert",
    **{read: f"s, {read.replace(' in ', ' read in ')}" for read in READS},
    "mb": "MB written",
}
EXPLAINED = """\
Seconds, processor seconds and MB are medians of the nights that are told, which a warm session did; of a workload whose
nights count together, MB and requests are sums over all of them. *upsert*: until a reader sees the night, by step where it
has several; the base is loaded untimed. *processor*: of all processes of the side. *full*: aggregates over all rows;
*filtered*: the same for a twelfth of the partitions and one more column's value. DuckDB reads ours by `to_duckdb`, and of
delta-rs, deltalite and the floors the list of files. *MB written*: by how much the table's folder grew, or what Hadoop's file
system wrote in the side's process, if that is more (it counts files that are gone again; shuffle files do not pass through
it; its checksums, under one per cent, do). *files*: in the table's folder at the end, without `.crc`. *requests*: to the
table's store, by call, where the side counts them. *peak*: the most that the side's processes held at once (PSS, sampled
twice a second), with what a JVM took of it, which may take 8 GB. *exact*: every figure of every read equals DuckDB's.

*floors*: how many times as long as the least that one thread needs to read, merge and write these rows and to wait for the
disk, with whichever of pyarrow, polars and arro3 is best. Sides that write whole partitions are compared with
`floor-rewrite-`, the others with `floor-delta-`, which reads keys and writes the night's rows; `ours-auto` always with the
first. A floor has no log and no snapshots, recovers from nothing, and keeps rows in no order.

No side is looked after between nights (no OPTIMIZE, rewrite_data_files or compact); `hudi-mor` compacts by itself every five
nights of a workload whose nights count together, `ours-auto` in whichever night owes it. Ours and the floors wait until every
file is on the disk, which Spark's writers, delta-rs and deltalite do not. Rows that are older than the table's are taken from
deltalite's nights before the clock runs, because it would let them win. It always compresses with snappy, the others with
zstd.
"""


def write(workload: Workload, results: Path, to: Path) -> bool:
    """Write WORKLOAD.md, .json and .svg; whether every side that has results is exact and none has failed."""
    sides = {name: found for name in SIDES if (found := summary(workload, results / name))}
    report = {
        "workload": {k: v for k, v in asdict(workload).items() if k != "nights"},
        "nights": [asdict(night) for night in workload.nights],
        "machine": facts(),
        "sides": sides,
    }
    to.mkdir(parents=True, exist_ok=True)
    (to / f"{workload.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(workload, report)
    (to / f"{workload.name}.md").write_text(text)
    (to / f"{workload.name}.svg").write_bytes(plot({n: s for n, s in sides.items() if "apply_seconds" in s}))
    print(text, flush=True)
    return all(side.get("exact") and "failed" not in side for side in sides.values())


def summary(workload: Workload, results: Path) -> dict[str, Any]:
    """A side's figures; only ``failed`` where no night of it came to its end, nothing where it never ran."""
    found = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    failed = {"failed": found["failed"]} if "failed" in found else {}
    nights = {n: found[f"night-{n}"] for n in range(1, nights_done(results) + 1)}
    if not nights:
        return failed
    warm = {n: night for n, night in nights.items() if night["warm"]} or nights
    counted = list(warm.values())
    added = list(nights.values()) if workload.every_night else None

    def middle(values: list[float]) -> float:
        return round(median(values), 2)

    return {
        **found["load"],
        "counted": list(warm),
        "seconds": {step: middle([n["seconds"][step] for n in counted]) for step in counted[0]["seconds"]},
        "apply_seconds": middle([sum(n["seconds"].values()) for n in counted]),
        "cpu_seconds": middle([n["cpu_seconds"] for n in counted]),
        **{read: middle([n["read_seconds"][read] for n in counted]) for read in counted[0]["read_seconds"]},
        "mb": round((sum if added else median)(n["bytes_written"] for n in added or counted) / 1e6, 1),
        "requests": {
            call: round((sum if added else median)(n["requests"][call] for n in added or counted))
            for call in counted[0]["requests"]
        },
        "files": nights[len(nights)]["files"],
        "peak_mb": (peak := max(nights.values(), key=lambda n: n["peak_mb"]))["peak_mb"],
        "peak_jvm_mb": peak.get("peak_jvm_mb", 0),
        "exact": not any(n["wrong"] for n in nights.values()),
        "nights": nights,
        **failed,
    }


def markdown(workload: Workload, report: dict[str, Any]) -> str:
    machine, sides = report["machine"], report["sides"]
    brought = [night.rows for night in workload.nights]
    touched = [night.touched for night in workload.nights]
    last = workload.nights[-1].full
    lines = [
        f"# Workload `{workload.name}`",
        "",
        f"{int(last['rows']):,} rows in {last['partitions']} partitions after {len(brought)} nights. A night brings "
        f"{min(brought):,} to {max(brought):,} rows for {min(touched)} to {max(touched)} partitions. {sentence(machine)}",
        "",
        f"![{workload.name}]({workload.name}.svg)",
        "",
        f"| side | upsert, s | floors | processor, s | floors | {', s | '.join(READS)}, s | MB written | files | requests "
        "| peak, MB | nights | exact |",
        "|---|" + "---:|" * 12 + "---|---|",
    ]
    for name, side in sides.items():
        if "apply_seconds" not in side:
            lines.append(f"| {name} | {side['failed']} |" + " |" * 13)
            continue
        steps = ", ".join(f"{step} {seconds:g}" for step, seconds in side["seconds"].items())
        calls = ", ".join(f"{call} {n}" for call, n in side["requests"].items() if n)
        cells = [
            name,
            f"{side['apply_seconds']:g}" + (f" ({steps})" if len(side["seconds"]) > 1 else ""),
            _floors(name, "apply_seconds", sides),
            f"{side['cpu_seconds']:g}",
            _floors(name, "cpu_seconds", sides),
            *(f"{side[read]:g}" if read in side else "" for read in READS),
            f"{side['mb']:g}",
            side["files"],
            calls or "-",
            str(side["peak_mb"]) + (f" (JVM {side['peak_jvm_mb']})" if side["peak_jvm_mb"] else ""),
            ", ".join(map(str, side["counted"])),
            ("yes" if side["exact"] else "NO") + (f"; {side['failed']}" if "failed" in side else ""),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += _shares(sides)
    lines += ["", EXPLAINED, "| side | versions | commit | date | load before |", "|---|---|---|---|---:|"]
    lines += [
        f"| {name} | {', '.join(side['versions'])} | {side.get('commit', '')} | {side['date']} | {side['load_before']} |"
        for name, side in sides.items()
        if "versions" in side
    ]
    return "\n".join([*lines, ""])


def _floors(name: str, figure: str, sides: dict[str, dict[str, Any]]) -> str:
    """A side's figure in times of its floor; empty if no such floor was measured."""
    floor = f"floor-{SIDES[name].floor}-"
    measured = [side[figure] for other, side in sides.items() if other.startswith(floor) and figure in side]
    return f"{sides[name][figure] / min(measured):.1f}" if measured else ""


def _shares(sides: dict[str, dict[str, Any]]) -> list[str]:
    """Of our sides: what each step's share is."""
    ours = {name: side for name, side in sides.items() if name.startswith("ours-") and "apply_seconds" in side}
    if not ours:
        return []
    lines = ["", "| side | append | dedupe | publish |", "|---|" + "---:|" * 3]
    for name, side in ours.items():
        shares = [f"{seconds / side['apply_seconds']:.0%}" for seconds in side["seconds"].values()]
        lines.append("| " + " | ".join([name, *shares]) + " |")
    return lines


def plot(sides: dict[str, dict[str, Any]]) -> bytes:
    """A panel for each figure, a bar for each side."""
    line, left, wide, right = 20, 150, 360, 590
    panels = {figure: {name: side for name, side in sides.items() if figure in side} for figure in PLOTTED}
    height = line * sum(len(shown) + 2 for shown in panels.values() if shown)
    svg = Svg.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {right} {height}")
    style = "text { font: 12px sans-serif; fill: #444 } rect { fill: #9ab } .ours rect { fill: #1767a6 }"
    Svg.SubElement(svg, "style").text = style
    y = 0
    for figure, shown in panels.items():
        if not shown:
            continue
        y += line
        Svg.SubElement(svg, "text", {"x": str(left), "y": str(y)}).text = PLOTTED[figure]
        most = max(side[figure] for side in shown.values()) or 1
        for name, side in shown.items():
            y += line
            bar = Svg.SubElement(svg, "g", {"class": "ours" if name.startswith("ours") else "peer"})
            width = wide * side[figure] / most
            Svg.SubElement(bar, "text", {"x": str(left - 8), "y": str(y), "text-anchor": "end"}).text = name
            at = {"x": str(left), "y": str(y - 12), "width": f"{width:.1f}", "height": "15"}
            Svg.SubElement(bar, "rect", at)
            Svg.SubElement(bar, "text", {"x": f"{left + width + 6:.1f}", "y": str(y)}).text = f"{side[figure]:g}"
        y += line
    return Svg.tostring(svg)
