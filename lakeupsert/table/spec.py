"""The spec: what a table is. Columns with field ids; key, ordering and partition columns; the delete rule. A chain; never
trimmed.

A field keeps its id for life and its name until `rename` or `drop`. The spec remembers both, so landing files of any age are read
by the names of their time, and a reused name never shows the values of another column (ADR 0020). In data files a field keeps one
name, so that engines that go by name can read all of them alike (ADR 0036). `retype` gives a column a new field; readers of old
files convert the values of the old one (ADR 0038).
"""

import base64
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import pyarrow as pa

from lakeupsert.errors import DamagedTableError, TryAgainError
from lakeupsert.table.roles import ColumnGroup, DeleteRule, Ordering, PartitionColumn

FIELD_ID = b"PARQUET:field_id"
RESERVED = "_lakeupsert"
"""Prefix that no column of a landing file may have, in upper or lower case."""
DELETE_FLAG = "_lakeupsert_delete"
"""Boolean column of appended files: the row is a delete. Without it, no row is. See `TableSpec.has_deletes`."""
FILE = "_lakeupsert_file"
"""Integer column of appended files: the landing file's place in its batch. `FILE` and `PLACE` are the last parts of a rank."""
PLACE = "_lakeupsert_place"
"""Integer column of appended files: the row's place in its landing file."""
OF_EARLIER_BATCH = -1
"""`FILE` and `PLACE` of a delete that an earlier batch brought, and `append` copied: it loses to rows of its own order."""
HAS = "_lakeupsert_has"
"""Binary column of all files of tables in mode columns: the columns that the row brings by its order, one bit per field id."""
OLDER = "_lakeupsert_older"
"""List column of base and delta files of such tables: the columns that come from records of lower order, with these orders."""
BATCH = "_lakeupsert_batch"
"""Integer column: the ledger number of the row's batch. Base and delta files have it if the table has `versions`, history files
always. There a delete that was stored has the number of the last merged batch; without `versions`, so has any stored row."""
RECEIVED_AT = "_lakeupsert_received_at"
"""The receipt stamp of the row's batch. No file has it: readers take it from the ledger."""
MOVED_TO = "_lakeupsert_moved_to"
"""Text column of appended files with deletes that `append` wrote: the partition that the key moved to."""
MOVED_FROM = "_lakeupsert_moved_from"
"""Text column of appended files with rows that keys carry: the partition that they come from."""
HIDDEN_IDS = 2_000_000_000
"""Field ids from here on are those of columns that readers don't see. Those of the table's columns count from 1."""


class FieldText(msgspec.Struct, frozen=True, kw_only=True):
    """A field for human readers. Programs use `arrow_schema`."""

    id: int
    name: str
    type: str


class TypeChange(NamedTuple):
    """The type of a column until a retype, and from it on. The latter may have grown since."""

    before: pa.DataType
    after: pa.DataType


class Retype(msgspec.Struct, frozen=True, kw_only=True):
    """The field ``id`` that the values of a column became. ``types``: the fields `before` and `after` of an Arrow IPC schema, in
    base64."""

    id: int
    types: str

    @classmethod
    def of(cls, id_: int, change: TypeChange) -> "Retype":
        return cls(id=id_, types=base64.b64encode(pa.schema(change._asdict()).serialize()).decode())

    @property
    def change(self) -> TypeChange:
        return TypeChange(*pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.types))).types)


