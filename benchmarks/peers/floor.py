"""What no upsert can do without, on one core: read, merge and write the rows of a night, and wait for the disk.

A floor keeps no log, has no snapshots, recovers from nothing, and its rows are in no order. Each library plays the same
nights in a process of its own, with one thread; the least of them is the floor (`report`).

- rewrite: read each touched partition, leave out the rows that are replaced, add the new ones, write it to a new file.
- delta: read only keys and ordering values of each touched partition. Write the new rows to one file for the whole
  table, and the places of the rows that they replace to another.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

os.environ["POLARS_MAX_THREADS"] = "1"  # polars reads it when it is imported

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.peers.processes import InThisProcess
from benchmarks.workload import Workload

REPEATED = 0.5
"""A column with fewer distinct values than this share of its rows gets a dictionary; polars decides by itself."""


class Library(Protocol):
    """Rows are what the library calls a table. ``columns`` are those of the key and, last, the ordering column."""

    def read(self, file: Path, columns: Sequence[str] | None = None) -> Any: ...

    def write(self, rows: Any, sink: BinaryIO) -> None: ...

    def newest(self, night: Path, columns: Sequence[str]) -> Any:
        """The newest row of each key, in order of the columns."""

    def partitions(self, rows: Any, column: str) -> Iterator[tuple[str, Any]]:
        """Rows, in order of this column, by its values."""

    def look_up(self, stored: Any, rows: Any, columns: Sequence[str]) -> tuple[Any, np.ndarray]:
        """Rows that are no older than the stored row of their key; the places in ``stored`` of those that they replace."""

    def without(self, stored: Any, places: np.ndarray) -> Any: ...

    def joined(self, parts: list[Any]) -> Any:
        """All rows of some tables, with the columns of the first."""


class Floor(InThisProcess):
    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path], strategy: str, library: str) -> None:
        self.workload = workload
        self.folder = work / "table"
        self.library: Library = {"arrow": Arrow, "polars": Polars, "arro3": Arro3}[library]()
        self.db = duckdb.connect(config={"threads": 2})
        self.columns = (*workload.key, workload.order)
        self._merge = {"rewrite": self._rewrite, "delta": self._delta}[strategy]

    def load(self, base: Path) -> None:
        """By pyarrow for all, so that every library reads the same files."""
        column, key, writer = self.workload.partition, ", ".join(self.workload.key), Arrow()
        for (value,) in self.db.execute(f"SELECT DISTINCT {column} FROM '{base}'").fetchall():
            query = f"SELECT * EXCLUDE {column} FROM '{base}' WHERE {column} = ? ORDER BY {key}"
            rows = self.db.execute(query, [value]).to_arrow_table()
            self._write(rows, self._partition(str(value)) / "base-0.parquet", writer)

    def land(self, night: Path) -> None:
        self.night = night
        self.number = int(night.stem.rpartition("-")[2])

    def _rewrite(self) -> None:
        lib, partition = self.library, self.workload.partition
        for value, rows in lib.partitions(lib.newest(self.night, (partition, *self.columns)), partition):
            folder = self._partition(value)
            written = rows.drop(partition)
            if current := _base(folder):
                stored = lib.read(current)
                rows, places = lib.look_up(stored, written, self.columns)
                written = lib.joined([lib.without(stored, places), rows])
            self._write(written, folder / f"base-{self.number}.parquet", lib)

    def _delta(self) -> None:
        lib, columns = self.library, (self.workload.partition, *self.columns)
        replaced: dict[Path, np.ndarray] = {}
        rows, kept = lib.newest(self.night, columns), []
        for earlier in sorted(self.folder.glob("delta-*.parquet")):
            rows, replaced[earlier] = lib.look_up(lib.read(earlier, columns), rows, columns)
        for value, incoming in lib.partitions(rows, self.workload.partition):
            if current := _base(self._partition(value)):
                incoming, replaced[current] = lib.look_up(lib.read(current, self.columns), incoming, self.columns)
            kept.append(incoming)
        self._write(lib.joined(kept), self.folder / f"delta-{self.number}.parquet", lib)
        files = np.repeat([str(file) for file in replaced], [len(places) for places in replaced.values()])
        places = pa.table({"filename": files, "file_row_number": np.concatenate(list(replaced.values()))})
        self._write(places, self.folder / f"replaced-{self.number}.parquet", Arrow())

    def _read(self, where: str) -> Any:
        w = self.workload
        bases = [str(_base(folder)) for folder in self.folder.iterdir() if folder.is_dir()]
        rows = f"read_parquet({bases}, hive_partitioning = true, filename = true, file_row_number = true)"
        if list(self.folder.glob("delta-*.parquet")):
            deltas = f"read_parquet('{self.folder}/delta-*.parquet', filename = true, file_row_number = true)"
            replaced = f"'{self.folder}/replaced-*.parquet'"
            rows = (
                f"(FROM {rows} UNION ALL BY NAME FROM {deltas}) ANTI JOIN {replaced} USING (filename, file_row_number)"
            )
        figures = ", ".join(w.figures.values())
        return self.db.execute(f"SELECT {figures} FROM {rows} WHERE {w.visible} AND {where}").fetchall()[0]

    def _partition(self, value: str) -> Path:
        return self.folder / f"{self.workload.partition}={value}"

    def _write(self, rows: Any, file: Path, lib: Library) -> None:
        if not file.parent.exists():
            file.parent.mkdir(parents=True)
            _sync(file.parent.parent)
        with file.open("wb") as sink:
            lib.write(rows, sink)
            sink.flush()
            os.fsync(sink.fileno())
        _sync(file.parent)


def _base(folder: Path) -> Path | None:
    """The newest file of a partition."""
    return max(folder.glob("base-*.parquet"), key=lambda file: int(file.stem.rpartition("-")[2]), default=None)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Arrow:
    """pyarrow, with its readers and writers in C++."""

    def __init__(self) -> None:
        self._repeated: list[str] | None = None
        pa.set_cpu_count(1)

    def read(self, file: Path, columns: Sequence[str] | None = None) -> pa.Table:
        return pq.ParquetFile(file).read(columns, use_threads=False)

    def write(self, rows: Any, sink: BinaryIO) -> None:
        pq.write_table(rows, sink, compression="zstd", use_dictionary=self.repeated(rows))

    def repeated(self, rows: pa.Table) -> list[str]:
        """Columns to write with a dictionary, as the first table has them."""
        if self._repeated is None:
            most = REPEATED * rows.num_rows
            self._repeated = [name for name in rows.schema.names if pc.count_distinct(rows[name]).as_py() < most]
        return self._repeated

    def newest(self, night: Path, columns: Sequence[str]) -> pa.Table:
        read = pq.ParquetFile(night).read(use_threads=False)
        rows = pa.table(dict(zip(read.column_names, read.columns, strict=True)))  # may have nulls, as the stored ones
        rows = rows.take(pc.sort_indices(rows, [(column, "ascending") for column in columns]))
        return rows.filter(_ends(rows, columns[:-1]))

    def partitions(self, rows: pa.Table, column: str) -> Iterator[tuple[str, pa.Table]]:
        begin = 0
        for end in np.flatnonzero(_ends(rows, [column])) + 1:
            yield str(rows[column][begin].as_py()), rows.slice(begin, end - begin)
            begin = end

    def look_up(self, stored: Any, rows: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, np.ndarray]:
        *key, order = columns
        found = pc.index_in(*_keys(stored, rows, key)).to_numpy(zero_copy_only=False)
        places = np.flatnonzero(~np.isnan(found))
        matches = found[places].astype(np.int64)
        late = pc.greater(stored[order].take(places), rows[order].take(matches)).to_numpy(zero_copy_only=False)
        if not late.any():
            return rows, places
        kept = np.ones(rows.num_rows, dtype=bool)
        kept[matches[late]] = False
        return rows.filter(kept), places[~late]

    def without(self, stored: Any, places: np.ndarray) -> Any:
        return stored.filter(_mask(stored.num_rows, places))

    def joined(self, parts: list[Any]) -> Any:
        return pa.concat_tables([part.select(parts[0].column_names) for part in parts])


class Arro3(Arrow):
    """Rust's parquet by arro3, which reads whole rows only; pyarrow looks up the keys, without copies."""

    def read(self, file: Path, columns: Sequence[str] | None = None) -> Any:
        import arro3.io

        return arro3.io.read_parquet(file, batch_size=1 << 20).read_all()

    def write(self, rows: Any, sink: BinaryIO) -> None:
        import arro3.io

        repeated = self.repeated(pa.table(rows)) if self._repeated is None else self._repeated
        dictionary = {name: name in repeated for name in rows.column_names}
        arro3.io.write_parquet(rows, sink, compression="zstd(1)", column_dictionary_enabled=dictionary)

    def without(self, stored: Any, places: np.ndarray) -> Any:
        from arro3 import compute, core

        (batch,) = stored.combine_chunks().to_batches()
        return core.RecordBatch.from_struct_array(compute.filter(batch, pa.array(_mask(stored.num_rows, places))))

    def joined(self, parts: list[Any]) -> Any:
        from arro3 import core

        stored, rows = parts
        rows = rows.select(stored.schema.names)
        return core.Table.from_batches([stored, *core.Table.from_arrow(rows).to_batches()])

    def look_up(self, stored: Any, rows: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, np.ndarray]:
        return super().look_up(pa.table(stored.select(columns)), rows, columns)


