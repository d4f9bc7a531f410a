"""`--host local`: phase one's row work in this process, for small nights and for tests.

Rows are held in memory up to ``HELD_BYTES`` and spill to a temporary folder beyond, a file for each group of ranges.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.engine.batch import AppendJob, split, with_ranges
from lakeupsert.engine.reports import Report
from lakeupsert.engine.settle import Held, grouped, settle_and_write
from lakeupsert.landing.accept import LandingInput, Survey, survey
from lakeupsert.storage import ObjectStore

HELD_BYTES = 256 << 20
SPILL_FILES = 64


class Host(Protocol):
    """Where the row work runs."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        reading: Reading,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        """`landing.survey` of each file."""

    def run(self, job: AppendJob) -> list[Report]:
        """The row work of the whole batch, once."""


class LocalHost:
    """See `Host`."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        reading: Reading,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        return [survey(landing, given, reading, known, text_columns) for given in inputs]

    def run(self, job: AppendJob) -> list[Report]:
        job = with_ranges(job)
        reports: list[Report] = []
        held = Held(job, HELD_BYTES)
        with ExitStack() as stack:
            spill: _Spill | None = None
            for found in split(job, job.inputs):
                if not isinstance(found, pa.Table):
                    reports.append(found)
                elif held.add(found):
                    spill = spill or stack.enter_context(_Spill(job))
                    spill.add(held.tables)
                    reports += held.lost
                    held = Held(job, HELD_BYTES)
            reports += held.lost
            if spill is None:
                groups = iter([held.tables] if held.tables else [])
            else:
                if held.tables:
                    spill.add(held.tables)
                groups = spill.groups()
            for tables in groups:
                reports.extend(settle_and_write(job, tables))
        return reports


class _Spill:
    """Temporary Arrow files; all rows of a range are in one of them."""

    def __init__(self, job: AppendJob) -> None:
        self._job = job

    def __enter__(self) -> "_Spill":
        self._folder = tempfile.TemporaryDirectory(prefix="lakeupsert-")
        self._files: dict[int, Any] = {}
        return self

    def __exit__(self, *error: Any) -> None:
        for writer in self._files.values():
            writer.close()
        self._folder.cleanup()

    def add(self, tables: Sequence[Any]) -> None:
        for number, rows in grouped(self._job, tables, SPILL_FILES):
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
