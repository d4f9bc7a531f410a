"""A table of the AWS Glue Data Catalog, by boto3.

Settings  credentials, endpoint and, unless `region` is set, the region are boto3's own
Retries   boto3's, for throttling and lost answers. A batch names the partitions that it refused
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import boto3
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lakeupsert.config import GlueSettings
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.publishers import PublishedTable
from lakeupsert.publishers.hive_types import Column
from lakeupsert.publishers.symlink import (
    INPUT_FORMAT,
    OUTPUT_FORMAT,
    SERDE,
    SPEC,
    Entry,
    Shape,
    Steps,
    SymlinkPublisher,
    Values,
    batches,
)
from lakeupsert.retries import CATALOG_ANSWER_SECONDS, CATALOG_CONNECT_SECONDS, GLUE_ATTEMPTS
from lakeupsert.storage.clients import kept

DELETED_TOGETHER = 25
"""Partitions that Glue deletes in a request."""
_INPUT = frozenset(
    {
        "Name", "Description", "Owner", "Retention", "StorageDescriptor", "PartitionKeys", "TableType", "Parameters",
    }
)  # fmt: skip
"""The fields of a table that may be sent back."""
_LATER = frozenset(
    {
        "ConcurrentModificationException", "InternalServiceException", "OperationTimeoutException", "ThrottlingException",
    }
)  # fmt: skip

Json = Any
"""Glue's answers, which boto3 does not type."""


def open_publisher(table: PublishedTable) -> SymlinkPublisher:
    assert table.settings.glue is not None, "the configuration asks for the section"
    return SymlinkPublisher(table, GlueCatalog(table.settings.glue))


