"""pyiceberg, by its SQL or REST catalog."""

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from worker import Request, serve


def read(request: Request) -> pa.Table:
    name, identifier = request.name.split(".", 1)
    uri = request.catalog if request.has_rest_catalog else f"sqlite:///{request.catalog}"
    table = load_catalog(name, type="rest" if request.has_rest_catalog else "sql", uri=uri).load_table(identifier)
    return table.scan(selected_fields=tuple(request.columns or "*"), snapshot_id=request.version).to_arrow()


serve(read)
