"""What a snapshot should show, computed anew from what landed, by other programs than the ones that made it.

Reads     the ledger's list of files, quarantine files (for which rows were refused), the landing files, adopted files
Writes    nothing but temporary files: what does not fit into DuckDB's memory, one landing file of a remote store at a time
Repeat    safe

Parquet is read by DuckDB (its operation column by Arrow), text by Python's own readers; Avro and ORC, which have no second
one, as `append` reads them. Every value is converted by DuckDB's CAST to the type that the spec gives its column. DuckDB's
window finds the winners, and compares all their columns with what readers see.
"""

import base64
import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading, is_remote
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.files import content_hash, format_of
from lakeupsert.landing.formats import avrofile, orcfile
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.envelopes import UNWRAP
from lakeupsert.landing.formats.unpacked import UNDECODABLE, compression_of, is_utf8
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.arrow import reader_schema, to_arrow
from lakeupsert.read.view import View, plain_path
from lakeupsert.rows.convert import decoded
from lakeupsert.rows.datafiles import from_bytes, read_file
from lakeupsert.rows.floor import Forgetting, refused_by_merges
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import FullExtract, LandingFile, LedgerEntry, counting
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import Ordering, TableSpec

BLOCK_ROWS = 50_000
"""Rows of a text file that go to DuckDB at once."""
COPIED_BYTES = 16 << 20
_MARKED = "\ue000{}\ue000"
"""A number of JSON, as it was written: Python's own would lose digits, also within lists and objects."""
_DELETED, _NTH, _PLACE, _BATCH, _HAS = (f"_lakeupsert_{name}" for name in ("delete", "nth", "place", "batch", "has"))
"""The last is of mode columns: the names of the columns that a row brings, in small letters."""

_MADE = {
    "year": "year({})",
    "month": "strftime({}, '%Y-%m')",
    "date": "CAST({} AS DATE)",
    "hour": "strftime({}, '%Y-%m-%d-%H')",
}

# Files come in ledger order, and the rows of each are inserted in their order, so that rowid ends the rank.
# A key that is published twice has an nth = 2 that matches nothing, and so counts as extra.
_COMPARED = """
SELECT {partition}, count(*) FILTER (p.{nth} IS NULL), count(*) FILTER (e.{nth} IS NULL),
       count(*) FILTER (p.{nth} = e.{nth} AND row({expected}) IS DISTINCT FROM row({published}))
FROM ({winners}) e FULL JOIN (SELECT *, row_number() OVER (PARTITION BY {key}) AS {nth} FROM published) p USING ({key}, {nth})
GROUP BY {partition}
"""

# Of keys that a full extract has: deletes that had been forgotten when it came, and what they beat.
_VOID = """
DELETE FROM landed WHERE rowid IN (
    SELECT place FROM (
        SELECT place, {batch}, nth, min(CASE WHEN forgotten THEN nth END) OVER of_key AS first,
               bool_or({batch} = {number}) OVER of_key AS has
        FROM (SELECT *, rowid AS place, {is_forgotten} AS forgotten,
                     row_number() OVER (PARTITION BY {key} ORDER BY {order}) AS nth
              FROM landed)
        WINDOW of_key AS (PARTITION BY {key})
    ) WHERE has AND nth >= first AND {batch} < {number}
)
"""


@dataclass(frozen=True)
class Comparison:
    """Rows of one partition that readers miss, that they should not see, and whose columns are not what landed."""

    missing: int = 0
    extra: int = 0
    different: int = 0

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def __str__(self) -> str:
        return f"{self.missing:,} missing, {self.extra:,} extra, {self.different:,} different"


@dataclass(frozen=True)
class Recomputed:
    """A comparison for each partition that could be recomputed; batches that could not be read, with the first file gone.

    Attributes:
        version: DuckDB's, which computed.
        files, rows: landing files (of batch 0 adopted ones) that were read, and the rows of these partitions in them that were
            not refused.
    """

    version: str
    partitions: dict[str, Comparison] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    files: int = 0
    rows: int = 0


