"""What the configuration declares of a table: its first spec, the names and types of its columns, and what may not change."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from lakeupsert import clock
from lakeupsert.config import ENVIRONMENT_PREFIX, DeleteSettings, GroupSettings, TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.formats.positions import LOG_POSITION
from lakeupsert.table.creation import create, groups_of
from lakeupsert.table.misnamed import find_typo, nearest_name
from lakeupsert.table.roles import DeleteRule, Ordering, PartitionColumn
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import named_type

_ARRIVAL = ("record_timestamp",)
"""The default of `order_by`: files need not have that column."""
_SLIP = 0.85
"""From this similarity on, a name is taken for a misspelt column: `versoin` is that similar to `version`, `received_at` is not
to `received_by`."""


@dataclass(frozen=True)
class Declaration:
    """The configuration of one table.

    Attributes:
        origins: the environment variables that settings came from, as in `Config.origins`.
        by_folder: the table was opened by its folder (`pipeline.by_folder`): the settings say what its spec says.
    """

    name: str
    settings: TableSettings
    origins: Mapping[str, str]
    by_folder: bool = False

    def new_spec(self, schema: pa.Schema, later: Sequence[pa.Field] = ()) -> TableSpec:
        """The first spec of the table, for files with the columns of ``schema``; ``later`` as in `create`."""
        stamped = self._is_stamped(schema.names, {field.name for field in later})
        spec = create(schema, self.settings, table_id=clock.new_id(), stamped=stamped, later=later)
        self._refuse_without_effect(spec)
        return spec

    def _refuse_without_effect(self, spec: TableSpec) -> None:
        if spec.stamped and self.settings.full_extract == "replace":
            raise ConfigurationError(
                "bad-setting",
                f'[tables.{self.name}]: full_extract is "replace", but arrival decides in this table, since no file has the '
                f"column {spec.order_by[0]!r}: a full extract wins against all earlier rows anyway. The setting would have no "
                "effect. Nothing was committed.",
                next=f"remove `full_extract` from [tables.{self.name}]",
            )

    def _is_stamped(self, columns: Collection[str], typed: Collection[str]) -> bool:
        """Whether rows of a new table get their receipt stamp in the ordering column, so that arrival decides for good.

        ``columns`` are those of the files, ``typed`` other columns that are given types.
        """
        settings = self.settings
        if settings.order_in_name is not None or len(settings.order_by) != 1:
            return False
        [name] = settings.order_by
        if name in columns or name == LOG_POSITION:
            return False
        if settings.order_by == _ARRIVAL:
            return True
        # A batch may bring the columns of some groups alone. A direction or a type means a column that exists, and the name may
        # be misspelt. So may a name that is similar to one of the files.
        return (
            not settings.groups
            and not re.search(r"\s", name)
            and name not in typed
            and nearest_name(name, columns, _SLIP) is None
        )

    def stamped_by_name(self, spec: TableSpec) -> list[str]:
        """A warning if a new table is stamped in a column that the configuration names."""
        if not spec.stamped or (spec.order_by == _ARRIVAL and _ARRIVAL[0] not in self.settings.schema):
            return []
        return [
            f"no file has the ordering column {spec.order_by[0]!r}, so it gets each row's receipt stamp, and the row that "
            "arrives later always wins; if that is wrong, correct `order_by` and create the table again"
        ]

    def misspelt_columns(self, columns: Iterable[str], typed: Iterable[str]) -> dict[str, str]:
        """Those of ``typed``, names under `schema` that are not columns, which misspell a column that has no type there."""
        given = {name.lower() for name in self.settings.schema}
        others = [column for column in columns if column.lower() not in given]
        named = {name.lower() for name in self.named_besides_types}
        near = {name: find_typo(name, others) for name in typed if name.lower() not in named}
        return {name: close for name, close in near.items() if close is not None}

    def types_alone(self, columns: Iterable[str], typed: Iterable[str]) -> list[str]:
        """For a new table, a warning for each of ``typed``, names under `schema` that are not among the files' ``columns``."""
        named = {name.lower() for name in self.named_besides_types}
        alone = [name for name in typed if name.lower() not in named]
        misspelt = self.misspelt_columns(columns, alone)
        return [
            f"no file has the column {name!r} of [tables.{self.name}.schema]; the table has it, and it is null until files "
            f"have it{f'. Did you mean {misspelt[name]!r}?' if name in misspelt else ''}"
            for name in alone
        ]

    @property
    def partition_columns(self) -> list[PartitionColumn]:
        """The columns of `partition_by`."""
        return [PartitionColumn.parse(text) for text in self.settings.partition_by]

    @property
    def order_columns(self) -> list[str]:
        """The names of the columns of `order_by`."""
        return [Ordering.parse(text).column for text in self.settings.order_by]

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns that the configuration names. Of names that differ only in case, the one that counts comes last."""
        return (*self.settings.schema, *self.named_besides_types)

    @property
    def named_besides_types(self) -> tuple[str, ...]:
        """`named_columns` without columns that are only given types."""
        settings = self.settings
        names: list[str | None] = [name for one in self.partition_columns for name in (one.column, *one.sources)]
        names += self.order_columns
        names += [settings.delete.operation if settings.delete else None, *settings.key]
        names += [name for group in groups_of(settings) for name in group.all_columns]
        return tuple(name for name in names if name)

    @property
    def folder_columns(self) -> tuple[str, ...]:
        """The named columns that landing files or their folders may have: not those that lakeupsert computes.

        In mode columns a row that leaves a column out keeps its value, so a folder of arrival gives it none.
        """
        settings, partitions = self.settings, self.partition_columns
        left_out = {one.column.lower() for one in partitions if one.function}
        left_out |= {name.lower() for name in settings.order_by if settings.order_in_name is not None}
        if settings.mode == "columns":
            needed = set(settings.key)
            if settings.key_scope == "partition":
                needed |= {name for one in partitions for name in one.sources}
            left_out |= self.arrival_folders - {name.lower() for name in needed}
        return tuple(dict.fromkeys(name for name in self.named_columns if name.lower() not in left_out))

    @property
    def arrival_folders(self) -> frozenset[str]:
        """The names, in lower case, of folders `name=value` whose value `landing_dates` reads."""
        parts = (folder.partition("=") for folder in self.settings.landing_dates.lower().split("/"))
        return frozenset(name for name, sign, _ in parts if sign)

    @property
    def text_columns(self) -> frozenset[str]:
        """Columns of text files that stay text unless they are given a type: keys, so that 0042 stays 0042; the operation."""
        delete = self.settings.delete
        operation = {delete.operation} if delete and delete.operation else set()
        return (frozenset(self.settings.key) | operation) - frozenset(self.settings.schema)

    @property
    def deciding_columns(self) -> frozenset[str]:
        """Columns that decide a row's order or its partition."""
        of_groups = (text for group in self.settings.groups.values() for text in group.order_by)
        orders = [*self.order_columns, *(Ordering.parse(text).column for text in of_groups)]
        return frozenset([*orders, *(name for one in self.partition_columns for name in one.sources)])

    @property
    def nulls_say_nothing(self) -> bool:
        """Whether a null changes nothing where the table has no column for it: in mode columns it may be a value to remember."""
        return self.settings.mode == "rows" or self.settings.nulls == "keep"

    def given_types(self, own: Iterable[str]) -> tuple[dict[str, str], dict[str, pa.DataType]]:
        """The names of columns by their lower-case names, and the types that the configuration gives to columns.

        Names that differ only in case are one column. It is called as in ``own``, the columns of the table or its files, or
        else as in the configuration.
        """
        called = {name.lower(): name for name in (*self.named_columns, *own)}
        where = f"[tables.{self.name}.schema]"
        given = self.settings.schema.items()
        types = {called[name.lower()]: named_type(text, f"{where} {name}") for name, text in given}
        if self.settings.read.envelope == "debezium" and types.get(LOG_POSITION, pa.string()) != pa.string():
            raise ConfigurationError(
                "bad-setting",
                f"{where}: {LOG_POSITION} is {types[LOG_POSITION]}, but lakeupsert makes it, as text that sorts like the "
                "database's log. Nothing was committed.",
                next=f"remove `{LOG_POSITION}` from {where}",
            )
        return called, types

    def refuse_other(self, spec: TableSpec) -> None:
        """Raises ConfigurationError if ``spec`` is of a table that is configured otherwise: unrelated rows would be merged. Also
        raises it if a setting has no effect in this table."""
        if self.by_folder:
            return
        given = self.settings
        configured, stored = _fixed(given), _fixed(settings_of(spec, given.processed))
        same_delete = given.delete and spec.delete and _meaning(given.delete) == _meaning(spec.delete)
        for setting, value in configured.items():
            if stored[setting] != value and not (setting == "delete" and same_delete):
                tables = setting in ("delete", "groups")
                stored_text = "" if tables else json.dumps(stored[setting], ensure_ascii=False)
                correction = f"correct `{setting}`" if tables else f"set `{setting} = {stored_text}`"
                source = f"[tables.{self.name}]"
                variables = self.origins.get(setting, "")
                if variables.startswith(ENVIRONMENT_PREFIX):
                    source, correction = f"the environment ({variables})", f"unset {variables} or correct its value"
                raise ConfigurationError(
                    "another-table",
                    f"{self.settings.processed} holds a table whose `{setting}` is {_text(stored[setting])}; "
                    f"{source} says {_text(value)}. These settings are fixed when a table is created.",
                    next=f"{correction}, or give [tables.{self.name}] another `processed` path",
                )
        self._refuse_without_effect(spec)


