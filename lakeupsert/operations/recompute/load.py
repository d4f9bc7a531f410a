"""Load landing files, adopted files and the rows of statements into DuckDB, for `reconcile --deep`.

Reads     landing files, adopted files, packs of statements, quarantine files (which say which rows were refused)
Writes    rows into DuckDB; a temporary copy of one file of a remote store at a time
Repeat    safe
"""

import base64
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading, is_remote
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.landing.content import content_hash
from lakeupsert.landing.files import Reader
from lakeupsert.landing.formats import parquetfile
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.folders import folder_values, missing_values
from lakeupsert.landing.formats.registry import format_of, readable_format
from lakeupsert.landing.formats.unavailable import UNAVAILABLE
from lakeupsert.operations.recompute.columns import LandedColumns, Source
from lakeupsert.operations.recompute.sql import (
    BATCH,
    DELETED,
    HAS,
    ORPHANED,
    PLACE,
    VOID,
    compared_schema,
    import_duckdb,
    key_columns,
    names_partition,
    rank,
)
from lakeupsert.operations.recompute.text import read_text
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.duckdb import identifier, literal
from lakeupsert.read.view import plain_path
from lakeupsert.rows.arrays import Column, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import from_bytes, read_file
from lakeupsert.rows.floor import Forgetting
from lakeupsert.rows.leaves import decode
from lakeupsert.storage import NotFoundError, ObjectReader
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import FullExtract, LandingFile, LedgerEntry, Statement
from lakeupsert.table.manifest import DataFile, TombstoneFile
from lakeupsert.table.spec import TableSpec

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

BLOCK_ROWS = 50_000
"""Rows of a text file that are inserted at once."""
COPIED_BYTES = 16 << 20