def recompute(
    table: OpenTable, snapshot: Link[Snapshot], partitions: Sequence[str], progress: Callable[[str], None]
) -> Recomputed:
    """Compare these partitions of a snapshot with what the batches that count in them brought.

    A partition that is still as it was adopted has nothing to be compared with, and is left out; so are those that a batch
    touches whose landing files are gone or changed. Where keys are unique in the whole table, every partition says which of
    them has a key, so all are compared, or none. Raises ConfigurationError where DuckDB has no type for a column.
    """
    view = View.open(table.objects, table.existing_spec(), snapshot.number)
    asked, partitions = partitions, sorted(snapshot.body.partitions) if view.spec.key_scope == "table" else partitions
    entries = table.entries(-1, snapshot.body.batch)
    shown = {
        p: table.version(p, snapshot.body.partitions[p].version) for p in partitions if p in snapshot.body.partitions
    }
    settled = {p: m for p, m in shown.items() if all(b.settled for b in m.buckets)}
    batches = _counted(entries, shown if view.spec.key_scope == "table" else settled)
    with _connected() as db:
        inputs = _Inputs(table, view.spec, db, refused_by_merges(table.store, shown.values(), view.spec))
        gone: dict[int, str] = {}
        unknown: set[str] = set()
        for number, touched in batches.items():
            found = inputs.first_gone(entries[number].body, touched)
            if found is not None:
                gone[number] = found
                unknown.update(touched)
        if unknown and view.spec.key_scope == "table":
            unknown.update(shown)
        compared = sorted({p for touched in batches.values() for p in touched} - unknown)
        inputs.create_tables()
        for number, touched in batches.items():
            progress(f"reading batch {number:,} of {len(entries) - 1:,} again")
            inputs.load(number, entries[number].body, [p for p in touched if p not in unknown])
        for partition in compared:
            progress(f"reading {partition} as readers see it")
            db.register("reader", to_arrow(view, partition=partition).cast(_compared_schema(view.spec)))
            db.execute("INSERT INTO published SELECT * FROM reader")
        progress("comparing")
        differing = inputs.compared()
    values = {p: tuple(v.as_py() for v in partition_scalars(view.spec, p).values()) for p in compared}
    return Recomputed(
        version=import_duckdb().__version__,
        partitions={p: differing.get(values[p], Comparison()) for p in compared if p in asked and p in settled},
        gone=gone,
        files=inputs.files,
        rows=inputs.rows,
    )


def _counted(entries: Sequence[Link[LedgerEntry]], shown: dict[str, Manifest]) -> dict[int, list[str]]:
    """For each batch, in ledger order, the partitions that it touches and in whose version it counts."""
    counts = {
        merged: {0, *counting((n.number, n.body) for n in entries[: merged + 1])}
        for merged in {m.merged for m in shown.values()}
    }
    found: dict[int, list[str]] = {}
    for link in entries:
        for partition in link.body.touched:
            if partition in shown and link.number in counts[shown[partition].merged]:
                found.setdefault(link.number, []).append(partition)
    return found


