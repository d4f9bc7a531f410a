"""Whether `append` would take each row of a body, its columns in the table, and Arrow's streams as Parquet files."""

import io
import logging
from dataclasses import replace
from itertools import islice
from threading import Lock

import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.config import Reading
from lakeupsert.endpoint.readers import READERS
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.accept import RowRules, take
from lakeupsert.landing.files import Reader, Survey, required_columns
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import refuse_unadopted
from lakeupsert.pipeline.append.next_spec import plan_spec
from lakeupsert.pipeline.child import EndedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import LOST, Lost, until_won
from lakeupsert.table.ledger import next_stamp
from lakeupsert.table.spec import TableSpec

log = logging.getLogger(__name__)

_MOST_ROWS = 10_000_000
"""Rows of a body. A few bytes of Parquet can repeat a row a billion times."""
_NAMED_ROWS = 3


def as_parquet(stream: bytes) -> bytes:
    """A stream of Arrow IPC as a Parquet file with the same types. Raises RefusedError."""
    try:
        return READERS.call(len(stream), _as_parquet, stream)
    except EndedError as e:
        raise _unfit(str(e)) from e
    except (pa.ArrowException, OSError, ValueError) as e:
        raise _unfit(f"The body is not a stream of Arrow IPC that Parquet can hold: {e}"[:500]) from e


def _as_parquet(stream: bytes) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.open_stream(stream) as batches, pq.ParquetWriter(sink, batches.schema) as writer:
        for batch in batches:
            batch.validate(full=True)
            writer.write_batch(batch)
    return sink.getvalue()


def accept_rows(table: OpenTable, path: str, data: bytes, history: Lock) -> None:
    """Raise RefusedError if `append` would refuse this landing file, or a row of it.

    Columns may come and grow. Then the spec that has them is appended, and creates a new table: no other batch or server can give
    them other types before `append` takes this one. ``history``: held while this thread uses the table, not while rows are read.
    """
    file, specs = LandingInput(path, len(data), "", place=0), table.history.objects.specs

    def attempt() -> Lost | None:
        with history:
            head = table.history.head_spec()
            if head is None:
                refuse_unadopted(table)
        try:
            spec, warnings = _plan(table, head.body if head else None, file, data, history)
        except (EndedError, UnreadableFileError) as e:
            raise _unfit(e.reason if isinstance(e, UnreadableFileError) else str(e)) from e
        except RefusedError as e:
            raise _unfit(e.message) from e
        except ConfigurationError as e:  # a first batch without a key column, or a setting that names another one?
            log.warning("%s: a batch was not taken: %s Next: %s", table.name, e.message, e.next)
            raise _unfit(e.message, f". If they are right, the owner of the server must act: {e.next}") from e
        if head is not None and spec is head.body:
            return None
        for warning in warnings:
            log.warning("%s: %s", table.name, warning)
        with history:
            return None if specs.append(spec, head).result == "won" else LOST

    until_won(table.resources.store.uri(), attempt)


def _plan(
    table: OpenTable, known: TableSpec | None, file: LandingInput, data: bytes, history: Lock
) -> tuple[TableSpec, list[str]]:
    """The spec that a batch of this file is written under, and warnings. Raises UnreadableFileError if it refuses a row."""
    with history:
        reading, text = table.history.reading, table.declaration.text_columns
    survey, refusal = READERS.call(len(data), _read, table.name, file, data, reading, known, text)
    with history:
        spec, warnings = plan_spec(table, known, [survey])
    if spec is not known:
        refusal = READERS.call(len(data), _refusal, table.name, file, data, reading, spec)
    if refusal:
        raise refusal
    return spec, warnings


def _read(
    name: str, file: LandingInput, data: bytes, reading: Reading, known: TableSpec | None, text: frozenset[str]
) -> tuple[Survey, UnreadableFileError | None]:
    """The columns of the body, and the refusal of the table as it is: most bodies have no new column, so one call is enough."""
    kind = readable_format(file, reading)
    columns = Reader.of(pa.BufferReader(data), file, kind, reading).columns(known and known.schema, text)
    survey = Survey(path=file.path, typed=kind.typed, **vars(replace(columns, dominant_types={})))
    return survey, _refusal(name, file, data, reading, known) if known else None


def _refusal(
    name: str, file: LandingInput, data: bytes, reading: Reading, spec: TableSpec
) -> UnreadableFileError | None:
    """Why a table of this name and spec refuses rows of the body."""
    try:
        _check(name, file, data, reading, spec)
    except UnreadableFileError as e:
        return e
    return None


def _check(name: str, file: LandingInput, data: bytes, reading: Reading, spec: TableSpec) -> None:
    """Raise UnreadableFileError if a table of this name and spec refuses a row of the body."""
    rules = RowRules(spec, next_stamp(None), table=name, envelope=reading.envelope)
    reader = Reader.of(pa.BufferReader(data), file, readable_format(file, reading), reading)
    contents = reader.blocks(required_columns(spec))
    rows = refused = 0
    reasons: list[str] = []
    for block in contents.blocks:
        checked = take(block, contents.missing, file.path, rules)
        rows, refused = rows + len(checked.accepted), refused + len(checked.quarantined)
        for row in islice(checked.quarantined.to_pylist(), _NAMED_ROWS - len(reasons)):
            where = f"row {row['position']}" if row["line"] is None else f"line {row['line']}"
            reasons.append(f"{where}: {row['reason']}")
        if rows + refused > _MOST_ROWS:
            raise UnreadableFileError(file.path, f"The body has more than {_MOST_ROWS:,} rows.")
    if refused or not rows:
        found = f"Table {name!r} would refuse {count(refused, 'row')}: {' '.join(reasons)}"
        raise UnreadableFileError(file.path, found if refused else "The body has no row.")


def _unfit(why: str, otherwise: str = "") -> RefusedError:
    next_ = f"correct the rows and send them with the same id{otherwise}"
    return RefusedError("unfit-rows", f"{why} Nothing was stored.", next=next_)
