"""The sides that upsert with delta-rs and with deltalite, and read with DuckDB the files that delta-rs names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, WriterProperties, write_deltalake

from benchmarks.peers.processes import InThisProcess
from benchmarks.workload import Workload

PARQUET = WriterProperties(compression="ZSTD")  # as all other sides; its own default is snappy


class DeltaRs(InThisProcess):
    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path]) -> None:
        self.workload = workload
        self.folder = work / "table"
        self.db = duckdb.connect(config={"threads": 2})

    def load(self, base: Path) -> None:
        rows = self.db.sql(f"FROM '{base}'").to_arrow_reader()
        write_deltalake(str(self.folder), rows, partition_by=[self.workload.partition], writer_properties=PARQUET)

    def _newest(self) -> pa.Table:
        key = ", ".join((self.workload.partition, *self.workload.key))
        newest_first = f"PARTITION BY {key} ORDER BY {self.workload.order} DESC"
        return self.db.sql(f"FROM '{self.night}' QUALIFY row_number() OVER ({newest_first}) = 1").to_arrow_table()

    def _merge(self) -> None:
        w = self.workload
        found = self.db.execute(f"SELECT DISTINCT {w.partition} FROM '{self.night}'").fetchall()
        touched = ", ".join(f"DATE '{value}'" for (value,) in found)
        same = " AND ".join(f"t.{column} = s.{column}" for column in (w.partition, *w.key))
        merge = DeltaTable(self.folder).merge(
            self._newest(),
            f"{same} AND t.{w.partition} IN ({touched})",
            source_alias="s",
            target_alias="t",
            writer_properties=PARQUET,
            streamed_exec=False,  # then the statistics of the night's rows prune files, too
        )
        merge.when_matched_update_all(f"s.{w.order} > t.{w.order}").when_not_matched_insert_all().execute()

    def _read(self, where: str) -> Any:
        w = self.workload
        return self.db.execute(
            f"SELECT {', '.join(w.figures.values())} FROM read_parquet($files, hive_partitioning = true) "
            f"WHERE {w.visible} AND {where}",
            {"files": DeltaTable(self.folder).file_uris()},
        ).fetchall()[0]


class DeltaLite(DeltaRs):
    """It has no condition on the order, so a night comes to it without the rows that are older than the table's."""

    def land(self, night: Path) -> None:
        w = self.workload
        self.night = self.folder.parent / night.name
        self.db.execute(
            f"""COPY (FROM '{night}' n ANTI JOIN read_parquet($files, hive_partitioning = true) t ON
                {" AND ".join(f"n.{column} = t.{column}" for column in (w.partition, *w.key))} AND t.{w.order} > n.{w.order})
                TO '{self.night}' (FORMAT parquet, COMPRESSION zstd)""",
            {"files": DeltaTable(self.folder).file_uris()},
        )

    def _merge(self) -> None:
        import deltalite  # needs Python 3.12

        table = deltalite.DeltaLiteTable.open(str(self.folder))
        table.upsert(self._newest(), list(self.workload.key), self.workload.partition)
