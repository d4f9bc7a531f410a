"""The dates of landing files by `landing_dates`, their order, and the warning about files that are skipped without a date."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from lakeupsert.landing.formats.registry import UNKNOWN, format_of

_PARTS = re.compile(
    r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"  # a UUID
    # A time of day or of an epoch with a fraction. 1.9 and 2024.9.30 are versions and dates, whose parts count.
    r"|(?<![0-9A-Za-z])(?:(?:[0-9]*T|(?<=[_ ])|(?<=[0-9]-))[0-9]{2}[-:]?[0-9]{2}[-:]?[0-9]{2}|[A-Za-z]*(?:[0-9]{14}|[0-9]{10}))"
    r"\.[0-9]+(?!\.?[0-9])"
    r"|(?P<word>[0-9A-Za-z]+)"
)
_ID = re.compile(
    r"(?=(?:[0-9]+[A-Za-z]+){3}|(?:[A-Za-z]+[0-9]+){3}).{20,}"
    r"|(?=(?:[0-9]+[A-Za-z]+){2}|(?:[A-Za-z]+[0-9]+){2})(?:[0-9a-v]{20}|[0-9A-HJKMNP-TV-Z]{26})"
    r"|(?=.*[0-9])(?=.*[A-Za-z])(?:[0-9a-f]{24}|[0-9a-f]{32}|[0-9A-HJKMNP-TV-Z]{13}|(?=.*[a-z].*[A-Z].*[a-z]).{27})"
)
"""An identifier of mixed letters and digits that sorts as text: ULID, KSUID, xid, ObjectId, and TSID, which has 13 characters."""
_NUMBER = re.compile("[0-9]+")
_LONGEST_NUMBER = 64
"""Digits of the longest number that is compared as one: as long as a hash."""
_NEVER = datetime.min.replace(tzinfo=UTC)
COMMON_PATTERNS = ("%Y-%m-%d", "%Y%m%d", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y")


@dataclass(frozen=True)
class Skipped:
    """Landing files that no batch takes, because of their names.

    Attributes:
        files: how many files are skipped, ``of`` how many that were listed.
        why: what is wrong with the first of them.
        fitting: common patterns by which all listed files would have a date, except strays (`is_stray`).
        strays: how many of the skipped files are strays.
    """

    files: int
    of: int
    why: str
    fitting: tuple[str, ...]
    strays: int = 0

    @property
    def is_all(self) -> bool:
        """Whether every listed file is skipped, and not all of them are strays."""
        return self.strays < self.files == self.of

    @property
    def advice(self) -> str:
        if self.fitting:
            return f"Try {' or '.join(map(_quoted, self.fitting))}."
        return "Correct `landing_dates`, or move these files."

    def __str__(self) -> str:
        return f"skipped {self.files:,} of {self.of:,} file{'' if self.of == 1 else 's'}: {self.why}. {self.advice}"


def received_on(path: str, pattern: str) -> date | None:
    """The date of the folder that a file was received in; None if the path has no date or is not UTF-8."""
    at = _received_at(path, pattern)
    return at and at.date()


def _received_at(path: str, pattern: str) -> datetime | None:
    try:
        path.encode()
        folders = "/".join(path.split("/")[: pattern.count("/") + 1])
        return datetime.strptime(folders, pattern).replace(tzinfo=UTC) if pattern else _NEVER
    except ValueError:  # also UnicodeEncodeError: the ledger can't hold a name that is not UTF-8
        return None


def arrival_order(path: str, pattern: str) -> tuple[datetime, str, str]:
    """What sorts the files of a batch: the date and time of their folder, then the path, in which numbers count as numbers.

    So `2.csv` is before `10.csv`, `9h.csv` before `10h.csv`, and `01/02/2021/` after `31/01/2021/` if the day comes first in
    ``pattern``. Names that are made to sort as text stay text: UUIDs, identifiers such as ULIDs, and fractions of seconds.
    """

    def padded(found: re.Match[str]) -> str:
        word = found["word"]
        if word is None or _ID.fullmatch(word):
            return found[0]
        return _NUMBER.sub(lambda number: number[0].zfill(_LONGEST_NUMBER), word)

    return _received_at(path, pattern) or _NEVER, _PARTS.sub(padded, path), path


def is_stray(path: str, pattern: str, configured: str) -> bool:
    """Whether a file was not received on a date, for example a README: it is in no folder, or has no format by ``configured``,
    the setting `format`."""
    return bool(pattern) and ("/" not in path or format_of(path, configured) is UNKNOWN)


def describe_skipped(
    pattern: str, configured: str, paths: Sequence[str], of: int, folders: Collection[str]
) -> Skipped | None:
    """The ``paths`` that have no date, among ``of`` listed files; None if there are none.

    ``configured`` as in `is_stray`; ``folders`` are those of all listed files that are not strays.
    """
    if not paths:
        return None
    dated = [path for path in paths if not is_stray(path, pattern, configured)]
    strays = len(paths) - len(dated)
    path = next(filter(_is_text, dated or paths), None)
    if path is None:
        return Skipped(len(paths), of, f"the name {paths[0]!r} is not UTF-8", (), strays)
    folder = "/".join(path.split("/")[:-1][: pattern.count("/") + 1])
    where = (
        f"folder {_quoted(folder)} does not match"
        if folder
        else f"file {_quoted(path)} is not in a folder that matches"
    )
    return Skipped(len(paths), of, f"{where} landing_dates {_quoted(pattern)}", fitting(folders), strays)


def fitting(folders: Collection[str]) -> tuple[str, ...]:
    """Common patterns by which all these folders of the landing zone are dates, also if they are called `dt=…`."""
    if not folders:
        return ()
    first = min(folders).split("/")
    named = [re.match(r"[^=]+=", part) for part in first]
    prefixes = [name[0].replace("%", "%%") if name else "" for name in named]
    patterns = (
        "/".join(prefix + part for prefix, part in zip(prefixes, common.split("/"), strict=False))
        for common in COMMON_PATTERNS
        if common.count("/") < len(first)
    )
    return tuple(p for p in patterns if all(received_on(f"{folder}/file", p) for folder in folders))


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quoted(text: str) -> str:
    """The text as TOML writes it, so that it can be copied."""
    return json.dumps(text, ensure_ascii=False)
