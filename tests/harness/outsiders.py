"""Programs that know nothing of lakeupsert: what they see of a table by each publisher, and what they may do to it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import TableNotFoundError
from hive_metastore import ttypes
from hive_metastore.ThriftHiveMetastore import Client
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table as IcebergTable
from pyiceberg.types import LongType
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport

from lakeupsert import clock
from lakeupsert.config import GlueSettings, HiveSettings, PublisherName
from lakeupsert.pipeline.publishers import publisher
from lakeupsert.publishers import glue, hive, iceberg_catalog, symlink
from lakeupsert.storage import UnknownOutcomeError, open_store
from tests.harness.faults import Points
from tests.harness.lake import Lake, delta_rows, iceberg_settings, iceberg_table
from tests.harness.servers import Server

Values = tuple[str, ...]
Rows = list[dict[str, Any]]
Columns = list[list[tuple[str, str]]]
"""Of a table in a catalog, and then of each partition: names and types."""

UNFIT: Mapping[str, pa.DataType] = {
    "unsigned": pa.uint32(),
    "nanoseconds": pa.timestamp("ns"),
    "time": pa.time64("us"),
    "inside": pa.list_(pa.uint8()),
}
"""Columns that no format of other engines has."""


def in_order(rows: Rows) -> Rows:
    """Rows of a `Lake` in the order of partition and key."""
    return sorted(rows, key=lambda one: (one["d"], one["k"], one["l"]))


def show_first(lake: Lake, name: PublisherName) -> None:
    """Let a publisher show the first snapshot alone."""
    first = lake.table.objects.snapshots.get(0)
    assert first is not None
    publisher(lake.opened, name).catch_up(first)


class Outsider:
    """Sees the tables that one publisher shows.

    Attributes:
        name: of the publisher.
        points: see each call of the publisher's catalog, as those of a lake see the calls of its stores.
        strategies: that merge what the publisher can show.
        unfit: columns that the publisher must refuse, by name.
        switches_parts: its readers may see one partition of a snapshot, and another one of the next.
        changes: what it may do to a table.
        stops: the code of the error by which the publisher lets its changes be; None: it undoes them.
        taken: the code of the error if its table has the name that the publisher is told; None: there are no names.
    """

    name: ClassVar[PublisherName]
    strategies: ClassVar[tuple[str, ...]] = ("delta", "rewrite")
    unfit: ClassVar[Mapping[str, pa.DataType]] = UNFIT
    switches_parts: ClassVar[bool] = False
    changes: tuple[Callable[[Lake], None], ...]
    stops: ClassVar[str | None] = None
    taken: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.points = Points()

    def settings(self, root: Path) -> dict[str, Any]:
        """Those of a lake below ``root`` that the publisher shows at a new place."""
        raise NotImplementedError

    def restore(self, lake: Lake, *, shown: bool) -> None:
        """Let the publisher show the first snapshot again, or nothing, if its tables are not in the lake's folder."""

    def rows(self, lake: Lake) -> Rows | None:
        """The rows that it reads, in order; None if it finds no table."""
        raise NotImplementedError

    def numbers(self, lake: Lake) -> list[int] | None:
        """The snapshots that it can choose from; None: it sees the newest one alone."""
        return None


class DeltaOutsider(Outsider):
    """delta-rs."""

    name = "delta"
    stops = "foreign-delta-commit"

    def __init__(self) -> None:
        super().__init__()
        self.changes = (self._commit,)

    def settings(self, root: Path) -> dict[str, Any]:
        return {"publishers": ("delta",)}

    def rows(self, lake: Lake) -> Rows | None:
        with suppress(TableNotFoundError):
            return delta_rows(lake.settings.processed)
        return None

    def numbers(self, lake: Lake) -> list[int]:
        return sorted(int(path.stem) for path in self._log(lake).glob("*.json"))

    def _commit(self, lake: Lake) -> None:
        (self._log(lake) / f"{self.numbers(lake)[-1] + 1:020}.json").write_text('{"commitInfo":{"timestamp":1}}\n')

    def _log(self, lake: Lake) -> Path:
        return Path(lake.settings.processed) / "_delta_log"


