"""Every function begins here: the tables of the configuration that LAKEUPSERT_CONFIG names, such as s3://lake/lakeupsert.toml.

It is read in each call, so that a change of it holds from the next call on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lakeupsert import ConfigurationError, Table
from lakeupsert.config import load
from lakeupsert.storage import s3  # noqa: F401  boto3 is imported while the function begins, when it has the most processor


@contextmanager
def configured() -> Iterator[list[Table]]:
    """All tables, in the order of the file."""
    config = load(os.environ["LAKEUPSERT_CONFIG"])
    tables = [Table(name, settings, origins=config.origins[name]) for name, settings in config.tables.items()]
    try:
        yield tables
    finally:
        for table in tables:
            table.close()


@contextmanager
def of_queue(arn: str) -> Iterator[Table]:
    """The table whose queue this is: a message names its table, but only the configuration says where a table is."""
    *_, account, name = arn.split(":")
    with configured() as tables:
        for table in tables:
            if table.settings.queue in (f"sqs://{name}", f"sqs://{account}/{name}"):
                yield table
                return
    raise ConfigurationError(
        "no-table-of-queue",
        f"No table of {os.environ['LAKEUPSERT_CONFIG']} has the queue {arn}. Its messages were not touched.",
        next="set `queue` of a table to it, or remove it from the function's event sources",
    )
