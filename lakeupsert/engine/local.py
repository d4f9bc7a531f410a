"""`--host local`: phase one's row work in this process, for small nights and for tests.

Rows are held in memory up to ``HELD_BYTES`` and spill to a temporary folder beyond, a file for each group of partitions.
"""

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from lakeupsert.engine.batch import (
    AppendJob,
    Report,
    by_partition,
    settle_and_write,
    split,
)
from lakeupsert.engine.landing import LandingInput, Survey, survey
from lakeupsert.storage import ObjectStore

HELD_BYTES = 256 << 20
SPILL_FILES = 64


class LocalHost:
    """See `lakeupsert.engine.batch.Host`."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        format: str,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        return [survey(landing, given, format, known, text_columns) for given in inputs]

    def run(self, job: AppendJob) -> list[Report]:
        reports: list[Report] = []
        held: list[Any] = []
        size = 0
        with ExitStack() as stack:
            spill: _Spill | None = None
            for found in split(job, job.inputs):
                if not isinstance(found, pa.Table):
                    reports.append(found)
                    continue
                held.append(found)
                size += found.nbytes
                if size > HELD_BYTES:
                    spill = spill or stack.enter_context(_Spill())
                    spill.add(held)
                    held, size = [], 0
            if spill is not None:
                if held:
                    spill.add(held)
                groups: Iterator[list[Any]] = spill.groups()
            else:
                groups = iter([held] if held else [])
            for tables in groups:
                reports.extend(settle_and_write(job, tables))
        return reports


class _Spill:
    """Temporary Arrow files; all rows of a partition are in one of them."""

    def __enter__(self) -> "_Spill":
        self._folder = tempfile.TemporaryDirectory(prefix="lakeupsert-")
        self._files: dict[int, Any] = {}
        return self

    def __exit__(self, *error: Any) -> None:
        for writer in self._files.values():
            writer.close()
        self._folder.cleanup()

    def add(self, tables: Sequence[Any]) -> None:
        for partition, rows in by_partition(pa.concat_tables(tables)):
            number = zlib.crc32(partition.encode()) % SPILL_FILES
            if number not in self._files:
                self._files[number] = pa.ipc.new_stream(
                    str(self._path(number)), rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
                )
            self._files[number].write_table(rows)

    def groups(self) -> Iterator[list[Any]]:
        for number, writer in self._files.items():
            writer.close()
            with pa.OSFile(str(self._path(number))) as source, pa.ipc.open_stream(source) as reader:
                yield [reader.read_all()]

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"{number}.arrow"