class _FaultyCatalog:
    """A catalog of pyiceberg with a point at each call."""

    def __init__(self, catalog: Catalog, points: Points) -> None:
        self._catalog = catalog
        self._points = points

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._catalog, name)
        if name not in ("load_table", "register_table", "commit_table", "create_namespace", "drop_table"):
            return found

        def call(*arguments: Any) -> Any:
            try:
                with self._points.at(f"catalog {name}", commit=name == "commit_table"):
                    return found(*arguments)
            except UnknownOutcomeError as e:
                raise CommitStateUnknownException(str(e)) from e

        return call


class IcebergOutsider(Outsider):
    """pyiceberg, with a catalog on SQLite beside the zones."""

    name = "iceberg"
    unfit: ClassVar[Mapping[str, pa.DataType]] = {
        **UNFIT,
        "long": pa.decimal256(40, 2),
        "fixed": pa.binary(4),
        "lasting": pa.duration("s"),
        "seconds": pa.timestamp("s"),
        "milliseconds": pa.timestamp("ms", "UTC"),
    }
    stops = "foreign-iceberg-commit"
    taken = "iceberg-table-taken"

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        opened = iceberg_catalog._open
        patch.setattr(iceberg_catalog, "_open", lambda settings: _FaultyCatalog(opened(settings), self.points))
        self.changes = tuple(partial(self._change, one) for one in (_append_a_row, _add_a_column, _divide_otherwise))

    def settings(self, root: Path) -> dict[str, Any]:
        return {"publishers": ("iceberg",), "iceberg": iceberg_settings(root)}

    def rows(self, lake: Lake) -> Rows | None:
        table = self._table(lake)
        return in_order(table.scan().to_arrow().to_pylist()) if table else None

    def numbers(self, lake: Lake) -> list[int]:
        table = self._table(lake)
        snapshots = table.metadata.snapshots if table else ()
        return [int(s.summary["lakeupsert.snapshot"] or -1) for s in snapshots if s.summary]

    def _table(self, lake: Lake) -> IcebergTable | None:
        assert lake.settings.iceberg is not None
        return iceberg_table(lake.settings.iceberg)

    def _change(self, change: Callable[[IcebergTable], None], lake: Lake) -> None:
        assert lake.settings.iceberg is not None
        with SqlCatalog("lake", uri=lake.settings.iceberg.properties["uri"]) as catalog:
            table = catalog.load_table(lake.settings.iceberg.table)
            table.io = PyArrowFileIO()
            change(table)


def _append_a_row(table: IcebergTable) -> None:
    schema = table.schema().as_arrow()
    values = {name: [None] for name in schema.names} | {"d": [date(2020, 1, 1)], "k": ["x"], "l": [1]}
    table.append(pa.table({name: pa.array(values[name], schema.field(name).type) for name in schema.names}, schema))


def _add_a_column(table: IcebergTable) -> None:
    with table.update_schema() as update:
        update.add_column("more", LongType())


def _divide_otherwise(table: IcebergTable) -> None:
    with table.update_spec() as update:
        update.add_identity("l")


class CatalogOutsider(Outsider):
    """Asks a catalog for partitions, reads the manifest in each one's folder, and opens the files that it lists.

    Attributes:
        adds, changes_partitions: the calls by which the publisher adds and changes partitions.
    """

    strategies = ("rewrite",)
    unfit: ClassVar[Mapping[str, pa.DataType]] = {**UNFIT, "fields": pa.struct({"a b": pa.int64()}), "a,b": pa.int64()}
    switches_parts = True
    taken = "foreign-table"
    adds: ClassVar[str]
    changes_partitions: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.changes = (self._drop_and_add,)

    def settings(self, root: Path) -> dict[str, Any]:
        return {"publishers": (self.name,), **self.section(f"t_{clock.new_id()[:12]}")}

    def section(self, table: str) -> dict[str, Any]:
        """The settings of the catalog for a table of that name."""
        raise NotImplementedError

    def restore(self, lake: Lake, *, shown: bool) -> None:
        lake.mend(lambda row: False, **self.settings(lake.root))
        if shown:
            show_first(lake, self.name)

    def rows(self, lake: Lake) -> Rows | None:
        found = self.partitions(self.table(lake))
        if found is None:
            return None
        # A retyped column has the name there that it has in files.
        there = [name for name, _ in self.columns(self.table(lake))[0]]
        stored = (name for name in lake.table.to_arrow().schema.names if name not in lake.rules.partition)
        names = dict(zip(stored, there, strict=False))
        own = {name: column for column, name in names.items()}
        rows = (one for some in rows_in(lake, found, names).values() for one in some)
        return in_order([{own.get(name, name): value for name, value in one.items()} for one in rows])

    def table(self, lake: Lake) -> str:
        return str(getattr(lake.settings, self.name).table)

    def partitions(self, table: str) -> dict[Values, str] | None:
        """The location of each partition, or of the table if it has no partition columns; None if there is no table."""
        raise NotImplementedError

    def columns(self, table: str) -> Columns:
        raise NotImplementedError

    def parameters(self, table: str) -> dict[str, str]:
        raise NotImplementedError

    def create_table(self, table: str) -> None:
        """Without partitions."""
        raise NotImplementedError

    def drop_partition(self, table: str, values: Values) -> None:
        raise NotImplementedError

    def add_partition(self, table: str, values: Values) -> None:
        """At a place that has nothing."""
        raise NotImplementedError

    def _drop_and_add(self, lake: Lake) -> None:
        table = self.table(lake)
        here, other, *_ = sorted(self.partitions(table) or ())
        self.drop_partition(table, here)
        self.add_partition(table, ("2019-01-01",))
        self.drop_partition(table, other)
        self.add_partition(table, other)


