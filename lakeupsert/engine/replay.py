"""The row work of a replay: quarantined rows are taken or refused again, as rows of landing files are. Commits nothing.

    quarantine files -> blocks -> landing.take -> rows that pass -> settle by G1, sort by key -> write
                                       '-> rows that stay -> a new quarantine file

A row is made of what its quarantine file keeps of it, never of its landing file, which may be gone or another one by now.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.engine.batch import AppendJob, without_refused
from lakeupsert.engine.reports import Report
from lakeupsert.engine.settle import settle_and_write
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import (
    PARTITION,
    TYPED,
    Survey,
    UnreadableFileError,
    aliased,
    format_of,
    new_columns,
    take,
)
from lakeupsert.landing.formats.blocks import ArrowBlock, Block, Renamed
from lakeupsert.landing.formats.jsonlines import block_of_some
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import from_bytes, opened
from lakeupsert.table.evolution import evolve
from lakeupsert.table.ledger import Replayed
from lakeupsert.table.spec import FILE, PLACE

log = logging.getLogger(__name__)

UNTRIED = ("unreadable_file", "malformed", "missing_column")
"""Reasons that nothing mends but another landing file: the row has no columns, or not all that it needs."""


def replay_rows(
    job: AppendJob, files: Sequence[Replayed], renames_of: Callable[[str], int]
) -> tuple[tuple[Replayed, ...], list[Report]]:
    """Try the rows of quarantine files again: those of ``files`` of which a row passes, and reports of all their rows.

    ``renames_of``: how many renames there had been when a batch, by its id, read them from its landing files.

    A row's rank in the batch is its file's place in what is returned, and its own place in that file. Of a file of
    which none passes nothing is written.

    Raises:
        DamagedTableError: a quarantine file is missing or can't be read.
    """
    replayed: list[Replayed] = []
    passed: list[Any] = []
    reports: list[Report] = []
    with job.quarantine() as quarantine:
        for file in files:
            with opened(job.store, file.name) as source:
                rows = pq.read_table(source)
            if "arrow" not in rows.schema.names:
                log.warning("%s is of an earlier lakeupsert, which kept rows for people alone: not tried", file.name)
                continue
            accepted, staying = _tried(rows, job, renames_of)
            for table in accepted:
                table, left_out = without_refused(job, table)
                reports += left_out
                if job.only is not None:
                    table = table.filter(pc.is_in(table[PARTITION], pa.array(sorted(job.only), pa.string())))
                place = pa.array(np.full(table.num_rows, len(replayed), np.int32))
                passed.append(table.append_column(FILE, place).select([*job.spec.ranked_schema.names, PARTITION]))
            if accepted:
                if job.only is None:
                    quarantine.write(staying)
                replayed.append(file)
    reports += quarantine.report()
    if passed:
        reports += settle_and_write(job, passed)
    return tuple(replayed), reports


def new_columns_of(job: AppendJob, files: Sequence[Replayed], renames_of: Callable[[str], int]) -> list[Survey]:
    """What rows of quarantine files that pass bring and the table lacks: of each block of them these columns alone.

    Raises DamagedTableError as `replay_rows` does.
    """
    found = []
    for file in files:
        with opened(job.store, file.name) as source:
            rows = pq.read_table(source)
        for block, landed, batch in _blocks(rows) if "arrow" in rows.schema.names else ():
            block = _as_called_now(block, landed, job, renames_of(batch))
            new = _new_columns(block, landed, job)
            if new and take(block, frozenset(), landed, job.rules).accepted.num_rows:
                found.append(Survey(landed, new, format_of(landed, job.reading.format) in TYPED))
    return found


def _new_columns(block: Block, landed: str, job: AppendJob) -> Any:
    """The columns of a block that the table lacks, as a ``pyarrow.Schema``."""
    new = new_columns(block, job.spec)
    typed = format_of(landed, job.reading.format) in TYPED
    return pa.schema([(name, block.type_of(name, typed=typed)) for name in block.names if name in new])


def _is_unfit(block: Block, landed: str, job: AppendJob) -> bool:
    """Whether the block has a column that the table can't have: no row of it passes, or that column would go lost."""
    try:
        evolve(job.spec, _new_columns(block, landed, job))
    except ConfigurationError:
        return True
    return False


def _tried(rows: Any, job: AppendJob, renames_of: Callable[[str], int]) -> tuple[list[Any], Any]:
    """The rows of one quarantine file: tables of those accepted, see `landing.read_rows`; and those that stay, in order."""
    columns = {column: rows[column].to_pylist() for column in ("reason_code", "reason", "arrow")}
    stays = np.ones(rows.num_rows, bool)
    accepted = []
    for block, landed, batch in _blocks(rows):
        block = _as_called_now(block, landed, job, renames_of(batch))
        if _is_unfit(block, landed, job):
            continue
        taken = take(block, frozenset(), landed, job.rules)
        stays[taken.accepted[PLACE].to_numpy()] = False
        if taken.accepted.num_rows:
            accepted.append(taken.accepted)
        for refused in taken.quarantined.select(["position", *columns]).to_pylist():
            at = refused.pop("position")
            for column, value in refused.items():
                columns[column][at] = value
    for column, values in columns.items():
        at = rows.schema.get_field_index(column)
        rows = rows.set_column(at, column, pa.array(values, rows.schema.field(at).type))
    return accepted, rows.filter(pa.array(stays))


def _as_called_now(block: Block, landed: str, job: AppendJob, renames: int) -> Block:
    """The block with the names of now, without columns that were dropped (see `TableSpec.renamed_since`); and what `aliases`
    say of columns that are not called so by a rename. Rows with both names have both: the alias is not theirs."""
    now = {then.lower(): name for then, name in job.spec.renamed_since(renames).items()}
    own = {now.get(name.lower(), name): name for name in block.names} if now else {}
    block = Renamed(block, {name: its for name, its in own.items() if name is not None}) if now else block
    with suppress(UnreadableFileError):
        return aliased(block, landed, job.reading)
    return block


def _blocks(rows: Any) -> Iterator[tuple[Block, str, str]]:
    """The rows that have columns, as they came, the landing file that they came in and the batch that read it; a row's place in
    its block is its place in the quarantine file."""
    places = np.flatnonzero(~true(pc.is_in(rows["reason_code"].combine_chunks(), pa.array(UNTRIED))))
    streams, lines = (rows[column].to_pylist() for column in ("arrow", "raw"))
    origins = list(zip(rows["file"].to_pylist(), rows["batch"].to_pylist(), strict=True))
    at = 0
    while at < len(places):
        stream, origin = streams[places[at]], origins[places[at]]
        if stream is None:
            others = (i for i, p in enumerate(places[at:], at) if streams[p] is not None or origins[p] != origin)
            end = next(others, len(places))
            yield block_of_some([lines[place].encode() for place in places[at:end]], places[at:end]), *origin
        else:
            table = from_bytes(stream)
            end = at + table.num_rows
            yield ArrowBlock({n: table[n].combine_chunks() for n in table.schema.names}, places[at:end]), *origin
        at = end
