"""The place of a Debezium event in its database's log, as text that sorts like the log.

No single field of `source` gives that order (docs/FORMATS.md, "The order of events"; ADR 0045). PostgreSQL's `lsn` is the place
of a change and not of its commit, MySQL's file and place are a text and a number, and snapshots have no place of their own.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping

LOG_POSITION = "__log_position"
"""The column that the envelopes `debezium`, for the connectors of `NEEDED`, and `wal2json` add."""

NEEDED: dict[str, tuple[str, ...]] = {
    "postgresql": ("sequence",),
    "mysql": ("file", "pos"),
    "mariadb": ("file", "pos"),
    "sqlserver": ("commit_lsn",),
}
"""The fields of `source` that a position is made of, by connector. They are not null, also in events of a snapshot."""

CHANGE_PLACES = ("__source_lsn", "__lsn", "__source_change_lsn", "__source_file")
"""Columns with the place of a change in a log, which is not that of its commit or does not sort as it."""
EVENT_TIMES = ("__source_ts_us", "__source_ts_ns", "__source_ts_ms", "__ts_us", "__ts_ns", "__ts_ms")
"""Columns with times of events: of the commit, but of a row of a snapshot when it was read or sent."""
_LSN = re.compile(r"[0-9a-f]{8}:[0-9a-f]{8}:[0-9a-f]{4}")
"""Of SQL Server."""
_DIGITS = 19
NO_COMMIT = f"{0:019}-0-"
"""How a position of PostgreSQL in a snapshot begins that no commit was streamed before."""
AFTER_A_COMMIT = f"{1:019}"
"""Positions of PostgreSQL from this text on come after a commit that was streamed."""
_OF_POSTGRESQL = re.compile(r"[0-9]{19}-[01]-[0-9]{19}")


def log_position(source: object) -> str | None:
    """The position of an event with this ``source``; None if its connector has none here or a field is missing."""
    if type(source) is not dict:
        return None
    make = _POSITIONS.get(source.get("connector"))
    try:
        return None if make is None else make(source)
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def commit_position(commit: object, row: int) -> str | None:
    """The position of a row of a transaction of wal2json: the LSN after its commit, which is hexadecimal text of no fixed length,
    and its place in the transaction. None without an LSN."""
    parts = re.fullmatch(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", str(commit))
    return f"{(int(parts[1], 16) << 32) + int(parts[2], 16):020}-{row:010}" if parts else None


def is_first_snapshot(position: str) -> bool:
    """Whether an event of PostgreSQL is of the snapshot that a connector without a history takes."""
    return position.startswith(NO_COMMIT)


def noted_positions(positions: Iterable[str]) -> set[str]:
    """Those that show whether a connector for PostgreSQL began again: of each first snapshot, and the lowest after a commit."""
    # An incremental snapshot before the first commit has no place at all.
    found = {p for p in positions if _OF_POSTGRESQL.fullmatch(p) and p > f"{NO_COMMIT}{AFTER_A_COMMIT}"}
    return {*filter(is_first_snapshot, found), *sorted(p for p in found if p >= AFTER_A_COMMIT)[:1]}


def began_again(positions: Iterable[str], before: Iterable[str]) -> set[str]:
    """The first snapshots among `noted_positions` that are not the first: there is an earlier one, or a commit before it was
    streamed in a batch ``before``. In the batch of a snapshot, or a later one, it proves nothing: a slot that is older than the
    snapshot sends commits from before it (tests/capture)."""
    snapshots = sorted(filter(is_first_snapshot, positions))
    commits = [p for p in before if not is_first_snapshot(p)]
    return {s for s in snapshots if s != snapshots[0] or any(c[:_DIGITS] < s[-_DIGITS:] for c in commits)}


def _postgresql(source: Mapping[str, object]) -> str:
    """The end of the last commit before the event, 0 for a snapshot and 1 for a change, the place of the change.

    Transactions are streamed one after another in the order of their commits. A transaction that was open while the snapshot was
    read has lower LSNs than the snapshot, and yet its commit comes after it. A row of an incremental snapshot comes after every
    commit before it, and loses to every change after it.
    """
    commit, change = json.loads(str(source["sequence"]))
    is_change = str(source.get("snapshot") or "false").lower() == "false"
    return f"{_number(commit):019}-{is_change:d}-{_number(change):019}"


def _mysql(source: Mapping[str, object]) -> str:
    """The number of the binary log, the place in it, and the row of the event. The log is written in the order of commits."""
    number = _number(str(source["file"]).rpartition(".")[2], digits=10)
    return f"{number:010}-{_number(source['pos']):019}-{_number(source.get('row'), digits=10):010}"


def _sqlserver(source: Mapping[str, object]) -> str:
    """LSNs are hexadecimal texts of one length. A snapshot has no LSN of a change, so it loses to the changes of its commit."""
    lsns = [str(source["commit_lsn"]).lower(), str(source.get("change_lsn") or "").lower()]
    if not _LSN.fullmatch(lsns[0]) or not (lsns[1] == "" or _LSN.fullmatch(lsns[1])):
        raise ValueError(lsns)
    return f"{'-'.join(lsns)}-{_number(source.get('event_serial_no'), digits=10):010}"


def _number(value: object, digits: int = 19) -> int:
    """The whole number that ``value`` is, also as text; 0 for null. Raises ValueError if it is none."""
    text = "0" if value is None else str(value)
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", text):
        raise ValueError(text)
    return int(text)


_POSITIONS: dict[object, Callable[[Mapping[str, object]], str]] = {
    "postgresql": _postgresql,
    "mysql": _mysql,
    "mariadb": _mysql,
    "sqlserver": _sqlserver,
}
