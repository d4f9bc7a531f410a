"""Write a view's rows to one file or a Hive folder for other programs: the table's columns, and none of ours."""

import itertools
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from lakeupsert import clock
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.hosts import Host, LocalHost
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import no_folder
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.history import history_to_arrow
from lakeupsert.read.view import View
from lakeupsert.rows.convert import READABLE_MOMENTS, unreadable_moments
from lakeupsert.rows.datafiles import ROW_GROUP_BYTES
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import ObjectStore, UnknownOutcomeError, open_store
from lakeupsert.storage.base import Sink
from lakeupsert.table.layout import base_prefix, partition_texts

_SCHEMA = "_common_metadata"
"""File without rows in a Hive folder. It keeps the schema, which Spark looks for there, and marks the folder as an export."""
_PART = "part-0.parquet"
"""The file of a partition's rows."""
_CLAIM = "_lakeupsert_export"
"""Object in a folder of a store while an export writes it. Only one export creates it."""

_JSON_ROWS = 10_000
"""Rows that are Python objects at a time. They take many times the memory of Arrow rows."""


def export(
    view: View, output: str, *, where: str | None, overwrite: bool, history: bool = False, host: Host | None = None
) -> int:
    """Write the view's rows, or with ``history`` all versions, ordered by partition and key. Returns how many.

    A path that ends in `/` becomes a Hive folder of Parquet files; otherwise the suffix of the file selects the format. An
    existing export is replaced only when the new one is complete. Zero rows keep the schema. In text formats, timestamps with a
    zone include it. JSON lines has binary values as base64, and decimals, NaN and infinity as text. CSV refuses binary values.

    An address of a store that ends in `/` becomes a Hive folder too. It is complete once it has `_common_metadata`. ``host``
    writes its partitions; None: this process does. If the host is stopped, unfinished parts stay there, and `_in_use` says so.
    """
    read = history_to_arrow if history else to_arrow
    if "://" in output:
        _check_address(view, output, overwrite=overwrite, elsewhere=host is not None)
        return _hive_at_address(partial(read, view, where), view, output, where, host or LocalHost())
    if host is not None:
        raise ConfigurationError(
            "unfit-for-host",
            f"--host spark would write --output {output!r} on the machine of each executor.",
            next="give the address of a folder in a store that ends in /, or use --host local",
        )
    folder, target = output.endswith("/"), _target(output, overwrite=overwrite, folders=True)
    with _replace_when_complete(target) as path:
        if folder:
            return _hive(partial(read, view, where), view, path, where)
        return _WRITERS[target.suffix](read(view, where), path)


def write_file(rows: pa.RecordBatchReader, output: str, *, overwrite: bool) -> int:
    """Write any rows to one file on this machine, in the format of its suffix, as `export` does. Returns how many."""
    target = _target(output, overwrite=overwrite, folders=False)
    with _replace_when_complete(target) as path:
        return _WRITERS[target.suffix](rows, path)


def _target(output: str, *, overwrite: bool, folders: bool) -> Path:
    """The path to write to. Raises ConfigurationError if it can't be written, or with ``folders`` false ends in `/`."""
    folder, target, suffixes = output.endswith("/"), Path(output).expanduser().resolve(), ", ".join(_WRITERS)
    if (folder and not folders) or (not folder and target.suffix not in _WRITERS):
        found = f"has the extension {target.suffix}" if target.suffix else "has no extension"
        found = "ends in /" if folder else found
        raise ConfigurationError(
            "unknown-format",
            f"--output {output!r} {found}. Nothing was written.",
            next=f"end it in {suffixes}" + (", or in / for a Hive folder" if folders else ""),
        )
    if not target.parent.is_dir():
        raise ConfigurationError(
            "no-folder",
            f"--output: {target.parent} {no_folder(target.parent)} on this machine. Nothing was written.",
            next="correct --output"
            if target.parent.exists()
            else f"mkdir -p {shlex.quote(str(target.parent))}, or correct --output",
        )
    if target.exists():
        _check_replaceable(target, folder=folder, overwrite=overwrite)
    return target


