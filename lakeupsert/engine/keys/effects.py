"""The effects of the key index on the rows of a batch: each is a table of rows of one range.

`PARTITION` is the partition that a row gets, `ALONE` says that it landed without one.
"""

from dataclasses import dataclass

from lakeupsert.rows.arrays import Rows
from lakeupsert.table.ledger import Reason

ALONE = "_lakeupsert_alone"
"""Boolean column: the row landed without a partition."""


@dataclass(frozen=True)
class _OfRows:
    rows: Rows


class Superseded(_OfRows):
    """Landed rows that lost: to a record in another partition, or within their batch."""


class Placed(_OfRows):
    """Landed rows that count in another partition than they landed in, or landed without one. They are written again there."""


@dataclass(frozen=True)
class Refused(_OfRows):
    """Landed rows for quarantine."""

    reason: Reason


class Left(_OfRows):
    """Deletes for the partitions that keys leave, in `PARTITION`; `MOVED_TO` is where the keys are now."""


class Copied(_OfRows):
    """Deletes for one more partition, in `PARTITION`, than their own, in `MOVED_TO`."""


class Moved(_OfRows):
    """Stored records whose keys move from the partition in `PARTITION` to that in `MOVED_TO`, with all that is known of them."""


class Ended(_OfRows):
    """Late deletes that killed the record that had named the partition in `PARTITION`. No record is left that names one; newer
    ones go to quarantine. Their stored records are `Moved`, to `UNPLACED`."""


class Indexed(_OfRows):
    """The records of the index that change."""


@dataclass(frozen=True)
class Unknown:
    """So many deletes name no partition, and their keys have no record."""

    count: int


Effect = Superseded | Placed | Refused | Left | Copied | Moved | Ended | Indexed | Unknown
