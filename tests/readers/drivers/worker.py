"""The loop of a reader's process: one JSON request a line on stdin, one JSON answer a line on stdout.

A request names the table as `tests.harness.readers.Place` does. Rows travel in an Arrow file whose path the request gives.
Each driver runs in the environment of its reader, which has no lakeupsert.
"""

import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from urllib.request import urlopen

import pyarrow as pa

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # now, as engines print too, and a JVM keeps the stdout that it begins with


@dataclass(frozen=True)
class Request:
    """What to read or to write.

    Attributes:
        columns: names of top-level columns; all if it is None.
        version: a version of Delta, or the id of an Iceberg snapshot; the newest if it is None.
        query: instead of ``columns``, a SELECT from `{table}`.
        statement: what `write` runs.
    """

    format: str
    root: str
    catalog: str
    name: str
    columns: list[str] | None = None
    version: int | None = None
    query: str | None = None
    statement: str = ""

    def select(self, source: str, quote: str = '"') -> str:
        if self.query is not None:
            return self.query.format(table=source)
        columns = ", ".join(f"{quote}{name}{quote}" for name in self.columns) if self.columns else "*"
        return f"SELECT {columns} FROM {source}"

    def iceberg_metadata(self) -> str:
        """The path of the metadata file that the catalog names, for readers that do not know this catalog."""
        catalog, namespace, table = self.name.split(".")
        if self.has_rest_catalog:
            with urlopen(f"{self.catalog}/v1/namespaces/{namespace}/tables/{table}") as answer:
                return path_of(json.load(answer)["metadata-location"])
        with closing(sqlite3.connect(self.catalog)) as connection:
            (found,) = connection.execute(
                "SELECT metadata_location FROM iceberg_tables"
                " WHERE catalog_name = ? AND table_namespace = ? AND table_name = ?",
                (catalog, namespace, table),
            ).fetchone()
        return path_of(found)

    @property
    def has_rest_catalog(self) -> bool:
        return self.catalog.startswith("http")


def path_of(address: str) -> str:
    return "/" + address.removeprefix("file:").lstrip("/")


def serve(read: Callable[[Request], pa.Table], write: Callable[[Request], None] | None = None) -> None:
    """Answer requests until stdin ends."""
    print(json.dumps({"ready": True}), file=ANSWERS)
    for line in sys.stdin:
        asked = json.loads(line)
        path = asked.pop("path", None)
        began = time.perf_counter()
        try:
            request = Request(**asked)
            if path is None:
                write(request)
            else:
                rows = read(request)
                with pa.OSFile(path, "wb") as out, pa.ipc.new_file(out, rows.schema) as writer:
                    writer.write_table(rows)
            answer = {}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({**answer, "seconds": time.perf_counter() - began}), file=ANSWERS)
