"""Rows of a view to one file, or to a Hive folder, as other programs want them: the table's columns and none of ours."""

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.history import history_to_arrow
from lakeupsert.read.view import View
from lakeupsert.rows.convert import convert, plain
from lakeupsert.rows.datafiles import ROW_GROUP_BYTES

_SCHEMA = "_common_metadata"
"""A Hive folder's file without rows, which keeps the schema; Spark looks for it there. It also says: an export made this."""

_JSON_ROWS = 10_000
"""Rows that are Python objects at once; those take many times what Arrow does."""


def export(view: View, output: str, *, where: str | None, overwrite: bool, history: bool = False) -> int:
    """Write the view's rows, or all their versions, ordered by partition and key; returns how many.

    A path ending in `/` becomes a Hive folder of Parquet files, others one file by their ending. It appears whole: what is
    there is replaced only when the new one is finished. Zero rows keep the schema. Text formats: timestamps with a zone
    name it, binary is base64 in JSON lines and refused in CSV, and JSON lines has decimals, NaN and infinity as text.
    """
    folder, target = output.endswith("/"), Path(output).expanduser().resolve()
    writers = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}
    if not folder and target.suffix not in writers:
        raise ConfigurationError(
            "unknown-format",
            f"--output {output!r} ends in {target.suffix or 'nothing'!r}.",
            next=f"end it in {', '.join(writers)}, or in / for a Hive folder",
        )
    if "://" in output or not target.parent.is_dir():
        raise ConfigurationError(
            "no-folder", f"{target.parent} is no folder on this machine.", next="create it, or correct --output"
        )
    if target.exists():
        _check_replaceable(target, folder, overwrite)
    read = history_to_arrow if history else to_arrow
    with _finished(target) as unfinished:
        if folder:
            return _hive(partial(read, view, where), view, unfinished, where)
        return writers[target.suffix](read(view, where), unfinished)


def _check_replaceable(target: Path, folder: bool, overwrite: bool) -> None:
    if not overwrite:
        raise ConfigurationError(
            "output-exists", f"{target} exists. Nothing was written.", next="add --overwrite, or name another --output"
        )
    is_export = target.is_file()
    if target.is_dir():
        names = {path.name for path in target.iterdir()}
        is_export = not names or (_SCHEMA in names and all(name == _SCHEMA or "=" in name for name in names))
    if folder != target.is_dir() or not is_export:
        raise ConfigurationError(
            "output-exists",
            f"{target} is {'a folder with other things than an export' if target.is_dir() else 'no folder'}, and "
            "--overwrite would delete it. Nothing was written.",
            next="name another --output; one that ends in / is a folder, any other a file",
        )


def _parquet(reader: Any, path: Path) -> int:
    return _write_parquet(reader, reader.schema, path)


def _write_parquet(batches: Iterable[Any], schema: Any, path: Path) -> int:
    rows, held, held_bytes = 0, [], 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            held.append(batch)
            held_bytes += batch.nbytes
            rows += batch.num_rows
            if held_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held, held_bytes = [], 0
        if held:
            writer.write_table(pa.Table.from_batches(held))
    return rows


def _csv(reader: Any, path: Path) -> int:
    t = pa.types
    no_text = (t.is_nested, t.is_binary, t.is_large_binary, t.is_fixed_size_binary)
    for field in reader.schema:
        if isinstance(field.type, pa.BaseExtensionType) or any(is_one(field.type) for is_one in no_text):
            raise _unfit_for_csv(f"Column {field.name!r} is {field.type}: CSV has no such thing.")
    moments = [field.name for field in reader.schema if t.is_date(field.type) or t.is_timestamp(field.type)]
    rows = 0
    with pyarrow.csv.CSVWriter(path, reader.schema) as writer:
        for batch in reader:
            for name in moments:
                _, beyond = convert(batch.column(name), pa.string())
                if beyond.any():
                    raise _unfit_for_csv(f"Column {name!r} has a value outside the years 1 to 9999, which has no text.")
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _unfit_for_csv(what: str) -> ConfigurationError:
    return ConfigurationError("unfit-for-csv", f"{what} Nothing was written.", next="export to .jsonl or .parquet")


def _jsonl(reader: Any, path: Path) -> int:
    encode, rows = msgspec.json.Encoder().encode_lines, 0
    with path.open("wb") as file:
        for batch in reader:
            for start in range(0, batch.num_rows, _JSON_ROWS):
                part = batch.slice(start, _JSON_ROWS)
                names, columns = part.schema.names, [plain(column) for column in part.columns]
                file.write(encode([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]))
            rows += batch.num_rows
    return rows


def _hive(read: Callable[..., Any], view: View, path: Path, where: str | None) -> int:
    """A folder for each partition, with the partition column in its name and not in the file."""
    rows = 0
    path.mkdir()
    schema = read().schema
    pq.write_metadata(schema, path / _SCHEMA)
    for partition in view.partitions(where, schema):
        with read(partition) as reader:
            batches = (batch for batch in reader if batch.num_rows)
            first = next(batches, None)
            if first is not None:
                names = [name for name in reader.schema.names if name not in view.spec.partition_by]
                (path / partition).mkdir(parents=True)
                stored = (batch.select(names) for batch in itertools.chain([first], batches))
                schema = pa.schema([reader.schema.field(name) for name in names])
                rows += _write_parquet(stored, schema, path / partition / "part-0.parquet")
    return rows


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A name to write to beside ``target``, which takes its place when the block ends without an error."""
    unfinished = target.with_name(f".{target.name}.{clock.new_id()}.tmp")
    try:
        yield unfinished
        if target.is_dir():
            before = unfinished.with_suffix(".old")  # a crash between the two leaves what was there under this name
            target.rename(before)
            unfinished.rename(target)
            shutil.rmtree(before)
        else:
            unfinished.replace(target)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)
