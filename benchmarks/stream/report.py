"""What a stream cost, as a table, as data and as plots."""

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import sentence
from benchmarks.month import panels

PLOTTED = {
    "cpu_batch": "processor seconds a batch",
    "requests_batch": "requests a batch",
    "mb_batch": "MB written a batch",
    "objects": "objects",
    "memory_mb": "memory, MB",
    "descriptors": "descriptors",
    "full": "processor seconds of a full read",
    "filtered": "processor seconds of a filtered read",
    "published_p95": "seconds until 95 of 100 files are published",
}
EXPLAINED = """\
*rows, s of processor*: rows that landed, by the processor time of all processes of the side (`ingest` and `maintain` of ours,
the driver with its JVM of a peer). Its start, the base, the first files and reads are left out. *published*: from a file's name
in the landing zone to the snapshot, or the end of the MERGE, that has its rows, median and 95 of 100; of a database from the
commit. *latest*: to the batch that readers of `latest` see. *MB*, *requests*: a batch, `maintain` included; requests are those
of ours to the table's store. *objects*, *MB in all*: at the end. *memory*: the most that the processes held (PSS) when a file
landed. *read*: seconds of a full and of a filtered read (a twelfth of the partitions) before the first and after the last part,
then their processor seconds; of ours in DuckDB, of peers in their own session of Spark. *different*: rows that are not
DuckDB's, of all. Ours is vacuumed and compacted meanwhile, the peers are not.
"""
HEAD = (
    "side",
    "rows a second",
    "batches",
    "rows, s of processor",
    "published, s",
    "latest, s",
    "MB",
    "requests",
    "objects",
    "MB in all",
    "memory, MB",
    "descriptors",
    "read: full, s",
    "filtered, s",
    "processor, s",
    "different",
)


def write(name: str, report: dict[str, Any], to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    (to / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    ended = [run for run in report["runs"] if "parts" in run]
    text = markdown(name, report, ended)
    (to / f"{name}.md").write_text(text)
    for run in ended:
        parts = [_point(part) for part in run["parts"]]
        if len(parts) > 1:
            known = {figure: title for figure, title in PLOTTED.items() if all(part.get(figure) for part in parts)}
            (to / f"{name}-{run['side']}.svg").write_bytes(panels(parts, known, "part"))
    print(text, flush=True)


def markdown(name: str, report: dict[str, Any], ended: list[dict[str, Any]]) -> str:
    given = report["options"]
    lines = [
        f"# Stream `{name}`",
        "",
        f"A file every {given['every']:g} s for {given['minutes']:g} minutes, half updates, for {given['touched']} of "
        f"{given['partitions']} partitions of {given['base_rows']:,} rows. {sentence(report['machine'])}",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---|" + "---:|" * (len(HEAD) - 1),
        *(_line(run) for run in report["runs"]),
        "",
    ]
    for run in ended:
        if len(run["parts"]) > 1:
            lines += [f"![{run['side']}]({name}-{run['side']}.svg)", "", *_parts(run), ""]
    lines += [EXPLAINED, "| side | versions | commit | date | load |", "|---|---|---|---|---:|"]
    lines += [
        f"| {run['side']} | {', '.join(run['versions'])} | {run['commit']} | {run['date']} | {run['load']} |"
        for run in ended
    ]
    return "\n".join([*lines, ""])


def _line(run: dict[str, Any]) -> str:
    if "failed" in run:
        return f"| {run['side']} | {run['rate']:,} | {run['failed']} |" + " |" * (len(HEAD) - 3)
    parts = run["parts"]
    last = parts[-1]
    total = {what: sum(part[what] for part in parts) for what in ("batches", "cpu", "bytes", "requests", "files")}
    worst = {what: max(part.get(what, 0) for part in parts) for what in ("memory_mb", "descriptors")}
    reads = [run["first_read"], last["reads"]]
    cells = [
        run["side"],
        f"{run['rate']:,}",
        total["batches"],
        f"{run['rows'] * total['files'] / total['cpu']:,.0f}",
        f"{last['published_p50']:g}; {max(part['published_p95'] for part in parts):g}",
        f"{last['latest_p50']:g}; {max(part['latest_p95'] for part in parts):g}" if "latest_p95" in last else "",
        f"{total['bytes'] / total['batches'] / 1e6:.2f}",
        f"{total['requests'] / total['batches']:.0f}" if total["requests"] else "",
        f"{last['objects']:,}",
        f"{last['mb']:,.0f}",
        worst["memory_mb"],
        worst["descriptors"],
        *("; ".join(f"{read[kind]['seconds']:g}" for read in reads) for kind in ("full", "filtered")),
        "; ".join(f"{read['full']['cpu']:g}, {read['filtered']['cpu']:g}" for read in reads),
        run["different"],
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _point(part: dict[str, Any]) -> dict[str, Any]:
    """What is plotted of a part."""
    batches = part["batches"]
    each = {"cpu_batch": part["cpu"], "requests_batch": part["requests"], "mb_batch": part["bytes"] / 1e6}
    read = {kind: part["reads"][kind]["cpu"] for kind in ("full", "filtered")}
    return {**part, **{what: round(value / batches, 2) for what, value in each.items()}, **read}


def _parts(run: dict[str, Any]) -> list[str]:
    points = [_point(part) for part in run["parts"]]
    known = {figure: title for figure, title in PLOTTED.items() if all(figure in point for point in points)}
    lines = [f"| {run['side']}, part | " + " | ".join(known.values()) + " |", "|---|" + "---:|" * len(known)]
    for number, point in enumerate(points, start=1):
        lines.append(f"| {number} | " + " | ".join(f"{point[figure]:,g}" for figure in known) + " |")
    return lines
