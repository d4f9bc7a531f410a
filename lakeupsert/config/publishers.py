"""The publishers, and what the rest of lakeupsert must know of each one, which knows none by its name.

A new one is an entry here and the module of that name in `publishers/`, with `open_publisher`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PublisherName = Literal["delta", "iceberg", "hive", "glue"]


@dataclass(frozen=True)
class PublisherKind:
    """Properties of a publisher, mostly of the engines that read its table.

    Attributes:
        settings: they need this publisher; written as in `config.exclusions`.
        section: it needs the section ``[tables.NAME.…]`` of its name.
        extra: the pip extra of its packages; "": it needs none.
        plain_files: its readers know no deletion vectors, so merges rewrite.
        plain_folders: some of its readers find no deletion vector in folders with escaped names.
        by_name: its readers look for a column by one name in all files.
    """

    settings: tuple[str, ...] = ()
    section: bool = True
    extra: str = ""
    plain_files: bool = False
    plain_folders: bool = False
    by_name: bool = False


PUBLISHERS: Mapping[PublisherName, PublisherKind] = {
    "delta": PublisherKind(
        ('delta_vectors = "inline"', 'delta_timestamps = "utc"'), section=False, plain_folders=True, by_name=True
    ),
    "iceberg": PublisherKind(extra="iceberg"),
    "hive": PublisherKind(extra="hive", plain_files=True, by_name=True),
    "glue": PublisherKind(extra="aws", plain_files=True, by_name=True),
}
