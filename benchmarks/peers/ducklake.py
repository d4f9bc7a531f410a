"""The side that upserts with DuckDB into a DuckLake, whose catalog is a file of DuckDB."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.peers.processes import InThisProcess
from benchmarks.workload import Workload


class DuckLake(InThisProcess):
    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path]) -> None:
        self.workload = workload
        settings = {"threads": 2, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
        self.db = duckdb.connect(config=settings)
        (package,) = importlib.util.find_spec("duckdb_extension_ducklake").submodule_search_locations
        (extension,) = Path(package).rglob("*.duckdb_extension")  # DuckDB would download it
        self.db.execute(f"LOAD '{extension}'")
        (work / "table").mkdir(exist_ok=True)
        self.db.execute(f"ATTACH 'ducklake:{work}/table/catalog.ducklake' AS lake (DATA_PATH '{work}/table/data')")
        self.db.execute("CALL lake.set_option('parquet_compression', 'zstd')")

    def load(self, base: Path) -> None:
        self.db.execute(f"CREATE TABLE lake.t AS FROM '{base}' LIMIT 0")
        self.db.execute(f"ALTER TABLE lake.t SET PARTITIONED BY ({self.workload.partition})")
        self.db.execute(f"INSERT INTO lake.t FROM '{base}'")

    def _merge(self) -> None:
        w = self.workload
        key = (w.partition, *w.key)
        newest_first = f"PARTITION BY {', '.join(key)} ORDER BY {w.order} DESC"
        self.db.execute(
            f"MERGE INTO lake.t USING (FROM '{self.night}' QUALIFY row_number() OVER ({newest_first}) = 1) s "
            f"ON {' AND '.join(f't.{column} = s.{column}' for column in key)} "
            f"WHEN MATCHED AND s.{w.order} > t.{w.order} THEN UPDATE WHEN NOT MATCHED THEN INSERT"
        )

    def _read(self, where: str) -> Any:
        figures = ", ".join(self.workload.figures.values())
        return self.db.execute(f"SELECT {figures} FROM lake.t WHERE {self.workload.visible} AND {where}").fetchall()[0]