class _Inputs:
    """The files that batches name, and DuckDB's tables of what they hold and of what readers see."""

    def __init__(self, table: OpenTable, spec: TableSpec, db: Any, below: Mapping[str, Any]) -> None:
        self.files = 0
        self.rows = 0
        self._below = below
        self._number = 0
        # By partition, of its batches: the number, the stamp, and how long deletes are known.
        self._received: dict[str, list[tuple[int, int, int | None]]] = defaultdict(list)
        self._table = table
        self._spec = spec
        self._db = db

    def first_gone(self, entry: LedgerEntry, partitions: Sequence[str]) -> str | None:
        """A file of the batch that is not there any more, or is another one by now; rows that were replayed have none."""
        if entry.replayed:
            return f"the quarantined rows of {entry.replayed[0].name}"
        if entry.kind == "create":
            files = [f for p in partitions for f in entry.touched[p].files]
            heads = ((f, self._table.store.head(f.name)) for f in files)
            return next((f.name for f, found in heads if found is None or found.size != f.bytes), None)
        return next((f.path for f in entry.files if f.sha256 and not self._is_there(f)), None)

    def _is_there(self, file: LandingFile) -> bool:
        found = self._table.landing.head(file.path)
        if found is not None and (found.size, found.etag) == (file.size, file.etag):
            return True
        try:
            return found is not None and content_hash(self._table.landing, file.path) == file.sha256
        except NotFoundError:
            return False

    def create_tables(self) -> None:
        columns = [f"{_name(name)} {type_}" for name, type_ in self._types(self._spec).items()]
        self._db.execute(f"CREATE TABLE published ({', '.join(columns)})")
        ours = [f"{_DELETED} BOOLEAN", f"{_BATCH} BIGINT", f"{_HAS} VARCHAR[]"]
        self._db.execute(f"CREATE TABLE landed ({', '.join([*columns, *ours])})")

    def load(self, number: int, entry: LedgerEntry, partitions: Sequence[str]) -> None:
        """Put the accepted rows of these partitions that a batch brought behind those that are there, and of what it is a full
        extract of, take away what it lacks."""
        if not partitions:
            return
        self._number = number
        wanted = [{c: v.as_py() for c, v in partition_scalars(self._spec, p).items()} for p in partitions]
        self._db.register("wanted", pa.Table.from_pylist(wanted))
        if entry.kind == "create":
            for partition in partitions:
                for file in entry.touched[partition].files:
                    self.files += 1
                    with _on_disk(self._table.store, file.name) as path:
                        self._load_parquet(entry, path, file.name, [], partition)
            return
        refused, unreadable = self._refused(entry)
        for landed in entry.files:
            if landed.path in unreadable:
                continue
            self.files += 1
            with _on_disk(self._table.landing, landed.path) as path:
                self._load_landed(entry, landed, path, refused.get(landed.path, []))
        if entry.batch_id in self._below:
            self._db.register("below", self._below[entry.batch_id])
            same = " AND ".join(f"below.{_name(c)} = landed.{_name(c)}" for c in self._key)
            self._db.execute(f"DELETE FROM landed USING below WHERE {_BATCH} = {self._number} AND {same}")
        for partition in partitions:
            self._received[partition].append((number, entry.received_at, entry.retention))
        if entry.full:
            self._take_away(entry.full, partitions)

    @property
    def _key(self) -> list[str]:
        return list(dict.fromkeys((*self._spec.partition_by, *self._spec.key)))

    def _take_away(self, full: FullExtract, partitions: Sequence[str]) -> None:
        self._db.register("extract", from_bytes(base64.b64decode(full.order)))
        beats, equal = [], "true"
        for o in self._spec.ordering:
            one, other = f"landed.{_name(o.column)}", f"extract.{_name(o.column)}"
            nulls = f"{one if o.nulls_first else other} IS NULL AND {other if o.nulls_first else one} IS NOT NULL"
            beats.append(f"({equal} AND (coalesce({one} {'<' if o.ascending else '>'} {other}, false) OR ({nulls})))")
            equal += f" AND {one} IS NOT DISTINCT FROM {other}"
        same = " AND ".join(f"n.{_name(c)} = landed.{_name(c)}" for c in self._key)
        self._db.execute(
            f"DELETE FROM landed USING extract WHERE {_BATCH} < {self._number} AND {self._is_wanted()} "
            f"AND NOT ({' OR '.join(beats)}) "
            f"AND NOT EXISTS (SELECT 1 FROM landed n WHERE n.{_BATCH} = {self._number} AND {same})"
        )
        if forgotten := [row for partition in partitions for row in self._forgotten(partition)]:
            self._db.register("forgotten", pa.Table.from_pylist(forgotten))
            key = ", ".join(map(_name, self._key))
            self._db.execute(
                _VOID.format(
                    key=key,
                    order=_rank(self._spec),
                    is_forgotten=f"{_DELETED} AND {self._is_in('forgotten', _BATCH)}",
                    batch=_BATCH,
                    number=self._number,
                )
            )

    def _forgotten(self, partition: str) -> list[dict[str, Any]]:
        """The partition's values and the number of each batch whose deletes it had forgotten when the last one came."""
        came = self._received[partition]
        forgets = Forgetting(tuple((at, kept) for _, at, kept in came))
        values = {c: v.as_py() for c, v in partition_scalars(self._spec, partition).items()}
        return [{**values, _BATCH: came[age - 1][0]} for age in forgets.forgotten_ages(len(came))]

    def _is_wanted(self) -> str:
        return self._is_in("wanted")

    def _is_in(self, table: str, *more: str) -> str:
        """Whether a row of `landed` has the partition columns, and more integers, of one in ``table``."""
        types = {**self._types(self._spec), **dict.fromkeys(more, "BIGINT")}
        names = [*self._spec.partition_by, *more]
        columns = ", ".join(f"landed.{_name(c)}" for c in names)
        values = ", ".join(f"CAST({_name(c)} AS {types[c]})" for c in names)
        return f"({columns}) IN (SELECT {values} FROM {table})"

    def _load_landed(self, entry: LedgerEntry, landed: LandingFile, path: str, refused: Sequence[int]) -> None:
        reading = entry.reading or self._table.settings.reading
        kind = format_of(landed.path, reading.format)
        if kind == "parquet":
            self._load_parquet(entry, path, landed.path, refused, None, reading)
            return
        if kind in ("avro", "orc"):
            self._load_typed(entry, landed, path, refused, reading)
            return
        lines = _lines_of(path, compression_of(landed.path), reading.encoding, newline="\n" if kind == "jsonl" else "")
        rows = _ROWS[kind or ""](_Lines(lines), frozenset(refused), reading)
        while block := [{reading.called(n): v for n, v in row.items()} for row in islice(rows, BLOCK_ROWS)]:
            names = list(dict.fromkeys(name for row in block for name in row))
            came = {n: pa.array([r.get(n) for r in block], pa.string()) for n in names}
            now = self._names_now(entry)
            has = pa.array([[now.get(name.lower(), name.lower()) for name in row] for row in block])
            self._db.register("came", pa.table({**came, _PLACE: pa.array(range(len(block))), _HAS: has}))
            self._insert(entry, "came", landed.path, names, None, text=True, place=_PLACE)

    def _load_typed(
        self, entry: LedgerEntry, landed: LandingFile, path: str, refused: Sequence[int], reading: Reading
    ) -> None:
        file = LandingInput(landed.path, landed.size, landed.etag, place=0)
        with pa.OSFile(path) as source:
            if format_of(landed.path, reading.format) == "avro":
                schema = avrofile.schema_of(source, file, reading)
                source.seek(0)
                opened = avrofile.open_blocks(source, file, reading, frozenset())
            else:
                schema, opened = orcfile.schema_of(source, file), orcfile.open_blocks(source, file, frozenset())
            for block in opened.blocks:
                came = {reading.called(f.name): block.convert(f.name, f.type)[0] for f in schema}
                rows = pa.table({**came, _PLACE: pa.array(block.places, pa.int64())})
                self._db.register("came", rows.filter(pa.array(~np.isin(block.places, refused))))
                column = self._operation_in(came)
                operations = self._is_delete(came[column], block.places, _PLACE) if column else None
                self._insert(
                    entry, "came", landed.path, list(came), None, text=False, place=_PLACE, operations=operations
                )

    def _refused(self, entry: LedgerEntry) -> tuple[dict[str, list[int]], set[str]]:
        """Positions that were refused, by landing file, and files that were as a whole."""
        places: dict[str, list[int]] = {}
        unreadable = set()
        for file in entry.quarantine:
            rows = read_file(self._table.store, DataFile(name=file.name, rows=file.rows, bytes=0), QUARANTINE_SCHEMA)
            for code, path, place in zip(
                *(rows[c].to_pylist() for c in ("reason_code", "file", "position")), strict=True
            ):
                if code == "unreadable_file":
                    unreadable.add(path)
                else:
                    places.setdefault(path, []).append(place)
        return places, unreadable

    def _load_parquet(
        self,
        entry: LedgerEntry,
        path: str,
        file: str,
        refused: Sequence[int],
        adopted: str | None,
        reading: Reading | None = None,
    ) -> None:
        source = f"read_parquet({_text(path)}, file_row_number = true, hive_partitioning = false)"
        own_names = names = [row[0] for row in self._db.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
        if reading is not None and reading.aliases:
            called = {name: reading.called(name) for name in names}
            columns = ", ".join(f"{_name(name)} AS {_name(new)}" for name, new in called.items())
            source, names = f"(SELECT {columns} FROM {source})", list(called.values())
        if refused:
            self._db.register("refused", pa.table({"place": pa.array(refused, pa.int64())}))
            source = f"(SELECT * FROM {source} WHERE file_row_number NOT IN (SELECT place FROM refused))"
        operations = None
        if reading is not None:
            own = {reading.called(name): name for name in reversed(own_names)}
            if column := self._operation_in(own):
                with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as opened:  # as `append` reads it
                    operations = self._is_delete(opened.read([own[column]]).column(0), None, "file_row_number")
        self._insert(entry, source, file, names, adopted, text=False, place="file_row_number", operations=operations)

    def _insert(
        self,
        entry: LedgerEntry,
        source: str,
        file: str,
        names: Sequence[str],
        adopted: str | None,
        text: bool,
        place: str,
        operations: str | None = None,
    ) -> None:
        """``operations``: whether a row's operation deletes, in SQL, of a file that has types."""
        spec = self._table.spec(entry.spec_version)
        then = self._spec.names_in(len(spec.renames))
        written, shown = self._types(spec), self._types(self._spec)
        present = set(map(str.lower, names))  # DuckDB does not tell upper from lower case either
        columns = []
        for shown_name, type_ in shown.items():
            name = then.get(shown_name, shown_name)
            if adopted is not None and name in self._spec.partition_by:
                value = _text(partition_scalars(self._spec, adopted)[name].as_py())
            elif (given := self._given(entry, file, name, written, text) if adopted is None else None) is not None:
                value = given
            elif name.lower() not in present or name not in written:
                value = "NULL"
            else:
                value = _landed(name, written, text)
            first = written.get(
                name, type_
            )  # a value that was narrower when it came, such as a FLOAT, is what it was then
            columns.append(f"TRY_CAST(TRY_CAST({value} AS {first}) AS {type_}) AS {_name(shown_name)}")
        delete = self._spec.delete
        deleted = "false"
        if delete is not None and adopted is None:
            if delete.file_prefix and file.rpartition("/")[2].startswith(delete.file_prefix):
                deleted = "true"
            elif delete.column is not None and delete.values and delete.column.lower() in present:
                values = ", ".join(map(_text, delete.values))
                deleted = operations or f"coalesce({_name(delete.column)} IN ({values}), false)"
        now = self._names_now(entry)
        has = (
            _HAS
            if text
            else f"CAST([{', '.join(_text(now.get(name, name)) for name in sorted(present))}] AS VARCHAR[])"
        )
        inserted = self._db.execute(
            f"INSERT INTO landed SELECT * EXCLUDE ({_PLACE}) FROM "
            f"(SELECT {', '.join(columns)}, {deleted} AS {_DELETED}, {self._number} AS {_BATCH}, {has} AS {_HAS}, "
            f"{place} AS {_PLACE} FROM {source}) landed "
            f"WHERE {self._is_wanted()} ORDER BY {_PLACE}"
        )
        self.rows += inserted.fetchone()[0]

    def _operation_in(self, names: Iterable[str]) -> str | None:
        """The operation column as ``names`` have it."""
        column = self._spec.delete.column if self._spec.delete else None
        return next((name for name in names if column and name.lower() == column.lower()), None)

    def _is_delete(self, column: Any, places: Any, place: str) -> str:
        """Whether the row at a ``place`` has a value in ``column`` that deletes, in SQL; without ``places`` they count from 0.

        Arrow writes the texts, as docs/SEMANTICS.md says: DuckDB has other ones for floats, decimals and times, and does not
        know a column's unit and zone.
        """
        rule = self._spec.delete
        if rule is None or pa.types.is_nested(column.type):  # nested ones have no text, and `append` refused them
            return "false"
        texts = pc.cast(decoded(column), options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))
        found = pc.indices_nonzero(pc.is_in(texts, pa.array(rule.values, pa.string()))).to_numpy()
        self._db.register(
            "deletes", pa.table({"place": pa.array(found if places is None else places[found], pa.int64())})
        )
        return f"{place} IN (SELECT place FROM deletes)"

    def _names_now(self, entry: LedgerEntry) -> dict[str, str]:
        """By their names in a batch, what columns are called that were renamed since, in small letters; dropped ones nothing."""
        renamed = self._spec.renamed_since(len(self._table.spec(entry.spec_version).renames))
        return {then.lower(): (name or "").lower() for then, name in renamed.items()}

    def _given(self, entry: LedgerEntry, file: str, name: str, written: dict[str, str], text: bool) -> str | None:
        """The value of a column that no row brings, in SQL; None where it is none of these."""
        spec = self._spec
        made = next((one for one in spec.partition_from if one.column == name), None)
        if made is not None:
            type_ = written[made.source or ""]
            moment = f"TRY_CAST({_landed(made.source or '', written, text)} AS {type_})"
            if type_ in ("TIMESTAMP_NS", "TIMESTAMPTZ_NS"):  # DuckDB cuts them towards 1970
                nanos = f"epoch_ns(CAST({moment} AS TIMESTAMP_NS))"
                moment = f"make_timestamp(({nanos} - ({nanos} % 1000000000 + 1000000000) % 1000000000) // 1000)"
            return _MADE[made.function or ""].format(moment)
        if name not in spec.order_by or entry.kind != "batch":
            return None
        if spec.stamped:
            return _text((datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=entry.received_at)).isoformat())
        found = re.search(spec.order_in_name, file.rpartition("/")[2]) if spec.order_in_name else None
        return _text(found[1]) if found else None

    def _types(self, spec: TableSpec) -> dict[str, str]:
        """DuckDB's type of each column."""
        types = {}
        for column in _compared_schema(spec):
            type_ = self._type(column)
            if type_ is None or "INTERVAL" in type_:  # a duration within a list or a struct
                raise ConfigurationError(
                    "unfit-for-duckdb",
                    f"Column {column.name!r} is {column.type}, which DuckDB has no type for, so nothing was recomputed.",
                    next="run `lakeupsert reconcile` without --deep",
                )
            types[column.name] = type_
        return types

    def _type(self, column: Any) -> str | None:
        try:
            self._db.register("empty", pa.schema([column]).empty_table())
            return str(self._db.execute("DESCRIBE SELECT * FROM empty").fetchall()[0][1])
        except import_duckdb().Error:
            return None

    def compared(self) -> dict[Any, Comparison]:
        """By the values of the partition columns."""
        spec = self._spec
        key = ", ".join(map(_name, self._key))
        columns = spec.schema.names
        found = self._db.execute(
            _COMPARED.format(
                partition=", ".join(map(_name, spec.partition_by)),
                nth=_NTH,
                winners=_winners(spec, key),
                key=key,
                expected=", ".join(f"e.{_name(n)}" for n in columns),
                published=", ".join(f"p.{_name(n)}" for n in columns),
            )
        ).fetchall()
        n = len(spec.partition_by)
        return {row[:n]: Comparison(*row[n:]) for row in found}


