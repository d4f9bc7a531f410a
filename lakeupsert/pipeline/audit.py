"""Queries of the configuration that must find no row in what readers are to see next.

Reads     rows of the next snapshot and of the published one, as far as the queries ask for them; control files
Writes    nothing
Repeat    safe
"""

from collections.abc import Mapping
from itertools import chain, islice

import pyarrow as pa
import pyarrow.csv as pa_csv

from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.phrases import count
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.query import query
from lakeupsert.read.view import View
from lakeupsert.storage import NotFoundError, open_store
from lakeupsert.table.snapshot import Snapshot

ROWS_NAMED = 3
"""In the error of a query."""
PUBLISHED = "published"
NOT_ASKED = (
    "All batches are merged, and the newest is not published. A query of the setting `audit` may hold it: "
    "`lakeupsert publish` asks them."
)
"""For `status`, which runs no query."""


class AuditError(RefusedError):
    """A query finds a row. The next batch may repair that."""


def audit(table: OpenTable, shown: Snapshot | None, new: Snapshot) -> None:
    """Ask the queries of the setting `audit`.

    Raises:
        AuditError: a query finds a row (``audit-failed``).
        ConfigurationError: a query can't be run, or a control file can't be read.
    """
    settings = table.settings.audit
    if settings is None:
        return
    objects = table.history.objects
    nothing = Snapshot(batch=0, spec_version=new.spec_version)
    tables: dict[str, View | pa.Table] = {
        name: View(objects, table.history.spec(one.spec_version), one, None)
        for name, one in ((table.name, new), (PUBLISHED, shown or nothing))
    }
    tables |= {name: _control_file(name, address) for name, address in settings.files.items()}
    for name, sql in settings.queries.items():
        try:
            with query(tables, sql) as rows:
                found = chain.from_iterable(batch.to_pylist() for batch in rows)
                first = list(islice(found, ROWS_NAMED))
                more = sum(1 for _ in found)
        except LakeupsertError as e:
            raise type(e)(e.code, f"Audit {name!r} of table {table.name!r}: {e.message}", next=e.next) from e
        if first:
            raise AuditError(
                "audit-failed",
                f"Table {table.name!r}: audit {name!r} finds {count(len(first) + more, 'row')} in batch {new.batch}: "
                f"{', '.join(map(_text, first))}{', …' if more else ''}. Nothing was published: readers see what they saw "
                "before.",
                next="land a correction and run again; or withdraw the batches with `lakeupsert restore published --yes`; or "
                "show them nevertheless with `lakeupsert publish --without-audit`",
            )


def _control_file(name: str, address: str) -> pa.Table:
    folder, _, file = address.rpartition("/")
    try:
        return pa_csv.read_csv(pa.py_buffer(open_store(folder).get(file)))
    except (NotFoundError, pa.ArrowInvalid) as e:
        problem = "is not there" if isinstance(e, NotFoundError) else f"can't be read as CSV with a header: {e}"
        raise ConfigurationError(
            "unfit-control-file",
            f"The control file {name!r}, {address}, {problem}. Nothing was published: readers see what they saw before.",
            next="write the file, and run again; or publish with `lakeupsert publish --without-audit`",
        ) from e


def _text(row: Mapping[str, object]) -> str:
    return "(" + ", ".join(f"{column} = {value}" for column, value in row.items()) + ")"