class LandedRows:
    """DuckDB's tables: `landed`, the rows of batches, and `published`, those that readers see."""

    def __init__(
        self, table: OpenTable, spec: TableSpec, db: "DuckDBPyConnection", below_floor: Mapping[str, Rows]
    ) -> None:
        """``below_floor``: keys that merges refused, by batch id."""
        self.files = 0
        self.rows = 0
        self._below_floor = below_floor
        self._number = 0
        self._received: dict[str, list[tuple[int, LedgerEntry]]] = defaultdict(list)
        self._table = table
        self._spec = spec
        self._key = key_columns(spec)
        self._db = db
        self._columns = LandedColumns(table, spec, db)

    def first_gone(self, entry: LedgerEntry, partitions: Sequence[str]) -> str | None:
        """The first file of the batch that is gone or changed, or None. Replayed rows count as gone: no landing file has them."""
        if entry.replayed:
            return f"the quarantined rows of {entry.replayed[0].name}"
        if entry.statement is not None:
            return next(
                (name for name in entry.statement.objects if self._table.resources.store.head(name) is None), None
            )
        if entry.kind == "create":
            files = [f for p in partitions for f in entry.touched[p].files]
            heads = ((f, self._table.resources.store.head(f.name)) for f in files)
            return next((f.name for f, found in heads if found is None or found.size != f.bytes), None)
        return next((f.path for f in entry.files if f.sha256 and not self._is_there(f)), None)

    def _is_there(self, file: LandingFile) -> bool:
        found = self._table.resources.landing.head(file.path)
        if found is not None and found.is_same(file.size, file.etag):
            return True
        try:
            return found is not None and content_hash(self._table.resources.landing, file.path) == file.sha256
        except NotFoundError:
            return False

    def create_tables(self) -> None:
        """Create `landed` and `published`, both empty."""
        columns = [f"{identifier(name)} {type_}" for name, type_ in self._columns.types.items()]
        self._db.execute(f"CREATE TABLE published ({', '.join(columns)}, {BATCH} BIGINT)")
        ours = [f"{DELETED} BOOLEAN", f"{BATCH} BIGINT", f"{HAS} VARCHAR[]"]
        self._db.execute(f"CREATE TABLE landed ({', '.join([*columns, *ours])})")

    def load(self, number: int, entry: LedgerEntry, partitions: Sequence[str]) -> None:
        """Append the accepted rows of a batch, in these partitions; if it is a full extract, delete the keys that it lacks."""
        if not partitions:
            return
        self._number = number
        if self._spec.partition_by:
            wanted = [{c: v.as_py() for c, v in partition_scalars(self._spec, p).items()} for p in partitions]
            self._db.register("wanted", pa.Table.from_pylist(wanted))
        if entry.kind == "create":
            for partition in partitions:
                for file in entry.touched[partition].files:
                    self.files += 1
                    with _on_disk(self._table.resources.store, file.name) as path:
                        relation = _read_parquet(path)
                        columns = self._columns_of(relation)
                        self._insert(
                            Source(entry, file.name, relation, columns, "file_row_number", partition=partition)
                        )
                for dead in entry.touched[partition].tombstones:
                    self._load_tombstones(entry, dead, partition)
            return
        if entry.statement is not None:
            for partition in partitions:
                self._load_statement(entry, entry.statement, partition)
        refused, unreadable = self._quarantined(entry)
        for landed in entry.files:
            if landed.path in unreadable:
                continue
            self.files += 1
            with _on_disk(self._table.resources.landing, landed.path) as path:
                self._load_landed(entry, landed, path, refused.get(landed.path, []))
        if entry.batch_id in self._below_floor:
            self._db.register("below", self._below_floor[entry.batch_id])
            same = " AND ".join(f"below.{identifier(c)} = landed.{identifier(c)}" for c in self._key)
            self._db.execute(f"DELETE FROM landed USING below WHERE {BATCH} = {self._number} AND {same}")
        for partition in partitions:
            self._received[partition].append((number, entry))
        if entry.full:
            self._delete_lacking(entry.full, partitions)
        if self._spec.naming_id is not None and self._spec.has_deletes:
            self._db.execute(
                ORPHANED.format(
                    key=", ".join(map(identifier, self._spec.key)),
                    order=rank(self._spec),
                    names=names_partition(self._spec),
                    deleted=DELETED,
                    batch=BATCH,
                    number=number,
                )
            )

    def _load_tombstones(self, entry: LedgerEntry, file: TombstoneFile, partition: str) -> None:
        """Load keys that were deleted before the table was rebuilt."""
        rows = read_file(self._table.resources.store, file, self._spec.tombstone_schema)
        given = {n: pa.repeat(v, rows.num_rows) for n, v in partition_scalars(self._spec, partition).items()}
        columns = {name: rows[name] for name in rows.schema.names if name not in given} | given
        dead = pa.repeat(pa.scalar(True), rows.num_rows)
        self._db.register("block", pa.table({**columns, DELETED: dead, PLACE: pa.array(range(rows.num_rows))}))
        self._insert(Source(entry, "", "block", [*columns, DELETED], PLACE))

    def _load_statement(self, entry: LedgerEntry, statement: Statement, partition: str) -> None:
        """Load the rows of an update or delete. They have no second reader: no other program wrote them."""
        spec = self._table.history.spec(entry.spec_version)
        for file in entry.touched[partition].files:
            if file.name not in statement.objects:  # deletes for keys that moved follow from the rows that landed
                continue
            self.files += 1
            whole = msgspec.structs.replace(file, deleted=None)
            rows = read_file(self._table.resources.store, whole, spec.ranked_schema, spec)
            partition_values = partition_scalars(spec, partition)
            stored = {
                f.name: rows[f.name].cast(f.type) for f in compared_schema(spec) if f.name not in partition_values
            }
            given = {name: pa.repeat(value, rows.num_rows) for name, value in partition_values.items()}
            self._db.register("block", pa.table({**stored, **given, **{n: rows[n] for n in (DELETED, PLACE)}}))
            brought = None if spec.mode == "rows" else [*statement.set]
            self._insert(Source(entry, "", "block", [*stored, *given, DELETED], PLACE, given=brought))

    def _delete_lacking(self, full: FullExtract, partitions: Sequence[str]) -> None:
        """Delete the rows of keys that a full extract lacks, and of those that it has the forgotten deletes; or all earlier rows,
        which it replaces."""
        if full.replaces:
            self._db.execute(f"DELETE FROM landed WHERE {BATCH} < {self._number} AND {self._is_wanted()}")
            return
        self._db.register("extract", from_bytes(base64.b64decode(full.order)))
        beats, equal = [], "true"
        for o in self._spec.ordering:
            one, other = f"landed.{identifier(o.column)}", f"extract.{identifier(o.column)}"
            nulls = f"{one if o.nulls_first else other} IS NULL AND {other if o.nulls_first else one} IS NOT NULL"
            beats.append(f"({equal} AND (coalesce({one} {'<' if o.ascending else '>'} {other}, false) OR ({nulls})))")
            equal += f" AND {one} IS NOT DISTINCT FROM {other}"
        same = " AND ".join(f"n.{identifier(c)} = landed.{identifier(c)}" for c in self._key)
        self._db.execute(
            f"DELETE FROM landed USING extract WHERE {BATCH} < {self._number} AND {self._is_wanted()} "
            f"AND NOT ({' OR '.join(beats)}) "
            f"AND NOT EXISTS (SELECT 1 FROM landed n WHERE n.{BATCH} = {self._number} AND {same})"
        )
        if forgotten := [row for partition in partitions for row in self._forgotten(partition)]:
            self._db.register("forgotten", pa.Table.from_pylist(forgotten))
            key = ", ".join(map(identifier, self._key))
            self._db.execute(
                VOID.format(
                    key=key,
                    order=rank(self._spec),
                    is_forgotten=f"{DELETED} AND {self._is_in('forgotten', BATCH)}",
                    batch=BATCH,
                    number=self._number,
                )
            )

    def _forgotten(self, partition: str) -> list[dict[str, object]]:
        """The batches whose deletes the partition had forgotten when the last batch arrived: its values, and their numbers."""
        batches = self._received[partition]
        forgets = Forgetting(tuple((entry.received_at, entry.retention) for _, entry in batches))
        values = {c: v.as_py() for c, v in partition_scalars(self._spec, partition).items()}
        return [{**values, BATCH: batches[age - 1][0]} for age in forgets.forgotten_ages(len(batches))]

    def _is_wanted(self) -> str:
        return self._is_in("wanted")

    def _or_elsewhere(self) -> str:
        """Records that bring their key alone count in every partition. In mode columns, so may any record of a key that moves."""
        if not self._spec.takes_key_alone:
            return ""
        if self._spec.mode == "columns":
            return " OR true"
        absent = " OR ".join(f"landed.{identifier(c)} IS NULL" for c in self._spec.partition_by)
        return f" OR (({absent}) AND {DELETED})"

    def _is_in(self, table: str, *more: str) -> str:
        """Whether ``table`` has a row with the partition columns, and the integers ``more``, of a row of `landed`, in SQL."""
        types = {**self._columns.types, **dict.fromkeys(more, "BIGINT")}
        names = [*self._spec.partition_by, *more]
        if not names:
            return "true"
        columns = ", ".join(f"landed.{identifier(c)}" for c in names)
        values = ", ".join(f"CAST({identifier(c)} AS {types[c]})" for c in names)
        return f"({columns}) IN (SELECT {values} FROM {table})"

    def _load_landed(self, entry: LedgerEntry, landed: LandingFile, path: str, refused: Sequence[int]) -> None:
        reading = entry.reading_of_files
        kind = format_of(landed.path, reading.format)
        if kind.name == "parquet" and not _has_other_moments(landed, path):
            with suppress(import_duckdb().InvalidInputException):  # text that is not UTF-8
                self._insert(self._parquet(entry, path, landed.path, refused, reading))
                return
        load = self._load_blocks if kind.typed else self._load_text
        load(entry, landed, path, refused, reading)

    def _load_text(
        self, entry: LedgerEntry, landed: LandingFile, path: str, refused: Sequence[int], reading: Reading
    ) -> None:
        new_names = self._columns.new_names(entry)
        types = {field.name.lower(): field.type for field in self._table.history.spec(entry.spec_version).schema}
        rows = read_text(path, landed.path, frozenset(refused), reading, types)
        given = folder_values(landed.path, reading)
        named = ({reading.table_name_of(n): v for n, v in row.items()} for row in rows)
        while block := [{**row, **missing_values(row, given)} for row in islice(named, BLOCK_ROWS)]:
            names = list(dict.fromkeys(name for row in block for name in row))
            columns = {n: pa.array([r.get(n) for r in block], pa.string()) for n in names}
            brought = [[name.lower() for name, value in row.items() if value not in UNAVAILABLE] for row in block]
            has = pa.array([[new_names.get(name, name) for name in row] for row in brought])
            self._db.register("block", pa.table({**columns, PLACE: pa.array(range(len(block))), HAS: has}))
            self._insert(Source(entry, landed.path, "block", names, PLACE, is_text=True))

    def _load_blocks(
        self, entry: LedgerEntry, landed: LandingFile, path: str, refused: Sequence[int], reading: Reading
    ) -> None:
        """Load a file as `append` reads it."""
        file = LandingInput(landed.path, landed.size, landed.etag, place=0)
        own = msgspec.structs.replace(reading, aliases={}, dates={}, only={}, folders=())
        with pa.OSFile(path) as source:
            reader = Reader.of(source, file, readable_format(file, reading), own)
            called = {reading.table_name_of(f.name): f for f in reader.columns(None, frozenset()).schema}
            types = {name: self._type_in(entry, name, f.type) for name, f in called.items()}
            reader.source.seek(0)
            for block in reader.blocks(frozenset()).blocks:
                columns = {name: block.convert(f.name, types[name])[0] for name, f in called.items()}
                for name, text in missing_values(columns, folder_values(landed.path, reading)).items():
                    columns[name] = pa.repeat(pa.scalar(text, pa.string()), len(block.places))
                rows = pa.table({**columns, PLACE: pa.array(block.places, pa.int64())})
                self._db.register(
                    "block", rows.filter(pa.array(~np.isin(block.places, refused) & _is_own(columns, reading)))
                )
                operation = self._columns.operation_in(columns)
                is_delete = (
                    self._columns.has_delete_value(columns[operation], block.places, PLACE) if operation else None
                )
                self._insert(Source(entry, landed.path, "block", list(columns), PLACE, is_delete=is_delete))

    def _type_in(self, entry: LedgerEntry, name: str, type_: pa.DataType) -> pa.DataType:
        """The type to read a column in: the file's, except text for a binary column, which may be no UTF-8, and Spark's
        timestamp_ntz in an old table that keeps it as whole numbers."""
        stored = {f.name.lower(): f.type for f in self._table.history.spec(entry.spec_version).schema}.get(name.lower())
        if stored is None:
            return type_
        is_count = pa.types.is_integer(stored) and pa.types.is_timestamp(type_)
        return stored if is_count or (pa.types.is_binary(stored) and pa.types.is_string(type_)) else type_

    def _quarantined(self, entry: LedgerEntry) -> tuple[dict[str, list[int]], set[str]]:
        """The places of refused rows, by landing file, and the files that were refused as a whole."""
        places: dict[str, list[int]] = {}
        unreadable = set()
        for file in entry.quarantine:
            rows = read_file(
                self._table.resources.store, DataFile(name=file.name, rows=file.rows, bytes=0), QUARANTINE_SCHEMA
            )
            for code, path, place in zip(
                *(rows[c].to_pylist() for c in ("reason_code", "file", "position")), strict=True
            ):
                if code == "unreadable_file":
                    unreadable.add(path)
                elif place is not None:  # else it was stored
                    places.setdefault(path, []).append(place)
        return places, unreadable

    def _parquet(self, entry: LedgerEntry, path: str, file: str, refused: Sequence[int], reading: Reading) -> Source:
        relation = _read_parquet(path)
        own_names = names = self._columns_of(relation)
        if reading.aliases:
            called = {name: reading.table_name_of(name) for name in names}
            columns = ", ".join(f"{identifier(name)} AS {identifier(new)}" for name, new in called.items())
            relation, names = f"(SELECT {columns} FROM {relation})", list(called.values())
        if given := missing_values(names, folder_values(file, reading)):
            more = ", ".join(
                f"CAST({'NULL' if text is None else literal(text)} AS VARCHAR) AS {identifier(name)}"
                for name, text in given.items()
            )
            relation, names = f"(SELECT *, {more} FROM {relation})", [*names, *given]
        if reading.only:
            with pq.ParquetFile(path) as opened:
                called = {name: reading.table_name_of(name) for name in opened.schema_arrow.names}
                named = {n: opened.read([own]).column(0) for own, n in called.items() if n.lower() in reading.own_texts}
            refused = [*refused, *np.flatnonzero(~_is_own(named, reading)).tolist()]
        if refused:
            self._db.register("refused", pa.table({"place": pa.array(refused, pa.int64())}))
            relation = f"(SELECT * FROM {relation} WHERE file_row_number NOT IN (SELECT place FROM refused))"
        is_delete = None
        own = {reading.table_name_of(name): name for name in reversed(own_names)}
        if column := self._columns.operation_in(own):
            with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as opened:  # as `append` reads it
                operations = opened.read([own[column]]).column(0)
                is_delete = self._columns.has_delete_value(operations, None, "file_row_number")
        return Source(entry, file, relation, names, "file_row_number", is_delete=is_delete)

    def _columns_of(self, relation: str) -> list[str]:
        return [row[0] for row in self._db.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()]

    def _insert(self, source: Source) -> None:
        inserted = self._db.execute(
            f"INSERT INTO landed SELECT * EXCLUDE ({PLACE}) FROM "
            f"({self._columns.select(source, self._number)}) landed "
            f"WHERE {self._is_wanted()}{self._or_elsewhere()} ORDER BY {PLACE}"
        )
        self.rows += inserted.fetchone()[0]


