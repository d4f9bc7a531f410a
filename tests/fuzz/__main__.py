"""Fuzz one target, guided by coverage: `python -m tests.fuzz where --seconds 3600`. Needs atheris (`make fuzz`).

Reads     the target's seeds, and what earlier runs found interesting, in build/fuzz/TARGET
Writes    there; an input that finds a fault as build/fuzz/crash-…
Repeat    safe: continues
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lakeupsert", "tests.fuzz"]):
    from tests.fuzz.targets import ALLOWED, TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=3600)
    options = parser.parse_args()
    target, corpus = TARGETS[options.target], Path("build/fuzz", options.target)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def run(data: bytes) -> None:
        with suppress(*ALLOWED):
            target.run(data)

    limits = [f"-max_total_time={options.seconds}", "-timeout=20", "-rss_limit_mb=2048", "-artifact_prefix=build/fuzz/"]
    atheris.Setup([sys.argv[0], str(corpus), *limits], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
