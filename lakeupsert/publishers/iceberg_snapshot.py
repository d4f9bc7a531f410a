"""The objects that an Iceberg snapshot names: manifests, and position deletes or vectors, written from ours.

Reads     the manifests of the Iceberg snapshot before in which partitions changed, and the manifests of these partitions
Writes    position deletes or vectors, and manifests; no data file
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from pyiceberg.table.snapshots import Operation, Summary

from lakeupsert import clock
from lakeupsert.engine.runs import runs
from lakeupsert.errors import ConfigurationError
from lakeupsert.publishers import PublishedTable
from lakeupsert.publishers.iceberg_catalog import RESET
from lakeupsert.publishers.iceberg_deletes import PositionDeletes, Puffins, mark_of
from lakeupsert.publishers.iceberg_files import MOST_ENTRIES, Entry, FileReader, FileWriter, ManifestFile, Run
from lakeupsert.publishers.iceberg_types import UNFIT
from lakeupsert.storage import NotFoundError
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME
from lakeupsert.table.manifest import BucketEntry, DataFile
from lakeupsert.table.metadata import damaged
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import TableSpec

FOLDER = f"{HOME}/iceberg"
"""Has all that the publisher writes. It is also the table's location in Iceberg: engines write there, and some delete it with the
table."""
METADATA = f"{FOLDER}/metadata"
_DELETES = f"{FOLDER}/deletes"


@dataclass(frozen=True)
class ChangedFiles:
    """The files of a partition after a commit: ``entries`` (new ones have no snapshot), entries that are ``gone``, and ``marked``
    data files: their superseded rows need an entry, which is not written yet."""

    partition: str
    entries: tuple[Entry, ...]
    gone: tuple[Entry, ...] = ()
    marked: tuple[DataFile, ...] = ()
    has_new_rows: bool = False


@dataclass(frozen=True)
class SnapshotObjects:
    """The objects of the Iceberg snapshots of one table; ``root`` is its address."""

    table: PublishedTable
    root: str

    def write(
        self,
        writer: FileWriter,
        listed: Sequence[Run],
        before: Snapshot | None,
        link: Link[Snapshot],
        first_row: int | None,
    ) -> tuple[list[Run], list[ChangedFiles]]:
        """Write what the snapshot's manifest list will name. Returns its runs, and the files of changed partitions.

        ``listed``: the runs that the table has; ``before``: the snapshot that they show, None if all partitions are written.
        """
        now, old = link.body.partitions, before.partitions if before else {}
        firsts = [run.first for run in listed]

        def place_of(partition: str) -> int:
            return max(0, bisect_right(firsts, partition) - 1)

        changed = {p for p in {*now, *old} if now.get(p) != old.get(p)}
        if before and before.spec_version != link.body.spec_version and any(one.retyped for one in writer.spec.renames):
            # Files that stay may be from before a retype, and have no field of the new id.
            self.table.map_concurrently(lambda p: self.buckets(writer.spec, p, now[p]), list(now))
        touched = set(map(place_of, changed)) if before else set(range(len(listed)))
        known: dict[str, list[Entry]] = {partition: [] for partition in changed}
        read = [manifest for place, run in enumerate(listed) if place in touched for manifest in run.manifests]
        for entries in self.table.map_concurrently(self.entries, read):
            for entry in entries:
                known.setdefault(entry.partition, []).append(entry)

        def files_of(partition: str) -> ChangedFiles:
            if before is not None and partition not in changed:
                return ChangedFiles(partition, tuple(known[partition]))
            shown, was = now.get(partition), old.get(partition)
            keeps_vectors = before is not None or writer.version == 2
            files = self._diff(writer, partition, shown or -1, known[partition], keeps_vectors=keeps_vectors)
            return replace(files, has_new_rows=shown is None or was is None or shown.merged != was.merged)

        diffs = self.table.map_concurrently(files_of, sorted(known))
        kind = Puffins if writer.version == 3 else PositionDeletes
        marked = [file for files in diffs for file in files.marked]
        deletes = kind(self.table, writer.address, f"{_DELETES}/{link.number}-").write(marked)
        found = [
            replace(files, entries=(*files.entries, *(deletes[file.name] for file in files.marked))) for files in diffs
        ]
        kept = [place for place in range(len(listed)) if place not in touched]
        stretches = groupby(found, key=lambda files: bisect_right(kept, place_of(files.partition)))
        chunks = [
            chunk for _, stretch in stretches for chunk in runs(stretch, lambda files: len(files.entries), MOST_ENTRIES)
        ]
        written = self._write_runs(writer, link.number, chunks, first_row)
        all_runs = [*(listed[place] for place in kept), *(run for run in written if run.manifests)]
        return sorted(all_runs, key=lambda run: run.first), found

    def _diff(
        self,
        writer: FileWriter,
        partition: str,
        version: int | PartitionVersion,
        known: Sequence[Entry],
        *,
        keeps_vectors: bool,
    ) -> ChangedFiles:
        """Compare a version of a partition (-1: it has no rows) with the files that the table has of it."""
        data = {entry.name: entry for entry in known if not entry.of}
        deletes = {entry.of: entry for entry in known if entry.of and keeps_vectors}
        entries: list[Entry] = []
        marked: list[DataFile] = []
        for bucket in self.buckets(writer.spec, partition, version):
            for file in bucket.data:
                stored = data.get(file.name)
                entries.append(stored or writer.data(file))
                if file.deleted is not None:
                    shown = deletes.get(file.name) if stored else None
                    if shown is not None and shown.mark == mark_of(file):
                        entries.append(shown)
                    else:
                        marked.append(file)
        kept = set(entries)
        gone = tuple(entry for entry in known if entry not in kept)
        return ChangedFiles(partition, tuple(entries), gone, tuple(marked))

    def buckets(self, spec: TableSpec, partition: str, version: int | PartitionVersion) -> tuple[BucketEntry, ...]:
        """The buckets of a version. Raises ConfigurationError (``unfit-for-iceberg``) if Iceberg can't read its files."""
        buckets = self.table.version(partition, version).buckets
        unfit = {
            "adopted files, whose columns have no field ids of this table": any(
                b.data and not b.settled for b in buckets
            ),
            "files from before a column was retyped, whose values readers can't convert": any(
                spec.conversions(file.renames) for bucket in buckets for file in bucket.data
            ),
        }
        for files in (files for files, are_there in unfit.items() if are_there):
            raise ConfigurationError(
                UNFIT,
                f"{partition} has {files}. Readers of Iceberg see the snapshot before; readers of lakeupsert are not affected.",
                next="run `lakeupsert compact --full`, which writes these files again",
            )
        return buckets

    def _write_runs(
        self, writer: FileWriter, number: int, chunks: Sequence[Sequence[ChangedFiles]], first_row: int | None
    ) -> list[Run]:
        """Write the manifests of each run of partitions. ``first_row``: the first row id that no file has."""
        rows = (sum(entry.rows for files in chunk for entry in files.entries if not entry.of) for chunk in chunks)
        row_ids = [None] * len(chunks) if first_row is None else accumulate(rows, initial=first_row)

        def write(pair: tuple[Sequence[ChangedFiles], int | None]) -> Run:
            files, row_id = pair
            manifests = []
            for deletes in (False, True):
                entries = [entry for one in files for entry in one.entries if bool(entry.of) == deletes]
                gone = [entry for one in files for entry in one.gone if bool(entry.of) == deletes]
                if entries or gone:
                    name = f"{METADATA}/manifest-{number}-{clock.new_id()}.avro"
                    body, manifest = writer.manifest(entries, gone, name, None if deletes else row_id)
                    self.table.put(name, body)
                    manifests.append(manifest)
            return Run(files[0].partition, tuple(manifests))

        return self.table.map_concurrently(write, list(zip(chunks, row_ids, strict=False)))

    def runs(self, name: str) -> list[Run]:
        """The runs of a manifest list."""
        return FileReader(self.root).runs(self.get(name), name)

    def entries(self, manifest: ManifestFile) -> list[Entry]:
        reader = FileReader(self.root)
        return reader.entries(manifest, self.get(reader.name(manifest.manifest_path)))

    def get(self, name: str) -> bytes:
        store = self.table.objects.store
        try:
            return store.get(name)
        except NotFoundError as e:
            raise damaged(store.uri(name), "an object of the Iceberg table", "it is missing", next=RESET) from e