def _is_own(columns: Mapping[str, Column], reading: Reading) -> Mask:
    """Which rows are the table's by `only`. Nested values have no text."""
    own: Mask = np.ones(len(next(iter(columns.values()))) if columns else 0, bool)
    for name, column in columns.items():
        if (texts := reading.own_texts.get(name.lower())) is not None:
            if pa.types.is_nested(column.type):
                return np.zeros(len(own), bool)
            own &= as_mask(pc.is_in(pc.cast(decode(column), pa.string()), pa.array(texts, pa.string())))
    return own


def _has_other_moments(landed: LandingFile, path: str) -> bool:
    with pa.OSFile(path) as source:
        file = LandingInput(landed.path, landed.size, landed.etag, place=0)
        return parquetfile.has_other_moments(source, file)


def _read_parquet(path: str) -> str:
    return f"read_parquet({literal(path)}, file_row_number = true, hive_partitioning = false)"


@contextmanager
def _on_disk(store: ObjectReader, name: str) -> Iterator[str]:
    """The path of an object: its own, or (of a remote store) that of a copy, which is deleted after the block."""
    if not is_remote(store.uri(name)):
        yield plain_path(store.uri(name))
        return
    with tempfile.NamedTemporaryFile(prefix="lakeupsert-") as copy, store.open(name) as source:
        shutil.copyfileobj(source, copy, COPIED_BYTES)
        copy.flush()
        yield copy.name