class Polars:
    """Polars, with its readers and writers in Rust."""

    def read(self, file: Path, columns: Sequence[str] | None = None) -> Any:
        import polars as pl

        return pl.read_parquet(file, columns=columns, parallel="none", use_statistics=False, hive_partitioning=False)

    def write(self, rows: Any, sink: BinaryIO) -> None:
        rows.write_parquet(sink, compression="zstd", compression_level=1)

    def newest(self, night: Path, columns: Sequence[str]) -> Any:
        return self.read(night).sort(columns).unique(columns[:-1], keep="last", maintain_order=True)

    def partitions(self, rows: Any, column: str) -> Iterator[tuple[str, Any]]:
        for (value,), of_it in rows.partition_by(column, as_dict=True, maintain_order=True).items():
            yield str(value), of_it

    def look_up(self, stored: Any, rows: Any, columns: Sequence[str]) -> tuple[Any, np.ndarray]:
        *key, order = columns
        found = stored.select(columns).with_row_index("place").join(rows.select(columns), on=key, suffix="_new")
        is_late = found[order] > found[f"{order}_new"]
        if is_late.any():
            rows = rows.join(found.filter(is_late), on=key, how="anti")
            found = found.filter(~is_late)
        return rows, found["place"].to_numpy()

    def without(self, stored: Any, places: np.ndarray) -> Any:
        return stored.filter(_mask(stored.height, places))

    def joined(self, parts: list[Any]) -> Any:
        import polars as pl

        return pl.concat([part.select(parts[0].columns) for part in parts])


def _ends(rows: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Of rows in order of the columns: whether the next row has another value in one of them."""
    differs = np.zeros(rows.num_rows, dtype=bool)
    differs[-1:] = True
    for column in columns:
        values = rows[column].combine_chunks()
        differs[:-1] |= pc.not_equal(values[:-1], values[1:]).to_numpy(zero_copy_only=False)
    return differs


def _keys(stored: Any, rows: pa.Table, key: Sequence[str]) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """One value a row for `pc.index_in`: the key's column, or a number for the values of several columns."""
    if len(key) == 1:
        return stored[key[0]], rows[key[0]]
    of_stored: Any = 0
    of_rows: Any = 0
    for column in key:
        known = rows[column].unique()
        of_stored, of_rows = (
            pc.add(pc.multiply(number, len(known)), pc.index_in(values, known).cast("int64"))
            for number, values in ((of_stored, stored[column]), (of_rows, rows[column]))
        )
    return of_stored, of_rows


def _mask(length: int, left_out: np.ndarray) -> np.ndarray:
    mask = np.ones(length, dtype=bool)
    mask[left_out] = False
    return mask
