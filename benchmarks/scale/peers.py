"""What a stored row costs a night of Iceberg's MERGE INTO: the workload `large` of `benchmarks.peers` in two sizes.

A night brings the same rows to both sizes, so what Spark and a night cost in any case cancels out in the difference. Needs
`make peers`.
"""

import json
import subprocess
import sys
from pathlib import Path

PARTITIONS = 24
ROWS = {"iceberg-cow": (50_000, 250_000), "iceberg-mor": (50_000, 1_000_000)}
"""Stored rows of each partition. Merge-on-read takes so little for a row that it needs more of them to be told from noise."""
SHOWN = {"small": "processor, s", "large": "processor, s, of more rows", "more_rows": "so many more"}


def measured(home: Path, side: str) -> dict[str, float]:
    """Seconds of processor of a warm night. Ends the program where a side fails or is not exact."""
    found = []
    for rows in ROWS[side]:
        results = home / f"peers-{rows}"
        command = [sys.executable, "-m", "benchmarks.peers", "large", "--sides", side]
        command += ["--rows-per-partition", str(rows), "--results", str(results)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise SystemExit(
                f"{side} with {rows} rows a partition failed or is not exact; `make peers` gets what it needs"
            )
        found.append(json.loads((results / "large.json").read_text())["sides"][side]["cpu_seconds"])
    small, large = ROWS[side]
    return {"small": found[0], "large": found[1], "more_rows": PARTITIONS * (large - small)}
