"""What landed, and what was adopted, as rows in DuckDB for `reconcile --deep`.

Reads     quarantine files (for which rows were refused), landing files, adopted files
Writes    rows into DuckDB; one landing file of a remote store at a time to a temporary file
"""

import base64
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading, is_remote
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import LandingInput, content_hash, format_of
from lakeupsert.landing.formats import avrofile, orcfile
from lakeupsert.landing.formats.unpacked import compression_of
from lakeupsert.operations.recompute_sql import (
    BATCH,
    DELETED,
    HAS,
    MADE,
    PLACE,
    VOID,
    compared_schema,
    identifier,
    import_duckdb,
    key_of,
    landed_value,
    literal,
    rank,
)
from lakeupsert.operations.recompute_text import ROWS, Lines, lines_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.view import plain_path
from lakeupsert.rows.convert import decoded
from lakeupsert.rows.datafiles import from_bytes, read_file
from lakeupsert.rows.floor import Forgetting
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import FullExtract, LandingFile, LedgerEntry
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import TableSpec

BLOCK_ROWS = 50_000
"""Rows of a text file that go to DuckDB at once."""
COPIED_BYTES = 16 << 20


class Inputs:
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
        self._key = key_of(spec)
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
        columns = [f"{identifier(name)} {type_}" for name, type_ in self._types(self._spec).items()]
        self._db.execute(f"CREATE TABLE published ({', '.join(columns)})")
        ours = [f"{DELETED} BOOLEAN", f"{BATCH} BIGINT", f"{HAS} VARCHAR[]"]
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
            same = " AND ".join(f"below.{identifier(c)} = landed.{identifier(c)}" for c in self._key)
            self._db.execute(f"DELETE FROM landed USING below WHERE {BATCH} = {self._number} AND {same}")
        for partition in partitions:
            self._received[partition].append((number, entry.received_at, entry.retention))
        if entry.full:
            self._take_away(entry.full, partitions)

    def _take_away(self, full: FullExtract, partitions: Sequence[str]) -> None:
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

    def _forgotten(self, partition: str) -> list[dict[str, Any]]:
        """The partition's values and the number of each batch whose deletes it had forgotten when the last one came."""
        came = self._received[partition]
        forgets = Forgetting(tuple((at, kept) for _, at, kept in came))
        values = {c: v.as_py() for c, v in partition_scalars(self._spec, partition).items()}
        return [{**values, BATCH: came[age - 1][0]} for age in forgets.forgotten_ages(len(came))]

    def _is_wanted(self) -> str:
        return self._is_in("wanted")

    def _is_in(self, table: str, *more: str) -> str:
        """Whether a row of `landed` has the partition columns, and more integers, of one in ``table``."""
        types = {**self._types(self._spec), **dict.fromkeys(more, "BIGINT")}
        names = [*self._spec.partition_by, *more]
        columns = ", ".join(f"landed.{identifier(c)}" for c in names)
        values = ", ".join(f"CAST({identifier(c)} AS {types[c]})" for c in names)
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
        lines = lines_of(path, compression_of(landed.path), reading.encoding, newline="\n" if kind == "jsonl" else "")
        rows = ROWS[kind or ""](Lines(lines), frozenset(refused), reading)
        while block := [{reading.called(n): v for n, v in row.items()} for row in islice(rows, BLOCK_ROWS)]:
            names = list(dict.fromkeys(name for row in block for name in row))
            came = {n: pa.array([r.get(n) for r in block], pa.string()) for n in names}
            now = self._names_now(entry)
            has = pa.array([[now.get(name.lower(), name.lower()) for name in row] for row in block])
            self._db.register("came", pa.table({**came, PLACE: pa.array(range(len(block))), HAS: has}))
            self._insert(entry, "came", landed.path, names, None, text=True, place=PLACE)

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
                rows = pa.table({**came, PLACE: pa.array(block.places, pa.int64())})
                self._db.register("came", rows.filter(pa.array(~np.isin(block.places, refused))))
                column = self._operation_in(came)
                operations = self._is_delete(came[column], block.places, PLACE) if column else None
                self._insert(
                    entry, "came", landed.path, list(came), None, text=False, place=PLACE, operations=operations
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
        source = f"read_parquet({literal(path)}, file_row_number = true, hive_partitioning = false)"
        own_names = names = [row[0] for row in self._db.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
        if reading is not None and reading.aliases:
            called = {name: reading.called(name) for name in names}
            columns = ", ".join(f"{identifier(name)} AS {identifier(new)}" for name, new in called.items())
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
                value = literal(partition_scalars(self._spec, adopted)[name].as_py())
            elif (given := self._given(entry, file, name, written, text) if adopted is None else None) is not None:
                value = given
            elif name.lower() not in present or name not in written:
                value = "NULL"
            else:
                value = landed_value(name, written, text)
            first = written.get(
                name, type_
            )  # a value that was narrower when it came, such as a FLOAT, is what it was then
            columns.append(f"TRY_CAST(TRY_CAST({value} AS {first}) AS {type_}) AS {identifier(shown_name)}")
        delete = self._spec.delete
        deleted = "false"
        if delete is not None and adopted is None:
            if delete.file_prefix and file.rpartition("/")[2].startswith(delete.file_prefix):
                deleted = "true"
            elif delete.column is not None and delete.values and delete.column.lower() in present:
                values = ", ".join(map(literal, delete.values))
                deleted = operations or f"coalesce({identifier(delete.column)} IN ({values}), false)"
        now = self._names_now(entry)
        has = (
            HAS
            if text
            else f"CAST([{', '.join(literal(now.get(name, name)) for name in sorted(present))}] AS VARCHAR[])"
        )
        inserted = self._db.execute(
            f"INSERT INTO landed SELECT * EXCLUDE ({PLACE}) FROM "
            f"(SELECT {', '.join(columns)}, {deleted} AS {DELETED}, {self._number} AS {BATCH}, {has} AS {HAS}, "
            f"{place} AS {PLACE} FROM {source}) landed "
            f"WHERE {self._is_wanted()} ORDER BY {PLACE}"
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
            moment = f"TRY_CAST({landed_value(made.source or '', written, text)} AS {type_})"
            if type_ in ("TIMESTAMP_NS", "TIMESTAMPTZ_NS"):  # DuckDB cuts them towards 1970
                nanos = f"epoch_ns(CAST({moment} AS TIMESTAMP_NS))"
                moment = f"make_timestamp(({nanos} - ({nanos} % 1000000000 + 1000000000) % 1000000000) // 1000)"
            return MADE[made.function or ""].format(moment)
        if name not in spec.order_by or entry.kind != "batch":
            return None
        if spec.stamped:
            return literal((datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=entry.received_at)).isoformat())
        found = re.search(spec.order_in_name, file.rpartition("/")[2]) if spec.order_in_name else None
        return literal(found[1]) if found else None

    def _types(self, spec: TableSpec) -> dict[str, str]:
        """DuckDB's type of each column."""
        types = {}
        for column in compared_schema(spec):
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
