"""An entry of the chain that a copy of a table has: the objects of one backup (docs/BACKUPS.md)."""

import msgspec


class BackupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One backup. The first entry of the chain has no objects: it says whose copy this is.

    Attributes:
        table_id: the table's.
        snapshot: the newest one; None: nothing is published.
        batch: the newest entry of the ledger; -1: there is none. All entries up to it belong to the backup.
        metadata: names of all other metadata.
        files: names of data files, deletion vectors, quarantine files and the key index, each with its bytes.
    """

    table_id: str
    snapshot: int | None = None
    batch: int = -1
    metadata: list[str] = []
    files: dict[str, int] = {}
