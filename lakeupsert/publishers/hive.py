"""A table of a Hive metastore, by thrift. The client is the one that pyiceberg brings."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import (
    AlreadyExistsException,
    EnvironmentContext,
    FieldSchema,
    InvalidObjectException,
    InvalidOperationException,
    MetaException,
    NoSuchObjectException,
    Partition,
    SerDeInfo,
    StorageDescriptor,
)
from hive_metastore.ttypes import Table as HiveTable
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TTransportException

from lakeupsert.config import HiveSettings
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.publishers import PublishedTable
from lakeupsert.publishers.hive_types import Column
from lakeupsert.publishers.symlink import (
    INPUT_FORMAT,
    OUTPUT_FORMAT,
    SERDE,
    SPEC,
    CatalogBusyError,
    Entry,
    Shape,
    Steps,
    SymlinkPublisher,
    Values,
    batches,
)
from lakeupsert.retries import CATALOG_ANSWER_SECONDS, CATALOG_CONNECT_SECONDS

READ_TOGETHER = 1000
"""Partitions of one answer."""
_KEEP_STATISTICS = EnvironmentContext({"DO_NOT_UPDATE_STATS": "true"})
"""Otherwise the metastore lists each partition's folder and takes the size of the manifest for that of the data."""
_OF_THE_MOMENT = (
    "partition keys can not be changed",
    "invalid partition key",
    "deadlock",
    "lock could not be obtained",
    "lock wait",
)
"""Words of refusals by a metastore that changes the table for somebody else. Meanwhile it may read the table without partition
columns, or find it locked in its database (Derby, MySQL, PostgreSQL). A later try may succeed."""
_REFUSALS = (
    AlreadyExistsException,
    InvalidObjectException,
    InvalidOperationException,
    MetaException,
    NoSuchObjectException,
)

logging.getLogger("thrift.transport.TSocket").setLevel(logging.CRITICAL)  # what it logs is in our error


def open_publisher(table: PublishedTable) -> SymlinkPublisher:
    assert table.settings.hive is not None, "the configuration asks for the section"
    return SymlinkPublisher(table, HiveCatalog(table.settings.hive))


