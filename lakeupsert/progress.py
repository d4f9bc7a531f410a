"""How far a call is, told to whoever started it: texts, of which some know their share of the whole."""

from collections.abc import Callable


class Share(str):
    """A text about work of which a known part is done.

    Attributes:
        done, total: in one unit, for example bytes or partitions.
        whole: they are of the whole call, not only of its current step.
    """

    done: float
    total: float
    whole: bool

    def __new__(cls, text: str, done: float, total: float, *, whole: bool = False) -> "Share":
        share = super().__new__(cls, text)
        share.done, share.total, share.whole = done, total, whole
        return share


class NightProgress:
    """Tells the shares of a night's steps as shares of the night; without earlier nights, as what they are.

    Publishing takes a few requests and has no share.
    """

    def __init__(self, progress: Callable[[str], None], append_part: float | None) -> None:
        """``append_part``: the part of a night's time that its append takes, learned from earlier nights."""
        self._progress, self._append_part = progress, append_part
        self._done, self._begun_at = 0.0, append_part or 0.0

    def append(self, text: str) -> None:
        if isinstance(text, Share):
            self._begun_at = 0.0  # otherwise nothing was new, and the night begins with its merges
        self._tell(text, 0.0, self._append_part or 0.0)

    def merge(self, text: str) -> None:
        before = self._append_part or 0.0
        self._tell(text, before, 1 - before)

    def _tell(self, text: str, before: float, part: float) -> None:
        if isinstance(text, Share):
            self._done = before + part * text.done / max(text.total, 1)
        if self._append_part is not None and self._done >= self._begun_at and self._done > 0:
            text = Share(text, self._done - self._begun_at, 1 - self._begun_at, whole=True)
        self._progress(text)


class Countdown:
    """Tells the share of work of which only what is left is known, as of messages in a queue."""

    def __init__(self, what: str, progress: Callable[[str], None]) -> None:
        """``what``: for example ``merging partitions``."""
        self._what, self._progress = what, progress
        self._most = 0

    def __call__(self, left: int) -> None:
        self._most = max(self._most, left)
        self._progress(Share(f"{self._what}, {left:,} left", self._most - left, self._most))
