"""A lease: which process works on a table, or reads a source. It decides who waits, and never what is committed."""

import msgspec


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One term of a leader.

    Attributes:
        holder: the process, for people.
        released: it has ended, and anybody may lead.
        ended_by: the code of the error that ended it.
        behind: how many messages of its source the holder has not landed; None: it does not know.
        trouble: why it can't work for now, or what threatens to stop it, for people.
    """

    holder: str
    released: bool = False
    ended_by: str = ""
    behind: int | None = None
    trouble: str = ""
