"""The side that upserts with delta-rs, and reads with DuckDB the files that delta-rs names."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import duckdb
from deltalake import DeltaTable, WriterProperties, write_deltalake

from benchmarks.workload import Workload

PARQUET = WriterProperties(compression="ZSTD")  # as all other sides; its own default is snappy


class DeltaRs:
    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path]) -> None:
        self.workload = workload
        self.folder = work / "table"
        self.db = duckdb.connect(config={"threads": 2})

    def load(self, base: Path) -> None:
        rows = self.db.sql(f"FROM '{base}'").to_arrow_reader()
        write_deltalake(str(self.folder), rows, partition_by=[self.workload.partition], writer_properties=PARQUET)

    def land(self, night: Path) -> None:
        self.night = night

    def apply(self) -> dict[str, float]:
        begun = perf_counter()
        w = self.workload
        key = (w.partition, *w.key)
        newest = self.db.sql(
            f"FROM '{self.night}' QUALIFY row_number() OVER (PARTITION BY {', '.join(key)} ORDER BY {w.order} DESC) = 1"
        ).to_arrow_table()
        found = self.db.execute(f"SELECT DISTINCT {w.partition} FROM '{self.night}'").fetchall()
        touched = ", ".join(f"DATE '{value}'" for (value,) in found)
        same = " AND ".join(f"t.{column} = s.{column}" for column in key)
        merge = DeltaTable(self.folder).merge(
            newest,
            f"{same} AND t.{w.partition} IN ({touched})",
            source_alias="s",
            target_alias="t",
            writer_properties=PARQUET,
            streamed_exec=False,  # then the statistics of the night's rows prune files, too
        )
        merge.when_matched_update_all(f"s.{w.order} > t.{w.order}").when_not_matched_insert_all().execute()
        return {"merge": round(perf_counter() - begun, 2)}

    def read(self, where: str) -> Any:
        w = self.workload
        return self.db.execute(
            f"SELECT {', '.join(w.figures.values())} FROM read_parquet($files, hive_partitioning = true) "
            f"WHERE {w.visible} AND {where}",
            {"files": DeltaTable(self.folder).file_uris()},
        ).fetchall()[0]

    def bytes_counted(self) -> int:
        return 0

    def requests(self) -> dict[str, int]:
        return {}
