"""Which one of several processes works on a table (`ingest`, `maintain`), or reads a source.

Reads     the chain of leases
Writes    a lease every third of `LEADER_SECONDS`, and deletes the one before it
Repeat    safe: a lease keeps no row right or wrong, it only spares two processes the races that one of them would lose

    newest lease -- mine, released, or unchanged for too long --> append mine -- won --> lead
                 '-- another's, and it changes ------------------------------- lost --> wait

Nobody compares clocks of two machines: who waits measures how long the newest lease has not changed.
"""

import os
import socket

from lakeupsert import clock
from lakeupsert.retries import LEADER_SECONDS
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.lease import Lease


def this_process() -> str:
    """The holder of a lease of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Leadership:
    """The wish of this process to lead a table, or one of its sources.

    Attributes:
        leader: the process that led at the last look.
        behind, trouble: go into the next lease.
        took_over: the process that led before has not ended as it should.
    """

    def __init__(
        self, objects: TableObjects, seconds: float = LEADER_SECONDS, chain: Chain[Lease] | None = None
    ) -> None:
        """``chain``: of the leases; None: those of `ingest`."""
        self._store, self._seconds, self._chain = objects.store, seconds, chain or objects.leases
        self._me = this_process()
        self._seen: Link[Lease] | None = None
        self._mine: str | None = None
        self._changed_at = clock.elapsed()
        self.leader: str | None = None
        self.behind: int | None = None
        self.trouble = ""
        self.took_over = False

    def lead(self) -> bool:
        """Whether this process leads. Takes the lease or renews it where it may."""
        if self.leads and clock.elapsed() - self._changed_at < self._seconds / 3:
            return True
        newest = self._chain.head(self._seen)
        if (newest and newest.write_id) != (self._seen and self._seen.write_id):
            self._seen, self._changed_at = newest, clock.elapsed()
        alive = newest is not None and not newest.body.released and clock.elapsed() - self._changed_at < self._seconds
        if not alive or self.leads:
            is_new = not self.leads and newest is not None and not newest.body.released
            self._append(newest, Lease(holder=self._me, behind=self.behind, trouble=self.trouble))
            self.took_over |= is_new and self.leads
        self.leader = self._seen.body.holder if self._seen else None
        return self.leads

    def release(self, ended_by: str = "") -> None:
        """Let another process lead without waiting. ``ended_by``: the code of the error that ends this one."""
        if self.leads:
            self._append(self._seen, Lease(holder=self._me, released=True, ended_by=ended_by))
            self._mine = None

    @property
    def leads(self) -> bool:
        return self._seen is not None and self._seen.write_id == self._mine

    def _append(self, newest: Link[Lease] | None, lease: Lease) -> None:
        won = self._chain.append(lease, newest).link
        if won is None:
            return
        self._seen, self._mine, self._changed_at = won, won.write_id, clock.elapsed()
        if newest is not None:
            self._store.delete([self._chain.name(newest.number)])
