"""What more stored rows cost a night of Iceberg and of ours: the workload `large` of `benchmarks.peers` in two sizes.

A night brings the same rows to both sizes, so what Spark and a night cost in any case cancels out in the difference. Needs
`make peers`.
"""

import json
import subprocess
import sys
from pathlib import Path

SIDES = ("iceberg-cow", "iceberg-mor", "ours-rewrite", "ours-delta")
ROWS = {"small": 50_000, "large": 250_000}
"""Stored rows of each of the 24 partitions."""
SHOWN = {
    "small": f"processor, s, {ROWS['small']:,} rows a partition",
    "large": f"processor, s, {ROWS['large']:,} rows a partition",
}


def measured(home: Path, side: str) -> dict[str, float]:
    """Seconds of processor of a warm night. Ends the program where a side fails or is not exact."""
    found = {}
    for name, rows in ROWS.items():
        results = home / f"peers-{name}"
        command = [sys.executable, "-m", "benchmarks.peers", "large", "--sides", side]
        command += ["--rows-per-partition", str(rows), "--results", str(results)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise SystemExit(
                f"{side} did not run with {rows} rows a partition, or is not exact; `make peers` gets what it needs"
            )
        found[name] = json.loads((results / "large.json").read_text())["sides"][side]["cpu_seconds"]
    return found
