"""What the configuration declares of a table and of its columns."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lakeupsert import clock
from lakeupsert.config import FILE, DeleteSettings, TableSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.evolution import create, nearest, slip_of
from lakeupsert.table.spec import ColumnGroup, DeleteRule, Ordering, PartitionColumn, TableSpec
from lakeupsert.table.types import named_type

_ARRIVAL = ("record_timestamp",)
"""`order_by` where it is not given: files need not have that column."""
_SLIP = 0.85
"""How near a column's name is to one that it is a slip for: `versoin` is as near as that to `version`, `received_at` is not to
`received_by`."""


@dataclass(frozen=True)
class Declaration:
    """What the configuration says of one table."""

    name: str
    settings: TableSettings
    origins: Mapping[str, str]
    """Which settings came from the environment, as `Config.origins` says of a table."""

    def new_spec(self, schema: Any, later: Sequence[Any] = ()) -> TableSpec:
        """The first spec of this table as it is configured, of files with these columns (``pyarrow.Schema``); ``later`` as in
        `create`."""
        settings = self.settings
        typed = {field.name for field in later}
        return create(
            schema,
            later=later,
            table_id=clock.new_id(),
            key=settings.key,
            order_by=settings.order_by,
            order_in_name=settings.order_in_name,
            ties=settings.ties,
            mode=settings.mode,
            nulls=settings.nulls,
            groups=_groups(settings),
            key_scope=settings.key_scope,
            history=settings.history,
            partition_by=settings.partition_by,
            delete=DeleteRule(**msgspec.structs.asdict(settings.delete)) if settings.delete else None,
            stamped=settings.order_in_name is None
            and len(settings.order_by) == 1
            # With groups a batch may bring these alone: then only the default says that arrival is the order.
            and (not settings.groups or settings.order_by == _ARRIVAL)
            # Only a bare name: whoever gives a direction means a column that is there, and may have mistyped it.
            and settings.order_by[0] not in schema.names
            and not re.search(r"\s", settings.order_by[0])
            # So does who gives a type; and a name that the files have one near to is a slip: arrival would decide for good.
            and (
                settings.order_by == _ARRIVAL
                or (settings.order_by[0] not in typed and nearest(settings.order_by[0], schema.names, _SLIP) is None)
            ),
        )

    def stamped_by_name(self, spec: TableSpec) -> list[str]:
        """A warning where a new table is stamped in a column that the configuration names."""
        if not spec.stamped or (spec.order_by == _ARRIVAL and _ARRIVAL[0] not in self.settings.schema):
            return []
        return [
            f"no file has the ordering column {spec.order_by[0]!r}, so rows get their receipt stamp in it: arrival decides, for "
            "good; where that is not meant, correct `order_by` and begin the table anew"
        ]

    def slips(self, columns: Iterable[str], typed: Iterable[str]) -> dict[str, str]:
        """Of ``typed``, names under `schema` without a column, those that are a slip for a column without a type there."""
        given = {name.lower() for name in self.settings.schema}
        others = [column for column in columns if column.lower() not in given]
        named = {name.lower() for name in self.named_besides_types}
        near = {name: slip_of(name, others) for name in typed if name.lower() not in named}
        return {name: close for name, close in near.items() if close is not None}

    def types_alone(self, columns: Iterable[str], typed: Iterable[str]) -> list[str]:
        """A warning for each of ``typed``, names under `schema` that are none of the files' ``columns``, of a new table."""
        named = {name.lower() for name in self.named_besides_types}
        alone = [name for name in typed if name.lower() not in named]
        slips = self.slips(columns, alone)
        return [
            f"no file has the column {name!r} of [tables.{self.name}.schema]; the table has it, and it is null until files "
            f"bring it{f'. Did you mean {slips[name]!r}?' if name in slips else ''}"
            for name in alone
        ]

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns that the configuration names; of a column that it names in several cases the name that counts comes last."""
        return (*self.settings.schema, *self.named_besides_types)

    @property
    def named_besides_types(self) -> tuple[str, ...]:
        """`named_columns` without those that are only given types."""
        settings = self.settings
        partitions = [PartitionColumn.parse(text) for text in settings.partition_by]
        names = [name for one in partitions for name in (one.column, one.source)]
        names += [Ordering.parse(text).column for text in settings.order_by]
        names += [settings.delete.column if settings.delete else None, *settings.key]
        names += [name for group in _groups(settings) for name in (*(o.column for o in group.ordering), *group.columns)]
        return tuple(name for name in names if name)

    @property
    def text_columns(self) -> frozenset[str]:
        """Columns that stay text in text files unless their type is given: keys, so that 0042 stays 0042; the operation."""
        delete = self.settings.delete
        operation = {delete.column} if delete and delete.column else set()
        return (frozenset(self.settings.key) | operation) - frozenset(self.settings.schema)

    def given_types(self, own: Iterable[str]) -> tuple[dict[str, str], dict[str, Any]]:
        """What columns are called, by their names in small letters, and the types that the configuration gives these.

        Names that differ by case alone are one column: as one of ``own`` has it, which are the table's or its files', else as
        the configuration has it.
        """
        called = {name.lower(): name for name in (*self.named_columns, *own)}
        where = f"[tables.{self.name}.schema]"
        given = self.settings.schema.items()
        return called, {called[name.lower()]: named_type(text, f"{where} {name}") for name, text in given}

    def refuse_other(self, spec: TableSpec) -> None:
        """Two tables on one path, or a changed key, would merge rows that have nothing to do with each other."""
        given = self.settings
        configured: dict[str, object] = {
            "key": given.key,
            "order_by": tuple(str(Ordering.parse(text)) for text in given.order_by),
            "order_in_name": given.order_in_name,
            "ties": given.ties,
            "mode": given.mode,
            "nulls": given.nulls,
            "groups": _groups(given),
            "key_scope": given.key_scope,
            "history": given.history,
            "partition_by": tuple(str(PartitionColumn.parse(text)) for text in given.partition_by),
            "delete": given.delete and msgspec.structs.asdict(given.delete),
        }
        made = {one.column: str(one) for one in spec.partition_from}
        stored: dict[str, object] = {
            "key": spec.key,
            "order_by": tuple(map(str, spec.ordering)),
            "order_in_name": spec.order_in_name,
            "ties": spec.ties,
            "mode": spec.mode,
            "nulls": spec.nulls,
            "groups": spec.groups,
            "key_scope": spec.key_scope,
            "history": spec.history,
            "partition_by": tuple(made.get(column, column) for column in spec.partition_by),
            "delete": spec.delete and msgspec.structs.asdict(spec.delete),
        }
        same_delete = given.delete and spec.delete and _meaning(given.delete) == _meaning(spec.delete)
        for setting, value in configured.items():
            if stored[setting] != value and not (setting == "delete" and same_delete):
                tables = setting in ("delete", "groups")
                stored_text = "" if tables else json.dumps(stored[setting], ensure_ascii=False)
                mend = f"correct `{setting}`" if tables else f"set `{setting} = {stored_text}`"
                says = f"[tables.{self.name}]"
                variables = self.origins.get(setting, FILE)
                if variables != FILE:
                    says, mend = f"the environment ({variables})", f"unset {variables} or correct what it says"
                raise ConfigurationError(
                    "another-table",
                    f"{self.settings.processed} holds a table whose `{setting}` is {_text(stored[setting])}; "
                    f"{says} says {_text(value)}. These are fixed when a table is created.",
                    next=f"{mend}, or give [tables.{self.name}] a processed path of its own",
                )


def _groups(settings: TableSettings) -> tuple[ColumnGroup, ...]:
    """In the order of their names, as tables of TOML have none."""
    return tuple(
        ColumnGroup(
            name=name, order_by=tuple(str(Ordering.parse(text)) for text in group.order_by), columns=group.columns
        )
        for name, group in sorted(settings.groups.items())
    )


def _meaning(delete: DeleteSettings | DeleteRule) -> dict[str, object]:
    """What the rule does: `values` and `upserts` are sets, in whatever order, and a value that stands there twice counts once."""
    sets = {
        name: None if found is None else set(found)
        for name, found in (("values", delete.values), ("upserts", delete.upserts))
    }
    return {**msgspec.structs.asdict(delete), **sets}


def _text(value: object) -> str:
    return "absent" if value is None else str(list(value) if isinstance(value, tuple) else value)