@dataclass(frozen=True)
class HiveCatalog:
    """One table of the metastore that ``settings`` name."""

    settings: HiveSettings
    kind = "hive"

    @property
    def where(self) -> str:
        return f"The table {self.settings.database}.{self.settings.table} of the Hive metastore {self.settings.uri}"

    def parameters(self) -> Mapping[str, str] | None:
        with self._client("get_table") as client:
            found = self._find(client)
            return found and dict(found.parameters)

    def create(self, shape: Shape, parameters: Mapping[str, str]) -> None:
        table = HiveTable(
            dbName=self.settings.database,
            tableName=self.settings.table,
            owner="lakeupsert",
            sd=_descriptor(shape.location, shape.columns),
            partitionKeys=_fields(shape.partition_by),
            tableType="EXTERNAL_TABLE",
            parameters=dict(parameters),
        )
        with self._client("create_table") as client, suppress(AlreadyExistsException):
            client.create_table(table)

    def update(
        self, parameters: Mapping[str, str], columns: Sequence[Column] | None = None, location: str | None = None
    ) -> None:
        with self._client("alter_table") as client:
            table = client.get_table(self.settings.database, self.settings.table)
            if location is None and not table.partitionKeys:  # only a table without partition columns gets a location
                raise self._busy("alter_table", "it shows the table without partition columns")
            table.parameters = {**table.parameters, **parameters}
            if columns is not None:
                table.sd.cols = _fields(columns)
            if location is not None:
                table.sd.location = location
            database, name = self.settings.database, self.settings.table
            try:
                client.alter_table_with_environment_context(database, name, table, _KEEP_STATISTICS)
            except InvalidOperationException as e:
                if columns is None or _is_of_the_moment(e):
                    raise
                raise ConfigurationError(  # it takes a wider number in place, and no struct that grew
                    "catalog-refused",
                    f"{self.where}: the metastore refused the new columns: {e.message}. It was not changed.",
                    next="run `lakeupsert publish --to hive --reset`, which drops the table and creates it again; meanwhile "
                    "readers find no table",
                ) from e

    def drop(self) -> None:
        with self._client("drop_table") as client, suppress(NoSuchObjectException):
            client.drop_table(self.settings.database, self.settings.table, False)

    def partitions(self) -> Mapping[Values, Entry]:
        found = {}
        with self._client("get_partitions") as client:
            names = client.get_partition_names(self.settings.database, self.settings.table, -1)
            for first in range(0, len(names), READ_TOGETHER):
                some = names[first : first + READ_TOGETHER]
                for one in client.get_partitions_by_names(self.settings.database, self.settings.table, some):
                    found[tuple(one.values)] = Entry(one.sd.location, one.parameters.get(SPEC, ""))
        return found

    def apply(self, steps: Steps, columns: Sequence[Column]) -> list[str]:
        """Partitions that are gone are dropped one by one, which needs no name in Hive's encoding."""
        database, table = self.settings.database, self.settings.table
        refused = []
        with self._client("add_partitions, alter_partitions or drop_partition") as client:
            for batch in batches([*steps.add.items()]):
                try:
                    client.add_partitions([self._partition(*item, columns) for item in batch])
                except AlreadyExistsException as e:
                    refused.append(str(e.message))
            for batch in batches([*steps.change.items()]):
                try:
                    partitions = [self._partition(*item, columns) for item in batch]
                    client.alter_partitions_with_environment_context(database, table, partitions, _KEEP_STATISTICS)
                except InvalidOperationException as e:  # one of them was dropped
                    refused.append(str(e.message))
            for values in steps.gone:
                with suppress(NoSuchObjectException):
                    client.drop_partition(database, table, list(values), False)
        return refused

    def _partition(self, values: Values, entry: Entry, columns: Sequence[Column]) -> Partition:
        return Partition(
            values=list(values),
            dbName=self.settings.database,
            tableName=self.settings.table,
            sd=_descriptor(entry.location, columns),
            parameters=entry.parameters,
        )

    def _find(self, client: Client) -> HiveTable | None:
        """None if there is no such table. Raises NoSuchObjectException if there is no such database."""
        try:
            return client.get_table(self.settings.database, self.settings.table)
        except NoSuchObjectException:
            client.get_database(self.settings.database)
            return None

    @contextmanager
    def _client(self, calls: str) -> Iterator[Client]:
        """A connection for some ``calls``."""
        address = urlsplit(self.settings.uri)
        socket = TSocket(address.hostname, address.port)
        socket.setTimeout(1000 * CATALOG_CONNECT_SECONDS)
        transport = TBufferedTransport(socket)
        try:
            transport.open()
            socket.setTimeout(1000 * CATALOG_ANSWER_SECONDS)
            yield Client(TBinaryProtocol(transport))
        except (TTransportException, OSError) as e:
            raise TryAgainError(
                "catalog-unreachable",
                f"{self.where}: no answer to {calls}: {e}. It may show a part of the changes.",
                next="check the network and the metastore, then run `lakeupsert publish --to hive`",
            ) from e
        except (*_REFUSALS, TException) as e:
            words = str(getattr(e, "message", None) or repr(e))
            if _is_of_the_moment(e):
                raise self._busy(calls, words) from e
            raise ConfigurationError(
                "catalog-refused",
                f"{self.where}: the metastore refused {calls}: {words}.",
                next="correct what the message says about the metastore or [tables.NAME.hive], then run "
                "`lakeupsert publish --to hive`",
            ) from e
        finally:
            transport.close()

    def _busy(self, calls: str, words: str) -> CatalogBusyError:
        return CatalogBusyError(
            "catalog-busy",
            f"{self.where}: the metastore refused {calls} while it changes the table for somebody else: {words.rstrip('.')}. "
            "Some partitions may show the newest snapshot already.",
            next="run `lakeupsert publish --to hive`",
        )


def _is_of_the_moment(e: Exception) -> bool:
    return any(words in str(getattr(e, "message", "")).lower() for words in _OF_THE_MOMENT)


def _fields(columns: Sequence[Column]) -> list[FieldSchema]:
    return [FieldSchema(column.name, column.type, None) for column in columns]


def _descriptor(location: str, columns: Sequence[Column]) -> StorageDescriptor:
    return StorageDescriptor(
        cols=_fields(columns),
        location=location,
        inputFormat=INPUT_FORMAT,
        outputFormat=OUTPUT_FORMAT,
        numBuckets=-1,
        serdeInfo=SerDeInfo(serializationLib=SERDE, parameters={"serialization.format": "1"}),
        bucketCols=[],
        sortCols=[],
        parameters={},
    )