class Rename(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rename, drop or retype: before it, field ``id`` was called ``name`` and ``last_field_id`` was the highest field id.

    ``retyped``: set by a retype, which keeps the name.
    """

    id: int
    name: str
    last_field_id: int
    retyped: Retype | None = None


class FileName(msgspec.Struct, frozen=True, kw_only=True):
    """What field ``id`` is called in data files, if that is not its name."""

    id: int
    name: str


class FolderFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the integers of a partition column are written in folders, as `02d`."""

    column: str
    format: str


class AdoptedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The ``folder`` of a value, `p=x%20y`, that would be called ``name``, `p=x y`, if it had not been adopted. One level."""

    name: str
    folder: str


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the spec.

    Attributes:
        order_by: names of the ordering columns, most important first. ``ascending`` and ``nulls_first`` name some of these (see
            `Ordering`).
        partition_from: the partition columns that are computed from others, in the rows of landing files.
        stamped: the ordering column is not in the landing files; its value is the batch's receipt stamp.
        order_in_name: the ordering column is not in the landing files; this pattern's group finds its value in their names.
        ties: what decides between rows of a key with equal ordering values: the later ``arrival``, or only the ``content``.
        mode: ``rows``: the record of greatest rank is the row. ``columns``: each column has its own winner (`rows.columns`).
        nulls: whether a null is a value that a record brings. Only for mode columns, as are ``groups``.
        key_scope: whether a key has one row in each ``partition``, or in the whole ``table`` (`engine.keys`).
        history: whether merges keep the versions that they supersede (`read.history`).
        versions: whether a row's batch is stored with it, as `BATCH`.
        statements: whether an `update` or `delete` has changed the table: rows of any appended file may be deletes from then on.
        requires: features without which nobody may read or write the table (`table.group.FEATURE`).
        arrow_schema: the schema as Arrow IPC in base64, with field ids in the fields' metadata and with the partition columns.
        renames: all renames, drops and retypes, oldest first.
        one_name_since: in files that were written after at least so many of ``renames``, a field has one name for ever. None: it
            has the name of that time.
        file_names: these names, of fields that were renamed, dropped or retyped since, and of new ones whose name is taken in
            files.
        folder_formats: of integer partition columns whose adopted folders have leading zeros.
        adopted_folders: of values whose adopted folder has another name than new ones get.
    """

    table_id: str
    key: tuple[str, ...]
    order_by: tuple[str, ...]
    partition_by: tuple[str, ...]
    partition_from: tuple[PartitionColumn, ...]
    stamped: bool
    ascending: tuple[str, ...]
    nulls_first: tuple[str, ...]
    order_in_name: str | None
    ties: Literal["arrival", "content"]
    delete: DeleteRule | None
    mode: Literal["rows", "columns"]
    nulls: Literal["overwrite", "keep"]
    groups: tuple[ColumnGroup, ...]
    key_scope: Literal["partition", "table"]
    history: bool
    versions: bool
    statements: bool
    requires: tuple[str, ...]
    fields: tuple[FieldText, ...]
    arrow_schema: str
    last_field_id: int
    renames: tuple[Rename, ...]
    one_name_since: int | None
    file_names: tuple[FileName, ...]
    folder_formats: tuple[FolderFormat, ...]
    adopted_folders: tuple[AdoptedFolder, ...]

    @cached_property
    def schema(self) -> pa.Schema:
        """The table as readers see it: all columns in spec order, including the partition columns."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))

    @cached_property
    def format_of_column(self) -> dict[str, str]:
        """The formats of `folder_formats`, by column."""
        return {one.column: one.format for one in self.folder_formats}

    @cached_property
    def folder_of_name(self) -> dict[str, str]:
        """The folders of `adopted_folders`, by the names that they would have otherwise."""
        return {one.name: one.folder for one in self.adopted_folders}

    @cached_property
    def hash_columns(self) -> tuple[PartitionColumn, ...]:
        """The partition columns that are hashes of key columns."""
        return tuple(one for one in self.partition_from if one.function == "bucket")

    @cached_property
    def key_decides_partition(self) -> bool:
        """Whether a row's key says in which partition it is, as in a table of one partition."""
        return {*self.partition_by} <= {*self.key, *(one.column for one in self.hash_columns)}

    @cached_property
    def stored_schema(self) -> pa.Schema:
        """Rows in a partition: without the partition columns, whose values are in the folder's name."""
        return pa.schema([f for f in self.schema if f.name not in self.partition_by])

    @cached_property
    def base_schema(self) -> pa.Schema:
        """Base and delta files."""
        batch = [BATCH_FIELD] if self.versions else []
        if self.mode == "rows":
            return pa.schema([*self.stored_schema, *batch])
        types = (self.schema.field(name).type for name in self.all_orders)
        orders = [_hidden(f"o{i}", type_, 4 + i) for i, type_ in enumerate(types)]
        part = _hidden("item", pa.struct([_hidden("has", pa.binary(), 3), *orders]), 2)
        return pa.schema([*self.stored_schema, _hidden(HAS, pa.binary(), 0), _hidden(OLDER, pa.list_(part), 1), *batch])

    @cached_property
    def all_orders(self) -> tuple[str, ...]:
        """The ordering columns of the row and of all groups."""
        return (*self.order_by, *(o.column for group in self.groups for o in group.ordering))

    @cached_property
    def columns_of(self) -> tuple[tuple[tuple[Ordering, ...], dict[str, int]], ...]:
        """For mode columns: the ordering and the columns (with field ids), first of all columns in no group, then of each
        group."""
        ids = {f.name: field_id(f) for f in self.stored_schema if f.name not in self.stored_key}
        grouped = [(g.ordering, {n: ids.pop(n) for n in g.all_columns if n in ids}) for g in self.groups]
        return ((self.ordering, ids), *grouped)

    @cached_property
    def naming_id(self) -> int | None:
        """The bit of `HAS` that says that a record named its partition. None: every record of the table does."""
        if self.mode == "rows" or self.key_scope == "partition":
            return None
        return field_id(self.schema.field(self.partition_by[0]))

    @cached_property
    def ordering(self) -> tuple[Ordering, ...]:
        """The ordering columns, with what wins in each."""
        return tuple(Ordering(name, name in self.ascending, name in self.nulls_first) for name in self.order_by)

    @cached_property
    def content(self) -> tuple[str, ...]:
        """With `ties` content, the columns that decide between equal ordering values. Sorted by name, because ids depend on
        arrival."""
        names = set(self.stored_schema.names) - {*self.stored_key, *self.order_by}
        return tuple(sorted(names)) if self.ties == "content" else ()

    @cached_property
    def stored_key(self) -> tuple[str, ...]:
        """The key columns in the files. A partition column in the key has a single value in a partition."""
        return tuple(name for name in self.key if name not in self.partition_by)

    @cached_property
    def appended_schema(self) -> pa.Schema:
        """A row of an appended file, with `HAS` in mode columns and `DELETE_FLAG` if rows can be deletes."""
        has = [pa.field(HAS, pa.binary())] if self.mode == "columns" else []
        flag = [pa.field(DELETE_FLAG, pa.bool_(), nullable=False)] if self.has_deletes else []
        return pa.schema([*self.stored_schema, *has, *flag])

    @property
    def operation(self) -> str:
        """The column that decides which rows are deletes; empty if there is none."""
        return self.delete.operation or "" if self.delete else ""

    @property
    def has_deletes(self) -> bool:
        """Whether an appended row may be a delete: one that landed, one for a key that moved to another partition, or one of a
        statement."""
        return self.delete is not None or self.key_scope == "table" or self.statements

    @cached_property
    def takes_key_alone(self) -> bool:
        """Whether a delete, and in mode columns any record, may name no partition: the key index knows where its key is."""
        return self.key_scope == "table" and (self.delete is not None or self.mode == "columns")

    @property
    def settles_early(self) -> bool:
        """Whether a row that loses to another row of its batch can be dropped."""
        return self.mode == "rows" and not self.history

    @cached_property
    def history_schema(self) -> pa.Schema:
        """History files: superseded rows, and the deletes that superseded them."""
        flag = pa.field(DELETE_FLAG, pa.bool_(), nullable=False)
        return pa.schema([*self.stored_schema, flag, pa.field(BATCH, pa.int64(), nullable=False)])

    @cached_property
    def ranked_schema(self) -> pa.Schema:
        """Appended files as they are stored: `appended_schema` and where each row came from."""
        place = [pa.field(FILE, pa.int32(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
        return pa.schema([*self.appended_schema, *place])

    @cached_property
    def pack_schema(self) -> pa.Schema:
        """A pack of appended files: `ranked_schema`, and the partition columns, so that an engine can scan the whole pack."""
        return pa.schema([*self.ranked_schema, *(self.schema.field(name) for name in self.partition_by)])

    @cached_property
    def arriving_schema(self) -> pa.Schema:
        """Appended files as a merge reads them: `ranked_schema` and all columns of base files."""
        return pa.unify_schemas([self.ranked_schema, self.base_schema])

    def table_name_of(self, name: str) -> str:
        """The table's name for a column of a landing file, ignoring case; ``name`` itself if the table has no such column."""
        return self._current_names.get(name) or self._current_names.get(name.lower(), name)

    @cached_property
    def _current_names(self) -> dict[str, str]:
        names = [*self.schema.names, *filter(None, [self.operation])]
        return {name.lower(): name for name in names} | {name: name for name in names}

    @cached_property
    def names_by_id(self) -> dict[int, str]:
        """The current names of columns by the ids of their fields, also of those that they had before a retype."""
        names = {field.id: field.name for field in self.fields}
        for one in reversed(self.renames):
            if one.retyped is not None and one.retyped.id in names:
                names[one.id] = names[one.retyped.id]
        return names

    def changed_names(self, renames: int) -> dict[str, str | None]:
        """The columns whose names changed since a spec or file with so many ``renames``: old name to current name (None:
        dropped)."""
        later = self.renames[renames:]
        then: dict[int, str] = {}
        for one in later:
            if one.id <= later[0].last_field_id:  # else the field is newer than these names
                then.setdefault(one.id, one.name)
        now = {name: self.names_by_id.get(id_) for id_, name in then.items()}
        return {name: new for name, new in now.items() if name != new}

    def conversions(self, renames: int) -> dict[str, list[TypeChange]]:
        """How the values in a file that was written after so many ``renames`` become those of now: for each current name of a
        column that was retyped since, its retypes, oldest first.

        Every one of them is followed, so that a value does not depend on when a merge rewrote its file.
        """
        changes: dict[int, list[TypeChange]] = {}
        for one in reversed(self.renames[renames:]):
            if one.retyped is not None:
                changes[one.id] = [one.retyped.change, *changes.pop(one.retyped.id, ())]
        return {self.names_by_id[id_]: steps for id_, steps in changes.items() if id_ in self.names_by_id}

    def under_old_names(self, names: Mapping[str, str]) -> dict[str, str]:
        """The columns of a landing file that still have a name from before a rename: the file's name to the current name.

        A column that is also there under its current name is left out. So is an old name that a rename has since given to
        another column. ``names``: for each column, its name after `aliases` and its name in the file."""
        own_names, now = {name.lower(): own for name, own in names.items()}, self.names_by_id
        ids = {field.name.lower(): field.id for field in self.fields}
        return {
            own_names[one.name.lower()]: now[one.id]
            for one in self.renames
            if one.id in now
            and one.name.lower() in own_names
            and now[one.id].lower() not in own_names
            and ids.get(one.name.lower(), one.last_field_id + 1) > one.last_field_id
        }

    @cached_property
    def names_written(self) -> dict[str, str]:
        """What columns are called in the files that are written now, for each current name that differs."""
        return self._names_kept(len(self.renames))

    def _names_kept(self, renames: int) -> dict[str, str]:
        """The same for files that were written after so many renames, if these keep names."""
        in_files, ids = {one.id: one.name for one in self.file_names}, {field.id: field.id for field in self.fields}
        for one in reversed(self.renames[renames:]):
            if one.retyped is not None:
                ids = {id_: one.id if then == one.retyped.id else then for id_, then in ids.items()}
        names = {field.name: in_files.get(ids[field.id], field.name) for field in self.fields}
        return {name: written for name, written in names.items() if name != written}

    def names_in(self, renames: int) -> dict[str, str]:
        """What columns are called in a data file that was written after so many ``renames``, for each current name that differs.

        A column that is not in such a file may have a name that is in no file."""
        if renames > len(self.renames):  # else columns would silently be taken for others
            raise TryAgainError(
                "columns-renamed",
                f"Columns were renamed while this command ran: a file has the names after {renames} renames, but this command "
                f"started with {len(self.renames)}. Nothing was changed.",
                next="run the same command again",
            )
        if renames == len(self.renames) and self.keeps_names(renames):
            return self.names_written
        return self._names_kept(renames) if self.keeps_names(renames) else self.names_at(renames)

    def keeps_names(self, renames: int) -> bool:
        """Whether files that were written after so many ``renames`` have the one name of each column that never changes."""
        return self.one_name_since is not None and renames >= self.one_name_since

    def names_at(self, renames: int) -> dict[str, str]:
        """What columns were called after so many ``renames``, for each current name that differs.

        A newer column whose name another column had at that time gets a name that no column has."""
        changed = self.changed_names(renames)
        if not changed:
            return {}
        own = {now: name for name, now in changed.items() if now is not None}
        old_names = {name.lower() for name in changed}  # Spark ignores case
        others = {
            f.name: f"{RESERVED}_{f.id}" for f in self.fields if f.name.lower() in old_names and f.name not in own
        }
        return own | others

    @cached_property
    def tombstone_schema(self) -> pa.Schema:
        """Tombstone files: key and ordering columns."""
        return pa.schema([self.schema.field(name) for name in dict.fromkeys((*self.stored_key, *self.order_by))])

    @cached_property
    def deciding_schema(self) -> pa.Schema:
        """All columns that decide which row of a key wins, except where a row came from."""
        return pa.schema([*self.tombstone_schema, *(self.schema.field(name) for name in self.content)])


def _hidden(name: str, type_: pa.DataType, number: int) -> pa.Field:
    """A column that readers don't see, with an id all the same: pyiceberg refuses files with columns that have none."""
    return pa.field(name, type_, metadata={FIELD_ID: str(HIDDEN_IDS + number).encode()})


BATCH_FIELD = _hidden(BATCH, pa.int64(), 1_000_000)
"""`BATCH` in base and delta files."""
VERSION_FIELDS = (BATCH_FIELD, _hidden(RECEIVED_AT, pa.timestamp("us", tz="UTC"), 1_000_001))
"""The columns that readers get with ``versions``."""


def field_id(field: pa.Field) -> int:
    return int(field.metadata[FIELD_ID])


def check_spec(old: TableSpec | None, new: TableSpec) -> None:
    """Check the invariants of specs."""
    if old is None:
        return
    kept, renamed = new.names_by_id, new.changed_names(len(old.renames))
    fixed = (
        "table_id", "key", "order_by", "ascending", "nulls_first", "order_in_name", "ties", "partition_by",
        "partition_from", "stamped", "mode", "nulls", "groups", "key_scope", "history",
        "versions", "delete", "folder_formats", "adopted_folders",
    )  # fmt: skip
    broken = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    broken += [f"field {f.id} ({f.name})" for f in old.fields if kept.get(f.id) != renamed.get(f.name, f.name)]
    broken += ["renames"] if new.renames[: len(old.renames)] != old.renames else []
    broken += ["file_names"] if new.file_names[: len(old.file_names)] != old.file_names else []
    broken += ["one_name_since"] if old.one_name_since not in (None, new.one_name_since) else []
    broken += ["statements"] if old.statements and not new.statements else []
    broken += ["requires"] if not set(old.requires) <= set(new.requires) else []
    if broken or new.last_field_id < old.last_field_id:
        raise DamagedTableError(
            "broken-invariant",
            f"The next spec would change fixed properties: {', '.join(broken) or 'field ids'}. It was not written.",
            next="report this as a bug of lakeupsert, with both spec objects",
        )