class GlueOutsider(CatalogOutsider):
    """Of Glue, as moto has it."""

    name = "glue"
    adds = "batch_create_partition"
    changes_partitions = "batch_update_partition"

    def __init__(self, patch: pytest.MonkeyPatch, server: Server) -> None:
        super().__init__()
        for name, value in server.env.items():
            patch.setenv(name, value)
        self._client = boto3.client("glue")
        with suppress(self._client.exceptions.AlreadyExistsException):
            self._client.create_database(DatabaseInput={"Name": "lake"})
        send = glue.GlueCatalog._call

        def call(catalog: glue.GlueCatalog, operation: str, **parameters: Any) -> Any:
            with self.points.at(f"catalog {operation}"):
                return send(catalog, operation, **parameters)

        patch.setattr(glue.GlueCatalog, "_call", call)

    def section(self, table: str) -> dict[str, Any]:
        return {"glue": GlueSettings(database="lake", table=table)}

    def partitions(self, table: str) -> dict[Values, str] | None:
        pages = self._client.get_paginator("get_partitions").paginate(DatabaseName="lake", TableName=table)
        with suppress(self._client.exceptions.EntityNotFoundException):
            whole = self._client.get_table(DatabaseName="lake", Name=table)["Table"]
            if not whole["PartitionKeys"]:
                return {(): whole["StorageDescriptor"]["Location"]}
            return {
                tuple(p["Values"]): p["StorageDescriptor"]["Location"] for page in pages for p in page["Partitions"]
            }
        return None

    def columns(self, table: str) -> Columns:
        found = [self._client.get_table(DatabaseName="lake", Name=table)["Table"]]
        found += self._client.get_partitions(DatabaseName="lake", TableName=table)["Partitions"]
        return [[(c["Name"], c["Type"]) for c in one["StorageDescriptor"]["Columns"]] for one in found]

    def parameters(self, table: str) -> dict[str, str]:
        return dict(self._client.get_table(DatabaseName="lake", Name=table)["Table"]["Parameters"])

    def create_table(self, table: str) -> None:
        self._client.create_table(DatabaseName="lake", TableInput={"Name": table, "Parameters": {"owner": "another"}})

    def drop_partition(self, table: str, values: Values) -> None:
        self._client.delete_partition(DatabaseName="lake", TableName=table, PartitionValues=list(values))

    def add_partition(self, table: str, values: Values) -> None:
        entry = {"Values": list(values), "StorageDescriptor": {"Location": "file:///nowhere"}}
        self._client.create_partition(DatabaseName="lake", TableName=table, PartitionInput=entry)