def rows_with_new_ids(shown: Sequence[Run], snapshot: int) -> int:
    """How many row ids the snapshot's new manifests take, as Iceberg counts them: rows that keep theirs included."""
    new = [m for run in shown for m in run.manifests if m.added_snapshot_id == snapshot and not m.content]
    return sum(m.added_rows_count + m.existing_rows_count for m in new)


def summary(shown: Sequence[Run], changed: Sequence[ChangedFiles], own: dict[str, str]) -> Summary:
    """The commit's changes, and the size of the table, in Iceberg's words."""
    entries = [entry for files in changed for entry in files.entries if entry.snapshot is None]
    gone = [entry for files in changed for entry in files.gone]
    manifests = [manifest for run in shown for manifest in run.manifests]
    operation = Operation.OVERWRITE
    if not any(files.has_new_rows for files in changed):
        operation = Operation.REPLACE
    elif not gone and not any(entry.of for entry in entries):
        operation = Operation.APPEND
    counts = {"total-equality-deletes": 0}
    words = ("data-files", "records", "deleted"), ("delete-files", "position-deletes", "removed")
    for deletes, (files, rows, lost) in enumerate(words):
        new, old = ([entry for entry in group if bool(entry.of) == deletes] for group in (entries, gone))
        listed = [manifest for manifest in manifests if manifest.content == deletes]
        counts |= {
            f"added-{files}": len(new),
            f"{lost}-{files}": len(old),
            f"total-{files}": sum(m.added_files_count + m.existing_files_count for m in listed),
            f"added-{rows}": sum(entry.rows for entry in new),
            f"{lost}-{rows}": sum(entry.rows for entry in old),
            f"total-{rows}": sum(m.added_rows_count + m.existing_rows_count for m in listed),
        }
    if any(entry.span for entry in (*entries, *gone)):
        counts["added-dvs"] = sum(bool(entry.span) for entry in entries)
        counts["removed-dvs"] = sum(bool(entry.span) for entry in gone)
    return Summary(operation, **own, **{name: str(count) for name, count in counts.items()})