def _check_replaceable(target: Path, *, folder: bool, overwrite: bool) -> None:
    if not overwrite:
        raise ConfigurationError(
            "output-exists", f"{target} exists. Nothing was written.", next="add --overwrite, or use another --output"
        )
    is_export = target.is_file()
    if target.is_dir():
        names = {path.name for path in target.iterdir()}
        is_export = not names or (_SCHEMA in names and all(name in (_SCHEMA, _PART) or "=" in name for name in names))
    if folder != target.is_dir() or not is_export:
        raise ConfigurationError(
            "output-exists",
            f"{target} is {'a folder with more than an export in it' if target.is_dir() else 'not a folder'}, and "
            "--overwrite would delete it. Nothing was written.",
            next="use another --output; a path that ends in / is a folder, any other a file",
        )


def _parquet(reader: pa.RecordBatchReader, path: Path | Sink) -> int:
    rows, held, held_bytes = 0, [], 0
    with pq.ParquetWriter(path, reader.schema, compression="zstd") as writer:
        for batch in reader:
            held.append(batch)
            held_bytes += batch.nbytes
            rows += batch.num_rows
            if held_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held, held_bytes = [], 0
        if held:
            writer.write_table(pa.Table.from_batches(held))
    return rows


def _csv(reader: pa.RecordBatchReader, path: Path) -> int:
    t = pa.types
    unfit = (t.is_nested, t.is_binary, t.is_large_binary, t.is_fixed_size_binary)
    for field in reader.schema:
        if isinstance(field.type, pa.BaseExtensionType) or any(is_unfit(field.type) for is_unfit in unfit):
            raise _unfit_for_csv(f"Column {field.name!r} is {field.type}, which CSV can't represent.")
    rows = 0
    with pyarrow.csv.CSVWriter(path, reader.schema) as writer:
        for batch in reader:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if (unreadable := unreadable_moments(column)).any():
                    row = int(unreadable.argmax())
                    value = to_json_values(column.slice(row, 1))[0]
                    raise _unfit_for_csv(
                        f"Column {name!r} of row {rows + row + 1:,} is {value!r} as {column.type}, "
                        f"which has no text form: {READABLE_MOMENTS}."
                    )
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _unfit_for_csv(what: str) -> ConfigurationError:
    return ConfigurationError("unfit-for-csv", f"{what} Nothing was written.", next="export to .jsonl or .parquet")


def _jsonl(reader: pa.RecordBatchReader, path: Path) -> int:
    encode, rows = msgspec.json.Encoder().encode_lines, 0
    with path.open("wb") as file:
        for batch in reader:
            for start in range(0, batch.num_rows, _JSON_ROWS):
                part = batch.slice(start, _JSON_ROWS)
                names, columns = part.schema.names, [to_json_values(column) for column in part.columns]
                file.write(encode([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]))
            rows += batch.num_rows
    return rows


_WRITERS = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}
"""What writes a file, by its suffix."""


def _hive(read: Callable[..., pa.RecordBatchReader], view: View, path: Path, where: str | None) -> int:
    """Write a folder for each partition. Its name has the partition columns; the file in it does not."""
    path.mkdir()
    schema = read().schema
    pq.write_metadata(schema, path / _SCHEMA)

    def open_file(name: str) -> AbstractContextManager[Path]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        return nullcontext(path / name)

    write = partial(_write_partition, read, open_file)
    return sum(map(write, view.partitions(where, schema)))