@dataclass(frozen=True)
class GlueCatalog:
    """One table of the Glue Data Catalog that ``settings`` name."""

    settings: GlueSettings
    kind = "glue"

    @property
    def where(self) -> str:
        return f"The table {self.settings.database}.{self.settings.table} of Glue"

    def parameters(self) -> Mapping[str, str] | None:
        found = self._table()
        return found and dict(found.get("Parameters", {}))

    def create(self, shape: Shape, parameters: Mapping[str, str]) -> None:
        table = {
            "Name": self.settings.table,
            "TableType": "EXTERNAL_TABLE",
            "Parameters": dict(parameters),
            "PartitionKeys": _columns(shape.partition_by),
            "StorageDescriptor": _descriptor(shape.location, shape.columns),
        }
        database = self.settings.database
        self._call("create_table", allowed="AlreadyExistsException", DatabaseName=database, TableInput=table)

    def update(
        self, parameters: Mapping[str, str], columns: Sequence[Column] | None = None, location: str | None = None
    ) -> None:
        found = self._call("get_table", **self._table_name)["Table"]
        table = {name: value for name, value in found.items() if name in _INPUT}
        table["Parameters"] = {**table.get("Parameters", {}), **parameters}
        if columns is not None:
            table["StorageDescriptor"] = {**table["StorageDescriptor"], "Columns": _columns(columns)}
        if location is not None:
            table["StorageDescriptor"] = {**table["StorageDescriptor"], "Location": location}
        # Without its earlier versions, of which a table may have 100,000.
        self._call("update_table", DatabaseName=self.settings.database, TableInput=table, SkipArchive=True)

    def drop(self) -> None:
        self._call("delete_table", allowed="EntityNotFoundException", **self._table_name)

    def partitions(self) -> Mapping[Values, Entry]:
        found: dict[Values, Entry] = {}
        token: dict[str, str] = {}
        while True:
            answer = self._call("get_partitions", **self._name, ExcludeColumnSchema=True, **token)
            for one in answer["Partitions"]:
                location = one["StorageDescriptor"].get("Location", "")
                found[tuple(one["Values"])] = Entry(location, one.get("Parameters", {}).get(SPEC, ""))
            if not answer.get("NextToken"):
                return found
            token = {"NextToken": answer["NextToken"]}

    def apply(self, steps: Steps, columns: Sequence[Column]) -> list[str]:
        refused = []
        for batch in batches([*steps.add.items()]):
            inputs = [_partition(*item, columns) for item in batch]
            refused += self._batch("batch_create_partition", PartitionInputList=inputs)
        for batch in batches([*steps.change.items()]):
            entries = [
                {"PartitionValueList": list(values), "PartitionInput": _partition(values, entry, columns)}
                for values, entry in batch
            ]
            refused += self._batch("batch_update_partition", Entries=entries)
        gone = [{"Values": list(values)} for values in steps.gone]
        for first in range(0, len(gone), DELETED_TOGETHER):
            refused += self._batch("batch_delete_partition", PartitionsToDelete=gone[first : first + DELETED_TOGETHER])
        return refused

    @property
    def _table_name(self) -> dict[str, str]:
        return {"DatabaseName": self.settings.database, "Name": self.settings.table}

    @property
    def _name(self) -> dict[str, str]:
        """The table's, for calls about its partitions."""
        return {"DatabaseName": self.settings.database, "TableName": self.settings.table}

    def _batch(self, operation: str, **parameters: Json) -> list[str]:
        """Why some partitions of a batch were refused. One that is there or gone already is found by the next comparison."""
        errors = [one["ErrorDetail"] for one in self._call(operation, **self._name, **parameters).get("Errors", ())]
        return [f"{error.get('ErrorCode')}: {error.get('ErrorMessage')}" for error in errors]

    def _table(self) -> Json:
        """The table; None if there is none. Raises ConfigurationError if there is no such database."""
        answer = self._call("get_table", allowed="EntityNotFoundException", **self._table_name)
        if answer is None:
            self._call("get_database", Name=self.settings.database)
        return answer and answer["Table"]

    def _call(self, operation: str, *, allowed: str = "", **parameters: object) -> Json:
        """Glue's answer; None if it refuses with the ``allowed`` code."""
        try:
            return getattr(_client(self.settings.region), operation)(**parameters)
        except ClientError as e:
            if e.response["Error"].get("Code") == allowed:
                return None
            raise self._refusal(operation, e) from e
        except BotoCoreError as e:
            raise self._failure(operation, e) from e

    def _refusal(self, operation: str, e: ClientError) -> LakeupsertError:
        error, status = e.response["Error"], e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if error.get("Code") in _LATER or status >= 500:
            return self._failure(operation, e)
        action = "glue:" + "".join(part.capitalize() for part in operation.split("_"))
        return ConfigurationError(
            "catalog-refused",
            f"{self.where}: Glue refused {action}: {error.get('Code')}: {error.get('Message')}.",
            next="correct what the message says about [tables.NAME.glue] or the role's permissions (docs/HIVE.md lists them), "
            "then run `lakeupsert publish --to glue`",
        )

    def _failure(self, operation: str, e: Exception) -> LakeupsertError:
        """The error for a request without an answer, or that could not be sent."""
        if isinstance(e, ClientError | exceptions.ConnectionError | exceptions.HTTPClientError):
            return TryAgainError(
                "catalog-unreachable",
                f"{self.where}: no answer to {operation}: {e}. It may show a part of the changes.",
                next="check the network, then run `lakeupsert publish --to glue`",
            )
        return ConfigurationError(
            "catalog-refused",
            f"{self.where}: {e}. It was not changed.",
            next="correct the region in [tables.NAME.glue], AWS_DEFAULT_REGION, AWS_PROFILE, or give this machine a role",
        )


@kept("AWS_", 4)
def _client(region: str | None) -> Json:
    """A client, which takes 0.2 s to make."""
    config = Config(
        connect_timeout=CATALOG_CONNECT_SECONDS,
        read_timeout=CATALOG_ANSWER_SECONDS,
        retries={"mode": "standard", "total_max_attempts": GLUE_ATTEMPTS},
    )
    # its own session, because the default one is not thread-safe
    return boto3.session.Session(region_name=region).client("glue", config=config)


def _columns(columns: Sequence[Column]) -> list[dict[str, str]]:
    return [{"Name": column.name, "Type": column.type} for column in columns]


def _descriptor(location: str, columns: Sequence[Column]) -> Json:
    return {
        "Columns": _columns(columns),
        "Location": location,
        "InputFormat": INPUT_FORMAT,
        "OutputFormat": OUTPUT_FORMAT,
        "SerdeInfo": {"SerializationLibrary": SERDE, "Parameters": {"serialization.format": "1"}},
    }


def _partition(values: Values, entry: Entry, columns: Sequence[Column]) -> Json:
    return {
        "Values": list(values),
        "StorageDescriptor": _descriptor(entry.location, columns),
        "Parameters": entry.parameters,
    }