class HiveOutsider(CatalogOutsider):
    """Of a Hive metastore at ``uri``."""

    name = "hive"
    adds = "add_partitions"
    changes_partitions = "alter_partitions_with_environment_context"

    def __init__(self, patch: pytest.MonkeyPatch, uri: str) -> None:
        super().__init__()
        self.uri = uri
        outsider = self

        class FaultyClient:
            def __init__(self, protocol: Any) -> None:
                self._client = Client(protocol)

            def __getattr__(self, name: str) -> Any:
                def call(*arguments: object) -> object:
                    refusal = None
                    with outsider.points.at(f"catalog {name}"):
                        try:
                            answer = getattr(self._client, name)(*arguments)
                        except TException as e:  # can't pass through a context manager, which would change it
                            refusal = e
                    if refusal is not None:
                        raise refusal
                    return answer

                return call

        patch.setattr(hive, "Client", FaultyClient)

    def section(self, table: str) -> dict[str, Any]:
        return {"hive": HiveSettings(uri=self.uri, database="default", table=table)}

    def partitions(self, table: str) -> dict[Values, str] | None:
        with self._client() as client:
            try:
                whole = client.get_table("default", table)
                if not whole.partitionKeys:
                    return {(): whole.sd.location}
                return {tuple(p.values): p.sd.location for p in client.get_partitions("default", table, -1)}
            except ttypes.NoSuchObjectException:
                return None

    def columns(self, table: str) -> Columns:
        with self._client() as client:
            found = [client.get_table("default", table), *client.get_partitions("default", table, -1)]
        return [[(c.name, c.type) for c in one.sd.cols] for one in found]

    def parameters(self, table: str) -> dict[str, str]:
        with self._client() as client:
            return dict(client.get_table("default", table).parameters)

    def create_table(self, table: str) -> None:
        descriptor = ttypes.StorageDescriptor(
            cols=[ttypes.FieldSchema("a", "int", None)],
            serdeInfo=ttypes.SerDeInfo(serializationLib=symlink.SERDE, parameters={}),
            inputFormat=symlink.INPUT_FORMAT,
            outputFormat=symlink.OUTPUT_FORMAT,
            bucketCols=[],
            sortCols=[],
            parameters={},
        )
        with self._client() as client:
            client.create_table(
                ttypes.Table(
                    dbName="default",
                    tableName=table,
                    sd=descriptor,
                    partitionKeys=[],
                    parameters={"owner": "another"},
                    tableType="MANAGED_TABLE",
                )
            )

    def drop_partition(self, table: str, values: Values) -> None:
        with self._client() as client:
            client.drop_partition("default", table, list(values), False)

    def add_partition(self, table: str, values: Values) -> None:
        with self._client() as client:
            client.append_partition("default", table, list(values))

    def _client(self) -> AbstractContextManager[Any]:
        address = urlsplit(self.uri)
        transport = TBufferedTransport(TSocket(address.hostname, address.port))
        transport.open()
        client = Client(TBinaryProtocol(transport))
        client.close = transport.close  # no generator: thrift's exceptions can't pass through one
        return closing(client)


def rows_in(lake: Lake, partitions: Mapping[Values, str], names: Mapping[str, str] = {}) -> dict[str, Rows]:
    """The rows that each partition's manifest leads to, by its values. ``names``: those in files, where they differ."""
    store = open_store(lake.settings.processed)
    root = store.uri().rstrip("/") + "/"
    order = [names.get(name, name) for name in lake.table.to_arrow().schema.names]
    found: dict[str, Rows] = {}
    for values, kept in partitions.items():
        location = kept.replace("file:/", "file:///") if kept.startswith("file:/") else kept
        assert location.startswith(root)
        files = store.get(f"{location.removeprefix(root)}/manifest").decode().splitlines()
        assert all(file.startswith(root) for file in files)
        some: Rows = []
        for file in files:
            with store.open(file.removeprefix(root)) as source:
                some += pq.read_table(source).to_pylist()
        assert some or not values, f"{values} is shown without a row"
        parsed = {
            column: date.fromisoformat(text) if column == "d" else int(text)
            for column, text in zip(lake.rules.partition, values, strict=True)
        }
        some = [{**one, **parsed} for one in some]
        found["/".join(values)] = sorted(
            ({name: one.get(name) for name in order} for one in some), key=lambda one: (one["k"], one["l"])
        )
    return found


@contextmanager
def new_outsider(request: pytest.FixtureRequest) -> Iterator[Outsider]:
    """That of the publisher that the fixture's parameter names."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "glue":
            yield GlueOutsider(patch, request.getfixturevalue("moto"))
        elif request.param == "hive":
            yield HiveOutsider(patch, request.getfixturevalue("metastore"))
        else:
            yield IcebergOutsider(patch) if request.param == "iceberg" else DeltaOutsider()
