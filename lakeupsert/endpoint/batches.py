"""Batches that clients send: each becomes one landing file, once.

Reads     the claim of the batch's id; if there is one, the landing file's entry and, if that is gone, the ledger
Writes    the spec if columns come or grow, a claim in the processed zone, then the landing file; all by `ObjectStore.create`
Repeat    safe: a claim has the digest of the body, so the same id is the same batch or is refused

After a crash between the two creates, the next request with the same id and body creates the landing file.
"""

import hashlib
import json
import threading
from contextlib import suppress

from lakeupsert.endpoint.check import accept_rows, as_parquet
from lakeupsert.endpoint.client import ARROW
from lakeupsert.endpoint.gate import LATER
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.formats.registry import is_read
from lakeupsert.pipeline.append.landing_dates import received_on
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import NotFoundError, StoreUnavailableError, UnknownOutcomeError, can_commit, open_own_folder
from lakeupsert.table.layout import HOME

FOLDER = "endpoint"
"""The folder of the landing files."""
ENDINGS = {
    ARROW: ".parquet",
    "application/vnd.apache.parquet": ".parquet",
    "text/csv": ".csv",
    "application/x-ndjson": ".jsonl",
    "application/json": ".json",
}
"""The ending of the landing file for each type of content."""
_STRIPES = 64
_KNOWN_FILES = 10_000
"""How many landing files are known to be stored, with their claims: 4 MB."""


class Batches:
    """Takes the batches of one table, from any thread. Raises ConfigurationError if it can't land files there."""

    def __init__(self, table: OpenTable) -> None:
        self.table = table
        address, pattern = table.settings.landing, table.settings.landing_dates
        if not can_commit(address) or received_on(f"{FOLDER}/x", pattern) is None:
            why = f"`landing_dates` is {pattern}" if pattern else f"the landing zone {address} can only be read"
            raise ConfigurationError(
                "not-servable",
                f"Table {table.name!r} can't take rows by HTTP: {why}. The server was not started.",
                next="name another --table, or give this one a landing zone without dates that can be written to",
            )
        self._landing = open_own_folder(address, FOLDER)
        self._endings = {t: ending for t, ending in ENDINGS.items() if is_read(ending, table.settings.format)}
        self._history = threading.Lock()
        self._stored: dict[str, bytes] = {}
        # One request an id at a time: the loser of a create would answer before the winner has synced the folder.
        self._turns = [threading.Lock() for _ in range(_STRIPES)]

    def receive(self, batch_id: str, content_type: str, body: bytes) -> bool:
        """Store a batch; whether an earlier request stored it. Raises RefusedError, and the errors of the stores."""
        type_ = content_type.partition(";")[0].strip().lower()
        if type_ not in self._endings:
            found = f"A body of type {type_ or 'none'} is not supported; expected: {', '.join(self._endings)}."
            raise ConfigurationError("content-type", f"{found} Nothing was stored.", next="send one of these types")
        file = f"{batch_id}{ENDINGS[type_]}"
        prefix = self.table.settings.delete and self.table.settings.delete.file_prefix
        if prefix and file.startswith(prefix):
            found = f"All rows of {file!r} would be deletes, by `delete.file_prefix` ({prefix!r}). Nothing was stored."
            raise RefusedError("bad-batch-id", found, next="begin the id with other letters")
        with self._turns[hash(batch_id) % _STRIPES]:
            try:
                return self._store(batch_id, file, body, is_arrow=type_ == ARROW)
            except UnknownOutcomeError as e:
                found = f"{self._landing.uri()}: whether batch {batch_id!r} was stored is not known."
                raise StoreUnavailableError("store-unreachable", found, next=LATER) from e

    def _store(self, batch_id: str, file: str, body: bytes, *, is_arrow: bool) -> bool:
        store, name, path = self.table.resources.store, f"{HOME}/batches/{batch_id}.json", f"{FOLDER}/{file}"
        claim = json.dumps({"file": path, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        known = None
        with suppress(NotFoundError):
            known = store.get(name)
        data = as_parquet(body) if is_arrow else body
        if known == claim and self._is_stored(path, data, claim):
            return True
        stored = "Nothing was stored."
        if known is None:
            accept_rows(self.table, path, data, self._history)
            stored = "No row was stored, but new columns of these rows may be in the table."
            known = None if store.create(name, claim) else store.get(name)
        if known in (None, claim):
            if self._landing.create(path, data):
                if len(self._stored) == _KNOWN_FILES:
                    self._stored.clear()
                self._stored[path] = claim
                return False
            if self._is_stored(path, data, claim):
                return True
        found = f"Batch id {batch_id!r} was used for another body, or another type of content. {stored}"
        raise RefusedError("batch-id-taken", found, next="send these rows with another id")

    def _is_stored(self, path: str, data: bytes, claim: bytes) -> bool:
        """Whether the landing file is there, or a batch took it before somebody removed it. Another's file may have its name."""
        found = self._landing.head(path)
        if found is not None and found.size == len(data):
            if self._stored.get(path) == claim:
                return True  # only a repetition after a restart reads the file
            with suppress(NotFoundError):
                if self._landing.get(path) == data:
                    return True
        digest = hashlib.sha256(data).hexdigest()
        with self._history:
            head = self.table.history.newest_entry()
            entries = self.table.history.headers(head.number) if head else []
        return any((file.path, file.sha256) == (path, digest) for entry in entries for file in entry.files)
