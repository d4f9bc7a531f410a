"""Who is compared: each side's program, and the environment and jars that it needs (`make peers` gets them)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PEERS = Path("build/peers")
HERE = Path(sys.executable)


@dataclass(frozen=True)
class Side:
    """``program`` is module and class in this package; jars are patterns of file names."""

    program: str
    options: Mapping[str, str | bool] = field(default_factory=dict)
    jars: tuple[str, ...] = ()
    python: Path = HERE
    versions: tuple[str, ...] = ("pyspark",)

    def paths(self) -> list[Path]:
        return sorted(path for pattern in self.jars for path in (PEERS / "jars").glob(pattern))

    def missing(self) -> bool:
        return not self.python.exists() or any(not list((PEERS / "jars").glob(pattern)) for pattern in self.jars)


DELTA_JARS = ("delta-spark*", "delta-storage*", "antlr4-runtime*")
ICEBERG_JARS = ("iceberg-spark-runtime*",)
HUDI_JARS, HUDI_PYTHON = ("hudi-spark*",), PEERS / "hudi/bin/python"
OURS = ("lakeupsert", "pyspark", "pyarrow")

SIDES = {
    "plain": Side("spark:Plain"),
    "ours-rewrite": Side("ours:Ours", {"strategy": "rewrite"}, versions=OURS),
    "ours-delta": Side("ours:Ours", {"strategy": "delta"}, versions=OURS),
    "ours-auto": Side("ours:Ours", {"strategy": "auto"}, versions=OURS),
    "ours-executors": Side("ours:Ours", {"strategy": "rewrite", "merges": "executors"}, versions=OURS),
    "ours-executors-delta": Side("ours:Ours", {"strategy": "delta", "merges": "executors"}, versions=OURS),
    "ours-window": Side("ours:Ours", {"strategy": "rewrite", "merges": "window"}, versions=OURS),
    "ours-cluster": Side("ours:Ours", {"strategy": "rewrite", "merges": "executors", "cluster": True}, versions=OURS),
    "floor-rewrite": Side("ours:Floor", {"strategy": "rewrite"}, versions=OURS),
    "floor-delta": Side("ours:Floor", {"strategy": "delta"}, versions=OURS),
    "delta": Side("spark:Delta", {"deletion_vectors": False}, DELTA_JARS),
    "delta-dv": Side("spark:Delta", {"deletion_vectors": True}, DELTA_JARS),
    "iceberg-cow": Side("spark:Iceberg", {"mode": "copy-on-write"}, ICEBERG_JARS),
    "iceberg-mor": Side("spark:Iceberg", {"mode": "merge-on-read"}, ICEBERG_JARS),
    "hudi-cow": Side("spark:Hudi", {"table": "COPY_ON_WRITE", "index": "record"}, HUDI_JARS, HUDI_PYTHON),
    "hudi-mor": Side("spark:Hudi", {"table": "MERGE_ON_READ", "index": "bucket"}, HUDI_JARS, HUDI_PYTHON),
    "delta-rs": Side("deltars:DeltaRs", python=PEERS / "delta-rs/bin/python", versions=("deltalake", "duckdb")),
}
