"""Who is compared: each side's program, and the environment and jars that it needs (`make peers` gets them)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PEERS = Path("build/peers")
HERE = Path(sys.executable)


@dataclass(frozen=True)
class Side:
    """A program, and what it runs with.

    Attributes:
        program: module and class in this package.
        jars: patterns of file names.
        floor: what a night writes at least, and so the floor that it is compared with: whole partitions or deltas.
        needs: how to get what is missing.
    """

    program: str
    options: Mapping[str, str | bool | int] = field(default_factory=dict)
    jars: tuple[str, ...] = ()
    python: Path = HERE
    versions: tuple[str, ...] = ("pyspark",)
    floor: str = "rewrite"
    needs: str = "`make peers` gets it"

    def paths(self) -> list[Path]:
        return sorted(path for pattern in self.jars for path in (PEERS / "jars").glob(pattern))

    def missing(self) -> bool:
        return not self.python.exists() or any(not list((PEERS / "jars").glob(pattern)) for pattern in self.jars)


def _python(environment: str) -> Path:
    return PEERS / environment / "bin/python"


def _ours(strategy: str, **options: str | bool) -> Side:
    versions = ("lakeupsert", "pyspark", "pyarrow")
    floor = "delta" if strategy == "delta" else "rewrite"
    return Side("ours:OursBesideSpark", {"strategy": strategy, **options}, versions=versions, floor=floor)


def _local(strategy: str, workers: int) -> Side:
    versions = ("lakeupsert", "pyarrow", "duckdb")
    return Side("ours:Ours", {"strategy": strategy, "workers": workers}, versions=versions, floor=strategy)


def _floor(strategy: str, library: str, *versions: str, python: Path = HERE) -> Side:
    options = {"strategy": strategy, "library": library}
    return Side("floor:Floor", options, python=python, versions=versions, floor=strategy)


DELTA_JARS = ("delta-spark*", "delta-storage*", "antlr4-runtime*")
ICEBERG_JARS = ("iceberg-spark-runtime*",)
HUDI_JARS, HUDI_PYTHON = ("hudi-spark*",), _python("hudi")

SIDES = {
    "plain": Side("spark:Plain"),
    "ours-rewrite": _ours("rewrite"),
    "ours-delta": _ours("delta"),
    "ours-auto": _ours("auto"),
    "ours-executors": _ours("rewrite", merges="executors"),
    "ours-executors-delta": _ours("delta", merges="executors"),
    "ours-window": _ours("rewrite", merges="window"),
    "ours-cluster": _ours("rewrite", merges="executors", cluster=True),
    "ours-local-rewrite": _local("rewrite", 1),
    "ours-local-delta": _local("delta", 1),
    "ours-local-2-rewrite": _local("rewrite", 2),
    "ours-local-2-delta": _local("delta", 2),
    "floor-rewrite-arrow": _floor("rewrite", "arrow", "pyarrow"),
    "floor-rewrite-polars": _floor("rewrite", "polars", "polars"),
    "floor-rewrite-arro3": _floor("rewrite", "arro3", "arro3-io", "pyarrow", python=_python("arro3")),
    "floor-delta-arrow": _floor("delta", "arrow", "pyarrow"),
    "floor-delta-polars": _floor("delta", "polars", "polars"),
    "delta": Side("spark:Delta", {"deletion_vectors": False}, DELTA_JARS),
    "delta-dv": Side("spark:Delta", {"deletion_vectors": True}, DELTA_JARS, floor="delta"),
    "iceberg-cow": Side("spark:Iceberg", {"mode": "copy-on-write"}, ICEBERG_JARS),
    "iceberg-mor": Side("spark:Iceberg", {"mode": "merge-on-read"}, ICEBERG_JARS, floor="delta"),
    "hudi-cow": Side("spark:Hudi", {"table": "COPY_ON_WRITE", "index": "record"}, HUDI_JARS, HUDI_PYTHON),
    "hudi-mor": Side(
        "spark:Hudi", {"table": "MERGE_ON_READ", "index": "bucket"}, HUDI_JARS, HUDI_PYTHON, floor="delta"
    ),
    "delta-rs": Side("deltars:DeltaRs", python=_python("delta-rs"), versions=("deltalake", "duckdb")),
    "deltalite": Side(
        "deltars:DeltaLite",
        python=_python("deltalite"),
        versions=("deltalite", "deltalake", "duckdb"),
        needs="it needs Python 3.12: install one, then `make peers`",
    ),
    "ducklake": Side(
        "ducklake:DuckLake",
        python=_python("ducklake"),
        versions=("duckdb", "duckdb-extension-ducklake"),
        floor="delta",
    ),
}