def _write_partition(
    read: Callable[..., pa.RecordBatchReader],
    open_file: Callable[[str], AbstractContextManager[Path | Sink]],
    partition: str,
) -> int:
    """Write the rows of a partition, if it has any, to the file that ``open_file`` opens."""
    with read(partition) as reader:
        batches = (batch for batch in reader if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return 0
        own = partition_texts(partition)
        names = [name for name in reader.schema.names if name not in own]
        stored = (batch.select(names) for batch in itertools.chain([first], batches))
        schema = pa.schema([reader.schema.field(name) for name in names])
        with open_file(f"{base_prefix(partition)}{_PART}") as file:
            return _parquet(pa.RecordBatchReader.from_batches(schema, stored), file)


def _write_partition_once(read: Callable[..., pa.RecordBatchReader], target: ObjectStore, partition: str) -> int:
    """As `_write_partition`. What another try of this task wrote is whole and has the same rows, so it stays: that try may be the
    one that counts."""
    name = f"{base_prefix(partition)}{_PART}"
    try:
        if target.head(name) is None:
            return _write_partition(read, target.write, partition)
    except FileExistsError:  # the other try was faster
        pass
    with target.open(name) as source:
        return int(pq.read_metadata(source).num_rows)


def _check_address(view: View, output: str, *, overwrite: bool, elsewhere: bool) -> None:
    if not output.endswith("/"):
        raise ConfigurationError(
            "no-folder",
            f"--output {output!r} is in a store, where an export is a Hive folder of Parquet files.",
            next="end it in /, or export to a file on this machine and copy it",
        )
    if overwrite:
        raise ConfigurationError(
            "unfit-for-store",
            f"--overwrite can't replace {output} in one step, so readers could see parts of both exports. Nothing was written.",
            next="use another --output, and delete the old export when nobody reads it",
        )
    if elsewhere and view.number is None:
        raise ConfigurationError(
            "unfit-for-host",
            "`latest` is merged into temporary files of this machine, which executors can't read.",
            next="export `published`, or use --host local",
        )
    target = open_store(output)
    if next(iter(target.list("", limit=1)), None) is not None:
        raise _in_use(target, output)


def _in_use(target: ObjectStore, output: str) -> ConfigurationError:
    if target.head(_SCHEMA) is not None:
        return ConfigurationError(
            "output-exists", f"{output} exists. Nothing was written.", next="use another --output"
        )
    return ConfigurationError(
        "output-exists",
        f"{output} has objects but no {_SCHEMA}, so it is not a complete export. Another export is writing it now, or one "
        "was stopped, or another program wrote the objects. This export wrote nothing.",
        next="use another --output; or delete that folder, if nobody writes it",
    )


def _claim(target: ObjectStore, output: str) -> None:
    """Keep other exports out until the claim is deleted. Raises ConfigurationError if another one writes the folder, or has."""
    mine = clock.new_id().encode()
    try:
        is_mine = target.create(_CLAIM, mine)
    except UnknownOutcomeError:
        is_mine = target.get(_CLAIM) == mine
    if not is_mine:
        raise _in_use(target, output)
    if any(info.name != _CLAIM for info in target.list("", limit=2)):  # written since the check
        used = _in_use(target, output)
        target.delete([_CLAIM])
        raise used


def _hive_at_address(
    read: Callable[..., pa.RecordBatchReader], view: View, output: str, where: str | None, host: Host
) -> int:
    """As `_hive`. `_SCHEMA` comes last. If a partition can't be written, all others are deleted."""
    target, schema = open_store(output), read().schema
    partitions = list(view.partitions(where, schema))
    sizes = [float(view.snapshot.partitions[partition].bytes) for partition in partitions]
    _claim(target, output)
    found = host.map(partial(_write_partition_once, read, target), partitions, sizes)
    # If `map` of another host raises, tasks may still write, and another export would take their files for its own. So the claim
    # stays then.
    try:
        rows = sum(all_or_raise(found))
        with target.write(_SCHEMA) as sink:
            pq.write_metadata(schema, sink)
    except BaseException:
        target.delete(f"{base_prefix(partition)}{_PART}" for partition in partitions)
        target.delete([_CLAIM])
        raise
    target.delete([_CLAIM])
    return rows


@contextmanager
def _replace_when_complete(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write to. It replaces ``target`` if the block ends without an error."""
    unfinished = target.with_name(f".{target.name}.{clock.new_id()}.tmp")
    try:
        yield unfinished
        if target.is_dir():
            # A crash before the next rename leaves the old export under this name.
            before = unfinished.with_suffix(".old")
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
