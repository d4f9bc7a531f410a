"""pyiceberg, by its SQL catalog."""

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from worker import Request, serve


def read(request: Request) -> pa.Table:
    name, identifier = request.name.split(".", 1)
    table = SqlCatalog(name, uri=f"sqlite:///{request.catalog}").load_table(identifier)
    return table.scan(selected_fields=tuple(request.columns or "*"), snapshot_id=request.version).to_arrow()


serve(read)
