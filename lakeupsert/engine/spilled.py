"""Tables by number, in temporary Arrow files that are deleted when the block ends."""

import tempfile
from pathlib import Path
from typing import Self

import pyarrow as pa

from lakeupsert.rows.arrays import Rows


class Spilled:
    """Each number's tables are added in any order, and taken once."""

    def __enter__(self) -> Self:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def numbers(self) -> list[int]:
        return [*self._writers]

    def add(self, number: int, rows: Rows) -> None:
        if number not in self._writers:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writers[number] = pa.ipc.new_stream(self._path(number), rows.schema, options=options)
        self._writers[number].write_table(rows)

    def take(self, number: int) -> Rows:
        self._writers.pop(number).close()
        with pa.OSFile(self._path(number)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()

    def _path(self, number: int) -> str:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="lakeupsert-")
        return str(Path(self._folder.name) / f"{number}.arrow")
