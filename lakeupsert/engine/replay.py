"""The row work of a replay: take or refuse quarantined rows again, by the rules for rows of landing files. Commits nothing.

    quarantine files -> blocks -> landing.take -> rows that pass -> settle by rank, sort by key -> write
                                       '-> rows that stay -> a new quarantine file

A row is rebuilt from its quarantine file, never from its landing file, which may be gone or may have other content by now.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading
from lakeupsert.engine.batch import AppendJob, drop_left_out, find_erased, ranked_rows
from lakeupsert.engine.keys.placing import WHY_REFUSED
from lakeupsert.engine.reports import Report
from lakeupsert.engine.settle import settle_and_write
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import new_columns, take
from lakeupsert.landing.files import Survey, apply_aliases
from lakeupsert.landing.formats.blocks import Block, RenamedBlock, UnreadableFileError
from lakeupsert.landing.formats.connect import row_of
from lakeupsert.landing.formats.dates import dated
from lakeupsert.landing.formats.folders import with_folders
from lakeupsert.landing.formats.jsonlines import decode_each
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import from_bytes, open_object
from lakeupsert.storage import ObjectStore
from lakeupsert.table.evolution import evolve
from lakeupsert.table.ledger import Reason, ReplayedFile
from lakeupsert.table.spec import PLACE

log = logging.getLogger(__name__)

UNTRIED = ("unreadable_file", "malformed", "missing_column", "retyped")
"""Reasons that only another landing file can mend: the row has no columns, or lacks some that it needs, or it is a copy of a
stored row, which may have been updated or deleted since."""

STORED_ROW = "(a stored row)"
"""Stands for the file of a record that was stored before it was refused: nobody knows from which file it came."""


def replay_rows(
    job: AppendJob,
    files: Sequence[ReplayedFile],
    renames_of: Callable[[str], int],
    refused_by_key: Callable[[Rows], Mapping[Reason, Mask]] = lambda rows: {},
) -> tuple[tuple[ReplayedFile, ...], list[Report]]:
    """Try the rows of quarantine files again. Returns the files with a row that passes, and reports of all their rows.

    Within the batch a row ranks by its file's place among the returned files, then by its own place in that file. Nothing is
    written for a file with no row that passes.

    Args:
        renames_of: from a batch id to the number of renames that preceded the batch, when it read the rows from landing files.
        refused_by_key: which accepted rows stay, by reason (`placing.WHY_REFUSED`).

    Raises:
        DamagedTableError: a quarantine file is missing or can't be read.
    """
    replayed: list[ReplayedFile] = []
    passed: list[Rows] = []
    reports: list[Report] = []
    with job.quarantine() as quarantine:
        for file in files:
            rows = _read(job.store, file)
            accepted, staying = _take_again(rows, job, renames_of, refused_by_key)
            for table in accepted:
                table, superseded = drop_left_out(job, table, find_erased(job, table))
                reports += superseded
                passed.append(ranked_rows(job, job.of_wanted_partitions(table), len(replayed)))
            if accepted:
                if job.only is None:
                    quarantine.write(staying)
                replayed.append(file)
    reports += quarantine.reports()
    if passed:
        reports += settle_and_write(job, passed)
    return tuple(replayed), reports


def new_columns_of(job: AppendJob, files: Sequence[ReplayedFile], renames_of: Callable[[str], int]) -> list[Survey]:
    """Columns that the table lacks and that quarantined rows which now pass bring: one survey for each block of rows.

    Raises DamagedTableError as `replay_rows` does.
    """
    found = []
    for file in files:
        rows = _read(job.store, file)
        for quarantined in blocks_of(rows, job.reading):
            landed = quarantined.file
            block = _with_current_names(quarantined, job, renames_of)
            if new := _new_columns(block, landed, job, take(block, frozenset(), landed, job.rules).accepted):
                found.append(Survey(path=landed, schema=new, typed=format_of(landed, job.reading.format).typed))
    return found


def read_again(store: ObjectStore, file: ReplayedFile, places: Indices) -> Iterator[Rows]:
    """The rows at these places of a quarantine file, as a quarantine file of their own has them."""
    rows = _read(store, file)
    for quarantined in blocks_of(rows, Reading()):
        own = quarantined.block.places
        wanted = np.flatnonzero(np.isin(own, places))
        streams = pa.array(quarantined.block.arrow(wanted.tolist()), pa.binary())
        yield rows.take(pa.array(own[wanted])).set_column(rows.schema.get_field_index("arrow"), "arrow", streams)


def _read(store: ObjectStore, file: ReplayedFile) -> Rows:
    with open_object(store, file.name) as source:
        return pq.read_table(source)


def _new_columns(block: Block, landed: str, job: AppendJob, accepted: Rows) -> pa.Schema:
    """The columns of a block that the table lacks, by its ``accepted`` rows."""
    new = new_columns(block, job.spec, accepted)
    typed = format_of(landed, job.reading.format).typed
    rows = np.isin(block.places, accepted[PLACE].to_numpy())
    return pa.schema([(name, block.type_of(name, rows, typed=typed)) for name in block.names if name in new])


def _has_unfit_column(block: Block, landed: str, job: AppendJob, accepted: Rows) -> bool:
    """Whether the table can't have one of the block's new columns. Then no row passes, or that column would be lost."""
    try:
        evolve(job.spec, _new_columns(block, landed, job, accepted))
    except ConfigurationError:
        return True
    return False


def _take_again(
    rows: Rows,
    job: AppendJob,
    renames_of: Callable[[str], int],
    refused_by_key: Callable[[Rows], Mapping[Reason, Mask]],
) -> tuple[list[Rows], Rows]:
    """The rows of one quarantine file: tables of accepted rows (see `landing.accept.read_rows`), and the rows that stay."""
    columns = {column: rows[column].to_pylist() for column in ("reason_code", "reason")}
    streams = rows["arrow"].to_pylist()
    stays = np.ones(rows.num_rows, bool)
    accepted = []
    for quarantined in blocks_of(rows, job.reading):
        block = _with_current_names(quarantined, job, renames_of)
        if quarantined.file == STORED_ROW and job.spec.order_in_name:
            continue
        taken = take(block, frozenset(), quarantined.file, job.rules)
        if _has_unfit_column(block, quarantined.file, job, taken.accepted):
            continue
        own, waits = taken.accepted[PLACE].to_numpy(), np.zeros(taken.accepted.num_rows, bool)
        for reason, mask in refused_by_key(taken.accepted).items():
            waits |= mask
            for at in own[mask].tolist():
                columns["reason_code"][at], columns["reason"][at] = reason, WHY_REFUSED[reason]
        passes = taken.accepted.filter(pa.array(~waits))
        stays[own[~waits]] = False
        if passes.num_rows:
            accepted.append(passes)
        for refused in taken.quarantined.select(["position", *columns]).to_pylist():
            at = refused.pop("position")
            for column, value in refused.items():
                columns[column][at] = value
        places = quarantined.block.places
        staying = np.flatnonzero(stays[places]).tolist()
        for at, stream in zip(places[staying].tolist(), quarantined.block.arrow(staying), strict=True):
            streams[at] = stream
    for column, values in {**columns, "arrow": streams}.items():
        at = rows.schema.get_field_index(column)
        rows = rows.set_column(at, column, pa.array(values, rows.schema.field(at).type))
    return accepted, rows.filter(pa.array(stays))


@dataclass(frozen=True)
class QuarantinedBlock:
    """Consecutive rows of a quarantine file, from one landing file; ``batch`` is the id of the batch that read it.

    A row's place in the block is its place in the quarantine file.
    """

    block: Block
    file: str
    batch: str


def _with_current_names(quarantined: QuarantinedBlock, job: AppendJob, renames_of: Callable[[str], int]) -> Block:
    """The block with the table's current column names, without dropped columns (see `TableSpec.renamed_since`).

    Aliases apply to columns that no rename explains. A row with a column's name and its alias keeps both: that alias means
    another column. Dates are read by today's formats.
    """
    block, renames = quarantined.block, renames_of(quarantined.batch)
    current = {then.lower(): name for then, name in job.spec.changed_names(renames).items()}
    if current:
        own = {current.get(name.lower(), name): name for name in block.names}
        block = RenamedBlock(block, {name: in_file for name, in_file in own.items() if name is not None})
    with suppress(UnreadableFileError):
        block = apply_aliases(block, quarantined.file, job.reading)
    return dated(with_folders(block, quarantined.file, job.reading), job.reading)


def find_tried(rows: Rows) -> Indices:
    """The places of rows of a quarantine file that have columns."""
    return np.flatnonzero(~as_mask(pc.is_in(rows["reason_code"].combine_chunks(), pa.array(UNTRIED))))


def blocks_of(rows: Rows, reading: Reading) -> Iterator[QuarantinedBlock]:
    """The rows that have columns, as they came."""
    places = find_tried(rows)
    streams, lines = (rows[column].to_pylist() for column in ("arrow", "raw"))
    origins = list(zip(rows["file"].to_pylist(), rows["batch"].to_pylist(), strict=True))
    at = 0
    while at < len(places):
        stream, origin = streams[places[at]], origins[places[at]]
        if stream is None:
            others = (i for i, p in enumerate(places[at:], at) if streams[p] is not None or origins[p] != origin)
            end = next(others, len(places))
            texts = [lines[place].encode() for place in places[at:end]]
            block: Block = decode_each(texts, places[at:end], lambda message: [row_of(message)], stated=True)
        else:
            table = from_bytes(stream)
            end = at + table.num_rows
            block = format_of(origin[0], reading.format).block.from_arrow(table, places[at:end])
        yield QuarantinedBlock(block, *origin)
        at = end
