"""Three nights on Azurite: seconds, processor seconds and requests; of this checkout and, in turns, of another one.

Reads     nothing; needs the servers that `make servers` gets, and both checkouts the packages of this one
Writes    containers of a server that is gone at the end; prints a line for each checkout: medians of the rounds
Repeat    safe

    make bench-azure                                    # or with AZURE_ARGS="--beside ../another-checkout"

A night has 3 files of JSON lines with 400 rows each for 40 partitions: append (host local), dedupe by one worker, publish, in one
process. The first round is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from tests.harness.lake import Lake, row
from tests.harness.servers import azurite, new_container

HERE = Path(__file__).parents[1]
NIGHTS, FILES, ROWS, PARTITIONS = 3, 3, 400, 40


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    options.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts")
    options.add_argument("--container", help=argparse.SUPPRESS)  # one round
    given = options.parse_args()
    if given.container:
        print(json.dumps(nights(given.container)))
        return 0
    found: dict[Path, list[list[dict[str, float]]]] = {place.absolute(): [] for place in (HERE, *given.beside)}
    with azurite() as server:
        for number in range(given.rounds + 1):
            for place, rounds in list(found.items())[:: -1 if number % 2 else 1]:
                command = [sys.executable, __file__, "--container", f"lake{number}-{list(found).index(place)}"]
                env = {**os.environ, **server.env, "PYTHONPATH": str(place)}
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
                rounds.append(json.loads(done.stdout.splitlines()[-1]))
    for place, (_, *rounds) in found.items():
        told = [
            {name: round(median(r[night][name] for r in rounds), 2) for name in rounds[0][night]}
            for night in range(NIGHTS)
        ]
        whole = median(sum(night["seconds"] for night in r) for r in rounds)
        print(f"{place}: {whole:.1f} s", *told, sep="\n  ")
    return 0


def nights(container: str) -> list[dict[str, float]]:
    new_container(container)
    told = []
    with tempfile.TemporaryDirectory() as folder:
        place = f"az://{container}"
        lake = Lake(Path(folder), landing=f"{place}/landing", processed=f"{place}/processed", queue=f"{folder}/queue")
        for night in range(NIGHTS):
            for file in range(FILES):
                rows = [row(f"{file}-{i}", i % PARTITIONS, night, night) for i in range(ROWS)]
                lake.land(f"{night}-{file}.jsonl", rows)
            lake.reopen()
            begun, worked = perf_counter(), process_time()
            lake.table.append(host="local")
            lake.table.dedupe()
            lake.table.publish()
            figures = {"seconds": perf_counter() - begun, "processor": process_time() - worked}
            stores = (lake.opened.resources.store, lake.opened.resources.landing)
            told.append({**figures, **sum((Counter(s.requests.as_dict()) for s in stores), Counter())})
    return told


if __name__ == "__main__":
    raise SystemExit(main())
