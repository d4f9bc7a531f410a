"""Queries of the configuration that must find no row in what readers are to see next.

Reads     rows of the next snapshot and of the published one, as far as the queries ask for them; control files
Writes    nothing
Repeat    safe
"""

import pyarrow as pa
import pyarrow.csv as pa_csv

from lakeupsert.config.types import AUDIT_PUBLISHED
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.phrases import count
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.query import query
from lakeupsert.read.view import View
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import NotFoundError, open_store
from lakeupsert.table.snapshot import Snapshot

_HELD = "The batch is appended and merged, and not published: readers see what they saw before."
_PASS = "show it nevertheless with `lakeupsert publish --without-audit`"
ROWS_NAMED = 3
"""In the error of a query."""
NOT_ASKED = (
    "All batches are merged, and the newest is not published. A query of the setting `audit` may hold it: "
    "`lakeupsert publish` asks them."
)
"""For `status`, which runs no query."""


class AuditError(RefusedError):
    """A query finds a row, or can't be asked. The next batch, or a control file that comes late, may change that."""


def audit(table: OpenTable, shown: Snapshot | None, new: Snapshot) -> None:
    """Ask the queries of the setting `audit`.

    Raises AuditError: a query finds a row (``audit-failed``), or can't be asked (``audit-unfit``).
    """
    settings = table.settings.audit
    if settings is None:
        return
    objects, spec = table.history.objects, table.history.spec(new.spec_version)
    nothing = Snapshot(batch=0, spec_version=new.spec_version)
    # Under one spec: a new column is null before.
    tables: dict[str, View | pa.Table] = {
        name: View(objects, spec, one, None) for name, one in ((table.name, new), (AUDIT_PUBLISHED, shown or nothing))
    }
    tables |= {name: _control_file(table, name, address, spec.schema) for name, address in settings.files.items()}
    withdraw = "withdraw the batches with `lakeupsert restore published --yes`; or " if shown else ""
    for name, sql in settings.queries.items():
        first, rows = list[str](), 0
        try:
            with query(tables, sql) as found:
                for batch in found:
                    rows += batch.num_rows
                    first += _texts(batch.slice(0, ROWS_NAMED - len(first)))
        except ConfigurationError as e:
            raise _unfit(
                table, f"audit {name!r} can't be asked: {e.message.removesuffix(' Nothing was changed.')}"
            ) from e
        if rows:
            named = ", ".join(first) + (", …" if rows > len(first) else "")
            raise AuditError(
                "audit-failed",
                f"Table {table.name!r}: audit {name!r} finds {count(rows, 'row')} in batch {new.batch}: {named}. {_HELD}",
                next=f"land a correction and run again; or {withdraw}{_PASS}",
            )


def _control_file(table: OpenTable, name: str, address: str, schema: pa.Schema) -> pa.Table:
    """A column with the name of one of the table's has its type."""
    folder, _, file = address.rpartition("/")
    types = pa_csv.ConvertOptions(column_types={field.name: field.type for field in schema})
    try:
        return pa_csv.read_csv(pa.py_buffer(open_store(folder).get(file)), convert_options=types)
    except (NotFoundError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        problem = "is not there" if isinstance(e, NotFoundError) else f"can't be read as CSV with a header: {e}"
        raise _unfit(table, f"the control file {name!r}, {address}, {problem}") from e


def _unfit(table: OpenTable, found: str) -> AuditError:
    return AuditError(
        "audit-unfit",
        f"Table {table.name!r}: {found.rstrip('.')}. {_HELD}",
        next=f"correct it in [tables.{table.name}.audit], or write the file, and run again; or {_PASS}",
    )


def _texts(rows: pa.RecordBatch) -> list[str]:
    values = zip(*(to_json_values(column) for column in rows.columns), strict=True)
    return [f"({', '.join(f'{n} = {v}' for n, v in zip(rows.schema.names, row, strict=True))})" for row in values]