def settings_of(spec: TableSpec, address: str) -> TableSettings:
    """The spec in the words of a configuration. ``landing`` has none, so it is the folder itself, which no output may
    be in either."""
    functions = {one.column: str(one) for one in spec.partition_from}
    return TableSettings(
        landing=address,
        processed=address,
        key=spec.key,
        partition_by=tuple(functions.get(column, column) for column in spec.partition_by),
        order_by=tuple(map(str, spec.ordering)),
        order_in_name=spec.order_in_name,
        ties=spec.ties,
        mode=spec.mode,
        nulls=spec.nulls,
        groups={one.name: GroupSettings(order_by=one.order_by, columns=one.columns) for one in spec.groups},
        key_scope=spec.key_scope,
        history=spec.history,
        versions=spec.versions,
        delete=DeleteSettings(**msgspec.structs.asdict(spec.delete)) if spec.delete else None,
    )


def _fixed(settings: TableSettings) -> dict[str, object]:
    """The settings that are fixed when a table is created, each in one spelling."""
    return {
        "key": settings.key,
        "order_by": tuple(str(Ordering.parse(text)) for text in settings.order_by),
        "order_in_name": settings.order_in_name,
        "ties": settings.ties,
        "mode": settings.mode,
        "nulls": settings.nulls,
        "groups": groups_of(settings),
        "key_scope": settings.key_scope,
        "history": settings.history,
        "versions": settings.versions,
        "partition_by": tuple(str(PartitionColumn.parse(text)) for text in settings.partition_by),
        "delete": settings.delete and msgspec.structs.asdict(settings.delete),
    }


def _meaning(delete: DeleteSettings | DeleteRule) -> dict[str, object]:
    """The rule with `values` and `upserts` as sets: their order and repetitions have no meaning."""
    sets = {
        name: None if found is None else set(found)
        for name, found in (("values", delete.values), ("upserts", delete.upserts))
    }
    return {**msgspec.structs.asdict(delete), **sets}


def _text(value: object) -> str:
    return "absent" if value is None else str(list(value) if isinstance(value, tuple) else value)