# ---------------------------------------------------------------- text files, by Python's own readers


def _lines_of(path: str, compression: str | None, encoding: str, newline: str) -> Iterator[str]:
    """The lines of a text file. What is not in its encoding was refused; until such a row is left out it must not stop us."""
    by_python: dict[str | None, Any] = {None: open, "gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    opened = by_python[compression](path, "rb") if compression in by_python else pa.input_stream(path, compression)
    errors = "surrogateescape" if is_utf8(encoding) else UNDECODABLE  # as append has them, which takes UTF-8 as it is
    with opened, io.TextIOWrapper(opened, encoding, errors, newline) as text:
        yield from text


class _Lines:
    """The lines of a text file without its byte order mark; ``place`` is the byte at which the next one begins."""

    def __init__(self, lines: Iterator[str]) -> None:
        first = next(lines, "")
        self.place = 3 if first.startswith("\ufeff") else 0
        self._lines = self._read(chain([first.removeprefix("\ufeff")], lines))

    def _read(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            self.place += len(line.encode(errors="surrogateescape"))
            yield line

    def __iter__(self) -> Iterator[str]:
        return self._lines


def _csv_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The records that do not begin at a refused byte."""
    quoting: dict[str, Any] = {"quotechar": reading.quote} if reading.quote else {"quoting": csv.QUOTE_NONE}
    return _named(_csv_records(lines, csv.reader(lines, delimiter=reading.delimiter, **quoting)), refused, reading)


def _csv_records(lines: _Lines, records: Any) -> Iterator[tuple[int, list[str]]]:
    while True:
        begin = lines.place
        before = csv.field_size_limit(1 << 30)  # of the whole process, where others want their own
        try:
            fields = next(records, None)
        finally:
            csv.field_size_limit(before)
        if fields is None:
            return
        if fields:
            yield begin, fields


def _delimited_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The same of text without quotes."""

    def records() -> Iterator[tuple[int, list[str]]]:
        begin = lines.place
        for line in lines:
            if line.rstrip("\r\n"):
                yield begin, re.split(reading.delimiter, line.rstrip("\r\n"))
            begin = lines.place

    return _named(records(), refused, reading)


def _named(
    records: Iterator[tuple[int, list[str]]], refused: frozenset[int], reading: Reading
) -> Iterator[dict[str, str | None]]:
    """Fields by name; text that is empty, or what `null` says, is null."""
    null = {"": None, reading.null: None}
    names: Sequence[str] = ()
    for begin, fields in records:
        if not names:
            names = fields if reading.has_header else reading.columns or [f"_c{i}" for i in range(len(fields))]
            if reading.has_header:
                continue
        if begin not in refused:
            yield {name: null.get(value, value) for name, value in zip(names, fields, strict=True)}


def _json_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The objects of lines that do not begin at a refused byte, out of their envelopes; numbers keep their digits."""
    begin = lines.place
    for line in lines:
        if line.strip() and begin not in refused:
            row = json.loads(line, parse_float=_MARKED.format, parse_int=_MARKED.format)
            if reading.envelope:
                row = UNWRAP[reading.envelope](row)
            if row is not None:
                yield {name: _json_text(value) for name, value in row.items()}
        begin = lines.place


_ROWS = {"csv": _csv_rows, "delimited": _delimited_rows, "jsonl": _json_rows}


def _json_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub('"?\ue000([^\ue000]*)\ue000"?', r"\1", text)


# ---------------------------------------------------------------- DuckDB itself


def import_duckdb() -> Any:
    """The module; ConfigurationError where it is not installed."""
    try:
        import duckdb
    except ModuleNotFoundError as e:
        raise ConfigurationError(
            "extra-missing",
            "`reconcile --deep` recomputes rows with DuckDB, which is not installed. Nothing was done.",
            next="pip install 'lakeupsert[reconcile]'",
        ) from e
    return duckdb


@contextmanager
def _on_disk(store: ObjectStore, name: str) -> Iterator[str]:
    """The path of an object for those that open files themselves: its own, or while the block runs that of a copy."""
    if not is_remote(store.uri(name)):
        yield plain_path(store.uri(name))
        return
    with tempfile.NamedTemporaryFile(prefix="lakeupsert-") as copy, store.open(name) as source:
        shutil.copyfileobj(source, copy, COPIED_BYTES)
        copy.flush()
        yield copy.name


@contextmanager
def _connected() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="lakeupsert-") as scratch:
        settings = {"temp_directory": scratch, "autoinstall_known_extensions": "false"}
        with import_duckdb().connect(config=settings) as db:
            db.execute("SET TimeZone = 'UTC'")
            yield db


def _landed(name: str, written: dict[str, str], text: bool) -> str:
    """A column's value as it landed, in SQL."""
    return _from_text(f"CAST({_name(name)} AS VARCHAR)", written[name]) if text else _name(name)


def _from_text(value: str, type_: str) -> str:
    """What makes a value of ``type_`` of a text, where CAST alone would do something else."""
    if type_ == "TIMESTAMP":  # CAST drops a zone without a word
        return f"TRY_CAST({value} AS TIMESTAMPTZ)"
    if type_ == "BLOB":  # CAST looks for \x41
        return f"encode({value})"
    if type_.startswith(("STRUCT", "MAP")) or type_.endswith("]"):
        return f"TRY_CAST({value} AS JSON)"
    return value


def _winners(spec: TableSpec, key: str) -> str:
    """What the rows that landed come to, a row for each ``key``, in SQL."""
    if spec.mode == "rows":
        unique = ", ".join(map(_name, spec.key)) if spec.key_scope == "table" else key
        return (
            f"SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY {unique} ORDER BY {_rank(spec)}) AS {_NTH} FROM landed) "
            f"WHERE {_NTH} = 1 AND NOT {_DELETED}"
        )
    columns, ranks = [f"1 AS {_NTH}"], []
    for number, (ordering, ids) in enumerate(spec.columns_of):
        nth = f"{_NTH}_{number}"
        by_rank = ", ".join([*_order(ordering), "rowid DESC"])
        ranks.append(f"row_number() OVER (PARTITION BY {key} ORDER BY {by_rank}) AS {nth}")
        orders = [o.column for o in ordering]
        ordered = " OR ".join(f"{_name(name)} IS NOT NULL" for name in orders) if spec.groups else "true"
        for name in ids:
            brings = "true" if name in orders else f"list_contains({_HAS}, {_text(name.lower())})"
            if spec.nulls == "keep" and name not in orders:
                brings += f" AND {_name(name)} IS NOT NULL"
            # In a struct, as arg_min passes over nulls.
            value = f"struct_pack(v := CASE WHEN NOT {_DELETED} THEN {_name(name)} END)"
            brought = f"arg_min({value}, {nth}) FILTER ({_DELETED} OR (({ordered}) AND {brings}))"
            columns.append(f"({brought}).v AS {_name(name)}")
    return (
        f"SELECT {key}, {', '.join(columns)} FROM (SELECT *, {', '.join(ranks)} FROM landed) "
        f"GROUP BY {key} HAVING NOT arg_min({_DELETED}, {_NTH}_0)"
    )


def _rank(spec: TableSpec) -> str:
    """What ORDER BY takes for the rows that landed of a key, greatest first."""
    ties = [_DELETED, *spec.content] if spec.ties == "content" else []
    return ", ".join([*_order(spec.ordering), *(f"{_name(column)} DESC NULLS LAST" for column in ties), "rowid DESC"])


def _order(ordering: Sequence[Ordering]) -> Iterator[str]:
    for o in ordering:
        yield f"{_name(o.column)} {'ASC' if o.ascending else 'DESC'} NULLS {'FIRST' if o.nulls_first else 'LAST'}"


def _compared_schema(spec: TableSpec) -> Any:
    """Readers' columns, durations as numbers of their unit: all that DuckDB finds in Parquet, and its INTERVAL ends at
    microseconds."""
    columns = reader_schema(spec)
    return pa.schema([f.with_type(pa.int64()) if pa.types.is_duration(f.type) else f for f in columns])


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _text(value: object) -> str:
    """A literal of DuckDB's SQL."""
    return "'" + str(value).replace("'", "''") + "'"
